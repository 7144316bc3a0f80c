//! Threads that wait for a futex. A stop takes them out of its queue: whoever wakes before they are back finds nobody there.

use crate::ptrace::Regs;
use crate::{patience, proc};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// System calls: futex, futex_waitv, futex_wait.
const FUTEX: u64 = 202;
const FUTEX_WAITV: u64 = 449;
const FUTEX2_WAIT: u64 = 455;
/// Operations of `futex` that wait for a wake-up: FUTEX_WAIT, FUTEX_WAIT_BITSET, FUTEX_WAIT_REQUEUE_PI.
const WAITS: [u64; 3] = [0, 9, 11];
/// FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME.
const FLAGS: u64 = 128 | 256;
/// `restart_syscall`, which carries a wait with a time-out on.
pub const RESTART_SYSCALL: u64 = 219;
/// A thread that has run for so long since it was let go is not on its way back into its wait any more, nanoseconds.
const ON_THE_WAY: u64 = 5_000_000;

/// Waits, while `word` of memory that processes share has this value, until it is woken, a signal comes or `limit` has
/// passed: who calls looks at it again.
pub fn wait(word: &AtomicU32, value: u32, limit: Duration) {
    let limit = time(limit);
    // SAFETY: a live word and a live time.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const limit) };
}

fn time(limit: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    }
}

/// Waits, while all of `words` of memory that processes share have this value, until one is woken, a signal comes or
/// `limit` has passed: who calls looks at them again. Before Linux 5.16, and of more words than the kernel takes, the
/// others are looked at only after that.
pub fn wait_any(words: &[&AtomicU32], value: u32, limit: Duration) {
    /// FUTEX_WAITV_MAX
    const MOST: usize = 128;
    /// FUTEX_32
    const WORD_OF_32_BITS: u32 = 2;
    #[repr(C)]
    struct Waiter {
        value: u64,
        word: u64,
        flags: u32,
        reserved: u32,
    }
    let [first, _, ..] = words else {
        match words {
            [only] => wait(only, value, limit),
            _ => std::thread::sleep(limit),
        }
        return;
    };
    let waiter = |word: &&AtomicU32| Waiter {
        value: value.into(),
        word: word.as_ptr() as u64,
        flags: WORD_OF_32_BITS,
        reserved: 0,
    };
    let waiters: Vec<Waiter> = words.iter().take(MOST).map(waiter).collect();
    let mut until = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut until) };
    let nanos = until.tv_nsec + i64::from(limit.subsec_nanos());
    until.tv_sec = until
        .tv_sec
        .saturating_add_unsigned(limit.as_secs())
        .saturating_add(nanos / 1_000_000_000);
    until.tv_nsec = nanos % 1_000_000_000;
    // SAFETY: live waiters with live words, and a live time.
    let done = unsafe {
        libc::syscall(
            FUTEX_WAITV as libc::c_long,
            waiters.as_ptr(),
            waiters.len(),
            0,
            &raw const until,
            libc::CLOCK_MONOTONIC,
        )
    };
    let error = std::io::Error::last_os_error().raw_os_error();
    // A container's filter may answer what it likes to a call that it does not know.
    if done < 0 && !matches!(error, Some(libc::EAGAIN | libc::ETIMEDOUT | libc::EINTR)) {
        wait(first, value, limit);
    }
}

/// Wakes all that wait for `word` of memory that processes share.
pub fn wake(word: &AtomicU32) {
    // SAFETY: a live word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Wakes all that wait for `word`, and, where `held` is not 0, makes it 0 and wakes all that wait for that: by one
/// system call, so that a thread which is killed at any moment has done all of it or nothing. (The kernel's list of what
/// a dead thread holds passes over words that are 0.)
pub fn wake_and_release(word: &AtomicU32, held: &AtomicU32) {
    // As FUTEX_OP in linux/futex.h: the operation, the comparison, and their arguments, which are 0.
    const SET_ZERO_IF_NOT: i32 = libc::FUTEX_OP_SET << 28 | libc::FUTEX_OP_CMP_NE << 24;
    let all = i32::MAX;
    // SAFETY: live words, which the call changes as an atomic operation does.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE_OP,
            all,
            libc::c_long::from(all),
            held.as_ptr(),
            SET_ZERO_IF_NOT,
        )
    };
}

/// Waits and wakes of tasks that run with the thread-local storage of another: nothing of the C library's is touched, not
/// even its error number.
pub mod bare {
    use belay_abi::syscall;
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    const FUTEX: usize = libc::SYS_futex as usize;

    /// As [`wait`](super::wait).
    pub fn wait(word: &AtomicU32, value: u32, limit: Duration) {
        let limit = super::time(limit);
        // SAFETY: the word and the time are live; every result means: look again.
        unsafe { syscall!(FUTEX, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const limit) };
    }

    /// The same for a word of memory that no other process has, without an end.
    pub fn wait_private(word: &AtomicU32, value: u32) {
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is live; every result means: look again.
        unsafe { syscall!(FUTEX, word.as_ptr(), operation, value, 0) };
    }

    /// Wakes all that wait for such a word.
    pub fn wake_private(word: &AtomicU32) {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is live.
        unsafe { syscall!(FUTEX, word.as_ptr(), operation, i32::MAX) };
    }
}

/// Whether system call `number` with second argument `operation` waits for a futex.
pub fn is_wait(number: u64, operation: u64) -> bool {
    matches!(number, FUTEX_WAITV | FUTEX2_WAIT) || number == FUTEX && WAITS.contains(&(operation & !FLAGS))
}

/// Whether thread `tid` sleeps in such a call, or in one that is carried on and may be one.
pub fn sleeps_in_wait(tid: i32) -> bool {
    let text = proc::text(format!("/proc/{tid}/syscall"));
    text.is_ok_and(|text| call(&text).is_some_and(|(number, operation)| number == RESTART_SYSCALL || is_wait(number, operation)))
}

/// Number and second argument in `/proc/TID/syscall`; nothing of a thread that runs.
fn call(text: &str) -> Option<(u64, u64)> {
    let mut fields = text.split_ascii_whitespace();
    let number = fields.next()?.parse().ok()?;
    let operation = fields.nth(1)?.strip_prefix("0x")?;
    Some((number, u64::from_str_radix(operation, 16).ok()?))
}

/// Whether a thread, stopped with these registers, goes back into a wait for a futex: into call `number`, or what carries that on.
pub fn goes_back(number: u64, regs: &Regs) -> bool {
    let begins_anew = matches!(regs.rax.cast_signed(), -516 | -514 | -512) && regs.orig_rax.cast_signed() >= 0;
    begins_anew && is_wait(number, regs.rsi)
}

/// Threads that have been let go, on their way back into their waits.
#[derive(Debug, Default)]
pub struct Returning(Vec<(i32, Turns)>);

impl Returning {
    /// Notes thread `tid`, which is stopped and about to be let go.
    pub fn add(&mut self, tid: i32) {
        self.0.extend(Turns::of(tid).map(|before| (tid, before)));
    }

    /// Waits until each of them sleeps again, has ended, or has gone on to something else, for at most `limit`.
    pub fn wait(mut self, limit: Duration) {
        patience::within(limit, || {
            self.0.retain(|(tid, before)| is_on_its_way(*tid, before));
            self.0.is_empty()
        });
    }
}

/// A thread's use of processors, from `/proc/TID/schedstat`.
#[derive(Debug, Clone, Copy)]
struct Turns {
    /// Nanoseconds in all.
    time: u64,
    /// How often it has got one.
    count: u64,
}

impl Turns {
    fn of(tid: i32) -> Option<Self> {
        let text = proc::text(format!("/proc/{tid}/schedstat")).ok()?;
        let mut fields = text.split_ascii_whitespace().map(str::parse);
        let time = fields.next()?.ok()?;
        let count = fields.nth(1)?.ok()?;
        Some(Self { time, count })
    }
}

/// Before it gets a processor, a thread that has been let go looks as if it slept where it was stopped.
fn is_on_its_way(tid: i32, before: &Turns) -> bool {
    let Some(now) = Turns::of(tid) else { return false };
    let runs = || proc::text(format!("/proc/{tid}/syscall")).is_ok_and(|text| text.starts_with("running"));
    // A kernel that does not count says 0.
    let waits_for_processor = now.count == before.count && now.count > 0;
    waits_for_processor || now.time.saturating_sub(before.time) < ON_THE_WAY && runs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    #[test]
    fn whoever_of_several_is_woken_ends_the_wait() {
        const LONG: Duration = Duration::from_secs(10);
        let words: Vec<AtomicU32> = (0..3).map(|_| AtomicU32::new(0)).collect();
        let all: Vec<&AtomicU32> = words.iter().collect();
        let begin = Instant::now();
        wait_any(&all, 0, Duration::from_millis(20));
        assert!(begin.elapsed() >= Duration::from_millis(20), "nobody has woken it");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                words[2].store(1, Ordering::Release);
                wake(&words[2]);
            });
            wait_any(&all, 0, LONG);
        });
        // One of them has another value.
        wait_any(&all, 0, LONG);
        assert!(begin.elapsed() < LONG);
    }

    #[test]
    fn waits_are_told_from_other_operations() {
        assert!(is_wait(FUTEX, 0) && is_wait(FUTEX, 128) && is_wait(FUTEX, 9 | 128 | 256) && is_wait(FUTEX_WAITV, 5));
        // FUTEX_WAKE, FUTEX_LOCK_PI, read.
        assert!(!is_wait(FUTEX, 1) && !is_wait(FUTEX, 6 | 128) && !is_wait(0, 0));
        assert_eq!(call("202 0x7f00 0x80 0x0 0x0 0x0 0x0 0x7ffe 0x7f01"), Some((FUTEX, 128)));
        assert_eq!(call("running"), None);
        assert_eq!(call("-1 0x7ffe 0x7f01"), None);
    }

    #[test]
    fn who_waits_for_either_word_is_woken_by_its_release() {
        static ORDER: AtomicU32 = AtomicU32::new(1);
        static HELD: AtomicU32 = AtomicU32::new(7);
        let (tell, told) = channel();
        let sleepers = [(&ORDER, 1), (&HELD, 7), (&HELD, 7)].map(|(word, value)| {
            let tell = tell.clone();
            std::thread::spawn(move || {
                // SAFETY: takes nothing.
                tell.send(unsafe { libc::gettid() }).unwrap();
                wait(word, value, Duration::from_secs(60));
            })
        });
        let begin = Instant::now();
        for _ in &sleepers {
            let tid = told.recv().unwrap();
            while !sleeps_in_wait(tid) {
                std::thread::yield_now();
            }
        }
        wake_and_release(&ORDER, &HELD);
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert_eq!((ORDER.load(Ordering::SeqCst), HELD.load(Ordering::SeqCst)), (1, 0));
        wake_and_release(&ORDER, &HELD);
        assert_eq!(HELD.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn one_that_sleeps_has_returned_and_one_that_computes_is_not_waited_for_long() {
        static WORD: AtomicU32 = AtomicU32::new(0);
        let (tell, told) = channel();
        let computes = tell.clone();
        let sleeper = std::thread::spawn(move || {
            // SAFETY: takes nothing; then a futex that lives as long as the program.
            unsafe {
                tell.send(libc::gettid()).unwrap();
                libc::syscall(
                    libc::SYS_futex,
                    WORD.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    0,
                    0,
                );
            }
        });
        let tid = told.recv().unwrap();
        while !sleeps_in_wait(tid) {
            std::thread::yield_now();
        }
        let before = Turns { time: 0, count: 0 };
        assert!(!is_on_its_way(tid, &before));
        assert!(is_on_its_way(tid, &Turns::of(tid).unwrap()));
        Returning(vec![(tid, before)]).wait(Duration::from_secs(60));
        let busy = std::thread::spawn(move || {
            // SAFETY: takes nothing and cannot fail.
            computes.send(unsafe { libc::gettid() }).unwrap();
            while WORD.load(Ordering::Relaxed) == 0 {
                std::hint::spin_loop();
            }
        });
        Returning(vec![(told.recv().unwrap(), before)]).wait(Duration::from_secs(60));
        WORD.store(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { libc::syscall(libc::SYS_futex, WORD.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1) };
        sleeper.join().unwrap();
        busy.join().unwrap();
    }
}
