//! Namespaces that a process of the job has made or entered itself: a restart has none but the job's, and other files,
//! addresses or users would be found there.

use crate::state::draft::Draft;
use crate::CaptureError;
use belay_kernel::dir::{read_link_at, Dir};
use belay_kernel::proc::Status;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Names in `/proc/PID/ns`, and for people. PID namespaces are noticed earlier; those of control groups and clocks
/// change nothing that a restart keeps.
const KINDS: [(&str, &str); 5] = [
    ("mnt", "mount"),
    ("net", "network"),
    ("uts", "host name (UTS)"),
    ("ipc", "IPC"),
    ("user", "user"),
];

/// Of these, those that a single thread can enter; its directories, with which it must begin for a mount namespace, are
/// looked at anyway.
const OF_THREADS: [&str; 3] = ["net", "uts", "ipc"];
const CAP_SYS_ADMIN: u64 = 1 << 21;

/// The time namespace of the machine, which always has this number (`PROC_TIME_INIT_INO`).
const MACHINE_TIME: &str = "time:[4026531834]";

/// The same as [`check`] where one is in another user namespace, which says who may look into whom: before anything is
/// asked about that.
pub(crate) fn check_users(drafts: &[Draft]) -> Result<(), CaptureError> {
    let own = namespace(own(), "user");
    let apart = |d: &Draft| namespace(d.task, "user").is_some_and(|n| own.as_ref().is_some_and(|own| n != *own));
    match drafts.iter().any(apart) {
        true => check(drafts),
        false => Ok(()),
    }
}

/// Refuses processes in other namespaces than the agent's, which are the job's.
pub(crate) fn check(drafts: &[Draft]) -> Result<(), CaptureError> {
    for (kind, name) in KINDS {
        let own = namespace(own(), kind);
        // One that cannot be looked at is not there any more.
        let apart = |d: &&Draft| namespace(d.task, kind).is_some_and(|n| own.as_ref().is_some_and(|own| n != *own));
        if let Some(draft) = drafts.iter().find(apart) {
            let reason = format!(
                "is in a {name} namespace of its own (unshare, a container or sandbox), which cannot be restored; launch belay inside it"
            );
            return Err(CaptureError::refuse(draft.pid, draft.stat.comm.to_string_lossy(), reason));
        }
    }
    Ok(())
}

/// Whether the clocks of the job are those of the machine with something added: it is in a time namespace, as restarted jobs are.
pub(crate) fn shifts_clocks() -> bool {
    namespace(own(), "time").is_some_and(|n| n != Path::new(MACHINE_TIME))
}

/// Whether process `pid` is in another time namespace than the agent.
pub(crate) fn has_own_clocks(pid: i32) -> bool {
    namespace(pid, "time").is_some_and(|n| namespace(own(), "time").is_some_and(|own| n != own))
}

/// The agent's namespaces, of those that a single thread can enter, and that of its processes, which is that of the job's.
#[derive(Debug)]
pub(crate) struct OfThreads {
    entered: [Option<PathBuf>; OF_THREADS.len()],
    processes: Option<PathBuf>,
}

impl OfThreads {
    /// `None` where no thread of the job can have entered another one: that takes CAP_SYS_ADMIN, which none has got
    /// where the agent has not, or else a user namespace of its own, which only a process with one thread can enter.
    pub(crate) fn own() -> Option<Self> {
        let held = Status::read(own()).ok().and_then(|s| s.hex("CapPrm")).unwrap_or(u64::MAX);
        (held & CAP_SYS_ADMIN != 0).then(|| Self {
            entered: OF_THREADS.map(|kind| namespace(own(), kind)),
            processes: namespace(own(), "pid"),
        })
    }

    /// Why the thread whose directory in `/proc` is `task` cannot be restored where it is, or where what it makes will
    /// be. Where the `first` one of a process is, is looked at with the process.
    pub(crate) fn unsupported(&self, task: &Dir, first: bool) -> Option<&'static str> {
        let of = |kind: &str| read_link_at(task, format!("ns/{kind}").as_ref()).ok();
        let apart = |(kind, own): (&str, &Option<PathBuf>)| of(kind).is_some_and(|n| own.as_ref().is_some_and(|own| n != *own));
        if !first && OF_THREADS.into_iter().zip(&self.entered).any(apart) {
            return Some("is in a namespace of its own (unshare, setns), which cannot be restored; launch belay inside it");
        }
        // What nobody has entered yet cannot be looked at.
        let processes = self.processes.is_some() && of("pid_for_children") != self.processes;
        let clocks = || of("time_for_children").is_some_and(|made| of("time").is_some_and(|own| made != own));
        (processes || clocks())
            .then_some("has made a namespace for the children that it will have (unshare), which cannot be restored")
    }
}

fn own() -> i32 {
    std::process::id().cast_signed()
}

fn namespace(pid: i32, kind: &str) -> Option<PathBuf> {
    // Not that of `/proc/PID/ns`: upon its names a restart may show others.
    std::fs::read_link(format!("/proc/{pid}/task/{pid}/ns/{kind}")).ok()
}

/// Number of the namespace of this kind that process `pid` is shown; 0 where nothing can be looked at.
pub(crate) fn shown(pid: i32, kind: &str) -> u64 {
    std::fs::metadata(format!("/proc/{pid}/ns/{kind}")).map_or(0, |m| m.ino())
}
