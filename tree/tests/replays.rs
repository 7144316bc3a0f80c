//! First packets of real nodes, sent again by somebody who has seen them on the wire: they prove nothing, and keep no
//! node out. A process of its own, because its limit of descriptors is set.

use belay_tree::{Contribution, Direct, Door, Event, JobKey, Joining};
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const DESCRIPTORS: u64 = 2048;
/// Packets sent again before a node comes; more follow while it does.
const BEFORE: usize = 3000;
/// Connections that each attacker holds: together more than a node has places.
const HELD: usize = 350;
const LIMIT: Duration = Duration::from_secs(60);

fn limit_descriptors() {
    let limit = libc::rlimit {
        rlim_cur: DESCRIPTORS,
        rlim_max: DESCRIPTORS,
    };
    // SAFETY: a live structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// The first packet of whoever `connects` to an address.
fn captured(connects: impl FnOnce(String) + Send + 'static) -> Vec<u8> {
    let wire = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = wire.local_addr().unwrap().to_string();
    std::thread::spawn(move || connects(to));
    let mut packet = vec![0; 50];
    wire.accept().unwrap().0.read_exact(&mut packet).unwrap();
    packet
}

/// Two attackers send `packet` to `address` again and again while `peer` does its work, which begins when they have sent thousands.
fn under_replays<T>(address: &str, packet: &[u8], peer: impl FnOnce() -> T) -> T {
    let (over, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let mut held = VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    // A node that takes no more connections for a moment is none of our business.
                    if let Ok(mut c) = TcpStream::connect(address) {
                        drop(c.write_all(packet));
                        held.push_back(c);
                        sent.fetch_add(1, Ordering::Relaxed);
                    }
                    if held.len() > HELD {
                        held.pop_front();
                    }
                }
            });
        }
        let begin = Instant::now();
        while sent.load(Ordering::Relaxed) < BEFORE && begin.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let begin = Instant::now();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(peer));
        over.store(true, Ordering::Relaxed);
        println!("{} packets sent again, {:?}", sent.load(Ordering::Relaxed), begin.elapsed());
        done.unwrap_or_else(|e| std::panic::resume_unwind(e))
    })
}

#[test]
fn packets_sent_again_take_no_places_from_nodes() {
    limit_descriptors();
    let key = JobKey::random().unwrap();
    let root = Joining::root(key.clone(), 8, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let root = root.start().unwrap();
    let theirs = key.clone();
    let packet = captured(move |to| drop(Joining::connect(theirs, &[to], "host".into(), 1, 1)));
    under_replays(&addresses[0], &packet, || {
        for tag in 1..=3 {
            let node = Joining::connect(key.clone(), &addresses, "host".into(), tag, 1).unwrap();
            let node = node.start().unwrap();
            let begin = Instant::now();
            while !matches!(root.event(), Some(Event::Joined(_))) {
                assert!(begin.elapsed() < LIMIT, "the node did not join");
                std::thread::sleep(Duration::from_millis(1));
            }
            let other = std::thread::spawn(move || node.exchange(tag, Contribution::ready()).map(drop));
            root.exchange(tag, Contribution::ready()).unwrap();
            other.join().unwrap().unwrap();
            while !matches!(root.event(), Some(Event::Left(..))) {
                assert!(begin.elapsed() < LIMIT, "the node did not leave");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
}

#[test]
fn packets_sent_again_keep_no_node_out_beside_the_tree() {
    limit_descriptors();
    let key = JobKey::random().unwrap();
    let mut door = Door::open(key.clone(), &[[127, 0, 0, 1].into()]).unwrap();
    let addresses = door.addresses();
    let theirs = key.clone();
    let packet = captured(move |to| drop(Direct::connect(&theirs, &[to])));
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if let Some(mut node) = door.accept(Some(Duration::from_millis(10))).unwrap() {
                    let question = node.receive().unwrap();
                    node.send(question).unwrap();
                }
            }
        });
        under_replays(&addresses[0], &packet, || {
            for n in 1..=20 {
                let mut node = Direct::connect(&key, &addresses).unwrap();
                node.send(vec![n]).unwrap();
                assert_eq!(node.receive().unwrap(), [n]);
            }
            over.store(true, Ordering::Relaxed);
        });
    });
}
