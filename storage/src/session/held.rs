//! Pages that are kept in memory while the program stands still: they have their places in chunks, and are written
//! there when it goes on.

use super::Session;
use crate::{StorageError, PAGE};
use belay_image::ImageError;
use belay_kernel::direct::{self, Buffer};

/// Most pages that lie together: the length of a write.
const RUN_PAGES: usize = 4096;

/// Pages held back.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// How many more may be.
    room: u64,
    runs: Vec<Run>,
}

/// Pages that follow each other in a chunk.
#[derive(Debug)]
struct Run {
    chunk: u32,
    page: u32,
    data: Buffer,
}

impl Held {
    /// Keeps page number `page` of chunk `chunk`, where there is room for it. The chunk has place for `left` pages from there on.
    pub(super) fn take(&mut self, (chunk, page, left): (u32, u32, u32), data: &[u8]) -> bool {
        if self.room == 0 {
            return false;
        }
        let goes_on = |r: &&mut Run| {
            let pages = r.data.len() / PAGE as usize;
            r.chunk == chunk && r.page as usize + pages == page as usize && pages < RUN_PAGES
        };
        match self.runs.last_mut().filter(goes_on) {
            Some(run) => run.data.extend_from_slice(data),
            None => {
                // All of it, so that it never moves; only what is written takes memory.
                let pages = usize::try_from(self.room)
                    .unwrap_or(RUN_PAGES)
                    .min(RUN_PAGES)
                    .min(left as usize);
                let mut run = Buffer::default();
                if run.try_reserve(pages * PAGE as usize).is_err() {
                    return false;
                }
                run.extend_from_slice(data);
                self.runs.push(Run { chunk, page, data: run });
            }
        }
        self.room -= 1;
        true
    }
}

impl Session {
    /// Up to `bytes` of what [`Session::store_pages`] is given from now on stay in memory until
    /// [`Session::write_held`]: the program stands still, and must not wait for a disk.
    pub fn hold_back(&mut self, bytes: u64) {
        self.held.room = bytes / PAGE;
    }

    /// Writes what has been held back. From now on pages are written at once.
    pub fn write_held(&mut self) -> Result<(), StorageError> {
        for run in std::mem::take(&mut self.held).runs {
            let Some(c) = self.chunks.iter().find(|c| c.id == run.chunk) else {
                continue;
            };
            let at = u64::from(run.page) * PAGE;
            let Some(file) = c.file() else { return Err(self.no_room()) };
            direct::write_all_at(file, &run.data, at)
                .map_err(|e| ImageError::io("write", &self.store.name_in(c.place(), c.id, false), e))?;
            if self.frugal {
                super::drop_from_cache(file, at, run.data.len() as u64);
            }
        }
        Ok(())
    }
}
