//! Clocks of a time namespace that were being read at the moment of the stop.
//!
//! In a time namespace, where restarted jobs are, the code of the vDSO adds the namespace's offsets to what it has read of the machine's clock. A restart puts the job into another one: whoever had read
//! and not yet added would get the sum of an old clock and a new offset, too low by the time in between. Registers say which threads stand there; here are found the frames of signal
//! handlers that interrupted that code.

use crate::suspend::Process;
use belay_kernel::proc::Map;
use belay_kernel::vm;

/// How far above a stack pointer such a frame is looked for, bytes: what a handler and all that it calls need.
const HANDLER_BYTES: usize = 128 << 10;
const WORD: usize = size_of::<u64>();

/// Words on the stacks of `process`, whose mappings are `maps`, that lead into the code of the vDSO: (address, word). To be called when `process` has all its threads.
pub(crate) fn words(process: &Process, maps: &[Map]) -> Vec<(u64, u64)> {
    let Some(code) = maps.iter().find(|m| m.name == "[vdso]") else {
        return Vec::new();
    };
    // The start itself is what the auxiliary vector on the first stack says.
    let leads_there = |word: &u64| (code.start + 1..code.end).contains(word);
    let mut stack = vec![0; HANDLER_BYTES];
    let mut out = Vec::new();
    for task in &process.tasks {
        let top = task.regs.rsp.next_multiple_of(WORD as u64);
        // Without a stack there is no frame on it.
        let read = vm::read_some(process.task(), top, &mut stack).unwrap_or(0);
        let words = stack[..read].chunks_exact(WORD).filter_map(<[u8]>::first_chunk);
        let words = words.map(|w| u64::from_ne_bytes(*w));
        out.extend((top..).step_by(WORD).zip(words).filter(|(_, word)| leads_there(word)));
    }
    out
}
