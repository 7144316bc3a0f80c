//! Why the job directory of one job is not used for another.

use belay_coordinator::jobdir::{Description, JobDir};
use belay_coordinator::{counted, Failure};
use belay_wire::Exit;

/// Refuses to launch a job where `dir` holds so many checkpoints of an earlier one.
pub(super) fn refuse_earlier(dir: &JobDir, held: usize) -> Result<(), Failure> {
    if held == 0 {
        return Ok(());
    }
    let (at, held) = (dir.shown(), checkpoints(held));
    refuse(format!(
        "{at} holds {held} of an earlier job; continue it with belay restart {at}, remove them with belay gc --all {at}, or use another directory"
    ))
}

/// Refuses to run the command of `new` where `dir`, which holds so many checkpoints, is that of another
/// command, of `old`; not where that has left nothing that could be missed.
pub(super) fn refuse_other(dir: &JobDir, (old, new): (&Description, &Description), held: usize) -> Result<(), Failure> {
    if old.command == new.command {
        return Ok(());
    }
    let at = dir.shown();
    let words: Vec<String> = old.command.iter().map(ToString::to_string).collect();
    let words = words.join(" ");
    match (held, old.wait_status) {
        (_, Some(0)) => refuse(format!(
            "{at} is the directory of another command ({words}), which has ended with exit status 0; give each command one of its own with --ckpt-dir, or remove that job with belay gc --all {at}"
        )),
        (0, _) => Ok(()),
        (held, _) => refuse(format!(
            "{at} holds {} of another command ({words}); continue that with belay restart {at}, or use another directory",
            checkpoints(held)
        )),
    }
}

fn refuse(why: String) -> Result<(), Failure> {
    Err(Failure::new(Exit::HoldsCheckpoints, why))
}

fn checkpoints(held: usize) -> String {
    counted(u32::try_from(held).unwrap_or(u32::MAX), "checkpoint", "s")
}
