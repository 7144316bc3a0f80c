//! Connections that say nothing: a node with few descriptors keeps its own, and lets real nodes in. A process of its
//! own, because its limit is lowered.

use belay_tree::{Contribution, Event, JobKey, Joining};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Descriptors that this process may have; the root takes a quarter of them for strangers.
const LIMIT: u64 = 400;
/// With their other ends in the same process these would be too many.
const SILENT: usize = 250;

#[test]
fn silent_connections_take_neither_descriptors_nor_places_from_nodes() {
    let limit = libc::rlimit {
        rlim_cur: LIMIT,
        rlim_max: LIMIT,
    };
    // SAFETY: a live structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let key = JobKey::random().unwrap();
    let root = Joining::root(key.clone(), 8, "root".into()).unwrap();
    let addresses = vec![root.addresses().last().unwrap().clone()];
    let root = root.start().unwrap();
    let silent: Vec<TcpStream> = (0..SILENT)
        .map(|i| TcpStream::connect(&addresses[0]).unwrap_or_else(|e| panic!("silent connection {i}: {e}")))
        .collect();
    let begin = Instant::now();
    let taken = || std::fs::read_dir("/proc/self/fd").map_or(usize::MAX, Iterator::count);
    // The root has looked at all of them when the last has been accepted or closed.
    while taken() > SILENT + LIMIT as usize / 4 + 30 {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "{} descriptors are in use",
            taken()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let node = Joining::connect(key, &addresses, "host".into(), 1, 1)
        .unwrap()
        .start()
        .unwrap();
    while !matches!(root.event(), Some(Event::Joined(_))) {
        assert!(begin.elapsed() < Duration::from_secs(60), "the node did not join");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::scope(|s| {
        s.spawn(move || node.exchange(1, Contribution::ready()).unwrap());
        root.exchange(1, Contribution::ready()).unwrap();
    });
    drop(silent);
}
