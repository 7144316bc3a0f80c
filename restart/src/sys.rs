//! System calls that neither `std` nor the `kernel` crate offers, as small checked functions.

use belay_image::model::Credentials;
use belay_kernel::{identity, ioctl, numbers, proc, signals};
use rustix::process::{DumpableBehavior, Gid, Pid, Uid, WaitOptions};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Turns the result of a raw system call into a `Result`.
pub(crate) fn raw(ret: isize) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::from_raw_os_error(i32::try_from(-ret).unwrap_or(libc::EINVAL)))
}

pub(crate) use belay_kernel::process::fork_as as fork;

/// Maps a stack of `bytes` for a task that shares this program's memory; its lowest address.
pub(crate) fn stack(bytes: usize) -> io::Result<u64> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    belay_kernel::place::map(None, bytes as u64, prot, libc::MAP_NORESERVE | libc::MAP_STACK, None)
}

pub(crate) use belay_kernel::process::end as exit_now;

/// Waits for child `pid` (-1: any) with `options`; (pid, status), pid 0 when nothing has happened.
pub(crate) fn wait(pid: i32, options: libc::c_int) -> io::Result<(i32, i32)> {
    let options = WaitOptions::from_bits_retain(options.cast_unsigned());
    let waited = rustix::io::retry_on_intr(|| match pid {
        -1 => rustix::process::wait(options),
        pid => rustix::process::waitpid(Pid::from_raw(pid), options),
    })?;
    Ok(waited.map_or((0, 0), |(pid, status)| (pid.as_raw_pid(), status.as_raw())))
}

/// Takes these users and groups, for which the calling thread is privileged, if it has others.
pub(crate) fn become_user(creds: &Credentials) -> io::Result<()> {
    let ([r, e, s, _], [gr, ge, gs, _]) = (creds.uids, creds.gids);
    // Where nothing is to change, the caller need not be allowed to change anything.
    if identity::of_thread()? == ([r, e, s], [gr, ge, gs]) {
        return Ok(());
    }
    let groups: Vec<Gid> = creds.groups.iter().map(|g| Gid::from_raw_unchecked(*g)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    let [gr, ge, gs] = [gr, ge, gs].map(Gid::from_raw_unchecked);
    rustix::thread::set_thread_res_gid(gr, ge, gs)?;
    let [r, e, s] = [r, e, s].map(Uid::from_raw_unchecked);
    Ok(rustix::thread::set_thread_res_uid(r, e, s)?)
}

pub(crate) use belay_kernel::process::set_group as setpgid;

/// `setsid()`.
pub(crate) fn setsid() -> io::Result<()> {
    rustix::process::setsid()?;
    Ok(())
}

pub(crate) use belay_kernel::signals::send as kill;

/// Makes the calling process one that others like it may look into.
pub(crate) fn be_dumpable() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

/// Makes the calling process the one to which orphans below it go.
pub(crate) fn become_reaper() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(Pid::INIT))?)
}

/// Blocks every signal.
pub(crate) fn block_signals() {
    signals::change_mask(libc::SIG_BLOCK, u64::MAX);
}

/// Writes one line to standard error.
pub(crate) fn say(line: &str) {
    let text = format!("belay: {line}\n");
    // What cannot be said (descriptor closed, disk full) is in the log.
    let _ = rustix::io::write(rustix::stdio::stderr(), text.as_bytes());
}

/// Duplicates `fd` at a number in `room`, close-on-exec.
pub(crate) fn dup_into(fd: impl AsFd, room: &Range<RawFd>) -> io::Result<OwnedFd> {
    let fd = rustix::io::fcntl_dupfd_cloexec(fd, room.start)?;
    if room.contains(&fd.as_raw_fd()) {
        return Ok(fd);
    }
    Err(io::Error::from_raw_os_error(libc::EMFILE))
}

/// Foreground process group of terminal `tty`; 0 where it has none.
pub(crate) fn tcgetpgrp(tty: BorrowedFd<'_>) -> io::Result<i32> {
    ioctl::get(tty, ioctl::FOREGROUND)
}

/// Makes `pgid` the foreground process group. SIGTTOU must be blocked or ignored.
pub(crate) fn tcsetpgrp(tty: BorrowedFd<'_>, pgid: i32) -> io::Result<()> {
    ioctl::set(tty, ioctl::SET_FOREGROUND, &pgid)
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

/// In a process of belay's own that is to outlive the agent: the job's descriptors are not to be held open there, nor the
/// job directory's lock.
pub(crate) fn close_all_but(keep: &[RawFd]) {
    for fd in proc::fds(std::process::id().cast_signed()).unwrap_or_default() {
        if !keep.contains(&fd) {
            // Nothing else in this process uses its descriptors any more.
            let _ = numbers::close(fd, fd);
        }
    }
}

/// Puts `/dev/null` in place of the standard descriptors.
pub(crate) fn release_standard_descriptors() {
    let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") else {
        return; // they stay as they are
    };
    for fd in 0..3 {
        // Nothing here uses the descriptors that are replaced.
        let _ = numbers::replace_standard(fd, &null);
    }
}

/// Gives up every capability; the process stays one that others like it may look into.
pub(crate) fn give_up_capabilities() -> io::Result<()> {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets {
        effective: none,
        permitted: none,
        inheritable: none,
    };
    rustix::thread::set_capabilities(None, sets)?;
    be_dumpable()
}
