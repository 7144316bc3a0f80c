//! The order in which the memory of the processes is stored: several copies write at once, and nobody waits for the end
//! of one while writers are free.
//!
//! ```text
//! waiting ──(looked at, its maker stored)──> next ──(writers free, room)──> at work ──(written)──> leaving ──(ended)──> stored
//! ```
//! One thread, the caller, serves all of them: it gives them room in chunks, and reads what they may not.

use crate::memory::looks::Looks;
use crate::memory::mappings::Identities;
use crate::memory::snapshot::writers::{AtWork, Begun, Prepared, Stored};
use crate::memory::snapshot::{Child, Progress, Written};
use crate::CaptureError;
use belay_abi::inject::MAX_WRITERS;
use belay_kernel::futex;
use belay_storage::session::Session;
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// How long after one look the next one comes, where writers wait for a place that they are given, or for something
/// that ends soon; and where nothing of that is so.
const SOON: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(5);

/// How often processes are asked how much they have copied.
const ASK: Duration = Duration::from_millis(100);

/// Stores the memory of `children` by `writers` threads; what has become of each process goes to `stored`.
pub(crate) fn all(
    children: Vec<Child>,
    writers: u32,
    session: &mut Session,
    identities: &mut Identities,
    progress: &mut Progress<'_>,
    stored: &mut dyn FnMut(i32, Written, &mut Identities),
) -> Result<(), CaptureError> {
    let writers = children.iter().filter_map(Child::most_writers).fold(writers, u32::min).max(1);
    std::thread::scope(|scope| {
        let mut all = All {
            looks: Looks::begin(scope, writers.min(MAX_WRITERS as u32), children.len() > 1),
            writers,
            most: session.borrowers(children.iter().map(Child::pages).sum()),
            waiting: children.into(),
            asked: Instant::now(),
            next: None,
            at_work: Vec::new(),
            leaving: Vec::new(),
            served: 0,
        };
        all.put_in_order();
        all.look_ahead(identities);
        while !all.is_over() {
            for done in all.turn(session, identities, progress)? {
                let (pid, bytes, written) = done.finish(session, identities)?;
                progress.done(bytes);
                stored(pid, written, identities);
            }
            progress.now(all.at_work.iter().chain(&all.leaving).map(AtWork::written).sum());
        }
        Ok(())
    })
}

/// All processes whose memory is not stored yet.
struct All {
    looks: Looks,
    writers: u32,
    /// Most copies that write at once.
    most: usize,
    waiting: VecDeque<Child>,
    /// When these were put in order.
    asked: Instant,
    next: Option<Prepared>,
    at_work: Vec<AtWork>,
    leaving: Vec<AtWork>,
    /// Of whom a loan was taken back last.
    served: usize,
}

impl All {
    fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.next.is_none() && self.at_work.is_empty() && self.leaving.is_empty()
    }

    /// Whether copies write, or end.
    fn is_busy(&self) -> bool {
        !self.at_work.is_empty() || !self.leaving.is_empty()
    }

    /// Puts those that wait in order: first who has copied the most, so that memory is free soon, and of others the
    /// largest, so that its writers do not work alone at the end.
    fn put_in_order(&mut self) {
        let waiting = self.waiting.make_contiguous();
        let weights = weights(waiting.iter().map(|c| (c.pid(), c.maker(), (c.copied(), c.pages()))));
        waiting.sort_by_key(|c| Reverse(weights.get(&c.pid()).copied()));
        self.asked = Instant::now();
    }

    /// Has the copy looked at whose turn is the next.
    fn look_ahead(&mut self, identities: &mut Identities) {
        if self.asked.elapsed() >= ASK {
            self.put_in_order();
        }
        let request = self.waiting.front_mut().and_then(|c| c.request(identities));
        request.into_iter().for_each(|r| self.looks.ask(r));
    }

    /// Brings everything as far as it comes, and waits where nothing comes any further; what is stored now.
    fn turn(
        &mut self,
        session: &mut Session,
        identities: &mut Identities,
        progress: &Progress<'_>,
    ) -> Result<Vec<Stored>, CaptureError> {
        let mut out = Vec::new();
        // Whose writers are done leaves them to the next one before anything else.
        let (mut done, at_work): (Vec<_>, Vec<_>) = std::mem::take(&mut self.at_work).into_iter().partition(AtWork::is_done);
        done.iter_mut().try_for_each(|w| w.written_by_now(session))?;
        self.at_work = at_work;
        let mut came_further = !done.is_empty();
        self.leaving.extend(done);
        came_further |= self.begin_next((session, identities), progress, &mut out)?;
        came_further |= self.serve(session)?;
        came_further |= self.settle_one(session, progress)?;
        if let Some(at) = self.leaving.iter().position(|w| w.is_settled() && w.is_gone()) {
            out.push(self.leaving.remove(at).collect(session)?);
        } else if !came_further && out.is_empty() {
            self.wait(session);
        }
        Ok(out)
    }

    /// Gives all writers the room that they want, and takes back a part of what they are done with, for which a disk may
    /// have to be waited for. Whether there was any.
    fn serve(&mut self, session: &mut Session) -> Result<bool, CaptureError> {
        for work in &mut self.at_work {
            work.lend(session)?;
        }
        // Each in its turn.
        let all = self.at_work.len() + self.leaving.len();
        for _ in 0..all {
            self.served = (self.served + 1) % all;
            let mut both = self.at_work.iter_mut().chain(&mut self.leaving);
            if both.nth(self.served).map_or(Ok(false), |w| w.take_back_one(session))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Settles one whose writers are done, where there is one that may be.
    fn settle_one(&mut self, session: &mut Session, progress: &Progress<'_>) -> Result<bool, CaptureError> {
        let may = |w: &AtWork| !w.is_settled() && (!w.needs_agent() || self.at_work.is_empty());
        let Some(at) = self.leaving.iter().position(may) else {
            return Ok(false);
        };
        if self.leaving[at].needs_agent() {
            // What the agent stores counts beside all that has been written.
            self.leaving.iter_mut().try_for_each(|w| w.take_back(session))?;
        }
        self.leaving[at].settle(session, progress);
        Ok(true)
    }

    /// Begins with the next one, where it may; what is stored without writers goes to `out`. Whether it has.
    fn begin_next(
        &mut self,
        (session, identities): (&mut Session, &mut Identities),
        progress: &Progress<'_>,
        out: &mut Vec<Stored>,
    ) -> Result<bool, CaptureError> {
        let next = match self.next.take() {
            None => self.prepare(session, identities)?,
            prepared => prepared,
        };
        let Some(next) = next else { return Ok(false) };
        let Some(writers) = self.writers_for(&next, session) else {
            self.next = Some(next);
            return Ok(false);
        };
        match next.begin(session, writers, progress)? {
            Begun::AtWork(work) => self.at_work.push(*work),
            Begun::Stored(stored) => out.push(*stored),
        }
        Ok(true)
    }

    /// With how many threads the next one may begin now, if it may.
    fn writers_for(&self, next: &Prepared, session: &Session) -> Option<u32> {
        if next.is_alone() {
            return (!self.is_busy()).then_some(self.writers);
        }
        let busy: u32 = self.at_work.iter().map(AtWork::writers).sum();
        let free = self.writers.saturating_sub(busy);
        let (pages, uncounted): (Vec<u64>, Vec<u64>) = self.at_work.iter().chain(&self.leaving).map(AtWork::pages).unzip();
        let others = pages.iter().sum::<u64>() + self.waiting.iter().map(Child::pages).sum::<u64>();
        let share = share(self.writers, next.pages(), others);
        let needs_agent = self
            .at_work
            .iter()
            .chain(&self.leaving)
            .any(|w| w.needs_agent() && !w.is_settled());
        let beside = !needs_agent
            && self.at_work.len() < self.most
            // With fewer it would have them to its end.
            && 2 * free >= share
            && session.may_lend(next.pages(), uncounted.iter().sum());
        (beside || !self.is_busy()).then_some(share.min(free))
    }

    /// The next one, where it is known what is to be stored of it.
    fn prepare(&mut self, session: &mut Session, identities: &mut Identities) -> Result<Option<Prepared>, CaptureError> {
        let Some(child) = self.waiting.front() else { return Ok(None) };
        let (pid, maker) = (child.pid(), child.maker());
        if self.at_work.iter().chain(&self.leaving).any(|w| w.pid() == maker) {
            return Ok(None);
        }
        let found = match child.copy() {
            None => None,
            Some(_) => match self.looks.found(pid, !self.is_busy())? {
                None => return Ok(None),
                found => found,
            },
        };
        let next = self.waiting.pop_front().map(|child| child.prepare(found, session));
        self.look_ahead(identities);
        Ok(next)
    }

    /// Waits until something may have come further.
    fn wait(&self, session: &Session) {
        let looks = self.next.is_none() && !self.waiting.is_empty();
        let time = if session.is_tiered() || looks || !self.leaving.is_empty() {
            SOON
        } else {
            LATER
        };
        match (self.at_work.first(), self.leaving.first()) {
            (None, Some(leaving)) => leaving.wait_gone(time),
            _ => {
                let words: Vec<&AtomicU32> = self.at_work.iter().map(AtWork::done_word).collect();
                futex::wait_any(&words, 0, time);
            }
        }
    }
}

/// How many of `writers` threads one copy is to have with `pages` pages to store, where the others have so many.
fn share(writers: u32, pages: u64, others: u64) -> u32 {
    let part = (u64::from(writers) * pages).div_ceil((pages + others).max(1));
    let most = writers.min(MAX_WRITERS as u32);
    u32::try_from(part).unwrap_or(most).clamp(most.min(2), most)
}

/// What each of `processes` (its number, that of its maker, what speaks for it) counts by: who refers to the pages of
/// its maker, which stands before it, counts no more than that one.
fn weights<T: Ord + Copy>(processes: impl Iterator<Item = (i32, i32, T)>) -> HashMap<i32, T> {
    let mut out: HashMap<i32, T> = HashMap::new();
    for (pid, maker, own) in processes {
        let most = out.get(&maker).copied().unwrap_or(own);
        out.insert(pid, own.min(most));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_copied_most_comes_first_but_not_before_its_maker() {
        let mut waiting = [(1, 0, 5), (2, 1, 900), (3, 2, 800), (4, 0, 70), (5, 4, 60), (6, 9, 600)];
        let weights = weights(waiting.iter().copied());
        waiting.sort_by_key(|(pid, ..)| Reverse(weights.get(pid).copied()));
        assert_eq!(waiting.map(|(pid, ..)| pid), [6, 4, 5, 1, 2, 3]);
    }

    #[test]
    fn writers_are_shared_by_what_there_is_to_write() {
        // One of sixteen alike, the last but three of them, a large one beside a small one, that one, one alone.
        let cases = [
            (8, 100, 1500, 2),
            (8, 100, 300, 2),
            (8, 10_000, 100, 8),
            (8, 100, 10_000, 2),
            (64, 100, 0, 8),
            (2, 1, 0, 2),
        ];
        for (writers, pages, others, expected) in cases {
            assert_eq!(share(writers, pages, others), expected, "{pages} beside {others}");
        }
        assert_eq!((share(1, 5, 5), share(8, 0, 0)), (1, 2));
    }
}
