//! Tiers of which something cannot be read, has gone, or cannot be removed.

use super::*;

/// The record that a tier in `dir` has of generation `number`.
fn record(dir: &Path, number: u64) -> Result<PathBuf, Failure> {
    let start = format!("{number:06}-");
    let is_of_it = |p: &PathBuf| {
        let name = p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        name.starts_with(&start) && name.ends_with(".json")
    };
    let found = files(dir).into_iter().find(is_of_it);
    found.ok_or_else(|| format!("no record of generation {number} in {:?}", files(dir)))
}

/// Nobody can read what is at `path`, not even root, until what is returned is renamed to it.
fn shut(job: &Job, path: &Path) -> Result<PathBuf, Failure> {
    let away = job.work.join("away");
    io("rename", std::fs::rename(path, &away))?;
    io("link", std::os::unix::fs::symlink(&away, path))?;
    Ok(away)
}

/// A job with two durable generations, and the tier on which they are.
fn flushed_twice(place: &Place, user: User, label: &str) -> Result<(Job, PathBuf), Failure> {
    let mut job = Job::new(place, label, user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(&mut job, place, &pfs("scratch", &scratch), "2")?;
    durable(&job)?;
    durable(&job)?;
    Ok((job, scratch))
}

/// An object that cannot be read keeps nobody from what does not need it: a restart, a flush, verify and gc name it, and
/// go on.
pub(super) fn object(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut job, scratch) = flushed_twice(place, user, "shut")?;
    job.kill_all()?;
    let dir = job.dir().display().to_string();
    let first = record(&scratch, 1)?;
    let away = shut(&job, &first)?;
    let named = |o: &std::process::Output| text(o).contains("tier scratch: gen/000001-") && text(o).contains("cannot be read");
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(o.status.code() == Some(74) && named(&o), || {
        format!("verify: {}: {}", show(o.status), text(&o))
    })?;
    // The newest needs nothing of it; nor does the one that is named, whatever the newest needs.
    lose_local(&job)?;
    goes_on(&mut job)?;
    durable(&job)?;
    job.kill_all()?;
    io("rename", std::fs::rename(away, &first))?;
    lose_local(&job)?;
    let newest = record(&scratch, 3)?;
    let away = shut(&job, &newest)?;
    let o = output(job.belay(&["restart", &dir]), LIMIT)?;
    want(
        !o.status.success()
            && ["gen/000003-", "cannot be read", "--generation 2"]
                .iter()
                .all(|w| text(&o).contains(w)),
        || format!("restart: {}: {}", show(o.status), text(&o)),
    )?;
    job.clear_beat()?;
    job.restart(&["--generation", "2"])?;
    job.progress(LIMIT)
        .map_err(|e| format!("restart of another generation: {e}"))?;
    io("rename", std::fs::rename(away, &newest))?;
    job.verdict(false, LIMIT)
}

/// The same with a store that fails for one object.
pub(super) fn store(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "broken", user)?;
    CREDENTIALS.iter().for_each(|(key, value)| job.set(key, value));
    let root = job.work.join("store");
    let server = Server::start(Command::new(Server::program(place)), &root, "127.0.0.1:0")?;
    let config = format!("{}timeout = \"2s\"\n", server.tier());
    target(&mut job, place, &config, "2")?;
    durable(&job)?;
    durable(&job)?;
    job.kill_all()?;
    let address = server.address().to_owned();
    drop(server);
    let mut broken = Command::new(Server::program(place));
    broken.arg("--broken=gen/000001-");
    let server = Server::start(broken, &root, &address)?;
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(
        o.status.code() == Some(74) && text(&o).contains("tier cloud: gen/000001-") && text(&o).contains("cannot be read"),
        || format!("verify: {}: {}", show(o.status), text(&o)),
    )?;
    lose_local(&job)?;
    goes_on(&mut job)?;
    durable(&job)?;
    drop(server);
    job.verdict(false, LIMIT)
}

/// Of two tiers one fails: `belay flush` says so and is done, whether an agent does it or not, and the status shows it;
/// where both fail, both are named.
pub(super) fn tier(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "half", user)?;
    let (a, b) = (directory(&job, user, "a")?, directory(&job, user, "b")?);
    target(&mut job, place, &(pfs("a", &a) + &pfs("b", &b)), "2")?;
    io("remove", std::fs::remove_dir(&b))?;
    job.checkpoint()?;
    let dir = job.dir().display().to_string();
    let half = |job: &Job| -> Result<(), Failure> {
        let o = output(job.belay(&["flush", &dir, "--quiet"]), LIMIT)?;
        want(
            o.status.success() && text(&o).contains("belay: tier b: ") && text(&o).contains("generation 1 is durable"),
            || format!("with one tier of two: {}: {}", show(o.status), text(&o)),
        )
    };
    half(&job)?;
    let status: Value = serde_json::from_str(&belay(&job, &["status", &dir, "--json"])?).map_err(|e| e.to_string())?;
    let last = &status["last_error"];
    want(
        last["exit"] == "not_durable" && last["message"].as_str().is_some_and(|m| m.contains("tier b: ")),
        || format!("last error: {last}"),
    )?;
    let away = job.work.join("away");
    io("rename", std::fs::rename(&a, &away))?;
    let none = |job: &Job| -> Result<String, Failure> {
        let o = output(job.belay(&["flush", &dir, "--quiet"]), LIMIT)?;
        let named = ["generation 1 is committed", "tier a: ", "tier b: "];
        want(
            o.status.code() == Some(92) && named.iter().all(|w| text(&o).contains(w)),
            || format!("without a tier: {}: {}", show(o.status), text(&o)),
        )?;
        Ok(text(&o))
    };
    none(&job)?;
    job.kill_all()?;
    none(&job)?;
    io("rename", std::fs::rename(&away, &a))?;
    half(&job)
}

/// What was durable on a tier and has gone is named, and the tier is not whole; a flush copies it again.
pub(super) fn gone(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut job, scratch) = flushed_twice(place, user, "gone")?;
    let dir = job.dir().display().to_string();
    let named = |job: &Job, number: u64| -> Result<(), Failure> {
        let o = output(job.belay(&["verify", &dir]), LIMIT)?;
        let what = format!("tier scratch: generation {number}, which was durable there, is gone");
        let whole = text(&o).contains("tier scratch: whole");
        want(o.status.code() == Some(88) && text(&o).contains(&what) && !whole, || {
            format!("verify: {}: {}", show(o.status), text(&o))
        })
    };
    // Retention may have removed that.
    io("remove", std::fs::remove_file(record(&scratch, 1)?))?;
    belay(&job, &["verify", &dir])?;
    io("remove", std::fs::remove_file(record(&scratch, 2)?))?;
    job.kill_all()?;
    named(&job, 2)?;
    belay(&job, &["flush", &dir])?;
    belay(&job, &["verify", &dir]).map(drop)
}

/// A removal that fails in the middle: `belay list` shows what is left, and the next one removes that.
pub(super) fn removal(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let (mut job, scratch) = flushed_twice(place, user, "removal")?;
    job.kill_all()?;
    let dir = job.dir().display().to_string();
    let record = record(&scratch, 2)?;
    let packs = record.parent().and_then(Path::parent).ok_or("no folder")?.join("packs");
    let mode = |mode| {
        io(
            "chmod",
            std::fs::set_permissions(&packs, std::os::unix::fs::PermissionsExt::from_mode(mode)),
        )
    };
    mode(0o500)?;
    let o = output(job.belay(&["gc", "--all", &dir]), LIMIT)?;
    want(
        !o.status.success() && text(&o).contains("tier scratch: remove packs/"),
        || format!("gc --all: {}: {}", show(o.status), text(&o)),
    )?;
    let list = generations(&job)?;
    want(list.is_empty(), || format!("after all records have gone: {list:?}"))?;
    mode(0o700)?;
    belay(&job, &["gc", "--all", &dir])?;
    let left = files(&scratch);
    want(left.is_empty(), || format!("left on the tier: {left:?}"))
}
