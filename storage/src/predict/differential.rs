//! What a differential checkpoint costs beside a full one, which writes every block and hashes none. Pure.
//!
//! With κ the time to hash a block by the time to write it, and r the share of the blocks that have changed:
//!
//! ```text
//! full                      1
//! differential              κ      every block is hashed, to find what has changed,
//!                         + r      and what has changed is written
//!                         + κ r    and, in libraries that keep a checksum of the file too, hashed once more
//! δ = κ (1 + r) − (1 − r)          by how much it is longer; it pays while δ < 0
//! r* = (1 − κ) / (1 + κ)           the share from which on it does not
//! ```
//! As K. Keller and L. Bautista-Gomez see it for FTI (*Application-Level Differential Checkpointing for HPC Applications
//! with Dynamic Datasets*, CCGrid 2019). In belay the hash of a page is its checksum too, so no page is hashed twice:
//! δ = κ − (1 − r), and r* = 1 − κ.

/// Neither of the two is told to be greater.
const MOST: f64 = 1e6;

/// The ratio and the share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Differential {
    kappa: f64,
    dirty: f64,
}

impl Differential {
    /// From the time to hash a block and to look for it, the time to write it, and the share of blocks that have
    /// changed; none where these are no measurements.
    pub fn new(hash_s: f64, write_s: f64, dirty: f64) -> Option<Self> {
        let kappa = hash_s / write_s;
        let is_measured = hash_s >= 0.0 && write_s > 0.0 && (0.0..=MOST).contains(&kappa) && (0.0..=1.0).contains(&dirty);
        is_measured.then_some(Self { kappa, dirty })
    }

    /// Time to hash a block by the time to write it.
    pub fn kappa(&self) -> f64 {
        self.kappa
    }

    /// The share that has changed.
    pub fn dirty(&self) -> f64 {
        self.dirty
    }

    /// Its time beyond that of a full one, by that, where what has changed is hashed twice.
    pub fn delta(&self) -> f64 {
        self.kappa * (1.0 + self.dirty) - (1.0 - self.dirty)
    }

    /// The share from which on it does not pay then; 0 where it never does.
    pub fn break_even(&self) -> f64 {
        ((1.0 - self.kappa) / (1.0 + self.kappa)).max(0.0)
    }

    /// As [`Differential::delta`], where each block is hashed once.
    pub fn delta_once(&self) -> f64 {
        self.kappa - (1.0 - self.dirty)
    }

    /// As [`Differential::break_even`], where each block is hashed once.
    pub fn break_even_once(&self) -> f64 {
        (1.0 - self.kappa).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn figures_by_hand() {
        // A block is hashed in 0.2 of the time to write it, and a half has changed: 0.2 + 0.5 + 0.1 instead of 1.
        let d = Differential::new(2e-6, 1e-5, 0.5).unwrap();
        assert!(
            (d.delta() + 0.2).abs() < 1e-12 && (d.delta_once() + 0.3).abs() < 1e-12,
            "{d:?}"
        );
        assert!((d.break_even() - 2.0 / 3.0).abs() < 1e-12 && (d.break_even_once() - 0.8).abs() < 1e-12);
        // Hashing is slower than writing: it never pays.
        let d = Differential::new(2.0, 1.0, 0.0).unwrap();
        assert!(d.delta() > 0.0 && d.break_even() == 0.0 && d.break_even_once() == 0.0);
    }

    #[test]
    fn what_was_not_measured_says_nothing() {
        for (hash, write, dirty) in [
            (f64::NAN, 1.0, 0.5),
            (1.0, 0.0, 0.5),
            (1.0, 1e-320, 0.5),
            (-1.0, 1.0, 0.5),
            (1.0, -1.0, 0.5),
            (1e308, 1e-308, 0.5),
            (1.0, 1.0, 1.5),
            (1.0, 1.0, f64::NAN),
            (0.0, f64::INFINITY, -0.1),
        ] {
            assert_eq!(Differential::new(hash, write, dirty), None, "{hash} {write} {dirty}");
        }
    }

    proptest! {
        #[test]
        fn it_pays_below_the_break_even_and_not_above(kappa in 0.0f64..1.0, dirty in 0.0f64..1.0) {
            let d = Differential::new(kappa, 1.0, dirty).unwrap();
            let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
            prop_assert!(near(dirty, d.break_even()) || (d.delta() < 0.0) == (dirty < d.break_even()));
            prop_assert!(near(dirty, d.break_even_once()) || (d.delta_once() < 0.0) == (dirty < d.break_even_once()));
            // To hash once is never worse.
            prop_assert!(d.delta_once() <= d.delta() + 1e-12 && d.break_even() <= d.break_even_once() + 1e-12);
        }
    }
}
