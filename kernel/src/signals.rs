//! Signals: masks, dispositions, reading them from a descriptor, sending them on, being interrupted by one.

use crate::check;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A set of signals.
#[derive(Clone, Copy)]
pub struct SignalSet(libc::sigset_t);

impl std::fmt::Debug for SignalSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SignalSet")
    }
}

impl SignalSet {
    /// The set of `signals`.
    pub fn of(signals: impl IntoIterator<Item = i32>) -> Self {
        // SAFETY: sigset_t is plain data, for which zero is a valid value.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is valid for writing.
        unsafe { libc::sigemptyset(&raw mut set) };
        for s in signals {
            // SAFETY: as above; numbers out of range are refused by the call.
            unsafe { libc::sigaddset(&raw mut set, s) };
        }
        Self(set)
    }

    /// Makes this the calling thread's mask, and returns the mask it had.
    pub fn set_mask(&self) -> SignalSet {
        self.mask(libc::SIG_SETMASK)
    }

    /// Blocks these signals too, and returns the mask the thread had.
    pub fn block(&self) -> SignalSet {
        self.mask(libc::SIG_BLOCK)
    }

    /// Unblocks these signals, and returns the mask the thread had.
    pub fn unblock(&self) -> SignalSet {
        self.mask(libc::SIG_UNBLOCK)
    }

    /// Whether `signal` is in it.
    pub fn has(&self, signal: i32) -> bool {
        // SAFETY: the set is valid for reading.
        unsafe { libc::sigismember(&raw const self.0, signal) == 1 }
    }

    fn mask(&self, how: i32) -> SignalSet {
        let mut old = SignalSet::of([]);
        // SAFETY: both sets are valid; the call fails only for a wrong `how`.
        unsafe { libc::pthread_sigmask(how, &raw const self.0, &raw mut old.0) };
        old
    }
}

/// A disposition, to be put back later.
#[derive(Clone, Copy)]
pub struct Disposition(i32, libc::sigaction);

impl std::fmt::Debug for Disposition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Disposition of signal {}", self.0)
    }
}

impl Disposition {
    /// Lets `signal` do what it does by default (`SIG_DFL`), and returns the disposition it had.
    pub fn set_default(signal: i32) -> Disposition {
        Self::replace(signal, libc::SIG_DFL)
    }

    /// That of `signal`.
    pub fn of(signal: i32) -> Disposition {
        let mut now = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: a live structure; nothing is changed.
        unsafe { libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr()) };
        // SAFETY: sigaction is plain data, for which zero is a valid value too.
        Disposition(signal, unsafe { now.assume_init() })
    }

    /// Whether the signal is ignored.
    pub fn is_ignored(&self) -> bool {
        self.1.sa_sigaction == libc::SIG_IGN
    }

    /// Ignores `signal` (`SIG_IGN`), and returns the disposition it had.
    pub fn set_ignored(signal: i32) -> Disposition {
        Self::replace(signal, libc::SIG_IGN)
    }

    /// Lets `signal` end waits, and do nothing else.
    fn set_interrupting(signal: i32) -> Disposition {
        extern "C" fn interrupt(_: i32) {}
        let handler: extern "C" fn(i32) = interrupt;
        Self::replace(signal, handler as libc::sighandler_t)
    }

    fn replace(signal: i32, handler: libc::sighandler_t) -> Disposition {
        // SAFETY: sigaction is plain data, for which zero is a valid value.
        let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
        new.sa_sigaction = handler;
        let mut old = new;
        // SAFETY: both structures are valid, and the handler is no function, or one that does nothing.
        unsafe { libc::sigaction(signal, &raw const new, &raw mut old) };
        Disposition(signal, old)
    }

    /// Puts the disposition back.
    pub fn restore(&self) {
        // SAFETY: the structure came from sigaction.
        unsafe { libc::sigaction(self.0, &raw const self.1, std::ptr::null_mut()) };
    }
}

/// One received signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal {
    /// Its number.
    pub number: i32,
    /// `si_code`: above 0 when the kernel sent it.
    pub code: i32,
    /// Value sent with `sigqueue`.
    pub value: i32,
}

impl Signal {
    /// Whether a process sent it, not the kernel (such as the terminal driver).
    pub fn from_process(self) -> bool {
        self.code <= 0
    }

    /// Sends it on as it was received, with the value of `sigqueue`. A process that is gone is no error.
    pub fn pass_on(self, pid: i32) {
        if self.code == libc::SI_QUEUE {
            let value = libc::sigval {
                sival_ptr: std::ptr::without_provenance_mut(usize::try_from(self.value.cast_unsigned()).unwrap_or(0)),
            };
            // SAFETY: takes numbers only; the value is passed on, not followed.
            unsafe { libc::sigqueue(pid, self.number, value) };
        } else {
            kill(pid, self.number);
        }
    }
}

/// Sends `signal` to a process, or to a group or to all as `kill` does; one that is gone is no error.
pub fn kill(pid: i32, signal: i32) {
    let _ = send(pid, signal);
}

/// The same, and why it was not sent.
pub fn send(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::kill(pid, signal) }.into()).map(drop)
}

/// Changes the calling thread's mask as `how` (`SIG_*`) says, and returns the mask it had. Unlike those of a
/// [`SignalSet`], the masks have the signals too that the C library keeps to itself.
pub fn change_mask(how: i32, mask: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: both masks are live words of the kernel's size.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const mask,
            &raw mut old,
            size_of_val(&mask),
        )
    };
    old
}

/// Sends `signal` to the calling thread, which has it once it is not blocked.
pub fn raise(signal: i32) {
    // SAFETY: takes numbers only.
    unsafe { libc::raise(signal) };
}

/// Waits for a signal of `set`, which the thread has blocked; none when the wait was interrupted.
pub fn wait_for(set: &SignalSet) -> Option<Signal> {
    // SAFETY: siginfo_t is plain data, for which zero is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: both structures are valid.
    let number = unsafe { libc::sigwaitinfo(&raw const set.0, &raw mut info) };
    // SAFETY: sigwaitinfo has filled the structure in, or left the zeroes.
    let value = unsafe { info.si_value() };
    (number > 0).then(|| Signal {
        number,
        code: info.si_code,
        value: i32::try_from(value.sival_ptr.addr() & 0x7fff_ffff).unwrap_or(0),
    })
}

/// Takes a signal of `set`, which the thread has blocked, when there is one, and waits for it no longer than `limit`, or
/// until a handler has run.
pub fn take_within(set: &SignalSet, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    // SAFETY: set and time are valid; nobody asks for more about the signal.
    unsafe { libc::sigtimedwait(&raw const set.0, std::ptr::null_mut(), &raw const limit) };
}

/// Reads signals of a set that the thread has blocked.
#[derive(Debug)]
pub struct SignalFd(OwnedFd);

impl SignalFd {
    /// A descriptor for the signals of `set`.
    pub fn new(set: &SignalSet) -> io::Result<Self> {
        // SAFETY: the set is valid for reading.
        let fd = unsafe { libc::signalfd(-1, &raw const set.0, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        check(fd.into())?;
        // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Takes all that have arrived.
    pub fn drain(&self) -> Vec<Signal> {
        let mut out = Vec::new();
        loop {
            // SAFETY: the structure is plain data, for which zero is a valid value.
            let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
            let size = std::mem::size_of_val(&info);
            // SAFETY: `info` is valid for writing `size` bytes.
            let n = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut info).cast(), size) };
            if usize::try_from(n) != Ok(size) {
                return out;
            }
            out.push(Signal {
                number: i32::try_from(info.ssi_signo).unwrap_or(0),
                code: info.ssi_code,
                value: info.ssi_int,
            });
        }
    }
}

impl AsRawFd for SignalFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Does `work`, whose waits SIGALRM ends after `limit`, in the calling thread only: they fail with `Interrupted`.
pub fn interrupted_after<T>(limit: Duration, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    // The disposition is that of all threads.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let old = Disposition::set_interrupting(libc::SIGALRM);
    let mask = SignalSet::of([libc::SIGALRM]).unblock();
    let result = Alarm::set(limit).and_then(|alarm| {
        let result = work();
        drop(alarm);
        result
    });
    mask.set_mask();
    old.restore();
    result
}

/// Sends SIGALRM to the thread that has set it, until it is dropped.
struct Alarm(libc::timer_t);

impl Alarm {
    fn set(limit: Duration) -> io::Result<Self> {
        // SAFETY: sigevent is plain data, for which zero is a valid value.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        // SAFETY: has no preconditions.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer: libc::timer_t = std::ptr::null_mut();
        // SAFETY: both structures are valid.
        check(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) }.into())?;
        let alarm = Self(timer);
        let spec = |d: Duration| libc::timespec {
            tv_sec: d.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: d.subsec_nanos().into(),
        };
        let value = libc::itimerspec {
            it_value: spec(limit.max(Duration::from_nanos(1))),
            // For a signal that comes before the wait begins.
            it_interval: spec(Duration::from_millis(50)),
        };
        // SAFETY: the timer exists, `value` is valid for reading, and the old value is not asked for.
        check(unsafe { libc::timer_settime(alarm.0, 0, &raw const value, std::ptr::null_mut()) }.into())?;
        Ok(alarm)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer exists, and nobody uses it any more.
        unsafe { libc::timer_delete(self.0) };
    }
}
