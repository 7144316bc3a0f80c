//! System V shared memory, semaphores and message queues.
//!
//! At restart the job has an IPC namespace of its own, so every object gets its old identifier through `/proc/sys/kernel/*_next_id`. A segment
//! that was removed while attached is made with its identifier, attached by the processes, and removed again by [`remove_pending`].

use crate::capture::Session;
use crate::content::Content;
use crate::fault::{refuse, At, Fault};
use crate::model::Holder;
use belay_image::blobs::{BlobReader, BlobRef};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// All System V objects of the job.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SysV {
    segments: Vec<Segment>,
    semaphores: Vec<SemaphoreSet>,
    queues: Vec<Queue>,
}

impl SysV {
    /// Whether there are no objects.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.semaphores.is_empty() && self.queues.is_empty()
    }
}

/// Identity common to all kinds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Common {
    id: i32,
    key: i32,
    mode: u32,
    owner: (u32, u32),
}

/// A shared memory segment.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Segment {
    common: Common,
    content: Content,
    /// Marked for removal when the last process detaches.
    removed: bool,
}

/// A set of semaphores.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct SemaphoreSet {
    common: Common,
    values: Vec<u16>,
}

/// A message queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Queue {
    common: Common,
    max_bytes: u64,
    /// (type, text).
    messages: Vec<(i64, BlobRef)>,
}

const SHM_DEST: u32 = 0o1000;
const MSG_COPY: i32 = 0o40000;
/// Where the kernel lists the objects of the namespace.
const LISTS: &str = "/proc/sysvipc";
const SHM_INFO: i32 = 14;
const SHM_STAT_ANY: i32 = 15;
const SEM_STAT_ANY: i32 = 20;
const MSG_STAT_ANY: i32 = 13;

fn common(id: i32, p: &libc::ipc_perm) -> Common {
    Common {
        id,
        key: p.__key,
        mode: u32::from(p.mode) & 0o777,
        owner: (p.uid, p.gid),
    }
}

/// Captures the segments the job has attached, and every object of the namespace that a process of the job made or used last.
pub(crate) fn capture(s: &mut Session<'_>, out: &mut SysV) -> Result<(), (Holder, String, Fault)> {
    let pids: BTreeSet<i32> = s.processes.iter().map(|p| p.pid).collect();
    let at = |id: i32, what: &str| (Holder { pid: 0, fd: -1 }, format!("System V {what} {id}"));
    let attached: BTreeSet<i32> = s
        .processes
        .iter()
        .flat_map(|p| p.shared.iter().filter_map(|m| m.sysv_shmid))
        .collect();
    for id in segments_of(&pids)
        .into_iter()
        .chain(attached.iter().copied())
        .collect::<BTreeSet<i32>>()
    {
        let (holder, name) = at(id, "shared memory segment");
        match segment(s, id) {
            Ok(segment) => out.segments.push(segment),
            Err(e) if is_foreign(&e) && !attached.contains(&id) => {
                s.notes.push(format!("{name} is not readable: {e}; it is not restored"));
            }
            Err(e) => return Err((holder, name, e)),
        }
    }
    for id in semaphores_of(&pids) {
        let (holder, name) = at(id, "semaphore set");
        match semaphore_set(id) {
            Ok(set) => out.semaphores.push(set),
            Err(e) if is_foreign(&e) => s.notes.push(format!("{name} is not readable: {e}; it is not restored")),
            Err(e) => return Err((holder, name, e)),
        }
    }
    for id in queues_of(&pids) {
        let (holder, name) = at(id, "message queue");
        match queue(s, id) {
            Ok(queue) => out.queues.push(queue),
            Err(e) if is_foreign(&e) => s.notes.push(format!("{name} is not readable: {e}; it is not restored")),
            Err(e) => return Err((holder, name, e)),
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

/// The columns `names` of every row of the kernel's list at `path`: one call for all objects, however many others have. Where it cannot be read, or has been masked, `asked` asks for
/// one object after the other.
fn list<const N: usize>(path: &Path, names: [&str; N], asked: impl FnOnce() -> Vec<[i64; N]>) -> Vec<[i64; N]> {
    match std::fs::read_to_string(path) {
        Ok(text) => columns(&text, names).unwrap_or_else(asked),
        // Without System V objects in the kernel there is no such file.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(e) => {
            tracing::debug!(path = %path.display(), error = %e, "objects are asked for one by one");
            asked()
        }
    }
}

/// What `stat` says of each object up to the last, whose place `last` is.
fn each<const N: usize>(last: io::Result<i32>, stat: impl Fn(i32) -> io::Result<[i64; N]>) -> Vec<[i64; N]> {
    let last = last.unwrap_or(-1);
    (0..=last).filter_map(|at| stat(at).ok()).collect()
}

/// `None` where the text has no such columns.
fn columns<const N: usize>(text: &str, names: [&str; N]) -> Option<Vec<[i64; N]>> {
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let head = lines.next().unwrap_or_default();
    let places = names.map(|name| head.iter().position(|h| *h == name));
    if places.contains(&None) {
        return None;
    }
    let number = |row: &[&str], place: Option<usize>| row.get(place?)?.parse().ok();
    let row = |row: Vec<&str>| {
        let found = places.map(|place| number(&row, place));
        found
            .iter()
            .all(Option::is_some)
            .then(|| found.map(Option::unwrap_or_default))
    };
    Some(lines.filter_map(row).collect())
}

/// Whether an object belongs to the agent's user. Process numbers come around again: one of another user is none of ours, whoever had its maker's number.
fn is_own(owner: i64, creator: i64) -> bool {
    // SAFETY: takes nothing and cannot fail.
    let me = i64::from(unsafe { libc::geteuid() });
    owner == me || creator == me
}

fn one_of(pids: &BTreeSet<i32>, pid: i64) -> bool {
    i32::try_from(pid).is_ok_and(|pid| pids.contains(&pid))
}

/// Identifier, maker, who used it last, owner and creator of every segment, as listed at `path`.
fn segments(path: &Path) -> Vec<[i64; 5]> {
    list(path, ["shmid", "cpid", "lpid", "uid", "cuid"], || {
        each(shm_stat(0, SHM_INFO).map(|(last, _)| last), |at| {
            let (id, ds) = shm_stat(at, SHM_STAT_ANY)?;
            let (p, users) = (&ds.shm_perm, [ds.shm_cpid, ds.shm_lpid].map(i64::from));
            Ok([id.into(), users[0], users[1], p.uid.into(), p.cuid.into()])
        })
    })
}

fn segments_of(pids: &BTreeSet<i32>) -> Vec<i32> {
    let private = OWN_NAMESPACE.load(Ordering::Relaxed);
    let rows = segments(&Path::new(LISTS).join("shm")).into_iter();
    let mine = rows.filter(|[_, maker, last, owner, creator]| {
        is_own(*owner, *creator) && (private || one_of(pids, *maker) || one_of(pids, *last))
    });
    mine.filter_map(|row| i32::try_from(row[0]).ok()).collect()
}

fn segment(s: &mut Session<'_>, id: i32) -> Result<Segment, Fault> {
    let (_, ds) = shm_stat(id, libc::IPC_STAT).at("shmctl")?;
    let bytes = ds.shm_segsz;
    let map = Attached::new(id, libc::SHM_RDONLY).at("attach (shmat)")?;
    let content = Content::of_mapping(map.0, bytes, s.blobs)?;
    Ok(Segment {
        common: common(id, &ds.shm_perm),
        content,
        removed: u32::from(ds.shm_perm.mode) & SHM_DEST != 0,
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

/// The fourth argument of `semctl`.
#[repr(C)]
#[derive(Clone, Copy)]
union SemArg {
    val: libc::c_int,
    buf: *mut libc::semid_ds,
    array: *mut u16,
}

fn sem_stat(id: i32, cmd: i32) -> io::Result<(i32, libc::semid_ds)> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut ds: libc::semid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: `ds` is valid for writing.
    let r = crate::sys::check(unsafe { libc::semctl(id, 0, cmd, SemArg { buf: &mut ds }) })?;
    Ok((r, ds))
}

fn sem_number(id: i32, at: usize, cmd: i32) -> io::Result<i32> {
    let at = i32::try_from(at).map_err(io::Error::other)?;
    // SAFETY: GETPID and the like take no fourth argument.
    crate::sys::check(unsafe { libc::semctl(id, at, cmd, SemArg { val: 0 }) })
}

/// Identifier, number of semaphores, owner and creator of every set, as listed at `path`.
fn semaphores(path: &Path) -> Vec<[i64; 4]> {
    list(path, ["semid", "nsems", "uid", "cuid"], || {
        each(sem_stat(0, libc::SEM_INFO).map(|(last, _)| last), |at| {
            let (id, ds) = sem_stat(at, SEM_STAT_ANY)?;
            let count = i64::try_from(ds.sem_nsems).map_err(io::Error::other)?;
            Ok([id.into(), count, ds.sem_perm.uid.into(), ds.sem_perm.cuid.into()])
        })
    })
}

fn semaphores_of(pids: &BTreeSet<i32>) -> Vec<i32> {
    let private = OWN_NAMESPACE.load(Ordering::Relaxed);
    let used = |id: i32, count: i64| {
        let count = usize::try_from(count).unwrap_or(0);
        (0..count).any(|i| sem_number(id, i, libc::GETPID).is_ok_and(|p| pids.contains(&p)))
    };
    let rows = semaphores(&Path::new(LISTS).join("sem")).into_iter();
    let mine = |[id, count, owner, creator]: [i64; 4]| {
        let id = i32::try_from(id).ok()?;
        (is_own(owner, creator) && (private || used(id, count))).then_some(id)
    };
    rows.filter_map(mine).collect()
}

/// Whether an object that no process has attached is none of the job's after all: its mode keeps the job's user out, or it is gone. (Whose it is can
/// only be guessed from process numbers, which come around again.)
fn is_foreign(e: &Fault) -> bool {
    matches!(e, Fault::Call { source, .. } if matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EIDRM | libc::EINVAL)))
}

/// Set in the agent of a restarted job, which has an IPC namespace of its own: everything in it is the job's.
static OWN_NAMESPACE: AtomicBool = AtomicBool::new(false);

/// Called where the IPC namespace is the job's own.
pub(crate) fn owns_namespace() {
    OWN_NAMESPACE.store(true, Ordering::Relaxed);
}

fn semaphore_set(id: i32) -> Result<SemaphoreSet, Fault> {
    let (_, ds) = sem_stat(id, libc::IPC_STAT).at("semctl")?;
    let mut values = vec![0u16; ds.sem_nsems as usize];
    // SAFETY: GETALL writes one value for each semaphore of the set.
    let got = unsafe {
        libc::semctl(
            id,
            0,
            libc::GETALL,
            SemArg {
                array: values.as_mut_ptr(),
            },
        )
    };
    crate::sys::check(got).at("semctl")?;
    Ok(SemaphoreSet {
        common: common(id, &ds.sem_perm),
        values,
    })
}

fn msg_stat(id: i32, cmd: i32) -> io::Result<(i32, libc::msqid_ds)> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut ds: libc::msqid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: `ds` is valid for writing.
    let r = crate::sys::check(unsafe { libc::msgctl(id, cmd, &mut ds) })?;
    Ok((r, ds))
}

/// Identifier, last sender and last receiver of every queue, as listed at `path`.
fn queues(path: &Path) -> Vec<[i64; 3]> {
    list(path, ["msqid", "lspid", "lrpid"], || {
        each(msg_stat(0, libc::MSG_INFO).map(|(last, _)| last), |at| {
            let (id, ds) = msg_stat(at, MSG_STAT_ANY)?;
            Ok([id.into(), ds.msg_lspid.into(), ds.msg_lrpid.into()])
        })
    })
}

fn queues_of(pids: &BTreeSet<i32>) -> Vec<i32> {
    let private = OWN_NAMESPACE.load(Ordering::Relaxed);
    let rows = queues(&Path::new(LISTS).join("msg")).into_iter();
    let mine = rows.filter(|[_, sender, receiver]| private || one_of(pids, *sender) || one_of(pids, *receiver));
    mine.filter_map(|row| i32::try_from(row[0]).ok()).collect()
}

fn queue(s: &mut Session<'_>, id: i32) -> Result<Queue, Fault> {
    let (_, ds) = msg_stat(id, libc::IPC_STAT).at("msgctl")?;
    let mut buf = vec![0u64; usize::try_from(ds.__msg_cbytes).unwrap_or(0) / 8 + 2];
    let mut messages = Vec::new();
    for at in 0..ds.msg_qnum {
        let at = i64::try_from(at).map_err(|_| Fault::Refused("too many messages".into()))?;
        let flags = MSG_COPY | libc::IPC_NOWAIT | libc::MSG_NOERROR;
        // SAFETY: the buffer has room for the type and all bytes that the whole queue holds.
        let n = unsafe { libc::msgrcv(id, buf.as_mut_ptr().cast(), (buf.len() - 1) * 8, at, flags) };
        let n = crate::sys::check_len(n).at("copy a message (MSG_COPY)")?;
        let text: Vec<u8> = buf[1..].iter().flat_map(|w| w.to_ne_bytes()).take(n).collect();
        messages.push((buf[0].cast_signed(), s.blobs.put(&text)?));
    }
    Ok(Queue {
        common: common(id, &ds.msg_perm),
        max_bytes: ds.msg_qbytes,
        messages,
    })
}

/// Makes everything again in the present (fresh) IPC namespace.
pub(crate) fn rebuild(v: &SysV, blobs: &BlobReader) -> Result<(), Fault> {
    for seg in &v.segments {
        let c = &seg.common;
        let bytes = usize::try_from(seg.content.bytes).map_err(|_| Fault::Refused("segment too large".into()))?;
        let key = if seg.removed { libc::IPC_PRIVATE } else { c.key };
        let flags = libc::IPC_CREAT | libc::IPC_EXCL | 0o600;
        // SAFETY: shmget takes numbers only.
        same_id("shm", c.id, || unsafe { libc::shmget(key, bytes, flags) })?;
        {
            let map = Attached::new(c.id, 0).at("attach (shmat)")?;
            // SAFETY: the attachment is a new segment of `content.bytes` zero bytes.
            unsafe { seg.content.fill_memory(map.0, blobs)? };
        }
        let (_, mut ds) = shm_stat(c.id, libc::IPC_STAT).at("shmctl")?;
        let set = set_perm(c, |mode, owner| {
            change(&mut ds.shm_perm, mode, owner);
            // SAFETY: `ds` is valid for reading.
            crate::sys::check(unsafe { libc::shmctl(c.id, libc::IPC_SET, &mut ds) })
        });
        set.at("set mode and owner of a segment")?;
    }
    for set in &v.semaphores {
        let c = &set.common;
        let n = i32::try_from(set.values.len()).map_err(|_| Fault::Refused("too many semaphores".into()))?;
        // SAFETY: semget takes numbers only.
        same_id("sem", c.id, || unsafe {
            libc::semget(c.key, n, libc::IPC_CREAT | libc::IPC_EXCL | 0o600)
        })?;
        let mut values = set.values.clone();
        // SAFETY: SETALL reads one value for each semaphore of the set.
        let done = unsafe {
            libc::semctl(
                c.id,
                0,
                libc::SETALL,
                SemArg {
                    array: values.as_mut_ptr(),
                },
            )
        };
        crate::sys::check(done).at("set the values of semaphores")?;
        let (_, mut ds) = sem_stat(c.id, libc::IPC_STAT).at("semctl")?;
        let set = set_perm(c, |mode, owner| {
            change(&mut ds.sem_perm, mode, owner);
            // SAFETY: `ds` is valid for reading.
            crate::sys::check(unsafe { libc::semctl(c.id, 0, libc::IPC_SET, SemArg { buf: &mut ds }) })
        });
        set.at("set mode and owner of semaphores")?;
    }
    v.queues.iter().try_for_each(|q| rebuild_queue(q, blobs))
}

fn rebuild_queue(q: &Queue, blobs: &BlobReader) -> Result<(), Fault> {
    let c = &q.common;
    // SAFETY: msgget takes numbers only.
    same_id("msg", c.id, || unsafe {
        libc::msgget(c.key, libc::IPC_CREAT | libc::IPC_EXCL | 0o600)
    })?;
    for (kind, text) in &q.messages {
        let mut msg = kind.to_ne_bytes().to_vec();
        msg.extend_from_slice(&blobs.get(text)?);
        // SAFETY: `msg` holds the type and the text of the stated length.
        let sent = unsafe { libc::msgsnd(c.id, msg.as_ptr().cast(), msg.len() - 8, libc::IPC_NOWAIT) };
        crate::sys::check(sent).at("put a message back")?;
    }
    let (_, mut ds) = msg_stat(c.id, libc::IPC_STAT).at("msgctl")?;
    ds.msg_qbytes = ds.msg_qbytes.min(q.max_bytes);
    let set = set_perm(c, |mode, owner| {
        change(&mut ds.msg_perm, mode, owner);
        // SAFETY: `ds` is valid for reading.
        crate::sys::check(unsafe { libc::msgctl(c.id, libc::IPC_SET, &mut ds) })
    });
    set.at("set mode and owner of a queue")?;
    Ok(())
}

/// Lets `set` give an object its mode and owner. An owner that does not exist in the user namespace of a restart cannot be given; then the object stays the user's own.
fn set_perm(c: &Common, mut set: impl FnMut(u32, (u32, u32)) -> io::Result<i32>) -> io::Result<i32> {
    match set(c.mode, c.owner) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: takes nothing and cannot fail.
            let user = unsafe { libc::geteuid() };
            // SAFETY: as above.
            let group = unsafe { libc::getegid() };
            set(c.mode, (user, group))
        }
        done => done,
    }
}

fn change(p: &mut libc::ipc_perm, mode: u32, owner: (u32, u32)) {
    p.mode = mode as _;
    (p.uid, p.gid) = owner;
}

/// Makes an object with identifier `id`.
fn same_id(kind: &str, id: i32, make: impl FnOnce() -> i32) -> Result<(), Fault> {
    std::fs::write(format!("/proc/sys/kernel/{kind}_next_id"), id.to_string()).at(format!("ask for {kind} identifier {id}"))?;
    let got = crate::sys::check(make()).at(format!("make {kind} object {id}"))?;
    if got != id {
        return refuse(format!(
            "{kind} object got identifier {got} instead of {id}; restart in an IPC namespace of its own"
        ));
    }
    Ok(())
}

/// Marks the segments for removal again that were so at capture, now that the processes have attached them.
pub(crate) fn remove_pending(v: &SysV) -> Result<(), Fault> {
    for seg in v.segments.iter().filter(|s| s.removed) {
        // SAFETY: IPC_RMID takes no third argument.
        let done = unsafe { libc::shmctl(seg.common.id, libc::IPC_RMID, std::ptr::null_mut()) };
        crate::sys::check(done).at(format!("mark segment {} for removal", seg.common.id))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_by_their_names() {
        let text = "       key      shmid perms  cpid\n -12 7 600 13489\n 0 8 1600\n\n 1 9 600 -1\n";
        assert_eq!(columns(text, ["shmid", "cpid"]), Some(vec![[7, 13489], [9, -1]]));
        assert_eq!(columns(text, ["key", "nothing"]), None);
        assert_eq!(columns("", ["key"]), None);
        assert_eq!(columns("key\n", ["key"]), Some(Vec::new()));
    }

    /// The row of object `id`; others come and go.
    fn row<const N: usize>(rows: &[[i64; N]], id: i32) -> Option<[i64; N]> {
        rows.iter().find(|r| r[0] == i64::from(id)).copied()
    }

    #[test]
    fn what_cannot_be_listed_is_asked_for_one_by_one() {
        let flags = libc::IPC_CREAT | 0o600;
        // SAFETY: these take numbers only.
        let ids = unsafe {
            [
                libc::shmget(libc::IPC_PRIVATE, 1, flags),
                libc::semget(libc::IPC_PRIVATE, 3, flags),
                libc::msgget(libc::IPC_PRIVATE, flags),
            ]
        };
        let lists = Path::new(LISTS);
        // A list that is there and cannot be read, one that is masked, and none.
        let [unreadable, masked, missing] = ["/", "/dev/null", "/nonexistent"].map(Path::new);
        let mut seen = Vec::new();
        for path in [unreadable, masked] {
            seen.push(row(&segments(path), ids[0]).is_some_and(|r| Some(r) == row(&segments(&lists.join("shm")), ids[0])));
            seen.push(row(&semaphores(path), ids[1]).is_some_and(|r| Some(r) == row(&semaphores(&lists.join("sem")), ids[1])));
            seen.push(row(&queues(path), ids[2]).is_some_and(|r| Some(r) == row(&queues(&lists.join("msg")), ids[2])));
        }
        let none = segments(missing).len() + semaphores(missing).len() + queues(missing).len();
        // SAFETY: removal takes no further argument.
        unsafe {
            libc::shmctl(ids[0], libc::IPC_RMID, std::ptr::null_mut());
            libc::semctl(ids[1], 0, libc::IPC_RMID);
            libc::msgctl(ids[2], libc::IPC_RMID, std::ptr::null_mut());
        }
        assert!(ids.iter().all(|id| *id >= 0), "{ids:?}");
        assert_eq!((seen, none), (vec![true; 6], 0));
    }
}
