//! The front: the process that the caller's shell waits for. It reports the signals sent to it to the agent, stops when
//! the command stops itself, and ends as the command ended. When the agent is killed, the command goes on, and the
//! front still waits for it; where the job is restarted then, it ends all of it that is on this host instead.

use crate::nodes::remote::{end_standin, shell_code};
use crate::relay::{Channel, Message};
use crate::sys::{self, Signal, SignalFd, SignalSet};
use crate::Failure;
use belay_kernel::proc::{born, Outside, END_LIMIT};
use belay_restart::{by_user, End};
use belay_wire::Exit;
use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Signals that front and agent take through a descriptor. Left out are those that mean a fault of the process itself,
/// those that cannot be taken, and the stop signals of the terminal, which stop front, agent and command alike.
pub fn handled() -> SignalSet {
    let not = [
        libc::SIGKILL,
        libc::SIGSTOP,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGTRAP,
        libc::SIGSYS,
        libc::SIGPIPE,
        libc::SIGABRT,
        libc::SIGXCPU,
        libc::SIGXFSZ,
    ];
    SignalSet::of(
        (1..32)
            .chain(libc::SIGRTMIN()..=libc::SIGRTMAX())
            .filter(|s| !not.contains(s)),
    )
}

/// Remote shells that the agent has started, who stands in for them, and when that was started.
type Shells = BTreeMap<i32, (i32, Option<u64>)>;

/// Without an agent: how long remote shells may take to end when the command has.
const SHELLS_LIMIT: Duration = Duration::from_secs(10);
/// The status of one of which it is not known: that of ssh where something is wrong with itself.
const SHELL_LOST: i32 = 255;

/// Waits until the command has ended. `outside` are children that this process has had before. When the agent is
/// killed, `ends_with_agent` tells whether nothing of the job may go on.
pub(crate) fn wait(
    channel: &Channel,
    (signals, mut outside): (&SignalFd, Outside),
    agent: i32,
    ends_with_agent: &dyn Fn() -> bool,
) -> Result<End, Failure> {
    let (mut root, mut not_restarted, mut shells) = (None, false, Shells::new());
    loop {
        let ready = sys::poll(&[(signals.as_raw_fd(), libc::POLLIN), (channel.as_raw_fd(), libc::POLLIN)])
            .map_err(|e| Failure::system("wait for the command", &e))?;
        if ready[0] != 0 {
            let received = take(signals, &mut not_restarted);
            if received.iter().any(|s| s.number == libc::SIGCHLD) {
                outside.note(Some(agent));
            }
            report(channel, received);
        }
        if ready[1] == 0 {
            continue;
        }
        match channel.receive(false) {
            Ok(None) => {}
            Ok(Some(Message::Started(pid))) => root = Some(pid),
            Ok(Some(Message::ExecFailed(errno))) => {
                let error = std::io::Error::from_raw_os_error(errno);
                let exit = if errno == libc::ENOENT {
                    Exit::NotFound
                } else {
                    Exit::NotExecutable
                };
                // The file itself has been found: a launch looks for it first.
                let advice = match exit {
                    Exit::NotFound => "; the interpreter that its first line names (#!), or its dynamic loader, is not there",
                    _ => "; check its mode and its kind (file(1))",
                };
                return Err(Failure::new(
                    exit,
                    format!("execute the command: {}{advice}", crate::failure::reason(&error)),
                ));
            }
            Ok(Some(Message::Fence)) => {
                report(channel, take(signals, &mut not_restarted));
                channel.send(Message::FencePassed);
            }
            // The command stopped itself; the shell sees its own child only. The group is not signalled: whoever is in
            // it and runs, runs.
            Ok(Some(Message::Suspended(signal))) => sys::kill(std::process::id().cast_signed(), signal),
            Ok(Some(Message::NotRestarted)) => not_restarted = true,
            Ok(Some(Message::Shell(pid, standin))) => drop(shells.insert(pid, (standin, born(standin)))),
            Ok(Some(Message::Background(status))) => return Ok(End::of_command(status, not_restarted)),
            Ok(Some(Message::Ended(status))) => {
                // Nothing of the job is left when the shell goes on.
                if let Err(e) = sys::wait(agent) {
                    tracing::debug!(error = %e, "agent already reaped");
                }
                return Ok(End::of_command(status, not_restarted));
            }
            Ok(Some(other)) => tracing::warn!(?other, "unexpected message from the agent"),
            Err(_) => {
                let late = take(signals, &mut not_restarted);
                if !not_restarted && ends_with_agent() {
                    return end_without_agent(&outside, agent);
                }
                return without_agent(signals, late, (root, agent), &shells).map(|status| End::of_command(status, not_restarted));
            }
        }
    }
}

/// What has arrived; notes when the user ends the job with it.
fn take(signals: &SignalFd, not_restarted: &mut bool) -> Vec<Signal> {
    let received = signals.drain();
    *not_restarted |= received.iter().any(|s| by_user(s.number));
    received
}

fn report(channel: &Channel, received: Vec<Signal>) {
    for s in received {
        if s.number == libc::SIGCONT {
            channel.send(Message::Signal(s));
        } else if s.number != libc::SIGCHLD && s.from_process() {
            sys::group_barrier();
            channel.send(Message::Signal(s));
        }
    }
}

/// The agent was killed, and the job is restarted: ends what it leaves, which is the front's now.
fn end_without_agent(outside: &Outside, agent: i32) -> Result<End, Failure> {
    sys::say(&format!(
        "agent {agent} ended unexpectedly; the program is ended here, because the job is restarted from its newest checkpoint"
    ));
    let system = |step: &'static str| move |e: std::io::Error| Failure::system(step, &e);
    let status = sys::wait(agent).map_err(system("wait for the agent"))?;
    outside
        .end_others(END_LIMIT)
        .map_err(|e| Failure::system(format!("end what the agent has left on {}", sys::host()), &e))?;
    Ok(End::Agent(status))
}

/// The agent was killed: its children are the front's now, and who stands in for those of `shells` hears from the front
/// how they end. Signals of which the agent has not heard were received `late`.
fn without_agent(
    signals: &SignalFd,
    late: Vec<Signal>,
    (root, agent): (Option<i32>, i32),
    shells: &Shells,
) -> Result<i32, Failure> {
    let gone = |why: &str| Failure::new(Exit::Internal, format!("agent {agent} ended unexpectedly{why}"));
    let root = root.ok_or_else(|| gone(" before the command was started; see DIR/log"))?;
    tracing::error!(agent, root, "agent ended unexpectedly");
    sys::say(&format!(
        "agent {agent} ended unexpectedly; the program goes on, but no more checkpoints are taken; earlier ones are whole"
    ));
    let pass_on = |received: Vec<Signal>| {
        for s in received {
            if s.number != libc::SIGCHLD && s.from_process() {
                s.pass_on(root);
            }
        }
    };
    pass_on(late);
    let mut shells = shells.clone();
    let mut ended: Option<(i32, Instant)> = None;
    loop {
        while let Some((pid, status)) = sys::reap() {
            if pid == root {
                ended = Some((status, Instant::now()));
            }
            if let Some((standin, _)) = shells.remove(&pid).filter(|s| is_there(*s)) {
                tracing::info!(shell = pid, standin, "remote shell ended");
                end_standin(standin, shell_code(status));
            }
        }
        shells.retain(|_, s| is_there(*s));
        let mut left = None;
        if let Some((status, since)) = ended {
            left = SHELLS_LIMIT.checked_sub(since.elapsed());
            if shells.is_empty() || left.is_none() {
                // Nobody will know how these end.
                shells.values().for_each(|(standin, _)| end_standin(*standin, SHELL_LOST));
                return Ok(status);
            }
        } else if !std::path::Path::new(&format!("/proc/{root}")).exists() {
            return Err(gone(", and the command's exit status with it"));
        }
        match sys::poll_within(&[(signals.as_raw_fd(), libc::POLLIN)], left) {
            Err(e) if e.kind() != std::io::ErrorKind::Interrupted => return Err(Failure::system("wait for the command", &e)),
            _ => {}
        }
        let received = signals.drain();
        if ended.is_none() {
            pass_on(received);
        }
    }
}

/// Whether it is still who it was.
fn is_there((standin, since): (i32, Option<u64>)) -> bool {
    since.is_some() && since == born(standin)
}
