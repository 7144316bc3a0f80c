//! Brings processes to rest, and lets them go on: all at once, because what one of them waits for may be another's.

use crate::devices::Pair;
use crate::driver::{Driver, Refused, State, NOT_READY, NOT_SUPPORTED};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How long a process may be on its way from one state to another that nobody asks for any more.
const ON_ITS_WAY: Duration = Duration::from_secs(60);
/// So long one must have been seen to compute, where whoever has asked it to come to rest may have died.
const STEADY: Duration = Duration::from_millis(50);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// GPU processes of this host.
pub(crate) struct Processes<'a> {
    driver: &'a dyn Driver,
    pids: Vec<i32>,
    /// The driver's thread in each of those that it knew when they were listed: process, thread.
    listed: Vec<(i32, i32)>,
    limit: Duration,
    /// GPUs that take the place of others.
    pairs: Vec<Pair>,
}

impl<'a> Processes<'a> {
    pub(crate) fn new(driver: &'a dyn Driver, pids: Vec<i32>, limit: Duration, pairs: Vec<Pair>) -> Self {
        Self {
            driver,
            pids,
            listed: Vec::new(),
            limit,
            pairs,
        }
    }

    /// How long the driver may wait for the work of each.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Looks for the driver's thread in each, without which none is locked; process and thread of those that have one.
    pub(crate) fn list(&mut self) -> &[(i32, i32)] {
        let known = self.pids.iter().filter_map(|pid| Some((*pid, self.thread(*pid)?)));
        self.listed = known.collect();
        &self.listed
    }

    /// Does the same with all that live; what went wrong, each with its process.
    fn all(&self, work: impl Fn(i32) -> Result<(), Refused> + Sync) -> Result<(), Refused> {
        let work = &work;
        let failed: Vec<(i32, Refused)> = std::thread::scope(|s| {
            let begin = |pid: &i32| {
                let pid = *pid;
                (pid, Builder::new().spawn_scoped(s, move || work(pid)).ok())
            };
            let (others, own): (Vec<_>, Vec<_>) = self.pids.iter().map(begin).partition(|(_, thread)| thread.is_some());
            // Where there can be no more threads, this one has to do.
            let own = own.into_iter().map(|(pid, _)| (pid, Ok(work(pid))));
            let others = others.into_iter().filter_map(|(pid, thread)| Some((pid, thread?.join())));
            let failed = own.chain(others).filter_map(|(pid, done)| match done {
                Ok(Ok(())) => None,
                // One that has ended needs nothing.
                Ok(Err(_)) if !lives(pid) => None,
                Ok(Err(e)) => Some((pid, e)),
                Err(_) => Some((pid, Refused::of("the thread that cared for it has ended"))),
            });
            failed.collect()
        });
        if failed.is_empty() {
            return Ok(());
        }
        Err(Refused {
            passing: failed.iter().all(|(_, f)| f.passing),
            unable: failed
                .iter()
                .filter(|(_, f)| f.code == NOT_SUPPORTED)
                .map(|(pid, _)| *pid)
                .collect(),
            ..Refused::of(told(&failed))
        })
    }

    /// Has the driver hold back their calls and finish what they have submitted.
    pub(crate) fn lock(&self) -> Result<(), Refused> {
        self.all(|pid| {
            let Some(thread) = self.thread(pid) else {
                return stranger(&belay_kernel::proc::maps(pid).unwrap_or_default()).map_or(Ok(()), Err);
            };
            // Who stops everything would not let that thread run.
            if !self.listed.contains(&(pid, thread)) {
                return Err(beginner());
            }
            match self.driver.state(pid)? {
                State::Running => self.driver.lock(pid, self.limit).map_err(|e| match e.code {
                    NOT_READY => Refused::of(format!(
                        "{e}; it had {} s: try again, or give it more time (limit under [gate] in the configuration)",
                        self.limit.as_secs_f64()
                    )),
                    _ => e,
                }),
                State::Locked => Ok(()),
                State::Checkpointed => Err(Refused::of(
                    "is off its GPU already, by somebody else: put it back (cuda-checkpoint --toggle), and try again",
                )),
                State::Failed => Err(lost()),
            }
        })
    }

    /// Takes their state off the devices. They are locked.
    pub(crate) fn checkpoint(&self) -> Result<(), Refused> {
        self.all(|pid| match self.driver.state(pid) {
            Ok(State::Checkpointed) => Ok(()),
            Ok(State::Failed) => Err(lost()),
            Err(_) if !self.is_known(pid) => Ok(()),
            _ => self.driver.checkpoint(pid).map_err(|e| self.lost_by(pid, e)),
        })
    }

    /// What has gone wrong, with what to do where the driver has lost the process by that.
    fn lost_by(&self, pid: i32, e: Refused) -> Refused {
        match self.driver.state(pid) {
            Ok(State::Failed) => Refused::of(format!("{e}; {}", lost())),
            _ => e,
        }
    }

    /// Puts their state back on the devices.
    pub(crate) fn restore(&self) -> Result<(), Refused> {
        self.all(|pid| match self.driver.state(pid) {
            Ok(State::Checkpointed) => self.driver.restore(pid, &self.pairs).map_err(|e| self.lost_by(pid, e)),
            Ok(State::Failed) => Err(lost()),
            Ok(State::Running | State::Locked) => Ok(()),
            // It had called exec before it was stopped.
            Err(_) if !self.is_known(pid) => Ok(()),
            Err(e) => Err(e),
        })
    }

    /// Lets all go on, from wherever they are. None is left out because of another. `steady`: whoever has asked them to
    /// come to rest may have died, and what it asked for may come yet.
    pub(crate) fn go_on(&self, steady: bool) -> Result<(), Refused> {
        self.all(|pid| self.let_go(pid, if steady { STEADY } else { Duration::ZERO }))
    }

    fn let_go(&self, pid: i32, steady: Duration) -> Result<(), Refused> {
        // The last state that was seen, and since when.
        let mut seen: Option<(State, Instant)> = None;
        let mut refused = None;
        loop {
            let state = match self.driver.state(pid) {
                Ok(state) => state,
                // It has called exec.
                Err(_) if !self.is_known(pid) => return Ok(()),
                Err(e) => return Err(e),
            };
            let since = match seen {
                Some((last, since)) if last == state => since,
                _ => Instant::now(),
            };
            seen = Some((state, since));
            if state == State::Running && since.elapsed() >= steady {
                return Ok(());
            }
            // What has been asked before may take its time, and then this is another state.
            if since.elapsed() > ON_ITS_WAY {
                return Err(refused.unwrap_or_else(|| Refused::of("the GPU driver does not let it go on")));
            }
            let done = match state {
                State::Running => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                State::Locked => self.driver.unlock(pid),
                State::Checkpointed => self.driver.restore(pid, &self.pairs),
                State::Failed => return Err(lost()),
            };
            match done {
                Ok(()) => {}
                Err(e) if e.early => {
                    refused = Some(e);
                    std::thread::sleep(PAUSE);
                }
                Err(e) => return Err(self.lost_by(pid, e)),
            }
        }
    }

    /// Whether the driver's thread is there, without which nothing can be asked of the process. (What is forked, or has
    /// called exec, has none.)
    fn is_known(&self, pid: i32) -> bool {
        self.thread(pid).is_some()
    }

    /// The driver's thread in the process.
    fn thread(&self, pid: i32) -> Option<i32> {
        self.driver.thread(pid).ok().filter(|tid| has_thread(pid, *tid))
    }

    /// Whether any of them lives.
    pub(crate) fn live(&self) -> bool {
        self.pids.iter().any(|pid| lives(*pid))
    }
}

/// What has gone wrong: each reason once, with its processes, since not many bytes are told.
fn told(failed: &[(i32, Refused)]) -> String {
    let mut whys: Vec<(&str, Vec<String>)> = Vec::new();
    for (pid, refused) in failed {
        match whys.iter_mut().find(|(why, _)| *why == refused.why) {
            Some((_, pids)) => pids.push(pid.to_string()),
            None => whys.push((&refused.why, vec![pid.to_string()])),
        }
    }
    let one = |(why, pids): &(&str, Vec<String>)| match pids.as_slice() {
        [pid] => format!("process {pid}: {why}"),
        pids => format!("processes {}: {why}", pids.join(", ")),
    };
    whys.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Whether the process is there, and is not being ended.
fn lives(pid: i32) -> bool {
    belay_kernel::proc::stat(pid).is_ok_and(|s| !s.is_dead()) && !belay_kernel::proc::maps(pid).unwrap_or_default().is_empty()
}

fn has_thread(pid: i32, tid: i32) -> bool {
    belay_kernel::proc::task_stat(pid, tid).is_ok()
}

fn beginner() -> Refused {
    Refused {
        passing: true,
        ..Refused::of("begins to use the GPU at this moment")
    }
}

fn lost() -> Refused {
    Refused::of("the GPU driver has given it up (state FAILED); restart the job from the checkpoint before (belay restart)")
}

/// Why a process with these mappings, in which there is no thread of the driver's, cannot be checkpointed. One that has called
/// exec has no device mapped, nor has one that was off its GPU.
fn stranger(maps: &[belay_kernel::proc::Map]) -> Option<Refused> {
    let has = |what: &str| maps.iter().any(|m| m.name.to_string_lossy().contains(what));
    let why = match (has("/dev/nvidia"), has("/libnvidia-opencl.so")) {
        (false, _) => return None,
        (true, true) => {
            "uses a GPU by OpenCL, which NVIDIA's driver cannot checkpoint; of mpirun, which only looks for it: set HWLOC_COMPONENTS=-opencl in its environment"
        }
        (true, false) => {
            "has mappings of a GPU that the driver does not know it by: it was forked by a process that had begun to use the GPU; start such workers before that, or by spawn"
        }
    };
    Some(Refused::of(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A process: its state, and what somebody who has died has asked of it, which comes to pass after so many looks.
    struct Simulated {
        state: Mutex<(State, Option<(u32, State)>)>,
        fails: Option<&'static str>,
        /// The driver knows it after so many looks for its thread.
        is_known: Mutex<Option<u32>>,
    }

    impl Simulated {
        fn to(&self, from: State, to: State) -> Result<(), Refused> {
            let mut now = self.state.lock().unwrap();
            if now.0 != from {
                return Err(Refused {
                    early: true,
                    ..Refused::of("illegal state")
                });
            }
            now.0 = to;
            Ok(())
        }
    }

    impl Driver for Simulated {
        fn state(&self, _: i32) -> Result<State, Refused> {
            if *self.is_known.lock().unwrap() != Some(0) {
                return Err(Refused::of("invalid value"));
            }
            let mut now = self.state.lock().unwrap();
            match now.1 {
                Some((0, state)) => *now = (state, None),
                Some((looks, state)) => now.1 = Some((looks - 1, state)),
                None => {}
            }
            Ok(now.0)
        }
        fn thread(&self, pid: i32) -> Result<i32, Refused> {
            match &mut *self.is_known.lock().unwrap() {
                Some(0) => return Ok(pid),
                Some(looks) => *looks -= 1,
                None => {}
            }
            Err(Refused::of("invalid value"))
        }
        fn lock(&self, _: i32, _: Duration) -> Result<(), Refused> {
            self.to(State::Running, State::Locked)
        }
        fn checkpoint(&self, _: i32) -> Result<(), Refused> {
            self.to(State::Locked, State::Checkpointed)
        }
        fn restore(&self, _: i32, _: &[Pair]) -> Result<(), Refused> {
            match self.fails {
                Some(why) => Err(Refused::of(why)),
                None => self.to(State::Checkpointed, State::Locked),
            }
        }
        fn unlock(&self, _: i32) -> Result<(), Refused> {
            self.to(State::Locked, State::Running)
        }
    }

    /// What becomes of a process in this state, in which it is on its way to another one.
    fn let_go(state: State, coming: Option<(u32, State)>, fails: Option<&'static str>) -> (Result<(), Refused>, State) {
        let driver = Simulated {
            state: Mutex::new((state, coming)),
            fails,
            is_known: Mutex::new(Some(0)),
        };
        let own = std::process::id().cast_signed();
        let gone_on = Processes::new(&driver, vec![own], Duration::ZERO, Vec::new()).go_on(true);
        let state = driver.state(own).unwrap();
        (gone_on, state)
    }

    #[test]
    fn all_go_on_from_wherever_they_are() {
        for state in [State::Running, State::Locked, State::Checkpointed] {
            assert_eq!(let_go(state, None, None), (Ok(()), State::Running), "{state:?}");
        }
        // What a process that has died has asked for comes yet.
        for looks in 0..4 {
            let coming = |state| Some((looks, state));
            let locked = let_go(State::Running, coming(State::Locked), None);
            assert_eq!(locked, (Ok(()), State::Running), "locked after {looks} looks");
            let off = let_go(State::Locked, coming(State::Checkpointed), None);
            assert_eq!(off, (Ok(()), State::Running), "off after {looks} looks");
        }
    }

    #[test]
    fn who_begins_when_threads_have_been_listed_is_not_locked() {
        let own = std::process::id().cast_signed();
        for (looks, passing) in [(0, None), (1, Some(true))] {
            let driver = Simulated {
                state: Mutex::new((State::Running, None)),
                fails: None,
                is_known: Mutex::new(Some(looks)),
            };
            let mut processes = Processes::new(&driver, vec![own], Duration::ZERO, Vec::new());
            assert_eq!(processes.list().len(), usize::from(looks == 0));
            assert_eq!(processes.lock().err().map(|e| e.passing), passing);
            let locked = driver.state(own).unwrap() == State::Locked;
            assert_eq!(locked, looks == 0);
        }
    }

    #[test]
    fn who_is_off_its_gpu_is_not_taken_for_one_at_rest() {
        let own = std::process::id().cast_signed();
        for (state, rests) in [(State::Locked, true), (State::Checkpointed, false), (State::Failed, false)] {
            let driver = Simulated {
                state: Mutex::new((state, None)),
                fails: None,
                is_known: Mutex::new(Some(0)),
            };
            let mut processes = Processes::new(&driver, vec![own], Duration::ZERO, Vec::new());
            processes.list();
            assert_eq!(processes.lock().is_ok(), rests, "{state:?}");
        }
    }

    #[test]
    fn whom_the_driver_does_not_know_after_a_restart_needs_nothing() {
        let own = std::process::id().cast_signed();
        let restored = |state, fails, is_known: bool| {
            let driver = Simulated {
                state: Mutex::new((state, None)),
                fails,
                is_known: Mutex::new(is_known.then_some(0)),
            };
            Processes::new(&driver, vec![own], Duration::ZERO, Vec::new()).restore()
        };
        assert_eq!(restored(State::Checkpointed, Some("never asked"), false), Ok(()));
        assert!(restored(State::Checkpointed, Some("out of memory"), true).is_err());
        assert!(restored(State::Failed, None, true).is_err());
    }

    #[test]
    fn whom_the_driver_does_not_know_is_told_why() {
        let maps = |names: &[&str]| {
            let lines = names.iter().enumerate();
            let lines = lines.map(|(i, name)| format!("{i}1000-{i}2000 rw-s 00000000 00:05 {i} {name}\n"));
            belay_kernel::proc::Map::parse(lines.collect::<String>().as_bytes()).unwrap()
        };
        let why = |names| stranger(&maps(names)).map(|r| r.why);
        assert_eq!(why(&["/lib/libcuda.so.580"]), None);
        assert!(why(&["/dev/nvidia0"]).is_some_and(|w| w.contains("forked")));
        let opencl = ["/usr/lib/libnvidia-opencl.so.580.1", "/dev/nvidia0"];
        assert!(why(&opencl).is_some_and(|w| w.contains("HWLOC_COMPONENTS=-opencl")));
    }

    #[test]
    fn a_reason_is_told_once() {
        let of = |pid, why: &str| (pid, Refused::of(why));
        assert_eq!(told(&[of(1, "full")]), "process 1: full");
        assert_eq!(
            told(&[of(1, "full"), of(2, "lost"), of(3, "full")]),
            "processes 1, 3: full; process 2: lost"
        );
    }

    #[test]
    fn who_cannot_go_on_is_named() {
        let (gone_on, state) = let_go(State::Checkpointed, None, Some("out of memory"));
        assert_eq!(state, State::Checkpointed);
        assert!(gone_on
            .unwrap_err()
            .why
            .contains(&format!("process {}: out of memory", std::process::id())));
        assert!(let_go(State::Failed, None, None).0.unwrap_err().why.contains("FAILED"));
    }
}
