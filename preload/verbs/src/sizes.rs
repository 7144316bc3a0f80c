//! How much the processes of a job will tell each other in a restart: what is more than can be heard is refused while
//! the job runs.

use crate::names::Port;
use crate::rounds::{Heard, Told};
use crate::shadow::{ShadowContext, ShadowMr, ShadowQp, World};
use belay_abi::control::{ENTRY, MAX_TOLD};
use belay_ibv::*;
use std::collections::BTreeMap;

/// Bytes of a name as it is told, and of a key.
const NAME: usize = ENTRY + 21 + 28;
const KEY: usize = ENTRY + 21 + 4;
/// The sum of what all tell of their regions, bytes.
const KEYS: &[u8] = b"keys";
/// The sum of the names that everybody hears, bytes,
const NAMES: &[u8] = b"names";
/// and of those queue pairs whose processes hear all keys.
const OPEN: &[u8] = b"open";

/// The sum of the names that only those on this port hear, bytes.
fn on_port(port: &Port) -> Vec<u8> {
    [&b"names "[..], &port.name(0).0].concat()
}

/// Whether it may have been told any key, and has no peer that says whose.
///
/// # Safety
/// A queue pair that lives.
pub(crate) unsafe fn is_open(q: &ShadowQp, state: u32) -> bool {
    q.kind() != QPT_UD && state == QPS_INIT
}

/// Tells how much there will be to hear in a restart.
///
/// # Safety
/// All objects on the lists live.
pub(crate) unsafe fn tell_sizes(world: &World, told: &mut Told) {
    let ports = |context: *mut Context| ShadowContext::of(context).ports();
    let all = world.contexts.iter().flat_map(|c| (**c).ports());
    let mut own: BTreeMap<Vec<u8>, u64> = all.map(|p| (on_port(p), 0)).collect();
    let (mut names, mut open) = (0, 0);
    for q in world.qps.iter().map(|q| &**q) {
        let b = &q.base.base;
        open += u64::from(is_open(q, b.state));
        for port in ports(b.context) {
            let bytes = (port.gids.len().max(1) * NAME) as u64;
            match q.kind() == QPT_UD || !(QPS_RTR..=QPS_SQE).contains(&b.state) {
                true => names += bytes,
                false => *own.entry(on_port(port)).or_default() += bytes,
            }
        }
    }
    told.sum(NAMES, names);
    told.sum(OPEN, open);
    tell_keys(world, told);
    own.iter().for_each(|(key, bytes)| told.sum(key, *bytes));
}

/// Tells how much this process tells of its regions.
///
/// # Safety
/// As for [`tell_sizes`].
pub(crate) unsafe fn tell_keys(world: &World, told: &mut Told) {
    told.sum(KEYS, key_bytes(world));
}

/// Whether everybody can hear the keys of all.
pub(crate) fn are_few_keys(heard: Heard) -> bool {
    heard.sum(KEYS).is_none_or(|bytes| bytes <= MAX_TOLD)
}

/// What this process tells of its regions, bytes.
unsafe fn key_bytes(world: &World) -> u64 {
    let ports = |m: &*mut ShadowMr| ShadowContext::of((**m).base.context).ports().len();
    world.mrs.iter().map(|m| (ports(m) * KEY) as u64).sum()
}

/// What a restart would tell somebody more of than can be heard, as far as the sizes have been told.
///
/// # Safety
/// As for [`tell_sizes`].
pub(crate) unsafe fn too_much(world: &World, heard: Heard) -> Option<String> {
    let sum = |key: &[u8]| heard.sum(key).unwrap_or(0);
    let ports = world.contexts.iter().flat_map(|c| (**c).ports());
    let names = sum(NAMES) + ports.map(|p| sum(&on_port(p))).sum::<u64>();
    // What one tells has the same bound: its keys, and whose it wishes.
    let own = key_bytes(world) + (world.qps.len() * KEY) as u64;
    let keys = if sum(OPEN) > 0 { sum(KEYS).max(own) } else { own };
    let (what, bytes) = match names > MAX_TOLD {
        true => ("queue pairs", names),
        false => ("memory regions", keys),
    };
    (bytes > MAX_TOLD).then(|| {
        format!(
            "the job has more {what} than a restart can tell its processes of ({} MiB, of {} at most): use fewer",
            bytes >> 20,
            MAX_TOLD >> 20
        )
    })
}
