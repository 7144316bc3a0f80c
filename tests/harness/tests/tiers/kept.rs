//! What tiers keep: as many generations as were asked for, and those that the job directory does not know of.

use super::*;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Many generations: each tier keeps as many as were asked for, also with flushes that are slower than checkpoints; `gc
/// --all` empties the tier too.
pub(super) fn retention(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "keep", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(
        &mut job,
        place,
        &(pfs("scratch", &scratch) + "[flush]\nrate = \"60M\"\n"),
        "4",
    )?;
    for _ in 0..8 {
        job.checkpoint()?;
    }
    for _ in 0..3 {
        durable(&job)?;
    }
    let end = Instant::now() + LIMIT;
    loop {
        let list = generations(&job)?;
        let on = |tier: &str| {
            let holds = |g: &&Value| g["tiers"].as_array().into_iter().flatten().any(|t| t["tier"] == tier);
            list.iter().filter(holds).count()
        };
        if (on("job"), on("scratch")) == (2, 2) {
            break;
        }
        want(Instant::now() < end, || format!("kept: {list:?}"))?;
        std::thread::sleep(Duration::from_millis(100));
    }
    job.verdict(false, LIMIT)?;
    let dir = job.dir().display().to_string();
    belay(&job, &["gc", "--all", &dir])?;
    let left = files(&scratch);
    want(left.is_empty(), || format!("left on the tier: {left:?}"))
}

/// The job goes on from a job directory restored from a backup: what it does not know of stays on the tier, is named,
/// and what follows is durable.
pub(super) fn left_behind(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "behind", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(&mut job, place, &pfs("scratch", &scratch), "2")?;
    durable(&job)?;
    job.kill_all()?;
    let backup = job.work.join("backup");
    let copy = |from: &Path, to: &Path| -> Result<(), Failure> {
        let s = io("cp", Command::new("cp").arg("-a").args([from, to]).status())?;
        want(s.success(), || format!("cp {from:?} {to:?}"))
    };
    copy(&job.dir(), &backup)?;
    goes_on(&mut job)?;
    durable(&job)?;
    durable(&job)?;
    job.kill_all()?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    copy(&backup, &job.dir())?;
    goes_on(&mut job)?;
    let before = packs(&scratch);
    let o = job.checkpoint_raw(&["--level", "durable"])?;
    want(
        o.status.code() == Some(92) && text(&o).contains("holds generation 3 of this job"),
        || format!("beside later generations: {}: {}", show(o.status), text(&o)),
    )?;
    want(packs(&scratch) == before, || "packs of later generations were removed".into())?;
    // What was made here is newer, and is not overwritten with what the other one made.
    job.kill_all()?;
    goes_on(&mut job)?;
    let said = job.output_text();
    let using = "another copy of the job directory made generation 3, which is on a tier: using generation 2";
    want(said.contains(using), || format!("restart: {said}"))?;
    belay(&job, &["verify", &job.dir().display().to_string()])?;
    durable(&job)?;
    job.kill_all()?;
    lose_local(&job)?;
    goes_on(&mut job)?;
    want(generations(&job)?.last().is_some_and(|g| g["generation"] == 4), || {
        "not from the fourth generation".into()
    })?;
    job.kill_all()?;
    // Numbers of generations that cannot be read now are not used again.
    let path = job.dir().join("tiers/scratch.json");
    let mut notes: Value = serde_json::from_slice(&io("read", std::fs::read(&path))?).map_err(|e| e.to_string())?;
    notes["locked"] = serde_json::json!({"40": "its key is missing"});
    notes["newest"] = 41.into();
    io("write", std::fs::write(&path, notes.to_string()))?;
    job.clear_beat()?;
    job.restart(&["--generation", "4"])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    want(generations(&job)?.iter().any(|g| g["generation"] == 42), || {
        format!("generations: {:?}", generations(&job))
    })?;
    job.verdict(false, LIMIT)
}

/// The job is restarted from an old generation: until it has a checkpoint of its own that one stays, here and on the
/// tier, and the newer ones, which have been given up, are not copied there.
pub(super) fn gone_back(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "goneback", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(
        &mut job,
        place,
        &(pfs("scratch", &scratch) + "[levels]\ndurable = \"every 3\"\n"),
        "2",
    )?;
    durable(&job)?;
    let on = |job: &Job, tier: &str| -> Result<Vec<u64>, Failure> {
        let all = generations(job)?;
        let holds = |g: &&Value| g["tiers"].as_array().into_iter().flatten().any(|t| t["tier"] == tier);
        Ok(all.iter().filter(holds).filter_map(|g| g["generation"].as_u64()).collect())
    };
    for _ in 0..2 {
        job.checkpoint()?;
    }
    durable(&job)?;
    job.checkpoint()?;
    let old = (on(&job, "job")?, on(&job, "scratch")?);
    want(old == (vec![4, 5], vec![1, 4]), || format!("here and there: {old:?}"))?;
    for _ in 0..2 {
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&["--generation", "1"])?;
        job.progress(LIMIT)?;
        // Nothing is copied and removed meanwhile.
        std::thread::sleep(Duration::from_secs(2));
        let now = (on(&job, "job")?, on(&job, "scratch")?);
        want(now == (vec![1, 4, 5], vec![1, 4]), || {
            format!("here and there, after a restart from the first: {now:?}")
        })?;
    }
    durable(&job)?;
    let now = (on(&job, "job")?, on(&job, "scratch")?);
    want(now == (vec![5, 6], vec![4, 6]), || {
        format!("here and there, after the next checkpoint: {now:?}")
    })?;
    job.verdict(false, LIMIT)
}

/// What lies in the job directory rots, and a flush comes across that: the program still has it, so the next checkpoint
/// is whole, and durable.
pub(super) fn rotten_here(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "rottenhere", user)?;
    let scratch = directory(&job, user, "scratch")?;
    let config = pfs("scratch", &scratch) + "[levels]\ndurable = \"every 9\"\n";
    target(&mut job, place, &config, "8")?;
    durable(&job)?;
    job.checkpoint()?;
    let chunks = files(&job.dir().join("chunks"));
    for chunk in &chunks {
        flip(chunk, rng, 40)?;
    }
    // What the tier has need not be read here.
    for pack in packs(&scratch) {
        io("remove", std::fs::remove_file(pack))?;
    }
    let o = job.checkpoint_raw(&["--level", "durable"])?;
    want(o.status.code() == Some(92), || {
        format!("of damaged chunks: {}: {}", show(o.status), text(&o))
    })?;
    durable(&job)?;
    want(text(&o).contains("shares nothing with those before"), || text(&o))?;
    let all = generations(&job)?;
    let found = all.iter().find(|g| g["generation"] == 3);
    want(found.is_some_and(|g| g["whole"] == false), || format!("{all:?}"))?;
    job.kill_all()?;
    goes_on(&mut job)?;
    want(!job.output_text().contains("damaged"), || job.output_text())?;
    job.verdict(false, LIMIT)
}

/// A tier's file system is not mounted at one restart, so that the tier looks empty: nothing begins anew over what it
/// holds, then or later, and what it holds restarts when it is there again.
pub(super) fn not_mounted(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "notmounted", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(&mut job, place, &pfs("scratch", &scratch), "2")?;
    durable(&job)?;
    job.kill_all()?;
    lose_local(&job)?;
    let (dir, config) = (
        job.dir().display().to_string(),
        job.work.join("belay.toml").display().to_string(),
    );
    let away = job.work.join("away");
    io("rename", std::fs::rename(&scratch, &away))?;
    directory(&job, user, "scratch")?;
    let refused = |args: &[&str]| -> Result<(), Failure> {
        let o = output(job.belay(args), LIMIT)?;
        want(matches!(o.status.code(), Some(64..128)), || {
            format!("{args:?}: {}: {}", show(o.status), text(&o))
        })
    };
    refused(&["restart", &dir])?;
    let program = place.programs().join("fault_target").display().to_string();
    let begin = ["--config", &config, "--ckpt-dir", &dir, "--"];
    let again = [&["run"], &begin[..], &[&program, "2"]].concat();
    let other = |how| [&[how], &begin[..], &["true"]].concat();
    refused(&again)?;
    for how in ["run", "launch"] {
        refused(&other(how))?;
    }
    io("remove", std::fs::remove_dir_all(&scratch))?;
    io("rename", std::fs::rename(&away, &scratch))?;
    for how in ["run", "launch"] {
        refused(&other(how))?;
    }
    goes_on(&mut job)?;
    job.verdict(false, LIMIT)
}

/// The agent is killed when the tier has removed an old generation, and before that is noted: nothing is missed there.
pub(super) fn not_noted(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "notnoted", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(&mut job, place, &pfs("scratch", &scratch), "2")?;
    durable(&job)?;
    durable(&job)?;
    let notes = job.dir().join("tiers/scratch.json");
    let before = io("read", std::fs::read(&notes))?;
    durable(&job)?;
    job.kill_all()?;
    io("write", std::fs::write(&notes, &before))?;
    let dir = job.dir().display().to_string();
    belay(&job, &["verify", &dir])?;
    // But nothing that is newer than all that are there.
    for record in files(&scratch)
        .iter()
        .filter(|f| f.parent().is_some_and(|p| p.ends_with("gen")))
    {
        io("remove", std::fs::remove_file(record))?;
    }
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(o.status.code() == Some(88) && text(&o).contains("is gone"), || {
        format!("without any: {}: {}", show(o.status), text(&o))
    })
}

/// A lost job directory whose path is no text is found again, and another one that looks like it is not taken for it.
pub(super) fn any_bytes(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "bytes", user)?;
    let scratch = directory(&job, user, "scratch")?;
    let config = job.work.join("belay.toml");
    io("write", std::fs::write(&config, pfs("scratch", &scratch)))?;
    let [acute, circumflex] = [&b"\xe9t\xe9"[..], b"\xeat\xe9"].map(OsStr::from_bytes);
    for name in [acute, circumflex] {
        directory(&job, user, name)?;
    }
    let config = config.display().to_string();
    let program = place.programs().join("fault_target").display().to_string();
    let inside = |job: &Job, name: &OsStr, words: &[&str]| {
        let mut c = job.belay(words);
        c.current_dir(job.work.join(name));
        c
    };
    for (round, (name, expected)) in [(acute, 1), (circumflex, 1), (acute, 2)].into_iter().enumerate() {
        job.clear_beat()?;
        job.start(inside(&job, name, &["run", "--config", &config, "--", &program, "2"]))?;
        job.progress(LIMIT)?;
        let o = output(inside(&job, name, &["checkpoint", "--level", "durable"]), LIMIT)?;
        let said = text(&o);
        want(
            o.status.success() && said.contains(&format!("generation {expected}:")),
            || format!("round {round}, not generation {expected}: {}: {said}", show(o.status)),
        )?;
        job.kill_all()?;
        io("remove", std::fs::remove_dir_all(job.work.join(name).join("belay-job")))?;
    }
    Ok(())
}
