//! What plugins ask of a process while it stands still, done by the injected program.

use crate::inject::{self, Area};
use crate::state::undo;
use crate::stop::stopped::Suspended;
use crate::CaptureError;
use belay_abi::inject::{
    MessageHead, NotificationTable, Turn, MAX_NOTIFIED, RENEW_DONE, RENEW_NOT_NOW, RENEW_NO_ACCESS, RENEW_NO_ROOM, RENEW_TAKEN,
};
use belay_abi::PAGE;
use belay_kernel::vm::Memory;
use belay_plugins::{Inside, Refusal, Registration, Renewed, Unreadable};
use std::io;

/// The stopped processes and the areas in them.
#[derive(Debug)]
pub(crate) struct Stopped<'a> {
    pub(crate) job: &'a mut Suspended,
    pub(crate) areas: &'a [Area],
}

impl Inside for Stopped<'_> {
    fn renew(&mut self, r: &Registration) -> Result<Renewed, Refusal> {
        let refusal = |reason: String, passing: bool| Refusal {
            pid: r.pid,
            object: "mq_notify".into(),
            reason,
            passing,
            damage: false,
        };
        let at = self.job.processes.iter().position(|p| p.pid == r.pid);
        let Some((at, area)) = at.and_then(|at| Some((at, self.areas.get(at)?))) else {
            return Err(refusal(
                "the process that is to be notified is not part of the job".into(),
                false,
            ));
        };
        let text = u64::from(r.message_bytes).next_multiple_of(16);
        let stride = size_of::<MessageHead>() as u64 + text;
        let Some(bytes) = stride
            .checked_mul(u64::from(r.capacity))
            .and_then(|b| b.checked_next_multiple_of(belay_abi::PAGE))
        else {
            return Err(refusal("the limits of the queue are out of range".into(), false));
        };
        if r.sockets.len() > MAX_NOTIFIED {
            return Err(refusal(
                format!("the process has more than {MAX_NOTIFIED} netlink sockets"),
                false,
            ));
        }
        if r.how == libc::SIGEV_SIGNAL && matches!(r.signal, libc::SIGKILL | libc::SIGSTOP) {
            return Err(refusal("is told by a signal that cannot be held back".into(), false));
        }
        let mut sockets = [-1; MAX_NOTIFIED];
        sockets[..r.sockets.len()].copy_from_slice(&r.sockets);
        let table = NotificationTable {
            mark: area.no_mark(),
            turn: Turn::default(),
            room: 0,
            stride,
            capacity: r.capacity,
            message_bytes: r.message_bytes,
            queue: r.queue,
            how: r.how,
            signo: r.signal,
            socket_count: u32::try_from(r.sockets.len()).unwrap_or(0),
            sockets,
            socket: -1,
            outcome: RENEW_NOT_NOW,
            error: 0,
            received: 0,
            sent: 0,
            pad: 0,
            value: 0,
            cookie: [0; 32],
        };
        let done = inject::notification(self.job, at, area, table, bytes, |t, memory| Ok((*t, messages(t, memory)?)));
        let (t, messages) = done.map_err(|e| match e {
            CaptureError::Refused(mut reasons) if !reasons.is_empty() => reasons.swap_remove(0),
            other => refusal(other.to_string(), false),
        })?;
        let reason = io::Error::from_raw_os_error(t.error);
        match t.outcome {
            RENEW_DONE => Ok(Renewed {
                how: t.how,
                value: t.value,
                socket: t.socket,
                cookie: t.cookie.to_vec(),
                unsent: messages.len().saturating_sub(t.sent as usize),
                messages,
            }),
            RENEW_NOT_NOW => Err(refusal("is about to be told about a message already".into(), true)),
            RENEW_NO_ACCESS => Err(refusal(
                format!("its queue cannot be read and written ({reason}); let its owner do both"),
                false,
            )),
            RENEW_NO_ROOM => Err(refusal(
                "its signal cannot be queued at this moment: too many are pending for its user (RLIMIT_SIGPENDING)".into(),
                true,
            )),
            RENEW_TAKEN => Err(refusal(
                format!(
                    "a receiver outside the job took what was to tell it; {}; let nobody else wait at that queue",
                    match t.error {
                        0 => "its registration is as before",
                        _ => "its registration carries the value 0 now",
                    }
                ),
                false,
            )),
            _ => Err(refusal(format!("could not register again ({reason})"), false)),
        }
    }

    fn undo(&mut self, pid: i32, set: i32, values: &[u16]) -> Result<Vec<(u16, i16)>, Unreadable> {
        let at = self.job.processes.iter().position(|p| p.pid == pid);
        let Some((at, area)) = at.and_then(|at| Some((at, self.areas.get(at)?))) else {
            return Ok(Vec::new());
        };
        undo::noted(&mut self.job.processes[at], area, set, values)
    }

    fn resident(&mut self, task: i32, address: u64, bytes: u64) -> io::Result<Vec<u8>> {
        let at = self.job.processes.iter().position(|p| p.task() == task);
        let (at, area) = at
            .and_then(|at| Some((at, self.areas.get(at)?)))
            .ok_or(io::ErrorKind::NotFound)?;
        let process = &mut self.job.processes[at];
        let mut out = Vec::new();
        let (mut from, end) = (address, address + bytes);
        while from < end {
            let length = (end - from).min(area.scratch_bytes() * PAGE);
            match inject::on_main(process, libc::SYS_mincore, [from, length, area.scratch(), 0, 0, 0]) {
                Ok(_) => out.extend(area.get_scratch(length.div_ceil(PAGE)).map_err(io::Error::other)?),
                Err(CaptureError::Call { errno, .. }) => return Err(io::Error::from_raw_os_error(errno)),
                Err(e) => return Err(io::Error::other(e)),
            }
            from += length;
        }
        Ok(out)
    }
}

/// The messages in the room, in the order in which they were received.
fn messages(t: &NotificationTable, memory: &Memory) -> Result<Vec<(u32, Vec<u8>)>, CaptureError> {
    let fail = |e| CaptureError::system("read the messages of a queue from the application", e);
    let mut out = Vec::new();
    for i in 0..u64::from(t.received.min(t.capacity)) {
        let at = t.room + t.stride * i;
        let mut head = [0u8; size_of::<MessageHead>()];
        memory.read(at, &mut head).map_err(fail)?;
        let word = |from: usize| u64::from_ne_bytes(std::array::from_fn(|b| head[from + b]));
        let bytes = word(0).min(u64::from(t.message_bytes));
        let mut text = vec![0; usize::try_from(bytes).unwrap_or(0)];
        memory.read(at + head.len() as u64, &mut text).map_err(fail)?;
        out.push(((word(8) & 0xffff_ffff) as u32, text));
    }
    Ok(out)
}
