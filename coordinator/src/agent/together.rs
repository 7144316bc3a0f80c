//! The job's other nodes: checkpoints together, parts that are lost.
//!
//! ```text
//!                                    Writing                          Written                                Committed
//! root: order ─ capture (all meet) ─ writes ─ has, or could not ─ all have: commits; else drops it ─ tells which ─────────────> over
//! part: order ─ capture (all meet) ─ commits its own, or drops it ─ whatever the others have ─ yes: keeps it; no: removes it ─> over
//!                   └ fails anywhere: over everywhere                                        └ not known: keeps it as doubtful
//! ```
//! Every node comes to every step up to the last, whatever the one before has come to, so that nobody waits for one
//! that has left: [`Agent::step_ended`] has all transitions. The steps are those of the nodes that were there at the
//! order: from then on each fails that one of them is missing from, or that the root has waited for too long.

use super::{losing, stopped_after_checkpoint, telling, Agent};
use crate::checkpoint::Wanted;
use crate::config::Time;
use crate::nodes::gathering::{self, Gathering, COMMITTED, PATIENCE, STEPS, WRITTEN};
use crate::nodes::remote::{shell_code, Life, Remote};
use crate::nodes::{self, table, Nodes, Order, Stage, Together};
use crate::{generations, sys, Failure};
use belay_tree::{Broken, Contribution, Event as TreeEvent, Values};
use belay_wire::{Exit, Phase};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

/// How often a checkpoint is tried that is refused somewhere for reasons that pass by themselves.
const TRIES: u32 = 10;
/// What is said about generations that lie in no local tier.
const AT_REST: &str = "at-rest";
/// The number of none: all have said, and there is none.
pub(super) const NO_GENERATION: u64 = 0;
impl Agent {
    /// Whether a checkpoint of all nodes is between its capture and its end.
    pub(super) fn is_together(&self) -> bool {
        self.nodes.as_ref().is_some_and(|n| n.together.is_some())
    }

    pub(super) fn hear_nodes(&mut self) {
        loop {
            let event = self.nodes.as_ref().and_then(|n| n.tree()?.event());
            // The end of a checkpoint comes before the order of the next one, through another channel.
            while let Some((step, end)) = self.nodes.as_ref().and_then(|n| n.tree()?.released()) {
                self.step_ended(step, end);
            }
            match event {
                Some(event) => self.node_event(event),
                None => break,
            }
        }
    }

    fn node_event(&mut self, event: TreeEvent) {
        match event {
            TreeEvent::Joined(info) => {
                tracing::info!(node = ?info.node, host = info.host, tag = info.tag, "node joined");
                if let (Some(nodes), Some(node)) = (&mut self.nodes, info.node) {
                    nodes.there.insert(node, info.host.clone());
                }
                let remote = self.nodes.as_mut().and_then(|n| n.remotes.get_mut(&info.tag));
                if let (Some(remote), Some(node)) = (remote, info.node) {
                    remote.life = Life::Joined(node);
                }
                self.nodes.iter_mut().for_each(Nodes::listen_to_parts);
            }
            TreeEvent::Left(node, status) => self.node_gone(node, Ok(status)),
            TreeEvent::Lost(node, why) => self.node_gone(node, Err(&why)),
            TreeEvent::Said(node, text) => self.hear_part(node, &text),
            TreeEvent::Order(text) => match serde_json::from_str(&text) {
                Ok(order) => self.obey(order),
                Err(e) => tracing::error!(error = %e, "an order that cannot be understood"),
            },
            TreeEvent::RootLost(why) => self.lose_root(&why),
        }
    }

    /// A node has ended, with a status word, or is lost, with a reason.
    fn node_gone(&mut self, node: u64, how: Result<i32, &str>) {
        let Some(at) = self.nodes.as_mut().and_then(|n| n.there.remove(&node)) else {
            return;
        };
        match how {
            Ok(status) => tracing::info!(node, host = at, status, "node has ended"),
            Err(why) => {
                tracing::error!(node, host = at, why, "node is lost");
                // As the user calls it; one srun leads to several.
                let mut remotes = self.nodes.iter().flat_map(|n| n.remotes.values());
                let remote = remotes.find(|r| r.life == Life::Joined(node) && r.words.tasks <= 1);
                let host = remote.map_or(&at, |r| &r.words.host);
                sys::say(&format!("the part of the job on {host} is lost: {why}"));
            }
        }
        self.needs_no_answer(node);
        self.look_after_remote(node, how.ok().map(shell_code));
        if how.is_err() {
            self.lose(at);
        }
    }

    /// At a part: the root orders something.
    fn obey(&mut self, order: Order) {
        tracing::debug!(?order, "ordered");
        match order {
            Order::Checkpoint {
                number,
                base,
                then_stop,
                save_open_files,
                save_code,
                keep,
                pinned,
                tell,
                era,
                gate_ms,
                declared,
                leave_out,
                anew,
            } => {
                if anew {
                    self.has_rotted();
                }
                self.gated = gate_ms.is_some();
                self.description.config.gate.limit = gate_ms.map(|ms| Time(Duration::from_millis(ms)));
                self.addresses.0 = self.addresses.0.clone().in_era(era);
                self.description.save_open_files = save_open_files;
                self.description.save_code = save_code;
                self.flush.of_root = pinned;
                self.description.keep = keep;
                self.next_number = number + 1;
                self.leave_unfinished(number);
                let wanted = Wanted {
                    by: Vec::new(),
                    then_stop,
                    leave_out,
                };
                self.description.leave_out = declared;
                if let Err(failure) = self.take_part((number, base), &wanted, tell) {
                    self.checkpoint_failed(number, &wanted, &failure);
                    self.look_for_lost_programs();
                }
                self.reap();
            }
            Order::Encode { number, root, redundant } => self.take_share(number, root, redundant),
            Order::Flush { number, root } => self.flush_for_root(number, root),
            Order::Describe { question } => self.describe(question),
            Order::NotRestarted => self.is_not_restarted(),
            Order::End { grace_ms } => self.ask_end(Duration::from_millis(grace_ms)),
        }
    }

    /// At the root: tells the parts.
    pub(super) fn order(&self, order: &Order) {
        if let (Some(tree), Ok(text)) = (self.nodes.as_ref().and_then(Nodes::tree), serde_json::to_string(order)) {
            tree.order(text);
        }
    }

    /// The nodes of the steps that follow are those that are there now.
    fn hold(&self) {
        if let Some((nodes, tree)) = self.nodes.as_ref().and_then(|n| Some((n, n.tree()?))) {
            tree.hold(Some(nodes.there.keys().copied().collect()));
        }
    }

    fn release(&self) {
        if let Some(tree) = self.nodes.as_ref().and_then(Nodes::tree) {
            tree.hold(None);
        }
    }

    /// At the root: a checkpoint of all nodes.
    pub(super) fn begin_together(&mut self, mut wanted: Wanted) {
        self.end_errands();
        for attempt in 1..=TRIES {
            // Who has come or gone since the last attempt.
            self.hear_nodes();
            if self.ending.is_some() {
                self.refuse_at_end(&wanted);
                break;
            }
            self.hold();
            let number = self.next_number;
            self.next_number += 1;
            // Nobody is asked to wait at its loops there.
            wanted.leave_out = self.may_leave_out(number) && !self.description.certain;
            let wanted = &wanted;
            let absent = |r: &&Remote| matches!(r.life, Life::Errand | Life::Starting | Life::Lost);
            let absent = self.nodes.iter().flat_map(|n| n.remotes.values()).find(absent);
            let begun = match absent {
                Some(r) if r.life == Life::Lost => Err(Failure::new(
                    Exit::CheckpointFailed,
                    format!(
                        "the part of the job on {} is lost; end the job and restart it from an earlier checkpoint",
                        r.words.host
                    ),
                )),
                Some(r) if r.life == Life::Errand => Err(Failure::passing(
                    Exit::CheckpointFailed,
                    format!("{} is being asked about the tasks of srun", r.words.program),
                )),
                Some(r) => Err(Failure::passing(
                    Exit::CheckpointFailed,
                    format!("the part on {} is just being started", r.words.host),
                )),
                None => self.note_number(number).and_then(|()| {
                    self.order(&Order::Checkpoint {
                        number,
                        base: number * STEPS,
                        then_stop: wanted.then_stop,
                        save_open_files: self.description.save_open_files,
                        save_code: self.description.save_code,
                        keep: self.description.keep,
                        // Parts do not know yet what is to become redundant.
                        pinned: [self.pinned(), self.being_encoded()].concat(),
                        tell: self.telling.is_some(),
                        era: self.addresses.0.era(),
                        gate_ms: self.gate_ms(),
                        declared: self.description.hears(),
                        leave_out: wanted.leave_out,
                        anew: self.stores_anew(),
                    });
                    self.take_part((number, number * STEPS), wanted, self.telling.is_some())
                }),
            };
            self.gated |= begun.as_ref().is_err_and(|f| f.not_asked);
            match begun {
                Ok(()) => break,
                Err(f) if f.passing && attempt < TRIES && starting_over(attempt) => {
                    tracing::debug!(attempt, error = %f, "refused for the moment");
                }
                Err(failure) => {
                    self.checkpoint_failed(number, wanted, &failure);
                    break;
                }
            }
        }
        if !self.is_together() {
            self.release();
            self.look_for_lost_programs();
        }
        self.reap();
    }

    /// What the parts are told about libraries that take part.
    fn gate_ms(&self) -> Option<u64> {
        let limit = self.description.config.gate.limit().as_millis();
        self.gated.then(|| u64::try_from(limit).unwrap_or(u64::MAX))
    }

    /// Captures this node's part together with the others.
    fn take_part(&mut self, (number, base): (u64, u64), wanted: &Wanted, tell: bool) -> Result<(), Failure> {
        let Some(mut nodes) = self.nodes.take() else { return Ok(()) };
        let ways = nodes.ways();
        let result = match nodes.tree() {
            None => Err(Failure::new(Exit::Internal, "the tree is not there yet")),
            Some(tree) => {
                let gathering = Gathering::new(tree, base, nodes.job());
                let begun = self.begin(number, wanted, ways, Some(&gathering));
                begun.map_err(|f| gathering.judge(f)).inspect_err(|f| gathering.fail(f))
            }
        };
        if let Ok(mut writing) = result {
            writing.parts = nodes.rows();
            self.writing = Some(writing);
            nodes.together = Some(Together {
                base,
                number,
                then_stop: wanted.then_stop,
                tell,
                stage: Stage::Writing,
                own: None,
            });
            self.nodes = Some(nodes);
            self.set_tick();
            self.watch_memory();
            return Ok(());
        }
        self.nodes = Some(nodes);
        result.map(drop)
    }

    /// The writer is done: tells the others how that went.
    pub(super) fn written(&mut self) {
        let is_part = self.nodes.as_ref().is_some_and(Nodes::is_part);
        let outcome = if is_part {
            self.commit_part()
        } else {
            self.writing.as_mut().map_or(Ok(()), |w| w.settle())
        };
        self.arrive(Stage::Written, outcome.err());
    }

    /// Comes to the step of this stage, with the `failure` that stands against it here.
    fn arrive(&mut self, stage: Stage, failure: Option<Failure>) {
        let Some(step) = step_of(stage) else { return };
        let mut contribution = self.numbers_for(stage);
        self.add_rest(step, &mut contribution);
        let Some(nodes) = &mut self.nodes else { return };
        let Some(together) = &mut nodes.together else { return };
        together.stage = stage;
        let base = together.base;
        if let Some(tree) = nodes.tree() {
            let contribution = match failure {
                None => contribution,
                Some(f) => gathering::refusal(tree.node(), &f),
            };
            // To write takes as long as it takes: the programs run.
            let patience = (stage != Stage::Written).then_some(PATIENCE);
            tree.begin(base + step, contribution, patience);
        }
    }

    /// Adds what is said about local tiers to what this node brings to a step. Where the hosts have some, the parts
    /// tell the root when they have written which generations they have that lie in none, and the root tells them,
    /// before they remove any, which is the newest of which that holds everywhere.
    fn add_rest(&self, step: u64, contribution: &mut Contribution) {
        if !self.uses_local_tiers() {
            return;
        }
        let part = self.nodes.as_ref().and_then(|n| n.part);
        match (step, part) {
            (WRITTEN, Some(tag)) => {
                let mine: Vec<String> = self.at_rest_here().iter().map(u64::to_string).collect();
                contribution.publish.insert(format!("{AT_REST}/{tag}"), mine.join(" "));
            }
            (WRITTEN, None) => drop(contribution.want.insert(format!("{AT_REST}/*"))),
            (COMMITTED, Some(_)) => drop(contribution.want.insert(AT_REST.into())),
            (COMMITTED, None) => contribution
                .publish
                .extend(self.at_rest.map(|n| (AT_REST.to_owned(), n.to_string()))),
            _ => {}
        }
    }

    /// At the root, when all have written: the newest generation that lies in no local tier of any part. While a part
    /// has not said, the one that was before.
    fn hear_of_rest(&mut self, said: &Values) {
        let parts = self.nodes.as_ref().map_or(0, |n| n.there.len());
        let of_part = |(name, all): (&String, &String)| {
            name.starts_with(AT_REST)
                .then(|| all.split(' ').filter_map(|n| n.parse().ok()).collect())
        };
        let of_parts: Vec<BTreeSet<u64>> = said.iter().filter_map(of_part).collect();
        if !self.uses_local_tiers() || of_parts.len() < parts {
            return;
        }
        let mine = self.at_rest_here();
        let common = mine.into_iter().rfind(|n| of_parts.iter().all(|p| p.contains(n)));
        self.at_rest = Some(common.or(self.at_rest).unwrap_or(NO_GENERATION));
    }

    /// A part makes its own generation, which counts when the root has committed.
    fn commit_part(&mut self) -> Result<(), Failure> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        self.enter(Phase::Commit, &writing.wanted);
        let (_, result, held) = writing.finish(self.root_status);
        let committed = result.inspect_err(|_| self.collect_failed())?;
        if let Some(together) = self.nodes.as_mut().and_then(|n| n.together.as_mut()) {
            together.own = Some((committed, held));
        }
        Ok(())
    }

    /// The end of a step: all transitions of a checkpoint of all nodes between its capture and its end.
    fn step_ended(&mut self, step: u64, end: Result<Values, Broken>) {
        let Some(nodes) = &self.nodes else { return };
        let Some(together) = &nodes.together else { return };
        let (stage, is_part, number) = (together.stage, nodes.is_part(), together.number);
        if step_of(stage).is_none_or(|s| together.base + s != step) {
            // Of a checkpoint that was given up.
            return;
        }
        match (is_part, stage, end) {
            // Nobody has come to a step yet.
            (_, Stage::Writing, _) => {}
            (false, Stage::Written, Ok(said)) => {
                if let Some(telling) = &mut self.telling {
                    telling.hear(number, &said);
                }
                self.hear_of_rest(&said);
                if let Some(writing) = &mut self.writing {
                    table::hear_shares(&mut writing.parts, &said);
                    writing.left_out_elsewhere = telling::left_out(&said);
                    writing.notes.extend(losing::lost_elsewhere(&said));
                }
                let failed = self.finish_checkpoint();
                self.arrive(Stage::Committed, failed);
            }
            (false, Stage::Written, Err(broken)) => {
                if let Some(writing) = &mut self.writing {
                    writing.spoil(gathering::failure(&broken));
                }
                let failed = self.finish_checkpoint();
                self.arrive(Stage::Committed, failed);
            }
            (false, Stage::Committed, Ok(_)) => {
                self.encode_newest(number);
                self.end_together();
            }
            // Committed or not, the clients know; a part that has not heard of it asks when the next one is committed.
            (false, Stage::Committed, Err(_)) => self.end_together(),
            // What has become of it the root tells next, also where this node was not connected, or others have failed.
            (true, Stage::Written, _) => self.arrive(Stage::Committed, None),
            (true, Stage::Committed, Ok(said)) => {
                self.at_rest = said.get(AT_REST).and_then(|n| n.parse().ok()).or(self.at_rest);
                self.keep_part();
            }
            (true, Stage::Committed, Err(broken)) => self.undo_part(&gathering::failure(&broken), gathering::is_refused(&broken)),
        }
    }

    fn end_together(&mut self) {
        if let Some(nodes) = &mut self.nodes {
            nodes.together = None;
        }
        self.release();
        self.phase = None;
        self.set_tick();
        self.look_for_lost_programs();
        self.reap();
        self.begin_queued();
    }

    /// At a part: the root has committed.
    fn keep_part(&mut self) {
        let Some(together) = self.nodes.as_mut().and_then(|n| n.together.take()) else {
            return;
        };
        if let Some((mut committed, held)) = together.own {
            self.drop_doubtful(together.number);
            self.keep_session(&mut committed);
            tracing::info!(generation = together.number, "part committed");
            if let Some(held) = held {
                held.kill();
            }
        }
        if together.then_stop {
            self.result = Some(stopped_after_checkpoint());
            self.force_end();
        }
        self.end_together();
    }

    /// At a part: the root begins checkpoint `number`. It has given up what this node has not heard the end of, and
    /// what has that number here is of a root that was lost before its commit.
    fn leave_unfinished(&mut self, number: u64) {
        if self.is_together() {
            if let Some(writing) = &mut self.writing {
                writing.spoil(Failure::new(Exit::CheckpointFailed, "the root has given it up"));
                drop(self.writing.take());
            }
            self.undo_part(&Failure::new(Exit::CheckpointFailed, "its end was not heard"), false);
        }
        let gen = self.dir.generations();
        if gen.join(generations::name(number)).exists() {
            tracing::warn!(generation = number, "of a root that was lost before it has committed it");
            if let Err(f) = generations::remove(&gen, number) {
                self.note_failure(&f, false);
            }
        }
    }

    /// At a part: of generations that the root may have committed, those that it has not, now that it has committed
    /// `number`. Until that can be seen from here, they stay doubtful.
    fn drop_doubtful(&mut self, number: u64) {
        let root = nodes::job_of(self.nodes.as_ref(), self.dir.path()).join("gen");
        let has = |gen: &Path, n: u64| gen.join(generations::name(n)).exists();
        let Some(nodes) = self.nodes.as_mut().filter(|_| has(&root, number)) else {
            return;
        };
        let doubtful = std::mem::take(&mut nodes.doubtful);
        let gen = self.dir.generations();
        // Retention may have removed them meanwhile.
        for old in doubtful.into_iter().filter(|n| !has(&root, *n) && has(&gen, *n)) {
            if let Err(f) = generations::remove(&gen, old) {
                self.note_failure(&f, false);
            }
        }
    }

    /// At a part: the checkpoint has failed somewhere; the processes go on. Unless somebody has `refused` it, the root
    /// may have committed it all the same, before a node was lost or the root itself: then it is the newest checkpoint
    /// of the job, and stays.
    fn undo_part(&mut self, failure: &Failure, refused: bool) {
        let Some(together) = self.nodes.as_mut().and_then(|n| n.together.take()) else {
            return;
        };
        tracing::warn!(generation = together.number, error = %failure, "part given up");
        match (&mut self.nodes, together.own.is_some(), refused) {
            (_, true, true) => {
                if let Err(f) = generations::remove(&self.dir.generations(), together.number) {
                    self.note_failure(&f, false);
                }
            }
            (Some(nodes), true, false) => nodes.doubtful.push(together.number),
            _ => {}
        }
        // With it goes its session, which has named chunks.
        drop(together);
        if refused && self.writing.is_none() {
            self.collect_failed();
        }
        self.end_together();
    }
}

/// The step at which a stage ends, counted from where those of its checkpoint begin.
fn step_of(stage: Stage) -> Option<u64> {
    match stage {
        Stage::Writing => None,
        Stage::Written => Some(WRITTEN),
        Stage::Committed => Some(COMMITTED),
    }
}

/// Lets the programs run on for a moment; it grows from 1 to 256 ms.
fn starting_over(attempt: u32) -> bool {
    std::thread::sleep(Duration::from_millis(1 << (attempt - 1)));
    true
}
