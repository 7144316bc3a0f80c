//! The handler of SIGSEGV, where the library has one: it looks at touches of memory without access rights. What is none of
//! the library's goes to whoever had the signal before.
//!
//! Who touches may be in the middle of an allocation, or hold any lock: what looks allocates nothing and waits for nobody.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::OnceLock;

/// Looks at a touch of an address, which is a write or not; whether the program is to go on.
pub(crate) type Look = fn(u64, bool) -> bool;

/// Who looks, and what was done at SIGSEGV before.
static INSTALLED: OnceLock<(Look, libc::sigaction)> = OnceLock::new();

const NOT_TRIED: u8 = 0;
const TRYING: u8 = 1;
const DONE: u8 = 2;
const FAILED: u8 = 3;

static STATE: AtomicU8 = AtomicU8::new(NOT_TRIED);

/// From now on `look` sees touches that the access rights do not allow; whether that can be. The first one stays.
#[inline]
pub(crate) fn install(look: Look) -> bool {
    match STATE.load(Ordering::Relaxed) {
        NOT_TRIED => install_first(look),
        state => state != FAILED,
    }
}

#[cold]
fn install_first(look: Look) -> bool {
    if STATE
        .compare_exchange(NOT_TRIED, TRYING, Ordering::Relaxed, Ordering::Relaxed)
        .is_err()
    {
        return true;
    }
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: zeros are a valid value, and the kernel fills it in; the handler is one for SA_SIGINFO, and lives as long as the
    // process.
    let done = unsafe {
        libc::sigaction(libc::SIGSEGV, std::ptr::null(), before.as_mut_ptr());
        let before = before.assume_init();
        INSTALLED.set((look, before)).ok();
        let a = &mut *action.as_mut_ptr();
        a.sa_sigaction = handle as *const () as usize;
        a.sa_mask = before.sa_mask;
        // As the program's own is called, where it has one.
        let flags = if has_handler(&before) {
            before.sa_flags & !libc::SA_RESETHAND
        } else {
            libc::SA_ONSTACK | libc::SA_RESTART
        };
        a.sa_flags = flags | libc::SA_SIGINFO;
        libc::sigaction(libc::SIGSEGV, a, std::ptr::null_mut()) == 0
    };
    STATE.store(if done { DONE } else { FAILED }, Ordering::Relaxed);
    done
}

fn has_handler(action: &libc::sigaction) -> bool {
    action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    /// Bit of the page fault's error code: it was a write (Intel SDM 3A, 4.7).
    const WRITE: i64 = 2;
    /// The kernel says no more: of some, among them a frame of another signal that has no room, it will not say it again.
    const SI_KERNEL: i32 = 0x80;
    let Some((look, before)) = INSTALLED.get() else { return };
    // SAFETY: the kernel's arguments.
    let (code, at, error) = unsafe {
        let context = &*context.cast::<libc::ucontext_t>();
        let error = context.uc_mcontext.gregs[libc::REG_ERR as usize];
        ((*info).si_code, (*info).si_addr() as u64, error)
    };
    // A signal that somebody has sent has no address.
    let sent = code <= 0;
    if !sent && look(at, error & WRITE != 0) {
        return;
    }
    if has_handler(before) {
        call(before, (signal, info, context));
    } else if !(sent && before.sa_sigaction == libc::SIG_IGN) {
        let mut then = *before;
        if !sent {
            // The kernel lets nobody ignore it.
            then.sa_sigaction = libc::SIG_DFL;
        }
        // SAFETY: what was there before. A fault comes again by itself, and does what it did; the others are sent again.
        unsafe {
            libc::sigaction(signal, &then, std::ptr::null_mut());
            if sent || code == SI_KERNEL {
                libc::raise(signal);
            }
        }
    }
}

/// Calls a handler of the program's as it has asked for.
fn call(own: &libc::sigaction, (signal, info, context): (libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)) {
    // SAFETY: the flags say which kind of handler it is; the arguments are the kernel's.
    unsafe {
        if own.sa_flags & libc::SA_RESETHAND != 0 {
            libc::signal(signal, libc::SIG_DFL);
        }
        if own.sa_flags & libc::SA_SIGINFO != 0 {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(own.sa_sigaction);
            handler(signal, info, context);
        } else {
            let handler: extern "C" fn(libc::c_int) = std::mem::transmute(own.sa_sigaction);
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn own(_: libc::c_int) {
        // SAFETY: ends the child.
        unsafe { libc::_exit(7) };
    }

    /// How a child ends that gets the signal from itself, where that does this.
    fn end_of(before: libc::sighandler_t) -> i32 {
        let mut status = 0;
        // SAFETY: the child makes calls that are allowed in one, and no other ones.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::signal(libc::SIGSEGV, before);
                if !install(|_, _| true) {
                    libc::_exit(9);
                }
                libc::raise(libc::SIGSEGV);
                libc::_exit(0);
            }
            assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        }
        status
    }

    #[test]
    fn what_somebody_sends_does_what_it_did() {
        assert_eq!(libc::WTERMSIG(end_of(libc::SIG_DFL)), libc::SIGSEGV);
        assert_eq!(libc::WEXITSTATUS(end_of(own as *const () as libc::sighandler_t)), 7);
        assert_eq!(end_of(libc::SIG_IGN), 0);
    }
}
