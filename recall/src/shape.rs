//! The parts of a version.

use crate::HistoryError;

/// Most parts of a version.
pub(crate) const PARTS: usize = 1 << 20;

/// Numbers and sizes of the parts that a version was put with, in the order of the numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shape {
    parts: Vec<(u32, u64)>,
    bytes: u64,
}

impl Shape {
    /// From parts in any order.
    pub fn new(parts: impl IntoIterator<Item = (u32, u64)>) -> Result<Self, HistoryError> {
        let mut parts: Vec<(u32, u64)> = parts.into_iter().collect();
        parts.sort_unstable();
        if parts.windows(2).any(|w| w[0].0 == w[1].0) {
            return Err(HistoryError::Invalid("two parts have one number"));
        }
        let sum = parts.iter().try_fold(0u64, |sum, (_, size)| sum.checked_add(*size));
        match sum {
            Some(bytes) if parts.len() <= PARTS && bytes <= i64::MAX as u64 / 2 => Ok(Self { parts, bytes }),
            _ => Err(HistoryError::Invalid("a version has too many parts, or is too large")),
        }
    }

    /// The parts: number and size.
    pub fn parts(&self) -> &[(u32, u64)] {
        &self.parts
    }

    /// Bytes of a part.
    pub fn part(&self, id: u32) -> Option<u64> {
        let at = self.parts.binary_search_by_key(&id, |p| p.0).ok()?;
        Some(self.parts[at].1)
    }

    /// Bytes of all.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
