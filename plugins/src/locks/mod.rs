//! flock, POSIX record locks, open-file-description locks and leases, from the `lock:` lines of `fdinfo`.
//!
//! Locks that belong to a description are set by the agent; POSIX locks belong to a descriptor table and are set by the
//! task for which it is laid out.

use crate::builder::Built;
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::kind::{nothing, Kind, Never};
use crate::launcher::Numbers;
use crate::model::{DescId, Descriptors, Holder, Lock, LockKind, Table};
use crate::session::{Found, Session};
use crate::state::Part;
use crate::sys::fdinfo::FdInfo;
use belay_kernel::fcntl::{self, Owner};
use belay_kernel::numbers::lend;
use rustix::fs::FlockOperation;
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

/// Locks that belong to the table whose `fdinfo` this is.
pub(crate) fn of_table(info: &FdInfo) -> Result<Vec<Lock>, Fault> {
    let locks = info.all("lock:").map(parse).collect::<Result<Vec<_>, _>>()?;
    Ok(locks.into_iter().filter(|l| l.kind == LockKind::Posix).collect())
}

/// Record locks of all tables, with a description through which each is held. Those of any kind of file can be.
#[derive(Debug, Default)]
pub(crate) struct TableLocks(Vec<(DescId, PosixLock)>);

impl TableLocks {
    /// A lock shows under every number of the description in the table: once is enough.
    pub(crate) fn note(&mut self, holder: Holder, desc: DescId, locks: Vec<Lock>) {
        for lock in locks {
            let known = |(of, l): &(DescId, PosixLock)| (*of, l.pid, l.lock) == (desc, holder.pid, lock);
            if !self.0.iter().any(known) {
                let Holder { pid, fd } = holder;
                self.0.push((desc, PosixLock { pid, fd, lock }));
            }
        }
    }
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
    fn finish(s: &mut Session<'_>, out: &mut Descriptors, _: &mut Vec<Refusal>) {
        let TableLocks(all) = s.sets.take().unwrap_or_default();
        let locks = all.into_iter().map(|(_, lock)| lock);
        out.parts.of::<Vec<PosixLock>>().extend(locks);
    }

    nothing!(survey, recognise, capture, contents, check, check_part, numbers, ways, prepare, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
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

fn set(raw: RawFd, owner: Owner, lock: &Lock) -> Result<(), Fault> {
    let set = lend(raw).and_then(|fd| fcntl::set_lock(fd, owner, &flock(lock)));
    set.at("lock it again (does another program hold the lock now?)")
}

/// Takes a lock of `flock`, or a lease.
fn take(raw: RawFd, lock: &Lock) -> Result<(), Fault> {
    if lock.kind == LockKind::Lease {
        let kind = if lock.write { libc::F_WRLCK } else { libc::F_RDLCK };
        return lend(raw).and_then(|fd| fcntl::set_lease(fd, kind)).at("take its lease again");
    }
    let how = if lock.write {
        FlockOperation::NonBlockingLockExclusive
    } else {
        FlockOperation::NonBlockingLockShared
    };
    let locked = lend(raw).and_then(|fd| Ok(rustix::fs::flock(fd, how)?));
    locked.at("lock it again (does another program hold the lock now?)")
}

/// Whether the kernel shows who has taken it, although it belongs to the description.
fn is_signed(lock: &&Lock) -> bool {
    matches!(lock.kind, LockKind::Flock | LockKind::Lease)
}

/// The task that takes `lock`, one of `flock` or a lease, on description `id` again, and its descriptor: the one that
/// the kernel is to show, where it still has the description, else any that has it. `None` where none has, as it is on
/// its way through a socket.
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
pub(crate) fn restore_signed(d: &Descriptors, built: &Built, pid: i32) -> Result<(), (RawFd, Fault)> {
    let slots = d.table(pid).into_iter().flat_map(|t| &t.slots);
    let there = slots.map(|s| s.desc).filter(|id| built.made.has(*id));
    for id in there.collect::<BTreeSet<_>>() {
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
            LockKind::Ofd => set(raw, Owner::Description, lock)?,
            LockKind::Posix => {}
        }
    }
    Ok(())
}

/// Sets the locks of a description that has been made in the task that had it first, as `raw`; called in it.
pub(crate) fn restore_of_late(raw: RawFd, locks: &[Lock]) -> Result<(), Fault> {
    for lock in locks {
        match lock.kind {
            LockKind::Flock | LockKind::Lease => take(raw, lock)?,
            LockKind::Ofd => set(raw, Owner::Description, lock)?,
            LockKind::Posix => {}
        }
    }
    Ok(())
}

/// Whether a lock is on one of the launcher's standard streams. What that is now may be such that it cannot be locked.
fn is_on_stream(d: &Descriptors, lock: &PosixLock) -> bool {
    let slot = d.table(lock.pid).and_then(|t| t.slots.iter().find(|s| s.fd == lock.fd));
    let desc = slot.and_then(|s| d.descriptions.get(s.desc));
    desc.is_some_and(|desc| desc.kind.get::<Numbers>().is_some())
}

/// The POSIX locks of process `pid`: descriptor, argument of F_SETLK, whether nothing depends on it.
pub(crate) fn posix(d: &Descriptors, pid: i32) -> Vec<(RawFd, libc::flock, bool)> {
    let all = d.list::<PosixLock>().iter().filter(|l| l.pid == pid);
    all.map(|l| (l.fd, flock(&l.lock), is_on_stream(d, l))).collect()
}

/// Sets the POSIX locks of process `pid` again, when it has all its descriptors; called in it.
pub(crate) fn restore_posix(d: &Descriptors, pid: i32) -> Result<(), (RawFd, Fault)> {
    for l in d.list::<PosixLock>().iter().filter(|l| l.pid == pid) {
        match set(l.fd, Owner::Process, &l.lock) {
            Err(error) if is_on_stream(d, l) => tracing::debug!(%error, fd = l.fd, "a standard stream is not locked"),
            done => done.map_err(|e| (l.fd, e))?,
        }
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
