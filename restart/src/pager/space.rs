//! The memory of one process that is being filled: what is missing, who waits, and what the process does to it
//! meanwhile.
//!
//! A call that changes what is mapped has taken effect when this is told of it, or has not begun (memory that is given
//! back), and waits; until this has read of it, the kernel puts no page anywhere. So what is put into place always
//! belongs there. Calls of several threads can be told of in another order than they took effect in. They wait at the
//! same time then, which is over at the latest when a page can be put somewhere again: what has changed since is
//! remembered until then.

use super::pending::{first, moved, Pending};
use super::Source;
use crate::fail::Outcome;
use crate::layout::Range;
use belay_image::extents::{Extent, PAGE};
use belay_kernel::missing::{self, Event, Put};
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

static NEXT: AtomicU64 = AtomicU64::new(0);
/// An address of no program's memory.
const NOWHERE: u64 = crate::layout::TASK_SIZE - PAGE;
/// Filled at once where somebody waits,
const FAULT_BYTES: u64 = 128 << 10;
/// and where nobody does.
const PIECE_BYTES: u64 = 512 << 10;

/// How far an attempt has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// It is done.
    Done,
    /// What is mapped is being changed: first what is told of that.
    Changing,
}

/// What has been told since nobody changed anything.
#[derive(Debug, Default)]
struct Recent {
    /// Missing pages where they were before they were unmapped or moved.
    left: Vec<Extent>,
    /// Where missing pages have come to.
    reached: Vec<Range>,
    /// Children that were made.
    children: Vec<u64>,
}

/// The memory of one process.
#[derive(Debug)]
pub(super) struct Space {
    /// No two have the same.
    id: u64,
    /// Closed only when all is there: otherwise the program would read zeros.
    uffd: ManuallyDrop<OwnedFd>,
    /// It is that of a process that was restored, not of one that such a process has made.
    pub(super) restored: bool,
    pending: Pending,
    faults: Vec<u64>,
    recent: Recent,
    /// Where the program was last, and the filling is.
    at: u64,
    /// The memory is nobody's any more.
    gone: bool,
    /// Missing pages that will never be put anywhere.
    pub(super) dropped: Vec<Extent>,
}

impl Space {
    pub(super) fn new(uffd: OwnedFd, pages: &[Extent]) -> Self {
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            uffd: ManuallyDrop::new(uffd),
            restored: true,
            pending: Pending::new(pages.iter().copied()),
            faults: Vec::new(),
            recent: Recent::default(),
            at: 0,
            gone: false,
            dropped: Vec::new(),
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// What is missing is waited for no more.
    pub(super) fn close(self) {
        drop(ManuallyDrop::into_inner(self.uffd));
    }

    pub(super) fn fd(&self) -> RawFd {
        self.uffd.as_raw_fd()
    }

    pub(super) fn is_waited_for(&self) -> bool {
        !self.faults.is_empty()
    }

    pub(super) fn is_missing_pages(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Reads all that is told; whether something was that changes what is mapped. Children are added to `all`, which
    /// this one is not among.
    pub(super) fn hear(&mut self, all: &mut VecDeque<Space>) -> Outcome<bool> {
        let mut changed = false;
        loop {
            let event = match missing::read(self.uffd.as_fd()) {
                Ok(Some(event)) => event,
                Ok(None) => break,
                // One more child than there is room for waits until another's memory is there.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => break,
                Err(e) => return Err(super::failed(e)),
            };
            changed |= !matches!(event, Event::Fault(_));
            match event {
                Event::Fault(at) => self.faults.push(at),
                Event::Fork(uffd) => {
                    let child = self.child(uffd);
                    self.recent.children.push(child.id);
                    all.push_back(child);
                }
                Event::Moved { from, to, bytes } => self.moves(from, to, bytes, all),
                Event::Given(start, end) => {
                    let given = self.pending.take(start, end);
                    self.dropped.extend(given);
                }
                Event::Unmapped(start, end) => self.unmaps(start, end),
            }
        }
        Ok(changed)
    }

    /// The memory of a child. It was made before or after what was told last.
    fn child(&self, uffd: OwnedFd) -> Space {
        let mut pending = self.pending.clone();
        pending.add(&self.recent.left);
        Space {
            restored: false,
            pending,
            at: self.at,
            ..Space::new(uffd, &[])
        }
    }

    fn moves(&mut self, from: u64, to: u64, bytes: u64, all: &mut VecDeque<Space>) {
        let left = self.pending.take(from, from.saturating_add(bytes));
        let pages = moved(&left, from, to);
        // What was there has been unmapped, of which is told later.
        let replaced = self.pending.take(to, to.saturating_add(bytes));
        self.dropped.extend(&replaced);
        self.pending.add(&pages);
        // A child that was made since has them there already, or still where they were.
        for child in all.iter_mut().filter(|s| self.recent.children.contains(&s.id)) {
            child.pending.add(&pages);
        }
        self.recent.left.extend(left.into_iter().chain(replaced));
        self.recent.reached.push(to..to.saturating_add(bytes));
        if (from..from.saturating_add(bytes)).contains(&self.at) {
            self.at = to.wrapping_add(self.at - from);
        }
    }

    fn unmaps(&mut self, start: u64, end: u64) {
        let mut gone = Pending::new(self.pending.take(start, end));
        // What has been moved there since was not unmapped: another thread has, before.
        for r in &self.recent.reached {
            let kept = gone.take(r.start, r.end);
            self.pending.add(&kept);
        }
        self.recent.left.extend(gone.pages());
        self.dropped.extend(gone.pages());
    }

    /// Fills what is waited for, and what follows it.
    pub(super) fn serve(&mut self, source: &mut Source<'_>, all: &mut VecDeque<Space>) -> Outcome<Attempt> {
        while let Some(at) = self.faults.last().copied().filter(|_| !self.gone) {
            let attempt = match self.pending.at(at) {
                Some(e) => self.fill(&first(&e.part(at, e.end()), FAULT_BYTES), source, all)?,
                None => self.zero(at)?,
            };
            if attempt == Attempt::Changing {
                return Ok(attempt);
            }
            self.faults.retain(|f| *f != at);
            if !self.gone {
                missing::wake(self.uffd.as_fd(), at).map_err(super::failed)?;
            }
        }
        Ok(Attempt::Done)
    }

    /// Fills a piece that nobody waits for yet.
    pub(super) fn go_on(&mut self, source: &mut Source<'_>, all: &mut VecDeque<Space>) -> Outcome<Attempt> {
        match self.pending.from(self.at) {
            Some(e) => self.fill(&first(&e, PIECE_BYTES), source, all),
            None => Ok(Attempt::Done),
        }
    }

    /// Puts the missing pages `part` into place.
    fn fill(&mut self, part: &Extent, source: &mut Source<'_>, all: &mut VecDeque<Space>) -> Outcome<Attempt> {
        let data = source.read(part)?;
        let (mut at, mut most, mut absent) = (part.vaddr, part.bytes, false);
        while at < part.end() && !self.gone {
            let bytes = most.min(part.end() - at);
            let from = (at - part.vaddr) as usize;
            let done = match self.put(missing::copy(self.uffd.as_fd(), at, &data[from..from + bytes as usize]))? {
                Put::Done(bytes) => bytes,
                Put::There => PAGE,
                Put::Changing => return Ok(Attempt::Changing),
                Put::Gone => 0,
                // Perhaps there are several mappings.
                Put::Absent if bytes > PAGE => {
                    most = PAGE;
                    continue;
                }
                // It may have been unmapped or moved just now, of which is told then.
                Put::Absent if !absent => {
                    if self.hear(all)? {
                        return Ok(Attempt::Changing);
                    }
                    absent = true;
                    continue;
                }
                Put::Absent => {
                    self.dropped.push(part.part(at, at + PAGE));
                    PAGE
                }
            };
            absent = false;
            self.pending.take(at, at + done);
            at += done;
        }
        self.at = at;
        Ok(Attempt::Done)
    }

    /// Puts a page of zeros to `at`, where nothing is missing.
    fn zero(&mut self, at: u64) -> Outcome<Attempt> {
        let put = self.put(missing::zero(self.uffd.as_fd(), at))?;
        Ok(match put {
            Put::Changing => Attempt::Changing,
            // Where nothing is mapped, who waits has that explained by the kernel.
            Put::Done(_) | Put::There | Put::Absent | Put::Gone => Attempt::Done,
        })
    }

    /// Takes notice of what came of putting something somewhere.
    fn put(&mut self, put: std::io::Result<Put>) -> Outcome<Put> {
        let put = put.map_err(super::failed)?;
        self.gone |= put == Put::Gone;
        if !matches!(put, Put::Changing | Put::Gone) {
            self.recent = Recent::default();
        }
        Ok(put)
    }

    /// Whether nothing is to be done here any more: all is there, and nobody makes a child to which that does not apply.
    pub(super) fn is_over(&mut self) -> Outcome<bool> {
        if self.gone {
            let rest: Vec<Extent> = self.pending.pages().collect();
            self.dropped.extend(rest);
            return Ok(true);
        }
        let idle = !self.is_missing_pages() && !self.is_waited_for();
        Ok(idle && self.zero(NOWHERE)? == Attempt::Done)
    }

    /// Looks whether the memory is still somebody's.
    pub(super) fn look(&mut self) -> Outcome<bool> {
        self.zero(NOWHERE).map(|_| self.gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(page: u64, pages: u64) -> Extent {
        Extent {
            vaddr: page * PAGE,
            bytes: pages * PAGE,
            chunk: 1,
            page: page as u32,
        }
    }

    fn space() -> Space {
        let any = std::fs::File::open("/dev/null").unwrap();
        Space::new(any.into(), &[extent(10, 10), extent(40, 10)])
    }

    /// By the page: where in the chunk it is stored.
    fn missing(s: &Space) -> Vec<(u64, u32)> {
        let each = |e: Extent| (0..e.pages()).map(move |i| (e.vaddr / PAGE + i, e.page + i as u32));
        s.pending.pages().flat_map(each).collect()
    }

    fn expected(parts: &[(u64, u32, u64)]) -> Vec<(u64, u32)> {
        let each = |(at, from, n): &(u64, u32, u64)| {
            let (at, from) = (*at, *from);
            (0..*n).map(move |i| (at + i, from + i as u32))
        };
        parts.iter().flat_map(each).collect()
    }

    /// Nobody changes anything at this moment.
    fn rest(s: &mut Space) {
        s.put(Ok(Put::There)).unwrap();
    }

    #[test]
    fn what_was_moved_to_a_place_that_another_thread_unmapped_before_stays() {
        let mut s = space();
        // The second thread is told of first.
        s.moves(40 * PAGE, 10 * PAGE, 4 * PAGE, &mut VecDeque::new());
        s.unmaps(10 * PAGE, 20 * PAGE);
        assert_eq!(missing(&s), expected(&[(10, 40, 4), (44, 44, 6)]));
        rest(&mut s);
        s.unmaps(10 * PAGE, 20 * PAGE);
        assert_eq!(missing(&s), expected(&[(44, 44, 6)]), "it began afterwards");
        assert_eq!(
            s.dropped.iter().map(Extent::pages).sum::<u64>(),
            14,
            "every page is dropped once"
        );
    }

    #[test]
    fn a_child_has_what_was_there_before_and_after() {
        let mut all = VecDeque::new();
        let mut s = space();
        let other = || std::fs::File::open("/dev/null").unwrap().into();
        s.unmaps(10 * PAGE, 12 * PAGE);
        s.moves(40 * PAGE, 70 * PAGE, 2 * PAGE, &mut all);
        let child = s.child(other());
        let both = [(10, 10, 10), (40, 40, 10), (70, 40, 2)];
        assert_eq!(missing(&child), expected(&both));
        assert!(!child.restored);
        s.recent.children.push(child.id);
        all.push_back(child);
        // Told of later, and done before perhaps.
        s.moves(44 * PAGE, 80 * PAGE, PAGE, &mut all);
        let child = all.pop_front().unwrap();
        assert_eq!(
            missing(&child),
            expected(&[(10, 10, 10), (40, 40, 10), (70, 40, 2), (80, 44, 1)])
        );
        rest(&mut s);
        let later = s.child(other());
        assert_eq!(missing(&later), missing(&s), "nothing is in doubt");
        s.recent.children.push(later.id);
        all.push_back(later);
        rest(&mut s);
        s.moves(45 * PAGE, 90 * PAGE, PAGE, &mut all);
        assert!(!missing(&all[0]).contains(&(90, 45)));
    }
}
