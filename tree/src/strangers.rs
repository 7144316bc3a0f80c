//! Those who have connected and have not proved yet that they know the job key. They are bounded in number and in time;
//! where there are too many, the oldest from where most come makes room: a node proves that it is one in an instant.
//! Packets of nodes that somebody has seen and sends again prove nothing, and cost no more than a look into a table.

use crate::crowd::Crowds;
use crate::key::JobKey;
use crate::link::Link;
use crate::noise::{Answered, Secure};
use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Most of them; a quarter of the descriptors that the agent may have, if that is less.
const MOST: usize = 4096;
/// How long each may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
/// Connections accepted before those that exist are attended to again.
const ACCEPTED_AT_ONCE: usize = 64;
/// How long nobody is let in when a connection could not be accepted.
const DEAF: Duration = Duration::from_secs(1);

struct Stranger {
    link: Link,
    from: IpAddr,
    since: Instant,
}

/// Those at one place.
pub(crate) struct Strangers {
    key: JobKey,
    prologue: &'static [u8],
    answered: Answered,
    here: Crowds<Stranger>,
    most: usize,
    /// Connections that were no node's.
    turned_away: u64,
    /// No connection is accepted until then: there are no descriptors left.
    deaf_until: Option<Instant>,
}

impl std::fmt::Debug for Strangers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} strangers", self.here.len())
    }
}

/// Descriptors that this process may have.
fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX)
}

impl Strangers {
    /// In the protocol that `prologue` names.
    pub(crate) fn new(key: JobKey, prologue: &'static [u8]) -> Self {
        Self {
            key,
            prologue,
            answered: Answered::default(),
            here: Crowds::default(),
            most: MOST.min(descriptors() / 4).max(1),
            turned_away: 0,
            deaf_until: None,
        }
    }

    /// Whether connections are accepted now.
    pub(crate) fn are_let_in(&mut self) -> bool {
        self.deaf_until = self.deaf_until.filter(|until| *until > Instant::now());
        self.deaf_until.is_none()
    }

    /// What has been noted of the time is of another clock, and counts as of now.
    pub(crate) fn clock_is_another(&mut self, now: Instant) {
        self.deaf_until = self.deaf_until.map(|_| now + DEAF);
        for stranger in self.here.iter_mut() {
            stranger.since = now;
            stranger.link.begin_at(now);
        }
    }

    /// This process has stood still for `time`, which does not count.
    pub(crate) fn stood_still(&mut self, time: Duration) {
        for stranger in self.here.iter_mut() {
            stranger.since += time;
            stranger.link.stood_still(time);
        }
    }

    /// What to poll for.
    pub(crate) fn links(&self) -> impl Iterator<Item = &Link> {
        self.here.iter().map(|s| &s.link)
    }

    /// Accepts connections, until there is none.
    pub(crate) fn accept(&mut self, mut next: impl FnMut() -> io::Result<(TcpStream, SocketAddr)>) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let (stream, from) = match next() {
                Ok(accepted) => accepted,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) => {
                    // The connection stays where it is, and the listener ready: looking again at once would keep a processor busy.
                    self.turn_away(&format_args!("accept a connection: {e}"));
                    self.deaf_until = Some(Instant::now() + DEAF);
                    return;
                }
            };
            if self.here.len() >= self.most {
                if let Some(Stranger { from, .. }) = self.here.make_room() {
                    self.turn_away(&format_args!("{from}: too many connections that prove nothing"));
                }
            }
            let (from, since) = (from.ip(), Instant::now());
            let secure = Secure::responder(&self.key, self.prologue, self.answered.clone());
            match secure.map_err(Into::into).and_then(|secure| Link::over(stream, secure)) {
                Ok(link) => self.here.add(from, Stranger { link, from, since }),
                Err(error) => self.turn_away(&format_args!("{from}: {error}")),
            }
        }
    }

    /// Listens to those that are `ready`. One that has proved to be a node is none of them any more.
    pub(crate) fn hear(&mut self, ready: &HashSet<RawFd>) -> Vec<Link> {
        let (mut nodes, mut gone) = (Vec::new(), Vec::new());
        self.here.sift(|mut stranger| {
            let proved = match ready.contains(&stranger.link.raw()) {
                true => stranger.link.prove(),
                false => Ok(false),
            };
            match proved {
                Ok(false) if stranger.since.elapsed() < LIMIT => return Some(stranger),
                Ok(false) => gone.push(format!("{}: nothing proved within {} s", stranger.from, LIMIT.as_secs())),
                Ok(true) => nodes.push(stranger.link),
                Err(error) => gone.push(format!("{}: {error}", stranger.from)),
            }
            None
        });
        gone.iter().for_each(|why| self.turn_away(why));
        nodes
    }

    /// Notes a connection that led to nothing. A program that makes many of them must not fill the log: after the
    /// first few every second power is told.
    fn turn_away(&mut self, why: &dyn std::fmt::Display) {
        self.turned_away += 1;
        if self.turned_away <= 16 || self.turned_away.is_power_of_two() {
            tracing::warn!(count = self.turned_away, %why, "a connection that was no node");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::TREE;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    fn ready(strangers: &Strangers) -> HashSet<RawFd> {
        strangers.links().map(Link::raw).collect()
    }

    #[test]
    fn who_cannot_be_let_in_is_tried_again_later() {
        let mut strangers = Strangers::new(JobKey::random().unwrap(), TREE);
        strangers.accept(|| Err(io::Error::from_raw_os_error(libc::EMFILE)));
        assert!(!strangers.are_let_in());
        strangers.deaf_until = Some(Instant::now());
        assert!(strangers.are_let_in());
    }

    #[test]
    fn the_oldest_make_room_and_who_says_nothing_for_long_goes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut strangers = Strangers::new(JobKey::random().unwrap(), TREE);
        strangers.most = 3;
        let mut theirs: Vec<TcpStream> = (0..5)
            .map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap())
            .collect();
        strangers.accept(|| listener.accept());
        assert_eq!(strangers.here.len(), 3);
        for (n, stream) in theirs.iter_mut().enumerate() {
            stream.set_nonblocking(n >= 2).unwrap();
            assert_eq!(stream.read(&mut [0]).is_ok(), n < 2, "the two oldest go");
        }
        assert!(strangers.hear(&HashSet::new()).is_empty());
        strangers.here.sift(|s| {
            let since = Instant::now().checked_sub(LIMIT)?;
            Some(Stranger { since, ..s })
        });
        assert!(strangers.hear(&HashSet::new()).is_empty());
        assert_eq!(strangers.here.len(), 0);
    }

    #[test]
    fn a_packet_sent_again_is_turned_away_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let key = JobKey::random().unwrap();
        let mut strangers = Strangers::new(key.clone(), TREE);
        let packet = Secure::initiator(&key, TREE).unwrap().out;
        let mut held = Vec::new();
        for n in 0..3 {
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            stream.write_all(&packet).unwrap();
            held.push(stream);
            let mut once = Some(listener.accept());
            strangers.accept(|| once.take().unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into())));
            // It is there: a stream on this host has delivered what was written.
            assert!(strangers.hear(&ready(&strangers)).is_empty());
            assert_eq!(strangers.here.len(), 1, "the first alone is waited for, after {n}");
        }
    }
}
