//! The memory of a process as a list of system calls and of extents to read. Pure.
//!
//! Order: the kernel's own pages are moved out of the way, everything outside the restorer's area is unmapped, System V
//! segments are attached and trimmed, mappings are made, the kernel's pages are moved to their old addresses; then (by
//! the restorer) pages are read; then protections, advice, locks and names are set, and last of all mappings are
//! sealed. A mapping that pages are read into is writable until then. Under a kernel with another vDSO the old one is
//! such a mapping, see `vdso`.

use crate::arena::Arena;
use crate::call::{call, nr, signed, With};
use crate::layout::{uncovered, Range, TASK_SIZE};
use crate::special::Special;
use crate::vdso::{self, Foreign};
use belay_abi::restore::{Call, Fill, Step, CALL_EXPECT_ARG0, CALL_KEEP, CALL_MAY_FAIL, CALL_USE_KEPT_ARG0, CALL_USE_KEPT_ARG4};
use belay_image::model::{FileIdentity, ObjectId, Vma, VmaKind};
use belay_image::name::Name;
use belay_kernel::{guards, hugepages, missing};
use keys::Keys;

const PROT_READ: u64 = 1;
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;
const MAP_SHARED: u64 = 1;
const MAP_PRIVATE: u64 = 2;
/// Instead of [`MAP_PRIVATE`].
const MAP_DROPPABLE: u64 = 8;
const MAP_FIXED: u64 = 0x10;
const MAP_ANONYMOUS: u64 = 0x20;
const MAP_GROWSDOWN: u64 = 0x100;
const MAP_NORESERVE: u64 = 0x4000;
const MAP_HUGETLB: u64 = 0x40000;
const MREMAP_MAYMOVE_FIXED: u64 = 3;
const SHM_RDONLY: u64 = 0o10000;
const SHM_EXEC: u64 = 0o100000;
const MADV_DONTNEED: u64 = 4;
const MADV_HUGEPAGE: u64 = 14;
const MADV_NOHUGEPAGE: u64 = 15;
const MADV_GUARD_INSTALL: u64 = guards::INSTALL as u64;
const PR_SET_VMA: u64 = 0x5356_4d41;
const O_RDONLY_CLOEXEC: u64 = 0o2000000;
/// Mappings at least this long and nearly full are filled as huge pages.
const HUGE_BYTES: u64 = 4 << 20;

/// What the plan is made from.
pub(crate) struct Input<'a> {
    pub(crate) vmas: &'a [Vma],
    pub(crate) fills: Vec<Fill>,
    /// The restorer's area, which stays.
    pub(crate) area: Range,
    /// The areas of processes that share the memory, which stay too.
    pub(crate) others: Vec<Range>,
    /// Room in the area for the kernel's pages while everything else is unmapped.
    pub(crate) scratch: u64,
    pub(crate) specials: Vec<Special>,
    /// Where the process keeps the vDSO of the checkpoint: how to get from that to this kernel's.
    pub(crate) foreign: Option<(&'a Foreign, &'a vdso::Place)>,
    /// Its memory protection keys.
    pub(crate) keys: Keys,
    /// PID of the process itself.
    pub(crate) pid: i32,
    /// Mappings that are filled when the process runs already, ascending, and the userfaultfd by which it waits for that.
    pub(crate) later: (&'a [Range], Option<i32>),
    /// What of its memory is mapped already, inherited from its maker or read for those that it has made; ascending.
    pub(crate) kept: &'a [Range],
    /// Pages in it that it does not have.
    pub(crate) drops: &'a [Range],
    /// The system gives huge pages only where they are asked for, and the program has not switched them off.
    pub(crate) ask_huge: bool,
    pub(crate) shared_fd: &'a dyn Fn(ObjectId, bool) -> Option<i32>,
    pub(crate) segment_bytes: &'a dyn Fn(i32) -> Option<u64>,
    /// What is mapped in the place of a file that is not here.
    pub(crate) copy: &'a dyn Fn(&Name, &FileIdentity) -> Option<i32>,
}

/// The plan.
#[derive(Debug, Default)]
pub(crate) struct MemoryPlan {
    pub(crate) before: Vec<Call>,
    pub(crate) fills: Vec<Fill>,
    pub(crate) after: Vec<Call>,
}

/// Why memory cannot be restored.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum MemoryError {
    #[error("mapping {0:#x}: {1}")]
    Mapping(u64, String),
    #[error("damaged image: stored pages at {0:#x} lie in no private mapping")]
    Stray(u64),
    #[error("[{0}]: {1}: restart on the kernel of the checkpoint")]
    Special(String, String),
}

/// Makes the plan; strings go to `arena`.
pub(crate) fn plan(input: Input<'_>, arena: &mut Arena) -> Result<MemoryPlan, MemoryError> {
    let mut p = MemoryPlan::default();
    check_strays(&input)?;
    input.keys.allocate(&mut p.before);
    clear(&input, &mut p);
    attach(&input, &mut p)?;
    let mut fills = input.fills.iter().copied().peekable();
    for (i, vma) in input.vmas.iter().enumerate() {
        let mut own = Vec::new();
        let droppable = u32::from(is_droppable(vma));
        while let Some(f) = fills.next_if(|f| f.vaddr < vma.end) {
            own.push(Fill { droppable, ..f });
        }
        map(&input, i, vma, own, arena, &mut p)?;
    }
    match input.foreign {
        None => specials(&input, &mut p)?,
        Some(foreign) => bridge(&input, foreign, arena, &mut p)?,
    }
    input.keys.give_back(&mut p.after);
    seal(input.vmas, &mut p);
    Ok(p)
}

/// Whether the kernel may drop the pages of a mapping.
fn is_droppable(vma: &Vma) -> bool {
    vma.flags.iter().any(|f| f == "dp")
}

/// Whether stored pages may lie in a mapping.
fn holds_pages(kind: &VmaKind) -> bool {
    matches!(
        kind,
        VmaKind::Anonymous { .. }
            | VmaKind::HugeTlb { .. }
            | VmaKind::Stack
            | VmaKind::Heap
            | VmaKind::FilePrivate { .. }
            | VmaKind::PrivateObject { .. }
    )
}

/// Every extent must lie in one mapping that may hold pages; one that spans several is cut by the writer, never here.
fn check_strays(input: &Input<'_>) -> Result<(), MemoryError> {
    let mut vmas = input.vmas.iter().filter(|v| holds_pages(&v.kind)).peekable();
    for f in &input.fills {
        while vmas.next_if(|v| v.end <= f.vaddr).is_some() {}
        if !vmas.peek().is_some_and(|v| v.start <= f.vaddr && f.vaddr + f.bytes <= v.end) {
            return Err(MemoryError::Stray(f.vaddr));
        }
    }
    Ok(())
}

fn clear(input: &Input<'_>, p: &mut MemoryPlan) {
    let mut at = input.scratch;
    for (i, s) in input.specials.iter().enumerate() {
        let bytes = s.range.end - s.range.start;
        p.before.push(moved(i, s.range.start, bytes, at));
        at += bytes;
    }
    let mut kept = input.others.clone();
    kept.push(input.area.clone());
    kept.extend(input.kept.iter().cloned());
    kept.sort_by_key(|r| r.start);
    for (i, r) in uncovered(0..TASK_SIZE, &kept).iter().enumerate() {
        p.before.push(call(Step::Clear, i, nr::MUNMAP, &[r.start, r.end - r.start]));
    }
    for (i, r) in input.drops.iter().enumerate() {
        let args = [r.start, r.end - r.start, MADV_DONTNEED];
        p.before.push(call(Step::Clear, i, nr::MADVISE, &args));
    }
}

/// Moves a mapping.
fn moved(index: usize, from: u64, bytes: u64, to: u64) -> Call {
    call(Step::Vdso, index, nr::MREMAP, &[from, bytes, bytes, MREMAP_MAYMOVE_FIXED, to])
}

/// The kernel's pages where they wait: number, address, length.
fn waiting<'i>(input: &'i Input<'_>) -> impl Iterator<Item = (usize, &'i Special, u64)> {
    let mut at = input.scratch;
    input.specials.iter().enumerate().map(move |(i, s)| {
        let here = at;
        at += s.range.end - s.range.start;
        (i, s, here)
    })
}

/// Moves the kernel's pages to the saved addresses.
fn specials(input: &Input<'_>, p: &mut MemoryPlan) -> Result<(), MemoryError> {
    for vma in input.vmas {
        let VmaKind::Vdso(name) = &vma.kind else { continue };
        let bytes = vma.end - vma.start;
        match waiting(input).find(|(_, s, _)| s.name == *name) {
            Some((i, s, here)) if bytes == s.range.end - s.range.start => p.before.push(moved(i, here, bytes, vma.start)),
            _ => {
                return Err(MemoryError::Special(
                    name.clone(),
                    "this kernel's differs in size or is missing".into(),
                ))
            }
        }
    }
    Ok(())
}

/// Makes memory of the old kernel's pages, from which calls lead to those of this kernel at their new place.
fn bridge(
    input: &Input<'_>,
    (foreign, place): (&Foreign, &vdso::Place),
    arena: &mut Arena,
    p: &mut MemoryPlan,
) -> Result<(), MemoryError> {
    let own = vdso::span(input.specials.iter().map(|s| s.range.clone()));
    let to = |s: &Special| place.new + (s.range.start - own.start);
    for (i, s, here) in waiting(input) {
        p.before.push(moved(i, here, s.range.end - s.range.start, to(s)));
    }
    let new = input.specials.iter().find(|s| s.name == "vdso").map(to);
    for (i, vma) in input.vmas.iter().enumerate() {
        let VmaKind::Vdso(name) = &vma.kind else { continue };
        let mut old = |shift: u64, new: Option<u64>| {
            let range = vma.start.wrapping_add(shift)..vma.end.wrapping_add(shift);
            let bytes = foreign
                .bytes(name, &range, new)
                .map_err(|why| MemoryError::Special(name.clone(), why))?;
            let memory = Vma {
                start: range.start,
                end: range.end,
                kind: VmaKind::Anonymous {
                    name: Some(foreign.name(name)),
                },
                ..vma.clone()
            };
            written(input, i, &memory, &bytes, arena, p);
            Ok(())
        };
        old(0, new)?;
        if place.copy != 0 {
            old(place.copy, None)?;
        }
    }
    for (i, (at, rip)) in place.returns.iter().enumerate() {
        let put = put(input.pid, *at, &rip.to_ne_bytes(), arena);
        p.after.push(call(Step::Vdso, i, nr::PROCESS_VM_READV, &put));
    }
    Ok(())
}

/// Maps memory with `bytes` in it.
fn written(input: &Input<'_>, i: usize, vma: &Vma, bytes: &[u8], arena: &mut Arena, p: &mut MemoryPlan) {
    let args = [
        vma.start,
        vma.end - vma.start,
        PROT_READ | PROT_WRITE,
        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS,
        signed(-1),
        0,
    ];
    p.before.push(call(Step::Vdso, i, nr::MMAP, &args).with(CALL_EXPECT_ARG0));
    if !bytes.is_empty() {
        let put = put(input.pid, vma.start, bytes, arena);
        p.before.push(call(Step::Vdso, i, nr::PROCESS_VM_READV, &put));
    }
    protect(i, vma, None, p);
    advise(i, vma, arena, p);
}

/// The arguments with which process `pid` copies `bytes` to an address of its own (`process_vm_readv`).
fn put(pid: i32, to: u64, bytes: &[u8], arena: &mut Arena) -> [u64; 6] {
    let length = bytes.len() as u64;
    let from = arena.bytes(bytes);
    let (to, from) = (arena.words(&[to, length]), arena.words(&[from, length]));
    [signed(pid), to, 1, from, 1, 0]
}

/// Attaches System V segments. One attachment may have been cut into several mappings; what they do not cover is unmapped.
fn attach(input: &Input<'_>, p: &mut MemoryPlan) -> Result<(), MemoryError> {
    let mut done: Vec<(i32, u64)> = Vec::new();
    for (i, vma) in input.vmas.iter().enumerate() {
        let VmaKind::SysvShm { shmid, offset, .. } = &vma.kind else {
            continue;
        };
        let base = vma.start.wrapping_sub(*offset);
        if done.contains(&(*shmid, base)) {
            continue;
        }
        done.push((*shmid, base));
        let bytes = (input.segment_bytes)(*shmid)
            .ok_or_else(|| MemoryError::Mapping(vma.start, format!("System V segment {shmid} was not rebuilt")))?;
        let same = |v: &&Vma| matches!(&v.kind, VmaKind::SysvShm { shmid: s, offset: o, .. } if s == shmid && v.start.wrapping_sub(*o) == base);
        let parts: Vec<&Vma> = input.vmas.iter().filter(same).collect();
        let prots = parts.iter().fold(0, |a, v| a | u64::from(v.prot));
        let writable = prots & PROT_WRITE != 0 || parts.iter().any(|v| v.flags.iter().any(|f| f == "mw"));
        let flags = if writable { 0 } else { SHM_RDONLY } | if prots & PROT_EXEC != 0 { SHM_EXEC } else { 0 };
        p.before
            .push(call(Step::Attach, i, nr::SHMAT, &[signed(*shmid), base, flags]));
        let ranges: Vec<Range> = parts.iter().map(|v| v.start..v.end).collect();
        for hole in uncovered(base..base + bytes.next_multiple_of(belay_abi::PAGE), &ranges) {
            let args = [hole.start, hole.end - hole.start];
            p.before.push(call(Step::Attach, i, nr::MUNMAP, &args));
        }
    }
    Ok(())
}

fn map(input: &Input<'_>, i: usize, vma: &Vma, fills: Vec<Fill>, arena: &mut Arena, p: &mut MemoryPlan) -> Result<(), MemoryError> {
    let (start, bytes, prot) = (vma.start, vma.end - vma.start, u64::from(vma.prot));
    let has = |f: &str| vma.flags.iter().any(|x| x == f);
    check_supported(vma)?;
    if matches!(vma.kind, VmaKind::Vdso(_) | VmaKind::Vsyscall) {
        return Ok(());
    }
    let missing = uncovered(start..vma.end, input.kept);
    // What is inherited can be read and written; the rest becomes one mapping with it.
    let inherited = missing.first() != Some(&(start..vma.end));
    let filled = !fills.is_empty() || inherited;
    let key = input.keys.of_mapping(vma);
    // With a key of the program's it must not get the kernel's own.
    let with_read = key.is_some() && prot == PROT_EXEC;
    let last_prot = if with_read { prot | PROT_READ } else { prot };
    let first_prot = if filled { prot | PROT_READ | PROT_WRITE } else { last_prot };
    let mut flags = MAP_FIXED | if has("nr") { MAP_NORESERVE } else { 0 };
    let fixed = |flags: u64, fd: i32, offset: u64| {
        call(Step::Map, i, nr::MMAP, &[start, bytes, first_prot, flags, signed(fd), offset]).with(CALL_EXPECT_ARG0)
    };
    match &vma.kind {
        // The restorer puts a ring there; that of a device is only kept.
        VmaKind::Ring | VmaKind::Device(_) => {
            p.before.push(fixed(flags | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        }
        VmaKind::Anonymous { .. } | VmaKind::Heap | VmaKind::FilePrivate { identity: None, .. } => {
            if has("gd") {
                flags |= MAP_GROWSDOWN;
            }
            let private = if is_droppable(vma) { MAP_DROPPABLE } else { MAP_PRIVATE };
            for r in missing {
                let flags = flags | private | MAP_ANONYMOUS;
                let args = [r.start, r.end - r.start, first_prot, flags, signed(-1), 0];
                p.before.push(call(Step::Map, i, nr::MMAP, &args).with(CALL_EXPECT_ARG0));
            }
        }
        VmaKind::HugeTlb { page_bytes } => {
            let huge = MAP_HUGETLB | u64::from(hugepages::size_flags(*page_bytes));
            p.before.push(fixed(flags | MAP_PRIVATE | MAP_ANONYMOUS | huge, -1, 0));
        }
        VmaKind::Stack => {
            p.before
                .push(fixed(flags | MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0));
        }
        VmaKind::FilePrivate { path, offset, identity } => {
            let copy = identity.as_ref().and_then(|i| (input.copy)(path, i));
            if let Some(copy) = copy {
                p.before.push(fixed(flags | MAP_PRIVATE, copy, *offset));
            } else {
                let path = arena.string(path.as_bytes());
                let open = call(Step::Map, i, nr::OPEN, &[path, O_RDONLY_CLOEXEC]).with(CALL_KEEP);
                p.before.push(open);
                p.before
                    .push(fixed(flags | MAP_PRIVATE, -1, *offset).with(CALL_USE_KEPT_ARG4));
                p.before.push(call(Step::Map, i, nr::CLOSE, &[0]).with(CALL_USE_KEPT_ARG0));
            }
        }
        VmaKind::Shared {
            object,
            offset,
            may_write,
        } => {
            let fd = rebuilt(input, start, *object, *may_write)?;
            p.before.push(fixed(flags | MAP_SHARED, fd, *offset));
        }
        VmaKind::PrivateObject { object, offset } => {
            let fd = rebuilt(input, start, *object, false)?;
            p.before.push(fixed(flags | MAP_PRIVATE, fd, *offset));
        }
        VmaKind::SysvShm { .. } => {
            // Attached with what its parts need together; each part then gets its own protection.
            p.before.push(call(Step::Attach, i, nr::MPROTECT, &[start, bytes, prot]));
        }
        VmaKind::Vdso(_) | VmaKind::Vsyscall => {}
    }
    let stored: u64 = fills.iter().map(|f| f.bytes).sum();
    let anonymous = matches!(vma.kind, VmaKind::Anonymous { .. } | VmaKind::Heap);
    if input.ask_huge && anonymous && !has("nh") && stored >= HUGE_BYTES && stored >= bytes / 8 * 7 {
        let args = [start, bytes, MADV_HUGEPAGE];
        p.before.push(call(Step::Map, i, nr::MADVISE, &args).with(CALL_MAY_FAIL));
    }
    if has("nh") {
        // Before there are pages; and again afterwards, for what is mapped here from files.
        let args = [start, bytes, MADV_NOHUGEPAGE];
        p.before.push(call(Step::Map, i, nr::MADVISE, &args).with(CALL_MAY_FAIL));
    }
    p.fills.extend(fills);
    await_pages(input, i, vma, arena, p);
    let needed = first_prot != prot || inherited && prot != PROT_READ | PROT_WRITE;
    if needed || key.is_some() {
        protect(i, vma, key, p);
    }
    advise(i, vma, arena, p);
    Ok(())
}

/// A checkpoint refuses these; an image can hold them all the same.
fn check_supported(vma: &Vma) -> Result<(), MemoryError> {
    let private_file = !matches!(vma.kind, VmaKind::HugeTlb { .. } | VmaKind::Shared { .. });
    let unsupported = [
        ("ht", "a file in huge pages (hugetlbfs)"),
        ("ss", "a shadow stack"),
        ("um", "userfaultfd"),
    ];
    let uses = |flag: &str| vma.flags.iter().any(|f| f == flag) && (flag != "ht" || private_file);
    match unsupported.into_iter().find(|(flag, _)| uses(flag)) {
        None => Ok(()),
        Some((_, what)) => {
            let reason = format!("it uses {what}, which cannot be restored yet");
            Err(MemoryError::Mapping(vma.start, reason))
        }
    }
}

/// A descriptor of the object that is mapped at `start`.
fn rebuilt(input: &Input<'_>, start: u64, object: ObjectId, may_write: bool) -> Result<i32, MemoryError> {
    let fd = (input.shared_fd)(object, may_write);
    fd.ok_or_else(|| MemoryError::Mapping(start, format!("its object {object:?} was not rebuilt")))
}

/// Seals mappings (`mseal`): nothing can be changed afterwards.
fn seal(vmas: &[Vma], p: &mut MemoryPlan) {
    for (i, vma) in vmas.iter().enumerate().filter(|(_, v)| v.flags.iter().any(|f| f == "sl")) {
        p.after
            .push(call(Step::Advise, i, nr::MSEAL, &[vma.start, vma.end - vma.start, 0]));
    }
}

/// Has the process wait for pages of mapping `i` that are missing, where they are filled later.
fn await_pages(input: &Input<'_>, i: usize, vma: &Vma, arena: &mut Arena, p: &mut MemoryPlan) {
    let (ranges, uffd) = input.later;
    let found = ranges.binary_search_by_key(&vma.start, |r| r.start);
    if let (Ok(_), Some(uffd)) = (found, uffd) {
        let argument = arena.words(&missing::registration(vma.start, vma.end));
        let args = [signed(uffd), missing::REGISTER, argument];
        p.before.push(call(Step::Map, i, nr::IOCTL, &args));
    }
}

/// Protection, once the pages are there.
fn protect(i: usize, vma: &Vma, key: Option<u64>, p: &mut MemoryPlan) {
    let (start, bytes, prot) = (vma.start, vma.end - vma.start, u64::from(vma.prot));
    p.after.push(match key {
        Some(key) => call(Step::Advise, i, nr::PKEY_MPROTECT, &[start, bytes, prot, key]),
        None => call(Step::Advise, i, nr::MPROTECT, &[start, bytes, prot]),
    });
}

/// Guard regions, advice, lock and name, once the pages are there.
fn advise(i: usize, vma: &Vma, arena: &mut Arena, p: &mut MemoryPlan) {
    let (start, bytes) = (vma.start, vma.end - vma.start);
    for (from, to) in &vma.guards {
        // While nothing is locked yet: what is locked can have none.
        let args = [*from, to - from, MADV_GUARD_INSTALL];
        p.after.push(call(Step::Advise, i, nr::MADVISE, &args));
    }
    for flag in &vma.flags {
        let advice = match flag.as_str() {
            "rr" => 1,
            "sr" => 2,
            "dc" => 10,
            "mg" => 12,
            "hg" => MADV_HUGEPAGE,
            "nh" => MADV_NOHUGEPAGE,
            "dd" => 16,
            // Droppable memory is so by itself, and cannot be told.
            "wf" if !is_droppable(vma) => 18,
            "lo" => {
                // Only how fast the program runs depends on it; a lower limit here must not end it.
                let on_fault = vma.flags.iter().any(|f| f == "lf");
                let lock = call(Step::Advise, i, nr::MLOCK2, &[start, bytes, u64::from(on_fault)]);
                p.after.push(lock.with(CALL_MAY_FAIL));
                continue;
            }
            _ => continue,
        };
        let c = call(Step::Advise, i, nr::MADVISE, &[start, bytes, advice]);
        // Only what changes the program's meaning must be had.
        let optional = !matches!(flag.as_str(), "dc" | "wf");
        p.after.push(c.with(if optional { CALL_MAY_FAIL } else { 0 }));
    }
    if let VmaKind::Anonymous { name: Some(name) } = &vma.kind {
        let name = arena.string(name.as_bytes());
        let args = [PR_SET_VMA, 0, start, bytes, name];
        p.after.push(call(Step::Advise, i, nr::PRCTL, &args).with(CALL_MAY_FAIL));
    }
}

pub(crate) mod keys;
#[cfg(test)]
mod tests;
