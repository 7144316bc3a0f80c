//! What a writer of the snapshot child does with pages: those that hold only zeros are left out, those that the store
//! has already are looked up by their hash, the others get a place in the chunk that the writer has been lent, and go
//! there by way of the [`crate::sink`].

use crate::libc_nr as nr;
use crate::shared::{open_in_agent, FUTEX_WAIT, MAP_SHARED, O_RDWR, PROT_READ_WRITE};
use crate::sink::Sink;
use belay_abi::hash::{Page, PageHash, Secret, SECRET_BYTES};
use belay_abi::index::{location, Entry, Table};
use belay_abi::inject::{
    Control, Loan, Range, StoredExtent, Writer, BATCH_BYTES, BATCH_PAGES, GIVE_BACK_BYTES, RANGE_KEEP_ZEROS, RANGE_REFUSED,
    RANGE_UNREADABLE,
};
use belay_abi::{syscall, PAGE};
use core::ptr::{addr_of, null, null_mut};
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const E2BIG: i32 = 7;
const EDQUOT: i32 = 122;
const CLOCK_MONOTONIC: usize = 1;
const CLOCK_THREAD_CPUTIME_ID: usize = 3;
const MADV_DONTNEED: usize = 4;
/// Less is given back only where memory is short: what has been gathered must be written first, and small pieces are
/// better gathered with others.
const WORTH_GIVING_BACK: u64 = 64 * 1024;
/// The time of one batch in so many is taken: the clock is a system call.
const TIMED: u32 = 4;

/// Where one writer's pages go.
pub(crate) struct Output {
    control: *mut Control,
    agent_pid: i32,
    writer: *mut Writer,
    table: *mut StoredExtent,
    index: Option<Table<'static>>,
    hash: PageHash,
    secret: Secret,
    /// Pages that hold data, with their hashes.
    batch: [(u64, u128); BATCH_PAGES],
    /// Large batches so far.
    batches: u32,
    /// Pages looked for, and found, so far.
    looked: u64,
    found: u64,
    /// The time of this batch is taken, of the processor: what others do meanwhile does not count.
    timed: bool,
    /// Time of the processor that went into writing during this batch.
    wrote_ns: u64,
    /// The chunk being filled, and the way into its file.
    loan: *mut Loan,
    sink: Sink,
    /// When it began.
    begin: u64,
}

impl Output {
    /// What `writer` puts out.
    ///
    /// # Safety
    /// `control` is the whole control memory, mapped as long as this value lives; `writer` lies in it and is the caller's own.
    pub(crate) unsafe fn new(control: *mut Control, writer: *mut Writer, agent_pid: i32) -> Self {
        unsafe {
            Self {
                begin: now_ns(),
                control,
                agent_pid,
                writer,
                table: control.cast::<u8>().add((*writer).table as usize).cast(),
                index: map_index(control, agent_pid),
                hash: PageHash::detected((*control).wide_hash != 0),
                secret: secret((*control).secret),
                batch: [(0, 0); BATCH_PAGES],
                batches: 0,
                looked: 0,
                found: 0,
                timed: false,
                wrote_ns: 0,
                loan: null_mut(),
                sink: Sink::new((*control).stage_bytes, (*control).frugal != 0),
            }
        }
    }

    /// All is in the files, or the error number. Tells what has been done.
    ///
    /// # Safety
    /// The memory given to [`Self::new`] is still mapped.
    pub(crate) unsafe fn end(&mut self) -> i32 {
        unsafe {
            let error = self.end_loan();
            (*self.writer).looked.store(self.looked, Relaxed);
            (*self.writer).found.store(self.found, Relaxed);
            (*self.writer).total_ns.store(now_ns() - self.begin, Relaxed);
            error
        }
    }

    /// Stores the pages of `range`. Returns an error number or 0.
    ///
    /// # Safety
    /// The memory given to [`Self::new`] is still mapped. `range` is memory of this process that nobody uses any more: it
    /// is read here, and may be given back.
    pub(crate) unsafe fn write_range(&mut self, range: &mut Range) -> i32 {
        unsafe {
            if range.flags & RANGE_REFUSED != 0 {
                return 0;
            }
            if range.flags & RANGE_UNREADABLE != 0 && syscall!(nr::MPROTECT, range.start, range.end - range.start, 1usize) < 0 {
                // It is sealed; the agent can read it.
                range.flags |= RANGE_REFUSED;
                return 0;
            }
            let zeros = range.flags & RANGE_KEEP_ZEROS != 0;
            // Extents are joined within a range only: ranges belong to different mappings.
            let mut last: *mut StoredExtent = null_mut();
            let mut at = range.start;
            let mut kept = at;
            while at < range.end {
                // What is given back ends with a batch.
                let end = range.end.min((at / BATCH_BYTES + 1) * BATCH_BYTES);
                let error = self.store_batch(at, end, zeros, &mut last);
                if error != 0 {
                    return error;
                }
                at = end;
                let give_back = self.sink.is_frugal() || at - kept >= WORTH_GIVING_BACK;
                if give_back && (at == range.end || at.is_multiple_of(GIVE_BACK_BYTES)) {
                    let error = self.flush();
                    if error != 0 {
                        return error;
                    }
                    // Pages that the application has written meanwhile are free from here on, and the others are its
                    // own again: it writes them without a copy. Where the kernel does not want to, nothing is lost.
                    syscall!(nr::MADVISE, kept, at - kept, MADV_DONTNEED);
                    kept = at;
                }
            }
            (*self.writer).bytes.fetch_add(range.end - range.start, Relaxed);
            0
        }
    }

    /// Stores the pages of a batch: first all hashes are made, meanwhile the entries of the index come into the cache,
    /// then they are looked up.
    ///
    /// # Safety
    /// The memory given to [`Self::new`] is still mapped, and so is `start..end`, of whole pages. `last` is null or points to
    /// an extent of this writer's table.
    unsafe fn store_batch(&mut self, start: u64, end: u64, zeros: bool, last: &mut *mut StoredExtent) -> i32 {
        unsafe {
            if end - start >= BATCH_BYTES / 4 {
                self.batches += 1;
                self.timed = self.batches.is_multiple_of(TIMED);
            } else {
                self.timed = false;
            }
            let begin = self.clock();
            self.wrote_ns = 0;
            let mut count = 0;
            let mut at = start;
            while at < end {
                if zeros || !is_zero(at) {
                    let hash = self.hash.of(&*(at as *const Page), &self.secret);
                    if let Some(index) = &self.index {
                        index.prefetch(hash);
                    }
                    let Some(slot) = self.batch.get_mut(count) else {
                        return E2BIG;
                    };
                    *slot = (at, hash);
                    count += 1;
                }
                at += PAGE;
            }
            let hashed = self.clock();
            for i in 0..count {
                if let Some((at, hash)) = self.batch.get(i).copied() {
                    let error = self.store(at, hash, last);
                    if error != 0 {
                        return error;
                    }
                }
            }
            if self.timed {
                let looked = (self.clock() - hashed).saturating_sub(self.wrote_ns);
                (*self.writer).timed.fetch_add(count as u64, Relaxed);
                (*self.writer).hash_ns.fetch_add(hashed - begin, Relaxed);
                (*self.writer).look_ns.fetch_add(looked, Relaxed);
            }
            0
        }
    }

    /// Time that this thread has spent, where it is asked for.
    fn clock(&self) -> u64 {
        if self.timed {
            clock_ns(CLOCK_THREAD_CPUTIME_ID)
        } else {
            0
        }
    }

    /// Notes down where the page at `at` is stored, and stores it where it is nowhere yet. Returns an error number or 0.
    ///
    /// # Safety
    /// As for [`Self::store_batch`], of the page at `at`.
    unsafe fn store(&mut self, at: u64, hash: u128, last: &mut *mut StoredExtent) -> i32 {
        unsafe {
            let index = self.index.as_ref().filter(|i| i.covers(hash));
            self.looked += u64::from(index.is_some());
            let place = match index.and_then(|i| i.find(hash)) {
                Some(place) => {
                    self.found += 1;
                    place
                }
                None => match self.append(at, hash) {
                    Ok(place) => place,
                    Err(error) => return error,
                },
            };
            let (chunk, page) = ((place >> 32) as u32, place as u32);
            let joins = !last.is_null() && {
                let e = &**last;
                e.vaddr + e.bytes == at && e.chunk == chunk && u64::from(e.page) + e.bytes / PAGE == u64::from(page)
            };
            if joins {
                (**last).bytes += PAGE;
                return 0;
            }
            let n = (*self.writer).extents.load(Relaxed);
            if u64::from(n) >= (*self.writer).capacity {
                return E2BIG;
            }
            *last = self.table.add(n as usize);
            **last = StoredExtent {
                vaddr: at,
                bytes: PAGE,
                chunk,
                page,
            };
            (*self.writer).extents.store(n + 1, Release);
            0
        }
    }

    /// Gives the page at `at` a place in the chunk.
    ///
    /// # Safety
    /// The memory given to [`Self::new`] is still mapped, and the page at `at` stays until the next [`Self::flush`].
    unsafe fn append(&mut self, at: u64, hash: u128) -> Result<u64, i32> {
        unsafe {
            if self.loan.is_null() || (*self.loan).used.load(Relaxed) >= (*self.loan).pages {
                self.next_loan()?;
            }
            let loan = self.loan;
            let used = (*loan).used.load(Relaxed);
            let hashes = self.control.cast::<u8>().add((*loan).hashes as usize).cast::<u128>();
            hashes.add(used as usize).write_unaligned(hash);
            let full = self.sink.add(at);
            (*loan).used.store(used + 1, Release);
            let place = location((*loan).chunk, (*loan).first + used);
            if let Some(index) = &self.index {
                index.insert(hash, place);
            }
            if full {
                match self.flush() {
                    0 => {}
                    error => return Err(error),
                }
            }
            Ok(place)
        }
    }

    /// All that was written to the loan is in its file.
    ///
    /// # Safety
    /// The memory given to [`Self::new`] is still mapped, and so are all pages that have been appended since the last
    /// [`Self::flush`].
    unsafe fn end_loan(&mut self) -> i32 {
        unsafe {
            if self.loan.is_null() {
                return 0;
            }
            let error = self.timed(Sink::close);
            if error == 0 {
                (*self.loan).done.store(1, Release);
                self.loan = null_mut();
            }
            error
        }
    }

    /// Takes the next loan that the agent gives.
    ///
    /// # Safety
    /// As for [`Self::end_loan`].
    unsafe fn next_loan(&mut self) -> Result<(), i32> {
        unsafe {
            match self.end_loan() {
                0 => {}
                error => return Err(error),
            }
            let control = self.control;
            let i = (*control).next_loan.fetch_add(1, Relaxed);
            if i >= (*control).loans {
                return Err(EDQUOT);
            }
            loop {
                let lent = (*control).lent.load(Acquire);
                if lent > i {
                    break;
                }
                // The agent lends it, or ends us.
                syscall!(nr::FUTEX, addr_of!((*control).lent), FUTEX_WAIT, lent as usize, null::<u8>());
            }
            self.loan = control
                .cast::<u8>()
                .add((*control).loan_table as usize)
                .cast::<Loan>()
                .add(i as usize);
            match self.sink.open(self.agent_pid, &*self.loan) {
                0 => Ok(()),
                error => Err(error),
            }
        }
    }

    /// What has been gathered needs its memory no more.
    ///
    /// # Safety
    /// As for [`Self::end_loan`].
    unsafe fn flush(&mut self) -> i32 {
        // The clock is a system call.
        if self.sink.is_empty() {
            return 0;
        }
        unsafe { self.timed(Sink::flush) }
    }

    /// Does `write` and counts its time.
    ///
    /// # Safety
    /// The memory given to [`Self::new`] is still mapped, and what `write` needs is so.
    unsafe fn timed(&mut self, write: unsafe fn(&mut Sink) -> i32) -> i32 {
        unsafe {
            let (begin, begin_cpu) = (now_ns(), self.clock());
            let error = write(&mut self.sink);
            (*self.writer).write_ns.fetch_add(now_ns() - begin, Relaxed);
            self.wrote_ns += self.clock() - begin_cpu;
            error
        }
    }
}

/// Whether the page at `page` holds only zeros.
///
/// # Safety
/// A whole page at `page` can be read, and nobody writes to it meanwhile.
unsafe fn is_zero(page: u64) -> bool {
    let words = unsafe { core::slice::from_raw_parts(page as *const u64, PAGE as usize / 8) };
    // Most pages that are not zero show it in their first line.
    words.chunks_exact(32).all(|c| c.iter().fold(0, |a, w| a | w) == 0)
}

fn secret(words: [u64; SECRET_BYTES / 8]) -> Secret {
    let mut secret = [0; SECRET_BYTES];
    for (bytes, word) in secret.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    secret
}

/// Maps the table of page hashes. Without it every page is written.
///
/// # Safety
/// `control` is the control memory, mapped; the file of its index has `index_bytes` bytes, which stay.
unsafe fn map_index(control: *mut Control, agent: i32) -> Option<Table<'static>> {
    unsafe {
        let bytes = (*control).index_bytes as usize;
        if (*control).index_fd < 0 || bytes == 0 {
            return None;
        }
        let fd = open_in_agent(agent, (*control).index_fd, O_RDWR);
        if fd < 0 {
            return None;
        }
        let p = syscall!(nr::MMAP, 0usize, bytes, PROT_READ_WRITE, MAP_SHARED, fd, 0usize);
        syscall!(nr::CLOSE, fd);
        if p < 0 {
            return None;
        }
        let entries = core::slice::from_raw_parts(p as *const Entry, bytes / size_of::<Entry>());
        Some(Table::new(entries, (*control).index_sample))
    }
}

/// Nanoseconds of the monotonic clock.
fn now_ns() -> u64 {
    clock_ns(CLOCK_MONOTONIC)
}

/// Nanoseconds of this clock.
fn clock_ns(clock: usize) -> u64 {
    let mut t = [0u64; 2];
    unsafe { syscall!(nr::CLOCK_GETTIME, clock, t.as_mut_ptr()) };
    t[0] * 1_000_000_000 + t[1]
}
