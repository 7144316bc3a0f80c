//! Checkpoints of programs that compute on all processors, beside those of the same program while it waits: in turn, in
//! one run of it, since the machine is others' too.
//!
//! With `--other BELAY` the same with another build in turn.

use crate::measure::{ratio, Job, Samples};
use crate::Plan;
use std::time::Duration;

/// How long the threads do what they were told before a checkpoint is taken.
const SETTLE: Duration = Duration::from_millis(100);

/// Processes and threads of each.
const PROGRAMS: [(&str, &str); 3] = [("1", "64"), ("4", "4"), ("64", "1")];

/// Blocked time and time of the command while a program waits, and while it computes.
pub(crate) fn busy(p: &Plan) -> Result<(), String> {
    for (processes, threads) in PROGRAMS {
        let name = format!("{processes} x {threads} threads");
        let mut builds = vec![("", p.with(p.belay.clone()))];
        builds.extend(p.other.iter().map(|other| (" (other)", p.with(other.clone()))));
        let mut figures: Vec<[[Samples; 2]; 2]> = builds.iter().map(|_| Default::default()).collect();
        for _ in 0..p.runs {
            for ((_, p), figures) in builds.iter().zip(&mut figures) {
                round(p, (processes, threads), figures)?;
            }
        }
        for ((build, _), [idle, loaded]) in builds.iter().zip(&figures) {
            for (i, what, goal) in [(0, "blocked", "<= 2"), (1, "command", "<= 3")] {
                idle[i].print(&format!("{name}{build}: {what}, waiting"), "ms");
                loaded[i].print(&format!("{name}{build}: {what}, computing"), "ms");
                ratio(
                    &format!("{name}{build}: {what}, computing to waiting"),
                    &loaded[i],
                    &idle[i],
                    goal,
                );
            }
        }
    }
    Ok(())
}

/// One run of the program, with checkpoints in turn.
fn round(p: &Plan, (processes, threads): (&str, &str), figures: &mut [[Samples; 2]; 2]) -> Result<(), String> {
    std::fs::remove_dir_all(p.dir.join("job")).ok();
    let mut job = Job::launch_apart(p, &["busy", processes, threads])?;
    job.line()?;
    for turn in 0..4 {
        for (what, [blocked, command]) in ["wait", "compute"].iter().zip(&mut *figures) {
            job.tell(what)?;
            std::thread::sleep(SETTLE);
            let (t, v) = Job::checkpoint(p)?;
            // The first of a job stores all of it.
            if turn > 0 {
                blocked.push(v["blocked_ms"].as_f64().unwrap_or(f64::NAN));
                command.push(t);
            }
        }
        job.tell("wait")?;
    }
    job.stop(p)
}
