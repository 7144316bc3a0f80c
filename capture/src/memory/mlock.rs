//! Memory locks (`mlock`, `mlockall`): what a stopped process has locked.
//!
//! A snapshot child has no locks, so they are looked up in the process itself, and only in one that has any.

use crate::inject::{self, Area};
use crate::stop::stopped::{Locked, Process, Suspended};
use crate::CaptureError;
use belay_image::model::Vma;
use belay_kernel::proc::{self, Map, Status};

/// `mlockall`: what is mapped from now on is locked, at once or (with the second) page by page when it is touched.
const MCL_FUTURE: u32 = 2;
const MCL_ONFAULT: u32 = 4;

/// What a process has locked.
#[derive(Debug, Clone, Default)]
pub(crate) struct Locks {
    /// Where the locked mappings were when it stood still, by their addresses.
    then: Vec<(u64, u64)>,
    /// Whether those of them that are there no more were locked page by page.
    on_fault: bool,
    /// What it has locked since it runs again, by addresses.
    now: Vec<Locked>,
}

impl Locks {
    /// Those of process number `at`, which locks what it maps from now on as `mlockall` says. (What the kernel lists
    /// walks the page tables: up to 30 ms for each GiB.)
    pub(crate) fn of(
        job: &mut Suspended,
        (at, area): (usize, &Area),
        (status, maps): (&Status, &[Map]),
        mlockall: u32,
    ) -> Result<Self, CaptureError> {
        if !has_any(status) {
            return Ok(Self::default());
        }
        let ranges: Vec<(u64, u64)> = maps.iter().map(|m| (m.start, m.end)).collect();
        let locked = inject::locked(&mut job.processes[at], area, &ranges)?;
        // Also what was unlocked to make room in processes that share its memory.
        let pid = job.processes[at].pid;
        let same = |p: &&Process| p.pid == pid || p.guest.is_some_and(|g| g.first == pid);
        let unlocked: Vec<Locked> = job.processes.iter().filter(same).flat_map(|p| p.unlocked.clone()).collect();
        let was = |(start, end): (u64, u64)| unlocked.iter().any(|l| l.start < end && start < l.end);
        let then = ranges
            .into_iter()
            .zip(locked)
            .filter(|(range, locked)| *locked || was(*range));
        Ok(Self {
            then: then.map(|(range, _)| range).collect(),
            on_fault: mlockall == 0 || mlockall & MCL_ONFAULT != 0,
            now: Vec::new(),
        })
    }

    /// Looks how each is locked. The process of thread `task` may run again.
    pub(crate) fn look(&mut self, task: i32) {
        if !self.then.is_empty() {
            self.now = proc::smaps(task).unwrap_or_default().iter().filter_map(Locked::of).collect();
        }
    }

    /// Adds what is locked to the flags of `vma`.
    pub(crate) fn tell(&self, vma: &mut Vma) {
        let after = self.then.partition_point(|(start, _)| *start <= vma.start);
        if self.then[..after].last().is_none_or(|(_, end)| *end <= vma.start) {
            return;
        }
        let now = self.now.get(self.now.partition_point(|l| l.end <= vma.start));
        let on_fault = now.filter(|l| l.start < vma.end).map_or(self.on_fault, |l| l.on_fault);
        for flag in ["lo", "lf"].into_iter().take(1 + usize::from(on_fault)) {
            if !vma.flags.iter().any(|f| f == flag) {
                vma.flags.push(flag.into());
            }
        }
    }
}

/// Whether a process with this status has locked anything.
pub(crate) fn has_any(status: &Status) -> bool {
    Locked::kib(status) > 0
}

/// Flags for `mlockall` that lock what a process maps from now on, 0 for none. The injected program has `told` how the
/// area is locked, which is among that.
pub(crate) fn future(told: u32) -> u32 {
    match told {
        0 => 0,
        1 => MCL_FUTURE | MCL_ONFAULT,
        _ => MCL_FUTURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_told_with_the_mapping() {
        let locks = Locks {
            then: vec![(0x1000, 0x3000), (0x7000, 0x9000), (0xc000, 0xe000)],
            on_fault: false,
            now: Locked::examples().iter().filter_map(Locked::of).collect(),
        };
        let told = |start, end| {
            let mut vma = Vma {
                start,
                end,
                prot: 3,
                kind: belay_image::model::VmaKind::Heap,
                flags: vec!["rd".into()],
                guards: Vec::new(),
                key: 0,
            };
            locks.tell(&mut vma);
            vma.flags
        };
        assert_eq!(told(0x1000, 0x2000), ["rd", "lo"]);
        assert_eq!(told(0x7000, 0x9000), ["rd", "lo", "lf"]);
        // Locked since, and not there any more.
        assert_eq!(told(0x5000, 0x6000), ["rd"]);
        assert_eq!(told(0xc000, 0xe000), ["rd", "lo"]);
    }
}
