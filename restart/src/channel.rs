//! Messages from the agent and from PID 1 to the front process, over one SOCK_SEQPACKET pair, and between the agent and
//! the process that fills memory. The kernel adds the sender's PID as the front process sees it.

use crate::fail::RestartError;
use belay_image::ImageError;
use belay_kernel::{numbers, sockets};
use rustix::net::{self, AddressFamily, SendFlags, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Largest message.
const LIMIT: usize = 16 * 1024;

/// One message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Message {
    /// From the agent: it exists and is in its process group.
    Hello,
    /// The restart has failed.
    Failed {
        /// Kind of error: 0 failed step, 1 changed file, 2 namespaces, 3 damaged image, 4 another node's.
        kind: u8,
        step: String,
        reason: String,
    },
    /// The job runs.
    Resumed,
    /// From PID 1: the agent, or when it was killed the command, was stopped by this signal.
    Stopped(i32),
    /// From the agent: the job has ended, with this wait status. From PID 1, when the agent was killed: the command has.
    Ended(i32),
    /// From the agent: the command has ended with this wait status, and other processes of the job run on.
    Background(i32),
    /// From the agent: the job has been ended by its user, and is not to be restarted.
    NotRestarted,
    /// From the agent: a remote shell, by its PID as the front process sees it, is to get this signal.
    Signal { shell: i32, signal: i32 },
    /// From PID 1: the agent has ended.
    AgentEnded {
        /// With this wait status.
        status: i32,
        /// Nothing else is left in the namespace.
        alone: bool,
    },
    /// To the agent, from the process that fills memory: all is there.
    Filled,
}

impl Message {
    /// The message for an error.
    pub(crate) fn failed(e: &RestartError) -> Self {
        let (kind, step, reason) = match e {
            RestartError::Failed { step, reason } => (0, step.clone(), reason.clone()),
            RestartError::Changed { path, reason } => (1, path.clone(), reason.clone()),
            RestartError::Forbidden { reason } => (2, String::new(), reason.clone()),
            RestartError::Image(ImageError::Damaged { path, reason }) => (3, path.clone(), reason.clone()),
            RestartError::Image(ImageError::Elsewhere { path, places }) => (3, path.clone(), format!("lies in {places}")),
            RestartError::Image(e @ ImageError::Io { step, path, source }) if e.is_damage() => {
                (3, path.clone(), format!("{step}: {source}"))
            }
            RestartError::DamagedElsewhere { reason } => (4, String::new(), reason.clone()),
            RestartError::Image(e) => (0, "image".to_owned(), e.to_string()),
            // Those of the first kind have been put into words before they come here, the others are found before there
            // is a channel.
            RestartError::Reported { .. } | RestartError::Lives { .. } => (0, "restart".to_owned(), e.to_string()),
        };
        let (step, reason) = (cut(&step), cut(&reason));
        Message::Failed { kind, step, reason }
    }

    /// The error of such a message.
    pub(crate) fn error(kind: u8, step: String, reason: String) -> RestartError {
        match kind {
            1 => RestartError::Changed { path: step, reason },
            2 => RestartError::Forbidden { reason },
            3 => RestartError::Image(ImageError::Damaged { path: step, reason }),
            4 => RestartError::DamagedElsewhere { reason },
            _ => RestartError::Failed { step, reason },
        }
    }
}

/// As much of `text` as always fits into a message: JSON writes a character in up to six times its bytes.
fn cut(text: &str) -> String {
    text.chars().take(LIMIT / 6 / 4).collect()
}

/// One end of the pair.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

impl Channel {
    /// Makes the pair: (front, inside).
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC;
        let (front, inside) = net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        net::sockopt::set_socket_passcred(&front, true)?;
        Ok((Self(front), Self(inside)))
    }

    /// Its descriptor.
    pub(crate) fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Sends a message; when the front process is gone nobody needs it.
    pub(crate) fn send(&self, message: &Message) {
        let Ok(text) = serde_json::to_vec(message) else { return };
        let _ = net::send(&self.0, &text[..text.len().min(LIMIT)], SendFlags::NOSIGNAL);
    }

    /// Receives a message with the sender's PID, once there is one; `None` when all senders are gone.
    pub(crate) fn receive(&self) -> io::Result<Option<(Message, i32)>> {
        let mut text = vec![0u8; LIMIT];
        numbers::poll(self.fd(), libc::POLLIN, -1)?;
        let received = sockets::receive(&self.0, &mut text, 0)?;
        let (n, pid) = (received.len, received.creds.map_or(0, |sender| sender.pid));
        if n == 0 {
            return Ok(None);
        }
        let message = serde_json::from_slice(&text[..n]).map_err(io::Error::other)?;
        Ok(Some((message, pid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_any_length_arrives() {
        let (front, inside) = Channel::pair().unwrap();
        let error = RestartError::at("\u{1}".repeat(LIMIT), "\u{10ffff}".repeat(LIMIT));
        inside.send(&Message::failed(&error));
        let (message, _) = front.receive().unwrap().unwrap();
        assert!(matches!(message, Message::Failed { kind: 0, reason, .. } if reason.starts_with('\u{10ffff}')));
    }

    #[test]
    fn what_cannot_be_read_stays_damage() {
        let path = std::path::Path::new("/ckpt/chunk");
        for (errno, damage) in [(libc::EIO, true), (libc::EACCES, false)] {
            let error = ImageError::io("read", path, io::Error::from_raw_os_error(errno));
            let Message::Failed { kind, step, reason } = Message::failed(&error.into()) else {
                panic!("no failure")
            };
            let told = Message::error(kind, step, reason);
            let is_damage = matches!(&told, RestartError::Image(e) if e.is_damage());
            assert!(is_damage == damage && told.to_string().contains("/ckpt/chunk"), "{told}");
        }
    }
}
