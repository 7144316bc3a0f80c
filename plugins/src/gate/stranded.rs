//! Programs that the driver could not be had to put back on their GPUs after a checkpoint: they show no GPU any more, and wait
//! in their next call of it.

use belay_kernel::proc;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a process executes since it was made, or has called exec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) pid: i32,
    born: Option<u64>,
    stack: Option<u64>,
}

impl Program {
    pub(super) fn of(pid: i32) -> Self {
        Self {
            pid,
            born: proc::born(pid),
            stack: proc::stat(pid).ok().map(|s| s.start_stack),
        }
    }

    /// Whether it is there, and executes the same.
    pub(super) fn is_there(&self) -> bool {
        self.born.is_some() && *self == Self::of(self.pid)
    }
}

/// One of them, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranded {
    program: Program,
    /// What the driver has said.
    pub why: String,
    /// Somebody puts it back when it is continued, or when the driver returns.
    is_waiting: bool,
}

impl Stranded {
    /// Its number.
    pub fn pid(&self) -> i32 {
        self.program.pid
    }
}

static ALL: Mutex<Vec<Stranded>> = Mutex::new(Vec::new());

/// Those that are there.
fn all() -> MutexGuard<'static, Vec<Stranded>> {
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|s| s.program.is_there());
    all
}

/// These have not gone on; `is_waiting`: but may yet, without being asked again.
pub(super) fn note(pids: &[i32], why: &str, is_waiting: bool) {
    let one = |pid: &i32| Stranded {
        program: Program::of(*pid),
        why: why.to_owned(),
        is_waiting,
    };
    all().extend(pids.iter().map(one));
}

/// These have.
pub(super) fn forget(pids: &[i32]) {
    all().retain(|s| !pids.contains(&s.pid()));
}

/// Those of these processes that have not gone on.
pub(super) fn of(pids: &[i32]) -> Vec<Stranded> {
    all().iter().filter(|s| pids.contains(&s.pid())).cloned().collect()
}

/// Those that nobody can put back any more.
pub fn lost() -> Vec<Stranded> {
    all().iter().filter(|s| !s.is_waiting).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_go_on_yet_or_has_ended_is_not_lost() {
        let own = std::process::id().cast_signed();
        let lost = || lost().into_iter().map(|s| (s.pid(), s.why)).collect::<Vec<_>>();
        note(&[own], "is stopped", true);
        assert_eq!((of(&[own]).len(), lost()), (1, vec![]));
        forget(&[own]);
        // Nobody has such a number.
        note(&[own, i32::MAX], "out of memory", false);
        assert_eq!(lost(), [(own, "out of memory".to_owned())]);
        forget(&[own]);
        assert_eq!(of(&[own]), []);
    }
}
