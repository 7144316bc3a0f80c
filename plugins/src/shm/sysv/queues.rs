//! Message queues.

use super::lists::{each, list, LISTS};
use super::{change, common, one_of, same_id, set_perm, taken, Common, OWN_NAMESPACE};
use crate::fault::{At, Fault, Refusal};
use crate::session::Session;
use belay_image::blobs::{BlobReader, BlobRef};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

const MSG_COPY: i32 = 0o40000;
const MSG_STAT_ANY: i32 = 13;

/// A message queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Queue {
    common: Common,
    max_bytes: u64,
    /// (type, text).
    messages: Vec<(i64, BlobRef)>,
}

/// Captures the queues that a process of the job used last.
pub(super) fn capture(s: &mut Session<'_>, pids: &BTreeSet<i32>, out: &mut Vec<Queue>) -> Result<(), Refusal> {
    for id in queues_of(pids) {
        let queue = queue(s, id);
        out.extend(taken(s, format!("System V message queue {id}"), queue)?);
    }
    Ok(())
}

fn msg_stat(id: i32, cmd: i32) -> io::Result<(i32, libc::msqid_ds)> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut ds: libc::msqid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: `ds` is valid for writing.
    let r = crate::sys::check(unsafe { libc::msgctl(id, cmd, &mut ds) })?;
    Ok((r, ds))
}

/// Identifier, last sender and last receiver of every queue, as listed at `path`.
pub(super) fn rows(path: &Path) -> Vec<[i64; 3]> {
    list(path, ["msqid", "lspid", "lrpid"], || {
        each(msg_stat(0, libc::MSG_INFO).map(|(last, _)| last), |at| {
            let (id, ds) = msg_stat(at, MSG_STAT_ANY)?;
            Ok([id.into(), ds.msg_lspid.into(), ds.msg_lrpid.into()])
        })
    })
}

fn queues_of(pids: &BTreeSet<i32>) -> Vec<i32> {
    let private = OWN_NAMESPACE.get().is_some();
    let rows = rows(&Path::new(LISTS).join("msg")).into_iter();
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

impl Queue {
    /// Makes it again.
    pub(super) fn rebuild(&self, blobs: &BlobReader) -> Result<(), Fault> {
        let c = &self.common;
        // SAFETY: msgget takes numbers only.
        same_id("msg", c.id, || unsafe {
            libc::msgget(c.key, libc::IPC_CREAT | libc::IPC_EXCL | 0o600)
        })?;
        for (kind, text) in &self.messages {
            let mut msg = kind.to_ne_bytes().to_vec();
            msg.extend_from_slice(&blobs.get(text)?);
            // SAFETY: `msg` holds the type and the text of the stated length.
            let sent = unsafe { libc::msgsnd(c.id, msg.as_ptr().cast(), msg.len() - 8, libc::IPC_NOWAIT) };
            crate::sys::check(sent).at("put a message back")?;
        }
        let (_, mut ds) = msg_stat(c.id, libc::IPC_STAT).at("msgctl")?;
        ds.msg_qbytes = ds.msg_qbytes.min(self.max_bytes);
        let set = set_perm(c, |mode, owner| {
            change(&mut ds.msg_perm, mode, owner);
            // SAFETY: `ds` is valid for reading.
            crate::sys::check(unsafe { libc::msgctl(c.id, libc::IPC_SET, &mut ds) })
        });
        set.at("set mode and owner of a queue")?;
        Ok(())
    }
}
