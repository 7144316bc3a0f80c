//! What a model leaves out, learnt from how its predictions compared with what was observed. Pure.

/// So many of the newest observations count.
pub const LEARNS_FROM: usize = 8;
/// No factor beyond this, nor below its inverse, is believed.
const MOST: f64 = 1e6;

/// The median of `values`; of an even number the mean of the two in the middle.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|v| v.is_finite());
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let above = *values.get(middle)?;
    Some(match values.len() % 2 {
        0 => values[middle - 1] / 2.0 + above / 2.0,
        _ => above,
    })
}

/// Median of observed by predicted, of the newest of `pairs` (predicted, observed), which come oldest first; none where
/// nothing has been observed. One that was disturbed does not move it.
pub fn factor(pairs: impl DoubleEndedIterator<Item = (f64, f64)>) -> Option<f64> {
    let ratios = pairs.rev().filter(|(p, o)| *p > 0.0 && *o > 0.0).map(|(p, o)| o / p);
    let newest: Vec<f64> = ratios.filter(|r| r.is_finite() && *r > 0.0).take(LEARNS_FROM).collect();
    median(newest).map(|f| f.clamp(1.0 / MOST, MOST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_newest_eight_count_and_one_outlier_does_not() {
        let of = |observed: &[f64]| factor(observed.iter().map(|o| (2.0, *o)));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[3.0]), Some(1.5));
        assert_eq!(of(&[2.0, 4.0]), Some(1.5));
        assert_eq!(of(&[4.0, 4.0, 4000.0, 4.0]), Some(2.0));
        // Eight newer ones have pushed out those before.
        assert_eq!(of(&[[200.0; 9].as_slice(), &[1.0; 8]].concat()), Some(0.5));
        assert_eq!(of(&[[200.0; 9].as_slice(), &[1.0; 4]].concat()), Some(0.25 + 50.0));
    }

    #[test]
    fn what_is_no_time_teaches_nothing() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(factor([(bad, 1.0), (1.0, bad)].into_iter()), None, "{bad}");
            assert_eq!(factor([(1.0, 3.0), (bad, 1.0)].into_iter()), Some(3.0));
        }
        assert_eq!(factor([(1e-300, 1e300)].into_iter()), None);
        assert_eq!(factor([(1e-8, 1e8)].into_iter()), Some(MOST));
    }

    proptest! {
        #[test]
        fn a_model_that_is_wrong_by_a_factor_is_corrected(wrong in 1e-3f64..1e3, times in prop::collection::vec(1e-3f64..1e4, 1..20)) {
            let found = factor(times.iter().map(|t| (*t, t * wrong))).unwrap();
            prop_assert!((found / wrong - 1.0).abs() < 1e-9);
        }

        #[test]
        fn a_factor_is_a_number(pairs in prop::collection::vec((any::<f64>(), any::<f64>()), 0..12)) {
            if let Some(f) = factor(pairs.into_iter()) {
                prop_assert!((1.0 / MOST..=MOST).contains(&f));
            }
        }
    }
}
