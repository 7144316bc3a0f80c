//! Makes what a part has of a generation whole on this host before a restart: what is missing or damaged comes from the
//! host that had it, or is reconstructed from the group; where that cannot be, from a durable tier.
//!
//! One process at a time does this for a store, under its lock. Nothing whole is touched. Chunks are replaced one by
//! one, the generation's own files all together, each by a rename: a kill in between leaves what the next attempt
//! completes.

use super::again::Healed;
use super::serve::{Ask, Peer};
use super::{content, local, Settings};
use crate::generations::{self, Generation};
use crate::jobdir::JobDir;
use crate::lock::{Lock, LockFile};
use crate::nodes::helper;
use crate::nodes::seat::part_dir;
use crate::{sys, tiers, Failure};
use belay_kernel::dir::{self, Dir};
use belay_redundancy::layout::block_range;
use belay_redundancy::{checksum, code, index, stream, Geometry, Index, Layout, Member, Order, Part, Place};
use belay_tree::{beating, JobKey};
use belay_wire::Exit;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long another one may take to notice that nobody waits for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// `belay store heal`: heals, and says how that went.
pub fn run(job: &JobDir, settings: &Settings, tag: u64, number: u64, sources: &[Vec<String>]) -> Result<(), Failure> {
    let healed = own_store(job, settings, tag, PATIENCE).and_then(|_held| {
        // Who waits for the result hears meanwhile that this process is there. Where nobody waits any more, another one
        // will soon do this work.
        let beat = || {
            helper::beat().inspect_err(|e| {
                sys::say(&format!(
                    "generation {number} of part {tag} stays as it is: nobody waits for it any more: {e}"
                ));
                std::process::exit(Exit::Io.code().into());
            })
        };
        beating(beat, || heal(job, tag, number, sources))
    });
    let healed: Healed = healed.map_err(|f| (f.exit, f.message));
    let text = serde_json::to_string(&healed).map_err(|e| Failure::new(Exit::Internal, e.to_string()))?;
    helper::answer(&text).map_err(|e| Failure::io("say how that went", &e))
}

/// Keeps others who would heal the store of part `tag` out, while the lock lives, and lays it out here. One whose
/// restart has been given up ends when it cannot say any more that it is there: it is waited for, no longer than
/// `limit`.
fn own_store(job: &JobDir, settings: &Settings, tag: u64, limit: Duration) -> Result<Lock, Failure> {
    let id = job.description()?.id;
    // Beside the store, which a new part removes.
    let home = local::home(settings, job.path(), &id)?;
    let dir = Dir::find(&home).map_err(|e| Failure::io(format!("find {}", home.display()), &e))?;
    let file = LockFile::open(&dir, &home, &format!("{tag}.lock"))?;
    let lock = match file.take()? {
        Some(lock) => Ok(lock),
        None => file.take_within(limit)?.ok_or_else(|| {
            let why = format!(
                "part {tag} is being healed on {} by {}; wait until that has ended, or end it, then restart again",
                sys::host(),
                file.holder().word
            );
            Failure::new(Exit::AlreadyRunning, why)
        }),
    }?;
    tiers::describe_part(job, tag)?;
    local::lay(settings, job.path(), (&id, tag), false)?;
    Ok(lock)
}

/// Makes generation `number` of part `tag` whole here, from the cheapest source that is: this disk, the group
/// (`sources` are the servers of the hosts that are left), a durable tier. Returns the bytes that were rebuilt.
fn heal(job: &JobDir, tag: u64, number: u64, sources: &[Vec<String>]) -> Result<u64, Failure> {
    match heal_from_group(job, tag, number, sources) {
        // A tier that cannot be reached may have it whole: an older generation is not used for that.
        Err(f) if f.exit == Exit::Damaged => tiers::fetch_part(job, tag, number)?.ok_or(f),
        other => other,
    }
}

fn heal_from_group(job: &JobDir, tag: u64, number: u64, sources: &[Vec<String>]) -> Result<u64, Failure> {
    let key = JobKey::read(&job.path().join("key"))?;
    let dir = part_dir(job.path(), tag);
    // A generation that was not made redundant, and that is here.
    let Some(mut healer) = Healer::open(&key, dir, tag, number, sources)? else {
        return Ok(0);
    };
    let bad = healer.bad_blocks();
    let rebuilt = match bad.is_empty() && healer.path().is_dir() {
        true => 0,
        false => healer.rebuild(&bad)?,
    };
    generations::unmark(&healer.path());
    Ok(rebuilt)
}

struct Healer {
    dir: PathBuf,
    number: u64,
    index: Index,
    position: usize,
    peers: Vec<Peer>,
    /// Which peers have a store of which part: also hosts that it has left have one, without newer generations.
    holders: BTreeMap<u64, Vec<usize>>,
    /// Indexes of the other members' parity.
    others: BTreeMap<usize, Index>,
    /// Members of whom something was missing or damaged, and why.
    lacking: BTreeMap<usize, String>,
}

impl Healer {
    /// None where nobody knows a group, and the generation is here.
    fn open(key: &JobKey, dir: PathBuf, tag: u64, number: u64, sources: &[Vec<String>]) -> Result<Option<Self>, Failure> {
        let (mut peers, mut holders): (Vec<Peer>, BTreeMap<u64, Vec<usize>>) = Default::default();
        for addresses in sources {
            let asked = Peer::connect(key, "a host that is left", addresses).and_then(|mut p| {
                p.say(&Ask::Held)?;
                Ok((p.hear_json::<Vec<u64>>()?, p))
            });
            match asked {
                Ok((tags, peer)) => {
                    for tag in tags {
                        holders.entry(tag).or_default().push(peers.len());
                    }
                    peers.push(peer);
                }
                Err(e) => sys::say(&e.to_string()),
            }
        }
        let lists = |i: &Index| i.members.iter().position(|m| m.tag == tag);
        let mut found = content::read_index(&dir, number).ok().filter(|i| lists(i).is_some());
        let all = holders.iter().flat_map(|(tag, of)| of.iter().map(move |p| (*tag, *p)));
        for (held, peer) in all {
            if found.is_none() {
                let ask = Ask::Index {
                    tag: held,
                    generation: number,
                };
                let index = peers[peer].ask(&ask).ok().and_then(|t| Index::decode(&t).ok());
                found = index.filter(|i| i.generation == number && lists(i).is_some());
            }
        }
        let index = match found {
            Some(index) => index,
            None if Generation::at(&dir.join("gen"), number).manifest.is_ok() => return Ok(None),
            None => {
                let of = holders.get(&tag).map_or(&[][..], Vec::as_slice);
                let why = format!("generation {number} of part {tag} is not on this host, and no host that answers has it");
                let none = Err(Failure::new(Exit::Damaged, why));
                of.iter()
                    .fold(none, |found, p| found.or_else(|_| Self::alone(tag, number, &mut peers[*p])))?
            }
        };
        let position = lists(&index).unwrap_or(0);
        Ok(Some(Self {
            dir,
            number,
            index,
            position,
            peers,
            holders,
            others: BTreeMap::new(),
            lacking: BTreeMap::new(),
        }))
    }

    /// A generation that was not made redundant: what the one host that has it says.
    fn alone(tag: u64, number: u64, peer: &mut Peer) -> Result<Index, Failure> {
        let lost = |why: &str| {
            let why = format!("generation {number} of part {tag} is not on this host, and cannot be rebuilt: {why}");
            Failure::new(Exit::Damaged, why)
        };
        peer.say(&Ask::Parts { tag, generation: number })?;
        let parts: Vec<Part> = peer.hear_json().map_err(|e| lost(&e.message))?;
        let parts = stream::place(parts, &[], |_| false);
        index::check_parts(&parts)?;
        let layout = Layout {
            members: 1,
            data: 1,
            parity: 0,
        };
        let geometry = Geometry {
            order: Order::Rows,
            segment: layout.segment_bytes(stream::end(&parts)),
            data: layout.data,
        };
        peer.say(&Ask::Sums {
            tag,
            generation: number,
            parts: parts.clone(),
            geometry,
        })?;
        let member = Member {
            tag,
            host: "the host that had it".into(),
            parts,
            sums: peer.hear_json()?,
        };
        Ok(Index {
            generation: number,
            layout,
            segment: geometry.segment,
            order: geometry.order,
            position: 0,
            members: vec![member],
            sums: Vec::new(),
        })
    }

    fn parts(&self) -> &[Part] {
        &self.index.members[self.position].parts
    }

    /// Directory of the generation here.
    fn path(&self) -> PathBuf {
        self.dir.join("gen").join(generations::name(self.number))
    }

    /// The block as it lies here, if it is right.
    fn here(&self, segment: usize, block: u64) -> Option<Vec<u8>> {
        let (at, bytes) = self.index.geometry().range(segment, block);
        let data = content::read(&self.dir, self.number, self.parts(), at, bytes).ok()?;
        (self.index.sum_of(self.position, segment, block) == Some(checksum(&data))).then_some(data)
    }

    /// Blocks (segment, number) that are missing or damaged here.
    fn bad_blocks(&self) -> BTreeSet<(usize, u64)> {
        self.index
            .geometry()
            .all()
            .filter(|(s, b)| self.here(*s, *b).is_none())
            .collect()
    }

    /// What the first of the hosts with a store of part `tag` answers that has it and passes `check`.
    fn ask_any<T>(&mut self, tag: u64, ask: &Ask, check: impl Fn(Vec<u8>) -> Result<T, String>) -> Result<T, String> {
        let mut why = "no host that answers has it".to_owned();
        for &n in self.holders.get(&tag).into_iter().flatten() {
            match self.peers[n].ask(ask).map_err(|e| e.message).and_then(&check) {
                Ok(found) => return Ok(found),
                Err(e) => why = e,
            }
        }
        Err(why)
    }

    /// A block of member `member` from a host that has it.
    fn data_of(&mut self, member: usize, segment: usize, block: u64) -> Result<Vec<u8>, String> {
        let Member { tag, parts, .. } = &self.index.members[member];
        let (tag, (at, bytes)) = (*tag, self.index.geometry().range(segment, block));
        let ask = Ask::Data {
            tag,
            generation: self.number,
            pieces: stream::pieces(parts, at, bytes),
            bytes,
        };
        let sum = self.index.sum_of(member, segment, block);
        self.ask_any(tag, &ask, |data| right(data, sum))
    }

    /// A block of the parity that member `member` holds in `slot`.
    fn parity_of(&mut self, member: usize, slot: usize, block: u64) -> Result<Vec<u8>, String> {
        let (tag, generation) = (self.index.members[member].tag, self.number);
        let (at, bytes) = block_range(self.index.segment, block);
        let at = slot as u64 * self.index.segment + at;
        if member == self.position {
            let own = content::read_index(&self.dir, generation).map_err(|e| e.message)?;
            fits(&self.index, &own, member)?;
            let data = content::read_parity(&self.dir, generation, at, bytes).map_err(|e| e.to_string())?;
            return right(data, own.parity_sum(slot, block));
        }
        if !self.others.contains_key(&member) {
            let ours = self.index.clone();
            let index = self.ask_any(tag, &Ask::Index { tag, generation }, |tail| {
                let index = Index::decode(&tail).map_err(|e| e.to_string())?;
                fits(&ours, &index, member).map(|()| index)
            })?;
            self.others.insert(member, index);
        }
        let sum = self.others.get(&member).and_then(|i| i.parity_sum(slot, block));
        let ask = Ask::Parity {
            tag,
            generation,
            at,
            bytes,
        };
        self.ask_any(tag, &ask, |data| right(data, sum))
    }

    /// A block of this part, from here, from a host that has it, or reconstructed.
    fn block(&mut self, segment: usize, block: u64) -> Result<Vec<u8>, Failure> {
        if let Some(data) = self.here(segment, block) {
            return Ok(data);
        }
        match self.data_of(self.position, segment, block) {
            Ok(data) => return Ok(data),
            Err(why) => self.note(self.position, why),
        }
        let layout = self.index.layout;
        let stripe = layout.stripe_of(self.position, segment);
        let mut stripe_blocks = Vec::new();
        for (member, segment) in layout.data_of(stripe) {
            let data = match self.position == member {
                true => None,
                false => self
                    .data_of(member, segment, block)
                    .map_err(|why| self.note(member, why))
                    .ok(),
            };
            stripe_blocks.push(data);
        }
        for (slot, member) in layout.parity_of(stripe).into_iter().enumerate() {
            // What is not needed is not read.
            let data = match stripe_blocks.iter().flatten().count() >= layout.data {
                true => None,
                false => self.parity_of(member, slot, block).map_err(|why| self.note(member, why)).ok(),
            };
            stripe_blocks.push(data);
        }
        let all = code::reconstruct(&stripe_blocks, layout.data).map_err(|_| self.too_many())?;
        let data = all.into_iter().nth(segment).filter(|d| {
            let sum = self.index.sum_of(self.position, segment, block);
            sum == Some(checksum(d))
        });
        data.ok_or_else(|| self.too_many())
    }

    /// Something of member `member` cannot be had.
    fn note(&mut self, member: usize, why: String) {
        self.lacking.entry(member).or_insert(why);
    }

    fn too_many(&self) -> Failure {
        let host = |m: usize| self.index.members[m].host.as_str();
        let layout = self.index.layout;
        let group: Vec<&str> = (0..layout.members).map(host).collect();
        let lacking: Vec<String> = self.lacking.iter().map(|(m, why)| format!("{} ({why})", host(*m))).collect();
        let why = format!(
            "generation {}: what {} held cannot be rebuilt: of its group ({}), what {} held is missing or damaged, and {} of them may be; bring one of those hosts back, with its --local-dir",
            self.number,
            self.index.members[self.position].host,
            group.join(", "),
            lacking.join(", "),
            layout.parity
        );
        Failure::new(Exit::Damaged, why)
    }

    /// Writes every file anew that one of the blocks `bad` belongs to.
    fn rebuild(&mut self, bad: &BTreeSet<(usize, u64)>) -> Result<u64, Failure> {
        let geometry = self.index.geometry();
        // Where they begin and end, in the order of the stream.
        let mut ranges: Vec<_> = bad.iter().map(|(s, b)| geometry.range(*s, *b)).collect();
        ranges.sort_unstable();
        let is_bad = |part: &Part| {
            let first = ranges.partition_point(|(at, bytes)| at + *bytes as u64 <= part.at);
            part.bytes > 0 && ranges.get(first).is_some_and(|(at, _)| *at < part.at + part.bytes)
        };
        let path_of = |part: &Part| content::path_of(&self.dir, self.number, (part.place, &part.name));
        let is_lost = |part: &Part| is_bad(part) || std::fs::metadata(path_of(part)).map_or(true, |m| m.len() != part.bytes);
        let parts: Vec<(Part, bool)> = self.parts().iter().map(|part| (part.clone(), is_lost(part))).collect();
        let gen = self.dir.join("gen");
        let (mut written, mut places) = (0, BTreeSet::new());
        for (part, _) in parts.iter().filter(|(p, lost)| p.place == Place::Chunks && *lost) {
            let path = content::path_of(&self.dir, self.number, (part.place, &part.name));
            let new = path.with_file_name(format!(".tmp-{}", part.name));
            written += self.copy(part, &new)?;
            std::fs::rename(&new, &path).map_err(|e| Failure::io(format!("rebuild {}", path.display()), &e))?;
            // At home, or in a local tier.
            places.extend(path.parent().map(Path::to_owned));
        }
        places.iter().try_for_each(|place| sync(place))?;
        if parts.iter().any(|(p, lost)| p.place == Place::Generation && *lost) {
            let new = gen.join(format!(".tmp-heal-{}", generations::name(self.number)));
            let path = self.path();
            let fail = |e| Failure::io(format!("rebuild {}", path.display()), &e);
            match std::fs::remove_dir_all(&new) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(fail(e)),
                _ => DirBuilder::new().mode(0o700).create(&new).map_err(fail)?,
            }
            for (part, _) in parts.iter().filter(|(p, _)| p.place == Place::Generation) {
                written += self.copy(part, &new.join(&part.name))?;
            }
            sync(&new)?;
            dir::replace(&new, &path).map_err(fail)?;
        }
        sync(&gen)?;
        Ok(written)
    }

    /// Writes a file of the stream to the new file `to`, durably.
    fn copy(&mut self, part: &Part, to: &Path) -> Result<u64, Failure> {
        let fail = |e: std::io::Error| Failure::io(format!("write {}", to.display()), &e);
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(to)
            .map_err(fail)?;
        let geometry = self.index.geometry();
        let (mut at, end) = (part.at, part.at + part.bytes);
        while at < end {
            let (segment, block) = geometry.block_at(at);
            let (start, bytes) = geometry.range(segment, block);
            let data = self.block(segment, block)?;
            let skip = usize::try_from(at - start).unwrap_or(0);
            let n = (bytes - skip).min(usize::try_from(end - at).unwrap_or(usize::MAX));
            file.write_all(&data[skip..skip + n]).map_err(fail)?;
            at += n as u64;
        }
        file.sync_all().map_err(fail)?;
        Ok(part.bytes)
    }
}

/// Whether index `i` is that of the same group as `ours`, in member `member`'s hand. Where a member was when it was made
/// does not matter: a group that is encoded again after a restart elsewhere gets the same parity.
fn fits(ours: &Index, i: &Index, member: usize) -> Result<(), String> {
    let alike = |(a, b): (&Member, &Member)| (a.tag, &a.parts, &a.sums) == (b.tag, &b.parts, &b.sums);
    let members = i.members.len() == ours.members.len() && i.members.iter().zip(&ours.members).all(alike);
    let same = i.position == member && i.generation == ours.generation && i.layout == ours.layout && members;
    same.then_some(()).ok_or_else(|| "its parity is that of another group".into())
}

/// `data`, if its checksum is `sum`.
fn right(data: Vec<u8>, sum: Option<u64>) -> Result<Vec<u8>, String> {
    if sum == Some(checksum(&data)) {
        return Ok(data);
    }
    Err("damaged".into())
}

fn sync(dir: &Path) -> Result<(), Failure> {
    let done = File::open(dir).and_then(|d| d.sync_all());
    done.map_err(|e| Failure::io(format!("sync {}", dir.display()), &e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobdir::Description;
    use crate::redundancy::Redundancy;

    #[test]
    fn a_store_is_healed_by_one_at_a_time_who_is_named() {
        let base = std::env::temp_dir().join(format!("belay-heal-{}", std::process::id()));
        std::fs::create_dir(&base).unwrap();
        let job = JobDir::create(&base.join("job")).unwrap();
        job.describe(&Description::new(None, vec!["true".into()])).unwrap();
        std::fs::create_dir(base.join("disk")).unwrap();
        let r = Redundancy {
            local: Some(base.join("disk")),
            ..Redundancy::parse("xor").unwrap()
        };
        let settings = r.settings().unwrap().unwrap();
        let own = |limit| own_store(&job, &settings, 0, limit);
        let first = own(Duration::ZERO).unwrap();
        let refused = own(Duration::from_millis(20)).unwrap_err();
        let named = format!("process {} on {}", std::process::id(), sys::host());
        assert!(
            refused.exit == Exit::AlreadyRunning && refused.message.contains(&named),
            "{refused}"
        );
        drop(first);
        own(Duration::ZERO).unwrap();
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_generation_takes_the_place_of_another_or_of_none() {
        let base = std::env::temp_dir().join(format!("belay-replace-{}", std::process::id()));
        let (new, old) = (base.join(".tmp-heal-1"), base.join("1"));
        std::fs::create_dir(&base).unwrap();
        for n in ["a", "b"] {
            std::fs::create_dir(&new).unwrap();
            std::fs::write(new.join(n), "").unwrap();
            dir::replace(&new, &old).unwrap();
            let names: Vec<_> = std::fs::read_dir(&old).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(names == [n] && !new.exists(), "{names:?}");
        }
        std::fs::remove_dir_all(base).unwrap();
    }
}
