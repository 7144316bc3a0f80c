//! What every tier must do. Panics, naming the rule, where a tier does not.
//!
//! Run by the tests of each implementation: `open` opens the same, at first empty, tier anew each time, as another process would.

use super::{is_key, read_whole, write_whole, Object, Tier};
use crate::StorageError;
use belay_kernel::direct::Buffer;

/// Longer than any part in which an implementation writes.
const LONG: usize = 21 << 20;

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

fn keys(list: &[Object]) -> Vec<&str> {
    list.iter().map(|o| o.key.as_str()).collect()
}

/// Runs the suite.
pub fn run(open: &dyn Fn() -> Box<dyn Tier>) {
    whole_objects(open);
    ranges(&*open());
    nothing_is_left_of_what_was_not_finished(open);
    many_at_once(&*open());
    bad_keys(&*open());
    let t = open();
    for o in t.list("").expect("list everything") {
        t.delete(&o.key).expect("delete");
    }
    assert_eq!(t.list("").expect("list nothing"), [], "an emptied tier lists nothing");
}

fn whole_objects(open: &dyn Fn() -> Box<dyn Tier>) {
    let t = open();
    assert_eq!(t.list("").expect("list"), [], "a new tier is empty");
    assert_eq!(
        t.length("packs/none").expect("length"),
        None,
        "what is not there has no length"
    );
    assert!(
        t.get("packs/none", 0..1, &mut Buffer::default()).is_err(),
        "what is not there cannot be read"
    );
    t.delete("packs/none").expect("removing what is not there is no error");
    let long = pattern(LONG, 1);
    let mut put = t.put("packs/long").expect("put");
    for piece in long.chunks(3_000_001) {
        put.write(piece).expect("write");
    }
    put.finish().expect("finish");
    write_whole(&*t, "packs/empty", &[]).expect("an empty object");
    write_whole(&*t, "gen/one", b"one").expect("a small object");
    write_whole(&*t, "gen/one", b"another").expect("an object is replaced");
    t.sync().expect("sync");
    let t = open();
    let folders = t.folders().expect("folders");
    for one in ["gen", "packs"] {
        assert!(folders.iter().any(|f| f == one), "directory {one} is listed: {folders:?}");
    }
    assert_eq!(
        read_whole(&*t, "packs/long", u64::MAX).expect("read"),
        long,
        "what was written is read"
    );
    assert_eq!(
        read_whole(&*t, "gen/one", 100).expect("read"),
        b"another",
        "the newest contents hold"
    );
    assert!(
        read_whole(&*t, "gen/one", 3).is_err(),
        "a longer object than allowed is refused"
    );
    let all = t.list("").expect("list");
    assert_eq!(
        keys(&all),
        ["gen/one", "packs/empty", "packs/long"],
        "a list is complete and in order"
    );
    assert_eq!(all[2].bytes, LONG as u64, "a list says how long objects are");
    assert_eq!(
        keys(&t.list("packs").expect("list")),
        ["packs/empty", "packs/long"],
        "a list can be of one directory"
    );
    assert_eq!(t.list("pack").expect("list"), [], "a part of a name is no directory");
    t.delete("packs/empty").expect("delete");
    t.sync().expect("sync");
    assert_eq!(open().length("packs/empty").expect("length"), None, "what is removed is gone");
    t.free().expect("free space is known, or known to be unknown");
}

fn ranges(t: &dyn Tier) {
    let data = pattern(900_000, 2);
    write_whole(t, "gen/ranges", &data).expect("write");
    let mut buf = Buffer::default();
    buf.extend_from_slice(&[7; 10]);
    for (from, to) in [
        (0, 900_000),
        (0, 1),
        (899_999, 900_000),
        (4096, 8192),
        (5, 5),
        (5000, 899_001),
        (8192, 86_016),
    ] {
        t.get("gen/ranges", from as u64..to as u64, &mut buf)
            .expect("a range within the object");
        assert_eq!(*buf, data[from..to], "exactly the range is read");
    }
    for (from, to) in [(0, 900_001), (900_000, 900_001), (1 << 40, (1 << 40) + 1)] {
        assert!(
            t.get("gen/ranges", from..to, &mut buf).is_err(),
            "{from}..{to} leaves the object"
        );
    }
}

fn nothing_is_left_of_what_was_not_finished(open: &dyn Fn() -> Box<dyn Tier>) {
    let t = open();
    let before = t.list("").expect("list");
    for bytes in [0, 10, LONG] {
        let mut put = t.put("packs/unfinished").expect("put");
        put.write(&pattern(bytes, 3)).expect("write");
        assert_eq!(t.list("").expect("list"), before, "nothing is seen before it is finished");
        drop(put);
    }
    let mut put = t.put("packs/forgotten").expect("put");
    put.write(b"as a killed process leaves it").expect("write");
    std::mem::forget(put);
    let t = open();
    assert_eq!(t.list("").expect("list"), before, "nothing is seen of what was dropped");
    t.clear().expect("clear");
    assert_eq!(t.clear().expect("clear"), 0, "left-overs are removed once");
    assert_eq!(t.list("").expect("list"), before, "clearing removes nothing else");
}

fn many_at_once(t: &dyn Tier) {
    std::thread::scope(|s| {
        for n in 0..4u8 {
            s.spawn(move || {
                let data = pattern(1_000_000 + usize::from(n), n);
                let key = format!("packs/many-{n}");
                write_whole(t, &key, &data).expect("write beside others");
                assert_eq!(read_whole(t, &key, u64::MAX).expect("read beside others"), data);
            });
        }
    });
    assert_eq!(
        t.list("packs")
            .expect("list")
            .iter()
            .filter(|o| o.key.contains("many"))
            .count(),
        4
    );
}

fn bad_keys(t: &dyn Tier) {
    for key in ["", "/x", "../x", "x/../y", ".hidden", "x//y", "x/", "a b", "ü"] {
        assert!(!is_key(key));
        let refused = t.put(key).map(drop);
        assert!(matches!(refused, Err(StorageError::Tier { .. })), "key {key:?} is refused");
        assert!(t.get(key, 0..0, &mut Buffer::default()).is_err(), "key {key:?} is refused");
    }
}
