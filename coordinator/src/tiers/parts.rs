//! The parts of a job on several hosts, on a durable tier. Each has a folder of its own below the job's, with packs and
//! records like those of a job.
//!
//! ```text
//! NAME-ID/nodes/1/{packs,gen,job.json}
//! packs and records of the parts ──> packs of the root ──> record of the root, which names the parts' manifests
//! ```
//! Only the root's record makes a generation. What the parts hold for which the root has no record is removed by the
//! next flush; until then it is of no consequence. So a kill at any instant leaves generations that are whole on all
//! hosts, or none. All of it is copied by the agent of the root, from the job directory that the hosts share: it
//! outlives the parts. Only where the checkpoints lie on the hosts' own disks each host copies its own (`hosts`).

use super::members::Members;
use super::{Durable, Part};
use crate::jobdir::{Access, Description, JobDir};
use crate::nodes::seat::part_dir;
use crate::nodes::table;
use crate::Failure;
use belay_image::files;
use belay_image::manifest::{Manifest, MANIFEST_FILE, MAX_BYTES};
use belay_storage::catalogue::{record_key, Listed};
use belay_storage::flush::{self, Control, Flushed};
use belay_storage::store::Store;
use belay_storage::tier::{self, Object};
use belay_storage::StorageError;
use belay_wire::Exit;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The job that `d` describes, as its part `tag` has it on a tier.
pub(super) fn described(d: &Description, tag: u64) -> Description {
    let folder = Some(format!("{}/nodes/{tag}", d.folder()));
    Description { folder, ..d.clone() }
}

/// Who has what the parts have of the generation that is flushed.
pub(super) enum Source<'a> {
    /// It lies here: tags and directories.
    Here(Vec<(u64, PathBuf)>),
    /// The parts, on their hosts.
    There(&'a mut Members),
}

impl Source<'_> {
    fn parts(&self) -> Result<Vec<Part>, Failure> {
        let part = |(tag, own): &(u64, PathBuf)| {
            let text = files::read(&own.join(MANIFEST_FILE), MAX_BYTES)?;
            let manifest = belay_image::checksum(&text);
            Ok(Part { tag: *tag, manifest })
        };
        match self {
            Self::Here(rows) => rows.iter().map(part).collect(),
            Self::There(members) => Ok(members.parts()),
        }
    }
}

/// Whether the generation in this directory, or an older one of the job, may have parts.
pub(super) fn may_be(d: &Description, generation: &Path) -> Result<bool, Failure> {
    Ok(d.across_hosts || !table::read(generation)?.is_empty())
}

/// The tags of the parts of the generation in `path`, with the directories of their generations of that number.
pub(crate) fn of_generation(job: &Path, path: &Path) -> Result<Vec<(u64, PathBuf)>, Failure> {
    let rows = table::read(path)?;
    Ok(rows.iter().map(|r| (r.tag, generation_of(job, r.tag, path))).collect())
}

/// The directory that part `tag` has for the generation in `path`.
pub(crate) fn generation_of(job: &Path, tag: u64, path: &Path) -> PathBuf {
    part_dir(job, tag).join("gen").join(path.file_name().unwrap_or_default())
}

/// Whether a part's generation, in directory `own`, is not here because it lies on its host's own disk, and that is another host.
pub(crate) fn lies_elsewhere(own: &Path) -> bool {
    let is_link = |gen: &Path| std::fs::symlink_metadata(gen).is_ok_and(|m| m.is_symlink());
    !own.exists() && own.parent().is_some_and(is_link)
}

/// How many chunks of the parts of the generation in `path` lie only in local tiers of their hosts, and which hosts these are.
pub(crate) fn away(job: &Path, path: &Path) -> Result<(usize, BTreeSet<String>), Failure> {
    let (mut chunks, mut hosts) = (0, BTreeSet::new());
    for (_, own) in of_generation(job, path)? {
        let store = Store::of_generation(&own);
        if store.elsewhere().is_empty() {
            continue;
        }
        let home = store.at_home()?;
        let away = Manifest::read(&own)?.chunks.iter().filter(|c| !home.contains(&c.id)).count();
        if away > 0 {
            chunks += away;
            hosts.extend(store.elsewhere().iter().filter_map(|t| Some(t.host.as_ref()?.name.clone())));
        }
    }
    Ok((chunks, hosts))
}

impl Durable {
    /// The same tier for part `tag`.
    pub(super) fn part(&mut self, d: &Description, tag: u64) -> Result<&mut Durable, Failure> {
        match self.parts.entry(tag) {
            Entry::Occupied(e) => Ok(e.into_mut()),
            Entry::Vacant(e) => Ok(e.insert(Durable::open_with(
                &self.config,
                &described(d, tag),
                (self.to, self.keys.clone()),
            )?)),
        }
    }

    /// What is known of part `tag`.
    pub(super) fn known_part(&self, tag: u64) -> Option<&Durable> {
        self.parts.get(&tag)
    }

    /// Whether it is known what all parts of generation `g` hold.
    pub(super) fn has_read_parts_of(&self, g: &Listed) -> bool {
        let is_read = |p: &Part| self.parts.get(&p.tag).is_some_and(|part| part.catalogue.is_read());
        g.record.parts.iter().all(is_read)
    }

    /// The parts that the records name.
    pub(super) fn tags(&self) -> BTreeSet<u64> {
        let named = self.catalogue.generations.iter().flat_map(|g| &g.record.parts);
        named.map(|p| p.tag).collect()
    }

    /// Reads what the parts hold, after the root's records.
    pub(super) fn read_parts(&mut self, d: &Description) -> Result<(), Failure> {
        for tag in self.tags() {
            self.part(d, tag)?.read()?;
        }
        self.compare_parts();
        Ok(())
    }

    /// The keys without which generation `g` cannot be read, here and at its parts.
    pub(super) fn keys_of(&self, g: &Listed) -> BTreeSet<String> {
        let of_part = |p: &Part| {
            let catalogue = &self.parts.get(&p.tag)?.catalogue;
            let mut all = catalogue.generations.iter();
            let is_it = |own: &&Listed| of_manifest(own) == (g.manifest.generation, p.manifest);
            Some(catalogue.keys_of(all.find(is_it)?))
        };
        let at_parts = g.record.parts.iter().filter_map(of_part).flatten();
        self.catalogue
            .keys_of(g)
            .into_iter()
            .chain(at_parts)
            .map(str::to_owned)
            .collect()
    }

    /// Which generations lack something at a part, as far as has been read.
    pub(super) fn compare_parts(&mut self) {
        let held = |d: &Durable| d.catalogue.whole().into_iter().map(of_manifest).collect();
        let held: BTreeMap<u64, BTreeSet<(u64, u64)>> = self.parts.iter().map(|(tag, d)| (*tag, held(d))).collect();
        let mut incomplete = BTreeMap::new();
        for g in &self.catalogue.generations {
            let number = g.manifest.generation;
            let is_there = |p: &&Part| held.get(&p.tag).is_some_and(|h| h.contains(&(number, p.manifest)));
            if let Some(p) = g.record.parts.iter().find(|p| !is_there(p)) {
                let why = format!("not everything of part {} of generation {number} is there", p.tag);
                incomplete.insert(g.key.clone(), why);
            }
        }
        self.catalogue.incomplete = incomplete;
    }

    /// Removes the records that these parts hold of generations for which the root has none, but for manifests with the
    /// checksums `coming`.
    fn forget(&mut self, d: &Description, tags: &BTreeSet<u64>, coming: &BTreeSet<u64>) -> Result<(), Failure> {
        let numbers: BTreeSet<u64> = self.catalogue.generations.iter().map(|g| g.manifest.generation).collect();
        // A record that cannot be read may name any of them.
        let all = self.catalogue.has_unreadable_records();
        let is_coming = |g: &Listed| coming.contains(&of_manifest(g).1);
        let keep = |g: &Listed| all || numbers.contains(&g.manifest.generation) || is_coming(g);
        for tag in tags {
            let part = self.part(d, *tag)?;
            part.read()?;
            part.catalogue.check_open(&*part.tier)?;
            part.catalogue.forget(&*part.tier, &keep)?;
        }
        Ok(())
    }

    /// Removes all that other parts than these hold, which have ended; the bytes freed.
    pub(super) fn remove_ended(&mut self, d: &Description, tags: &BTreeSet<u64>) -> Result<u64, Failure> {
        // A record that cannot be read may name any of them.
        if self.catalogue.has_unreadable_records() {
            return Ok(0);
        }
        let tag = |o: &Object| o.key.split('/').nth(1)?.parse().ok();
        let there: BTreeSet<u64> = self.tier.list("nodes")?.iter().filter_map(tag).collect();
        let mut freed = 0;
        for tag in there.difference(tags) {
            let part = self.part(d, *tag)?;
            part.read()?;
            freed += part.catalogue.remove_all(&*part.tier)?;
        }
        Ok(freed)
    }

    /// Removes what these parts hold of generations for which the root has no record, and what no record names; the bytes freed.
    pub(super) fn prune(&mut self, d: &Description, tags: &BTreeSet<u64>) -> Result<u64, Failure> {
        self.forget(d, tags, &BTreeSet::new())?;
        if self.catalogue.has_unreadable_records() {
            return Ok(0);
        }
        let mut freed = 0;
        for tag in tags {
            let part = self.part(d, *tag)?;
            freed += part.catalogue.collect(&*part.tier)?;
        }
        Ok(freed)
    }

    /// Copies a generation of a job that may have parts: first theirs, then the root's own; those that have theirs on
    /// their hosts copy it meanwhile.
    pub(super) fn copy_with_parts(
        &mut self,
        dir: &JobDir,
        d: &Description,
        (generation, options): (&Path, flush::Options),
        mut source: Source<'_>,
        control: &Control,
    ) -> Result<Flushed, Failure> {
        self.tier.clear()?;
        self.read()?;
        self.catalogue.check_open(&*self.tier)?;
        let parts = source.parts()?;
        let tags: BTreeSet<u64> = self.tags().into_iter().chain(parts.iter().map(|p| p.tag)).collect();
        // What an interrupted flush has copied of this generation is used.
        let coming = parts.iter().map(|p| p.manifest).collect();
        self.forget(d, &tags, &coming)?;
        self.compare_parts();
        self.tidy(d, &tags, &source)?;
        self.make_room(d, (generation, &options, control), &mut source, &tags)?;
        // Room has been made, and older generations go when all of this one is known to be there.
        let of_each = flush::Options {
            keep: u32::MAX,
            capacity: None,
            ..options
        };
        let copied = match source {
            Source::Here(rows) => self.copy_each(dir, d, (generation, &of_each), (&rows, &parts), control),
            Source::There(members) => {
                let name = self.config.name.clone();
                let copied = self.copy(d, (generation, &of_each), &mut members.copy_to(&name), control);
                if members.found_no_room() {
                    control.found_no_room();
                }
                copied
            }
        };
        let sum = copied.inspect_err(|_| {
            if control.is_full() {
                self.give_back(d, &tags);
            }
        })?;
        // Another copy of the job directory may have flushed meanwhile, and removed what it does not know of.
        self.read_parts(d)?;
        let number = Manifest::read(generation)?.generation;
        let key = record_key(number, &files::read(&generation.join(MANIFEST_FILE), MAX_BYTES)?);
        if let Some(why) = self.catalogue.incomplete.get(&key) {
            let mut named = self.catalogue.generations.iter().filter(|g| g.key == key);
            if let Some(shut) = named.find_map(|g| self.obstacle_at_parts(g)) {
                // It may all be there: the next flush finds out.
                return Err(shut);
            }
            let why = format!(
                "tier {}: {key}: {why}; does another job directory flush to it?",
                self.config.name
            );
            self.tier.delete(&key)?;
            self.tier.sync()?;
            return Err(Failure::new(Exit::NotDurable, why));
        }
        flush::retain(&*self.tier, options.keep, number, &mut self.catalogue);
        // The generation is durable whether that succeeds or not; the next flush tries again.
        let pruned = self.prune(d, &tags).and_then(|_| self.remove_ended(d, &self.tags()));
        if let Err(e) = pruned {
            tracing::warn!(tier = self.config.name, error = %e, "older generations of parts stay");
        }
        Ok(sum)
    }

    /// Copies what these parts have, and then what the root has itself.
    fn copy_each(
        &mut self,
        dir: &JobDir,
        d: &Description,
        (generation, options): (&Path, &flush::Options),
        (rows, mut parts): (&[(u64, PathBuf)], &[Part]),
        control: &Control,
    ) -> Result<Flushed, Failure> {
        let mut sum = Flushed::default();
        for (tag, own) in rows {
            let named = |f: Failure| Failure::new(f.exit, format!("part {tag}: {f}"));
            let theirs = JobDir::open(&part_dir(dir.path(), *tag), Access::Own)?.description()?;
            let part = self.part(d, *tag)?;
            let copied = part.copy(&theirs, (own, options), &mut &[][..], control);
            sum += copied.map_err(named)?;
        }
        sum += self.copy(d, (generation, options), &mut parts, control)?;
        Ok(sum)
    }

    /// Removes what interrupted flushes have left, everywhere before anything is copied: each may need the room. What
    /// parts on other hosts will use is known there, and they do the same before they copy.
    fn tidy(&mut self, d: &Description, tags: &BTreeSet<u64>, source: &Source<'_>) -> Result<(), Failure> {
        if let Err(e) = self.remove_ended(d, tags) {
            tracing::warn!(tier = self.config.name, error = %e, "what parts had that have ended stays");
        }
        if let Source::Here(rows) = source {
            for (tag, own) in rows {
                let part = self.part(d, *tag)?;
                flush::tidy(own, &*part.tier, &mut part.catalogue)?;
            }
        }
        Ok(())
    }

    /// The tier had no room for a generation: what others have copied of it goes too.
    fn give_back(&mut self, d: &Description, tags: &BTreeSet<u64>) {
        // Perhaps the record is there all the same.
        let read = self.read();
        let own = read.and_then(|()| Ok(self.catalogue.collect(&*self.tier)?));
        if let Err(e) = own.and_then(|_| self.prune(d, tags)) {
            tracing::warn!(tier = self.config.name, error = %e, "packs of a flush that found no room stay");
        }
    }

    /// Removes older generations while this one would not fit; the newest whole one stays.
    fn make_room(
        &mut self,
        d: &Description,
        (generation, options, control): (&Path, &flush::Options, &Control),
        source: &mut Source<'_>,
        tags: &BTreeSet<u64>,
    ) -> Result<(), Failure> {
        let Some(capacity) = options.capacity else { return Ok(()) };
        let name = self.config.name.clone();
        let (beside, elsewhere) = match source {
            Source::Here(rows) => (rows.clone(), None),
            Source::There(members) => (Vec::new(), Some(members.are_whole())),
        };
        let (mut pruned, mut whole) = (false, false);
        let mut is_whole = || {
            if !std::mem::replace(&mut whole, true) {
                let mut all = [generation].into_iter().chain(beside.iter().map(|(_, own)| own.as_path()));
                all.try_for_each(|own| flush::check_here(own, control))?;
            }
            match elsewhere {
                Some(false) => {
                    let why = std::io::Error::other(
                        "nothing on the tier is whole, and it is not known whether the parts are: it is not redundant",
                    );
                    Err(tier::failed(&name, "make room for", &generation.display().to_string(), why))
                }
                _ => Ok(()),
            }
        };
        loop {
            let mut used = self.catalogue.bytes;
            let mut bytes = flush::lacking(generation, &self.catalogue)?;
            for tag in tags {
                used += self.part(d, *tag)?.catalogue.bytes;
            }
            bytes += match source {
                Source::Here(rows) => {
                    let lacking = |(tag, own): &(u64, PathBuf)| -> Result<u64, Failure> {
                        Ok(flush::lacking(own, &self.part(d, *tag)?.catalogue)?)
                    };
                    rows.iter().map(lacking).sum::<Result<u64, Failure>>()?
                }
                Source::There(members) => members.lacking(&name)?,
            };
            if used + bytes <= capacity {
                return Ok(());
            }
            if !std::mem::replace(&mut pruned, true) {
                self.prune(d, tags)?;
                continue;
            }
            let full = |advice| StorageError::TierFull {
                tier: name.clone(),
                capacity,
                used,
                bytes,
                advice,
            };
            let mut given_up = false;
            for tag in tags {
                let part = self.part(d, *tag)?;
                given_up |= part.catalogue.give_up_damaged(&*part.tier, &mut is_whole)?;
                // What generations of the root needed would stay there.
                if part.catalogue.has_unreadable_records() {
                    return Err(full(format!("part {tag}: {}", part.catalogue.advice())).into());
                }
            }
            if !given_up && !self.catalogue.give_way(&*self.tier, &mut is_whole)? {
                return Err(full(self.catalogue.advice()).into());
            }
            self.prune(d, tags)?;
        }
    }
}

/// Number of a generation, and the checksum of its manifest.
fn of_manifest(g: &Listed) -> (u64, u64) {
    (g.manifest.generation, belay_image::checksum(g.record.manifest.as_bytes()))
}

/// What is known of part `tag` on each of these tiers.
pub(super) fn sources(open: &[Durable], tag: u64) -> Vec<&Durable> {
    open.iter().filter_map(|d| d.known_part(tag)).collect()
}
