use super::*;
use crate::catalogue::Catalogue;
use crate::fetch::{fetch, UNDER_WAY};
use crate::testing::Scratch;
use crate::tier::{read_whole, write_whole, Object, Put};
use std::ops::Range;
use std::sync::atomic::AtomicU64;

pub(super) fn options() -> Options {
    Options {
        threads: 2,
        rate: None,
        zstd: Compression::Off,
        verify: true,
        keep: 2,
        capacity: None,
    }
}

pub(super) fn run(s: &Scratch, number: u64, tier: &dyn Tier, options: &Options) -> Result<Flushed, StorageError> {
    flush(
        &s.generation(number),
        tier,
        options,
        &mut Catalogue::default(),
        &mut &[][..],
        &Control::default(),
    )
}

pub(super) fn numbers(tier: &dyn Tier) -> Vec<u64> {
    let c = Catalogue::read(tier, &Catalogue::default()).unwrap();
    c.whole().iter().map(|g| g.manifest.generation).collect()
}

/// Everything of the job directory that a generation consists of.
pub(super) fn contents(s: &Scratch, number: u64) -> Vec<(String, Vec<u8>)> {
    let dir = s.generation(number);
    let m = Manifest::read(&dir).unwrap();
    let store = Store::of_job(&s.job());
    let files = m.files.iter().map(|f| dir.join(&f.name));
    let chunks = m.chunks.iter().map(|c| store.path(c.id));
    let all = files.chain(chunks).chain([dir.join(MANIFEST_FILE)]);
    all.map(|p| (p.display().to_string(), std::fs::read(&p).unwrap())).collect()
}

/// Fetches the newest generation that `tiers` hold.
pub(super) fn bring(s: &Scratch, tiers: &[&dyn Tier]) -> Result<u64, StorageError> {
    let catalogues: Vec<Catalogue> = tiers
        .iter()
        .map(|t| Catalogue::read(*t, &Catalogue::default()).unwrap())
        .collect();
    let sources: Vec<(&dyn Tier, &Catalogue)> = tiers.iter().copied().zip(&catalogues).collect();
    let newest = catalogues
        .iter()
        .flat_map(|c| c.whole().into_iter().chain(c.doubtful()))
        .max_by_key(|g| g.manifest.generation)
        .unwrap();
    fetch(&s.job(), newest, &sources, &Control::default())?;
    Ok(newest.manifest.generation)
}

pub(super) fn lose_job(s: &Scratch) {
    for dir in ["gen", "chunks"] {
        std::fs::remove_dir_all(s.job().join(dir)).unwrap();
    }
}

#[test]
fn a_generation_comes_back_from_the_tier_byte_by_byte() {
    for zstd in [Compression::Off, Compression::Level(3), Compression::Auto] {
        let s = Scratch::new("flush");
        let tier = s.tier("pfs");
        let mut engine = s.engine();
        let mut memory = Scratch::memory(100, 1);
        s.commit(&mut engine, 1, &memory);
        let first = run(&s, 1, &tier, &Options { zstd, ..options() }).unwrap();
        memory[7 * 4096] ^= 1;
        s.commit(&mut engine, 2, &memory);
        let second = run(&s, 2, &tier, &Options { zstd, ..options() }).unwrap();
        assert!(
            first.bytes > 400 << 10 && second.bytes < 20 << 10,
            "only what is new is copied: {second:?}"
        );
        assert!(first.packs <= 2 && second.packs <= 2, "few large objects");
        assert_eq!(
            run(&s, 2, &tier, &options()).unwrap(),
            Flushed::default(),
            "a second flush does nothing"
        );
        let before = contents(&s, 2);
        lose_job(&s);
        assert_eq!(bring(&s, &[&tier]).unwrap(), 2);
        assert!(contents(&s, 2) == before, "{zstd:?}");
    }
}

#[test]
fn older_generations_go_and_what_they_alone_needed() {
    let s = Scratch::new("retain");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    for n in 1..=5 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
        run(&s, n, &tier, &options()).unwrap();
        let kept: Vec<u64> = (n.saturating_sub(1).max(1)..=n).collect();
        assert_eq!(numbers(&tier), kept);
    }
    let bytes: u64 = tier.list("packs").unwrap().iter().map(|o| o.bytes).sum();
    assert!(bytes < 3 * 50 * 4200, "{bytes}");
}

#[test]
fn the_newest_one_in_which_nothing_was_left_out_stays() {
    let s = Scratch::new("complete");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    let expected = [&[1][..], &[1, 2], &[2, 3], &[2, 3, 4], &[4, 5], &[5, 6], &[5, 6, 7]];
    for (n, kept) in (1..).zip(expected) {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
        if ![1, 2, 5].contains(&n) {
            s.leave_out(n);
        }
        run(&s, n, &tier, &options()).unwrap();
        assert_eq!(numbers(&tier), kept, "after {n}");
    }
    // Nor does it make room.
    for n in 8..=9 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
        s.leave_out(n);
        let limited = Options {
            capacity: Some(700_000),
            keep: 9,
            ..options()
        };
        run(&s, n, &tier, &limited).unwrap();
        assert_eq!(numbers(&tier), [5, n - 1, n]);
    }
}

#[test]
fn a_tier_without_room_is_named_and_keeps_its_newest() {
    let s = Scratch::new("room");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    for n in 1..=4 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
    }
    let limited = Options {
        capacity: Some(500_000),
        keep: 9,
        ..options()
    };
    for n in 1..=3 {
        run(&s, n, &tier, &limited).unwrap();
    }
    assert_eq!(numbers(&tier), [2, 3]);
    let tiny = Options {
        capacity: Some(250_000),
        ..limited
    };
    let e = run(&s, 4, &tier, &tiny).unwrap_err().to_string();
    assert!(e.contains("tier pfs") && e.contains("capacity is 250000"), "{e}");
    assert_eq!(numbers(&tier), [3]);
}

#[test]
fn damage_in_the_job_directory_does_not_spread() {
    let s = Scratch::new("spread");
    let tier = s.tier("pfs");
    let m = s.commit(&mut s.engine(), 1, &Scratch::memory(50, 1));
    let chunk = Store::of_job(&s.job()).path(m.chunks[0].id);
    let mut bytes = std::fs::read(&chunk).unwrap();
    bytes[5000] ^= 4;
    std::fs::write(&chunk, bytes).unwrap();
    let control = Control::default();
    let (mut catalogue, mut none) = (Catalogue::default(), &[][..]);
    let e = flush(&s.generation(1), &tier, &options(), &mut catalogue, &mut none, &control);
    let e = e.unwrap_err().to_string();
    assert!(e.contains("pages-00000001.bpg") && e.contains("page 1"), "{e}");
    assert!(control.is_rotten());
    assert_eq!(tier.list("").unwrap(), [], "nothing is left on the tier");
}

#[test]
fn bit_flips_are_healed_from_wherever_the_item_is_whole() {
    let s = Scratch::new("heal");
    let (a, b) = (s.tier("a"), s.tier("b"));
    let m = s.commit(&mut s.engine(), 1, &Scratch::memory(100, 1));
    for tier in [&a, &b] {
        run(&s, 1, tier, &options()).unwrap();
    }
    let before = contents(&s, 1);
    let flip_packs = |tier: &dyn Tier, every: usize| {
        for o in tier.list("packs").unwrap() {
            let mut bytes = read_whole(tier, &o.key, u64::MAX).unwrap();
            let last = bytes.len() - 8000;
            for at in (11..last).step_by(every) {
                bytes[at] ^= 1;
            }
            write_whole(tier, &o.key, &bytes).unwrap();
        }
    };
    // Here one chunk damaged, one file gone; tier `a` worthless, `b` whole.
    let chunk = Store::of_job(&s.job()).path(m.chunks[2].id);
    let mut bytes = std::fs::read(&chunk).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&chunk, bytes).unwrap();
    std::fs::remove_file(s.generation(1).join("job.bimg")).unwrap();
    flip_packs(&a, 1000);
    bring(&s, &[&a, &b]).unwrap();
    assert!(contents(&s, 1) == before);
    // Now the only copy left of something is damaged: refused, by name.
    lose_job(&s);
    let e = bring(&s, &[&a]).unwrap_err().to_string();
    assert!(e.contains("tier a: packs/") && e.contains("checksum"), "{e}");
    assert!(!s.generation(1).exists(), "nothing gets its name that is not whole");
}

#[test]
fn a_job_directory_that_was_left_behind_removes_nothing_and_is_told() {
    let s = Scratch::new("behind");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    for n in 1..=3 {
        s.commit(&mut engine, n, &Scratch::memory(20, n));
        run(&s, n, &tier, &Options { keep: 3, ..options() }).unwrap();
    }
    // What it has is there; it does not know of the others, and counts only its own.
    run(&s, 1, &tier, &Options { keep: 1, ..options() }).unwrap();
    assert_eq!(numbers(&tier), [1, 2, 3]);
    // It goes on from its first generation: other second and third ones.
    for n in [2, 3] {
        std::fs::remove_dir_all(s.generation(n)).unwrap();
        s.commit(&mut engine, n, &Scratch::memory(20, n + 10));
        let before = tier.list("").unwrap();
        let e = run(&s, n, &tier, &options()).unwrap_err().to_string();
        assert!(e.contains("tier pfs") && e.contains("holds generation 3 of this job"), "{e}");
        assert_eq!(tier.list("").unwrap(), before);
    }
    s.commit(&mut engine, 4, &Scratch::memory(20, 14));
    run(&s, 4, &tier, &options()).unwrap();
    assert_eq!(numbers(&tier), [3, 4]);
}

#[test]
fn an_interrupted_fetch_is_carried_on() {
    let s = Scratch::new("carried");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    for number in 1..=3 {
        s.commit(&mut engine, number, &Scratch::memory(100 * number as usize, 1));
        run(&s, number, &tier, &options()).unwrap();
    }
    let before = contents(&s, 3);
    lose_job(&s);
    let catalogue = Catalogue::read(&tier, &Catalogue::default()).unwrap();
    let wanted = catalogue.whole().into_iter().max_by_key(|g| g.manifest.generation).unwrap();
    let dying = Dying {
        errno: libc::EIO,
        ..Dying::new(&tier, 8)
    };
    fetch(&s.job(), wanted, &[(&dying, &catalogue)], &Control::default()).unwrap_err();
    // Whoever collects chunks meanwhile learns which are needed.
    let m = Manifest::read(&s.job().join("gen").join(format!("{UNDER_WAY}000003"))).unwrap();
    assert_eq!(m.chunks, wanted.manifest.chunks);
    let store = Store::of_job(&s.job());
    store.collect(&m.chunks.iter().copied().collect()).unwrap();
    let brought = store.at_home().unwrap().len() as u64;
    let done = fetch(&s.job(), wanted, &[(&tier, &catalogue)], &Control::default()).unwrap();
    assert!(brought > 0 && done.present == brought, "{brought} chunks are there: {done:?}");
    assert!(contents(&s, 3) == before);
    let left: Vec<_> = std::fs::read_dir(s.job().join("gen"))
        .unwrap()
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert_eq!(left, ["000003"]);
}

#[test]
fn no_pack_goes_while_a_record_cannot_be_read() {
    let s = Scratch::new("unreadable");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    for n in 1..=3 {
        s.commit(&mut engine, n, &Scratch::memory(30, n));
    }
    for n in [1, 2] {
        run(&s, n, &tier, &options()).unwrap();
    }
    let all = |prefix: &str| -> Vec<String> { tier.list(prefix).unwrap().into_iter().map(|o| o.key).collect() };
    let first = all("gen").swap_remove(0);
    let good = read_whole(&tier, &first, u64::MAX).unwrap();
    let text = String::from_utf8(good.clone()).unwrap();
    // Cut off, changed, and of a version to come.
    let changed = text.replacen("xxh3\":", "xxh3\":1", 1);
    let newer = text.replacen("format\":1", "format\":2", 1);
    for bad in [&text[..text.len() / 2], &changed, &newer] {
        assert_ne!(bad, text);
        write_whole(&tier, &first, bad.as_bytes()).unwrap();
        let before = all("");
        if !numbers(&tier).contains(&3) {
            // Nor to make room.
            let full = Options {
                capacity: Some(1),
                ..options()
            };
            run(&s, 3, &tier, &full).unwrap_err();
            assert_eq!(all(""), before);
        }
        run(&s, 3, &tier, &options()).unwrap();
        let after = all("");
        assert!(before.iter().all(|key| after.contains(key)), "{after:?}");
        assert_eq!(numbers(&tier), [2, 3]);
    }
    // Readable again, it has everything that it names.
    write_whole(&tier, &first, &good).unwrap();
    assert_eq!(numbers(&tier), [1, 2, 3]);
    run(&s, 3, &tier, &options()).unwrap();
    assert_eq!(numbers(&tier), [2, 3]);
    assert!(
        !all("").iter().any(|key| key.contains("/000001-")),
        "now it goes, with its packs"
    );
}

/// A tier that fails for good after so many bytes or calls, as a killed agent's does; what it has written stays as it is.
#[derive(Debug)]
pub(super) struct Dying<'a> {
    pub(super) tier: &'a dyn Tier,
    pub(super) left: AtomicU64,
    pub(super) errno: i32,
}

impl<'a> Dying<'a> {
    pub(super) fn new(tier: &'a dyn Tier, left: u64) -> Self {
        let left = AtomicU64::new(left);
        Self {
            tier,
            left,
            errno: libc::EPIPE,
        }
    }

    fn spend(&self, cost: u64) -> Result<(), StorageError> {
        let spent = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |l| l.checked_sub(cost));
        spent.map(drop).map_err(|_| {
            self.left.store(0, Ordering::Relaxed);
            crate::tier::failed("dying", "write", "x", std::io::Error::from_raw_os_error(self.errno))
        })
    }
}

struct DyingPut<'a>(&'a Dying<'a>, Option<Box<dyn Put + 'a>>);

impl Put for DyingPut<'_> {
    fn write(&mut self, data: &[u8]) -> Result<(), StorageError> {
        let put = self.1.as_mut().unwrap();
        let fits = (self.0.left.load(Ordering::Relaxed) as usize).min(data.len());
        put.write(&data[..fits])?;
        self.0.spend(data.len() as u64)
    }
    fn finish(mut self: Box<Self>) -> Result<(), StorageError> {
        self.0.spend(1)?;
        self.1.take().unwrap().finish()?;
        self.0.spend(1)
    }
}

impl Drop for DyingPut<'_> {
    fn drop(&mut self) {
        // A killed process removes nothing.
        std::mem::forget(self.1.take());
    }
}

impl Tier for Dying<'_> {
    fn name(&self) -> &str {
        "dying"
    }
    fn put<'b>(&'b self, key: &str) -> Result<Box<dyn Put + 'b>, StorageError> {
        self.spend(1)?;
        let put = self.tier.put(key)?;
        self.spend(1)?;
        Ok(Box::new(DyingPut(self, Some(put))))
    }
    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        self.spend(1)?;
        self.tier.get(key, range, buf)
    }
    fn length(&self, key: &str) -> Result<Option<u64>, StorageError> {
        self.tier.length(key)
    }
    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError> {
        self.tier.list(prefix)
    }
    fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.spend(1)?;
        self.tier.delete(key)?;
        self.spend(1)
    }
    fn sync(&self) -> Result<(), StorageError> {
        self.spend(1)?;
        self.tier.sync()
    }
    fn free(&self) -> Result<Option<u64>, StorageError> {
        self.tier.free()
    }
    fn clear(&self) -> Result<u64, StorageError> {
        self.tier.clear()
    }
}

#[test]
fn a_flush_that_dies_at_any_step_leaves_whole_generations_and_the_next_one_completes() {
    let s = Scratch::new("dying");
    let mut engine = s.engine();
    for n in 1..=3 {
        s.commit(&mut engine, n, &Scratch::memory(40, n));
    }
    let one = Options { threads: 1, ..options() };
    let mut died = 0;
    for round in 0..400u64 {
        let tier = s.tier(&format!("r{round}"));
        for n in 1..=2 {
            run(&s, n, &tier, &one).unwrap();
        }
        // Small budgets reach every call at the beginning and, with what the data take added, every call at the end.
        let budget = if round % 2 == 0 { round } else { 170_000 + round * 9 };
        let dying = Dying::new(&tier, budget);
        let ended = run(&s, 3, &dying, &one);
        died += u32::from(ended.is_err());
        let held = numbers(&tier);
        assert!(
            held == [1, 2] || held == [1, 2, 3] || held == [2, 3],
            "budget {budget}: {held:?}"
        );
        assert!(ended.is_err() || held.contains(&3));
        run(&s, 3, &tier, &one).unwrap();
        assert_eq!(numbers(&tier), [2, 3], "budget {budget}");
        assert_eq!(tier.clear().unwrap(), 0, "budget {budget}: nothing unfinished is left");
        let named: BTreeSet<PackRef> = {
            let c = Catalogue::read(&tier, &Catalogue::default()).unwrap();
            assert_eq!(c.faults, []);
            c.generations.iter().flat_map(|g| g.record.packs.clone()).collect()
        };
        assert_eq!(
            tier.list("packs").unwrap().len(),
            named.len(),
            "budget {budget}: no pack without a record"
        );
        std::fs::remove_dir_all(s.0.join(format!("r{round}"))).unwrap();
    }
    assert!(died > 100, "only {died} of 400 flushes died");
}
