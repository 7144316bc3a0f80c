//! `NETLINK_SOCK_DIAG`: peers, pending connections and shutdown state of sockets. Asking needs no privilege.

use super::sock::{self, Addr};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const SOCK_DESTROY: u16 = 21;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;

const SHOW_NAME: u32 = 1;
const SHOW_VFS: u32 = 2;
const SHOW_PEER: u32 = 4;
const SHOW_ICONS: u32 = 8;
const SHOW_RQLEN: u32 = 0x10;

const ATTR_VFS: u16 = 1;
const ATTR_PEER: u16 = 2;
const ATTR_ICONS: u16 = 3;
const ATTR_RQLEN: u16 = 4;
const ATTR_SHUTDOWN: u16 = 6;
/// The same of an internet socket.
const INET_SHUTDOWN: u16 = 8;

/// What the kernel says about a `AF_UNIX` socket.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnixSocket {
    /// Inode of the peer, 0 when it has been closed; `None` when there is no peer.
    pub(crate) peer: Option<u32>,
    /// Inodes of the sockets that wait to be accepted, in order; 0 for one that has been closed since.
    pub(crate) pending: Vec<u32>,
    /// For a listening socket: its backlog limit.
    pub(crate) backlog: u32,
    /// Bit 0: no more reading, bit 1: no more writing.
    pub(crate) shutdown: u8,
    /// Inode of the file it is bound to.
    pub(crate) file: Option<u32>,
}

impl UnixSocket {
    /// From a `struct unix_diag_msg` and its attributes.
    fn parse(msg: &[u8]) -> io::Result<Self> {
        const TCP_LISTEN: u8 = 10;
        let mut out = Self::default();
        let listening = msg.get(2) == Some(&TCP_LISTEN);
        let mut attrs = msg.get(16..).ok_or_else(short)?;
        while attrs.len() >= 4 {
            let len = (u16_at(attrs, 0)? as usize).clamp(4, attrs.len());
            let data = &attrs[4..len];
            match u16_at(attrs, 2)? {
                ATTR_PEER => out.peer = Some(u32_at(data, 0)?),
                ATTR_ICONS => {
                    out.pending = data
                        .chunks_exact(4)
                        .map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
                        .collect();
                }
                ATTR_RQLEN if listening => out.backlog = u32_at(data, 4)?,
                ATTR_SHUTDOWN => out.shutdown = *data.first().ok_or_else(short)?,
                ATTR_VFS => out.file = Some(u32_at(data, 0)?),
                _ => {}
            }
            attrs = attrs.get(align4(len)..).unwrap_or_default();
        }
        Ok(out)
    }
}

/// A connection of the internet family as a dump lists it.
#[derive(Debug, Clone)]
pub(crate) struct InetSocket {
    /// `TCP_*` state.
    pub(crate) state: u8,
    /// Own address.
    pub(crate) local: Addr,
    /// Peer's address; known to socket diagnosis even while a connection attempt is under way.
    pub(crate) peer: Addr,
    /// Bytes not yet acknowledged by the peer; for a listening socket its backlog limit.
    pub(crate) write_queue: u32,
    /// Time until its timer runs out; in TIME_WAIT that is its end.
    pub(crate) expires: Duration,
    /// Inode, 0 when no descriptor is left.
    pub(crate) inode: u32,
    /// Bit 0: no more reading, bit 1: no more writing.
    pub(crate) shutdown: u8,
    /// `struct inet_diag_sockid`: what the kernel knows it by.
    id: [u8; 48],
}

/// A connection to the kernel's socket diagnosis.
#[derive(Debug)]
pub(crate) struct Diag {
    fd: OwnedFd,
    buf: Vec<u8>,
    /// How many `AF_UNIX` sockets have been asked for.
    asked: u32,
    /// Those that the list of all has shown, by inode, and that have not been asked for since.
    all: HashMap<u32, UnixSocket>,
}

/// From so many `AF_UNIX` sockets on the list of all is asked for: the kernel searches all that there are for each one.
const MANY: u32 = 32;

fn u16_at(raw: &[u8], at: usize) -> io::Result<u16> {
    let b = raw.get(at..at + 2).ok_or_else(short)?;
    Ok(u16::from_ne_bytes([b[0], b[1]]))
}

fn u32_at(raw: &[u8], at: usize) -> io::Result<u32> {
    let b = raw.get(at..at + 4).ok_or_else(short)?;
    Ok(u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}

fn short() -> io::Error {
    io::Error::other("socket diagnosis: answer too short")
}

/// The data of the first attribute of this kind in `msg`, whose attributes begin at `at`.
fn attribute(msg: &[u8], at: usize, kind: u16) -> io::Result<Option<&[u8]>> {
    let mut attrs = msg.get(at..).unwrap_or_default();
    while attrs.len() >= 4 {
        let len = (u16_at(attrs, 0)? as usize).clamp(4, attrs.len());
        if u16_at(attrs, 2)? == kind {
            return Ok(Some(&attrs[4..len]));
        }
        attrs = attrs.get(align4(len)..).unwrap_or_default();
    }
    Ok(None)
}

fn align4(n: usize) -> usize {
    n.div_ceil(4) * 4
}

/// The `AF_UNIX` sockets of everybody. (By a connection of its own, in which nothing is left where that fails.)
fn all_unix_sockets() -> io::Result<HashMap<u32, UnixSocket>> {
    let mut all = HashMap::new();
    Diag::open()?.unix_sockets(0, NLM_F_DUMP, |ino, socket| drop(all.insert(ino, socket)))?;
    Ok(all)
}

impl Diag {
    /// Whether somebody has a socket that is bound to the file with a number that ends in `file`.
    pub(crate) fn is_bound(file: u32) -> io::Result<bool> {
        Ok(all_unix_sockets()?.values().any(|socket| socket.file == Some(file)))
    }

    /// Opens it.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self {
            fd: sock::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_SOCK_DIAG)?,
            buf: vec![0; 256 * 1024],
            asked: 0,
            all: HashMap::new(),
        })
    }

    /// Sends a request and hands the payload of every answer to `take`.
    fn ask(&mut self, (kind, flags): (u16, u16), request: &[u8], mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let len = 16 + request.len();
        let mut msg = Vec::with_capacity(len);
        msg.extend_from_slice(&u32::try_from(len).map_err(io::Error::other)?.to_ne_bytes());
        msg.extend_from_slice(&kind.to_ne_bytes());
        msg.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        msg.extend_from_slice(&[0; 8]);
        msg.extend_from_slice(request);
        sock::send(self.fd.as_raw_fd(), &msg, &[], None)?;
        loop {
            let n = super::fd::read(self.fd.as_raw_fd(), &mut self.buf)?;
            let mut rest = &self.buf[..n];
            while rest.len() >= 16 {
                let len = (u32_at(rest, 0)? as usize).clamp(16, rest.len());
                match u16_at(rest, 4)? {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => {
                        // An acknowledgement is an error without number.
                        return match u32_at(rest, 16)?.cast_signed() {
                            0 => Ok(()),
                            code => Err(io::Error::from_raw_os_error(-code)),
                        };
                    }
                    _ => take(&rest[16..len])?,
                }
                rest = rest.get(align4(len)..).unwrap_or_default();
            }
            if flags & NLM_F_DUMP == 0 {
                return Ok(());
            }
        }
    }

    /// The `AF_UNIX` socket with inode `ino`. One that somebody outside of the job can change is shown as it was at
    /// some moment since this connection was made.
    pub(crate) fn unix(&mut self, ino: u32) -> io::Result<UnixSocket> {
        self.asked += 1;
        if self.asked == MANY {
            self.all = all_unix_sockets().unwrap_or_default();
        }
        if let Some(known) = self.all.remove(&ino) {
            return Ok(known);
        }
        let mut found = UnixSocket::default();
        self.unix_sockets(ino, 0, |_, socket| found = socket)?;
        Ok(found)
    }

    /// Asks for the `AF_UNIX` socket with inode `ino`, or with [`NLM_F_DUMP`] for all, and hands each with its inode to `take`.
    fn unix_sockets(&mut self, ino: u32, flags: u16, mut take: impl FnMut(u32, UnixSocket)) -> io::Result<()> {
        let mut req = vec![libc::AF_UNIX as u8, 0, 0, 0];
        for v in [
            u32::MAX,
            ino,
            SHOW_NAME | SHOW_VFS | SHOW_PEER | SHOW_ICONS | SHOW_RQLEN,
            u32::MAX,
            u32::MAX,
        ] {
            req.extend_from_slice(&v.to_ne_bytes());
        }
        self.ask((SOCK_DIAG_BY_FAMILY, flags), &req, |msg| {
            take(u32_at(msg, 4)?, UnixSocket::parse(msg)?);
            Ok(())
        })
    }

    /// All sockets of `family` (AF_INET or AF_INET6) and protocol TCP whose state is in the bit set `states`.
    pub(crate) fn tcp(&mut self, family: i32, states: u32) -> io::Result<Vec<InetSocket>> {
        self.internet(family, libc::IPPROTO_TCP, states)
    }

    /// The same of another protocol.
    pub(crate) fn internet(&mut self, family: i32, protocol: i32, states: u32) -> io::Result<Vec<InetSocket>> {
        let mut req = vec![family as u8, protocol as u8, 0, 0];
        req.extend_from_slice(&states.to_ne_bytes());
        req.extend_from_slice(&[0; 48]);
        let mut out = Vec::new();
        self.ask((SOCK_DIAG_BY_FAMILY, NLM_F_DUMP), &req, |msg| {
            let be = |at: usize| -> io::Result<u16> { u16_at(msg, at).map(u16::from_be) };
            let host = |at: usize| msg.get(at..at + 16).and_then(|b| b.try_into().ok()).ok_or_else(short);
            out.push(InetSocket {
                state: *msg.get(1).ok_or_else(short)?,
                local: Addr::internet(family, be(4)?, host(8)?, u32_at(msg, 40)?),
                peer: Addr::internet(family, be(6)?, host(24)?, u32_at(msg, 40)?),
                expires: Duration::from_millis(u32_at(msg, 52)?.into()),
                write_queue: u32_at(msg, 60)?,
                inode: u32_at(msg, 68)?,
                shutdown: attribute(msg, 72, INET_SHUTDOWN)?
                    .and_then(|a| a.first().copied())
                    .unwrap_or(0),
                id: msg.get(4..52).and_then(|b| b.try_into().ok()).ok_or_else(short)?,
            });
            Ok(())
        })?;
        Ok(out)
    }

    /// Whether [`Diag::destroy`] can take sockets away: this user may, and this kernel knows how.
    pub(crate) fn may_destroy(&mut self) -> bool {
        let mut nobody = vec![libc::AF_INET as u8, libc::IPPROTO_TCP as u8, 0, 0];
        nobody.extend_from_slice(&[0; 52]);
        let tried = self.ask((SOCK_DESTROY, NLM_F_ACK), &nobody, |_| Ok(()));
        let known = tried.is_err_and(|e| e.raw_os_error() == Some(libc::ENOENT));
        // This needs the same right, and does no harm.
        let size = sock::get::<i32>(self.fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap_or(0) / 2;
        known && sock::set(self.fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &size).is_ok()
    }

    /// Takes a TCP socket of `family` away from whoever has it; needs CAP_NET_ADMIN.
    pub(crate) fn destroy(&mut self, family: i32, socket: &InetSocket) -> io::Result<()> {
        let mut req = vec![family as u8, libc::IPPROTO_TCP as u8, 0, 0];
        req.extend_from_slice(&(1u32 << socket.state).to_ne_bytes());
        req.extend_from_slice(&socket.id);
        self.ask((SOCK_DESTROY, NLM_F_ACK), &req, |_| Ok(()))
    }
}
