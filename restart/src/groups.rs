//! The process group and the session of the agent.

use crate::fail::{Outcome, RestartError};
use crate::sys;
use belay_image::model::AgentIdentity;

/// Puts the agent into the process group (and, without a terminal, the session) it had. `session` is set when PID 1
/// recreates sessions.
pub(crate) fn join(agent: &AgentIdentity, session: bool) -> Outcome<()> {
    let failed = |e: std::io::Error| RestartError::at("spawn", format!("process group {} of the agent: {e}", agent.pgid));
    if session && agent.sid == agent.pid {
        return sys::setsid().map_err(failed);
    }
    if agent.pgid == agent.pid {
        return sys::setpgid(0, 0).map_err(failed);
    }
    if agent.pgid <= 0 || sys::setpgid(0, agent.pgid).is_ok() {
        return Ok(());
    }
    // The leader is not part of the job: a process with its PID leads until we have joined.
    let leader = sys::fork(0, libc::SIGCHLD, agent.pgid).map_err(failed)?;
    if leader == 0 {
        loop {
            rustix::event::pause();
        }
    }
    let joined = sys::setpgid(leader, leader).and_then(|()| sys::setpgid(0, leader));
    let _ = sys::kill(leader, libc::SIGKILL);
    let _ = sys::wait(leader, libc::__WALL);
    joined.map_err(failed)
}
