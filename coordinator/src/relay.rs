//! The channel between front and agent, and which signals are sent on to the command.
//!
//! The command shares its process group with front and agent, so what the terminal or a shell sends to the group
//! reaches it by itself; only a signal sent to the front (or the agent) alone must be passed on. The two are told apart
//! by the other process as witness: a signal that both received was sent to the group. The witness is asked only after
//! [`sys::group_barrier`], so the answer is exact, not a matter of timing:
//!
//! ```text
//! front receives S:  barrier, report S ──> agent: drains its own signals; S among them? both drop it : pass S on
//! agent receives S:  barrier, fence ──> front: reports what it has, answers ──> agent: S reported meanwhile? drop : pass S on
//! ```

use crate::sys::{self, Signal};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// A message between front and agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message {
    /// To the agent: the front received this signal.
    Signal(Signal),
    /// To the agent: everything the front received before the fence has been reported.
    FencePassed,
    /// To the front: the command runs.
    Started(i32),
    /// To the front: the command could not be executed.
    ExecFailed(i32),
    /// To the front: report what you have received.
    Fence,
    /// To the front: the command stopped itself by this signal.
    Suspended(i32),
    /// To the front: the command ended with this status word, and the agent ends too.
    Ended(i32),
    /// To the front: the command ended with this status word, but processes that it left behind go on.
    Background(i32),
    /// To the front: the user has ended the job, and it is not to be restarted.
    NotRestarted,
    /// To the front: this child of the agent is a remote shell, for which that process of the job stands in.
    Shell(i32, i32),
}

const WORDS: usize = 4;

impl Message {
    fn encode(self) -> [i32; WORDS] {
        match self {
            Message::Signal(s) => [1, s.number, s.code, s.value],
            Message::FencePassed => [2, 0, 0, 0],
            Message::Started(pid) => [3, pid, 0, 0],
            Message::ExecFailed(errno) => [4, errno, 0, 0],
            Message::Fence => [5, 0, 0, 0],
            Message::Suspended(signal) => [6, signal, 0, 0],
            Message::Ended(status) => [7, status, 0, 0],
            Message::Background(status) => [8, status, 0, 0],
            Message::NotRestarted => [9, 0, 0, 0],
            Message::Shell(pid, standin) => [10, pid, standin, 0],
        }
    }

    fn decode(w: [i32; WORDS]) -> Option<Self> {
        Some(match w[0] {
            1 => Message::Signal(Signal {
                number: w[1],
                code: w[2],
                value: w[3],
            }),
            2 => Message::FencePassed,
            3 => Message::Started(w[1]),
            4 => Message::ExecFailed(w[1]),
            5 => Message::Fence,
            6 => Message::Suspended(w[1]),
            7 => Message::Ended(w[1]),
            8 => Message::Background(w[1]),
            9 => Message::NotRestarted,
            10 => Message::Shell(w[1], w[2]),
            _ => return None,
        })
    }
}

/// One end of the channel between front and agent.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

impl Channel {
    /// Both ends.
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = sys::socket_pair()?;
        Ok((Self(a), Self(b)))
    }

    /// Sends a message. An end that is gone is noticed when receiving.
    pub(crate) fn send(&self, message: Message) {
        let bytes: Vec<u8> = message.encode().iter().flat_map(|w| w.to_ne_bytes()).collect();
        if let Err(e) = sys::send(self.0.as_fd(), &bytes) {
            tracing::debug!(error = %e, ?message, "the other end is gone");
        }
    }

    /// Takes the next message, waiting for it if asked to. `Err` when the other end is gone.
    pub(crate) fn receive(&self, wait: bool) -> io::Result<Option<Message>> {
        let mut bytes = [0; WORDS * 4];
        match sys::receive(self.0.as_fd(), &mut bytes, wait) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {
                let mut words = [0; WORDS];
                for (w, b) in words.iter_mut().zip(bytes.chunks_exact(4)) {
                    *w = i32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
                }
                Message::decode(words)
                    .map(Some)
                    .ok_or_else(|| io::ErrorKind::InvalidData.into())
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            // The other end has gone without reading all we sent. The kernel says so once, in front of what that end
            // had sent before.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => self.receive(wait),
            Err(e) => Err(e),
        }
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The agent's memory of signals whose addressee is not known yet.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    /// Received by the agent, not (yet) reported by the front.
    own: Vec<Signal>,
    /// How many of them were there when the fence was sent.
    fenced: Option<usize>,
}

impl Relay {
    /// The agent has received `signal`. Whether a fence must be sent.
    #[must_use]
    pub(crate) fn own(&mut self, signal: Signal) -> bool {
        self.own.push(signal);
        self.fence()
    }

    fn fence(&mut self) -> bool {
        let needed = self.fenced.is_none() && !self.own.is_empty();
        if needed {
            self.fenced = Some(self.own.len());
        }
        needed
    }

    /// The front has reported `signal`, and all that the agent received itself was given to [`Relay::own`]. Whether to pass it on.
    #[must_use]
    pub(crate) fn reported(&mut self, signal: Signal) -> bool {
        let Some(at) = self.own.iter().position(|s| s.number == signal.number) else {
            return true;
        };
        self.own.remove(at);
        if let Some(n) = &mut self.fenced {
            *n -= usize::from(at < *n);
        }
        false
    }

    /// The fence was passed. The signals to pass on, and whether another fence must be sent.
    #[must_use]
    pub(crate) fn passed(&mut self) -> (Vec<Signal>, bool) {
        let n = self.fenced.take().unwrap_or(0).min(self.own.len());
        let alone = self.own.drain(..n).collect();
        (alone, self.fence())
    }

    /// There is no front (any more): what was received is for the command.
    pub(crate) fn alone(&mut self) -> Vec<Signal> {
        self.fenced = None;
        std::mem::take(&mut self.own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(number: i32) -> Signal {
        Signal {
            number,
            code: 0,
            value: number + 1,
        }
    }

    #[test]
    fn messages_come_back() {
        let (a, b) = Channel::pair().unwrap();
        for m in [
            Message::Signal(s(15)),
            Message::FencePassed,
            Message::Started(7),
            Message::ExecFailed(2),
            Message::Fence,
            Message::Suspended(20),
            Message::Ended(0x100),
            Message::Background(9),
            Message::NotRestarted,
        ] {
            a.send(m);
            assert_eq!(b.receive(true).unwrap(), Some(m));
        }
        assert_eq!(b.receive(false).unwrap(), None);
        drop(a);
        assert!(b.receive(true).is_err());
    }

    #[test]
    fn what_was_said_last_arrives_though_the_speaker_did_not_listen() {
        let (a, b) = Channel::pair().unwrap();
        b.send(Message::Signal(s(18)));
        a.send(Message::Ended(0x300));
        drop(a);
        assert_eq!(b.receive(false).unwrap(), Some(Message::Ended(0x300)));
        assert!(b.receive(false).is_err());
    }

    #[test]
    fn a_signal_to_the_group_is_not_passed_on() {
        let mut r = Relay::default();
        assert!(r.own(s(15)));
        assert!(!r.reported(s(15)));
        assert_eq!(r.passed(), (vec![], false));
    }

    #[test]
    fn a_signal_to_one_of_the_two_is_passed_on() {
        let mut r = Relay::default();
        assert!(r.reported(s(15)));
        assert!(r.own(s(1)));
        assert!(!r.own(s(2)), "one fence at a time");
        assert_eq!(r.passed(), (vec![s(1)], true));
        assert_eq!(r.passed(), (vec![s(2)], false));
        assert!(r.own(s(1)));
        assert_eq!(r.alone(), [s(1)]);
    }
}
