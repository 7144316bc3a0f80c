//! The status document.

use super::{stopped_after_checkpoint, Agent};
use crate::checkpoint::Writing;
use crate::forecast::Forecast;
use crate::interval::Interval;
use crate::jobdir::{Description, Differential, Holder, JobDir};
use crate::{processes, sys, tiers};
use belay_kernel::proc;
use belay_wire::{AgentStatus, JobState, ProcessStatus, Status};

impl Agent {
    /// The status document; PIDs as the agent sees them.
    pub(super) fn status(&self) -> Status {
        let state = match (self.ending, &self.writing, self.root_status) {
            (Some(_), ..) => JobState::Stopping,
            (None, Some(_), _) => JobState::Checkpointing,
            (None, None, Some(_)) => JobState::Background,
            (None, None, None) => JobState::Running,
        };
        let mut status = document(&self.dir, &self.description);
        (status.state, status.running) = (state, true);
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
        let chosen = [self.encoding.turn.chosen.clone(), self.flush.turn.chosen.clone()];
        status.auto_levels = chosen.into_iter().flatten().collect();
        status.differential = match (self.description.differential, self.tracking.hindrance()) {
            (Differential::Written, Some(reason)) => format!("hash: {reason}"),
            (Differential::Written, None) => format!("{} and hash", self.tracking.method()),
            (how, _) => method(how).to_owned(),
        };
        if let Some(why) = self.engine.why_without() {
            status.differential += &format!("; hash is off for now: {why}");
        }
        status.last_error.clone_from(&self.last_error);
        status.processes = self.processes();
        add_forecast(&mut status, &self.forecast);
        status
    }

    /// The live processes beside this agent.
    pub(super) fn processes(&self) -> Vec<ProcessStatus> {
        let part = self.nodes.as_ref().and_then(|n| n.part).unwrap_or(0);
        processes::describe(self.pid, &self.outside(), part)
    }
}

/// What is predicted; where there has been no checkpoint, from the processes' memory.
fn add_forecast(status: &mut Status, forecast: &Forecast) {
    let processes = u32::try_from(status.processes.len()).unwrap_or(u32::MAX);
    let resident = status.processes.iter().map(|p| p.resident_bytes).sum();
    status.predicted = forecast.status((processes, resident));
    status.compared = forecast.compared();
    status.differential_model = forecast.differential();
}

fn method(how: Differential) -> &'static str {
    match how {
        Differential::Written => "written pages and hash",
        Differential::Hash => "hash",
        Differential::Off => "off",
    }
}

/// The status document of a job whose agent cannot be asked, while `holder` has its lock.
pub fn at_rest(dir: &JobDir, d: &Description, holder: Option<&Holder>) -> Status {
    let mut status = document(dir, d);
    add_forecast(&mut status, &Forecast::of(dir, d));
    status.state = unasked(holder, d, !status.generations.is_empty());
    if status.state == JobState::Unattended && !dir.has_socket() {
        // Whoever kills an agent leaves its socket: somebody has removed that alone.
        status.state = JobState::Running;
    }
    status.running = status.state == JobState::Running;
    if status.state == JobState::Restarting {
        // How it ended before is recorded until it runs again.
        status.wait_status = None;
    }
    status
}

/// What a job is doing whose agent cannot be asked, where `holder` has its lock.
fn unasked(holder: Option<&Holder>, d: &Description, restarts: bool) -> JobState {
    let here = |h: &Holder| h.host().is_none_or(|host| host == sys::host());
    match holder.filter(|h| h.runs()) {
        // Its socket can be reached on its own host only.
        Some(h) if h.serving && !here(h) => JobState::Running,
        Some(h) if h.serving => JobState::Unattended,
        Some(_) if restarts => JobState::Restarting,
        Some(_) => JobState::Starting,
        None => match d.wait_status {
            None => JobState::Killed,
            Some(_) if d.history.since_unix_s.is_some() => JobState::Killed,
            Some(w) if w == stopped_after_checkpoint() => JobState::Stopped,
            Some(_) => JobState::Finished,
        },
    }
}

/// What is known of a job without its agent.
fn document(dir: &JobDir, d: &Description) -> Status {
    Status {
        name: d.name.clone(),
        command: d.command.iter().map(ToString::to_string).collect(),
        dir: dir.path().display().to_string(),
        state: JobState::Killed,
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
        auto_levels: Vec::new(),
        predicted: None,
        compared: Vec::new(),
        differential_model: None,
        differential: method(d.differential).to_owned(),
        last_error: None,
        generations: tiers::statuses(dir, d),
        processes: Vec::new(),
        unheard: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_without_an_answer_is_starting_restarting_running_elsewhere_unattended_or_over() {
        let holder = |word: &str, serving| Holder {
            word: word.into(),
            serving,
        };
        let mut d = Description::new(None, vec!["x".into()]);
        d.history.begin(1);
        let here = format!("belay run (process 3 on {})", sys::host());
        for (holder, restarts, state) in [
            (Some(holder(&here, false)), false, JobState::Starting),
            (Some(holder(&here, false)), true, JobState::Restarting),
            (Some(holder(&here, true)), true, JobState::Unattended),
            (
                Some(holder("belay run (process 3 on another)", true)),
                true,
                JobState::Running,
            ),
            (
                Some(holder("belay run (process 3 on another)", false)),
                true,
                JobState::Restarting,
            ),
            (Some(holder("belay gc (process 3 on another)", false)), true, JobState::Killed),
            (None, true, JobState::Killed),
        ] {
            assert_eq!(unasked(holder.as_ref(), &d, restarts), state, "{holder:?}");
        }
        d.history.end(2);
        for (status, state) in [
            (Some(0), JobState::Finished),
            (Some(stopped_after_checkpoint()), JobState::Stopped),
            (None, JobState::Killed),
        ] {
            d.wait_status = status;
            assert_eq!(unasked(None, &d, true), state);
        }
    }
}
