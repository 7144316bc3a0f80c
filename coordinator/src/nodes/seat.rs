//! Where a part of a job is: its tag, its host, its directory.

use crate::{sys, Failure};
use belay_storage::store::Host;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

/// Directory of those of the parts.
pub(crate) const PARTS: &str = "nodes";

/// A part of a job that may have several hosts: its tag, and where it is.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    /// 0 for the root.
    pub(crate) tag: u64,
    /// This host.
    pub(crate) host: Host,
}

/// The directory of the part `tag` of the job in `job`; the job's own is that of part 0.
pub fn part_dir(job: &Path, tag: u64) -> PathBuf {
    if tag == 0 {
        return job.to_owned();
    }
    job.join(PARTS).join(tag.to_string())
}

/// The tags of the parts that have a directory in that of the job in `job`.
pub(crate) fn tags(job: &Path) -> Result<BTreeSet<u64>, Failure> {
    let parts = job.join(PARTS);
    let fail = |e| Failure::io(format!("read {}", parts.display()), &e);
    let list = match std::fs::read_dir(&parts) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        other => other.map_err(fail)?,
    };
    let mut tags = BTreeSet::new();
    for entry in list {
        let tag: Option<u64> = entry.map_err(fail)?.file_name().to_str().and_then(|name| name.parse().ok());
        tags.extend(tag.filter(|tag| *tag > 0));
    }
    Ok(tags)
}

/// What this host is called where parts are started: the name of Slurm's node, in a job of Slurm; else its own.
pub(crate) fn name_here() -> String {
    node_of_slurm().unwrap_or_else(sys::host)
}

/// Slurm's name for this host, where this process belongs to a job of Slurm here.
pub(crate) fn node_of_slurm() -> Option<String> {
    std::env::var("SLURMD_NODENAME").ok().filter(|name| !name.is_empty())
}
