//! The end of a restart where libraries take part: at rest since the checkpoint, they make again what a restart does
//! not bring back, and when all have, on all nodes, the gates open.
//!
//! This needs their threads, so the job runs by then. What waits at a gate does not; a failure ends all of it, as
//! before.

use crate::fail::{Outcome, RestartError};
use crate::resume::Stopped;
use belay_image::model::{Job, VmaKind};
use belay_plugins::gate::{Apart, Gates, LIMIT};
use belay_plugins::{Brought, Facts, Group, Rebuilder};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Made known by a node that has gates.
const FACT: &str = "gate";

/// The gates of the job's processes, which are shut in the image.
pub(crate) fn find(job: &Job, rebuilder: &Rebuilder) -> Outcome<Gates> {
    let mappings = job.processes.iter().flat_map(|p| p.vmas.iter().map(|v| (p.pid, &v.kind)));
    let objects = mappings.filter_map(|(pid, kind)| match kind {
        VmaKind::Shared { object, offset: 0, .. } => Some((pid, *object)),
        _ => None,
    });
    rebuilder.gates(objects).map_err(|e| RestartError::at("reopen", e))
}

/// Meets the other nodes before anything runs; whether there are gates, here or on another one.
pub(crate) fn meet(gates: Option<&Gates>, group: Option<&dyn Group>) -> Outcome<bool> {
    let here = gates.is_some_and(|g| !g.is_empty());
    let Some(group) = group else { return Ok(here) };
    let fact: Facts = here.then(|| (FACT.to_owned(), String::new())).into_iter().collect();
    let met = group.meet(Brought {
        publish: fact,
        want: BTreeSet::from([FACT.to_owned()]),
        ..Brought::default()
    });
    let facts = met.map_err(|e| RestartError::at("restart together with the other nodes", e))?;
    Ok(facts.contains_key(FACT))
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
