//! Answers for processes that make a call with an internet address, in a job whose addresses have changed.

use super::share::Share;
use super::Book;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use belay_kernel::seccomp::{Answer, Question};
use belay_kernel::{pidfd, proc, vm};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// The calls.
pub const CALLS: [i64; 4] = [
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];
/// Largest address that a call may have.
const LARGEST: usize = size_of::<libc::sockaddr_storage>();

/// What the call returns. Never waits: a `connect` that has to wait does so in the kernel, as it would have.
pub fn answer(book: &Book, question: &Question) -> Answer {
    let call = i64::from(question.number);
    let answered = if call == libc::SYS_connect || call == libc::SYS_bind {
        with_address(book, question, call == libc::SYS_connect)
    } else {
        for_address(book, question, call == libc::SYS_getpeername)
    };
    // What cannot be found out here, the kernel will say.
    answered.unwrap_or(Answer::Kernel)
}

fn internet(at: &Addr) -> Option<SocketAddr> {
    Some(SocketAddr::new(at.ip()?, at.port()))
}

/// The caller's descriptor that is the call's first argument.
fn socket(question: &Question) -> io::Result<OwnedFd> {
    let tid = question.tid.cast_signed();
    let process = proc::Status::read(tid)?.list("Tgid").first().copied();
    let process = i32::try_from(process.unwrap_or_default()).map_err(io::Error::other)?;
    // The descriptor is the low half of the register.
    pidfd::getfd(pidfd::open(process)?.as_fd(), (question.args[0] as u32).cast_signed())
}

/// `connect` and `bind`.
fn with_address(book: &Book, question: &Question, connects: bool) -> io::Result<Answer> {
    let mut raw = vec![0u8; (question.args[2] as usize).min(LARGEST)];
    vm::read(question.tid.cast_signed(), question.args[1], &mut raw)?;
    let to = Addr(raw);
    let Some(at) = internet(&to) else { return Ok(Answer::Kernel) };
    let instead = if connects { book.lead(at) } else { book.place(at) };
    let there = instead.unwrap_or(at);
    let share = book
        .share()
        .filter(|_| book.is_known(there.ip()) && (connects || at.port() == 0));
    if instead.is_none() && share.is_none() {
        return Ok(Answer::Kernel);
    }
    let socket = socket(question)?;
    let raw = socket.as_raw_fd();
    let there = Addr::of(there, to.family());
    let stream = sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_TYPE)? == libc::SOCK_STREAM;
    let done = match share.filter(|_| stream) {
        Some(share) if !connects => share.bind(raw, &there).map(|()| Answer::Value(0)),
        Some(share) => bind_first(raw, share).and_then(|()| match instead {
            Some(_) => connect(raw, stream, &there),
            None => Ok(Answer::Kernel),
        }),
        None if instead.is_none() => Ok(Answer::Kernel),
        None if connects => connect(raw, stream, &there),
        None => sock::bind(raw, &there).map(|()| Answer::Value(0)),
    };
    done.or_else(|e| e.raw_os_error().map(Answer::Error).ok_or(e))
}

/// Gives a socket that has no port yet one by which its peer knows the node.
fn bind_first(raw: RawFd, share: Share) -> io::Result<()> {
    let local = sock::local(raw)?;
    if local.port() != 0 || local.ip().is_none() {
        return Ok(());
    }
    share.bind(raw, &local)
}

fn connect(raw: RawFd, stream: bool, to: &Addr) -> io::Result<Answer> {
    if stream && !crate::sockets::tcp::is_unconnected(raw)? {
        // An attempt is under way, or over: the kernel knows, and does not look at the address.
        return Ok(Answer::Kernel);
    }
    let flags = fd::flags(raw)?;
    if !stream || flags & libc::O_NONBLOCK != 0 {
        return sock::connect(raw, to).map(|()| Answer::Value(0));
    }
    // The attempt begins here; the caller's own call then waits for its end.
    fd::set_flags(raw, flags | libc::O_NONBLOCK)?;
    let begun = sock::connect(raw, to);
    fd::set_flags(raw, flags)?;
    match begun {
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(Answer::Kernel),
        begun => begun.map(|()| Answer::Value(0)),
    }
}

/// `getsockname` and `getpeername`.
fn for_address(book: &Book, question: &Question, peer: bool) -> io::Result<Answer> {
    let socket = socket(question)?;
    let raw = socket.as_raw_fd();
    let is = if peer { sock::peer(raw)? } else { Some(sock::local(raw)?) };
    let Some((is, at)) = is.and_then(|is| Some((internet(&is)?, is))) else {
        return Ok(Answer::Kernel);
    };
    let stream = || Ok::<_, io::Error>(sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_TYPE)? == libc::SOCK_STREAM);
    let Some(shown) = (if peer {
        book.shown_peer(is, stream()?)
    } else {
        book.shown_own(is)
    }) else {
        return Ok(Answer::Kernel);
    };
    let shown = Addr::of(shown, at.family());
    let tid = question.tid.cast_signed();
    let mut room = [0u8; 4];
    vm::read(tid, question.args[2], &mut room)?;
    let Ok(room) = usize::try_from(i32::from_ne_bytes(room)) else {
        return Ok(Answer::Error(libc::EINVAL));
    };
    let length = u32::try_from(shown.0.len()).map_err(io::Error::other)?;
    vm::write(tid, question.args[1], &shown.0[..room.min(shown.0.len())])?;
    vm::write(tid, question.args[2], &length.to_ne_bytes())?;
    Ok(Answer::Value(0))
}
