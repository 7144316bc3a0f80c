//! Whole trees over loopback: steps, orders, and what happens when nodes are lost.

use belay_still::Watch;
use belay_tree::{Contribution, Event, FailureKind, JobKey, Joining, Tree};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const REFUSED: FailureKind = FailureKind::Refused {
    not_asked: false,
    exit: 80,
    passing: false,
};
const LIMIT: Duration = Duration::from_secs(20);

/// The root and `count - 1` other nodes, all attached.
fn tree(count: u64, fan_out: u64) -> (Tree, Vec<Tree>) {
    let key = JobKey::random().unwrap();
    let root = Joining::root(key.clone(), fan_out, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let root = root.start().unwrap();
    let join = |n: u64| Joining::connect(key.clone(), &addresses, format!("host{n}"), 100 + n, 7).unwrap();
    let nodes: Vec<Tree> = (1..count).map(|n| join(n).start().unwrap()).collect();
    let mut joined = 0;
    while joined < count - 1 {
        if let Event::Joined(info) = wait(&root) {
            assert_eq!(info.processes, 7);
            joined += 1;
        }
    }
    (root, nodes)
}

/// The next event; fails when there is none within the limit.
fn wait(tree: &Tree) -> Event {
    let begin = Instant::now();
    loop {
        if let Some(e) = tree.event() {
            return e;
        }
        assert!(begin.elapsed() < LIMIT, "no event");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn facts_reach_those_who_want_them_through_all_levels() {
    let (root, mut nodes) = tree(14, 3);
    for step in 1..=20 {
        std::thread::scope(|s| {
            for (i, node) in nodes.iter_mut().enumerate() {
                s.spawn(move || {
                    let mut c = Contribution::ready();
                    c.publish.insert(format!("from {i}"), format!("{step}"));
                    c.want.insert(format!("from {}", (i + 5) % 13));
                    c.want.insert("nobody knows".into());
                    let values = node.exchange(step, c).unwrap();
                    assert_eq!(values.len(), 1);
                    assert_eq!(values[&format!("from {}", (i + 5) % 13)], format!("{step}"));
                });
            }
            let values = root.exchange(step, Contribution::ready()).unwrap();
            assert!(values.is_empty());
        });
    }
    // One message of each child and step, and one of each node for being let in and attached.
    assert!(root.traffic().received() <= 20 * 3 + 2 * 13, "{}", root.traffic().received());
}

/// A root that has stood still does not take those for lost who had no time to come to their parent meanwhile.
#[test]
fn a_root_that_stood_still_loses_nobody() {
    const LONGER_THAN_ANYBODY_IS_AWAITED: Duration = Duration::from_secs(6);
    let key = JobKey::random().unwrap();
    let mut root = Joining::root(key.clone(), 1, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let (_above, below) = std::thread::scope(|s| {
        let (key, addresses) = (&key, &addresses);
        let join = move |n: u64| Joining::connect(key.clone(), addresses, format!("host{n}"), n, 1).unwrap();
        let both = s.spawn(move || (join(1).start().unwrap(), join(2)));
        while !both.is_finished() {
            root.await_event(Duration::from_millis(10));
        }
        both.join().unwrap()
    });
    std::thread::sleep(LONGER_THAN_ANYBODY_IS_AWAITED);
    root.attend();
    let _below = below.start().unwrap();
    match root.await_event(LIMIT) {
        Some(Event::Joined(info)) => assert_eq!(info.tag, 2),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_root_alone_waits_for_nobody() {
    let mut root = Joining::root(JobKey::random().unwrap(), 3, "root".into()).unwrap();
    let watch = Watch::begin();
    for step in 1..=20 {
        let mut c = Contribution::ready();
        c.publish.insert("own".into(), format!("{step}"));
        c.want.insert("own".into());
        assert_eq!(root.exchange(step, c).unwrap()["own"], format!("{step}"));
    }
    let took = watch.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
}

/// As at a restart, where nobody has a thread for the tree yet.
#[test]
fn nobody_begins_before_those_below_have_joined() {
    const COUNT: u64 = 6;
    let key = JobKey::random().unwrap();
    let mut root = Joining::root(key.clone(), 1, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    std::thread::scope(|s| {
        let others: Vec<_> = (1..COUNT)
            .map(|tag| {
                let (key, addresses) = (key.clone(), &addresses);
                s.spawn(move || {
                    let mut node = Joining::connect(key, addresses, "host".into(), tag, 1).unwrap();
                    node.await_all(LIMIT).unwrap();
                    node.exchange(1, Contribution::ready()).is_ok()
                })
            })
            .collect();
        for _ in 1..COUNT {
            assert!(matches!(root.await_event(LIMIT), Some(Event::Joined(_))));
        }
        root.all_joined();
        let whole = root.exchange(1, Contribution::ready());
        assert!(whole.is_ok(), "{whole:?}");
        // Until the last of the chain has heard of it.
        while others.iter().any(|t| !t.is_finished()) {
            root.await_event(Duration::from_millis(10));
        }
        assert!(others.into_iter().all(|t| t.join().unwrap()));
    });
}

/// At a restart a relay is killed before it has passed on that all have joined: whoever is below hears it from the
/// root, and the step fails at once.
#[test]
fn an_order_that_a_lost_relay_has_not_passed_on_is_heard_from_the_root() {
    let key = JobKey::random().unwrap();
    let mut root = Joining::root(key.clone(), 1, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let over = AtomicBool::new(false);
    let join = |tag| Joining::connect(key.clone(), &addresses, "host".into(), tag, 1).unwrap();
    std::thread::scope(|s| {
        let relay = s.spawn(|| {
            let mut relay = join(1);
            while !over.load(Ordering::Relaxed) {
                relay.await_event(Duration::from_millis(10));
            }
            relay
        });
        assert!(matches!(root.await_event(LIMIT), Some(Event::Joined(_))));
        let below = s.spawn(|| {
            let mut below = join(2);
            below.await_all(LIMIT).map(|()| below.exchange(1, Contribution::ready()))
        });
        assert!(matches!(root.await_event(LIMIT), Some(Event::Joined(_))));
        over.store(true, Ordering::Relaxed);
        let relay = relay.join().unwrap();
        root.all_joined();
        drop(relay);
        let broken = root.exchange(1, Contribution::ready()).unwrap_err();
        assert_eq!((broken.0[0].node, broken.0[0].kind), (1, FailureKind::Lost));
        while !below.is_finished() {
            root.await_event(Duration::from_millis(10));
        }
        assert!(below.join().unwrap().unwrap().is_err());
    });
}

#[test]
fn a_new_node_hears_what_is_ordered_after_it_was_let_in_and_nothing_of_before() {
    let key = JobKey::random().unwrap();
    let root = Joining::root(key.clone(), 1, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let root = root.start().unwrap();
    let join = |tag| Joining::connect(key.clone(), &addresses, "host".into(), tag, 1).unwrap();
    let relay = join(1).start().unwrap();
    assert!(matches!(wait(&root), Event::Joined(_)));
    root.order("before".into());
    assert_eq!(wait(&relay), Event::Order("before".into()));
    let new = join(2);
    // It has a number, and is not connected to its parent.
    let orders: Vec<String> = (1..=100).map(|n| format!("after {n}")).collect();
    orders.iter().for_each(|o| root.order(o.clone()));
    let heard = |node: &Tree| orders.iter().all(|o| wait(node) == Event::Order(o.clone()));
    assert!(heard(&relay));
    assert!(heard(&new.start().unwrap()));
}

/// As while a checkpoint is being written, however long that takes.
#[test]
fn who_comes_while_the_others_are_held_is_let_in_afterwards() {
    let key = JobKey::random().unwrap();
    let root = Joining::root(key.clone(), 1, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let root = root.start().unwrap();
    root.hold(Some(std::collections::BTreeSet::new()));
    let joins = std::thread::spawn(move || Joining::connect(key, &addresses, "host".into(), 1, 1));
    std::thread::sleep(Duration::from_secs(22));
    assert!(!joins.is_finished() && root.event().is_none());
    root.hold(None);
    let node = joins.join().unwrap().unwrap().start().unwrap();
    assert!(matches!(wait(&root), Event::Joined(info) if info.node == Some(node.node())));
}

/// The root of a job, and a node that has joined it.
fn root_and_node() -> (Joining, Joining) {
    let key = JobKey::random().unwrap();
    let mut root = Joining::root(key.clone(), 1, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let joins = std::thread::spawn(move || Joining::connect(key, &addresses, "host".into(), 1, 1).unwrap());
    assert!(matches!(root.await_event(LIMIT), Some(Event::Joined(_))));
    let node = joins.join().unwrap();
    (root, node)
}

/// Between two steps of a restart a node may do something that takes longer than a connection may be silent.
#[test]
fn who_attends_now_and_then_is_not_lost_however_late_it_comes() {
    let (mut root, mut node) = root_and_node();
    let comes = std::thread::spawn(move || {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(13) {
            std::thread::sleep(Duration::from_millis(50));
            node.attend();
        }
        node.exchange(1, Contribution::ready())
    });
    let whole = root.exchange(1, Contribution::ready());
    assert!(whole.is_ok(), "{whole:?}");
    assert!(comes.join().unwrap().is_ok());
}

#[test]
fn who_waits_for_the_others_hears_that_the_root_is_gone_or_late() {
    let (root, mut node) = root_and_node();
    let late = node.await_all(Duration::ZERO).unwrap_err().to_string();
    assert!(late.contains("some have not"), "{late}");
    drop(root);
    let gone = node.await_all(LIMIT).unwrap_err().to_string();
    assert!(gone.contains("nobody listens"), "{gone}");
}

#[test]
fn an_order_reaches_everybody_and_a_failure_too() {
    let (root, mut nodes) = tree(8, 2);
    root.order("begin".into());
    for node in &nodes {
        assert_eq!(wait(node), Event::Order("begin".into()));
    }
    std::thread::scope(|s| {
        for node in &mut nodes {
            s.spawn(move || {
                let c = if node.node() == 5 {
                    Contribution::failed(5, REFUSED, "a device")
                } else {
                    Contribution::ready()
                };
                let broken = node.exchange(1, c).unwrap_err();
                assert_eq!((broken.0[0].node, broken.0[0].reason.as_str()), (5, "a device"));
            });
        }
        assert!(root.exchange(1, Contribution::ready()).is_err());
    });
}

#[test]
fn a_node_that_leaves_is_no_loss() {
    let (root, mut nodes) = tree(4, 8);
    drop(nodes.pop());
    assert_eq!(wait(&root), Event::Left(3, 0));
    std::thread::scope(|s| {
        for node in &mut nodes {
            s.spawn(move || node.exchange(1, Contribution::ready()).unwrap());
        }
        root.exchange(1, Contribution::ready()).unwrap();
    });
}

#[test]
fn children_of_a_relay_that_has_left_come_to_the_root() {
    let (root, mut nodes) = tree(4, 1);
    drop(nodes.remove(0));
    assert_eq!(wait(&root), Event::Left(1, 0));
    let begin = Instant::now();
    for step in 1.. {
        let whole = std::thread::scope(|s| {
            let others: Vec<_> = nodes
                .iter_mut()
                .map(|n| s.spawn(move || n.exchange(step, Contribution::ready()).is_ok()))
                .collect();
            let own = root.exchange(step, Contribution::ready()).is_ok();
            others.into_iter().all(|t| t.join().unwrap()) && own
        });
        if whole {
            break;
        }
        assert!(begin.elapsed() < LIMIT, "the tree did not become whole again");
    }
}

/// Waits until a node says that the root is gone; why.
fn wait_for_the_loss(node: &Tree) -> String {
    loop {
        if let Event::RootLost(why) = wait(node) {
            return why;
        }
    }
}

/// Arrives at step 1 in a thread, whose end can be waited for: whether all have come, and the node again.
fn arrive(node: Tree) -> std::sync::mpsc::Receiver<(bool, Tree)> {
    let (over, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || drop(over.send((node.exchange(1, Contribution::ready()).is_ok(), node))));
    end
}

#[test]
fn everybody_below_hears_that_the_root_is_gone() {
    let (root, nodes) = tree(4, 1);
    let steps: Vec<_> = nodes.into_iter().map(arrive).collect();
    drop(root);
    for step in steps {
        let (whole, node) = step.recv_timeout(LIMIT).unwrap();
        assert!(!whole);
        // Not because the time was over.
        assert!(wait_for_the_loss(&node).contains("nobody listens"));
        assert!(node.exchange(2, Contribution::ready()).is_err());
    }
}

#[test]
fn a_root_that_stands_still_is_lost_though_its_kernel_takes_connections() {
    let key = JobKey::random().unwrap();
    let mut root = Joining::root(key.clone(), 8, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let joins = std::thread::spawn(move || Joining::connect(key, &addresses, "host".into(), 1, 1).unwrap());
    assert!(matches!(root.await_event(LIMIT), Some(Event::Joined(_))));
    let node = joins.join().unwrap().start().unwrap();
    // From here on nobody attends to the root's connections.
    let (whole, node) = arrive(node).recv_timeout(2 * LIMIT).unwrap();
    assert!(!whole);
    assert!(wait_for_the_loss(&node).contains("cannot be reached"));
    drop(root);
}

#[test]
fn strangers_without_the_key_are_refused() {
    use std::io::{Read, Write};
    let (root, nodes) = tree(2, 8);
    let address = root.addresses().last().unwrap().clone();
    let mut scanner = std::net::TcpStream::connect(&address).unwrap();
    scanner.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = scanner.read_to_end(&mut answer);
    assert!(answer.is_empty(), "{answer:?}");
    drop(nodes);
    assert_eq!(wait(&root), Event::Left(1, 0));
}
