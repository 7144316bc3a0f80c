//! Which pages a process has not written since the last committed checkpoint, so that they need not even be looked at.
//!
//! ```text
//! (untracked) ── snapshot: all is written, every mapping registered and protected ──> armed ── commit ──> tracked
//! tracked ── snapshot: what is still protected is clean, the rest is protected again ──> armed ── commit ──> tracked
//!                                     any failure, any doubt: the userfaultfd is closed ──> (untracked)
//! ```
//! The program never has the userfaultfd: the intermediary of the snapshot makes it, which shares the memory but not
//! the descriptors (`inject/src/snapshot.rs`), the snapshot child inherits it, and the agent takes it from there. When
//! the agent dies the kernel closes it and forgets the registrations.
//!
//! A page is clean only where the kernel says so: it lies in a registered mapping and is still protected. Protection
//! comes from the scan of the last snapshot alone, which protected exactly the pages that it stored. So everything else
//! counts as written without any book-keeping of ours: mappings that are new, moved, grown, or made again at the same
//! place, pages given back and used again, an address space replaced by exec (its mappings are not registered),
//! children after a fork.
//!
//! Before Linux 6.7 there is no such protection. There the kernel's soft-dirty bits say what has been written, and the
//! registration still says which mappings are the same and have not been moved. The bits are taken away right after the
//! fork; the snapshot child has inherited them as they were, and they are read from it when the program runs again
//! ([`Candidates`]). What they do not show is seen otherwise: that a page was given back and is the zero page now
//! (`move_pages`), that an equal page was put in its place (mappings marked as mergeable are left out), that somebody
//! else has taken the bits away, and that the userfaultfd belongs to another address space (both by the
//! [canary](Tracked::canary)).
//!
//! Neither shows what a device writes: it has taken hold of the pages before, and no processor faults. Of a process to
//! whose memory devices may write ([`devices_write`]) nothing counts as clean.

mod kernel;

use crate::memory::code::Code;
use crate::memory::copy::covers;
use belay_abi::inject::{UFFD_ASYNC, UFFD_PLAIN};
use belay_image::extents::Extent;
use belay_image::manifest::Dirty;
use belay_image::TableId;
use belay_kernel::proc::Map;
use belay_kernel::{softdirty, uffd};
use belay_plugins::gate::{self, gpu};
use belay_plugins::infiniband;
use kernel::{begin_anew, protect, Candidates};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;

const PAGE: u64 = 4096;
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
    /// With soft-dirty bits, the address of a page that has been marked as written on purpose: when it is not any more,
    /// somebody else has taken marks away.
    canary: u64,
}

/// How the kernel tells which pages have been written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Method {
    /// By asynchronous write protection.
    #[default]
    Protection,
    /// By soft-dirty bits.
    SoftDirty,
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
    /// Somebody else takes away soft-dirty bits, as of the last snapshot.
    disturbed: bool,
    /// Processes to whose memory devices write, as of the last snapshot.
    by_devices: usize,
    method: Method,
    off: bool,
    /// Somebody has declared what its loops do.
    pub(crate) declares: bool,
    /// The last checkpoint has found no process that has declared anything.
    pub(crate) silent: bool,
    /// The files that the processes map.
    pub(crate) code: Code,
}

/// What a checkpoint has found out, which holds once it is committed.
#[derive(Debug)]
pub struct Findings {
    pub(crate) armed: Vec<Armed>,
    pub(crate) code: Code,
    /// Bytes that were not stored because the programs have declared that they overwrite them.
    pub left_out: u64,
    /// What of each process was new.
    pub dirty: Option<Dirty>,
}

/// A process at the snapshot: to be tracked from here on, if the checkpoint is committed.
#[derive(Debug)]
pub(crate) struct Armed {
    key: Key,
    uffd: Option<OwnedFd>,
    policy: Policy,
    canary: u64,
    disturbed: bool,
    by_devices: bool,
}

/// What is clean in one process.
#[derive(Debug, Default)]
pub(crate) struct Clean {
    /// Ranges of pages that hold data and have not been written.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// Where they lie.
    pub(crate) table: Vec<Extent>,
    /// With soft-dirty bits: where else clean pages may be.
    candidates: Option<Candidates>,
}

/// What the snapshot of one process shall do.
#[derive(Debug)]
pub(crate) struct Wish {
    known: Option<Tracked>,
    policy: Policy,
    method: Method,
    by_devices: bool,
    /// What has been found before the copy was made: the clean pages, and how many hold data.
    looked: Option<io::Result<(Clean, u64)>>,
    /// Which userfaultfd the snapshot child shall bring, as of `SnapshotTable::want_uffd`.
    pub(crate) make: i32,
}

impl Tracking {
    /// Never tracks.
    pub fn off() -> Self {
        Self {
            off: true,
            ..Self::default()
        }
    }

    /// Tracks in the best way that the kernel has.
    pub fn written() -> Self {
        let method = match uffd::is_asynchronous() {
            Ok(true) => Ok(Method::Protection),
            Ok(false) => softdirty::works()
                .map(|()| Method::SoftDirty)
                .map_err(|e| format!("no userfaultfd with asynchronous write protection (Linux 6.7), and soft-dirty bits: {e}")),
            Err(e) => Err(no_uffd(&e)),
        };
        let mut tracking = Self::default();
        match method {
            Ok(method) => tracking.method = method,
            Err(reason) => tracking.note_unavailable(reason),
        }
        tracking
    }

    /// The job has been restarted: these files are stored already.
    pub fn knows(&mut self, code: Code) {
        self.code = code;
    }

    /// How written pages are found where there is no [hindrance](Tracking::hindrance).
    pub fn method(&self) -> &'static str {
        match self.method {
            Method::Protection => "userfaultfd",
            Method::SoftDirty => "soft-dirty bits",
        }
    }

    /// Why written pages are found by their contents alone, where that is so.
    pub fn hindrance(&self) -> Option<String> {
        let paused = self.paused.values().filter(|p| p.pause > 0).count();
        match &self.unavailable {
            Some(reason) => Some(reason.clone()),
            None if self.disturbed => Some("another program takes away the soft-dirty bits of processes of the job".into()),
            None if self.by_devices > 0 => Some(format!("devices write to the memory of {} processes", self.by_devices)),
            None if paused > 0 => Some(format!("most pages of {paused} processes are written between checkpoints")),
            None => None,
        }
    }

    /// Takes out what is known about a process: unless the checkpoint is committed, it does not hold any more. Where it
    /// is written to `by_devices`, what was known is not true either.
    pub(crate) fn wish(&mut self, key: Key, by_devices: bool) -> Wish {
        let known = self.tracked.remove(&key).filter(|_| !by_devices);
        let mut policy = known
            .as_ref()
            .map(|t| t.policy)
            .or(self.paused.remove(&key))
            .unwrap_or_default();
        let pausing = policy.pause > 0;
        policy.pause = policy.pause.saturating_sub(1);
        let make = match self.method {
            _ if self.off || self.unavailable.is_some() || known.is_some() || pausing || by_devices => 0,
            Method::Protection => UFFD_ASYNC,
            Method::SoftDirty => UFFD_PLAIN,
        };
        let method = self.method;
        Wish {
            known,
            policy,
            method,
            by_devices,
            looked: None,
            make,
        }
    }

    /// Forgets the processes of which something is stored that `is_there` does not know any more.
    pub(crate) fn forget_lost(&mut self, is_there: &dyn Fn(u32) -> bool) {
        self.tracked.retain(|_, tracked| {
            // Extents of one chunk lie beside each other, as a rule.
            let chunks = tracked
                .table
                .chunk_by(|a, b| a.chunk == b.chunk)
                .filter_map(<[Extent]>::first);
            chunks.into_iter().all(|e| is_there(e.chunk))
        });
    }

    /// Notes that the kernel would not make a userfaultfd.
    pub(crate) fn note_no_uffd(&mut self, error: &io::Error) {
        self.note_unavailable(no_uffd(error));
    }

    fn note_unavailable(&mut self, reason: String) {
        tracing::info!(reason, "written pages are not tracked");
        self.unavailable = Some(reason);
    }

    /// Nothing counts as stored any more.
    pub fn forget(&mut self) {
        self.tracked.clear();
    }

    /// Takes over what the snapshot armed, now that its checkpoint is committed with these extents.
    pub fn commit(&mut self, found: Findings, tables: &BTreeMap<TableId, Vec<Extent>>) {
        let Findings { armed, code, .. } = found;
        self.code = code;
        self.code.commit(tables);
        self.tracked.clear();
        self.paused.clear();
        self.disturbed = armed.iter().any(|a| a.disturbed);
        self.by_devices = armed.iter().filter(|a| a.by_devices).count();
        for Armed {
            key,
            uffd,
            policy,
            canary,
            ..
        } in armed
        {
            match (uffd, tables.get(&TableId::Process(key.0))) {
                (Some(uffd), Some(table)) if policy.pause == 0 => {
                    let table = table.clone();
                    self.tracked.insert(
                        key,
                        Tracked {
                            uffd,
                            table,
                            policy,
                            canary,
                        },
                    );
                }
                // Closing the descriptor ends the tracking.
                _ if policy != Policy::default() => drop(self.paused.insert(key, policy)),
                _ => {}
            }
        }
    }
}

fn no_uffd(error: &io::Error) -> String {
    format!("no userfaultfd: {error}")
}

/// Whether devices may write to the memory of a process in which these `libraries` take part: they do for the sake of a
/// device. The control page stays when the device is closed again.
pub(crate) fn devices_write(maps: &[Map], libraries: &[String]) -> bool {
    let of_device = |m: &Map| gate::is_page(m) || infiniband::is_mapping(m) || gpu::is_mapping(m);
    !libraries.is_empty() || maps.iter().any(of_device)
}

impl Wish {
    /// Finds the clean pages of a stopped process, thread `task`, of which the last checkpoint is known, and protects all that
    /// hold data: before the copy is made, which need not have what is clean. What is written from here on counts for the next
    /// checkpoint; that is only what the kernel tells a thread of its processor (rseq), which it does again after a restart.
    pub(crate) fn look<'a>(&mut self, task: i32, maps: impl Iterator<Item = &'a Map>) {
        if let (Method::Protection, Some(known)) = (self.method, &self.known) {
            self.looked = Some(protect(&known.uffd, task, maps, false));
        }
    }

    /// The clean pages, as far as they are known by now.
    pub(crate) fn clean(&self) -> &[(u64, u64)] {
        self.looked
            .as_ref()
            .and_then(|found| found.as_ref().ok())
            .map_or(&[], |(clean, _)| &clean.ranges)
    }
}

/// Finds the clean pages of a stopped process, thread `task`, and protects all that hold data, or lets its soft-dirty
/// bits begin anew. `maps` are those whose pages a snapshot child writes; `made` is the userfaultfd that it has
/// brought. The tracking ends where anything fails.
pub(crate) fn arm<'a>(
    key: Key,
    task: i32,
    maps: impl DoubleEndedIterator<Item = &'a Map> + Clone,
    wish: Wish,
    made: Option<OwnedFd>,
) -> (Armed, Clean) {
    let Wish {
        known,
        policy,
        method,
        by_devices,
        looked,
        ..
    } = wish;
    let (uffd, table, canary) = match known {
        Some(t) => (Some(t.uffd), t.table, Some(t.canary)),
        None => (made, Vec::new(), None),
    };
    let mut armed = Armed {
        key,
        uffd,
        policy,
        canary: 0,
        disturbed: false,
        by_devices,
    };
    let Some(uffd) = &armed.uffd else {
        return (armed, Clean::default());
    };
    let found = match method {
        Method::Protection => {
            let found = looked.unwrap_or_else(|| protect(uffd, task, maps.clone(), true));
            found.map(|(mut clean, all)| {
                // What the copy does not have is stored otherwise.
                let inherited: Vec<_> = maps.map(|m| (m.start, m.end)).collect();
                clean.ranges.retain(|range| covers(&inherited, range.0));
                armed.policy = policy.after(clean.pages(), all);
                clean
            })
        }
        Method::SoftDirty => begin_anew(uffd, task, maps, canary).map(|(candidates, canary)| {
            armed.canary = canary;
            Clean {
                candidates,
                ..Clean::default()
            }
        }),
    };
    match found {
        Ok(clean) => (armed, Clean { table, ..clean }),
        Err(error) => {
            armed.end(&error);
            (armed, Clean::default())
        }
    }
}

impl Clean {
    pub(crate) fn pages(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| (end - start) / PAGE).sum()
    }

    /// Looks in the snapshot child for pages without a soft-dirty bit. `all` is the number of pages in it that hold
    /// data. Where that fails no page is known to be clean, and the tracking ends.
    pub(crate) fn look(&mut self, child: i32, all: u64, armed: &mut Armed) {
        let Some(candidates) = self.candidates.take() else {
            return;
        };
        match candidates.clean_in(child) {
            Ok(Some(ranges)) => {
                self.ranges = ranges;
                armed.policy = armed.policy.after(self.pages(), all);
            }
            Ok(None) => armed.disturbed = true,
            Err(error) => armed.end(&error),
        }
    }
}

impl Armed {
    /// Closing the descriptor ends the tracking.
    fn end(&mut self, error: &io::Error) {
        tracing::debug!(pid = self.key.0, %error, "tracking ended");
        self.uffd = None;
    }
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
    fn where_bits_cannot_be_read_no_page_counts_as_clean_and_tracking_ends() {
        let mut clean = Clean {
            candidates: Some(Candidates {
                ranges: vec![(0, PAGE)],
                canary: 0,
            }),
            ..Clean::default()
        };
        let mut armed = Armed {
            key: (1, 1),
            uffd: Some(std::fs::File::open("/dev/null").unwrap().into()),
            policy: Policy::default(),
            canary: 0,
            disturbed: false,
            by_devices: false,
        };
        // No process has this number.
        clean.look(i32::MAX, 1, &mut armed);
        assert!(clean.ranges.is_empty() && armed.uffd.is_none() && !armed.disturbed);
    }

    #[test]
    fn of_a_process_to_which_devices_write_nothing_is_clean() {
        let maps = |name: &str| Map::parse(format!("1000-2000 rw-s 00000000 00:01 7 {name}\n").as_bytes()).unwrap();
        for name in ["/dev/infiniband/uverbs0", "/dev/nvidia0", belay_abi::control::MAPPED] {
            assert!(devices_write(&maps(name), &[]), "{name}");
        }
        assert!(!devices_write(&maps("/dev/shm/x"), &[]));
        assert!(devices_write(&[], &["libcuda.so.1".into()]), "it has left its GPU");

        // It was tracked when it opened the device.
        let mut tracking = Tracking::default();
        let tracked = Tracked {
            uffd: std::fs::File::open("/dev/null").unwrap().into(),
            table: Vec::new(),
            policy: Policy::default(),
            canary: 0,
        };
        tracking.tracked.insert((1, 1), tracked);
        let wish = tracking.wish((1, 1), true);
        assert!(wish.known.is_none() && wish.make == 0);
        let (armed, clean) = arm((1, 1), 1, [].iter(), wish, None);
        assert!(armed.uffd.is_none() && clean.ranges.is_empty());
        let found = Findings {
            armed: vec![armed],
            code: Code::default(),
            left_out: 0,
            dirty: None,
        };
        tracking.commit(found, &BTreeMap::new());
        assert!(tracking.hindrance().is_some_and(|why| why.contains("devices")));
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
        let makes = |wish: &Wish| wish.make == UFFD_ASYNC;
        for left in (0..PAUSE).rev() {
            t.paused.insert((1, 1), p);
            let wish = t.wish((1, 1), false);
            assert!(!makes(&wish));
            assert_eq!(wish.policy.pause, left);
            p = wish.policy;
        }
        assert!(makes(&t.wish((1, 1), false)));
    }
}
