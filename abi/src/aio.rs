//! Rings of native asynchronous I/O (`io_setup`), and how one is made that stands where another stood.
//!
//! The kernel keeps the place of the next event to itself, and what has been reaped it learns from the ring's head. So
//! a new ring is turned to the wanted place by requests that complete at once and are reaped; those that shall stay
//! unread follow; then their events are overwritten. The requests are polls of an eventfd that is ready.

use crate::syscall;

/// Bytes of the ring's head, and of one event.
pub const EVENT_BYTES: u64 = 32;
/// Requests that are submitted together.
const BATCH: usize = 32;
const EINVAL: isize = -22;
const IOCB_CMD_POLL: u16 = 5;
const EIO: isize = -5;
const POLLIN: u64 = 1;
/// What a poll brings whose descriptor is not open.
const POLLNVAL: i64 = 0x20;

mod nr {
    pub(super) const CLOSE: usize = 3;
    pub(super) const MREMAP: usize = 25;
    pub(super) const IO_SETUP: usize = 206;
    pub(super) const IO_DESTROY: usize = 207;
    pub(super) const IO_GETEVENTS: usize = 208;
    pub(super) const IO_SUBMIT: usize = 209;
    pub(super) const EVENTFD2: usize = 290;
}

/// Head of a ring (`struct aio_ring`); the events follow.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct RingHead {
    pub id: u32,
    pub nr: u32,
    pub head: u32,
    pub tail: u32,
    pub magic: u32,
    pub compat: u32,
    pub incompat: u32,
    pub bytes: u32,
}

/// `RingHead::magic`.
pub const RING_MAGIC: u32 = 0xa10a_10a1;

/// `struct io_event`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Event {
    pub data: u64,
    pub request: u64,
    pub result: i64,
    pub result2: i64,
}

/// `struct iocb`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Request {
    pub data: u64,
    pub key: u32,
    pub rw_flags: u32,
    pub command: u16,
    pub priority: u16,
    pub fd: u32,
    pub buffer: u64,
    pub bytes: u64,
    pub offset: u64,
    pub reserved: u64,
    pub flags: u32,
    pub eventfd: u32,
}

impl Request {
    /// Whether this is a poll: of all requests that the kernel gives up with a ring the only one that does not end by itself.
    pub fn is_poll(&self) -> bool {
        self.command == IOCB_CMD_POLL
    }
}

/// A ring to be made.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingPlan {
    /// Where it shall stand; that range is mapped, and is replaced.
    pub address: u64,
    /// Length of its mapping.
    pub bytes: u64,
    /// Place of the first event that has not been reaped.
    pub head: u32,
    /// Place behind the last one.
    pub tail: u32,
    /// Address of the [`Event`]s between them.
    pub events: u64,
    /// Address of the addresses of requests to be submitted in the end.
    pub polls: u64,
    /// Number of `polls`.
    pub poll_count: u64,
}

impl RingPlan {
    /// Number of places in the ring.
    pub fn places(&self) -> u32 {
        u32::try_from(self.bytes / EVENT_BYTES).unwrap_or(u32::MAX).saturating_sub(1)
    }

    /// The smallest number of events to ask the kernel for that fills as many pages: the kernel doubles it, and adds
    /// two and the head. What is asked for counts in `fs.aio-nr`, so that it is never more than the program has asked
    /// for.
    fn request(&self) -> u64 {
        let before = (self.bytes / crate::PAGE).saturating_sub(1);
        (before * (crate::PAGE / EVENT_BYTES / 2)).saturating_sub(1).max(1)
    }

    /// Whether such a ring can be.
    pub fn is_plausible(&self) -> bool {
        self.bytes.is_multiple_of(crate::PAGE)
            && self.bytes >= crate::PAGE
            && self.head < self.places()
            && self.tail < self.places()
    }

    /// Number of events to be reaped.
    pub fn unread(&self) -> u32 {
        distance(self.head, self.tail, self.places())
    }
}

/// Number of places from `from` to `to` in a ring of `places`.
pub fn distance(from: u32, to: u32, places: u32) -> u32 {
    if from <= to {
        to - from
    } else {
        to + places - from
    }
}

/// A ring that stands where the kernel has put it, and what turns it.
#[derive(Debug)]
pub struct Turning {
    context: u64,
    places: u32,
    eventfd: isize,
}

impl Turning {
    /// Makes a ring for which `plan` is plausible, turned to the head and with as many events as the plan says, their
    /// contents undefined. Returns a negative error number where that cannot be; then there is none.
    ///
    /// # Safety
    /// Nobody else uses what the kernel maps here.
    pub unsafe fn make(plan: &RingPlan) -> Result<Self, isize> {
        let places = plan.places();
        let mut context = 0u64;
        // SAFETY: the kernel writes to a live word.
        let made = unsafe { syscall!(nr::IO_SETUP, plan.request(), &raw mut context) };
        if made < 0 {
            return Err(made);
        }
        // SAFETY: takes numbers only.
        let eventfd = unsafe { syscall!(nr::EVENTFD2, 1usize, 0o2000000usize) };
        let mut ring = Self {
            context,
            places,
            eventfd,
        };
        // SAFETY: the ring has just been made.
        let turned = if eventfd < 0 {
            Err(eventfd)
        } else {
            // SAFETY: the ring has just been made.
            unsafe { ring.turn(plan) }
        };
        match turned {
            Ok(()) => Ok(ring),
            Err(e) => {
                ring.give_up();
                Err(e)
            }
        }
    }

    unsafe fn turn(&self, plan: &RingPlan) -> Result<(), isize> {
        // SAFETY: the context is the address of its ring, whose first page is mapped.
        let head = unsafe { core::ptr::read_volatile(self.context as *const RingHead) };
        // A machine with many processors makes larger ones.
        if head.magic != RING_MAGIC || head.nr != self.places {
            return Err(EINVAL);
        }
        let mut left = plan.head;
        let mut events = [Event::default(); BATCH];
        while left > 0 {
            let n = self.post(&self.request(), left.min(BATCH as u32))?;
            // SAFETY: there is room for so many events, and they are there already.
            let reaped = unsafe { syscall!(nr::IO_GETEVENTS, self.context, n, n, events.as_mut_ptr(), 0usize) };
            if reaped != n as isize {
                return Err(if reaped < 0 { reaped } else { EINVAL });
            }
            left -= n;
        }
        self.add(plan.unread())
    }

    /// Adds `count` events.
    pub fn add(&self, count: u32) -> Result<(), isize> {
        let mut left = count;
        while left > 0 {
            left -= self.post(&self.request(), left.min(BATCH as u32))?;
        }
        Ok(())
    }

    /// A request that is complete at once.
    fn request(&self) -> Request {
        Request {
            command: IOCB_CMD_POLL,
            fd: self.eventfd as u32,
            buffer: POLLIN,
            ..Request::default()
        }
    }

    /// Submits `request`, which is complete at once, up to `count` times; returns how often the kernel has taken it, at least once.
    fn post(&self, request: &Request, count: u32) -> Result<u32, isize> {
        let list = [&raw const *request; BATCH];
        // SAFETY: the list names a live request, which the kernel copies.
        let n = unsafe { syscall!(nr::IO_SUBMIT, self.context, count.min(BATCH as u32), list.as_ptr()) };
        match u32::try_from(n) {
            Ok(n) if n > 0 => Ok(n),
            Ok(_) => Err(EINVAL),
            Err(_) => Err(n),
        }
    }

    /// Writes the contents of the event at `place`.
    ///
    /// # Safety
    /// Nobody else uses the ring.
    pub unsafe fn write(&self, place: u32, event: &Event) {
        let at = self.context + EVENT_BYTES * (1 + u64::from(place % self.places));
        // SAFETY: the place lies in the ring's mapping.
        unsafe { core::ptr::write_volatile(at as *mut Event, *event) };
    }

    /// Adds `event`, whatever else has come meanwhile.
    ///
    /// # Safety
    /// Nobody reads the ring.
    unsafe fn tell(&self, event: &Event) -> Result<(), isize> {
        let request = self.request();
        self.post(&request, 1)?;
        // SAFETY: the context is the address of its ring, which is mapped.
        let tail = unsafe { core::ptr::read_volatile(self.context as *const RingHead) }.tail;
        for back in 1..self.places {
            let place = (tail % self.places + self.places - back) % self.places;
            let at = (self.context + EVENT_BYTES * (1 + u64::from(place))) as *const Event;
            // SAFETY: the place lies in the ring's mapping.
            if unsafe { core::ptr::read_volatile(at) }.request == &raw const request as u64 {
                // SAFETY: the kernel has filled this place, and the caller vouches for the rest.
                unsafe { self.write(place, event) };
                return Ok(());
            }
        }
        Err(EIO)
    }

    /// Submits the requests of the `count` events at `polls` again. One that the kernel does not take any more, because
    /// the program has closed the descriptor since, is told as such and goes to the end of the list. Returns how many
    /// stand before those. Descriptors of our own would be taken for the program's: none is open meanwhile.
    ///
    /// # Safety
    /// The list is valid; nobody reads the ring; what the requests do is what the program wants.
    pub unsafe fn resubmit(&mut self, polls: *mut Event, count: usize) -> Result<usize, isize> {
        self.close();
        let mut taken = 0;
        for i in 0..count {
            // SAFETY: the list has so many events; the kernel reads a list of one address.
            let n = unsafe { syscall!(nr::IO_SUBMIT, self.context, 1usize, &raw const (*polls.add(i)).request) };
            if n == 1 {
                // SAFETY: `taken` is at most `i`.
                unsafe { core::ptr::swap(polls.add(taken), polls.add(i)) };
                taken += 1;
            }
        }
        if taken < count {
            // SAFETY: takes numbers only.
            self.eventfd = unsafe { syscall!(nr::EVENTFD2, 1usize, 0o2000000usize) };
            if self.eventfd < 0 {
                return Err(self.eventfd);
            }
        }
        for i in taken..count {
            // SAFETY: the list has so many events.
            let event = unsafe { polls.add(i).read() };
            let refused = Event {
                result: POLLNVAL,
                ..event
            };
            // SAFETY: as the caller says.
            unsafe { self.tell(&refused) }?;
        }
        self.close();
        Ok(taken)
    }

    fn close(&mut self) {
        if self.eventfd >= 0 {
            // SAFETY: the descriptor is our own.
            unsafe { syscall!(nr::CLOSE, self.eventfd) };
            self.eventfd = -1;
        }
    }

    /// Takes the ring away again.
    pub fn give_up(&mut self) {
        self.close();
        // SAFETY: the ring is our own.
        unsafe { syscall!(nr::IO_DESTROY, self.context) };
    }

    /// Moves the ring to `address`, where `bytes`, its length, are mapped, which it replaces.
    ///
    /// # Safety
    /// What is mapped there is not needed.
    pub unsafe fn settle(&mut self, address: u64, bytes: u64) -> Result<(), isize> {
        const MAYMOVE_FIXED: usize = 3;
        // SAFETY: the caller vouches for the target; the ring is our own.
        let at = unsafe { syscall!(nr::MREMAP, self.context, bytes, bytes, MAYMOVE_FIXED, address) };
        match at {
            e if (-4095..0).contains(&e) => Err(e),
            _ => {
                self.context = address;
                Ok(())
            }
        }
    }
}

/// Makes the ring of `plan`, with its events, in its place.
///
/// # Safety
/// The plan's events are readable, and what is mapped in the ring's place is not needed.
pub unsafe fn restore(plan: &RingPlan) -> Result<(), isize> {
    // SAFETY: the ring is given away in its place only.
    let mut ring = unsafe { Turning::make(plan) }?;
    for i in 0..plan.unread() {
        // SAFETY: the plan has so many events.
        let event = unsafe { core::ptr::read_unaligned((plan.events as *const Event).add(i as usize)) };
        // SAFETY: nobody knows the ring yet.
        unsafe { ring.write(plan.head + i, &event) };
    }
    ring.close();
    // SAFETY: the caller vouches for the place.
    unsafe { ring.settle(plan.address, plan.bytes) }?;
    // SAFETY: the plan has so many addresses.
    unsafe { submit(plan.address, plan.polls, plan.poll_count) }
}

/// Submits the requests whose `count` addresses lie at `list`.
///
/// # Safety
/// The list is readable; what the requests do is what the program wants.
unsafe fn submit(context: u64, list: u64, count: u64) -> Result<(), isize> {
    let mut done = 0;
    while done < count {
        // SAFETY: the kernel reads the list.
        let n = unsafe { syscall!(nr::IO_SUBMIT, context, count - done, list + 8 * done) };
        match u64::try_from(n) {
            Ok(n) if n > 0 => done += n,
            Ok(_) => return Err(EINVAL),
            Err(_) => return Err(n),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel makes of a number of events.
    fn pages(events: u64) -> u64 {
        (EVENT_BYTES * (1 + 2 * events + 2)).div_ceil(crate::PAGE)
    }

    #[test]
    fn a_new_ring_counts_no_more_than_the_one_it_replaces() {
        let mut smallest = 1;
        for events in 1..5000 {
            if pages(events) != pages(smallest) {
                smallest = events;
            }
            let plan = RingPlan {
                bytes: pages(events) * crate::PAGE,
                ..RingPlan::default()
            };
            assert_eq!(plan.request(), smallest, "{events} events");
        }
    }
}
