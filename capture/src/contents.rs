//! Contents of shared memory and files on their way into the store. The program stands still: they are kept in memory meanwhile, as far as there is room.

use crate::headroom;
use crate::process::Draft;
use belay_image::extents::Extent;
use belay_image::{ImageError, CONTENTS};
use belay_plugins::PageSink;
use belay_storage::session::Session;
use belay_storage::StorageError;

/// Takes contents for a checkpoint.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    session: &'a mut Session,
    drafts: &'a [Draft],
    table: Vec<Extent>,
    begun: bool,
}

impl<'a> Contents<'a> {
    pub(crate) fn new(session: &'a mut Session, drafts: &'a [Draft]) -> Self {
        Self {
            session,
            drafts,
            table: Vec::new(),
            begun: false,
        }
    }

    /// Everything has been taken.
    pub(crate) fn finish(self) -> Result<(), StorageError> {
        if self.table.is_empty() {
            return Ok(());
        }
        self.session.set_table(CONTENTS, self.table)
    }
}

impl PageSink for Contents<'_> {
    fn store(&mut self, at: u64, pages: &[u8]) -> Result<(), ImageError> {
        // Most jobs have nothing of the kind: what is free is looked at when it is needed.
        if !std::mem::replace(&mut self.begun, true) {
            self.session.hold_back(headroom::to_hold_back(self.drafts));
        }
        let stored = self.session.store_pages(at, pages, &mut self.table);
        stored.map_err(|e| match e {
            StorageError::Image(e) => e,
            other => ImageError::io("store contents", self.session.place(), std::io::Error::other(other)),
        })
    }
}
