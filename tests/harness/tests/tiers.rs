//! Tiers: checkpoints that are copied to a shared file system or an object store, and jobs that come back from there
//! when nothing is left here.
//!
//! The rules that every test here checks: the program is never harmed, what a command has called durable restarts
//! without the job directory, and what cannot be copied or read back is named.

#[path = "tiers/kept.rs"]
mod kept;
#[path = "tiers/pace.rs"]
mod pace;
#[path = "tiers/sealed.rs"]
mod sealed;
#[path = "tiers/shut.rs"]
mod shut;

use belay_tests::expect::{io, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::rng::Rng;
use belay_tests::runner::until_hit;
use belay_tests::s3::{Server, CREDENTIALS};
use belay_tests::target::{or_end, Target};
use belay_tests::{procs, Failure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(150);

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

/// A new directory in the job's work directory, which belongs to the job's user.
fn directory(job: &Job, user: User, name: impl AsRef<Path>) -> Result<PathBuf, Failure> {
    let dir = job.work.join(name);
    io("create", std::fs::create_dir(&dir))?;
    if user == User::Ordinary && am_root() {
        io("give away", std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)))?;
    }
    Ok(dir)
}

/// The configuration of a tier in a directory.
fn pfs(name: &str, dir: &Path) -> String {
    format!("[[tier]]\nname = \"{name}\"\nkind = \"pfs\"\npath = \"{}\"\n", dir.display())
}

/// A launched fault_target that makes progress, with this configuration.
fn target(job: &mut Job, place: &Place, config: &str, megabytes: &str) -> Result<(), Failure> {
    let file = job.work.join("belay.toml");
    io("write", std::fs::write(&file, config))?;
    let program = place.programs().join("fault_target").display().to_string();
    let options = ["--config".to_owned(), file.display().to_string()];
    job.launch(&options, &[program, megabytes.into()])?;
    job.progress(LIMIT)
}

fn belay(job: &Job, args: &[&str]) -> Result<String, Failure> {
    let o = output(job.belay(args), LIMIT)?;
    want(o.status.success(), || {
        format!("belay {args:?}: {}: {}", show(o.status), text(&o))
    })?;
    Ok(String::from_utf8_lossy(&o.stdout).into_owned())
}

fn durable(job: &Job) -> Result<(), Failure> {
    let o = job.checkpoint_raw(&["--level", "durable"])?;
    want(o.status.success() && text(&o).contains("durable"), || {
        format!("belay checkpoint --level durable: {}: {}", show(o.status), text(&o))
    })
}

/// The job after `belay restart`, which must go on.
fn goes_on(job: &mut Job) -> Result<(), Failure> {
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT).map_err(|e| format!("restart: {e}"))
}

/// Removes checkpoints and chunks from the job directory.
fn lose_local(job: &Job) -> Result<(), Failure> {
    for sub in ["gen", "chunks"] {
        io("remove", std::fs::remove_dir_all(job.dir().join(sub)))?;
    }
    Ok(())
}

fn generations(job: &Job) -> Result<Vec<Value>, Failure> {
    let dir = job.dir().display().to_string();
    let list: Value = serde_json::from_str(&belay(job, &["list", &dir, "--json"])?).map_err(|e| e.to_string())?;
    Ok(list["generations"].as_array().cloned().unwrap_or_default())
}

/// Every file below `dir`.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if e.path().is_dir() {
            out.extend(files(&e.path()));
        } else {
            out.push(e.path());
        }
    }
    out
}

fn packs(dir: &Path) -> Vec<PathBuf> {
    let mut all = files(dir);
    all.retain(|p| p.extension().is_some_and(|e| e == "bpk"));
    all
}

fn flip(path: &Path, rng: &mut Rng, bits: u64) -> Result<(), Failure> {
    let mut bytes = io("read", std::fs::read(path))?;
    for _ in 0..bits {
        let at = rng.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << rng.below(8);
    }
    io("write", std::fs::write(path, bytes))
}

/// Everything is killed, the checkpoints here are removed, then the whole job directory: each time the job goes on from the tier.
fn local_lost(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "lost", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(
        &mut job,
        place,
        &(pfs("scratch", &scratch) + "[flush]\nzstd = \"auto\"\n"),
        "16",
    )?;
    durable(&job)?;
    let list = generations(&job)?;
    want(list[0]["level"] == "durable", || format!("level in {list:?}"))?;
    let tiers: Vec<&str> = list[0]["tiers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|t| t["tier"].as_str())
        .collect();
    want(tiers == ["job", "scratch"], || format!("tiers in {list:?}"))?;
    job.kill_all()?;
    lose_local(&job)?;
    let list = generations(&job)?;
    want(list.len() == 1 && list[0]["whole"] == true, || {
        format!("after the loss: {list:?}")
    })?;
    goes_on(&mut job)?;
    durable(&job)?;
    job.kill_all()?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    job.clear_beat()?;
    let config = job.work.join("belay.toml").display().to_string();
    job.restart(&["--config", &config])?;
    job.progress(LIMIT)
        .map_err(|e| format!("restart without a job directory: {e}"))?;
    let dir = job.dir().display().to_string();
    belay(&job, &["verify", &dir])?;
    flip_descriptions(&scratch)?;
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(o.status.code() == Some(88) && text(&o).contains("job.json: damaged"), || {
        text(&o)
    })?;
    flip_descriptions(&scratch)?;
    job.verdict(false, LIMIT)
}

/// Changes a bit of what a tier knows of its jobs, or changes it back.
fn flip_descriptions(tier: &Path) -> Result<(), Failure> {
    let mut known = files(tier).into_iter().filter(|f| f.ends_with("job.json"));
    known.try_for_each(|path| {
        let mut bytes = io("read", std::fs::read(&path))?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        io("write", std::fs::write(path, bytes))
    })
}

/// `belay run` where the job directory is gone: the same command goes on from the tier, another one begins anew, and where
/// the tier does not answer nobody begins anew without a word.
fn run_without_directory(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "rundir", user)?;
    let scratch = directory(&job, user, "scratch")?;
    let config = job.work.join("belay.toml");
    io("write", std::fs::write(&config, pfs("scratch", &scratch)))?;
    let (config, dir) = (config.display().to_string(), job.dir().display().to_string());
    let program = place.programs().join("fault_target").display().to_string();
    let line = |megabytes| ["run", "--config", &config, "--ckpt-dir", &dir, "--", &program, megabytes];
    let runs = |job: &mut Job, megabytes| -> Result<u64, Failure> {
        job.clear_beat()?;
        job.start(job.belay(&line(megabytes)))?;
        job.progress(LIMIT)?;
        // Each run has a log; that of a restart says from where.
        let logs = files(&job.dir().join("log"));
        let text: String = logs.iter().filter_map(|l| std::fs::read_to_string(l).ok()).collect();
        let mut lines = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        let restart = lines.find(|l| l["fields"]["message"] == "restarting");
        Ok(restart.and_then(|l| l["fields"]["generation"].as_u64()).unwrap_or(0))
    };
    let lost = |job: &mut Job| -> Result<(), Failure> {
        job.kill_all()?;
        io("remove", std::fs::remove_dir_all(job.dir()))
    };
    for expected in [0, 1] {
        let from = runs(&mut job, "2")?;
        want(from == expected, || format!("from generation {from}, not {expected}"))?;
        durable(&job)?;
        lost(&mut job)?;
    }
    let away = job.work.join("away");
    io("rename", std::fs::rename(&scratch, &away))?;
    let o = output(job.belay(&line("2")), LIMIT)?;
    want(
        !o.status.success() && text(&o).contains("tier scratch") && text(&o).contains("belay launch"),
        || format!("without the tier: {}: {}", show(o.status), text(&o)),
    )?;
    io("rename", std::fs::rename(&away, &scratch))?;
    let from = runs(&mut job, "3")?;
    want(from == 0, || format!("another command went on from generation {from}"))?;
    lost(&mut job)?;
    let from = runs(&mut job, "2")?;
    want(from == 2, || format!("from generation {from}, not 2"))?;
    lost(&mut job)?;
    // One bit of what the tier knows of the job: that is not to know nothing of it.
    flip_descriptions(&scratch)?;
    for words in [&line("2")[..], &["restart", "--config", &config, &dir]] {
        let o = output(job.belay(words), LIMIT)?;
        want(
            o.status.code() == Some(65) && text(&o).contains("job.json is damaged"),
            || format!("{words:?}: {}: {}", show(o.status), text(&o)),
        )?;
    }
    want(!job.dir().exists(), || "a job directory was made".into())?;
    flip_descriptions(&scratch)?;
    // The directory is made again, and then nothing can be seen of what the tier holds: now, and when it is there.
    let records = files(&scratch)
        .into_iter()
        .filter(|f| f.extension().is_some_and(|e| e == "json"));
    let records: Vec<PathBuf> = records.filter(|f| !f.ends_with("job.json")).collect();
    want(!records.is_empty(), || format!("no records in {:?}", files(&scratch)))?;
    for round in 0..2 {
        let whole = records.iter().map(std::fs::read).collect();
        let whole: Vec<Vec<u8>> = io("read", whole)?;
        for record in &records {
            io("write", std::fs::write(record, "no record"))?;
        }
        let o = output(job.belay(&line("2")), LIMIT)?;
        want(!o.status.success() && text(&o).contains("belay launch"), || {
            format!("{round}: without records: {}: {}", show(o.status), text(&o))
        })?;
        for (record, whole) in records.iter().zip(whole) {
            io("write", std::fs::write(record, whole))?;
        }
    }
    let from = runs(&mut job, "2")?;
    want(from == 2, || format!("from generation {from}, not 2"))?;
    // One that is done is done, also where nothing but the tier says so.
    job.verdict(false, LIMIT)?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    io("remove", std::fs::remove_file(job.work.join("go")))?;
    let from = runs(&mut job, "2")?;
    want(from == 0, || format!("what was done went on from generation {from}"))?;
    job.verdict(false, LIMIT)
}

/// The same with an S3 server; and while that does not answer, the program and its local checkpoints do not care.
fn object_store(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "s3", user)?;
    CREDENTIALS.iter().for_each(|(key, value)| job.set(key, value));
    let server = Server::start(Command::new(Server::program(place)), &job.work.join("store"), "127.0.0.1:0")?;
    // So long it asks again when the server is gone.
    let config = format!("{}timeout = \"10s\"\n", server.tier());
    target(&mut job, place, &config, "24")?;
    durable(&job)?;
    job.kill_all()?;
    lose_local(&job)?;
    goes_on(&mut job)?;
    drop(server);
    let o = job.checkpoint_raw(&["--level", "durable"])?;
    want(o.status.code() == Some(92) && text(&o).contains("tier cloud"), || {
        format!("without a server: {}: {}", show(o.status), text(&o))
    })?;
    job.progress(LIMIT)?;
    job.kill_all()?;
    goes_on(&mut job)?;
    job.verdict(false, LIMIT)
}

/// The program that is not belay below `pid`, and the agent above it.
fn agent(job: &Job) -> Result<i32, Failure> {
    let is_program = |p: i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == "fault_target");
    let parent = |p: i32| -> Option<i32> {
        let s = std::fs::read_to_string(format!("/proc/{p}/stat")).ok()?;
        s[s.rfind(')')? + 2..].split(' ').nth(1)?.parse().ok()
    };
    let tree = procs::tree(job.pid().ok_or("no job")?);
    let mut p = tree.into_iter().find(|p| is_program(*p)).ok_or("no program")?;
    while is_program(p) {
        p = parent(p).ok_or("the program has ended")?;
    }
    Ok(p)
}

/// The agent is killed at any moment of a flush: what was durable stays so, and the next agent completes the flush.
fn agent_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "flushkill", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(
        &mut job,
        place,
        &(pfs("scratch", &scratch) + "[flush]\nthreads = 2\nrate = \"40M\"\n"),
        "8",
    )?;
    durable(&job)?;
    until_hit(6, |n| {
        job.checkpoint()?;
        let newest = generations(&job)?.last().and_then(|g| g["generation"].as_u64()).unwrap_or(0);
        rng.pause(400);
        procs::signal(agent(&job)?, libc::SIGKILL);
        for (p, _) in procs::marked(&job.work) {
            procs::kill_tree(p);
        }
        job.kill_all()?;
        let interrupted = generations(&job)?.last().is_some_and(|g| g["level"] == "local");
        let only_the_tier = n % 3 == 2;
        if only_the_tier {
            // It has a whole generation, the newest or the one before.
            lose_local(&job)?;
            goes_on(&mut job)?;
            return Ok(interrupted);
        }
        goes_on(&mut job)?;
        let dir = job.dir().display().to_string();
        let said = belay(&job, &["flush", &dir, "--quiet"])?;
        want(said.contains(&format!("generation {newest} is durable")), || said.clone())?;
        let left: Vec<PathBuf> = files(&scratch)
            .into_iter()
            .filter(|p| p.to_string_lossy().contains(".tmp-"))
            .collect();
        want(left.is_empty(), || format!("left on the tier: {left:?}"))?;
        Ok(interrupted)
    })?;
    durable(&job)?;
    let dir = job.dir().display().to_string();
    belay(&job, &["verify", &dir])?;
    job.verdict(false, LIMIT)
}

/// Flipped bits on a tier are found before anything runs, and healed from another; flipped bits here are healed from a tier.
fn bit_flips(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "flips", user)?;
    let (a, b) = (directory(&job, user, "a")?, directory(&job, user, "b")?);
    target(&mut job, place, &(pfs("a", &a) + &pfs("b", &b)), "8")?;
    durable(&job)?;
    let dir = job.dir().display().to_string();
    belay(&job, &["flush", &dir])?; // both tiers
    job.kill_all()?;
    belay(&job, &["verify", &dir])?;
    // Here: chunks damaged.
    for chunk in files(&job.dir().join("chunks")) {
        flip(&chunk, rng, 50)?;
    }
    // On the first tier: every pack damaged, so that the second must serve.
    // Pieces of them, of which only who reads them all knows.
    for pack in packs(&a) {
        let mut bytes = io("read", std::fs::read(&pack))?;
        let half = bytes.len() / 2;
        bytes[..half].iter_mut().step_by(4096).for_each(|b| *b ^= 1);
        io("write", std::fs::write(&pack, bytes))?;
    }
    let before = files(&job.work);
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(
        o.status.code() == Some(88) && text(&o).contains("tier a") && text(&o).contains("tier b: whole"),
        || format!("verify: {}: {}", show(o.status), text(&o)),
    )?;
    // It may mark what is damaged here, and nothing else.
    let mut after = files(&job.work);
    after.retain(|f| !(f.starts_with(job.dir().join("gen")) && f.ends_with("damaged")));
    want(after == before, || format!("verify has changed something: {before:?}"))?;
    goes_on(&mut job)?;
    let said = job.output_text();
    want(
        said.contains("was not whole here") && said.contains("brought from a durable tier"),
        || format!("damage that is healed is told: {said}"),
    )?;
    job.kill_all()?;
    want(files(&a).iter().any(|p| p.to_string_lossy().contains("/suspect/")), || {
        format!("nobody left word that packs are damaged: {:?}", files(&a))
    })?;
    // What was damaged on the first tier is copied again from here.
    belay(&job, &["flush", "--check", &dir])?;
    belay(&job, &["verify", &dir])?;
    want(!files(&a).iter().any(|p| p.to_string_lossy().contains("/suspect/")), || {
        format!("marks of packs that are gone: {:?}", files(&a))
    })?;
    for pack in packs(&a) {
        flip(&pack, rng, 2000)?;
    }
    // Nothing but damaged copies: refused by name, nothing runs.
    lose_local(&job)?;
    for pack in packs(&b) {
        flip(&pack, rng, 2000)?;
    }
    // One tier is not there, the other damaged: what is missing and where it may be are named.
    let away = job.work.join("away");
    io("rename", std::fs::rename(&a, &away))?;
    let o = output(job.belay(&["restart", &dir]), LIMIT)?;
    let named = ["tier a: ", "tier b: packs/", "may hold it cannot be read"];
    want(!o.status.success() && named.iter().all(|w| text(&o).contains(w)), || {
        format!("restart without a tier, from a damaged one: {}: {}", show(o.status), text(&o))
    })?;
    io("rename", std::fs::rename(&away, &a))?;
    let o = output(job.belay(&["restart", &dir]), LIMIT)?;
    want(o.status.code() == Some(65) && text(&o).contains("tier "), || {
        format!("restart from damaged tiers: {}: {}", show(o.status), text(&o))
    })?;
    job.left_behind()
}

/// A durable tier without room: the checkpoint stays local, the program goes on, the tier is named; with room again,
/// the same generation becomes durable.
fn tier_full(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "full", user)?;
    let scratch = directory(&job, user, "small")?;
    let mount = |args: &[&str]| -> Result<(), Failure> {
        let s = Command::new("mount").args(args).arg(&scratch).status();
        want(io("mount", s)?.success(), || format!("mount {args:?}"))
    };
    let owner = if user == User::Root {
        "uid=0,gid=0"
    } else {
        "uid=65534,gid=65534"
    };
    mount(&["-t", "tmpfs", "-o", &format!("size=4m,mode=700,{owner}"), "none"])?;
    let result = (|| {
        target(&mut job, place, &pfs("small", &scratch), "8")?;
        let o = job.checkpoint_raw(&["--level", "durable"])?;
        want(
            o.status.code() == Some(92) && text(&o).contains("tier small") && text(&o).to_lowercase().contains("no space"),
            || format!("on a full tier: {}: {}", show(o.status), text(&o)),
        )?;
        job.progress(LIMIT)?;
        want(packs(&scratch).is_empty(), || {
            "an unfinished pack was left on the full tier".into()
        })?;
        mount(&["-o", "remount,size=64m"])?;
        let dir = job.dir().display().to_string();
        belay(&job, &["flush", &dir])?;
        job.kill_all()?;
        lose_local(&job)?;
        goes_on(&mut job)?;
        job.verdict(false, LIMIT)
    })();
    job.kill_all()?;
    let gone = Command::new("umount").arg("-l").arg(&scratch).status();
    result.and(want(io("umount", gone)?.success(), || "umount".into()))
}

/// The program is ended with the checkpoint; the agent stays until the tier has it.
fn stopped(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "stopped", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(
        &mut job,
        place,
        &(pfs("scratch", &scratch) + "[flush]\nrate = \"20M\"\n"),
        "8",
    )?;
    let o = job.checkpoint_raw(&["--level", "durable", "--then", "stop"])?;
    want(o.status.success() && text(&o).contains("durable"), || {
        format!("{}: {}", show(o.status), text(&o))
    })?;
    let s = job.wait(LIMIT)?;
    want(s.code() == Some(85), || format!("launch ended with {}", show(s)))?;
    io("remove", std::fs::remove_dir_all(job.dir().join("gen")))?;
    goes_on(&mut job)?;
    job.verdict(false, LIMIT)
}

const IOPRIO_CLASS_IDLE: i64 = 3;

/// One tier is gone: the other serves, and the first is used again as soon as it is there.
fn one_dead(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "dead", user)?;
    let (a, b) = (directory(&job, user, "a")?, directory(&job, user, "b")?);
    target(&mut job, place, &(pfs("a", &a) + &pfs("b", &b)), "2")?;
    io("remove", std::fs::remove_dir(&a))?;
    let o = job.checkpoint_raw(&["--level", "durable"])?;
    want(o.status.success() && text(&o).contains("note: tier a: "), || {
        format!("with one tier of two: {}: {}", show(o.status), text(&o))
    })?;
    want(!packs(&b).is_empty(), || "nothing on the other tier".into())?;
    directory(&job, user, "a")?;
    durable(&job)?;
    want(!packs(&a).is_empty(), || "nothing on the tier that came back".into())?;
    job.kill_all()?;
    io("remove", std::fs::remove_dir_all(&a))?;
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(
        !o.status.success() && text(&o).contains("tier a") && text(&o).contains("tier b: whole"),
        || format!("verify: {}: {}", show(o.status), text(&o)),
    )?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    job.clear_beat()?;
    let config = job.work.join("belay.toml").display().to_string();
    job.restart(&["--config", &config])?;
    job.progress(LIMIT).map_err(|e| format!("restart from the other tier: {e}"))?;
    job.verdict(false, LIMIT)
}

/// What is not configured or configured wrongly is refused with file, line and key, or with what is needed.
fn refusals(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "refusals", user)?;
    let file = job.work.join("bad.toml");
    let name = file.display().to_string();
    for (config, words) in [
        (
            "[[tier]]\nname = \"x\"\nkind = \"tape\"\n",
            &["bad.toml", "line 3", "kind", "`pfs`"][..],
        ),
        ("[flush]\nrate = \"fast\"\n", &["bad.toml", "line 2", "rate"]),
        (
            "[[tier]]\nname = \"x\"\nkind = \"pfs\"\npath = \"/no/such/place\"\n",
            &["tier x", "/no/such/place"],
        ),
    ] {
        io("write", std::fs::write(&file, config))?;
        let dir = job.dir().display().to_string();
        let o = output(
            job.belay(&["launch", "--config", &name, "--ckpt-dir", &dir, "--", "true"]),
            LIMIT,
        )?;
        let code = o.status.code().unwrap_or(0);
        want(
            (64..128).contains(&code) && words.iter().all(|w| text(&o).contains(w)),
            || format!("{config:?}: {}: {}", show(o.status), text(&o)),
        )?;
    }
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    target(&mut job, place, "", "1")?;
    for level in ["durable", "redundant"] {
        let o = job.checkpoint_raw(&["--level", level])?;
        want(o.status.code() == Some(91) && text(&o).contains(level), || {
            format!("level {level}: {}: {}", show(o.status), text(&o))
        })?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn main() {
    let mut target = Target::new("tiers", &["fault_target"]);
    or_end(Server::prepare(target.place()));
    let tests: [(&str, Test); 31] = [
        ("local_lost", local_lost),
        ("run_without_directory", run_without_directory),
        ("object_store", object_store),
        ("agent_killed", agent_killed),
        ("bit_flips", bit_flips),
        ("tier_full", tier_full),
        ("stopped", stopped),
        ("priority", pace::priority),
        ("retention", kept::retention),
        ("pace", pace::counted),
        ("auto_pace", pace::automatic),
        ("behind_a_failure", pace::behind_a_failure),
        ("left_behind", kept::left_behind),
        ("gone_back", kept::gone_back),
        ("rotten_here", kept::rotten_here),
        ("not_mounted", kept::not_mounted),
        ("not_noted", kept::not_noted),
        ("any_bytes", kept::any_bytes),
        ("one_dead", one_dead),
        ("shut_object", shut::object),
        ("shut_store", shut::store),
        ("shut_tier", shut::tier),
        ("shut_gone", shut::gone),
        ("shut_removal", shut::removal),
        ("refusals", refusals),
        ("sealed_lost", sealed::lost),
        ("sealed_object_store", sealed::object_store),
        ("sealed_hostile", sealed::hostile),
        ("sealed_rotated", sealed::rotated),
        ("sealed_later", sealed::later),
        ("sealed_refusals", sealed::refusals),
    ];
    for (name, test) in tests {
        let runs = |user| match name {
            // Mounting the small file system needs root.
            "tier_full" => am_root(),
            // To whom no mode is a hindrance.
            "shut_removal" => user != User::Root,
            _ => true,
        };
        target.by_user(name, runs, test);
    }
    target.run();
}
