//! The rebuild flow, in the agent of the restarted job: objects first, then descriptions on them, then data in flight.
//!
//! What is made is held by a [`Store`] until the processes have it: at numbers that no process of the job uses, so that
//! laying out a process's table (`install`) never overwrites what is still to be installed, or by processes of its own
//! where that is too much for one.

use crate::builder::{Builder, Built, SPARE};
use crate::content::PageSource;
use crate::fault::{At, Fault, Refusal};
use crate::files::sight::{Copies, Sights};
use crate::files::{make_parents, FileObject, Scaffold};
use crate::group::Group;
use crate::keep::{self, Fork, Store};
use crate::kinds::{self, KINDS};
use crate::launcher::Numbers;
use crate::limit::{RaisedLimit, NEEDED};
use crate::locks;
use crate::model::{DescId, Descriptors, Table};
use crate::sets::Sets;
use crate::sockets::unix::UnixState;
use crate::sys::fd;
use belay_image::blobs::BlobReader;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::RawFd;

/// The numbers at which the agent holds what it makes: the largest range that no process of the job uses. Mostly that
/// is all above the highest; a program can also use the last numbers that its limit allows (valgrind does).
pub(crate) fn room(d: &Descriptors, limit: RawFd) -> Range<RawFd> {
    const FIRST: RawFd = 64;
    let open = d.tables.iter().flat_map(|t| t.slots.iter().map(|s| s.fd));
    // Where a descriptor has been closed since, its number is needed for the moment too.
    let others = d.descriptions.iter().flat_map(|desc| desc.kind.numbers());
    let used: BTreeSet<RawFd> = open.chain(others).collect();
    let mut from = FIRST;
    let mut best = FIRST..FIRST;
    for fd in used.iter().copied().filter(|fd| *fd >= FIRST) {
        if fd - from > best.len() as RawFd {
            best = from..fd;
        }
        from = fd.saturating_add(1);
    }
    if limit - from >= best.len() as RawFd {
        best = from..RawFd::MAX;
    }
    best
}

/// Why a restart under this limit of descriptors would fail for want of numbers, and the process that has most;
/// `mapped` files are mapped shared.
pub(crate) fn shortage(d: &Descriptors, mapped: usize, limit: RawFd) -> Option<Refusal> {
    let room = room(d, limit);
    let there = usize::try_from(room.end.min(limit) - room.start).unwrap_or_default();
    // Each of them is opened at most twice, for reading and for writing.
    let needed = NEEDED + 2 * mapped;
    let highest = |t: &Table| t.slots.iter().map(|s| s.fd).max().unwrap_or(0);
    let (table, needs) = if let Some(table) = d.tables.iter().find(|t| highest(t) >= limit) {
        (table, format!("a restart needs descriptor {}, which is not", highest(table)))
    } else if there < needed {
        let what = format!("a restart needs {needed} numbers in a row that no process of the job uses, and there are {there}");
        (d.tables.iter().max_by_key(|t| t.slots.len())?, what)
    } else {
        return None;
    };
    let why = format!("{needs} below {limit}, the hard limit RLIMIT_NOFILE: raise it (limits.conf, ulimit -Hn)");
    Some(Fault::Refused(why).of(table.pids[0], "descriptor table"))
}

/// So many processes at most hold descriptors while a job is rebuilt.
pub(crate) fn keepers(d: &Descriptors) -> usize {
    let ends = d.each::<UnixState>().count();
    let limit = RaisedLimit::highest();
    keep::keepers(d.descriptions.len() + d.list::<FileObject>().len(), limit) + keep::keepers(ends, limit) + 1
}

/// Rebuilds everything that needs no process.
pub(crate) fn rebuild(
    (d, sights): (&Descriptors, &Sights),
    (blobs, pages, copies): (&BlobReader, &dyn PageSource, &Copies<'_>),
    own_namespaces: bool,
    group: Option<&dyn Group>,
    (tell, fork): (&dyn Fn(&str), &mut Fork<'_>),
) -> Result<Built, Refusal> {
    let limit = RaisedLimit::raise();
    let highest = RaisedLimit::highest();
    if let Some(refusal) = shortage(d, 0, highest) {
        return Err(refusal);
    }
    let room = room(d, highest);
    let mut b = Builder {
        descriptors: d,
        sights,
        blobs,
        pages,
        copies,
        group,
        book: None,
        tell,
        own_namespaces,
        stdio: [0, 1, 2].map(|n| fd::dup_from(n, room.start).ok()),
        room,
        sets: Sets::default(),
        made: Store::new(d.descriptions.len(), highest),
        fork,
        spare: Cell::new(SPARE),
    };
    let parents = kinds::ways(d).parents;
    let scaffold = Scaffold::of(parents.iter().chain(d.working.iter().flatten()), sights);
    directories(d, sights)?;
    KINDS.iter().rev().try_for_each(|kind| (kind.prepare)(&mut b))?;
    for (id, desc) in d.descriptions.iter().enumerate() {
        let made = kinds::rebuild(&mut b, desc).and_then(|fd| fd.map_or(Ok(()), |fd| b.put(id, fd)));
        made.map_err(|e| d.refusal(id, &e))?;
    }
    KINDS.iter().rev().try_for_each(|kind| (kind.join)(&mut b))?;
    KINDS.iter().rev().try_for_each(|kind| (kind.refill)(&mut b))?;
    for (id, desc) in d.descriptions.iter().enumerate() {
        // What the launcher's standard streams are now is not the job's to change.
        if desc.kind.get::<Numbers>().is_none() {
            let lent = b.lend(id);
            let settled = lent.and_then(|lent| lent.map_or(Ok(()), |lent| settle(d, id, lent.raw())));
            settled.map_err(|e| d.refusal(id, &e))?;
        }
    }
    let settled = b.made.settle(&b.room, highest, b.fork);
    settled.map_err(|e| e.of(0, "descriptors"))?;
    let book = b
        .book
        .ok_or_else(|| Fault::Refused("the addresses are not known".into()).of(0, "network"))?;
    Ok(Built {
        book,
        made: b.made,
        sets: b.sets,
        stdio: b.stdio,
        room: b.room,
        scaffold,
        _limit: limit,
    })
}

/// Makes the directories that belong to no description.
fn directories(d: &Descriptors, sights: &Sights) -> Result<(), Refusal> {
    for directories in &d.working {
        make_parents(directories, sights).map_err(|e| e.of(0, "working directory"))?;
    }
    for directories in &d.sessions {
        // What really needs one says so when it misses it.
        if let Err(error) = make_parents(directories, sights) {
            tracing::warn!(%error, "a session directory could not be made");
        }
    }
    Ok(())
}

/// What all kinds have in common: status flags, locks of the description.
fn settle(d: &Descriptors, id: DescId, raw: RawFd) -> Result<(), Fault> {
    const SETTABLE: i32 = libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;
    let wanted = d.descriptions[id].flags;
    if wanted & libc::O_PATH != 0 {
        return Ok(());
    }
    let now = fd::flags(raw).at("read its flags")?;
    if (now ^ wanted) & SETTABLE != 0 {
        fd::set_flags(raw, (now & !SETTABLE) | (wanted & SETTABLE)).at("set its flags")?;
    }
    locks::restore_of_description(raw, id, d)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::Kind;
    use crate::launcher::{Launcher, Numbers};
    use crate::limit::NEEDED;
    use crate::model::{Description, FsPath, Holder, Slot};
    use crate::state::Described;

    fn description(fd: RawFd) -> Description {
        Description {
            holder: Holder { pid: 1, fd },
            name: FsPath::default(),
            flags: 0,
            pos: 0,
            owner: None,
            locks: Vec::new(),
            kind: Described::new(Launcher::NAME, Numbers(vec![fd])),
        }
    }

    #[test]
    fn a_limit_under_which_a_restart_would_fail_is_refused() {
        let job = |numbers: &[RawFd]| {
            let slot = |fd: &RawFd| Slot {
                fd: *fd,
                desc: 0,
                cloexec: false,
            };
            Descriptors {
                tables: vec![Table {
                    pids: vec![1],
                    slots: numbers.iter().map(slot).collect(),
                }],
                descriptions: numbers.iter().map(|fd| description(*fd)).collect(),
                ..Descriptors::default()
            }
        };
        let many: Vec<RawFd> = (0..120).collect();
        let told = |numbers: &[RawFd], limit| shortage(&job(numbers), 0, limit).map(|refusal| refusal.to_string());
        let least = 120 + i32::try_from(NEEDED).unwrap();
        assert_eq!(told(&many, least), None);
        let refusal = told(&many, least - 1).unwrap();
        assert!(refusal.contains("process 1") && refusal.contains("63 below 183"), "{refusal}");
        let refusal = told(&many, 100).unwrap();
        assert!(refusal.contains("descriptor 119, which is not below 100"), "{refusal}");
        // They must lie together.
        let apart: Vec<RawFd> = many.iter().copied().chain([150]).collect();
        assert!(told(&apart, 200).is_some() && told(&apart, 220).is_none());
    }

    #[test]
    fn there_is_room_whatever_numbers_are_used() {
        let of = |numbers: &[RawFd]| {
            let slot = |fd: &RawFd| Slot {
                fd: *fd,
                desc: 0,
                cloexec: false,
            };
            let d = Descriptors {
                tables: vec![Table {
                    pids: vec![1],
                    slots: numbers.iter().map(slot).collect(),
                }],
                ..Descriptors::default()
            };
            room(&d, 1024)
        };
        assert_eq!(of(&[0, 100]), 101..RawFd::MAX);
        assert_eq!(of(&[0, 1023]), 64..1023);
        assert_eq!(of(&[0, RawFd::MAX]), 64..RawFd::MAX);
        assert_eq!(of(&[100, RawFd::MAX - 1, RawFd::MAX]), 101..RawFd::MAX - 1);
    }
}
