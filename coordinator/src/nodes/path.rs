//! PATH of a job whose remote shells are stood in for.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Directory of the stand-ins for remote shells.
pub(crate) const STANDINS: &str = "standins";

/// The program `name` as found in PATH, leaving out the directory of stand-ins.
pub(crate) fn find(name: &str, standins: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut dirs = std::env::split_paths(&path).filter(|d| d != standins);
    dirs.find_map(|d| Some(d.join(name)).filter(|p| p.is_file()))
}

/// PATH `path` without the directory of stand-ins.
pub(crate) fn without(path: &OsStr, standins: &Path) -> OsString {
    let dirs = std::env::split_paths(path).filter(|d| d != standins);
    std::env::join_paths(dirs).unwrap_or_else(|_| path.to_owned())
}

/// The value of PATH for the command of the job in `job` whose remote shells are stood in for.
pub(crate) fn with_standins(job: &Path) -> OsString {
    let old = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    let mut all = vec![job.join(STANDINS)];
    all.extend(std::env::split_paths(&old));
    std::env::join_paths(all).unwrap_or(old)
}
