//! One collective step at one node: contributions of the node itself and of its children become one, and the answer is
//! taken apart again.
//!
//! ```text
//! own + children ──(all have arrived)──> Merged up ──> ... root ... ──> Release ──(by what each wanted)──> own, children
//! ```
//! Pure: no I/O, no clock. A child that is lost counts as arrived with a failure, so a step always ends.

use crate::message::{Contribution, Failed, FailureKind, Values};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Who contributes: a child by its node number, or the node itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Who {
    /// The node itself.
    Own,
    /// A child.
    Child(u64),
}

/// The step under way at one node.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// Its number; numbers only grow.
    number: u64,
    /// The last step that is over.
    pub(crate) released: u64,
    arrived: BTreeMap<Who, BTreeSet<String>>,
    merged: Contribution,
    sent: bool,
    /// What children have said last of other steps than the one under way. A child that does so without reason harms
    /// itself alone.
    others: BTreeMap<Who, (u64, Contribution)>,
}

impl Step {
    /// Takes a contribution. One that comes again (after a reconnection), or to a step that is over, changes nothing.
    pub(crate) fn arrive(&mut self, number: u64, who: Who, contribution: Contribution) {
        if number <= self.released || (number == self.number && self.arrived.contains_key(&who)) {
            return;
        }
        if number != self.number {
            // The step is the one that the node itself comes to, whatever children have said of others before.
            if who != Who::Own && self.is_under_way() {
                self.others.insert(who, (number, contribution));
                return;
            }
            let others = std::mem::take(&mut self.others);
            *self = Step {
                number,
                released: self.released,
                ..Step::default()
            };
            self.take(others);
        }
        self.arrived.insert(who, contribution.want.clone());
        self.merged.merge(contribution);
    }

    /// Takes what children have said while another step was under way.
    fn take(&mut self, others: BTreeMap<Who, (u64, Contribution)>) {
        for (who, (number, contribution)) in others {
            if number == self.number {
                self.arrive(number, who, contribution);
            } else if number > self.released {
                self.others.insert(who, (number, contribution));
            }
        }
    }

    /// A child is gone: the step, if one is under way, fails.
    pub(crate) fn lose(&mut self, node: u64, kind: FailureKind, reason: &str) {
        if self.is_under_way() && !self.arrived.contains_key(&Who::Child(node)) {
            self.arrived.insert(Who::Child(node), BTreeSet::new());
            self.merged.merge(Contribution::failed(node, kind, reason));
        }
    }

    /// Whether somebody has arrived and nobody has been answered.
    pub(crate) fn is_under_way(&self) -> bool {
        !self.arrived.is_empty()
    }

    /// Whether the node itself has come to it.
    pub(crate) fn is_own_there(&self) -> bool {
        self.arrived.contains_key(&Who::Own)
    }

    /// Whether child `node` has.
    pub(crate) fn has_come(&self, node: u64) -> bool {
        self.arrived.contains_key(&Who::Child(node))
    }

    /// What has been merged so far.
    pub(crate) fn so_far(&self) -> Contribution {
        self.merged.clone()
    }

    /// The merged contribution, once, when the node itself, whose number is `own`, and all of `children` have arrived.
    pub(crate) fn complete(&mut self, own: u64, mut children: impl Iterator<Item = u64>) -> Option<Contribution> {
        let is_own_there = self.arrived.contains_key(&Who::Own);
        if self.sent || !is_own_there || !children.all(|c| self.arrived.contains_key(&Who::Child(c))) {
            return None;
        }
        self.sent = true;
        self.merged = std::mem::take(&mut self.merged).bounded(own);
        Some(self.merged.clone())
    }

    /// What has been merged and sent up and not been answered, to be sent again on a new connection.
    pub(crate) fn unanswered(&self) -> Option<(u64, Contribution)> {
        (self.sent && self.is_under_way()).then(|| (self.number, self.merged.clone()))
    }

    /// Number of the step under way, or of the last one.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Ends the step: what each contributor gets of `values`.
    pub(crate) fn release(&mut self, values: &Values) -> Vec<(Who, Values)> {
        let arrived = std::mem::take(&mut self.arrived);
        self.merged = Contribution::default();
        self.released = self.number;
        let pick = |want: BTreeSet<String>| {
            let found = want.iter().flat_map(|name| named(values, name));
            found.map(|(k, v)| (k.clone(), v.clone())).collect()
        };
        arrived.into_iter().map(|(who, want)| (who, pick(want))).collect()
    }
}

/// The facts that one wish names: one, or all that begin with what is before a `*`.
fn named<'a>(values: &'a Values, name: &'a str) -> Box<dyn Iterator<Item = (&'a String, &'a String)> + 'a> {
    match name.strip_suffix('*') {
        None => Box::new(values.get_key_value(name).into_iter()),
        Some(begin) => {
            let from = values.range::<str, _>((Bound::Included(begin), Bound::Unbounded));
            Box::new(from.take_while(move |(k, _)| k.starts_with(begin)))
        }
    }
}

/// What the root answers: the facts that somebody wants, and what stands against the step.
pub(crate) fn decide(merged: Contribution) -> (Vec<Failed>, Values) {
    let (failures, want) = (merged.failures.clone(), merged.want.clone());
    let known = merged.facts();
    let found = want.iter().flat_map(|name| named(&known, name));
    let values = found.map(|(k, v)| (k.clone(), v.clone())).collect();
    (failures, values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape;
    use proptest::prelude::*;

    /// A whole tree, driven without any I/O: contributions arrive in the order of `order`.
    fn run(count: u64, fan_out: u64, order: &[u64], contributions: &[Contribution]) -> (Vec<Failed>, Vec<Values>, u64) {
        let children = |n: u64| (1..count).filter(move |c| shape::parent(*c, fan_out) == Some(n));
        let mut steps: Vec<Step> = (0..count).map(|_| Step::default()).collect();
        let mut at_root = 0;
        let mut answer = None;
        for n in order {
            let mut at = *n;
            steps[at as usize].arrive(1, Who::Own, contributions[at as usize].clone());
            while let Some(merged) = steps[at as usize].complete(at, children(at)) {
                match shape::parent(at, fan_out) {
                    Some(above) => {
                        at_root += u64::from(above == 0);
                        steps[above as usize].arrive(1, Who::Child(at), merged);
                        at = above;
                    }
                    None => {
                        assert_eq!(merged.nodes, count);
                        answer = Some(decide(merged));
                        break;
                    }
                }
            }
        }
        let (failures, values) = answer.expect("everybody has arrived");
        let mut got = vec![Values::new(); count as usize];
        let mut down = vec![(0, values)];
        while let Some((n, values)) = down.pop() {
            for (who, values) in steps[n as usize].release(&values) {
                match who {
                    Who::Own => got[n as usize] = values,
                    Who::Child(c) => down.push((c, values)),
                }
            }
        }
        (failures, got, at_root)
    }

    proptest! {
        #[test]
        fn everybody_gets_what_it_wants_and_nothing_else(
            (count, order) in (1u64..60).prop_flat_map(|n| (Just(n), Just((0..n).collect::<Vec<_>>()).prop_shuffle())),
            fan_out in 1u64..9,
            wants in prop::collection::vec((0u64..70, 0u64..70), 0..40),
            fails in prop::collection::btree_set(0u64..60, 0..3),
        ) {
            let mut all: Vec<Contribution> = (0..count).map(|n| {
                let mut c = if fails.contains(&n) { Contribution::failed(n, FailureKind::Silent, "no") } else { Contribution::ready() };
                c.publish.insert(format!("fact{n}"), format!("of {n}"));
                c.sums.insert("ones".into(), 1);
                c.greatest.insert("number".into(), n);
                c
            }).collect();
            all[0].want.extend(["sum *", "greatest number"].map(str::to_owned));
            for (who, what) in &wants {
                if let Some(c) = all.get_mut(*who as usize) {
                    c.want.insert(format!("fact{what}"));
                }
            }
            let (failures, mut got, at_root) = run(count, fan_out, &order, &all);
            let failed: BTreeSet<u64> = failures.iter().map(|f| f.node).collect();
            prop_assert_eq!(failed, fails.iter().copied().filter(|f| *f < count).collect());
            prop_assert!(at_root <= fan_out);
            prop_assert_eq!(got[0].remove("sum ones"), Some(count.to_string()));
            prop_assert_eq!(got[0].remove("greatest number"), Some((count - 1).to_string()));
            all[0].want.retain(|w| w.starts_with("fact"));
            for (n, values) in got.iter().enumerate() {
                let names: BTreeSet<String> = values.keys().cloned().collect();
                let wanted: BTreeSet<String> = all[n].want.iter().filter(|w| w[4..].parse::<u64>().unwrap() < count).cloned().collect();
                prop_assert_eq!(names, wanted);
                for (k, v) in values {
                    prop_assert_eq!(v, &format!("of {}", &k[4..]));
                }
            }
        }
    }

    #[test]
    fn a_child_that_speaks_of_a_later_step_moves_nobody() {
        let mut step = Step::default();
        // Whether the others come before or after it, and before or after the node itself.
        step.arrive(u64::MAX, Who::Child(1), Contribution::ready());
        step.arrive(3, Who::Child(2), Contribution::ready());
        step.arrive(3, Who::Own, Contribution::ready());
        step.arrive(u64::MAX, Who::Child(1), Contribution::ready());
        step.arrive(3, Who::Child(3), Contribution::ready());
        assert_eq!((step.number(), step.is_own_there()), (3, true));
        assert!(step.complete(0, [1, 2, 3].into_iter()).is_none());
        step.lose(1, FailureKind::Lost, "gone");
        assert_eq!(step.complete(0, [2, 3].into_iter()).unwrap().failures.len(), 1);
        step.release(&Values::new());
        step.arrive(4, Who::Child(2), Contribution::ready());
        step.arrive(u64::MAX, Who::Child(3), Contribution::ready());
        step.arrive(4, Who::Own, Contribution::ready());
        assert_eq!((step.number(), step.released), (4, 3));
        assert!(step.complete(0, std::iter::once(2)).is_some());
    }

    #[test]
    fn what_a_child_was_early_with_counts_when_its_step_has_come() {
        let mut step = Step::default();
        step.arrive(3, Who::Own, Contribution::ready());
        step.arrive(4, Who::Child(1), Contribution::ready());
        step.lose(1, FailureKind::Lost, "gone for a moment");
        step.release(&Values::new());
        step.arrive(4, Who::Own, Contribution::ready());
        assert!(step.complete(0, std::iter::once(1)).is_some());
    }

    #[test]
    fn a_lost_child_ends_the_step_with_a_failure() {
        let mut step = Step::default();
        step.arrive(3, Who::Own, Contribution::ready());
        assert!(step.complete(0, [1, 2].into_iter()).is_none());
        step.arrive(3, Who::Child(1), Contribution::ready());
        step.lose(2, FailureKind::Lost, "killed");
        step.lose(2, FailureKind::Lost, "killed");
        let merged = step.complete(0, [1, 2].into_iter()).unwrap();
        assert_eq!(merged.failures.len(), 1);
        assert_eq!(merged.nodes, 3);
        assert!(step.complete(0, [1, 2].into_iter()).is_none(), "sent once");
        assert!(step.unanswered().is_some());
        step.release(&Values::new());
        assert!(step.unanswered().is_none());
    }

    #[test]
    fn facts_too_long_for_a_message_fail_the_step() {
        let long = |node: u64| {
            let mut c = Contribution::ready();
            c.publish
                .insert(format!("fact{node}"), "x".repeat(crate::noise::MAX_MESSAGE / 5));
            c.want.insert("fact*".into());
            c
        };
        let all = [long(0), long(1), long(2), long(3)];
        let (failures, got, _) = run(2, 2, &[1, 0], &all[..2]);
        assert!(failures.is_empty());
        assert_eq!(got[1].len(), 2);
        // 3 is below 1; together with 0 they have too much.
        let (failures, got, _) = run(4, 2, &[3, 1, 2, 0], &all);
        assert_eq!(
            failures.iter().map(|f| (f.node, f.kind)).collect::<Vec<_>>(),
            [(0, FailureKind::TooLong)]
        );
        assert!(got.iter().all(Values::is_empty));
    }

    #[test]
    fn a_contribution_that_comes_twice_counts_once() {
        let mut step = Step::default();
        let mut with_number = Contribution::ready();
        with_number.sums.insert("bytes".into(), 5);
        step.arrive(1, Who::Child(1), with_number.clone());
        step.arrive(1, Who::Child(1), with_number);
        step.arrive(1, Who::Own, Contribution::ready());
        let merged = step.complete(0, [1].into_iter()).unwrap();
        assert_eq!((merged.nodes, merged.sums["bytes"]), (2, 5));
        step.release(&Values::new());
        step.arrive(1, Who::Child(1), Contribution::ready());
        assert!(!step.is_under_way(), "the step is over");
    }
}
