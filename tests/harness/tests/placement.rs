//! Local tiers: chunks that are written to memory or another disk first and moved to the job directory beside the program.
//!
//! The rules that every test here checks: whatever is killed when, what was committed restarts from wherever its chunks
//! are; nothing is left in a tier when the job has ended.

use belay_tests::expect::{io, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User, NOBODY};
use belay_tests::rng::Rng;
use belay_tests::runner::rounds;
use belay_tests::target::Target;
use belay_tests::{procs, Failure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(150);
const POLICIES: [&str; 4] = ["adaptive", "fastest-only", "local-only", "naive"];

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

/// Two local tiers of `mib` each, and moves to the job directory at `rate` a second.
fn tiers(job: &Job, user: User, mib: [u64; 2], rate: &str) -> Result<[PathBuf; 2], Failure> {
    let mut config = format!("[flush]\nrate = \"{rate}\"\n");
    let dirs = ["memory", "local"].map(|kind| job.work.join(kind));
    for (dir, mib) in dirs.iter().zip(mib) {
        let kind = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !dir.exists() {
            io("create", std::fs::create_dir(dir))?;
        }
        if user == User::Ordinary && am_root() {
            io("give away", std::os::unix::fs::chown(dir, Some(NOBODY), Some(NOBODY)))?;
        }
        let at = dir.display();
        config += &format!("[[tier]]\nname = \"{kind}-tier\"\nkind = \"{kind}\"\npath = \"{at}\"\ncapacity = \"{mib}M\"\n");
    }
    io("write", std::fs::write(job.work.join("belay.toml"), config))?;
    Ok(dirs)
}

fn launch(job: &mut Job, place: &Place, policy: &str, megabytes: &str) -> Result<(), Failure> {
    let program = place.programs().join("fault_target").display().to_string();
    let config = job.work.join("belay.toml").display().to_string();
    job.launch(
        &["--config", &config, "--placement", policy].map(String::from),
        &[program, megabytes.into()],
    )?;
    job.progress(LIMIT)
}

fn belay(job: &Job, args: &[&str]) -> Result<String, Failure> {
    let o = output(job.belay(args), LIMIT)?;
    want(o.status.success(), || {
        format!("belay {args:?}: {}: {}", show(o.status), text(&o))
    })?;
    Ok(String::from_utf8_lossy(&o.stdout).into_owned())
}

/// Kills every process of the job, the agent first: it must not see the others end, and commit what is left of them.
fn kill(job: &mut Job) -> Result<(), Failure> {
    let is_belay = |p: &i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.starts_with("belay"));
    // A checkpoint that still ends would find the program stopped.
    let mut all: Vec<i32> = procs::marked(&job.work).into_iter().map(|(p, _)| p).collect();
    all.extend(job.pid().map(procs::tree).unwrap_or_default());
    for p in all.iter().copied().filter(|p| is_belay(p)) {
        procs::signal(p, libc::SIGKILL);
    }
    for p in all {
        procs::kill_tree(p);
    }
    job.kill_all()
}

fn goes_on(job: &mut Job) -> Result<(), Failure> {
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT).map_err(|e| format!("restart: {e}"))
}

/// Chunk files in `dir` and the directories in it, finished and unfinished.
fn chunks(dir: &Path) -> [usize; 2] {
    let mut found = [0, 0];
    for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = e.file_name().to_string_lossy().into_owned();
        if e.path().is_dir() {
            let inner = chunks(&e.path());
            found = [found[0] + inner[0], found[1] + inner[1]];
        } else if name.ends_with(".bpg") {
            found[usize::from(name.starts_with(".tmp-"))] += 1;
        }
    }
    found
}

fn kinds(job: &Job) -> Result<Vec<String>, Failure> {
    let dir = job.dir().display().to_string();
    let list: Value = serde_json::from_str(&belay(job, &["list", &dir, "--json"])?).map_err(|e| e.to_string())?;
    let newest = list["generations"]
        .as_array()
        .and_then(|g| g.last())
        .cloned()
        .unwrap_or_default();
    let tiers = newest["tiers"].as_array().cloned().unwrap_or_default();
    Ok(tiers.iter().filter_map(|t| t["kind"].as_str().map(String::from)).collect())
}

/// With each policy, chunks go where it says, wait there while they are moved slowly, and a job killed meanwhile goes on from them.
fn policies(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    for policy in POLICIES {
        let with = |e: String| format!("{policy}: {e}");
        let mut job = Job::new(place, policy, user)?;
        // Room for a chunk of each that writes, whatever it becomes; after the first few nothing is moved for an hour.
        let dirs = tiers(&job, user, [1024, 1024], "1K")?;
        launch(&mut job, place, policy, "24").map_err(with)?;
        job.checkpoint().map_err(with)?;
        let there = [chunks(&dirs[0])[0], chunks(&dirs[1])[0]];
        let expected = if policy == "local-only" { 1 } else { 0 };
        let only = policy == "adaptive" || there[1 - expected] == 0;
        want(there[expected] > 0 && only, || {
            format!("{policy}: chunks in memory and on the local disk: {there:?}")
        })?;
        let kind = ["memory", "local"][expected];
        let kinds = kinds(&job)?;
        want(kinds.iter().any(|k| k == kind), || {
            format!("{policy}: the list names {kinds:?}")
        })?;
        let dir = job.dir().display().to_string();
        belay(&job, &["verify", &dir]).map_err(with)?;
        rng.pause(300);
        kill(&mut job)?;
        goes_on(&mut job).map_err(with)?;
        belay(&job, &["verify", &dir]).map_err(with)?;
        job.verdict(false, LIMIT).map_err(with)?;
        want(dirs.iter().all(|d| chunks(d) == [0, 0]), || {
            format!("{policy}: chunks are left in a tier")
        })?;
        belay(&job, &["verify", &dir]).map_err(with)?;
    }
    Ok(())
}

/// What `belay gc` leaves: as many generations as were asked for, and the newest that does not depend on memory.
fn collected(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "collected", user)?;
    let dirs = tiers(&job, user, [1024, 4], "8M")?;
    launch(&mut job, place, "fastest-only", "4")?;
    job.checkpoint()?;
    let begin = Instant::now();
    while chunks(&dirs[0])[0] > 0 {
        want(begin.elapsed() < LIMIT, || "the first is not moved".into())?;
        std::thread::sleep(Duration::from_millis(20));
    }
    // These are moved some seconds later.
    for _ in 0..3 {
        job.checkpoint()?;
    }
    kill(&mut job)?;
    want(chunks(&dirs[0])[0] > 0, || "all has been moved".into())?;
    let dir = job.dir().display().to_string();
    belay(&job, &["gc", &dir])?;
    // The machine has been switched off and on.
    for tier in std::fs::read_dir(&dirs[0]).into_iter().flatten().flatten() {
        io("remove", std::fs::remove_dir_all(tier.path()))?;
    }
    goes_on(&mut job)?;
    job.verdict(false, LIMIT)
}

/// Tiers far smaller than the program: writers wait for moves, or write to the job directory; everything is killed at
/// random moments.
fn small_and_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    for n in 0..rounds(8) {
        let policy = POLICIES[(n % 4) as usize];
        let round = |e: String| format!("round {n}, {policy}: {e}");
        let mut job = Job::new(place, "small", user)?;
        let dirs = tiers(&job, user, [4 + 5 * (n % 2), 9], "200M")?;
        launch(&mut job, place, policy, "40").map_err(round)?;
        for _ in 0..2 {
            job.checkpoint().map_err(round)?;
            // In the middle of a further one, or of the moves after it.
            let dir = job.dir().display().to_string();
            let mut child = io("start belay", job.belay(&["checkpoint", "--quiet", &dir]).spawn())?;
            rng.pause(400);
            kill(&mut job)?;
            io("wait", child.wait())?;
            goes_on(&mut job).map_err(round)?;
        }
        job.checkpoint().map_err(round)?;
        let dir = job.dir().display().to_string();
        belay(&job, &["verify", &dir]).map_err(round)?;
        job.verdict(false, LIMIT).map_err(round)?;
        let left: Vec<_> = dirs.iter().chain([&job.dir()]).map(|d| chunks(d)).collect();
        want(left[0] == [0, 0] && left[1] == [0, 0] && left[2][1] == 0, || {
            format!("round {n}, {policy}: left in tiers and job directory: {left:?}")
        })?;
    }
    Ok(())
}

/// What lay in memory is gone, as after a power cut: the job goes on from the newest generation of which all is at
/// rest, which is still there although newer ones were to be kept in its place.
fn power_cut(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "cut", user)?;
    let program = place.programs().join("fault_target").display().to_string();
    job.launch(&["--keep", "1"].map(String::from), &[program, "24".into()])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    kill(&mut job)?;
    // From now on chunks are written to memory; after the first few nothing is moved for an hour.
    let dirs = tiers(&job, user, [64, 64], "1K")?;
    let config = job.work.join("belay.toml").display().to_string();
    job.clear_beat()?;
    job.restart(&["--config", &config])?;
    job.progress(LIMIT)?;
    for _ in 0..4 {
        // Some more memory each time.
        job.clear_beat()?;
        job.progress(LIMIT)?;
        job.checkpoint()?;
    }
    want(chunks(&dirs[0])[0] > 0, || "nothing lies in memory".into())?;
    let before = belay(&job, &["list", &job.dir().display().to_string()])?;
    kill(&mut job)?;
    io("remove", std::fs::remove_dir_all(&dirs[0]))?;
    goes_on(&mut job).map_err(|e| format!("{e}; before: {before}"))?;
    job.verdict(false, LIMIT)
}

/// Waits until no chunk lies in `tier` any more.
fn until_home(tier: &Path) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    while chunks(tier) != [0, 0] {
        want(Instant::now() < end, || "chunks are not moved home".into())?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Tiers that are not there are named at the launch; one that goes away while the job runs harms nothing, nor a restart.
fn gone(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "gone", user)?;
    let dirs = tiers(&job, user, [64, 64], "500M")?;
    let config = job.work.join("belay.toml").display().to_string();
    let dir = job.dir().display().to_string();
    io("remove", std::fs::remove_dir(&dirs[1]))?;
    let o = output(
        job.belay(&["launch", "--config", &config, "--ckpt-dir", &dir, "--", "true"]),
        LIMIT,
    )?;
    want(o.status.code() == Some(91) && text(&o).contains("local-tier"), || {
        format!("a tier that is not there: {}: {}", show(o.status), text(&o))
    })?;
    let o = output(job.belay(&["launch", "--placement", "fast", "--", "true"]), LIMIT)?;
    want(o.status.code() == Some(64) && text(&o).contains("fastest-only"), || {
        format!("a policy that is none: {}: {}", show(o.status), text(&o))
    })?;
    io("remove", std::fs::remove_dir_all(job.dir()))?;
    tiers(&job, user, [64, 64], "500M")?;
    let said = belay(&job, &["calibrate", "--config", &config])?;
    want(said.contains("9 writers") && said.contains("local-tier"), || said.clone())?;
    launch(&mut job, place, "adaptive", "4")?;
    job.checkpoint()?;
    until_home(&dirs[0])?;
    io("remove", std::fs::remove_dir_all(&dirs[0]))?;
    job.checkpoint()?;
    // What lies in a tier that goes is lost.
    until_home(&dirs[1])?;
    kill(&mut job)?;
    io("remove", std::fs::remove_dir_all(&dirs[1]))?;
    goes_on(&mut job)?;
    job.checkpoint()?;
    belay(&job, &["verify", &dir])?;
    job.verdict(false, LIMIT)
}

/// The list of the tiers is damaged: what has been moved to the job directory restarts.
fn damaged_list(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "damaged-list", user)?;
    let dirs = tiers(&job, user, [256, 256], "500M")?;
    launch(&mut job, place, "adaptive", "8")?;
    job.checkpoint()?;
    dirs.iter().try_for_each(|d| until_home(d))?;
    kill(&mut job)?;
    io("damage", std::fs::write(job.dir().join("places.json"), "[{"))?;
    goes_on(&mut job)?;
    want(job.output_text().contains("places.json"), || {
        format!("nothing was said of the damage: {}", job.output_text())
    })?;
    job.verdict(false, LIMIT)
}

/// A local tier is away while all checkpoints are removed and another job begins in the job directory: what comes back
/// with the tier takes nobody's place.
fn came_back(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "back", user)?;
    let [_, local] = tiers(&job, user, [64, 64], "200K")?;
    launch(&mut job, place, "local-only", "8")?;
    job.checkpoint()?;
    kill(&mut job)?;
    want(chunks(&local)[0] > 0, || "everything is home already".into())?;
    let (dir, away) = (job.dir().display().to_string(), job.work.join("away"));
    io("rename", std::fs::rename(&local, &away))?;
    let said = belay(&job, &["gc", "--all", &dir])?;
    job.clear_beat()?;
    let program = place.programs().join("fault_target").display().to_string();
    job.launch(&[], &[program, "8".into()])?;
    job.progress(LIMIT)?;
    for _ in 0..2 {
        job.checkpoint()?;
    }
    kill(&mut job)?;
    io("rename", std::fs::rename(&away, &local))?;
    for _ in 0..2 {
        belay(&job, &["verify", &dir])?;
        goes_on(&mut job)?;
        job.checkpoint()?;
        kill(&mut job)?;
    }
    goes_on(&mut job)?;
    job.verdict(false, LIMIT)?;
    want(said.contains("is forgotten"), || said.clone())
}

/// Nothing of a job that runs is removed in its tiers by `gc` of a copy of its directory.
fn copied(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "copied", user)?;
    let [_, local] = tiers(&job, user, [64, 64], "200K")?;
    launch(&mut job, place, "local-only", "8")?;
    job.checkpoint()?;
    let copy = job.work.join("copy");
    let s = io(
        "cp",
        std::process::Command::new("cp").arg("-a").args([&job.dir(), &copy]).status(),
    )?;
    want(s.success(), || "cp".into())?;
    job.checkpoint()?;
    let (dir, copy) = (job.dir().display().to_string(), copy.display().to_string());
    let before = chunks(&local);
    let said = belay(&job, &["gc", &copy])? + &belay(&job, &["gc", "--all", &copy])?;
    want(before[0] > 0 && chunks(&local)[0] > 0, || {
        format!("{before:?} chunks before, {:?} after", chunks(&local))
    })?;
    belay(&job, &["verify", &dir])?;
    let why = "of which this is a copy, has it";
    want(said.matches(why).count() > 1, || said.clone())?;
    kill(&mut job)?;
    goes_on(&mut job)?;
    job.verdict(false, LIMIT)?;
    want(
        chunks(&local) == [0, 0] && !local.read_dir().is_ok_and(|mut d| d.next().is_some()),
        || "something is left in the tier".into(),
    )
}

fn main() {
    let mut target = Target::new("placement", &["fault_target"]);
    let tests: [(&str, Test); 8] = [
        ("collected", collected),
        ("policies", policies),
        ("damaged_list", damaged_list),
        ("small_and_killed", small_and_killed),
        ("power_cut", power_cut),
        ("gone", gone),
        ("came_back", came_back),
        ("copied", copied),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, test);
    }
    target.run();
}
