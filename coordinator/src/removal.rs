//! `belay gc`: removes checkpoints that are no longer needed, in the job directory and in those of its parts.
//!
//! The root's go first, and the parts' after them. So a kill at any instant leaves at most what no generation of the job
//! needs, which the next `belay gc` removes.

use crate::generations::Generation;
use crate::jobdir::{Access, Description, JobDir};
use crate::nodes::seat::{self, part_dir};
use crate::nodes::table;
use crate::redundancy::record;
use crate::tiers::{self, Known};
use crate::{generations, Failure};
use belay_storage::store::{Removed, Store};
use belay_wire::Exit;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What was removed.
#[derive(Debug, Default)]
pub struct Gone {
    /// Numbers of generations.
    pub generations: BTreeSet<u64>,
    /// What interrupted checkpoints and removals had left.
    pub left_overs: usize,
    /// Chunks.
    pub chunks: Removed,
    /// What stays, and why.
    pub stays: Vec<String>,
}

/// Refuses where a part of `job` still runs: whatever has become of the root's host, it goes on beside what is started anew.
pub fn refuse_living(job: &JobDir) -> Result<(), Failure> {
    for tag in seat::tags(job.path())? {
        let part = match JobDir::open(&part_dir(job.path(), tag), Access::Own) {
            // It was killed before it had begun.
            Err(f) if f.exit == Exit::NoJob => continue,
            opened => opened?,
        };
        if let Err(f) = part.lock() {
            if f.exit != Exit::AlreadyRunning {
                return Err(Failure::new(f.exit, format!("part {tag}: {f}")));
            }
            let at = job.shown();
            let who = part.holder().map_or_else(|| f.to_string(), |holder| holder.word);
            let why = format!(
                "part {tag}: {who} still serves what has run in {at} before; end that process, and what it has started, or use \
                 another directory"
            );
            return Err(Failure::new(f.exit, why));
        }
    }
    Ok(())
}

/// Removes, from the directory of a job whose lock is held, the generations beyond `keep`, or all of them, and what
/// none of those that stay needs.
pub fn of_root(dir: &JobDir, keep: Option<u32>) -> Result<Gone, Failure> {
    let (job, gen) = (dir.path(), dir.generations());
    let mut gone = Gone {
        left_overs: generations::clear_leftovers(&gen)?,
        ..Gone::default()
    };
    match keep {
        Some(keep) => {
            let pinned: Vec<u64> = record::newest(job)?.into_iter().chain(newest_at_rest(dir)?).collect();
            gone.generations.extend(generations::retain(&gen, keep, &pinned)?);
        }
        None => gone.remove(&gen, &BTreeSet::new())?,
    }
    gone.collect(job, dir, keep.is_none())?;
    if keep.is_none() {
        record::remove_all(job)?;
    }
    record::tidy(job, job, true)?;
    Ok(gone)
}

/// Removes what parts of the running job in `dir` have left which have ended, and do not tidy for themselves any more: the
/// generations before the newest one of the root that are not `kept` there. `live` are the parts that are there; what else is
/// in use is left for the next time.
pub(crate) fn of_ended(dir: &JobDir, live: &BTreeSet<u64>, kept: &BTreeSet<u64>) -> Result<Gone, Failure> {
    let mut gone = Gone::default();
    let Some(newest) = kept.last() else { return Ok(gone) };
    for tag in seat::tags(dir.path())?.difference(live) {
        // One that cannot be tidied stands in nobody's way.
        if let Err(error) = gone.add_ended(dir.path(), *tag, *newest, kept) {
            tracing::warn!(part = tag, %error, "what a part that has ended has left stays");
        }
    }
    Ok(gone)
}

/// The newest generation that is left when the memory of the machine is lost; of a job on several hosts, when all is
/// that lies in tiers of its hosts.
fn newest_at_rest(dir: &JobDir) -> Result<Option<u64>, Failure> {
    let several = dir.description()?.across_hosts;
    let of = |job: &Path| -> Result<Vec<Generation>, Failure> {
        let store = Store::of_job(job);
        let tiers = store.in_tiers()?.into_iter();
        let away: BTreeSet<u32> = tiers
            .filter(|(t, ..)| several || store.is_memory(*t))
            .map(|(_, id, _)| id)
            .collect();
        let mut all = generations::list(&job.join("gen"))?;
        let at_rest: BTreeSet<u64> = generations::at_rest(&all, |ids| !ids.is_disjoint(&away))
            .map(|g| g.number)
            .collect();
        all.retain(|g| at_rest.contains(&g.number));
        Ok(all)
    };
    let mut parts = BTreeMap::new();
    for tag in seat::tags(dir.path())? {
        let numbers: BTreeSet<u64> = of(&part_dir(dir.path(), tag))?.iter().map(|g| g.number).collect();
        parts.insert(tag, numbers);
    }
    let is_at_rest = |g: &Generation| {
        let rows = table::read(&g.path).unwrap_or_default();
        rows.iter()
            .all(|row| parts.get(&row.tag).is_some_and(|part| part.contains(&g.number)))
    };
    Ok(of(dir.path())?.iter().rfind(|g| is_at_rest(g)).map(|g| g.number))
}

impl Gone {
    /// The same for the parts of the job: all, or the generations that neither the root has any more nor a record or a
    /// tier names. What fails at one part does not keep the others from it.
    pub fn add_parts(&mut self, dir: &JobDir, d: &Description, all: bool) -> Result<(), Failure> {
        let tags = seat::tags(dir.path())?;
        let gen = dir.generations();
        if !all && !tags.is_empty() && gen.is_symlink() {
            // What lies here may be what the root had when it was on this host.
            let why = "other parts: not looked at: their checkpoints, as the job's own, lie on the disks of their hosts";
            self.stays.push(why.into());
            return Ok(());
        }
        let mut kept = BTreeSet::new();
        if !all {
            kept.extend(generations::numbers(&gen)?);
            kept.extend(record::numbers(dir.path())?);
            kept.extend(tiers::known(dir, d).iter().flatten().flat_map(Known::numbers));
        }
        let mut failed = None;
        for tag in tags {
            if let Err(f) = self.add_part(dir.path(), tag, &kept, all) {
                failed.get_or_insert(Failure::new(f.exit, format!("part {tag}: {f}")));
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn add_part(&mut self, job: &Path, tag: u64, kept: &BTreeSet<u64>, all: bool) -> Result<(), Failure> {
        let path = part_dir(job, tag);
        let part = match JobDir::open(&path, Access::Own) {
            // It was killed before it had begun.
            Err(f) if f.exit == Exit::NoJob && generations::numbers(&path.join("gen"))?.is_empty() => return Ok(()),
            opened => opened?,
        };
        let _lock = part.lock()?;
        let gen = part.generations();
        if gen.is_symlink() && !gen.exists() {
            self.stays.push(format!("part {tag}: what it has lies on another host"));
            return Ok(());
        }
        self.left_overs += generations::clear_leftovers(&gen)?;
        self.remove(&gen, kept)?;
        self.collect(job, &part, all)?;
        record::tidy(job, part.path(), true)
    }

    /// See [`of_ended`].
    fn add_ended(&mut self, job: &Path, tag: u64, newest: u64, kept: &BTreeSet<u64>) -> Result<(), Failure> {
        let path = part_dir(job, tag);
        let numbers = generations::numbers(&path.join("gen"))?;
        let (old, new): (Vec<u64>, Vec<u64>) = numbers.into_iter().partition(|n| *n < newest);
        if old.iter().all(|n| kept.contains(n)) {
            return Ok(());
        }
        let part = JobDir::open(&path, Access::Own)?;
        let Some(_lock) = part.try_lock()? else { return Ok(()) };
        let stay: BTreeSet<u64> = kept.iter().copied().chain(new).collect();
        self.remove(&part.generations(), &stay)?;
        self.collect(job, &part, false)
    }

    /// Removes the generations in `gen` that are not `kept`.
    fn remove(&mut self, gen: &Path, kept: &BTreeSet<u64>) -> Result<(), Failure> {
        let numbers: Vec<u64> = generations::numbers(gen)?.into_iter().filter(|n| !kept.contains(n)).collect();
        generations::remove_all(gen, &numbers)?;
        self.generations.extend(numbers);
        Ok(())
    }

    /// Removes the chunks in `dir`, that of `job` or of a part of it, that no generation there needs.
    fn collect(&mut self, job: &Path, dir: &JobDir, all: bool) -> Result<(), Failure> {
        let (at, gen) = (dir.shown(), dir.generations());
        let (store, others) = Store::of_job(dir.path()).own_tiers();
        for (t, other) in others {
            let (lies, other) = (t.dir.display(), other.display());
            self.stays.push(format!(
                "{at}: nothing is removed in {lies}: the job in {other}, of which this is a copy, has it"
            ));
        }
        if let Some(number) = record::missing(job, &gen)?.filter(|_| !all) {
            self.stays.push(format!(
                "{at}: chunks stay: generation {number}, which is redundant, is not on this host, and they may be its"
            ));
            return Ok(());
        }
        generations::give_up_fetches(&gen)?;
        if let Some(needed) = generations::needed_chunks(&gen)? {
            let removed = store.collect(&needed)?;
            self.chunks.chunks += removed.chunks;
            self.chunks.bytes += removed.bytes;
        }
        if !store.elsewhere().is_empty() {
            self.stays.push(format!(
                "{at}: chunks may stay in {}: the next job in the same job directory there removes them",
                store.places_elsewhere()
            ));
        }
        Ok(())
    }
}
