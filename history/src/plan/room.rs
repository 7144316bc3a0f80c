//! Room in a tier: who goes for it.

use super::{PlanError, Planner};
use crate::choose::stall::{self, Candidate};
use crate::choose::{score, Choice};
use crate::extents::Fragment;
use crate::life::{Event, State};
use crate::Version;

/// A search for room that has found nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Search {
    /// Nothing has changed since then,
    pub(super) is_over: bool,
    size: u64,
    limit: Option<u64>,
}

impl Planner {
    /// Makes room for `size` bytes, if that is possible now. With `limit`, only what is read after that rank goes.
    pub(super) fn make_room(&mut self, now: f64, tier: usize, size: u64, limit: Option<u64>) -> Result<bool, PlanError> {
        if self.table.fits(tier, size) {
            return Ok(true);
        }
        let last = self.searches[tier];
        if self.table.room(tier) < size || last.is_over && last.size == size && last.limit == limit {
            return Ok(false);
        }
        let found = match self.table.fragments(tier) {
            Some(fragments) => self.window(now, tier, fragments, size, limit),
            None => self.farthest(tier, size, limit),
        };
        let Some(found) = found else {
            self.searches[tier] = Search {
                is_over: true,
                size,
                limit,
            };
            return Ok(false);
        };
        for version in found {
            if matches!(self.table.state(version, tier), State::Ready { .. }) {
                self.table.apply(version, tier, Event::Unplan)?;
            }
            self.table.apply(version, tier, Event::Evict)?;
            self.lanes.iter_mut().for_each(|l| l.cursor = 0);
        }
        Ok(self.table.fits(tier, size))
    }

    /// Room could be made for a put.
    pub(super) fn could_fit(&self, tier: usize, size: u64) -> bool {
        self.table.fits(tier, size)
            || match self.table.fragments(tier) {
                Some(_) => false,
                None => self.farthest(tier, size, None).is_some(),
            }
    }

    /// Ours may take the place of what is planned, too, but of the latest first, and only for what is read sooner or is being put.
    fn victims(&self, tier: usize, limit: Option<u64>) -> impl Iterator<Item = (u64, Version)> + '_ {
        let late = move |(rank, _): &(u64, Version)| limit.is_none_or(|l| *rank > l);
        let planned = self.table.ready(tier).filter(move |_| self.rules.choice == Choice::Stall);
        self.table.going(tier).take_while(late).chain(planned.take_while(late))
    }

    fn farthest(&self, tier: usize, size: u64, limit: Option<u64>) -> Option<Vec<Version>> {
        let missing = self.table.missing(tier, size);
        let sized = self.victims(tier, limit).map(|(_, v)| (v, self.size(v)));
        crate::choose::in_order(missing, sized)
    }

    /// The expected stall of making room for a put now; nothing if that is not possible.
    pub(super) fn stall_of(&self, now: f64, tier: usize, size: u64) -> Option<f64> {
        if let Some(fragments) = self.table.fragments(tier) {
            let seen = self.candidates(now, tier, fragments, None);
            return Some(stall::window(size, &seen, self.busy(tier))?.1.seconds(self.busy(tier)));
        }
        let missing = self.table.missing(tier, size);
        let candidates = self.victims(tier, None).map(|(_, v)| ((), self.candidate(now, tier, v, 0.0)));
        Some(stall::paged(missing, candidates)?.1.seconds(self.busy(tier)))
    }

    /// How busy the link that brings things back is: between 0 and 1.
    fn busy(&self, tier: usize) -> f64 {
        self.lanes
            .get(tier)
            .map_or(0.0, |l| if l.upward.is_some() { 1.0 } else { 0.0 })
    }

    /// When a version will be read.
    fn read_at(&self, now: f64, version: Version) -> f64 {
        let Some(at) = self.order.next(version) else {
            return f64::INFINITY;
        };
        let before = self.order.before(at);
        now + before.reads as f64 * self.interval.value + before.bytes as f64 / self.copy
    }

    fn candidate(&self, now: f64, tier: usize, version: Version, wait: f64) -> Candidate {
        let size = self.size(version);
        // A faster tier has it: nobody will bring this one back.
        let is_double = self.table.fastest(version).is_some_and(|t| t < tier);
        Candidate {
            size,
            wait,
            read: if is_double {
                f64::INFINITY
            } else {
                self.read_at(now, version)
            },
            fetch: size as f64 / self.lanes[tier].up.value,
            link: now,
        }
    }

    /// Seconds until what is written has been flushed: those that were put before go first.
    fn flushed_in(&self, tier: usize, version: Version) -> f64 {
        let before = |v: Version| self.ages.get(&v).map_or(0, |a| a.before);
        let first = self.table.alone(tier).next().map_or(0, |(_, v)| before(v));
        let size = self.size(version);
        (before(version).saturating_sub(first) + size) as f64 / self.lanes[tier].down.value
    }

    /// Neighbours that make room in a contiguous tier: all of them may go at once.
    fn window(&self, now: f64, tier: usize, fragments: &[Fragment], size: u64, limit: Option<u64>) -> Option<Vec<Version>> {
        let range = if self.rules.choice == Choice::Score {
            let seen: Vec<score::Fragment> = fragments.iter().map(|f| self.scored(now, tier, f)).collect();
            score::window(&seen, size)?
        } else {
            let seen = self.candidates(now, tier, fragments, limit);
            stall::window(size, &seen, self.busy(tier))?.0
        };
        let owners = fragments[range].iter().filter_map(|f| f.owner);
        owners.map(|v| self.goes(tier, v).then_some(v)).collect()
    }

    /// It may go now.
    fn goes(&self, tier: usize, version: Version) -> bool {
        let state = self.table.state(version, tier);
        let is_planned = self.rules.choice == Choice::Stall && state == State::Ready { spare: true };
        (state.may_go() || is_planned) && !self.table.is_pinned(version, tier)
    }

    fn scored(&self, now: f64, tier: usize, f: &Fragment) -> score::Fragment {
        let left = self.order.left().reads as f64;
        let Some(version) = f.owner else {
            return score::Fragment {
                size: f.size,
                wait: 0.0,
                distance: left + 2.0,
            };
        };
        let state = self.table.state(version, tier);
        let wait = match state {
            s if s.may_go() => 0.0,
            State::Ready { .. } | State::Reading => self.read_at(now, version) - now + f.size as f64 / self.copy,
            _ => self.flushed_in(tier, version),
        };
        let distance = self
            .order
            .next(version)
            .map_or(left + 1.0, |at| self.order.before(at).reads as f64);
        score::Fragment {
            size: f.size,
            wait,
            distance,
        }
    }

    fn candidates(&self, now: f64, tier: usize, fragments: &[Fragment], limit: Option<u64>) -> Vec<Option<Candidate>> {
        let of = |f: &Fragment| {
            let Some(version) = f.owner else {
                return Some(Candidate::gap(f.size));
            };
            let rank = self.order.next(version).map_or(u64::MAX, |at| at as u64 + 1);
            let is_late = limit.is_none_or(|l| rank > l) || self.table.fastest(version).is_some_and(|t| t < tier);
            (is_late && self.goes(tier, version)).then(|| self.candidate(now, tier, version, 0.0))
        };
        fragments.iter().map(of).collect()
    }
}
