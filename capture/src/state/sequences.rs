//! Restartable sequences (rseq): a thread that is stopped in the middle of one goes on at its abort handler.
//!
//! A sequence works on data of the processor it runs on (caches of allocators, counters) and relies on the kernel: a
//! thread that loses its processor in the middle begins anew. The kernel looks, when a thread returns to user mode,
//! whether its instruction pointer lies in the sequence that its `struct rseq` names; of one that returns into code of
//! ours instead it takes the sequence for left, and forgets it. The thread would carry on where it was, after others
//! have worked on the same data. So what the kernel would have done is done first.

use crate::stop::stopped::{Process, Suspended};
use belay_kernel::vm;

/// Where the address of the descriptor lies in `struct rseq` (`rseq_cs`).
const DESCRIPTOR: u64 = 8;

/// `struct rseq_cs`, but for version and flags.
#[derive(Debug, Clone, Copy)]
struct Sequence {
    start: u64,
    length: u64,
    abort: u64,
}

impl Sequence {
    fn read(pid: i32, at: u64) -> Option<Self> {
        let mut raw = [0; 32];
        vm::read(pid, at, &mut raw).ok()?;
        let word = |i: usize| raw.get(i..i + 8)?.try_into().ok().map(u64::from_le_bytes);
        Some(Self {
            start: word(8)?,
            length: word(16)?,
            abort: word(24)?,
        })
    }

    fn holds(self, rip: u64) -> bool {
        rip.wrapping_sub(self.start) < self.length
    }
}

/// Sends every thread that stands in a sequence to its abort handler. To be called when all stand still, before
/// anything runs in them.
pub(crate) fn abort(job: &mut Suspended) {
    job.processes.iter_mut().for_each(of_process);
}

fn of_process(process: &mut Process) {
    let pid = process.task();
    let registered = || process.tasks.iter().filter(|t| t.rseq.0 != 0);
    let words: Vec<u64> = registered().map(|t| t.rseq.0.wrapping_add(DESCRIPTOR)).collect();
    let descriptors = vm::read_words(pid, &words);
    let tasks = process.tasks.iter_mut().filter(|t| t.rseq.0 != 0);
    for (task, descriptor) in tasks.zip(descriptors) {
        // What cannot be read the kernel could not either: it ends such a process itself.
        let sequence = descriptor.filter(|at| *at != 0).and_then(|at| Sequence::read(pid, at));
        if let Some(sequence) = sequence.filter(|s| s.holds(task.regs.rip)) {
            task.regs.rip = sequence.abort;
            task.borrowed = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_ends_before_the_instruction_behind_its_last() {
        let s = Sequence {
            start: 0x1000,
            length: 0x20,
            abort: 0x2000,
        };
        let inside = [0x0fff, 0x1000, 0x101f, 0x1020].map(|rip| s.holds(rip));
        assert_eq!(inside, [false, true, true, false]);
    }

    #[test]
    fn a_descriptor_is_read_as_the_kernel_lays_it_out() {
        let raw: [u64; 4] = [0, 0x1000, 0x20, 0x2000];
        let s = Sequence::read(std::process::id().cast_signed(), raw.as_ptr() as u64).unwrap();
        assert_eq!((s.start, s.length, s.abort), (0x1000, 0x20, 0x2000));
    }
}
