//! Capture of TCP sockets. Ends of one connection find each other by their addresses; then data is read, see `drain`.

use super::info::{End, Failure, Info};
use super::seen::{has_sent_fin, Seen, CLOSE_WAIT, CLOSING, ESTABLISHED, FIN_WAIT1, FIN_WAIT2, LAST_ACK, SYN_SENT};
use super::{drain, remote, requeue, Role, TcpState, TCP_CLOSE as CLOSE, TCP_LISTEN};
use crate::fault::{not_now, refuse, At, Fault};
use crate::model::{DescId, Description, Holder};
use crate::mpi::{DAEMONS, LAUNCHERS};
use crate::session::Session;
use crate::sockets::options;
use crate::sys::diag::InetSocket;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Options of TCP.
/// So long the rest of what closed ends have sent is let in, of one connection after the other.
const LATE: Duration = Duration::from_millis(500);
const TCP_REPAIR: i32 = 19;
const TCP_ULP: i32 = 31;
const TCP_AO_INFO: i32 = 40;

/// TCP sockets found so far.
#[derive(Debug, Default)]
pub(super) struct TcpSet {
    sockets: Vec<Seen>,
    /// See [`may_destroy`].
    may_destroy: Option<bool>,
}

/// Captures addresses, state and options.
pub(super) fn capture(s: &mut Session<'_>, id: DescId, raw: RawFd) -> Result<TcpState, Fault> {
    let info = Info::of(raw).at("read its state (TCP_INFO)")?;
    let local = sock::local(raw).at("read its address")?;
    let peer = match sock::peer(raw).at("read its peer")? {
        None if info.state == SYN_SENT => attempted(s, id, &local)?,
        peer => peer,
    };
    let hangup = fd::poll(raw, libc::POLLRDHUP).at("poll")?;
    let no_more = hangup & libc::POLLRDHUP != 0;
    let dead = info.state == CLOSE && no_more;
    unknown_state(raw)?;
    let role = match info.state {
        TCP_LISTEN => Role::Listening(i32::try_from(info.backlog).unwrap_or(i32::MAX)),
        SYN_SENT => Role::Connecting,
        CLOSE if dead => ended(&info, hangup & libc::POLLERR != 0)?,
        CLOSE => Role::Unconnected,
        // Until `finish` finds the other end.
        _ => Role::Reset,
    };
    if info.state != CLOSE && !may_destroy(s)? {
        keep_port_available(raw)?;
    }
    let set: &mut TcpSet = s.sets.of();
    set.sockets.push(Seen {
        id,
        state: info.state,
        local: local.clone(),
        peer: peer.clone(),
        data_segments_sent: info.data_segments_sent,
        waiting: if info.state == TCP_LISTEN { info.waiting } else { 0 },
    });
    Ok(TcpState {
        family: sock::get(raw, libc::SOL_SOCKET, libc::SO_DOMAIN).at("read its type")?,
        local,
        peer,
        role,
        sent_fin: matches!(role, Role::Reset | Role::PeerClosed) && dead
            || matches!(info.state, FIN_WAIT1 | FIN_WAIT2 | LAST_ACK | CLOSING),
        received_fin: no_more,
        received: None,
        early: None,
        unsent: None,
        since: 0,
        options: options::of(s, (id, raw), !matches!(info.state, CLOSE | TCP_LISTEN))?,
    })
}

/// What a socket without connection is that had one, or tried to have one; an error may wait to be told. (To ask for it
/// would take it away.)
fn ended(info: &Info, error: bool) -> Result<Role, Fault> {
    match (info.failure(), error) {
        (None, true) => Ok(Role::Reset),
        (None, false) => Ok(Role::PeerClosed),
        // It was shut down for all that.
        (Some(Failure::Untried), _) => Ok(Role::Unconnected),
        (Some(Failure::Refused), true) => Ok(Role::Refused),
        (Some(_), false) => Ok(Role::Failed),
        (Some(Failure::Unanswered), true) => {
            not_now("an attempt to connect has failed, and the program has not asked yet how, which nobody else can")
        }
    }
}

/// Refuses what a connection can have that nobody can give it again.
fn unknown_state(raw: RawFd) -> Result<(), Fault> {
    let protocol = sock::get_bytes(raw, libc::IPPROTO_TCP, TCP_ULP, 16).unwrap_or_default();
    if let [name @ .., 0] = protocol.as_slice() {
        let name = String::from_utf8_lossy(name);
        return refuse(format!(
            "uses {} in the kernel (TCP_ULP), whose state cannot be saved; run the program without it",
            name.trim_end_matches('\0')
        ));
    }
    if sock::get::<i32>(raw, libc::IPPROTO_TCP, TCP_REPAIR).unwrap_or(0) != 0 {
        return refuse("is being repaired (TCP_REPAIR), which cannot be saved");
    }
    if sock::get_bytes(raw, libc::IPPROTO_TCP, TCP_AO_INFO, 64).is_ok() {
        return refuse("has keys of TCP_AO, which the kernel does not give out; run the program without it");
    }
    Ok(())
}

/// Whom socket `id` tries to connect to: `getpeername` tells only when it has succeeded.
fn attempted(s: &mut Session<'_>, id: DescId, local: &Addr) -> Result<Option<Addr>, Fault> {
    let inode = s.found[id].stat.st_ino;
    let all = s.diag()?.tcp(local.family(), 1 << SYN_SENT);
    let all = all.at("ask the kernel for its peer (sock_diag)")?;
    Ok(all.into_iter().find(|o| u64::from(o.inode) == inode).map(|o| o.peer))
}

/// Whether a restart by this user can take away what the killed job has left in TIME_WAIT.
fn may_destroy(s: &mut Session<'_>) -> Result<bool, Fault> {
    if let Some(known) = s.sets.of::<TcpSet>().may_destroy {
        return Ok(known);
    }
    let may = s.diag()?.may_destroy();
    s.sets.of::<TcpSet>().may_destroy = Some(may);
    Ok(may)
}

/// Sets SO_REUSEADDR, before the options are recorded.
///
/// When the job is killed, its connections linger in TIME_WAIT for a minute. Where they cannot be taken away, such a
/// connection lets its port be bound again only if it had this option itself, so a restart within that minute depends
/// on it. Sockets accepted from one that listens inherit it. One that is only bound does without: whoever has the option
/// too could bind its port as well, and listen there first.
fn keep_port_available(raw: RawFd) -> Result<(), Fault> {
    sock::set(raw, libc::SOL_SOCKET, libc::SO_REUSEADDR, &1i32).at("set SO_REUSEADDR")
}

/// A connection as one end sees it.
type Tuple = (Option<IpAddr>, u16, Option<IpAddr>, u16);

fn tuple(local: &Addr, peer: &Addr) -> Tuple {
    (local.ip(), local.port(), peer.ip(), peer.port())
}

/// Finds the other ends, then reads what is in flight.
pub(super) fn finish(s: &mut Session<'_>, descriptions: &mut [Description]) -> Result<(), (Holder, String, Fault)> {
    let sockets = s.sets.of::<TcpSet>().sockets.clone();
    let by_tuple: HashMap<Tuple, usize> = sockets
        .iter()
        .enumerate()
        .filter_map(|(at, t)| Some((tuple(&t.local, t.peer.as_ref()?), at)))
        .collect();
    let is_pair = |t: &Seen| t.peer.as_ref().is_some_and(|p| by_tuple.contains_key(&tuple(p, &t.local)));
    let elsewhere = match s.group {
        None => HashSet::new(),
        Some(group) => remote::capture(s, group, &sockets, descriptions, is_pair)
            .map_err(|(id, e)| (s.found[id].holder, s.found[id].link.display().to_string(), e))?,
    };
    let mut orphans = None;
    let mut pairs = Vec::new();
    // Of one that is not ready yet others hear too: they may be by the next try.
    let (begin, mut late) = (Instant::now(), None);
    for (at, t) in sockets.iter().enumerate() {
        let holder = (s.found[t.id].holder, s.found[t.id].link.display().to_string());
        let named = |e: Fault| (holder.0, holder.1.clone(), e);
        let Some(peer) = &t.peer else { continue };
        if t.is_unconnected() || elsewhere.contains(&t.id) {
            continue;
        }
        let role = match by_tuple.get(&tuple(peer, &t.local)) {
            Some(other) if *other != at => {
                pairs.push((t.id, sockets[*other].id));
                Role::Pair(sockets[*other].id)
            }
            Some(_) => {
                let why = "is a TCP socket that is connected to itself, which cannot be made again; close it before the checkpoint";
                return refuse(why).map_err(named);
            }
            None => {
                let known = match orphans.take() {
                    None => Orphans::list(s).map_err(named)?,
                    Some(known) => known,
                };
                let orphan = orphans.insert(known).other_end(t, peer);
                match alone(s, &sockets, (t, peer), orphan) {
                    Err(e @ Fault::Passing(_)) if begin.elapsed() < LATE => {
                        late.get_or_insert(named(e));
                        continue;
                    }
                    done => done.map_err(named)?,
                }
            }
        };
        if role == Role::Reset {
            let h = s.found[t.id].holder;
            no_daemon_elsewhere(s, t, peer).map_err(named)?;
            s.notes.push(format!(
                "process {}: fd {}: TCP connection {} - {peer} leads outside the job; after a restart it reports ECONNRESET",
                h.pid, h.fd, t.local
            ));
        }
        if let Some(state) = descriptions[t.id].kind.get_mut::<TcpState>() {
            state.role = role;
        }
    }
    if let Some(e) = late {
        return Err(e);
    }
    none_closed(s, &sockets, orphans)?;
    requeue(s, &sockets, descriptions)?;
    for (from, to) in pairs {
        let done = transfer(s, descriptions, from, to);
        done.map_err(|e| (s.found[to].holder, s.found[to].link.display().to_string(), e))?;
    }
    for t in &sockets {
        let alone = matches!(role(&descriptions[t.id]), Some(Role::PeerClosed | Role::Reset));
        if alone {
            let data = s.take(t.id).and_then(|taken| drain::peek(taken.raw()));
            let data = data.map_err(|e| (s.found[t.id].holder, s.found[t.id].link.display().to_string(), e))?;
            store(s, descriptions, t.id, &data).map_err(|e| (s.found[t.id].holder, "data in flight".into(), e))?;
        }
    }
    Ok(())
}

/// Refuses a connection from a program of an MPI launcher's to another host that is no part of the job: a daemon that
/// it has started there was not followed, whatever has carried it.
fn no_daemon_elsewhere(s: &Session<'_>, t: &Seen, peer: &Addr) -> Result<(), Fault> {
    let here = peer.ip() == t.local.ip() || peer.ip().is_none_or(|ip| ip.is_loopback());
    let holder = s.processes.iter().find(|p| p.pid == s.found[t.id].holder.pid);
    let file = holder
        .and_then(|p| p.exe.file_name())
        .and_then(|f| f.to_str())
        .unwrap_or_default();
    if here || t.state != ESTABLISHED || !(DAEMONS.contains(&file) || LAUNCHERS.contains(&file)) {
        return Ok(());
    }
    refuse(format!(
        "{file} is connected to {peer}, which is no part of the job: a daemon of MPI there would be missing at a restart; launch the job with --across-hosts, and let daemons be started by ssh, rsh or srun, found through PATH"
    ))
}

/// The listening sockets by their address: several may share one (SO_REUSEPORT), and the kernel chooses among them.
fn listeners(all: &[Seen]) -> Vec<Vec<&Seen>> {
    let mut groups: Vec<Vec<&Seen>> = Vec::new();
    for l in all.iter().filter(|t| t.state == TCP_LISTEN) {
        match groups.iter_mut().find(|g| g[0].local == l.local) {
            Some(group) => group.push(l),
            None => groups.push(vec![l]),
        }
    }
    groups
}

/// Refuses for the moment a connection that waits to be accepted while its other end, on this host, is closed already:
/// nobody has a descriptor of it, and after a restart there would be no such connection.
fn none_closed(s: &mut Session<'_>, all: &[Seen], orphans: Option<Orphans>) -> Result<(), (Holder, String, Fault)> {
    let waited_for: Vec<&Seen> = all.iter().filter(|t| t.waiting > 0).collect();
    let Some(first) = waited_for.first() else {
        return Ok(());
    };
    let named = |s: &Session<'_>, l: &Seen, e| (s.found[l.id].holder, s.found[l.id].link.display().to_string(), e);
    let orphans = match orphans {
        Some(known) => known,
        None => Orphans::list(s).map_err(|e| named(s, first, e))?,
    };
    let closed = waited_for.iter().find_map(|l| Some((l, orphans.closed_before(l)?)));
    closed.map_or(Ok(()), |(l, o)| {
        let why = format!(
            "the connection from {} waits to be accepted, and has been closed by its other end already",
            o.peer
        );
        Err(named(s, l, Fault::Passing(why)))
    })
}

/// Reads what connections that wait to be accepted carry, where they carry anything.
fn requeue(s: &mut Session<'_>, all: &[Seen], descriptions: &mut [Description]) -> Result<(), (Holder, String, Fault)> {
    for group in listeners(all) {
        let l = group[0];
        let waits = |d: &Description| group.iter().any(|l| role(d) == Some(Role::Waiting(l.id)));
        let clients: Vec<&Seen> = all.iter().filter(|t| waits(&descriptions[t.id])).collect();
        let named = |e: Fault| (s.found[l.id].holder, s.found[l.id].link.display().to_string(), e);
        let carries = |t: &&Seen| {
            let queued = || Some(fd::unsent_bytes(s.take(t.id).ok()?.raw()).unwrap_or(0));
            t.data_segments_sent > 0 || queued().is_some_and(|bytes| bytes > 0)
        };
        if !clients.iter().any(carries) {
            continue;
        }
        let take = |all: &[&Seen]| all.iter().map(|t| s.take(t.id).map_err(named)).collect::<Result<Vec<_>, _>>();
        let (listening, held) = (take(&group)?, take(&clients)?);
        let ends: Vec<requeue::Client> = clients
            .iter()
            .zip(&held)
            .filter_map(|(t, taken)| {
                let state = descriptions[t.id].kind.get::<TcpState>()?;
                Some(requeue::Client {
                    raw: taken.raw(),
                    local: t.local.clone(),
                    peer: t.peer.clone()?,
                    closing: state.sent_fin,
                    deaf: state.received_fin,
                })
            })
            .collect();
        let raw: Vec<RawFd> = listening.iter().map(|l| l.raw()).collect();
        let data = requeue::requeue(&raw, &ends).map_err(named)?;
        drop((listening, held));
        let named = |e: Fault| (s.found[l.id].holder, "data in flight".to_string(), e);
        for (t, data) in clients.iter().zip(data) {
            if let (Some(c), false) = (descriptions[t.id].kind.get_mut::<TcpState>(), data.is_empty()) {
                c.early = Some(s.blobs.put(&data).map_err(|e| named(e.into()))?);
            }
        }
    }
    Ok(())
}

/// What the kernel knows of connections to which no descriptor leads any more, by own port and the peer's.
#[derive(Debug, Default)]
struct Orphans {
    all: HashMap<(u16, u16), Vec<InetSocket>>,
    /// Ends that have a descriptor and send no more.
    shut: HashSet<Tuple>,
}

impl Orphans {
    /// Asks for all of them at once: a job may have thousands of connections that lead outside, and stands still.
    fn list(s: &mut Session<'_>) -> Result<Self, Fault> {
        // All states but SYN_RECV, TIME_WAIT and LISTEN.
        const STATES: u32 = 0xfff & !(1 << 3) & !(1 << 6) & !(1 << TCP_LISTEN);
        let mut out = Self::default();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let all = s.diag()?.tcp(family, STATES);
            for o in all.at("ask the kernel for the other ends (sock_diag)")? {
                if o.inode == 0 {
                    out.all.entry((o.local.port(), o.peer.port())).or_default().push(o);
                } else if matches!(o.state, FIN_WAIT1 | FIN_WAIT2) {
                    out.shut.insert(tuple(&o.local, &o.peer));
                }
            }
        }
        Ok(out)
    }

    /// A connection in the queue of `listener` from this host that has been closed there.
    fn closed_before(&self, listener: &Seen) -> Option<&InetSocket> {
        let here = |o: &InetSocket| o.peer.ip() == o.local.ip() || o.peer.ip().is_some_and(|ip| ip.is_loopback());
        let mut all = self.all.values().flatten().filter(|o| o.state == CLOSE_WAIT && here(o));
        all.find(|o| accepts(listener, &o.local) && !self.shut.contains(&tuple(&o.peer, &o.local)))
    }

    /// The other end of `t`, which is connected to `peer`, where that is on this host.
    fn other_end(&self, t: &Seen, peer: &Addr) -> Option<&InetSocket> {
        let on_this_host = peer.ip() == t.local.ip() || peer.ip().is_some_and(|ip| ip.is_loopback());
        let all = self.all.get(&(peer.port(), t.local.port())).filter(|_| on_this_host)?;
        let alike = all.iter().find(|o| o.peer.family() == t.local.family());
        alike.or_else(|| all.first())
    }
}

/// Whether `l` is a listening socket for connections to `at`.
fn accepts(l: &Seen, at: &Addr) -> bool {
    let any = l.local.ip().is_some_and(|ip| ip.is_unspecified());
    l.state == TCP_LISTEN && l.local.port() == at.port() && (any || l.local.ip() == at.ip())
}

/// What a connected socket is whose other end no process of the job has.
fn alone(s: &mut Session<'_>, all: &[Seen], (t, peer): (&Seen, &Addr), orphan: Option<&InetSocket>) -> Result<Role, Fault> {
    if t.is_closed_by_peer() {
        return Ok(Role::PeerClosed);
    }
    let Some(orphan) = orphan else {
        return Ok(Role::Reset);
    };
    if matches!(orphan.state, FIN_WAIT1 | CLOSING | LAST_ACK) {
        drain::let_in(s.take(t.id)?.raw(), orphan.write_queue as usize)?;
        // What has been seen of the socket holds no more.
        return not_now("the other end has been closed, and the rest of what it sent has just arrived");
    }
    let candidates = || all.iter().filter(|l| accepts(l, peer));
    // The kernel prefers the one of just that address.
    let exact = candidates().find(|l| l.local.ip() == peer.ip());
    match exact.or_else(|| candidates().next()) {
        Some(l) if matches!(orphan.state, ESTABLISHED | CLOSE_WAIT) => Ok(Role::Waiting(l.id)),
        _ => Ok(Role::Reset),
    }
}

/// Records what `from` has sent and `to` has not read.
fn transfer(s: &mut Session<'_>, descriptions: &mut [Description], from: DescId, to: DescId) -> Result<(), Fault> {
    let (sender, receiver) = (s.take(from)?, s.take(to)?);
    let end = |id: DescId, raw: RawFd| End {
        raw,
        closing: has_sent_fin(&descriptions[id]),
    };
    let data = drain::in_flight(drain::Direction {
        sender: end(from, sender.raw()),
        receiver: end(to, receiver.raw()),
    })?;
    store(s, descriptions, to, &data)
}

fn store(s: &mut Session<'_>, descriptions: &mut [Description], id: DescId, data: &[u8]) -> Result<(), Fault> {
    if let (Some(t), false) = (descriptions[id].kind.get_mut::<TcpState>(), data.is_empty()) {
        t.received = Some(s.blobs.put(data)?);
    }
    Ok(())
}

/// What a description is, where it is a TCP socket.
fn role(d: &Description) -> Option<Role> {
    d.kind.get::<TcpState>().map(|t| t.role)
}
