//! The addresses under which processes of a job know each other, when a restart has changed them: another host, a port that another program has taken.
//!
//! Each node remembers the addresses that it has had (its [`Names`]) and, at a restart, tells all others what listens there, and where that is now (its page). From all pages
//! together each makes its [`Book`], which answers for every call with an internet address: a connection to an address of before is led to where its listener is
//! now, and a program that asks for its own or its peer's address hears the one it knows. Who puts these questions: `lead`, for a process that makes such a call, and the rebuild.
//!
//! No I/O here but in `lead` and `share`.

pub mod lead;
mod share;

use crate::sys::sock;
use serde::{Deserialize, Serialize};
pub(crate) use share::Share;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

/// Address lists that are remembered: the first, which programs have seen at their start, and the newest.
const REMEMBERED: usize = 16;

/// What a node has been called.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// Its addresses, first those of the first checkpoint, then those of each restart. Loopback addresses are not among them.
    hosts: Vec<Vec<IpAddr>>,
    /// Listening ports that were moved: what the program knows, what it is.
    ports: Vec<(u16, u16)>,
}

impl Names {
    /// With the addresses that the node has now.
    pub(crate) fn with(&self, now: &[IpAddr]) -> Self {
        let mut hosts = self.hosts.clone();
        if hosts.last().is_none_or(|last| last != now) {
            hosts.push(now.to_vec());
        }
        if hosts.len() > REMEMBERED {
            hosts.remove(1);
        }
        Self {
            hosts,
            ports: self.ports.clone(),
        }
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
    /// The addresses that programs have seen at their start.
    fn first(&self) -> &[IpAddr] {
        self.names.hosts.first().map_or(&[], Vec::as_slice)
    }

    /// The address of this node that was `ip` once.
    pub(crate) fn place(&self, ip: IpAddr) -> Option<IpAddr> {
        if self.now.contains(&ip) {
            return None;
        }
        let mut all = self.names.hosts.iter();
        all.find_map(|ips| same_place(ips, ips.iter().position(|i| *i == ip)?, &self.now))
    }

    /// How well listening socket `l` answers to address number `n` of `ips`, which are addresses of this node at some time; best first.
    fn rank(&self, l: &Listening, ips: &[IpAddr], n: usize) -> Option<u8> {
        if l.ip.is_unspecified() {
            // Bound to any IPv6 address, it may accept IPv4 too.
            let fit = if l.ip.is_ipv4() == ips[n].is_ipv4() { 1 } else { 2 };
            return (l.ip.is_ipv6() || fit == 1).then_some(fit);
        }
        let was = |all: &Vec<IpAddr>| same_place(all, all.iter().position(|ip| *ip == l.ip)?, ips);
        (self.names.hosts.iter().find_map(was) == Some(ips[n])).then_some(0)
    }

    /// What the program calls an address of this node.
    fn shown(&self, at: SocketAddr) -> SocketAddr {
        let place = self.now.iter().position(|ip| *ip == at.ip());
        let ip = place.and_then(|n| same_place(&self.now, n, self.first())).unwrap_or(at.ip());
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

/// How good the best claim to an address is, and where it leads: nowhere, where two nodes claim it with equal right.
type Claim = ((usize, bool, u8), Option<SocketAddr>);

/// All pages.
#[derive(Debug, Clone)]
pub struct Book {
    own: Page,
    others: Vec<Page>,
    /// Ports of this node's connections with itself.
    inner: HashSet<u16>,
    /// Ports that the kernel chooses.
    chosen: RangeInclusive<u16>,
    /// Where what listened is now, also what is where it was.
    lead: HashMap<SocketAddr, SocketAddr>,
}

impl Book {
    pub(crate) fn new(own: Page, others: Vec<Page>, inner: HashSet<u16>) -> Self {
        let mut found: HashMap<SocketAddr, Claim> = HashMap::new();
        for (is_other, page) in others.iter().map(|p| (true, p)).chain([(false, &own)]) {
            for (age, ips) in page.names.hosts.iter().enumerate() {
                for (n, ip) in ips.iter().enumerate() {
                    for (l, fit) in page.listening.iter().filter_map(|l| Some((l, page.rank(l, ips, n)?))) {
                        let Some(host) = same_place(ips, n, &page.now) else { continue };
                        let to = SocketAddr::new(host, l.now);
                        for known in page.names.of_port(l.port) {
                            // What is older is what programs know; an address that every host has (a bridge's) means this one.
                            let rank = (age, is_other, fit);
                            let entry = found.entry(SocketAddr::new(*ip, known)).or_insert((rank, Some(to)));
                            if rank < entry.0 {
                                *entry = (rank, Some(to));
                            } else if rank == entry.0 && entry.1 != Some(to) {
                                entry.1 = None;
                            }
                        }
                    }
                }
            }
        }
        let lead = found.into_iter().filter_map(|(from, (_, to))| Some((from, to?))).collect();
        Self {
            own,
            others,
            inner,
            chosen: sock::ephemeral_range(),
            lead,
        }
    }

    /// Whether anything is not where it was.
    pub fn is_needed(&self) -> bool {
        let is_elsewhere = |p: &Page| p.first().iter().any(|ip| !p.now.contains(ip));
        self.lead.iter().any(|(from, to)| from != to) || self.own.moved().next().is_some() || self.pages().any(is_elsewhere)
    }

    /// Where a connection to `to` must go, if not there.
    pub(crate) fn lead(&self, to: SocketAddr) -> Option<SocketAddr> {
        if let Some(at) = self.lead.get(&to) {
            return Some(*at).filter(|at| *at != to);
        }
        let mut moved = self.own.moved();
        let here = to.ip().is_loopback() || to.ip().is_unspecified() || self.own.now.contains(&to.ip());
        let port = moved.find(|(known, _)| here && *known == to.port())?.1;
        Some(SocketAddr::new(to.ip(), port))
    }

    /// The address of this node that was `at` once.
    pub(crate) fn place(&self, at: SocketAddr) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.own.place(at.ip())?, at.port()))
    }

    /// What the program calls its own address `at`.
    pub(crate) fn shown_own(&self, at: SocketAddr) -> Option<SocketAddr> {
        Some(self.own.shown(at)).filter(|shown| *shown != at)
    }

    /// What the program calls its peer's address `at`; ports tell something of the peers of stream sockets only.
    pub(crate) fn shown_peer(&self, at: SocketAddr, stream: bool) -> Option<SocketAddr> {
        let is_loopback = at.ip().is_loopback();
        let page = if is_loopback { &self.own } else { self.page_of(at, stream)? };
        Some(page.shown(at)).filter(|shown| *shown != at)
    }

    /// All nodes.
    fn pages(&self) -> impl Iterator<Item = &Page> {
        std::iter::once(&self.own).chain(&self.others)
    }

    /// The node that has `at`; none where that is nobody's, or another host has the same address.
    fn page_of(&self, at: SocketAddr, stream: bool) -> Option<&Page> {
        let has = |p: &&Page| p.now.contains(&at.ip());
        let on = [&self.own].into_iter().chain(&self.others).find(has)?;
        let mut there = self.pages().filter(has);
        // An address that every host has means this one.
        if on.now != self.own.now && there.any(|p| p.now != on.now) {
            return None;
        }
        let sharers = self.sharers(on);
        if let [only] = sharers[..] {
            return Some(only);
        }
        if on.now == self.own.now && self.inner.contains(&at.port()) {
            return Some(&self.own);
        }
        let has_port = |p: &Page| p.listening.iter().any(|l| l.now == at.port()) || p.bound.contains(&at.port());
        let known = self.pages().find(|p| p.now == on.now && has_port(p));
        let by_port = || Some(sharers[usize::from(at.port()) % sharers.len()]);
        let tells = self.chosen.contains(&at.port());
        known.or_else(|| by_port().filter(|_| tells)).filter(|_| stream)
    }

    /// The nodes on the host of `page` that were known by different addresses, in an order on which all nodes agree.
    fn sharers(&self, page: &Page) -> Vec<&Page> {
        let mut all: Vec<&Page> = self.pages().filter(|p| p.now == page.now).collect();
        all.sort_by_key(|p| p.first());
        all.dedup_by_key(|p| p.first());
        all
    }

    /// The ports from which this node connects, where it shares its host with others.
    pub(crate) fn share(&self) -> Option<Share> {
        let sharers = self.sharers(&self.own);
        let own = sharers.iter().position(|p| p.first() == self.own.first())?;
        let (own, among) = (u16::try_from(own).ok()?, u16::try_from(sharers.len()).ok()?);
        (among > 1).then_some(Share { own, among })
    }

    /// Whether a node of the job is there, or may be.
    pub(crate) fn is_known(&self, ip: IpAddr) -> bool {
        ip.is_unspecified() || self.pages().any(|p| p.now.contains(&ip))
    }

    /// What the next checkpoint is to remember.
    pub fn names(&self) -> Names {
        let mut names = self.own.names.with(&self.own.now);
        names.ports = self.own.moved().collect();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(n: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, n])
    }

    fn at(n: u8, port: u16) -> SocketAddr {
        SocketAddr::new(ip(n), port)
    }

    fn page(hosts: &[u8], now: u8, ports: &[(u16, u16)]) -> Page {
        let any = IpAddr::from([0, 0, 0, 0]);
        let listening = ports.iter().map(|(port, now)| Listening {
            ip: any,
            port: *port,
            now: *now,
        });
        Page {
            names: Names {
                hosts: hosts.iter().map(|n| vec![ip(*n)]).collect(),
                ports: Vec::new(),
            },
            now: vec![ip(now)],
            listening: listening.collect(),
            bound: Vec::new(),
        }
    }

    fn book_of(own: Page, others: Vec<Page>) -> Book {
        Book::new(own, others, HashSet::new())
    }

    #[test]
    fn nothing_is_led_where_nothing_has_moved() {
        let book = book_of(page(&[1], 1, &[(7, 7)]), vec![page(&[2], 2, &[(7, 7)])]);
        assert!(!book.is_needed());
        assert_eq!((book.lead(at(2, 7)), book.shown_peer(at(2, 9), true)), (None, None));
    }

    #[test]
    fn hosts_may_change_places() {
        // Node A was on 1 and is on 2, node B was on 2 and is on 3.
        let book = book_of(page(&[1], 2, &[(7, 7)]), vec![page(&[2], 3, &[(7, 7)])]);
        assert_eq!((book.lead(at(1, 7)), book.lead(at(2, 7))), (Some(at(2, 7)), Some(at(3, 7))));
        assert_eq!(book.lead(at(2, 22)), None, "only what listened in the job is led");
        assert_eq!(
            (book.shown_own(at(2, 7)), book.shown_peer(at(3, 9), true)),
            (Some(at(1, 7)), Some(at(2, 9)))
        );
        assert_eq!((book.place(at(1, 0)), book.place(at(2, 0))), (Some(at(2, 0)), None));
    }

    #[test]
    fn the_oldest_name_holds() {
        // After a second move: 1, 2, 3 and 2, 3, 4.
        let (a, b) = (page(&[1, 2], 3, &[(7, 7), (8, 8)]), page(&[2, 3], 4, &[(7, 7)]));
        let book = book_of(a, vec![b]);
        assert_eq!(book.lead(at(2, 7)), Some(at(4, 7)), "2 was B before it was A");
        assert_eq!(book.lead(at(2, 8)), Some(at(3, 8)), "what B does not have is A's");
        assert_eq!(book.shown_peer(at(4, 7), true), Some(at(2, 7)));
        assert_eq!(book.names().hosts, [vec![ip(1)], vec![ip(2)], vec![ip(3)]]);
    }

    #[test]
    fn a_socket_bound_to_one_address_keeps_all_its_names() {
        let mut own = page(&[1, 2], 3, &[(7, 7)]);
        own.listening[0].ip = ip(2);
        let book = book_of(own, Vec::new());
        assert_eq!((book.lead(at(1, 7)), book.lead(at(2, 7))), (Some(at(3, 7)), Some(at(3, 7))));
    }

    #[test]
    fn a_port_that_was_taken() {
        let book = book_of(page(&[1], 1, &[(7, 40000)]), Vec::new());
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(
            (book.lead(at(1, 7)), book.lead(local(7))),
            (Some(at(1, 40000)), Some(local(40000)))
        );
        assert_eq!(book.shown_peer(local(40000), true), Some(local(7)));
        // It stays what it was called when it is moved again.
        let again = Page {
            names: book.names(),
            listening: page(&[], 1, &[(40000, 40001)]).listening,
            ..page(&[], 1, &[])
        };
        let book = book_of(again, Vec::new());
        assert_eq!(
            (book.lead(local(7)), book.shown_own(local(40001))),
            (Some(local(40001)), Some(local(7)))
        );
    }

    #[test]
    fn ports_tell_nodes_of_one_host_apart() {
        // Three nodes: two of them on host 9, and one alone.
        let (a, b, c) = (page(&[1], 9, &[(7, 7)]), page(&[2], 9, &[(7, 8)]), page(&[3], 4, &[]));
        let books = [
            book_of(a.clone(), vec![b.clone(), c.clone()]),
            book_of(b.clone(), vec![c.clone(), a.clone()]),
            book_of(c, vec![b, a]),
        ];
        let share = |n: usize| books[n].share().map(|s| (s.own, s.among));
        assert_eq!((share(0), share(1), share(2)), (Some((0, 2)), Some((1, 2)), None));
        for book in &books {
            let shown = |port| book.shown_peer(at(9, port), true);
            assert_eq!(
                (shown(7), shown(8)),
                (Some(at(1, 7)), Some(at(2, 7))),
                "who listens is known by the port"
            );
            assert_eq!((shown(40000), shown(40001)), (Some(at(1, 40000)), Some(at(2, 40001))));
            assert_eq!(book.shown_peer(at(4, 40001), true), Some(at(3, 40001)));
            // What the kernel did not choose, and what is no stream, may be anybody's.
            assert_eq!((shown(22), book.shown_peer(at(9, 40000), false)), (None, None));
        }
    }

    #[test]
    fn a_port_that_another_node_of_the_host_has_kept() {
        let (kept, moved) = (page(&[9], 9, &[(7, 7)]), page(&[1], 9, &[(7, 8)]));
        let book = book_of(moved, vec![kept]);
        assert_eq!((book.lead(at(9, 7)), book.lead(at(1, 7))), (None, Some(at(9, 8))));
    }

    #[test]
    fn nodes_where_nothing_listens_may_have_moved() {
        let (server, client) = (page(&[1], 1, &[(7, 7)]), page(&[2], 1, &[]));
        assert!(book_of(server.clone(), vec![client.clone()]).is_needed());
        let book = Book::new(client, vec![server], HashSet::from([40000]));
        assert!(book.is_needed());
        assert_eq!(
            book.shown_peer(at(1, 40000), true),
            Some(at(2, 40000)),
            "its connection with itself"
        );
    }

    #[test]
    fn nodes_that_always_shared_a_host_have_one_name() {
        let book = book_of(page(&[1], 2, &[(7, 7)]), vec![page(&[1], 2, &[(8, 8)])]);
        assert_eq!((book.share(), book.shown_peer(at(2, 9), true)), (None, Some(at(1, 9))));
        let apart = book_of(page(&[5], 5, &[]), vec![page(&[1], 2, &[(7, 7)]), page(&[1], 2, &[(8, 8)])]);
        assert_eq!(apart.shown_peer(at(2, 9), true), Some(at(1, 9)));
    }

    #[test]
    fn an_address_that_every_host_has_means_this_one() {
        let both = |n: u8| Page {
            names: Names {
                hosts: vec![vec![ip(n), ip(99)]],
                ports: Vec::new(),
            },
            now: vec![ip(n + 1), ip(99)],
            ..page(&[], 0, &[(7, 7)])
        };
        let book = book_of(both(1), vec![both(5)]);
        assert_eq!((book.lead(at(99, 7)), book.lead(at(5, 7))), (None, Some(at(6, 7))));
    }
}
