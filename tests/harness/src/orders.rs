//! Orders for the program `gen_steps`.

use crate::expect::{io, want};
use crate::job::Job;
use crate::Failure;
use std::time::{Duration, Instant};

/// Longer than carrying one out takes, also where much else runs.
const LIMIT: Duration = Duration::from_secs(120);

/// Gives the program an order.
pub fn give(job: &Job, line: &str) -> Result<(), Failure> {
    let new = job.work.join("order.new");
    io("write the order", std::fs::write(&new, format!("{line}\n")))?;
    io("give the order", std::fs::rename(&new, job.work.join("order")))
}

/// The same, and waits until it has been carried out.
pub fn order(job: &mut Job, line: &str) -> Result<(), Failure> {
    give(job, line)?;
    let end = Instant::now() + LIMIT;
    let work = job.work.clone();
    let says = |name: &str| std::fs::read_to_string(work.join(name)).unwrap_or_default().trim() == line;
    while !says("answer") {
        // A restart gives a file that was open at the checkpoint its contents of then.
        if !says("order") {
            give(job, line)?;
        }
        job.progress(LIMIT).map_err(|e| format!("{line}: {e}"))?;
        want(Instant::now() < end, || format!("{line}: no answer; {}", job.output_text()))?;
    }
    Ok(())
}
