//! Moves chunks home from the local tiers, on threads of its own.
//!
//! ```text
//! sealed ──> copied to home as .tmp-, fsync ──┬── not published yet: home's copy counts from now on; the one in the tier goes
//!                                            ├── published: renamed at home, where nothing has that name, directory synced;
//!                                            │   the one in the tier goes
//!                                            └── given up, or not needed any more: home's copy goes
//! ```
//! A kill at any instant leaves the chunk in the tier whole, or at home whole, or both, and perhaps an unfinished
//! `.tmp-` file. The lock orders the last step of a move against publishing, giving up and the removal of chunks that
//! are not needed.

use super::desk::{Desk, Place, Spec};
use super::rule::Policy;
use crate::chunk::{self, Chunk};
use crate::control::{is_rotten, Control};
use crate::fetch::check_pages;
use crate::flush::{rate::Rate, step_back};
use crate::needed::Needed;
use crate::store::{Removed, Store};
use crate::StorageError;
use belay_image::sections::create_private;
use belay_image::{files, ImageError};
use belay_kernel::dir;
use belay_kernel::direct::{self, Buffer};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Moves at a time.
const THREADS: usize = 2;
/// Bytes read and written at a time.
const PIECE: usize = 4 << 20;

/// A chunk in a local tier.
#[derive(Debug, Clone, Copy)]
struct Item {
    /// Which of the desk's entries is about it: what has been given up stays at the desk until its turn.
    ticket: u32,
    tier: usize,
    bytes: u64,
    published: bool,
    /// It could not be moved.
    failed: bool,
}

/// The local tiers of a job, and what moves chunks out of them.
#[derive(Debug)]
pub struct Mover {
    store: Store,
    desk: Desk,
    items: Mutex<BTreeMap<u32, Item>>,
    tickets: AtomicU32,
    rate: Rate,
    control: Control,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    /// Why a chunk could not be moved last.
    fault: Mutex<Option<String>>,
    /// Chunks that their tiers cannot read back, and why the last of them, until somebody has been told.
    rotten: Mutex<(BTreeSet<u32>, Option<String>)>,
}

impl Mover {
    /// For the tiers of `store`, of which `specs` says more; finds what lies in them.
    pub fn new(store: Store, specs: Vec<Spec>, policy: Policy, rate: Option<u64>) -> Result<Arc<Self>, StorageError> {
        let mover = Arc::new(Self {
            desk: Desk::new(policy, specs).at(store.tiers().iter().map(|t| t.dir.clone()).collect()),
            items: Mutex::default(),
            tickets: AtomicU32::default(),
            rate: Rate::new(rate),
            control: Control::default(),
            threads: Mutex::default(),
            fault: Mutex::default(),
            rotten: Mutex::default(),
            store,
        });
        let is_home = |(tier, id, _): &(usize, u32, u64)| mover.is_home_from(*tier, *id);
        let (moved, left): (Vec<_>, Vec<_>) = mover.store.in_tiers()?.into_iter().partition(is_home);
        if !moved.is_empty() {
            // The end of a move was cut off, perhaps before the name at home was durable.
            mover.store.sync_place(Place::Home)?;
        }
        for (tier, id, _) in moved {
            remove(&mover.store.path_in(Place::Tier(tier), id));
        }
        for (tier, id, bytes) in left {
            let entry = mover.insert(id, tier, bytes, true);
            mover.desk.found(tier, entry, bytes);
        }
        Ok(mover)
    }

    /// Notes a chunk; what the desk is to call it.
    fn insert(&self, id: u32, tier: usize, bytes: u64, published: bool) -> u64 {
        let item = Item {
            ticket: self.tickets.fetch_add(1, Ordering::Relaxed),
            tier,
            bytes,
            published,
            failed: false,
        };
        self.items().insert(id, item);
        entry(id, item.ticket)
    }

    /// Whether chunk `id`, as it lies in `tier`, lies at home as well, whole: what is in the tier goes then.
    fn is_home_from(&self, tier: usize, id: u32) -> bool {
        self.is_same_at_home(tier, id) && self.is_whole(&self.store.path_in(Place::Home, id))
    }

    /// Whether chunk `id` at home says that it is the one in `tier`. One with the same number only is another one.
    fn is_same_at_home(&self, tier: usize, id: u32) -> bool {
        let both = [Place::Home, Place::Tier(tier)].map(|place| chunk::mark(&self.store.path_in(place, id)));
        matches!(both, [Ok(a), Ok(b)] if a == b)
    }

    /// Whether the file at `path` is a chunk of which each page is what its table says: a table may stand behind anything.
    fn is_whole(&self, path: &Path) -> bool {
        let chunk = chunk::entry_of(path).and_then(|entry| Chunk::open(path.to_owned(), &entry));
        chunk.is_ok_and(|chunk| check_pages(&chunk, &self.control).is_ok())
    }

    fn items(&self) -> MutexGuard<'_, BTreeMap<u32, Item>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where places are given.
    pub fn desk(&self) -> &Desk {
        &self.desk
    }

    /// Starts the threads, where they are not running yet, and lets them try again what has failed. Not before the
    /// caller has done with forking.
    pub fn start(self: &Arc<Self>) -> Result<(), StorageError> {
        let again: Vec<(u32, Item)> = {
            let mut items = self.items();
            let failed = items.iter_mut().filter(|(_, i)| i.failed);
            failed
                .map(|(id, i)| {
                    i.failed = false;
                    (*id, *i)
                })
                .collect()
        };
        for (id, i) in again {
            self.desk.again(i.tier, entry(id, i.ticket), i.bytes);
        }
        self.desk.limit_memory(u64::MAX);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        while threads.len() < THREADS {
            let mover = self.clone();
            let run = move || {
                step_back();
                mover.run();
            };
            let started = std::thread::Builder::new().name("belay-move".into()).spawn(run);
            threads.push(started.map_err(|source| StorageError::System {
                step: "start a thread that moves chunks",
                source,
            })?);
        }
        Ok(())
    }

    fn run(&self) {
        while let Some((tier, entry, bytes)) = self.desk.take() {
            let (id, ticket) = parts(entry);
            let mut stays = false;
            if let Err(e) = self.move_home(tier, (id, ticket), bytes) {
                // It may have been given up since.
                if let Some(item) = self.items().get_mut(&id).filter(|i| i.ticket == ticket) {
                    (item.failed, stays) = (true, true);
                }
                tracing::warn!(chunk = id, error = %e, "chunk stays in its local tier");
                self.note_rot(id, &e);
                *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(e.to_string());
            }
            self.desk.flushed(tier, bytes, !stays);
        }
    }

    /// Chunk `id` could not be moved.
    fn note_rot(&self, id: u32, e: &StorageError) {
        let StorageError::Image(why) = e else { return };
        // What cannot be written lies at home.
        let is_of_tier = !matches!(why, ImageError::Io { step, .. } if *step != "read");
        let mut rotten = self.rotten.lock().unwrap_or_else(PoisonError::into_inner);
        if is_of_tier && is_rotten(why) && rotten.0.insert(id) {
            rotten.1 = Some(why.to_string());
        }
    }

    /// Why a chunk cannot be read in its tier, where that has not been told yet: nothing new is to refer to it.
    pub fn take_rotten(&self) -> Option<String> {
        self.rotten.lock().unwrap_or_else(PoisonError::into_inner).1.take()
    }

    fn move_home(&self, tier: usize, (id, ticket): (u32, u32), bytes: u64) -> Result<(), StorageError> {
        let Some(item) = self.items().get(&id).copied().filter(|i| i.ticket == ticket) else {
            return Ok(()); // given up
        };
        let begin = Instant::now();
        let from = self.store.name_in(Place::Tier(tier), id, item.published);
        // It may be published while it is opened.
        let source = files::open(&from).or_else(|_| files::open(&self.store.path_in(Place::Tier(tier), id)));
        let temporary = self.store.name_in(Place::Home, id, false);
        let home = self.store.path_in(Place::Home, id);
        if source.is_err() && item.published && !from.exists() && home.exists() {
            // A fetch has brought it home, and removed what lay here.
            self.items().remove(&id);
            return Ok(());
        }
        let copied = source.map_err(StorageError::from).and_then(|(file, length)| {
            if length != bytes {
                return Err(ImageError::damaged(&from, format!("{length} bytes instead of {bytes}")).into());
            }
            self.copy(&file, &from, bytes, &temporary)
        });
        let mut items = self.items();
        let Some(item) = items.get(&id).copied().filter(|i| i.ticket == ticket) else {
            drop(items);
            remove(&temporary);
            return Ok(());
        };
        if copied.is_err() {
            remove(&temporary);
        }
        copied?;
        if item.published {
            self.arrive(tier, id)?;
            self.store.sync_place(Place::Home)?;
        }
        items.remove(&id);
        drop(items);
        remove(&self.store.name_in(Place::Tier(tier), id, item.published));
        self.desk.observe(bytes, begin.elapsed());
        tracing::debug!(chunk = id, bytes, "chunk moved home");
        Ok(())
    }

    /// Gives the copy of chunk `id` from `tier` its name at home. What has that name there stays: it may have been brought
    /// by a fetch because the one in the tier is damaged, or be another one that is needed. Not where it is the same,
    /// damaged, and the copy is whole.
    fn arrive(&self, tier: usize, id: u32) -> Result<(), StorageError> {
        let (temporary, home) = (
            self.store.name_in(Place::Home, id, false),
            self.store.path_in(Place::Home, id),
        );
        let Err(e) = dir::rename_new(&temporary, &home) else {
            return Ok(());
        };
        let is_there = e.kind() == ErrorKind::AlreadyExists;
        let is_home = is_there && self.is_home_from(tier, id);
        if is_there && !is_home && self.is_same_at_home(tier, id) && self.is_whole(&temporary) {
            let renamed = std::fs::rename(&temporary, &home);
            return renamed.map_err(|e| ImageError::io("rename", &temporary, e).into());
        }
        remove(&temporary);
        if !is_there {
            return Err(ImageError::io("rename", &temporary, e).into());
        }
        if is_home {
            return Ok(());
        }
        let lies = self.store.path_in(Place::Tier(tier), id);
        let why = format!(
            "another chunk with its number, or the same one damaged, is {}",
            home.display()
        );
        Err(ImageError::damaged(&lies, why).into())
    }

    fn copy(&self, source: &std::fs::File, from: &Path, bytes: u64, to: &Path) -> Result<(), StorageError> {
        let file = create_private(to)?;
        let mut buf = Buffer::default();
        let mut at = 0;
        while at < bytes {
            let n = (bytes - at).min(PIECE as u64);
            buf.resize(n as usize);
            self.rate.take(n, &self.control)?;
            direct::read_exact_at(source, &mut buf, at).map_err(|e| ImageError::io("read", from, e))?;
            direct::write_all_at(&file, &buf, at).map_err(|e| ImageError::io("write", to, e))?;
            at += n;
        }
        file.sync_all().map_err(|e| ImageError::io("fsync", to, e))?;
        Ok(())
    }

    /// The chunk `id` with `pages` pages is complete in `tier`, where it was granted room for `granted`.
    pub(crate) fn sealed(&self, tier: usize, id: u32, granted: u64, pages: u32) {
        let bytes = chunk::file_bytes(pages);
        let entry = self.insert(id, tier, bytes, false);
        self.desk.written(tier, entry, granted, bytes);
    }

    /// Gives the sealed chunks `ids` their names, wherever they are, and makes the names durable.
    pub(crate) fn publish(&self, ids: &[u32]) -> Result<(), StorageError> {
        let mut items = self.items();
        let mut places = BTreeSet::new();
        for id in ids {
            let place = items.get(id).map_or(Place::Home, |i| Place::Tier(i.tier));
            let (from, to) = (self.store.name_in(place, *id, false), self.store.path_in(place, *id));
            std::fs::rename(&from, &to).map_err(|e| ImageError::io("rename", &from, e))?;
            if let Some(item) = items.get_mut(id) {
                item.published = true;
            }
            places.insert(place);
        }
        for place in places {
            self.store.sync_place(place)?;
        }
        Ok(())
    }

    /// Sealed chunk `id` has been given up before it was published.
    pub(crate) fn give_up(&self, id: u32) {
        let item = self.items().remove(&id);
        remove(
            &self
                .store
                .name_in(item.map_or(Place::Home, |i| Place::Tier(i.tier)), id, false),
        );
        self.make_free(item.as_slice());
    }

    /// The room of chunks that are given up, where nobody will come across them any more who would.
    fn make_free(&self, items: &[Item]) {
        let failed = items.iter().filter(|i| i.failed);
        failed.for_each(|i| self.desk.removed(i.tier, i.bytes));
    }

    /// Removes every chunk that is not in `needed`, and every unfinished one that is not being moved.
    pub(crate) fn collect(&self, needed: &Needed) -> Result<Removed, ImageError> {
        let mut items = self.items();
        let mut dropped = Vec::new();
        items.retain(|id, i| {
            let stays = !i.published || !self.store.is_unneeded(Place::Tier(i.tier), *id, needed);
            if !stays {
                dropped.push(*i);
            }
            stays
        });
        let moving = items.keys().copied().collect();
        let removed = self.store.collect_but(needed, &moving);
        drop(items);
        self.make_free(&dropped);
        removed
    }

    /// Bytes of published chunks of `ids` that lie in tiers in memory, so that they do not survive the machine.
    pub fn in_memory(&self, ids: &BTreeSet<u32>) -> u64 {
        let items = self.items();
        let there = items
            .iter()
            .filter(|(id, i)| ids.contains(id) && self.store.is_memory(i.tier));
        there.map(|(_, i)| i.bytes).sum()
    }

    /// Whether all chunks of `ids` are home.
    pub fn are_home(&self, ids: &BTreeSet<u32>) -> bool {
        let items = self.items();
        ids.iter().all(|id| !items.contains_key(id))
    }

    /// After [`Mover::finish`]: bytes that could not be moved home, and why, where there are any.
    pub fn left(&self) -> Option<(u64, String)> {
        let bytes = self.items().values().map(|i| i.bytes).sum();
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
        (bytes > 0).then(|| (bytes, fault.unwrap_or_else(|| "moving was given up".into())))
    }

    /// Waits until everything is home, or cannot be moved. The threads must have been started.
    pub fn drain(&self) {
        self.desk.drain();
    }

    /// The job ends: moves home what is still in the tiers, as fast as that goes, also what could not be moved before,
    /// and ends the threads.
    pub fn finish(self: &Arc<Self>) -> Result<(), StorageError> {
        self.rate.lift();
        let has_failed = self.items().values().any(|i| i.failed);
        if has_failed || !self.desk.is_idle() {
            self.start()?;
            self.drain();
        }
        self.stop();
        Ok(())
    }

    /// Ends the threads; what is being moved is left where it is.
    pub fn stop(&self) {
        self.control.cancel();
        self.desk.close();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for t in threads {
            if t.join().is_err() {
                tracing::error!("a thread that moves chunks has failed");
            }
        }
    }
}

/// What the desk calls chunk `id` with `ticket`.
fn entry(id: u32, ticket: u32) -> u64 {
    u64::from(ticket) << 32 | u64::from(id)
}

/// The chunk and the ticket that the desk calls `entry`.
fn parts(entry: u64) -> (u32, u32) {
    (entry as u32, (entry >> 32) as u32)
}

fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), error = %e, "could not be removed");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
