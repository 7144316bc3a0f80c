//! Calls of the application.

use super::{Age, App, Call, Copy, Job, PlanError, Planner};
use crate::choose::stall::{self, Verdict};
use crate::choose::Choice;
use crate::life::{After, Event, State, Way};
use crate::table::TableError;
use crate::Version;

impl Planner {
    /// The application writes a version; it waits until [`Planner::is_blocked`] is false.
    pub fn put(&mut self, now: f64, version: Version, bytes: u64) -> Result<(), PlanError> {
        if self.app.is_some() {
            return Err(PlanError::Busy);
        }
        self.enter(version, bytes)?;
        self.sizes.add(self.size(version) as f64);
        self.ask(now, version, Call::Put);
        Ok(())
    }

    /// A version becomes known.
    pub(super) fn enter(&mut self, version: Version, bytes: u64) -> Result<(), PlanError> {
        self.table.add(version, bytes)?;
        let size = self.size(version);
        self.stamp += 1;
        let (born, before) = (self.stamp, self.put);
        let age = Age {
            born,
            used: born,
            before,
        };
        self.ages.insert(version, age);
        self.put += size;
        self.order.put(version, size);
        Ok(())
    }

    /// The application reads a version; it waits until [`Planner::is_blocked`] is false.
    pub fn get(&mut self, now: f64, version: Version, after: After) -> Result<(), PlanError> {
        if self.app.is_some() {
            return Err(PlanError::Busy);
        }
        if self.table.size(version).is_none() || self.dead.contains(&version) {
            return Err(TableError::Unknown(version).into());
        }
        self.got = true;
        for passed in self.order.got(version) {
            self.unplan(passed);
            self.rank(passed);
        }
        self.stamp += 1;
        if let Some(age) = self.ages.get_mut(&version) {
            age.used = self.stamp;
        }
        self.ask(now, version, Call::Get(after));
        Ok(())
    }

    fn ask(&mut self, now: f64, version: Version, call: Call) {
        self.interval.add(now - self.returned);
        self.app = Some(App {
            call,
            version,
            job: None,
        });
        self.rank(version);
        self.changed();
    }

    /// The call returns.
    pub(super) fn answer(&mut self, now: f64) {
        if let Some(app) = self.app.take() {
            if self.order.next(app.version).is_none() {
                self.unplan(app.version);
            }
            self.rank(app.version);
        }
        self.returned = now;
    }

    /// The application has read a version.
    pub(super) fn read(&mut self, now: f64, version: Version, from: usize) -> Result<(), PlanError> {
        let after = match self.app.map(|a| a.call) {
            Some(Call::Get(after)) => after,
            _ => After::Keep,
        };
        self.answer(now);
        let is_moved = self.rules.migrate && from == 0 && self.table.state(version, 0).is_alone();
        if after == After::Keep || is_moved {
            self.table.apply(version, from, Event::Get(After::Keep))?;
            if after == After::Discard {
                self.dead.insert(version);
            }
            return Ok(());
        }
        self.forget(version)
    }

    /// Begins the copy that the application waits for, if it can begin.
    pub(super) fn poll_app(&mut self, now: f64) -> Result<Option<Job>, PlanError> {
        let Some(app) = self.app.filter(|a| a.job.is_none()) else {
            return Ok(None);
        };
        let copy = match app.call {
            Call::Put => self.put_to(now, app.version)?.map(|to| Copy::Put { to }),
            Call::Get(_) => self.read_from(app.version).map(|from| Copy::Read { from }),
        };
        copy.map(|c| self.begin_app(now, c)).transpose()
    }

    /// Nothing else moves, so nothing else will make room: past the full tiers.
    pub(super) fn unblock(&mut self, now: f64) -> Result<Option<Job>, PlanError> {
        let Some(app) = self.app.filter(|a| a.job.is_none()) else {
            return Ok(None);
        };
        let size = self.size(app.version);
        let copy = match app.call {
            Call::Put => (0..self.table.tiers())
                .find(|t| self.table.fits(*t, size))
                .map(|to| Copy::Put { to }),
            Call::Get(_) => self.table.fastest(app.version).map(|from| Copy::Read { from }),
        };
        copy.map(|c| self.begin_app(now, c)).transpose()
    }

    fn begin_app(&mut self, now: f64, copy: Copy) -> Result<Job, PlanError> {
        let version = self.app.map_or(Version(0), |a| a.version);
        if let Copy::Put { to } = copy {
            self.table.reserve(version, to, Way::Down)?;
        }
        let job = self.begin(now, version, copy);
        self.app.iter_mut().for_each(|a| a.job = Some(job.id));
        Ok(job)
    }

    /// The tier that a put goes to; room is free there.
    fn put_to(&mut self, now: f64, version: Version) -> Result<Option<usize>, PlanError> {
        let size = self.size(version);
        if self.table.room(0) >= size && self.rules.choice != Choice::Stall {
            let has_room = self.make_room(now, 0, size, None)?;
            if !has_room {
                self.lanes[0].short = Some(0);
            }
            return Ok(has_room.then_some(0));
        }
        for tier in 0..self.table.tiers() {
            if self.table.room(tier) < size {
                continue;
            }
            if self.table.fits(tier, size) {
                return Ok(Some(tier));
            }
            // Room here, or in the next tier at the pace of the link, or when the flush that is under way has ended.
            let here = self.stall_of(now, tier, size);
            let below = tier + 1;
            let can_pass = self.rules.past && below < self.table.tiers() && self.could_fit(below, size);
            let past = can_pass.then(|| size as f64 / self.lanes[tier].down.value);
            let wait = self.lanes[tier].downward.and_then(|id| self.jobs.get(&id)).map(|r| {
                let whole = self.size(r.job.version) as f64 / self.lanes[tier].down.value;
                (whole - (now - r.began)).max(0.0) + size as f64 / self.copy
            });
            match stall::verdict(here, past, wait) {
                Verdict::Here => return Ok(self.make_room(now, tier, size, None)?.then_some(tier)),
                Verdict::Wait => {
                    self.lanes[tier].short = Some(0);
                    return Ok(None);
                }
                Verdict::Past => {}
            }
        }
        Ok(None)
    }

    /// The tier that a get reads from, if it need not wait for a copy that is under way.
    fn read_from(&self, version: Version) -> Option<usize> {
        let from = self.table.fastest(version)?;
        let comes = (0..from).any(|t| self.table.state(version, t) == State::Reading);
        let is_straight = self.rules.past || from == 0 || self.bad.contains(&version);
        (is_straight && !comes).then_some(from)
    }
}
