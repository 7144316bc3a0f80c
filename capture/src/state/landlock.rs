//! Landlock domains. The kernel shows them nowhere, but a thread in one may not look into a process outside of it, and
//! `kcmp(2)` tells whether it may. So every thread that could be in a domain of its own compares a *witness* with
//! itself: a process that is in no domain but the agent's, and that the thread may look into as far as users, groups
//! and capabilities go. Then nothing else forbids it.
//!
//! The agent is the witness of threads that have its users and no capability less. For others one is made: a process
//! with the thread's user and group that can do nothing, and does nothing.

use crate::state::draft::Draft;
use crate::state::threads::Seen;
use crate::state::witness::Witness;
use crate::stop::stopped::Suspended;
use crate::CaptureError;
use belay_abi::inject::ThreadTable;
use belay_kernel::proc::Status;
use rustix::process::{dumpable_behavior, DumpableBehavior};
use std::collections::BTreeMap;
use std::io;

const CAP_SYS_PTRACE: u64 = 1 << 19;
const CAP_SYS_ADMIN: u64 = 1 << 21;
const CREATE_RULESET: libc::c_long = 444;
const VERSION: u32 = 1;

/// Who must be looked into, by process and thread; 0 where nobody need be.
#[derive(Debug, Default)]
pub(crate) struct Witnesses {
    pub(crate) of: Vec<Vec<i32>>,
    /// Those that were made, by user and group.
    made: BTreeMap<(u32, u32), Witness>,
}

impl Witnesses {
    /// Finds those of all threads.
    pub(crate) fn find(job: &Suspended, drafts: &[Draft], seen: &[Vec<Seen>]) -> Result<Self, CaptureError> {
        let agent = Agent::own()?;
        let mut out = Self::default();
        for ((process, draft), seen) in job.processes.iter().zip(drafts).zip(seen) {
            let statuses = seen.iter().map(|seen| seen.rights.as_deref().unwrap_or(&draft.status));
            let of = out.witnesses(&agent, statuses.take(process.tasks.len()));
            out.of
                .push(of.map_err(|e| CaptureError::system("look for Landlock domains: make a process for that", e))?);
        }
        Ok(out)
    }

    /// Threads that may do the same have one status in common.
    fn witnesses<'a>(&mut self, agent: &Agent, threads: impl Iterator<Item = &'a Status>) -> io::Result<Vec<i32>> {
        let mut last: Option<(&Status, i32)> = None;
        let witness = |status: &'a Status| {
            let witness = match last {
                Some((before, witness)) if std::ptr::eq(before, status) => witness,
                _ => self.witness(agent, status)?,
            };
            last = Some((status, witness));
            Ok(witness)
        };
        threads.map(witness).collect()
    }

    fn witness(&mut self, agent: &Agent, thread: &Status) -> io::Result<i32> {
        if !agent.exists || !agent.may_be_apart(thread) {
            return Ok(0);
        }
        if agent.can_be_seen_by(thread) {
            return Ok(std::process::id().cast_signed());
        }
        let (uid, gid) = (id(thread, "Uid", 0), id(thread, "Gid", 0));
        if let Some(witness) = self.made.get(&(uid, gid)) {
            return Ok(witness.pid());
        }
        let witness = Witness::make(uid, gid)?;
        let pid = witness.pid();
        self.made.insert((uid, gid), witness);
        Ok(pid)
    }

    /// Refuses threads that could not look into their witness.
    pub(crate) fn check(&self, job: &Suspended, tables: &[Vec<ThreadTable>]) -> Result<(), CaptureError> {
        for ((process, witnesses), tables) in job.processes.iter().zip(&self.of).zip(tables) {
            for ((task, witness), table) in process.tasks.iter().zip(witnesses).zip(tables) {
                match table.blind {
                    0 => {}
                    libc::EPERM | libc::EACCES => {
                        let reason = "is in a Landlock domain, which cannot be saved; start it without its sandbox";
                        return Err(CaptureError::refuse(process.pid, format!("thread {}", task.tid), reason));
                    }
                    error => {
                        let reason = format!("process {witness}: {}", io::Error::from_raw_os_error(error));
                        return Err(CaptureError::failed("look for Landlock domains", reason));
                    }
                }
            }
        }
        Ok(())
    }
}

/// What the agent is to threads of the job.
#[derive(Debug)]
struct Agent {
    status: Status,
    /// Whether processes of its user may look into it.
    dumpable: bool,
    /// Whether the kernel has Landlock at all.
    exists: bool,
}

impl Agent {
    fn own() -> Result<Self, CaptureError> {
        let status = Status::read(std::process::id().cast_signed());
        let dumpable = dumpable_behavior().is_ok_and(|how| how == DumpableBehavior::Dumpable);
        // SAFETY: without a structure this call tells its version only.
        let version = unsafe { libc::syscall(CREATE_RULESET, std::ptr::null::<u8>(), 0, VERSION) };
        Ok(Self {
            status: status.map_err(|e| CaptureError::system("read the agent's own status", e))?,
            dumpable,
            exists: version > 0,
        })
    }

    /// Whether a thread can have entered a domain that the agent is not in: that takes `no_new_privs`, which nobody
    /// loses, or a capability.
    fn may_be_apart(&self, thread: &Status) -> bool {
        let held = self.status.hex("CapPrm").unwrap_or(u64::MAX);
        thread.text("NoNewPrivs") != Some("0") || held & CAP_SYS_ADMIN != 0
    }

    /// Whether only a domain keeps a thread from looking into the agent (`ptrace(2)`, "Ptrace access mode checking").
    fn can_be_seen_by(&self, thread: &Status) -> bool {
        let [permitted, effective] = ["CapPrm", "CapEff"].map(|key| thread.hex(key).unwrap_or(0));
        let same = |key: &str| (0..3).all(|i| id(&self.status, key, i) == id(thread, key, 0));
        let held = self.status.hex("CapPrm").unwrap_or(u64::MAX);
        effective & CAP_SYS_PTRACE != 0 || (self.dumpable && same("Uid") && same("Gid") && held & !permitted == 0)
    }
}

/// Number `which` of real, effective and saved user or group.
fn id(status: &Status, key: &str, which: usize) -> u32 {
    let ids = status.list(key);
    ids.get(which).and_then(|id| u32::try_from(*id).ok()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(uid: u32, permitted: u64, effective: u64, privileges: u8) -> Status {
        let text = format!(
            "Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapPrm:\t{permitted:x}\nCapEff:\t{effective:x}\nNoNewPrivs:\t{privileges}\n"
        );
        Status::parse(text.as_bytes())
    }

    #[test]
    fn the_agent_is_a_witness_only_where_nothing_else_keeps_a_thread_from_it() {
        let agent = |uid, held| Agent {
            status: status(uid, held, held, 0),
            dumpable: true,
            exists: true,
        };
        let user = agent(1000, 0);
        assert!(user.can_be_seen_by(&status(1000, 0, 0, 1)));
        assert!(!user.can_be_seen_by(&status(1001, 0, 0, 1)));
        assert!(!user.may_be_apart(&status(1000, 0, 0, 0)) && user.may_be_apart(&status(1000, 0, 0, 1)));
        let root = agent(0, CAP_SYS_ADMIN | CAP_SYS_PTRACE);
        assert!(root.may_be_apart(&status(0, 0, 0, 0)));
        assert!(!root.can_be_seen_by(&status(0, CAP_SYS_ADMIN, CAP_SYS_ADMIN, 0)));
        assert!(root.can_be_seen_by(&status(7, CAP_SYS_PTRACE, CAP_SYS_PTRACE, 0)));
        let hidden = Agent { dumpable: false, ..user };
        assert!(!hidden.can_be_seen_by(&status(1000, 0, 0, 1)));
    }
}
