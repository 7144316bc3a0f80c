//! Random process histories under the kernel's rules for fork, setsid, setpgid, exit and reparenting; the plan, carried
//! out under the same rules, must end in the same tree.

use super::*;
use belay_image::name::Name;
use std::collections::BTreeMap;

const AGENT_PID: i32 = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Task {
    ppid: i32,
    pgid: i32,
    sid: i32,
    reaper: bool,
    zombie: bool,
}

/// A PID namespace.
#[derive(Debug, Clone)]
struct World(BTreeMap<i32, Task>);

impl World {
    fn new() -> Self {
        Self(BTreeMap::from([(
            AGENT_PID,
            Task {
                ppid: 1,
                pgid: 90,
                sid: 80,
                reaper: true,
                zombie: false,
            },
        )]))
    }

    fn taken(&self, pid: i32) -> bool {
        self.0.iter().any(|(p, t)| *p == pid || t.pgid == pid || t.sid == pid)
    }

    fn fork(&mut self, parent: i32, sibling: bool, pid: i32) {
        let p = self.0[&parent];
        assert!(!self.0.contains_key(&pid), "{pid} exists");
        let ppid = if sibling { p.ppid } else { parent };
        let child = Task {
            ppid,
            reaper: false,
            zombie: false,
            ..p
        };
        self.0.insert(pid, child);
    }

    fn setsid(&mut self, pid: i32) -> bool {
        if self.0.values().any(|t| t.pgid == pid) {
            return false;
        }
        let t = self.0.get_mut(&pid).unwrap();
        (t.sid, t.pgid) = (pid, pid);
        true
    }

    fn setpgid(&mut self, pid: i32, group: i32) -> bool {
        let t = self.0[&pid];
        let exists = self.0.values().any(|o| o.pgid == group && o.sid == t.sid);
        if t.sid == pid || (group != pid && !exists) {
            return false;
        }
        self.0.get_mut(&pid).unwrap().pgid = group;
        true
    }

    /// Ends; children go to the nearest living reaper above.
    fn exit(&mut self, pid: i32) {
        let mut heir = self.0[&pid].ppid;
        while heir != AGENT_PID && (!self.0[&heir].reaper || self.0[&heir].zombie) {
            heir = self.0[&heir].ppid;
        }
        for t in self.0.values_mut().filter(|t| t.ppid == pid) {
            t.ppid = heir;
        }
        self.0.get_mut(&pid).unwrap().zombie = true;
    }

    fn reap(&mut self, pid: i32) {
        self.0.remove(&pid);
    }
}

/// Deterministic pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

fn history(seed: u64) -> World {
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut w = World::new();
    let mut next = 200;
    let mut parents = Vec::new();
    w.fork(AGENT_PID, false, next);
    for _ in 0..40 + dice.roll(60) {
        let living: Vec<i32> =
            w.0.iter()
                .filter(|(p, t)| **p != AGENT_PID && !t.zombie)
                .map(|(p, _)| *p)
                .collect();
        let Some(pid) = living.get(dice.roll(living.len().max(1))).copied() else {
            break;
        };
        match dice.roll(12) {
            0..=4 => {
                next += 1;
                while w.taken(next) {
                    next += 1;
                }
                w.fork(pid, false, next);
                parents.push(pid);
            }
            5 | 6 => drop(w.setsid(pid)),
            7 => drop(w.setpgid(pid, pid)),
            8 => {
                let groups: Vec<i32> = w.0.values().map(|t| t.pgid).collect();
                w.setpgid(pid, groups[dice.roll(groups.len())]);
            }
            9 | 10 => {
                w.exit(pid);
                if dice.roll(3) > 0 || w.0[&pid].ppid == AGENT_PID {
                    w.reap(pid);
                }
            }
            _ => {
                // Early reapers only: one that became so after it had forked is refused when its session went past it.
                if !parents.contains(&pid) {
                    w.0.get_mut(&pid).unwrap().reaper = true;
                }
            }
        }
    }
    w
}

fn process(pid: i32, t: &Task) -> Process {
    Process {
        pid,
        ppid: t.ppid,
        pgid: t.pgid,
        sid: t.sid,
        tty: 0,
        started: 0,
        tty_pgrp: -1,
        state: if t.zombie {
            ProcessState::Zombie(0)
        } else {
            ProcessState::Running
        },
        stop_untold: false,
        continue_untold: false,
        exit_signal: 17,
        comm: Name::default(),
        exe: Name::default(),
        exe_identity: None,
        cwd: Name::default(),
        root: Name::default(),
        umask: 0,
        personality: 0,
        user_namespace: 0,
        pid_namespace: 0,
        ipc_namespace: 0,
        creds: Default::default(),
        rlimits: Vec::new(),
        oom_score_adj: 0,
        coredump_filter: None,
        session_nice: None,
        prctl: belay_image::model::ProcessPrctl {
            child_subreaper: t.reaper && !t.zombie,
            ..Default::default()
        },
        sigactions: Vec::new(),
        pending: Vec::new(),
        itimers: Default::default(),
        posix_timers: Vec::new(),
        membarrier: 0,
        shares_mm_with: 0,
        shares_handlers: false,
        shares_fs_with: 0,
        own_clocks: false,
        vdso_frames: Vec::new(),
        mm: Default::default(),
        segments: Vec::new(),
        keys: 0,
        left_out: None,
        datasets: Vec::new(),
        point: None,
        placements: Vec::new(),
        vmas: Vec::new(),
        rings: Vec::new(),
        threads: Vec::new(),
    }
}

/// A process that runs, a child of `ppid`.
pub(crate) fn running(pid: i32, ppid: i32) -> Process {
    let task = Task {
        ppid,
        pgid: 90,
        sid: 80,
        reaper: false,
        zombie: false,
    };
    process(pid, &task)
}

pub(crate) fn agent() -> AgentIdentity {
    AgentIdentity {
        pid: AGENT_PID,
        pgid: 90,
        sid: 80,
        tty: 0,
        started: 0,
        front: 0,
        front_started: 0,
    }
}

fn grow(w: &mut World, tree: &Tree, id: NodeId, processes: &[Process]) {
    let node = &tree.nodes[id];
    if let Role::Process(i) = node.role {
        w.0.get_mut(&node.pid).unwrap().reaper = processes[i].prctl.child_subreaper;
    }
    let make = |w: &mut World, children: &[NodeId]| {
        for c in children {
            let child = &tree.nodes[*c];
            w.fork(node.pid, child.sibling, child.pid);
            grow(w, tree, *c, processes);
            if child.role == Role::TemporaryParent {
                w.exit(child.pid);
                w.reap(child.pid);
            }
        }
    };
    make(w, &node.before);
    if node.leads_session {
        assert!(w.setsid(node.pid), "setsid {}", node.pid);
    }
    make(w, &node.after);
}

fn carry_out(tree: &Tree, processes: &[Process]) -> World {
    let mut w = World::new();
    grow(&mut w, tree, AGENT, processes);
    let nodes = || tree.nodes.iter().skip(1).filter(|n| n.role != Role::TemporaryParent);
    let leads = |n: &&Node| n.pgid == n.pid || n.lends_group;
    for n in nodes().filter(leads).filter(|n| !n.leads_session) {
        assert!(w.setpgid(n.pid, n.pid), "lead {n:?}");
    }
    for n in nodes().filter(|n| !leads(n)) {
        assert!(w.setpgid(n.pid, n.pgid), "join {n:?}");
    }
    for n in nodes().filter(|n| n.lends_group && n.pgid != n.pid) {
        assert!(w.setpgid(n.pid, n.pgid), "return {n:?}");
    }
    for n in nodes() {
        match n.role {
            Role::TemporaryLeader => {
                w.exit(n.pid);
                w.reap(n.pid);
            }
            Role::Process(i) if !is_live(&processes[i]) => w.exit(n.pid),
            _ => {}
        }
    }
    w
}

#[test]
fn every_history_is_reproduced() {
    let (mut orphans, mut leaders) = (0, 0);
    for seed in 1..3000 {
        let wanted = history(seed);
        let mut processes: Vec<Process> = wanted
            .0
            .iter()
            .filter(|(p, _)| **p != AGENT_PID)
            .map(|(p, t)| process(*p, t))
            .collect();
        let mut dice = Dice(seed);
        for i in (1..processes.len()).rev() {
            processes.swap(i, dice.roll(i + 1));
        }
        let tree = plan(&agent(), &processes, 3, (32768, None), &BTreeSet::new(), &HashMap::new()).unwrap_or_else(|e| {
            panic!(
                "seed {seed}: {e}\n{}",
                wanted.0.iter().map(|(p, t)| format!("{p} {t:?}\n")).collect::<String>()
            )
        });
        orphans += tree.nodes.iter().filter(|n| n.role == Role::TemporaryParent).count();
        leaders += tree.nodes.iter().filter(|n| n.role == Role::TemporaryLeader).count();
        let made = carry_out(&tree, &processes);
        let mut expected = wanted.clone();
        for t in expected.0.values_mut() {
            t.reaper &= !t.zombie; // a zombie's flag is gone with it; what matters is where its children went
        }
        assert_eq!(made.0, expected.0, "seed {seed}");
        assert!(tree.helper_tids.iter().all(|t| !wanted.taken(*t)));
    }
    assert!(
        orphans > 100 && leaders > 100,
        "the histories exercise both kinds of temporary process"
    );
}

#[test]
fn memory_is_made_by_one_that_shares_it() {
    let process = |pid: i32, ppid: i32, first: i32| {
        let mut p = process(
            pid,
            &Task {
                ppid,
                pgid: 90,
                sid: 80,
                reaper: false,
                zombie: false,
            },
        );
        p.shares_mm_with = first;
        p
    };
    let plan = |processes: &[Process]| plan(&agent(), processes, 0, (32768, None), &BTreeSet::new(), &HashMap::new());
    // A child, a grandchild, a sibling.
    let all = [
        process(10, AGENT_PID, 0),
        process(11, 10, 10),
        process(12, 11, 10),
        process(13, AGENT_PID, 10),
    ];
    let tree = plan(&all).unwrap();
    let maker = |pid: i32| {
        let node = tree.nodes.iter().find(|n| n.pid == pid).unwrap();
        (tree.nodes[node.creator].pid, node.sibling)
    };
    assert_eq!([11, 12, 13].map(maker), [(10, false), (11, false), (10, true)]);
    let stranger = [process(10, AGENT_PID, 0), process(20, AGENT_PID, 0), process(21, 20, 10)];
    assert_eq!(plan(&stranger).unwrap_err(), TreeError::Shared { pid: 21, first: 10 });
}

#[test]
fn numbers_begin_behind_the_last_one_that_was_given() {
    let task = Task {
        ppid: AGENT_PID,
        pgid: 90,
        sid: 80,
        reaper: false,
        zombie: false,
    };
    let one = [process(10, &task)];
    let last = |pid_max, last| {
        plan(&agent(), &one, 0, (pid_max, last), &BTreeSet::new(), &HashMap::new())
            .unwrap()
            .last_pid
    };
    assert_eq!(
        [None, Some(500), Some(3), Some(0), Some(-7)].map(|l| last(32768, l)),
        [100, 500, 3, 100, 100]
    );
    // This host has fewer.
    assert_eq!([499, 500, 501].map(|l| last(500, Some(l))), [499, 100, 100]);
}

#[test]
fn memory_is_shared_with_one_that_has_it() {
    use crate::plausible::guest;
    let process = |pid: i32, first: i32| {
        let mut p = process(
            pid,
            &Task {
                ppid: AGENT_PID,
                pgid: 90,
                sid: 80,
                reaper: false,
                zombie: pid == 15,
            },
        );
        p.shares_mm_with = first;
        p
    };
    let mut all = [(10, 0), (11, 10), (12, 11), (13, 99), (14, 14), (15, 10), (16, 15)].map(|(pid, first)| process(pid, first));
    let verdicts = all.each_ref().map(|p| guest(p, &all).is_ok());
    assert_eq!(verdicts, [true, true, false, false, false, false, false]);
    all[0].shares_handlers = true;
    assert!(guest(&all[0], &all).is_err());
}

#[test]
fn impossible_trees_are_refused() {
    let t = Task {
        ppid: AGENT_PID,
        pgid: 90,
        sid: 80,
        reaper: false,
        zombie: false,
    };
    let refused = |list: &[(i32, Task)]| {
        let processes: Vec<Process> = list.iter().map(|(p, t)| process(*p, t)).collect();
        plan(&agent(), &processes, 0, (32768, None), &BTreeSet::new(), &HashMap::new()).unwrap_err()
    };
    assert_eq!(
        refused(&[(5, Task { ppid: 77, ..t })]),
        TreeError::NoParent { pid: 5, ppid: 77 }
    );
    assert_eq!(refused(&[(5, t), (5, t)]), TreeError::Identifier { pid: 5 });
    assert_eq!(refused(&[(1, t)]), TreeError::Identifier { pid: 1 });
    // Two processes that are each other's parent.
    assert!(matches!(
        refused(&[(5, Task { ppid: 6, ..t }), (6, Task { ppid: 5, ..t })]),
        TreeError::Session { .. }
    ));
    // A child of an ordinary process in a session that nothing above it was ever in.
    assert!(matches!(
        refused(&[
            (5, t),
            (
                6,
                Task {
                    ppid: 5,
                    sid: 70,
                    pgid: 70,
                    ..t
                }
            )
        ]),
        TreeError::Session { pid: 6, .. }
    ));
}
