//! Snapshot children: made while the application is stopped, written afterwards.

pub(crate) mod writers;

use crate::access::{self, Waits};
use crate::inject::{self, Area, Kept, Made};
use crate::memory::control::ControlMemory;
use crate::memory::copy::{covers, inherited, is_copy_of, is_whole, kill, SnapshotChild};
use crate::memory::guards::{self, may_have_guards};
use crate::memory::headroom::{Mode, Plan, FRUGAL_WRITERS};
use crate::memory::later::{self, Later};
use crate::memory::looks::Request;
use crate::memory::mappings::{self, Identities, Pages};
use crate::memory::tracking::{self, Armed, Clean, Tracking, Wish};
use crate::memory::{kin::Kin, mlock::Locks, reader, unchanged};
use crate::state::draft::Draft;
use crate::stop::stopped::Suspended;
use crate::{Access, CaptureError};
use belay_abi::inject::{Range, MAX_LEFT_OUT, RANGE_KEEP_ZEROS, RANGE_REFUSED, RANGE_UNREADABLE};
use belay_access::pages::Spared;
use belay_access::site::Reach;
use belay_image::extents::Extent;
use belay_image::model::{LeftOut, Vma};
use belay_image::TableId;
use belay_kernel::pagemap::Pagemap;
use belay_kernel::pidfd;
use belay_kernel::proc::{self, Map};
use belay_kernel::vm::Memory;
use belay_storage::session::Session;
use std::cell::Cell;
use std::os::fd::AsFd;
use std::time::Duration;

const PAGE: u64 = 4096;
const PROT_READ: u32 = 1;
const PROT_EXEC: u32 = 4;

/// The stored memory of one process, or the means to store it.
#[derive(Debug)]
pub(crate) struct Child {
    pid: i32,
    /// A thread of it, under which its memory is found.
    task: i32,
    maps: Vec<Map>,
    /// When it was started, and its page faults when it was stopped.
    starttime: u64,
    faults: u64,
    resident_bytes: u64,
    /// Private pages of the process, in memory or swapped out.
    own_pages: u64,
    /// Where the agent itself has stored pages, and how many of these are among its own.
    early: Vec<Extent>,
    early_own: u64,
    /// Mappings that the child did not inherit, or whose contents it did not (MADV_DONTFORK, MADV_WIPEONFORK).
    not_inherited: Vec<u64>,
    /// Starts of the mappings that it did not inherit at all, in ascending order.
    missing_in_child: Vec<u64>,
    /// `None` when everything was stored early.
    snapshot: Option<SnapshotChild>,
    /// Mappings of the snapshot child whose file is gone.
    gone: Vec<(u64, u64)>,
    /// Where mappings begin of which all pages are stored.
    whole: Vec<u64>,
    /// `VmFlags` by start address, read early where there is no child.
    flags: Vec<Map>,
    /// Those of mappings that the child does not have, such as explicit huge pages.
    huge: Vec<Map>,
    /// Guard regions, as far as they are known.
    guards: Vec<(u64, u64)>,
    /// What the process has locked: the child inherits no locks.
    locks: Locks,
    /// What has not changed since the last checkpoint.
    clean: Clean,
    /// What will tell the next one.
    armed: Option<Armed>,
    /// What is stored with the pages of its maker.
    kin: Kin,
    /// Bytes that it lacks since its restart: this checkpoint lacks them too.
    lacking: u64,
    /// Memory that comes back without access rights cannot be locked, nor registered with an adapter.
    has_locks: bool,
    /// Datasets of which the program may still say that it overwrites them.
    later: Option<Later>,
    /// Memory is short, see `headroom`.
    frugal: bool,
    /// Why there is no snapshot child although one was wanted.
    missing: Option<String>,
}

/// What became of a process's memory.
pub(crate) struct Written {
    pub(crate) vmas: Vec<Vma>,
    /// What the next checkpoint will need to know about writes.
    pub(crate) armed: Option<Armed>,
    /// What was not stored, and how many bytes.
    pub(crate) left_out: Option<LeftOut>,
    pub(crate) spared_bytes: u64,
}

/// Bytes written and expected, over all processes.
pub(crate) struct Progress<'a> {
    report: &'a dyn Fn(u64, u64),
    done: u64,
    expected: u64,
    /// What was told last: several are written at once, and not all are counted each time.
    told: Cell<u64>,
}

impl<'a> Progress<'a> {
    pub(crate) fn new(report: &'a dyn Fn(u64, u64)) -> Self {
        Self {
            report,
            done: 0,
            expected: 0,
            told: Cell::new(0),
        }
    }

    pub(crate) fn expect(&mut self, bytes: u64) {
        self.expected += bytes;
    }

    /// All that was expected of a process has been dealt with.
    pub(crate) fn done(&mut self, bytes: u64) {
        self.done += bytes;
        self.now(0);
    }

    /// `current` bytes of what is not done yet have been dealt with.
    pub(crate) fn now(&self, current: u64) {
        let done = self.told.get().max(self.done + current);
        self.told.set(done);
        (self.report)(done, self.expected.max(done));
    }
}

/// Makes a snapshot child of every process that can have one and stores the rest at once.
pub(crate) fn take(
    job: &mut Suspended,
    areas: &[Area],
    drafts: &[Draft],
    (session, tracking): (&mut Session, &mut Tracking),
    (plan, access, horizon): (&Plan, Access, Duration),
) -> Result<Vec<Child>, CaptureError> {
    let controls = drafts
        .iter()
        .map(|_| ControlMemory::create())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| CaptureError::system("create control memory", e))?;
    let names = controls
        .iter()
        .map(ControlMemory::name)
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|e| CaptureError::system("create control memory", e))?;
    let left_out = drafts.iter().map(left_out).collect::<Result<Vec<_>, _>>()?;
    let mut wish = |d: &Draft| tracking.wish((d.pid, d.stat.starttime), d.by_devices);
    let mut wishes: Vec<Wish> = drafts.iter().map(&mut wish).collect();
    let want_uffd: Vec<i32> = wishes.iter().map(|w| w.make).collect();
    let made = if plan.fork {
        let kept = unchanged::look(drafts, areas, &mut wishes).into_iter().zip(left_out);
        let kept: Vec<Kept> = kept.map(|(unchanged, left_out)| Kept { left_out, unchanged }).collect();
        inject::snapshot(job, areas, &kept, &names, &want_uffd)?
    } else {
        vec![Err(0); drafts.len()]
    };
    if let Some(error) = made.iter().flatten().filter_map(|m| m.uffd).find(|fd| *fd < 0) {
        tracking.note_no_uffd(&std::io::Error::from_raw_os_error(-error));
    }
    let mut out = Vec::new();
    let mut pids = made.iter().map(|m| m.as_ref().ok().map(|m| m.pid));
    for ((((draft, area), control), made), wish) in drafts.iter().zip(areas).zip(controls).zip(&made).zip(wishes) {
        pids.next();
        match Child::new(draft, area, control, *made, session, wish) {
            Ok(mut child) => {
                child.frugal = plan.frugal;
                let waits = |word| job.processes.iter().any(|p| p.pid == draft.pid && p.waits_for(word));
                tracking.declares |= child.look_at_datasets((access, horizon), plan, &waits);
                out.push(child);
            }
            Err(e) => {
                // Those already in `out` end with their pidfds' owner; the ones not yet wrapped must be ended here.
                for pid in pids.by_ref().flatten() {
                    kill(pid);
                }
                return Err(e);
            }
        }
    }
    Ok(out)
}

/// The ranges to be kept from the child. One that the program keeps from its own children needs nothing, and must stay so.
fn left_out(draft: &Draft) -> Result<Vec<[u64; 2]>, CaptureError> {
    let own = |start: u64| {
        draft
            .huge
            .iter()
            .any(|m| m.start == start && m.flags.iter().any(|f| f == "dc"))
    };
    let kept = draft.maps.iter().filter(|m| mappings::not_for_child(m) && !own(m.start));
    let mut out: Vec<[u64; 2]> = kept.map(|m| [m.start, m.end]).collect();
    // Neighbours can be named together.
    out.dedup_by(|next, last| {
        let adjacent = last[1] == next[0];
        if adjacent {
            last[1] = next[1];
        }
        adjacent
    });
    if out.len() > MAX_LEFT_OUT && draft.huge.iter().any(|m| mappings::huge(m).is_some()) {
        let reason = format!("more than {MAX_LEFT_OUT} separate mappings of explicit huge pages and System V segments");
        return Err(CaptureError::refuse(draft.pid, draft.stat.comm.to_string_lossy(), reason));
    }
    // As many as there is room for.
    let programs = draft.huge.iter().filter(|m| mappings::writes_program(m) && !own(m.start));
    let room = MAX_LEFT_OUT.saturating_sub(out.len());
    out.extend(programs.map(|m| [m.start, m.end]).take(room));
    Ok(out)
}

impl Child {
    fn new(
        draft: &Draft,
        area: &Area,
        control: ControlMemory,
        made: Result<Made, i32>,
        session: &mut Session,
        wish: Wish,
    ) -> Result<Self, CaptureError> {
        let pid = draft.pid;
        let maps: Vec<Map> = unchanged::beside(draft, area).cloned().collect();
        let mut child = Child {
            pid,
            task: draft.task,
            maps,
            starttime: draft.stat.starttime,
            faults: draft.stat.minor_faults,
            resident_bytes: draft.stat.rss_pages * PAGE,
            own_pages: (draft.kib("RssAnon") + draft.kib("VmSwap")) * 1024 / PAGE,
            early: Vec::new(),
            early_own: 0,
            not_inherited: Vec::new(),
            missing_in_child: Vec::new(),
            snapshot: None,
            gone: Vec::new(),
            whole: Vec::new(),
            flags: Vec::new(),
            huge: draft.huge.clone(),
            guards: Vec::new(),
            locks: draft.locks.clone(),
            clean: Clean::default(),
            armed: None,
            kin: Kin::default(),
            has_locks: draft.kib("VmLck") + draft.kib("VmPin") > 0,
            lacking: 0,
            later: None,
            frugal: false,
            missing: None,
        };
        match made {
            Ok(made) if draft.can_snapshot() => {
                let snapshot_pid = made.pid;
                let pidfd = pidfd::open(snapshot_pid)
                    .map_err(|e| CaptureError::system(format!("open the snapshot of process {pid}"), e))?;
                let fail = |e| CaptureError::system(format!("compare the snapshot of process {pid} with it"), e);
                // From here on it ends with us.
                let copy = child.snapshot.insert(SnapshotChild {
                    pid: snapshot_pid,
                    pidfd,
                    control,
                });
                // A userfaultfd that cannot be taken over is no reason to fail.
                let uffd = made
                    .uffd
                    .filter(|fd| *fd >= 0)
                    .and_then(|fd| pidfd::getfd(copy.pidfd.as_fd(), fd).ok());
                let own = copy.control.name().map_err(fail)?.1;
                let inherited = if is_whole(snapshot_pid, child.task, made.unchanged).map_err(fail)? {
                    child.maps.iter().map(|m| (m.start, m.end)).collect()
                } else {
                    inherited(snapshot_pid, own).map_err(fail)?
                };
                let lacks = |m: &&Map| !covers(&inherited, m.start);
                child.missing_in_child = child.maps.iter().filter(lacks).map(|m| m.start).collect();
                child.not_inherited = child
                    .not_inherited_by(snapshot_pid, &inherited, &draft.with_data)
                    .map_err(fail)?;
                child.flags_not_inherited(&inherited);
                let key = (pid, draft.stat.starttime);
                let inherited = child
                    .maps
                    .iter()
                    .filter(|m| child.not_inherited.binary_search(&m.start).is_err());
                let (armed, clean) = tracking::arm(key, child.task, inherited, wish, uffd);
                child.armed = Some(armed);
                child.clean = clean;
                session.stats.not_copied += made.unchanged / PAGE;
                child.store_early(session, true)?;
            }
            made => {
                let other = || Some(format!("process {pid} has another user or root directory than the agent"));
                child.missing = match made {
                    Ok(made) => {
                        // The process, which may be another user's, has named it in its own memory.
                        if is_copy_of(made.pid, draft) {
                            kill(made.pid);
                        }
                        other()
                    }
                    Err(0) => None,
                    // In another root the agent's control page has no name.
                    Err(_) if !draft.can_snapshot() => other(),
                    Err(error) => {
                        let reason = std::io::Error::from_raw_os_error(error);
                        Some(format!("process {pid} could not be copied: fork: {reason}"))
                    }
                };
                child.flags = proc::smaps(draft.task).unwrap_or_default();
                child.store_early(session, false)?;
            }
        }
        Ok(child)
    }

    /// The mappings whose pages are the program's own.
    fn own(&self) -> impl Iterator<Item = &Map> {
        self.maps.iter().filter(|m| mappings::pages(m) != Pages::None)
    }

    /// Mappings that the fork left out or emptied (MADV_DONTFORK, MADV_WIPEONFORK), where the copy has inherited
    /// mappings at `inherited` and the process has anonymous data `with_data`: of what it copied the copy has at least
    /// one page.
    fn not_inherited_by(&self, snapshot: i32, inherited: &[(u64, u64)], with_data: &[(u64, u64)]) -> std::io::Result<Vec<u64>> {
        let left_out = self.own().map(|m| m.start).filter(|start| !covers(inherited, *start));
        let copied = Pagemap::open(snapshot)?.with_data(with_data)?;
        let emptied = with_data
            .iter()
            .zip(copied)
            .filter(|(range, copied)| !copied && covers(inherited, range.0));
        let mut all: Vec<u64> = left_out.chain(emptied.map(|(range, _)| range.0)).collect();
        all.sort_unstable();
        Ok(all)
    }

    /// Notes the `VmFlags` of mappings that the copy does not have: those not in `inherited`.
    fn flags_not_inherited(&mut self, inherited: &[(u64, u64)]) {
        let known: Vec<u64> = self.huge.iter().map(|m| m.start).collect();
        let lacks = |m: &Map| !covers(inherited, m.start) && known.binary_search(&m.start).is_err() && !mappings::sysv(m);
        if self.maps.iter().any(lacks) {
            let own = proc::smaps(self.task).unwrap_or_default();
            self.huge.extend(own.into_iter().filter(lacks));
            self.huge.sort_by_key(|m| m.start);
        }
    }

    /// Stores mappings from the stopped process itself, and notes their guard regions: of those not inherited, or of all.
    fn store_early(&mut self, session: &mut Session, only_not_inherited: bool) -> Result<(), CaptureError> {
        let lacks = |start: &u64| self.not_inherited.contains(start) || self.missing_in_child.binary_search(start).is_ok();
        let here = |m: &&Map| (!only_not_inherited || lacks(&m.start)) && (mappings::pages(m) != Pages::None || may_have_guards(m));
        let maps: Vec<Map> = self.maps.iter().filter(here).cloned().collect();
        if maps.is_empty() {
            return Ok(());
        }
        let fail = |e| CaptureError::system(format!("read the memory of process {}", self.pid), e);
        let memory = Memory::open(self.task).map_err(fail)?;
        let mut pagemap = Pagemap::open(self.task).map_err(fail)?;
        for map in &maps {
            let (start, end, guards) = (map.start, map.end, &mut self.guards);
            let mut ranges = Vec::new();
            match mappings::pages_early(map) {
                Pages::Own => pagemap.data_and_guards(start, end, &mut ranges, guards),
                Pages::All => {
                    ranges.push((start, end));
                    self.whole.push(start);
                    pagemap.guards(start, end, guards)
                }
                Pages::None => pagemap.guards(start, end, guards),
            }
            .map_err(fail)?;
            if mappings::pages(map) == Pages::Own && mappings::huge(map).is_none() {
                self.early_own += ranges.iter().map(|(start, end)| (end - start) / PAGE).sum::<u64>();
            }
            for range in ranges {
                reader::store(session, &memory, range, mappings::zeros_count(map), &mut self.early)?;
            }
        }
        Ok(())
    }

    /// The process.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Resident memory of the process when it was stopped, bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Pages that its writers will deal with.
    pub(crate) fn pages(&self) -> u64 {
        match self.snapshot {
            Some(_) => self
                .own_pages
                .saturating_sub(self.early_own + self.clean.pages() + self.kin.pages()),
            None => 0,
        }
    }

    /// Anonymous mappings whose pages its writers will deal with.
    pub(crate) fn anonymous(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let inherited = |m: &&Map| self.not_inherited.binary_search(&m.start).is_err();
        let anonymous = self.own().filter(|m| m.ino == 0).filter(inherited);
        anonymous.map(|m| (m.start, m.end))
    }

    /// Its pages in `kin` are those of another one, which is written before.
    pub(crate) fn shares(&mut self, kin: Kin) {
        self.kin = kin;
        self.store_all();
    }

    /// Looks what the process has declared, and whether it may be stored later. Whether it has declared anything.
    fn look_at_datasets(&mut self, (wanted, horizon): (Access, Duration), plan: &Plan, waits: Waits<'_>) -> bool {
        self.lacking = access::lacking(self.pid, &self.maps);
        if wanted == Access::Off {
            return false;
        }
        let reach = match wanted {
            Access::LeaveOut(reach) => Some(reach),
            Access::Off | Access::Watch(_) => None,
        };
        // Also where nothing is left out: from now on the program is listened to.
        let later = Later::of(self.pid, &self.maps, (reach.unwrap_or(Reach::All), horizon), waits);
        let may_wait = plan.mode == Mode::CopyOnWrite && self.snapshot.is_some() && !self.has_locks;
        self.later = later.filter(|_| may_wait && reach.is_some());
        self.maps.iter().any(access::is_page)
    }

    /// Whatever it has declared, all of it is stored: others refer to its pages.
    pub(crate) fn store_all(&mut self) {
        self.later = None;
    }

    /// Why its memory was written before the process goes on, where a copy of it was wanted.
    pub(crate) fn missing(&self) -> Option<&str> {
        self.missing.as_deref()
    }

    /// Its snapshot child.
    pub(crate) fn copy(&self) -> Option<i32> {
        self.snapshot.as_ref().map(|copy| copy.pid)
    }

    /// What is to be read of the snapshot child: where its own pages are. Of mappings whose file is gone all pages are stored.
    pub(crate) fn request(&mut self, identities: &mut Identities) -> Option<Request> {
        let mut request = Request {
            child: self.copy()?,
            ..Request::default()
        };
        for m in self
            .maps
            .iter()
            .filter(|m| self.not_inherited.binary_search(&m.start).is_err())
        {
            let pages = mappings::pages_with(m, identities);
            if pages != Pages::Own && may_have_guards(m) && self.missing_in_child.binary_search(&m.start).is_err() {
                request.others.push((m.start, m.end));
            }
            match pages {
                Pages::Own => {
                    let unreadable = match m.prot {
                        // The kernel would take its key away, of which the image must tell.
                        PROT_EXEC => RANGE_REFUSED,
                        prot if prot & PROT_READ == 0 => RANGE_UNREADABLE,
                        _ => 0,
                    };
                    let zeros = if mappings::zeros_count(m) { RANGE_KEEP_ZEROS } else { 0 };
                    request.mappings.push(Range {
                        start: m.start,
                        end: m.end,
                        flags: unreadable | zeros,
                    });
                }
                Pages::All => {
                    self.gone.push((m.start, m.end));
                    self.whole.push(m.start);
                }
                Pages::None => {}
            }
        }
        Some(request)
    }

    /// The process whose stored pages it refers to; 0: none.
    pub(crate) fn maker(&self) -> i32 {
        self.kin.maker
    }

    /// About how many pages the machine holds twice by now, for the copy and for the process: each that the process
    /// writes is a page fault. Where it has ended the copy alone holds all.
    pub(crate) fn copied(&self) -> u64 {
        match proc::stat(self.pid).ok().filter(|s| s.starttime == self.starttime) {
            Some(stat) => stat.minor_faults.saturating_sub(self.faults).min(self.own_pages),
            None => self.own_pages,
        }
    }

    /// Memory is short: so many threads write at most, as headroom has counted.
    pub(crate) fn most_writers(&self) -> Option<u32> {
        self.frugal.then_some(FRUGAL_WRITERS)
    }

    /// The memory, all of which is stored, is put together; `table` says where it lies that was not stored early.
    fn finish(
        mut self,
        mut table: Vec<Extent>,
        (mut left_out, spared): (Option<LeftOut>, Spared),
        session: &mut Session,
        identities: &mut Identities,
    ) -> Result<Written, CaptureError> {
        table.append(&mut self.early);
        session.set_table(TableId::Process(self.pid), table)?;
        self.locks.look(self.task);
        self.guards.sort_unstable();
        let none_there = Vec::new();
        let vmas = self
            .maps
            .iter()
            .map(|m| {
                // To unlock a piece of a mapping has split it (see `mlock`).
                // Where the child does not have it, the child may have something else.
                let in_child = match self.missing_in_child.binary_search(&m.start) {
                    Ok(_) => &none_there,
                    Err(_) => &self.flags,
                };
                let there = mappings::at(in_child, m.start).or_else(|| mappings::at(&self.huge, m.start));
                let refuse = |why: String| CaptureError::refuse(self.pid, mappings::named(m), why);
                let mut vma = mappings::vma(m, there, identities).map_err(refuse)?;
                if identities.has_lost(m, &vma) && !self.whole.contains(&m.start) {
                    return Err(CaptureError::refuse_for_now(self.pid, mappings::named(m), mappings::LOST));
                }
                self.locks.tell(&mut vma);
                vma.guards = guards::within(&self.guards, (m.start, m.end));
                if self.not_inherited.binary_search(&m.start).is_ok() && there.is_none() {
                    vma.flags.push("dc".into());
                }
                Ok(vma)
            })
            .collect::<Result<_, CaptureError>>()?;
        let (vmas, dead) = later::without_rights(vmas, &spared.dead);
        if let Some(left_out) = &mut left_out {
            left_out.dead = dead;
            // What was not stored has not changed since, and yet the next checkpoint must store it.
            self.armed = None;
        }
        Ok(Written {
            vmas,
            armed: self.armed.take(),
            left_out,
            spared_bytes: spared.bytes().saturating_add(self.lacking),
        })
    }
}
