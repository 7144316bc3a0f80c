//! Smaller attributes of threads, processes and their memory, each as the kernel tells and takes it.

use serde::{Deserialize, Serialize};

/// On which memory nodes memory shall lie (`set_mempolicy`, `mbind`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// `MPOL_*` with its flags.
    pub mode: u32,
    /// Nodes, one bit each, little endian words.
    pub nodes: Vec<u64>,
}

/// The policy of a piece of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Where it shall lie.
    pub policy: Policy,
}

/// What a thread sets for itself with `prctl` and `arch_prctl`; the default is that of the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadPrctl {
    /// `PR_MCE_KILL_GET`, where that is not the machine's own rule.
    #[serde(default)]
    pub machine_checks: Option<u32>,
    /// `PR_GET_TSC`: reading the time stamp counter is an error.
    #[serde(default)]
    pub no_tsc: bool,
    /// `ARCH_GET_CPUID`: the instruction `cpuid` is an error.
    #[serde(default)]
    pub no_cpuid: bool,
    /// `PR_GET_IO_FLUSHER`.
    #[serde(default)]
    pub io_flusher: bool,
    /// `PR_GET_SPECULATION_CTRL`: (what, how) where the thread has a say in it.
    #[serde(default)]
    pub speculation: Vec<(u32, u32)>,
}

/// Whose a thread is, where that is not what is said of its process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Own<C> {
    /// Users, groups and capabilities.
    pub creds: C,
    /// `PR_GET_SECUREBITS`.
    pub securebits: u32,
}

/// What `sched_setattr` sets besides policy, nice value and priority.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedMore {
    /// Runtime, deadline and period of SCHED_DEADLINE, or a time slice of its own, nanoseconds; 0 for none.
    #[serde(default)]
    pub times: [u64; 3],
    /// `SCHED_FLAG_RECLAIM` and `SCHED_FLAG_DL_OVERRUN`.
    #[serde(default)]
    pub flags: u64,
    /// Bounds for the utilization that is assumed.
    #[serde(default)]
    pub clamps: Option<(u32, u32)>,
}

/// Scheduling attributes of a thread.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Sched {
    /// `SCHED_*`.
    pub policy: i32,
    /// Nice value.
    pub nice: i32,
    /// Real-time priority.
    pub rt_priority: i32,
    /// Whether SCHED_RESET_ON_FORK is set.
    pub reset_on_fork: bool,
    /// What else is set.
    #[serde(default)]
    pub more: SchedMore,
}
