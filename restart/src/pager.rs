//! The process that fills the memory of a job which runs already (`--lazy`): the pages that somebody waits for first,
//! then what follows them, then the rest.
//!
//! It has the descriptors by which the kernel asks for missing pages (userfaultfd) of all processes, and of those that
//! they make. A descriptor that is closed too early would give the program zeros, and nobody would notice: so a second
//! process, which does nothing, has the same table of descriptors. When the first ends too early, that tells the agent,
//! which ends the job, and holds the descriptors until then. Both are no part of the job and no children of the agent,
//! so that the filling goes on when the agent is killed. Their namespace must be the job's own: when nobody else is
//! left, the second ends all that is in it.

mod pending;
mod space;

use crate::channel::{Channel, Message};
use crate::fail::{ended, Outcome, RestartError};
use crate::filling::Filling;
use crate::later::Later;
use crate::sys;
use belay_image::extents::Extent;
use belay_image::ImageError;
use belay_kernel::direct::Buffer;
use belay_kernel::{numbers, pidfd, process};
use belay_storage::chunk::Chunk;
use space::{Attempt, Space};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// How many memories there may be before it is looked which of them are nobody's any more.
const MANY: usize = 64;
/// How long is waited for news while what is mapped is being changed, in milliseconds.
const PAUSE_MS: i32 = 1;
/// Exit status of the process that fills, when it has told why it does not go on.
const HAS_TOLD: i32 = 3;

fn failed(e: io::Error) -> RestartError {
    RestartError::at("fill memory", e)
}

/// In the agent: makes the two processes, under these identifiers. `taken` are the descriptors of processes, by PID.
pub(crate) fn begin(
    taken: Vec<(i32, OwnedFd)>,
    later: &HashMap<i32, Later>,
    chunks: &HashMap<u32, Chunk>,
    [guard, pager]: [i32; 2],
) -> Outcome<Filling> {
    let (own, theirs) = Channel::pair().map_err(failed)?;
    let agent = pidfd::open(std::process::id().cast_signed()).map_err(failed)?;
    let made = sys::fork(libc::CLONE_PARENT, 0, guard).map_err(failed)?;
    if made == 0 {
        drop(own);
        let space = |(pid, uffd)| Space::new(uffd, later.get(&pid).map_or(&[], |l| &l.pages));
        let spaces = taken.into_iter().map(space).collect();
        let source = Source::new(chunks);
        stand_by(spaces, source, (&theirs, &agent), pager)
    }
    drop(theirs);
    Filling::of(own, [guard, pager])
}

/// Has a child that fills, with which it shares its descriptors, until that has done all.
fn stand_by(spaces: VecDeque<Space>, source: Source<'_>, (channel, agent): (&Channel, &OwnedFd), pager: i32) -> ! {
    sys::block_signals();
    // Neither the terminal's signals nor the job's end by its group are meant for it.
    let _ = sys::setsid();
    let _ = rustix::thread::set_name(c"belay-pager");
    let chunks = source.chunks.values().map(|c| c.file.as_raw_fd());
    let uffds = spaces.iter().map(Space::fd);
    let keep: Vec<i32> = chunks.chain(uffds).chain([channel.fd(), agent.as_raw_fd()]).collect();
    sys::close_all_but(&keep);
    // SAFETY: this process closes nothing and opens nothing any more, until the other one has ended.
    let child = match unsafe { process::fork_with_table(0, libc::SIGCHLD, pager) } {
        Ok(0) => be_pager(spaces, source, channel),
        Ok(child) => child,
        Err(e) => {
            channel.send(&Message::failed(&failed(e)));
            sys::exit_now(1)
        }
    };
    let status = sys::wait(child, libc::__WALL).map_or(-1, |(_, status)| status);
    if status == 0 {
        sys::exit_now(0)
    }
    if !libc::WIFEXITED(status) || libc::WEXITSTATUS(status) != HAS_TOLD {
        let how = format!("the process that fills it {}", ended(status));
        channel.send(&Message::failed(&RestartError::at("fill memory", how)));
    }
    // The agent ends this process when it has ended the job. If it cannot, nothing may go on.
    pidfd::wait_gone(agent.as_fd());
    let _ = sys::kill(-1, libc::SIGKILL);
    sys::exit_now(1)
}

fn be_pager(spaces: VecDeque<Space>, source: Source<'_>, channel: &Channel) -> ! {
    channel.send(&Message::Hello);
    let mut pager = Pager {
        spaces,
        source,
        unread: Vec::new(),
        next_look: MANY,
        last: None,
    };
    match pager.run(channel) {
        Ok(()) => {
            channel.send(&Message::Filled);
            sys::exit_now(0)
        }
        Err(e) => {
            channel.send(&Message::failed(&e));
            sys::exit_now(HAS_TOLD)
        }
    }
}

/// Where missing pages are read from, and compared with their checksums.
struct Source<'a> {
    chunks: &'a HashMap<u32, Chunk>,
    buf: Buffer,
    /// What is in it.
    read: Option<Extent>,
}

impl<'a> Source<'a> {
    fn new(chunks: &'a HashMap<u32, Chunk>) -> Self {
        Self {
            chunks,
            buf: Buffer::default(),
            read: None,
        }
    }

    fn read(&mut self, part: &Extent) -> Outcome<&[u8]> {
        if self.read != Some(*part) {
            self.read = None;
            let chunk = self.chunks.get(&part.chunk).ok_or_else(|| ImageError::Damaged {
                path: format!("chunk {}", part.chunk),
                reason: "it is not in the manifest".into(),
            })?;
            let pages = u32::try_from(part.pages()).unwrap_or(u32::MAX);
            chunk.read(part.page, pages, &mut self.buf)?;
            self.read = Some(*part);
        }
        Ok(&self.buf)
    }
}

/// The process that fills.
struct Pager<'a> {
    spaces: VecDeque<Space>,
    source: Source<'a>,
    /// Pages that the restored processes do not need any more. They are compared all the same: later checkpoints may refer
    /// to them.
    unread: Vec<Extent>,
    /// From so many memories on it is looked which are nobody's.
    next_look: usize,
    /// Where somebody has waited last.
    last: Option<u64>,
}

impl Pager<'_> {
    fn run(&mut self, channel: &Channel) -> Outcome<()> {
        let (mut goes, mut idle) = (false, false);
        while !self.spaces.is_empty() {
            let wait = match (goes, idle) {
                (_, true) => PAUSE_MS,
                (false, false) => -1,
                (true, false) => 0,
            };
            // Until the job has all its mappings, nothing is put there that nobody waits for.
            let fds = self.spaces.iter().map(Space::fd);
            let all = fds.chain((!goes).then_some(channel.fd()));
            let mut polls: Vec<libc::pollfd> = all.map(|fd| numbers::entry(fd, libc::POLLIN)).collect();
            numbers::poll_all(&mut polls, wait).map_err(failed)?;
            if polls.get(self.spaces.len()).is_some_and(|p| p.revents != 0) {
                // Read, too: what is left unread at the end would cut off what has been said.
                channel.receive().map_err(failed)?;
                goes = true;
            }
            self.hear()?;
            idle = self.serve()? == Attempt::Changing;
            if goes && !idle {
                idle = self.fill_on()? == Attempt::Changing;
                self.let_go()?;
                idle |= !self.spaces.iter().any(Space::is_missing_pages);
            }
        }
        for e in std::mem::take(&mut self.unread) {
            self.source.read(&e)?;
        }
        Ok(())
    }

    /// Does `f` with each of the memories, beside the others.
    fn each(
        &mut self,
        mut f: impl FnMut(&mut Space, &mut Source<'_>, &mut VecDeque<Space>) -> Outcome<Attempt>,
    ) -> Outcome<Attempt> {
        let mut all = Attempt::Done;
        for _ in 0..self.spaces.len() {
            let Some(mut space) = self.spaces.pop_front() else { break };
            if f(&mut space, &mut self.source, &mut self.spaces)? == Attempt::Changing {
                all = Attempt::Changing;
            }
            self.spaces.push_back(space);
        }
        Ok(all)
    }

    fn hear(&mut self) -> Outcome<()> {
        let before = self.spaces.len();
        self.each(|space, _, others| space.hear(others).map(|_| Attempt::Done))?;
        if self.spaces.len() > before && self.spaces.len() >= self.next_look {
            self.each(|space, _, _| space.look().map(|_| Attempt::Done))?;
            self.let_go()?;
            self.next_look = MANY.max(2 * self.spaces.len());
        }
        Ok(())
    }

    fn serve(&mut self) -> Outcome<Attempt> {
        let mut last = self.last;
        let attempt = self.each(|space, source, others| {
            if space.is_waited_for() {
                last = Some(space.id());
            }
            space.serve(source, others)
        });
        self.last = last;
        attempt
    }

    /// Fills a piece where somebody has waited last, or else of a restored process, or else of another.
    fn fill_on(&mut self) -> Outcome<Attempt> {
        let missing = |s: &&Space| s.is_missing_pages();
        let at_last = |s: &&Space| Some(s.id()) == self.last;
        let all = || self.spaces.iter().filter(missing);
        let found = all()
            .find(at_last)
            .or_else(|| all().find(|s| s.restored))
            .or_else(|| all().next());
        let Some(which) = found.map(Space::id) else {
            return Ok(Attempt::Done);
        };
        self.each(|space, source, others| match space.id() == which {
            true => space.go_on(source, others),
            false => Ok(Attempt::Done),
        })
    }

    /// Lets go of memories of which nothing is missing, or which are nobody's any more.
    fn let_go(&mut self) -> Outcome<()> {
        for _ in 0..self.spaces.len() {
            let Some(mut space) = self.spaces.pop_front() else { break };
            let over = space.is_over()?;
            if space.restored {
                self.unread.append(&mut space.dropped);
            }
            match over {
                true => space.close(),
                false => self.spaces.push_back(space),
            }
        }
        Ok(())
    }
}
