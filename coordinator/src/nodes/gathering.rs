//! One checkpoint's steps at this node, up to its capture.

use belay_plugins::{Facts, Group};
use belay_tree::{Broken, Contribution, Tree};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};

/// Steps that a checkpoint may have; numbers of one begin at its number times this.
pub(crate) const STEPS: u64 = 16;
/// All have written.
pub(crate) const WRITTEN: u64 = 14;
/// The root has committed.
pub(crate) const COMMITTED: u64 = 15;

/// Kind of failure of a node that has not done its share: no generation comes of the checkpoint.
pub(crate) const REFUSED: &str = "checkpoint";

/// Meets the other nodes at one step after the other.
#[derive(Debug)]
pub(crate) struct Gathering<'a> {
    tree: &'a Tree,
    base: u64,
    next: Cell<u64>,
    broken: Cell<bool>,
    job: u64,
}

/// Failures of other nodes in one line.
pub(crate) fn line(broken: &Broken) -> String {
    let each = broken.0.iter().map(|f| format!("node {}: {}", f.node, f.reason));
    each.collect::<Vec<_>>().join("; ")
}

impl<'a> Gathering<'a> {
    pub(crate) fn new(tree: &'a Tree, base: u64, job: u64) -> Self {
        Self {
            tree,
            base,
            next: Cell::new(1),
            broken: Cell::new(false),
            job,
        }
    }

    fn step(&self) -> u64 {
        self.next.replace(self.next.get() + 1) + self.base
    }

    /// Tells the others, who wait at the next step, that this node cannot go on; unless they know, because a step has failed.
    pub(crate) fn fail(&self, reason: &str) {
        if !self.broken.replace(true) {
            let failed = Contribution::failed(self.tree.node(), REFUSED, reason);
            // It fails, of course.
            drop(self.tree.exchange(self.step(), failed));
        }
    }
}

impl Group for Gathering<'_> {
    fn meet(&self, publish: Facts, want: BTreeSet<String>) -> Result<Facts, String> {
        let mut contribution = Contribution::ready();
        contribution.publish = publish;
        contribution.want = want;
        self.tree.exchange(self.step(), contribution).map_err(|b| {
            self.broken.set(true);
            line(&b)
        })
    }

    fn job(&self) -> u64 {
        // Another one each time.
        let mut hasher = std::hash::DefaultHasher::new();
        (self.job, self.base).hash(&mut hasher);
        hasher.finish()
    }

    fn give_up(&self, reason: &str) {
        self.fail(reason);
    }
}
