//! What of a job's memory is filled when it runs already (`--lazy`): large private anonymous mappings. Pure.

use crate::layout::Range;
use crate::namespace::Way;
use crate::tree;
use belay_image::extents::{Extent, PAGE};
use belay_image::model::{Process, Thread, Vma, VmaKind};
use belay_kernel::missing;
use std::collections::BTreeSet;

/// A mapping with fewer stored bytes is read at once.
const WORTH: u64 = 256 << 10;
/// What a mapping must not be: growing downwards, to be dropped by the kernel, locked, wiped in children, or sealed.
const UNFIT: [&str; 5] = ["gd", "dp", "lo", "wf", "sl"];
/// The places of the stack pointer and of the thread pointer among the registers.
const RSP: usize = 19;
const FS_BASE: usize = 21;

/// What of a process's memory is filled later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Later {
    /// Mappings, ascending,
    pub(crate) ranges: Vec<Range>,
    /// and what is missing in them.
    pub(crate) pages: Vec<Extent>,
}

/// Why all memory is read at once.
pub(crate) fn hindrance(way: Way, parts: bool) -> Option<String> {
    if parts {
        return Some("the job has several hosts".into());
    }
    // Who stands by must be able to end all of the job, and nobody else.
    if way == Way::Initial {
        return Some("the restart makes no namespaces".into());
    }
    let e = missing::make().err()?;
    Some(match e.raw_os_error() {
        Some(libc::EPERM) => {
            "userfaultfd that stops the kernel too and follows forks needs CAP_SYS_PTRACE outside of user namespaces (root)".into()
        }
        Some(libc::ENOSYS | libc::EINVAL) => "this kernel has no userfaultfd that follows forks".into(),
        _ => format!("userfaultfd: {e}"),
    })
}

/// Takes what is filled later out of `extents`, all pages of a process with mappings `vmas`, both in ascending order. The
/// pages `touched` are read at once, and so are mappings of which a part is `kept` from before.
pub(crate) fn split(vmas: &[Vma], touched: &BTreeSet<u64>, kept: &[Range], extents: &mut Vec<Extent>) -> Option<Later> {
    let (mut later, mut now) = (Later::default(), Vec::new());
    let mut rest = extents.as_slice();
    for vma in vmas {
        let (before, others) = rest.split_at(rest.partition_point(|e| e.vaddr < vma.start));
        let (inside, after) = others.split_at(others.partition_point(|e| e.vaddr < vma.end));
        now.extend(before);
        rest = after;
        let is_whole = inside.last().is_some_and(|e| e.end() <= vma.end);
        if !is_whole || !is_fit(vma, kept) || inside.iter().map(|e| e.bytes).sum::<u64>() < WORTH {
            now.extend(inside);
            continue;
        }
        later.ranges.push(vma.start..vma.end);
        for e in inside {
            let mut at = e.vaddr;
            for page in touched.range(e.vaddr..e.end()) {
                later.pages.extend((at < *page).then(|| e.part(at, *page)));
                now.push(e.part(*page, page + PAGE));
                at = page + PAGE;
            }
            later.pages.extend((at < e.end()).then(|| e.part(at, e.end())));
        }
    }
    now.extend(rest);
    *extents = now;
    (!later.ranges.is_empty()).then_some(later)
}

/// Whether a mapping can be filled later.
fn is_fit(vma: &Vma, kept: &[Range]) -> bool {
    let anonymous = matches!(
        vma.kind,
        VmaKind::Anonymous { .. } | VmaKind::Heap | VmaKind::FilePrivate { identity: None, .. }
    );
    let fit = !vma.flags.iter().any(|f| UNFIT.contains(&f.as_str()));
    let common = kept.iter().any(|r| r.start < vma.end && vma.start < r.end);
    anonymous && fit && !common && vma.guards.is_empty()
}

/// The pages that the kernel may touch at the end of a thread, when it waits for nobody: of the word that it clears, and
/// of the list of locks; and those that each thread touches first.
pub(crate) fn touched(p: &Process) -> BTreeSet<u64> {
    let register = |t: &Thread, i: usize| t.regs.get(i).copied().unwrap_or(0);
    let of = |t: &Thread| {
        [
            t.tid_address,
            t.robust_list.0,
            t.rseq.0,
            register(t, RSP),
            register(t, FS_BASE),
        ]
    };
    let all = p.threads.iter().flat_map(of);
    all.map(|at| at & !(PAGE - 1)).collect()
}

/// Whether the memory of `p`, one of `all`, can be filled later: nobody else has it or its descriptors, its pages may lie
/// on any node, and nothing of it was left out of the checkpoint, which is put there through `/proc/PID/mem`: that waits
/// for nobody. Nor does a GPU's driver, when it pins what the process had registered with it.
pub(crate) fn may_be(p: &Process, all: &[Process], has_own_descriptors: impl Fn(&Process) -> bool, uses_gpu: bool) -> bool {
    let shared = all
        .iter()
        .any(|q| tree::shares_memory(q) && (q.pid == p.pid || q.shares_mm_with == p.pid));
    let anywhere = p.threads.first().is_none_or(|t| t.policy.is_none());
    tree::is_live(p) && !shared && anywhere && !uses_gpu && p.left_out.is_none() && has_own_descriptors(p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::running;
    use belay_image::model::LeftOut;

    fn vma(start: u64, pages: u64, kind: VmaKind, flags: &[&str]) -> Vma {
        Vma {
            start,
            end: start + pages * PAGE,
            prot: 3,
            kind,
            flags: flags.iter().map(|f| (*f).to_owned()).collect(),
            guards: Vec::new(),
            key: 0,
        }
    }

    fn extent(vaddr: u64, pages: u64, page: u32) -> Extent {
        Extent {
            vaddr,
            bytes: pages * PAGE,
            chunk: 1,
            page,
        }
    }

    fn anonymous() -> VmaKind {
        VmaKind::Anonymous { name: None }
    }

    #[test]
    fn large_anonymous_memory_is_left_but_for_what_threads_touch_at_their_end() {
        let mut guarded = vma(0x700_0000, 512, anonymous(), &[]);
        guarded.guards.push((0x700_0000, 0x700_1000));
        let vmas = [
            vma(0x100_0000, 512, anonymous(), &[]),
            vma(0x200_0000, 512, VmaKind::Stack, &[]),
            vma(0x300_0000, 512, VmaKind::Heap, &["sl"]),
            vma(0x400_0000, 512, anonymous(), &[]),
            vma(0x500_0000, 512, VmaKind::Heap, &["rd", "wr"]),
            vma(0x600_0000, 63, anonymous(), &[]),
            guarded,
        ];
        let touched = BTreeSet::from([0x100_0000, 0x100_5000, 0x300_0000]);
        let all: Vec<Extent> = vmas.iter().map(|v| extent(v.start, (v.end - v.start) / PAGE, 9)).collect();
        let mut now = all.clone();
        let later = split(&vmas, &touched, std::slice::from_ref(&(0x400_2000..0x400_3000)), &mut now).unwrap();
        assert_eq!(later.ranges, [0x100_0000..0x120_0000, 0x500_0000..0x520_0000]);
        let first = [extent(0x100_1000, 4, 10), extent(0x100_6000, 506, 15)];
        assert_eq!(later.pages, [first[0], first[1], all[4]]);
        let single = [extent(0x100_0000, 1, 9), extent(0x100_5000, 1, 14)];
        assert_eq!(now, [single[0], single[1], all[1], all[2], all[3], all[5], all[6]]);
        assert!(split(&vmas, &touched, std::slice::from_ref(&(0..u64::MAX)), &mut all.clone()).is_none());
    }

    #[test]
    fn memory_that_others_have_is_read_at_once() {
        let mut all = vec![running(7, 1), running(8, 7)];
        let own = |p: &Process| p.pid != 9;
        assert!(may_be(&all[0], &all, own, false) && may_be(&all[1], &all, own, false));
        all[1].shares_mm_with = 7;
        assert!(!may_be(&all[0], &all, own, false) && !may_be(&all[1], &all, own, false));
        all.push(running(9, 7));
        assert!(!may_be(&all[2], &all, own, false), "nor where they have its descriptors");
        all.push(running(10, 7));
        assert!(may_be(&all[3], &all, own, false));
        assert!(!may_be(&all[3], &all, own, true), "nor where a driver pins it");
        all[3].left_out = Some(LeftOut::default());
        assert!(!may_be(&all[3], &all, own, false), "nor where something was left out");
    }
}
