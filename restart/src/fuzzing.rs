//! Entry for the fuzzer: all that is decided about a job before any process of it exists.

use crate::arena::Arena;
use crate::layout::{find_gap, Range, TASK_SIZE};
use crate::state::Own;
use crate::vdso::{bridge::Bridge, frozen};
use crate::{attributes, kin, later, memory, plausible, processor, state, tree, verify};
use belay_abi::restore::Fill;
use belay_image::extents::Extent;
use belay_image::model::{Job, Process, Processor};
use belay_image::sections::SectionFile;
use std::collections::BTreeSet;
use std::path::Path;

/// All that is checked and decided before anything of the job whose sections these are is made; whether it may be.
pub fn check(sections: &SectionFile, extents: &[Extent]) -> bool {
    let Ok((job, descriptors)) = verify::decode(Path::new("input"), sections, false) else {
        return false;
    };
    drop(processor::missing(&job, &Processor::own(), false));
    drop(belay_plugins::look(&descriptors, &|_| false));
    let _ = descriptors.keepers();
    assert!(descriptors.of_ipc_namespace().is_none_or(|what| !what.is_empty()));
    decide(&job, extents);
    true
}

/// Decides how `job` would be restarted, with `extents` as the memory of each process.
pub fn decide(job: &Job, extents: &[Extent]) {
    if plausible::check(job, true).is_err() {
        return;
    }
    let beside = job.processes.chunks_exact(2).map(|pair| (pair[1].pid, pair[0].pid)).collect();
    let taken = BTreeSet::from([5, 77]);
    if let Ok(tree) = tree::plan(&job.agent, &job.processes, 2, (32768, job.last_pid), &taken, &beside) {
        let own = |p: &Process| (p.pid, verify::cut(extents, &p.vmas));
        let tables = job.processes.iter().filter(|p| tree::is_live(p)).map(own).collect();
        drop(kin::plan(&tree, &job.processes, &tables, &[0..1 << 20, TASK_SIZE..u64::MAX]));
    }
    let own = Own {
        uids: [0; 4],
        gids: [0; 4],
        groups: Vec::new(),
        permitted: u64::MAX >> 23,
        bounding: u64::MAX >> 23,
        ordinary: false,
    };
    for p in job.processes.iter().filter(|p| tree::is_live(p)) {
        let mut arena = Arena::new(1 << 32);
        let pieces = verify::cut(extents, &p.vmas);
        let fill = |e: &Extent| Fill {
            vaddr: e.vaddr,
            bytes: e.bytes,
            offset: e.offset(),
            ..Fill::default()
        };
        let taken: Vec<_> = p.vmas.iter().map(|v| v.start..v.end).collect();
        let base = find_gap(&taken, 1 << 20).unwrap_or(TASK_SIZE / 2);
        let all: Vec<Range> = p.vmas.iter().map(|v| v.start..v.end).collect();
        drop(later::split(&p.vmas, &later::touched(p), &[], &mut pieces.clone()));
        for uffd in [None, Some(7)] {
            let input = memory::Input {
                vmas: &p.vmas,
                fills: pieces.iter().map(fill).collect(),
                area: base..base + (1 << 20),
                others: Vec::new(),
                scratch: base,
                specials: Vec::new(),
                foreign: None,
                keys: memory::keys::Keys::of(&p.vmas, p.keys),
                pid: p.pid,
                later: (&all, uffd),
                kept: &[],
                drops: &[],
                ask_huge: uffd.is_some(),
                shared_fd: &|object, _| (object.ino % 3 != 0).then_some(5),
                segment_bytes: &|id| (id % 3 != 0).then_some(8192),
                copy: &|path, _| path.as_bytes().len().is_multiple_of(3).then_some(6),
            };
            drop(memory::plan(input, &mut arena));
        }
        let mut calls = Vec::new();
        state::layout(&p.mm, Some(3), &mut arena, &mut calls);
        attributes::placements(&p.placements, &mut arena, &mut calls);
        attributes::segments(&p.segments, &mut arena, &mut calls);
        state::membarrier(p.membarrier, &mut calls);
        state::huge_pages(p, &mut calls);
        state::process_early(p, &mut arena, &mut calls);
        state::sigactions(&p.sigactions, &mut arena, &mut calls);
        state::itimers(p, &mut arena, &mut calls);
        drop(state::posix_timers(
            &p.posix_timers,
            true,
            p.prctl.timer_ids,
            &mut arena,
            &mut calls,
        ));
        drop(state::posix_timers(
            &p.posix_timers,
            false,
            p.prctl.timer_ids,
            &mut arena,
            &mut calls,
        ));
        state::process_late(p, &(1000..2000), &mut calls);
        state::stop_signal(p);
        for (i, t) in p.threads.iter().enumerate() {
            state::thread(i, t, &mut arena, &mut calls);
            let (creds, securebits) = state::whose(p, t);
            state::credentials(creds, securebits, &own, &mut arena, &mut calls);
            state::thread_late(i, (p, t, false), creds, &mut calls);
            state::pending(p.pid, Some(t.tid), &t.pending, &mut arena, &mut calls);
        }
    }
}

/// Takes `data`, and this kernel's vDSO with changes at the places that `data` names, for the vDSO of a checkpoint, as
/// a restart does under another kernel; and for its data.
pub fn vdso(data: &[u8]) {
    let own = belay_kernel::vdso::code().unwrap_or_default();
    let mut changed = own.clone();
    for edit in data.chunks_exact(3).filter(|_| !own.is_empty()) {
        changed[usize::from(u16::from_le_bytes([edit[0], edit[1]])) % own.len()] = edit[2];
    }
    for (old, new) in [(data, own.as_slice()), (&changed, &own), (&own, &changed)] {
        if let Ok(bridge) = Bridge::new(old, new, false) {
            for place in [0x7fff_0000_0000, 0x1000] {
                drop(bridge.write(&mut old.to_vec(), 0x7ffe_f000_0000, place));
            }
        }
        frozen::freeze(&mut old.to_vec());
    }
}
