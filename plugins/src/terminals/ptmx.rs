//! What makes pseudo-terminals, and what the kernel calls them.

use crate::fault::{At, Fault};
use crate::sys::fd;
use belay_kernel::ioctl;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Where terminals have their names.
pub(super) const FOLDER: &str = "/dev/pts";
/// What makes terminals in the devpts beside it.
pub(super) const MAKER: &str = "/dev/ptmx";
/// What makes terminals where it lies, for whom its mode lets.
pub(super) const MAKER_THERE: &str = "/dev/pts/ptmx";

/// The name of terminal `number`.
pub(super) fn path(number: u32) -> PathBuf {
    Path::new(FOLDER).join(number.to_string())
}

/// A new master, whose slave has the smallest number that is free.
pub(super) fn new_master() -> Result<(OwnedFd, u32), Fault> {
    let flags = libc::O_RDWR | libc::O_NOCTTY;
    let fd = match fd::open(Path::new(MAKER), flags, 0) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => fd::open(Path::new(MAKER_THERE), flags, 0),
        opened => opened,
    };
    let fd = fd.at("open /dev/ptmx")?;
    let number = ioctl::get(&fd, ioctl::TERMINAL_NUMBER).at("ask for its number")?;
    Ok((fd, number))
}
