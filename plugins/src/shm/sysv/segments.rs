//! Shared memory segments.

use super::lists::{each, list, LISTS};
use super::{change, common, failed, is_own, one_of, same_id, set_perm, taken, Common, OWN_NAMESPACE};
use crate::content::{Content, PageSource};
use crate::fault::{At, Fault, Refusal};
use crate::session::Session;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

const SHM_DEST: u32 = 0o1000;
/// In the mode of a segment: locked in memory.
const SHM_LOCKED: u32 = 0o2000;
const SHM_INFO: i32 = 14;
const SHM_STAT_ANY: i32 = 15;

/// A shared memory segment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Segment {
    common: Common,
    content: Content,
    /// Marked for removal when the last process detaches.
    removed: bool,
    /// Its pages stay in memory (SHM_LOCK).
    #[serde(default)]
    locked: bool,
}

/// Captures the segments that the job has attached, and those that one of its processes made or used last.
pub(super) fn capture(s: &mut Session<'_>, pids: &BTreeSet<i32>, out: &mut Vec<Segment>) -> Result<(), Refusal> {
    let attached = s.processes.iter().flat_map(|p| &p.shared).filter_map(|m| m.sysv_shmid);
    let attached: BTreeSet<i32> = attached.collect();
    let used = segments_of(pids).into_iter().collect::<BTreeSet<i32>>();
    for id in &used | &attached {
        let name = format!("System V shared memory segment {id}");
        let segment = segment(s, id);
        if attached.contains(&id) {
            out.push(segment.map_err(|e| failed(name, e))?);
        } else {
            out.extend(taken(s, name, segment)?);
        }
    }
    Ok(())
}

/// `shmctl` with a `shmid_ds`.
fn shm_stat(id: i32, cmd: i32) -> io::Result<(i32, libc::shmid_ds)> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut ds: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: `ds` is valid for writing.
    let r = crate::sys::check(unsafe { libc::shmctl(id, cmd, &mut ds) })?;
    Ok((r, ds))
}

/// Identifier, maker, who used it last, owner and creator of every segment, as listed at `path`.
pub(super) fn rows(path: &Path) -> Vec<[i64; 5]> {
    list(path, ["shmid", "cpid", "lpid", "uid", "cuid"], || {
        each(shm_stat(0, SHM_INFO).map(|(last, _)| last), |at| {
            let (id, ds) = shm_stat(at, SHM_STAT_ANY)?;
            let (p, users) = (&ds.shm_perm, [ds.shm_cpid, ds.shm_lpid].map(i64::from));
            Ok([id.into(), users[0], users[1], p.uid.into(), p.cuid.into()])
        })
    })
}

fn segments_of(pids: &BTreeSet<i32>) -> Vec<i32> {
    let private = OWN_NAMESPACE.get().is_some();
    let rows = rows(&Path::new(LISTS).join("shm")).into_iter();
    let mine = rows.filter(|[_, maker, last, owner, creator]| {
        is_own(*owner, *creator) && (private || one_of(pids, *maker) || one_of(pids, *last))
    });
    mine.filter_map(|row| i32::try_from(row[0]).ok()).collect()
}

fn segment(s: &mut Session<'_>, id: i32) -> Result<Segment, Fault> {
    let (_, ds) = shm_stat(id, libc::IPC_STAT).at("shmctl")?;
    let bytes = ds.shm_segsz;
    let map = Attached::new(id, libc::SHM_RDONLY).at("attach (shmat)")?;
    let content = Content::of_mapping(map.0, bytes, &mut s.contents)?;
    Ok(Segment {
        common: common(id, &ds.shm_perm),
        content,
        removed: u32::from(ds.shm_perm.mode) & SHM_DEST != 0,
        locked: u32::from(ds.shm_perm.mode) & SHM_LOCKED != 0,
    })
}

/// An attachment of the agent's own.
struct Attached(*mut u8);

impl Attached {
    fn new(id: i32, flags: i32) -> io::Result<Self> {
        // SAFETY: a null address lets the kernel choose a free range.
        let p = unsafe { libc::shmat(id, std::ptr::null(), flags) };
        if p.addr() == usize::MAX {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(p.cast()))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: the address came from shmat, and nothing refers into the attachment any more.
        unsafe { libc::shmdt(self.0.cast()) };
    }
}

impl Segment {
    /// Makes it again.
    pub(super) fn rebuild(&self, pages: &dyn PageSource) -> Result<(), Fault> {
        let c = &self.common;
        let bytes = usize::try_from(self.content.bytes).map_err(|_| Fault::Refused("segment too large".into()))?;
        let key = if self.removed { libc::IPC_PRIVATE } else { c.key };
        let flags = libc::IPC_CREAT | libc::IPC_EXCL | 0o600;
        // SAFETY: shmget takes numbers only.
        same_id("shm", c.id, || unsafe { libc::shmget(key, bytes, flags) })?;
        {
            let map = Attached::new(c.id, 0).at("attach (shmat)")?;
            // SAFETY: the attachment is a new segment of `content.bytes` zero bytes.
            unsafe { self.content.fill_memory(map.0, pages)? };
        }
        if self.locked {
            // As with other memory, as far as the limits allow.
            if let Err(error) = shm_stat(c.id, libc::SHM_LOCK) {
                tracing::warn!(%error, id = c.id, "a System V segment is not locked in memory any more");
            }
        }
        let (_, mut ds) = shm_stat(c.id, libc::IPC_STAT).at("shmctl")?;
        let set = set_perm(c, |mode, owner| {
            change(&mut ds.shm_perm, mode, owner);
            // SAFETY: `ds` is valid for reading.
            crate::sys::check(unsafe { libc::shmctl(c.id, libc::IPC_SET, &mut ds) })
        });
        set.at("set mode and owner of a segment")?;
        Ok(())
    }

    /// Marks it for removal where it was so.
    pub(super) fn remove_pending(&self) -> Result<(), Fault> {
        if !self.removed {
            return Ok(());
        }
        let id = self.common.id;
        // SAFETY: IPC_RMID takes no third argument.
        let done = unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
        crate::sys::check(done).at(format!("mark segment {id} for removal"))?;
        Ok(())
    }
}
