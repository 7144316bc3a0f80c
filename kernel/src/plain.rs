//! Values that the kernel and other programs can read and write as they lie in memory.

use belay_abi::{aio, inject, restore};

/// A value without padding, of which all bytes are valid.
///
/// # Safety
/// That is so.
pub unsafe trait Plain: Copy {
    /// The value with all bytes zero.
    fn zero() -> Self {
        // SAFETY: all bytes are valid, says who implements it.
        unsafe { std::mem::zeroed() }
    }
}

/// The bytes of `values`.
pub fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: nothing lies between the bytes of the values, all of which have been set.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The same, to be written.
pub fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and all bytes that are written are valid.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

// SAFETY: integers have neither padding nor invalid bytes.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for i16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for i64 {}
// SAFETY: nothing lies between the elements of an array.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}
/// Structures of the kernel and of the tables for other programs, with all their fields.
macro_rules! plain {
    ($kind:ty { $($field:ident),* $(,)? }) => {
        // SAFETY: all fields are plain, and as long together as the structure: that is looked at below.
        unsafe impl Plain for $kind {}
        const _: () = {
            const fn bytes<T, F: Plain>(_: fn(&T) -> &F) -> usize {
                size_of::<F>()
            }
            assert!(0 $(+ bytes(|whole: &$kind| &whole.$field))* == size_of::<$kind>());
        };
    };
}

plain!(libc::timeval { tv_sec, tv_usec });
plain!(libc::linger { l_onoff, l_linger });
plain!(libc::sembuf {
    sem_num,
    sem_op,
    sem_flg
});
plain!(libc::ucred { pid, uid, gid });
plain!(inject::Mark {
    pid,
    tid,
    signo,
    done,
    frame,
    subreaper,
    witness
});
plain!(inject::AltStack { sp, flags, pad, size });
plain!(inject::Turn { go, over });
plain!(inject::WaitTable { mark, over });
plain!(inject::ThreadTable {
    mark,
    altstack,
    tid_address,
    pdeathsig,
    securebits,
    timer_slack,
    comm,
    sched,
    robust_list,
    ioprio,
    affinity,
    affinity_bytes,
    machine_checks,
    tsc,
    cpuid,
    io_flusher,
    speculation,
    blind,
    core,
    policy,
    personality,
    nodes
});
plain!(inject::SchedAttr {
    size,
    policy,
    flags,
    nice,
    priority,
    runtime,
    deadline,
    period,
    util_min,
    util_max
});
plain!(inject::KernelSigaction {
    handler,
    flags,
    restorer,
    mask
});
plain!(inject::TimerSlot {
    id,
    overrun,
    interval,
    value
});
plain!(inject::ProcessTable {
    mark,
    sigactions,
    itimers,
    brk,
    membarrier,
    dumpable,
    child_subreaper,
    keepcaps,
    thp_disable,
    merge,
    timer_ids,
    segment_bytes,
    mdwe,
    keys,
    segment,
    timer_count,
    future_locks,
    untouched_page,
    timers
});
plain!(inject::RangesTable { mark, count, ranges });
plain!(inject::SnapshotTable {
    mark,
    stack_intermediary,
    stack_writers,
    agent_pid,
    control_fd,
    control_ino,
    child,
    error,
    want_uffd,
    uffd,
    has_keys,
    reserved,
    left_out,
    unchanged
});
plain!(inject::NotificationTable {
    mark,
    turn,
    room,
    stride,
    capacity,
    message_bytes,
    queue,
    how,
    signo,
    socket_count,
    sockets,
    socket,
    outcome,
    error,
    received,
    sent,
    pad,
    value,
    cookie
});
plain!(inject::RingsTable {
    mark,
    turn,
    count,
    pad,
    rings
});
plain!(inject::RingSlot {
    address,
    bytes,
    scratch,
    polls,
    tail,
    pad,
    outcome,
    error
});
plain!(restore::Table { addr, len });
plain!(restore::Call {
    nr,
    flags,
    step,
    index,
    args
});
plain!(restore::Fill {
    vaddr,
    bytes,
    offset,
    fd,
    droppable,
    sums
});
plain!(restore::ThreadPlan {
    tid,
    index,
    stack,
    stack_bytes,
    calls,
    plan,
    makes
});
plain!(restore::Helper { tid, pad, stack });
plain!(restore::Plan {
    magic,
    slot,
    control,
    pid,
    helper_count,
    helpers,
    before,
    fills,
    rings,
    after,
    threads,
    last,
    hold,
    stop_signal,
    arrivals,
    guest,
    first
});
plain!(aio::RingPlan {
    address,
    bytes,
    head,
    tail,
    events,
    polls,
    poll_count
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_values() {
        let mut values = [restore::Table::zero(); 2];
        bytes_of_mut(&mut values)[16] = 7;
        assert_eq!((values[1].addr, bytes_of(&[0x0201u16, 3])), (7, &[1, 2, 3, 0][..]));
    }
}
