//! The parts of a history's versions, in the program's memory, and who is at them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Memory of the program: where it begins, and its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    at: usize,
    len: usize,
}

impl Span {
    pub(crate) fn new(at: *mut u8, len: usize) -> Self {
        Self {
            at: at.expose_provenance(),
            len,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// # Safety
    /// The memory is there, and nobody writes to it before the borrow ends.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: as promised by the caller; it is no null pointer, which is no region.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.at), self.len) }
    }

    /// # Safety
    /// The memory is there, and nobody else uses it before the borrow ends.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as promised by the caller; it is no null pointer, which is no region.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.at), self.len) }
    }
}

#[derive(Default)]
pub(crate) struct Regions {
    now: Mutex<Now>,
    /// A put or get has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Now {
    all: BTreeMap<u32, Span>,
    /// How often one was taken away or exchanged.
    changes: u64,
    /// Puts and gets that go on, by the changes before them.
    used: BTreeMap<u64, usize>,
}

/// The regions as they were when a put or get began; none of their memory is given up before it ends.
pub(crate) struct Used {
    of: Arc<Regions>,
    changes: u64,
    pub(crate) all: Vec<(u32, Span)>,
}

impl Regions {
    /// What a put or get that begins now has to do with.
    pub(crate) fn used(self: &Arc<Self>) -> Used {
        let mut now = self.lock();
        let changes = now.changes;
        *now.used.entry(changes).or_default() += 1;
        Used {
            of: self.clone(),
            changes,
            all: now.all.iter().map(|(id, span)| (*id, *span)).collect(),
        }
    }

    /// Exchanges a region, or takes it away. Nobody is at the memory that it had when this returns.
    pub(crate) fn set(&self, id: u32, span: Option<Span>) {
        let mut now = self.lock();
        let before = match span {
            Some(span) => now.all.insert(id, span),
            None => now.all.remove(&id),
        };
        if before.is_none() {
            return;
        }
        now.changes += 1;
        let end = now.changes;
        while now.used.range(..end).next().is_some() {
            now = self.ended.wait(now).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Used {
    /// Numbers of the regions that have a byte in common with another one.
    pub(crate) fn overlapping(&self) -> BTreeSet<u32> {
        let mut all: Vec<_> = self.all.iter().filter(|(_, s)| s.len > 0).copied().collect();
        all.sort_unstable_by_key(|(_, s)| s.at);
        // Each with those after it that begin before all up to there have ended.
        let mut end = 0;
        let mut groups: Vec<Vec<u32>> = Vec::new();
        for (id, span) in all {
            match groups.last_mut() {
                Some(group) if span.at < end => group.push(id),
                _ => groups.push(vec![id]),
            }
            end = end.max(span.at.saturating_add(span.len));
        }
        groups.into_iter().filter(|g| g.len() > 1).flatten().collect()
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        let mut now = self.of.lock();
        if let Some(n) = now.used.get_mut(&self.changes) {
            *n -= 1;
            if *n == 0 {
                now.used.remove(&self.changes);
                self.of.ended.notify_all();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn memory_is_given_up_when_nobody_is_at_it() {
        let regions = Arc::new(Regions::default());
        let span = |at: usize| Some(Span::new(std::ptr::without_provenance_mut(at), 8));
        regions.set(1, span(64));
        let before = regions.used();
        // A new one takes nothing away.
        regions.set(2, span(128));
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let given_up = scope.spawn(|| {
                regions.set(1, None);
                ended.load(Ordering::SeqCst)
            });
            // What begins meanwhile is not waited for.
            let after = loop {
                let used = regions.used();
                if used.all.len() == 1 {
                    break used;
                }
            };
            std::thread::sleep(Duration::from_millis(20));
            assert!(!given_up.is_finished());
            ended.store(true, Ordering::SeqCst);
            drop(before);
            assert!(given_up.join().unwrap());
            assert_eq!(after.all[0].0, 2);
        });
    }

    #[test]
    fn regions_with_bytes_in_common_are_found() {
        let regions = Arc::new(Regions::default());
        let all = [
            (1, 64, 8),
            (2, 72, 8),
            (3, 100, 50),
            (4, 110, 5),
            (5, 149, 9),
            (6, 158, 0),
            (7, 158, 1),
        ];
        for (id, at, len) in all {
            regions.set(id, Some(Span::new(std::ptr::without_provenance_mut(at), len)));
        }
        assert_eq!(regions.used().overlapping(), BTreeSet::from([3, 4, 5]));
    }
}
