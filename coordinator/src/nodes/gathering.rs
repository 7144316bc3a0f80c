//! One checkpoint's steps at this node, up to its capture.

use crate::Failure;
use belay_plugins::{Brought, Facts, Group};
use belay_tree::{Broken, Contribution, FailureKind, Tree};
use belay_wire::Exit;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// Steps that a checkpoint may have; numbers of one begin at its number times this. Libraries that take part may need many.
pub(crate) const STEPS: u64 = 4096;
/// All have written.
pub(crate) const WRITTEN: u64 = STEPS - 2;
/// The root has committed.
pub(crate) const COMMITTED: u64 = STEPS - 1;

/// How long the others may take to come to a step for which programs stand still, or to hear of one that is over. An
/// agent that is gone is noticed sooner: this is for one that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What `node` tells the others about its `failure`: no generation comes of the checkpoint.
pub(crate) fn refusal(node: u64, failure: &Failure) -> Contribution {
    let kind = FailureKind::Refused {
        exit: failure.exit.code(),
        passing: failure.passing,
        not_asked: failure.not_asked,
    };
    Contribution::failed(node, kind, format!("on {}: {}", crate::sys::host(), failure.message))
}

/// Whether some node has not done its share; otherwise one was lost.
pub(crate) fn is_refused(broken: &Broken) -> bool {
    broken.0.iter().any(|f| matches!(f.kind, FailureKind::Refused { .. }))
}

/// What has failed, if some node has found that what it has stored is damaged.
pub(crate) fn damage(broken: &Broken) -> Option<String> {
    let damaged = |kind: &FailureKind| matches!(kind, FailureKind::Refused { exit, .. } if *exit == Exit::Damaged.code());
    broken.0.iter().any(|f| damaged(&f.kind)).then(|| line(broken))
}

/// The failure of a checkpoint that has failed at other nodes.
pub(crate) fn failure(broken: &Broken) -> Failure {
    Kind::of(broken).failure(line(broken))
}

/// What sort of failure the nodes have told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// That of all, where they agree.
    exit: Exit,
    /// The reasons of all pass by themselves.
    passing: bool,
    /// Somewhere a library was not asked to come to rest.
    not_asked: bool,
}

impl Kind {
    fn of(broken: &Broken) -> Self {
        let kinds = broken.0.iter().map(|f| match f.kind {
            FailureKind::Refused {
                exit,
                passing,
                not_asked,
            } => (Exit::of_code(exit), passing, not_asked),
            kind => (None, kind == FailureKind::Absent, false),
        });
        let mut told = kinds.map(|(exit, passing, not_asked)| Self {
            exit: exit.unwrap_or(Exit::CheckpointFailed),
            passing,
            not_asked,
        });
        let none = Self {
            exit: Exit::CheckpointFailed,
            passing: false,
            not_asked: false,
        };
        let first = told.next().unwrap_or(none);
        told.fold(first, |all, one| Self {
            exit: if all.exit == one.exit {
                all.exit
            } else {
                Exit::CheckpointFailed
            },
            passing: all.passing && one.passing,
            not_asked: all.not_asked || one.not_asked,
        })
    }

    fn failure(self, message: String) -> Failure {
        let build = if self.passing { Failure::passing } else { Failure::new };
        Failure {
            not_asked: self.not_asked,
            ..build(self.exit, message)
        }
    }
}

/// Meets the other nodes at one step after the other.
#[derive(Debug)]
pub(crate) struct Gathering<'a> {
    tree: &'a Tree,
    base: u64,
    next: Cell<u64>,
    broken: Cell<bool>,
    /// What failure other nodes have told.
    others: RefCell<Option<Failure>>,
    job: u64,
}

/// Failures of other nodes in one line.
pub(crate) fn line(broken: &Broken) -> String {
    let each = broken.0.iter().map(|f| match f.kind {
        FailureKind::Refused { .. } => f.reason.clone(),
        _ => format!("node {}: {}", f.node, f.reason),
    });
    each.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join("; ")
}

impl<'a> Gathering<'a> {
    pub(crate) fn new(tree: &'a Tree, base: u64, job: u64) -> Self {
        Self {
            tree,
            base,
            next: Cell::new(1),
            broken: Cell::new(false),
            others: RefCell::new(None),
            job,
        }
    }

    fn step(&self) -> u64 {
        self.next.replace(self.next.get() + 1) + self.base
    }

    /// Tells the others, who wait at the next step, that this node cannot go on; unless they know, because a step has failed.
    pub(crate) fn fail(&self, failure: &Failure) {
        if !self.broken.replace(true) {
            // It fails, of course.
            let refusal = refusal(self.tree.node(), failure);
            drop(self.tree.exchange_within(self.step(), refusal, Some(PATIENCE)));
        }
    }

    /// This node's `failure`: that which others have told where it comes from there, without what this node was at.
    pub(crate) fn judge(&self, failure: Failure) -> Failure {
        match self.others.take() {
            Some(told) => told,
            // The job has not: its root would know.
            None if failure.exit == Exit::ProgramEnded && self.tree.node() != 0 => Failure::passing(
                Exit::CheckpointFailed,
                format!("the part on {} has just ended", crate::sys::host()),
            ),
            None => failure,
        }
    }
}

/// What a node brings to a step.
pub(crate) fn contribution(brought: Brought) -> Contribution {
    Contribution {
        publish: brought.publish,
        want: brought.want,
        sums: brought.sums,
        ..Contribution::ready()
    }
}

impl Group for Gathering<'_> {
    fn meet(&self, brought: Brought) -> Result<Facts, String> {
        self.meet_late(brought, Duration::ZERO)
    }

    fn meet_late(&self, brought: Brought, late: Duration) -> Result<Facts, String> {
        self.tree
            .exchange_within(self.step(), contribution(brought), Some(PATIENCE + late))
            .map_err(|b| {
                self.broken.set(true);
                self.others.replace(Some(self::failure(&b)));
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
        self.fail(&Failure::new(Exit::Refused, reason));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_failure_is_told_to_others() {
        let of = |exit| refusal(3, &Failure::new(exit, "no")).failures;
        let broken = |exits: &[Exit]| Broken(exits.iter().flat_map(|e| of(*e)).collect());
        let both = broken(&[Exit::Refused, Exit::Refused]);
        assert_eq!(failure(&both).exit, Exit::Refused);
        assert!(is_refused(&both));
        assert_eq!(
            failure(&broken(&[Exit::DiskFull, Exit::Refused])).exit,
            Exit::CheckpointFailed
        );
        let lost = Broken(Contribution::failed(3, FailureKind::Lost, "connection closed").failures);
        assert_eq!((failure(&lost).exit, is_refused(&lost)), (Exit::CheckpointFailed, false));
    }

    #[test]
    fn what_passes_at_all_nodes_passes() {
        let told = |failures: &[Failure]| failures.iter().flat_map(|f| refusal(3, f).failures).collect();
        let (busy, no) = (Failure::passing(Exit::Refused, "busy"), Failure::new(Exit::Refused, "no"));
        let both = failure(&Broken(told(&[busy.clone(), busy.clone()])));
        assert!(both.passing);
        let host = crate::sys::host();
        assert_eq!(both.to_string(), format!("on {host}: busy; try again in a moment"));
        assert!(!failure(&Broken(told(&[busy.clone(), no]))).passing);
        assert!(!both.not_asked);
        let not_asked = Failure {
            not_asked: true,
            ..busy.clone()
        };
        assert!(failure(&Broken(told(&[busy, not_asked]))).not_asked);
        let new = Broken(Contribution::failed(4, FailureKind::Absent, "it has just joined").failures);
        assert!(failure(&new).passing);
    }
}
