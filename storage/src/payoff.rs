//! Whether it pays to look for pages that are stored already. Pure.
//!
//! ```text
//! On ── in the recent checkpoints, looking took longer than it saved ──> Off: a sample is looked for ── by the sample it would pay twice over ──> On
//! ```
//! Every page is hashed in any case, because its hash is its checksum. What can be saved is the look-up of each page,
//! the entry of each new one and the growth of the table; what is gained is the writing of pages that were found. All
//! of it is measured by the checkpoints themselves. A wrong choice costs time, never data: a page that was not looked
//! for is stored.

use crate::session::Stats;

/// Checkpoints that look at less say nothing, and cost nothing.
const MIN_PAGES: u64 = 16_384;
/// Looking is left after so many checkpoints at the earliest,
const MIN_CHECKPOINTS: u32 = 3;
/// because what is older counts half as much with each.
const OLDER: f64 = 0.5;
/// What looking must save, for each second that it takes, to be taken up again.
const CLEARLY: f64 = 2.0;

/// The state of the choice.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Payoff {
    /// Why pages are not looked for; `None` while they are.
    off: Option<String>,
    /// Checkpoints that have been looked at since it is on.
    seen: u32,
    /// Seconds that looking took and saved, of the recent checkpoints.
    took: f64,
    saved: f64,
    /// Seconds for each page that is looked for, the least seen since it is on: one checkpoint that was disturbed must
    /// not keep it off for good.
    look: f64,
    /// Seconds for each page that is written, as last seen.
    write: f64,
}

/// A checkpoint's costs, from what it has measured.
struct Costs {
    /// Seconds to look for a page, of all writers; 0 where that was not measured.
    look: f64,
    /// Seconds to write a page; 0 where none was written.
    write: f64,
    /// The share of the pages looked for that were found.
    found: f64,
}

fn per(ns: u64, pages: u64) -> f64 {
    ns as f64 / 1e9 / pages.max(1) as f64
}

impl Costs {
    fn of(stats: &Stats) -> Self {
        Self {
            look: per(stats.look_ns, stats.timed_pages) + per(stats.table_ns, stats.looked),
            write: per(stats.write_ns, stats.write_pages),
            found: stats.found as f64 / stats.looked.max(1) as f64,
        }
    }
}

impl Payoff {
    /// Why the next checkpoint looks for a sample of the pages only; `None` when it looks for all.
    pub fn why_not(&self) -> Option<&str> {
        self.off.as_deref()
    }

    /// Learns from a checkpoint. `anew`: nothing was stored before that could have been found.
    pub fn learn(&mut self, stats: &Stats, anew: bool) {
        let pages = stats.written + stats.found;
        if pages < MIN_PAGES || stats.looked == 0 {
            return;
        }
        let costs = Costs::of(stats);
        if stats.write_pages >= MIN_PAGES / 16 {
            self.write = costs.write;
        }
        match self.off {
            None if anew => {}
            None => self.learn_on(&costs, pages),
            Some(_) => self.learn_off(&costs, pages),
        }
    }

    fn learn_on(&mut self, costs: &Costs, pages: u64) {
        if self.write == 0.0 {
            // What was found would have cost something that is not known: after a restart, perhaps, of a program that
            // changes little.
            return;
        }
        self.look = if self.seen == 0 {
            costs.look
        } else {
            self.look.min(costs.look)
        };
        self.seen += 1;
        let (took, saved) = (costs.look * pages as f64, self.write * costs.found * pages as f64);
        self.took = OLDER * self.took + took;
        self.saved = OLDER * self.saved + saved;
        if self.seen >= MIN_CHECKPOINTS && self.took > self.saved {
            let why = format!(
                "looking for {pages} pages took {:.1} ms and saved {:.1} ms of writing, and was as little use before; one page in 64 is still looked for, to see when it will be of use",
                took * 1e3,
                saved * 1e3
            );
            tracing::info!(why, "stored pages are not looked for any more");
            *self = Self {
                off: Some(why),
                look: self.look,
                write: self.write,
                ..Self::default()
            };
        }
    }

    fn learn_off(&mut self, costs: &Costs, pages: u64) {
        let (takes, saves) = (self.look * pages as f64, self.write * costs.found * pages as f64);
        if saves > CLEARLY * takes {
            tracing::info!(
                found = costs.found,
                takes_ms = takes * 1e3,
                saves_ms = saves * 1e3,
                "stored pages are looked for again"
            );
            self.off = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All measured at a microsecond for each page written and `look` nanoseconds for each looked for.
    fn stats(written: u64, found: u64, look: u64) -> Stats {
        Stats {
            written,
            found,
            looked: written + found,
            write_ns: written * 1000,
            write_pages: written,
            timed_pages: 1000,
            look_ns: 1000 * look,
            ..Stats::default()
        }
    }

    /// The same where one page in 64 was looked for.
    fn sampled(written: u64, found: u64) -> Stats {
        Stats {
            looked: (written + found) / 64,
            found: found / 64,
            written: written + found - found / 64,
            ..stats(written, found, 100)
        }
    }

    #[test]
    fn it_is_off_while_it_does_not_pay_and_on_as_soon_as_it_would() {
        let mut p = Payoff::default();
        p.learn(&stats(100_000, 0, 100), true);
        for _ in 0..2 {
            p.learn(&stats(100_000, 10, 100), false);
            assert_eq!(p.why_not(), None);
        }
        p.learn(&stats(100_000, 10, 100), false);
        let why = p.why_not().unwrap().to_owned();
        assert!(why.contains("took 10.0 ms and saved 0.0 ms"), "{why}");
        // Break-even is at a tenth.
        for found in [0, 640, 6400, 12_800] {
            p.learn(&sampled(100_000 - found, found), false);
            assert_eq!(p.why_not(), Some(why.as_str()), "{found}");
        }
        p.learn(&sampled(75_000, 25_000), false);
        assert_eq!(p.why_not(), None);
        p.learn(&stats(100_000, 0, 100), false);
        p.learn(&stats(100_000, 0, 100), false);
        assert_eq!(p.why_not(), None, "it has its trials again");
    }

    #[test]
    fn one_checkpoint_that_changes_everything_is_outweighed_by_those_around() {
        let mut p = Payoff::default();
        for round in 0..20 {
            let found = if round % 3 == 2 { 0 } else { 90_000 };
            p.learn(&stats(100_000 - found, found, 100), false);
            assert_eq!(p.why_not(), None, "round {round}");
        }
    }

    #[test]
    fn what_the_table_costs_the_agent_counts_too() {
        let mut p = Payoff::default();
        let with_table = Stats {
            table_ns: 20_000_000,
            ..stats(90_000, 10_000, 10)
        };
        (0..5).for_each(|_| p.learn(&stats(90_000, 10_000, 10), false));
        assert_eq!(p.why_not(), None);
        (0..5).for_each(|_| p.learn(&with_table, false));
        assert!(p.why_not().is_some());
    }

    #[test]
    fn small_checkpoints_say_nothing_and_one_that_writes_nothing_has_saved_all() {
        let mut p = Payoff::default();
        for _ in 0..10 {
            p.learn(&stats(MIN_PAGES - 1, 0, 1_000_000), false);
        }
        assert_eq!(p, Payoff::default());
        for _ in 0..10 {
            // Nor does anything before a write has been seen.
            p.learn(&stats(20, 1_000_000, 100), false);
            assert_eq!(p, Payoff::default());
        }
        p.learn(&stats(100_000, 0, 100), false);
        for _ in 0..10 {
            p.learn(&stats(0, 100_000, 100), false);
        }
        assert_eq!(p.why_not(), None);
    }
}
