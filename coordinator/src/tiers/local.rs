//! The local tiers of a job: places in which chunks lie until they have been moved to the job directory (`belay_storage::place`).

use crate::config::{Kind, Tier};
use crate::jobdir::{Description, JobDir};
use crate::{generations, sys, Failure};
use belay_storage::engine::Engine;
use belay_storage::place::calibrate::{self, Plan};
use belay_storage::place::desk::{Place, Spec};
use belay_storage::place::model::Model;
use belay_storage::store::{self, LocalTier, Store};
use belay_wire::{Exit, OnTier};
use std::collections::BTreeMap;
use std::num::NonZero;
use std::path::Path;

/// Tiers are measured with as many writers as there are processors, within these.
const MIN_WRITERS: usize = 9;
const MAX_WRITERS: usize = 256;

/// Has the chunks of a job written to its local tiers first. Those that are out of reach are left out; one that the configuration does not name any more is emptied.
pub(crate) fn engage(
    dir: &JobDir,
    d: &Description,
    engine: impl FnOnce(Store) -> Result<Engine, Failure>,
) -> Result<Engine, Failure> {
    let known = store::listed(dir.path());
    let named: Vec<&Tier> = d.config.local().filter(|t| is_usable(t)).collect();
    let mut list: Vec<LocalTier> = named.iter().filter_map(|t| place(t, d)).collect();
    let of_before = known.into_iter().filter(|k| !list.iter().any(|l| l.dir == k.dir));
    // What is not there now may be back later, with chunks.
    let of_before: Vec<_> = of_before
        .filter(|k| !k.dir.exists() || store::chunks_in(&k.dir) > 0)
        .collect();
    let used = list.clone();
    list.extend(of_before);
    store::set_local_tiers(dir.path(), &list, &used)?;
    let store = Store::of_job(dir.path());
    if store.tiers().is_empty() {
        return engine(store);
    }
    let spec = |l: &LocalTier| {
        let tier = used.contains(l).then(|| named.iter().find(|t| t.name == l.name)).flatten();
        let measured = tier.and_then(|t| calibrate::load(t.path.as_deref()?, sys::euid()));
        Spec {
            capacity: tier.map_or(0, |t| t.capacity.map_or(u64::MAX, |c| c.0)),
            memory: l.memory,
            model: measured.unwrap_or_else(|| Model::unmeasured(l.memory)),
        }
    };
    let specs = store.tiers().iter().map(spec).collect();
    let mut engine = engine(store)?;
    let rate = d.config.flush.rate.map(|r| r.0);
    engine.use_tiers(specs, d.config.placement.policy, rate)?;
    Ok(engine)
}

/// The directory of the job's chunks in tier `t`.
fn place(t: &Tier, d: &Description) -> Option<LocalTier> {
    Some(LocalTier {
        name: t.name.clone(),
        memory: t.kind == Kind::Memory,
        dir: t.path.as_ref()?.join(d.folder()),
    })
}

fn is_usable(t: &Tier) -> bool {
    let usable = t.path.as_deref().is_some_and(|p| p.is_dir() && sys::may_write(p));
    if !usable {
        tracing::warn!(tier = t.name, path = ?t.path, "local tier is left out: no directory that may be written");
    }
    usable
}

/// What of a generation's chunks lies in local tiers.
pub(crate) fn holdings(g: &generations::Generation) -> Vec<OnTier> {
    let store = Store::of_generation(&g.path);
    let mut bytes: BTreeMap<usize, u64> = BTreeMap::new();
    if let (Ok(m), false) = (&g.manifest, store.tiers().is_empty()) {
        for c in &m.chunks {
            if let Place::Tier(tier) = store.place_of(c.id) {
                *bytes.entry(tier).or_default() += belay_storage::chunk::file_bytes(c.pages);
            }
        }
    }
    let on = |(tier, bytes): (usize, u64)| {
        let t = &store.tiers()[tier];
        OnTier {
            tier: t.name.clone(),
            kind: if t.memory { Kind::Memory } else { Kind::Local }.name().into(),
            bytes,
            whole: false,
        }
    };
    bytes.into_iter().map(on).collect()
}

/// Removes the directories of a job in its local tiers, of which nothing is needed any more.
pub fn remove_empty(dir: &JobDir) {
    for t in store::listed(dir.path()) {
        if let Err(e) = std::fs::remove_dir(&t.dir) {
            tracing::debug!(path = %t.dir.display(), error = %e, "directory stays");
        }
    }
}

/// Measures local tier `t` and keeps that there; `progress` gets each sample: writers, and bytes per second that each got.
pub fn measure(t: &Tier, progress: impl FnMut(u32, f64)) -> Result<(), Failure> {
    let path = t.path.as_deref().unwrap_or(Path::new("/"));
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut plan = Plan::up_to(processors.clamp(MIN_WRITERS, MAX_WRITERS) as u32);
    let most = u64::from(1 + plan.step * (plan.samples - 1)) * plan.bytes;
    if let Some(capacity) = t.capacity {
        // Not more than the tier may hold at any time.
        plan.bytes = (plan.bytes as u128 * u128::from(capacity.0.min(most)) / u128::from(most)) as u64;
        plan.bytes = plan.bytes.max(1 << 20);
    }
    let model =
        calibrate::measure(path, plan, progress).map_err(|e| Failure::new(Exit::NoTier, format!("tier {}: {e}", t.name)))?;
    calibrate::store(path, &model)?;
    Ok(())
}
