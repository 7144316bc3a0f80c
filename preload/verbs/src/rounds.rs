//! What libraries tell each other through the agents: rows of entries (`abi/src/control.rs`).

use belay_abi::control::{ENTRY, FACT, SUM, WISH};

/// What this library tells in a round.
#[derive(Default)]
pub(crate) struct Told {
    bytes: Vec<u8>,
}

impl Told {
    pub(crate) fn fact(&mut self, key: &[u8], value: &[u8]) {
        self.put(FACT, key, value);
    }

    /// The fact of this key; where it ends with `*`, all whose keys begin with what is before.
    pub(crate) fn wish(&mut self, key: &[u8]) {
        self.put(WISH, key, &[]);
    }

    pub(crate) fn sum(&mut self, key: &[u8], number: u64) {
        self.put(SUM, key, &number.to_le_bytes());
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn put(&mut self, kind: u8, key: &[u8], value: &[u8]) {
        // Keys and values are ours, and far shorter than what is allowed.
        let (k, v) = ((key.len() as u16).to_le_bytes(), (value.len() as u32).to_le_bytes());
        self.bytes.extend([kind, 0, k[0], k[1], v[0], v[1], v[2], v[3]]);
        self.bytes.extend(key);
        self.bytes.extend(value);
    }
}

/// What the others have told.
#[derive(Clone, Copy)]
pub(crate) struct Heard<'a>(pub(crate) &'a [u8]);

impl<'a> Heard<'a> {
    /// Kind, key and value of each entry, as far as they are whole.
    fn entries(self) -> impl Iterator<Item = (u8, &'a [u8], &'a [u8])> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (head, after) = rest.split_first_chunk::<ENTRY>()?;
            let key = usize::from(u16::from_le_bytes([head[2], head[3]]));
            let value = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
            let (key, after) = after.split_at_checked(key)?;
            let (value, after) = after.split_at_checked(value)?;
            rest = after;
            Some((head[0], key, value))
        })
    }

    /// The facts whose keys begin so: the rest of the key, and the value.
    pub(crate) fn facts(self, begin: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let of = move |(kind, key, value): (u8, &'a [u8], _)| Some((key.strip_prefix(begin)?, value)).filter(|_| kind == FACT);
        self.entries().filter_map(of)
    }

    /// What all have told as this number, together.
    pub(crate) fn sum(self, key: &[u8]) -> Option<u64> {
        let found = self.entries().find(|(kind, k, _)| *kind == SUM && *k == key)?;
        Some(u64::from_le_bytes(found.2.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_can_be_heard() {
        let mut told = Told::default();
        told.fact(b"q one", b"1");
        told.fact(b"p two", b"2");
        told.wish(b"q*");
        told.sum(b"busy", 7);
        let heard = Heard(told.bytes());
        assert_eq!(heard.facts(b"q").collect::<Vec<_>>(), [(&b" one"[..], &b"1"[..])]);
        assert_eq!((heard.sum(b"busy"), heard.sum(b"q")), (Some(7), None));
        for end in 0..told.bytes().len() {
            assert!(Heard(&told.bytes()[..end]).entries().count() < 4);
        }
    }
}
