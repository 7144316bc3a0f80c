//! The checkpoint flow: gate, suspend, capture, drain, snapshot, resume, reopen, write.
//!
//! [`capture`] is the part that the application waits for (see `flow`); [`Snapshot::write`] is the part that runs
//! beside it. A failure before `resume` drops the `Suspended` guard, which puts every task back as it was: the
//! application goes on, the generation is dropped.
//!
//! `flow` is the order of the phases. `stop` seizes, stops and lets go; `inject` runs code of ours in a stopped
//! process; `state` is what a process is, `memory` what its memory is and how it comes into the store.
//!
//! Must be called from one thread only, the agent's main thread, because the kernel ties a traced task to the thread
//! that traces it.

mod access;
mod clock;
mod error;
mod flow;
mod gate;
mod inject;
mod memory;
mod rest;
mod state;
mod stop;

pub use error::CaptureError;
pub use inject::injected::load as load_injected;
pub use memory::code::Code;
pub use memory::headroom;
pub use memory::held::adopt;
pub use memory::tracking::{Findings, Tracking};
pub use rest::Held;
pub use stop::stopped::{release, take_ended};

use crate::flow::Order;
use crate::memory::{code, family, mappings, snapshot, writing};
use belay_access::site::Reach;
use belay_image::extents;
use belay_image::manifest::{Declared, FileEntry};
use belay_image::model::Job;
use belay_image::sections::{Kind, SectionFile};
use belay_image::{checksum, BLOB_FILE, JOB_FILE};
use belay_plugins::{Descriptors, Group, Names};
use belay_storage::session::Session;
use belay_wire::Phase;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Choices for one checkpoint.
#[derive(Debug, Clone)]
pub struct Options {
    /// Up to which length open files have their contents saved (see [`belay_plugins::CaptureEnv`]).
    pub saved_up_to: u64,
    /// When the job was launched.
    pub launched: SystemTime,
    /// Children of the agent that are no part of the job: they lead to its other nodes.
    pub outside: Vec<i32>,
    /// At the root of a job that may have parts on other hosts: the stand-ins for remote shells that the agent has heard of.
    pub standins: Option<Vec<i32>>,
    /// What this node has been called since the job was launched.
    pub names: Names,
    /// The job's processes ask about calls (see [`belay_plugins::lead`]): the one system call filter that they have is
    /// of the restart's making.
    pub led: bool,
    /// Save the programs and libraries that the processes map.
    pub save_code: bool,
    /// Number of threads that write, in the snapshots of all processes together.
    pub writers: u32,
    /// The processes stay stopped after the snapshot.
    pub hold: bool,
    /// Libraries in the processes are known to take part: they are asked to come to rest first.
    pub gate: bool,
    /// How long that may take.
    pub gate_limit: Duration,
    /// What becomes of data of which programs declare what they do to it.
    pub access: Access,
    /// Longest wait for programs to come to a loop before which little of their data is alive.
    pub site_wait: Duration,
}

/// What becomes of declared data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It is stored.
    Off,
    /// It is stored, and programs are asked to record what they do to it; which loops would decide otherwise.
    Watch(Reach),
    /// What they overwrite before they read it is not stored.
    LeaveOut(Reach),
}

impl Access {
    /// Programs are heard, and data may be left out; `certain`: only what the loops overwrite before which the processes
    /// are stopped.
    pub fn listen(leave_out: bool, certain: bool) -> Self {
        let reach = if certain { Reach::Next } else { Reach::All };
        if leave_out {
            Access::LeaveOut(reach)
        } else {
            Access::Watch(reach)
        }
    }
}

/// What has been captured while the application was stopped, and the snapshot processes still to be written.
#[derive(Debug)]
pub struct Snapshot {
    /// Time from the first stop to the last resume; where a library takes part, from its order to come to rest until it goes on.
    pub blocked: Duration,
    /// Duration of each phase so far.
    pub phases: Vec<(Phase, Duration)>,
    /// Somewhere in the job a library takes part, which is to be asked the next time too.
    pub gated: bool,
    /// The command was no more among the processes: it had ended.
    pub root_had_ended: bool,
    /// Number of live processes.
    pub processes: u32,
    /// Number of threads.
    pub threads: u32,
    /// What will not be the same after a restart, for the user.
    pub notes: Vec<String>,
    /// What the programs have declared of their loops lately.
    pub declared: Option<Declared>,
    /// How the memory was taken,
    pub mode: headroom::Mode,
    /// and why so.
    pub reason: String,
    dir: PathBuf,
    job: Job,
    descriptors: Descriptors,
    code: Code,
    save_code: bool,
    children: Vec<snapshot::Child>,
    writers: u32,
    watch: Option<headroom::Watch>,
}

/// How often a capture is tried that is refused for reasons that pass by themselves, such as a connection about to be accepted.
const TRIES: u32 = 10;

/// Stops every descendant of the calling process, captures its state into `dir` (which exists and is empty), takes
/// snapshots and lets the processes go on. Call from the agent's main thread. `session` stores what must be stored at
/// once, `tracking` knows what has not been written since the last commit; `on_phase` is called at the start of each
/// phase.
///
/// Where the processes must not go on yet ([`Options::hold`], or too little memory is free for copies on write) they
/// stay stopped until [`Held`] is dropped, which must happen on the calling thread.
///
/// Where only passing reasons stand against it, the program runs on for a moment and it is tried again. The moments
/// grow from 1 to 256 ms. It is tried again at once, and with the gate, where a library is found that was not asked to
/// come to rest.
///
/// SIGCHLD is consumed while tasks are waited for; one is raised at the end so that the caller's loop looks for ended children.
pub fn capture(
    root_pid: i32,
    dir: &Path,
    options: &Options,
    (session, tracking): (&mut Session, &mut Tracking),
    group: Option<&dyn Group>,
    on_phase: &mut dyn FnMut(Phase),
) -> Result<(Snapshot, Option<Held>), CaptureError> {
    // Several nodes can only try again together.
    let tries = if group.is_some() { 1 } else { TRIES };
    let mut gate = options.gate;
    let order = Order {
        root_pid,
        dir,
        options,
        gate,
        group,
    };
    for attempt in 1..tries {
        session.reset();
        match flow::take(Order { gate, ..order }, (session, tracking), on_phase) {
            Err(CaptureError::Refused(reasons)) if reasons.iter().all(|r| r.passing) => {
                tracing::debug!(attempt, ?reasons, "refused for the moment");
                std::thread::sleep(Duration::from_millis(1 << (attempt - 1)));
            }
            Err(CaptureError::NotAsked(reason)) => {
                tracing::debug!(attempt, %reason, "once more, with the gate");
                gate = true;
            }
            done => return done,
        }
    }
    session.reset();
    flow::take(Order { gate, ..order }, (session, tracking), on_phase)
}

impl Snapshot {
    /// The snapshot children, which are children of the caller now.
    pub fn copies(&self) -> Vec<i32> {
        self.children.iter().filter_map(snapshot::Child::copy).collect()
    }

    /// Bytes that are going to be written at most.
    pub fn bytes(&self) -> u64 {
        self.children.iter().map(snapshot::Child::resident_bytes).sum()
    }

    /// Where the memory that this costs must be watched: what watches it.
    pub fn take_watch(&mut self) -> Option<headroom::Watch> {
        self.watch.take()
    }

    /// Stores the snapshots in `session`; may run on any thread. `progress` receives (bytes dealt with, bytes
    /// expected). Returns the files of the generation, all of them, and the chunks, synced to the device, and what
    /// [`Tracking::commit`] is to be given after the commit.
    pub fn write(mut self, session: &mut Session, progress: &dyn Fn(u64, u64)) -> Result<(Vec<FileEntry>, Findings), CaptureError> {
        let mut progress = snapshot::Progress::new(progress);
        let mut identities = mappings::Identities::default();
        for child in &self.children {
            progress.expect(child.resident_bytes());
            child.copy().into_iter().for_each(headroom::offer);
        }
        session.write_held()?;
        self.code.check(session);
        let (mut armed, mut left_out) = (Vec::new(), 0);
        let mut children = std::mem::take(&mut self.children);
        family::find(&mut children, &self.job.processes);
        session.expect(children.iter().map(snapshot::Child::pages).sum());
        writing::all(
            children,
            self.writers,
            session,
            &mut identities,
            &mut progress,
            &mut |pid, written, identities| {
                armed.extend(written.armed);
                left_out = written.spared_bytes.saturating_add(left_out);
                if let Some(p) = self.job.processes.iter_mut().find(|p| p.pid == pid) {
                    p.vmas = written.vmas;
                    p.left_out = written.left_out;
                    p.exe_identity = code::identity_of_program(p, identities);
                }
            },
        )?;
        for p in self.job.processes.iter_mut().filter(|p| p.shares_mm_with != 0) {
            p.exe_identity = code::identity_of_program(p, &mut identities);
        }
        let restored = |path: &Path| self.descriptors.restores(path);
        let place = (&mut *session, &mut identities);
        self.job.code = self.code.store(&self.job.processes, self.save_code, restored, place)?;
        // Before pages of older chunks move to new ones.
        let dirty = session.dirty();
        session.compact()?;
        session.seal()?;
        let mut files = Vec::new();
        for (id, table) in session.tables() {
            let mut index = SectionFile::new();
            index.push(Kind::Extents, extents::encode(table));
            index.write(&self.dir.join(id.file_name()))?;
            files.push(id.file_name());
        }
        let mut sections = SectionFile::new();
        sections.push_json(Kind::Descriptors, &self.descriptors)?;
        sections.push_json(Kind::Job, &self.job)?;
        sections.write(&self.dir.join(JOB_FILE))?;
        files.push(JOB_FILE.to_owned());
        files.push(BLOB_FILE.to_owned());
        let files = files
            .into_iter()
            .map(|name| entry(&self.dir, name))
            .collect::<Result<_, _>>()?;
        let code = self.code;
        let found = Findings {
            armed,
            code,
            left_out,
            dirty,
        };
        Ok((files, found))
    }
}

/// Makes file `name` durable and describes it for the manifest. The references to the blob file carry a checksum each;
/// it is not read again.
fn entry(dir: &Path, name: String) -> Result<FileEntry, CaptureError> {
    let path = dir.join(&name);
    let fail = |step, e| belay_image::ImageError::io(step, &path, e);
    let file = std::fs::File::open(&path).map_err(|e| fail("open", e))?;
    file.sync_all().map_err(|e| fail("fsync", e))?;
    let bytes = file.metadata().map_err(|e| fail("stat", e))?.len();
    let xxh3 = if name == BLOB_FILE {
        None
    } else {
        Some(checksum(&std::fs::read(&path).map_err(|e| fail("read", e))?))
    };
    Ok(FileEntry { name, bytes, xxh3 })
}
