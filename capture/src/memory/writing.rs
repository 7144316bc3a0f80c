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
            waiting: children.into(),
            asked: Instant::now(),
            next: None,
            at_work: Vec::new(),
            leaving: Vec::new(),
        };
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
    waiting: VecDeque<Child>,
    /// When these were put in order.
    asked: Instant,
    next: Option<Prepared>,
    at_work: Vec<AtWork>,
    leaving: Vec<AtWork>,
}

impl All {
    fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.next.is_none() && self.at_work.is_empty() && self.leaving.is_empty()
    }

    /// Whether copies write, or end.
    fn is_busy(&self) -> bool {
        !self.at_work.is_empty() || !self.leaving.is_empty()
    }

    /// Has the copy looked at whose turn is the next: that of the process that has copied the most, so that memory is
    /// free soon.
    fn look_ahead(&mut self, identities: &mut Identities) {
        if self.asked.elapsed() >= ASK {
            let waiting = self.waiting.make_contiguous();
            let copied = copied(waiting.iter().map(|c| (c.pid(), c.maker(), c.copied())));
            waiting.sort_by_key(|c| Reverse(copied.get(&c.pid()).copied()));
            self.asked = Instant::now();
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
        let (done, at_work): (Vec<_>, Vec<_>) = std::mem::take(&mut self.at_work).into_iter().partition(AtWork::is_done);
        self.at_work = at_work;
        let unsettled = self.leaving.len();
        self.leaving.extend(done);
        let begun = self.begin_next((session, identities), progress, &mut out)?;
        let settled = self.leaving.len() > unsettled;
        self.leaving[unsettled..].iter_mut().for_each(|w| w.settle(session, progress));
        let (gone, leaving): (Vec<_>, Vec<_>) = std::mem::take(&mut self.leaving).into_iter().partition(AtWork::is_gone);
        self.leaving = leaving;
        for work in gone {
            out.push(work.collect(session)?);
        }
        let mut served = false;
        for work in &mut self.at_work {
            served |= work.serve(session)?;
        }
        if !begun && !settled && !served && out.is_empty() {
            self.wait(session);
        }
        Ok(out)
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
        let busy: u32 = self.at_work.iter().map(AtWork::writers).sum();
        let writers = self.share().min(self.writers.saturating_sub(busy));
        let beside = !next.is_alone() && writers > 0 && session.may_lend(next.pages(), writers);
        if self.is_busy() && !beside {
            self.next = Some(next);
            return Ok(false);
        }
        match next.begin(session, writers.max(1), progress)? {
            Begun::AtWork(work) => self.at_work.push(*work),
            Begun::Stored(stored) => out.push(*stored),
        }
        Ok(true)
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

    /// How many threads one copy is to have: the fewer wait, the more.
    fn share(&self) -> u32 {
        let copies = u32::try_from(self.waiting.len() + 1).unwrap_or(u32::MAX);
        self.writers.div_ceil(copies).clamp(2, MAX_WRITERS as u32)
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

/// What each of `processes` (its number, that of its maker, the pages that it has copied) counts by: who refers to the
/// pages of its maker, which stands before it, counts no more than that one.
fn copied(processes: impl Iterator<Item = (i32, i32, u64)>) -> HashMap<i32, u64> {
    let mut out = HashMap::new();
    for (pid, maker, copied) in processes {
        let most = out.get(&maker).copied().unwrap_or(u64::MAX);
        out.insert(pid, copied.min(most));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_copied_most_comes_first_but_not_before_its_maker() {
        let mut waiting = [(1, 0, 5), (2, 1, 900), (3, 2, 800), (4, 0, 70), (5, 4, 60), (6, 9, 600)];
        let copied = copied(waiting.iter().copied());
        waiting.sort_by_key(|(pid, ..)| Reverse(copied.get(pid).copied()));
        assert_eq!(waiting.map(|(pid, ..)| pid), [6, 4, 5, 1, 2, 3]);
    }
}
