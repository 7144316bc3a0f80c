//! Where to stop: programs that declare their loops are asked to wait, for a moment, before the one at which least is
//! alive.

use super::{datasets, own, words, WORD};
use belay_abi::access::{self as abi, Page, GONE_ON, MARKS, MOST, RING};
use belay_access::shape::Shape;
use belay_access::site::{anywhere, cheapest, sites, Costs, Reach, Site};
use belay_access::trace::{decode, Event, Loop, Record};
use belay_kernel::shared::Shared;
use belay_kernel::{cpu, futex, proc};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Once one process waits at its site, the others have so long.
const TOGETHER: Duration = Duration::from_millis(5);
/// How often it is looked whether they have come.
const TURN: Duration = Duration::from_micros(500);
/// How often it is looked whether they have ended.
const LOOK: Duration = Duration::from_millis(50);
/// Bytes that are written in a second, for the choice. What is gained by waiting is compared with it.
const BYTES_PER_S: f64 = 1e9;
/// Seconds of work that each second of waiting loses on average: the interval over the mean time to an interrupt, at
/// Young's optimum twice the checkpoint's cost over the interval.
const LOSS_PER_S: f64 = 0.01;
/// A site at which more than this share of what is alive anywhere is, is not worth a wait.
const WORTH: f64 = 0.9;

/// A program that declares its loops, and the sites of those that it has begun lately.
pub(crate) struct Program {
    pid: i32,
    page: Shared,
    /// Bytes of its datasets.
    pub(crate) bytes: u64,
    pub(crate) sites: Vec<Site>,
    /// What is alive of them at any moment, on average.
    anywhere: u64,
    /// That at which it is to be stopped.
    pub(crate) chosen: Option<Site>,
}

impl Program {
    /// Those of processes `pids` that do. `reach`: which loops are to decide what is alive.
    pub(crate) fn find(pids: impl Iterator<Item = i32>, reach: Reach) -> Vec<Self> {
        pids.filter_map(|pid| Self::look(pid, reach)).collect()
    }

    /// Chooses where each of `all` is to be stopped, where that is worth a wait, of which none may be longer than `limit`.
    pub(crate) fn choose(all: &mut [Self], reach: Reach, limit: Duration) {
        if all.is_empty() {
            return;
        }
        let ticks_per_s = ticks_per_s();
        for program in all {
            program.chosen = program.cheapest(reach, ticks_per_s, limit);
            tracing::debug!(pid = program.pid, site = ?program.chosen, "chosen for the checkpoint");
        }
    }

    fn look(pid: i32, reach: Reach) -> Option<Self> {
        let maps = proc::maps(pid).ok()?;
        let page = own(pid, &maps).ok()??.open().ok()?;
        // Nothing that it says is used any more.
        if half(&page, offset_of!(Page, faults)).load(Ordering::Relaxed) != 0 {
            return None;
        }
        let (declared, loops) = (datasets(&page), recent(&page));
        Some(Self {
            pid,
            bytes: declared.values().map(Shape::bytes).fold(0, u64::saturating_add),
            sites: sites(&declared, &loops, reach),
            anywhere: anywhere(&declared, &loops),
            chosen: None,
            page,
        })
    }

    /// The name of site `number`, ended by a zero byte where it is shorter.
    pub(crate) fn name(&self, number: u32) -> Option<[u8; size_of::<abi::Site>()]> {
        let at = (number as usize).checked_sub(1).filter(|at| *at < MOST)?;
        let words: [u64; size_of::<abi::Site>() / WORD] = self.page.words(offset_of!(Page, sites) + at * size_of::<abi::Site>());
        let mut name = [0; size_of::<abi::Site>()];
        for (to, word) in name.chunks_exact_mut(WORD).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        Some(name)
    }

    fn cheapest(&self, reach: Reach, ticks_per_s: f64, limit: Duration) -> Option<Site> {
        let costs = Costs {
            bytes_per_s: BYTES_PER_S,
            loss_per_s: LOSS_PER_S,
            ticks_per_s,
            delay: (limit.as_secs_f64() / 2.0 * ticks_per_s) as u64,
        };
        let anywhere = match reach {
            Reach::All => self.anywhere,
            // Where nobody waits all of it counts as alive.
            Reach::Next => self.bytes,
        };
        let best = cheapest(&self.sites, &costs)?;
        (best.alive as f64 <= WORTH * anywhere as f64).then_some(best)
    }
}

/// A checkpoint is wanted at chosen sites. Dropped, it is not any more, and who waits goes on.
pub(crate) struct Wanted {
    /// Who is asked, by its process.
    pages: Vec<(i32, Shared)>,
    /// Since when somebody waits.
    pub(crate) since: Option<Instant>,
    /// How long after the stop the programs have come around to their sites again.
    pub(crate) period: Duration,
}

impl Wanted {
    /// Asks the programs to wait at the sites chosen for them, and waits until they do, but no longer than `limit`.
    pub(crate) fn ask(programs: Vec<Program>, limit: Duration) -> Self {
        let chosen = programs.iter().filter_map(|program| program.chosen);
        let longest = chosen.map(|site| site.gap).max();
        let mut all = Self {
            pages: Vec::new(),
            since: None,
            period: longest.map_or(Duration::ZERO, |gap| {
                Duration::from_secs_f64(gap as f64 / ticks_per_s()).min(limit)
            }),
        };
        for program in programs {
            if let Some(site) = program.chosen {
                all.want(program.pid, program.page, site.site);
            }
        }
        all.wait(limit);
        all
    }

    fn want(&mut self, pid: i32, page: Shared, site: u32) {
        let here = half(&page, offset_of!(Page, here)).load(Ordering::Relaxed);
        half(&page, offset_of!(Page, site)).store(site, Ordering::Relaxed);
        let next = (here & !GONE_ON) % (GONE_ON - 1) + 1;
        half(&page, offset_of!(Page, want)).store(next, Ordering::Release);
        self.pages.push((pid, page));
    }

    fn wait(&mut self, limit: Duration) {
        let (end, mut look) = (Instant::now() + limit, Instant::now() + LOOK);
        let has_come = |(_, page): &&(i32, Shared)| {
            let [want, here] = [offset_of!(Page, want), offset_of!(Page, here)].map(|at| half(page, at).load(Ordering::Acquire));
            want == here & !GONE_ON
        };
        loop {
            let come = self.pages.iter().filter(has_come).count();
            let now = Instant::now();
            if come > 0 {
                self.since.get_or_insert(now);
            }
            let late = self.since.is_some_and(|since| now >= since + TOGETHER);
            if come == self.pages.len() || late || now >= end {
                return;
            }
            // Who has ended comes to no loop, and where one has, the others may end too.
            if now >= look {
                look = now + LOOK;
                if self.pages.iter().any(|(pid, _)| proc::born(*pid).is_none()) {
                    return;
                }
            }
            std::thread::sleep(TURN);
        }
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        for (_, page) in &self.pages {
            let want = half(page, offset_of!(Page, want));
            want.store(0, Ordering::Release);
            futex::wake(want);
        }
    }
}

fn half(page: &Shared, at: usize) -> &AtomicU32 {
    page.half(at)
}

/// The loops that the program has begun lately, as far as they are known.
fn recent(page: &Shared) -> Vec<Loop> {
    let head = page.word(offset_of!(Page, head)).load(Ordering::Acquire);
    // What is about to be overwritten is not looked at.
    let oldest = head.saturating_sub(RING as u64 / 8 * 7);
    let mark = |n: usize| page.word(offset_of!(Page, marks) + n * WORD).load(Ordering::Relaxed);
    let begin = (0..MARKS).map(mark).filter(|m| (oldest..=head).contains(m)).min();
    let found = begin.and_then(|begin| words(page, begin, head));
    let events = found.and_then(|found| decode(&found).ok()).unwrap_or_default();
    let entered = |record: Record| match record.event {
        Event::Enter(one) => Some(one),
        Event::Move { .. } | Event::Reset { .. } => None,
    };
    events.into_iter().filter_map(entered).collect()
}

/// How fast the processor's time stamp counter counts.
pub(super) fn ticks_per_s() -> f64 {
    let now = || (Instant::now(), cpu::ticks());
    let (begin, first) = now();
    std::thread::sleep(Duration::from_millis(2));
    let (end, last) = now();
    last.wrapping_sub(first) as f64 / (end - begin).as_secs_f64()
}
