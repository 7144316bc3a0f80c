//! flock, POSIX record locks, open-file-description locks and leases, from the `lock:` lines of `fdinfo`.
//!
//! Locks that belong to a description are set by the agent; POSIX locks belong to a descriptor table and are set by the task for which it is laid out.

use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::kind::{nothing, Kind, Never};
use crate::launcher::Numbers;
use crate::model::{DescId, Descriptors, Lock, LockKind, Table};
use crate::session::{Found, Session};
use crate::state::Part;
use crate::sys::{check, fd, fdinfo::FdInfo};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::os::fd::RawFd;

/// A POSIX lock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct PosixLock {
    pid: i32,
    fd: RawFd,
    lock: Lock,
}

/// Parses a `lock:` line behind its key: `1: POSIX  ADVISORY  WRITE 123 00:2b:1234 0 EOF`.
fn parse(text: &str) -> Result<Lock, Fault> {
    let w: Vec<&str> = text.split_whitespace().collect();
    let bad = || Fault::Refused(format!("cannot read its lock {text:?}"));
    let [_, kind, strength, access, pid, _, start, end] = w[..] else {
        return Err(bad());
    };
    let kind = match kind {
        "FLOCK" => LockKind::Flock,
        "POSIX" => LockKind::Posix,
        "OFDLCK" => LockKind::Ofd,
        "LEASE" => LockKind::Lease,
        _ => {
            return refuse(format!(
                "locks of kind {kind} ({strength}) cannot be restored; release it before the checkpoint"
            ))
        }
    };
    if kind == LockKind::Lease && strength == "BREAKING" {
        return not_now("its lease is being broken");
    }
    Ok(Lock {
        kind,
        write: access == "WRITE",
        start: start.parse().map_err(|_| bad())?,
        end: if end == "EOF" {
            None
        } else {
            Some(end.parse().map_err(|_| bad())?)
        },
        pid: pid.parse().map_err(|_| bad())?,
    })
}

/// Locks that belong to the description itself.
pub(crate) fn of_description(found: &Found) -> Result<Vec<Lock>, Fault> {
    let locks = found.info.all("lock:").map(parse).collect::<Result<Vec<_>, _>>()?;
    Ok(locks.into_iter().filter(|l| l.kind != LockKind::Posix).collect())
}

/// Whether the description holds a lease that an opening for reading would break.
pub(crate) fn is_leased_for_writing(found: &Found) -> bool {
    let mut locks = found.info.all("lock:").filter_map(|text| parse(text).ok());
    locks.any(|l| l.kind == LockKind::Lease && l.write)
}

impl Part for Vec<PosixLock> {
    const KEY: &'static str = "posix_locks";
}

/// The kind: record locks, which belong to a descriptor table.
pub(crate) struct PosixLocks;

impl Kind for PosixLocks {
    const NAME: &'static str = "PosixLock";
    const VERSION: u32 = 1;
    type State = Never;
    type Part = Vec<PosixLock>;

    /// They show only in the `fdinfo` of the process that owns them.
    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        refusals.extend(capture_posix(s, out.parts.of()).err());
    }

    nothing!(survey, recognise, capture, contents, check, check_part, numbers, ways, prepare, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

fn capture_posix(s: &mut Session<'_>, out: &mut Vec<PosixLock>) -> Result<(), Refusal> {
    for t in &s.tables {
        for slot in &t.slots {
            if s.found[slot.desc].stat.st_mode & libc::S_IFMT != libc::S_IFREG {
                continue;
            }
            let pid = t.pids[0];
            let named = |e: Fault| e.of(pid, format!("lock on fd {}", slot.fd));
            let info = FdInfo::read(s.task_of(pid), slot.fd).at("read fdinfo").map_err(named)?;
            for text in info.all("lock:") {
                let lock = parse(text).map_err(named)?;
                // A lock shows under every number of the description in the process: once is enough.
                let known = |l: &PosixLock| l.pid == pid && l.lock == lock && s.lookup(pid, l.fd) == Some(slot.desc);
                if lock.kind == LockKind::Posix && !out.iter().any(known) {
                    out.push(PosixLock { pid, fd: slot.fd, lock });
                }
            }
        }
    }
    Ok(())
}

fn flock(lock: &Lock) -> libc::flock {
    libc::flock {
        l_type: if lock.write { libc::F_WRLCK } else { libc::F_RDLCK } as _,
        l_whence: libc::SEEK_SET as _,
        l_start: lock.start,
        l_len: lock.end.map_or(0, |end| end.saturating_sub(lock.start).saturating_add(1)),
        l_pid: 0,
    }
}

fn set(raw: RawFd, cmd: i32, lock: &Lock) -> Result<(), Fault> {
    let flock = flock(lock);
    // SAFETY: the lock commands read a `flock`.
    check(unsafe { libc::fcntl(raw, cmd, &flock) }).at("lock it again (does another program hold the lock now?)")?;
    Ok(())
}

/// Takes a lock of `flock`, or a lease.
fn take(raw: RawFd, lock: &Lock) -> Result<(), Fault> {
    if lock.kind == LockKind::Lease {
        let kind = if lock.write { libc::F_WRLCK } else { libc::F_RDLCK };
        fd::fcntl(raw, libc::F_SETLEASE, kind).at("take its lease again")?;
        return Ok(());
    }
    let how = if lock.write { libc::LOCK_EX } else { libc::LOCK_SH };
    // SAFETY: flock takes numbers only.
    check(unsafe { libc::flock(raw, how | libc::LOCK_NB) }).at("lock it again (does another program hold the lock now?)")?;
    Ok(())
}

/// Whether the kernel shows who has taken it, although it belongs to the description.
fn is_signed(lock: &&Lock) -> bool {
    matches!(lock.kind, LockKind::Flock | LockKind::Lease)
}

/// The task that takes `lock`, one of `flock` or a lease, on description `id` again, and its descriptor: the one that the kernel is to show, where it still has the description, else any that has it. `None` where
/// none has, as it is on its way through a socket.
fn taker(d: &Descriptors, id: DescId, lock: &Lock) -> Option<(i32, RawFd)> {
    // What the launcher's standard streams are now is not the job's to lock.
    let desc = d.descriptions.get(id).filter(|desc| desc.kind.get::<Numbers>().is_none())?;
    let of = |table: &Table| {
        let slot = table.slots.iter().find(|s| s.desc == id)?;
        Some((*table.pids.first()?, slot.fd))
    };
    let holder = (desc.holder.fd >= 0).then_some((desc.holder.pid, desc.holder.fd));
    d.table(lock.pid).and_then(of).or(holder)
}

/// Takes the locks of `flock` and the leases that task `pid` is shown with, when its descriptors are laid out; called in it.
pub(crate) fn restore_signed(d: &Descriptors, pid: i32) -> Result<(), (RawFd, Fault)> {
    for id in d
        .table(pid)
        .into_iter()
        .flat_map(|t| &t.slots)
        .map(|s| s.desc)
        .collect::<BTreeSet<_>>()
    {
        for lock in d.descriptions[id].locks.iter().filter(is_signed) {
            if let Some((_, fd)) = taker(d, id, lock).filter(|(task, _)| *task == pid) {
                take(fd, lock).map_err(|e| (fd, e))?;
            }
        }
    }
    Ok(())
}

/// Sets the locks of description `id` again; those of `flock` and leases only where no task has it.
pub(crate) fn restore_of_description(raw: RawFd, id: DescId, d: &Descriptors) -> Result<(), Fault> {
    for lock in d.descriptions.get(id).into_iter().flat_map(|desc| &desc.locks) {
        match lock.kind {
            LockKind::Flock | LockKind::Lease if taker(d, id, lock).is_some() => {}
            LockKind::Flock | LockKind::Lease => take(raw, lock)?,
            LockKind::Ofd => set(raw, libc::F_OFD_SETLK, lock)?,
            LockKind::Posix => {}
        }
    }
    Ok(())
}

/// The POSIX locks of process `pid`: descriptor and argument of F_SETLK.
pub(crate) fn posix(locks: &[PosixLock], pid: i32) -> Vec<(RawFd, libc::flock)> {
    locks
        .iter()
        .filter(|l| l.pid == pid)
        .map(|l| (l.fd, flock(&l.lock)))
        .collect()
}

/// Sets the POSIX locks of process `pid` again; called in it.
pub(crate) fn restore_posix(locks: &[PosixLock], pid: i32) -> Result<(), (RawFd, Fault)> {
    for l in locks.iter().filter(|l| l.pid == pid) {
        set(l.fd, libc::F_SETLK, &l.lock).map_err(|e| (l.fd, e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let l = parse("1: POSIX  ADVISORY  WRITE 123 00:2b:1234 10 19").unwrap();
        assert_eq!((l.kind, l.write, l.start, l.end), (LockKind::Posix, true, 10, Some(19)));
        let l = parse("2: FLOCK  ADVISORY  READ 123 00:2b:1234 0 EOF").unwrap();
        assert_eq!(
            (l.kind, l.write, l.start, l.end, l.pid),
            (LockKind::Flock, false, 0, None, 123)
        );
        assert!(parse("1: POSIX").is_err());
        assert!(parse("1: LEASE  BREAKING  READ 123 00:2b:1234 0 EOF").is_err());
        assert!(parse("1: DELEG  ACTIVE    READ 123 00:2b:1234 0 EOF").is_err());
    }
}
