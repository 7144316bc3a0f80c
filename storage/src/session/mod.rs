//! The chunks of one checkpoint, from the first page to their names.
//!
//! ```text
//! store_pages (+ write_held) / lend + give_back ──> seal (hashes, fsync) ──> publish (rename, fsync of the directory) ──> the generation's manifest
//! ```
//! Until `publish` all files have temporary names, and a session that is dropped removes them. So a kill at any instant
//! leaves unfinished chunks, or finished ones that no generation names; both are removed by the next
//! [`crate::store::Store::collect`].
//!
//! A chunk is sealed as soon as it is full, while others are written. A loan gets its place, and with it its file, only
//! when a writer is about to want it ([`Session::place_loan`]). Where the job has local tiers, a chunk that is sealed is
//! moved home.

mod compaction;
mod compare;
mod dirty;
mod held;
mod loans;
mod new;

pub use loans::Loan;

use crate::index::{Index, IndexShare};
use crate::page_key::PageSecret;
use crate::place::desk::Place;
use crate::place::mover::Mover;
use crate::store::Store;
use crate::{chunk, StorageError, PAGE};
use belay_image::extents::{self, Extent};
use belay_image::manifest::ChunkEntry;
use belay_image::sections::create_private;
use belay_image::{ImageError, TableId};
use belay_kernel::direct;
use held::Held;
use new::{New, Open, Spot};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// What became of the pages that were to be stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Pages written.
    pub written: u64,
    /// Pages that were looked for in the store by their hash.
    pub looked: u64,
    /// Pages found in the store by their hash.
    pub found: u64,
    /// Pages known not to have changed, which were not looked at.
    pub clean: u64,
    /// Those of them that were not even copied.
    pub not_copied: u64,
    /// Pages that a process has in common with one that is stored already, which were not looked at.
    pub common: u64,
    /// Pages moved out of chunks that were mostly dead.
    pub moved: u64,
    /// Time that the writers of snapshots spent writing, and the pages that they wrote.
    pub write_ns: u64,
    /// As above.
    pub write_pages: u64,
    /// Pages of which the writers have taken the time, what their hashes took, and what it took to look for them and to
    /// note new ones.
    pub timed_pages: u64,
    /// As above.
    pub hash_ns: u64,
    /// As above.
    pub look_ns: u64,
    /// Time in which the agent has made the table of hashes larger, while the writers waited.
    pub table_ns: u64,
    /// Time of the writers in all.
    pub writers_ns: u64,
}

/// One checkpoint's part of the store.
#[derive(Debug)]
pub struct Session {
    store: Store,
    mover: Option<Arc<Mover>>,
    /// Shared with the engine and its other sessions.
    next_id: Arc<AtomicU32>,
    chunk_pages: u32,
    /// Most pages that may still be written, and what to say when that is too little.
    room: Option<(u64, StorageLimit)>,
    /// Pages of chunks do not stay in the page cache.
    frugal: bool,
    chunks: Vec<New>,
    /// Pages that writers have been lent.
    lent: u64,
    held: Held,
    pub(crate) live: BTreeMap<u32, ChunkEntry>,
    pub(crate) index: Option<Index>,
    secret: PageSecret,
    tables: BTreeMap<TableId, Vec<Extent>>,
    /// Why pages are not looked for by their contents, where that does not pay.
    pub(crate) without: Option<String>,
    /// Damage that was found in what the tables refer to.
    damage: Option<String>,
    /// What has been done so far.
    pub stats: Stats,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum StorageLimit {
    /// Of the job: its checkpoints may take `limit` bytes, `used` are taken.
    Quota { limit: u64, used: u64 },
    /// Of this checkpoint, where the store is in memory.
    Memory { limit: u64 },
}

impl StorageLimit {
    fn left(self) -> u64 {
        match self {
            StorageLimit::Quota { limit, used } => limit.saturating_sub(used),
            StorageLimit::Memory { limit } => limit,
        }
    }
}

/// Pages of a chunk that are read at a time when it is given up.
const COMPACT_PAGES: u32 = 256;
/// Where little memory is free, the agent drops the pages of a chunk from the cache each time so many have been written.
const FRUGAL_PAGES: u64 = 256;

/// Pages that fit into a limit, and the limit.
fn pages_within(limit: StorageLimit) -> (u64, StorageLimit) {
    (limit.left() / chunk::file_bytes(1), limit)
}

impl Session {
    pub(crate) fn new(
        (store, mover): (Store, Option<Arc<Mover>>),
        next_id: Arc<AtomicU32>,
        chunk_bytes: u64,
        limit: Option<StorageLimit>,
        live: BTreeMap<u32, ChunkEntry>,
        index: Option<Index>,
        secret: PageSecret,
    ) -> Self {
        Self {
            store,
            mover,
            next_id,
            chunk_pages: u32::try_from(chunk_bytes / PAGE).unwrap_or(u32::MAX).max(1),
            room: limit.map(pages_within),
            frugal: false,
            chunks: Vec::new(),
            lent: 0,
            held: Held::default(),
            live,
            index,
            secret,
            tables: BTreeMap::new(),
            without: None,
            damage: None,
            stats: Stats::default(),
        }
    }

    /// Why pages are not looked for by their contents in this checkpoint, where that does not pay.
    pub fn why_without(&self) -> Option<&str> {
        self.without.as_deref()
    }

    /// Forgets everything written so far: the capture begins anew.
    pub fn reset(&mut self) {
        self.discard();
        self.held = Held::default();
        // The table must not lead to what has just been removed.
        if let Some(index) = self.index.as_mut().filter(|_| !self.chunks.is_empty()) {
            index.forget_others(&self.live.keys().copied().collect());
        }
        self.chunks.clear();
        self.lent = 0;
        self.tables.clear();
        self.stats = Stats::default();
    }

    /// The directory of the chunks.
    pub fn place(&self) -> &Path {
        self.store.directory()
    }

    /// Bytes by which the table of hashes grows at most when `pages` pages are stored.
    pub fn index_growth(&self, pages: u64) -> u64 {
        self.index.as_ref().map_or(0, |i| i.growth(pages))
    }

    /// Pages are not looked for by their contents in this checkpoint, because memory for that is short.
    pub fn forget_index(&mut self) {
        self.index = None;
    }

    /// About so many pages are going to be looked for: what they need is taken at once.
    pub fn expect(&mut self, pages: u64) {
        self.reserve_index(pages);
    }

    /// Makes room in the table of hashes for `pages` more pages.
    fn reserve_index(&mut self, pages: u64) {
        if self.index_growth(pages) == 0 {
            return;
        }
        let begin = Instant::now();
        if let Some(Err(error)) = self.index.as_mut().map(|i| i.reserve(pages)) {
            tracing::warn!(pages, %error, "{}", crate::index::NO_ROOM);
            self.forget_index();
        }
        self.stats.table_ns += u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    }

    /// At most `bytes` more may be stored, because the store is in memory.
    pub fn limit_memory(&mut self, bytes: u64) {
        let (pages, limit) = pages_within(StorageLimit::Memory { limit: bytes });
        let room = (pages + self.written(), limit);
        if self.room.is_none_or(|(pages, _)| pages > room.0) {
            self.room = Some(room);
        }
    }

    /// What the agent itself stores shall not stay in the page cache.
    pub fn be_frugal(&mut self, frugal: bool) {
        self.frugal = frugal;
    }

    /// Whether extents may refer to chunk `id`.
    pub fn knows(&self, id: u32) -> bool {
        self.live.contains_key(&id) || self.chunks.iter().any(|c| c.id == id)
    }

    /// What pages are hashed with.
    pub fn secret(&self) -> &PageSecret {
        &self.secret
    }

    /// The table of page hashes.
    pub fn index_share(&self) -> IndexShare {
        self.index.as_ref().map_or(IndexShare::NONE, Index::share)
    }

    /// What to report when a writer found no room.
    pub fn no_room(&self) -> StorageError {
        match self.room {
            Some((_, StorageLimit::Quota { limit, used })) => StorageError::Quota { limit, used },
            Some((_, StorageLimit::Memory { limit })) => StorageError::Memory { limit },
            None => StorageError::System {
                step: "find room in a chunk",
                source: std::io::ErrorKind::StorageFull.into(),
            },
        }
    }

    /// Adds a chunk, which has no place yet.
    fn add_chunk(&mut self, capacity: u32) -> Result<(), StorageError> {
        let next = |id: u32| id.checked_add(1);
        let id = self.next_id.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        let id = id.map_err(|_| StorageError::System {
            step: "number a chunk",
            source: std::io::ErrorKind::StorageFull.into(),
        })?;
        self.chunks.push(New {
            id,
            spot: Spot::Nowhere,
            hashes: Vec::new(),
            capacity,
            lent: 0,
            sealed: None,
            published: false,
        });
        Ok(())
    }

    fn spot_at(&self, place: Place, id: u32) -> Result<Spot, StorageError> {
        let file = create_private(&self.store.name_in(place, id, false))?;
        let direct = direct::is_possible(&file);
        Ok(Spot::At(place, Some(Open { file, direct })))
    }

    /// Makes the file of chunk number `at` of this session where `place` says; at home, where it cannot be made there.
    fn settle(&mut self, at: usize, place: Place) -> Result<(), StorageError> {
        let id = self.chunks[at].id;
        let made = self.spot_at(place, id);
        self.chunks[at].spot = match (made, place, &self.mover) {
            (Err(e), Place::Tier(tier), Some(mover)) => {
                tracing::warn!(tier = self.store.tiers()[tier].name, error = %e, "local tier is left out");
                mover.desk().close_tier(tier);
                mover.desk().abandoned(tier, self.chunks[at].most());
                self.spot_at(Place::Home, id)?
            }
            (made, ..) => made?,
        };
        Ok(())
    }

    /// Whether places are given when they are needed.
    pub fn is_tiered(&self) -> bool {
        self.mover.is_some()
    }

    /// Most bytes of memory that local tiers may take more than they have.
    pub fn room_in_memory(&self) -> u64 {
        self.mover.as_ref().map_or(0, |m| m.desk().room_in_memory())
    }

    /// Local tiers in memory may take at most `bytes` in this checkpoint.
    pub fn limit_tiers_in_memory(&self, bytes: u64) {
        if let Some(mover) = &self.mover {
            mover.desk().limit_memory(bytes);
        }
    }

    fn written(&self) -> u64 {
        self.chunks.iter().map(|c| c.hashes.len() as u64).sum()
    }

    /// Stores the pages of `data`, which lie at `vaddr`, and appends where they are to `out`.
    pub fn store_pages(&mut self, vaddr: u64, data: &[u8], out: &mut Vec<Extent>) -> Result<(), StorageError> {
        for (page, at) in data.as_chunks().0.iter().zip((vaddr..).step_by(PAGE as usize)) {
            let hash = self.secret.hash(page);
            self.stats.looked += u64::from(self.index.as_ref().is_some_and(|i| i.covers(hash)));
            let (chunk, page) = match self.index.as_ref().and_then(|i| i.find(hash)) {
                Some(found) => {
                    self.stats.found += 1;
                    found
                }
                None => self.append(page, hash)?,
            };
            match out.last_mut() {
                Some(e) if e.end() == at && e.chunk == chunk && u64::from(e.page) + e.pages() == u64::from(page) => e.bytes += PAGE,
                _ => out.push(Extent {
                    vaddr: at,
                    bytes: PAGE,
                    chunk,
                    page,
                }),
            }
        }
        Ok(())
    }

    fn append(&mut self, data: &[u8], hash: u128) -> Result<(u32, u32), StorageError> {
        if self.room.is_some_and(|(pages, _)| self.written() >= pages) {
            return Err(self.no_room());
        }
        let at = match self
            .chunks
            .iter()
            .position(|c| c.is_open() && c.lent == 0 && c.file().is_some())
        {
            Some(at) => at,
            None => {
                let capacity = self.chunk_pages;
                self.add_chunk(capacity)?;
                let at = self.chunks.len() - 1;
                // The program may stand still meanwhile: nobody waits here.
                let now = |mover: &Arc<Mover>| mover.desk().now(chunk::file_bytes(capacity));
                let place = self.mover.as_ref().map_or(Place::Home, now);
                self.settle(at, place)?;
                at
            }
        };
        let c = &mut self.chunks[at];
        let page = c.hashes.len() as u32;
        let Some(file) = c.file() else { return Err(self.no_room()) };
        if !self.held.take((c.id, page, c.capacity - page), data) {
            file.write_all_at(data, u64::from(page) * PAGE)
                .map_err(|e| ImageError::io("write", &self.store.name_in(c.place(), c.id, false), e))?;
            if self.frugal && (u64::from(page) + 1).is_multiple_of(FRUGAL_PAGES) {
                drop_from_cache(file, (u64::from(page) + 1 - FRUGAL_PAGES) * PAGE, FRUGAL_PAGES * PAGE);
            }
        }
        c.hashes.push(hash);
        self.stats.written += 1;
        let id = c.id;
        // Writers find the table by the agent's descriptor of it: it is not made anew while any is at work.
        if self.lent == 0 {
            self.reserve_index(1);
        }
        if let Some(index) = self.index.as_mut().filter(|i| i.growth(1) == 0) {
            index.insert(hash, id, page);
        }
        Ok((id, page))
    }

    fn seal_one(&mut self, at: usize) -> Result<(), StorageError> {
        self.write_held()?;
        let c = &mut self.chunks[at];
        let (place, most) = (c.place(), c.most());
        let path = self.store.name_in(place, c.id, false);
        let pages = c.hashes.len() as u32;
        let (trailer, xxh3) = chunk::encode_trailer(&c.hashes);
        if let Some(file) = c.file() {
            file.write_all_at(&trailer, u64::from(pages) * PAGE)
                .map_err(|e| ImageError::io("write", &path, e))?;
            file.sync_all().map_err(|e| ImageError::io("fsync", &path, e))?;
        }
        let id = c.id;
        c.spot = Spot::At(place, None);
        c.sealed = Some(ChunkEntry { id, pages, xxh3 });
        if let (Some(mover), Place::Tier(tier)) = (&self.mover, place) {
            mover.sealed(tier, id, most, pages);
        }
        Ok(())
    }

    /// Where the bytes of `id` lie. A table that says two things about a page is refused: its generation could not be restarted.
    pub fn set_table(&mut self, id: TableId, mut table: Vec<Extent>) -> Result<(), StorageError> {
        extents::normalise(&mut table);
        if let Some(w) = table.windows(2).find(|w| w[0].end() > w[1].vaddr) {
            let reason = format!("{id} at {:#x}: stored twice", w[1].vaddr);
            return Err(ImageError::damaged(&self.store.path(w[1].chunk), reason).into());
        }
        self.tables.insert(id, table);
        Ok(())
    }

    /// All tables of this checkpoint.
    pub fn tables(&self) -> &BTreeMap<TableId, Vec<Extent>> {
        &self.tables
    }

    /// Completes the chunks: tables of hashes written, everything durable.
    pub fn seal(&mut self) -> Result<(), StorageError> {
        for at in 0..self.chunks.len() {
            if self.chunks[at].sealed.is_none() && !self.chunks[at].hashes.is_empty() {
                self.seal_one(at)?;
            }
        }
        self.discard_empty();
        Ok(())
    }

    fn discard_empty(&mut self) {
        let (keep, empty) = std::mem::take(&mut self.chunks)
            .into_iter()
            .partition(|c: &New| !c.hashes.is_empty());
        self.chunks = keep;
        empty.iter().for_each(|c| self.give_up(c));
    }

    /// Bytes of the chunks of this session.
    pub fn new_bytes(&self) -> u64 {
        self.chunks.iter().map(|c| chunk::file_bytes(c.hashes.len() as u32)).sum()
    }

    /// The chunks that the processes' extents lie in, by number.
    pub fn entries(&self) -> Result<Vec<ChunkEntry>, StorageError> {
        let ids: BTreeSet<u32> = self.tables.values().flatten().map(|e| e.chunk).collect();
        let new = |id: &u32| self.chunks.iter().find(|c| c.id == *id).and_then(|c| c.sealed);
        let entry = |id: &u32| {
            let missing = || ImageError::damaged(&self.store.path(*id), "the checkpoint refers to a chunk that is not there");
            let found = self.live.get(id).copied().or_else(|| new(id));
            found.ok_or_else(|| missing().into())
        };
        ids.iter().map(entry).collect()
    }

    /// A number greater than that of any chunk made so far.
    pub fn next_chunk(&self) -> u32 {
        self.next_id.load(Ordering::Relaxed)
    }

    /// Gives the chunks their names. From here on the generation that refers to them may be committed.
    pub fn publish(&mut self) -> Result<(), StorageError> {
        self.store.numbers().map_or(Ok(()), |n| n.cover(self.next_chunk()))?;
        if let Some(mover) = &self.mover {
            let ids: Vec<u32> = self.chunks.iter().map(|c| c.id).collect();
            mover.publish(&ids)?;
            self.chunks.iter_mut().for_each(|c| c.published = true);
            return Ok(());
        }
        for c in &mut self.chunks {
            let place = Place::Home;
            let (from, to) = (self.store.name_in(place, c.id, false), self.store.path_in(place, c.id));
            std::fs::rename(&from, &to).map_err(|e| ImageError::io("rename", &from, e))?;
            c.published = true;
        }
        if !self.chunks.is_empty() {
            self.store.sync()?;
        }
        Ok(())
    }

    /// The chunks and the index as they are after the commit.
    pub(crate) fn into_kept(mut self) -> (BTreeMap<u32, ChunkEntry>, Option<Index>) {
        let mut live = std::mem::take(&mut self.live);
        live.extend(self.chunks.iter().filter_map(|c| c.sealed).map(|e| (e.id, e)));
        (live, self.index.take())
    }

    fn discard(&self) {
        self.chunks.iter().filter(|c| !c.published).for_each(|c| self.give_up(c));
    }

    /// Removes a chunk that will not be published.
    fn give_up(&self, c: &New) {
        match (&c.spot, &self.mover) {
            (Spot::Nowhere, _) => return,
            (Spot::Asked(ticket), Some(mover)) => return mover.desk().forget(ticket),
            (_, Some(mover)) if c.sealed.is_some() => return mover.give_up(c.id),
            (Spot::At(Place::Tier(tier), _), Some(mover)) => mover.desk().abandoned(*tier, c.most()),
            _ => {}
        }
        let path = self.store.name_in(c.place(), c.id, false);
        if let Err(e) = std::fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), error = %e, "unfinished chunk could not be removed");
        }
    }
}

/// Waits until a part of `file` is on its way to the disk, and lets the kernel forget it. A failure shows at the fsync.
fn drop_from_cache(file: &File, offset: u64, bytes: u64) {
    direct::write_back(file, offset, bytes);
    let _ = rustix::fs::fadvise(file, offset, NonZero::new(bytes), rustix::fs::Advice::DontNeed);
}

impl Drop for Session {
    fn drop(&mut self) {
        self.discard();
    }
}

#[cfg(test)]
mod tests;
