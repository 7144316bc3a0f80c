//! The job directory: `job.json`, `lock`, `control.sock`, `log/`, `gen/`. See docs/job-directory.md.
//!
//! Whoever holds the lock is the job's agent (and the processes that started it). The lock is the kernel's, so it ends
//! with its holders.

pub use crate::description::{Description, Differential};
use crate::lock::{held_by, LockFile};
pub use crate::lock::{Holder, Lock};
use crate::{shell, sys, Failure};
use belay_image::files;
use belay_kernel::dir::{self, Dir};
use belay_kernel::limits;
use belay_kernel::trust::{self, Untrusted};
use belay_wire::socket::{self, Patience};
use belay_wire::{Exit, Request};
use std::fs::DirBuilder;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

/// The description of the job, by which its directory is known.
pub const JOB: &str = "job.json";
/// The same once more, for when a disk has damaged the first: as old, or younger.
const COPY: &str = "job.json.copy";
/// What becomes one of them when it is whole.
const NEW_JOB: &str = ".job.json.new";
const LOCK: &str = "lock";
const SOCKET: &str = "control.sock";

/// An agent that has not answered for so long is there all the same.
const PATIENCE: Duration = Duration::from_secs(10);

/// Largest `job.json` that is read.
const MAX_DESCRIPTION: u64 = 16 << 20;

/// A job directory, by its descriptor: what its path leads to may change.
#[derive(Debug, Clone)]
pub struct JobDir {
    path: PathBuf,
    dir: Arc<Dir>,
}

/// This process has been root's and is now that of another user, at whose job it looks.
static IS_FOREIGN: AtomicBool = AtomicBool::new(false);

/// Whether this process looks at another user's job, as that user. It brings what belongs to its own user (the keys of
/// object stores in its environment), and so does nothing with the job's tiers.
pub fn is_foreign() -> bool {
    IS_FOREIGN.load(Ordering::Relaxed)
}

/// Whose directories are acceptable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only the caller's own, where nobody else can exchange it: something will run from it, or be written there.
    Own,
    /// Root may look at and command any user's job, as that user: this process has the owner's identity from then on, for good.
    OwnOrRoot,
}

impl JobDir {
    /// Opens the job directory at `path`, which a launch has made.
    pub fn open(path: &Path, access: Access) -> Result<Self, Failure> {
        let path = absolute(path)?;
        let found = Dir::find(&path).map_err(|e| not_there(&path, &e))?;
        let owner = owner_of(&path, &found, access)?;
        if access == Access::Own && is_foreign() {
            return Err(not_own(&path, owner));
        }
        let walked = match access {
            Access::Own => trust::find(&path),
            Access::OwnOrRoot => trust::way(&path, owner),
        };
        let dir = walked.map_err(|e| untrusted(&path, e))?;
        if owner_of(&path, &dir, access)? != owner {
            return Err(not_own(&path, owner)); // exchanged between the two looks
        }
        if owner != sys::euid() {
            become_owner(&path, owner)?;
        }
        let dir = dir
            .reopened()
            .map_err(|e| Failure::io(format!("open {}", path.display()), &e))?;
        let dir = Arc::new(dir);
        let job = Self { path, dir };
        if is_foreign() {
            job.check_path(owner)?;
        }
        if !job.is_described() {
            return Err(no_job(&job.path, "it has no job.json"));
        }
        Ok(job)
    }

    /// Makes the job directory at `path`, or accepts an empty one or that of an earlier job.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let path = absolute(path)?;
        let at = path.display();
        let cannot = |e: &io::Error| {
            Failure::new(
                Exit::CannotCreate,
                format!(
                    "make job directory {at}: {}; choose another with --ckpt-dir",
                    crate::failure::reason(e)
                ),
            )
        };
        let refuse = |e: Untrusted| match e {
            Untrusted::Io(e) => cannot(&e),
            others => untrusted(&path, others),
        };
        let mut made = false;
        if let (Some(parent), Some(name)) = (path.parent(), path.file_name()) {
            match trust::holder(parent).map_err(refuse)?.make(name.as_ref(), 0o700) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(&e)),
                result => made = result.is_ok(),
            }
        }
        let found = match trust::find(&path) {
            Err(Untrusted::Io(e)) if e.raw_os_error() == Some(libc::ENOTDIR) => {
                return Err(Failure::new(
                    Exit::CannotCreate,
                    format!("make job directory {at}: a file of that name exists; choose another with --ckpt-dir"),
                ));
            }
            other => other.map_err(refuse)?,
        };
        let m = found.metadata().map_err(|e| cannot(&e))?;
        let is_own = m.uid() == sys::euid();
        let dir = Self {
            path: path.clone(),
            dir: Arc::new(if is_own {
                found.reopened().map_err(|e| cannot(&e))?
            } else {
                found
            }),
        };
        let unused = is_own && dir.is_unused().map_err(|e| cannot(&e))?;
        if unused && !made {
            dir.dir.set_mode(0o700).map_err(|e| cannot(&e))?;
        } else if !unused {
            // First: whoever has named a directory by mistake is not to be asked to change its mode.
            if is_own && !dir.is_described() {
                return Err(Failure::new(
                    Exit::CannotCreate,
                    format!("make job directory {at}: the directory holds other things; choose another with --ckpt-dir"),
                ));
            }
            check_owner(&path, &m, Access::Own)?;
        }
        for sub in ["log", "gen"] {
            match dir.dir.make(sub.as_ref(), 0o700) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(&e)),
                _ => {}
            }
        }
        Ok(dir)
    }

    /// Whether it is empty, or holds no more than a launch that failed has left: the disk may have been full.
    fn is_unused(&self) -> io::Result<bool> {
        // What lies there is the same by any path.
        let here = PathBuf::from(format!("/proc/self/fd/{}", self.dir.as_raw_fd()));
        for entry in std::fs::read_dir(&here)? {
            let name = entry?.file_name();
            let is_left = match name.to_str() {
                Some(NEW_JOB | COPY | LOCK) => true,
                Some("gen" | "log") => self.dir.inner(name.as_ref()).is_ok_and(|inside| {
                    let inside = std::fs::read_dir(format!("/proc/self/fd/{}", inside.as_raw_fd()));
                    inside.is_ok_and(|mut names| names.next().is_none())
                }),
                _ => false,
            };
            if !is_left {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether there is a control socket.
    pub fn has_socket(&self) -> bool {
        self.dir.has(SOCKET.as_ref())
    }

    /// Removes the control socket, wherever the directory lies by now.
    pub(crate) fn remove_socket(&self) -> io::Result<()> {
        self.dir.remove(SOCKET.as_ref())
    }

    /// Whether what this process writes below the path is written here: the job is its own user's, and nobody else can
    /// exchange what lies on the way.
    pub fn is_own(&self) -> bool {
        let Ok(here) = self.dir.metadata() else {
            return false;
        };
        let found = trust::find(&self.path).ok().and_then(|there| there.metadata().ok());
        !is_foreign()
            && here.uid() == sys::euid()
            && found.is_some_and(|there| (here.dev(), here.ino()) == (there.dev(), there.ino()))
    }

    /// Whether the path still leads here.
    fn is_in_place(&self) -> io::Result<()> {
        let (there, here) = (std::fs::metadata(&self.path)?, self.dir.metadata()?);
        if (here.dev(), here.ino()) == (there.dev(), there.ino()) {
            return Ok(());
        }
        Err(io::Error::other("another directory lies there now"))
    }

    /// The same for a job that runs: what it wrote elsewhere would be among the files of another.
    pub fn check_place(&self) -> Result<(), Failure> {
        self.is_in_place().map_err(|e| {
            let at = self.path.display();
            let is_gone = matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::Other);
            if !is_gone {
                return Failure::io(format!("look at the job directory {at}"), &e);
            }
            let why = crate::failure::reason(&e);
            let what = format!("the job directory {at} has been moved or removed while the job runs ({why}): move it back; until then the job has no checkpoints");
            Failure::new(Exit::CheckpointFailed, what)
        })
    }

    /// Whether the path still leads here for user `owner`, as whom this process goes on.
    fn check_path(&self, owner: u32) -> Result<(), Failure> {
        self.is_in_place().map_err(|e| {
            let at = self.path.display();
            let why = crate::failure::reason(&e);
            let what = format!("user {owner}, as whom root looks at the job directory {at}, does not find it there: {why}; name a path by which its owner reaches it");
            Failure::new(Exit::NotOurs, what)
        })
    }

    /// Makes the directory of the parts of a job, if it is not there.
    pub fn make_parts(path: &Path) -> Result<(), Failure> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(Failure::new(
                Exit::CannotCreate,
                format!(
                    "make {}: {e}; the job directory must be on a file system that all hosts share",
                    path.display()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Absolute path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path as a person types it at a shell.
    pub fn shown(&self) -> String {
        shell::typed(&self.path.to_string_lossy())
    }

    /// The log directory.
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The directory of generations.
    pub fn generations(&self) -> PathBuf {
        self.path.join("gen")
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    fn description_file(&self) -> PathBuf {
        self.path.join(JOB)
    }

    /// Whether a job has been launched here.
    pub fn is_described(&self) -> bool {
        self.dir.has(JOB.as_ref()) || self.dir.has(COPY.as_ref()) && !self.is_unused().unwrap_or(true)
    }

    /// Reads `job.json`, or its copy where that is damaged or gone.
    pub fn description(&self) -> Result<Description, Failure> {
        static TOLD: Once = Once::new();
        let read = |name: &str| -> Result<_, Failure> {
            let path = self.path.join(name);
            let file = self.dir.open(name.as_ref(), libc::O_RDONLY, 0);
            let file = file.map_err(|e| belay_image::ImageError::io("open", &path, e))?;
            let text = files::read_open(file, &path, MAX_DESCRIPTION)?;
            Ok(Description::decode(&path, &text))
        };
        // What is no file any more is somebody's doing; what is not there at all may have been removed by mistake.
        let damaged = match read(JOB) {
            Ok(Err(failure)) if failure.exit == Exit::Damaged => failure,
            Ok(decoded) => return decoded,
            Err(_) if !self.dir.has(JOB.as_ref()) => {
                Failure::new(Exit::Damaged, format!("{} is not there", self.path.join(JOB).display()))
            }
            Err(failure) => return Err(failure),
        };
        let copy = read(COPY).and_then(|decoded| decoded).map_err(|_| {
            let why = format!(
                "{damaged}; put it back from a copy of the directory (a durable tier has one too), or remove the directory and launch anew"
            );
            Failure::new(Exit::Damaged, why)
        })?;
        TOLD.call_once(|| sys::say(&format!("{damaged}; {COPY} is used")));
        Ok(copy)
    }

    /// The last time at which the job is known to have lived: its newest entry in the log, or its newest checkpoint.
    pub fn last_sign_unix_s(&self) -> u64 {
        let entries = [self.log(), self.generations()]
            .into_iter()
            .filter_map(|dir| std::fs::read_dir(dir).ok())
            .flat_map(|entries| entries.flatten());
        let changed = entries.filter_map(|e| Some(e.metadata().ok()?.mtime().unsigned_abs()));
        changed.max().unwrap_or(0)
    }

    /// Writes `job.json` so that a reader sees the old contents or the new.
    pub fn describe(&self, d: &Description) -> Result<(), Failure> {
        // What is written can be read again.
        d.check().map_err(|why| Failure::new(Exit::Usage, why))?;
        let text = d.encode()?;
        let write = |name: &str, lasting: bool| -> io::Result<()> {
            // Only what a killed one has left can be there. Nothing is written to what was there before.
            self.dir.remove(NEW_JOB.as_ref())?;
            let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
            let mut f = self.dir.open(NEW_JOB.as_ref(), flags, 0o600)?;
            f.write_all(&text)?;
            if lasting {
                f.sync_all()?;
            }
            self.dir.rename(NEW_JOB.as_ref(), name.as_ref())
        };
        let fail = |e: io::Error| Failure::io(format!("write {}", self.description_file().display()), &e);
        // The copy first, so that it never says less. Where there is no room for it, it goes.
        if write(COPY, false).is_err() {
            self.dir.remove(COPY.as_ref()).map_err(fail)?;
        }
        // What a power cut must not leave empty, where there are checkpoints that would be lost with it.
        let holds_some = std::fs::read_dir(self.generations()).is_ok_and(|mut l| l.next().is_some());
        write(JOB, holds_some).map_err(fail)
    }

    /// Makes the job's description and the names of its directories durable: without them no checkpoint in it would be
    /// found after a power cut.
    pub fn sync(&self) -> Result<(), Failure> {
        let fail = |e: io::Error| Failure::io(format!("sync {}", self.path.display()), &e);
        let description = self.dir.open(JOB.as_ref(), libc::O_RDONLY, 0);
        description.and_then(|f| f.sync_all()).map_err(fail)?;
        self.dir.sync().map_err(fail)?;
        dir::sync_above(&self.path).map_err(fail)
    }

    /// Takes the job's lock. A job that is just ending is waited for, one that is running is refused.
    pub fn lock(&self) -> Result<Lock, Failure> {
        let file = LockFile::open(&self.dir, &self.path, LOCK)?;
        if let Some(lock) = file.take()? {
            return Ok(lock);
        }
        if self.answers() {
            return Err(self.already_running());
        }
        // The holder has no socket any more, or not yet, or never: who tidies or flushes has none. If it is ending, its
        // lock ends within moments; a deadline tells the two apart.
        file.take_within(Duration::from_secs(2))?
            .ok_or_else(|| self.held(&file.holder()))
    }

    /// The job's lock, if nobody has it.
    pub(crate) fn try_lock(&self) -> Result<Option<Lock>, Failure> {
        LockFile::open(&self.dir, &self.path, LOCK)?.take()
    }

    /// As [`JobDir::lock`], where whoever holds it is about to end, also where it answers still, or stands still: it has lost
    /// its root, and ends when it notices. That is waited for, but no longer than `limit`.
    pub fn lock_after(&self, limit: Duration) -> Result<Lock, Failure> {
        let file = LockFile::open(&self.dir, &self.path, LOCK)?;
        file.take_within(limit)?.ok_or_else(|| {
            let (at, holder) = (self.shown(), file.holder().word);
            let why = format!(
                "{at} is in use: {holder} has lost its root, and has not ended within {} s; if it is suspended, continue it \
                 (kill -CONT), else end it (kill -9); then restart",
                limit.as_secs()
            );
            Failure::new(Exit::AlreadyRunning, why)
        })
    }

    /// The lock of whoever moves chunks here from other hosts for a restart, which holds the other lock; waits for it,
    /// but no longer than `limit`.
    pub(crate) fn lock_moves_within(&self, limit: Duration) -> Result<Lock, Failure> {
        let file = LockFile::open(&self.dir, &self.path, "moves.lock")?;
        file.take_within(limit)?.ok_or_else(|| self.held(&file.holder()))
    }

    /// Who holds the job's lock; `None` when nobody does, or none can be told.
    pub fn holder(&self) -> Option<Holder> {
        let file = self.dir.open(LOCK.as_ref(), libc::O_RDONLY, 0).ok()?;
        file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        held_by(&file).ok().flatten()
    }

    fn held(&self, holder: &Holder) -> Failure {
        let (at, holder) = (self.shown(), &holder.word);
        Failure::new(
            Exit::AlreadyRunning,
            format!("{at} is in use: {holder} is already at work there; belay status {at} says what goes on"),
        )
    }

    fn already_running(&self) -> Failure {
        let at = self.shown();
        Failure::new(
            Exit::AlreadyRunning,
            format!(
                "a job is already running in {at}; see belay status {at}, end it with belay stop {at}, or use another directory"
            ),
        )
    }

    /// Connects to the agent at the control socket in this directory, and to nothing that a link there may lead to; within `limit`.
    pub fn connect(&self, limit: Duration) -> io::Result<UnixStream> {
        let found = self.dir.open(SOCKET.as_ref(), libc::O_PATH, 0)?;
        if !found.metadata()?.file_type().is_socket() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        socket::connect_within(format!("/proc/self/fd/{}", found.as_raw_fd()).as_ref(), limit)
    }

    /// Whether an agent answers at the control socket.
    fn answers(&self) -> bool {
        let Ok(stream) = self.connect(PATIENCE) else {
            return false;
        };
        // A suspended agent accepts connections without answering: it runs, for this purpose. So does one that is
        // silent for other reasons.
        if socket::peer(stream.as_fd()).is_ok_and(|p| is_suspended(p.pid)) {
            return true;
        }
        let events = socket::request(stream, &Request::Status, Patience::Whole(PATIENCE));
        events.is_ok_and(|mut events| match events.next() {
            Some(Err(e)) => e.kind() == io::ErrorKind::TimedOut,
            answer => answer.is_some(),
        })
    }
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    // It fails where there is no working directory any more.
    std::path::absolute(path).map_err(|e| Failure::io(format!("find {} in the working directory", path.display()), &e))
}

fn no_job(path: &Path, why: &str) -> Failure {
    Failure::new(
        Exit::NoJob,
        format!(
            "{} is no job directory: {why}; name the directory given to belay launch",
            path.display()
        ),
    )
}

/// Why there is no directory at `path`, or none that can be reached.
fn not_there(path: &Path, e: &io::Error) -> Failure {
    match e.kind() {
        io::ErrorKind::NotFound => no_job(path, "it does not exist"),
        io::ErrorKind::NotADirectory => no_job(path, "it is not a directory"),
        _ => Failure::io(format!("stat {}", path.display()), e),
    }
}

/// The directory at `path` could be exchanged for another at any time.
fn untrusted(path: &Path, e: Untrusted) -> Failure {
    match e {
        Untrusted::Io(e) => not_there(path, &e),
        others => Failure::new(Exit::NotOurs, format!("job directory {}: {others}", path.display())),
    }
}

/// Whose `dir` is, which may be looked at so.
fn owner_of(path: &Path, dir: &Dir, access: Access) -> Result<u32, Failure> {
    let m = dir.metadata().map_err(|e| not_there(path, &e))?;
    let has_job = || std::fs::symlink_metadata(path.join(JOB)).map_or_else(|e| e.kind() != io::ErrorKind::NotFound, |_| true);
    if m.mode() & 0o077 != 0 && !has_job() {
        // Any directory can be named by mistake; nobody is told to change its mode then.
        return Err(no_job(path, "it has no job.json"));
    }
    check_owner(path, &m, access).map(|()| m.uid())
}

fn check_owner(path: &Path, m: &std::fs::Metadata, access: Access) -> Result<(), Failure> {
    let me = sys::euid();
    if m.uid() != me && !(me == 0 && access == Access::OwnOrRoot) {
        return Err(not_own(path, m.uid()));
    }
    if m.mode() & 0o077 != 0 {
        let at = path.display();
        return Err(Failure::new(
            Exit::NotOurs,
            format!(
                "job directory {at} has mode {:03o}, so others may enter it; chmod 700 {at}",
                m.mode() & 0o777
            ),
        ));
    }
    Ok(())
}

fn not_own(path: &Path, owner: u32) -> Failure {
    let me = if is_foreign() { 0 } else { sys::euid() };
    Failure::new(
        Exit::NotOurs,
        format!(
            "job directory {} belongs to user {owner}, not to {me}; run as its owner",
            path.display()
        ),
    )
}

/// Memory of root's looks at what is another user's, bytes. Each file that is read has a limit of its own; how many there
/// are is up to that user.
const MOST_MEMORY: u64 = 4 << 30;

/// Root looks at what lies in `path` as its `owner`: what that user has put there can do nothing that the user could not,
/// and does not take the machine's memory.
pub fn become_owner(path: &Path, owner: u32) -> Result<(), Failure> {
    let bounded = limits::of(0, libc::RLIMIT_DATA).and_then(|(soft, hard)| {
        let limit = (soft.min(MOST_MEMORY), hard.min(MOST_MEMORY));
        limits::set(0, libc::RLIMIT_DATA, limit)
    });
    let become_user = || belay_kernel::identity::become_user(owner);
    bounded.and_then(|()| become_user()).map_err(|e| {
        let (at, why) = (path.display(), crate::failure::reason(&e));
        let what = format!("{at} belongs to user {owner}, as whom root would look at it, and cannot: {why}; run as its owner");
        Failure::new(Exit::NotOurs, what)
    })?;
    IS_FOREIGN.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether process `pid` is stopped by job control.
pub fn is_suspended(pid: i32) -> bool {
    belay_kernel::proc::stat(pid).is_ok_and(|s| s.state == 'T')
}
