//! Connections between processes on different nodes of a job.
//!
//! Capture: each node tells the addresses and counters of its ends; an end whose other end is told of elsewhere is one
//! of a pair. The receiving node waits until all has arrived that can arrive, keeps what it holds and tells how much
//! that was; the sending node keeps the rest, from its send queue. Rebuild: one end listens at an address that it tells
//! the others, the other end connects; then each end sends what its peer had not read.

use super::info::{Counters, End};
use super::seen::{has_sent_fin, Seen};
use super::unread::{token, Shelf, Unread, TOKEN_BYTES};
use super::{connection, drain, Role, TcpState, TCP_LISTEN};
use crate::builder::Builder;
use crate::fault::{refuse, At, Fault};
use crate::group::{Brought, Facts, Group};
use crate::model::{DescId, Description};
use crate::session::{Session, Taken};
use crate::sockets::names::{Book, Page, Share};
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use rustix::net::Shutdown;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// How long nothing may arrive before a receiver's window counts as full.
const STALL: Duration = Duration::from_millis(60);
/// Longest wait for what is under way.
const ARRIVAL: Duration = Duration::from_secs(2);
/// Longest wait for the other ends at a restart.
const REUNION: Duration = Duration::from_secs(30);
/// Of those that have connected and said nothing yet so many are waited for, the newest.
const MOST_SILENT: usize = 256;
/// So many are let in before they are listened to.
const AT_ONCE: usize = 64;

fn odd(reason: impl std::fmt::Display) -> Fault {
    Fault::Refused(reason.to_string())
}

fn passing(reason: String) -> Fault {
    Fault::Passing(reason)
}

fn name(at: &Addr) -> String {
    at.ip().map_or_else(String::new, |ip| format!("{ip} {}", at.port()))
}

fn is_local(at: &Addr) -> bool {
    at.ip().is_none_or(|ip| ip.is_loopback() || ip.is_unspecified())
}

/// An end whose other end is not on this node.
struct Candidate {
    id: DescId,
    mine: String,
    theirs: String,
    peer: Addr,
    counters: Counters,
    closing: bool,
    closed: bool,
}

impl Candidate {
    /// The end, held by the agent as `taken`.
    fn end(&self, taken: &Taken) -> End {
        End {
            raw: taken.raw(),
            closing: self.closing,
        }
    }
}

/// Finds the connections that lead to other nodes of the job and keeps what is in flight on them; the rest of `capture`
/// leaves these alone.
pub(super) fn capture(
    s: &mut Session<'_>,
    group: &dyn Group,
    sockets: &[Seen],
    descriptions: &mut [Description],
    is_pair: impl Fn(&Seen) -> bool,
) -> Result<HashSet<DescId>, (DescId, Fault)> {
    let own = belay_kernel::net::addresses();
    let mut publish = Facts::new();
    let mut want = BTreeSet::new();
    let mut candidates = Vec::new();
    for t in sockets {
        if t.state == TCP_LISTEN {
            for ip in own
                .iter()
                .filter(|ip| t.local.ip() == Some(**ip) || t.local.ip().is_some_and(|l| l.is_unspecified()))
            {
                publish.insert(format!("listen {ip} {}", t.local.port()), String::new());
            }
        }
        let (Some(peer), false) = (&t.peer, t.is_unconnected()) else {
            continue;
        };
        if is_local(peer) || is_pair(t) {
            continue;
        }
        let taken = s.take(t.id).map_err(|e| (t.id, e))?;
        let end = End {
            raw: taken.raw(),
            closing: has_sent_fin(&descriptions[t.id]),
        };
        let counters = push(end.raw)
            .and_then(|()| Counters::of(end))
            .at("read its counters")
            .map_err(|e| (t.id, e))?;
        let (mine, theirs) = (name(&t.local), name(peer));
        let told = serde_json::to_string(&counters).map_err(|e| (t.id, odd(e)))?;
        publish.insert(format!("tcp {mine} - {theirs}"), told);
        want.insert(format!("tcp {theirs} - {mine}"));
        want.insert(format!("listen {theirs}"));
        candidates.push(Candidate {
            id: t.id,
            mine,
            theirs,
            peer: peer.clone(),
            counters,
            closing: end.closing,
            closed: t.is_closed_by_peer(),
        });
    }
    let first = candidates.first().map_or(0, |c| c.id);
    let facts = meet(group, publish, want).map_err(|e| (first, e))?;
    let mut remote = Vec::new();
    for c in candidates {
        match facts.get(&format!("tcp {} - {}", c.theirs, c.mine)) {
            Some(told) => {
                let other: Counters = serde_json::from_str(told).map_err(|e| (c.id, odd(e)))?;
                remote.push((c, other));
            }
            None if facts.contains_key(&format!("listen {}", c.theirs)) && !c.closed => {
                return Err((c.id, passing(format!("{} has not accepted this connection yet", c.peer))));
            }
            None => {}
        }
    }
    keep(s, group, descriptions, &remote)?;
    for (c, _) in &remote {
        if let Some(t) = descriptions[c.id].kind.get_mut::<TcpState>() {
            t.role = Role::Remote;
        }
    }
    Ok(remote.into_iter().map(|(c, _)| c.id).collect())
}

fn meet(group: &dyn Group, publish: Facts, want: BTreeSet<String>) -> Result<Facts, Fault> {
    let brought = Brought {
        publish,
        want,
        ..Brought::default()
    };
    group.meet(brought).map_err(odd)
}

/// Sends off what waits only for more to be sent with it.
fn push(raw: RawFd) -> io::Result<()> {
    let delay: i32 = sock::get(raw, libc::IPPROTO_TCP, libc::TCP_NODELAY)?;
    sock::set(raw, libc::IPPROTO_TCP, libc::TCP_NODELAY, &1i32)?;
    sock::set(raw, libc::IPPROTO_TCP, libc::TCP_NODELAY, &delay)
}

/// Keeps what has arrived at this node, and of what this node has sent that which has not arrived.
fn keep(
    s: &mut Session<'_>,
    group: &dyn Group,
    descriptions: &mut [Description],
    remote: &[(Candidate, Counters)],
) -> Result<(), (DescId, Fault)> {
    let mut publish = Facts::new();
    let mut want = BTreeSet::new();
    for (c, other) in remote {
        let named = |e: Fault| (c.id, e);
        let taken = s.take(c.id).map_err(&named)?;
        let end = c.end(&taken);
        await_arrival(end, other).at("wait for what is under way").map_err(&named)?;
        let (data, there) = drain::arrived(end).map_err(&named)?;
        if let (Some(t), false) = (descriptions[c.id].kind.get_mut::<TcpState>(), data.is_empty()) {
            t.received = Some(s.blobs.put(&data).map_err(|e| named(e.into()))?);
        }
        publish.insert(format!("got {} - {}", c.mine, c.theirs), there.received.to_string());
        want.insert(format!("got {} - {}", c.theirs, c.mine));
    }
    let first = remote.first().map_or(0, |(c, _)| c.id);
    let facts = meet(group, publish, want).map_err(|e| (first, e))?;
    for (c, other) in remote {
        let named = |e: Fault| (c.id, e);
        let got = facts
            .get(&format!("got {} - {}", c.theirs, c.mine))
            .and_then(|n| n.parse::<i64>().ok());
        let got = got.ok_or_else(|| named(odd("its other end told nothing of what it received")))?;
        let there = Counters { received: got, ..*other };
        let left = c.counters.undelivered(&there).map_err(&named)?;
        if left == 0 {
            continue;
        }
        let taken = s.take(c.id).map_err(&named)?;
        let held = match drain::peek_sent(taken.raw()) {
            Ok(held) => held,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                let reason = format!("{left} bytes wait for a reader on another host, which cannot be read without CAP_NET_ADMIN");
                return Err(named(passing(reason)));
            }
            Err(e) => {
                let reason = format!("read the send queue: {e}");
                return Err(named(passing(reason)));
            }
        };
        let Some(at) = held.len().checked_sub(left) else {
            let reason = format!(
                "{left} bytes had not arrived, of which {} are left: more arrived meanwhile",
                held.len()
            );
            return Err(named(passing(reason)));
        };
        let stored = s.blobs.put(&held[at..]).map_err(|e| named(e.into()))?;
        if let Some(t) = descriptions[c.id].kind.get_mut::<TcpState>() {
            t.unsent = Some(stored);
        }
    }
    Ok(())
}

/// Waits until all that `other` has sent has arrived, or nothing more arrives because the window is full.
fn await_arrival(end: End, other: &Counters) -> io::Result<()> {
    let begin = Instant::now();
    let mut last = (Counters::of(end)?.received, Instant::now());
    while begin.elapsed() < ARRIVAL && last.1.elapsed() < STALL {
        let now = Counters::of(end)?;
        if other.undelivered(&now).is_ok_and(|n| n == 0) {
            return Ok(());
        }
        if now.received != last.0 {
            last = (now.received, Instant::now());
        }
        fd::wait(end.raw, 0, 1)?;
    }
    Ok(())
}

/// One connection to be made again.
struct Reunion<'a> {
    id: DescId,
    state: &'a TcpState,
    mine: String,
    theirs: String,
}

impl Reunion<'_> {
    fn serves(&self) -> bool {
        self.mine < self.theirs
    }
}

/// Tells the other nodes what listens here, and learns what listens there.
pub(super) fn book(b: &Builder<'_>, own: Page, inner: HashSet<u16>) -> Result<Book, Fault> {
    let Some(group) = b.group else {
        return Ok(Book::new(own, Vec::new(), inner));
    };
    let mine = format!("page {}", token().at("make a token")?);
    let text = serde_json::to_string(&own).map_err(odd)?;
    let facts = meet(
        group,
        Facts::from([(mine.clone(), text)]),
        BTreeSet::from(["page *".to_owned()]),
    )?;
    let others = facts.iter().filter(|(name, _)| **name != mine);
    let others = others.map(|(_, text)| serde_json::from_str(text).map_err(odd));
    Ok(Book::new(own, others.collect::<Result<_, _>>()?, inner))
}

/// Makes the ends of connections to other nodes.
pub(super) fn rebuild(b: &mut Builder<'_>, all: &[(DescId, TcpState)]) -> Result<(), (DescId, Fault)> {
    let Some(group) = b.group else { return Ok(()) };
    let first = all.first().map_or(0, |(id, _)| *id);
    let shelf = Shelf::open(b.blobs.path())
        .at("give out data in flight")
        .map_err(|e| (first, e))?;
    // The thread is gone before anything is forked.
    std::thread::scope(|scope| {
        scope.spawn(|| shelf.serve());
        let made = rebuild_with(b, all, group, &shelf);
        shelf.close();
        made
    })
}

fn rebuild_with(b: &mut Builder<'_>, all: &[(DescId, TcpState)], group: &dyn Group, shelf: &Shelf) -> Result<(), (DescId, Fault)> {
    let ends: Vec<Reunion<'_>> = all
        .iter()
        .filter(|(_, t)| t.role == Role::Remote)
        .map(|(id, t)| Reunion {
            id: *id,
            state: t,
            mine: name(&t.local),
            theirs: t.peer.as_ref().map_or_else(String::new, name),
        })
        .collect();
    let first = ends.first().map_or(0, |e| e.id);
    let named = |e: Fault| (first, e);
    // By family and the ports that they may have.
    let mut listeners: HashMap<(i32, Option<Share>), OwnedFd> = HashMap::new();
    let mut tokens: HashMap<String, DescId> = HashMap::new();
    let (mut publish, mut want) = (Facts::new(), BTreeSet::new());
    for e in &ends {
        if let Some(received) = &e.state.received {
            let unread = shelf.offer(*received).at("give out data in flight").map_err(named)?;
            let text = serde_json::to_string(&unread).map_err(|e| named(odd(e)))?;
            publish.insert(format!("unread {} - {}", e.mine, e.theirs), text);
        }
        want.insert(format!("unread {} - {}", e.theirs, e.mine));
        if !e.serves() {
            want.insert(format!("at {} - {}", e.theirs, e.mine));
            continue;
        }
        let family = e.state.family;
        let kind = (family, e.state.share(b.book.as_ref()));
        if let std::collections::hash_map::Entry::Vacant(slot) = listeners.entry(kind) {
            let listener = connection::anywhere(family, kind.1).map_err(named)?;
            sock::listen(listener.as_raw_fd(), 4096).at("listen").map_err(named)?;
            slot.insert(listener);
        }
        let port = sock::local(listeners[&kind].as_raw_fd())
            .at("read an address")
            .map_err(named)?
            .port();
        let token = token().at("make a token").map_err(named)?;
        let own = belay_kernel::net::addresses().into_iter();
        let reachable: Vec<SocketAddr> = own
            .filter(|ip| ip.is_ipv4() || family == libc::AF_INET6)
            .map(|ip| SocketAddr::from((ip, port)))
            .collect();
        let text = serde_json::to_string(&(reachable, &token)).map_err(|e| named(odd(e)))?;
        publish.insert(format!("at {} - {}", e.mine, e.theirs), text);
        tokens.insert(token, e.id);
    }
    let facts = meet(group, publish, want).map_err(named)?;
    for e in ends.iter().filter(|e| !e.serves()) {
        let told = facts.get(&format!("at {} - {}", e.theirs, e.mine));
        let fd = match told {
            Some(told) => connect(e.state, told, e.state.share(b.book.as_ref())).map_err(|f| (e.id, f))?,
            None => return Err((e.id, odd("its other end was not restored on any node"))),
        };
        b.put(e.id, fd).map_err(|f| (e.id, f))?;
    }
    accept_all(&listeners, &mut tokens, b).map_err(named)?;
    for e in &ends {
        if let Some(fd) = b.lend(e.id).map_err(|f| (e.id, f))? {
            drain::grow_receiver(fd.raw());
        }
    }
    // Every receiver has room now.
    meet(group, Facts::new(), BTreeSet::new()).map_err(named)?;
    for e in &ends {
        let Some(fd) = b.lend(e.id).map_err(|f| (e.id, f))? else {
            continue;
        };
        let unread = facts.get(&format!("unread {} - {}", e.theirs, e.mine));
        refill(b, e, fd.raw(), unread).map_err(|f| (e.id, f))?;
    }
    // Everybody has got what they asked for.
    meet(group, Facts::new(), BTreeSet::new()).map_err(named).map(drop)
}

/// Sends what the peer had not read, and what had not even left.
fn refill(b: &Builder<'_>, e: &Reunion<'_>, raw: RawFd, unread: Option<&String>) -> Result<(), Fault> {
    let mut data = Vec::new();
    if let Some(text) = unread {
        data = serde_json::from_str::<Unread>(text).map_err(odd)?.get()?;
    }
    if let Some(unsent) = &e.state.unsent {
        data.extend_from_slice(&b.blobs.get(unsent)?);
    }
    drain::put_back(raw, raw, &data)?;
    if e.state.sent_fin {
        sock::shutdown(raw, Shutdown::Write).at("shut writing down")?;
    }
    Ok(())
}

fn limit(fd: RawFd, option: i32, time: Duration) -> io::Result<()> {
    let value = libc::timeval {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_usec: 0,
    };
    sock::set(fd, libc::SOL_SOCKET, option, &value)
}

/// Where the other end of a connection is waited for, and the token that says which connection it is.
pub(crate) type Told = (Vec<SocketAddr>, String);

/// Connects to the first of the told addresses that answers, and says which connection this is.
fn connect(t: &TcpState, told: &str, share: Option<Share>) -> Result<OwnedFd, Fault> {
    let (addresses, token): Told = serde_json::from_str(told).map_err(odd)?;
    let mut failed = io::Error::other("no address");
    for to in addresses {
        let fd = connection::anywhere(t.family, share)?;
        limit(fd.as_raw_fd(), libc::SO_SNDTIMEO, REUNION / 6).at("set a time limit")?;
        match sock::connect(fd.as_raw_fd(), &Addr::of(to, t.family)) {
            Ok(()) => {
                sock::send(fd.as_raw_fd(), token.as_bytes(), &[], None).at("say which connection this is")?;
                limit(fd.as_raw_fd(), libc::SO_SNDTIMEO, Duration::ZERO).at("set a time limit")?;
                return Ok(fd);
            }
            Err(e) => failed = e,
        }
    }
    Err(failed).at("connect to its other end")
}

/// Accepts until every token has come.
fn accept_all(
    listeners: &HashMap<(i32, Option<Share>), OwnedFd>,
    tokens: &mut HashMap<String, DescId>,
    b: &mut Builder<'_>,
) -> Result<(), Fault> {
    let begin = Instant::now();
    let mut visitors: Vec<Visitor> = Vec::new();
    while !tokens.is_empty() {
        if begin.elapsed() > REUNION {
            return refuse(format!("{} connections from other nodes did not come", tokens.len()));
        }
        let is_ready = |listener: &OwnedFd, ms| fd::wait(listener.as_raw_fd(), libc::POLLIN, ms).at("poll");
        for listener in listeners.values() {
            let mut room = AT_ONCE;
            while room > 0 && is_ready(listener, 0)? {
                visitors.push(Visitor::new(sock::accept(listener.as_raw_fd()).at("accept")?));
                room -= 1;
            }
        }
        for mut visitor in std::mem::take(&mut visitors) {
            match visitor.hear() {
                Heard::Nothing if visitor.since.elapsed() < REUNION / 6 => visitors.push(visitor),
                Heard::Token(token) => {
                    if let Some(id) = tokens.remove(&token) {
                        b.put(id, visitor.fd)?;
                    }
                }
                Heard::Nothing | Heard::End => {}
            }
        }
        let too_many = visitors.len().saturating_sub(MOST_SILENT);
        visitors.drain(..too_many);
        // Until there are more at any of them, or it is time to look.
        let ms = if visitors.is_empty() { 10 } else { 1 };
        for listener in listeners.values() {
            if !tokens.is_empty() && is_ready(listener, ms)? {
                break;
            }
        }
    }
    Ok(())
}

/// Who has connected, and has not said all of its token: another node, or a stranger, who takes no time from others.
struct Visitor {
    fd: OwnedFd,
    token: Vec<u8>,
    since: Instant,
}

enum Heard {
    Nothing,
    Token(String),
    /// It has gone, or says something else.
    End,
}

impl Visitor {
    fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            token: Vec::new(),
            since: Instant::now(),
        }
    }

    /// Takes what it has said, without waiting.
    fn hear(&mut self) -> Heard {
        match fd::wait(self.fd.as_raw_fd(), libc::POLLIN, 0) {
            Ok(true) => {}
            Ok(false) => return Heard::Nothing,
            Err(_) => return Heard::End,
        }
        let mut more = vec![0u8; TOKEN_BYTES - self.token.len()];
        match sock::receive(self.fd.as_raw_fd(), &mut more, 0) {
            Ok(r) if r.len > 0 => self.token.extend_from_slice(&more[..r.len]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Ok(_) | Err(_) => return Heard::End,
        }
        if self.token.len() < TOKEN_BYTES {
            return Heard::Nothing;
        }
        String::from_utf8(std::mem::take(&mut self.token)).map_or(Heard::End, Heard::Token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn nobody_waits_for_who_says_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut visitor = Visitor::new(listener.accept().unwrap().0.into());
        let token = "t".repeat(TOKEN_BYTES);
        let begin = Instant::now();
        assert!(matches!(visitor.hear(), Heard::Nothing));
        let mut heard = |visitor: &mut Visitor, text: &[u8]| {
            other.write_all(text).unwrap();
            assert!(fd::wait(visitor.fd.as_raw_fd(), libc::POLLIN, 1000).unwrap());
            visitor.hear()
        };
        assert!(matches!(heard(&mut visitor, &token.as_bytes()[..5]), Heard::Nothing));
        assert!(matches!(heard(&mut visitor, &token.as_bytes()[5..]), Heard::Token(t) if t == token));
        // Data of the connection may follow.
        assert!(matches!(heard(&mut visitor, &[0xff; TOKEN_BYTES]), Heard::End));
        assert!(begin.elapsed() < REUNION / 6);
        drop(other);
        assert!(fd::wait(visitor.fd.as_raw_fd(), libc::POLLIN, 1000).unwrap());
        assert!(matches!(visitor.hear(), Heard::End));
    }
}
