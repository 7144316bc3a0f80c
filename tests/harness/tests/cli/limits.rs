//! What the system does not let belay do.

use super::{running, LIMIT};
use belay_tests::expect::{refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::{procs, Failure};
/// A set-user-ID program cannot be traced by an ordinary user: refused by name at launch or at the checkpoint.
pub(super) fn setuid(place: &Place, _: User) -> Result<(), Failure> {
    let job = Job::new(place, "setuid", User::Ordinary)?;
    let o = output(
        job.belay(&[
            "launch",
            "--ckpt-dir",
            &job.dir().display().to_string(),
            "--",
            "su",
            "--version",
        ]),
        LIMIT,
    )?;
    refused(&o, &["su", "set"])
}

/// Sets a limit of front and agent.
fn limit(job: &Job, option: &str) -> Result<(), Failure> {
    let is_belay = |p: &i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == "belay");
    for pid in procs::tree(job.pid().ok_or("no job")?).into_iter().filter(is_belay) {
        let limit = ["prlimit", option, "--pid", &pid.to_string()].map(str::to_owned);
        let o = output(job.command(&limit), LIMIT)?;
        want(o.status.success(), || text(&o))?;
    }
    Ok(())
}

/// Where the agent may write small files only, the checkpoint fails, and it and the program go on.
pub(super) fn file_size(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "file_size", &[], &["mem_private"])?;
    limit(&job, "--fsize=1048576:")?;
    let o = output(job.belay(&["checkpoint", &job.dir().display().to_string()]), LIMIT)?;
    want(o.status.code() == Some(81) && text(&o).contains("File too large"), || {
        format!("{}: {}", show(o.status), text(&o))
    })?;
    job.progress(LIMIT)?;
    limit(&job, "--fsize=unlimited:")?;
    job.checkpoint()?;
    job.kill_all()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A process that leaves a restart no numbers for descriptors is refused, with the limit, and goes on.
pub(super) fn open_files(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "open_files", &[], &["fd_many"])?;
    limit(&job, "--nofile=300:300")?;
    let o = output(job.belay(&["checkpoint", &job.dir().display().to_string()]), LIMIT)?;
    refused(&o, &["300, the hard limit rlimit_nofile", "ulimit"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A job that has many times as many open files as one process may, each of its processes three quarters of that, is
/// checkpointed and restarted under that limit.
pub(super) fn crowd(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "crowd", user)?;
    let (dir, program) = (
        job.dir().display().to_string(),
        place.programs().join("fd_crowd").display().to_string(),
    );
    let limited = |job: &Job, line: &[&str]| {
        let belay = place.belay().display().to_string();
        let words = ["prlimit", "--nofile=400:400", &belay]
            .into_iter()
            .chain(line.iter().copied());
        job.command(&words.map(str::to_owned).collect::<Vec<_>>())
    };
    let launch = limited(&job, &["launch", "--ckpt-dir", &dir, "--", &program, "16", "42"]);
    job.start(launch)?;
    job.progress(LIMIT)?;
    for _ in 0..2 {
        job.checkpoint()?;
        job.progress(LIMIT)?;
        job.kill_all()?;
        let restart = limited(&job, &["restart", &dir]);
        job.start(restart)?;
        job.progress(LIMIT)?;
    }
    job.verdict(false, LIMIT)
}
