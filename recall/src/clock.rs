//! Time that goes forward only.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Seconds since it was made. The monotonic clock is an earlier one after a restart by belay without namespaces on a
/// machine that was booted later: then this one goes on from where it was, as nothing that waits for a time of it would
/// come to pass otherwise.
pub(crate) struct Clock(Mutex<(Instant, f64)>);

impl Clock {
    pub(crate) fn new() -> Self {
        Self(Mutex::new((Instant::now(), 0.0)))
    }

    pub(crate) fn now(&self) -> f64 {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *last = after(*last, Instant::now());
        last.1
    }
}

/// What was seen last, and is now.
fn after((last, seconds): (Instant, f64), now: Instant) -> (Instant, f64) {
    (now, seconds + now.saturating_duration_since(last).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_clock_that_has_been_set_back_goes_on() {
        let begin = Instant::now();
        let late = after((begin + Duration::from_secs(100), 7.0), begin + Duration::from_secs(103));
        assert_eq!(late.1, 10.0);
        let back = after(late, begin);
        assert_eq!(back.1, 10.0);
        assert_eq!(after(back, begin + Duration::from_secs(2)).1, 12.0);
    }
}
