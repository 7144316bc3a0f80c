//! Which pages a process has not written since the last committed checkpoint, so that they need not even be looked at.
//!
//! ```text
//! (untracked) ── snapshot: all is written, every mapping registered and protected ──> armed ── commit ──> tracked
//! tracked ── snapshot: what is still protected is clean, the rest is protected again ──> armed ── commit ──> tracked
//!                                     any failure, any doubt: the userfaultfd is closed ──> (untracked)
//! ```
//! The program never has the userfaultfd: the intermediary of the snapshot makes it, which shares the memory but not the descriptors (`inject/src/snapshot.rs`), the
//! snapshot child inherits it, and the agent takes it from there. When the agent dies the kernel closes it and forgets the registrations.
//!
//! A page is clean only where the kernel says so: it lies in a registered mapping and is still protected. Protection comes from the scan of the last snapshot alone, which
//! protected exactly the pages that it stored. So everything else counts as written without any book-keeping of ours: mappings that are new, moved, grown, or made
//! again at the same place, pages given back and used again, an address space replaced by exec (its mappings are not registered), children after a fork.

use crate::memory::{self, Pages};
use belay_image::extents::Extent;
use belay_kernel::pagemap::Pagemap;
use belay_kernel::proc::Map;
use belay_kernel::uffd;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// A process whose clean pages are fewer than one in this many gains nothing, but pays a fault for each page that it writes.
const WORTH_ONE_IN: u64 = 8;
/// After so many snapshots in a row without gain a process is left alone,
const FUTILE: u32 = 3;
/// for so many snapshots.
const PAUSE: u32 = 16;

/// A process whose writes are tracked, as of the last committed checkpoint.
#[derive(Debug)]
struct Tracked {
    uffd: OwnedFd,
    table: Vec<Extent>,
    policy: Policy,
}

/// Whether tracking pays.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Policy {
    futile: u32,
    pause: u32,
}

impl Policy {
    /// The policy after a snapshot in which `clean` of `all` pages were clean; `all` is 0 where nothing could be said.
    fn after(self, clean: u64, all: u64) -> Self {
        let futile = match (all, clean * WORTH_ONE_IN < all) {
            (0, _) => self.futile,
            (_, true) => self.futile + 1,
            (_, false) => 0,
        };
        if futile >= FUTILE {
            Self { futile: 0, pause: PAUSE }
        } else {
            Self { futile, pause: 0 }
        }
    }
}

/// Identity of a process: its number and the time of its start.
type Key = (i32, u64);

/// What is known about the job's processes since the last committed checkpoint.
#[derive(Debug, Default)]
pub struct Tracking {
    tracked: HashMap<Key, Tracked>,
    /// Processes that are left alone for a while.
    paused: HashMap<Key, Policy>,
    /// Why the kernel does not track, once that is known.
    unavailable: Option<String>,
    off: bool,
}

/// A process at the snapshot: to be tracked from here on, if the checkpoint is committed.
#[derive(Debug)]
pub struct Armed {
    key: Key,
    uffd: Option<OwnedFd>,
    policy: Policy,
}

/// What is clean in one process.
#[derive(Debug, Default)]
pub(crate) struct Clean {
    /// Ranges of pages that hold data and have not been written.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// Where they lie.
    pub(crate) table: Vec<Extent>,
}

/// What the snapshot of one process shall do.
#[derive(Debug)]
pub(crate) struct Wish {
    known: Option<Tracked>,
    policy: Policy,
    /// The snapshot child shall bring a userfaultfd.
    pub(crate) make: bool,
}

impl Tracking {
    /// Never tracks.
    pub fn off() -> Self {
        Self {
            off: true,
            ..Self::default()
        }
    }

    /// Why written pages are found by their contents alone, where that is so.
    pub fn hindrance(&self) -> Option<String> {
        let paused = self.paused.values().filter(|p| p.pause > 0).count();
        match &self.unavailable {
            Some(reason) => Some(reason.clone()),
            None if paused > 0 => Some(format!("most pages of {paused} processes are written between checkpoints")),
            None => None,
        }
    }

    /// Takes out what is known about a process: unless the checkpoint is committed, it does not hold any more.
    pub(crate) fn wish(&mut self, key: Key) -> Wish {
        let known = self.tracked.remove(&key);
        let mut policy = known
            .as_ref()
            .map(|t| t.policy)
            .or(self.paused.remove(&key))
            .unwrap_or_default();
        let pausing = policy.pause > 0;
        policy.pause = policy.pause.saturating_sub(1);
        let make = !self.off && self.unavailable.is_none() && known.is_none() && !pausing;
        Wish { known, policy, make }
    }

    /// Notes that the kernel would not make a userfaultfd.
    pub(crate) fn note_unavailable(&mut self, error: &io::Error) {
        tracing::info!(%error, "written pages are not tracked: no userfaultfd with asynchronous write protection");
        self.unavailable = Some(format!("no userfaultfd: {error}"));
    }

    /// Nothing counts as stored any more.
    pub fn forget(&mut self) {
        self.tracked.clear();
    }

    /// Takes over what the snapshot armed, now that its checkpoint is committed with these extents.
    pub fn commit(&mut self, armed: Vec<Armed>, tables: &BTreeMap<i32, Vec<Extent>>) {
        self.tracked.clear();
        self.paused.clear();
        for Armed { key, uffd, policy } in armed {
            match (uffd, tables.get(&key.0)) {
                (Some(uffd), Some(table)) if policy.pause == 0 => {
                    let table = table.clone();
                    self.tracked.insert(key, Tracked { uffd, table, policy });
                }
                // Closing the descriptor ends the tracking.
                _ if policy != Policy::default() => drop(self.paused.insert(key, policy)),
                _ => {}
            }
        }
    }
}

/// Finds the clean pages of a stopped process, thread `task`, and protects all that hold data. `maps` are those whose pages a snapshot child writes; `made` is the
/// userfaultfd that it has brought. The tracking ends where anything fails.
pub(crate) fn arm<'a>(
    key: Key,
    task: i32,
    maps: impl Iterator<Item = &'a Map>,
    wish: Wish,
    made: Option<OwnedFd>,
) -> (Armed, Clean) {
    let Wish { known, policy, .. } = wish;
    let first = known.is_none();
    let (uffd, table) = match (known, made) {
        (Some(t), _) => (Some(t.uffd), t.table),
        (None, made) => (made, Vec::new()),
    };
    let mut clean = Clean::default();
    let mut armed = Armed { key, uffd, policy };
    let Some(uffd) = &armed.uffd else {
        return (armed, clean);
    };
    let mut all = 0;
    match protect(uffd, task, maps, &mut clean.ranges, &mut all) {
        Ok(()) => {
            let found: u64 = clean.ranges.iter().map(|(start, end)| end - start).sum();
            armed.policy = policy.after(found, if first { 0 } else { all });
            if first {
                // No scan of ours has protected these pages.
                clean.ranges.clear();
            }
            clean.table = table;
        }
        Err(error) => {
            tracing::debug!(pid = key.0, %error, "tracking ended");
            armed.uffd = None;
            clean = Clean::default();
        }
    }
    (armed, clean)
}

fn protect<'a>(
    uffd: &OwnedFd,
    task: i32,
    maps: impl Iterator<Item = &'a Map>,
    clean: &mut Vec<(u64, u64)>,
    all: &mut u64,
) -> io::Result<()> {
    let mut pagemap = Pagemap::open(task)?;
    let mut found = Vec::new();
    for map in maps.filter(|m| memory::pages(m) == Pages::Own) {
        found.clear();
        match pagemap.protect(map.start, map.end, &mut found) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
                // Not registered: everything in it counts as written, and is protected for the next time.
                found.clear();
                if pagemap.with_data(&[(map.start, map.end)])? == [false] {
                    continue;
                }
                uffd::register(uffd.as_fd(), map.start, map.end)?;
                pagemap.protect(map.start, map.end, &mut found)?;
                found.iter_mut().for_each(|r| r.2 = true);
            }
            Err(e) => return Err(e),
        }
        *all += found.iter().map(|(start, end, _)| end - start).sum::<u64>();
        clean.extend(found.iter().filter(|r| !r.2).map(|r| (r.0, r.1)));
    }
    Ok(())
}

/// `found` without `clean`, both sorted.
pub(crate) fn without(found: (u64, u64), clean: &[(u64, u64)], out: &mut Vec<(u64, u64)>) {
    let (mut at, end) = found;
    let first = clean.partition_point(|c| c.1 <= at);
    for c in clean[first..].iter().take_while(|c| c.0 < end) {
        if c.0 > at {
            out.push((at, c.0));
        }
        at = at.max(c.1);
    }
    if at < end {
        out.push((at, end));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_parts_are_cut_out() {
        let cut = |found, clean: &[(u64, u64)]| {
            let mut out = Vec::new();
            without(found, clean, &mut out);
            out
        };
        assert_eq!(cut((2, 9), &[]), [(2, 9)]);
        assert_eq!(cut((2, 9), &[(0, 2), (3, 4), (6, 9), (9, 20)]), [(2, 3), (4, 6)]);
        assert_eq!(cut((2, 9), &[(0, 20)]), []);
        assert_eq!(cut((2, 9), &[(0, 5)]), [(5, 9)]);
        assert_eq!(cut((2, 9), &[(8, 12)]), [(2, 8)]);
    }

    #[test]
    fn tracking_that_does_not_pay_pauses_and_begins_again() {
        let mut p = Policy::default();
        for _ in 0..FUTILE - 1 {
            p = p.after(1, 100);
        }
        assert_eq!(p.pause, 0);
        assert_eq!(p.after(50, 100), Policy::default());
        assert_eq!(p.after(0, 0), p, "nothing was known");
        p = p.after(0, 100);
        assert_eq!(p.pause, PAUSE);
        let mut t = Tracking::default();
        for left in (0..PAUSE).rev() {
            t.paused.insert((1, 1), p);
            let wish = t.wish((1, 1));
            assert!(!wish.make);
            assert_eq!(wish.policy.pause, left);
            p = wish.policy;
        }
        assert!(t.wish((1, 1)).make);
    }
}
