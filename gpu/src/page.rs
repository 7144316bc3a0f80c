//! The control page behind standard input, and who serves it (`belay_abi::control` says what either side does).

use crate::driver::Refused;
use crate::rest::Processes;
use belay_abi::control::{
    self, Control, Span, Word, BUSY, CLOSE, DIED, DONE, DRIVER_LATE, DRIVER_LIMIT, LEAVE, MAGIC, MAX_FAULT, OPEN, REBUILD, REFUSED,
    UNABLE, VERSION,
};
use belay_kernel::futex;
use belay_kernel::held::{Holder, SharedPage};
use std::io::Write;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Who takes part, as the agent names it.
const NAME: &[u8] = b"GPU driver";
/// Descriptor of the page.
const STDIN: i32 = 0;
/// How often is looked whether the agent is there that has given no order yet.
const TURN: Duration = Duration::from_millis(100);
/// After so long the driver is asked again to put back what it could not, where nobody else will.
const AGAIN: Duration = Duration::from_secs(1);
const SERVE: [usize; 2] = [offset_of!(Control, serve), offset_of!(Control, serve) + size_of::<Word>()];

/// The page, and the words in it that this process holds.
struct Page {
    shared: Arc<SharedPage>,
    holder: Holder,
    fault: Box<[u8; MAX_FAULT as usize]>,
    /// With [`UNABLE`]: the numbers of those processes.
    unable: Vec<u8>,
    /// The agent, while it lives.
    agent: u32,
}

/// Until when the driver has time for what it has been asked.
#[derive(Default)]
struct Busy(Mutex<Option<Instant>>);

impl Busy {
    fn set(&self, until: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    fn is_late(&self) -> bool {
        let until = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() > until)
    }
}

/// Serves it until the programs go on. `restarted`: they are at rest, as after an order to close.
pub(crate) fn serve(processes: &Processes<'_>, restarted: bool) -> Result<(), String> {
    let page = Page::open(restarted).map_err(|e| format!("open the control page: {e}"))?;
    let (busy, over, agent) = (Busy::default(), AtomicBool::new(false), page.agent);
    std::thread::scope(|s| {
        let look = || look_after(processes, agent, &busy, &over);
        let second = Builder::new()
            .spawn_scoped(s, look)
            .map_err(|e| format!("start a thread: {e}"))?;
        let served = obey(page, processes, &busy);
        over.store(true, Ordering::SeqCst);
        second.thread().unpark();
        served
    })
}

/// Where a call of the driver does not return, and the agent has died, who would have ended this process: lets the programs
/// go on beside that call, and ends it all.
fn look_after(processes: &Processes<'_>, agent: u32, busy: &Busy, over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) {
        if std::os::unix::process::parent_id() != agent && busy.is_late() {
            let gone_on = without_agent(processes);
            std::process::exit(i32::from(gone_on.is_err()));
        }
        std::thread::park_timeout(TURN);
    }
}

/// Does what the agent orders, until the programs go on.
fn obey(mut page: Page, processes: &Processes<'_>, busy: &Busy) -> Result<(), String> {
    let mut done = page.control().order.load(Ordering::SeqCst);
    let said = writeln!(std::io::stdout(), "ready").and_then(|()| std::io::stdout().flush());
    said.map_err(|e| format!("say that it is ready: {e}"))?;
    loop {
        let order = page.control().order.load(Ordering::SeqCst);
        if order != done {
            done = order;
            page.word(&page.control().serve, order)
                .store(page.holder.mark(), Ordering::SeqCst);
            let time = match control::kind(order) {
                CLOSE => processes.limit() + DRIVER_LATE,
                _ => DRIVER_LIMIT,
            };
            busy.set(Some(Instant::now() + time));
            let answer = match control::kind(order) {
                CLOSE | LEAVE | REBUILD if page.is_free(order) => continue,
                CLOSE => processes.lock(),
                LEAVE => processes.checkpoint(),
                REBUILD => processes.restore(),
                OPEN => {
                    let gone_on = processes.go_on(false);
                    page.answer(order, &gone_on);
                    return gone_on.map_err(|e| e.why);
                }
                kind => Err(Refused::of(format!(
                    "an order of kind {kind}, which this belay does not know"
                ))),
            };
            busy.set(None);
            page.answer(order, &answer);
        } else if page.is_free(order) {
            return without_agent(processes);
        } else {
            page.sleep(order);
        }
    }
}

/// Nobody else helps any more.
fn without_agent(processes: &Processes<'_>) -> Result<(), String> {
    loop {
        let gone_on = processes.go_on(false);
        if gone_on.is_ok() || !processes.live() {
            return gone_on.map_err(|e| e.why);
        }
        std::thread::sleep(AGAIN);
    }
}

impl Page {
    fn open(restarted: bool) -> std::io::Result<Self> {
        let shared = Arc::new(SharedPage::map(std::io::stdin().as_fd())?);
        let holder = Holder::new(vec![shared.clone()], SERVE)?;
        let page = Self {
            shared,
            holder,
            fault: Box::new([0; MAX_FAULT as usize]),
            unable: Vec::new(),
            agent: std::os::unix::process::parent_id(),
        };
        let c = page.control();
        c.version.store(VERSION, Ordering::Relaxed);
        c.owner.store(std::process::id().cast_signed(), Ordering::Relaxed);
        c.descriptor.store(STDIN, Ordering::Relaxed);
        let mut name = c.name.get();
        name[..NAME.len()].copy_from_slice(NAME);
        c.name.set(&name);
        if restarted {
            let order = control::order(1, CLOSE);
            c.answer.store(order, Ordering::SeqCst);
            c.order.store(order, Ordering::SeqCst);
        }
        page.other(c.order.load(Ordering::SeqCst))
            .store(page.holder.mark(), Ordering::SeqCst);
        c.magic.store(MAGIC, Ordering::SeqCst);
        Ok(page)
    }

    fn control(&self) -> &Control {
        self.shared.control()
    }

    fn word<'a>(&self, words: &'a [Word; 2], order: u32) -> &'a AtomicU32 {
        &words[control::place(order)].value
    }

    fn other(&self, order: u32) -> &AtomicU32 {
        &self.control().serve[1 - control::place(order)].value
    }

    /// Whether the agent has died that held the programs at rest, or was going to.
    fn is_free(&self, order: u32) -> bool {
        let hold = self.word(&self.control().hold, order).load(Ordering::SeqCst);
        hold & DIED != 0 || hold == 0 && std::os::unix::process::parent_id() != self.agent
    }

    /// Until there is another order, or nobody who gives one.
    fn sleep(&self, order: u32) {
        let hold = self.word(&self.control().hold, order);
        let value = hold.load(Ordering::SeqCst);
        if control::is_held(value) {
            futex::wait(hold, value, TURN);
        } else if value & DIED == 0 {
            futex::wait(&self.control().order, order, TURN);
        }
    }

    fn answer(&mut self, order: u32, answer: &Result<(), Refused>) {
        let (outcome, why) = match answer {
            Ok(()) => (DONE, ""),
            Err(e) if e.passing => (BUSY, e.why.as_str()),
            Err(e) if !e.unable.is_empty() => (UNABLE, e.why.as_str()),
            Err(e) => (REFUSED, e.why.as_str()),
        };
        let bytes = why.len().min(self.fault.len());
        self.fault[..bytes].copy_from_slice(&why.as_bytes()[..bytes]);
        let unable = answer.as_ref().err().map(|e| e.unable.as_slice()).unwrap_or_default();
        self.unable = unable.iter().flat_map(|pid| pid.to_ne_bytes()).collect();
        let span = |address: *const u8, bytes: usize| Span {
            address: address as u64,
            bytes: bytes as u64,
        };
        let c = self.control();
        c.fault.set(&span(self.fault.as_ptr(), bytes));
        c.told.set(&span(self.unable.as_ptr(), self.unable.len()));
        c.outcome.store(outcome, Ordering::SeqCst);
        self.other(order).store(self.holder.mark(), Ordering::SeqCst);
        c.answer.store(order, Ordering::SeqCst);
        let served = self.word(&c.serve, order);
        served.store(0, Ordering::SeqCst);
        futex::wake(served);
    }
}
