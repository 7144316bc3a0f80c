//! What the root does together with the parts on threads beside the loops of their agents: it opens a door and orders
//! the parts to come, and each says hello there.
//!
//! A connection that ends, or on which nothing is heard, is a failure of what is done together: nobody waits for ever.

use crate::Failure;
use belay_tree::{Direct, Door};
use belay_wire::Exit;
use serde::de::DeserializeOwned;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

/// How long all parts may take to say hello.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// How long nothing else is looked after.
const STEP: Duration = Duration::from_millis(50);
/// When nobody can be let in, until the next attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// What a part says first.
pub(crate) trait Hello: DeserializeOwned + Send + 'static {
    /// Which part it is, and the generation that it is here for.
    fn of(&self) -> (u64, u64);
}

pub(crate) fn failed(why: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::NotDurable, why.to_string())
}

pub(crate) fn send<T: Serialize>(to: &mut Direct, message: &T) -> Result<(), Failure> {
    let text = serde_json::to_vec(message).map_err(failed)?;
    to.send(text).map_err(failed)
}

/// The next message, for which is waited as long as nothing is heard for no longer than `limit`; without one, as long
/// as there is a connection.
pub(crate) fn receive<T: DeserializeOwned>(from: &mut Direct, limit: Option<Duration>) -> Result<T, Failure> {
    let text = from.receive_within(limit).map_err(failed)?;
    serde_json::from_slice(&text).map_err(failed)
}

/// The next node that comes to `door`, within `limit`. One that could not be let in, because it has gone again, is no
/// reason to close it.
pub(crate) fn next_node(door: &mut Door, limit: Option<Duration>) -> Option<Direct> {
    door.accept(limit).unwrap_or_else(|e| {
        tracing::warn!(error = %e, "a visitor could not be let in");
        std::thread::sleep(PAUSE);
        None
    })
}

/// Who is expected, and where.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) door: Door,
    pub(crate) generation: u64,
    /// The parts that are expected, and what the user calls their hosts.
    pub(crate) hosts: BTreeMap<u64, String>,
    /// Somebody who is waited for is gone.
    pub(crate) cancel: Arc<AtomicBool>,
}

impl Meeting {
    /// Waits until every part has said hello: by tag, what each has said, and the connection.
    pub(crate) fn gather<H: Hello>(&mut self) -> Result<BTreeMap<u64, (H, Direct)>, Failure> {
        let (found, hellos) = mpsc::channel();
        let mut members = BTreeMap::new();
        let begin = Instant::now();
        while members.len() < self.hosts.len() {
            if begin.elapsed() > LIMIT || self.cancel.load(Ordering::Relaxed) {
                let missing = self.hosts.iter().filter(|(t, _)| !members.contains_key(*t));
                let missing: Vec<&str> = missing.map(|(_, h)| h.as_str()).collect();
                return Err(failed(format!("no word from {}", missing.join(", "))));
            }
            if let Some(mut direct) = next_node(&mut self.door, Some(STEP)) {
                let found = found.clone();
                // One that says nothing must not keep the others waiting.
                let hear = move || {
                    if let Ok(hello) = receive::<H>(&mut direct, Some(Direct::SILENCE)) {
                        drop(found.send((hello, direct)));
                    }
                };
                std::thread::Builder::new()
                    .name("belay-meeting".into())
                    .spawn(hear)
                    .map_err(failed)?;
            }
            for (hello, direct) in hellos.try_iter() {
                let (tag, generation) = hello.of();
                if generation == self.generation && self.hosts.contains_key(&tag) {
                    members.insert(tag, (hello, direct));
                }
            }
        }
        Ok(members)
    }
}
