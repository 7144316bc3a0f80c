//! The status document.

use super::Agent;
use crate::checkpoint::Writing;
use crate::interval::Interval;
use crate::jobdir::{Description, Differential, JobDir};
use crate::{processes, tiers};
use belay_kernel::proc;
use belay_wire::{AgentStatus, JobState, Status};

impl Agent {
    /// The status document; PIDs as the agent sees them.
    pub(super) fn status(&self) -> Status {
        let mut status = at_rest(&self.dir, &self.description);
        status.state = match (self.ending, &self.writing, self.root_status) {
            (Some(_), ..) => JobState::Stopping,
            (None, Some(_), _) => JobState::Checkpointing,
            (None, None, Some(_)) => JobState::Background,
            (None, None, None) => JobState::Running,
        };
        status.running = true;
        status.agent = Some(AgentStatus {
            pid: self.pid,
            host_pid: None,
            front_pid: self.channel.as_ref().and_then(|_| proc::stat(self.pid).ok()).map(|s| s.ppid),
        });
        status.root_pid = Some(self.root_pid);
        status.wait_status = self.root_status;
        status.phase = self.phase;
        status.progress = self.writing.as_ref().map(Writing::progress);
        if let (None, Some(progress)) = (self.phase, self.flush.progress()) {
            (status.phase, status.progress) = (Some(progress.phase), Some(progress));
        }
        status.skipped = self.skipped;
        status.auto_interval.clone_from(&self.chosen);
        status.differential = match (self.description.differential, self.tracking.hindrance()) {
            (Differential::Written, Some(reason)) => format!("hash: {reason}"),
            (Differential::Written, None) => format!("{} and hash", self.tracking.method()),
            (how, _) => method(how).to_owned(),
        };
        if let Some(why) = self.engine.why_without() {
            status.differential += &format!("; hash is off for now: {why}");
        }
        status.last_error.clone_from(&self.last_error);
        status.processes = processes::describe(self.pid, &self.outside());
        status
    }
}

fn method(how: Differential) -> &'static str {
    match how {
        Differential::Written => "written pages and hash",
        Differential::Hash => "hash",
        Differential::Off => "off",
    }
}

/// The status document of a job without an agent.
pub fn at_rest(dir: &JobDir, d: &Description) -> Status {
    Status {
        name: d.name.clone(),
        command: d.command.clone(),
        dir: dir.path().display().to_string(),
        state: JobState::Ended,
        running: false,
        agent: None,
        root_pid: None,
        wait_status: d.wait_status,
        interval: match d.interval {
            Interval::Never => None,
            other => Some(other.to_string()),
        },
        phase: None,
        progress: None,
        skipped: 0,
        auto_interval: None,
        differential: method(d.differential).to_owned(),
        last_error: None,
        generations: tiers::statuses(dir, d),
        processes: Vec::new(),
    }
}
