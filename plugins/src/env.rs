//! What the capture is given: the stopped processes, and where things go.

use crate::content::PageSink;
use crate::gate::gpu::Devices;
use crate::group::Group;
use crate::inside::Inside;
use crate::sockets::names::Names;
use belay_image::blobs::BlobWriter;
use belay_image::model::ObjectId;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::SystemTime;

/// A shared mapping of one process, as the capture flow found it in `/proc/PID/maps`.
#[derive(Debug, Clone)]
pub struct SharedMapping {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Offset of `start` in the object, bytes.
    pub offset: u64,
    /// `PROT_*` bits.
    pub prot: u32,
    /// Identity of the object.
    pub object: ObjectId,
    /// Name as `/proc/PID/maps` shows it, with " (deleted)" where the kernel appended it.
    pub name: OsString,
    /// Set for attached System V segments.
    pub sysv_shmid: Option<i32>,
}

/// The GPUs that a process has left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeftGpus {
    /// Those of the host.
    pub devices: Devices,
    /// The driver's thread in the process.
    pub thread: Option<i32>,
}

/// One stopped process, as the plugins see it.
#[derive(Debug)]
pub struct ProcessView {
    /// Process identifier.
    pub pid: i32,
    /// A thread that lives, under whose number `/proc` shows descriptors and directories: the main thread, unless that has exited.
    pub task: i32,
    /// pidfd of that thread (for pidfd_getfd).
    pub pidfd: OwnedFd,
    /// Threads that do not use its descriptor table (`unshare(CLONE_FILES)`).
    pub apart: Vec<i32>,
    /// Working directories of threads that have their own (`unshare(CLONE_FS)`).
    pub standing: Vec<PathBuf>,
    /// The program's file.
    pub exe: PathBuf,
    /// Where its stack begins.
    pub stack: u64,
    /// Its shared mappings.
    pub shared: Vec<SharedMapping>,
    /// Files of its private mappings to which no path leads.
    pub private: Vec<ObjectId>,
    /// Libraries in it that take part in this checkpoint, and are at rest.
    pub libraries: Vec<String>,
    /// The GPUs that it has left for the checkpoint.
    pub left_gpus: Option<LeftGpus>,
}

/// What capture may use.
#[derive(Debug)]
pub struct CaptureEnv<'a> {
    /// All live processes of the job, stopped (ptrace-stopped by the calling thread).
    pub processes: &'a [ProcessView],
    /// Where byte strings go.
    pub blobs: &'a mut BlobWriter,
    /// Where contents of shared memory and files go.
    pub pages: &'a mut dyn PageSink,
    /// Contents of open files that would not be lost, but may differ at a restart, are saved up to this length in bytes;
    /// `u64::MAX`: of all that are open for writing, or were made since the launch.
    pub saved_up_to: u64,
    /// When the job was launched: what has been made since then is its own work.
    pub launched: SystemTime,
    /// The other nodes of the job, where it has any: they capture at the same time.
    pub group: Option<&'a dyn Group>,
    /// What this node has been called since the job was launched.
    pub names: &'a Names,
    /// Does what only the processes themselves can do.
    pub inside: Option<&'a mut dyn Inside>,
}
