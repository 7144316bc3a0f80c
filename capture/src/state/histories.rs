//! Histories (`libbelay.so`): this checkpoint needs their files, as they are now. A note in the directory of each tells
//! the library so (`belay_abi::histories`).
//!
//! A directory counts as one only where it belongs, with its notes, to one user alone, and the lock in it is the file
//! that the program has open: whoever puts another one in its place does not have the agent write there.

use crate::CaptureError;
use belay_abi::histories::{LOCK, NOTES, TEMPORARY};
use belay_image::model::ObjectId;
use belay_kernel::dir::Dir;
use belay_plugins::Descriptors;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Leaves a note of the generation that is being made in `draft` with each history that is open.
pub(crate) fn note(descriptors: &Descriptors, draft: &Path) -> Result<(), CaptureError> {
    let locks = descriptors
        .files()
        .filter(|(name, _)| name.file_name() == Some(LOCK.as_ref()));
    for (dir, lock) in locks.filter_map(|(name, ids)| Some((name.parent()?, ids))) {
        let step = format!("note the checkpoint with history {}", dir.display());
        let noted = notes_of(dir, lock).and_then(|notes| match notes {
            Some(notes) => notes.link(&name(), &target(draft)?),
            None => Ok(()),
        });
        noted.map_err(|e| CaptureError::system(step, e))?;
    }
    Ok(())
}

/// A name that has not been used before.
fn name() -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{}", now.as_nanos(), std::process::id()).into()
}

/// What the generation is called when it is committed.
fn target(draft: &Path) -> io::Result<PathBuf> {
    let draft = std::path::absolute(draft)?;
    let name = draft.file_name().unwrap_or_default();
    let name = name.as_bytes().strip_prefix(TEMPORARY.as_bytes()).unwrap_or(name.as_bytes());
    Ok(draft.with_file_name(std::ffi::OsStr::from_bytes(name)))
}

/// The notes of a history with this lock; nothing if the directory is none.
fn notes_of(dir: &Path, lock: &[ObjectId]) -> io::Result<Option<Dir>> {
    let is_none = |e: &io::Error| {
        matches!(
            e.raw_os_error(),
            Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EACCES)
        )
    };
    let found = Dir::find(dir).and_then(|dir| {
        let own = dir.open(LOCK.as_ref(), libc::O_PATH, 0)?.metadata()?;
        Ok((dir.inner(NOTES.as_ref())?, dir, own))
    });
    let (notes, dir, own) = match found {
        Ok(found) => found,
        Err(e) if is_none(&e) => return Ok(None),
        Err(e) => return Err(e),
    };
    let (of_notes, of_dir) = (notes.metadata()?, dir.metadata()?);
    let is_private = (of_notes.mode() | of_dir.mode()) & 0o077 == 0 && of_notes.uid() == of_dir.uid();
    let is_it = lock.iter().any(|id| (id.dev, id.ino) == (own.dev(), own.ino()));
    Ok((is_private && is_it).then_some(notes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_the_private_directory_of_a_history_gets_notes() {
        let base = std::env::temp_dir().join(format!("belay-histories-{}", std::process::id()));
        let (dir, inner) = (base.join("h"), base.join("h").join(NOTES));
        std::fs::create_dir_all(&dir).unwrap();
        let mode = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        mode(&dir, 0o700);
        std::fs::write(dir.join(LOCK), "").unwrap();
        let lock = std::fs::metadata(dir.join(LOCK)).unwrap();
        let id = |ino| ObjectId { dev: lock.dev(), ino };
        let (lock, other) = ([id(0), id(lock.ino())], [id(0)]);
        assert!(notes_of(&base.join("gone"), &lock).unwrap().is_none() && notes_of(&dir, &lock).unwrap().is_none());
        // A link leads nowhere.
        std::os::unix::fs::symlink(&base, &inner).unwrap();
        assert!(notes_of(&dir, &lock).unwrap().is_none());
        std::fs::remove_file(&inner).unwrap();
        std::fs::create_dir(&inner).unwrap();
        for (outer, notes, expected) in [(0o700, 0o700, true), (0o755, 0o700, false), (0o700, 0o750, false)] {
            mode(&dir, outer);
            mode(&inner, notes);
            assert_eq!(notes_of(&dir, &lock).unwrap().is_some(), expected);
        }
        mode(&inner, 0o700);
        // Another history has been put there.
        assert!(notes_of(&dir, &other).unwrap().is_none());
        let notes = notes_of(&dir, &lock).unwrap().unwrap();
        notes.link(&name(), &target("/j/gen/.tmp-000007".as_ref()).unwrap()).unwrap();
        notes.link(&name(), &target("/j/gen/.tmp-000007".as_ref()).unwrap()).unwrap();
        let left = std::fs::read_dir(&inner)
            .unwrap()
            .map(|e| std::fs::read_link(e.unwrap().path()).unwrap());
        assert_eq!(left.collect::<Vec<_>>(), [Path::new("/j/gen/000007"); 2]);
        std::fs::remove_dir_all(base).unwrap();
    }
}
