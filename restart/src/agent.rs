//! The agent of the restarted job: rebuilds everything, then lets everything go on at once.
//!
//! It is a child of PID 1 in the new namespaces, with the PID that the agent had at the checkpoint, and the ancestor of
//! every process of the job.

mod lazily;
mod living;

use crate::code::{Copies, Mapped};
use crate::contents::{Contents, Pages};
use crate::control::Shared;
use crate::fail::{Outcome, RestartError};
use crate::filling::Filling;
use crate::kin::{self, Share};
use crate::layout::Range;
use crate::lead::Questions;
use crate::leftout;
use crate::namespace::Way;
use crate::process::{self, Context};
use crate::resume;
use crate::shown::Shown;
use crate::spawn::{Companions, Forest, EXISTS, JOINED, LEADS, SETTLED};
use crate::special::{self, Special};
use crate::state::Own;
use crate::tree::{self, Role, Tree};
use crate::vdso::Place;
use crate::verify::Loaded;
use crate::{companion, connects, explain, inherited, initial, lead, reopen, sys, Options};
use belay_abi::restore::{Slot, MAX_HELPERS, STAGE_FINISH, STAGE_STOP, STATE_PARKED, STATE_READY};
use belay_image::extents::Extent;
use belay_image::model::{Job, Process, ProcessState, VmaKind};
use belay_kernel::blob::Blob;
use belay_kernel::{limits, numbers, pidfd, prctl, proc, ptrace};
use belay_plugins::gate::Gates;
use belay_plugins::mpi::{DAEMONS, LAUNCHERS};
use belay_plugins::{Brought, Group, Names, Rebuilder};
use belay_storage::chunk::Chunk;
use belay_wire::Phase;
use living::Living;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A process with fewer stored bytes than this is read by one thread.
const HELPED_BYTES: u64 = 8 << 20;

/// What the restart has made of the job.
pub(crate) struct Restarted {
    pub(crate) phases: Phases,
    pub(crate) names: Names,
    pub(crate) led: bool,
    pub(crate) gated: bool,
    pub(crate) code: Mapped,
    /// Contents of files that nobody has read.
    pub(crate) unread: Vec<Pages>,
    /// What of its memory is filled while it runs.
    pub(crate) filling: Option<Filling>,
}

/// Duration of each phase.
pub(crate) type Phases = Vec<(Phase, Duration)>;

/// Rebuilds the job of `loaded` and lets it go on; `ready` is called just before the first process goes on, here or on
/// another node. On failure every process of it has been killed.
pub(crate) fn restart(
    mut loaded: Loaded,
    blob: &Blob,
    options: &Options,
    way: Way,
    foreground: bool,
    group: Option<&dyn Group>,
    ready: &mut dyn FnMut(),
) -> Outcome<Restarted> {
    let begin = Instant::now();
    sys::become_reaper().map_err(|e| RestartError::at("become reaper", e))?;
    // The restored descriptors may be numbered above the limit that belay was started with.
    limits::raise_descriptors();
    inherited::give_up(&loaded.job);
    let plan = Plan::make(&mut loaded, way, options.lazy)?;
    if way != Way::Initial {
        set_last_pid(plan.tree.last_meanwhile);
    }
    let (rebuilder, copies, unread) = rebuild(&mut loaded, &plan, way, group)?;
    let (job, chunks, mut extents) = (loaded.job, loaded.chunks, loaded.extents);
    let streams = loaded.streams;
    let tree = &plan.tree;
    let programs = job.processes.iter().map(|p| p.mm.start_stack).collect();
    let names = rebuilder.book().names(&programs);
    let questions = Questions {
        addresses: rebuilder.book().is_needed() && may_lead(way),
        programs: plan.shown.is_some() && (group.is_some() || job.processes.iter().any(is_of_mpi)),
    };

    // The process tree, memory, threads.
    let shared = Shared::new(tree.nodes.len(), &rebuilder.room()).map_err(|e| RestartError::at("spawn", e))?;
    let mut shares = share_memory(tree, &job, &mut extents)?;
    let live = live(tree, &job);
    let early = companion::early(&job.processes, &rebuilder);
    let later = match options.lazy && lazily::is_possible(way, group) {
        true => lazily::leave_for_later(&job, &mut extents, &mut shares, (&rebuilder, &early)),
        false => HashMap::new(),
    };
    let context = Context {
        direct: process::read_directly(&extents, &chunks),
        chunks: &chunks,
        blob,
        tree,
        processes: &job.processes,
        hold: group.is_some() || must_hold(&job, &rebuilder),
        stopped: stopped_children(&job),
        rebuilder,
        early: &early,
        shared: &shared,
        extents: &extents,
        shares: &shares,
        later: &later,
        ask_huge: asks_for_huge_pages(),
        restore_timer_ids: prctl::TIMER_NUMBERS.get().is_ok(),
        own: own_credentials(way.is_ordinary()).map_err(|e| RestartError::at("read own credentials", e))?,
        specials: &plan.specials,
        copies: &copies,
        foreign: loaded.foreign.as_ref(),
        places: &plan.places,
    };
    let rebuilt = begin.elapsed();
    let settle = |slot: usize, p: &Process, companions: &Companions| {
        process::become_process(&context, slot, p, plan.helpers_of(&job, p), companions)
    };
    let forest = Forest {
        tree,
        processes: &job.processes,
        shared: &shared,
        rebuilder: &context.rebuilder,
        early: &early,
        ordinary: way.is_ordinary(),
        questions,
        programs: &programs,
        shown: plan.shown.as_ref(),
        kin: (&shares, &chunks),
        areas: kin::Areas::default(),
        later: &later,
        settle: &settle,
    };
    let mut living = Living {
        pidfds: Vec::new(),
        group,
        filling: None,
    };
    let spawned = spawn(&forest, &job, (&plan, &chunks), &mut living).map(|()| begin.elapsed());
    let parked = spawned.and_then(|spawned| {
        let gates = park(&context, &job, &live, &living)?;
        living.filling.iter().for_each(Filling::goes_on);
        leftout::fill(&job, &streams, &Contents::new(&[], &chunks, group))?;
        Ok((spawned, gates))
    });
    let Context { rebuilder, .. } = context;
    release(rebuilder);
    let copies = copies.keep().map_err(|e| RestartError::at("keep copies of mapped files", e));
    let parked = parked.and_then(|parked| Ok((parked, copies?)));

    // They open when nobody waits at them any more who cannot go on.
    let mut gates = None;
    let going = parked.and_then(|((spawned, found), copies)| {
        let stopped = (&job, &plan, &shared, &live[..]);
        gates = Some(found);
        let last = go_on(
            stopped,
            blob,
            (way, foreground),
            (&mut gates, options.gate_limit, group),
            ready,
        )?;
        Ok(Restarted {
            gated: last.reopened.is_some(),
            phases: phases(rebuilt, spawned, &live, &shared, &last),
            names,
            led: questions.any(),
            unread,
            filling: None,
            code: Mapped {
                files: loaded.code.files,
                table: loaded.code.table,
                copies,
            },
        })
    });
    drop(gates);
    let going = match going {
        Ok(restarted) => Ok(Restarted {
            filling: living.filling,
            ..restarted
        }),
        Err(e) => {
            living.end();
            Err(e)
        }
    };
    going.map_err(|e| explain_restorer(e, &job, tree, &shared, &|pid| kin::numbered(&extents, &shares, pid)))
}

/// Makes descriptors and shared objects, with the data in flight, and copies of mapped files that this machine lacks. The
/// last is what was not read for that.
fn rebuild(loaded: &mut Loaded, plan: &Plan, way: Way, group: Option<&dyn Group>) -> Outcome<(Rebuilder, Copies, Vec<Pages>)> {
    let descriptors = std::mem::take(&mut loaded.descriptors);
    let contents = |table| Contents::new(table, &loaded.chunks, group);
    let copies = Copies::make(&loaded.code, &contents(&loaded.code.table), &descriptors.room())?;
    let source = contents(&loaded.contents);
    let rebuilder = Rebuilder::rebuild(
        (descriptors, &loaded.sights),
        (&loaded.blobs, &source, &|key| copies.of_open(key)),
        way != Way::Initial,
        group,
        (&sys::say, &mut keeper_maker(&plan.tree, &plan.helpers)),
    )?;
    connects::finish(&mut loaded.job.processes, |pid, tid, fd| rebuilder.is_connected(pid, tid, fd));
    open_shared_objects(&rebuilder, &loaded.job);
    let unread = source.unread();
    Ok((rebuilder, copies, unread))
}

/// How long the last phases took.
struct Last {
    resumed: Duration,
    /// Where libraries take part.
    reopened: Option<Duration>,
}

/// Everybody is parked: lets all go on, and opens the gates.
fn go_on(
    (job, plan, shared, live): (&Job, &Plan, &Shared, &[usize]),
    blob: &Blob,
    (way, foreground): (Way, bool),
    (gates, limit, group): (&mut Option<Gates>, Duration, Option<&dyn Group>),
    ready: &mut dyn FnMut(),
) -> Outcome<Last> {
    let begin = Instant::now();
    let mut stopped = resume::seize(job, shared, &plan.tree, live, blob)?;
    if let Some(shown) = &plan.shown {
        shown.show(job.processes.iter().filter(|p| tree::is_live(p)).map(|p| p.pid));
    }
    become_ordinary(job, way, plan.tree.last_pid, foreground)?;
    // From here on the agent has further threads.
    let held = gates.as_mut().map_or(Ok(()), Gates::hold);
    held.map_err(|e| RestartError::at("reopen", e))?;
    ready();
    // Nobody goes on before everybody is whole.
    let parties = reopen::meet(gates.as_ref(), group)?;
    reopen::put_on_gpus(gates.as_mut(), &mut stopped, group)?;
    reopen::meet_on_gpus(parties, group)?;
    stopped.resume();
    Ok(Last {
        resumed: begin.elapsed(),
        reopened: parties.any.then(|| reopen::reopen(gates, limit, group)).transpose()?,
    })
}

/// What is settled before anything is made.
struct Plan {
    tree: Tree,
    /// How many threads help each process to read its pages.
    helpers: Vec<usize>,
    /// The kernel's own mappings.
    specials: Vec<Special>,
    /// Where the vDSO of this kernel goes in each process, by PID.
    places: HashMap<i32, Place>,
    /// The namespaces that processes are shown, where that are others than they are in.
    shown: Option<Shown>,
}

impl Plan {
    fn make(loaded: &mut Loaded, way: Way, lazy: bool) -> Outcome<Self> {
        let Loaded { job, extents, .. } = loaded;
        let helpers = helper_counts(job, extents);
        let taken = match way {
            Way::Initial => initial::taken(),
            Way::Namespaces | Way::UserNamespace => BTreeSet::new(),
        };
        let pagers = if lazy { lazily::PROCESSES } else { 0 };
        let others = helpers.iter().sum::<usize>() + loaded.descriptors.keepers() + pagers;
        let parents: HashMap<i32, i32> = job.processes.iter().map(|p| (p.pid, p.ppid)).collect();
        let beside = loaded.descriptors.made_beside(&|pid| parents.get(&pid).copied().unwrap_or(0));
        let tree = tree::plan(&job.agent, &job.processes, others, (pid_max(), job.last_pid), &taken, &beside)
            .map_err(|e| RestartError::at("spawn", e))?;
        let specials = special::of(std::process::id().cast_signed()).map_err(|e| RestartError::at("read own mappings", e))?;
        let foreign = loaded.foreign.as_ref();
        let places = foreign.map(|f| f.place(&mut job.processes, &specials)).transpose();
        Ok(Self {
            tree,
            helpers,
            specials,
            places: places.map_err(|e| RestartError::at("vdso", e))?.unwrap_or_default(),
            shown: Shown::new(way, &job.processes),
        })
    }

    /// The numbers of the processes that fill memory, which are the last.
    fn pagers(&self) -> Option<[i32; lazily::PROCESSES]> {
        self.tree.helper_tids.last_chunk().copied()
    }

    /// The numbers of the threads that help `p`.
    fn helpers_of(&self, job: &Job, p: &Process) -> &[i32] {
        let i = job.processes.iter().position(|q| q.pid == p.pid).unwrap_or(0);
        let first: usize = self.helpers[..i].iter().sum();
        &self.tree.helper_tids[first..first + self.helpers[i]]
    }
}

/// Makes processes that hold descriptors, under the numbers that are left when each helper has its own.
fn keeper_maker<'a>(tree: &'a Tree, helpers: &[usize]) -> impl FnMut() -> io::Result<i32> + 'a {
    let mut numbers = tree.helper_tids[helpers.iter().sum()..].iter();
    move || {
        let pid = *numbers.next().ok_or(io::ErrorKind::QuotaExceeded)?;
        sys::fork(0, 0, pid)
    }
}

/// What processes have in common and inherit; `extents` are what is left to be read by each.
fn share_memory(tree: &Tree, job: &Job, extents: &mut HashMap<i32, Vec<Extent>>) -> Outcome<HashMap<i32, Share>> {
    let own = proc::maps(std::process::id().cast_signed()).map_err(|e| RestartError::at("read own mappings", e))?;
    let own: Vec<Range> = own.iter().map(|m| m.start..m.end).collect();
    let shares = kin::plan(tree, &job.processes, extents, &own);
    for (pid, share) in &shares {
        extents.insert(*pid, share.rest.clone());
    }
    Ok(shares)
}

/// Waits until every process has its memory and its threads, and stands where it was; the gates of those that have one.
fn park(context: &Context<'_>, job: &Job, live: &[usize], living: &Living<'_>) -> Outcome<Gates> {
    let (shared, tree) = (context.shared, context.tree);
    shared.begin(SETTLED);
    let glance = &mut || living.glance(shared, tree);
    let (stopping, running): (Vec<usize>, Vec<usize>) = live.iter().partition(|i| is_stopped(tree, job, **i));
    let shares = |i: &&usize| matches!(tree.nodes[**i].role, Role::Process(p) if context.shares_table(&job.processes[p]));
    let held: Vec<usize> = stopping.iter().filter(shares).copied().collect();
    if context.hold && !held.is_empty() {
        shared.await_all(&held, STATE_READY, glance)?;
        shared.await_all(&running, STATE_READY, glance)?;
        shared.begin(STAGE_STOP);
    }
    shared.await_all(&stopping, STATE_PARKED, glance)?;
    resume::await_stops(job, tree, &stopping)?;
    if context.hold {
        shared.await_all(&running, STATE_READY, glance)?;
        if let Some(group) = living.group {
            // Timers run from here on, and what is being read on other hosts can take longer than they last.
            let met = group.meet(Brought::default());
            met.map_err(|e| RestartError::at("restart together with the other nodes", e))?;
        }
        shared.begin(STAGE_FINISH);
    }
    shared.await_all(&running, STATE_PARKED, glance)?;
    context.rebuilder.finish().map_err(|e| RestartError::at("rebuild", e))?;
    reopen::find(job, &context.rebuilder)
}

/// The agent had capabilities while it rebuilt the job. Now it becomes what it was before: a process like those of the
/// job, which may open its descriptors as their snapshots do.
fn become_ordinary(job: &Job, way: Way, last: i32, foreground: bool) -> Outcome<()> {
    if way != Way::Initial {
        // Children of the job get the identifiers that they would have got without the restart.
        set_last_pid(last);
    }
    if foreground {
        resume::hand_over_terminal(job);
    }
    if way.is_ordinary() {
        sys::give_up_capabilities().map_err(|e| RestartError::at("resume", format!("give up capabilities: {e}")))?;
    }
    Ok(())
}

/// Whether the process starts ranks, which compare the namespaces that they see.
fn is_of_mpi(p: &Process) -> bool {
    let file = p.exe.as_path().file_name();
    let mut all = DAEMONS.iter().chain(&LAUNCHERS);
    file.is_some_and(|file| all.any(|name| file == *name))
}

/// Whether processes can be made to ask about addresses.
fn may_lead(way: Way) -> bool {
    if way == Way::Initial {
        tracing::warn!("addresses of the job have changed, and without namespaces connections to its old addresses cannot be led to the new ones");
    }
    way != Way::Initial
}

/// Opens every object that is mapped, once for all processes.
fn open_shared_objects(rebuilder: &Rebuilder, job: &Job) {
    for v in job.processes.iter().flat_map(|p| &p.vmas) {
        // One that is missing is reported by the process that maps it.
        let _ = match &v.kind {
            VmaKind::Shared { object, may_write, .. } => rebuilder.shared_fd(*object, *may_write),
            VmaKind::PrivateObject { object, .. } => rebuilder.shared_fd(*object, false),
            _ => None,
        };
    }
    for note in rebuilder.notes() {
        tracing::info!("{note}");
    }
}

/// PIDs of processes that are stopped by job control, by their parent's, and whether that has been told so.
fn stopped_children(job: &Job) -> HashMap<i32, Vec<(i32, bool)>> {
    let mut out: HashMap<i32, Vec<(i32, bool)>> = HashMap::new();
    for p in &job.processes {
        if matches!(p.state, ProcessState::Stopped(_)) {
            out.entry(p.ppid).or_default().push((p.pid, !p.stop_untold));
        }
    }
    out
}

fn is_stopped(tree: &Tree, job: &Job, slot: usize) -> bool {
    matches!(tree.nodes[slot].role, Role::Process(i) if matches!(job.processes[i].state, ProcessState::Stopped(_)))
}

/// Whether processes of one host must wait for each other before they finish: timers that would run while another process is still
/// being read, descriptor tables or memory that two of them use, parents of stopped processes.
fn must_hold(job: &Job, rebuilder: &Rebuilder) -> bool {
    let timers = |p: &Process| !p.posix_timers.is_empty() || p.itimers.iter().any(|t| t.value_us != 0);
    // The memory of those that share it is called private as long as one of them changes what it may do.
    let needs = |p: &Process| {
        timers(p) || tree::shares_memory(p) || rebuilder.table_owner(p.pid) != p.pid || matches!(p.state, ProcessState::Stopped(_))
    };
    job.processes.len() > 1 && job.processes.iter().any(needs)
}

/// Closes the agent's copies of all descriptors: the job's own are in place, and ours must not keep pipes and sockets open.
fn release(_: Rebuilder) {}

fn live(tree: &Tree, job: &Job) -> Vec<usize> {
    let is_live = |r: Role| matches!(r, Role::Process(i) if tree::is_live(&job.processes[i]));
    (0..tree.nodes.len()).filter(|i| is_live(tree.nodes[*i].role)).collect()
}

/// Makes the process tree, in lock step, up to the point where only processes of the job are left.
fn spawn(forest: &Forest<'_>, job: &Job, (plan, chunks): (&Plan, &HashMap<u32, Chunk>), living: &mut Living<'_>) -> Outcome<()> {
    let (tree, shared) = (forest.tree, forest.shared);
    forest.plant()?;
    let lasting: Vec<usize> = (1..tree.nodes.len())
        .filter(|i| tree.nodes[*i].role != Role::TemporaryParent)
        .collect();
    shared.await_all(&lasting, EXISTS, &mut || living.glance_at_new(shared, tree, &lasting))?;
    for i in &lasting {
        let pid = tree.nodes[*i].pid;
        let fd = pidfd::open(pid).map_err(|e| RestartError::at("spawn", format!("process {pid}: {e}")))?;
        living.pidfds.push((*i, pid, fd));
    }
    for p in job.processes.iter().filter(|p| p.continue_untold) {
        stop_and_continue(p.pid).map_err(|e| RestartError::at("spawn", format!("process {}: stop and continue it: {e}", p.pid)))?;
    }
    let mut glance = || living.glance(shared, tree);
    shared.begin(EXISTS);
    shared.await_all(&lasting, LEADS, &mut glance)?;
    shared.begin(LEADS);
    shared.await_all(&lasting, JOINED, &mut glance)?;
    living.expect_end(|i| match tree.nodes[i].role {
        Role::TemporaryLeader => true,
        Role::Process(p) => !tree::is_live(&job.processes[p]),
        _ => false,
    });
    shared.begin(JOINED);
    forest.reap()?;
    let mut glance = || living.glance(shared, tree);
    let settled = live(tree, job);
    shared.await_all(&settled, SETTLED, &mut glance)?;
    if forest.questions.any() {
        let mut listeners = Vec::new();
        for (i, pid, process) in living.pidfds.iter().filter(|(i, ..)| settled.contains(i)) {
            let fd = shared.slot(*i).area[0].load(Ordering::Acquire);
            let taken = i32::try_from(fd).map_err(io::Error::other);
            let taken = taken.and_then(|fd| pidfd::getfd(process.as_fd(), fd));
            listeners.push(taken.map_err(|e| RestartError::at("spawn", format!("process {pid}: take its questions: {e}")))?);
        }
        lead::begin(listeners, forest.rebuilder.book(), forest.programs, forest.shown)?;
    }
    living.filling = lazily::begin(forest, plan.pagers(), chunks, &living.pidfds)?;
    for (i, pid) in zombies(tree, job) {
        let fd = pidfd::open(pid).map_err(|e| RestartError::at("spawn", format!("zombie {pid}: {e}")))?;
        let _ = numbers::poll(fd.as_raw_fd(), libc::POLLIN, -1);
        let wanted = job.processes[i].state;
        let found = proc::stat(pid).map_err(|e| RestartError::at("spawn", format!("zombie {pid}: {e}")))?;
        if wanted != ProcessState::Zombie(found.exit_code) {
            tracing::warn!(pid, ?wanted, found = found.exit_code, "wait status of a zombie differs");
        }
    }
    Ok(())
}

/// Stops a process and continues it, of which nobody takes notice before its parent asks. Signals that this sends are
/// discarded with those that the restart itself causes.
fn stop_and_continue(pid: i32) -> io::Result<()> {
    ptrace::seize(pid, libc::PTRACE_O_EXITKILL)?;
    sys::kill(pid, libc::SIGSTOP)?;
    resume::group_stop(pid)?;
    sys::kill(pid, libc::SIGCONT)?;
    ptrace::detach(pid, 0)
}

fn zombies<'a>(tree: &'a Tree, job: &'a Job) -> impl Iterator<Item = (usize, i32)> + 'a {
    tree.nodes.iter().filter_map(|n| match n.role {
        Role::Process(i) if !tree::is_live(&job.processes[i]) => Some((i, n.pid)),
        _ => None,
    })
}

/// Turns numbers reported by the restorer into words.
fn explain_restorer(
    e: RestartError,
    job: &Job,
    tree: &Tree,
    shared: &Shared,
    extents: &dyn Fn(i32) -> Vec<Extent>,
) -> RestartError {
    let RestartError::Reported { slot } = e else { return e };
    let Some(Role::Process(i)) = tree.nodes.get(slot).map(|n| n.role) else {
        return e;
    };
    let p = &job.processes[i];
    explain::restorer(p, &extents(p.pid), shared.slot(slot))
}

/// How many helper threads read each process's pages: as many as there are processors, all processes together.
fn helper_counts(job: &Job, extents: &HashMap<i32, Vec<Extent>>) -> Vec<usize> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let bytes = |pid: i32| -> u64 { extents.get(&pid).map_or(0, |t| t.iter().map(|e| e.bytes).sum()) };
    let large = job.processes.iter().filter(|p| bytes(p.pid) >= HELPED_BYTES).count().max(1);
    let each = (processors / large).clamp(1, MAX_HELPERS + 1) - 1;
    let count = |pid: i32| if bytes(pid) >= HELPED_BYTES { each } else { 0 };
    job.processes.iter().map(|p| count(p.pid)).collect()
}

fn phases(rebuilt: Duration, spawned: Duration, live: &[usize], shared: &Shared, last: &Last) -> Phases {
    let longest = |from: usize, to: usize| {
        let time = |s: &Slot, i: usize| s.times[i].load(Ordering::Relaxed);
        let each = live
            .iter()
            .map(|i| shared.slot(*i))
            .map(|s| time(s, to).saturating_sub(time(s, from)));
        Duration::from_nanos(each.max().unwrap_or(0))
    };
    let mut out = vec![
        (Phase::Rebuild, rebuilt),
        (Phase::Spawn, spawned.saturating_sub(rebuilt)),
        (Phase::Map, longest(0, 1)),
        (Phase::Refill, longest(1, 2)),
        (Phase::Threads, longest(2, 3)),
        (Phase::Resume, last.resumed),
    ];
    out.extend(last.reopened.map(|time| (Phase::Reopen, time)));
    for (phase, time) in &out {
        tracing::info!(phase = phase.name(), ms = time.as_secs_f64() * 1e3, "restart phase");
    }
    out
}

fn pid_max() -> i32 {
    let text = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
    text.trim().parse().unwrap_or(32768)
}

/// New processes get identifiers behind this one.
fn set_last_pid(pid: i32) {
    if let Err(e) = std::fs::write("/proc/sys/kernel/ns_last_pid", pid.to_string()) {
        tracing::warn!(error = %e, "ns_last_pid not set: new processes may get low identifiers");
    }
}

fn asks_for_huge_pages() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").is_ok_and(|s| s.contains("[madvise]"))
}

fn own_credentials(ordinary: bool) -> std::io::Result<Own> {
    let s = proc::Status::read(std::process::id().cast_signed())?;
    let ids = |key: &str| {
        let list = s.list(key);
        std::array::from_fn(|i| list.get(i).copied().and_then(|v| u32::try_from(v).ok()).unwrap_or(u32::MAX))
    };
    Ok(Own {
        uids: ids("Uid"),
        gids: ids("Gid"),
        groups: s.list("Groups").iter().filter_map(|g| u32::try_from(*g).ok()).collect(),
        permitted: s.hex("CapPrm").unwrap_or(0),
        bounding: s.hex("CapBnd").unwrap_or(0),
        ordinary,
    })
}
