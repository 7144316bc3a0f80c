//! What the status document says of a generation.

use super::Generation;
use belay_image::manifest::{self, Declared, Manifest};
use belay_wire::{DeclaredSite, DeclaredStatus, GenerationStatus, HostShare, Level, SnapshotStatus};

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
