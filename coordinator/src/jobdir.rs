//! The job directory: `job.json`, `lock`, `control.sock`, `log/`, `gen/`. See docs/job-directory.md.
//!
//! Whoever holds the lock is the job's agent (and the processes that started it). The lock is the kernel's, so it ends with its holders.

use crate::config::Config;
use crate::history::History;
use crate::interval::{Interval, MIN_GAP};
use crate::lock::{held_by, LockFile};
pub use crate::lock::{Holder, Lock};
use crate::{sys, Failure};
use belay_image::files;
use belay_wire::{socket, Exit, Request};
use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Version of `job.json`.
const FORMAT: u32 = 1;

/// Largest `job.json` that is read.
const MAX_DESCRIPTION: u64 = 16 << 20;

/// How a checkpoint finds out what the ones before have stored already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Differential {
    /// By the pages' contents.
    #[default]
    Hash,
    /// By the kernel's record of written pages, where it has one, and by the pages' contents.
    Written,
    /// Not at all.
    Off,
}

/// Contents of `job.json`: what the job is, and the choices that hold for it until they are changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Version of this file.
    pub format: u32,
    /// Name of the job.
    pub name: String,
    /// Tells the job from all others, wherever its checkpoints are copied.
    #[serde(default)]
    pub id: String,
    /// The job directory.
    #[serde(default)]
    pub dir: String,
    /// Folder of its own on a tier, where that is not the job's: see [`Description::folder`].
    #[serde(skip)]
    pub folder: Option<String>,
    /// It may get parts on other hosts.
    #[serde(default)]
    pub across_hosts: bool,
    /// The command.
    pub command: Vec<String>,
    /// Directory in which it was launched.
    pub cwd: String,
    /// Host on which it was launched.
    pub host: String,
    /// When it was launched.
    pub created_unix_s: u64,
    /// Checkpoint interval.
    pub interval: Interval,
    /// Mean time to interrupt, where the user has named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtti_s: Option<f64>,
    /// Shortest time between two automatic checkpoints.
    #[serde(default = "min_gap_s")]
    pub min_gap_s: f64,
    /// How long it has run, and how often it was interrupted.
    #[serde(default)]
    pub history: History,
    /// Whole generations to keep.
    pub keep: u32,
    /// Most bytes that the checkpoints may take, where there is a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// What the site allows instead, where that is less: until the next restart, which asks again.
    #[serde(skip)]
    pub allowed_bytes: Option<u64>,
    /// How to find what need not be stored again.
    #[serde(default)]
    pub differential: Differential,
    /// Save the contents of open files.
    pub save_open_files: bool,
    /// Save the programs and libraries that its processes map.
    #[serde(default = "yes")]
    pub save_code: bool,
    /// The last restart was to go on whatever instructions the processor lacks; for the parts on other hosts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub any_cpu: bool,
    /// Log level.
    pub log_level: String,
    /// Where the job's numbers are to be had, see [`crate::exporter::Place`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<String>,
    /// Tiers besides the job directory.
    #[serde(default)]
    pub config: Config,
    /// Hosts whose parts were lost during the last run, where it was ended for that, and when that was noticed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<(String, u64)>,
    /// How the last run of the command ended: the status word as `wait` reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_status: Option<i32>,
}

pub(crate) fn yes() -> bool {
    true
}

fn min_gap_s() -> f64 {
    MIN_GAP.as_secs_f64()
}

impl Description {
    /// Decodes the contents of `job.json`, naming it `path` in errors.
    pub fn decode(path: &Path, text: &[u8]) -> Result<Self, Failure> {
        let at = path.display();
        let d: Self = serde_json::from_slice(text).map_err(|e| Failure::new(Exit::Damaged, format!("{at}: damaged: {e}")))?;
        if d.format != FORMAT {
            return Err(Failure::new(
                Exit::ImageVersion,
                format!("{at}: format {}, this belay reads format {FORMAT}", d.format),
            ));
        }
        Ok(d)
    }

    /// A new job.
    pub fn new(name: Option<String>, command: Vec<String>) -> Self {
        let program = command.first().map(String::as_str).unwrap_or_default();
        let name = name.unwrap_or_else(|| {
            Path::new(program)
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        });
        Self {
            format: FORMAT,
            name,
            id: random_id(),
            dir: String::new(),
            folder: None,
            across_hosts: false,
            command,
            cwd: std::env::current_dir().unwrap_or_default().to_string_lossy().into_owned(),
            host: sys::host(),
            created_unix_s: sys::now_unix_s(),
            interval: Interval::Never,
            mtti_s: None,
            min_gap_s: min_gap_s(),
            history: History::default(),
            keep: 2,
            max_bytes: None,
            allowed_bytes: None,
            differential: Differential::Hash,
            save_open_files: false,
            save_code: true,
            any_cpu: false,
            log_level: "info".into(),
            metrics: None,
            config: Config::default(),
            lost: Vec::new(),
            wait_status: None,
        }
    }

    /// Most bytes that the checkpoints may take now, where there is a limit.
    pub fn limit(&self) -> Option<u64> {
        self.allowed_bytes.or(self.max_bytes)
    }

    /// Whether the id is one that belay has made: it becomes a part of paths.
    pub fn has_good_id(&self) -> bool {
        !self.id.is_empty() && self.id.chars().all(|c| c.is_ascii_hexdigit())
    }

    /// Name of the job's folder on a tier.
    pub fn folder(&self) -> String {
        if let Some(folder) = &self.folder {
            return folder.clone();
        }
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let name: String = self.name.chars().map(|c| if good(c) { c } else { '_' }).take(40).collect();
        format!("{name}-{}", self.id)
    }
}

/// 64 random bits.
fn random_id() -> String {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is valid for writing its length. The call cannot fail for so few bytes once the system has started.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    format!("{:016x}", u64::from_le_bytes(bytes))
}

/// A job directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDir {
    path: PathBuf,
}

/// Whose directories are acceptable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only the caller's own: something will run from it, or be written there.
    Own,
    /// Root may look at and command any user's job.
    OwnOrRoot,
}

impl JobDir {
    /// Opens the job directory at `path`, which a launch has made.
    pub fn open(path: &Path, access: Access) -> Result<Self, Failure> {
        let dir = Self::at(path)?;
        dir.check_link()?;
        match std::fs::metadata(&dir.path) {
            Ok(m) if m.is_dir() => dir.check_owner(&m, access)?,
            Ok(_) => return Err(dir.no_job("it is not a directory")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(dir.no_job("it does not exist")),
            Err(e) => return Err(Failure::io(format!("stat {}", dir.path.display()), &e)),
        }
        if !dir.description_file().exists() {
            return Err(dir.no_job("it has no job.json"));
        }
        Ok(dir)
    }

    /// Makes the job directory at `path`, or accepts an empty one or that of an earlier job.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let dir = Self::at(path)?;
        let at = dir.path.display();
        let cannot = |e: &io::Error| {
            Failure::new(
                Exit::CannotCreate,
                format!(
                    "make job directory {at}: {}; choose another with --ckpt-dir",
                    crate::failure::reason(e)
                ),
            )
        };
        match DirBuilder::new().mode(0o700).create(&dir.path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                dir.check_link()?;
                let m = std::fs::metadata(&dir.path).map_err(|e| cannot(&e))?;
                let empty = m.is_dir() && std::fs::read_dir(&dir.path).map_err(|e| cannot(&e))?.next().is_none();
                if empty && m.uid() == sys::euid() {
                    let private = std::fs::Permissions::from_mode(0o700);
                    std::fs::set_permissions(&dir.path, private).map_err(|e| cannot(&e))?;
                } else if !m.is_dir() {
                    return Err(Failure::new(
                        Exit::CannotCreate,
                        format!("make job directory {at}: a file of that name exists; choose another with --ckpt-dir"),
                    ));
                } else {
                    dir.check_owner(&m, Access::Own)?;
                    if !dir.description_file().exists() {
                        return Err(Failure::new(
                            Exit::CannotCreate,
                            format!("make job directory {at}: the directory holds other things; choose another with --ckpt-dir"),
                        ));
                    }
                }
            }
            Err(e) => return Err(cannot(&e)),
        }
        for sub in [dir.log(), dir.generations()] {
            match DirBuilder::new().mode(0o700).create(&sub) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(&e)),
                _ => {}
            }
        }
        Ok(dir)
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

    fn at(path: &Path) -> Result<Self, Failure> {
        let path = std::path::absolute(path).map_err(|e| Failure::io(format!("find {}", path.display()), &e))?;
        Ok(Self { path })
    }

    fn no_job(&self, why: &str) -> Failure {
        Failure::new(
            Exit::NoJob,
            format!(
                "{} is no job directory: {why}; name the directory given to belay launch",
                self.path.display()
            ),
        )
    }

    /// Refuses a name that is somebody else's symbolic link: they could make it lead elsewhere after all that is checked has been.
    fn check_link(&self) -> Result<(), Failure> {
        let Ok(m) = std::fs::symlink_metadata(&self.path) else {
            return Ok(()); // whoever opens it will say what is wrong
        };
        if m.is_symlink() && ![0, sys::euid()].contains(&m.uid()) {
            return Err(Failure::new(
                Exit::NotOurs,
                format!(
                    "{} is a symbolic link that belongs to user {}; name the directory itself",
                    self.path.display(),
                    m.uid()
                ),
            ));
        }
        Ok(())
    }

    fn check_owner(&self, m: &std::fs::Metadata, access: Access) -> Result<(), Failure> {
        let (me, at) = (sys::euid(), self.path.display());
        if m.uid() != me && !(me == 0 && access == Access::OwnOrRoot) {
            return Err(Failure::new(
                Exit::NotOurs,
                format!(
                    "job directory {at} belongs to user {}, not to {me}; run as its owner",
                    m.uid()
                ),
            ));
        }
        if m.mode() & 0o077 != 0 {
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

    /// Absolute path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whose it is.
    pub fn owner(&self) -> io::Result<u32> {
        std::fs::metadata(&self.path).map(|m| m.uid())
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
        self.path.join("control.sock")
    }

    fn description_file(&self) -> PathBuf {
        self.path.join("job.json")
    }

    /// Whether a job has been launched here.
    pub fn is_described(&self) -> bool {
        self.description_file().exists()
    }

    /// Reads `job.json`.
    pub fn description(&self) -> Result<Description, Failure> {
        let path = self.description_file();
        Description::decode(&path, &files::read(&path, MAX_DESCRIPTION)?)
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
        let (path, new) = (self.description_file(), self.path.join(".job.json.new"));
        let write = || -> io::Result<()> {
            let mut f = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&new)?;
            f.write_all(&serde_json::to_vec_pretty(d)?)?;
            // What a power cut must not leave empty, where there are checkpoints that would be lost with it.
            if std::fs::read_dir(self.generations()).is_ok_and(|mut l| l.next().is_some()) {
                f.sync_all()?;
            }
            std::fs::rename(&new, &path)
        };
        write().map_err(|e| Failure::io(format!("write {}", path.display()), &e))
    }

    /// Makes the job's description and the names of its directories durable: without them no checkpoint in it would be found after a power cut.
    pub fn sync(&self) -> Result<(), Failure> {
        let fail = |e: io::Error| Failure::io(format!("sync {}", self.path.display()), &e);
        File::open(self.description_file()).and_then(|f| f.sync_all()).map_err(fail)?;
        File::open(&self.path).and_then(|d| d.sync_all()).map_err(fail)?;
        // A directory above that may be entered but not read cannot be synced by us.
        if let Some(Ok(above)) = self.path.parent().map(File::open) {
            above.sync_all().map_err(fail)?;
        }
        Ok(())
    }

    /// Takes the job's lock. A job that is just ending is waited for, one that is running is refused.
    pub fn lock(&self) -> Result<Lock, Failure> {
        self.lock_within(Duration::from_secs(2))
    }

    /// The same, for one that takes no longer than `limit` to end.
    pub fn lock_within(&self, limit: Duration) -> Result<Lock, Failure> {
        let file = LockFile::open(&self.path.join("lock"))?;
        if let Some(lock) = file.take()? {
            return Ok(lock);
        }
        if self.answers() {
            return Err(self.already_running());
        }
        // The holder has no socket any more, or not yet, or never: who tidies or flushes has none. If it is ending, its lock ends within moments; a deadline tells the two apart.
        file.take_within(limit)?.ok_or_else(|| self.held(&file.holder()))
    }

    /// The lock of whoever moves chunks here from other hosts for a restart, which holds the other lock; waits for it, but no longer than `limit`.
    pub(crate) fn lock_moves_within(&self, limit: Duration) -> Result<Lock, Failure> {
        let file = LockFile::open(&self.path.join("moves.lock"))?;
        file.take_within(limit)?.ok_or_else(|| self.held(&file.holder()))
    }

    /// Who holds the job's lock; `None` when nobody does, or none can be told.
    pub fn holder(&self) -> Option<Holder> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(self.path.join("lock"))
            .ok()?;
        file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        held_by(&file).ok().flatten()
    }

    fn held(&self, holder: &Holder) -> Failure {
        let (at, holder) = (self.path.display(), &holder.word);
        Failure::new(
            Exit::AlreadyRunning,
            format!("{at} is in use: {holder} is already running there and holds its lock; wait until it has ended"),
        )
    }

    fn already_running(&self) -> Failure {
        let at = self.path.display();
        Failure::new(
            Exit::AlreadyRunning,
            format!(
                "a job is already running in {at}; see belay status {at}, end it with belay stop {at}, or use another directory"
            ),
        )
    }

    /// Whether an agent answers at the control socket.
    fn answers(&self) -> bool {
        let Ok(stream) = socket::connect(&self.socket()) else {
            return false;
        };
        // A suspended agent accepts connections without answering: it runs, for this purpose.
        if socket::peer(stream.as_fd()).is_ok_and(|p| is_suspended(p.pid)) {
            return true;
        }
        socket::request(stream, &Request::Status).is_ok_and(|mut events| events.next().is_some())
    }
}

/// Whether process `pid` is stopped by job control.
pub fn is_suspended(pid: i32) -> bool {
    belay_kernel::proc::stat(pid).is_ok_and(|s| s.state == 'T')
}
