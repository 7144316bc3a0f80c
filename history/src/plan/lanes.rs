//! Copies between tiers: up in the order of reads, down as the rules say.

use super::{Call, Copy, Flush, Job, PlanError, Planner};
use crate::choose::Choice;
use crate::life::{Event, State, Way};
use crate::Version;

/// How far behind the first hint that is not satisfied others are looked for.
const LOOK: usize = 64;

impl Planner {
    /// Begins a copy from the tier below `link` to the one above it, if one is due.
    pub(super) fn poll_up(&mut self, now: f64, link: usize) -> Result<Option<Job>, PlanError> {
        if self.lanes[link].upward.is_some() || self.table.room(link) == 0 {
            return Ok(None);
        }
        if let Some(version) = self.asked(link) {
            return self.begin_up(now, link, version, None);
        }
        // Without an end of the puts in sight, room is better left to them until the first get.
        let is_time = self.got || self.rules.choice == Choice::Stall && self.order.left().unput == 0;
        if !self.rules.prefetch || !is_time {
            return Ok(None);
        }
        match self.next_up(link)? {
            Some((at, version)) => self.begin_up(now, link, version, Some(at as u64 + 1)),
            None => Ok(None),
        }
    }

    /// The version that a blocked get waits for, if it has to come up through this link and is not on its way.
    fn asked(&self, link: usize) -> Option<Version> {
        let app = self
            .app
            .filter(|a| a.job.is_none() && a.call != Call::Put && !self.rules.past)?;
        let is_above = (0..=link).any(|t| self.table.state(app.version, t).takes_room());
        let is_good = !self.bad.contains(&app.version);
        (is_good && !is_above && self.table.state(app.version, link + 1).is_whole()).then_some(app.version)
    }

    /// The next hint that is to be satisfied through this link. Those that are satisfied already stay where they are.
    fn next_up(&mut self, link: usize) -> Result<Option<(usize, Version)>, PlanError> {
        let is_strict = self.rules.choice != Choice::Stall;
        let mut plan = Vec::new();
        let mut found = None;
        let mut cursor = None;
        for (at, version, _) in self.order.from(self.lanes[link].cursor) {
            let is_above = (0..=link).any(|t| self.table.state(version, t).takes_room());
            if is_above {
                if cursor.is_none() && self.table.state(version, link).is_whole() {
                    plan.push(version);
                }
                continue;
            }
            let first = *cursor.get_or_insert(at);
            let fits = self.table.size(version).is_some_and(|s| s <= self.table.room(link));
            let can_come = fits && !self.bad.contains(&version);
            if can_come && self.table.state(version, link + 1).is_whole() {
                found = Some((at, version));
                break;
            }
            if is_strict || at > first + LOOK {
                break;
            }
        }
        self.lanes[link].cursor = cursor.unwrap_or(self.order.end());
        for version in plan {
            if !matches!(self.table.state(version, link), State::Ready { .. }) && !self.is_double(version, link) {
                self.table.apply(version, link, Event::Plan)?;
            }
        }
        Ok(found)
    }

    fn is_double(&self, version: Version, tier: usize) -> bool {
        self.table.fastest(version).is_some_and(|t| t < tier)
    }

    fn begin_up(&mut self, now: f64, link: usize, version: Version, limit: Option<u64>) -> Result<Option<Job>, PlanError> {
        let size = self.size(version);
        let limit = limit.filter(|_| self.rules.choice == Choice::Stall || self.rules.choice == Choice::Belady);
        // Puts that are still expected find room.
        let spare = match limit {
            Some(_) if self.order.left().unput > 0 && link == 0 => self.sizes.expected(1) as u64,
            _ => 0,
        };
        if !self.make_room(now, link, size + spare, limit)? {
            self.lanes[link].short = Some(limit.unwrap_or(0));
            return Ok(None);
        }
        self.table.reserve(version, link, Way::Up)?;
        Ok(Some(self.begin(now, version, Copy::Up { to: link })))
    }

    /// Begins a copy from the tier above `link` to the one below it, if one is due.
    pub(super) fn poll_down(&mut self, now: f64, link: usize) -> Result<Option<Job>, PlanError> {
        if self.lanes[link].downward.is_some() || now < self.lanes[link].retry {
            return Ok(None);
        }
        let short = self.lanes[link].short.take();
        let is_free = |(_, v): &(u64, Version)| self.table.state(*v, link + 1) == State::Absent;
        let alone = self.table.alone(link).find(is_free);
        let double = || self.table.deepest(link).filter(|_| self.flush_all).map(|v| (0, v));
        let Some((rank, version)) = alone.or_else(double) else {
            return Ok(None);
        };
        let size = self.size(version);
        let is_due = match self.rules.flush {
            Flush::All => true,
            Flush::Late => self.flush_all || short.is_some(),
            Flush::Quota => self.flush_all || !self.is_known() || self.is_due(link, rank, version, size, short),
        };
        if !is_due {
            return Ok(None);
        }
        if !self.make_room(now, link + 1, size, None)? {
            if link + 1 < self.lanes.len() {
                self.lanes[link + 1].short = Some(0);
            }
            return Ok(None);
        }
        self.table.reserve(version, link + 1, Way::Down)?;
        Ok(Some(self.begin(now, version, Copy::Down { from: link })))
    }

    /// Nothing moves. What stays for reads may be all that is in the way of a flush (I5): then it is not planned any more.
    pub(super) fn relent(&mut self, now: f64) -> Result<Option<Job>, PlanError> {
        for link in (0..self.lanes.len().saturating_sub(1)).rev() {
            let ready: Vec<Version> = self.table.ready(link + 1).map(|(_, v)| v).collect();
            if ready.is_empty() || self.table.alone(link).next().is_none() {
                continue;
            }
            for version in ready {
                self.table.apply(version, link + 1, Event::Unplan)?;
            }
            self.changed();
            let job = self.poll_down(now, link)?;
            if job.is_some() {
                return Ok(job);
            }
        }
        Ok(None)
    }
}
