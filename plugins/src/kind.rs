//! The steps through which every kind of resource goes, from the first look at a checkpoint to the last touch at a restart.
//!
//! A kind is one folder of this crate, a type in it that implements [`Kind`], and a line in the table of `kinds`. No step
//! has a default: a kind that does nothing in a step says so, with [`nothing!`].

use crate::builder::{Builder, Built};
use crate::fault::{Fault, Refusal};
use crate::model::{DescId, Description, Descriptors, Directory, Slot};
use crate::session::{Session, Taken};
use crate::state::{Part, State};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::os::fd::{OwnedFd, RawFd};
use std::path::PathBuf;

/// A kind of open file description, or of object that processes share.
pub(crate) trait Kind {
    /// Its name in the image.
    const NAME: &'static str;
    /// The version of what it writes into the image.
    const VERSION: u32;
    /// What the image holds of a description of this kind.
    type State: State + DeserializeOwned;
    /// What it holds beside descriptions.
    type Part: Part + DeserializeOwned;

    // Checkpoint: the agent, all processes stopped.

    /// What is asked of all descriptions at once, when the tables are known.
    fn survey(s: &mut Session<'_>);
    /// Whether a description that looks so is of this kind.
    fn recognise(look: &Look<'_>) -> bool;
    /// Captures one description.
    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<Self::State, Fault>;
    /// When all descriptions are known: what belongs to several of them, and is soon told.
    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>);
    /// What takes its time, and is in vain where anything has been refused.
    fn contents(s: &mut Session<'_>, out: &mut Descriptors) -> Result<(), Refusal>;

    // Restart: before anything is made.

    /// What a description refers to is in the image.
    fn check(state: &Self::State, d: &Descriptors) -> Result<(), String>;
    /// The same of what it has beside descriptions.
    fn check_part(part: &Self::Part, d: &Descriptors) -> Result<(), String>;
    /// Numbers of descriptors that a process needs for the moment, when it makes this one.
    fn numbers(state: &Self::State) -> Vec<RawFd>;
    /// Where the restart makes or opens something by its path.
    fn ways(d: &Descriptors, out: &mut Ways);

    // Restart: the agent.

    /// Objects behind several descriptions.
    fn prepare(b: &mut Builder<'_>) -> Result<(), Refusal>;
    /// One description; none where it is made together with others, or in a process.
    fn rebuild(b: &mut Builder<'_>, desc: &Description, state: &Self::State) -> Result<Option<OwnedFd>, Fault>;
    /// Descriptions that are made together, when all others are there.
    fn join(b: &mut Builder<'_>) -> Result<(), Refusal>;
    /// Data in flight, when all descriptions are there.
    fn refill(b: &mut Builder<'_>) -> Result<(), Refusal>;

    // Restart: each process.

    /// Before descriptors are at their numbers.
    fn install(at: &Place<'_>, state: &Self::State) -> Result<(), Fault>;
    /// When all processes exist: what needs one of them is made for its number.
    fn install_late(at: &Place<'_>, slot: &Slot, state: &Self::State) -> Result<Option<OwnedFd>, Fault>;
    /// When all descriptors are at their numbers.
    fn settle(at: &Place<'_>, state: &Self::State) -> Result<(), Fault>;
    /// What belongs to process or thread `pid` and to no descriptor.
    fn install_own(d: &Descriptors, built: &Built, pid: i32) -> Result<(), Refusal>;

    // Restart: the agent, when all memory is mapped.

    /// What could not be done before everybody has what it needs.
    fn complete(d: &Descriptors, built: &Built) -> Result<(), Refusal>;
}

/// What a description is, as far as can be told without knowing its kind.
#[derive(Debug)]
pub(crate) enum Look<'a> {
    /// It is the launcher's standard input, output or error.
    Launcher,
    /// A name and nothing else (O_PATH).
    Name,
    /// `anon_inode:[NAME]`, or `pidfd:`.
    Anonymous(&'a OsStr),
    /// A regular file, in a file system of this type.
    Regular(i64),
    Directory,
    Fifo,
    /// Family, type and protocol.
    Socket(i32, i32, i32),
    /// Major and minor number.
    Device(u32, u32),
    /// Bits of `st_mode`.
    Other(u32),
}

/// A description that is being captured.
#[derive(Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) id: DescId,
    pub(crate) look: Look<'a>,
    /// A descriptor of the agent's on it, for looks that need one.
    pub(crate) taken: Option<Taken>,
}

impl Candidate<'_> {
    /// The agent's descriptor.
    pub(crate) fn raw(&self) -> RawFd {
        self.taken.as_ref().map_or(-1, Taken::raw)
    }
}

/// A process in which descriptors are laid out, and one of its descriptions.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    pub(crate) d: &'a Descriptors,
    pub(crate) built: &'a Built,
    pub(crate) id: DescId,
    pub(crate) desc: &'a Description,
}

/// What a restart makes or opens by its path.
#[derive(Debug, Default)]
pub(crate) struct Ways {
    /// Names that are made, and whose they were.
    pub(crate) places: Vec<(PathBuf, u32)>,
    /// Directories that are opened.
    pub(crate) opened: Vec<Directory>,
    /// Directories above what is made or opened.
    pub(crate) parents: Vec<Directory>,
    /// Files of sockets to which others answered, and whose they were, where that is known.
    pub(crate) peers: Vec<(PathBuf, Option<u32>)>,
}

/// A kind that has no descriptions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Never {}

/// A kind that has nothing beside descriptions.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct NoPart;

impl Part for NoPart {
    const KEY: &'static str = "";
}

/// Steps of [`Kind`] in which a kind does nothing.
macro_rules! nothing {
    ($($step:ident),+ $(,)?) => { $(crate::kind::nothing_in!($step);)+ };
}

macro_rules! nothing_in {
    (survey) => {
        fn survey(_: &mut crate::session::Session<'_>) {}
    };
    (recognise) => {
        fn recognise(_: &crate::kind::Look<'_>) -> bool {
            false
        }
    };
    (capture) => {
        fn capture(
            _: &mut crate::session::Session<'_>,
            _: &crate::kind::Candidate<'_>,
        ) -> Result<Self::State, crate::fault::Fault> {
            crate::fault::refuse("has no descriptions")
        }
    };
    (finish) => {
        fn finish(_: &mut crate::session::Session<'_>, _: &mut crate::model::Descriptors, _: &mut Vec<crate::fault::Refusal>) {}
    };
    (contents) => {
        fn contents(_: &mut crate::session::Session<'_>, _: &mut crate::model::Descriptors) -> Result<(), crate::fault::Refusal> {
            Ok(())
        }
    };
    (check) => {
        fn check(_: &Self::State, _: &crate::model::Descriptors) -> Result<(), String> {
            Ok(())
        }
    };
    (check_part) => {
        fn check_part(_: &Self::Part, _: &crate::model::Descriptors) -> Result<(), String> {
            Ok(())
        }
    };
    (numbers) => {
        fn numbers(_: &Self::State) -> Vec<std::os::fd::RawFd> {
            Vec::new()
        }
    };
    (ways) => {
        fn ways(_: &crate::model::Descriptors, _: &mut crate::kind::Ways) {}
    };
    (prepare) => {
        fn prepare(_: &mut crate::builder::Builder<'_>) -> Result<(), crate::fault::Refusal> {
            Ok(())
        }
    };
    (rebuild) => {
        fn rebuild(
            _: &mut crate::builder::Builder<'_>,
            _: &crate::model::Description,
            _: &Self::State,
        ) -> Result<Option<std::os::fd::OwnedFd>, crate::fault::Fault> {
            Ok(None)
        }
    };
    (join) => {
        fn join(_: &mut crate::builder::Builder<'_>) -> Result<(), crate::fault::Refusal> {
            Ok(())
        }
    };
    (refill) => {
        fn refill(_: &mut crate::builder::Builder<'_>) -> Result<(), crate::fault::Refusal> {
            Ok(())
        }
    };
    (install) => {
        fn install(_: &crate::kind::Place<'_>, _: &Self::State) -> Result<(), crate::fault::Fault> {
            Ok(())
        }
    };
    (install_late) => {
        fn install_late(
            _: &crate::kind::Place<'_>,
            _: &crate::model::Slot,
            _: &Self::State,
        ) -> Result<Option<std::os::fd::OwnedFd>, crate::fault::Fault> {
            Ok(None)
        }
    };
    (settle) => {
        fn settle(_: &crate::kind::Place<'_>, _: &Self::State) -> Result<(), crate::fault::Fault> {
            Ok(())
        }
    };
    (install_own) => {
        fn install_own(_: &crate::model::Descriptors, _: &crate::builder::Built, _: i32) -> Result<(), crate::fault::Refusal> {
            Ok(())
        }
    };
    (complete) => {
        fn complete(_: &crate::model::Descriptors, _: &crate::builder::Built) -> Result<(), crate::fault::Refusal> {
            Ok(())
        }
    };
}

pub(crate) use {nothing, nothing_in};
