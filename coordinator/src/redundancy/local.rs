//! Where checkpoint data of a redundant job lies: on each host's own disk, with links to it in the job directory.
//!
//! ```text
//! DIR/gen         ──>  LOCAL/belay-UID-HASH/0/gen       on the root's host
//! DIR/nodes/1/gen ──>  LOCAL/belay-UID-HASH/1/gen       on the host of part 1; the same for `chunks` and `parity`
//! ```
//! HASH is that of the job directory's path. On a host that never had the part the links lead nowhere, until the store is laid out there.

use super::{Settings, PARITY};
use crate::{sys, Failure};
use belay_wire::Exit;
use std::fs::{DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{symlink, DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What lies on the hosts.
const NAMES: [&str; 3] = ["gen", "chunks", PARITY];

/// The directory of all stores of the job in `job` on this host.
pub(crate) fn stores(s: &Settings, job: &Path) -> PathBuf {
    let hash = belay_redundancy::checksum(job.as_os_str().as_encoded_bytes());
    s.local.join(format!("belay-{}-{hash:016x}", sys::euid()))
}

/// The directory of the part `tag` of the job in `job`; the job's own is that of part 0.
pub(crate) fn part(job: &Path, tag: u64) -> PathBuf {
    if tag == 0 {
        return job.to_owned();
    }
    crate::nodes::again::part_dir(job, tag)
}

fn make(path: &Path) -> Result<(), Failure> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(Failure::new(
            Exit::CannotCreate,
            format!("make {} on {}: {}", path.display(), sys::host(), crate::failure::reason(&e)),
        )),
        _ => check(path),
    }
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

/// Makes the store of part `tag` on this host and the links to it; `fresh`: what an earlier job has left there is removed.
pub fn lay(s: &Settings, job: &Path, tag: u64, fresh: bool) -> Result<(), Failure> {
    let all = stores(s, job);
    make(&all)?;
    let store = all.join(tag.to_string());
    if fresh {
        let old = if tag == 0 { &all } else { &store };
        match std::fs::remove_dir_all(old) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Failure::io(format!("remove {}", old.display()), &e)),
            _ => make(&all)?,
        }
    }
    make(&store)?;
    let dir = part(job, tag);
    for name in NAMES {
        let (target, link) = (store.join(name), dir.join(name));
        make(&target)?;
        let fail = |e: io::Error| Failure::io(format!("link {} to {}", link.display(), target.display()), &e);
        if std::fs::read_link(&link).is_ok_and(|t| t == target) {
            continue;
        }
        clear(&link).map_err(fail)?;
        symlink(&target, &link).map_err(fail)?;
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

/// Stores of the job that lie on this host: tag and directory.
pub(crate) fn here(s: &Settings, job: &Path) -> Vec<(u64, PathBuf)> {
    let all = stores(s, job);
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
        lay(&s, &job, 0, true).unwrap();
        std::fs::write(job.join("gen/x"), "x").unwrap();
        lay(&s, &job, 0, false).unwrap();
        assert!(stores(&s, &job).join("0/gen/x").exists());
        assert_eq!(here(&s, &job), [(0, stores(&s, &job).join("0"))]);
        lay(&s, &job, 0, true).unwrap();
        assert!(!job.join("gen/x").exists(), "an earlier job's");
        unlay(&job).unwrap();
        assert!(std::fs::symlink_metadata(job.join("gen")).unwrap().is_dir() && !job.join("chunks").exists());
        // A directory of somebody's is not taken.
        std::fs::remove_dir_all(stores(&s, &job)).unwrap();
        symlink("/", stores(&s, &job)).unwrap();
        assert_eq!(lay(&s, &job, 0, true).unwrap_err().exit, Exit::NotOurs);
        std::fs::remove_dir_all(base).unwrap();
    }
}
