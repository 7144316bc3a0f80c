//! The process tree as a plan: who creates whom, in which session, and which temporary processes that takes. Pure.
//!
//! A child gets its creator's session at birth and can only leave it by `setsid`. So a child is created before or after
//! its parent's own `setsid`, whichever gives it the session it had. Where no order does, its parent is a reaper that
//! inherited it:
//! * *orphan*: a process of the session exists below the reaper; it makes a temporary process that makes the child and ends;
//! * *dead leader*: the session's leader is gone; a temporary process with its PID becomes leader and makes the child
//!   as its own sibling.
//!
//! A process group whose leader is gone gets a temporary leader too. Temporary processes end before anything of the job runs.

use belay_image::model::{AgentIdentity, Process, ProcessState};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Index of a node in [`Tree::nodes`].
pub(crate) type NodeId = usize;

/// How many processes may be made under any identifier before one is used again.
const ROOM: i32 = 200;

/// The agent's node.
pub(crate) const AGENT: NodeId = 0;

/// Why a process of the plan exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The agent.
    Agent,
    /// A process of the job, index in `Job::processes`.
    Process(usize),
    /// Leads a session or group whose leader is dead, until all have joined.
    TemporaryLeader,
    /// Makes its children and ends at once, so that they are inherited by the next reaper.
    TemporaryParent,
}

/// One process to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) pid: i32,
    pub(crate) role: Role,
    /// Whether it calls `setsid`.
    pub(crate) leads_session: bool,
    /// Its process group.
    pub(crate) pgid: i32,
    /// Leads the group of its own PID until all have joined that, and only then joins its own group.
    pub(crate) lends_group: bool,
    /// Made as a child of its creator's parent.
    pub(crate) sibling: bool,
    pub(crate) exit_signal: i32,
    /// Children made before `setsid`.
    pub(crate) before: Vec<NodeId>,
    /// Children made after it.
    pub(crate) after: Vec<NodeId>,
    sid: i32,
    creator: NodeId,
}

/// The whole plan; node 0 is the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tree {
    pub(crate) nodes: Vec<Node>,
    /// For every process of the job with its own address space: an unused identifier for each helper thread.
    pub(crate) helper_tids: Vec<i32>,
    /// What new processes get identifiers behind.
    pub(crate) last_pid: i32,
    /// The same while the job is made: what is made under any identifier then takes none of the job, nor one set aside.
    pub(crate) last_meanwhile: i32,
}

/// Why a tree cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum TreeError {
    #[error("process {pid}: its parent {ppid} is not part of the checkpoint")]
    NoParent { pid: i32, ppid: i32 },
    #[error("process {pid}: no order of fork and setsid gives it session {sid} below its parent {ppid}")]
    Session { pid: i32, ppid: i32, sid: i32 },
    #[error("process {pid}: identifier used twice, or 1, or not positive")]
    Identifier { pid: i32 },
    #[error(
        "process {pid}: it shares its memory or descriptors with process {first}, which no order of fork and setsid lets make it"
    )]
    Shared { pid: i32, first: i32 },
    #[error("no identifier below {pid_max} is left for a temporary process")]
    Full { pid_max: i32 },
}

impl Tree {
    /// Whether node `id` or one that it descends from shares its maker's memory. What the C library registers with the
    /// kernel for its threads is lost there, and below.
    pub(crate) fn is_below_guest(&self, id: NodeId, processes: &[Process]) -> bool {
        let mut at = id;
        while at != AGENT {
            let Some(node) = self.nodes.get(at) else { return false };
            if matches!(node.role, Role::Process(i) if processes.get(i).is_some_and(shares_memory)) {
                return true;
            }
            at = node.creator;
        }
        false
    }
}

/// Plans the tree of `processes` below `agent`. `helpers` unused identifiers are set aside as well. Those in `taken`
/// belong to others. `last` is the one that was given last before the checkpoint: numbers up to it may have belonged to
/// processes that have ended, whom others remember. Those in `beside` have their descriptor table from that process, which
/// is not their parent.
pub(crate) fn plan(
    agent: &AgentIdentity,
    processes: &[Process],
    helpers: usize,
    (pid_max, last): (i32, Option<i32>),
    taken: &BTreeSet<i32>,
    beside: &HashMap<i32, i32>,
) -> Result<Tree, TreeError> {
    let mut p = Planner::new(agent, processes, (pid_max, last))?;
    p.used.extend(taken);
    p.beside.extend(beside);
    let mut order: Vec<usize> = (0..processes.len()).collect();
    order.sort_by_key(|i| p.depth(*i));
    p.births(&order);
    for i in order {
        p.place(i)?;
    }
    p.group_leaders()?;
    p.check_makers()?;
    let helper_tids = (0..helpers).map(|_| p.unused()).collect::<Result<_, _>>()?;
    Ok(Tree {
        helper_tids,
        last_pid: p.last_pid,
        last_meanwhile: p.before_unused(),
        nodes: p.nodes,
    })
}

/// The first of those that share memory with `p`.
fn group(p: &Process) -> i32 {
    if p.shares_mm_with == 0 {
        p.pid
    } else {
        p.shares_mm_with
    }
}

struct Planner<'a> {
    processes: &'a [Process],
    by_pid: HashMap<i32, usize>,
    agent: AgentIdentity,
    nodes: Vec<Node>,
    /// Node of each process, once placed.
    placed: HashMap<i32, NodeId>,
    /// Session a leader must be born in, because of children older than its `setsid`.
    born: BTreeMap<i32, i32>,
    dead_leaders: HashMap<(i32, i32), NodeId>,
    /// Who makes a process that is not its child.
    beside: HashMap<i32, i32>,
    used: BTreeSet<i32>,
    next: i32,
    pid_max: i32,
    last_pid: i32,
    /// Number of calls of `place` that found work; bounds its recursion.
    placing: usize,
}

impl<'a> Planner<'a> {
    fn new(agent: &AgentIdentity, processes: &'a [Process], (pid_max, last): (i32, Option<i32>)) -> Result<Self, TreeError> {
        let mut used = BTreeSet::from([1, agent.pid]);
        let mut by_pid = HashMap::new();
        for (i, p) in processes.iter().enumerate() {
            let tids = p.threads.iter().map(|t| t.tid).filter(|t| *t != p.pid);
            for id in std::iter::once(p.pid).chain(tids) {
                if id < 2 || !used.insert(id) {
                    return Err(TreeError::Identifier { pid: id });
                }
            }
            by_pid.insert(p.pid, i);
        }
        let largest = used.iter().next_back().copied().unwrap_or(1);
        let last_pid = last.filter(|last| (2..pid_max).contains(last)).unwrap_or(largest);
        for p in processes {
            used.extend([p.sid, p.pgid]);
        }
        used.extend([agent.sid, agent.pgid]);
        for p in processes {
            if p.ppid != agent.pid && !by_pid.contains_key(&p.ppid) {
                return Err(TreeError::NoParent {
                    pid: p.pid,
                    ppid: p.ppid,
                });
            }
        }
        let root = Node {
            pid: agent.pid,
            role: Role::Agent,
            leads_session: false,
            pgid: agent.pgid,
            lends_group: false,
            sibling: false,
            exit_signal: libc::SIGCHLD,
            before: Vec::new(),
            after: Vec::new(),
            sid: agent.sid,
            creator: AGENT,
        };
        Ok(Self {
            processes,
            by_pid,
            agent: *agent,
            nodes: vec![root],
            placed: HashMap::from([(agent.pid, AGENT)]),
            born: BTreeMap::new(),
            dead_leaders: HashMap::new(),
            next: last_pid,
            beside: HashMap::new(),
            used,
            pid_max,
            last_pid,
            placing: 0,
        })
    }

    fn process(&self, pid: i32) -> Option<&'a Process> {
        self.by_pid.get(&pid).map(|i| &self.processes[*i])
    }

    fn depth(&self, i: usize) -> usize {
        let mut at = &self.processes[i];
        for depth in 0..=self.processes.len() {
            match self.process(at.ppid) {
                Some(up) => at = up,
                None => return depth,
            }
        }
        self.processes.len() // a cycle; `place` refuses it
    }

    fn sid_of(&self, pid: i32) -> Option<i32> {
        if pid == self.agent.pid {
            return Some(self.agent.sid);
        }
        self.process(pid).map(|p| p.sid)
    }

    fn is_reaper(&self, pid: i32) -> bool {
        pid == self.agent.pid || self.process(pid).is_some_and(|p| p.prctl.child_subreaper)
    }

    /// Ancestors of `pid`, nearest first, the agent last.
    fn ancestors(&self, pid: i32) -> Vec<i32> {
        let mut out = Vec::new();
        let mut at = pid;
        while let Some(p) = self.process(at) {
            at = p.ppid;
            if out.len() > self.processes.len() {
                break;
            }
            out.push(at);
        }
        out
    }

    /// A process of session `sid` whose orphans go to `reaper`: the leader, or one that has its session already.
    fn host(&self, sid: i32, reaper: i32, except: i32) -> Option<i32> {
        let qualifies = |pid: i32| {
            let above = self.ancestors(pid);
            let heir = above.iter().copied().find(|a| self.is_reaper(*a));
            pid != except && !self.is_reaper(pid) && heir == Some(reaper) && !above.contains(&except)
        };
        let placed = || {
            self.processes
                .iter()
                .filter(|p| p.sid == sid && self.placed.contains_key(&p.pid))
        };
        let leader = self.process(sid).map(|p| p.pid).filter(|pid| qualifies(*pid));
        leader.or_else(|| placed().map(|p| p.pid).find(|pid| qualifies(*pid)))
    }

    /// The session process `p` must be born in; `None` when any will do.
    fn birth(&self, p: &Process) -> Option<i32> {
        if p.sid != p.pid {
            return Some(p.sid);
        }
        self.born.get(&p.pid).copied()
    }

    /// Works out, from the leaves up, which leaders had children before their `setsid`.
    fn births(&mut self, order: &[usize]) {
        for i in order.iter().rev() {
            let p = &self.processes[*i];
            let Some(birth) = self.birth(p) else { continue };
            let Some(parent) = self.process(p.ppid) else { continue };
            if birth == parent.sid || parent.sid != parent.pid {
                continue;
            }
            let inherited = self.is_reaper(parent.pid) && self.host(birth, parent.pid, p.pid).is_some();
            // Seen outside the parent's descendants, the session is older than the parent's own; else the parent, a
            // reaper, has inherited all of it.
            let below = |q: &Process| self.ancestors(q.pid).contains(&parent.pid);
            let outside = birth == self.agent.sid || self.processes.iter().any(|q| q.sid == birth && !below(q));
            if !inherited && (outside || !self.is_reaper(parent.pid)) {
                self.born.insert(parent.pid, birth);
            }
        }
    }

    fn place(&mut self, i: usize) -> Result<(), TreeError> {
        let p = &self.processes[i];
        let refuse = TreeError::Session {
            pid: p.pid,
            ppid: p.ppid,
            sid: p.sid,
        };
        if self.placed.contains_key(&p.pid) {
            return Ok(());
        }
        self.placing += 1;
        if self.placing > 2 * self.processes.len() {
            return Err(refuse); // its parent is below itself
        }
        if let Some(parent) = self.by_pid.get(&p.ppid) {
            self.place(*parent)?;
        }
        let beside = match shares_memory(p) {
            true => self
                .process(p.ppid)
                .is_none_or(|parent| group(parent) != group(p))
                .then_some(p.shares_mm_with),
            false => self.beside.get(&p.pid).copied(),
        };
        if let Some(maker) = beside {
            return self.make_beside(p, i, maker);
        }
        let birth = self.birth(p);
        let parent_sid = self.sid_of(p.ppid);
        let parent_born = self.process(p.ppid).and_then(|q| self.birth(q));
        let parent = self.placed.get(&p.ppid).copied();
        if birth.is_none() || birth == parent_sid {
            let parent = parent.ok_or(refuse)?;
            let id = self.add(self.node(p, i, parent));
            self.nodes[parent].after.push(id);
            return Ok(());
        }
        if birth == parent_born {
            let parent = parent.ok_or(refuse)?;
            let id = self.add(self.node(p, i, parent));
            self.nodes[parent].before.push(id);
            return Ok(());
        }
        let birth = birth.unwrap_or_default();
        if !self.is_reaper(p.ppid) {
            return Err(refuse);
        }
        if let Some(leader) = self.dead_leaders.get(&(birth, p.ppid)).copied() {
            return self.sibling(p, i, leader);
        }
        if let Some(host) = self.host(birth, p.ppid, p.pid) {
            self.place(self.by_pid[&host])?;
            return self.orphan(p, i, self.placed[&host]);
        }
        self.below_dead_leader(p, i, birth, parent.ok_or(refuse)?)
    }

    /// Makes a process that shares its memory, or its descriptors, with `first`, but not with its parent.
    fn make_beside(&mut self, p: &Process, i: usize, first: i32) -> Result<(), TreeError> {
        let pid = p.pid;
        let at = *self.by_pid.get(&first).ok_or(TreeError::Shared { pid, first })?;
        self.place(at)?;
        let maker = *self.placed.get(&first).ok_or(TreeError::Shared { pid, first })?;
        if self.birth(p).is_some_and(|sid| sid != self.nodes[maker].sid) || self.processes[at].ppid != p.ppid {
            return Err(TreeError::Shared { pid, first });
        }
        self.sibling(p, i, maker)
    }

    /// Memory can be shared only with the maker, and as its child or as its sibling.
    fn check_makers(&self) -> Result<(), TreeError> {
        for node in &self.nodes {
            let Role::Process(i) = node.role else { continue };
            let p = &self.processes[i];
            let maker = &self.nodes[node.creator];
            let fits = match maker.role {
                Role::Process(m) => {
                    let maker = &self.processes[m];
                    let parent = if node.sibling { maker.ppid } else { maker.pid };
                    is_live(maker) && group(maker) == group(p) && parent == p.ppid
                }
                _ => false,
            };
            if shares_memory(p) && !fits {
                return Err(TreeError::Shared {
                    pid: p.pid,
                    first: p.shares_mm_with,
                });
            }
        }
        Ok(())
    }

    fn orphan(&mut self, p: &Process, i: usize, host: NodeId) -> Result<(), TreeError> {
        let pid = self.unused()?;
        let temporary = Node {
            pid,
            role: Role::TemporaryParent,
            leads_session: false,
            pgid: 0,
            lends_group: false,
            sibling: false,
            exit_signal: 0,
            before: Vec::new(),
            after: Vec::new(),
            sid: self.nodes[host].sid,
            creator: host,
        };
        let parent = self.add(temporary);
        self.nodes[host].after.push(parent);
        let id = self.add(self.node(p, i, parent));
        self.nodes[parent].after.push(id);
        Ok(())
    }

    fn below_dead_leader(&mut self, p: &Process, i: usize, sid: i32, parent: NodeId) -> Result<(), TreeError> {
        let taken = self.by_pid.contains_key(&sid) || self.dead_leaders.keys().any(|(s, _)| *s == sid);
        if taken || sid < 2 {
            return Err(TreeError::Session {
                pid: p.pid,
                ppid: p.ppid,
                sid,
            });
        }
        let leader = self.temporary_leader(sid, sid, parent, true);
        self.dead_leaders.insert((sid, p.ppid), leader);
        self.sibling(p, i, leader)
    }

    fn sibling(&mut self, p: &Process, i: usize, leader: NodeId) -> Result<(), TreeError> {
        let mut node = self.node(p, i, leader);
        node.sibling = true;
        let id = self.add(node);
        self.nodes[leader].after.push(id);
        Ok(())
    }

    fn temporary_leader(&mut self, pid: i32, sid: i32, creator: NodeId, leads_session: bool) -> NodeId {
        let id = self.add(Node {
            pid,
            role: Role::TemporaryLeader,
            leads_session,
            pgid: pid,
            lends_group: false,
            sibling: false,
            exit_signal: libc::SIGCHLD, // what its siblings inherit
            before: Vec::new(),
            after: Vec::new(),
            sid,
            creator,
        });
        self.nodes[creator].after.push(id);
        id
    }

    /// Gives every group whose leader is gone a temporary one, made by a member of the group's session.
    fn group_leaders(&mut self) -> Result<(), TreeError> {
        let mut groups = BTreeMap::new();
        for p in self.processes {
            if p.pgid > 1 && p.pgid != self.agent.pgid {
                groups.entry(p.pgid).or_insert(p);
            }
        }
        for (pgid, member) in groups {
            if self.nodes.iter().any(|n| n.pid == pgid && n.pgid == pgid) {
                continue;
            }
            if let Some(id) = self.placed.get(&pgid) {
                self.nodes[*id].lends_group = true;
                continue;
            }
            let sid = member.sid;
            let in_session = |n: &Node| n.sid == sid && n.role != Role::TemporaryParent;
            let creator = (0..self.nodes.len()).find(|i| in_session(&self.nodes[*i]));
            let creator = creator.ok_or(TreeError::Session {
                pid: member.pid,
                ppid: member.ppid,
                sid,
            })?;
            self.temporary_leader(pgid, sid, creator, false);
        }
        Ok(())
    }

    fn node(&self, p: &Process, i: usize, creator: NodeId) -> Node {
        Node {
            pid: p.pid,
            role: Role::Process(i),
            leads_session: p.sid == p.pid,
            pgid: p.pgid,
            lends_group: false,
            sibling: false,
            exit_signal: p.exit_signal,
            before: Vec::new(),
            after: Vec::new(),
            sid: p.sid,
            creator,
        }
    }

    fn add(&mut self, node: Node) -> NodeId {
        self.placed.insert(node.pid, self.nodes.len());
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// The largest identifier that is used, or where there is little room above that, the last one that was set aside.
    fn before_unused(&self) -> i32 {
        let largest = self.used.iter().next_back().copied().unwrap_or(1);
        match largest < self.pid_max - ROOM {
            true => largest,
            false => self.next,
        }
    }

    fn unused(&mut self) -> Result<i32, TreeError> {
        for _ in 0..self.pid_max {
            self.next = if self.next >= self.pid_max - 1 { 300 } else { self.next + 1 };
            if self.used.insert(self.next) {
                return Ok(self.next);
            }
        }
        Err(TreeError::Full { pid_max: self.pid_max })
    }
}

/// Whether a process has no memory of its own.
pub(crate) fn shares_memory(p: &Process) -> bool {
    p.shares_mm_with != 0 && is_live(p)
}

/// Whether a process runs again after the restart.
pub(crate) fn is_live(p: &Process) -> bool {
    !matches!(p.state, ProcessState::Zombie(_))
}

#[cfg(test)]
pub(crate) mod tests;
