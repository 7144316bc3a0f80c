//! Lays out the descriptor table of one restarted task, in that task: a process, or a thread that has another table than its process.

use crate::fault::{At, Fault};
use crate::keep::Lent;
use crate::model::{Description, Descriptors, Kind, Slot, Table};
use crate::rebuild::{refusal, Built};
use crate::sys::fd;
use crate::{epoll, files, locks, mqueue, pidfd, shm, Refusal};
use belay_kernel::kcmp;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Puts every descriptor of `pid` at its number and closes all others except `keep`.
pub(crate) fn install(d: &Descriptors, built: &Built, pid: i32, keep: &[RawFd]) -> Result<(), Refusal> {
    let Some(table) = d.table(pid) else {
        return close_others(&BTreeSet::new(), keep).map_err(|e| table_refusal(pid, &e));
    };
    if shares_with_first(table, pid) {
        return Ok(());
    }
    for (id, desc) in d.descriptions.iter().enumerate() {
        if desc.holder.pid == pid {
            if let Kind::Epoll(e) = &desc.kind {
                let restored = built.made.lend(id).and_then(|own| match own {
                    // At a number that no entry is put at.
                    Some(own) => {
                        let own = own.lifted(&built.room)?;
                        epoll::restore_interest(e, own.raw(), |id| source(d, built, id))
                    }
                    None => Ok(()),
                });
                restored.map_err(|e| refusal(d, id, &e))?;
            }
        }
    }
    let mut placed = BTreeSet::new();
    for slot in &table.slots {
        let placed_there = slot_source(d, built, slot).and_then(|from| {
            let put = from.map(|from| from.put_at(slot.fd, slot.cloexec).at("put at its number"));
            put.transpose()
        });
        if placed_there.map_err(|e| refusal(d, slot.desc, &e))?.is_some() {
            placed.insert(slot.fd);
        }
    }
    close_others(&placed, keep).map_err(|e| table_refusal(pid, &e))?;
    let locked = locks::restore_signed(d, pid).and_then(|()| locks::restore_posix(&d.posix_locks, pid));
    locked.map_err(|(fd, e)| e.of(pid, format!("lock on fd {fd}")))
}

/// What needs all processes: pidfds, files in `/proc/PID`, owners for signals.
pub(crate) fn install_late(d: &Descriptors, pid: i32) -> Result<(), Refusal> {
    // From now on this process closes no descriptor of a queue: that would end its registration.
    mqueue::install(d, pid)?;
    shm::sysv::install(&d.sysv, pid)?;
    let Some(table) = d.table(pid) else {
        return Ok(());
    };
    if shares_with_first(table, pid) {
        return Ok(());
    }
    for slot in &table.slots {
        let Some(desc) = d.descriptions.get(slot.desc) else { continue };
        late(desc, slot).map_err(|e| refusal(d, slot.desc, &e))?;
    }
    for (id, desc) in d.descriptions.iter().enumerate() {
        if let (Kind::Epoll(e), true) = (&desc.kind, desc.holder.pid == pid && desc.holder.fd >= 0) {
            epoll::restore_late(d, e, desc.holder.fd, table).map_err(|e| refusal(d, id, &e))?;
        }
    }
    Ok(())
}

/// Makes a descriptor that needs a process, and sets who is signalled when I/O is possible.
fn late(desc: &Description, slot: &Slot) -> Result<(), Fault> {
    let made: Option<OwnedFd> = match &desc.kind {
        Kind::Pidfd(p) => pidfd::late(p)?,
        Kind::Path(p) if p.needs_process.is_some() => Some(files::path::rebuild(desc, p, files::Sight::default())?),
        _ => None,
    };
    if let Some(fd) = made {
        fd::dup_to(fd.as_raw_fd(), slot.fd, slot.cloexec).at("put at its number")?;
        if fd.as_raw_fd() == slot.fd {
            // It was opened at its own number already, and stays.
            std::mem::forget(fd);
        }
    }
    let Some(owner) = desc.owner.filter(|_| desc.holder.fd == slot.fd) else {
        return Ok(());
    };
    if owner.signal != 0 {
        fd::fcntl(slot.fd, fd::F_SETSIG, owner.signal).at("set its signal")?;
    }
    let ex = [owner.kind, owner.id];
    // SAFETY: F_SETOWN_EX reads two integers.
    let set = unsafe { libc::fcntl(slot.fd, fd::F_SETOWN_EX, ex.as_ptr()) };
    match crate::sys::check(set) {
        // The owner had ended before the checkpoint.
        Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
        set => drop(set.at("set its owner")?),
    }
    if desc.flags & libc::O_ASYNC != 0 {
        let flags = fd::flags(slot.fd).at("read its flags")?;
        fd::set_flags(slot.fd, flags | libc::O_ASYNC).at("set O_ASYNC")?;
    }
    Ok(())
}

/// What an entry is made from.
fn slot_source(d: &Descriptors, built: &Built, slot: &Slot) -> Result<Option<Lent>, Fault> {
    match d.descriptions.get(slot.desc).map(|d| &d.kind) {
        Some(Kind::LauncherStdio(numbers)) if numbers.contains(&slot.fd) => Ok(stdio(built, slot.fd)),
        _ => source(d, built, slot.desc),
    }
}

/// What a description is put at its numbers from.
fn source(d: &Descriptors, built: &Built, id: usize) -> Result<Option<Lent>, Fault> {
    match d.descriptions.get(id).map(|d| &d.kind) {
        Some(Kind::LauncherStdio(numbers)) => Ok(numbers.iter().find_map(|n| stdio(built, *n))),
        _ => built.made.lend(id),
    }
}

fn stdio(built: &Built, number: RawFd) -> Option<Lent> {
    let at = usize::try_from(number).ok()?;
    built.stdio.get(at)?.as_ref().map(|fd| Lent::Own(fd.as_raw_fd()))
}

/// Whether `pid` is not the first user of its table and really shares it, so that there is nothing left to do.
fn shares_with_first(table: &Table, pid: i32) -> bool {
    let first = table.pids[0];
    first != pid && kcmp::compare(pid, first, kcmp::Object::Files).is_ok_and(std::cmp::Ordering::is_eq)
}

/// Closes every number that is neither placed nor to be kept.
fn close_others(placed: &BTreeSet<RawFd>, keep: &[RawFd]) -> Result<(), Fault> {
    let mut next = 0;
    let wanted: BTreeSet<RawFd> = placed.iter().chain(keep).copied().collect();
    for n in wanted {
        if n > next {
            fd::close_range(next, n - 1).at("close what does not belong to it")?;
        }
        next = n + 1;
    }
    fd::close_range(next, RawFd::MAX).at("close what does not belong to it")
}

fn table_refusal(pid: i32, fault: &Fault) -> Refusal {
    fault.of(pid, "descriptor table")
}
