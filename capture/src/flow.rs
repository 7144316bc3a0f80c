//! What the application waits for: [`take`] reads as a table of contents, a function for each phase.

use crate::access::report;
use crate::access::sites::{Program, Wanted};
use crate::access::{self, points, points::Meeting};
use crate::clock::{boottime_ns, monotonic_ns, Clock};
use crate::error::CaptureError;
use crate::gate::{self, Shut};
use crate::inject::injected;
use crate::inject::inside;
use crate::inject::rescue;
use crate::inject::{self, Area, Facts};
use crate::memory::contents;
use crate::memory::headroom;
use crate::memory::later;
use crate::memory::mappings::{self, Reached};
use crate::memory::mlock::Locks;
use crate::memory::snapshot;
use crate::memory::tracking::devices_write;
use crate::rest::{GoneOn, Held};
use crate::state::calls;
use crate::state::draft::Draft;
use crate::state::frames;
use crate::state::histories;
use crate::state::landlock;
use crate::state::namespaces;
use crate::state::placements;
use crate::state::process;
use crate::state::rights;
use crate::state::rings;
use crate::state::sequences;
use crate::state::sharing;
use crate::state::threads;
use crate::state::waits;
use crate::stop::gather;
use crate::stop::listing::Listing;
use crate::stop::signals;
use crate::stop::stopped::{self, Suspended};
use crate::stop::vfork;
use crate::Access;
use crate::Options;
use crate::Snapshot;
use crate::Tracking;
use belay_abi::inject::ThreadTable;
use belay_image::manifest::Declared;
use belay_image::model::{AgentIdentity, Job, KernelPages, Process, Processor};
use belay_image::{
    blobs::{BlobRef, BlobWriter},
    BLOB_FILE,
};
use belay_kernel::{blob::Blob, domain, proc, prompt, spread, vdso};
use belay_plugins::gate::gpu;
use belay_plugins::{Brought, Descriptors, Group};
use belay_storage::session::Session;
use belay_wire::Phase;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What is to be captured, and how.
#[derive(Clone, Copy)]
pub(crate) struct Order<'a> {
    /// The command.
    pub(crate) root_pid: i32,
    /// Where the generation is made.
    pub(crate) dir: &'a Path,
    pub(crate) options: &'a Options,
    /// Libraries are asked to come to rest.
    pub(crate) gate: bool,
    /// The other nodes of the job.
    pub(crate) group: Option<&'a dyn Group>,
}

/// Captures the job once.
pub(crate) fn take(
    order: Order<'_>,
    (session, tracking): (&mut Session, &mut Tracking),
    on_phase: &mut dyn FnMut(Phase),
) -> Result<(Snapshot, Option<Held>), CaptureError> {
    let _first = prompt::First::now();
    rights::check_sandbox(agent())?;
    let blob = injected::program()?;
    let mut blobs = BlobWriter::create(&order.dir.join(BLOB_FILE))?;
    let mut host = Host::look(&mut blobs)?;
    let mut clock = Clock::new(on_phase);
    rescue::learn_own_libraries();
    let _signals = signals::ChildSignals::block();
    tracking.forget_lost(&|chunk| session.knows(chunk));

    // Lives longer than what holds the processes: who waits at a gate runs when it opens.
    let shut = come_to_rest(order, &mut clock)?;
    let (wanted, declared) = wait_at_sites(order, tracking)?;
    let meeting = wait_at_points(order, tracking.silent || wanted.is_some())?;
    let (job, begin) = suspend(order, &mut clock)?;
    host.look_at_clocks(&mut blobs)?;
    // While all stand: nobody waits any more when they go on, or after a restart.
    let horizon = later::horizon(wanted.as_ref().map_or(Duration::ZERO, |w| w.period));
    let waited = [wanted.and_then(|w| w.since), meeting.and_then(|m| m.since)];
    let begin = waited.into_iter().flatten().fold(begin, Instant::min);
    let begin = shut.as_ref().map_or(begin, |s| s.since.min(begin));
    let mut held = Held::new(job, shut);
    if held.uses_gpus() {
        clock.enter(Phase::Gate);
        end_requests(&mut held, order, blob)?;
        if let Err(error) = held.leave_gpus() {
            // Before the state is put back here, which takes long: the others stand still meanwhile.
            if let Some(group) = order.group {
                group.give_up(&error.to_string());
            }
            return Err(error);
        }
    }
    // Whoever has none, or less on them, waits here: the steps that follow are quick.
    if let Some(group) = order.group.filter(|_| held.parties().gpus) {
        meet_late(group, gpu::LIMIT)?;
    }
    let (job, shut) = (&mut held.job, held.gate.as_ref());
    let root_had_ended = !job.processes.iter().any(|p| p.pid == order.root_pid);
    clock.enter(Phase::Capture);
    let mut captured = capture(job, order, shut, blob)?;
    tracking.silent = !captured.drafts.iter().any(|draft| draft.maps.iter().any(access::is_page));
    // Only where there are stand-ins could they have been followed.
    let shells = if order.options.standins.is_some() {
        process::remote_shells(&captured.drafts)
    } else {
        Vec::new()
    };
    clock.enter(Phase::Drain);
    let descriptors = drain(job, order, (&mut captured, shut), (&mut blobs, session))?;
    histories::note(&descriptors, order.dir)?;
    clock.enter(Phase::Snapshot);
    let (mut captured, copies) = copy(job, captured, order, (session, tracking), horizon)?;
    // Nobody goes on before everybody has captured. From here on nothing may fail, since the others would not hear of it:
    // they come to no more meetings.
    meet(order.group)?;
    clock.enter(Phase::Resume);
    let (processes, threads) = (job.processes.len(), job.tasks());
    let gated = shut.is_some_and(|s| s.parties.any);
    let states = threads::states(job);
    let (held, end, note) = go_on(held, copies.stay, &mut clock);

    captured.join(states);
    let job = host.image(order.root_pid, captured.processes);
    let snapshot = Snapshot {
        blocked: end.saturating_duration_since(begin),
        phases: clock.phases,
        gated,
        root_had_ended,
        processes: u32::try_from(processes).unwrap_or(u32::MAX),
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        notes: descriptors.notes.iter().cloned().chain(shells).chain(note).collect(),
        declared,
        descriptors,
        code: tracking.code.clone(),
        save_code: order.options.save_code,
        mode: copies.mode,
        reason: copies.reason,
        dir: order.dir.to_owned(),
        job,
        children: copies.children,
        writers: order.options.writers,
        watch: copies.watch,
    };
    Ok((snapshot, held))
}

/// Asks libraries that take part to come to rest, where there may be any.
fn come_to_rest(order: Order<'_>, clock: &mut Clock<'_>) -> Result<Option<Shut>, CaptureError> {
    if !order.gate {
        return Ok(None);
    }
    clock.enter(Phase::Gate);
    let shut = gate::shut((agent(), &order.options.outside), order.options.gate_limit, order.group)?;
    clock.leave();
    Ok(Some(shut))
}

/// Where programs have declared what their loops do, has them wait before one at which little is alive, and says what is
/// alive at all of them.
fn wait_at_sites(order: Order<'_>, tracking: &Tracking) -> Result<(Option<Wanted>, Option<Declared>), CaptureError> {
    let reach = match order.options.access {
        Access::LeaveOut(reach) | Access::Watch(reach) if tracking.declares => reach,
        _ => return Ok((None, None)),
    };
    let listing = Listing::make(agent(), &gate::outside(&order.options.outside))?;
    let mut programs = Program::find(listing.processes.iter().map(|(pid, ..)| *pid), reach);
    // Where libraries are at rest already, processes that wait for each other cannot come there.
    // Nor where processes on other hosts, which they may wait for, are stopped at other moments.
    let leaves_out = matches!(order.options.access, Access::LeaveOut(_));
    let may_wait = leaves_out && !order.gate && order.group.is_none() && !order.options.hold;
    if may_wait {
        Program::choose(&mut programs, reach, order.options.site_wait);
    }
    let declared = report::of(&programs);
    Ok((may_wait.then(|| Wanted::ask(programs, order.options.site_wait)), declared))
}

/// Where processes have parts of global arrays, has all of them wait at the same point of their own. Not where nobody has
/// declared anything the last time, or where some wait elsewhere already; nor where processes on other hosts, which come to
/// no such agreement, are in the job.
fn wait_at_points(order: Order<'_>, is_none: bool) -> Result<Option<Meeting>, CaptureError> {
    if is_none || order.gate || order.group.is_some() {
        return Ok(None);
    }
    let listing = Listing::make(agent(), &gate::outside(&order.options.outside))?;
    Ok(Meeting::ask(listing.processes.iter().map(|(pid, ..)| *pid)))
}

/// Stops every task; since when.
fn suspend(order: Order<'_>, clock: &mut Clock<'_>) -> Result<(Suspended, Instant), CaptureError> {
    let outside = &gate::outside(&order.options.outside);
    let prepared = gather::prepare(vfork::outlast(agent(), outside)?, agent())?;
    clock.enter(Phase::Suspend);
    let (job, begin) = gather::suspend(prepared, agent(), outside)?;
    clock.began_at(begin);
    // Of a node of many, zombies may be what is left there; of a whole job they are its end.
    if job.processes.is_empty() && (order.group.is_none() || job.zombies.is_empty()) {
        return Err(CaptureError::Ended);
    }
    meet(order.group)?;
    calls::forget(|tid| job.processes.iter().any(|p| p.tasks.iter().any(|t| t.tid == tid)));
    Ok((job, begin))
}

/// Waits for the requests of native asynchronous I/O while all processes are on their GPUs: where one does not end, others
/// go on, and what is off its GPU then may die. None is on its way any more when they are captured.
fn end_requests(held: &mut Held, order: Order<'_>, blob: &'static Blob) -> Result<(), CaptureError> {
    let (job, shut) = (&mut held.job, held.gate.as_ref());
    // One that has ended has none.
    let has_rings = |p: &stopped::Process| proc::maps(p.task()).is_ok_and(|maps| maps.iter().any(mappings::is_ring));
    if !job.processes.iter().any(has_rings) {
        return Ok(());
    }
    sequences::abort(job);
    let (drafts, seen) = look(job)?;
    check_supported(job, order, (&drafts, &seen), shut)?;
    sharing::find(&mut job.processes, &drafts)?;
    for (at, (draft, seen)) in drafts.iter().zip(&seen).enumerate() {
        let process = &mut job.processes[at];
        if process.guest.is_none() && draft.has_rings() {
            let facts = std::iter::once(facts(draft, seen));
            let areas = Area::map_all(std::slice::from_mut(process), facts, blob)?;
            rings::settle(job, (at, &areas[0]), draft, order.group)?;
        }
    }
    job.clear_all();
    Ok(())
}

/// What is known of the stopped processes.
struct Captured {
    /// What can be seen from outside: of each process, and of each of its threads.
    drafts: Vec<Draft>,
    seen: Vec<Vec<threads::Seen>>,
    /// Where injected code runs in each.
    areas: Vec<Area>,
    /// What that has told of each thread.
    tables: Vec<Vec<ThreadTable>>,
    /// As the image has them, those too that have ended and were not waited for.
    processes: Vec<Process>,
}

/// Captures registers, `/proc`, and by injected code what only a process itself can ask.
fn capture(job: &mut Suspended, order: Order<'_>, shut: Option<&Shut>, blob: &'static Blob) -> Result<Captured, CaptureError> {
    sequences::abort(job);
    let (mut drafts, seen) = look(job)?;
    gate::check(shut, &drafts)?;
    for draft in &mut drafts {
        draft.by_devices = devices_write(&draft.maps, &gate::libraries(shut, draft.pid));
    }
    check_supported(job, order, (&drafts, &seen), shut)?;
    sharing::find(&mut job.processes, &drafts)?;
    let facts = drafts.iter().zip(&seen).map(|(draft, seen)| facts(draft, seen));
    let areas = Area::map_all(&mut job.processes, facts, blob)?;
    let witnesses = landlock::Witnesses::find(job, &drafts, &seen)?;
    let ask = |job: &mut Suspended| ask_processes(job, &areas, &mut drafts);
    let (tables, processes) = inject::collect_threads(job, &areas, &witnesses.of, ask)?;
    witnesses.check(job, &tables)?;
    drop(witnesses);
    threads::check(job, &tables)?;
    let mut captured = Captured {
        drafts,
        seen,
        areas,
        tables,
        processes,
    };
    captured.tell_points(job);
    captured.tell_stops(job)?;
    captured.look_into_memory(job, order.group)?;
    namespaces::check(&captured.drafts)?;
    Ok(captured)
}

/// What has to be known of a process before code of ours can run in it.
fn facts<'a>(draft: &'a Draft, seen: &[threads::Seen]) -> Facts<'a> {
    Facts {
        maps: &draft.maps,
        status: &draft.status,
        pending: threads::pending_signals(seen),
    }
}

/// What can be seen of the processes, and of their threads, from outside.
fn look(job: &mut Suspended) -> Result<(Vec<Draft>, Vec<Vec<threads::Seen>>), CaptureError> {
    let read = |job: &mut Suspended| {
        let drafts = spread::each(job.processes.iter().collect(), Draft::read);
        drafts.into_iter().collect::<Result<Vec<_>, _>>()
    };
    let (seen, drafts) = threads::look(job, read);
    let (seen, mut drafts) = (seen?, drafts?);
    let mut reached = Reached::default();
    drafts.iter_mut().for_each(|draft| reached.note(&mut draft.maps));
    Ok((drafts, seen))
}

/// Refuses what cannot be restored, as far as it can be seen from outside.
fn check_supported(
    job: &Suspended,
    order: Order<'_>,
    (drafts, seen): (&[Draft], &[Vec<threads::Seen>]),
    shut: Option<&Shut>,
) -> Result<(), CaptureError> {
    process::check_supported(job, (drafts, seen), (order.options, order.group.is_some()), &|pid| {
        gate::libraries(shut, pid)
    })?;
    namespaces::check_users(drafts)?;
    rings::check(drafts)
}

/// What each process tells of itself, while its threads are asked.
fn ask_processes(job: &mut Suspended, areas: &[Area], drafts: &mut [Draft]) -> Result<Vec<Process>, CaptureError> {
    let timers: Vec<Vec<i32>> = drafts.iter().map(Draft::timer_ids).collect();
    let tables = inject::collect_processes(job, areas, &timers)?;
    let own = job.processes.iter().zip(&mut *drafts).filter(|(p, _)| p.guest.is_none());
    own.map(|(_, draft)| draft).try_for_each(Draft::look_for_data)?;
    let pending = drafts.iter().map(|draft| threads::pending(draft.pid, draft.task, true));
    let pending = pending.collect::<Result<Vec<_>, _>>()?;
    let live = job.processes.iter().zip(drafts).zip(&tables).zip(pending);
    let live = spread::each(live.collect(), |(((process, draft), table), pending)| {
        draft.finish(process, table, pending)
    });
    let ended = job.zombies.iter().filter_map(|zombie| process::zombie(*zombie));
    live.into_iter().chain(ended.map(Ok)).collect()
}

impl Captured {
    /// Points of their own at which processes wait.
    fn tell_points(&mut self, job: &Suspended) {
        for (process, draft) in job.processes.iter().zip(&self.drafts) {
            let point = points::waiting(draft.task, &draft.maps, &|word| process.waits_for(word));
            let its = self.processes.iter_mut().filter(|p| p.pid == draft.pid);
            its.for_each(|p| p.point.clone_from(&point));
        }
    }

    /// Sessions, and stops and continuations of which a parent has not been told.
    fn tell_stops(&mut self, job: &mut Suspended) -> Result<(), CaptureError> {
        process::tell_sessions(&mut self.processes);
        process::untold_stops(job, &self.areas, &mut self.processes)?;
        process::untold_continuations(&mut self.processes);
        waits::shorten(job, &self.tables, self.drafts.iter().map(|d| d.maps.as_slice()));
        Ok(())
    }

    /// What belongs to a process's memory: of what several of them share, it is told once.
    fn look_into_memory(&mut self, job: &mut Suspended, group: Option<&dyn Group>) -> Result<(), CaptureError> {
        let shifted = namespaces::shifts_clocks();
        let all = self.processes.iter_mut().zip(&mut self.drafts).zip(&self.areas);
        for (at, ((process, draft), area)) in all.enumerate() {
            process.vdso_frames = frames::into_vdso(&job.processes[at], &draft.maps, shifted);
            if job.processes[at].guest.is_some() {
                continue;
            }
            draft.locks = Locks::of(job, (at, area), (&draft.status, &draft.maps), process.mm.mlockall)?;
            process.placements = placements::of_memory(&mut job.processes[at], area, draft)?;
            if !process.segments.is_empty() {
                process.segments = placements::segments(&mut job.processes[at], draft.task)?;
            }
            process.rings = rings::settle(job, (at, area), draft, group)?;
            if draft.has_rings() {
                // What it has waited for may have been written since.
                draft.look_for_data()?;
            }
        }
        Ok(())
    }

    /// Adds the threads, in these states.
    fn join(&mut self, states: Vec<Vec<threads::State>>) {
        let seen = std::mem::take(&mut self.seen);
        let known = states.into_iter().zip(seen).zip(&self.tables);
        for (process, ((states, seen), tables)) in self.processes.iter_mut().zip(known) {
            let threads = threads::models(process, states, seen, tables);
            process.threads.extend(threads);
        }
    }
}

/// Captures descriptors, shared objects, and what is in flight between them.
fn drain(
    job: &mut Suspended,
    order: Order<'_>,
    (captured, shut): (&mut Captured, Option<&Shut>),
    (blobs, session): (&mut BlobWriter, &mut Session),
) -> Result<Descriptors, CaptureError> {
    let views = captured.drafts.iter().zip(&job.processes).zip(&captured.seen);
    let views = views.map(|((draft, process), seen)| {
        let threads = (threads::apart(process, seen), threads::standing(seen));
        draft.view(threads, process.guest.is_none(), gate::partakers(shut, draft.pid))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    let mut contents = contents::Contents::new(session, &captured.drafts);
    let descriptors = belay_plugins::capture(belay_plugins::CaptureEnv {
        processes: &views,
        blobs,
        pages: &mut contents,
        saved_up_to: order.options.saved_up_to,
        launched: order.options.launched,
        group: order.group,
        names: &order.options.names,
        inside: Some(&mut inside::Stopped {
            job,
            areas: &captured.areas,
        }),
    });
    let descriptors = contents.finish(descriptors)?;
    captured.drafts.iter_mut().for_each(|d| d.restore(&descriptors.private));
    Ok(descriptors)
}

/// Copies of the processes' memory, to be written.
struct Copies {
    children: Vec<snapshot::Child>,
    mode: headroom::Mode,
    reason: String,
    /// The processes stay stopped.
    stay: bool,
    watch: Option<headroom::Watch>,
}

/// Takes them. From here on, one process of those that share their memory stands for it.
fn copy(
    job: &mut Suspended,
    captured: Captured,
    order: Order<'_>,
    (session, tracking): (&mut Session, &mut Tracking),
    horizon: Duration,
) -> Result<(Captured, Copies), CaptureError> {
    let hold = order.options.hold;
    let own = captured.drafts.into_iter().zip(captured.areas).zip(&job.processes);
    let own = own.filter(|(_, p)| p.guest.is_none()).map(|(own, _)| own);
    let (drafts, areas): (Vec<_>, Vec<_>) = own.unzip();
    let (plan, gauges) = headroom::Plan::make(&drafts, session, (order.options.writers, hold))?;
    plan.apply(session);
    let access = match order.options.access {
        Access::LeaveOut(reach) if hold => Access::Watch(reach),
        access => access,
    };
    let children = snapshot::take(job, &areas, &drafts, (session, tracking), (&plan, access, horizon))?;
    let missing = children.iter().find_map(snapshot::Child::missing);
    let (mode, reason) = plan.manner(missing);
    let copied = || children.iter().any(|c| c.copy().is_some());
    let copies = Copies {
        mode,
        reason,
        stay: hold || (plan.mode == headroom::Mode::BeforeResume && copied()),
        watch: (plan.mode == headroom::Mode::Capped).then(|| headroom::Watch::new(&plan, gauges)),
        children,
    };
    Ok((
        Captured {
            drafts,
            areas,
            ..captured
        },
        copies,
    ))
}

/// Lets the processes go on, and then opens the gates, unless they `stay`; when that was done, and what the user is to know.
fn go_on(mut held: Held, stay: bool, clock: &mut Clock<'_>) -> (Option<Held>, Instant, Option<String>) {
    if stay {
        let end = Instant::now();
        clock.leave_at(end);
        return (Some(held), end, None);
    }
    let mut gated = false;
    let GoneOn { resumed, note } = held.let_go(|since| {
        gated = true;
        clock.leave_at(since);
        clock.enter(Phase::Reopen);
        clock.began_at(since);
    });
    let end = if gated { Instant::now() } else { resumed };
    clock.leave_at(end);
    (None, end, note)
}

/// What the image says of the place of the checkpoint.
struct Host {
    /// The kernel's code in the processes.
    vdso: BlobRef,
    /// Its data, where they can be read.
    clocks: Option<BlobRef>,
    agent: AgentIdentity,
}

impl Host {
    fn look(blobs: &mut BlobWriter) -> Result<Self, CaptureError> {
        // This process has the same pages as those of the job.
        let code = vdso::code().map_err(|e| CaptureError::system("read the vDSO", e))?;
        Ok(Self {
            vdso: blobs.put(&code)?,
            clocks: None,
            agent: agent_identity(agent())?,
        })
    }

    /// Stores the data of the kernel's code, when all stand: a thread within it may have read clocks already, and must not
    /// find them at an earlier time when it goes on after a restart.
    fn look_at_clocks(&mut self, blobs: &mut BlobWriter) -> Result<(), CaptureError> {
        match vdso::data() {
            Ok(data) if self.vdso.bytes > 0 => self.clocks = Some(blobs.put(&data)?),
            Ok(_) => {}
            Err(e) => {
                tracing::warn!(error = %e, "the data of the vDSO cannot be read: this checkpoint can be restarted on this kernel only");
            }
        }
        Ok(())
    }

    /// What the image says of the job.
    fn image(self, root_pid: i32, processes: Vec<Process>) -> Job {
        Job {
            arch: std::env::consts::ARCH.into(),
            kernel: read_line("/proc/sys/kernel/osrelease"),
            host: read_line("/proc/sys/kernel/hostname"),
            boot_id: read_line("/proc/sys/kernel/random/boot_id"),
            time_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            vdso_xxh3: self.vdso.xxh3,
            kernel_pages: self.clocks.map(|data| KernelPages { code: self.vdso, data }),
            processor: Some(Processor::own()),
            domain: domain::of(agent()).map(|label| label.as_slice().into()),
            agent: self.agent,
            processors: threads::given(),
            root_pid,
            last_pid: proc::last_pid(),
            processes,
            monotonic_ns: monotonic_ns(),
            boottime_ns: Some(boottime_ns()),
            code: Vec::new(),
        }
    }
}

/// Waits for the other nodes.
fn meet(group: Option<&dyn Group>) -> Result<(), CaptureError> {
    group.map_or(Ok(()), |g| meet_late(g, Duration::ZERO))
}

/// Waits for the other nodes, which may come so much later.
fn meet_late(group: &dyn Group, late: Duration) -> Result<(), CaptureError> {
    let met = group.meet_late(Brought::default(), late);
    met.map(drop)
        .map_err(|e| CaptureError::failed("checkpoint together with the other nodes", e))
}

fn agent() -> i32 {
    std::process::id().cast_signed()
}

fn agent_identity(pid: i32) -> Result<AgentIdentity, CaptureError> {
    let s = proc::stat(pid).map_err(|e| CaptureError::system("read the agent's own state", e))?;
    Ok(AgentIdentity {
        pid,
        pgid: s.pgrp,
        sid: s.session,
        tty: s.tty_nr,
        started: s.starttime,
        front: s.ppid,
        front_started: proc::born(s.ppid).unwrap_or_default(),
    })
}

fn read_line(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}
