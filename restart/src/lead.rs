//! The process that answers for the addresses of a job that has been restarted elsewhere, see `belay_plugins::lead`,
//! and shows new programs of the job the namespaces that those before them are shown.
//!
//! A process that was started after the restart asks before it executes its program, so that the program sees nothing
//! else from its first instruction on. It is no part of the job and no child of the agent, so that the job can go on
//! when the agent is killed. It ends when nobody is left who could ask. Without it the kernel would refuse all that is
//! asked about, as if there were no such calls: another process stands by, and makes it anew when it is killed.

use crate::fail::{Outcome, RestartError};
use crate::shown::Shown;
use crate::sys;
use belay_kernel::seccomp::Answer;
use belay_kernel::{numbers, seccomp};
use belay_plugins::{lead, Book};
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Calls that execute a program.
const EXECUTIONS: [i64; 2] = [libc::SYS_execve, libc::SYS_execveat];

/// What the processes of a job ask about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Questions {
    /// Calls with addresses.
    pub(crate) addresses: bool,
    /// Executions.
    pub(crate) programs: bool,
}

impl Questions {
    pub(crate) fn any(self) -> bool {
        self.addresses || self.programs
    }

    fn calls(self) -> Vec<i64> {
        let addresses = lead::CALLS.iter().filter(|_| self.addresses);
        let programs = EXECUTIONS.iter().filter(|_| self.programs);
        addresses.chain(programs).copied().collect()
    }
}

/// In a process of the job, before it has threads: these calls ask from now on. The descriptor's number is in `room`.
pub(crate) fn ask(questions: Questions, room: &Range<RawFd>) -> io::Result<OwnedFd> {
    let listener = seccomp::ask_about(&questions.calls())?;
    sys::dup_into(listener, room)
}

/// In the agent: makes the process that answers; the restarted programs have stacks that begin at `programs`, and new
/// ones are shown the namespaces in `shown`.
pub(crate) fn begin(listeners: Vec<OwnedFd>, book: &Book, programs: &HashSet<u64>, shown: Option<&Shown>) -> Outcome<()> {
    match sys::fork(libc::CLONE_PARENT, 0, 0) {
        Ok(0) => stand_by(listeners, book, programs, shown),
        Ok(_) => Ok(()),
        Err(e) => Err(RestartError::at("make the process that answers for addresses", e)),
    }
}

/// Has a child that answers, as long as it is needed.
fn stand_by(listeners: Vec<OwnedFd>, book: &Book, programs: &HashSet<u64>, shown: Option<&Shown>) -> ! {
    sys::block_signals();
    // Neither the terminal's signals nor the job's end by its group are meant for it.
    let _ = sys::setsid();
    let _ = rustix::thread::set_name(c"belay-lead");
    let keep: Vec<RawFd> = listeners.iter().map(AsRawFd::as_raw_fd).collect();
    sys::close_all_but(&keep);
    loop {
        let child = match sys::fork(0, libc::SIGCHLD, 0) {
            Ok(0) => answer_all(listeners, book, programs, shown),
            Ok(child) => child,
            // Without a child this process answers itself, and nobody stands by.
            Err(_) => answer_all(listeners, book, programs, shown),
        };
        let killed = sys::wait(child, libc::__WALL).is_ok_and(|(_, status)| libc::WIFSIGNALED(status));
        if !killed {
            sys::exit_now(0)
        }
    }
}

fn answer_all(mut listeners: Vec<OwnedFd>, book: &Book, programs: &HashSet<u64>, shown: Option<&Shown>) -> ! {
    while !listeners.is_empty() {
        let mut polls: Vec<libc::pollfd> = listeners
            .iter()
            .map(|l| numbers::entry(l.as_raw_fd(), libc::POLLIN))
            .collect();
        let _ = numbers::poll_all(&mut polls, -1);
        for (listener, poll) in listeners.iter().zip(&polls) {
            if poll.revents & libc::POLLIN != 0 {
                // A thread that has been killed meanwhile asks nothing.
                if let Ok(question) = seccomp::receive(listener) {
                    let answer = if EXECUTIONS.contains(&question.number.into()) {
                        shown.into_iter().for_each(|s| s.show_new(question.tid));
                        Answer::Kernel
                    } else {
                        lead::answer(book, programs, &question)
                    };
                    let _ = seccomp::send(listener, &question, answer);
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
