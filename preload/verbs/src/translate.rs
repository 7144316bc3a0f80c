//! From the names that programs have to those of today, and back. Before the first restart both are the same.
//!
//! What was there at the last restart is in tables, which the restart has made. What has been made since has its real
//! number: whoever makes a queue pair or a region takes another one where the number is a name in a table. A port that
//! was one and is two today, or the other way round, is told by the number of the queue pair: modulo the places that
//! belong together it is the place's own ([`Places`]).

use crate::names::{context_of, port_of, NameFact, Port, PortName, QpName};
use crate::shadow::{ShadowContext, ShadowQp};
use belay_ibv::*;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, OnceLock};

/// Restarts so far.
static EPOCH: AtomicU32 = AtomicU32::new(0);
/// The tables of the last restart. Those of earlier ones stay where they are: somebody may be reading them.
static TABLES: AtomicPtr<Tables> = AtomicPtr::new(null_mut());

/// Are real names the program's own?
#[inline]
pub(crate) fn is_identity() -> bool {
    EPOCH.load(Relaxed) == 0
}

#[inline]
pub(crate) fn epoch() -> u32 {
    EPOCH.load(Relaxed)
}

/// Numbers, hashed by a multiplication.
#[derive(Default)]
pub(crate) struct Multiply(u64);

impl Hasher for Multiply {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u32((*b).into()));
    }
    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

/// Keys of regions: the program's, and today's.
pub(crate) type Keys = HashMap<u32, u32, BuildHasherDefault<Multiply>>;

/// A port of then at a port of today.
pub(crate) type Place = (PortName, PortName);

#[derive(Default)]
pub(crate) struct Tables {
    /// Queue pairs by their names.
    pub(crate) names: HashMap<QpName, NameFact>,
    /// By the real names of those that may be called without a connection, which all processes hear of: their names.
    pub(crate) back: HashMap<QpName, QpName>,
    pub(crate) places: Places,
    /// Numbers that are names at this process's ports.
    pub(crate) reserved: HashSet<u32>,
    /// The keys of the regions at a port, of all its processes: of one adapter, so they differ. They come when the rest is in
    /// use already. Without a lock, which the child of a fork might find taken.
    pub(crate) keys: OnceLock<HashMap<PortName, Keys>>,
}

pub(crate) fn tables() -> Option<&'static Tables> {
    // SAFETY: tables are never freed.
    unsafe { TABLES.load(Acquire).as_ref() }
}

/// From now on names are translated by these.
pub(crate) fn adopt(tables: Tables) -> &'static Tables {
    let tables = Box::into_raw(Box::new(tables));
    TABLES.store(tables, Release);
    EPOCH.fetch_add(1, Relaxed);
    // SAFETY: never freed.
    unsafe { &*tables }
}

/// Where the ports of then are today, with the GIDs of then and of today.
#[derive(Debug, Default, Clone)]
pub(crate) struct Places {
    all: BTreeMap<Place, Vec<(Gid, Gid)>>,
    /// Of each place those that share a port with it, directly or by others, in an order that all processes find. Made
    /// with the rest: whoever posts and polls takes no memory.
    together: BTreeMap<Place, Arc<[Place]>>,
}

/// Which of `count` places has this number. Hashed (D. Knuth, The Art of Computer Programming 3, 6.4): processes that
/// make queue pairs in turn get numbers in turn, and with a remainder always those of another.
fn share(number: u32, count: usize) -> usize {
    (number.wrapping_mul(0x9e37_79b1) >> 8) as usize % count
}

impl Places {
    pub(crate) fn new(all: BTreeMap<Place, Vec<(Gid, Gid)>>) -> Self {
        let mut together = BTreeMap::new();
        for place in all.keys() {
            if !together.contains_key(place) {
                let group: Arc<[Place]> = Self::touching(&all, *place).into_iter().collect();
                together.extend(group.iter().map(|p| (*p, group.clone())));
            }
        }
        Places { all, together }
    }

    /// This place, and those that share a port with it, directly or by others.
    fn touching(all: &BTreeMap<Place, Vec<(Gid, Gid)>>, place: Place) -> BTreeSet<Place> {
        let mut group = BTreeSet::from([place]);
        loop {
            let touches = |p: &Place| group.iter().any(|g| g.0 == p.0 || g.1 == p.1);
            let more: BTreeSet<Place> = all.keys().copied().filter(touches).collect();
            if more.is_subset(&group) {
                return group;
            }
            group.extend(more);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Which of the places that belong together has the number.
    fn with(&self, place: Place, number: u32) -> Option<Place> {
        let group = self.together.get(&place)?;
        Some(group[share(number, group.len())])
    }

    /// Among how many the numbers at this place are shared out.
    fn sharers(&self, place: Place) -> usize {
        self.together.get(&place).map_or(1, |group| group.len())
    }

    /// Whether a new queue pair at this place may have the number. Nobody has told of one that is not known.
    pub(crate) fn suits(&self, place: Place, number: u32) -> bool {
        self.with(place, number).is_none_or(|own| own == place)
    }

    /// What a port of then is called today, where a queue pair in no table has this number.
    fn now(&self, port: PortName, number: u32) -> Option<PortName> {
        self.other(number, |place, gids| {
            let by_gid = gids.iter().find(|g| g.0.raw == port.0).map(|g| PortName(g.1.raw));
            by_gid.or((place.0 == port).then_some(place.1))
        })
    }

    /// What a port of today was called then.
    fn then(&self, port: PortName, number: u32) -> Option<PortName> {
        self.other(number, |place, gids| {
            let by_gid = gids.iter().find(|g| g.1.raw == port.0).map(|g| PortName(g.0.raw));
            by_gid.or((place.1 == port).then_some(place.0))
        })
    }

    /// The other name of a port, at the place to which the number belongs.
    fn other(&self, number: u32, name: impl Fn(&Place, &[(Gid, Gid)]) -> Option<PortName>) -> Option<PortName> {
        let mut all = self.all.iter().filter_map(|(place, gids)| Some((*place, name(place, gids)?)));
        let first = all.next()?;
        let own = self.with(first.0, number)?;
        Some(all.find(|(place, _)| *place == own).unwrap_or(first).1)
    }

    /// The name under which everything is told of a port that has several.
    pub(crate) fn known_as(&self, port: PortName) -> Option<PortName> {
        let has = |(place, gids): &(&Place, &Vec<(Gid, Gid)>)| place.0 == port || gids.iter().any(|g| g.0.raw == port.0);
        self.all.iter().find(has).map(|(place, _)| place.0)
    }

    /// The GID of today for one of then at this place, or the other way round.
    fn gid(&self, place: Place, known: impl Fn(&(Gid, Gid)) -> bool) -> Option<(Gid, Gid)> {
        self.all.get(&place)?.iter().find(|g| known(g)).copied()
    }
}

/// The real key of a region of the peer's.
#[inline]
pub(crate) fn rkey(q: &ShadowQp, key: u32) -> u32 {
    // SAFETY: the keys of a peer are never freed.
    unsafe { q.peer_keys.load(Acquire).as_ref() }
        .and_then(|k| k.get(&key))
        .copied()
        .unwrap_or(key)
}

/// From now on requests to a peer use the keys of the regions at its port.
pub(crate) fn use_keys_of(q: &ShadowQp, port: PortName) {
    let keys = tables().and_then(|t| {
        let port = t.places.known_as(port)?;
        t.keys.get()?.get(&port).map(|k| std::ptr::from_ref(k).cast_mut())
    });
    q.peer_keys.store(keys.unwrap_or(null_mut()), Release);
}

/// Numbers that are tried for each place among which they are shared out: more than it takes.
const TRIES: usize = 512;

/// Of so many numbers one is free, where so many are taken.
fn most(c: &ShadowContext, t: &Tables, taken: usize) -> usize {
    let among: usize = places_of(c).into_iter().map(|p| t.places.sharers(p)).product();
    taken + TRIES * among
}

/// So many queue pairs are made at most until one has a number that is free.
pub(crate) fn most_numbers(c: &ShadowContext) -> usize {
    tables().map_or(0, |t| most(c, t, t.reserved.len() + t.back.len()))
}

/// The same of regions and their keys.
pub(crate) fn most_keys(c: &ShadowContext) -> usize {
    let Some(t) = tables() else { return 0 };
    let at_ports = c.ports().iter().filter_map(|p| t.keys.get()?.get(&p.name(0)));
    most(c, t, at_ports.map(|k| k.len()).sum::<usize>() + c.lkeys())
}

/// Whether a new region of this context may have these keys. One that is not for peers has 0 for theirs with some adapters.
pub(crate) fn keys_are_free(c: &ShadowContext, lkey: u32, rkey: u32) -> bool {
    let Some(t) = tables() else { return true };
    let at_port = |p: &Port| t.keys.get()?.get(&p.name(0));
    let known = |p: &Port| at_port(p).is_some_and(|k| k.contains_key(&rkey));
    // However an adapter counts, the next one is as good as any.
    let mixed = rkey.wrapping_mul(0x9e37_79b9) >> 16;
    let for_peers = || !c.ports().iter().any(known) && suits_everywhere(c, t, mixed);
    c.lkey(lkey) == lkey && (rkey == 0 || for_peers())
}

/// The places of a context's ports.
fn places_of(c: &ShadowContext) -> Vec<Place> {
    let both = c.ports().iter().zip(c.today());
    both.map(|(then, now)| (then.name(0), now.name(0))).collect()
}

/// Whether a new object of this context may have the number, at all its ports.
fn suits_everywhere(c: &ShadowContext, t: &Tables, number: u32) -> bool {
    places_of(c).into_iter().all(|p| t.places.suits(p, number))
}

/// Whether a new queue pair of this context may have the number, which is its real one. Not where others take it for the
/// real one of a queue pair of before, which is gone.
pub(crate) fn number_is_free(c: &ShadowContext, number: u32) -> bool {
    let Some(t) = tables() else { return true };
    let taken = |port| t.back.contains_key(&QpName { port, number });
    let has_been = c.today().iter().flat_map(Port::names).any(taken);
    !has_been && !t.reserved.contains(&number) && suits_everywhere(c, t, number)
}

/// Where a queue pair is today.
#[derive(Clone, Copy)]
pub(crate) struct Real {
    pub(crate) port: PortName,
    pub(crate) number: u32,
}

/// No queue pair has this number: it is that of groups, which have addresses of their own.
pub(crate) const NOBODY: u32 = 0xff_ffff;

impl Tables {
    /// Where the queue pair is that a program calls so. None for a group, and for what nobody has told of.
    fn find(&self, port: PortName, number: u32) -> Option<Real> {
        if let Some(n) = self.names.get(&QpName { port, number }) {
            return Some(Real {
                port: n.port,
                number: n.number,
            });
        }
        let now = self.places.now(port, number);
        // The name is of somebody who is gone. Who has the number there today is called otherwise.
        let there = QpName {
            port: now.unwrap_or(port),
            number,
        };
        if self.back.contains_key(&there) {
            return Some(Real {
                port: there.port,
                number: NOBODY,
            });
        }
        Some(Real { port: now?, number })
    }
}

/// What the program calls the queue pair that is there today.
pub(crate) fn find_back(port: PortName, number: u32) -> Option<QpName> {
    let t = tables()?;
    if let Some(name) = t.back.get(&QpName { port, number }) {
        return Some(*name);
    }
    let port = t.places.then(port, number)?;
    Some(QpName { port, number })
}

/// An address of the program's as it is today, and the queue pair behind it.
pub(crate) fn address(c: &ShadowContext, attr: &AhAttr, number: u32) -> (AhAttr, Option<Real>) {
    let mut now = *attr;
    let then = c.ports().iter().find(|p| p.number == attr.port_num);
    let (Some(then), Some(today)) = (then, c.today().iter().find(|p| p.number == attr.port_num)) else {
        return (now, None);
    };
    if attr.is_global != 0 {
        now.grh.sgid_index = today.index_like(then, attr.grh.sgid_index);
    }
    let group = if then.ethernet {
        attr.grh.dgid.raw[0] == 0xff
    } else {
        attr.dlid >= 0xc000
    };
    let found = if group {
        None
    } else {
        tables().and_then(|t| t.find(PortName::addressed(attr, then.ethernet), number))
    };
    if let Some(real) = found {
        if then.ethernet {
            now.grh.dgid = Gid { raw: real.port.0 };
        } else {
            now.dlid = real.port.as_lid();
            let gids = tables().and_then(|t| t.places.gid((PortName::lid(attr.dlid), real.port), |g| g.0 == attr.grh.dgid));
            now.grh.dgid = gids.map_or(now.grh.dgid, |g| g.1);
        }
    }
    (now, found)
}

/// An address of today's that leads back to the own port, where it was to lead to one that is not there.
pub(crate) fn nowhere(c: &ShadowContext, attr: &AhAttr) -> AhAttr {
    let mut back = *attr;
    if let Some(port) = c.today().iter().find(|p| p.number == attr.port_num) {
        back.dlid = port.lid;
        let own = port.gid(attr.grh.sgid_index.into());
        back.grh.dgid = own.map_or(attr.grh.dgid, |g| g.gid);
    }
    back
}

/// The same of a port, whichever queue pair is meant there.
pub(crate) fn address_of_port(c: &ShadowContext, attr: &AhAttr) -> AhAttr {
    address(c, attr, NOBODY).0
}

/// Makes a received datagram one of the program's: who has sent it, and the header in front of it.
///
/// # Safety
/// `header` is where the first bytes of the datagram are, if it has as many as a header.
pub(crate) unsafe fn received(q: &ShadowQp, wc: &mut Wc, header: Option<*mut u8>) {
    let Some(then) = port_of(q) else { return };
    let c = context_of(q);
    let Some(now) = c.today().iter().find(|p| p.number == then.number) else {
        return;
    };
    let grh = if wc.wc_flags & WC_GRH != 0 { header } else { None };
    let sender = match (then.ethernet, grh) {
        (false, _) => Some(PortName::lid(wc.slid)),
        (true, Some(grh)) => Some(PortName(ends(grh).0 .0.raw)),
        (true, None) => None,
    };
    let Some(name) = sender.and_then(|port| find_back(port, wc.src_qp)) else {
        return;
    };
    wc.src_qp = name.number;
    let from = PortName::lid(wc.slid);
    if !then.ethernet {
        wc.slid = name.port.as_lid();
    }
    if let Some(grh) = grh {
        let gid = match then.ethernet {
            true => Some(Gid { raw: name.port.0 }),
            false => {
                let now = ends(grh).0 .0;
                tables()
                    .and_then(|t| t.places.gid((name.port, from), |g| g.1 == now))
                    .map(|g| g.0)
            }
        };
        rewrite(grh, then, now, gid);
    }
}

/// The length of IPv4's header.
const IPV4_BYTES: usize = 20;

/// The sum of IPv4's header (RFC 1071): 0 where the header has the right one in it.
fn checksum(header: &[u8; IPV4_BYTES]) -> u16 {
    let words = header.chunks_exact(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
    let sum: u32 = words.sum();
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// IPv4's header, which on Ethernet may stand at the end of this one. What is in front of it then is anything, and may
/// look like the beginning of one of IPv6: the sum decides, as in the kernel (`ib_get_rdma_header_version`).
///
/// # Safety
/// A whole header can be read.
unsafe fn ipv4_of(grh: *mut u8) -> Option<*mut [u8; IPV4_BYTES]> {
    let header = grh.add(GRH_BYTES - IPV4_BYTES).cast::<[u8; IPV4_BYTES]>();
    let is_one = (*header)[0] == 0x45 && (*grh >> 4 != 6 || checksum(&*header) == 0);
    is_one.then_some(header)
}

/// The two GIDs of a header, and whether they are IPv4's.
///
/// # Safety
/// A whole header can be read.
pub(crate) unsafe fn ends(grh: *mut u8) -> ((Gid, Gid), bool) {
    if ipv4_of(grh).is_none() {
        let at = |n: usize| Gid {
            raw: *grh.add(n).cast::<[u8; 16]>(),
        };
        return ((at(8), at(24)), false);
    }
    let at = |n: usize| {
        let mut gid = Gid::default();
        (gid.raw[10], gid.raw[11]) = (0xff, 0xff);
        gid.raw[12..].copy_from_slice(&*grh.add(n).cast::<[u8; 4]>());
        gid
    };
    ((at(32), at(36)), true)
}

/// Puts the GIDs that the program knows into a header.
unsafe fn rewrite(grh: *mut u8, then: &Port, now: &Port, sender: Option<Gid>) {
    let ((_, to), ipv4) = ends(grh);
    let own = now.gids.iter().find(|g| g.gid == to);
    let own = own.and_then(|g| then.gid(then.index_like(now, g.gid_index as u8).into()));
    let put = |n: usize, gid: Gid| match ipv4 {
        true => std::ptr::copy_nonoverlapping(gid.raw[12..].as_ptr(), grh.add(n), 4),
        false => std::ptr::copy_nonoverlapping(gid.raw.as_ptr(), grh.add(n), 16),
    };
    if let Some(sender) = sender {
        put(if ipv4 { 32 } else { 8 }, sender);
    }
    if let Some(own) = own {
        put(if ipv4 { 36 } else { 24 }, own.gid);
    }
    if ipv4 {
        let header = &mut *grh.add(GRH_BYTES - IPV4_BYTES).cast::<[u8; IPV4_BYTES]>();
        (header[10], header[11]) = (0, 0);
        let sum = checksum(header).to_be_bytes();
        (header[10], header[11]) = (sum[0], sum[1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_share_a_port_share_the_numbers() {
        let [a, b, c, x, y, z] = [1, 2, 3, 7, 8, 9].map(PortName::lid);
        // a was split, and b came to where one half of it is.
        let all = [(a, x), (a, y), (b, y), (c, z)];
        let places = Places::new(all.into_iter().map(|p| (p, Vec::new())).collect());
        let own = |place| (0..6000).filter(|n| places.suits(place, *n)).count();
        assert!(all[..3].iter().all(|p| (1900..2100).contains(&own(*p))) && own(all[3]) == 6000);
        // Whoever gets each third number has some of its own among few.
        for (place, first) in all[..3].iter().flat_map(|p| (0..300).map(move |n| (*p, n))) {
            assert!((0..64).any(|n| places.suits(place, first + 3 * n)), "from {first}");
        }
        let before = crate::heap::tests::taken();
        assert!(places.now(a, 5).is_some() && places.then(y, 7).is_some());
        assert_eq!(crate::heap::tests::taken(), before, "whoever posts or polls takes memory");
        for number in 0..6 {
            let suits: Vec<Place> = all[..3].iter().copied().filter(|p| places.suits(*p, number)).collect();
            assert_eq!(suits.len(), 1);
            assert_eq!(places.now(suits[0].0, number), Some(suits[0].1));
            assert_eq!(places.then(suits[0].1, number), Some(suits[0].0));
        }
        assert_eq!((places.now(x, 4), places.then(a, 4)), (None, None));
    }

    #[test]
    fn gids_are_names_too() {
        let gid = |n: u8| Gid { raw: [n; 16] };
        let place = (PortName(gid(1).raw), PortName(gid(5).raw));
        let places = Places::new(BTreeMap::from([(place, vec![(gid(1), gid(5)), (gid(2), gid(6))])]));
        assert_eq!(places.now(PortName(gid(2).raw), 77), Some(PortName(gid(6).raw)));
        assert_eq!(places.then(PortName(gid(6).raw), 77), Some(PortName(gid(2).raw)));
        assert_eq!(places.gid(place, |g| g.1 == gid(5)), Some((gid(1), gid(5))));
    }
    #[test]
    fn who_has_the_number_of_a_dead_one_does_not_get_its_datagrams() {
        let [then, now, other] = [1, 2, 3].map(PortName::lid);
        let mut t = Tables {
            places: Places::new(BTreeMap::from([((then, now), Vec::new())])),
            ..Tables::default()
        };
        let lives = QpName { port: then, number: 10 };
        let fact = NameFact {
            port: now,
            number: 77,
            received: 0,
        };
        t.names.insert(lives, fact);
        t.back.insert(QpName { port: now, number: 77 }, lives);
        let found = |port, number| t.find(port, number).map(|r| (r.port, r.number));
        assert_eq!(found(then, 10), Some((now, 77)));
        assert_eq!(found(then, 77), Some((now, NOBODY)));
        // Of a port that is gone, whose name is today's of another.
        assert_eq!(found(now, 77), Some((now, NOBODY)));
        assert_eq!(found(then, 11), Some((now, 11)));
        assert_eq!(found(other, 77), None);
    }
    #[test]
    fn what_is_in_front_of_a_header_of_ipv4_is_anything() {
        let gid = |last: u8| {
            let mut gid = Gid::default();
            (gid.raw[10], gid.raw[11]) = (0xff, 0xff);
            gid.raw[12..].copy_from_slice(&[10, 0, 0, last]);
            gid
        };
        let port = |last| Port {
            number: 1,
            lid: 0,
            sm_lid: 0,
            ethernet: true,
            gids: vec![GidEntry {
                gid: gid(last),
                gid_index: 0,
                port_num: 1,
                gid_type: 2,
                ndev_ifindex: 0,
            }],
            places: 1,
        };
        let mut grh = [0x66; GRH_BYTES];
        // By RFC 1071 the sum is 0x66eb.
        grh[20..].copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0x66, 0xeb, 10, 0, 0, 1, 10, 0, 0, 2]);
        let at = grh.as_mut_ptr();
        // SAFETY: a whole header.
        unsafe {
            assert_eq!(ends(at), ((gid(1), gid(2)), true));
            rewrite(at, &port(9), &port(2), Some(gid(8)));
            assert_eq!(ends(at), ((gid(8), gid(9)), true));
        }
        // Without that sum it is the address of a header of IPv6.
        grh[31] ^= 1;
        // SAFETY: a whole header.
        assert!(!unsafe { ends(grh.as_mut_ptr()) }.1);
    }
}
