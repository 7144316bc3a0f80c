//! The memory that the agent and a snapshot child share: what the child is to write, and what became of it.
//!
//! ```text
//! head ┊ ranges ┊ loans ┊ hashes of each loan's pages ┊ extents of each writer
//! ```
//! The agent lays it out and sets the child going; the child's writers fill in the hashes and extents. The agent takes
//! the hashes of a loan over when its writer is done with it, and the extents when the child has ended.

use crate::state::limits;
use crate::CaptureError;
use belay_abi::inject::{Control, Loan, Range, StoredExtent, Writer, MAX_WRITERS, RANGE_REFUSED, STATE_ABANDONED, STATE_GO};
use belay_image::extents::Extent;
use belay_kernel::futex;
use belay_kernel::shared::Shared;
use belay_storage::index::IndexShare;
use belay_storage::page_key::PageSecret;
use belay_storage::session::{self, Session};
use rustix::fs::{memfd_create, MemfdFlags};
use std::fs::File;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

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

/// Memory shared with a snapshot child, by way of a memfd. What the child and we share in it are atomics, and tables that
/// only one side writes at a time.
#[derive(Debug)]
pub(crate) struct ControlMemory {
    file: File,
    memory: Shared,
}

/// Where writer `k` has a field that is `field` behind its beginning.
fn of_writer(k: usize, field: usize) -> usize {
    assert!(k < MAX_WRITERS);
    offset_of!(Control, writer) + k * size_of::<Writer>() + field
}

/// Where loan `i` of `work` has a field that is `field` behind its beginning.
fn of_loan(work: &Work, i: usize, field: usize) -> usize {
    work.loan_table as usize + i * size_of::<Loan>() + field
}

impl ControlMemory {
    /// Room for the head alone, in which the child waits for its work.
    pub(crate) fn create() -> std::io::Result<Self> {
        let file = File::from(memfd_create(c"belay-control", MemfdFlags::CLOEXEC)?);
        file.set_len(PAGE)?;
        let memory = Shared::map(file.as_fd(), PAGE as usize)?;
        Ok(Self { file, memory })
    }

    /// The agent's descriptor of it and its inode number, by which the child finds it.
    pub(crate) fn name(&self) -> std::io::Result<(i32, u64)> {
        Ok((self.file.as_raw_fd(), self.file.metadata()?.ino()))
    }

    /// Sets a word of the head, and wakes who waits for it.
    fn tell(&self, field: usize, value: u32) {
        let word = self.memory.half(field);
        word.store(value, Release);
        futex::wake(word);
    }

    /// Lays out the work and sets the child going. [`Self::lend`] lends what is to be lent, so many loans `ahead`.
    pub(crate) fn start(
        &mut self,
        ranges: &[Range],
        (loans, ahead): (&[session::Loan], usize),
        (index, secret): (IndexShare, &PageSecret),
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
        self.memory = Shared::map(self.file.as_fd(), usize::try_from(bytes).map_err(other)?)?;
        let memory = &self.memory;
        // The child looks at nothing but `state` until it is STATE_GO.
        for (i, range) in ranges.iter().enumerate() {
            let at = range_table as usize + i * size_of::<Range>();
            let words = [
                (offset_of!(Range, start), range.start),
                (offset_of!(Range, end), range.end),
                (offset_of!(Range, flags), range.flags),
            ];
            words.iter().for_each(|(field, word)| set_word(memory, at + field, *word));
        }
        for (i, (loan, hashes)) in work.loans.iter().enumerate() {
            let at = |field| of_loan(&work, i, field);
            let halves = [
                (offset_of!(Loan, chunk), loan.id),
                (offset_of!(Loan, fd), (-1i32).cast_unsigned()),
                (offset_of!(Loan, first), loan.first),
                (offset_of!(Loan, pages), loan.pages),
                (offset_of!(Loan, direct), 0),
                (offset_of!(Loan, pad), 0),
                (offset_of!(Loan, used), 0),
                (offset_of!(Loan, done), 0),
            ];
            halves.iter().for_each(|(field, half)| set_half(memory, at(*field), *half));
            set_word(memory, at(offset_of!(Loan, hashes)), *hashes);
        }
        for (field, word) in [
            (offset_of!(Control, bytes), bytes),
            (offset_of!(Control, range_table), range_table),
            (offset_of!(Control, loan_table), loan_table),
            (offset_of!(Control, index_bytes), index.bytes),
            (offset_of!(Control, index_sample), index.sample),
            (offset_of!(Control, stage_bytes), stage_bytes(capacity * PAGE)),
        ] {
            set_word(memory, field, word);
        }
        for (field, word) in (offset_of!(Control, secret)..).step_by(size_of::<u64>()).zip(secret.words()) {
            set_word(memory, field, word);
        }
        for (field, half) in [
            (offset_of!(Control, ranges), work.ranges),
            (offset_of!(Control, loans), u32::try_from(loans.len()).map_err(other)?),
            (offset_of!(Control, index_fd), index.fd.cast_unsigned()),
            (offset_of!(Control, wide_hash), belay_storage::hashes_wide().into()),
            (offset_of!(Control, frugal), frugal.into()),
            (offset_of!(Control, writers), writers),
            (offset_of!(Control, lent), 0),
        ] {
            set_half(memory, field, half);
        }
        for (k, table) in work.tables.iter().enumerate() {
            set_word(memory, of_writer(k, offset_of!(Writer, table)), *table);
            set_word(memory, of_writer(k, offset_of!(Writer, capacity)), capacity);
        }
        self.tell(offset_of!(Control, state), STATE_GO);
        Ok(work)
    }

    /// The word that is not 0 when the writers are done, and is woken then.
    pub(crate) fn done_word(&self) -> &AtomicU32 {
        self.memory.half(offset_of!(Control, written))
    }

    /// Whether the writers are done.
    pub(crate) fn is_written(&self) -> bool {
        self.done_word().load(Acquire) != 0
    }

    /// The numbers of the ranges that the writers, which are done, could not make readable.
    pub(crate) fn refused(&self, work: &Work) -> Vec<usize> {
        // What the child makes of them decides only whether a range is read here too.
        let flags = |i: usize| {
            let at = work.range_table as usize + i * size_of::<Range>() + offset_of!(Range, flags);
            self.memory.word(at).load(Relaxed)
        };
        (0..work.ranges as usize).filter(|i| flags(*i) & RANGE_REFUSED != 0).collect()
    }

    /// Lets the child end.
    pub(crate) fn release(&self) {
        self.tell(offset_of!(Control, released), 1);
    }

    /// Bytes that the writers have dealt with so far.
    pub(crate) fn written(&self, work: &Work) -> u64 {
        let bytes = |k| self.memory.word(of_writer(k, offset_of!(Writer, bytes))).load(Relaxed);
        (0..work.tables.len()).map(bytes).sum()
    }

    /// Gives loan `i` of `work` back to the session. What the child may do to the memory meanwhile changes only what
    /// becomes of its own pages.
    fn give_back(&self, work: &mut Work, i: usize, pid: i32, session: &mut Session) -> Result<(), CaptureError> {
        let (lent, hashes) = work.loans[i];
        let used = self.memory.half(of_loan(work, i, offset_of!(Loan, used))).load(Acquire);
        if used > lent.pages {
            return Err(impossible(pid));
        }
        // They are copied and not looked at here.
        let half = |at: usize| u128::from(self.memory.word(at).load(Relaxed));
        let hash = |page: usize| {
            let at = hashes as usize + page * size_of::<u128>();
            half(at) | half(at + size_of::<u64>()) << u64::BITS
        };
        session.give_back(lent.id, (0..used as usize).map(hash))?;
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
        let done = |i: usize| self.memory.half(of_loan(work, i, offset_of!(Loan, done))).load(Acquire);
        let is_done = |i: &usize| !work.back[*i] && done(*i) == 1;
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
        let wanted = self.memory.half(offset_of!(Control, next_loan)).load(Acquire) as usize;
        // Each loan is an open file of the agent. One that a writer fills, one ahead, and one to be taken back, for each
        // writer: so many are enough.
        let open = work.given_back + 3 * work.tables.len();
        while work.lent < work.loans.len().min(wanted.saturating_add(work.ahead)).min(open) {
            let Some((fd, direct)) = session.place_loan(work.loans[work.lent].0.id)? else {
                return Ok(());
            };
            // The child does not look at a loan before it is counted as lent.
            let at = |field| of_loan(work, work.lent, field);
            set_half(&self.memory, at(offset_of!(Loan, fd)), fd.cast_unsigned());
            set_half(&self.memory, at(offset_of!(Loan, direct)), direct.into());
            work.lent += 1;
            self.tell(offset_of!(Control, lent), work.lent as u32);
        }
        Ok(())
    }

    /// Why a writer has failed, where one has.
    pub(crate) fn look_for_failures(&self, work: &Work, pid: i32, session: &Session) -> Result<(), CaptureError> {
        (0..work.tables.len()).try_for_each(|k| self.look_for_failure(k, pid, session))
    }

    fn look_for_failure(&self, k: usize, pid: i32, session: &Session) -> Result<(), CaptureError> {
        match self.error(of_writer(k, offset_of!(Writer, error))) {
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
        // The child has ended, so nothing changes any more. The counts are held against their room.
        let error = self.error(offset_of!(Control, error));
        if error != 0 {
            return Err(told(pid, error));
        }
        let half = |at| self.memory.half(at).load(Acquire);
        let mut extents = Vec::new();
        for (k, table) in work.tables.iter().enumerate() {
            self.look_for_failure(k, pid, session)?;
            if half(of_writer(k, offset_of!(Writer, done))) == 0 {
                return Err(ended_early(pid));
            }
            let count = half(of_writer(k, offset_of!(Writer, extents)));
            if u64::from(count) > work.capacity {
                return Err(impossible(pid));
            }
            extents.push((*table as usize, count as usize));
            let stats = &mut session.stats;
            let add = |to: &mut u64, field: usize| {
                *to = to.saturating_add(self.memory.word(of_writer(k, field)).load(Relaxed));
            };
            add(&mut stats.looked, offset_of!(Writer, looked));
            add(&mut stats.found, offset_of!(Writer, found));
            add(&mut stats.timed_pages, offset_of!(Writer, timed));
            add(&mut stats.hash_ns, offset_of!(Writer, hash_ns));
            add(&mut stats.look_ns, offset_of!(Writer, look_ns));
            add(&mut stats.write_ns, offset_of!(Writer, write_ns));
            add(&mut stats.writers_ns, offset_of!(Writer, total_ns));
        }
        if half(offset_of!(Control, next)) < work.ranges || half(offset_of!(Control, left)) == 0 {
            return Err(ended_early(pid));
        }
        self.take_back(work, pid, session)?;
        for (at, count) in extents {
            table.extend((0..count).map(|i| self.extent(at + i * size_of::<StoredExtent>())));
        }
        Ok(())
    }

    /// The error number in this place.
    fn error(&self, at: usize) -> i32 {
        self.memory.half(at).load(Acquire).cast_signed()
    }

    /// The stored extent in this place.
    fn extent(&self, at: usize) -> Extent {
        let word = |field| self.memory.word(at + field).load(Relaxed);
        let half = |field| self.memory.half(at + field).load(Relaxed);
        Extent {
            vaddr: word(offset_of!(StoredExtent, vaddr)),
            bytes: word(offset_of!(StoredExtent, bytes)),
            chunk: half(offset_of!(StoredExtent, chunk)),
            page: half(offset_of!(StoredExtent, page)),
        }
    }
}

fn set_word(memory: &Shared, at: usize, value: u64) {
    memory.word(at).store(value, Relaxed);
}

fn set_half(memory: &Shared, at: usize, value: u32) {
    memory.half(at).store(value, Relaxed);
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
    let low = if error == libc::ENOMEM { limits::too_low(pid) } else { None };
    low.unwrap_or_else(|| CaptureError::system(step(pid), std::io::Error::from_raw_os_error(error)))
}

fn step(pid: i32) -> String {
    format!("write the memory of process {pid}")
}

impl Drop for ControlMemory {
    fn drop(&mut self) {
        // A child that still waits for its work, because the checkpoint failed, ends.
        self.tell(offset_of!(Control, state), STATE_ABANDONED);
    }
}
