//! Message queues.

use super::lists::{each, list, LISTS};
use super::whose::{is_guessed, processes, seconds, Traces};
use super::{change, common, limits, same_id, set_perm, taken, whose, Common, OWN_NAMESPACE};
use crate::fault::{not_now, refuse, At, Fault, Refusal};
use crate::session::Session;
use belay_image::blobs::{BlobReader, BlobRef};
use belay_kernel::sysv::msg;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::SystemTime;

/// A message queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Queue {
    pub(super) common: Common,
    max_bytes: u64,
    /// (type, text).
    messages: Vec<(i64, BlobRef)>,
    /// It may be another program's.
    #[serde(default)]
    pub(super) guessed: bool,
}

/// Captures the queues that are the job's and those that may be.
pub(super) fn capture(s: &mut Session<'_>, pids: &BTreeSet<i32>, out: &mut Vec<Queue>) -> Result<(), Refusal> {
    for (id, guessed) in candidates(pids, s.launched) {
        let queue = queue(s, id, guessed);
        out.extend(taken(s, (format!("System V message queue {id}"), guessed), queue)?);
    }
    Ok(())
}

/// Identifier, creator, last sender and receiver of every queue, and when that was, and the time of its last change, as
/// listed at `path`.
pub(super) fn rows(path: &Path) -> Vec<[i64; 7]> {
    list(path, ["msqid", "cuid", "lspid", "lrpid", "stime", "rtime", "ctime"], || {
        each(msg::last(), |at| {
            let (id, ds) = msg::at(at)?;
            let users = [ds.msg_lspid, ds.msg_lrpid].map(i64::from);
            let creator = ds.msg_perm.cuid.into();
            Ok([
                id.into(),
                creator,
                users[0],
                users[1],
                ds.msg_stime,
                ds.msg_rtime,
                ds.msg_ctime,
            ])
        })
    })
}

/// Each queue that the job may have, and whether that is only guessed.
fn candidates(pids: &BTreeSet<i32>, launched: SystemTime) -> Vec<(i32, bool)> {
    let launched = seconds(launched);
    let candidate = |[id, creator, sender, receiver, sent, received, changed]: [i64; 7]| {
        let id = i32::try_from(id).ok()?;
        let traces = Traces {
            creator,
            last: processes(&[sender, receiver]),
            used: sent.max(received).max(changed),
            changed,
        };
        let me = std::process::id().into();
        let guessed = match OWN_NAMESPACE.get() {
            // Once somebody else than this agent has used such a queue here, it was the job.
            Some(guesses) => [0, me].contains(&sender) && receiver == 0 && guesses.queues.contains(&id),
            None => is_guessed(&traces, pids, launched)?,
        };
        Some((id, guessed))
    };
    rows(&Path::new(LISTS).join("msg"))
        .into_iter()
        .filter_map(candidate)
        .collect()
}

const USED: &str = "a program outside the job has used it while it was read";

/// What changes in a queue when it is used.
fn used(ds: &libc::msqid_ds) -> [i64; 6] {
    let held = [ds.msg_qnum, ds.__msg_cbytes].map(u64::cast_signed);
    let users = [ds.msg_lspid, ds.msg_lrpid].map(i64::from);
    [held[0], held[1], users[0], users[1], ds.msg_stime, ds.msg_rtime]
}

fn queue(s: &mut Session<'_>, id: i32, guessed: bool) -> Result<Queue, Fault> {
    let ds = msg::stat(id).at("msgctl")?;
    let mut buf = vec![0u64; usize::try_from(ds.__msg_cbytes).unwrap_or(0) / 8 + 2];
    let mut messages = Vec::new();
    for at in 0..ds.msg_qnum {
        let at = i64::try_from(at).map_err(|_| Fault::Refused("too many messages".into()))?;
        let n = match msg::copy(id, at, &mut buf) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::E2BIG | libc::ENOMSG)) => return not_now(USED),
            n => n.at("copy a message (MSG_COPY)")?,
        };
        let text: Vec<u8> = buf[1..].iter().flat_map(|w| w.to_ne_bytes()).take(n).collect();
        messages.push((buf[0].cast_signed(), s.blobs.put(&text)?));
    }
    if used(&msg::stat(id).at("msgctl")?) != used(&ds) {
        return not_now(USED);
    }
    Ok(Queue {
        common: common(id, &ds.msg_perm),
        max_bytes: ds.msg_qbytes,
        messages,
        guessed,
    })
}

/// Lets a queue hold `bytes` bytes, and gives it mode and owner of `c`.
fn set(id: i32, bytes: u64, c: Option<&Common>) -> io::Result<()> {
    let mut ds = msg::stat(id)?;
    ds.msg_qbytes = bytes;
    match c {
        None => msg::change(id, &mut ds),
        Some(c) => set_perm(c, |mode, owner| {
            change(&mut ds.msg_perm, mode, owner);
            msg::change(id, &mut ds)
        }),
    }
}

impl Queue {
    /// Makes it again. `tell` is told of what is not as it was.
    pub(super) fn rebuild(&self, blobs: &BlobReader, tell: &dyn Fn(&str)) -> Result<(), Fault> {
        let id = self.common.id;
        let remove = || drop(msg::remove(id));
        let name = format!("message queue {id}");
        whose::rebuild((&name, self.guessed), || self.make(blobs, tell), remove, tell)
    }

    fn make(&self, blobs: &BlobReader, tell: &dyn Fn(&str)) -> Result<(), Fault> {
        let c = &self.common;
        same_id("msg", c.id, || msg::make(c.key, 0o600))?;
        let room = self.widen()?;
        for (kind, text) in &self.messages {
            msg::send(c.id, *kind, &blobs.get(text)?).at("put a message back")?;
        }
        if room < self.max_bytes {
            tell(&format!(
                "System V message queue {} holds {room} bytes at most (kernel.msgmnb), and not {}",
                c.id, self.max_bytes
            ));
        }
        set(c.id, self.max_bytes.min(room), Some(c)).at("set limit, mode and owner of a queue")
    }

    /// Gives the queue, which is new, room for what it may hold and for what it does hold: its limit may have been
    /// lowered since that was sent. Returns the room.
    fn widen(&self) -> Result<u64, Fault> {
        let texts = self.messages.iter().map(|(_, text)| text.bytes);
        let (held, longest) = (texts.clone().fold(0, u64::saturating_add), texts.max().unwrap_or(0));
        let held = held.max(self.messages.len() as u64);
        let (most, usual) = limits::of_messages()?;
        if longest > most {
            return refuse(format!(
                "a message holds {longest} bytes, and {most} are allowed here (kernel.msgmax): restart as root"
            ));
        }
        let wanted = self.max_bytes.max(held);
        // More than usual takes a capability.
        match set(self.common.id, wanted, None) {
            Ok(()) => Ok(wanted),
            Err(_) if held <= usual => Ok(usual),
            Err(_) => refuse(format!(
                "its messages hold {held} bytes, and {usual} are allowed here (kernel.msgmnb): restart as root"
            )),
        }
    }
}
