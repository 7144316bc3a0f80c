//! System call filters that ask another process: `seccomp(2)` with a listener, `seccomp_unotify(2)`.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const SET_MODE_FILTER: libc::c_uint = 1;
const NEW_LISTENER: libc::c_ulong = 1 << 3;
/// Once the question has been read, only the process's death ends its wait for the answer (Linux 5.19).
const WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;
const ALLOW: u32 = 0x7fff_0000;
const ASK: u32 = 0x7fc0_0000;
const ARCH_X86_64: u32 = 0xc000_003e;
const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;
const CONTINUE: u32 = 1;
/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;

/// A call that waits for an answer.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Question {
    id: u64,
    /// The thread.
    pub tid: u32,
    flags: u32,
    /// Number of the call.
    pub number: i32,
    arch: u32,
    instruction: u64,
    /// Its arguments.
    pub args: [u64; 6],
}

/// What the call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// What the kernel says: it is carried out.
    Kernel,
    /// This.
    Value(i64),
    /// This error.
    Error(i32),
}

#[repr(C)]
struct Response {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

/// From now on the calls `numbers` of the calling thread, and of all threads and processes that it makes, ask whoever
/// holds the returned descriptor. Needs CAP_SYS_ADMIN in the user namespace.
pub fn ask_about(numbers: &[i64]) -> io::Result<OwnedFd> {
    let statement = |code: u32, k: u32, jt: usize, jf: usize| libc::sock_filter {
        code: code as u16,
        jt: jt as u8,
        jf: jf as u8,
        k,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let ret = libc::BPF_RET | libc::BPF_K;
    let mut program = vec![
        statement(load, ARCH, 0, 0),
        statement(equal, ARCH_X86_64, 0, numbers.len() + 1),
        statement(load, NUMBER, 0, 0),
    ];
    for (at, number) in numbers.iter().enumerate() {
        let number = u32::try_from(*number).map_err(io::Error::other)?;
        program.push(statement(equal, number, numbers.len() - at, 0));
    }
    program.push(statement(ret, ALLOW, 0, 0));
    program.push(statement(ret, ASK, 0, 0));
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_mut_ptr(),
    };
    let install = |flags: libc::c_ulong| {
        // SAFETY: the filter is live and as long as it says; the kernel copies it.
        crate::check(unsafe { libc::syscall(libc::SYS_seccomp, SET_MODE_FILTER, flags, &raw const filter) })
    };
    let fd = match install(NEW_LISTENER | WAIT_KILLABLE_RECV) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => install(NEW_LISTENER),
        installed => installed,
    }?;
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).map_err(io::Error::other)?) })
}

/// The next question; an error of kind `NotFound` where its thread has been killed meanwhile.
pub fn receive(listener: &OwnedFd) -> io::Result<Question> {
    let mut question = Question::default();
    // SAFETY: the structure is the kernel's, and zero, as it wants.
    crate::check(unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut question) }.into())?;
    Ok(question)
}

/// Answers a question. One whose thread is gone needs no answer.
pub fn send(listener: &OwnedFd, question: &Question, answer: Answer) -> io::Result<()> {
    let (value, error, flags) = match answer {
        Answer::Kernel => (0, 0, CONTINUE),
        Answer::Value(v) => (v, 0, 0),
        Answer::Error(e) => (0, -e, 0),
    };
    let response = Response {
        id: question.id,
        value,
        error,
        flags,
    };
    // SAFETY: the structure is the kernel's.
    let sent = crate::check(unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw const response) }.into());
    match sent {
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<Question>() as u64, RECEIVE >> 16 & 0x3fff);
        assert_eq!(size_of::<Response>() as u64, SEND >> 16 & 0x3fff);
    }
}
