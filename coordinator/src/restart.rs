//! Restart: choose the generation, hand it to the restart flow, and serve the restarted job as after a launch.

use crate::agent::{Agent, Setup};
use crate::generations::{self, Generation};
use crate::jobdir::JobDir;
use crate::sys::{self, Disposition};
use crate::{front, Failure};
use belay_restart::{Options, Restored};
use belay_wire::Exit;

/// Restarts generation `wanted` of the job, or its newest whole one; the status word with which the command ended. `tell` receives one line per
/// generation tried.
pub fn restart(setup: Setup, wanted: Option<u64>, options: &Options, tell: &mut dyn FnMut(&str)) -> Result<i32, Failure> {
    let candidates = candidates(&setup.dir, wanted)?;
    let mut agent = Some(Agent::new(setup)?);
    let mut last = None;
    for g in candidates {
        let manifest = match g.manifest {
            Ok(m) => m,
            Err(e) => {
                tell(&format!("generation {} cannot be used: {e}", g.number));
                last = Some(Failure::from(e));
                continue;
            }
        };
        tell(&format!(
            "restarting generation {} ({} processes, {} threads)",
            g.number, manifest.processes, manifest.threads
        ));
        tracing::info!(generation = g.number, lazy = options.lazy, "restarting");
        let mut serve = |restored: Restored| agent.take().map_or(0, |a| agent_main(a, restored));
        match belay_restart::restart(&g.path, options, &mut serve).map_err(Failure::from) {
            Ok(status) => return Ok(status),
            Err(failure) => {
                tracing::error!(generation = g.number, error = %failure, "restart failed");
                if failure.exit != Exit::Damaged {
                    last = Some(failure);
                    break;
                }
                tell(&format!("generation {} cannot be used: {failure}", g.number));
                last = Some(failure);
            }
        }
    }
    if let Some(agent) = agent {
        agent.abandon();
    }
    Err(last.unwrap_or_else(|| Failure::new(Exit::NoCheckpoint, "no checkpoint")))
}

/// What to try, in this order.
fn candidates(dir: &JobDir, wanted: Option<u64>) -> Result<Vec<Generation>, Failure> {
    let mut found = generations::list(&dir.generations())?;
    let at = dir.path().display();
    if found.is_empty() {
        return Err(Failure::new(
            Exit::NoCheckpoint,
            format!("{at} holds no checkpoint; start the program with belay launch"),
        ));
    }
    if let Some(number) = wanted {
        found.retain(|g| g.number == number);
        if found.is_empty() {
            return Err(Failure::new(
                Exit::NoGeneration,
                format!("{at} has no generation {number}; see belay list {at}"),
            ));
        }
    }
    found.reverse();
    Ok(found)
}

/// Runs in the agent of the restarted job.
fn agent_main(agent: Agent, restored: Restored) -> i32 {
    front::handled().block();
    Disposition::replace(libc::SIGCHLD, libc::SIG_DFL);
    Disposition::replace(libc::SIGPIPE, libc::SIG_IGN);
    if let Err(e) = sys::become_subreaper() {
        tracing::error!(error = %e, "become the reaper of the job's processes");
    }
    agent.serve(restored.root_pid, None)
}
