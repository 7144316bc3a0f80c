//! The addresses under which processes of a job know each other, when a restart has changed them: another host, a port
//! that another program has taken.
//!
//! Each node remembers the addresses that it has had (its [`Names`]) and, at a restart, tells all others what listens
//! there, and where that is now (its page). From all pages together each makes its [`Book`], which answers for every
//! call with an internet address: a connection to an address of before is led to where its listener is now, and a
//! program that asks for its own or its peer's address hears the one it knows. Who puts these questions: `lead`, for a
//! process that makes such a call, and the rebuild.
//!
//! What a process knows depends on when its program was started: a rank that `mpirun` starts after a restart has learnt
//! other addresses than `mpirun` itself. So an answer is for a [`View`].
//!
//! No I/O here but in `lead` and `share`.

mod book;
pub mod lead;
mod share;

pub use book::Book;
use serde::{Deserialize, Serialize};
pub(crate) use share::Share;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

/// Address lists that are remembered: the first, which programs have seen at their start, and the newest.
const REMEMBERED: usize = 16;

/// The time from the launch of the job (0), or from a restart (the number of its generation), to the next restart.
pub(crate) type Era = u64;

/// Whose knowledge of addresses counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum View {
    /// That of a program which was started in this era.
    Since(Era),
    /// The kernel's, at the checkpoint.
    Checkpoint,
    /// That of a program which was started after the restart.
    Now,
}

/// What a node has been called.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// Its addresses, first those of the first checkpoint, then those of each restart. Loopback addresses are not among them.
    hosts: Vec<Vec<IpAddr>>,
    /// The eras with which those began.
    #[serde(default)]
    begun: Vec<Era>,
    /// Listening ports that were moved: what the program knows, what it is.
    ports: Vec<(u16, u16)>,
    /// The era that it is now.
    #[serde(default)]
    era: Era,
    /// When programs were started, by where their stacks begin: a process has another one when it calls exec, and keeps
    /// it when it forks. Others in the first era.
    #[serde(default)]
    started: BTreeMap<u64, Era>,
}

impl Names {
    /// With the addresses that the node has now.
    pub(crate) fn with(&self, now: &[IpAddr]) -> Self {
        let mut names = self.clone();
        // Those that the node got before this era may not be those that it had when the last one began.
        let is_known = self.begun.last() == Some(&self.era) || self.in_era_of(self.era) == now;
        if names.hosts.last().is_none_or(|last| last != now) || !is_known {
            // Those of an image that tells no eras begin with none.
            names.begun.resize(names.hosts.len(), Era::MAX);
            names.hosts.push(now.to_vec());
            names.begun.push(self.era);
        }
        if names.hosts.len() > REMEMBERED {
            names.hosts.remove(1);
            names.begun.remove(1);
        }
        names
    }

    /// In era `era`, if that is not over.
    #[must_use]
    pub fn in_era(mut self, era: Era) -> Self {
        self.era = self.era.max(era);
        self
    }

    /// The era that it is.
    pub fn era(&self) -> Era {
        self.era
    }

    /// With the programs that run now, by where their stacks begin: those that are not known have been started in this era.
    pub(crate) fn with_programs(mut self, stacks: impl Iterator<Item = u64>) -> Self {
        if self.era == 0 {
            return self;
        }
        let era = |stack: u64| self.started.get(&stack).copied().unwrap_or(self.era);
        self.started = stacks.map(|stack| (stack, era(stack))).collect();
        self
    }

    /// When the program was started whose stack begins at `stack`.
    pub(crate) fn since(&self, stack: u64) -> Era {
        self.started.get(&stack).copied().unwrap_or_default()
    }

    /// The addresses that it had at the beginning of era `era`.
    fn in_era_of(&self, era: Era) -> &[IpAddr] {
        let eras = self.begun.iter().enumerate().filter(|(_, begun)| **begun <= era);
        // Addresses also change without a restart.
        let first = eras.max_by_key(|(n, begun)| (**begun, Reverse(*n)));
        self.hosts.get(first.map_or(0, |(n, _)| n)).map_or(&[], Vec::as_slice)
    }

    /// The eras whose addresses a program may know: those in which programs were started, and those that came while they ran.
    fn eras(&self) -> impl Iterator<Item = Era> + '_ {
        let begun = self.begun.iter().filter(|era| **era != Era::MAX);
        self.started.values().chain(begun).copied()
    }

    /// What the program calls port `port`.
    fn of_port(&self, port: u16) -> Vec<u16> {
        let moved = self.ports.iter().filter(|(_, is)| *is == port);
        moved.map(|(known, _)| *known).chain([port]).collect()
    }
}

/// Addresses of this host but the loopback.
pub(crate) fn addresses() -> Vec<IpAddr> {
    let mut all = belay_kernel::net::addresses();
    all.retain(|ip| !ip.is_loopback());
    all
}

/// A listening socket of the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listening {
    /// What it was bound to at the checkpoint.
    pub(crate) ip: IpAddr,
    /// Its port at the checkpoint.
    pub(crate) port: u16,
    /// Its port now.
    pub(crate) now: u16,
}

/// One node, as the others see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Page {
    pub(crate) names: Names,
    /// Its addresses.
    pub(crate) now: Vec<IpAddr>,
    pub(crate) listening: Vec<Listening>,
    /// Ports of sockets that are bound and neither listen nor are connected.
    pub(crate) bound: Vec<u16>,
}

/// The address in `to` that has the place of number `at` of `from`, among those of its family.
fn same_place(from: &[IpAddr], at: usize, to: &[IpAddr]) -> Option<IpAddr> {
    let family = |ip: &&IpAddr| ip.is_ipv4() == from[at].is_ipv4();
    let place = from[..at].iter().filter(family).count();
    let all: Vec<&IpAddr> = to.iter().filter(family).collect();
    all.get(place).or(all.first()).map(|ip| **ip)
}

impl Page {
    /// The addresses that programs have seen at the start of the job.
    fn first(&self) -> &[IpAddr] {
        self.names.in_era_of(0)
    }

    /// The addresses that programs know.
    fn called(&self, view: View) -> &[IpAddr] {
        match view {
            View::Since(era) => self.names.in_era_of(era),
            View::Checkpoint => self.names.hosts.last().map_or(&[], Vec::as_slice),
            View::Now => &self.now,
        }
    }

    /// The address of this node that was `ip` once.
    pub(crate) fn place(&self, ip: IpAddr) -> Option<IpAddr> {
        if self.now.contains(&ip) {
            return None;
        }
        let mut all = self.names.hosts.iter();
        all.find_map(|ips| same_place(ips, ips.iter().position(|i| *i == ip)?, &self.now))
    }

    /// How well listening socket `l` answers to address number `n` of `ips`, which are addresses of this node at some
    /// time; best first.
    fn rank(&self, l: &Listening, ips: &[IpAddr], n: usize) -> Option<u8> {
        if l.ip.is_unspecified() {
            // Bound to any IPv6 address, it may accept IPv4 too.
            let fit = if l.ip.is_ipv4() == ips[n].is_ipv4() { 1 } else { 2 };
            return (l.ip.is_ipv6() || fit == 1).then_some(fit);
        }
        let was = |all: &Vec<IpAddr>| same_place(all, all.iter().position(|ip| *ip == l.ip)?, ips);
        (self.names.hosts.iter().find_map(was) == Some(ips[n])).then_some(0)
    }

    /// All that it is called by its own programs, each addresses by which it is known to those that they have told.
    fn own_names(&self) -> impl Iterator<Item = &[IpAddr]> {
        let eras: BTreeSet<Era> = self.names.eras().chain([0]).collect();
        let old = eras.into_iter().map(|era| self.called(View::Since(era)));
        old.chain([self.called(View::Now)])
    }

    /// What a program calls an address of this node, to whom that is `called` so.
    fn shown(&self, at: SocketAddr, called: &[IpAddr]) -> SocketAddr {
        let place = self.now.iter().position(|ip| *ip == at.ip());
        let ip = place.and_then(|n| same_place(&self.now, n, called));
        let ip = ip.unwrap_or(at.ip());
        let listening = self.listening.iter().find(|l| l.now == at.port());
        let port = listening.map_or(at.port(), |l| self.names.of_port(l.port)[0]);
        SocketAddr::new(ip, port)
    }

    /// Ports that are not what the program knows.
    fn moved(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        let known = |l: &Listening| {
            let now = l.now;
            self.names.of_port(l.port).into_iter().map(move |k| (k, now))
        };
        self.listening.iter().flat_map(known).filter(|(known, now)| known != now)
    }
}
