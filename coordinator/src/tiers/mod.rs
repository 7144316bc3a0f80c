//! The tiers of a job. The durable ones: opening them, what is known of what they hold, and moving generations there and back.
//!
//! ```text
//! belay-job/tiers/NAME.json     notes: manifests of the generations that tier NAME holds, as of the last flush or look
//! ```
//! The notes are a copy of the truth, which lies on the tier: they answer `status` without asking it, and they are made
//! again when they are missing.

mod again;
mod child;
pub mod gather;
pub mod hosts;
pub mod local;
pub(crate) mod members;
pub(crate) mod notes;
pub(crate) mod parts;

pub(crate) use again::{describe_part, fetch_part};
pub use again::{fetch, find_job, refresh};
use members::Members;
pub(crate) use parts::away;
use parts::Source;

pub(crate) use notes::newest_durable;
pub use notes::{held, is_on_a_tier, known, statuses, Known};

use crate::config::{self, Kind};
use crate::generations::Generation;
use crate::jobdir::{Description, JobDir, JOB};
use crate::nodes::table;
use crate::{jobdir, sys, verify, Failure};
use belay_kernel::trust;
use belay_storage::catalogue::{Catalogue, Listed, Part};
use belay_storage::fetch as fetching;
use belay_storage::flush::{self, Control, Flushed, Parts};
use belay_storage::seal::Keys;
use belay_storage::tier::directory::Directory;
use belay_storage::tier::sealed::Sealed;
use belay_storage::tier::{read_whole, write_whole, ReadOnly, Tier};
use belay_storage::StorageError;
use belay_wire::Exit;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Most flush threads, where the configuration does not say.
const THREADS: u32 = 4;
/// Longest description that is read.
const MAX_JOB: u64 = 16 << 20;

/// A durable tier of a job.
#[derive(Debug)]
pub struct Durable {
    /// Its configuration.
    pub config: config::Tier,
    to: To,
    /// The tier, below the job's folder.
    pub tier: Box<dyn Tier>,
    /// What it holds, as far as it has been read.
    pub catalogue: Catalogue,
    /// What is there is sealed with these, if with any.
    keys: Option<Arc<Keys>>,
    /// The same tier for the parts of a job on several hosts, as far as somebody has asked.
    parts: BTreeMap<u64, Durable>,
}

/// What is done with a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum To {
    /// What a job needs.
    Use,
    /// Nothing on it is changed.
    Look,
}

/// Opens what `folder` of the tier is; with keys everything there is sealed, whoever asks.
fn open_one(t: &config::Tier, folder: &str, (to, keys): (To, Option<&Arc<Keys>>)) -> Result<Box<dyn Tier>, Failure> {
    let below = open_below(t, folder, to)?;
    Ok(match keys {
        Some(keys) => Box::new(Sealed::new(below, keys.clone(), folder)),
        None => below,
    })
}

fn open_below(t: &config::Tier, folder: &str, to: To) -> Result<Box<dyn Tier>, Failure> {
    if jobdir::is_foreign() {
        let why = format!("tier {}: only the owner of a job opens its tiers; run as its owner", t.name);
        return Err(Failure::new(Exit::NotOurs, why));
    }
    let path = t.path.as_deref().unwrap_or(Path::new("/"));
    match t.kind {
        Kind::Memory | Kind::Local | Kind::Pfs if to == To::Look => {
            // One that is gone is no empty one.
            std::fs::metadata(path).map_err(|e| Failure::io(format!("tier {}: open {}", t.name, path.display()), &e))?;
            Ok(Box::new(Directory::find(&t.name, &path.join(folder))?))
        }
        Kind::Object if to == To::Look => Ok(Box::new(ReadOnly(open_object_store(t, folder)?))),
        Kind::Memory | Kind::Local | Kind::Pfs => {
            let above: Vec<&Path> = Path::new(folder)
                .ancestors()
                .skip(1)
                .filter(|p| *p != Path::new(""))
                .collect();
            for dir in above.into_iter().rev() {
                // What lies in a folder is not found after a power cut where the folder's own name is lost.
                Directory::open(&t.name, &path.join(dir))?.sync()?;
            }
            Ok(Box::new(Directory::open(&t.name, &path.join(folder))?))
        }
        Kind::Object => open_object_store(t, folder),
    }
}

#[cfg(feature = "object-store")]
fn open_object_store(t: &config::Tier, folder: &str) -> Result<Box<dyn Tier>, Failure> {
    let location = belay_objects::Location {
        url: t.url.clone().unwrap_or_default(),
        endpoint: t.endpoint.clone(),
        region: t.region.clone(),
        allow_http: t.allow_http,
        timeout: t.timeout.map(|t| t.0),
    };
    Ok(Box::new(belay_objects::Objects::open(&t.name, &location, folder)?))
}

#[cfg(not(feature = "object-store"))]
fn open_object_store(t: &config::Tier, _: &str) -> Result<Box<dyn Tier>, Failure> {
    Err(Failure::new(
        Exit::NoTier,
        format!(
            "tier {}: this belay was built without object stores (feature object-store)",
            t.name
        ),
    ))
}

impl Durable {
    /// Opens tier `t` of the job that `d` describes.
    pub fn open(t: &config::Tier, d: &Description, to: To) -> Result<Self, Failure> {
        let named = |f: Failure| Failure::new(f.exit, format!("tier {}: {f}", t.name));
        let keys = d.config.encryption.keys().map_err(named)?;
        Self::open_with(t, d, (to, keys))
    }

    fn open_with(t: &config::Tier, d: &Description, (to, keys): (To, Option<Arc<Keys>>)) -> Result<Self, Failure> {
        Ok(Self {
            config: t.clone(),
            to,
            tier: open_one(t, &d.folder(), (to, keys.as_ref()))?,
            catalogue: Catalogue::default(),
            keys,
            parts: BTreeMap::new(),
        })
    }

    /// Whether it was opened as `t` with the keys that there are now.
    pub(crate) fn is_open(&self, t: &config::Tier, keys: Option<&Arc<Keys>>) -> bool {
        self.config == *t && self.keys.as_ref() == keys
    }

    /// Reads what the tier holds, and notes it.
    pub fn look(&mut self, dir: &JobDir, d: &Description) -> Result<(), Failure> {
        self.read()?;
        self.read_parts(d)?;
        notes::write(dir, self)
    }

    fn read(&mut self) -> Result<(), Failure> {
        self.catalogue = Catalogue::read(&*self.tier, &self.catalogue)?;
        Ok(())
    }

    /// Copies the generation in directory `generation` to this tier. `members` are the parts, where they have theirs on
    /// their hosts.
    pub(crate) fn flush(
        &mut self,
        dir: &JobDir,
        d: &Description,
        (generation, members): (&Path, Option<&mut Members>),
        control: &Control,
    ) -> Result<Flushed, Failure> {
        let options = self.options(d);
        let flushed = if parts::may_be(d, generation)? {
            let rows = parts::of_generation(dir.path(), generation)?;
            let source = match members {
                Some(members) => Source::There(members),
                None if d.config.redundancy.scheme.is_some() && !rows.is_empty() => {
                    let why = "each host holds its own part of the checkpoint, and its agent is not there; belay flush copies it when the job has ended";
                    return Err(Failure::new(Exit::NotDurable, why));
                }
                None => Source::Here(rows),
            };
            self.copy_with_parts(dir, d, (generation, options), source, control)
        } else {
            self.copy(d, (generation, &options), &mut &[][..], control)
        };
        if let (Err(e), true) = (&flushed, control.is_rotten()) {
            Generation::here(generation).is_damaged(&e.to_string());
        }
        // Also after a failure: older generations may have been removed. The notes are a copy, without which the
        // generation is durable all the same.
        if let Err(e) = notes::write(dir, self) {
            tracing::warn!(tier = self.config.name, error = %e, "not noted");
        }
        flushed
    }

    fn options(&self, d: &Description) -> flush::Options {
        let f = &d.config.flush;
        flush::Options {
            threads: f.threads.unwrap_or(THREADS),
            rate: f.rate.map(|r| r.0),
            zstd: f.zstd.unwrap_or_default(),
            verify: f.verify.unwrap_or(true),
            keep: d.keep,
            capacity: self.config.capacity.map(|c| c.0),
        }
    }

    /// Says what the job is.
    fn describe(&self, text: &[u8]) -> Result<(), StorageError> {
        let there = match self.tier.length(JOB)? {
            Some(_) => read_whole(&*self.tier, JOB, MAX_JOB),
            None => Ok(Vec::new()),
        };
        match there {
            // An older key is not to be needed for it.
            Ok(there) if there == text && self.tier.key_of(JOB) == self.tier.seals_with() => Ok(()),
            // Whoever put that there, the job knows what it is.
            Ok(_) | Err(StorageError::TierDamaged { .. } | StorageError::Tier { .. }) => write_whole(&*self.tier, JOB, text),
            Err(e) => Err(e),
        }
    }

    /// Copies the generation, the description and, last, the record.
    fn copy(
        &mut self,
        d: &Description,
        (generation, options): (&Path, &flush::Options),
        parts: &mut dyn Parts,
        control: &Control,
    ) -> Result<Flushed, Failure> {
        // The flush compares all else with its checksums on the way.
        let own = verify::byte_strings(generation).map_err(StorageError::from);
        own.inspect_err(|e| control.note(e))?;
        self.describe(&d.encode()?).inspect_err(|e| control.note_room(e))?;
        Ok(flush::flush(
            generation,
            &*self.tier,
            options,
            &mut self.catalogue,
            parts,
            control,
        )?)
    }

    /// What is known to be damaged or missing: records and indexes that cannot be read, generations that lack something.
    fn faults(&self) -> Vec<String> {
        let name = self.tier.name();
        let damaged = |(key, why): &(String, String)| format!("tier {name}: {key}: damaged: {why}");
        let mut faults: Vec<String> = self.catalogue.faults.iter().map(damaged).collect();
        let whole: Vec<u64> = self.catalogue.whole().iter().map(|g| g.manifest.generation).collect();
        let is_damaged = |g: &&Listed| !whole.contains(&g.manifest.generation) && !self.is_out_of_reach(g);
        for g in self.catalogue.generations.iter().filter(is_damaged) {
            let lacks = || format!("not everything of generation {} is there", g.manifest.generation);
            let why = self.catalogue.incomplete.get(&g.key).cloned().unwrap_or_else(lacks);
            faults.push(damaged(&(g.key.clone(), why)));
        }
        faults
    }

    /// What of the generations that were noted as durable here has gone. Not those that retention may have removed since
    /// they were noted, because a newer one is whole.
    pub fn gone(&self, dir: &JobDir) -> Vec<String> {
        let (name, there) = (&self.config.name, self.catalogue.numbers());
        let newest = self.catalogue.whole().last().map_or(0, |g| g.manifest.generation);
        let noted = notes::durable_on(dir, name).into_iter();
        let gone = noted.filter(|n| *n > newest && !there.contains(n));
        let what =
            |n| format!("tier {name}: generation {n}, which was durable there, is gone; belay flush copies the newest one again");
        gone.map(what).collect()
    }

    /// Whether something of generation `g`, here or at a part, may be as good as ever and cannot be read now.
    fn is_out_of_reach(&self, g: &Listed) -> bool {
        self.catalogue.is_out_of_reach(g) || self.obstacle_at_parts(g).is_some()
    }

    /// Why the parts of generation `g` may have it as whole as ever, and it cannot be read now.
    fn obstacle_at_parts(&self, g: &Listed) -> Option<Failure> {
        let mut parts = g
            .record
            .parts
            .iter()
            .filter_map(|p| Some((p.tag, &self.parts.get(&p.tag)?.catalogue)));
        parts.find_map(|(tag, c)| {
            let lock = c.locked.first().map(|lock| self.lacks_key(lock));
            let shut = lock.or_else(|| c.unread.first().map(|unread| self.not_read(unread)));
            shut.map(|f| Failure::new(f.exit, format!("part {tag}: {f}")))
        })
    }

    /// Numbers of the generations that are whole and can be read.
    pub fn readable(&self) -> Vec<u64> {
        let whole = self.catalogue.whole().into_iter().filter(|g| !self.is_out_of_reach(g));
        whole.map(|g| g.manifest.generation).collect()
    }

    /// What cannot be read for want of a key: as good as ever, for who has it.
    pub fn locked(&self) -> impl Iterator<Item = Failure> + '_ {
        let parts = self.parts.values().flat_map(|part| &part.catalogue.locked);
        let all = self.catalogue.locked.iter().chain(parts);
        all.map(|lock| self.lacks_key(lock))
    }

    /// What could not be read this time, and may be as good as ever.
    pub fn unread(&self) -> impl Iterator<Item = Failure> + '_ {
        let parts = self.parts.values().flat_map(|part| &part.catalogue.unread);
        let all = self.catalogue.unread.iter().chain(parts);
        all.map(|unread| self.not_read(unread))
    }

    /// Why generation `number` may not be readable: for want of a key, or because something could not be read this time.
    fn obstacle(&self, number: u64) -> Option<Failure> {
        let all = || {
            [&self.catalogue]
                .into_iter()
                .chain(self.parts.values().map(|part| &part.catalogue))
        };
        let lock = all().find_map(|c| c.lock_of(number)).map(|lock| self.lacks_key(lock));
        lock.or_else(|| all().find_map(|c| c.unread_of(number)).map(|unread| self.not_read(unread)))
    }

    fn not_read(&self, (key, why): &(String, String)) -> Failure {
        let why = format!("tier {}: {key}: cannot be read: {why}", self.tier.name());
        Failure::new(Exit::Io, why)
    }

    fn lacks_key(&self, (key, why): &(String, String)) -> Failure {
        Failure::new(Exit::NoKey, format!("tier {}: {key}: {why}", self.tier.name()))
    }

    /// Reads every byte that the tier holds and compares it with its checksums: the bytes read, and every fault. Packs
    /// that are damaged are suspect from then on, and those that are whole are not any more: for all who read the tier,
    /// unless it was opened to be looked at.
    pub fn verify(&mut self, d: &Description) -> Result<(u64, Vec<String>), Failure> {
        let (mut bytes, mut faults) = self.verify_own()?;
        for tag in self.tags() {
            let (more, found) = self.part(d, tag)?.verify_own()?;
            bytes += more;
            faults.extend(found.into_iter().map(|f| format!("part {tag}: {f}")));
        }
        self.compare_parts();
        faults.extend(self.faults().into_iter().filter(|f| !faults.contains(f)).collect::<Vec<_>>());
        Ok((bytes, faults))
    }

    fn verify_own(&mut self) -> Result<(u64, Vec<String>), Failure> {
        self.catalogue = Catalogue::read(&*self.tier, &Catalogue::default())?;
        let (bytes, damaged) = self.catalogue.check(&*self.tier)?;
        let mut faults = self.faults();
        faults.extend(damaged);
        // Without it nobody finds the job when its directory is lost.
        if self.tier.length(JOB)?.is_some() {
            match again::describe(&*self.tier, JOB) {
                Ok(Ok(_)) => {}
                Ok(Err(why)) => faults.push(format!("{JOB}: damaged: {why}")),
                // What is sealed with it is told of above.
                Err(StorageError::Locked { .. }) => {}
                Err(e) => self.catalogue.set_aside(&*self.tier, JOB, e)?,
            }
        }
        Ok((bytes, faults))
    }

    /// Finds packs and records that are damaged, so that the next flush copies what it needs of them; what is wrong. They
    /// go only when a record that names others in their place is there. Call while nobody flushes.
    pub fn distrust_damaged(&mut self, d: &Description) -> Result<Vec<String>, Failure> {
        let (_, faults) = self.verify(d)?;
        self.catalogue = self.catalogue.forgotten();
        for part in self.parts.values_mut() {
            part.catalogue = part.catalogue.forgotten();
        }
        Ok(faults)
    }

    /// Removes all but the `keep` newest generations; all of them where there is none to keep. Returns the bytes freed.
    pub fn collect(&mut self, dir: &JobDir, keep: Option<u32>) -> Result<u64, Failure> {
        self.tier.clear()?;
        self.catalogue = Catalogue::read(&*self.tier, &Catalogue::default())?;
        let freed = match keep {
            Some(keep) => self.collect_old(dir, keep),
            None => self.collect_all(dir),
        };
        // Also after a failure: some may have been removed.
        notes::write(dir, self)?;
        freed
    }

    fn collect_old(&mut self, dir: &JobDir, keep: u32) -> Result<u64, Failure> {
        let (d, tags) = (dir.description()?, self.tags());
        self.read_parts(&d)?;
        let freed = self.catalogue.retain(&*self.tier, keep, u64::MAX)? + self.prune(&d, &tags)?;
        Ok(freed + self.remove_ended(&d, &self.tags())?)
    }

    fn collect_all(&mut self, dir: &JobDir) -> Result<u64, Failure> {
        let freed = self.catalogue.remove_all(&*self.tier)?;
        self.remove_folder(dir);
        notes::forget(dir, &self.config.name);
        Ok(freed)
    }
}

impl Durable {
    /// Removes the folder of a job of which the tier holds nothing more. One that is not empty stays.
    fn remove_folder(&self, dir: &JobDir) {
        let folder = dir.description().ok().zip(self.config.path.as_ref());
        if let Some(folder) = folder.map(|(d, path)| path.join(d.folder())) {
            remove_empty(&folder);
        }
    }
}

/// Removes directory `path` and those in it, as far as they hold nothing.
fn remove_empty(path: &Path) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    if let Err(e) = std::fs::remove_dir(path) {
        tracing::debug!(path = %path.display(), error = %e, "directory stays");
    }
}

/// Has `work` done with each durable tier of a job, whatever becomes of the others; what failed.
pub fn for_each(d: &Description, to: To, mut work: impl FnMut(&mut Durable) -> Result<(), Failure>) -> Vec<Failure> {
    let mut failed = Vec::new();
    for t in d.config.durable() {
        if let Err(e) = Durable::open(t, d, to).and_then(|mut durable| work(&mut durable)) {
            tracing::warn!(tier = t.name, error = %e, "going on without this tier");
            failed.push(e);
        }
    }
    failed
}

/// One failure that tells of all of `failed`.
pub fn joined(failed: Vec<Failure>) -> Result<(), Failure> {
    let Some(exit) = failed.first().map(|f| f.exit) else {
        return Ok(());
    };
    let mut each: Vec<String> = failed.iter().map(Failure::to_string).collect();
    each.dedup();
    Err(Failure::new(exit, each.join("; ")))
}

/// How copying generation `number` went: what `failed`, where a tier has it all the same. One copy that outlives the node
/// is what is asked for.
pub(crate) fn outcome(number: u64, is_held: bool, failed: Vec<Failure>) -> Result<Vec<Failure>, Failure> {
    if is_held {
        return Ok(failed);
    }
    joined(failed).map(|()| Vec::new()).map_err(|f| not_durable(number, &f))
}

/// Why generation `number` is not durable.
pub(crate) fn not_durable(number: u64, why: &Failure) -> Failure {
    let message = format!("generation {number} is committed in the job directory, but is not durable: {why}");
    Failure::new(Exit::NotDurable, message)
}

/// Copies generation `g` of a job that does not run to its durable tiers, after `before` has been done with each; it
/// gets what will tell how far the copying is. What failed, where a tier has the generation.
pub fn flush_at_rest(
    dir: &JobDir,
    d: &Description,
    g: &Generation,
    mut before: impl FnMut(&mut Durable, &Arc<Control>) -> Result<(), Failure>,
) -> Result<Vec<Failure>, Failure> {
    let rows = table::read(&g.path)?;
    let mut flush = |mut members: Option<&mut Members>| {
        let (mut is_held, mut unread) = (false, Vec::new());
        let failed = for_each(d, To::Use, |durable| {
            let control = Arc::new(Control::default());
            before(durable, &control)?;
            let from = (&*g.path, members.as_deref_mut());
            durable.flush(dir, d, from, &control)?;
            is_held = true;
            unread.extend(durable.unread());
            Ok(())
        });
        outcome(g.number, is_held, [failed, unread].concat())
    };
    if d.config.redundancy.scheme.is_none() || rows.is_empty() {
        return flush(None);
    }
    let flushed = hosts::at_rest(dir, d, (g.number, &rows), |members| Ok(flush(Some(members))));
    flushed.map_err(|f| not_durable(g.number, &f))?
}

/// Before job `d` begins anew in `dir`: the tiers are checked, and local ones of before that are not there forgotten.
pub fn begin(dir: &JobDir, d: &Description) -> Result<(), Failure> {
    check(d)?;
    local::begin_anew(dir).map(drop)
}

/// Refuses directories that are not there before a program is started; object stores are asked later.
pub fn check(d: &Description) -> Result<(), Failure> {
    let host = match d.across_hosts || d.folder.is_some() {
        true => format!(" on {}", sys::host()),
        false => String::new(),
    };
    for (t, path) in d.config.tiers.iter().filter_map(|t| Some((t, t.path.as_ref()?))) {
        let cannot = |why: &str| {
            let at = format!("{}{host}", path.display());
            Failure::new(
                Exit::NoTier,
                format!("tier {}: {at}: {why}; make it, or change belay.toml", t.name),
            )
        };
        match std::fs::metadata(path) {
            Ok(m) if !m.is_dir() => return Err(cannot("not a directory")),
            Ok(_) if !sys::may_write(path) => return Err(cannot("not writable")),
            Ok(_) => drop(trust::holder(path).map_err(|e| cannot(&e.to_string()))?),
            Err(e) => return Err(cannot(&crate::failure::reason(&e))),
        }
    }
    Ok(())
}

/// The job has ended: its description on the durable tiers that hold something of it says how. Who looks there for a job
/// whose directory is gone does not begin one again that was done.
pub(crate) fn tell_end(dir: &JobDir, d: &Description) {
    let holds = |known: &Option<Known>| known.as_ref().is_some_and(|k| !k.generations.is_empty());
    for (t, _) in d.config.durable().zip(known(dir, d)).filter(|(_, known)| holds(known)) {
        if let Err(e) = Durable::open(t, d, To::Use).and_then(|durable| Ok(durable.describe(&d.encode()?)?)) {
            tracing::warn!(tier = t.name, error = %e, "record the end there");
        }
    }
}

/// What a level needs and the job has not.
pub fn check_level(d: &Description, level: belay_wire::Level) -> Result<(), Failure> {
    use belay_wire::Level;
    match level {
        Level::Durable if d.config.durable().next().is_none() => Err(Failure::new(
            Exit::NoTier,
            "level durable: the job has no tier of kind pfs or object; name one in belay.toml and launch or restart with it",
        )),
        Level::Redundant => Err(Failure::new(
            Exit::NoTier,
            "level redundant: for jobs on several hosts, launched with --across-hosts, --redundancy and --local-dir",
        )),
        Level::Durable | Level::Local => Ok(()),
    }
}

pub use fetching::Fetched;

#[cfg(test)]
mod tests;
