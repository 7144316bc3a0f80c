//! What it costs a program to say what its loops do: where no agent looks, and where one does.

use crate::measure::{run, Job, Samples};
use crate::verbs::compile;
use crate::Plan;
use std::path::Path;
use std::process::Command;

/// Before and after the first checkpoint, from which on an agent looks, in the same process.
pub(crate) fn access(p: &Plan) -> Result<(), String> {
    let lib = p.belay.parent().unwrap_or(Path::new("."));
    let program = p.dir.join("loop");
    std::fs::write(
        p.dir.join("belay_access.h"),
        include_str!("../../capi/include/belay_access.h"),
    )
    .map_err(|e| format!("write belay_access.h: {e}"))?;
    // The name by which programs know it.
    let named = p.dir.join("libbelay.so.0");
    std::os::unix::fs::symlink(lib.join("libbelay.so"), &named).map_err(|e| format!("link libbelay.so: {e}"))?;
    let (include, rpath) = (format!("-I{}", p.dir.display()), format!("-Wl,-rpath,{}", p.dir.display()));
    compile(&program, include_str!("access_loop.c"), &[&include, &rpath], Some(&named))?;
    let mut all: [[Samples; 5]; 2] = Default::default();
    for _ in 0..p.runs {
        let mut job = Job::launch_program(p, &["--access", "deferred"], &program)?;
        for of in &mut all {
            for _ in 0..4 {
                let said = job.ask()?;
                let numbers: Vec<f64> = said.split_whitespace().filter_map(|n| n.parse().ok()).collect();
                let [whole, parts, without, with] = numbers[..] else {
                    return Err(format!("the loop said {said:?}"));
                };
                let more = [whole, parts, without, with, (with / without - 1.0) * 100.0];
                of.iter_mut().zip(more).for_each(|(samples, n)| samples.push(n));
            }
            Job::checkpoint(p)?;
        }
        job.end()?;
        run(Command::new(&p.belay).args(["gc", "--all"]).arg(p.dir.join("job")))?;
    }
    for (when, [whole, parts, without, with, more]) in ["no agent looks", "an agent looks"].iter().zip(&all) {
        whole.print(&format!("enter and leave, four uses, {when}, goal <= 60"), "ns");
        parts.print(&format!("the same of parts in three dimensions, {when}"), "ns");
        without.print("loop of 10 us", "ns");
        with.print(&format!("the same, declared, {when}"), "ns");
        more.print("more, goal <= 0.5", "%");
    }
    Ok(())
}
