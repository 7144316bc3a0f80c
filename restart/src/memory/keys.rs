//! Memory protection keys (`pkeys(7)`). Programs know them by their numbers, and the kernel gives the lowest that is
//! free: so all up to the highest that is needed are allocated, and those that the program does not have are given back
//! when memory has its keys. Memory can have a key that has been freed. And memory that may only be executed has one
//! that the kernel takes by itself, once, and calls nobody's: it must find it free, and no lower one.

use crate::call::{call, nr, With};
use belay_abi::restore::{Call, Step, CALL_EXPECT_ARG5};
use belay_image::model::Vma;

/// Number of keys of x86-64; 0 is that of all memory without one.
pub(crate) const KEYS: u8 = 16;
const PROT_EXEC: u32 = 4;

/// The keys of one process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys {
    /// What the program has allocated, a bit each.
    allocated: u16,
    /// What the kernel has taken.
    execute_only: Option<u8>,
    highest: u8,
}

impl Keys {
    /// Those of a process with these mappings, which has `allocated` these, a bit each.
    pub(crate) fn of(vmas: &[Vma], allocated: u16) -> Self {
        let has = |key: u8| allocated >> key & 1 != 0;
        let kernels = vmas.iter().find(|v| v.key != 0 && v.prot == PROT_EXEC && !has(v.key));
        let of_memory = vmas.iter().map(|v| v.key).max().unwrap_or(0);
        let of_program = (1..KEYS).rev().find(|key| has(*key)).unwrap_or(0);
        Self {
            allocated,
            execute_only: kernels.map(|v| v.key),
            highest: of_memory.max(of_program),
        }
    }

    /// Whether the program has any. The kernel's own is none: elsewhere what may only be executed may be read.
    pub(crate) fn are_needed(self) -> bool {
        self.allocated > 1 || self.execute_only.map_or(self.highest > 0, |kernels| self.highest > kernels)
    }

    /// What `vma` must be given; the kernel does so by itself where there is nothing.
    pub(crate) fn of_mapping(self, vma: &Vma) -> Option<u64> {
        (vma.key != 0 && self.execute_only != Some(vma.key)).then_some(vma.key.into())
    }

    /// Before there is memory. The thread that does so may use what has them.
    pub(crate) fn allocate(self, out: &mut Vec<Call>) {
        let keys = 1..=self.highest;
        let allocate = |key: u8| {
            let args = [0, 0, 0, 0, 0, key.into()];
            call(Step::Key, key.into(), nr::PKEY_ALLOC, &args).with(CALL_EXPECT_ARG5)
        };
        out.extend(keys.map(allocate));
        out.extend(self.execute_only.map(free));
    }

    /// When all memory has its own.
    pub(crate) fn give_back(self, out: &mut Vec<Call>) {
        let spare = |key: &u8| self.allocated >> key & 1 == 0 && self.execute_only != Some(*key);
        out.extend((1..=self.highest).filter(spare).map(free));
    }
}

fn free(key: u8) -> Call {
    call(Step::Key, key.into(), nr::PKEY_FREE, &[key.into()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::model::VmaKind;

    fn vma(key: u8, prot: u32) -> Vma {
        Vma {
            start: 0x1000,
            end: 0x2000,
            prot,
            kind: VmaKind::Heap,
            flags: Vec::new(),
            key,
            guards: Vec::new(),
        }
    }

    /// What the kernel has allocated after `calls`, as a process that had `before`.
    fn after(before: u16, calls: &[Call]) -> u16 {
        calls.iter().fold(before, |keys, c| match c.nr {
            nr::PKEY_ALLOC => keys | 1 << (0..16).find(|key| keys >> key & 1 == 0).expect("a key is free"),
            nr::PKEY_FREE => keys & !(1 << c.args[0]),
            other => panic!("system call {other}"),
        })
    }

    #[test]
    fn programs_have_the_keys_that_they_had() {
        // Allocated 1, 3 and 6; memory with 1 and with 4, which has been freed; 2 is the kernel's.
        let vmas = [vma(1, 3), vma(0, 3), vma(4, PROT_EXEC | 1), vma(2, PROT_EXEC)];
        let keys = Keys::of(&vmas, 0b100_1010);
        let given = vmas.iter().map(|v| keys.of_mapping(v)).collect::<Vec<_>>();
        assert_eq!(given, [Some(1), None, Some(4), None]);
        let (mut first, mut last) = (Vec::new(), Vec::new());
        keys.allocate(&mut first);
        keys.give_back(&mut last);
        let then = after(1, &first);
        assert_eq!(then, 0b111_1011, "those of memory, and none for the kernel's own to be below");
        assert_eq!(after(then | 1 << 2, &last), 0b100_1111);
        assert!(keys.are_needed());
        assert!(!Keys::of(&[vma(1, PROT_EXEC)], 0).are_needed(), "the kernel's own");
    }

    #[test]
    fn without_keys_there_is_nothing_to_do() {
        let keys = Keys::of(&[vma(0, PROT_EXEC)], 0);
        let mut calls = Vec::new();
        keys.allocate(&mut calls);
        keys.give_back(&mut calls);
        assert!(calls.is_empty() && !keys.are_needed());
    }

    #[test]
    fn the_last_key_is_one() {
        let keys = Keys::of(&[], 1 << 15);
        let (mut first, mut last) = (Vec::new(), Vec::new());
        keys.allocate(&mut first);
        keys.give_back(&mut last);
        assert_eq!(after(after(1, &first), &last), 1 << 15 | 1);
    }
}
