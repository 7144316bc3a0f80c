//! The control page and the thread that serves it (`abi/src/control.rs` says what either side does).
//!
//! The thread is the only one that is in the verbs while the gate is shut. It has no robust list but that of the page,
//! takes no signals, and ends with the process.

use crate::drain;
use crate::gate;
use crate::heap;
use crate::rebuild;
use crate::sync::{sleep, wake};
use belay_abi::control::{
    self, Control, Span, BUSY, CLOSE, DONE, MAGIC, MAX_FAULT, MORE, NAME, OPEN, REBUILD, REFUSED, VERSION, WAITERS,
};
use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr::{addr_of, addr_of_mut, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

const PAGE: usize = 4096;
const LIBRARY: &[u8] = b"libbelay_verbs.so";

/// How an order is answered.
pub(crate) enum Answer {
    Done,
    More,
    Refused(String),
    Busy(String),
}

/// The page; null before the first device is opened.
static CONTROL: AtomicPtr<Control> = AtomicPtr::new(null_mut());

/// Why not, for the agent.
static mut FAULT: [u8; MAX_FAULT as usize] = [0; MAX_FAULT as usize];

/// How the kernel finds what the thread holds: a link for each word, as far before it as a page is long.
#[repr(C)]
struct Head {
    next: *mut c_void,
    offset: libc::c_long,
    pending: *mut c_void,
}
static mut HEAD: Head = Head {
    next: null_mut(),
    offset: 0,
    pending: null_mut(),
};

fn page() -> Option<&'static Control> {
    // SAFETY: it stays mapped as long as the pointer is there.
    unsafe { CONTROL.load(Ordering::Acquire).as_ref() }
}

/// Makes the page and the thread, once. Without them checkpoints are refused, and nothing else.
pub(crate) fn start() {
    static ONCE: AtomicU32 = AtomicU32::new(0);
    if ONCE.swap(1, Ordering::AcqRel) == 0 {
        gate::prepare();
    }
    if page().is_none() {
        begin();
    }
}

/// The child of a fork has no devices, and takes part on its own when it opens one.
pub(crate) extern "C" fn after_fork() {
    // SAFETY: the only thread.
    unsafe {
        heap::after_fork();
        crate::cm::after_fork();
    }
    let old = CONTROL.swap(null_mut(), Ordering::AcqRel);
    gate::after_fork();
    drain::after_fork();
    // SAFETY: the parent's page and its links, which nobody here uses any more.
    unsafe {
        if let Some(page) = old.as_ref() {
            let descriptor = page.descriptor.load(Ordering::Relaxed);
            libc::munmap(old.cast::<u8>().sub(PAGE).cast(), 2 * PAGE);
            libc::close(descriptor);
        }
    }
}

fn begin() {
    // SAFETY: new mappings and a new descriptor, which are given back when something fails.
    unsafe {
        let fd = libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let both = libc::mmap(null_mut(), 2 * PAGE, rw, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        if fd < 0 || both == libc::MAP_FAILED {
            return;
        }
        let place = both.cast::<u8>().add(PAGE);
        let sealed = libc::ftruncate(fd, PAGE as i64) == 0 && libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) == 0;
        let mapped = libc::mmap(place.cast(), PAGE, rw, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0);
        if !sealed || mapped == libc::MAP_FAILED {
            libc::munmap(both, 2 * PAGE);
            libc::close(fd);
            return;
        }
        link(both.cast());
        let c = &*place.cast::<Control>();
        c.version.store(VERSION, Ordering::Relaxed);
        c.owner.store(libc::getpid(), Ordering::Relaxed);
        c.descriptor.store(fd, Ordering::Relaxed);
        let mut name = c.name.get();
        name[..LIBRARY.len()].copy_from_slice(LIBRARY);
        c.name.set(&name);
        c.room.set(&drain::room());
        CONTROL.store(place.cast(), Ordering::Release);
        start_thread();
    }
}

/// Puts the two words that the thread holds on its list.
unsafe fn link(before: *mut u8) {
    let first = before.add(offset_of!(Control, serve)).cast::<*mut c_void>();
    let second = first.add(1);
    HEAD = Head {
        next: first.cast(),
        offset: PAGE as libc::c_long,
        pending: null_mut(),
    };
    *first = second.cast();
    *second = addr_of_mut!(HEAD).cast();
}

unsafe fn start_thread() {
    let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
    libc::sigfillset(&mut all);
    libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
    let mut thread = std::mem::zeroed();
    if libc::pthread_create(&mut thread, std::ptr::null(), serve, null_mut()) == 0 {
        libc::pthread_detach(thread);
    }
    libc::pthread_sigmask(libc::SIG_SETMASK, &old, null_mut());
}

extern "C" fn serve(_: *mut c_void) -> *mut c_void {
    let Some(page) = page() else { return null_mut() };
    gate::always_nested();
    // SAFETY: a list of our own in place of the C library's, which this thread has no use for; a name.
    unsafe {
        libc::syscall(libc::SYS_set_robust_list, addr_of!(HEAD), size_of::<Head>());
        libc::prctl(libc::PR_SET_NAME, c"belay-verbs".as_ptr());
    }
    let mut done = page.order.load(Ordering::SeqCst);
    other(&page.serve, done).store(own(), Ordering::SeqCst);
    page.magic.store(MAGIC, Ordering::SeqCst);
    loop {
        let order = page.order.load(Ordering::SeqCst);
        let shut = gate::shut_by();
        if order != done {
            done = order;
            carry_out(page, order);
        } else if shut != 0 {
            // Not at what holds a later order, which only this thread can answer.
            wait_under(page, done, shut);
        } else {
            sleep(&page.order, done);
        }
    }
}

fn own() -> u32 {
    // SAFETY: no arguments.
    unsafe { libc::gettid() as u32 | WAITERS }
}

fn word(words: &[control::Word; 2], order: u32) -> &AtomicU32 {
    &words[control::place(order)].value
}

fn other(words: &[control::Word; 2], order: u32) -> &AtomicU32 {
    &words[1 - control::place(order)].value
}

/// Waits at the gate that `by` has shut for a change of whatever keeps it shut; opens it when nothing does.
pub(crate) fn wait_at_gate(by: u32) {
    if let Some(page) = page() {
        wait_under(page, page.order.load(Ordering::SeqCst), by);
    }
}

/// The same for a change of what `order` is held by.
fn wait_under(page: &Control, order: u32, by: u32) {
    gate::wait_under(&page.order, word(&page.hold, order), order, by, drain::go_on);
}

/// Is this still the last order?
pub(crate) fn holds(order: u32) -> bool {
    page().is_some_and(|p| p.order.load(Ordering::SeqCst) == order)
}

fn carry_out(page: &Control, order: u32) {
    word(&page.serve, order).store(own(), Ordering::SeqCst);
    let limit = std::time::Duration::from_millis(page.limit_ms.load(Ordering::SeqCst).into());
    let round = page.round.load(Ordering::SeqCst);
    let heard = page.heard.load(Ordering::SeqCst);
    let answer = match control::kind(order) {
        CLOSE => {
            gate::shut(order);
            drain::close(order, round, heard, limit)
        }
        REBUILD => {
            gate::shut(order);
            rebuild::rebuild(order, round, heard)
        }
        OPEN => {
            let by = gate::shut_by();
            if by != 0 {
                gate::open(by, drain::go_on);
            }
            Answer::Done
        }
        kind => Answer::Refused(format!("an order of kind {kind}, which this library does not know")),
    };
    // The last order counts.
    if holds(order) {
        give_answer(page, order, answer);
    }
}

fn give_answer(page: &Control, order: u32, answer: Answer) {
    let (outcome, why) = match answer {
        Answer::Done => (DONE, String::new()),
        Answer::More => (MORE, String::new()),
        Answer::Refused(why) => (REFUSED, why),
        Answer::Busy(why) => (BUSY, why),
    };
    let bytes = why.len().min(MAX_FAULT as usize);
    let fault = addr_of_mut!(FAULT).cast::<u8>();
    // SAFETY: this thread alone writes the text, which has room for so much.
    unsafe { std::ptr::copy_nonoverlapping(why.as_ptr(), fault, bytes) };
    page.fault.set(&Span {
        address: fault as u64,
        bytes: bytes as u64,
    });
    page.told.set(&drain::told());
    page.outcome.store(outcome, Ordering::SeqCst);
    other(&page.serve, order).store(own(), Ordering::SeqCst);
    page.answer.store(order, Ordering::SeqCst);
    word(&page.serve, order).store(0, Ordering::SeqCst);
    wake(word(&page.serve, order));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn who_serves_the_page_does_not_wait_for_an_order_that_it_has_to_answer() {
        let (last, next) = (control::order(12, REBUILD), control::order(13, REBUILD));
        // SAFETY: any bytes are a valid page.
        let page: &'static Control = Box::leak(Box::new(unsafe { std::mem::zeroed() }));
        // As the agent gives an order, between two looks of the thread.
        page.order.store(next, Ordering::SeqCst);
        word(&page.hold, next).store(own(), Ordering::SeqCst);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            wait_under(page, last, CLOSE);
            let _ = tell.send(());
        });
        assert!(told.recv_timeout(Duration::from_secs(10)).is_ok(), "it sleeps");
    }
}
