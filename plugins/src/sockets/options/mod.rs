//! Socket options. They are read as raw bytes and set again where a fresh socket has another value; `table.rs` has all
//! that can be set and read.

pub(crate) mod filter;
mod table;

use super::send_buffer::SO_BUF_LOCK;
use crate::fault::{At, Fault};
use crate::files::owner::Belongs;
use crate::kind::{nothing, Kind, Never, NoPart};
use crate::model::DescId;
use crate::session::{Found, Session};
use crate::sys::{fd, sock};
use belay_kernel::{pidfd, spread};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use table::{Entry, Sort, Who, TABLE};

/// When an option is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Before the socket gets an address; it cannot be changed any more then.
    Early,
    /// As above, and at the end once more, as the rebuild itself uses it.
    Always,
    /// As [`Stage::Always`], but a connection that is accepted can only get it from the socket that listens.
    Inherited,
    /// As [`Stage::Early`], for a socket that the rebuild does not connect: it would change how.
    New,
    /// When the socket is connected and data in flight is back.
    Late,
    /// Behind all others, when connections that wait to be accepted have been made too.
    Last,
}

/// What a part of the rebuild sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Before the socket gets an address.
    Early,
    /// Likewise; nothing is going to connect it.
    Unconnected,
    /// On a socket that listens, before a connection with these options is made to it that is going to be accepted.
    Accepting,
    /// When a socket listens, before those connect to it that will be waiting to be accepted: these get its options.
    Listening,
    /// When the socket is connected and data in flight is back.
    Late,
}

impl When {
    fn sets(self, stage: Stage) -> bool {
        match self {
            Self::Early => matches!(stage, Stage::Early | Stage::Always | Stage::Inherited),
            Self::Unconnected => stage == Stage::New || Self::Early.sets(stage),
            Self::Accepting => stage == Stage::Inherited,
            Self::Listening => matches!(stage, Stage::Inherited | Stage::Late),
            Self::Late => matches!(stage, Stage::Always | Stage::Inherited | Stage::Late | Stage::Last),
        }
    }
}

/// Longest value of an option: that of the options of IPv6 headers.
const LONGEST: usize = 2048;
const DEVICE: (i32, i32) = (libc::SOL_SOCKET, libc::SO_BINDTODEVICE);
const FILTER: (i32, i32) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);

/// Options of one socket.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Options {
    values: Vec<(i32, i32, Vec<u8>)>,
    /// SO_SNDBUF and SO_RCVBUF as the kernel reports them (twice what is set), 0 where the kernel chooses the size itself.
    buffers: (i32, i32),
    /// Whose the socket is: only sockets of one user share a port.
    #[serde(default)]
    belongs: Option<Belongs>,
}

/// Sockets that one of several threads takes at once.
const PIECE: usize = 64;

/// The kind: options of sockets of all families, which are read ahead.
pub(crate) struct Ahead;

/// What has been read.
#[derive(Debug, Default)]
struct Known(HashMap<DescId, Options>);

impl Kind for Ahead {
    const NAME: &'static str = "SocketOptions";
    const VERSION: u32 = 1;
    type State = Never;
    type Part = NoPart;

    fn survey(s: &mut Session<'_>) {
        let read = read_ahead(s);
        s.sets.put(Known(read));
    }

    nothing!(recognise, capture, finish, contents, check, check_part, numbers, ways, prepare, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

/// The options of all sockets found so far but those of TCP sockets that only unconnected ones have: reading them takes
/// most of a socket's time, so several threads do. What cannot be read is left out, and is refused when its turn comes.
fn read_ahead(s: &Session<'_>) -> HashMap<DescId, Options> {
    let is_socket = |found: &Found| found.stat.st_mode & libc::S_IFMT == libc::S_IFSOCK && found.flags & libc::O_PATH == 0;
    let sights = s.found.iter().enumerate().filter(|(_, found)| is_socket(found));
    let sights: Vec<_> = sights.filter_map(|(id, found)| Some((id, s.sight(found)?))).collect();
    let pieces: Vec<_> = sights.chunks(PIECE).collect();
    let read = |(id, (pidfd, number)): &(DescId, (BorrowedFd<'_>, RawFd))| {
        let own = pidfd::getfd(*pidfd, *number).ok()?;
        Some((*id, capture(own.as_raw_fd(), true).ok()?))
    };
    let read = spread::each(pieces, |piece| piece.iter().filter_map(read).collect::<Vec<_>>());
    read.into_iter().flatten().collect()
}

/// The options of socket `id`, which has a connection of TCP, or tries to have one, if it is `connected`.
pub(crate) fn of(s: &mut Session<'_>, (id, raw): (DescId, RawFd), connected: bool) -> Result<Options, Fault> {
    let Some(mut options) = s.sets.of::<Known>().0.remove(&id) else {
        return capture(raw, connected);
    };
    if !connected {
        options.values.extend(read(raw, Sort::of(raw, false)?, |who| {
            matches!(who, Who::Listed | Who::Steered)
        })?);
    }
    Ok(options)
}

/// Reads all options of a socket.
pub(crate) fn capture(raw: RawFd, connected: bool) -> Result<Options, Fault> {
    let values = read(raw, Sort::of(raw, connected)?, |_| true)?;
    let opt = |o| sock::get::<i32>(raw, libc::SOL_SOCKET, o).at("read its buffers");
    // Kernels before 5.14 do not tell; there a size that differs from a fresh socket's is taken for chosen.
    let lock = sock::get::<i32>(raw, libc::SOL_SOCKET, SO_BUF_LOCK).unwrap_or(3);
    let chosen = |bit: i32, option: i32| if lock & bit == 0 { Ok(0) } else { opt(option) };
    Ok(Options {
        values,
        buffers: (chosen(1, libc::SO_SNDBUF)?, chosen(2, libc::SO_RCVBUF)?),
        belongs: Some(Belongs::from(&fd::fstat(raw).at("stat")?)),
    })
}

/// Reads the options that such a socket has, of those that are `wanted`.
fn read(raw: RawFd, sort: Sort, wanted: impl Fn(Who) -> bool) -> Result<Vec<(i32, i32, Vec<u8>)>, Fault> {
    let mut values = Vec::new();
    let mut buf = [0u8; LONGEST];
    for entry in TABLE.iter().filter(|e| wanted(e.who) && e.who.are(sort)) {
        let value = if entry.id() == FILTER {
            filter::read(raw)?
        } else {
            // An option that this kernel or this kind of socket does not have needs no keeping.
            sock::get_into(raw, entry.level, entry.number, &mut buf)
                .ok()
                .map(<[u8]>::to_vec)
        };
        values.extend(value.map(|v| (entry.level, entry.number, v)));
    }
    Ok(values)
}

impl Sort {
    fn of(raw: RawFd, connected: bool) -> Result<Self, Fault> {
        let opt = |o| sock::get::<i32>(raw, libc::SOL_SOCKET, o).at("read its type");
        Ok(Self {
            family: opt(libc::SO_DOMAIN)?,
            protocol: opt(libc::SO_PROTOCOL)?,
            connected,
        })
    }
}

impl Entry {
    fn id(&self) -> (i32, i32) {
        (self.level, self.number)
    }

    /// Gives `raw` this value, where it has another one; says whether it had.
    fn restore(&self, raw: RawFd, value: &[u8], buf: &mut [u8]) -> Result<bool, Fault> {
        if self.id() == FILTER {
            return filter::restore(raw, value);
        }
        // What has no value can only be cleared, and that only where a value can be of any length. SO_TXREHASH has 255
        // while nothing has been chosen.
        let unset =
            value.is_empty() && self.name == "TCP_FASTOPEN_KEY" || value == 255i32.to_ne_bytes() && self.name == "SO_TXREHASH";
        if unset || sock::get_into(raw, self.level, self.number, buf).is_ok_and(|now| now == value) {
            return Ok(false);
        }
        sock::set_bytes(raw, self.level, self.number, value).at(format!("set {}", self.name))?;
        Ok(true)
    }
}

impl Options {
    /// Without what ties it to a network device: for a connection inside this host in place of one that went elsewhere.
    pub(crate) fn of_any_device(&self) -> Self {
        let mut other = self.clone();
        other.values.retain(|(level, option, _)| (*level, *option) != DEVICE);
        other
    }

    /// Whether the socket is of IPv6, and speaks IPv4 too. One that is bound to an address of IPv6 does not any more.
    pub(crate) fn speak_both(&self) -> bool {
        let off = |v: &(i32, i32, Vec<u8>)| (v.0, v.1) == (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) && v.2.iter().all(|b| *b == 0);
        self.values.iter().any(off)
    }

    /// Whether others may have its port too (SO_REUSEPORT).
    pub(crate) fn share_port(&self) -> bool {
        self.are_on(libc::SO_REUSEPORT)
    }

    /// The same of a socket of datagrams (also SO_REUSEADDR).
    pub(crate) fn share_address(&self) -> bool {
        self.share_port() || self.are_on(libc::SO_REUSEADDR)
    }

    fn are_on(&self, option: i32) -> bool {
        let on = |v: &(i32, i32, Vec<u8>)| (v.0, v.1) == (libc::SOL_SOCKET, option) && v.2.iter().any(|b| *b != 0);
        self.values.iter().any(on)
    }

    /// Owner and group of the socket, where they are known.
    pub(crate) fn owner(&self) -> Option<(u32, u32)> {
        self.belongs.map(|belongs| belongs.owner)
    }

    /// Sets the options of one stage, and the owner. The first failure is returned, with the option named, when all others are set.
    pub(crate) fn restore(&self, raw: RawFd, when: When) -> Result<(), Fault> {
        let values: HashMap<(i32, i32), &[u8]> = self.values.iter().map(|(l, o, v)| ((*l, *o), v.as_slice())).collect();
        let wanted = || TABLE.iter().filter(|e| when.sets(e.stage));
        let mut buf = [0u8; LONGEST];
        let mut done = match self.belongs {
            // One that listens is not the socket that is going to be accepted.
            Some(belongs) if when != When::Accepting => belongs.give(raw).at("set its owner and mode"),
            _ => Ok(()),
        };
        let mut changed = false;
        // Once more where anything was set: some change others too.
        for round in 0..2 {
            if round == 1 && !changed {
                break;
            }
            for entry in wanted() {
                if let Some(value) = values.get(&entry.id()) {
                    match entry.restore(raw, value, &mut buf) {
                        Ok(new) => changed |= new,
                        Err(e) => done = done.and(Err(e)),
                    }
                }
            }
        }
        done
    }

    /// Sets some options, given as level and number, ahead of their turn.
    pub(crate) fn restore_ahead(&self, raw: RawFd, some: &[(i32, i32)]) -> Result<(), Fault> {
        let mut wanted = self
            .values
            .iter()
            .filter(|(level, option, _)| some.contains(&(*level, *option)));
        wanted.try_for_each(|(level, option, value)| {
            sock::set_bytes(raw, *level, *option, value).at(format!("set option {option} of level {level}"))
        })
    }

    /// Sets the sizes of the buffers where they differ from a fresh socket's, as far as the system's limits allow.
    pub(crate) fn restore_buffers(&self, raw: RawFd) {
        let (send, receive) = self.buffers;
        for (option, force, want) in [
            (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE, send),
            (libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, receive),
        ] {
            let now = sock::get::<i32>(raw, libc::SOL_SOCKET, option).unwrap_or(want);
            if now == want || want == 0 {
                continue;
            }
            // A buffer that is smaller than before slows a program down and breaks nothing.
            let half = want / 2;
            if sock::set(raw, libc::SOL_SOCKET, force, &half).is_err() {
                if let Err(error) = sock::set(raw, libc::SOL_SOCKET, option, &half) {
                    tracing::debug!(%error, option, "could not set the size of a socket buffer");
                }
            }
        }
        let lock = i32::from(send != 0) | i32::from(receive != 0) << 1;
        if sock::get(raw, libc::SOL_SOCKET, SO_BUF_LOCK).is_ok_and(|now: i32| now != lock) {
            if let Err(error) = sock::set(raw, libc::SOL_SOCKET, SO_BUF_LOCK, &lock) {
                tracing::debug!(%error, "could not say who has chosen the sizes of socket buffers");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::os::fd::AsRawFd;

    #[test]
    fn each_option_is_in_the_table_once() {
        let all: HashSet<_> = TABLE.iter().map(Entry::id).collect();
        assert_eq!(all.len(), TABLE.len());
    }

    #[test]
    fn an_option_that_another_one_changes_too_comes_back() {
        let model = sock::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        for (level, option, value) in [
            (libc::IPPROTO_IP, libc::IP_TOS, 0x28),
            (libc::SOL_SOCKET, libc::SO_PRIORITY, 1),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMP_NEW, 1),
        ] {
            sock::set(model.as_raw_fd(), level, option, &value).unwrap();
        }
        let options = capture(model.as_raw_fd(), false).unwrap();
        let made = sock::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        sock::set(made.as_raw_fd(), libc::SOL_SOCKET, 64, &1i32).unwrap();
        options.restore(made.as_raw_fd(), When::Late).unwrap();
        assert_eq!(capture(made.as_raw_fd(), false).unwrap().values, options.values);
    }
}
