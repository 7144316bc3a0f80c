//! Filters of sockets (`SO_ATTACH_FILTER`): the kernel gives the program out again that has been attached.

use crate::fault::{refuse, At, Fault};
use crate::sys::sock;
use std::io;
use std::os::fd::RawFd;

/// `SO_GET_FILTER` reads what this attaches.
const FILTER: i32 = libc::SO_ATTACH_FILTER;
/// Bytes of an instruction (`struct sock_filter`).
const INSTRUCTION: usize = 8;

/// The instructions of the filter of `raw`, none where it has none.
pub(super) fn read(raw: RawFd) -> Result<Option<Vec<u8>>, Fault> {
    let count =
        match sock::get_counted(raw, libc::SOL_SOCKET, FILTER, &mut []) {
            Err(e) if e.raw_os_error() == Some(libc::EACCES) => return refuse(
                "has a filter of the newer kind (SO_ATTACH_BPF), which the kernel does not give out; run the program without it",
            ),
            count => count.at("ask for its filter")?,
        };
    let mut program = vec![0u8; count * INSTRUCTION];
    let got = sock::get_counted(raw, libc::SOL_SOCKET, FILTER, &mut program).at("read its filter")?;
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
    let mut code: Vec<libc::sock_filter> = program
        .chunks_exact(INSTRUCTION)
        .map(|i| libc::sock_filter {
            code: u16::from_ne_bytes([i[0], i[1]]),
            jt: i[2],
            jf: i[3],
            k: u32::from_ne_bytes([i[4], i[5], i[6], i[7]]),
        })
        .collect();
    let all = libc::sock_fprog {
        len: u16::try_from(code.len()).map_err(io::Error::other)?,
        filter: code.as_mut_ptr(),
    };
    // `code` lives until the kernel has copied it.
    sock::set(raw, libc::SOL_SOCKET, FILTER, &all)
}
