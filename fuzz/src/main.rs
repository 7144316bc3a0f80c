//! `belay-fuzz [--seconds N] [--seed S] [--input FILE] [TARGET...]`: runs the targets one after the other; with a file,
//! executes just that.

use belay_fuzz::{engine, guard, targets};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: guard::Counting = guard::Counting::new();

fn main() {
    let mut seconds = 600;
    let mut seed = std::process::id().into();
    let (mut input, mut wanted) = (None, Vec::new());
    let mut args = std::env::args().skip(1);
    let number = |v: Option<String>| v.and_then(|v| v.parse().ok()).unwrap_or_else(|| usage());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--seconds" => seconds = number(args.next()),
            "--seed" => seed = number(args.next()),
            "--input" => input = args.next(),
            name if targets::ALL.iter().any(|t| t.name == name) => wanted.push(arg),
            _ => usage(),
        }
    }
    guard::install();
    for target in targets::ALL
        .iter()
        .filter(|t| wanted.is_empty() || wanted.iter().any(|w| w == t.name))
    {
        if let Some(path) = &input {
            match std::fs::read(path) {
                Ok(data) => guard::execute(target.name, target.run, &data),
                Err(e) => eprintln!("{path}: {e}"),
            }
            continue;
        }
        let out = engine::run(target, Duration::from_secs(seconds), seed);
        println!(
            "{:15} {:10} executions, {} inputs and {} found, {} of {} counters reached, seed {seed}",
            target.name, out.executions, out.inputs.0, out.inputs.1, out.reached.0, out.reached.1
        );
    }
}

fn usage() -> ! {
    let names: Vec<&str> = targets::ALL.iter().map(|t| t.name).collect();
    eprintln!(
        "usage: belay-fuzz [--seconds N] [--seed S] [--input FILE] [TARGET...]\ntargets: {}",
        names.join(" ")
    );
    std::process::exit(2)
}
