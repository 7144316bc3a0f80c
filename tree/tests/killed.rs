//! A node of 64 is killed in the middle of a step, a relay or a leaf: all others are told within two seconds, in each of the steps of a checkpoint.

use belay_tree::{Contribution, Event, JobKey, Joining, Tree};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const NODES: u64 = 64;
const FAN_OUT: u64 = 8;
/// Of a checkpoint.
const STEPS: u64 = 7;
const TOLD: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(20);
/// Set in the process that is to be killed: the file of the key, and the address of the root.
const VICTIM: &str = "BELAY_TEST_VICTIM";

/// Steps until one has all nodes: at first some are still being connected. Returns the number of the next; it is the same for all nodes, as the outcome of a step is.
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
    let key = JobKey::read(std::path::Path::new(key)).unwrap();
    let node = Joining::connect(key, &[address.to_owned()], "victim".into(), 1, 1).unwrap();
    let node = node.start().unwrap();
    let first = gather(&node);
    for step in first..first + silent.parse::<u64>().unwrap() - 1 {
        node.exchange(step, Contribution::ready()).unwrap();
    }
    loop {
        std::thread::park();
    }
}

/// Joins the tree in a process of its own.
fn start_victim(words: &str) -> Child {
    let exe = std::env::current_exe().unwrap();
    let mut c = Command::new(exe);
    c.args(["--exact", "victim"]).env(VICTIM, words).stdout(Stdio::null());
    c.spawn().unwrap()
}

/// Kills the node that has joined as number `place` in step `last`; how long it took until the last of the others was told.
fn told_after(place: u64, last: u64) -> Duration {
    let key = JobKey::random().unwrap();
    let file = std::env::temp_dir().join(format!("belay-tree-{}-{place}-{last}", std::process::id()));
    key.write(&file).unwrap();
    let root = Joining::root(key.clone(), FAN_OUT, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let root = root.start().unwrap();
    let joined = |root: &Tree, tag: u64| {
        let begin = Instant::now();
        loop {
            match root.event() {
                Some(Event::Joined(info)) if info.tag == tag => return,
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
            assert!(begin.elapsed() < LIMIT, "node with tag {tag} has not joined");
        }
    };
    let (mut nodes, mut victim) = (Vec::new(), None);
    for n in 1..NODES {
        if n == place {
            victim = Some(start_victim(&format!("{} {} {last}", file.display(), addresses[0])));
            joined(&root, 1);
        } else {
            let joining = Joining::connect(key.clone(), &addresses, format!("host{n}"), 100 + n, 1).unwrap();
            nodes.push(joining.start().unwrap());
            joined(&root, 100 + n);
        }
    }
    nodes.push(root);
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
    let killed = Instant::now();
    for _ in 1..NODES {
        assert_eq!(next(), Some(true));
    }
    let took = killed.elapsed();
    victim.wait().unwrap();
    std::fs::remove_file(file).unwrap();
    took
}

#[test]
fn all_others_are_told_of_one_that_was_killed() {
    // The first child of the root passes messages on for others; the last has none.
    for place in [1, NODES - 1] {
        for step in 1..=STEPS {
            let took = told_after(place, step);
            println!("node {place} killed in step {step}: all told after {} ms", took.as_millis());
            assert!(
                took < TOLD,
                "node {place} killed in step {step}: all told after {} ms",
                took.as_millis()
            );
        }
    }
}
