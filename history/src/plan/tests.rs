//! The planner in a world of copies with fixed times.

use super::*;
use crate::life::After;
use crate::table::Room;
use proptest::prelude::*;

/// The simulation of the specification: one pool of `room` versions over a slow device that needs `slow` for one; all
/// puts, then all gets, `interval` between them. Seconds of both passes.
mod pool {
    use std::collections::{BTreeMap, BTreeSet};

    #[derive(Clone, Copy)]
    pub(super) struct Pool {
        pub(super) count: usize,
        pub(super) room: usize,
        pub(super) interval: f64,
        pub(super) slow: f64,
        pub(super) early: bool,
        pub(super) farthest: bool,
    }

    struct Forward<'a> {
        p: Pool,
        at: &'a BTreeMap<usize, usize>,
        free: usize,
        spilled: BTreeSet<usize>,
        here: Vec<usize>,
        device: f64,
        current: Option<usize>,
        born: BTreeMap<usize, f64>,
    }

    impl Forward<'_> {
        fn pump(&mut self, now: f64) {
            loop {
                if let Some(v) = self.current {
                    if self.device > now {
                        return;
                    }
                    self.spilled.insert(v);
                    self.here.retain(|h| *h != v);
                    self.free += 1;
                    self.current = None;
                } else if self.spilled.len() >= self.p.count - self.p.room || self.here.is_empty() || !self.p.early && self.free > 0
                {
                    return;
                } else {
                    let farthest = self.here.iter().copied().max_by_key(|v| self.at[v]);
                    let v = farthest.filter(|_| self.p.farthest).unwrap_or(self.here[0]);
                    self.current = Some(v);
                    self.device = self.device.max(self.born[&v]) + self.p.slow;
                }
            }
        }
    }

    fn forward(p: Pool, at: &BTreeMap<usize, usize>) -> (f64, BTreeSet<usize>, BTreeSet<usize>) {
        let mut f = Forward {
            p,
            at,
            free: p.room,
            spilled: BTreeSet::new(),
            here: Vec::new(),
            device: 0.0,
            current: None,
            born: BTreeMap::new(),
        };
        let mut now = 0.0;
        for v in 0..p.count {
            now += p.interval;
            f.pump(now);
            while f.free == 0 {
                now = f64::max(now, f.device);
                f.pump(now);
            }
            f.free -= 1;
            f.here.push(v);
            f.born.insert(v, now);
            if f.current.is_none() {
                f.device = f.device.max(now);
            }
            f.pump(now);
        }
        (now, f.spilled, f.here.into_iter().collect())
    }

    pub(super) fn run(p: Pool, order: &[usize]) -> [f64; 2] {
        let at: BTreeMap<usize, usize> = order.iter().enumerate().map(|(i, v)| (*v, i)).collect();
        let (first, spilled, mut here) = forward(p, &at);
        let (mut now, mut device, mut current, mut room) = (0.0, 0.0, None, 0.0);
        let mut free = p.room - here.len();
        let mut queue: Vec<usize> = order.iter().copied().filter(|v| spilled.contains(v)).collect();
        for v in order {
            now += p.interval;
            loop {
                if current.is_some() && device <= now {
                    here.extend(current.take());
                }
                if current.is_none() && !queue.is_empty() && free > 0 {
                    current = Some(queue.remove(0));
                    free -= 1;
                    device = f64::max(device, room) + p.slow;
                } else if here.remove(v) {
                    free += 1;
                    room = now;
                    break;
                } else if current.is_none() {
                    // No room: straight to the application.
                    queue.retain(|q| q != v);
                    device = f64::max(device, now) + p.slow;
                    now = device;
                    break;
                } else {
                    now = f64::max(now, device);
                }
            }
        }
        [first, now]
    }
}

const COUNT: usize = 384;
const ROOM: usize = 288;
const INTERVAL: f64 = 0.01;
const SLOW: f64 = 0.067;

/// In the same order, in reverse, and shuffled.
fn orders() -> [Vec<usize>; 3] {
    let same: Vec<usize> = (0..COUNT).collect();
    let reverse = same.iter().rev().copied().collect();
    let mut shuffled = same.clone();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for i in (1..COUNT).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        shuffled.swap(i, (state >> 11) as usize % (i + 1));
    }
    [same, reverse, shuffled]
}

/// Two tiers: memory, of `bytes` in extents, and a disk, which takes or gives so much in a second.
fn with_disk(bytes: u64, extent: u64, rate: f64) -> Config {
    Config {
        rules: Rules::OURS,
        rooms: vec![Room::Paged { bytes, extent }, Room::Endless],
        links: vec![Link {
            down: rate,
            up: rate,
            duplex: false,
        }],
        copy: 1e15,
    }
}

fn limit() -> f64 {
    2.0 * f64::max(COUNT as f64 * INTERVAL, (COUNT - ROOM) as f64 * SLOW)
}

#[test]
fn what_is_read_last_is_flushed_first_and_early() {
    let found = |early, farthest| {
        let pool = pool::Pool {
            count: COUNT,
            room: ROOM,
            interval: INTERVAL,
            slow: SLOW,
            early,
            farthest,
        };
        orders().map(|o| (100.0 * pool::run(pool, &o).iter().sum::<f64>() / limit()).round() / 100.0)
    };
    // Same order, reverse, shuffled; the last depends on the shuffle a little.
    let table = [
        (true, true, [1.0, 1.0, 1.0]),
        (true, false, [1.3, 1.0, 1.0]),
        (false, true, [1.23, 1.22, 1.22]),
        (false, false, [1.52, 1.22, 1.23]),
    ];
    for (early, farthest, expected) in table {
        let found = found(early, farthest);
        assert_eq!(found[..2], expected[..2]);
        assert!((found[2] - expected[2]).abs() < 0.015, "{found:?}");
    }
}

/// Copies that take a time of their own, one beside the other.
struct World {
    planner: Planner,
    copy: f64,
    links: Vec<Link>,
    now: f64,
    running: Vec<(f64, Job)>,
    log: Vec<(u64, Job)>,
    /// Every so many-th copy fails.
    fails: Option<u64>,
}

impl World {
    fn new(config: &Config) -> Self {
        Self {
            planner: Planner::new(config),
            copy: config.copy,
            links: config.links.clone(),
            now: 0.0,
            running: Vec::new(),
            log: Vec::new(),
            fails: None,
        }
    }

    fn seconds(&self, job: &Job) -> f64 {
        let bytes = job.bytes as f64;
        let down = |to: usize| {
            self.links[..to]
                .iter()
                .map(|l| bytes / l.down)
                .fold(bytes / self.copy, f64::max)
        };
        let up = |from: usize| {
            self.links[..from]
                .iter()
                .map(|l| bytes / l.up)
                .fold(bytes / self.copy, f64::max)
        };
        match job.copy {
            Copy::Put { to } => down(to),
            Copy::Read { from } => up(from),
            Copy::Down { from } => bytes / self.links[from].down,
            Copy::Up { to } => bytes / self.links[to].up,
        }
    }

    fn poll(&mut self) {
        for job in self.planner.poll(self.now).unwrap() {
            let (table, v) = (self.planner.table(), job.version);
            match job.copy {
                Copy::Put { to } => assert_eq!(table.state(v, to), State::Writing),
                Copy::Read { from } => assert!(table.state(v, from).is_whole()),
                Copy::Down { from } => {
                    assert!(table.state(v, from).is_whole());
                    assert_eq!(table.state(v, from + 1), State::Writing);
                }
                Copy::Up { to } => {
                    assert!(table.state(v, to + 1).is_whole());
                    assert_eq!(table.state(v, to), State::Reading);
                }
            }
            self.log.push((self.now.to_bits(), job));
            self.running.push((self.now + self.seconds(&job), job));
        }
        let cancelled = self.planner.cancelled();
        self.running.retain(|(_, j)| !cancelled.contains(&j.id));
    }

    /// The copy that ends next, if it does before `until`; false if the call of the application has failed with it.
    fn next(&mut self, until: f64) -> Option<bool> {
        let first = (0..self.running.len()).min_by(|a, b| self.running[*a].0.total_cmp(&self.running[*b].0))?;
        if self.running[first].0 > until {
            return None;
        }
        let (end, job) = self.running.remove(first);
        self.now = f64::max(self.now, end);
        let fails = self.fails.is_some_and(|n| job.id % n == 0);
        let has_failed = fails && self.planner.failed(self.now, job.id).unwrap();
        if !fails {
            self.planner.done(self.now, job.id).unwrap();
        }
        self.poll();
        Some(!has_failed)
    }

    fn work(&mut self, seconds: f64) {
        let until = self.now + seconds;
        while self.next(until).is_some() {}
        self.now = until;
        self.poll();
    }

    /// Until the application's call returns; false if it fails.
    fn wait(&mut self) -> bool {
        self.poll();
        let mut all_well = true;
        while self.planner.is_blocked() {
            match self.next(f64::INFINITY) {
                Some(well) => all_well = well,
                // Only copies that have failed are waited for.
                None => {
                    self.now += 2.0;
                    self.poll();
                    assert!(
                        !self.running.is_empty() || !self.planner.is_blocked(),
                        "nothing moves any more"
                    );
                }
            }
        }
        all_well
    }

    fn put(&mut self, version: u64, size: u64) -> bool {
        self.planner.put(self.now, Version(version), size).unwrap();
        self.wait()
    }

    fn get(&mut self, version: u64, after: After) -> bool {
        self.planner.get(self.now, Version(version), after).unwrap();
        self.wait()
    }
}

#[test]
fn what_could_not_be_fetched_is_not_fetched_again_but_read_from_where_it_is() {
    for rules in [Rules::OURS, Rules::SCORE] {
        let config = Config {
            rules,
            rooms: vec![Room::Paged { bytes: 16, extent: 1 }, Room::Endless],
            links: vec![Link {
                down: 100.0,
                up: 100.0,
                duplex: true,
            }],
            copy: 1e6,
        };
        let mut planner = Planner::new(&config);
        planner.found(Version(1), 8).unwrap();
        planner.hint([Version(1)]);
        planner.prefetch(true);
        let job = planner.poll(0.0).unwrap()[0];
        assert_eq!(job.copy, Copy::Up { to: 0 });
        assert!(!planner.failed(1.0, job.id).unwrap());
        assert_eq!(planner.poll(1.0).unwrap(), []);
        planner.get(2.0, Version(1), After::Keep).unwrap();
        let job = planner.poll(2.0).unwrap()[0];
        assert_eq!(job.copy, Copy::Read { from: 1 });
        planner.done(3.0, job.id).unwrap();
        // It could be read, so it is worth another try.
        planner.hint([Version(1)]);
        assert_eq!(planner.poll(3.0).unwrap()[0].copy, Copy::Up { to: 0 });
    }
}

/// The planner itself on the pool of the specification.
#[test]
fn the_planner_reaches_the_limit_of_the_pool() {
    const SIZE: u64 = 1 << 20;
    let rate = SIZE as f64 / SLOW;
    let config = with_disk(ROOM as u64 * SIZE, SIZE, rate);
    for order in orders() {
        let mut world = World::new(&config);
        world.planner.hint(order.iter().map(|v| Version(*v as u64)));
        for v in 0..COUNT {
            world.work(INTERVAL);
            world.put(v as u64, SIZE);
        }
        for v in order {
            world.work(INTERVAL);
            world.get(v as u64, After::Discard);
        }
        let by_limit = world.now / limit();
        assert!((0.999..1.03).contains(&by_limit), "{by_limit}");
        // A few more than have to, for room that whole versions cannot use.
        let down = world.planner.stats().down[0] / SIZE - (COUNT - ROOM) as u64;
        assert!(down <= 3, "{down}");
    }
}

/// Versions that were hinted, put and read in reverse order, of which tier 0 has room for a quarter: how many it had.
fn hits_of_small(size: u64) -> u64 {
    const EXTENT: u64 = 1 << 16;
    // A copy takes half of the time between two calls.
    let rate = 2.0 * size as f64 / INTERVAL;
    let config = with_disk(COUNT as u64 / 4 * EXTENT, EXTENT, rate);
    let mut world = World::new(&config);
    world.planner.hint((0..COUNT as u64).rev().map(Version));
    for v in 0..COUNT as u64 {
        world.work(INTERVAL);
        world.put(v, size);
    }
    for v in (0..COUNT as u64).rev() {
        world.work(INTERVAL);
        world.get(v, After::Discard);
    }
    world.planner.stats().hits[0]
}

#[test]
fn versions_smaller_than_an_extent_are_flushed_and_fetched_as_others_are() {
    let [small, whole] = [1000, 1 << 16].map(hits_of_small);
    assert!(
        small == whole && whole > COUNT as u64 * 9 / 10,
        "{small} of small ones, {whole} of whole ones"
    );
}

#[derive(Debug, Clone)]
enum Call {
    Put(u64),
    Get(usize, After),
    Drop(usize),
    Hint(Vec<usize>),
    Replace(usize, Vec<usize>),
    Flush(bool),
    Work(u8),
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let after = prop::sample::select(vec![After::Discard, After::Keep]);
    let list = || prop::collection::vec(0usize..60, 0..12);
    let call = prop_oneof![
        6 => (1u64..40).prop_map(Call::Put),
        5 => (0usize..60, after).prop_map(|(v, a)| Call::Get(v, a)),
        1 => (0usize..60).prop_map(Call::Drop),
        2 => list().prop_map(Call::Hint),
        1 => (0usize..40, list()).prop_map(|(f, l)| Call::Replace(f, l)),
        1 => any::<bool>().prop_map(Call::Flush),
        3 => any::<u8>().prop_map(Call::Work),
    ];
    prop::collection::vec(call, 1..120)
}

fn configs() -> impl Strategy<Value = Config> {
    let uvm = Rules {
        choice: Choice::Lru,
        flush: Flush::Late,
        migrate: true,
        ..Rules::LRU
    };
    let rules = prop::sample::select(vec![Rules::OURS, Rules::OURS, Rules::SCORE, Rules::LRU, Rules::BELADY, uvm]);
    (rules, any::<bool>(), prop::sample::select(vec![0u64, 40, 100]), 1.0..100.0f64).prop_map(
        |(rules, contiguous, device, rate)| {
            let room = |bytes| match contiguous {
                true => Room::Contiguous { bytes },
                false => Room::Paged { bytes, extent: 4 },
            };
            let rules = Rules {
                past: rules.past || device == 0,
                ..rules
            };
            let link = |rate, duplex| Link {
                down: rate,
                up: rate,
                duplex,
            };
            Config {
                rules,
                rooms: vec![room(device), room(200), Room::Endless],
                links: vec![link(rate, true), link(rate / 4.0, false)],
                copy: 1000.0,
            }
        },
    )
}

/// What the tables and lists must always say.
fn check(world: &World, there: &[u64]) {
    let planner = &world.planner;
    let table = planner.table();
    for v in there {
        assert!(table.fastest(Version(*v)).is_some(), "version {v} is lost");
    }
    for tier in 0..table.tiers() {
        let used: u64 = table
            .versions()
            .filter(|v| table.state(*v, tier).takes_room())
            .filter_map(|v| table.size(v))
            .sum();
        assert!(tier == 2 || used + table.free(tier) <= table.room(tier));
        for v in table.versions() {
            let is_planned = matches!(table.state(v, tier), State::Ready { .. });
            assert!(!is_planned || planner.order.next(v).is_some(), "{v:?} stays for no read");
        }
    }
}

fn carry_out(config: &Config, calls: &[Call], fails: Option<u64>) -> Vec<(u64, Job)> {
    let mut world = World::new(config);
    world.fails = fails;
    let (mut next, mut there) = (0u64, Vec::new());
    // Hints may name what has not been put yet.
    let version = |there: &[u64], next: u64, i: usize| there.get(i).copied().unwrap_or(next + i as u64 % 8);
    for call in calls {
        match call {
            Call::Put(size) => {
                if world.put(next, *size) {
                    there.push(next);
                }
                next += 1;
            }
            Call::Get(i, after) if !there.is_empty() => {
                let at = i % there.len();
                let well = world.get(there[at], *after);
                if well && *after == After::Discard {
                    there.remove(at);
                }
            }
            Call::Drop(i) if !there.is_empty() => {
                let gone = there.remove(i % there.len());
                world.planner.drop(Version(gone)).unwrap();
            }
            Call::Hint(list) => world.planner.hint(list.iter().map(|i| Version(version(&there, next, *i)))),
            Call::Replace(from, list) => {
                let versions: Vec<Version> = list.iter().map(|i| Version(version(&there, next, *i))).collect();
                world.planner.hint_replace(*from, versions);
            }
            Call::Flush(all) => world.planner.flush(*all),
            Call::Work(ticks) => world.work(f64::from(*ticks) / 10.0),
            Call::Get(..) | Call::Drop(..) => {}
        }
        world.poll();
        check(&world, &there);
    }
    // Everything can be flushed, and be read.
    world.fails = None;
    world.planner.flush(true);
    world.work(1000.0);
    world.work(1000.0);
    assert!(world.planner.is_flushed(world.planner.table().tiers() - 1));
    for v in there {
        assert!(world.get(v, After::Discard));
    }
    world.log
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    /// I2 to I5 and I8 under every policy: copies have sources, nothing is lost, nothing stays for a read that is not
    /// expected, every call returns, and the same calls give the same copies.
    #[test]
    fn every_call_returns_and_nothing_is_lost(
        config in configs(),
        calls in calls(),
        fails in prop::option::weighted(0.3, 5u64..30),
    ) {
        let log = carry_out(&config, &calls, fails);
        prop_assert_eq!(log, carry_out(&config, &calls, fails));
    }
}
