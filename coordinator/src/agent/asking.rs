//! What parts tell the root: the processes of their hosts, for the status, for which the root asks them when it is asked
//! itself, and programs that are lost.

use super::Agent;
use crate::clients::ClientId;
use crate::nodes::{Nodes, Order};
use belay_wire::{Event, ProcessStatus};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the parts may take. One that is in the middle of a checkpoint answers after it.
const LIMIT: Duration = Duration::from_secs(3);
/// How often is looked whether that is over.
pub(super) const PERIOD: Duration = Duration::from_millis(250);
/// Longest command line that is told to another host.
const MOST_COMMAND: usize = 500;

/// What a part tells.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Told {
    /// An answer.
    Processes { question: u64, processes: Vec<ProcessStatus> },
    /// The GPU driver has lost programs there.
    Lost { why: String },
}

/// A question under way.
#[derive(Debug)]
struct Open {
    clients: Vec<ClientId>,
    /// Who has not answered, and on which host that is.
    silent: BTreeMap<u64, String>,
    told: Vec<ProcessStatus>,
    since: Instant,
}

/// What the parts have been asked.
#[derive(Debug, Default)]
pub(super) struct Asking {
    /// Number of the last question.
    question: u64,
    open: Option<Open>,
}

impl Asking {
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }
}

impl Agent {
    /// A client asks for the status. Whoever asks while the parts are being asked gets the same answer.
    pub(super) fn tell_status(&mut self, id: ClientId) {
        if let Some(open) = &mut self.asking.open {
            return open.clients.push(id);
        }
        let root = self.nodes.as_ref().filter(|n| !n.is_part() && n.tree().is_some());
        let open = Open {
            clients: vec![id],
            silent: root.map(|n| n.there.clone()).unwrap_or_default(),
            told: Vec::new(),
            since: Instant::now(),
        };
        let alone = open.silent.is_empty();
        self.asking.open = Some(open);
        if alone {
            return self.answer_status();
        }
        self.asking.question += 1;
        self.order(&Order::Describe {
            question: self.asking.question,
        });
        self.set_tick();
    }

    /// At a part: the root asks.
    pub(super) fn describe(&self, question: u64) {
        let mut processes = self.processes();
        for p in &mut processes {
            p.command = p.command.chars().take(MOST_COMMAND).collect();
        }
        self.tell_root(&Told::Processes { question, processes });
    }

    /// At a part.
    pub(super) fn tell_root(&self, told: &Told) {
        let text = serde_json::to_string(told);
        if let (Some(tree), Ok(text)) = (self.nodes.as_ref().and_then(Nodes::tree), text) {
            tree.say(text);
        }
    }

    /// At the root: a part has told this.
    pub(super) fn hear_part(&mut self, node: u64, text: &str) {
        match serde_json::from_str(text) {
            Ok(Told::Processes { question, processes }) => self.hear_answer(node, question, processes),
            Ok(Told::Lost { why }) => {
                let host = self.nodes.as_ref().and_then(|n| n.there.get(&node).cloned());
                self.lose_program(host.unwrap_or_else(|| format!("node {node}")), why);
            }
            Err(e) => tracing::error!(node, error = %e, "a part tells what cannot be understood"),
        }
    }

    fn hear_answer(&mut self, node: u64, question: u64, processes: Vec<ProcessStatus>) {
        if question != self.asking.question {
            return;
        }
        if let Some(open) = self.asking.open.as_mut().filter(|o| o.silent.contains_key(&node)) {
            open.told.extend(processes);
        }
        self.needs_no_answer(node);
    }

    /// At the root: nothing more is to be heard of a part.
    pub(super) fn needs_no_answer(&mut self, node: u64) {
        let Some(open) = &mut self.asking.open else { return };
        if open.silent.remove(&node).is_some() && open.silent.is_empty() {
            self.answer_status();
        }
    }

    /// Gives up waiting when that has taken too long.
    pub(super) fn look_for_answers(&mut self) {
        if self.asking.open.as_ref().is_some_and(|o| o.since.elapsed() > LIMIT) {
            self.answer_status();
        }
    }

    fn answer_status(&mut self) {
        let Some(open) = self.asking.open.take() else { return };
        let mut status = self.status();
        status.processes.extend(open.told);
        status.unheard = open.silent.into_values().collect();
        let status = Event::Status(Box::new(status));
        for id in open.clients {
            self.clients.send(id, &status);
        }
        self.set_tick();
    }
}
