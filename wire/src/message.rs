//! What travels over the control socket, and the status document that `belay status --json` prints.

use crate::{Exit, Phase};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How safe a checkpoint must be before the request is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Committed in the job directory.
    #[default]
    Local,
    /// Also encoded across hosts: the loss of one does not reach it.
    Redundant,
    /// Also on a tier that outlives the nodes: a parallel file system or an object store.
    Durable,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Take a checkpoint.
    Checkpoint {
        /// End the program once the checkpoint is committed; it does not run past it.
        #[serde(default)]
        then_stop: bool,
        /// Level to reach.
        #[serde(default)]
        level: Level,
    },
    /// From a process that stands in for a remote shell: start the shell with its descriptors, outside of the job.
    RemoteStart {
        /// The remote shell.
        program: String,
        /// Its arguments.
        words: Vec<String>,
    },
    /// From such a process: run this outside of the job, with its environment, nothing to read, and what it prints
    /// going to a descriptor of it.
    RemoteAsk {
        /// The program.
        program: String,
        /// Its arguments.
        words: Vec<String>,
        /// The descriptor.
        output: i32,
    },
    /// From such a process: it was sent this signal.
    RemoteSignal {
        /// The signal.
        signal: i32,
    },
    /// Copy the newest generation to the durable tiers now, and wait for it.
    Flush,
    /// Report the job's status.
    Status,
    /// End the program: SIGTERM to the command, and SIGKILL to all that is left after the grace period.
    Stop {
        /// Grace period in milliseconds.
        grace_ms: u64,
    },
}

/// What the agent answers. Progress comes first; the last event holds the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A phase began.
    Phase {
        /// The phase.
        phase: Phase,
    },
    /// How far the current phase has come.
    Progress(Progress),
    /// Result: the checkpoint is committed.
    Checkpointed(Box<Checkpointed>),
    /// Result: the generation is on a durable tier.
    Flushed {
        /// The generation.
        generation: u64,
        /// What went wrong with other tiers.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        notes: Vec<String>,
    },
    /// Result: it is being done.
    Accepted,
    /// Result: the status.
    Status(Box<Status>),
    /// Result: the program has ended.
    Stopped {
        /// Status word of the command as `wait` reports it.
        wait_status: Option<i32>,
    },
    /// Result: it could not be done. The program goes on.
    Failed {
        /// Kind of failure.
        exit: Exit,
        /// One line: object, reason, next step.
        message: String,
        /// Whether the reason passes by itself when the program runs on for a moment; the line does not say so.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        passing: bool,
    },
}

impl Event {
    /// Whether this is the last event of an answer.
    pub fn is_last(&self) -> bool {
        !matches!(self, Event::Phase { .. } | Event::Progress(_))
    }
}

/// How far a phase has come.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The phase.
    pub phase: Phase,
    /// Processes in this checkpoint.
    pub processes: u32,
    /// Bytes written.
    pub bytes: u64,
    /// Bytes expected in all.
    pub bytes_expected: u64,
    /// Bytes per second since the phase began.
    pub bytes_per_s: f64,
}

/// A committed checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Checkpointed {
    /// The generation.
    #[serde(flatten)]
    pub generation: GenerationStatus,
    /// Time from the request to the commit, milliseconds.
    pub total_ms: f64,
    /// Whether the program was ended afterwards.
    pub stopped: bool,
    /// What will not be exactly as it was after a restart, one line each.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// How the memory of a generation was taken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SnapshotStatus {
    /// `copy_on_write`, `copy_on_write_capped` or `write_before_resume`.
    pub mode: String,
    /// Why so.
    pub reason: String,
    /// How often the program was stopped while it was written, because memory became short.
    pub stops: u32,
}

/// One generation in the status document.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct GenerationStatus {
    /// Number.
    pub generation: u64,
    /// Time of the commit.
    pub time_unix_s: u64,
    /// Level reached.
    pub level: Level,
    /// Processes in it.
    pub ranks: u32,
    /// Threads in it.
    pub threads: u32,
    /// Bytes of its files and of the stored memory they refer to.
    pub bytes: u64,
    /// Bytes that were written for it; the rest it shares with other generations.
    pub new_bytes: u64,
    /// Time the processes were blocked.
    pub blocked_ms: f64,
    /// Time of each phase.
    pub phases_ms: BTreeMap<String, f64>,
    /// How its memory was taken; absent in generations of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Box<SnapshotStatus>>,
    /// Bytes that were not stored, because the programs have declared that they overwrite them; none where all is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<u64>,
    /// What the programs had declared of their loops, where they are asked for it; absent in a job's first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<Box<DeclaredStatus>>,
    /// What of the memory of each process was new; absent in generations of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<Box<DirtyShare>>,
    /// Why only a sample of the pages was looked for by their contents (`--differential`), where that did not pay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_hashes: Option<Box<str>>,
    /// Whether its manifest is valid and every file is present with its length (contents are checked by `belay verify`).
    pub whole: bool,
    /// What is wrong with it, when it is not whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<Box<str>>,
    /// What of it is each host's, where the job has more than one: `ranks`, `threads`, `bytes` and `new_bytes` are
    /// those of all that are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<HostShare>,
    /// Which tier holds what of it. The job directory is called `job`.
    #[serde(default)]
    pub tiers: Vec<OnTier>,
}

/// What programs have declared of their loops, and what checkpoints could leave out by it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeclaredStatus {
    /// Bytes of the datasets.
    pub bytes: u64,
    /// What is alive of them where each process is stopped at its best site.
    pub at_best: u64,
    /// How many sites there are.
    pub sites: u32,
    /// Those at which least is alive, the best first: ten at most.
    pub best: Vec<DeclaredSite>,
}

/// A place of loops.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeclaredSite {
    /// As the program calls it.
    pub name: String,
    /// How often processes have come there lately.
    pub visits: u64,
    /// Bytes of datasets that were alive then, on average.
    pub alive: u64,
    /// Processes that were asked to wait there for the checkpoint.
    pub chosen: u32,
}

/// Of the memory of each process, the share that no generation before holds, from 0 to 1: the least, the median and the
/// greatest of all processes.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DirtyShare {
    /// The least.
    pub min: f64,
    /// The median; of a job on several hosts that of the hosts' medians.
    pub median: f64,
    /// The greatest.
    pub max: f64,
}

/// What one host has in a generation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct HostShare {
    /// The host.
    pub host: String,
    /// Processes; none where what it holds cannot be read from here.
    pub ranks: Option<u32>,
}

/// What one tier holds of a generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnTier {
    /// Name of the tier.
    pub tier: String,
    /// Kind of the tier: `memory`, `local`, `pfs` or `object`.
    pub kind: String,
    /// Bytes of what it stands for there, before compression.
    pub bytes: u64,
    /// Whether nothing of it is known to be missing there.
    pub whole: bool,
    /// The host whose tier it is, where that is one of a host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Ids of the keys without which it cannot be read there, where it is sealed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
    /// Why it cannot be read for want of a key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<String>,
}

/// One process in the status document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// PID as the program sees it.
    pub pid: i32,
    /// PID as the caller of `belay status` sees it; differs in a restarted job, which has PIDs of its own.
    pub host_pid: Option<i32>,
    /// Host.
    pub host: String,
    /// The part of the job that it belongs to: 0 for what runs beside the agent that was asked.
    #[serde(default)]
    pub part: u64,
    /// Command line.
    pub command: String,
    /// Threads.
    pub threads: u32,
    /// Resident memory.
    pub resident_bytes: u64,
}

/// The agent in the status document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentStatus {
    /// PID as the program sees it (`getppid` of the command).
    pub pid: i32,
    /// PID as the caller sees it.
    pub host_pid: Option<i32>,
    /// Process that waits for the command in the caller's shell, as the agent sees it; none when it has returned already.
    pub front_pid: Option<i32>,
}

/// What the job is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// The program runs.
    Running,
    /// The program runs, and a checkpoint is being taken or written.
    Checkpointing,
    /// The command has ended; processes that it left behind run on.
    Background,
    /// The program is being ended.
    Stopping,
    /// The program is about to run for the first time.
    Starting,
    /// It is about to go on from a checkpoint.
    Restarting,
    /// The agent was killed. The program runs on, without further checkpoints.
    Unattended,
    /// Nothing runs: the program was ended by `checkpoint --then stop`.
    Stopped,
    /// Nothing runs: the program has ended, as `wait_status` says.
    Finished,
    /// Nothing runs, and nobody has recorded an end: a kill, a crash, the end of an allocation.
    Killed,
}

/// The last failure of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastError {
    /// When.
    pub time_unix_s: u64,
    /// Kind of failure.
    pub exit: Exit,
    /// One line.
    pub message: String,
}

/// How an automatic interval was chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AutoInterval {
    /// The interval.
    pub interval_s: f64,
    /// What the last checkpoint cost the program.
    pub cost_ms: f64,
    /// Mean time to interrupt,
    pub mtti_s: f64,
    /// and where it comes from: `configured` or `observed`.
    pub mtti_from: String,
    /// Interruptions of this job so far.
    pub interrupts: u32,
}

/// What the next checkpoint is expected to take, on the host of the agent.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PredictedStatus {
    /// The program stands still.
    pub stop_s: f64,
    /// Until it is written.
    pub local_s: f64,
    /// To copy it to the durable tiers; none without these.
    pub durable_s: Option<f64>,
    /// To restart from it.
    pub restart_s: f64,
    /// Of so much memory,
    pub bytes: u64,
    /// of which so much is expected to have changed.
    pub new_bytes: u64,
    /// How many of the last generations have taught the factors: eight at most.
    pub generations: u32,
    /// What the times of the model were multiplied with.
    pub factors: Factors,
}

/// Observed by predicted, the median of the last eight generations; none where nothing was observed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Factors {
    /// Of the stop.
    pub stop: Option<f64>,
    /// Of the writing.
    pub local: Option<f64>,
    /// Of the copying.
    pub durable: Option<f64>,
    /// Of restarts.
    pub restart: Option<f64>,
}

/// What it is worth to look for what has changed: times by those of a checkpoint that writes all and hashes nothing.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DifferentialStatus {
    /// Time to hash a page and to look for it, by the time to write it.
    pub kappa: f64,
    /// The share of the pages that had changed at the newest checkpoint.
    pub dirty_share: f64,
    /// How much longer a differential one takes, where what has changed is hashed twice.
    pub delta: f64,
    /// The share from which on it does not pay then.
    pub break_even: f64,
    /// The same where every page is hashed once, as belay does.
    pub delta_hashed_once: f64,
    /// As above.
    pub break_even_hashed_once: f64,
}

/// A time as it was predicted and observed.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ComparedTime {
    /// None where nothing could be predicted.
    pub predicted_s: Option<f64>,
    /// None where it has not happened.
    pub observed_s: Option<f64>,
}

/// The times of a generation, which may be gone.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ComparedStatus {
    /// Number.
    pub generation: u64,
    /// The program stood still.
    pub stop: ComparedTime,
    /// It was written.
    pub local: ComparedTime,
    /// It was copied to the durable tiers.
    pub durable: ComparedTime,
    /// The job was restarted from it.
    pub restart: ComparedTime,
}

/// How the pace of a level was chosen: how often a checkpoint reaches it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AutoLevel {
    /// The level.
    pub level: Level,
    /// How often.
    pub interval_s: f64,
    /// What that cost the last time.
    pub cost_ms: f64,
    /// Mean time between losses that need it.
    pub mtti_s: f64,
}

/// The status document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Name of the job.
    pub name: String,
    /// The command.
    pub command: Vec<String>,
    /// The job directory.
    pub dir: String,
    /// What the job is doing.
    pub state: JobState,
    /// Whether an agent serves the job.
    pub running: bool,
    /// The agent.
    pub agent: Option<AgentStatus>,
    /// PID of the command as the program sees it.
    pub root_pid: Option<i32>,
    /// Status word of the command, once it has ended.
    pub wait_status: Option<i32>,
    /// Checkpoint interval: a duration in seconds as text, `auto`, or none.
    pub interval: Option<String>,
    /// Phase of the checkpoint under way.
    pub phase: Option<Phase>,
    /// Progress of the checkpoint under way.
    pub progress: Option<Progress>,
    /// Interval checkpoints left out because the one before was still being written.
    pub skipped: u64,
    /// How the automatic interval was chosen; none before the first checkpoint and without such an interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_interval: Option<AutoInterval>,
    /// The same for levels with an automatic pace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub auto_levels: Vec<AutoLevel>,
    /// What the next checkpoint takes; absent while nothing is known of the job's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted: Option<Box<PredictedStatus>>,
    /// The newest generations, also such as are gone, oldest first: predicted and observed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compared: Vec<ComparedStatus>,
    /// What it is worth to look for what has changed; absent where nothing was looked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differential_model: Option<Box<DifferentialStatus>>,
    /// How checkpoints find what the ones before have stored: `userfaultfd and hash`, `hash` (with the reason, where
    /// more was wanted) or `off`.
    pub differential: String,
    /// Last failure.
    pub last_error: Option<LastError>,
    /// Generations, oldest first.
    pub generations: Vec<GenerationStatus>,
    /// Live processes, on all hosts.
    pub processes: Vec<ProcessStatus>,
    /// Hosts with parts of the job whose agents have not told their processes in time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unheard: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_documented_form() {
        let r: Request = serde_json::from_str(r#"{"op":"checkpoint"}"#).unwrap();
        assert_eq!(
            r,
            Request::Checkpoint {
                then_stop: false,
                level: Level::Local
            }
        );
        let r: Request = serde_json::from_str(r#"{"op":"checkpoint","then_stop":true,"level":"local"}"#).unwrap();
        assert!(matches!(r, Request::Checkpoint { then_stop: true, .. }));
        let r: Request = serde_json::from_str(r#"{"op":"checkpoint","level":"durable"}"#).unwrap();
        assert!(matches!(
            r,
            Request::Checkpoint {
                level: Level::Durable,
                ..
            }
        ));
        assert!(serde_json::from_str::<Request>(r#"{"op":"checkpoint","level":"sometime"}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"op":"format"}"#).is_err());
        assert!(serde_json::from_str::<Request>("[]").is_err());
    }

    #[test]
    fn only_progress_is_followed_by_more() {
        assert!(!Event::Phase { phase: Phase::Suspend }.is_last());
        assert!(Event::Stopped { wait_status: None }.is_last());
        let failed = Event::Failed {
            exit: Exit::DiskFull,
            message: "x".into(),
            passing: false,
        };
        let line = serde_json::to_string(&failed).unwrap();
        assert_eq!(line, r#"{"event":"failed","exit":"disk_full","message":"x"}"#);
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), failed);
    }
}
