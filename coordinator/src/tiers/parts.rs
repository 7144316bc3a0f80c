//! The parts of a job on several hosts, on a durable tier. Each has a folder of its own below the job's, with packs and records like those of a job.
//!
//! ```text
//! NAME-ID/nodes/1/{packs,gen,job.json}
//! packs and records of the parts ──> packs of the root ──> record of the root, which names the parts' manifests
//! ```
//! Only the root's record makes a generation. What the parts hold for which the root has no record is removed by the next flush; until then it is of no consequence. So a kill at any
//! instant leaves generations that are whole on all hosts, or none. All of it is copied by the agent of the root, from the job directory that the hosts share: it outlives the parts.

use super::{Durable, Part};
use crate::jobdir::{Access, Description, JobDir};
use crate::nodes::again::part_dir;
use crate::nodes::table;
use crate::Failure;
use belay_image::files;
use belay_image::manifest::{Manifest, MANIFEST_FILE, MAX_BYTES};
use belay_storage::catalogue::{record_key, Listed};
use belay_storage::flush::{self, Control, Flushed};
use belay_storage::store::Store;
use belay_storage::StorageError;
use belay_wire::Exit;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Whether the generation in this directory, or an older one of the job, may have parts.
pub(super) fn may_be(d: &Description, generation: &Path) -> Result<bool, Failure> {
    Ok(d.across_hosts || !table::read(generation)?.is_empty())
}

/// The tags of the parts of the generation in `path`, with the directories of their generations of that number.
pub(crate) fn of_generation(job: &Path, path: &Path) -> Result<Vec<(u64, PathBuf)>, Failure> {
    let name = path.file_name().unwrap_or_default();
    let rows = table::read(path)?;
    let own = |tag| part_dir(job, tag).join("gen").join(name);
    Ok(rows.iter().map(|r| (r.tag, own(r.tag))).collect())
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
            Entry::Vacant(e) => {
                let folder = Some(format!("{}/nodes/{tag}", d.folder()));
                let of_part = Description { folder, ..d.clone() };
                Ok(e.insert(Durable::open(&self.config, &of_part, self.to)?))
            }
        }
    }

    /// What is known of part `tag`.
    pub(super) fn known_part(&self, tag: u64) -> Option<&Durable> {
        self.parts.get(&tag)
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

    /// Which generations lack something at a part, as far as has been read.
    pub(super) fn compare_parts(&mut self) {
        let mut incomplete = BTreeMap::new();
        for g in &self.catalogue.generations {
            let number = g.manifest.generation;
            let is_there = |p: &&Part| {
                let whole = self.parts.get(&p.tag).map(|d| d.catalogue.whole()).unwrap_or_default();
                whole
                    .iter()
                    .any(|w| w.manifest.generation == number && belay_image::checksum(w.record.manifest.as_bytes()) == p.manifest)
            };
            if let Some(p) = g.record.parts.iter().find(|p| !is_there(p)) {
                let why = format!("not everything of part {} of generation {number} is there", p.tag);
                incomplete.insert(g.key.clone(), why);
            }
        }
        self.catalogue.incomplete = incomplete;
    }

    /// Removes the records that these parts hold of generations for which the root has none, but for manifests in `coming`.
    fn forget(&mut self, d: &Description, tags: &BTreeSet<u64>, coming: &BTreeSet<Vec<u8>>) -> Result<(), Failure> {
        let numbers: BTreeSet<u64> = self.catalogue.generations.iter().map(|g| g.manifest.generation).collect();
        // A record that cannot be read may name any of them.
        let all = self.catalogue.has_unreadable_records();
        let keep = |g: &Listed| all || numbers.contains(&g.manifest.generation) || coming.contains(g.record.manifest.as_bytes());
        for tag in tags {
            let part = self.part(d, *tag)?;
            part.read()?;
            part.catalogue.forget(&*part.tier, &keep)?;
        }
        Ok(())
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

    /// Copies a generation of a job that may have parts: first theirs, then the root's own.
    pub(super) fn copy_with_parts(
        &mut self,
        dir: &JobDir,
        d: &Description,
        (generation, options): (&Path, flush::Options),
        control: &Control,
    ) -> Result<Flushed, Failure> {
        self.tier.clear()?;
        self.read()?;
        let rows = of_generation(dir.path(), generation)?;
        let tags: BTreeSet<u64> = self.tags().into_iter().chain(rows.iter().map(|(tag, _)| *tag)).collect();
        // What an interrupted flush has copied of this generation is used.
        let text = |own: &Path| files::read(&own.join(MANIFEST_FILE), MAX_BYTES);
        let coming = rows.iter().map(|(_, own)| text(own)).collect::<Result<BTreeSet<_>, _>>()?;
        self.forget(d, &tags, &coming)?;
        self.compare_parts();
        self.make_room(d, (generation, &options, control), &rows, &tags)?;
        // Room has been made, and older generations go when the root says so.
        let of_part = flush::Options {
            keep: u32::MAX,
            capacity: None,
            ..options
        };
        let (mut parts, mut sum) = (Vec::new(), Flushed::default());
        for (tag, own) in &rows {
            let named = |f: Failure| Failure::new(f.exit, format!("part {tag}: {f}"));
            let theirs = JobDir::open(&part_dir(dir.path(), *tag), Access::Own)?.description()?;
            let part = self.part(d, *tag)?;
            sum += part.copy(&theirs, (own, &of_part), &[], control).map_err(named)?;
            let manifest = belay_image::checksum(&text(own)?);
            parts.push(Part { tag: *tag, manifest });
        }
        let of_root = flush::Options {
            capacity: None,
            ..options
        };
        sum += self.copy(d, (generation, &of_root), &parts, control)?;
        // Another copy of the job directory may have flushed meanwhile, and removed what it does not know of.
        self.read_parts(d)?;
        let key = record_key(
            belay_image::manifest::Manifest::read(generation)?.generation,
            &text(generation)?,
        );
        if let Some(why) = self.catalogue.incomplete.get(&key) {
            let why = format!(
                "tier {}: {key}: {why}; does another job directory flush to it?",
                self.config.name
            );
            self.tier.delete(&key)?;
            self.tier.sync()?;
            return Err(Failure::new(Exit::NotDurable, why));
        }
        // The generation is durable whether that succeeds or not; the next flush tries again.
        if let Err(e) = self.prune(d, &tags) {
            tracing::warn!(tier = self.config.name, error = %e, "older generations of parts stay");
        }
        Ok(sum)
    }

    /// Removes older generations while this one would not fit; the newest whole one stays.
    fn make_room(
        &mut self,
        d: &Description,
        (generation, options, control): (&Path, &flush::Options, &Control),
        rows: &[(u64, PathBuf)],
        tags: &BTreeSet<u64>,
    ) -> Result<(), Failure> {
        let Some(capacity) = options.capacity else { return Ok(()) };
        let all = || [generation].into_iter().chain(rows.iter().map(|(_, own)| own.as_path()));
        let (mut pruned, mut whole) = (false, false);
        let mut is_whole = || {
            if !std::mem::replace(&mut whole, true) {
                all().try_for_each(|own| flush::check_here(own, control))?;
            }
            Ok(())
        };
        loop {
            let mut used = self.catalogue.bytes;
            let mut bytes = flush::lacking(generation, &self.catalogue)?;
            for tag in tags {
                used += self.part(d, *tag)?.catalogue.bytes;
            }
            for (tag, own) in rows {
                bytes += flush::lacking(own, &self.part(d, *tag)?.catalogue)?;
            }
            if used + bytes <= capacity {
                return Ok(());
            }
            if !std::mem::replace(&mut pruned, true) {
                self.prune(d, tags)?;
                continue;
            }
            if !self.catalogue.give_way(&*self.tier, &mut is_whole)? {
                let tier = self.config.name.clone();
                return Err(StorageError::TierFull {
                    tier,
                    capacity,
                    used,
                    bytes,
                }
                .into());
            }
            self.prune(d, tags)?;
        }
    }
}

/// What is known of part `tag` on each of these tiers.
pub(super) fn sources(open: &[Durable], tag: u64) -> Vec<&Durable> {
    open.iter().filter_map(|d| d.known_part(tag)).collect()
}
