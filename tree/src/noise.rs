//! Messages to bytes and back, encrypted and authenticated with the job key (Noise NNpsk0), without I/O.
//!
//! ```text
//! packet:  length u16, big endian │ one Noise message (at most 65535 bytes)
//! stream inside the packets:  length u32, little endian │ message ...
//! ```
//! Everything that comes from outside is bounded before it is kept: a packet of the handshake has exactly one length, and a peer that does not know
//! the key fails at its first packet.

use crate::key::JobKey;
use snow::{Builder, HandshakeState, TransportState};

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Bound to the protocol's version.
const PROLOGUE: &[u8] = b"belay tree 1";
/// The same of connections beside the tree.
pub(crate) const DIRECT: &[u8] = b"belay direct 1";
/// Each of the two messages of the handshake: a public key and a tag.
const HANDSHAKE_BYTES: usize = 48;
const TAG_BYTES: usize = 16;
const PACKET_MAX: usize = 65535;
/// Longest message.
pub(crate) const MAX_MESSAGE: usize = 32 << 20;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoiseError {
    #[error("the peer does not know the job's key, or is no belay agent")]
    NotAuthenticated,
    #[error("a packet was changed on its way, or is not what belongs here")]
    Packet,
    #[error("a message of {0} bytes is longer than any message of the protocol")]
    TooLong(usize),
    #[error("encryption: {0}")]
    Crypto(#[from] snow::Error),
}

enum State {
    Handshake(Box<HandshakeState>),
    Transport(Box<TransportState>),
    Broken,
}

/// One end of a connection.
pub(crate) struct Secure {
    state: State,
    received: Vec<u8>,
    plain: Vec<u8>,
    /// Messages to be sent once the handshake is over.
    waiting: Vec<Vec<u8>>,
    /// Bytes for the peer.
    pub(crate) out: Vec<u8>,
}

impl Secure {
    /// `initiator`: this end has connected.
    pub(crate) fn new(key: &JobKey, initiator: bool) -> Result<Self, NoiseError> {
        Self::bound(key, initiator, PROLOGUE)
    }

    /// The same for the protocol that `prologue` names.
    pub(crate) fn bound(key: &JobKey, initiator: bool, prologue: &[u8]) -> Result<Self, NoiseError> {
        let params = PATTERN.parse().map_err(|_| NoiseError::NotAuthenticated)?;
        let builder = Builder::new(params).psk(0, &key.0)?.prologue(prologue)?;
        let mut secure = Self {
            state: State::Broken,
            received: Vec::new(),
            plain: Vec::new(),
            waiting: Vec::new(),
            out: Vec::new(),
        };
        let mut handshake = if initiator {
            builder.build_initiator()?
        } else {
            builder.build_responder()?
        };
        if initiator {
            secure.say_hello(&mut handshake)?;
        }
        secure.state = State::Handshake(Box::new(handshake));
        Ok(secure)
    }

    fn say_hello(&mut self, handshake: &mut HandshakeState) -> Result<(), NoiseError> {
        let mut packet = [0u8; HANDSHAKE_BYTES];
        let n = handshake.write_message(&[], &mut packet)?;
        push_packet(&mut self.out, &packet[..n]);
        Ok(())
    }

    /// Whether the peer has proved that it knows the key.
    pub(crate) fn is_authenticated(&self) -> bool {
        matches!(self.state, State::Transport(_))
    }

    /// Queues a message.
    pub(crate) fn send(&mut self, message: Vec<u8>) -> Result<(), NoiseError> {
        let State::Transport(transport) = &mut self.state else {
            self.waiting.push(message);
            return Ok(());
        };
        let length = u32::try_from(message.len()).ok().filter(|n| *n as usize <= MAX_MESSAGE);
        let length = length.ok_or(NoiseError::TooLong(message.len()))?;
        let mut stream = length.to_le_bytes().to_vec();
        stream.extend_from_slice(&message);
        seal(transport, &stream, &mut self.out)
    }

    /// Sends `stream` as it is, whatever lengths it announces.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn send_raw(&mut self, stream: &[u8]) -> Result<(), NoiseError> {
        match &mut self.state {
            State::Transport(transport) => seal(transport, stream, &mut self.out),
            _ => Err(NoiseError::Packet),
        }
    }

    /// Takes bytes that have arrived. An error ends the connection.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Result<(), NoiseError> {
        self.received.extend_from_slice(bytes);
        let received = std::mem::take(&mut self.received);
        let mut rest = received.as_slice();
        while let Some((length, tail)) = rest.split_first_chunk::<2>() {
            let length = usize::from(u16::from_be_bytes(*length));
            if !self.is_authenticated() && length != HANDSHAKE_BYTES {
                return Err(NoiseError::NotAuthenticated);
            }
            let Some((packet, tail)) = tail.split_at_checked(length) else {
                break;
            };
            self.packet(packet)?;
            rest = tail;
        }
        self.received = rest.to_vec();
        Ok(())
    }

    fn packet(&mut self, packet: &[u8]) -> Result<(), NoiseError> {
        match std::mem::replace(&mut self.state, State::Broken) {
            State::Handshake(mut handshake) => {
                let mut empty = [0u8; HANDSHAKE_BYTES];
                handshake
                    .read_message(packet, &mut empty)
                    .map_err(|_| NoiseError::NotAuthenticated)?;
                if !handshake.is_handshake_finished() {
                    self.say_hello(&mut handshake)?;
                }
                self.state = State::Transport(Box::new(handshake.into_transport_mode()?));
                for message in std::mem::take(&mut self.waiting) {
                    self.send(message)?;
                }
                Ok(())
            }
            State::Transport(mut transport) => {
                let at = self.plain.len();
                self.plain.resize(at + packet.len(), 0);
                let n = transport
                    .read_message(packet, &mut self.plain[at..])
                    .map_err(|_| NoiseError::Packet)?;
                self.plain.truncate(at + n);
                self.state = State::Transport(transport);
                match self.announced() {
                    Some(length) if length > MAX_MESSAGE => Err(NoiseError::TooLong(length)),
                    _ => Ok(()),
                }
            }
            State::Broken => Err(NoiseError::Packet),
        }
    }

    fn announced(&self) -> Option<usize> {
        let length = self.plain.first_chunk::<4>()?;
        Some(u32::from_le_bytes(*length) as usize)
    }

    /// The next whole message.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, NoiseError> {
        let Some(length) = self.announced() else { return Ok(None) };
        if length > MAX_MESSAGE {
            return Err(NoiseError::TooLong(length));
        }
        if self.plain.len() < 4 + length {
            return Ok(None);
        }
        let rest = self.plain.split_off(4 + length);
        let mut message = std::mem::replace(&mut self.plain, rest);
        message.drain(..4);
        Ok(Some(message))
    }
}

/// Encrypts `stream` in packets.
fn seal(transport: &mut TransportState, stream: &[u8], out: &mut Vec<u8>) -> Result<(), NoiseError> {
    let mut packet = vec![0u8; stream.len().min(PACKET_MAX - TAG_BYTES) + TAG_BYTES];
    for part in stream.chunks(PACKET_MAX - TAG_BYTES) {
        let n = transport.write_message(part, &mut packet)?;
        push_packet(out, &packet[..n]);
    }
    Ok(())
}

fn push_packet(out: &mut Vec<u8>, packet: &[u8]) {
    // A packet is never longer than its length field can say: the buffers it comes from are not.
    let length = u16::try_from(packet.len()).unwrap_or(u16::MAX);
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(packet);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pair() -> (Secure, Secure) {
        let key = JobKey::random().unwrap();
        (Secure::new(&key, true).unwrap(), Secure::new(&key, false).unwrap())
    }

    /// Carries bytes both ways, in pieces of `piece`, until nothing is left.
    fn carry(a: &mut Secure, b: &mut Secure, piece: usize) -> Result<(), NoiseError> {
        while !a.out.is_empty() || !b.out.is_empty() {
            let (x, y) = (std::mem::take(&mut a.out), std::mem::take(&mut b.out));
            for p in x.chunks(piece) {
                b.feed(p)?;
            }
            for p in y.chunks(piece) {
                a.feed(p)?;
            }
        }
        Ok(())
    }

    #[test]
    fn messages_of_all_lengths_arrive_in_order() {
        for piece in [1, 7, 100_000] {
            let (mut a, mut b) = pair();
            let lengths = [0usize, 1, 65_000, 65_515, 65_516, 200_000];
            for n in lengths {
                a.send(vec![n as u8; n]).unwrap();
            }
            carry(&mut a, &mut b, piece).unwrap();
            assert!(a.is_authenticated() && b.is_authenticated());
            for n in lengths {
                assert_eq!(b.next().unwrap().unwrap(), vec![n as u8; n]);
            }
            assert!(b.next().unwrap().is_none());
        }
    }

    #[test]
    fn a_peer_with_another_key_learns_nothing_and_is_refused() {
        let (mut a, _) = pair();
        let (_, mut b) = pair();
        a.send(b"secret".to_vec()).unwrap();
        assert!(matches!(carry(&mut a, &mut b, 1000), Err(NoiseError::NotAuthenticated)));
        assert!(!b.is_authenticated());
    }

    #[test]
    fn a_changed_byte_ends_the_connection() {
        let (mut a, mut b) = pair();
        carry(&mut a, &mut b, 1000).unwrap();
        a.send(b"hello".to_vec()).unwrap();
        let last = a.out.len() - 1;
        a.out[last] ^= 1;
        assert!(matches!(carry(&mut a, &mut b, 1000), Err(NoiseError::Packet)));
    }

    #[test]
    fn an_endless_message_is_refused_when_it_is_announced() {
        let (mut a, mut b) = pair();
        carry(&mut a, &mut b, 1000).unwrap();
        let State::Transport(t) = &mut a.state else {
            panic!("no transport")
        };
        let mut packet = [0u8; 64];
        let n = t.write_message(&u32::MAX.to_le_bytes(), &mut packet).unwrap();
        push_packet(&mut a.out, &packet[..n]);
        assert!(matches!(carry(&mut a, &mut b, 1000), Err(NoiseError::TooLong(_))));
    }

    proptest! {
        #[test]
        fn rubbish_is_refused_and_never_kept(rubbish in prop::collection::vec(any::<u8>(), 50..400)) {
            let (_, mut b) = pair();
            let refused = b.feed(&rubbish).is_err();
            prop_assert!(refused);
            prop_assert!(!b.is_authenticated());
        }
    }
}
