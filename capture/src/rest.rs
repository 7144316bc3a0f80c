//! A job at rest: its processes stopped, its gates shut.
//!
//! Where processes use a GPU, the driver takes their state off it when all stand still, and puts it back before any goes on:
//! by a thread of its own in each of them, which alone runs then. Whatever else of such a program ran while it is off its
//! GPU could touch what the driver has taken away, and end by SIGSEGV. (JAX does, on driver r580: a thread of it reads the
//! GPU's state each half second, which locking does not hold up. CRIU's CUDA plugin has the same order.)

use crate::gate::Shut;
use crate::stop::gather;
use crate::stop::stopped::Suspended;
use crate::CaptureError;
use belay_kernel::proc;
use belay_plugins::gate::Parties;
use belay_plugins::Refusal;
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// What is refused where the driver changes what has been stopped.
const OBJECT: &str = "GPU driver";

/// What becomes of a process that is killed meanwhile.
const ENDED: &str = "the process has ended while its state was taken off the GPU";

/// What becomes of a program whose state is not put back, and what to do.
const NOT_BACK: &str = "the program waits in its next call of the GPU, and no further checkpoint can be taken; restart the job from this generation (belay restart; belay run does so by itself)";

/// How processes have gone on.
pub(crate) struct GoneOn {
    /// When the last one did.
    pub(crate) resumed: Instant,
    /// What the user is to know.
    pub(crate) note: Option<String>,
}

/// The processes of a job, stopped since their capture. Dropped, it lets them go on as if they had never been stopped,
/// and opens the gates.
#[derive(Debug)]
pub struct Held {
    pub(crate) job: Suspended,
    pub(crate) gate: Option<Shut>,
}

impl Held {
    /// Those of `job`, which are stopped, behind the gate.
    pub(crate) fn new(job: Suspended, gate: Option<Shut>) -> Self {
        Self { job, gate }
    }

    /// Whether any of them uses a GPU.
    pub(crate) fn uses_gpus(&mut self) -> bool {
        self.gate.as_mut().is_some_and(|gate| gate.gates().has_gpus())
    }

    /// Who takes part, here or on another node.
    pub(crate) fn parties(&self) -> Parties {
        self.gate.as_ref().map_or(Parties::default(), |gate| gate.parties)
    }

    /// Has what uses a GPU taken off it.
    pub(crate) fn leave_gpus(&mut self) -> Result<(), CaptureError> {
        let Some(gates) = self.gate.as_mut().map(Shut::gates) else {
            return Ok(());
        };
        let threads = gates.driver_threads().to_vec();
        with_driver(&mut self.job, &threads, |meanwhile| gates.leave_gpus(meanwhile))
            .map_err(|r| CaptureError::Refused(vec![r]))?;
        for (pid, thread) in threads {
            if !proc::thread_lives(pid, thread) {
                return Err(CaptureError::refuse_for_now(pid, OBJECT, ENDED));
            }
            let known = |tid: i32| self.job.processes.iter().any(|p| p.tasks.iter().any(|t| t.tid == tid));
            // One that has just been killed has none.
            if proc::tasks(pid)
                .unwrap_or_default()
                .into_iter()
                .any(|tid| !known(tid) && proc::thread_lives(pid, tid))
            {
                // Not for now: each attempt takes all state off and puts it back.
                return Err(CaptureError::refuse(pid, OBJECT, "has made a thread; try again"));
            }
        }
        Ok(())
    }

    /// Ends every process where it stands: none of them executes another instruction.
    pub fn kill(mut self) {
        for process in std::mem::take(&mut self.job.processes) {
            // It is traced by this thread, so its PID cannot have been given to another.
            belay_kernel::signals::kill(process.pid, libc::SIGKILL);
        }
        if let Some(gate) = self.gate.take() {
            gate.abandon();
        }
    }

    /// Lets them go on; how long the gates took to open, where there are any, and what the user is to know.
    pub fn go_on(mut self) -> (Option<Duration>, Option<String>) {
        let mut opening = None;
        let gone_on = self.let_go(|since| opening = Some(since));
        (opening.map(|since| since.elapsed()), gone_on.note)
    }

    /// The same; `reopens` is told before gates, where there are any, are opened, and before GPUs get their state back.
    pub(crate) fn let_go(&mut self, reopens: impl FnOnce(Instant)) -> GoneOn {
        let has_gpus = self.uses_gpus();
        let Some(mut gate) = self.gate.take() else {
            return GoneOn {
                resumed: self.job.resume(),
                note: None,
            };
        };
        if !has_gpus {
            let resumed = self.job.resume();
            reopens(resumed);
            gate.open();
            return GoneOn { resumed, note: None };
        }
        reopens(Instant::now());
        let mut note = None;
        self.job.clear_all();
        let gates = gate.gates();
        let threads = gates.driver_threads().to_vec();
        // What has been captured is whole all the same: it was before this.
        if let Err(error) = with_driver(&mut self.job, &threads, |meanwhile| gates.put_on_gpus(meanwhile)) {
            tracing::error!(%error, "the GPU driver has not put a program back: {NOT_BACK}");
            note = Some(format!("{error}: {NOT_BACK}"));
        }
        let resumed = self.job.resume();
        gate.open();
        GoneOn { resumed, note }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.let_go(drop);
    }
}

/// Does `ask` while these threads run (process, thread), and nothing else of the job.
fn with_driver(
    job: &mut Suspended,
    threads: &[(i32, i32)],
    ask: impl FnOnce(&dyn Fn()) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let pids: Vec<i32> = job.processes.iter().map(|p| p.pid).collect();
    let those = |process: usize, tid: i32| threads.contains(&(pids[process], tid));
    job.each_task(
        |process, _, task| those(process, task.tid),
        |task, runs| {
            if *runs {
                task.run_by_itself();
            }
        },
    );
    let running = RefCell::new(job);
    let attend = || {
        running.borrow_mut().each_task(
            |_, _, _| (),
            |task, ()| {
                if task.running {
                    task.attend();
                }
            },
        );
    };
    let done = ask(&attend);
    let job = running.into_inner();
    job.each_task(
        |process, _, task| those(process, task.tid),
        |task, runs| {
            if *runs {
                gather::stand_again(task);
            }
        },
    );
    done
}
