//! Notes in the job directory of what its durable tiers hold.

use super::local::{self, Homes};
use super::Durable;
use crate::generations::{self, Generation};
use crate::jobdir::{Description, JobDir};
use crate::redundancy::record;
use crate::Failure;
use belay_image::manifest::{Manifest, MANIFEST_FILE, MAX_BYTES, MAX_NUMBER};
use belay_image::sections::create_private;
use belay_image::{files, ImageError};
use belay_storage::catalogue::Listed;
use belay_wire::{Exit, GenerationStatus, Level, OnTier};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

/// Longest notes that are read.
const MAX_NOTES: u64 = 1 << 30;
/// Version of the notes.
const FORMAT: u32 = 1;
/// No number from here on is believed where nothing is known but a name: whoever writes to a tier can make names.
const BELIEVED: u64 = MAX_NUMBER / 2;

#[derive(Debug, Serialize, Deserialize)]
struct Notes {
    format: u32,
    /// Contents of the manifests of whole generations, oldest first.
    manifests: Vec<String>,
    /// Numbers of generations of which something lies in packs that are not trusted, could not be read, or is missing at
    /// a part.
    #[serde(default)]
    doubtful: Vec<u64>,
    /// Which keys seal what a generation consists of, where it is sealed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    keys: BTreeMap<u64, BTreeSet<String>>,
    /// Generations of which nothing can be read for want of a key, and why.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    locked: BTreeMap<u64, String>,
    /// The newest one that was ever there.
    #[serde(default)]
    newest: Option<u64>,
}

/// What is known of one tier.
#[derive(Debug, Default)]
pub struct Known {
    /// The whole generations, oldest first: contents of the manifest, and the manifest.
    pub generations: Vec<(String, Manifest)>,
    /// Numbers of generations of which perhaps enough can be read.
    pub doubtful: Vec<u64>,
    /// Which keys seal what a generation consists of.
    pub keys: BTreeMap<u64, BTreeSet<String>>,
    /// Generations of which nothing can be read for want of a key, and why.
    pub locked: BTreeMap<u64, String>,
    newest: Option<u64>,
}

impl Known {
    /// Numbers of the generations that a restart may find there.
    pub fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        let whole = self.generations.iter().map(|(_, m)| m.generation);
        whole.chain(self.doubtful.iter().copied()).chain(self.locked.keys().copied())
    }

    /// The greatest number of a generation that is, or ever was, there.
    pub(crate) fn highest(&self) -> Option<u64> {
        self.numbers().chain(self.newest).max()
    }
}

fn file(dir: &JobDir, tier: &str) -> PathBuf {
    dir.path().join("tiers").join(format!("{tier}.json"))
}

/// Notes what `durable` holds, as far as that has been read.
pub(super) fn write(dir: &JobDir, durable: &Durable) -> Result<(), Failure> {
    let catalogue = &durable.catalogue;
    if !catalogue.is_read() {
        return Ok(());
    }
    let (whole, unknown): (Vec<&Listed>, Vec<&Listed>) = catalogue.whole().into_iter().partition(|g| durable.has_read_parts_of(g));
    let keys = |g: &Listed| (g.manifest.generation, durable.keys_of(g));
    let doubtful = catalogue.doubtful().into_iter().chain(unknown);
    let doubtful = doubtful.map(|g| g.manifest.generation);
    let notes = Notes {
        format: FORMAT,
        manifests: whole.iter().map(|g| g.record.manifest.clone()).collect(),
        doubtful: doubtful.chain(catalogue.unread_generations()).collect(),
        keys: catalogue
            .generations
            .iter()
            .map(keys)
            .filter(|(_, k)| !k.is_empty())
            .collect(),
        locked: catalogue.locked_generations().map(|(n, why)| (n, why.to_owned())).collect(),
        newest: newest(dir, &durable.config.name).max(catalogue.generations.last().map(|g| g.manifest.generation)),
    };
    let path = file(dir, &durable.config.name);
    let text = serde_json::to_vec(&notes).map_err(|e| Failure::new(Exit::Internal, e.to_string()))?;
    let new = path.with_extension("new");
    let fail = |e| Failure::io(format!("write {}", path.display()), &e);
    match std::fs::DirBuilder::new().mode(0o700).create(dir.path().join("tiers")) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(fail(e)),
        _ => {}
    }
    // Empty ones after a power cut would say that no number has been used.
    let mut f = create_private(&new)?;
    f.write_all(&text).and_then(|()| f.sync_all()).map_err(fail)?;
    std::fs::rename(&new, &path).map_err(fail)
}

/// The newest generation that tier `tier` is known to have held.
pub(super) fn newest(dir: &JobDir, tier: &str) -> Option<u64> {
    read(dir, tier).ok()??.newest
}

/// Numbers of the generations that tier `tier` is known to hold, whole.
pub(super) fn durable_on(dir: &JobDir, tier: &str) -> Vec<u64> {
    let known = read(dir, tier).ok().flatten().unwrap_or_default();
    known.generations.iter().map(|(_, m)| m.generation).collect()
}

/// Forgets what tier `tier` has held: all of it is to go.
pub(super) fn forget(dir: &JobDir, tier: &str) {
    // What is not there has nothing to say.
    std::fs::remove_file(file(dir, tier)).ok();
}

/// The notes of tier `tier`, where there are any that this belay reads.
fn read(dir: &JobDir, tier: &str) -> Result<Option<Known>, ImageError> {
    match files::read(&file(dir, tier), MAX_NOTES) {
        Ok(text) => Ok(decode(&text)),
        Err(ImageError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// What is known of the job's durable tiers; `None` in place of one of which there are no notes.
pub fn known(dir: &JobDir, d: &Description) -> Vec<Option<Known>> {
    d.config.durable().map(|t| read(dir, &t.name).ok().flatten()).collect()
}

/// The newest generation that a durable tier is known to hold.
pub(crate) fn newest_durable(dir: &JobDir, d: &Description) -> Option<u64> {
    let known = known(dir, d);
    let whole = known.iter().flatten().flat_map(|k| &k.generations);
    whole.map(|(_, m)| m.generation).max()
}

/// Whether a durable tier is known to hold generation `number`.
pub fn is_on_a_tier(dir: &JobDir, d: &Description, number: u64) -> bool {
    let known = known(dir, d);
    let mut held = known.iter().flatten().flat_map(Known::numbers);
    held.any(|n| n == number)
}

/// Decodes notes; `None` where they are none that this belay reads.
pub(crate) fn decode(text: &[u8]) -> Option<Known> {
    let notes: Notes = serde_json::from_slice(text).ok()?;
    let decode = |text: String| {
        let manifest = Manifest::decode(MANIFEST_FILE.as_ref(), text.as_bytes()).ok()?;
        Some((text, manifest))
    };
    (notes.format == FORMAT).then(|| Known {
        generations: notes.manifests.into_iter().filter_map(decode).collect(),
        doubtful: notes.doubtful.into_iter().filter(|n| *n < BELIEVED).collect(),
        keys: notes.keys,
        locked: notes.locked.into_iter().filter(|(n, _)| *n < BELIEVED).collect(),
        newest: notes.newest.filter(|n| *n < BELIEVED),
    })
}

/// How many generations the job directory and, as far as is known, its tiers and the hosts of the job hold. What cannot
/// be read is not taken for none: who begins a job in the directory removes what an earlier one has left.
pub fn held(dir: &JobDir) -> Result<usize, Failure> {
    let mut numbers: BTreeSet<u64> = generations::numbers(&dir.generations())?.into_iter().collect();
    numbers.extend(record::numbers(dir.path())?);
    if numbers.is_empty() && record::lies_elsewhere(dir.path())? {
        let at = dir.shown();
        return Err(Failure::new(
            Exit::HoldsCheckpoints,
            format!(
                "{at}: checkpoints of an earlier job may lie on the host that led it, none of them redundant; continue it there with belay restart {at}, give them up with belay gc --all {at}, or use another directory"
            ),
        ));
    }
    if dir.is_described() {
        for t in dir.description()?.config.durable() {
            let known = read(dir, &t.name)?.unwrap_or_default();
            // Also where nothing was found there last: a file system that is not mounted looks empty, and who has given
            // up what was there has removed the notes too.
            numbers.extend(known.generations.iter().map(|(_, m)| m.generation).chain(known.newest));
        }
    }
    Ok(numbers.len())
}

/// The generations of the job directory and of its tiers, oldest first, with what is where.
pub fn statuses(dir: &JobDir, d: &Description) -> Vec<GenerationStatus> {
    let mut out: BTreeMap<u64, GenerationStatus> = BTreeMap::new();
    let mut homes = Homes::new();
    for g in generations::list(&dir.generations()).unwrap_or_default() {
        out.insert(g.number, here(dir, &g, &mut homes));
    }
    let notes = known(dir, d);
    for (t, known) in d.config.durable().zip(notes) {
        let known = known.unwrap_or_default();
        let on = |bytes: u64, keys: Vec<String>, locked: Option<String>| OnTier {
            tier: t.name.clone(),
            kind: t.kind.name().into(),
            bytes,
            whole: locked.is_none(),
            host: None,
            keys,
            locked,
        };
        for (number, why) in known.locked {
            let status = out.entry(number).or_insert_with(|| GenerationStatus {
                generation: number,
                ..GenerationStatus::default()
            });
            status.tiers.push(on(0, Vec::new(), Some(why)));
        }
        for (text, manifest) in known.generations {
            let number = manifest.generation;
            let keys = known.keys.get(&number).into_iter().flatten().cloned().collect();
            let on = on(manifest.bytes, keys, None);
            let known = out.entry(number).or_insert_with(|| generations::status(&manifest));
            let local = files::read(
                &dir.generations().join(generations::name(number)).join(MANIFEST_FILE),
                MAX_BYTES,
            );
            // Another generation of that number in the job directory is a later one.
            if local.map_or(true, |l| l == text.as_bytes() || !known.whole) {
                known.level = Level::Durable;
                known.tiers.push(on);
            }
        }
    }
    record::add_to(dir.path(), &mut out);
    out.into_values().collect()
}

/// A generation in the job directory.
fn here(dir: &JobDir, g: &Generation, homes: &mut Homes) -> GenerationStatus {
    let mut status = g.status();
    let own = status.bytes;
    generations::add_parts(&mut status, g);
    let (local, lacking) = local::holdings(dir.path(), g, homes);
    // What is missing now says more than that damage was found before.
    let lacking = lacking.map(Into::into);
    let damage = match g.damage {
        Some(_) => lacking.or(status.damage),
        None => status.damage.or(lacking),
    };
    let on = OnTier {
        tier: "job".into(),
        kind: "local".into(),
        bytes: own,
        whole: damage.is_none(),
        host: None,
        keys: Vec::new(),
        locked: None,
    };
    GenerationStatus {
        whole: damage.is_none(),
        damage,
        tiers: [on].into_iter().chain(local).collect(),
        ..status
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_lies_on_other_hosts_is_held() {
        let base = std::env::temp_dir().join(format!("belay-held-{}", std::process::id()));
        let dir = JobDir::create(&base).unwrap();
        assert_eq!(held(&dir).unwrap(), 0);
        record::begin(dir.path(), 7).unwrap();
        assert_eq!(held(&dir).unwrap(), 0, "no checkpoint was committed");
        std::fs::remove_dir(dir.generations()).unwrap();
        symlink("/nowhere/gen", dir.generations()).unwrap();
        let failure = held(&dir).unwrap_err();
        assert!(
            failure.exit == Exit::HoldsCheckpoints && failure.message.contains("gc --all"),
            "{failure}"
        );
        let made = record::Record::new(GenerationStatus::default(), "h1".into(), Vec::new());
        made.write(dir.path()).unwrap();
        assert_eq!(held(&dir).unwrap(), 1);
        record::remove_all(dir.path()).unwrap();
        assert_eq!(held(&dir).unwrap(), 0, "given up");
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_name_alone_does_not_use_up_all_numbers() {
        let notes =
            |n: u64| format!(r#"{{"format":1,"manifests":[],"doubtful":[{n},4],"locked":{{"{n}":"why","5":"why"}},"newest":{n}}}"#);
        let known = decode(notes(MAX_NUMBER - 1).as_bytes()).unwrap();
        assert_eq!((known.numbers().collect(), known.highest()), (vec![4, 5], Some(5)));
        assert_eq!(decode(notes(6).as_bytes()).unwrap().highest(), Some(6));
    }

    #[test]
    fn what_cannot_be_read_may_hold_something() {
        let base = std::env::temp_dir().join(format!("belay-notes-{}", std::process::id()));
        let dir = JobDir::create(&base).unwrap();
        assert!(read(&dir, "x").unwrap().is_none());
        // Something else than a directory is in its place.
        std::fs::write(dir.path().join("tiers"), "").unwrap();
        assert!(read(&dir, "x").is_err());
        std::fs::remove_file(dir.path().join("tiers")).unwrap();
        std::fs::write(dir.path().join("redundant"), "").unwrap();
        assert!(held(&dir).is_err());
        std::fs::remove_dir_all(base).unwrap();
    }
}
