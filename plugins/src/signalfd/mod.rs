//! signalfd: a set of signals. Pending signals belong to the processes, not to the descriptor.

use crate::builder::Builder;
use crate::fault::{At, Fault};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::Description;
use crate::session::Session;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;

/// A signalfd.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct SignalfdState {
    mask: u64,
}

/// The kind.
pub(crate) struct Signalfd;

impl Kind for Signalfd {
    const NAME: &'static str = "Signalfd";
    const VERSION: u32 = 1;
    type State = SignalfdState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Anonymous(name) if *name == "signalfd")
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<SignalfdState, Fault> {
        Ok(SignalfdState {
            mask: s.found[seen.id].info.number("sigmask:", 16).at("read fdinfo")?,
        })
    }

    fn rebuild(_: &mut Builder<'_>, d: &Description, state: &SignalfdState) -> Result<Option<OwnedFd>, Fault> {
        make(d, state).map(Some)
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

fn make(d: &Description, state: &SignalfdState) -> Result<OwnedFd, Fault> {
    let flags = libc::SFD_CLOEXEC | (d.flags & libc::O_NONBLOCK);
    belay_kernel::masks::signalfd(state.mask, flags).at("signalfd")
}
