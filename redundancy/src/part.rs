//! What a stream consists of.

use serde::{Deserialize, Serialize};

/// In which directory a file belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// The generation's.
    Generation,
    /// That of the chunks.
    Chunks,
}

/// A file of a member's stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its directory.
    pub place: Place,
    /// Its name there.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Where it lies in the stream.
    #[serde(default)]
    pub at: u64,
}
