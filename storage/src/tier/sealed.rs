//! A tier on which every object is sealed ([`crate::seal`]): the one place where contents are encrypted on their way
//! out, and checked to be what was sealed on their way in.
//!
//! Names, lengths and times of objects stay visible. Lengths that this tier tells are those of the contents.

use super::{failed, Object, Put, Tier};
use crate::seal::{contents_length, stored, Keys, ObjectKey, Opener, Unsealable, HEADER, SEGMENT};
use crate::StorageError;
use belay_kernel::direct::Buffer;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The tier in it, with every object sealed.
#[derive(Debug)]
pub struct Sealed {
    inner: Box<dyn Tier>,
    keys: Arc<Keys>,
    /// Where it lies below what all tiers of that configuration have in common: the job's folder.
    folder: String,
    /// What has been seen of objects. They never change, but a few small ones are written anew.
    seen: Mutex<BTreeMap<String, Seen>>,
}

/// More than this of an object is read only when its beginning has been found to be ours.
const MUCH: u64 = 1 << 20;

#[derive(Debug, Clone, Default)]
struct Seen {
    /// Its length as it lies there.
    sealed: Option<u64>,
    opener: Option<Arc<Opener>>,
}

impl Sealed {
    /// `inner`, which is `folder` of a tier, with `keys`.
    pub fn new(inner: Box<dyn Tier>, keys: Arc<Keys>, folder: &str) -> Self {
        Self {
            inner,
            keys,
            folder: folder.to_owned(),
            seen: Mutex::default(),
        }
    }

    /// What the object is sealed for: its path below the tier, whatever the tier's name is and wherever that lies.
    fn path(&self, key: &str) -> String {
        match &*self.folder {
            "" => key.to_owned(),
            folder => format!("{folder}/{key}"),
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, key: &str) {
        self.seen().remove(key);
    }

    fn note(&self, key: &str, change: impl FnOnce(&mut Seen)) {
        change(self.seen().entry(key.to_owned()).or_default());
    }

    fn refuse(&self, key: &str, why: &Unsealable) -> StorageError {
        let (tier, key) = (self.name().to_owned(), key.to_owned());
        match why.is_locked() {
            true => StorageError::Locked {
                tier,
                key,
                reason: why.to_string(),
            },
            false => StorageError::TierDamaged {
                tier,
                key,
                reason: why.to_string(),
            },
        }
    }

    /// Reads `range` by what has been `seen` of the object, and notes what is new.
    fn read(&self, key: &str, range: &Range<u64>, seen: Seen, buf: &mut Buffer) -> Result<(), StorageError> {
        let cannot = |e: io::ErrorKind| failed(self.name(), "read", key, e.into());
        let sealed = match seen.sealed {
            Some(sealed) => sealed,
            None => self.inner.length(key)?.ok_or_else(|| cannot(io::ErrorKind::NotFound))?,
        };
        self.note(key, |s| s.sealed = Some(sealed));
        let bytes = contents_length(sealed);
        if bytes.is_some_and(|bytes| range.end > bytes || range.start > range.end) {
            return Err(cannot(io::ErrorKind::UnexpectedEof));
        }
        let opener = |header: &[u8]| {
            let opener = Opener::new(&self.keys, &self.path(key), header, sealed);
            opener.map(Arc::new).map_err(|why| self.refuse(key, &why))
        };
        let from = stored(range, bytes.unwrap_or(0));
        let header = HEADER as u64;
        let (opener, skip) = match seen.opener {
            Some(opener) => {
                self.inner.get(key, from, buf)?;
                (opener, 0)
            }
            // Together with the first segment, where that is wanted: each question to an object store takes its time.
            None if from.start == header && bytes.is_some() => {
                self.inner.get(key, 0..from.end, buf)?;
                (opener(&buf[..HEADER])?, HEADER)
            }
            None => {
                self.inner.get(key, 0..header.min(sealed), buf)?;
                let opener = opener(buf)?;
                self.inner.get(key, from, buf)?;
                (opener, 0)
            }
        };
        opener.open(range, buf, skip).map_err(|why| self.refuse(key, &why))?;
        // Not by its header alone: that may have been copied from another object.
        self.note(key, |s| s.opener = Some(opener));
        Ok(())
    }
}

impl Tier for Sealed {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn put<'a>(&'a self, key: &str) -> Result<Box<dyn Put + 'a>, StorageError> {
        let random = || failed(self.name(), "seal", key, io::Error::other("no random numbers"));
        let (header, object) = self.keys.begin(&self.path(key)).ok_or_else(random)?;
        let mut put = self.inner.put(key)?;
        put.write(&header)?;
        Ok(Box::new(Sealing {
            tier: self,
            key: key.to_owned(),
            object,
            put,
            segment: 0,
            data: Vec::with_capacity(SEGMENT as usize + 16),
        }))
    }

    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        let mut seen = self.seen().get(key).cloned();
        let is_known = seen.is_some();
        if !is_known && range.end.saturating_sub(range.start) > MUCH {
            // Nobody is to fetch much of what somebody else has put there.
            self.read(key, &(range.start..range.start + 1), Seen::default(), buf)?;
            seen = self.seen().get(key).cloned();
        }
        match self.read(key, &range, seen.unwrap_or_default(), buf) {
            // Somebody else may have written it anew since.
            Err(e) if is_known && contradicts(&e) => {
                self.forget(key);
                self.read(key, &range, Seen::default(), buf)
            }
            other => other,
        }
    }

    fn length(&self, key: &str) -> Result<Option<u64>, StorageError> {
        let Some(sealed) = self.inner.length(key)? else {
            self.forget(key);
            return Ok(None);
        };
        self.note(key, |s| s.sealed = Some(sealed));
        // What is as long as no sealed object is found out when it is read.
        Ok(Some(contents_length(sealed).unwrap_or(sealed)))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError> {
        let found = self.inner.list(prefix)?;
        let object = |o: Object| {
            self.note(&o.key, |s| s.sealed = Some(o.bytes));
            let bytes = contents_length(o.bytes).unwrap_or(o.bytes);
            Object { bytes, ..o }
        };
        Ok(found.into_iter().map(object).collect())
    }

    fn folders(&self) -> Result<Vec<String>, StorageError> {
        self.inner.folders()
    }

    fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.forget(key);
        self.inner.delete(key)
    }

    fn sync(&self) -> Result<(), StorageError> {
        self.inner.sync()
    }

    fn free(&self) -> Result<Option<u64>, StorageError> {
        self.inner.free()
    }

    fn clear(&self) -> Result<u64, StorageError> {
        self.inner.clear()
    }

    fn seals_with(&self) -> Option<String> {
        self.keys.newest().map(|id| id.to_string())
    }

    fn key_of(&self, key: &str) -> Option<String> {
        let seen = self.seen();
        seen.get(key)?.opener.as_ref().map(|o| o.id().to_string())
    }
}

/// Whether an object may not be what had been seen of it.
fn contradicts(e: &StorageError) -> bool {
    use io::ErrorKind::{NotFound, UnexpectedEof};
    match e {
        StorageError::TierDamaged { .. } | StorageError::Locked { .. } => true,
        StorageError::Tier { source, .. } => matches!(source.kind(), NotFound | UnexpectedEof),
        _ => false,
    }
}

/// An object being sealed.
struct Sealing<'a> {
    tier: &'a Sealed,
    key: String,
    object: ObjectKey,
    put: Box<dyn Put + 'a>,
    segment: u64,
    /// What has not been sealed yet, a segment at the most.
    data: Vec<u8>,
}

impl Sealing<'_> {
    fn seal(&mut self, is_last: bool) -> Result<(), StorageError> {
        if !self.object.seal(self.segment, is_last, &mut self.data) {
            let why = io::Error::other("the segment could not be encrypted");
            return Err(failed(self.tier.name(), "seal", &self.key, why));
        }
        self.put.write(&self.data)?;
        self.data.clear();
        self.segment += 1;
        Ok(())
    }
}

impl Put for Sealing<'_> {
    fn write(&mut self, mut data: &[u8]) -> Result<(), StorageError> {
        while !data.is_empty() {
            // A whole one is sealed when more follows: the last one is sealed as such.
            if self.data.len() == SEGMENT as usize {
                self.seal(false)?;
            }
            let (now, later) = data.split_at(data.len().min(SEGMENT as usize - self.data.len()));
            self.data.extend_from_slice(now);
            data = later;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<(), StorageError> {
        self.seal(true)?;
        self.tier.forget(&self.key);
        self.put.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use crate::tier::directory::Directory;
    use crate::tier::{conformance, read_whole, write_whole};

    fn keys(digits: &[&str]) -> Arc<Keys> {
        let lines: Vec<String> = digits.iter().map(|d| d.repeat(64)).collect();
        Arc::new(Keys::parse(lines.join("\n").as_bytes()).unwrap())
    }

    fn sealed(s: &Scratch, name: &str, keys: Arc<Keys>, folder: &str) -> Sealed {
        Sealed::new(Box::new(s.tier(name)), keys, folder)
    }

    #[test]
    fn a_sealed_tier_conforms() {
        let s = Scratch::new("sealed");
        conformance::run(&|| Box::new(sealed(&s, "t", keys(&["a"]), "job-1")));
    }

    #[test]
    fn what_others_put_there_is_refused_by_name() {
        let s = Scratch::new("sealed");
        let (mine, below) = (sealed(&s, "t", keys(&["a"]), "job-1"), s.tier("t"));
        let data: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        write_whole(&mine, "packs/a", &data).unwrap();
        write_whole(&mine, "packs/b", &data).unwrap();
        let lie = |from: &str, to: &str| {
            let mut buf = Buffer::default();
            let bytes = below.length(from).unwrap().unwrap();
            below.get(from, 0..bytes, &mut buf).unwrap();
            write_whole(&below, to, &buf).unwrap();
        };
        let damaged = |key: &str, words: &str| {
            let e = read_whole(&mine, key, u64::MAX).unwrap_err();
            assert!(e.is_contradicted(), "{e}");
            assert!(e.to_string().starts_with(&format!("tier t: {key}: damaged: ")), "{e}");
            assert!(e.to_string().contains(words), "{e}");
        };
        lie("packs/b", "packs/a");
        damaged("packs/a", "another name");
        write_whole(&below, "packs/a", &data).unwrap();
        damaged("packs/a", "not sealed");
        write_whole(&below, "packs/a", b"").unwrap();
        damaged("packs/a", "not sealed");
        // Another job's, which has the same key.
        write_whole(&sealed(&s, "t", keys(&["a"]), "job-2"), "packs/a", &data).unwrap();
        damaged("packs/a", "another name");
        // As it was again.
        write_whole(&mine, "packs/a", &data).unwrap();
        assert_eq!(read_whole(&mine, "packs/a", u64::MAX).unwrap(), data);
        // Somebody else with the key writes it anew: what had been seen of it does not count.
        write_whole(&sealed(&s, "t", keys(&["a"]), "job-1"), "packs/a", b"new").unwrap();
        let mut buf = Buffer::default();
        mine.get("packs/a", 1..3, &mut buf).unwrap();
        assert_eq!(*buf, *b"ew");
    }

    #[test]
    fn a_key_that_is_not_at_hand_is_no_damage() {
        let s = Scratch::new("sealed");
        let open = |k: &[&str]| sealed(&s, "t", keys(k), "job-1");
        write_whole(&open(&["a"]), "gen/1", b"first").unwrap();
        let both = open(&["a", "b"]);
        write_whole(&both, "gen/2", b"second").unwrap();
        assert_eq!(read_whole(&both, "gen/1", 100).unwrap(), b"first");
        assert_eq!(read_whole(&both, "gen/2", 100).unwrap(), b"second");
        assert_eq!(both.key_of("gen/2"), both.seals_with());
        let old = both.key_of("gen/1").unwrap();
        assert_ne!(Some(&old), both.seals_with().as_ref());
        let unsealed: Box<dyn Tier> = Box::new(Directory::open("t", &s.0.join("t")).unwrap());
        for tier in [Box::new(open(&["b"])), unsealed] {
            let e = read_whole(&*tier, "gen/1", 100).unwrap_err();
            assert!(matches!(e, StorageError::Locked { .. }) && !e.is_damage(), "{e}");
            for words in ["tier t: gen/1: ", &old, "[encryption]"] {
                assert!(e.to_string().contains(words), "{e}");
            }
        }
    }
}
