//! The system calls of the event loop, as safe functions: signals, timers, wake-ups, waiting, processes.

use belay_kernel::check;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

fn fd(ret: i32) -> io::Result<OwnedFd> {
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(ret) })
}

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
        // SAFETY: both structures are valid, and the handler is no function.
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

/// A timer on the monotonic clock.
#[derive(Debug)]
pub struct Timer(OwnedFd);

impl Timer {
    /// A timer that is not armed.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes numbers only.
        fd(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) }).map(Self)
    }

    /// Arms the timer: first after `first`, then every `period` (once when zero). `None` disarms it.
    pub fn set(&self, first: Option<Duration>, period: Duration) -> io::Result<()> {
        let spec = |d: Duration| libc::timespec {
            tv_sec: d.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: d.subsec_nanos().into(),
        };
        let value = libc::itimerspec {
            it_value: spec(first.map_or(Duration::ZERO, |d| d.max(Duration::from_nanos(1)))),
            it_interval: spec(period),
        };
        // SAFETY: `value` is valid for reading, and the old value is not asked for.
        check(unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const value, std::ptr::null_mut()) }.into()).map(drop)
    }

    /// Takes the expiry; the number of expiries since the last call.
    pub fn take(&self) -> u64 {
        read_counter(&self.0)
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Lets another thread wake the event loop.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// A wake-up channel.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes numbers only.
        fd(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(Self)
    }

    /// Another handle on the same channel.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Wakes the loop.
    pub fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the buffer is valid for reading; a counter that is full already wakes the loop as well.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Takes the wake-ups.
    pub fn take(&self) {
        read_counter(&self.0);
    }
}

impl AsRawFd for Wake {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn read_counter(fd: &OwnedFd) -> u64 {
    let mut value = [0; 8];
    // SAFETY: the buffer is valid for writing its length.
    let n = unsafe { libc::read(fd.as_raw_fd(), value.as_mut_ptr().cast(), value.len()) };
    if n == 8 {
        u64::from_ne_bytes(value)
    } else {
        0
    }
}

/// Waits until one of `fds` (descriptor, events) is ready; returns what happened at each.
pub fn poll(fds: &[(RawFd, i16)]) -> io::Result<Vec<i16>> {
    let mut set: Vec<libc::pollfd> = fds
        .iter()
        .map(|(fd, events)| libc::pollfd {
            fd: *fd,
            events: *events,
            revents: 0,
        })
        .collect();
    loop {
        // SAFETY: `set` is valid for its length.
        let n = unsafe { libc::poll(set.as_mut_ptr(), set.len() as libc::nfds_t, -1) };
        if n >= 0 {
            return Ok(set.iter().map(|p| p.revents).collect());
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Reaps one child that has ended, or a traced thread: its number and status word.
pub fn reap() -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: `status` is valid for writing.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::__WALL) };
    (pid > 0).then_some((pid, status))
}

/// Waits until child `pid` has ended and reaps it.
pub fn wait(pid: i32) -> io::Result<i32> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is valid for writing.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
            return Ok(status);
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Signal by which child `pid` was stopped since the last call, if it was.
pub fn stopped_by(pid: i32) -> Option<i32> {
    // SAFETY: siginfo_t is plain data, for which zero is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let id = libc::id_t::try_from(pid).ok()?;
    // SAFETY: `info` is valid for writing.
    let r = unsafe { libc::waitid(libc::P_PID, id, &raw mut info, libc::WSTOPPED | libc::WNOHANG) };
    // SAFETY: waitid has filled the structure with a child's state, or left the zeroes.
    let (child, status) = unsafe { (info.si_pid(), info.si_status()) };
    (r == 0 && child == pid).then_some(status)
}

/// Sends `signal`; a process that is gone is no error.
pub fn kill(pid: i32, signal: i32) {
    // SAFETY: takes numbers only.
    unsafe { libc::kill(pid, signal) };
}

/// Sends `signal` on as it was received, with the value of `sigqueue`.
pub fn pass_on(pid: i32, signal: Signal) {
    if signal.code == libc::SI_QUEUE {
        let value = libc::sigval {
            sival_ptr: std::ptr::without_provenance_mut(usize::try_from(signal.value.cast_unsigned()).unwrap_or(0)),
        };
        // SAFETY: takes numbers only; the value is passed on, not followed.
        unsafe { libc::sigqueue(pid, signal.number, value) };
    } else {
        kill(pid, signal.number);
    }
}

/// When this returns, every signal to a process group that another process in it has received already was also sent to this process: the kernel
/// sends to all members under the lock that `setpgid` takes, whether it succeeds or not.
pub fn group_barrier() {
    // SAFETY: takes numbers only, and changes nothing.
    unsafe { libc::setpgid(0, libc::getpgrp()) };
}

/// Makes this process the one that orphaned descendants are given to.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }.into()).map(drop)
}

/// Forks. The child gets `None`.
///
/// # Safety
/// The calling process has one thread only.
pub unsafe fn fork() -> io::Result<Option<i32>> {
    // SAFETY: with one thread no lock can be left held in the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(pid)),
    }
}

/// Whether this process has a controlling terminal.
pub fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// A pair of connected sockets that keep messages apart.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [-1; 2];
    // SAFETY: `pair` is valid for writing two descriptors.
    let r = unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, pair.as_mut_ptr()) };
    check(r.into())?;
    Ok((fd(pair[0])?, fd(pair[1])?))
}

/// Sends one message; never raises SIGPIPE.
pub fn send(socket: BorrowedFd<'_>, message: &[u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid for reading its length.
    let n = unsafe { libc::send(socket.as_raw_fd(), message.as_ptr().cast(), message.len(), libc::MSG_NOSIGNAL) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Receives one message; 0 at the end. `wait` says whether to wait for one.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], wait: bool) -> io::Result<usize> {
    let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
    // SAFETY: the buffer is valid for writing its length.
    let n = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Closes every descriptor from 3 on that would have been inherited by the command: it has its own copies by now.
pub fn close_inherited() {
    for fd in belay_kernel::proc::fds(std::process::id().cast_signed()).unwrap_or_default() {
        // SAFETY: takes numbers only.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        if fd > 2 && flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
            // SAFETY: this program opens everything with close-on-exec, so the descriptor was inherited and no object here owns it.
            unsafe { libc::close(fd) };
        }
    }
}

/// Opens `/dev/null` in place of standard descriptors that are closed, so that nothing of ours lands there. The command sees them closed.
pub fn fill_standard_descriptors() {
    for fd in 0..3 {
        // SAFETY: takes numbers only.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            // SAFETY: the path is a zero-terminated string. The lowest free number is `fd`.
            unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        }
    }
}

/// Puts `/dev/null` in place of descriptor `target`.
pub fn replace_by_null(target: RawFd) -> io::Result<()> {
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    // SAFETY: both are descriptors; whoever uses `target` goes on with the null device.
    check(unsafe { libc::dup2(null.as_raw_fd(), target) }.into()).map(drop)
}

/// Takes (`LOCK_EX`) the lock of `file`; without `wait` fails with `WouldBlock` when another process holds it.
pub fn lock(file: BorrowedFd<'_>, wait: bool) -> io::Result<()> {
    let how = if wait { libc::LOCK_EX } else { libc::LOCK_EX | libc::LOCK_NB };
    // SAFETY: takes numbers only.
    check(unsafe { libc::flock(file.as_raw_fd(), how) }.into()).map(drop)
}

/// Waits for the lock of `file`, but no longer than `limit`; whether it was taken. Uses the real-time interval timer.
pub fn lock_within(file: BorrowedFd<'_>, limit: Duration) -> io::Result<bool> {
    extern "C" fn interrupt(_: i32) {}
    let handler: extern "C" fn(i32) = interrupt;
    let old = Disposition::replace(libc::SIGALRM, handler as libc::sighandler_t);
    let set = |first: Duration, period: Duration| {
        let t = |d: Duration| libc::timeval {
            tv_sec: d.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_usec: d.subsec_micros().into(),
        };
        let value = libc::itimerval {
            it_value: t(first),
            it_interval: t(period),
        };
        // SAFETY: `value` is valid for reading, and the old value is not asked for.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const value, std::ptr::null_mut()) };
    };
    // The period covers a signal that comes before the wait begins.
    set(limit, Duration::from_millis(50));
    let result = lock(file, true);
    set(Duration::ZERO, Duration::ZERO);
    old.restore();
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(e) => Err(e),
    }
}

/// Gives the lock of `file` back, for every process that shares the open file.
pub fn unlock(file: BorrowedFd<'_>) {
    // SAFETY: takes numbers only.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) };
}

/// The effective user.
pub fn euid() -> u32 {
    // SAFETY: has no preconditions.
    unsafe { libc::geteuid() }
}

/// The effective group.
pub fn egid() -> u32 {
    // SAFETY: has no preconditions.
    unsafe { libc::getegid() }
}

/// Whether the file at `path` has the extended attribute `name`.
pub fn has_attribute(path: &Path, name: &CStr) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: both are zero-terminated strings, and no value is asked for.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) >= 0 }
}

/// Whether executing the file at `path` never changes identity: its file system is mounted `nosuid`, or this process may gain no privileges.
pub fn ignores_setuid(path: &Path) -> bool {
    // SAFETY: takes numbers only.
    if unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) } == 1 {
        return true;
    }
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: statvfs is plain data, for which zero is a valid value.
    let mut fs: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is zero-terminated, `fs` is valid for writing.
    let r = unsafe { libc::statvfs(path.as_ptr(), &raw mut fs) };
    r == 0 && fs.f_flag & libc::ST_NOSUID != 0
}

/// Name of this host.
pub fn host() -> String {
    // SAFETY: utsname is plain data, for which zero is a valid value.
    let mut name: libc::utsname = unsafe { std::mem::zeroed() };
    // SAFETY: `name` is valid for writing.
    unsafe { libc::uname(&raw mut name) };
    let bytes: Vec<u8> = name
        .nodename
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| c.cast_unsigned())
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Seconds since the epoch.
pub fn now_unix_s() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// Ends this process as the command ended: with the same status, or by the same signal (without a core file of its own).
pub fn exit_like(status: i32) -> ! {
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: the structure is valid for reading.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
        Disposition::replace(signal, libc::SIG_DFL);
        // SAFETY: takes numbers only; the signal is delivered when the mask is lifted below.
        unsafe { libc::raise(signal) };
        SignalSet::of([]).set_mask();
        std::process::exit(128 + signal);
    }
    std::process::exit(libc::WEXITSTATUS(status))
}

/// Writes one line to standard error. A terminal in `tostop` mode must not stop the agent for it.
pub fn say(line: &str) {
    let mask = SignalSet::of([libc::SIGTTOU]).block();
    let text = format!("belay: {line}\n");
    // SAFETY: the buffer is valid for reading its length. What cannot be said (descriptor closed, disk full) is in the log.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    mask.set_mask();
}
