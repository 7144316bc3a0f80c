//! Points of programs' own (`belay_point`): processes that have parts of global arrays are asked to wait, all of them the
//! same time that they come there. What they then have belongs together, and can be given to another number of processes.

use super::sites::ticks_per_s;
use super::{own, Waits, WORD};
use belay_abi::access::{Dataset, Page, Share, MOST, MOST_PAYLOAD};
use belay_image::model::Point;
use belay_kernel::proc::Map;
use belay_kernel::shared::Shared;
use belay_kernel::{futex, proc};
use std::io;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest time until all wait, and shortest: in between it is [`TIMES`] as long as from one point to the next.
const LIMIT: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];
/// The same for the others, once one of them waits: they may need its progress.
const TOGETHER: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(2)];
/// How often programs come to their points meanwhile.
const TIMES: u32 = 3;
/// How often it is looked whether they have come.
const TURN: Duration = Duration::from_micros(500);

/// A checkpoint is wanted at a point. Dropped, it is not any more, and who waits goes on.
pub(crate) struct Meeting {
    pages: Vec<Shared>,
    number: u64,
    /// Since when somebody waits.
    pub(crate) since: Option<Instant>,
}

impl Meeting {
    /// Asks those of processes `pids` to wait that have parts of global arrays, and waits until they do, or long enough.
    pub(crate) fn ask(pids: impl Iterator<Item = i32>) -> Option<Self> {
        let pages: Vec<Shared> = pids.filter_map(look).collect();
        // Nobody has come to any yet: perhaps nobody ever does.
        let number = pages.iter().map(come).max().filter(|most| *most > 0)?;
        let mut meeting = Self {
            pages,
            number,
            since: None,
        };
        meeting.want(number + 1);
        if meeting.wait() {
            tracing::debug!(point = meeting.number, "all processes with parts of global arrays wait");
        } else {
            tracing::info!(
                point = meeting.number,
                "not all processes with parts of global arrays have come to the same belay_point: these are not exported together"
            );
        }
        Some(meeting)
    }

    fn want(&mut self, number: u64) {
        self.number = number;
        for page in &self.pages {
            // In one order with the number that the program writes before it reads this: one of both sees the other.
            word(page, offset_of!(Page, point_want)).store(number, Ordering::SeqCst);
            let turn = page.half(offset_of!(Page, point_turn));
            turn.fetch_add(1, Ordering::Release);
            futex::wake(turn);
        }
    }

    /// Whether all wait.
    fn wait(&mut self) -> bool {
        let took = self.took();
        let [limit, together] = [LIMIT, TOGETHER].map(|[least, most]| (took * TIMES).clamp(least, most));
        let end = Instant::now() + limit;
        let (mut step, mut late) = (1, false);
        loop {
            let here = |page: &&Shared| word(page, offset_of!(Page, point_here)).load(Ordering::Acquire) == self.number;
            let waiting = self.pages.iter().filter(here).count();
            let now = Instant::now();
            if waiting > 0 {
                self.since.get_or_insert(now);
            }
            if waiting == self.pages.len() {
                // Who has said so is about to begin its wait.
                std::thread::sleep(TURN);
                return true;
            }
            if now >= end || self.since.is_some_and(|since| now >= since + together) {
                return false;
            }
            // Who was there before it was asked does not come back: further on then, each time twice as far. What is seen
            // once may be on its way into the wait.
            let is_past = |page: &&Shared| come(page) >= self.number && !here(page);
            let was_late = std::mem::replace(&mut late, self.pages.iter().any(|page| is_past(&page)));
            if was_late && late {
                let most = self.pages.iter().map(come).max().unwrap_or(0);
                self.want(most + step);
                (self.since, late, step) = (None, false, step * 2);
            }
            std::thread::sleep(TURN);
        }
    }

    /// How long it takes from one point to the next, as far as is known.
    fn took(&self) -> Duration {
        let ticks = |page| word(page, offset_of!(Page, point_took)).load(Ordering::Relaxed);
        let most = self.pages.iter().map(ticks).max().unwrap_or(0);
        Duration::try_from_secs_f64(most as f64 / ticks_per_s()).map_or(LIMIT[1], |took| took.min(LIMIT[1]))
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.want(0);
    }
}

/// The page of process `pid`, where it has a part of a global array.
fn look(pid: i32) -> Option<Shared> {
    let maps = proc::maps(pid).ok()?;
    let page = own(pid, &maps).ok()??.open().ok()?;
    let count = page.half(offset_of!(Page, dataset_count)).load(Ordering::Relaxed) as usize;
    let has_part = |at: usize| {
        let [address] = page.words(offset_of!(Page, datasets) + at * size_of::<Dataset>());
        let [global] = page.words(offset_of!(Page, shares) + at * size_of::<Share>());
        address != 0 && global != 0
    };
    (0..count.min(MOST)).any(has_part).then_some(page)
}

fn come(page: &Shared) -> u64 {
    word(page, offset_of!(Page, point)).load(Ordering::SeqCst)
}

fn word(page: &Shared, at: usize) -> &AtomicU64 {
    page.word(at)
}

/// The point at which stopped process `pid` waits.
pub(crate) fn waiting(pid: i32, maps: &[Map], waits: Waits<'_>) -> Option<Point> {
    let page = own(pid, maps).ok()??.map.start;
    // Nobody else: a handler of a signal may have jumped out of the wait.
    if !waits(page + offset_of!(Page, point_turn) as u64) {
        return None;
    }
    let read = |at: usize, bytes: &mut [u8]| belay_kernel::vm::read(pid, page + at as u64, bytes);
    let all = || {
        let (mut number, mut length) = ([0; WORD], [0; WORD / 2]);
        read(offset_of!(Page, point_here), &mut number)?;
        read(offset_of!(Page, payload_bytes), &mut length)?;
        let length = (u32::from_ne_bytes(length) as usize).min(MOST_PAYLOAD);
        let mut payload = vec![0; length];
        read(offset_of!(Page, payload), &mut payload)?;
        Ok::<_, io::Error>(Point {
            number: u64::from_ne_bytes(number),
            payload,
        })
    };
    all().ok().filter(|point| point.number != 0)
}
