//! epoll: interest lists, nested instances included.
//!
//! An entry is known by (description, number at the time it was added); the number may since have been closed or may refer to another
//! description, while the description lives on elsewhere. Entries are added again in a process, where each description can be put at
//! the number under which it was added. A level-triggered entry reports anew by itself; an edge-triggered one reports its present state once.

use crate::capture::Session;
use crate::fault::{refuse, At, Fault};
use crate::model::{DescId, Descriptors, Kind, Table};
use crate::sys::fdinfo::number;
use crate::sys::{check, fd};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// An epoll instance.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct EpollState {
    interest: Vec<Interest>,
}

/// One entry of the interest list.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Interest {
    /// Number under which it was added.
    number: RawFd,
    desc: DescId,
    events: u32,
    data: u64,
}

const KCMP_EPOLL_TFD: i32 = 7;
const CTL_ADD: i32 = libc::EPOLL_CTL_ADD;
/// Bits that are not events.
const PRIVATE: u32 = (libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;

/// One `tfd:` line.
struct Line {
    number: RawFd,
    events: u32,
    data: u64,
    ino: u64,
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
    })
}

/// Captures an instance.
pub(crate) fn capture(s: &mut Session<'_>, id: DescId) -> Result<EpollState, Fault> {
    let found = &s.found[id];
    let lines = found
        .info
        .all("tfd:")
        .map(line)
        .collect::<io::Result<Vec<_>>>()
        .at("read fdinfo")?;
    let (raw, pid) = (found.raw(), found.holder.pid);
    let mut interest: Vec<Interest> = Vec::new();
    for l in lines {
        // Several entries may have one number; the kernel tells them apart by their order.
        let offset = interest.iter().filter(|i| i.number == l.number).count();
        let desc = target(s, raw, pid, &l, offset)?;
        interest.push(Interest {
            number: l.number,
            desc,
            events: l.events,
            data: l.data,
        });
    }
    Ok(EpollState { interest })
}

/// The description behind an entry: usually the one that has its number in the process; else any with that inode.
fn target(s: &Session<'_>, epoll: RawFd, pid: i32, l: &Line, offset: usize) -> Result<DescId, Fault> {
    let usual = s.lookup(pid, l.number);
    let elsewhere = (0..s.found.len()).filter(|id| s.found[*id].stat.st_ino == l.ino);
    for id in usual.into_iter().chain(elsewhere) {
        if is_target(epoll, l.number, offset, s.found[id].raw()).at("compare with an entry (kcmp)")? {
            return Ok(id);
        }
    }
    refuse(format!(
        "it waits for descriptor {} whose description nobody has any more under a number that can be found",
        l.number
    ))
}

fn is_target(epoll: RawFd, number: RawFd, offset: usize, candidate: RawFd) -> io::Result<bool> {
    #[repr(C)]
    struct Slot {
        epoll: u32,
        number: u32,
        offset: u32,
    }
    let slot = Slot {
        epoll: epoll.cast_unsigned(),
        number: number.cast_unsigned(),
        offset: u32::try_from(offset).map_err(io::Error::other)?,
    };
    let me = std::process::id();
    // SAFETY: `slot` is valid for reading; the other arguments are numbers.
    let r = unsafe { libc::syscall(libc::SYS_kcmp, me, me, KCMP_EPOLL_TFD, candidate, &raw const slot) };
    if r == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(r == 0)
}

/// Makes an empty instance.
pub(crate) fn rebuild() -> Result<OwnedFd, Fault> {
    // SAFETY: epoll_create1 takes a number.
    let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).at("epoll_create")?;
    // SAFETY: the kernel has just returned this number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds the entries again, in a process whose table is about to be laid out. `source` gives the agent's descriptor of a description; what
/// has none yet (pidfds) is added by [`restore_late`].
pub(crate) fn restore_interest(e: &EpollState, own: RawFd, source: impl Fn(DescId) -> Option<RawFd>) -> Result<(), Fault> {
    // Used one-shot entries first, while nothing else can report.
    let (used, live): (Vec<&Interest>, Vec<&Interest>) = e.interest.iter().partition(|i| is_used(i.events));
    for i in used.into_iter().chain(live) {
        let Some(from) = source(i.desc) else { continue };
        fd::dup_to(from, i.number, true).at(format!("put at number {}", i.number))?;
        add(own, i)?;
    }
    Ok(())
}

/// Adds entries for descriptions that exist only now, under the numbers they have in this process.
pub(crate) fn restore_late(d: &Descriptors, e: &EpollState, own: RawFd, table: &Table) -> Result<(), Fault> {
    for i in &e.interest {
        let late = match d.descriptions.get(i.desc).map(|d| &d.kind) {
            Some(Kind::Pidfd(p)) => p.is_late(),
            Some(Kind::Path(p)) => p.needs_process.is_some(),
            _ => false,
        };
        if late && table.slots.iter().any(|s| s.fd == i.number && s.desc == i.desc) {
            add(own, i)?;
        }
    }
    Ok(())
}

/// Whether a one-shot entry has reported and waits to be armed again.
fn is_used(events: u32) -> bool {
    events & libc::EPOLLONESHOT as u32 != 0 && events & !PRIVATE == 0
}

fn add(own: RawFd, i: &Interest) -> Result<(), Fault> {
    let used = is_used(i.events);
    // Adding always watches for errors and hang-up; only reporting once silences a one-shot entry, so it is made to report if it can.
    let any = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLPRI) as u32;
    let mut event = libc::epoll_event {
        events: if used { i.events | any } else { i.events },
        u64: i.data,
    };
    // SAFETY: `event` is valid for reading.
    check(unsafe { libc::epoll_ctl(own, CTL_ADD, i.number, &mut event) }).at(format!("add descriptor {}", i.number))?;
    if !used {
        return Ok(());
    }
    let mut out = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: `out` has room for one event.
    let reported = check(unsafe { libc::epoll_wait(own, &mut out, 1, 0) }).at("silence a used one-shot entry")?;
    if reported == 0 {
        event.events = i.events;
        // SAFETY: `event` is valid for reading.
        let set = check(unsafe { libc::epoll_ctl(own, libc::EPOLL_CTL_MOD, i.number, &mut event) });
        set.at("silence a used one-shot entry")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_kernels_are_read() {
        let l = line("        3 events:       1d data:                a  pos:0 ino:40e sdev:10").unwrap();
        assert_eq!((l.number, l.events, l.data, l.ino), (3, 0x1d, 10, 0x40e));
        let l = line("7 events: 8000001d data: ffffffffffffffff pos:0 ino:1 sdev:9").unwrap();
        assert_eq!((l.number, l.events, l.data, l.ino), (7, 0x8000_001d, u64::MAX, 1));
        assert!(line("x").is_err() && line("").is_err());
    }
}
