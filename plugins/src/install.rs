//! Lays out the descriptor table of one restarted task, in that task: a process, or a thread that has another table than its process.

use crate::builder::Built;
use crate::fault::{At, Fault, Refusal};
use crate::keep::Lent;
use crate::kind::Place;
use crate::kinds::KINDS;
use crate::launcher::Numbers;
use crate::locks;
use crate::model::{Descriptors, Slot, Table};
use crate::sys::fd;
use belay_kernel::kcmp;
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, RawFd};

/// Puts every descriptor of `pid` at its number and closes all others except `keep`.
pub(crate) fn install(d: &Descriptors, built: &Built, pid: i32, keep: &[RawFd]) -> Result<(), Refusal> {
    let Some(table) = d.table(pid) else {
        return close_others(&BTreeSet::new(), keep).map_err(|e| table_refusal(pid, &e));
    };
    if shares_with_first(table, pid) {
        return Ok(());
    }
    for at in places(d, built, pid) {
        at.install().map_err(|e| d.refusal(at.id, &e))?;
    }
    let mut placed = BTreeSet::new();
    for slot in &table.slots {
        let placed_there = slot_source(d, built, slot).and_then(|from| {
            let put = from.map(|from| from.put_at(slot.fd, slot.cloexec).at("put at its number"));
            put.transpose()
        });
        if placed_there.map_err(|e| d.refusal(slot.desc, &e))?.is_some() {
            placed.insert(slot.fd);
        }
    }
    close_others(&placed, keep).map_err(|e| table_refusal(pid, &e))?;
    let locked = locks::restore_signed(d, pid).and_then(|()| locks::restore_posix(d.list(), pid));
    locked.map_err(|(fd, e)| e.of(pid, format!("lock on fd {fd}")))
}

/// The descriptions that were found first in task `pid`.
fn places<'a>(d: &'a Descriptors, built: &'a Built, pid: i32) -> impl Iterator<Item = Place<'a>> {
    let all = d
        .descriptions
        .iter()
        .enumerate()
        .filter(move |(_, desc)| desc.holder.pid == pid);
    all.map(move |(id, desc)| Place { d, built, id, desc })
}

/// What needs all processes: pidfds, files in `/proc/PID`, owners for signals.
pub(crate) fn install_late(d: &Descriptors, built: &Built, pid: i32) -> Result<(), Refusal> {
    if let Some(table) = d.table(pid).filter(|table| !shares_with_first(table, pid)) {
        for slot in &table.slots {
            let Some(desc) = d.descriptions.get(slot.desc) else { continue };
            let at = Place {
                d,
                built,
                id: slot.desc,
                desc,
            };
            late(&at, slot).map_err(|e| d.refusal(slot.desc, &e))?;
        }
        for at in places(d, built, pid) {
            at.settle().map_err(|e| d.refusal(at.id, &e))?;
        }
    }
    // From now on this process closes no descriptor: that might end what one of them is registered for.
    KINDS.iter().try_for_each(|kind| (kind.install_own)(d, built, pid))
}

/// Makes a descriptor that needs a process, and sets who is signalled when I/O is possible.
fn late(at: &Place<'_>, slot: &Slot) -> Result<(), Fault> {
    let desc = at.desc;
    if let Some(fd) = at.install_late(slot)? {
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
    match d.descriptions.get(slot.desc).and_then(|d| d.kind.get::<Numbers>()) {
        Some(stream) => Ok(stream.at(slot.fd, built)),
        None => built.made.lend(slot.desc),
    }
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
