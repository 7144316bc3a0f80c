//! The restart flow: namespace, process tree, descriptors, memory, threads, resume, reopen.
//!
//! ```text
//! front (the user's shell sees it)
//!   └─ PID 1 of new PID, mount and IPC namespaces     init
//!        └─ agent, with the PID it had                agent
//!             └─ the job's processes, with theirs     spawn → process → restorer program → resume
//! ```
//! `verify` checks all it can before any process exists. `tree`, `layout`, `memory`, `state` and `arena` decide,
//! without side effects, what is to be done; `spawn`, `process` and the restorer do it. Nothing of the job runs before
//! all of it is there: until then any failure ends every process made, and the checkpoint stays as it was.

mod agent;
mod arch;
mod arena;
mod attributes;
mod call;
mod channel;
mod code;
mod companion;
mod connects;
mod contents;
mod control;
mod explain;
mod fail;
mod filling;
mod front;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod groups;
mod identity;
mod inherited;
mod init;
mod initial;
mod kin;
mod later;
mod layout;
mod lead;
mod leftout;
mod memory;
mod namespace;
mod pager;
mod plausible;
mod process;
mod processor;
mod remains;
mod reopen;
mod resume;
mod sched;
mod shown;
mod spawn;
mod special;
mod state;
mod sys;
mod tree;
mod vdso;
mod verify;

pub use code::Mapped;
pub use contents::Pages;
pub use fail::RestartError;
pub use filling::Filling;
pub use front::{by_user, End};

use belay_kernel::blob::Blob;
use belay_plugins::Group;
use channel::{Channel, Message};
use front::Front;
use identity::Identity;
use namespace::{Clocks, Way};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;
use verify::Loaded;

/// Choices for a restart.
#[derive(Debug, Clone)]
pub struct Options {
    /// Fill large private memory while the job runs, where the system allows that, instead of before its first
    /// instruction.
    pub lazy: bool,
    /// Restart on a processor that lacks instructions which the job may have chosen to use.
    pub any_cpu: bool,
    /// Processes of the job that live on, because who attended to them was killed, are ended. Otherwise they keep the
    /// job from being restarted.
    pub ends_remains: bool,
    /// The command had ended at the checkpoint: what it left behind is restarted.
    pub ended: bool,
    /// The restorer program's file.
    pub restorer: PathBuf,
    /// How long libraries that take part may need to make again what a restart does not bring back.
    pub gate_limit: Duration,
}

/// What the agent of the restarted job learns.
#[derive(Debug)]
pub struct Restored {
    /// PID of the launched command.
    pub root_pid: i32,
    /// Duration of each phase of the restart.
    pub phases: Vec<(belay_wire::Phase, Duration)>,
    /// What this node has been called.
    pub names: belay_plugins::Names,
    /// Its processes ask about calls (a system call filter): those with addresses, which have changed, or executions.
    pub led: bool,
    /// Somewhere in the job a library takes part in checkpoints.
    pub gated: bool,
    /// The files that they map, other than through descriptors.
    pub code: Mapped,
    /// Pages that are stored of files which are as they were: nobody has compared them with their checksums.
    pub unread: Vec<Pages>,
    /// The filling of their memory, where it goes on: its pages have not all been compared with their checksums yet.
    pub filling: Option<Filling>,
}

/// What the agent of the restarted job tells its front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The command has ended with this status word, and what it left behind runs on in the background: [`restart`] returns.
    Background(i32),
    /// The user has ended the job: whatever happens from now on, it is not restarted.
    NotRestarted,
    /// A remote shell was started, a child of the agent.
    Shell(Shell),
    /// A remote shell that was started for the restart is to get this signal; the agent has no number for it.
    Signal(Shell, i32),
}

/// A remote shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shell {
    /// Its PID, as whoever has started it sees it.
    pub pid: i32,
    /// PID, inside, of the process of the job that stands in for it.
    pub standin: i32,
}

/// What becomes of the job when its agent is killed.
pub struct WithoutAgent<'a> {
    /// Whether nothing of it may go on.
    pub ends: &'a dyn Fn() -> bool,
    /// Children of the calling process whose end is to be told then.
    pub shells: &'a [Shell],
    /// Tells a stand-in, by its PID as the calling process sees it, with which status word its remote shell has ended.
    pub farewell: &'a dyn Fn(i32, i32),
}

/// What the agent of the restarted job does: see [`restart`].
pub type AgentMain<'a> = dyn FnMut(Restored, &dyn Fn(News)) -> i32 + 'a;

/// The calling process is not the node's agent.
fn leave(group: Option<&dyn Group>) {
    if let Some(group) = group {
        group.leave();
    }
}

/// Restarts the generation in `dir`. Call from the single-threaded front process.
///
/// Makes the namespaces, their PID 1 and, inside, the agent, which rebuilds the job, lets it go on, and then runs
/// `agent_main` with all signals blocked, whose result (a wait status word) becomes the result of this call in the front
/// process. When the agent is killed, the job goes on without it, or is ended, as `without_agent` says.
///
/// `group` are the other nodes of the job, which restart at the same time. `ready` is called in the agent when all is
/// rebuilt, before the first process goes on, here or on another node.
///
/// The front process forwards terminal job control and termination signals meanwhile. `agent_main` may call its second
/// argument with a wait status word to make this call return in the front process before the job has ended: the command
/// has, and what it left behind runs on in the background.
pub fn restart(
    dir: &Path,
    options: &Options,
    group: Option<&dyn Group>,
    ready: &mut dyn FnMut(),
    agent_main: &mut AgentMain<'_>,
    without_agent: &WithoutAgent<'_>,
) -> Result<End, RestartError> {
    let (loaded, identity) = load(dir, options, group).map_err(|e| e.shared(group))?;
    let (agent, root) = (loaded.job.agent, loaded.job.root_pid);
    let clocks = Clocks {
        monotonic_ns: loaded.job.monotonic_ns,
        boottime_ns: loaded.job.boottime_ns,
    };
    let blob = Blob::load(&options.restorer).map_err(|e| RestartError::at("load the restorer", e))?;
    let (channel, inside) = Channel::pair().map_err(failed)?;
    let common = init::Common::new().map_err(failed)?;
    let front = Front::new().map_err(failed)?;
    let way = choose_way(&loaded)?;
    let shown = shown::outer(way);
    let (uid, gid) = namespace::own_user();
    let raised = sched::make_room(&loaded.job);
    let init = match namespace::clone(way) {
        Err(e) => {
            raised.undo();
            belay_kernel::signals::change_mask(libc::SIG_SETMASK, front.old_mask());
            return Err(e);
        }
        Ok(pid) => pid,
    };
    if init != 0 {
        raised.undo();
        drop(inside);
        drop(loaded);
        drop(shown);
        leave(group);
        return front.attend((init, way == Way::Initial), root, &channel, without_agent);
    }
    drop(channel);
    let loaded = Cell::new(Some(loaded));
    let setup = init::Setup {
        channel: &inside,
        agent,
        root,
        way,
        identity,
        clocks,
        uid,
        gid,
        shown: Cell::new(shown),
        session: !front.has_terminal() && way != Way::Initial,
        group,
        common: &common,
        forget: &|| drop(loaded.take()),
        farewell: without_agent.farewell,
    };
    init::run(&setup, &mut || {
        sys::block_signals();
        let made = loaded.take().ok_or_else(|| RestartError::at("restart", "nothing loaded"));
        match made.and_then(|loaded| make(&setup, loaded, (&blob, options), front.foreground, ready)) {
            Err(e) => {
                inside.send(&Message::failed(&e.shared(group)));
                sys::exit_now(1)
            }
            Ok(restored) => {
                restored.filling.iter().for_each(|f| common.is_filled_beside(f.stands_by()));
                common.set_running();
                inside.send(&Message::Resumed);
                let status = agent_main(restored, &|news| tell(&inside, &common, news));
                inside.send(&Message::Ended(status));
            }
        }
    })
}

fn failed(e: std::io::Error) -> RestartError {
    RestartError::at("restart", e)
}

/// What is restarted, checked, and what it is to keep of its host.
fn load(dir: &Path, options: &Options, group: Option<&dyn Group>) -> Result<(Loaded, Identity), RestartError> {
    let mut loaded = verify::load(dir, options)?;
    let identity = group
        .map(|group| Identity::of(&loaded.job, group))
        .transpose()?
        .unwrap_or_default();
    if let Some(dir) = identity.own_directory() {
        loaded.sights.forget_below(&loaded.descriptors, dir);
    }
    Ok((loaded, identity))
}

/// In which namespaces the job can come back.
fn choose_way(loaded: &Loaded) -> Result<Way, RestartError> {
    if namespace::is_ordinary() {
        // A program with file capabilities may not look into itself by default, and could not enter its own user namespace.
        sys::be_dumpable().map_err(failed)?;
    }
    let way = Way::choose();
    if way == Way::Initial {
        tracing::warn!("no user namespaces here: restarting in the machine's own, with the machine's monotonic clock");
        initial::check(&loaded.job, &loaded.descriptors)?;
        sys::become_reaper().map_err(failed)?;
    }
    Ok(way)
}

/// In the agent: makes the job, and lets it go on.
fn make(
    setup: &init::Setup<'_>,
    loaded: Loaded,
    (blob, options): (&Blob, &Options),
    foreground: bool,
    ready: &mut dyn FnMut(),
) -> Result<Restored, RestartError> {
    let bound = |on| match setup.way {
        Way::Initial => initial::end_with_parent(on).map_err(failed),
        Way::Namespaces | Way::UserNamespace => Ok(()),
    };
    bound(true)?;
    groups::join(&setup.agent, setup.session)?;
    setup.channel.send(&Message::Hello);
    let root_pid = loaded.job.root_pid;
    let restarted = agent::restart(loaded, blob, options, setup.way, foreground, setup.group, ready)?;
    bound(false)?;
    Ok(Restored {
        root_pid,
        phases: restarted.phases,
        names: restarted.names,
        led: restarted.led,
        gated: restarted.gated,
        code: restarted.code,
        unread: restarted.unread,
        filling: restarted.filling,
    })
}

/// In the agent: passes `news` on to the front, or to PID 1.
fn tell(front: &Channel, common: &init::Common, news: News) {
    match news {
        News::Background(status) => front.send(&Message::Background(status)),
        News::NotRestarted => front.send(&Message::NotRestarted),
        News::Shell(shell) => common.note(shell),
        News::Signal(shell, signal) => front.send(&Message::Signal {
            shell: shell.pid,
            signal,
        }),
    }
}
