//! Contents of shared memory and files on their way into the store. The program stands still: they are kept in memory
//! meanwhile, as far as there is room.

use crate::memory::headroom;
use crate::state::draft::Draft;
use crate::CaptureError;
use belay_image::extents::Extent;
use belay_image::{ImageError, TableId};
use belay_plugins::{PageSink, Refusal};
use belay_storage::session::Session;
use belay_storage::StorageError;

/// Takes contents for a checkpoint.
#[derive(Debug)]
pub(crate) struct Contents<'a> {
    session: &'a mut Session,
    drafts: &'a [Draft],
    table: Vec<Extent>,
    begun: bool,
    /// Why something could not be stored.
    failure: Option<StorageError>,
}

impl<'a> Contents<'a> {
    pub(crate) fn new(session: &'a mut Session, drafts: &'a [Draft]) -> Self {
        Self {
            session,
            drafts,
            table: Vec::new(),
            begun: false,
            failure: None,
        }
    }

    /// Everything has been taken, or `captured` says what has not.
    pub(crate) fn finish<T>(self, captured: Result<T, Vec<Refusal>>) -> Result<T, CaptureError> {
        if let Some(failure) = self.failure {
            return Err(failure.into());
        }
        let captured = captured.map_err(CaptureError::Refused)?;
        if !self.table.is_empty() {
            self.session.set_table(TableId::Contents, self.table)?;
        }
        Ok(captured)
    }
}

impl PageSink for Contents<'_> {
    fn store(&mut self, at: u64, pages: &[u8]) -> Result<(), ImageError> {
        // Most jobs have nothing of the kind: what is free is looked at when it is needed.
        if !std::mem::replace(&mut self.begun, true) {
            self.session.hold_back(headroom::to_hold_back(self.drafts));
        }
        let stored = self.session.store_pages(at, pages, &mut self.table);
        stored.map_err(|e| {
            let reason = std::io::Error::other(e.to_string());
            self.failure = Some(e);
            ImageError::io("store contents", self.session.place(), reason)
        })
    }
}
