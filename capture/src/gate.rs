//! The gate: before anything is stopped, libraries in the processes are asked to come to rest, and they go on when
//! everything runs again.
//!
//! Whether a job has any is seen when the mappings of its processes are read while they are stopped, as they are in
//! any case: the first checkpoint of such a job is begun again, with the gate. A job without pays nothing.

use crate::listing::Listing;
use crate::process::Draft;
use crate::CaptureError;
use belay_plugins::gate::{Gates, Unready};
use belay_plugins::{Facts, Group};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Made known by a node that has libraries which take part.
const FACT: &str = "gate";

/// Gates that are shut, on all nodes. Dropped, those of this one open.
#[derive(Debug)]
pub(crate) struct Shut {
    gates: Gates,
    /// Since when somebody may wait at one.
    pub(crate) since: Instant,
    limit: Duration,
    /// There is one, here or on another node.
    pub(crate) is_needed: bool,
}

/// Shuts the gates of all descendants of `agent` but its children `outside` and what they have started, together with
/// the other nodes.
pub(crate) fn shut((agent, outside): (i32, &[i32]), limit: Duration, group: Option<&dyn Group>) -> Result<Shut, CaptureError> {
    let since = Instant::now();
    let listing = Listing::make(agent, outside)?;
    let mut gates = Gates::find(listing.processes.iter().map(|(pid, ..)| *pid)).map_err(|r| CaptureError::Refused(vec![r]))?;
    gates.close(limit).map_err(CaptureError::Refused)?;
    let here = (!gates.is_empty()).then(|| (FACT.to_owned(), String::new()));
    let is_needed = match group {
        None => here.is_some(),
        Some(group) => {
            let facts = group.meet(here.into_iter().collect(), BTreeSet::from([FACT.to_owned()]));
            let facts: Facts = facts.map_err(|e| CaptureError::failed("come to rest together with the other nodes", e))?;
            facts.contains_key(FACT)
        }
    };
    Ok(Shut {
        gates,
        since,
        limit,
        is_needed,
    })
}

/// Looks, while all are stopped, whether every library that takes part is at rest.
pub(crate) fn check(shut: Option<&Shut>, drafts: &[Draft]) -> Result<(), CaptureError> {
    let gates = shut.map(|s| &s.gates);
    let one = |draft: &Draft| Gates::check(gates, draft.pid, &draft.maps);
    drafts.iter().try_for_each(one).map_err(|unready| match unready {
        Unready::NotAsked(refusal) => CaptureError::NotAsked(refusal),
        Unready::Restless(refusal) => CaptureError::Refused(vec![refusal]),
    })
}

impl Shut {
    /// Opens the gates, now that everything runs.
    pub(crate) fn open(self) {
        for late in self.gates.open(self.limit) {
            tracing::warn!(%late, "the gate is open, and a library has not taken note");
        }
    }
}
