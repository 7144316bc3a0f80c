//! One host's share of making a generation redundant: it reads the blocks of the others in its group and writes parity.

use super::content::{self, parity_file, Unfit, PARITY};
use super::serve::{self, Ask, Peer};
use crate::{generations, Failure};
use belay_image::sections::create_private;
use belay_redundancy::code::Encoder;
use belay_redundancy::layout::{block_range, blocks};
use belay_redundancy::{checksum, index, Index, Layout, Member, Part, RedundancyError};
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
    /// Set where what lies here is not what was written.
    pub(crate) rotten: &'a AtomicBool,
}

impl Work<'_> {
    /// Writes this host's parity; it is complete and durable when this returns.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        let mut peers = Vec::new();
        for seat in self.seats {
            peers.push(Peer::connect(self.key, &seat.host, &seat.addresses)?);
        }
        let generation = self.generation;
        let each = |peers: &mut Vec<Peer>, ask: &dyn Fn(u64) -> Ask| -> Result<(), Failure> {
            let mut asked = peers.iter_mut().zip(self.seats);
            asked.try_for_each(|(p, seat)| p.say(&ask(seat.tag)))
        };
        each(&mut peers, &|tag| Ask::Parts { tag, generation })?;
        let streams: Vec<Vec<Part>> = peers.iter_mut().map(Peer::hear_json).collect::<Result<_, _>>()?;
        streams.iter().try_for_each(|parts| index::check_parts(parts))?;
        let member = |(seat, parts): (&Seat, Vec<Part>)| Member {
            tag: seat.tag,
            host: seat.host.clone(),
            parts,
            sums: Vec::new(),
        };
        let mut members: Vec<Member> = self.seats.iter().zip(streams).map(member).collect();
        let longest = members.iter().map(Member::bytes).max().unwrap_or(0);
        let (segment, data) = (self.layout.segment_bytes(longest), self.layout.data);
        each(&mut peers, &|tag| Ask::Sums {
            tag,
            generation,
            segment,
            data,
        })?;
        let heard: Vec<Result<Vec<u64>, Failure>> = peers.iter_mut().map(Peer::hear_json).collect();
        // The own server cannot say what has rotted: that is looked for here, also where it has no answer.
        let of_others = heard.iter().enumerate().filter(|(n, _)| *n != self.position);
        if let Some((_, Err(failure))) = of_others.into_iter().find(|(_, sums)| sums.is_err()) {
            return Err(failure.clone());
        }
        // What has rotted here must not count as redundant; the others look at theirs. Not while they answer: a
        // connection on which nobody listens is given up.
        match content::checked_sums(self.dir, generation, (segment, data)) {
            Ok(own) if matches!(heard.get(self.position), Some(Ok(sums)) if *sums == own) => {}
            Ok(_) => {
                let why = || Failure::new(Exit::Damaged, format!("generation {generation} changes while it is read"));
                let failed = heard.into_iter().nth(self.position).and_then(Result::err);
                return Err(failed.unwrap_or_else(why));
            }
            Err(Unfit::Unread(failure)) => return Err(failure),
            Err(Unfit::Rotten(failure)) => {
                self.rotten.store(true, Ordering::Relaxed);
                let why = format!("{failure}; the next checkpoint shares nothing with those before");
                return Err(Failure::new(failure.exit, why));
            }
        }
        for (member, sums) in members.iter_mut().zip(heard) {
            member.sums = sums?;
        }
        let index = Index {
            generation,
            layout: self.layout,
            segment,
            position: self.position,
            members,
            sums: Vec::new(),
        };
        self.write(index, &mut peers)
    }

    fn write(&self, mut index: Index, peers: &mut [Peer]) -> Result<(), Failure> {
        serve::check_length(&index)?;
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
                let data = self.data(&index, stripe, block, peers)?;
                let parity = encoder.encode(&data)?;
                let missing = || RedundancyError::Code(format!("a stripe has no parity block {slot}"));
                let own = parity.block(slot).ok_or_else(missing)?;
                index.sums.push(checksum(own));
                out.write_all(own).map_err(fail)?;
            }
        }
        out.write_all(&index.encode()?).map_err(fail)?;
        let file = out.into_inner().map_err(|e| fail(e.into_error()))?;
        file.sync_all().map_err(fail)?;
        std::fs::rename(&new, &path).map_err(fail)?;
        File::open(self.dir.join(PARITY)).and_then(|d| d.sync_all()).map_err(fail)?;
        // What has been written is what a restart will accept.
        content::read_index(self.dir, self.generation).map(drop)
    }

    /// One block of each member that has data in the stripe.
    fn data(&self, index: &Index, stripe: usize, block: u64, peers: &mut [Peer]) -> Result<Vec<Vec<u8>>, Failure> {
        let of = self.layout.data_of(stripe);
        let (at, bytes) = block_range(index.segment, block);
        for &(member, segment) in &of {
            peers[member].say(&Ask::Data {
                tag: self.seats[member].tag,
                generation: self.generation,
                at: segment as u64 * index.segment + at,
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
