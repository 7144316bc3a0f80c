//! Shape of the tree: nodes are numbered as they join, and node `n` is a child of node `(n - 1) / fan-out`, which has
//! joined before it.

/// The parent of `node`; the root has none.
pub fn parent(node: u64, fan_out: u64) -> Option<u64> {
    let above = node.checked_sub(1)?;
    Some(above / fan_out.max(1))
}

/// Number of steps from `node` to the root.
pub fn depth(node: u64, fan_out: u64) -> u32 {
    let mut steps = 0;
    let mut at = node;
    while let Some(above) = parent(at, fan_out) {
        at = above;
        steps += 1;
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn no_node_has_more_children_than_the_fan_out_and_all_hang_on_the_root(count in 1u64..3000, fan_out in 1u64..70) {
            let mut children: HashMap<u64, u64> = HashMap::new();
            for n in 1..count {
                let above = parent(n, fan_out).unwrap();
                prop_assert!(above < n);
                *children.entry(above).or_default() += 1;
            }
            prop_assert!(children.values().all(|c| *c <= fan_out));
        }

        #[test]
        fn depth_grows_with_the_logarithm(n in 1u64..100_000, fan_out in 2u64..70) {
            let bound = ((n + 1) as f64).ln() / (fan_out as f64).ln() + 2.0;
            prop_assert!(f64::from(depth(n, fan_out)) <= bound);
        }
    }

    #[test]
    fn the_root_has_no_parent() {
        assert_eq!(parent(0, 16), None);
        assert_eq!(depth(0, 16), 0);
    }
}
