//! What a checkpoint knows about descriptors and shared objects, as plain data.
//!
//! A [`Table`] gives numbers to descriptions; a [`Description`] is one open file description, shared by every number of
//! every process that refers to it; objects behind several descriptions (files, pipes, terminals) are in lists of their
//! own, referred to by index. Each kind's own data is defined beside the code that captures and rebuilds it.

use crate::fault::{Fault, Refusal};
use crate::state::{Described, Part, Parts, State};
use belay_image::model::ObjectId;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Index of a description in [`Descriptors`].
pub(crate) type DescId = usize;

/// Everything about descriptors and shared objects; contents of section DESCRIPTORS.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(try_from = "Stored")]
pub struct Descriptors {
    pub(crate) tables: Vec<Table>,
    pub(crate) descriptions: Vec<Description>,
    /// Working directories of the processes, each with those above it.
    pub(crate) working: Vec<Vec<Directory>>,
    /// Directories that the job's MPI keeps for its ranks, likewise.
    pub(crate) sessions: Vec<Vec<Directory>>,
    /// All directories that are the working or root directory of a process or thread, and whose they are.
    pub(crate) entered: Vec<Directory>,
    /// What kinds have beside descriptions.
    pub(crate) parts: Parts,
    /// Of the files of private mappings to which no path leads, those that are restored as such. Only the capture that
    /// has made this knows them.
    pub private: BTreeSet<ObjectId>,
    /// What will not be exactly as it was after a restart, one line each, for people.
    pub notes: Vec<String>,
    /// For each kind that occurs, the version of what it has written.
    pub(crate) versions: BTreeMap<&'static str, u32>,
}

/// [`Descriptors`] as they are read: what belongs to a kind, that has to read. (See `kinds`.)
#[derive(Debug, Deserialize)]
pub(crate) struct Stored {
    pub(crate) tables: Vec<Table>,
    pub(crate) descriptions: Vec<Description<BTreeMap<String, Value>>>,
    pub(crate) working: Vec<Vec<Directory>>,
    #[serde(default)]
    pub(crate) sessions: Vec<Vec<Directory>>,
    #[serde(default)]
    pub(crate) entered: Vec<Directory>,
    pub(crate) notes: Vec<String>,
    /// Images of before do not tell: they have the first version of each.
    #[serde(default)]
    pub(crate) versions: BTreeMap<String, u32>,
    #[serde(flatten)]
    pub(crate) parts: BTreeMap<String, Value>,
}

impl Serialize for Descriptors {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut map = s.serialize_map(None)?;
        map.serialize_entry("tables", &self.tables)?;
        map.serialize_entry("descriptions", &self.descriptions)?;
        map.serialize_entry("working", &self.working)?;
        map.serialize_entry("sessions", &self.sessions)?;
        map.serialize_entry("entered", &self.entered)?;
        map.serialize_entry("notes", &self.notes)?;
        map.serialize_entry("versions", &self.versions)?;
        for (key, part) in self.parts.all() {
            map.serialize_entry(key, part)?;
        }
        map.end()
    }
}

impl Descriptors {
    /// Each description of a kind with state of this type.
    pub(crate) fn each<T: State>(&self) -> impl Iterator<Item = (DescId, &T)> {
        let all = self.descriptions.iter().enumerate();
        all.filter_map(|(id, d)| Some((id, d.kind.get::<T>()?)))
    }

    /// That a description refers to another one, which must be there.
    pub(crate) fn is_description(&self, id: DescId) -> Result<(), String> {
        match self.descriptions.get(id) {
            Some(_) => Ok(()),
            None => Err(format!("description {id} is unknown")),
        }
    }

    /// That it refers to an object, which must be one of these.
    pub(crate) fn is_one_of<T>(at: usize, objects: &[T]) -> Result<(), String> {
        if at < objects.len() {
            Ok(())
        } else {
            Err("refers to an object that is unknown".to_owned())
        }
    }

    /// A refusal that names the descriptor.
    pub(crate) fn refusal(&self, id: DescId, fault: &Fault) -> Refusal {
        let (pid, object) = match self.descriptions.get(id) {
            Some(d) if d.holder.fd >= 0 => (d.holder.pid, format!("fd {} ({})", d.holder.fd, d.name)),
            Some(d) => (d.holder.pid, format!("descriptor in flight ({})", d.name)),
            None => (0, "descriptor".into()),
        };
        fault.of(pid, object)
    }

    /// The objects of this type, which one kind has beside descriptions.
    pub(crate) fn list<T>(&self) -> &[T]
    where
        Vec<T>: Part,
    {
        self.parts.get::<Vec<T>>().map_or(&[], Vec::as_slice)
    }

    /// The table of a task, where it is known by that number.
    pub(crate) fn table(&self, task: i32) -> Option<&Table> {
        self.tables.iter().find(|t| t.pids.contains(&task))
    }

    /// Processes that have their table from another, which is not their parent, and from which; `parent` is that of a
    /// process.
    pub fn made_beside(&self, parent: &dyn Fn(i32) -> i32) -> HashMap<i32, i32> {
        let mut out = HashMap::new();
        for t in self.tables.iter().filter(|t| t.pids.len() > 1) {
            let mut others = t.pids.iter().copied().filter(|pid| !t.pids.contains(&parent(*pid)));
            let Some(first) = others.next() else { continue };
            out.extend(others.map(|other| (other, first)));
        }
        out
    }

    /// What is wrong with the tables, where the threads of the job are `threads`, by process, and each task's table is
    /// made by itself or by one that can: a process makes its children, a thread the other threads of its process.
    pub(crate) fn check_tables(&self, threads: &HashMap<i32, i32>) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for t in &self.tables {
            let Some(first) = t.pids.first() else {
                return Err("a descriptor table that nobody uses".into());
            };
            for task in &t.pids {
                let process = threads.get(task);
                if !seen.insert(*task) || process.is_none() {
                    return Err(format!("task {task} uses two descriptor tables, or is none of the job's"));
                }
                // A main thread's table is that of its process.
                let of_thread = |task: &i32| threads.get(task).is_some_and(|process| process != task);
                if of_thread(task) != of_thread(first) || (of_thread(task) && process != threads.get(first)) {
                    return Err(format!("thread {task} shares a descriptor table with another process"));
                }
            }
        }
        match threads.values().find(|process| !seen.contains(process)) {
            Some(process) => Err(format!("process {process} has no descriptor table")),
            None => Ok(()),
        }
    }
}

/// A descriptor table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Table {
    /// The tasks that use it: processes, and threads whose table is not that of their process. More than one only where
    /// they share it (CLONE_FILES); the first one's table is laid out, the others get it from that.
    pub(crate) pids: Vec<i32>,
    /// Its entries in ascending order of number.
    pub(crate) slots: Vec<Slot>,
}

/// Largest number of a descriptor: the kernel's limit of limits (`fs.nr_open`).
const MOST_NUMBER: i32 = 0x7fff_ffc0;

/// Whether a descriptor can have this number.
pub(crate) fn is_number(fd: RawFd) -> bool {
    (0..MOST_NUMBER).contains(&fd)
}

/// One entry of a descriptor table.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Slot {
    /// Number.
    pub(crate) fd: RawFd,
    /// Description it refers to.
    pub(crate) desc: DescId,
    /// Close-on-exec.
    pub(crate) cloexec: bool,
}

/// Where a description was found.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Holder {
    /// The first task of the table that has it.
    pub(crate) pid: i32,
    /// Its number there, [`IN_FLIGHT`] for a description that is in flight in a socket.
    pub(crate) fd: RawFd,
}

/// See [`Holder`].
pub(crate) const IN_FLIGHT: RawFd = -1;

/// An open file description.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Description<K = Described> {
    /// Where it was found.
    pub(crate) holder: Holder,
    /// What `/proc/PID/fd/N` pointed to.
    pub(crate) name: FsPath,
    /// Status flags and access mode.
    pub(crate) flags: i32,
    /// File offset.
    pub(crate) pos: i64,
    /// Who is signalled when I/O is possible.
    pub(crate) owner: Option<Owner>,
    /// Locks that belong to the description.
    pub(crate) locks: Vec<Lock>,
    /// What it is.
    pub(crate) kind: K,
}

/// `F_SETOWN_EX` and `F_SETSIG` settings.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Owner {
    /// `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
    pub(crate) kind: i32,
    /// Task, process or process group, 0 when none.
    pub(crate) id: i32,
    /// Signal, 0 for SIGIO.
    pub(crate) signal: i32,
}

/// A lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lock {
    pub(crate) kind: LockKind,
    pub(crate) write: bool,
    pub(crate) start: i64,
    /// Last byte, `None` to the end of the file.
    pub(crate) end: Option<i64>,
    /// The process that the kernel shows as the one that has taken it, 0 where there is none.
    #[serde(default)]
    pub(crate) pid: i32,
}

/// Kinds of lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LockKind {
    Flock,
    Posix,
    Ofd,
    Lease,
}

/// A directory above a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Directory {
    /// Its path.
    pub(crate) path: FsPath,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Owner and group.
    pub(crate) owner: (u32, u32),
    /// It had been deleted at the checkpoint.
    pub(crate) gone: bool,
}

/// A file name: any bytes, stored as a string in which a byte that is not part of valid UTF-8, and the backslash, is
/// written as `\xNN`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FsPath(pub(crate) PathBuf);

impl FsPath {
    /// The path.
    pub(crate) fn as_path(&self) -> &Path {
        &self.0
    }
}

impl std::fmt::Display for FsPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.display().fmt(f)
    }
}

impl From<&Path> for FsPath {
    fn from(path: &Path) -> Self {
        Self(path.to_owned())
    }
}

impl Serialize for FsPath {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut out = String::new();
        for chunk in self.0.as_os_str().as_bytes().utf8_chunks() {
            for c in chunk.valid().chars() {
                if c == '\\' {
                    out.push_str("\\x5c");
                } else {
                    out.push(c);
                }
            }
            for b in chunk.invalid() {
                out.push_str(&format!("\\x{b:02x}"));
            }
        }
        s.serialize_str(&out)
    }
}

impl<'de> Deserialize<'de> for FsPath {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let mut bytes = Vec::with_capacity(text.len());
        let mut rest = text.as_str();
        while let Some((plain, escaped)) = rest.split_once("\\x") {
            bytes.extend_from_slice(plain.as_bytes());
            let hex = escaped
                .get(..2)
                .ok_or_else(|| serde::de::Error::custom("path: incomplete escape"))?;
            bytes.push(u8::from_str_radix(hex, 16).map_err(serde::de::Error::custom)?);
            rest = &escaped[2..];
        }
        bytes.extend_from_slice(rest.as_bytes());
        Ok(Self(PathBuf::from(OsString::from_vec(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_no_job_has_are_refused() {
        // Process 10 with threads 11 and 12, process 20 with thread 21.
        let threads = HashMap::from([(10, 10), (11, 10), (12, 10), (20, 20), (21, 20)]);
        let check = |users: &[&[i32]]| {
            let table = |pids: &&[i32]| Table {
                pids: pids.to_vec(),
                slots: Vec::new(),
            };
            let d = Descriptors {
                tables: users.iter().map(table).collect(),
                ..Descriptors::default()
            };
            d.check_tables(&threads).is_ok()
        };
        assert!(check(&[&[10, 20]]));
        assert!(!check(&[&[10]]) && !check(&[&[20], &[11]]));
        assert!(check(&[&[10], &[20], &[12, 11], &[21]]));
        let bad: [&[&[i32]]; 6] = [
            &[&[10, 20], &[]],
            &[&[10, 20], &[10]],
            &[&[10, 20, 11]],
            &[&[11, 10], &[20]],
            &[&[10, 20], &[11, 21]],
            &[&[10, 20], &[30]],
        ];
        for users in bad {
            assert!(!check(users), "{users:?}");
        }
    }

    #[test]
    fn any_file_name_survives_json() {
        for raw in [
            &b"/tmp/plain"[..],
            b"/a\\x41\\",
            b"/latin1 \xe9\xff",
            "/\u{e9}\n\"".as_bytes(),
        ] {
            let path = FsPath(PathBuf::from(OsString::from_vec(raw.to_vec())));
            let text = serde_json::to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<FsPath>(&text).unwrap(), path);
        }
        assert!(serde_json::from_str::<FsPath>("\"\\\\xZZ\"").is_err());
    }
}
