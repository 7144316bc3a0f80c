//! All pages together: the answers.

use super::{same_place, Names, Page, Share, View};
use crate::sys::sock;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

/// Ports below are those of the system's services.
const FIRST_FREE: u16 = 1024;

/// How good the best claim to an address is, and where it leads: nowhere, where two nodes claim it with equal right.
type Claim = ((usize, bool, u8), Option<SocketAddr>);
/// A node, and what a certain program calls it; none for what the one calls it who asks.
type Name<'a> = (&'a Page, Option<&'a [IpAddr]>);
/// Where what listened is now, also what is where it was.
type Leads = HashMap<SocketAddr, SocketAddr>;

/// All pages.
#[derive(Debug, Clone)]
pub struct Book {
    own: Page,
    others: Vec<Page>,
    /// Ports of this node's connections with itself.
    inner: HashSet<u16>,
    /// Ports that the kernel chooses.
    chosen: RangeInclusive<u16>,
    /// For programs of each age that this node has.
    leads: BTreeMap<View, Leads>,
}

impl Book {
    pub(crate) fn new(own: Page, others: Vec<Page>, inner: HashSet<u16>) -> Self {
        let views = own.names.started.values().map(|era| View::Since(*era));
        let views: BTreeSet<View> = views.chain([View::Since(0), View::Checkpoint, View::Now]).collect();
        let leads = views.into_iter().map(|view| (view, leads(&own, &others, view))).collect();
        Self {
            own,
            others,
            inner,
            chosen: sock::ephemeral_range(),
            leads,
        }
    }

    /// What a program of the checkpoint knows, by where its stack begins.
    pub(crate) fn view(&self, stack: u64) -> View {
        View::Since(self.own.names.since(stack))
    }

    /// What a program with this view knows that binds a socket to `ip`. One that was restarted in the first moments of
    /// its life may have asked for the addresses of its host, and told others, only after that.
    pub(crate) fn of_binder(&self, ip: IpAddr, view: View) -> View {
        let has = |view: View| self.own.called(view).contains(&ip);
        let later = [View::Now].into_iter().chain(self.own.names.eras().map(View::Since));
        if has(view) {
            return view;
        }
        later.filter(|v| has(*v)).min().unwrap_or(view)
    }

    /// Whether anything is not where it was.
    pub fn is_needed(&self) -> bool {
        let is_elsewhere = |p: &Page| p.names.hosts.iter().flatten().any(|ip| !p.now.contains(ip));
        self.pages().any(|p| p.moved().next().is_some() || is_elsewhere(p))
    }

    /// Where a connection to `to` must go, if not there.
    pub(crate) fn lead(&self, to: SocketAddr, view: View) -> Option<SocketAddr> {
        if let Some(at) = self.leads.get(&view).and_then(|l| l.get(&to)) {
            return Some(*at).filter(|at| *at != to);
        }
        let mut moved = self.own.moved();
        let here = to.ip().is_loopback() || to.ip().is_unspecified() || self.own.now.contains(&to.ip());
        let port = moved.find(|(known, _)| here && *known == to.port())?.1;
        Some(SocketAddr::new(to.ip(), port))
    }

    /// Where a connection to `to` may lead, of which nobody knows whether a program of the job listens there by now:
    /// where the node is that a program calls so. A program of today means today's addresses, and can have others from
    /// an older program, which listens since the restart and has told the name that it knows.
    pub(crate) fn likely(&self, to: SocketAddr, view: View) -> Option<SocketAddr> {
        if to.port() < FIRST_FREE || self.leads.get(&view).is_some_and(|l| l.contains_key(&to)) {
            return None;
        }
        let there = |p: &Page, ips: &[IpAddr]| same_place(ips, ips.iter().position(|ip| *ip == to.ip())?, &p.now);
        let mut meant: Vec<IpAddr> = match view {
            View::Now => Vec::new(),
            _ => self.pages().filter_map(|p| there(p, p.called(view))).collect(),
        };
        if meant.is_empty() {
            let older = self.pages().flat_map(|p| p.names.hosts.iter().map(move |ips| (p, ips)));
            meant = older.filter_map(|(p, ips)| there(p, ips)).collect();
        }
        let first = *meant.first().filter(|ip| **ip != to.ip())?;
        // Where there are several of that name, who is meant?
        meant.iter().all(|ip| *ip == first).then(|| SocketAddr::new(first, to.port()))
    }

    /// The address of this node that was `at` once.
    pub(crate) fn place(&self, at: SocketAddr) -> Option<SocketAddr> {
        Some(SocketAddr::new(self.own.place(at.ip())?, at.port()))
    }

    /// What a program calls its own address `at`.
    pub(crate) fn shown_own(&self, at: SocketAddr, view: View) -> Option<SocketAddr> {
        Some(self.own.shown(at, self.own.called(view))).filter(|shown| *shown != at)
    }

    /// What a program calls its peer's address `at`; ports tell something of the peers of stream sockets only.
    pub(crate) fn shown_peer(&self, at: SocketAddr, stream: bool, view: View) -> Option<SocketAddr> {
        let is_loopback = at.ip().is_loopback();
        let (page, name) = if is_loopback {
            (&self.own, None)
        } else {
            self.peer(at, stream)?
        };
        Some(page.shown(at, name.unwrap_or(page.called(view)))).filter(|shown| *shown != at)
    }

    /// All nodes.
    fn pages(&self) -> impl Iterator<Item = &Page> {
        std::iter::once(&self.own).chain(&self.others)
    }

    /// The node that has `at`, and what the program there calls it, where the port tells; none where that is nobody's,
    /// or another host has the same address.
    fn peer(&self, at: SocketAddr, stream: bool) -> Option<Name<'_>> {
        let has = |p: &&Page| p.now.contains(&at.ip());
        let on = [&self.own].into_iter().chain(&self.others).find(has)?;
        let mut there = self.pages().filter(has);
        // An address that every host has means this one.
        if on.now != self.own.now && there.any(|p| p.now != on.now) {
            return None;
        }
        let has_port = |p: &Page| p.listening.iter().any(|l| l.now == at.port()) || p.bound.contains(&at.port());
        let names = self.names_on(on);
        let tells = stream && names.len() > 1 && self.chosen.contains(&at.port());
        if on.now == self.own.now && self.inner.contains(&at.port()) {
            Some((&self.own, None))
        } else if let Some(known) = self.pages().find(|p| stream && p.now == on.now && has_port(p)) {
            // Who connects there knows by which name.
            Some((known, None))
        } else if tells {
            let (page, name) = names[usize::from(at.port()) % names.len()];
            Some((page, Some(name)))
        } else {
            let mut here = self.pages().filter(|p| p.now == on.now);
            let is_alone = here.all(|p| p.first() == on.first());
            is_alone.then_some((on, None))
        }
    }

    /// What the nodes on the host of `page` are called, by their own programs, in an order on which all nodes agree.
    fn names_on(&self, page: &Page) -> Vec<(&Page, &[IpAddr])> {
        let here = self.pages().filter(|p| p.now == page.now);
        let mut all: Vec<(&Page, &[IpAddr])> = here.flat_map(|p| p.own_names().map(move |name| (p, name))).collect();
        all.sort_by_key(|(_, name)| *name);
        all.dedup_by_key(|(_, name)| *name);
        all
    }

    /// The ports from which programs of this node connect that know it by this view, where its host has other names too.
    pub(crate) fn share(&self, view: View) -> Option<Share> {
        let names = self.names_on(&self.own);
        let own = names.iter().position(|(_, name)| *name == self.own.called(view))?;
        let (own, among) = (u16::try_from(own).ok()?, u16::try_from(names.len()).ok()?);
        (among > 1).then_some(Share { own, among })
    }

    /// Whether a node of the job is there, or may be.
    pub(crate) fn is_known(&self, ip: IpAddr) -> bool {
        ip.is_unspecified() || self.pages().any(|p| p.now.contains(&ip))
    }

    /// What the next checkpoint is to remember; the programs that are restarted have stacks that begin at `programs`.
    pub fn names(&self, programs: &HashSet<u64>) -> Names {
        let known = &self.own.names.started;
        let era = |stack: &u64| known.get(stack).copied().unwrap_or_default();
        Names {
            ports: self.own.moved().collect(),
            started: programs.iter().map(|stack| (*stack, era(stack))).collect(),
            ..self.own.names.clone()
        }
    }
}

/// Where what listened on any node is now, for programs of that age.
fn leads(own: &Page, others: &[Page], view: View) -> Leads {
    let mut found: HashMap<SocketAddr, Claim> = HashMap::new();
    for (is_other, page) in others.iter().map(|p| (true, p)).chain([(false, own)]) {
        let hosts = page.names.hosts.iter().map(Vec::as_slice);
        // What programs have learnt at their start is what they mean; then what is older.
        for (age, ips) in [page.called(view)].into_iter().chain(hosts).enumerate() {
            for (n, ip) in ips.iter().enumerate() {
                for (l, fit) in page.listening.iter().filter_map(|l| Some((l, page.rank(l, ips, n)?))) {
                    let Some(host) = same_place(ips, n, &page.now) else { continue };
                    let to = SocketAddr::new(host, l.now);
                    for known in page.names.of_port(l.port) {
                        // An address that every host has (a bridge's) means this one.
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
    found.into_iter().filter_map(|(from, (_, to))| Some((from, to?))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Listening;
    use super::*;

    /// That of programs which were started at the launch.
    const VIEW: View = View::Since(0);

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
                ..Names::default()
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
        assert_eq!(
            (book.lead(at(2, 7), VIEW), book.shown_peer(at(2, 9), true, VIEW)),
            (None, None)
        );
    }

    #[test]
    fn hosts_may_change_places() {
        // Node A was on 1 and is on 2, node B was on 2 and is on 3.
        let book = book_of(page(&[1], 2, &[(7, 7)]), vec![page(&[2], 3, &[(7, 7)])]);
        assert_eq!(
            (book.lead(at(1, 7), VIEW), book.lead(at(2, 7), VIEW)),
            (Some(at(2, 7)), Some(at(3, 7)))
        );
        assert_eq!((book.likely(at(2, 7), VIEW), book.likely(at(2, 1023), VIEW)), (None, None));
        assert_eq!(
            book.likely(at(2, 1024), VIEW),
            Some(at(3, 1024)),
            "a program may listen there by now"
        );
        assert_eq!(
            (book.likely(at(2, 1024), View::Now), book.likely(at(9, 1024), VIEW)),
            (Some(at(3, 1024)), None)
        );
        assert_eq!(book.lead(at(2, 22), VIEW), None, "only what listened in the job is led");
        assert_eq!(
            (book.shown_own(at(2, 7), VIEW), book.shown_peer(at(3, 9), true, VIEW)),
            (Some(at(1, 7)), Some(at(2, 9)))
        );
        assert_eq!((book.place(at(1, 0)), book.place(at(2, 0))), (Some(at(2, 0)), None));
    }

    #[test]
    fn who_was_started_since_may_have_been_told_an_old_name() {
        // A was on 1 and is on 5, B was on 2 and 3 and is on 6; C was on 3 and is on 7.
        let book = book_of(page(&[1], 5, &[]), vec![page(&[2, 3], 6, &[]), page(&[3], 7, &[])]);
        for view in [VIEW, View::Now] {
            assert_eq!(book.likely(at(1, 1024), view), Some(at(5, 1024)));
            assert_eq!(book.likely(at(2, 1024), view), Some(at(6, 1024)));
            assert_eq!(book.likely(at(9, 1024), view), None);
        }
        assert_eq!(book.likely(at(3, 1024), VIEW), Some(at(7, 1024)), "what C calls itself");
        assert_eq!(book.likely(at(3, 1024), View::Now), None, "B or C");
        assert_eq!(book.likely(at(6, 1024), View::Now), None, "B's of today");
    }

    #[test]
    fn the_oldest_name_holds() {
        // After a second move: 1, 2, 3 and 2, 3, 4.
        let (a, b) = (page(&[1, 2], 3, &[(7, 7), (8, 8)]), page(&[2, 3], 4, &[(7, 7)]));
        let book = book_of(a, vec![b]);
        assert_eq!(book.lead(at(2, 7), VIEW), Some(at(4, 7)), "2 was B before it was A");
        assert_eq!(book.lead(at(2, 8), VIEW), Some(at(3, 8)), "what B does not have is A's");
        assert_eq!(book.shown_peer(at(4, 7), true, VIEW), Some(at(2, 7)));
        assert_eq!(
            book.names(&HashSet::new()).with(&[ip(3)]).hosts,
            [vec![ip(1)], vec![ip(2)], vec![ip(3)]]
        );
    }

    #[test]
    fn a_program_that_was_started_after_a_restart_knows_other_addresses() {
        // A was on 1, 2 and 3, B on 2, 1 and 4: the second restart went from generation 9.
        let names = |n: u8| {
            let launched = book_of(page(&[n], n, &[]), Vec::new());
            let restarted = launched.names(&HashSet::from([40])).in_era(5);
            restarted.with(&[ip(3 - n)]).with_programs([40, 50].into_iter())
        };
        let page = |n: u8| Page {
            names: names(n),
            ..page(&[], n + 2, &[(7, 7)])
        };
        let book = book_of(page(1), vec![page(2)]);
        let (first, second) = (book.view(40), book.view(50));
        assert_eq!((first, second), (View::Since(0), View::Since(5)));
        let seen = |view| {
            (
                book.lead(at(2, 7), view),
                book.shown_own(at(3, 7), view),
                book.shown_peer(at(4, 9), true, view),
            )
        };
        assert_eq!(seen(first), (Some(at(4, 7)), Some(at(1, 7)), Some(at(2, 9))));
        assert_eq!(seen(second), (Some(at(3, 7)), Some(at(2, 7)), Some(at(1, 9))));
        assert_eq!(
            seen(View::Now),
            (Some(at(4, 7)), None, None),
            "what it has been told is what was known first"
        );
        assert_eq!((book.lead(at(3, 7), View::Now), book.lead(at(4, 7), View::Now)), (None, None));
        // What runs on was started when it was.
        let later = book.names(&HashSet::from([40, 50])).in_era(9);
        let started = later.with_programs([40, 50, 60].into_iter()).started;
        assert_eq!(started, BTreeMap::from([(40, 0), (50, 5), (60, 9)]));
    }

    #[test]
    fn a_peer_is_called_what_it_calls_itself() {
        // Of two programs of A one was started when A was on 1, the other on 2; now it is on 3.
        let names = page(&[1], 1, &[]).names.in_era(5).with(&[ip(2)]);
        let names = Names {
            started: BTreeMap::from([(40, 0), (50, 5)]),
            ..names
        };
        let a = Page {
            names,
            ..page(&[], 3, &[])
        };
        let other = book_of(page(&[7], 7, &[]), vec![a.clone()]);
        let own = book_of(a, vec![page(&[7], 7, &[])]);
        for (stack, name) in [(40, 1), (50, 2)] {
            let share = own.share(own.view(stack)).unwrap();
            let port = (40_000..).find(|port| share.has(*port)).unwrap();
            for view in [View::Since(0), View::Since(5), View::Now] {
                assert_eq!(other.shown_peer(at(3, port), true, view), Some(at(name, port)));
            }
        }
        assert_eq!(other.share(VIEW), None, "it has not moved");
    }

    #[test]
    fn a_program_that_asks_for_its_address_after_the_restart_is_called_so() {
        // It was started on 1 and has learnt that it is on 3; its peer has been told so.
        let (a, b) = (page(&[1], 3, &[]), page(&[2], 3, &[]));
        let (own, other) = (book_of(a.clone(), vec![b.clone()]), book_of(b, vec![a]));
        let views = [1, 3, 9].map(|n| own.of_binder(ip(n), VIEW));
        assert_eq!(views, [VIEW, View::Now, VIEW]);
        let share = own.share(views[1]).unwrap();
        let port = (40_000..).find(|port| share.has(*port)).unwrap();
        assert_eq!(other.shown_peer(at(3, port), true, VIEW), None, "it is what it is called");
        // And after the next one.
        let launched = book_of(page(&[1], 1, &[]), Vec::new()).names(&HashSet::from([40]));
        let names = launched
            .with(&[ip(1)])
            .in_era(5)
            .with(&[ip(3)])
            .with_programs([40].into_iter());
        let again = Page {
            names: Names {
                started: BTreeMap::from([(40, 0)]),
                ..names
            },
            ..page(&[], 4, &[])
        };
        let own = book_of(again.clone(), Vec::new());
        let view = own.of_binder(ip(3), own.view(40));
        let share = own.share(view).unwrap();
        let port = (40_000..).find(|port| share.has(*port)).unwrap();
        let other = book_of(page(&[7], 7, &[]), vec![again]);
        assert_eq!(other.shown_peer(at(4, port), true, VIEW), Some(at(3, port)));
    }

    #[test]
    fn addresses_that_a_program_has_seen_at_its_start_are_those_it_knows() {
        let mut odd = Names::default().with(&[ip(1)]).with(&[ip(8)]);
        assert_eq!(
            (odd.in_era_of(0), odd.in_era_of(9)),
            (&[ip(1)][..], &[ip(1)][..]),
            "without a restart"
        );
        odd = odd.in_era(5).with(&[ip(2)]).with(&[ip(9)]);
        assert_eq!((odd.in_era_of(4), odd.in_era_of(5)), (&[ip(1)][..], &[ip(2)][..]));
        odd = odd.in_era(7).with(&[ip(9)]);
        assert_eq!(
            (odd.in_era_of(6), odd.in_era_of(7)),
            (&[ip(2)][..], &[ip(9)][..]),
            "had before the restart"
        );
        let old_hosts = odd.hosts.len();
        assert_eq!(odd.with(&[ip(9)]).hosts.len(), old_hosts);
        let old: Names = serde_json::from_str(r#"{"hosts": [["10.0.0.1"], ["10.0.0.2"]], "ports": []}"#).unwrap();
        let now = old.in_era(5).with(&[ip(3)]);
        let of = |era| now.in_era_of(era).to_vec();
        assert_eq!((of(0), of(4), of(5)), (vec![ip(1)], vec![ip(1)], vec![ip(3)]));
    }

    #[test]
    fn a_socket_bound_to_one_address_keeps_all_its_names() {
        let mut own = page(&[1, 2], 3, &[(7, 7)]);
        own.listening[0].ip = ip(2);
        let book = book_of(own, Vec::new());
        assert_eq!(
            (book.lead(at(1, 7), VIEW), book.lead(at(2, 7), VIEW)),
            (Some(at(3, 7)), Some(at(3, 7)))
        );
    }

    #[test]
    fn a_port_that_was_taken() {
        let book = book_of(page(&[1], 1, &[(7, 40000)]), Vec::new());
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(
            (book.lead(at(1, 7), VIEW), book.lead(local(7), VIEW)),
            (Some(at(1, 40000)), Some(local(40000)))
        );
        assert_eq!(book.shown_peer(local(40000), true, VIEW), Some(local(7)));
        // The other nodes must know, wherever they are.
        assert!(book_of(page(&[2], 2, &[]), vec![page(&[1], 1, &[(7, 40000)])]).is_needed());
        // It stays what it was called when it is moved again.
        let again = Page {
            names: book.names(&HashSet::new()),
            listening: page(&[], 1, &[(40000, 40001)]).listening,
            ..page(&[], 1, &[])
        };
        let book = book_of(again, Vec::new());
        assert_eq!(
            (book.lead(local(7), VIEW), book.shown_own(local(40001), VIEW)),
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
        let share = |n: usize, view| books[n].share(view).map(|s| (s.own, s.among));
        assert_eq!((share(0, VIEW), share(1, VIEW)), (Some((0, 3)), Some((1, 3))));
        assert_eq!(share(2, VIEW), Some((0, 2)), "it has the host's name too");
        // What is started from now on calls both so.
        assert_eq!((share(0, View::Now), share(1, View::Now)), (Some((2, 3)), Some((2, 3))));
        for book in &books {
            let shown = |port| book.shown_peer(at(9, port), true, VIEW);
            assert_eq!(
                (shown(7), shown(8)),
                (Some(at(1, 7)), Some(at(2, 7))),
                "who listens is known by the port"
            );
            let told = (shown(39999), shown(40000), shown(40001));
            assert_eq!(told, (Some(at(1, 39999)), Some(at(2, 40000)), None));
            assert_eq!(book.shown_peer(at(4, 40000), true, VIEW), Some(at(3, 40000)));
            assert_eq!(book.shown_peer(at(4, 40001), true, VIEW), None);
            assert_eq!(
                book.shown_peer(at(4, 22), true, VIEW),
                Some(at(3, 22)),
                "whose port tells nothing"
            );
            // What the kernel did not choose, and what is no stream, may be anybody's.
            assert_eq!((shown(22), book.shown_peer(at(9, 40000), false, VIEW)), (None, None));
        }
    }

    #[test]
    fn where_a_port_tells_nothing_nobody_is_meant_on_a_host_that_nodes_share() {
        // One of them has always been there.
        let (a, b) = (page(&[1], 1, &[]), page(&[2], 1, &[]));
        for book in [book_of(a.clone(), vec![b.clone()]), book_of(b, vec![a])] {
            for (port, stream) in [(22, true), (40000, false)] {
                assert_eq!(book.shown_peer(at(1, port), stream, VIEW), None);
            }
        }
    }

    #[test]
    fn a_port_that_another_node_of_the_host_has_kept() {
        let (kept, moved) = (page(&[9], 9, &[(7, 7)]), page(&[1], 9, &[(7, 8)]));
        let book = book_of(moved, vec![kept]);
        assert_eq!((book.lead(at(9, 7), VIEW), book.lead(at(1, 7), VIEW)), (None, Some(at(9, 8))));
    }

    #[test]
    fn nodes_where_nothing_listens_may_have_moved() {
        let (server, client) = (page(&[1], 1, &[(7, 7)]), page(&[2], 1, &[]));
        assert!(book_of(server.clone(), vec![client.clone()]).is_needed());
        let book = Book::new(client, vec![server], HashSet::from([40000]));
        assert!(book.is_needed());
        assert_eq!(
            book.shown_peer(at(1, 40000), true, VIEW),
            Some(at(2, 40000)),
            "its connection with itself"
        );
    }

    #[test]
    fn nodes_that_always_shared_a_host_have_one_name() {
        let book = book_of(page(&[1], 2, &[(7, 7)]), vec![page(&[1], 2, &[(8, 8)])]);
        assert_eq!(book.share(VIEW), Some(Share { own: 0, among: 2 }));
        assert_eq!(book.shown_peer(at(2, 9), true, VIEW), Some(at(1, 9)));
        let apart = book_of(page(&[5], 5, &[]), vec![page(&[1], 2, &[(7, 7)]), page(&[1], 2, &[(8, 8)])]);
        assert_eq!(apart.shown_peer(at(2, 9), true, VIEW), Some(at(1, 9)));
    }

    #[test]
    fn an_address_that_every_host_has_means_this_one() {
        let both = |n: u8| Page {
            names: Names {
                hosts: vec![vec![ip(n), ip(99)]],
                ..Names::default()
            },
            now: vec![ip(n + 1), ip(99)],
            ..page(&[], 0, &[(7, 7)])
        };
        let book = book_of(both(1), vec![both(5)]);
        assert_eq!(
            (book.lead(at(99, 7), VIEW), book.lead(at(5, 7), VIEW)),
            (None, Some(at(6, 7)))
        );
    }
}
