//! Declared accesses (`belay_abi::access`): what a program says its loops do to its datasets, so that what it overwrites
//! before it reads it need not be stored.
//!
//! A page that makes no sense is left alone: everything counts as alive then.

pub(crate) mod points;
pub(crate) mod report;
pub(crate) mod sites;

use belay_abi::access::{
    Dataset, Dead, Page, Share, BEGUN, DIMS, GONE_ON, MAGIC, MAPPED, MOST, MOST_DEAD, MOST_WAY, MOST_WORDS, RING, VERSION, WANTED,
};
use belay_access::live::{apart, Datasets, Verdict};
use belay_access::shape::Shape;
use belay_access::site::Reach;
use belay_access::trace::{decode, Event, Garbled, STAMP};
use belay_image::model;
use belay_kernel::pidfd;
use belay_kernel::proc::Map;
use belay_kernel::shared::Shared;
use rustix::fs::SealFlags;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{fence, Ordering};

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// Whether a thread of a stopped process waits for the futex at an address.
pub(crate) type Waits<'a> = &'a dyn Fn(u64) -> bool;

/// What a process has declared, as of a stop.
#[derive(Debug)]
pub(crate) struct Declared {
    page: Shared,
    /// Where the page is in the process.
    address: u64,
    /// Words of the ring that are read.
    read: u64,
    verdict: Verdict,
    /// Those since the stop, without time stamps: what a restarted program is to record again.
    way: Vec<u64>,
    /// As far as they have decided something.
    decided: usize,
    /// Where its datasets lay.
    ranges: Vec<(u64, u64)>,
    /// Only the loop of this site decides anything, which the process is about to begin: no instruction of the program
    /// lies before it.
    only: Option<u32>,
}

/// Whether `map` may be such a page.
pub(crate) fn is_page(map: &Map) -> bool {
    map.shared && map.offset == 0 && map.name == MAPPED
}

impl Declared {
    /// What stopped process `pid` has declared, if anything, and if the agent has listened since the last checkpoint: it
    /// does from now on.
    /// `reach`: which loops shall decide what is alive. `waits`: whether a thread of it waits for the futex at an address.
    pub(crate) fn take(pid: i32, maps: &[Map], reach: Reach, waits: Waits<'_>) -> Option<Self> {
        let taken = own(pid, maps).and_then(|page| page.map(|page| Self::of(&page, reach, waits)).transpose());
        taken.unwrap_or_else(|error| {
            tracing::warn!(pid, %error, "what the program has declared of its loops is not used");
            None
        })?
    }

    fn of(own: &Own<'_>, reach: Reach, waits: Waits<'_>) -> io::Result<Option<Self>> {
        let (page, address) = (own.open()?, own.map.start);
        let half = |at| page.half(at);
        let watched = half(offset_of!(Page, watched));
        let begun = watched.load(Ordering::Relaxed) == BEGUN;
        if !begun {
            watched.store(WANTED, Ordering::Relaxed);
        }
        let faults = half(offset_of!(Page, faults)).load(Ordering::Relaxed);
        let read = page.word(offset_of!(Page, head)).load(Ordering::Acquire);
        // The program may be in a loop that was not recorded. Or what a restart has not brought back is not there yet.
        if !begun || pending(own.pid, address)? != 0 {
            return Ok(None);
        }
        // For good: a loop that was not recorded as a whole may go on for long.
        if faults != 0 {
            let why = "loops were begun in others, by several threads at once, or with too many uses";
            return Err(io::Error::other(why));
        }
        if half(offset_of!(Page, changes)).load(Ordering::Relaxed) % 2 != 0 {
            return Ok(None);
        }
        let only = match reach {
            Reach::All => None,
            Reach::Next => {
                let here = half(offset_of!(Page, here)).load(Ordering::Relaxed);
                // A handler of a signal may have come in between, and may have jumped out of the wait.
                if here == 0 || here & GONE_ON != 0 || !waits(address + offset_of!(Page, want) as u64) {
                    return Ok(None);
                }
                Some(half(offset_of!(Page, site)).load(Ordering::Relaxed))
            }
        };
        let datasets = datasets(&page);
        let mut declared = Self {
            ranges: datasets.values().map(Shape::range).collect(),
            verdict: Verdict::new(&datasets),
            way: Vec::new(),
            decided: 0,
            page,
            address,
            read,
            only,
        };
        declared.ranges.sort_unstable();
        let open = declared.page.word(offset_of!(Page, open)).load(Ordering::Relaxed);
        // One whose record is not whole yet is begun after the stop.
        if let Some(begin) = open.checked_sub(1).filter(|begin| *begin < read) {
            // It does more than to use what it has said: datasets have moved in it.
            if read - begin > MOST_WORDS as u64 {
                return Ok(None);
            }
            let found = words(&declared.page, begin, read).and_then(|words| decode(&words).ok());
            match found.as_deref() {
                Some([record]) => match &record.event {
                    Event::Enter(one) => declared.verdict.inside(one),
                    Event::Move { .. } | Event::Reset { .. } => return Err(io::Error::other(Garbled)),
                },
                Some([_, _, ..]) => return Ok(None),
                _ => return Err(io::Error::other(Garbled)),
            }
        }
        Ok(Some(declared))
    }

    /// Where the page is in the process.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// What the program has recorded from the stop on, as far as that has decided something; and how far that reaches.
    pub(crate) fn way(&self) -> (&[u64], u64) {
        let behind = self.read - self.way.len() as u64 + self.decided as u64;
        (&self.way[..self.decided], behind)
    }

    /// Where its datasets lay, in ascending order.
    pub(crate) fn ranges(&self) -> &[(u64, u64)] {
        &self.ranges
    }

    /// How far the program has recorded, and where the record of a loop lies that it may still be in: that may end by an
    /// exception, and has overwritten nothing for sure.
    fn recorded(&self) -> (u64, u64) {
        let word = |at| self.page.word(at).load(Ordering::Acquire);
        let before = word(offset_of!(Page, head));
        // What is recorded at the end of a loop comes before this, and so does that of the loop before the next.
        let open = word(offset_of!(Page, open));
        let head = word(offset_of!(Page, head));
        (head, open.checked_sub(1).unwrap_or(before))
    }

    /// Looks at what the program has done since. Not when it cannot be followed: then nothing is known to be dead.
    pub(crate) fn look(&mut self) -> Result<&Verdict, Lost> {
        let (head, left) = self.recorded();
        if head != self.read {
            let found = words(&self.page, self.read, head).ok_or(Lost::Behind)?;
            // Whoever ends the wait says so, but for a handler of a signal that has jumped out of it.
            let ended = self.page.half(offset_of!(Page, here)).load(Ordering::Relaxed) & GONE_ON != 0;
            if self.only.is_some() && !ended {
                self.verdict.close();
            }
            let mut at = 0;
            for record in decode(&found).map_err(|_| Lost::Garbled)? {
                if self.only.is_none() && matches!(record.event, Event::Enter(_)) && self.read + at as u64 >= left {
                    break;
                }
                let words = &found[at..at + record.words];
                at += record.words;
                let is_other = |site| !matches!(&record.event, Event::Enter(one) if one.site == site);
                if self.way.len() + words.len() > MOST_WAY || self.only.is_some_and(is_other) {
                    self.verdict.close();
                }
                let begin = self.way.len();
                self.way.extend_from_slice(words);
                self.way[begin + STAMP] = 0;
                if self.verdict.happened(&record.event) {
                    self.decided = self.way.len();
                }
                if self.only.is_some() {
                    self.verdict.close();
                }
            }
            self.read += at as u64;
        }
        match self.page.half(offset_of!(Page, faults)).load(Ordering::Relaxed) {
            0 => Ok(&self.verdict),
            _ => Err(Lost::Faults),
        }
    }
}

/// The arrays that stopped process `pid` has declared: none where it is just changing them, or what it says makes no
/// sense.
pub(crate) fn declared(pid: i32, maps: &[Map]) -> Vec<model::Dataset> {
    let Ok(Some(page)) = own(pid, maps) else { return Vec::new() };
    let read = |at: usize, bytes: &mut [u8]| belay_kernel::vm::read(pid, page.map.start + at as u64, bytes);
    let half = |at: usize| {
        let mut bytes = [0; WORD / 2];
        read(at, &mut bytes).map(|()| u32::from_ne_bytes(bytes))
    };
    let all = || {
        if half(offset_of!(Page, changes))? % 2 != 0 {
            return Ok(Vec::new());
        }
        let count = (half(offset_of!(Page, dataset_count))? as usize).min(MOST);
        let mut bytes = vec![0; count * size_of::<Dataset>()];
        read(offset_of!(Page, datasets), &mut bytes)?;
        let mut shares = vec![0; count * size_of::<Share>()];
        read(offset_of!(Page, shares), &mut shares)?;
        let all = bytes
            .chunks_exact(size_of::<Dataset>())
            .zip(shares.chunks_exact(size_of::<Share>()));
        Ok::<_, io::Error>(all.filter_map(|(raw, of)| dataset(raw, of)).collect())
    };
    all().unwrap_or_default()
}

/// One as it lies in the page, and what it is a part of; none where it was given up.
fn dataset(raw: &[u8], share: &[u8]) -> Option<model::Dataset> {
    let word_of = |raw: &[u8], at: usize| Some(u64::from_ne_bytes(*raw.get(at..)?.first_chunk()?));
    let dims = u32::from_ne_bytes(*raw.get(offset_of!(Dataset, dims)..)?.first_chunk()?) as usize;
    let words_of = |raw: &[u8], at: usize| {
        let words = (0..dims.clamp(1, DIMS)).map(|d| word_of(raw, at + d * WORD));
        words.collect::<Option<Vec<_>>>()
    };
    let (word, words) = (|at| word_of(raw, at), |at| words_of(raw, at));
    let of = |at| words_of(share, at);
    let share = model::Share {
        global: of(offset_of!(Share, global))?,
        lower: of(offset_of!(Share, lower))?.into_iter().map(u64::cast_signed).collect(),
        lo: of(offset_of!(Share, lo))?,
        hi: of(offset_of!(Share, hi))?,
    };
    let name = &raw[offset_of!(Dataset, name)..];
    let name = name.split(|b| *b == 0).next().unwrap_or_default();
    let address = word(offset_of!(Dataset, address))?;
    (address != 0).then_some(model::Dataset {
        name: name.into(),
        address,
        elem: word(offset_of!(Dataset, elem))?,
        extent: words(offset_of!(Dataset, extent))?,
        stride: words(offset_of!(Dataset, stride))?,
        share: Some(share).filter(|share| share.global[0] != 0),
    })
}

/// Bytes that the restart of stopped process `pid` has not brought back, and that the program has not overwritten yet;
/// 1 where nobody knows.
pub(crate) fn lacking(pid: i32, maps: &[Map]) -> u64 {
    own(pid, maps)
        .and_then(|page| page.map_or(Ok(0), |page| pending(pid, page.map.start)))
        .unwrap_or(1)
}

/// The page of process `pid` among its mappings. One of its maker's may be there too.
fn own(pid: i32, maps: &[Map]) -> io::Result<Option<Own<'_>>> {
    let found = maps.iter().filter(|m| is_page(m)).map(|map| look_at(pid, map));
    found.filter_map(Result::transpose).next().transpose()
}

/// `pending` is read where the program has it: it may have closed the descriptor, and is asked without any declaration.
fn pending(pid: i32, page: u64) -> io::Result<u64> {
    let word = |at: usize| {
        let mut bytes = [0; WORD];
        belay_kernel::vm::read(pid, page + at as u64, &mut bytes)?;
        Ok::<_, io::Error>(u64::from_ne_bytes(bytes))
    };
    let half = |at: usize| {
        let mut bytes = [0; WORD / 2];
        belay_kernel::vm::read(pid, page + at as u64, &mut bytes)?;
        Ok::<_, io::Error>(u32::from_ne_bytes(bytes))
    };
    let count = (half(offset_of!(Page, dead_count))? as usize).min(MOST_DEAD);
    let mut dead = vec![0; count * size_of::<Dead>()];
    belay_kernel::vm::read(pid, page + offset_of!(Page, dead) as u64, &mut dead)?;
    let bytes = dead.chunks_exact(size_of::<Dead>()).filter_map(|one| {
        let of = one[offset_of!(Dead, span.bytes)..].first_chunk()?;
        Some(u64::from_ne_bytes(*of))
    });
    // What came back as zeros is not in the list.
    let zeros = word(offset_of!(Page, head))? < word(offset_of!(Page, whole_at))? || half(offset_of!(Page, forked))? != 0;
    Ok(bytes.fold(u64::from(zeros), u64::saturating_add))
}

/// Words of the ring of a page, unless they have been overwritten.
fn words(page: &Shared, from: u64, to: u64) -> Option<Vec<u64>> {
    if to < from || to - from > RING as u64 {
        return None;
    }
    let word = |n: u64| {
        let place = usize::try_from(n % RING as u64).unwrap_or_default();
        page.word(offset_of!(Page, ring) + place * WORD).load(Ordering::Relaxed)
    };
    let words = (from..to).map(word).collect();
    fence(Ordering::Acquire);
    let reserved = page.word(offset_of!(Page, reserved)).load(Ordering::Relaxed);
    (reserved.saturating_sub(from) <= RING as u64).then_some(words)
}

/// Why it is not known what the program has done since the stop.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lost {
    /// It was faster.
    Behind,
    /// Its records make no sense.
    Garbled,
    /// Loops in others, and the like.
    Faults,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Lost::Behind => "it has begun more loops than its ring holds",
            Lost::Garbled => "its records make no sense",
            Lost::Faults => "loops were begun in others, by several threads at once, or with too many uses",
        })
    }
}

/// A page of declared accesses in a process.
struct Own<'a> {
    pid: i32,
    map: &'a Map,
    /// The number of its descriptor there.
    descriptor: i32,
}

/// The page that stopped process `pid` has mapped at `map`; none where that is not its own.
fn look_at(pid: i32, map: &Map) -> io::Result<Option<Own<'_>>> {
    let mut head = [0; 24];
    belay_kernel::vm::read(pid, map.start, &mut head)?;
    let word = |at: usize| head[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
    if word(offset_of!(Page, owner)).cast_signed() != pid {
        return Ok(None);
    }
    if head[..8] != MAGIC.to_ne_bytes() || word(offset_of!(Page, version)) != VERSION {
        return Err(io::Error::other(
            "its page is not of this version: use the library that came with this belay",
        ));
    }
    let descriptor = word(offset_of!(Page, descriptor)).cast_signed();
    Ok(Some(Own { pid, map, descriptor }))
}

impl Own<'_> {
    fn open(&self) -> io::Result<Shared> {
        let file = pidfd::getfd(pidfd::open(self.pid)?.as_fd(), self.descriptor)?;
        check(&file, self.map)?;
        Shared::map(file.as_fd(), size_of::<Page>())
    }
}

/// The file is the one that is mapped, and cannot become smaller: else the agent could be killed by what is not there
/// any more.
fn check(file: &OwnedFd, map: &Map) -> io::Result<()> {
    // First: only files in memory have any, and no other can keep the agent waiting.
    let seals = rustix::fs::fcntl_get_seals(file);
    let none = || io::Error::other(format!("its page is not behind descriptor {}", file.as_raw_fd()));
    if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        return Err(none());
    }
    let stat = rustix::fs::fstat(file)?;
    let is_it = (stat.st_dev, stat.st_ino) == (map.dev, map.ino);
    // A file in huge pages has another size.
    if !is_it || stat.st_size != size_of::<Page>() as i64 {
        return Err(none());
    }
    Ok(())
}

/// The datasets that can be followed: those that lie apart from all others, and are not kept whatever loops say.
fn datasets(page: &Shared) -> Datasets {
    let count = page.half(offset_of!(Page, dataset_count)).load(Ordering::Relaxed) as usize;
    let mut out = Datasets::new();
    let mut kept = Vec::new();
    for at in 0..count.min(MOST) {
        let place = offset_of!(Page, datasets) + at * size_of::<Dataset>();
        let [address, elem] = page.words(place);
        let extent = page.words(place + 2 * WORD);
        let stride = page.words(place + (2 + DIMS) * WORD);
        let keep = page.half(place + offset_of!(Dataset, keep)).load(Ordering::Relaxed);
        if address != 0 {
            let number = u32::try_from(at + 1).unwrap_or_default();
            let shape = Shape::new(address, elem, extent, stride).ok();
            out.extend(shape.map(|shape| (number, shape)));
            kept.extend((keep != 0).then_some(number));
        }
    }
    // Kept ones count here: what is read through them is not known to be another's.
    let mut out = apart(&out);
    out.retain(|number, _| !kept.contains(number));
    out
}
