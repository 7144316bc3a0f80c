//! Copying committed generations to the durable tiers, on a thread beside the loop.
//!
//! ```text
//!         committed, or found at the start                done
//! Idle ───────────────────────────────────> Flushing ────────────> Idle, or the next: first those that clients wait for, then the newest
//!                                               └── failed: clients are told; Idle, and again after a while
//! ```
//! The generation being flushed and those that clients wait for stay in the job directory, unless a checkpoint needs their room.

use super::encoding::SHARES_NOTHING;
use super::Agent;
use crate::clients::ClientId;
use crate::config::Pace;
use crate::generations::Generation;
use crate::levels::Turn;
use crate::nodes::meeting::Meeting;
use crate::nodes::{Nodes, Order};
use crate::sys::{self, Timer, Wake};
use crate::tiers::hosts::Share;
use crate::tiers::members::Members;
use crate::tiers::{self, Durable, To};
use crate::{generations, Failure};
use belay_image::files;
use belay_image::manifest::{Manifest, MANIFEST_FILE, MAX_BYTES};
use belay_storage::flush::Control;
use belay_tree::JobKey;
use belay_wire::{Event, Exit, Level, Phase, Progress};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

/// A flush that failed is tried again after this.
const AGAIN: Duration = Duration::from_secs(60);
/// How often is looked whether the parts' chunks are in the job directory, and how long while none comes.
const LOOK_PERIOD: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the end of the job waits for a flush that is being given up.
const GIVING_UP: Duration = Duration::from_secs(2);

/// A client that waits for a generation to be durable.
#[derive(Debug)]
struct Awaiting {
    generation: u64,
    client: ClientId,
    /// Since when.
    since: Instant,
    answer: Event,
    /// The program has been ended: the job waits for the flush.
    last: bool,
}

/// What a flush thread hands back: what failed at some tiers, where another has the generation.
type Outcome = (Vec<Durable>, Result<Vec<Failure>, Failure>);

/// A flush under way.
#[derive(Debug)]
struct Under {
    generation: u64,
    control: Arc<Control>,
    started: Instant,
    /// Makes it give up waiting for parts.
    lost: Option<Arc<AtomicBool>>,
    result: mpsc::Receiver<Outcome>,
}

/// The flushes of a job.
#[derive(Debug)]
pub(super) struct Flush {
    /// Woken when a flush is done.
    pub(super) done: Wake,
    /// When a failed one is tried again.
    pub(super) again: Timer,
    /// Clients whose checkpoint, not committed yet, is to be durable.
    pub(super) wants: BTreeSet<ClientId>,
    under: Option<Under>,
    /// The newest generation whose turn it is, until it is flushed.
    newest: Option<u64>,
    pub(super) turn: Turn,
    awaiting: Vec<Awaiting>,
    /// At a part: generations that the root copies or is to copy.
    pub(super) of_root: Vec<u64>,
    /// Opened by the first flush.
    durable: Vec<Durable>,
}

impl Flush {
    pub(super) fn new(turn: Turn) -> Result<Self, Failure> {
        Ok(Self {
            done: Wake::new().map_err(|e| Failure::system("make a wake-up channel", &e))?,
            again: Timer::new().map_err(|e| Failure::system("make a timer", &e))?,
            wants: BTreeSet::new(),
            under: None,
            newest: None,
            turn,
            awaiting: Vec::new(),
            of_root: Vec::new(),
            durable: Vec::new(),
        })
    }

    pub(super) fn is_awaited(&self) -> bool {
        !self.awaiting.is_empty()
    }

    /// A part is gone: a flush that waits for its word would wait in vain.
    pub(super) fn lose_part(&self) {
        if let Some(lost) = self.under.as_ref().and_then(|u| u.lost.as_ref()) {
            lost.store(true, Ordering::Relaxed);
        }
    }

    /// How far the flush under way has come.
    pub(super) fn progress(&self) -> Option<Progress> {
        let under = self.under.as_ref()?;
        let bytes = under.control.bytes.load(Ordering::Relaxed);
        Some(Progress {
            phase: Phase::Flush,
            processes: 0,
            bytes,
            bytes_expected: under.control.expected.load(Ordering::Relaxed),
            bytes_per_s: bytes as f64 / under.started.elapsed().as_secs_f64().max(1e-6),
        })
    }
}

impl Agent {
    /// Whether the job can reach `level`.
    pub(super) fn check_level(&self, level: Level, then_stop: bool) -> Result<(), Failure> {
        if level == Level::Redundant {
            return self.check_redundant(then_stop);
        }
        if level == Level::Durable && then_stop && self.hosts_have_theirs() {
            let why = "level durable: not together with --then stop, which ends the agents whose hosts hold the checkpoint; belay flush makes it durable then";
            return Err(Failure::new(Exit::NoTier, why));
        }
        tiers::check_level(&self.description, level)
    }

    /// Whether the checkpoints of the parts lie on their hosts' own disks, so that each must copy its own.
    fn hosts_have_theirs(&self) -> bool {
        self.description.config.redundancy.scheme.is_some() && self.nodes.as_ref().is_some_and(Nodes::has_others)
    }

    fn has_tiers(&self) -> bool {
        // What a part has, the root copies.
        let is_part = self.nodes.as_ref().is_some_and(Nodes::is_part);
        !is_part && self.description.config.durable().next().is_some()
    }

    /// Generations that retention leaves alone.
    pub(super) fn pinned(&self) -> Vec<u64> {
        let under = self.flush.under.iter().map(|u| u.generation);
        let awaited = self.flush.awaiting.iter().filter(|a| self.is_awaiting(a));
        // Also what comes next: parts are told with the order of a checkpoint, during which its flush may begin.
        let of_root = self.flush.of_root.iter().copied().chain(self.flush.newest);
        let known = under
            .chain(awaited.map(|a| a.generation))
            .chain(of_root)
            .chain(self.since.from);
        let all = generations::list(&self.dir.generations()).unwrap_or_default();
        known.chain(generations::for_all(&all, self.description.keep)).collect()
    }

    /// Whether somebody still waits: clients come and go.
    fn is_awaiting(&self, a: &Awaiting) -> bool {
        a.last || self.clients.is_there(a.client)
    }

    /// The job, of which nothing is left, is not to wait for its flush any longer; those who do are told at its end.
    pub(super) fn stop_awaiting_flush(&mut self) {
        for a in &mut self.flush.awaiting {
            a.last = false;
        }
    }

    /// Whether the job, of which nothing is left, has still to become durable.
    pub(super) fn must_flush(&self) -> bool {
        self.flush.awaiting.iter().any(|a| a.last)
    }

    /// The newest whole generation. Until this run has one of its own: not one that is newer than that from which it
    /// goes on, which somebody has given up, or found damaged.
    fn newest_of_run(&self) -> Result<Option<Generation>, Failure> {
        let all = generations::list(&self.dir.generations())?;
        let is_ours = |g: &Generation| self.since.from.is_none_or(|from| g.number <= from);
        Ok(all.into_iter().rfind(|g| g.is_whole() && is_ours(g)))
    }

    /// At the start: the newest generation, where a tier lacks it.
    pub(super) fn flush_what_is_left(&mut self) {
        // Parts that have their own may not be there yet.
        if !self.has_tiers() || self.hosts_have_theirs() {
            return;
        }
        let Ok(Some(newest)) = self.newest_of_run() else { return };
        let manifest = files::read(&newest.path.join(MANIFEST_FILE), MAX_BYTES).unwrap_or_default();
        // None is copied beside newer ones.
        let same = |(text, m): &(String, Manifest)| text.as_bytes() == manifest || m.generation > newest.number;
        let held = |k: &Option<tiers::Known>| k.as_ref().is_some_and(|k| k.generations.iter().any(same));
        if !tiers::known(&self.dir, &self.description).iter().all(held) {
            self.flush.newest = Some(newest.number);
            self.begin_flush();
        }
    }

    /// Generation `number` has been committed.
    pub(super) fn flush_newest(&mut self, number: u64) {
        if !self.has_tiers() {
            return;
        }
        let pace = self.description.config.levels.durable.unwrap_or_default();
        let awaited = self.flush.awaiting.iter().any(|a| a.generation == number);
        if awaited {
            self.flush.turn.is_taken(sys::now_unix_s());
        } else if self.flush.turn.comes(pace, sys::now_unix_s()) {
            self.flush.newest = Some(number);
        }
        self.begin_flush();
    }

    /// Begins the next flush, if there is something to flush and none is under way.
    pub(super) fn begin_flush(&mut self) {
        if self.flush.under.is_some() {
            return;
        }
        let mut awaiting = std::mem::take(&mut self.flush.awaiting);
        awaiting.retain(|a| self.is_awaiting(a));
        self.flush.awaiting = awaiting;
        let awaited = self.flush.awaiting.iter().map(|a| a.generation).min();
        let Some(generation) = awaited.or(self.flush.newest) else {
            return;
        };
        // An older one need not follow: a tier does not take it behind a newer one.
        if self.flush.newest.is_some_and(|n| n <= generation) {
            self.flush.newest = None;
        }
        match self.start_flush(generation) {
            Ok(under) => self.flush.under = Some(under),
            Err(failure) => self.flush_failed(generation, &tiers::not_durable(generation, &failure)),
        }
        self.set_tick();
    }

    fn start_flush(&mut self, generation: u64) -> Result<Under, Failure> {
        let system = |e| Failure::system("start the flush thread", &e);
        let (send, result) = mpsc::channel();
        let control = Arc::new(Control::default());
        let done = self.flush.done.try_clone().map_err(system)?;
        let path = self.dir.generations().join(generations::name(generation));
        let meeting = match self.hosts_have_theirs() {
            true => Some(self.meet(generation)?.1),
            false => None,
        };
        if let Some(meeting) = &meeting {
            self.order(&Order::Flush {
                number: generation,
                root: meeting.door.addresses(),
            });
        }
        let lost = meeting.as_ref().map(|m| m.cancel.clone());
        let work = Work {
            meeting,
            generation,
            durable: std::mem::take(&mut self.flush.durable),
            dir: self.dir.clone(),
            description: self.description.clone(),
            path,
            control: control.clone(),
        };
        tracing::debug!(generation, "flush begins");
        std::thread::Builder::new()
            .name("belay-flush".into())
            .spawn(move || {
                // The receiver may have given up.
                drop(send.send(work.run()));
                done.wake();
            })
            .map_err(system)?;
        Ok(Under {
            generation,
            control,
            started: Instant::now(),
            lost,
            result,
        })
    }

    /// At a part: does what the root, which is at one of `root`, asks of it to make generation `number` durable.
    pub(super) fn flush_for_root(&self, number: u64, root: Vec<String>) {
        if let Err(failure) = self.start_flush_for_root(number, root) {
            // The root waits in vain, and says so.
            tracing::error!(generation = number, error = %failure, "not flushed");
        }
    }

    fn start_flush_for_root(&self, number: u64, root: Vec<String>) -> Result<(), Failure> {
        let Some(nodes) = &self.nodes else { return Ok(()) };
        let share = Share {
            key: JobKey::read(nodes.key())?,
            root,
            generation: number,
            tag: nodes.part.unwrap_or(0),
            dir: self.dir.clone(),
            description: self.description.clone(),
            rotten: self.rotten(),
        };
        let work = move || {
            if let Err(e) = share.run() {
                tracing::warn!(generation = number, error = %e, "not flushed");
            }
        };
        let started = std::thread::Builder::new().name("belay-flush".into()).spawn(work);
        started.map_err(|e| Failure::system("start the flush thread", &e))?;
        Ok(())
    }

    /// The flush thread is done.
    pub(super) fn finish_flush(&mut self) {
        let Some(under) = self.flush.under.take() else { return };
        let generation = under.generation;
        let (durable, result) = under.result.recv().unwrap_or_else(|_| {
            (
                Vec::new(),
                Err(tiers::not_durable(
                    generation,
                    &Failure::new(Exit::Internal, "the flush thread ended without a result"),
                )),
            )
        });
        self.flush.durable = durable;
        // Another copy of the job directory may have gone on meanwhile: numbers are not used twice.
        let there = self.flush.durable.iter().flat_map(|d| &d.catalogue.generations);
        for m in there.map(|g| &g.manifest) {
            self.next_number = self.next_number.max(m.generation.saturating_add(1));
            self.engine.number_from(m.next_chunk);
        }
        match result {
            Ok(failed) => {
                let bytes = under.control.expected.load(Ordering::Relaxed);
                tracing::info!(
                    generation,
                    bytes,
                    ms = generations::ms(under.started.elapsed()),
                    "generation is durable"
                );
                self.forecast.flushed(&self.dir, generation, bytes, under.started.elapsed());
                let levels = self.description.config.levels;
                if levels.durable == Some(Pace::Auto) {
                    let took = (under.started.elapsed(), sys::processors());
                    self.flush.turn.learns(Level::Durable, took, levels.durable_mtti);
                }
                let notes: Vec<String> = failed.iter().map(Failure::to_string).collect();
                for mut a in self.take_awaiting(generation) {
                    self.tell_level(&mut a.answer, (generation, Level::Durable), a.since);
                    match &mut a.answer {
                        Event::Flushed { notes: told, .. } => told.extend(notes.iter().cloned()),
                        Event::Checkpointed(c) => c.notes.extend(notes.iter().cloned()),
                        _ => {}
                    }
                    self.answer_awaiting(&a, &a.answer);
                }
                if !notes.is_empty() {
                    let why = format!(
                        "generation {generation} is durable, but not all is well: {}",
                        notes.join("; ")
                    );
                    self.note_failure(&Failure::new(Exit::NotDurable, why), false);
                }
                self.begin_flush();
            }
            Err(mut failure) => {
                if under.control.is_rotten() {
                    // That may be part's, whose agent is told with the next checkpoint.
                    self.has_rotted();
                    failure = Failure::new(failure.exit, format!("{failure}; it is damaged here, {SHARES_NOTHING}"));
                }
                self.flush_failed(generation, &failure);
                // Whoever waits for another one need not wait for the next attempt.
                if self.flush.is_awaited() {
                    self.begin_flush();
                }
            }
        }
        if self.writing.is_none() && !self.is_together() {
            if let Err(failure) = self.tidy() {
                self.note_failure(&failure, false);
            }
        }
        self.set_tick();
    }

    fn flush_failed(&mut self, generation: u64, failure: &Failure) {
        tracing::error!(generation, error = %failure, "flush failed");
        self.flush.turn.fails();
        for a in self.take_awaiting(generation) {
            self.answer_awaiting(&a, &failure.event());
        }
        self.note_failure(failure, false);
        let gone = !self.dir.generations().join(generations::name(generation)).exists();
        if self.flush.newest.is_none() && !gone {
            self.flush.newest = Some(generation);
        }
        if let Err(e) = self.flush.again.set(Some(AGAIN), Duration::ZERO) {
            tracing::error!(error = %e, "set the flush timer");
        }
    }

    fn take_awaiting(&mut self, generation: u64) -> Vec<Awaiting> {
        let all = std::mem::take(&mut self.flush.awaiting);
        let (these, others) = all.into_iter().partition(|a| a.generation == generation);
        self.flush.awaiting = others;
        these
    }

    fn answer_awaiting(&mut self, a: &Awaiting, event: &Event) {
        if a.last {
            self.farewells.push((a.client, event.clone()));
        } else {
            self.clients.send(a.client, event);
        }
    }

    /// Client `id` gets `answer` when `generation` is durable.
    pub(super) fn await_flush(&mut self, generation: u64, (client, since): (ClientId, Instant), answer: Event, last: bool) {
        self.flush.awaiting.push(Awaiting {
            generation,
            client,
            since,
            answer,
            last,
        });
    }

    /// `belay flush` of a running job.
    pub(super) fn flush_on_request(&mut self, id: ClientId) {
        if let Err(failure) = self.check_level(Level::Durable, false) {
            return self.fail(id, failure.exit, &failure.to_string());
        }
        let newest = match self.newest_of_run() {
            Ok(newest) => newest,
            Err(failure) => return self.fail(id, failure.exit, &failure.to_string()),
        };
        let Some(newest) = newest else {
            return self.fail(
                id,
                Exit::NoCheckpoint,
                "there is no checkpoint yet; take one with belay checkpoint",
            );
        };
        let generation = newest.number;
        let answer = Event::Flushed {
            generation,
            notes: Vec::new(),
        };
        self.await_flush(generation, (id, Instant::now()), answer, false);
        self.begin_flush();
    }

    /// Tells those who wait how far the flush has come.
    pub(super) fn tell_flush_progress(&mut self) {
        if let Some(progress) = self.flush.progress() {
            for a in &self.flush.awaiting {
                self.clients.send(a.client, &Event::Progress(progress));
            }
        }
    }

    /// The job ends: what is not durable by now is flushed by the next restart, or `belay flush`.
    pub(super) fn give_up_flush(&mut self) {
        if let Some(under) = self.flush.under.take() {
            under.control.cancel();
            if under.result.recv_timeout(GIVING_UP).is_err() {
                tracing::warn!(generation = under.generation, "the flush does not end");
            }
        }
        for a in std::mem::take(&mut self.flush.awaiting) {
            let event = Event::Failed {
                exit: Exit::NotDurable,
                message: format!(
                    "generation {} is committed in the job directory, but is not durable: the job has ended; belay flush continues",
                    a.generation
                ),
                passing: false,
            };
            self.clients.send(a.client, &event);
        }
    }
}

/// What the flush thread needs.
struct Work {
    /// With parts that have their own.
    meeting: Option<Meeting>,
    generation: u64,
    durable: Vec<Durable>,
    dir: crate::jobdir::JobDir,
    description: crate::jobdir::Description,
    path: PathBuf,
    control: Arc<Control>,
}

impl Work {
    /// Flushes to each tier in turn.
    fn run(mut self) -> Outcome {
        belay_storage::flush::step_back();
        let result = self.flush_all();
        (self.durable, result)
    }

    /// Waits until the agents of the parts have moved to the job directory what lies in local tiers of their hosts.
    fn await_parts(&self) -> Result<(), Failure> {
        let (mut fewest, mut since) = (usize::MAX, Instant::now());
        loop {
            let (chunks, hosts) = tiers::away(self.dir.path(), &self.path)?;
            if chunks == 0 {
                return Ok(());
            }
            if chunks < fewest {
                (fewest, since) = (chunks, Instant::now());
            } else if since.elapsed() > PATIENCE {
                let hosts: Vec<String> = hosts.into_iter().collect();
                let why = format!("{chunks} chunks still lie in local tiers of {}", hosts.join(", "));
                return Err(Failure::new(Exit::NotDurable, why));
            }
            self.control.check()?;
            // Their agents tell nobody; the shared file system is looked at.
            std::thread::sleep(LOOK_PERIOD);
        }
    }

    /// Meets the parts, or waits for them.
    fn await_members(&mut self) -> Result<Option<Members>, Failure> {
        match self.meeting.take() {
            Some(meeting) => Members::gather(meeting, self.dir.path()).map(Some),
            None => self.await_parts().map(|()| None),
        }
    }

    /// Opens the tiers that are not open; what failed is tried again by the next flush.
    fn open_all(&mut self) -> Result<Vec<Failure>, Failure> {
        let mut failed = Vec::new();
        // One with another key from now on, and none without.
        let keys = self.description.config.encryption.keys()?;
        self.durable.retain(|d| d.is_open(&d.config, keys.as_ref()));
        for t in self.description.config.durable() {
            if self.durable.iter().any(|d| d.is_open(t, keys.as_ref())) {
                continue;
            }
            match Durable::open(t, &self.description, To::Use) {
                Ok(durable) => self.durable.push(durable),
                Err(e) => {
                    tracing::warn!(tier = t.name, error = %e, "tier not opened");
                    failed.push(e);
                }
            }
        }
        Ok(failed)
    }

    fn flush_all(&mut self) -> Result<Vec<Failure>, Failure> {
        let generation = self.generation;
        let why = |f: Failure| tiers::not_durable(generation, &f);
        let mut members = self.await_members().map_err(why)?;
        let mut failed = self.open_all().map_err(why)?;
        let mut held = false;
        for durable in &mut self.durable {
            match durable.flush(&self.dir, &self.description, (&self.path, members.as_mut()), &self.control) {
                Ok(flushed) => {
                    held = true;
                    tracing::info!(tier = durable.config.name, ?flushed, "flushed");
                    failed.extend(durable.unread());
                }
                Err(e) => {
                    tracing::warn!(tier = durable.config.name, error = %e, "flush to this tier failed");
                    failed.push(e);
                }
            }
        }
        tiers::outcome(self.generation, held, failed)
    }
}
