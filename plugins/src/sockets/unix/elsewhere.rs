//! Where the file of a socket lies to which its relative name leads no more: the program has left the directory to
//! which the name belongs.
//!
//! A socket tells that itself to whoever has CAP_NET_ADMIN. For others the file is sought by its name and number below
//! working directories and where files are open.

use crate::seek;
use crate::session::Session;
use crate::sys::fd;
use belay_kernel::ioctl;
use belay_kernel::numbers::lend;
use std::collections::BTreeSet;
use std::fs::DirEntry;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

/// Below these are no files of sockets.
const NO_PLACE: [&str; 2] = ["/proc", "/sys"];

/// Entries of directories that may still be looked at, for all sockets of a checkpoint: the job stands still meanwhile.
#[derive(Debug)]
struct Entries(usize);

impl Default for Entries {
    fn default() -> Self {
        Self(10_000)
    }
}

/// The directory to which `name` belongs, of socket `raw`, whose file has a number that ends in `ino`.
pub(super) fn directory(s: &mut Session<'_>, raw: RawFd, name: &Path, ino: u32) -> Option<PathBuf> {
    let is_it =
        |path: &Path| fd::stat(path, false).is_ok_and(|st| st.st_ino as u32 == ino && st.st_mode & libc::S_IFMT == libc::S_IFSOCK);
    let path = match told(raw) {
        Some(file) => file.filter(|path| is_it(path))?,
        None => sought(s, name, ino, &is_it)?,
    };
    let above = path.ancestors().nth(name.components().count())?;
    (above.join(name) == path).then(|| above.to_owned())
}

/// What the socket itself says, if it does: no path where the file has none any more.
fn told(raw: RawFd) -> Option<Option<PathBuf>> {
    let file = ioctl::open(lend(raw).ok()?, ioctl::BOUND_FILE, 0).ok()?;
    Some(fd::readlink(&fd::self_path(file.as_raw_fd())).ok())
}

/// Looks in the directories that are likely, then in what lies below them.
fn sought(s: &mut Session<'_>, name: &Path, ino: u32, is_it: &impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let from = likely(s);
    let left = &mut s.sets.of::<Entries>().0;
    let enters = |dir: &Path, _: &fd::Stat| !NO_PLACE.iter().any(|none| dir.starts_with(none));
    let like = |entry: &DirEntry| entry.ino() as u32 == ino && Some(entry.file_name().as_os_str()) == name.file_name();
    seek::walk(from, left, &enters, &|entry| like(entry) && is_it(&entry.path()))
}

/// Working directories, those of open files, and all above, the innermost first.
fn likely(s: &Session<'_>) -> Vec<PathBuf> {
    let working = s
        .processes
        .iter()
        .filter_map(|p| fd::readlink(Path::new(&format!("/proc/{}/cwd", p.task))).ok());
    let open = s
        .found
        .iter()
        .filter(|f| f.link.is_absolute())
        .filter_map(|f| f.link.parent());
    let all = working.chain(open.map(Path::to_owned));
    let all: BTreeSet<PathBuf> = all
        .flat_map(|p| p.ancestors().map(Path::to_owned).collect::<Vec<_>>())
        .collect();
    let mut all: Vec<PathBuf> = all.into_iter().collect();
    all.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    all
}
