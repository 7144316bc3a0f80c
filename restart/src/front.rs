//! The front process: what the user's shell sees of the restarted job.
//!
//! It stays outside the new namespaces, in the shell's process group. The job is in a group of its own, as at the
//! checkpoint, so the front process hands it the terminal while it is itself in the foreground, stops when the job is
//! stopped, lets the job go on when it is continued, forwards signals sent to it alone, and ends like the job. When the
//! agent is killed, the command goes on, and the front still waits for it; where the job is to be restarted, it ends
//! what is left instead.

use crate::channel::{Channel, Message};
use crate::fail::{Outcome, RestartError};
use crate::{sys, Shell, WithoutAgent};
use belay_kernel::proc::{born, descendants, hung, Outside, Status, END_LIMIT};
use belay_kernel::signals::{self, Disposition};
use belay_kernel::{masks, numbers, pidfd, proc, process};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Signals the front process deals with.
const HANDLED: [i32; 10] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

/// How a job has ended, as its front has seen it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The command has, with this status word.
    Command(i32),
    /// The same after the user has ended the job: whatever it has lost, it is not restarted.
    ByUser(i32),
    /// The user has given up the restart with this signal, before the job ran.
    Interrupted(i32),
    /// Its agent was killed, with this status word; the job is to be restarted, and nothing of it is left on this host.
    Agent(i32),
}

impl End {
    /// The status word.
    pub fn status(self) -> i32 {
        match self {
            Self::Command(status) | Self::ByUser(status) | Self::Interrupted(status) | Self::Agent(status) => status,
        }
    }

    /// The command has ended with this status word, after its user has ended it or not.
    pub fn of_command(status: i32, by_user: bool) -> Self {
        if by_user {
            Self::ByUser(status)
        } else {
            Self::Command(status)
        }
    }
}

/// Whether who sends `signal` means the job to end: not to one that was started with that signal ignored (`nohup`). One
/// that is blocked is there to be read all the same.
pub fn by_user(signal: i32) -> bool {
    matches!(signal, libc::SIGINT | libc::SIGQUIT | libc::SIGTERM | libc::SIGHUP) && !Disposition::of(signal).is_ignored()
}

/// The front process while a restart is under way.
pub(crate) struct Front {
    signals: OwnedFd,
    old_mask: u64,
    terminal: Option<OwnedFd>,
    /// The front process was in the terminal's foreground at the start.
    pub(crate) foreground: bool,
    init: i32,
    /// PID of the command, inside.
    root: i32,
    /// The agent as seen from here: (PID, process group).
    agent: Option<(i32, i32)>,
    resumed: bool,
    /// The agent was killed, and the command goes on.
    without_agent: bool,
    /// The user has ended the job: it is not restarted.
    not_restarted: bool,
    /// The restart makes no namespaces, whose PID 1 would end everything with itself.
    initial: bool,
    /// Children that this process has had before, and remote shells.
    outside: Outside,
    /// The job has been given the terminal and was not stopped since.
    lent: bool,
    /// Foreground group of the terminal when the job, which had it, was last stopped.
    foreground_group: Option<i32>,
    ended: Option<i32>,
    /// The restart was given up because of this signal.
    interrupted: Option<i32>,
    failure: Option<RestartError>,
    /// Signals for the job that have come before it runs.
    early: Vec<i32>,
    /// Remote shells of which nobody else tells when the agent was killed.
    shells: Vec<Known>,
}

/// A remote shell and its stand-in, as seen from here.
struct Known {
    pid: i32,
    /// Readable when it has ended.
    gone: OwnedFd,
    standin: i32,
    /// When the stand-in was started: its number may be another's later.
    born: u64,
}

impl Known {
    /// It has ended: its stand-in hears of that.
    fn tell(self, orphan: &WithoutAgent<'_>) {
        let Ok((_, status)) = sys::wait(self.pid, libc::__WALL) else {
            return;
        };
        tracing::info!(shell = self.pid, standin = self.standin, status, "remote shell ended");
        if born(self.standin) == Some(self.born) {
            (orphan.farewell)(self.standin, status);
        }
    }
}

/// The number that process `pid` has in the innermost of its namespaces.
fn inside(pid: i32) -> Option<i64> {
    Status::read(pid).ok()?.list("NSpid").last().copied()
}

/// Bit of a signal in a mask.
fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

impl Front {
    /// Takes over signals and looks at the terminal. Before any child is made.
    pub(crate) fn new() -> io::Result<Self> {
        let mask = HANDLED.iter().fold(0, |m, s| m | bit(*s));
        let old_mask = signals::change_mask(libc::SIG_BLOCK, mask);
        let signals = masks::signalfd(mask, libc::SFD_CLOEXEC)?;
        let terminal = sys::terminal();
        let mut outside = Outside::default();
        outside.note(None);
        let group = process::group();
        let foreground = terminal
            .as_ref()
            .is_some_and(|t| sys::tcgetpgrp(t.as_fd()).is_ok_and(|g| g == group));
        Ok(Self {
            signals,
            old_mask,
            terminal,
            foreground,
            init: 0,
            root: 0,
            agent: None,
            resumed: false,
            without_agent: false,
            not_restarted: false,
            initial: false,
            outside,
            lent: false,
            foreground_group: None,
            ended: None,
            interrupted: None,
            failure: None,
            early: Vec::new(),
            shells: Vec::new(),
        })
    }

    /// Whether there is a controlling terminal.
    pub(crate) fn has_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// The mask of blocked signals that the caller had.
    pub(crate) fn old_mask(&self) -> u64 {
        self.old_mask
    }

    /// Attends to the job until it has ended. `init` is PID 1 of the namespaces, unless the restart is `initial`;
    /// `root` is the command's PID inside. `orphan` is asked when the agent was killed.
    pub(crate) fn attend(
        mut self,
        (init, initial): (i32, bool),
        root: i32,
        channel: &Channel,
        orphan: &WithoutAgent<'_>,
    ) -> Outcome<End> {
        self.init = init;
        self.root = root;
        self.initial = initial;
        let result = self.serve(channel, orphan);
        if initial && !self.resumed {
            let _ = self.outside.end_others(END_LIMIT);
        }
        if self.resumed {
            self.take_terminal();
        }
        signals::change_mask(libc::SIG_SETMASK, self.old_mask);
        result
    }

    fn serve(&mut self, channel: &Channel, orphan: &WithoutAgent<'_>) -> Outcome<End> {
        let failed = |e: io::Error| RestartError::at("wait for the job", e);
        loop {
            let shells = self.shells.iter().filter(|_| self.without_agent).map(|s| s.gone.as_raw_fd());
            let poll = |fd| numbers::entry(fd, libc::POLLIN);
            let own = [channel.fd(), self.signals.as_raw_fd()];
            let mut polls: Vec<libc::pollfd> = own.into_iter().chain(shells).map(poll).collect();
            if numbers::poll_all(&mut polls, -1).is_err() {
                continue; // EINTR
            }
            if let Some(at) = polls[own.len()..].iter().position(|p| p.revents != 0) {
                self.shells.remove(at).tell(orphan);
            }
            // First what the job has said: a signal means something else when it runs.
            if polls[0].revents == 0 {
                if polls[1].revents != 0 {
                    self.signal(self.next_signal().map_err(failed)?);
                }
                continue;
            }
            match channel.receive().map_err(failed)? {
                Some((Message::AgentEnded { status, alone }, _)) => {
                    if let Some(end) = self.agent_ended((status, alone), orphan)? {
                        return Ok(end);
                    }
                }
                Some((Message::Ended(status), _)) if self.without_agent => return Ok(self.ended_with(status)),
                Some((Message::Background(status), _)) => return Ok(self.ended_with(status)),
                Some((message, pid)) => self.message(message, pid, orphan.shells),
                None => return self.end(libc::SIGKILL, true),
            }
        }
    }

    /// The agent has ended, and left nothing where it was `alone`. How the job has, unless the command goes on.
    fn agent_ended(&mut self, (status, alone): (i32, bool), orphan: &WithoutAgent<'_>) -> Outcome<Option<End>> {
        let killed = self.resumed && self.ended.is_none() && libc::WIFSIGNALED(status);
        let (true, Some((agent, _))) = (killed, self.agent) else {
            return self.end(status, alone).map(Some);
        };
        let mut late = Vec::new();
        while self.has_signal() {
            late.push(self.next_signal().map_err(|e| RestartError::at("wait for the job", e))?);
        }
        self.not_restarted |= late.iter().any(|s| by_user(*s));
        if !self.not_restarted && (orphan.ends)() {
            sys::say(&format!(
                "agent {agent} ended unexpectedly; the program is ended here, because the job is restarted from its newest checkpoint"
            ));
            self.end_all()?;
            return Ok(Some(End::Agent(status)));
        }
        if alone {
            return self.end(status, alone).map(Some);
        }
        self.without_agent = true;
        sys::say(&format!(
            "agent {agent} ended unexpectedly; the program goes on, but no more checkpoints are taken; earlier ones are whole"
        ));
        late.into_iter().for_each(|s| self.signal(s));
        Ok(None)
    }

    /// Ends all that is left of the job here.
    fn end_all(&mut self) -> Outcome<()> {
        let failed = |e: io::Error| RestartError::at("end what the agent has left", e);
        if self.initial {
            return self.outside.end_others(END_LIMIT).map_err(failed);
        }
        let init = pidfd::open(self.init).map_err(failed)?;
        sys::kill(self.init, libc::SIGKILL).map_err(failed)?;
        // It is gone when everything in its namespaces is.
        if !pidfd::gone_within(init.as_fd(), END_LIMIT) {
            let left = descendants(self.init).map_err(failed)?;
            return Err(failed(hung(left.into_iter().map(|(pid, _)| pid))));
        }
        sys::wait(self.init, libc::__WALL).map(drop).map_err(failed)
    }

    fn message(&mut self, message: Message, pid: i32, shells: &[Shell]) {
        match message {
            Message::Hello => {
                self.agent = Some((pid, process::group_of(pid).unwrap_or(-1)));
            }
            Message::Failed { kind, step, reason } => self.failure = Some(Message::error(kind, step, reason)),
            Message::Resumed => {
                (self.resumed, self.lent) = (true, self.foreground); // the agent has handed it over
                self.shells = self.known(shells);
                std::mem::take(&mut self.early).into_iter().for_each(|s| self.signal(s));
            }
            Message::Ended(status) => self.ended = Some(status),
            Message::Stopped(signal) => {
                // Who has been continued since continues the job first. A stop would discard that.
                while let Some(Ok(signal)) = self.has_signal().then(|| self.next_signal()) {
                    self.signal(signal);
                }
                if self.follows_stop() {
                    self.stop(signal);
                }
            }
            Message::NotRestarted => self.not_restarted = true,
            // A child that has ended keeps its number, as nobody has waited for it.
            Message::Signal { shell, signal } if shells.iter().any(|s| s.pid == shell) => drop(sys::kill(shell, signal)),
            Message::Signal { .. } => {}
            Message::AgentEnded { .. } | Message::Background(_) | Message::Filled => {}
        }
    }

    /// The job has ended.
    fn end(&mut self, status: i32, alone: bool) -> Outcome<End> {
        if alone {
            let _ = sys::wait(self.init, libc::__WALL);
        }
        if let Some(signal) = self.interrupted {
            sys::say(&format!("restart: interrupted by signal {signal}"));
            return Ok(End::Interrupted(signal));
        }
        if let Some(e) = self.failure.take() {
            return Err(e);
        }
        if !self.resumed {
            let how = if libc::WIFSIGNALED(status) {
                format!("was killed by signal {}", libc::WTERMSIG(status))
            } else {
                format!("ended with status {}", libc::WEXITSTATUS(status))
            };
            return Err(RestartError::at("restart", format!("the agent {how} before the job ran")));
        }
        Ok(self.ended_with(self.ended.unwrap_or(status)))
    }

    fn ended_with(&self, status: i32) -> End {
        End::of_command(status, self.not_restarted)
    }

    fn has_signal(&self) -> bool {
        numbers::poll(self.signals.as_raw_fd(), libc::POLLIN, 0).is_ok_and(|events| events != 0)
    }

    fn next_signal(&self) -> io::Result<i32> {
        // It begins with the number of the signal.
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        if rustix::io::read(&self.signals, &mut info)? != info.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let [a, b, c, d, ..] = info;
        Ok(i32::from_ne_bytes([a, b, c, d]))
    }

    fn signal(&mut self, signal: i32) {
        let Some((agent, group)) = self.agent.filter(|_| self.resumed) else {
            // Nothing of the job runs yet. Who means it to end has the restart given up; the rest is for the job.
            if matches!(signal, libc::SIGCONT | libc::SIGTTIN | libc::SIGTTOU) {
                return;
            }
            if !by_user(signal) {
                self.early.push(signal);
            } else {
                // Without namespaces of its own, whoever is left of the two ends what the agent leaves.
                let first = self.agent.filter(|_| self.initial).map_or(self.init, |(agent, _)| agent);
                let _ = sys::kill(first, libc::SIGKILL);
                self.interrupted = Some(signal);
            }
            return;
        };
        self.not_restarted |= by_user(signal);
        let _ = match signal {
            libc::SIGTTIN | libc::SIGTTOU => Ok(()),
            libc::SIGCONT => {
                self.give_terminal();
                sys::kill(-group, libc::SIGCONT)
            }
            // As the terminal would: to the group, not to the agent, which ignores them.
            libc::SIGINT | libc::SIGQUIT | libc::SIGTSTP => sys::kill(-group, signal),
            _ if self.without_agent => sys::kill(self.command().unwrap_or(-group), signal),
            _ => sys::kill(agent, signal),
        };
    }

    /// The command as seen from here, when it is a child of PID 1.
    fn command(&self) -> Option<i32> {
        let init = self.init;
        let children = std::fs::read_to_string(format!("/proc/{init}/task/{init}/children")).ok()?;
        children
            .split_whitespace()
            .filter_map(|w| w.parse().ok())
            .find(|pid| inside(*pid) == Some(i64::from(self.root)))
    }

    /// Those of `shells` whose stand-ins are there.
    fn known(&self, shells: &[Shell]) -> Vec<Known> {
        if shells.is_empty() {
            return Vec::new();
        }
        let all = descendants(self.init).unwrap_or_default();
        let seen: HashMap<i64, i32> = all.into_iter().filter_map(|(pid, _)| Some((inside(pid)?, pid))).collect();
        let of = |s: &Shell| {
            let standin = *seen.get(&i64::from(s.standin))?;
            Some(Known {
                pid: s.pid,
                gone: pidfd::open(s.pid).ok()?,
                standin,
                born: born(standin)?,
            })
        };
        shells.iter().filter_map(of).collect()
    }

    /// Whether this process is to be stopped as well, which only SIGCONT sent to itself ends. It is not before the job
    /// runs, nor where it goes on already: who stops all there is of a job with SIGSTOP continues each of them too, in any
    /// order.
    fn follows_stop(&self) -> bool {
        let of_job = match self.without_agent {
            true => self.command(),
            false => self.agent.map(|(agent, _)| agent),
        };
        let stands = of_job.is_some_and(|pid| proc::stat(pid).is_ok_and(|s| s.state == 'T'));
        self.resumed && stands
    }

    /// The job was stopped: so is the front process, with its whole group, as a shell expects of a job.
    fn stop(&mut self, signal: i32) {
        if let Some(tty) = self.terminal.as_ref().filter(|_| self.lent) {
            let group = sys::tcgetpgrp(tty.as_fd()).ok();
            let own = process::group();
            if group.is_some() && group != Some(own) {
                self.foreground_group = group;
            }
        }
        self.lent = false;
        let signal = if matches!(signal, libc::SIGTTIN | libc::SIGTTOU | libc::SIGTSTP) {
            signal
        } else {
            libc::SIGSTOP
        };
        let was = signals::change_mask(libc::SIG_UNBLOCK, 0);
        if signal != libc::SIGSTOP {
            // The other members of the group; our own copy is blocked and read back below.
            let _ = sys::kill(0, signal);
        }
        // A stop that cannot be blocked, for ourselves.
        let _ = sys::kill(std::process::id().cast_signed(), libc::SIGSTOP);
        signals::change_mask(libc::SIG_SETMASK, was);
        // The copies of the stop signal for ourselves are stale now: SIGCONT has discarded them.
    }

    /// Hands the terminal to the job if the front process has it.
    fn give_terminal(&mut self) {
        let (Some(tty), Some((_, group))) = (&self.terminal, self.agent) else {
            return;
        };
        let own = process::group();
        if sys::tcgetpgrp(tty.as_fd()).is_ok_and(|g| g == own) {
            self.lent = true;
            let wanted = self.foreground_group.unwrap_or(group);
            if sys::tcsetpgrp(tty.as_fd(), wanted).is_err() {
                let _ = sys::tcsetpgrp(tty.as_fd(), group);
            }
        }
    }

    /// Takes the terminal back from a job that had it.
    fn take_terminal(&mut self) {
        let Some(tty) = &self.terminal else { return };
        let own = process::group();
        let now = sys::tcgetpgrp(tty.as_fd());
        // A group that has just ended leaves the terminal with no foreground group.
        let gone = now.as_ref().is_ok_and(|g| *g == 0 || sys::kill(-*g, 0).is_err());
        let jobs = now.is_ok_and(|g| g != own && (self.agent.is_some_and(|(_, a)| a == g) || self.foreground_group == Some(g)));
        if self.lent && (gone || jobs) {
            let _ = sys::tcsetpgrp(tty.as_fd(), own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_is_ignored_is_nobodys_order() {
        let was = Disposition::set_default(libc::SIGHUP);
        assert!(by_user(libc::SIGHUP) && !by_user(libc::SIGUSR1));
        Disposition::set_ignored(libc::SIGHUP);
        assert!(!by_user(libc::SIGHUP));
        was.restore();
    }
}
