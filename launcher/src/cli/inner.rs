//! Commands that belay gives itself, on other hosts too: no user needs them.

use clap::{Args, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// `belay agent`.
#[derive(Debug, Args)]
pub(crate) struct Agent {
    /// Job directory of this part
    #[arg(long)]
    pub(crate) dir: PathBuf,
    /// The job key
    #[arg(long)]
    pub(crate) key: PathBuf,
    /// What the root calls this part
    #[arg(long)]
    pub(crate) tag: u64,
    /// Where the root listens
    #[arg(long, value_delimiter = ',')]
    pub(crate) join: Vec<String>,
    /// What the remote shell was told to reach this host
    #[arg(long)]
    pub(crate) called: Option<String>,
    /// Restart from this generation
    #[arg(long)]
    pub(crate) generation: Option<u64>,
    /// End the program when the root is lost: it is restarted elsewhere
    #[arg(long)]
    pub(crate) ends_with_root: bool,
    /// The command is one word, for the user's shell
    #[arg(long)]
    pub(crate) by_shell: bool,
    /// The command and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

/// `belay rank`.
#[derive(Debug, Args)]
pub(crate) struct Rank {
    /// What to execute, and as which tasks
    pub(crate) spec: String,
}

/// `belay store`.
#[derive(Debug, Args)]
pub(crate) struct Store {
    /// What to do
    pub(crate) what: Upkeep,
    /// Job directory of the whole job
    #[arg(long)]
    pub(crate) dir: PathBuf,
    /// Part of the job
    #[arg(long, default_value_t = 0)]
    pub(crate) tag: u64,
    /// Generation to make whole, to serve, or to copy
    #[arg(long, default_value_t = 0)]
    pub(crate) generation: u64,
    /// Addresses of each host that serves what it has, or of who asks for a copy
    #[arg(long, value_delimiter = ',')]
    pub(crate) sources: Vec<String>,
}

/// `belay gpu`.
#[derive(Debug, Args)]
pub(crate) struct Gpu {
    /// Processes that use a GPU
    #[arg(long, value_delimiter = ',')]
    pub(crate) processes: Vec<i32>,
    /// How long the driver waits for the work of each, milliseconds
    #[arg(long, default_value_t = 0)]
    pub(crate) limit: u64,
    /// They were restarted
    #[arg(long)]
    pub(crate) restarted: bool,
    /// A GPU that they had, as UUID NAME
    #[arg(long)]
    pub(crate) had: Vec<belay_gpu::Device>,
    /// A GPU that was hidden from them, as UUID NAME
    #[arg(long)]
    pub(crate) hidden: Vec<belay_gpu::Device>,
    /// What CUDA_VISIBLE_DEVICES says
    #[arg(long, allow_hyphen_values = true)]
    pub(crate) visible: Option<String>,
    /// Say which GPUs there are
    #[arg(long)]
    pub(crate) list: bool,
    /// Let them go on, whatever their state
    #[arg(long)]
    pub(crate) recover: bool,
}

/// What `belay store` does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Upkeep {
    /// Let other hosts read what this one has, until standard input ends.
    Serve,
    /// Make a generation of a part whole on this host.
    Heal,
    /// Say which chunks of a part lie in the local tiers of this host.
    Look,
    /// Move them to the job directory.
    Home,
    /// Copy a generation of a part to the durable tiers, as somebody asks.
    Flush,
}
