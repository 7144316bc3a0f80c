//! Threads: what the agent itself can see of each one while it stands still, and what becomes of all that is known of
//! it in the image.
//!
//! Everything that is done to each of several hundred threads while the program waits is done by their tracers, side by
//! side; what needs no stopped program is left for afterwards ([`models`]).

use crate::state::namespaces::OfThreads;
use crate::state::placements;
use crate::state::rights;
use crate::state::wait::Wait;
use crate::stop::stopped::{Process, Suspended, Task};
use crate::CaptureError;
use belay_abi::inject::ThreadTable;
use belay_image::attributes::{Own, Sched, SchedMore, ThreadPrctl};
use belay_image::model;
use belay_image::name::Name;
use belay_kernel::dir::Dir;
use belay_kernel::kcmp;
use belay_kernel::proc::{self, Status};
use belay_kernel::ptrace::{self, Regs};
use belay_kernel::sched;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SCHED_DEADLINE: u32 = 6;
/// What is assumed of a task that has no bounds of its own.
const NO_CLAMPS: (u32, u32) = (0, 1024);
const PR_MCE_KILL_DEFAULT: i32 = 2;
const PR_TSC_SIGSEGV: i32 = 2;
const PR_SPEC_PRCTL: i32 = 1;

/// What the agent has seen of a thread.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The `siginfo_t` of each signal that is pending for it alone.
    pending: Vec<Vec<u8>>,
    /// Working directory and mask, where they are not those of the first thread of its process.
    directories: Option<(Name, u32)>,
    /// Whether its descriptor table is not that of the first thread.
    apart: bool,
    /// The lines of its status that [`rights`] go by; `None` of the first thread, whose status is read as a whole.
    pub(crate) rights: Option<Arc<Status>>,
    /// Why it cannot be saved.
    pub(crate) unsupported: Option<&'static str>,
}

/// Looks at every thread; returns what was seen, by process and thread, and what `meanwhile` said, see
/// [`Suspended::each_task_while`].
pub(crate) fn look<M>(
    job: &mut Suspended,
    meanwhile: impl FnOnce(&mut Suspended) -> M,
) -> (Result<Vec<Vec<Seen>>, CaptureError>, M) {
    let first: Vec<(i32, i32)> = job.processes.iter().map(|p| (p.pid, p.task())).collect();
    let tids: Vec<Vec<i32>> = job
        .processes
        .iter()
        .map(|p| p.tasks.iter().map(|t| t.tid).collect())
        .collect();
    // Who traces nothing else at this moment can do a part of it.
    let both = |job: &mut Suspended| {
        let apart = |(first, tids): (&(i32, i32), &Vec<i32>)| apart_from_first(*first, tids);
        (meanwhile(job), first.iter().zip(&tids).map(apart).collect::<Vec<_>>())
    };
    let namespaces = OfThreads::own();
    let see = move |task: &mut Task, first: &(i32, i32)| see(*first, task.tid, namespaces.as_ref());
    let (all, (done, apart)) = job.each_task_while(|process, _, _| first[process], see, both);
    let mut rights = Rights::default();
    let seen = all.into_iter().zip(apart).map(|(seen, apart)| {
        let mut out = Vec::with_capacity(seen.len());
        for (seen, apart) in seen.into_iter().zip(apart?) {
            let (mut seen, lines) = seen?;
            seen.apart = apart;
            seen.rights = lines.map(|lines| rights.of(lines));
            out.push(seen);
        }
        Ok(out)
    });
    (seen.collect(), done)
}

/// What threads may do, by the lines that say so: usually all threads have the same, which is read into words once.
#[derive(Default)]
struct Rights(Vec<(Vec<u8>, Arc<Status>)>);

impl Rights {
    fn of(&mut self, lines: Vec<u8>) -> Arc<Status> {
        if let Some((_, known)) = self.0.iter().rev().find(|(known, _)| *known == lines) {
            return known.clone();
        }
        let status = Arc::new(Status::parse(&lines));
        self.0.push((lines, status.clone()));
        status
    }
}

/// This is the first that is asked of each thread when all of the job stands still. One that has ended nevertheless, by
/// a signal or because one that nobody knew of has called exec, is not to be had any more, and then the list of its
/// process may not have been whole.
fn see((pid, first): (i32, i32), tid: i32, namespaces: Option<&OfThreads>) -> Result<(Seen, Option<Vec<u8>>), CaptureError> {
    let pending = pending(pid, tid, false);
    if ptrace::dispatches_syscalls(tid).is_ok_and(|on| on) {
        let reason = "handles its system calls itself (PR_SET_SYSCALL_USER_DISPATCH), also those that a checkpoint needs; run the program without that";
        return Err(CaptureError::refuse(pid, format!("thread {tid}"), reason));
    }
    let pending = pending?;
    let directories = if is_own((pid, first), tid, kcmp::Object::Fs)? {
        Some(directories(tid)?)
    } else {
        None
    };
    let (mut lines, mut unsupported) = (None, None);
    if tid != first || namespaces.is_some() {
        // What is asked by name is asked at its directory, whose path would take longer than the name.
        let task = Dir::find(format!("/proc/{pid}/task/{tid}").as_ref()).map_err(|_| has_ended(pid, tid))?;
        if tid != first {
            lines = Some(Status::lines_of(&task, &rights::KEYS).map_err(|_| has_ended(pid, tid))?);
        }
        // Both need a capability.
        unsupported = namespaces.and_then(|own| {
            let ports = ptrace::has_ports(tid).unwrap_or(false);
            let ports = ports.then_some("may use I/O ports (ioperm, iopl), which cannot be restored");
            own.unsupported(&task, tid == first).or(ports)
        });
    }
    let seen = Seen {
        pending,
        directories,
        apart: false,
        rights: None,
        unsupported,
    };
    Ok((seen, lines))
}

/// Which of the threads `tids` of a process have another descriptor table than the first.
fn apart_from_first(first: (i32, i32), tids: &[i32]) -> Result<Vec<bool>, CaptureError> {
    tids.iter().map(|tid| is_own(first, *tid, kcmp::Object::Files)).collect()
}

/// Whether thread `tid` of process `pid` has an object for itself that is not that of thread `first`.
fn is_own((pid, first): (i32, i32), tid: i32, object: kcmp::Object) -> Result<bool, CaptureError> {
    let fail = |e: std::io::Error| match e.raw_os_error() {
        Some(libc::ESRCH) => has_ended(pid, tid),
        _ => CaptureError::system(format!("compare descriptors and directories of thread {tid}"), e),
    };
    Ok(tid != first && kcmp::compare(first, tid, object).map_err(fail)?.is_ne())
}

/// Whether a pending signal is SIGSTOP: it would stop whoever queues it again, and what it does is told of the process.
pub(crate) fn is_stop(info: &[u8]) -> bool {
    info.starts_with(&libc::SIGSTOP.to_ne_bytes())
}

/// The `siginfo_t` of each signal that is pending for thread `tid` of process `pid`, or for the process when `shared`.
pub(crate) fn pending(pid: i32, tid: i32, shared: bool) -> Result<Vec<Vec<u8>>, CaptureError> {
    ptrace::pending(tid, shared).map_err(|e| match e.raw_os_error() {
        Some(libc::ESRCH) => has_ended(pid, tid),
        Some(libc::E2BIG) => {
            let reason = format!("more than {} signals are pending", ptrace::MOST_PENDING);
            CaptureError::refuse(pid, format!("thread {tid}"), reason)
        }
        _ => CaptureError::system(format!("read pending signals of thread {tid}"), e),
    })
}

fn has_ended(pid: i32, tid: i32) -> CaptureError {
    CaptureError::refuse_for_now(pid, format!("thread {tid}"), "has ended at this moment")
}

/// Working directory and mask of thread `tid`, which are its own.
fn directories(tid: i32) -> Result<(Name, u32), CaptureError> {
    let status = Status::read(tid).map_err(|e| CaptureError::system(format!("read status of thread {tid}"), e))?;
    let cwd = proc::link(tid, "cwd");
    if proc::link(tid, "root") != Path::new("/") || cwd.as_os_str().as_bytes().ends_with(b" (deleted)") {
        let reason = "has directories of its own (unshare(CLONE_FS)): another root, or a working directory that was removed";
        return Err(CaptureError::refuse(tid, "thread", reason));
    }
    Ok((cwd.into(), umask(&status)))
}

/// The mask for new files.
pub(crate) fn umask(status: &Status) -> u32 {
    status
        .text("Umask")
        .and_then(|u| u32::from_str_radix(u, 8).ok())
        .unwrap_or(0o22)
}

/// The signals that are pending for any of `threads` alone, as a mask. `si_signo` is the first word.
pub(crate) fn pending_signals(threads: &[Seen]) -> u64 {
    let infos = threads.iter().flat_map(|t| &t.pending);
    let numbers = infos.filter_map(|info| info.first_chunk().map(|n| i32::from_ne_bytes(*n)));
    numbers
        .filter(|n| (1..=64).contains(n))
        .fold(0, |mask, n| mask | 1 << (n - 1))
}

/// The threads of `process` that have another descriptor table than its first one.
pub(crate) fn apart(process: &Process, seen: &[Seen]) -> Vec<i32> {
    let apart = process.tasks.iter().zip(seen).filter(|(_, seen)| seen.apart);
    apart.map(|(task, _)| task.tid).collect()
}

/// The working directories that are a thread's own.
pub(crate) fn standing(seen: &[Seen]) -> Vec<PathBuf> {
    let own = seen.iter().filter_map(|s| s.directories.as_ref());
    own.map(|(cwd, _)| cwd.as_path().to_owned()).collect()
}

/// What the registers and masks of a thread were when it was stopped.
#[derive(Debug)]
pub(crate) struct State {
    tid: i32,
    regs: Regs,
    xstate: Vec<u8>,
    sigmask: u64,
    rseq: (u64, u32, u32),
    wait: Option<Wait>,
}

impl State {
    /// Takes it from `task`, which goes on without its copy of the extended state.
    fn take(task: &mut Task) -> Self {
        Self {
            tid: task.tid,
            regs: task.regs,
            xstate: std::mem::take(&mut task.xstate),
            sigmask: task.sigmask,
            rseq: task.rseq,
            wait: task.wait,
        }
    }
}

/// Takes the states of all threads, by process and thread.
pub(crate) fn states(job: &mut Suspended) -> Vec<Vec<State>> {
    let of = |p: &mut Process| p.tasks.iter_mut().map(State::take).collect();
    job.processes.iter_mut().map(of).collect()
}

/// The threads of a process for the image, after it has gone on: where each one was interrupted is known since the
/// frames were written.
pub(crate) fn models(
    process: &mut model::Process,
    states: Vec<State>,
    seen: Vec<Seen>,
    tables: &[ThreadTable],
) -> Vec<model::Thread> {
    process.prctl.securebits = tables.first().map_or(0, |table| table.securebits);
    let usual = SchedUsual::own();
    let given = given();
    let all = states.into_iter().zip(seen).zip(tables);
    all.map(|((state, seen), table)| thread(process, state, seen, table, (usual, &given)))
        .collect()
}

fn thread(
    process: &model::Process,
    state: State,
    seen: Seen,
    table: &ThreadTable,
    (usual, given): (SchedUsual, &[u64]),
) -> model::Thread {
    let regs = crate::state::calls::without_restart_block(state.tid, &state.regs, state.wait.as_ref());
    let name = table.comm.split(|b| *b == 0).next().unwrap_or_default();
    model::Thread {
        tid: state.tid,
        comm: name.into(),
        regs: ptrace::regs_to_words(&regs),
        xstate: state.xstate,
        sigmask: state.sigmask,
        pending: seen.pending.into_iter().filter(|info| !is_stop(info)).collect(),
        altstack: (table.altstack.sp, table.altstack.flags, table.altstack.size),
        tid_address: table.tid_address,
        robust_list: table.robust_list.into(),
        rseq: state.rseq,
        pdeathsig: table.pdeathsig,
        timer_slack_ns: table.timer_slack,
        sched: Sched {
            policy: i32::try_from(table.sched.policy).unwrap_or(0),
            nice: table.sched.nice,
            rt_priority: i32::try_from(table.sched.priority).unwrap_or(0),
            reset_on_fork: table.sched.flags & sched::RESET_ON_FORK != 0,
            more: usual.besides(table),
        },
        affinity: affinity(table, given),
        ioprio: i32::try_from(table.ioprio).unwrap_or(0).max(0),
        exited: None,
        directories: seen.directories,
        own: own(process, seen.rights.as_deref(), table.securebits),
        prctl: prctl(table),
        policy: placements::of_thread(table),
        personality: Some(table.personality.into()).filter(|own| *own != process.personality),
    }
}

/// Whose a thread is with these `rights`, where that is not what is said of its process.
fn own(process: &model::Process, rights: Option<&Status>, securebits: u32) -> Option<Own<model::Credentials>> {
    let creds = rights::credentials(rights?);
    (creds != process.creds || securebits != process.prctl.securebits).then_some(Own { creds, securebits })
}

fn prctl(table: &ThreadTable) -> ThreadPrctl {
    let speculation = (0..).zip(table.speculation);
    ThreadPrctl {
        machine_checks: (table.machine_checks != PR_MCE_KILL_DEFAULT)
            .then(|| u32::try_from(table.machine_checks).ok())
            .flatten(),
        no_tsc: table.tsc == PR_TSC_SIGSEGV,
        no_cpuid: table.cpuid == 0,
        io_flusher: table.io_flusher > 0,
        // What a thread has no say in is the machine's.
        speculation: speculation
            .filter(|(_, how)| *how > 0 && how & PR_SPEC_PRCTL != 0)
            .map(|(what, how)| (what, (how & !PR_SPEC_PRCTL).unsigned_abs()))
            .collect(),
    }
}

/// Refuses what threads have told of themselves and cannot be restored.
pub(crate) fn check(job: &Suspended, tables: &[Vec<ThreadTable>]) -> Result<(), CaptureError> {
    let all = job.processes.iter().zip(tables);
    for (process, (task, table)) in all.flat_map(|(p, tables)| std::iter::repeat(p).zip(p.tasks.iter().zip(tables))) {
        if table.core != 0 {
            let reason =
                "shares processor cores with chosen others only (PR_SCHED_CORE), which cannot be restored; run it without that";
            return Err(CaptureError::refuse(process.pid, format!("thread {}", task.tid), reason));
        }
    }
    Ok(())
}

/// What the scheduler says of a task that has asked for nothing.
#[derive(Debug, Clone, Copy)]
struct SchedUsual {
    /// Its time slice; 0 where the kernel does not tell.
    slice: u64,
    /// The bounds for its utilization, where tasks can have such, and for that of a task with a real-time policy.
    clamps: Option<[(u32, u32); 2]>,
}

impl SchedUsual {
    /// What it says of the agent.
    fn own() -> Self {
        Self {
            slice: sched::get(0).map_or(0, |own| own.runtime),
            clamps: proc::text("/proc/sys/kernel/sched_util_clamp_min_rt_default")
                .ok()
                .and_then(|least| least.trim().parse().ok())
                .map(|least| [NO_CLAMPS, (least, NO_CLAMPS.1)]),
        }
    }

    /// What else a thread has asked for.
    fn besides(self, table: &ThreadTable) -> SchedMore {
        let told = &table.sched;
        let fair = [libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&told.policy.cast_signed());
        let real_time = [libc::SCHED_FIFO, libc::SCHED_RR].contains(&told.policy.cast_signed());
        let clamps = (told.util_min, told.util_max);
        SchedMore {
            times: match told.policy {
                SCHED_DEADLINE => [told.runtime, told.deadline, told.period],
                _ if fair && told.runtime != self.slice => [told.runtime, 0, 0],
                _ => [0; 3],
            },
            flags: told.flags & (sched::RECLAIM | sched::DL_OVERRUN),
            clamps: self
                .clamps
                .filter(|usual| clamps != usual[usize::from(real_time)])
                .map(|_| clamps),
        }
    }
}

/// The processors that the agent may use: those that the job was given.
pub(crate) fn given() -> Vec<u64> {
    let mask = sched::processors().unwrap_or_default();
    masked(&mask, size_of_val(mask.as_slice()) as i64)
}

/// The processor mask of a thread, empty where it is what the job was `given`: the thread has not asked for that.
fn affinity(table: &ThreadTable, given: &[u64]) -> Vec<u64> {
    let mask = masked(&table.affinity, table.affinity_bytes);
    if mask == given {
        Vec::new()
    } else {
        mask
    }
}

/// A processor mask, of which the kernel has filled in so many bytes, without trailing zero words.
fn masked(mask: &[u64], bytes: i64) -> Vec<u64> {
    let words = usize::try_from(bytes).unwrap_or(0).div_ceil(8).min(mask.len());
    let used = mask[..words].iter().rposition(|w| *w != 0).map_or(0, |last| last + 1);
    mask[..used].to_vec()
}

/// The model of a main thread that has exited while others run.
pub(crate) fn exited_main(pid: i32, comm: &OsStr) -> Result<model::Thread, CaptureError> {
    let stat = proc::task_stat(pid, pid).map_err(|e| CaptureError::system(format!("read stat of thread {pid}"), e))?;
    Ok(model::Thread {
        tid: pid,
        comm: comm.to_owned().into(),
        regs: vec![0; ptrace::REG_WORDS],
        xstate: Vec::new(),
        sigmask: u64::MAX,
        pending: Vec::new(),
        altstack: (0, libc::SS_DISABLE, 0),
        tid_address: 0,
        robust_list: (0, 0),
        rseq: (0, 0, 0),
        pdeathsig: 0,
        timer_slack_ns: 0,
        sched: Sched::default(),
        affinity: Vec::new(),
        ioprio: 0,
        exited: Some(stat.exit_code),
        directories: None,
        own: None,
        prctl: ThreadPrctl::default(),
        policy: None,
        personality: None,
    })
}
