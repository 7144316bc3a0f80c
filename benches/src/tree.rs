//! The tree of agents with simulated agents, which speak the real protocol over loopback from a process of their own:
//! all join, then take part in whole empty checkpoint cycles. For each figure a fresh process is the root, so its
//! memory and its messages are the root's.

use crate::measure::Samples;
use crate::Plan;
use belay_tree::{shape, Contribution, Event, JobKey, Joining, Tree};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

const FAN_OUT: u64 = 16;
/// Fan-out that makes a star.
const FLAT: u64 = u64::MAX;
/// Up to so many ranks each has a node of its own; more share as many nodes as `RANKS_PER_NODE` says.
const ALONE: u64 = 512;
const RANKS_PER_NODE: u64 = 64;
const MOST_RANKS: u64 = 32_768;
/// Collective steps of a checkpoint: after suspend, capture, drain, snapshot, resume, write, and the commit.
const STEPS: u64 = 7;
/// Cycles after each registration.
const CYCLES: u64 = 5;
const LIMIT: Duration = Duration::from_secs(60);

/// What roots of one size and shape have taken.
#[derive(Default)]
struct Figures {
    registered: Samples,
    step: Samples,
    received: Samples,
    memory: Samples,
}

impl Figures {
    /// One more root, in a process of its own.
    fn add(&mut self, plan: &Plan, [nodes, each, fan_out]: [u64; 3]) -> Result<(), String> {
        let mut root = Command::new(&plan.me);
        root.args(["worker", "root"]).arg(&plan.dir);
        root.args([nodes, each, fan_out].map(|n| n.to_string()));
        let said = crate::measure::run(&mut root)?;
        let values: Vec<f64> = said.split_whitespace().filter_map(|w| f64::from_str(w).ok()).collect();
        let [registered, received, memory, steps @ ..] = values.as_slice() else {
            return Err(format!("{nodes} nodes: {said}"));
        };
        self.registered.push(*registered);
        self.received.push(*received);
        self.memory.push(*memory);
        steps.iter().for_each(|step| self.step.push(*step));
        Ok(())
    }
}

/// Registration, time of a step, messages at the root and its memory, for a tree and a star in turn: a table for
/// docs/benchmarks.md.
pub(crate) fn tree(plan: &Plan) -> Result<(), String> {
    println!(
        "Up to {ALONE} ranks each is alone on its node, more are {RANKS_PER_NODE} on each; the root has none. {} roots of each size and shape, {CYCLES} cycles of {STEPS} steps with each. Medians, in brackets the least; memory: the most that the root's process had.",
        plan.runs
    );
    println!("| ranks | nodes | depth of the tree | a step, tree | star | registered, tree | star | messages to the root a step, tree | star | memory of the root, tree | star |");
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let sizes = std::iter::successors(Some(1), |ranks| Some(ranks * 2));
    for ranks in sizes.take_while(|ranks| *ranks <= MOST_RANKS) {
        let each = if ranks <= ALONE { 1 } else { RANKS_PER_NODE };
        let nodes = ranks / each;
        let (mut tree, mut star) = (Figures::default(), Figures::default());
        for _ in 0..plan.runs {
            tree.add(plan, [nodes, each, FAN_OUT])?;
            star.add(plan, [nodes, each, FLAT])?;
        }
        // The root is node 0; the last to join is as deep as any.
        let depth = shape::depth(nodes, FAN_OUT);
        let both = |figure: fn(&Figures) -> &Samples, digits: usize, unit: &str| {
            let cell = |f: &Figures| {
                let samples = figure(f);
                format!("{:.digits$} {unit} ({:.digits$})", samples.median(), samples.least())
            };
            format!("{} | {}", cell(&tree), cell(&star))
        };
        println!(
            "| {ranks} | {nodes} | {depth} | {} | {} | {:.0} | {:.0} | {:.1} MiB | {:.1} MiB |",
            both(|f| &f.step, 3, "ms"),
            both(|f| &f.registered, 1, "ms"),
            tree.received.median(),
            star.received.median(),
            tree.memory.most(),
            star.memory.most()
        );
    }
    Ok(())
}

/// `belay-bench worker root DIR NODES RANKS-OF-EACH FAN-OUT`: the root of so many simulated agents. Prints the
/// milliseconds of the registration, messages received a step, its greatest memory in MiB, and the milliseconds of a
/// step in each cycle.
pub(crate) fn root(args: &[String]) -> Result<(), String> {
    let [dir, numbers @ ..] = args else {
        return Err("no directory".into());
    };
    let numbers: Vec<u64> = numbers.iter().filter_map(|n| n.parse().ok()).collect();
    let [nodes, each, fan_out] = numbers[..] else {
        return Err("no numbers".into());
    };
    let text = |e: &dyn std::fmt::Display| e.to_string();
    let key = JobKey::random().map_err(|e| text(&e))?;
    let file = Path::new(dir).join(format!("key-{}", std::process::id()));
    key.write(&file).map_err(|e| text(&e))?;
    let begin = Instant::now();
    let root = Joining::root(key, fan_out, "root".into()).map_err(|e| text(&e))?;
    let address = root.addresses().last().cloned().unwrap_or_default();
    let root = root.start().map_err(|e| text(&e))?;
    let mut agents = start_agents(&address, &file, [nodes, each])?;
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
    if registered != nodes * each {
        return Err(format!("{registered} ranks registered, not {nodes} times {each}"));
    }
    let before = root.traffic().received();
    let mut steps = Vec::new();
    for cycle in 0..CYCLES {
        let start = Instant::now();
        root.order(format!("{cycle}"));
        for step in 1..=STEPS {
            let done = root.exchange(cycle * STEPS + step, Contribution::ready());
            done.map_err(|b| format!("{:?}", b.0))?;
        }
        steps.push(format!("{:.6}", start.elapsed().as_secs_f64() * 1e3 / STEPS as f64));
    }
    let received = (root.traffic().received() - before) as f64 / (CYCLES * STEPS) as f64;
    let memory = most_memory()?;
    root.order("end".into());
    drop(agents.stdin.take());
    let ended = agents.wait().map_err(|e| text(&e))?;
    if !ended.success() {
        return Err(format!("the simulated agents: {ended}"));
    }
    println!("{:.6} {received} {memory} {}", join.as_secs_f64() * 1e3, steps.join(" "));
    Ok(())
}

fn await_event(tree: &Tree) {
    use std::os::fd::AsRawFd;
    // Whatever comes, it looks.
    let _ = belay_kernel::numbers::poll(tree.as_raw_fd(), libc::POLLIN, 1000);
}

/// MiB that this process has had at most.
fn most_memory() -> Result<f64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|e| format!("/proc/self/status: {e}"))?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap_or_default();
    let kib = line.split_whitespace().nth(1).and_then(|n| n.parse::<f64>().ok());
    kib.map(|kib| kib / 1024.0).ok_or("/proc/self/status names no VmHWM".into())
}

fn start_agents(address: &str, key: &Path, numbers: [u64; 2]) -> Result<Child, String> {
    let me = std::env::current_exe().map_err(|e| format!("find myself: {e}"))?;
    let mut agents = Command::new(me)
        .args(["worker", "agents", address])
        .arg(key)
        .args(numbers.map(|n| n.to_string()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| format!("start the simulated agents: {e}"))?;
    let mut line = String::new();
    let out = agents.stdout.take().ok_or("no output")?;
    BufReader::new(out).read_line(&mut line).map_err(|e| e.to_string())?;
    Ok(agents)
}

/// `belay-bench worker agents ADDRESS KEY COUNT RANKS`: that many agents, of so many ranks each.
pub(crate) fn agents(args: &[String]) {
    let [address, key, count, ranks] = args else { return };
    let key = JobKey::read(Path::new(key)).expect("the key");
    let count: u64 = count.parse().expect("a number");
    let ranks: u64 = ranks.parse().expect("a number");
    println!("ready");
    let threads: Vec<_> = (1..=count)
        .map(|n| {
            let (key, address) = (key.clone(), address.clone());
            let run = move || {
                let joining = Joining::connect(key, &[address], format!("node{n}"), n, ranks).expect("join");
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
