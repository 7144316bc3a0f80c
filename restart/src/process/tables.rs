//! The tables for the restorer of one process, and where its area lies.

use super::{Context, Files};
use crate::arena::Arena;
use crate::attributes;
use crate::control::Shared;
use crate::fail::{Outcome, RestartError};
use crate::layout::{find_gap, pages_up, Range, TASK_SIZE};
use crate::memory::keys::Keys;
use crate::memory::{self, MemoryPlan};
use crate::state;
use crate::tree;
use crate::vdso;
use belay_abi::aio::RingPlan;
use belay_abi::restore::{
    Call, Fill, Helper, Plan, ThreadPlan, FILL_STACK_BYTES, MAX_HELPERS, PLAN_MAGIC, STACK_BYTES, STAGE_FINISH, STAGE_STOP,
};
use belay_image::extents::Extent;
use belay_image::model::{Process, VmaKind};
use std::collections::{HashMap, HashSet};
use std::os::fd::AsRawFd;

/// How often tables are built for another place.
const TRIES: u32 = 8;

/// Where the parts of the restorer's area lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    pub(super) base: u64,
    pub(super) tables: u64,
    scratch: u64,
    pub(super) control: u64,
    stacks: u64,
    pub(super) end: u64,
}

impl Area {
    /// Lowest address of the stacks of threads.
    pub(super) fn thread_stacks(&self, helpers: usize) -> u64 {
        self.stacks + FILL_STACK_BYTES * helpers as u64
    }
}

/// See [`AreaSizes`].
pub(super) fn measure(cx: &Context<'_>, p: &Process, helpers: usize) -> Outcome<AreaSizes> {
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

/// What the area must keep clear of, and the sizes of its parts.
pub(super) struct AreaSizes {
    taken: Vec<Range>,
    scratch: u64,
    stacks: u64,
}

/// The tables of a process, built.
pub(super) struct Prepared {
    /// Address of the plan.
    pub(super) plan: u64,
    /// Address of the threads' plans.
    pub(super) threads: u64,
    /// The tables.
    pub(super) bytes: Vec<u8>,
    pub(super) area: Area,
}

/// Builds the tables: once to learn their size, and then for the place that is found for them.
pub(super) fn prepare(
    cx: &Context<'_>,
    slot: usize,
    p: &Process,
    helpers: &[i32],
    files: &Files,
    sizes: &AreaSizes,
) -> Outcome<Prepared> {
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
    let draft = tables(cx, slot, p, helpers, files, layout(1 << 32, 0))?;
    settled(
        draft,
        |prepared| prepared.bytes.len() as u64,
        |length| {
            let base = find_gap(&sizes.taken, layout(0, length).end)
                .ok_or_else(|| RestartError::at(format!("process {}", p.pid), "no free address range for the restorer"))?;
            tables(cx, slot, p, helpers, files, layout(base, length))
        },
    )
}

/// Builds again, given room for as much as the last had, until that is enough: what there is to be done depends on
/// where the area lies, such as how many gaps are to be unmapped around it.
fn settled<T>(draft: T, length: impl Fn(&T) -> u64, build: impl Fn(u64) -> Outcome<T>) -> Outcome<T> {
    let mut room = pages_up(length(&draft));
    for _ in 0..TRIES {
        let built = build(room)?;
        if length(&built) <= room {
            return Ok(built);
        }
        room = pages_up(length(&built));
    }
    Err(RestartError::at(
        "restore",
        "the tables for the restorer find no place: report this",
    ))
}

/// Size of a rebuilt System V segment.
fn segment_bytes(shmid: i32) -> Option<u64> {
    belay_kernel::sysv::shm::stat(shmid).ok().map(|data| data.shm_segsz as u64)
}

/// What the restorer is to do with `p`, for an area that lies so.
fn tables(cx: &Context<'_>, slot: usize, p: &Process, helpers: &[i32], files: &Files, area: Area) -> Outcome<Prepared> {
    let guest = tree::shares_memory(p);
    let mut arena = Arena::new(area.tables);
    let fills = fills(cx, p, files, &mut arena);
    let mut memory = match guest {
        false => own_memory(cx, p, files, &area, fills, &mut arena)?,
        true => MemoryPlan::default(),
    };
    let rings = rings(p, &mut arena);
    state::process_early(p, &mut arena, &mut memory.after);
    if !p.shares_handlers {
        state::sigactions(&p.sigactions, &mut arena, &mut memory.after);
    }
    let last = last(cx, p, &mut arena)?;

    let plan_at = arena.zeroed(size_of::<Plan>());
    let threads = threads(cx, p, &area, helpers.len(), plan_at, &mut arena);
    let threads = arena.table(&threads);
    let stop_signal = state::stop_signal(p);
    let plan = Plan {
        magic: PLAN_MAGIC,
        slot: area.control + Shared::slot_offset(slot),
        control: area.control,
        pid: p.pid,
        helper_count: helpers.len().min(MAX_HELPERS) as u32,
        before: arena.table(&memory.before),
        fills: arena.table(&memory.fills),
        rings: arena.table(&rings),
        after: arena.table(&memory.after),
        threads,
        last: arena.table(&last),
        hold: hold(cx, p),
        stop_signal,
        arrivals: if guest { 0 } else { arrivals(cx, p) },
        guest: u32::from(guest),
        first: area.control + Shared::slot_offset(cx.slot_of(cx.first(p))),
        helpers: placed(helpers, &area),
    };
    arena.set(plan_at, &plan);
    Ok(Prepared {
        plan: plan_at,
        threads: threads.addr,
        bytes: arena.finish(),
        area,
    })
}

/// The pages of `p` that are stored: where each extent is read from, and to.
fn fills(cx: &Context<'_>, p: &Process, files: &Files, arena: &mut Arena) -> Vec<Fill> {
    let extents = cx.extents.get(&p.pid).map_or(&[][..], Vec::as_slice);
    let fill = |e: &Extent| {
        let first = e.page as usize;
        let chunk = cx.chunks.get(&e.chunk);
        let hashes = chunk.and_then(|c| c.hashes.get(first..first + e.pages() as usize));
        let sums: Vec<u64> = hashes.unwrap_or_default().iter().map(|h| *h as u64).collect();
        Fill {
            vaddr: e.vaddr,
            bytes: e.bytes,
            offset: e.offset(),
            fd: files.pages.get(&e.chunk).map_or(u32::MAX, |f| f.as_raw_fd() as u32),
            droppable: 0,
            sums: arena.table(&sums).addr,
        }
    };
    extents.iter().map(fill).collect()
}

/// The memory that `p` has, or shares as the first of those that have it, and what belongs to it.
fn own_memory(
    cx: &Context<'_>,
    p: &Process,
    files: &Files,
    area: &Area,
    fills: Vec<Fill>,
    arena: &mut Arena,
) -> Outcome<MemoryPlan> {
    let share = cx.shares.get(&p.pid);
    let input = memory::Input {
        vmas: &p.vmas,
        fills,
        area: area.base..area.end,
        others: cx.guests(p).map(|g| cx.area(cx.slot_of(g))).collect(),
        scratch: area.scratch,
        specials: cx.specials.to_vec(),
        foreign: cx.foreign.zip(cx.places.get(&p.pid)),
        keys: Keys::of(&p.vmas, p.keys),
        pid: p.pid,
        later: (cx.later.get(&p.pid).map_or(&[], |l| l.ranges.as_slice()), files.uffd),
        kept: share.map_or(&[], |s| s.kept.as_slice()),
        drops: share.map_or(&[], |s| s.drops.as_slice()),
        ask_huge: cx.ask_huge && !p.prctl.thp_disable,
        shared_fd: &|object, may_write| cx.rebuilder.shared_fd(object, may_write),
        segment_bytes: &segment_bytes,
        copy: &|path, identity| cx.copies.of(path, identity),
    };
    let mut memory = memory::plan(input, arena).map_err(|e| failed(p, e))?;
    let MemoryPlan { before, after, .. } = &mut memory;
    // Pages are read by the first thread and its helpers.
    let policy = p.threads.first().and_then(|t| t.policy.as_ref());
    attributes::policy(policy, 0, arena, before);
    if cx.processes.iter().any(|maker| !maker.placements.is_empty()) {
        attributes::without_placements(share.map_or(&[], |s| s.kept.as_slice()), before);
    }
    attributes::placements(&p.placements, arena, before);
    state::huge_pages(p, before);
    attributes::segments(&p.segments, arena, after);
    state::layout(&p.mm, files.exe.as_ref().map(AsRawFd::as_raw_fd), arena, after);
    state::membarrier(p.membarrier, after);
    state::no_new_code(p.prctl.mdwe, after);
    Ok(memory)
}

/// What is done when all else is there.
fn last(cx: &Context<'_>, p: &Process, arena: &mut Arena) -> Outcome<Vec<Call>> {
    let mut last = Vec::new();
    if let Some(children) = cx.stopped.get(&p.pid) {
        state::forget_stops(p, children, arena, &mut last);
    }
    state::posix_timers(&p.posix_timers, cx.restore_timer_ids, p.prctl.timer_ids, arena, &mut last).map_err(|e| failed(p, e))?;
    if let Some(first) = p.threads.first() {
        state::after_timers(&p.posix_timers, state::whose(p, first).0, &cx.own, arena, &mut last);
    }
    state::itimers(p, arena, &mut last);
    state::process_late(p, &cx.rebuilder.room(), &mut last);
    state::locks(&cx.rebuilder.posix_locks(p.pid), arena, &mut last);
    Ok(last)
}

/// How many come before the memory of `p` can be changed: the processes that share it, and the threads that exist
/// before their restorers run.
fn arrivals(cx: &Context<'_>, p: &Process) -> u32 {
    let companions = |p: &Process| cx.companions(p).count();
    let arrivals = companions(p) + cx.guests(p).map(|g| 1 + companions(g)).sum::<usize>();
    arrivals as u32
}

/// The stage that `p` waits for at the end. It closes what the restart has open in its descriptor table, which others of
/// the same table read from until they are ready; who stops is waited for by its parent, and so goes first.
fn hold(cx: &Context<'_>, p: &Process) -> u32 {
    match (cx.hold, state::stop_signal(p) != 0) {
        (false, _) => 0,
        (true, false) => STAGE_FINISH,
        (true, true) if cx.shares_table(p) => STAGE_STOP,
        (true, true) => 0,
    }
}

/// The helper threads, each with its stack.
fn placed(helpers: &[i32], area: &Area) -> [Helper; MAX_HELPERS] {
    let mut placed = [Helper::default(); MAX_HELPERS];
    for (i, (helper, tid)) in placed.iter_mut().zip(helpers).enumerate() {
        *helper = Helper {
            tid: *tid,
            pad: 0,
            stack: area.stacks + FILL_STACK_BYTES * i as u64,
        };
    }
    placed
}

fn failed(p: &Process, e: impl std::fmt::Display) -> RestartError {
    RestartError::at(format!("process {} ({})", p.pid, p.comm), e)
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
    let late = state::loses_maker(p, cx.processes);
    let makers = makers(p, cx.early, |tid| cx.rebuilder.thread_table(p.pid, tid));
    for (i, t) in p.threads.iter().enumerate() {
        let mut calls = Vec::new();
        state::thread(i, t, arena, &mut calls);
        let (creds, securebits) = state::whose(p, t);
        let creds = if i == 0 {
            &state::until_timers(&p.posix_timers, creds, &cx.own)
        } else {
            creds
        };
        state::credentials(creds, securebits, &cx.own, arena, &mut calls);
        state::thread_late(i, (p, t, late), creds, &mut calls);
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

/// By the thread that makes them: the places of the threads to be made, which are those that are not there `early`. A
/// thread has its maker's descriptor table; `table` tells for whom a thread's is laid out, where that is not its
/// process's.
fn makers(p: &Process, early: &HashSet<i32>, table: impl Fn(i32) -> Option<i32>) -> HashMap<i32, Vec<u64>> {
    let mut out: HashMap<i32, Vec<u64>> = HashMap::new();
    for (i, t) in (0..).zip(&p.threads).skip(1).filter(|(_, t)| !early.contains(&t.tid)) {
        out.entry(table(t.tid).unwrap_or(p.pid)).or_default().push(i);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_grow_in_their_place_get_more_room() {
        // Of bytes that are needed in rooms of so many.
        let build = |needed: fn(u64) -> u64| settled(0, |bytes| *bytes, |room| Ok(needed(room)));
        assert_eq!(build(|_| 0).ok(), Some(0));
        assert_eq!(build(|room| if room < 4096 { 4160 } else { 4096 }).ok(), Some(4096));
        assert!(build(|room| room + 64).is_err());
    }
}
