//! Storing pages from outside the process, for what a snapshot child cannot write itself: ranges it did not inherit (MADV_DONTFORK), mappings of deleted
//! files, and whole processes where no child can be made.

use crate::CaptureError;
use belay_abi::inject::EXTENT_LIMIT;
use belay_image::extents::Extent;
use belay_image::sections::create_private;
use belay_image::{checksum, ImageError};
use belay_kernel::vm::Memory;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const PAGE: usize = 4096;

/// A page file that the agent writes.
#[derive(Debug)]
pub(crate) struct PageFile {
    path: PathBuf,
    file: File,
    number: u32,
    offset: u64,
    pub(crate) extents: Vec<Extent>,
}

impl PageFile {
    /// Creates page file `number` at `path`.
    pub(crate) fn create(path: &Path, number: u32) -> Result<Self, CaptureError> {
        Ok(Self {
            path: path.to_owned(),
            file: create_private(path)?,
            number,
            offset: 0,
            extents: Vec::new(),
        })
    }

    /// Stores those pages of `start..end` of process `pid` that can be read and are not all zero.
    pub(crate) fn store(&mut self, memory: &Memory, start: u64, end: u64) -> Result<(), CaptureError> {
        let mut buf = vec![0u8; EXTENT_LIMIT as usize];
        let mut at = start;
        while at < end {
            let want = usize::try_from((end - at).min(EXTENT_LIMIT)).unwrap_or(PAGE);
            let readable = readable_prefix(memory, at, &mut buf[..want]);
            let mut page = 0;
            while page < readable {
                let run = run_of(&buf[..readable], page);
                if run.0 {
                    self.append(at + page as u64, &buf[page..run.1])?;
                }
                page = run.1;
            }
            // A page that cannot be read lies behind the end of its file: it holds nothing.
            at += if readable == want {
                want as u64
            } else {
                (readable + PAGE) as u64
            };
        }
        Ok(())
    }

    fn append(&mut self, vaddr: u64, data: &[u8]) -> Result<(), CaptureError> {
        self.file
            .write_all_at(data, self.offset)
            .map_err(|e| ImageError::io("write", &self.path, e))?;
        self.extents.push(Extent {
            vaddr,
            bytes: data.len() as u64,
            offset: self.offset,
            file: self.number,
            reserved: 0,
            xxh3: checksum(data),
        });
        self.offset += data.len() as u64;
        Ok(())
    }
}

/// Reads as many whole pages at `at` as can be read.
fn readable_prefix(memory: &Memory, at: u64, buf: &mut [u8]) -> usize {
    if memory.read(at, buf).is_ok() {
        return buf.len();
    }
    let mut done = 0;
    for page in buf.chunks_mut(PAGE) {
        if memory.read(at + done as u64, page).is_err() {
            break;
        }
        done += PAGE;
    }
    done
}

/// The run of pages at `from` that are alike in holding data or not: (data, end).
fn run_of(buf: &[u8], from: usize) -> (bool, usize) {
    let data = |at: usize| buf[at..at + PAGE].iter().any(|b| *b != 0);
    let kind = data(from);
    let mut end = from + PAGE;
    while end < buf.len() && data(end) == kind {
        end += PAGE;
    }
    (kind, end)
}
