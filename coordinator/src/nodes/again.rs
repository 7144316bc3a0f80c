//! The nodes of a job that restarts: the root starts the parts, all meet while they rebuild, and go on together.

use super::remote::{quote, Life, Remote};
use super::table::Row;
use super::{failure, Nodes};
use crate::jobdir::JobDir;
use crate::Failure;
use belay_plugins::{Facts, Group};
use belay_tree::{Contribution, Event, Joining};
use belay_wire::Exit;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a part may take to come.
const LIMIT: Duration = Duration::from_secs(60);

/// The command line, for the shell of another host, that makes it a part of the job in `dir`.
pub(crate) fn agent_command(dir: &Path, nodes: &Nodes, tag: u64, then: &str) -> Result<String, Failure> {
    let me = std::env::current_exe().map_err(|e| Failure::system("find belay", &e))?;
    let words = [
        me.display().to_string(),
        "agent".into(),
        "--dir".into(),
        part_dir(dir, tag).display().to_string(),
        "--key".into(),
        nodes.key().display().to_string(),
        "--tag".into(),
        tag.to_string(),
        "--join".into(),
        nodes.addresses().join(","),
    ];
    let words: Vec<String> = words.iter().map(|w| quote(w)).collect();
    Ok(format!("exec {} {then}", words.join(" ")))
}

/// The job directory of a part.
pub(crate) fn part_dir(dir: &Path, tag: u64) -> std::path::PathBuf {
    dir.join("nodes").join(tag.to_string())
}

impl Nodes {
    /// Starts the parts in `rows` again and waits until all have joined. `hosts` replaces the hosts that they had, in order; there may be fewer or more.
    pub(crate) fn restart(dir: &JobDir, rows: &[Row], number: u64, hosts: &[String]) -> Result<Self, Failure> {
        let key = dir.path().join("key");
        let mut nodes = Self::new(Self::root_of(&key)?, key, None);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut children = Vec::new();
        for (at, row) in rows.iter().enumerate() {
            let mut words = row.words.clone();
            if let Some(host) = super::hosts::of_part(at, rows.len(), hosts) {
                words.host.clone_from(host);
            }
            let command = agent_command(dir.path(), &nodes, row.tag, &format!("--generation {number}"))?;
            children.push((words.host.clone(), words.spawn(&command, None, &path)?));
            let remote = Remote {
                words,
                standin: row.standin,
                child: None,
                life: Life::Starting,
            };
            nodes.remotes.insert(row.tag, remote);
        }
        let begin = Instant::now();
        while nodes.remotes.values().any(|r| r.life == Life::Starting) {
            let event = nodes.joining.as_mut().and_then(|j| j.await_event(Duration::from_millis(200)));
            match event {
                Some(Event::Joined(info)) => {
                    if let (Some(r), Some(node)) = (nodes.remotes.get_mut(&info.tag), info.node) {
                        r.life = Life::Joined(node);
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
            for (host, child) in &mut children {
                if let Ok(Some(status)) = child.try_wait() {
                    return Err(Failure::new(
                        Exit::RestartFailed,
                        format!("the part on {host} ended before the job ran ({status}); its messages are above"),
                    ));
                }
            }
            if begin.elapsed() > LIMIT {
                return Err(Failure::new(Exit::RestartFailed, "not all parts of the job have joined"));
            }
        }
        Ok(nodes)
    }

    /// Whether this agent restarts together with others.
    pub(crate) fn reunion(&mut self) -> Option<Reunion> {
        let joining = self.joining()?;
        Some(Reunion {
            joining: RefCell::new(Some(joining)),
            next: Cell::new(1),
        })
    }
}

/// The other nodes during a restart. The agent has no thread for them yet, because it forks.
#[derive(Debug)]
pub(crate) struct Reunion {
    joining: RefCell<Option<Joining>>,
    next: Cell<u64>,
}

impl Reunion {
    pub(crate) fn take_joining(&self) -> Option<Joining> {
        self.joining.take()
    }
}

impl Group for Reunion {
    fn meet(&self, publish: Facts, want: BTreeSet<String>) -> Result<Facts, String> {
        let step = self.next.replace(self.next.get() + 1);
        let mut contribution = Contribution::ready();
        contribution.publish = publish;
        contribution.want = want;
        match self.joining.borrow_mut().as_mut() {
            Some(joining) => joining.exchange(step, contribution).map_err(|b| super::gathering::line(&b)),
            None => Err("the tree has been handed over".into()),
        }
    }
}

impl From<belay_tree::TreeError> for Failure {
    fn from(e: belay_tree::TreeError) -> Self {
        failure(e)
    }
}
