//! Memory that processes have in common because one has forked the other: it is read once, by the maker, before it
//! makes the others, at the addresses where all of them had it. They inherit it as they had, each page once for all
//! until somebody writes to it; the restorer then adds what a process has for itself. What is common is told by where
//! the pages are stored: pages of the same contents, at the same address, are stored in one place. The plan is pure.
//!
//! ```text
//! maker        ▓▓▓▓▓▓▓▓░░      ▓ read before its children are made     ░ read by its restorer
//!   child      ▓▓▓▓─▓▓▓ ░      ─ inherited, and replaced or given back
//!     child    ▓▓▓▓▓▓▓▓
//! ```

use crate::attributes;
use crate::fail::{Outcome, RestartError};
use crate::layout::{uncovered, Range};
use crate::tree::{self, NodeId, Role, Tree, AGENT};
use belay_abi::restore::Step;
use belay_image::extents::{Extent, PAGE};
use belay_image::model::{Process, Vma, VmaKind};
use belay_kernel::place::Area;
use belay_kernel::prctl;
use belay_storage::chunk::Chunk;
use std::cell::RefCell;
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

/// Less than this is not worth a mapping of its own.
const WORTH: u64 = 1 << 20;
/// Distance kept from everything that the restart itself has mapped, which may grow.
const MARGIN: u64 = 256 << 20;
/// Read at once.
const BATCH: usize = 256 << 10;

/// A mapping made before the processes are themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Early {
    pub(crate) range: Range,
    /// With MAP_NORESERVE, which stays.
    pub(crate) unreserved: bool,
    /// Without huge pages (MADV_NOHUGEPAGE), which stays.
    pub(crate) small: bool,
}

/// The mappings of a process that have been made early, by itself or by those that made it.
#[derive(Debug, Default)]
pub(crate) struct Areas(RefCell<Vec<Area>>);

/// What a process has in common with others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Mapped before its children are made,
    pub(crate) maps: Vec<Early>,
    /// and read.
    pub(crate) reads: Vec<Extent>,
    /// What of its own memory is mapped when it becomes itself.
    pub(crate) kept: Vec<Range>,
    /// Inherited pages that it does not have.
    pub(crate) drops: Vec<Range>,
    /// What is read by its restorer.
    pub(crate) rest: Vec<Extent>,
}

/// What a process inherits.
#[derive(Debug, Clone, Default)]
struct Heritage {
    maps: Vec<Early>,
    pages: Vec<Extent>,
}

/// Makes the plan: what each process of the job with memory has in common with those that it makes, by PID. `extents`
/// are all its pages; `own` is what the agent has mapped.
pub(crate) fn plan(tree: &Tree, processes: &[Process], extents: &HashMap<i32, Vec<Extent>>, own: &[Range]) -> HashMap<i32, Share> {
    let families = Families {
        tree,
        processes,
        extents,
        own,
    };
    let mut out = HashMap::new();
    let mut open: Vec<(NodeId, Rc<Heritage>)> = vec![(AGENT, Rc::default())];
    while let Some((id, heritage)) = open.pop() {
        let node = &tree.nodes[id];
        let passed = match families.process(id) {
            None => heritage,
            Some(p) => {
                let (share, passed) = families.share(id, p, &heritage);
                out.insert(p.pid, share);
                passed.map_or(heritage, Rc::new)
            }
        };
        open.extend(
            node.before
                .iter()
                .chain(&node.after)
                .map(|child| (*child, Rc::clone(&passed))),
        );
    }
    out
}

struct Families<'a> {
    tree: &'a Tree,
    processes: &'a [Process],
    extents: &'a HashMap<i32, Vec<Extent>>,
    own: &'a [Range],
}

impl Families<'_> {
    /// The process with memory that node `id` becomes.
    fn process(&self, id: NodeId) -> Option<&Process> {
        let Role::Process(i) = self.tree.nodes[id].role else {
            return None;
        };
        self.processes.get(i).filter(|p| self.extents.contains_key(&p.pid))
    }

    /// Whether the memory of `p` is its own alone.
    fn is_alone(&self, p: &Process) -> bool {
        let shares = |q: &Process| tree::shares_memory(q) && (q.pid == p.pid || q.shares_mm_with == p.pid);
        !self.processes.iter().any(shares)
    }

    fn pages(&self, p: &Process) -> &[Extent] {
        self.extents.get(&p.pid).map_or(&[], Vec::as_slice)
    }

    /// Mappings of `p` that can be inherited.
    fn mappings(&self, p: &Process) -> Vec<Early> {
        let has = |v: &Vma, flag: &str| v.flags.iter().any(|f| f == flag);
        let plain = |v: &&Vma| {
            let anonymous = matches!(v.kind, VmaKind::Anonymous { .. } | VmaKind::Heap);
            let before = |a: u64, b: u64| a.saturating_add(MARGIN) <= b;
            let apart = self.own.iter().all(|o| before(v.end, o.start) || before(o.end, v.start));
            anonymous && apart && !has(v, "gd") && !has(v, "dp")
        };
        let early = |v: &Vma| Early {
            range: v.start..v.end,
            unreserved: has(v, "nr"),
            small: has(v, "nh"),
        };
        p.vmas.iter().filter(plain).map(early).collect()
    }

    /// The part in it of process `p`, and what those that it makes inherit, where that is more than it has inherited itself.
    fn share(&self, id: NodeId, p: &Process, heritage: &Heritage) -> (Share, Option<Heritage>) {
        let all = self.pages(p);
        if !self.is_alone(p) {
            let rest = all.to_vec();
            return (
                Share {
                    rest,
                    ..Share::default()
                },
                None,
            );
        }
        let mappings = self.mappings(p);
        let ranges: Vec<Range> = mappings.iter().map(|m| m.range.clone()).collect();
        let wanted = self.wanted(id, &clip(all, &ranges));
        let there = common(&wanted, &heritage.pages);
        let reads = without(&wanted, &places(&there));
        let mut share = Share::default();
        let mut passed = None;
        if reads.iter().map(|e| e.bytes).sum::<u64>() >= WORTH {
            let mapped: Vec<Range> = heritage.maps.iter().map(|m| m.range.clone()).collect();
            for m in mappings
                .iter()
                .filter(|m| reads.iter().any(|e| e.vaddr < m.range.end && m.range.start < e.end()))
            {
                let missing = uncovered(m.range.clone(), &mapped).into_iter();
                share.maps.extend(missing.map(|range| Early { range, ..*m }));
            }
            let mut more = heritage.clone();
            more.maps.extend(share.maps.iter().cloned());
            more.maps.sort_by_key(|m| m.range.start);
            more.pages = without(&more.pages, &places(&reads));
            more.pages.extend(&reads);
            more.pages.sort_by_key(|e| e.vaddr);
            share.reads = reads;
            passed = Some(more);
        }
        let has = passed.as_ref().unwrap_or(heritage);
        share.kept = kept(&has.maps, &mappings);
        let inherited = clip(&has.pages, &share.kept);
        share.rest = without(all, &places(&common(all, &inherited)));
        share.drops = joined(without(&inherited, &places(all)).iter().map(|e| e.vaddr..e.end()));
        (share, passed)
    }

    /// The pages of node `id`, out of `pages`, that are also those of a process that it makes, or one of these makes.
    fn wanted(&self, id: NodeId, pages: &[Extent]) -> Vec<Extent> {
        let mut found: Vec<Range> = Vec::new();
        let children = |id: NodeId| {
            let node = &self.tree.nodes[id];
            node.before.iter().chain(&node.after).copied().collect::<Vec<_>>()
        };
        let mut open = children(id);
        while let Some(child) = open.pop() {
            if let Some(p) = self.process(child) {
                if !self.is_alone(p) {
                    continue;
                }
                let ranges: Vec<Range> = self.mappings(p).into_iter().map(|m| m.range).collect();
                let same = common(pages, &clip(self.pages(p), &ranges));
                // Another program has been executed.
                if same.is_empty() {
                    continue;
                }
                found.extend(places(&same));
            }
            open.extend(children(child));
        }
        found.sort_by_key(|r| r.start);
        clip(pages, &joined(found.into_iter()))
    }
}

/// The parts of `early` that `mappings` keep: what is mapped in the same way.
fn kept(early: &[Early], mappings: &[Early]) -> Vec<Range> {
    let mut out = Vec::new();
    for m in mappings {
        let first = early.partition_point(|e| e.range.end <= m.range.start);
        for e in early[first..].iter().take_while(|e| e.range.start < m.range.end) {
            if (e.unreserved, e.small) == (m.unreserved, m.small) {
                out.push(e.range.start.max(m.range.start)..e.range.end.min(m.range.end));
            }
        }
    }
    out
}

fn places(pages: &[Extent]) -> Vec<Range> {
    pages.iter().map(|e| e.vaddr..e.end()).collect()
}

/// Ascending ranges, joined where they meet or overlap.
fn joined(ranges: impl Iterator<Item = Range>) -> Vec<Range> {
    let mut out: Vec<Range> = Vec::new();
    for r in ranges {
        match out.last_mut() {
            Some(last) if r.start <= last.end => last.end = last.end.max(r.end),
            _ => out.push(r),
        }
    }
    out
}

/// The parts of `pages` in `ranges`; both are ascending.
fn clip(pages: &[Extent], ranges: &[Range]) -> Vec<Extent> {
    let mut out = Vec::new();
    let mut first = 0;
    for e in pages {
        while ranges.get(first).is_some_and(|r| r.end <= e.vaddr) {
            first += 1;
        }
        let parts = ranges[first..]
            .iter()
            .take_while(|r| r.start < e.end())
            .filter(|r| r.end > e.vaddr);
        out.extend(parts.map(|r| e.part(r.start, r.end)));
    }
    out
}

/// The parts of `pages` outside of `ranges`; both are ascending.
fn without(pages: &[Extent], ranges: &[Range]) -> Vec<Extent> {
    let mut out = Vec::new();
    let mut first = 0;
    for e in pages {
        while ranges.get(first).is_some_and(|r| r.end <= e.vaddr) {
            first += 1;
        }
        let mut at = e.vaddr;
        for r in ranges[first..].iter().take_while(|r| r.start < e.end()) {
            if r.start > at {
                out.push(e.part(at, r.start));
            }
            at = at.max(r.end);
        }
        if at < e.end() {
            out.push(e.part(at, e.end()));
        }
    }
    out
}

/// The parts of `pages` that `others` have at the same addresses, stored in the same places.
fn common(pages: &[Extent], others: &[Extent]) -> Vec<Extent> {
    let mut out = Vec::new();
    let mut first = 0;
    for e in pages {
        while others.get(first).is_some_and(|o| o.end() <= e.vaddr) {
            first += 1;
        }
        for o in others[first..]
            .iter()
            .take_while(|o| o.vaddr < e.end())
            .filter(|o| o.end() > e.vaddr)
        {
            let part = e.part(o.vaddr, o.end());
            if o.part(part.vaddr, part.end()) == part {
                out.push(part);
            }
        }
    }
    out
}

/// Why common memory was not read.
pub(crate) enum Unread {
    /// As the restorer would say it: the step, the number of the extent, the error number.
    Pages(Step, usize, i32),
    /// Any other reason.
    Failed(RestartError),
}

/// In the maker `p`: maps and reads what is common, where its memory is to lie, and without huge pages where it has
/// switched them off.
pub(crate) fn read(p: &Process, share: &Share, chunks: &HashMap<u32, Chunk>, areas: &Areas) -> Result<(), Unread> {
    if share.maps.is_empty() && share.reads.is_empty() {
        return Ok(());
    }
    // What it makes has a say of its own.
    let huge = |off| {
        if p.prctl.thp_disable {
            prctl::NO_HUGE_PAGES.set(off)
        } else {
            Ok(())
        }
    };
    let done = huge(1).map_err(|e| Unread::Failed(RestartError::at("switch off huge pages", e)));
    let done = done.and_then(|()| read_all(p, share, chunks, areas));
    let _ = huge(0);
    done
}

fn read_all(p: &Process, share: &Share, chunks: &HashMap<u32, Chunk>, areas: &Areas) -> Result<(), Unread> {
    let mut areas = areas.0.borrow_mut();
    for m in &share.maps {
        areas.push(map(m).map_err(Unread::Failed)?);
    }
    areas.sort_by_key(|a| a.range().start);
    let mapped: Vec<Range> = share.maps.iter().map(|m| m.range.clone()).collect();
    let policy = p.threads.first().and_then(|t| t.policy.as_ref());
    attributes::lie_as_in(policy, &p.placements, &mapped);
    let mut buf = vec![0; if share.reads.is_empty() { 0 } else { BATCH }];
    for (i, e) in share.reads.iter().enumerate() {
        let bad = |step, errno| Unread::Pages(step, share.rest.len() + i, errno);
        let chunk = chunks.get(&e.chunk).ok_or(bad(Step::Short, 0))?;
        let mut at = e.vaddr;
        while at < e.end() {
            let part = e.part(at, at + BATCH as u64);
            let data = &mut buf[..part.bytes as usize];
            chunk
                .file
                .read_exact_at(data, part.offset())
                .map_err(|e| match e.raw_os_error() {
                    Some(errno) => bad(Step::Fill, errno),
                    None => bad(Step::Short, 0),
                })?;
            let sums = chunk.hashes.get(part.page as usize..).unwrap_or_default();
            let same = |(page, sum): (&[u8], &u128)| belay_storage::page_checksum(page) == *sum as u64;
            if (sums.len() as u64) < part.pages() || !data.chunks_exact(PAGE as usize).zip(sums).all(same) {
                return Err(bad(Step::Checksum, 0));
            }
            write(&areas, part.vaddr, data);
            at = part.end();
        }
    }
    Ok(())
}

/// The extents of process `pid` as errors number them: those that its restorer reads, then those that it reads for others too.
pub(crate) fn numbered(extents: &HashMap<i32, Vec<Extent>>, shares: &HashMap<i32, Share>, pid: i32) -> Vec<Extent> {
    let rest = extents.get(&pid).into_iter().flatten();
    rest.chain(shares.get(&pid).into_iter().flat_map(|s| &s.reads))
        .copied()
        .collect()
}

/// Writes `data` from address `at` on, to as many of `areas` as it takes; the plan has one for all of it.
fn write(areas: &[Area], mut at: u64, mut data: &[u8]) {
    let first = areas.partition_point(|a| a.range().end <= at);
    for area in &areas[first..] {
        let (here, rest) = data.split_at(data.len().min((area.range().end - at) as usize));
        area.write(at, here);
        (at, data) = (area.range().end, rest);
        if data.is_empty() {
            return;
        }
    }
    assert!(data.is_empty(), "no memory at {at:#x}");
}

fn map(m: &Early) -> Outcome<Area> {
    let flags = if m.unreserved { libc::MAP_NORESERVE } else { 0 };
    let made = Area::map(Some(m.range.start), m.range.end - m.range.start, flags);
    let area = made.map_err(|e| {
        RestartError::at(
            "map",
            format!("memory at {:#x} for several processes: {e}: restart once more", m.range.start),
        )
    })?;
    if m.small {
        // Not of every kernel.
        let _ = area.small();
    }
    Ok(area)
}

#[cfg(test)]
mod tests;
