//! What tests of this crate need inside and outside of it.

use crate::content::{PageSink, PageSource};
use belay_image::extents::{Extent, PAGE};
use belay_image::ImageError;
use belay_kernel::direct::Buffer;
use std::collections::BTreeMap;
use std::ops::Range;

/// Contents of shared memory and files, page by page, in memory.
#[derive(Debug, Default)]
pub struct Kept(BTreeMap<u64, Vec<u8>>);

impl PageSink for Kept {
    fn store(&mut self, at: u64, pages: &[u8]) -> Result<(), ImageError> {
        let page = PAGE as usize;
        for (page, at) in pages.chunks(page).zip((at..).step_by(page)) {
            assert!(self.0.insert(at, page.to_vec()).is_none(), "page {at:#x} was stored twice");
        }
        Ok(())
    }
}

impl PageSource for Kept {
    fn within(&self, range: Range<u64>) -> Vec<Extent> {
        let one = |at: &u64| Extent {
            vaddr: *at,
            bytes: PAGE,
            chunk: 0,
            page: 0,
        };
        self.0.range(range).map(|(at, _)| one(at)).collect()
    }

    fn read(&self, part: &Extent, into: &mut Buffer) -> Result<(), ImageError> {
        into.clear();
        into.extend_from_slice(&self.0[&part.vaddr]);
        Ok(())
    }
}
