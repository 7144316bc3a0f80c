//! The engine of a job that begins or goes on, and the numbers that it goes on with.

use crate::generations;
use crate::jobdir::{Description, Differential, JobDir};
use crate::nodes::seat::Seat;
use crate::redundancy::record;
use crate::tiers::Known;
use crate::{tiers, Failure};
use belay_image::manifest::Manifest;
use belay_storage::engine::{Engine, Options};
use belay_storage::numbers::NUMBERS;
use belay_storage::store::Store;
use std::path::Path;

/// The engine of the job, without the chunks that no generation needs any more. `job` is the directory of the whole
/// job, and `seat` the part of it that is served.
pub(super) fn collected_engine(dir: &JobDir, d: &Description, (job, seat): (&Path, Option<&Seat>)) -> Result<Engine, Failure> {
    let gen = dir.generations();
    let needed = match record::missing(job, &gen)? {
        Some(generation) => {
            tracing::info!(generation, "not here; chunks are not collected");
            None
        }
        None => generations::needed_chunks(&gen)?,
    };
    let options = Options {
        max_bytes: d.limit(),
        find_by_hash: d.differential != Differential::Off,
        key: d.page_key,
    };
    let make = |store: Store| {
        if let Some(needed) = &needed {
            store.collect(needed)?;
        }
        let out_of_sight = !d.config.tiers.is_empty() || !store.tiers().is_empty();
        let mut engine = Engine::new(store, options)?;
        if out_of_sight || dir.path().join(NUMBERS).exists() {
            engine.keep_numbers()?;
        }
        Ok(engine)
    };
    tiers::local::engage(dir, d, seat, make)
}

/// The number of the next generation. No number is used twice, of a generation or of a chunk, wherever there may be one
/// that has it.
pub(super) fn numbers_unused(dir: &JobDir, d: &Description, engine: &mut Engine) -> Result<u64, Failure> {
    let gen = dir.generations();
    let held: Vec<_> = generations::manifests(&gen)?.collect();
    let mut next = held.last().map_or(1, |(n, _)| n + 1);
    if d.config.redundancy.settings()?.is_some() {
        next = next.max(record::last(dir.path())? + 1);
    }
    // Also those that lack something: the numbers of their chunks are used.
    let here: Vec<Manifest> = held.into_iter().filter_map(|(_, m)| m.ok()).collect();
    let known = tiers::known(dir, d);
    let there = known.iter().flatten().flat_map(|k| &k.generations).map(|(_, m)| m);
    // Also those that cannot be read now, and of which only the number is known.
    next = next.max(known.iter().flatten().filter_map(Known::highest).max().map_or(1, |n| n + 1));
    for m in here.iter().chain(there) {
        next = next.max(m.generation + 1);
        engine.number_from(m.next_chunk);
    }
    Ok(next)
}
