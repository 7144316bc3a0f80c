//! Memory headroom: a checkpoint never costs the program its memory, whatever share of its limit it uses.

use belay_tests::expect::want;
use belay_tests::group::Group;
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::rng::Rng;
use belay_tests::runner::rounds;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

/// Memory limit of the control group.
const LIMIT_MIB: u64 = 512;
const PATIENCE: Duration = Duration::from_secs(120);

/// How the memory of each generation was taken: mode and times that the program was stopped meanwhile.
fn modes(job: &Job) -> Result<Vec<(String, u64)>, Failure> {
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["status", &dir, "--json"]), PATIENCE)?;
    let status: serde_json::Value = serde_json::from_slice(&o.stdout).map_err(|e| format!("{e}: {}", text(&o)))?;
    let generations = status["generations"].as_array().ok_or("no generations in the status")?;
    let one = |g: &serde_json::Value| {
        let s = &g["snapshot"];
        want(s["reason"].as_str().is_some_and(|r| !r.is_empty()), || {
            format!("no reason: {g}")
        })?;
        Ok((
            s["mode"].as_str().unwrap_or_default().to_owned(),
            s["stops"].as_u64().unwrap_or(99),
        ))
    };
    generations.iter().map(one).collect()
}

/// Runs mem_full in `group`.
fn launch(job: &mut Job, place: &Place, group: Option<&Group>, arguments: &[&str]) -> Result<(), Failure> {
    let program = place.programs().join("mem_full").display().to_string();
    let dir = job.dir().display().to_string();
    let mut c = job.belay(&["launch", "--ckpt-dir", &dir, "--", &program]);
    c.args(arguments);
    if let Some(group) = group {
        group.enter(&mut c);
    }
    job.start(c)?;
    job.progress(PATIENCE)
}

/// Kills the job, restarts it, in `group`, and lets it end.
fn comes_back(job: &mut Job, group: Option<&Group>) -> Result<(), Failure> {
    job.kill_all()?;
    job.clear_beat()?;
    let dir = job.dir().display().to_string();
    let mut c = job.belay(&["restart", &dir]);
    if let Some(group) = group {
        group.enter(&mut c);
    }
    job.start(c)?;
    job.progress(PATIENCE).map_err(|e| format!("restart: {e}"))?;
    let o = job.checkpoint_raw(&[])?;
    want(o.status.success(), || {
        format!("after the restart: {}: {}", show(o.status), text(&o))
    })?;
    job.verdict(false, PATIENCE)
}

/// A program that uses `percent` of the group's memory and rewrites all of it is checkpointed, killed and restarted,
/// everything within the group; nothing in it is ever killed for want of memory.
fn at(percent: u64, modes_wanted: &[&str], place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let Some(group) = Group::new(LIMIT_MIB << 20)? else {
        println!("skipped: no memory control group can be made");
        return Ok(());
    };
    let mut job = Job::new(place, "headroom", user)?;
    launch(
        &mut job,
        place,
        Some(&group),
        &[&(LIMIT_MIB * percent / 100).to_string(), "2"],
    )?;
    let mut seen = BTreeSet::new();
    for n in 0..rounds(3) {
        rng.pause(300);
        let o = job.checkpoint_raw(&[])?;
        let no_kills = |when: &str| {
            let kills = group.kills()?;
            want(kills == 0, || {
                format!("{when}: {kills} processes were killed for want of memory: {}", text(&o))
            })
        };
        no_kills(&format!("checkpoint {n}"))?;
        want(o.status.success(), || {
            format!("checkpoint {n}: {}: {}", show(o.status), text(&o))
        })?;
        job.progress(PATIENCE).map_err(|e| format!("after checkpoint {n}: {e}"))?;
        let newest = modes(&job)?.pop().ok_or("no generation")?;
        want(modes_wanted.contains(&newest.0.as_str()), || {
            format!("checkpoint {n}: {newest:?}, expected one of {modes_wanted:?}")
        })?;
        seen.insert(newest);
    }
    comes_back(&mut job, Some(&group))?;
    let kills = group.kills()?;
    want(kills == 0, || format!("{kills} processes were killed for want of memory"))?;
    println!("    {percent} % of {LIMIT_MIB} MiB: {seen:?}");
    Ok(())
}

/// A checkpoint that would lie in memory itself, where there is no room for it, is refused, and nobody is killed.
fn store_in_memory(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let Some(group) = Group::new(LIMIT_MIB << 20)? else {
        println!("skipped: no memory control group can be made");
        return Ok(());
    };
    let mut job = Job::new(place, "inmemory", user)?;
    let dir = job.dir();
    std::fs::create_dir(&dir).map_err(|e| format!("create {}: {e}", dir.display()))?;
    let owner = if user == User::Ordinary { NOBODY } else { 0 };
    let options = format!("size=2g,mode=0700,uid={owner},gid={owner}");
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
        .arg(&dir)
        .status();
    want(mount.is_ok_and(|s| s.success()), || "mount a tmpfs".into())?;
    let r = (|| {
        launch(&mut job, place, Some(&group), &[&(LIMIT_MIB * 60 / 100).to_string(), "2"])?;
        for _ in 0..2 {
            let o = job.checkpoint_raw(&[])?;
            want(o.status.code() == Some(79) && text(&o).contains("tmpfs"), || {
                format!("{}: {}", show(o.status), text(&o))
            })?;
            job.progress(PATIENCE)?;
            want(group.kills()? == 0, || "processes were killed for want of memory".into())?;
        }
        job.verdict(false, PATIENCE)
    })();
    job.kill_all()?;
    let umount = Command::new("umount").arg("-l").arg(&dir).status();
    want(umount.is_ok_and(|s| s.success()), || "umount".into())?;
    r
}

/// Where the kernel refuses to copy the process its memory is written before it goes on.
fn no_fork(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "nofork", user)?;
    launch(&mut job, place, None, &["24", "2", "alone"])?;
    for _ in 0..2 {
        job.checkpoint()?;
        let newest = modes(&job)?.pop().ok_or("no generation")?;
        want(newest.0 == BEFORE, || {
            format!("taken {newest:?} although no process can be made")
        })?;
        job.progress(PATIENCE)?;
    }
    comes_back(&mut job, None)
}

/// Bytes that the kernel can still promise to processes under strict overcommit; `None` where it promises anything
/// (`vm.overcommit_memory` is not 2).
fn promisable() -> Option<u64> {
    let mode = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").ok()?;
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    (mode.trim() == "2").then(|| {
        kib("CommitLimit")
            .unwrap_or(0)
            .saturating_sub(kib("Committed_AS").unwrap_or(0))
            << 10
    })
}

/// Under strict overcommit a program is copied where the kernel can promise the copy its memory, and is written before
/// it goes on where it cannot; it comes back either way. `scripts/test-kernel` has a machine for it.
fn strict_overcommit(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    for (percent, copied) in [(10, true), (65, false)] {
        let mut job = Job::new(place, &format!("strict{percent}"), user)?;
        let mib = promisable().ok_or("not under strict overcommit")? / 100 * percent / (1 << 20);
        launch(&mut job, place, None, &[&mib.to_string(), "2"])?;
        for _ in 0..2 {
            job.checkpoint()?;
            let newest = modes(&job)?.pop().ok_or("no generation")?;
            want((newest.0 != BEFORE) == copied, || {
                format!("{percent} % of what can be promised, {mib} MiB: taken {newest:?}")
            })?;
            job.progress(PATIENCE)?;
        }
        comes_back(&mut job, None)?;
    }
    Ok(())
}

/// A restart whose memory the machine does not have ends with an error, also where the kernel kills a process of it that
/// reads what others are to inherit.
fn too_small(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let Some(group) = Group::new(LIMIT_MIB << 18)? else {
        println!("skipped: no memory control group can be made");
        return Ok(());
    };
    let mut job = Job::new(place, "toosmall", user)?;
    let program = place.programs().join("proc_kin").display().to_string();
    job.launch(&[], &[program, (LIMIT_MIB / 2).to_string()])?;
    job.progress(PATIENCE)?;
    job.checkpoint()?;
    job.kill_all()?;
    let mut c = job.belay(&["restart", &job.dir().display().to_string()]);
    group.enter(&mut c);
    let o = output(c, PATIENCE)?;
    want(!o.status.success() && group.kills()? > 0, || {
        format!("{} and nobody was killed: {}", show(o.status), text(&o))
    })?;
    // With more memory it comes back.
    comes_back(&mut job, None)
}

const PLAIN: &str = "copy_on_write";
const CAPPED: &str = "copy_on_write_capped";
const BEFORE: &str = "write_before_resume";
/// Shares of the limit, percent, and the modes that may be chosen there.
const LEVELS: [(u64, &[&str]); 4] = [
    (30, &[PLAIN]),
    (50, &[PLAIN, CAPPED]),
    (75, &[CAPPED, BEFORE]),
    (95, &[BEFORE]),
];

fn main() {
    let mut target = Target::new("headroom", &["mem_full", "proc_kin"]);
    for (percent, modes) in LEVELS {
        let check = format!("{percent}_percent");
        target.by_user(
            &check,
            |_| am_root(),
            move |place, user, rng| at(percent, modes, place, user, rng),
        );
    }
    target.by_user("too_small", |_| am_root(), too_small);
    target.by_user("store_in_memory", |_| am_root(), store_in_memory);
    target.by_user("strict_overcommit", |_| promisable().is_some(), strict_overcommit);
    target.by_user("no_fork", |u| u == User::Ordinary, no_fork);
    target.run();
}
