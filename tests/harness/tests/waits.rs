//! Time-outs pass as they would without checkpoints: while these are taken, and from before a restart to after it.

use belay_tests::job::Job;
use belay_tests::place::{Place, User};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::time::Duration;

const PROGRAM: &str = "timer_waits";
const PATIENCE: Duration = Duration::from_secs(60);

/// A job that waits for `wait` in all ways and may be `slack` late.
fn launched(place: &Place, label: &str, user: User, options: &[&str], wait: Duration, slack: Duration) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    let program = place.programs().join(PROGRAM).display().to_string();
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    job.launch(
        &options,
        &[program, wait.as_millis().to_string(), slack.as_millis().to_string()],
    )?;
    Ok(job)
}

/// Checkpoints come more often than the time-outs pass.
fn continued(place: &Place, user: User) -> Result<(), Failure> {
    let options = ["--ckpt-interval", "200ms"];
    let mut job = launched(
        place,
        "continued",
        user,
        &options,
        Duration::from_secs(3),
        Duration::from_millis(1500),
    )?;
    job.verdict(false, PATIENCE)?;
    let taken = job.status()?["generations"].as_array().map_or(0, Vec::len);
    if taken < 2 {
        return Err("no checkpoints were taken".into());
    }
    Ok(())
}

/// Two restarts fall into each wait.
fn restarted(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(
        place,
        "restarted",
        user,
        &[],
        Duration::from_secs(4),
        Duration::from_millis(2500),
    )?;
    for _ in 0..2 {
        job.answers(PATIENCE)?;
        std::thread::sleep(Duration::from_millis(1500));
        job.checkpoint()?;
        job.kill_all()?;
        job.restart(&[])?;
    }
    job.verdict(false, PATIENCE)
}

fn main() {
    let mut target = Target::new("waits", &[PROGRAM]);
    target.in_turn();
    target.by_user("continued", |_| true, |place, user, _| continued(place, user));
    target.by_user("restarted", |_| true, |place, user, _| restarted(place, user));
    target.run();
}
