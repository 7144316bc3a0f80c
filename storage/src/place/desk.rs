//! The desk at which writers ask for a place, in order of arrival, and flushers for the next chunk.
//!
//! ```text
//! ask ──> Waiting ──granted──> writing ──written──> pending ──take──> being flushed ──flushed──> room
//!            └─ home: no flush is under way that could make room
//! ```
//! Whenever something changes all who wait are looked at, the oldest first, so nobody gets a place that somebody who
//! came before wanted. Knows numbers only, no chunk files.

use super::claims::Claims;
use super::model::Model;
use super::rule::{choose, Policy, View};
use crate::tier::directory::free_bytes;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Weight of the newest observation in the moving average of the flush's bandwidth.
const NEWEST: f64 = 0.2;

/// A local tier.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Most bytes in it.
    pub capacity: u64,
    /// It lies in memory.
    pub memory: bool,
    /// What its writers get.
    pub model: Model,
    /// What other parts of the job have of it, where it may have any on this host.
    pub shared: Option<Arc<Claims>>,
}

/// Where a chunk goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A local tier, by number.
    Tier(usize),
    /// Where all chunks end.
    Home,
}

/// A request for a place.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

#[derive(Debug, Default, Clone)]
struct Load {
    used: u64,
    writers: u32,
    pending: VecDeque<(u64, u64)>,
    flushing: u32,
    closed: bool,
}

#[derive(Debug, Default)]
struct State {
    tickets: u64,
    waiting: VecDeque<(u64, u64)>,
    granted: BTreeMap<u64, (Place, u64)>,
    loads: Vec<Load>,
    /// Bytes per second of all flushers together, as a moving average.
    flush: f64,
    flushers: u32,
    writing: u32,
    closed: bool,
    /// Bytes that may still be taken of memory, whatever the tiers there could hold.
    memory_left: u64,
}

/// The desk.
#[derive(Debug)]
pub struct Desk {
    policy: Policy,
    tiers: Vec<Spec>,
    /// Their directories, where the file system is to have room too.
    dirs: Vec<PathBuf>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Desk {
    /// A desk for `tiers`.
    pub fn new(policy: Policy, tiers: Vec<Spec>) -> Self {
        let state = State {
            loads: vec![Load::default(); tiers.len()],
            memory_left: u64::MAX,
            ..State::default()
        };
        Self {
            policy,
            tiers,
            dirs: Vec::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// The same for tiers in these directories, whose file systems may have less room than the tiers may use.
    #[must_use]
    pub fn at(self, dirs: Vec<PathBuf>) -> Self {
        Self { dirs, ..self }
    }

    /// Whether the file system of `tier` has room for `bytes`, and for as much for each of `writers`, who may not have
    /// begun to write. One that does not say is taken to have it.
    fn has_space(&self, tier: usize, bytes: u64, writers: u32) -> bool {
        let free = self.dirs.get(tier).and_then(|dir| free_bytes(dir).ok());
        free.is_none_or(|free| bytes.saturating_mul(u64::from(writers) + 1) <= free)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tier for `bytes` that somebody wants who waits behind `ahead` others; none to wait.
    fn choose(&self, state: &State, bytes: u64, ahead: u32) -> Option<usize> {
        let view = |(i, (t, l)): (usize, (&Spec, &Load))| View {
            alone: t.model.per_writer(1),
            next: t.model.per_writer(l.writers + 1),
            crowd: (l.writers >= t.model.useful()).then(|| t.model.total(l.writers)),
            room: !l.closed
                && l.used + bytes <= t.capacity
                && (!t.memory || bytes <= state.memory_left)
                && self.has_space(i, bytes, l.writers),
            memory: t.memory,
        };
        let mut views: Vec<View> = self.tiers.iter().zip(&state.loads).enumerate().map(view).collect();
        loop {
            let tier = choose(self.policy, &views, state.flush, ahead)?;
            let (spec, used) = (&self.tiers[tier], state.loads[tier].used);
            let shared = spec.shared.as_ref();
            if shared.is_none_or(|s| s.take((used, used + bytes), spec.capacity)) {
                return Some(tier);
            }
            // Other parts have the rest of it.
            views[tier].room = false;
        }
    }

    /// What other parts may know has changed: this one has `used` of `tier`.
    fn tell(&self, tier: usize, used: u64) {
        let told = self.tiers[tier].shared.as_ref().map(|s| s.set(used));
        if let Some(Err(e)) = told {
            tracing::warn!(tier, error = %e, "what is used of a local tier is not told to other parts");
        }
    }

    /// Looks at all who wait, the oldest first.
    fn settle(&self, state: &mut State) {
        let mut ahead = 0;
        let mut at = 0;
        while let Some((ticket, bytes)) = state.waiting.get(at).copied() {
            let hope = state.writing > 0 || state.loads.iter().any(|l| l.flushing > 0 || !l.pending.is_empty());
            let place = match self.choose(state, bytes, ahead) {
                Some(tier) => Place::Tier(tier),
                None if !hope => Place::Home,
                None => {
                    ahead += 1;
                    at += 1;
                    continue;
                }
            };
            if let Place::Tier(tier) = place {
                state.loads[tier].used += bytes;
                state.loads[tier].writers += 1;
                state.writing += 1;
                if self.tiers[tier].memory {
                    state.memory_left = state.memory_left.saturating_sub(bytes);
                }
            }
            state.waiting.remove(at);
            state.granted.insert(ticket, (place, bytes));
        }
        self.changed.notify_all();
    }

    /// Asks for a place for `bytes`.
    pub fn ask(&self, bytes: u64) -> Ticket {
        let mut state = self.state();
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiting.push_back((ticket, bytes));
        self.settle(&mut state);
        Ticket(ticket)
    }

    /// The place, once there is one; the ticket is used up by it.
    pub fn granted(&self, ticket: &Ticket) -> Option<Place> {
        self.state().granted.remove(&ticket.0).map(|(place, _)| place)
    }

    /// Waits for the place.
    pub fn wait(&self, ticket: &Ticket) -> Place {
        let mut state = self.state();
        loop {
            match state.granted.remove(&ticket.0) {
                Some((place, _)) => return place,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// A place for `bytes` now, without waiting: where the rule says wait, home.
    pub fn now(&self, bytes: u64) -> Place {
        let ticket = self.ask(bytes);
        if let Some(place) = self.granted(&ticket) {
            return place;
        }
        self.forget(&ticket);
        Place::Home
    }

    /// The place is not wanted any more.
    pub fn forget(&self, ticket: &Ticket) {
        let mut state = self.state();
        state.waiting.retain(|(t, _)| *t != ticket.0);
        if let Some((Place::Tier(tier), bytes)) = state.granted.remove(&ticket.0) {
            self.release(&mut state, tier, bytes, 0);
        }
        self.settle(&mut state);
    }

    /// Whether somebody waits.
    pub fn is_waited_for(&self) -> bool {
        !self.state().waiting.is_empty()
    }

    /// Chunk `id` has been written to `tier`, where room for `granted` was given and `bytes` are used: it can be flushed.
    pub fn written(&self, tier: usize, id: u64, granted: u64, bytes: u64) {
        let mut state = self.state();
        self.release(&mut state, tier, granted, bytes);
        state.loads[tier].pending.push_back((id, bytes));
        self.settle(&mut state);
    }

    /// What a writer was to write to `tier` has been given up.
    pub fn abandoned(&self, tier: usize, granted: u64) {
        let mut state = self.state();
        self.release(&mut state, tier, granted, 0);
        self.settle(&mut state);
    }

    /// A writer to `tier` is done, and keeps `bytes` of the room that it was granted.
    fn release(&self, state: &mut State, tier: usize, granted: u64, bytes: u64) {
        let load = &mut state.loads[tier];
        load.writers -= 1;
        state.writing -= 1;
        self.make_free(state, tier, granted.saturating_sub(bytes));
    }

    fn make_free(&self, state: &mut State, tier: usize, bytes: u64) {
        let load = &mut state.loads[tier];
        load.used = load.used.saturating_sub(bytes);
        self.tell(tier, load.used);
        if self.tiers[tier].memory {
            state.memory_left = state.memory_left.saturating_add(bytes);
        }
    }

    /// A chunk lies in `tier` already, from before.
    pub fn found(&self, tier: usize, id: u64, bytes: u64) {
        let mut state = self.state();
        state.loads[tier].used += bytes;
        self.tell(tier, state.loads[tier].used);
        state.loads[tier].pending.push_back((id, bytes));
        self.settle(&mut state);
    }

    /// The next chunk to flush, as (tier, id, bytes); waits for one. `None` at the end.
    pub fn take(&self) -> Option<(usize, u64, u64)> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            match self.next(&mut state) {
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                next => return next,
            }
        }
    }

    /// The same without waiting: `None` where there is nothing to flush now.
    pub fn try_take(&self) -> Option<(usize, u64, u64)> {
        self.next(&mut self.state())
    }

    fn next(&self, state: &mut State) -> Option<(usize, u64, u64)> {
        let waited = !state.waiting.is_empty();
        let ready = || state.loads.iter().enumerate().filter(|(_, l)| !l.pending.is_empty());
        let speed = |i: usize| self.tiers[i].model.per_writer(1);
        // While writers wait, room in the fastest tier helps them most. Else all tiers are read at once, so that none
        // is read alone at the end, the slowest first.
        let next = if waited {
            ready().max_by(|a, b| speed(a.0).total_cmp(&speed(b.0)))
        } else {
            ready().min_by(|a, b| {
                (a.1.flushing, speed(a.0))
                    .partial_cmp(&(b.1.flushing, speed(b.0)))
                    .unwrap_or(std::cmp::Ordering::Equal)
            })
        };
        let tier = next.map(|(tier, _)| tier)?;
        let load = &mut state.loads[tier];
        let (id, bytes) = load.pending.pop_front()?;
        load.flushing += 1;
        state.flushers += 1;
        Some((tier, id, bytes))
    }

    /// Bytes per second of the moves so far, as a moving average; none before the first.
    pub fn observed(&self) -> Option<f64> {
        Some(self.state().flush).filter(|flush| *flush > 0.0)
    }

    /// A flusher has moved `bytes` within `time`.
    pub fn observe(&self, bytes: u64, time: Duration) {
        let mut state = self.state();
        // All flushers together move this, as long as they move the same.
        let now = bytes as f64 / time.as_secs_f64().max(1e-6) * f64::from(state.flushers.max(1));
        state.flush = if state.flush == 0.0 {
            now
        } else {
            state.flush + NEWEST * (now - state.flush)
        };
    }

    /// A chunk of `bytes` that could not be flushed is no longer in `tier` either.
    pub fn removed(&self, tier: usize, bytes: u64) {
        let mut state = self.state();
        self.make_free(&mut state, tier, bytes);
        self.settle(&mut state);
    }

    /// A chunk of `bytes` is no longer in `tier`; where it could not be flushed (`done` is false) it stays there, and
    /// is not tried again.
    pub fn flushed(&self, tier: usize, bytes: u64, done: bool) {
        let mut state = self.state();
        state.loads[tier].flushing -= 1;
        if done {
            self.make_free(&mut state, tier, bytes);
        }
        state.flushers -= 1;
        self.settle(&mut state);
    }

    /// No further chunks go to `tier`.
    pub fn close_tier(&self, tier: usize) {
        let mut state = self.state();
        state.loads[tier].closed = true;
        self.settle(&mut state);
    }

    /// A chunk of `bytes` that lies in `tier` and could not be flushed is to be tried again.
    pub fn again(&self, tier: usize, id: u64, bytes: u64) {
        let mut state = self.state();
        state.loads[tier].pending.push_back((id, bytes));
        self.settle(&mut state);
    }

    /// From now on tiers in memory may take `bytes` more than they hold, besides what is flushed from them.
    pub fn limit_memory(&self, bytes: u64) {
        self.state().memory_left = bytes;
    }

    /// Bytes free in tiers that lie in memory.
    pub fn room_in_memory(&self) -> u64 {
        let state = self.state();
        let tiers = self.tiers.iter().zip(&state.loads).filter(|(t, _)| t.memory);
        tiers
            .map(|(t, l)| t.capacity.saturating_sub(l.used))
            .fold(0, u64::saturating_add)
    }

    /// Observed bandwidth of the flush, bytes per second.
    pub fn bandwidth(&self) -> f64 {
        self.state().flush
    }

    /// Whether all that was written has been flushed, or could not be.
    pub fn is_idle(&self) -> bool {
        let state = self.state();
        state.loads.iter().all(|l| l.flushing == 0 && l.pending.is_empty())
    }

    /// Waits until all that was written has been flushed, or could not be.
    pub fn drain(&self) {
        let mut state = self.state();
        while !state.closed && state.loads.iter().any(|l| l.flushing > 0 || !l.pending.is_empty()) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Flushers end.
    pub fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(capacity: u64, memory: bool, all: f64) -> Spec {
        Spec {
            capacity,
            memory,
            model: Model::new(1, vec![all]).unwrap(),
            shared: None,
        }
    }

    fn desk(policy: Policy) -> Desk {
        Desk::new(policy, vec![spec(20, true, 1000.0), spec(1000, false, 100.0)])
    }

    #[test]
    fn a_tier_has_no_more_room_than_its_file_system() {
        let bytes = 1 << 60;
        let desk = || Desk::new(Policy::default(), vec![spec(u64::MAX, false, 1e9)]);
        assert_eq!(desk().now(bytes), Place::Tier(0));
        let there = desk().at(vec![std::env::temp_dir()]);
        assert_eq!((there.now(bytes), there.now(4096)), (Place::Home, Place::Tier(0)));
        // One that cannot be asked says nothing.
        assert_eq!(desk().at(vec!["/proc/nowhere".into()]).now(bytes), Place::Tier(0));
    }

    #[test]
    fn places_are_given_in_order_of_arrival() {
        let d = desk(Policy::FastestOnly);
        let t: Vec<Ticket> = (0..5).map(|_| d.ask(10)).collect();
        let granted: Vec<_> = t.iter().map(|t| d.granted(t)).collect();
        assert_eq!(granted, [Some(Place::Tier(0)), Some(Place::Tier(0)), None, None, None]);
        d.written(0, 7, 10, 10);
        assert_eq!(d.granted(&t[2]), None, "written is not flushed");
        assert_eq!(d.take(), Some((0, 7, 10)));
        d.flushed(0, 10, true);
        assert_eq!((d.granted(&t[3]), d.granted(&t[2])), (None, Some(Place::Tier(0))));
        d.forget(&t[3]);
        d.abandoned(0, 10);
        assert_eq!(d.granted(&t[4]), Some(Place::Tier(0)));
    }

    #[test]
    fn who_waits_behind_others_takes_a_slow_tier_that_beats_its_share_of_the_flush() {
        let d = desk(Policy::Adaptive);
        let first: Vec<Ticket> = (0..2).map(|_| d.ask(10)).collect();
        assert!(first.iter().all(|t| d.granted(t) == Some(Place::Tier(0))));
        d.observe(150, Duration::from_secs(1));
        let t: Vec<Ticket> = (0..3).map(|_| d.ask(10)).collect();
        let granted: Vec<_> = t.iter().map(|t| d.granted(t)).collect();
        // 150 beats 100; half of it does not; for the third a tier with two writers gives 50, half of the flush 75.
        assert_eq!(granted, [None, Some(Place::Tier(1)), None]);
    }

    #[test]
    fn where_no_flush_can_make_room_chunks_go_home() {
        let d = Desk::new(Policy::FastestOnly, vec![spec(10, true, 1000.0)]);
        let big = d.ask(11);
        assert_eq!(d.granted(&big), Some(Place::Home), "it never fits");
        assert_eq!(d.now(10), Place::Tier(0));
        let t = d.ask(10);
        assert_eq!(d.granted(&t), None);
        assert_eq!(d.now(10), Place::Home, "who cannot wait does not");
        d.written(0, 1, 10, 8);
        assert_eq!(d.take(), Some((0, 1, 8)));
        d.flushed(0, 8, false);
        assert_eq!(d.granted(&t), Some(Place::Home), "the flush has failed");
        assert!(d.is_idle());
        let closed = Desk::new(Policy::Adaptive, vec![spec(100, true, 1000.0)]);
        closed.close_tier(0);
        assert_eq!(closed.now(10), Place::Home);
        let short = Desk::new(Policy::Adaptive, vec![spec(100, true, 1000.0)]);
        short.limit_memory(15);
        assert_eq!(
            (short.now(10), short.now(10)),
            (Place::Tier(0), Place::Home),
            "memory is short"
        );
        short.abandoned(0, 10);
        assert_eq!(short.now(15), Place::Tier(0));
        assert_eq!(Desk::new(Policy::LocalOnly, vec![spec(100, true, 1.0)]).now(1), Place::Home);
    }

    #[test]
    fn while_writers_wait_the_fastest_tier_is_flushed_first() {
        let d = desk(Policy::Naive);
        for (id, tier) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
            let t = d.ask(10);
            assert_eq!(d.granted(&t), Some(Place::Tier(tier)));
            d.written(tier, id, 10, 10);
        }
        assert_eq!(d.take().map(|t| t.1), Some(3), "nobody waits: the slowest first");
        assert_eq!(d.take().map(|t| t.1), Some(1), "and the others beside it");
        let d = desk(Policy::FastestOnly);
        d.found(1, 9, 10);
        d.found(0, 1, 10);
        d.found(0, 2, 10);
        let t = d.ask(10);
        assert_eq!(d.take().map(|t| t.1), Some(1));
        d.flushed(0, 10, true);
        assert_eq!(d.granted(&t), Some(Place::Tier(0)));
        d.close();
        assert_eq!(d.take(), None);
    }

    #[test]
    fn every_writer_gets_a_place_and_no_tier_more_than_it_holds() {
        use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
        for policy in Policy::ALL {
            let d = desk(policy);
            let (used, flushed) = ([AtomicU64::new(0), AtomicU64::new(0)], AtomicU64::new(0));
            std::thread::scope(|s| {
                for _ in 0..2 {
                    s.spawn(|| {
                        while let Some((tier, _, bytes)) = d.take() {
                            d.observe(bytes, Duration::from_micros(50));
                            used[tier].fetch_sub(bytes, SeqCst);
                            flushed.fetch_add(1, SeqCst);
                            d.flushed(tier, bytes, true);
                        }
                    });
                }
                let writers: Vec<_> = (0..4)
                    .map(|w| {
                        let (d, used) = (&d, &used);
                        s.spawn(move || {
                            let mut home = 0;
                            for id in 0..200 {
                                match d.wait(&d.ask(7)) {
                                    Place::Home => home += 1,
                                    Place::Tier(tier) => {
                                        assert!(used[tier].fetch_add(7, SeqCst) + 7 <= [20, 1000][tier]);
                                        d.written(tier, w * 1000 + id, 7, 7);
                                    }
                                }
                            }
                            home
                        })
                    })
                    .collect();
                let home: u64 = writers.into_iter().map(|w| w.join().unwrap()).sum();
                d.drain();
                assert_eq!(flushed.load(SeqCst) + home, 800, "{policy:?}");
                d.close();
            });
        }
    }
}
