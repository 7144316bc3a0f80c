//! Shared memory segments.

use super::lists::{each, list, LISTS};
use super::whose::{is_guessed, processes, seconds, Traces};
use super::{change, common, failed, is_own, same_id, set_perm, taken, whose, Common, OWN_NAMESPACE};
use crate::content::{Content, PageSource};
use crate::fault::{At, Fault, Refusal};
use crate::session::Session;
use belay_kernel::apart;
use belay_kernel::sysv::shm;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

const SHM_DEST: u32 = 0o1000;
/// In the mode of a segment: locked in memory.
const SHM_LOCKED: u32 = 0o2000;

/// A shared memory segment.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Segment {
    pub(super) common: Common,
    content: Content,
    /// Marked for removal when the last process detaches.
    removed: bool,
    /// Its pages stay in memory (SHM_LOCK).
    #[serde(default)]
    locked: bool,
    /// It may be another program's.
    #[serde(default)]
    pub(super) guessed: bool,
}

/// The segments that this agent has read, who is the last user of each since then, and whether it is only guessed to be
/// the job's.
static LOOKED_AT: Mutex<BTreeMap<i32, (i64, bool)>> = Mutex::new(BTreeMap::new());

/// Captures the segments that the job has attached, and those that are the job's otherwise or may be.
pub(super) fn capture(s: &mut Session<'_>, pids: &BTreeSet<i32>, out: &mut Vec<Segment>) -> Result<(), Refusal> {
    let attached = s.processes.iter().flat_map(|p| &p.shared).filter_map(|m| m.sysv_shmid);
    let attached: BTreeSet<i32> = attached.collect();
    let mut all: BTreeMap<i32, bool> = candidates(pids, s.launched).into_iter().collect();
    all.extend(attached.iter().map(|id| (*id, false)));
    let mut looked_at = BTreeMap::new();
    for (id, guessed) in &all {
        let name = format!("System V shared memory segment {id}");
        let segment = segment(s, *id, *guessed);
        if let Ok(ds) = shm::stat(*id) {
            looked_at.insert(*id, (ds.shm_lpid.into(), *guessed));
        }
        if attached.contains(id) {
            out.push(segment.map_err(|e| failed(name, e))?);
        } else {
            out.extend(taken(s, (name, *guessed), segment)?);
        }
    }
    *LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner) = looked_at;
    Ok(())
}

/// Identifier, owner, creator, maker, who used it last, how many have it attached, when it was attached and detached last
/// and changed, of every segment, as listed at `path`.
pub(super) fn rows(path: &Path) -> Vec<[i64; 9]> {
    let names = ["shmid", "uid", "cuid", "cpid", "lpid", "nattch", "atime", "dtime", "ctime"];
    list(path, names, || {
        each(shm::last(), |at| {
            let (id, ds) = shm::at(at)?;
            let (p, users) = (&ds.shm_perm, [ds.shm_cpid, ds.shm_lpid].map(i64::from));
            let attached = i64::try_from(ds.shm_nattch).map_err(io::Error::other)?;
            let times = [ds.shm_atime, ds.shm_dtime, ds.shm_ctime];
            Ok([
                id.into(),
                p.uid.into(),
                p.cuid.into(),
                users[0],
                users[1],
                attached,
                times[0],
                times[1],
                times[2],
            ])
        })
    })
}

/// Each segment that the job may have without having it attached, and whether that is only guessed.
fn candidates(pids: &BTreeSet<i32>, launched: SystemTime) -> Vec<(i32, bool)> {
    let launched = seconds(launched);
    let looked_at = LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner);
    let candidate = |[id, owner, creator, maker, last, attached, atime, dtime, changed]: [i64; 9]| {
        let id = i32::try_from(id).ok().filter(|_| is_own(owner, creator))?;
        let traces = Traces {
            creator,
            last: processes(&[maker, last]),
            used: atime.max(dtime).max(changed),
            changed,
        };
        let unused_since = looked_at.get(&id).filter(|(by, _)| *by == last);
        let made_by_agent = maker == last && last == i64::from(std::process::id());
        let guessed = match (OWN_NAMESPACE.get(), unused_since) {
            (_, Some((_, guessed))) => *guessed,
            // Once somebody has used such a segment here, it was the job.
            (Some(guesses), None) => made_by_agent && guesses.segments.contains(&id),
            // One that is only guessed is not another program's who has it attached. The agent of another job of the user
            // may read it: then who has attached it last has ended, but has not detached it. What has no number here lives in
            // another PID namespace.
            (None, None) => {
                let may_be = attached == 0 || last != 0 && atime > dtime;
                is_guessed(&traces, pids, launched).filter(|guessed| !guessed || may_be)?
            }
        };
        Some((id, guessed))
    };
    rows(&Path::new(LISTS).join("shm"))
        .into_iter()
        .filter_map(candidate)
        .collect()
}

fn segment(s: &mut Session<'_>, id: i32, guessed: bool) -> Result<Segment, Fault> {
    let (segment, ds) = shm::Segment::find(id).at("shmctl")?;
    let map = attach_apart(segment).at("attach (shmat)")?;
    let content = Content::of_mapping(&map, ds.shm_segsz, &mut s.contents);
    detach_apart(map);
    let content = content?;
    Ok(Segment {
        common: common(id, &ds.shm_perm),
        content,
        removed: u32::from(ds.shm_perm.mode) & SHM_DEST != 0,
        locked: u32::from(ds.shm_perm.mode) & SHM_LOCKED != 0,
        guessed,
    })
}

/// Attaches it for reading, in a process that has ended then: a living one that has used a segment last would be taken for
/// one that has it, by other jobs of the user.
fn attach_apart(segment: shm::Segment) -> io::Result<shm::Attached> {
    let mut attached = Err(io::ErrorKind::Interrupted.into());
    apart::run(&mut || attached = segment.attach(libc::SHM_RDONLY))?;
    attached
}

/// Detaches it in such a process.
fn detach_apart(attached: shm::Attached) {
    let mut left = Some(attached);
    if let Err(error) = apart::run(&mut || drop(left.take())) {
        tracing::warn!(%error, "a System V segment stays attached");
        std::mem::forget(left);
    }
}

impl Segment {
    /// Makes it again. `tell` is told of what is not as it was.
    pub(super) fn rebuild(&self, pages: &dyn PageSource, tell: &dyn Fn(&str)) -> Result<(), Fault> {
        let id = self.common.id;
        let remove = || drop(shm::remove(id));
        let name = format!("shared memory segment {id}");
        whose::rebuild((&name, self.guessed), || self.make(pages), remove, tell)
    }

    fn make(&self, pages: &dyn PageSource) -> Result<(), Fault> {
        let c = &self.common;
        let bytes = usize::try_from(self.content.bytes).map_err(|_| Fault::Refused("segment too large".into()))?;
        let key = if self.removed { libc::IPC_PRIVATE } else { c.key };
        let mut made = None;
        same_id("shm", c.id, || Ok(made.insert(shm::Segment::make(key, bytes, 0o600)?).id()))?;
        if let Some(segment) = made {
            let map = segment.attach(0).at("attach (shmat)")?;
            self.content.fill_memory(&map, pages)?;
        }
        if self.locked {
            // As with other memory, as far as the limits allow.
            if let Err(error) = shm::lock(c.id) {
                tracing::warn!(%error, id = c.id, "a System V segment is not locked in memory any more");
            }
        }
        let mut ds = shm::stat(c.id).at("shmctl")?;
        let set = set_perm(c, |mode, owner| {
            change(&mut ds.shm_perm, mode, owner);
            shm::change(c.id, &mut ds)
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
        shm::remove(id).at(format!("mark segment {id} for removal"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_agent_reads_may_be_that_of_another_job() {
        let mut made = Err(io::ErrorKind::Interrupted.into());
        apart::run(&mut || made = shm::Segment::make(libc::IPC_PRIVATE, 1, 0o600)).unwrap();
        let segment = made.unwrap();
        let guess = || {
            let launched = SystemTime::now() - std::time::Duration::from_secs(10);
            let all = candidates(&BTreeSet::new(), launched);
            all.into_iter().find(|(id, _)| *id == segment.id())
        };
        let read = attach_apart(segment).unwrap();
        let while_it_is_read = guess();
        let used = segment.attach(0).unwrap();
        let while_it_is_used = guess();
        drop(used);
        detach_apart(read);
        shm::remove(segment.id()).unwrap();
        assert_eq!((while_it_is_read, while_it_is_used), (Some((segment.id(), true)), None));
    }
}
