//! Where checkpoint data of a redundant job lies: on each host's own disk, with links to it in the job directory.
//!
//! ```text
//! DIR/gen         ──>  LOCAL/belay-UID-HASH-ID/0/gen       on the root's host
//! DIR/nodes/1/gen ──>  LOCAL/belay-UID-HASH-ID/1/gen       on the host of part 1; the same for `chunks` and `parity`
//! ```
//! HASH is that of the job directory's path, ID the job's own: what an earlier job in the same directory has left on a
//! host is never taken for this one's. On a host that never had the part the links lead nowhere, until the store is
//! laid out there.

use super::parity::PARITY;
use super::Settings;
use crate::nodes::seat::part_dir;
use crate::{sys, Failure};
use belay_kernel::dir;
use belay_kernel::trust::{self, Untrusted};
use belay_wire::Exit;
use std::fs::{DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{symlink, DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What lies on the hosts.
const NAMES: [&str; 3] = ["gen", "chunks", PARITY];

/// How the names of the stores of all jobs in the directory `job` begin.
fn prefix(job: &Path) -> String {
    let hash = belay_redundancy::checksum(job.as_os_str().as_encoded_bytes());
    format!("belay-{}-{hash:016x}-", sys::euid())
}

/// The directory of all stores of the job `id` in `job` on this host.
pub(crate) fn stores(s: &Settings, job: &Path, id: &str) -> PathBuf {
    s.local.join(prefix(job) + id)
}

/// Removes what jobs other than `id` in the directory `job` have left on this host.
fn clear_others(s: &Settings, job: &Path, id: &str) -> Result<(), Failure> {
    let (prefix, own) = (prefix(job), stores(s, job, id));
    let entries = std::fs::read_dir(&s.local).into_iter().flatten().flatten();
    let others = entries.filter(|e| e.file_name().to_string_lossy().starts_with(&prefix));
    let mut others = others.map(|e| e.path()).filter(|p| *p != own && check(p).is_ok());
    others.try_for_each(|path| remove(&path))
}

/// Removes a directory, if parts that start at the same time on this host have not done so.
fn remove(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Failure::io(format!("remove {}", path.display()), &e)),
        _ => Ok(()),
    }
}

/// Makes a directory, durably: what lies in one is not found after a power cut where the directory's own name is lost.
fn make(path: &Path) -> Result<(), Failure> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(Failure::new(
            Exit::CannotCreate,
            format!("make {} on {}: {}", path.display(), sys::host(), crate::failure::reason(&e)),
        )),
        Ok(()) => check(path).and_then(|()| sync_above(path)),
        Err(_) => check(path),
    }
}

/// Makes the name `path` durable.
fn sync_above(path: &Path) -> Result<(), Failure> {
    let fail = |e: io::Error| Failure::io(format!("sync the directory of {} on {}", path.display(), sys::host()), &e);
    dir::sync_above(path).map_err(fail)
}

/// Refuses a directory that somebody else could have put there.
fn check(path: &Path) -> Result<(), Failure> {
    let m = std::fs::symlink_metadata(path).map_err(|e| Failure::io(format!("stat {}", path.display()), &e))?;
    if m.is_dir() && m.uid() == sys::euid() && m.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(Failure::new(
        Exit::NotOurs,
        format!(
            "{}: not a directory of mode 700 that belongs to user {}",
            path.display(),
            sys::euid()
        ),
    ))
}

/// The same, which is made where it is not there.
pub(crate) fn home(s: &Settings, job: &Path, id: &str) -> Result<PathBuf, Failure> {
    trust::holder(&s.local).map_err(|e| match e {
        Untrusted::Io(e) => Failure::io(format!("find {} on {}", s.local.display(), sys::host()), &e),
        others => Failure::new(Exit::NotOurs, format!("--local-dir on {}: {others}", sys::host())),
    })?;
    let all = stores(s, job, id);
    make(&all).map(|()| all)
}

/// Makes the store of part `tag` of the job `id` on this host and the links to it; `fresh`: what earlier jobs in the
/// directory have left there is removed.
pub fn lay(s: &Settings, job: &Path, (id, tag): (&str, u64), fresh: bool) -> Result<(), Failure> {
    let store = home(s, job, id)?.join(tag.to_string());
    if fresh {
        clear_others(s, job, id)?;
        remove(&store)?;
    }
    make(&store)?;
    let dir = part_dir(job, tag);
    for name in NAMES {
        let (target, link) = (store.join(name), dir.join(name));
        make(&target)?;
        let fail = |e: io::Error| Failure::io(format!("link {} to {}", link.display(), target.display()), &e);
        if std::fs::read_link(&link).is_ok_and(|t| t == target) {
            continue;
        }
        clear(&link).map_err(fail)?;
        symlink(&target, &link).map_err(fail)?;
        sync_above(&link)?;
    }
    Ok(())
}

/// Removes a link or an empty directory.
fn clear(link: &Path) -> io::Result<()> {
    let result = match std::fs::symlink_metadata(link).as_ref().map(Metadata::is_dir) {
        Ok(true) => std::fs::remove_dir(link),
        _ => std::fs::remove_file(link),
    };
    result.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}

/// A new job in a directory whose earlier one was redundant, and this one is not: directories in place of the links.
pub fn unlay(job: &Path) -> Result<(), Failure> {
    for link in NAMES.map(|name| job.join(name)) {
        if std::fs::symlink_metadata(&link).is_ok_and(|m| m.is_symlink()) {
            clear(&link).map_err(|e| Failure::io(format!("remove {}", link.display()), &e))?;
        }
    }
    match DirBuilder::new().mode(0o700).create(job.join("gen")) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(Failure::io(format!("make {}", job.join("gen").display()), &e)),
        _ => Ok(()),
    }
}

/// Stores of the job `id` that lie on this host: tag and directory.
pub(crate) fn here(s: &Settings, job: &Path, id: &str) -> Vec<(u64, PathBuf)> {
    let all = stores(s, job, id);
    if check(&all).is_err() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(&all).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|e| Some((e.file_name().to_str()?.parse().ok()?, e.path())))
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redundancy::Redundancy;

    #[test]
    fn links_lead_to_the_store_and_go_again() {
        let base = std::env::temp_dir().join(format!("belay-local-{}", std::process::id()));
        let (job, disk) = (base.join("job"), base.join("disk"));
        for d in [&base, &job, &disk, &job.join("gen")] {
            std::fs::create_dir(d).unwrap();
        }
        let r = Redundancy {
            local: Some(disk.clone()),
            ..Redundancy::parse("xor").unwrap()
        };
        let s = r.settings().unwrap().unwrap();
        lay(&s, &job, ("a1", 0), true).unwrap();
        std::fs::write(job.join("gen/x"), "x").unwrap();
        lay(&s, &job, ("a1", 0), false).unwrap();
        assert!(stores(&s, &job, "a1").join("0/gen/x").exists());
        assert_eq!(here(&s, &job, "a1"), [(0, stores(&s, &job, "a1").join("0"))]);
        // A later job in the same directory does not see it; where it begins anew, it goes.
        assert_eq!(here(&s, &job, "b2"), []);
        lay(&s, &job, ("b2", 0), false).unwrap();
        assert!(!job.join("gen/x").exists() && stores(&s, &job, "a1").exists());
        lay(&s, &job, ("b2", 0), true).unwrap();
        assert!(!stores(&s, &job, "a1").exists(), "an earlier job's");
        unlay(&job).unwrap();
        assert!(std::fs::symlink_metadata(job.join("gen")).unwrap().is_dir() && !job.join("chunks").exists());
        // A directory of somebody's is not taken.
        std::fs::remove_dir_all(stores(&s, &job, "b2")).unwrap();
        symlink("/", stores(&s, &job, "b2")).unwrap();
        assert_eq!(lay(&s, &job, ("b2", 0), true).unwrap_err().exit, Exit::NotOurs);
        std::fs::remove_dir_all(base).unwrap();
    }
}
