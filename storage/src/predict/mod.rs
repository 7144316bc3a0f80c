//! How long the next checkpoint will take, from what is known of a node. Pure: no I/O, no clock.
//!
//! ```text
//! stop     = processes · (cost of each) + pages · (fork of a page)
//! local    = pages · (looking at a page) / writers + bytes / (what local tiers take, one after the other)
//! durable  = max(bytes / link, bytes / flush, files · (cost to make one))
//! restart  = processes · (cost of each) + bytes / (reading)
//! ```
//! While the fastest local tier fills, moves to the home of all chunks empty it; when it is full, writers use the next
//! one and what moves free in those before. A fluid limit of what the desk does with chunks ([`crate::place::desk`]).
//! What such a model leaves out is learnt: each time is corrected by [`factor`]. [`differential`] says what it is worth
//! to look for changes.

pub mod differential;
mod factor;

pub use factor::{factor, median, LEARNS_FROM};

use crate::place::model::Model;
use crate::place::rule::Policy;

/// Bytes of a page.
const PAGE: f64 = 4096.0;
/// Longest time that is told: thirty years.
pub const MOST_S: f64 = 1e9;
/// A pack on a durable tier is completed at this length.
const PACK: f64 = (1u64 << 30) as f64;

/// A local tier.
#[derive(Debug, Clone)]
pub struct Tier {
    /// Most bytes in it.
    pub capacity: u64,
    /// It lies in memory.
    pub memory: bool,
    /// What its writers get.
    pub model: Model,
}

/// Where copies go that outlive the node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Durable {
    /// How many tiers get one each.
    pub copies: u32,
    /// Bytes per second that all threads of a flush move together.
    pub rate: f64,
    /// Bytes per second of the node's link, where that is known.
    pub link: Option<f64>,
}

/// What a page or a process costs, seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// To stop, capture and resume a process.
    pub process_s: f64,
    /// A page of a process that is forked.
    pub fork_page_s: f64,
    /// A writer looks at a page: reads it, hashes it, looks for it.
    pub scan_page_s: f64,
    /// A file is made on a durable tier.
    pub create_s: f64,
    /// Bytes per second that a restart reads.
    pub read: f64,
}

impl Default for Costs {
    /// Before anything has been measured. Orders of magnitude of a node of today; the factors correct them.
    fn default() -> Self {
        Self {
            process_s: 2e-3,
            fork_page_s: 85e-9,
            scan_page_s: 1e-6,
            create_s: 5e-3,
            read: 1e9,
        }
    }
}

/// A node.
#[derive(Debug, Clone)]
pub struct Node {
    /// How local tiers are chosen.
    pub policy: Policy,
    /// They, as the configuration has them.
    pub tiers: Vec<Tier>,
    /// What is written where all chunks end.
    pub home: Model,
    /// Bytes per second that moves out of local tiers reach together.
    pub moves: f64,
    /// Threads that write at a time.
    pub writers: u32,
    /// Where copies go that outlive it.
    pub durable: Option<Durable>,
    /// What pages and processes cost.
    pub costs: Costs,
}

/// What is to be checkpointed on the node.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Live processes.
    pub processes: u32,
    /// Their memory.
    pub bytes: u64,
    /// What of it has changed, and is written.
    pub new_bytes: u64,
    /// What durable tiers lack of it.
    pub flush_bytes: u64,
}

/// What most of a time is spent with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// The number of processes.
    Processes,
    /// The fork.
    Fork,
    /// To look at all pages.
    Scan,
    /// Local tier number so and so.
    Tier(usize),
    /// Moves out of full local tiers.
    Moves,
    /// The place where all chunks end.
    Home,
    /// The node's link.
    Link,
    /// Durable tiers.
    Flush,
    /// The number of files there.
    Files,
    /// What a restart reads.
    Read,
}

/// A time and its limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Time {
    /// Seconds, from 0 to [`MOST_S`].
    pub seconds: f64,
    /// What most of it is spent with.
    pub limit: Limit,
}

/// The times of one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// The program stands still.
    pub stop: Time,
    /// Until it is committed.
    pub local: Time,
    /// To copy it to durable tiers, where there are any.
    pub durable: Option<Time>,
    /// To restart from it.
    pub restart: Time,
}

/// `seconds` as may be told.
fn told(seconds: f64) -> f64 {
    if seconds.is_nan() {
        return 0.0;
    }
    seconds.clamp(0.0, MOST_S)
}

/// A rate by which may be divided.
fn rate(bytes_per_s: f64) -> f64 {
    if bytes_per_s >= 1.0 {
        bytes_per_s
    } else {
        1.0
    }
}

/// Parts of a time that follow each other.
fn sum(parts: &[(f64, Limit)]) -> Time {
    let seconds = parts.iter().map(|(s, _)| told(*s)).sum();
    Time {
        seconds: told(seconds),
        limit: greatest(parts).limit,
    }
}

/// What takes longest of what is done at a time. Of equals the first.
fn greatest(parts: &[(f64, Limit)]) -> Time {
    let longest = parts.iter().rev().max_by(|a, b| told(a.0).total_cmp(&told(b.0)));
    let (seconds, limit) = longest.copied().unwrap_or((0.0, Limit::Processes));
    Time {
        seconds: told(seconds),
        limit,
    }
}

/// What it takes to checkpoint `work` on `node`.
pub fn times(node: &Node, work: &Work) -> Times {
    let costs = &node.costs;
    let pages = work.bytes as f64 / PAGE;
    let processes = (costs.process_s * f64::from(work.processes), Limit::Processes);
    let mut local = vec![(costs.scan_page_s * pages / f64::from(node.writers.max(1)), Limit::Scan)];
    fill(node, work.new_bytes as f64, &mut local);
    let flush = |d: &Durable| {
        let bytes = work.flush_bytes as f64 * f64::from(d.copies);
        // The record comes last.
        let files = ((work.flush_bytes as f64 / PACK).ceil() + 1.0) * f64::from(d.copies);
        let mut parts = vec![(bytes / rate(d.rate), Limit::Flush), (files * costs.create_s, Limit::Files)];
        parts.extend(d.link.map(|link| (bytes / rate(link), Limit::Link)));
        greatest(&parts)
    };
    Times {
        stop: sum(&[processes, (costs.fork_page_s * pages, Limit::Fork)]),
        local: sum(&local),
        durable: node.durable.as_ref().map(flush),
        restart: sum(&[processes, (work.bytes as f64 / rate(costs.read), Limit::Read)]),
    }
}

/// The local tiers that the policy uses, in the order in which they fill.
fn order(node: &Node) -> Vec<usize> {
    let mut order: Vec<usize> = (0..node.tiers.len()).collect();
    let alone = |i: &usize| node.tiers[*i].model.per_writer(1);
    order.sort_by(|a, b| alone(b).total_cmp(&alone(a)));
    match node.policy {
        Policy::Adaptive | Policy::Naive => {}
        Policy::FastestOnly => order.truncate(1),
        Policy::LocalOnly => order.retain(|i| !node.tiers[*i].memory),
    }
    order
}

/// What `tier` takes of all writers.
fn taken(node: &Node, tier: &Tier) -> f64 {
    let most = match node.policy {
        Policy::Adaptive => tier.model.useful(),
        _ => u32::MAX,
    };
    rate(tier.model.total(node.writers.min(most)))
}

/// Adds to `parts` how long it takes until `bytes` are written.
fn fill(node: &Node, bytes: f64, parts: &mut Vec<(f64, Limit)>) {
    let mut left = bytes;
    let moves = rate(node.moves);
    let mut are_full = false;
    for i in order(node) {
        let tier = &node.tiers[i];
        let rate = taken(node, tier);
        // Moves empty the first; into what they free there others are written.
        let (speed, grows) = if are_full {
            (rate + moves, rate)
        } else {
            (rate, rate - moves)
        };
        let until_full = if tier.capacity == u64::MAX || grows <= 0.0 {
            f64::INFINITY
        } else {
            tier.capacity as f64 / grows
        };
        let time = (left / speed).min(until_full);
        parts.push((time, Limit::Tier(i)));
        left -= time * speed;
        if time < until_full {
            return;
        }
        are_full = true;
    }
    parts.push(match are_full {
        true => (left.max(0.0) / moves, Limit::Moves),
        false => (left / rate(node.home.total(node.writers)), Limit::Home),
    });
}

/// The fill-time law: a dump of `bytes` of memory takes at best as long as all disks together need for them, and a copy
/// that outlives the node as long as the slower of link and durable tiers. Local tiers in memory are no disks.
pub fn fill_time(node: &Node, bytes: u64) -> (Time, Option<Time>) {
    let disks = node.tiers.iter().enumerate().filter(|(_, t)| !t.memory);
    let rates: Vec<(usize, f64)> = disks.map(|(i, t)| (i, rate(t.model.total(node.writers)))).collect();
    let bytes = bytes as f64;
    let fastest = rates.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1));
    let local = match fastest {
        Some((i, _)) => (bytes / rates.iter().map(|r| r.1).sum::<f64>(), Limit::Tier(*i)),
        None => (bytes / rate(node.home.total(node.writers)), Limit::Home),
    };
    let durable = |d: &Durable| {
        let bytes = bytes * f64::from(d.copies);
        let mut parts = vec![(bytes / rate(d.rate), Limit::Flush)];
        parts.extend(d.link.map(|link| (bytes / rate(link), Limit::Link)));
        greatest(&parts)
    };
    (sum(&[local]), node.durable.as_ref().map(durable))
}

#[cfg(test)]
mod tests;
