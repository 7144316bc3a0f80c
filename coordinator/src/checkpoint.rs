//! A checkpoint under way: captured on the agent's main thread (which is the tracer), written on a thread of its own,
//! committed on the main thread.
//!
//! ```text
//! begin ──(capture: program blocked)──> Writing ──(thread)──> finish ──(commit)──> generation
//!   └─ fails: draft dropped               └─ fails: draft dropped
//! ```
//! Where little memory is free the program stands still during a part of the writing or all of it (`belay_capture::headroom`).

use crate::clients::ClientId;
use crate::generations::{self, Draft, Facts};
use crate::nodes::table::Row;
use crate::sys::Wake;
use crate::Failure;
use belay_capture::headroom::{self, Advice, Watch};
use belay_capture::{CaptureError, Findings, Held, Options, Snapshot, Tracking};
use belay_image::manifest::{FileEntry, Taken};
use belay_kernel::prompt;
use belay_plugins::Group;
use belay_storage::session::Session;
use belay_wire::{Exit, GenerationStatus, Phase, Progress};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Who wants the checkpoint, and what then.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    /// Clients that wait for it, and since when. None for an interval checkpoint.
    pub(crate) by: Vec<(ClientId, Instant)>,
    /// End the program after the commit.
    pub(crate) then_stop: bool,
    /// What programs have declared that they overwrite need not be stored.
    pub(crate) leave_out: bool,
}

#[derive(Debug, Default)]
struct Counters {
    bytes: AtomicU64,
    expected: AtomicU64,
}

/// What the writer thread hands back.
#[derive(Debug)]
struct Written {
    files: Vec<FileEntry>,
    found: Findings,
    session: Session,
}

/// What a checkpoint has taught, which holds from its commit on.
#[derive(Debug)]
pub(crate) struct Learned {
    pub(crate) session: Session,
    pub(crate) found: Findings,
    /// The generation's directory.
    pub(crate) path: PathBuf,
}

/// A checkpoint that is being written.
#[derive(Debug)]
pub(crate) struct Writing {
    pub(crate) wanted: Wanted,
    /// Status word of the command, where it had ended before.
    ended: Option<i32>,
    /// It ended after that, but before the processes were stopped.
    ended_meanwhile: bool,
    /// The processes, while they must not run, and since when.
    held: Option<(Held, Instant)>,
    /// Looks after the memory that is left, where that may not be enough.
    watch: Option<Watch>,
    /// Libraries take part, which are to be asked the next time too.
    pub(crate) gated: bool,
    /// The snapshot children.
    copies: Vec<i32>,
    draft: Draft,
    facts: Facts,
    pub(crate) notes: Vec<String>,
    started: Instant,
    counters: Arc<Counters>,
    result: mpsc::Receiver<Result<Written, CaptureError>>,
    thread: Option<JoinHandle<()>>,
    /// The writer's result, once it has been joined.
    written: Option<Result<Written, Failure>>,
    /// Parts of the job on other hosts.
    pub(crate) parts: Vec<Row>,
    /// Bytes that these have left out.
    pub(crate) left_out_elsewhere: u64,
}

/// A committed checkpoint.
#[derive(Debug)]
pub(crate) struct Committed {
    pub(crate) generation: GenerationStatus,
    pub(crate) blocked: Duration,
    pub(crate) write: Duration,
    /// What will not be exactly as it was after a restart.
    pub(crate) notes: Vec<String>,
    /// For the next one.
    pub(crate) learned: Option<Learned>,
}

impl Writing {
    /// Captures the job into a new generation and begins to write it; `done` is woken at the end.
    pub(crate) fn begin(
        (dir, number): (&Path, u64),
        (root_pid, ended): (i32, Option<i32>),
        (options, group): (&Options, Option<&dyn Group>),
        (mut session, tracking): (Session, &mut Tracking),
        wanted: &Wanted,
        done: &Wake,
        on_phase: &mut dyn FnMut(Phase),
    ) -> Result<Self, Failure> {
        let done = done.try_clone().map_err(|e| Failure::system("make a wake-up channel", &e))?;
        let draft = Draft::create(dir, number)?;
        let counters = Arc::new(Counters::default());
        let writer = Writer::start(counters.clone(), done).map_err(|e| Failure::system("start the writer thread", &e))?;
        let (mut snapshot, held) =
            belay_capture::capture(root_pid, &draft.path, options, (&mut session, tracking), group, on_phase)?;
        // Nothing may fail from here on: other nodes have gone on.
        let facts = Facts {
            blocked: snapshot.blocked,
            phases: snapshot.phases.clone(),
            processes: snapshot.processes,
            threads: snapshot.threads,
            taken: Taken {
                mode: snapshot.mode.name().into(),
                reason: snapshot.reason.clone(),
                stops: 0,
            },
            left_out: None,
            declared: snapshot.declared.take(),
            dirty: None,
        };
        let (notes, gated) = (snapshot.notes.clone(), snapshot.gated);
        let ended_meanwhile = ended.is_none() && snapshot.root_had_ended;
        on_phase(Phase::Write);
        counters.expected.store(snapshot.bytes(), Ordering::Relaxed);
        let (watch, copies) = (snapshot.take_watch(), snapshot.copies());
        let (thread, result) = writer.write(snapshot, session);
        Ok(Self {
            wanted: wanted.clone(),
            ended,
            ended_meanwhile,
            held: held.map(|h| (h, Instant::now())),
            watch,
            gated,
            copies,
            draft,
            facts,
            notes,
            started: Instant::now(),
            counters,
            result,
            thread: Some(thread),
            written: None,
            parts: Vec::new(),
            left_out_elsewhere: 0,
        })
    }

    /// Number of the generation.
    pub(crate) fn number(&self) -> u64 {
        self.draft.number
    }

    /// When it was begun.
    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// How far it has come.
    pub(crate) fn progress(&self) -> Progress {
        let bytes = self.counters.bytes.load(Ordering::Relaxed);
        Progress {
            phase: Phase::Write,
            processes: self.facts.processes,
            bytes,
            bytes_expected: self.counters.expected.load(Ordering::Relaxed),
            bytes_per_s: bytes as f64 / self.started.elapsed().as_secs_f64().max(1e-6),
        }
    }

    /// Whether the writer is done, so that [`Writing::finish`] will not wait.
    pub(crate) fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the writer; why it has failed.
    pub(crate) fn settle(&mut self) -> Result<(), Failure> {
        if let Some(thread) = self.thread.take() {
            let written = match (thread.join(), self.result.recv()) {
                (Ok(()), Ok(written)) => written.map_err(Failure::from),
                _ => Err(Failure::new(Exit::Internal, "the writer thread ended without a result")),
            };
            self.written = Some(written);
            if !self.wanted.then_stop {
                self.let_go();
            }
        }
        match &self.written {
            Some(Err(failure)) => Err(failure.clone()),
            _ => Ok(()),
        }
    }

    fn let_go(&mut self) {
        if let Some((held, since)) = self.held.take() {
            let (reopened, note) = held.go_on();
            self.notes.extend(note);
            self.facts.phases.extend(reopened.map(|time| (Phase::Reopen, time)));
            self.facts.blocked += since.elapsed();
        }
    }

    /// Looks after the memory that is left; `outside` are children of the agent that are no part of the job. Returns
    /// after what time to look again.
    pub(crate) fn watch_memory(&mut self, outside: &[i32]) -> Option<Duration> {
        const SOON: Duration = Duration::from_millis(2);
        if self.is_done() {
            return None;
        }
        let all = self.counters.expected.load(Ordering::Relaxed);
        let rest = all.saturating_sub(self.counters.bytes.load(Ordering::Relaxed));
        match self.watch.as_mut()?.look(rest, all, self.held.is_some()) {
            Advice::Wait(time) => return Some(time),
            Advice::Hurry => headroom::hurry(&self.copies),
            Advice::Stop => {
                let since = Instant::now();
                let outside: Vec<i32> = outside.iter().chain(&self.copies).copied().collect();
                match headroom::stop(&outside) {
                    Ok(held) => {
                        tracing::info!(rest, "the program stands still: memory is short");
                        self.held = Some((held, since));
                        self.facts.taken.stops += 1;
                    }
                    Err(error) => tracing::warn!(%error, "memory is short, and the program could not be stopped"),
                }
            }
            Advice::Go => {
                tracing::info!(rest, "the program goes on");
                self.let_go();
            }
        }
        Some(SOON)
    }

    /// Nothing will be committed: another node has failed.
    pub(crate) fn spoil(&mut self, failure: Failure) {
        if self.settle().is_ok() {
            self.written = Some(Err(failure));
        }
    }

    /// Commits what was written; `root_status` is the status word of the command where it has ended by now. Held
    /// processes must not go on after a commit.
    pub(crate) fn finish(mut self, root_status: Option<i32>) -> (Wanted, Result<Committed, Failure>, Option<Held>) {
        // Its failure is in `written`.
        drop(self.settle());
        let Self {
            wanted,
            ended,
            ended_meanwhile,
            held,
            draft,
            mut facts,
            notes,
            started,
            written,
            parts,
            left_out_elsewhere,
            ..
        } = self;
        let written = written.unwrap_or_else(|| Err(Failure::new(Exit::Internal, "nothing was written")));
        let write = started.elapsed();
        facts.phases.push((Phase::Write, write));
        let commit = |written: Written| {
            let Written {
                mut files,
                found,
                mut session,
            } = written;
            if let Some(status) = ended.or(root_status.filter(|_| ended_meanwhile)) {
                files.push(crate::state::write(&draft.path, status)?);
            }
            if !parts.is_empty() {
                files.push(crate::nodes::table::write(&draft.path, &parts)?);
            }
            facts.left_out = Some(found.left_out.saturating_add(left_out_elsewhere)).filter(|bytes| *bytes > 0);
            facts.dirty = found.dirty;
            let path = draft.target();
            let generation = draft.commit(files, &mut session, &facts)?;
            // What a part has found, the root knows before it commits and removes older ones.
            if let Some(damage) = session.damage() {
                generations::mark(&path, damage);
            }
            Ok(Committed {
                generation,
                blocked: facts.blocked,
                write,
                notes,
                learned: Some(Learned { session, found, path }),
            })
        };
        let committed = written.and_then(commit);
        (wanted, committed, held.map(|(held, _)| held))
    }
}

/// The thread that writes, before it has anything to write.
struct Writer {
    thread: JoinHandle<()>,
    work: mpsc::Sender<(Snapshot, Session)>,
    result: mpsc::Receiver<Result<Written, CaptureError>>,
}

impl Writer {
    /// It counts what it does, and wakes `done` when it has done it.
    fn start(counters: Arc<Counters>, done: Wake) -> std::io::Result<Self> {
        let (work, given) = mpsc::channel::<(Snapshot, Session)>();
        let (send, result) = mpsc::channel();
        let thread = prompt::spawn(std::thread::Builder::new().name("belay-write".into()), move || {
            // None comes where the capture has failed.
            let Ok((snapshot, mut session)) = given.recv() else { return };
            let written = snapshot.write(&mut session, &|bytes, expected| {
                counters.bytes.store(bytes, Ordering::Relaxed);
                counters.expected.store(expected, Ordering::Relaxed);
            });
            // The receiver lives until this thread is joined.
            drop(send.send(written.map(|(files, found)| Written { files, found, session })));
            done.wake();
        })?;
        Ok(Self { thread, work, result })
    }

    /// Where it waited in vain, since it has died, the result says so.
    fn write(self, snapshot: Snapshot, session: Session) -> (JoinHandle<()>, mpsc::Receiver<Result<Written, CaptureError>>) {
        drop(self.work.send((snapshot, session)));
        (self.thread, self.result)
    }
}
