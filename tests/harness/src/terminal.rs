//! A pseudo-terminal with a shell in it, for tests of job control. The harness types and reads the screen.

use crate::{procs, Failure};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A terminal and the process that leads its session.
#[derive(Debug)]
pub struct Terminal {
    master: std::fs::File,
    leader: Child,
    seen: String,
}

impl Terminal {
    /// Runs `c` as leader of a new session on a new terminal.
    pub fn new(mut c: Command) -> Result<Self, Failure> {
        let (mut m, mut s) = (-1, -1);
        let none = std::ptr::null_mut();
        // SAFETY: both numbers are written by openpty; the name, settings and size may be null.
        if unsafe { libc::openpty(&mut m, &mut s, none, none.cast(), none.cast()) } != 0 {
            return Err(format!("openpty: {}", std::io::Error::last_os_error()));
        }
        // SAFETY: openpty returned two descriptors that nobody else owns.
        let (m, s) = unsafe { (OwnedFd::from_raw_fd(m), OwnedFd::from_raw_fd(s)) };
        // SAFETY: fcntl on a descriptor that is open here: the child must not inherit the master side.
        unsafe { libc::fcntl(m.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
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
        unsafe { libc::fcntl(m.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        Ok(Terminal {
            master: m.into(),
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
