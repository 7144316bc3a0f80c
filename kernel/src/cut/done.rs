//! Signal handlers that have interrupted the rest of a call: where they return to lies on the stack.

use super::place::Slot;
use crate::ptrace::Regs;

/// Words of `struct sigcontext` up to `rip`, in its order.
const WORDS: usize = 17;

/// The saved registers on `stack` of a thread that a handler has taken out of place `at`, as they are in the call
/// itself: offset and bytes.
pub(super) fn frames(stack: &[u8], slot: &Slot, at: u64) -> Vec<(usize, Vec<u8>)> {
    let words: Vec<u64> = stack
        .chunks_exact(8)
        .filter_map(|w| w.try_into().ok().map(u64::from_le_bytes))
        .collect();
    let found = words.windows(WORDS).enumerate().filter_map(|(i, saved)| {
        let own = slot.own(at, &registers(saved)?).filter(|own| own.rsp == slot.rsp)?;
        let bytes = saved_again(&own, saved).iter().flat_map(|w| w.to_le_bytes()).collect();
        Some((i * 8, bytes))
    });
    found.collect()
}

fn registers(saved: &[u64]) -> Option<Regs> {
    let saved: &[u64; WORDS] = saved.try_into().ok()?;
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut regs: Regs = unsafe { std::mem::zeroed() };
    [regs.r8, regs.r9, regs.r10] = [saved[0], saved[1], saved[2]];
    [regs.rdi, regs.rsi] = [saved[8], saved[9]];
    [regs.rdx, regs.rax, regs.rcx, regs.rsp, regs.rip] = [saved[12], saved[13], saved[14], saved[15], saved[16]];
    // A handler returns from no call.
    regs.orig_rax = u64::MAX;
    Some(regs)
}

fn saved_again(own: &Regs, saved: &[u64]) -> Vec<u64> {
    let mut words = saved.to_vec();
    [words[0], words[1], words[2]] = [own.r8, own.r9, own.r10];
    [words[8], words[9]] = [own.rdi, own.rsi];
    [words[12], words[13], words[14], words[15], words[16]] = [own.rdx, own.rax, own.rcx, own.rsp, own.rip];
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_returns_into_the_calls_end() {
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut regs: Regs = unsafe { std::mem::zeroed() };
        (regs.orig_rax, regs.rax, regs.rip, regs.rsp, regs.rsi) = (1, 10, 0x1000, 0x2000, 0x3000);
        let slot = Slot::new(7, &regs);
        let mut stack = [0u64; 40];
        let context = &mut stack[5..5 + WORDS];
        (context[9], context[13], context[15], context[16]) = (0x300a, 1, 0x2000, 0x7000);
        // Something that looks as if it led there.
        stack[35] = 0x7002;
        let bytes: Vec<u8> = stack.iter().flat_map(|w| w.to_le_bytes()).collect();
        let found = frames(&bytes, &slot, 0x7000);
        assert_eq!(found.len(), 1);
        let (offset, words) = &found[0];
        let word = |i: usize| u64::from_le_bytes(words[i * 8..i * 8 + 8].try_into().unwrap());
        assert_eq!(
            (*offset, word(9), word(13), word(15), word(16)),
            (40, 0x3000, 10, 0x2000, 0x1000)
        );
    }
}
