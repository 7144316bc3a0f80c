//! Reads every block of parity that lies on this host and compares it with its checksum.

use super::parity::{parity_file, PARITY};
use super::{content, record};
use crate::jobdir::JobDir;
use crate::Failure;
use belay_redundancy::checksum;
use belay_redundancy::layout::{block_range, blocks};
use belay_wire::Exit;
use std::path::Path;

/// Compares the parity of generation `number` in `dir`; bytes read.
pub(crate) fn parity(dir: &Path, number: u64) -> Result<u64, Failure> {
    let index = content::read_index(dir, number)?;
    for slot in 0..index.layout.parity {
        for block in 0..blocks(index.segment) {
            let (at, bytes) = block_range(index.segment, block);
            let at = slot as u64 * index.segment + at;
            let path = parity_file(dir, number);
            let data = content::read_parity(dir, number, at, bytes);
            let data = data.map_err(|e| Failure::io(format!("read {}", path.display()), &e))?;
            if index.parity_sum(slot, block) != Some(checksum(&data)) {
                let why = format!("{}: damaged: checksum of the block at {at} does not match", path.display());
                return Err(Failure::new(Exit::Damaged, why));
            }
        }
    }
    Ok(index.parity_bytes())
}

/// The number of a generation, and bytes or the fault of what is looked at.
pub type Verified = (u64, Result<u64, Failure>);

/// Whether what the job's own part has of redundant generations lies on another host.
pub fn is_elsewhere(dir: &JobDir) -> bool {
    let parity = dir.path().join(PARITY);
    parity.is_symlink() && !parity.exists()
}

/// The parity of every redundant generation that this host holds a share of for the job's own part.
pub fn all(dir: &JobDir) -> Result<Vec<Verified>, Failure> {
    if is_elsewhere(dir) {
        return Ok(Vec::new());
    }
    let numbers = record::numbers(dir.path())?;
    Ok(numbers.into_iter().map(|n| (n, parity(dir.path(), n))).collect())
}
