//! What the status document says of a generation.

use super::Generation;
use belay_image::manifest::{self, Declared, Dirty, Manifest};
use belay_storage::predict::median;
use belay_wire::{DeclaredSite, DeclaredStatus, DirtyShare, GenerationStatus, HostShare, Level, SnapshotStatus};

/// As the status document shows a whole generation with manifest `m`.
pub fn status(m: &Manifest) -> GenerationStatus {
    GenerationStatus {
        generation: m.generation,
        time_unix_s: m.time_unix_s,
        level: Level::Local,
        ranks: m.processes,
        threads: m.threads,
        bytes: m.bytes,
        new_bytes: m.new_bytes,
        blocked_ms: m.blocked_ms,
        phases_ms: m.phases_ms.iter().cloned().collect(),
        snapshot: m.taken.clone().map(|t| {
            Box::new(SnapshotStatus {
                mode: t.mode,
                reason: t.reason,
                stops: t.stops,
            })
        }),
        left_out: m.left_out,
        declared: m.declared.as_ref().map(declared),
        dirty: dirty_of_all(m.dirty.iter().map(dirty)),
        without_hashes: m.without_hashes.as_deref().map(Into::into),
        whole: true,
        damage: None,
        hosts: Vec::new(),
        tiers: Vec::new(),
    }
}

fn declared(d: &Declared) -> Box<DeclaredStatus> {
    let site = |s: &manifest::DeclaredSite| DeclaredSite {
        name: s.name.to_string(),
        visits: s.visits,
        alive: s.alive,
        chosen: s.chosen,
    };
    Box::new(DeclaredStatus {
        bytes: d.bytes,
        at_best: d.at_best,
        sites: d.sites,
        best: d.best.iter().map(site).collect(),
    })
}

fn dirty(d: &Dirty) -> DirtyShare {
    DirtyShare {
        min: d.min,
        median: d.median,
        max: d.max,
    }
}

/// What was new at all hosts together, of those whose numbers can be shares.
fn dirty_of_all(of_hosts: impl Iterator<Item = DirtyShare>) -> Option<Box<DirtyShare>> {
    let are_shares = |d: &DirtyShare| 0.0 <= d.min && d.min <= d.median && d.median <= d.max && d.max <= 1.0;
    let of_hosts: Vec<DirtyShare> = of_hosts.filter(are_shares).collect();
    let all = |f: fn(&DirtyShare) -> f64| of_hosts.iter().map(f);
    Some(Box::new(DirtyShare {
        min: all(|d| d.min).reduce(f64::min)?,
        median: median(all(|d| d.median).collect())?,
        max: all(|d| d.max).reduce(f64::max)?,
    }))
}

/// Adds to `status`, that of the root of generation `g`, what the parts of the job have of it.
pub(crate) fn add_parts(status: &mut GenerationStatus, g: &Generation) {
    let rows = crate::nodes::table::read(&g.path).unwrap_or_default();
    let Some(m) = g.held_anywhere().ok().filter(|_| !rows.is_empty()) else {
        return;
    };
    status.hosts.push(HostShare {
        host: m.host.clone(),
        ranks: Some(m.processes),
    });
    let own = status.dirty.as_deref().copied();
    let of_parts = rows.iter().filter_map(|row| row.share.as_ref()?.dirty);
    status.dirty = dirty_of_all(own.into_iter().chain(of_parts));
    for row in rows {
        status.hosts.push(HostShare {
            host: row.place().to_owned(),
            ranks: row.share.as_ref().map(|s| s.processes),
        });
        let share = row.share.unwrap_or_default();
        status.ranks = status.ranks.saturating_add(share.processes);
        status.threads = status.threads.saturating_add(share.threads);
        status.bytes = status.bytes.saturating_add(share.bytes);
        status.new_bytes = status.new_bytes.saturating_add(share.new_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_no_share_is_not_told() {
        let share = |min, median, max| DirtyShare { min, median, max };
        let all = |of: &[DirtyShare]| dirty_of_all(of.iter().copied()).map(|d| *d);
        assert_eq!(all(&[]), None);
        for bad in [f64::NAN, -0.1, 1.1, 1e308, f64::INFINITY] {
            for d in [share(bad, 0.5, 1.0), share(0.0, bad, 1.0), share(0.0, 0.5, bad)] {
                assert_eq!(all(&[d]), None, "{d:?}");
            }
        }
        assert_eq!(all(&[share(0.5, 0.2, 0.7)]), None);
        let hosts = [
            share(0.1, 0.2, 0.3),
            share(0.0, 0.4, 0.4),
            share(0.3, 0.9, 1.0),
            share(9.0, 9.0, 9.0),
        ];
        assert_eq!(all(&hosts), Some(share(0.0, 0.4, 1.0)));
    }
}
