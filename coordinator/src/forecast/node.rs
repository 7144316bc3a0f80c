//! What a configuration and the system say about this node.

use crate::config::Config;
use crate::sys;
use belay_kernel::apart;
use belay_kernel::room::meminfo;
use belay_storage::place::calibrate;
use belay_storage::place::model::Model;
use belay_storage::predict::{median, Costs, Durable, Node, Tier};
use std::time::Instant;

/// Which of the rates of a node are assumed, because nobody has measured them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Assumed {
    /// For each local tier.
    pub tiers: Vec<bool>,
}

/// This node, as `config` has it; what was measured before it has run any checkpoint is a calibration.
pub fn node(config: &Config) -> (Node, Assumed) {
    let mut assumed = Assumed::default();
    let mut tier = |t: &crate::config::Tier| {
        let memory = t.kind == crate::config::Kind::Memory;
        let measured = t.path.as_deref().and_then(|path| calibrate::load(path, sys::euid()));
        assumed.tiers.push(measured.is_none());
        Tier {
            capacity: t.capacity.map_or(u64::MAX, |c| c.0),
            memory,
            model: measured.unwrap_or_else(|| Model::unmeasured(memory)),
        }
    };
    let tiers = config.local().map(&mut tier).collect();
    let home = Model::unmeasured(false);
    let limited = |rate: f64| config.flush.rate.map_or(rate, |limit| rate.min(limit.0 as f64));
    let copies = u32::try_from(config.durable().count()).unwrap_or(u32::MAX);
    let durable = Durable {
        copies,
        rate: limited(home.total(1)),
        link: fastest_link().map(|(_, rate)| rate),
    };
    let node = Node {
        policy: config.placement.policy,
        tiers,
        moves: limited(home.total(1)),
        home,
        writers: sys::writers(),
        durable: (copies > 0).then_some(durable),
        costs: Costs::default(),
    };
    (node, assumed)
}

/// Seconds that a page costs in a fork, measured with memory of this process; none where there is too little.
pub fn fork_page_s() -> Option<f64> {
    const MOST: u64 = 128 << 20;
    const TIMES: usize = 5;
    let bytes = (meminfo("MemAvailable")? / 8).min(MOST);
    let pages = bytes / 4096;
    let mut memory = Vec::new();
    memory.try_reserve_exact(usize::try_from(bytes).ok()?).ok()?;
    // Not zeros, which need not be there.
    memory.resize(usize::try_from(bytes).ok()?, 1u8);
    let once = || {
        let begin = Instant::now();
        let child = apart::child(|| 0);
        let time = begin.elapsed().as_secs_f64();
        child.and_then(|c| c.wait(0)).ok().map(|_| time)
    };
    let times = (0..TIMES).filter_map(|_| once()).collect();
    std::hint::black_box(&memory);
    median(times).filter(|_| pages > 0).map(|time| time / pages as f64)
}

/// The fastest network interface that is up and says how fast it is, and its bytes per second. Virtual ones do not say.
pub fn fastest_link() -> Option<(String, f64)> {
    let interfaces = std::fs::read_dir("/sys/class/net").ok()?.flatten();
    let speed = |e: std::fs::DirEntry| {
        let read = |name: &str| std::fs::read_to_string(e.path().join(name)).ok();
        let is_up = read("operstate")?.trim() == "up";
        let megabits: f64 = read("speed")?.trim().parse().ok()?;
        let name = e.file_name().to_string_lossy().into_owned();
        (is_up && megabits > 0.0).then_some((name, megabits * 1e6 / 8.0))
    };
    interfaces.filter_map(speed).max_by(|a, b| a.1.total_cmp(&b.1))
}
