//! Names that the system takes as bytes: paths, names of threads, words of a command line.

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Any bytes, shown as text. Stored as a string where they are UTF-8, as all of them were in images of before, and else
/// as a list of numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(OsString);

impl Name {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// As the system's string.
    pub fn as_os_str(&self) -> &OsStr {
        &self.0
    }

    /// As a path.
    pub fn as_path(&self) -> &Path {
        Path::new(&self.0)
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        self.0 == *other
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<&[u8]> for Name {
    fn from(bytes: &[u8]) -> Self {
        Self(OsStr::from_bytes(bytes).to_owned())
    }
}

impl From<OsString> for Name {
    fn from(name: OsString) -> Self {
        Self(name)
    }
}

impl From<PathBuf> for Name {
    fn from(path: PathBuf) -> Self {
        Self(path.into())
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.0.to_str() {
            Some(text) => s.serialize_str(text),
            None => s.collect_seq(self.as_bytes()),
        }
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(Bytes)
    }
}

struct Bytes;

impl<'de> Visitor<'de> for Bytes {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, or a list of bytes")
    }

    fn visit_str<E>(self, text: &str) -> Result<Name, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Name, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = list.next_element()? {
            bytes.push(byte);
        }
        Ok(Name(OsString::from_vec(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_survives_json_and_text_is_text() {
        for raw in [
            &b""[..],
            b"/a\\x41\\",
            b"/latin1 \xe9\xff",
            "/\u{e9}\n\"".as_bytes(),
            &[0xff; 3],
        ] {
            let name = Name::from(raw);
            let json = serde_json::to_string(&name).unwrap();
            assert_eq!(serde_json::from_str::<Name>(&json).unwrap(), name);
            assert_eq!(json.starts_with('"'), std::str::from_utf8(raw).is_ok());
        }
        assert_eq!(serde_json::from_str::<Name>("\"/a\\\\x41\"").unwrap(), "/a\\x41");
        for bad in ["[256]", "[-1]", "[\"a\"]", "{}", "1", "null"] {
            assert!(serde_json::from_str::<Name>(bad).is_err(), "{bad}");
        }
    }
}
