//! Where a host keeps what it has of its group.

use crate::generations;
use std::path::{Path, PathBuf};

/// Directory of the parity blocks beside `gen` and `chunks`.
pub(crate) const PARITY: &str = "parity";

/// The file with what `dir` holds of the group of generation `number`.
pub(crate) fn parity_file(dir: &Path, number: u64) -> PathBuf {
    dir.join(PARITY).join(format!("{}.bpar", generations::name(number)))
}
