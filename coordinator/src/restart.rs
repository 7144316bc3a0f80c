//! Restart: choose the generation, hand it to the restart flow, and serve the restarted job as after a launch.

use crate::agent::{Agent, Setup};
use crate::generations::{self, Generation};
use crate::jobdir::JobDir;
use crate::nodes::again::Reunion;
use crate::sys::{self, Disposition};
use crate::{front, state, Failure};
use belay_plugins::Group;
use belay_restart::{Options, Restored};
use belay_wire::Exit;
use std::cell::RefCell;

/// What a line for the user is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// What is being done.
    Progress,
    /// Something is not as the user expects.
    Warning,
}

/// Restarts generation `wanted` of the job, or its newest whole one; the status word with which the command ended. `tell` receives lines for the user.
pub fn restart(
    setup: Setup,
    wanted: Option<u64>,
    (options, hosts): (&Options, &[String]),
    tell: &mut dyn FnMut(Notice, &str),
) -> Result<i32, Failure> {
    let candidates = candidates(&setup.dir, wanted)?;
    let mut agent = Some(Agent::new(setup)?);
    let mut damaged: Option<(u64, Failure)> = None;
    for g in candidates {
        if let Some((number, failure)) = damaged.take() {
            tell(
                Notice::Warning,
                &format!("generation {number} is damaged ({failure}); using generation {}", g.number),
            );
        }
        let number = g.number;
        let failure = match attempt(&g, (options, hosts), &mut agent, tell) {
            Ok(status) => return Ok(status),
            Err(failure) => failure,
        };
        tracing::error!(generation = number, error = %failure, "restart failed");
        let go_on = failure.exit == Exit::Damaged && agent.is_some();
        damaged = Some((number, failure));
        if !go_on {
            break;
        }
    }
    if let Some(agent) = agent {
        agent.abandon();
    }
    Err(damaged.map_or_else(|| Failure::new(Exit::NoCheckpoint, "no checkpoint"), |(_, failure)| failure))
}

fn attempt(
    g: &Generation,
    (options, hosts): (&Options, &[String]),
    agent: &mut Option<Agent>,
    tell: &mut dyn FnMut(Notice, &str),
) -> Result<i32, Failure> {
    let m = g.manifest()?;
    g.check_owner()?;
    tell(
        Notice::Progress,
        &format!(
            "restarting generation {} ({} processes, {} threads)",
            g.number, m.processes, m.threads
        ),
    );
    tracing::info!(generation = g.number, lazy = options.lazy, "restarting");
    let ended = state::read(&g.path)?;
    if ended.is_some() {
        tell(
            Notice::Warning,
            &format!(
                "generation {} holds what the command left behind when it ended; it goes on in the background",
                g.number
            ),
        );
    }
    let reunion = match agent {
        Some(a) => a.other_nodes(&g.path, g.number, hosts)?,
        None => None,
    };
    let agent = RefCell::new(agent);
    // Whoever sees the program run can command it.
    let mut listen = || {
        if let Some(Err(failure)) = agent.borrow_mut().as_mut().map(Agent::listen) {
            tracing::error!(error = %failure, "no control socket");
            sys::say(&format!("{failure}; the program runs, but cannot be commanded"));
        }
    };
    let mut serve = |restored: Restored, report: &dyn Fn(i32)| {
        let agent = agent.borrow_mut().take();
        agent.map_or(0, |mut a| {
            // Pages that are only mapped have not been compared with their checksums: damage must not spread to the generations that follow.
            if !options.lazy {
                a.build_on(&g.path);
            }
            if let Some(joining) = reunion.as_ref().and_then(Reunion::take_joining) {
                a.rejoin(joining);
            }
            agent_main(a, restored, ended, report)
        })
    };
    let group = reunion.as_ref().map(|r| -> &dyn Group { r });
    belay_restart::restart(&g.path, options, group, &mut listen, &mut serve).map_err(Failure::from)
}

/// The generations to try, in this order: `wanted`, or all from the newest.
pub fn candidates(dir: &JobDir, wanted: Option<u64>) -> Result<Vec<Generation>, Failure> {
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
fn agent_main(mut agent: Agent, restored: Restored, ended: Option<i32>, report: &dyn Fn(i32)) -> i32 {
    front::handled().block();
    Disposition::replace(libc::SIGCHLD, libc::SIG_DFL);
    Disposition::replace(libc::SIGPIPE, libc::SIG_IGN);
    if let Err(e) = sys::become_subreaper() {
        tracing::error!(error = %e, "become the reaper of the job's processes");
    }
    if let Err(failure) = agent.open_metrics() {
        tracing::error!(error = %failure, "no metrics");
        sys::say(&format!("{failure}; the program runs without"));
    }
    agent.called(restored.names, restored.led);
    agent.serve(restored.root_pid, ended, None, report)
}
