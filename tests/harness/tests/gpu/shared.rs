//! Processes that the driver cannot lock beside each other: a call of it does not return.

use crate::asker::asks;
use crate::{launched, LIMIT, PROGRAM};
use belay_still::Watch;
use belay_tests::expect::{refused, want};
use belay_tests::job::{output, Job};
use belay_tests::place::{Place, User};
use belay_tests::{edges, procs, Failure};
use std::time::Duration;

/// So long at most nobody goes on.
const SOON: Duration = Duration::from_secs(30);

fn of_several(place: &Place, user: User) -> Result<Job, Failure> {
    launched(place, user, ("kids", "shared"))
}

/// The checkpoint is refused, and all go on.
pub(crate) fn refuses(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = of_several(place, user)?;
    for _ in 0..2 {
        let begin = Watch::begin();
        refused(&job.checkpoint_raw(&["--quiet"])?, &["gpu driver", "does not answer", "r610"])?;
        job.progress(SOON)?;
        let took = begin.elapsed();
        want(took < SOON, || format!("{took:?}"))?;
    }
    job.verdict(false, LIMIT)
}

/// The agent is killed while nothing answers: all go on.
pub(crate) fn without_agent(place: &Place, user: User) -> Result<(), Failure> {
    let job = of_several(place, user)?;
    let (program, agent) = edges::program_and_agent(&job, PROGRAM)?;
    let dir = job.dir().display().to_string();
    let command = job.belay(&["checkpoint", "--quiet", &dir]);
    let taking = std::thread::spawn(move || output(command, LIMIT));
    while !taking.is_finished() && !procs::tree(agent).into_iter().any(asks) {
        std::thread::sleep(Duration::from_millis(2));
    }
    // It begins to lock them.
    std::thread::sleep(Duration::from_secs(1));
    want(!taking.is_finished(), || "the checkpoint is over".into())?;
    procs::signal(agent, libc::SIGKILL);
    let o = taking.join().map_err(|_| "the command's thread has ended")??;
    want(!o.status.success(), || "the checkpoint is called whole".into())?;
    edges::passes_alone(&job, program, PROGRAM)
}
