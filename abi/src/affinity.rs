//! The processors on which the calling thread may run: for a moment only the one on which it is.

use crate::syscall;

/// Words of a mask: as many processors as the kernel can be built for.
const WORDS: usize = crate::inject::AFFINITY_WORDS;
const BYTES: usize = 8 * WORDS;

mod nr {
    pub(super) const SCHED_SETAFFINITY: usize = 203;
    pub(super) const SCHED_GETAFFINITY: usize = 204;
    pub(super) const GETCPU: usize = 309;
}

/// The mask of before.
#[derive(Debug)]
pub struct Pinned {
    before: [u64; WORDS],
}

fn mask() -> Option<[u64; WORDS]> {
    let mut mask = [0; WORDS];
    // SAFETY: the kernel writes at most so many bytes to a live mask.
    let n = unsafe { syscall!(nr::SCHED_GETAFFINITY, 0usize, BYTES, mask.as_mut_ptr()) };
    (n > 0).then_some(mask)
}

fn set(mask: &[u64; WORDS]) -> bool {
    // SAFETY: the kernel reads a live mask.
    unsafe { syscall!(nr::SCHED_SETAFFINITY, 0usize, BYTES, mask.as_ptr()) == 0 }
}

impl Pinned {
    /// Stays on this processor; `None` where that cannot be.
    pub fn here() -> Option<Self> {
        let before = mask()?;
        let mut cpu = 0u32;
        // SAFETY: the kernel writes to a live word.
        let got = unsafe { syscall!(nr::GETCPU, &raw mut cpu, 0usize, 0usize) };
        let mut here = [0; WORDS];
        *here.get_mut(cpu as usize / 64)? = 1 << (cpu % 64);
        (got == 0 && set(&here)).then_some(Self { before })
    }

    /// May run where it might before. What a thread chooses the kernel remembers beyond what its cpuset allows today:
    /// one that may run on all that this allows is taken for one that has chosen nothing.
    pub fn release(self) {
        let all = set(&[u64::MAX; WORDS]) && mask() == Some(self.before);
        if !all {
            set(&self.before);
        }
    }
}
