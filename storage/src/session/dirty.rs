//! How much of each process is new with this checkpoint.

use super::Session;
use crate::predict::median;
use belay_image::extents::Extent;
use belay_image::manifest::Dirty;
use belay_image::TableId;

impl Session {
    /// Of the memory of each process, the share that lies in chunks of this checkpoint; before those of older ones are
    /// compacted. None where no process has any.
    pub fn dirty(&self) -> Option<Dirty> {
        let of_process = self.tables.iter().filter(|(id, _)| matches!(id, TableId::Process(_)));
        let is_new = |e: &Extent| !self.live.contains_key(&e.chunk);
        let shares: Vec<f64> = of_process.filter_map(|(_, table)| share(table, is_new)).collect();
        Some(Dirty {
            min: shares.iter().copied().reduce(f64::min)?,
            max: shares.iter().copied().reduce(f64::max)?,
            median: median(shares)?,
        })
    }
}

fn share(table: &[Extent], is_new: impl Fn(&Extent) -> bool) -> Option<f64> {
    let all: u64 = table.iter().map(|e| e.bytes).sum();
    let new: u64 = table.iter().filter(|e| is_new(e)).map(|e| e.bytes).sum();
    (all > 0).then(|| new as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    /// Stores memory of two processes, `changed` pages of the second with other contents than in round 0.
    fn store(session: &mut Session, round: u8, changed: usize) {
        for pid in [1u8, 2] {
            let mut out = Vec::new();
            let mut memory = vec![0; 10 * 4096];
            for (i, page) in memory.as_chunks_mut::<4096>().0.iter_mut().enumerate() {
                page.fill(1 + i as u8);
                page[0] = pid;
                page[1] = if pid == 2 && i < changed { round } else { 0 };
            }
            session.store_pages(0x1000, &memory, &mut out).unwrap();
            session.set_table(TableId::Process(pid.into()), out).unwrap();
        }
    }

    #[test]
    fn one_process_that_changes_is_seen_beside_those_that_do_not() {
        let s = Scratch::new("dirty");
        let mut engine = s.engine();
        let mut session = engine.begin(0).unwrap();
        assert_eq!(session.dirty(), None);
        store(&mut session, 0, 0);
        let all = |share| Dirty {
            min: share,
            median: share,
            max: share,
        };
        assert_eq!(session.dirty(), Some(all(1.0)), "nothing was there before");
        session.seal().unwrap();
        session.publish().unwrap();
        engine.keep(session, &s.job());
        let mut session = engine.begin(0).unwrap();
        store(&mut session, 1, 4);
        let found = session.dirty().unwrap();
        assert_eq!((found.min, found.median, found.max), (0.0, 0.2, 0.4));
    }
}
