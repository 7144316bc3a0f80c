//! Tiers whose file system is full, or on which the user may have no more: whoever else has taken the room.

use super::tests::{numbers, options, run};
use super::*;
use crate::testing::Scratch;
use crate::tier::directory::Directory;
use crate::tier::{failed, Object, Put};
use std::ops::Range;

/// A tier with room for so many bytes.
#[derive(Debug)]
struct Small(Directory, u64);

struct SmallPut<'a>(&'a Small, Box<dyn Put + 'a>, u64);

fn used(tier: &dyn Tier) -> u64 {
    tier.list("").unwrap().iter().map(|o| o.bytes).sum()
}

impl Put for SmallPut<'_> {
    fn write(&mut self, data: &[u8]) -> Result<(), StorageError> {
        self.2 += data.len() as u64;
        if used(&self.0 .0) + self.2 > self.0 .1 {
            let full = std::io::Error::from_raw_os_error(libc::EDQUOT);
            return Err(failed(self.0.name(), "write", "x", full));
        }
        self.1.write(data)
    }
    fn finish(self: Box<Self>) -> Result<(), StorageError> {
        self.1.finish()
    }
}

impl Tier for Small {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn put<'a>(&'a self, key: &str) -> Result<Box<dyn Put + 'a>, StorageError> {
        Ok(Box::new(SmallPut(self, self.0.put(key)?, 0)))
    }
    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        self.0.get(key, range, buf)
    }
    fn length(&self, key: &str) -> Result<Option<u64>, StorageError> {
        self.0.length(key)
    }
    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError> {
        self.0.list(prefix)
    }
    fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.0.delete(key)
    }
    fn sync(&self) -> Result<(), StorageError> {
        self.0.sync()
    }
    fn free(&self) -> Result<Option<u64>, StorageError> {
        self.0.free()
    }
    fn clear(&self) -> Result<u64, StorageError> {
        self.0.clear()
    }
}

#[test]
fn what_interrupted_flushes_left_takes_no_room_from_the_next() {
    let s = Scratch::new("full");
    let tier = s.tier("pfs");
    let mut engine = s.engine();
    for n in 1..=3 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
    }
    for n in 1..=2 {
        run(&s, n, &tier, &options()).unwrap();
    }
    // All of the second one is there, and its record is not.
    let record = tier.list("gen").unwrap().remove(1).key;
    tier.delete(&record).unwrap();
    let small = Small(s.tier("pfs"), 500_000);
    assert!(used(&tier) > 400_000, "{}", used(&tier));
    run(&s, 3, &small, &options()).unwrap();
    assert_eq!(numbers(&tier), [1, 3]);
}

#[test]
fn a_flush_without_room_leaves_none_of_its_packs() {
    let s = Scratch::new("without");
    let (tier, other) = (s.tier("pfs"), s.tier("other"));
    let mut engine = s.engine();
    for n in 1..=2 {
        s.commit(&mut engine, n, &Scratch::memory(50, n));
    }
    let one = Options { threads: 1, ..options() };
    run(&s, 1, &tier, &one).unwrap();
    let before = tier.list("").unwrap();
    run(&s, 2, &other, &one).unwrap();
    // There is room for all of it but the record, whose length varies by some digits, or for less.
    for lacking in [100, 100_000] {
        let small = Small(s.tier("pfs"), used(&tier) + used(&other) - lacking);
        let e = run(&s, 2, &small, &one).unwrap_err();
        assert!(e.to_string().contains("Disk quota exceeded"), "{e}");
        assert_eq!(tier.list("").unwrap(), before, "{lacking}");
    }
    let pack = other.list("packs").unwrap().remove(0).key;
    std::fs::copy(s.0.join("other").join(&pack), s.0.join("pfs").join(&pack)).unwrap();
    let small = Small(s.tier("pfs"), used(&tier));
    run(&s, 2, &small, &one).unwrap_err();
    assert_eq!(tier.list("").unwrap(), before, "nor what one has left that was killed");
    run(&s, 2, &tier, &one).unwrap();
    assert_eq!(numbers(&tier), [1, 2]);
}
