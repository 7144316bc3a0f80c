//! Requests to the agent of a running job.

use belay_coordinator::jobdir::{is_foreign, is_suspended, Access, Holder, JobDir};
use belay_coordinator::{host_pids, sys, tiers, Failure};
use belay_wire::socket::{self, Events, Patience};
use belay_wire::{Event, Exit, Request, Status};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

/// How often a job is looked at that begins or ends each time.
const MOST_LOOKS: u32 = 100;

/// How long an agent may take to say how its job is, or to accept a connection.
const LIMIT: Duration = Duration::from_secs(60);

/// How long the agent of another user's job may be silent: what a checkpoint needs has no limit, but root does not wait
/// for somebody's silence for ever.
const SILENCE: Duration = Duration::from_secs(600);

/// A request under way.
#[derive(Debug)]
pub(crate) struct Call {
    /// The job.
    dir: JobDir,
    /// The agent's PID as this process sees it.
    agent: i32,
    events: Events,
}

/// Sends `request` to the agent of the job in `dir`.
///
/// Root asks as the owner, as whom it has opened the directory: an agent in a user namespace, as after the owner's
/// restart, could not tell root from any other user.
pub(crate) fn call(dir: &Path, request: &Request) -> Result<Call, Failure> {
    call_in(&JobDir::open(dir, Access::OwnOrRoot)?, request)
}

fn call_in(dir: &JobDir, request: &Request) -> Result<Call, Failure> {
    let at = dir.shown();
    let lost = |e: &io::Error| match e.kind() {
        io::ErrorKind::TimedOut => silent(&at),
        _ => Failure::io(format!("talk to the agent of {at}"), e),
    };
    let before = dir.holder();
    let stream = match dir.connect(LIMIT) {
        Ok(s) => s,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Err(nobody(dir, before))
        }
        Err(e) => return Err(lost(&e)),
    };
    let agent = socket::peer(stream.as_fd()).map_err(|e| lost(&e))?.pid;
    if is_suspended(agent) {
        return Err(Failure::new(
            Exit::Suspended,
            format!("the job in {at} is suspended; continue it with fg or bg in its shell"),
        ));
    }
    let patience = match request {
        Request::Status => Patience::Whole(LIMIT),
        _ if is_foreign() => Patience::Each(SILENCE),
        _ => Patience::Endless,
    };
    let events = socket::request(stream, request, patience).map_err(|e| if is_end(&e) { ended(dir) } else { lost(&e) })?;
    let dir = dir.clone();
    Ok(Call { dir, agent, events })
}

/// The agent of the job in `at` has not answered in time.
fn silent(at: &str) -> Failure {
    let message = format!("the agent of {at} does not answer; see {at}/log, and try again");
    Failure::new(Exit::Protocol, message)
}

/// Nobody listened at the control socket, when `before` had just been found to have the job's lock.
fn nobody(dir: &JobDir, before: Option<Holder>) -> Failure {
    let at = dir.shown();
    let after = dir.holder();
    let changed = after != before;
    let has_none = tiers::held(dir).is_ok_and(|held| held == 0);
    let why = match after.or(before).filter(Holder::runs) {
        None if dir.description().is_ok_and(|d| d.wait_status == Some(0)) => {
            if has_none {
                "is not running: it has ended well, and has no checkpoint".to_owned()
            } else {
                format!("is not running: it has ended well; belay restart {at} goes on from its newest checkpoint once more")
            }
        }
        None if has_none => "is not running, and has no checkpoint; begin it with belay run".to_owned(),
        None => format!("is not running; continue it with belay restart {at}"),
        Some(h) if !h.serving || changed => {
            let message = format!("the job in {at} is just starting or ending ({}); see belay status {at}", h.word);
            return Failure::passing(Exit::NotRunning, message);
        }
        Some(h) if h.host().is_some_and(|host| host != sys::host()) => format!("runs on another host ({}); ask there", h.word),
        Some(h) if !dir.has_socket() => {
            let message = format!("the job in {at} runs ({}), but its control socket is gone: somebody has removed it, or what clears old files away; it is made again with the next checkpoint, or within 5 minutes", h.word);
            return Failure::passing(Exit::NotRunning, message);
        }
        Some(h) => format!("runs without its agent, which was killed ({}); belay restart {at} goes on from its newest checkpoint when it has ended", h.word),
    };
    Failure::new(Exit::NotRunning, format!("the job in {at} {why}"))
}

/// The agent has closed the connection, which it does only when it ends.
fn is_end(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

fn ended(dir: &JobDir) -> Failure {
    let at = dir.shown();
    let message = format!("the agent of {at} ended before it answered; see belay status {at} and {at}/log");
    Failure::new(Exit::ProgramEnded, message)
}

impl Call {
    /// Waits for the result; `progress` receives what comes before it. A failure that the agent reports is the error.
    pub(crate) fn result(&mut self, progress: &mut dyn FnMut(&Event)) -> Result<Event, Failure> {
        let at = self.dir.shown();
        for event in self.events.by_ref() {
            match event {
                Ok(Event::Failed { exit, message, passing }) => {
                    let build = if passing { Failure::passing } else { Failure::new };
                    return Err(build(exit, message));
                }
                Ok(event) if event.is_last() => return Ok(event),
                Ok(event) => progress(&event),
                Err(e) if is_end(&e) => break,
                Err(e) if e.kind() == io::ErrorKind::TimedOut => return Err(silent(&at.to_string())),
                Err(e) => return Err(Failure::new(Exit::Protocol, format!("answer of the agent of {at}: {e}"))),
            }
        }
        Err(ended(&self.dir))
    }

    fn unexpected(&self, event: &Event) -> Failure {
        Failure::new(
            Exit::Protocol,
            format!(
                "the agent of {} gave another answer than asked for: {event:?}",
                self.dir.shown()
            ),
        )
    }

    /// Waits for a result that `pick` accepts.
    pub(crate) fn expect<T>(
        &mut self,
        progress: &mut dyn FnMut(&Event),
        pick: impl FnOnce(Event) -> Result<T, Box<Event>>,
    ) -> Result<T, Failure> {
        let event = self.result(progress)?;
        pick(event).map_err(|e| self.unexpected(&e))
    }
}

/// The status of the job in `dir`, running or not.
pub(crate) fn status(dir: &Path) -> Result<Status, Failure> {
    let job = JobDir::open(dir, Access::OwnOrRoot)?;
    let asked = || {
        call_in(&job, &Request::Status).and_then(|mut call| {
            let status = call.expect(&mut |_| {}, |e| match e {
                Event::Status(s) => Ok(*s),
                other => Err(Box::new(other)),
            })?;
            Ok((status, call.agent))
        })
    };
    let mut holder = job.holder();
    let mut tries = 0;
    loop {
        match asked() {
            Ok((mut status, agent)) => {
                host_pids(&mut status, agent);
                return Ok(status);
            }
            Err(f) if matches!(f.exit, Exit::NotRunning | Exit::ProgramEnded) => {}
            Err(f) => return Err(f),
        }
        let status = belay_coordinator::agent::at_rest(&job, &job.description()?, holder.as_ref());
        // The job may have begun or ended between these looks at it: they belong together when its lock tells the same
        // before and after.
        let now = job.holder();
        tries += 1;
        if now == holder || tries == MOST_LOOKS {
            return Ok(status);
        }
        holder = now;
    }
}
