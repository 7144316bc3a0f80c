//! Agents that get no processor for a while.

use super::*;
use belay_tests::runner::until_hit;
use std::time::Instant;

/// When it is there at last.
const LIMIT: Duration = Duration::from_secs(60);

fn cont(its: &[i32]) {
    its.iter().for_each(|pid| belay_tests::procs::signal(*pid, libc::SIGCONT));
}

fn times_served(job: &Job) -> usize {
    said_in_logs(job, 1, "\"serving\"")
}

/// Stops the processes of part 1 as soon as the one is there that makes its descriptors again; all of them. None when the
/// part, which has `served` before, has come past that unseen.
fn stopped_in_rebuild(job: &Job, served: usize) -> Result<Option<Vec<i32>>, Failure> {
    let stands = |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") T "));
    let begin = Instant::now();
    while begin.elapsed() < LIMIT {
        let its = job.hosts.find(2, "belay agent");
        // The front, PID 1 of the restart, a leader of its session, and the agent.
        if its.len() >= 4 {
            its.iter().for_each(|pid| belay_tests::procs::signal(*pid, libc::SIGSTOP));
            if its.iter().all(stands) {
                return Ok(Some(its));
            }
        }
        if times_served(job) > served {
            cont(&its);
            return Ok(None);
        }
    }
    Err("part 1 does not come to the rebuild of its descriptors".into())
}

/// The agent of a part gets no processor for a while between two steps of a restart, as on a host where much else runs:
/// it is not taken for lost.
pub(super) fn in_restart(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    /// Longer than agents may be silent while the job runs.
    const AWAY: Duration = Duration::from_secs(13);
    let mut job = Job::new(place, "losses-slow", 2, 2)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    job.checkpoint()?;
    until_hit(1, |_| {
        job.crash();
        let began = said_in_logs(&job, 1, "\"restarting\"");
        let served = times_served(&job);
        job.start_restart()?;
        job.comes_true("the part begins", || said_in_logs(&job, 1, "\"restarting\"") > began)?;
        let its = stopped_in_rebuild(&job, served)?;
        let hit = its.is_some() && times_served(&job) == served;
        if let Some(its) = its {
            std::thread::sleep(AWAY);
            cont(&its);
        }
        job.progress()?;
        want(!job.said().contains("belay:"), || job.said())?;
        Ok(hit)
    })?;
    job.verdict()
}
