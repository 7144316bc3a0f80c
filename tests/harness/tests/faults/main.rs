//! Faults and bad input: killed parts during a checkpoint, a full disk, damaged, foreign and missing files.
//!
//! The rules that every test here checks: the running program is never harmed, a committed generation always restarts,
//! and what cannot be done ends with one line that names the object and an exit status of belay's own.

mod damage;
mod kills;

use belay_tests::expect::refused_for_one_of as refused;
use belay_tests::job::{output, Job};
use belay_tests::place::{am_root, Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(40);

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

/// A launched fault_target with one committed generation.
fn target(place: &Place, user: User, label: &str, megabytes: &str) -> Result<Job, Failure> {
    target_with(&[], place, user, label, megabytes)
}

fn target_with(options: &[String], place: &Place, user: User, label: &str, megabytes: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    job.launch(
        options,
        &[place.programs().join("fault_target").display().to_string(), megabytes.into()],
    )?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    Ok(job)
}

/// Kill everything, restart, go on: the newest committed generation is good.
fn comes_back(job: &mut Job) -> Result<(), Failure> {
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT).map_err(|e| format!("restart: {e}"))
}

/// `belay restart` that must not succeed.
fn restart_refused(job: &Job, words: &[&str]) -> Result<(), Failure> {
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["restart", &dir]), LIMIT).map_err(|e| format!("restart was expected to name {words:?}: {e}"))?;
    refused(&o, words)?;
    job.left_behind()
}

fn main() {
    let mut target = Target::new("faults", &["fault_target", "proc_chain", "proc_vforkend"]);
    let tests: [(&str, Test); 19] = [
        ("command_ending", kills::command_ending),
        ("left_behind", kills::left_behind),
        ("command_killed", kills::command_killed),
        ("agent_killed", kills::agent_killed),
        ("unattended", kills::unattended),
        ("rebinding", kills::rebinding),
        ("orphans_ending", kills::orphans_ending),
        ("snapshot_killed", kills::snapshot_killed),
        ("rank_killed", kills::rank_killed),
        ("all_killed", kills::all_killed),
        ("disk_full", damage::disk_full),
        ("full_everywhere", damage::full_everywhere),
        ("damaged", damage::damaged),
        ("damaged_meanwhile", damage::damaged_meanwhile),
        ("falls_back", damage::falls_back),
        ("shared_chunk", damage::shared_chunk),
        ("foreign", damage::foreign),
        ("owner_and_mode", damage::owner_and_mode),
        ("missing_files", damage::missing_files),
    ];
    for (name, test) in tests {
        // Mounting the small file system needs root.
        target.by_user(name, |_| !matches!(name, "disk_full" | "full_everywhere") || am_root(), test);
    }
    target.run();
}
