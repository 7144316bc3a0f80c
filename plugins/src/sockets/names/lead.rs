//! Answers for processes that make a call with an internet address, in a job whose addresses have changed.

use super::share::Share;
use super::{Book, View};
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use belay_kernel::seccomp::{Answer, Question};
use belay_kernel::{pidfd, proc, vm};
use std::collections::HashSet;
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
/// How long an attempt may take: nobody else is answered meanwhile.
const PATIENCE_MS: i32 = 20;
/// Largest address that a call may have.
const LARGEST: usize = size_of::<libc::sockaddr_storage>();

/// What the call returns, where the programs of the checkpoint are those whose stacks begin at `programs`. Hardly
/// waits: a `connect` that has to wait does so in the kernel, as it would have.
pub fn answer(book: &Book, programs: &HashSet<u64>, question: &Question) -> Answer {
    let call = i64::from(question.number);
    let view = || view(book, programs, question);
    let answered = if call == libc::SYS_connect || call == libc::SYS_bind {
        with_address(book, question, view, call == libc::SYS_connect)
    } else {
        for_address(book, question, view, call == libc::SYS_getpeername)
    };
    // What cannot be found out here, the kernel will say.
    answered.unwrap_or(Answer::Kernel)
}

/// What the caller knows of addresses.
fn view(book: &Book, programs: &HashSet<u64>, question: &Question) -> io::Result<View> {
    let stack = proc::stat(question.tid.cast_signed())?.start_stack;
    // 0 is what somebody sees who may not know.
    let is_old = stack == 0 || programs.contains(&stack);
    Ok(if is_old { book.view(stack) } else { View::Now })
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
fn with_address(book: &Book, question: &Question, view: impl Fn() -> io::Result<View>, connects: bool) -> io::Result<Answer> {
    let mut raw = vec![0u8; (question.args[2] as usize).min(LARGEST)];
    vm::read(question.tid.cast_signed(), question.args[1], &mut raw)?;
    let to = Addr(raw);
    let Some(at) = internet(&to) else { return Ok(Answer::Kernel) };
    let view = || view().map(|v| if connects { v } else { book.of_binder(at.ip(), v) });
    let mut instead = if connects { book.lead(at, view()?) } else { book.place(at) };
    if let (true, Some(likely)) = (connects, book.likely(at, view()?)) {
        let socket = socket(question)?;
        // A host that is none of the job's may have services of its own, and one that is called so today is meant by
        // who was started today.
        let mut places = [likely, at];
        if !book.is_known(at.ip()) || view()? == View::Now {
            places.reverse();
        }
        for place in places {
            let share = book.share(view()?).filter(|_| book.is_known(place.ip()));
            match attempt(socket.as_raw_fd(), share, &Addr::of(place, to.family()))? {
                Attempt::Done(answer) => return Ok(answer),
                // Its queue may be full: it will be tried for longer.
                Attempt::Pending if place == likely => instead = Some(likely),
                Attempt::Pending | Attempt::Refused => {}
            }
        }
    }
    let there = instead.unwrap_or(at);
    let share = if book.is_known(there.ip()) && (connects || at.port() == 0) {
        book.share(view()?)
    } else {
        None
    };
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
    share.try_bind(raw, &local).map(drop)
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

/// How an attempt to connect has ended.
enum Attempt {
    /// It has succeeded.
    Done(Answer),
    /// It has failed.
    Refused,
    /// Nothing was heard for so long.
    Pending,
}

/// Connects a stream socket to `to` if somebody there accepts that at once. If not, it is unconnected, but bound where
/// the node shares its host.
fn attempt(raw: RawFd, share: Option<Share>, to: &Addr) -> io::Result<Attempt> {
    let stream = sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_TYPE)? == libc::SOCK_STREAM;
    if !stream || !crate::sockets::tcp::is_unconnected(raw)? {
        return Ok(Attempt::Refused);
    }
    if let Some(share) = share {
        bind_first(raw, share)?;
    }
    let flags = fd::flags(raw)?;
    fd::set_flags(raw, flags | libc::O_NONBLOCK)?;
    let begun = sock::connect(raw, to);
    fd::set_flags(raw, flags)?;
    match begun {
        Ok(()) => return Ok(Attempt::Done(Answer::Value(0))),
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => return Ok(Attempt::Refused),
        Err(_) => {}
    }
    let settled = fd::wait(raw, libc::POLLOUT, PATIENCE_MS).unwrap_or(false);
    if settled && !crate::sockets::tcp::is_unconnected(raw)? {
        // The kernel ends the call as one that was interrupted.
        return Ok(Attempt::Done(Answer::Kernel));
    }
    sock::disconnect(raw)?;
    Ok(if settled { Attempt::Refused } else { Attempt::Pending })
}

/// `getsockname` and `getpeername`.
fn for_address(book: &Book, question: &Question, view: impl Fn() -> io::Result<View>, peer: bool) -> io::Result<Answer> {
    let socket = socket(question)?;
    let raw = socket.as_raw_fd();
    let is = if peer { sock::peer(raw)? } else { Some(sock::local(raw)?) };
    let Some((is, at)) = is.and_then(|is| Some((internet(&is)?, is))) else {
        return Ok(Answer::Kernel);
    };
    let stream = || Ok::<_, io::Error>(sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_TYPE)? == libc::SOCK_STREAM);
    let Some(shown) = (if peer {
        book.shown_peer(is, stream()?, view()?)
    } else {
        book.shown_own(is, view()?)
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
