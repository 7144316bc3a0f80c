//! The memory that the agent and a snapshot child share: what the child is to write, and what became of it.
//!
//! ```text
//! head ┊ ranges ┊ loans ┊ hashes of each loan's pages ┊ extents of each writer
//! ```
//! The agent lays it out and sets the child going; the child's writers fill in the hashes and extents. The agent takes
//! the hashes of a loan over when its writer is done with it, and the extents when the child has ended.

use crate::CaptureError;
use belay_abi::inject::{Control, Loan, Range, StoredExtent, Writer, RANGE_REFUSED, STATE_ABANDONED, STATE_GO};
use belay_image::extents::Extent;
use belay_kernel::check;
use belay_storage::index::IndexShare;
use belay_storage::session::{self, Session};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

const PAGE: u64 = 4096;

/// Bytes that each writer gathers before it writes past the page cache, where `bytes` are to be written at most; 0: it
/// shall not. Little is not worth waiting for the disk at every write. A stage that stays in the processor's cache
/// takes half of the time to fill that one of 4 MiB takes, and disks are as fast with it.
fn stage_bytes(bytes: u64) -> u64 {
    const STAGE: u64 = 1 << 20;
    const LITTLE: u64 = 4 << 20;
    if bytes < LITTLE {
        0
    } else {
        STAGE
    }
}

/// The layout of a child's work. It is the agent's own: what lies in the shared memory the child could have changed.
#[derive(Debug)]
pub(crate) struct Work {
    ranges: u32,
    /// Where the table of ranges is.
    range_table: u64,
    /// Offset of the loans.
    loan_table: u64,
    /// What may be lent, and the offset of the hashes of its pages.
    loans: Vec<(session::Loan, u64)>,
    /// How many of them have been lent,
    lent: usize,
    /// and how many are to be before a writer asks, so that none waits.
    ahead: usize,
    /// Those that have been given back, how many, and how many before the first that has not.
    back: Vec<bool>,
    given_back: usize,
    first_out: usize,
    /// Pages in these.
    counted: u64,
    /// Offset of each writer's extents.
    tables: Vec<u64>,
    /// Room for this many extents in each.
    capacity: u64,
}

impl Work {
    /// Pages in the loans that have been given back.
    pub(crate) fn counted(&self) -> u64 {
        self.counted
    }
}

/// Memory shared with a snapshot child, by way of a memfd.
#[derive(Debug)]
pub(crate) struct ControlMemory {
    file: File,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone; what the child and we share in it are atomics, and tables that only
// one side writes at a time.
unsafe impl Send for ControlMemory {}

impl ControlMemory {
    /// Room for the head alone, in which the child waits for its work.
    pub(crate) fn create() -> std::io::Result<Self> {
        // SAFETY: a constant name; the descriptor returned is ours.
        let file = unsafe {
            let fd = check(libc::memfd_create(c"belay-control".as_ptr(), libc::MFD_CLOEXEC).into())?;
            File::from_raw_fd(i32::try_from(fd).map_err(std::io::Error::other)?)
        };
        file.set_len(PAGE)?;
        let mut memory = Self {
            file,
            base: std::ptr::null_mut(),
            bytes: 0,
        };
        memory.map(PAGE as usize)?;
        Ok(memory)
    }

    fn map(&mut self, bytes: usize) -> std::io::Result<()> {
        // SAFETY: a new shared mapping of our own file, which is at least that long.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.file.as_raw_fd(),
                0,
            )
        };
        if p == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        self.unmap();
        self.base = p.cast();
        self.bytes = bytes;
        Ok(())
    }

    fn unmap(&mut self) {
        if self.bytes != 0 {
            // SAFETY: our own mapping; no reference into it outlives a call of this type's methods.
            unsafe { libc::munmap(self.base.cast(), self.bytes) };
            self.bytes = 0;
        }
    }

    /// The agent's descriptor of it and its inode number, by which the child finds it.
    pub(crate) fn name(&self) -> std::io::Result<(i32, u64)> {
        Ok((self.file.as_raw_fd(), self.file.metadata()?.ino()))
    }

    fn control(&self) -> *mut Control {
        self.base.cast()
    }

    fn writer(&self, k: usize) -> *mut Writer {
        // SAFETY: the head is mapped as long as this value lives, and has MAX_WRITERS writers; callers pass smaller numbers.
        unsafe { (&raw mut (*self.control()).writer).cast::<Writer>().add(k) }
    }

    /// Lays out the work and sets the child going. [`Self::lend`] lends what is to be lent, so many loans `ahead`.
    pub(crate) fn start(
        &mut self,
        ranges: &[Range],
        (loans, ahead): (&[session::Loan], usize),
        index: IndexShare,
        (writers, frugal): (u32, bool),
    ) -> std::io::Result<Work> {
        let other = |e: std::num::TryFromIntError| std::io::Error::other(e);
        let mut at = size_of::<Control>() as u64;
        let mut place = |bytes: u64| {
            let start = at.next_multiple_of(PAGE);
            at = start + bytes;
            start
        };
        let range_table = place(size_of_val(ranges) as u64);
        let loan_table = place((loans.len() * size_of::<Loan>()) as u64);
        // At worst every page is an extent of its own.
        let capacity: u64 = ranges.iter().map(|r| (r.end - r.start) / PAGE).sum();
        let work = Work {
            ranges: u32::try_from(ranges.len()).map_err(other)?,
            range_table,
            loan_table,
            loans: loans.iter().map(|l| (*l, place(u64::from(l.pages) * 16))).collect(),
            lent: 0,
            ahead,
            back: vec![false; loans.len()],
            given_back: 0,
            first_out: 0,
            counted: 0,
            tables: (0..writers)
                .map(|_| place(capacity * size_of::<StoredExtent>() as u64))
                .collect(),
            capacity,
        };
        let bytes = at.next_multiple_of(PAGE);
        self.file.set_len(bytes)?;
        self.map(usize::try_from(bytes).map_err(other)?)?;
        let head = self.control();
        // SAFETY: the mapping covers all that is written here, and the child looks at nothing but `state` until it is STATE_GO.
        unsafe {
            let to = self.base.add(usize::try_from(range_table).map_err(other)?).cast::<Range>();
            std::ptr::copy_nonoverlapping(ranges.as_ptr(), to, ranges.len());
            let to = self.base.add(usize::try_from(loan_table).map_err(other)?).cast::<Loan>();
            for (i, (loan, hashes)) in work.loans.iter().enumerate() {
                to.add(i).write(Loan {
                    chunk: loan.id,
                    fd: -1,
                    first: loan.first,
                    pages: loan.pages,
                    direct: 0,
                    pad: 0,
                    used: 0.into(),
                    done: 0.into(),
                    hashes: *hashes,
                });
            }
            (*head).bytes = bytes;
            (*head).ranges = work.ranges;
            (*head).range_table = range_table;
            (*head).loans = u32::try_from(loans.len()).map_err(other)?;
            (*head).loan_table = loan_table;
            (*head).index_fd = index.fd;
            (*head).index_bytes = index.bytes;
            (*head).index_sample = index.sample;
            (*head).wide_hash = belay_storage::hashes_wide().into();
            (*head).frugal = frugal.into();
            (*head).stage_bytes = stage_bytes(capacity * PAGE);
            (*head).writers = writers;
            (*head).lent = 0.into();
            for (k, table) in work.tables.iter().enumerate() {
                let w = self.writer(k);
                (*w).table = *table;
                (*w).capacity = capacity;
            }
            (*head).state.store(STATE_GO, Release);
            libc::syscall(libc::SYS_futex, &raw const (*head).state, libc::FUTEX_WAKE, i32::MAX);
        }
        Ok(work)
    }

    /// The word that is not 0 when the writers are done, and is woken then.
    pub(crate) fn done_word(&self) -> &AtomicU32 {
        // SAFETY: the head is mapped as long as this value lives; this is an atomic.
        unsafe { &(*self.control()).written }
    }

    /// Whether the writers are done.
    pub(crate) fn is_written(&self) -> bool {
        self.done_word().load(Acquire) != 0
    }

    /// The numbers of the ranges that the writers, which are done, could not make readable.
    pub(crate) fn refused(&self, work: &Work) -> Vec<usize> {
        let flags = |i: usize| {
            // SAFETY: the mapping is live and covers the table of ranges. What the child makes of it decides only
            // whether a range is read here too.
            unsafe {
                let range = self.base.add(work.range_table as usize).cast::<Range>().add(i);
                (&raw const (*range).flags).read_volatile()
            }
        };
        (0..work.ranges as usize).filter(|i| flags(*i) & RANGE_REFUSED != 0).collect()
    }

    /// Lets the child end.
    pub(crate) fn release(&self) {
        let head = self.control();
        // SAFETY: the mapping is live; this is an atomic and a futex.
        unsafe {
            (*head).released.store(1, Release);
            libc::syscall(libc::SYS_futex, &raw const (*head).released, libc::FUTEX_WAKE, i32::MAX);
        }
    }

    /// Bytes that the writers have dealt with so far.
    pub(crate) fn written(&self, work: &Work) -> u64 {
        // SAFETY: the mapping is live; these are atomics.
        (0..work.tables.len())
            .map(|k| unsafe { (*self.writer(k)).bytes.load(Relaxed) })
            .sum()
    }

    fn loan(&self, work: &Work, i: usize) -> *mut Loan {
        // SAFETY: the mapping covers the table of loans; callers pass numbers of loans.
        unsafe { self.base.add(work.loan_table as usize).cast::<Loan>().add(i) }
    }

    /// Gives loan `i` of `work` back to the session. What the child may do to the memory meanwhile changes only what
    /// becomes of its own pages.
    fn give_back(&self, work: &mut Work, i: usize, pid: i32, session: &mut Session) -> Result<(), CaptureError> {
        let (lent, hashes) = work.loans[i];
        // SAFETY: the mapping is live and covers the loan.
        let used = unsafe { (*self.loan(work, i)).used.load(Acquire) };
        if used > lent.pages {
            return Err(impossible(pid));
        }
        // SAFETY: the mapping covers the hashes of all pages lent. They are copied byte by byte and not looked at here.
        let hashes = unsafe { std::slice::from_raw_parts(self.base.add(hashes as usize).cast::<u128>(), used as usize) };
        session.give_back(lent.id, hashes.iter().copied())?;
        work.back[i] = true;
        work.given_back += 1;
        work.counted += u64::from(used);
        while work.back.get(work.first_out) == Some(&true) {
            work.first_out += 1;
        }
        Ok(())
    }

    /// Takes all loans back from the writers, which are done.
    pub(crate) fn take_back(&self, work: &mut Work, pid: i32, session: &mut Session) -> Result<(), CaptureError> {
        for i in 0..work.loans.len() {
            if !work.back[i] {
                self.give_back(work, i, pid, session)?;
            }
        }
        Ok(())
    }

    /// Takes back one of the loans that the writers are done with. Whether there was one.
    pub(crate) fn take_back_one(&self, work: &mut Work, pid: i32, session: &mut Session) -> Result<bool, CaptureError> {
        // SAFETY: the mapping is live; this is an atomic.
        let is_done = |i: &usize| !work.back[*i] && unsafe { (*self.loan(work, *i)).done.load(Acquire) } == 1;
        let Some(i) = (work.first_out..work.lent).find(is_done) else {
            return Ok(false);
        };
        self.give_back(work, i, pid, session)?;
        Ok(true)
    }

    /// Lends what the writers wait for or are about to, as far as there are places. A writer that has failed is told of
    /// here: others may wait for what it holds.
    pub(crate) fn lend(&self, work: &mut Work, pid: i32, session: &mut Session) -> Result<(), CaptureError> {
        self.look_for_failures(work, pid, session)?;
        let head = self.control();
        // SAFETY: as above.
        let wanted = unsafe { (*head).next_loan.load(Acquire) } as usize;
        // Each loan is an open file of the agent. One that a writer fills, one ahead, and one to be taken back, for each
        // writer: so many are enough.
        let open = work.given_back + 3 * work.tables.len();
        while work.lent < work.loans.len().min(wanted.saturating_add(work.ahead)).min(open) {
            let Some((fd, direct)) = session.place_loan(work.loans[work.lent].0.id)? else {
                return Ok(());
            };
            // SAFETY: the child does not look at a loan before it is counted as lent; the count is an atomic and a futex.
            unsafe {
                (*self.loan(work, work.lent)).fd = fd;
                (*self.loan(work, work.lent)).direct = direct.into();
                work.lent += 1;
                (*head).lent.store(work.lent as u32, Release);
                libc::syscall(libc::SYS_futex, &raw const (*head).lent, libc::FUTEX_WAKE, i32::MAX);
            }
        }
        Ok(())
    }

    /// Why a writer has failed, where one has.
    pub(crate) fn look_for_failures(&self, work: &Work, pid: i32, session: &Session) -> Result<(), CaptureError> {
        (0..work.tables.len()).try_for_each(|k| self.look_for_failure(k, pid, session))
    }

    fn look_for_failure(&self, k: usize, pid: i32, session: &Session) -> Result<(), CaptureError> {
        // SAFETY: the head is mapped; this is an atomic.
        match unsafe { (*self.writer(k)).error.load(Acquire) } {
            0 => Ok(()),
            libc::EDQUOT => Err(session.no_room().into()),
            error => Err(told(pid, error)),
        }
    }

    /// Checks the results of the child, which has ended, and takes its chunks and extents over. What the child may have
    /// made of the memory decides how much is taken, never where from.
    pub(crate) fn collect(
        &self,
        work: &mut Work,
        pid: i32,
        session: &mut Session,
        table: &mut Vec<Extent>,
    ) -> Result<(), CaptureError> {
        let head = self.control();
        // SAFETY: the mapping is live for the whole function and covers the places of `work`; the counts are held
        // against their room. The child has ended, so nothing changes any more.
        unsafe {
            let error = (*head).error.load(Acquire);
            if error != 0 {
                return Err(told(pid, error));
            }
            let mut extents = Vec::new();
            for (k, table) in work.tables.iter().enumerate() {
                let w = self.writer(k);
                self.look_for_failure(k, pid, session)?;
                if (*w).done.load(Acquire) == 0 {
                    return Err(ended_early(pid));
                }
                let count = u64::from((*w).extents.load(Acquire));
                if count > work.capacity {
                    return Err(impossible(pid));
                }
                let from = self.base.add(*table as usize).cast::<StoredExtent>();
                extents.push(std::slice::from_raw_parts(from, count as usize));
                let stats = &mut session.stats;
                let add = |to: &mut u64, more: &AtomicU64| *to = to.saturating_add(more.load(Relaxed));
                add(&mut stats.looked, &(*w).looked);
                add(&mut stats.found, &(*w).found);
                add(&mut stats.timed_pages, &(*w).timed);
                add(&mut stats.hash_ns, &(*w).hash_ns);
                add(&mut stats.look_ns, &(*w).look_ns);
                add(&mut stats.write_ns, &(*w).write_ns);
                add(&mut stats.writers_ns, &(*w).total_ns);
            }
            if (*head).next.load(Acquire) < work.ranges || (*head).left.load(Acquire) == 0 {
                return Err(ended_early(pid));
            }
            self.take_back(work, pid, session)?;
            table.extend(extents.into_iter().flatten().map(|e| Extent {
                vaddr: e.vaddr,
                bytes: e.bytes,
                chunk: e.chunk,
                page: e.page,
            }));
        }
        Ok(())
    }
}

fn impossible(pid: i32) -> CaptureError {
    failed(pid, "its snapshot process has left impossible results".into())
}

/// The child was ended by somebody else.
pub(crate) fn ended_early(pid: i32) -> CaptureError {
    failed(pid, "its snapshot process ended before all was written".into())
}

fn failed(pid: i32, reason: String) -> CaptureError {
    CaptureError::Failed { step: step(pid), reason }
}

/// A system call of the child's has failed.
fn told(pid: i32, error: i32) -> CaptureError {
    CaptureError::system(step(pid), std::io::Error::from_raw_os_error(error))
}

fn step(pid: i32) -> String {
    format!("write the memory of process {pid}")
}

impl Drop for ControlMemory {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        // A child that still waits for its work, because the checkpoint failed, ends.
        let head = self.control();
        // SAFETY: the head is mapped until `unmap`; the state is an atomic and a futex.
        unsafe {
            (*head).state.store(STATE_ABANDONED, Release);
            libc::syscall(libc::SYS_futex, &raw const (*head).state, libc::FUTEX_WAKE, i32::MAX);
        }
        self.unmap();
    }
}
