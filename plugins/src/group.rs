//! The other nodes of a job, as capture and rebuild see them: all meet at the same points, and each can tell the others something.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Facts by name.
pub type Facts = BTreeMap<String, String>;

/// What a node brings to a meeting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Brought {
    /// Facts made known.
    pub publish: Facts,
    /// Names of facts wanted, or, with a `*` at the end, the beginnings of those.
    pub want: BTreeSet<String>,
    /// Numbers that are added up over all nodes; that of `x` can be wanted as `sum x`.
    pub sums: BTreeMap<String, u64>,
}

/// The nodes of a job that do the same thing at the same time.
pub trait Group: std::fmt::Debug {
    /// Waits until every node has come here and returns the facts that this one wants. Fails when a node has failed or is lost.
    fn meet(&self, brought: Brought) -> Result<Facts, String>;

    /// The same, where a node may come so much later than others.
    fn meet_late(&self, brought: Brought, _late: Duration) -> Result<Facts, String> {
        self.meet(brought)
    }

    /// A number that all nodes know, and nobody else before they meet.
    fn job(&self) -> u64;

    /// Tells the others that this node cannot go on with the checkpoint, before it has let go all of its processes;
    /// they let theirs go. There are no meetings afterwards.
    fn give_up(&self, _reason: &str) {}

    /// Tells the others that this node cannot go on with the restart, and whether what was stored for it is damaged.
    /// There are no meetings afterwards.
    fn fail(&self, _reason: &str, _damaged: bool) {}

    /// What others have told at the meeting that has failed, if something that was stored is damaged there.
    fn damage_elsewhere(&self) -> Option<String> {
        None
    }

    /// Lets time pass before the node comes to the next meeting; the others hear meanwhile that it is there.
    fn linger(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Lets the others hear that the node is there, before it goes on with something long. Called now and then.
    fn attend(&self) {}

    /// In a process that was forked from the node's: closes what it has inherited of the node's connections, which
    /// would not end with the node otherwise.
    fn leave(&self) {}
}
