//! Frames of signal handlers that interrupted the reading of a clock.
//!
//! In a time namespace, where restarted jobs are, the code of the vDSO adds the namespace's offsets to what it has read
//! of the machine's clock. A restart puts the job into another one: whoever had read and not yet added would get the
//! sum of an old clock and a new offset, too low by the time in between. Registers say which threads stand there, and
//! then the process keeps its old vDSO; here are found the handlers that will return to there.

use crate::stop::stopped::Process;
use belay_kernel::proc::Map;
use belay_kernel::vm;
use std::ops::Range;

/// How far above a stack pointer frames are looked for, bytes: what a handler and all that it calls need.
const HANDLER_BYTES: u64 = 128 << 10;
/// Stacks that are looked at for one thread: handlers may have interrupted one another, each on a stack of its own.
const STACKS: usize = 8;
const WORD: usize = size_of::<u64>();
/// `cs`, `gs`, `fs`, `ss` of a program in 64-bit mode, as the kernel puts them into a frame: two words behind the
/// return address, which follows the stack pointer (`struct sigcontext`).
const SEGMENTS: u64 = 0x002b_0000_0000_0033;

/// What a frame says of the code that was interrupted.
struct Frame {
    /// Where its return address lies.
    at: u64,
    rip: u64,
    rsp: u64,
}

/// Frames on the stacks of `process`, whose mappings are `maps`, that return into the vDSO: (address of the return
/// address, return address). Looked for where its clocks are `shifted`, or a thread stands in the vDSO itself. To be
/// called when `process` has all its threads.
pub(crate) fn into_vdso(process: &Process, maps: &[Map], shifted: bool) -> Vec<(u64, u64)> {
    let Some(code) = maps.iter().find(|m| m.name == "[vdso]") else {
        return Vec::new();
    };
    if !shifted && !process.tasks.iter().any(|t| (code.start..code.end).contains(&t.regs.rip)) {
        return Vec::new();
    }
    let mut out = Vec::new();
    let mut bytes = Vec::new();
    for task in &process.tasks {
        // Handlers may be on stacks of their own: each frame tells where the stack was that its handler has left.
        let mut places = vec![task.regs.rsp];
        let mut seen: Vec<Range<u64>> = Vec::new();
        while let Some(rsp) = places.pop().filter(|_| seen.len() < STACKS) {
            let stack = above(rsp, maps).filter(|_| !seen.iter().any(|s| s.contains(&rsp)));
            let Some(stack) = stack else { continue };
            bytes.resize(usize::try_from(stack.end - stack.start).unwrap_or(0), 0);
            let read = vm::read_some(process.task(), stack.start, &mut bytes).unwrap_or(0);
            for frame in frames(stack.start, &bytes[..read]) {
                if (code.start..code.end).contains(&frame.rip) {
                    out.push((frame.at, frame.rip));
                }
                places.push(frame.rsp);
            }
            seen.push(stack);
        }
    }
    out.sort_unstable();
    out.dedup();
    out
}

/// The part of a stack that is looked through, where `rsp` points to one: its mapping only, as what lies behind need
/// not be memory that can be read now.
fn above(rsp: u64, maps: &[Map]) -> Option<Range<u64>> {
    let start = rsp & !(WORD as u64 - 1);
    let map = maps
        .get(maps.partition_point(|m| m.end <= start))
        .filter(|m| m.start <= start)?;
    let may_write = map.prot & libc::PROT_WRITE.cast_unsigned() != 0;
    may_write.then(|| start..map.end.min(start.saturating_add(HANDLER_BYTES)))
}

/// The frames in `stack`, memory at `start`.
fn frames(start: u64, stack: &[u8]) -> impl Iterator<Item = Frame> + '_ {
    let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |w| u64::from_ne_bytes(*w));
    // rsp, rip, eflags, segments
    let four = stack.windows(4 * WORD).step_by(WORD).zip((start..).step_by(WORD));
    four.filter(move |(four, _)| word(&four[3 * WORD..]) == SEGMENTS)
        .map(move |(four, at)| Frame {
            at: at + WORD as u64,
            rip: word(&four[WORD..]),
            rsp: word(four),
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    static FOUND: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

    extern "C" fn handler(_: i32) {
        let here = 0u64;
        let start = &raw const here as u64;
        let mut stack = vec![0; 16 << 10];
        let n = vm::read_some(std::process::id().cast_signed(), start, &mut stack).unwrap_or(0);
        let found = frames(start, &stack[..n]).next();
        if let Some(frame) = found {
            FOUND[0].store(frame.rip, Ordering::SeqCst);
            FOUND[1].store(frame.rsp, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_frame_that_the_kernel_made_is_found() {
        let here = 0u64;
        // SAFETY: the handler only reads, and is called once, by `raise`.
        unsafe {
            libc::signal(libc::SIGUSR2, handler as extern "C" fn(i32) as usize);
            libc::raise(libc::SIGUSR2);
            libc::signal(libc::SIGUSR2, libc::SIG_DFL);
        }
        let [rip, rsp] = FOUND.each_ref().map(|f| f.load(Ordering::SeqCst));
        let maps = belay_kernel::proc::maps(std::process::id().cast_signed()).unwrap();
        let of_libc = maps.iter().find(|m| (m.start..m.end).contains(&rip)).map(|m| m.name.clone());
        assert!(
            of_libc.is_some_and(|name| name.to_string_lossy().contains("libc")),
            "{rip:#x}"
        );
        assert!(rsp.abs_diff(&raw const here as u64) < 64 << 10, "{rsp:#x}");
    }
}
