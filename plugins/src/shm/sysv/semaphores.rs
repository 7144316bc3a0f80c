//! Semaphores: which sets are the job's, their values, and what processes have noted down for them.

use super::lists::{each, list, LISTS};
use super::undo::{self, Noted};
use super::whose::{is_guessed, seconds, Traces};
use super::{change, common, failed, is_own, same_id, set_perm, taken, whose, Common, SysV, OWN_NAMESPACE};
use crate::fault::{refuse, At, Fault, Refusal};
use crate::session::Session;
use belay_kernel::sysv::sem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::SystemTime;

/// A set of semaphores.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SemaphoreSet {
    pub(super) common: Common,
    values: Vec<u16>,
    /// It may be another program's.
    #[serde(default)]
    pub(super) guessed: bool,
    /// What processes have noted down.
    #[serde(default)]
    undo: Vec<Noted>,
}

/// A set that the job may have.
struct Candidate {
    id: i32,
    guessed: bool,
    /// Whether somebody can have noted something down.
    used: bool,
}

/// Captures the sets that are the job's and those that may be.
pub(super) fn capture(s: &mut Session<'_>, pids: &BTreeSet<i32>, out: &mut SysV) -> Result<(), Refusal> {
    let candidates = candidates(pids, s.launched);
    let mut lists = Vec::new();
    if candidates.iter().any(|c| c.used) {
        lists = undo::lists(s).map_err(|e| failed("System V semaphores", e))?;
    }
    for candidate in candidates {
        let name = format!("System V semaphore set {}", candidate.id);
        let ask = |values: &[u16]| undo::ask(s, &lists, candidate.id, values);
        let found = set(&candidate, ask);
        out.semaphores.extend(taken(s, (name, candidate.guessed), found)?);
    }
    out.sharers = lists.into_iter().filter(|pids| pids.len() > 1).collect();
    Ok(())
}

/// Identifier, number of semaphores, owner, creator, time of the last operation and of the last change of every set, as
/// listed at `path`.
pub(super) fn rows(path: &Path) -> Vec<[i64; 6]> {
    list(path, ["semid", "nsems", "uid", "cuid", "otime", "ctime"], || {
        each(sem::last(), |at| {
            let (id, ds) = sem::at(at)?;
            let count = i64::try_from(ds.sem_nsems).map_err(io::Error::other)?;
            let users = [ds.sem_perm.uid, ds.sem_perm.cuid].map(i64::from);
            Ok([id.into(), count, users[0], users[1], ds.sem_otime, ds.sem_ctime])
        })
    })
}

fn candidates(pids: &BTreeSet<i32>, launched: SystemTime) -> Vec<Candidate> {
    let launched = seconds(launched);
    let rows = rows(&Path::new(LISTS).join("sem")).into_iter();
    let rows = rows.filter(|[_, _, owner, creator, ..]| is_own(*owner, *creator));
    let candidate = |[id, count, _, creator, operated, changed]: [i64; 6]| {
        let id = i32::try_from(id).ok()?;
        let last = || {
            let count = usize::try_from(count).unwrap_or(0);
            (0..count).filter_map(|i| sem::user(id, i).ok()).collect()
        };
        let traces = || Traces {
            creator,
            last: last(),
            used: operated.max(changed),
            changed,
        };
        let guessed = match OWN_NAMESPACE.get() {
            // Once somebody has used such a set here, it was the job.
            Some(guesses) => operated == 0 && guesses.semaphores.contains(&id),
            None => is_guessed(&traces(), pids, launched)?,
        };
        // Times are those of the last tick of the clock.
        let used = operated != 0 && (!guessed || operated + 1 >= launched);
        Some(Candidate { id, guessed, used })
    };
    rows.filter_map(candidate).collect()
}

/// The state of a set, with the times of the last operation and change.
fn read(id: i32) -> Result<(Common, Vec<u16>, [i64; 2]), Fault> {
    let (ds, values) = sem::values(id).at("semctl")?;
    Ok((common(id, &ds.sem_perm), values, [ds.sem_otime, ds.sem_ctime]))
}

/// What there is to know about a set. `ask` finds out what processes have noted down where these are its values.
fn set(candidate: &Candidate, ask: impl FnOnce(&[u16]) -> Result<Vec<Noted>, Fault>) -> Result<SemaphoreSet, Fault> {
    let id = candidate.id;
    let (common, values, times) = read(id)?;
    let mut set = SemaphoreSet {
        common,
        values,
        guessed: candidate.guessed,
        undo: Vec::new(),
    };
    if candidate.used {
        set.undo = ask(&set.values)?;
        let (_, values, now) = read(id)?;
        // Of other values than those told, the answers would have been others.
        if (&values, now) != (&set.values, times) {
            return Err(Fault::Passing("a program outside the job uses it at this moment".into()));
        }
        set.guessed &= set.undo.is_empty();
    }
    Ok(set)
}

impl SemaphoreSet {
    /// Makes it again. `tell` is told of what is not as it was.
    pub(super) fn rebuild(&self, tell: &dyn Fn(&str)) -> Result<(), Fault> {
        let id = self.common.id;
        let remove = || drop(sem::remove(id));
        let name = format!("semaphore set {id}");
        whose::rebuild((&name, self.guessed), || self.make(tell), remove, tell)
    }

    fn make(&self, tell: &dyn Fn(&str)) -> Result<(), Fault> {
        let c = &self.common;
        if i32::try_from(self.values.len()).is_err() {
            return refuse("too many semaphores");
        }
        let mut made = None;
        same_id("sem", c.id, || {
            Ok(made.insert(sem::Made::new(c.key, self.values.len(), 0o600)?).id())
        })?;
        if let Some(set) = made {
            set.set(&self.values).at("set the values of semaphores")?;
        }
        let mut ds = sem::stat(c.id).at("semctl")?;
        let set = set_perm(c, |mode, owner| {
            change(&mut ds.sem_perm, mode, owner);
            sem::change(c.id, &mut ds)
        });
        if let Err(e) = set {
            tell(&format!("System V semaphore set {} has not its mode and owner: {e}", c.id));
        }
        Ok(())
    }

    /// In process `pid`: notes down what it had.
    pub(super) fn install(&self, pid: i32) -> Result<(), crate::fault::Refusal> {
        let id = self.common.id;
        for noted in self.undo.iter().filter(|n| n.pid == pid) {
            undo::note(id, noted).map_err(|e| e.of(pid, format!("System V semaphore set {id}")))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A set that is only guessed to be the job's, removed when the test is over.
    struct Guessed(Candidate, sem::Made);

    impl Guessed {
        fn new(used: bool) -> Self {
            let made = sem::Made::new(libc::IPC_PRIVATE, 2, 0o600).unwrap();
            let id = made.id();
            let guessed = true;
            Self(Candidate { id, guessed, used }, made)
        }

        fn change(&self) {
            self.1.set(&[0, 5]).unwrap();
        }
    }

    impl Drop for Guessed {
        fn drop(&mut self) {
            let _ = sem::remove(self.0.id);
        }
    }

    #[test]
    fn a_set_for_which_a_process_has_noted_something_down_is_the_jobs() {
        let used = Guessed::new(true);
        let noted = |values: &[u16]| {
            assert_eq!(values, [0, 0]);
            Ok(vec![Noted::default()])
        };
        assert!(!set(&used.0, noted).unwrap().guessed);
        assert!(set(&used.0, |_| Ok(Vec::new())).unwrap().guessed);
        let unused = Guessed::new(false);
        assert!(set(&unused.0, |_| unreachable!()).unwrap().guessed);
    }

    #[test]
    fn what_is_noted_down_is_not_believed_where_the_values_change_meanwhile() {
        let used = Guessed::new(true);
        let changed = set(&used.0, |_| {
            used.change();
            Ok(vec![Noted::default()])
        });
        assert!(matches!(changed, Err(Fault::Passing(_))), "{changed:?}");
    }

    #[test]
    fn sets_that_are_only_guessed_need_no_namespace() {
        let guessed = Guessed::new(false);
        let mut all = SysV::default();
        all.semaphores.push(set(&guessed.0, |_| unreachable!()).unwrap());
        assert!(all.is_empty());
        all.semaphores[0].guessed = false;
        assert!(!all.is_empty());
    }
}
