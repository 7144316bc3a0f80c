//! What a checkpoint knows about descriptors and shared objects, as plain data.
//!
//! A [`Table`] gives numbers to descriptions; a [`Description`] is one open file description, shared by every number of every process that
//! refers to it; objects behind several descriptions (files, pipes, terminals) are in lists of their own, referred to by index. Each kind's
//! own data is defined beside the code that captures and rebuilds it.

use crate::capture::RaisedLimit;
use crate::{epoll, eventfd, files, inotify, locks, mqueue, pidfd, pipes, shm, signalfd, sockets, terminals, timerfd};
use belay_image::model::ObjectId;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::RawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Index of a description in [`Descriptors`].
pub(crate) type DescId = usize;

/// Everything about descriptors and shared objects; contents of section DESCRIPTORS.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Descriptors {
    pub(crate) tables: Vec<Table>,
    pub(crate) descriptions: Vec<Description>,
    pub(crate) files: Vec<files::FileObject>,
    pub(crate) pipes: Vec<pipes::PipeObject>,
    #[serde(default)]
    pub(crate) queues: Vec<mqueue::QueueObject>,
    pub(crate) terminals: terminals::Terminals,
    pub(crate) sysv: shm::sysv::SysV,
    pub(crate) posix_locks: Vec<locks::PosixLock>,
    /// Working directories of the processes, each with those above it.
    pub(crate) working: Vec<Vec<files::Directory>>,
    /// Directories that the job's MPI keeps for its ranks, likewise.
    #[serde(default)]
    pub(crate) sessions: Vec<Vec<files::Directory>>,
    /// All directories that are the working or root directory of a process or thread, and whose they are.
    #[serde(default)]
    pub(crate) entered: Vec<files::Directory>,
    /// What this node has been called.
    #[serde(default)]
    pub(crate) names: crate::sockets::names::Names,
    /// Of the files of private mappings to which no path leads, those that are restored as such. Only the capture that has made this knows them.
    #[serde(skip)]
    pub private: BTreeSet<ObjectId>,
    /// What will not be exactly as it was after a restart, one line each, for people.
    pub notes: Vec<String>,
}

impl Descriptors {
    /// What lives in an IPC namespace and not in processes, where the job has such objects.
    pub fn of_ipc_namespace(&self) -> Option<&'static str> {
        if self.sysv.is_empty() {
            (!self.queues.is_empty()).then_some("POSIX message queues")
        } else {
            Some("System V shared memory, semaphores or message queues")
        }
    }

    /// Numbers that no process of the job uses for a descriptor, in an agent that may have as many as its hard limit allows.
    pub fn room(&self) -> Range<RawFd> {
        crate::rebuild::room(self, RaisedLimit::highest())
    }

    /// How many processes [`crate::Rebuilder::rebuild`] makes at most.
    pub fn keepers(&self) -> usize {
        crate::rebuild::keepers(self)
    }

    /// The table of a task, where it is known by that number.
    pub(crate) fn table(&self, task: i32) -> Option<&Table> {
        self.tables.iter().find(|t| t.pids.contains(&task))
    }

    /// What is wrong with the tables, where the threads of the job are `threads`, by process, and each task's table is made by itself or by one that can: a process makes its
    /// children, a thread the other threads of its process.
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

    /// Whether the job writes the file at `path`, or the checkpoint holds its contents: then it need not look now as it did then.
    pub fn restores(&self, path: &Path) -> bool {
        let ours = |f: &files::FileObject| f.origin == files::Origin::Named && (f.written || f.content.is_some());
        self.files.iter().any(|f| f.path.as_path() == path && ours(f))
    }
}

/// A descriptor table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Table {
    /// The tasks that use it: processes, and threads whose table is not that of their process. More than one only where they share it (CLONE_FILES); the first one's table is
    /// laid out, the others get it from that.
    pub(crate) pids: Vec<i32>,
    /// Its entries in ascending order of number.
    pub(crate) slots: Vec<Slot>,
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
pub(crate) struct Description {
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
    pub(crate) locks: Vec<locks::Lock>,
    /// What it is.
    pub(crate) kind: Kind,
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

/// What a description is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// The same description as the launcher's standard input, output or error; all numbers that it has there.
    LauncherStdio(Vec<RawFd>),
    /// Regular file, memfd; index into [`Descriptors::files`].
    File(usize),
    /// Directory, harmless device, kernel file, or anything opened with O_PATH.
    Path(files::path::PathState),
    /// End of a pipe or FIFO; index into [`Descriptors::pipes`].
    Pipe(usize),
    /// POSIX message queue; index into [`Descriptors::queues`].
    Queue(usize),
    /// Terminal.
    Terminal(terminals::Side),
    /// `AF_UNIX` socket.
    Unix(sockets::unix::UnixState),
    /// TCP socket.
    Tcp(sockets::tcp::TcpState),
    /// UDP socket.
    Udp(sockets::udp::UdpState),
    /// Netlink socket.
    Netlink(sockets::netlink::NetlinkState),
    /// eventfd.
    Eventfd(eventfd::EventfdState),
    /// signalfd.
    Signalfd(signalfd::SignalfdState),
    /// timerfd.
    Timerfd(timerfd::TimerfdState),
    /// epoll instance.
    Epoll(epoll::EpollState),
    /// inotify instance.
    Inotify(inotify::InotifyState),
    /// pidfd.
    Pidfd(pidfd::PidfdState),
}

/// A file name: any bytes, stored as a string in which a byte that is not part of valid UTF-8, and the backslash, is written as `\xNN`.
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
