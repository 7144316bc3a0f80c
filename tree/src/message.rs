//! What travels between a node and its parent. Everything is bounded before it is decoded ([`crate::noise::MAX_MESSAGE`]).

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Facts by name.
pub type Values = BTreeMap<String, String>;

/// Failures that one message carries at most; one is enough to give a step up.
pub(crate) const MAX_FAILURES: usize = 8;
/// Most that a branch may make known and want, bytes: some of them become two in a message.
const MAX_FACTS: usize = crate::noise::MAX_MESSAGE / 2;

/// Why a node could not do its part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// The node.
    pub node: u64,
    /// What kind of failure it is.
    pub kind: FailureKind,
    /// One line.
    pub reason: String,
}

/// Kinds of failure of a node at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// It is gone.
    Lost,
    /// It was not there for this step, and may be for the next one.
    Absent,
    /// Its agent does not answer.
    Silent,
    /// Its thread for the tree has ended.
    Internal,
    /// What it and the nodes below it make known is too long for a message.
    TooLong,
    /// It is there, and has not done its part.
    Refused {
        /// The exit status that says why.
        exit: u8,
        /// Whether the reason passes by itself.
        passing: bool,
        /// Whether something is there that must be asked before the next attempt.
        #[serde(default)]
        not_asked: bool,
    },
}

/// What a node knows of another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Its number; absent until the root has given it one.
    pub node: Option<u64>,
    /// Name of its host.
    pub host: String,
    /// Where it listens for children.
    pub addresses: Vec<String>,
    /// What the root started it for.
    pub tag: u64,
    /// Processes that it begins with.
    pub processes: u64,
}

/// What one node, or a whole branch, brings to a collective step.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contribution {
    /// Nodes in it.
    pub nodes: u64,
    /// Those that could not do their part, as far as there is room.
    pub failures: Vec<Failed>,
    /// Facts made known.
    pub publish: Values,
    /// Names of facts needed.
    pub want: BTreeSet<String>,
    /// Numbers that are added up over all nodes; whoever wants it gets that of `bytes` as the fact `sum bytes`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sums: BTreeMap<String, u64>,
    /// Numbers of which the greatest counts, as the fact `greatest bytes`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub greatest: BTreeMap<String, u64>,
}

impl Contribution {
    /// One node's, without failure.
    pub fn ready() -> Self {
        Self {
            nodes: 1,
            ..Self::default()
        }
    }

    /// One node's, which has failed.
    pub fn failed(node: u64, kind: FailureKind, reason: impl Into<String>) -> Self {
        let failure = Failed {
            node,
            kind,
            reason: reason.into(),
        };
        Self {
            nodes: 1,
            failures: vec![failure],
            ..Self::default()
        }
    }

    /// Adds another branch's.
    pub(crate) fn merge(&mut self, other: Self) {
        self.nodes = self.nodes.saturating_add(other.nodes);
        self.failures.extend(other.failures);
        self.failures.truncate(MAX_FAILURES);
        self.publish.extend(other.publish);
        self.want.extend(other.want);
        join(&mut self.sums, other.sums, u64::saturating_add);
        join(&mut self.greatest, other.greatest, u64::max);
    }

    /// What goes to the next node, of a branch that begins at `node`: itself, or where it would be too long for a
    /// message its failure.
    pub(crate) fn bounded(self, node: u64) -> Self {
        let facts: usize = self.publish.iter().map(|(name, value)| name.len() + value.len()).sum();
        let numbers = self.sums.keys().chain(self.greatest.keys()).map(String::len).sum::<usize>();
        let bytes = facts + numbers + self.want.iter().map(String::len).sum::<usize>();
        let names = self.publish.len() + self.sums.len() + self.greatest.len() + self.want.len();
        // Beside each name and its value stand quotes and, in numbers, up to 20 digits.
        if bytes.saturating_add(names.saturating_mul(32)) <= MAX_FACTS {
            return self;
        }
        let reason = format!(
            "what {} nodes tell each other is {bytes} bytes in {names} parts, too long for a message ({MAX_FACTS} bytes)",
            self.nodes
        );
        let mut failed = Self::failed(node, FailureKind::TooLong, reason);
        failed.nodes = self.nodes;
        failed.failures.extend(self.failures);
        failed.failures.truncate(MAX_FAILURES);
        failed
    }

    /// What is known when all have arrived.
    pub(crate) fn facts(self) -> Values {
        let named = |how: &'static str, of: BTreeMap<String, u64>| {
            let fact = move |(name, n): (String, u64)| (format!("{how} {name}"), n.to_string());
            of.into_iter().map(fact)
        };
        let mut all = self.publish;
        all.extend(named("sum", self.sums));
        all.extend(named("greatest", self.greatest));
        all
    }
}

fn join(all: &mut BTreeMap<String, u64>, more: BTreeMap<String, u64>, how: impl Fn(u64, u64) -> u64) {
    for (name, n) in more {
        all.entry(name).and_modify(|known| *known = how(*known, n)).or_insert(n);
    }
}

/// From a node to its parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "up", rename_all = "snake_case")]
pub(crate) enum Up {
    /// First message of a connection. `released` is the last step that this node has seen the end of, `ordered` the
    /// last order it has heard.
    Hello { info: NodeInfo, released: u64, ordered: u64 },
    /// This branch has arrived at a step.
    Arrive { step: u64, contribution: Contribution },
    /// A node below has connected to its parent.
    Attached { info: NodeInfo, parent: u64 },
    /// A node below is gone.
    Lost { node: u64, reason: String },
    /// A node below, or this one, ends in good order, its program with this status word.
    Left {
        node: u64,
        #[serde(default)]
        status: i32,
    },
    /// What a node has to say to the root.
    Said { node: u64, text: String },
    /// Nothing, so that silence means trouble.
    Beat,
}

/// From a node to its child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "down", rename_all = "snake_case")]
pub(crate) enum Down {
    /// The root's answer to a new node: its number, where its parent listens if that is another node, and the last
    /// order that is not for it, because it was given before.
    Welcome {
        node: u64,
        parent: Option<(u64, Vec<String>)>,
        #[serde(default)]
        ordered: u64,
    },
    /// Something for everybody.
    Order { id: u64, text: String },
    /// Everybody has arrived.
    Release {
        step: u64,
        failures: Vec<Failed>,
        values: Values,
    },
    /// The root is gone.
    RootLost,
    /// Nothing.
    Beat,
}
