//! The last tier: the directory of a history, with a file for each version.
//!
//! ```text
//! DIR/NAME/lock                              held by the process that has the history open
//! DIR/NAME/VERSION-SERIAL.version            numbers in hexadecimal digits
//! DIR/NAME/VERSION-SERIAL.gone               empty: that is no version any more, but a checkpoint by belay needs it (`keep`)
//! DIR/NAME/belay.generations/                notes of such checkpoints
//! DIR/NAME/until-read                        empty: the versions are those of a history that lives until it is read
//! DIR/NAME/VERSION-SERIAL.new                the same while it is written, where files without names are not to be had; means nothing
//! ```
//! A version number can be put again after it has been dropped; the serial number, the time of the put, tells the files
//! apart, after a restart too. A file gets its name when all of it is written. The directory belongs to one user, and
//! nobody else may reach it.

use crate::dir::Dir;
use crate::keep::Keep;
use crate::key::Key;
use crate::lock::Lock;
use crate::record::{Record, BLOCK, FIXED};
use crate::shape::Shape;
use crate::span::{reading, writing};
use crate::{HistoryError, Life};
use belay_abi::histories::LOCK;
use rustix::fs::OFlags;
use rustix::process::{getrlimit, Resource};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use xxhash_rust::xxh3::Xxh3;

/// Why a copy has not come to its end.
#[derive(Debug)]
pub(crate) enum CopyError {
    /// Nobody needs it any more.
    Stopped,
    /// The bytes are not those that were written.
    Damaged,
    /// The system's word.
    Io(io::Error),
}

impl CopyError {
    /// The disk, or what the user may have of it, is full.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, CopyError::Io(e) if matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)))
    }
}

impl From<io::Error> for CopyError {
    fn from(e: io::Error) -> Self {
        CopyError::Io(e)
    }
}

/// The process has no room for one more file or for memory: that says nothing of the file.
fn is_of_process(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// What a file lacks that it had when it was written is damage.
fn lacks(e: io::Error) -> CopyError {
    match e.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof => CopyError::Damaged,
        _ => CopyError::Io(e),
    }
}

/// A file that was there at the beginning.
pub(crate) struct Found {
    pub(crate) key: Key,
    pub(crate) shape: Result<Shape, Lack>,
}

/// Why nothing is known of a version but its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lack {
    /// Its end is damaged.
    Damaged,
    /// It could not be read, and may be whole another time.
    Unread,
}

/// A file that is being written.
enum Draft {
    Nameless(File),
    Named(File, String),
}

impl Draft {
    fn file(&self) -> &File {
        match self {
            Draft::Nameless(file) | Draft::Named(file, _) => file,
        }
    }

    /// NFS may say only now what it could not write, and who closes a file is not told. It knows no files without names.
    fn accepted(&self) -> io::Result<()> {
        match self {
            Draft::Nameless(_) => Ok(()),
            Draft::Named(file, _) => file.sync_data(),
        }
    }
}

/// See the module.
pub(crate) struct Files {
    /// Before `dir`, whose descriptor it names.
    _lock: Lock,
    dir: Dir,
    keep: Keep,
    /// The file system knows files without names, as far as is known.
    nameless: AtomicBool,
    /// Written and not synced.
    unsynced: Mutex<BTreeSet<Key>>,
    /// Those written that could not be synced. The kernel says so once, and takes what it could not write for written:
    /// they are written anew.
    lost: Mutex<BTreeSet<Key>>,
    /// How a file is synced.
    sync: fn(&File) -> io::Result<()>,
}

impl Files {
    /// Opens or makes the directory of a history: with it comes what lies there, sorted.
    pub(crate) fn open(dir: &Path, name: &str, life: Life) -> Result<(Self, Vec<Found>), HistoryError> {
        let context = |what: &str| format!("{what} {}", dir.join(name).display());
        let parent = File::open(dir).map_err(HistoryError::io(format!("open {}", dir.display())))?;
        let own = Dir::open_or_make(&parent, name).map_err(HistoryError::io(context("open")))?;
        if !own.is_private().map_err(HistoryError::io(context("look at")))? {
            return Err(HistoryError::NotPrivate(name.into()));
        }
        let lock = own
            .open(LOCK, OFlags::RDWR | OFlags::CREATE)
            .map_err(HistoryError::io(context("open the lock of")))?;
        let lock = Lock::take(lock, &own).map_err(|e| match e.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => HistoryError::InUse(name.into()),
            _ => HistoryError::io(context("lock"))(e),
        })?;
        let (keep, keys) = Keep::open(&own, life).map_err(HistoryError::io(context("read")))?;
        let keys = keys.ok_or_else(|| HistoryError::OtherLife {
            name: name.into(),
            dir: dir.join(name).display().to_string(),
            until_read: life == Life::Lasting,
        })?;
        let files = Self {
            _lock: lock,
            dir: own,
            keep,
            nameless: AtomicBool::new(true),
            unsynced: Mutex::default(),
            lost: Mutex::default(),
            sync: File::sync_data,
        };
        let found = files.look(keys).map_err(HistoryError::io(context("read")))?;
        // Who has written them may have ended before they were synced.
        let whole = found.iter().filter(|f| f.shape.is_ok()).map(|f| f.key);
        files.unsynced.lock().unwrap_or_else(PoisonError::into_inner).extend(whole);
        Ok((files, found))
    }

    /// The versions; of files with one version number all but the last go.
    fn look(&self, keys: BTreeSet<Key>) -> io::Result<Vec<Found>> {
        let mut found: Vec<Found> = Vec::new();
        for key in keys {
            if let Some(older) = found.pop_if(|f| f.key.version == key.version) {
                self.remove(older.key)?;
            }
            let record = match self.dir.regular(&key.name()).and_then(|file| self.record(&file)) {
                Err(e) if is_of_process(&e) => return Err(e),
                // One file that cannot be read is no matter for the others.
                Err(e) if e.raw_os_error().is_some_and(|e| e != libc::ENOENT) => Err(Lack::Unread),
                record => Ok(record.unwrap_or_default()),
            };
            let whole = |r: Option<Record>| r.filter(|r| r.version == key.version).map(|r| r.shape);
            let shape = record.and_then(|r| whole(r).ok_or(Lack::Damaged));
            found.push(Found { key, shape });
        }
        Ok(found)
    }

    /// The end of a file; nothing if it is damaged.
    fn record(&self, file: &File) -> io::Result<Option<Record>> {
        let len = file.metadata()?.len();
        let mut fixed = [0; FIXED];
        let Some(at) = len.checked_sub(FIXED as u64) else {
            return Ok(None);
        };
        file.read_exact_at(&mut fixed, at)?;
        let Some(end) = Record::length(&fixed, len) else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(end).is_err() {
            // Of a file with holes: what it says of its length is not that of any version.
            return Ok(None);
        }
        bytes.resize(end, 0);
        file.read_exact_at(&mut bytes, len - end as u64)?;
        Ok(Record::decode(&bytes))
    }

    /// Writes a version. Nothing is left of it if that does not come to its end.
    pub(crate) fn write(&self, key: Key, shape: &Shape, from: &[&[u8]], stop: &AtomicBool) -> Result<(), CopyError> {
        let draft = self.draft(key, Record::file_of(shape))?;
        let written = self.fill(draft.file(), key, shape, from, stop);
        let written = written.and_then(|()| Ok(draft.accepted()?));
        let named = written.and_then(|()| Ok(self.keep.enter(&self.dir, key, || self.name(&draft, key))?));
        if let (Err(_), Draft::Named(_, name)) = (&named, &draft) {
            // The next opening removes it otherwise.
            let _ = self.dir.unlink(name);
        }
        named?;
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        Ok(())
    }

    /// A file without a name for `bytes`: nothing is left of it however this ends, and a checkpoint by belay has its
    /// contents. Where the file system knows no such files, one with a name of its own.
    fn draft(&self, key: Key, bytes: u64) -> io::Result<Draft> {
        // The write would end the program by a signal.
        if getrlimit(Resource::Fsize).current.is_some_and(|most| bytes > most) {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        if self.nameless.load(Ordering::Relaxed) {
            match self.dir.open(".", OFlags::WRONLY | OFlags::TMPFILE) {
                Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) => {
                    self.nameless.store(false, Ordering::Relaxed);
                }
                other => return other.map(Draft::Nameless),
            }
        }
        // After a restart by belay there may be one already.
        let name = key.draft();
        let file = self.dir.open(&name, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        Ok(Draft::Named(file, name))
    }

    /// The draft is whole, and gets its name, from whatever has it; whether nothing had.
    fn name(&self, draft: &Draft, key: Key) -> io::Result<bool> {
        let name = key.name();
        match draft {
            Draft::Named(_, old) => {
                let is_new = !self.dir.has(&name)?;
                self.dir.rename(old, &name)?;
                Ok(is_new)
            }
            Draft::Nameless(file) => {
                let is_new = self.dir.link(file, &name)?;
                if !is_new {
                    // The same version, written by what the process did before it was restarted: there is one at any moment.
                    let draft = key.draft();
                    self.dir.unlink(&draft)?;
                    self.dir.link(file, &draft)?;
                    self.dir.rename(&draft, &name)?;
                }
                Ok(is_new)
            }
        }
    }

    fn fill(&self, file: &File, key: Key, shape: &Shape, from: &[&[u8]], stop: &AtomicBool) -> Result<(), CopyError> {
        let (mut cursor, mut left, mut at, mut sums) = (reading(from), shape.bytes(), 0, Vec::new());
        while left > 0 {
            if stop.load(Ordering::Relaxed) {
                return Err(CopyError::Stopped);
            }
            let block = cursor.block(left.min(u64::from(BLOCK)) as usize);
            let mut sum = Xxh3::new();
            for bytes in block {
                sum.update(bytes);
                file.write_all_at(bytes, at)?;
                at += bytes.len() as u64;
                left -= bytes.len() as u64;
            }
            sums.push(sum.digest());
        }
        let record = Record {
            version: key.version,
            shape: shape.clone(),
            block: BLOCK,
            sums,
        };
        file.write_all_at(&record.encode(), at)?;
        Ok(())
    }

    /// Reads a version, and compares every checksum.
    pub(crate) fn read(&self, key: Key, shape: &Shape, to: &mut [&mut [u8]], stop: &AtomicBool) -> Result<(), CopyError> {
        // What cannot be done about other files now, as on a full disk, is no matter for this one.
        let _ = self.settle();
        let file = self.dir.regular(&key.name()).map_err(lacks)?;
        let record = self
            .record(&file)
            .map_err(lacks)?
            .filter(|r| r.version == key.version && r.shape == *shape);
        let record = record.ok_or(CopyError::Damaged)?;
        let (mut cursor, mut left, mut at) = (writing(to), shape.bytes(), 0);
        for expected in record.sums {
            if stop.load(Ordering::Relaxed) {
                return Err(CopyError::Stopped);
            }
            let mut sum = Xxh3::new();
            for bytes in cursor.block(left.min(u64::from(record.block)) as usize) {
                file.read_exact_at(bytes, at).map_err(lacks)?;
                sum.update(bytes);
                at += bytes.len() as u64;
                left -= bytes.len() as u64;
            }
            if sum.digest() != expected {
                return Err(CopyError::Damaged);
            }
        }
        Ok(())
    }

    /// A version that nobody needs any more; it may not have been written.
    pub(crate) fn remove(&self, key: Key) -> io::Result<()> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        self.keep.remove(&self.dir, key)
    }

    /// No version is left, so the directory is for those of any life.
    pub(crate) fn end_life(&self) -> io::Result<()> {
        self.keep.unmark(&self.dir)
    }

    /// After a restart by belay: the files are those of then.
    pub(crate) fn settle(&self) -> io::Result<()> {
        self.keep.settle(&self.dir)
    }

    /// All that has been written is on the disk. Each version is tried; an error is that of the first that is not.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.settle()?;
        let unsynced = || self.unsynced.lock().unwrap_or_else(PoisonError::into_inner);
        // What is written meanwhile, and its name, are the next call's.
        let keys = unsynced().clone();
        let mut end = Ok(());
        for key in keys {
            match self.sync_one(key) {
                Ok(()) => _ = unsynced().remove(&key),
                // Removed meanwhile.
                Err(_) if !unsynced().contains(&key) => {}
                Err(e) => end = end.and(Err(e)),
            }
        }
        let is_renamed = &self.keep.is_renamed;
        is_renamed.store(false, Ordering::Relaxed);
        let names = self.dir.sync().inspect_err(|_| is_renamed.store(true, Ordering::Relaxed));
        end.and(names)
    }

    fn sync_one(&self, key: Key) -> io::Result<()> {
        let file = self.dir.regular(&key.name()).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => io::Error::other(format!(
                "somebody has removed the file of version {}: drop it, and put it again where it is still needed",
                key.version
            )),
            _ => e,
        })?;
        let lost = || self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost().contains(&key) {
            self.write_anew(key, &file)?;
            lost().remove(&key);
            return Ok(());
        }
        (self.sync)(&file).inspect_err(|_| {
            lost().insert(key);
        })
    }

    /// Puts another file with the contents of `file`, synced, in its place. What cannot be read whole is left as it is.
    fn write_anew(&self, key: Key, file: &File) -> io::Result<()> {
        let damaged = || io::Error::other(format!("version {} could not be written, and is damaged", key.version));
        let record = self.record(file)?.filter(|r| r.version == key.version).ok_or_else(damaged)?;
        let draft = self.draft(key, file.metadata()?.len())?;
        let copied = || {
            let (mut at, mut left) = (0, record.shape.bytes());
            for expected in &record.sums {
                let mut block = vec![0; left.min(u64::from(record.block)) as usize];
                file.read_exact_at(&mut block, at)?;
                if xxhash_rust::xxh3::xxh3_64(&block) != *expected {
                    return Err(damaged());
                }
                draft.file().write_all_at(&block, at)?;
                at += block.len() as u64;
                left -= block.len() as u64;
            }
            draft.file().write_all_at(&record.encode(), at)?;
            (self.sync)(draft.file())?;
            // Who removes it takes it from the list first: what is removed does not come back.
            let unsynced = self.unsynced.lock().unwrap_or_else(PoisonError::into_inner);
            if unsynced.contains(&key) {
                self.keep.enter(&self.dir, key, || self.name(&draft, key))?;
            } else if let Draft::Named(_, name) = &draft {
                self.dir.unlink(name)?;
            }
            Ok(())
        };
        copied().inspect_err(|_| {
            if let Draft::Named(_, name) = &draft {
                // The next opening removes it otherwise.
                let _ = self.dir.unlink(name);
            }
        })
    }

    /// Nothing has been written since all was synced.
    pub(crate) fn is_synced(&self) -> bool {
        !self.keep.is_renamed.load(Ordering::Relaxed) && self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

#[cfg(test)]
impl Files {
    /// See [`Keep::restarted`].
    pub(crate) fn restarted(&self) {
        self.keep.restarted();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_and_without_files_that_have_no_name_a_version_is_whole_or_not_there() {
        let dir = std::env::temp_dir().join(format!("belay-recall-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (files, _) = Files::open(&dir, "f", Life::Lasting).unwrap();
        let (bytes, mut read) = (vec![5; 3_000_000], vec![0; 3_000_000]);
        let shape = Shape::new([(1, 3_000_000)]).unwrap();
        let names = || std::fs::read_dir(dir.join("f")).unwrap().count() - 2;
        let key = Key { version: 1, serial: 2 };
        for nameless in [true, false] {
            files.nameless.store(nameless, Ordering::Relaxed);
            let write = |stop| files.write(key, &shape, &[&bytes], &AtomicBool::new(stop));
            assert!(matches!(write(true), Err(CopyError::Stopped)));
            assert_eq!(names(), 0);
            write(false).unwrap();
            // After a restart by belay, over what has its name.
            write(false).unwrap();
            assert_eq!(names(), 1);
            files.read(key, &shape, &mut [&mut read], &AtomicBool::new(false)).unwrap();
            assert!(read == bytes);
            files.sync().unwrap();
            files.remove(key).unwrap();
        }
        drop(files);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_could_not_be_synced_is_written_anew() {
        /// Fails now, as often as this.
        static FAILS: std::sync::Mutex<u32> = std::sync::Mutex::new(0);
        fn sync(file: &File) -> io::Result<()> {
            let mut fails = FAILS.lock().unwrap();
            if *fails > 0 {
                *fails -= 1;
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            file.sync_data()
        }
        let dir = std::env::temp_dir().join(format!("belay-recall-anew-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (mut files, _) = Files::open(&dir, "f", Life::Lasting).unwrap();
        files.sync = sync;
        let (bytes, mut read) = (vec![7; 2_500_000], vec![0; 2_500_000]);
        let shape = Shape::new([(1, 2_500_000)]).unwrap();
        let key = Key { version: 1, serial: 2 };
        let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(dir.join("f").join(key.name())).unwrap());
        for nameless in [true, false] {
            files.nameless.store(nameless, Ordering::Relaxed);
            files.write(key, &shape, &[&bytes], &AtomicBool::new(false)).unwrap();
            let first = inode();
            // Neither the file nor the first of those that take its place can be synced.
            *FAILS.lock().unwrap() = 2;
            assert!(files.sync().is_err() && files.sync().is_err());
            assert_eq!((inode(), files.is_synced()), (first, false));
            files.sync().unwrap();
            assert!(inode() != first && files.is_synced());
            files.read(key, &shape, &mut [&mut read], &AtomicBool::new(false)).unwrap();
            assert!(read == bytes);
            assert_eq!(std::fs::read_dir(dir.join("f")).unwrap().count(), 3);
            files.remove(key).unwrap();
        }
        drop(files);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_an_earlier_life_has_written_is_synced_too() {
        let dir = std::env::temp_dir().join(format!("belay-recall-earlier-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let key = Key { version: 1, serial: 2 };
        let unsynced = |files: &Files| files.unsynced.lock().unwrap().clone();
        let (files, _) = Files::open(&dir, "f", Life::Lasting).unwrap();
        let shape = Shape::new([(1, 3)]).unwrap();
        files.write(key, &shape, &[&[1, 2, 3]], &AtomicBool::new(false)).unwrap();
        drop(files);
        let (files, found) = Files::open(&dir, "f", Life::Lasting).unwrap();
        assert_eq!((found.len(), unsynced(&files)), (1, BTreeSet::from([key])));
        files.sync().unwrap();
        assert_eq!(unsynced(&files), BTreeSet::new());
        drop(files);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn each_version_is_synced_whatever_becomes_of_the_others() {
        /// Not the first of all.
        static FIRST: AtomicBool = AtomicBool::new(true);
        fn sync(file: &File) -> io::Result<()> {
            match FIRST.swap(false, Ordering::Relaxed) {
                true => Err(io::Error::from_raw_os_error(libc::EIO)),
                false => file.sync_data(),
            }
        }
        let dir = std::env::temp_dir().join(format!("belay-recall-each-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (mut files, _) = Files::open(&dir, "f", Life::Lasting).unwrap();
        files.sync = sync;
        let keys = [1, 2, 3].map(|version| Key { version, serial: 2 });
        let shape = Shape::new([(1, 3)]).unwrap();
        for key in keys {
            files.write(key, &shape, &[&[1, 2, 3]], &AtomicBool::new(false)).unwrap();
        }
        assert!(files.sync().is_err());
        assert_eq!(*files.unsynced.lock().unwrap(), BTreeSet::from([keys[0]]));
        files.sync().unwrap();
        drop(files);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn what_is_whole_is_read_also_where_the_directory_cannot_be_made_to_agree() {
        let dir = std::env::temp_dir().join(format!("belay-recall-agree-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (files, _) = Files::open(&dir, "f", Life::Lasting).unwrap();
        let key = Key { version: 1, serial: 2 };
        let (shape, mut read) = (Shape::new([(1, 3)]).unwrap(), [0; 3]);
        files.write(key, &shape, &[&[1, 2, 3]], &AtomicBool::new(false)).unwrap();
        let notes = dir.join("f").join(belay_abi::histories::NOTES);
        std::fs::remove_dir(&notes).unwrap();
        std::fs::write(&notes, "").unwrap();
        files.keep.restarted();
        assert!(files.settle().is_err());
        files.read(key, &shape, &mut [&mut read], &AtomicBool::new(false)).unwrap();
        assert_eq!(read, [1, 2, 3]);
        drop(files);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
