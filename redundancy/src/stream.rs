//! Streams: where a member's files lie in its stream, so that what has not changed since another generation lies where
//! it lay then; and where the bytes of a stream lie in its segments, so that a stream can grow behind its end without
//! a change in front of it.

use crate::layout::{block_range, blocks};
use crate::part::{Part, Place};
use crate::BLOCK;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Files are placed anew where more than one byte of so many in a stream belongs to none.
const MOST_GAPS: u64 = 4;

/// How the blocks of a stream are dealt out to its segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// One segment after the other (format 1 of the index).
    Segments,
    /// In turn, as RAID does (format 2).
    Rows,
}

/// Where a stream lies in its segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// How blocks are dealt out.
    pub order: Order,
    /// Bytes of a segment.
    pub segment: u64,
    /// Segments.
    pub data: usize,
}

impl Geometry {
    /// Bytes of stream for which there is room.
    pub fn room(&self) -> u64 {
        self.segment.saturating_mul(self.data as u64)
    }

    /// Where block `block` of segment `segment` begins in the stream, and its length.
    pub fn range(&self, segment: usize, block: u64) -> (u64, usize) {
        let (at, bytes) = block_range(self.segment, block);
        let begin = match self.order {
            Order::Segments => segment as u64 * self.segment + at,
            Order::Rows => at * self.data as u64 + segment as u64 * bytes as u64,
        };
        (begin, bytes)
    }

    /// Segment and block with byte `at` of the stream, for which there is room.
    pub fn block_at(&self, at: u64) -> (usize, u64) {
        let (segment, block) = match self.order {
            Order::Segments => (at / self.segment, at % self.segment / BLOCK),
            Order::Rows => {
                let row = BLOCK * self.data as u64;
                let (_, bytes) = block_range(self.segment, at / row);
                (at % row / (bytes as u64).max(1), at / row)
            }
        };
        (usize::try_from(segment).unwrap_or(usize::MAX), block)
    }

    /// All blocks (segment, number), in the order of the stream.
    pub fn all(self) -> impl Iterator<Item = (usize, u64)> {
        let (in_segment, data) = (blocks(self.segment), self.data as u64);
        (0..in_segment * data).map(move |n| {
            let (segment, block) = match self.order {
                Order::Segments => (n / in_segment, n % in_segment),
                Order::Rows => (n % data, n / data),
            };
            (usize::try_from(segment).unwrap_or(usize::MAX), block)
        })
    }
}

/// Bytes of a stream of these files, which are in its order.
pub fn end(parts: &[Part]) -> u64 {
    parts.last().map_or(0, |p| p.at.saturating_add(p.bytes))
}

/// Gives each of `files` its place in a stream, and returns them in its order. Files that lay in another one, `before`,
/// and that `stay` lie there again; others come into gaps between these, or behind them all: chunks first, because
/// they stay longer.
pub fn place(mut files: Vec<Part>, before: &[Part], stay: impl Fn(Place) -> bool) -> Vec<Part> {
    let known: BTreeMap<(Place, &str), &Part> = before.iter().map(|p| ((p.place, &*p.name), p)).collect();
    let was = |f: &Part| -> Option<u64> {
        let old = known.get(&(f.place, &*f.name))?;
        (old.bytes == f.bytes && f.bytes > 0 && stay(f.place)).then_some(old.at)
    };
    files.sort_by_key(|f| f.place != Place::Chunks);
    let (mut placed, mut new) = (Vec::new(), Vec::new());
    for mut file in files {
        match was(&file) {
            Some(at) => {
                file.at = at;
                placed.push(file);
            }
            None => new.push(file),
        }
    }
    sort(&mut placed);
    let (mut gaps, mut end) = (BTreeSet::new(), 0);
    for p in &placed {
        if p.at > end {
            gaps.insert((p.at - end, end));
        }
        end = p.at.saturating_add(p.bytes);
    }
    let anything_new = !new.is_empty();
    for mut file in new {
        // The smallest gap that is long enough.
        file.at = match gaps.range((file.bytes, 0)..).next().copied() {
            // All empty files lie at the beginning.
            _ if file.bytes == 0 => 0,
            Some((room, at)) => {
                gaps.remove(&(room, at));
                if room > file.bytes {
                    gaps.insert((room - file.bytes, at + file.bytes));
                }
                at
            }
            None => {
                let at = end;
                end = at.saturating_add(file.bytes);
                at
            }
        };
        placed.push(file);
    }
    sort(&mut placed);
    let sum = placed.iter().fold(0u64, |n, p| n.saturating_add(p.bytes));
    if anything_new && !before.is_empty() && end.saturating_sub(sum) > end / MOST_GAPS {
        return place(placed, &[], stay);
    }
    placed
}

fn sort(parts: &mut [Part]) {
    parts.sort_by_key(|p| (p.at, p.bytes));
}

/// Bytes of one file in a piece of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The file's directory.
    pub place: Place,
    /// Its name there.
    pub name: String,
    /// Where they begin in the file.
    pub from: u64,
    /// Where they begin in the piece of the stream.
    pub to: usize,
    /// How many.
    pub bytes: usize,
}

/// What of the files `parts`, which are in the order of the stream, lies in `bytes` bytes from `at` on. Whatever no file
/// covers is zeros.
pub fn pieces(parts: &[Part], at: u64, bytes: usize) -> Vec<Piece> {
    let end = at.saturating_add(bytes as u64);
    let first = parts.partition_point(|p| p.at.saturating_add(p.bytes) <= at);
    let length = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let of = parts[first..].iter().take_while(|p| p.at < end).filter(|p| p.bytes > 0);
    of.map(|p| {
        let (from, to) = (p.at.max(at), p.at.saturating_add(p.bytes).min(end));
        Piece {
            place: p.place,
            name: p.name.clone(),
            from: from - p.at,
            to: length(from - at),
            bytes: length(to - from),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(place: Place, name: &str, bytes: u64) -> Part {
        let name = name.into();
        Part {
            place,
            name,
            bytes,
            at: 0,
        }
    }

    fn chunks(of: &[(&str, u64)]) -> Vec<Part> {
        of.iter().map(|(name, bytes)| file(Place::Chunks, name, *bytes)).collect()
    }

    fn places(parts: &[Part]) -> Vec<(&str, u64)> {
        parts.iter().map(|p| (&*p.name, p.at)).collect()
    }

    fn is_chunk(place: Place) -> bool {
        place == Place::Chunks
    }

    #[test]
    fn every_byte_of_a_stream_has_one_place() {
        for order in [Order::Segments, Order::Rows] {
            for (segment, data) in [(64, 1), (128, 3), (BLOCK, 2), (2 * BLOCK + 192, 5), (BLOCK + 64, 1)] {
                let g = Geometry { order, segment, data };
                let mut next = 0;
                for (s, b) in g.all() {
                    let (at, bytes) = g.range(s, b);
                    assert_eq!(at, next, "{g:?}: the blocks do not follow each other");
                    assert!(bytes > 0);
                    for byte in [at, at + bytes as u64 - 1] {
                        assert_eq!(g.block_at(byte), (s, b), "{g:?}: byte {byte}");
                    }
                    next = at + bytes as u64;
                }
                assert_eq!(next, g.room());
            }
        }
    }

    #[test]
    fn a_stream_that_grows_changes_nothing_in_front() {
        let short = Geometry {
            order: Order::Rows,
            segment: 3 * BLOCK + 640,
            data: 4,
        };
        let long = Geometry {
            segment: 9 * BLOCK,
            ..short
        };
        for (s, b) in short.all().filter(|(_, b)| *b < 3) {
            assert_eq!(short.range(s, b), long.range(s, b));
        }
    }

    #[test]
    fn what_stays_lies_where_it_lay() {
        let mut first = chunks(&[("a", 100), ("b", 50), ("c", 100), ("none", 0)]);
        first.insert(0, file(Place::Generation, "manifest", 20));
        let first = place(first, &[], is_chunk);
        assert_eq!(
            places(&first),
            [("none", 0), ("a", 0), ("b", 100), ("c", 150), ("manifest", 250)]
        );
        // b is gone, d fits where it was, e does not; a file of the generation has the same name and is another one.
        let mut second = chunks(&[("e", 60), ("d", 30), ("a", 100), ("c", 100)]);
        second.insert(0, file(Place::Generation, "manifest", 20));
        let second = place(second, &first, is_chunk);
        assert_eq!(
            places(&second),
            [("a", 0), ("d", 100), ("manifest", 130), ("c", 150), ("e", 250)]
        );
        assert_eq!(end(&second), 310);
        // A chunk of another length is another one.
        assert_eq!(
            places(&place(chunks(&[("a", 99), ("c", 100)]), &first, is_chunk)),
            [("a", 0), ("c", 150)]
        );
        // All of the same generation stays where it is, gaps or not.
        assert_eq!(place(second.clone(), &second, |_| true), second);
        let gaps = [first[3].clone()];
        assert_eq!(place(gaps.to_vec(), &gaps, |_| true), gaps);
    }

    #[test]
    fn what_is_mostly_gaps_is_placed_anew() {
        let before = place(chunks(&[("a", 100), ("b", 300), ("c", 100)]), &[], is_chunk);
        let after = place(chunks(&[("c", 100), ("d", 10)]), &before, is_chunk);
        assert_eq!(places(&after), [("d", 0), ("c", 10)]);
    }

    #[test]
    fn pieces_are_those_of_the_files_that_lie_there() {
        let mut parts = place(chunks(&[("none", 0), ("a", 100), ("b", 50), ("c", 100)]), &[], is_chunk);
        parts.remove(2);
        let of = |at, bytes| -> Vec<(String, u64, usize, usize)> {
            let found = pieces(&parts, at, bytes).into_iter();
            found.map(|p| (p.name, p.from, p.to, p.bytes)).collect()
        };
        assert_eq!(of(90, 70), [("a".into(), 90, 0, 10), ("c".into(), 0, 60, 10)]);
        assert_eq!(of(100, 50), []);
        assert_eq!(of(160, 500), [("c".into(), 10, 0, 90)]);
        assert_eq!(of(0, 10), [("a".into(), 0, 0, 10)]);
    }
}
