//! Waits for threads that have been let go, and lack nothing but a processor to get where they were.

use crate::proc;
use std::time::{Duration, Instant};

/// How long all others stand still for them. On a busy machine each gets its turn well before; one that is frozen, or
/// has used up the quota of its control group, is not waited for any longer.
pub const LIMIT: Duration = Duration::from_secs(2);

/// What they take where nobody else wants a processor.
const SOON: Duration = Duration::from_micros(200);

/// No more than this passes between two looks, unless this process stands still itself, perhaps with all of its machine.
const TURN: Duration = Duration::from_millis(100);

/// Waits until `is_done`, for at most `limit`, of which time in which this process stood still is no part.
pub fn within(limit: Duration, mut is_done: impl FnMut() -> bool) {
    let (mut passed, mut last) = (Duration::ZERO, Instant::now());
    while !is_done() {
        match passed {
            passed if passed >= limit => return,
            passed if passed < SOON => std::thread::yield_now(),
            // The processor may be what they lack.
            _ => std::thread::sleep(SOON),
        }
        passed += last.elapsed().min(TURN);
        last = Instant::now();
    }
}

/// Waits until threads that job control has stopped stand still again, or have ended. They stop before their first
/// instruction, but only once they have run.
pub fn until_stopped(tids: impl IntoIterator<Item = i32>) {
    let moves = |tid: &i32| proc::stat(*tid).is_ok_and(|s| matches!(s.state, 'R' | 'S' | 'D' | 't'));
    let mut moving: Vec<i32> = tids.into_iter().collect();
    within(LIMIT, || {
        moving.retain(moves);
        moving.is_empty()
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stood_still_looks_once_more() {
        let mut looks = 0;
        within(2 * TURN, || {
            looks += 1;
            if looks == 1 {
                std::thread::sleep(3 * TURN);
            }
            looks == 2
        });
        assert_eq!(looks, 2);
        within(SOON, || false);
    }
}
