//! Who writes to the page: one thread at a time.

use crate::{say, DeclareError, Handle};
use belay_abi::access::{self, Dataset, Share, Site, MARK_WORDS, MOST, MOST_WORDS};
use belay_kernel::cpu::{thread_block, ticks};
use std::sync::atomic::{fence, Ordering};

/// How often it is tried to begin.
const TURNS: u32 = 10_000;

/// The thread that writes.
#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) page: Handle,
}

impl Writer {
    /// Begins when another thread is done, which is soon. Where it is not, and nothing that is missing must be given
    /// back, or where the caller is a signal handler in the middle of that, what it has to say is lost, and that is noted.
    #[inline]
    pub(crate) fn begin(page: Handle) -> Result<Self, DeclareError> {
        let me = thread();
        for turn in 0.. {
            match page.busy().compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(Self { page }),
                Err(other) if other == me => break,
                Err(_) if turn > TURNS && !page.is_lacking() => break,
                Err(_) => std::thread::yield_now(),
            }
        }
        page.faults().fetch_or(access::NESTED, Ordering::Relaxed);
        Err(DeclareError::Busy)
    }

    /// Begins the record of a loop, which the program is in from here on.
    pub(crate) fn enter(&self) -> Record<'_> {
        let page = self.page;
        let at = page.head().load(Ordering::Relaxed);
        if page.open().load(Ordering::Relaxed) != 0 {
            page.faults().fetch_or(access::NESTED, Ordering::Relaxed);
        }
        if page.watched().load(Ordering::Relaxed) == access::WANTED {
            page.watched().store(access::BEGUN, Ordering::Relaxed);
        }
        // Before the record is whole: who is stopped between the two has not begun the loop.
        page.open().store(at + 1, Ordering::Release);
        self.record(at)
    }

    /// Says that nothing is known any more of what has not been used yet.
    pub(crate) fn reset(&self) {
        let at = self.page.head().load(Ordering::Relaxed);
        let inside = self.page.open().load(Ordering::Relaxed) != 0;
        self.record(at).end(access::header(access::RESET, u32::from(inside), 0));
    }

    /// Says where a dataset is now. In a loop it is not known what that still does to where it was.
    pub(crate) fn moved(&self, dataset: u32, address: u64) {
        if self.page.open().load(Ordering::Relaxed) != 0 {
            self.reset();
        }
        let at = self.page.head().load(Ordering::Relaxed);
        let mut record = self.record(at);
        record.push(address);
        record.end(access::header(access::MOVE, dataset, 0));
    }

    /// A record that begins at word `at`.
    fn record(&self, at: u64) -> Record<'_> {
        self.page.reserved().store(at + MOST_WORDS as u64, Ordering::Relaxed);
        // Who reads words that are overwritten meanwhile sees so by this.
        fence(Ordering::Release);
        Record {
            writer: self,
            begin: at,
            at: at + 2,
            is_expected: at < self.page.whole_at().load(Ordering::Relaxed),
            is_other: false,
        }
    }

    /// The dataset with this number.
    pub(crate) fn known(&self, dataset: u32) -> Result<Dataset, DeclareError> {
        let count = self.page.dataset_count().load(Ordering::Relaxed);
        if dataset == 0 || dataset > count {
            return Err(DeclareError::Unknown(dataset));
        }
        Ok(self.read(dataset as usize - 1))
    }

    fn read(&self, at: usize) -> Dataset {
        self.page.datasets()[at].get()
    }

    /// Replaces one.
    pub(crate) fn change(&self, dataset: u32, new: &Dataset) {
        let at = dataset as usize - 1;
        self.changing(|| self.page.datasets()[at].set(new));
    }

    /// Which part of a global array the dataset with this number is, of which it is known that it is one.
    pub(crate) fn share_of(&self, dataset: u32) -> Share {
        self.page.shares()[dataset as usize - 1].get()
    }

    /// Says which part of a global array it is.
    pub(crate) fn share(&self, dataset: u32, new: &Share) {
        let at = dataset as usize - 1;
        self.changing(|| self.page.shares()[at].set(new));
    }

    /// While it is done the agent sees that what it reads is not whole.
    fn changing(&self, change: impl FnOnce()) {
        let changes = self.page.changes();
        let before = changes.load(Ordering::Relaxed);
        changes.store(before.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        changes.store(before.wrapping_add(2), Ordering::Release);
    }

    /// Declares a dataset, or replaces the one of its name. One that is new, or of another shape, may lie anywhere.
    pub(crate) fn dataset(&self, new: &Dataset) -> Result<u32, DeclareError> {
        let count = self.page.dataset_count().load(Ordering::Relaxed) as usize;
        let at = (0..count).find(|at| self.read(*at).name == new.name).unwrap_or(count);
        if at >= MOST {
            return Err(DeclareError::Full);
        }
        let number = at as u32 + 1;
        // What is said of a dataset holds wherever it is declared anew.
        let keep = if at < count { self.read(at).keep } else { new.keep };
        let new = &Dataset { keep, ..*new };
        let shape = |d: &Dataset| (d.elem, d.extent, d.stride);
        let is_same = at < count && shape(&self.read(at)) == shape(new);
        self.change(number, new);
        if !is_same {
            self.share(number, &Share::default());
            self.reset();
        }
        if at == count {
            self.page.dataset_count().store(number, Ordering::Release);
        }
        Ok(number)
    }

    /// Declares a site, or finds the one of this name.
    pub(crate) fn site(&self, name: &[u8; 32]) -> Result<u32, DeclareError> {
        let count = self.page.site_count().load(Ordering::Relaxed) as usize;
        let sites = self.page.sites();
        if let Some(at) = sites.iter().take(count).position(|site| site.get().name == *name) {
            return Ok(at as u32 + 1);
        }
        if count >= MOST {
            return Err(DeclareError::Full);
        }
        self.changing(|| sites[count].set(&Site { name: *name }));
        self.page.site_count().store(count as u32 + 1, Ordering::Release);
        Ok(count as u32 + 1)
    }
}

/// A record that is being written.
pub(crate) struct Record<'a> {
    writer: &'a Writer,
    begin: u64,
    at: u64,
    /// The ring holds what was recorded here before the restart.
    is_expected: bool,
    /// This is something else.
    is_other: bool,
}

impl Record<'_> {
    /// Appends a word, of which there are [`MOST_WORDS`] at most.
    #[inline]
    pub(crate) fn push(&mut self, word: u64) {
        self.put(self.at, word);
        self.at += 1;
    }

    #[inline]
    fn put(&mut self, at: u64, word: u64) {
        let place = self.writer.page.ring(at);
        if self.is_expected {
            self.is_other |= place.load(Ordering::Relaxed) != word;
        }
        place.store(word, Ordering::Relaxed);
    }

    /// Now it is whole. Ends the program where it is not what came here before a restart that has not brought back all.
    pub(crate) fn end(mut self, header: u64) {
        let (page, begin, end) = (self.writer.page, self.begin, self.at);
        self.put(begin, header);
        if self.is_other {
            refuse(page, header);
        }
        page.ring(begin + 1).store(ticks(), Ordering::Relaxed);
        page.head().store(end, Ordering::Release);
        if end / MARK_WORDS != begin / MARK_WORDS {
            page.mark(end / MARK_WORDS).store(end, Ordering::Relaxed);
        }
    }
}

/// Ends the program: what it records, with this header, is not what it recorded before the restart, and what it
/// overwrote on that way is missing.
#[cold]
pub(crate) fn refuse(page: Handle, header: u64) -> ! {
    let name = |name: &[u8; 32]| String::from_utf8_lossy(name.split(|b| *b == 0).next().unwrap_or_default()).into_owned();
    let what = match access::of_header(header) {
        (access::ENTER, site, _) => {
            format!(
                "loop {}",
                page.site_name(site).map_or_else(|| "without a name".into(), |s| name(&s))
            )
        }
        _ => "a declaration".into(),
    };
    let why = format!(
        "{what}, with what it uses, is not what came here before the restart: the program has taken another way, \
         and the checkpoint has left out what it overwrote on that one; restart it from a generation that holds \
         everything (belay list)"
    );
    say(&mut std::io::stderr(), &why);
    std::process::abort()
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.page.busy().store(0, Ordering::Release);
    }
}

/// A number that is the calling thread's: of where its thread control block is, which is its own.
#[inline]
fn thread() -> u32 {
    // It is aligned to 64 bytes.
    ((thread_block() >> 6) as u32).max(1)
}
