//! Memory headroom: how a snapshot is taken so that it never costs the application its memory, and the watch over the
//! memory that is left while the copies write.
//!
//! ```text
//! worst case fits            ──> copy on write: the program goes on, each page that it writes is copied once
//! some copies fit            ──> the same with a cap: Watch looks at what is left ── near the cap: priority ── at the cap: the program stands still
//!                                                                                       until what remains to be written would fit
//! the copies' tables fit     ──> written before the program goes on, by the snapshot children
//! not even these             ──> the same, by the agent; no child is made
//! less                       ──> the checkpoint is refused
//! ```
//! Every level of the control groups of the processes and of the agent counts, and the node itself
//! (`belay_kernel::room`). What is counted is what a checkpoint can need at most: copies of the pages that the program
//! writes meanwhile, page tables of the children, tables of hashes and extents, and, where the store is itself in
//! memory (tmpfs), what is stored.

use crate::gate;
use crate::state::draft::Draft;
use crate::stop::gather;
use crate::stop::listing::Listing;
use crate::stop::signals;
use crate::CaptureError;
use crate::Held;
use belay_kernel::proc::Status;
use belay_kernel::room::{self, Free, Gauges};
use belay_storage::session::Session;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// How fast one processor can write to pages that must be copied, bytes per second.
const COPY_RATE: u64 = 1536 * MIB;
/// From a look at the memory that is left to the last of the program's instructions: the period of the timer, and the
/// stop of all threads.
const REACTION_MS: u64 = 10;
/// Memory that the copies may need for themselves: stacks, kernel objects, the agent's buffers.
const PER_PROCESS: u64 = 512 * 1024;
/// Tables for each page that is looked at: its hash twice; where pages are looked for by their contents also an extent,
/// which may be one of its own, twice.
const PER_PAGE: [u64; 2] = [40, 96];
/// The same where the agent writes: one hash.
const PER_PAGE_AGENT: u64 = 24;
/// Where memory is short so many write at most.
pub(crate) const FRUGAL_WRITERS: u32 = 2;
/// Pages of chunks on their way to the disk, where they are dropped as soon as they are there: of each writer, or of the agent.
const ON_THE_WAY: u64 = 3 * MIB;
/// The shortest and the longest time between two looks.
const PERIODS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
const PAGE: u64 = 4096;

/// How the memory of a generation was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// The program went on while its memory was written.
    CopyOnWrite,
    /// The same, with a limit to the memory that this may cost.
    Capped,
    /// The memory was written while the program stood still.
    BeforeResume,
}

impl Mode {
    /// Its name in status and manifest.
    pub fn name(self) -> &'static str {
        match self {
            Mode::CopyOnWrite => "copy_on_write",
            Mode::Capped => "copy_on_write_capped",
            Mode::BeforeResume => "write_before_resume",
        }
    }
}

/// What a checkpoint can need at most, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Copies of pages that the program writes meanwhile.
    copies: u64,
    /// Page tables of the snapshot children, what else each of them needs, and copies of what is registered with an
    /// adapter, which the fork makes at once.
    children: u64,
    /// Pages that are looked at: tables of the agent and the writers.
    pages: u64,
    /// Growth of the table of hashes, and what giving it up would free.
    index: u64,
    index_held: u64,
    /// What is stored, where the store is in memory.
    stored: u64,
    /// What local tiers in memory would take, where there is room for it.
    tiers: u64,
    /// What the kernel must be able to promise, under strict overcommit.
    promised: u64,
    /// Copies that the program can cause from a look at the memory to its stop.
    reaction: u64,
    /// Threads that write where memory is not short.
    writers: u32,
}

/// How the snapshot is to be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) mode: Mode,
    pub(crate) why: String,
    /// Snapshot children are made.
    pub(crate) fork: bool,
    /// Nothing waits: what has been stored is given back at once, and what has been written does not stay in the page cache.
    pub(crate) frugal: bool,
    /// There is room for the table of hashes to grow.
    pub(crate) index: bool,
    /// Most bytes that may be stored, where the store is in memory.
    pub(crate) store_limit: Option<u64>,
    /// Most bytes that local tiers in memory may be asked to hold.
    tiers: u64,
    /// What will be needed besides copies of pages.
    fixed: u64,
    reaction: u64,
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(MIB))
}

impl Plan {
    /// Decides, with `free` at the tightest place and `promisable` under strict overcommit. `hold`: the program will
    /// not go on in any case.
    fn of(n: &Needs, free: &Free, promisable: Option<u64>, hold: bool) -> Result<Plan, String> {
        let place = &free.place;
        let on_the_way = |writers: u32| u64::from(writers) * ON_THE_WAY;
        let writers = |index: bool| n.pages * PER_PAGE[usize::from(index)] + on_the_way(FRUGAL_WRITERS) + n.children;
        let index = n.index > 0 && writers(true) + n.index <= free.bytes;
        let (left, with_children) = if index {
            (free.bytes, writers(true) + n.index)
        } else {
            (free.bytes + n.index_held, writers(false))
        };
        let base = n.pages * PER_PAGE_AGENT + ON_THE_WAY;
        // An eighth stays for the program's own wishes.
        let promise = promisable.filter(|p| n.promised + n.promised / 8 > *p);
        let whole = with_children + n.copies + n.stored + n.reaction;
        let others = on_the_way(n.writers.saturating_sub(FRUGAL_WRITERS));
        let plan = |mode, why: String, fork: bool| {
            let frugal = mode != Mode::CopyOnWrite || whole + n.copies + others > left;
            let others = if frugal { 0 } else { others };
            let fixed = if fork { with_children + others } else { base };
            let store_limit = match mode {
                Mode::CopyOnWrite => left.saturating_sub(fixed + n.copies + n.reaction),
                Mode::Capped => n.stored,
                Mode::BeforeResume => left.saturating_sub(fixed),
            };
            Plan {
                mode,
                why,
                fork,
                frugal,
                index,
                store_limit: (n.stored > 0).then_some(store_limit),
                // What is stored there is given back only when it has been moved.
                tiers: match mode {
                    Mode::CopyOnWrite if n.tiers <= left.saturating_sub(whole + others) => u64::MAX,
                    Mode::CopyOnWrite => left.saturating_sub(whole + others),
                    Mode::Capped | Mode::BeforeResume => 0,
                },
                fixed: fixed + n.stored,
                reaction: n.reaction,
            }
        };
        let short = || format!("{} free ({place}), {} could be needed", mib(left), mib(whole));
        if let Some(p) = promise.filter(|_| base <= left) {
            let (wanted, can) = (mib(n.promised), mib(p));
            let why = format!("vm.overcommit_memory is 2, and {wanted} more cannot be promised ({can} can)");
            Ok(plan(Mode::BeforeResume, why, false))
        } else if hold && with_children <= left {
            Ok(plan(Mode::BeforeResume, "the program does not go on".into(), true))
        } else if whole <= left {
            let why = format!("{} free ({place}), at most {} needed", mib(left), mib(whole));
            Ok(plan(Mode::CopyOnWrite, why, true))
        } else if with_children + n.stored + 3 * n.reaction <= left {
            Ok(plan(Mode::Capped, short(), true))
        } else if base <= left {
            Ok(plan(Mode::BeforeResume, short(), with_children <= left))
        } else {
            Err(format!(
                "{} free ({place}), a checkpoint needs at least {}; raise the limit, or let the job use less memory",
                mib(left),
                mib(base)
            ))
        }
    }

    /// Tells the session.
    pub(crate) fn apply(&self, session: &mut Session) {
        session.be_frugal(self.frugal);
        if !self.index {
            session.forget_index();
        }
        if let Some(bytes) = self.store_limit {
            session.limit_memory(bytes);
        }
        session.limit_tiers_in_memory(self.tiers);
    }

    /// What has become of the plan, and why: `missing` says why there is no copy of a process.
    pub(crate) fn manner(&self, missing: Option<&str>) -> (Mode, String) {
        let mut reason = self.why.clone();
        let mode = match missing {
            Some(why) if self.mode != Mode::BeforeResume => {
                reason = why.to_owned();
                Mode::BeforeResume
            }
            _ => self.mode,
        };
        if !self.index {
            reason.push_str("; pages are not looked for by their contents");
        }
        (mode, reason)
    }

    /// Reads what is free and decides.
    pub(crate) fn make(drafts: &[Draft], session: &Session, (writers, hold): (u32, bool)) -> Result<(Plan, Gauges), CaptureError> {
        let gauges = gauges(drafts)?;
        let free = gauges
            .free()
            .ok_or_else(|| CaptureError::failed("read how much memory is free", "/proc/meminfo"))?;
        let needs = Needs::of(drafts, session, writers);
        let plan = Plan::of(&needs, &free, room::commit_left(), hold).map_err(CaptureError::NoMemory)?;
        tracing::debug!(?needs, ?free, ?plan, "headroom");
        Ok((plan, gauges))
    }
}

/// For the memory of these processes and of the agent.
fn gauges(drafts: &[Draft]) -> Result<Gauges, CaptureError> {
    let agent = std::process::id().cast_signed();
    let all = drafts.iter().map(|d| d.task).chain([agent]);
    Gauges::of(all).map_err(|e| CaptureError::system("read the control groups of the job", e))
}

/// How much of what is stored while the processes stand still may be kept in memory until they go on, bytes: a quarter
/// of what is free now. What is left is looked at anew before their own memory is taken.
pub(crate) fn to_hold_back(drafts: &[Draft]) -> u64 {
    let free = gauges(drafts).ok().and_then(|g| g.free()).map_or(0, |f| f.bytes);
    free.min(room::commit_left().unwrap_or(u64::MAX)) / 4
}

/// Bytes of a process that are copied when it writes them, and those that the fork copies at once: what is registered
/// with an adapter, which may write it at any time.
fn copies(status: &Status) -> [u64; 2] {
    let [anonymous, pinned] = ["RssAnon", "VmPin"].map(|key| status.kib(key) * 1024);
    let at_once = pinned.min(anonymous);
    [anonymous - at_once, at_once]
}

impl Needs {
    fn of(drafts: &[Draft], session: &Session, writers: u32) -> Self {
        let sum = |f: &dyn Fn(&Draft) -> u64| drafts.iter().map(f).sum::<u64>();
        let copies = sum(&|d| copies(&d.status)[0]);
        let anonymous = copies + sum(&|d| self::copies(&d.status)[1]);
        let resident = sum(&|d| d.stat.rss_pages * PAGE);
        let threads = sum(&|d| u64::from(d.stat.num_threads));
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        Self {
            copies,
            children: sum(&|d| d.kib("VmPTE") * 1024 + PER_PROCESS + self::copies(&d.status)[1]),
            pages: resident / PAGE,
            index: session.index_growth(resident / PAGE).max(1),
            index_held: session.index_share().bytes,
            stored: if room::in_memory(session.place()) { anonymous } else { 0 },
            tiers: anonymous.min(session.room_in_memory()),
            promised: sum(&|d| (d.kib("VmData") + d.kib("VmStk")) * 1024),
            reaction: COPY_RATE / 1000 * REACTION_MS * threads.clamp(1, processors),
            writers,
        }
    }
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Look again after this time.
    Wait(Duration),
    /// Half of what copies may cost is used: the copies should be quick.
    Hurry,
    /// The program must stand still.
    Stop,
    /// The program can go on: what remains would fit.
    Go,
}

/// Watches the memory that is left while the copies of a capped snapshot write.
#[derive(Debug)]
pub struct Watch {
    gauges: Gauges,
    /// What is needed besides copies of pages, less as the rest becomes less.
    fixed: u64,
    reaction: u64,
    /// Free memory at the beginning, and at the last look.
    first: u64,
    last: u64,
    hurried: bool,
}

impl Watch {
    /// Begins to watch; the copies have just been made.
    pub(crate) fn new(plan: &Plan, gauges: Gauges) -> Self {
        let now = gauges.free().map_or(0, |f| f.bytes);
        Self {
            gauges,
            fixed: plan.fixed,
            reaction: plan.reaction,
            first: now,
            last: now,
            hurried: false,
        }
    }

    /// Looks at what is left. `rest` of `all` bytes are still to be written; `stopped`: the program stands still.
    pub fn look(&mut self, rest: u64, all: u64, stopped: bool) -> Advice {
        let now = self.gauges.free().map_or(0, |f| f.bytes);
        self.advise(now, rest, all, stopped)
    }

    fn advise(&mut self, now: u64, rest: u64, all: u64, stopped: bool) -> Advice {
        let rest = rest.min(all);
        let fixed = (u128::from(self.fixed) * u128::from(rest) / u128::from(all.max(1))) as u64;
        let reserve = fixed + self.reaction;
        // A late look sees a deep fall, and the next one may be as late.
        let fall = self.last.saturating_sub(now);
        self.last = now;
        let longest = PERIODS.1;
        if stopped {
            return if now >= reserve + rest {
                Advice::Go
            } else {
                Advice::Wait(PERIODS.0)
            };
        }
        if now < reserve + fall && now < reserve + rest {
            return Advice::Stop;
        }
        if !self.hurried && now < reserve + self.first.saturating_sub(reserve) / 2 {
            self.hurried = true;
            return Advice::Hurry;
        }
        let until = u128::from(now.saturating_sub(reserve)) * u128::from(REACTION_MS) / 2 / u128::from(self.reaction.max(1));
        Advice::Wait(Duration::from_millis(until.min(longest.as_millis()) as u64).max(PERIODS.0))
    }
}

/// Stops every process of the job, as a checkpoint does, until the result is dropped. `outside` are children of the
/// agent that are no part of it, the snapshot children among them. Call from the agent's main thread.
pub fn stop(outside: &[i32]) -> Result<Held, CaptureError> {
    let _signals = signals::ChildSignals::block();
    let agent = std::process::id().cast_signed();
    let outside = &gate::outside(outside);
    // Now: there is no time to outlast a vfork.
    let prepared = gather::prepare(Listing::make(agent, outside)?, agent)?;
    gather::suspend(prepared, agent, outside).map(|(job, _)| Held { job, gate: None })
}

/// Lets the snapshot children `copies` go before others, at the processors and at the disk, as far as the system allows it.
pub fn hurry(copies: &[i32]) {
    const BEST_EFFORT_FIRST: i32 = 2 << 13;
    for tid in copies
        .iter()
        .flat_map(|pid| belay_kernel::proc::tasks(*pid).unwrap_or_default())
    {
        // An ordinary user may not raise the priority, which is no failure.
        let _ = rustix::process::setpriority_process(rustix::process::Pid::from_raw(tid), -10);
        let _ = belay_kernel::sched::set_io_priority(tid, BEST_EFFORT_FIRST);
    }
}

/// Should memory become short in spite of all, the copy goes, not the application.
pub(crate) fn offer(copy: i32) {
    let _ = std::fs::write(format!("/proc/{copy}/oom_score_adj"), "1000");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(gib: u64) -> Needs {
        Needs {
            copies: gib << 30,
            children: 4 * MIB,
            pages: gib << 18,
            index: 32 * MIB * gib,
            index_held: 0,
            stored: 0,
            tiers: 0,
            promised: gib << 30,
            reaction: 60 * MIB,
            writers: 2,
        }
    }

    fn free(mib: u64) -> Free {
        Free {
            bytes: mib * MIB,
            place: "the node".into(),
        }
    }

    fn mode(n: &Needs, left: u64) -> (Mode, bool, bool, bool) {
        let p = Plan::of(n, &free(left), None, false).unwrap();
        (p.mode, p.fork, p.index, p.frugal)
    }

    #[test]
    fn the_mode_follows_from_what_is_free() {
        let n = needs(1);
        assert_eq!(mode(&n, 100_000), (Mode::CopyOnWrite, true, true, false));
        assert_eq!(mode(&n, 1150), (Mode::CopyOnWrite, true, true, true));
        assert_eq!(mode(&n, 1149), (Mode::Capped, true, true, true));
        assert_eq!(mode(&n, 246), (Mode::Capped, true, true, true));
        assert_eq!(mode(&n, 245), (Mode::BeforeResume, true, true, true));
        assert_eq!(mode(&n, 65), (Mode::BeforeResume, true, false, true), "no room for hashes");
        assert_eq!(
            mode(&n, 19),
            (Mode::BeforeResume, false, false, true),
            "no room for page tables"
        );
        let refused = Plan::of(&n, &free(8), None, false).unwrap_err();
        assert!(
            refused.contains("8 MiB free (the node)") && refused.contains("9 MiB"),
            "{refused}"
        );
        let n = Needs {
            index_held: 12 * MIB,
            ..n
        };
        assert_eq!(mode(&n, 8), (Mode::BeforeResume, true, false, true), "the hashes make room");
    }

    #[test]
    fn what_is_registered_with_an_adapter_is_copied_by_the_fork() {
        let of = |text: &str| copies(&Status::parse(text.as_bytes()));
        assert_eq!(of("RssAnon:\t  100 kB\n"), [100 << 10, 0]);
        assert_eq!(of("VmPin:\t   40 kB\nRssAnon:\t  100 kB\n"), [60 << 10, 40 << 10]);
        // Memory of files can be registered too.
        assert_eq!(of("VmPin:\t  140 kB\nRssAnon:\t  100 kB\n"), [0, 100 << 10]);
    }

    #[test]
    fn many_write_where_there_is_room_for_each() {
        let of = |writers, left| Plan::of(&Needs { writers, ..needs(1) }, &free(left), None, false).unwrap();
        let frugal = |writers, left| of(writers, left).frugal;
        assert_eq!([frugal(2, 2173), frugal(2, 2174)], [true, false]);
        assert_eq!([frugal(8, 2191), frugal(8, 2192)], [true, false], "six more");
        assert_eq!(of(8, 2192).fixed - of(8, 2191).fixed, 18 * MIB);
    }

    #[test]
    fn strict_overcommit_counts_promises() {
        let n = needs(1);
        let of = |promisable: u64| Plan::of(&n, &free(100_000), Some(promisable * MIB), false).unwrap();
        assert_eq!(of(1152).mode, Mode::CopyOnWrite);
        let p = of(1151);
        assert_eq!((p.mode, p.fork), (Mode::BeforeResume, false));
        assert!(p.why.contains("vm.overcommit_memory is 2"), "{}", p.why);
    }

    #[test]
    fn a_store_in_memory_counts_too() {
        let n = Needs {
            stored: 1 << 30,
            ..needs(1)
        };
        let p = |left| Plan::of(&n, &free(left), None, false).unwrap();
        let modes = [2174, 2173, 1270, 1269].map(|left| p(left).mode);
        assert_eq!(modes, [Mode::CopyOnWrite, Mode::Capped, Mode::Capped, Mode::BeforeResume]);
        assert_eq!(p(2173).store_limit, Some(1 << 30));
        assert!(p(2174).store_limit.unwrap() >= 1 << 30);
        assert_eq!(p(500).store_limit, Some((500 - 66) * MIB));
    }

    #[test]
    fn tiers_in_memory_get_what_nobody_else_could_need() {
        let n = Needs {
            tiers: 500 * MIB,
            ..needs(1)
        };
        let tiers = |left| Plan::of(&n, &free(left), None, false).unwrap().tiers / MIB;
        assert_eq!([100_000, 1650, 1649].map(tiers), [u64::MAX / MIB, u64::MAX / MIB, 499]);
        assert_eq!([1250, 1149, 65].map(tiers), [100, 0, 0]);
    }

    #[test]
    fn the_program_stops_in_time_and_goes_on_when_the_rest_fits() {
        let mut w = Watch {
            gauges: Gauges::default(),
            fixed: 50 * MIB,
            reaction: 60 * MIB,
            first: 500 * MIB,
            last: 500 * MIB,
            hurried: false,
        };
        let all = 1024 * MIB;
        assert_eq!(w.advise(500 * MIB, all, all, false), Advice::Wait(Duration::from_millis(32)));
        assert_eq!(w.advise(400 * MIB, all, all, false), Advice::Wait(Duration::from_millis(24)));
        assert_eq!(w.advise(300 * MIB, all, all, false), Advice::Hurry);
        assert_eq!(w.advise(290 * MIB, all, all, false), Advice::Wait(Duration::from_millis(15)));
        assert_eq!(
            w.advise(190 * MIB, all, all, false),
            Advice::Stop,
            "as far again, and the reserve is touched"
        );
        assert_eq!(w.advise(190 * MIB, all / 2, all, true), Advice::Wait(PERIODS.0));
        assert_eq!(w.advise(400 * MIB, 256 * MIB, all, true), Advice::Go);
        assert_eq!(
            w.advise(100 * MIB, 20 * MIB, all, false),
            Advice::Wait(Duration::from_millis(3)),
            "all of the rest would fit"
        );
        assert_eq!(w.advise(10 * MIB, 20 * MIB, all, false), Advice::Stop);
    }
}
