//! Memory locks (`mlock`, `mlockall`): what a stopped process has locked, and room for the agent's own memory in a process that may lock no more.
//!
//! A snapshot child has no locks, so they are looked up in the process itself, and only in one that has any.

use crate::inject::{self, on_main, Area};
use crate::process::{rlimit, Draft};
use crate::suspend::{Process, Suspended};
use crate::CaptureError;
use belay_image::model::Vma;
use belay_kernel::proc::{self, Map, Status};

/// `mlockall`: what is mapped from now on is locked, at once or (with the second) page by page when it is touched.
const MCL_FUTURE: u32 = 2;
const MCL_ONFAULT: u32 = 4;
const MLOCK_ONFAULT: u64 = 1;

/// A locked piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Locked {
    start: u64,
    end: u64,
    /// Its pages are locked when they are touched.
    on_fault: bool,
}

impl Locked {
    fn of(map: &Map) -> Option<Self> {
        let has = |flag: &str| map.flags.iter().any(|f| f == flag);
        has("lo").then(|| Self {
            start: map.start,
            end: map.end,
            // Earlier kernels have no name for it.
            on_fault: has("lf") || has("??"),
        })
    }
}

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
    /// Those of process number `at`, which locks what it maps from now on as `mlockall` says. (What the kernel lists walks the page tables: up to 30 ms for each GiB.)
    pub(crate) fn of(job: &mut Suspended, (at, area): (usize, &Area), draft: &Draft, mlockall: u32) -> Result<Self, CaptureError> {
        if !has_any(&draft.status) {
            return Ok(Self::default());
        }
        let ranges: Vec<(u64, u64)> = draft.maps.iter().map(|m| (m.start, m.end)).collect();
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
    locked_kib(status) > 0
}

fn locked_kib(status: &Status) -> i64 {
    status.list("VmLck").first().copied().unwrap_or(0)
}

/// Flags for `mlockall` that lock what a process maps from now on, 0 for none. The injected program has `told` how the area is locked, which is among that.
pub(crate) fn future(told: u32) -> u32 {
    match told {
        0 => 0,
        1 => MCL_FUTURE | MCL_ONFAULT,
        _ => MCL_FUTURE,
    }
}

/// Maps `bytes` of private memory into the stopped `process`. Where its locks have reached their limit (RLIMIT_MEMLOCK) and new memory would be locked too, some of them are taken away until it goes on.
pub(crate) fn map(process: &mut Process, bytes: u64, protection: i32, flags: i32) -> Result<u64, CaptureError> {
    let flags = (flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let args = [0, bytes, protection as u64, flags, u64::MAX, 0];
    match on_main(process, libc::SYS_mmap, args) {
        Err(CaptureError::Call { errno: libc::EAGAIN, .. }) => {
            make_room(process, bytes)?;
            on_main(process, libc::SYS_mmap, args)
        }
        done => done,
    }
}

/// Unlocks `bytes` of what `process` has locked. The pages stay where they are: nothing runs there, and nothing takes them within milliseconds but a system that is out of memory.
fn make_room(process: &mut Process, bytes: u64) -> Result<(), CaptureError> {
    let fail = |e| CaptureError::system(format!("read the memory locks of process {}", process.pid), e);
    let locked = locked_kib(&Status::read(process.task()).map_err(fail)?).unsigned_abs() * 1024;
    let (limit, _) = rlimit(process.pid, libc::RLIMIT_MEMLOCK);
    // One that has locked more than it may by now could not lock again what is taken away.
    let maps = if locked <= limit {
        proc::smaps(process.task()).map_err(fail)?
    } else {
        Vec::new()
    };
    let chosen = choose(&maps, bytes).ok_or_else(|| {
        let reason = "leaves no room, and the process locks what it maps (mlockall); raise it (ulimit -l, prlimit)";
        CaptureError::refuse(process.pid, "limit for locked memory", reason)
    })?;
    for piece in chosen {
        on_main(process, libc::SYS_munlock, [piece.start, piece.end - piece.start, 0, 0, 0, 0])?;
        process.unlocked.push(piece);
    }
    Ok(())
}

/// Pieces of locked memory that are `bytes` long together; none where so much is not locked.
fn choose(maps: &[Map], bytes: u64) -> Option<Vec<Locked>> {
    let mut missing = bytes;
    let mut chosen = Vec::new();
    for lock in maps
        .iter()
        .filter(|m| m.prot & libc::PROT_READ as u32 != 0)
        .filter_map(Locked::of)
    {
        let end = lock.end.min(lock.start + missing);
        chosen.push(Locked { end, ..lock });
        missing -= end - lock.start;
        if missing == 0 {
            return Some(chosen);
        }
    }
    None
}

/// Locks again what [`map`] has unlocked, once what it has mapped is gone.
pub(crate) fn restore(process: &mut Process) {
    for piece in std::mem::take(&mut process.unlocked) {
        let flags = if piece.on_fault { MLOCK_ONFAULT } else { 0 };
        let args = [piece.start, piece.end - piece.start, flags, 0, 0, 0];
        // It was within its limit, so this fails only for a process that has been killed meanwhile.
        if let Err(error) = on_main(process, libc::SYS_mlock2, args) {
            tracing::warn!(pid = process.pid, %error, "memory stays unlocked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps() -> Vec<Map> {
        let line = |range: &str, prot: &str, flags: &str| format!("{range} {prot} 00000000 00:00 0 \nVmFlags: {flags}\n");
        let text = [
            line("1000-3000", "rw-p", "rd wr mr lo"),
            line("5000-6000", "---p", "mr lo"),
            line("7000-9000", "rw-p", "rd wr lo lf"),
            line("a000-c000", "rw-p", "rd wr"),
        ];
        Map::parse(text.concat().as_bytes()).unwrap()
    }

    #[test]
    fn room_is_made_of_readable_memory() {
        let piece = |start, end, on_fault| Locked { start, end, on_fault };
        assert_eq!(choose(&maps(), 0x1000), Some(vec![piece(0x1000, 0x2000, false)]));
        assert_eq!(
            choose(&maps(), 0x3000),
            Some(vec![piece(0x1000, 0x3000, false), piece(0x7000, 0x8000, true)])
        );
        assert_eq!(choose(&maps(), 0x5000), None);
    }

    #[test]
    fn locks_are_told_with_the_mapping() {
        let locks = Locks {
            then: vec![(0x1000, 0x3000), (0x7000, 0x9000), (0xc000, 0xe000)],
            on_fault: false,
            now: maps().iter().filter_map(Locked::of).collect(),
        };
        let told = |start, end| {
            let mut vma = Vma {
                start,
                end,
                prot: 3,
                kind: belay_image::model::VmaKind::Heap,
                flags: vec!["rd".into()],
                guards: Vec::new(),
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
