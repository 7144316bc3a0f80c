//! What checkpoints of a job could leave out, by the sites of its programs.

use super::sites::Program;
use belay_image::manifest::{Declared, DeclaredSite};
use std::collections::BTreeMap;

/// So many sites are told.
const MOST: usize = 10;

/// Of one program: bytes of its datasets, and its sites.
type Told = (u64, Vec<DeclaredSite>);

/// What `programs` have declared; none where no loop of theirs is known.
pub(crate) fn of(programs: &[Program]) -> Option<Declared> {
    let all: Vec<Told> = programs.iter().map(told).collect();
    summary(&all)
}

fn told(program: &Program) -> Told {
    let site = |site: &belay_access::site::Site| {
        let name = program.name(site.site)?;
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        Some(DeclaredSite {
            name: name.into(),
            visits: site.visits,
            alive: site.alive,
            chosen: u32::from(program.chosen.is_some_and(|one| one.site == site.site)),
        })
    };
    (program.bytes, program.sites.iter().filter_map(site).collect())
}

/// What is alive at a site is so in all programs that have it; of the others it is everything.
fn summary(all: &[Told]) -> Option<Declared> {
    let bytes = all.iter().fold(0u64, |sum, (bytes, _)| sum.saturating_add(*bytes));
    let mut sites: BTreeMap<&[u8], DeclaredSite> = BTreeMap::new();
    let mut at_best = bytes;
    for (own, told) in all {
        for one in told {
            let none = || DeclaredSite {
                name: one.name.clone(),
                visits: 0,
                alive: bytes,
                chosen: 0,
            };
            let site = sites.entry(one.name.as_bytes()).or_insert_with(none);
            site.visits = site.visits.saturating_add(one.visits);
            site.alive = site.alive.saturating_sub(own.saturating_sub(one.alive));
            site.chosen = site.chosen.saturating_add(one.chosen);
        }
        let least = told.iter().map(|one| one.alive).min().unwrap_or(*own);
        at_best = at_best.saturating_sub(own.saturating_sub(least));
    }
    let count = u32::try_from(sites.len()).unwrap_or(u32::MAX);
    let mut best: Vec<DeclaredSite> = sites.into_values().collect();
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

    fn site(name: &str, visits: u64, alive: u64) -> DeclaredSite {
        DeclaredSite {
            name: name.into(),
            visits,
            alive,
            chosen: u32::from(name == "b"),
        }
    }

    #[test]
    fn each_program_counts_as_a_whole_where_it_does_not_come() {
        let first = (100, vec![site("a", 5, 20), site("b", 5, 60)]);
        let second = (50, vec![site("b", 7, 10), site("c", 1, 50)]);
        let found = summary(&[first, second]).unwrap();
        assert_eq!((found.bytes, found.at_best, found.sites), (150, 30, 3));
        let two = DeclaredSite {
            chosen: 2,
            ..site("b", 12, 70)
        };
        assert_eq!(found.best, [site("a", 5, 70), two, site("c", 1, 150)]);
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
