//! The checkpoint flow: gate, suspend, capture, drain, snapshot, resume, reopen, write.
//!
//! [`capture`] is the part that the application waits for, and reads as a table of contents; [`Snapshot::write`] is the part that runs beside it. A failure before
//! `resume` drops the `Suspended` guard, which puts every task back as it was: the application goes on, the generation is dropped.
//!
//! Must be called from one thread only, the agent's main thread, because the kernel ties a traced task to the thread that traces it.

mod calls;
mod code;
mod contents;
mod control;
mod copy;
mod error;
mod flags;
mod frame;
mod frames;
mod gate;
mod gather;
mod guards;
pub mod headroom;
mod inject;
mod injected;
mod inside;
mod kin;
mod landlock;
mod listing;
mod looks;
mod memory;
mod mlock;
mod namespaces;
mod placements;
mod process;
mod reader;
mod reaper;
mod remote;
mod rescue;
mod rights;
mod rings;
mod sequences;
mod sharing;
mod signals;
mod snapshot;
mod suspend;
mod threads;
mod tracers;
mod tracking;
mod undo;
mod vfork;
mod waits;
mod witness;

pub use code::{adopt, Code};
pub use error::CaptureError;
pub use injected::load as load_injected;
pub use suspend::{release, take_ended};
pub use tracking::{Findings, Tracking};

use crate::mlock::Locks;
use belay_image::extents;
use belay_image::manifest::FileEntry;
use belay_image::model::{AgentIdentity, Job, KernelPages, Processor};
use belay_image::sections::{Kind, SectionFile};
use belay_image::{blobs::BlobWriter, checksum, extent_file, BLOB_FILE, JOB_FILE};
use belay_kernel::{proc, prompt, vdso};
use belay_plugins::{Descriptors, Facts, Group, Names};
use belay_storage::session::Session;
use belay_wire::Phase;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Choices for one checkpoint.
#[derive(Debug, Clone)]
pub struct Options {
    /// Save the contents of every open regular file.
    pub save_open_files: bool,
    /// When the job was launched.
    pub launched: SystemTime,
    /// Children of the agent that are no part of the job: they lead to its other nodes.
    pub outside: Vec<i32>,
    /// At the root of a job that may have parts on other hosts: the stand-ins for remote shells that the agent has heard of.
    pub standins: Option<Vec<i32>>,
    /// What this node has been called since the job was launched.
    pub names: Names,
    /// The job's processes ask about calls (see [`belay_plugins::lead`]): the one system call filter that they have is of the restart's making.
    pub led: bool,
    /// Save the programs and libraries that the processes map.
    pub save_code: bool,
    /// Number of writer threads per process snapshot.
    pub writers: u32,
    /// The processes stay stopped after the snapshot.
    pub hold: bool,
    /// Libraries in the processes are known to take part: they are asked to come to rest first.
    pub gate: bool,
    /// How long that may take.
    pub gate_limit: Duration,
}

/// What has been captured while the application was stopped, and the snapshot processes still to be written.
#[derive(Debug)]
pub struct Snapshot {
    /// Time from the first stop to the last resume; where a library takes part, from its order to come to rest until it goes on.
    pub blocked: Duration,
    /// Duration of each phase so far.
    pub phases: Vec<(Phase, Duration)>,
    /// Somewhere in the job a library takes part, which is to be asked the next time too.
    pub gated: bool,
    /// The command was no more among the processes: it had ended.
    pub root_had_ended: bool,
    /// Number of live processes.
    pub processes: u32,
    /// Number of threads.
    pub threads: u32,
    /// What will not be the same after a restart, for the user.
    pub notes: Vec<String>,
    /// How the memory was taken,
    pub mode: headroom::Mode,
    /// and why so.
    pub reason: String,
    dir: PathBuf,
    job: Job,
    sections: SectionFile,
    descriptors: Descriptors,
    code: Code,
    save_code: bool,
    children: Vec<snapshot::Child>,
    writers: u32,
    watch: Option<headroom::Watch>,
}

/// Measures the phases.
struct Clock<'a> {
    phases: Vec<(Phase, Duration)>,
    current: Option<(Phase, Instant)>,
    announce: &'a mut dyn FnMut(Phase),
}

impl Clock<'_> {
    fn enter(&mut self, phase: Phase) {
        self.leave();
        (self.announce)(phase);
        self.current = Some((phase, Instant::now()));
    }

    /// The current phase began later.
    fn began_at(&mut self, begin: Instant) {
        self.current = self.current.map(|(phase, _)| (phase, begin));
    }

    fn leave(&mut self) {
        self.leave_at(Instant::now());
    }

    fn leave_at(&mut self, end: Instant) {
        if let Some((phase, begin)) = self.current.take() {
            self.phases.push((phase, end.saturating_duration_since(begin)));
        }
    }
}

/// How often a capture is tried that is refused for reasons that pass by themselves, such as a connection about to be accepted.
const TRIES: u32 = 10;

/// Stops every descendant of the calling process, captures its state into `dir` (which exists and is empty), takes snapshots and lets the
/// processes go on. Call from the agent's main thread. `session` stores what must be stored at once, `tracking` knows what has not been written since the last commit; `on_phase` is called at the start of each phase.
///
/// Where the processes must not go on yet ([`Options::hold`], or too little memory is free for copies on write) they stay stopped until [`Held`] is dropped, which must happen
/// on the calling thread.
///
/// Where only passing reasons stand against it, the program runs on for a moment and it is tried again. The moments grow from 1 to 256 ms. It is tried again at once, and with the gate, where a
/// library is found that was not asked to come to rest.
///
/// SIGCHLD is consumed while tasks are waited for; one is raised at the end so that the caller's loop looks for ended children.
pub fn capture(
    root_pid: i32,
    dir: &Path,
    options: &Options,
    (session, tracking): (&mut Session, &mut Tracking),
    group: Option<&dyn Group>,
    on_phase: &mut dyn FnMut(Phase),
) -> Result<(Snapshot, Option<Held>), CaptureError> {
    // Several nodes can only try again together.
    let tries = if group.is_some() { 1 } else { TRIES };
    let mut gate = options.gate;
    for attempt in 1..tries {
        session.reset();
        match take(root_pid, dir, (options, gate), (session, tracking), group, on_phase) {
            Err(CaptureError::Refused(reasons)) if reasons.iter().all(|r| r.passing) => {
                tracing::debug!(attempt, ?reasons, "refused for the moment");
                std::thread::sleep(Duration::from_millis(1 << (attempt - 1)));
            }
            Err(CaptureError::NotAsked(reason)) => {
                tracing::debug!(attempt, %reason, "once more, with the gate");
                gate = true;
            }
            done => return done,
        }
    }
    session.reset();
    take(root_pid, dir, (options, gate), (session, tracking), group, on_phase)
}

fn meet(group: Option<&dyn Group>) -> Result<(), CaptureError> {
    let done = group.map(|g| g.meet(Facts::new(), BTreeSet::new()));
    done.transpose()
        .map(drop)
        .map_err(|e| CaptureError::failed("checkpoint together with the other nodes", e))
}

/// The processes of a job, stopped since their capture. Dropped, it lets them go on as if they had never been stopped, and opens the gates.
#[derive(Debug)]
pub struct Held {
    job: suspend::Suspended,
    gate: Option<gate::Shut>,
}

impl Held {
    /// Ends every process where it stands: none of them executes another instruction.
    pub fn kill(mut self) {
        for process in std::mem::take(&mut self.job.processes) {
            // SAFETY: takes numbers only. The process is traced by this thread, so its PID cannot have been given to another.
            unsafe { libc::kill(process.pid, libc::SIGKILL) };
        }
    }

    /// Lets them go on; how long the gates took to open, where there are any.
    pub fn go_on(self) -> Option<Duration> {
        self.job.resume();
        self.gate.map(|gate| {
            let begin = Instant::now();
            gate.open();
            begin.elapsed()
        })
    }
}

fn take(
    root_pid: i32,
    dir: &Path,
    (options, gate): (&Options, bool),
    (session, tracking): (&mut Session, &mut Tracking),
    group: Option<&dyn Group>,
    on_phase: &mut dyn FnMut(Phase),
) -> Result<(Snapshot, Option<Held>), CaptureError> {
    let agent = std::process::id().cast_signed();
    let _first = prompt::First::now();
    let blob = injected::program()?;
    let mut blobs = BlobWriter::create(&dir.join(BLOB_FILE))?;
    let mut clock = Clock {
        phases: Vec::new(),
        current: None,
        announce: on_phase,
    };
    rescue::learn_own_libraries();
    let _signals = signals::ChildSignals::block();

    // Lives longer than what holds the processes: who waits at a gate runs when it opens.
    let mut shut = None;
    if gate {
        clock.enter(Phase::Gate);
        shut = Some(gate::shut((agent, &options.outside), options.gate_limit, group)?);
        clock.leave();
    }
    let prepared = gather::prepare(vfork::outlast(agent, &options.outside)?, agent)?;
    clock.enter(Phase::Suspend);
    let (mut job, begin) = gather::suspend(prepared, agent, &options.outside)?;
    clock.began_at(begin);
    let begin = shut.as_ref().map_or(begin, |s| s.since);
    if job.is_empty() {
        return Err(CaptureError::Ended);
    }
    let root_had_ended = !job.processes.iter().any(|p| p.pid == root_pid);
    meet(group)?;
    calls::forget(|tid| job.processes.iter().any(|p| p.tasks.iter().any(|t| t.tid == tid)));

    clock.enter(Phase::Capture);
    sequences::abort(&mut job);
    let read = |job: &mut suspend::Suspended| job.processes.iter().map(process::Draft::read).collect::<Result<Vec<_>, _>>();
    let (seen, drafts) = threads::look(&mut job, read);
    let (seen, mut drafts) = (seen?, drafts?);
    process::check_supported(&job, (&drafts, &seen), (options, group.is_some()))?;
    gate::check(shut.as_ref(), &drafts)?;
    namespaces::check_users(&drafts)?;
    rings::check(&drafts)?;
    sharing::find(&mut job.processes, &drafts)?;
    let areas = job
        .processes
        .iter_mut()
        .zip(drafts.iter().zip(&seen))
        .map(|(p, (d, seen))| inject::Area::map(p, &d.maps, &d.status, threads::pending_signals(seen), blob))
        .collect::<Result<Vec<_>, _>>()?;
    let witnesses = landlock::Witnesses::find(&job, &drafts, &seen)?;
    let (thread_tables, mut processes) = inject::collect_threads(&mut job, &areas, &witnesses.of, |job| {
        let timers: Vec<Vec<i32>> = drafts.iter().map(process::Draft::timer_ids).collect();
        let tables = inject::collect_processes(job, &areas, &timers)?;
        let own = job.processes.iter().zip(&mut drafts).filter(|(p, _)| p.guest.is_none());
        own.map(|(_, draft)| draft).try_for_each(process::Draft::look_for_data)?;
        let live = job.processes.iter().zip(&mut drafts).zip(&tables);
        let live = live.map(|((process, draft), table)| draft.finish(process, table));
        let ended = job.zombies.iter().filter_map(|zombie| process::zombie(*zombie));
        live.chain(ended.map(Ok)).collect::<Result<Vec<_>, _>>()
    })?;
    witnesses.check(&job, &thread_tables)?;
    drop(witnesses);
    threads::check(&job, &thread_tables)?;
    process::tell_sessions(&mut processes);
    process::untold_stops(&mut job, &areas, &mut processes)?;
    process::untold_continuations(&mut processes);
    waits::shorten(&mut job, &thread_tables, drafts.iter().map(|d| d.maps.as_slice()));
    let shifted = namespaces::shifts_clocks();
    for (at, ((process, draft), area)) in processes.iter_mut().zip(&mut drafts).zip(&areas).enumerate() {
        process.vdso_frames = frames::into_vdso(&job.processes[at], &draft.maps, shifted);
        // Those of memory that several processes share are told once.
        if job.processes[at].guest.is_none() {
            draft.locks = Locks::of(&mut job, (at, area), draft, process.mm.mlockall)?;
            process.placements = placements::of_memory(&mut job.processes[at], area, draft)?;
            if !process.segments.is_empty() {
                process.segments = placements::segments(&mut job.processes[at], draft.task)?;
            }
            process.rings = rings::settle(&mut job, (at, area), draft, group)?;
            if draft.has_rings() {
                // What it has waited for may have been written since.
                draft.look_for_data()?;
            }
        }
    }
    namespaces::check(&drafts)?;

    clock.enter(Phase::Drain);
    let views = drafts.iter().zip(&job.processes).zip(&seen);
    let views = views.map(|((draft, process), seen)| {
        let threads = (threads::apart(process, seen), threads::standing(seen));
        draft.view(threads, process.guest.is_none())
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    let mut contents = contents::Contents::new(session, &drafts);
    let descriptors = belay_plugins::capture(belay_plugins::CaptureEnv {
        processes: &views,
        blobs: &mut blobs,
        pages: &mut contents,
        save_open_files: options.save_open_files,
        launched: options.launched,
        group,
        names: &options.names,
        inside: Some(&mut inside::Stopped {
            job: &mut job,
            areas: &areas,
        }),
    });
    let descriptors = contents.finish(descriptors)?;
    drafts.iter_mut().for_each(|d| d.restore(&descriptors.private));

    clock.enter(Phase::Snapshot);
    // From here on, one process of those that share their memory stands for it.
    let own = drafts
        .into_iter()
        .zip(areas)
        .zip(&job.processes)
        .filter(|(_, p)| p.guest.is_none());
    let (drafts, areas): (Vec<_>, Vec<_>) = own.map(|(own, _)| own).unzip();
    let (plan, gauges) = headroom::Plan::make(&drafts, session, options.hold)?;
    plan.apply(session);
    let children = snapshot::take(&mut job, &areas, &drafts, (session, tracking), &plan)?;
    let missing = children.iter().find_map(snapshot::Child::missing);
    let (mode, reason) = plan.manner(missing);
    let stay = options.hold || (plan.mode == headroom::Mode::BeforeResume && children.iter().any(|c| c.copy().is_some()));
    let watch = (plan.mode == headroom::Mode::Capped).then(|| headroom::Watch::new(&plan, gauges));

    // Nobody goes on before everybody has captured.
    meet(group)?;
    clock.enter(Phase::Resume);
    let (live, threads) = (job.processes.len(), job.tasks());
    let states = threads::states(&mut job);
    let gated = shut.as_ref().is_some_and(|s| s.is_needed);
    let (held, mut end) = if stay {
        let gate = shut.take();
        (Some(Held { job, gate }), Instant::now())
    } else {
        (None, job.resume())
    };
    clock.leave_at(end);
    if let Some(shut) = shut {
        clock.enter(Phase::Reopen);
        shut.open();
        end = Instant::now();
        clock.leave_at(end);
    }
    let blocked = end.saturating_duration_since(begin);

    let known = states.into_iter().zip(seen).zip(&thread_tables);
    for (process, ((states, seen), tables)) in processes.iter_mut().zip(known) {
        let threads = threads::models(process, states, seen, tables);
        process.threads.extend(threads);
    }
    let mut sections = SectionFile::new();
    sections.push_json(Kind::Descriptors, &descriptors)?;
    let (vdso_xxh3, kernel_pages) = kernel_pages(&mut blobs)?;
    let job = Job {
        arch: std::env::consts::ARCH.into(),
        kernel: read_line("/proc/sys/kernel/osrelease"),
        host: read_line("/proc/sys/kernel/hostname"),
        boot_id: read_line("/proc/sys/kernel/random/boot_id"),
        time_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        vdso_xxh3,
        kernel_pages,
        processor: Some(Processor::own()),
        agent: agent_identity(agent)?,
        root_pid,
        processes,
        monotonic_ns: monotonic_ns(),
        code: Vec::new(),
    };
    let snapshot = Snapshot {
        blocked,
        phases: clock.phases,
        gated,
        root_had_ended,
        processes: u32::try_from(live).unwrap_or(u32::MAX),
        threads: u32::try_from(threads).unwrap_or(u32::MAX),
        notes: descriptors.notes.clone(),
        descriptors,
        code: tracking.code.clone(),
        save_code: options.save_code,
        mode,
        reason,
        dir: dir.to_owned(),
        job,
        sections,
        children,
        writers: options.writers.clamp(1, belay_abi::inject::MAX_WRITERS as u32),
        watch,
    };
    Ok((snapshot, held))
}

impl Snapshot {
    /// The snapshot children, which are children of the caller now.
    pub fn copies(&self) -> Vec<i32> {
        self.children.iter().filter_map(snapshot::Child::copy).collect()
    }

    /// Bytes that are going to be written at most.
    pub fn bytes(&self) -> u64 {
        self.children.iter().map(snapshot::Child::resident_bytes).sum()
    }

    /// Where the memory that this costs must be watched: what watches it.
    pub fn take_watch(&mut self) -> Option<headroom::Watch> {
        self.watch.take()
    }

    /// Stores the snapshots in `session`; may run on any thread. `progress` receives (bytes dealt with, bytes expected). Returns the files of the generation,
    /// all of them, and the chunks, synced to the device, and what [`Tracking::commit`] is to be given after the commit.
    pub fn write(mut self, session: &mut Session, progress: &dyn Fn(u64, u64)) -> Result<(Vec<FileEntry>, Findings), CaptureError> {
        let mut progress = snapshot::Progress::new(progress);
        let mut identities = memory::Identities::default();
        for child in &self.children {
            progress.expect(child.resident_bytes());
            child.copy().into_iter().for_each(headroom::offer);
        }
        session.write_held()?;
        let mut armed = Vec::new();
        let mut children = std::mem::take(&mut self.children);
        kin::find(&mut children, &self.job.processes);
        session.expect(children.iter().map(snapshot::Child::pages).sum());
        std::thread::scope(|scope| {
            let looks = looks::Looks::begin(scope, self.writers, children.len() > 1);
            let ask = |child: &mut snapshot::Child| child.request().into_iter().for_each(|r| looks.ask(r));
            let mut rest = children.into_iter();
            let mut next = rest.next();
            next.iter_mut().for_each(ask);
            while let Some(child) = next {
                next = rest.next();
                next.iter_mut().for_each(ask);
                let pid = child.pid();
                let (vmas, arms) = child.write(session, &looks, self.writers, &mut identities, &mut progress)?;
                armed.extend(arms);
                if let Some(p) = self.job.processes.iter_mut().find(|p| p.pid == pid) {
                    p.vmas = vmas;
                    p.exe_identity = code::identity_of_program(p, &mut identities);
                }
            }
            Ok::<(), CaptureError>(())
        })?;
        for p in self.job.processes.iter_mut().filter(|p| p.shares_mm_with != 0) {
            p.exe_identity = code::identity_of_program(p, &mut identities);
        }
        let restored = |path: &Path| self.descriptors.restores(path);
        let place = (&mut *session, &mut identities);
        self.job.code = self.code.store(&self.job.processes, self.save_code, restored, place)?;
        session.compact()?;
        session.seal()?;
        let mut files = Vec::new();
        for (pid, table) in session.tables() {
            let mut index = SectionFile::new();
            index.push(Kind::Extents, extents::encode(table));
            index.write(&self.dir.join(extent_file(*pid)))?;
            files.push(extent_file(*pid));
        }
        self.sections.push_json(Kind::Job, &self.job)?;
        self.sections.write(&self.dir.join(JOB_FILE))?;
        files.push(JOB_FILE.to_owned());
        files.push(BLOB_FILE.to_owned());
        let files = files
            .into_iter()
            .map(|name| entry(&self.dir, name))
            .collect::<Result<_, _>>()?;
        let code = self.code;
        Ok((files, Findings { armed, code }))
    }
}

/// Makes file `name` durable and describes it for the manifest. The references to the blob file carry a checksum each; it is not read again.
fn entry(dir: &Path, name: String) -> Result<FileEntry, CaptureError> {
    let path = dir.join(&name);
    let fail = |step, e| belay_image::ImageError::io(step, &path, e);
    let file = std::fs::File::open(&path).map_err(|e| fail("open", e))?;
    file.sync_all().map_err(|e| fail("fsync", e))?;
    let bytes = file.metadata().map_err(|e| fail("stat", e))?.len();
    let xxh3 = if name == BLOB_FILE {
        None
    } else {
        Some(checksum(&std::fs::read(&path).map_err(|e| fail("read", e))?))
    };
    Ok(FileEntry { name, bytes, xxh3 })
}

/// Stores the kernel's pages; returns the checksum of the code too. This process has the same ones as those of the job.
fn kernel_pages(blobs: &mut BlobWriter) -> Result<(u64, Option<KernelPages>), CaptureError> {
    let code = vdso::code().map_err(|e| CaptureError::system("read the vDSO", e))?;
    let data = match vdso::data() {
        Ok(data) if !code.is_empty() => data,
        Ok(_) => return Ok((checksum(&code), None)),
        Err(e) => {
            tracing::warn!(error = %e, "the data of the vDSO cannot be read: this checkpoint can be restarted on this kernel only");
            return Ok((checksum(&code), None));
        }
    };
    let code = blobs.put(&code)?;
    let data = blobs.put(&data)?;
    Ok((code.xxh3, Some(KernelPages { code, data })))
}

fn agent_identity(pid: i32) -> Result<AgentIdentity, CaptureError> {
    let s = proc::stat(pid).map_err(|e| CaptureError::system("read the agent's own state", e))?;
    Ok(AgentIdentity {
        pid,
        pgid: s.pgrp,
        sid: s.session,
        tty: s.tty_nr,
    })
}

fn read_line(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn monotonic_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is live.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}
