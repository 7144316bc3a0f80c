//! A thread that this process traces, so that nobody else can, and that stands still if that is wanted.

use crate::stepper::request;
use crate::Failure;

/// It goes on when this is dropped, on the thread that has made it.
#[derive(Debug)]
pub struct Traced {
    tid: i32,
    stands_still: bool,
}

impl Traced {
    /// Traces thread `tid`, which runs on.
    pub fn running(tid: i32) -> Result<Self, Failure> {
        request(libc::PTRACE_SEIZE, tid, 0, 0).map_err(|e| format!("trace thread {tid}: {e}"))?;
        Ok(Self {
            tid,
            stands_still: false,
        })
    }

    /// The same, and stops it alone: other threads of its process go on.
    pub fn halted(tid: i32) -> Result<Self, Failure> {
        let mut traced = Self::running(tid)?;
        traced.halt();
        Ok(traced)
    }

    fn halt(&mut self) {
        // One that has ended meanwhile is not there to be stopped.
        if !self.stands_still && request(libc::PTRACE_INTERRUPT, self.tid, 0, 0).is_ok() {
            let mut status = 0;
            // SAFETY: `status` is a live int.
            unsafe { libc::waitpid(self.tid, &mut status, libc::__WALL) };
        }
        self.stands_still = true;
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        self.halt();
        drop(request(libc::PTRACE_DETACH, self.tid, 0, 0));
    }
}
