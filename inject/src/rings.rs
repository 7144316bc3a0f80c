//! Waits for the requests of native asynchronous I/O that are on their way.
//!
//! The kernel tells nobody how many there are. But `io_destroy` waits until there are none, and what they have brought
//! is then in the pages of the ring, although it is unmapped: a pipe keeps these pages (`vmsplice`). So a new ring is
//! made first, turned to the place where the old one stands; then the old one is taken away, its last events are read
//! from the pipe and put into the new one, and that is moved to the old one's address, which is the name by which the
//! program knows it. Polls do not end by themselves: the kernel gives them up, and they are submitted again.
//!
//! No other thread of the process runs (see `turn`) and all signals are blocked. Nothing is taken away before all that
//! can fail has been done.

use crate::libc_nr as nr;
use crate::turn;
use belay_abi::affinity::Pinned;
use belay_abi::aio::{distance, Event, Request, RingHead, RingPlan, Turning};
use belay_abi::inject::{RingSlot, RingsTable, MAX_RINGS, RING_DEAD, RING_DONE, RING_KEPT, RING_LOST};
use belay_abi::{syscall, PAGE};
use core::ptr::{addr_of_mut, null_mut};

const SIG_SETMASK: usize = 2;
const F_SETPIPE_SZ: usize = 1031;
/// Pages that one pipe may hold for anybody (`fs.pipe-max-size`).
const PIPE_BYTES: u64 = 1 << 20;
const MAX_PIPES: usize = 16;
const EINVAL: isize = -22;
const EIO: isize = -5;
const PROT_READ_WRITE: usize = 3;
/// MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
const MAP_FLAGS: usize = 2 | 0x20 | 0x4000;
/// O_NONBLOCK | O_CLOEXEC
const PIPE_FLAGS: usize = 0o4000 | 0o2000000;

/// Replaces every ring of the table.
///
/// # Safety
/// `t` points to a table in the injected area.
pub(crate) unsafe fn run(t: *mut RingsTable) {
    unsafe {
        let all = u64::MAX;
        let mut before = 0u64;
        syscall!(nr::RT_SIGPROCMASK, SIG_SETMASK, &raw const all, &raw mut before, 8usize);
        // Each processor keeps some places of a ring for itself: all places can be had only on one.
        let pinned = Pinned::here();
        let turn = addr_of_mut!((*t).turn);
        let count = if turn::mine(turn) {
            ((*t).count as usize).min(MAX_RINGS)
        } else {
            0
        };
        let slots = addr_of_mut!((*t).rings).cast::<RingSlot>();
        for i in 0..count {
            replace(slots.add(i), (*t).mark.tid);
        }
        turn::over(turn);
        if let Some(pinned) = pinned {
            pinned.release();
        }
        syscall!(nr::RT_SIGPROCMASK, SIG_SETMASK, &raw const before, null_mut::<u64>(), 8usize);
    }
}

/// Replaces the ring of one slot, and says there how that went.
///
/// # Safety
/// `slot` points to a slot of a table in the injected area; no other thread runs, and `tid` is the caller's.
unsafe fn replace(slot: *mut RingSlot, tid: i32) {
    unsafe {
        let past = [0u64; 2];
        let alive = syscall!(
            nr::IO_GETEVENTS,
            (*slot).address,
            0usize,
            0usize,
            null_mut::<Event>(),
            past.as_ptr()
        );
        if alive < 0 {
            (*slot).outcome = if alive == EINVAL { RING_DEAD } else { RING_KEPT };
            (*slot).error = -alive as i32;
            return;
        }
        let mut pages = Pages {
            ends: [[-1; 2]; MAX_PIPES],
        };
        let outcome = with(slot, tid, &mut pages);
        pages.close();
        ((*slot).outcome, (*slot).error) = match outcome {
            Ok(()) => (RING_DONE, 0),
            Err((outcome, e)) => (outcome, -e as i32),
        };
    }
}

/// The steps of [`replace`], while `pages` hold those of the ring. The outcome and the error where one fails.
///
/// # Safety
/// As for [`replace`].
unsafe fn with(slot: *mut RingSlot, tid: i32, pages: &mut Pages) -> Result<(), (i32, isize)> {
    unsafe {
        let kept = |e: isize| (RING_KEPT, e);
        let lost = |e: isize| (RING_LOST, e);
        let (address, bytes) = ((*slot).address, (*slot).bytes);
        let old = (address as *const RingHead).read_volatile();
        let mut plan = RingPlan {
            address,
            bytes,
            head: old.head,
            tail: old.tail,
            ..RingPlan::default()
        };
        // The head is the program's to write.
        if !plan.is_plausible() || old.nr != plan.places() {
            return Err(kept(EINVAL));
        }
        let scratch = syscall!(nr::MMAP, 0usize, 2 * bytes, PROT_READ_WRITE, MAP_FLAGS, usize::MAX, 0usize);
        if scratch < 0 {
            return Err(kept(scratch));
        }
        (*slot).scratch = scratch as u64;
        pages.hold(address, bytes).map_err(kept)?;
        let mut ring = Turning::make(&plan).map_err(kept)?;
        // The move that is wanted in the end can fail for want of mappings: it would do so here, too.
        let room = syscall!(nr::MMAP, 0usize, bytes, 0usize, MAP_FLAGS, usize::MAX, 0usize);
        let moved = if room < 0 {
            Err(room)
        } else {
            ring.settle(room as u64, bytes)
        };
        if let Err(e) = moved {
            ring.give_up();
            if room >= 0 {
                syscall!(nr::MUNMAP, room, bytes);
            }
            return Err(kept(e));
        }
        let known = plan.tail;

        let gone = syscall!(nr::IO_DESTROY, address);
        if gone < 0 {
            ring.give_up();
            return Err(kept(gone));
        }
        pages.read((*slot).scratch, bytes).map_err(lost)?;
        let last = ((*slot).scratch as *const RingHead).read_volatile();
        let places = plan.places();
        if last.tail >= places {
            return Err(lost(EINVAL));
        }
        let polls = ((*slot).scratch + bytes) as *mut Event;
        let mut count = 0;
        let copy = (*slot).scratch as *const Event;
        let event = |place: u32| copy.add(1 + (place % places) as usize).read_volatile();
        for i in 0..plan.unread() {
            ring.write(plan.head + i, &event(plan.head + i));
        }
        for i in 0..distance(known, last.tail, places) {
            let event = event(known + i);
            if event.result == 0 && is_poll(tid, event.request) {
                polls.add(count).write(event);
                count += 1;
                continue;
            }
            ring.add(1).map_err(lost)?;
            ring.write(plan.tail, &event);
            plan.tail = (plan.tail + 1) % places;
        }
        ring.settle(address, bytes).map_err(lost)?;
        (*slot).tail = plan.tail;
        pages.close();
        (*slot).polls = ring.resubmit(polls, count).map_err(lost)? as u64;
        Ok(())
    }
}

/// Whether the request at `address` is a poll. The program may have reused the memory, or unmapped it. The main thread,
/// whose memory `/proc` shows no more, may have ended: `tid` is our own.
fn is_poll(tid: i32, address: u64) -> bool {
    let mut request = Request::default();
    let bytes = size_of::<Request>();
    let local = [&raw mut request as u64, bytes as u64];
    let remote = [address, bytes as u64];
    let n = unsafe {
        syscall!(
            nr::PROCESS_VM_READV,
            tid,
            local.as_ptr(),
            1usize,
            remote.as_ptr(),
            1usize,
            0usize
        )
    };
    n == bytes as isize && request.is_poll()
}

/// Pipes that keep the pages of a ring.
struct Pages {
    /// Read end and write end.
    ends: [[i32; 2]; MAX_PIPES],
}

impl Pages {
    /// Holds the pages of this memory, whatever is mapped there later.
    ///
    /// # Safety
    /// None are held yet. What the memory is mapped to may be read; it need not stay mapped.
    unsafe fn hold(&mut self, address: u64, bytes: u64) -> Result<(), isize> {
        unsafe {
            let mut at = 0;
            for ends in &mut self.ends {
                if at == bytes {
                    return Ok(());
                }
                let part = PIPE_BYTES.min(bytes - at);
                let made = syscall!(nr::PIPE2, ends.as_mut_ptr(), PIPE_FLAGS);
                if made < 0 {
                    return Err(made);
                }
                // Sixteen pages fit without asking.
                let sized = if part > 16 * PAGE {
                    syscall!(nr::FCNTL, ends[1], F_SETPIPE_SZ, part)
                } else {
                    0
                };
                if sized < 0 {
                    return Err(sized);
                }
                let vector = [address + at, part];
                let n = syscall!(nr::VMSPLICE, ends[1], vector.as_ptr(), 1usize, 0usize);
                if n != part as isize {
                    return Err(if n < 0 { n } else { EIO });
                }
                at += part;
            }
            if at == bytes {
                Ok(())
            } else {
                Err(EINVAL)
            }
        }
    }

    /// What the pages hold now.
    ///
    /// # Safety
    /// `bytes` bytes from `to` on are memory that may be overwritten.
    unsafe fn read(&self, to: u64, bytes: u64) -> Result<(), isize> {
        unsafe {
            let mut done = 0;
            let mut ends = self.ends.iter();
            let mut end = ends.next();
            while done < bytes {
                let Some(pipe) = end else { return Err(EIO) };
                let n = syscall!(nr::READ, pipe[0], to + done, bytes - done);
                if n > 0 {
                    done += n as u64;
                } else {
                    end = ends.next();
                }
            }
            Ok(())
        }
    }

    /// Lets go of all pages.
    ///
    /// # Safety
    /// Nobody else uses the numbers of the pipes: they are those that [`Self::hold`] has made.
    unsafe fn close(&mut self) {
        for end in self.ends.iter_mut().flatten().filter(|end| **end >= 0) {
            unsafe { syscall!(nr::CLOSE, *end) };
            *end = -1;
        }
    }
}
