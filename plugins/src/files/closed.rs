//! Temporary files that nobody has open at the checkpoint, and that pass work on: a compiler writes one and exits before
//! the assembler reads it, `sort` comes back to those that it has filled. A program finds such a file by a name in its
//! memory, so it cannot be told whose it is: those are taken that the job's user has made since the launch where
//! temporary files lie, by names of their own. A restart makes them again where they are gone, and touches none that is
//! there.

use super::named::made_by;
use super::owner::me;
use super::sought::{FileSet, Sought};
use super::{sessions, Origin};
use crate::model::Holder;
use crate::session::Session;
use belay_image::model::ObjectId;
use belay_kernel::proc;
use std::cmp::Reverse;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Most names in a directory that are looked at, while the job stands still.
const MOST_NAMES: usize = 1 << 14;
/// Most files.
const MOST: usize = 1024;

/// Adds those files to `set`, behind all others: the newest first, since those of programs that were killed stay, and no
/// more in all than one file may have that is saved.
pub(super) fn find(s: &Session<'_>, set: &mut FileSet) {
    let Some(first) = s.processes.first().filter(|_| s.saved_up_to > 0) else {
        return;
    };
    let environment = proc::read_whole(format!("/proc/{}/environ", first.pid)).unwrap_or_default();
    let places = sessions::places(b"", &environment);
    let mut found: Vec<_> = places.iter().flat_map(|place| within(s, place)).collect();
    found.sort_by_key(|(_, file)| Reverse(file.created().ok()));
    let mut left = s.saved_up_to;
    for (path, file) in found.into_iter().take(MOST) {
        let id = ObjectId {
            dev: file.dev(),
            ino: file.ino(),
        };
        if file.len() <= left && set.find(id).is_none() {
            left -= file.len();
            let nobody = Holder { pid: 0, fd: -1 };
            let mut sought = Sought::mapped(id, path, Origin::Named, nobody);
            sought.object.closed = true;
            set.add(sought);
        }
    }
}

/// Those directly in directory `place`.
fn within(s: &Session<'_>, place: &Path) -> Vec<(PathBuf, Metadata)> {
    let changed = std::fs::metadata(place).and_then(|m| m.modified());
    if changed.is_ok_and(|t| t < s.launched) {
        return Vec::new();
    }
    let names = std::fs::read_dir(place).into_iter().flatten().take(MOST_NAMES).flatten();
    let files = names.filter(|e| e.file_type().is_ok_and(|t| t.is_file()));
    let all = files.filter_map(|e| Some((e.path(), e.metadata().ok()?)));
    all.filter(|(_, file)| file.uid() == me() && file.nlink() == 1 && made_by(file, s.launched))
        .collect()
}
