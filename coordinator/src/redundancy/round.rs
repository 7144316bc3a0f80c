//! One round of making a generation redundant: the root waits for a word of every part, forms groups, and hears from
//! each how it went.
//!
//! ```text
//! part ── hello ──> root ── plan ──> part ── done ──> root
//! ```
//! A connection that ends, or on which nothing is heard, is a failure of the round, and the round's end is noticed by
//! every part whose connection it is: nobody waits for ever.

use super::encode::{Seat, Work};
use super::serve::Server;
use super::Settings;
use crate::nodes::meeting::{self, failed, receive, send, Meeting, LIMIT};
use crate::Failure;
use belay_redundancy::{groups, Layout};
use belay_storage::flush::yield_processors;
use belay_tree::{Direct, JobKey};
use serde::{Deserialize, Serialize};
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
        let plan: Plan = receive(&mut root, Some(LIMIT + Direct::SILENCE)).map_err(lost)?;
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
    pub(crate) meeting: Meeting,
    pub(crate) settings: Settings,
    /// The groups of before, where the generation is redundant already, and something was lost of that: in others, the
    /// parity that is there would be replaced by what does not fit to it, one after the other.
    pub(crate) groups: Option<Vec<Vec<u64>>>,
}

impl Round {
    /// Leads the round; the parts of each group, when all have written what they are to hold.
    pub(crate) fn lead(mut self) -> Result<Vec<Vec<u64>>, Failure> {
        let mut members = self.meeting.gather::<Hello>()?;
        let s = &self.settings;
        let tags: Vec<u64> = members.keys().copied().collect();
        let formed = match self.groups.take() {
            Some(before) => {
                let mut known: Vec<u64> = before.iter().flatten().copied().collect();
                known.sort_unstable();
                if known != tags {
                    return Err(failed("the parts of the job are others than those of its record"));
                }
                before
            }
            None => {
                let domain = |(Hello { seat, .. }, _): &(Hello, Direct)| s.domain([&seat.host, &self.meeting.hosts[&seat.tag]]);
                let domains: Vec<String> = members.values().map(domain).collect();
                let formed = groups::form(&domains, s.group, s.scheme.fewest(s.parity))?;
                formed.into_iter().map(|g| g.into_iter().map(|n| tags[n]).collect()).collect()
            }
        };
        for group in &formed {
            let layout = Layout::new(s.scheme, group.len(), s.parity)?;
            let seats: Vec<Seat> = group
                .iter()
                .filter_map(|tag| Some(members.get(tag)?.0.seat.clone()))
                .collect();
            for (position, tag) in group.iter().enumerate() {
                if let Some((_, direct)) = members.get_mut(tag) {
                    let seats = seats.clone();
                    send(direct, &Plan { layout, seats, position })?;
                }
            }
        }
        let mut failure = None;
        for (Hello { seat, generation }, direct) in members.values_mut() {
            let done = receive(direct, Some(Direct::SILENCE)).map_err(|e| failed(format!("{}: {e}", seat.host)));
            let said = done.map(|d: Done| d.failure.map(failed)).unwrap_or_else(Some);
            if let Some(f) = said {
                tracing::warn!(generation, tag = seat.tag, error = %f, "not encoded");
                failure.get_or_insert(f);
            }
        }
        failure.map_or(Ok(formed), Err)
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
