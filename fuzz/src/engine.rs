//! The loop: takes an input, changes it, executes it, and keeps it where it reached something new.

use crate::coverage::Seen;
use crate::targets::Target;
use crate::{guard, mutate};
use fastrand::Rng;
use std::path::Path;
use std::time::{Duration, Instant};

/// Inputs that are kept in memory at most.
const KEPT: usize = 20_000;

/// So many are executed in any case: a machine that stands still for a moment must not leave a target out.
pub const LEAST: u64 = 101;

/// What came of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outcome {
    /// Executions.
    pub executions: u64,
    /// Inputs of the corpus, and those that were added because they reached something new.
    pub inputs: (usize, usize),
    /// Counters reached, and all; none without coverage.
    pub reached: (usize, usize),
}

/// The real files that `target` begins with.
pub fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.corpus);
    let mut names: Vec<_> = std::fs::read_dir(&dir)
        .map(|list| list.filter_map(|e| Some(e.ok()?.path())).collect())
        .unwrap_or_default();
    names.sort();
    names.iter().filter_map(|n| std::fs::read(n).ok()).collect()
}

/// Runs `target` for `time`, and [`LEAST`] times, with the random numbers that follow from `seed`.
pub fn run(target: &Target, time: Duration, seed: u64) -> Outcome {
    let begin = Instant::now();
    let mut rng = Rng::with_seed(seed);
    let mut seen = Seen::default();
    let mut inputs = corpus(target);
    inputs.push(Vec::new());
    let mut out = Outcome {
        inputs: (inputs.len() - 1, 0),
        ..Outcome::default()
    };
    let execute = |input: &[u8], seen: &mut Seen| {
        Seen::begin();
        guard::execute(target.name, target.run, input);
        seen.take()
    };
    for input in &inputs {
        execute(input, &mut seen);
        out.executions += 1;
    }
    while begin.elapsed() < time || out.executions < LEAST {
        // What was found last is looked at most.
        let at = if rng.bool() {
            inputs.len() - 1 - rng.usize(0..inputs.len().min(64))
        } else {
            rng.usize(0..inputs.len())
        };
        let mut input = inputs[at].clone();
        let other = rng.usize(0..inputs.len());
        mutate::mutate(&mut rng, &mut input, &inputs[other]);
        out.executions += 1;
        if execute(&input, &mut seen) && inputs.len() < KEPT {
            inputs.push(input);
            out.inputs.1 += 1;
        }
    }
    out.reached = seen.reached();
    out
}
