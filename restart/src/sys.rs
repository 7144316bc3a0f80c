//! System calls that neither `std` nor the `kernel` crate offers, as small checked functions.

use belay_abi::restore::CloneArgs;
use belay_image::model::Credentials;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;

const PR_GET_TID_ADDRESS: libc::c_int = 40;
const CLONE_CHILD_SETTID: u64 = 0x0100_0000;
const CLONE_CHILD_CLEARTID: u64 = 0x0020_0000;

/// Turns the result of a raw system call into a `Result`.
pub(crate) fn raw(ret: isize) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::from_raw_os_error(i32::try_from(-ret).unwrap_or(libc::EINVAL)))
}

/// Turns the result of a libc call into a `Result`.
pub(crate) fn libc_result(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(ret)
    }
}

/// Forks with `clone3`. In the child the result is 0. `set_tid` is the wanted identifier, 0 for any.
///
/// libc keeps the thread identifier in its thread descriptor; the kernel is asked to update it there, as libc's own `fork` does.
///
/// # Safety
/// The process must have one thread, so that no lock is held by a thread that the child lacks; or the child must issue
/// system calls only.
pub(crate) unsafe fn fork(flags: u64, exit_signal: i32, set_tid: i32) -> io::Result<i32> {
    let mut tid_address = 0u64;
    // SAFETY: the kernel writes one word to a live variable.
    let known = unsafe { libc::prctl(PR_GET_TID_ADDRESS, &raw mut tid_address) } == 0 && tid_address != 0;
    let args = CloneArgs {
        flags: flags | if known { CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID } else { 0 },
        child_tid: tid_address,
        exit_signal: exit_signal as u64,
        set_tid: (&raw const set_tid) as u64 * u64::from(set_tid != 0),
        set_tid_size: u64::from(set_tid != 0),
        ..CloneArgs::default()
    };
    // SAFETY: without CLONE_VM this is a fork: both sides return here, each with its own copy of memory; the caller
    // vouches for one thread.
    let r = unsafe { belay_abi::syscall!(libc::SYS_clone3 as usize, &raw const args, size_of::<CloneArgs>()) };
    raw(r).map(|pid| pid as i32)
}

/// Maps a stack of `bytes` for a task that shares this program's memory; its lowest address.
pub(crate) fn stack(bytes: usize) -> io::Result<u64> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(at as u64)
}

/// Ends the calling process at once, without running exit handlers.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Waits for child `pid` (-1: any) with `options`; (pid, status), pid 0 when nothing has happened.
pub(crate) fn wait(pid: i32, options: libc::c_int) -> io::Result<(i32, i32)> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a live int.
        match libc_result(unsafe { libc::waitpid(pid, &mut status, options) }) {
            Ok(pid) => return Ok((pid, status)),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Waits while `word` is `value`, at most `timeout_ms`. Nothing of libc's is touched.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, timeout_ms: i64) {
    let t = libc::timespec {
        tv_sec: timeout_ms / 1000,
        tv_nsec: (timeout_ms % 1000) * 1_000_000,
    };
    // SAFETY: the word and the timeout are live; every result means: look again.
    unsafe { belay_abi::syscall!(libc::SYS_futex as usize, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const t) };
}

/// Wakes all waiters of `word` in all processes.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word is live.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Takes these users and groups, for which the calling thread is privileged, if it has others.
pub(crate) fn become_user(creds: &Credentials) -> io::Result<()> {
    let ([r, e, s, _], [gr, ge, gs, _]) = (creds.uids, creds.gids);
    let (mut uids, mut gids) = ([0; 3], [0; 3]);
    let [real, own, saved] = uids.each_mut().map(std::ptr::from_mut);
    // SAFETY: three live numbers.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_getresuid, real, own, saved) })?;
    let [real, own, saved] = gids.each_mut().map(std::ptr::from_mut);
    // SAFETY: as above.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_getresgid, real, own, saved) })?;
    // Where nothing is to change, the caller need not be allowed to change anything.
    if (uids, gids) == ([r, e, s], [gr, ge, gs]) {
        return Ok(());
    }
    // SAFETY: a live list of so many numbers.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_setgroups, creds.groups.len(), creds.groups.as_ptr()) })?;
    // SAFETY: takes numbers only.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_setresgid, gr, ge, gs) })?;
    // SAFETY: as above.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_setresuid, r, e, s) }).map(drop)
}

/// `setpgid(pid, pgid)`.
pub(crate) fn setpgid(pid: i32, pgid: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    libc_result(unsafe { libc::setpgid(pid, pgid) }).map(drop)
}

/// `setsid()`.
pub(crate) fn setsid() -> io::Result<()> {
    // SAFETY: takes nothing.
    libc_result(unsafe { libc::setsid() }).map(drop)
}

/// `kill(pid, signal)`.
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    libc_result(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// `prctl` with numbers only.
pub(crate) fn prctl(option: i32, a: u64, b: u64) -> io::Result<i32> {
    // SAFETY: used with options whose arguments are numbers.
    libc_result(unsafe { libc::prctl(option, a, b, 0, 0) })
}

/// Blocks every signal.
pub(crate) fn block_signals() {
    sigprocmask(libc::SIG_BLOCK, u64::MAX);
}

/// Changes the mask of blocked signals.
pub(crate) fn sigprocmask(how: i32, mask: u64) -> u64 {
    let mut old = 0u64;
    // SAFETY: both masks are live words of the kernel's size.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const mask, &raw mut old, 8) };
    old
}

/// Writes one line to standard error.
pub(crate) fn say(line: &str) {
    let text = format!("belay: {line}\n");
    // SAFETY: the buffer is valid for reading its length. What cannot be said (descriptor closed, disk full) is in the log.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Duplicates `fd` at a number in `room`, close-on-exec.
pub(crate) fn dup_into(fd: RawFd, room: &Range<RawFd>) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = libc_result(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, room.start) })?;
    // SAFETY: the kernel has just returned it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    if room.contains(&fd.as_raw_fd()) {
        return Ok(fd);
    }
    Err(io::Error::from_raw_os_error(libc::EMFILE))
}

/// Foreground process group of terminal `tty`.
pub(crate) fn tcgetpgrp(tty: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: takes numbers only.
    libc_result(unsafe { libc::tcgetpgrp(tty.as_raw_fd()) })
}

/// Makes `pgid` the foreground process group. SIGTTOU must be blocked or ignored.
pub(crate) fn tcsetpgrp(tty: BorrowedFd<'_>, pgid: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    libc_result(unsafe { libc::tcsetpgrp(tty.as_raw_fd(), pgid) }).map(drop)
}

/// The controlling terminal, if there is one.
pub(crate) fn terminal() -> Option<OwnedFd> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/tty")
        .ok()
        .map(OwnedFd::from)
}

/// Puts `/dev/null` in place of the standard descriptors.
pub(crate) fn release_standard_descriptors() {
    let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") else {
        return; // they stay as they are
    };
    for fd in 0..3 {
        // SAFETY: takes numbers only; nothing here uses the descriptors that are replaced.
        unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&null), fd) };
    }
}

/// Gives up every capability; the process stays one that others like it may look into.
pub(crate) fn give_up_capabilities() -> io::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    let none = [0u32; 6];
    // SAFETY: both arrays have the sizes of the kernel's structures of this version.
    belay_kernel::check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) })?;
    prctl(libc::PR_SET_DUMPABLE, 1, 0).map(drop)
}
