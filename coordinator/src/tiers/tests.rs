//! Flushes of generations that are made here, of jobs with and without parts.

use super::hosts::Share;
use super::*;
use crate::config::Encryption;
use crate::config::Size;
use crate::generations::{self, Draft, Facts};
use crate::jobdir::Access;
use crate::nodes::meeting::Meeting;
use crate::nodes::remote::RemoteShell;
use crate::nodes::seat::part_dir;
use crate::nodes::table::Row;
use belay_image::blobs::BlobWriter;
use belay_image::manifest::{FileEntry, Taken};
use belay_image::sections::{Kind as Section, SectionFile};
use belay_image::{BLOB_FILE, JOB_FILE};
use belay_kernel::direct::Buffer;
use belay_storage::engine::{Engine, Options};
use belay_storage::store::Store;
use belay_storage::tier::{failed, Object, Put};
use belay_tree::{Door, JobKey};
use std::io;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A job directory, and a directory that is its tier `t`.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// What a part does with its share.
type Act = fn(Share);

impl Scratch {
    fn new(test: &str) -> Self {
        let base = std::env::temp_dir().join(format!("belay-tiers-{test}-{}", std::process::id()));
        let d = Description {
            across_hosts: true,
            ..Description::new(Some("job".into()), vec!["x".into()])
        };
        std::fs::create_dir_all(base.join("pfs")).unwrap();
        JobDir::create(&base.join("job")).unwrap().describe(&d).unwrap();
        Self(base)
    }

    fn job(&self) -> JobDir {
        JobDir::open(&self.0.join("job"), Access::Own).unwrap()
    }

    fn tier(&self) -> config::Tier {
        let tier = serde_json::json!({ "name": "t", "kind": "pfs", "path": self.0.join("pfs") });
        serde_json::from_value(tier).unwrap()
    }

    fn durable(&self) -> Durable {
        Durable::open(&self.tier(), &self.job().description().unwrap(), To::Use).unwrap()
    }

    /// What the tier holds of part `tag`.
    fn folder_of(&self, tag: u64) -> PathBuf {
        let d = self.job().description().unwrap();
        self.0.join("pfs").join(parts::described(&d, tag).folder())
    }

    /// The tier, with which `event` happens where part `tag` has its own.
    fn eventful(&self, tag: u64, event: Event) -> Durable {
        let mut durable = self.durable();
        let part = durable.part(&self.job().description().unwrap(), tag).unwrap();
        part.tier = Box::new(Eventful(Directory::open("t", &self.folder_of(tag)).unwrap(), event));
        durable
    }

    /// Numbers of the generations that are whole on the tier.
    fn whole(&self) -> Vec<u64> {
        let mut durable = self.durable();
        durable.look(&self.job(), &self.job().description().unwrap()).unwrap();
        durable.readable()
    }

    /// Commits generation `number` with these parts; where it lies.
    fn commit(&self, number: u64, parts: &[u64]) -> PathBuf {
        let (job, d) = (self.job(), self.job().description().unwrap());
        for tag in parts {
            std::fs::create_dir_all(job.path().join("nodes")).unwrap();
            let part = JobDir::create(&part_dir(job.path(), *tag)).unwrap();
            part.describe(&d).unwrap();
            make(&part, number, *tag, &[]);
        }
        make(&job, number, 0, parts)
    }

    /// Flushes the generation in `path` to `durable`.
    fn flush(&self, durable: &mut Durable, path: &Path) -> Result<Flushed, Failure> {
        let (job, d) = (self.job(), self.job().description().unwrap());
        durable.flush(&job, &d, (path, None), &Control::default())
    }

    /// The same, where each of these parts has its own of the generation on its host, and does this.
    fn flush_there(&self, durable: &mut Durable, path: &Path, parts: &[(u64, Act)]) -> Result<Flushed, Failure> {
        let (job, mut d) = (self.job(), self.job().description().unwrap());
        d.config.tiers = vec![self.tier()];
        let (key, generation) = (JobKey::random().unwrap(), Generation::here(path).number);
        let door = Door::open(key.clone(), &[Ipv4Addr::LOCALHOST.into()]).unwrap();
        let root = door.addresses();
        let share = |tag: &u64| Share {
            key: key.clone(),
            root: root.clone(),
            generation,
            tag: *tag,
            dir: JobDir::open(&part_dir(job.path(), *tag), Access::Own).unwrap(),
            description: d.clone(),
            rotten: Arc::default(),
        };
        std::thread::scope(|scope| {
            for (tag, act) in parts {
                let share = share(tag);
                scope.spawn(|| act(share));
            }
            let meeting = Meeting {
                door,
                generation,
                hosts: parts.iter().map(|(tag, _)| (*tag, format!("h{tag}"))).collect(),
                cancel: Arc::default(),
            };
            let mut members = Members::gather(meeting, job.path()).unwrap();
            durable.flush(&job, &d, (path, Some(&mut members)), &Control::default())
        })
    }
}

/// A part that does what the root asks.
fn copies(share: Share) {
    share.run().unwrap();
}

/// What becomes of a tier.
#[derive(Debug)]
enum Event {
    /// The record of this generation cannot be read, once, after it has been read so often.
    Shut(u64, AtomicU32),
    /// It is removed by somebody else then.
    Gone(u64, AtomicU32),
    /// It has no room while this file is there.
    Full(PathBuf),
    /// It does not tell what it holds, so often.
    Mute(AtomicU32),
}

/// A tier with which something happens.
#[derive(Debug)]
struct Eventful(Directory, Event);

type Of<T> = Result<T, StorageError>;

impl Tier for Eventful {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn put<'a>(&'a self, key: &str) -> Of<Box<dyn Put + 'a>> {
        match &self.1 {
            Event::Full(by) if key.starts_with("packs/") && by.exists() => {
                let full = io::Error::from_raw_os_error(libc::ENOSPC);
                Err(failed(self.name(), "write", key, full))
            }
            _ => self.0.put(key),
        }
    }
    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Of<()> {
        match &self.1 {
            Event::Shut(of, n) | Event::Gone(of, n)
                if key.starts_with(&format!("gen/{of:06}")) && n.fetch_sub(1, Ordering::Relaxed) == 0 =>
            {
                if matches!(self.1, Event::Gone(..)) {
                    self.0.delete(key)?;
                }
                Err(failed(self.name(), "read", key, io::ErrorKind::PermissionDenied.into()))
            }
            _ => self.0.get(key, range, buf),
        }
    }
    fn length(&self, key: &str) -> Of<Option<u64>> {
        self.0.length(key)
    }
    fn list(&self, prefix: &str) -> Of<Vec<Object>> {
        match &self.1 {
            Event::Mute(n) if n.load(Ordering::Relaxed) > 0 => {
                n.fetch_sub(1, Ordering::Relaxed);
                Err(failed(self.name(), "list", prefix, io::ErrorKind::TimedOut.into()))
            }
            _ => self.0.list(prefix),
        }
    }
    fn delete(&self, key: &str) -> Of<()> {
        self.0.delete(key)
    }
    fn sync(&self) -> Of<()> {
        self.0.sync()
    }
    fn free(&self) -> Of<Option<u64>> {
        self.0.free()
    }
    fn clear(&self) -> Of<u64> {
        self.0.clear()
    }
}

/// Commits generation `number` of the part `tag` in `dir`.
fn make(dir: &JobDir, number: u64, tag: u64, parts: &[u64]) -> PathBuf {
    let draft = Draft::create(&dir.generations(), number).unwrap();
    let mut blobs = BlobWriter::create(&draft.path.join(BLOB_FILE)).unwrap();
    let data = blobs.put(format!("generation {number} of {tag}").as_bytes()).unwrap();
    drop(blobs);
    let mut job = SectionFile::new();
    job.push_json(Section::Job, &serde_json::json!({ "data": data })).unwrap();
    job.write(&draft.path.join(JOB_FILE)).unwrap();
    let row = |tag: &u64| Row {
        tag: *tag,
        words: RemoteShell::parse("ssh", &[format!("h{tag}"), "x".into()]).unwrap(),
        standin: 1,
        first: 0,
        on: String::new(),
        share: None,
    };
    let mut files: Vec<FileEntry> = [JOB_FILE, BLOB_FILE].map(|name| entry(&draft.path, name)).into();
    if !parts.is_empty() {
        files.push(table::write(&draft.path, &parts.iter().map(row).collect::<Vec<_>>()).unwrap());
    }
    let mut engine = Engine::new(Store::of_generation(&draft.path), Options::default()).unwrap();
    let facts = Facts {
        blocked: Duration::ZERO,
        phases: Vec::new(),
        processes: 1,
        threads: 1,
        taken: Taken {
            mode: "stopped".into(),
            reason: "a test".into(),
            stops: 1,
        },
        left_out: None,
        declared: None,
        dirty: None,
    };
    let target = draft.target();
    draft.commit(files, &mut engine.begin(0).unwrap(), &facts).unwrap();
    target
}

/// As a checkpoint lists it: the job file with its checksum, the byte strings without.
fn entry(dir: &Path, name: &str) -> FileEntry {
    let bytes = std::fs::read(dir.join(name)).unwrap();
    FileEntry {
        name: name.into(),
        bytes: bytes.len() as u64,
        xxh3: (name == JOB_FILE).then(|| belay_image::checksum(&bytes)),
    }
}

/// Flips a bit of the first byte string of the generation in `path`.
fn rot(path: &Path) {
    let blobs = path.join(BLOB_FILE);
    let mut bytes = std::fs::read(&blobs).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(blobs, bytes).unwrap();
}

#[test]
fn a_byte_string_that_a_flush_finds_damaged_is_marked() {
    let s = Scratch::new("rotten");
    for (number, parts, rotten) in [(1, &[][..], 0), (2, &[1, 2], 0), (3, &[1, 2], 2)] {
        let path = s.commit(number, parts);
        let of = |tag: u64| match tag {
            0 => path.clone(),
            tag => parts::generation_of(s.job().path(), tag, &path),
        };
        rot(&of(rotten));
        let f = s.flush(&mut s.durable(), &path).unwrap_err();
        assert!(f.to_string().contains(BLOB_FILE), "{f}");
        let found = generations::list(&s.job().generations()).unwrap();
        let found = found.iter().find(|g| g.number == number).unwrap();
        let why = found.damage.as_deref().unwrap_or_default();
        assert!(why.contains(BLOB_FILE), "{number}: {why}");
    }
}

#[test]
fn what_a_host_finds_damaged_of_its_part_is_damage_of_the_generation() {
    let s = Scratch::new("there");
    let first = s.commit(1, &[1, 2]);
    let there: [(u64, fn(Share)); 2] = [1, 2].map(|tag| (tag, copies as fn(Share)));
    s.flush_there(&mut s.durable(), &first, &there).unwrap();
    assert_eq!(s.whole(), [1]);
    let path = s.commit(2, &[1, 2]);
    rot(&parts::generation_of(s.job().path(), 2, &path));
    let f = s.flush_there(&mut s.durable(), &path, &there).unwrap_err();
    assert!(f.to_string().contains("h2") && f.to_string().contains(BLOB_FILE), "{f}");
    let gen = s.job().generations();
    let found = generations::list(&gen).unwrap();
    let why = found[1].damage.as_deref().unwrap_or_default();
    assert!(why.contains("part 2") && why.contains(BLOB_FILE), "{why}");
    assert_eq!(generations::retain(&gen, 1, &[]).unwrap(), [] as [u64; 0]);
    assert_eq!(generations::fullest(&found), Some(1));
}

#[test]
fn a_record_of_a_part_that_cannot_be_read_now_costs_no_generation() {
    let s = Scratch::new("passing");
    let path = s.commit(1, &[1, 2]);
    let records = || s.durable().tier.list("gen").unwrap().len();
    // It is read once when it is written.
    let f = s.flush(&mut s.eventful(1, Event::Shut(1, 1.into())), &path).unwrap_err();
    assert!(f.to_string().contains("cannot be read"), "{f}");
    assert_eq!((records(), s.whole()), (1, vec![1]));
    s.flush(&mut s.durable(), &path).unwrap();
    // One that has gone does.
    let path = s.commit(2, &[1, 2]);
    let f = s.flush(&mut s.eventful(1, Event::Gone(2, 1.into())), &path).unwrap_err();
    assert!(f.to_string().contains("another job directory"), "{f}");
    assert_eq!((records(), s.whole()), (1, vec![1]));
    s.flush(&mut s.durable(), &path).unwrap();
    assert_eq!(s.whole(), [1, 2]);
}

#[test]
fn what_parts_that_have_ended_left_goes() {
    let s = Scratch::new("ended");
    let of = |tag: u64| s.durable().tier.list(&format!("nodes/{tag}")).unwrap().len();
    s.flush(&mut s.durable(), &s.commit(1, &[1, 2, 3])).unwrap();
    assert!(of(3) > 0);
    // As a flush leaves it that was interrupted before the root's record.
    let tier = s.durable().tier;
    let record = tier.list("gen").unwrap().remove(0).key;
    tier.delete(&record).unwrap();
    let path = s.commit(2, &[1, 2]);
    // Nobody knows what a record names that cannot be read.
    write_whole(&*tier, &record, b"no record").unwrap();
    s.flush(&mut s.durable(), &path).unwrap();
    assert!(of(3) > 0);
    tier.delete(&record).unwrap();
    s.flush(&mut s.durable(), &path).unwrap();
    assert!(of(1) > 0 && of(2) > 0 && of(3) == 0, "{:?}", tier.list("nodes").unwrap());
    assert_eq!(s.whole(), [2]);
    // The last generation that needs a part takes it along.
    let mut d = s.job().description().unwrap();
    d.keep = 1;
    s.job().describe(&d).unwrap();
    s.flush(&mut s.durable(), &s.commit(3, &[1])).unwrap();
    assert!(of(1) > 0 && of(2) == 0, "{:?}", tier.list("nodes").unwrap());
    assert_eq!(s.whole(), [3]);
}

#[test]
fn the_keys_of_a_generation_are_also_those_of_its_parts() {
    let s = Scratch::new("keys");
    let keys = s.0.join("keys");
    let lines = |digits: &[&str]| {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&keys)
            .unwrap();
        let text: String = digits.iter().map(|d| d.repeat(64) + "\n").collect();
        io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    };
    lines(&["a"]);
    let mut d = s.job().description().unwrap();
    d.config.encryption = Encryption::by_file(&keys).unwrap();
    s.job().describe(&d).unwrap();
    let tier = serde_json::json!([{ "name": "t", "kind": "pfs", "path": s.0.join("pfs") }]);
    d.config.tiers = serde_json::from_value(tier).unwrap();
    // The part's copy is done, and the root's own is not.
    let path = s.commit(1, &[1]);
    let (own, mut durable) = (parts::generation_of(s.job().path(), 1, &path), s.durable());
    let options = durable.options(&d);
    let part = durable.part(&d, 1).unwrap();
    part.copy(&d, (&own, &options), &mut &[][..], &Control::default()).unwrap();
    lines(&["a", "b"]);
    s.flush(&mut s.durable(), &path).unwrap();
    let noted = known(&s.job(), &d).remove(0).unwrap();
    assert_eq!(noted.keys[&1].len(), 2, "{:?}", noted.keys);
}

#[test]
fn what_interrupted_flushes_of_parts_left_takes_no_room_from_the_next() {
    let s = Scratch::new("useless");
    s.flush(&mut s.durable(), &s.commit(1, &[1, 2])).unwrap();
    // As a flush leaves it that was killed: a pack of a generation that has gone.
    let packs = s.folder_of(2).join("packs");
    let named = std::fs::read_dir(&packs).unwrap().next().unwrap().unwrap().path();
    let left = packs.join("000009-0123456789abcdef.bpk");
    std::fs::copy(named, &left).unwrap();
    let mut durable = s.eventful(1, Event::Full(left.clone()));
    s.flush(&mut durable, &s.commit(2, &[1, 2])).unwrap();
    assert!(!left.exists());
    assert_eq!(s.whole(), [1, 2]);
    // Nor does what one has copied that found no room.
    let packs = || s.durable().tier.list("nodes/1/packs").unwrap();
    let before = packs();
    let path = s.commit(3, &[1, 2]);
    let f = s.flush(&mut s.eventful(2, Event::Full(path.clone())), &path).unwrap_err();
    assert!(f.to_string().contains("part 2"), "{f}");
    assert_eq!(packs(), before);
    s.flush(&mut s.durable(), &path).unwrap();
    assert_eq!(s.whole(), [2, 3]);
}

#[test]
fn where_one_host_finds_no_room_what_all_have_copied_goes() {
    let s = Scratch::new("no-room");
    let there: [(u64, fn(Share)); 2] = [1, 2].map(|tag| (tag, copies as fn(Share)));
    let first = s.commit(1, &[1, 2]);
    s.flush_there(&mut s.durable(), &first, &there).unwrap();
    // Records name what they share with the next one.
    let all = || -> Vec<String> {
        let all = s.durable().tier.list("").unwrap();
        all.into_iter().map(|o| o.key).filter(|key| !key.ends_with(JOB)).collect()
    };
    let before = all();
    let path = s.commit(2, &[1, 2]);
    let full = [(1, copies as fn(Share)), (2, |share| hosts::tests::without_room(&share))];
    let f = s.flush_there(&mut s.durable(), &path, &full).unwrap_err();
    assert!(f.to_string().contains("h2: no room"), "{f}");
    assert_eq!(all(), before);
    s.flush_there(&mut s.durable(), &path, &there).unwrap();
    assert_eq!(s.whole(), [1, 2]);
    // What fails for another reason is used by the next flush, or goes with gc.
    let before = all();
    let path = s.commit(3, &[1, 2]);
    rot(&parts::generation_of(s.job().path(), 2, &path));
    s.flush_there(&mut s.durable(), &path, &there).unwrap_err();
    assert!(all().len() > before.len());
    assert!(s.durable().collect(&s.job(), Some(9)).unwrap() > 0);
    assert_eq!(all(), before);
}

#[test]
fn what_is_known_of_a_tier_stays_known_while_it_does_not_answer() {
    let s = Scratch::new("mute");
    let (job, mut d) = (s.job(), s.job().description().unwrap());
    d.config.tiers = vec![s.tier()];
    let noted = || -> (Vec<u64>, Vec<u64>) {
        let known = known(&job, &d).remove(0).unwrap();
        (known.generations.iter().map(|(_, m)| m.generation).collect(), known.doubtful)
    };
    s.flush(&mut s.durable(), &s.commit(1, &[1, 2])).unwrap();
    assert_eq!(noted(), (vec![1], vec![]));
    let mut durable = s.durable();
    let folder = s.0.join("pfs").join(d.folder());
    durable.tier = Box::new(Eventful(Directory::open("t", &folder).unwrap(), Event::Mute(1.into())));
    let path = s.commit(2, &[1, 2]);
    let f = s.flush(&mut durable, &path).unwrap_err();
    assert!(f.to_string().contains("list"), "{f}");
    assert_eq!(noted(), (vec![1], vec![]));
    // What a part has is not known where it has not been read.
    let f = s.flush(&mut s.eventful(1, Event::Mute(1.into())), &path).unwrap_err();
    assert!(f.to_string().contains("list"), "{f}");
    assert_eq!(noted(), (vec![], vec![1]));
    s.flush(&mut durable, &path).unwrap();
    assert_eq!(noted(), (vec![1, 2], vec![]));
}

#[test]
fn where_a_record_of_a_part_is_damaged_no_generation_goes_in_vain() {
    let s = Scratch::new("give-way");
    let mut d = s.job().description().unwrap();
    d.keep = 9;
    s.job().describe(&d).unwrap();
    for number in 1..=3 {
        s.flush(&mut s.durable(), &s.commit(number, &[1, 2])).unwrap();
    }
    let record = s.durable().tier.list("nodes/1/gen").unwrap().remove(0).key;
    write_whole(&*s.durable().tier, &record, b"no record").unwrap();
    assert_eq!(s.whole(), [2, 3]);
    let all = s.durable().tier.list("").unwrap();
    let used: u64 = all.iter().filter(|o| !o.key.ends_with(JOB)).map(|o| o.bytes).sum();
    let mut durable = s.durable();
    durable.config.capacity = Some(Size(used));
    let path = s.commit(4, &[1, 2]);
    let f = s.flush(&mut durable, &path).unwrap_err();
    assert!(
        f.exit == Exit::DiskFull && f.to_string().contains("part 1") && f.to_string().contains("--check"),
        "{f}"
    );
    assert_eq!(s.whole(), [2, 3]);
    // Found damaged once more by who has asked for it, it stands in nobody's way.
    durable.distrust_damaged(&d).unwrap();
    s.flush(&mut durable, &path).unwrap();
    assert!(s.whole().ends_with(&[3, 4]), "{:?}", s.whole());
    assert_eq!(durable.distrust_damaged(&d).unwrap(), [] as [String; 0]);
}
