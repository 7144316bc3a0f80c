//! Tiers of which something cannot be read for the moment: only what needs that is out of reach.

use super::tests::{bring, contents, lose_job, numbers, options, run};
use super::*;
use crate::testing::Scratch;
use crate::tier::directory::Directory;
use crate::tier::{failed, Object, Put};
use std::io::ErrorKind;
use std::ops::Range;

/// A tier whose owner has shut some objects, or all of it.
#[derive(Debug)]
struct Shut {
    tier: Directory,
    /// Those whose keys begin so.
    objects: String,
    all: bool,
    /// Those whose keys begin so cannot be removed.
    kept: String,
}

impl Shut {
    fn new(s: &Scratch, objects: impl Into<String>) -> Self {
        Self {
            tier: s.tier("pfs"),
            objects: objects.into(),
            all: false,
            kept: "none".into(),
        }
    }
}

impl Tier for Shut {
    fn name(&self) -> &str {
        self.tier.name()
    }

    fn put<'a>(&'a self, key: &str) -> Result<Box<dyn Put + 'a>, StorageError> {
        self.tier.put(key)
    }

    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        if self.all || key.starts_with(&self.objects) {
            return Err(failed(self.name(), "read", key, ErrorKind::PermissionDenied.into()));
        }
        self.tier.get(key, range, buf)
    }

    fn length(&self, key: &str) -> Result<Option<u64>, StorageError> {
        self.tier.length(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError> {
        if self.all && prefix == "packs" {
            return Err(failed(self.name(), "list", prefix, ErrorKind::PermissionDenied.into()));
        }
        self.tier.list(prefix)
    }

    fn delete(&self, key: &str) -> Result<(), StorageError> {
        if key.starts_with(&self.kept) {
            return Err(failed(self.name(), "remove", key, ErrorKind::PermissionDenied.into()));
        }
        self.tier.delete(key)
    }

    fn sync(&self) -> Result<(), StorageError> {
        self.tier.sync()
    }

    fn free(&self) -> Result<Option<u64>, StorageError> {
        self.tier.free()
    }

    fn clear(&self) -> Result<u64, StorageError> {
        self.tier.clear()
    }
}

fn read(tier: &dyn Tier) -> Catalogue {
    Catalogue::read(tier, &Catalogue::default()).unwrap()
}

/// A tier that holds generations 1 and 2, which share most of their memory.
fn two(s: &Scratch) -> (crate::engine::Engine, Vec<u8>) {
    let (mut engine, mut memory) = (s.engine(), Scratch::memory(100, 1));
    for number in [1, 2] {
        memory[7 * 4096] ^= number as u8;
        s.commit(&mut engine, number, &memory);
        run(s, number, &s.tier("pfs"), &options()).unwrap();
    }
    (engine, memory)
}

#[test]
fn a_record_that_cannot_be_read_keeps_nobody_from_other_generations() {
    let s = Scratch::new("unread");
    let (mut engine, mut memory) = two(&s);
    let before = [1, 2].map(|n| contents(&s, n));
    lose_job(&s);
    for (shut, there) in [("gen/000001", 2), ("gen/000002", 1)] {
        let tier = Shut::new(&s, shut);
        let c = read(&tier);
        assert_eq!((c.generations.len(), c.numbers().len()), (1, 2));
        assert_eq!(c.unread_generations().collect::<Vec<_>>(), [3 - there]);
        assert!(c.unread[0].0.starts_with(shut), "{:?}", c.unread);
        assert_eq!(bring(&s, &[&tier]).unwrap(), there);
        assert!(contents(&s, there) == before[there as usize - 1]);
        lose_job(&s);
    }
    // What it names is not known: it all stays, and what follows is durable.
    assert_eq!(bring(&s, &[&s.tier("pfs")]).unwrap(), 2);
    memory[9 * 4096] ^= 1;
    s.commit(&mut engine, 3, &memory);
    let packs = s.tier("pfs").list("packs").unwrap();
    run(&s, 3, &Shut::new(&s, "gen/000001"), &Options { keep: 1, ..options() }).unwrap();
    let now = s.tier("pfs").list("packs").unwrap();
    assert!(packs.iter().all(|p| now.contains(p)), "{now:?}");
    assert_eq!(numbers(&s.tier("pfs")), [1, 3]);
    // Behind what another job directory has made it is not flushed, whether that can be read or not.
    let behind = run(&s, 2, &Shut::new(&s, "gen/000003"), &options()).unwrap_err().to_string();
    assert!(behind.contains("holds generation 3"), "{behind}");
}

#[test]
fn a_pack_that_cannot_be_read_keeps_nobody_from_others() {
    let s = Scratch::new("unread");
    let (mut engine, mut memory) = two(&s);
    let tier = Shut::new(&s, "packs/000002");
    let c = read(&tier);
    let of = |all: &[&Listed]| all.iter().map(|g| g.manifest.generation).collect::<Vec<_>>();
    assert_eq!((of(&c.whole()), of(&c.doubtful())), (vec![1], vec![2]));
    assert!(c.faults.is_empty() && c.is_out_of_reach(&c.generations[1]), "{c:?}");
    // Of a check it is one finding among others.
    let mut all = read(&s.tier("pfs"));
    let (bytes, damaged) = all.check(&tier).unwrap();
    assert!(bytes > 0 && damaged.is_empty() && all.unread.len() == 1, "{:?}", all.unread);
    memory[9 * 4096] ^= 1;
    s.commit(&mut engine, 3, &memory);
    run(&s, 3, &tier, &options()).unwrap();
    assert!(read(&tier).whole().iter().any(|g| g.manifest.generation == 3));
    assert_eq!(numbers(&s.tier("pfs")), [1, 2, 3], "nobody knows whether the second is whole");
    lose_job(&s);
    assert_eq!(bring(&s, &[&tier]).unwrap(), 3);
}

#[test]
fn what_is_called_after_no_generation_is_no_record() {
    let s = Scratch::new("unread");
    let (tier, record) = (s.tier("pfs"), format!("gen/{}-0123456789abcdef.json", 1u64 << 48));
    crate::tier::write_whole(&tier, &record, b"junk").unwrap();
    let mut engine = s.engine();
    for n in 1..=2 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
        run(&s, n, &tier, &Options { keep: 1, ..options() }).unwrap();
    }
    let packs = tier.list("packs").unwrap();
    assert!(packs.iter().all(|o| o.key.starts_with("packs/000002")), "{packs:?}");
    assert_eq!((numbers(&tier), tier.length(&record).unwrap()), (vec![2], None));
}

#[test]
fn a_tier_that_does_not_answer_is_none_that_holds_nothing() {
    let s = Scratch::new("unread");
    two(&s);
    let tier = Shut {
        all: true,
        ..Shut::new(&s, "")
    };
    assert!(Catalogue::read(&tier, &Catalogue::default()).is_err());
}

#[test]
fn what_cannot_be_removed_is_all_that_is_known_to_be_there() {
    let s = Scratch::new("unread");
    two(&s);
    let tier = Shut {
        kept: "gen/000002".into(),
        ..Shut::new(&s, "no object")
    };
    let mut c = read(&tier);
    let e = c.remove_all(&tier).unwrap_err().to_string();
    assert!(e.contains("remove gen/000002-"), "{e}");
    let known: Vec<u64> = c.whole().iter().map(|g| g.manifest.generation).collect();
    assert_eq!((known, numbers(&tier)), (vec![2], vec![2]));
    assert!(c.remove_all(&s.tier("pfs")).unwrap() > 0);
    assert!(c.generations.is_empty() && s.tier("pfs").list("").unwrap().is_empty());
}
