//! Standard input of the ranks: under `srun` all tasks get the same unless it is told otherwise, which a launcher
//! cannot do. So each rank reads the file by itself.

use crate::Failure;
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::io::{IsTerminal, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Where standard input comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Input {
    /// Nowhere.
    None,
    /// The launcher passes it to one task.
    One(usize),
    /// All tasks read the file.
    File(Source),
}

/// A file that all tasks read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Source {
    path: PathBuf,
    /// From here on.
    at: u64,
    mark: Option<Mark>,
}

/// By this another host knows a regular file: inode, size, and when it was changed.
type Mark = (u64, u64, i64, i64);

fn mark(of: &Metadata) -> Option<Mark> {
    of.is_file().then(|| (of.ino(), of.size(), of.mtime(), of.mtime_nsec()))
}

impl Source {
    fn of(path: PathBuf, at: u64, seen: &Metadata) -> Result<Self, String> {
        if seen.nlink() == 0 {
            return Err("standard input is a deleted file, which ranks on other nodes cannot read; say --input=0 or --input=none, or < FILE".into());
        }
        let mark = mark(seen);
        Ok(Self { path, at, mark })
    }

    fn open(&self) -> Result<File, Failure> {
        let name = self.path.display();
        let fail = |e| Failure::io(format!("read {name}"), &e);
        let mut file = File::open(&self.path).map_err(fail)?;
        if mark(&file.metadata().map_err(fail)?) != self.mark {
            let here = crate::sys::host();
            return Err(Failure::new(
                Exit::Usage,
                format!("standard input: {name} is another file on {here}, or has changed; put it on a file system that all nodes share"),
            ));
        }
        if self.at > 0 {
            file.seek(SeekFrom::Start(self.at)).map_err(fail)?;
        }
        Ok(file)
    }
}

impl Input {
    /// As an `srun` would have it whose option says `said`.
    pub(super) fn of(said: Option<&str>) -> Result<Self, String> {
        match said {
            Some("none") => Ok(Self::None),
            Some(other) => other.parse().map_or_else(|_| Self::named(other), |n| Ok(Self::One(n))),
            None => Self::inherited(),
        }
    }

    fn named(name: &str) -> Result<Self, String> {
        let fail = |e| format!("read {name}: {e}");
        let path = std::path::absolute(name).map_err(fail)?;
        let seen = std::fs::metadata(&path).map_err(fail)?;
        Ok(Self::File(Source::of(path, 0, &seen)?))
    }

    /// All tasks would get what this process would read.
    fn inherited() -> Result<Self, String> {
        let own = || std::io::stdin().as_fd().try_clone_to_owned().map(File::from);
        let Ok(seen) = own().and_then(|f| f.metadata()) else {
            return Ok(Self::None);
        };
        let name = std::fs::read_link("/proc/self/fd/0").unwrap_or_default();
        if name == Path::new("/dev/null") {
            Ok(Self::None)
        } else if std::io::stdin().is_terminal() {
            crate::sys::say("srun with an MPI plugin: only task 0 reads from the terminal");
            Ok(Self::One(0))
        } else if seen.is_file() {
            let at = own().and_then(|mut f| f.stream_position());
            let at = at.map_err(|e| format!("where standard input is: {e}"))?;
            Ok(Self::File(Source::of(name, at, &seen)?))
        } else if seen.file_type().is_char_device() {
            Ok(Self::File(Source::of(name, 0, &seen)?))
        } else {
            Err("what comes through a pipe or socket would go to all tasks, which belay cannot do; say --input=0 or --input=none, or < FILE".into())
        }
    }

    /// Standard input for task `rank`, where it is not what it has.
    pub(super) fn open(&self, rank: usize) -> Result<Option<Stdio>, Failure> {
        match self {
            Self::One(task) if *task == rank => Ok(None),
            Self::None | Self::One(_) => Ok(Some(Stdio::null())),
            Self::File(source) => Ok(Some(source.open()?.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_none_or_of_one_task() {
        assert_eq!(Input::of(Some("none")), Ok(Input::None));
        assert_eq!(Input::of(Some("2")), Ok(Input::One(2)));
        assert!(Input::One(2).open(2).unwrap().is_none());
        assert!(Input::One(2).open(1).unwrap().is_some());
    }

    #[test]
    fn a_file_is_read_where_it_is_the_same() {
        assert!(Input::of(Some("/not/there")).is_err());
        let name = std::env::temp_dir().join(format!("belay-input-{}", std::process::id()));
        std::fs::write(&name, "some input").unwrap();
        let input = Input::of(Some(name.to_str().unwrap())).unwrap();
        assert!(input.open(3).unwrap().is_some());
        // As if another host had a file of its own there.
        std::fs::write(&name, "other input!").unwrap();
        assert!(input.open(3).unwrap_err().message.contains("is another file on"));
        std::fs::remove_file(&name).unwrap();
        assert!(input.open(0).is_err());
    }
}
