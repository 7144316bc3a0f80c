//! The snapshot child: writes the process's memory to chunks, and exits when the agent has read its mappings.
//!
//! It is a fork of the application with all signals blocked, in a session of its own, without descriptors. The agent
//! fills the control memory with the ranges that hold data and with room in chunks; writers take range after range
//! ([`crate::output`]).

use crate::libc_nr as nr;
use crate::output::Output;
use crate::shared::{open_in_agent, FUTEX_WAIT, MAP_SHARED, O_RDWR, PROT_READ_WRITE};
use crate::stack::belay_clone_on_stack;
use belay_abi::inject::{Control, Range, SnapshotTable, Writer, MAX_WRITERS, STATE_ABANDONED, STATE_GO, STATE_READY, WRITER_STACK};
use belay_abi::{syscall, PAGE};
use core::ptr::{addr_of, addr_of_mut, null, null_mut};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

const FUTEX_WAKE: usize = 1;
const PR_SET_PDEATHSIG: usize = 1;
const PR_SET_NAME: usize = 15;
const SIGKILL: usize = 9;
const ETIMEDOUT: isize = -110;
/// CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM
const THREAD_FLAGS: usize = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000;

/// What a writer thread is given.
#[repr(C)]
struct Job {
    control: *mut Control,
    index: usize,
    agent_pid: i32,
}

/// The child's life.
///
/// # Safety
/// Runs in the freshly forked child; `t` points to the table in its copy of the injected area.
pub(crate) unsafe fn run(t: *mut SnapshotTable) -> ! {
    unsafe {
        if (*t).has_keys != 0 {
            // Access with every key, for this task only.
            core::arch::asm!("wrpkru", in("eax") 0, in("ecx") 0, in("edx") 0, options(nostack, preserves_flags));
        }
        let all = u64::MAX;
        syscall!(nr::RT_SIGPROCMASK, 0usize, addr_of!(all), null::<u64>(), 8usize);
        syscall!(nr::PRCTL, PR_SET_NAME, c"belay-snapshot".as_ptr());
        syscall!(nr::SETSID);
        let agent = (*t).agent_pid;
        let fd = open_in_agent(agent, (*t).control_fd, O_RDWR);
        if fd < 0 {
            exit(-fd as i32);
        }
        // `struct stat` is 144 bytes; the inode number is its second word.
        let mut stat = [0u64; 18];
        if syscall!(nr::FSTAT, fd, stat.as_mut_ptr()) < 0 || stat[1] != (*t).control_ino {
            exit(1);
        }
        let head = syscall!(nr::MMAP, 0usize, PAGE, PROT_READ_WRITE, MAP_SHARED, fd, 0usize);
        if head < 0 {
            exit(-head as i32);
        }
        let head = head as *mut Control;
        // The agent may have said GO already; that must not be overwritten.
        let _ = (*head).state.compare_exchange(0, STATE_READY, AcqRel, Acquire);
        syscall!(nr::FUTEX, addr_of!((*head).state), FUTEX_WAKE, i32::MAX);
        let patience = [1i64, 0];
        loop {
            match (*head).state.load(Acquire) {
                STATE_GO => break,
                STATE_ABANDONED => exit(1),
                _ => {}
            }
            let r = syscall!(nr::FUTEX, addr_of!((*head).state), FUTEX_WAIT, STATE_READY, patience.as_ptr());
            if r == ETIMEDOUT && syscall!(nr::GETPPID) != agent as isize {
                exit(1);
            }
        }
        // Only now is the agent the parent for certain: the intermediary's end must not count as the parent's death.
        syscall!(nr::PRCTL, PR_SET_PDEATHSIG, SIGKILL);
        if syscall!(nr::GETPPID) != agent as isize {
            exit(1);
        }
        let control = syscall!(nr::MMAP, 0usize, (*head).bytes, PROT_READ_WRITE, MAP_SHARED, fd, 0usize);
        if control < 0 {
            (*head).error.store(-control as i32, Release);
            exit(1);
        }
        syscall!(nr::CLOSE, fd);
        let control = control as *mut Control;
        let writers = ((*control).writers as usize).min(MAX_WRITERS);
        let mut jobs: [Job; MAX_WRITERS] = [const {
            Job {
                control: null_mut(),
                index: 0,
                agent_pid: 0,
            }
        }; MAX_WRITERS];
        for (index, job) in jobs.iter_mut().enumerate().take(writers) {
            *job = Job {
                control,
                index,
                agent_pid: agent,
            };
        }
        for (index, job) in jobs.iter_mut().enumerate().take(writers).skip(1) {
            let top = (*t).stack_writers - (index as u64 - 1) * WRITER_STACK;
            let tid = belay_clone_on_stack(THREAD_FLAGS, top, thread, addr_of_mut!(*job).cast());
            if tid < 0 {
                // The others take its share.
                let w = writer_of(control, index);
                (*w).done.store(1, Release);
            }
        }
        write_ranges(&jobs[0]);
        for index in 1..writers {
            let w = writer_of(control, index);
            while (*w).done.load(Acquire) == 0 {
                syscall!(nr::FUTEX, addr_of!((*w).done), FUTEX_WAIT, 0usize, null::<u8>());
            }
        }
        (*control).written.store(1, Release);
        syscall!(nr::FUTEX, addr_of!((*control).written), FUTEX_WAKE, i32::MAX);
        // The agent reads the mappings.
        while (*control).released.load(Acquire) == 0 {
            syscall!(nr::FUTEX, addr_of!((*control).released), FUTEX_WAIT, 0usize, null::<u8>());
        }
        (*control).left.store(1, Release);
        exit(0)
    }
}

/// A further writer's life.
///
/// # Safety
/// Runs on a stack of its own; `job` points to its [`Job`], which stays as long as the child lives.
unsafe extern "C" fn thread(job: *mut u8) -> ! {
    unsafe {
        write_ranges(&*job.cast::<Job>());
        syscall!(nr::EXIT, 0usize);
        core::hint::unreachable_unchecked()
    }
}

/// Ends the child.
fn exit(status: i32) -> ! {
    unsafe {
        syscall!(nr::EXIT_GROUP, status);
        core::hint::unreachable_unchecked()
    }
}

/// The part of the control memory that belongs to this writer.
///
/// # Safety
/// `control` is the whole control memory, mapped, with more than `index` writers.
unsafe fn writer_of(control: *mut Control, index: usize) -> *mut Writer {
    unsafe { addr_of_mut!((*control).writer).cast::<Writer>().add(index) }
}

/// Takes ranges until none is left.
///
/// # Safety
/// The control memory of `job` is mapped, and no other thread has its index; the ranges in it are memory of this child
/// that nobody else uses.
unsafe fn write_ranges(job: &Job) {
    unsafe {
        let control = job.control;
        let writer = writer_of(control, job.index);
        let ranges = control.cast::<u8>().add((*control).range_table as usize).cast::<Range>();
        let mut out = Output::new(control, writer, job.agent_pid);
        let mut error = 0;
        while error == 0 {
            let i = (*control).next.fetch_add(1, Relaxed);
            if i >= (*control).ranges {
                break;
            }
            error = out.write_range(&mut *ranges.add(i as usize));
        }
        if error == 0 {
            error = out.end();
        }
        (*writer).error.store(error, Relaxed);
        (*writer).done.store(1, Release);
        syscall!(nr::FUTEX, addr_of!((*writer).done), FUTEX_WAKE, i32::MAX);
    }
}
