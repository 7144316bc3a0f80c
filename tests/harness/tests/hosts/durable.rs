//! Jobs over several hosts whose checkpoints are copied to a durable tier: a shared directory, an object store.

use super::*;

/// Numbers and levels of the generations in the list, oldest first.
fn levels(job: &Job) -> Result<Vec<(u64, String)>, Failure> {
    let said = job.must(&["list", "--json"])?;
    let list: serde_json::Value = serde_json::from_str(&said).map_err(|e| format!("{e}: {said}"))?;
    let all = list["generations"].as_array().cloned().unwrap_or_default();
    let level = |g: &serde_json::Value| Some((g["generation"].as_u64()?, g["level"].as_str()?.to_owned()));
    all.iter()
        .map(|g| level(g).ok_or_else(|| format!("a generation without number or level: {said}")))
        .collect()
}

/// Level of the newest generation in the list.
fn newest_level(job: &Job) -> Result<String, Failure> {
    Ok(levels(job)?.pop().map(|(_, level)| level).unwrap_or_default())
}

/// A launched job with the tier that `config` says.
fn launched(mut job: Job, place: &Place, config: &str, more: &[&str]) -> Result<Job, Failure> {
    let program = job.program(place, "mpi/mpi_p2p")?;
    let file = job.work.join("belay.toml");
    std::fs::write(&file, config).map_err(|e| e.to_string())?;
    job.options = vec!["--config".into(), file.display().to_string()];
    job.options.extend(more.iter().map(|o| (*o).to_owned()));
    job.launch(&program)?;
    Ok(job)
}

/// Everything dies, and what the hosts share of the job is lost in one way after the other: it comes back on other
/// hosts from its durable tier.
fn losses(job: &mut Job, rounds: std::ops::Range<usize>, rng: &mut Rng) -> Result<(), Failure> {
    let lose = |dir: PathBuf| std::fs::remove_dir_all(&dir).map_err(|e| format!("remove {}: {e}", dir.display()));
    for n in rounds {
        let round = |e: Failure| format!("round {n}: {e}");
        std::thread::sleep(Duration::from_millis(rng.below(500)));
        job.must(&["checkpoint", "--quiet", "--level", "durable"]).map_err(round)?;
        if newest_level(job)? != "durable" {
            return Err(round(job.must(&["list"])?));
        }
        if n == 1 {
            // What follows is perhaps durable and perhaps not.
            job.checkpoint().map_err(round)?;
            std::thread::sleep(Duration::from_millis(rng.below(400)));
        }
        job.crash();
        let dir = PathBuf::from(job.dir());
        match n {
            0 | 1 => lose(dir)?,
            2 => lose(dir.join("nodes/1/chunks"))?,
            _ => {
                for chunk in files(&dir.join("nodes/1/chunks"), ".bpg") {
                    let mut bytes = std::fs::read(&chunk).map_err(|e| e.to_string())?;
                    // In every page.
                    bytes.iter_mut().step_by(4096).for_each(|b| *b ^= 1);
                    std::fs::write(&chunk, bytes).map_err(|e| e.to_string())?;
                }
            }
        }
        job.shift(n + 1);
        let options = job.options.clone();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        job.restart_at(&options).map_err(|e| round(format!("restart: {e}")))?;
    }
    Ok(())
}

/// A file of keys, and the configuration that names it.
fn sealing(job: &Job) -> Result<String, Failure> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let path = job.work.join("keys");
    let file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&path);
    file.and_then(|mut f| f.write_all("5".repeat(64).as_bytes()))
        .map_err(|e| format!("write {}: {e}", path.display()))?;
    Ok(format!("[encryption]\nkey_file = \"{}\"\n", path.display()))
}

/// An S3 server outside of all hosts, on which everything is sealed. What the parts have comes from there, too.
pub(super) fn objects(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let job = Job::new(place, "hosts-objects", 2, 3)?.unhurried();
    let (command, address) = job.hosts.outside(&Server::program(place))?;
    let server = Server::start(command, &job.work.join("store"), &format!("{address}:0"))?;
    let config = server.tier() + &sealing(&job)?;
    let mut job = launched(job, place, &config, &[])?;
    losses(&mut job, 0..1, rng)?;
    job.must(&["verify"])?;
    let store = job.work.join("store");
    for kind in [".bpk", ".json"] {
        let objects: Vec<PathBuf> = files(&store, kind)
            .into_iter()
            .filter(|f| f.to_string_lossy().contains("/prefix/"))
            .collect();
        let is_sealed = |f: &PathBuf| std::fs::read(f).is_ok_and(|b| b.starts_with(b"BELAYSEA"));
        let of_part = objects.iter().any(|f| f.to_string_lossy().contains("/nodes/1/"));
        want(of_part && objects.iter().all(is_sealed), || {
            format!("not all sealed: {objects:?}")
        })?;
    }
    job.verdict()
}

/// The S3 server vanishes while it is written to, and comes back: meanwhile the job and its checkpoints go on, which
/// are local only, and then they are durable again without anybody's doing.
pub(super) fn server_lost(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let job = Job::new(place, "hosts-server-lost", 2, 3)?.unhurried();
    let (command, address) = job.hosts.outside(&Server::program(place))?;
    let store = job.work.join("store");
    let server = Server::start(command, &store, &format!("{address}:0"))?;
    let address = server.address().to_owned();
    let tier = format!("{}timeout = \"20s\"\n", server.tier());
    let mut job = launched(job, place, &tier, &["--ckpt-interval", "1s"])?;
    job.must(&["checkpoint", "--quiet", "--level", "durable"])?;
    // At any moment of a flush, or between two.
    std::thread::sleep(Duration::from_millis(rng.below(1500)));
    drop(server);
    let gone = levels(&job)?;
    let o = job.belay(&["checkpoint", "--quiet", "--level", "durable", &job.dir()])?;
    want(o.status.code() == Some(92) && text(&o).contains("cloud"), || {
        format!("durable without the server: {}: {}", show(o.status), text(&o))
    })?;
    want(newest_level(&job)? == "local", || {
        format!("{gone:?}, then {:?}", levels(&job))
    })?;
    let says_so = || job.must(&["status", "--json"]).is_ok_and(|s| s.contains("is not durable"));
    job.comes_true("the status says that a checkpoint is not durable", says_so)?;
    // The interval goes on too.
    let last = job.newest();
    job.comes_true("checkpoints go on", || job.newest() > last + 1)?;
    job.progress()?;
    let before = levels(&job)?;
    want(before.last().is_some_and(|(_, level)| level == "local"), || {
        format!("{before:?}")
    })?;
    let last = before.last().map_or(0, |(n, _)| *n);
    let (command, _) = job.hosts.outside(&Server::program(place))?;
    let _server = Server::start(command, &store, &address)?;
    let is_durable = |(n, level): &(u64, String)| *n >= last && level == "durable";
    job.comes_true("a checkpoint is durable again", || {
        levels(&job).is_ok_and(|l| l.iter().any(is_durable))
    })?;
    job.crash();
    let dir = PathBuf::from(job.dir());
    std::fs::remove_dir_all(&dir).map_err(|e| format!("remove {}: {e}", dir.display()))?;
    job.shift(1);
    let options = job.options[..2].to_vec();
    job.restart_at(&options.iter().map(String::as_str).collect::<Vec<_>>())?;
    job.progress()?;
    job.verdict()
}

/// A directory that all hosts see; then what is there is damaged.
pub(super) fn directory(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let job = Job::new(place, "hosts-durable", 2, 3)?.unhurried();
    let scratch = job.work.join("scratch");
    std::fs::create_dir(&scratch).map_err(|e| e.to_string())?;
    let tier = format!(
        "[[tier]]\nname = \"scratch\"\nkind = \"pfs\"\npath = \"{}\"\n",
        scratch.display()
    );
    let mut job = launched(job, place, &tier, &[])?;
    losses(&mut job, 0..4, rng)?;
    // What an older generation has here is damaged still.
    let two_more = |job: &Job| (0..2).try_for_each(|_| job.must(&["checkpoint", "--quiet", "--level", "durable"]).map(drop));
    two_more(&job)?;
    // What a part has on the tier is lost: that is said, and the next checkpoints are durable again.
    job.must(&["verify"])?;
    for pack in files(&scratch, "/nodes/1/packs/") {
        std::fs::remove_file(pack).map_err(|e| e.to_string())?;
    }
    let o = job.belay(&["verify", &job.dir()])?;
    if o.status.success() || !text(&o).contains("not everything of part 1") {
        return Err(format!(
            "verify without the packs of a part: {}: {}",
            show(o.status),
            text(&o)
        ));
    }
    two_more(&job)?;
    job.must(&["verify"])?;
    let held = files(&scratch, "/gen/").len();
    if held != 4 {
        return Err(format!("two generations have {held} records: {:?}", files(&scratch, "/gen/")));
    }
    job.verdict()?;
    // What still ends would answer.
    job.crash();
    // The newest generation lacks something of a part: the one before stays, whatever is asked for.
    let held = files(&scratch, "/nodes/1/packs/");
    let newest = held
        .iter()
        .filter_map(|p| p.file_name()?.to_str()?.get(..6).map(str::to_owned))
        .max();
    let newest = newest.ok_or("no packs of a part")?;
    for pack in held
        .iter()
        .filter(|p| p.to_string_lossy().contains(&format!("/packs/{newest}")))
    {
        std::fs::remove_file(pack).map_err(|e| e.to_string())?;
    }
    job.must(&["gc", "--keep", "1"])?;
    let records = files(&scratch, "/gen/");
    let of_root = records.iter().filter(|p| !p.to_string_lossy().contains("/nodes/")).count();
    if of_root != 2 {
        return Err(format!("the last whole generation is gone: {records:?}"));
    }
    job.must(&["flush"])?;
    job.must(&["gc", "--all"])?;
    match files(&scratch, "/") {
        left if left.is_empty() => Ok(()),
        left => Err(format!("left on the tier: {left:?}")),
    }
}
