//! One process: what `/proc` and system calls by the agent tell, joined with what the process told about itself.

use crate::access;
use crate::inject::{on_main, Area};
use crate::memory::mappings;
use crate::memory::mlock;
use crate::state::draft::Draft;
use crate::state::limits;
use crate::state::namespaces;
use crate::state::remote;
use crate::state::rights;
use crate::state::threads::{self, Seen};
use crate::stop::stopped::{Process, Suspended, Zombie};
use crate::CaptureError;
use crate::Options;
use belay_abi::inject::{KernelSigaction, ProcessTable};
use belay_image::model;
use belay_image::name::Name;
use belay_kernel::proc::{self, Status};
use belay_kernel::{domain, kcmp, ptrace};
use std::collections::BTreeSet;
use std::path::Path;

const RLIMITS: u32 = 16;
/// In what PR_GET_THP_DISABLE says (Linux 6.18).
const THP_EXCEPT_ADVISED: i32 = 2;

impl Draft {
    /// Joins everything into the model; its rings follow, its threads that live when it has gone on, and its mappings when
    /// the snapshot is written. Of its tasks `process` has the first one only at this moment, see
    /// [`Suspended::each_task_while`]; `pending` are the signals that are pending for all of it. Asks the tracer of
    /// nothing: any thread may do it.
    pub(crate) fn finish(
        &mut self,
        process: &Process,
        table: &ProcessTable,
        mut pending: Vec<Vec<u8>>,
    ) -> Result<model::Process, CaptureError> {
        let (pid, task) = (self.pid, self.task);
        let main = (task != pid)
            .then(|| threads::exited_main(pid, &self.stat.comm))
            .transpose()?;
        for (timer, slot) in self.timers.iter_mut().zip(&table.timers) {
            timer.interval_ns = nanoseconds(slot.interval);
            timer.value_ns = nanoseconds(slot.value);
            timer.overrun = slot.overrun;
            // Whom it was to signal has ended: it signals nobody, and the kernel makes no such timer.
            if timer.notify & libc::SIGEV_THREAD_ID != 0 && !Path::new(&format!("/proc/{task}/task/{}", timer.tid)).exists() {
                timer.notify = libc::SIGEV_NONE;
            }
        }
        let s = &self.stat;
        // One that SIGSTOP is about to stop has perhaps taken the signal while it ran code of ours: it comes back
        // stopped, of which nobody has been told.
        let stops = process.tasks.iter().any(|t| t.deferred == libc::SIGSTOP) || pending.iter().any(|i| threads::is_stop(i));
        pending.retain(|info| !threads::is_stop(info));
        let about_to_stop = (stops && process.group_stop.is_none()).then_some(libc::SIGSTOP);
        Ok(model::Process {
            pid,
            ppid: process.ppid,
            pgid: s.pgrp,
            sid: s.session,
            tty: s.tty_nr,
            started: s.starttime,
            tty_pgrp: s.tpgid,
            state: process
                .group_stop
                .or(about_to_stop)
                .map_or(model::ProcessState::Running, model::ProcessState::Stopped),
            stop_untold: about_to_stop.is_some(),
            continue_untold: false,
            exit_signal: s.exit_signal,
            comm: s.comm.clone().into(),
            exe: proc::link(task, "exe").into(),
            exe_identity: None,
            cwd: proc::link(task, "cwd").into(),
            root: self.root.clone().into(),
            umask: threads::umask(&self.status),
            personality: hex_file(task, "personality").unwrap_or(0),
            user_namespace: namespaces::shown(pid, "user"),
            pid_namespace: namespaces::shown(pid, "pid"),
            ipc_namespace: namespaces::shown(pid, "ipc"),
            creds: rights::credentials(&self.status),
            rlimits: (0..RLIMITS).map(|r| limits::own(process, r)).collect(),
            oom_score_adj: oom_score_adj(pid),
            coredump_filter: hex_file(task, "coredump_filter").and_then(|f| u32::try_from(f).ok()),
            session_nice: None,
            prctl: prctl(table),
            sigactions: table.sigactions.iter().map(sigaction).collect(),
            pending,
            itimers: table.itimers.map(itimer),
            posix_timers: self.timers.clone(),
            membarrier: table.membarrier.max(0).unsigned_abs(),
            shares_mm_with: process.guest.map_or(0, |g| g.first),
            shares_handlers: process.guest.is_some_and(|g| g.handlers),
            shares_fs_with: if shares(process, kcmp::Object::Fs) { process.ppid } else { 0 },
            own_clocks: namespaces::has_own_clocks(task),
            vdso_frames: Vec::new(),
            mm: self.mm(process, table),
            // Of the first one is known whether there is any; the others follow.
            segments: (table.segment_bytes > 0).then_some(table.segment).into_iter().collect(),
            keys: u16::try_from(table.keys).unwrap_or(0),
            left_out: None,
            datasets: access::declared(task, &self.maps),
            point: None,
            placements: Vec::new(),
            vmas: Vec::new(),
            rings: Vec::new(),
            threads: main.into_iter().collect(),
        })
    }

    /// Where the parts of its memory lie.
    fn mm(&self, process: &Process, table: &ProcessTable) -> model::Mm {
        let auxv = proc::read_whole(format!("/proc/{}/auxv", self.task)).unwrap_or_default();
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
        let s = &self.stat;
        model::Mm {
            mlockall: if process.guest.is_some() {
                0
            } else {
                mlock::future(table.future_locks)
            },
            start_code: s.start_code,
            end_code: s.end_code,
            start_data: s.start_data,
            end_data: s.end_data,
            start_brk: s.start_brk,
            brk: table.brk,
            start_stack: s.start_stack,
            arg_start: s.arg_start,
            arg_end: s.arg_end,
            env_start: s.env_start,
            env_end: s.env_end,
            auxv: auxv.chunks_exact(8).map(word).collect(),
        }
    }
}

fn prctl(table: &ProcessTable) -> model::ProcessPrctl {
    model::ProcessPrctl {
        dumpable: table.dumpable,
        child_subreaper: table.child_subreaper > 0,
        keepcaps: table.keepcaps > 0,
        thp_disable: table.thp_disable > 0,
        thp_advised: table.thp_disable & THP_EXCEPT_ADVISED != 0,
        merge: table.merge > 0,
        timer_ids: table.timer_ids > 0,
        // The first thread tells.
        securebits: 0,
        mdwe: table.mdwe.max(0).unsigned_abs(),
    }
}

fn sigaction(action: &KernelSigaction) -> model::SigAction {
    model::SigAction {
        handler: action.handler,
        flags: action.flags,
        restorer: action.restorer,
        mask: action.mask,
    }
}

/// Interval and value, each in seconds and microseconds.
fn itimer([interval_s, interval_us, value_s, value_us]: [i64; 4]) -> model::ItimerValue {
    let micros = |s: i64, us: i64| s.unsigned_abs() * 1_000_000 + us.unsigned_abs();
    model::ItimerValue {
        interval_us: micros(interval_s, interval_us),
        value_us: micros(value_s, value_us),
    }
}

fn oom_score_adj(pid: i32) -> i32 {
    let text = proc::text(format!("/proc/{pid}/oom_score_adj")).ok();
    text.and_then(|t| t.trim().parse().ok()).unwrap_or(0)
}

/// Whether the process has an object in common with its parent.
fn shares(process: &Process, object: kcmp::Object) -> bool {
    kcmp::compare(process.task(), process.ppid, object).is_ok_and(|o| o.is_eq())
}

/// Refuses, before anything is injected, what cannot be restored. What `libraries` take care of in a process, can.
pub(crate) fn check_supported(
    job: &Suspended,
    (drafts, seen): (&[Draft], &[Vec<Seen>]),
    (options, grouped): (&Options, bool),
    libraries: &dyn Fn(i32) -> Vec<String>,
) -> Result<(), CaptureError> {
    // Only the root of several nodes has stand-ins.
    let of_part = grouped && options.standins.is_none();
    let own = proc::link(std::process::id().cast_signed(), "exe");
    if let Some(standins) = &options.standins {
        let programs: Vec<_> = drafts
            .iter()
            .map(|d| (d.pid, d.stat.ppid, d.exe.as_path(), d.stat.comm.as_os_str()))
            .collect();
        if let Some((pid, why)) = remote::starting(&programs, &own, standins) {
            return Err(CaptureError::refuse_for_now(pid, command_line(pid).join(" "), why));
        }
    }
    let agent = std::process::id().cast_signed();
    let own_status = Status::read(agent).map_err(|e| CaptureError::system("read the agent's own status", e))?;
    let depth = own_status.list("NSpid").len().max(1);
    let filters = rights::Filters::inherited(&own_status, options.led);
    let domain = domain::of(agent);
    let mut refusals = Vec::new();
    let mut refuse = |pid: i32, object: &str, reason: &str| {
        refusals.push(belay_plugins::Refusal {
            pid,
            object: object.to_owned(),
            reason: reason.to_owned(),
            passing: false,
            damage: false,
        });
    };
    for ((process, draft), seen) in job.processes.iter().zip(drafts).zip(seen) {
        let pid = process.pid;
        if draft.root != Path::new("/") && shares(process, kcmp::Object::Fs) {
            let reason = format!(
                "shares its directories with process {} (CLONE_FS) and has another root",
                process.ppid
            );
            refuse(pid, &draft.stat.comm.to_string_lossy(), &reason);
        }
        if let Some(reason) = rights::unsupported(&draft.status, filters) {
            refuse(pid, &draft.stat.comm.to_string_lossy(), reason);
        }
        for (task, seen) in process.tasks.iter().zip(seen) {
            let rights = seen.rights.as_deref().and_then(|status| rights::unsupported(status, filters));
            if let Some(reason) = rights.or(seen.unsupported) {
                refuse(pid, &format!("thread {}", task.tid), reason);
            }
        }
        if draft.status.list("NSpid").len() > depth {
            refuse(
                pid,
                &draft.stat.comm.to_string_lossy(),
                "has made a PID namespace of its own (a container or sandbox)",
            );
        }
        let own_domain = domain
            .as_ref()
            .and_then(|all| domain::of(pid).filter(|own| !domain::are_alike(own, all)));
        if let Some(label) = own_domain {
            let reason = format!(
                "is in a security domain of its own ({}), which a restart cannot put it into; start it outside of the job",
                String::from_utf8_lossy(&label)
            );
            refuse(pid, &draft.stat.comm.to_string_lossy(), &reason);
        }
        // A stand-in for a remote shell is this very program; what it leads to is a node of the job.
        if let Some((what, why)) = remote::part(&draft.exe, &command_line(pid), of_part).filter(|_| draft.exe != own) {
            refuse(pid, &what, why);
        }
        for (name, what) in mappings::unsupported(&draft.maps, &libraries(pid)) {
            refuse(pid, &name, what);
        }
    }
    if refusals.is_empty() {
        Ok(())
    } else {
        Err(CaptureError::Refused(refusals))
    }
}

/// What is to be said of processes of a job on several hosts: see [`remote::aside`].
pub(crate) fn remote_shells(drafts: &[Draft]) -> Vec<String> {
    let own = proc::link(std::process::id().cast_signed(), "exe");
    let others = drafts.iter().filter(|d| d.exe != own);
    let said = others.filter_map(|d| Some((d.pid, remote::aside(&d.exe, &command_line(d.pid))?)));
    said.map(|(pid, what)| format!("process {pid}: {what}")).collect()
}

fn command_line(pid: i32) -> Vec<String> {
    let raw = proc::read_whole(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = raw.split(|b| *b == 0).filter(|w| !w.is_empty());
    words.map(|w| String::from_utf8_lossy(w).into_owned()).collect()
}

/// The model of a process that has ended.
pub(crate) fn zombie(z: Zombie) -> Option<model::Process> {
    let s = proc::stat(z.pid).ok()?;
    Some(model::Process {
        pid: z.pid,
        ppid: s.ppid,
        pgid: s.pgrp,
        sid: s.session,
        tty: 0,
        started: 0,
        tty_pgrp: -1,
        state: model::ProcessState::Zombie(s.exit_code),
        stop_untold: false,
        continue_untold: false,
        exit_signal: s.exit_signal,
        comm: s.comm.into(),
        exe: Name::default(),
        exe_identity: None,
        cwd: Name::default(),
        root: Name::default(),
        umask: 0,
        personality: 0,
        user_namespace: 0,
        pid_namespace: 0,
        ipc_namespace: 0,
        creds: Status::read(z.pid).map_or_else(|_| model::Credentials::default(), |s| rights::credentials(&s)),
        rlimits: Vec::new(),
        oom_score_adj: 0,
        coredump_filter: None,
        session_nice: None,
        prctl: model::ProcessPrctl::default(),
        sigactions: Vec::new(),
        pending: Vec::new(),
        itimers: Default::default(),
        posix_timers: Vec::new(),
        membarrier: 0,
        shares_mm_with: 0,
        shares_handlers: false,
        shares_fs_with: 0,
        own_clocks: false,
        vdso_frames: Vec::new(),
        mm: model::Mm::default(),
        segments: Vec::new(),
        keys: 0,
        left_out: None,
        datasets: Vec::new(),
        point: None,
        placements: Vec::new(),
        vmas: Vec::new(),
        rings: Vec::new(),
        threads: Vec::new(),
    })
}

fn nanoseconds(t: [i64; 2]) -> u64 {
    t[0].unsigned_abs() * 1_000_000_000 + t[1].unsigned_abs()
}

fn hex_file(pid: i32, name: &str) -> Option<u64> {
    let text = proc::text(format!("/proc/{pid}/{name}")).ok()?;
    u64::from_str_radix(text.trim(), 16).ok()
}

/// Notes of which stopped processes their parents have not been told yet that they are. A parent of the job is asked to
/// look, in a way that leaves it untold.
pub(crate) fn untold_stops(job: &mut Suspended, areas: &[Area], processes: &mut [model::Process]) -> Result<(), CaptureError> {
    const FLAGS: i32 = libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    let stopped = processes
        .iter_mut()
        .filter(|p| matches!(p.state, model::ProcessState::Stopped(_)) && !p.stop_untold);
    for child in stopped {
        let Some(parent) = job.processes.iter().position(|p| p.pid == child.ppid) else {
            continue;
        };
        let area = &areas[parent];
        let pid = u64::from(child.pid.unsigned_abs());
        let args = [libc::P_PID.into(), pid, area.scratch(), FLAGS as u64, 0, 0];
        match on_main(&mut job.processes[parent], libc::SYS_waitid, args) {
            // `si_signo` is the first word: none where there is nothing to tell.
            Ok(_) => child.stop_untold = area.get_scratch(1)? != [0],
            // Whoever waits for it is another.
            Err(CaptureError::Call { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Notes of which processes their parents, of the job too, have not been told yet that they have been continued. A
/// tracer is told the same, and leaves it untold.
pub(crate) fn untold_continuations(processes: &mut [model::Process]) {
    let parents: BTreeSet<i32> = processes.iter().map(|p| p.pid).collect();
    let running = processes.iter_mut().filter(|p| p.state == model::ProcessState::Running);
    for child in running.filter(|p| parents.contains(&p.ppid)) {
        child.continue_untold = ptrace::was_continued(child.pid);
    }
}

/// Notes the nice value of each session with the first process of it. That of the agent's own session is not the job's.
pub(crate) fn tell_sessions(processes: &mut [model::Process]) {
    let own = proc::stat(std::process::id().cast_signed()).map_or(0, |s| s.session);
    let mut seen = BTreeSet::from([own]);
    for p in processes
        .iter_mut()
        .filter(|p| !matches!(p.state, model::ProcessState::Zombie(_)))
    {
        if seen.insert(p.sid) {
            p.session_nice = autogroup(p.pid);
        }
    }
}

/// What `/proc/PID/autogroup` says: `/autogroup-13 nice 0`. Not every kernel has it.
fn autogroup(pid: i32) -> Option<i32> {
    let text = proc::text(format!("/proc/{pid}/autogroup")).ok()?;
    text.rsplit_once(' ')?.1.trim().parse().ok()
}
