//! Lets other hosts of the job read what this one holds: one thread for each connection, nothing is ever written.

use super::{content, Settings};
use crate::jobdir::JobDir;
use crate::nodes::meeting::next_node;
use crate::nodes::seat::part_dir;
use crate::nodes::{addresses, helper};
use crate::Failure;
use belay_redundancy::index::{check_name, check_parts};
use belay_redundancy::layout::blocks;
use belay_redundancy::stream;
use belay_redundancy::{Geometry, Index, Part, Piece, BLOCK};
use belay_storage::flush::yield_processors;
use belay_tree::{Direct, Door, JobKey};
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of an answer, at most.
const MAX_ANSWER: usize = Direct::MAX_MESSAGE - 1;
/// Characters of a checksum in an index, at most.
const SUM_TEXT: u64 = 21;

/// A question; the answer is one message, whose first byte tells an answer (0) from a reason (1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Ask {
    /// Which parts are held: list of tags.
    Held,
    /// The files of a part.
    Parts { tag: u64, generation: u64 },
    /// Checksums of the blocks of the stream in which these files lie.
    Sums {
        tag: u64,
        generation: u64,
        parts: Vec<Part>,
        geometry: Geometry,
    },
    /// So many bytes of a stream, of which these pieces lie in files.
    Data {
        tag: u64,
        generation: u64,
        pieces: Vec<Piece>,
        bytes: usize,
    },
    /// The index of its group.
    Index { tag: u64, generation: u64 },
    /// Bytes of the parity it holds.
    Parity {
        tag: u64,
        generation: u64,
        at: u64,
        bytes: usize,
    },
}

impl Ask {
    /// Whether the answer needs more than the reading of a block.
    fn takes_long(&self) -> bool {
        !matches!(self, Self::Held | Self::Data { .. } | Self::Parity { .. })
    }
}

/// One at a time computes checksums; the others then find them here: what was asked for, and the answer.
type Known = Mutex<Option<(Ask, Vec<u64>)>>;

/// What is held here.
#[derive(Debug)]
pub(super) struct Holder {
    stores: Vec<(u64, PathBuf)>,
    sums: Known,
}

/// A server. Its threads end with the process.
#[derive(Debug)]
pub(crate) struct Server {
    at: Vec<IpAddr>,
    addresses: Vec<String>,
}

impl Server {
    /// Serves the stores (tag, directory) at these addresses of the host.
    pub(crate) fn start(key: JobKey, stores: Vec<(u64, PathBuf)>, at: Vec<IpAddr>) -> Result<Self, Failure> {
        let mut door = Door::open(key, &at)?;
        let addresses = door.addresses();
        let holder = Arc::new(Holder::of(stores));
        let serve = move || {
            yield_processors();
            loop {
                let Some(visitor) = next_node(&mut door, None) else { continue };
                let holder = holder.clone();
                let one = move || attend(visitor, &holder);
                if let Err(e) = std::thread::Builder::new().name("belay-blocks".into()).spawn(one) {
                    tracing::warn!(error = %e, "a visitor could not be served");
                }
            }
        };
        let started = std::thread::Builder::new().name("belay-blocks".into()).spawn(serve);
        started.map_err(|e| Failure::system("start the thread that serves blocks", &e))?;
        Ok(Self { at, addresses })
    }

    pub(crate) fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Whether it was started for these addresses.
    pub(crate) fn is_at(&self, at: &[IpAddr]) -> bool {
        self.at == at
    }
}

/// Answers until the visitor goes.
fn attend(mut visitor: Direct, holder: &Holder) {
    yield_processors();
    while let Ok(question) = visitor.receive_within(None) {
        let answer = match serde_json::from_slice::<Ask>(&question) {
            Ok(q) if q.takes_long() => visitor.busy(|| holder.answer(&q)),
            Ok(q) => holder.answer(&q),
            Err(e) => Err(e.to_string()),
        };
        let answer = match answer {
            Ok(bytes) if bytes.len() > MAX_ANSWER => {
                let why = format!("an answer of {} bytes, {MAX_ANSWER} can be sent", bytes.len());
                [&[1], why.as_bytes()].concat()
            }
            Ok(mut bytes) => {
                bytes.insert(0, 0);
                bytes
            }
            Err(why) => [&[1], why.as_bytes()].concat(),
        };
        if visitor.send(answer).is_err() {
            return;
        }
    }
}

impl Holder {
    pub(super) fn of(stores: Vec<(u64, PathBuf)>) -> Self {
        Self {
            stores,
            sums: Mutex::default(),
        }
    }

    pub(super) fn answer(&self, question: &Ask) -> Result<Vec<u8>, String> {
        let text = |e: &dyn std::fmt::Display| e.to_string();
        let json = |v: serde_json::Result<Vec<u8>>| v.map_err(|e| text(&e));
        let store = |tag: u64| -> Result<&Path, String> {
            let found = self.stores.iter().find(|(t, _)| *t == tag).map(|(_, d)| d.as_path());
            found.ok_or_else(|| format!("part {tag} is not here"))
        };
        let limited = |bytes: usize| {
            if bytes as u64 > BLOCK {
                Err("more than a block".to_owned())
            } else {
                Ok(bytes)
            }
        };
        match question {
            Ask::Held => json(serde_json::to_vec(&self.stores.iter().map(|(t, _)| *t).collect::<Vec<_>>())),
            Ask::Parts { tag, generation } => {
                let parts = content::parts(store(*tag)?, *generation).map_err(|e| text(&e))?;
                json(serde_json::to_vec(&parts))
            }
            Ask::Sums {
                tag,
                generation,
                parts,
                geometry,
            } => {
                let dir = store(*tag)?;
                let mut known = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
                if known.as_ref().is_none_or(|(of, _)| of != question) {
                    check_parts(parts).map_err(|e| text(&e))?;
                    let Geometry { segment, data, .. } = *geometry;
                    let longest = segment > 1 << 50 || data > belay_redundancy::layout::MAX_MEMBERS;
                    // The padding is shorter than the longest stream, and nobody asks for more than that.
                    if longest || segment == 0 || data == 0 || geometry.room() < stream::end(parts) {
                        return Err("segments of another length".into());
                    }
                    // Each takes two bytes of the answer at least.
                    if (data as u64).saturating_mul(blocks(segment)) > MAX_ANSWER as u64 / 2 {
                        return Err("more blocks than can be told of".into());
                    }
                    let sums = content::sums(dir, *generation, parts, *geometry).map_err(|e| text(&e))?;
                    *known = Some((question.clone(), sums));
                }
                json(serde_json::to_vec(&known.as_ref().map(|(_, sums)| sums)))
            }
            Ask::Data {
                tag,
                generation,
                pieces,
                bytes,
            } => {
                let checked = pieces.iter().try_for_each(|p| check_name(&p.name));
                checked.map_err(|e| text(&e))?;
                content::read_pieces(store(*tag)?, *generation, pieces, limited(*bytes)?).map_err(|e| text(&e))
            }
            Ask::Index { tag, generation } => content::read_tail(store(*tag)?, *generation).map_err(|e| text(&e)),
            Ask::Parity {
                tag,
                generation,
                at,
                bytes,
            } => content::read_parity(store(*tag)?, *generation, *at, limited(*bytes)?).map_err(|e| text(&e)),
        }
    }
}

/// The other end: asks a host.
#[derive(Debug)]
pub(crate) struct Peer {
    direct: Direct,
    name: String,
}

impl Peer {
    /// Connects to the server at one of `addresses`, which `name` names in errors.
    pub(crate) fn connect(key: &JobKey, name: &str, addresses: &[String]) -> Result<Self, Failure> {
        let direct = Direct::connect(key, addresses);
        let direct = direct.map_err(|e| Failure::new(Exit::System, format!("reach {name} at {}: {e}", addresses.join(" or "))))?;
        Ok(Self {
            direct,
            name: name.into(),
        })
    }

    fn lost(&self, e: &dyn std::fmt::Display) -> Failure {
        Failure::new(Exit::System, format!("{}: {e}", self.name))
    }

    /// Asks without waiting.
    pub(crate) fn say(&mut self, ask: &Ask) -> Result<(), Failure> {
        let question = serde_json::to_vec(ask).map_err(|e| self.lost(&e))?;
        self.direct.send(question).map_err(|e| self.lost(&e))
    }

    /// Waits for the answer.
    pub(crate) fn hear(&mut self) -> Result<Vec<u8>, Failure> {
        let mut answer = self.direct.receive().map_err(|e| self.lost(&e))?;
        match answer.first() {
            Some(0) => {
                answer.remove(0);
                Ok(answer)
            }
            Some(_) => Err(self.lost(&String::from_utf8_lossy(&answer[1..]))),
            None => Err(self.lost(&"an empty answer")),
        }
    }

    pub(crate) fn ask(&mut self, ask: &Ask) -> Result<Vec<u8>, Failure> {
        self.say(ask)?;
        self.hear()
    }

    /// Waits for an answer in JSON.
    pub(crate) fn hear_json<T: serde::de::DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let answer = self.hear()?;
        serde_json::from_slice(&answer).map_err(|e| self.lost(&e))
    }
}

/// What a server says when it begins.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Held {
    /// Where it can be reached.
    pub(super) addresses: Vec<String>,
    /// The parts of which it has a store.
    pub(super) tags: Vec<u64>,
    /// The parts of each group of which it has an index for the generation that is asked for.
    pub(super) groups: BTreeSet<Vec<u64>>,
}

/// `belay store serve`: says where it can be reached and what it has, for those who need generation `number`, and serves
/// what this host has of the job in `job` until its input ends.
pub fn run(job: &JobDir, settings: &Settings, number: u64) -> Result<(), Failure> {
    let key = JobKey::read(&job.path().join("key"))?;
    let description = job.description()?;
    // The job directory knows the local tiers, too.
    let with_tiers = |(tag, store): (u64, PathBuf)| {
        let part = part_dir(job.path(), tag);
        let leads_here = std::fs::read_link(part.join("gen")).is_ok_and(|to| to.parent() == Some(&*store));
        (tag, if leads_here { part } else { store })
    };
    let stores = super::local::here(settings, job.path(), &description.id);
    let stores: Vec<(u64, PathBuf)> = stores.into_iter().map(with_tiers).collect();
    let indexes = stores.iter().filter_map(|(_, dir)| content::read_index(dir, number).ok());
    let groups = indexes.map(|i| i.members.iter().map(|m| m.tag).collect()).collect();
    let tags = stores.iter().map(|(tag, _)| *tag).collect();
    let at = addresses::addresses(description.config.tree.listen())?;
    let server = Server::start(key, stores, at)?;
    let held = Held {
        addresses: server.addresses().to_vec(),
        tags,
        groups,
    };
    let held = serde_json::to_string(&held).map_err(|e| Failure::new(Exit::Internal, e.to_string()))?;
    helper::answer(&held).map_err(|e| Failure::io("say where to reach this host", &e))?;
    let mut rest = [0; 64];
    while std::io::stdin().read(&mut rest).is_ok_and(|n| n > 0) {}
    Ok(())
}

/// Refuses an index, its own checksums not yet in it, that would be too long for an answer: nobody could fetch it.
pub(crate) fn check_length(index: &Index) -> Result<(), Failure> {
    check_length_below(index, MAX_ANSWER as u64)
}

fn check_length_below(index: &Index, limit: u64) -> Result<(), Failure> {
    let own = blocks(index.segment) * index.layout.parity as u64 * SUM_TEXT;
    let length = index.encode()?.len() as u64 + own;
    if length <= limit {
        return Ok(());
    }
    let why = format!(
        "generation {}: the index of its group would have {length} bytes, and {limit} can be sent; smaller groups have shorter ones (--redundancy SCHEME:GROUP)",
        index.generation
    );
    Err(Failure::new(Exit::NotDurable, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_redundancy::{Layout, Member, Scheme};

    #[test]
    fn more_blocks_than_an_answer_holds_are_not_added_up() {
        let holder = Holder::of(vec![(0, PathBuf::from("/nowhere"))]);
        let ask = |segment| {
            let order = belay_redundancy::Order::Rows;
            let geometry = Geometry {
                order,
                segment,
                data: 100,
            };
            let parts = Vec::new();
            holder.answer(&Ask::Sums {
                tag: 0,
                generation: 1,
                parts,
                geometry,
            })
        };
        assert!(ask(1 << 50).is_err_and(|why| why.contains("more blocks")));
        // Of a host that has nothing there is nothing to be read.
        let sums = ask(1 << 20).unwrap();
        assert!(serde_json::from_slice::<Vec<u64>>(&sums).unwrap().len() >= 100);
    }

    #[test]
    fn an_index_that_nobody_could_fetch_is_refused() {
        let member = |tag| Member {
            tag,
            host: "h".into(),
            parts: Vec::new(),
            sums: vec![u64::MAX; 4],
        };
        let mut index = Index {
            generation: 7,
            layout: Layout::new(Scheme::Xor, 3, 1).unwrap(),
            segment: 2 * BLOCK,
            order: belay_redundancy::Order::Rows,
            position: 0,
            members: (0..3).map(member).collect(),
            sums: Vec::new(),
        };
        let without = index.encode().unwrap().len() as u64;
        index.sums = vec![u64::MAX; 2];
        let with = index.encode().unwrap().len() as u64;
        index.sums.clear();
        assert!(check_length_below(&index, without + 2 * SUM_TEXT).is_ok());
        let failure = check_length_below(&index, with - 1).unwrap_err();
        assert!(
            failure.exit == Exit::NotDurable && failure.message.contains("smaller groups"),
            "{failure}"
        );
    }

    #[test]
    fn who_knows_the_key_is_answered() {
        let key = JobKey::random().unwrap();
        let server = Server::start(key.clone(), vec![(4, PathBuf::from("/nowhere"))], vec![[127, 0, 0, 1].into()]).unwrap();
        let mut peer = Peer::connect(&key, "here", server.addresses()).unwrap();
        peer.say(&Ask::Held).unwrap();
        assert_eq!(peer.hear_json::<Vec<u64>>().unwrap(), [4]);
        assert!(Peer::connect(&JobKey::random().unwrap(), "here", server.addresses()).is_err());
    }
}
