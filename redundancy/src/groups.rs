//! Groups of hosts in distinct failure domains: whatever one domain takes down, no group loses more than one member.

use crate::RedundancyError;
use std::collections::{BTreeMap, BTreeSet};

/// Puts parts of a job into groups of `size` (or a few more, where they do not come out even; fewer where a domain has
/// so many that there must be more groups; all in one where there are fewer), such that no group has two of one domain.
/// `domains` are the domains of the parts; the groups hold positions in it. A group has at least `fewest` members.
pub fn form(domains: &[String], size: usize, fewest: usize) -> Result<Vec<Vec<usize>>, RedundancyError> {
    if domains.len() < fewest {
        return Err(RedundancyError::Groups(format!(
            "the job has {} parts, the scheme needs {fewest}",
            domains.len()
        )));
    }
    let mut by_domain: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (part, domain) in domains.iter().enumerate() {
        by_domain.entry(domain).or_default().push(part);
    }
    let mut by_size: Vec<(&str, Vec<usize>)> = by_domain.into_iter().collect();
    by_size.sort_by_key(|(_, parts)| std::cmp::Reverse(parts.len()));
    let wanted = (domains.len() / size.max(fewest).max(1)).max(1);
    let (largest, most) = by_size.first().map_or(("", 0), |(domain, parts)| (*domain, parts.len()));
    let count = wanted.max(most);
    if domains.len() / count < fewest {
        return Err(RedundancyError::Groups(format!(
            "{most} of the job's {} parts lie in failure domain {largest}: in {count} groups with one of them each, some have less than {fewest} parts, which the scheme needs",
            domains.len()
        )));
    }
    // Neighbours in this order, so all of one domain, come into different groups.
    let mut groups = vec![Vec::new(); count];
    for (n, part) in by_size.into_iter().flat_map(|(_, parts)| parts).enumerate() {
        groups[n % count].push(part);
    }
    Ok(groups)
}

/// Whether the groups `old` serve parts in these domains as well as `new` ones do: they hold the same parts, are as large,
/// and none has two of one domain.
pub fn serve_as_well(old: &[Vec<usize>], new: &[Vec<usize>], domains: &[String]) -> bool {
    let sorted = |mut all: Vec<usize>| {
        all.sort_unstable();
        all
    };
    let parts = |groups: &[Vec<usize>]| sorted(groups.iter().flatten().copied().collect());
    let sizes = |groups: &[Vec<usize>]| sorted(groups.iter().map(Vec::len).collect());
    let distinct = |group: &Vec<usize>| {
        let of: BTreeSet<Option<&String>> = group.iter().map(|part| domains.get(*part)).collect();
        of.len() == group.len()
    };
    parts(old) == parts(new) && sizes(old) == sizes(new) && old.iter().all(distinct)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(of: &[u8]) -> Vec<String> {
        of.iter().map(|n| format!("d{n}")).collect()
    }

    proptest! {
        #[test]
        fn no_group_has_two_hosts_of_a_domain(of in prop::collection::vec(0u8..12, 1..40), size in 2usize..6) {
            let domains = names(&of);
            if let Ok(groups) = form(&domains, size, 2) {
                let mut seen = BTreeSet::new();
                for g in &groups {
                    let most = domains.iter().map(|d| domains.iter().filter(|e| *e == d).count()).max().unwrap_or(0);
                    let even = domains.len() / (domains.len() / size).max(1);
                    prop_assert!(g.len() >= even.min(domains.len() / most).min(size) && g.len() >= 2);
                    prop_assert!(g.len() < 2 * size);
                    let distinct: BTreeSet<_> = g.iter().map(|h| &domains[*h]).collect();
                    prop_assert_eq!(distinct.len(), g.len());
                    seen.extend(g.iter().copied());
                }
                prop_assert_eq!(seen.len(), domains.len());
            }
        }
    }

    #[test]
    fn what_cannot_be_grouped_is_said() {
        assert!(form(&names(&[1]), 4, 2).unwrap_err().to_string().contains("1 parts"));
        let e = form(&names(&[1, 1, 2]), 4, 2).unwrap_err().to_string();
        assert!(e.contains("2 of the job's 3 parts") && e.contains("d1"), "{e}");
        // Several parts on one host make more groups.
        assert_eq!(form(&names(&[1, 1, 2, 3]), 4, 2).unwrap(), [[0, 2], [1, 3]]);
        assert_eq!(
            form(&names(&[1, 1, 1, 2, 2, 3, 3]), 4, 2).unwrap(),
            [&[0, 3, 6][..], &[1, 4], &[2, 5]]
        );
        assert_eq!(form(&names(&[1, 1, 2, 2]), 2, 2).unwrap(), [[0, 2], [1, 3]]);
        assert_eq!(form(&names(&[1, 2, 3]), 8, 2).unwrap().len(), 1);
    }

    #[test]
    fn groups_stay_where_they_serve_as_well() {
        let domains = names(&[1, 2, 3, 1]);
        let new = form(&domains, 2, 2).unwrap();
        assert!(serve_as_well(&[vec![2, 0], vec![3, 1]], &new, &domains));
        for old in [
            &[vec![0, 3], vec![1, 2]][..],
            &[vec![0, 1, 2], vec![3]],
            &[vec![0, 1], vec![2]],
            &[vec![0, 1], vec![2, 9]],
            &[],
        ] {
            assert!(!serve_as_well(old, &new, &domains), "{old:?}");
        }
    }
}
