//! The lock of a history's directory.
//!
//! It is one of the open file description: a lock of the process would go when the process closes any descriptor of the
//! file, which happens when it copies the directory. A forked child shares the description, and would have the history
//! open for as long as it lives: so it gives its part up at once (`pthread_atfork`). A child of a bare `clone` has it
//! until it ends or executes another program.

use crate::dir::Dir;
use belay_kernel::fcntl::{set_lock, Owner};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::Once;

/// Descriptors that a child gives up. Places are made once, and used again: a child may look at any moment.
struct Place {
    /// -1: none.
    fd: AtomicI32,
    /// What takes its number then.
    dir: AtomicI32,
    /// Which file it is of, so that nothing else is closed where the program has closed it.
    dev: AtomicU64,
    ino: AtomicU64,
    next: Option<&'static Place>,
}

const FREE: i32 = -1;
/// One that is being filled.
const TAKEN: i32 = -2;

static FIRST: AtomicPtr<Place> = AtomicPtr::new(ptr::null_mut());

/// How often a child has been forked on the way to this process.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Which process this is. Its number alone does not tell: a child can have the same in a namespace of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    number: u32,
    forks: u64,
}

impl Process {
    /// The calling one. Forks count from the first lock on.
    pub(crate) fn now() -> Self {
        Self {
            number: std::process::id(),
            forks: FORKS.load(Ordering::Relaxed),
        }
    }
}

/// All places.
fn places() -> impl Iterator<Item = &'static Place> {
    // SAFETY: null, or a place, which is never freed.
    let first: Option<&'static Place> = unsafe { FIRST.load(Ordering::Acquire).as_ref() };
    std::iter::successors(first, |place| place.next)
}

impl Place {
    fn take() -> &'static Self {
        let free = |p: &&Place| {
            p.fd.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        };
        if let Some(place) = places().find(free) {
            return place;
        }
        let place = Box::leak(Box::new(Place {
            fd: AtomicI32::new(TAKEN),
            dir: AtomicI32::new(FREE),
            dev: AtomicU64::new(0),
            ino: AtomicU64::new(0),
            next: None,
        }));
        loop {
            let first = FIRST.load(Ordering::Acquire);
            // SAFETY: as in `places`.
            place.next = unsafe { first.as_ref() };
            let new = ptr::from_mut(place);
            if FIRST
                .compare_exchange(first, new, Ordering::Release, Ordering::Relaxed)
                .is_ok()
            {
                return place;
            }
        }
    }
}

/// In a child that was just forked: only what may be done in a signal handler.
extern "C" fn give_up() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for place in places() {
        let (fd, dir) = (place.fd.load(Ordering::Acquire), place.dir.load(Ordering::Relaxed));
        if fd < 0 || dir < 0 {
            continue;
        }
        // SAFETY: nothing else is in it than what `fstat` writes.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: room for one.
        let is_there = unsafe { libc::fstat(fd, &raw mut stat) } == 0;
        if is_there && (stat.st_dev, stat.st_ino) == (place.dev.load(Ordering::Relaxed), place.ino.load(Ordering::Relaxed)) {
            // The number stays taken, so that whoever drops the history in the child closes nothing else.
            // SAFETY: the lock's own descriptor.
            unsafe { libc::dup3(dir, fd, libc::O_CLOEXEC) };
        }
    }
}

/// See the module.
pub(crate) struct Lock {
    file: File,
    place: &'static Place,
    process: Process,
}

impl Lock {
    /// Takes the lock of `dir`, without waiting.
    pub(crate) fn take(file: File, dir: &Dir) -> io::Result<Self> {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            // SAFETY: the handler does what may be done in a child. Where there is no memory for it, children keep their part.
            unsafe { libc::pthread_atfork(None, None, Some(give_up)) };
        });
        let meta = file.metadata()?;
        let place = Place::take();
        place.dev.store(meta.dev(), Ordering::Relaxed);
        place.ino.store(meta.ino(), Ordering::Relaxed);
        place.dir.store(dir.as_fd().as_raw_fd(), Ordering::Relaxed);
        place.fd.store(file.as_raw_fd(), Ordering::Release);
        // What is dropped on the way gives the place back.
        let lock = Self {
            file,
            place,
            process: Process::now(),
        };
        set_lock(&lock.file, Owner::Description, &whole(libc::F_WRLCK))?;
        Ok(lock)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.process != Process::now() {
            return;
        }
        // Also for a child of which this one knows nothing. Where it fails, the lock goes with the descriptor.
        let _ = set_lock(&self.file, Owner::Description, &whole(libc::F_UNLCK));
        self.place.fd.store(FREE, Ordering::Release);
    }
}

/// All of a file.
fn whole(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}
