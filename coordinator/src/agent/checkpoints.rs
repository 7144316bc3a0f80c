//! Taking checkpoints: on request, on the interval, one at a time.

use super::{stopped_after_checkpoint, Agent};
use crate::checkpoint::{Committed, Learned, Wanted, Writing};
use crate::generations::{self, ms, Generation};
use crate::interval::{self, Interval};
use crate::nodes::{Nodes, Ways};
use crate::{sys, tiers, Failure};
use belay_capture::Access;
use belay_kernel::prompt::First;
use belay_plugins::Group;
use belay_storage::session::Stats;
use belay_wire::{AutoInterval, Checkpointed, Event, Exit, GenerationStatus, LastError, Level, Phase};
use std::time::{Duration, Instant};

/// Of so many generations one is complete, whatever programs declare.
const COMPLETE_EVERY: u64 = 10;
/// For a checkpoint that is being written so many others are left out, and it takes so long, before the user is told.
const MANY: u32 = 2;
const LONG: Duration = Duration::from_secs(10);

impl Agent {
    pub(super) fn arm_interval(&mut self) {
        let gap = Duration::from_secs_f64(self.description.min_gap_s);
        let first = self.description.interval.first(gap);
        let period = match self.description.interval {
            Interval::Every(d) => d,
            Interval::Auto | Interval::Never => Duration::ZERO,
        };
        if let Err(e) = self.interval.set(first, period) {
            self.note_failure(&Failure::system("set the interval timer", &e), true);
        }
    }

    pub(super) fn interval_checkpoint(&mut self) {
        // What a command that has failed left behind is checkpointed only when that is asked for.
        if self.ending.is_some() || self.root_status.is_some_and(|s| s != 0) {
            return;
        }
        let writing = self.writing.as_ref().map(|w| (w.number(), w.started()));
        if writing.is_some() || self.is_together() {
            return self.leave_out(writing);
        }
        self.begin_checkpoint(Wanted::default());
    }

    /// Leaves an interval checkpoint out for another one, which, where it is being `written`, has a number and has begun
    /// some time ago. One for which several are left out is told: a disk or a tier may hang.
    fn leave_out(&mut self, written: Option<(u64, Instant)>) {
        self.skipped += 1;
        let Some((generation, begun)) = written else { return };
        tracing::warn!(
            generation,
            skipped = self.skipped,
            "interval checkpoint left out: the one before is still being written"
        );
        let (of, count) = self.left_out;
        // Once counted so often, it is told, and no more.
        let count = if of == generation { count } else { 0 };
        let is_long = count == MANY && begun.elapsed() > LONG;
        self.left_out = (generation, if count < MANY || is_long { count + 1 } else { count });
        if is_long {
            let (seconds, at) = (begun.elapsed().as_secs(), self.dir.shown());
            let why = format!(
                "generation {generation} is still being written after {seconds} s, and no other can be taken; see which disk or tier is slow, on which host ({at}/log, {at}/nodes/*/log)"
            );
            self.note_failure(&Failure::new(Exit::CheckpointFailed, &why), false);
            sys::say(&why);
        }
    }

    pub(super) fn begin_queued(&mut self) {
        if self.writing.is_none() && !self.is_together() {
            if let Some(wanted) = self.queued.take() {
                self.begin_checkpoint(wanted);
            }
        }
    }

    /// Whether checkpoint `number` may lack what programs declare that they overwrite: not where none is complete yet, or
    /// the last that is, is too old.
    pub(super) fn may_leave_out(&self, number: u64) -> bool {
        self.description.leave_out && self.since.complete.is_some_and(|n| number < n + COMPLETE_EVERY)
    }

    /// Begins one, unless the job is being ended: what is captured while its processes are killed is no checkpoint of it.
    pub(super) fn begin_checkpoint(&mut self, mut wanted: Wanted) {
        if self.ending.is_some() {
            return self.refuse_at_end(&wanted);
        }
        if self.may_have_lost() {
            let why = "the command has failed, and it is not known yet whether that is because a host is lost";
            return self.refuse(&wanted, &Failure::passing(Exit::CheckpointFailed, why));
        }
        if self.awaits_memory(&mut wanted) {
            return;
        }
        if self.nodes.as_ref().is_some_and(Nodes::has_others) {
            return self.begin_together(wanted);
        }
        // A number is used once, so that a log line names one attempt.
        let number = self.next_number;
        self.next_number += 1;
        wanted.leave_out = self.may_leave_out(number);
        let ways = self.nodes.as_ref().map(Nodes::ways).unwrap_or_default();
        match self
            .note_number(number)
            .and_then(|()| self.begin(number, &wanted, ways, None))
        {
            Ok(writing) => {
                self.writing = Some(writing);
                self.set_tick();
                self.watch_memory();
            }
            Err(failure) => {
                self.checkpoint_failed(number, &wanted, &failure);
                self.look_for_lost_programs();
            }
        }
        // Children may have ended while the tracer did not look for it.
        self.reap();
    }

    /// Tells those who want a checkpoint that there is none any more.
    pub(super) fn refuse_at_end(&mut self, wanted: &Wanted) {
        self.refuse(wanted, &Failure::new(Exit::ProgramEnded, "the job is being ended"));
    }

    fn refuse(&mut self, wanted: &Wanted, failure: &Failure) {
        for (id, _) in &wanted.by {
            self.flush.wants.remove(id);
            self.encoding.wants.remove(id);
            self.clients.send(*id, &failure.event());
        }
    }

    /// Captures the job into generation `number`; `group` are the other nodes, which do the same.
    pub(super) fn begin(
        &mut self,
        number: u64,
        wanted: &Wanted,
        ways: Ways,
        group: Option<&dyn Group>,
    ) -> Result<Writing, Failure> {
        let options = belay_capture::Options {
            saved_up_to: self.description.save_open_files.0,
            save_code: self.description.save_code,
            launched: self.description.created(),
            outside: ways.outside,
            standins: ways.standins,
            names: self.addresses.0.clone(),
            led: self.addresses.1,
            writers: sys::writers(),
            hold: wanted.then_stop,
            gate: self.gated,
            gate_limit: self.description.config.gate.limit(),
            access: match self.description.hears() {
                false => Access::Off,
                true => Access::listen(wanted.leave_out, self.description.certain),
            },
            site_wait: match wanted.by.is_empty() {
                true => self.description.interval.site_wait(),
                false => Interval::Never.site_wait(),
            },
        };
        self.dir.check_place()?;
        self.keep_socket();
        if !self.durable {
            self.dir.sync()?;
            self.forget_elsewhere()?;
            self.durable = true;
        }
        self.leave_what_is_rotten();
        let gen = self.dir.generations();
        let used = self.make_room().and_then(|()| generations::own_bytes(&gen));
        let session = used.and_then(|used| self.engine.begin(used).map_err(Failure::from));
        let (clients, phase) = (&mut self.clients, &mut self.phase);
        let mut on_phase = |p: Phase| {
            tracing::debug!(generation = number, phase = p.name(), "phase");
            *phase = Some(p);
            for (id, _) in &wanted.by {
                clients.send(*id, &Event::Phase { phase: p });
            }
        };
        let root = (self.root_pid, self.root_status);
        let tracking = &mut self.tracking;
        let begun = session.and_then(|session| {
            Writing::begin(
                (&gen, number),
                root,
                (&options, group),
                (session, tracking),
                wanted,
                &self.done,
                &mut on_phase,
            )
        });
        self.gated = match &begun {
            Ok(writing) => writing.gated,
            Err(failure) => self.gated || failure.not_asked,
        };
        begun
    }

    /// While a checkpoint is written for which memory may not be enough: looks at what is left.
    pub(super) fn watch_memory(&mut self) {
        let outside = self.outside();
        let next = self.writing.as_mut().and_then(|w| w.watch_memory(&outside));
        if let Err(e) = self.watch.set(next, Duration::ZERO) {
            tracing::error!(error = %e, "set the timer that watches memory");
        }
    }

    /// Commits what was written; why it could not be.
    pub(super) fn finish_checkpoint(&mut self) -> Option<Failure> {
        let writing = self.writing.take()?;
        let first = First::now();
        let number = writing.number();
        let waited = writing.is_done();
        self.enter(Phase::Commit, &writing.wanted);
        let (wanted, result, held) = writing.finish(self.root_status);
        if let (Some(held), Ok(_)) = (held, &result) {
            held.kill();
        }
        let failed = result.as_ref().err().cloned();
        tracing::trace!(waited, "writer joined");
        match result {
            Ok(mut c) => {
                let stored = self.keep_session(&mut c);
                let g = &c.generation;
                tracing::info!(
                    generation = g.generation,
                    processes = g.ranks,
                    threads = g.threads,
                    bytes = g.bytes,
                    left_out = g.left_out,
                    new_bytes = g.new_bytes,
                    pages_written = stored.written,
                    pages_found = stored.found,
                    pages_clean = stored.clean,
                    pages_not_copied = stored.not_copied,
                    pages_common = stored.common,
                    pages_moved = stored.moved,
                    pages_looked_for = stored.looked,
                    pages_timed = stored.timed_pages,
                    hash_ns = stored.hash_ns,
                    look_ns = stored.look_ns,
                    table_ns = stored.table_ns,
                    write_ns = stored.write_ns,
                    writers_ns = stored.writers_ns,
                    snapshot = g.snapshot.as_ref().map(|s| s.mode.as_str()),
                    blocked_ms = g.blocked_ms,
                    write_ms = ms(c.write),
                    "checkpoint committed"
                );
                let moves = self.engine.mover().and_then(|m| m.desk().observed());
                self.forecast.committed(&self.dir, &c, (&stored, moves));
                self.said = None;
                if g.left_out.is_none() {
                    self.since.complete = Some(g.generation);
                }
                for note in &c.notes {
                    tracing::warn!(generation = g.generation, note, "will differ after a restart");
                }
                self.tell(Ok(&c));
                self.answer(&wanted, &c);
                drop(first);
                self.flush_newest(c.generation.generation);
                if self.description.interval == Interval::Auto {
                    self.choose_interval(&c);
                }
                if wanted.then_stop {
                    self.result = Some(stopped_after_checkpoint());
                    self.force_end();
                }
            }
            Err(failure) => {
                self.collect_failed();
                self.checkpoint_failed(number, &wanted, &failure);
            }
        }
        self.phase = None;
        self.set_tick();
        self.look_for_lost_programs();
        self.reap();
        self.begin_queued();
        failed
    }

    /// With an automatic interval: when the next checkpoint is due, now that this one is committed.
    fn choose_interval(&mut self, c: &Committed) {
        let cost = interval::cost(c.blocked, c.write, sys::writers(), sys::processors());
        let configured = self.description.mtti_s.map(Duration::from_secs_f64);
        let mtti = configured.unwrap_or_else(|| self.description.history.mtti(sys::now_unix_s()));
        let optimum = interval::optimum(cost, mtti);
        // The program has run on while this checkpoint was written.
        let gap = Duration::from_secs_f64(self.description.min_gap_s);
        let delay = optimum.saturating_sub(c.write).max(gap);
        let chosen = AutoInterval {
            interval_s: optimum.max(gap).as_secs_f64(),
            cost_ms: ms(cost),
            mtti_s: mtti.as_secs_f64(),
            mtti_from: if configured.is_some() { "configured" } else { "observed" }.into(),
            interrupts: self.description.history.interrupts,
        };
        tracing::info!(?chosen, "automatic interval");
        self.chosen = Some(chosen);
        if let Err(e) = self.interval.set(Some(delay), Duration::ZERO) {
            self.note_failure(&Failure::system("set the interval timer", &e), true);
        }
    }

    /// What the checkpoint has taught about the store holds from its commit on.
    pub(super) fn keep_session(&mut self, committed: &mut Committed) -> Stats {
        self.since.from = None;
        let Some(Learned { session, found, path }) = committed.learned.take() else {
            return Stats::default();
        };
        let stats = session.stats;
        self.tracking.commit(found, session.tables());
        if session.damage().is_some() {
            self.has_rotted();
        }
        self.engine.keep(session, &path);
        if let Err(failure) = self.tidy() {
            self.note_failure(&failure, true);
        }
        stats
    }

    pub(super) fn enter(&mut self, phase: Phase, wanted: &Wanted) {
        tracing::debug!(phase = phase.name(), "phase");
        self.phase = Some(phase);
        for (id, _) in &wanted.by {
            self.clients.send(*id, &Event::Phase { phase });
        }
    }

    /// `generation`, that of this node, with what its parts have of it.
    pub(super) fn with_parts(&self, generation: &GenerationStatus) -> GenerationStatus {
        let mut all = generation.clone();
        if self.nodes.is_some() {
            let g = Generation::at(&self.dir.generations(), all.generation);
            generations::add_parts(&mut all, &g);
        }
        all
    }

    pub(super) fn answer(&mut self, wanted: &Wanted, committed: &Committed) {
        let generation = self.with_parts(&committed.generation);
        for (id, since) in &wanted.by {
            let event = Event::Checkpointed(Box::new(Checkpointed {
                generation: generation.clone(),
                total_ms: ms(since.elapsed()),
                stopped: wanted.then_stop,
                notes: committed.notes.clone(),
            }));
            if self.encoding.wants.remove(id) {
                self.await_encoding(committed.generation.generation, (*id, *since), event);
            } else if self.flush.wants.remove(id) {
                self.await_flush(committed.generation.generation, (*id, *since), event, wanted.then_stop);
            } else if wanted.then_stop {
                self.farewells.push((*id, event));
            } else {
                self.clients.send(*id, &event);
            }
        }
    }

    /// Completes the answer to a client that has waited, `since` it asked, until `generation` reached `level`.
    pub(super) fn tell_level(&self, answer: &mut Event, (generation, level): (u64, Level), since: Instant) {
        let Event::Checkpointed(c) = answer else { return };
        c.generation.level = level;
        c.total_ms = ms(since.elapsed());
        let statuses = tiers::statuses(&self.dir, &self.description);
        if let Some(s) = statuses.into_iter().find(|s| s.generation == generation) {
            c.generation.tiers = s.tiers;
        }
    }

    /// The generation is dropped already, and the program runs.
    pub(super) fn checkpoint_failed(&mut self, number: u64, wanted: &Wanted, failure: &Failure) {
        tracing::error!(generation = number, error = %failure, "checkpoint failed");
        self.phase = None;
        self.tell(Err(failure));
        self.refuse(wanted, failure);
        // Who is to be asked first is asked at once.
        self.note_failure(failure, wanted.by.is_empty() && !failure.not_asked);
        if self.description.interval == Interval::Auto {
            self.arm_interval();
        }
    }

    /// Remembers a failure for `status`; `say` also tells the user, once while it is of the same kind.
    pub(super) fn note_failure(&mut self, failure: &Failure, say: bool) {
        self.last_error = Some(LastError {
            time_unix_s: sys::now_unix_s(),
            exit: failure.exit,
            message: failure.to_string(),
        });
        let noteworthy = say && failure.exit != Exit::ProgramEnded;
        if noteworthy && self.said != Some(failure.exit) {
            sys::say(&format!("checkpoint failed: {failure}; the program goes on"));
            self.said = Some(failure.exit);
        }
    }
}
