//! epoll: interest lists, nested instances included.
//!
//! An entry is known by (description, number at the time it was added); the number may since have been closed or may
//! refer to another description, while the description lives on elsewhere. Entries are added again in a process, where
//! each description can be put at the number under which it was added. A level-triggered entry reports anew by itself;
//! an edge-triggered one reports again only if it had something to report.

use crate::builder::Builder;
use crate::doors::Doors;
use crate::fault::{refuse, At, Fault};
use crate::keep::Lent;
use crate::kind::{nothing, Candidate, Kind, Look, NoPart, Place};
use crate::model::{is_number, DescId, Description, Descriptors};
use crate::session::{place, Found, Session};
use crate::sys::fd;
use crate::sys::fdinfo::number;
use belay_kernel::numbers::{self, in_own_table, lend};
use belay_kernel::{ioctl, kcmp};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// An epoll instance.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct EpollState {
    interest: Vec<Interest>,
    #[serde(default)]
    busy: Busy,
}

/// How it polls network devices (`struct epoll_params`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Busy {
    microseconds: u32,
    budget: u16,
    prefer: u8,
    /// Zero.
    pad: u8,
}

impl Busy {
    fn of(b: [u8; 8]) -> Self {
        Self {
            microseconds: u32::from_ne_bytes([b[0], b[1], b[2], b[3]]),
            budget: u16::from_ne_bytes([b[4], b[5]]),
            prefer: b[6],
            pad: b[7],
        }
    }

    fn bytes(self) -> [u8; 8] {
        let ([a, b, c, d], [e, f]) = (self.microseconds.to_ne_bytes(), self.budget.to_ne_bytes());
        [a, b, c, d, e, f, self.prefer, self.pad]
    }
}

/// One entry of the interest list.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Interest {
    /// Number under which it was added.
    number: RawFd,
    desc: DescId,
    events: u32,
    data: u64,
    /// It is edge-triggered and has an event to report.
    pending: bool,
}

/// Bits that are not events.
const PRIVATE: u32 = (libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;

/// One `tfd:` line.
struct Line {
    number: RawFd,
    events: u32,
    data: u64,
    ino: u64,
    dev: u64,
}

fn line(text: &str) -> io::Result<Line> {
    // "tfd:        3 events:       1d data:                3  pos:0 ino:40e sdev:10", with "tfd:" already taken off.
    let spaced = text.replace(':', ": ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let after = |key: &str| {
        let at = words.iter().position(|w| *w == key);
        at.and_then(|at| words.get(at + 1))
            .copied()
            .ok_or_else(|| io::Error::other(format!("fdinfo: {text:?}")))
    };
    let sdev = number(after("sdev:")?, 16)?;
    let bad = |_| io::Error::other(format!("fdinfo: {text:?}"));
    Ok(Line {
        number: words
            .first()
            .ok_or_else(|| io::Error::other("fdinfo: empty tfd line"))?
            .parse()
            .map_err(bad)?,
        events: number(after("events:")?, 16).and_then(|v| u32::try_from(v).map_err(io::Error::other))?,
        data: number(after("data:")?, 16)?,
        ino: number(after("ino:")?, 16)?,
        dev: libc::makedev((sdev >> 20) as u32, (sdev & 0xf_ffff) as u32),
    })
}

/// The kind.
pub(crate) struct Epoll;

impl Kind for Epoll {
    const NAME: &'static str = "Epoll";
    const VERSION: u32 = 1;
    type State = EpollState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Anonymous(name) if *name == "eventpoll")
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<EpollState, Fault> {
        capture(s, seen.id)
    }

    fn check(state: &EpollState, d: &Descriptors) -> Result<(), String> {
        state.interest.iter().try_for_each(|i| {
            if !is_number(i.number) {
                return Err(format!("an entry has number {}, which is no possible one", i.number));
            }
            d.is_description(i.desc)
        })
    }

    /// Those under which entries have been added.
    fn numbers(state: &EpollState) -> Vec<RawFd> {
        state.interest.iter().map(|i| i.number).collect()
    }

    /// Makes an empty instance.
    fn rebuild(_: &mut Builder<'_>, _: &Description, e: &EpollState) -> Result<Option<OwnedFd>, Fault> {
        let made = epoll::create(CreateFlags::CLOEXEC).map_err(io::Error::from);
        let fd = made.at("epoll_create")?;
        if e.busy != Busy::default() {
            // Who polls less waits longer, and for the same.
            if let Err(error) = ioctl::set(&fd, ioctl::SET_BUSY, &e.busy.bytes()) {
                tracing::warn!(%error, "an epoll instance polls network devices as the system does (EPIOCSPARAMS)");
            }
        }
        Ok(Some(fd))
    }

    /// Adds the entries again, in a process whose table is about to be laid out, but for what has no descriptor yet.
    fn install(at: &Place<'_>, state: &EpollState) -> Result<(), Fault> {
        let Some(own) = at.built.made.lend(at.id)? else {
            return Ok(());
        };
        // At a number that no entry is put at.
        let own = own.lifted(&at.built.room)?;
        restore_interest(state, own.raw(), |id| at.built.made.lend(id))
    }

    /// Adds entries for descriptions that exist only now, of those that this process has.
    fn settle(at: &Place<'_>, state: &EpollState) -> Result<(), Fault> {
        let holder = at.desc.holder;
        let Some(table) = at.d.table(holder.pid).filter(|_| holder.fd >= 0) else {
            return Ok(());
        };
        let late: Vec<&Interest> = state.interest.iter().filter(|i| !at.built.made.has(i.desc)).collect();
        if late.is_empty() {
            return Ok(());
        }
        let own = fd::dup_from(holder.fd, at.built.room.start).at("duplicate")?;
        for i in late {
            let has = |number: RawFd| table.slots.iter().any(|s| s.fd == number && s.desc == i.desc);
            if has(i.number) {
                add(own.as_raw_fd(), i)?;
            } else if let Some(slot) = table.slots.iter().find(|s| has(s.fd)) {
                lent_number(slot.fd, i.number, &at.built.room, || add(own.as_raw_fd(), i))?;
            }
        }
        Ok(())
    }

    nothing!(
        survey,
        finish,
        contents,
        check_part,
        ways,
        prepare,
        join,
        refill,
        install_late,
        install_own,
        complete
    );
}

fn capture(s: &mut Session<'_>, id: DescId) -> Result<EpollState, Fault> {
    let found = &s.found[id];
    let lines = found
        .info
        .all("tfd:")
        .map(line)
        .collect::<io::Result<Vec<_>>>()
        .at("read fdinfo")?;
    let pid = found.holder.pid;
    let mut interest: Vec<Interest> = Vec::new();
    for l in lines {
        // Several entries may have one number; the kernel tells them apart by their order.
        let offset = interest.iter().filter(|i| i.number == l.number).count();
        let desc = target(s, id, pid, &l, offset)?;
        interest.push(Interest {
            number: l.number,
            desc,
            events: l.events,
            data: l.data,
            pending: false,
        });
    }
    let both = (libc::EPOLLET | libc::EPOLLEXCLUSIVE) as u32;
    if interest.iter().any(|i| i.events & both == both) {
        // Such an entry cannot be armed again, so nothing may be taken from this instance: every edge reports once more.
        interest.iter_mut().for_each(|i| i.pending = is_edge(i.events));
    } else if interest.iter().any(|i| is_edge(i.events)) {
        pending(s, id, &mut interest)?;
    }
    // A kernel that does not tell has nothing to tell.
    let taken = s.take(id)?;
    let busy = lend(taken.raw()).and_then(|fd| ioctl::get(fd, ioctl::BUSY));
    let busy = busy.map(Busy::of).unwrap_or_default();
    Ok(EpollState { interest, busy })
}

/// Whether an entry reports changes only.
fn is_edge(events: u32) -> bool {
    events & libc::EPOLLET as u32 != 0 && events & libc::EPOLLEXCLUSIVE as u32 == 0
}

/// Finds out which edge-triggered entries have something to report.
///
/// Only waiting tells, and it consumes: what was reported is armed again, which makes the kernel look at the
/// description's state anew; that is what it was, as the processes are stopped. Arming needs the entry's number, so it
/// is done in a thread with a table of its own.
fn pending(s: &Session<'_>, id: DescId, interest: &mut [Interest]) -> Result<(), Fault> {
    let taken = s.take(id)?;
    if fd::poll(taken.raw(), libc::POLLIN).at("poll")? & libc::POLLIN == 0 {
        return Ok(());
    }
    let (found, doors) = (&s.found, &s.doors);
    let looked = in_own_table(|| -> io::Result<()> {
        let sources = Sources::new(taken.raw(), interest, found, doors)?;
        let epoll = sources.epoll.as_raw_fd();
        sources.may_be_put(interest)?;
        let reported = wait(epoll, interest.len())?;
        let came = sources.came(&reported, interest, found);
        let mut failed = Ok(());
        for (i, came) in interest.iter_mut().zip(came) {
            i.pending = came && is_edge(i.events);
            if came && (is_edge(i.events) || i.events & libc::EPOLLONESHOT as u32 != 0) && !is_used(i.events) {
                // The others are given back what has been taken from them, whatever is wrong with this one.
                failed = failed.and(sources.put(&found[i.desc], i).and_then(|()| arm(epoll, i)));
            }
        }
        failed
    });
    looked.at("look which entries report")
}

/// What entries are armed with, at numbers that no entry has.
struct Sources {
    epoll: OwnedFd,
    /// Pidfds of those who have the descriptions.
    doors: HashMap<i32, OwnedFd>,
    /// Descriptions that the agent keeps.
    kept: HashMap<DescId, OwnedFd>,
}

impl Sources {
    fn new(epoll: RawFd, interest: &[Interest], found: &[Found], doors: &Doors<'_>) -> io::Result<Self> {
        let numbers: BTreeSet<RawFd> = interest.iter().map(|i| i.number).collect();
        let mut this = Self {
            epoll: beside(epoll, &numbers)?,
            doors: HashMap::new(),
            kept: HashMap::new(),
        };
        for i in interest {
            let of = &found[i.desc];
            if let Some(kept) = &of.kept {
                this.kept.insert(i.desc, beside(kept.as_raw_fd(), &numbers)?);
            } else if let (Entry::Vacant(entry), Some(door)) = (this.doors.entry(of.holder.pid), doors.get(&of.holder.pid)) {
                entry.insert(beside(door.pidfd().as_raw_fd(), &numbers)?);
            }
        }
        Ok(this)
    }

    /// Before anything is taken: whether this process may have descriptors at the numbers of `interest`, and one more.
    fn may_be_put(&self, interest: &[Interest]) -> io::Result<()> {
        let numbers: BTreeSet<RawFd> = interest.iter().map(|i| i.number).collect();
        drop(beside(self.epoll.as_raw_fd(), &numbers)?);
        if let Some(highest) = numbers.last() {
            fd::dup_to(self.epoll.as_raw_fd(), *highest, true)?;
        }
        Ok(())
    }

    /// Puts the description of entry `i` at its number.
    fn put(&self, found: &Found, i: &Interest) -> io::Result<()> {
        if let Some(kept) = self.kept.get(&i.desc) {
            return fd::dup_to(kept.as_raw_fd(), i.number, true);
        }
        let door = self.doors.get(&found.holder.pid).ok_or(io::ErrorKind::NotFound)?;
        let own = belay_kernel::pidfd::getfd(door.as_fd(), found.holder.fd)?;
        fd::dup_to(own.as_raw_fd(), i.number, true)?;
        if own.as_raw_fd() == i.number {
            // It stays where it came by itself.
            std::mem::forget(own);
        }
        Ok(())
    }
}

impl Sources {
    /// For each entry, whether it is one that has `reported`. That tells nothing but the data of entries. Among those
    /// that have the same it is those that have something to report: where fewer edges than that have come, all of
    /// them are taken for it, since one that comes twice does less harm than one that is lost.
    fn came(&self, reported: &[u64], interest: &[Interest], found: &[Found]) -> Vec<bool> {
        let mut members: HashMap<u64, Vec<usize>> = HashMap::new();
        for (at, i) in interest.iter().enumerate() {
            members.entry(i.data).or_default().push(at);
        }
        let mut came = vec![false; interest.len()];
        for (data, members) in members {
            let told = reported.iter().filter(|d| **d == data).count();
            if let ([one], true) = (&members[..], told > 0) {
                came[*one] = true;
                continue;
            }
            let mut others = 0;
            for at in members.iter().filter(|_| told > 0) {
                let i = &interest[*at];
                // One that cannot be looked at is armed, which fails with its reason.
                came[*at] = !is_used(i.events) && self.has_events(&found[i.desc], i).unwrap_or(true);
                others += usize::from(came[*at] && !is_edge(i.events));
            }
            if told <= others {
                let edges = members.iter().filter(|at| is_edge(interest[**at].events));
                edges.for_each(|at| came[*at] = false);
            }
        }
        came
    }

    /// Whether what entry `i` waits for is there.
    fn has_events(&self, found: &Found, i: &Interest) -> io::Result<bool> {
        self.put(found, i)?;
        let wanted = (i.events & !PRIVATE & 0x7fff) as i16;
        Ok(fd::poll(i.number, wanted)? != 0)
    }
}

/// A duplicate of `raw` at a number that is none of `numbers`.
fn beside(raw: RawFd, numbers: &BTreeSet<RawFd>) -> io::Result<OwnedFd> {
    let mut from = 0;
    loop {
        let fd = fd::dup_from(raw, from)?;
        if !numbers.contains(&fd.as_raw_fd()) {
            return Ok(fd);
        }
        from = fd.as_raw_fd() + 1;
    }
}

/// Data of the entries that report now, at most `most`.
fn wait(epoll: RawFd, most: usize) -> io::Result<Vec<u64>> {
    let mut out = Vec::with_capacity(most.max(1));
    epoll::wait(lend(epoll)?, spare_capacity(&mut out), Some(&Timespec::default()))?;
    Ok(out.iter().map(|e| e.data.u64()).collect())
}

/// Makes the kernel look at an entry's state anew.
fn arm(epoll: RawFd, i: &Interest) -> io::Result<()> {
    let flags = EventFlags::from_bits_retain(i.events);
    Ok(epoll::modify(
        lend(epoll)?,
        lend(i.number)?,
        EventData::new_u64(i.data),
        flags,
    )?)
}

/// The description behind an entry: usually the one that has its number in the process; else any with that inode.
fn target(s: &Session<'_>, epoll: DescId, pid: i32, l: &Line, offset: usize) -> Result<DescId, Fault> {
    let usual = s.lookup(pid, l.number);
    let own = place(&s.found[epoll], &s.doors);
    // A socket has one description only. To find an entry by its number the kernel searches all of an instance.
    let is_it = |found: &Found| {
        found.stat.st_mode & libc::S_IFMT == libc::S_IFSOCK && (found.stat.st_dev, found.stat.st_ino) == (l.dev, l.ino)
    };
    if let Some(id) = usual.filter(|id| is_it(&s.found[*id])) {
        return Ok(id);
    }
    let elsewhere = (0..s.found.len()).filter(|id| s.found[*id].stat.st_ino == l.ino);
    for id in usual.into_iter().chain(elsewhere) {
        if is_target(own, l.number, offset, place(&s.found[id], &s.doors)).at("compare with an entry (kcmp)")? {
            return Ok(id);
        }
    }
    refuse(format!(
        "it waits for descriptor {} whose description nobody has any more under a number that can be found",
        l.number
    ))
}

fn is_target(epoll: (i32, RawFd), number: RawFd, offset: usize, candidate: (i32, RawFd)) -> io::Result<bool> {
    let offset = u32::try_from(offset).map_err(io::Error::other)?;
    kcmp::is_target(epoll, number, offset, candidate)
}

/// Adds the entries again; `source` gives a descriptor of a description.
fn restore_interest(e: &EpollState, own: RawFd, source: impl Fn(DescId) -> Result<Option<Lent>, Fault>) -> Result<(), Fault> {
    let put = |i: &Interest| -> Result<bool, Fault> {
        let Some(from) = source(i.desc)? else { return Ok(false) };
        from.put_at(i.number, true).at(format!("put at number {}", i.number))?;
        Ok(true)
    };
    let one_shot = |i: &Interest| i.events & libc::EPOLLONESHOT as u32 != 0;
    // Every new entry reports its state once. That is wrong for a used one-shot entry, and for an edge that had been
    // seen. Reports tell entries apart by their data only: those that have the same are added one after the other.
    let (mut left, others): (Vec<&Interest>, Vec<&Interest>) = e.interest.iter().partition(|i| is_edge(i.events) || one_shot(i));
    let mut again = Vec::new();
    while !left.is_empty() {
        let mut data = HashSet::new();
        let (round, later): (Vec<&Interest>, Vec<&Interest>) = left.into_iter().partition(|i| data.insert(i.data));
        left = later;
        let mut here = Vec::with_capacity(round.len());
        for i in round {
            if put(i)? {
                add(own, i)?;
                here.push(i);
            }
        }
        let reported: HashSet<u64> = wait(own, here.len()).at("take first reports")?.into_iter().collect();
        again.extend(here.into_iter().filter(|i| match (is_used(i.events), is_edge(i.events)) {
            // It has reported and is silent, as it must be; otherwise its events are taken away.
            (true, _) => !reported.contains(&i.data),
            (false, true) => i.pending,
            (false, false) => reported.contains(&i.data),
        }));
    }
    for i in again {
        put(i)?;
        arm(own, i).at("arm an entry")?;
    }
    for i in others {
        if put(i)? {
            add(own, i)?;
        }
    }
    Ok(())
}

/// Runs `f` while what descriptor `from` refers to has `number` too, which may be another's.
fn lent_number(from: RawFd, number: RawFd, room: &Range<RawFd>, f: impl FnOnce() -> Result<(), Fault>) -> Result<(), Fault> {
    let cloexec = fd::is_cloexec(number);
    let owner = match &cloexec {
        Ok(_) => Some(fd::dup_from(number, room.start).at("duplicate")?),
        Err(_) => None,
    };
    fd::dup_to(from, number, true).at(format!("put at number {number}"))?;
    let done = f();
    // What locks the process loses by this are set again in the end.
    match (owner, cloexec) {
        (Some(owner), Ok(cloexec)) => fd::dup_to(owner.as_raw_fd(), number, cloexec),
        _ => numbers::close(number, number),
    }
    .at(format!("put back number {number}"))?;
    done
}

/// Whether a one-shot entry has reported and waits to be armed again.
fn is_used(events: u32) -> bool {
    events & libc::EPOLLONESHOT as u32 != 0 && events & !PRIVATE == 0
}

fn add(own: RawFd, i: &Interest) -> Result<(), Fault> {
    let used = is_used(i.events);
    // Adding always watches for errors and hang-up; only reporting once silences a one-shot entry, so a used one is
    // made to report if it can.
    let any = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLPRI) as u32;
    let flags = EventFlags::from_bits_retain(if used { i.events | any } else { i.events });
    let data = EventData::new_u64(i.data);
    let added = lend(own).and_then(|epoll| Ok(epoll::add(epoll, lend(i.number)?, data, flags)?));
    added.at(format!("add descriptor {}", i.number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_no_descriptor_has_are_refused() {
        let check = |number| {
            let state = EpollState {
                interest: vec![Interest {
                    number,
                    desc: 0,
                    events: 0,
                    data: 0,
                    pending: false,
                }],
                busy: Busy::default(),
            };
            Epoll::check(&state, &Descriptors::default()).unwrap_err()
        };
        for number in [-1, i32::MAX, i32::MIN] {
            assert!(check(number).contains("no possible one"), "{number}");
        }
        assert!(check(7).contains("unknown"));
    }

    #[test]
    fn lines_of_all_kernels_are_read() {
        let l = line("        3 events:       1d data:                a  pos:0 ino:40e sdev:10").unwrap();
        assert_eq!(
            (l.number, l.events, l.data, l.ino, l.dev),
            (3, 0x1d, 10, 0x40e, libc::makedev(0, 0x10))
        );
        let l = line("7 events: 8000001d data: ffffffffffffffff pos:0 ino:1 sdev:9").unwrap();
        assert_eq!((l.number, l.events, l.data, l.ino), (7, 0x8000_001d, u64::MAX, 1));
        assert!(line("x").is_err() && line("").is_err());
    }
}
