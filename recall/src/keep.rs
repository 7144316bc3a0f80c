//! What checkpoints by belay need of the files of a history.
//!
//! A checkpoint has the memory of the process, not these files. But before the process goes on, belay leaves a note of
//! it in the directory (`belay_abi::histories`). A file that is removed later stays under its name as long as a
//! checkpoint is there that was taken since it was written; an empty file, `VERSION-SERIAL.gone`, says that it is no
//! version any more. When the last such checkpoint has been removed, both go.
//!
//! [`Keep`] is memory of the process. After a restart it is as it was at the checkpoint, and the directory is made to
//! agree with it before anything else is done there: what was removed since is a version again, what was written since
//! is not. Both can be needed by later checkpoints, from which the job may be restarted too.

use crate::dir::Dir;
use crate::key::Key;
use crate::Life;
use belay_abi::histories::{NOTES, TEMPORARY};
use rustix::fs::{MemfdFlags, OFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

type Notes = BTreeSet<String>;

/// A file of memory, which is another one after a restart.
struct Stamp(File);

/// Inode number and time of making.
type Birth = (u64, i64, i64);

impl Stamp {
    fn new() -> io::Result<Self> {
        let file = rustix::fs::memfd_create(c"belay-history", MemfdFlags::CLOEXEC)?;
        Ok(Self(file.into()))
    }

    fn birth(&self) -> io::Result<Birth> {
        let meta = self.0.metadata()?;
        Ok((meta.ino(), meta.ctime(), meta.ctime_nsec()))
    }
}

/// What is known of the directory.
#[derive(Clone, Default)]
struct Known {
    /// Files that are there, with the notes that were there before them.
    files: BTreeMap<Key, Notes>,
    /// Files that have been removed, with the notes of the checkpoints that need them.
    gone: BTreeMap<Key, Notes>,
    /// Notes that held when they were looked at last.
    live: Notes,
    birth: Birth,
}

/// See the module.
pub(crate) struct Keep {
    known: Mutex<Known>,
    stamp: Stamp,
    life: Life,
    /// Names have changed since the directory was synced.
    pub(crate) is_renamed: AtomicBool,
}

/// What says that versions live until they are read.
const UNTIL_READ: &str = "until-read";

/// The generation is there, or may still come to be. It is called by the first of two names before the second.
fn holds(target: &Path) -> bool {
    let is_there =
        |path: &Path| !matches!(path.symlink_metadata(), Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)));
    let (Some(dir), Some(name)) = (target.parent(), target.file_name().and_then(|n| n.to_str())) else {
        return false;
    };
    is_there(&dir.join(format!("{TEMPORARY}{name}"))) || is_there(target)
}

/// The notes that hold. Others are removed.
fn live(dir: &Dir) -> io::Result<Notes> {
    let Some(notes) = dir.inner(NOTES)? else {
        return Ok(Notes::new());
    };
    let mut live = Notes::new();
    for name in notes.names()? {
        match notes.target(&name) {
            Ok(target) if !holds(&target) => notes.unlink(&name)?,
            // No link, so no note.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            _ => {
                live.insert(name);
            }
        }
    }
    Ok(live)
}

/// Names of a directory, sorted out.
struct Found {
    versions: BTreeSet<Key>,
    gone: BTreeSet<Key>,
    drafts: Vec<String>,
}

fn look(dir: &Dir) -> io::Result<Found> {
    let names = dir.names()?;
    let keys = |parse: fn(&str) -> Option<Key>| names.iter().filter_map(|n| parse(n)).collect();
    Ok(Found {
        versions: keys(Key::parse),
        gone: keys(Key::parse_gone),
        drafts: names.iter().filter(|n| n.ends_with(".new")).cloned().collect(),
    })
}

impl Known {
    /// Looks at the notes, and removes what has been needed by checkpoints that are no more. What cannot be removed is
    /// tried again the next time.
    fn refresh(&mut self, dir: &Dir) -> io::Result<()> {
        let live = live(dir)?;
        if live == self.live {
            return Ok(());
        }
        let before = std::mem::replace(&mut self.live, live);
        self.retire_all(dir).inspect_err(|_| self.live = before)
    }

    /// What no checkpoint needs goes, and the rest of what is gone is no version. Each is tried, those first that make room.
    fn retire_all(&mut self, dir: &Dir) -> io::Result<()> {
        let is_needless = |(_, notes): &(Key, Notes)| notes.is_disjoint(&self.live);
        let (needless, needed): (Vec<_>, Vec<_>) = std::mem::take(&mut self.gone).into_iter().partition(is_needless);
        let mut end = Ok(());
        for (key, notes) in needless.into_iter().chain(needed) {
            if let Err(e) = self.retire(dir, key, notes.clone()) {
                self.gone.insert(key, notes);
                end = end.and(Err(e));
            }
        }
        end
    }

    /// A file is no version any more; `notes` are those of checkpoints that need it, if they are still there.
    fn retire(&mut self, dir: &Dir, key: Key, notes: Notes) -> io::Result<()> {
        if notes.is_disjoint(&self.live) {
            // In this order: who is killed between must not leave a version.
            dir.unlink(&key.name())?;
            return dir.unlink(&key.gone());
        }
        self.gone.insert(key, notes);
        dir.open(&key.gone(), OFlags::WRONLY | OFlags::CREATE).map(drop)
    }

    /// After a restart: the directory is made to agree, as far as can be.
    fn agree(&mut self, dir: &Dir) -> io::Result<()> {
        // Checkpoints that this memory does not know may need what it takes for needless.
        let live = live(dir)?;
        let others: Notes = live.difference(&self.live).cloned().collect();
        self.gone.values_mut().for_each(|notes| notes.extend(others.iter().cloned()));
        self.live = live;
        let found = look(dir)?;
        let (again, gone): (Vec<&Key>, Vec<_>) = found
            .gone
            .union(&found.versions)
            .partition(|key| self.files.contains_key(key));
        for key in gone {
            self.gone.entry(*key).or_insert_with(|| self.live.clone());
        }
        let again = again.into_iter().map(|key| dir.unlink(&key.gone()));
        let end = again.fold(Ok(()), io::Result::and);
        end.and(self.retire_all(dir))
    }
}

impl Keep {
    /// Looks at a directory that this process has just opened: with it comes what lies there, in the order of versions
    /// and then of age; nothing if it lives otherwise, and is left as it is.
    pub(crate) fn open(dir: &Dir, life: Life) -> io::Result<(Self, Option<BTreeSet<Key>>)> {
        dir.make(NOTES)?;
        // Before anything is looked at: after a restart in between this is another life.
        let stamp = Stamp::new()?;
        let birth = stamp.birth()?;
        let mut found = look(dir)?;
        for name in &found.drafts {
            // What cannot be removed means nothing either.
            let _ = dir.unlink(name);
        }
        let mut known = Known {
            live: live(dir)?,
            birth,
            ..Known::default()
        };
        for key in found.gone {
            found.versions.remove(&key);
            known.retire(dir, key, known.live.clone())?;
        }
        known.files = found.versions.iter().map(|key| (*key, Notes::new())).collect();
        let is_other = dir.has(UNTIL_READ)? != (life == Life::UntilRead);
        let keep = Self {
            known: Mutex::new(known),
            stamp,
            life,
            // By whoever had it open before.
            is_renamed: AtomicBool::new(true),
        };
        if is_other && !found.versions.is_empty() {
            return Ok((keep, None));
        }
        if is_other {
            keep.mark(dir)?;
        }
        Ok((keep, Some(found.versions)))
    }

    /// Says how the versions live that will be written.
    fn mark(&self, dir: &Dir) -> io::Result<()> {
        match self.life {
            Life::Lasting => dir.unlink(UNTIL_READ),
            Life::UntilRead => {
                dir.open(UNTIL_READ, OFlags::WRONLY | OFlags::CREATE)?;
                dir.sync()
            }
        }
    }

    /// There are none.
    pub(crate) fn unmark(&self, dir: &Dir) -> io::Result<()> {
        let _known = self.settled(dir)?;
        dir.unlink(UNTIL_READ)
    }

    /// To be called before anything is done in the directory.
    pub(crate) fn settle(&self, dir: &Dir) -> io::Result<()> {
        self.settled(dir).map(drop)
    }

    fn settled(&self, dir: &Dir) -> io::Result<MutexGuard<'_, Known>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let birth = self.stamp.birth()?;
        if known.birth != birth {
            self.mark(dir)?;
            let agreed = known.agree(dir);
            self.is_renamed.store(true, Ordering::Relaxed);
            agreed?;
            known.birth = birth;
        }
        Ok(known)
    }

    /// A file that has been written gets its name from `name`, which answers whether nothing had that.
    pub(crate) fn enter(&self, dir: &Dir, key: Key, name: impl FnOnce() -> io::Result<bool>) -> io::Result<()> {
        let mut known = self.settled(dir)?;
        known.refresh(dir)?;
        let is_new = name()?;
        if known.gone.remove(&key).is_some() {
            dir.unlink(&key.gone())?;
        }
        // Otherwise it was also written by what the process did before it was restarted, and later checkpoints can need it.
        let notes = if is_new { known.live.clone() } else { Notes::new() };
        known.files.insert(key, notes);
        self.is_renamed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Removes a file, which may not have been written, now or when no checkpoint needs it.
    pub(crate) fn remove(&self, dir: &Dir, key: Key) -> io::Result<()> {
        let mut known = self.settled(dir)?;
        known.refresh(dir)?;
        let Some(before) = known.files.remove(&key) else {
            return Ok(());
        };
        let notes = known.live.difference(&before).cloned().collect();
        known.retire(dir, key, notes).inspect_err(|_| {
            known.files.insert(key, before);
        })
    }
}

#[cfg(test)]
impl Keep {
    /// As after a restart by belay, of memory that is as it is now.
    pub(crate) fn restarted(&self) {
        self.known.lock().unwrap().birth = (0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    struct Place {
        base: PathBuf,
        dir: Dir,
        keep: Keep,
    }

    impl Place {
        fn new(name: &str) -> Self {
            let base = std::env::temp_dir().join(format!("belay-recall-keep-{name}-{}", std::process::id()));
            std::fs::create_dir_all(base.join("gen")).unwrap();
            let dir = Dir::open_or_make(&File::open(&base).unwrap(), "h").unwrap();
            let keep = Keep::open(&dir, Life::Lasting).unwrap().0;
            Self { base, dir, keep }
        }

        /// A file gets its name.
        fn write(&self, version: u64) {
            let key = key(version);
            let name = || {
                let is_new = !self.dir.has(&key.name())?;
                std::fs::write(self.base.join("h").join(key.name()), "")?;
                Ok(is_new)
            };
            self.keep.enter(&self.dir, key, name).unwrap();
        }

        fn remove(&self, version: u64) {
            self.keep.remove(&self.dir, key(version)).unwrap();
        }

        /// A checkpoint under way: what it has in memory.
        fn checkpoint(&self, generation: u64) -> Known {
            let target = self.base.join(format!("gen/{generation}"));
            std::fs::create_dir(self.base.join(format!("gen/.tmp-{generation}"))).unwrap();
            symlink(target, self.base.join("h").join(NOTES).join(format!("note-{generation}"))).unwrap();
            self.keep.known.lock().unwrap().clone()
        }

        fn commit(&self, generation: u64) {
            let gen = |name: String| self.base.join("gen").join(name);
            std::fs::rename(gen(format!(".tmp-{generation}")), gen(generation.to_string())).unwrap();
        }

        fn forget(&self, generation: u64) {
            std::fs::remove_dir(self.base.join(format!("gen/{generation}"))).unwrap();
        }

        fn restart(&self, known: &Known) {
            *self.keep.known.lock().unwrap() = Known {
                birth: (0, 0, 0),
                ..known.clone()
            };
        }

        /// Numbers of versions, and of those that are none any more.
        fn shown(&self) -> (Vec<u64>, Vec<u64>) {
            let found = look(&self.dir).unwrap();
            let numbers = |keys: &BTreeSet<Key>| keys.iter().map(|k| k.version).collect();
            (numbers(&found.versions), numbers(&found.gone))
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.base);
        }
    }

    fn key(version: u64) -> Key {
        Key { version, serial: 7 }
    }

    #[test]
    fn what_a_checkpoint_needs_goes_with_it() {
        let p = Place::new("needs");
        p.write(1);
        p.write(2);
        p.remove(1);
        assert_eq!(p.shown(), (vec![2], vec![]));
        p.checkpoint(1);
        p.write(3);
        // The checkpoint does not know it.
        p.remove(3);
        p.remove(2);
        assert_eq!(p.shown(), (vec![2], vec![2]));
        p.commit(1);
        p.write(4);
        assert_eq!(p.shown(), (vec![2, 4], vec![2]));
        // Who opens the history next does not see it either.
        assert_eq!(Keep::open(&p.dir, Life::Lasting).unwrap().1, Some(BTreeSet::from([key(4)])));
        p.forget(1);
        p.write(5);
        assert_eq!(p.shown(), (vec![4, 5], vec![]));
        assert_eq!(p.dir.inner(NOTES).unwrap().unwrap().names().unwrap(), Vec::<String>::new());
    }

    #[test]
    fn after_a_restart_the_files_are_those_of_then() {
        let p = Place::new("restart");
        p.write(1);
        p.write(2);
        let first = p.checkpoint(1);
        p.commit(1);
        p.remove(1);
        p.write(3);
        let second = p.checkpoint(2);
        p.commit(2);
        p.restart(&first);
        p.keep.settle(&p.dir).unwrap();
        assert_eq!(p.shown(), (vec![1, 2, 3], vec![3]));
        // Written again from the same memory, and removed: the second checkpoint needs it still.
        p.write(3);
        assert_eq!(p.shown(), (vec![1, 2, 3], vec![]));
        p.remove(3);
        p.remove(2);
        p.restart(&second);
        p.keep.settle(&p.dir).unwrap();
        assert_eq!(p.shown(), (vec![1, 2, 3], vec![1]));
        p.forget(1);
        p.forget(2);
        p.remove(2);
        assert_eq!(p.shown(), (vec![3], vec![]));
    }

    #[test]
    fn checkpoints_of_several_lives_keep_what_each_needs() {
        let p = Place::new("lives");
        p.write(1);
        let first = p.checkpoint(1);
        p.commit(1);
        p.remove(1);
        let second = p.checkpoint(2);
        p.commit(2);
        p.restart(&first);
        p.keep.settle(&p.dir).unwrap();
        let third = p.checkpoint(3);
        p.commit(3);
        p.forget(1);
        // The second one knows nothing of the third one.
        p.restart(&second);
        p.keep.settle(&p.dir).unwrap();
        p.write(2);
        assert_eq!(p.shown(), (vec![1, 2], vec![1]));
        p.restart(&third);
        p.keep.settle(&p.dir).unwrap();
        assert_eq!(p.shown(), (vec![1, 2], vec![2]));
    }

    #[test]
    fn after_a_restart_as_much_as_can_be_agrees_and_the_rest_is_tried_again() {
        let p = Place::new("much");
        p.write(1);
        let first = p.checkpoint(1);
        p.commit(1);
        p.remove(1);
        p.write(2);
        p.write(3);
        let gone = p.base.join("h").join(key(2).gone());
        std::fs::create_dir(&gone).unwrap();
        p.restart(&first);
        for _ in 0..2 {
            assert!(p.keep.settle(&p.dir).is_err());
            assert_eq!(p.shown(), (vec![1, 2, 3], vec![2, 3]));
        }
        std::fs::remove_dir(&gone).unwrap();
        p.keep.settle(&p.dir).unwrap();
        assert_eq!(p.shown(), (vec![1, 2, 3], vec![2, 3]));
        p.forget(1);
        p.write(4);
        assert_eq!(p.shown(), (vec![1, 4], vec![]));
    }

    #[test]
    fn what_cannot_be_removed_is_tried_again() {
        let p = Place::new("again");
        p.write(1);
        p.checkpoint(1);
        p.commit(1);
        // In the place of the file that says that it is gone.
        let gone = p.base.join("h").join(key(1).gone());
        std::fs::create_dir(&gone).unwrap();
        assert!(p.keep.remove(&p.dir, key(1)).is_err());
        std::fs::remove_dir(&gone).unwrap();
        p.remove(1);
        assert_eq!(p.shown(), (vec![1], vec![1]));
        std::fs::remove_file(&gone).unwrap();
        std::fs::create_dir(&gone).unwrap();
        p.forget(1);
        let other = || p.keep.enter(&p.dir, key(2), || Ok(true));
        assert!(other().is_err());
        std::fs::remove_dir(&gone).unwrap();
        other().unwrap();
        assert_eq!(p.shown(), (vec![], vec![]));
    }
}
