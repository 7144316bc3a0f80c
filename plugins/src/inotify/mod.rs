//! inotify: watches with their descriptors' numbers.
//!
//! The kernel tells which inode a watch is on, not its name. The name is found through the file handle where that is allowed, else by looking
//! where programs watch: their working directories, open files and mapped files, the directories above those, and what lies directly in them.

use crate::builder::Builder;
use crate::fault::{refuse, At, Fault};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::{DescId, Description, FsPath};
use crate::session::Session;
use crate::sys::fdinfo::number;
use crate::sys::{check, fd};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// `INOTIFY_IOC_SETNEXTWD`.
const SET_NEXT_WD: libc::c_ulong = 0x4004_4900;

/// How many entries of directories are looked at for the names of one instance's watches, at most: that takes a fraction of a second, in which the job stands still.
const ENTRIES: usize = 200_000;

/// An inotify instance.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct InotifyState {
    watches: Vec<Watch>,
    /// Events were waiting to be read.
    events: bool,
}

/// One watch.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Watch {
    wd: i32,
    path: FsPath,
    mask: u32,
}

/// One `inotify` line.
struct Line {
    wd: i32,
    ino: u64,
    dev: u64,
    mask: u32,
    handle_type: i32,
    handle: Vec<u8>,
}

fn line(text: &str) -> io::Result<Line> {
    let hex = |key: &str| {
        let v = text.split_whitespace().find_map(|w| w.strip_prefix(key));
        number(
            v.ok_or_else(|| io::Error::other(format!("fdinfo: no {key} in {text:?}")))?,
            16,
        )
    };
    let handle = text.split("f_handle:").nth(1).unwrap_or_default().trim();
    let bytes = handle.as_bytes().chunks_exact(2).map(|p| {
        let p = std::str::from_utf8(p).map_err(io::Error::other)?;
        u8::from_str_radix(p, 16).map_err(io::Error::other)
    });
    // The kernel's own device number: 12 bits major, 20 bits minor.
    let sdev = hex("sdev:")?;
    Ok(Line {
        wd: i32::try_from(hex("wd:")?).map_err(io::Error::other)?,
        ino: hex("ino:")?,
        dev: libc::makedev((sdev >> 20) as u32, (sdev & 0xf_ffff) as u32),
        mask: u32::try_from(hex("mask:")?).map_err(io::Error::other)?,
        handle_type: i32::try_from(hex("fhandle-type:").unwrap_or(0)).unwrap_or(0),
        handle: bytes.collect::<io::Result<_>>()?,
    })
}

/// The kind.
pub(crate) struct Inotify;

impl Kind for Inotify {
    const NAME: &'static str = "Inotify";
    const VERSION: u32 = 1;
    type State = InotifyState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Anonymous(name) if *name == "inotify")
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<InotifyState, Fault> {
        let taken = s.take(seen.id)?;
        capture(s, seen.id, taken.raw())
    }

    fn rebuild(_: &mut Builder<'_>, d: &Description, state: &InotifyState) -> Result<Option<OwnedFd>, Fault> {
        make(d, state).map(Some)
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

fn capture(s: &mut Session<'_>, id: DescId, raw: RawFd) -> Result<InotifyState, Fault> {
    let found = &s.found[id];
    let lines = found
        .info
        .all("inotify ")
        .map(line)
        .collect::<io::Result<Vec<_>>>()
        .at("read fdinfo")?;
    let pid = found.holder.pid;
    let events = fd::readable_bytes(raw).at("ask for events")? > 0;
    if events {
        let text = format!(
            "process {pid}: fd {}: inotify events not yet read are replaced by IN_Q_OVERFLOW at a restart",
            found.holder.fd
        );
        s.notes.push(text);
    }
    let mut candidates: Option<BTreeSet<PathBuf>> = None;
    let mut entries = ENTRIES;
    let mut watches = Vec::new();
    for l in lines {
        let is_it = |p: &Path| fd::stat(p, false).is_ok_and(|st| st.st_ino == l.ino && st.st_dev == l.dev);
        let path = match by_handle(&l).filter(|p| is_it(p)) {
            Some(p) => p,
            None => {
                let known = candidates.get_or_insert_with(|| likely(s, pid));
                let direct = known.iter().find(|p| is_it(p)).cloned();
                let near = direct.or_else(|| known.iter().find_map(|d| within(d, &l, &is_it)));
                match near.or_else(|| below(known, &l, &mut entries, &is_it)) {
                    Some(p) => p,
                    None => {
                        return refuse(format!(
                            "watch {} is on inode {} whose name cannot be found without privilege; checkpoint as root, or watch a directory \
                             the program has open",
                            l.wd, l.ino
                        ))
                    }
                }
            }
        };
        watches.push(Watch {
            wd: l.wd,
            path: FsPath(path),
            mask: l.mask,
        });
    }
    watches.sort_by_key(|w| w.wd);
    Ok(InotifyState { watches, events })
}

/// The name through the file handle; needs CAP_DAC_READ_SEARCH.
fn by_handle(l: &Line) -> Option<PathBuf> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        data: [u8; 128],
    }
    let mut h = Handle {
        bytes: u32::try_from(l.handle.len()).ok()?,
        kind: l.handle_type,
        data: [0; 128],
    };
    h.data.get_mut(..l.handle.len())?.copy_from_slice(&l.handle);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let want = format!("{}:{}", libc::major(l.dev), libc::minor(l.dev));
    for m in mounts.lines() {
        let words: Vec<&str> = m.split(' ').collect();
        if words.get(2) != Some(&want.as_str()) {
            continue;
        }
        let Ok(mount) = fd::open(Path::new(words.get(4)?), libc::O_RDONLY | libc::O_DIRECTORY, 0) else {
            continue;
        };
        // SAFETY: `h` is a file handle with its stated length.
        let opened = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                mount.as_raw_fd(),
                &raw const h,
                libc::O_PATH | libc::O_CLOEXEC,
            )
        };
        if let Ok(raw) = check(i32::try_from(opened).unwrap_or(-1)) {
            // SAFETY: the kernel has just returned this number.
            let fd = unsafe { OwnedFd::from_raw_fd(raw) };
            return fd::readlink(&fd::self_path(fd.as_raw_fd())).ok();
        }
    }
    None
}

/// Where programs watch.
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
fn within(dir: &Path, l: &Line, is_it: &impl Fn(&Path) -> bool) -> Option<PathBuf> {
    use std::os::unix::fs::DirEntryExt;
    let entries = std::fs::read_dir(dir).ok()?.take(100_000).flatten();
    entries.filter(|e| e.ino() == l.ino).map(|e| e.path()).find(|p| is_it(p))
}

/// A file anywhere below the directories of the same file system where programs watch, or below its root, breadth first; at most so many `entries` are looked at.
fn below(known: &BTreeSet<PathBuf>, l: &Line, entries: &mut usize, is_it: &impl Fn(&Path) -> bool) -> Option<PathBuf> {
    use std::os::unix::fs::DirEntryExt;
    let mut from: Vec<PathBuf> = known.iter().cloned().collect();
    from.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let device = format!("{}:{}", libc::major(l.dev), libc::minor(l.dev));
    let roots = mounts.lines().map(|m| m.split(' ').collect::<Vec<_>>());
    from.extend(
        roots
            .filter(|m| m.get(2) == Some(&device.as_str()))
            .filter_map(|m| m.get(4).map(PathBuf::from)),
    );
    let mut next: VecDeque<PathBuf> = from.into();
    let mut seen = HashSet::new();
    while let Some(dir) = next.pop_front() {
        let there = fd::stat(&dir, false)
            .is_ok_and(|st| st.st_mode & libc::S_IFMT == libc::S_IFDIR && st.st_dev == l.dev && seen.insert(st.st_ino));
        let Ok(list) = std::fs::read_dir(&dir) else { continue };
        for entry in list.flatten().take_while(|_| there) {
            *entries = entries.checked_sub(1)?;
            let path = entry.path();
            if entry.ino() == l.ino && is_it(&path) {
                return Some(path);
            }
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                next.push_back(path);
            }
        }
    }
    None
}

/// Makes it again with the same watch numbers.
fn make(d: &Description, state: &InotifyState) -> Result<OwnedFd, Fault> {
    let flags = libc::IN_CLOEXEC | (d.flags & libc::O_NONBLOCK);
    // SAFETY: inotify_init1 takes a number.
    let raw = check(unsafe { libc::inotify_init1(flags) }).at("inotify_init")?;
    // SAFETY: the kernel has just returned this number.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    for w in &state.watches {
        watch(raw, w)?;
    }
    if state.events {
        overflow(raw).at("tell that events were lost")?;
    }
    Ok(fd)
}

/// Leaves exactly one event in the queue: IN_Q_OVERFLOW, by which inotify says that events were lost.
///
/// The queue is filled with events of files of our own (two in turn, because equal neighbours are merged) until the kernel reports an overflow; the
/// end of those watches then no longer fits either. Everything before the report is read.
fn overflow(raw: RawFd) -> io::Result<()> {
    const EVENT_BYTES: usize = 16;
    let text = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")?;
    let most: usize = text.trim().parse().map_err(io::Error::other)?;
    let mut files = Vec::new();
    for _ in 0..2 {
        let file = fd::memfd(Path::new("events"), 0)?;
        let path = fd::c_path(&fd::self_path(file.as_raw_fd()))?;
        // SAFETY: `path` is a valid C string.
        let wd = check(unsafe { libc::inotify_add_watch(raw, path.as_ptr(), libc::IN_ATTRIB) })?;
        files.push((file, wd));
    }
    let full = (most + 1) * EVENT_BYTES;
    for i in 0..=most {
        // SAFETY: fchmod takes numbers only.
        check(unsafe { libc::fchmod(files[i % 2].0.as_raw_fd(), 0o600) })?;
    }
    for (_, wd) in &files {
        // SAFETY: inotify_rm_watch takes numbers only.
        check(unsafe { libc::inotify_rm_watch(raw, *wd) })?;
    }
    let held = fd::readable_bytes(raw)?;
    if held != full {
        return Err(io::Error::other(format!(
            "its queue holds {held} bytes of events instead of {full}"
        )));
    }
    let mut junk = full - EVENT_BYTES;
    let mut buf = vec![0u8; 64 * 1024];
    while junk > 0 {
        let n = junk.min(buf.len());
        junk -= fd::read(raw, &mut buf[..n])?;
    }
    Ok(())
}

fn watch(raw: RawFd, w: &Watch) -> Result<(), Fault> {
    let path = fd::c_path(w.path.as_path()).at("name")?;
    // Where the kernel cannot be told the next number, numbers are used up: they only ever grow.
    let told = fd::ioctl_num(raw, SET_NEXT_WD, libc::c_ulong::from(w.wd.unsigned_abs())).is_ok();
    loop {
        // SAFETY: `path` is a valid C string.
        let wd = check(unsafe { libc::inotify_add_watch(raw, path.as_ptr(), w.mask) }).at(format!("watch {}", w.path))?;
        if wd == w.wd {
            return Ok(());
        }
        if wd > w.wd || told || w.wd - wd > 1_000_000 {
            return refuse(format!("watch on {} got number {wd} instead of {}", w.path, w.wd));
        }
        // SAFETY: inotify_rm_watch takes numbers only.
        check(unsafe { libc::inotify_rm_watch(raw, wd) }).at("give a watch number back")?;
        let mut event = [0u8; 64];
        // The removal reports itself (IN_IGNORED); nobody may see that.
        fd::read(raw, &mut event).at("drop an event")?;
    }
}
