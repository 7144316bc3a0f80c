//! Loops and what they use, as the program has recorded them (`belay_abi::access`).

use crate::block::{Block, MAX_DIMS};
use belay_abi::access::{of_header, of_used, BOTH, ENTER, MOST_USES, MOVE, READ, RESET, WRITE};
use thiserror::Error;

/// What a loop does to a part of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It reads it.
    Read,
    /// It overwrites all of it and reads nothing of it before.
    Write,
    /// Both, or a part only.
    Both,
}

/// A part of a dataset that a loop uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Use {
    /// Number of the dataset.
    pub dataset: u32,
    /// What is done to it.
    pub mode: Mode,
    /// Which part; none for all of it.
    pub block: Option<Block>,
}

/// A loop that was begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loop {
    /// Where in the program.
    pub site: u32,
    /// When: the time stamp counter.
    pub ticks: u64,
    /// What it uses.
    pub uses: Vec<Use>,
}

impl Loop {
    /// What it reads, and then what it overwrites: an element that it does both to is read.
    pub(crate) fn in_order(&self) -> impl DoubleEndedIterator<Item = &Use> {
        let reads = self.uses.iter().filter(|u| u.mode != Mode::Write);
        reads.chain(self.uses.iter().filter(|u| u.mode == Mode::Write))
    }
}

/// What a program has recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A loop began.
    Enter(Loop),
    /// A dataset lies elsewhere from here on; at 0, it is none any more.
    Move {
        /// Its number.
        dataset: u32,
        /// Where its first element is.
        address: u64,
    },
    /// What has not been used yet is not followed any more; where this is inside a loop, nothing is.
    Reset {
        /// It is.
        inside: bool,
    },
}

/// The words are no records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("what the program has recorded of its loops makes no sense")]
pub struct Garbled;

/// Something recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// What.
    pub event: Event,
    /// How many words that takes.
    pub words: usize,
}

/// Which word of a record is the time stamp counter: it says nothing of what was recorded.
pub const STAMP: usize = 1;

/// Reads whole records.
pub fn decode(words: &[u64]) -> Result<Vec<Record>, Garbled> {
    let mut words = words.iter().copied();
    let mut out = Vec::new();
    let mut left = words.len();
    while let Some(first) = words.next() {
        let ticks = words.next().ok_or(Garbled)?;
        let event = match of_header(first) {
            (ENTER, site, uses) if uses <= MOST_USES => {
                let uses = (0..uses).map(|_| one_use(&mut words)).collect::<Result<_, _>>()?;
                Event::Enter(Loop { site, ticks, uses })
            }
            (MOVE, dataset, 0) => {
                let address = words.next().ok_or(Garbled)?;
                Event::Move { dataset, address }
            }
            (RESET, inside @ 0..=1, 0) => Event::Reset { inside: inside == 1 },
            _ => return Err(Garbled),
        };
        let words = left - words.len();
        left -= words;
        out.push(Record { event, words });
    }
    Ok(out)
}

fn one_use(words: &mut impl Iterator<Item = u64>) -> Result<Use, Garbled> {
    let (kind, dataset, bounds) = of_used(words.next().ok_or(Garbled)?);
    let mode = match kind {
        READ => Mode::Read,
        WRITE => Mode::Write,
        BOTH => Mode::Both,
        _ => return Err(Garbled),
    };
    if bounds == 0 {
        let block = None;
        return Ok(Use { dataset, mode, block });
    }
    let (mut lo, mut hi) = ([0; MAX_DIMS], [1; MAX_DIMS]);
    if bounds > MAX_DIMS {
        return Err(Garbled);
    }
    for (lo, hi) in lo.iter_mut().zip(&mut hi).take(bounds) {
        let word = words.next().ok_or(Garbled)?;
        let half = |half: u64| i64::from((half as u32).cast_signed());
        (*lo, *hi) = (half(word), half(word >> 32));
    }
    let block = Some(Block { lo, hi });
    Ok(Use { dataset, mode, block })
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_abi::access::{header, used};
    use proptest::prelude::*;

    #[test]
    fn records_are_read_as_they_were_written() {
        let bounds = |lo: i32, hi: i32| u64::from(lo.cast_unsigned()) | u64::from(hi.cast_unsigned()) << 32;
        let words = [
            header(ENTER, 3, 2),
            77,
            used(1, WRITE, 0),
            used(2, READ, 2),
            bounds(-2, 9),
            bounds(0, i32::MAX),
            header(MOVE, 2, 0),
            78,
            0x7000,
            header(RESET, 1, 0),
            79,
        ];
        let part = Some(Block::new(&[-2, 0], &[9, i64::from(i32::MAX)]));
        let uses = vec![
            Use {
                dataset: 1,
                mode: Mode::Write,
                block: None,
            },
            Use {
                dataset: 2,
                mode: Mode::Read,
                block: part,
            },
        ];
        let events = [
            Event::Enter(Loop {
                site: 3,
                ticks: 77,
                uses,
            }),
            Event::Move {
                dataset: 2,
                address: 0x7000,
            },
            Event::Reset { inside: true },
        ];
        let records = decode(&words).unwrap();
        assert_eq!(records.iter().map(|r| r.words).collect::<Vec<_>>(), [6, 3, 2]);
        assert!(records.into_iter().map(|r| r.event).eq(events));
        for cut in [1, 2, 4, 5, 7, 8, 10] {
            assert_eq!(decode(&words[..cut]), Err(Garbled), "{cut}");
        }
    }

    proptest! {
        #[test]
        fn whatever_the_words_are_nothing_breaks(words in prop::collection::vec(prop_oneof![any::<u64>(), 0..4u64, Just(header(ENTER, 1, 2))], 0..40)) {
            drop(decode(&words));
        }
    }
}
