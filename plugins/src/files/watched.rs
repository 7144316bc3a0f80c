//! Files of the kernel's that somebody waits for: what a description of them has noted down beside its offset.

use crate::fault::{refuse, At, Fault};
use crate::session::Found;
use crate::sys::fd;
use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};
use std::os::fd::RawFd;

const SYSFS: i64 = 0x6265_6572;
const CGROUP2: i64 = 0x6367_7270;
/// The device that shows the kernel's log.
const KERNEL_LOG: u64 = libc::makedev(1, 11);

/// What a description has noted down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Noted {
    /// Nothing that can be known.
    #[default]
    Nothing,
    /// A file of sysfs or a control group has not changed since it was read.
    Unchanged,
    /// All records of the kernel's log have been read.
    AllRead,
}

impl Noted {
    /// What description `raw` has noted down.
    pub(super) fn of(raw: RawFd, found: &Found) -> Result<Self, Fault> {
        if found.stat.st_mode & libc::S_IFMT == libc::S_IFCHR {
            let may_read = found.access() != libc::O_WRONLY;
            let is_read = may_read && found.stat.st_rdev == KERNEL_LOG && !has(raw, libc::POLLIN)?;
            return Ok(if is_read { Noted::AllRead } else { Noted::Nothing });
        }
        let file_system = fd::fs_magic(raw).at("read the type of its file system")?;
        let name = found.link.to_string_lossy();
        let of_pressure = name.starts_with("/proc/pressure/") || file_system == CGROUP2 && name.ends_with(".pressure");
        if of_pressure && found.access() != libc::O_RDONLY && has_trigger(raw) {
            return refuse("waits for pressure stalls (PSI), for which the kernel tells nobody; close it before the checkpoint");
        }
        match file_system {
            SYSFS | CGROUP2 if !has(raw, libc::POLLPRI)? => Ok(Noted::Unchanged),
            _ => Ok(Noted::Nothing),
        }
    }

    /// Has a new description note that down.
    pub(super) fn restore(self, raw: RawFd) -> Result<(), Fault> {
        match self {
            Noted::Nothing => {}
            // One that has just been opened has changed. What it holds now is read, whether it can be or not.
            Noted::Unchanged => drop(fd::read_at(raw, &mut [0], 0)),
            Noted::AllRead => drop(fd::seek(raw, SeekFrom::End(0)).at("go to its end")?),
        }
        Ok(())
    }
}

fn has(raw: RawFd, event: i16) -> Result<bool, Fault> {
    fd::poll(raw, event).map(|events| events & event != 0).at("poll")
}

/// Whether the description has a trigger, which shows before the kernel looks at what is written. (To poll it would
/// take an event away.)
fn has_trigger(raw: RawFd) -> bool {
    fd::write(raw, b"?").is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY))
}
