//! Entries for the fuzzer: what a peer of the tree can send, with and without the job's key.

use crate::handle::{Bell, Event, Released};
use crate::key::{JobKey, KEY_BYTES};
use crate::message::{Contribution, Down, NodeInfo, Up};
use crate::noise::Secure;
use crate::service::{Command, Service, Start};
use std::net::TcpListener;
use std::sync::{mpsc, Arc};

/// What somebody without the key sends, in pieces of different length. Nothing of it may be accepted.
pub fn stranger(data: &[u8]) {
    for initiator in [false, true] {
        let Ok(mut end) = Secure::new(&JobKey([7; KEY_BYTES]), initiator) else {
            return;
        };
        let piece = 1 + data.len() % 97;
        let fed = data.chunks(piece).try_for_each(|part| end.feed(part));
        assert!(!end.is_authenticated() && (fed.is_err() || data.len() < 100));
    }
}

/// What a node that has the key sends: `data` is the stream inside the packets, and what the decoded messages do to a relay and to a root.
pub fn node(data: &[u8]) {
    let key = JobKey([7; KEY_BYTES]);
    let (Ok(mut a), Ok(mut b)) = (Secure::new(&key, true), Secure::new(&key, false)) else {
        return;
    };
    for _ in 0..2 {
        let (x, y) = (std::mem::take(&mut a.out), std::mem::take(&mut b.out));
        assert!(b.feed(&x).is_ok() && a.feed(&y).is_ok());
    }
    assert!(a.is_authenticated() && b.is_authenticated());
    let mut messages = Vec::new();
    for part in data.chunks(1 + data.len() % 977) {
        if a.send_raw(part).is_err() || b.feed(&std::mem::take(&mut a.out)).is_err() {
            break;
        }
        while let Ok(Some(message)) = b.next() {
            messages.push(message);
        }
    }
    service(&messages, true);
    service(&messages, false);
}

/// Gives the messages that can be understood to a service without connections.
fn service(messages: &[Vec<u8>], root: bool) {
    let Ok(listener) = TcpListener::bind("127.0.0.1:0") else {
        return;
    };
    let (Ok(wake), Ok(bell)) = (Bell::new(), Bell::new()) else {
        return;
    };
    let (commands, orders) = mpsc::channel::<Command>();
    let (event_in, events) = mpsc::channel::<Event>();
    let (release_in, releases) = mpsc::channel::<Released>();
    let info = NodeInfo {
        node: Some(0),
        host: "here".into(),
        addresses: Vec::new(),
        tag: 0,
        processes: 0,
    };
    let start = Start {
        key: JobKey([7; KEY_BYTES]),
        node: u64::from(!root),
        fan_out: 2,
        info,
        listener,
        parent: (!root).then(|| (None, Vec::new())),
        root: Vec::new(),
        root_seen: None,
        early: Vec::new(),
    };
    let inbox = (orders, Arc::new(wake));
    let mut service = Service::new(start, inbox, (event_in, release_in, Arc::new(bell)), Arc::default());
    service.command(Command::Arrive(1, Contribution::ready()));
    for message in messages {
        if let Ok(up) = serde_json::from_slice::<Up>(message) {
            service.hear_child(3, up);
        }
        if let Ok(down) = serde_json::from_slice::<Down>(message) {
            service.hear_parent(down);
        }
        service.advance();
    }
    drop((commands, events, releases));
}
