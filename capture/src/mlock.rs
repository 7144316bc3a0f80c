//! Memory locks (`mlock`, `mlockall`): what a stopped process has locked, and room for the agent's own memory in a process that may lock no more.
//!
//! A snapshot child has no locks, so they are looked up in the process itself, and only in one that has any: that walks its page tables.

use crate::inject::on_main;
use crate::suspend::Process;
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
            on_fault: has("lf"),
        })
    }
}

/// The locks of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Locks {
    pieces: Vec<Locked>,
    /// Flags for `mlockall` that lock what is mapped from now on, 0 for none.
    pub(crate) mlockall: u32,
}

impl Locks {
    /// Those of `process`, whose status this was before the agent has mapped its area at `area`.
    pub(crate) fn of(process: &Process, status: &Status, area: u64) -> Result<Self, CaptureError> {
        if process.guest.is_some() || status.list("VmLck").first().is_none_or(|kib| *kib == 0) {
            return Ok(Self::default());
        }
        Ok(Self::from(&smaps(process)?, area, &process.unlocked))
    }

    fn from(maps: &[Map], area: u64, unlocked: &[Locked]) -> Self {
        // A mapping of the area shows what becomes of new ones; the kernel may have merged it with a neighbour.
        let own = maps.iter().find(|m| m.start <= area && area < m.end).and_then(Locked::of);
        Self {
            pieces: maps.iter().filter_map(Locked::of).chain(unlocked.iter().copied()).collect(),
            mlockall: match own {
                None => 0,
                Some(Locked { on_fault: false, .. }) => MCL_FUTURE,
                Some(Locked { on_fault: true, .. }) => MCL_FUTURE | MCL_ONFAULT,
            },
        }
    }

    /// Adds what is locked to the flags of `vma`.
    pub(crate) fn tell(&self, vma: &mut Vma) {
        let Some(lock) = self.pieces.iter().find(|l| l.start <= vma.start && vma.start < l.end) else {
            return;
        };
        for flag in ["lo", "lf"].into_iter().take(1 + usize::from(lock.on_fault)) {
            if !vma.flags.iter().any(|f| f == flag) {
                vma.flags.push(flag.into());
            }
        }
    }
}

fn smaps(process: &Process) -> Result<Vec<Map>, CaptureError> {
    proc::smaps(process.task()).map_err(|e| CaptureError::failed(format!("read the memory locks of process {}", process.pid), e))
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
    let chosen = choose(&smaps(process)?, bytes).ok_or_else(|| {
        let reason = "is nearly used up, and the process locks what it maps (mlockall); raise it (ulimit -l)";
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
        // It can fail only for a process that has been killed meanwhile.
        let _ = on_main(
            process,
            libc::SYS_mlock2,
            [piece.start, piece.end - piece.start, flags, 0, 0, 0],
        );
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
    fn the_area_shows_what_becomes_of_new_memory() {
        let future = |area| Locks::from(&maps(), area, &[]).mlockall;
        assert_eq!((future(0x2000), future(0x8000), future(0xa000), future(0xf000)), (2, 6, 0, 0));
    }
}
