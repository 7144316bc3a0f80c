//! What a durable tier holds of a job: packs, and the records that make generations of them.
//!
//! ```text
//! packs/000007-5d0c….bpk        chunks and files (see `pack`)
//! gen/000007-9f3a….json         record: the manifest, and which packs hold what it lists; written last
//! suspect/000007-5d0c….bpk      why that pack is not trusted
//! job.json                      what is needed to make the job directory again
//! ```
//! A generation is durable when its record is there. Records name packs, never the other way round, so a kill leaves at
//! most packs that no record names; what they hold is used by the next flush, or they are removed.

mod reading;

use crate::pack::{self, Index, Item, PackRef};
use crate::tier::{read_whole, write_whole, Tier};
use crate::StorageError;
use belay_image::checksum;
use belay_image::manifest::Manifest;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Version of the records.
const FORMAT: u32 = 1;
/// Longest record that is read.
const MAX_RECORD: u64 = 1 << 30;

/// No generation has this number, or a greater one.
const MAX_GENERATION: u64 = 1 << 48;

/// A generation on a tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Contents of its manifest file.
    pub manifest: String,
    /// The packs that hold its chunks and files.
    pub packs: Vec<PackRef>,
    /// Of a job on several hosts: the parts, without which it is worth nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
}

/// A part's share of a generation, which has a record of its own where the part's packs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Which part.
    pub tag: u64,
    /// Checksum of its manifest file.
    pub manifest: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Envelope {
    format: u32,
    xxh3: u64,
    body: String,
}

/// A record, its key, and the manifest that it holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// Key of the record.
    pub key: String,
    /// The record.
    pub record: Record,
    /// Its manifest.
    pub manifest: Manifest,
}

impl Listed {
    pub(crate) fn decode(key: &str, bytes: &[u8]) -> Result<Self, String> {
        let envelope: Envelope = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if envelope.format != FORMAT {
            return Err(format!("record format {}, this belay reads format {FORMAT}", envelope.format));
        }
        if checksum(envelope.body.as_bytes()) != envelope.xxh3 {
            return Err("checksum does not match".into());
        }
        let record: Record = serde_json::from_str(&envelope.body).map_err(|e| e.to_string())?;
        let manifest = Manifest::decode(key.as_ref(), record.manifest.as_bytes()).map_err(|e| e.to_string())?;
        // Those that follow need room.
        if manifest.generation >= MAX_GENERATION || manifest.next_chunk > u32::MAX / 2 {
            return Err(format!(
                "generation {} and chunk {} are no numbers of a job",
                manifest.generation, manifest.next_chunk
            ));
        }
        Ok(Self {
            key: key.to_owned(),
            record,
            manifest,
        })
    }

    /// Names of the items that the generation consists of, and their lengths.
    pub fn items(&self) -> BTreeMap<String, u64> {
        items(&self.manifest, checksum(self.record.manifest.as_bytes()))
    }
}

/// Names of the items that make up the generation of `manifest`, whose file has checksum `sum`, and their lengths.
pub fn items(manifest: &Manifest, sum: u64) -> BTreeMap<String, u64> {
    let chunks = manifest
        .chunks
        .iter()
        .map(|c| (pack::chunk_name(c), crate::chunk::file_bytes(c.pages)));
    let files = manifest.files.iter();
    chunks
        .chain(files.map(|f| (pack::file_name(manifest.generation, sum, &f.name), f.bytes)))
        .collect()
}

/// Key of the mark of a pack that is not trusted.
fn mark_of(pack: &str) -> String {
    pack.replacen("packs", "suspect", 1)
}

/// Leaves word on the tier that pack `key` is damaged; whether that could be done. A failure is only logged: who reads
/// it will find out anew.
pub fn mark(tier: &dyn Tier, key: &str, why: &str) -> bool {
    let why: String = why.chars().take(1000).collect();
    let marked = write_whole(tier, &mark_of(key), why.as_bytes()).and_then(|()| tier.sync());
    if let Err(e) = &marked {
        tracing::warn!(tier = tier.name(), pack = key, error = %e, "suspicion not noted on the tier");
    }
    marked.is_ok()
}

/// Key of the record of a generation.
pub fn record_key(generation: u64, manifest: &[u8]) -> String {
    name_of(generation, checksum(manifest))
}

fn name_of(generation: u64, sum: u64) -> String {
    format!("gen/{generation:06}-{sum:016x}.json")
}

/// The generation whose record has this key; none where no record has such a name.
fn number_of(key: &str) -> Option<u64> {
    let (number, sum) = key.strip_prefix("gen/")?.strip_suffix(".json")?.split_once('-')?;
    let (number, sum) = (number.parse().ok()?, u64::from_str_radix(sum, 16).ok()?);
    (number < MAX_GENERATION && name_of(number, sum) == key).then_some(number)
}

/// What a tier holds.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    /// It is of a tier that has been read; another one says nothing of what is there.
    is_read: bool,
    /// The generations, oldest first.
    pub generations: Vec<Listed>,
    /// The packs and what they hold.
    pub packs: BTreeMap<PackRef, Index>,
    /// Records and packs that cannot be read, and why.
    pub faults: Vec<(String, String)>,
    /// Records and packs that are sealed with keys that are not at hand: as good as ever, so they stay.
    pub locked: Vec<(String, String)>,
    /// Records and packs that could not be read this time, and why: they may be as good as ever, so they stay.
    pub unread: Vec<(String, String)>,
    /// Which key seals each record and pack, where they are sealed.
    keys: BTreeMap<String, String>,
    /// The key that seals what is written now.
    sealing: Option<String>,
    /// Packs of which some bytes are damaged, and why, for all who read the tier. No flush relies on them; a fetch does
    /// where there is nothing better. They stay until no record names them, because the rest of them may be the only
    /// copy.
    pub suspect: BTreeMap<String, String>,
    /// Records that `belay flush --check` has found damaged.
    distrusted: BTreeSet<String>,
    /// Suspect packs of which the tier has no mark: known here alone.
    unmarked: BTreeSet<String>,
    /// Generations that need more than lies here, of which something is missing: keys of their records, and what. Who
    /// knows of it says so.
    pub incomplete: BTreeMap<String, String>,
    /// Bytes of all objects.
    pub bytes: u64,
}

impl Catalogue {
    /// Whether a tier has been read into it.
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// Notes that record or pack `key` is sealed with key `seal`, if with any.
    fn is_sealed_with(&mut self, key: &str, seal: Option<String>) {
        self.keys.extend(seal.map(|seal| (key.to_owned(), seal)));
    }

    /// Notes what has been written now.
    pub(crate) fn is_new(&mut self, key: &str) {
        self.is_sealed_with(key, self.sealing.clone());
    }

    /// Generations of which nothing can be read for want of a key: numbers, by the names of their records, and why.
    pub fn locked_generations(&self) -> impl Iterator<Item = (u64, &str)> + '_ {
        self.locked.iter().filter_map(|(key, why)| Some((number_of(key)?, &**why)))
    }

    /// What of generation `number`, or else what at all, cannot be read for want of a key.
    pub fn lock_of(&self, number: u64) -> Option<&(String, String)> {
        let own = self.locked.iter().find(|(key, _)| number_of(key) == Some(number));
        own.or(self.locked.first())
    }

    /// Generations whose records could not be read this time.
    pub fn unread_generations(&self) -> impl Iterator<Item = u64> + '_ {
        self.unread.iter().filter_map(|(key, _)| number_of(key))
    }

    /// What of generation `number`, or else what at all, could not be read this time.
    pub fn unread_of(&self, number: u64) -> Option<&(String, String)> {
        let is_own = |key: &str| number_of(key) == Some(number) || self.needs(number, key);
        let own = self.unread.iter().find(|(key, _)| is_own(key));
        own.or(self.unread.first())
    }

    fn needs(&self, number: u64, pack: &str) -> bool {
        let mut of_it = self.generations.iter().filter(|g| g.manifest.generation == number);
        of_it.any(|g| g.record.packs.iter().any(|p| p.key == pack))
    }

    /// Whether a pack that generation `g` needs may be as good as ever, and cannot be read now.
    pub fn is_out_of_reach(&self, g: &Listed) -> bool {
        let mut shut = self.unread.iter().chain(&self.locked);
        shut.any(|(key, _)| g.record.packs.iter().any(|p| p.key == *key))
    }

    /// Numbers of the generations of which there is a record, whole or not.
    pub fn numbers(&self) -> BTreeSet<u64> {
        let read = self.generations.iter().map(|g| g.manifest.generation);
        let others = self.locked.iter().chain(&self.unread).chain(&self.faults);
        read.chain(others.filter_map(|(key, _)| number_of(key))).collect()
    }

    /// The keys without which generation `g` cannot be read.
    pub fn keys_of(&self, g: &Listed) -> BTreeSet<&str> {
        let objects = g.record.packs.iter().map(|p| &p.key).chain([&g.key]);
        objects.filter_map(|key| self.keys.get(key)).map(String::as_str).collect()
    }

    /// Refuses where a key is missing for a record, or for a pack that one needs: nothing can be added beside it by who
    /// does not know what it says. Any other pack is of no generation, whoever has put it there.
    pub fn check_open(&self, tier: &dyn Tier) -> Result<(), StorageError> {
        let has_record = self.locked_generations().next().is_some();
        let is_needed = |key: &str| self.generations.iter().any(|g| g.record.packs.iter().any(|p| p.key == key));
        let first = self.locked.iter().find(|(key, _)| has_record || is_needed(key));
        first.map_or(Ok(()), |(key, reason)| {
            Err(StorageError::Locked {
                tier: tier.name().to_owned(),
                key: key.clone(),
                reason: reason.clone(),
            })
        })
    }

    /// Where item `name` lies: in packs that are trusted, then in others.
    pub fn find(&self, name: &str) -> Vec<(&PackRef, &Item)> {
        let items = self
            .packs
            .iter()
            .flat_map(|(p, index)| index.items.iter().map(move |i| (p, i)));
        let mut found: Vec<(&PackRef, &Item)> = items.filter(|(_, i)| i.name == name).collect();
        found.sort_by_key(|(p, _)| self.suspect.contains_key(&p.key));
        found
    }

    /// A catalogue that knows nothing but the packs that this one suspects and of which the tier has no mark, and the
    /// records that it could not read.
    pub fn forgotten(&self) -> Self {
        let records = self.faults.iter().filter(|(key, _)| number_of(key).is_some());
        Self {
            suspect: self.suspicions(),
            unmarked: self.unmarked.clone(),
            distrusted: records.map(|(key, _)| key.clone()).collect(),
            ..Self::default()
        }
    }

    fn suspicions(&self) -> BTreeMap<String, String> {
        let unmarked = self.suspect.iter().filter(|(key, _)| self.unmarked.contains(*key));
        unmarked.map(|(key, why)| (key.clone(), why.clone())).collect()
    }

    fn is_trusted(&self, pack: &PackRef) -> bool {
        !self.suspect.contains_key(&pack.key)
    }

    /// Names of all items that a new generation may use, each with its pack: those in packs that are trusted, and that
    /// no older key seals, so that keys which are not used any more come to be of no use.
    pub fn names(&self) -> BTreeMap<&str, &PackRef> {
        let is_current = |p: &PackRef| self.keys.get(&p.key) == self.sealing.as_ref();
        self.packs
            .iter()
            .filter(|(p, _)| self.is_trusted(p) && is_current(p))
            .flat_map(|(p, index)| index.items.iter().map(move |i| (i.name.as_str(), p)))
            .collect()
    }

    /// The generations of which nothing is missing in the packs that their records name: others may go at any time.
    pub fn whole(&self) -> Vec<&Listed> {
        let mut whole = self.whole_in(&|p| self.is_trusted(p));
        whole.retain(|g| !self.incomplete.contains_key(&g.key));
        whole
    }

    /// The generations of which something lies only in packs that are not trusted, perhaps in a part of them that is
    /// good, or that cannot be read now, or is missing elsewhere.
    pub fn doubtful(&self) -> Vec<&Listed> {
        let (whole, all) = (self.whole(), self.whole_in(&|_| true));
        let may_be = |g: &&Listed| all.contains(g) || self.is_out_of_reach(g);
        self.generations.iter().filter(|g| may_be(g) && !whole.contains(g)).collect()
    }

    /// Reads every pack and compares it with its checksums: the bytes read, and what is wrong. A pack that contradicts
    /// them is suspect from then on, for all who read the tier; one of which a part is lost only for who asks, now; one
    /// that was suspect and is whole is trusted again; one that cannot be read is as it was.
    pub fn check(&mut self, tier: &dyn Tier) -> Result<(u64, Vec<String>), StorageError> {
        let (mut bytes, mut faults) = (0, Vec::new());
        for p in self.packs.keys().cloned().collect::<Vec<_>>() {
            match (pack::check(tier, &p.key, &self.packs[&p]), self.is_trusted(&p)) {
                (Ok(read), true) => bytes += read,
                (Ok(read), false) => {
                    bytes += read;
                    if let Err(e) = tier.delete(&mark_of(&p.key)).and_then(|()| tier.sync()) {
                        tracing::warn!(tier = tier.name(), pack = p.key, error = %e, "a suspicion that was wrong stays on the tier");
                    }
                    self.suspect.remove(&p.key);
                    self.unmarked.remove(&p.key);
                    self.faults.retain(|(key, _)| *key != p.key);
                }
                (Err(e), false) if e.is_damage() => {}
                (Err(e), true) if e.is_damage() => {
                    let why = e.to_string();
                    if !e.is_contradicted() || !mark(tier, &p.key, &why) {
                        self.unmarked.insert(p.key.clone());
                    }
                    self.suspect.insert(p.key, why.clone());
                    faults.push(why);
                }
                (Err(e), _) => self.set_aside(tier, &p.key, e)?,
            }
        }
        Ok((bytes, faults))
    }

    fn whole_in(&self, usable: &dyn Fn(&PackRef) -> bool) -> Vec<&Listed> {
        let is_whole = |g: &&Listed| {
            let packs = g.record.packs.iter().filter(|p| usable(p)).filter_map(|p| self.packs.get(p));
            let items = packs.flat_map(|index| index.items.iter());
            let names: BTreeMap<&str, u64> = items.map(|i| (i.name.as_str(), i.bytes())).collect();
            g.items().iter().all(|(n, bytes)| names.get(n.as_str()) == Some(bytes))
        };
        self.generations.iter().filter(is_whole).collect()
    }

    /// Whether the generation whose manifest file holds `manifest` is there, whole.
    pub fn holds(&self, manifest: &[u8]) -> bool {
        self.whole().iter().any(|g| g.record.manifest.as_bytes() == manifest)
    }

    /// Writes the record of a generation: from now on it is durable.
    pub fn commit(tier: &dyn Tier, manifest: String, packs: Vec<PackRef>, parts: Vec<Part>) -> Result<Listed, StorageError> {
        let encode = |e: serde_json::Error| StorageError::System {
            step: "encode the record of a generation",
            source: e.into(),
        };
        let record = Record { manifest, packs, parts };
        let body = serde_json::to_string(&record).map_err(encode)?;
        let envelope = Envelope {
            format: FORMAT,
            xxh3: checksum(body.as_bytes()),
            body,
        };
        let bytes = serde_json::to_vec(&envelope).map_err(encode)?;
        let number = Manifest::decode("manifest".as_ref(), record.manifest.as_bytes())?.generation;
        let key = record_key(number, record.manifest.as_bytes());
        write_whole(tier, &key, &bytes)?;
        tier.sync()?;
        Listed::decode(&key, &read_whole(tier, &key, MAX_RECORD)?).map_err(|reason| StorageError::TierDamaged {
            tier: tier.name().to_owned(),
            key,
            reason,
        })
    }

    /// Removes all but the `keep` newest whole generations and the newest complete one, then the packs that no record
    /// needs. Generation `newest` and later ones stay: it is the newest of whoever asks, who may not know of others.
    /// Nothing is removed while no generation is whole, and no pack while a record cannot be read. Call while nothing
    /// is being flushed.
    pub fn retain(&mut self, tier: &dyn Tier, keep: u32, newest: u64) -> Result<u64, StorageError> {
        let whole: Vec<u64> = self.whole().iter().map(|g| g.manifest.generation).collect();
        if whole.is_empty() {
            return Ok(0);
        }
        let kept = whole.iter().rev().nth(keep.max(1) as usize - 1);
        let oldest = kept.map_or(0, |kept| newest.min(*kept));
        let complete = self.complete();
        let stays = |g: &Listed| g.manifest.generation >= oldest || Some(&g.key) == complete.as_ref();
        self.remove_records(tier, &stays)?;
        // What is whole now has been written again. Anything else is perhaps only read wrongly today: it goes when another
        // record of its generation is whole, or, if somebody has asked for it, a newer generation is, or any where it is
        // not sealed as the job's own are.
        let is_whole = |key: &str| self.generations.iter().any(|g| g.key == key);
        self.faults.retain(|(key, _)| !is_whole(key));
        let is_old = |n| whole.last().is_some_and(|newest| n < *newest);
        let is_foreign = |key: &str| self.sealing.is_some() && !self.keys.contains_key(key);
        let is_unwanted = |key: &str, n| self.distrusted.contains(key) && (is_old(n) || is_foreign(key));
        let goes = |key: &str| number_of(key).is_some_and(|n| whole.contains(&n) || is_unwanted(key, n));
        for (key, _) in self.faults.iter().filter(|(key, _)| goes(key)) {
            tier.delete(key)?;
        }
        self.faults.retain(|(key, _)| !goes(key));
        // Only when the records are gone may what they named go.
        tier.sync()?;
        self.collect(tier)
    }

    /// The key of the newest whole generation in which nothing was left out: to go back to, should a program take another
    /// way after a restart from a newer one.
    fn complete(&self) -> Option<String> {
        let whole = self.whole();
        let complete = whole.iter().rev().find(|g| g.manifest.left_out.is_none());
        complete.map(|g| g.key.clone())
    }

    /// Makes room for a newer generation, by the oldest one with its packs; whether there was one that may go. The
    /// newest whole one stays, and the newest complete one. Where none is whole, each may have what others lack, and
    /// they go only when `newer_is_whole` says so: until the newer one has been copied, there is nothing else.
    pub fn give_way(
        &mut self,
        tier: &dyn Tier,
        newer_is_whole: &mut dyn FnMut() -> Result<(), StorageError>,
    ) -> Result<bool, StorageError> {
        if self.give_up_damaged(tier, newer_is_whole)? {
            return Ok(true);
        }
        // Packs would stay.
        if self.has_unreadable_records() {
            return Ok(false);
        }
        let newest = self.whole().last().map(|g| g.key.clone());
        let stays = [newest, self.complete()];
        let Some(goes) = self
            .generations
            .iter()
            .find(|g| !stays.iter().flatten().any(|key| *key == g.key))
        else {
            return Ok(false);
        };
        let goes = goes.key.clone();
        if stays.iter().flatten().next().is_none() {
            newer_is_whole()?;
        }
        let bytes = tier.length(&goes)?.unwrap_or(0);
        self.forget(tier, &|g| g.key != goes)?;
        self.bytes = self.bytes.saturating_sub(bytes);
        self.collect(tier)?;
        Ok(true)
    }

    /// Removes the records of all generations but those that `keep` names; their packs go with [`Catalogue::collect`].
    /// For who is told elsewhere which generations there are.
    pub fn forget(&mut self, tier: &dyn Tier, keep: &dyn Fn(&Listed) -> bool) -> Result<(), StorageError> {
        self.remove_records(tier, keep)?;
        // Only when the records are gone may what they named go.
        tier.sync()
    }

    /// The same, without waiting until that survives a power cut. One that cannot be removed keeps no other from it.
    fn remove_records(&mut self, tier: &dyn Tier, keep: &dyn Fn(&Listed) -> bool) -> Result<(), StorageError> {
        let mut removed = Ok(());
        self.generations.retain(|g| {
            let deleted = if keep(g) { return true } else { tier.delete(&g.key) };
            let stays = deleted.is_err();
            removed = std::mem::replace(&mut removed, Ok(())).and(deleted);
            stays
        });
        removed
    }

    /// Removes all that the tier holds, records first, so that what is left by a kill or a failure is no generation that
    /// lacks something; the bytes freed.
    pub fn remove_all(&mut self, tier: &dyn Tier) -> Result<u64, StorageError> {
        self.remove_records(tier, &|_| false)?;
        for prefix in ["gen", "packs", ""] {
            for o in tier.list(prefix)? {
                tier.delete(&o.key)?;
            }
            tier.sync()?;
        }
        let gone = Self {
            is_read: true,
            ..Self::default()
        };
        Ok(std::mem::replace(self, gone).bytes)
    }

    /// Whether a generation's record cannot be read: then nobody knows which packs it needs.
    pub fn has_unreadable_records(&self) -> bool {
        self.unreadable_record().is_some()
    }

    fn unreadable_record(&self) -> Option<&(String, String)> {
        let mut unread = self.faults.iter().chain(&self.locked).chain(&self.unread);
        unread.find(|(key, _)| number_of(key).is_some())
    }

    /// What can be done where nothing more can go from a tier that is full.
    pub fn advice(&self) -> String {
        let Some((key, why)) = self.unreadable_record() else {
            return "raise it, or keep fewer checkpoints".into();
        };
        let next = match self.faults.iter().any(|(k, _)| k == key) {
            true => "belay flush --check gives it up for a newer generation that is whole",
            false => "try again when it can be read",
        };
        format!("raise it; nothing can be removed while nobody knows what {key} needs ({why}): {next}")
    }

    /// Gives up, for a newer generation, records that were found damaged when all was read: each may have named any
    /// pack, and nothing could go any more. Whether there were any.
    pub fn give_up_damaged(
        &mut self,
        tier: &dyn Tier,
        newer_is_whole: &mut dyn FnMut() -> Result<(), StorageError>,
    ) -> Result<bool, StorageError> {
        let is_given_up = |key: &str| number_of(key).is_some() && self.distrusted.contains(key);
        let given_up: Vec<String> = self
            .faults
            .iter()
            .map(|(key, _)| key)
            .filter(|key| is_given_up(key))
            .cloned()
            .collect();
        if given_up.is_empty() {
            return Ok(false);
        }
        newer_is_whole()?;
        for key in &given_up {
            tier.delete(key)?;
            self.faults.retain(|(k, _)| k != key);
        }
        // Only when the records are gone may what they named go.
        tier.sync()?;
        self.collect(tier)?;
        Ok(true)
    }

    /// Removes the packs that no record needs, and what lies among the records and is none; the bytes of packs freed.
    pub fn collect(&mut self, tier: &dyn Tier) -> Result<u64, StorageError> {
        self.collect_but(tier, &BTreeSet::new())
    }

    /// The same, but for these packs.
    pub fn collect_but(&mut self, tier: &dyn Tier, used: &BTreeSet<PackRef>) -> Result<u64, StorageError> {
        if self.has_unreadable_records() {
            return Ok(0);
        }
        let named = self.generations.iter().flat_map(|g| &g.record.packs);
        let needed: BTreeSet<&PackRef> = named.chain(used).collect();
        let gone: Vec<PackRef> = self.packs.keys().filter(|p| !needed.contains(p)).cloned().collect();
        let damaged: Vec<String> = self.faults.iter().map(|(key, _)| key.clone()).collect();
        let needed: BTreeSet<&str> = needed.iter().map(|p| p.key.as_str()).collect();
        let damaged: Vec<String> = damaged.into_iter().filter(|key| !needed.contains(key.as_str())).collect();
        let mut freed = 0;
        for p in gone {
            tier.delete(&p.key)?;
            freed += p.bytes;
            self.packs.remove(&p);
        }
        for key in damaged {
            tier.delete(&key)?;
            self.faults.retain(|(k, _)| *k != key);
        }
        // A mark goes after its pack.
        tier.sync()?;
        let unknown = |key: &&String| !self.packs.keys().any(|p| p.key == **key) && !self.faults.iter().any(|(k, _)| k == *key);
        let marks: Vec<String> = self.suspect.keys().filter(unknown).cloned().collect();
        for key in marks {
            tier.delete(&mark_of(&key))?;
            self.suspect.remove(&key);
        }
        tier.sync()?;
        self.bytes = self.bytes.saturating_sub(freed);
        Ok(freed)
    }
}
