//! What the library in front of libibverbs costs: a post and its poll, and a poll that finds nothing, with a provider
//! that does nothing behind it, and without the library.

use crate::measure::{run, Samples};
use crate::Plan;
use std::path::Path;
use std::process::Command;

/// Requests of one process: some tens of milliseconds.
const COUNT: &str = "1000000";

/// Native and through the library in turn.
pub(crate) fn verbs(p: &Plan) -> Result<(), String> {
    let library = p.belay.with_file_name("libbelay_verbs.so");
    let (program, provider) = (p.dir.join("loop"), p.dir.join("libibverbs.so.1"));
    let shared = ["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"];
    compile(&provider, include_str!("verbs_null.c"), &shared, None)?;
    compile(&program, include_str!("verbs_loop.c"), &[], Some(&provider))?;
    let measured = |through: bool| -> Result<[f64; 2], String> {
        let mut c = Command::new(&program);
        c.arg(COUNT).env("LD_LIBRARY_PATH", &p.dir);
        if through {
            c.env("LD_PRELOAD", &library);
        }
        let said = run(&mut c)?;
        let mut numbers = said.split_whitespace().map(str::parse::<f64>);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(both)), Some(Ok(empty))) => Ok([both, empty]),
            _ => Err(format!("the loop said {said:?}")),
        }
    };
    let mut all: [[Samples; 3]; 2] = Default::default();
    for pair in 0..p.runs * 8 {
        let (native, through) = if pair % 2 == 0 {
            let native = measured(false)?;
            (native, measured(true)?)
        } else {
            let through = measured(true)?;
            (measured(false)?, through)
        };
        for (i, of) in all.iter_mut().enumerate() {
            of[0].push(native[i]);
            of[1].push(through[i]);
            of[2].push(through[i] - native[i]);
        }
    }
    for (name, [native, through, more]) in ["post and poll", "poll that finds nothing"].iter().zip(&all) {
        native.print(&format!("{name} native"), "ns");
        through.print(&format!("{name} through the library"), "ns");
        more.print(&format!("{name} difference of a pair, goal <= 15"), "ns");
    }
    Ok(())
}

/// Has a program or a library made of `source`.
pub(crate) fn compile(to: &Path, source: &str, options: &[&str], with: Option<&Path>) -> Result<(), String> {
    let from = to.with_extension("c");
    std::fs::write(&from, source).map_err(|e| format!("write {}: {e}", from.display()))?;
    let mut c = Command::new("cc");
    c.arg("-O2").args(options).arg("-o").arg(to).arg(from);
    run(c.args(with)).map(drop)
}
