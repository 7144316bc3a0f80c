//! POSIX message queues: name, limits, mode, owner, messages in order with their priorities.
//!
//! The kernel gives no view of the messages, so a queue is emptied and filled again while the job stands still (see
//! `drain`). A restarted job has an IPC namespace of its own, where its queues are made again under their names; the
//! namespace's limits become those of the checkpoint.

mod drain;
mod notification;

use crate::builder::{Builder, Built};
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look};
use crate::model::{DescId, Description, Descriptors, FsPath};
use crate::session::Session;
use crate::state::Part;
use crate::sys::fd;
use belay_image::blobs::{BlobReader, BlobRef};
use belay_kernel::mq;
use belay_kernel::numbers::lend;
use notification::Notification;
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Limits of an IPC namespace, below `/proc/sys/fs/mqueue`.
const LIMITS: [&str; 5] = ["queues_max", "msg_max", "msgsize_max", "msg_default", "msgsize_default"];

/// One queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct QueueObject {
    /// Its name, with the slash.
    name: FsPath,
    /// Whether the name was gone (`mq_unlink`).
    deleted: bool,
    mode: u32,
    owner: (u32, u32),
    max_messages: i64,
    message_bytes: i64,
    /// (priority, text), in the order in which they will be received.
    messages: Vec<(u32, BlobRef)>,
    /// Values of [`LIMITS`].
    limits: Vec<u64>,
    /// Who waits to be notified.
    #[serde(default)]
    notification: Option<Notification>,
}

/// The queues found so far.
#[derive(Debug, Default)]
struct QueueSet {
    by_id: HashMap<(u64, u64), usize>,
    users: Vec<Vec<DescId>>,
}

impl Part for Vec<QueueObject> {
    const KEY: &'static str = "queues";
}

/// A description of a queue: which of them.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Opened(usize);

/// `MQUEUE_MAGIC`.
const FILE_SYSTEM: i64 = 0x1980_0202;

/// The kind.
pub(crate) struct Queues;

impl Kind for Queues {
    const NAME: &'static str = "Queue";
    const VERSION: u32 = 1;
    type State = Opened;
    type Part = Vec<QueueObject>;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Regular(file_system) if *file_system == FILE_SYSTEM)
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<Opened, Fault> {
        let stat = &s.found[seen.id].stat;
        let set: &mut QueueSet = s.sets.of();
        let at = *set.by_id.entry((stat.st_dev, stat.st_ino)).or_insert_with(|| {
            set.users.push(Vec::new());
            set.users.len() - 1
        });
        set.users[at].push(seen.id);
        Ok(Opened(at))
    }

    /// Reads the queues, when all descriptions of them are known.
    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        let set: QueueSet = s.sets.take().unwrap_or_default();
        let out: &mut Vec<QueueObject> = out.parts.of();
        for users in &set.users {
            match object(s, users) {
                Ok(o) => out.push(o),
                Err(e) => {
                    let first = &s.found[users[0]];
                    let name = format!("fd {} ({})", first.holder.fd, first.link.display());
                    return refusals.push(e.of(first.holder.pid, name));
                }
            }
        }
    }

    fn check(Opened(at): &Opened, d: &Descriptors) -> Result<(), String> {
        Descriptors::is_one_of(*at, d.list::<QueueObject>())
    }

    /// Makes all queues in the present (fresh) IPC namespace, without owner and mode, which come last.
    fn prepare(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let list = b.descriptors.list::<QueueObject>();
        let built = prepare(list, b.blobs).map_err(|(name, e)| e.of(0, name))?;
        b.sets.put(built);
        Ok(())
    }

    fn rebuild(b: &mut Builder<'_>, desc: &Description, Opened(at): &Opened) -> Result<Option<OwnedFd>, Fault> {
        let built = b.sets.of::<Vec<BuiltQueue>>().get(*at);
        built
            .map(|q| fd::reopen(q.0.as_raw_fd(), desc.flags & libc::O_ACCMODE).at("open it again"))
            .transpose()
    }

    /// Sets owners and modes, when all descriptions are open.
    fn join(b: &mut Builder<'_>) -> Result<(), Refusal> {
        let built = b.sets.take::<Vec<BuiltQueue>>().unwrap_or_default();
        let mut both = b.descriptors.list::<QueueObject>().iter().zip(&built);
        both.try_for_each(|(q, b)| settle(q, b.0.as_raw_fd()).map_err(|e| e.of(0, format!("message queue {}", q.name))))
    }

    /// Registers for notification, when the process has its descriptors.
    fn install_own(d: &Descriptors, _: &Built, pid: i32) -> Result<(), Refusal> {
        notification::install(d, pid)
    }

    nothing!(
        survey,
        contents,
        check_part,
        numbers,
        ways,
        refill,
        install,
        install_late,
        settle,
        complete
    );
}

fn object(s: &mut Session<'_>, users: &[DescId]) -> Result<QueueObject, Fault> {
    let taken = s.take(users[0])?;
    let through = |access: i32| -> Result<OwnedFd, Fault> {
        let other = |id: &&DescId| s.found[**id].access() == access || s.found[**id].access() == libc::O_RDWR;
        match users.iter().find(other) {
            Some(id) => fd::dup_from(s.take(*id)?.raw(), 0).at("duplicate"),
            None => fd::reopen(taken.raw(), access).at("open the queue for reading and writing (its mode forbids it?)"),
        }
    };
    let attributes = attributes(taken.raw())?;
    let reader = through(libc::O_RDONLY)?;
    let state = state(reader.as_raw_fd())?;
    let bytes = |n: i64| usize::try_from(n).map_err(|_| Fault::Refused("its limits are out of range".into()));
    let ours = s.processes.iter().any(|p| p.pid == state.notified);
    if state.notified != 0 && !ours && attributes.mq_curmsgs > 0 {
        return not_now("holds messages, and a program outside the job waits to be notified of the next one (mq_notify)");
    }
    let mut notification = None;
    let messages = if ours {
        let writer = through(libc::O_WRONLY);
        let (found, messages) = notification::renew(s, users, &state, &attributes, writer)?;
        notification = Some(found);
        messages
    } else if attributes.mq_curmsgs > 0 {
        let writer = through(libc::O_WRONLY)?;
        drain::copy(
            reader,
            writer,
            bytes(attributes.mq_curmsgs)?,
            state.bytes,
            bytes(attributes.mq_msgsize)?,
        )?
    } else {
        Vec::new()
    };
    let messages = messages
        .into_iter()
        .map(|(priority, text)| Ok((priority, s.blobs.put(&text)?)))
        .collect::<Result<Vec<_>, Fault>>()?;
    let first = &s.found[users[0]];
    let deleted = first.stat.st_nlink == 0;
    let shown = if deleted {
        crate::files::without_deleted(&first.link)
    } else {
        &first.link
    };
    // Opened through a mounted file system, it shows the path there.
    let name = std::path::Path::new("/").join(shown.file_name().unwrap_or_default());
    Ok(QueueObject {
        name: FsPath(name),
        deleted,
        mode: first.stat.st_mode & 0o7777,
        owner: (first.stat.st_uid, first.stat.st_gid),
        max_messages: attributes.mq_maxmsg,
        message_bytes: attributes.mq_msgsize,
        messages,
        limits: LIMITS.iter().map(|l| limit(l)).collect::<Result<_, _>>()?,
        notification,
    })
}

fn attributes(raw: RawFd) -> Result<libc::mq_attr, Fault> {
    lend(raw).and_then(mq::attributes).at("mq_getattr")
}

/// What the kernel tells a reader of the queue's file.
struct State {
    /// Bytes in all messages.
    bytes: usize,
    /// Process to be notified, 0 if none.
    notified: i32,
    /// `sigev_notify` and `sigev_signo`.
    how: (i32, i32),
}

fn state(reader: RawFd) -> Result<State, Fault> {
    let mut text = [0u8; 160];
    let n = fd::read_at(reader, &mut text, 0).at("read the queue's state")?;
    let text = String::from_utf8_lossy(&text[..n]).into_owned();
    let field = |key: &str| {
        text.split_whitespace()
            .find_map(|w| w.strip_prefix(key)?.strip_prefix(':')?.parse().ok())
    };
    let number = |key: &str| i32::try_from(field(key)?).ok();
    match (field("QSIZE"), number("NOTIFY_PID"), number("NOTIFY"), number("SIGNO")) {
        (Some(bytes), Some(notified), Some(how), Some(signal)) => Ok(State {
            bytes,
            notified,
            how: (how, signal),
        }),
        _ => refuse(format!("the kernel describes it as {text:?}, which is not understood")),
    }
}

fn limit_path(name: &str) -> String {
    format!("/proc/sys/fs/mqueue/{name}")
}

fn limit(name: &str) -> Result<u64, Fault> {
    let text = std::fs::read_to_string(limit_path(name)).at(format!("read {}", limit_path(name)))?;
    text.trim()
        .parse()
        .map_err(|_| Fault::Refused(format!("{} is not a number", limit_path(name))))
}

/// A queue made again.
#[derive(Debug)]
struct BuiltQueue(OwnedFd);

fn prepare(list: &[QueueObject], blobs: &BlobReader) -> Result<Vec<BuiltQueue>, (String, Fault)> {
    let named = |q: &QueueObject| format!("message queue {}", q.name);
    if let Some(q) = list.first() {
        set_limits(&q.limits).map_err(|e| (named(q), e))?;
    }
    let _limit = MemoryLimit::raise();
    let mut built: Vec<Option<BuiltQueue>> = list.iter().map(|_| None).collect();
    // A name that was removed may have been given to another queue since: those without come first.
    for deleted in [true, false] {
        for (q, slot) in list.iter().zip(&mut built).filter(|(q, _)| q.deleted == deleted) {
            *slot = Some(make(q, blobs).map_err(|e| (named(q), e))?);
        }
    }
    Ok(built.into_iter().flatten().collect())
}

fn make(q: &QueueObject, blobs: &BlobReader) -> Result<BuiltQueue, Fault> {
    let name = fd::c_path(q.name.as_path()).at("its name")?;
    let made = mq::create(&name, 0o600, q.max_messages, q.message_bytes);
    let queue = made.at(format!(
        "make it for {} messages of {} bytes (fs.mqueue limits, RLIMIT_MSGQUEUE)",
        q.max_messages, q.message_bytes
    ))?;
    if q.deleted {
        mq::unlink(&name).at("remove its name")?;
    }
    for (priority, text) in &q.messages {
        // The queue has room for all its messages, so this does not wait.
        mq::send(&queue, &blobs.get(text)?, *priority).at("put a message back")?;
    }
    Ok(BuiltQueue(queue))
}

fn settle(q: &QueueObject, raw: RawFd) -> Result<(), Fault> {
    let stat = fd::fstat(raw).at("stat")?;
    if (stat.st_uid, stat.st_gid) != q.owner {
        fd::fchown(raw, q.owner).at("set its owner")?;
    }
    fd::fchmod(raw, q.mode).at("set its mode")
}

/// The namespace's limits as they were, as far as they may be set here: `make` finds out whether they suffice.
fn set_limits(limits: &[u64]) -> Result<(), Fault> {
    for (name, wanted) in LIMITS.iter().zip(limits) {
        if limit(name)? != *wanted {
            if let Err(error) = std::fs::write(limit_path(name), wanted.to_string()) {
                tracing::warn!(%error, name, wanted, "a limit of message queues stays as it is here");
            }
        }
    }
    Ok(())
}

/// The soft limit on memory for queues raised to the hard one while queues are made.
struct MemoryLimit(Rlimit);

impl MemoryLimit {
    fn raise() -> Self {
        let old = getrlimit(Resource::Msgqueue);
        let all = Rlimit {
            current: None,
            maximum: None,
        };
        let hard = Rlimit {
            current: old.maximum,
            maximum: old.maximum,
        };
        // Only root may set the first; a failure of both shows when a queue is made.
        let _ = setrlimit(Resource::Msgqueue, all).or_else(|_| setrlimit(Resource::Msgqueue, hard));
        Self(old)
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // Lowering is always allowed.
        if let Err(error) = setrlimit(Resource::Msgqueue, self.0) {
            tracing::warn!(%error, "could not lower the limit of message queues again");
        }
    }
}
