//! A pseudo-terminal with a shell in it, for tests of job control. The harness types and reads the screen.

use crate::{procs, Failure};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn opened(fd: i32, what: &str) -> Result<i32, Failure> {
    (fd >= 0)
        .then_some(fd)
        .ok_or_else(|| format!("{what}: {}", std::io::Error::last_os_error()))
}

/// The master of a new terminal, and the number in its name.
pub fn master() -> Result<(OwnedFd, u32), Failure> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: a live, terminated string.
    let fd = opened(unsafe { libc::open(c"/dev/ptmx".as_ptr(), flags) }, "open /dev/ptmx")?;
    // SAFETY: the kernel has just returned it, and nobody else owns it.
    let master = unsafe { OwnedFd::from_raw_fd(fd) };
    let (mut number, unlocked) = (0, 0);
    // SAFETY: writes a number.
    let asked = unsafe { libc::ioctl(fd, libc::TIOCGPTN, &mut number) };
    opened(asked, "ask for its number")?;
    // SAFETY: reads a number.
    let unlocked = unsafe { libc::ioctl(fd, libc::TIOCSPTLCK, &unlocked) };
    opened(unlocked, "unlock its other side")?;
    Ok((master, number))
}

/// Masters of terminals that nobody uses, by the numbers in their names, so that no other terminal is called by a
/// number up to `last`.
pub fn take_names(last: u32) -> Result<BTreeMap<u32, OwnedFd>, Failure> {
    let mut taken = BTreeMap::new();
    while taken.last_key_value().is_none_or(|(number, _)| *number < last) {
        let (master, number) = master()?;
        taken.insert(number, master);
    }
    Ok(taken)
}

/// A terminal and the process that leads its session.
#[derive(Debug)]
pub struct Terminal {
    master: std::fs::File,
    leader: Child,
    seen: String,
}

impl Terminal {
    /// Runs `c` as leader of a new session on a new terminal.
    pub fn new(c: Command) -> Result<Self, Failure> {
        Self::on(master()?.0, c)
    }

    /// Runs `c` as leader of a new session on the terminal of `master`.
    pub fn on(master: OwnedFd, mut c: Command) -> Result<Self, Failure> {
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        // SAFETY: takes numbers only.
        let slave = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) };
        // SAFETY: the kernel has just returned it, and nobody else owns it.
        let s = unsafe { OwnedFd::from_raw_fd(opened(slave, "open the other side of a terminal")?) };
        let dup = || s.try_clone().map(Stdio::from).map_err(|e| format!("duplicate terminal: {e}"));
        c.stdin(dup()?).stdout(dup()?).stderr(dup()?);
        // SAFETY: setsid and ioctl are async-signal-safe; the child's descriptor 0 is the terminal.
        unsafe {
            c.pre_exec(|| {
                libc::setsid();
                libc::ioctl(0, libc::TIOCSCTTY, 0);
                Ok(())
            });
        }
        let leader = c.spawn().map_err(|e| format!("start {:?}: {e}", c.get_program()))?;
        drop((c, s));
        // SAFETY: fcntl on a descriptor that is open here.
        unsafe { libc::fcntl(master.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        Ok(Terminal {
            master: master.into(),
            leader,
            seen: String::new(),
        })
    }

    /// PID of the session's leader.
    pub fn pid(&self) -> i32 {
        self.leader.id() as i32
    }

    /// Types `keys`.
    pub fn type_keys(&mut self, keys: &str) -> Result<(), Failure> {
        self.master.write_all(keys.as_bytes()).map_err(|e| format!("type: {e}"))
    }

    /// Reads until `text` has appeared since the last match; the part before it is returned.
    pub fn expect(&mut self, text: &str) -> Result<String, Failure> {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let mut b = [0u8; 4096];
            match self.master.read(&mut b) {
                Ok(n) => self.seen.push_str(&String::from_utf8_lossy(&b[..n])),
                Err(_) => std::thread::sleep(Duration::from_millis(3)),
            }
            if let Some(i) = self.seen.find(text) {
                let before = self.seen[..i].to_owned();
                self.seen.drain(..i + text.len());
                return Ok(before);
            }
            if Instant::now() > end {
                return Err(format!("the terminal did not show {text:?} within 20 s, but {:?}", self.seen));
            }
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        procs::kill_tree(self.pid());
        self.leader.wait().ok();
    }
}
