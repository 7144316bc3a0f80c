//! What processes have noted down for System V semaphores (SEM_UNDO), to be carried out when they end.

use crate::fault::{At, Fault};
use crate::inside::Unreadable;
use crate::session::Session;
use belay_kernel::apart;
use belay_kernel::kcmp::{self, Object};
use belay_kernel::sysv::sem;
use rustix::process::{waitid, Pid, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::io;

/// What one process has noted down for one semaphore of a set.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Noted {
    pub(super) pid: i32,
    number: u16,
    amount: i16,
}

/// The processes that have a list of what is to be undone, those together that have the same (CLONE_SYSVSEM). The
/// others have noted nothing down, and to ask them would give them a list.
pub(super) fn lists(s: &Session<'_>) -> Result<Vec<Vec<i32>>, Fault> {
    let listless = Ended::new().at("make a process to compare with")?;
    let mut lists: Vec<(i32, Vec<i32>)> = vec![(listless.0, Vec::new())];
    for p in s.processes {
        let mut failed = None;
        let place = lists.binary_search_by(|(task, _)| {
            kcmp::compare(*task, p.task, Object::SemUndo).unwrap_or_else(|e| {
                failed = Some(e);
                Ordering::Less
            })
        });
        if let Some(e) = failed {
            return Err(e).at("compare what processes have noted down (kcmp)");
        }
        match place {
            Ok(at) => lists[at].1.push(p.pid),
            Err(at) => lists.insert(at, (p.task, vec![p.pid])),
        }
    }
    lists.retain(|(task, _)| *task != listless.0);
    Ok(lists.into_iter().map(|(_, pids)| pids).collect())
}

/// A process that has ended, and so has no list; tasks that have none are alike.
struct Ended(i32);

impl Ended {
    fn new() -> io::Result<Self> {
        let pid = apart::ended()?;
        let ended = Self(pid);
        ended.wait(WaitIdOptions::NOWAIT)?;
        Ok(ended)
    }

    fn wait(&self, flags: WaitIdOptions) -> io::Result<()> {
        // Children that raise no signal too.
        let all = WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned());
        let pid = Pid::from_raw(self.0).ok_or(io::ErrorKind::NotFound)?;
        loop {
            match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | all | flags) {
                Err(rustix::io::Errno::INTR) => {}
                done => return Ok(done.map(drop)?),
            }
        }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if let Err(error) = self.wait(WaitIdOptions::empty()) {
            tracing::warn!(%error, "a process that has ended stays there");
        }
    }
}

/// Asks the first of each of `lists` about `set`, whose values these are.
pub(super) fn ask(s: &mut Session<'_>, lists: &[Vec<i32>], set: i32, values: &[u16]) -> Result<Vec<Noted>, Fault> {
    let Some(inside) = s.inside.as_mut() else {
        return Ok(Vec::new());
    };
    let mut out: Vec<Noted> = Vec::new();
    for pid in lists.iter().filter_map(|pids| pids.first().copied()) {
        match inside.undo(pid, set, values) {
            Ok(found) => out.extend(found.into_iter().map(|(number, amount)| Noted { pid, number, amount })),
            Err(Unreadable::Forbidden(why)) => s.notes.push(format!(
                "System V semaphore set {set}: what process {pid} may have noted down (SEM_UNDO) cannot be read: {why}; after a restart it is not carried out when that ends"
            )),
            Err(Unreadable::Failed(why)) => {
                return Err(Fault::Refused(format!(
                    "process {pid}: what it has noted down (SEM_UNDO) cannot be read: {why}"
                )))
            }
        }
    }
    Ok(out)
}

/// In the process: notes the same down for `set`. The value stays.
pub(super) fn note(set: i32, noted: &Noted) -> Result<(), Fault> {
    // Of half of the greatest amount either order stays in the range of values.
    let half = noted.amount / 2;
    for part in [half, noted.amount - half].into_iter().filter(|part| *part != 0) {
        let op = |amount: i16, flags: i32| libc::sembuf {
            sem_num: noted.number,
            sem_op: amount,
            sem_flg: (flags | libc::IPC_NOWAIT) as i16,
        };
        let (back, noted) = (op(part, 0), op(-part, libc::SEM_UNDO));
        sem::operate(set, &mut [back, noted])
            .or_else(|_| sem::operate(set, &mut [noted, back]))
            .at("note down what is to be undone (SEM_UNDO)")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_has_no_list() {
        let ended = Ended::new().unwrap();
        let other = Ended::new().unwrap();
        let same = |task| kcmp::compare(ended.0, task, Object::SemUndo).map(Ordering::is_eq).unwrap();
        assert!(same(other.0));
        // Threads have one list, and this is one of several.
        assert!(!same(std::process::id().cast_signed()));
    }
}
