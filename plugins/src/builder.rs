//! State of one rebuild, and what it has made.

use crate::content::PageSource;
use crate::fault::Fault;
use crate::files::scaffold::Scaffold;
use crate::files::sight::{Copies, Sights};
use crate::group::Group;
use crate::keep::{Fork, HoldId, Lent, Store};
use crate::limit::RaisedLimit;
use crate::model::{DescId, Descriptors};
use crate::sets::Sets;
use crate::sockets::names::Book;
use belay_image::blobs::BlobReader;
use std::cell::Cell;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::time::Duration;

/// State of one rebuild.
pub(crate) struct Builder<'a> {
    /// What to rebuild.
    pub(crate) descriptors: &'a Descriptors,
    /// What was at the paths of its files before the restart began.
    pub(crate) sights: &'a Sights,
    /// Byte strings.
    pub(crate) blobs: &'a BlobReader,
    /// Contents of shared memory and files.
    pub(crate) pages: &'a dyn PageSource,
    /// Copies of files that are not here as they were.
    pub(crate) copies: &'a Copies<'a>,
    /// The other nodes of the job.
    pub(crate) group: Option<&'a dyn Group>,
    /// Where the addresses of the job are now; known when all listening sockets exist.
    pub(crate) book: Option<Book>,
    /// Tells the user what the restart waits for.
    pub(crate) tell: &'a dyn Fn(&str),
    /// The agent's standard input, output and error.
    pub(crate) stdio: [Option<OwnedFd>; 3],
    /// The IPC and mount namespaces are the job's own.
    pub(crate) own_namespaces: bool,
    /// Numbers that no process of the job uses.
    pub(crate) room: Range<RawFd>,
    /// What each kind has made, or notes down.
    pub(crate) sets: Sets,
    /// Descriptions, and behind them what else is held until the end.
    pub(crate) made: Store,
    pub(crate) fork: &'a mut Fork<'a>,
    /// See [`Waits::spare`].
    pub(crate) spare: Cell<Duration>,
}

/// For so long in all, what another node that restarts on this host needs for the moment is waited for.
pub(crate) const SPARE: Duration = Duration::from_secs(2);

/// What a wait during the rebuild needs.
pub(crate) struct Waits<'a> {
    /// Tells the user what the restart waits for.
    pub(crate) tell: &'a dyn Fn(&str),
    /// The other nodes, which wait for this one.
    pub(crate) group: Option<&'a dyn Group>,
    /// How long may still be waited for what is not a rule of the kernel.
    pub(crate) spare: &'a Cell<Duration>,
}

impl Waits<'_> {
    /// Lets time pass, if there is any to spare; says whether there was.
    pub(crate) fn spend(&self, time: Duration) -> bool {
        let left = self.spare.get().checked_sub(time);
        if let Some(left) = left {
            self.spare.set(left);
            self.linger(time);
        }
        left.is_some()
    }

    /// Lets time pass.
    pub(crate) fn linger(&self, time: Duration) {
        match self.group {
            Some(group) => group.linger(time),
            None => std::thread::sleep(time),
        }
    }
}

impl Builder<'_> {
    /// For what waits.
    pub(crate) fn waits(&self) -> Waits<'_> {
        Waits {
            tell: self.tell,
            group: self.group,
            spare: &self.spare,
        }
    }

    /// Takes the descriptor of description `id`.
    pub(crate) fn put(&mut self, id: DescId, fd: OwnedFd) -> Result<(), Fault> {
        self.made.put(id, fd, self.fork)
    }

    /// Holds what is no description of the job.
    pub(crate) fn hold(&mut self, fd: OwnedFd) -> Result<HoldId, Fault> {
        self.made.add(fd, self.fork)
    }

    /// Puts `fd` into a store that ends earlier.
    pub(crate) fn hold_in(&mut self, store: &mut Store, fd: OwnedFd) -> Result<HoldId, Fault> {
        store.add(fd, self.fork)
    }

    /// Whether description `id` exists.
    pub(crate) fn has(&self, id: DescId) -> bool {
        self.made.has(id)
    }

    /// A descriptor of description `id`, or of what else is held, where that exists.
    pub(crate) fn lend(&self, id: HoldId) -> Result<Option<Lent>, Fault> {
        self.made.lend(id)
    }
}

/// What has been made.
#[derive(Debug)]
pub(crate) struct Built {
    /// Descriptions, but for those that are made in the processes, and what files need.
    pub(crate) made: Store,
    /// What each kind has made.
    pub(crate) sets: Sets,
    /// Where the addresses of the job are now.
    pub(crate) book: Book,
    /// The agent's standard input, output and error.
    pub(crate) stdio: [Option<OwnedFd>; 3],
    /// Where all these descriptors are.
    pub(crate) room: Range<RawFd>,
    /// Directories that are there for the time of the rebuild only.
    pub(crate) scaffold: Scaffold,
    /// The raised descriptor limit.
    pub(crate) _limit: RaisedLimit,
}
