//! One round of making a generation redundant: the root waits for a word of every part, forms groups, and hears from
//! each how it went.
//!
//! ```text
//! part ── hello ──> root ── plan ──> part ── done ──> root
//! ```
//! A connection that ends, or on which nothing is heard, is a failure of the round, and the round's end is noticed by
//! every part whose connection it is: nobody waits for ever.

use super::encode::{Encoded, Seat, Work};
use super::serve::Server;
use super::Settings;
use crate::nodes::meeting::{self, failed, receive, send, Meeting, LIMIT};
use crate::Failure;
use belay_redundancy::{groups, Layout};
use belay_storage::flush::yield_processors;
use belay_tree::{Direct, JobKey};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

/// A part begins.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    seat: Seat,
    generation: u64,
}

impl meeting::Hello for Hello {
    fn of(&self) -> (u64, u64) {
        (self.seat.tag, self.generation)
    }
}

/// What it is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) layout: Layout,
    seats: Vec<Seat>,
    pub(super) position: usize,
    /// The redundant generation from which is taken over what has not changed.
    before: Option<u64>,
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
    encoded: Encoded,
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
    pub(crate) fn run(self) -> Result<Encoded, Failure> {
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
        let plan: Plan = receive(&mut root, Some(LIMIT + Direct::SILENCE)).map_err(lost)?;
        plan.check()?;
        let work = Work {
            key: &self.key,
            dir: &self.dir,
            generation: self.generation,
            layout: plan.layout,
            seats: &plan.seats,
            position: plan.position,
            before: plan.before,
            rotten: &self.rotten,
        };
        let result = root.busy(|| work.run());
        let failure = result.as_ref().err().map(|f| format!("{}: {f}", self.host));
        let encoded = result.as_ref().copied().unwrap_or_default();
        send(&mut root, &Done { failure, encoded })?;
        result
    }
}

/// Who takes part in a round, for whom it is led.
pub(crate) struct Round {
    pub(crate) meeting: Meeting,
    pub(crate) settings: Settings,
    /// What was made redundant before.
    pub(crate) before: Option<Before>,
}

/// A redundant generation. Where it is the one that is to be encoded, because something was lost of that, its groups stay
/// as they are: in others, the parity that is there would be replaced by what does not fit to it, one after the other.
/// Otherwise they stay if they serve, so that what has not changed need not be encoded.
#[derive(Debug)]
pub(crate) struct Before {
    pub(crate) generation: u64,
    /// The parts of each group.
    pub(crate) groups: Vec<Vec<u64>>,
}

/// What a round has come to.
#[derive(Debug, Default)]
pub(crate) struct Led {
    /// The parts of each group.
    pub(crate) groups: Vec<Vec<u64>>,
    /// Bytes of parity that were encoded, and that were taken over, on all hosts.
    pub(crate) bytes: u64,
    pub(crate) kept: u64,
}

impl Round {
    /// The parts of each group.
    fn form(&self, members: &BTreeMap<u64, (Hello, Direct)>) -> Result<Vec<Vec<u64>>, Failure> {
        let s = &self.settings;
        let tags: Vec<u64> = members.keys().copied().collect();
        let position = |tag: &u64| tags.binary_search(tag).unwrap_or(usize::MAX);
        let positions = |groups: &[Vec<u64>]| -> Vec<Vec<usize>> {
            let of = |group: &Vec<u64>| group.iter().map(position).collect();
            groups.iter().map(of).collect()
        };
        if let Some(before) = self.before.as_ref().filter(|b| b.generation == self.meeting.generation) {
            let mut known: Vec<usize> = positions(&before.groups).into_iter().flatten().collect();
            known.sort_unstable();
            if !known.into_iter().eq(0..tags.len()) {
                return Err(failed("the parts of the job are others than those of its record"));
            }
            return Ok(before.groups.clone());
        }
        let domain = |(Hello { seat, .. }, _): &(Hello, Direct)| s.domain([&seat.host, &self.meeting.hosts[&seat.tag]]);
        let domains: Vec<String> = members.values().map(domain).collect();
        let new = groups::form(&domains, s.group, s.scheme.fewest(s.parity))?;
        let serves = |b: &&Before| groups::serve_as_well(&positions(&b.groups), &new, &domains);
        if let Some(before) = self.before.as_ref().filter(serves) {
            return Ok(before.groups.clone());
        }
        Ok(new.into_iter().map(|g| g.into_iter().map(|n| tags[n]).collect()).collect())
    }

    /// Leads the round; returns when all have written what they are to hold.
    pub(crate) fn lead(mut self) -> Result<Led, Failure> {
        let mut members = self.meeting.gather::<Hello>()?;
        let s = &self.settings;
        let before = self.before.as_ref().map(|b| b.generation);
        let formed = self.form(&members)?;
        for group in &formed {
            let layout = Layout::new(s.scheme, group.len(), s.parity)?;
            let seats: Vec<Seat> = group
                .iter()
                .filter_map(|tag| Some(members.get(tag)?.0.seat.clone()))
                .collect();
            for (position, tag) in group.iter().enumerate() {
                if let Some((_, direct)) = members.get_mut(tag) {
                    let seats = seats.clone();
                    let plan = Plan {
                        layout,
                        seats,
                        position,
                        before,
                    };
                    send(direct, &plan)?;
                }
            }
        }
        let (mut failure, mut encoded) = (None, BTreeMap::new());
        for (tag, (Hello { seat, generation }, direct)) in &mut members {
            let done = receive(direct, Some(Direct::SILENCE)).map_err(|e| failed(format!("{}: {e}", seat.host)));
            match done.and_then(|d: Done| d.failure.map_or(Ok(d.encoded), |why| Err(failed(why)))) {
                Ok(done) => drop(encoded.insert(*tag, done)),
                Err(f) => {
                    tracing::warn!(generation, tag, error = %f, "not encoded");
                    failure.get_or_insert(f);
                }
            }
        }
        for group in &formed {
            let mut seen = group.iter().filter_map(|tag| encoded.get(tag)).map(|e| e.group);
            let first = seen.next();
            if seen.any(|g| Some(g) != first) {
                failure.get_or_insert_with(|| failed("hosts of one group have not seen the same of each other"));
            }
        }
        let led = Led {
            groups: formed,
            bytes: encoded.values().map(|e| e.bytes).sum(),
            kept: encoded.values().map(|e| e.kept).sum(),
        };
        failure.map_or(Ok(led), Err)
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
