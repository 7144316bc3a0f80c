//! Gates: libraries inside processes that come to rest before a checkpoint, and go on after it or after a restart
//! (`belay_abi::control`).
//!
//! ```text
//! find ── close: all are asked, all are waited for ── [suspended: check] ── open                      checkpoint
//!            └ one refuses, or is late: all open                    └ dropped: all open
//! of_restart ── hold (nothing runs yet) ── [everything runs] ── rebuild ── open                       restart
//! ```
//! Whatever becomes of the agent, the gates open: the kernel sees to that when the threads end that hold them.

mod page;

use crate::fault::Refusal;
use belay_abi::control::{CLOSE, MAPPED, OPEN, REBUILD};
use belay_kernel::held::{Holder, MOST};
use belay_kernel::proc::{self, Map};
use page::{head_of, look, Page, Standing, HOLD};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// How long a checkpoint waits for a library to come to rest, unless the configuration says otherwise.
pub const LIMIT: Duration = Duration::from_secs(5);

/// What is said of a library whose thread has ended.
const ENDED: &str = "does not answer any more: its thread, which serves the control page, has ended; restart the program from an earlier checkpoint";

/// Whether `map` may be a control page.
pub fn is_page(map: &Map) -> bool {
    map.shared && map.offset == 0 && map.name == MAPPED
}

/// What stands against a checkpoint of a process that has a control page.
#[derive(Debug)]
pub enum Unready {
    /// It has not been asked to come to rest.
    NotAsked(Refusal),
    /// It has, and is not at rest.
    Restless(Refusal),
}

/// Pages whose gates one thread holds.
#[derive(Debug)]
struct Group {
    pages: Vec<Page>,
    /// None before the gates are shut.
    holder: Option<Holder>,
}

/// The gates of a job on this host. Dropped, they open.
#[derive(Debug)]
pub struct Gates {
    groups: Vec<Group>,
    shut: bool,
}

impl Gates {
    /// Those of these processes, which run.
    pub fn find(pids: impl Iterator<Item = i32>) -> Result<Self, Refusal> {
        let mut pages = Vec::new();
        for pid in pids {
            // One that has ended has none.
            let maps = proc::maps(pid).unwrap_or_default();
            for map in maps.iter().filter(|m| is_page(m)) {
                match look(pid, map) {
                    None => {}
                    Some(Err(strange)) => return Err(strange.refusal(pid)),
                    Some(Ok(head)) if head.owner != pid => {}
                    Some(Ok(head)) => pages.extend(Page::take(pid, map, head)?),
                }
            }
        }
        Ok(Self::of(pages))
    }

    /// Those of processes that a restart has made, each with a file that may be a control page of it.
    pub fn of_restart<'a>(files: impl Iterator<Item = (i32, BorrowedFd<'a>)>) -> Result<Self, Refusal> {
        let mut pages = Vec::new();
        for (pid, file) in files {
            match head_of(file).map_err(|e| page::refuse(pid, "control page", format!("read it: {e}"), false))? {
                Err(strange) => return Err(strange.refusal(pid)),
                Ok(head) if head.owner != pid => {}
                Ok(head) => pages.push(Page::of(pid, head, file)?),
            }
        }
        Ok(Self::of(pages))
    }

    fn of(pages: Vec<Page>) -> Self {
        let mut pages = pages.into_iter().peekable();
        let mut groups = Vec::new();
        while pages.peek().is_some() {
            groups.push(Group {
                pages: pages.by_ref().take(MOST).collect(),
                holder: None,
            });
        }
        Self { groups, shut: false }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    fn pages(&self) -> impl Iterator<Item = (&Page, u32)> {
        self.groups.iter().flat_map(|g| g.pages.iter().map(|p| (p, g.mark())))
    }

    fn pages_mut(&mut self) -> impl Iterator<Item = &mut Page> {
        self.groups.iter_mut().flat_map(|g| &mut g.pages)
    }

    /// Makes the threads that hold the gates.
    fn make_holders(&mut self) -> io::Result<()> {
        for group in &mut self.groups {
            let pages = group.pages.iter().map(Page::shared).collect();
            group.holder = Some(Holder::new(pages, HOLD)?);
        }
        self.shut = true;
        Ok(())
    }

    /// Asks all to come to rest within `limit` and waits for all of them; who stands against it.
    pub fn close(&mut self, limit: Duration) -> Result<(), Vec<Refusal>> {
        let failed = |e: io::Error| {
            vec![page::refuse(
                0,
                "gates",
                format!("make the thread that holds them: {e}"),
                false,
            )]
        };
        self.make_holders().map_err(failed)?;
        self.give(CLOSE, limit, &|| ())
    }

    /// In processes that were restarted and do not run yet: holds the gates, which are shut in the image.
    pub fn hold(&mut self) -> Result<(), Refusal> {
        let failed = |e: io::Error| page::refuse(0, "gates", format!("make the thread that holds them: {e}"), false);
        self.make_holders().map_err(failed)?;
        for group in &mut self.groups {
            let mark = group.mark();
            if let Some(open) = group.pages.iter_mut().find_map(|p| (!p.hold_on(mark)).then_some(&*p)) {
                let why = "was not at rest when the checkpoint was taken";
                return Err(page::refuse(open.pid, &open.library, why, false));
            }
        }
        Ok(())
    }

    /// In processes that were restarted and run: lets the libraries make again, at rest, what a restart does not
    /// bring back. Something else is done meanwhile, now and then.
    pub fn rebuild(&mut self, limit: Duration, meanwhile: &dyn Fn()) -> Result<(), Vec<Refusal>> {
        self.give(REBUILD, limit, meanwhile)?;
        let gone = self.pages().filter(|(p, _)| p.standing == Standing::Ended);
        let refusals: Vec<Refusal> = gone.map(|(p, _)| page::refuse(p.pid, &p.library, ENDED, false)).collect();
        if refusals.is_empty() {
            Ok(())
        } else {
            Err(refusals)
        }
    }

    /// Opens all and waits until the libraries have taken note. The processes go on in any case: who has not within
    /// `limit` is returned.
    pub fn open(mut self, limit: Duration) -> Vec<Refusal> {
        self.shut = false;
        self.give(OPEN, limit, &|| ()).err().unwrap_or_default()
    }

    /// Gives an order to all that are at rest or have not been asked yet, and waits for their answers.
    fn give(&mut self, kind: u32, limit: Duration, meanwhile: &dyn Fn()) -> Result<(), Vec<Refusal>> {
        let end = Instant::now() + limit;
        for group in &mut self.groups {
            let mark = group.mark();
            let able = group.pages.iter_mut().filter(|p| p.standing != Standing::Ended);
            able.for_each(|p| p.give(kind, mark, limit));
        }
        let able = self.pages_mut().filter(|p| p.standing != Standing::Ended);
        let refusals: Vec<Refusal> = able.filter_map(|p| p.await_answer(end, limit, meanwhile).err()).collect();
        if refusals.is_empty() {
            Ok(())
        } else {
            Err(refusals)
        }
    }

    /// Looks, while process `pid` is stopped, whether all of its control pages are at rest.
    pub fn check(gates: Option<&Self>, pid: i32, maps: &[Map]) -> Result<(), Unready> {
        maps.iter().filter(|m| is_page(m)).try_for_each(|map| {
            let head = match look(pid, map) {
                Some(Ok(head)) if head.owner != pid => return Ok(()),
                Some(Ok(head)) => head,
                Some(Err(strange)) => return Err(Unready::Restless(strange.refusal(pid))),
                None => return Err(Unready::Restless(page::refuse(pid, "control page", "cannot be read", false))),
            };
            let known = gates.and_then(|g| g.pages().find(|(p, _)| p.pid == pid && p.file == (map.dev, map.ino)));
            let restless = |why: &str| Err(Unready::Restless(page::refuse(pid, &head.library, why, false)));
            match known {
                None => Err(Unready::NotAsked(page::refuse(
                    pid,
                    &head.library,
                    "has not been asked to come to rest",
                    true,
                ))),
                Some((page, mark)) if page.is_at_rest(mark) => Ok(()),
                Some((page, _)) if page.has_ended() => restless(ENDED),
                Some(_) => {
                    restless("has changed its control page since it has come to rest: use the library that came with this belay")
                }
            }
        })
    }
}

impl Group {
    fn mark(&self) -> u32 {
        self.holder.as_ref().map_or(0, Holder::mark)
    }
}

impl Drop for Gates {
    fn drop(&mut self) {
        if self.shut {
            self.pages_mut().for_each(|p| p.give(OPEN, 0, Duration::ZERO));
        }
    }
}
