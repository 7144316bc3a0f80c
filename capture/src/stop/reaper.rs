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
    has_ended(tid) && look(tid, 0).is_some_and(is_end)
}

/// Whether task `tid`, a child of the caller's or traced by it, has ended, and can be waited for.
pub(crate) fn has_ended(tid: i32) -> bool {
    look(tid, libc::WNOWAIT).is_some_and(is_end)
}

fn is_end(info: libc::siginfo_t) -> bool {
    matches!(info.si_code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED)
}

fn look(tid: i32, flags: i32) -> Option<libc::siginfo_t> {
    let id = libc::id_t::try_from(tid).ok()?;
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is live. Its process number stays 0 when there is nothing to tell.
    let pid = unsafe {
        let done = libc::waitid(
            libc::P_PID,
            id,
            &mut info,
            libc::WEXITED | libc::WNOHANG | libc::__WALL | flags,
        );
        (done == 0).then(|| info.si_pid())
    };
    (pid == Some(tid)).then_some(info)
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
