//! What only the task itself may ask the kernel.

use crate::libc_nr as nr;
use crate::locks;
use crate::policies::NODES;
use belay_abi::inject::{ProcessTable, SchedAttr, ThreadTable, AFFINITY_WORDS, MAX_TIMERS, SPECULATIONS};
use belay_abi::syscall;
use core::ptr::{addr_of, addr_of_mut, null};

const PR_GET_PDEATHSIG: usize = 2;
const PR_GET_DUMPABLE: usize = 3;
const PR_GET_KEEPCAPS: usize = 7;
const PR_GET_NAME: usize = 16;
const PR_GET_TSC: usize = 25;
const PR_GET_SECUREBITS: usize = 27;
const PR_GET_TIMERSLACK: usize = 30;
const PR_MCE_KILL_GET: usize = 34;
pub(crate) const PR_SET_CHILD_SUBREAPER: usize = 36;
const PR_GET_CHILD_SUBREAPER: usize = 37;
const PR_GET_TID_ADDRESS: usize = 40;
const PR_GET_THP_DISABLE: usize = 42;
const PR_GET_SPECULATION_CTRL: usize = 52;
const PR_GET_IO_FLUSHER: usize = 58;
const PR_SCHED_CORE: usize = 62;
const PR_SCHED_CORE_GET: usize = 0;
const PR_GET_MDWE: usize = 66;
const PR_GET_MEMORY_MERGE: usize = 68;
/// Those that x86-64 has, and 0 is not allocated.
const PROTECTION_KEYS: usize = 16;
/// The kernel's own.
const NO_MEMORY: usize = 0xffff_ffff_ffff_0000;
const ENOMEM: isize = 12;
/// Of `personality`: changes nothing.
const ASK_PERSONALITY: usize = 0xffff_ffff;
const ARCH_GET_CPUID: usize = 0x1011;
/// `kcmp`: address spaces.
const KCMP_VM: usize = 1;
const PR_TIMER_CREATE_RESTORE_IDS: usize = 77;
const PR_TIMER_CREATE_RESTORE_IDS_GET: usize = 2;
const MEMBARRIER_CMD_GET_REGISTRATIONS: usize = 512;
const MEMBARRIER_CMD_PRIVATE_EXPEDITED: usize = 8;
const MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ: usize = 128;

/// Fills in the thread's table.
///
/// # Safety
/// `t` points to a table in the injected area.
pub(crate) unsafe fn thread(t: *mut ThreadTable) {
    unsafe {
        syscall!(nr::SIGALTSTACK, null::<u8>(), addr_of_mut!((*t).altstack));
        syscall!(nr::PRCTL, PR_GET_TID_ADDRESS, addr_of_mut!((*t).tid_address));
        syscall!(nr::PRCTL, PR_GET_PDEATHSIG, addr_of_mut!((*t).pdeathsig));
        (*t).timer_slack = syscall!(nr::PRCTL, PR_GET_TIMERSLACK) as u64;
        syscall!(nr::PRCTL, PR_GET_NAME, addr_of_mut!((*t).comm));
        syscall!(
            nr::SCHED_GETATTR,
            0usize,
            addr_of_mut!((*t).sched),
            size_of::<SchedAttr>(),
            0usize
        );
        let robust = addr_of_mut!((*t).robust_list).cast::<u64>();
        syscall!(nr::GET_ROBUST_LIST, 0usize, robust, robust.add(1));
        (*t).ioprio = syscall!(nr::IOPRIO_GET, 1usize, 0usize) as i64;
        (*t).securebits = syscall!(nr::PRCTL, PR_GET_SECUREBITS) as u32;
        (*t).personality = syscall!(nr::PERSONALITY, ASK_PERSONALITY) as u32;
        (*t).machine_checks = syscall!(nr::PRCTL, PR_MCE_KILL_GET) as i32;
        syscall!(nr::PRCTL, PR_GET_TSC, addr_of_mut!((*t).tsc));
        (*t).cpuid = syscall!(nr::ARCH_PRCTL, ARCH_GET_CPUID, 0usize) as i32;
        (*t).io_flusher = syscall!(nr::PRCTL, PR_GET_IO_FLUSHER) as i32;
        let speculation = addr_of_mut!((*t).speculation).cast::<i32>();
        for kind in 0..SPECULATIONS {
            *speculation.add(kind) = syscall!(nr::PRCTL, PR_GET_SPECULATION_CTRL, kind) as i32;
        }
        syscall!(
            nr::PRCTL,
            PR_SCHED_CORE,
            PR_SCHED_CORE_GET,
            0usize,
            0usize,
            addr_of_mut!((*t).core)
        );
        let (policy, nodes) = (addr_of_mut!((*t).policy), addr_of_mut!((*t).nodes));
        syscall!(nr::GET_MEMPOLICY, policy, nodes, NODES, 0usize, 0usize);
        let witness = *addr_of!((*t).mark.witness);
        if witness != 0 {
            // What is compared tells nothing; whether it may be does.
            (*t).blind = -(syscall!(nr::KCMP, witness, witness, KCMP_VM, 0usize, 0usize) as i32);
        }
        (*t).affinity_bytes = syscall!(nr::SCHED_GETAFFINITY, 0usize, 8 * AFFINITY_WORDS, addr_of_mut!((*t).affinity)) as i64;
    }
}

/// The memory protection keys that the process has allocated, a bit each. The kernel, asked to give a key to memory
/// where there can be none, looks first whether there is such a key.
fn protection_keys() -> u32 {
    let mut keys = 0;
    for key in 1..PROTECTION_KEYS {
        // SAFETY: no process has memory there.
        let said = unsafe { syscall!(nr::PKEY_MPROTECT, NO_MEMORY, 4096usize, 0usize, key) };
        if said == -ENOMEM {
            keys |= 1 << key;
        }
    }
    keys
}

/// What the process has registered for with `membarrier`. Before Linux 6.3 the kernel does not tell, but lets only those
/// who have registered use most commands: those for private barriers, each of which stands before its registration.
fn registrations() -> i32 {
    // SAFETY: takes numbers only.
    let ask = |command: usize| unsafe { syscall!(nr::MEMBARRIER, command, 0usize, 0usize) } as i32;
    let told = ask(MEMBARRIER_CMD_GET_REGISTRATIONS);
    if told >= 0 {
        return told;
    }
    let (mut found, mut command) = (0, MEMBARRIER_CMD_PRIVATE_EXPEDITED);
    while command <= MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ {
        if ask(command) == 0 {
            found |= command << 1;
        }
        command <<= 2;
    }
    found as i32
}

/// Fills in the process's table.
///
/// # Safety
/// `p` points to a table in the injected area.
pub(crate) unsafe fn process(p: *mut ProcessTable) {
    unsafe {
        for i in 0..64usize {
            syscall!(
                nr::RT_SIGACTION,
                i + 1,
                null::<u8>(),
                addr_of_mut!((*p).sigactions).cast::<[u64; 4]>().add(i),
                8usize
            );
        }
        for i in 0..3usize {
            syscall!(nr::GETITIMER, i, addr_of_mut!((*p).itimers).cast::<[i64; 4]>().add(i));
        }
        (*p).brk = syscall!(nr::BRK, 0usize) as u64;
        (*p).membarrier = registrations();
        (*p).dumpable = syscall!(nr::PRCTL, PR_GET_DUMPABLE) as i32;
        syscall!(nr::PRCTL, PR_GET_CHILD_SUBREAPER, addr_of_mut!((*p).child_subreaper));
        if (*p).child_subreaper != 0 {
            (*p).mark.subreaper = 1;
            syscall!(nr::PRCTL, PR_SET_CHILD_SUBREAPER, 0usize);
        }
        (*p).keepcaps = syscall!(nr::PRCTL, PR_GET_KEEPCAPS) as i32;
        (*p).thp_disable = syscall!(nr::PRCTL, PR_GET_THP_DISABLE) as i32;
        (*p).mdwe = syscall!(nr::PRCTL, PR_GET_MDWE, 0usize, 0usize, 0usize, 0usize) as i32;
        (*p).merge = syscall!(nr::PRCTL, PR_GET_MEMORY_MERGE) as i32;
        (*p).timer_ids = syscall!(
            nr::PRCTL,
            PR_TIMER_CREATE_RESTORE_IDS,
            PR_TIMER_CREATE_RESTORE_IDS_GET,
            0usize,
            0usize,
            0usize
        ) as i32;
        (*p).segment_bytes = syscall!(nr::MODIFY_LDT, 0usize, addr_of_mut!((*p).segment), 8usize) as i32;
        (*p).keys = protection_keys();
        (*p).future_locks = 0;
        if locks::is_locked((*p).untouched_page, 4096) {
            let mut there = 0u8;
            syscall!(nr::MINCORE, (*p).untouched_page, 4096usize, addr_of_mut!(there));
            (*p).future_locks = 1 | u32::from(there & 1) << 1;
        }
        let count = ((*p).timer_count as usize).min(MAX_TIMERS);
        let timers = addr_of_mut!((*p).timers).cast::<belay_abi::inject::TimerSlot>();
        for i in 0..count {
            let slot = timers.add(i);
            let id = *addr_of!((*slot).id);
            // `interval` and `value` together are the kernel's `struct itimerspec`.
            syscall!(nr::TIMER_GETTIME, id, addr_of_mut!((*slot).interval));
            (*slot).overrun = syscall!(nr::TIMER_GETOVERRUN, id) as i32;
        }
    }
}
