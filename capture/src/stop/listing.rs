//! What is found before anything is stopped, and again until nothing is new.

use crate::CaptureError;
use belay_kernel::proc::{self, Family};
use std::collections::BTreeMap;

/// The processes and threads of the job at one moment.
#[derive(Debug)]
pub(crate) struct Listing {
    /// (process, parent, threads), parents before their children, the main thread before the others.
    pub(crate) processes: Vec<(i32, i32, Vec<i32>)>,
    family: Family,
}

impl Listing {
    /// Lists all descendants of `agent` but its children `outside` and what they have started.
    pub(crate) fn make(agent: i32, outside: &[i32]) -> Result<Self, CaptureError> {
        Self::with(Family::default(), agent, outside, |_| None)
    }

    /// Lists them once more. The threads of a process that `is_whole` are not listed again.
    pub(crate) fn again(&self, agent: i32, outside: &[i32], is_whole: impl Fn(i32, &[i32]) -> bool) -> Result<Self, CaptureError> {
        let job: Vec<(i32, i32)> = self.processes.iter().map(|(pid, ppid, _)| (*pid, *ppid)).collect();
        let known: BTreeMap<i32, &[i32]> = self.processes.iter().map(|(pid, _, tids)| (*pid, tids.as_slice())).collect();
        Self::with(self.family.later(&job), agent, outside, |pid| {
            known.get(&pid).copied().filter(|tids| is_whole(pid, tids))
        })
    }

    fn with<'a>(
        mut family: Family,
        agent: i32,
        outside: &[i32],
        known: impl Fn(i32) -> Option<&'a [i32]>,
    ) -> Result<Self, CaptureError> {
        let list = family.descendants_but(agent, outside);
        let list = list.map_err(|e| CaptureError::system("list the processes of the job", e))?;
        // Numbers begin anew some day, so the main thread's need not be the lowest.
        let with_threads = |(pid, ppid)| {
            let list = || {
                let mut tids = proc::tasks(pid).unwrap_or_default();
                tids.sort_by_key(|tid| (*tid != pid, *tid));
                tids
            };
            (pid, ppid, known(pid).map_or_else(list, <[i32]>::to_vec))
        };
        Ok(Self {
            processes: list.into_iter().map(with_threads).collect(),
            family,
        })
    }

    pub(crate) fn tasks(&self) -> usize {
        self.processes.iter().map(|(_, _, tids)| tids.len()).sum()
    }
}
