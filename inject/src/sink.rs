//! How a writer's pages reach the file of its chunk.
//!
//! ```text
//! pages ── gathered from wherever they lie ──┬── pwritev: into the page cache
//!          up to BATCH_BYTES                 └── copied, while they are in the processor's cache, to the stage ── full: pwrite past the page cache
//! ```
//! Pages are not written past the page cache from where they lie: the kernel would pin them, and it copies a page that
//! is shared with the application before it pins it (`FAULT_FLAG_UNSHARE`), so that the child would end up with memory
//! of its own for all that it writes.

use crate::libc_nr as nr;
use crate::shared::{open_in_agent, PROT_READ_WRITE};
use belay_abi::inject::{Loan, BATCH_BYTES, ON_THE_WAY_BYTES};
use belay_abi::{syscall, PAGE};
use core::sync::atomic::Ordering::Relaxed;

const O_WRONLY: usize = 1;
const O_DIRECT: usize = 0o40000;
const F_SETFL: usize = 4;
/// MAP_PRIVATE | MAP_ANONYMOUS
const MAP_MEMORY: usize = 2 | 0x20;
const HUGE: u64 = 2 << 20;
const MADV_HUGEPAGE: usize = 14;
const POSIX_FADV_DONTNEED: usize = 4;
/// SYNC_FILE_RANGE_WRITE, and with WAIT_BEFORE and WAIT_AFTER.
const BEGIN_SYNC: usize = 2;
const WAIT_SYNC: usize = 7;
const EIO: i32 = 5;
/// Pieces of memory gathered into one system call.
const PIECES: usize = 64;

/// The way into one file after the other.
pub(crate) struct Sink {
    fd: isize,
    /// What goes to this file waits on the stage.
    staging: bool,
    /// The file is written past the page cache.
    direct: bool,
    /// Where in the file the next write goes.
    at: u64,
    /// Memory that is to be written: address and length.
    pieces: [[u64; 2]; PIECES],
    count: usize,
    pending: u64,
    /// Memory from which is written past the page cache: address, 0 while there is none; its length; and what of it is
    /// waiting to be written.
    stage: u64,
    stage_bytes: u64,
    staged: u64,
    /// Memory is short: see [`belay_abi::inject::Control::frugal`].
    frugal: bool,
    /// Offsets in the file: up to the first all is on the disk, up to the second it is on its way.
    synced: [u64; 2],
}

impl Sink {
    /// Without a file. Past the page cache it will write up to `stage_bytes` at a time; 0: never.
    pub(crate) fn new(stage_bytes: u64, frugal: bool) -> Self {
        Self {
            fd: -1,
            staging: false,
            direct: false,
            at: 0,
            pieces: [[0; 2]; PIECES],
            count: 0,
            pending: 0,
            stage: 0,
            stage_bytes,
            staged: 0,
            frugal,
            synced: [0; 2],
        }
    }

    /// Whether memory is short.
    pub(crate) fn is_frugal(&self) -> bool {
        self.frugal
    }

    /// Whether nothing has been added since the last [`Self::flush`].
    pub(crate) fn is_empty(&self) -> bool {
        self.pending == 0
    }

    /// From now on pages go to the file of `loan`, which the agent has open; the file before must have been closed. Returns
    /// an error number or 0.
    pub(crate) fn open(&mut self, agent: i32, loan: &Loan) -> i32 {
        self.staging = loan.direct != 0 && self.has_stage();
        self.direct = self.staging;
        if self.direct {
            self.fd = open_in_agent(agent, loan.fd, O_WRONLY | O_DIRECT);
            self.direct = self.fd >= 0;
        }
        if !self.direct {
            self.fd = open_in_agent(agent, loan.fd, O_WRONLY);
        }
        if self.fd < 0 {
            return -self.fd as i32;
        }
        self.at = u64::from(loan.first + loan.used.load(Relaxed)) * PAGE;
        self.synced = [self.at; 2];
        self.staged = 0;
        0
    }

    /// Whether there is a stage; makes it where it is wanted.
    fn has_stage(&mut self) -> bool {
        if self.stage == 0 && self.stage_bytes > 0 {
            // In huge pages, where there are any: the kernel looks for each page that is written.
            let bytes = self.stage_bytes.next_multiple_of(HUGE) + HUGE;
            let p = unsafe { syscall!(nr::MMAP, 0usize, bytes, PROT_READ_WRITE, MAP_MEMORY, -1isize, 0usize) };
            if p > 0 {
                self.stage = (p as u64).next_multiple_of(HUGE);
                if !self.frugal {
                    unsafe { syscall!(nr::MADVISE, self.stage, bytes - HUGE, MADV_HUGEPAGE) };
                }
            }
        }
        self.stage != 0
    }

    /// The page at `page` comes next. Says whether it is time for [`Self::flush`].
    pub(crate) fn add(&mut self, page: u64) -> bool {
        self.pending += PAGE;
        match self.pieces.get_mut(self.count.wrapping_sub(1)) {
            Some(p) if p[0] + p[1] == page => p[1] += PAGE,
            _ => {
                if let Some(p) = self.pieces.get_mut(self.count) {
                    *p = [page, PAGE];
                }
                self.count += 1;
            }
        }
        self.count == PIECES || self.pending >= BATCH_BYTES
    }

    /// What has been added needs its memory no more: it is in the file or on the stage. Returns an error number or 0.
    ///
    /// # Safety
    /// A file is open, and the pages that were added since the last call can be read.
    pub(crate) unsafe fn flush(&mut self) -> i32 {
        unsafe {
            if self.pending == 0 {
                return 0;
            }
            let error = if self.staging {
                self.stage_pieces()
            } else {
                self.write_pieces()
            };
            self.count = 0;
            self.pending = 0;
            error
        }
    }

    /// All that was added is in the file, which is closed. Returns an error number or 0.
    ///
    /// # Safety
    /// As for [`Self::flush`]; nobody else uses the descriptor.
    pub(crate) unsafe fn close(&mut self) -> i32 {
        unsafe {
            if self.fd < 0 {
                return 0;
            }
            let mut error = self.flush();
            if error == 0 {
                error = self.write_stage();
            }
            if self.frugal && !self.direct {
                self.leave_cache(u64::MAX);
            }
            syscall!(nr::CLOSE, self.fd);
            self.fd = -1;
            error
        }
    }

    /// Copies what was added to the stage, and writes that where it is full. Returns an error number or 0.
    ///
    /// # Safety
    /// The stage is there, and the pages that were added since the last [`Self::flush`] can be read.
    unsafe fn stage_pieces(&mut self) -> i32 {
        unsafe {
            for i in 0..self.count {
                let Some([mut from, mut left]) = self.pieces.get(i).copied() else {
                    break;
                };
                while left > 0 {
                    let part = left.min(self.stage_bytes - self.staged);
                    core::ptr::copy_nonoverlapping(from as *const u8, (self.stage + self.staged) as *mut u8, part as usize);
                    self.staged += part;
                    (from, left) = (from + part, left - part);
                    if self.staged == self.stage_bytes {
                        let error = self.write_stage();
                        if error != 0 {
                            return error;
                        }
                    }
                }
            }
            0
        }
    }

    /// Writes what waits on the stage.
    ///
    /// # Safety
    /// A file is open, and the stage is there.
    unsafe fn write_stage(&mut self) -> i32 {
        unsafe {
            let mut done = 0;
            while done < self.staged {
                let r = syscall!(nr::PWRITE64, self.fd, self.stage + done, self.staged - done, self.at);
                if r > 0 {
                    done += r as u64;
                    self.at += r as u64;
                } else if self.direct {
                    // The page cache takes it, and what follows, or says what is wrong.
                    self.direct = false;
                    syscall!(nr::FCNTL, self.fd, F_SETFL, 0usize);
                } else {
                    return if r == 0 { EIO } else { -r as i32 };
                }
            }
            self.staged = 0;
            if self.frugal && !self.direct && done > 0 {
                self.leave_cache(self.at);
            }
            0
        }
    }

    /// Writes what was added to the file. Returns an error number or 0.
    ///
    /// # Safety
    /// As for [`Self::flush`].
    unsafe fn write_pieces(&mut self) -> i32 {
        unsafe {
            let mut left = self.pending;
            let mut first = 0;
            while left > 0 {
                let r = syscall!(
                    nr::PWRITEV,
                    self.fd,
                    self.pieces.as_ptr().wrapping_add(first),
                    self.count - first,
                    self.at,
                    0usize
                );
                if r <= 0 {
                    return if r == 0 { EIO } else { -r as i32 };
                }
                left -= r as u64;
                self.at += r as u64;
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
            if self.frugal && self.at - self.synced[1] >= ON_THE_WAY_BYTES {
                self.leave_cache(self.at);
            }
            0
        }
    }

    /// Sends what lies before `end` on its way to the disk, and waits for and forgets what was sent before. A failure
    /// shows when the agent syncs the chunk.
    fn leave_cache(&mut self, end: u64) {
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
