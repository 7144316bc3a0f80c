//! Time: that of the kernel, and that which the phases take.

use belay_wire::Phase;
use rustix::time::ClockId;
use std::time::{Duration, Instant};

/// Measures the phases.
pub(crate) struct Clock<'a> {
    pub(crate) phases: Vec<(Phase, Duration)>,
    current: Option<(Phase, Instant)>,
    announce: &'a mut dyn FnMut(Phase),
}

impl<'a> Clock<'a> {
    /// Tells `announce` when a phase begins.
    pub(crate) fn new(announce: &'a mut dyn FnMut(Phase)) -> Self {
        Self {
            phases: Vec::new(),
            current: None,
            announce,
        }
    }

    /// A phase begins, and the current one ends.
    pub(crate) fn enter(&mut self, phase: Phase) {
        self.leave();
        (self.announce)(phase);
        self.current = Some((phase, Instant::now()));
    }

    /// The current phase began later.
    pub(crate) fn began_at(&mut self, begin: Instant) {
        self.current = self.current.map(|(phase, _)| (phase, begin));
    }

    /// The current phase ends.
    pub(crate) fn leave(&mut self) {
        self.leave_at(Instant::now());
    }

    /// It has ended at this time.
    pub(crate) fn leave_at(&mut self, end: Instant) {
        if let Some((phase, begin)) = self.current.take() {
            let took = end.saturating_duration_since(begin);
            match self.phases.iter_mut().find(|(p, _)| *p == phase) {
                Some((_, all)) => *all += took,
                None => self.phases.push((phase, took)),
            }
        }
    }
}

/// The kernel's monotonic clock.
pub(crate) fn monotonic_ns() -> u64 {
    now_ns(ClockId::Monotonic)
}

/// The one that goes on while the machine sleeps.
pub(crate) fn boottime_ns() -> u64 {
    now_ns(ClockId::Boottime)
}

fn now_ns(clock: ClockId) -> u64 {
    let t = rustix::time::clock_gettime(clock);
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}
