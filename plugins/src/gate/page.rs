//! One control page: what its library says in it, checked where it is used, and the orders that it is given.

use super::DRIVER;
use crate::fault::Refusal;
use crate::sys::fd::{fs_magic, fstat};
use belay_abi::control::{self, Control, Span, Word};
use belay_abi::PAGE;
use belay_kernel::held::SharedPage;
use belay_kernel::proc::{self, Map};
use belay_kernel::{futex, pidfd, vm};
use rustix::fs::SealFlags;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the kernel tells of a process in which nothing happens because it was stopped by a signal.
const STOPPED: char = 'T';

/// How often something else is done while an answer is waited for.
const TURN: Duration = Duration::from_millis(50);

/// After so long the log says what the thread does whose answer is waited for.
const LONG: Duration = Duration::from_secs(10);

/// The part of a control page that does not change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) owner: i32,
    pub(super) descriptor: i32,
    pub(super) name: String,
}

/// Why a control page is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Strange {
    /// It is being made.
    Unfinished,
    /// Who has made it does not know what belongs there.
    Magic,
    /// It is of this version.
    Version(u32),
}

impl Head {
    pub(super) fn parse(page: &[u8; size_of::<Control>()]) -> Result<Self, Strange> {
        let word = |at: usize| page[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
        let magic = page[..8].try_into().map_or(0, u64::from_ne_bytes);
        let version = word(offset_of!(Control, version));
        match magic {
            control::MAGIC if version == control::VERSION => {}
            control::MAGIC => return Err(Strange::Version(version)),
            0 => return Err(Strange::Unfinished),
            _ => return Err(Strange::Magic),
        }
        let text = &page[offset_of!(Control, name)..offset_of!(Control, hold)];
        let text = text.split(|b| *b == 0).next().unwrap_or_default();
        Ok(Self {
            owner: word(offset_of!(Control, owner)).cast_signed(),
            descriptor: word(offset_of!(Control, descriptor)).cast_signed(),
            name: match text {
                [] => "a library without a name".into(),
                text => String::from_utf8_lossy(text).into_owned(),
            },
        })
    }
}

impl Strange {
    /// Refuses the page of process `pid`.
    pub(super) fn refusal(&self, pid: i32) -> Refusal {
        let (reason, passing) = match self {
            Strange::Unfinished => ("is being made".into(), true),
            Strange::Magic => (
                "does not begin as a control page does: whatever has made it, keep it out of the job".into(),
                false,
            ),
            Strange::Version(v) => (
                format!(
                    "is of version {v}, and this belay knows version {}: use the library that came with it",
                    control::VERSION
                ),
                false,
            ),
        };
        refuse(pid, "control page", reason, passing)
    }
}

pub(super) fn refuse(pid: i32, object: &str, reason: impl Into<String>, passing: bool) -> Refusal {
    Refusal {
        pid,
        object: object.into(),
        reason: reason.into(),
        passing,
        damage: false,
    }
}

/// The head of the page that the process of thread `task` has mapped at `map`; none of one that has ended.
pub(super) fn look(task: i32, map: &Map) -> Option<Result<Head, Strange>> {
    let mut bytes = [0; size_of::<Control>()];
    vm::read(task, map.start, &mut bytes).ok()?;
    Some(Head::parse(&bytes))
}

/// Where a library stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It has not been asked.
    Unknown,
    /// It is being asked.
    Asked,
    /// At rest so far: it has something to tell the others, or to hear.
    More,
    AtRest,
    /// It has not answered in time.
    Late,
    /// The thread that serves the page has ended, perhaps with its process.
    Ended,
}

/// The control page of a process.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) pid: i32,
    /// The process that is named where something is refused: it itself, unless it speaks for another one.
    about: i32,
    pub(super) name: String,
    /// Device and number of the memfd.
    pub(super) file: (u64, u64),
    pub(super) standing: Standing,
    /// The last order given from here; 0 for none.
    given: u32,
    shared: Arc<SharedPage>,
}

/// Where in the page the words are that the agent holds.
pub(super) const HOLD: [usize; 2] = [offset_of!(Control, hold), offset_of!(Control, hold) + size_of::<Word>()];

impl Page {
    /// Takes the page with this `head` that process `pid`, of which `task` is a thread that lives, has mapped at `map`; none
    /// where the process ends at this moment.
    pub(super) fn take((pid, task): (i32, i32), map: &Map, head: Head) -> Result<Option<Self>, Refusal> {
        let Ok(process) = pidfd::open_by(pid, task) else {
            return Ok(None);
        };
        let descriptor = head.descriptor;
        // Who has called exec meanwhile, or has ended, has the page no more.
        let is_there = || look(task, map) == Some(Ok(head.clone()));
        let lost = |why: &str| {
            refuse(
                pid,
                &head.name,
                format!("its control page is not behind descriptor {descriptor} ({why})"),
                false,
            )
        };
        let file = match pidfd::getfd(process.as_fd(), descriptor) {
            Ok(file) => file,
            Err(_) if !is_there() => return Ok(None),
            Err(e) => return Err(lost(&e.to_string())),
        };
        let page = Self::of(pid, head.clone(), file.as_fd())?;
        if page.file != (map.dev, map.ino) {
            return if is_there() { Err(lost("another file is")) } else { Ok(None) };
        }
        Ok(Some(page))
    }

    /// The page in `file`, of process `pid`.
    pub(super) fn of(pid: i32, head: Head, file: BorrowedFd<'_>) -> Result<Self, Refusal> {
        let Head { name, descriptor, .. } = head;
        let fail = |what: &str, e: &std::io::Error| {
            refuse(
                pid,
                &name,
                format!("{what} its control page (descriptor {descriptor}): {e}"),
                false,
            )
        };
        let seals = rustix::fs::fcntl_get_seals(file);
        // Else the agent could be killed by a page that is not there any more.
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            let why = format!("its control page (descriptor {descriptor}) is no memory that is sealed against shrinking");
            return Err(refuse(pid, &name, why, false));
        }
        // A mapping of huge pages covers more than the agent has room for, and their pool may be empty at any touch.
        if fs_magic(file.as_raw_fd()).map_err(|e| fail("look at", &e))? == libc::HUGETLBFS_MAGIC {
            let why = format!("its control page (descriptor {descriptor}) is in huge pages: make it of ordinary ones");
            return Err(refuse(pid, &name, why, false));
        }
        let stat = fstat(file.as_raw_fd()).map_err(|e| fail("look at", &e))?;
        if stat.st_size < PAGE.cast_signed() {
            return Err(refuse(pid, &name, "its control page is smaller than a page", false));
        }
        let shared = SharedPage::map(file).map_err(|e| fail("map", &e))?;
        Ok(Self {
            pid,
            about: pid,
            name,
            file: (stat.st_dev, stat.st_ino),
            standing: Standing::Unknown,
            given: 0,
            shared: Arc::new(shared),
        })
    }

    /// Why a checkpoint, or a restart, cannot be had with this library.
    pub(super) fn refuse(&self, why: impl Into<String>) -> Refusal {
        refuse(self.about, &self.name, why, false)
    }

    /// Who serves it is no part of the job, and speaks for this process of it.
    pub(super) fn speaks_for(self, pid: i32) -> Self {
        Self { about: pid, ..self }
    }

    /// The word at this place of [`Control`].
    fn word(&self, at: usize) -> &AtomicU32 {
        self.shared.half(at)
    }

    /// The memory.
    pub(super) fn shared(&self) -> Arc<SharedPage> {
        Arc::clone(&self.shared)
    }

    fn held(&self, order: u32) -> &AtomicU32 {
        self.word(HOLD[control::place(order)])
    }

    fn serve(&self, order: u32) -> &AtomicU32 {
        self.word(offset_of!(Control, serve) + control::place(order) * size_of::<Word>())
    }

    fn order(&self) -> &AtomicU32 {
        self.word(offset_of!(Control, order))
    }

    fn answer(&self) -> &AtomicU32 {
        self.word(offset_of!(Control, answer))
    }

    /// Gives an order; the gate is shut from now on, held by `mark`, or opens.
    pub(super) fn give(&mut self, kind: u32, round: u32, mark: u32, limit: Duration) {
        let last = self.order().load(Ordering::SeqCst);
        let next = control::order(control::number(last).wrapping_add(1), kind);
        let mark = if kind == control::OPEN { 0 } else { mark };
        self.held(next).store(mark, Ordering::SeqCst);
        let limit_ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        self.word(offset_of!(Control, limit_ms)).store(limit_ms, Ordering::SeqCst);
        self.word(offset_of!(Control, round)).store(round, Ordering::SeqCst);
        self.order().store(next, Ordering::SeqCst);
        // In one call: whoever is killed between a release and its wake leaves threads asleep that nobody wakes.
        futex::wake_and_release(self.order(), self.held(last));
        (self.given, self.standing) = (next, Standing::Asked);
    }

    /// Whether its answer is waited for.
    pub(super) fn is_asked(&self) -> bool {
        self.standing == Standing::Asked
    }

    /// In a process that was restarted and does not run yet: holds the gate, which is shut in the image; whether it
    /// is.
    pub(super) fn hold_on(&mut self, mark: u32) -> bool {
        let order = self.order().load(Ordering::SeqCst);
        let shut = control::kind(order) == control::CLOSE && self.answer().load(Ordering::SeqCst) == order;
        if shut {
            self.held(order).store(mark, Ordering::SeqCst);
            (self.given, self.standing) = (order, Standing::AtRest);
        }
        shut
    }

    /// Whether the library has been told to come to rest, says that it has, and all is as it was then; `mark` holds
    /// the gate.
    pub(super) fn is_at_rest(&self, mark: u32) -> bool {
        self.standing == Standing::AtRest
            && !self.has_ended()
            && self.order().load(Ordering::SeqCst) == self.given
            && self.answer().load(Ordering::SeqCst) == self.given
            && self.held(self.given).load(Ordering::SeqCst) == mark
    }

    /// Whether the library's thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        let of = |order| self.serve(order).load(Ordering::SeqCst) & control::DIED != 0;
        of(self.given) || of(control::order(control::number(self.given) + 1, 0))
    }

    /// Waits until `end` for the answer to the last order, and does something else now and then: where that fails, nobody waits
    /// any more.
    pub(super) fn await_answer(
        &mut self,
        end: Instant,
        limit: Duration,
        meanwhile: &dyn Fn() -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let mut long = Some(Instant::now() + LONG);
        loop {
            let value = self.serve(self.given).load(Ordering::SeqCst);
            let answer = self.answer().load(Ordering::SeqCst);
            let left = end.saturating_duration_since(Instant::now());
            if answer == self.given && value == 0 {
                return self.answered();
            }
            if self.has_ended() {
                self.standing = Standing::Ended;
                return Ok(());
            }
            // It may be about to answer an order that has been withdrawn.
            if answer != self.given && !control::is_older(answer, self.given) {
                let why = "has answered what it was not asked: use the library that came with this belay";
                return Err(self.refuse(why));
            }
            if left.is_zero() {
                return self.late(limit);
            }
            if long.is_some_and(|at| at <= Instant::now()) {
                long = None;
                self.log_wait(value);
            }
            futex::wait(self.serve(self.given), value, left.min(TURN));
            meanwhile()?;
        }
    }

    /// Says in the log that the answer takes long, and where the thread is that serves the page: the holder of `value` or
    /// of the other word.
    fn log_wait(&self, value: u32) {
        let other = self.serve(control::order(control::number(self.given) + 1, 0));
        let holder = [value, other.load(Ordering::SeqCst)].map(|held| held & !(control::WAITERS | control::DIED));
        let thread = holder.into_iter().find(|tid| *tid != 0).unwrap_or(0);
        let of = |name: &str| proc::text(format!("/proc/{}/task/{thread}/{name}", self.pid)).unwrap_or_else(|e| e.to_string());
        tracing::warn!(
            pid = self.pid,
            library = self.name,
            order = self.given,
            is = self.order().load(Ordering::SeqCst),
            answer = self.answer().load(Ordering::SeqCst),
            hold = ?[0, 1].map(|order| self.held(control::order(order, 0)).load(Ordering::SeqCst)),
            serve = ?[0, 1].map(|order| self.serve(control::order(order, 0)).load(Ordering::SeqCst)),
            thread,
            call = of("syscall").trim_end(),
            waits_in = of("wchan"),
            "a library has not answered for 10 s"
        );
    }

    fn answered(&mut self) -> Result<(), Refusal> {
        match self.word(offset_of!(Control, outcome)).load(Ordering::SeqCst) {
            control::DONE => {
                self.standing = Standing::AtRest;
                Ok(())
            }
            control::MORE if control::kind(self.given) != control::OPEN => {
                self.standing = Standing::More;
                Ok(())
            }
            outcome => Err(refuse(self.about, &self.name, self.fault(), outcome == control::BUSY)),
        }
    }

    /// It has not answered in time.
    fn late(&mut self, limit: Duration) -> Result<(), Refusal> {
        let seconds = limit.as_secs_f64();
        let what = match control::kind(self.given) {
            control::CLOSE => "come to rest",
            control::LEAVE => "taken the state off the GPUs",
            control::REBUILD => "made again what the restart has not",
            _ => "gone on",
        };
        let key = match control::kind(self.given) {
            control::REBUILD => "rebuild",
            _ => "limit",
        };
        let why = match proc::stat(self.pid) {
            Err(_) => None,
            Ok(s) if s.is_dead() => None,
            Ok(s) if s.state == STOPPED => {
                Some("cannot come to rest while its process is stopped: continue it (kill -CONT) and try again".into())
            }
            // The driver has been told how long to wait for work, and ends that by itself; the limit of the others is not
            // configured.
            Ok(_) if self.name == DRIVER && control::kind(self.given) == control::CLOSE => Some(format!(
                "does not answer within {seconds} s: before r610 it hangs so where processes share memory of GPUs (CUDA IPC, NCCL); else see whether the GPU hangs (nvidia-smi, dmesg)"
            )),
            Ok(_) if self.name == DRIVER => Some(format!(
                "has not {what} within {seconds} s: see whether the GPU hangs (nvidia-smi, dmesg)"
            )),
            Ok(_) => Some(format!(
                "has not {what} within {seconds} s: try again, or give it more time ({key} under [gate] in the configuration)"
            )),
        };
        match why {
            Some(why) => {
                self.standing = Standing::Late;
                Err(self.refuse(why))
            }
            None => {
                self.standing = Standing::Ended;
                Ok(())
            }
        }
    }

    /// The span at this place of [`Control`].
    fn span(&self, at: usize) -> Span {
        let half = |at: usize| -> u64 {
            let word = |at| u64::from(self.word(at).load(Ordering::SeqCst));
            word(at) | word(at + 4) << 32
        };
        Span {
            address: half(at),
            bytes: half(at + 8),
        }
    }

    /// What the library has to tell the others.
    pub(super) fn told(&self) -> Result<Vec<u8>, Refusal> {
        let span = self.span(offset_of!(Control, told));
        if span.bytes == 0 {
            return Ok(Vec::new());
        }
        let told = read(self.pid, span, control::MAX_TOLD);
        told.map_err(|why| self.refuse(format!("what it tells cannot be read ({why})")))
    }

    /// Gives the library the answer to what it has wished for.
    pub(super) fn hear(&self, answer: &[u8]) -> Result<(), Refusal> {
        let room = self.span(offset_of!(Control, room));
        let bytes = answer.len() as u64;
        if bytes > room.bytes {
            let why = format!("has room for {} bytes of the {bytes} that it has wished for", room.bytes);
            return Err(self.refuse(why));
        }
        if !answer.is_empty() {
            let written = vm::write(self.pid, room.address, answer);
            written.map_err(|e| {
                self.refuse(format!(
                    "write at {:#x}, where it wants to hear the others: {e}",
                    room.address
                ))
            })?;
        }
        let at = offset_of!(Control, heard);
        // Little-endian halves of one number, before the order that says that they are there.
        self.word(at).store((bytes & 0xffff_ffff) as u32, Ordering::SeqCst);
        self.word(at + 4).store((bytes >> 32) as u32, Ordering::SeqCst);
        Ok(())
    }

    /// The processes with which belay's own process says that the driver can never do what it was asked.
    pub(super) fn unable(&self) -> Vec<i32> {
        let outcome = self.word(offset_of!(Control, outcome)).load(Ordering::SeqCst);
        let is_answered = self.answer().load(Ordering::SeqCst) == self.given;
        match self.told() {
            Ok(told) if is_answered && outcome == control::UNABLE => {
                let numbers = told.chunks_exact(size_of::<i32>());
                numbers
                    .filter_map(|bytes| bytes.try_into().ok().map(i32::from_ne_bytes))
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// What the library says about its refusal.
    fn fault(&self) -> String {
        let told = read(self.pid, self.span(offset_of!(Control, fault)), control::MAX_FAULT);
        told.map_or_else(
            |why| format!("cannot come to rest, and does not say why ({why})"),
            |text| String::from_utf8_lossy(&text).into_owned(),
        )
    }
}

/// What lies at `span` in the memory of process `pid`, at most so many bytes.
fn read(pid: i32, span: Span, most: u64) -> Result<Vec<u8>, String> {
    if span.bytes == 0 || span.bytes > most {
        return Err(format!("{} bytes", span.bytes));
    }
    let mut bytes = vec![0; usize::try_from(span.bytes).unwrap_or(0)];
    vm::read(pid, span.address, &mut bytes).map_err(|e| format!("at {:#x}: {e}", span.address))?;
    Ok(bytes)
}

/// The head of the page in `file`.
pub(super) fn head_of(file: BorrowedFd<'_>) -> std::io::Result<Result<Head, Strange>> {
    let mut bytes = [0; size_of::<Control>()];
    let file = std::fs::File::from(file.try_clone_to_owned()?);
    file.read_exact_at(&mut bytes, 0)?;
    Ok(Head::parse(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{memfd_create, MemfdFlags};

    fn page(magic: u64, version: u32, name: &[u8]) -> [u8; size_of::<Control>()] {
        let mut page = [0xff; size_of::<Control>()];
        page[..8].copy_from_slice(&magic.to_ne_bytes());
        page[8..12].copy_from_slice(&version.to_ne_bytes());
        page[12..16].copy_from_slice(&7i32.to_ne_bytes());
        page[24..24 + name.len()].copy_from_slice(name);
        page
    }

    #[test]
    fn only_pages_of_this_version_are_control_pages() {
        let (magic, version) = (control::MAGIC, control::VERSION);
        let head = Head::parse(&page(magic, version, b"libx.so\0")).unwrap();
        assert_eq!((head.owner, head.descriptor, head.name.as_str()), (7, -1, "libx.so"));
        assert_eq!(
            Head::parse(&page(magic, version + 1, b"")),
            Err(Strange::Version(version + 1))
        );
        assert_eq!(Head::parse(&page(magic + 1, version, b"")), Err(Strange::Magic));
        assert_eq!(Head::parse(&page(0, version, b"")), Err(Strange::Unfinished));
        // A name without end ends with its room; bytes that are no text do no harm.
        let endless = Head::parse(&page(magic, version, b"x")).unwrap().name;
        assert_eq!(endless.chars().count(), 40);
        assert!(!Head::parse(&page(magic, version, b"\0")).unwrap().name.is_empty());
    }

    #[test]
    fn a_control_page_is_of_ordinary_pages() {
        let of = |flags| {
            let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = std::fs::File::from(memfd_create(c"belay-page", flags).ok()?);
            file.set_len(2 << 20).unwrap();
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
            let head = Head::parse(&page(control::MAGIC, control::VERSION, b"libx.so\0")).unwrap();
            Some(Page::of(1, head, file.as_fd()).map(|page| page.pid))
        };
        assert!(matches!(of(MemfdFlags::empty()), Some(Ok(1))));
        // Not every kernel has huge pages.
        if let Some(answer) = of(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) {
            let why = answer.unwrap_err().reason;
            assert!(why.contains("is in huge pages"), "{why}");
        }
    }

    #[test]
    fn a_text_has_a_bound() {
        let (pid, text) = (std::process::id().cast_signed(), b"so it is");
        let at = |address: u64, bytes: u64| read(pid, Span { address, bytes }, control::MAX_FAULT);
        assert_eq!(at(text.as_ptr() as u64, 8).as_deref(), Ok(&text[..]));
        for (address, bytes) in [
            (text.as_ptr() as u64, u64::MAX),
            (text.as_ptr() as u64, control::MAX_FAULT + 1),
            (0, 8),
            (u64::MAX - 3, 8),
            (16, 0),
        ] {
            assert!(at(address, bytes).is_err(), "{bytes} bytes at {address:#x}");
        }
    }
}
