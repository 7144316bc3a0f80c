//! What `ptrace::peek` says of a task is what `wait` says afterwards, and is not taken away by looking: an agent that
//! is killed in between must not have swallowed a signal.

use belay_kernel::ptrace::{cont, cont_to_syscall, interrupt, peek, seize, wait, Event};

/// A child that does `work` and then waits for signals.
fn child(work: impl FnOnce()) -> i32 {
    // SAFETY: the child makes system calls only.
    match unsafe { libc::fork() } {
        0 => {
            // Nothing is left of a test that fails.
            // SAFETY: takes numbers only.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            work();
            loop {
                // SAFETY: has no preconditions.
                unsafe { libc::pause() };
            }
        }
        pid => pid,
    }
}

fn send(pid: i32, signal: i32) {
    // SAFETY: takes numbers only.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Waits for the next event of `pid`, which is `expected`, and looks at it twice before it is taken.
fn next_is(pid: i32, expected: Event) {
    // SAFETY: siginfo_t is plain data, for which zero is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT | libc::__WALL;
    // SAFETY: `info` is valid for writing.
    let found = unsafe { libc::waitid(libc::P_PID, pid.cast_unsigned(), &raw mut info, flags) };
    assert_eq!(found, 0);
    for _ in 0..2 {
        assert_eq!(peek(pid).unwrap(), Some(expected));
    }
    assert_eq!(wait(pid, true).unwrap(), Some(expected));
    if !matches!(expected, Event::Ended(_)) {
        assert_eq!(peek(pid).unwrap(), None, "it has been taken");
    }
}

#[test]
fn stops_and_ends_are_seen_and_stay() {
    let pid = child(|| ());
    seize(pid, libc::PTRACE_O_TRACESYSGOOD).unwrap();
    assert_eq!(peek(pid).unwrap(), None);
    interrupt(pid).unwrap();
    next_is(pid, Event::Interrupted);
    cont_to_syscall(pid).unwrap();
    next_is(pid, Event::Syscall);
    cont(pid, 0).unwrap();
    send(pid, libc::SIGUSR1);
    next_is(pid, Event::Signal(libc::SIGUSR1));
    cont(pid, 0).unwrap();
    send(pid, libc::SIGSTOP);
    next_is(pid, Event::Signal(libc::SIGSTOP));
    cont(pid, libc::SIGSTOP).unwrap();
    next_is(pid, Event::GroupStop(libc::SIGSTOP));
    send(pid, libc::SIGKILL);
    next_is(pid, Event::Ended(libc::SIGKILL));
    assert!(peek(pid).is_err(), "nobody is there any more");
}

#[test]
fn an_exit_status_is_that_of_wait() {
    // SAFETY: has no preconditions.
    let pid = child(|| unsafe { libc::_exit(7) });
    next_is(pid, Event::Ended(7 << 8));
}
