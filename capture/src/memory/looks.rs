//! Where the pages of snapshot children are that their writers shall store. The kernel goes through the page tables to
//! find them, so threads of their own do it, for one child while the writers of another work:
//!
//! ```text
//! looks    A │ B      │ C
//! writers    │ A ──── │ B ────
//! ```

use crate::CaptureError;
use belay_abi::inject::Range;
use belay_kernel::pagemap::Pagemap;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{channel, Receiver, Sender, TryRecvError};
use std::thread::Scope;

/// Address space that one thread goes through at a time.
const PIECE_BYTES: u64 = 256 << 20;

/// Whose memory is looked at.
#[derive(Debug, Default)]
pub(crate) struct Request {
    /// The snapshot child.
    pub(crate) child: i32,
    /// Where pages of its own can be, with the flags that ranges of such pages get.
    pub(crate) mappings: Vec<Range>,
    /// Mappings in which only guard regions are looked for.
    pub(crate) others: Vec<(u64, u64)>,
}

/// What was found, in ascending order.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    /// Ranges that hold data.
    pub(crate) data: Vec<Range>,
    /// Guard regions.
    pub(crate) guards: Vec<(u64, u64)>,
}

type Found = io::Result<Pages>;

/// What was found, of one child after the other.
#[derive(Debug)]
pub(crate) struct Looks {
    threads: u32,
    /// The thread that looks ahead: what it shall look at, and what it has found.
    ahead: Option<(Sender<Request>, Receiver<Found>)>,
    /// Without it, what was asked for.
    asked: RefCell<VecDeque<Request>>,
}

impl Looks {
    /// With up to `threads` threads for each child, and, where several children follow one another, one `ahead`; that
    /// one ends when the result is dropped.
    pub(crate) fn begin<'s>(scope: &'s Scope<'s, '_>, threads: u32, ahead: bool) -> Self {
        let (ask, asked) = channel::<Request>();
        let (tell, found) = channel();
        let look = move || {
            for request in asked {
                // Nobody takes it any more where the checkpoint has failed.
                if tell.send(request.own_pages(threads)).is_err() {
                    return;
                }
            }
        };
        // Without it, it takes longer.
        let started = ahead && thread().spawn_scoped(scope, look).is_ok();
        Self {
            threads,
            ahead: started.then_some((ask, found)),
            asked: RefCell::default(),
        }
    }

    /// Has the next child looked at.
    pub(crate) fn ask(&self, request: Request) {
        match &self.ahead {
            // Where the thread is gone, `found` says so.
            Some((ask, _)) => drop(ask.send(request)),
            None => self.asked.borrow_mut().push_back(request),
        }
    }

    /// The pages of the next child that was asked for, a copy of process `pid`, that hold data of its own, or are
    /// guarded; `None` where they are not known yet and who asks shall not `wait`.
    pub(crate) fn found(&self, pid: i32, wait: bool) -> Result<Option<Pages>, CaptureError> {
        let gone = || io::Error::other("nobody has looked at it");
        let found = match &self.ahead {
            Some((_, found)) if wait => found.recv().map_err(|_| gone()).flatten(),
            Some((_, found)) => match found.try_recv() {
                Ok(found) => found,
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => Err(gone()),
            },
            None => {
                let next = self.asked.borrow_mut().pop_front();
                next.ok_or_else(gone).and_then(|r| r.own_pages(self.threads))
            }
        };
        found
            .map(Some)
            .map_err(|e| CaptureError::system(format!("read the page table of the snapshot of process {pid}"), e))
    }
}

fn thread() -> std::thread::Builder {
    std::thread::Builder::new().name("belay-look".into())
}

impl Request {
    fn own_pages(&self, threads: u32) -> Found {
        let pieces = self.pieces();
        let next = AtomicUsize::new(0);
        let look = || {
            let mut pagemap = Pagemap::open(self.child)?;
            let mut found = Vec::new();
            let mut out = Pages::default();
            while let Some(piece) = pieces.get(next.fetch_add(1, Relaxed)) {
                // Where one fails the others need not go on.
                let looked = pagemap.data_and_guards(piece.start, piece.end, &mut found, &mut out.guards);
                looked.inspect_err(|_| next.store(pieces.len(), Relaxed))?;
                out.data
                    .extend(found.drain(..).map(|(start, end)| Range { start, end, ..*piece }));
            }
            Ok::<_, io::Error>(out)
        };
        // Most processes are small: to start a thread takes longer than to look at them.
        let bytes: u64 = self.mappings.iter().map(|m| m.end - m.start).sum();
        let threads = (bytes / PIECE_BYTES + 1).min(threads.into());
        let mut all = std::thread::scope(|scope| {
            let start = |_| thread().spawn_scoped(scope, look);
            // Without them it takes longer.
            let others: Vec<_> = (1..threads).map(start).map_while(Result::ok).collect();
            let own = look();
            others.into_iter().try_fold(own?, |mut all, other| {
                let more = other.join().map_err(|_| io::Error::other("a thread failed"))??;
                all.data.extend(more.data);
                all.guards.extend(more.guards);
                Ok::<_, io::Error>(all)
            })
        })?;
        // The copy has page tables there only where it has guards.
        let mut pagemap = Pagemap::open(self.child)?;
        for (start, end) in &self.others {
            pagemap.guards(*start, *end, &mut all.guards)?;
        }
        all.data.sort_unstable_by_key(|r| r.start);
        all.guards.sort_unstable();
        Ok(all)
    }

    /// The mappings, cut at multiples of [`PIECE_BYTES`].
    fn pieces(&self) -> Vec<Range> {
        let mut out = Vec::new();
        for m in &self.mappings {
            let mut start = m.start;
            while start < m.end {
                let end = m.end.min((start / PIECE_BYTES + 1) * PIECE_BYTES);
                out.push(Range { start, end, ..*m });
                start = end;
            }
        }
        out
    }
}
