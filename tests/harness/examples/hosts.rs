//! Test hosts for a shell script: `hosts DIR COUNT` makes hosts h1 to hCOUNT that share DIR, prints the PID of each
//! one's PID 1 on a line of its own, and ends them with its standard input. A command runs on a host by `nsenter -t PID
//! -a`, with `DIR/rsh` in front of PATH for `ssh`.

use belay_tests::hosts::{serve_if_asked, Hosts};
use std::io::Read;
use std::path::Path;

fn hosts(args: &[String]) -> Result<(), String> {
    let [dir, count] = args else {
        return Err("usage: hosts DIR COUNT".into());
    };
    let count = count.parse().map_err(|e| format!("{count}: {e}"))?;
    let hosts = Hosts::new(Path::new(dir), count)?;
    for n in 1..=count {
        println!("{}", hosts.init(n));
    }
    let mut rest = Vec::new();
    std::io::stdin()
        .read_to_end(&mut rest)
        .map_err(|e| format!("standard input: {e}"))?;
    Ok(())
}

fn main() {
    serve_if_asked();
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Err(e) = hosts(&args) {
        eprintln!("hosts: {e}");
        std::process::exit(1);
    }
}
