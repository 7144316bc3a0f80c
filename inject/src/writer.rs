//! The snapshot child: writes the process's memory to chunks, then exits.
//!
//! It is a fork of the application with all signals blocked, in a session of its own, without descriptors. The agent fills the control memory with
//! the ranges that hold data and with room in chunks; writers take range after range and leave out pages that hold only zeros and pages whose contents
//! are in the store already. What is left is gathered from wherever it lies in memory and appended to the writer's chunk.

use crate::libc_nr as nr;
use crate::snapshot::belay_clone_on_stack;
use belay_abi::hash::{Page, PageHash};
use belay_abi::index::{location, Entry, Table};
use belay_abi::inject::{
    Control, Loan, Range, SnapshotTable, StoredExtent, Writer, BATCH_BYTES, BATCH_PAGES, GIVE_BACK_BYTES, MAX_WRITERS,
    ON_THE_WAY_BYTES, RANGE_KEEP_ZEROS, RANGE_UNREADABLE, STATE_ABANDONED, STATE_GO, STATE_READY, WRITER_STACK,
};
use belay_abi::{syscall, PAGE};
use core::ptr::{addr_of, addr_of_mut, null, null_mut};
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

const O_WRONLY: usize = 1;
pub(crate) const O_RDWR: usize = 2;
const PROT_READ_WRITE: usize = 3;
const MAP_SHARED: usize = 1;
const PR_SET_PDEATHSIG: usize = 1;
const PR_SET_NAME: usize = 15;
const SIGKILL: usize = 9;
const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;
const E2BIG: i32 = 7;
const ETIMEDOUT: isize = -110;
const EIO: i32 = 5;
const EDQUOT: i32 = 122;
const CLOCK_MONOTONIC: usize = 1;
const CLOCK_THREAD_CPUTIME_ID: usize = 3;
/// The time of one batch in so many is taken: the clock is a system call.
const TIMED: u32 = 4;
const MADV_DONTNEED: usize = 4;
const POSIX_FADV_DONTNEED: usize = 4;
/// SYNC_FILE_RANGE_WRITE, and with WAIT_BEFORE and WAIT_AFTER.
const BEGIN_SYNC: usize = 2;
const WAIT_SYNC: usize = 7;
/// Pieces of memory gathered into one system call.
const PIECES: usize = 64;
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
        exit(0)
    }
}

unsafe extern "C" fn thread(job: *mut u8) -> ! {
    unsafe {
        write_ranges(&*job.cast::<Job>());
        syscall!(nr::EXIT, 0usize);
        core::hint::unreachable_unchecked()
    }
}

unsafe fn exit(status: i32) -> ! {
    unsafe {
        syscall!(nr::EXIT_GROUP, status);
        core::hint::unreachable_unchecked()
    }
}

unsafe fn writer_of(control: *mut Control, index: usize) -> *mut Writer {
    unsafe { addr_of_mut!((*control).writer).cast::<Writer>().add(index) }
}

/// Takes ranges until none is left.
unsafe fn write_ranges(job: &Job) {
    unsafe {
        let control = job.control;
        let writer = writer_of(control, job.index);
        let begin = now_ns();
        let ranges = control.cast::<u8>().add((*control).range_table as usize).cast::<Range>();
        let mut out = Output {
            control,
            agent_pid: job.agent_pid,
            writer,
            table: control.cast::<u8>().add((*writer).table as usize).cast(),
            index: map_index(control, job.agent_pid),
            hash: PageHash::detected((*control).wide_hash != 0),
            batch: [(0, 0); BATCH_PAGES],
            batches: 0,
            looked: 0,
            found: 0,
            timed: false,
            wrote_ns: 0,
            loan: null_mut(),
            fd: -1,
            pieces: [[0; 2]; PIECES],
            count: 0,
            pending: 0,
            frugal: (*control).frugal != 0,
            synced: [0; 2],
        };
        let mut error = 0;
        while error == 0 {
            let i = (*control).next.fetch_add(1, Relaxed);
            if i >= (*control).ranges {
                break;
            }
            error = out.write_range(&*ranges.add(i as usize));
        }
        if error == 0 {
            error = out.flush();
        }
        if error == 0 {
            out.end_loan();
        }
        (*writer).looked.store(out.looked, Relaxed);
        (*writer).found.store(out.found, Relaxed);
        (*writer).total_ns.store(now_ns() - begin, Relaxed);
        (*writer).error.store(error, Relaxed);
        (*writer).done.store(1, Release);
        syscall!(nr::FUTEX, addr_of!((*writer).done), FUTEX_WAKE, i32::MAX);
    }
}

/// Maps the table of page hashes. Without it every page is written.
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
        Table::new(entries, (*control).index_sample)
    }
}

unsafe fn now_ns() -> u64 {
    unsafe { clock_ns(CLOCK_MONOTONIC) }
}

unsafe fn clock_ns(clock: usize) -> u64 {
    let mut t = [0u64; 2];
    unsafe { syscall!(nr::CLOCK_GETTIME, clock, t.as_mut_ptr()) };
    t[0] * 1_000_000_000 + t[1]
}

/// Where one writer's pages go.
struct Output {
    control: *mut Control,
    agent_pid: i32,
    writer: *mut Writer,
    table: *mut StoredExtent,
    index: Option<Table<'static>>,
    hash: PageHash,
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
    /// The chunk being filled, and its file.
    loan: *mut Loan,
    fd: isize,
    /// Memory that has its place in the chunk but is not written yet: address and length.
    pieces: [[u64; 2]; PIECES],
    count: usize,
    pending: u64,
    /// Memory is short: see [`Control::frugal`].
    frugal: bool,
    /// Offsets in the chunk's file: up to the first all is on the disk, up to the second it is on its way.
    synced: [u64; 2],
}

impl Output {
    /// Stores the pages of `range`. Returns an error number or 0.
    unsafe fn write_range(&mut self, range: &Range) -> i32 {
        unsafe {
            if range.flags & RANGE_UNREADABLE != 0 {
                syscall!(nr::MPROTECT, range.start, range.end - range.start, 1usize);
            }
            let zeros = range.flags & RANGE_KEEP_ZEROS != 0;
            // Extents are joined within a range only: ranges belong to different mappings.
            let mut last: *mut StoredExtent = null_mut();
            let mut at = range.start;
            let mut kept = at;
            while at < range.end {
                // What a frugal writer gives back ends with a batch.
                let end = range.end.min((at / BATCH_BYTES + 1) * BATCH_BYTES);
                let error = self.store_batch(at, end, zeros, &mut last);
                if error != 0 {
                    return error;
                }
                at = end;
                if self.frugal && (at == range.end || at.is_multiple_of(GIVE_BACK_BYTES)) {
                    let error = self.flush();
                    if error != 0 {
                        return error;
                    }
                    // Pages that the application has written meanwhile are free from here on, and the others are its own again. Where the kernel does not want to, nothing is lost.
                    syscall!(nr::MADVISE, kept, at - kept, MADV_DONTNEED);
                    kept = at;
                }
            }
            (*self.writer).bytes.fetch_add(range.end - range.start, Relaxed);
            0
        }
    }

    /// Stores the pages of a batch: first all hashes are made, meanwhile the entries of the index come into the cache, then they are looked up.
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
                    let hash = self.hash.of(&*(at as *const Page));
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

    unsafe fn clock(&self) -> u64 {
        if self.timed {
            unsafe { clock_ns(CLOCK_THREAD_CPUTIME_ID) }
        } else {
            0
        }
    }

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
    unsafe fn append(&mut self, at: u64, hash: u128) -> Result<u64, i32> {
        unsafe {
            if self.loan.is_null() || (*self.loan).used.load(Relaxed) >= (*self.loan).pages {
                self.next_loan()?;
            }
            let loan = self.loan;
            let used = (*loan).used.load(Relaxed);
            let hashes = self.control.cast::<u8>().add((*loan).hashes as usize).cast::<u128>();
            hashes.add(used as usize).write_unaligned(hash);
            let full = match self.pieces.get_mut(self.count.wrapping_sub(1)) {
                Some(p) if p[0] + p[1] == at => {
                    p[1] += PAGE;
                    false
                }
                _ => {
                    if let Some(p) = self.pieces.get_mut(self.count) {
                        *p = [at, PAGE];
                    }
                    self.count += 1;
                    self.count == PIECES
                }
            };
            self.pending += PAGE;
            (*loan).used.store(used + 1, Release);
            let place = location((*loan).chunk, (*loan).first + used);
            if let Some(index) = &self.index {
                index.insert(hash, place);
            }
            if full || self.pending >= BATCH_BYTES {
                match self.flush() {
                    0 => {}
                    error => return Err(error),
                }
            }
            Ok(place)
        }
    }

    /// All that was written to the loan is in its file.
    unsafe fn end_loan(&mut self) {
        unsafe {
            if !self.loan.is_null() {
                (*self.loan).done.store(1, Release);
            }
        }
    }

    unsafe fn next_loan(&mut self) -> Result<(), i32> {
        unsafe {
            match self.flush() {
                0 => {}
                error => return Err(error),
            }
            self.end_loan();
            if self.fd >= 0 {
                if self.frugal {
                    self.leave_cache(u64::MAX);
                }
                syscall!(nr::CLOSE, self.fd);
                self.fd = -1;
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
            self.fd = open_in_agent(self.agent_pid, (*self.loan).fd, O_WRONLY);
            if self.fd < 0 {
                return Err(-self.fd as i32);
            }
            self.synced = [u64::from((*self.loan).first) * PAGE; 2];
            Ok(())
        }
    }

    /// Writes the gathered pieces, which are the last pages of the chunk so far.
    unsafe fn flush(&mut self) -> i32 {
        unsafe {
            if self.pending == 0 {
                return 0;
            }
            let (begin, begin_cpu) = (now_ns(), self.clock());
            let behind = u64::from((*self.loan).first + (*self.loan).used.load(Relaxed)) * PAGE;
            let mut left = self.pending;
            let mut first = 0;
            while left > 0 {
                let r = syscall!(
                    nr::PWRITEV,
                    self.fd,
                    self.pieces.as_ptr().wrapping_add(first),
                    self.count - first,
                    behind - left,
                    0usize
                );
                if r <= 0 {
                    return if r == 0 { EIO } else { -r as i32 };
                }
                left -= r as u64;
                let mut done = r as u64;
                while let Some(p) = self.pieces.get_mut(first) {
                    let part = p[1].min(done);
                    *p = [p[0] + part, p[1] - part];
                    done -= part;
                    if p[1] > 0 || done == 0 && left == 0 {
                        break;
                    }
                    first += 1;
                }
            }
            self.count = 0;
            self.pending = 0;
            if self.frugal && behind - self.synced[1] >= ON_THE_WAY_BYTES {
                self.leave_cache(behind);
            }
            (*self.writer).write_ns.fetch_add(now_ns() - begin, Relaxed);
            self.wrote_ns += self.clock() - begin_cpu;
            0
        }
    }

    /// Sends what lies before `end` on its way to the disk, and waits for and forgets what was sent before. A failure shows when the agent syncs the chunk.
    unsafe fn leave_cache(&mut self, end: u64) {
        unsafe {
            let [done, sent] = self.synced;
            if end != u64::MAX {
                syscall!(nr::SYNC_FILE_RANGE, self.fd, sent, end - sent, BEGIN_SYNC);
            }
            if sent > done {
                syscall!(nr::SYNC_FILE_RANGE, self.fd, done, sent - done, WAIT_SYNC);
                syscall!(nr::FADVISE64, self.fd, done, sent - done, POSIX_FADV_DONTNEED);
            }
            self.synced = [sent, end];
        }
    }
}

/// Whether the page at `page` holds only zeros.
unsafe fn is_zero(page: u64) -> bool {
    let words = unsafe { core::slice::from_raw_parts(page as *const u64, PAGE as usize / 8) };
    // Most pages that are not zero show it in their first line.
    words.chunks_exact(32).all(|c| c.iter().fold(0, |a, w| a | w) == 0)
}

/// Opens descriptor `fd` of the agent anew through `/proc`, which any process of the same user may do with a file it may open.
pub(crate) unsafe fn open_in_agent(agent: i32, fd: i32, flags: usize) -> isize {
    let mut path = [0u8; 48];
    let mut at = 0;
    let mut text = |s: &[u8]| {
        for b in s {
            if let Some(slot) = path.get_mut(at) {
                *slot = *b;
            }
            at += 1;
        }
    };
    let mut digits = [0u8; 10];
    text(b"/proc/");
    text(decimal(agent as u32, &mut digits));
    text(b"/fd/");
    text(decimal(fd as u32, &mut digits));
    unsafe { syscall!(nr::OPEN, path.as_ptr(), flags, 0usize) }
}

fn decimal(mut v: u32, digits: &mut [u8; 10]) -> &[u8] {
    let mut at = digits.len();
    while at > 0 {
        at -= 1;
        digits[at] = b'0' + (v % 10) as u8;
        v /= 10;
        if v == 0 {
            break;
        }
    }
    &digits[at..]
}
