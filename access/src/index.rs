//! The part of an export's index that is about global arrays. Who reads one does not trust it.

use crate::block::MAX_DIMS;
use crate::global;
use belay_abi::access::MOST_PAYLOAD;
use serde::{Deserialize, Serialize};

/// The name of the index in an export.
pub const INDEX: &str = "datasets.json";
/// The variable that says from which export a program starts.
pub const FROM: &str = "BELAY_FROM";

/// What programs start from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Portable {
    /// Where all processes were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<Point>,
    /// The global arrays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub global: Vec<Global>,
}

/// A point of the program's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// How often the program had come there.
    pub number: u64,
    /// What it kept with that, two digits to the base 16 a byte.
    pub payload: String,
}

/// A global array, and the file with its elements in their order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Global {
    /// The file.
    pub file: String,
    /// The array's name.
    pub name: String,
    /// Bytes of an element.
    pub elem: u64,
    /// Elements in each dimension: the first one changes fastest.
    pub extent: Vec<u64>,
}

impl Point {
    /// The point of this number with these bytes.
    pub fn new(number: u64, payload: &[u8]) -> Self {
        let payload = payload.iter().map(|byte| format!("{byte:02x}")).collect();
        Self { number, payload }
    }

    /// The bytes; none where that is no payload.
    pub fn bytes(&self) -> Option<Vec<u8>> {
        let digits = self.payload.as_bytes();
        if !digits.len().is_multiple_of(2) || digits.len() > 2 * MOST_PAYLOAD {
            return None;
        }
        let digit = |d: u8| char::from(d).to_digit(16);
        let byte = |two: &[u8]| u8::try_from(digit(two[0])? << 4 | digit(two[1])?).ok();
        digits.chunks_exact(2).map(byte).collect()
    }
}

impl Global {
    /// Elements in each dimension, and bytes of all; none where that cannot be, or where the file may lie elsewhere.
    pub fn checked(&self) -> Option<([u64; MAX_DIMS], u64)> {
        let is_name = !self.file.contains(['/', '\0']) && !["", ".", ".."].contains(&self.file.as_str());
        let sides = global::sides(&self.extent, 1).filter(|_| is_name)?;
        Some((sides, global::bytes(self.elem, &sides)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_comes_back_and_nothing_else_does() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(Point::new(7, &all).bytes(), Some(all));
        assert_eq!(Point::new(7, &[]).bytes(), Some(Vec::new()));
        let long = "00".repeat(MOST_PAYLOAD + 1);
        for payload in ["0", "0g", "+1", "é", &long] {
            let point = Point {
                number: 1,
                payload: payload.into(),
            };
            assert_eq!(point.bytes(), None, "{payload}");
        }
    }

    #[test]
    fn only_arrays_that_can_be_are_read() {
        let of = |file: &str, elem, extent: &[u64]| {
            let (name, extent) = ("a".into(), extent.to_vec());
            let file = file.into();
            let array = Global {
                file,
                name,
                elem,
                extent,
            };
            array.checked().map(|(_, bytes)| bytes)
        };
        assert_eq!(of("a.raw", 8, &[3, 2]), Some(48));
        for (file, elem, extent) in [
            ("../a", 8, &[3][..]),
            ("/a", 8, &[3]),
            ("..", 8, &[3]),
            ("", 8, &[3]),
            ("a", 0, &[3]),
            ("a", 8, &[]),
            ("a", 8, &[0]),
            ("a", 8, &[1; 6]),
            ("a", 8, &[1 << 32, 1 << 32]),
        ] {
            assert_eq!(of(file, elem, extent), None, "{file} {elem} {extent:?}");
        }
    }
}
