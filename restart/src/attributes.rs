//! Smaller attributes as lists of system calls: memory policies, segments of the program's own, what threads set with
//! `prctl`. Pure.

use crate::arena::Arena;
use crate::call::{call, nr, With};
use belay_abi::restore::{Call, Step, CALL_MAY_FAIL};
use belay_image::attributes::{Placement, Policy, ThreadPrctl};
use belay_kernel::policy::{self, NODE_WORDS};
use std::ops::Range;

const PR_SET_TSC: u64 = 26;
const PR_TSC_SIGSEGV: u64 = 2;
const PR_MCE_KILL: u64 = 33;
const PR_MCE_KILL_SET: u64 = 1;
const PR_SET_SPECULATION_CTRL: u64 = 53;
const PR_SET_IO_FLUSHER: u64 = 57;
const ARCH_SET_CPUID: u64 = 0x1012;
const MODIFY_LDT_WRITE: u64 = 0x11;
/// Most segment descriptors.
const SEGMENTS: usize = 8192;

/// Where the memory of the calling thread shall lie, and of those that it makes; without a policy the kernel decides,
/// whatever the maker's is. It is no part of what the program computes.
pub(crate) fn policy(policy: Option<&Policy>, index: usize, arena: &mut Arena, out: &mut Vec<Call>) {
    let [nodes, bits] = policy.map_or([0, 0], |policy| mask(policy, arena));
    let mode = policy.map_or(0, |policy| policy.mode);
    let c = call(Step::ThreadState, index, nr::SET_MEMPOLICY, &[mode.into(), nodes, bits]);
    out.push(c.with(CALL_MAY_FAIL));
}

/// Where pieces of memory shall lie. Once they are mapped, and before there is anything in them.
pub(crate) fn placements(placements: &[Placement], arena: &mut Arena, out: &mut Vec<Call>) {
    for (i, p) in placements.iter().enumerate() {
        let [nodes, bits] = mask(&p.policy, arena);
        let args = [p.start, p.end.wrapping_sub(p.start), p.policy.mode.into(), nodes, bits, 0];
        out.push(call(Step::Map, i, nr::MBIND, &args).with(CALL_MAY_FAIL));
    }
}

/// No policy for pieces of memory that are inherited: each process has its own.
pub(crate) fn without_placements(ranges: &[Range<u64>], out: &mut Vec<Call>) {
    for (i, r) in ranges.iter().enumerate() {
        let args = [r.start, r.end - r.start, 0, 0, 0, 0];
        out.push(call(Step::Map, i, nr::MBIND, &args).with(CALL_MAY_FAIL));
    }
}

/// In a process that reads memory which it has in common with those that it makes: where that shall lie. Of the
/// placements those that lie in `ranges`, which are mapped; others follow in the restorer.
pub(crate) fn lie_as_in(policy: Option<&Policy>, placements: &[Placement], ranges: &[Range<u64>]) {
    // It is no part of what the program computes.
    if let Some(policy) = policy {
        let _ = policy::set(policy.mode, words(policy).as_ref());
    }
    for (p, r) in placements.iter().flat_map(|p| ranges.iter().map(move |r| (p, r))) {
        let (start, end) = (p.start.max(r.start), p.end.min(r.end));
        if start < end {
            let _ = policy::bind(start, end - start, p.policy.mode, words(&p.policy).as_ref());
        }
    }
}

/// Address and number of bits of the nodes of `policy`; none where it names none. (The kernel takes one bit less than it is told.)
fn mask(policy: &Policy, arena: &mut Arena) -> [u64; 2] {
    words(policy).map_or([0, 0], |words| [arena.words(&words), 64 * NODE_WORDS as u64])
}

/// The nodes of `policy` as a mask; nothing where it names none.
fn words(policy: &Policy) -> Option<[u64; NODE_WORDS]> {
    let mut words = [0; NODE_WORDS];
    words.iter_mut().zip(&policy.nodes).for_each(|(word, nodes)| *word = *nodes);
    (!policy.nodes.is_empty()).then_some(words)
}

/// Segment descriptors of the program's own. The kernel keeps as many as there were.
pub(crate) fn segments(descriptors: &[u64], arena: &mut Arena, out: &mut Vec<Call>) {
    let descriptors = &descriptors[..descriptors.len().min(SEGMENTS)];
    for (number, descriptor) in descriptors.iter().enumerate() {
        if *descriptor == 0 && number + 1 != descriptors.len() {
            continue;
        }
        let at = arena.words(&segment(number as u64, *descriptor));
        out.push(call(Step::Process, 8, nr::MODIFY_LDT, &[MODIFY_LDT_WRITE, at, 16]));
    }
}

/// A descriptor as `modify_ldt` takes it (`struct user_desc`).
fn segment(number: u64, descriptor: u64) -> [u64; 2] {
    let bits = |from: u32, count: u32| descriptor >> from & ((1 << count) - 1);
    let base = bits(16, 24) | bits(56, 8) << 24;
    let limit = bits(0, 16) | bits(48, 4) << 16;
    let read_only = bits(41, 1) ^ 1;
    let absent = bits(47, 1) ^ 1;
    // An empty one is told by these.
    let (read_only, absent) = if descriptor == 0 { (1, 1) } else { (read_only, absent) };
    let flags = bits(54, 1) | bits(42, 2) << 1 | read_only << 3 | bits(55, 1) << 4 | absent << 5 | bits(52, 1) << 6;
    [number | base << 32, limit | flags << 32]
}

/// What a thread sets for itself while it has what capabilities there are.
pub(crate) fn thread(index: usize, t: &ThreadPrctl, out: &mut Vec<Call>) {
    let mut push = |flags: u32, args: &[u64]| out.push(call(Step::ThreadState, index, nr::PRCTL, args).with(flags));
    if let Some(how) = t.machine_checks {
        push(0, &[PR_MCE_KILL, PR_MCE_KILL_SET, how.into(), 0, 0]);
    }
    if t.io_flusher {
        push(0, &[PR_SET_IO_FLUSHER, 1, 0, 0, 0]);
    }
    for (what, how) in &t.speculation {
        // A processor or kernel without the one flaw or the other gives no say in it.
        push(CALL_MAY_FAIL, &[PR_SET_SPECULATION_CTRL, (*what).into(), (*how).into(), 0, 0]);
    }
}

/// What would hinder it in the restart.
pub(crate) fn thread_late(index: usize, t: &ThreadPrctl, out: &mut Vec<Call>) {
    if t.no_tsc {
        out.push(call(Step::ThreadState, index, nr::PRCTL, &[PR_SET_TSC, PR_TSC_SIGSEGV]));
    }
    if t.no_cpuid {
        out.push(call(Step::ThreadState, index, nr::ARCH_PRCTL, &[ARCH_SET_CPUID, 0]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_told_as_the_kernel_takes_it() {
        // Data that can be written, 32 bits, of 4 KiB at 0x12345678, for the program's use.
        let base = 0x1234_5678_u64;
        let flags = 0b0101u64 << 52 | 1 << 47 | 3 << 45 | 1 << 44 | 0b0011 << 40;
        let descriptor = 0xfff | (base & 0xff_ffff) << 16 | flags | base >> 24 << 56;
        assert_eq!(segment(3, descriptor), [3 | base << 32, 0xfff | 0b100_0001 << 32]);
        // Nothing: read_exec_only and seg_not_present.
        assert_eq!(segment(5, 0), [5, 0b10_1000 << 32]);
    }

    #[test]
    fn as_many_descriptors_are_made_as_there_were() {
        let mut out = Vec::new();
        segments(&[0, 1 << 47, 0, 0], &mut Arena::new(0x1000), &mut out);
        assert_eq!(out.len(), 2, "what is empty needs no call, but for the last");
        segments(&vec![1; SEGMENTS + 1], &mut Arena::new(0x1000), &mut out);
        assert_eq!(out.len(), 2 + SEGMENTS);
    }

    #[test]
    fn nodes_are_given_in_a_mask_that_every_kernel_takes() {
        let given = |nodes: Vec<u64>| {
            let mut out = Vec::new();
            policy(Some(&Policy { mode: 3, nodes }), 0, &mut Arena::new(0x1000), &mut out);
            out[0].args
        };
        assert_eq!(given(Vec::new())[..3], [3, 0, 0]);
        assert_eq!(given(vec![5])[..3], [3, 0x1000, 1024]);
        assert_eq!(given(vec![1; 40])[..3], [3, 0x1000, 1024]);
    }

    #[test]
    fn what_is_common_lies_where_its_maker_wants_it() {
        const BYTES: u64 = 8 << 12;
        let at = belay_kernel::place::map(None, BYTES, 3, 0, None).unwrap();
        let of = |at: u64| policy::at(at).ok();
        let bind = Policy { mode: 2, nodes: vec![1] };
        let placement = Placement {
            start: at + 0x1000,
            end: at + BYTES,
            policy: bind,
        };
        lie_as_in(None, &[placement], std::slice::from_ref(&(at..at + 0x3000)));
        // Not of every kernel.
        if of(at).is_some() {
            assert_eq!(
                [0, 0x1000, 0x2000, 0x3000].map(|i| of(at + i).map(|p| p.0)),
                [Some(0), Some(2), Some(2), Some(0)]
            );
        }
    }
}
