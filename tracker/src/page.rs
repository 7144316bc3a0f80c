//! The page: made at the first declaration, kept from children.

use crate::writer::Writer;
use crate::{verify, Handle};
use belay_abi::access::{Page, MAGIC, NAME, VERSION};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The word that says where the page is. It lies in memory that the kernel empties in a child that is forked, by
/// whatever call: the child has none then.
static PLACE: AtomicPtr<AtomicPtr<Page>> = AtomicPtr::new(ptr::null_mut());

/// Who makes it.
static MAKING: Mutex<()> = Mutex::new(());

/// The page, where this process has one.
pub(crate) fn get() -> Option<Handle> {
    // SAFETY: a page of memory that is never given back, or null.
    let place = unsafe { PLACE.load(Ordering::Acquire).as_ref() }?;
    NonNull::new(place.load(Ordering::Acquire)).map(Handle)
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
    // SAFETY: a function that lives as long as the process, as the library is not unloaded.
    let watched = unsafe { libc::pthread_atfork(Some(before_fork), None, None) };
    if watched != 0 {
        return Err(io::Error::from_raw_os_error(watched));
    }
    let place = match NonNull::new(PLACE.load(Ordering::Acquire)) {
        Some(place) => place,
        None => make_place()?,
    };
    let page = make()?;
    // SAFETY: never given back.
    unsafe { place.as_ref() }.store(page.as_ptr(), Ordering::Release);
    PLACE.store(place.as_ptr(), Ordering::Release);
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

fn make_place() -> io::Result<NonNull<AtomicPtr<Page>>> {
    let bytes = belay_abi::PAGE as usize;
    let place = map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
    // SAFETY: the mapping just made.
    if unsafe { libc::madvise(place.as_ptr(), bytes, libc::MADV_WIPEONFORK) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(place.cast())
}

fn make() -> io::Result<NonNull<Page>> {
    const FLAGS: libc::c_uint = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a string and flags.
    let file = unsafe { libc::memfd_create(NAME.as_ptr(), FLAGS) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: numbers only.
    let sized = unsafe { libc::ftruncate(file.as_raw_fd(), size_of::<Page>() as libc::off_t) } == 0;
    // SAFETY: as above.
    if !sized || unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let page = map(size_of::<Page>(), libc::MAP_SHARED, file.as_raw_fd())?.cast::<Page>();
    // SAFETY: new memory, all zero, to which nobody else refers yet.
    unsafe {
        let page = page.as_ptr();
        (*page).version = VERSION;
        (*page).owner = libc::getpid();
        // Open for as long as the process lives: the agent takes the page by it.
        (*page).descriptor = file.into_raw_fd();
        (&raw mut (*page).magic).write_volatile(MAGIC);
    }
    Ok(page)
}

fn map(bytes: usize, flags: i32, file: i32) -> io::Result<NonNull<libc::c_void>> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, file, 0) };
    match NonNull::new(at) {
        Some(at) if at.as_ptr() != libc::MAP_FAILED => Ok(at),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A word of the page.
macro_rules! words {
    ($($name:ident: $kind:ty),* $(,)?) => {$(
        #[inline]
        pub(crate) fn $name(self) -> &'static $kind {
            // SAFETY: the page is mapped for as long as the process lives; the agent reads and writes it by atomic
            // operations.
            unsafe { &(*self.0.as_ptr()).$name }
        }
    )*};
}

impl Handle {
    words! {
        watched: AtomicU32, busy: AtomicU32, faults: AtomicU32, changes: AtomicU32, site: AtomicU32, want: AtomicU32,
        here: AtomicU32, head: AtomicU64, reserved: AtomicU64, open: AtomicU64, dead_count: AtomicU32,
        dataset_count: AtomicU32, site_count: AtomicU32, forked: AtomicU32, whole_at: AtomicU64,
    }

    /// Whether the process has yet to overwrite some of what a restart has not brought back.
    pub(crate) fn is_lacking(self) -> bool {
        let [head, whole_at] = [self.head(), self.whole_at()].map(|word| word.load(Ordering::Relaxed));
        head < whole_at || self.dead_count().load(Ordering::Relaxed) != 0
    }

    /// Word `at` of the ring.
    #[inline]
    pub(crate) fn ring(self, at: u64) -> &'static AtomicU64 {
        // SAFETY: as above.
        unsafe { &(*self.0.as_ptr()).ring[at as usize % belay_abi::access::RING] }
    }

    /// Where a record begins behind mark `n`.
    pub(crate) fn mark(self, n: u64) -> &'static AtomicU64 {
        // SAFETY: as above.
        unsafe { &(*self.0.as_ptr()).marks[n as usize % belay_abi::access::MARKS] }
    }

    /// How many dimensions a dataset has, 0 where it is none.
    pub(crate) fn dims(self, dataset: u32) -> usize {
        let Some(at) = (dataset as usize).checked_sub(1).filter(|at| *at < belay_abi::access::MOST) else {
            return 0;
        };
        // SAFETY: one of the page's; a number that is being changed by another thread is that of before or after.
        let dims = unsafe { (&raw const (*self.0.as_ptr()).datasets[at].dims).read_volatile() };
        (dims as usize).min(belay_abi::access::DIMS)
    }

    pub(crate) fn as_ptr(self) -> *mut Page {
        self.0.as_ptr()
    }
}
