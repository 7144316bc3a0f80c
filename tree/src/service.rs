//! The thread that attends to a node's connections: to its parent, to its children, and to those who want to become children.
//!
//! ```text
//! stranger ──(proves that it knows the key)──> guest
//! guest ──(Hello with a number)──> child ──(connection ends)──> missing ──(Hello again)──> child
//!   └─ Hello without one, at the root: gets a number and a parent  └─(after GRACE)──> lost: an event at the root, a failure of the step under way
//! ```
//! A node whose parent is gone connects again, with growing pauses; after a while, or when nobody listens any more
//! where the parent was, to the root, which adopts it. A root at whose place nobody listens is lost as a child is, one
//! that cannot be reached or says nothing later (ROOT_LIMIT). All that could have been lost with a connection is said
//! again on the next one: orders and releases have numbers, and what has been heard already is ignored.

mod members;

use crate::event::{Bell, Event, Released};
use crate::key::JobKey;
use crate::link::{Link, SILENCE};
use crate::listening::Listeners;
use crate::merge::{decide, Step, Who};
use crate::message::{Contribution, Down, Failed, FailureKind, NodeInfo, Up, Values, MAX_FAILURES};
use crate::noise::TREE;
use crate::strangers::Strangers;
use belay_kernel::numbers;
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long nodes may be silent that have no thread for the tree yet: between two steps of a restart they attend to it
/// now and then only, and may have to wait for a processor meanwhile. One that ends is noticed at once.
const BETWEEN_STEPS: Duration = Duration::from_secs(60);
/// How long a child may be without a connection before it is lost.
const GRACE: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// How long the loop sleeps when nothing happens.
const IDLE: Duration = Duration::from_millis(500);
/// A node that has attended to nothing for longer has stood still itself. Nodes without a thread attend every second at least.
const STOOD: Duration = Duration::from_millis(1500);
/// How long an order is kept for nodes that connect again: longer than one looks for its root.
const KEPT: Duration = Duration::from_secs(30);
/// Nodes that join at the same time connect to their parents one after the other.
const STAGGER: Duration = Duration::from_micros(300);
/// Why a node is not there that has said farewell. The part of a job on its host has ended in good order, and it goes on without.
const ENDED: &str = "it has ended";

/// What a service begins with.
pub(crate) struct Start {
    pub(crate) key: JobKey,
    pub(crate) node: u64,
    pub(crate) fan_out: u64,
    pub(crate) info: NodeInfo,
    pub(crate) listeners: Listeners,
    /// Connection to the parent, if there is one already, and its addresses. None at the root.
    pub(crate) parent: Option<(Option<Link>, Vec<String>)>,
    /// The root's addresses.
    pub(crate) root: Vec<String>,
    /// At which of them it was reached.
    pub(crate) root_seen: Option<SocketAddr>,
    /// The last order given before this node was let in.
    pub(crate) ordered: u64,
    /// What the parent has said already.
    pub(crate) early: Vec<Down>,
}

/// What the program asks for.
pub(crate) enum Command {
    Order(String),
    Say(String),
    Hold(Option<BTreeSet<u64>>),
    Arrive(u64, Contribution, Option<Duration>),
    EndWith(i32),
    Listen(Listeners),
    Leave,
}

/// Messages that passed through a node, and where it was come to.
#[derive(Debug, Default)]
pub struct Traffic {
    received: AtomicU64,
    sent: AtomicU64,
    reached: Mutex<BTreeSet<IpAddr>>,
}

impl Traffic {
    /// Messages received.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Addresses of this node at which others have joined.
    pub fn reached(&self) -> Vec<IpAddr> {
        let reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        reached.iter().copied().collect()
    }

    fn note_reached(&self, at: Option<IpAddr>) {
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        reached.extend(at);
    }

    /// Messages sent.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

/// A fixed set of nodes whose steps are under way, and why some of them are gone.
struct Held {
    nodes: BTreeSet<u64>,
    gone: BTreeMap<u64, (FailureKind, String)>,
}

impl Held {
    fn of(nodes: BTreeSet<u64>) -> Self {
        Self {
            nodes,
            gone: BTreeMap::new(),
        }
    }
}

/// An order: its number, its text, and when this node heard of it.
struct Given {
    id: u64,
    text: String,
    at: Instant,
}

struct Child {
    link: Option<Link>,
    missing_since: Option<Instant>,
    /// The last release, in case the child has not heard it.
    released: Option<Released>,
}

/// A node that has the key, and has not said yet which one it is, or waits until it is let in.
struct Guest {
    link: Link,
    since: Instant,
    hello: Option<NodeInfo>,
}

struct Above {
    link: Option<Link>,
    addresses: Vec<String>,
    /// Where it was when it was heard last.
    seen: Option<SocketAddr>,
    /// How often in a row its host has said since that nobody listens there.
    refusals: u32,
    /// When it was heard no more.
    lost: Instant,
    next_try: Instant,
    pause: Duration,
    given_up: bool,
}

/// The root's knowledge of a node.
struct Registered {
    info: NodeInfo,
    parent: u64,
    attached: bool,
    /// Its parent was lost; it must come to the root until then.
    awaited: Option<Instant>,
}

pub(crate) struct Service {
    key: JobKey,
    node: u64,
    fan_out: u64,
    info: NodeInfo,
    listeners: Listeners,
    above: Option<Above>,
    root: Vec<String>,
    root_seen: Option<SocketAddr>,
    children: BTreeMap<u64, Child>,
    strangers: Strangers,
    /// Oldest first.
    guests: Vec<Guest>,
    /// At the root, during steps of a fixed set of nodes.
    held: Option<Held>,
    /// When this node has come to the step under way, and how long the others may take.
    patience: Option<(Instant, Duration)>,
    /// The program is done with the tree.
    left: bool,
    /// What is said of this node when it leaves.
    status: i32,
    next_node: u64,
    registry: BTreeMap<u64, Registered>,
    step: Step,
    /// The last step that has failed, and why.
    failed: (u64, Vec<Failed>),
    /// Those given lately, oldest first.
    orders: VecDeque<Given>,
    ordered: u64,
    commands: mpsc::Receiver<Command>,
    wake: Arc<Bell>,
    events: mpsc::Sender<Event>,
    releases: mpsc::Sender<Released>,
    bell: Arc<Bell>,
    traffic: Arc<Traffic>,
    /// A node that says nothing for longer is lost.
    silence: Duration,
    /// When everything was attended to last.
    attended: Instant,
}

type Inbox = (mpsc::Receiver<Command>, Arc<Bell>);
type Outbox = (mpsc::Sender<Event>, mpsc::Sender<Released>, Arc<Bell>);

impl Service {
    pub(crate) fn new(start: Start, (commands, wake): Inbox, (events, releases, bell): Outbox, traffic: Arc<Traffic>) -> Self {
        let now = Instant::now();
        let turn = u32::try_from(start.node % 512).unwrap_or(0);
        let above = start.parent.map(|(link, addresses)| Above {
            seen: link.as_ref().and_then(Link::peer),
            refusals: 0,
            link,
            addresses,
            lost: now,
            next_try: now + STAGGER * turn,
            pause: FIRST_PAUSE,
            given_up: false,
        });
        let mut service = Self {
            strangers: Strangers::new(start.key.clone(), TREE),
            key: start.key,
            node: start.node,
            fan_out: start.fan_out,
            info: start.info,
            listeners: start.listeners,
            above,
            root: start.root,
            root_seen: start.root_seen,
            children: BTreeMap::new(),
            guests: Vec::new(),
            held: None,
            patience: None,
            left: false,
            status: 0,
            next_node: 1,
            registry: BTreeMap::new(),
            step: Step::default(),
            failed: (0, Vec::new()),
            orders: VecDeque::new(),
            ordered: start.ordered,
            commands,
            wake,
            events,
            releases,
            bell,
            traffic,
            silence: BETWEEN_STEPS,
            attended: now,
        };
        start.early.into_iter().for_each(|message| service.hear_parent(message));
        service
    }

    fn is_root(&self) -> bool {
        self.above.is_none()
    }

    fn tell(&self, event: Event) {
        // A program that does not listen any more is about to end this thread.
        let _ = self.events.send(event);
        self.bell.ring();
    }

    /// Attends to everything until the program leaves.
    pub(crate) fn run(&mut self) {
        self.silence = SILENCE;
        while !self.left {
            self.turn();
        }
        self.leave();
    }

    /// Waits for something to happen and deals with it.
    pub(crate) fn turn(&mut self) {
        self.turn_within(IDLE);
    }

    /// The same, waiting for so long at most.
    pub(crate) fn turn_within(&mut self, limit: Duration) {
        let ready = self.wait(limit);
        let since = self.attended.elapsed();
        if since > STOOD {
            self.stood_still(since.saturating_sub(IDLE));
        }
        self.wake.silence();
        while let Ok(command) = self.commands.try_recv() {
            self.command(command);
        }
        self.hear(&ready);
        self.look_after();
        self.advance();
        self.attended = Instant::now();
    }

    /// Waits for something to happen, for so long at most; the descriptors that are ready.
    fn wait(&mut self, limit: Duration) -> Vec<RawFd> {
        let let_in = self.strangers.are_let_in();
        let links = self.children.values().filter_map(|c| c.link.as_ref());
        let links = links.chain(self.guests.iter().map(|g| &g.link));
        let links = links.chain(self.above.as_ref().and_then(|a| a.link.as_ref()));
        let now = Instant::now();
        let listeners = self.listeners.raw().filter(|_| let_in);
        let mut polls: Vec<libc::pollfd> = std::iter::once(self.wake.as_raw_fd())
            .chain(listeners)
            .map(|fd| numbers::entry(fd, libc::POLLIN))
            .chain(
                links
                    .chain(self.strangers.links())
                    .map(|l| numbers::entry(l.raw(), l.interest())),
            )
            .collect();
        let retry = self
            .above
            .as_ref()
            .filter(|a| a.link.is_none() && !a.given_up)
            .map(|a| a.next_try);
        let missing = self
            .children
            .values()
            .filter_map(|c| c.missing_since)
            .min()
            .map(|t| t + GRACE);
        let next = retry.into_iter().chain(missing).min().unwrap_or(now + limit).min(now + limit);
        let ms = i32::try_from(next.saturating_duration_since(now).as_millis()).unwrap_or(0);
        if numbers::poll_all(&mut polls, ms + 1).unwrap_or(0) == 0 {
            return Vec::new();
        }
        polls.iter().filter(|p| p.revents != 0).map(|p| p.fd).collect()
    }

    pub(crate) fn command(&mut self, command: Command) {
        match command {
            Command::Order(text) => {
                self.ordered += 1;
                self.spread(self.ordered, &text);
            }
            Command::Say(text) => self.send_up(&Up::Said { node: self.node, text }),
            Command::Hold(nodes) => self.held = nodes.map(Held::of),
            Command::Arrive(step, contribution, patience) => {
                if self.above.as_ref().is_some_and(|a| a.given_up) {
                    return self.refuse_step(step);
                }
                self.patience = patience.map(|p| (Instant::now(), p));
                self.step.arrive(step, Who::Own, contribution);
            }
            Command::EndWith(status) => self.status = status,
            Command::Listen(listeners) => {
                self.info.addresses = listeners.addresses();
                self.listeners = listeners;
            }
            Command::Leave => self.left = true,
        }
    }

    fn refuse_step(&self, step: u64) {
        let failure = Failed {
            node: 0,
            kind: FailureKind::Lost,
            reason: "the root of the job is gone".into(),
        };
        let _ = self.releases.send((step, vec![failure], Values::new()));
        self.bell.ring();
    }

    /// Passes an order on to all children.
    fn spread(&mut self, id: u64, text: &str) {
        let (text, at) = (text.to_owned(), Instant::now());
        while self.orders.front().is_some_and(|o| at - o.at > KEPT) {
            self.orders.pop_front();
        }
        let order = Down::Order { id, text: text.clone() };
        self.orders.push_back(Given { id, text, at });
        for node in self.children.keys().copied().collect::<Vec<_>>() {
            self.send_down(node, &order);
        }
    }

    fn send_down(&mut self, node: u64, message: &Down) {
        let Some(child) = self.children.get_mut(&node) else { return };
        let Some(link) = &mut child.link else { return };
        self.traffic.sent.fetch_add(1, Ordering::Relaxed);
        if let Err(e) = link.send(message) {
            self.child_broke(node, &e);
        }
    }

    fn send_up(&mut self, message: &Up) {
        let Some(above) = &mut self.above else { return };
        let Some(link) = &mut above.link else { return };
        self.traffic.sent.fetch_add(1, Ordering::Relaxed);
        if let Err(e) = link.send(message) {
            self.parent_broke(&e);
        }
    }

    /// Reads from everything that is ready, and accepts.
    fn hear(&mut self, ready: &[RawFd]) {
        let ready: HashSet<RawFd> = ready.iter().copied().collect();
        let nodes: Vec<u64> = self
            .children
            .iter()
            .filter(|(_, c)| c.link.as_ref().is_some_and(|l| ready.contains(&l.raw())))
            .map(|(n, _)| *n)
            .collect();
        for node in nodes {
            let mut got = Vec::new();
            let Some(link) = self.children.get_mut(&node).and_then(|c| c.link.as_mut()) else {
                continue;
            };
            let result = link.receive(&mut got);
            for message in got {
                self.hear_child(node, message);
            }
            if let Err(e) = result {
                self.child_broke(node, &e);
            }
        }
        if let Some(link) = self.above.as_mut().and_then(|a| a.link.as_mut()) {
            if ready.contains(&link.raw()) {
                let mut got = Vec::new();
                let result = link.receive(&mut got);
                for message in got {
                    self.hear_parent(message);
                }
                if let Err(e) = result {
                    self.parent_broke(&e);
                }
            }
        }
        self.hear_guests(&ready);
        for link in self.strangers.hear(&ready) {
            let since = Instant::now();
            self.hear_guest(
                Guest {
                    link,
                    since,
                    hello: None,
                },
                true,
            );
        }
        for listener in self.listeners.ready(|fd| ready.contains(&fd)) {
            self.strangers.accept(|| listener.accept());
        }
    }

    pub(crate) fn hear_child(&mut self, node: u64, message: Up) {
        if !matches!(message, Up::Beat) {
            self.traffic.received.fetch_add(1, Ordering::Relaxed);
        }
        match message {
            Up::Arrive { step, .. } if step <= self.step.released => self.release_late(node, step),
            Up::Arrive { step, contribution } => self.step.arrive(step, Who::Child(node), contribution),
            Up::Attached { info, parent } if self.is_root() => self.register(info, parent),
            Up::Lost { node: below, reason } if self.is_root() => self.lost(below, &reason),
            Up::Left { node: below, status } => {
                if below == node {
                    self.children.remove(&node);
                    self.step.lose(node, FailureKind::Absent, ENDED);
                }
                if self.is_root() {
                    self.gone(below, FailureKind::Absent, ENDED);
                    self.tell(Event::Left(below, status));
                } else {
                    self.send_up(&Up::Left { node: below, status });
                }
            }
            Up::Said { node, text } if self.is_root() => self.tell(Event::Said(node, text)),
            Up::Attached { .. } | Up::Lost { .. } | Up::Said { .. } => self.send_up(&message),
            Up::Hello { .. } | Up::Beat => {}
        }
    }

    pub(crate) fn hear_parent(&mut self, message: Down) {
        if !matches!(message, Down::Beat) {
            self.traffic.received.fetch_add(1, Ordering::Relaxed);
        }
        match message {
            Down::Order { id, text } if id > self.ordered => {
                self.ordered = id;
                self.spread(id, &text);
                self.tell(Event::Order(text));
            }
            Down::Release { step, failures, values } if step == self.step.number() => self.release(&failures, &values),
            Down::RootLost => self.doubt_root(),
            Down::Order { .. } | Down::Release { .. } | Down::Welcome { .. } | Down::Beat => {}
        }
    }

    /// Sends the step under way on, or at the root ends it, once everybody here has arrived, or somebody cannot come.
    pub(crate) fn advance(&mut self) {
        let hopeless = self.hopeless();
        if !hopeless.is_empty() {
            let (mut failures, _) = decide(self.step.so_far());
            let told: BTreeSet<u64> = failures.iter().map(|f| f.node).collect();
            failures.extend(hopeless.into_iter().filter(|f| !told.contains(&f.node)));
            failures.truncate(MAX_FAILURES);
            return self.release(&failures, &Values::new());
        }
        let Some(merged) = self.step.complete(self.node, self.children.keys().copied()) else {
            return;
        };
        if !self.is_root() {
            let step = self.step.number();
            return self.send_up(&Up::Arrive {
                step,
                contribution: merged,
            });
        }
        // That of a fixed set has all of it.
        let expected = 1 + self.registry.values().filter(|r| r.attached).count() as u64;
        let nodes = merged.nodes;
        let (mut failures, values) = decide(merged);
        if failures.is_empty() && nodes != expected {
            failures.push(Failed {
                node: 0,
                kind: FailureKind::Absent,
                reason: format!("{nodes} of {expected} nodes took part: some were just being connected"),
            });
        }
        self.release(&failures, &values);
    }

    fn release(&mut self, failures: &[Failed], values: &Values) {
        let step = self.step.number();
        if !failures.is_empty() {
            self.failed = (step, failures.to_vec());
        }
        for (who, values) in self.step.release(values) {
            let released = (step, failures.to_vec(), values);
            match who {
                Who::Own => {
                    let _ = self.releases.send(released);
                    self.bell.ring();
                }
                Who::Child(node) => {
                    let (step, failures, values) = released.clone();
                    self.send_down(node, &Down::Release { step, failures, values });
                    if let Some(child) = self.children.get_mut(&node) {
                        child.released = Some(released);
                    }
                }
            }
        }
    }

    /// A child has arrived at a step that is over: it was not connected at that time, or has not heard the release.
    fn release_late(&mut self, node: u64, step: u64) {
        let heard = self
            .children
            .get(&node)
            .and_then(|c| c.released.clone())
            .filter(|r| r.0 == step);
        let (step, failures, values) = heard.unwrap_or_else(|| {
            if self.failed.0 == step {
                return (step, self.failed.1.clone(), Values::new());
            }
            let failure = Failed {
                node,
                kind: FailureKind::Absent,
                reason: "the step ended while this node was not connected".into(),
            };
            (step, vec![failure], Values::new())
        });
        self.send_down(node, &Down::Release { step, failures, values });
    }

    /// Says farewell.
    fn leave(&mut self) {
        let (node, status) = (self.node, self.status);
        self.send_up(&Up::Left { node, status });
        if let Some(link) = self.above.as_mut().and_then(|a| a.link.as_mut()) {
            let until = Instant::now() + Duration::from_secs(1);
            while link.interest() & libc::POLLOUT != 0 && Instant::now() < until {
                if link.wait(Duration::from_millis(100)).is_err() || link.flush().is_err() {
                    return;
                }
            }
        }
    }
}
