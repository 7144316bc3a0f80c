//! The system calls this crate makes, with Rust types. Decisions are made by the callers.

pub(crate) mod apart;
pub(crate) mod diag;
pub(crate) mod fd;
pub(crate) mod fdinfo;
pub(crate) mod sock;
pub(crate) mod view;

use std::io;

/// Turns the result of a libc call that returns `int` into a `Result`, reading `errno` on -1.
pub(crate) fn check(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(ret)
    }
}

/// Turns the result of a libc call that returns `ssize_t` into a length.
pub(crate) fn check_len(ret: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::last_os_error())
}
