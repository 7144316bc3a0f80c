//! A descriptor that says that there are events: the program's own, which outlives the provider's.
//!
//! It is an epoll instance that holds the provider's descriptor and an event counter of this library (`kick`).

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

pub(crate) struct Bell {
    /// What the program has.
    pub(crate) fd: i32,
    kick: i32,
    /// The provider's, which never blocks.
    real: AtomicI32,
    /// The provider's is watched.
    watched: AtomicBool,
    rung: AtomicBool,
}

impl Bell {
    /// Takes the provider's descriptor over.
    pub(crate) fn new(real: i32) -> Option<Bell> {
        // SAFETY: both make descriptors.
        let (fd, kick) = unsafe {
            (
                libc::epoll_create1(libc::EPOLL_CLOEXEC),
                libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK),
            )
        };
        let bell = Bell {
            fd,
            kick,
            real: AtomicI32::new(real),
            watched: AtomicBool::new(true),
            rung: AtomicBool::new(false),
        };
        never_block(real);
        if bell.watch(libc::EPOLL_CTL_ADD, kick) && bell.watch(libc::EPOLL_CTL_ADD, real) {
            return Some(bell);
        }
        bell.close();
        None
    }

    fn watch(&self, how: i32, fd: i32) -> bool {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: fd as u64,
        };
        // SAFETY: descriptors, and an event that lives.
        unsafe { libc::epoll_ctl(self.fd, how, fd, &mut event) == 0 }
    }

    /// Waits until there is something; -1 with EAGAIN when the program's descriptor does not block.
    pub(crate) fn wait(&self) -> i32 {
        wait_readable(self.fd)
    }

    /// The provider's descriptor is not seen until [`Bell::show`]: that of a device that is gone says that it is.
    pub(crate) fn hide(&self) {
        if self.watched.swap(false, Ordering::AcqRel) {
            self.watch(libc::EPOLL_CTL_DEL, self.real.load(Ordering::Acquire));
        }
    }

    /// Takes the descriptor of a new device in place of one that is gone. It is not shown yet.
    pub(crate) fn exchange(&self, real: i32) {
        self.hide();
        never_block(real);
        self.real.store(real, Ordering::Release);
    }

    pub(crate) fn show(&self) {
        if !self.watched.swap(true, Ordering::AcqRel) {
            self.watch(libc::EPOLL_CTL_ADD, self.real.load(Ordering::Acquire));
        }
    }

    /// Makes the descriptor readable for an event of this library's.
    pub(crate) fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        let one = 1u64;
        // SAFETY: eight bytes. A counter that is full is readable already.
        unsafe { libc::write(self.kick, std::ptr::from_ref(&one).cast(), 8) };
    }

    /// There is no such event any more.
    pub(crate) fn silence(&self) {
        if self.rung.swap(false, Ordering::AcqRel) {
            let mut count = 0u64;
            // SAFETY: eight bytes.
            unsafe { libc::read(self.kick, std::ptr::from_mut(&mut count).cast(), 8) };
        }
    }

    pub(crate) fn close(&self) {
        for fd in [self.fd, self.kick] {
            // SAFETY: descriptors of our own, which nothing uses any more.
            unsafe { libc::close(fd) };
        }
    }
}

/// Waits until a descriptor of the program's is readable, as `read` would on one that blocks; -1 with EAGAIN when it does
/// not block.
pub(crate) fn wait_readable(fd: i32) -> i32 {
    // SAFETY: a descriptor.
    match unsafe { libc::fcntl(fd, libc::F_GETFL) } {
        // The program has closed it.
        -1 => return -1,
        flags if flags & libc::O_NONBLOCK != 0 => {
            crate::set_errno(libc::EAGAIN);
            return -1;
        }
        _ => {}
    }
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element.
    while unsafe { libc::poll(&mut poll, 1, -1) } < 0 {
        if crate::errno() != libc::EINTR || !goes_on() {
            return -1;
        }
    }
    0
}

/// Whether a call goes on that a handler has interrupted. The `read` of libibverbs does where the program has asked for it
/// (SA_RESTART), and `poll` never. Which signal it was is not told, so all that have handlers must have asked. Leaves
/// EINTR in `errno`.
fn goes_on() -> bool {
    let asked = |signal| {
        // SAFETY: all zeroes are one, and it is only filled.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let known = unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) } == 0;
        let handler = action.sa_sigaction;
        !known || handler == libc::SIG_DFL || handler == libc::SIG_IGN || action.sa_flags & libc::SA_RESTART != 0
    };
    let all = (1..=libc::SIGRTMAX()).all(asked);
    crate::set_errno(libc::EINTR);
    all
}

fn never_block(fd: i32) {
    // SAFETY: a descriptor of the provider's, of which nobody else knows.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
    }
}
