//! Reaper: waits for tasks that end while others are being seized, or while all of the job is stopped.
//!
//! A thread that calls exec waits until all other threads of its process are gone, and a traced one is gone only when
//! it has been waited for. Until then the kernel lets nobody seize a thread of that process: the request sleeps
//! (`cred_guard_mutex`, ptrace(2) under "BUGS"). A tracer that has seized one thread and is about to seize the next
//! would wait for the exec, and the exec for the tracer. So a thread that seizes nothing itself waits for what has
//! ended, once seizing takes long.
//!
//! Likewise a main thread that was killed is said to have ended only when nobody has to wait for another thread of its
//! process any more: who waits for the end of what a main thread is doing would wait for ever.
use belay_kernel::prompt;
use rustix::process::{waitid, Pid, WaitId, WaitIdOptions, WaitIdStatus};
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// How long that may take before ended tasks are looked for, and again after each look.
const PERIOD: Duration = Duration::from_millis(10);

/// The tasks seized so far, but for main threads: what calls exec takes the place of the main thread itself, and nobody
/// need wait for that.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seized(Arc<Mutex<Vec<i32>>>);

impl Seized {
    /// Adds task `tid` of process `pid`.
    pub(crate) fn add(&self, pid: i32, tid: i32) {
        if let Ok(mut tids) = self.0.lock() {
            tids.extend((tid != pid).then_some(tid));
        }
    }

    /// Waits for those that have ended; what waits for them afterwards is told that they are not there.
    fn reap(&self) {
        if let Ok(mut tids) = self.0.lock() {
            tids.retain(|tid| !reaped(*tid));
        }
    }
}

/// Collects task `tid` if it has ended. A stop stays where it is: the kernel shows those of a traced task whatever is
/// asked for, so what there is is looked at before it is taken.
fn reaped(tid: i32) -> bool {
    has_ended(tid) && look(tid, WaitIdOptions::empty()).is_some_and(is_end)
}

/// Whether task `tid`, a child of the caller's or traced by it, has ended, and can be waited for.
pub(crate) fn has_ended(tid: i32) -> bool {
    look(tid, WaitIdOptions::NOWAIT).is_some_and(is_end)
}

fn is_end(status: WaitIdStatus) -> bool {
    status.exited() || status.killed() || status.dumped()
}

fn look(tid: i32, how: WaitIdOptions) -> Option<WaitIdStatus> {
    let pid = Pid::from_raw(tid.max(0))?;
    let all = WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned());
    // Nothing is told where there is nothing to tell.
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG | all | how).ok()?
}

/// The thread. It ends on drop.
#[derive(Debug)]
pub(crate) struct Reaper {
    pub(crate) seized: Seized,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    pub(crate) fn start() -> std::io::Result<Self> {
        let seized = Seized::default();
        let list = seized.clone();
        let (end, ending) = channel::<()>();
        let thread = prompt::spawn(Builder::new().name("belay-reaper".into()).stack_size(64 * 1024), move || {
            while ending.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                list.reap();
            }
        })?;
        Ok(Self {
            seized,
            end: Some(end),
            thread: Some(thread),
        })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
