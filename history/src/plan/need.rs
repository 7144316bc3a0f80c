//! What has to move in the time that is left: how much goes down, which of it now, and how fast.

use super::{Call, Planner};
use crate::Version;

/// Reads that are looked at for what has to come up soon.
const LOOK: usize = 64;
/// Versions for which a tier keeps room while puts are expected.
const SPARE: f64 = 3.0;
/// Versions for which room cannot be used at the end of the puts, because whole ones do not fit or are on their way.
const WASTE: f64 = 3.0;
/// A link whose directions disturb each other, and which others use, begins early when so much of its share would not do later.
const BUSY: f64 = 0.5;

impl Planner {
    /// Bytes that have to go below a link, as far as hints tell.
    fn quota(&self, link: usize) -> f64 {
        let spare = if self.order.left().unput > 0 {
            WASTE * self.sizes.expected(1)
        } else {
            0.0
        };
        self.table.above(link) as f64 + self.expected() + spare - self.rooms(link)
    }

    /// Bytes that are expected to be put still.
    fn expected(&self) -> f64 {
        let unknown = self.order.left().unknown;
        self.order.told() as f64 + unknown as f64 * self.sizes.expected(unknown)
    }

    /// Seconds that the application needs for `n` calls with so many bytes.
    fn own_time(&self, n: u64, bytes: f64) -> f64 {
        n as f64 * self.interval.value + bytes / self.copy
    }

    /// Bytes per second that have to go down a link until the last put.
    pub(super) fn need_down(&self, link: usize) -> f64 {
        if !self.is_known() {
            return self.lanes[link].share;
        }
        let unput = self.order.left().unput;
        self.quota(link).max(1.0) / self.own_time(unput + 1, 0.0).max(1e-9)
    }

    /// Bytes per second that have to come up a link so that no read waits: of the reads that come next, those for which
    /// that is most, and of all. `now` are bytes that the application waits for.
    pub(super) fn need_up(&self, link: usize, now: Option<u64>) -> f64 {
        let waits = self.app.is_some_and(|a| a.call != Call::Put && !self.is_in(a.version, link));
        if !self.is_known() {
            return self.lanes[link].share * if waits { 16.0 } else { 4.0 };
        }
        let asked = self.app.filter(|_| waits).and_then(|a| self.table.size(a.version));
        let mut bytes = asked.or(now).unwrap_or(0) as f64;
        let reads = self.order.left().reads;
        let mut most = bytes / self.own_time(1, 0.0).max(1e-9);
        most = most.max((self.table.below(link) as f64).max(1.0) / self.own_time(reads + 1, 0.0).max(1e-9));
        for (n, (_, version, size)) in self.order.from(0).take(LOOK).enumerate() {
            if !self.is_in(version, link) {
                bytes += size.unwrap_or(0) as f64;
                most = f64::max(most, bytes / self.own_time(n as u64 + 1, 0.0).max(1e-9));
            }
        }
        most
    }

    /// All of it is above a link.
    fn is_in(&self, version: Version, link: usize) -> bool {
        self.table.fastest(version).is_some_and(|t| t <= link)
    }

    /// Whether the farthest of a tier is flushed now.
    pub(super) fn is_due(&self, link: usize, rank: u64, version: Version, size: u64, short: Option<u64>) -> bool {
        let quota = self.quota(link);
        if quota <= 0.0 {
            // It only makes place for something that is read sooner, where that does not disturb the way up.
            return self.lanes[link].duplex && short.is_some_and(|limit| rank > limit);
        }
        // What will be read after all that fits has been read cannot stay; a few versions' room is for puts.
        let unknown = self.order.left().unknown;
        let before = self.order.next(version).map(|at| self.order.before(at));
        let until = before.map_or(f64::INFINITY, |b| {
            b.bytes as f64 + b.unknown as f64 * self.sizes.expected(unknown)
        });
        let spare = SPARE * self.sizes.expected(1);
        short == Some(0) || until + size as f64 + spare > self.rooms(link) || self.is_early(link) || self.is_hungry(link + 1)
    }

    /// The others will come; but the link would not be fast enough for them.
    fn is_early(&self, link: usize) -> bool {
        let lane = &self.lanes[link];
        let share = if lane.duplex { 1.0 } else { BUSY };
        let left = self.own_time(self.order.left().unput, self.expected());
        self.quota(link) > share * lane.down.value.min(lane.share) * left
    }

    /// A link should be busy already, but has nothing to do.
    fn is_hungry(&self, link: usize) -> bool {
        let idle = self.lanes.get(link).is_some_and(|l| l.downward.is_none());
        idle && self.table.alone(link).next().is_none() && self.is_early(link)
    }
}
