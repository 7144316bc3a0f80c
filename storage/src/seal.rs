//! Sealed objects: what leaves the node for a tier that others may read or write, encrypted and authenticated. No I/O.
//!
//! ```text
//! 0      magic "BELAYSEA"                              8
//! 8      format version                               u32
//! 12     id of the key                                 8
//! 20     salt: random, of this object alone           32
//! 52     segments: 64 KiB of the contents, the last one what is left of them (perhaps nothing), each followed by its tag of 16 bytes
//! ```
//! Numbers are little endian. Every object has a key of its own: HKDF-SHA256 of the configured key, the salt, and the
//! path of the object below the tier, which names job, part, kind and generation. So contents moved to another name do
//! not open, and no two objects share a key, however many nodes write and however often one is written again: a
//! segment's nonce may be its number, with a mark on the last one. AES-256-GCM.
//!
//! A key has no name but its id, which is made from it: another key under a known id cannot be, so what does not open
//! with the key that it names has been altered.

use belay_kernel::direct::Buffer;
use ring::aead::{Aad, LessSafeKey, Nonce, UnboundKey, AES_256_GCM, NONCE_LEN};
use ring::hkdf::{Salt, HKDF_SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::ops::Range;

const MAGIC: &[u8; 8] = b"BELAYSEA";
const VERSION: u32 = 1;
/// Bytes of the contents in each segment but the last.
pub const SEGMENT: u64 = 64 << 10;
/// Bytes of a tag.
const TAG: u64 = 16;
/// Bytes in front of the segments.
pub const HEADER: usize = 52;
/// Bytes of a key, and of a salt.
const KEY: usize = 32;
/// Most keys of a job.
const MAX_KEYS: usize = 64;

/// Tells keys apart, and says nothing of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId([u8; 8]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why an object does not open.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsealable {
    /// It is not sealed.
    #[error("it is not sealed, so anybody who can write to the tier may have put it there")]
    Plain,
    /// A later belay has sealed it.
    #[error("it is sealed in format {0}, this belay reads format {VERSION}")]
    Version(u32),
    /// Its key is not at hand.
    #[error(
        "it is sealed with key {needed}, and {have}; name the file or command that has that key in [encryption] (docs/tiers.md)"
    )]
    UnknownKey {
        /// The key that opens it.
        needed: KeyId,
        /// What is at hand, in words.
        have: String,
    },
    /// No sealed object is as long.
    #[error("no sealed object has {0} bytes: it has been cut or added to")]
    Length(u64),
    /// It is not what was sealed.
    #[error("it is not what was sealed under this name with key {0}: altered, cut, or moved here from another name")]
    Altered(KeyId),
}

impl Unsealable {
    /// Whether another key, or another belay, may open it: then it is not known to be worth nothing.
    pub fn is_locked(&self) -> bool {
        matches!(self, Unsealable::Version(_) | Unsealable::UnknownKey { .. })
    }
}

/// A key.
#[derive(Clone, PartialEq, Eq)]
struct Key {
    id: KeyId,
    secret: [u8; KEY],
}

/// The keys at hand. The newest seals, all of them open.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    /// The newest last; at least one.
    keys: Vec<Key>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys.iter().map(|k| k.id)).finish()
    }
}

/// 32 bytes that nobody can make who does not have all of these.
fn derived(secret: &[u8], salt: &[u8], what: &[&[u8]]) -> Option<[u8; KEY]> {
    let mut out = [0; KEY];
    let whole = Salt::new(HKDF_SHA256, salt).extract(secret);
    whole.expand(what, HKDF_SHA256).ok()?.fill(&mut out).ok()?;
    Some(out)
}

impl Key {
    fn new(secret: [u8; KEY]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h, ..] = derived(&secret, b"belay", &[b"id of a key"])?;
        let id = KeyId([a, b, c, d, e, f, g, h]);
        Some(Self { id, secret })
    }

    fn of_object(&self, salt: &[u8], path: &str) -> Option<ObjectKey> {
        let secret = derived(&self.secret, salt, &[b"sealed object 1:", path.as_bytes()])?;
        let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &secret).ok()?);
        Some(ObjectKey { key, id: self.id })
    }
}

impl Keys {
    /// The keys in `text`: one in each line, 64 hexadecimal digits, the newest last. Empty lines, and those that begin
    /// with `#`, are none.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let mut keys: Vec<Key> = Vec::new();
        for (n, line) in text.split(|b| *b == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            // What stands there may be a key all the same: it is not shown.
            let bad = || format!("line {}: not a key, which is 64 hexadecimal digits", n + 1);
            let mut secret = [0; KEY];
            hex::decode_to_slice(line, &mut secret).map_err(|_| bad())?;
            let key = Key::new(secret).ok_or_else(bad)?;
            if keys.iter().any(|k| k.id == key.id) {
                return Err(format!("line {}: key {} stands there twice", n + 1, key.id));
            }
            keys.push(key);
        }
        match keys.len() {
            0 => Err("it holds no key: a line of 64 hexadecimal digits, as openssl rand -hex 32 makes it".into()),
            n if n > MAX_KEYS => Err(format!("{n} keys, at most {MAX_KEYS} are read")),
            _ => Ok(Self { keys }),
        }
    }

    /// The key that seals.
    pub fn newest(&self) -> Option<KeyId> {
        self.keys.last().map(|k| k.id)
    }

    /// Begins to seal an object that will lie at `path`: its first bytes, and its key.
    pub(crate) fn begin(&self, path: &str) -> Option<([u8; HEADER], ObjectKey)> {
        let key = self.keys.last()?;
        let mut salt = [0; KEY];
        SystemRandom::new().fill(&mut salt).ok()?;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..20].copy_from_slice(&key.id.0);
        header[20..].copy_from_slice(&salt);
        Some((header, key.of_object(&salt, path)?))
    }

    /// What opens the object at `path` that begins with `header`.
    fn object(&self, header: &[u8], path: &str) -> Result<ObjectKey, Unsealable> {
        let needed = key_of(header)?;
        let key = self.keys.iter().find(|k| k.id == needed);
        let unknown = || Unsealable::UnknownKey {
            needed,
            have: match &*self.keys {
                [one] => format!("the only key at hand is {}", one.id),
                all => format!(
                    "the keys at hand are {}",
                    all.iter().map(|k| k.id.to_string()).collect::<Vec<_>>().join(", ")
                ),
            },
        };
        let salt = header.get(20..HEADER).ok_or(Unsealable::Plain)?;
        key.and_then(|k| k.of_object(salt, path)).ok_or_else(unknown)
    }
}

/// The key that opens an object which begins with `header`.
fn key_of(header: &[u8]) -> Result<KeyId, Unsealable> {
    let rest = header.strip_prefix(MAGIC).ok_or(Unsealable::Plain)?;
    let (version, rest) = rest.split_first_chunk::<4>().ok_or(Unsealable::Plain)?;
    let (id, _) = rest.split_first_chunk::<8>().ok_or(Unsealable::Plain)?;
    match u32::from_le_bytes(*version) {
        VERSION => Ok(KeyId(*id)),
        other => Err(Unsealable::Version(other)),
    }
}

/// Where no key is configured: why what begins with `header`, and has `sealed` bytes, cannot be read, if it is sealed.
pub fn locked(header: &[u8], sealed: u64) -> Option<Unsealable> {
    match key_of(header) {
        // Only the beginning is that of a sealed object.
        Ok(_) if contents_length(sealed).is_none() => None,
        Ok(needed) => Some(Unsealable::UnknownKey {
            needed,
            have: "no key is configured".into(),
        }),
        Err(Unsealable::Plain) => None,
        Err(other) => Some(other),
    }
}

/// The key of one object.
#[derive(Debug)]
pub(crate) struct ObjectKey {
    key: LessSafeKey,
    id: KeyId,
}

/// The nonce of a segment. No two of an object are the same, and no other object has its key.
fn nonce(segment: u64, is_last: bool) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&segment.to_le_bytes());
    nonce[NONCE_LEN - 1] = is_last.into();
    Nonce::assume_unique_for_key(nonce)
}

impl ObjectKey {
    /// Seals `data`, which is segment `segment`; whether that could be done.
    pub(crate) fn seal(&self, segment: u64, is_last: bool, data: &mut Vec<u8>) -> bool {
        let sealed = self.key.seal_in_place_append_tag(nonce(segment, is_last), Aad::empty(), data);
        sealed.is_ok()
    }

    /// Opens the segment at `from` of `data`, up to its end, and moves its contents to the beginning.
    fn open(&self, segment: u64, is_last: bool, data: &mut [u8], from: usize) -> Result<(), Unsealable> {
        let opened = self.key.open_within(nonce(segment, is_last), Aad::empty(), data, from..);
        opened.map(drop).map_err(|_| Unsealable::Altered(self.id))
    }
}

/// How many segments hold `bytes` bytes.
fn segments(bytes: u64) -> u64 {
    bytes.div_ceil(SEGMENT).max(1)
}

/// Length of the sealed object that holds `bytes` bytes.
pub fn sealed_length(bytes: u64) -> u64 {
    let tags = segments(bytes).saturating_mul(TAG);
    bytes.saturating_add(tags).saturating_add(HEADER as u64)
}

/// How many bytes a sealed object of `sealed` bytes holds; none where no object has that length.
pub fn contents_length(sealed: u64) -> Option<u64> {
    let body = sealed.checked_sub(HEADER as u64)?;
    let tags = body.div_ceil(SEGMENT + TAG).max(1) * TAG;
    let bytes = body.checked_sub(tags)?;
    (sealed_length(bytes) == sealed).then_some(bytes)
}

/// A sealed object of which length and header have been read.
#[derive(Debug)]
pub(crate) struct Opener {
    key: ObjectKey,
    bytes: u64,
}

impl Opener {
    /// For the object at `path`, which has `sealed` bytes and begins with `header`.
    pub(crate) fn new(keys: &Keys, path: &str, header: &[u8], sealed: u64) -> Result<Self, Unsealable> {
        let bytes = contents_length(sealed).ok_or(Unsealable::Length(sealed));
        let key = match keys.object(header, path) {
            // No key opens what is as long as no sealed object.
            Err(unknown @ Unsealable::UnknownKey { .. }) => return Err(bytes.err().unwrap_or(unknown)),
            other => other?,
        };
        let bytes = bytes?;
        Ok(Self { key, bytes })
    }

    /// Bytes of its contents.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The key that opens it.
    pub(crate) fn id(&self) -> KeyId {
        self.key.id
    }

    /// Opens what is in `buf` behind the first `skip` bytes: those that [`stored`] names for `range`, which lies within
    /// the contents. Afterwards `buf` holds exactly the range.
    pub(crate) fn open(&self, range: &Range<u64>, buf: &mut Buffer, skip: usize) -> Result<(), Unsealable> {
        let cut = || Unsealable::Length(sealed_length(self.bytes));
        let last = segments(self.bytes) - 1;
        let first = range.start / SEGMENT;
        let (mut from, mut to, mut segment) = (skip, 0, first);
        while from < buf.len() {
            let stored = (buf.len() - from).min((SEGMENT + TAG) as usize);
            let bytes = stored.checked_sub(TAG as usize).ok_or_else(cut)?;
            self.key
                .open(segment, segment == last, &mut buf[to..from + stored], from - to)?;
            (from, to, segment) = (from + stored, to + bytes, segment + 1);
        }
        let begin = usize::try_from(range.start - first * SEGMENT).map_err(|_| cut())?;
        let wanted = usize::try_from(range.end - range.start).map_err(|_| cut())?;
        if begin + wanted > to {
            return Err(cut());
        }
        buf.copy_within(begin..begin + wanted, 0);
        buf.resize(wanted);
        Ok(())
    }
}

/// The bytes of a sealed object that hold `range` of its contents, of which there are `bytes`.
pub(crate) fn stored(range: &Range<u64>, bytes: u64) -> Range<u64> {
    let at = |segment: u64| HEADER as u64 + segment * (SEGMENT + TAG);
    let (first, end) = (range.start / SEGMENT, range.end.div_ceil(SEGMENT));
    at(first)..at(end.max(first + 1)).min(sealed_length(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys(text: &str) -> Keys {
        Keys::parse(text.as_bytes()).unwrap()
    }

    fn seal(keys: &Keys, path: &str, data: &[u8]) -> Vec<u8> {
        let (header, key) = keys.begin(path).unwrap();
        let mut out = header.to_vec();
        let last = segments(data.len() as u64) - 1;
        for n in 0..=last {
            let from = (n * SEGMENT) as usize;
            let mut part = data[from..data.len().min(from + SEGMENT as usize)].to_vec();
            assert!(key.seal(n, n == last, &mut part));
            out.extend(part);
        }
        assert_eq!(out.len() as u64, sealed_length(data.len() as u64));
        out
    }

    fn open(keys: &Keys, path: &str, sealed: &[u8], range: Option<Range<u64>>) -> Result<Vec<u8>, Unsealable> {
        let header = &sealed[..sealed.len().min(HEADER)];
        let opener = Opener::new(keys, path, header, sealed.len() as u64)?;
        let range = range.unwrap_or(0..opener.bytes());
        let from = stored(&range, opener.bytes());
        let mut buf = Buffer::default();
        buf.extend_from_slice(&sealed[from.start as usize..from.end as usize]);
        opener.open(&range, &mut buf, 0)?;
        Ok(buf.to_vec())
    }

    const ONE: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
    const TWO: &str = "ff0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

    #[test]
    fn keys_are_lines_and_the_last_one_seals() {
        let both = keys(&format!("# of spring\n{ONE}\n\n  {TWO} \r\n"));
        assert_eq!(both.newest(), keys(TWO).newest());
        assert_ne!(both.newest(), keys(ONE).newest());
        let shown = format!("{both:?}");
        assert!(
            shown.contains(&both.newest().unwrap().to_string()) && !shown.contains("0102030405"),
            "{shown}"
        );
        for (text, words) in [
            (String::new(), "no key"),
            ("# nothing".into(), "no key"),
            (format!("{ONE}\n{}", &ONE[1..]), "line 2: not a key"),
            (format!("{ONE}0"), "line 1: not a key"),
            (format!("{ONE}\n#\n{}", ONE.to_uppercase()), "line 3"),
            ("g".repeat(64), "line 1"),
        ] {
            let why = Keys::parse(text.as_bytes()).unwrap_err();
            assert!(why.contains(words) && !why.contains("01020304"), "{why}");
        }
        let many: Vec<String> = (0..=MAX_KEYS).map(|n| format!("{n:064x}")).collect();
        assert!(Keys::parse(many.join("\n").as_bytes()).is_err());
    }

    #[test]
    fn an_object_opens_with_its_key_under_its_name_and_in_no_other_way() {
        let (one, two, both) = (keys(ONE), keys(TWO), keys(&format!("{ONE}\n{TWO}")));
        let sealed = seal(&one, "job-1/packs/a", b"contents");
        assert_eq!(open(&one, "job-1/packs/a", &sealed, None).unwrap(), b"contents");
        assert_eq!(open(&both, "job-1/packs/a", &sealed, None).unwrap(), b"contents", "rotated");
        let id = one.newest().unwrap();
        for path in ["job-2/packs/a", "job-1/packs/b", "job-1/gen/a", ""] {
            assert_eq!(open(&one, path, &sealed, None), Err(Unsealable::Altered(id)), "{path}");
        }
        let refused = open(&two, "job-1/packs/a", &sealed, None).unwrap_err();
        let text = refused.to_string();
        assert!(refused.is_locked() && text.contains(&id.to_string()), "{text}");
        assert!(text.contains(&two.newest().unwrap().to_string()), "{text}");
        // The id of another key does not make it that key's.
        let mut renamed = sealed.clone();
        renamed[12..20].copy_from_slice(&two.newest().unwrap().0);
        let altered = Err(Unsealable::Altered(two.newest().unwrap()));
        assert_eq!(open(&both, "job-1/packs/a", &renamed, None), altered);
        assert_eq!(open(&one, "x", b"{\"format\":1}", None), Err(Unsealable::Plain));
        let mut later = sealed.clone();
        later[8] = 2;
        assert_eq!(open(&one, "job-1/packs/a", &later, None), Err(Unsealable::Version(2)));
        assert_ne!(
            sealed,
            seal(&one, "job-1/packs/a", b"contents"),
            "no object is sealed twice in the same way"
        );
        assert!(!sealed.windows(8).any(|w| w == b"contents"));
        assert!(locked(&sealed, sealed.len() as u64).is_some_and(|why| why.to_string().contains("no key is configured")));
        assert_eq!(locked(b"{\"format\":1}", 12), None);
        // Junk behind the beginning of another object.
        assert_eq!(locked(&sealed, (HEADER + 3) as u64), None);
        assert!(matches!(
            Opener::new(&keys(&"b".repeat(64)), "x", &sealed, (HEADER + 3) as u64),
            Err(Unsealable::Length(_))
        ));
    }

    #[test]
    fn segments_cannot_be_dropped_swapped_or_added() {
        let k = keys(ONE);
        let whole = (SEGMENT + TAG) as usize;
        let data: Vec<u8> = (0..3 * SEGMENT).map(|i| (i >> 16) as u8).collect();
        let sealed = seal(&k, "p", &data);
        let altered = Err(Unsealable::Altered(k.newest().unwrap()));
        let mut swapped = sealed.clone();
        swapped[HEADER..HEADER + 2 * whole].rotate_left(whole);
        assert_eq!(open(&k, "p", &swapped, None), altered);
        let cut = &sealed[..HEADER + 2 * whole];
        assert_eq!(open(&k, "p", cut, None), altered, "cut where a segment ends");
        assert_eq!(open(&k, "p", cut, Some(2 * SEGMENT - 1..2 * SEGMENT)), altered);
        let twice = [&sealed[..], &sealed[HEADER..]].concat();
        assert_eq!(open(&k, "p", &twice, None), altered);
        assert_eq!(
            open(&k, "p", &sealed[..HEADER + TAG as usize - 1], None),
            Err(Unsealable::Length(67))
        );
        assert_eq!(open(&k, "p", &sealed[..30], None), Err(Unsealable::Plain));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn every_range_comes_back(bytes in 0..3 * SEGMENT + 2, a in any::<u64>(), b in any::<u64>(), edge in 0..3u64) {
            // Also where segments begin and end.
            let bytes = if edge == 0 { bytes / SEGMENT * SEGMENT } else { bytes };
            let k = keys(ONE);
            let data: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 3) as u8).collect();
            let sealed = seal(&k, "p", &data);
            let (a, b) = (a % (bytes + 1), b % (bytes + 1));
            let range = a.min(b)..a.max(b);
            let found = open(&k, "p", &sealed, Some(range.clone())).unwrap();
            prop_assert_eq!(&found[..], &data[range.start as usize..range.end as usize]);
            prop_assert_eq!(open(&k, "p", &sealed, None).unwrap(), data);
        }

        #[test]
        fn no_flipped_bit_and_no_cut_passes(bytes in 0..SEGMENT * 2, at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let k = keys(ONE);
            let data = vec![7; bytes as usize];
            let mut sealed = seal(&k, "p", &data);
            let cut = at.index(sealed.len());
            prop_assert!(open(&k, "p", &sealed[..cut], None).is_err(), "cut to {}", cut);
            sealed[cut] ^= 1u8 << bit;
            let refused = open(&k, "p", &sealed, None).unwrap_err();
            let expected = match cut {
                0..8 => matches!(refused, Unsealable::Plain),
                8..12 => matches!(refused, Unsealable::Version(_)),
                12..20 => matches!(refused, Unsealable::UnknownKey { .. }),
                _ => matches!(refused, Unsealable::Altered(_)),
            };
            prop_assert!(expected, "byte {}: {}", cut, refused);
        }

        #[test]
        fn lengths_are_known_from_outside(bytes in 0..1u64 << 40, other in any::<u64>()) {
            prop_assert_eq!(contents_length(sealed_length(bytes)), Some(bytes));
            if let Some(bytes) = contents_length(other) {
                prop_assert_eq!(sealed_length(bytes), other);
            }
        }
    }
}
