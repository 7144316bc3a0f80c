//! An InfiniBand fabric without adapters: `tests/fake-verbs`, its library and its daemon.

use crate::build::{compile, copy_program};
use crate::job::output;
use crate::place::{build_dir, repository, Place, User};
use crate::Failure;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Longer than anything takes that the daemon is asked.
const LIMIT: Duration = Duration::from_secs(60);
/// The library's file name, which is that of the real one.
pub const LIBRARY: &str = "libibverbs.so.1";
/// A device file for which UCX looks; it never opens it.
pub const WITH_DEVICE: &str = "mkdir /dev/infiniband; mknod -m 666 /dev/infiniband/uverbs0 c 1 3";
/// Each rank on a host of its own.
pub const ON_HOSTS: &str = "FAKE_VERBS_HOST=host${PMI_RANK-$OMPI_COMM_WORLD_RANK}; export FAKE_VERBS_HOST; exec \"$@\"";
/// Belay's own library for the verbs.
const SHADOWS: &str = "libbelay_verbs.so";
const DAEMON: &str = "fake-verbsd";

/// Held while the two are made.
static TURN: Mutex<()> = Mutex::new(());

/// The sources of one directory, and whether any is newer than `made`.
fn sources(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("list {}: {e}", dir.display()))?;
    let mut all: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    all.sort();
    Ok(all)
}

/// Makes the library and the daemon and puts them into `place`. Returns their directory, which belongs into
/// LD_LIBRARY_PATH.
pub fn build(place: &Place) -> Result<PathBuf, Failure> {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let from = repository().join("tests/fake-verbs");
    let cache = build_dir()?.join("fake-verbs");
    std::fs::create_dir_all(&cache).map_err(|e| format!("create {}: {e}", cache.display()))?;
    let wire = from.join("wire.h");
    let map = format!("-Wl,--version-script={}", from.join("lib/versions.map").display());
    let soname = format!("-Wl,-soname,{LIBRARY}");
    for (made, dir, options) in [
        (LIBRARY, "lib", &["-fPIC", "-shared", &soname, &map, "-Wl,-z,defs"][..]),
        (DAEMON, "daemon", &[]),
    ] {
        let mut all = sources(&from.join(dir))?;
        all.push(wire.clone());
        compile(&cache.join(made), &all, options)?;
    }
    let to = place.programs().join("fake-verbs");
    if !to.exists() {
        std::fs::create_dir(&to).map_err(|e| format!("create {}: {e}", to.display()))?;
        for made in [LIBRARY, DAEMON] {
            copy_program(&cache.join(made), &to.join(made))?;
        }
    }
    Ok(to)
}

/// A running daemon. It ends when this is dropped.
#[derive(Debug)]
pub struct Fabric {
    /// Where the library lies.
    pub libs: PathBuf,
    /// What FAKE_VERBS_DIR names.
    pub dir: PathBuf,
    user: User,
    daemon: Child,
    /// The library that programs have in front of it.
    preload: Option<PathBuf>,
}

fn serve(libs: &Path, dir: &Path, user: User, options: &[&str]) -> Result<Child, Failure> {
    let mut words: Vec<&str> = user.words().to_vec();
    let program = libs.join(DAEMON).display().to_string();
    words.push(&program);
    let mut c = Command::new(words[0]);
    c.args(&words[1..]).arg("serve").arg(dir).args(options);
    c.stdin(Stdio::null()).stdout(Stdio::piped());
    // SAFETY: the closure makes one system call, which takes numbers only.
    unsafe {
        c.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut daemon = c.spawn().map_err(|e| format!("{DAEMON}: {e}"))?;
    let mut line = String::new();
    let said = daemon.stdout.take().map(|o| BufReader::new(o).read_line(&mut line));
    if line != "ready\n" {
        let _ = daemon.kill();
        let status = daemon.wait();
        return Err(format!("{DAEMON} is not ready: {said:?}, {line:?}, {status:?}"));
    }
    Ok(daemon)
}

impl Fabric {
    /// A fabric of `user`'s, with these options and faults.
    pub fn new(place: &Place, label: &str, user: User, options: &[&str]) -> Result<Self, Failure> {
        Self::in_dir(place, place.work(label, user)?, user, options)
    }

    /// The same in a directory that is there.
    pub fn in_dir(place: &Place, dir: PathBuf, user: User, options: &[&str]) -> Result<Self, Failure> {
        let libs = build(place)?;
        let daemon = serve(&libs, &dir, user, options)?;
        Ok(Self {
            libs,
            dir,
            user,
            daemon,
            preload: None,
        })
    }

    /// Programs have belay's library in front of the stand-in, as under `belay launch`.
    pub fn with_library(mut self, place: &Place) -> Self {
        self.preload = Some(place.bin().join(SHADOWS));
        self
    }

    /// `command` as the fabric's user, on the host of this name.
    pub fn on(&self, host: &str, command: &[&str]) -> Command {
        let words = [self.user.words(), command].concat();
        let mut c = Command::new(words[0]);
        c.args(&words[1..]).envs(self.environment()).env("FAKE_VERBS_HOST", host);
        c
    }

    /// What leads a program to the library and to the fabric.
    pub fn environment(&self) -> Vec<(&'static str, &Path)> {
        let mut all: Vec<(_, &Path)> = vec![("LD_LIBRARY_PATH", &self.libs), ("FAKE_VERBS_DIR", &self.dir)];
        all.extend(self.preload.as_deref().map(|p| ("LD_PRELOAD", p)));
        all
    }

    /// The daemon's program.
    pub fn daemon(&self) -> PathBuf {
        self.libs.join(DAEMON)
    }

    /// Asks the daemon: `verb` and its words.
    pub fn ask(&self, verb: &str, words: &[&str]) -> Result<String, Failure> {
        let mut c = Command::new(self.daemon());
        c.arg(verb).arg(&self.dir).args(words);
        let o = output(c, LIMIT)?;
        if !o.status.success() {
            return Err(format!("{verb} {words:?}: {}", String::from_utf8_lossy(&o.stderr)));
        }
        Ok(String::from_utf8_lossy(&o.stdout).into_owned())
    }

    /// One of the daemon's counters.
    pub fn counter(&self, name: &str) -> Result<u64, Failure> {
        let all = self.ask("stats", &[])?;
        let value = all.lines().find_map(|l| l.strip_prefix(name)?.trim().parse().ok());
        value.ok_or(format!("no {name} in {all}"))
    }

    /// The daemon is killed and another takes its place: every host has other numbers.
    pub fn again(&mut self, options: &[&str]) -> Result<(), Failure> {
        self.end();
        self.daemon = serve(&self.libs, &self.dir, self.user, options)?;
        Ok(())
    }

    fn end(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.end();
    }
}
