//! Programs that check what a checkpoint or a restart leaves (`verbs_after`), also of what is held back (`verbs_held`) and of
//! threads that end (`verbs_told`), and what of it does not show (`verbs_back`).

use super::LIMIT;
use belay_tests::build::{build, Kind};
use belay_tests::expect::want;
use belay_tests::fabric::Fabric;
use belay_tests::job::{show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::Failure;
use std::time::{Duration, Instant};

/// A job of `verbs_after CHECK`, and its fabric.
fn after(place: &Place, user: User, check: &str, options: &[&str]) -> Result<(Fabric, Job), Failure> {
    checking(place, user, ["verbs_after", check], options)
}

/// A job of a program that has checks, and its fabric.
fn checking(place: &Place, user: User, [program, check]: [&str; 2], options: &[&str]) -> Result<(Fabric, Job), Failure> {
    let fabric = Fabric::new(place, &format!("adapters-{check}-fabric"), user, options)?;
    let mut job = Job::new(place, &format!("adapters-{check}"), user)?;
    for (name, value) in fabric.environment() {
        job.set(name, &value.display().to_string());
    }
    let set = format!("{} set {}", fabric.daemon().display(), fabric.dir.display());
    job.set("VERBS_FAULT", &set);
    if options.contains(&"--roce") {
        job.set("VERBS_GID", "3");
    }
    let config = job.work.join("belay.toml");
    let text = "[verbs]\nenable = \"on\"\n[gate]\nlimit = \"2s\"\n";
    std::fs::write(&config, text).map_err(|e| format!("write {}: {e}", config.display()))?;
    let program = build(place, &format!("verbs/{program}"), Kind::Verbs)?.display().to_string();
    job.launch(&["--config".into(), config.display().to_string()], &[program, check.into()])?;
    Ok((fabric, job))
}

/// Waits until the program waits for the harness.
fn is_ready(job: &mut Job) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    while !job.work.join("ready").exists() {
        want(Instant::now() < end && !job.has_ended()?, || job.output_text())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The harness has done its part. The program has seen that when this returns.
fn done(job: &mut Job) -> Result<(), Failure> {
    let file = job.work.join("done");
    std::fs::write(&file, "").map_err(|e| format!("say so: {e}"))?;
    let end = Instant::now() + LIMIT;
    while file.exists() {
        want(Instant::now() < end && !job.has_ended()?, || job.output_text())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Ports that get other addresses while they are in use are seen as they are, and those that a restart changes are not.
pub(super) fn ports(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    for options in [&[][..], &["--roce"]] {
        let (mut fabric, mut job) = after(place, user, "ports", options)?;
        for restarts in 0..2 {
            is_ready(&mut job)?;
            fabric.ask("readdress", &["rules1"])?;
            done(&mut job)?;
            if restarts == 0 {
                is_ready(&mut job)?;
                job.checkpoint()?;
                done(&mut job)?;
            }
            is_ready(&mut job)?;
            restarted(&mut fabric, &mut job, options)?;
            done(&mut job)?;
        }
        job.progress(LIMIT)?;
        job.checkpoint()?;
        job.verdict(false, LIMIT)?;
    }
    Ok(())
}

/// The job is killed after a checkpoint, and restarted where all has other names and numbers.
fn restarted(fabric: &mut Fabric, job: &mut Job, options: &[&str]) -> Result<(), Failure> {
    job.checkpoint()?;
    job.kill_all()?;
    fabric.again(options)?;
    job.clear_beat()?;
    job.restart(&[])
}

/// A checkpoint is put off, because requests are on their way.
fn is_put_off(job: &Job) -> Result<(), Failure> {
    let o = job.checkpoint_raw(&[])?;
    let said = text(&o);
    want(o.status.code() == Some(80) && said.contains("requests are pending"), || {
        format!("{}: {said}", show(o.status))
    })
}

/// What has not arrived yet is not called done.
pub(super) fn late(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (_fabric, mut job) = after(place, user, "late", &[])?;
    for _ in 0..2 {
        is_ready(&mut job)?;
        is_put_off(&job)?;
        done(&mut job)?;
    }
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// The harness has done its part; the next time it kills and restarts the program, which ends well.
fn then_comes_back(fabric: &mut Fabric, job: &mut Job) -> Result<(), Failure> {
    done(job)?;
    is_ready(job)?;
    restarted(fabric, job, &[])?;
    done(job)?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A checkpoint that goes on, then one and a restart. Events that a checkpoint has found keep nothing from being
/// destroyed, and a peer that has gone keeps no checkpoint out.
pub(super) fn goes_on_and_comes_back(place: &Place, user: User, check: [&str; 2]) -> Result<(), Failure> {
    let (mut fabric, mut job) = checking(place, user, check, &[])?;
    is_ready(&mut job)?;
    job.checkpoint()?;
    then_comes_back(&mut fabric, &mut job)
}

/// A checkpoint is put off by name where nothing tells what a queue pair that holds back has sent.
pub(super) fn unknown(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (_fabric, mut job) = checking(place, user, ["verbs_held", "unknown"], &[])?;
    is_ready(&mut job)?;
    let o = job.checkpoint_raw(&[])?;
    let said = text(&o);
    want(
        o.status.code() == Some(80) && said.contains("holds its requests back"),
        || format!("{}: {said}", show(o.status)),
    )?;
    done(&mut job)?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// A program with checks, killed and restarted where it is ready for that.
pub(super) fn restarts(place: &Place, user: User, check: [&str; 2], times: u32) -> Result<(), Failure> {
    let (mut fabric, mut job) = checking(place, user, check, &[])?;
    for _ in 0..times {
        is_ready(&mut job)?;
        restarted(&mut fabric, &mut job, &[])?;
        done(&mut job)?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Adapters know when their queues are to give an event, as before.
pub(super) fn moderated(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut fabric, mut job) = checking(place, user, ["verbs_back", "moderated"], &[])?;
    for restarts in 0..3 {
        is_ready(&mut job)?;
        let told = [fabric.counter("cq_count")?, fabric.counter("cq_period")?];
        want(told == [3 + 10, 50 + 1000], || format!("after {restarts} restarts: {told:?}"))?;
        if restarts < 2 {
            restarted(&mut fabric, &mut job, &[])?;
        }
        done(&mut job)?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Requests that have failed keep no checkpoint out.
pub(super) fn failed(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut fabric, mut job) = checking(place, user, ["verbs_back", "failed"], &["--roce"])?;
    for _ in 0..2 {
        is_ready(&mut job)?;
        job.checkpoint()?;
        done(&mut job)?;
    }
    is_ready(&mut job)?;
    restarted(&mut fabric, &mut job, &["--roce"])?;
    done(&mut job)?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A thread that is told to end leaves no lock of the library taken.
pub(super) fn told(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut fabric, mut job) = checking(place, user, ["verbs_told", "told"], &["--roce"])?;
    is_ready(&mut job)?;
    restarted(&mut fabric, &mut job, &["--roce"])?;
    done(&mut job)?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Datagrams to a host that is gone are lost, and it is looked for once.
pub(super) fn nowhere(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let options = ["--roce", "no_ah=1"];
    let (mut fabric, mut job) = checking(place, user, ["verbs_back", "nowhere"], &options)?;
    is_ready(&mut job)?;
    restarted(&mut fabric, &mut job, &options)?;
    done(&mut job)?;
    is_ready(&mut job)?;
    let times = fabric.counter("not_found")?;
    want(times == 1, || format!("a host that is gone was looked for {times} times"))?;
    done(&mut job)?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Whoever has the number of one who is gone is told from him.
pub(super) fn namesake(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let options = ["--roce", "no_ah=1"];
    let (mut fabric, mut job) = checking(place, user, ["verbs_back", "namesake"], &options)?;
    is_ready(&mut job)?;
    restarted(&mut fabric, &mut job, &["--roce", "no_ah=1", "next_qpn=1193046"])?;
    done(&mut job)?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// What a restart could not tell all processes of is refused while the program runs, and the program goes on.
pub(super) fn many(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut fabric, mut job) = after(place, user, "many", &[])?;
    is_ready(&mut job)?;
    let o = job.checkpoint_raw(&[])?;
    let said = text(&o);
    let named = said.contains("more memory regions than a restart can tell");
    want(o.status.code() == Some(80) && named, || format!("{}: {said}", show(o.status)))?;
    then_comes_back(&mut fabric, &mut job)
}

/// What a checkpoint that is put off has posted takes no place of the program's.
pub(super) fn marked(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (_fabric, mut job) = after(place, user, "marked", &[])?;
    is_ready(&mut job)?;
    is_put_off(&job)?;
    done(&mut job)?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// What the library needs before a checkpoint it has, whatever locks threads have that wait for it.
pub(super) fn locked(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let (_fabric, mut job) = after(place, user, "locked", &[])?;
    for _ in 0..3 {
        job.progress(LIMIT)?;
        rng.pause(20);
        job.checkpoint()?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}
