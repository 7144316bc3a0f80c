//! What a computing application loses while it is checkpointed and the checkpoint is copied to a durable tier: two
//! ranks that change all of their memory all the time.

use crate::measure::{run, Job, Samples};
use crate::Plan;
use std::process::Command;
use std::time::{Duration, Instant};

/// Time over which the undisturbed speed is measured.
const WINDOW: Duration = Duration::from_secs(4);
/// One checkpoint in this time.
const INTERVAL: f64 = 60.0;

/// Units of work done so far.
fn units(job: &mut Job) -> Result<f64, String> {
    job.ask()?.parse().map_err(|e| format!("worker: {e}"))
}

/// Units per second of the undisturbed program.
fn speed(job: &mut Job) -> Result<f64, String> {
    let (begin, before) = (Instant::now(), units(job)?);
    std::thread::sleep(WINDOW);
    Ok((units(job)? - before) / begin.elapsed().as_secs_f64())
}

/// Half of `--size-gib` for each of two ranks.
pub(crate) fn application(p: &Plan) -> Result<(), String> {
    let scratch = p.dir.join("scratch");
    std::fs::create_dir_all(&scratch).map_err(|e| e.to_string())?;
    let config = p.dir.join("belay.toml");
    let text = format!(
        "[[tier]]\nname = \"scratch\"\nkind = \"pfs\"\npath = \"{}\"\n",
        scratch.display()
    );
    std::fs::write(&config, text).map_err(|e| e.to_string())?;
    let rank = (p.size / 2).to_string();
    let options = ["--config", &config.display().to_string()].map(str::to_owned);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let mut job = Job::launch_with(p, &options, &["compute", &rank])?;
    job.line()?;
    let (mut lost, mut slower, mut blocked, mut took) =
        (Samples::default(), Samples::default(), Samples::default(), Samples::default());
    for _ in 0..p.runs {
        let before = speed(&mut job)?;
        let (begin, done) = (Instant::now(), units(&mut job)?);
        let said = run(Command::new(&p.belay)
            .args(["checkpoint", "--level", "durable", "--json"])
            .arg(p.dir.join("job")))?;
        let v: serde_json::Value = serde_json::from_str(&said).map_err(|e| e.to_string())?;
        let (time, done) = (begin.elapsed().as_secs_f64(), units(&mut job)? - done);
        // The speed drifts: what counts is that of before and after.
        let alone = (before + speed(&mut job)?) / 2.0;
        let seconds = time - done / alone;
        lost.push(seconds);
        took.push(time);
        slower.push(seconds / INTERVAL * 100.0);
        blocked.push(v["blocked_ms"].as_f64().unwrap_or(f64::NAN));
    }
    job.stop(p)?;
    took.print("checkpoint until durable", "s");
    blocked.print("of that blocked", "ms");
    lost.print("work lost by it", "s");
    slower.print("slow-down at one a minute (goal <= 5)", "%");
    Ok(())
}
