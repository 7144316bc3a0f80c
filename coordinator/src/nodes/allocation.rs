//! The nodes that Slurm has allocated to the job in which this process runs, and which of them the parts of a job of
//! belay get at a restart there.
//!
//! A part stays on its node where the allocation has that; the others get nodes that have none. The node of belay
//! itself, which has the first part, comes last.

use super::alive::{as_used, hosts_of, places, rows};
use super::names::spelled;
use super::seat::name_here;
use super::table::Row;
use crate::jobdir::JobDir;
use crate::Failure;
use belay_wire::Exit;
use std::collections::BTreeSet;

/// Names the nodes of the allocation; with [`OF_COMPONENT`] and a number behind it, those of one component of a heterogeneous one.
const VARIABLE: &str = "SLURM_JOB_NODELIST";
const OF_COMPONENT: &str = "_HET_GROUP_";
/// How many components a heterogeneous allocation has.
const COMPONENTS: &str = "SLURM_HET_SIZE";
/// Most nodes that a list may name: as many as Slurm lets one range have.
const MOST: usize = 1 << 16;
/// Most digits of a number in a name: as many as a host's name has characters.
const MOST_DIGITS: usize = 64;

/// The nodes of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// All but that of belay itself, in their order; that one where there is no other.
    pub others: Vec<String>,
    /// That of belay itself, where it is one of them.
    own: Option<String>,
}

/// Hosts for the parts of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    /// What a restart is to be given.
    pub given: Vec<String>,
    /// Where the parts will be, but those that Slurm places.
    pub parts: Vec<String>,
}

impl Allocation {
    /// That of the job of Slurm to which this process belongs, if there is one.
    pub fn here() -> Result<Option<Self>, Failure> {
        let nodes = nodes(&|variable| std::env::var(variable).unwrap_or_default())?;
        Ok(nodes.map(|nodes| Self::of(nodes, &name_here())))
    }

    /// `own` is what this host is called, with a domain or without.
    fn of(nodes: Vec<String>, own: &str) -> Self {
        let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
        let own = spelled(&[own], &names).concat();
        let (own, others): (Vec<String>, Vec<String>) = nodes.into_iter().partition(|n| *n == own);
        Self {
            others: if others.is_empty() { own.clone() } else { others },
            own: own.into_iter().next(),
        }
    }

    /// Hosts for the parts of generation `wanted` of the job in `dir`, or the newest.
    pub fn hosts(&self, dir: &JobDir, wanted: Option<u64>) -> Result<Hosts, Failure> {
        // What is damaged is found out, and named, by the restart; the parts that are not known have the nodes in their order.
        let known = rows(dir, wanted).ok().flatten();
        let rows = known.as_deref().unwrap_or_default();
        let used: Vec<&str> = rows.iter().filter(|r| !r.words.is_placed_by_slurm()).map(Row::host).collect();
        let given = self.places(&used);
        let stored = dir.description()?.config.redundancy.scheme.is_some();
        let parts = match &known {
            None => given.clone(),
            Some(rows) => hosts_of(rows, &given, stored).into_iter().flatten().collect(),
        };
        Ok(Hosts { given, parts })
    }

    /// A host for each part that was on one of `used`, and after these the ones without a part.
    fn places(&self, used: &[&str]) -> Vec<String> {
        let mut candidates = self.others.clone();
        let distinct: BTreeSet<&str> = used.iter().copied().collect();
        if distinct.len() > candidates.len() {
            candidates.extend(self.own.iter().filter(|own| !self.others.contains(own)).cloned());
        }
        let mut hosts = places(used, &candidates, &name_here());
        let rest = as_used(&candidates, used).into_iter().map(str::to_owned);
        let rest: Vec<String> = rest.filter(|c| !hosts.contains(c)).collect();
        hosts.extend(rest);
        hosts
    }
}

/// The nodes of all components of the allocation, in their order; none where there is no allocation. `value` is that of
/// a variable, empty where there is none.
fn nodes(value: &dyn Fn(&str) -> String) -> Result<Option<Vec<String>>, Failure> {
    let components: u32 = value(COMPONENTS).parse().unwrap_or(1);
    if components < 2 {
        return match value(VARIABLE) {
            none if none.is_empty() => Ok(None),
            list => read(VARIABLE, &list).map(Some),
        };
    }
    let mut all = Vec::new();
    for n in 0..components {
        let variable = format!("{VARIABLE}{OF_COMPONENT}{n}");
        all.extend(read(&variable, &value(&variable))?);
    }
    let mut seen = BTreeSet::new();
    all.retain(|node| seen.insert(node.clone()));
    Ok(Some(all))
}

fn read(variable: &str, list: &str) -> Result<Vec<String>, Failure> {
    expand(list).ok_or_else(|| {
        let why = format!("{variable}={list} is no list of nodes as Slurm writes it; name the hosts with --hosts");
        Failure::new(Exit::Usage, why)
    })
}

/// The nodes that `list` names, in its order, such as `n[08-10,12],login`; none where it is not written as Slurm does.
fn expand(list: &str) -> Option<Vec<String>> {
    let (mut inside, mut all) = (false, Vec::new());
    let elements = list.split(|c| {
        inside = (inside || c == '[') && c != ']';
        c == ',' && !inside
    });
    for element in elements {
        all.extend(names(element)?);
        if all.len() > MOST || element.is_empty() {
            return None;
        }
    }
    Some(all)
}

/// The names that `pattern` stands for: each of its brackets for each of its numbers.
fn names(pattern: &str) -> Option<Vec<String>> {
    let Some((before, rest)) = pattern.split_once('[') else {
        return (!pattern.contains(']')).then(|| vec![pattern.to_owned()]);
    };
    let (ranges, after) = rest.split_once(']')?;
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(low)?, number(high)?);
        let width = low.len();
        if last < first || last - first >= MOST as u64 || width > MOST_DIGITS || numbers.len() > MOST {
            return None;
        }
        numbers.extend((first..=last).map(|n| format!("{before}{n:0width$}")));
    }
    let ends = names(after)?;
    if before.contains(']') || numbers.len() * ends.len() > MOST {
        return None;
    }
    let with_ends = |name: &String| ends.iter().map(|end| format!("{name}{end}")).collect::<Vec<_>>();
    Some(numbers.iter().flat_map(with_ends).collect())
}

/// A number of digits alone.
fn number(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read_as_slurm_does() {
        let of = |list: &str| expand(list).map(|all| all.join(" ")).unwrap_or("?".into());
        assert_eq!(of("h2"), "h2");
        assert_eq!(of("h[2-4]"), "h2 h3 h4");
        assert_eq!(of("h[2-3,7],login,g[1]"), "h2 h3 h7 login g1");
        // As many digits as the first number has.
        assert_eq!(of("n[08-11,120]"), "n08 n09 n10 n11 n120");
        assert_eq!(of("n[8-11]"), "n8 n9 n10 n11");
        assert_eq!(of("rack[0-1]n[1-2]"), "rack0n1 rack0n2 rack1n1 rack1n2");
        assert_eq!(of("n[1-2]-ib,m-3"), "n1-ib n2-ib m-3");
        for wrong in [
            "",
            ",",
            "h2,",
            "h[",
            "h]",
            "h[]",
            "h[2",
            "h[2-]",
            "h[-2]",
            "h[+1]",
            "h[3-2]",
            "h[a-b]",
            "h[1,]",
            "h]1[",
            "h[1[2]]",
            "h[1]]",
            "h[0-99999999999999999999]",
            "h[0-9999999]",
            "h[0-999][0-999]",
            &format!("h[{}1]", "0".repeat(70_000)),
            &format!("h[{}]", ["0-65535"; 100].join(",")),
        ] {
            assert_eq!(of(wrong), "?", "{wrong:.40}");
        }
    }

    #[test]
    fn parts_stay_on_nodes_of_the_allocation_and_others_get_those_without_one() {
        let words = |names: &str| -> Vec<String> { names.split_whitespace().map(str::to_owned).collect() };
        let of = |nodes: &str, own: &str, used: &str| {
            let used: Vec<&str> = used.split_whitespace().collect();
            Allocation::of(words(nodes), own).places(&used).join(" ")
        };
        // The same nodes as before, and others.
        assert_eq!(of("a b c", "a", "c b"), "c b");
        assert_eq!(of("d e f", "d", "b c"), "e f");
        assert_eq!(of("a b d", "a", "b c"), "b d");
        // Belay itself has come to where a part was.
        assert_eq!(of("b c", "b", "b"), "c");
        // More nodes: the rest comes last.
        assert_eq!(of("a b c d", "a", "c"), "c b d");
        // Fewer: that of belay itself gets one too, after the others.
        assert_eq!(of("d e", "d", "b c"), "e d");
        assert_eq!(of("d", "d", "b c"), "d d");
        assert_eq!(of("a b", "a", "a b"), "a b");
        // Belay itself is on none of them.
        assert_eq!(of("a b", "login", "b a"), "b a");
        assert_eq!(of("d e", "login", "a b c"), "d e d");
        // Other spellings: a part that stays has its own, and the node of belay itself gets none.
        assert_eq!(of("a b c", "a", "c.x b.x"), "c.x b.x");
        assert_eq!(of("a b c d", "a.x", "c.x b.x"), "c.x b.x d");
        assert_eq!(of("a.x b.x c.x", "a", "c b"), "c b");
        assert_eq!(of("d e", "d.x", "b c"), "e d");
        assert_eq!(of("d", "d.x", "b.x c.x"), "d d");
        assert_eq!(of("a b", "a.x", "a.x b.x"), "a.x b.x");
        // It is not known where they were.
        assert_eq!(of("a b c", "b", ""), "a c");
        assert_eq!(of("a", "a", ""), "a");
    }

    #[test]
    fn all_components_of_a_heterogeneous_allocation_count() {
        let of = |variables: &[(&str, &str)]| {
            let value = |name: &str| variables.iter().find(|(n, _)| *n == name).map_or("", |(_, v)| v).to_owned();
            nodes(&value)
                .map(|all| all.unwrap_or_default().join(" "))
                .map_err(|f| f.message)
        };
        let plain = ("SLURM_JOB_NODELIST", "n[1-2]");
        let size = |n| ("SLURM_HET_SIZE", n);
        let first = ("SLURM_JOB_NODELIST_HET_GROUP_0", "n[1-2]");
        let second = ("SLURM_JOB_NODELIST_HET_GROUP_1", "g7,n[2-3]");
        assert_eq!(of(&[]).unwrap(), "");
        assert_eq!(of(&[plain]).unwrap(), "n1 n2");
        assert_eq!(of(&[plain, size("1")]).unwrap(), "n1 n2");
        assert_eq!(of(&[plain, size("2"), first, second]).unwrap(), "n1 n2 g7 n3");
        // The list without a number is not needed.
        assert_eq!(of(&[size("2"), first, second]).unwrap(), "n1 n2 g7 n3");
        let why = of(&[plain, size("3"), first, second]).unwrap_err();
        assert!(
            why.starts_with("SLURM_JOB_NODELIST_HET_GROUP_2= is no list of nodes"),
            "{why}"
        );
    }
}
