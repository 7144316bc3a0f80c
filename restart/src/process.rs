//! One process becomes the restored one: descriptors and settings in ordinary code, then the plan for the restorer, then the jump.

mod tables;

use crate::code::Copies;
use crate::companion;
use crate::control::Shared;
use crate::fail::{Outcome, RestartError};
use crate::kin::Share;
use crate::later::Later;
use crate::layout::Range;
use crate::spawn::{Companions, INSTALLED, LOADED};
use crate::special::Special;
use crate::state::Own;
use crate::tree::{self, Tree};
use crate::vdso::{Foreign, Place};
use crate::{arch, sys};
use belay_abi::restore::{ThreadPlan, STACK_BYTES};
use belay_image::extents::{Extent, PAGE};
use belay_image::identity;
use belay_image::model::{Process, Thread, VmaKind};
use belay_kernel::blob::Blob;
use belay_kernel::signals::Disposition;
use belay_kernel::{direct, numbers, place, rseq};
use belay_plugins::Rebuilder;
use belay_storage::chunk::Chunk;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use tables::{measure, prepare, Area, Prepared};

/// What all processes share.
pub(crate) struct Context<'a> {
    pub(crate) chunks: &'a HashMap<u32, Chunk>,
    /// Those that are read past the page cache.
    pub(crate) direct: HashSet<u32>,
    pub(crate) blob: &'a Blob,
    pub(crate) rebuilder: Rebuilder,
    /// See [`companion::early`].
    pub(crate) early: &'a HashSet<i32>,
    pub(crate) shared: &'a Shared,
    pub(crate) tree: &'a Tree,
    pub(crate) processes: &'a [Process],
    /// PIDs of processes stopped by job control, by their parent's, and whether that has been told so.
    pub(crate) stopped: HashMap<i32, Vec<(i32, bool)>>,
    /// Processes wait for each other before their timers start.
    pub(crate) hold: bool,
    pub(crate) extents: &'a HashMap<i32, Vec<Extent>>,
    /// What processes have in common, by PID.
    pub(crate) shares: &'a HashMap<i32, Share>,
    /// What of processes is filled when they run already, by PID.
    pub(crate) later: &'a HashMap<i32, Later>,
    pub(crate) ask_huge: bool,
    pub(crate) restore_timer_ids: bool,
    pub(crate) own: Own,
    pub(crate) specials: &'a [Special],
    /// Files that this machine lacks.
    pub(crate) copies: &'a Copies,
    /// The vDSO of the checkpoint, where this kernel has another or somebody was stopped in it,
    pub(crate) foreign: Option<&'a Foreign>,
    /// and where this kernel's goes in each process, by PID.
    pub(crate) places: &'a HashMap<i32, Place>,
}

impl Context<'_> {
    /// Slot of the process whose descriptor table `pid` shares.
    fn table_owner(&self, pid: i32) -> Option<usize> {
        let owner = self.rebuilder.table_owner(pid);
        let slot = self.tree.nodes.iter().position(|n| n.pid == owner);
        slot.filter(|_| owner != pid)
    }

    /// Whether another process uses the descriptor table of `p` (CLONE_FILES).
    pub(crate) fn shares_table(&self, p: &Process) -> bool {
        let owner = |q: &Process| self.rebuilder.table_owner(q.pid);
        let mut others = self.processes.iter().filter(|q| q.pid != p.pid && tree::is_live(q));
        others.any(|q| owner(q) == owner(p))
    }

    /// The process whose memory `p` has: itself, or the first of those that share it.
    fn first<'p>(&'p self, p: &'p Process) -> &'p Process {
        let found = self.processes.iter().find(|q| q.pid == p.shares_mm_with);
        found.filter(|_| tree::shares_memory(p)).unwrap_or(p)
    }

    /// The processes that share the memory of `p`.
    fn guests<'p>(&'p self, p: &'p Process) -> impl Iterator<Item = &'p Process> {
        self.processes
            .iter()
            .filter(|q| tree::shares_memory(q) && q.shares_mm_with == p.pid)
    }

    /// The area of the process with slot `slot`, once it is loaded.
    fn area(&self, slot: usize) -> Range {
        let [start, end] = self.shared.slot(slot).area.each_ref().map(|a| a.load(Ordering::Acquire));
        start..end
    }

    fn slot_of(&self, p: &Process) -> usize {
        self.tree.nodes.iter().position(|n| n.pid == p.pid).unwrap_or(0)
    }

    /// Threads of `p` that exist before its restorer runs.
    fn companions<'p>(&'p self, p: &'p Process) -> impl Iterator<Item = &'p Thread> {
        p.threads.iter().filter(|t| self.early.contains(&t.tid))
    }
}

/// Becomes process `p`; `helpers` are unused identifiers for its helper threads, `companions` those of its threads that
/// exist. Returns only on failure.
pub(crate) fn become_process(
    cx: &Context<'_>,
    slot: usize,
    p: &Process,
    helpers: &[i32],
    companions: &Companions,
) -> Outcome<std::convert::Infallible> {
    let at = |what: &str| format!("process {} ({}): {what}", p.pid, p.comm);
    // While none of its descriptors is where it belongs: theirs are laid out from the same ones.
    let lays_out = companions.iter().filter(|c| c.lays_out);
    lays_out.for_each(|c| c.work(&|| lay_out(cx, slot, p, c.tid)));
    if let Some(owner) = cx.table_owner(p.pid) {
        cx.shared.await_slot(owner, INSTALLED); // what we open before would be closed again
    }
    let files = open_files(cx, p)?;
    install(cx, p, &files)?;
    cx.shared.report(slot, INSTALLED);
    settings(cx, p)?;
    cx.rebuilder
        .install_late(p.pid)
        .map_err(|e| RestartError::at(at("descriptors"), e))?;
    let others: Vec<usize> = cx.guests(p).map(|g| cx.slot_of(g)).collect();
    others.iter().for_each(|guest| cx.shared.await_slot(*guest, LOADED)); // their areas must stay
    let sizes = measure(cx, p, helpers.len())?;
    let Prepared {
        plan,
        threads,
        bytes,
        area,
    } = prepare(cx, slot, p, helpers, &files, &sizes)?;
    load(cx, &area, &bytes).map_err(|e| RestartError::at(at("place the restorer"), e))?;
    if !cx.tree.is_below_guest(slot, cx.processes) {
        rseq::unregister().map_err(|e| RestartError::at(at("unregister rseq"), e))?;
    }
    for (word, value) in cx.shared.slot(slot).area.iter().zip([area.base, area.end]) {
        word.store(value, Ordering::Relaxed);
    }
    // Its descriptors are closed by the restorer.
    std::mem::forget(files);
    let entry = area.base + cx.blob.entry();
    // SAFETY: the area holds the restorer and its tables, which the plans of threads and the stacks that are named below
    // belong to; nobody who goes there is needed here again.
    let place = |thread, stack| unsafe { arch::Place::new(entry, [plan, thread], stack) };
    for c in companions {
        let index = p.threads.iter().position(|t| t.tid == c.tid).unwrap_or(0) as u64;
        let thread = threads + index * size_of::<ThreadPlan>() as u64;
        let stack = area.thread_stacks(helpers.len()) + STACK_BYTES * (index + 1);
        c.leave(place(thread, stack));
    }
    cx.shared.report(slot, LOADED);
    companion::give_turn();
    place(0, area.end).go()
}

/// In thread `tid`: gives it its own descriptor table.
fn lay_out(cx: &Context<'_>, slot: usize, p: &Process, tid: i32) {
    let done = cx.rebuilder.install(tid, &[]).and_then(|()| cx.rebuilder.install_late(tid));
    if let Err(e) = done {
        let of = format!("process {} ({}) thread {tid}: descriptors", p.pid, p.comm);
        cx.shared.fail(slot, &RestartError::at(of, e));
    }
}

/// Descriptors needed until the end, at numbers that the process does not use.
struct Files {
    pages: HashMap<u32, OwnedFd>,
    /// By which it waits for pages that are missing.
    uffd: Option<RawFd>,
    exe: Option<OwnedFd>,
    shared: Vec<RawFd>,
}

impl Files {
    fn keep(&self, control: RawFd) -> Vec<RawFd> {
        let own = self.pages.values().chain(self.exe.iter());
        own.map(AsRawFd::as_raw_fd)
            .chain(self.shared.iter().copied())
            .chain(self.uffd)
            .chain([control])
            .collect()
    }
}

/// The chunks that are best read past the page cache: not those of which many small extents are needed, because the
/// kernel reads ahead, and not those of which several processes need the same, because the first of them brings it into
/// memory for all.
pub(crate) fn read_directly(extents: &HashMap<i32, Vec<Extent>>, chunks: &HashMap<u32, Chunk>) -> HashSet<u32> {
    let mut needed: HashMap<u32, (u64, u64)> = HashMap::new();
    for e in extents.values().flatten() {
        let (count, bytes) = needed.entry(e.chunk).or_default();
        (*count, *bytes) = (*count + 1, *bytes + e.bytes);
    }
    let once = |id: &u32, bytes: u64| chunks.get(id).is_some_and(|c| bytes <= c.hashes.len() as u64 * PAGE * 5 / 4);
    let good = needed
        .into_iter()
        .filter(|(id, (count, bytes))| bytes / count >= direct::WORTH as u64 && once(id, *bytes));
    good.map(|(id, _)| id).collect()
}

/// The program's file, unless something else has taken its place.
fn program(path: &Path) -> Option<File> {
    let file = identity::open(path).ok()?;
    file.metadata().is_ok_and(|m| m.is_file()).then_some(file)
}

fn open_files(cx: &Context<'_>, p: &Process) -> Outcome<Files> {
    let room = cx.rebuilder.room();
    let high = |fd: RawFd| {
        let held = numbers::lend(fd).and_then(|fd| sys::dup_into(fd, &room));
        held.map_err(|e| RestartError::at(format!("process {}", p.pid), format!("descriptor in {room:?}: {e}")))
    };
    let mut pages = HashMap::new();
    for e in cx.extents.get(&p.pid).map_or(&[][..], Vec::as_slice) {
        if let (Entry::Vacant(entry), Some(chunk)) = (pages.entry(e.chunk), cx.chunks.get(&e.chunk)) {
            // Not `chunk.file`: in a descriptor table that processes share, that number may have been given to the job by now.
            let file = File::open(&chunk.path).map_err(|e| belay_image::ImageError::io("open", &chunk.path, e))?;
            if cx.direct.contains(&e.chunk) {
                direct::enable(&file);
            }
            entry.insert(high(file.as_raw_fd())?);
        }
    }
    let copy = p.exe_identity.as_ref().and_then(|identity| cx.copies.of(&p.exe, identity));
    // Where there is none, /proc/PID/exe shows belay; the program's own pages are checked and mapped elsewhere.
    let exe = match copy {
        _ if tree::shares_memory(p) => None, // it belongs to the memory
        Some(copy) => Some(high(copy)?),
        None => program(p.exe.as_path()).map(|f| high(f.as_raw_fd())).transpose()?,
    };
    let mut shared: Vec<RawFd> = p
        .vmas
        .iter()
        .filter_map(|v| match &v.kind {
            VmaKind::Shared { object, may_write, .. } => cx.rebuilder.shared_fd(*object, *may_write),
            VmaKind::PrivateObject { object, .. } => cx.rebuilder.shared_fd(*object, false),
            VmaKind::FilePrivate {
                path,
                identity: Some(identity),
                ..
            } => cx.copies.of(path, identity),
            _ => None,
        })
        .collect();
    shared.sort_unstable();
    shared.dedup();
    let uffd = cx
        .later
        .get(&p.pid)
        .map(|_| cx.shared.slot(cx.slot_of(p)).uffd.load(Ordering::Acquire));
    Ok(Files {
        pages,
        uffd,
        exe,
        shared,
    })
}

fn install(cx: &Context<'_>, p: &Process, files: &Files) -> Outcome<()> {
    cx.rebuilder
        .install(p.pid, &files.keep(cx.shared.fd()))
        .map_err(|e| RestartError::at(format!("process {} ({}): descriptors", p.pid, p.comm), e))
}

/// Settings that the process makes in ordinary code.
fn settings(cx: &Context<'_>, p: &Process) -> Outcome<()> {
    if p.shares_handlers {
        // The one whose dispositions these are does this for itself alone: what the restart itself caused is discarded.
        for action in [Disposition::set_ignored, Disposition::set_default] {
            action(libc::SIGCHLD);
        }
    }
    // One that had been deleted exists for the time of the rebuild, under the name it had.
    let deleted = p
        .cwd
        .as_bytes()
        .strip_suffix(b" (deleted)")
        .filter(|_| !p.cwd.as_path().exists());
    let cwd = deleted.map_or(p.cwd.as_path(), |bare| Path::new(OsStr::from_bytes(bare)));
    let entered = cx.rebuilder.enter(cwd);
    entered.map_err(|e| {
        RestartError::at(
            format!("process {} ({})", p.pid, p.comm),
            format!("{}: {}", e.object, e.reason),
        )
    })?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(p.umask));
    Ok(())
}

/// Maps the area and copies restorer and tables into it.
fn load(cx: &Context<'_>, area: &Area, tables: &[u8]) -> std::io::Result<()> {
    let bytes = area.end - area.base;
    let made = place::Area::map(Some(area.base), bytes, 0)?;
    made.replace(area.control, cx.shared.bytes(), cx.shared.file())?;
    made.write(area.base, &cx.blob.placed_at(area.base));
    made.write(area.tables, tables);
    made.protect(area.base, cx.blob.bytes(), libc::PROT_READ | libc::PROT_EXEC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_read_directly_that_one_process_needs_in_large_pieces() {
        let chunk = |pages: usize| Chunk {
            path: "/dev/null".into(),
            file: std::fs::File::open("/dev/null").unwrap(),
            hashes: vec![0; pages],
        };
        let chunks: HashMap<u32, Chunk> = (1..=4).map(|id| (id, chunk(1000))).collect();
        let extent = |chunk, first: u32, pages: u64| Extent {
            vaddr: u64::from(first) * PAGE,
            bytes: pages * PAGE,
            chunk,
            page: first,
        };
        let small = (0..100).map(|i| extent(2, i * 10, 2));
        let one: Vec<Extent> = [extent(1, 0, 1000), extent(3, 0, 1000), extent(4, 0, 600)]
            .into_iter()
            .chain(small)
            .collect();
        let two = vec![extent(3, 0, 1000), extent(4, 600, 400)];
        let good = read_directly(&HashMap::from([(1, one), (2, two)]), &chunks);
        assert_eq!(good, HashSet::from([1, 4]), "2: small pieces, 3: twice the same");
    }
}
