//! The memory that the agent shares with all processes being restored: the stage they may enter, and a slot per process
//! for what it reports.

use crate::companion;
use crate::fail::{Outcome, RestartError};
use crate::sys;
use belay_abi::restore::{Control, Slot, Step, STAGE_ABORT, STATE_FAILED, TEXT_BYTES};
use belay_kernel::futex::{self, bare};
use belay_kernel::shared;
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Offset of the first slot.
const SLOTS: u64 = 64;
/// How long a wait lasts before the agent looks whether all processes still live.
const GLANCE: Duration = Duration::from_millis(50);
/// How long a process waits at once.
const PAUSE: Duration = Duration::from_secs(1);

/// The shared memory, as mapped by the agent and inherited by every process until the restorer maps it for itself.
#[derive(Debug)]
pub(crate) struct Shared {
    memory: OwnedFd,
    mapped: shared::Shared,
    bytes: u64,
    count: usize,
}

impl Shared {
    /// Makes it for `count` processes. Its descriptor is numbered in `room`, so that no process of the job uses the number.
    pub(crate) fn new(count: usize, room: &Range<RawFd>) -> io::Result<Self> {
        let bytes = (SLOTS + (count * size_of::<Slot>()) as u64).next_multiple_of(belay_abi::PAGE);
        let memory = sys::dup_into(memfd_create(c"belay-restart", MemfdFlags::CLOEXEC)?, room)?;
        ftruncate(&memory, bytes)?;
        let mapped = shared::Shared::map(memory.as_fd(), bytes as usize)?;
        Ok(Self {
            memory,
            mapped,
            bytes,
            count,
        })
    }

    /// Descriptor of the memory.
    pub(crate) fn fd(&self) -> RawFd {
        self.memory.as_raw_fd()
    }

    /// The same, to be mapped.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Its length.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Offset of slot `i`.
    pub(crate) fn slot_offset(i: usize) -> u64 {
        SLOTS + (i * size_of::<Slot>()) as u64
    }

    fn control(&self) -> &Control {
        self.mapped.part(0)
    }

    /// Slot `i`.
    pub(crate) fn slot(&self, i: usize) -> &Slot {
        assert!(i < self.count);
        self.mapped.part(Self::slot_offset(i) as usize)
    }

    /// In process `i`: it has reached `state`.
    pub(crate) fn report(&self, i: usize, state: u32) {
        self.slot(i).state.store(state, Ordering::Release);
        self.control().reports.fetch_add(1, Ordering::Release);
        futex::wake(&self.control().reports);
    }

    /// In process `i`: reports an error and ends the process.
    pub(crate) fn fail(&self, i: usize, error: &RestartError) -> ! {
        let text = match error {
            RestartError::Failed { step, reason } => format!("{step}\0{reason}"),
            other => format!("restart\0{other}"),
        };
        let n = text.len().min(TEXT_BYTES);
        let slot = self.slot(i);
        // It is this process's own until its length is published.
        let at = Self::slot_offset(i) as usize + offset_of!(Slot, text);
        self.mapped.write(at, &text.as_bytes()[..n]);
        slot.text_bytes.store(n as u32, Ordering::Release);
        self.report(i, STATE_FAILED);
        sys::exit_now(127)
    }

    /// In a process: reports a failure in the restorer's numbers and ends the process.
    pub(crate) fn fail_at(&self, i: usize, step: Step, index: usize, errno: i32) -> ! {
        let slot = self.slot(i);
        slot.step.store(step as u32, Ordering::Relaxed);
        slot.index.store(u32::try_from(index).unwrap_or(u32::MAX), Ordering::Relaxed);
        slot.errno.store(errno, Ordering::Relaxed);
        self.report(i, STATE_FAILED);
        sys::exit_now(127)
    }

    /// In a process: waits until the agent lets stage `stage` begin; ends the process when the restart has failed.
    pub(crate) fn await_stage(&self, stage: u32) {
        companion::let_others(|| loop {
            match self.control().stage.load(Ordering::Acquire) {
                STAGE_ABORT => sys::exit_now(127),
                now if now >= stage => return,
                now => bare::wait(&self.control().stage, now, PAUSE),
            }
        });
    }

    /// In a process: waits until process `i` has reached `state`; ends the process when the restart has failed.
    pub(crate) fn await_slot(&self, i: usize, state: u32) {
        companion::let_others(|| loop {
            let seen = self.control().reports.load(Ordering::Acquire);
            let now = self.slot(i).state.load(Ordering::Acquire);
            if now == STATE_FAILED || self.control().stage.load(Ordering::Acquire) == STAGE_ABORT {
                sys::exit_now(127);
            }
            if now >= state {
                return;
            }
            bare::wait(&self.control().reports, seen, PAUSE);
        });
    }

    /// Notes that process `i` has been made.
    pub(crate) fn note_made(&self, i: usize) {
        self.slot(i).made.store(1, Ordering::Release);
    }

    /// In the agent: lets stage `stage` begin.
    pub(crate) fn begin(&self, stage: u32) {
        self.control().stage.store(stage, Ordering::Release);
        futex::wake(&self.control().stage);
    }

    /// In the agent: waits until each process of `which` has reached `state`; `glance` is asked now and then whether one has died.
    pub(crate) fn await_all(&self, which: &[usize], state: u32, glance: &mut dyn FnMut() -> Outcome<()>) -> Outcome<()> {
        let mut left: Vec<usize> = which.to_vec();
        let mut glanced = Instant::now();
        loop {
            let seen = self.control().reports.load(Ordering::Acquire);
            let mut failed = None;
            left.retain(|i| match self.slot(*i).state.load(Ordering::Acquire) {
                STATE_FAILED => {
                    failed = failed.or(Some(*i));
                    false
                }
                now => now < state,
            });
            if let Some(i) = failed {
                return Err(self.failure(i));
            }
            if left.is_empty() {
                return Ok(());
            }
            bare::wait(&self.control().reports, seen, GLANCE);
            // Reports of many processes may come without a pause.
            if glanced.elapsed() >= GLANCE {
                glance()?;
                glanced = Instant::now();
            }
        }
    }

    /// The error that process `i` reported as text, or where it has reported numbers.
    pub(crate) fn failure(&self, i: usize) -> RestartError {
        let slot = self.slot(i);
        let n = (slot.text_bytes.load(Ordering::Acquire) as usize).min(TEXT_BYTES);
        if n == 0 {
            return RestartError::Reported { slot: i };
        }
        let mut text = vec![0; n];
        self.mapped
            .read(Self::slot_offset(i) as usize + offset_of!(Slot, text), &mut text);
        let text = String::from_utf8_lossy(&text).into_owned();
        let (step, reason) = text.split_once('\0').unwrap_or(("restart", &text));
        RestartError::at(step, reason)
    }
}
