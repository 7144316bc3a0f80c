//! How long a job has run and how often it was interrupted: what the mean time to interrupt is taken from.
//!
//! A run whose end nobody has recorded was interrupted: its agent went with it, by a crash, a kill or the end of an
//! allocation. It counts up to its last sign of life.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What is assumed before there is any experience, and weighs as much as one interruption.
const ASSUMED: Duration = Duration::from_secs(24 * 3600);

/// The runs of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct History {
    /// Time of all runs that are over, seconds.
    pub run_s: u64,
    /// How many of them were interrupted.
    pub interrupts: u32,
    /// When the current run began, until its end is recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_unix_s: Option<u64>,
}

impl History {
    /// A run begins now.
    pub fn begin(&mut self, now_unix_s: u64) {
        self.since_unix_s = Some(now_unix_s);
    }

    /// The last run, if its end was not recorded, was interrupted after `last_sign_unix_s`; whether it was.
    pub fn settle(&mut self, last_sign_unix_s: u64) -> bool {
        let open = self.since_unix_s.take();
        if let Some(since) = open {
            self.run_s = self.run_s.saturating_add(last_sign_unix_s.saturating_sub(since));
            self.interrupts = self.interrupts.saturating_add(1);
        }
        open.is_some()
    }

    /// The current run has come to its end.
    pub fn end(&mut self, now_unix_s: u64) {
        if let Some(since) = self.since_unix_s.take() {
            self.run_s = self.run_s.saturating_add(now_unix_s.saturating_sub(since));
        }
    }

    /// Mean time to interrupt as observed so far, where one interruption in a day was expected before anything was known.
    pub fn mtti(&self, now_unix_s: u64) -> Duration {
        let current = self.since_unix_s.map_or(0, |since| now_unix_s.saturating_sub(since));
        let run = Duration::from_secs(self.run_s.saturating_add(current));
        ASSUMED.saturating_add(run) / self.interrupts.saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_that_nobody_recorded_are_interruptions() {
        let mut h = History::default();
        assert!(!h.settle(0), "there was none");
        h.begin(1000);
        assert_eq!(h.mtti(1000 + 3600), Duration::from_secs(25 * 3600));
        h.end(1000 + 3600);
        assert!(!h.settle(9_000));
        h.begin(10_000);
        assert_eq!((h.run_s, h.interrupts), (3600, 0));
        assert!(h.settle(17_200) && !h.settle(17_300), "it is counted once");
        h.begin(20_000);
        assert_eq!((h.run_s, h.interrupts, h.since_unix_s), (3600 + 7200, 1, Some(20_000)));
        assert_eq!(h.mtti(20_000), Duration::from_secs((24 + 3) * 3600 / 2));
        // A clock that was set back does no harm.
        assert!(h.settle(3));
        h.begin(5);
        assert_eq!((h.run_s, h.interrupts), (3600 + 7200, 2));
    }
}
