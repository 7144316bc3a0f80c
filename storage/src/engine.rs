//! What the agent keeps between checkpoints: which chunks are there, and where each page's contents can be found again.
//!
//! ```text
//! Idle(kept) ── begin ──> Session(kept) ── commit, keep ──> Idle(kept')
//!                            └── lost: the checkpoint failed ──> Idle(nothing), read again from the newest generation by the next begin
//! ```

use crate::index::Index;
use crate::needed::Needed;
use crate::page_key::PageKey;
use crate::payoff::Payoff;
use crate::place::desk::Spec;
use crate::place::mover::Mover;
use crate::place::rule::Policy;
use crate::session::{Session, StorageLimit};
use crate::store::{Removed, Store};
use crate::StorageError;
use belay_image::manifest::{ChunkEntry, Manifest};
use belay_image::sections::{Kind, SectionFile};
use belay_image::{extents, TableId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

/// Size of a chunk.
pub const CHUNK_BYTES: u64 = 64 << 20;

/// Small local tiers make chunks smaller, but not smaller than this.
const MIN_CHUNK_BYTES: u64 = 4 << 20;

/// How the names of a generation's tables end.
const TABLE_SUFFIX: &str = ".bidx";

/// Choices that hold for the job.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Most bytes that the checkpoints may take.
    pub max_bytes: Option<u64>,
    /// Look for pages by their contents.
    pub find_by_hash: bool,
    /// With these hashes.
    pub key: PageKey,
}

#[derive(Debug)]
struct Kept {
    live: BTreeMap<u32, ChunkEntry>,
    index: Option<Index>,
}

/// The storage engine of a running job.
#[derive(Debug)]
pub struct Engine {
    store: Store,
    /// The local tiers, where there are any.
    mover: Option<Arc<Mover>>,
    options: Options,
    pub(crate) chunk_bytes: u64,
    /// The next chunk's number. Shared with the sessions, so that a number is used once also where its checkpoint
    /// fails: its chunk may still be on its way home.
    next_id: Arc<AtomicU32>,
    kept: Option<Kept>,
    payoff: Payoff,
    /// Directory of the generation whose chunks the next one may share, when `kept` has been lost.
    base: Option<PathBuf>,
    /// Pages of that which are not to be shared.
    unread: Vec<(u32, Range<u32>)>,
}

impl Engine {
    /// The engine of a job that has stored nothing in `store` on which it could build.
    pub fn new(store: Store, options: Options) -> Result<Self, StorageError> {
        store.create()?;
        Ok(Self {
            store,
            mover: None,
            options,
            chunk_bytes: CHUNK_BYTES,
            next_id: Arc::new(AtomicU32::new(1)),
            kept: None,
            payoff: Payoff::default(),
            base: None,
            unread: Vec::new(),
        })
    }

    /// Has chunks written to the store's local tiers first, of which `specs` says more.
    pub fn use_tiers(&mut self, specs: Vec<Spec>, policy: Policy, rate: Option<u64>) -> Result<(), StorageError> {
        // What a tier cannot take in pieces it is not given.
        let smallest = specs.iter().map(|s| s.capacity / 4).min().unwrap_or(CHUNK_BYTES);
        self.chunk_bytes = self.chunk_bytes.min(smallest).max(MIN_CHUNK_BYTES);
        self.mover = Some(Mover::new(self.store.clone(), specs, policy, rate)?);
        Ok(())
    }

    /// The local tiers.
    pub fn mover(&self) -> Option<&Arc<Mover>> {
        self.mover.as_ref()
    }

    /// Has the numbers of chunks noted, so that none is used twice where chunks may lie out of sight. Before
    /// [`Engine::use_tiers`].
    pub fn keep_numbers(&mut self) -> Result<(), StorageError> {
        let first = self.store.keep_numbers()?;
        self.number_from(first);
        Ok(())
    }

    /// Lets the next generation share the chunks of the one in `generation`, whose every page has been read and found
    /// whole, but for those that are `unread`, by their chunks.
    pub fn build_on(&mut self, generation: &Path, unread: Vec<(u32, Range<u32>)>) {
        self.base = Some(generation.to_owned());
        self.unread = unread;
        self.kept = None;
    }

    /// What has been stored may be damaged: the next generation shares nothing with those before.
    pub fn distrust(&mut self) {
        self.base = None;
        self.kept = None;
    }

    /// Chunks made from now on have numbers from `next` on, or greater ones.
    pub fn number_from(&mut self, next: u32) {
        self.next_id.fetch_max(next, Ordering::Relaxed);
    }

    /// Bytes of the files in the store.
    pub fn bytes(&self) -> Result<u64, StorageError> {
        Ok(self.store.bytes()?)
    }

    /// Begins a checkpoint; `elsewhere` bytes count against the limit besides those in the store.
    pub fn begin(&mut self, elsewhere: u64) -> Result<Session, StorageError> {
        let kept = self.kept.take();
        let is_there = |k: &Kept| k.live.values().all(|c| self.store.check_present(c).is_ok());
        let vanished = !kept.as_ref().is_none_or(is_there);
        let kept = match kept {
            // A file that vanished or was cut must not be referred to again.
            Some(_) if vanished => self.empty(),
            Some(k) => self.suited(k),
            None => self.load(),
        };
        self.number_from(self.store.next_id()?);
        if let Some(numbers) = self.store.numbers() {
            numbers.reserve(self.next_id.load(Ordering::Relaxed))?;
        }
        let limit = match self.options.max_bytes {
            Some(limit) => Some(StorageLimit::Quota {
                limit,
                used: self.store.bytes()? + elsewhere,
            }),
            None => None,
        };
        if let Some(mover) = &self.mover {
            mover.start()?;
        }
        let mut session = Session::new(
            (self.store.clone(), self.mover.clone()),
            self.next_id.clone(),
            self.chunk_bytes,
            limit,
            kept.live,
            kept.index,
            self.options.key.secret(),
        );
        session.without = self.why_without().map(str::to_owned);
        Ok(session)
    }

    /// Why stored pages are not looked for, but for a sample, where that does not pay.
    pub fn why_without(&self) -> Option<&str> {
        self.payoff.why_not()
    }

    fn new_index(&self) -> Option<Index> {
        let index = self.options.find_by_hash.then(|| Index::new(self.why_without().is_some()));
        index.and_then(usable)
    }

    fn empty(&self) -> Kept {
        Kept {
            live: BTreeMap::new(),
            index: self.new_index(),
        }
    }

    /// `kept` with a table of all pages, or of a sample, as the next checkpoint needs it.
    fn suited(&self, kept: Kept) -> Kept {
        let sampled = self.why_without().is_some();
        let index = match kept.index {
            Some(index) if index.is_sampled() == sampled => Some(index),
            Some(index) if sampled => usable(index.thinned()),
            // What was not in the sample, or for which there was no memory, is read again.
            _ if self.options.find_by_hash && self.base.is_some() => return self.load(),
            _ => self.new_index(),
        };
        Kept { index, ..kept }
    }

    /// Reads what the generation to build on has stored: pages that it refers to. Others in its chunks are dead for it,
    /// and nobody has compared them with their hashes since they were written. Where it cannot be read, the next
    /// generation stands on its own.
    fn load(&self) -> Kept {
        let mut kept = self.empty();
        let (Some(base), true) = (&self.base, kept.index.is_some()) else {
            return kept;
        };
        let Ok(manifest) = Manifest::read(base) else {
            return kept;
        };
        // Only for pages that are there: the manifest alone could ask for any amount.
        let there = manifest.chunks.iter().filter(|c| self.store.check_present(c).is_ok());
        let pages = there.map(|c| u64::from(c.pages)).sum();
        kept.index = kept.index.and_then(|mut i| usable(i.reserve(pages).map(|()| i)));
        let used = used_pages(base, &manifest);
        let mut unread: BTreeMap<u32, Vec<&Range<u32>>> = BTreeMap::new();
        for (id, pages) in &self.unread {
            unread.entry(*id).or_default().push(pages);
        }
        for entry in &manifest.chunks {
            let Ok(chunk) = self.store.open(entry) else { continue };
            if let Some(index) = &mut kept.index {
                for (first, end) in used.get(&entry.id).into_iter().flatten() {
                    let hashes = chunk.hashes.get(*first as usize..*end as usize).unwrap_or_default();
                    let is_read = |page: &u32| !unread.get(&entry.id).is_some_and(|all| all.iter().any(|r| r.contains(page)));
                    for (page, hash) in (*first..).zip(hashes).filter(|(page, _)| is_read(page)) {
                        index.insert(*hash, entry.id, page);
                    }
                }
            }
            kept.live.insert(entry.id, *entry);
        }
        kept
    }

    /// The directory of the generation that the next one is built on.
    pub fn base(&self) -> Option<&Path> {
        self.base.as_deref()
    }

    /// Takes over what a session has learned, now that its generation is committed in directory `generation`.
    pub fn keep(&mut self, session: Session, generation: &Path) {
        self.payoff.learn(&session.stats, session.live.is_empty());
        let (live, index) = session.into_kept();
        self.kept = Some(Kept { live, index });
        self.base = Some(generation.to_owned());
        self.unread.clear();
    }

    /// Removes chunks that are not in `needed`.
    pub fn collect(&mut self, needed: &Needed) -> Result<Removed, StorageError> {
        if let Some(kept) = &mut self.kept {
            if kept.live.keys().any(|id| !needed.contains(*id)) {
                kept.live.retain(|id, _| needed.contains(*id));
                if let Some(index) = &mut kept.index {
                    index.forget_others(&kept.live.keys().copied().collect());
                }
            }
        }
        Ok(match &self.mover {
            Some(mover) => mover.collect(needed)?,
            None => self.store.collect(needed)?,
        })
    }
}

/// The pages of each chunk that the tables of the generation in `base` refer to, as ranges. Not those of files that
/// processes map: a restart reads them only where a file is not what it was, and a checkpoint before it refers to them.
fn used_pages(base: &Path, manifest: &Manifest) -> BTreeMap<u32, Vec<(u32, u32)>> {
    let mut used: BTreeMap<u32, Vec<(u32, u32)>> = BTreeMap::new();
    let names = manifest.files.iter().map(|f| &f.name);
    for name in names.filter(|n| n.ends_with(TABLE_SUFFIX) && **n != TableId::Code.file_name()) {
        let path = base.join(name);
        let read = SectionFile::read(&path).and_then(|f| extents::decode(&path, f.get(Kind::Extents)?));
        match read {
            Ok(table) => {
                for e in table {
                    let pages = u32::try_from(e.pages()).unwrap_or(u32::MAX);
                    used.entry(e.chunk).or_default().push((e.page, e.page.saturating_add(pages)));
                }
            }
            Err(error) => tracing::warn!(%error, "what it refers to is stored again"),
        }
    }
    for ranges in used.values_mut() {
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let joined = next.0 <= last.1;
            if joined {
                last.1 = last.1.max(next.1);
            }
            joined
        });
    }
    used
}

/// The table of hashes; without it everything is written.
fn usable(index: Result<Index, StorageError>) -> Option<Index> {
    index
        .inspect_err(|error| tracing::warn!(%error, "{}", crate::index::NO_ROOM))
        .ok()
}
