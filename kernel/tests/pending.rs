//! `ptrace::pending` tells of every signal, also where signals arrive at the thread that asks: the kernel then answers
//! with fewer than there are.

use belay_kernel::ptrace::{interrupt, pending, seize, wait, Event};

const SIGNALS: usize = 1000;

extern "C" fn ignore(_: i32) {}

/// Has a signal arrive at this thread every 20 microseconds, until the process ends.
fn disturb() {
    // SAFETY: these structures are plain data, for which zero is a valid value, and valid during the calls.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
        let mut event: libc::sigevent = std::mem::zeroed();
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGUSR1;
        event.sigev_notify_thread_id = libc::gettid();
        let mut timer: libc::timer_t = std::mem::zeroed();
        let made = libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
        assert_eq!(made, 0);
        let mut time: libc::itimerspec = std::mem::zeroed();
        time.it_value.tv_nsec = 20_000;
        time.it_interval.tv_nsec = 20_000;
        assert_eq!(libc::timer_settime(timer, 0, &raw const time, std::ptr::null_mut()), 0);
    }
}

#[test]
fn none_is_missing_where_signals_arrive_at_the_tracer() {
    let signal = libc::SIGRTMIN();
    // SAFETY: the set is valid during the calls; the child makes system calls only.
    let pid = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, signal);
        assert_eq!(
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()),
            0
        );
        match libc::fork() {
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
            pid => pid,
        }
    };
    for _ in 0..SIGNALS {
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
    seize(pid, 0).unwrap();
    interrupt(pid).unwrap();
    assert_eq!(wait(pid, true).unwrap(), Some(Event::Interrupted));
    disturb();
    for _ in 0..50 {
        assert_eq!(pending(pid, true).unwrap().len(), SIGNALS);
        assert_eq!(pending(pid, false).unwrap().len(), 0);
    }
    // SAFETY: takes numbers only.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
}
