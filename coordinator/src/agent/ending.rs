//! Time passing, and the end of the job.

use super::{asking, Agent, Ending, KILL_PERIOD, PROGRESS_PERIOD, SOCKET_PERIOD, STDIO_PERIOD};
use crate::jobdir::Lock;
use crate::nodes::Nodes;
use crate::relay::Message;
use crate::{processes, sys, tiers, Failure};
use belay_kernel::proc;
use belay_wire::{Event, Exit};
use std::time::Duration;

impl Agent {
    pub(super) fn set_tick(&mut self) {
        let period = if self.ending == Some(Ending::Forced) {
            Some(KILL_PERIOD)
        } else if self.writing.is_some() || self.flush.is_awaited() {
            Some(PROGRESS_PERIOD)
        } else if self.asking.is_open() {
            Some(asking::PERIOD)
        } else if self.root_status.is_some() {
            Some(STDIO_PERIOD)
        } else {
            self.listener.is_some().then_some(SOCKET_PERIOD)
        };
        if let Err(e) = self.tick.set(period, period.unwrap_or_default()) {
            tracing::error!(error = %e, "set the tick timer");
        }
    }

    pub(super) fn on_tick(&mut self) {
        if self.ending == Some(Ending::Forced) {
            self.kill_all();
            self.end_shells();
            self.give_up_hung();
        }
        self.keep_socket();
        self.tell_flush_progress();
        self.look_for_answers();
        if let Some(writing) = &self.writing {
            let progress = Event::Progress(writing.progress());
            for (id, _) in &writing.wanted.by {
                self.clients.send(*id, &progress);
            }
        } else if self.root_status.is_some() {
            self.reap();
            self.release_stdio();
        }
    }

    pub(super) fn ask_end(&mut self, grace: Duration) {
        if grace.is_zero() {
            return self.force_end();
        }
        if self.ending.is_none() {
            self.ending = Some(Ending::Asked);
        }
        if let Err(e) = self.grace.set(Some(grace), Duration::ZERO) {
            tracing::error!(error = %e, "set the grace timer");
            return self.force_end();
        }
        for pid in processes::live(self.pid, &self.outside()) {
            sys::kill(pid, libc::SIGTERM);
            sys::kill(pid, libc::SIGCONT);
        }
    }

    pub(super) fn force_end(&mut self) {
        self.ending = Some(Ending::Forced);
        self.forced.get_or_insert_default();
        self.kill_all();
        self.set_tick();
    }

    /// What SIGKILL does not end is not waited for any longer; where the job was to be restarted, that is left to the user.
    fn give_up_hung(&mut self) {
        let left = processes::live(self.pid, &self.outside());
        let stuck = self.forced.as_mut().is_some_and(|f| f.is_stuck(&left, proc::END_LIMIT));
        if !stuck || left.is_empty() || self.hung {
            return;
        }
        let failure = Failure::system(format!("end the job on {}", sys::host()), &proc::hung(left.into_iter()));
        tracing::error!(error = %failure, "given up");
        sys::say(&failure.to_string());
        self.end_without_restart();
        // What was to be stopped after its checkpoint has one.
        self.result.get_or_insert(i32::from(failure.exit.code()) << 8);
        self.hung = true;
    }

    pub(super) fn kill_all(&mut self) {
        for pid in processes::live(self.pid, &self.outside()) {
            sys::kill(pid, libc::SIGKILL);
        }
        self.reap();
    }

    pub(super) fn close(&mut self) {
        self.stop_telling();
        self.lock.iter().for_each(Lock::leaving);
        if let (Some(_), false) = (self.listener.take(), self.losses.deposed) {
            if let Err(e) = self.dir.remove_socket() {
                tracing::warn!(path = %self.dir.socket().display(), error = %e, "remove the control socket");
            }
        }
        if let Some(lock) = self.lock.take() {
            lock.release();
        }
    }

    /// Whether the parts of the job may have chunks in local tiers of their hosts.
    pub(super) fn uses_local_tiers(&self) -> bool {
        self.description.config.local().next().is_some()
    }

    /// At the root: whether parts are there that end, and so still empty their local tiers. Whoever waits for this
    /// agent may end all that is left on their hosts. Where the program hangs, they have had their time, and may never
    /// end.
    pub(super) fn awaits_parts(&self) -> bool {
        let nodes = self.nodes.iter().filter(|n| !n.is_part());
        let mut joined = nodes.flat_map(|n| n.remotes.values().filter(|r| n.is_there(r)));
        self.uses_local_tiers() && !self.hung && !self.is_late() && joined.next().is_some()
    }

    /// Everything goes home; what cannot is said.
    fn empty_local_tiers(&self) {
        let Some(mover) = self.engine.mover() else { return };
        if let Err(e) = mover.finish() {
            tracing::error!(error = %e, "chunks stay in local tiers");
        }
        if let Some((bytes, why)) = mover.left() {
            let (host, dir) = (sys::host(), self.dir.shown());
            sys::say(&format!(
                "{bytes} bytes of checkpoints stay in local tiers on {host}: {why}; the next restart moves them to {dir}"
            ));
        }
        tiers::local::remove_empty(&self.dir, self.seat.as_ref().map(|s| s.tag));
    }

    /// Whether the command has ended as programs do that touch memory which is not there, after a restart from a
    /// generation in which some was left out, and nothing newer is there to go on from.
    fn is_astray(&self) -> bool {
        const ENDS: [i32; 3] = [libc::SIGABRT, libc::SIGBUS, libc::SIGSEGV];
        let touched = self.root_status.is_some_and(|status| {
            let by_signal = libc::WIFSIGNALED(status) && ENDS.contains(&libc::WTERMSIG(status));
            // As shells and launchers of MPI tell it.
            by_signal
                || ENDS
                    .iter()
                    .any(|s| libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 128 + s)
        });
        self.since.complete.is_none() && (self.description.astray || touched && self.since.lacks)
    }

    /// Nothing of the job is left: record how it ended, give the directory back, then tell everyone who waits for it.
    pub(super) fn end(mut self) -> i32 {
        self.leave_memory();
        self.give_up_flush();
        self.empty_local_tiers();
        self.give_up_encoding();
        self.description.wait_status = self.result.or(self.root_status);
        self.description.astray = self.is_astray();
        self.description.history.end(sys::now_unix_s());
        let described = if self.losses.deposed {
            Ok(())
        } else {
            self.dir.describe(&self.description)
        };
        if let Err(failure) = described {
            tracing::error!(error = %failure, "record the end");
        }
        let is_done = self.description.wait_status == Some(0) && !self.losses.deposed;
        if is_done && !self.nodes.as_ref().is_some_and(Nodes::is_part) {
            tiers::tell_end(&self.dir, &self.description);
        }
        let result = self.result.or(self.root_status).unwrap_or(0);
        if let Some(tree) = self.nodes.as_ref().and_then(Nodes::tree) {
            tree.ends_with(result);
        }
        tracing::info!(wait_status = ?self.root_status, "ended");
        self.close();
        for (id, _) in self.queued.take().map(|w| w.by).unwrap_or_default() {
            self.fail(id, Exit::ProgramEnded, "the program ended before the checkpoint was taken");
        }
        for (id, mut event) in std::mem::take(&mut self.farewells) {
            if let Event::Stopped { wait_status } = &mut event {
                *wait_status = self.root_status;
            }
            self.clients.send(id, &event);
        }
        if let Some(channel) = self.channel.take() {
            channel.send(Message::Ended(result));
        }
        self.clients.deliver();
        result
    }
}
