//! Job directories that are not what they were, or were never meant to be ones.

use super::{running, LIMIT};
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::Failure;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

/// A job whose directory is moved writes nothing where another directory lies now, and leaves that job's socket alone.
pub(super) fn moved(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "moved", &[], &["fault_target", "1"])?;
    job.checkpoint()?;
    let old = job.work.join("elsewhere");
    io("move the job directory", std::fs::rename(job.dir(), &old))?;
    let (dir, old) = (job.dir().display().to_string(), old.display().to_string());
    let checkpoint = |dir: &str| output(job.belay(&["checkpoint", dir]), LIMIT);
    refused(&checkpoint(&old)?, &["moved or removed", "move it back"])?;
    let mut second = io(
        "launch the second job",
        job.belay(&["launch", "--ckpt-dir", &dir, "--", "sleep", "1000"]).spawn(),
    )?;
    let end = Instant::now() + LIMIT;
    while !checkpoint(&dir)?.status.success() {
        want(Instant::now() < end, || "no checkpoint of the second job".into())?;
    }
    refused(&checkpoint(&old)?, &["another directory lies there now", "move it back"])?;
    let stop = output(job.belay(&["stop", &dir]), LIMIT)?;
    want(stop.status.success(), || format!("stop the second job: {}", text(&stop)))?;
    io("wait for the second job", second.wait())?;
    let newest = output(job.belay(&["list", &dir]), LIMIT)?;
    want(!text(&newest).contains("fault_target"), || text(&newest))?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A directory that a launch could not describe, because the disk was full, is used by the next one.
pub(super) fn half_made(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "halfmade", user)?;
    let shell = |line: &str| output(job.command(&["sh", "-c", line].map(str::to_owned)), LIMIT);
    let made = shell(
        "umask 077; mkdir half half/gen half/log; : >half/lock; : >half/.job.json.new; mkdir -p other/log; : >other/log/mine",
    )?;
    want(made.status.success(), || text(&made))?;
    let launch = |dir: &str| {
        let dir = job.work.join(dir).display().to_string();
        output(job.belay(&["launch", "--ckpt-dir", &dir, "--", "true"]), LIMIT)
    };
    let o = launch("half")?;
    want(o.status.success(), || format!("{}: {}", show(o.status), text(&o)))?;
    refused(&launch("other")?, &["holds other things"])
}

/// Whoever names a directory by mistake is not asked to close it.
pub(super) fn named_by_mistake(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "mistake", user)?;
    let made = output(
        job.command(&["sh", "-c", "mkdir -m 755 home; : >home/thesis.tex"].map(str::to_owned)),
        LIMIT,
    )?;
    want(made.status.success(), || text(&made))?;
    let dir = job.work.join("home").display().to_string();
    let o = output(job.belay(&["launch", "--ckpt-dir", &dir, "--", "true"]), LIMIT)?;
    refused(&o, &["holds other things", "--ckpt-dir"])?;
    want(!text(&o).contains("chmod"), || text(&o))
}

/// Commands that run one after the other need a directory each: what has ended well is not run again.
pub(super) fn several_runs(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "several", user)?;
    let run = |dir: &str, line: &str| {
        let dir = job.work.join(dir).display().to_string();
        output(job.belay(&["run", "--ckpt-dir", &dir, "--", "sh", "-c", line]), LIMIT)
    };
    for _ in 0..2 {
        let o = run("first", "echo A >>ran")?;
        want(o.status.success(), || text(&o))?;
        refused(
            &run("first", "echo B >>ran")?,
            &["another command", "ended with exit status 0", "--ckpt-dir"],
        )?;
        let o = run("second", "echo B >>ran; exit 3")?;
        want(o.status.code() == Some(3), || text(&o))?;
    }
    let ran = io("read", std::fs::read_to_string(job.work.join("ran")))?;
    want(ran == "A\nB\nB\n", || format!("ran {ran:?}"))
}

/// Remote shells are told of the directory of a job on several hosts, and its PATH begins with one in it: where either
/// cannot be, nothing is started.
pub(super) fn across_hosts(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "across", user)?;
    for (name, named) in [(&b"job-\xe9"[..], "job-\\xE9"), (b"a:b", "a:b")] {
        let (dir, ran) = (job.work.join(OsStr::from_bytes(name)), job.work.join("ran"));
        let ran_name = ran.display().to_string();
        for verb in ["launch", "run"] {
            let mut c = job.belay(&[verb, "--across-hosts", "--ckpt-dir"]);
            c.arg(&dir).args(["--", "touch", &ran_name]);
            let o = output(c, LIMIT)?;
            refused(&o, &[named, "--across-hosts", "--ckpt-dir"]).map_err(|e| format!("{verb} {named}: {e}"))?;
            want(!dir.exists() && !ran.exists(), || format!("{verb} {named}: it was begun"))?;
        }
    }
    Ok(())
}
