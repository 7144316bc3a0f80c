//! The program that is injected, loaded once: an agent runs for as long as its job, and belay may be replaced by
//! another version meanwhile. Its tables are laid out as this version of the agent knows them.

use crate::CaptureError;
use belay_abi::inject::FINGERPRINT;
use belay_kernel::blob::{self, Blob};
use std::sync::OnceLock;

static PROGRAM: OnceLock<Blob> = OnceLock::new();

/// Loads it, so that what is installed later does not matter.
pub fn load() -> Result<(), CaptureError> {
    program().map(drop)
}

pub(crate) fn program() -> Result<&'static Blob, CaptureError> {
    if let Some(program) = PROGRAM.get() {
        return Ok(program);
    }
    let path = blob::find("belay-inject").map_err(|e| CaptureError::system("find belay-inject", e))?;
    let program = Blob::load(&path).map_err(|e| CaptureError::system("load belay-inject", e))?;
    if program.mark() != Some(FINGERPRINT) {
        let reason = format!(
            "{} is of another version than belay; install belay completely",
            path.display()
        );
        return Err(CaptureError::failed("load belay-inject", reason));
    }
    Ok(PROGRAM.get_or_init(|| program))
}
