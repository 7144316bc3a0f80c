//! The gate: before anything is stopped, libraries in the processes are asked to come to rest, and they go on when
//! everything runs again.
//!
//! Whether a job has any is seen when the mappings of its processes are read while they are stopped, as they are in
//! any case: the first checkpoint of such a job is begun again, with the gate. A job without pays nothing.

use crate::state::draft::Draft;
use crate::stop::listing::Listing;
use crate::CaptureError;
use belay_plugins::gate::{Apart, Gates, Parties, Unready};
use belay_plugins::Group;
use belay_plugins::LeftGpus;
use std::time::{Duration, Instant};

/// Gates that are shut, on all nodes. Dropped, those of this one open.
#[derive(Debug)]
pub(crate) struct Shut {
    gates: Gates,
    /// Since when somebody may wait at one.
    pub(crate) since: Instant,
    limit: Duration,
    /// Who takes part, here or on another node.
    pub(crate) parties: Parties,
}

/// Shuts the gates of all descendants of `agent` but its children `outside` and what they have started, together with
/// the other nodes.
pub(crate) fn shut((agent, outside): (i32, &[i32]), limit: Duration, group: Option<&dyn Group>) -> Result<Shut, CaptureError> {
    let listing = Listing::make(agent, &self::outside(outside))?;
    let pids = listing.processes.iter().map(|(pid, ..)| *pid);
    let mut gates = Gates::find(pids, limit).map_err(|r| CaptureError::Refused(vec![r]))?;
    // Nobody has been asked before.
    let since = Instant::now();
    let parties = gates.close(limit, group).map_err(|apart| match apart {
        Apart::Refused(refusals) => CaptureError::Refused(refusals),
        Apart::Group(e) => CaptureError::failed("come to rest together with the other nodes", e),
    })?;
    Ok(Shut {
        gates,
        since,
        limit,
        parties,
    })
}

/// Children of the agent that are no part of the job: those that it names, and those that ask a GPU's driver.
pub(crate) fn outside(named: &[i32]) -> Vec<i32> {
    named.iter().copied().chain(belay_plugins::gate::gpu::askers()).collect()
}

/// The libraries in process `pid` that take part.
pub(crate) fn libraries(shut: Option<&Shut>, pid: i32) -> Vec<String> {
    shut.map(|s| s.gates.libraries(pid)).unwrap_or_default()
}

/// The same, and the GPUs that it has left.
pub(crate) fn partakers(shut: Option<&Shut>, pid: i32) -> (Vec<String>, Option<LeftGpus>) {
    (libraries(shut, pid), shut.and_then(|s| s.gates.left(pid)))
}

/// Looks, while all are stopped, whether every library that takes part is at rest.
pub(crate) fn check(shut: Option<&Shut>, drafts: &[Draft]) -> Result<(), CaptureError> {
    let gates = shut.map(|s| &s.gates);
    let one = |draft: &Draft| Gates::check(gates, (draft.pid, draft.task), &draft.maps);
    drafts.iter().try_for_each(one).map_err(|unready| match unready {
        Unready::NotAsked(refusal) => CaptureError::NotAsked(refusal),
        Unready::Restless(refusal) => CaptureError::Refused(vec![refusal]),
    })
}

impl Shut {
    /// No process of the job goes on.
    pub(crate) fn abandon(self) {
        self.gates.abandon();
    }

    /// The gates.
    pub(crate) fn gates(&mut self) -> &mut Gates {
        &mut self.gates
    }

    /// Opens the gates, now that everything runs.
    pub(crate) fn open(self) {
        for late in self.gates.open(self.limit) {
            tracing::warn!(%late, "the gate is open, and a library has not taken note");
        }
    }
}
