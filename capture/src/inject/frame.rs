//! The signal frame that brings a thread back to where it was if the agent dies while the thread runs injected code.
//!
//! Layout of the kernel's `struct rt_sigframe` (arch/x86/include/asm/sigframe.h): return address, `ucontext`,
//! `siginfo`; the XSAVE area follows, 64-byte aligned, with the `_fpx_sw_bytes` that make `rt_sigreturn` restore all of
//! it.

use belay_kernel::cpu::{self, Component};
use belay_kernel::ptrace::Regs;

/// Where the stack pointer stands at `rt_sigreturn`, from the start of the frame: behind the return address.
pub(crate) const RSP_OFFSET: u64 = 8;
const UC: usize = 8;
/// Flags of the ucontext: UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS.
const UC_FLAGS: u64 = 0x7;
const UC_STACK: usize = UC + 16;
const UC_GREGS: usize = UC + 40;
const UC_FPSTATE: usize = UC_GREGS + 23 * 8;
const UC_SIGMASK: usize = UC_GREGS + 256;
const XSTATE: usize = 640;
const SW_BYTES: usize = 464;
/// Which parts of the area are in use (XSTATE_BV), a bit for each.
const IN_USE: usize = 512;
/// Number of the tile data (AMX). The kernel tells of room for it in every thread, and takes a frame with so much from
/// none but those that have asked for it (`arch_prctl`, ARCH_REQ_XCOMP_PERM).
const TILES: u32 = 18;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// No mode that `sigaltstack` knows: `rt_sigreturn` ignores the error and leaves the alternate stack as it is.
const SS_INVALID: u64 = 0x77;

/// Bytes of a frame for an XSAVE area of `xstate` bytes.
pub(crate) fn bytes(xstate: usize) -> usize {
    (XSTATE + xstate + 4).next_multiple_of(64)
}

/// Writes the frame that will lie at `address` (64-byte aligned). An interrupted system call is issued anew on return;
/// `regs` must not refer to a restart block.
pub(crate) fn write(out: &mut [u8], address: u64, regs: &Regs, sigmask: u64, xstate: &[u8]) {
    let mut put = |at: usize, v: u64| out[at..at + 8].copy_from_slice(&v.to_le_bytes());
    let (mut rax, mut rip) = (regs.rax, regs.rip);
    if regs.orig_rax.cast_signed() >= 0 && matches!(rax.cast_signed(), -514..=-512) {
        rax = regs.orig_rax;
        rip -= 2;
    }
    put(UC, UC_FLAGS);
    put(UC_STACK + 8, SS_INVALID);
    let gregs = [
        regs.r8,
        regs.r9,
        regs.r10,
        regs.r11,
        regs.r12,
        regs.r13,
        regs.r14,
        regs.r15,
        regs.rdi,
        regs.rsi,
        regs.rbp,
        regs.rbx,
        regs.rdx,
        rax,
        regs.rcx,
        regs.rsp,
        rip,
        regs.eflags,
        // cs, gs, fs, ss as 16-bit values
        (regs.cs & 0xffff) | (regs.ss & 0xffff) << 48,
    ];
    for (i, v) in gregs.into_iter().enumerate() {
        put(UC_GREGS + i * 8, v);
    }
    put(UC_SIGMASK, sigmask);
    if xstate.len() >= 576 {
        put(UC_FPSTATE, address + XSTATE as u64);
        let area = &mut out[XSTATE..];
        area[..xstate.len()].copy_from_slice(xstate);
        let mut features = [0; 8];
        features.copy_from_slice(&xstate[SW_BYTES..SW_BYTES + 8]);
        area[SW_BYTES..SW_BYTES + 48].fill(0);
        area[SW_BYTES..SW_BYTES + 4].copy_from_slice(&FP_XSTATE_MAGIC1.to_le_bytes());
        let end = end(xstate, cpu::components());
        let size = u32::try_from(end).unwrap_or(0);
        area[SW_BYTES + 4..SW_BYTES + 8].copy_from_slice(&(size + 4).to_le_bytes());
        area[SW_BYTES + 8..SW_BYTES + 16].copy_from_slice(&features);
        area[SW_BYTES + 16..SW_BYTES + 20].copy_from_slice(&size.to_le_bytes());
        // Some kernels look for it where the frame says, others at the end of the room that the thread has.
        for end in [end, xstate.len()] {
            area[end..end + 4].copy_from_slice(&FP_XSTATE_MAGIC2.to_le_bytes());
        }
    }
}

/// How much of an XSAVE area is for the frame of its thread, on a processor with these parts: without the tile data,
/// which is last, where that is not in use.
fn end(xstate: &[u8], components: &[Component]) -> usize {
    let in_use = xstate
        .get(IN_USE..)
        .and_then(|w| w.first_chunk())
        .map_or(0, |w| u64::from_le_bytes(*w));
    if in_use >> TILES & 1 != 0 || !components.iter().any(|c| c.number == TILES) {
        return xstate.len();
    }
    let others = components.iter().filter(|c| c.number != TILES);
    let end = others.map(|c| (c.offset + c.bytes) as usize).max().unwrap_or(0);
    end.max(IN_USE + 64).min(xstate.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tile_data_is_in_the_frames_of_those_who_use_it_only() {
        let part = |number, offset, bytes| Component { number, offset, bytes };
        let without = [part(2, 576, 256), part(5, 1088, 64), part(9, 2688, 8)];
        let with = [&without[..], &[part(17, 2752, 64), part(TILES, 2816, 8192)]].concat();
        let mut xstate = vec![0; 11_008];
        xstate[IN_USE] = 7;
        assert_eq!(end(&xstate, &with), 2816);
        assert_eq!(end(&xstate[..2696], &without), 2696);
        assert_eq!(end(&xstate, &[part(TILES, 2816, 8192)]), 576);
        xstate[IN_USE + 2] = 1 << (TILES - 16);
        assert_eq!(end(&xstate, &with), 11_008);
    }
}
