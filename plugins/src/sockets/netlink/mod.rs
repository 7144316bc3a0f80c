//! Netlink sockets: protocol, address and group memberships.
//!
//! Messages not yet read cannot be put back: only the kernel may send them. An answer is waited for by whoever asked,
//! so the checkpoint waits until it has been read. News of a group can be lost at any time, and programs that subscribe
//! to them know; so those are dropped with a note.

use crate::builder::Builder;
use crate::fault::{not_now, refuse, At, Fault};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::{DescId, Description};
use crate::session::Session;
use crate::sockets::options::{self, Options, When};
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const SOL_NETLINK: i32 = 270;
const ADD_MEMBERSHIP: i32 = 1;
const LIST_MEMBERSHIPS: i32 = 9;

/// A netlink socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct NetlinkState {
    kind: i32,
    protocol: i32,
    local: Addr,
    groups: Vec<u8>,
    options: Options,
    /// Whom it sends to where a message names nobody; an image of before does not tell.
    #[serde(default)]
    peer: Addr,
}

/// The kind.
pub(crate) struct Netlink;

impl Kind for Netlink {
    const NAME: &'static str = "Netlink";
    const VERSION: u32 = 1;
    type State = NetlinkState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Socket(libc::AF_NETLINK, ..))
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<NetlinkState, Fault> {
        let Look::Socket(_, kind, protocol) = seen.look else {
            return refuse("is no socket");
        };
        capture(s, (seen.id, seen.raw()), kind, protocol)
    }

    fn rebuild(_: &mut Builder<'_>, _: &Description, state: &NetlinkState) -> Result<Option<OwnedFd>, Fault> {
        make(state).map(Some)
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

fn capture(s: &mut Session<'_>, (id, raw): (DescId, RawFd), kind: i32, protocol: i32) -> Result<NetlinkState, Fault> {
    let holder = s.found[id].holder;
    let groups = sock::get_bytes(raw, SOL_NETLINK, LIST_MEMBERSHIPS, 128).unwrap_or_default();
    let unread = fd::poll(raw, libc::POLLIN).at("poll")? & libc::POLLIN != 0;
    if unread && groups.iter().all(|g| *g == 0) {
        return not_now("holds an answer of the kernel that has not been read, which cannot be put back");
    }
    if unread {
        s.notes.push(format!(
            "process {}: fd {}: netlink messages not yet read are lost at a restart",
            holder.pid, holder.fd
        ));
    }
    Ok(NetlinkState {
        kind,
        protocol,
        local: sock::local(raw).at("read its address")?,
        groups,
        options: options::of(s, (id, raw), false)?,
        peer: sock::peer(raw).at("read its peer")?.unwrap_or_default(),
    })
}

fn make(n: &NetlinkState) -> Result<OwnedFd, Fault> {
    let fd = sock::socket(libc::AF_NETLINK, n.kind, n.protocol).at("socket")?;
    let raw = fd.as_raw_fd();
    let bound = n.local.0.get(4..8).is_some_and(|port| port != [0; 4]);
    if bound && sock::bind(raw, &n.local).is_err() {
        // Another socket has that port number now; the kernel chooses one.
        let mut any = n.local.clone();
        any.0[4..8].fill(0);
        sock::bind(raw, &any).at("bind")?;
    }
    for (word, bits) in n.groups.chunks_exact(4).enumerate() {
        let bits = u32::from_ne_bytes([bits[0], bits[1], bits[2], bits[3]]);
        for bit in (0..32).filter(|b| bits & (1 << b) != 0) {
            let group = u32::try_from(word * 32 + bit + 1).unwrap_or(0);
            sock::set(raw, SOL_NETLINK, ADD_MEMBERSHIP, &group).at(format!("join group {group}"))?;
        }
    }
    // Not the kernel, to whom every socket sends.
    if n.peer.0.get(4..12).is_some_and(|to| to != [0; 8]) {
        sock::connect(raw, &n.peer).at("connect")?;
    }
    n.options.restore_buffers(raw);
    n.options.restore(raw, When::Late)?;
    Ok(fd)
}
