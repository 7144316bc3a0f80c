//! The names that files have now, where the kernel shows one that they had: looked up by inode in the same directory.

use crate::sys::fd;
use belay_image::model::ObjectId;
use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::fs::DirEntryExt;
use std::path::{Path, PathBuf};

/// Of a directory no more entries are looked at: the job stands still meanwhile.
const MOST: usize = 50_000;

/// Directories that have been read, each once.
#[derive(Debug, Default)]
pub(crate) struct Renamed(HashMap<PathBuf, Vec<(u64, OsString)>>);

impl Renamed {
    /// A path beside `shown` that leads to the file `id`.
    pub(crate) fn of_file(&mut self, shown: &Path, id: ObjectId) -> Option<PathBuf> {
        let is_it = |st: &fd::Stat| (st.st_dev, st.st_ino) == (id.dev, id.ino);
        self.find(shown, |ino| ino == id.ino, is_it)
    }

    /// A path beside `shown` that leads to the file whose inode number ends in `ino`: sockets know no more of theirs.
    pub(crate) fn of_socket(&mut self, shown: &Path, ino: u32) -> Option<PathBuf> {
        let is_it = |st: &fd::Stat| st.st_ino as u32 == ino && st.st_mode & libc::S_IFMT == libc::S_IFSOCK;
        self.find(shown, |number| number as u32 == ino, is_it)
    }

    fn find(&mut self, shown: &Path, like: impl Fn(u64) -> bool, is_it: impl Fn(&fd::Stat) -> bool) -> Option<PathBuf> {
        let dir = shown.parent()?;
        let entries = self.0.entry(dir.to_owned()).or_insert_with(|| read(dir));
        let paths = entries.iter().filter(|(ino, _)| like(*ino)).map(|(_, name)| dir.join(name));
        paths
            .into_iter()
            .find(|path| fd::stat(path, false).is_ok_and(|st| is_it(&st)))
    }
}

fn read(dir: &Path) -> Vec<(u64, OsString)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.take(MOST).map(|e| (e.ino(), e.file_name())).collect()
}
