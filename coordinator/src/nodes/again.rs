//! The nodes of a job that restarts: the root starts the parts, all meet while they rebuild, and go on together.

use super::alive::hosts_of;
use super::remote::{Life, Remote, RemoteShell};
use super::seat::PARTS;
use super::table::Row;
use super::{failure, gathering, Nodes, Starter};
use crate::jobdir::JobDir;
use crate::shell::{quote, text};
use crate::{config, Failure};
use belay_plugins::{Brought, Facts, Group};
use belay_tree::{Contribution, Event, Joining};
use belay_wire::Exit;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a part may take to come.
const LIMIT: Duration = Duration::from_secs(60);
/// How long it waits for one of before, on a host that is lost: a shared file system keeps locks of such hosts for a
/// while (NFSv4: 90 s).
pub const LOCK_LIMIT: Duration = Duration::from_secs(150);
/// The same where somebody is waiting for the restart: an agent notices within 11 s that its root's host is gone.
pub const LOCK_LIMIT_BY_HAND: Duration = Duration::from_secs(20);

/// The command line, for the shell of another host, that makes it a part of the job in `dir`; one that several tasks of
/// an `srun` execute has a tag for each.
pub(crate) fn agent_command(dir: &Path, nodes: &Nodes, tags: &[u64], words: &RemoteShell, then: &str) -> Result<String, Failure> {
    let me = belay_kernel::proc::own_program().map_err(|e| Failure::system("find belay", &e))?;
    let (me, parts, key) = (quote(text(&me)?), quote(text(&dir.join(PARTS))?), quote(text(nodes.key())?));
    let (before, tag) = match tags {
        [tag] => (String::new(), tag.to_string()),
        several => {
            let each: Vec<String> = several.iter().map(u64::to_string).collect();
            (format!("set -- {}; shift $SLURM_PROCID; ", each.join(" ")), "$1".into())
        }
    };
    let join = quote(&nodes.addresses().join(","));
    // An srun may have chosen among several.
    let called = match words.tasks {
        0 => format!(" --called {}", quote(&words.host)),
        _ => String::new(),
    };
    let end = if nodes.restarts { " --ends-with-root" } else { "" };
    Ok(format!(
        "{before}exec {me} agent --dir {parts}/{tag} --key {key} --tag {tag} --join {join}{called}{end} {then}"
    ))
}

/// Why a restart is given up to whose root, at one of `addresses`, not all parts have come.
fn absent(remotes: &BTreeMap<u64, Remote>, addresses: &[String], limit: Duration) -> Failure {
    let missing = || remotes.values().filter(|r| r.life == Life::Starting);
    let hosts: BTreeSet<&str> = missing().map(|r| r.words.host.as_str()).collect();
    Failure::new(
        Exit::RestartFailed,
        format!(
            "{} of {} parts of the job have not joined within {} s, on {}: see whether belay runs there and reaches this host at {} (a firewall?), or restart on other hosts (--hosts)",
            missing().count(),
            remotes.len(),
            limit.as_secs(),
            hosts.into_iter().collect::<Vec<_>>().join(", "),
            addresses.join(" or "),
        ),
    )
}

impl Nodes {
    /// Starts the parts in `rows` again, `stored` on their hosts or not, and waits until all have joined. `hosts`
    /// replaces the hosts that they had, in order; there may be fewer or more. The tree is as configured.
    pub(crate) fn restart(
        (dir, config): (&JobDir, &config::Tree),
        (rows, stored): (&[Row], bool),
        number: u64,
        (hosts, restarts): (&[String], bool),
    ) -> Result<Self, Failure> {
        let key = dir.path().join("key");
        let mut nodes = Self::root_of(key, config)?;
        nodes.listen_for_parts()?;
        nodes.restarts = restarts;
        let places = hosts_of(rows, hosts, stored);
        for (at, leader) in rows.iter().enumerate() {
            let group: Vec<(usize, &Row)> = rows.iter().enumerate().filter(|(_, r)| r.first() == leader.first()).collect();
            if group[0].0 != at {
                continue;
            }
            let tags: Vec<u64> = group.iter().map(|(_, r)| r.tag).collect();
            let places: Vec<&String> = group.iter().filter_map(|(n, _)| places[*n].as_ref()).collect();
            let mut words = leader.words.clone();
            words.elsewhere(&places, group.len());
            let command = agent_command(dir.path(), &nodes, &tags, &words, &format!("--generation {number}"))?;
            let shell = words.spawn(&command, (None, None))?;
            nodes.starters.push(Starter::of(shell, leader.standin, words.host.clone())?);
            for tag in tags {
                let remote = Remote {
                    words: words.clone(),
                    standin: leader.standin,
                    // It does not live yet.
                    born: None,
                    first: leader.tag,
                    child: None,
                    life: Life::Starting,
                    code: 0,
                };
                nodes.remotes.insert(tag, remote);
            }
        }
        match nodes.await_parts() {
            Ok(()) => {
                nodes.listen_to_parts();
                nodes.joining.iter_mut().for_each(Joining::all_joined);
                Ok(nodes)
            }
            Err(failure) => {
                nodes.give_up();
                Err(failure)
            }
        }
    }

    /// Waits until all parts have joined.
    fn await_parts(&mut self) -> Result<(), Failure> {
        let begin = Instant::now();
        while self.remotes.values().any(|r| r.life == Life::Starting) {
            let event = self.joining.as_mut().and_then(|j| j.await_event(Duration::from_millis(200)));
            match event {
                Some(Event::Joined(info)) => {
                    if let (Some(r), Some(node)) = (self.remotes.get_mut(&info.tag), info.node) {
                        r.life = Life::Joined(node);
                        self.there.insert(node, info.host);
                    }
                }
                Some(Event::Lost(node, why)) => {
                    return Err(Failure::new(
                        Exit::RestartFailed,
                        format!("node {node} was lost while it started: {why}"),
                    ));
                }
                _ => {}
            }
            for Starter { host, shell, .. } in &mut self.starters {
                if let Ok(Some(status)) = shell.try_wait() {
                    return Err(Failure::new(
                        Exit::RestartFailed,
                        format!("the part on {host} ended before the job ran ({status}); its messages are above"),
                    ));
                }
            }
            let limit = LIMIT + if self.restarts { LOCK_LIMIT } else { Duration::ZERO };
            if begin.elapsed() > limit {
                return Err(absent(&self.remotes, &self.addresses(), limit));
            }
        }
        Ok(())
    }

    /// Ends what has been started for a restart that has failed, so that another may follow: parts that lose the root
    /// end by themselves.
    pub(crate) fn give_up(mut self) {
        self.joining = None;
        let begin = Instant::now();
        for Starter { host, shell, .. } in &mut self.starters {
            while matches!(shell.try_wait(), Ok(None)) {
                if begin.elapsed() > LIMIT {
                    tracing::warn!(host, "the part does not end");
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// What this agent restarts together with others by; at a part, when all have joined.
    pub(crate) fn reunion(&mut self) -> Result<Option<Reunion>, Failure> {
        let Some(mut joining) = self.joining() else { return Ok(None) };
        if self.is_part() {
            joining.await_all(LIMIT + LOCK_LIMIT)?;
        }
        Ok(Some(Reunion {
            job: self.job,
            joining: RefCell::new(Some(joining)),
            next: Cell::new(1),
            broken: Cell::new(false),
            damage: RefCell::default(),
        }))
    }
}

/// The other nodes during a restart. The agent has no thread for them yet, because it forks.
#[derive(Debug)]
pub(crate) struct Reunion {
    job: u64,
    joining: RefCell<Option<Joining>>,
    next: Cell<u64>,
    /// A step has failed.
    broken: Cell<bool>,
    /// What others have told of damage there.
    damage: RefCell<Option<String>>,
}

impl Reunion {
    fn exchange(&self, contribution: Contribution) -> Result<Facts, String> {
        let step = self.next.replace(self.next.get() + 1);
        match self.joining.borrow_mut().as_mut() {
            Some(joining) => joining.exchange(step, contribution).map_err(|b| {
                self.broken.set(true);
                self.damage.replace(gathering::damage(&b));
                gathering::line(&b)
            }),
            None => Err("the tree has been handed over".into()),
        }
    }

    pub(crate) fn take_joining(&self) -> Option<Joining> {
        self.joining.take()
    }
}

impl Group for Reunion {
    fn meet(&self, brought: Brought) -> Result<Facts, String> {
        self.exchange(gathering::contribution(brought))
    }

    fn fail(&self, reason: &str, damaged: bool) {
        if !self.broken.replace(true) {
            let exit = if damaged { Exit::Damaged } else { Exit::RestartFailed };
            let node = self.joining.borrow().as_ref().map_or(0, Joining::node);
            // It fails, of course.
            drop(self.exchange(gathering::refusal(node, &Failure::new(exit, reason))));
        }
    }

    fn damage_elsewhere(&self) -> Option<String> {
        self.damage.borrow().clone()
    }

    fn job(&self) -> u64 {
        self.job
    }

    fn linger(&self, time: Duration) {
        let begin = Instant::now();
        if let Some(joining) = self.joining.borrow_mut().as_mut() {
            // Whatever happens there, the next meeting tells.
            while joining.await_event(time.saturating_sub(begin.elapsed())).is_some() {}
        }
        std::thread::sleep(time.saturating_sub(begin.elapsed()));
    }

    fn attend(&self) {
        self.joining.borrow_mut().iter_mut().for_each(Joining::attend);
    }

    fn leave(&self) {
        drop(self.take_joining());
    }
}

impl From<belay_tree::TreeError> for Failure {
    fn from(e: belay_tree::TreeError) -> Self {
        failure(e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_whose_parts_have_not_joined_are_named() {
        let part = |host: &str, life| Remote {
            words: RemoteShell {
                program: "ssh".into(),
                options: Vec::new(),
                host: host.into(),
                command: "orted".into(),
                tasks: 0,
            },
            standin: 9,
            born: None,
            first: 1,
            child: None,
            life,
            code: 0,
        };
        let parts = [
            ("c", Life::Starting),
            ("b", Life::Joined(1)),
            ("a", Life::Starting),
            ("c", Life::Starting),
        ];
        let remotes = (1..).zip(parts.map(|(host, life)| part(host, life))).collect();
        let at = ["10.0.0.1:99".to_owned(), "[fd00::1]:99".to_owned()];
        let told = absent(&remotes, &at, LIMIT).message;
        let named = "3 of 4 parts of the job have not joined within 60 s, on a, c: ";
        assert!(told.starts_with(named), "{told}");
        assert!(
            told.contains("10.0.0.1:99 or [fd00::1]:99") && told.contains("--hosts"),
            "{told}"
        );
    }
}
