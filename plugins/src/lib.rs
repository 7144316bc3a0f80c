//! One module per kind of descriptor or shared object: capture, drain, rebuild, refill.

use belay_image::blobs::{BlobReader, BlobWriter};
use belay_image::model::ObjectId;
use serde::{Deserialize, Serialize};
use std::os::fd::{OwnedFd, RawFd};

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
    pub name: String,
    /// Set for attached System V segments.
    pub sysv_shmid: Option<i32>,
}

/// One stopped process, as the plugins see it.
#[derive(Debug)]
pub struct ProcessView {
    /// Process identifier.
    pub pid: i32,
    /// pidfd of it (for pidfd_getfd).
    pub pidfd: OwnedFd,
    /// Its shared mappings.
    pub shared: Vec<SharedMapping>,
}

/// What capture may use.
#[derive(Debug)]
pub struct CaptureEnv<'a> {
    /// All live processes of the job, stopped (ptrace-stopped by the calling thread).
    pub processes: &'a [ProcessView],
    /// Where byte strings go.
    pub blobs: &'a mut BlobWriter,
    /// Save the contents of every open regular file, not only of those that would otherwise be lost.
    pub save_open_files: bool,
}

/// Something that cannot be checkpointed, with the reason.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[error("process {pid}: {object}: {reason}")]
pub struct Refusal {
    /// Process.
    pub pid: i32,
    /// The object, for example `fd 7 (anon_inode:[io_uring])`.
    pub object: String,
    /// Why not, and what to do.
    pub reason: String,
}

/// Everything about descriptors and shared objects; contents of section DESCRIPTORS.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Descriptors {}

/// Captures all descriptors and shared objects. On return, the kernel's state is what it was before: the processes may go on.
pub fn capture(_env: CaptureEnv<'_>) -> Result<Descriptors, Vec<Refusal>> {
    Ok(Descriptors::default())
}

/// Rebuilds descriptors and shared objects in a restarted job.
#[derive(Debug)]
pub struct Rebuilder {}

impl Rebuilder {
    /// Called in the agent of the restarted job, before any process is forked: creates every open description, every shared object and
    /// System V segment, and refills data in flight. All are held by descriptors of the agent at numbers of at least [`Rebuilder::base`].
    pub fn rebuild(_descriptors: Descriptors, _blobs: &BlobReader) -> Result<Self, Refusal> {
        Ok(Self {})
    }

    /// Smallest number that no process of the job uses for a descriptor.
    pub fn base(&self) -> RawFd {
        1024
    }

    /// Descriptor through which a shared mapping of `object` is made, opened for writing where `may_write` is set.
    pub fn shared_fd(&self, _object: ObjectId, _may_write: bool) -> Option<RawFd> {
        None
    }

    /// Called in process `pid` after its fork from the agent (before its memory is replaced): puts every descriptor at its number and closes all
    /// others except `keep`. Does what needs numbers or process identity (epoll interest lists, POSIX locks, F_SETOWN).
    pub fn install(&self, _pid: i32, _keep: &[RawFd]) -> Result<(), Refusal> {
        Ok(())
    }

    /// Called in process `pid` when all processes and threads of the job exist (pidfds).
    pub fn install_late(&self, _pid: i32) -> Result<(), Refusal> {
        Ok(())
    }
}
