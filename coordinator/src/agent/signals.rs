//! Signals that are passed on, processes that end, and the job going to the background.

use super::Agent;
use crate::jobdir::is_suspended;
use crate::processes;
use crate::relay::Message;
use crate::sys::{self, JobControl, Signal};
use belay_kernel::{kcmp, proc};
use belay_restart::by_user;

impl Agent {
    pub(super) fn take_signals(&mut self) {
        for s in self.signals.drain() {
            self.take_signal(s);
        }
    }

    pub(super) fn take_signal(&mut self, s: Signal) {
        // Whether to this process alone or to its group.
        if by_user(s.number) {
            self.end_without_restart();
        }
        match s.number {
            libc::SIGCHLD => self.reap(),
            libc::SIGCONT => {}
            // The terminal sends to the group.
            libc::SIGINT | libc::SIGQUIT if !s.from_process() && self.root_status.is_some() => self.give_up_checkpoint(),
            _ if !s.from_process() => {}
            _ => match &self.channel {
                // The front of a restarted job sends these to the job's process group, as a terminal would.
                None if matches!(s.number, libc::SIGINT | libc::SIGQUIT) => {}
                None => self.pass_on(s),
                Some(channel) => {
                    sys::group_barrier();
                    if self.relay.own(s) {
                        channel.send(Message::Fence);
                    }
                }
            },
        }
    }

    /// The command has ended, and whoever waits for the last checkpoint to be written does not want to wait any more.
    fn give_up_checkpoint(&self) {
        for copy in processes::snapshots(self.pid) {
            tracing::warn!(pid = copy, "interrupted: the checkpoint being written is given up");
            sys::kill(copy, libc::SIGKILL);
        }
    }

    pub(super) fn pass_on(&mut self, s: Signal) {
        if self.root_status.is_none() {
            tracing::debug!(signal = s.number, "passed on");
            s.pass_on(self.root_pid);
        } else if by_user(s.number) {
            self.give_up_checkpoint();
            self.stop_awaiting_flush();
        }
    }

    pub(super) fn hear_front(&mut self) {
        let Some(received) = self.channel.as_ref().map(|c| c.receive(false)) else {
            return;
        };
        match received {
            Ok(Some(Message::Signal(s))) if s.number == libc::SIGCONT => {
                // The shell continued the front; a command with a process group of its own was not reached.
                if self.root_status.is_none() && is_suspended(self.root_pid) {
                    if let Some(group) = self.foreground.take() {
                        sys::hand_over_terminal(group);
                    }
                    sys::kill(self.root_pid, libc::SIGCONT);
                }
            }
            Ok(Some(Message::Signal(s))) => {
                if by_user(s.number) {
                    self.end_without_restart();
                }
                self.take_signals();
                if self.relay.reported(s) {
                    self.pass_on(s);
                }
            }
            Ok(Some(Message::FencePassed)) => {
                let (alone, again) = self.relay.passed();
                alone.into_iter().for_each(|s| self.pass_on(s));
                if let (true, Some(channel)) = (again, &self.channel) {
                    channel.send(Message::Fence);
                }
            }
            Ok(Some(other)) => tracing::warn!(?other, "unexpected message from the front"),
            Ok(None) => {}
            Err(_) => {
                self.channel = None;
                self.lose_front();
                let left = self.relay.alone();
                left.into_iter().for_each(|s| self.pass_on(s));
            }
        }
    }

    /// Reaps what has ended: the command, orphans of the job, snapshot children (the writer watches them by descriptor).
    pub(super) fn reap(&mut self) {
        let collected = belay_capture::take_ended();
        for (pid, status) in collected.into_iter().chain(std::iter::from_fn(sys::reap)) {
            if libc::WIFSTOPPED(status) {
                belay_capture::release(pid);
                continue;
            }
            let ended = libc::WIFEXITED(status) || libc::WIFSIGNALED(status);
            if ended && self.remote_ended(pid, status) {
                continue;
            }
            if pid == self.root_pid && ended && self.root_status.is_none() {
                tracing::info!(status, "command ended");
                self.root_status = Some(status);
                self.note_end(status);
            }
        }
        self.end_errands();
        if self.root_status.is_none() {
            if let Some(what) = sys::job_control(self.root_pid) {
                self.follow_job_control(what);
            }
        }
        if self.writing.is_none() {
            // A process that is killed while it is being copied can leave a copy that nobody knows of.
            for copy in processes::snapshots(self.pid) {
                tracing::warn!(pid = copy, "snapshot that belongs to no checkpoint ended");
                sys::kill(copy, libc::SIGKILL);
            }
            if let (Some(status), None) = (self.root_status, self.ending) {
                if self.has_job_children() && !self.may_have_lost() {
                    self.go_to_background(status);
                }
            }
        }
    }

    /// Whether a process of the job is left: snapshots that are on their way out do not count.
    fn has_job_children(&self) -> bool {
        let mut others = processes::snapshots(self.pid);
        others.extend(self.outside());
        // Parts that end empty their local tiers first, or their shells have something to print yet, and whoever waits
        // for the job may end all that is left on their hosts: stand-ins wait for them.
        others.extend(self.nodes.iter().flat_map(|nodes| match self.uses_local_tiers() {
            true => nodes.standins(),
            false => nodes.parting_standins(),
        }));
        proc::children(self.pid)
            .unwrap_or_default()
            .iter()
            .any(|c| !others.contains(c))
    }

    /// The command was stopped or continued by other means than the terminal: what the shell waits for must follow, or
    /// the terminal would be stuck.
    fn follow_job_control(&mut self, what: JobControl) {
        let Some(channel) = &self.channel else { return };
        match what {
            JobControl::Stopped(signal) => {
                // An interactive shell has the terminal in a group of its own, and gets it back when it goes on.
                self.foreground = sys::terminal_group();
                if self.foreground.is_some() {
                    channel.send(Message::Suspended(signal));
                }
            }
            JobControl::Continued if is_suspended(sys::parent()) => sys::kill(sys::parent(), libc::SIGCONT),
            JobControl::Continued => {}
        }
    }

    /// The command has ended, others go on: the shell gets its prompt back, the agent stays.
    pub(super) fn go_to_background(&mut self, status: i32) {
        if self.background.is_none() {
            tracing::info!("processes that the command left behind go on");
            self.background = Some(status);
        }
        if let Some(channel) = self.channel.take() {
            channel.send(Message::Background(status));
        }
        self.release_stdio();
        self.set_tick();
    }

    /// In the background, gives up the standard descriptors that no process of the job uses any more: whoever reads the
    /// other end must see its end.
    pub(super) fn release_stdio(&self) {
        let live = processes::live(self.pid, &self.outside());
        for fd in 0..3 {
            let used = live.iter().any(|pid| {
                let same = |theirs| kcmp::compare_files(self.pid, fd, *pid, theirs).is_ok_and(|o| o.is_eq());
                proc::fds(*pid).unwrap_or_default().into_iter().any(same)
            });
            if !used {
                if let Err(e) = sys::replace_by_null(fd) {
                    tracing::warn!(fd, error = %e, "give up a standard descriptor");
                }
            }
        }
    }
}
