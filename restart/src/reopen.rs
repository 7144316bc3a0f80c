//! The end of a restart where libraries take part: at rest since the checkpoint, they make again what a restart does
//! not bring back, and when all have, on all nodes, the gates open.
//!
//! This needs their threads, so the job runs by then. What waits at a gate does not; a failure ends all of it, as
//! before.

use crate::fail::{Outcome, RestartError};
use crate::resume::Stopped;
use belay_image::model::{Job, VmaKind};
use belay_plugins::gate::{gpu, Apart, Gates, Parties, LIMIT};
use belay_plugins::{Brought, Group, Rebuilder};
use std::time::{Duration, Instant};

/// Made known by a node that has gates,
const FACT: &str = "gate";
/// and by one where processes use GPUs.
const GPUS: &str = "gate gpus";
/// What has failed where others do not go on.
const TOGETHER: &str = "restart together with the other nodes";

/// The gates of the job's processes, which are shut in the image.
pub(crate) fn find(job: &Job, rebuilder: &Rebuilder) -> Outcome<Gates> {
    let mappings = job.processes.iter().flat_map(|p| p.vmas.iter().map(|v| (p.pid, &v.kind)));
    let objects = mappings.filter_map(|(pid, kind)| match kind {
        VmaKind::Shared { object, offset: 0, .. } => Some((pid, *object)),
        _ => None,
    });
    rebuilder.gates(objects).map_err(|e| RestartError::at("reopen", e))
}

/// Meets the other nodes before anything runs; who takes part, here or on another one.
pub(crate) fn meet(gates: Option<&Gates>, group: Option<&dyn Group>) -> Outcome<Parties> {
    let here = Parties {
        any: gates.is_some_and(|g| !g.is_empty()),
        gpus: gates.is_some_and(Gates::has_gpus),
    };
    let Some(group) = group else { return Ok(here) };
    let facts = [(FACT, here.any), (GPUS, here.gpus)];
    let known = facts.iter().filter(|(_, is_so)| *is_so);
    let met = group.meet(Brought {
        publish: known.map(|(name, _)| ((*name).to_owned(), String::new())).collect(),
        want: facts.iter().map(|(name, _)| (*name).to_owned()).collect(),
        ..Brought::default()
    });
    let facts = met.map_err(|e| RestartError::at(TOGETHER, e))?;
    Ok(Parties {
        any: facts.contains_key(FACT),
        gpus: facts.contains_key(GPUS),
    })
}

/// Waits until all nodes have put what uses a GPU back on it: nothing of the job runs before.
pub(crate) fn meet_on_gpus(parties: Parties, group: Option<&dyn Group>) -> Outcome<()> {
    let Some(group) = group.filter(|_| parties.gpus) else {
        return Ok(());
    };
    let met = group.meet_late(Brought::default(), gpu::LIMIT);
    met.map(drop).map_err(|e| RestartError::at(TOGETHER, e))
}

/// Has the driver put what uses a GPU back on it, before anything runs but the driver's own threads.
pub(crate) fn put_on_gpus(gates: Option<&mut Gates>, stopped: &mut Stopped<'_>, group: Option<&dyn Group>) -> Outcome<()> {
    // An image of an earlier belay does not name them: then it is done when everything runs.
    let Some(gates) = gates.filter(|g| !g.driver_threads().is_empty()) else {
        return Ok(());
    };
    let threads = gates.driver_threads().to_vec();
    // The other nodes wait for this one, and must hear that it is there.
    let attend = || group.into_iter().for_each(Group::attend);
    let done = stopped.with_driver(&threads, |look| {
        gates.put_on_gpus(&|| {
            attend();
            look();
        })
    });
    let done = done.map_err(|e| RestartError::at("reopen", format!("let the driver's thread run: {e}")))?;
    done.map_err(|refusal| RestartError::at("reopen", refusal))
}

/// Opens the gates, here and on all other nodes; how long that has taken. They are left where that fails.
pub(crate) fn reopen(gates: &mut Option<Gates>, limit: Duration, group: Option<&dyn Group>) -> Outcome<Duration> {
    let begin = Instant::now();
    let rebuilt = gates.as_mut().map_or(Ok(()), |g| g.rebuild(limit, group));
    rebuilt.map_err(|apart| match apart {
        Apart::Refused(refusals) => {
            let each: Vec<String> = refusals.iter().map(ToString::to_string).collect();
            RestartError::at("reopen", each.join("; "))
        }
        Apart::Group(e) => RestartError::at("reopen together with the other nodes", e),
    })?;
    for late in gates.take().map(|g| g.open(limit.min(LIMIT))).unwrap_or_default() {
        tracing::warn!(%late, "the gate is open, and a library has not taken note");
    }
    Ok(begin.elapsed())
}
