//! Filters of sockets (`SO_ATTACH_FILTER`): the kernel gives the program out again that has been attached.

use crate::fault::{refuse, At, Fault};
use crate::sys::sock;
use belay_kernel::numbers::lend;
use belay_kernel::sockets::{self, INSTRUCTION};
use std::io;
use std::os::fd::RawFd;

/// The instructions of the filter of `raw`, none where it has none.
pub(super) fn read(raw: RawFd) -> Result<Option<Vec<u8>>, Fault> {
    let count =
        match lend(raw).and_then(|fd| sockets::filter(fd, &mut [])) {
            Err(e) if e.raw_os_error() == Some(libc::EACCES) => return refuse(
                "has a filter of the newer kind (SO_ATTACH_BPF), which the kernel does not give out; run the program without it",
            ),
            count => count.at("ask for its filter")?,
        };
    let mut program = vec![0u8; count * INSTRUCTION];
    let got = lend(raw)
        .and_then(|fd| sockets::filter(fd, &mut program))
        .at("read its filter")?;
    if got != count {
        return refuse("its filter changed while it was read");
    }
    Ok(Some(program))
}

/// Gives `raw` this filter, where it has another one; says whether it had.
pub(super) fn restore(raw: RawFd, program: &[u8]) -> Result<bool, Fault> {
    if read(raw)?.is_some_and(|now| now == program) {
        return Ok(false);
    }
    let done = if program.is_empty() {
        sock::set(raw, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0i32)
    } else {
        attach(raw, program)
    };
    done.at("set SO_ATTACH_FILTER")?;
    Ok(true)
}

/// Gives `raw` a filter of these instructions.
pub(crate) fn attach(raw: RawFd, program: &[u8]) -> io::Result<()> {
    sockets::attach_filter(lend(raw)?, program)
}
