//! Memory of ours in a stopped process, also in one that may lock no more and locks what it maps.

use super::on_main;
use crate::state::limits::{self, rlimit};
use crate::stop::stopped::{Locked, Process};
use crate::CaptureError;
use belay_kernel::proc::{self, Map, Status};

const MLOCK_ONFAULT: u64 = 1;

/// Maps `bytes` of private memory into the stopped `process`. Where its locks have reached their limit (RLIMIT_MEMLOCK)
/// and new memory would be locked too, some of them are taken away until it goes on.
pub(crate) fn map(process: &mut Process, bytes: u64, protection: i32, flags: i32) -> Result<u64, CaptureError> {
    let args = mapping(bytes, protection, flags);
    match on_main(process, libc::SYS_mmap, args) {
        Err(CaptureError::Call { errno: libc::EAGAIN, .. }) => {
            make_room(process, bytes)?;
            on_main(process, libc::SYS_mmap, args)
        }
        Err(failed @ CaptureError::Call { errno: libc::ENOMEM, .. }) => Err(limits::too_low(process.pid).unwrap_or(failed)),
        done => done,
    }
}

/// The arguments of the system call that maps them.
pub(super) fn mapping(bytes: u64, protection: i32, flags: i32) -> [u64; 6] {
    let flags = (flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    [0, bytes, protection as u64, flags, u64::MAX, 0]
}

/// Unlocks `bytes` of what `process` has locked. The pages stay where they are: nothing runs there, and nothing takes
/// them within milliseconds but a system that is out of memory.
fn make_room(process: &mut Process, bytes: u64) -> Result<(), CaptureError> {
    let fail = |e| CaptureError::system(format!("read the memory locks of process {}", process.pid), e);
    let locked = Locked::kib(&Status::read(process.task()).map_err(fail)?).unsigned_abs() * 1024;
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
pub(crate) fn lock_again(process: &mut Process) {
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

    #[test]
    fn room_is_made_of_readable_memory() {
        let piece = |start, end, on_fault| Locked { start, end, on_fault };
        assert_eq!(choose(&Locked::examples(), 0x1000), Some(vec![piece(0x1000, 0x2000, false)]));
        assert_eq!(
            choose(&Locked::examples(), 0x3000),
            Some(vec![piece(0x1000, 0x3000, false), piece(0x7000, 0x8000, true)])
        );
        assert_eq!(choose(&Locked::examples(), 0x5000), None);
    }
}
