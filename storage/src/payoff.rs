//! Whether it pays to look for pages that are stored already. Pure.
//!
//! ```text
//! On ── three checkpoints in a row cost more than they save ──> Off for 16 checkpoints ──> On, of which one such checkpoint is enough to be Off again
//! ```
//! Every page is hashed in any case, because its hash is its checksum. What can be saved is the look-up of each page and the entry of each new one, which miss the caches; what is gained is the
//! writing of pages that were found.

use crate::session::Stats;

/// Checkpoints in a row that do not pay until it is switched off.
const MISSES: u32 = 3;
/// Checkpoints without.
const PAUSE: u32 = 16;
/// Checkpoints that look at less say nothing, and cost nothing.
const MIN_PAGES: u64 = 16_384;

/// The state of the choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Payoff {
    misses: u32,
    paused: u32,
    why: String,
}

impl Payoff {
    /// Why the next checkpoint does not look for stored pages; `None` when it does. Counts the checkpoint.
    pub fn count(&mut self) -> Option<String> {
        if self.paused == 0 {
            return None;
        }
        self.paused -= 1;
        Some(format!(
            "off, and tried again after {} more checkpoints: {}",
            self.paused, self.why
        ))
    }

    /// Learns from a checkpoint that looked for stored pages, where each look-up or entry took `step` seconds.
    pub fn learn(&mut self, stats: &Stats, step: f64) {
        let looked = stats.written + stats.found;
        if looked < MIN_PAGES || stats.write_pages == 0 {
            return;
        }
        let page = stats.write_ns as f64 / 1e9 / stats.write_pages as f64;
        let saved = page * stats.found as f64;
        let cost = step * (looked + stats.written) as f64;
        if saved >= cost {
            self.misses = 0;
            return;
        }
        self.misses += 1;
        if self.misses >= MISSES {
            // The next trial counts at once.
            self.misses = MISSES - 1;
            self.paused = PAUSE;
            self.why = format!(
                "looking for {looked} pages would take {:.1} ms and save {:.1} ms of writing",
                cost * 1e3,
                saved * 1e3
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(written: u64, found: u64) -> Stats {
        Stats {
            written,
            found,
            // A microsecond for each page.
            write_ns: written * 1000,
            write_pages: written,
            ..Stats::default()
        }
    }

    #[test]
    fn it_is_off_while_it_does_not_pay_and_on_again_when_it_would() {
        let mut p = Payoff::default();
        for _ in 0..2 {
            p.learn(&stats(100_000, 10), 1e-7);
            assert_eq!(p.count(), None);
        }
        p.learn(&stats(100_000, 10), 1e-7);
        let why = p.count().unwrap();
        assert!(why.contains("20.0 ms") && why.contains("0.0 ms"), "{why}");
        assert!((1..PAUSE).all(|_| p.count().is_some()));
        assert_eq!(p.count(), None, "a trial");
        p.learn(&stats(100_000, 10), 1e-7);
        assert!((0..PAUSE).all(|_| p.count().is_some()), "one miss is enough after a pause");
        assert_eq!(p.count(), None);
        p.learn(&stats(50_000, 50_000), 1e-7);
        p.learn(&stats(100_000, 0), 1e-7);
        assert_eq!(p.count(), None, "what has paid has its three trials again");
    }

    #[test]
    fn small_checkpoints_and_those_that_write_nothing_say_nothing() {
        let mut p = Payoff::default();
        for _ in 0..10 {
            p.learn(&stats(MIN_PAGES - 1, 0), 1.0);
            p.learn(&stats(0, 1 << 20), 1.0);
        }
        assert_eq!(p, Payoff::default());
    }
}
