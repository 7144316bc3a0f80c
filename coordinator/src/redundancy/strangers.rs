//! Who comes to a door: let in one after the other, and not too many at a time who have not proved yet that they know the key. Each of those is given some seconds for that. When there is no
//! room, the next ones wait outside, unless many are of one address: then the oldest of these makes room, so nobody is kept out by them.

use belay_tree::who_goes;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most strangers at a time; each takes two descriptors.
const MOST: usize = 128;
/// As many of one address are parts of the job that come at the same time.
const SHARE: usize = 16;
/// When nobody can be let in, until the next attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// The strangers behind one door.
#[derive(Debug, Clone, Default)]
pub(super) struct Strangers(Arc<Hall>);

#[derive(Debug, Default)]
struct Hall {
    room: Mutex<Room>,
    one_less: Condvar,
}

#[derive(Debug, Default)]
struct Room {
    /// Oldest first.
    here: Vec<Guest>,
    next: u64,
}

#[derive(Debug)]
struct Guest {
    number: u64,
    from: IpAddr,
    stream: TcpStream,
}

/// One of them, as long as it lives.
#[derive(Debug)]
pub(super) struct Stranger {
    all: Strangers,
    number: u64,
}

impl Room {
    /// Who makes room.
    fn one_too_many(&self) -> Option<usize> {
        let addresses: Vec<IpAddr> = self.here.iter().map(|g| g.from).collect();
        who_goes(&addresses, SHARE)
    }

    fn is_full(&self) -> bool {
        self.here.len() >= MOST && self.one_too_many().is_none()
    }
}

impl Strangers {
    fn room(&self) -> MutexGuard<'_, Room> {
        self.0.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is room for one more within `limit`.
    fn has_room(&self, limit: Duration) -> bool {
        let waited = self.0.one_less.wait_timeout_while(self.room(), limit, |room| room.is_full());
        !waited.unwrap_or_else(PoisonError::into_inner).0.is_full()
    }

    /// Lets the one at the other end of `stream` in.
    pub(super) fn admit(&self, stream: &TcpStream) -> io::Result<Stranger> {
        let (from, stream) = (stream.peer_addr()?.ip(), stream.try_clone()?);
        let mut room = self.room();
        if room.here.len() >= MOST {
            if let Some(goes) = room.one_too_many() {
                // Who waits for a word of that one hears that there will be none. It may have gone by itself.
                drop(room.here.remove(goes).stream.shutdown(Shutdown::Both));
            }
        }
        let number = room.next;
        room.next += 1;
        room.here.push(Guest { number, from, stream });
        Ok(Stranger {
            all: self.clone(),
            number,
        })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.all.room().here.retain(|g| g.number != self.number);
        self.all.0.one_less.notify_one();
    }
}

/// Who has come, according to `accept`, which is asked when there is room, if there is some within `limit`. One who could not be let in, because it has gone again or no descriptor is free, is no reason to close the door.
pub(super) fn visitor(
    strangers: &Strangers,
    limit: Duration,
    accept: impl FnOnce() -> io::Result<Option<TcpStream>>,
) -> Option<(Stranger, TcpStream)> {
    if !strangers.has_room(limit) {
        return None;
    }
    let stream = accept().unwrap_or_else(|e| {
        tracing::warn!(error = %e, "a visitor could not be let in");
        std::thread::sleep(PAUSE);
        None
    })?;
    match strangers.admit(&stream) {
        Ok(stranger) => Some((stranger, stream)),
        Err(e) => {
            tracing::debug!(error = %e, "a visitor has gone again");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    #[test]
    fn a_crowd_of_one_address_keeps_nobody_out() {
        let (strangers, door) = (Strangers::default(), TcpListener::bind("127.0.0.1:0").unwrap());
        let port = door.local_addr().unwrap().port();
        let come = || {
            let theirs = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (stranger, ours) = visitor(&strangers, Duration::MAX, || Ok(Some(door.accept().unwrap().0))).unwrap();
            (stranger, theirs, ours)
        };
        let mut crowd: Vec<_> = (0..MOST).map(|_| come()).collect();
        // One of another address.
        let node = crowd.remove(7);
        strangers.room().here[7].from = "10.1.1.1".parse().unwrap();
        for _ in 0..10 {
            crowd.push(come());
        }
        assert_eq!(strangers.room().here.len(), MOST);
        let gone = |(_, theirs, _): &mut (Stranger, TcpStream, TcpStream)| {
            theirs.set_nonblocking(true).unwrap();
            matches!(theirs.read(&mut [0]), Ok(0))
        };
        let gone: Vec<bool> = crowd.iter_mut().map(gone).collect();
        assert!(
            gone[..10].iter().all(|g| *g) && !gone[10..].iter().any(|g| *g),
            "the oldest go"
        );
        node.1.set_nonblocking(true).unwrap();
        assert!((&node.1).read(&mut [0]).is_err(), "the other one stays");
        drop((crowd, node));
        assert_eq!(strangers.room().here.len(), 0);
        // Many of many addresses wait for each other.
        let mut parts: Vec<_> = (0..MOST).map(|_| come()).collect();
        for (guest, n) in strangers.room().here.iter_mut().zip(0u32..) {
            guest.from = IpAddr::from((n / SHARE as u32).to_be_bytes());
        }
        assert!(!strangers.has_room(Duration::from_millis(1)));
        let all = strangers.clone();
        let next = std::thread::spawn(move || all.has_room(Duration::MAX));
        parts.pop();
        assert!(next.join().unwrap() && strangers.room().here.len() == MOST - 1);
    }
}
