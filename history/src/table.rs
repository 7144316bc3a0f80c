//! All versions of a history and what each tier has of them. Every change of a state goes through [`Table::apply`],
//! which keeps room, the order of eviction and the order of flushing in step with the states.
//!
//! Tiers are numbered from the fastest; the last one is endless and holds what is to be durable.

#[cfg(test)]
mod tests;

use crate::extents::{Contiguous, Fragment, Paged};
use crate::life::{self, Event, Illegal, State, Way};
use crate::Version;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Most tiers.
pub const TIERS: usize = 4;

/// How a tier's room is given away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Extents of so many bytes.
    Paged {
        /// All bytes.
        bytes: u64,
        /// Of an extent.
        extent: u64,
    },
    /// Neighbouring bytes.
    Contiguous {
        /// All bytes.
        bytes: u64,
    },
    /// Never full.
    Endless,
}

#[derive(Debug, Clone)]
enum Arena {
    Paged {
        free: Paged,
        extent: u64,
        held: BTreeMap<Version, Vec<u32>>,
    },
    Contiguous {
        fragments: Contiguous,
        bytes: u64,
        used: u64,
    },
    Endless,
}

/// Why a change was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Nobody has put it, or it has been dropped.
    #[error("version {} is unknown", .0 .0)]
    Unknown(Version),
    /// It has been put already.
    #[error("version {} is there already", .0 .0)]
    Exists(Version),
    /// The state does not allow it.
    #[error("version {} in tier {tier}: {why}", .version.0)]
    Illegal {
        /// Which version,
        version: Version,
        /// where,
        tier: usize,
        /// and what was asked.
        why: Illegal,
    },
    /// There is no room.
    #[error("tier {tier} has no room for version {} of {size} bytes", .version.0)]
    Full {
        /// Which version,
        version: Version,
        /// where,
        tier: usize,
        /// and how large it is.
        size: u64,
    },
}

/// The order of versions in a tier: the largest goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rank {
    /// Of eviction,
    pub evict: u64,
    /// and of flushing.
    pub flush: u64,
}

/// Added to the rank of an instance that a faster tier has too.
const DOUBLE: u64 = 1 << 62;

/// Lists of a tier that an instance can be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    /// May be evicted.
    Going(u64),
    /// Stays for a read, and another tier has it.
    Ready(u64),
    /// Has to be flushed before it may go.
    Alone(u64),
}

#[derive(Debug, Clone)]
struct Record {
    /// Bytes that it has,
    bytes: u64,
    /// and those of room that it takes.
    size: u64,
    rank: Rank,
    states: [State; TIERS],
    /// Copies that read from it.
    pins: [u8; TIERS],
    lists: [Option<List>; TIERS],
    /// The lowest tier that has it or is getting it from above.
    depth: Option<usize>,
    /// That one, if it has all of it.
    bottom: Option<usize>,
    /// The fastest one that has it or is getting it.
    top: Option<usize>,
}

#[derive(Debug, Clone)]
struct Tier {
    arena: Arena,
    going: BTreeSet<(u64, Version)>,
    ready: BTreeSet<(u64, Version)>,
    alone: BTreeSet<(u64, Version)>,
    /// Whole here, and no lower tier has them or is getting them.
    bottom: BTreeSet<Version>,
    /// Bytes of versions that no lower tier has.
    deepest: u64,
    /// Bytes of versions that no faster tier has or is getting.
    fastest: u64,
}

/// Versions and tiers.
#[derive(Debug, Clone)]
pub struct Table {
    versions: BTreeMap<Version, Record>,
    tiers: Vec<Tier>,
    /// Bytes of the largest extent: sizes are counted in so many, or what takes all room would seem to leave some.
    unit: u64,
}

impl Table {
    /// An empty history over tiers with such rooms, the fastest first; at most [`TIERS`].
    pub fn new(rooms: &[Room]) -> Self {
        let arena = |room: &Room| match *room {
            Room::Paged { bytes, extent } => Arena::Paged {
                free: Paged::new((bytes / extent) as u32),
                extent,
                held: BTreeMap::new(),
            },
            Room::Contiguous { bytes } => Arena::Contiguous {
                fragments: Contiguous::new(bytes),
                bytes,
                used: 0,
            },
            Room::Endless => Arena::Endless,
        };
        let tier = |room| Tier {
            arena: arena(room),
            going: BTreeSet::new(),
            ready: BTreeSet::new(),
            alone: BTreeSet::new(),
            bottom: BTreeSet::new(),
            deepest: 0,
            fastest: 0,
        };
        let unit = |room: &Room| match *room {
            Room::Paged { extent, .. } => extent,
            Room::Contiguous { .. } | Room::Endless => 1,
        };
        Self {
            unit: rooms.iter().map(unit).max().unwrap_or(1),
            versions: BTreeMap::new(),
            tiers: rooms.iter().take(TIERS).map(tier).collect(),
        }
    }

    /// Number of tiers.
    pub fn tiers(&self) -> usize {
        self.tiers.len()
    }

    /// A new version, which no tier has.
    pub fn add(&mut self, version: Version, bytes: u64) -> Result<(), TableError> {
        if self.versions.contains_key(&version) {
            return Err(TableError::Exists(version));
        }
        let record = Record {
            bytes,
            size: self.size_of(bytes),
            rank: Rank::default(),
            states: [State::Absent; TIERS],
            pins: [0; TIERS],
            lists: [None; TIERS],
            depth: None,
            bottom: None,
            top: None,
        };
        self.versions.insert(version, record);
        Ok(())
    }

    /// All versions.
    pub fn versions(&self) -> impl Iterator<Item = Version> + '_ {
        self.versions.keys().copied()
    }

    /// Bytes that it has, if it is known.
    pub fn bytes(&self, version: Version) -> Option<u64> {
        self.versions.get(&version).map(|r| r.bytes)
    }

    /// Bytes of room that it takes, if it is known.
    pub fn size(&self, version: Version) -> Option<u64> {
        self.versions.get(&version).map(|r| r.size)
    }

    /// Bytes of room that a version of so many bytes takes.
    pub fn size_of(&self, bytes: u64) -> u64 {
        bytes.checked_next_multiple_of(self.unit).unwrap_or(u64::MAX)
    }

    /// What `tier` has of it.
    pub fn state(&self, version: Version, tier: usize) -> State {
        self.versions.get(&version).map_or(State::Absent, |r| r.states[tier])
    }

    /// The fastest tier that has all of it.
    pub fn fastest(&self, version: Version) -> Option<usize> {
        let record = self.versions.get(&version)?;
        record.states.iter().position(|s| s.is_whole())
    }

    /// Bytes that a version of `size` takes in `tier`.
    fn taken(&self, tier: usize, size: u64) -> u64 {
        match &self.tiers[tier].arena {
            Arena::Paged { extent, .. } => size.div_ceil(*extent) * extent,
            _ => size,
        }
    }

    /// All bytes of a tier.
    pub fn room(&self, tier: usize) -> u64 {
        match &self.tiers[tier].arena {
            Arena::Paged { free, extent, .. } => u64::from(free.count()) * extent,
            Arena::Contiguous { bytes, .. } => *bytes,
            Arena::Endless => u64::MAX,
        }
    }

    /// Bytes that nobody has.
    pub fn free(&self, tier: usize) -> u64 {
        match &self.tiers[tier].arena {
            Arena::Paged { free, extent, .. } => u64::from(free.free()) * extent,
            Arena::Contiguous { bytes, used, .. } => bytes - used,
            Arena::Endless => u64::MAX,
        }
    }

    /// `size` bytes could be taken now.
    pub fn fits(&self, tier: usize, size: u64) -> bool {
        match &self.tiers[tier].arena {
            Arena::Contiguous { fragments, .. } => fragments.gap(size).is_some(),
            _ => self.taken(tier, size) <= self.free(tier),
        }
    }

    /// Bytes that are missing to take `size`, where room can be taken from anywhere.
    pub fn missing(&self, tier: usize, size: u64) -> u64 {
        self.taken(tier, size).saturating_sub(self.free(tier))
    }

    /// Where a version lies in the memory of `tier`: ranges of bytes, in order. None in an endless tier, whose room has
    /// no addresses.
    pub fn place(&self, version: Version, tier: usize) -> Vec<Range<u64>> {
        let mut left = self.bytes(version).unwrap_or(0);
        match &self.tiers[tier].arena {
            Arena::Paged { extent, held, .. } => {
                let mut ranges = Vec::<Range<u64>>::new();
                for e in held.get(&version).into_iter().flatten() {
                    let (start, taken) = (u64::from(*e) * extent, left.min(*extent));
                    match ranges.last_mut() {
                        Some(last) if last.end == start => last.end += taken,
                        _ => ranges.push(start..start + taken),
                    }
                    left -= taken;
                }
                ranges
            }
            Arena::Contiguous { fragments, .. } => {
                let (mut start, mut found) = (0, Vec::new());
                for f in fragments.fragments() {
                    if f.owner == Some(version) {
                        found.push(start..start + f.size.min(left));
                    }
                    start += f.size;
                }
                found
            }
            Arena::Endless => Vec::new(),
        }
    }

    /// The fragments of a contiguous tier.
    pub fn fragments(&self, tier: usize) -> Option<&[Fragment]> {
        match &self.tiers[tier].arena {
            Arena::Contiguous { fragments, .. } => Some(fragments.fragments()),
            _ => None,
        }
    }

    /// What may be evicted, the first to go first, with the rank of each.
    pub fn going(&self, tier: usize) -> impl Iterator<Item = (u64, Version)> + '_ {
        self.tiers[tier].going.iter().rev().copied()
    }

    /// What stays for a read though another tier has it too, the latest first.
    pub fn ready(&self, tier: usize) -> impl Iterator<Item = (u64, Version)> + '_ {
        self.tiers[tier].ready.iter().rev().copied()
    }

    /// What has to be flushed before it may go, the first to be flushed first.
    pub fn alone(&self, tier: usize) -> impl Iterator<Item = (u64, Version)> + '_ {
        self.tiers[tier].alone.iter().rev().copied()
    }

    /// Bytes of versions that no tier below `tier` has or is getting.
    pub fn above(&self, tier: usize) -> u64 {
        self.tiers[..=tier].iter().map(|t| t.deepest).sum()
    }

    /// Bytes of versions that have to come up to be in `tier` or above.
    pub fn below(&self, tier: usize) -> u64 {
        self.tiers[tier + 1..].iter().map(|t| t.fastest).sum()
    }

    /// A version that `tier` has and no lower one has or is getting, though a faster one may have it too.
    pub fn deepest(&self, tier: usize) -> Option<Version> {
        self.tiers[tier].bottom.first().copied()
    }

    /// Changes the order of eviction and flushing.
    pub fn rank(&mut self, version: Version, rank: Rank) {
        if let Some(record) = self.versions.get_mut(&version) {
            record.rank = rank;
            self.list(version);
        }
    }

    /// A copy reads from it: it stays until [`Table::unpin`].
    pub fn pin(&mut self, version: Version, tier: usize) {
        if let Some(record) = self.versions.get_mut(&version) {
            record.pins[tier] += 1;
            self.list(version);
        }
    }

    /// A copy reads from it.
    pub fn is_pinned(&self, version: Version, tier: usize) -> bool {
        self.versions.get(&version).is_some_and(|r| r.pins[tier] > 0)
    }

    /// The copy has ended.
    pub fn unpin(&mut self, version: Version, tier: usize) {
        if let Some(record) = self.versions.get_mut(&version) {
            record.pins[tier] = record.pins[tier].saturating_sub(1);
            self.list(version);
        }
    }

    /// Something happens to what `tier` has of a version.
    pub fn apply(&mut self, version: Version, tier: usize, event: Event) -> Result<State, TableError> {
        let record = self.versions.get(&version).ok_or(TableError::Unknown(version))?;
        let (size, old) = (record.size, record.states[tier]);
        let illegal = |why| TableError::Illegal { version, tier, why };
        let new = life::step(old, event).map_err(illegal)?;
        if new.takes_room() && !old.takes_room() {
            self.take(version, tier, size)?;
        }
        if old.takes_room() && !new.takes_room() {
            self.give(version, tier, size);
        }
        let record = self.versions.get_mut(&version).ok_or(TableError::Unknown(version))?;
        record.states[tier] = new;
        if !new.takes_room() {
            record.pins[tier] = 0;
        }
        if old.is_whole() && !new.is_whole() {
            Self::tell_last(record);
        }
        self.list(version);
        Ok(new)
    }

    /// The only whole instance is told that it is.
    fn tell_last(record: &mut Record) {
        let mut whole = record.states.iter_mut().filter(|s| s.is_whole());
        if let (Some(last), None) = (whole.next(), whole.next()) {
            // One that is alone already does not know the event.
            *last = life::step(*last, Event::Alone).unwrap_or(*last);
        }
    }

    /// It is dropped from all tiers and forgotten.
    pub fn drop(&mut self, version: Version) -> Result<(), TableError> {
        for tier in 0..self.tiers.len() {
            self.apply(version, tier, Event::Drop)?;
        }
        self.versions.remove(&version);
        Ok(())
    }

    /// Reserves room that [`Table::fits`] has found.
    pub fn reserve(&mut self, version: Version, tier: usize, way: Way) -> Result<(), TableError> {
        self.apply(version, tier, Event::Reserve(way)).map(|_| ())
    }

    fn take(&mut self, version: Version, tier: usize, size: u64) -> Result<(), TableError> {
        let bytes = self.bytes(version).unwrap_or(size);
        let full = TableError::Full {
            version,
            tier,
            size: bytes,
        };
        match &mut self.tiers[tier].arena {
            Arena::Paged { free, extent, held } => {
                let extents = free.take(size.div_ceil(*extent) as u32).ok_or(full)?;
                held.insert(version, extents);
            }
            Arena::Contiguous { fragments, used, .. } => {
                let at = fragments.gap(size).ok_or(full)?;
                fragments.place(at, version, size);
                *used += size;
            }
            Arena::Endless => {}
        }
        Ok(())
    }

    fn give(&mut self, version: Version, tier: usize, size: u64) {
        match &mut self.tiers[tier].arena {
            Arena::Paged { free, held, .. } => free.give(held.remove(&version).unwrap_or_default()),
            Arena::Contiguous { fragments, used, .. } => {
                fragments.give(version);
                *used -= size;
            }
            Arena::Endless => {}
        }
    }

    /// Brings the lists of all tiers in step with the states of a version.
    fn list(&mut self, version: Version) {
        let Some(record) = self.versions.get_mut(&version) else {
            return;
        };
        let mut faster = false;
        for (t, tier) in self.tiers.iter_mut().enumerate() {
            let state = record.states[t];
            let new = match state {
                _ if record.pins[t] > 0 => None,
                s if s.may_go() => Some(List::Going(record.rank.evict + if faster { DOUBLE } else { 0 })),
                State::Ready { spare: true } => Some(List::Ready(record.rank.evict)),
                s if s.is_alone() => Some(List::Alone(record.rank.flush)),
                _ => None,
            };
            faster |= state.is_whole();
            let old = std::mem::replace(&mut record.lists[t], new);
            if old == new {
                continue;
            }
            let mut of = |list: List, add: bool| {
                let (set, key) = match list {
                    List::Going(key) => (&mut tier.going, key),
                    List::Ready(key) => (&mut tier.ready, key),
                    List::Alone(key) => (&mut tier.alone, key),
                };
                match add {
                    true => set.insert((key, version)),
                    false => set.remove(&(key, version)),
                };
            };
            old.into_iter().for_each(|l| of(l, false));
            new.into_iter().for_each(|l| of(l, true));
        }
        let has = |s: &State| s.is_whole() || *s == State::Writing;
        let depth = record.states.iter().rposition(has);
        if depth != record.depth {
            record.depth.into_iter().for_each(|t| self.tiers[t].deepest -= record.size);
            depth.into_iter().for_each(|t| self.tiers[t].deepest += record.size);
            record.depth = depth;
        }
        let bottom = depth.filter(|t| record.states[*t].is_whole());
        if bottom != record.bottom {
            record
                .bottom
                .into_iter()
                .for_each(|t| _ = self.tiers[t].bottom.remove(&version));
            bottom.into_iter().for_each(|t| _ = self.tiers[t].bottom.insert(version));
            record.bottom = bottom;
        }
        let top = record.states.iter().position(|s| s.takes_room());
        if top != record.top {
            record.top.into_iter().for_each(|t| self.tiers[t].fastest -= record.size);
            top.into_iter().for_each(|t| self.tiers[t].fastest += record.size);
            record.top = top;
        }
    }
}
