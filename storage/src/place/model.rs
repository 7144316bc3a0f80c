//! Predicted throughput of a local tier: what one of `w` concurrent writers gets, from measurements at equally spaced
//! numbers of writers. Pure.
//!
//! Between the samples, what all writers get together follows the uniform cubic B-spline that passes through the
//! samples (natural ends); behind the last one it is taken to stay. Interpolating what each gets would be wrong by
//! factors: that halves from one writer to two.

use serde::{Deserialize, Serialize};

/// A tier that nobody has measured, when it lies in memory and when not: bytes per second of all writers together.
const UNMEASURED: [f64; 2] = [8e9, 4e8];
/// Writers that together get this share of the most are enough: measurements are no better.
const NEARLY: f64 = 0.85;
/// Numbers of writers that are looked at; more samples can be stored.
const MOST_WRITERS: f64 = 4096.0;

/// Measured throughput of a tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Writers between two samples; the first sample has one writer.
    step: u32,
    /// Bytes per second that each writer got.
    samples: Vec<f64>,
    /// Weights of the spline's pieces, of which each gives what all writers get together; made from the samples.
    #[serde(skip)]
    weights: Vec<f64>,
    /// A spline may swing below its samples; no tier is taken to be slower than a tenth of its slowest.
    #[serde(skip)]
    least: f64,
    /// See [`Model::useful`].
    #[serde(skip)]
    useful: u32,
}

impl Model {
    /// The model that passes through `samples`, taken at 1, 1 + `step`, 1 + 2 `step` … writers. `None` where these are
    /// no measurements.
    pub fn new(step: u32, samples: Vec<f64>) -> Option<Self> {
        let good = step > 0 && !samples.is_empty() && samples.iter().all(|s| s.is_finite() && *s > 0.0);
        good.then(|| Self::through(step, samples))
    }

    fn through(step: u32, samples: Vec<f64>) -> Self {
        // In steps of `step` from one writer on.
        let writers = |i: usize| 1.0 + f64::from(step) * i as f64;
        let totals: Vec<f64> = samples.iter().enumerate().map(|(i, s)| s * writers(i)).collect();
        let mut model = Self {
            step,
            samples,
            least: totals.iter().copied().fold(f64::INFINITY, f64::min) / 10.0,
            weights: weights(&totals),
            useful: u32::MAX,
        };
        let last = writers(totals.len() - 1).min(MOST_WRITERS) as u32;
        let enough = NEARLY * (1..=last).map(|w| model.total(w)).fold(0.0, f64::max);
        // Two at least: a tier with one is idle until the next one has come.
        let fewest = (2..=last).find(|w| model.total(*w) >= enough);
        model.useful = fewest.filter(|w| *w < last).unwrap_or(u32::MAX);
        model
    }

    /// For a tier that nobody has measured.
    pub fn unmeasured(memory: bool) -> Self {
        let all = if memory { UNMEASURED[0] } else { UNMEASURED[1] };
        Self::through(1, vec![all])
    }

    /// A model as it was stored, which must be one that [`Model::new`] would make.
    pub fn checked(self) -> Option<Self> {
        Self::new(self.step, self.samples)
    }

    /// The fewest concurrent writers, but two at least, that get about as much together as any number of them;
    /// `u32::MAX` where no more than that have been measured.
    pub fn useful(&self) -> u32 {
        self.useful
    }

    /// What each of `writers` concurrent writers gets, bytes per second.
    pub fn per_writer(&self, writers: u32) -> f64 {
        self.total(writers) / f64::from(writers.max(1))
    }

    /// What `writers` concurrent writers get together, bytes per second.
    pub fn total(&self, writers: u32) -> f64 {
        let x = f64::from(writers.max(1) - 1) / f64::from(self.step);
        let last = self.weights.len() - 1;
        if x >= last as f64 {
            // The curve passes through its ends.
            return self.weights[last];
        }
        let piece = x.floor();
        let (i, t) = (piece as usize, x - piece);
        // Behind the ends the curve goes on straight.
        let at = |i: usize, back: bool| match (back, i) {
            (true, 0) => 2.0 * self.weights[0] - self.weights[1],
            (true, i) => self.weights[i - 1],
            (false, i) if i > last => 2.0 * self.weights[last] - self.weights[last - 1],
            (false, i) => self.weights[i],
        };
        let u = 1.0 - t;
        let basis = [
            u * u * u,
            3.0 * t * t * t - 6.0 * t * t + 4.0,
            -3.0 * t * t * t + 3.0 * t * t + 3.0 * t + 1.0,
            t * t * t,
        ];
        let around = [at(i, true), at(i, false), at(i + 1, false), at(i + 2, false)];
        let value: f64 = basis.iter().zip(around).map(|(b, w)| b * w).sum::<f64>() / 6.0;
        value.max(self.least)
    }
}

/// Weights of the B-spline through `y`: `(w[i-1] + 4 w[i] + w[i+1]) / 6 = y[i]`, and `y` itself at the ends.
fn weights(y: &[f64]) -> Vec<f64> {
    let n = y.len();
    if n < 3 {
        return y.to_vec();
    }
    // The tridiagonal system of the inner weights, by elimination.
    let mut factor = vec![0.0; n];
    let mut right = y.to_vec();
    for i in 1..n - 1 {
        let known = if i == 1 { y[0] } else { right[i - 1] };
        let below = if i == 1 { 0.0 } else { factor[i - 1] };
        let pivot = 4.0 - below;
        factor[i] = 1.0 / pivot;
        right[i] = (6.0 * y[i] - known) / pivot;
    }
    let mut out = y.to_vec();
    for i in (1..n - 1).rev() {
        out[i] = right[i] - factor[i] * out[i + 1];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_smooth_curve_is_met_between_the_samples_too() {
        let truth = |w: f64| 9e8 / (w + 8.0) + 1e7;
        let model = Model::new(3, (0..9).map(|i| truth(1.0 + 3.0 * f64::from(i))).collect()).unwrap();
        for w in 5..=22 {
            let (found, expected) = (model.per_writer(w), truth(f64::from(w)));
            assert!(
                (found / expected - 1.0).abs() < 0.02,
                "{w} writers: {found} instead of {expected}"
            );
        }
        // Behind the last sample (25 writers) all writers share what there was.
        let whole = model.per_writer(25) * 25.0;
        assert!((model.per_writer(50) * 50.0 / whole - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_tier_can_use_as_many_writers_as_add_to_what_all_get() {
        let useful = |totals: [f64; 5]| {
            let each = (0..5).map(|i| totals[i] / (1.0 + 2.0 * i as f64)).collect();
            Model::new(2, each).unwrap().useful()
        };
        assert_eq!(useful([1e8; 5]), 2, "one gets all");
        assert_eq!(useful([0.5e8, 1e8, 0.8e8, 0.6e8, 0.4e8]), 3);
        assert_eq!(useful([1e8, 3e8, 5e8, 7e8, 9e8]), 8, "eight get nearly as much as nine");
        assert_eq!(
            useful([1e8, 2e8, 4e8, 8e8, 16e8]),
            u32::MAX,
            "how many it can use has not been seen"
        );
        assert_eq!(Model::unmeasured(false).useful(), u32::MAX);
        let many = Model::new(1 << 31, vec![1.0, 1.0, 1e-8]).unwrap();
        assert!(many.useful() <= 4096 && many.total(u32::MAX) > 0.0);
    }

    #[test]
    fn what_is_no_measurement_makes_no_model() {
        assert_eq!(Model::new(0, vec![1.0]), None);
        assert_eq!(Model::new(1, vec![]), None);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Model::new(1, vec![1.0, bad]), None);
        }
        let stored = serde_json::to_string(&Model::new(2, vec![5.0, 4.0, 2.0]).unwrap()).unwrap();
        let read: Model = serde_json::from_str(&stored).unwrap();
        assert_eq!(read.checked(), Model::new(2, vec![5.0, 4.0, 2.0]));
        assert!(Model::unmeasured(true).per_writer(1) > Model::unmeasured(false).per_writer(1));
    }

    proptest! {
        #[test]
        fn every_sample_is_met(step in 1u32..9, samples in prop::collection::vec(1e6f64..2e6, 1..12)) {
            let model = Model::new(step, samples.clone()).unwrap();
            for (i, y) in (0u32..).zip(samples) {
                prop_assert!((model.per_writer(1 + i * step) / y - 1.0).abs() < 1e-9);
            }
        }
    }
}
