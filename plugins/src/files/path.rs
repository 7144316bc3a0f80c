//! Descriptors that are a name and nothing else: directories, harmless devices, kernel files, namespaces, O_PATH.

use super::watched::Noted;
use super::{make_parents, parents, Seen, Sights};
use crate::builder::Builder;
use crate::env::ProcessView;
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart, Place, Ways};
use crate::model::{DescId, Description, Descriptors, Directory, FsPath, Slot};
use crate::pidfd;
use crate::session::Session;
use crate::sys::fd;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Memory devices (major 1) without state: null, zero, full, random, urandom, kmsg.
const STATELESS_MINORS: [u32; 6] = [3, 5, 7, 8, 9, 11];

/// File systems whose files are views into the kernel: reopened by name, nothing to save.
const KERNEL_FILESYSTEMS: [i64; 7] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6367_7270, // cgroup2
    0x0027_e0eb, // cgroup
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
];
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// A descriptor that is reopened by name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PathState {
    /// The name.
    path: FsPath,
    /// File type bits, checked at restart.
    file_type: u32,
    /// Device number of a device file, checked at restart.
    rdev: u64,
    /// For a directory: it and those above it, to be made again where they are gone.
    directories: Vec<Directory>,
    /// Process whose `/proc` directory it lies in: it can be opened only when that process exists.
    needs_process: Option<i32>,
    /// It lies in the `/proc` directory of a process that is not there after a restart.
    #[serde(default)]
    of_ended: bool,
    #[serde(default)]
    noted: Noted,
}

/// The kind.
pub(crate) struct Paths;

impl Kind for Paths {
    const NAME: &'static str = "Path";
    const VERSION: u32 = 1;
    type State = PathState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        match look {
            Look::Name | Look::Directory => true,
            Look::Regular(file_system) => *file_system == NSFS_MAGIC || KERNEL_FILESYSTEMS.contains(file_system),
            Look::Device(major, minor) => *major == 1 && STATELESS_MINORS.contains(minor),
            _ => false,
        }
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<PathState, Fault> {
        match seen.look {
            Look::Regular(NSFS_MAGIC) => capture_namespace(s, seen.id),
            Look::Regular(_) | Look::Device(..) => Ok(PathState {
                noted: Noted::of(seen.raw(), &s.found[seen.id])?,
                ..capture(s, seen.id)?
            }),
            _ => capture(s, seen.id),
        }
    }

    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        refusals.extend(lost_working(s));
        let late = |is_so: fn(&PathState) -> bool| {
            let all = out.each::<PathState>().filter(move |(_, state)| is_so(state));
            all.map(|(id, _)| id)
        };
        let why = "in flight in a socket, and in /proc of a process, so that it cannot be made before that is there";
        refusals.extend(s.too_late(late(|state| state.needs_process.is_some()), why));
        let why = "in flight in a socket, and the name of a socket, which cannot be opened before all are there";
        refusals.extend(s.too_late(late(PathState::is_of_socket), why));
    }

    fn ways(d: &Descriptors, out: &mut Ways) {
        for (_, p) in d.each::<PathState>() {
            out.parents.extend(p.directories.iter().cloned());
            if p.file_type == libc::S_IFDIR && p.needs_process.is_none() {
                out.opened.extend(p.directories.last().cloned());
            }
        }
    }

    fn rebuild(b: &mut Builder<'_>, desc: &Description, state: &PathState) -> Result<Option<OwnedFd>, Fault> {
        if state.needs_process.is_some() || state.is_of_socket() {
            return Ok(None);
        }
        open(desc, state, b.sights).map(Some)
    }

    fn install_late(at: &Place<'_>, _: &Slot, state: &PathState) -> Result<Option<OwnedFd>, Fault> {
        state
            .needs_process
            .map(|_| open(at.desc, state, &Sights::default()))
            .transpose()
    }

    nothing!(
        survey,
        contents,
        check,
        check_part,
        numbers,
        prepare,
        join,
        refill,
        install,
        settle,
        install_own,
        complete
    );
}

/// Captures a directory, a kernel file, or anything opened with O_PATH.
fn capture(s: &mut Session<'_>, id: DescId) -> Result<PathState, Fault> {
    let found = &s.found[id];
    let file_type = found.stat.st_mode & libc::S_IFMT;
    let directory = file_type == libc::S_IFDIR;
    let mut path = found.link.as_path();
    let here = fd::stat(path, false).is_ok_and(|st| st.st_dev == found.stat.st_dev && st.st_ino == found.stat.st_ino);
    let process = process_of(path);
    if process.is_some() {
        // The kernel forgets names below `net` again and again: they lead to other inodes then.
        path = super::without_deleted(path);
    }
    let there = fd::stat(path, false).is_ok();
    let of_ended = process.is_some_and(|pid| !there || !s.will_have(pid));
    if of_ended && is_of_descriptor_or_mapping(path) {
        return not_now("in /proc it stands for a descriptor or a mapping that is gone, or of a process that is not part of the job, so it cannot be opened again; close it before the checkpoint");
    }
    if let Some(pid) = process.filter(|_| there && of_ended) {
        s.notes.push(format!(
            "process {}: fd {}: process {pid} is not part of the job; after a restart its files in /proc are those of a process that has ended",
            found.holder.pid, found.holder.fd
        ));
    }
    let deleted = !here && process.is_none();
    if deleted {
        if directory && super::without_deleted(path) == path && fd::stat(path, false).is_ok() {
            return refuse("another directory has its name: it lies on a file system that is mounted nowhere, or that another one covers; close it before the checkpoint");
        }
        if !directory {
            return refuse("the file it names has been deleted or renamed, so it cannot be found again");
        }
        path = super::without_deleted(path);
    }
    let mut directories = match process {
        None if directory => parents(&path.join("x")),
        _ => Vec::new(),
    };
    if let Some(own) = directories.last_mut().filter(|own| own.gone) {
        own.mode = found.stat.st_mode & 0o7777;
    }
    Ok(PathState {
        path: FsPath::from(path),
        file_type,
        rdev: found.stat.st_rdev,
        directories,
        needs_process: process.filter(|_| !of_ended),
        of_ended,
        noted: Noted::Nothing,
    })
}

/// Working directories in the `/proc` directory of a process that a restart does not have.
fn lost_working(s: &Session<'_>) -> Vec<Refusal> {
    let lost = |p: &ProcessView| {
        let shown = fd::readlink(Path::new(&format!("/proc/{}/cwd", p.task))).ok()?;
        let pid = process_of(&shown)?;
        let bare = super::without_deleted(&shown);
        // Its number may be another process's by now. (Names below `net` are forgotten while the process lives.)
        let forgotten = bare != shown && bare.iter().count() == 3;
        let ended = forgotten || fd::stat(bare, false).is_err() || !s.will_have(pid);
        ended.then(|| {
            let reason =
                format!("is in /proc of process {pid}, which has ended or is not part of the job; leave it before the checkpoint");
            Fault::Refused(reason).of(p.pid, format!("working directory ({})", shown.display()))
        })
    };
    s.processes.iter().filter_map(lost).collect()
}

/// Opens names of sockets again, when these have their files, which are `made` by the restart.
pub(crate) fn open_sockets(b: &mut Builder<'_>, made: &[Seen]) -> Result<(), (DescId, Fault)> {
    let d = b.descriptors;
    for (id, state) in d.each::<PathState>().filter(|(_, state)| state.is_of_socket()) {
        let open = || {
            let opened = reopen(&d.descriptions[id], state, state.path.as_path())?;
            let seen = Seen::of(&opened).at("stat")?;
            if !made.iter().any(|file| file.is_same_file(seen)) {
                b.sights
                    .at(state.path.as_path())
                    .is(&fd::fstat(opened.as_raw_fd()).at("stat")?)?;
            }
            Ok(opened)
        };
        let opened = open().and_then(|fd| b.put(id, fd));
        opened.map_err(|e| (id, e))?;
    }
    Ok(())
}

impl PathState {
    fn is_of_socket(&self) -> bool {
        self.file_type == libc::S_IFSOCK && self.needs_process.is_none() && !self.of_ended
    }

    /// The tasks that must be there before it can be opened.
    pub(crate) fn tasks(&self) -> Vec<i32> {
        let needed = self.needs_process.map(|_| tasks_of(self.path.as_path()));
        needed.unwrap_or_default()
    }
}

/// Process in whose `/proc` directory `path` lies, as the kernel shows it.
fn process_of(path: &Path) -> Option<i32> {
    tasks_of(path).first().copied()
}

/// The tasks in whose `/proc` directories `path` lies, as the kernel shows it: a process, and behind it one of its threads.
pub fn tasks_of(path: &Path) -> Vec<i32> {
    let number = |name: &OsStr| name.to_str()?.parse().ok();
    let Ok(below) = super::without_deleted(path).strip_prefix("/proc") else {
        return Vec::new();
    };
    let mut names = below.iter();
    let process = names.next().and_then(number);
    let thread = names
        .next()
        .filter(|name| *name == "task")
        .and_then(|_| names.next())
        .and_then(number);
    process.map_or_else(Vec::new, |process| [process].into_iter().chain(thread).collect())
}

/// Whether `path`, in the `/proc` directory of a process, stands for one of its descriptors or mappings, which no other
/// process has.
fn is_of_descriptor_or_mapping(path: &Path) -> bool {
    let holds = |name: &str| ["fd", "fdinfo", "map_files"].contains(&name);
    let mut names = path.iter().skip(3).map(|name| name.to_str().unwrap_or_default());
    names.any(holds) && names.next().is_some()
}

/// The name in the `/proc` directory of process `pid` that `path` is in that of another one; of a thread, that of its main thread.
fn in_process(path: &Path, pid: i32) -> PathBuf {
    let pid = pid.to_string();
    let numbered = |name: &OsStr| name.as_bytes().iter().all(u8::is_ascii_digit);
    let of_thread = path.iter().nth(3).is_some_and(|name| name == "task");
    path.components()
        .enumerate()
        .map(|(at, name)| match name {
            Component::Normal(name) if (at == 2 || at == 4 && of_thread) && numbered(name) => Path::new(&pid),
            _ => Path::new(name.as_os_str()),
        })
        .collect()
}

/// Captures a namespace descriptor, which is supported where it is the agent's own namespace.
fn capture_namespace(s: &mut Session<'_>, id: DescId) -> Result<PathState, Fault> {
    let found = &s.found[id];
    let name = found.link.to_string_lossy().into_owned();
    // `KIND:[NUMBER]`, or where a restart shows another one than the job's own, the name upon which it does.
    let kind = name.rsplit('/').next().and_then(|n| n.split(':').next()).unwrap_or_default();
    let path = format!("/proc/self/ns/{kind}");
    let is = |path: &str| fd::stat(Path::new(path), true).is_ok_and(|st| st.st_ino == found.stat.st_ino);
    if !is(&path) && !is(&format!("/proc/thread-self/ns/{kind}")) {
        return refuse("a namespace other than the job's own cannot be restored");
    }
    Ok(PathState {
        path: FsPath::from(Path::new(&path)),
        file_type: libc::S_IFREG,
        rdev: 0,
        directories: Vec::new(),
        needs_process: None,
        of_ended: false,
        noted: Noted::Nothing,
    })
}

/// Opens it again.
fn open(d: &Description, state: &PathState, sights: &Sights) -> Result<OwnedFd, Fault> {
    let path = state.path.as_path();
    if state.of_ended {
        // One that has been read in part takes its offset while there is something to read.
        return pidfd::with_short_lived(None, |pid| reopen(d, state, &in_process(path, pid)));
    }
    make_parents(&state.directories, sights)?;
    let opened = reopen(d, state, path)?;
    sights.at(path).is(&fd::fstat(opened.as_raw_fd()).at("stat")?)?;
    Ok(opened)
}

/// Lets the kernel write the text of a file in `/proc` again when the program reads on.
///
/// To find an offset it has written what lies there, of a process that is not whole yet, and keeps it (`traverse` in
/// `fs/seq_file.c`). A read elsewhere drops that and leaves the offset; where the file can't be read, nothing has been
/// kept.
fn forget_text(fd: &OwnedFd) {
    let _ = fd::read_at(fd.as_raw_fd(), &mut [0], 0);
}

fn reopen(d: &Description, state: &PathState, path: &Path) -> Result<OwnedFd, Fault> {
    const KEPT: i32 = libc::O_ACCMODE
        | libc::O_PATH
        | libc::O_DIRECTORY
        | libc::O_NOFOLLOW
        | libc::O_APPEND
        | libc::O_NONBLOCK
        | libc::O_DSYNC
        | libc::O_SYNC
        | libc::O_NOATIME
        | libc::O_DIRECT;
    let fd = fd::open(path, (d.flags & KEPT) | libc::O_NOCTTY, 0).at("open")?;
    let stat = fd::fstat(fd.as_raw_fd()).at("stat")?;
    let rdev = if state.file_type == libc::S_IFCHR {
        stat.st_rdev
    } else {
        state.rdev
    };
    if stat.st_mode & libc::S_IFMT != state.file_type || rdev != state.rdev {
        return refuse("is another kind of file now; bring the old one back");
    }
    if d.pos != 0 && d.flags & libc::O_PATH == 0 {
        fd::go_to(fd.as_raw_fd(), d.pos).at("set the offset")?;
        if state.needs_process.is_some() {
            forget_text(&fd);
        }
    }
    state.noted.restore(fd.as_raw_fd())?;
    Ok(fd)
}
