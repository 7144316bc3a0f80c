//! The planner of one history: which copy begins next on each link, in both directions. It is told what the program
//! asks ([`Planner::put`], [`Planner::get`], [`Planner::hint`]) and which copies have ended ([`Planner::done`]); after
//! each of these [`Planner::poll`] says which copies to begin. Who carries them out, threads or a virtual clock, is not
//! its matter.
//!
//! ```text
//! application ──Put──▶ tier 0 ──Down──▶ tier 1 ──Down──▶ tier 2 (endless)
//!             ◀─Read── tier 0 ◀──Up─── tier 1 ◀──Up───
//!             ◀─Read────────────────── tier 1           where there is no room above
//! ```
//! There is one copy at a time on each link in each direction, and one for the application, which is blocked until it
//! has ended. No wait has a cycle (I5): a put waits for flushes only, a flush for room below, and the last tier has
//! room always. Where nothing else can move, a put goes past the full tiers, and a read comes straight into the
//! application's memory.

mod app;
mod lanes;
mod need;
mod room;
mod rules;
mod size;
#[cfg(test)]
mod tests;

pub use rules::{Config, Copy, Flush, Job, Link, Rules};

use crate::choose::Choice;
use crate::life::{After, Event, State, Way};
use crate::order::Order;
use crate::table::{Rank, Table, TableError};
use crate::Version;
use std::collections::{BTreeMap, BTreeSet};

/// Why the planner refuses something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The table does.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The application waits for another call.
    #[error("another put or get is under way")]
    Busy,
    /// There is no such copy.
    #[error("copy {0} is unknown")]
    Job(u64),
}

/// Figures of a history.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes that went down each link,
    pub down: Vec<u64>,
    /// and up.
    pub up: Vec<u64>,
    /// Reads from each tier.
    pub hits: Vec<u64>,
    /// Copies that were cancelled.
    pub cancelled: u64,
}

/// A moving average.
#[derive(Debug, Clone, Copy)]
struct Mean {
    value: f64,
    seen: bool,
}

impl Mean {
    const WEIGHT: f64 = 0.2;

    fn of(value: f64) -> Self {
        Self { value, seen: false }
    }

    fn add(&mut self, sample: f64) {
        let weight = if self.seen { Self::WEIGHT } else { 1.0 };
        self.value += weight * (sample - self.value);
        self.seen = true;
    }
}

#[derive(Debug, Clone)]
struct Lanes {
    down: Mean,
    up: Mean,
    /// Bytes per second down that can be counted on while others use it too.
    share: f64,
    duplex: bool,
    downward: Option<u64>,
    upward: Option<u64>,
    /// Hints before this position are satisfied above the link.
    cursor: usize,
    /// Somebody lacks room above the link; with a rank, only what is read after that may go for it.
    short: Option<u64>,
    /// No copy down before this time, because some have failed,
    retry: f64,
    /// so many one after the other.
    failed: u32,
}

#[derive(Debug, Clone, Copy)]
struct Running {
    job: Job,
    began: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Put,
    Get(After),
}

#[derive(Debug, Clone, Copy)]
struct App {
    call: Call,
    version: Version,
    job: Option<u64>,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Planner {
    rules: Rules,
    copy: f64,
    table: Table,
    order: Order,
    lanes: Vec<Lanes>,
    jobs: BTreeMap<u64, Running>,
    ids: u64,
    cancelled: Vec<u64>,
    app: Option<App>,
    /// When the last call returned.
    returned: f64,
    interval: Mean,
    sizes: size::Sizes,
    got: bool,
    flush_all: bool,
    /// Versions that are not hinted, and not known to be read never again.
    unhinted: BTreeSet<Version>,
    /// Copies of them up have failed: they are not fetched ahead, but read from where they are.
    bad: BTreeSet<Version>,
    /// Of pages that migrate: read, but still to be moved.
    dead: BTreeSet<Version>,
    /// Counts calls, for the age of versions.
    stamp: u64,
    ages: BTreeMap<Version, Age>,
    /// Bytes that have been put.
    put: u64,
    /// Counts what could make room in each tier, and what is known of the last search for it.
    searches: Vec<room::Search>,
    stats: Stats,
}

#[derive(Debug, Clone, Copy)]
struct Age {
    born: u64,
    used: u64,
    /// Bytes that had been put before it.
    before: u64,
}

/// Ranks of those without a hint begin here: they are farther than any.
const UNHINTED: u64 = 1 << 40;
/// What will not be read again is the farthest.
const NEVER: u64 = 1 << 50;

impl Planner {
    /// An empty history.
    pub fn new(config: &Config) -> Self {
        let lanes = |l: &Link| Lanes {
            down: Mean::of(l.down),
            up: Mean::of(l.up),
            share: l.down,
            duplex: l.duplex,
            downward: None,
            upward: None,
            cursor: 0,
            short: None,
            retry: 0.0,
            failed: 0,
        };
        let tiers = config.rooms.len();
        Self {
            rules: config.rules,
            copy: config.copy,
            table: Table::new(&config.rooms),
            order: Order::default(),
            lanes: config.links.iter().map(lanes).collect(),
            jobs: BTreeMap::new(),
            ids: 0,
            cancelled: Vec::new(),
            app: None,
            returned: 0.0,
            interval: Mean::of(0.0),
            sizes: size::Sizes::default(),
            got: false,
            flush_all: false,
            unhinted: BTreeSet::new(),
            bad: BTreeSet::new(),
            dead: BTreeSet::new(),
            stamp: 0,
            ages: BTreeMap::new(),
            put: 0,
            searches: vec![room::Search::default(); tiers],
            stats: Stats {
                down: vec![0; config.links.len()],
                up: vec![0; config.links.len()],
                hits: vec![0; tiers],
                ..Stats::default()
            },
        }
    }

    /// What the tiers have.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Figures so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The application waits for a put or get.
    pub fn is_blocked(&self) -> bool {
        self.app.is_some()
    }

    /// Appends to the order of reads.
    pub fn hint(&mut self, versions: impl IntoIterator<Item = Version>) {
        self.hint_sized(versions.into_iter().map(|v| (v, None)));
    }

    /// The same, with the sizes that versions will have, where the program knows them.
    pub fn hint_sized(&mut self, versions: impl IntoIterator<Item = (Version, Option<u64>)>) {
        for (version, size) in versions {
            let put = self.table.size(version);
            let told = size.map(|bytes| self.table.size_of(bytes));
            self.order.push(version, put.or(told), put.is_some());
            self.rank(version);
        }
        self.look_again();
    }

    /// Replaces the order of reads from position `from` of all hints on.
    pub fn hint_replace(&mut self, from: usize, versions: impl IntoIterator<Item = Version>) {
        for version in self.order.cut(from) {
            self.unplan(version);
            self.rank(version);
        }
        self.hint(versions);
    }

    /// From now on everything is flushed to the last tier, as for a wait; see [`Planner::is_flushed`].
    pub fn flush(&mut self, all: bool) {
        self.flush_all = all;
    }

    /// `tier` or one below it has all versions, but for what nobody needs any more.
    pub fn is_flushed(&self, tier: usize) -> bool {
        // Spares looking at each version while some are not even on their way.
        if tier > 0 && self.dead.is_empty() && self.table.above(tier - 1) > 0 {
            return false;
        }
        self.table.versions().all(|v| self.is_down(v, tier))
    }

    /// The versions of which that is not so yet.
    pub fn unflushed(&self, tier: usize) -> Vec<Version> {
        self.table.versions().filter(|v| !self.is_down(*v, tier)).collect()
    }

    /// Whether `version` lies in `tier` or below, or is needed no more.
    pub fn is_down(&self, version: Version, tier: usize) -> bool {
        let last = self.table.tiers() - 1;
        let is_gone = self.table.size(version).is_none() || self.dead.contains(&version);
        is_gone || (tier..=last).any(|t| self.table.state(version, t).is_whole())
    }

    /// Whether versions are fetched ahead. From the beginning they are as soon as all that is hinted has been put, or
    /// at the first get; with `true` they are at once.
    pub fn prefetch(&mut self, on: bool) {
        self.rules.prefetch = on;
        self.got |= on;
    }

    /// A version that the last tier has from before, in an earlier life of the history.
    pub fn found(&mut self, version: Version, size: u64) -> Result<(), PlanError> {
        self.enter(version, size)?;
        let last = self.table.tiers() - 1;
        self.table.reserve(version, last, Way::Down)?;
        self.table.apply(version, last, Event::Arrived)?;
        self.rank(version);
        Ok(())
    }

    /// When a copy down `link` that has failed is to be tried again: [`Planner::poll`] is called then.
    pub fn retries(&self, link: usize) -> Option<f64> {
        let lane = &self.lanes[link];
        (lane.failed > 0 && lane.downward.is_none()).then_some(lane.retry)
    }

    /// Nobody needs it any more.
    pub fn drop(&mut self, version: Version) -> Result<(), PlanError> {
        if self.app.is_some_and(|a| a.version == version) {
            return Err(PlanError::Busy);
        }
        if self.table.size(version).is_none() {
            return Err(TableError::Unknown(version).into());
        }
        self.forget(version)
    }

    fn forget(&mut self, version: Version) -> Result<(), PlanError> {
        let of: Vec<u64> = self
            .jobs
            .values()
            .filter(|r| r.job.version == version)
            .map(|r| r.job.id)
            .collect();
        for id in of {
            if let Some(running) = self.jobs.remove(&id) {
                self.leave_lane(running.job);
                self.cancelled.push(id);
                self.stats.cancelled += 1;
            }
        }
        self.table.drop(version)?;
        self.order.forget(version);
        self.unhinted.remove(&version);
        self.bad.remove(&version);
        self.dead.remove(&version);
        self.ages.remove(&version);
        self.changed();
        Ok(())
    }

    /// Copies that were begun and are not wanted any more, since the last time that this was asked.
    pub fn cancelled(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.cancelled)
    }

    /// Copies to begin now.
    pub fn poll(&mut self, now: f64) -> Result<Vec<Job>, PlanError> {
        let mut begun = Vec::new();
        loop {
            let before = begun.len();
            begun.extend(self.poll_app(now)?);
            for link in 0..self.lanes.len() {
                begun.extend(self.poll_up(now, link)?);
                begun.extend(self.poll_down(now, link)?);
            }
            if begun.len() == before && self.jobs.is_empty() {
                let relented = self.relent(now)?;
                begun.extend(relented);
            }
            if begun.len() == before && self.jobs.is_empty() {
                begun.extend(self.unblock(now)?);
            }
            if begun.len() == before {
                return Ok(begun);
            }
        }
    }

    fn begin(&mut self, now: f64, version: Version, copy: Copy) -> Job {
        let bytes = self.table.bytes(version).unwrap_or(0);
        self.ids += 1;
        let id = self.ids;
        match copy {
            Copy::Put { .. } => {}
            Copy::Read { from } => self.table.pin(version, from),
            Copy::Down { from } => {
                self.table.pin(version, from);
                self.lanes[from].downward = Some(id);
            }
            Copy::Up { to } => {
                self.table.pin(version, to + 1);
                self.lanes[to].upward = Some(id);
            }
        }
        let job = Job {
            id,
            version,
            bytes,
            copy,
        };
        self.jobs.insert(id, Running { job, began: now });
        job
    }

    /// Bytes per second that the slowest link of a copy has to give from now on, so that nobody waits for it. Who
    /// shares a link between several histories does so in proportion; it changes with each call.
    pub fn need(&self, job: &Job) -> f64 {
        match job.copy {
            Copy::Down { from } => self.need_down(from),
            Copy::Up { to } => self.need_up(to, None),
            Copy::Put { to } => self.need_down(to.saturating_sub(1)),
            Copy::Read { from } => self.need_up(from.saturating_sub(1), Some(self.size(job.version))),
        }
    }

    fn leave_lane(&mut self, job: Job) {
        match job.copy {
            Copy::Down { from } => self.lanes[from].downward = None,
            Copy::Up { to } => self.lanes[to].upward = None,
            Copy::Put { .. } | Copy::Read { .. } => {}
        }
    }

    /// A copy has ended.
    pub fn done(&mut self, now: f64, id: u64) -> Result<(), PlanError> {
        let Running { job, began } = self.jobs.remove(&id).ok_or(PlanError::Job(id))?;
        self.leave_lane(job);
        self.changed();
        let version = job.version;
        let rate = self.size(version) as f64 / (now - began).max(1e-9);
        match job.copy {
            Copy::Put { to } => {
                self.table.apply(version, to, Event::Arrived)?;
                self.stats.down[..to].iter_mut().for_each(|b| *b += job.bytes);
                self.answer(now);
            }
            Copy::Read { from } => {
                self.table.unpin(version, from);
                self.bad.remove(&version);
                self.stats.hits[from] += 1;
                self.stats.up[..from].iter_mut().for_each(|b| *b += job.bytes);
                self.read(now, version, from)?;
            }
            Copy::Down { from } => {
                self.lanes[from].down.add(rate);
                self.lanes[from].failed = 0;
                self.stats.down[from] += job.bytes;
                self.table.unpin(version, from);
                self.table.apply(version, from + 1, Event::Arrived)?;
                self.table.apply(version, from, Event::Flushed)?;
                if self.dead.contains(&version) {
                    self.forget(version)?;
                }
            }
            Copy::Up { to } => {
                self.lanes[to].up.add(rate);
                self.stats.up[to] += job.bytes;
                self.table.unpin(version, to + 1);
                self.arrived_above(version, to)?;
            }
        }
        Ok(())
    }

    /// What the lower tier does with a version that has been copied up.
    fn arrived_above(&mut self, version: Version, to: usize) -> Result<(), PlanError> {
        self.table.apply(version, to, Event::Arrived)?;
        let below = to + 1;
        if self.rules.migrate {
            self.table.apply(version, below, Event::Promoted)?;
            if below + 1 < self.table.tiers() && !self.table.is_pinned(version, below) {
                self.table.apply(version, below, Event::Evict)?;
            }
        } else if below + 1 < self.table.tiers() {
            if self.rules.exclusive {
                self.table.apply(version, below, Event::Promoted)?;
            } else if matches!(self.table.state(version, below), State::Ready { .. }) {
                self.table.apply(version, below, Event::Unplan)?;
            }
        }
        if self.order.next(version).is_none() && self.app.is_none_or(|a| a.version != version) {
            self.unplan(version);
        }
        Ok(())
    }

    /// A copy has failed. One down is tried again later; after one up the version is not fetched ahead any more. Only a
    /// call of the application fails with it: true if it did.
    pub fn failed(&mut self, now: f64, id: u64) -> Result<bool, PlanError> {
        let Running { job, .. } = self.jobs.remove(&id).ok_or(PlanError::Job(id))?;
        self.leave_lane(job);
        self.changed();
        match job.copy {
            Copy::Put { .. } => {
                self.forget(job.version)?;
                self.answer(now);
                return Ok(true);
            }
            Copy::Read { from } => {
                self.table.unpin(job.version, from);
                self.rank(job.version);
                self.answer(now);
                return Ok(true);
            }
            Copy::Down { from } => {
                self.table.unpin(job.version, from);
                self.table.apply(job.version, from + 1, Event::Fail)?;
                let lane = &mut self.lanes[from];
                lane.failed += 1;
                lane.retry = now + 0.01 * f64::from(1 << lane.failed.min(7));
            }
            Copy::Up { to } => {
                self.table.unpin(job.version, to + 1);
                self.table.apply(job.version, to, Event::Fail)?;
                self.bad.insert(job.version);
            }
        }
        Ok(false)
    }

    /// A read of it is not planned any more.
    fn unplan(&mut self, version: Version) {
        for tier in 0..self.table.tiers() {
            if matches!(self.table.state(version, tier), State::Ready { .. }) {
                // Ready knows the event.
                let _ = self.table.apply(version, tier, Event::Unplan);
            }
        }
    }

    /// Brings the place of a version in the orders of eviction and flushing in step with what is known.
    fn rank(&mut self, version: Version) {
        let Some(age) = self.ages.get(&version).copied() else { return };
        let next = self.order.next(version);
        let is_asked = self.app.is_some_and(|a| a.version == version && a.call != Call::Put);
        let far = match next {
            _ if is_asked => 0,
            Some(at) => at as u64 + 1,
            None if age.used > age.born => NEVER - age.used,
            None => UNHINTED - age.born,
        };
        if next.is_none() && age.used == age.born {
            self.unhinted.insert(version);
        } else {
            self.unhinted.remove(&version);
        }
        let old = UNHINTED - age.used;
        let evict = match self.rules.choice {
            Choice::Lru if is_asked => 0,
            Choice::Lru => old,
            _ => far,
        };
        let flush = match self.rules.flush {
            Flush::Quota => far,
            Flush::All => UNHINTED - age.born,
            Flush::Late => old,
        };
        self.table.rank(version, Rank { evict, flush });
    }

    /// The hints have changed.
    fn look_again(&mut self) {
        self.lanes.iter_mut().for_each(|l| l.cursor = 0);
        self.changed();
    }

    /// Something may have made room.
    fn changed(&mut self) {
        self.searches.iter_mut().for_each(|s| s.is_over = false);
    }

    /// All versions that are there have hints, or have been read.
    fn is_known(&self) -> bool {
        self.unhinted.is_empty() && self.order.end() > 0
    }

    /// Bytes of room that a version takes: all that is compared with room, and all rates, are in these.
    fn size(&self, version: Version) -> u64 {
        self.table.size(version).unwrap_or(0)
    }

    /// Bytes of the tiers down to `tier`.
    fn rooms(&self, tier: usize) -> f64 {
        (0..=tier).map(|t| self.table.room(t) as f64).sum()
    }
}
