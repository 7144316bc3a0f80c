//! A tier in a directory: tmpfs, a local disk, a parallel file system.
//!
//! ```text
//! ROOT/packs/.tmp-NAME ── write, fsync ── rename ──> ROOT/packs/NAME ── sync: fsync of ROOT/packs
//! ```
//! Outside of memory, what is written is gathered: each write begins and ends at a multiple of [`LARGE`], but for the
//! last one, so that it meets whole stripes of a parallel file system, and goes past the page cache where that is
//! possible ([`direct`]).
//!
//! The directory is the caller's own and closed to others: a restart executes what lies here.

use super::gather::Gather;
use super::{failed, is_key, Object, Put, ReadOnly, Tier};
use crate::{StorageError, PAGE};
use belay_kernel::direct::{self, Buffer};
use belay_kernel::room::{self, Gauges};
use belay_kernel::trust;
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const TEMPORARY: &str = ".tmp-";
/// Bytes of a write.
const LARGE: usize = 16 << 20;
/// What is gathered for one object takes at most this share of the memory that is free: one in so many.
const SHARE: u64 = 64;

/// A tier in a directory.
#[derive(Debug)]
pub struct Directory {
    name: String,
    root: PathBuf,
    /// Directories with names that are not durable yet.
    unsynced: Mutex<BTreeSet<PathBuf>>,
}

/// Makes `path` with mode 0700, or accepts one that belongs to the caller and that nobody else can write.
pub fn own_directory(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => check_own(path),
        other => other,
    }
}

/// Refuses `path` where it is no directory of the caller's that nobody else can write.
fn check_own(path: &Path) -> io::Result<()> {
    let m = std::fs::symlink_metadata(path)?;
    let me = rustix::process::geteuid().as_raw();
    let refuse = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if !m.is_dir() {
        return refuse("it is not a directory".into());
    }
    if m.uid() != me {
        return refuse(format!("it belongs to user {}, not to {me}", m.uid()));
    }
    if m.mode() & 0o022 != 0 {
        return refuse(format!(
            "it has mode {:03o}, so others could change what it holds",
            m.mode() & 0o777
        ));
    }
    Ok(())
}

/// The bytes of each write to files in `dir`: [`LARGE`], or a half or a quarter of it where memory is short. `None`
/// where they shall be written as they come: memory is very short, or they lie in memory themselves.
fn write_bytes(dir: &Path) -> Option<usize> {
    if room::in_memory(dir) {
        return None;
    }
    // Without control groups the node's memory counts.
    let gauges = Gauges::of([std::process::id().cast_signed()]).unwrap_or_default();
    let share = gauges.free()?.bytes / SHARE;
    [LARGE, LARGE / 2, LARGE / 4].into_iter().find(|bytes| *bytes as u64 <= share)
}

/// Bytes that an ordinary user may still write to the file system of `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let fs = rustix::fs::statvfs(path)?;
    Ok(fs.f_bavail.saturating_mul(fs.f_frsize))
}

impl Directory {
    /// The tier `name` in directory `root`, which is made where its parent is there.
    pub fn open(name: &str, root: &Path) -> Result<Self, StorageError> {
        let at = root.display().to_string();
        let trusted = root
            .parent()
            .map_or(Ok(()), |above| trust::holder(above).map(drop))
            .map_err(io::Error::from);
        let made = trusted.and_then(|()| own_directory(root));
        made.map_err(|e| failed(name, "open", &at, e))?;
        // An agent that was killed has synced none of the names that it made.
        let mut unsynced = BTreeSet::from([root.to_owned(), root.join("packs"), root.join("gen")]);
        unsynced.extend(root.parent().map(Path::to_owned));
        Ok(Self {
            name: name.to_owned(),
            root: root.to_owned(),
            unsynced: Mutex::new(unsynced),
        })
    }

    /// The same, to be looked at only: one that is not there holds nothing, and is not made.
    pub fn find(name: &str, root: &Path) -> Result<ReadOnly, StorageError> {
        match check_own(root) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(name, "open", &root.display().to_string(), e)),
            _ => {}
        }
        Ok(ReadOnly(Box::new(Self {
            name: name.to_owned(),
            root: root.to_owned(),
            unsynced: Mutex::default(),
        })))
    }

    fn path(&self, step: &'static str, key: &str) -> Result<PathBuf, StorageError> {
        if !is_key(key) {
            return Err(failed(&self.name, step, key, io::ErrorKind::InvalidInput.into()));
        }
        Ok(self.root.join(key))
    }

    fn touch(&self, dir: &Path) {
        let mut unsynced = self.unsynced.lock().unwrap_or_else(PoisonError::into_inner);
        unsynced.insert(dir.to_owned());
    }

    /// Makes the directories above `path`, below the root.
    fn make_parents(&self, path: &Path) -> io::Result<()> {
        let Some(parent) = path.parent().filter(|p| *p != self.root && p.starts_with(&self.root)) else {
            return Ok(());
        };
        if !parent.is_dir() {
            self.make_parents(parent)?;
            own_directory(parent)?;
            self.touch(parent.parent().unwrap_or(parent));
        }
        Ok(())
    }

    /// Every file below `dir`, by path; a directory that is not there holds none.
    fn walk(&self, dir: &Path, out: &mut Vec<(PathBuf, u64)>) -> io::Result<()> {
        let entries = match std::fs::read_dir(dir) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(()),
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            match entry.metadata() {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
                Ok(m) if m.is_dir() => self.walk(&entry.path(), out)?,
                Ok(m) => out.push((entry.path(), m.len())),
            }
        }
        Ok(())
    }

    fn files(&self, prefix: &str) -> Result<Vec<(PathBuf, u64)>, StorageError> {
        let mut out = Vec::new();
        let dir = self.root.join(prefix);
        self.walk(&dir, &mut out).map_err(|e| failed(&self.name, "list", prefix, e))?;
        out.sort();
        Ok(out)
    }
}

fn is_temporary(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|n| n.as_bytes().starts_with(TEMPORARY.as_bytes()))
}

impl Tier for Directory {
    fn name(&self) -> &str {
        &self.name
    }

    fn put<'a>(&'a self, key: &str) -> Result<Box<dyn Put + 'a>, StorageError> {
        let path = self.path("write", key)?;
        let fail = |e| failed(&self.name, "create", key, e);
        self.make_parents(&path).map_err(fail)?;
        let base = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!("{TEMPORARY}{base}"));
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&temporary)
            .map_err(fail)?;
        Ok(Box::new(Writing {
            tier: self,
            key: key.to_owned(),
            path,
            temporary,
            file,
            at: 0,
            gather: write_bytes(&self.root).map(Gather::new),
            finished: false,
        }))
    }

    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        let fail = |e| failed(&self.name, "read", key, e);
        let mut options = OpenOptions::new();
        let options = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = options.open(self.path("read", key)?).map_err(fail)?;
        let m = file.metadata().map_err(fail)?;
        if !m.is_file() {
            return Err(fail(io::Error::other("not a regular file")));
        }
        let bytes = m.len();
        if range.end > bytes || range.start > range.end {
            return Err(fail(io::ErrorKind::UnexpectedEof.into()));
        }
        // From where a page begins, so that it can be read past the page cache.
        let from = range.start / PAGE * PAGE;
        let end = range.end.next_multiple_of(PAGE).min(bytes);
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| fail(io::ErrorKind::OutOfMemory.into()));
        let (skip, wanted) = (size(range.start - from)?, size(range.end - range.start)?);
        buf.resize(size(end - from)?);
        direct::read_exact_at(&file, buf, from).map_err(fail)?;
        buf.copy_within(skip..skip + wanted, 0);
        buf.resize(wanted);
        Ok(())
    }

    fn length(&self, key: &str) -> Result<Option<u64>, StorageError> {
        match std::fs::symlink_metadata(self.path("stat", key)?) {
            Ok(m) => Ok(m.is_file().then_some(m.len())),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            Err(e) => Err(failed(&self.name, "stat", key, e)),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError> {
        let key = |p: &Path| Some(p.strip_prefix(&self.root).ok()?.to_str()?.to_owned());
        let objects = self.files(prefix)?.into_iter().filter(|(p, _)| !is_temporary(p));
        Ok(objects
            .filter_map(|(p, bytes)| Some(Object { key: key(&p)?, bytes }))
            .filter(|o| is_key(&o.key))
            .collect())
    }

    fn delete(&self, key: &str) -> Result<(), StorageError> {
        let path = self.path("remove", key)?;
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&self.name, "remove", key, e)),
            _ => {}
        }
        self.touch(path.parent().unwrap_or(&self.root));
        Ok(())
    }

    fn sync(&self) -> Result<(), StorageError> {
        let dirs = std::mem::take(&mut *self.unsynced.lock().unwrap_or_else(PoisonError::into_inner));
        for dir in &dirs {
            let opened = match File::open(dir) {
                // Not there yet, or a directory of the site that may be entered but not read.
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => continue,
                other => other,
            };
            if let Err(e) = opened.and_then(|d| d.sync_all()) {
                // All of them once more, the next time.
                dirs.iter().for_each(|d| self.touch(d));
                return Err(failed(&self.name, "sync", &dir.display().to_string(), e));
            }
        }
        Ok(())
    }

    fn free(&self) -> Result<Option<u64>, StorageError> {
        let free = free_bytes(&self.root);
        free.map(Some)
            .map_err(|e| failed(&self.name, "measure", &self.root.display().to_string(), e))
    }

    fn clear(&self) -> Result<u64, StorageError> {
        let mut removed = 0;
        for (path, _) in self.files("")?.into_iter().filter(|(p, _)| is_temporary(p)) {
            std::fs::remove_file(&path).map_err(|e| failed(&self.name, "remove", &path.display().to_string(), e))?;
            removed += 1;
        }
        Ok(removed)
    }
}

/// A file under its temporary name.
struct Writing<'a> {
    tier: &'a Directory,
    key: String,
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    /// Bytes in the file.
    at: u64,
    gather: Option<Gather>,
    finished: bool,
}

impl Put for Writing<'_> {
    fn write(&mut self, data: &[u8]) -> Result<(), StorageError> {
        let (tier, key) = (&self.tier.name, &self.key);
        let fail = |e| failed(tier, "write", key, e);
        let mut append = |data: &[u8]| {
            direct::write_all_at(&self.file, data, self.at)?;
            self.at += data.len() as u64;
            Ok(())
        };
        match &mut self.gather {
            Some(gather) => gather.add(data, |piece| append(piece)).map_err(fail),
            None => append(data).map_err(fail),
        }
    }

    fn finish(mut self: Box<Self>) -> Result<(), StorageError> {
        let (tier, key) = (&self.tier.name, &self.key);
        let rest = self.gather.as_mut().map(Gather::rest).unwrap_or_default();
        direct::write_all_at(&self.file, &rest, self.at).map_err(|e| failed(tier, "write", key, e))?;
        self.file.sync_all().map_err(|e| failed(tier, "sync", key, e))?;
        // What is compared afterwards must come from the device, and the application's own files are worth more in memory.
        // Advice that is not followed costs nothing but memory.
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        std::fs::rename(&self.temporary, &self.path).map_err(|e| failed(tier, "rename", key, e))?;
        self.finished = true;
        self.tier.touch(self.path.parent().unwrap_or(&self.tier.root));
        Ok(())
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if !self.finished {
            if let Err(e) = std::fs::remove_file(&self.temporary) {
                tracing::warn!(path = %self.temporary.display(), error = %e, "unfinished object could not be removed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::conformance;

    fn scratch(label: &str, base: &Path) -> PathBuf {
        base.join(format!("belay-tier-{label}-{}", std::process::id()))
    }

    fn conforms(label: &str, base: &Path) {
        let root = scratch(label, base);
        conformance::run(&|| Box::new(Directory::open("test", &root).unwrap()));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_local_directory_conforms() {
        conforms("disk", &std::env::temp_dir());
    }

    #[test]
    fn a_directory_in_memory_conforms() {
        let shm = Path::new("/dev/shm");
        assert!(shm.is_dir(), "this test needs a tmpfs in /dev/shm");
        conforms("memory", shm);
    }

    #[test]
    fn outside_of_memory_writes_are_large() {
        let root = scratch("large", &std::env::temp_dir());
        let tier = Directory::open("test", &root).unwrap();
        let large = write_bytes(&root).expect("this test needs a directory on a disk, and 256 MiB of free memory");
        let data: Vec<u8> = (0..large / 4 + 5).map(|i| (i / 3) as u8).collect();
        let mut put = tier.put("packs/a").unwrap();
        for n in 1..=9 {
            put.write(&data).unwrap();
            let written = std::fs::metadata(root.join("packs/.tmp-a")).unwrap().len() as usize;
            assert_eq!(written, n * data.len() / large * large, "after {n} pieces");
        }
        put.finish().unwrap();
        assert_eq!(super::super::read_whole(&tier, "packs/a", u64::MAX).unwrap(), data.repeat(9));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_shared_directory_that_others_may_enter_holds_a_closed_one() {
        use std::os::unix::fs::PermissionsExt;
        let site = scratch("site", &std::env::temp_dir());
        std::fs::create_dir(&site).unwrap();
        std::fs::set_permissions(&site, std::fs::Permissions::from_mode(0o1777)).unwrap();
        conforms("job", &site);
        let open = site.join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        let refused = Directory::open("test", &open).unwrap_err().to_string();
        assert!(refused.contains("mode 777"), "{refused}");
        let missing = Directory::open("test", &site.join("no/such")).unwrap_err().to_string();
        assert!(missing.contains("tier test") && missing.contains("no/such"), "{missing}");
        std::fs::remove_dir_all(&site).unwrap();
    }
}
