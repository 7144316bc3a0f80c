//! Looks for a name of a file where the kernel tells only which inode it is: near what the job has, in its working
//! directories, open files and mapped files, the directories above those, and what lies directly in them; then in
//! everything below them on the same file system.

use crate::session::Session;
use crate::sys::fd;
use belay_kernel::mounts;
use std::collections::{BTreeSet, HashSet, VecDeque};
use std::fs::DirEntry;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

/// How many entries of directories are looked at below what the job has, at most: that takes a fraction of a second, in
/// which the job stands still.
const ENTRIES: usize = 200_000;
/// Of one directory near what the job has.
const NEAR: usize = 100_000;

/// Where names are looked for.
pub(crate) struct Seeker {
    known: BTreeSet<PathBuf>,
    /// So many entries may still be looked at.
    entries: usize,
}

impl Seeker {
    /// Near what the job has, and `pid` has mapped.
    pub(crate) fn new(s: &Session<'_>, pid: i32) -> Self {
        Self {
            known: likely(s, pid),
            entries: ENTRIES,
        }
    }

    /// A name of inode `ino` of the file system `dev`.
    pub(crate) fn find(&mut self, dev: u64, ino: u64) -> Option<PathBuf> {
        let is_it = |p: &Path| fd::stat(p, false).is_ok_and(|st| (st.st_dev, st.st_ino) == (dev, ino));
        let direct = self.known.iter().find(|p| is_it(p)).cloned();
        let near = direct.or_else(|| self.known.iter().find_map(|d| within(d, ino, &is_it)));
        near.or_else(|| below(&self.known, (dev, ino), &mut self.entries, &is_it))
    }
}

/// What the job has, and the directories above it.
fn likely(s: &Session<'_>, pid: i32) -> BTreeSet<PathBuf> {
    let mut out = BTreeSet::new();
    let mut add = |p: &Path| out.extend(p.ancestors().map(Path::to_owned));
    for p in s.processes {
        for name in ["cwd", "exe", "root"] {
            if let Ok(p) = fd::readlink(Path::new(&format!("/proc/{}/{name}", p.task))) {
                add(&p);
            }
        }
    }
    for f in &s.found {
        if f.link.is_absolute() {
            add(&f.link);
        }
    }
    for m in belay_kernel::proc::maps(s.task_of(pid)).unwrap_or_default() {
        if Path::new(&m.name).is_absolute() {
            add(Path::new(&m.name));
        }
    }
    for p in ["/tmp", "/etc", "/var/tmp", "/run", "/dev", "/dev/shm", "/dev/pts", "/proc"] {
        add(Path::new(p));
    }
    out
}

/// A file directly in `dir`.
fn within(dir: &Path, ino: u64, is_it: &impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?.take(NEAR).flatten();
    entries.filter(|e| e.ino() == ino).map(|e| e.path()).find(|p| is_it(p))
}

/// A file anywhere below the directories of the same file system that are known, or below its root, breadth first; at
/// most so many `entries` are looked at.
fn below(
    known: &BTreeSet<PathBuf>,
    (dev, ino): (u64, u64),
    entries: &mut usize,
    is_it: &impl Fn(&Path) -> bool,
) -> Option<PathBuf> {
    let mut from: Vec<PathBuf> = known.iter().cloned().collect();
    from.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    let mounts = mounts::all().unwrap_or_default().into_iter();
    from.extend(mounts.filter(|m| m.device == dev).map(|m| m.place));
    let enters = |_: &Path, st: &fd::Stat| st.st_dev == dev;
    walk(from, entries, &enters, &|entry| entry.ino() == ino && is_it(&entry.path()))
}

/// The first entry that `is_it` of the directories `from` and those below them, breadth first: of those that `enters`,
/// each once, as long as so many `entries` have not been looked at.
pub(crate) fn walk(
    from: Vec<PathBuf>,
    entries: &mut usize,
    enters: &impl Fn(&Path, &fd::Stat) -> bool,
    is_it: &impl Fn(&DirEntry) -> bool,
) -> Option<PathBuf> {
    let mut next: VecDeque<PathBuf> = from.into();
    let mut seen = HashSet::new();
    while let Some(dir) = next.pop_front() {
        let Ok(st) = fd::stat(&dir, false) else { continue };
        let is_directory = st.st_mode & libc::S_IFMT == libc::S_IFDIR;
        if !is_directory || !enters(&dir, &st) || !seen.insert((st.st_dev, st.st_ino)) {
            continue;
        }
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            *entries = entries.checked_sub(1)?;
            if is_it(&entry) {
                return Some(entry.path());
            }
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                next.push_back(entry.path());
            }
        }
    }
    None
}
