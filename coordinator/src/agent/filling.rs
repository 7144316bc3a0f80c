//! After `restart --lazy`: memory of the job is filled while it runs. Until all of it is there and was found whole, no
//! checkpoint is taken, and nothing is built on the generation. Where that fails, the job ends: what it has not read yet
//! would be zeros.

use super::Agent;
use crate::checkpoint::Wanted;
use crate::failure::Failure;
use crate::generations::{self, Generation};
use crate::{processes, sys};
use belay_restart::{Filling, Pages, RestartError};
use belay_wire::Exit;
use std::os::fd::RawFd;
use std::path::PathBuf;

/// The filling of a job's memory.
#[derive(Debug)]
pub(super) struct Filled {
    filling: Filling,
    /// From which generation: its number and its directory.
    number: u64,
    path: PathBuf,
    /// What of it nobody reads.
    unread: Vec<Pages>,
    /// It has failed, and the job is being ended; until then nothing is let go of.
    failed: bool,
}

impl Filled {
    /// Readable when there is something to be looked at.
    pub(super) fn descriptors(&self) -> [RawFd; 2] {
        if self.failed {
            [-1; 2]
        } else {
            self.filling.descriptors()
        }
    }
}

impl Agent {
    /// After a restart from `generation`: its memory is there and whole, or is being filled. Nobody has read what is
    /// `unread`.
    pub(crate) fn has_memory(&mut self, generation: &Generation, filling: Option<Filling>, unread: Vec<Pages>) {
        match filling {
            None => self.is_whole(&generation.path, unread),
            Some(filling) => {
                self.filled = Some(Filled {
                    filling,
                    number: generation.number,
                    path: generation.path.clone(),
                    unread,
                    failed: false,
                });
            }
        }
    }

    /// All of the generation in `path` but what is `unread` was found whole: what it stored need not be stored again.
    fn is_whole(&mut self, path: &std::path::Path, unread: Vec<Pages>) {
        if unread.is_empty() {
            generations::unmark(path);
        }
        self.engine.build_on(path, unread);
    }

    /// Whether a checkpoint has to wait. Whoever wants one gets it as soon as it can be taken.
    pub(super) fn awaits_memory(&mut self, wanted: &mut Wanted) -> bool {
        let waits = self.filled.is_some();
        if waits {
            let queued = self.queued.get_or_insert_default();
            queued.by.append(&mut wanted.by);
            queued.then_stop |= wanted.then_stop;
        }
        waits
    }

    /// Looks how far the filling is.
    pub(super) fn look_at_memory(&mut self) {
        let Some(end) = self.filled.as_ref().and_then(|f| f.filling.end()) else {
            return;
        };
        match end {
            Ok(took) => {
                tracing::info!(ms = generations::ms(took), "memory filled");
                if let Some(f) = self.filled.take() {
                    self.is_whole(&f.path, f.unread);
                }
                self.begin_queued();
            }
            Err(e) => self.lose_memory(e),
        }
    }

    fn lose_memory(&mut self, e: RestartError) {
        let Some(f) = &mut self.filled else { return };
        f.failed = true;
        let (number, failure) = (f.number, Failure::from(e));
        let from = if failure.exit == Exit::Damaged {
            Generation::at(&self.dir.generations(), number).is_damaged(&failure.to_string());
            "an older one"
        } else {
            "it once more"
        };
        let why = format!(
            "generation {number}: {failure}; the program is ended, because what it has not read yet of its memory is lost: belay restart goes on from {from}"
        );
        tracing::error!(generation = number, error = %failure, "memory is lost");
        sys::say(&why);
        self.note_failure(&Failure::new(failure.exit, why), false);
        self.result.get_or_insert(i32::from(failure.exit.code()) << 8);
        self.force_end();
    }

    /// Nothing of the job is left that could miss memory, or the agent gives up: then the filling goes on without it.
    pub(super) fn leave_memory(&mut self) {
        let over = processes::live(self.pid, &self.outside()).is_empty();
        if let Some(f) = self.filled.take().filter(|_| over) {
            f.filling.give_up();
        }
    }
}
