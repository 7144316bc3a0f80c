//! Programs that the driver cannot put back on their GPU.

use crate::{launched, prepared, LIMIT, PROGRAM};
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{text, Job};
use belay_tests::place::{Place, User};
use belay_tests::{edges, Failure};
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

/// The same job under `belay run`, with these options.
fn run(place: &Place, user: User, (faults, more): (&str, &[&str])) -> Result<Job, Failure> {
    let (mut job, [options, argv]) = prepared(place, user, ("", faults))?;
    let dir = job.dir().display().to_string();
    let words: Vec<&str> = ["run", "--ckpt-dir", &dir]
        .into_iter()
        .chain(more.iter().copied())
        .chain(options.iter().map(String::as_str))
        .chain(["--"])
        .chain(argv.iter().map(String::as_str))
        .collect();
    job.start(job.belay(&words))?;
    job.progress(LIMIT)?;
    Ok(job)
}

/// Waits until the front has said this.
fn says(job: &mut Job, words: &str) -> Result<(), Failure> {
    let end = std::time::Instant::now() + LIMIT;
    while !job.output_text().contains(words) {
        let late = std::time::Instant::now() > end;
        want(!late && !job.has_ended()?, || {
            format!("{words:?} is not said: {}", job.output_text())
        })?;
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    Ok(())
}

/// A checkpoint after which the device has no memory for the program, this time.
fn lost_by_checkpoint(job: &Job) -> Result<(), Failure> {
    io("fill the device", std::fs::write(full(job), "once"))?;
    let o = job.checkpoint_raw(&[])?;
    let said = text(&o);
    want(o.status.success() && said.contains("out of memory"), || said.clone())
}

/// A program that is lost is ended, and `belay run` goes on by itself from the newest checkpoint, in which nothing is lost.
pub(crate) fn run_goes_back(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = run(place, user, ("", &[]))?;
    job.checkpoint()?;
    // Its number, which a restart keeps.
    let (lost, _) = edges::program_and_agent(&job, PROGRAM)?;
    for round in 1..=2 {
        lost_by_checkpoint(&job)?;
        says(&mut job, &format!("({round} of 3 restarts)"))?;
        let said = job.output_text();
        let words = [&format!("process {lost}: "), "out of memory", "ending what is left"];
        let missing = words.into_iter().find(|w| !said.contains(*w));
        want(missing.is_none(), || format!("{missing:?} is not said: {said}"))?;
        job.progress(LIMIT).map_err(|e| format!("round {round}: {e}"))?;
        job.checkpoint()?;
        job.progress(LIMIT)?;
    }
    job.verdict(false, LIMIT)
}

/// It does so as often as it may; then the program stays lost, and a further checkpoint says what to do.
pub(crate) fn run_goes_back_so_often(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = run(place, user, ("", &["--restarts", "1"]))?;
    job.checkpoint()?;
    lost_by_checkpoint(&job)?;
    says(&mut job, "(1 of 1 restarts)")?;
    job.progress(LIMIT)?;
    lost_by_checkpoint(&job)?;
    refused(
        &job.checkpoint_raw(&["--quiet"])?,
        &["gpu driver", "out of memory", "belay restart"],
    )?;
    want(!job.has_ended()? && !job.output_text().contains("(2 of"), || {
        job.output_text()
    })?;
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Where there is none to go back to, that is said, and the program is left as it is.
pub(crate) fn run_without_a_checkpoint(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = run(place, user, ("fail", &[]))?;
    refused(&job.checkpoint_raw(&["--quiet"])?, &["gpu driver", "state failed"])?;
    says(&mut job, "no checkpoint from which the job could be restarted")?;
    want(!job.has_ended()?, || job.output_text())?;
    job.kill_all()
}
