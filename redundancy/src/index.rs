//! What a host keeps of its group for one generation.
//!
//! ```text
//! 0   parity blocks, slot after slot     parity * segment
//! …   index, JSON                        length
//! …   magic "BELAYPAR"                   8
//!     format version                     u32
//!     length of the index                u64
//!     XXH3-64 of all from the index on   u64
//! ```
//! All numbers are little endian. The index names every file of every member and has the checksum of every block, so
//! that whoever is left can make a lost member's files again and notices each damaged block. The file is written under
//! a temporary name and never changed once it has its own.

use crate::layout::{blocks, Layout};
use crate::part::Part;
use crate::stream::{self, Geometry, Order};
use crate::{checksum, RedundancyError, ALIGN};
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"BELAYPAR";
/// Version of the format. Version 1 has no `at`, files lie one after the other there, and the order of the blocks is
/// [`Order::Segments`].
const VERSION: u32 = 2;
/// Bytes behind the index.
pub const FOOTER: usize = 28;
/// Longest index that is read.
pub const MAX_INDEX: u64 = 1 << 30;
/// A segment that is longer (1 PiB) is refused.
const MAX_SEGMENT: u64 = 1 << 50;

/// A member of the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Number of its part of the job.
    pub tag: u64,
    /// Its host at that time.
    pub host: String,
    /// Its stream, in its order.
    pub parts: Vec<Part>,
    /// Checksums of the blocks of its segments, segment after segment.
    pub sums: Vec<u64>,
}

/// The index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// The generation.
    pub generation: u64,
    /// Who holds what.
    pub layout: Layout,
    /// Length of a segment.
    pub segment: u64,
    /// How the blocks of the streams lie in them.
    #[serde(skip, default = "newest_order")]
    pub order: Order,
    /// Which member holds this file.
    pub position: usize,
    /// All members.
    pub members: Vec<Member>,
    /// Checksums of the parity blocks in this file, slot after slot.
    pub sums: Vec<u64>,
}

impl Member {
    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |n, p| n.saturating_add(p.bytes))
    }
}

fn newest_order() -> Order {
    Order::Rows
}

impl Index {
    /// Where a member's stream lies in its segments.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            order: self.order,
            segment: self.segment,
            data: self.layout.data,
        }
    }

    /// Bytes of parity in front of the index.
    pub fn parity_bytes(&self) -> u64 {
        self.segment * self.layout.parity as u64
    }

    /// Checksum of block `block` of segment `segment` of member `member`.
    pub fn sum_of(&self, member: usize, segment: usize, block: u64) -> Option<u64> {
        let at = segment as u64 * blocks(self.segment) + block;
        self.members.get(member)?.sums.get(usize::try_from(at).ok()?).copied()
    }

    /// Checksum of block `block` of parity slot `slot` of this file.
    pub fn parity_sum(&self, slot: usize, block: u64) -> Option<u64> {
        let at = slot as u64 * blocks(self.segment) + block;
        self.sums.get(usize::try_from(at).ok()?).copied()
    }

    /// What follows the parity.
    pub fn encode(&self) -> Result<Vec<u8>, RedundancyError> {
        let mut out = serde_json::to_vec(self).map_err(|e| RedundancyError::Damaged(e.to_string()))?;
        let length = out.len() as u64;
        out.extend_from_slice(MAGIC);
        let version = if self.order == newest_order() { VERSION } else { VERSION - 1 };
        out.extend_from_slice(&version.to_le_bytes());
        out.extend_from_slice(&length.to_le_bytes());
        let sum = checksum(&out);
        out.extend_from_slice(&sum.to_le_bytes());
        Ok(out)
    }

    /// Length of the index, from the last [`FOOTER`] bytes of a file of `bytes` bytes.
    pub fn length(footer: &[u8], bytes: u64) -> Result<u64, RedundancyError> {
        let damaged = |why: &str| RedundancyError::Damaged(why.into());
        let footer: &[u8; FOOTER] = footer.try_into().map_err(|_| damaged("too short"))?;
        if footer[..8] != *MAGIC {
            return Err(damaged("no blocks of a group"));
        }
        let number = |at: usize, n: usize| {
            let mut word = [0; 8];
            word[..n].copy_from_slice(&footer[at..at + n]);
            u64::from_le_bytes(word)
        };
        if !(1..=u64::from(VERSION)).contains(&number(8, 4)) {
            return Err(damaged(&format!(
                "format {}, this belay reads formats 1 to {VERSION}",
                number(8, 4)
            )));
        }
        let length = number(12, 8);
        if length > MAX_INDEX || length.saturating_add(FOOTER as u64) > bytes {
            return Err(damaged("its index is longer than the file"));
        }
        Ok(length)
    }

    /// Decodes `tail`, everything behind the parity.
    pub fn decode(tail: &[u8]) -> Result<Self, RedundancyError> {
        let damaged = |why: &str| RedundancyError::Damaged(why.into());
        let footer = tail.len().checked_sub(FOOTER).ok_or_else(|| damaged("too short"))?;
        if Self::length(&tail[footer..], tail.len() as u64)? != footer as u64 {
            return Err(damaged("its index has another length than its footer says"));
        }
        let (body, sum) = tail.split_last_chunk::<8>().ok_or_else(|| damaged("too short"))?;
        if checksum(body) != u64::from_le_bytes(*sum) {
            return Err(damaged("checksum of its index does not match"));
        }
        let mut index: Self = serde_json::from_slice(&tail[..footer]).map_err(|e| RedundancyError::Damaged(e.to_string()))?;
        if tail[footer + 8..footer + 12] == 1u32.to_le_bytes() {
            index.order = Order::Segments;
            index.members.iter_mut().for_each(|m| one_after_the_other(&mut m.parts));
        }
        index.check().map(|()| index)
    }

    fn check(&self) -> Result<(), RedundancyError> {
        let damaged = |why: String| Err(RedundancyError::Damaged(why));
        self.layout.check()?;
        if self.members.len() != self.layout.members || self.position >= self.members.len() {
            return damaged("it does not list the members of its group".into());
        }
        if self.segment == 0 || self.segment > MAX_SEGMENT || !self.segment.is_multiple_of(ALIGN) {
            return damaged(format!("segments of {} bytes", self.segment));
        }
        let in_segment = blocks(self.segment);
        let has = |sums: &[u64], segments: usize| sums.len() as u64 == in_segment * segments as u64;
        if !has(&self.sums, self.layout.parity) || !self.members.iter().all(|m| has(&m.sums, self.layout.data)) {
            return damaged("it has not one checksum for each block".into());
        }
        self.members.iter().try_for_each(|m| check_parts(&m.parts))?;
        let room = self.geometry().room();
        if self.members.iter().any(|m| stream::end(&m.parts) > room) {
            return damaged("a member's files do not fit in its segments".into());
        }
        Ok(())
    }
}

/// Places files as format 1 does.
fn one_after_the_other(parts: &mut [Part]) {
    let mut end = 0u64;
    for part in parts {
        part.at = end;
        end = end.saturating_add(part.bytes);
    }
}

/// Refuses a file name that leads elsewhere.
pub fn check_name(name: &str) -> Result<(), RedundancyError> {
    if name.is_empty() || name.contains(['/', '\0']) || name.starts_with('.') {
        return Err(RedundancyError::Damaged("a file name leaves its directory".into()));
    }
    Ok(())
}

/// Refuses a stream that another host has told of whose files would lie elsewhere or on top of each other, or which
/// would be too long.
pub fn check_parts(parts: &[Part]) -> Result<(), RedundancyError> {
    let mut end = 0;
    for part in parts {
        check_name(&part.name)?;
        if part.at < end {
            return Err(RedundancyError::Damaged("its files lie on top of each other".into()));
        }
        end = part.at.saturating_add(part.bytes);
        if end > MAX_SEGMENT {
            return Err(RedundancyError::Damaged("its files are too long".into()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::Place;
    use crate::Scheme;

    fn sample() -> Index {
        let layout = Layout::new(Scheme::Xor, 3, 1).unwrap();
        let member = |tag: u64| Member {
            tag,
            host: format!("h{tag}"),
            parts: vec![Part {
                place: Place::Generation,
                name: "manifest.json".into(),
                bytes: 100 * tag,
                at: 0,
            }],
            sums: vec![tag, u64::MAX],
        };
        Index {
            generation: 7,
            layout,
            segment: 128,
            order: Order::Rows,
            position: 1,
            members: (0..3).map(member).collect(),
            sums: vec![5],
        }
    }

    #[test]
    fn an_index_comes_back_and_no_flipped_bit_or_cut_passes() {
        let index = sample();
        let good = index.encode().unwrap();
        assert_eq!(Index::decode(&good).unwrap(), index);
        let footer = &good[good.len() - FOOTER..];
        assert_eq!(
            Index::length(footer, good.len() as u64).unwrap(),
            (good.len() - FOOTER) as u64
        );
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(Index::decode(&bad).is_err(), "bit {at}");
        }
        for cut in 0..good.len() {
            assert!(Index::decode(&good[..cut]).is_err(), "length {cut}");
        }
    }

    #[test]
    fn an_index_of_before_is_read() {
        let mut old = sample();
        old.order = Order::Segments;
        old.members[1].parts.push(Part {
            place: Place::Chunks,
            name: "chunk".into(),
            bytes: 7,
            at: 100,
        });
        let good = old.encode().unwrap();
        // Format 1 said nothing of places.
        let (text, footer) = good.split_at(good.len() - FOOTER);
        let text = String::from_utf8(text.to_vec())
            .unwrap()
            .replace(",\"at\":100", "")
            .replace(",\"at\":0", "");
        let mut tail = text.into_bytes();
        let length = tail.len() as u64;
        tail.extend_from_slice(&footer[..12]);
        tail.extend_from_slice(&length.to_le_bytes());
        tail.extend_from_slice(&checksum(&tail).to_le_bytes());
        assert!(tail.len() < good.len() && footer[8..12] == [1, 0, 0, 0]);
        assert_eq!(Index::decode(&tail).unwrap(), old);
    }

    #[test]
    fn an_index_that_does_not_fit_together_is_refused() {
        let changes: [fn(&mut Index); 12] = [
            |i| i.position = 3,
            |i| drop(i.members.pop()),
            |i| i.segment = 100,
            |i| i.segment = 0,
            |i| i.segment = 1 << 60,
            |i| i.layout.data = 3,
            |i| i.layout.parity = usize::MAX,
            |i| i.sums.clear(),
            |i| i.members[0].parts[0].name = "../x".into(),
            |i| i.members[0].parts[0].bytes = u64::MAX,
            |i| i.members[0].parts[0].at = 257,
            |i| i.members[1].parts = [&i.members[1].parts[..]; 2].concat(),
        ];
        for (n, change) in changes.iter().enumerate() {
            let mut bad = sample();
            change(&mut bad);
            assert!(Index::decode(&bad.encode().unwrap()).is_err(), "change {n}");
        }
    }

    #[test]
    fn streams_that_no_index_could_have_are_refused() {
        let part = |name: &str, bytes| Part {
            place: Place::Chunks,
            name: name.into(),
            bytes,
            at: 0,
        };
        let behind = |at, p: Part| Part { at, ..p };
        assert!(check_parts(&[part("a", 1), behind(1, part("b", MAX_SEGMENT - 1))]).is_ok());
        assert!(check_parts(&[part("a", 2), behind(1, part("b", 1))]).is_err());
        let too_long = [part("a", 1), behind(u64::MAX, part("b", u64::MAX))];
        for bad in ["", "..", "../x", "a/b", "a\0"]
            .map(|name| vec![part(name, 1)])
            .iter()
            .chain([&too_long.to_vec()])
        {
            assert!(check_parts(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn sums_are_found_by_their_place() {
        let i = sample();
        assert_eq!(
            (i.sum_of(2, 0, 0), i.sum_of(2, 1, 0), i.sum_of(2, 2, 0)),
            (Some(2), Some(u64::MAX), None)
        );
        assert_eq!(
            (i.parity_sum(0, 0), i.parity_sum(1, 0), i.parity_bytes()),
            (Some(5), None, 128)
        );
    }
}
