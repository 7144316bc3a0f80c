//! Making committed generations of a job on several hosts redundant, on threads beside the loop.
//!
//! ```text
//!         committed on all hosts                  all members done: record
//! Idle ───────────────────────────> a round leads ────────────────────────> Idle, or the next: first those that clients wait for, then the newest
//!                                       └── failed: clients are told; Idle. The generation stays `local`; the next one is tried again
//! ```
//! The root leads the round; it and every part take a share. On every host the generation of the last share stays until
//! the next round, because only the root knows whether that one has succeeded, and so does the newest that is
//! redundant: what can be lost is never all there is.

use super::Agent;
use crate::clients::ClientId;
use crate::config::Pace;
use crate::levels::Turn;
use crate::nodes::meeting::{failed, Meeting};
use crate::nodes::remote::Life;
use crate::nodes::seat::name_here;
use crate::nodes::table::{self, Row};
use crate::nodes::{self, Nodes, Order};
use crate::redundancy::record::{self, Record};
use crate::redundancy::round::{serve_part, Before, Led, Round, Share};
use crate::redundancy::serve::Server;
use crate::redundancy::Settings;
use crate::sys::{self, Wake};
use crate::{generations, Failure};
use belay_tree::{Door, JobKey};
use belay_wire::{Event, Exit, Level};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::time::Instant;

/// What follows where something that has been stored is damaged.
pub(super) const SHARES_NOTHING: &str = "and the next checkpoint shares nothing with those before";

/// A client that waits for a generation to be redundant.
#[derive(Debug)]
struct Awaiting {
    generation: u64,
    client: ClientId,
    since: Instant,
    answer: Event,
}

/// A round under way, which this agent leads.
#[derive(Debug)]
struct Under {
    generation: u64,
    record: Record,
    started: Instant,
    /// Makes it give up waiting for parts.
    cancel: Arc<AtomicBool>,
    result: mpsc::Receiver<Result<Led, Failure>>,
}

/// The redundancy of a job.
#[derive(Debug)]
pub(super) struct Encoding {
    /// Woken when a round is over.
    pub(super) done: Wake,
    /// Clients whose checkpoint, not committed yet, is to be redundant.
    pub(super) wants: BTreeSet<ClientId>,
    settings: Option<Settings>,
    server: Option<Server>,
    under: Option<Under>,
    /// This host's share: the generation, and whether it is over.
    share: Option<(u64, Arc<AtomicBool>)>,
    /// The newest generation whose turn it is.
    newest: Option<u64>,
    pub(super) turn: Turn,
    /// The newest redundant generation that this agent knows of.
    redundant: Option<u64>,
    awaiting: Vec<Awaiting>,
    /// What has been stored here is not what was written: new generations must not refer to it.
    rotten: Arc<AtomicBool>,
}

impl Encoding {
    /// `redundant`: the newest redundant generation. `turn`: when the next one is to be that.
    pub(super) fn new(settings: Option<Settings>, redundant: Option<u64>, turn: Turn) -> Result<Self, Failure> {
        Ok(Self {
            done: Wake::new().map_err(|e| Failure::system("make a wake-up channel", &e))?,
            wants: BTreeSet::new(),
            settings,
            server: None,
            under: None,
            share: None,
            newest: None,
            turn,
            redundant,
            awaiting: Vec::new(),
            rotten: Arc::default(),
        })
    }

    /// Generations that retention leaves alone.
    fn needed(&self) -> Vec<u64> {
        // The share stays until the next one begins, also when it is over: then its round is over too.
        let share = self.share.iter().map(|(n, _)| *n);
        share
            .chain(self.under.iter().map(|u| u.generation))
            .chain(self.awaiting.iter().map(|a| a.generation))
            .chain(self.redundant)
            .collect()
    }

    fn is_busy(&self) -> bool {
        self.under.is_some() || self.newest.is_some() || self.shared().is_some()
    }

    /// The generation that threads of this host read or write.
    fn shared(&self) -> Option<u64> {
        self.share
            .as_ref()
            .filter(|(_, over)| !over.load(Ordering::Acquire))
            .map(|(n, _)| *n)
    }
}

impl Agent {
    /// Whether the job can become redundant.
    pub(super) fn check_redundant(&self, then_stop: bool) -> Result<(), Failure> {
        let refused = |why: &str| Err(Failure::new(Exit::NoTier, format!("level redundant: {why}")));
        if self.encoding.settings.is_none() {
            return refused("the job was not launched with --across-hosts, --redundancy and --local-dir");
        }
        if !self.nodes.as_ref().is_some_and(Nodes::has_others) {
            return refused("the job has no part on another host");
        }
        if then_stop {
            return refused(
                "not together with --then stop, which ends the agents that make it so; take the checkpoint first, then belay stop",
            );
        }
        Ok(())
    }

    /// The job goes on from generation `number`, perhaps because newer ones are damaged: until another one is
    /// redundant, those up to there are what can be relied on.
    pub(crate) fn goes_back_to(&mut self, number: u64) -> Result<(), Failure> {
        if self.encoding.redundant.is_some_and(|newest| newest > number) {
            self.encoding.turn.fails();
        }
        self.encoding.redundant = record::newest_to(nodes::job_of(self.nodes.as_ref(), self.dir.path()), number)?;
        Ok(())
    }

    /// The job goes on from generation `number`, of which something had to be rebuilt, now or by an earlier attempt that
    /// brought parts elsewhere: what was lost of others with that is made again at once, whenever the next checkpoint's
    /// turn is.
    pub(crate) fn becomes_redundant_again(&mut self, number: u64, rebuilt: bool) -> Result<(), Failure> {
        if self.encoding.redundant != Some(number) {
            return Ok(());
        }
        let (Some(record), Some(nodes)) = (Record::read(self.dir.path(), number)?, &self.nodes) else {
            return Ok(());
        };
        let now = nodes.rows();
        let is_there = |row: &Row| now.iter().any(|n| n.tag == row.tag && n.host() == row.host());
        if rebuilt || record.root != name_here() || !record.rows.iter().all(is_there) {
            self.encoding.newest = Some(number);
        }
        Ok(())
    }

    /// A local tier of this host may have told that it cannot read back what lies there.
    pub(super) fn hear_of_rot(&mut self) {
        if let Some(why) = self.engine.mover().and_then(|m| m.take_rotten()) {
            self.has_rotted();
            let why = format!("{why}; what lies there cannot be moved, {SHARES_NOTHING}");
            self.note_failure(&Failure::new(Exit::Damaged, why), false);
        }
    }

    /// Something that has been stored is not what was written.
    pub(super) fn has_rotted(&self) {
        self.encoding.rotten.store(true, Ordering::Relaxed);
    }

    /// Whether the next checkpoint shares nothing with those before.
    pub(super) fn stores_anew(&self) -> bool {
        self.encoding.rotten.load(Ordering::Relaxed)
    }

    /// For those who may find that out.
    pub(super) fn rotten(&self) -> Arc<AtomicBool> {
        self.encoding.rotten.clone()
    }

    /// Before a checkpoint: what has been found damaged is not built upon, because the program still has what it should be.
    pub(super) fn leave_what_is_rotten(&mut self) {
        self.hear_of_rot();
        // Somebody else may have read it: `belay verify` does, while the job runs.
        let is_marked = self.engine.base().is_some_and(generations::is_marked);
        if self.encoding.rotten.swap(false, Ordering::Relaxed) || is_marked {
            tracing::warn!("what has been stored is damaged; all is stored again");
            self.engine.distrust();
            self.tracking.forget();
        }
    }

    /// Whether a round is under way here, or one comes next.
    pub(super) fn is_encoding(&self) -> bool {
        self.encoding.is_busy()
    }

    /// Generations that retention leaves alone.
    pub(super) fn being_encoded(&self) -> Vec<u64> {
        self.encoding.needed()
    }

    /// At the root: checkpoint `number` begins; its number must not be used again, whatever is lost.
    pub(super) fn note_number(&self, number: u64) -> Result<(), Failure> {
        match &self.encoding.settings {
            Some(_) => record::begin(self.dir.path(), number),
            None => Ok(()),
        }
    }

    /// Removes parity and records that belong to no generation.
    pub(super) fn tidy_redundancy(&self) -> Result<(), Failure> {
        let unfinished = self.encoding.shared().is_none();
        if self.encoding.settings.is_some() {
            record::tidy_root(self.dir.path(), unfinished)
        } else if self.nodes.is_some() {
            record::tidy(
                nodes::job_of(self.nodes.as_ref(), self.dir.path()),
                self.dir.path(),
                unfinished,
            )
        } else {
            Ok(())
        }
    }

    /// At the root: generation `number` has been committed on all hosts.
    pub(super) fn encode_newest(&mut self, number: u64) {
        let has_others = self.nodes.as_ref().is_some_and(Nodes::has_others);
        if self.encoding.settings.is_none() || !has_others {
            return;
        }
        let pace = self.description.config.levels.redundant.unwrap_or_default();
        if self.encoding.awaiting.iter().any(|a| a.generation == number) {
            self.encoding.turn.is_taken(sys::now_unix_s());
        } else if self.encoding.turn.comes(pace, sys::now_unix_s()) {
            self.encoding.newest = Some(number);
        }
        self.begin_encoding();
    }

    /// Client `id` gets `answer` when `generation` is redundant.
    pub(super) fn await_encoding(&mut self, generation: u64, (client, since): (ClientId, Instant), answer: Event) {
        self.encoding.awaiting.push(Awaiting {
            generation,
            client,
            since,
            answer,
        });
    }

    pub(super) fn begin_encoding(&mut self) {
        if self.encoding.under.is_some() {
            return;
        }
        let clients = &self.clients;
        self.encoding.awaiting.retain(|a| clients.is_there(a.client));
        let awaited = self.encoding.awaiting.iter().map(|a| a.generation).min();
        let Some(generation) = awaited.or(self.encoding.newest) else {
            return;
        };
        if self.encoding.newest == Some(generation) {
            self.encoding.newest = None;
        }
        match self.start_round(generation) {
            Ok(under) => self.encoding.under = Some(under),
            Err(failure) => self.encoding_failed(generation, &failure),
        }
    }

    /// Opens a door for all parts of generation `generation`: the parts as they are now, which may be elsewhere than when
    /// it was made, and the meeting.
    pub(super) fn meet(&self, generation: u64) -> Result<(Vec<Row>, Meeting), Failure> {
        let Some(nodes) = &self.nodes else {
            return Err(failed("the job has no other hosts"));
        };
        let mut rows = table::read(&self.dir.generations().join(generations::name(generation)))?;
        let joined = |tag: &u64| nodes.remotes.get(tag).is_some_and(|r| matches!(r.life, Life::Joined(_)));
        if let Some(row) = rows.iter().find(|r| !joined(&r.tag)) {
            return Err(failed(format!("the part on {} is not there any more", row.host())));
        }
        for now in nodes.rows() {
            if let Some(row) = rows.iter_mut().find(|row| row.tag == now.tag) {
                let share = row.share.take();
                *row = Row { share, ..now };
            }
        }
        let door = Door::open(JobKey::read(nodes.key())?, &nodes.at()?)?;
        let hosts = rows.iter().map(|r| (r.tag, r.host().to_owned())).collect();
        let meeting = Meeting {
            door,
            generation,
            hosts,
            cancel: Arc::default(),
        };
        Ok((rows, meeting))
    }

    fn start_round(&mut self, generation: u64) -> Result<Under, Failure> {
        let Some(settings) = self.encoding.settings.clone() else {
            return Err(failed("the job has no scheme"));
        };
        let (rows, mut meeting) = self.meet(generation)?;
        meeting.hosts.insert(0, name_here());
        let root = meeting.door.addresses();
        let status = generations::Generation::at(&self.dir.generations(), generation).status();
        let mut record = Record::new(status, name_here(), rows);
        (record.scheme, record.parity) = (settings.scheme, settings.parity);
        let cancel = meeting.cancel.clone();
        let of = |number: u64| -> Option<Before> {
            let read = Record::read(self.dir.path(), number);
            let record = read.inspect_err(|e| tracing::warn!(error = %e, generation = number, "all is encoded anew"));
            record.ok().flatten().map(|r| Before {
                generation: number,
                groups: r.groups,
            })
        };
        let before = of(generation).or_else(|| self.encoding.redundant.and_then(of));
        let round = Round {
            meeting,
            settings,
            before,
        };
        let (send, result) = mpsc::channel();
        let done = self
            .encoding
            .done
            .try_clone()
            .map_err(|e| Failure::system("start a round", &e))?;
        tracing::debug!(generation, "round begins");
        let lead = move || {
            // The receiver may have given up.
            drop(send.send(round.lead()));
            done.wake();
        };
        let led = std::thread::Builder::new().name("belay-round".into()).spawn(lead);
        led.map_err(|e| Failure::system("start a round", &e))?;
        self.order(&Order::Encode {
            number: generation,
            root: root.clone(),
            redundant: self.encoding.redundant,
        });
        self.take_share(generation, root, None);
        Ok(Under {
            generation,
            record,
            started: Instant::now(),
            cancel,
            result,
        })
    }

    /// Every host: its share of the round that is led at `root`, where `redundant` is known to be the newest redundant generation.
    pub(super) fn take_share(&mut self, generation: u64, root: Vec<String>, redundant: Option<u64>) {
        self.encoding.redundant = self.encoding.redundant.max(redundant);
        if let Err(failure) = self.start_share(generation, root) {
            // The round waits in vain, and fails.
            tracing::error!(generation, error = %failure, "no share in the round");
        }
    }

    fn start_share(&mut self, generation: u64, root: Vec<String>) -> Result<(), Failure> {
        let Some(nodes) = &self.nodes else { return Ok(()) };
        let (key, tag) = (JobKey::read(nodes.key())?, nodes.part.unwrap_or(0));
        let addresses = serve_part(&mut self.encoding.server, (&key, nodes.at()?), tag, self.dir.path())?;
        let share = Share {
            key,
            root,
            generation,
            tag,
            host: sys::host(),
            dir: self.dir.path().to_owned(),
            addresses,
            rotten: self.rotten(),
        };
        let over = Arc::new(AtomicBool::new(false));
        let flag = over.clone();
        let work = move || {
            let begin = Instant::now();
            match share.run() {
                Ok(done) => tracing::info!(
                    generation,
                    bytes = done.bytes,
                    kept_bytes = done.kept,
                    ms = generations::ms(begin.elapsed()),
                    "encoded"
                ),
                Err(e) => tracing::warn!(generation, error = %e, "not encoded"),
            }
            flag.store(true, Ordering::Release);
        };
        let started = std::thread::Builder::new().name("belay-encode".into()).spawn(work);
        started.map_err(|e| Failure::system("start the encoding thread", &e))?;
        self.encoding.share = Some((generation, over));
        Ok(())
    }

    /// A part is gone: a round that waits for it would wait in vain.
    pub(super) fn cancel_round(&self) {
        if let Some(under) = &self.encoding.under {
            under.cancel.store(true, Ordering::Relaxed);
        }
        self.flush.lose_part();
    }

    /// At the root: the round is over.
    pub(super) fn finish_round(&mut self) {
        let Some(mut under) = self.encoding.under.take() else { return };
        let generation = under.generation;
        let gone = || Err(Failure::new(Exit::Internal, "the round ended without a result"));
        let result = under.result.recv().unwrap_or_else(|_| gone()).and_then(|led| {
            under.record.groups.clone_from(&led.groups);
            under.record.write(self.dir.path()).map(|()| led)
        });
        match result {
            Ok(led) => {
                self.encoding.redundant = self.encoding.redundant.max(Some(generation));
                tracing::info!(
                    generation,
                    scheme = under.record.scheme.name(),
                    groups = led.groups.len(),
                    encoded_bytes = led.bytes,
                    kept_bytes = led.kept,
                    ms = generations::ms(under.started.elapsed()),
                    "generation is redundant"
                );
                let levels = self.description.config.levels;
                if levels.redundant == Some(Pace::Auto) {
                    let took = (under.started.elapsed(), sys::processors());
                    self.encoding.turn.learns(Level::Redundant, took, levels.redundant_mtti);
                }
                for mut a in self.take_waiting(generation) {
                    self.tell_level(&mut a.answer, (generation, Level::Redundant), a.since);
                    self.clients.send(a.client, &a.answer);
                }
            }
            Err(failure) => self.encoding_failed(generation, &failure),
        }
        self.begin_encoding();
    }

    fn take_waiting(&mut self, generation: u64) -> Vec<Awaiting> {
        let all = std::mem::take(&mut self.encoding.awaiting);
        let (these, others) = all.into_iter().partition(|a| a.generation == generation);
        self.encoding.awaiting = others;
        these
    }

    fn encoding_failed(&mut self, generation: u64, failure: &Failure) {
        let message = format!("generation {generation} is committed on every host, but is not redundant: {failure}");
        tracing::error!(generation, error = %failure, "not redundant");
        self.encoding.turn.fails();
        for a in self.take_waiting(generation) {
            self.fail(a.client, Exit::NotDurable, &message);
        }
        self.note_failure(&Failure::new(Exit::NotDurable, message), false);
    }

    /// The job ends.
    pub(super) fn give_up_encoding(&mut self) {
        for a in std::mem::take(&mut self.encoding.awaiting) {
            let message = format!(
                "generation {} is committed on every host, but is not redundant: the job has ended",
                a.generation
            );
            self.fail(a.client, Exit::NotDurable, &message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_the_only_redundant_generation_is_needed() {
        let mut e = Encoding::new(None, Some(3), Turn::default()).unwrap();
        assert!(!e.is_busy());
        let over = Arc::new(AtomicBool::new(false));
        e.share = Some((7, over.clone()));
        assert_eq!((e.needed(), e.is_busy()), (vec![7, 3], true));
        // This host's share is over; whether the others' are, only the root knows.
        over.store(true, Ordering::Release);
        assert_eq!((e.shared(), e.needed()), (None, vec![7, 3]));
    }
}
