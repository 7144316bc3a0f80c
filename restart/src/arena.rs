//! Lays out the tables of a plan for an address that is known beforehand. Pure.

use belay_abi::restore::Table;
use belay_kernel::plain::{bytes_of, Plain};

/// Bytes that will lie at `base`.
#[derive(Debug)]
pub(crate) struct Arena {
    base: u64,
    bytes: Vec<u8>,
}

impl Arena {
    /// An empty arena for address `base`, which is page aligned.
    pub(crate) fn new(base: u64) -> Self {
        Self { base, bytes: Vec::new() }
    }

    /// Puts bytes at the next multiple of 16; returns their address.
    pub(crate) fn bytes(&mut self, data: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let at = self.base + self.bytes.len() as u64;
        self.bytes.extend_from_slice(data);
        at
    }

    /// Puts a string with a terminating zero.
    pub(crate) fn string(&mut self, s: &[u8]) -> u64 {
        let mut data = s.to_vec();
        data.push(0);
        self.bytes(&data)
    }

    /// Puts 64-bit words.
    pub(crate) fn words(&mut self, words: &[u64]) -> u64 {
        self.table(words).addr
    }

    /// Reserves zeroed bytes.
    pub(crate) fn zeroed(&mut self, bytes: usize) -> u64 {
        self.bytes(&vec![0; bytes])
    }

    /// Puts an array.
    pub(crate) fn table<T: Plain>(&mut self, entries: &[T]) -> Table {
        Table {
            addr: self.bytes(bytes_of(entries)),
            len: entries.len() as u64,
        }
    }

    /// Overwrites the value at `addr`, which this arena handed out for a value of this type.
    pub(crate) fn set<T: Plain>(&mut self, addr: u64, value: &T) {
        let at = (addr - self.base) as usize;
        let data = bytes_of(std::slice::from_ref(value));
        self.bytes[at..at + data.len()].copy_from_slice(data);
    }

    /// The bytes so far.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}
