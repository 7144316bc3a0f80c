//! Groups of hosts in distinct failure domains: whatever one domain takes down, no group loses more than one member.

use crate::RedundancyError;
use std::collections::BTreeMap;

/// Puts hosts into groups of `size` (or a few more, where they do not come out even; all in one where there are fewer), such that no group has two hosts of one
/// domain. `domains` are the domains of the hosts; the groups hold positions in it. A group has at least `fewest` members.
pub fn form(domains: &[String], size: usize, fewest: usize) -> Result<Vec<Vec<usize>>, RedundancyError> {
    if domains.len() < fewest {
        return Err(RedundancyError::Groups(format!(
            "the job runs on {} hosts, the scheme needs {fewest}",
            domains.len()
        )));
    }
    let count = (domains.len() / size.max(fewest).max(1)).max(1);
    let mut by_domain: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (host, domain) in domains.iter().enumerate() {
        by_domain.entry(domain).or_default().push(host);
    }
    let mut by_size: Vec<(&str, Vec<usize>)> = by_domain.into_iter().collect();
    by_size.sort_by_key(|(_, hosts)| std::cmp::Reverse(hosts.len()));
    if let Some((domain, hosts)) = by_size.first().filter(|(_, hosts)| hosts.len() > count) {
        return Err(RedundancyError::Groups(format!(
            "{} of {} hosts lie in failure domain {domain}, too many for {count} groups of {size} with one host of a domain each",
            hosts.len(),
            domains.len()
        )));
    }
    // Neighbours in this order, so all of one domain, come into different groups.
    let mut groups = vec![Vec::new(); count];
    for (n, host) in by_size.into_iter().flat_map(|(_, hosts)| hosts).enumerate() {
        groups[n % count].push(host);
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

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
                    prop_assert!(g.len() >= size.min(domains.len()));
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
        assert!(form(&names(&[1]), 4, 2).unwrap_err().to_string().contains("1 hosts"));
        let e = form(&names(&[1, 1, 2, 3]), 4, 2).unwrap_err().to_string();
        assert!(e.contains("2 of 4 hosts") && e.contains("d1"), "{e}");
        assert_eq!(form(&names(&[1, 1, 2, 2]), 2, 2).unwrap(), [[0, 2], [1, 3]]);
        assert_eq!(form(&names(&[1, 2, 3]), 8, 2).unwrap().len(), 1);
    }
}
