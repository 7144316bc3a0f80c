//! Programs that the driver cannot put back on their GPU.

use crate::{launched, LIMIT};
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{text, Job};
use belay_tests::place::{Place, User};
use belay_tests::Failure;
use std::path::PathBuf;

/// The file that says that the device is full: other programs have its memory.
fn full(job: &Job) -> PathBuf {
    job.work.join("full")
}

/// The device has no memory left when a checkpoint puts the program back: the checkpoint is whole and says so; the program is
/// lost, and no later checkpoint is called whole. All that were taken restart.
pub(crate) fn no_room(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", ""))?;
    job.checkpoint()?;
    job.progress(LIMIT)?;
    io("fill the device", std::fs::write(full(&job), ""))?;
    let o = job.checkpoint_raw(&[])?;
    let said = text(&o);
    let words = ["note: ", "out of memory", "belay restart"];
    want(o.status.success() && words.iter().all(|w| said.contains(w)), || said.clone())?;
    io("empty the device", std::fs::remove_file(full(&job)))?;
    for _ in 0..2 {
        refused(
            &job.checkpoint_raw(&["--quiet"])?,
            &["gpu driver", "out of memory", "belay restart"],
        )?;
    }
    for generation in ["1", "2"] {
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&["--generation", generation])?;
        job.progress(LIMIT).map_err(|e| format!("generation {generation}: {e}"))?;
    }
    job.checkpoint()?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// The driver gives a program up: that is said at once, with what to do.
pub(crate) fn given_up(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", "fail"))?;
    let words = [
        "gpu driver",
        "take its state off the gpu",
        "unknown error",
        "state failed",
        "belay restart",
    ];
    refused(&job.checkpoint_raw(&["--quiet"])?, &words)?;
    refused(
        &job.checkpoint_raw(&["--quiet"])?,
        &["gpu driver", "state failed", "belay restart"],
    )?;
    job.kill_all()
}
