//! What the two ends of a connection say to each other over TCP.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 2 | [`VERSION`] |
//! | 1 | the kind of message |
//! | 1 | length of the program's own data |
//! | 48 | fields, the same for all kinds; those that a kind does not have are 0 |
//! | ... | the program's data |
//!
//! Numbers are in network byte order. Whoever has the port of a connection's end may send anything: every field is
//! checked, and what is no message ends the connection.

/// How each message begins.
const MAGIC: [u8; 8] = *b"belay-cm";
const VERSION: u16 = 1;
const HEAD: usize = 12;
const FIELDS: usize = 48;
/// The longest message.
pub(super) const LONGEST: usize = HEAD + FIELDS + u8::MAX as usize;
/// Numbers of queue pairs and of packets.
const BITS_24: u32 = 0xff_ffff;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Asks for a connection.
    Request,
    /// Accepts it.
    Reply,
    /// The answer has been heard: the connection is there.
    Ready,
    /// It is rejected.
    Reject,
}

/// One end: its queue pair, where that is, and what it can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct End {
    pub(super) gid: [u8; 16],
    pub(super) gid_type: u8,
    pub(super) mtu: u8,
    pub(super) lid: u16,
    pub(super) number: u32,
    pub(super) psn: u32,
    pub(super) qkey: u32,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: Kind,
    /// The port space, in a request.
    pub(super) space: u32,
    /// Why, in a rejection.
    pub(super) reason: u32,
    pub(super) end: End,
    pub(super) data: Vec<u8>,
}

impl Message {
    pub(super) fn new(kind: Kind, end: End, data: &[u8]) -> Self {
        Message {
            kind,
            space: 0,
            reason: 0,
            end,
            data: data.to_vec(),
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let e = &self.end;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_be_bytes());
        bytes.extend([self.kind as u8, self.data.len() as u8]);
        bytes.extend(e.gid);
        bytes.extend(e.lid.to_be_bytes());
        bytes.extend([e.gid_type, e.mtu, e.responder_resources, e.initiator_depth]);
        bytes.extend([e.flow_control, e.retry_count, e.rnr_retry_count, e.srq, 0, 0]);
        for number in [e.number, e.psn, e.qkey, self.space, self.reason] {
            bytes.extend(number.to_be_bytes());
        }
        bytes.extend(&self.data);
        bytes
    }

    /// The message at the beginning, and its length; None where there is not all of it yet.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Message, usize)>, Garbage> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err(Garbage);
        }
        let Some((head, rest)) = bytes.split_at_checked(HEAD) else {
            return Ok(None);
        };
        if head[8..10] != VERSION.to_be_bytes() {
            return Err(Garbage);
        }
        let kind = match head[10] {
            0 => Kind::Request,
            1 => Kind::Reply,
            2 => Kind::Ready,
            3 => Kind::Reject,
            _ => return Err(Garbage),
        };
        let Some((fields, rest)) = rest.split_first_chunk::<FIELDS>() else {
            return Ok(None);
        };
        let Some(data) = rest.get(..head[11].into()) else {
            return Ok(None);
        };
        let number = |at: usize| u32::from_be_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&fields[..16]);
        let end = End {
            gid,
            lid: u16::from_be_bytes([fields[16], fields[17]]),
            gid_type: fields[18],
            mtu: fields[19],
            responder_resources: fields[20],
            initiator_depth: fields[21],
            flow_control: fields[22],
            retry_count: fields[23],
            rnr_retry_count: fields[24],
            srq: fields[25],
            number: number(28),
            psn: number(32),
            qkey: number(36),
        };
        let sound = (1..=5).contains(&end.mtu)
            && end.gid_type <= 2
            && end.number <= BITS_24
            && end.psn <= BITS_24
            && end.retry_count <= 7
            && end.rnr_retry_count <= 7;
        if matches!(kind, Kind::Request | Kind::Reply) && !sound {
            return Err(Garbage);
        }
        let message = Message {
            kind,
            space: number(40),
            reason: number(44),
            end,
            data: data.to_vec(),
        };
        let length = HEAD + FIELDS + message.data.len();
        Ok(Some((message, length)))
    }
}

/// What is no message of a manager's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Garbage;

#[cfg(test)]
mod tests {
    use super::*;

    fn example(kind: Kind) -> Message {
        let end = End {
            gid: *b"0123456789abcdef",
            gid_type: 2,
            mtu: 5,
            lid: 0x1234,
            number: 0xab_cdef,
            psn: 0x12_3456,
            qkey: 0xfedc_ba98,
            responder_resources: 1,
            initiator_depth: 2,
            flow_control: 3,
            retry_count: 4,
            rnr_retry_count: 5,
            srq: 6,
        };
        Message {
            space: 0x0106,
            reason: 28,
            ..Message::new(kind, end, b"private")
        }
    }

    #[test]
    fn messages_travel_and_wait_for_their_ends() {
        for kind in [Kind::Request, Kind::Reply, Kind::Ready, Kind::Reject] {
            let message = example(kind);
            let bytes = message.encode();
            assert!(bytes.len() <= LONGEST);
            for n in 0..bytes.len() {
                assert_eq!(Message::decode(&bytes[..n]), Ok(None), "{n} bytes");
            }
            let more = [&bytes[..], b"next"].concat();
            assert_eq!(Message::decode(&more), Ok(Some((message, bytes.len()))));
        }
    }

    #[test]
    fn what_is_no_message_is_known_by_its_first_bytes() {
        assert_eq!(Message::decode(b"GET / HTTP/1.1"), Err(Garbage));
        assert_eq!(Message::decode(b"belax"), Err(Garbage));
        let good = example(Kind::Request).encode();
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            Message::decode(&bytes)
        };
        // The version, the kind, the MTU, the kind of GID, retries, and numbers of more than 24 bits.
        for (at, value) in [(9, 2), (10, 4), (31, 0), (31, 6), (30, 3), (35, 8), (36, 8), (40, 1), (44, 1)] {
            assert_eq!(with(at, value), Err(Garbage), "byte {at}");
        }
    }

    /// Any bytes, and messages with any byte changed: decoded or refused, and what is decoded is sound.
    #[test]
    fn any_bytes_are_decoded_or_refused() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        let mut decoded = 0;
        for _ in 0..100_000 {
            let kind = [Kind::Request, Kind::Reply, Kind::Ready, Kind::Reject][random() % 4];
            let mut bytes = example(kind).encode();
            for _ in 0..random() % 4 {
                let at = random() % bytes.len();
                bytes[at] = random() as u8;
            }
            bytes.truncate(random() % (bytes.len() + 1) + random() % 2 * LONGEST);
            if let Ok(Some((message, length))) = Message::decode(&bytes) {
                decoded += 1;
                assert!(length <= bytes.len() && message.data.len() <= length);
                assert_eq!(message.encode().len(), length);
            }
        }
        assert!(decoded > 10_000, "{decoded}");
    }
}
