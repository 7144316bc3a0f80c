//! What the rest of the program sees of the tree: joining it, orders, collective steps, events.

use crate::error::TreeError;
use crate::event::{Bell, Broken, Event, Released};
use crate::key::JobKey;
use crate::link::{Link, LinkError, BEAT};
use crate::listening::{beside, Listeners};
use crate::message::{Contribution, Down, Failed, FailureKind, NodeInfo, Up, Values};
use crate::service::{Command, Service, Start, Traffic};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{mpsc, Arc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the root's address may be unreachable, or the root silent, before joining is given up.
const JOIN_LIMIT: Duration = Duration::from_secs(20);
/// How long one connection attempt may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// First pause between attempts; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// Connections that may end without an answer before joining is given up.
const UNANSWERED: u32 = 8;

/// A place in the tree that nobody attends to yet: it can be made before a fork, and has no thread.
pub struct Joining {
    service: Box<Service>,
    ends: Ends,
    /// Which clock the service has.
    clock: Option<PathBuf>,
}

/// The program's ends of the channels to the service.
#[derive(Debug)]
struct Ends {
    node: u64,
    listeners: Listeners,
    commands: mpsc::Sender<Command>,
    wake: Arc<Bell>,
    events: mpsc::Receiver<Event>,
    releases: mpsc::Receiver<Released>,
    bell: Arc<Bell>,
    traffic: Arc<Traffic>,
}

impl Ends {
    fn command(&self, command: Command) {
        // The thread ends only after a command to do so.
        let _ = self.commands.send(command);
        self.wake.ring();
    }

    fn listen_at(&mut self, addresses: &[IpAddr]) -> Result<(), TreeError> {
        self.listeners = self.listeners.moved(addresses)?;
        self.command(Command::Listen(self.listeners.clone()));
        Ok(())
    }
}

impl std::fmt::Debug for Joining {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Joining as node {}", self.ends.node)
    }
}

/// What the root orders when all nodes have joined.
const ALL_JOINED: &str = "all have joined";

impl Joining {
    /// The root of a new tree. It listens at all of its host's addresses until [`Joining::listen_at`] says otherwise.
    pub fn root(key: JobKey, fan_out: u64, host: String) -> Result<Self, TreeError> {
        Self::root_at(key, fan_out, host, &belay_kernel::net::addresses())
    }

    /// The same, listening at `addresses` of this host.
    pub fn root_at(key: JobKey, fan_out: u64, host: String, addresses: &[IpAddr]) -> Result<Self, TreeError> {
        let listeners = match addresses {
            [] => Listeners::default(),
            some => Listeners::open(some)?,
        };
        let info = NodeInfo {
            node: Some(0),
            host,
            addresses: listeners.addresses(),
            tag: 0,
            processes: 0,
        };
        Self::prepare(Start {
            key,
            node: 0,
            fan_out,
            info,
            listeners,
            parent: None,
            root: Vec::new(),
            root_seen: None,
            ordered: 0,
            early: Vec::new(),
        })
    }

    /// Joins the tree whose root listens at one of `root`: `tag` says what the root started this node for. It listens
    /// where it has reached the root from.
    pub fn connect(key: JobKey, root: &[String], host: String, tag: u64, processes: u64) -> Result<Self, TreeError> {
        let failed = |why: String| TreeError::Join(root.join(" or "), why);
        let begin = Instant::now();
        let mut pause = FIRST_PAUSE;
        let mut unanswered = 0;
        loop {
            let mut link = reach(&key, root, begin).map_err(failed)?;
            let listeners = Listeners::open(&beside(link.local()))?;
            let mut info = NodeInfo {
                node: None,
                host: host.clone(),
                addresses: listeners.addresses(),
                tag,
                processes,
            };
            let (node, parent, ordered, early) = match welcome(&mut link, &info) {
                Ok(welcomed) => welcomed,
                // Where many connect, one that has proved nothing yet may have to make room.
                Err(_) if !link.is_authenticated() && unanswered < UNANSWERED => {
                    unanswered += 1;
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LAST_PAUSE);
                    continue;
                }
                Err(e) => return Err(failed(e.to_string())),
            };
            info.node = Some(node);
            let root_seen = link.peer();
            // A parent other than the root is connected to by the service, which knows what to do when it is gone.
            let (link, parent) = match parent {
                None => (Some(link), root.to_vec()),
                Some((_, addresses)) => (None, addresses),
            };
            return Self::prepare(Start {
                key,
                node,
                fan_out: 0,
                info,
                listeners,
                parent: Some((link, parent)),
                root: root.to_vec(),
                root_seen,
                ordered,
                early,
            });
        }
    }

    fn prepare(start: Start) -> Result<Self, TreeError> {
        let failed = |e| TreeError::System("make an event descriptor", e);
        let (commands, orders) = mpsc::channel();
        let (event_in, events) = mpsc::channel();
        let (release_in, releases) = mpsc::channel();
        let wake = Arc::new(Bell::new().map_err(failed)?);
        let bell = Arc::new(Bell::new().map_err(failed)?);
        let ends = Ends {
            node: start.node,
            listeners: start.listeners.clone(),
            commands,
            wake: wake.clone(),
            events,
            releases,
            bell: bell.clone(),
            traffic: Arc::default(),
        };
        let service = Service::new(start, (orders, wake), (event_in, release_in, bell), ends.traffic.clone());
        Ok(Self {
            service: Box::new(service),
            ends,
            clock: clock(),
        })
    }

    /// A restart begins in one process and goes on in another, which has the clock of the job.
    fn follow_clock(&mut self) {
        let now = clock();
        if self.clock != now {
            self.clock = now;
            self.service.clock_is_another();
        }
    }

    /// Where this node listens.
    pub fn addresses(&self) -> Vec<String> {
        self.ends.listeners.addresses()
    }

    /// Listens at these addresses of the host from now on, and nowhere else.
    pub fn listen_at(&mut self, addresses: &[IpAddr]) -> Result<(), TreeError> {
        self.ends.listen_at(addresses)
    }

    /// Addresses of this node at which others have joined.
    pub fn reached(&self) -> Vec<IpAddr> {
        self.ends.traffic.reached()
    }

    /// This node's number.
    pub fn node(&self) -> u64 {
        self.ends.node
    }

    /// Attends to the connections on the calling thread, until there is an event or the limit is reached.
    pub fn await_event(&mut self, limit: Duration) -> Option<Event> {
        self.follow_clock();
        let begin = Instant::now();
        loop {
            if let Ok(event) = self.ends.events.try_recv() {
                return Some(event);
            }
            if begin.elapsed() > limit {
                return None;
            }
            self.service.turn();
        }
    }

    /// At the root, when all nodes have joined that it waits for: lets them go on from [`Joining::await_all`].
    pub fn all_joined(&mut self) {
        self.service.command(Command::Order(ALL_JOINED.into()));
    }

    /// Waits until the root says that all nodes have joined, `limit` at most, attending to the connections on the
    /// calling thread: nodes may have to join below this one, and a step to which it came without them would be without
    /// them.
    pub fn await_all(&mut self, limit: Duration) -> Result<(), TreeError> {
        let begin = Instant::now();
        loop {
            match self.await_event(limit.saturating_sub(begin.elapsed())) {
                Some(Event::Order(text)) if text == ALL_JOINED => return Ok(()),
                Some(Event::RootLost(why)) => return Err(TreeError::Absent(why)),
                Some(_) => {}
                None => return Err(TreeError::Absent(format!("some have not within {} s", limit.as_secs()))),
            }
        }
    }

    /// Attends to the connections as they are, on the calling thread. A program that does something long before the next
    /// step calls this every second at least, or is taken for lost.
    pub fn attend(&mut self) {
        self.follow_clock();
        self.service.turn_within(Duration::ZERO);
    }

    /// As [`Tree::exchange`], attending to the connections on the calling thread meanwhile.
    pub fn exchange(&mut self, step: u64, contribution: Contribution) -> Result<Values, Broken> {
        self.follow_clock();
        self.service.command(Command::Arrive(step, contribution, None));
        self.service.advance();
        loop {
            // Where nobody else is left to wait for, there is nothing that a turn would wait for.
            while let Ok((number, failures, values)) = self.ends.releases.try_recv() {
                if number >= step {
                    return if failures.is_empty() {
                        Ok(values)
                    } else {
                        Err(Broken(failures))
                    };
                }
            }
            self.service.turn();
        }
    }

    /// Begins to attend to the connections on a thread of its own.
    pub fn start(mut self) -> Result<Tree, TreeError> {
        self.follow_clock();
        let Self { mut service, ends, .. } = self;
        let thread = std::thread::Builder::new()
            .name("belay-tree".into())
            .stack_size(256 << 10)
            .spawn(move || service.run())
            .map_err(|e| TreeError::System("start the thread of the tree", e))?;
        Ok(Tree {
            ends,
            thread: Some(thread),
        })
    }
}

/// Which clock this process has: its time namespace, where there are any.
fn clock() -> Option<PathBuf> {
    std::fs::read_link("/proc/self/ns/time").ok()
}

/// A connection to one of `addresses`, tried in turn until the limit since `begin`.
fn reach(key: &JobKey, addresses: &[String], begin: Instant) -> Result<Link, String> {
    let mut pause = FIRST_PAUSE;
    let mut why = "no address".to_owned();
    loop {
        for to in addresses {
            let parsed = to.parse().map_err(|e| format!("{to}: {e}"));
            match parsed.and_then(|a| Link::connect(key, a, CONNECT_LIMIT).map_err(|e| e.to_string())) {
                Ok(link) => return Ok(link),
                Err(e) => why = e,
            }
        }
        if begin.elapsed() > JOIN_LIMIT {
            return Err(why);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Number, parent, the last order given before, and what came right behind them.
type Welcomed = (u64, Option<(u64, Vec<String>)>, u64, Vec<Down>);

/// Says who wants to join, and waits until the root lets it in, as long as the root shows that it is there: while a
/// checkpoint of the others is being written it lets in nobody.
fn welcome(link: &mut Link, info: &NodeInfo) -> Result<Welcomed, LinkError> {
    link.send(&Up::Hello {
        info: info.clone(),
        released: 0,
        ordered: 0,
    })?;
    let mut heard = Instant::now();
    loop {
        let mut got = Vec::new();
        let result = link.receive(&mut got);
        if !got.is_empty() {
            heard = Instant::now();
        }
        let mut got = got.into_iter().skip_while(|m| matches!(m, Down::Beat));
        // After it the root closes the connection of a node whose parent is another.
        if let Some(Down::Welcome { node, parent, ordered }) = got.next() {
            return Ok((node, parent, ordered, got.collect()));
        }
        result?;
        let left = JOIN_LIMIT
            .checked_sub(heard.elapsed())
            .ok_or(LinkError::Silent(JOIN_LIMIT.as_secs()))?;
        // The root, too, wants to know that somebody is there.
        link.beat(&Up::Beat)?;
        link.wait(left.min(BEAT))?;
    }
}

/// A node's place in the tree.
#[derive(Debug)]
pub struct Tree {
    ends: Ends,
    thread: Option<JoinHandle<()>>,
}

impl Tree {
    /// This node's number.
    pub fn node(&self) -> u64 {
        self.ends.node
    }

    /// Where this node listens.
    pub fn addresses(&self) -> Vec<String> {
        self.ends.listeners.addresses()
    }

    /// Listens at these addresses of the host from now on, and nowhere else.
    pub fn listen_at(&mut self, addresses: &[IpAddr]) -> Result<(), TreeError> {
        self.ends.listen_at(addresses)
    }

    /// Messages that passed through this node.
    pub fn traffic(&self) -> &Traffic {
        &self.ends.traffic
    }

    fn command(&self, command: Command) {
        self.ends.command(command);
    }

    /// The next event, if there is one. The descriptor of this object is readable when there may be.
    pub fn event(&self) -> Option<Event> {
        let event = self.ends.events.try_recv().ok();
        if event.is_none() {
            self.ends.bell.silence();
            // One that was reported between the two calls has rung before the bell was silenced.
            return self.ends.events.try_recv().ok();
        }
        event
    }

    /// At the root: `text` for every node.
    pub fn order(&self, text: String) {
        self.command(Command::Order(text));
    }

    /// Everywhere but at the root: `text` for the root. It is lost where the way to the root is being made anew.
    pub fn say(&self, text: String) {
        self.command(Command::Say(text));
    }

    /// The status word with which this node's program has ended, for the root; 0 unless it is said before this object is dropped.
    pub fn ends_with(&self, status: i32) {
        self.command(Command::EndWith(status));
    }

    /// At the root: the steps that follow are those of `nodes`, besides the root: new nodes wait to be let in, and each
    /// step fails from which one of these is missing, whenever it was lost. None ends that.
    pub fn hold(&self, nodes: Option<BTreeSet<u64>>) {
        self.command(Command::Hold(nodes));
    }

    /// Takes part in collective step `step` without waiting for its end, of which [`Tree::released`] tells. At the
    /// root, the step fails when others take longer than `patience`.
    pub fn begin(&self, step: u64, contribution: Contribution, patience: Option<Duration>) {
        self.command(Command::Arrive(step, contribution, patience));
    }

    /// The number and the end of a step begun with [`Tree::begin`], once it has come. The descriptor of this object is
    /// readable when it may have.
    pub fn released(&self) -> Option<(u64, Result<Values, Broken>)> {
        let (step, failures, values) = self.ends.releases.try_recv().ok()?;
        let end = if failures.is_empty() {
            Ok(values)
        } else {
            Err(Broken(failures))
        };
        Some((step, end))
    }

    /// Takes part in collective step `step`; returns the facts that `contribution` wants when all nodes have
    /// contributed. Step numbers grow.
    pub fn exchange(&self, step: u64, contribution: Contribution) -> Result<Values, Broken> {
        self.exchange_within(step, contribution, None)
    }

    /// The same; at the root, the step fails when others take longer than `patience`.
    pub fn exchange_within(&self, step: u64, contribution: Contribution, patience: Option<Duration>) -> Result<Values, Broken> {
        self.command(Command::Arrive(step, contribution, patience));
        loop {
            match self.ends.releases.recv() {
                Ok((number, failures, values)) if number >= step => {
                    return if failures.is_empty() {
                        Ok(values)
                    } else {
                        Err(Broken(failures))
                    };
                }
                Ok(_) => {} // a step that this node had given up
                Err(_) => {
                    let reason = "the thread of the tree has ended".to_owned();
                    let node = self.ends.node;
                    return Err(Broken(vec![Failed {
                        node,
                        kind: FailureKind::Internal,
                        reason,
                    }]));
                }
            }
        }
    }
}

impl AsRawFd for Tree {
    fn as_raw_fd(&self) -> RawFd {
        self.ends.bell.as_raw_fd()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.command(Command::Leave);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
