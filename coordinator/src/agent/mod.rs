//! The agent: one poll loop over signals, the front, the control socket, the interval timer and the writer of a checkpoint.
//!
//! ```text
//!          request / interval                writer done
//! Running ───────────────────> Checkpointing ───────────> Running
//!    │ stop, or checkpoint then stop     command ended, others left: Background (the same, without a front)
//!    └──────────────────────────> Stopping ─── nothing left ───> Ended
//! ```

mod asking;
mod checkpoints;
mod encoding;
mod ending;
mod filling;
mod flushing;
mod losing;
mod polled;
mod remotes;
mod requests;
mod retention;
mod signals;
mod status;
mod stores;
mod telling;
mod together;

pub(crate) use losing::Fallback;
pub use status::at_rest;

use asking::Asking;
use encoding::Encoding;
use filling::Filled;
use flushing::Flush;
use losing::Losses;
use polled::Own;
use stores::{collected_engine, numbers_unused};

use crate::checkpoint::{Wanted, Writing};
use crate::clients::{ClientId, Clients};
use crate::forecast::Forecast;
use crate::generations::{self, Generation};
use crate::jobdir::{Description, Differential, JobDir, Lock};
use crate::levels::Turn;
use crate::nodes::again::Reunion;
use crate::nodes::seat::Seat;
use crate::nodes::{self, Nodes, Order};
use crate::redundancy::record;
use crate::relay::{Channel, Message, Relay};
use crate::sys::{self, SignalFd, Timer, Wake};
use crate::{tiers, Failure};
use belay_capture::{Code, Tracking};
use belay_kernel::proc;
use belay_plugins::gate::gpu;
use belay_plugins::Names;
use belay_restart::{News, Shell};
use belay_storage::engine::Engine;
use belay_wire::{AutoInterval, Event, Exit, LastError, Phase};
use std::os::fd::RawFd;
use std::os::unix::net::UnixListener;
use std::time::Duration;

/// How often clients that wait for a checkpoint hear of its progress.
const PROGRESS_PERIOD: Duration = Duration::from_millis(200);
/// How often an ending job is looked at again for processes that were started meanwhile.
const KILL_PERIOD: Duration = Duration::from_millis(20);
/// How often an agent in the background looks whether the job still uses its standard descriptors.
const STDIO_PERIOD: Duration = Duration::from_secs(1);
/// How often an agent that has nothing else to do looks whether its control socket is still there.
const SOCKET_PERIOD: Duration = Duration::from_secs(300);

/// What an agent serves.
#[derive(Debug)]
pub struct Setup {
    /// The job directory.
    pub dir: JobDir,
    /// Its lock.
    pub lock: Lock,
    /// The job.
    pub description: Description,
    /// Its other nodes, where it may have any.
    pub nodes: Option<Nodes>,
    /// When a part is lost, or a program, the job is ended, and restarted by its front; at a part, when the root is.
    pub restarts: bool,
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

/// When the next generation is to reach a level of which `newest` is the newest that has.
fn turn_after(dir: &JobDir, newest: Option<u64>) -> Result<Turn, Failure> {
    let Some(newest) = newest else { return Ok(Turn::default()) };
    let held = generations::list(&dir.generations())?;
    let since = held.iter().filter(|g| g.number > newest && g.is_whole()).count();
    let time = held
        .iter()
        .find(|g| g.number == newest)
        .and_then(|g| g.manifest.as_ref().ok());
    // What is not here any more is old.
    Ok(time.map_or(Turn::default(), |m| {
        Turn::after(u32::try_from(since).unwrap_or(u32::MAX), m.time_unix_s)
    }))
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
    watch: Timer,
    done: Wake,
    channel: Option<Channel>,
    /// The terminal's foreground process group when the command stopped itself.
    foreground: Option<i32>,
    relay: Relay,
    clients: Clients,
    next_number: u64,
    since: Since,
    /// The job directory has been made durable.
    durable: bool,
    engine: Engine,
    tracking: Tracking,
    forecast: Forecast,
    phase: Option<Phase>,
    writing: Option<Writing>,
    queued: Option<Wanted>,
    ending: Option<Ending>,
    /// Since when processes are being killed.
    forced: Option<proc::Dying>,
    /// Some of them have not ended, and are not waited for any more.
    hung: bool,
    farewells: Vec<(ClientId, Event)>,
    /// What the front does not know yet: remote shells that have just been started, as whoever outlives this agent must
    /// know them, and signals for those that are its children.
    news: Vec<News>,
    skipped: u64,
    /// The generation for which interval checkpoints were left out last, and how many.
    left_out: (u64, u32),
    /// How the automatic interval was chosen last.
    chosen: Option<AutoInterval>,
    last_error: Option<LastError>,
    said: Option<Exit>,
    telling: Option<telling::Telling>,
    pub(crate) nodes: Option<Nodes>,
    /// The part of the job that this agent serves, where the job may have several hosts.
    seat: Option<Seat>,
    /// The newest generation that depends on no host's tiers, of a job that may have several;
    /// [`together::NO_GENERATION`] where there is none. Not known until all have said.
    at_rest: Option<u64>,
    /// What this node has been called, and whether the job's processes ask about addresses because that has changed.
    addresses: (Names, bool),
    /// Libraries in the job's processes are known to take part in checkpoints.
    gated: bool,
    flush: Flush,
    encoding: Encoding,
    losses: Losses,
    asking: Asking,
    /// Memory of the job that is filled while it runs.
    filled: Option<Filled>,
}

/// What was committed since the agent began, and what it began with.
#[derive(Debug, Default)]
struct Since {
    /// The generation that the job went on from, until another one is committed: newer ones there may be given up.
    from: Option<u64>,
    /// The job went on from a generation in which something was left out.
    lacks: bool,
    /// The newest generation in which nothing was left out.
    complete: Option<u64>,
}

impl Agent {
    /// Prepares to serve a job: clears what earlier agents left behind.
    pub fn new(setup: Setup) -> Result<Self, Failure> {
        let system = |step: &'static str| move |e| Failure::system(step, &e);
        let Setup {
            dir,
            lock,
            description,
            mut nodes,
            restarts,
        } = setup;
        if let Some(nodes) = &mut nodes {
            nodes.restarts = restarts;
        }
        // What fails here is told by the first checkpoint.
        drop(belay_capture::load_injected());
        generations::clear_leftovers(&dir.generations())?;
        let job = nodes::job_of(nodes.as_ref(), dir.path());
        let seat = nodes::seat(nodes.as_ref(), &description);
        let mut engine = collected_engine(&dir, &description, (job, seat.as_ref()))?;
        let next_number = numbers_unused(&dir, &description, &mut engine)?;
        let turn = |newest: Option<u64>| turn_after(&dir, newest);
        let redundant = record::newest(job)?;
        let encoding = Encoding::new(description.config.redundancy.settings()?, redundant, turn(redundant)?)?;
        let flush = Flush::new(turn(tiers::newest_durable(&dir, &description))?)?;
        let tracking = match description.differential {
            Differential::Written => Tracking::written(),
            Differential::Hash | Differential::Off => Tracking::off(),
        };
        let forecast = Forecast::of(&dir, &description);
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
            watch: Timer::new().map_err(system("make a timer"))?,
            done: Wake::new().map_err(system("make a wake-up channel"))?,
            channel: None,
            foreground: None,
            relay: Relay::default(),
            clients: Clients::default(),
            next_number,
            since: Since::default(),
            durable: false,
            engine,
            tracking,
            forecast,
            phase: None,
            writing: None,
            queued: None,
            ending: None,
            forced: None,
            hung: false,
            farewells: Vec::new(),
            news: Vec::new(),
            skipped: 0,
            left_out: (0, 0),
            chosen: None,
            last_error: None,
            said: None,
            telling: None,
            nodes,
            seat,
            at_rest: None,
            addresses: (Names::default(), false),
            gated: false,
            flush,
            encoding,
            losses: Losses::new(restarts),
            asking: Asking::default(),
            filled: None,
        })
    }

    /// After a restart from `generation`, which may be gone when the job ends.
    pub(crate) fn goes_on_from(&mut self, generation: &Generation) {
        self.since.from = Some(generation.number);
        self.since.lacks = generation.manifest.as_ref().is_ok_and(|m| m.left_out.is_some());
    }

    /// After a restart from `generation`, of which the phases took so long. A part's root looks after the times.
    pub(crate) fn restart_took(&mut self, generation: &Generation, phases: &[(Phase, Duration)]) {
        if !self.nodes.as_ref().is_some_and(Nodes::is_part) {
            let time = phases.iter().map(|(_, time)| *time).sum();
            self.forecast.restarted(generation, time);
        }
    }

    /// After a restart: the job runs again, which is recorded.
    pub(crate) fn begins(&mut self) {
        self.description.wait_status = None;
        self.description.lost.clear();
        self.description.history.begin(sys::now_unix_s());
        // A full disk is no reason not to go on.
        if let Err(failure) = self.dir.describe(&self.description) {
            tracing::error!(error = %failure, "record that the job runs");
        }
    }

    /// After a restart: the files that the processes map.
    pub(crate) fn maps(&mut self, code: &belay_restart::Mapped) {
        belay_capture::adopt(code.copies.clone());
        self.tracking.knows(Code::of(code.files.clone(), code.table.clone()));
    }

    /// Chunks made from now on have greater numbers than those of a generation that has been brought here.
    pub(crate) fn number_from(&mut self, next_chunk: u32) {
        self.engine.number_from(next_chunk);
    }

    /// Makes the control socket. No process that outlives the agent may have a copy: clients would wait for its answer for ever.
    pub(crate) fn listen(&mut self) -> Result<(), Failure> {
        let socket = self.dir.socket();
        let listener = belay_wire::socket::listen(&socket);
        self.listener = Some(listener.map_err(|e| Failure::io(format!("make control socket {}", socket.display()), &e))?);
        Ok(())
    }

    /// Makes the control socket again where its file is gone: sites remove old files from scratch file systems.
    fn keep_socket(&mut self) {
        if self.listener.is_none() || self.losses.deposed || self.dir.has_socket() || self.dir.check_place().is_err() {
            return;
        }
        match self.listen() {
            Ok(()) => tracing::warn!("the control socket was gone, and has been made again"),
            Err(failure) => tracing::warn!(%failure, "the control socket is gone"),
        }
    }

    /// Clients see the credentials of the process that listened last: from now on the calling one. Before anything of
    /// the job runs that could tell somebody to connect.
    pub(crate) fn listen_here(&self) {
        if let Some(Err(e)) = self.listener.as_ref().map(belay_wire::socket::listen_again) {
            tracing::warn!(error = %e, "listen on the control socket");
        }
    }

    /// PATH for the command, where remote shells are stood in for.
    pub(crate) fn path_for_command(&self) -> Option<std::ffi::OsString> {
        let nodes = self.nodes.as_ref().filter(|n| !n.is_part())?;
        nodes
            .joins_by_itself()
            .then(|| crate::nodes::path::with_standins(self.dir.path()))
    }

    /// Before a restart of the generation in `path`: the job's other nodes, started again where this is the root.
    pub(crate) fn other_nodes(
        &mut self,
        path: &std::path::Path,
        number: u64,
        hosts: &[String],
    ) -> Result<Option<Reunion>, Failure> {
        let is_part = self.nodes.as_ref().is_some_and(Nodes::is_part);
        if !is_part && self.dir.path().join("key").exists() {
            let rows = crate::nodes::table::read(path)?;
            if let Some(failed) = self.nodes.take() {
                failed.give_up();
            }
            let stored = self.description.config.redundancy.scheme.is_some();
            let restarts = self.losses.restarts();
            let tree = (&self.dir, &self.description.config.tree);
            self.nodes = Some(Nodes::restart(tree, (&rows, stored), number, (hosts, restarts))?);
        }
        self.nodes.as_mut().map_or(Ok(None), Nodes::reunion)
    }

    /// Remote shells that were started for a restart.
    pub(crate) fn shells(&self) -> Vec<Shell> {
        self.nodes.as_ref().map(Nodes::shells).unwrap_or_default()
    }

    /// After a restart: the addresses under which the job knows this node.
    pub(crate) fn called(&mut self, names: Names, led: bool) {
        self.addresses = (names, led);
    }

    /// After a restart: whether libraries take part.
    pub(crate) fn is_gated(&mut self, gated: bool) {
        self.gated = gated;
    }

    /// After a restart: the tree that was used for it.
    pub(crate) fn rejoin(&mut self, joining: belay_tree::Joining) {
        if let Some(nodes) = &mut self.nodes {
            nodes.rejoin(joining);
        }
    }

    /// Leaves the job to the agent that a fork has made; the lock is shared with it.
    pub(crate) fn leave(mut self) -> Option<Lock> {
        self.lock.take()
    }

    /// Gives everything back without having served.
    pub(crate) fn abandon(mut self) {
        self.close();
    }

    /// Serves the job whose command is child `root_pid` in the calling process, which has the signals of
    /// [`crate::front::handled`] blocked, until nothing of it is left. Returns the status word with which the launch
    /// ends.
    ///
    /// `ended` is the command's status word where it had ended before the checkpoint from which the job was restarted.
    /// `report` is called with what the front of a restarted job is to know.
    pub(crate) fn serve(mut self, root_pid: i32, ended: Option<i32>, channel: Option<Channel>, report: &dyn Fn(News)) -> i32 {
        // Not before: the command has what its launcher was given.
        sys::write_large_files();
        belay_kernel::prompt::short_turns();
        belay_kernel::prompt::prepare();
        self.pid = std::process::id().cast_signed();
        self.root_pid = root_pid;
        self.root_status = ended;
        self.channel = channel;
        tracing::info!(agent = self.pid, root_pid, command = ?self.description.command, interval = %self.description.interval, "serving");
        self.lock.iter().for_each(Lock::serving);
        if let Some(nodes) = &mut self.nodes {
            nodes.know_standins();
        }
        if let Some(Err(failure)) = self.nodes.as_mut().map(Nodes::start) {
            self.note_failure(&failure, true);
        }
        self.arm_interval();
        self.set_tick();
        self.publish();
        self.forecast.keep(&self.dir);
        self.begin_encoding();
        self.flush_what_is_left();
        self.clear_tiers();
        self.move_what_is_left();
        // A restarted process may have ended before the signals were blocked.
        self.reap();
        let (mut reported, restarts) = (false, self.losses.restarts());
        let mut not_restarted = false;
        while !self.is_over() {
            if let (Some(status), false) = (self.background, reported) {
                reported = true;
                report(News::Background(status));
            }
            if restarts && self.losses.is_given_up() && !not_restarted {
                not_restarted = true;
                if !self.nodes.as_ref().is_some_and(Nodes::is_part) {
                    self.order(&Order::NotRestarted);
                }
                match &self.channel {
                    Some(channel) => channel.send(Message::NotRestarted),
                    None => report(News::NotRestarted),
                }
            }
            for news in self.news.drain(..) {
                match (news, &self.channel) {
                    (News::Shell(shell), Some(channel)) => channel.send(Message::Shell(shell.pid, shell.standin)),
                    (news, _) => report(news),
                }
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
        let idle = self.writing.is_none() && !self.is_together() && (self.hung || self.has_no_children());
        let is_left = self.must_flush() || self.may_have_lost() || self.awaits_parts();
        (self.hung || self.root_status.is_some()) && idle && !is_left
    }

    fn has_no_children(&self) -> bool {
        let askers = gpu::askers();
        let mut children = proc::children(self.pid).unwrap_or_default().into_iter();
        children.all(|pid| askers.contains(&pid))
    }

    /// Waits for something to happen and handles it.
    fn step(&mut self) -> Result<(), Failure> {
        let own = self.descriptors();
        let clients = self.clients.interest();
        let metrics = self.metrics_interest();
        let parting = self.nodes.as_ref().map(Nodes::parting).unwrap_or_default();
        let all: Vec<(RawFd, i16)> = own
            .iter()
            .map(|(_, fd)| (*fd, libc::POLLIN))
            .chain(clients.iter().map(|(_, fd, events)| (*fd, *events)))
            .chain(parting.iter().map(|fd| (*fd, libc::POLLIN)))
            .chain(metrics)
            .collect();
        let ready = sys::poll(&all).map_err(|e| Failure::system("poll", &e))?;
        let (ours, others) = ready.split_at(own.len());
        let (theirs, others) = others.split_at(clients.len());
        let (parted, metrics) = others.split_at(parting.len());

        let is_ready = |what: Own| own.iter().zip(ours).any(|((of, _), events)| *of == what && *events != 0);

        // First what cannot wait.
        if is_ready(Own::Filler) || is_ready(Own::StandIn) {
            self.look_at_memory();
        }
        if is_ready(Own::Watch) && self.watch.take() > 0 {
            self.watch_memory();
        }
        if is_ready(Own::Written) {
            self.done.take();
            if self.is_together() {
                self.written();
            } else {
                self.finish_checkpoint();
            }
        }
        if is_ready(Own::Signals) {
            self.take_signals();
        }
        if is_ready(Own::Front) {
            self.hear_front();
        }
        if is_ready(Own::Nodes) {
            self.hear_nodes();
        }
        for (shell, _) in parting.iter().zip(parted).filter(|(_, gone)| **gone != 0) {
            self.nodes.iter_mut().for_each(|n| n.parted(*shell));
        }
        if is_ready(Own::Flushed) {
            self.flush.done.take();
            self.finish_flush();
        }
        if is_ready(Own::FlushAgain) && self.flush.again.take() > 0 {
            self.begin_flush();
        }
        if is_ready(Own::Encoded) {
            self.encoding.done.take();
            self.finish_round();
        }
        if is_ready(Own::Interval) && self.interval.take() > 0 {
            self.interval_checkpoint();
        }
        if is_ready(Own::Grace) && self.grace.take() > 0 {
            self.force_end();
        }
        if is_ready(Own::Tick) && self.tick.take() > 0 {
            self.on_tick();
        }
        for ((id, ..), revents) in clients.iter().zip(theirs) {
            if *revents != 0 {
                if let Some(request) = self.clients.ready(*id, *revents) {
                    self.handle(*id, request);
                }
            }
        }
        self.attend_metrics(metrics);
        if let (Some(listener), true) = (&self.listener, is_ready(Own::Listener)) {
            self.clients.accept(listener);
        }
        Ok(())
    }
}
