//! Names of hosts, with their domain and without: `n3` and `n3.cluster` are one host. Aliases of another kind (`n3-ib`)
//! are other hosts here. No input or output.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// `names`, each as `others` spell it: with a domain or without. Where one of the two lists has several that differ in
/// their domains alone, these are what they are.
pub(super) fn spelled<'a>(names: &[&'a str], others: &[&'a str]) -> Vec<&'a str> {
    let (same_here, same_there) = (by_host(names), by_host(others));
    let spell = |name: &&'a str| {
        let here = only(&same_here, name)?;
        only(&same_there, name).filter(|there| is_within(here, there) || is_within(there, here))
    };
    names.iter().map(|name| spell(name).unwrap_or(*name)).collect()
}

/// The names in groups: those of a group are the same up to the first dot.
fn by_host<'a>(names: &[&'a str]) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let mut groups: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for name in names {
        groups.entry(without_domain(name)).or_default().insert(name);
    }
    groups
}

/// The name in the group of `name`, where it has no other one.
fn only<'a>(groups: &BTreeMap<&str, BTreeSet<&'a str>>, name: &str) -> Option<&'a str> {
    let group = groups.get(without_domain(name))?;
    group.first().filter(|_| group.len() == 1).copied()
}

/// Dots in an address do not begin a domain.
fn without_domain(name: &str) -> &str {
    match name.split_once('.') {
        Some((host, _)) if name.parse::<IpAddr>().is_err() => host,
        _ => name,
    }
}

/// Whether `long` is `short` with more of its domain.
fn is_within(short: &str, long: &str) -> bool {
    long.strip_prefix(short).is_some_and(|rest| rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_and_without_a_domain_are_one_host_unless_several_could_be() {
        fn of<'a>(names: &'a str, others: &'a str) -> String {
            let words = |text: &'a str| text.split_whitespace().collect::<Vec<_>>();
            spelled(&words(names), &words(others)).join(" ")
        }
        assert_eq!(of("n1 n2 n3", "n3.a.b n1"), "n1 n2 n3.a.b");
        assert_eq!(of("n3.a.b n1.a", "n1 n3.a"), "n3.a n1");
        // One name twice is one host.
        assert_eq!(of("n3 n3", "n3.a n3.a"), "n3.a n3.a");
        // Another domain, and hosts of which one name only begins like the other.
        assert_eq!(of("n3.a n3a n", "n3.b n3.aa n3a1"), "n3.a n3a n");
        assert_eq!(of("n3.a", "n3.b"), "n3.a");
        assert_eq!(of("n3.a", "n3.ab"), "n3.a");
        assert_eq!(of("n3-ib", "n3 n3.a"), "n3-ib");
        // Several that could be meant.
        assert_eq!(of("n3", "n3.a n3.b"), "n3");
        assert_eq!(of("n3.a n3.b", "n3"), "n3.a n3.b");
        assert_eq!(of("n3 n3.a", "n3.a.b"), "n3 n3.a");
        // Addresses.
        assert_eq!(of("10.0.0.1 10.0.0.2", "10 10.0.0.3 10.0.0"), "10.0.0.1 10.0.0.2");
        assert_eq!(of("10", "10.0.0.1"), "10");
    }
}
