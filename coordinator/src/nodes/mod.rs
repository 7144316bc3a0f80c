//! A job on several hosts: its agents form a tree (`belay-tree`).
//!
//! ```text
//! mpirun ── stand-in for ssh ┄┄ asks ┄┄> agent of the root ── ssh HOST belay agent ┄┄> agent on HOST ── sh -c 'orted ...'
//! ```
//! The agent of a further host, a *part*, is a whole agent with a job directory of its own, `DIR/nodes/TAG`; it takes
//! checkpoints when the root orders one, together with all others. A generation of the job is the root's own generation
//! with a list of the parts, each of which has a generation with the same number.

pub(crate) mod addresses;
pub mod again;
pub mod alive;
pub mod allocation;
pub(crate) mod gathering;
pub(crate) mod helper;
pub mod hosts;
pub(crate) mod listening;
pub(crate) mod meeting;
mod names;
pub(crate) mod path;
pub(crate) mod prefix;
pub(crate) mod remote;
pub(crate) mod seat;
pub(crate) mod srun;
pub mod standin;
pub mod step;
pub(crate) mod table;

pub use seat::part_dir;
pub use table::parts_of;

use crate::jobdir::{Description, JobDir};
use crate::shell::text;
use crate::{config, sys, Failure};
use belay_kernel::{pidfd, proc};
use belay_plugins::mpi::DAEMONS;
use belay_restart::Shell;
use belay_storage::store::Host;
use belay_tree::{JobKey, Joining, Tree, TreeError};
use belay_wire::Exit;
use path::STANDINS;
use remote::{Life, Remote};
use seat::{name_here, node_of_slurm, Seat, PARTS};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use table::Row;

/// The number of no process.
const NOBODY: i32 = 0;

/// Whether `program` is a daemon that an MPI launcher starts on another host. What an MPI plugin of `srun` offers it it
/// leaves alone.
pub fn is_daemon(program: &Path) -> bool {
    program.file_name().is_some_and(|name| DAEMONS.iter().any(|d| name == *d))
}

/// What leads to the parts of the job from this node.
#[derive(Debug, Default)]
pub(crate) struct Ways {
    /// Processes that are no part of the job.
    pub(crate) outside: Vec<i32>,
    /// At the root: the stand-ins for them in the job.
    pub(crate) standins: Option<Vec<i32>>,
}

/// What the root orders all parts to do.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub(crate) enum Order {
    /// Take part in checkpoint `number`, whose steps follow `base`.
    Checkpoint {
        number: u64,
        base: u64,
        then_stop: bool,
        save_open_files: config::SavedFiles,
        #[serde(default = "crate::description::yes")]
        save_code: bool,
        keep: u32,
        /// Generations that the root copies to durable tiers: they stay.
        pinned: Vec<u64>,
        /// Tell the root the numbers of this part.
        tell: bool,
        /// The generation from which the job was restarted last; 0 since the launch.
        #[serde(default)]
        era: u64,
        /// Libraries are asked to come to rest first, and have so many milliseconds for that.
        #[serde(default)]
        gate_ms: Option<u64>,
        /// Programs are asked to record what they do to their datasets,
        #[serde(default)]
        declared: bool,
        /// and what they overwrite before they read it is not stored.
        #[serde(default)]
        leave_out: bool,
        /// Something that has been stored is damaged: nothing is shared with earlier checkpoints.
        #[serde(default)]
        anew: bool,
    },
    /// Take a share in making checkpoint `number` redundant; the round is led at one of `root`. Until it is, the newest
    /// that is stays.
    Encode {
        number: u64,
        root: Vec<String>,
        redundant: Option<u64>,
    },
    /// Copy checkpoint `number` to the durable tiers, as is asked for at one of `root`.
    Flush { number: u64, root: Vec<String> },
    /// Tell the root which processes this part has.
    Describe { question: u64 },
    /// The user has ended the job: what an agent leaves that is killed goes on.
    NotRestarted,
    /// End the program.
    End { grace_ms: u64 },
}

/// How far a checkpoint of all nodes has come at this one, after its capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// This node writes its part.
    Writing,
    /// It has written, or could not, and waits for the others.
    Written,
    /// The root has committed, or could not, and tells the others.
    Committed,
}

/// A checkpoint of all nodes after its capture.
#[derive(Debug)]
pub(crate) struct Together {
    pub(crate) base: u64,
    pub(crate) number: u64,
    pub(crate) then_stop: bool,
    /// The root tells numbers about the job, those of the parts among them.
    pub(crate) tell: bool,
    pub(crate) stage: Stage,
    /// At a part: what it has committed for itself, and the processes that must not run past the checkpoint.
    pub(crate) own: Option<(crate::checkpoint::Committed, Option<belay_capture::Held>)>,
}

/// The other nodes, as an agent knows them.
#[derive(Debug)]
pub struct Nodes {
    joining: Option<Joining>,
    tree: Option<Tree>,
    /// At the root: the parts, by tag.
    pub(crate) remotes: BTreeMap<u64, Remote>,
    /// At the root: nodes that have joined and neither left nor been lost, and their hosts.
    pub(crate) there: BTreeMap<u64, String>,
    pub(crate) together: Option<Together>,
    /// The loss of a part ends the job, which is restarted: parts must not outlive their root.
    pub(crate) restarts: bool,
    /// At a part: generations of its own of which it has not heard whether the root has committed them.
    pub(crate) doubtful: Vec<u64>,
    key: PathBuf,
    /// Made of the key.
    job: u64,
    pub(crate) part: Option<u64>,
    /// At a part: what the remote shell was told to reach its host.
    called: Option<String>,
    /// Remote shells that have started parts for a restart.
    pub(crate) starters: Vec<Starter>,
    /// At the root: where it may listen.
    listen: Vec<String>,
    /// It does so wherever it may.
    listens_widely: bool,
}

/// A remote shell that has started parts for a restart.
#[derive(Debug)]
pub(crate) struct Starter {
    pub(super) host: String,
    pub(super) shell: Child,
    /// Readable when it has ended.
    pub(super) gone: OwnedFd,
    /// The process of the job that stands in for it.
    pub(crate) standin: i32,
    /// The exit status with which that ends, once the shell has: then all that the parts have printed is there. None
    /// while nothing is known that ends it.
    pub(super) farewell: Option<i32>,
}

impl Starter {
    /// What has just been started, for `standin`, on `host`.
    pub(super) fn of(shell: Child, standin: i32, host: String) -> Result<Self, Failure> {
        let gone = pidfd::open(shell.id().cast_signed());
        Ok(Self {
            host,
            gone: gone.map_err(|e| Failure::system("watch a remote shell", &e))?,
            shell,
            standin,
            farewell: None,
        })
    }

    fn shell(&self) -> Shell {
        Shell {
            pid: self.shell.id().cast_signed(),
            standin: self.standin,
        }
    }
}

/// The directory of the job of which `dir` is that of a part, or the job's own.
pub(crate) fn job_of<'a>(nodes: Option<&Nodes>, dir: &'a Path) -> &'a Path {
    let parts = nodes.filter(|n| n.is_part()).and_then(|_| dir.parent());
    parts.and_then(Path::parent).unwrap_or(dir)
}

/// Which part of the job an agent serves, and where; none for a job that has one host.
pub(crate) fn seat(nodes: Option<&Nodes>, d: &Description) -> Option<Seat> {
    let part = nodes.and_then(|n| Some((n.part?, n.called.clone())));
    let (tag, called) = part.or(d.across_hosts.then_some((0, None)))?;
    let (name, called) = (sys::host(), called.or_else(node_of_slurm));
    Some(Seat {
        tag,
        host: Host { name, called },
    })
}

fn failure(e: TreeError) -> Failure {
    let exit = match &e {
        TreeError::Key { .. } => Exit::Io,
        TreeError::System(..) | TreeError::Join(..) => Exit::System,
        TreeError::Absent(..) => Exit::RestartFailed,
    };
    Failure::new(exit, e.to_string())
}

impl Nodes {
    /// The parts of the job now.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let rows = self.remotes.iter().filter(|(_, r)| !r.is_over());
        rows.map(|(tag, r)| Row {
            tag: *tag,
            words: r.words.clone(),
            // A part may go on when its remote shell has ended, and the number be another process's by then.
            standin: if r.has_standin() { r.standin } else { NOBODY },
            first: r.first,
            share: None,
            on: r.node().and_then(|n| self.there.get(&n)).cloned().unwrap_or_default(),
        })
        .collect()
    }

    pub(crate) fn new(joining: Joining, key: PathBuf, part: Option<u64>) -> Self {
        Self {
            joining: Some(joining),
            tree: None,
            remotes: BTreeMap::new(),
            there: BTreeMap::new(),
            together: None,
            restarts: false,
            doubtful: Vec::new(),
            // Whoever is here has read it.
            job: JobKey::read(&key).map_or(0, |k| k.mark()),
            key,
            part,
            called: None,
            starters: Vec::new(),
            listen: Vec::new(),
            listens_widely: false,
        }
    }

    /// The root of a job that may get parts on other hosts, in a tree as configured: makes the job key and the
    /// stand-ins for remote shells.
    pub fn root(dir: &JobDir, config: &config::Tree) -> Result<Self, Failure> {
        for old in [&dir.path().join(PARTS), &dir.path().join(STANDINS)] {
            match std::fs::remove_dir_all(old) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Failure::io(format!("remove {}", old.display()), &e));
                }
                _ => {}
            }
        }
        let key = Self::furnish(dir)?;
        Self::root_of(key, config)
    }

    /// Refuses a job directory of which remote shells cannot be told, or where stand-ins for them cannot be found.
    pub fn check_place(dir: &Path) -> Result<(), Failure> {
        let dir = std::path::absolute(dir).map_err(|e| Failure::io(format!("find {}", dir.display()), &e))?;
        let me = belay_kernel::proc::own_program().map_err(|e| Failure::system("find belay", &e))?;
        text(&me)?;
        let why = match dir.to_str() {
            None => "its path is no UTF-8, and remote shells are told of it",
            Some(path) if path.contains(':') => "there is a colon in its path, which the job's PATH begins with",
            Some(_) => return Ok(()),
        };
        let what = format!(
            "job directory {dir:?} cannot be that of a job --across-hosts: {why}; name another with --ckpt-dir, or rename it"
        );
        Err(Failure::new(Exit::Usage, what))
    }

    /// Puts into a job directory what a job needs that may get parts: the job key, whose path is returned, and
    /// stand-ins for remote shells.
    pub(crate) fn furnish(dir: &JobDir) -> Result<PathBuf, Failure> {
        let key = dir.path().join("key");
        if !key.exists() {
            let new = JobKey::random().map_err(|e| Failure::system("make the job key", &e))?;
            new.write(&key).map_err(failure)?;
        }
        standin::install(dir)?;
        Ok(key)
    }

    /// The root of a tree, which listens nowhere until parts are started.
    fn root_of(key: PathBuf, config: &config::Tree) -> Result<Self, Failure> {
        let joining = JobKey::read(&key)
            .and_then(|key| Joining::root_at(key, config.fan_out(), name_here(), &[]))
            .map_err(failure)?;
        Ok(Self {
            listen: config.listen().to_vec(),
            ..Self::new(joining, key, None)
        })
    }

    /// A part on this host, which the root has `called` so: joins the tree whose root listens at one of `root`.
    pub fn part(key: &Path, root: &[String], tag: u64, called: Option<String>) -> Result<Self, Failure> {
        let joining = JobKey::read(key)
            .and_then(|key| Joining::connect(key, root, name_here(), tag, 0))
            .map_err(failure)?;
        Ok(Self {
            called,
            ..Self::new(joining, key.to_owned(), Some(tag))
        })
    }

    pub(crate) fn joining(&mut self) -> Option<Joining> {
        self.joining.take()
    }

    pub(crate) fn rejoin(&mut self, joining: Joining) {
        self.joining = Some(joining);
    }

    /// Begins to attend to the connections, when the agent will not fork any more.
    pub(crate) fn start(&mut self) -> Result<(), Failure> {
        if let Some(joining) = self.joining.take() {
            self.tree = Some(joining.start().map_err(failure)?);
        }
        Ok(())
    }

    /// After a restart: which processes the stand-ins are.
    pub(crate) fn know_standins(&mut self) {
        for r in self.remotes.values_mut() {
            r.born = r.born.or_else(|| proc::born(r.standin));
        }
    }

    pub(crate) fn tree(&self) -> Option<&Tree> {
        self.tree.as_ref()
    }

    /// Remote shells that have started parts for a restart, and who stands in for each.
    pub(crate) fn shells(&self) -> Vec<Shell> {
        self.starters.iter().map(Starter::shell).collect()
    }

    /// All parts of stand-in `standin` have ended, and it is to end with `code`. Who has started them for a restart may
    /// be about to print what they have printed last.
    pub(crate) fn part_with(&mut self, standin: i32, code: i32) {
        match self.starters.iter_mut().find(|s| s.standin == standin) {
            Some(starter) => starter.farewell = Some(code),
            None => remote::end_standin(standin, code),
        }
    }

    /// The shell of stand-in `standin` is to get `signal`, if it was started for a restart, and may end by that.
    pub(crate) fn signal_starter(&mut self, standin: i32, signal: i32) -> Option<Shell> {
        let starter = self.starters.iter_mut().find(|s| s.standin == standin)?;
        starter.farewell.get_or_insert(128 + signal);
        Some(starter.shell())
    }

    /// Readable when a remote shell has ended whose stand-in waits for that.
    pub(crate) fn parting(&self) -> Vec<RawFd> {
        let waited = self.starters.iter().filter(|s| s.farewell.is_some());
        waited.map(|s| s.gone.as_raw_fd()).collect()
    }

    /// The remote shell behind `gone` has ended.
    pub(crate) fn parted(&mut self, gone: RawFd) {
        let Some(at) = self.starters.iter().position(|s| s.gone.as_raw_fd() == gone) else {
            return;
        };
        let starter = self.starters.swap_remove(at);
        let mut its: Vec<&mut Remote> = self.remotes.values_mut().filter(|r| r.standin == starter.standin).collect();
        if let (Some(code), true) = (starter.farewell, its.iter().any(|r| r.has_standin())) {
            remote::end_standin(starter.standin, code);
            // Where a signal has ended the shell they may go on, as after a launch.
            let parts = its.iter_mut().filter(|r| r.life != Life::Lost);
            parts.for_each(|r| r.life = Life::Over);
        }
    }

    /// Whether parts can be started: the tree is there or about to be.
    pub(crate) fn joins_by_itself(&self) -> bool {
        self.joining.is_some() || self.tree.is_some()
    }

    pub(crate) fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// Whether a checkpoint needs other nodes.
    pub(crate) fn has_others(&self) -> bool {
        self.remotes.values().any(|r| !r.is_over())
    }

    /// Whether a part is there.
    pub(crate) fn is_there(&self, remote: &Remote) -> bool {
        matches!(remote.life, Life::Joined(node) if self.there.contains_key(&node))
    }

    /// What the next part is called.
    pub(crate) fn next_tag(&self) -> u64 {
        self.remotes.keys().last().map_or(1, |t| t + 1)
    }

    /// The stand-ins for the remote shells.
    pub(crate) fn standins(&self) -> Vec<i32> {
        // One that has only asked for something yet is about to start a part.
        let there = self
            .remotes
            .values()
            .filter(|r| r.has_standin() && !r.words.command.is_empty());
        there.map(|r| r.standin).collect()
    }

    /// Those of them whose parts have all ended: they end when their shells have.
    pub(crate) fn parting_standins(&self) -> Vec<i32> {
        let live: BTreeSet<i32> = self.remotes.values().filter(|r| !r.is_over()).map(|r| r.standin).collect();
        let over = self.remotes.values().filter(|r| r.is_over() && !live.contains(&r.standin));
        over.filter(|r| !r.words.command.is_empty() && r.has_standin())
            .map(|r| r.standin)
            .collect()
    }

    /// What leads to parts.
    pub(crate) fn ways(&self) -> Ways {
        // A stand-in whose parts have ended would wait for ever after a restart: nobody would start them again.
        let parting = self.parting_standins();
        let known = || self.standins().into_iter().filter(|s| !parting.contains(s)).collect();
        Ways {
            outside: self.outside(),
            standins: (!self.is_part()).then(known),
        }
    }

    /// Processes that lead to parts.
    pub(crate) fn outside(&self) -> Vec<i32> {
        self.remotes.values().filter_map(Remote::shell).collect()
    }

    pub(crate) fn key(&self) -> &Path {
        &self.key
    }

    pub(crate) fn job(&self) -> u64 {
        self.job
    }

    /// Where the root listens, for parts.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let joining = self.joining.as_ref().map(Joining::addresses);
        joining
            .or_else(|| self.tree.as_ref().map(Tree::addresses))
            .unwrap_or_default()
    }
}

impl AsRawFd for Nodes {
    fn as_raw_fd(&self) -> RawFd {
        self.tree.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }
}
