//! Words in memory shared with other processes that the kernel marks when their holder dies (`set_robust_list`).
//!
//! The kernel finds the words by a list in the memory of the holder. The list must be whole whenever the holder may
//! be killed, and nobody else may write to it: so each shared page has a private one before it for its links, and the
//! list is made before any word is held.

use crate::shared::maps_no_more;
use belay_abi::control::{Control, WAITERS};
use belay_abi::PAGE;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;

/// Pages with two words each that one thread may have: the kernel looks at no more than 2048 words
/// (`ROBUST_LIST_LIMIT`).
pub const MOST: usize = 1024;

/// The first page of a file, mapped shared behind a private page.
#[derive(Debug)]
pub struct SharedPage {
    base: NonNull<u8>,
    /// A list leads through the links in the private page.
    is_linked: AtomicBool,
}

// SAFETY: the mapping belongs to the value alone, and what is in it is read and written by atomic operations or,
// before it is shared among threads, by one of them.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Maps the first page of `file`, which must have one for as long as the value lives.
    pub fn map(file: BorrowedFd<'_>) -> io::Result<Self> {
        maps_no_more(file, PAGE)?;
        let (read_write, page) = (libc::PROT_READ | libc::PROT_WRITE, PAGE as usize);
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), 2 * page, read_write, private, -1, 0) };
        let mapped = |at: *mut libc::c_void| NonNull::new(at.cast::<u8>()).filter(|_| at != libc::MAP_FAILED);
        let base = mapped(base).ok_or_else(io::Error::last_os_error)?;
        let whole = Self {
            base,
            is_linked: AtomicBool::new(false),
        };
        // SAFETY: the second page of the mapping just made, to which nothing refers yet; this one is no longer.
        let shared = unsafe {
            libc::mmap(
                base.as_ptr().add(page).cast(),
                page,
                read_write,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file.as_raw_fd(),
                0,
            )
        };
        mapped(shared).ok_or_else(io::Error::last_os_error)?;
        Ok(whole)
    }

    /// The shared page. Others may write to it at any time.
    pub fn shared(&self) -> NonNull<u8> {
        // SAFETY: the mapping has two pages.
        unsafe { self.base.add(PAGE as usize) }
    }

    /// The shared page, as the control page of a library that takes part.
    pub fn control(&self) -> &Control {
        const { assert!(size_of::<Control>() <= PAGE as usize) };
        // SAFETY: the page is mapped as long as `self`, aligned and larger than the structure, whose parts are all atomic:
        // any bytes are valid, and others may change them.
        unsafe { self.shared().cast().as_ref() }
    }

    /// The word of 4 bytes at this offset, which must be a multiple of 4 and inside.
    pub fn half(&self, at: usize) -> &AtomicU32 {
        assert!(at + size_of::<AtomicU32>() <= PAGE as usize && at.is_multiple_of(align_of::<AtomicU32>()));
        // SAFETY: within the shared page, as has just been checked, and aligned. It lives as long as `self`; any value is
        // valid, and others write to it by atomic operations or harm only themselves.
        unsafe { self.shared().add(at).cast::<AtomicU32>().as_ref() }
    }

    /// Where the link of the word `at` this place in the shared page is: at the same one in the private page.
    fn link(&self, at: usize) -> *mut Link {
        assert!(at + size_of::<Link>() <= PAGE as usize && at.is_multiple_of(align_of::<Link>()));
        // SAFETY: within the private page, as has just been checked.
        unsafe { self.base.as_ptr().add(at).cast() }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: both pages belong to this value, and nothing refers to them any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), 2 * PAGE as usize) };
    }
}

/// `struct robust_list`.
#[repr(C)]
struct Link {
    next: *mut Link,
}

/// `struct robust_list_head`.
#[repr(C)]
struct Head {
    first: *mut Link,
    /// From a link to its word.
    offset: libc::c_long,
    pending: *mut Link,
}

// SAFETY: the links are places in pages that the owner of the head keeps; nobody follows them but the kernel.
unsafe impl Send for Head {}
// SAFETY: as above.
unsafe impl Sync for Head {}

/// A thread that does nothing but hold words. They are marked when it is gone: when the process dies, and when the
/// value is dropped.
pub struct Holder {
    tid: u32,
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// What the kernel reads when the thread ends: it goes after the thread.
    _list: (Box<Head>, Linked),
}

/// Pages whose links are those of one list alone, as long as this lives.
struct Linked(Vec<Arc<SharedPage>>);

impl Linked {
    fn take(pages: Vec<Arc<SharedPage>>) -> io::Result<Self> {
        let mut taken = Self(Vec::with_capacity(pages.len()));
        for page in pages {
            if page.is_linked.swap(true, Ordering::AcqRel) {
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            taken.0.push(page);
        }
        Ok(taken)
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        self.0.iter().for_each(|page| page.is_linked.store(false, Ordering::Release));
    }
}

impl Holder {
    /// One for the words at these places in each of `pages`, which no other one may have. It holds none of them yet.
    pub fn new(pages: Vec<Arc<SharedPage>>, words: [usize; 2]) -> io::Result<Self> {
        if pages.len() > MOST {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
        let of_page = |page: &Arc<SharedPage>| words.map(|at| page.link(at));
        let pages = Linked::take(pages)?;
        let links: Vec<*mut Link> = pages.0.iter().flat_map(of_page).collect();
        let mut head = Box::new(Head {
            first: std::ptr::null_mut(),
            offset: PAGE.cast_signed(),
            pending: std::ptr::null_mut(),
        });
        let last = std::ptr::from_mut(head.as_mut());
        let nexts = links.iter().skip(1).copied().chain([last.cast()]);
        for (link, next) in links.iter().zip(nexts) {
            // SAFETY: a place in a private page, where nothing but this link is: no other list leads through it.
            unsafe { link.write(Link { next }) };
        }
        head.first = links.first().copied().unwrap_or(last.cast());
        let (end, ended) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let at = last as usize;
        let hold = move || {
            drop(tell.send(register(at)));
            // Until the other end is dropped.
            let _ = ended.recv();
        };
        let thread = std::thread::Builder::new()
            .name("belay-gate".into())
            .stack_size(64 << 10)
            .spawn(hold)?;
        let tid = told.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Self {
            tid,
            end: Some(end),
            thread: Some(thread),
            _list: (head, pages),
        })
    }

    /// The value of a word that the thread holds.
    pub fn mark(&self) -> u32 {
        self.tid | WAITERS
    }
}

/// Makes the list with its head `at` this address that of the calling thread, whose number is returned.
fn register(at: usize) -> io::Result<u32> {
    // SAFETY: the head and all that it leads to are there until the thread has been joined.
    crate::check(unsafe { libc::syscall(libc::SYS_set_robust_list, at, size_of::<Head>()) })?;
    // SAFETY: takes nothing and cannot fail.
    Ok(unsafe { libc::gettid() }.unsigned_abs())
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl std::fmt::Debug for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "thread {}, which holds words", self.tid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::futex;
    use belay_abi::control::{is_held, Word, DIED};
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    use std::time::Duration;

    fn memory() -> OwnedFd {
        // SAFETY: a terminated string; the descriptor is new.
        let fd = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"belay-held".as_ptr(), libc::MFD_CLOEXEC)) };
        // SAFETY: takes numbers only.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), PAGE.cast_signed()) }, 0);
        fd
    }

    fn words(page: &SharedPage) -> &[Word; 2] {
        // SAFETY: the page begins with zeros, is aligned, and lives as long as the reference.
        unsafe { page.shared().cast().as_ref() }
    }

    fn map(file: &OwnedFd) -> Arc<SharedPage> {
        Arc::new(SharedPage::map(file.as_fd()).unwrap())
    }

    fn holder(pages: &[Arc<SharedPage>]) -> Holder {
        Holder::new(pages.to_vec(), [0, size_of::<Word>()]).unwrap()
    }

    #[test]
    fn who_waits_hears_of_the_end_of_the_thread() {
        let file = memory();
        let pages = [map(&memory()), map(&file)];
        let held = holder(&pages);
        words(&pages[1])[1].value.store(held.mark(), Ordering::SeqCst);
        let other = map(&file);
        let value = held.mark();
        let waits = std::thread::spawn(move || {
            let word = &words(&other)[1].value;
            while is_held(word.load(Ordering::SeqCst)) {
                futex::wait(word, value, Duration::from_secs(60));
            }
            word.load(Ordering::SeqCst)
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished());
        drop(held);
        assert_eq!(waits.join().unwrap(), WAITERS | DIED);
        // Neither held nor waited for: as it was.
        assert_eq!(words(&pages[0])[0].value.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_page_is_in_one_list() {
        let (page, other) = (map(&memory()), map(&memory()));
        let held = holder(std::slice::from_ref(&page));
        let again = |pages: &[&Arc<SharedPage>]| Holder::new(pages.iter().map(|p| Arc::clone(p)).collect(), [0, 8]);
        for pages in [&[&other, &page][..], &[&other, &other]] {
            assert_eq!(again(pages).unwrap_err().raw_os_error(), Some(libc::EBUSY));
        }
        drop(held);
        again(&[&other, &page]).unwrap();
    }

    #[test]
    fn the_death_of_the_process_is_that_of_its_threads() {
        let file = memory();
        let ours = map(&file);
        // SAFETY: the child ends by a signal; what it does before needs locks that no other thread of a test holds
        // for long.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let pages = [map(&file)];
            let held = holder(&pages);
            words(&pages[0])[0].value.store(held.mark(), Ordering::SeqCst);
            futex::wake(&words(&pages[0])[0].value);
            loop {
                std::thread::park();
            }
        }
        let word = &words(&ours)[0].value;
        while word.load(Ordering::SeqCst) == 0 {
            futex::wait(word, 0, Duration::from_secs(60));
        }
        let value = word.load(Ordering::SeqCst);
        assert!(is_held(value));
        // SAFETY: the child has not been waited for; takes numbers only.
        unsafe { libc::kill(child, libc::SIGKILL) };
        while is_held(word.load(Ordering::SeqCst)) {
            futex::wait(word, value, Duration::from_secs(60));
        }
        assert_eq!(word.load(Ordering::SeqCst), WAITERS | DIED);
        // SAFETY: waits for a child; no status is wanted.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    }
}
