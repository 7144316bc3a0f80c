//! Memory locks (`mlock`, `mlockall`): what a stopped process has locked, and room for the agent's own memory in a process that may lock no more.
//!
//! A snapshot child has no locks, so they are looked up in the process itself, and only in one that has any.

use crate::inject::on_main;
use crate::process::rlimit;
use crate::suspend::Process;
use crate::CaptureError;
use belay_image::model::Vma;
use belay_kernel::pagemap::Pagemap;
use belay_kernel::proc::{self, Map, Status};

/// `mlockall`: what is mapped from now on is locked, at once or (with the second) page by page when it is touched.
const MCL_FUTURE: u32 = 2;
const MCL_ONFAULT: u32 = 4;
const MLOCK_ONFAULT: u64 = 1;
const PAGE: u64 = 4096;

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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Locks(Vec<Locked>);

impl Locks {
    /// Those of the process of thread `task`, which may run again: what it locks or unlocks in the first moment is told as it is then. While it stood still this would have taken up to 30 ms for each
    /// GiB.
    pub(crate) fn of(task: i32) -> Self {
        // One that has ended meanwhile has none.
        Self(proc::smaps(task).unwrap_or_default().iter().filter_map(Locked::of).collect())
    }

    /// Adds what is locked to the flags of `vma`.
    pub(crate) fn tell(&self, vma: &mut Vma) {
        let Some(lock) = self.0.iter().find(|l| l.start <= vma.start && vma.start < l.end) else {
            return;
        };
        for flag in ["lo", "lf"].into_iter().take(1 + usize::from(lock.on_fault)) {
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

/// Flags for `mlockall` that lock what `process` maps from now on, 0 for none. Its status was `before` when the agent had not yet mapped its `area`, whose last page nobody has touched.
pub(crate) fn future(process: &Process, before: &Status, area: (u64, u64)) -> Result<u32, CaptureError> {
    let fail = |e| CaptureError::failed(format!("read the memory locks of process {}", process.pid), e);
    if process.guest.is_some() || !has_any(before) {
        return Ok(0);
    }
    let now = Status::read(process.task()).map_err(fail)?;
    let unlocked: u64 = process.unlocked.iter().map(|l| l.end - l.start).sum();
    let grown = (locked_kib(&now) - locked_kib(before)).max(0).unsigned_abs() * 1024 + unlocked;
    if grown < area.1 - area.0 {
        return Ok(0);
    }
    let there = Pagemap::open(process.task()).and_then(|mut p| p.with_data(&[(area.1 - PAGE, area.1)]));
    let on_fault = !there.map_err(fail)?.contains(&true);
    Ok(MCL_FUTURE | if on_fault { MCL_ONFAULT } else { 0 })
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
    let fail = |e| CaptureError::failed(format!("read the memory locks of process {}", process.pid), e);
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
        let locks = Locks(maps().iter().filter_map(Locked::of).collect());
        let told = |start| {
            let mut vma = Vma {
                start,
                end: start + 0x1000,
                prot: 3,
                kind: belay_image::model::VmaKind::Heap,
                flags: vec!["lo".into()],
            };
            locks.tell(&mut vma);
            vma.flags
        };
        assert_eq!(told(0x1000), ["lo"]);
        assert_eq!(told(0x7000), ["lo", "lf"]);
    }
}
