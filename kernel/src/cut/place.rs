//! The instructions that issue the rest of a call, and where they lie: behind the end of the vDSO's code, in its last page.

use crate::proc;
use crate::ptrace::Regs;
use crate::vm;

/// Length of one place.
pub(super) const BYTES: usize = 120;
/// Length of the instruction `syscall`.
pub(super) const SYSCALL_BYTES: u64 = 2;
/// So many zeros at the end of the vDSO may belong to it, bytes.
const MARGIN: usize = 64;
/// `syscall`; `test %rax,%rax`; `jns .+2`; `xor %eax,%eax`; `add $.., %rax`.
const ISSUE: [u8; 11] = [0x0f, 0x05, 0x48, 0x85, 0xc0, 0x79, 0x02, 0x31, 0xc0, 0x48, 0x05];
/// Where the sum is in `rax`.
const ADDED: u64 = 15;
/// `movabs $.., REG`: rdi, rsi, rdx, r10, r8, r9.
const LOADS: [[u8; 2]; 6] = [
    [0x48, 0xbf],
    [0x48, 0xbe],
    [0x48, 0xba],
    [0x49, 0xba],
    [0x49, 0xb8],
    [0x49, 0xb9],
];
/// `jmp *0(%rip)`, followed by the address.
const LEAVE: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];

/// What lies in one place: a call that was cut short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    tid: i32,
    number: u64,
    /// What it had done, bytes.
    done: u32,
    args: [u64; 6],
    rip: u64,
    pub(super) rsp: u64,
}

impl Slot {
    /// The call in which task `tid` stands.
    pub(super) fn new(tid: i32, regs: &Regs) -> Self {
        Self {
            tid,
            number: regs.orig_rax,
            done: regs.rax as u32,
            args: [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9],
            rip: regs.rip,
            rsp: regs.rsp,
        }
    }

    pub(super) fn code(&self) -> [u8; BYTES] {
        let mut code = ISSUE.to_vec();
        code.extend(self.done.to_le_bytes());
        for (load, value) in LOADS.iter().zip(self.args) {
            code.extend(load);
            code.extend(value.to_le_bytes());
        }
        code.extend(LEAVE);
        code.extend(self.rip.to_le_bytes());
        code.extend(self.rsp.to_le_bytes());
        code.extend(self.tid.to_le_bytes());
        code.extend((self.number as u32).to_le_bytes());
        let mut out = [0; BYTES];
        out[..code.len()].copy_from_slice(&code);
        out
    }

    fn parse(code: &[u8; BYTES]) -> Option<Self> {
        let word = |at: usize| code.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let half = |at: usize| code.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes);
        let load = |i: usize| word(ADDED as usize + 10 * i + 2);
        let slot = Self {
            tid: half(97)?.cast_signed(),
            number: half(101)?.into(),
            done: half(11)?,
            args: [load(0)?, load(1)?, load(2)?, load(3)?, load(4)?, load(5)?],
            rip: word(81)?,
            rsp: word(89)?,
        };
        (slot.code() == *code).then_some(slot)
    }

    /// What lies at `at` for task `tid`.
    pub(super) fn read(tid: i32, at: u64) -> Option<Self> {
        let mut code = [0; BYTES];
        vm::read(tid, at, &mut code).ok()?;
        Self::parse(&code).filter(|slot| slot.tid == tid)
    }

    /// The registers in the call itself of a task that stands in place `at` with `regs`; nothing where it stands elsewhere.
    pub(super) fn own(&self, at: u64, regs: &Regs) -> Option<Regs> {
        let offset = regs.rip.checked_sub(at).filter(|offset| *offset < BYTES as u64)?;
        let said = regs.rax.cast_signed();
        let more = if offset == 0 { 0 } else { said.max(0).cast_unsigned() };
        let is_over = offset >= ADDED;
        let [rdi, rsi, rdx, r10, r8, r9] = self.args;
        // What has ended by itself is not to be asked for once more.
        let ended = is_over || offset != 0 && (said == 0 || said < 0 && !is_interrupted(said) || regs.orig_rax.cast_signed() < 0);
        Some(Regs {
            rax: if is_over { regs.rax } else { more + u64::from(self.done) },
            orig_rax: if ended { u64::MAX } else { self.number },
            rip: self.rip,
            rcx: self.rip,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..*regs
        })
    }
}

/// EINTR, or an ERESTART code.
fn is_interrupted(said: i64) -> bool {
    matches!(said, -4 | -516..=-512)
}

/// An unused place in the vDSO of task `tid`.
pub(super) fn free(tid: i32) -> Option<u64> {
    let maps = proc::maps(tid).ok()?;
    let map = maps.iter().find(|m| m.name == "[vdso]")?;
    let mut code = vec![0; usize::try_from(map.end - map.start).ok()?];
    vm::read(tid, map.start, &mut code).ok()?;
    let own = crate::vdso::code().ok().filter(|own| own.len() == code.len())?;
    let used = own.iter().rposition(|b| *b != 0)? + 1 + MARGIN;
    let places = (1..)
        .map_while(|i| code.len().checked_sub(i * BYTES))
        .take_while(|at| *at >= used);
    let mut free = places.filter(|at| code[*at..*at + BYTES].iter().all(|b| *b == 0));
    free.next().map(|at| map.start + at as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_led_back_from_each_instruction() {
        // SAFETY: all-zero bytes are a valid value of this plain C struct.
        let mut regs: Regs = unsafe { std::mem::zeroed() };
        (regs.orig_rax, regs.rax, regs.rip, regs.rsp, regs.rsi, regs.rdx) = (1, 10, 0x1000, 0x2000, 0x3000, 100);
        let slot = Slot::new(7, &regs);
        assert_eq!(Slot::parse(&slot.code()), Some(slot));
        assert_eq!(Slot::parse(&[0; BYTES]), None);
        let at = 0x7000;
        let standing = |offset: u64, rax: i64, number: i64| {
            let mut there = regs;
            (there.rip, there.rax, there.orig_rax) = (at + offset, rax.cast_unsigned(), number.cast_unsigned());
            (there.rsi, there.rdx) = (0x300a, 90);
            slot.own(at, &there)
                .map(|r| (r.rax, r.orig_rax.cast_signed(), r.rip, r.rsi, r.rdx))
        };
        let back = |rax: u64, number: i64| Some((rax, number, 0x1000, 0x3000, 100));
        assert_eq!(standing(0, 1, -1), back(10, 1));
        assert_eq!(standing(2, -512, 1), back(10, 1));
        assert_eq!(standing(2, 20, 1), back(30, 1));
        // A pipe without readers; the end has been reached; the sum has been made.
        assert_eq!(standing(2, -32, 1), back(10, -1));
        assert_eq!(standing(9, 20, -1), back(30, -1));
        assert_eq!(standing(ADDED, 100, -1), back(100, -1));
        assert_eq!(standing(BYTES as u64, 1, 1), None);
    }
}
