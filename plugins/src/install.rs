//! Lays out the descriptor table of one restarted task, in that task: a process, or a thread that has another table
//! than its process.

use crate::builder::Built;
use crate::fault::{At, Fault, Refusal};
use crate::keep::Lent;
use crate::kind::Place;
use crate::kinds::KINDS;
use crate::launcher::Numbers;
use crate::locks;
use crate::model::{Description, Descriptors, Slot, Table, IN_FLIGHT};
use crate::sys::fd;
use belay_kernel::numbers::{self, lend};
use belay_kernel::{fcntl, kcmp};
use std::collections::{BTreeSet, HashMap};
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
    locks::restore_signed(d, built, pid).map_err(|(fd, e)| e.of(pid, format!("lock on fd {fd}")))
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

/// What needs all processes: pidfds, files in `/proc/PID`, owners for signals; and record locks, which need all descriptors.
pub(crate) fn install_late(d: &Descriptors, built: &Built, pid: i32) -> Result<(), Refusal> {
    if let Some(table) = d.table(pid).filter(|table| !shares_with_first(table, pid)) {
        let mut made = HashMap::new();
        for slot in &table.slots {
            let Some(desc) = d.descriptions.get(slot.desc) else { continue };
            if let Some(first) = made.get(&slot.desc) {
                let same = fd::dup_to(*first, slot.fd, slot.cloexec).at("put at its number");
                same.map_err(|e| d.refusal(slot.desc, &e))?;
                continue;
            }
            let at = Place {
                d,
                built,
                id: slot.desc,
                desc,
            };
            if late(&at, slot, pid).map_err(|e| d.refusal(slot.desc, &e))? {
                made.insert(slot.desc, slot.fd);
            }
        }
        for at in places(d, built, pid) {
            at.settle().map_err(|e| d.refusal(at.id, &e))?;
        }
        locks::restore_posix(d, pid).map_err(|(fd, e)| e.of(pid, format!("lock on fd {fd}")))?;
    }
    // From now on this process closes no descriptor: that might end what one of them is registered for.
    KINDS.iter().try_for_each(|kind| (kind.install_own)(d, built, pid))
}

/// Makes a descriptor that needs a process, and sets who is signalled when I/O is possible; says whether it has made one.
fn late(at: &Place<'_>, slot: &Slot, pid: i32) -> Result<bool, Fault> {
    let desc = at.desc;
    let made = at.install_late(slot)?;
    let is_made = made.is_some();
    if let Some(fd) = made {
        fd::dup_to(fd.as_raw_fd(), slot.fd, slot.cloexec).at("put at its number")?;
        if fd.as_raw_fd() == slot.fd {
            // It was opened at its own number already, and stays.
            std::mem::forget(fd);
        }
        if (desc.holder.pid, desc.holder.fd) == (pid, slot.fd) {
            locks::restore_of_late(slot.fd, &desc.locks)?;
        }
    }
    // Where it is made here, it is another one in each task.
    if is_made || desc.holder.fd == slot.fd {
        signals(slot.fd, desc)?;
    }
    Ok(is_made)
}

/// Sets who is signalled when I/O is possible, and that somebody is: that can be set without.
fn signals(raw: RawFd, desc: &Description) -> Result<(), Fault> {
    if let Some(owner) = desc.owner {
        if owner.signal != 0 {
            lend(raw)
                .and_then(|fd| fcntl::set_signal(fd, owner.signal))
                .at("set its signal")?;
        }
        match lend(raw).and_then(|fd| fcntl::set_owner(fd, [owner.kind, owner.id])) {
            // The owner had ended before the checkpoint.
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
            set => set.at("set its owner")?,
        }
    }
    // What the launcher's standard streams are now is not the job's to change.
    let is_ours = desc.owner.is_some() || desc.kind.get::<Numbers>().is_none();
    if desc.flags & libc::O_ASYNC != 0 && is_ours {
        let flags = fd::flags(raw).at("read its flags")?;
        fd::set_flags(raw, flags | libc::O_ASYNC).at("set O_ASYNC")?;
    }
    Ok(())
}

/// The same for descriptions in flight, which no process has; called in the agent when all processes exist.
pub(crate) fn in_flight(d: &Descriptors, built: &Built) -> Result<(), Refusal> {
    let all = d.descriptions.iter().enumerate();
    for (id, desc) in all.filter(|(_, desc)| desc.holder.fd == IN_FLIGHT) {
        let lent = built.made.lend(id);
        let set = lent.and_then(|lent| lent.map_or(Ok(()), |lent| signals(lent.raw(), desc)));
        set.map_err(|e| d.refusal(id, &e))?;
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
            numbers::close(next, n - 1).at("close what does not belong to it")?;
        }
        next = n + 1;
    }
    numbers::close(next, RawFd::MAX).at("close what does not belong to it")
}

fn table_refusal(pid: i32, fault: &Fault) -> Refusal {
    fault.of(pid, "descriptor table")
}
