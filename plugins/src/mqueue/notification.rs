//! Who waits to be notified about a queue (`mq_notify`), and of what he will be told.

use super::State;
use crate::fault::{refuse, At, Fault, Refusal};
use crate::inside::Registration;
use crate::model::{DescId, Descriptors};
use crate::session::Session;
use crate::sys::sock;
use belay_kernel::mq;
use belay_kernel::numbers::lend;
use serde::{Deserialize, Serialize};
use std::os::fd::{OwnedFd, RawFd};

/// One registration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Notification {
    /// The process.
    pid: i32,
    /// A descriptor of the queue in that process.
    fd: RawFd,
    /// `sigev_notify`.
    how: i32,
    /// `sigev_signo`.
    signal: i32,
    /// `sigev_value`.
    value: u64,
    /// The socket that the C library's thread reads, and what it is sent.
    socket: RawFd,
    /// See `socket`.
    cookie: Vec<u8>,
}

/// Lets the process tell what it has registered for, and what the queue holds.
pub(super) fn renew(
    s: &mut Session<'_>,
    users: &[DescId],
    state: &State,
    attributes: &libc::mq_attr,
    writer: Result<OwnedFd, Fault>,
) -> Result<(Notification, Vec<super::drain::Message>), Fault> {
    let pid = state.notified;
    let Some(table) = s.tables.iter().find(|t| t.pids.contains(&pid)) else {
        return refuse("the process that is to be notified about it has no descriptors");
    };
    let Some(slot) = table.slots.iter().find(|slot| users.contains(&slot.desc)) else {
        return refuse(format!(
            "process {pid} waits to be notified about it (mq_notify), but has closed it"
        ));
    };
    let netlink = |raw: RawFd| sock::get::<i32>(raw, libc::SOL_SOCKET, libc::SO_DOMAIN).is_ok_and(|d| d == libc::AF_NETLINK);
    let (how, signal) = state.how;
    let sockets = if how == libc::SIGEV_THREAD {
        let of = table
            .slots
            .iter()
            .filter(|slot| s.take(slot.desc).is_ok_and(|taken| netlink(taken.raw())));
        of.map(|slot| slot.fd).collect()
    } else {
        Vec::new()
    };
    let limit = |n: i64| u32::try_from(n).map_err(|_| Fault::Refused("its limits are out of range".into()));
    let registration = Registration {
        pid,
        queue: slot.fd,
        how,
        signal,
        capacity: limit(attributes.mq_maxmsg)?,
        message_bytes: limit(attributes.mq_msgsize)?,
        sockets,
    };
    let Some(inside) = s.inside.as_mut() else {
        return refuse(format!("process {pid} waits to be notified about it (mq_notify)"));
    };
    let done = inside.renew(&registration).map_err(|r| {
        let text = format!("process {pid} waits to be notified about it (mq_notify) and {}", r.reason);
        if r.passing {
            Fault::Passing(text)
        } else {
            Fault::Refused(text)
        }
    })?;
    if done.unsent > 0 {
        let first = done.messages.len() - done.unsent.min(done.messages.len());
        super::drain::send_later(writer?, done.messages[first..].to_vec());
    }
    let found = Notification {
        pid,
        fd: registration.queue,
        how: done.how,
        signal,
        value: done.value,
        socket: done.socket,
        cookie: done.cookie,
    };
    Ok((found, done.messages))
}

/// In process `pid`, whose descriptors are in place: registers as before.
pub(crate) fn install(d: &Descriptors, pid: i32) -> Result<(), Refusal> {
    for q in d.list::<super::QueueObject>() {
        if let Some(n) = q.notification.as_ref().filter(|n| n.pid == pid) {
            n.register().map_err(|e| e.of(pid, format!("message queue {}", q.name)))?;
        }
    }
    Ok(())
}

impl Notification {
    fn register(&self) -> Result<(), Fault> {
        let told = if self.how == libc::SIGEV_THREAD {
            let Ok(cookie) = self.cookie.as_slice().try_into() else {
                return refuse("damaged image: what its thread is told does not have 32 bytes");
            };
            mq::Told::Socket(self.socket, cookie)
        } else {
            mq::Told::Signal(self.how, self.signal, self.value)
        };
        let registered = lend(self.fd).and_then(|queue| mq::notify(queue, told));
        registered.at(format!("register for notification with descriptor {}", self.fd))
    }
}
