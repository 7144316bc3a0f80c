//! Carries out the tree plan: every process makes its own children, then joins sessions and groups in lock step.
//!
//! ```text
//! stage 0  all processes exist              (setsid between the two halves of a process's children)
//! stage 1  leaders make their groups
//! stage 2  the others join
//! stage 3  lenders of a group join their own; temporary leaders end, zombies end
//! stage 4  descriptors and memory
//! stage 5  timers start, what only the restart needed is closed (in the restorer)
//! ```

use crate::companion::{self, Companion};
use crate::control::Shared;
use crate::fail::{ended, Outcome, RestartError};
use crate::kin::{self, Share, Unread};
use crate::later::Later;
use crate::shown::Shown;
use crate::tree::{self, Node, NodeId, Role, Tree, AGENT};
use crate::{lead, sys};
use belay_abi::restore::STATE_FAILED;
use belay_image::model::{Process, ProcessState, Thread};
use belay_kernel::task::Task;
use belay_kernel::{limits, missing, process, signals};
use belay_plugins::Rebuilder;
use belay_storage::chunk::Chunk;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::Ordering;

/// Slot state: exists.
pub(crate) const EXISTS: u32 = 1;
/// Slot state: leads its group.
pub(crate) const LEADS: u32 = 2;
/// Slot state: has joined its group.
pub(crate) const JOINED: u32 = 3;
/// Slot state: only processes of the job are left below it.
pub(crate) const SETTLED: u32 = 4;

/// Slot state: its descriptors are in place.
pub(crate) const INSTALLED: u32 = 5;

/// Slot state: its restorer and tables are in place.
pub(crate) const LOADED: u32 = 6;

/// The threads of a process that exist before its memory does.
pub(crate) type Companions = Vec<&'static Companion>;

/// What every process of the plan works with.
pub(crate) struct Forest<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) processes: &'a [Process],
    pub(crate) shared: &'a Shared,
    pub(crate) rebuilder: &'a Rebuilder,
    /// See [`companion::early`].
    pub(crate) early: &'a HashSet<i32>,
    /// What capabilities there are serve the restart alone.
    pub(crate) ordinary: bool,
    /// What processes ask about.
    pub(crate) questions: lead::Questions,
    /// The namespaces that they are shown, where that are others than they are in.
    pub(crate) shown: Option<&'a Shown>,
    /// What processes have in common, and where it is stored.
    pub(crate) kin: (&'a HashMap<i32, Share>, &'a HashMap<u32, Chunk>),
    /// What has been mapped for that.
    pub(crate) areas: kin::Areas,
    /// What of processes is filled when they run already, by PID.
    pub(crate) later: &'a HashMap<i32, Later>,
    /// Where the stacks of the programs begin.
    pub(crate) programs: &'a HashSet<u64>,
    /// What a process does when it is settled, with the threads that exist by then; does not return.
    pub(crate) settle: &'a dyn Fn(NodeId, &Process, &Companions) -> Outcome<std::convert::Infallible>,
}

impl Forest<'_> {
    /// In the agent: makes its children. (The agent's temporary group leader is not among them.)
    pub(crate) fn plant(&self) -> Outcome<()> {
        self.make(&self.tree.nodes[AGENT], &self.tree.nodes[AGENT].after)
    }

    /// In the agent: waits for temporary leaders that it made.
    pub(crate) fn reap(&self) -> Outcome<()> {
        self.reap_temporary(&self.tree.nodes[AGENT])
    }

    fn make(&self, parent: &Node, children: &[NodeId]) -> Outcome<()> {
        for id in children {
            let node = &self.tree.nodes[*id];
            let (mut flags, signal) = if node.sibling {
                (libc::CLONE_PARENT, 0)
            } else {
                (0, node.exit_signal)
            };
            let one_table = self.rebuilder.table_owner(parent.pid) == self.rebuilder.table_owner(node.pid);
            if self.rebuilder.share_undo(parent.pid, node.pid) {
                flags |= libc::CLONE_SYSVSEM;
            }
            let shares = |i: usize| self.processes[i].shares_fs_with == parent.pid;
            if matches!(node.role, Role::Process(i) if !node.sibling && shares(i)) {
                flags |= libc::CLONE_FS;
            }
            if let Some(p) = self.guest(node) {
                let table = if one_table { libc::CLONE_FILES } else { 0 };
                self.make_guest(*id, flags | table, signal, p)?;
                continue;
            }
            let made = match one_table {
                // SAFETY: each closes only what it has opened itself, until one lays the table out, for whom the others wait.
                true => unsafe { process::fork_with_table(flags, signal, node.pid) },
                false => sys::fork(flags, signal, node.pid),
            };
            let pid = made.map_err(|e| self.cannot_make(node, &e))?;
            if pid == 0 {
                self.live(*id);
            }
            self.shared.note_made(*id);
            if node.role == Role::TemporaryParent {
                let (_, status) = sys::wait(pid, libc::__WALL).map_err(|e| RestartError::at("spawn", e))?;
                self.has_made(*id, status)?;
            }
        }
        Ok(())
    }

    /// The process of `node`, where it shares its maker's memory.
    fn guest(&self, node: &Node) -> Option<&Process> {
        let Role::Process(i) = node.role else { return None };
        self.processes.get(i).filter(|p| tree::shares_memory(p))
    }

    fn make_guest(&self, id: NodeId, flags: i32, signal: i32, p: &Process) -> Outcome<()> {
        let handlers = if p.shares_handlers { libc::CLONE_SIGHAND } else { 0 };
        // Never freed: the restorer unmaps it.
        let birth = Box::leak(Box::new(Birth { forest: self, id }));
        let how = ((flags | handlers) as u64, companion::STACK_BYTES);
        // SAFETY: it takes turns with its maker. The forest is on the stack of the agent's fork that made the memory, which
        // never returns from there, and leaves this program last.
        let made = unsafe { companion::spawn(how, signal, p.pid, birth) };
        made.map_err(|e| self.cannot_make(&self.tree.nodes[id], &e))?;
        self.shared.note_made(id);
        Ok(())
    }

    /// Whether temporary parent `id`, which has ended with `status`, has made its children.
    fn has_made(&self, id: NodeId, status: i32) -> Outcome<()> {
        if status == 0 {
            return Ok(());
        }
        if self.shared.slot(id).state.load(Ordering::Acquire) == STATE_FAILED {
            return Err(self.shared.failure(id));
        }
        let (pid, how) = (self.tree.nodes[id].pid, ended(status));
        Err(RestartError::at("spawn", format!("process {pid} {how} while it made others")))
    }

    fn cannot_make(&self, node: &Node, e: &std::io::Error) -> RestartError {
        let reason = match e.raw_os_error() {
            Some(libc::EEXIST) => "its identifier is in use: restart once more".to_owned(),
            Some(libc::EPERM) => {
                "the kernel does not let us choose its identifier (no CAP_CHECKPOINT_RESTORE in the namespace)".to_owned()
            }
            Some(libc::EINVAL) => "its identifier is above kernel.pid_max, or the kernel is older than 5.5".to_owned(),
            Some(libc::EAGAIN) => "the limit of processes (RLIMIT_NPROC, cgroup pids.max) is reached".to_owned(),
            _ => e.to_string(),
        };
        RestartError::at("spawn", format!("process {}: {reason}", node.pid))
    }

    /// The life of a process until its memory is replaced.
    fn live(&self, id: NodeId) -> ! {
        match self.grow(id) {
            Err(e) => self.shared.fail(id, &e),
            Ok(()) => sys::exit_now(0),
        }
    }

    fn grow(&self, id: NodeId) -> Outcome<()> {
        let node = &self.tree.nodes[id];
        let failed = |what: &'static str| {
            let pid = node.pid;
            move |e: std::io::Error| RestartError::at("spawn", format!("process {pid}: {what}: {e}"))
        };
        if let Role::Process(i) = node.role {
            if self.processes[i].prctl.child_subreaper {
                sys::become_reaper().map_err(failed("become reaper"))?;
            }
        }
        self.read_common(id)?;
        self.make(node, &node.before)?;
        if node.leads_session {
            sys::setsid().map_err(failed("setsid"))?;
            let terminal = |e: belay_plugins::Refusal| RestartError::at("spawn", e);
            self.rebuilder.install_session(node.pid).map_err(terminal)?;
        }
        self.make(node, &node.after)?;
        self.shared.report(id, EXISTS);
        if node.role == Role::TemporaryParent {
            return Ok(());
        }
        self.shared.await_stage(EXISTS);
        let leads = node.pgid == node.pid || node.lends_group;
        if leads && !node.leads_session {
            sys::setpgid(0, 0).map_err(failed("lead its process group"))?;
        }
        self.shared.report(id, LEADS);
        self.shared.await_stage(LEADS);
        if !leads && node.pgid != 0 {
            sys::setpgid(0, node.pgid).map_err(failed("join its process group"))?;
        }
        self.shared.report(id, JOINED);
        self.shared.await_stage(JOINED);
        if node.lends_group && node.pgid != node.pid {
            sys::setpgid(0, node.pgid).map_err(failed("join its process group"))?;
        }
        if node.role == Role::TemporaryLeader {
            self.reap_temporary(node)?;
            return Ok(());
        }
        self.reap_temporary(node)?;
        let Role::Process(i) = node.role else { return Ok(()) };
        let process = &self.processes[i];
        if let ProcessState::Zombie(status) = process.state {
            if self.ordinary {
                // Else the agent, once it has none itself, could not read the status at the next checkpoint.
                sys::give_up_capabilities().map_err(failed("give up capabilities"))?;
            } else {
                // The limit can be raised by who is root still.
                without_core();
                sys::become_user(&process.creds).map_err(failed("take the user and groups of one that has ended"))?;
            }
            end_like(process, status);
        }
        let asks = if self.questions.any() {
            let listener = lead::ask(self.questions, &self.rebuilder.room());
            let listener = listener.map_err(failed("ask about addresses and programs (seccomp)"))?;
            let number = u64::try_from(listener.as_raw_fd()).unwrap_or(u64::MAX);
            self.shared.slot(id).area[0].store(number, Ordering::Release);
            Some(listener)
        } else {
            None
        };
        let companions = self.companions(process)?;
        if self.later.contains_key(&process.pid) {
            let uffd = missing::make().and_then(|uffd| sys::dup_into(uffd, &self.rebuilder.room()));
            let uffd = uffd.map_err(failed("wait for missing pages (userfaultfd)"))?;
            // The restorer closes it.
            self.shared.slot(id).uffd.store(uffd.into_raw_fd(), Ordering::Release);
        }
        self.shared.report(id, SETTLED);
        self.shared.await_stage(SETTLED);
        // The agent has taken it.
        drop(asks);
        (self.settle)(id, process, &companions).map(|never| match never {})
    }

    /// Reads the memory that the process of node `id` has in common with those that it makes.
    fn read_common(&self, id: NodeId) -> Outcome<()> {
        let (shares, chunks) = self.kin;
        let Role::Process(i) = self.tree.nodes[id].role else {
            return Ok(());
        };
        let share = self.processes.get(i).and_then(|p| Some((p, shares.get(&p.pid)?)));
        match share.map_or(Ok(()), |(p, share)| kin::read(p, share, chunks, &self.areas)) {
            Ok(()) => Ok(()),
            Err(Unread::Failed(e)) => Err(e),
            Err(Unread::Pages(step, index, errno)) => self.shared.fail_at(id, step, index, errno),
        }
    }

    /// Makes the threads that exist before the restorer runs. No process has laid out its own descriptor table yet.
    fn companions(&self, process: &Process) -> Outcome<Companions> {
        let early = process.threads.iter().filter(|t| self.early.contains(&t.tid));
        let table = |t: &&Thread| self.rebuilder.thread_table(process.pid, t.tid);
        let (own, others): (Vec<_>, Vec<_>) = early.partition(|t| table(t) == Some(t.tid));
        let failed = |t: &Thread, e| RestartError::at("spawn", format!("thread {} of process {}: {e}", t.tid, process.pid));
        let make = |t: &Thread, lays_out| Companion::make(t.tid, lays_out).map_err(|e| failed(t, e));
        let mut made: Companions = own.iter().map(|t| make(t, true)).collect::<Outcome<_>>()?;
        for t in others {
            // Who has the table of another thread is made by that.
            let maker = table(&t).and_then(|first| made.iter().find(|c| c.tid == first));
            let one = Cell::new(None);
            match maker {
                Some(maker) => maker.work(&|| one.set(Some(make(t, false)))),
                None => one.set(Some(make(t, false))),
            }
            made.extend(one.take().transpose()?);
        }
        Ok(made)
    }

    fn reap_temporary(&self, node: &Node) -> Outcome<()> {
        for id in node.before.iter().chain(&node.after) {
            let child = &self.tree.nodes[*id];
            if child.role == Role::TemporaryLeader {
                sys::wait(child.pid, libc::__WALL).map_err(|e| RestartError::at("spawn", e))?;
            }
        }
        Ok(())
    }
}

/// What a process that shares its maker's memory needs to begin.
struct Birth<'a> {
    forest: &'a Forest<'a>,
    id: NodeId,
}

impl Task for Birth<'_> {
    fn live(&self) -> ! {
        companion::take_turn();
        self.forest.live(self.id)
    }
}

/// Nothing is told of how the calling process ends: no core file lies in the user's directory, and the host's handler
/// (`kernel.core_pattern` with a pipe) is not called, which heeds no limit of 0, but one of 1. (Who cannot be dumped
/// calls none either; an agent without capabilities could not read its status any more.)
fn without_core() {
    for most in [1, 0] {
        if limits::set(0, libc::RLIMIT_CORE, (most, most)).is_ok() {
            break;
        }
    }
}

/// Ends with the wait status that the zombie has.
fn end_like(process: &Process, status: i32) -> ! {
    let mut comm = process.comm.as_bytes().to_vec();
    comm.truncate(15);
    comm.push(0);
    let _ = CStr::from_bytes_until_nul(&comm).map(rustix::thread::set_name);
    if libc::WIFSIGNALED(status) {
        let signal = libc::WTERMSIG(status);
        without_core();
        signals::Disposition::set_default(signal);
        let _ = sys::kill(std::process::id().cast_signed(), signal);
        signals::change_mask(libc::SIG_SETMASK, 0);
    }
    sys::exit_now(libc::WEXITSTATUS(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_hears_of_how_a_zombie_ended_again() {
        let child = belay_kernel::apart::child(|| {
            without_core();
            let limit = limits::of(0, libc::RLIMIT_CORE);
            i32::from(!limit.is_ok_and(|(soft, hard)| hard <= 1 && soft == hard))
        });
        assert_eq!(child.unwrap().wait(0).unwrap(), 0, "a limit by which no handler is called");
    }
}
