//! Who comes to a door: not too many at a time who have not proved yet that they know the key. Each of those is given some seconds for that, unless others need the room: then one of the
//! address from where most come makes room, so nobody is kept out by those of one address.

use belay_tree::who_goes;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most strangers at a time.
const MOST: usize = 256;
/// When nobody can be let in, until the next attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// The strangers behind one door.
#[derive(Debug, Clone, Default)]
pub(super) struct Strangers(Arc<Mutex<Room>>);

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

impl Strangers {
    fn room(&self) -> MutexGuard<'_, Room> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the one at the other end of `stream` in.
    pub(super) fn admit(&self, stream: &TcpStream) -> io::Result<Stranger> {
        let (from, stream) = (stream.peer_addr()?.ip(), stream.try_clone()?);
        let mut room = self.room();
        if room.here.len() >= MOST {
            let addresses: Vec<IpAddr> = room.here.iter().map(|g| g.from).collect();
            if let Some(goes) = who_goes(&addresses) {
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
    }
}

/// Who has come, according to `accept`. One who could not be let in, because it has gone again or no descriptor is free, is no reason to close the door.
pub(super) fn visitor(
    strangers: &Strangers,
    accept: impl FnOnce() -> io::Result<Option<TcpStream>>,
) -> Option<(Stranger, TcpStream)> {
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
            let (stranger, ours) = visitor(&strangers, || Ok(Some(door.accept().unwrap().0))).unwrap();
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
    }
}
