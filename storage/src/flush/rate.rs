//! A limit on bytes per second that all threads of a flush share.

use crate::control::Control;
use crate::StorageError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest sleep before the flush looks whether it is still wanted.
const SLICE: Duration = Duration::from_millis(50);

/// The limit.
#[derive(Debug)]
pub(crate) struct Rate {
    bytes_per_s: Option<u64>,
    /// The limit does not count any more.
    lifted: AtomicBool,
    /// When the bytes granted so far will have been used up, where any were. Not a moment at which the limit was made: an
    /// agent makes it before it enters the time namespace of the job, whose clock is another.
    next: Mutex<Option<Instant>>,
}

impl Rate {
    /// A limit of `bytes_per_s`, or none.
    pub(crate) fn new(bytes_per_s: Option<u64>) -> Self {
        Self {
            bytes_per_s,
            lifted: AtomicBool::new(false),
            next: Mutex::default(),
        }
    }

    /// When `bytes` more may be moved, where that is not now.
    fn grant(&self, bytes: u64, now: Instant) -> Instant {
        let Some(rate) = self.bytes_per_s else { return now };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let due = next.map_or(now, |next| next.max(now));
        *next = Some(due + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64));
        due
    }

    /// Takes the limit away, also for those that wait.
    pub(crate) fn lift(&self) {
        self.lifted.store(true, Ordering::Relaxed);
    }

    /// Waits until `bytes` more may be moved.
    pub(crate) fn take(&self, bytes: u64, control: &Control) -> Result<(), StorageError> {
        let due = self.grant(bytes, Instant::now());
        loop {
            control.check()?;
            if self.lifted.load(Ordering::Relaxed) {
                return Ok(());
            }
            match due.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => std::thread::sleep(left.min(SLICE)),
                _ => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holds_as_many_bytes_as_the_limit_says() {
        let rate = Rate::new(Some(1000));
        let start = Instant::now();
        let due: Vec<u128> = (0..4).map(|_| (rate.grant(500, start) - start).as_millis()).collect();
        assert_eq!(due, [0, 500, 1000, 1500]);
        let later = start + Duration::from_secs(10);
        assert_eq!(rate.grant(500, later), later, "what was not used is not saved up");
        assert_eq!(Rate::new(None).grant(1 << 40, later), later);
    }

    #[test]
    fn the_clock_may_be_set_back_between_the_making_and_the_first_bytes() {
        // As in the time namespace of a job that has been down for an hour.
        let rate = Rate::new(Some(1000));
        let Some(earlier) = Instant::now().checked_sub(Duration::from_secs(3600)) else {
            return;
        };
        assert_eq!(rate.grant(500, earlier), earlier);
        assert_eq!(rate.grant(500, earlier), earlier + Duration::from_millis(500));
    }

    #[test]
    fn a_wait_ends_when_the_flush_is_given_up() {
        let (rate, control) = (Rate::new(Some(1)), Control::default());
        rate.take(1000, &control).unwrap();
        control.cancel();
        assert!(rate.take(1, &control).is_err());
        let (rate, control) = (Rate::new(Some(1)), Control::default());
        rate.take(1000, &control).unwrap();
        rate.lift();
        rate.take(1, &control).unwrap();
    }
}
