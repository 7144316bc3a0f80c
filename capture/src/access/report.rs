//! What checkpoints of a job could leave out, by the sites of its programs.

use super::sites::Program;
use belay_image::manifest::{Declared, DeclaredSite};
use std::collections::BTreeMap;

/// So many sites are told.
const MOST: usize = 10;

/// Of one program: bytes of its datasets, and each site with its name, visits, and what is alive there.
type Told = (u64, Vec<(Vec<u8>, u64, u64)>);

/// What `programs` have declared; none where no loop of theirs is known.
pub(crate) fn of(programs: &[Program]) -> Option<Declared> {
    let all: Vec<Told> = programs.iter().map(told).collect();
    summary(&all)
}

fn told(program: &Program) -> Told {
    let site = |site: &belay_access::site::Site| {
        let name = program.name(site.site)?;
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        Some((name.to_vec(), site.visits, site.alive))
    };
    (program.bytes, program.sites.iter().filter_map(site).collect())
}

/// What is alive at a site is so in all programs that have it; of the others it is everything.
fn summary(all: &[Told]) -> Option<Declared> {
    let bytes = all.iter().fold(0u64, |sum, (bytes, _)| sum.saturating_add(*bytes));
    let mut sites: BTreeMap<&[u8], (u64, u64)> = BTreeMap::new();
    let mut at_best = bytes;
    for (own, told) in all {
        for (name, visits, alive) in told {
            let site = sites.entry(name).or_insert((0, bytes));
            site.0 = site.0.saturating_add(*visits);
            site.1 = site.1.saturating_sub(own.saturating_sub(*alive));
        }
        let least = told.iter().map(|(.., alive)| *alive).min().unwrap_or(*own);
        at_best = at_best.saturating_sub(own.saturating_sub(least));
    }
    let count = u32::try_from(sites.len()).unwrap_or(u32::MAX);
    let mut best: Vec<DeclaredSite> = sites
        .into_iter()
        .map(|(name, (visits, alive))| DeclaredSite {
            name: name.into(),
            visits,
            alive,
        })
        .collect();
    best.sort_by_key(|site| site.alive);
    best.truncate(MOST);
    (count > 0).then_some(Declared {
        bytes,
        at_best,
        sites: count,
        best,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(name: &str, visits: u64, alive: u64) -> (Vec<u8>, u64, u64) {
        (name.into(), visits, alive)
    }

    #[test]
    fn each_program_counts_as_a_whole_where_it_does_not_come() {
        let first = (100, vec![site("a", 5, 20), site("b", 5, 60)]);
        let second = (50, vec![site("b", 7, 10), site("c", 1, 50)]);
        let found = summary(&[first, second]).unwrap();
        assert_eq!((found.bytes, found.at_best, found.sites), (150, 30, 3));
        let told: Vec<(String, u64, u64)> = found.best.iter().map(|s| (s.name.to_string(), s.visits, s.alive)).collect();
        let told: Vec<(&str, u64, u64)> = told
            .iter()
            .map(|(name, visits, alive)| (name.as_str(), *visits, *alive))
            .collect();
        assert_eq!(told, [("a", 5, 70), ("b", 12, 70), ("c", 1, 150)]);
    }

    #[test]
    fn the_best_are_told_and_how_many_there_are() {
        let many = (0..1024u64).map(|n| site(&format!("s{n}"), 1, 5000 - n)).collect();
        let found = summary(&[(5000, many)]).unwrap();
        assert_eq!((found.sites, found.best.len(), found.at_best), (1024, MOST, 5000 - 1023));
        assert_eq!(found.best[0].name, "s1023");
        assert_eq!(summary(&[(5000, Vec::new())]), None);
        assert_eq!(summary(&[]), None);
    }
}
