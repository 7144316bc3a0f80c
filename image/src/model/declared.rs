//! What a program has declared of its arrays, and what was not stored because of that.

use crate::name::Name;
use serde::{Deserialize, Serialize};

/// An array that a program has declared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dataset {
    /// Its name.
    pub name: Name,
    /// Where its first element is.
    pub address: u64,
    /// Bytes of an element.
    pub elem: u64,
    /// Elements in each dimension, the first of which changes fastest.
    pub extent: Vec<u64>,
    /// Bytes from one element to the next in each.
    pub stride: Vec<u64>,
    /// Which part of a global array it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Share>,
}

/// A part of a global array, which processes have together: a number for each dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Elements of the global array.
    pub global: Vec<u64>,
    /// Where in it the first element of the part lies: below 0 where that is a ghost beyond its rim.
    pub lower: Vec<i64>,
    /// The first element of the part that is the process's own: the others are ghosts,
    pub lo: Vec<u64>,
    /// and one behind the last.
    pub hi: Vec<u64>,
}

/// A point of the program's own at which a process waited: it changed none of its arrays then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// How often it had come there.
    pub number: u64,
    /// What it keeps with it.
    pub payload: Vec<u8>,
}

/// Memory that was not stored, because the program overwrote it after the checkpoint before it read it
/// (`belay_abi::access`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Where the page is on which the program has declared so.
    pub page: u64,
    /// Whole pages, which have no access rights after a restart until they are overwritten: first address, first
    /// behind, and the `PROT_*` bits that they had. In ascending order.
    pub dead: Vec<(u64, u64, u32)>,
    /// When the program's records have come so far, it has overwritten all of it.
    pub whole_at: u64,
    /// The records up to there, without time stamps: a program that records others takes another way.
    #[serde(default)]
    pub way: Vec<u64>,
    /// Length of the stream of packed pages ([`crate::packed`]), bytes.
    pub packed_bytes: u64,
}
