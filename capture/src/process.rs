//! One process: what `/proc` and system calls by the agent tell, joined with what the process told about itself.

use crate::code;
use crate::inject::{on_main, Area};
use crate::memory;
use crate::mlock::{self, Locks};
use crate::namespaces;
use crate::remote;
use crate::rights;
use crate::suspend::{Process, Suspended, Zombie};
use crate::threads::{self, Seen};
use crate::{CaptureError, Options};
use belay_abi::inject::ProcessTable;
use belay_image::model::{self, ObjectId};
use belay_image::name::Name;
use belay_kernel::pagemap::Pagemap;
use belay_kernel::proc::{self, Map, Stat, Status};
use belay_kernel::{kcmp, pidfd, ptrace};
use belay_plugins::ProcessView;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const RLIMITS: u32 = 16;
/// In what PR_GET_THP_DISABLE says (Linux 6.18).
const THP_EXCEPT_ADVISED: i32 = 2;

/// What has been read of a process so far.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) pid: i32,
    /// A thread that lives; usually the main thread.
    pub(crate) task: i32,
    pub(crate) stat: Stat,
    pub(crate) status: Status,
    pub(crate) maps: Vec<Map>,
    pub(crate) root: PathBuf,
    /// The program's file.
    pub(crate) exe: PathBuf,
    /// Mappings of explicit huge pages, with their `VmFlags`.
    pub(crate) huge: Vec<Map>,
    /// What it has locked; known once the injected program has told.
    pub(crate) locks: Locks,
    /// The anonymous mappings that hold data; known once [`Draft::look_for_data`] has looked.
    pub(crate) with_data: Vec<(u64, u64)>,
    timers: Vec<model::PosixTimer>,
}

impl Draft {
    /// A size in `/proc/PID/status`, KiB.
    pub(crate) fn kib(&self, key: &str) -> u64 {
        self.status.list(key).first().map_or(0, |v| v.unsigned_abs())
    }

    /// Reads what can be read before anything runs in the process.
    pub(crate) fn read(process: &Process) -> Result<Self, CaptureError> {
        let (pid, task) = (process.pid, process.task());
        let fail = |what: &str, e: std::io::Error| CaptureError::system(format!("read {what} of process {pid}"), e);
        let mut stat = proc::stat(task).map_err(|e| fail("stat", e))?;
        if task != pid {
            let main = proc::stat(pid).map_err(|e| fail("stat", e))?;
            (stat.comm, stat.exit_signal) = (main.comm, main.exit_signal);
        }
        let maps = proc::maps(task).map_err(|e| fail("maps", e))?;
        let huge = if maps.iter().any(|m| memory::huge(m).is_some()) {
            let all = proc::smaps(task).map_err(|e| fail("smaps", e))?;
            all.into_iter().filter(|m| memory::huge(m).is_some()).collect()
        } else {
            Vec::new()
        };
        Ok(Self {
            pid,
            task,
            stat,
            status: Status::read(task).map_err(|e| fail("status", e))?,
            maps,
            huge,
            locks: Locks::default(),
            with_data: Vec::new(),
            root: proc::link(task, "root"),
            exe: code::executable(task),
            timers: posix_timers(task),
        })
    }

    /// Looks which anonymous mappings hold data: the copy must have some of each.
    pub(crate) fn look_for_data(&mut self) -> Result<(), CaptureError> {
        let anonymous = self
            .maps
            .iter()
            .filter(|m| m.ino == 0 && memory::pages(m) != memory::Pages::None);
        let anonymous: Vec<_> = anonymous.map(|m| (m.start, m.end)).collect();
        let data = Pagemap::open(self.task).and_then(|mut pagemap| pagemap.with_data(&anonymous));
        let data = data.map_err(|e| CaptureError::system(format!("read the page table of process {}", self.pid), e))?;
        let with_data = anonymous.into_iter().zip(data).filter(|(_, data)| *data);
        self.with_data = with_data.map(|(range, _)| range).collect();
        Ok(())
    }

    /// Notes which mappings of files without a name are restored as such: those of `files`.
    pub(crate) fn restore(&mut self, files: &BTreeSet<ObjectId>) {
        let nameless = self.maps.iter_mut().filter(|m| memory::is_nameless(m));
        nameless.for_each(|m| m.restored = files.contains(&memory::object(m)));
    }

    /// Whether it has rings of native asynchronous I/O.
    pub(crate) fn has_rings(&self) -> bool {
        self.maps.iter().any(memory::is_ring)
    }

    /// Identifiers of the POSIX timers.
    pub(crate) fn timer_ids(&self) -> Vec<i32> {
        self.timers.iter().map(|t| t.id).collect()
    }

    /// The process as the plugins see it; `apart` are threads of it that have another descriptor table, `standing` the working directories that are threads' own, `own` says that its memory is not another's, which tells the mappings.
    pub(crate) fn view(&self, (apart, standing): (Vec<i32>, Vec<PathBuf>), own: bool) -> Result<ProcessView, CaptureError> {
        let pidfd = if self.task == self.pid {
            pidfd::open(self.pid)
        } else {
            // Needs Linux 6.9: the main thread has exited, and has no descriptors any more.
            pidfd::open_thread(self.task)
        };
        let pidfd = pidfd.map_err(|e| CaptureError::system(format!("open thread {} of process {}", self.task, self.pid), e))?;
        Ok(ProcessView {
            pid: self.pid,
            task: self.task,
            pidfd,
            apart,
            standing,
            exe: self.exe.clone(),
            stack: self.stat.start_stack,
            shared: if own {
                memory::shared_mappings(&self.maps)
            } else {
                Vec::new()
            },
            private: if own { memory::nameless(&self.maps) } else { Vec::new() },
        })
    }

    /// Whether the snapshot child can open the agent's descriptors through `/proc`: same root, same user and group, and no capability less.
    pub(crate) fn can_snapshot(&self) -> bool {
        const CAP_SYS_PTRACE: u64 = 1 << 19;
        let Ok(agent) = Status::read(std::process::id().cast_signed()) else {
            return false;
        };
        let capabilities = self.status.hex("CapEff").unwrap_or(0);
        let same = |key: &str| {
            self.status
                .list(key)
                .get(3)
                .is_some_and(|id| agent.list(key).iter().all(|a| a == id))
        };
        let enough = agent.hex("CapPrm").is_some_and(|held| held & !capabilities == 0);
        self.root == Path::new("/") && (capabilities & CAP_SYS_PTRACE != 0 || (same("Uid") && same("Gid") && enough))
    }

    /// Joins everything into the model; its rings follow, its threads that live when it has gone on, and its mappings when the snapshot is written.
    /// Of its tasks `process` has the first one only at this moment, see [`Suspended::each_task_while`].
    pub(crate) fn finish(&mut self, process: &Process, table: &ProcessTable) -> Result<model::Process, CaptureError> {
        let (pid, task) = (self.pid, self.task);
        let main = (task != pid)
            .then(|| threads::exited_main(pid, &self.stat.comm))
            .transpose()?;
        let auxv = proc::read_whole(format!("/proc/{task}/auxv")).unwrap_or_default();
        for (timer, slot) in self.timers.iter_mut().zip(&table.timers) {
            timer.interval_ns = nanoseconds(slot.interval);
            timer.value_ns = nanoseconds(slot.value);
            timer.overrun = slot.overrun;
        }
        let micros = |s: i64, us: i64| s.unsigned_abs() * 1_000_000 + us.unsigned_abs();
        let s = &self.stat;
        Ok(model::Process {
            pid,
            ppid: process.ppid,
            pgid: s.pgrp,
            sid: s.session,
            tty: s.tty_nr,
            tty_pgrp: s.tpgid,
            state: process
                .group_stop
                .map_or(model::ProcessState::Running, model::ProcessState::Stopped),
            stop_untold: false,
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
            rlimits: (0..RLIMITS).map(|r| rlimit(pid, r)).collect(),
            oom_score_adj: proc::text(format!("/proc/{pid}/oom_score_adj"))
                .ok()
                .and_then(|t| t.trim().parse().ok())
                .unwrap_or(0),
            coredump_filter: hex_file(task, "coredump_filter").and_then(|f| u32::try_from(f).ok()),
            session_nice: None,
            prctl: model::ProcessPrctl {
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
            },
            sigactions: table
                .sigactions
                .iter()
                .map(|a| model::SigAction {
                    handler: a.handler,
                    flags: a.flags,
                    restorer: a.restorer,
                    mask: a.mask,
                })
                .collect(),
            pending: threads::pending(pid, task, true)?,
            itimers: table.itimers.map(|t| model::ItimerValue {
                interval_us: micros(t[0], t[1]),
                value_us: micros(t[2], t[3]),
            }),
            posix_timers: self.timers.clone(),
            membarrier: table.membarrier.max(0).unsigned_abs(),
            shares_mm_with: process.guest.map_or(0, |g| g.first),
            shares_handlers: process.guest.is_some_and(|g| g.handlers),
            shares_fs_with: if shares(process, kcmp::Object::Fs) { process.ppid } else { 0 },
            own_clocks: namespaces::has_own_clocks(task),
            vdso_frames: Vec::new(),
            mm: model::Mm {
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
                auxv: auxv
                    .chunks_exact(8)
                    .map(|c| c.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b)))
                    .collect(),
            },
            // Of the first one is known whether there is any; the others follow.
            segments: (table.segment_bytes > 0).then_some(table.segment).into_iter().collect(),
            placements: Vec::new(),
            vmas: Vec::new(),
            rings: Vec::new(),
            threads: main.into_iter().collect(),
        })
    }
}

/// Whether the process has an object in common with its parent.
fn shares(process: &Process, object: kcmp::Object) -> bool {
    kcmp::compare(process.task(), process.ppid, object).is_ok_and(|o| o.is_eq())
}

/// Refuses, before anything is injected, what cannot be restored.
pub(crate) fn check_supported(
    job: &Suspended,
    (drafts, seen): (&[Draft], &[Vec<Seen>]),
    (options, grouped): (&Options, bool),
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
    let depth = belay_ns_depth();
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
        if let Some(reason) = rights::unsupported(&draft.status, options.led) {
            refuse(pid, &draft.stat.comm.to_string_lossy(), reason);
        }
        for (task, seen) in process.tasks.iter().zip(seen) {
            let rights = seen
                .rights
                .as_deref()
                .and_then(|status| rights::unsupported(status, options.led));
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
        // A stand-in for a remote shell is this very program; what it leads to is a node of the job.
        if let Some((what, why)) = remote::part(&draft.exe, &command_line(pid), of_part).filter(|_| draft.exe != own) {
            refuse(pid, &what, why);
        }
        for (name, what) in memory::unsupported(&draft.maps) {
            refuse(pid, &name, what);
        }
    }
    if refusals.is_empty() {
        Ok(())
    } else {
        Err(CaptureError::Refused(refusals))
    }
}

fn command_line(pid: i32) -> Vec<String> {
    let raw = proc::read_whole(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = raw.split(|b| *b == 0).filter(|w| !w.is_empty());
    words.map(|w| String::from_utf8_lossy(w).into_owned()).collect()
}

/// Number of PID namespaces that the agent's own `/proc` shows it in.
fn belay_ns_depth() -> usize {
    Status::read(std::process::id().cast_signed()).map_or(1, |s| s.list("NSpid").len().max(1))
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
        creds: model::Credentials::default(),
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

/// Notes of which stopped processes their parents have not been told yet that they are. A parent of the job is asked to look, in a way that leaves it untold.
pub(crate) fn untold_stops(job: &mut Suspended, areas: &[Area], processes: &mut [model::Process]) -> Result<(), CaptureError> {
    const FLAGS: i32 = libc::WSTOPPED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    let stopped = processes
        .iter_mut()
        .filter(|p| matches!(p.state, model::ProcessState::Stopped(_)));
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

/// Notes of which processes their parents, of the job too, have not been told yet that they have been continued. A tracer is told the same, and leaves it untold.
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

/// Soft and hard limit `resource` of a process.
pub(crate) fn rlimit(pid: i32, resource: u32) -> (u64, u64) {
    let mut r = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `r` is live; no new limit is given.
    unsafe { libc::prlimit(pid, resource, std::ptr::null(), &mut r) };
    (r.rlim_cur, r.rlim_max)
}

/// Sets soft and hard limit `resource` of a process; whether that was allowed.
pub(crate) fn set_rlimit(pid: i32, resource: u32, (rlim_cur, rlim_max): (u64, u64)) -> bool {
    let limits = libc::rlimit { rlim_cur, rlim_max };
    // SAFETY: `limits` is live, and only read.
    unsafe { libc::prlimit(pid, resource, &limits, std::ptr::null_mut()) == 0 }
}

/// Parses `/proc/PID/timers`.
fn posix_timers(pid: i32) -> Vec<model::PosixTimer> {
    let text = proc::text(format!("/proc/{pid}/timers")).unwrap_or_default();
    let mut out: Vec<model::PosixTimer> = Vec::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(": ") else { continue };
        if key == "ID" {
            let id = value.trim().parse().unwrap_or(-1);
            out.push(model::PosixTimer {
                id,
                clock: 0,
                notify: 0,
                signo: 0,
                value: 0,
                tid: 0,
                interval_ns: 0,
                value_ns: 0,
                overrun: 0,
            });
        }
        let Some(t) = out.last_mut() else { continue };
        match key {
            "signal" => {
                let (signo, sival) = value.split_once('/').unwrap_or((value, "0"));
                t.signo = signo.parse().unwrap_or(0);
                t.value = u64::from_str_radix(sival, 16).unwrap_or(0);
            }
            "notify" => {
                let (how, whom) = value.split_once('/').unwrap_or((value, ""));
                t.notify = match how {
                    "none" => libc::SIGEV_NONE,
                    "thread" => libc::SIGEV_THREAD,
                    _ => libc::SIGEV_SIGNAL,
                };
                if let Some(tid) = whom.strip_prefix("tid.").and_then(|w| w.parse().ok()) {
                    t.notify |= libc::SIGEV_THREAD_ID;
                    t.tid = tid;
                }
            }
            "ClockID" => t.clock = value.trim().parse().unwrap_or(0),
            _ => {}
        }
    }
    out
}
