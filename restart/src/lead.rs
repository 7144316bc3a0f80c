//! The process that answers for the addresses of a job that has been restarted elsewhere, see `belay_plugins::lead`.
//!
//! It is no part of the job and no child of the agent, so that the job can go on when the agent is killed. It ends when nobody is left who could ask.

use crate::fail::{Outcome, RestartError};
use crate::sys;
use belay_kernel::{pidfd, proc, seccomp};
use belay_plugins::{lead, Book};
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// In a process of the job, before it has threads: its calls with addresses ask from now on. The descriptor's number is in `room`.
pub(crate) fn ask(room: &Range<RawFd>) -> io::Result<OwnedFd> {
    let listener = seccomp::ask_about(&lead::CALLS)?;
    sys::dup_into(listener.as_raw_fd(), room)
}

/// In the agent: takes descriptor `fd` of the process behind `pidfd`.
pub(crate) fn take(process: &OwnedFd, fd: u64) -> io::Result<OwnedFd> {
    pidfd::getfd(process.as_fd(), i32::try_from(fd).map_err(io::Error::other)?)
}

/// In the agent: makes the process that answers; the restarted programs have stacks that begin at `programs`.
pub(crate) fn begin(listeners: Vec<OwnedFd>, book: &Book, programs: &HashSet<u64>) -> Outcome<()> {
    // SAFETY: the agent has one thread.
    match unsafe { sys::fork(libc::CLONE_PARENT as u64, 0, 0) } {
        Ok(0) => answer_all(listeners, book, programs),
        Ok(_) => Ok(()),
        Err(e) => Err(RestartError::at("make the process that answers for addresses", e)),
    }
}

fn answer_all(mut listeners: Vec<OwnedFd>, book: &Book, programs: &HashSet<u64>) -> ! {
    sys::block_signals();
    // Neither the terminal's signals nor the job's end by its group are meant for it.
    let _ = sys::setsid();
    // SAFETY: a live, terminated string.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"belay-lead".as_ptr()) };
    close_all_but(&listeners);
    while !listeners.is_empty() {
        let mut polls: Vec<libc::pollfd> = listeners
            .iter()
            .map(|l| libc::pollfd {
                fd: l.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        // SAFETY: a live array of that length.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, -1) };
        for (listener, poll) in listeners.iter().zip(&polls) {
            if poll.revents & libc::POLLIN != 0 {
                // A thread that has been killed meanwhile asks nothing.
                if let Ok(question) = seccomp::receive(listener) {
                    let _ = seccomp::send(listener, &question, lead::answer(book, programs, &question));
                }
            }
        }
        let mut over = polls
            .iter()
            .map(|p| p.revents & libc::POLLIN == 0 && p.revents & libc::POLLHUP != 0);
        listeners.retain(|_| !over.next().unwrap_or(false));
    }
    sys::exit_now(0)
}

/// The job's descriptors are not to be held open here, nor the job directory's lock.
fn close_all_but(keep: &[OwnedFd]) {
    for fd in proc::fds(std::process::id().cast_signed()).unwrap_or_default() {
        if !keep.iter().any(|k| k.as_raw_fd() == fd) {
            // SAFETY: nothing else in this process uses its descriptors any more.
            unsafe { libc::close(fd) };
        }
    }
}
