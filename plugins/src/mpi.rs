//! The programs of MPI launchers, by the names of their files.

/// Processes that launchers start on other hosts.
pub const DAEMONS: [&str; 4] = ["orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_proxy"];

/// Programs that start those.
pub const LAUNCHERS: [&str; 3] = ["orterun", "prterun", "mpiexec.hydra"];
