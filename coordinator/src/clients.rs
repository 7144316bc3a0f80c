//! Clients of the control socket. Nothing a client does can block the agent: sockets do not block, requests and queues are bounded.

use crate::sys::poll_within;
use belay_wire::socket::{peer, Lines, MAX_REQUEST};
use belay_wire::{Event, Exit, Request};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Clients served at a time; the one that is longest without a request makes room for another.
const MAX_CLIENTS: usize = 64;
/// A client that lets this much pile up is dropped.
const MAX_QUEUED: usize = 80 << 20;
/// What is left of the answers when the agent ends is sent for so long at most, and no longer when no client takes
/// anything for `SILENCE`: they are stopped.
const DELIVERY: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(3);

/// Names a client for the time of its connection.
pub(crate) type ClientId = u64;

#[derive(Debug)]
struct Client {
    pid: i32,
    stream: UnixStream,
    lines: Lines,
    out: Vec<u8>,
    asked: bool,
    finished: bool,
}

/// The connected clients.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    list: BTreeMap<ClientId, Client>,
    next: ClientId,
}

impl Clients {
    /// Accepts a connection if its peer may command this job.
    pub(crate) fn accept(&mut self, listener: &UnixListener) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) => {
                if e.kind() != io::ErrorKind::WouldBlock {
                    tracing::warn!(error = %e, "accept a client");
                }
                return;
            }
        };
        let who = match peer(stream.as_fd()).and_then(|who| stream.set_nonblocking(true).map(|()| who)) {
            Ok(who) => who,
            Err(e) => {
                tracing::warn!(error = %e, "client without credentials");
                return;
            }
        };
        if self.list.len() >= MAX_CLIENTS {
            let idle = self.list.iter().find(|(_, c)| !c.asked).map(|(id, _)| *id);
            match idle {
                Some(id) => drop(self.list.remove(&id)),
                None => return,
            }
        }
        let id = self.next;
        self.next += 1;
        let client = Client {
            pid: who.pid,
            stream,
            lines: Lines::new(MAX_REQUEST),
            out: Vec::new(),
            asked: false,
            finished: false,
        };
        self.list.insert(id, client);
        if !who.may_command(crate::sys::euid()) {
            tracing::warn!(uid = who.uid, "client of another user refused");
            let message = format!("user {} may not command this job; run as its owner", who.uid);
            self.send(
                id,
                &Event::Failed {
                    exit: Exit::NotOurs,
                    message,
                    passing: false,
                },
            );
        }
    }

    /// The process that has connected.
    pub(crate) fn pid(&self, id: ClientId) -> i32 {
        self.list.get(&id).map_or(0, |c| c.pid)
    }

    /// Whether it is still connected, as far as has been noticed.
    pub(crate) fn is_there(&self, id: ClientId) -> bool {
        self.list.contains_key(&id)
    }

    /// What to poll for.
    pub(crate) fn interest(&self) -> Vec<(ClientId, RawFd, i16)> {
        let events = |c: &Client| libc::POLLIN | if c.out.is_empty() { 0 } else { libc::POLLOUT };
        self.list
            .iter()
            .map(|(id, c)| (*id, c.stream.as_raw_fd(), events(c)))
            .collect()
    }

    /// Handles readiness of a client; its request, once it is complete.
    pub(crate) fn ready(&mut self, id: ClientId, revents: i16) -> Option<Request> {
        if revents & libc::POLLOUT != 0 {
            self.flush(id);
        }
        let client = self.list.get_mut(&id).filter(|_| revents & !libc::POLLOUT != 0)?;
        let line = match client.lines.fill(&client.stream) {
            Ok(true) => client.lines.next_line(),
            Ok(false) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            Err(e) => Err(e),
        };
        let failure = match line {
            Ok(None) => return None,
            Ok(Some(_)) if client.asked => "one request per connection".into(),
            Ok(Some(line)) => match serde_json::from_slice(&line) {
                Ok(request) => {
                    client.asked = true;
                    return Some(request);
                }
                Err(e) => format!("request not understood: {e}; use the same version of belay for both"),
            },
            Err(e) if e.kind() == io::ErrorKind::InvalidData => e.to_string(),
            Err(_) => {
                self.list.remove(&id);
                return None;
            }
        };
        self.send(
            id,
            &Event::Failed {
                exit: Exit::Protocol,
                message: failure,
                passing: false,
            },
        );
        None
    }

    /// Sends `event` as far as the socket takes it now; the rest follows. After the last event of an answer the
    /// connection is closed.
    pub(crate) fn send(&mut self, id: ClientId, event: &Event) {
        let Some(client) = self.list.get_mut(&id) else {
            return; // it has hung up
        };
        match serde_json::to_vec(event) {
            Ok(line) if client.out.len() + line.len() < MAX_QUEUED => {
                client.out.extend_from_slice(&line);
                client.out.push(b'\n');
                client.finished |= event.is_last();
                self.flush(id);
            }
            Ok(_) => drop(self.list.remove(&id)),
            Err(e) => tracing::error!(error = %e, "encode an event"),
        }
    }

    /// Sends what is left of the answers, before the agent ends.
    pub(crate) fn deliver(&mut self) {
        let end = Instant::now() + DELIVERY;
        loop {
            self.list.retain(|_, c| !c.out.is_empty());
            let (ids, waiting): (Vec<_>, Vec<_>) = self
                .list
                .iter()
                .map(|(id, c)| (*id, (c.stream.as_raw_fd(), libc::POLLOUT)))
                .unzip();
            let left = SILENCE.min(end.saturating_duration_since(Instant::now()));
            if ids.is_empty() || left.is_zero() {
                return;
            }
            match poll_within(&waiting, Some(left)) {
                Ok(ready) if ready.iter().any(|r| *r != 0) => {
                    let ready = ids.iter().zip(ready).filter(|(_, r)| *r != 0);
                    ready.for_each(|(id, _)| self.flush(*id));
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    tracing::warn!(clients = ids.len(), "answers not taken");
                    return;
                }
            }
        }
    }

    fn flush(&mut self, id: ClientId) {
        let Some(client) = self.list.get_mut(&id) else {
            return;
        };
        while !client.out.is_empty() {
            match client.stream.write(&client.out) {
                Ok(n) => drop(client.out.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.list.remove(&id);
                    return;
                }
            }
        }
        if client.finished {
            self.list.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn pair() -> (Clients, ClientId, UnixStream) {
        let path = std::env::temp_dir().join(format!(
            "belay-clients-{}-{:?}.sock",
            std::process::id(),
            std::thread::current().id()
        ));
        let listener = belay_wire::socket::listen(&path).unwrap();
        let client = belay_wire::socket::connect(&path).unwrap();
        let mut clients = Clients::default();
        clients.accept(&listener);
        std::fs::remove_file(path).unwrap();
        (clients, 0, client)
    }

    #[test]
    fn a_request_in_pieces_is_understood_and_answered_once() {
        let (mut clients, id, mut stream) = pair();
        stream.write_all(br#"{"op":"sta"#).unwrap();
        assert_eq!(clients.ready(id, libc::POLLIN), None);
        stream.write_all(b"tus\"}\n").unwrap();
        assert_eq!(clients.ready(id, libc::POLLIN), Some(Request::Status));
        clients.send(id, &Event::Stopped { wait_status: None });
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "{\"event\":\"stopped\",\"wait_status\":null}\n");
        assert!(clients.interest().is_empty());
    }

    #[test]
    fn rubbish_and_endless_lines_are_refused() {
        for rubbish in [b"hello\n".to_vec(), vec![b'x'; MAX_REQUEST + 2], b"\xff\xfe\n".to_vec()] {
            let (mut clients, id, mut stream) = pair();
            stream.write_all(&rubbish).unwrap();
            while !clients.interest().is_empty() {
                assert_eq!(clients.ready(id, libc::POLLIN), None);
            }
            let mut answer = String::new();
            // The agent closes with input unread, which resets the connection after the answer.
            while stream.read_to_string(&mut answer).is_ok_and(|n| n > 0) {}
            assert!(answer.contains("\"exit\":\"protocol\""), "{answer}");
        }
    }

    #[test]
    fn what_a_socket_does_not_take_at_once_is_delivered_before_the_end() {
        let (mut clients, id, mut stream) = pair();
        let message = "x".repeat(4 << 20);
        let event = Event::Failed {
            exit: Exit::ProgramEnded,
            message: message.clone(),
            passing: false,
        };
        clients.send(id, &event);
        assert!(clients.is_there(id), "the socket takes all of it at once");
        let reader = std::thread::spawn(move || {
            let mut answer = String::new();
            stream.read_to_string(&mut answer).map(|_| answer)
        });
        clients.deliver();
        assert!(clients.interest().is_empty());
        assert!(reader.join().unwrap().unwrap().contains(&message));
        // Who takes nothing is not waited for.
        let (mut clients, id, stream) = pair();
        clients.send(id, &event);
        clients.deliver();
        assert!(clients.is_there(id));
        drop(stream);
        clients.deliver();
        assert!(!clients.is_there(id));
    }

    #[test]
    fn a_client_that_hangs_up_is_forgotten() {
        let (mut clients, id, stream) = pair();
        drop(stream);
        assert!(clients.is_there(id));
        assert_eq!(clients.ready(id, libc::POLLIN | libc::POLLHUP), None);
        assert!(!clients.is_there(id) && clients.interest().is_empty());
        clients.send(id, &Event::Stopped { wait_status: None });
    }
}
