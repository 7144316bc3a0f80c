//! Performance counters (`perf_event_open`): the kernel does not tell what they were set to count, so they are refused.

use crate::fault::{refuse, Fault};
use crate::kind::{nothing, Candidate, Kind, Look, Never, NoPart};
use crate::session::Session;

/// The kind.
pub(crate) struct Perf;

impl Kind for Perf {
    const NAME: &'static str = "Perf";
    const VERSION: u32 = 1;
    type State = Never;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Anonymous(name) if *name == "perf_event")
    }

    fn capture(_: &mut Session<'_>, _: &Candidate<'_>) -> Result<Never, Fault> {
        refuse(
            "a performance counter (perf_event_open) cannot be saved, as the kernel does not tell what it counts; \
             run the program without its profiler (perf, PAPI, LIKWID, Score-P), or close the counter before the checkpoint",
        )
    }

    nothing!(survey, finish, contents, check, check_part, numbers, ways, prepare, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}
