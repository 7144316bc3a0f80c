//! One round of making a generation redundant: the root waits for a word of every part, forms groups, and hears from each how it went.
//!
//! ```text
//! part ── hello ──> root ── plan ──> part ── done ──> root
//! ```
//! A connection that ends, or on which nothing is heard, is a failure of the round, and the round's end is noticed by every part whose connection it is: nobody waits for ever.

use super::encode::Work;
use super::serve::{next_node, Server};
use super::Settings;
use crate::Failure;
use belay_redundancy::{groups, Layout};
use belay_storage::flush::yield_processors;
use belay_tree::{Direct, Door, JobKey};
use belay_wire::Exit;
use serde::{de::DeserializeOwned, Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

/// How long all parts may take to say hello.
const LIMIT: Duration = Duration::from_secs(120);
/// How long nothing else is looked after.
const STEP: Duration = Duration::from_millis(50);

/// A part in a round, and where its server is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seat {
    pub(crate) tag: u64,
    pub(crate) host: String,
    pub(crate) addresses: Vec<String>,
}

/// A part begins.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    seat: Seat,
    generation: u64,
}

/// What it is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) layout: Layout,
    seats: Vec<Seat>,
    pub(super) position: usize,
}

impl Plan {
    /// Refuses what cannot be.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.layout.check()?;
        if self.position >= self.seats.len() || self.seats.len() != self.layout.members {
            return Err(failed("a plan that does not fit together"));
        }
        Ok(())
    }
}

/// How it went.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Done {
    failure: Option<String>,
}

fn failed(why: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::NotDurable, why.to_string())
}

fn send<T: Serialize>(to: &mut Direct, message: &T) -> Result<(), Failure> {
    let text = serde_json::to_vec(message).map_err(failed)?;
    to.send(text).map_err(failed)
}

fn receive<T: DeserializeOwned>(from: &mut Direct, limit: Duration) -> Result<T, Failure> {
    let text = from.receive_within(Some(limit)).map_err(failed)?;
    serde_json::from_slice(&text).map_err(failed)
}

/// What one part needs for its share.
pub(crate) struct Share {
    pub(crate) key: JobKey,
    /// Where the round is led.
    pub(crate) root: Vec<String>,
    pub(crate) generation: u64,
    pub(crate) tag: u64,
    pub(crate) host: String,
    pub(crate) dir: PathBuf,
    /// Addresses of its own server.
    pub(crate) addresses: Vec<String>,
    /// Set where what lies here is not what was written.
    pub(crate) rotten: Arc<AtomicBool>,
}

impl Share {
    /// Takes part in the round.
    pub(crate) fn run(self) -> Result<(), Failure> {
        yield_processors();
        let lost = |e: Failure| failed(format!("the round is over: {e}"));
        let mut root = Direct::connect(&self.key, &self.root).map_err(failed)?;
        let hello = Hello {
            seat: Seat {
                tag: self.tag,
                host: self.host.clone(),
                addresses: self.addresses.clone(),
            },
            generation: self.generation,
        };
        send(&mut root, &hello)?;
        let plan: Plan = receive(&mut root, LIMIT + Direct::SILENCE).map_err(lost)?;
        plan.check()?;
        let work = Work {
            key: &self.key,
            dir: &self.dir,
            generation: self.generation,
            layout: plan.layout,
            seats: &plan.seats,
            position: plan.position,
            rotten: &self.rotten,
        };
        let result = root.busy(|| work.run());
        let failure = result.as_ref().err().map(|f| format!("{}: {f}", self.host));
        send(&mut root, &Done { failure })?;
        result
    }
}

/// Who takes part in a round, for whom it is led.
pub(crate) struct Round {
    pub(crate) door: Door,
    pub(crate) generation: u64,
    /// The parts that are expected, and what the user calls their hosts.
    pub(crate) hosts: BTreeMap<u64, String>,
    pub(crate) settings: Settings,
    /// Somebody who is waited for is gone.
    pub(crate) cancel: Arc<AtomicBool>,
}

impl Round {
    /// Leads the round; the parts of each group, when all have written what they are to hold.
    pub(crate) fn lead(mut self) -> Result<Vec<Vec<u64>>, Failure> {
        let mut members = self.gather()?;
        let s = &self.settings;
        let domains: Vec<String> = members
            .values()
            .map(|(seat, _)| s.domain([&seat.host, &self.hosts[&seat.tag]]))
            .collect();
        let formed = groups::form(&domains, s.group, s.scheme.fewest(s.parity))?;
        let tags: Vec<u64> = members.keys().copied().collect();
        let formed: Vec<Vec<u64>> = formed.into_iter().map(|g| g.into_iter().map(|n| tags[n]).collect()).collect();
        for group in &formed {
            let layout = Layout::new(s.scheme, group.len(), s.parity)?;
            let seats: Vec<Seat> = group.iter().filter_map(|tag| Some(members.get(tag)?.0.clone())).collect();
            for (position, tag) in group.iter().enumerate() {
                if let Some((_, direct)) = members.get_mut(tag) {
                    let seats = seats.clone();
                    send(direct, &Plan { layout, seats, position })?;
                }
            }
        }
        let mut failure = None;
        for (seat, direct) in members.values_mut() {
            let done = receive(direct, Direct::SILENCE).map_err(|e| failed(format!("{}: {e}", seat.host)));
            let said = done.map(|d: Done| d.failure.map(failed)).unwrap_or_else(Some);
            if let Some(f) = said {
                tracing::warn!(generation = self.generation, tag = seat.tag, error = %f, "not encoded");
                failure.get_or_insert(f);
            }
        }
        failure.map_or(Ok(formed), Err)
    }

    /// Waits until every part has said hello.
    fn gather(&mut self) -> Result<BTreeMap<u64, (Seat, Direct)>, Failure> {
        let (found, hellos) = mpsc::channel();
        let mut members = BTreeMap::new();
        let begin = Instant::now();
        while members.len() < self.hosts.len() {
            if begin.elapsed() > LIMIT || self.cancel.load(Ordering::Relaxed) {
                let missing: Vec<&str> = self
                    .hosts
                    .iter()
                    .filter(|(t, _)| !members.contains_key(*t))
                    .map(|(_, h)| h.as_str())
                    .collect();
                return Err(failed(format!("no word from {}", missing.join(", "))));
            }
            if let Some(mut direct) = next_node(&mut self.door, Some(STEP)) {
                let found = found.clone();
                // One that says nothing must not keep the others waiting.
                let hear = move || {
                    if let Ok(hello) = receive::<Hello>(&mut direct, Direct::SILENCE) {
                        drop(found.send((hello, direct)));
                    }
                };
                std::thread::Builder::new()
                    .name("belay-round".into())
                    .spawn(hear)
                    .map_err(failed)?;
            }
            for (hello, direct) in hellos.try_iter() {
                let tag = hello.seat.tag;
                if hello.generation == self.generation && self.hosts.contains_key(&tag) {
                    members.insert(tag, (hello.seat, direct));
                }
            }
        }
        Ok(members)
    }
}

/// A share of a round for the part `tag` of the job, whose server is started where there is none yet at these addresses.
pub(crate) fn serve_part(
    server: &mut Option<Server>,
    (key, at): (&JobKey, Vec<IpAddr>),
    tag: u64,
    dir: &std::path::Path,
) -> Result<Vec<String>, Failure> {
    // Parts that came since may reach this host at another address.
    let known = server.take().filter(|s| s.is_at(&at));
    let server = match known {
        Some(known) => server.insert(known),
        None => server.insert(Server::start(key.clone(), vec![(tag, dir.to_owned())], at)?),
    };
    Ok(server.addresses().to_vec())
}
