//! How a history is set up.

use crate::device::Device;
use crate::HistoryError;
use belay_history::plan::Rules;
use std::path::PathBuf;
use std::sync::Arc;

/// How long versions are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// All are written to files as soon as may be, and are there again when the history is opened the next time.
    Lasting,
    /// Until they are read; none outlives the history. Only what does not fit is written to files.
    UntilRead,
}

/// How room in memory is given away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Extents from anywhere.
    Paged,
    /// Neighbouring bytes, as published; for comparison.
    Contiguous,
}

/// Options of [`crate::History::open`].
#[derive(Clone)]
pub struct Options {
    /// An existing directory for the files.
    pub dir: PathBuf,
    /// The history's directory in it.
    pub name: String,
    /// A tier above the memory of the host.
    pub device: Option<Arc<dyn Device>>,
    /// Bytes of the host's memory for versions.
    pub host_bytes: u64,
    /// Bytes of an extent: a version takes a multiple of them.
    pub extent: u64,
    /// Who makes room, and when versions are flushed.
    pub rules: Rules,
    /// How room is given away.
    pub layout: Layout,
    /// How long versions are wanted.
    pub life: Life,
}

/// Bytes of an extent where nothing is said.
const EXTENT: u64 = 64 << 10;

impl Options {
    /// The usual ones.
    pub fn new(dir: impl Into<PathBuf>, name: impl Into<String>, host_bytes: u64) -> Self {
        Self {
            dir: dir.into(),
            name: name.into(),
            device: None,
            host_bytes,
            extent: EXTENT,
            rules: Rules::OURS,
            layout: Layout::Paged,
            life: Life::Lasting,
        }
    }

    pub(crate) fn check(&self) -> Result<(), HistoryError> {
        let name = &self.name;
        if name.is_empty() || name.len() > 200 || name.starts_with('.') || name.contains(['/', '\0']) {
            return Err(HistoryError::Invalid(
                "the name of a history has 1 to 200 bytes, no slash, and does not begin with a dot",
            ));
        }
        if self.extent == 0 || self.host_bytes < self.extent {
            return Err(HistoryError::Invalid("a history needs memory for one extent at least"));
        }
        let device = self.device.as_ref().map_or(0, |d| d.bytes());
        if self.host_bytes.max(device) / self.extent > u64::from(u32::MAX) || isize::try_from(self.host_bytes).is_err() {
            return Err(HistoryError::Invalid("so much memory needs larger extents"));
        }
        if self.rules.migrate {
            return Err(HistoryError::Invalid("pages that migrate are only simulated"));
        }
        Ok(())
    }
}
