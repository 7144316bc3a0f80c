//! One process becomes the restored one: descriptors and settings in ordinary code, then the plan for the restorer, then the jump.

use crate::arena::Arena;
use crate::attributes;
use crate::code::Copies;
use crate::companion;
use crate::control::Shared;
use crate::fail::{Outcome, RestartError};
use crate::kin::Share;
use crate::layout::{find_gap, pages_up, Range, TASK_SIZE};
use crate::memory::{self, Special};
use crate::spawn::{Companions, INSTALLED, LOADED};
use crate::state::{self, Own};
use crate::tree::{self, Tree};
use crate::vdso::{self, Foreign, Place};
use crate::{arch, sys};
use belay_abi::aio::RingPlan;
use belay_abi::restore::{Fill, Helper, Plan, ThreadPlan, FILL_STACK_BYTES, MAX_HELPERS, PLAN_MAGIC, STACK_BYTES};
use belay_image::extents::{Extent, PAGE};
use belay_image::model::{Process, Thread, VmaKind};
use belay_kernel::blob::Blob;
use belay_kernel::direct;
use belay_plugins::Rebuilder;
use belay_storage::chunk::Chunk;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;

/// Where the parts of the restorer's area lie.
#[derive(Debug, Clone, Copy)]
struct Area {
    base: u64,
    tables: u64,
    scratch: u64,
    control: u64,
    stacks: u64,
    end: u64,
}

impl Area {
    /// Lowest address of the stacks of threads.
    fn thread_stacks(&self, helpers: usize) -> u64 {
        self.stacks + FILL_STACK_BYTES * helpers as u64
    }
}

/// What all processes share.
pub(crate) struct Context<'a> {
    pub(crate) chunks: &'a HashMap<u32, Chunk>,
    /// Those that are read past the page cache.
    pub(crate) direct: HashSet<u32>,
    pub(crate) blob: &'a Blob,
    pub(crate) rebuilder: Rebuilder,
    pub(crate) shared: &'a Shared,
    pub(crate) tree: &'a Tree,
    pub(crate) processes: &'a [Process],
    /// PIDs of processes stopped by job control, by their parent's, and whether that has been told so.
    pub(crate) stopped: &'a HashMap<i32, Vec<(i32, bool)>>,
    /// Processes wait for each other before their timers start.
    pub(crate) hold: bool,
    pub(crate) extents: &'a HashMap<i32, Vec<Extent>>,
    /// What processes have in common, by PID.
    pub(crate) shares: &'a HashMap<i32, Share>,
    pub(crate) lazy: bool,
    pub(crate) ask_huge: bool,
    pub(crate) restore_timer_ids: bool,
    pub(crate) own: Own,
    pub(crate) specials: Vec<Special>,
    /// Files that this machine lacks.
    pub(crate) copies: &'a Copies,
    /// The vDSO of the checkpoint, where this kernel has another or somebody was stopped in it,
    pub(crate) foreign: Option<&'a Foreign>,
    /// and where this kernel's goes in each process, by PID.
    pub(crate) places: HashMap<i32, Place>,
}

impl Context<'_> {
    /// Slot of the process whose descriptor table `pid` shares.
    fn table_owner(&self, pid: i32) -> Option<usize> {
        let owner = self.rebuilder.table_owner(pid);
        let slot = self.tree.nodes.iter().position(|n| n.pid == owner);
        slot.filter(|_| owner != pid)
    }

    /// The process whose memory `p` has: itself, or the first of those that share it.
    fn first<'p>(&'p self, p: &'p Process) -> &'p Process {
        let found = self.processes.iter().find(|q| q.pid == p.shares_mm_with);
        found.filter(|_| tree::shares_memory(p)).unwrap_or(p)
    }

    /// The processes that share the memory of `p`.
    fn guests<'p>(&'p self, p: &'p Process) -> impl Iterator<Item = &'p Process> {
        self.processes
            .iter()
            .filter(|q| tree::shares_memory(q) && q.shares_mm_with == p.pid)
    }

    /// The area of the process with slot `slot`, once it is loaded.
    fn area(&self, slot: usize) -> Range {
        let [start, end] = self.shared.slot(slot).area.each_ref().map(|a| a.load(Ordering::Acquire));
        start..end
    }

    fn slot_of(&self, p: &Process) -> usize {
        self.tree.nodes.iter().position(|n| n.pid == p.pid).unwrap_or(0)
    }

    /// Threads of `p` that exist before its restorer runs.
    fn companions<'p>(&'p self, p: &'p Process) -> impl Iterator<Item = &'p Thread> {
        let exists = |t: &&Thread| self.rebuilder.thread_table(p.pid, t.tid) == Some(t.tid);
        p.threads.iter().filter(exists)
    }
}

/// Becomes process `p`; `helpers` are unused identifiers for its helper threads, `companions` those of its threads that exist. Returns only on failure.
pub(crate) fn become_process(
    cx: &Context<'_>,
    slot: usize,
    p: &Process,
    helpers: &[i32],
    companions: &Companions,
) -> Outcome<std::convert::Infallible> {
    let at = |what: &str| format!("process {} ({}): {what}", p.pid, p.comm);
    // While none of its descriptors is where it belongs: theirs are laid out from the same ones.
    companions.iter().for_each(|c| c.work(&|| lay_out(cx, slot, p, c.tid)));
    if let Some(owner) = cx.table_owner(p.pid) {
        cx.shared.await_slot(owner, INSTALLED); // what we open before would be closed again
    }
    let files = open_files(cx, p)?;
    install(cx, p, &files)?;
    cx.shared.report(slot, INSTALLED);
    settings(cx, p)?;
    cx.rebuilder
        .install_late(p.pid)
        .map_err(|e| RestartError::at(at("descriptors"), e))?;
    let others: Vec<usize> = cx.guests(p).map(|g| cx.slot_of(g)).collect();
    others.iter().for_each(|guest| cx.shared.await_slot(*guest, LOADED)); // their areas must stay
    let sizes = measure(cx, p, helpers.len())?;
    let Prepared {
        plan,
        threads,
        bytes,
        area,
    } = prepare(cx, slot, p, helpers, &files, &sizes)?;
    load(cx, &area, &bytes).map_err(|e| RestartError::at(at("place the restorer"), e))?;
    if !cx.tree.is_below_guest(slot, cx.processes) {
        arch::unregister_rseq().map_err(|e| RestartError::at(at("unregister rseq"), e))?;
    }
    for (word, value) in cx.shared.slot(slot).area.iter().zip([area.base, area.end]) {
        word.store(value, Ordering::Relaxed);
    }
    // Its descriptors are closed by the restorer.
    std::mem::forget(files);
    for c in companions {
        let index = p.threads.iter().position(|t| t.tid == c.tid).unwrap_or(0) as u64;
        let thread = threads + index * size_of::<ThreadPlan>() as u64;
        let stack = area.thread_stacks(helpers.len()) + STACK_BYTES * (index + 1);
        c.leave([area.base + cx.blob.entry(), plan, thread, stack]);
    }
    cx.shared.report(slot, LOADED);
    companion::give_turn();
    // SAFETY: the area holds the restorer and its tables; nothing of this program is needed again.
    unsafe { arch::jump(area.base + cx.blob.entry(), [plan, 0], area.end) }
}

/// In thread `tid`: gives it its own descriptor table.
fn lay_out(cx: &Context<'_>, slot: usize, p: &Process, tid: i32) {
    let done = cx.rebuilder.install(tid, &[]).and_then(|()| cx.rebuilder.install_late(tid));
    if let Err(e) = done {
        let of = format!("process {} ({}) thread {tid}: descriptors", p.pid, p.comm);
        cx.shared.fail(slot, &RestartError::at(of, e));
    }
}

/// Descriptors needed until the end, at numbers that the process does not use.
struct Files {
    pages: HashMap<u32, OwnedFd>,
    exe: Option<OwnedFd>,
    shared: Vec<RawFd>,
}

impl Files {
    fn keep(&self, control: RawFd) -> Vec<RawFd> {
        let own = self.pages.values().chain(self.exe.iter());
        own.map(AsRawFd::as_raw_fd)
            .chain(self.shared.iter().copied())
            .chain([control])
            .collect()
    }
}

/// The chunks that are best read past the page cache: not those of which many small extents are needed, because the kernel reads ahead, and not those of which several processes need the same, because the
/// first of them brings it into memory for all.
pub(crate) fn read_directly(extents: &HashMap<i32, Vec<Extent>>, chunks: &HashMap<u32, Chunk>) -> HashSet<u32> {
    let mut needed: HashMap<u32, (u64, u64)> = HashMap::new();
    for e in extents.values().flatten() {
        let (count, bytes) = needed.entry(e.chunk).or_default();
        (*count, *bytes) = (*count + 1, *bytes + e.bytes);
    }
    let once = |id: &u32, bytes: u64| chunks.get(id).is_some_and(|c| bytes <= c.hashes.len() as u64 * PAGE * 5 / 4);
    let good = needed
        .into_iter()
        .filter(|(id, (count, bytes))| bytes / count >= direct::WORTH as u64 && once(id, *bytes));
    good.map(|(id, _)| id).collect()
}

fn open_files(cx: &Context<'_>, p: &Process) -> Outcome<Files> {
    let room = cx.rebuilder.room();
    let high = |fd: RawFd| {
        sys::dup_into(fd, &room).map_err(|e| RestartError::at(format!("process {}", p.pid), format!("descriptor in {room:?}: {e}")))
    };
    let mut pages = HashMap::new();
    for e in cx.extents.get(&p.pid).map_or(&[][..], Vec::as_slice) {
        if let (Entry::Vacant(entry), Some(chunk)) = (pages.entry(e.chunk), cx.chunks.get(&e.chunk)) {
            // Not `chunk.file`: in a descriptor table that processes share, that number may have been given to the job by now.
            let file = std::fs::File::open(&chunk.path).map_err(|e| belay_image::ImageError::io("open", &chunk.path, e))?;
            if cx.direct.contains(&e.chunk) {
                direct::enable(&file);
            }
            entry.insert(high(file.as_raw_fd())?);
        }
    }
    let copy = p.exe_identity.as_ref().and_then(|identity| cx.copies.of(&p.exe, identity));
    let exe = match (copy, std::fs::File::open(p.exe.as_path())) {
        _ if tree::shares_memory(p) => None, // it belongs to the memory
        (Some(copy), _) => Some(high(copy)?),
        (None, Ok(f)) => Some(high(f.as_raw_fd())?),
        (None, Err(_)) => None, // /proc/PID/exe then shows belay; the program's own pages are checked and mapped elsewhere
    };
    let mut shared: Vec<RawFd> = p
        .vmas
        .iter()
        .filter_map(|v| match &v.kind {
            VmaKind::Shared { object, may_write, .. } => cx.rebuilder.shared_fd(*object, *may_write),
            VmaKind::PrivateObject { object, .. } => cx.rebuilder.shared_fd(*object, false),
            VmaKind::FilePrivate {
                path,
                identity: Some(identity),
                ..
            } => cx.copies.of(path, identity),
            _ => None,
        })
        .collect();
    shared.sort_unstable();
    shared.dedup();
    Ok(Files { pages, exe, shared })
}

fn install(cx: &Context<'_>, p: &Process, files: &Files) -> Outcome<()> {
    cx.rebuilder
        .install(p.pid, &files.keep(cx.shared.fd()))
        .map_err(|e| RestartError::at(format!("process {} ({}): descriptors", p.pid, p.comm), e))
}

/// Settings that the process makes in ordinary code.
fn settings(cx: &Context<'_>, p: &Process) -> Outcome<()> {
    if p.shares_handlers {
        // The one whose dispositions these are does this for itself alone: what the restart itself caused is discarded.
        for action in [libc::SIG_IGN, libc::SIG_DFL] {
            // SAFETY: neither is a handler.
            unsafe { libc::signal(libc::SIGCHLD, action) };
        }
    }
    // One that had been deleted exists for the time of the rebuild, under the name it had.
    let deleted = p
        .cwd
        .as_bytes()
        .strip_suffix(b" (deleted)")
        .filter(|_| !p.cwd.as_path().exists());
    let cwd = deleted.map_or(p.cwd.as_path(), |bare| Path::new(OsStr::from_bytes(bare)));
    let entered = cx.rebuilder.enter(cwd);
    entered.map_err(|e| {
        RestartError::at(
            format!("process {} ({})", p.pid, p.comm),
            format!("{}: {}", e.object, e.reason),
        )
    })?;
    // SAFETY: takes a number and cannot fail.
    unsafe { libc::umask(p.umask) };
    Ok(())
}

/// What the area must keep clear of, and the sizes of its parts.
fn measure(cx: &Context<'_>, p: &Process, helpers: usize) -> Outcome<AreaSizes> {
    let first = cx.first(p);
    let scratch: u64 = cx.specials.iter().map(|s| s.range.end - s.range.start).sum();
    let stacks = FILL_STACK_BYTES * (1 + helpers as u64) + STACK_BYTES * p.threads.len() as u64;
    let mine = std::process::id().cast_signed();
    let maps = belay_kernel::proc::maps(mine).map_err(|e| RestartError::at(format!("process {}", p.pid), e))?;
    let mut taken: Vec<Range> = maps.iter().map(|m| m.start..m.end).collect();
    for v in &first.vmas {
        taken.push(v.start..v.end);
        if let VmaKind::SysvShm { shmid, offset, .. } = &v.kind {
            let base = v.start.wrapping_sub(*offset);
            taken.push(base..base.saturating_add(segment_bytes(*shmid).unwrap_or(0)).min(TASK_SIZE));
        }
    }
    if let Some(place) = cx.places.get(&first.pid) {
        let new = vdso::span(cx.specials.iter().map(|s| s.range.clone()));
        taken.push(place.new..place.new + (new.end - new.start));
        let old = vdso::span(vdso::olds(&first.vmas).map(|v| v.start..v.end));
        taken.push(old.start.wrapping_add(place.copy)..old.end.wrapping_add(place.copy));
    }
    Ok(AreaSizes {
        taken,
        scratch: pages_up(scratch),
        stacks,
    })
}

struct AreaSizes {
    taken: Vec<Range>,
    scratch: u64,
    stacks: u64,
}

struct Prepared {
    plan: u64,
    /// Address of the threads' plans.
    threads: u64,
    bytes: Vec<u8>,
    area: Area,
}

/// Builds the tables: once to learn their size, once for the place found for them.
fn prepare(cx: &Context<'_>, slot: usize, p: &Process, helpers: &[i32], files: &Files, sizes: &AreaSizes) -> Outcome<Prepared> {
    let layout = |base: u64, tables: u64| {
        let scratch = base + cx.blob.bytes() + pages_up(tables);
        let control = scratch + sizes.scratch;
        let stacks = control + cx.shared.bytes();
        Area {
            base,
            tables: base + cx.blob.bytes(),
            scratch,
            control,
            stacks,
            end: stacks + sizes.stacks,
        }
    };
    let (.., draft) = tables(cx, slot, p, helpers, files, &layout(1 << 32, 0))?;
    let length = draft.len() as u64;
    let whole = layout(0, length).end;
    let base = find_gap(&sizes.taken, whole)
        .ok_or_else(|| RestartError::at(format!("process {}", p.pid), "no free address range for the restorer"))?;
    let area = layout(base, length);
    let (plan, threads, bytes) = tables(cx, slot, p, helpers, files, &area)?;
    Ok(Prepared {
        plan,
        threads,
        bytes,
        area,
    })
}

/// Size of a rebuilt System V segment.
fn segment_bytes(shmid: i32) -> Option<u64> {
    // SAFETY: all-zero is a valid value.
    let mut ds: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes to a live structure.
    (unsafe { libc::shmctl(shmid, libc::IPC_STAT, &mut ds) } == 0).then_some(ds.shm_segsz as u64)
}

/// Addresses of the plan and of the threads' plans, and the bytes of the tables.
fn tables(cx: &Context<'_>, slot: usize, p: &Process, helpers: &[i32], files: &Files, area: &Area) -> Outcome<(u64, u64, Vec<u8>)> {
    let at = |e: &dyn std::fmt::Display| RestartError::at(format!("process {} ({})", p.pid, p.comm), e);
    let mut arena = Arena::new(area.tables);
    let mut fills = Vec::new();
    for e in cx.extents.get(&p.pid).map_or(&[][..], Vec::as_slice) {
        let first = e.page as usize;
        let hashes = cx
            .chunks
            .get(&e.chunk)
            .and_then(|c| c.hashes.get(first..first + e.pages() as usize));
        let sums: Vec<u64> = hashes.unwrap_or_default().iter().map(|h| *h as u64).collect();
        fills.push(Fill {
            vaddr: e.vaddr,
            bytes: e.bytes,
            offset: e.offset(),
            fd: files.pages.get(&e.chunk).map_or(u32::MAX, |f| f.as_raw_fd() as u32),
            droppable: 0,
            sums: arena.table(&sums).addr,
        });
    }
    let share = cx.shares.get(&p.pid);
    let input = memory::Input {
        vmas: &p.vmas,
        fills,
        area: area.base..area.end,
        others: cx.guests(p).map(|g| cx.area(cx.slot_of(g))).collect(),
        scratch: area.scratch,
        specials: cx.specials.clone(),
        foreign: cx.foreign.zip(cx.places.get(&p.pid)),
        pid: p.pid,
        lazy: cx.lazy,
        kept: share.map_or(&[], |s| s.kept.as_slice()),
        drops: share.map_or(&[], |s| s.drops.as_slice()),
        ask_huge: cx.ask_huge,
        shared_fd: &|object, may_write| cx.rebuilder.shared_fd(object, may_write),
        segment_bytes: &segment_bytes,
        copy: &|path, identity| cx.copies.of(path, identity),
    };
    let guest = tree::shares_memory(p);
    let mut memory = match guest {
        false => memory::plan(input, &mut arena).map_err(|e| at(&e))?,
        true => memory::MemoryPlan::default(),
    };
    let rings = rings(p, &mut arena);
    let mut after = std::mem::take(&mut memory.after);
    if !guest {
        // Pages are read by the first thread and its helpers.
        attributes::policy(
            p.threads.first().and_then(|t| t.policy.as_ref()),
            0,
            &mut arena,
            &mut memory.before,
        );
        attributes::placements(&p.placements, &mut arena, &mut memory.before);
        attributes::segments(&p.segments, &mut arena, &mut after);
        state::layout(&p.mm, files.exe.as_ref().map(AsRawFd::as_raw_fd), &mut arena, &mut after);
        state::membarrier(p.membarrier, &mut after);
        state::no_new_code(p.prctl.mdwe, &mut after);
    }
    state::process_early(p, &mut arena, &mut after);
    if !p.shares_handlers {
        state::sigactions(&p.sigactions, &mut arena, &mut after);
    }
    let mut last = Vec::new();
    if let Some(children) = cx.stopped.get(&p.pid) {
        state::forget_stops(p, children, &mut arena, &mut last);
    }
    state::posix_timers(
        &p.posix_timers,
        cx.restore_timer_ids,
        p.prctl.timer_ids,
        &mut arena,
        &mut last,
    )
    .map_err(|e| at(&e))?;
    state::itimers(p, &mut arena, &mut last);
    state::process_late(p, &cx.rebuilder.room(), &mut last);
    state::locks(&cx.rebuilder.posix_locks(p.pid), &mut arena, &mut last);

    let plan_at = arena.zeroed(size_of::<Plan>());
    let threads = threads(cx, p, area, helpers.len(), plan_at, &mut arena);
    let threads = arena.table(&threads);
    let companions = |p: &Process| cx.companions(p).count();
    let arrivals = companions(p) + cx.guests(p).map(|g| 1 + companions(g)).sum::<usize>();
    let stop_signal = state::stop_signal(p);
    let mut plan = Plan {
        magic: PLAN_MAGIC,
        slot: area.control + Shared::slot_offset(slot),
        control: area.control,
        pid: p.pid,
        helper_count: helpers.len().min(MAX_HELPERS) as u32,
        before: arena.table(&memory.before),
        fills: arena.table(&memory.fills),
        rings: arena.table(&rings),
        after: arena.table(&after),
        threads,
        last: arena.table(&last),
        hold: u32::from(cx.hold && stop_signal == 0),
        stop_signal,
        arrivals: if guest { 0 } else { arrivals as u32 },
        guest: u32::from(guest),
        first: area.control + Shared::slot_offset(cx.slot_of(cx.first(p))),
        ..Plan::default()
    };
    for (i, (helper, tid)) in plan.helpers.iter_mut().zip(helpers).enumerate() {
        *helper = Helper {
            tid: *tid,
            pad: 0,
            stack: area.stacks + FILL_STACK_BYTES * i as u64,
        };
    }
    arena.set(plan_at, &plan);
    Ok((plan_at, threads.addr, arena.finish()))
}

fn rings(p: &Process, arena: &mut Arena) -> Vec<RingPlan> {
    let plan = |r: &belay_image::model::Ring| RingPlan {
        address: r.start,
        bytes: r.bytes,
        head: r.head,
        tail: r.tail,
        events: arena.bytes(&r.events),
        polls: arena.words(&r.polls),
        poll_count: r.polls.len() as u64,
    };
    p.rings.iter().map(plan).collect()
}

fn threads(cx: &Context<'_>, p: &Process, area: &Area, helpers: usize, plan: u64, arena: &mut Arena) -> Vec<ThreadPlan> {
    let stacks = area.thread_stacks(helpers);
    let mut out = Vec::with_capacity(p.threads.len());
    let makers = makers(p, |tid| cx.rebuilder.thread_table(p.pid, tid));
    for (i, t) in p.threads.iter().enumerate() {
        let mut calls = Vec::new();
        state::thread(i, t, arena, &mut calls);
        let (creds, securebits) = state::whose(p, t);
        state::credentials(creds, securebits, &cx.own, arena, &mut calls);
        state::thread_late(i, t, creds, &mut calls);
        if i == 0 {
            state::pending(p.pid, None, &p.pending, arena, &mut calls);
        }
        state::pending(p.pid, Some(t.tid), &t.pending, arena, &mut calls);
        out.push(ThreadPlan {
            tid: t.tid,
            index: i as u32,
            stack: stacks + STACK_BYTES * i as u64,
            stack_bytes: STACK_BYTES,
            calls: arena.table(&calls),
            plan,
            makes: arena.table(makers.get(&t.tid).map_or(&[][..], Vec::as_slice)),
        });
    }
    out
}

/// By the thread that makes them: the places of the threads to be made. A thread has its maker's descriptor table; `table` tells for whom a thread's is laid out, where that is not its process's.
fn makers(p: &Process, table: impl Fn(i32) -> Option<i32>) -> HashMap<i32, Vec<u64>> {
    let mut out: HashMap<i32, Vec<u64>> = HashMap::new();
    for (i, t) in (0..).zip(&p.threads).skip(1) {
        match table(t.tid) {
            Some(first) if first == t.tid => {}
            first => out.entry(first.unwrap_or(p.pid)).or_default().push(i),
        }
    }
    out
}

/// Maps the area and copies restorer and tables into it.
fn load(cx: &Context<'_>, area: &Area, tables: &[u8]) -> std::io::Result<()> {
    let bytes = area.end - area.base;
    arch::map_fixed(area.base, bytes, libc::PROT_READ | libc::PROT_WRITE, None)?;
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    arch::unmap(area.control, cx.shared.bytes())?;
    arch::map_fixed(area.control, cx.shared.bytes(), rw, Some(cx.shared.fd()))?;
    // SAFETY: both ranges lie in the area that has just been mapped for them.
    unsafe {
        arch::copy_to(area.base, &cx.blob.placed_at(area.base));
        arch::copy_to(area.tables, tables);
    }
    arch::protect(area.base, cx.blob.bytes(), libc::PROT_READ | libc::PROT_EXEC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_read_directly_that_one_process_needs_in_large_pieces() {
        let chunk = |pages: usize| Chunk {
            path: "/dev/null".into(),
            file: std::fs::File::open("/dev/null").unwrap(),
            hashes: vec![0; pages],
        };
        let chunks: HashMap<u32, Chunk> = (1..=4).map(|id| (id, chunk(1000))).collect();
        let extent = |chunk, first: u32, pages: u64| Extent {
            vaddr: u64::from(first) * PAGE,
            bytes: pages * PAGE,
            chunk,
            page: first,
        };
        let small = (0..100).map(|i| extent(2, i * 10, 2));
        let one: Vec<Extent> = [extent(1, 0, 1000), extent(3, 0, 1000), extent(4, 0, 600)]
            .into_iter()
            .chain(small)
            .collect();
        let two = vec![extent(3, 0, 1000), extent(4, 600, 400)];
        let good = read_directly(&HashMap::from([(1, one), (2, two)]), &chunks);
        assert_eq!(good, HashSet::from([1, 4]), "2: small pieces, 3: twice the same");
    }
}
