//! Flushes to tiers on which everything is sealed, and what becomes of it when keys come and go.

use super::tests::{bring, contents, lose_job, numbers, options, run};
use super::*;
use crate::seal::{Keys, HEADER};
use crate::testing::Scratch;
use crate::tier::sealed::Sealed;
use crate::tier::write_whole;
use std::sync::Arc;

/// The tier with these keys, each as one digit.
fn open(s: &Scratch, digits: &str) -> Sealed {
    let lines: Vec<String> = digits.chars().map(|d| d.to_string().repeat(64)).collect();
    let keys = Keys::parse(lines.join("\n").as_bytes()).unwrap();
    Sealed::new(Box::new(s.tier("pfs")), Arc::new(keys), "job-1")
}

fn read(tier: &dyn Tier) -> Catalogue {
    Catalogue::read(tier, &Catalogue::default()).unwrap()
}

/// The keys that each generation needs.
fn needed(tier: &dyn Tier) -> Vec<(u64, usize, bool)> {
    let c = read(tier);
    let newest = tier.seals_with().unwrap();
    let one = |g: &Listed| (g.manifest.generation, c.keys_of(g).len(), c.keys_of(g).contains(&*newest));
    c.generations.iter().map(one).collect()
}

#[test]
fn nothing_of_a_generation_is_seen_on_the_tier_and_it_comes_back() {
    for zstd in [Compression::Off, Compression::Level(1)] {
        let s = Scratch::new("sealing");
        let mut engine = s.engine();
        let mut memory = Scratch::memory(100, 1);
        let marker = b"a password of the program";
        memory[5000..5000 + marker.len()].copy_from_slice(marker);
        s.commit(&mut engine, 1, &memory);
        run(&s, 1, &open(&s, "a"), &Options { zstd, ..options() }).unwrap();
        for o in s.tier("pfs").list("").unwrap() {
            let bytes = std::fs::read(s.0.join("pfs").join(&o.key)).unwrap();
            for plain in [&marker[..], b"chunk/", b"job.bimg", b"BELAYPCK", b"manifest"] {
                assert!(!bytes.windows(plain.len()).any(|w| w == plain), "{}", o.key);
            }
        }
        let before = contents(&s, 1);
        lose_job(&s);
        assert_eq!(bring(&s, &[&open(&s, "a")]).unwrap(), 1);
        assert!(contents(&s, 1) == before);
    }
}

#[test]
fn a_rotated_key_is_needed_until_the_generations_of_before_have_gone() {
    let s = Scratch::new("sealing");
    let mut engine = s.engine();
    let mut memory = Scratch::memory(100, 1);
    s.commit(&mut engine, 1, &memory);
    run(&s, 1, &open(&s, "a"), &options()).unwrap();
    let mut change = |n: u64| {
        memory[7 * 4096] ^= 1;
        s.commit(&mut engine, n, &memory);
    };
    change(2);
    let both = open(&s, "ab");
    let second = run(&s, 2, &both, &options()).unwrap();
    assert!(second.bytes > 400 << 10, "all of it is copied under the new key: {second:?}");
    assert_eq!(needed(&both), [(1, 1, false), (2, 1, true)]);
    change(3);
    let third = run(&s, 3, &both, &options()).unwrap();
    assert!(third.bytes < 20 << 10, "{third:?}");
    assert_eq!(needed(&both), [(2, 1, true), (3, 1, true)]);
    let before = contents(&s, 3);
    lose_job(&s);
    assert_eq!(bring(&s, &[&open(&s, "b")]).unwrap(), 3, "the old key is not needed any more");
    assert!(contents(&s, 3) == before);
}

#[test]
fn what_lacks_its_key_stays_as_it_is_and_nothing_is_added_to_it() {
    let s = Scratch::new("sealing");
    let mut engine = s.engine();
    for n in 1..=2 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
        run(&s, n, &open(&s, "a"), &options()).unwrap();
    }
    s.commit(&mut engine, 3, &Scratch::memory(50, 3));
    let below = s.tier("pfs");
    let before = below.list("").unwrap();
    let without: [Box<dyn Tier>; 2] = [Box::new(open(&s, "b")), Box::new(s.tier("pfs"))];
    for tier in without {
        let c = read(&*tier);
        assert!(
            c.generations.is_empty() && c.faults.is_empty() && c.has_unreadable_records(),
            "{c:?}"
        );
        assert_eq!(c.locked.len(), before.len());
        let e = run(&s, 3, &*tier, &options()).unwrap_err();
        assert!(
            matches!(&e, StorageError::Locked { key, .. } if before.iter().any(|o| o.key == *key)),
            "{e}"
        );
        let (mut c, mut newer) = (read(&*tier), || Ok(()));
        assert_eq!(c.retain(&*tier, 1, 9).unwrap(), 0);
        assert_eq!(c.collect(&*tier).unwrap(), 0);
        assert!(!c.give_way(&*tier, &mut newer).unwrap());
        assert_eq!(c.check(&*tier).unwrap(), (0, vec![]));
        assert_eq!(below.list("").unwrap(), before);
    }
    run(&s, 3, &open(&s, "ab"), &options()).unwrap();
    assert_eq!(numbers(&open(&s, "ab")), [2, 3]);
}

#[test]
fn what_was_put_there_by_others_is_never_brought() {
    let s = Scratch::new("sealing");
    let mut engine = s.engine();
    s.commit(&mut engine, 1, &Scratch::memory(50, 1));
    run(&s, 1, &open(&s, "a"), &options()).unwrap();
    // A whole generation, with right checksums, that is not sealed; and that of a job with the same key.
    s.commit(&mut engine, 2, &Scratch::memory(50, 2));
    let (plain, other) = (s.tier("plain"), Sealed::new(Box::new(s.tier("other")), same_key(), "job-2"));
    run(&s, 2, &plain, &options()).unwrap();
    run(&s, 2, &other, &options()).unwrap();
    for from in ["plain", "other"] {
        for o in s.tier(from).list("").unwrap() {
            std::fs::copy(s.0.join(from).join(&o.key), s.0.join("pfs").join(&o.key)).unwrap();
        }
        let c = read(&open(&s, "a"));
        assert_eq!(c.whole().len() + c.doubtful().len(), 1, "{from}");
        assert!(
            c.faults.iter().any(|(key, _)| key.starts_with("gen/000002")),
            "{:?}",
            c.faults
        );
    }
    lose_job(&s);
    assert_eq!(bring(&s, &[&open(&s, "a")]).unwrap(), 1);
}

#[test]
fn what_others_put_there_keeps_nothing_from_going() {
    let s = Scratch::new("sealing");
    let mut engine = s.engine();
    let (below, tier) = (s.tier("pfs"), open(&s, "a"));
    let foreign = ["gen/x", "gen/99999999-0.json", "gen/000001-0123456789abcdef.json/y"];
    let (later, forged) = ("gen/99999999-0123456789abcdef.json", "gen/99999999-fedcba9876543210.json");
    for key in foreign.iter().chain([&later]) {
        write_whole(&below, key, b"somebody else's").unwrap();
    }
    let is_there = |key: &str| below.length(key).unwrap().is_some();
    let one = Options { keep: 1, ..options() };
    for n in 1..=2 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
        run(&s, n, &tier, &one).unwrap();
        // The beginning of an object of the job, and junk.
        let own = std::fs::read(s.0.join("pfs").join(&below.list("packs").unwrap()[0].key)).unwrap();
        write_whole(&below, forged, &[&own[..HEADER], &[7; 100]].concat()).unwrap();
    }
    // It has the name of a record, and may be one that is only read wrongly today.
    assert!(is_there(later) && below.list("packs").unwrap().iter().any(|o| o.key.starts_with("packs/000001")));
    // Somebody has asked for it: what the job writes is sealed.
    let mut checked = read(&tier).forgotten();
    s.commit(&mut engine, 3, &Scratch::memory(50, 3));
    let (control, none) = (Control::default(), &mut &[][..]);
    flush(&s.generation(3), &tier, &one, &mut checked, none, &control).unwrap();
    assert!(
        !foreign.iter().chain([&later, &forged]).any(|key| is_there(key)),
        "{:?}",
        below.list("gen").unwrap()
    );
    assert!(below.list("packs").unwrap().iter().all(|o| o.key.starts_with("packs/000003")));
    assert_eq!((numbers(&tier), checked.faults), (vec![3], vec![]));
}

#[test]
fn what_does_not_open_stays_until_somebody_has_asked_for_it() {
    let s = Scratch::new("sealing");
    let mut engine = s.engine();
    let (below, tier) = (s.tier("pfs"), open(&s, "a"));
    for n in 1..=2 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
    }
    run(&s, 2, &tier, &options()).unwrap();
    let record = below.list("gen").unwrap().remove(0).key;
    let path = s.0.join("pfs").join(&record);
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
    let (control, mut found) = (Control::default(), read(&tier));
    flush(&s.generation(1), &tier, &options(), &mut found, &mut &[][..], &control).unwrap();
    assert_eq!((found.faults.len(), below.length(&record).unwrap().is_some()), (1, true));
    // Nobody can tell it from what others make of the beginning of an object.
    let mut checked = found.forgotten();
    flush(&s.generation(1), &tier, &options(), &mut checked, &mut &[][..], &control).unwrap();
    assert_eq!((checked.faults.len(), below.length(&record).unwrap()), (0, None));
}

#[test]
fn a_pack_that_lacks_its_key_stops_nothing_where_no_record_names_it() {
    let s = Scratch::new("sealing");
    let mut engine = s.engine();
    let (tier, other) = (open(&s, "a"), open(&s, "b"));
    for n in 1..=2 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
    }
    write_whole(&other, "packs/000001-0123456789abcdef.bpk", &[7; 100]).unwrap();
    run(&s, 1, &tier, &options()).unwrap();
    assert_eq!((numbers(&tier), read(&tier).locked.len()), (vec![1], 1));
    write_whole(&other, "gen/000001-0123456789abcdef.json", b"perhaps one that names it").unwrap();
    let e = run(&s, 2, &tier, &options()).unwrap_err();
    assert!(
        matches!(&e, StorageError::Locked { key, .. } if key.starts_with("gen/")),
        "{e}"
    );
}

fn same_key() -> Arc<Keys> {
    Arc::new(Keys::parse("a".repeat(64).as_bytes()).unwrap())
}
