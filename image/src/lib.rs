//! The image format: what a checkpointed job consists of, and how it lies on disk.
//!
//! A *generation* is a directory that holds one complete checkpoint:
//!
//! ```text
//! gen/000007/
//!   manifest.json       every other file with its length and XXH3-64, and the chunks; written last (see `manifest`)
//!   job.bimg            sections: JOB (processes, threads, mappings), DESCRIPTORS (open descriptions, shared objects)
//!   blobs.bin           byte strings referenced from job.bimg: data in flight, the vDSO
//!   pages-PID.bidx      section EXTENTS: in which chunk each stored page range of process PID lies
//!   pages-0.bidx        the same for contents of shared memory and files, one behind the other; where they begin stands in DESCRIPTORS
//!   pages-code.bidx     the same for programs, libraries and other files that processes map; where they begin stands in JOB
//! ```
//! Memory itself lies in the chunks of the store beside the generations (crate `belay-storage`), which generations share.
//!
//! Everything read back is untrusted: lengths are checked before allocation, checksums before use.

pub mod attributes;
pub mod blobs;
pub mod extents;
pub mod files;
pub mod identity;
pub mod manifest;
pub mod model;
pub mod name;
pub mod packed;
mod processor;
pub mod sections;

/// Version of the image format. A change of any section's meaning increments it.
pub const FORMAT_VERSION: u32 = 3;

/// Name of the section file that describes the job.
pub const JOB_FILE: &str = "job.bimg";
/// Name of the file that holds byte strings referenced from the sections.
pub const BLOB_FILE: &str = "blobs.bin";

/// Whose bytes a table of extents leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TableId {
    /// Files that processes map, see [`model::MappedFile`].
    Code,
    /// Contents of shared memory and files.
    Contents,
    /// The memory of the process with this number.
    Process(i32),
}

impl TableId {
    /// Name of the file that holds the table.
    pub fn file_name(self) -> String {
        match self {
            TableId::Code => "pages-code.bidx".into(),
            TableId::Contents => "pages-0.bidx".into(),
            TableId::Process(pid) => format!("pages-{pid}.bidx"),
        }
    }
}

impl std::fmt::Display for TableId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TableId::Code => f.write_str("files that processes map"),
            TableId::Contents => f.write_str("contents of shared memory and files"),
            TableId::Process(pid) => write!(f, "memory of process {pid}"),
        }
    }
}

/// XXH3-64 of `data`, the checksum of this format.
pub fn checksum(data: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(data)
}

/// What can go wrong when an image is read or written.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A system call on the image file failed.
    #[error("{step} {path}: {source}")]
    Io {
        /// What was being done.
        step: &'static str,
        /// The file.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file's contents contradict the format.
    #[error("{path}: damaged image: {reason}")]
    Damaged {
        /// The file.
        path: String,
        /// What does not fit.
        reason: String,
    },
    /// Not on this host, and perhaps whole on another one.
    #[error("{path}: not here; it may lie in local tier {places}")]
    Elsewhere {
        /// The file.
        path: String,
        /// The tiers, with their hosts.
        places: String,
    },
    /// The file was written by another version of the format.
    #[error("{path}: image format {found}, this belay reads format {expected}")]
    Version {
        /// The file.
        path: String,
        /// Version found.
        found: u32,
        /// Version this program reads.
        expected: u32,
    },
    /// The file was written on another processor architecture.
    #[error("{path}: image of architecture {found}, this machine is {expected}")]
    Architecture {
        /// The file.
        path: String,
        /// Architecture found.
        found: String,
        /// Architecture of this machine.
        expected: String,
    },
}

impl ImageError {
    /// An I/O error at `step` on `path`.
    pub fn io(step: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        ImageError::Io {
            step,
            path: path.display().to_string(),
            source,
        }
    }

    /// A format violation in `path`.
    pub fn damaged(path: &std::path::Path, reason: impl Into<String>) -> Self {
        ImageError::Damaged {
            path: path.display().to_string(),
            reason: reason.into(),
        }
    }

    /// Whether what was stored is lost here: it is damaged, or not there, or lies on a sector that cannot be read, which
    /// is as lost as one with wrong bytes. Another copy is looked for then.
    pub fn is_damage(&self) -> bool {
        match self {
            ImageError::Io { step, source, .. } => {
                let is_gone = *step == "open" && source.kind() == std::io::ErrorKind::NotFound;
                is_gone || *step == "read" && is_bad_sector(source)
            }
            ImageError::Damaged { .. } | ImageError::Elsewhere { .. } => true,
            ImageError::Version { .. } | ImageError::Architecture { .. } => false,
        }
    }
}

/// Whether the device could not read what lies there.
pub fn is_bad_sector(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::TableId;

    #[test]
    fn tables_keep_their_file_names() {
        let names = [TableId::Code, TableId::Contents, TableId::Process(17)].map(TableId::file_name);
        assert_eq!(names, ["pages-code.bidx", "pages-0.bidx", "pages-17.bidx"]);
    }
}
