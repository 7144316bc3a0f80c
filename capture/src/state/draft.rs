//! What has been read of a process before anything has run in it.

use crate::memory::held;
use crate::memory::mappings;
use crate::memory::mlock::Locks;
use crate::stop::stopped::Process;
use crate::CaptureError;
use belay_image::model::{self, ObjectId};
use belay_kernel::pagemap::Pagemap;
use belay_kernel::pidfd;
use belay_kernel::proc::{self, Map, Stat, Status};
use belay_plugins::LeftGpus;
use belay_plugins::ProcessView;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

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
    /// Mappings that the child does not get although they have `VmFlags` of interest, with these: those of explicit huge
    /// pages, and of programs that are being written.
    pub(crate) huge: Vec<Map>,
    /// What it has locked; known once the injected program has told.
    pub(crate) locks: Locks,
    /// The anonymous mappings that hold data; known once [`Draft::look_for_data`] has looked.
    pub(crate) with_data: Vec<(u64, u64)>,
    pub(crate) timers: Vec<model::PosixTimer>,
    /// Devices may write to its memory; known once the gates have told.
    pub(crate) by_devices: bool,
}

impl Draft {
    /// A size in `/proc/PID/status`, KiB.
    pub(crate) fn kib(&self, key: &str) -> u64 {
        self.status.kib(key)
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
        let is_apart = |m: &Map| mappings::huge(m).is_some() || mappings::writes_program(m);
        let huge = if maps.iter().any(is_apart) {
            let all = proc::smaps(task).map_err(|e| fail("smaps", e))?;
            all.into_iter().filter(is_apart).collect()
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
            exe: held::executable(task),
            timers: posix_timers(task),
            by_devices: false,
        })
    }

    /// Looks which anonymous mappings hold data: the copy must have some of each.
    pub(crate) fn look_for_data(&mut self) -> Result<(), CaptureError> {
        let anonymous = self
            .maps
            .iter()
            .filter(|m| m.ino == 0 && mappings::pages(m) != mappings::Pages::None);
        let anonymous: Vec<_> = anonymous.map(|m| (m.start, m.end)).collect();
        let data = Pagemap::open(self.task).and_then(|mut pagemap| pagemap.with_data(&anonymous));
        let data = data.map_err(|e| CaptureError::system(format!("read the page table of process {}", self.pid), e))?;
        let with_data = anonymous.into_iter().zip(data).filter(|(_, data)| *data);
        self.with_data = with_data.map(|(range, _)| range).collect();
        Ok(())
    }

    /// Notes which mappings of files without a name are restored as such: those of `files`.
    pub(crate) fn restore(&mut self, files: &BTreeSet<ObjectId>) {
        let nameless = self.maps.iter_mut().filter(|m| mappings::is_nameless(m));
        nameless.for_each(|m| m.restored = files.contains(&mappings::object(m)));
    }

    /// Whether it has rings of native asynchronous I/O.
    pub(crate) fn has_rings(&self) -> bool {
        self.maps.iter().any(mappings::is_ring)
    }

    /// Identifiers of the POSIX timers.
    pub(crate) fn timer_ids(&self) -> Vec<i32> {
        self.timers.iter().map(|t| t.id).collect()
    }

    /// The process as the plugins see it; `apart` are threads of it that have another descriptor table, `standing` the
    /// working directories that are threads' own, `own` says that its memory is not another's, which tells the
    /// mappings; `libraries` in it take part, and it has left these GPUs.
    pub(crate) fn view(
        &self,
        (apart, standing): (Vec<i32>, Vec<PathBuf>),
        own: bool,
        (libraries, left_gpus): (Vec<String>, Option<LeftGpus>),
    ) -> Result<ProcessView, CaptureError> {
        let pidfd = pidfd::open_by(self.pid, self.task);
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
                mappings::shared_mappings(&self.maps)
            } else {
                Vec::new()
            },
            private: if own { mappings::nameless(&self.maps) } else { Vec::new() },
            libraries,
            left_gpus,
        })
    }

    /// Whether the snapshot child can open the agent's descriptors through `/proc`: same root, same user and group, and
    /// no capability less.
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
