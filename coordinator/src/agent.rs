//! The agent: one poll loop over signals, the front, the control socket, the interval timer and the writer of a checkpoint.
//!
//! ```text
//!          request / interval                writer done
//! Running ───────────────────> Checkpointing ───────────> Running
//!    │ stop, or checkpoint then stop     command ended, others left: Background (the same, without a front)
//!    └──────────────────────────> Stopping ─── nothing left ───> Ended
//! ```

use crate::checkpoint::{Committed, Wanted, Writing};
use crate::clients::{ClientId, Clients};
use crate::generations::{self, ms};
use crate::interval::Interval;
use crate::jobdir::{Description, JobDir, Lock};
use crate::relay::{Channel, Message, Relay};
use crate::sys::{self, Signal, SignalFd, Timer, Wake};
use crate::{processes, Failure};
use belay_kernel::{kcmp, proc};
use belay_wire::{AgentStatus, Checkpointed, Event, Exit, JobState, LastError, Phase, Request, Status};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

/// Writer threads per process snapshot.
const WRITERS: u32 = 2;
/// How often clients that wait for a checkpoint hear of its progress.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);
/// How often an ending job is looked at again for processes that were started meanwhile.
const KILL_PERIOD: Duration = Duration::from_millis(20);
/// How often an agent in the background looks whether the job still uses its standard descriptors.
const STDIO_PERIOD: Duration = Duration::from_secs(1);

/// What an agent serves.
#[derive(Debug)]
pub struct Setup {
    /// The job directory.
    pub dir: JobDir,
    /// Its lock.
    pub lock: Lock,
    /// The job.
    pub description: Description,
}

/// Status word with which launch and restart end after `checkpoint --then stop`.
pub fn stopped_after_checkpoint() -> i32 {
    i32::from(Exit::StoppedAfterCheckpoint.code()) << 8
}

/// How the job is being ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// SIGTERM was sent; SIGKILL follows at the deadline.
    Asked,
    /// SIGKILL until nothing is left.
    Forced,
}

/// The agent of one job.
#[derive(Debug)]
pub struct Agent {
    dir: JobDir,
    lock: Option<Lock>,
    description: Description,
    pid: i32,
    root_pid: i32,
    root_status: Option<i32>,
    result: Option<i32>,
    /// The job has no front any more: status word that it was given.
    background: Option<i32>,
    listener: Option<UnixListener>,
    signals: SignalFd,
    interval: Timer,
    tick: Timer,
    grace: Timer,
    done: Wake,
    channel: Option<Channel>,
    relay: Relay,
    clients: Clients,
    next_number: u64,
    phase: Option<Phase>,
    writing: Option<Writing>,
    queued: Option<Wanted>,
    ending: Option<Ending>,
    farewells: Vec<(ClientId, Event)>,
    skipped: u64,
    last_error: Option<LastError>,
    said: Option<String>,
}

impl Agent {
    /// Prepares to serve a job: clears what earlier agents left behind.
    pub fn new(setup: Setup) -> Result<Self, Failure> {
        let system = |step: &'static str| move |e| Failure::system(step, &e);
        let Setup { dir, lock, description } = setup;
        let gen = dir.generations();
        generations::clear_leftovers(&gen)?;
        let next_number = generations::list(&gen)?.last().map_or(1, |g| g.number + 1);
        Ok(Self {
            dir,
            lock: Some(lock),
            description,
            pid: 0,
            root_pid: 0,
            root_status: None,
            result: None,
            background: None,
            listener: None,
            signals: SignalFd::new(&crate::front::handled()).map_err(system("make a signal descriptor"))?,
            interval: Timer::new().map_err(system("make a timer"))?,
            tick: Timer::new().map_err(system("make a timer"))?,
            grace: Timer::new().map_err(system("make a timer"))?,
            done: Wake::new().map_err(system("make a wake-up channel"))?,
            channel: None,
            relay: Relay::default(),
            clients: Clients::default(),
            next_number,
            phase: None,
            writing: None,
            queued: None,
            ending: None,
            farewells: Vec::new(),
            skipped: 0,
            last_error: None,
            said: None,
        })
    }

    /// Makes the control socket. No process that outlives the agent may have a copy: clients would wait for its answer for ever.
    pub(crate) fn listen(&mut self) -> Result<(), Failure> {
        let socket = self.dir.socket();
        let listener = belay_wire::socket::listen(&socket);
        self.listener = Some(listener.map_err(|e| Failure::io(format!("make control socket {}", socket.display()), &e))?);
        Ok(())
    }

    /// Leaves the job to the agent that a fork has made; the lock is shared with it.
    pub(crate) fn leave(mut self) -> Option<Lock> {
        self.lock.take()
    }

    /// Gives everything back without having served.
    pub(crate) fn abandon(mut self) {
        self.close();
    }

    /// Serves the job whose command is child `root_pid` in the calling process, which has the signals of [`crate::front::handled`] blocked, until nothing of it is left. Returns the status word with which the launch ends.
    ///
    /// `ended` is the command's status word where it had ended before the checkpoint from which the job was restarted. `report` is called with the
    /// status word once the command has ended while other processes go on.
    pub(crate) fn serve(mut self, root_pid: i32, ended: Option<i32>, channel: Option<Channel>, report: &dyn Fn(i32)) -> i32 {
        self.pid = std::process::id().cast_signed();
        self.root_pid = root_pid;
        self.root_status = ended;
        // Clients see the credentials of the process that listened last: this one.
        if let Some(Err(e)) = self.listener.as_ref().map(belay_wire::socket::listen_again) {
            tracing::warn!(error = %e, "listen on the control socket");
        }
        self.channel = channel;
        tracing::info!(agent = self.pid, root_pid, command = ?self.description.command, interval = %self.description.interval, "serving");
        self.arm_interval();
        // A restarted process may have ended before the signals were blocked.
        self.reap();
        let mut reported = false;
        while !self.is_over() {
            if let (Some(status), false) = (self.background, reported) {
                reported = true;
                report(status);
            }
            if let Err(e) = self.step() {
                tracing::error!(error = %e, "event loop");
                sys::say(&e.to_string());
                break;
            }
        }
        self.end()
    }

    fn is_over(&self) -> bool {
        self.root_status.is_some() && self.writing.is_none() && self.has_no_children()
    }

    fn has_no_children(&self) -> bool {
        proc::children(self.pid).unwrap_or_default().is_empty()
    }

    /// Waits for something to happen and handles it.
    fn step(&mut self) -> Result<(), Failure> {
        let fds: [RawFd; 7] = [
            self.signals.as_raw_fd(),
            self.listener.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            self.interval.as_raw_fd(),
            self.tick.as_raw_fd(),
            self.grace.as_raw_fd(),
            self.done.as_raw_fd(),
            self.channel.as_ref().map_or(-1, AsRawFd::as_raw_fd),
        ];
        let clients = self.clients.interest();
        let all: Vec<(RawFd, i16)> = fds
            .iter()
            .map(|fd| (*fd, libc::POLLIN))
            .chain(clients.iter().map(|(_, fd, events)| (*fd, *events)))
            .collect();
        let ready = sys::poll(&all).map_err(|e| Failure::system("poll", &e))?;
        let (own, theirs) = ready.split_at(fds.len());

        if own[5] != 0 {
            self.done.take();
            self.finish_checkpoint();
        }
        if own[0] != 0 {
            self.take_signals();
        }
        if own[6] != 0 {
            self.hear_front();
        }
        if own[2] != 0 && self.interval.take() > 0 {
            self.interval_checkpoint();
        }
        if own[4] != 0 && self.grace.take() > 0 {
            self.force_end();
        }
        if own[3] != 0 && self.tick.take() > 0 {
            self.on_tick();
        }
        for ((id, ..), revents) in clients.iter().zip(theirs) {
            if *revents != 0 {
                if let Some(request) = self.clients.ready(*id, *revents) {
                    self.handle(*id, request);
                }
            }
        }
        if let (Some(listener), true) = (&self.listener, own[1] != 0) {
            self.clients.accept(listener);
        }
        Ok(())
    }

    // ---- requests ----

    fn handle(&mut self, id: ClientId, request: Request) {
        tracing::debug!(?request, "request");
        match request {
            Request::Status => {
                let status = Event::Status(Box::new(self.status()));
                self.clients.send(id, &status);
            }
            Request::Checkpoint { then_stop, level: _ } => {
                if self.ending.is_some() {
                    return self.fail(id, Exit::ProgramEnded, "the job is being ended");
                }
                let wanted = self.queued.get_or_insert_default();
                wanted.by.push((id, Instant::now()));
                wanted.then_stop |= then_stop;
                self.begin_queued();
            }
            Request::Stop { grace_ms } => {
                self.farewells.push((id, Event::Stopped { wait_status: None }));
                self.ask_end(Duration::from_millis(grace_ms));
            }
        }
    }

    fn fail(&mut self, id: ClientId, exit: Exit, message: &str) {
        let event = Event::Failed {
            exit,
            message: message.into(),
        };
        self.clients.send(id, &event);
    }

    /// The status document; PIDs as the agent sees them.
    fn status(&self) -> Status {
        let mut status = at_rest(&self.dir, &self.description);
        status.state = match (self.ending, &self.writing, self.root_status) {
            (Some(_), ..) => JobState::Stopping,
            (None, Some(_), _) => JobState::Checkpointing,
            (None, None, Some(_)) => JobState::Background,
            (None, None, None) => JobState::Running,
        };
        status.running = true;
        status.agent = Some(AgentStatus {
            pid: self.pid,
            host_pid: None,
            front_pid: self.channel.as_ref().and_then(|_| proc::stat(self.pid).ok()).map(|s| s.ppid),
        });
        status.root_pid = Some(self.root_pid);
        status.wait_status = self.root_status;
        status.phase = self.phase;
        status.progress = self.writing.as_ref().map(Writing::progress);
        status.skipped = self.skipped;
        status.last_error.clone_from(&self.last_error);
        status.processes = processes::describe(self.pid);
        status
    }

    // ---- checkpoints ----

    fn arm_interval(&mut self) {
        let first = self.description.interval.first();
        let period = match self.description.interval {
            Interval::Every(d) => d,
            Interval::Auto | Interval::Never => Duration::ZERO,
        };
        if let Err(e) = self.interval.set(first, period) {
            self.note_failure(&Failure::system("set the interval timer", &e), true);
        }
    }

    fn interval_checkpoint(&mut self) {
        if self.ending.is_some() {
            return;
        }
        if let Some(w) = &self.writing {
            self.skipped += 1;
            tracing::warn!(
                generation = w.number(),
                skipped = self.skipped,
                "interval checkpoint left out: the one before is still being written"
            );
            return;
        }
        self.begin_checkpoint(Wanted::default());
    }

    fn begin_queued(&mut self) {
        if self.writing.is_none() {
            if let Some(wanted) = self.queued.take() {
                self.begin_checkpoint(wanted);
            }
        }
    }

    fn begin_checkpoint(&mut self, wanted: Wanted) {
        // A number is used once, so that a log line names one attempt.
        let number = self.next_number;
        self.next_number += 1;
        let options = belay_capture::Options {
            save_open_files: self.description.save_open_files,
            writers: WRITERS,
        };
        let (clients, phase) = (&mut self.clients, &mut self.phase);
        let mut on_phase = |p: Phase| {
            tracing::debug!(generation = number, phase = p.name(), "phase");
            *phase = Some(p);
            for (id, _) in &wanted.by {
                clients.send(*id, &Event::Phase { phase: p });
            }
        };
        let gen = self.dir.generations();
        let root = (self.root_pid, self.root_status);
        match Writing::begin(&gen, number, root, &options, &wanted, &self.done, &mut on_phase) {
            Ok(writing) => {
                self.writing = Some(writing);
                self.set_tick();
            }
            Err(failure) => self.checkpoint_failed(number, &wanted, &failure),
        }
        // Children may have ended while the tracer did not look for it.
        self.reap();
    }

    fn finish_checkpoint(&mut self) {
        let Some(writing) = self.writing.take() else {
            return;
        };
        let number = writing.number();
        let waited = writing.is_done();
        self.enter(Phase::Commit, &writing.wanted);
        let (wanted, result) = writing.finish();
        tracing::trace!(waited, "writer joined");
        match result {
            Ok(c) => {
                let g = &c.generation;
                tracing::info!(
                    generation = g.generation,
                    processes = g.ranks,
                    threads = g.threads,
                    bytes = g.bytes,
                    blocked_ms = g.blocked_ms,
                    write_ms = ms(c.write),
                    "checkpoint committed"
                );
                self.said = None;
                if let Err(failure) = generations::retain(&self.dir.generations(), self.description.keep) {
                    self.note_failure(&failure, true);
                }
                for note in &c.notes {
                    tracing::warn!(generation = g.generation, note, "will differ after a restart");
                }
                self.answer(&wanted, &c);
                if self.description.interval == Interval::Auto {
                    let delay = Interval::auto_delay(c.blocked, c.write);
                    if let Err(e) = self.interval.set(Some(delay), Duration::ZERO) {
                        self.note_failure(&Failure::system("set the interval timer", &e), true);
                    }
                }
                if wanted.then_stop {
                    self.result = Some(stopped_after_checkpoint());
                    self.force_end();
                }
            }
            Err(failure) => self.checkpoint_failed(number, &wanted, &failure),
        }
        self.phase = None;
        self.set_tick();
        self.reap();
        self.begin_queued();
    }

    fn enter(&mut self, phase: Phase, wanted: &Wanted) {
        self.phase = Some(phase);
        for (id, _) in &wanted.by {
            self.clients.send(*id, &Event::Phase { phase });
        }
    }

    fn answer(&mut self, wanted: &Wanted, committed: &Committed) {
        for (id, since) in &wanted.by {
            let event = Event::Checkpointed(Checkpointed {
                generation: committed.generation.clone(),
                total_ms: ms(since.elapsed()),
                stopped: wanted.then_stop,
                notes: committed.notes.clone(),
            });
            if wanted.then_stop {
                self.farewells.push((*id, event));
            } else {
                self.clients.send(*id, &event);
            }
        }
    }

    /// The generation is dropped already, and the program runs.
    fn checkpoint_failed(&mut self, number: u64, wanted: &Wanted, failure: &Failure) {
        tracing::error!(generation = number, error = %failure, "checkpoint failed");
        self.phase = None;
        for (id, _) in &wanted.by {
            self.fail(*id, failure.exit, &failure.message);
        }
        self.note_failure(failure, wanted.by.is_empty());
        if self.description.interval == Interval::Auto {
            self.arm_interval();
        }
    }

    /// Remembers a failure for `status`; `say` also tells the user, once while it stays the same.
    fn note_failure(&mut self, failure: &Failure, say: bool) {
        self.last_error = Some(LastError {
            time_unix_s: sys::now_unix_s(),
            exit: failure.exit,
            message: failure.message.clone(),
        });
        if say && self.said.as_deref() != Some(&failure.message) {
            sys::say(&format!("checkpoint failed: {failure}; the program goes on"));
            self.said = Some(failure.message.clone());
        }
    }

    // ---- signals and processes ----

    fn take_signals(&mut self) {
        for s in self.signals.drain() {
            self.take_signal(s);
        }
    }

    fn take_signal(&mut self, s: Signal) {
        match s.number {
            libc::SIGCHLD => self.reap(),
            libc::SIGCONT => {}
            _ if !s.from_process() => {} // the terminal sends to the group
            _ => match &self.channel {
                // The front of a restarted job sends these to the job's process group, as a terminal would.
                None if matches!(s.number, libc::SIGINT | libc::SIGQUIT) => {}
                None => self.pass_on(s),
                Some(channel) => {
                    sys::group_barrier();
                    if self.relay.own(s) {
                        channel.send(Message::Fence);
                    }
                }
            },
        }
    }

    fn pass_on(&self, s: Signal) {
        if self.root_status.is_none() {
            tracing::debug!(signal = s.number, "passed on");
            sys::pass_on(self.root_pid, s);
        }
    }

    fn hear_front(&mut self) {
        let Some(received) = self.channel.as_ref().map(|c| c.receive(false)) else {
            return;
        };
        match received {
            Ok(Some(Message::Signal(s))) if s.number == libc::SIGCONT => {
                // The shell continued the front; a command with a process group of its own was not reached.
                if self.root_status.is_none() {
                    sys::kill(self.root_pid, libc::SIGCONT);
                }
            }
            Ok(Some(Message::Signal(s))) => {
                self.take_signals();
                if self.relay.reported(s) {
                    self.pass_on(s);
                }
            }
            Ok(Some(Message::FencePassed)) => {
                let (alone, again) = self.relay.passed();
                alone.into_iter().for_each(|s| self.pass_on(s));
                if let (true, Some(channel)) = (again, &self.channel) {
                    channel.send(Message::Fence);
                }
            }
            Ok(Some(other)) => tracing::warn!(?other, "unexpected message from the front"),
            Ok(None) => {}
            Err(_) => {
                self.channel = None;
                let left = self.relay.alone();
                left.into_iter().for_each(|s| self.pass_on(s));
            }
        }
    }

    /// Reaps what has ended: the command, orphans of the job, snapshot children (the writer watches them by descriptor).
    fn reap(&mut self) {
        while let Some((pid, status)) = sys::reap() {
            if libc::WIFSTOPPED(status) {
                belay_capture::release(pid);
                continue;
            }
            let ended = libc::WIFEXITED(status) || libc::WIFSIGNALED(status);
            if pid == self.root_pid && ended && self.root_status.is_none() {
                tracing::info!(status, "command ended");
                self.root_status = Some(status);
            }
        }
        if self.root_status.is_none() {
            if let (Some(signal), Some(channel)) = (sys::stopped_by(self.root_pid), &self.channel) {
                if matches!(signal, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) && sys::has_terminal() {
                    channel.send(Message::Suspended(signal));
                }
            }
        }
        if self.writing.is_none() {
            if let (Some(status), None, false) = (self.root_status, self.ending, self.has_no_children()) {
                self.go_to_background(status);
            }
        }
    }

    /// The command has ended, others go on: the shell gets its prompt back, the agent stays.
    fn go_to_background(&mut self, status: i32) {
        if self.background.is_none() {
            tracing::info!("processes that the command left behind go on");
            self.background = Some(status);
        }
        if let Some(channel) = self.channel.take() {
            channel.send(Message::Background(status));
        }
        self.release_stdio();
        self.set_tick();
    }

    /// In the background, gives up the standard descriptors that no process of the job uses any more: whoever reads the other end must see its end.
    fn release_stdio(&self) {
        let live = processes::live(self.pid);
        for fd in 0..3 {
            let used = live.iter().any(|pid| {
                let same = |theirs| kcmp::compare_files(self.pid, fd, *pid, theirs).is_ok_and(|o| o.is_eq());
                proc::fds(*pid).unwrap_or_default().into_iter().any(same)
            });
            if !used {
                if let Err(e) = sys::replace_by_null(fd) {
                    tracing::warn!(fd, error = %e, "give up a standard descriptor");
                }
            }
        }
    }

    // ---- time ----

    fn set_tick(&mut self) {
        let period = if self.ending == Some(Ending::Forced) {
            Some(KILL_PERIOD)
        } else if self.writing.is_some() {
            Some(PROGRESS_PERIOD)
        } else if self.root_status.is_some() {
            Some(STDIO_PERIOD)
        } else {
            None
        };
        if let Err(e) = self.tick.set(period, period.unwrap_or_default()) {
            tracing::error!(error = %e, "set the tick timer");
        }
    }

    fn on_tick(&mut self) {
        if self.ending == Some(Ending::Forced) {
            self.kill_all();
        }
        if let Some(writing) = &self.writing {
            let progress = Event::Progress(writing.progress());
            for (id, _) in &writing.wanted.by {
                self.clients.send(*id, &progress);
            }
        } else if self.root_status.is_some() {
            self.release_stdio();
        }
    }

    // ---- the end ----

    fn ask_end(&mut self, grace: Duration) {
        if grace.is_zero() {
            return self.force_end();
        }
        if self.ending.is_none() {
            self.ending = Some(Ending::Asked);
        }
        if let Err(e) = self.grace.set(Some(grace), Duration::ZERO) {
            tracing::error!(error = %e, "set the grace timer");
            return self.force_end();
        }
        for pid in processes::live(self.pid) {
            sys::kill(pid, libc::SIGTERM);
            sys::kill(pid, libc::SIGCONT);
        }
    }

    fn force_end(&mut self) {
        self.ending = Some(Ending::Forced);
        self.kill_all();
        self.set_tick();
    }

    fn kill_all(&mut self) {
        for pid in processes::live(self.pid) {
            sys::kill(pid, libc::SIGKILL);
        }
        self.reap();
    }

    fn close(&mut self) {
        let socket = self.dir.socket();
        if let (Some(_), Err(e)) = (self.listener.take(), std::fs::remove_file(&socket)) {
            tracing::warn!(path = %socket.display(), error = %e, "remove the control socket");
        }
        if let Some(lock) = self.lock.take() {
            lock.release();
        }
    }

    /// Nothing of the job is left: record how it ended, give the directory back, then tell everyone who waits for it.
    fn end(mut self) -> i32 {
        self.description.wait_status = self.result.or(self.root_status);
        if let Err(failure) = self.dir.describe(&self.description) {
            tracing::error!(error = %failure, "record the end");
        }
        let result = self.result.or(self.root_status).unwrap_or(0);
        tracing::info!(wait_status = ?self.root_status, "ended");
        self.close();
        for (id, _) in self.queued.take().map(|w| w.by).unwrap_or_default() {
            self.fail(id, Exit::ProgramEnded, "the program ended before the checkpoint was taken");
        }
        for (id, mut event) in std::mem::take(&mut self.farewells) {
            if let Event::Stopped { wait_status } = &mut event {
                *wait_status = self.root_status;
            }
            self.clients.send(id, &event);
        }
        if let Some(channel) = self.channel.take() {
            channel.send(Message::Ended(result));
        }
        result
    }
}

/// The status document of a job without an agent.
pub fn at_rest(dir: &JobDir, d: &Description) -> Status {
    let generations = generations::list(&dir.generations()).unwrap_or_default();
    Status {
        name: d.name.clone(),
        command: d.command.clone(),
        dir: dir.path().display().to_string(),
        state: JobState::Ended,
        running: false,
        agent: None,
        root_pid: None,
        wait_status: d.wait_status,
        interval: match d.interval {
            Interval::Never => None,
            other => Some(other.to_string()),
        },
        phase: None,
        progress: None,
        skipped: 0,
        last_error: None,
        generations: generations.iter().map(generations::Generation::status).collect(),
        processes: Vec::new(),
    }
}
