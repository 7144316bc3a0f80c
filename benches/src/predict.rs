//! How well the times of a checkpoint are predicted, on tiers of known speeds ([`crate::buckets`]).
//!
//! The predictor knows a calibration of the local tiers and how many write. How fast the external tier is it must learn:
//! as in the agent a rate is assumed, and corrected by what was observed. Each generation is predicted before it is
//! written, also how much of it will be new.

use crate::buckets::{models, run, Setting, CHUNK};
use crate::Plan;
use belay_storage::place::model::Model;
use belay_storage::place::rule::Policy;
use belay_storage::predict::{factor, median, times, Costs, Durable, Node, Tier, Work, LEARNS_FROM};
use std::path::Path;

/// Generations from which is learnt before the predictions count.
const LEARN: usize = 3;
/// Largest error that counts as good.
const GOAL: f64 = 0.25;
/// Of the chunks of the first generation, what the others write: all is new in the first one.
const NEW: [f64; 8] = [1.0, 0.5, 0.52, 0.48, 0.5, 0.52, 0.48, 0.5];

/// A generation: seconds as predicted and observed.
#[derive(Debug, Clone, Copy)]
struct Seen {
    local: [f64; 2],
    durable: [f64; 2],
}

fn error([predicted, observed]: [f64; 2]) -> f64 {
    predicted / observed - 1.0
}

/// What the predictor has learnt.
#[derive(Debug, Default)]
struct Learnt {
    /// Of each generation its bytes, and seconds until it was written and until it was on the external tier.
    seen: Vec<(u64, [f64; 2])>,
    new: Vec<f64>,
    moves: Vec<f64>,
}

impl Learnt {
    /// The middle of the newest of `values`.
    fn newest(values: &[f64]) -> Option<f64> {
        median(values.iter().rev().copied().take(LEARNS_FROM).collect())
    }

    fn node(&self, s: Setting, models: &[Model; 2]) -> Node {
        let tier = |i: usize, capacity| Tier {
            capacity,
            memory: i == 0,
            model: models[i].clone(),
        };
        let assumed = Model::unmeasured(false);
        Node {
            policy: Policy::Adaptive,
            tiers: vec![tier(0, s.memory), tier(1, u64::MAX)],
            moves: Self::newest(&self.moves).unwrap_or(assumed.total(1)),
            durable: Some(Durable {
                copies: 1,
                rate: assumed.total(1),
                link: None,
            }),
            home: assumed,
            writers: s.writers as u32,
            costs: Costs::default(),
        }
    }
}

/// Seconds of the local phase and until all is on the external tier, by the model.
fn model(node: &Node, bytes: u64) -> [f64; 2] {
    let work = Work {
        processes: 0,
        // Nobody looks at pages here.
        bytes: 0,
        new_bytes: bytes,
        flush_bytes: bytes,
    };
    let t = times(node, &work);
    [t.local.seconds, t.durable.map_or(0.0, |d| d.seconds)]
}

/// As many generations as there are in [`NEW`].
fn generations(dir: &Path, setting: Setting) -> Result<Vec<Seen>, String> {
    let models = models(dir, setting)?;
    let mut learnt = Learnt::default();
    let mut seen = Vec::new();
    for new in NEW {
        let chunks = (setting.chunks as f64 * new) as u64;
        // The first one said nothing about those after it.
        let expected = Learnt::newest(learnt.new.get(1..).unwrap_or_default()).unwrap_or(1.0);
        let node = learnt.node(setting, &models);
        let guess = model(&node, (setting.chunks as f64 * expected) as u64 * CHUNK);
        let by = |i: usize| {
            factor(
                learnt
                    .seen
                    .iter()
                    .map(|(bytes, observed)| (model(&node, *bytes)[i], observed[i])),
            )
        };
        let predicted = [0, 1].map(|i| guess[i] * by(i).unwrap_or(1.0));
        let o = run(dir, Policy::Adaptive, Setting { chunks, ..setting }, &models)?;
        seen.push(Seen {
            local: [predicted[0], o.local],
            durable: [predicted[1], o.all],
        });
        learnt.seen.push((chunks * CHUNK, [o.local, o.all]));
        learnt.new.push(new);
        learnt.moves.extend(o.moves);
    }
    Ok(seen)
}

/// With 1, 2, 4 and 8 writers.
pub(crate) fn predict(p: &Plan) -> Result<(), String> {
    let dir = p.dir.join("predict");
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut worst: f64 = 0.0;
    for writers in [1, 2, 4, 8] {
        let setting = Setting {
            writers,
            chunks: 64,
            memory: 16 << 20,
            slow: (96 << 20) as f64,
            external: (48 << 20) as f64,
        };
        for (n, s) in generations(&dir, setting)?.iter().enumerate() {
            println!(
                "{writers} writers, generation {}: local {:.3} s predicted, {:.3} s observed ({:+.0} %); durable {:.3} s, {:.3} s ({:+.0} %)",
                n + 1,
                s.local[0],
                s.local[1],
                error(s.local) * 100.0,
                s.durable[0],
                s.durable[1],
                error(s.durable) * 100.0
            );
            if n >= LEARN {
                worst = worst.max(error(s.local).abs()).max(error(s.durable).abs());
            }
        }
    }
    println!(
        "after {LEARN} generations the worst error is {:.1} % (goal <= {:.0})",
        worst * 100.0,
        GOAL * 100.0
    );
    if worst > GOAL {
        return Err("predictions do not come true".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine that is busy meanwhile may spoil one generation.
    #[test]
    fn predictions_come_true_after_three_generations() {
        let dir = std::env::temp_dir().join(format!("belay-predict-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let setting = Setting {
            writers: 2,
            chunks: 12,
            memory: 4 << 20,
            slow: (48 << 20) as f64,
            external: (24 << 20) as f64,
        };
        let seen = generations(&dir, setting);
        std::fs::remove_dir_all(&dir).unwrap();
        let seen = seen.unwrap();
        for of in [|s: &Seen| s.local, |s: &Seen| s.durable] {
            let errors = seen[LEARN..].iter().map(|s| error(of(s)).abs()).collect();
            assert!(median(errors).unwrap() <= GOAL, "{seen:?}");
        }
        // Before, nobody knew how slow the external tier is.
        assert!(error(seen[0].durable).abs() > GOAL, "{seen:?}");
    }
}
