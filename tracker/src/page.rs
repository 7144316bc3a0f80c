//! The page: made at the first declaration, kept from children.

use crate::writer::Writer;
use crate::{verify, Handle};
use belay_abi::access::{Dataset, Dead, Page, Share, Site, MAGIC, NAME, VERSION};
use belay_abi::words::Shared;
use belay_kernel::pages::Reference;
use belay_kernel::{process, shared};
use rustix::fs::{MemfdFlags, SealFlags};
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, IntoRawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The word that says where the page is. It lies in memory that the kernel empties in a child that is forked, by
/// whatever call: the child has none then.
static PLACE: Reference<Reference<Page>> = Reference::none();

/// Who makes it.
static MAKING: Mutex<()> = Mutex::new(());

/// The page, where this process has one.
pub(crate) fn get() -> Option<Handle> {
    PLACE.get()?.get().map(Handle)
}

/// The page, made where there is none.
pub(crate) fn open() -> io::Result<Handle> {
    if let Some(page) = get() {
        return Ok(page);
    }
    let _one = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    verify::begin();
    if let Some(page) = get() {
        return Ok(page);
    }
    // A child has a copy of all datasets: what the program then overwrites, the child may still read.
    process::before_fork(before_fork)?;
    let place = match PLACE.get() {
        Some(place) => place,
        None => {
            let made = Reference::wiped_on_fork()?;
            PLACE.set(made);
            made
        }
    };
    let page = make()?;
    place.set(page);
    Ok(Handle(page))
}

/// Before the process forks.
extern "C" fn before_fork() {
    let Some(page) = get().filter(|page| page.watched().load(Ordering::Relaxed) != 0) else {
        return;
    };
    let Ok(writer) = Writer::begin(page) else { return };
    if page.is_lacking() {
        // What the child has of it stays missing. Before the restart nobody forked here: it is no part of the way.
        page.forked().store(1, Ordering::Relaxed);
    } else {
        writer.reset();
    }
}

fn make() -> io::Result<&'static Page> {
    let file = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, size_of::<Page>() as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let page: &Page = shared::Shared::map(file.as_fd(), size_of::<Page>())?.leak();
    page.version.store(VERSION, Ordering::Relaxed);
    page.owner.store(std::process::id().cast_signed(), Ordering::Relaxed);
    // Open for as long as the process lives: the agent takes the page by it.
    page.descriptor.store(file.into_raw_fd(), Ordering::Relaxed);
    page.magic.store(MAGIC, Ordering::Release);
    Ok(page)
}

/// A word of the page.
macro_rules! words {
    ($($name:ident: $kind:ty),* $(,)?) => {$(
        #[inline]
        pub(crate) fn $name(self) -> &'static $kind {
            &self.0.$name
        }
    )*};
}

impl Handle {
    words! {
        watched: AtomicU32, busy: AtomicU32, faults: AtomicU32, changes: AtomicU32, site: AtomicU32, want: AtomicU32,
        here: AtomicU32, head: AtomicU64, reserved: AtomicU64, open: AtomicU64, dead_count: AtomicU32,
        dataset_count: AtomicU32, site_count: AtomicU32, forked: AtomicU32, whole_at: AtomicU64, point: AtomicU64,
        point_want: AtomicU64, point_here: AtomicU64, point_at: AtomicU64, point_took: AtomicU64, point_turn: AtomicU32,
        payload_bytes: AtomicU32,
    }

    /// Whether the process has yet to overwrite some of what a restart has not brought back.
    pub(crate) fn is_lacking(self) -> bool {
        let [head, whole_at] = [self.head(), self.whole_at()].map(|word| word.load(Ordering::Relaxed));
        head < whole_at || self.dead_count().load(Ordering::Relaxed) != 0
    }

    /// Word `at` of the ring.
    #[inline]
    pub(crate) fn ring(self, at: u64) -> &'static AtomicU64 {
        &self.0.ring[at as usize % belay_abi::access::RING]
    }

    /// Where a record begins behind mark `n`.
    pub(crate) fn mark(self, n: u64) -> &'static AtomicU64 {
        &self.0.marks[n as usize % belay_abi::access::MARKS]
    }

    /// How many dimensions a dataset has, 0 where it is none.
    pub(crate) fn dims(self, dataset: u32) -> usize {
        /// The word whose upper half that is.
        const WORD: usize = offset_of!(Dataset, keep) / 8;
        const _: () = assert!(offset_of!(Dataset, dims) == WORD * 8 + 4);
        let Some(dataset) = (dataset as usize).checked_sub(1).and_then(|at| self.0.datasets.get(at)) else {
            return 0;
        };
        // A number that is being changed by another thread is that of before or after.
        let dims = dataset.word(WORD).load(Ordering::Relaxed) >> 32;
        (dims as usize).min(belay_abi::access::DIMS)
    }

    /// The datasets. Only a writer changes them.
    pub(crate) fn datasets(self) -> &'static [Shared<Dataset>] {
        &self.0.datasets
    }

    /// What parts of global arrays they are. The same.
    pub(crate) fn shares(self) -> &'static [Shared<Share>] {
        &self.0.shares
    }

    /// What is kept with the point at which the program waits.
    pub(crate) fn payload(self) -> &'static [AtomicU64] {
        &self.0.payload
    }

    /// The sites, which only a writer adds to.
    pub(crate) fn sites(self) -> &'static [Shared<Site>] {
        &self.0.sites
    }

    /// What is missing. Only a writer changes it.
    pub(crate) fn dead(self) -> &'static [Shared<Dead>] {
        &self.0.dead
    }

    /// The name of a site; none where there is none with this number.
    pub(crate) fn site_name(self, site: u32) -> Option<[u8; 32]> {
        let site = (site as usize).checked_sub(1).and_then(|at| self.0.sites.get(at));
        site.map(|site| site.get().name)
    }
}
