//! A 1 MiB process, and what 512 threads add.

use crate::measure::{ms, run, Job, Samples};
use crate::Plan;
use std::process::Command;

/// Blocked time, checkpoint command and restart of a 1 MiB process.
pub(crate) fn small(p: &Plan) -> Result<(), String> {
    let (mut blocked, mut command, mut restart) = (Samples::default(), Samples::default(), Samples::default());
    std::env::set_var("BELAY_BENCH_TICK", "1");
    let mut job = Job::launch(p, &["memory", "1048576"])?;
    job.line()?;
    for _ in 0..p.runs * 4 {
        let (t, v) = Job::checkpoint(p)?;
        command.push(t);
        blocked.push(v["blocked_ms"].as_f64().unwrap_or(f64::NAN));
    }
    for _ in 0..p.runs * 2 {
        run(Command::new(&p.belay)
            .arg("checkpoint")
            .arg(p.dir.join("job"))
            .args(["--then", "stop"]))?;
        drop(job);
        let (t, j) = ms(|| {
            let mut j = Job::restart(p, &[])?;
            j.line()?;
            Ok(j)
        })?;
        restart.push(t);
        job = j;
    }
    std::env::remove_var("BELAY_BENCH_TICK");
    blocked.print("1 MiB: blocked (goal <= 3)", "ms");
    command.print("1 MiB: checkpoint command (goal <= 60)", "ms");
    restart.print("1 MiB: restart to first output (goal <= 60)", "ms");
    job.stop(p)
}

/// Blocked time with one thread and with 512 more.
pub(crate) fn threads(p: &Plan) -> Result<(), String> {
    let mut medians = Vec::new();
    for n in ["0", "512"] {
        std::fs::remove_dir_all(p.dir.join("job")).ok();
        let mut job = Job::launch(p, &["threads", n])?;
        job.line()?;
        let mut s = Samples::default();
        for _ in 0..p.runs * 2 {
            s.push(Job::checkpoint(p)?.1["blocked_ms"].as_f64().unwrap_or(f64::NAN));
        }
        s.print(&format!("blocked with {n} more threads"), "ms");
        medians.push(s.median());
        job.stop(p)?;
    }
    println!("{:<44} {:>10.3} ms    goal <= 20", "512 threads add", medians[1] - medians[0]);
    Ok(())
}
