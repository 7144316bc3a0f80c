//! Whose child each process is: the descendants of a process, in a system where processes come and go meanwhile.

use super::{pids, stat, tasks, text};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Every descendant of `ancestor` as (pid, ppid), parents before their children.
pub fn descendants(ancestor: i32) -> io::Result<Vec<(i32, i32)>> {
    Family::default().descendants_but(ancestor, &[])
}

/// Children of `pid`, of all its threads.
pub fn children(pid: i32) -> io::Result<Vec<i32>> {
    Family::default().children(pid)
}

/// Children of thread `tid` of process `pid`, the oldest first; what is left to a process is a child of its main thread.
pub fn children_of_thread(pid: i32, tid: i32) -> io::Result<Vec<i32>> {
    let list = text(format!("/proc/{pid}/task/{tid}/children"))?;
    Ok(list.split_whitespace().filter_map(|c| c.parse().ok()).collect())
}

/// Whose child each process is, as far as somebody has asked.
#[derive(Debug, Default)]
pub struct Family {
    parents: Option<Parents>,
}

/// The parents of all processes.
#[derive(Debug, Clone)]
struct Parents {
    of: BTreeMap<i32, i32>,
    /// The same the other way round.
    children: BTreeMap<i32, Vec<i32>>,
    /// Before the first of them was read.
    since: Instant,
}

impl Family {
    /// As [`descendants`], without `outside` and what these have started.
    pub fn descendants_but(&mut self, ancestor: i32, outside: &[i32]) -> io::Result<Vec<(i32, i32)>> {
        let mut out = Vec::new();
        let mut queue = vec![ancestor];
        // One whose parent ends while the lists are read can stand in two of them.
        let mut known = BTreeSet::new();
        while let Some(parent) = queue.pop() {
            for child in self.children(parent)?.into_iter().filter(|c| !outside.contains(c)) {
                if !known.insert(child) {
                    continue;
                }
                out.push((child, parent));
                queue.push(child);
            }
        }
        Ok(out)
    }

    /// What is still true a moment later, when `job` were the descendants of interest: the parents of processes outside
    /// it, who stay outside. The others are read anew, those who have come since, and those whose parent was gone
    /// before it could be read: they may have been left to the job.
    pub fn later(&self, job: &[(i32, i32)]) -> Self {
        let parents = self.parents.clone().filter(|p| p.since.elapsed() < numbers_last());
        let parents = parents.and_then(|mut parents| {
            let known: BTreeSet<i32> = parents.of.keys().copied().chain([0]).collect();
            parents.of.retain(|_, parent| known.contains(parent));
            for (pid, _) in job {
                parents.of.remove(pid);
            }
            parents.read_missing().ok()?;
            Some(parents)
        });
        Self { parents }
    }

    /// The kernel lists children by the thread that made them. Where there are more threads than processes on the
    /// machine, or no such lists, the parents of all processes are read instead.
    fn children(&mut self, pid: i32) -> io::Result<Vec<i32>> {
        let tids = tasks(pid).unwrap_or_default();
        static LISTS: OnceLock<bool> = OnceLock::new();
        let no_lists = || !LISTS.get_or_init(|| std::path::Path::new("/proc/thread-self/children").exists());
        if self.parents.is_some() || (tids.len() > 64 && tids.len() > pids()?.len()) || no_lists() {
            let parents = match &mut self.parents {
                Some(parents) => parents,
                none => none.insert(Parents::read()?),
            };
            return Ok(parents.children.get(&pid).cloned().unwrap_or_default());
        }
        // A task that ends meanwhile has no children any more: they belong to a sibling thread or to the reaper.
        let lists = tids.into_iter().filter_map(|tid| children_of_thread(pid, tid).ok());
        Ok(lists.flatten().collect())
    }
}

/// How long a process number certainly means the same process, or none: the kernel gives numbers away in turn, and a
/// processor needs more than 10 µs for a fork.
fn numbers_last() -> Duration {
    const FORK: Duration = Duration::from_micros(10);
    static NUMBERS: OnceLock<u32> = OnceLock::new();
    let numbers = *NUMBERS.get_or_init(|| {
        let most: u32 = text("/proc/sys/kernel/pid_max")
            .ok()
            .and_then(|t| t.trim().parse().ok())
            .unwrap_or(0);
        // SAFETY: takes a number and returns one.
        let processors = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
        most / u32::try_from(processors).unwrap_or(u32::MAX).max(1)
    });
    FORK * numbers
}

impl Parents {
    fn read() -> io::Result<Self> {
        let mut parents = Self {
            of: BTreeMap::new(),
            children: BTreeMap::new(),
            since: Instant::now(),
        };
        parents.read_missing()?;
        Ok(parents)
    }

    /// Reads the parents of processes not known yet, and forgets those who are gone.
    fn read_missing(&mut self) -> io::Result<()> {
        let all = pids()?;
        let mut of = std::mem::take(&mut self.of);
        let mut parent = |pid: i32| of.remove(&pid).or_else(|| Some(stat(pid).ok()?.ppid));
        self.of = all.into_iter().filter_map(|pid| Some((pid, parent(pid)?))).collect();
        self.sort_by_parent();
        Ok(())
    }

    fn sort_by_parent(&mut self) {
        self.children.clear();
        for (child, parent) in &self.of {
            self.children.entry(*parent).or_default().push(*child);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_look_finds_new_children_and_those_left_by_dead_parents() {
        let me = std::process::id().cast_signed();
        // What has been read does not grow old, however slow the machine is.
        let mut parents = Parents::read().unwrap();
        parents.since += Duration::from_secs(3600);
        let mut first = Family { parents: Some(parents) };
        let job = first.descendants_but(me, &[]).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        let mut later = first.later(&job);
        assert!(later.parents.is_some());
        assert!(later.descendants_but(me, &[]).unwrap().contains(&(pid, me)));
        // As if its parent had ended before it could be read; no process has this number.
        let parents = later.parents.as_mut().unwrap();
        parents.of.insert(pid, i32::MAX);
        parents.sort_by_parent();
        assert!(!later.descendants_but(me, &[]).unwrap().contains(&(pid, me)));
        assert!(later.later(&[]).descendants_but(me, &[]).unwrap().contains(&(pid, me)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!later
            .later(&[(pid, me)])
            .descendants_but(me, &[])
            .unwrap()
            .iter()
            .any(|(p, _)| *p == pid));
    }
}
