//! Signals: masks, dispositions, reading them from a descriptor, sending them on.

use super::fd;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

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
    #[cfg(test)]
    pub(super) fn has(&self, signal: i32) -> bool {
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
    /// Sets `signal` to `SIG_DFL` or `SIG_IGN` and returns the disposition it had.
    pub fn replace(signal: i32, handler: libc::sighandler_t) -> Disposition {
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

/// Reads signals of a set that the thread has blocked.
#[derive(Debug)]
pub struct SignalFd(OwnedFd);

impl SignalFd {
    /// A descriptor for the signals of `set`.
    pub fn new(set: &SignalSet) -> io::Result<Self> {
        // SAFETY: the set is valid for reading.
        fd(unsafe { libc::signalfd(-1, &raw const set.0, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) }).map(Self)
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
