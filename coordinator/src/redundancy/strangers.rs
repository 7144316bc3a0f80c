//! Who comes to a door: let in one after the other, and not too many at a time who have not proved yet that they know the key. Each of those is given some seconds for that. When there is no
//! room, the next ones wait outside, until somebody has gone, or has said nothing for so long that no part of the job can be meant: of
//! these the oldest of the address from where most come makes room.

use belay_tree::who_goes;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most strangers at a time; each takes two descriptors.
const MOST: usize = 128;
/// A part of the job has proved by then that it is one, also where much else runs.
const AGE: Duration = Duration::from_secs(5);
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
    since: Instant,
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
        // The oldest stand in front.
        let old = self.here.iter().take_while(|g| g.since.elapsed() > AGE);
        who_goes(&old.map(|g| g.from).collect::<Vec<_>>())
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
        let begin = Instant::now();
        let mut room = self.room();
        while room.is_full() && begin.elapsed() < limit {
            // They grow old, and nobody tells.
            let waited = self
                .0
                .one_less
                .wait_timeout(room, limit.saturating_sub(begin.elapsed()).min(PAUSE));
            room = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        !room.is_full()
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
        let since = Instant::now();
        room.here.push(Guest {
            number,
            from,
            since,
            stream,
        });
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
    let refuse = |e: &io::Error| {
        tracing::warn!(error = %e, "a visitor could not be let in");
        std::thread::sleep(PAUSE);
        None
    };
    let stream = match accept() {
        Ok(stream) => stream?,
        Err(e) => return refuse(&e),
    };
    match strangers.admit(&stream) {
        Ok(stranger) => Some((stranger, stream)),
        Err(e) if e.kind() == io::ErrorKind::NotConnected => {
            tracing::debug!(error = %e, "a visitor has gone again");
            None
        }
        Err(e) => refuse(&e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn those_who_say_nothing_make_room_and_others_are_waited_for() {
        let (strangers, door) = (Strangers::default(), TcpListener::bind("127.0.0.1:0").unwrap());
        let port = door.local_addr().unwrap().port();
        let come = || {
            let theirs = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (stranger, ours) = visitor(&strangers, Duration::MAX, || Ok(Some(door.accept().unwrap().0))).unwrap();
            (stranger, theirs, ours)
        };
        let mut crowd: Vec<_> = (0..MOST).map(|_| come()).collect();
        // None of them is silent for long; one goes.
        let young = |strangers: &Strangers| strangers.room().here.iter_mut().for_each(|g| g.since = Instant::now() + LONG);
        young(&strangers);
        assert!(!strangers.has_room(Duration::from_millis(1)));
        let all = strangers.clone();
        let next = std::thread::spawn(move || all.has_room(Duration::MAX));
        crowd.pop();
        assert!(next.join().unwrap());
        crowd.push(come());
        // All but the youngest have been silent, and one of them is of another address.
        let node = crowd.remove(7);
        {
            let mut room = strangers.room();
            room.here[7].from = "10.1.1.1".parse().unwrap();
            let (last, others) = room.here.split_last_mut().unwrap();
            last.since = Instant::now() + LONG;
            others
                .iter_mut()
                .for_each(|g| g.since = Instant::now().checked_sub(2 * AGE).unwrap());
        }
        crowd.extend((0..10).map(|_| come()));
        assert_eq!(strangers.room().here.len(), MOST);
        for (_, theirs, _) in &mut crowd[..10] {
            theirs.set_read_timeout(Some(LONG)).unwrap();
            assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the oldest go");
        }
        for (_, theirs, _) in crowd[10..].iter_mut().chain([&mut { node }]) {
            theirs.set_nonblocking(true).unwrap();
            assert!(theirs.read(&mut [0]).is_err(), "the others stay");
        }
        drop(crowd);
        assert_eq!(strangers.room().here.len(), 0);
    }
}
