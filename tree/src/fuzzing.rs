//! Entries for the fuzzer: what a peer of the tree can send, with and without the job's key.

use crate::direct::Direct;
use crate::event::{Bell, Event, Released};
use crate::key::{JobKey, KEY_BYTES};
use crate::listening::Listeners;
use crate::message::{Contribution, Down, NodeInfo, Up};
use crate::noise::{Answered, NoiseError, Secure, DIRECT, TREE};
use crate::service::{Command, Service, Start};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{mpsc, Arc};
use std::time::Duration;

/// What somebody without the key sends, in pieces of different length. Nothing of it may be accepted.
pub fn stranger(data: &[u8]) {
    for end in ends(TREE) {
        let Ok(mut end) = end else { return };
        let piece = 1 + data.len() % 97;
        let fed = data.chunks(piece).try_for_each(|part| end.feed(part));
        assert!(!end.is_authenticated() && (fed.is_err() || data.len() < 100));
    }
}

/// Both ends of a connection of which the other is somebody else's.
fn ends(prologue: &[u8]) -> [Result<Secure, NoiseError>; 2] {
    let key = JobKey([7; KEY_BYTES]);
    [
        Secure::responder(&key, prologue, Answered::default()),
        Secure::initiator(&key, prologue),
    ]
}

/// What a node that has the key sends: `data` is the stream inside the packets, and what the decoded messages do to a
/// relay and to a root.
pub fn node(data: &[u8]) {
    let [Ok(mut b), Ok(mut a)] = ends(TREE) else { return };
    for _ in 0..3 {
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
        listeners: Listeners::default(),
        parent: (!root).then(|| (None, Vec::new())),
        root: Vec::new(),
        root_seen: None,
        ordered: 0,
        early: Vec::new(),
    };
    let inbox = (orders, Arc::new(wake));
    let mut service = Service::new(start, inbox, (event_in, release_in, Arc::new(bell)), Arc::default());
    service.command(Command::Arrive(1, Contribution::ready(), None));
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

/// How long a connection of the fuzzer may be silent; all that is said is there before it is listened to.
const LIMIT: Duration = Duration::from_secs(30);

/// What somebody without the key says on a connection beside the tree. Nobody is let in.
pub fn direct_stranger(data: &[u8]) {
    // More than a handshake is never read.
    let data = &data[..data.len().min(4096)];
    for secure in ends(DIRECT) {
        let (Ok((mut peer, end)), Ok(secure)) = (UnixStream::pair(), secure) else {
            return;
        };
        if peer.write_all(data).and_then(|()| peer.shutdown(Shutdown::Write)).is_err() {
            return;
        }
        let end = TcpStream::from(OwnedFd::from(end));
        assert!(Direct::over(end, secure, LIMIT).is_err());
    }
}

/// What a node that has the key says there: `data` is the stream inside the packets.
pub fn direct_node(data: &[u8]) {
    // As much as a socket takes before anybody reads.
    const MOST: usize = 100 << 10;
    let data = &data[..data.len().min(MOST)];
    let (Ok((mut peer, end)), [Ok(responder), Ok(mut secure)]) = (UnixStream::pair(), ends(DIRECT)) else {
        return;
    };
    let end = TcpStream::from(OwnedFd::from(end));
    let accepted = std::thread::spawn(move || Direct::over(end, responder, LIMIT));
    let mut reply = [0; 512];
    while !secure.is_authenticated() {
        let said = peer.write_all(&std::mem::take(&mut secure.out));
        let heard = said.and_then(|()| peer.read(&mut reply)).unwrap_or(0);
        assert!(
            heard > 0 && secure.feed(&reply[..heard]).is_ok(),
            "who has the key is not answered"
        );
    }
    // What proves that is still to be sent.
    assert!(peer.write_all(&std::mem::take(&mut secure.out)).is_ok());
    let Ok(Ok(mut direct)) = accepted.join() else {
        panic!("who has the key is not let in")
    };
    for part in data.chunks(1 + data.len() % 977) {
        if secure.send_raw(part).is_err() {
            return;
        }
    }
    if peer
        .write_all(&secure.out)
        .and_then(|()| peer.shutdown(Shutdown::Write))
        .is_err()
    {
        return;
    }
    let mut bytes = 0;
    while let Ok(message) = direct.receive_within(Some(LIMIT)) {
        assert!(!message.is_empty(), "an empty message is a sign of life only");
        bytes += message.len();
    }
    assert!(bytes <= data.len());
}
