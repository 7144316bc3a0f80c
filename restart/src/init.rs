//! PID 1 of the new namespaces: mounts `/proc`, makes the agent, inherits and reaps what nobody else does, and ends when nothing is left.
//!
//! Until the job runs, the end of the agent is the end of everything: when PID 1 exits, the kernel kills the whole namespace. In the machine's own namespaces the same
//! process is an ordinary reaper, and kills what a failed restart leaves itself.

use crate::channel::{Channel, Message};
use crate::fail::{Outcome, RestartError};
use crate::namespace::Way;
use crate::{initial, namespace, shown, sys};
use belay_image::model::AgentIdentity;
use belay_kernel::proc::{Outside, END_LIMIT};
use belay_plugins::Group;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// A word that PID 1 and the agent share: 1 when the job runs.
pub(crate) struct Flag(*mut AtomicU32);

impl Flag {
    /// Makes it; forks share it.
    pub(crate) fn new() -> std::io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                prot,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self(at.cast()))
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the mapping is never unmapped, zeroed by the kernel, and holds an atomic.
        unsafe { &*self.0 }
    }

    /// Sets it.
    pub(crate) fn set(&self) {
        self.word().store(1, Ordering::Release);
    }

    fn is_set(&self) -> bool {
        self.word().load(Ordering::Acquire) == 1
    }
}

/// What PID 1 is told.
pub(crate) struct Setup<'a> {
    pub(crate) channel: &'a Channel,
    pub(crate) agent: AgentIdentity,
    /// PID of the command.
    pub(crate) root: i32,
    pub(crate) way: Way,
    /// Value of the monotonic clock at the checkpoint.
    pub(crate) monotonic_ns: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The namespaces that the job is to be shown.
    pub(crate) shown: Cell<shown::Outer>,
    /// There is no terminal: sessions get their numbers too.
    pub(crate) session: bool,
    /// The job's other nodes.
    pub(crate) group: Option<&'a dyn Group>,
    pub(crate) running: &'a Flag,
}

/// The life of PID 1. In the agent, calls `agent` and ends.
pub(crate) fn run(setup: &Setup<'_>, agent: &mut dyn FnMut()) -> ! {
    // SAFETY: a live, terminated string.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"belay-init".as_ptr()) };
    match start(setup, agent) {
        Ok(leader) => {
            crate::leave(setup.group);
            reap(setup, leader)
        }
        Err(e) => {
            setup.channel.send(&Message::failed(&e));
            sys::exit_now(1)
        }
    }
}

/// Makes the agent; returns the temporary session leader, if one was needed.
fn start(setup: &Setup<'_>, agent: &mut dyn FnMut()) -> Outcome<Option<i32>> {
    let a = &setup.agent;
    let failed = |e: std::io::Error| RestartError::at("spawn", format!("agent {}: {e}", a.pid));
    if setup.way == Way::Initial {
        initial::become_reaper().map_err(failed)?;
    } else {
        namespace::enter(setup.way, setup.uid, setup.gid)?;
        shown::begin(setup.shown.take());
        if let Err(error) = namespace::continue_clock(setup.monotonic_ns) {
            tracing::warn!(%error, "no time namespace: the monotonic clock jumps");
        }
    }
    let mut leader = None;
    if setup.session {
        if a.sid == 1 {
            sys::setsid().map_err(failed)?;
        } else if a.sid > 1 && a.sid != a.pid {
            // The session's leader is not part of the job: a process with its PID leads it while the agent is made.
            // SAFETY: PID 1 has one thread.
            let pid = unsafe { sys::fork(0, libc::SIGCHLD, a.sid) }.map_err(failed)?;
            if pid == 0 {
                let made = sys::setsid().and_then(|()| {
                    // SAFETY: the leader has one thread.
                    unsafe { sys::fork(libc::CLONE_PARENT as u64, 0, a.pid) }
                });
                match made {
                    Ok(0) => be_agent(agent),
                    Ok(_) => {
                        crate::leave(setup.group);
                        sys::release_standard_descriptors();
                        loop {
                            // SAFETY: waits for a signal.
                            unsafe { libc::pause() };
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
        // SAFETY: PID 1 has one thread.
        let pid = unsafe { sys::fork(0, libc::SIGCHLD, a.pid) }.map_err(failed)?;
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
    let mut agent_ended = None;
    loop {
        let Ok((pid, status)) = sys::wait(-1, libc::WUNTRACED | libc::__WALL) else {
            // Nothing is left. (ECHILD is the only error here.)
            if let Some(status) = agent_ended {
                setup.channel.send(&Message::AgentEnded { status, alone: true });
            }
            sys::exit_now(0);
        };
        if Some(pid) == leader && !setup.running.is_set() && agent_ended.is_none() && libc::WIFEXITED(status) {
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
            continue;
        }
        if libc::WIFSTOPPED(status) {
            setup.channel.send(&Message::Stopped(libc::WSTOPSIG(status)));
            continue;
        }
        if !setup.running.is_set() {
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
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: the kernel writes to a live structure; nothing is reaped.
    unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), flags) == 0 }
}
