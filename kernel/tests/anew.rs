//! A task that has issued a call for its tracer goes back into the call in which it was stopped.

use belay_kernel::masks::ERESTARTNOHAND;
use belay_kernel::ptrace::{cont, cont_to_syscall, get_regs, interrupt, leave_call, seize, set_regs, wait, Event, Regs};
use std::time::Duration;

/// How a process ends that sleeps, is stopped there, issues a call for us, and `goes_on`: by 0 where it has slept to the end.
fn ends(goes_on: impl Fn(i32)) -> Option<Event> {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 200_000_000,
    };
    // SAFETY: the child makes system calls only, with a structure that is valid.
    let pid = unsafe {
        match libc::fork() {
            0 => libc::_exit(i32::from(libc::nanosleep(&raw const time, std::ptr::null_mut()) != 0)),
            pid => pid,
        }
    };
    std::thread::sleep(Duration::from_millis(50));
    seize(pid, libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL).unwrap();
    interrupt(pid).unwrap();
    assert_eq!(wait(pid, true).unwrap(), Some(Event::Interrupted));
    let stood = Regs {
        rax: ERESTARTNOHAND.cast_unsigned(),
        ..get_regs(pid).unwrap()
    };
    let call = Regs {
        rip: stood.rip - 2,
        rax: libc::SYS_getpid.cast_unsigned(),
        orig_rax: u64::MAX,
        ..stood
    };
    set_regs(pid, &call).unwrap();
    for _ in 0..2 {
        cont_to_syscall(pid).unwrap();
        assert_eq!(wait(pid, true).unwrap(), Some(Event::Syscall));
    }
    set_regs(pid, &stood).unwrap();
    goes_on(pid);
    wait(pid, true).unwrap()
}

#[test]
fn the_call_in_which_it_was_stopped_is_begun_anew() {
    assert_eq!(ends(|pid| cont(pid, 0).unwrap()), Some(Event::Ended(1 << 8)), "cut short");
    let anew = |pid| {
        assert_eq!(leave_call(pid).unwrap(), Event::Interrupted);
        cont(pid, 0).unwrap();
    };
    assert_eq!(ends(anew), Some(Event::Ended(0)));
}
