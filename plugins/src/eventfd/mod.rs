//! eventfd: a counter and a mode.

use crate::builder::Builder;
use crate::fault::{At, Fault};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::Description;
use crate::session::Session;
use crate::sys::fd;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsRawFd, OwnedFd};

/// An eventfd.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct EventfdState {
    count: u64,
    semaphore: bool,
}

/// The kind.
pub(crate) struct Eventfd;

impl Kind for Eventfd {
    const NAME: &'static str = "Eventfd";
    const VERSION: u32 = 1;
    type State = EventfdState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Anonymous(name) if *name == "eventfd")
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<EventfdState, Fault> {
        let info = &s.found[seen.id].info;
        Ok(EventfdState {
            count: info.number("eventfd-count:", 16).at("read fdinfo")?,
            // Kernels before 6.5 do not tell; there semaphores are restored as plain counters.
            semaphore: info.number("eventfd-semaphore:", 10).is_ok_and(|v| v == 1),
        })
    }

    fn rebuild(_: &mut Builder<'_>, d: &Description, state: &EventfdState) -> Result<Option<OwnedFd>, Fault> {
        let mode = if state.semaphore { libc::EFD_SEMAPHORE } else { 0 };
        let fd = fd::eventfd(0, mode | (d.flags & libc::O_NONBLOCK)).at("eventfd")?;
        if state.count != 0 {
            fd::write(fd.as_raw_fd(), &state.count.to_ne_bytes()).at("set the counter")?;
        }
        Ok(Some(fd))
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}
