//! Gates: libraries inside processes that come to rest before a checkpoint, and go on after it or after a restart
//! (`belay_abi::control`).
//!
//! ```text
//! find ── close: all are asked, all are waited for ── [suspended: leave_gpus, check, put_on_gpus] ── open    checkpoint
//!            │ └ one refuses, or is late: all open                    └ dropped: all open
//!            └ rounds: some have to tell each other something first, on all hosts
//! of_restart ── hold (nothing runs yet) ── put_on_gpus ── [everything runs] ── rebuild, with rounds ── open  restart
//! ```
//! Whatever becomes of the agent, the gates open: the kernel sees to that when the threads end that hold them.

pub mod gpu;
mod page;
mod rounds;
pub mod stranded;

use crate::cuda::OffGpu;
use crate::env::LeftGpus;
use crate::fault::Refusal;
use crate::group::{Facts, Group};
use belay_abi::control::{CLOSE, DRIVER_LATE, LEAVE, MAPPED, OPEN, REBUILD};
use belay_kernel::held::{Holder, MOST};
use belay_kernel::proc::{self, Map};
use gpu::{Devices, Gpus, Stand, Watch};
use page::{head_of, look, Page, Standing, HOLD};
use rounds::Round;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long a checkpoint waits for a library to come to rest, unless the configuration says otherwise.
pub const LIMIT: Duration = Duration::from_secs(5);

/// How long a restart waits for a library to make again what a restart does not bring back, unless the configuration
/// says otherwise. An adapter takes a tenth of a second and more for each GiB of memory that is registered with it.
pub const REBUILD_LIMIT: Duration = Duration::from_secs(300);

/// What takes part in the processes that use a GPU, and is named in refusals.
const DRIVER: &str = "GPU driver";

/// What is said of a library whose thread has ended.
const ENDED: &str = "does not answer any more: its thread, which serves the control page, has ended; restart the program from an earlier checkpoint";

/// The same of the process that asks the GPU driver.
const ASKER_ENDED: &str = "has lost the process that asks it; try again";

/// Whether `map` may be a control page.
pub fn is_page(map: &Map) -> bool {
    map.shared && map.offset == 0 && map.name == MAPPED
}

/// The mappings of process `pid`, and a thread of it under which the kernel shows its memory and its descriptors: under
/// its own number it does not, once the main thread has exited. One that has ended has none.
fn memory(pid: i32) -> (i32, Vec<Map>) {
    let shown = |task: i32| Some((task, proc::maps(task).ok()?)).filter(|(_, maps)| !maps.is_empty());
    let others = || proc::tasks(pid).unwrap_or_default().into_iter().filter(|tid| *tid != pid);
    shown(pid).or_else(|| others().find_map(shown)).unwrap_or((pid, Vec::new()))
}

/// Why libraries do not come to rest, or do not go on, all together.
#[derive(Debug)]
pub enum Apart {
    /// Some on this host refuse, or are late.
    Refused(Vec<Refusal>),
    /// The other nodes say this.
    Group(String),
}

/// Who takes part, here or on another node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parties {
    /// There is any library.
    pub any: bool,
    /// There are processes that use a GPU.
    pub gpus: bool,
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
struct Held {
    pages: Vec<Page>,
    /// None before the gates are shut.
    holder: Option<Holder>,
}

/// The gates of a job on this host. Dropped, they open.
#[derive(Debug)]
pub struct Gates {
    groups: Vec<Held>,
    shut: bool,
    /// Who takes part for the processes that use a GPU.
    gpus: Option<Gpus>,
}

impl Gates {
    /// Those of these processes, which run. Each may take so long to come to rest.
    pub fn find(pids: impl Iterator<Item = i32>, limit: Duration) -> Result<Self, Refusal> {
        let (mut pages, mut on_gpu) = (Vec::new(), Vec::new());
        for pid in pids {
            let (task, maps) = memory(pid);
            if maps.iter().any(gpu::is_mapping) || gpu::is_stranded(pid) {
                if task != pid {
                    return Err(gpu::headless(pid));
                }
                on_gpu.push(pid);
            }
            for map in maps.iter().filter(|m| is_page(m)) {
                match look(task, map) {
                    None => {}
                    Some(Err(strange)) => return Err(strange.refusal(pid)),
                    Some(Ok(head)) if head.owner != pid => {}
                    Some(Ok(head)) => pages.extend(Page::take((pid, task), map, head)?),
                }
            }
        }
        Self::with_gpus(pages, on_gpu, (Stand::Run, limit))
    }

    /// Those of processes that a restart has made, each with a file that may be a control page of it, and of those that use a GPU.
    pub(crate) fn of_restart(files: impl Iterator<Item = (i32, impl AsFd)>, off_gpu: Option<&OffGpu>) -> Result<Self, Refusal> {
        let mut pages = Vec::new();
        for (pid, file) in files {
            let file = file.as_fd();
            match head_of(file).map_err(|e| page::refuse(pid, "control page", format!("read it: {e}"), false))? {
                Err(strange) => return Err(strange.refusal(pid)),
                Ok(head) if head.owner != pid => {}
                Ok(head) => pages.push(Page::of(pid, head, file)?),
            }
        }
        let off = off_gpu.cloned().unwrap_or_default();
        let had = Devices {
            seen: off.devices,
            hidden: off.hidden,
        };
        Self::with_gpus(pages, off.pids, (Stand::Rest(had, off.threads), Duration::ZERO))
    }

    /// Those with these pages, and one more where there are processes that use a GPU.
    fn with_gpus(mut pages: Vec<Page>, pids: Vec<i32>, (stand, limit): (Stand, Duration)) -> Result<Self, Refusal> {
        let gpus = if pids.is_empty() {
            None
        } else {
            let (gpus, page) = Gpus::start(pids, stand, limit)?;
            pages.push(page);
            Some(gpus)
        };
        let mut gates = Self::of(pages);
        gates.gpus = gpus;
        Ok(gates)
    }

    fn of(pages: Vec<Page>) -> Self {
        let mut pages = pages.into_iter().peekable();
        let mut groups = Vec::new();
        while pages.peek().is_some() {
            groups.push(Held {
                pages: pages.by_ref().take(MOST).collect(),
                holder: None,
            });
        }
        Self {
            groups,
            shut: false,
            gpus: None,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The process that asks the driver.
    fn asker(&self) -> Option<i32> {
        self.gpus.as_ref().map(Gpus::pid)
    }

    /// The driver's thread in each process that uses a GPU: it has to run for [`Self::leave_gpus`] and
    /// [`Self::put_on_gpus`], and nothing else of the process.
    pub fn driver_threads(&self) -> &[(i32, i32)] {
        self.gpus.as_ref().map_or(&[], |g| &g.threads)
    }

    /// Whether there are processes that use a GPU.
    pub fn has_gpus(&self) -> bool {
        self.gpus.is_some()
    }

    /// Has the driver take the state of all processes off their GPUs. The gates are shut.
    pub fn leave_gpus(&mut self, meanwhile: &dyn Fn()) -> Result<(), Refusal> {
        self.ask_driver(LEAVE, meanwhile)
    }

    /// Has it put back what is off them; by another process of belay's where the one that asks it has died, or has no answer.
    pub fn put_on_gpus(&mut self, meanwhile: &dyn Fn()) -> Result<(), Refusal> {
        let asked = self.ask_driver(REBUILD, meanwhile);
        let is_gone = self.asker_lives().is_err();
        let Some(gpus) = &mut self.gpus else { return asked };
        let done = match is_gone {
            true => gpus
                .recover(meanwhile)
                .map_err(|fault| fault.of(gpus.pids.first().copied().unwrap_or(0), DRIVER)),
            false => asked,
        };
        gpus.away = done.as_ref().err().map(|refusal| refusal.reason.clone());
        if is_gone && done.is_ok() {
            // They are on their GPUs and run: nobody is to be asked about them any more.
            let asker = gpus.pid();
            gpus.abandon();
            self.gpus = None;
            self.groups.iter_mut().for_each(|g| g.pages.retain(|p| p.pid != asker));
        }
        done
    }

    fn ask_driver(&mut self, kind: u32, meanwhile: &dyn Fn()) -> Result<(), Refusal> {
        let asker = self.asker();
        let of_driver = |p: &Page| Some(p.pid) == asker;
        for group in &mut self.groups {
            let mark = group.mark();
            for page in group.pages.iter_mut().filter(|p| of_driver(p)) {
                if page.standing == Standing::Ended {
                    return Err(page.refuse(ASKER_ENDED));
                }
                page.give(kind, 0, mark, gpu::LIMIT);
                let watch = self.gpus.as_ref().map(|g| g.watch(false));
                let answered = page.await_answer(Instant::now() + gpu::LIMIT, gpu::LIMIT, &|| {
                    meanwhile();
                    watch.as_ref().map_or(Ok(()), Watch::look)
                });
                if let (Err(why), Some(gpus)) = (&answered, &mut self.gpus) {
                    gpus.note_unable(page, why);
                    gpus.leave(page);
                }
                answered?;
                if page.standing == Standing::Ended {
                    return Err(page.refuse(ASKER_ENDED));
                }
            }
        }
        Ok(())
    }

    /// No process of the job goes on.
    pub fn abandon(mut self) {
        if let Some(gpus) = &mut self.gpus {
            gpus.abandon();
        }
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

    /// Asks all to come to rest within `limit`, here and on the other nodes, and waits for all of them. Who takes part.
    pub fn close(&mut self, limit: Duration, group: Option<&dyn Group>) -> Result<Parties, Apart> {
        let failed = |e: io::Error| {
            Apart::Refused(vec![page::refuse(
                0,
                "gates",
                format!("make the thread that holds them: {e}"),
                false,
            )])
        };
        self.make_holders().map_err(failed)?;
        let end = Instant::now() + limit;
        self.agree(CLOSE, group, || (limit, end), &|| ())
    }

    /// In processes that were restarted and do not run yet: holds the gates, which are shut in the image.
    pub fn hold(&mut self) -> Result<(), Refusal> {
        let failed = |e: io::Error| page::refuse(0, "gates", format!("make the thread that holds them: {e}"), false);
        self.make_holders().map_err(failed)?;
        for group in &mut self.groups {
            let mark = group.mark();
            if let Some(open) = group.pages.iter_mut().find_map(|p| (!p.hold_on(mark)).then_some(&*p)) {
                let why = "was not at rest when the checkpoint was taken";
                return Err(open.refuse(why));
            }
        }
        Ok(())
    }

    /// In processes that were restarted and run: lets the libraries make again, at rest, what a restart does not
    /// bring back; returns when all have, on all nodes. Each round may take `limit`.
    pub fn rebuild(&mut self, limit: Duration, group: Option<&dyn Group>) -> Result<(), Apart> {
        let attend = || group.into_iter().for_each(Group::attend);
        self.agree(REBUILD, group, || (limit, Instant::now() + limit), &attend)?;
        Ok(())
    }

    /// Gives an order, again and again while libraries have something to tell each other, until none has any more on
    /// any node. `limit` says how long each time may take, and when it ends. Who takes part.
    fn agree(
        &mut self,
        kind: u32,
        group: Option<&dyn Group>,
        limit: impl Fn() -> (Duration, Instant),
        meanwhile: &dyn Fn(),
    ) -> Result<Parties, Apart> {
        self.give((kind, 0), limit(), |p| p.standing != Standing::Ended, meanwhile)?;
        let mut all = Parties::default();
        for round in 1..rounds::MOST {
            self.asker_lives()?;
            if kind == REBUILD {
                self.are_there()?;
            }
            let told = Round::of(self.pages().map(|(p, _)| p)).map_err(|r| Apart::Refused(vec![r]))?;
            let met = told.meet(group, limit().0).map_err(Apart::Group)?;
            let Parties { any, gpus } = rounds::parties(&met);
            (all.any, all.gpus) = (all.any || any, all.gpus || gpus);
            if !rounds::goes_on(&met) {
                return Ok(all);
            }
            self.hear(&told, &met).map_err(Apart::Refused)?;
            self.give((kind, round), limit(), |p| p.standing == Standing::More, meanwhile)?;
        }
        let restless = self.pages().filter(|(p, _)| p.standing == Standing::More);
        let why = format!(
            "has more to tell after {} rounds: use the library that came with this belay",
            rounds::MOST
        );
        let here: Vec<_> = restless.map(|(p, _)| p.refuse(why.clone())).collect();
        if here.is_empty() {
            return Err(Apart::Group(format!("a library on another host {why}")));
        }
        Err(Apart::Refused(here))
    }

    /// Without it the programs' state would not be taken off, or not put back.
    fn asker_lives(&self) -> Result<(), Apart> {
        let asker = self.asker();
        let gone = self
            .pages()
            .find(|(p, _)| Some(p.pid) == asker && p.standing == Standing::Ended);
        all(gone.map(|(p, _)| p.refuse(ASKER_ENDED)).into_iter().collect())
    }

    /// After a restart nothing can be made again by a library whose thread has ended.
    fn are_there(&self) -> Result<(), Apart> {
        let gone = self.pages().filter(|(p, _)| p.standing == Standing::Ended);
        all(gone.map(|(p, _)| p.refuse(ENDED)).collect())
    }

    /// Writes to each library that waits for it what it has wished for.
    fn hear(&self, told: &Round, met: &Facts) -> Result<(), Vec<Refusal>> {
        let waiting = self.pages().filter(|(p, _)| p.standing == Standing::More);
        let late = waiting.filter_map(|(p, _)| told.answer(p, met).and_then(|answer| p.hear(&answer)).err());
        match late.collect::<Vec<_>>() {
            none if none.is_empty() => Ok(()),
            refusals => Err(refusals),
        }
    }

    /// Opens all and waits until the libraries have taken note. The processes go on in any case: who has not within
    /// `limit` is returned.
    pub fn open(mut self, limit: Duration) -> Vec<Refusal> {
        self.shut = false;
        let given = self.give(
            (OPEN, 0),
            (limit, Instant::now() + limit),
            |p| p.standing != Standing::Ended,
            &|| (),
        );
        match given {
            Err(Apart::Refused(late)) => late,
            _ => Vec::new(),
        }
    }

    /// Gives an order to those that are `able`, and waits for their answers.
    fn give(
        &mut self,
        (kind, round): (u32, u32),
        (limit, end): (Duration, Instant),
        able: impl Fn(&Page) -> bool,
        meanwhile: &dyn Fn(),
    ) -> Result<(), Apart> {
        let left = end.saturating_duration_since(Instant::now());
        if let Some(gpus) = &mut self.gpus {
            gpus.is_asked = true;
        }
        // The driver has longer than libraries.
        let asker = self.asker();
        let for_driver = match kind {
            CLOSE => limit + DRIVER_LATE,
            _ => limit.max(gpu::LIMIT),
        };
        let with_driver = end + for_driver.saturating_sub(limit);
        for group in &mut self.groups {
            let mark = group.mark();
            let able = group.pages.iter_mut().filter(|p| able(p));
            able.for_each(|p| p.give(kind, round, mark, left));
        }
        let asked = self.groups.iter_mut().flat_map(|g| &mut g.pages).filter(|p| p.is_asked());
        let watch = self.gpus.as_ref().map(|g| g.watch(true));
        let wait = |p: &mut Page| match (&watch, asker == Some(p.pid)) {
            (Some(watch), true) => p.await_answer(with_driver, for_driver, &|| {
                meanwhile();
                watch.look()
            }),
            _ => p.await_answer(end, limit, &|| {
                meanwhile();
                Ok(())
            }),
        };
        let refused: Vec<Refusal> = asked.filter_map(|p| wait(p).err()).collect();
        let its = self.groups.iter_mut().flat_map(|g| &mut g.pages);
        if let (false, Some(gpus), Some(page)) = (refused.is_empty(), &mut self.gpus, { its }.find(|p| Some(p.pid) == asker)) {
            gpus.leave(page);
        }
        all(refused)
    }

    /// The libraries in process `pid` that take part.
    pub fn libraries(&self, pid: i32) -> Vec<String> {
        let its = self.pages().filter(|(p, _)| p.pid == pid);
        let on_gpu = self.gpus.iter().filter(|g| g.pids.contains(&pid));
        its.map(|(p, _)| p.name.clone())
            .chain(on_gpu.map(|_| DRIVER.to_owned()))
            .collect()
    }

    /// The same of process `pid` and the GPUs, which it has no more.
    fn check_gpus(gates: Option<&Self>, pid: i32, maps: &[Map]) -> Result<(), Unready> {
        let device = maps.iter().find(|m| gpu::is_mapping(m));
        let gates = gates.filter(|g| g.gpus.as_ref().is_some_and(|gpus| gpus.pids.contains(&pid)));
        let of = |why: &str, passing| page::refuse(pid, DRIVER, why, passing);
        match (device, gates) {
            (None, None) if !gpu::is_stranded(pid) => Ok(()),
            (_, None) => Err(Unready::NotAsked(of(
                "has not been asked to take the process off the GPU",
                true,
            ))),
            (Some(map), Some(_)) => {
                let why = format!(
                    "has left {} mapped: this driver cannot checkpoint the program",
                    map.name.display()
                );
                Err(Unready::Restless(of(&why, false)))
            }
            (None, Some(gates)) => {
                let asker = gates.asker();
                let rests = |(p, mark): (&Page, u32)| Some(p.pid) == asker && p.is_at_rest(mark);
                match gates.pages().any(rests) {
                    true => Ok(()),
                    false => Err(Unready::Restless(of(ASKER_ENDED, false))),
                }
            }
        }
    }

    /// The GPUs that process `pid` has left.
    pub fn left(&self, pid: i32) -> Option<LeftGpus> {
        let gpus = self.gpus.as_ref().filter(|g| g.pids.contains(&pid))?;
        Some(LeftGpus {
            devices: gpus.devices.clone(),
            thread: gpus.threads.iter().find(|(of, _)| *of == pid).map(|(_, tid)| *tid),
        })
    }

    /// Looks, while process `pid`, of which `task` is a thread that lives, is stopped, whether all of its control pages
    /// are at rest.
    pub fn check(gates: Option<&Self>, (pid, task): (i32, i32), maps: &[Map]) -> Result<(), Unready> {
        Self::check_gpus(gates, pid, maps)?;
        maps.iter().filter(|m| is_page(m)).try_for_each(|map| {
            let head = match look(task, map) {
                Some(Ok(head)) if head.owner != pid => return Ok(()),
                Some(Ok(head)) => head,
                Some(Err(strange)) => return Err(Unready::Restless(strange.refusal(pid))),
                None => return Err(Unready::Restless(page::refuse(pid, "control page", "cannot be read", false))),
            };
            let known = gates.and_then(|g| g.pages().find(|(p, _)| p.pid == pid && p.file == (map.dev, map.ino)));
            let restless = |why: &str| Err(Unready::Restless(page::refuse(pid, &head.name, why, false)));
            match known {
                None => Err(Unready::NotAsked(page::refuse(
                    pid,
                    &head.name,
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

/// Nothing, where nobody refuses.
fn all(refusals: Vec<Refusal>) -> Result<(), Apart> {
    if refusals.is_empty() {
        Ok(())
    } else {
        Err(Apart::Refused(refusals))
    }
}

impl Held {
    fn mark(&self) -> u32 {
        self.holder.as_ref().map_or(0, Holder::mark)
    }
}

impl Drop for Gates {
    fn drop(&mut self) {
        if self.shut {
            self.pages_mut().for_each(|p| p.give(OPEN, 0, 0, Duration::ZERO));
        }
    }
}
