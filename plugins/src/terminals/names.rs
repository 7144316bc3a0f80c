//! Names of pseudo-terminals: after a restart, `/dev/pts/N` is the terminal that a program was told of by that name
//! (`ptsname`, `ttyname`), whenever it opens it.
//!
//! N is the terminal's number in its devpts, and the kernel hands out the smallest that is free. Mostly the old ones
//! are free in the machine's. Where another program has one of them, the job gets a devpts of its own upon `/dev/pts`,
//! in its own mount namespace, where all are. What is outside has no names there, but for the terminal of the restart:
//! that is mounted upon the name that it has outside.

use super::ptmx::{new_master, path};
use super::{devpts, Terminals, PTS_MAJOR};
use crate::fault::{At, Fault};
use crate::sys::fd;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Masters by the numbers of their slaves.
pub(super) type Masters = BTreeMap<u32, OwnedFd>;

/// Masters for the terminals of `t`, with the old numbers where that is possible; `tell` is told where it is not.
pub(super) fn masters(t: &Terminals, own_mounts: bool, tell: &dyn Fn(&str)) -> Result<Masters, Fault> {
    let wanted: BTreeSet<u32> = t.ptys.iter().map(|p| p.index).collect();
    let further = t.ptys.iter().flat_map(|p| p.names.iter().map(|name| (*name, p.index)));
    let further: BTreeMap<u32, u32> = further.filter(|(name, _)| !wanted.contains(name)).collect();
    if further.is_empty() {
        let found = numbered(&wanted)?;
        if found.len() == wanted.len() {
            return Ok(found);
        }
    }
    let restarts = terminals_of_restart();
    let own = if own_mounts {
        devpts::mount_own()
    } else {
        Err(io::Error::other("no mounts of its own"))
    };
    let found = match &own {
        Ok(()) => among_own(&wanted, &further, &restarts, tell)?,
        Err(_) => numbered(&wanted)?,
    };
    if let Err(error) = own {
        let lost = wanted
            .iter()
            .filter(|number| !found.contains_key(number))
            .chain(further.keys());
        for name in lost.map(|number| path(*number)) {
            tell(&format!(
                "a terminal of the job is not {} any more, which is somebody else's here ({error}): programs do not find it by that name",
                name.display()
            ));
        }
    }
    Ok(found)
}

/// The masters, in a devpts that nobody else uses, with the names of all in place.
fn among_own(
    wanted: &BTreeSet<u32>,
    further: &BTreeMap<u32, u32>,
    restarts: &BTreeMap<u32, OwnedFd>,
    tell: &dyn Fn(&str),
) -> Result<Masters, Fault> {
    let all = wanted.iter().chain(further.keys()).chain(restarts.keys());
    let mut masters = numbered(&all.copied().collect())?;
    let mut mount_upon = |name: u32, from: &Path| {
        // What it is mounted upon lives as long as its master, which the agent keeps for good.
        masters.remove(&name).map(IntoRawFd::into_raw_fd);
        let name = path(name);
        devpts::bind(from, &name).at(format!("mount a terminal upon {}", name.display()))
    };
    for (name, number) in further {
        mount_upon(*name, &path(*number))?;
    }
    for (name, terminal) in restarts {
        if wanted.contains(name) || further.contains_key(name) {
            tell(&format!(
                "the terminal of this restart is called {} as one of the job's own is: programs cannot ask for its name",
                path(*name).display()
            ));
        } else {
            mount_upon(*name, &fd::self_path(terminal.as_raw_fd()))?;
        }
    }
    Ok(masters)
}

/// The terminals among the standard streams, by the numbers in their names, as descriptors that are no more than names.
fn terminals_of_restart() -> BTreeMap<u32, OwnedFd> {
    let named = |stream| {
        let stat = fd::fstat(stream)
            .ok()
            .filter(|st| st.st_mode & libc::S_IFMT == libc::S_IFCHR)?;
        let number = (libc::major(stat.st_rdev) == PTS_MAJOR).then(|| libc::minor(stat.st_rdev))?;
        let named = fd::open(&path(number), libc::O_PATH, 0).ok()?;
        let same = fd::fstat(named.as_raw_fd()).is_ok_and(|st| (st.st_dev, st.st_ino) == (stat.st_dev, stat.st_ino));
        same.then_some((number, named))
    };
    (0..3).filter_map(named).collect()
}

/// Masters whose slaves have the numbers `wanted`, as far as they are free.
fn numbered(wanted: &BTreeSet<u32>) -> Result<Masters, Fault> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let begin = Instant::now();
    loop {
        let found = try_numbered(wanted)?;
        // The kernel gives a number back a moment after the name is gone.
        let missing = wanted.iter().filter(|number| !found.contains_key(number));
        let free_soon = missing.map(|number| path(*number)).any(|name| fd::stat(&name, true).is_err());
        if !free_soon || begin.elapsed() > PATIENCE {
            return Ok(found);
        }
        drop(found);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn try_numbered(wanted: &BTreeSet<u32>) -> Result<Masters, Fault> {
    let mut found = Masters::new();
    let mut others = Vec::new();
    while found.len() < wanted.len() && others.len() <= 4096 {
        let (master, number) = new_master()?;
        if wanted.contains(&number) {
            found.insert(number, master);
        } else {
            others.push(master);
        }
        // From here on only larger ones come.
        if wanted.last().is_none_or(|last| number >= *last) {
            break;
        }
    }
    Ok(found)
}
