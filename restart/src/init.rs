//! PID 1 of the new namespaces: mounts `/proc`, makes the agent, inherits and reaps what nobody else does, and ends
//! when nothing is left.
//!
//! Until the job runs, the end of the agent is the end of everything: when PID 1 exits, the kernel kills the whole
//! namespace. In the machine's own namespaces the same process is an ordinary reaper, and kills what a failed restart
//! leaves itself.

use crate::channel::{Channel, Message};
use crate::fail::{Outcome, RestartError};
use crate::identity::Identity;
use crate::namespace::Way;
use crate::{namespace, shown, sys, Shell};
use belay_image::model::AgentIdentity;
use belay_kernel::parts;
use belay_kernel::proc::{born, Outside, END_LIMIT};
use belay_kernel::shared::Shared;
use belay_plugins::Group;
use rustix::process::{waitid, WaitId, WaitIdOptions};
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// So many of the remote shells that were started last are known.
const SHELLS: usize = 4096;

/// What PID 1 and the agent share. All-zero bytes are a valid value: the job does not run yet, and there are no remote shells.
#[repr(C)]
struct Words {
    /// 1 when the job runs.
    running: AtomicU32,
    /// The process that stands by while memory is filled, where one does.
    stands_by: AtomicI32,
    /// Remote shells noted so far.
    noted: AtomicU32,
    shells: [Noted; SHELLS],
}

/// A remote shell that the agent has started.
#[repr(C)]
struct Noted {
    /// Its PID.
    pid: AtomicI32,
    standin: AtomicI32,
    /// When the stand-in was started: its number may be another's later.
    born: AtomicU64,
}

parts!(Words {
    running,
    stands_by,
    noted,
    shells
});
parts!(Noted { pid, standin, born });

/// Memory of PID 1 and the agent.
pub(crate) struct Common(Shared);

impl Common {
    /// Makes it; forks share it.
    pub(crate) fn new() -> std::io::Result<Self> {
        Shared::with_children(size_of::<Words>()).map(Self)
    }

    fn words(&self) -> &Words {
        self.0.part(0)
    }

    /// From the agent: the job runs.
    pub(crate) fn set_running(&self) {
        self.words().running.store(1, Ordering::Release);
    }

    /// From the agent, before that: process `pid` stands by while memory is filled.
    pub(crate) fn is_filled_beside(&self, pid: i32) {
        self.words().stands_by.store(pid, Ordering::Release);
    }

    /// Whether child `pid`, which has ended with `status`, has left memory that is not there yet to nobody.
    fn leaves_memory(&self, pid: i32, status: i32) -> bool {
        status != 0 && pid == self.words().stands_by.load(Ordering::Acquire)
    }

    fn is_running(&self) -> bool {
        self.words().running.load(Ordering::Acquire) == 1
    }

    /// From the agent, which is the only one to write: it has started `shell`.
    pub(crate) fn note(&self, shell: Shell) {
        let words = self.words();
        let n = words.noted.load(Ordering::Relaxed);
        let noted = &words.shells[n as usize % SHELLS];
        // The agent may be killed in between: what is there in part names nobody.
        noted.pid.store(0, Ordering::Release);
        noted.standin.store(shell.standin, Ordering::Release);
        noted.born.store(born(shell.standin).unwrap_or(0), Ordering::Release);
        noted.pid.store(shell.pid, Ordering::Release);
        words.noted.store(n.wrapping_add(1), Ordering::Release);
    }

    /// Who stands in for remote shell `pid`, and is there.
    fn standin(&self, pid: i32) -> Option<i32> {
        let is_it = |n: &&Noted| n.pid.load(Ordering::Acquire) == pid;
        let all = self.words().shells.iter().filter(is_it);
        let mut known = all.map(|n| (n.standin.load(Ordering::Acquire), n.born.load(Ordering::Acquire)));
        known
            .find(|(standin, since)| born(*standin) == Some(*since))
            .map(|(standin, _)| standin)
    }
}

/// What PID 1 is told.
pub(crate) struct Setup<'a> {
    pub(crate) channel: &'a Channel,
    pub(crate) agent: AgentIdentity,
    /// PID of the command.
    pub(crate) root: i32,
    pub(crate) way: Way,
    /// What it is to keep of the host on which it was.
    pub(crate) identity: Identity,
    /// What the clocks said at the checkpoint.
    pub(crate) clocks: namespace::Clocks,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The namespaces that the job is to be shown.
    pub(crate) shown: Cell<shown::Outer>,
    /// There is no terminal: sessions get their numbers too.
    pub(crate) session: bool,
    /// The job's other nodes.
    pub(crate) group: Option<&'a dyn Group>,
    pub(crate) common: &'a Common,
    /// Closes what only the agent needs: the chunks of the generation, which would take room as long as somebody has them.
    pub(crate) forget: &'a dyn Fn(),
    /// See [`crate::WithoutAgent`].
    pub(crate) farewell: &'a dyn Fn(i32, i32),
}

/// The life of PID 1. In the agent, calls `agent` and ends.
pub(crate) fn run(setup: &Setup<'_>, agent: &mut dyn FnMut()) -> ! {
    let _ = rustix::thread::set_name(c"belay-init");
    match start(setup, agent) {
        Ok(leader) => {
            crate::leave(setup.group);
            (setup.forget)();
            reap(setup, leader)
        }
        Err(e) => {
            setup.channel.send(&Message::failed(&e));
            sys::exit_now(1)
        }
    }
}

/// Tells the user where a monotonic clock that jumps makes the program wait for longer.
fn tell_of_clocks(then: namespace::Clocks, why: &str) {
    if let Some(seconds) = then.behind() {
        sys::say(&format!(
            "no time namespace ({why}): the monotonic clock is {seconds} s behind what it was at the checkpoint: waits of the program can \
             take so much longer"
        ));
    }
}

/// Makes the agent; returns the temporary session leader, if one was needed.
fn start(setup: &Setup<'_>, agent: &mut dyn FnMut()) -> Outcome<Option<i32>> {
    let a = &setup.agent;
    let failed = |e: std::io::Error| RestartError::at("spawn", format!("agent {}: {e}", a.pid));
    if setup.way == Way::Initial {
        sys::become_reaper().map_err(failed)?;
        tell_of_clocks(setup.clocks, "none is made this way");
    } else {
        namespace::enter(setup.way, setup.uid, setup.gid)?;
        shown::begin(setup.shown.take());
        setup.identity.keep(setup.way)?;
        if let Err(error) = namespace::continue_clock(setup.clocks) {
            tracing::warn!(%error, "no time namespace: the monotonic clock jumps");
            tell_of_clocks(setup.clocks, &error.to_string());
        }
    }
    let mut leader = None;
    if setup.session {
        if a.sid == 1 {
            sys::setsid().map_err(failed)?;
        } else if a.sid > 1 && a.sid != a.pid {
            // The session's leader is not part of the job: a process with its PID leads it while the agent is made.
            let pid = sys::fork(0, libc::SIGCHLD, a.sid).map_err(failed)?;
            if pid == 0 {
                let made = sys::setsid().and_then(|()| sys::fork(libc::CLONE_PARENT, 0, a.pid));
                match made {
                    Ok(0) => be_agent(agent),
                    Ok(_) => {
                        crate::leave(setup.group);
                        (setup.forget)();
                        sys::release_standard_descriptors();
                        loop {
                            rustix::event::pause();
                        }
                    }
                    Err(e) => {
                        setup.channel.send(&Message::failed(&failed(e)));
                        sys::exit_now(1)
                    }
                }
            }
            leader = Some(pid);
        }
    }
    if leader.is_none() {
        if a.pgid == 1 {
            let _ = sys::setpgid(0, 0); // already so when PID 1 leads a session
        }
        let pid = sys::fork(0, libc::SIGCHLD, a.pid).map_err(failed)?;
        if pid == 0 {
            be_agent(agent);
        }
    }
    Ok(leader)
}

fn be_agent(agent: &mut dyn FnMut()) -> ! {
    agent();
    sys::exit_now(0)
}

fn reap(setup: &Setup<'_>, leader: Option<i32>) -> ! {
    // Whoever reads what the job writes must see its end when the job has closed it, whatever PID 1 does.
    sys::release_standard_descriptors();
    if setup.way != Way::Initial {
        if let Err(error) = namespace::follow_clock() {
            tracing::warn!(%error, "PID 1 has another clock than the job");
        }
    }
    let mut agent_ended = None;
    let (mut agent_lost, mut memory_lost) = (false, false);
    loop {
        let Ok((pid, status)) = sys::wait(-1, libc::WUNTRACED | libc::__WALL) else {
            // Nothing is left. (ECHILD is the only error here.)
            if let Some(status) = agent_ended {
                setup.channel.send(&Message::AgentEnded { status, alone: true });
            }
            sys::exit_now(0);
        };
        if !libc::WIFSTOPPED(status) {
            agent_lost |= pid == setup.agent.pid;
            memory_lost |= setup.common.leaves_memory(pid, status);
            if agent_lost && memory_lost {
                // Nobody else is left who would end the job, which would read zeros.
                let _ = sys::kill(-1, libc::SIGKILL);
            }
        }
        if Some(pid) == leader && !setup.common.is_running() && agent_ended.is_none() && libc::WIFEXITED(status) {
            sys::exit_now(1); // it could not make the agent and has said why
        }
        if pid == setup.root {
            // The agent, whose child it was, was killed.
            setup.channel.send(&if libc::WIFSTOPPED(status) {
                Message::Stopped(libc::WSTOPSIG(status))
            } else {
                Message::Ended(status)
            });
        }
        if pid != setup.agent.pid {
            // A remote shell that the agent has left.
            let over = libc::WIFEXITED(status) || libc::WIFSIGNALED(status);
            if let Some(standin) = over.then(|| setup.common.standin(pid)).flatten() {
                tracing::info!(shell = pid, standin, status, "remote shell ended");
                (setup.farewell)(standin, status);
            }
            continue;
        }
        if libc::WIFSTOPPED(status) {
            setup.channel.send(&Message::Stopped(libc::WSTOPSIG(status)));
            continue;
        }
        if !setup.common.is_running() {
            if setup.way == Way::Initial {
                let _ = Outside::default().end_others(END_LIMIT);
            }
            setup.channel.send(&Message::AgentEnded { status, alone: true });
            sys::exit_now(1);
        }
        if let Some(leader) = leader {
            let _ = sys::kill(leader, libc::SIGKILL);
        }
        if others_are_left() {
            setup.channel.send(&Message::AgentEnded { status, alone: false });
        } else {
            agent_ended = Some(status);
        }
    }
}

fn others_are_left() -> bool {
    let all = WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned());
    let seen = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT | all;
    waitid(WaitId::All, seen).is_ok()
}
