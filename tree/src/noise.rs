//! Messages to bytes and back, encrypted and authenticated with the job key (Noise NNpsk0), without I/O.
//!
//! ```text
//! packet:  length u16, big endian │ one Noise message (at most 65535 bytes)
//! stream inside the packets:  length u32, little endian │ message ...
//! ```
//! ```text
//! initiator ── e ──> responder      can be had on the wire and sent again: proves nothing, and is answered once
//! initiator <── e, ee ── responder  proves that the responder knows the key
//! initiator ── empty ──> responder  sealed with what both have just made: proves that the initiator knows it
//! ```
//! Everything that comes from outside is bounded before it is kept: a packet of the handshake has exactly one length,
//! and a peer that does not know the key fails at its first packet. A responder says nothing before the proof.

use crate::key::JobKey;
use snow::{Builder, HandshakeState, TransportState};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Bound to the protocol's version.
pub(crate) const TREE: &[u8] = b"belay tree 1";
/// The same of connections beside the tree.
pub(crate) const DIRECT: &[u8] = b"belay direct 1";
/// Each of the two messages of the handshake: a public key and a tag.
const HANDSHAKE_BYTES: usize = 48;
const TAG_BYTES: usize = 16;
/// Longest packet that may prove that a peer knows the key: agents of before send a message at once, which does so too.
const PROOF_MAX: usize = 4096;
const PACKET_MAX: usize = 65535;
/// Longest message.
pub(crate) const MAX_MESSAGE: usize = 32 << 20;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoiseError {
    #[error("the peer does not know the job's key, or is no belay agent")]
    NotAuthenticated,
    #[error("its first packet is one of before, sent again by somebody who has seen it")]
    Replayed,
    #[error("a packet was changed on its way, or is not what belongs here")]
    Packet,
    #[error("a message of {0} bytes is longer than any message of the protocol")]
    TooLong(usize),
    #[error("encryption: {0}")]
    Crypto(#[from] snow::Error),
}

/// First packets that have been answered. Nobody who knows the key makes the same one twice, and the answer is what
/// costs something: each is given once. So many are kept, then it begins anew.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answered(Arc<Mutex<HashSet<[u8; HANDSHAKE_BYTES]>>>);

impl Answered {
    const MOST: usize = 1 << 16;

    /// Notes `packet`; whether it is new.
    fn is_new(&self, packet: &[u8]) -> bool {
        let Ok(packet) = packet.try_into() else { return true };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= Self::MOST {
            known.clear();
        }
        known.insert(packet)
    }
}

enum State {
    Handshake(Box<HandshakeState>),
    /// At a responder: nothing has come yet that only somebody with the key can make.
    Unproven(Box<TransportState>),
    Transport(Box<TransportState>),
    Broken,
}

/// One end of a connection.
pub(crate) struct Secure {
    state: State,
    answered: Answered,
    received: Vec<u8>,
    plain: Vec<u8>,
    /// Messages to be sent once the handshake is over.
    waiting: Vec<Vec<u8>>,
    /// Bytes for the peer.
    pub(crate) out: Vec<u8>,
}

impl Secure {
    /// The end that has connected, in the protocol that `prologue` names.
    pub(crate) fn initiator(key: &JobKey, prologue: &[u8]) -> Result<Self, NoiseError> {
        let mut handshake = builder(key, prologue)?.build_initiator()?;
        let mut secure = Self::new(Answered::default());
        secure.say_hello(&mut handshake)?;
        secure.state = State::Handshake(Box::new(handshake));
        Ok(secure)
    }

    /// The end that was connected to, at a place where these first packets have been `answered`.
    pub(crate) fn responder(key: &JobKey, prologue: &[u8], answered: Answered) -> Result<Self, NoiseError> {
        let handshake = builder(key, prologue)?.build_responder()?;
        let mut secure = Self::new(answered);
        secure.state = State::Handshake(Box::new(handshake));
        Ok(secure)
    }

    fn new(answered: Answered) -> Self {
        Self {
            state: State::Broken,
            answered,
            received: Vec::new(),
            plain: Vec::new(),
            waiting: Vec::new(),
            out: Vec::new(),
        }
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
            let may_be = match self.state {
                State::Handshake(_) => length == HANDSHAKE_BYTES,
                State::Unproven(_) => length <= PROOF_MAX,
                State::Transport(_) | State::Broken => true,
            };
            if !may_be {
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
                if handshake.is_handshake_finished() {
                    let mut transport = handshake.into_transport_mode()?;
                    seal_packet(&mut transport, &[], &mut self.out)?;
                    return self.authenticated(Box::new(transport));
                }
                if !self.answered.is_new(packet) {
                    return Err(NoiseError::Replayed);
                }
                self.say_hello(&mut handshake)?;
                self.state = State::Unproven(Box::new(handshake.into_transport_mode()?));
                Ok(())
            }
            State::Unproven(mut transport) => {
                self.open(&mut transport, packet).map_err(|_| NoiseError::NotAuthenticated)?;
                self.authenticated(transport)
            }
            State::Transport(mut transport) => {
                self.open(&mut transport, packet)?;
                self.state = State::Transport(transport);
                self.check_announced()
            }
            State::Broken => Err(NoiseError::Packet),
        }
    }

    /// The peer knows the key: what waits for that is sent.
    fn authenticated(&mut self, transport: Box<TransportState>) -> Result<(), NoiseError> {
        self.state = State::Transport(transport);
        for message in std::mem::take(&mut self.waiting) {
            self.send(message)?;
        }
        self.check_announced()
    }

    /// Decrypts a packet.
    fn open(&mut self, transport: &mut TransportState, packet: &[u8]) -> Result<(), NoiseError> {
        let at = self.plain.len();
        self.plain.resize(at + packet.len(), 0);
        let n = transport
            .read_message(packet, &mut self.plain[at..])
            .map_err(|_| NoiseError::Packet)?;
        self.plain.truncate(at + n);
        Ok(())
    }

    fn check_announced(&self) -> Result<(), NoiseError> {
        match self.announced() {
            Some(length) if length > MAX_MESSAGE => Err(NoiseError::TooLong(length)),
            _ => Ok(()),
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

fn builder<'k>(key: &'k JobKey, prologue: &'k [u8]) -> Result<Builder<'k>, NoiseError> {
    let params = PATTERN.parse().map_err(|_| NoiseError::NotAuthenticated)?;
    Ok(Builder::new(params).psk(0, &key.0)?.prologue(prologue)?)
}

/// Encrypts `stream` in packets.
fn seal(transport: &mut TransportState, stream: &[u8], out: &mut Vec<u8>) -> Result<(), NoiseError> {
    stream
        .chunks(PACKET_MAX - TAG_BYTES)
        .try_for_each(|part| seal_packet(transport, part, out))
}

/// The same for what one packet holds.
fn seal_packet(transport: &mut TransportState, part: &[u8], out: &mut Vec<u8>) -> Result<(), NoiseError> {
    let mut packet = vec![0u8; part.len() + TAG_BYTES];
    let n = transport.write_message(part, &mut packet)?;
    push_packet(out, &packet[..n]);
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
        let b = Secure::responder(&key, TREE, Answered::default());
        (Secure::initiator(&key, TREE).unwrap(), b.unwrap())
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
    fn a_first_packet_proves_nothing_and_is_answered_once() {
        let (key, answered) = (JobKey::random().unwrap(), Answered::default());
        let responder = || Secure::responder(&key, TREE, answered.clone()).unwrap();
        let first = Secure::initiator(&key, TREE).unwrap().out;
        let mut b = responder();
        b.send(b"secret".to_vec()).unwrap();
        b.feed(&first).unwrap();
        assert!(!b.is_authenticated());
        assert_eq!(b.out.len(), 2 + HANDSHAKE_BYTES, "the answer and nothing else");
        // What follows cannot be made without the key, and is bounded.
        let tag = u16::try_from(TAG_BYTES).unwrap().to_be_bytes();
        assert!(matches!(
            b.feed(&[&tag[..], &[7; TAG_BYTES]].concat()),
            Err(NoiseError::NotAuthenticated)
        ));
        assert!(matches!(responder().feed(&first), Err(NoiseError::Replayed)));
        let mut a = Secure::initiator(&key, TREE).unwrap();
        let mut b = responder();
        b.feed(&std::mem::take(&mut a.out)).unwrap();
        assert!(matches!(b.feed(&u16::MAX.to_be_bytes()), Err(NoiseError::NotAuthenticated)));
    }

    #[test]
    fn a_first_message_is_a_proof_as_well() {
        let (mut a, mut b) = pair();
        b.feed(&std::mem::take(&mut a.out)).unwrap();
        // An agent of before sends no empty packet.
        let State::Handshake(mut handshake) = std::mem::replace(&mut a.state, State::Broken) else {
            panic!("no handshake")
        };
        handshake.read_message(&b.out[2..], &mut [0; HANDSHAKE_BYTES]).unwrap();
        let mut transport = handshake.into_transport_mode().unwrap();
        let mut out = Vec::new();
        seal(&mut transport, b"\x02\0\0\0hi", &mut out).unwrap();
        b.feed(&out).unwrap();
        assert!(b.is_authenticated());
        assert_eq!(b.next().unwrap().unwrap(), b"hi");
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
