//! The tree of agents with simulated agents, which speak the real protocol over loopback from a process of their own: all join, then take part in
//! whole empty checkpoint cycles. The measuring process is the root, so its memory and its messages are the root's.

use crate::measure::Samples;
use crate::Plan;
use belay_tree::{shape, Contribution, Event, JobKey, Joining, Tree};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Processes of one simulated node.
const RANKS_PER_NODE: u64 = 64;
const FAN_OUT: u64 = 16;
const RANKS: [u64; 10] = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768];
/// Collective steps of a checkpoint: after suspend, capture, drain, snapshot, resume, write, and the commit.
const STEPS: u64 = 7;
const LIMIT: Duration = Duration::from_secs(60);

/// Registration, cycle, messages at the root, memory, for a tree and a star.
pub(crate) fn tree(plan: &Plan) -> Result<(), String> {
    println!("ranks are registered by their node's agent, {RANKS_PER_NODE} each; steps a cycle: {STEPS}");
    for ranks in RANKS {
        for fan_out in [FAN_OUT, u64::MAX] {
            one(plan, ranks, fan_out)?;
        }
    }
    Ok(())
}

fn one(plan: &Plan, ranks: u64, fan_out: u64) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let nodes = ranks.div_ceil(RANKS_PER_NODE);
    let key = JobKey::random().map_err(|e| text(&e))?;
    let file = plan.dir.join(format!("key-{ranks}-{}", fan_out == FAN_OUT));
    key.write(&file).map_err(|e| text(&e))?;
    let begin = Instant::now();
    let root = Joining::root(key, fan_out, "root".into()).map_err(|e| text(&e))?;
    let address = root.addresses().last().cloned().unwrap_or_default();
    let root = root.start().map_err(|e| text(&e))?;
    let mut agents = start_agents(plan, &address, &file, nodes)?;
    let (mut joined, mut registered) = (0, 0);
    while joined < nodes {
        match root.event() {
            Some(Event::Joined(info)) => {
                joined += 1;
                registered += info.processes;
            }
            Some(other) => return Err(format!("{other:?}")),
            None if begin.elapsed() > LIMIT => return Err(format!("{joined} of {nodes} nodes joined")),
            None => await_event(&root),
        }
    }
    let join = begin.elapsed();
    let before = (root.traffic().received(), root.traffic().sent());
    let mut cycles = Samples::default();
    let runs = plan.runs as u64;
    for cycle in 0..runs {
        let start = Instant::now();
        root.order(format!("{cycle}"));
        for step in 1..=STEPS {
            let done = root.exchange(cycle * STEPS + step, Contribution::ready());
            done.map_err(|b| format!("{:?}", b.0))?;
        }
        cycles.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let messages = (root.traffic().received() - before.0, root.traffic().sent() - before.1);
    let shape = if fan_out == u64::MAX { "star" } else { "tree" };
    let depth = (0..=nodes).map(|n| shape::depth(n, fan_out)).max().unwrap_or(0);
    cycles.print(&format!("{ranks} ranks, {shape} of depth {depth}: cycle"), "ms");
    println!(
        "  {registered} ranks of {nodes} nodes registered in {:.0} ms; a step: {:.2} ms; messages at the root a step: {:.1} in, {:.1} out; root: {} MiB",
        join.as_secs_f64() * 1e3,
        cycles.median() / STEPS as f64,
        messages.0 as f64 / (runs * STEPS) as f64,
        messages.1 as f64 / (runs * STEPS) as f64,
        resident_mib()
    );
    root.order("end".into());
    drop(agents.stdin.take());
    let ended = agents.wait().map_err(|e| text(&e))?;
    if ended.success() {
        Ok(())
    } else {
        Err(format!("the simulated agents: {ended}"))
    }
}

fn await_event(tree: &Tree) {
    use std::os::fd::AsRawFd;
    let mut poll = libc::pollfd {
        fd: tree.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&raw mut poll, 1, 1000) };
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default();
    let kib = line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}

fn start_agents(plan: &Plan, address: &str, key: &Path, nodes: u64) -> Result<Child, String> {
    let mut agents = Command::new(&plan.me)
        .args(["worker", "agents", address])
        .arg(key)
        .arg(nodes.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| format!("start the simulated agents: {e}"))?;
    let mut line = String::new();
    let out = agents.stdout.take().ok_or("no output")?;
    BufReader::new(out).read_line(&mut line).map_err(|e| e.to_string())?;
    Ok(agents)
}

/// `belay-bench worker agents ADDRESS KEY COUNT`: that many agents.
pub(crate) fn agents(args: &[String]) {
    let [address, key, count] = args else { return };
    let key = JobKey::read(Path::new(key)).expect("the key");
    let count: u64 = count.parse().expect("a number");
    println!("ready");
    let threads: Vec<_> = (1..=count)
        .map(|n| {
            let (key, address) = (key.clone(), address.clone());
            let run = move || {
                let joining = Joining::connect(key, &[address], format!("node{n}"), n, RANKS_PER_NODE).expect("join");
                agent(&joining.start().expect("start"));
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn(run).expect("thread")
        })
        .collect();
    for t in threads {
        t.join().expect("agent");
    }
}

fn agent(tree: &Tree) {
    loop {
        match tree.event() {
            Some(Event::Order(text)) => {
                let Ok(cycle) = text.parse::<u64>() else { break };
                for step in 1..=STEPS {
                    tree.exchange(cycle * STEPS + step, Contribution::ready()).expect("step");
                }
            }
            Some(_) => return,
            None => await_event(tree),
        }
    }
    // A relay that ended first would make its children look for another parent. The root ends last.
    let _ = std::io::stdin().read_line(&mut String::new());
}
