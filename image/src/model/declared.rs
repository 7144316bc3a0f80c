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
