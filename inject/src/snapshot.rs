//! Making the snapshot child so that the application never sees a child, a SIGCHLD or an open descriptor.
//!
//! The thread makes an *intermediary* with CLONE_VM | CLONE_VFORK and no exit signal: it shares the memory, so nothing
//! is copied, and the thread sleeps until it is gone. The intermediary closes every descriptor (its table is its own
//! copy) and forks the snapshot child, the only copy of the page tables; then it exits and the thread collects it. The
//! child has lost its parent and belongs to the agent, the subreaper.
//!
//! A userfaultfd belongs to the address space of the task that makes it, its descriptor to that task's table. Made by
//! the intermediary it is one of the application's memory, and yet the application never has it; the child inherits it
//! and the agent takes it from there.
//!
//! What the child need not have is kept from it for the time of the fork, which then copies no page tables of it
//! (MADV_DONTFORK). All of this is one run of injected code, so it is undone also where the agent dies meanwhile.

use crate::libc_nr as nr;
use crate::shared::{open_in_agent, O_RDWR};
use crate::stack::belay_clone_on_stack;
use crate::writer;
use belay_abi::inject::{SnapshotTable, MAX_LEFT_OUT, MAX_UNCHANGED, UFFD_ASYNC};
use belay_abi::{syscall, PAGE};
use core::ptr::{addr_of, addr_of_mut, null_mut};

const CLONE_VM: usize = 0x100;
const CLONE_VFORK: usize = 0x4000;
const SIGCHLD: usize = 17;
const SIGKILL: usize = 9;
const WALL: usize = 0x4000_0000;
/// O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY
const UFFD_FLAGS: usize = 0o2000000 | 0o4000 | 1;
const UFFDIO_API: usize = 0xc018_aa3f;
const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const ENOMEM: isize = 12;
const EFAULT: isize = 14;
const MADV_DONTFORK: usize = 10;
const MADV_DOFORK: usize = 11;

/// Makes the snapshot child.
///
/// # Safety
/// `t` points to a table in the injected area.
pub(crate) unsafe fn run(t: *mut SnapshotTable) {
    unsafe {
        let left_out = addr_of!((*t).left_out).cast();
        advise(left_out, MAX_LEFT_OUT, MADV_DONTFORK);
        leave_unchanged_out(t);
        let child = belay_clone_on_stack(CLONE_VM | CLONE_VFORK, (*t).stack_intermediary, intermediary, t.cast());
        if child < 0 {
            (*t).error = child as i32;
        } else {
            syscall!(nr::WAIT4, child, null_mut::<i32>(), WALL, null_mut::<u8>());
        }
        advise(addr_of!((*t).unchanged).cast(), MAX_UNCHANGED, MADV_DOFORK);
        advise(left_out, MAX_LEFT_OUT, MADV_DOFORK);
    }
}

/// Gives this advice for up to `most` ranges at `ranges`, of which the first that begins at 0 is none any more.
///
/// # Safety
/// `ranges` points to `most` ranges, or to some of which one begins at 0. Each is memory of the application for which
/// this advice changes nothing but what children get of it.
unsafe fn advise(ranges: *const [u64; 2], most: usize, advice: usize) {
    for i in 0..most {
        unsafe {
            let [start, end] = *ranges.add(i);
            if start == 0 {
                break;
            }
            if start < end {
                syscall!(nr::MADVISE, start, end - start, advice);
            }
        }
    }
}

/// Keeps what has not changed from the child, as far as the program has not done so itself, which it would not have undone.
/// The kernel does not say what is kept from children, but a part of a mapping that becomes so is a mapping of its own.
///
/// # Safety
/// `t` points to a table in the injected area.
unsafe fn leave_unchanged_out(t: *mut SnapshotTable) {
    unsafe {
        let ranges = addr_of_mut!((*t).unchanged).cast::<[u64; 2]>();
        for i in 0..MAX_UNCHANGED {
            let [start, end] = *ranges.add(i);
            if start == 0 {
                break;
            }
            let is_one = grow_around(start) == -ENOMEM;
            let advised = is_one && syscall!(nr::MADVISE, start, end - start, MADV_DONTFORK) == 0;
            if !advised || grow_around(start) != -EFAULT {
                (*ranges.add(i))[1] = start;
            }
        }
    }
}

/// What the kernel says to the wish for a third page behind the one before `at` and the one there: EFAULT where these
/// belong to two mappings, ENOMEM where they do not, because the third is taken. Nothing changes.
///
/// # Safety
/// The pages before `at`, at `at` and behind it are mapped: else a mapping of the application could grow.
unsafe fn grow_around(at: u64) -> isize {
    unsafe { syscall!(nr::MREMAP, at - PAGE, 2 * PAGE, 3 * PAGE, 0usize) }
}

/// Makes a userfaultfd of this kind; its descriptor or a negative error.
fn make_uffd(kind: i32) -> isize {
    let features = if kind == UFFD_ASYNC { UFFD_FEATURE_WP_ASYNC } else { 0 };
    // `struct uffdio_api`: version, features, ioctls.
    let mut api = [UFFD_API, features, 0u64];
    unsafe {
        let fd = syscall!(nr::USERFAULTFD, UFFD_FLAGS);
        if fd < 0 {
            return fd;
        }
        let r = syscall!(nr::IOCTL, fd, UFFDIO_API, api.as_mut_ptr());
        if r < 0 {
            syscall!(nr::CLOSE, fd);
            return r;
        }
        fd
    }
}

/// The intermediary's life.
///
/// # Safety
/// Runs on a stack of its own, in a process that shares no descriptors with the application; `t` points to the table.
unsafe extern "C" fn intermediary(t: *mut u8) -> ! {
    unsafe {
        let t = t.cast::<SnapshotTable>();
        syscall!(nr::CLOSE_RANGE, 0usize, u32::MAX, 0usize);
        let mut pid = agent_lives(t);
        if pid == 0 && (*t).want_uffd != 0 {
            (*t).uffd = make_uffd((*t).want_uffd) as i32;
        }
        if pid == 0 {
            pid = syscall!(nr::CLONE, SIGCHLD, 0usize, 0usize, 0usize, 0usize);
            if pid == 0 {
                writer::run(t);
            }
            let lives = agent_lives(t);
            if pid > 0 && lives != 0 {
                syscall!(nr::KILL, pid, SIGKILL);
                syscall!(nr::WAIT4, pid, null_mut::<i32>(), WALL, null_mut::<u8>());
                pid = lives;
            }
        }
        *addr_of_mut!((*t).child) = pid as i32;
        syscall!(nr::EXIT, 0usize);
        core::hint::unreachable_unchecked()
    }
}

/// 0 while the agent can inherit the child; else a negative error. A killed agent loses its descriptors before its
/// tracees are let go. Its heir could be the program itself, where that is a subreaper, and would be told of a child
/// that it never made.
///
/// # Safety
/// `t` points to a table in the injected area.
unsafe fn agent_lives(t: *const SnapshotTable) -> isize {
    unsafe {
        let fd = open_in_agent((*t).agent_pid, (*t).control_fd, O_RDWR);
        if fd < 0 {
            return fd;
        }
        syscall!(nr::CLOSE, fd);
        0
    }
}
