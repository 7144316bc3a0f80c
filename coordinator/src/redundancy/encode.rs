//! One host's share of making a generation redundant: it reads the blocks of the others in its group and writes parity.
//! Parity of blocks that are the same in a generation before is taken over from there.

use super::content::{self, Unfit};
use super::parity::{parity_file, PARITY};
use super::serve::{self, Ask, Peer};
use crate::{generations, Failure};
use belay_image::sections::create_private;
use belay_redundancy::code::Encoder;
use belay_redundancy::layout::{block_range, blocks};
use belay_redundancy::{checksum, index, stream, Geometry, Index, Layout, Member, Order, Part, Place, RedundancyError};
use belay_tree::JobKey;
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// A part in a round, and where its server is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seat {
    pub(crate) tag: u64,
    pub(crate) host: String,
    pub(crate) addresses: Vec<String>,
}

/// What is to be encoded, as a member of the group sees it.
pub(crate) struct Work<'a> {
    pub(crate) key: &'a JobKey,
    /// The job directory of this part.
    pub(crate) dir: &'a Path,
    pub(crate) generation: u64,
    pub(crate) layout: Layout,
    pub(crate) seats: &'a [Seat],
    /// This host's seat.
    pub(crate) position: usize,
    /// A redundant generation: what is in both lies where it lay. The same one where it is encoded again.
    pub(crate) before: Option<u64>,
    /// Set where what lies here is not what was written.
    pub(crate) rotten: &'a AtomicBool,
}

/// What has been written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Encoded {
    /// Checksum of what the group has, as its members must all see it.
    pub(crate) group: u64,
    /// Bytes of parity that were encoded.
    pub(crate) bytes: u64,
    /// Bytes of parity that were taken over.
    pub(crate) kept: u64,
}

impl Work<'_> {
    /// Writes this host's parity; it is complete and durable when this returns.
    pub(crate) fn run(&self) -> Result<Encoded, Failure> {
        let mut peers = Vec::new();
        for seat in self.seats {
            peers.push(Peer::connect(self.key, &seat.host, &seat.addresses)?);
        }
        let generation = self.generation;
        self.each(&mut peers, |tag, _| Ask::Parts { tag, generation })?;
        let files: Vec<Vec<Part>> = peers.iter_mut().map(Peer::hear_json).collect::<Result<_, _>>()?;
        let before = self.index_before(&mut peers)?;
        let streams = self.streams(files, before.as_ref());
        streams.iter().try_for_each(|parts| index::check_parts(parts))?;
        let again = before.as_ref().filter(|b| b.generation == generation);
        let longest = streams.iter().map(|parts| stream::end(parts)).max().unwrap_or(0);
        let geometry = Geometry {
            order: again.map_or(Order::Rows, |b| b.order),
            segment: self.layout.segment_bytes(longest),
            data: self.layout.data,
        };
        self.each(&mut peers, |tag, position| Ask::Sums {
            tag,
            generation,
            parts: streams[position].clone(),
            geometry,
        })?;
        let heard: Vec<Result<Vec<u64>, Failure>> = peers.iter_mut().map(Peer::hear_json).collect();
        // The own server cannot say what has rotted: that is looked for here, also where it has no answer.
        let of_others = heard.iter().enumerate().filter(|(n, _)| *n != self.position);
        if let Some((_, Err(failure))) = of_others.into_iter().find(|(_, sums)| sums.is_err()) {
            return Err(failure.clone());
        }
        // What has rotted here must not count as redundant; the others look at theirs. Not while they answer: a
        // connection on which nobody listens is given up.
        match content::checked_sums(self.dir, generation, &streams[self.position], geometry) {
            Ok(own) if matches!(heard.get(self.position), Some(Ok(sums)) if *sums == own) => {}
            Ok(_) => {
                let failed = heard.into_iter().nth(self.position).and_then(Result::err);
                return Err(failed.unwrap_or_else(|| content::changes(generation)));
            }
            Err(Unfit::Unread(failure)) => return Err(failure),
            Err(Unfit::Rotten(failure)) => {
                self.rotten.store(true, Ordering::Relaxed);
                generations::Generation::at(&self.dir.join("gen"), generation).is_damaged(&failure.to_string());
                let why = format!("{failure}; the next checkpoint shares nothing with those before");
                return Err(Failure::new(failure.exit, why));
            }
        }
        let mut members = Vec::new();
        for ((seat, parts), sums) in self.seats.iter().zip(streams).zip(heard) {
            members.push(Member {
                tag: seat.tag,
                host: seat.host.clone(),
                parts,
                sums: sums?,
            });
        }
        let index = Index {
            generation,
            layout: self.layout,
            segment: geometry.segment,
            order: geometry.order,
            position: self.position,
            members,
            sums: Vec::new(),
        };
        // Where it is this host's own file, with the parity.
        let kept = before.filter(|b| b.position == self.position);
        self.write(index, kept.as_ref(), &mut peers)
    }

    /// Asks each member, by its tag and its place in the group, without waiting.
    fn each(&self, peers: &mut [Peer], ask: impl Fn(u64, usize) -> Ask) -> Result<(), Failure> {
        let mut asked = peers.iter_mut().zip(self.seats).enumerate();
        asked.try_for_each(|(position, (peer, seat))| peer.say(&ask(seat.tag, position)))
    }

    /// What this group has of the generation before, of which every member has an index; it is the same for all of them.
    fn index_before(&self, peers: &mut [Peer]) -> Result<Option<Index>, Failure> {
        let Some(generation) = self.before else { return Ok(None) };
        let is_ours = |i: &Index| {
            let tags = i.members.iter().map(|m| m.tag);
            i.generation == generation && i.layout == self.layout && tags.eq(self.seats.iter().map(|s| s.tag))
        };
        let own = content::read_index(self.dir, generation).ok();
        let own = own.filter(|i| is_ours(i) && i.position == self.position);
        if own.is_some() {
            return Ok(own);
        }
        self.each(peers, |tag, _| Ask::Index { tag, generation })?;
        let mut found = None;
        for peer in peers {
            // Who has none says so.
            let index = peer.hear().ok().and_then(|tail| Index::decode(&tail).ok());
            found = found.or(index.filter(is_ours));
        }
        Ok(found)
    }

    /// The streams of all members, whose files these are.
    fn streams(&self, files: Vec<Vec<Part>>, before: Option<&Index>) -> Vec<Vec<Part>> {
        let again = before.is_some_and(|b| b.generation == self.generation);
        let was = |position: usize| before.and_then(|b| b.members.get(position)).map_or(&[][..], |m| &m.parts);
        let stay = |place: Place| again || place == Place::Chunks;
        let placed = files.into_iter().enumerate();
        placed.map(|(n, files)| stream::place(files, was(n), stay)).collect()
    }

    fn write(&self, mut index: Index, before: Option<&Index>, peers: &mut [Peer]) -> Result<Encoded, Failure> {
        serve::check_length(&index)?;
        let group = serde_json::to_vec(&index.members).map_err(|e| Failure::new(Exit::Internal, e.to_string()))?;
        let mut encoded = Encoded {
            group: checksum(&group),
            ..Encoded::default()
        };
        let path = parity_file(self.dir, self.generation);
        let new = self
            .dir
            .join(PARITY)
            .join(format!(".tmp-{}", generations::name(self.generation)));
        let fail = |e: std::io::Error| Failure::io(format!("write {}", path.display()), &e);
        let file = create_private(&new)?;
        let mut out = BufWriter::new(file);
        let mut encoder = Encoder::new(self.layout.parity);
        for slot in 0..self.layout.parity {
            let stripe = self.layout.parity_stripe(self.position, slot);
            for block in 0..blocks(index.segment) {
                if let Some(kept) = before.and_then(|b| self.kept(&index, b, (slot, stripe, block))) {
                    index.sums.push(checksum(&kept));
                    out.write_all(&kept).map_err(fail)?;
                    encoded.kept += kept.len() as u64;
                    continue;
                }
                let data = self.data(&index, stripe, block, peers)?;
                let parity = encoder.encode(&data)?;
                let missing = || RedundancyError::Code(format!("a stripe has no parity block {slot}"));
                let own = parity.block(slot).ok_or_else(missing)?;
                index.sums.push(checksum(own));
                out.write_all(own).map_err(fail)?;
                encoded.bytes += own.len() as u64;
            }
        }
        out.write_all(&index.encode()?).map_err(fail)?;
        let file = out.into_inner().map_err(|e| fail(e.into_error()))?;
        file.sync_all().map_err(fail)?;
        std::fs::rename(&new, &path).map_err(fail)?;
        File::open(self.dir.join(PARITY)).and_then(|d| d.sync_all()).map_err(fail)?;
        // What has been written is what a restart will accept.
        content::read_index(self.dir, self.generation).map(|_| encoded)
    }

    /// The block of parity of the generation before, where it is that of the same data and whole.
    fn kept(&self, index: &Index, before: &Index, (slot, stripe, block): (usize, usize, u64)) -> Option<Vec<u8>> {
        let (at, bytes) = block_range(index.segment, block);
        if block_range(before.segment, block).1 != bytes {
            return None;
        }
        let sum = |i: &Index, (member, segment): (usize, usize)| i.sum_of(member, segment, block);
        let mut data = self.layout.data_of(stripe).into_iter();
        if !data.all(|of| sum(index, of).is_some() && sum(index, of) == sum(before, of)) {
            return None;
        }
        let at = slot as u64 * before.segment + at;
        let parity = content::read_parity(self.dir, before.generation, at, bytes).ok()?;
        (before.parity_sum(slot, block) == Some(checksum(&parity))).then_some(parity)
    }

    /// One block of each member that has data in the stripe.
    fn data(&self, index: &Index, stripe: usize, block: u64, peers: &mut [Peer]) -> Result<Vec<Vec<u8>>, Failure> {
        let of = self.layout.data_of(stripe);
        let (_, bytes) = block_range(index.segment, block);
        for &(member, segment) in &of {
            let (at, bytes) = index.geometry().range(segment, block);
            peers[member].say(&Ask::Data {
                tag: self.seats[member].tag,
                generation: self.generation,
                pieces: stream::pieces(&index.members[member].parts, at, bytes),
                bytes,
            })?;
        }
        let mut out = Vec::new();
        for (member, segment) in of {
            let data = peers[member].hear()?;
            if data.len() != bytes || index.sum_of(member, segment, block) != Some(checksum(&data)) {
                let host = &self.seats[member].host;
                let why = format!(
                    "{host}: generation {} changes while it is read, or is damaged",
                    self.generation
                );
                return Err(Failure::new(Exit::Damaged, why));
            }
            out.push(data);
        }
        Ok(out)
    }
}
