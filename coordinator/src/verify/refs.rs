//! The byte strings that a JSON document refers to, found while it is read: it may be long, and is never in memory as a whole.

use belay_image::blobs::BlobRef;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::io::{self, Read};

/// More byte strings than any job refers to.
const MOST: usize = 4 << 20;
/// Longer than any string or number in such a document.
const LONGEST: usize = 1 << 20;

/// Adds the references in the document that `input` holds to those `found` in others of the same job.
pub(super) fn find(input: &mut dyn Read, found: &mut Vec<BlobRef>) -> Result<(), serde_json::Error> {
    let mut json = serde_json::Deserializer::from_reader(Tokens {
        input: io::BufReader::new(input),
        within: Within::Nothing,
        length: 0,
    });
    Walk(found).deserialize(&mut json)?;
    json.end()
}

/// Lets text through whose strings and numbers are not longer than [`LONGEST`]: the decoder would hold each of them.
struct Tokens<R> {
    input: R,
    within: Within,
    length: usize,
}

#[derive(Clone, Copy)]
enum Within {
    Nothing,
    String,
    Escape,
}

impl<R: Read> Read for Tokens<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(into)?;
        for byte in &into[..n] {
            let (within, begins) = match (self.within, byte) {
                (Within::Nothing, b'"') => (Within::String, true),
                (Within::Nothing, b',' | b':' | b'[' | b']' | b'{' | b'}') => (Within::Nothing, true),
                (Within::Nothing, _) => (Within::Nothing, false),
                (Within::String, b'"') => (Within::Nothing, true),
                (Within::String, b'\\') => (Within::Escape, false),
                (Within::String | Within::Escape, _) => (Within::String, false),
            };
            self.within = within;
            self.length = if begins { 0 } else { self.length + 1 };
            if self.length > LONGEST {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "a string or number longer than any of a job",
                ));
            }
        }
        Ok(n)
    }
}

/// Goes through a value; what it is, where that is a number.
struct Walk<'a>(&'a mut Vec<BlobRef>);

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = Option<u64>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Option<u64>, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_u64<E>(self, n: u64) -> Result<Option<u64>, E> {
        Ok(Some(n))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_str<E>(self, _: &str) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Option<u64>, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Option<u64>, A::Error> {
        while list.next_element_seed(Walk(self.0))?.is_some() {}
        Ok(None)
    }

    /// A reference is known by its fields, so that this works for every kind of descriptor.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<u64>, A::Error> {
        let (mut fields, mut count) = ([None; 3], 0usize);
        while let Some(field) = map.next_key_seed(Field)? {
            count += 1;
            let value = map.next_value_seed(Walk(self.0))?;
            if let Some(at) = field {
                fields[at] = value;
            }
        }
        if let ([Some(offset), Some(bytes), Some(xxh3)], 3) = (fields, count) {
            if self.0.len() == MOST {
                return Err(A::Error::custom("more byte strings than any job has"));
            }
            self.0.push(BlobRef { offset, bytes, xxh3 });
        }
        Ok(None)
    }
}

/// Which field of a reference a name is.
struct Field;

impl<'de> DeserializeSeed<'de> for Field {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Option<usize>, D::Error> {
        d.deserialize_str(self)
    }
}

impl Visitor<'_> for Field {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Option<usize>, E> {
        Ok(["offset", "bytes", "xxh3"].iter().position(|field| *field == name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<Vec<(u64, u64, u64)>> {
        let mut refs = Vec::new();
        find(&mut text.as_bytes(), &mut refs).ok()?;
        Some(refs.iter().map(|r| (r.offset, r.bytes, r.xxh3)).collect())
    }

    #[test]
    fn references_are_found_wherever_they_stand() {
        let text = r#"{"a":[{"data":{"offset":1,"bytes":2,"xxh3":3}},null,-1,2.5,"x\"{"],"b":{"bytes":5,"xxh3":18446744073709551615,"offset":4}}"#;
        assert_eq!(found(text), Some(vec![(1, 2, 3), (4, 5, u64::MAX)]));
        for other in [
            r#"{"offset":1,"bytes":2,"xxh3":3,"more":4}"#,
            r#"{"offset":1,"bytes":2}"#,
            r#"{"offset":1,"bytes":2,"xxh3":-3}"#,
            r#"{"offset":1,"bytes":2,"xxh3":"3"}"#,
        ] {
            assert_eq!(found(other), Some(Vec::new()), "{other}");
        }
        for bad in ["", "{", "[1,]", "{} {}", "\"\\"] {
            assert_eq!(found(bad), None, "{bad}");
        }
    }

    #[test]
    fn those_of_all_documents_are_counted_together() {
        let one = BlobRef {
            offset: 0,
            bytes: 0,
            xxh3: 0,
        };
        let mut found = vec![one; MOST - 1];
        let text = || &br#"[{"offset":1,"bytes":2,"xxh3":3}]"#[..];
        find(&mut text(), &mut found).unwrap();
        assert!(find(&mut text(), &mut found).is_err() && found.len() == MOST);
    }

    #[test]
    fn no_token_is_held_that_is_longer_than_any_of_a_job() {
        let long = "7,\\\"".repeat(LONGEST / 2);
        assert_eq!(found(&format!("[\"{long}\"]")), None);
        assert_eq!(found(&format!("[0.{}]", "7".repeat(4 * LONGEST))), None);
        let many = "[[7,\"x\\\"\",{}],1]".repeat(LONGEST / 8);
        assert_eq!(found(&format!("[{}]", many.replace("][", "],["))), Some(Vec::new()));
        let deep = "[".repeat(100_000);
        assert_eq!(found(&deep), None);
    }
}
