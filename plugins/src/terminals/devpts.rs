//! A devpts of the job's own upon `/dev/pts`, and what else is mounted there.

use super::ptmx::{self, FOLDER, MAKER, MAKER_THERE};
use crate::sys::fd;
use belay_kernel::mounts::{self, Mount};
use rustix::mount::{mount, unmount, MountFlags, UnmountFlags};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// Mounts a new devpts upon `/dev/pts`, with the options of the one there.
pub(super) fn mount_own() -> io::Result<()> {
    let there = mounts::all()?;
    let options = options_in(&there);
    let of_all = options.join(",");
    // In a user namespace its group can be one that does not exist there.
    let without_group: Vec<&str> = options.iter().copied().filter(|o| !o.starts_with("gid=")).collect();
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    let mount_with =
        |options: &str| mount("devpts", FOLDER, "devpts", flags, &*fd::c_path(options.as_ref())?).map_err(io::Error::from);
    mount_with(&of_all).or_else(|_| mount_with(&without_group.join(",")))?;
    let used = is_used().and_then(|used| match used {
        true => Ok(true),
        // Containers have mounted that file of the one before there.
        false => bind(Path::new(MAKER_THERE), Path::new(MAKER)).and_then(|()| is_used()),
    });
    if used.as_ref().is_ok_and(|used| *used) {
        return Ok(());
    }
    unmount(c"/dev/pts", UnmountFlags::DETACH)?;
    used.and(Err(io::Error::other(format!("{MAKER} makes terminals of another one"))))
}

/// Whether `/dev/ptmx` makes terminals in a devpts upon `/dev/pts` that has none yet.
fn is_used() -> io::Result<bool> {
    let (_master, number) = ptmx::new_master().map_err(io::Error::other)?;
    fd::stat(&ptmx::path(number), true).map(|_| true).or_else(|e| match e.kind() {
        io::ErrorKind::NotFound => Ok(false),
        _ => Err(e),
    })
}

pub(super) fn bind(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(from, to)?)
}

/// By the numbers of terminals: other numbers that lead to them here.
pub(super) fn led() -> BTreeMap<u32, Vec<u32>> {
    led_in(&mounts::all().unwrap_or_default())
}

/// Each mount of a devpts, or of a part of one.
fn devpts_in(mounts: &[Mount]) -> impl Iterator<Item = &Mount> {
    mounts.iter().filter(|m| m.kind == "devpts")
}

/// What is mounted last upon `/dev/pts`.
fn there(mounts: &[Mount]) -> Option<&Mount> {
    devpts_in(mounts).filter(|m| m.place == Path::new(FOLDER)).last()
}

/// The options of the devpts upon `/dev/pts` that say whose terminals are, and who may make them.
fn options_in(mounts: &[Mount]) -> Vec<&str> {
    let all = there(mounts).map_or("", |m| &m.options).split(',');
    all.filter(|o| ["uid=", "gid=", "mode=", "ptmxmode="].iter().any(|name| o.starts_with(name)))
        .collect()
}

fn led_in(mounts: &[Mount]) -> BTreeMap<u32, Vec<u32>> {
    let device = there(mounts).map(|m| m.device);
    let mut out: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    // What is mounted from elsewhere is the terminal of a restart.
    for m in devpts_in(mounts).filter(|m| Some(m.device) == device) {
        let number = |path: &Path, of: &str| path.strip_prefix(of).ok()?.to_str()?.parse().ok();
        if let (Some(number), Some(name)) = (number(&m.root, "/"), number(&m.place, FOLDER)) {
            out.entry(number).or_default().push(name);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"24 30 0:21 / /dev/pts rw,nosuid - devpts devpts rw,gid=5,mode=620,ptmxmode=000\n\
        80 24 0:29 / /dev/pts rw - devpts devpts rw,mode=600,ptmxmode=666,max=9\n\
        90 80 0:29 /3 /dev/pts/1 rw,nosuid - devpts devpts rw,gid=5\n\
        91 80 0:29 /3 /dev/pts/0 rw - devpts devpts rw\n\
        92 80 8:1 /3 /dev/pts/7 rw - ext4 /dev/sda1 rw\n\
        93 80 0:29 /4 /root/x rw - devpts devpts rw\n\
        94 80 0:21 /8 /dev/pts/8 rw - devpts devpts rw\n";

    #[test]
    fn what_is_mounted_upon_names_of_terminals_is_found() {
        assert_eq!(led_in(&mounts::parse(MOUNTS)), BTreeMap::from([(3, vec![1, 0])]));
    }

    #[test]
    fn a_new_devpts_has_the_options_of_the_one_it_hides() {
        let mounts = mounts::parse(MOUNTS);
        assert_eq!(options_in(&mounts), ["mode=600", "ptmxmode=666"]);
        assert_eq!(options_in(&mounts[..1]), ["gid=5", "mode=620", "ptmxmode=000"]);
    }
}
