//! Who comes to a door: let in one after the other, and not too many at a time who have not proved yet that they know the key. Each of those is given some seconds for that.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Most strangers at a time; the next ones wait outside.
const MOST: usize = 256;
/// When nobody can be let in, until the next attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// The strangers behind one door.
#[derive(Debug, Clone, Default)]
pub(super) struct Strangers(Arc<Room>);

#[derive(Debug, Default)]
struct Room {
    here: Mutex<usize>,
    one_less: Condvar,
}

/// One of them, as long as it lives.
#[derive(Debug)]
pub(super) struct Stranger(Strangers);

impl Strangers {
    /// Room for one more, as soon as there is some, within `limit`.
    pub(super) fn enter(&self, limit: Duration) -> Option<Stranger> {
        let here = self.0.here.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.one_less.wait_timeout_while(here, limit, |n| *n >= MOST);
        let (mut here, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return None;
        }
        *here += 1;
        Some(Stranger(self.clone()))
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let room = &self.0 .0;
        *room.here.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        room.one_less.notify_one();
    }
}

/// Who has come, according to `accept`. One who could not be let in, because it has gone again or no descriptor is free, is no reason to close the door.
pub(super) fn visitor(accept: impl FnOnce() -> io::Result<Option<TcpStream>>) -> Option<TcpStream> {
    accept().unwrap_or_else(|e| {
        tracing::warn!(error = %e, "a visitor could not be let in");
        std::thread::sleep(PAUSE);
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_so_many_strangers_are_let_in() {
        let strangers = Strangers::default();
        let enter = |limit| strangers.enter(limit);
        let mut here: Vec<Stranger> = (0..MOST).map(|_| enter(Duration::MAX).unwrap()).collect();
        assert!(enter(Duration::from_millis(1)).is_none());
        here.pop();
        here.extend(enter(Duration::MAX));
        // The next one waits until one has gone.
        let all = strangers.clone();
        let next = std::thread::spawn(move || all.enter(Duration::MAX).is_some());
        here.pop();
        assert!(next.join().unwrap());
        drop(here);
        assert_eq!(*strangers.0.here.lock().unwrap(), 0);
    }
}
