//! Rounds: what libraries on all hosts tell each other while they are at rest (`belay_abi::control`).
//!
//! A round is one meeting of the nodes. An entry of a library called L with key K is the fact `gate L K` there, key and
//! value in hexadecimal digits: libraries of one name see each other's, and nobody else's.

use super::page::{Page, Standing};
use super::Parties;
use super::DRIVER;
use crate::fault::Refusal;
use crate::group::{Brought, Facts, Group};
use belay_abi::control::{ENTRY, FACT, MAX_KEY, MAX_TOLD, MAX_VALUE, SUM, WISH};
use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;
use std::time::Duration;

/// Rounds of one order; a checkpoint has room for so many steps.
pub(super) const MOST: u32 = 2000;
/// Made known by a node that has libraries which take part.
const HERE: &str = "gate";
/// Made known by a node where a library has something to tell or to hear.
const MORE: &str = "gate more";

/// Made known by a node where processes use GPUs.
const GPUS: &str = "gate gpus";

/// Whether there is any library that takes part, and whether processes use GPUs.
pub(super) fn parties(met: &Facts) -> Parties {
    Parties {
        any: met.contains_key(HERE),
        gpus: met.contains_key(GPUS),
    }
}

/// Whether there is another round.
pub(super) fn goes_on(met: &Facts) -> bool {
    met.contains_key(MORE)
}

/// What the libraries of this node bring to a round.
#[derive(Debug, Default)]
pub(super) struct Round {
    brought: Brought,
    /// What each library, by its process and its page, has told.
    told: HashMap<(i32, (u64, u64)), Vec<Entry>>,
}

impl Round {
    pub(super) fn of<'a>(pages: impl Iterator<Item = &'a Page>) -> Result<Self, Refusal> {
        let mut round = Self::default();
        round.brought.want = BTreeSet::from([HERE, GPUS, MORE].map(str::to_owned));
        for page in pages {
            if page.name == DRIVER {
                round.brought.publish.insert(GPUS.to_owned(), String::new());
            }
            round.brought.publish.insert(HERE.to_owned(), String::new());
            if page.standing == Standing::More {
                round.brought.publish.insert(MORE.to_owned(), String::new());
                let told = Entry::parse(&page.told()?)
                    .map_err(|why| page.refuse(format!("tells {why}: use the library that came with this belay")))?;
                told.iter().for_each(|e| e.bring(&page.name, &mut round.brought));
                round.told.insert((page.pid, page.file), told);
            }
        }
        Ok(round)
    }

    /// Meets the other nodes, where there are any, which may come so much later.
    pub(super) fn meet(&self, group: Option<&dyn Group>, late: Duration) -> Result<Facts, String> {
        match group {
            Some(group) => group.meet_late(self.brought.clone(), late),
            None => Ok(self.alone()),
        }
    }

    /// What is known on the only node.
    fn alone(&self) -> Facts {
        let sums = self
            .brought
            .sums
            .iter()
            .map(|(name, n)| (format!("sum {name}"), n.to_string()));
        let facts = self.brought.publish.iter().map(|(name, value)| (name.clone(), value.clone()));
        facts.chain(sums).collect()
    }

    /// The answer to what this library has told.
    pub(super) fn answer(&self, page: &Page, met: &Facts) -> Result<Vec<u8>, Refusal> {
        let told = self.told.get(&(page.pid, page.file)).map_or(&[][..], Vec::as_slice);
        answer(told, &page.name, met).ok_or_else(|| {
            page.refuse(format!(
                "wishes to hear more than {MAX_TOLD} bytes in a round: use the library that came with this belay"
            ))
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Fact(Vec<u8>, Vec<u8>),
    Wish(Vec<u8>),
    Sum(Vec<u8>, u64),
}

impl Entry {
    /// All that `told` holds, or what is wrong with it.
    fn parse(mut told: &[u8]) -> Result<Vec<Self>, String> {
        let mut entries = Vec::new();
        while let Some((head, rest)) = told.split_first_chunk::<ENTRY>() {
            let key = usize::from(u16::from_le_bytes([head[2], head[3]]));
            let value = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
            if key > MAX_KEY || value > MAX_VALUE || key + value > rest.len() {
                return Err(format!("an entry with a key of {key} bytes and a value of {value}"));
            }
            let (key, rest) = rest.split_at(key);
            let (value, rest) = rest.split_at(value);
            let key = key.to_vec();
            entries.push(match (head[0], <[u8; 8]>::try_from(value)) {
                (FACT, _) => Self::Fact(key, value.to_vec()),
                (WISH, _) if value.is_empty() => Self::Wish(key),
                (SUM, Ok(n)) => Self::Sum(key, u64::from_le_bytes(n)),
                (kind, _) => return Err(format!("an entry of kind {kind} with a value of {} bytes", value.len())),
            });
            told = rest;
        }
        if told.is_empty() {
            Ok(entries)
        } else {
            Err("an entry that is cut off".into())
        }
    }

    fn bring(&self, library: &str, brought: &mut Brought) {
        match self {
            Self::Fact(key, value) => drop(brought.publish.insert(name(library, key), hex::encode(value))),
            Self::Wish(key) => drop(brought.want.insert(wish(library, key))),
            Self::Sum(key, n) => {
                let sum = brought.sums.entry(name(library, key)).or_default();
                *sum = sum.saturating_add(*n);
                brought.want.insert(format!("sum {}", name(library, key)));
            }
        }
    }

    /// Adds the answer to this entry.
    fn answer(&self, library: &str, met: &Facts, answer: &mut Vec<u8>) {
        match self {
            Self::Fact(..) => {}
            Self::Sum(key, _) => {
                let sum = met.get(&format!("sum {}", name(library, key)));
                let n: u64 = sum.and_then(|n| n.parse().ok()).unwrap_or(0);
                put(answer, SUM, key, &n.to_le_bytes());
            }
            Self::Wish(key) => {
                let (begin, wished) = (name(library, b""), wish(library, key));
                for (name, value) in named(met, &wished) {
                    // Nodes make known only what they have encoded.
                    let key = hex::decode(name.strip_prefix(&begin).unwrap_or_default());
                    if let (Ok(key), Ok(value)) = (key, hex::decode(value)) {
                        put(answer, FACT, &key, &value);
                    }
                }
            }
        }
    }
}

/// The answer to what a library of this name has told; none where it is too long. (A few wishes can ask for everything
/// many times over.)
fn answer(told: &[Entry], library: &str, met: &Facts) -> Option<Vec<u8>> {
    let mut answer = Vec::new();
    for entry in told {
        entry.answer(library, met, &mut answer);
        if answer.len() as u64 > MAX_TOLD {
            return None;
        }
    }
    Some(answer)
}

/// The name of a library's key among the nodes.
fn name(library: &str, key: &[u8]) -> String {
    format!("gate {library} {}", hex::encode(key))
}

/// The name of what a library wishes.
fn wish(library: &str, key: &[u8]) -> String {
    match key.strip_suffix(b"*") {
        None => name(library, key),
        Some(begin) => name(library, begin) + "*",
    }
}

/// The facts that one wish names.
fn named<'a>(met: &'a Facts, wish: &'a str) -> Box<dyn Iterator<Item = (&'a String, &'a String)> + 'a> {
    match wish.strip_suffix('*') {
        None => Box::new(met.get_key_value(wish).into_iter()),
        Some(begin) => {
            let from = met.range::<str, _>((Bound::Included(begin), Bound::Unbounded));
            Box::new(from.take_while(move |(name, _)| name.starts_with(begin)))
        }
    }
}

fn put(answer: &mut Vec<u8>, kind: u8, key: &[u8], value: &[u8]) {
    // Both were parsed, so they fit.
    let (k, v) = ((key.len() as u16).to_le_bytes(), (value.len() as u32).to_le_bytes());
    answer.extend([kind, 0, k[0], k[1], v[0], v[1], v[2], v[3]]);
    answer.extend(key);
    answer.extend(value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(entries: &[(u8, &[u8], &[u8])]) -> Vec<u8> {
        let mut all = Vec::new();
        entries.iter().for_each(|(kind, key, value)| put(&mut all, *kind, key, value));
        all
    }

    /// What a library hears that is alone with what it has told.
    fn heard(told: &[u8]) -> Option<Vec<u8>> {
        let (entries, mut round) = (Entry::parse(told).unwrap(), Round::default());
        entries.iter().for_each(|e| e.bring("libx.so", &mut round.brought));
        answer(&entries, "libx.so", &round.alone())
    }

    #[test]
    fn a_library_hears_what_it_has_wished_for_and_no_more() {
        let told = bytes(&[
            (FACT, b"a 1", b"one"),
            (FACT, b"a 2", b""),
            (FACT, b"b\xff", b"bytes\0"),
            (WISH, b"a *", b""),
            (WISH, b"b\xff", b""),
            (WISH, b"c", b""),
            (SUM, b"n", &7u64.to_le_bytes()),
            (SUM, b"n", &u64::MAX.to_le_bytes()),
        ]);
        let max = u64::MAX.to_le_bytes();
        let wanted = bytes(&[
            (FACT, b"a 1", b"one"),
            (FACT, b"a 2", b""),
            (FACT, b"b\xff", b"bytes\0"),
            (SUM, b"n", &max),
            (SUM, b"n", &max),
        ]);
        assert_eq!(heard(&told), Some(wanted));
        assert_eq!(heard(&[]), Some(Vec::new()));
    }

    #[test]
    fn wishes_that_all_ask_for_everything_have_a_bound() {
        let value = vec![1; MAX_VALUE];
        let facts: Vec<Vec<u8>> = (0..100u8).map(|n| bytes(&[(FACT, &[n], &value)])).collect();
        let asking = |wishes: usize| [facts.concat(), bytes(&vec![(WISH, &b"*"[..], &b""[..]); wishes])].concat();
        let once = 100 * (ENTRY + 1 + MAX_VALUE);
        let bound = MAX_TOLD as usize / once;
        assert_eq!(heard(&asking(bound)).map(|h| h.len()), Some(bound * once));
        assert_eq!(heard(&asking(bound + 1)), None);
        assert_eq!(heard(&asking(500_000)), None);
    }

    #[test]
    fn libraries_of_other_names_are_not_heard() {
        let mut brought = Brought::default();
        Entry::Fact(b"key".to_vec(), b"value".to_vec()).bring("liby.so", &mut brought);
        Entry::Sum(b"key".to_vec(), 3).bring("liby.so", &mut brought);
        let mut answer = Vec::new();
        Entry::Wish(b"*".to_vec()).answer("libx.so", &brought.publish, &mut answer);
        assert!(answer.is_empty());
    }

    #[test]
    fn what_is_no_row_of_entries_is_refused() {
        let one = bytes(&[(FACT, b"key", b"value")]);
        for end in 1..one.len() {
            assert!(Entry::parse(&one[..end]).is_err(), "{end} bytes");
        }
        let long = vec![0; MAX_VALUE + 1];
        for wrong in [
            (0, &b"k"[..], &b""[..]),
            (WISH, b"k", b"v"),
            (SUM, b"k", b"v"),
            (FACT, b"k", &long),
            (FACT, &long[..MAX_KEY + 1], b""),
        ] {
            assert!(Entry::parse(&bytes(&[wrong])).is_err(), "kind {}", wrong.0);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(told in prop::collection::vec(any::<u8>(), 0..200)) {
            if Entry::parse(&told).is_ok() {
                heard(&told);
            }
        }
    }
}
