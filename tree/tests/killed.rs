//! A node of 64 is killed in the middle of a step, the root or another on any level: all others are told within two
//! seconds, in each of the steps of a checkpoint.
//!
//! Which ones are killed is drawn anew in each run; `BELAY_SEED` repeats one.

use belay_still::Watch;
use belay_tree::{Contribution, Event, JobKey, Joining, Tree};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant, UNIX_EPOCH};

const NODES: u64 = 64;
const FAN_OUT: u64 = 4;
/// The nodes below the root, by their distance from it.
const LEVELS: [RangeInclusive<u64>; 3] = [1..=4, 5..=20, 21..=NODES - 1];
/// Of a checkpoint.
const STEPS: u64 = 7;
const TOLD: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(20);
/// Set in the process that is to be killed: the file of the key, the address of the root or `ROOT`, and the step.
const VICTIM: &str = "BELAY_TEST_VICTIM";
/// In place of an address: it is the root itself, and says its address.
const ROOT: &str = "root";
const AT: &str = "the root is at ";

/// Steps until one has all nodes: at first some are still being connected. Returns the number of the next; it is the
/// same for all nodes, as the outcome of a step is.
fn gather(node: &Tree) -> u64 {
    let mut steps = 1..;
    steps
        .find(|step| node.exchange(*step, Contribution::ready()).is_ok())
        .unwrap()
        + 1
}

/// In the process that is killed: takes part in all steps but for `silent`, in which it is killed.
#[test]
fn victim() {
    let Ok(words) = std::env::var(VICTIM) else { return };
    let [key, address, silent] = words.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{words}")
    };
    let key = JobKey::read(Path::new(key)).unwrap();
    let node = if address == ROOT {
        let joining = Joining::root(key, FAN_OUT, ROOT.into()).unwrap();
        println!("\n{AT}{}", joining.addresses().last().unwrap());
        let root = joining.start().unwrap();
        await_joined(&root, &mut (1..NODES).collect());
        root
    } else {
        let joining = Joining::connect(key, &[address.to_owned()], "victim".into(), 0, 1).unwrap();
        joining.start().unwrap()
    };
    let first = gather(&node);
    for step in first..first + silent.parse::<u64>().unwrap() - 1 {
        node.exchange(step, Contribution::ready()).unwrap();
    }
    loop {
        std::thread::park();
    }
}

/// Waits until the root has heard of the nodes with these tags.
fn await_joined(root: &Tree, tags: &mut BTreeSet<u64>) {
    let begin = Instant::now();
    while !tags.is_empty() {
        match root.event() {
            Some(Event::Joined(info)) => drop(tags.remove(&info.tag)),
            Some(_) => {}
            None => std::thread::sleep(Duration::from_millis(1)),
        }
        assert!(begin.elapsed() < LIMIT, "nodes with tags {tags:?} have not joined");
    }
}

/// A member of the tree in a process of its own.
fn start_victim(key: &Path, address: &str, silent: u64) -> Child {
    let exe = std::env::current_exe().unwrap();
    let mut c = Command::new(exe);
    c.args(["--exact", "victim", "--nocapture"])
        .env(VICTIM, format!("{} {address} {silent}", key.display()))
        .stdout(Stdio::piped());
    c.spawn().unwrap()
}

/// Where a root says that it is.
fn address_of(root: &mut Child) -> String {
    let said = BufReader::new(root.stdout.take().unwrap()).lines();
    let found = said.map_while(Result::ok).find_map(|l| Some(l.strip_prefix(AT)?.to_owned()));
    found.expect("the root says no address")
}

/// Kills the node that has joined as number `place`, or the root, 0, in step `last`; how long it took until the last of
/// the others was told.
fn told_after(place: u64, last: u64) -> Duration {
    let key = JobKey::random().unwrap();
    let file = std::env::temp_dir().join(format!("belay-tree-{}-{place}-{last}", std::process::id()));
    key.write(&file).unwrap();
    let mut nodes = Vec::new();
    let mut victim = (place == 0).then(|| start_victim(&file, ROOT, last));
    let (root, address) = match &mut victim {
        Some(root) => (None, address_of(root)),
        None => {
            let root = Joining::root(key.clone(), FAN_OUT, ROOT.into()).unwrap();
            let address = root.addresses().last().unwrap().clone();
            (Some(root.start().unwrap()), address)
        }
    };
    for n in 1..NODES {
        let tag = if n == place {
            victim = Some(start_victim(&file, &address, last));
            0
        } else {
            let joining = Joining::connect(key.clone(), std::slice::from_ref(&address), format!("host{n}"), n, 1).unwrap();
            nodes.push(joining.start().unwrap());
            n
        };
        if let Some(root) = &root {
            await_joined(root, &mut BTreeSet::from([tag]));
        }
    }
    nodes.extend(root);
    let (tell, told) = channel();
    for node in nodes {
        let tell = tell.clone();
        std::thread::spawn(move || {
            let first = gather(&node);
            for step in first..first + last - 1 {
                node.exchange(step, Contribution::ready()).unwrap();
            }
            tell.send(None).unwrap();
            let broken = node.exchange(first + last - 1, Contribution::ready()).is_err();
            tell.send(Some(broken)).unwrap();
            // The others may still need it.
            std::thread::sleep(TOLD);
        });
    }
    let next = || told.recv_timeout(LIMIT).expect("nobody is told");
    let mut early = 0;
    for _ in 1..NODES {
        early += u64::from(next().is_some());
    }
    assert_eq!(early, 0, "the step was over before anybody was killed");
    let mut victim = victim.unwrap();
    victim.kill().unwrap();
    let killed = Watch::begin();
    for _ in 1..NODES {
        assert_eq!(next(), Some(true));
    }
    let took = killed.elapsed();
    victim.wait().unwrap();
    std::fs::remove_file(file).unwrap();
    took
}

/// A sequence of numbers (splitmix64).
struct Rng(u64);

impl Rng {
    fn of(&mut self, range: RangeInclusive<u64>) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        range.start() + (z ^ (z >> 31)) % (range.end() - range.start() + 1)
    }
}

#[test]
fn all_others_are_told_of_one_that_was_killed() {
    let seed = std::env::var("BELAY_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(|| UNIX_EPOCH.elapsed().unwrap().as_secs());
    println!("seed {seed}");
    let mut rng = Rng(seed);
    // The first and the last of each level, in some step; in each step the root and any other.
    let ends = LEVELS.iter().flat_map(|level| [*level.start(), *level.end()]);
    let mut rounds: Vec<(u64, u64)> = ends.map(|place| (place, rng.of(1..=STEPS))).collect();
    for step in 1..=STEPS {
        rounds.push((0, step));
        rounds.push((rng.of(1..=NODES - 1), step));
    }
    let mut longest = Duration::ZERO;
    for (place, step) in rounds {
        let took = told_after(place, step);
        let told = format!("node {place} killed in step {step}: all told after {} ms", took.as_millis());
        println!("{told}");
        assert!(took < TOLD, "{told} (seed {seed})");
        longest = longest.max(took);
    }
    println!("longest: {} ms", longest.as_millis());
}
