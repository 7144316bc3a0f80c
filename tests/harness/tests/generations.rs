//! Many generations: each one that is kept restarts, with the state that it was taken of; the automatic interval.

use belay_tests::expect::want;
use belay_tests::job::Job;
use belay_tests::orders::{give, order};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::{procs, Failure};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(120);

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

/// `belay launch` of a test program with its arguments.
fn launch(job: &mut Job, place: &Place, options: &[&str], program: &[&str]) -> Result<(), Failure> {
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    let mut argv = vec![place.programs().join(program[0]).display().to_string()];
    argv.extend(program[1..].iter().map(|a| (*a).to_owned()));
    job.launch(&options, &argv)?;
    job.progress(PATIENCE)
}

/// The whole generations, oldest first.
fn generations(job: &Job) -> Result<Vec<u64>, Failure> {
    let s = job.status()?;
    let list = s["generations"].as_array().ok_or("no generations in the status")?;
    Ok(list
        .iter()
        .filter(|g| g["whole"] == true)
        .filter_map(|g| g["generation"].as_u64())
        .collect())
}

fn log(job: &Job) -> String {
    let logs = std::fs::read_dir(job.dir().join("log")).into_iter().flatten().flatten();
    logs.filter_map(|e| std::fs::read_to_string(e.path()).ok()).collect()
}

/// What the log says about each committed checkpoint.
fn committed(job: &Job) -> Vec<serde_json::Value> {
    let lines = log(job);
    let lines = lines.lines().filter(|l| l.contains("checkpoint committed"));
    lines
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok())
        .map(|l| l["fields"].clone())
        .collect()
}

/// Sum of a number that the log gives with each committed checkpoint.
fn logged(job: &Job, field: &str) -> u64 {
    committed(job).iter().filter_map(|l| l[field].as_u64()).sum()
}

/// Every kept generation restarts with the memory of its own step, also those whose chunks were gathered anew meanwhile.
fn every_generation(differential: &str, program: &[&str], place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    const STEPS: u64 = 13;
    const KEEP: usize = 5;
    let mut job = Job::new(place, "every", user)?;
    job.set("BELAY_TEST_LONG", "1");
    launch(&mut job, place, &["--keep", "5", "--differential", differential], program)?;
    for step in 1..=STEPS {
        order(&mut job, &format!("go {step}"))?;
        job.checkpoint()?;
    }
    let written: Vec<u64> = committed(&job).iter().filter_map(|l| l["pages_written"].as_u64()).collect();
    // The first step changes all of 3,072 pages, the fourth none.
    want(
        written.len() == STEPS as usize && written[0] > 2000 && written[3] < 300,
        || format!("pages written: {written:?}"),
    )?;
    let kept = generations(&job)?;
    want(kept == (STEPS - KEEP as u64 + 1..=STEPS).collect::<Vec<_>>(), || {
        format!("kept {kept:?}")
    })?;
    let (moved, clean) = (logged(&job, "pages_moved"), logged(&job, "pages_clean"));
    want(moved > 0, || {
        "no page was ever moved out of a chunk that is mostly dead".into()
    })?;
    println!("    {differential}: {moved} pages moved, {clean} known to be clean");
    let mut left = kept;
    while !left.is_empty() {
        let step = left.swap_remove(rng.below(left.len() as u64) as usize);
        job.kill_all()?;
        job.clear_beat()?;
        // Before the program goes on: it would obey the last order again.
        give(&job, &format!("compare {step}"))?;
        job.restart(&["--generation", &step.to_string()])?;
        job.progress(PATIENCE).map_err(|e| format!("generation {step}: {e}"))?;
        order(&mut job, &format!("compare {step}")).map_err(|e| format!("generation {step}: {e}"))?;
    }
    job.verdict(false, PATIENCE)
}

/// After a restart nobody keeps the chunks of a generation that has been removed: their room is free.
fn removed_chunks_are_closed(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "closed", user)?;
    launch(
        &mut job,
        place,
        &["--keep", "1", "--differential", "off"],
        &["gen_steps", "12"],
    )?;
    order(&mut job, "go 1")?;
    job.checkpoint()?;
    job.kill_all()?;
    job.clear_beat()?;
    give(&job, "compare 1")?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    order(&mut job, "go 2")?;
    job.checkpoint()?;
    want(generations(&job)?.len() == 1, || "the first generation is still there".into())?;
    let front = job.pid().ok_or("no front")?;
    for pid in procs::tree(front) {
        let files = procs::open_files(pid);
        let removed = files.iter().find(|f| {
            let name = f.display().to_string();
            name.contains("/chunks/") && name.ends_with(" (deleted)")
        });
        want(removed.is_none(), || format!("{} keeps {removed:?}", procs::comm(pid)))?;
    }
    order(&mut job, "compare 2")?;
    job.verdict(false, PATIENCE)
}

/// Pages of the files in `dir`, and how many of them are in the page cache (cachestat(2), Linux 6.5).
fn cached(dir: &Path) -> Result<(u64, u64), Failure> {
    const CACHESTAT: libc::c_long = 451;
    let (mut all, mut cached) = (0, 0);
    for e in std::fs::read_dir(dir)
        .map_err(|e| format!("{}: {e}", dir.display()))?
        .flatten()
    {
        let file = std::fs::File::open(e.path()).map_err(|e| format!("open a chunk: {e}"))?;
        let bytes = file.metadata().map_err(|e| format!("stat a chunk: {e}"))?.len();
        // Offset and length; pages cached, dirty, under writeback, evicted, recently evicted.
        let (range, mut found) = ([0, bytes], [0u64; 5]);
        // SAFETY: the descriptor is live, and both arrays have the form that the system call asks for.
        let r = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
        want(r == 0, || format!("cachestat: {}", std::io::Error::last_os_error()))?;
        (all, cached) = (all + bytes.div_ceil(4096), cached + found[0]);
    }
    Ok((all, cached))
}

/// A checkpoint does not fill the page cache, where the job directory is on a disk.
fn past_the_page_cache(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "direct", user)?;
    launch(&mut job, place, &[], &["gen_steps", "12"])?;
    order(&mut job, "go 1")?;
    job.checkpoint()?;
    let (all, cached) = cached(&job.dir().join("chunks"))?;
    // Tables of hashes go through it.
    want(all > 2000 && cached < all / 10, || {
        format!("{cached} of {all} pages are in the page cache")
    })?;
    job.kill_all()?;
    job.clear_beat()?;
    give(&job, "compare 1")?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    order(&mut job, "compare 1")?;
    job.verdict(false, PATIENCE)
}

/// What processes of a job have in common is stored once, and comes back in each of them; without the hashes it is
/// stored as often as there is somebody who has it.
fn stored_once(differential: &str, place: &Place, user: User) -> Result<(), Failure> {
    const MEGABYTES: &str = "12";
    const PAGES: u64 = 12 << 8;
    let mut job = Job::new(place, "twins", user)?;
    launch(&mut job, place, &["--differential", differential], &["mem_twins", MEGABYTES])?;
    job.checkpoint()?;
    let (written, found) = (logged(&job, "pages_written"), logged(&job, "pages_found"));
    println!("    {differential}: {written} pages written, {found} found");
    let once = (PAGES..PAGES * 3 / 2).contains(&written) && found >= PAGES;
    want(once == (differential != "off"), || {
        format!("{PAGES} pages in each of two processes: {written} written, {found} found")
    })?;
    want(once || written >= 2 * PAGES, || format!("only {written} pages written"))?;
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    job.verdict(false, PATIENCE)
}

/// A bit of shared memory is damaged in the newest generation: the one before restarts.
fn damaged_contents(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "contents", user)?;
    launch(&mut job, place, &[], &["gen_steps", "4", "shared"])?;
    for step in ["go 1", "go 9"] {
        order(&mut job, step)?;
        job.checkpoint()?;
    }
    job.kill_all()?;
    let io = |e: std::io::Error| e.to_string();
    let chunks = std::fs::read_dir(job.dir().join("chunks")).map_err(io)?;
    let newest = chunks.flatten().map(|e| e.path()).max().ok_or("no chunks")?;
    let mut bytes = std::fs::read(&newest).map_err(io)?;
    // Contents are taken before the memory of processes.
    bytes[rng.below(1 << 20) as usize] ^= 1;
    std::fs::write(&newest, bytes).map_err(io)?;
    job.clear_beat()?;
    give(&job, "compare 1")?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    let said = job.output_text().to_lowercase();
    want(
        said.contains("generation 2 is damaged") && said.contains("using generation 1"),
        || said,
    )?;
    order(&mut job, "compare 1")?;
    job.verdict(false, PATIENCE)
}

/// What a restart has found damaged does not count as whole any more: it pushes no good generation out, and is tried
/// last, until it has been repaired.
fn found_damaged(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let io = |e: std::io::Error| e.to_string();
    let mut job = Job::new(place, "found", user)?;
    launch(&mut job, place, &[], &["fault_target", "2"])?;
    let damage = |job: &Job, number: u64| -> Result<(std::path::PathBuf, Vec<u8>), Failure> {
        let path = job.dir().join(format!("gen/{number:06}/job.bimg"));
        let good = std::fs::read(&path).map_err(io)?;
        let mut bad = good.clone();
        bad[300] ^= 4;
        std::fs::write(&path, bad).map_err(io)?;
        Ok((path, good))
    };
    let goes_on = |job: &mut Job, words: &[&str]| -> Result<(), Failure> {
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&[])?;
        job.progress(PATIENCE)?;
        let said = job.output_text();
        want(words.iter().all(|w| said.contains(w)), || said)
    };
    let are_whole = |job: &Job, expected: &[u64]| {
        let whole = generations(job)?;
        want(whole == expected, || format!("whole: {whole:?}, not {expected:?}"))
    };
    job.checkpoint()?;
    job.checkpoint()?;
    let (path, good) = damage(&job, 2)?;
    goes_on(&mut job, &["generation 2 is damaged", "using generation 1"])?;
    are_whole(&job, &[1])?;
    goes_on(&mut job, &["generation 2 was found damaged", "using generation 1"])?;
    job.checkpoint()?;
    are_whole(&job, &[1, 3])?;
    damage(&job, 3)?;
    goes_on(&mut job, &["generation 3 is damaged", "using generation 1"])?;
    std::fs::write(path, good).map_err(io)?;
    let verified = job
        .belay(&["verify", &job.dir().display().to_string()])
        .output()
        .map_err(io)?;
    want(verified.status.code() == Some(88), || format!("verify: {verified:?}"))?;
    are_whole(&job, &[1, 2])?;
    job.verdict(false, PATIENCE)
}

/// Pages taken for clean hold what the program has in them: a program that checks all its memory itself is checkpointed
/// again and again at random moments, and every one of these checkpoints restarts.
/// `large` says that much of it is in large pieces which do not change: copies go without these.
fn clean_pages(program: &str, large: bool, place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    const KEEP: u64 = 8;
    let mut job = Job::new(place, "clean", user)?;
    job.set("BELAY_TEST_LONG", "1");
    let options = ["--keep", "8", "--differential", "written"];
    launch(&mut job, place, &options, &[program])?;
    for _ in 0..KEEP {
        rng.pause(100);
        job.checkpoint()?;
        job.progress(PATIENCE)?;
    }
    let (how, clean) = (job.status()?["differential"].to_string(), logged(&job, "pages_clean"));
    println!("    {program}: {how}, {clean} pages known to be clean");
    want(clean > 0 || how.starts_with("\"hash: no userfaultfd"), || {
        "no page was ever known to be clean".into()
    })?;
    let not_copied = logged(&job, "pages_not_copied");
    let can_be = large && how == "\"userfaultfd and hash\"";
    want((not_copied > 0) == can_be, || format!("{not_copied} pages were not copied"))?;
    for step in generations(&job)? {
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&["--generation", &step.to_string()])?;
        job.progress(PATIENCE).map_err(|e| format!("generation {step}: {e}"))?;
    }
    job.verdict(false, PATIENCE)
}

/// What processes have in common with the one that has forked them is read once at a checkpoint where root takes it:
/// others are not told what is common.
fn read_once(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    // With six children, which write a hundredth each, and 2 MiB of code.
    const MIB: u64 = 32;
    let mut job = Job::new(place, "once", user)?;
    launch(&mut job, place, &["--differential", "hash"], &["proc_kin", &MIB.to_string()])?;
    for _ in 0..2 {
        job.checkpoint()?;
    }
    let pages = (MIB + 2) << 8;
    for line in committed(&job) {
        let number = |name: &str| line[name].as_u64().unwrap_or_default();
        let (looked, common) = (number("pages_looked_for"), number("pages_common"));
        println!("    {looked} pages read, {common} in common with another process");
        want(
            user == User::Ordinary || (looked < pages * 3 / 2 && common > pages * 5),
            || format!("{looked} of {pages} pages were read, {common} not again"),
        )?;
    }
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    job.verdict(false, PATIENCE)
}

/// What lies in the chunks of the job, bytes.
fn in_chunks(job: &Job) -> u64 {
    let all = std::fs::read_dir(job.dir().join("chunks")).into_iter().flatten().flatten();
    all.filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum()
}

/// A checkpoint that fails at its very end, when its chunks have their names already, leaves nothing behind.
fn failed_at_the_end(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "failed", user)?;
    launch(&mut job, place, &[], &["fault_target", "16"])?;
    job.checkpoint()?;
    let before = in_chunks(&job);
    for number in 2..5 {
        job.clear_beat()?;
        job.progress(PATIENCE)?;
        let asked = job.belay(&["checkpoint", &job.dir().display().to_string()]).spawn();
        let mut asked = asked.map_err(|e| format!("start belay: {e}"))?;
        // In the way of the manifest, as soon as there is a place for it.
        let place_of = job.dir().join(format!("gen/.tmp-{number:06}"));
        let end = Instant::now() + PATIENCE;
        while std::fs::create_dir(place_of.join("manifest.json")).is_err() {
            want(Instant::now() < end, || format!("generation {number} is not begun"))?;
        }
        let status = asked.wait().map_err(|e| e.to_string())?;
        want(status.code() == Some(74), || {
            format!("a checkpoint without a manifest: {status}")
        })?;
        let now = in_chunks(&job);
        want(now == before, || format!("{before} bytes in chunks, {now} after a failure"))?;
    }
    job.checkpoint()?;
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    job.verdict(false, PATIENCE)
}

/// What the newest checkpoint has done.
struct Newest {
    written: u64,
    looked: u64,
    /// It has looked for a sample only.
    sampled: bool,
    /// The next one will.
    off: bool,
    /// By the log's own numbers, what was found has saved more than looking took: by chance some pages are found
    /// always, which counts where writing is slow.
    paid: bool,
}

fn newest(job: &Job) -> Result<Newest, Failure> {
    let s = job.status()?;
    let g = s["generations"]
        .as_array()
        .and_then(|g| g.last())
        .ok_or("no generations in the status")?;
    let line = committed(job).into_iter().find(|l| l["generation"] == g["generation"]);
    let line = line.ok_or_else(|| format!("the log does not name the newest of {g}"))?;
    let number = |name: &str| line[name].as_u64().unwrap_or_default();
    let per = |name: &str, of: &str| number(name) as f64 / number(of).max(1) as f64;
    let saved = per("write_ns", "pages_written") * per("pages_found", "pages_looked_for");
    Ok(Newest {
        written: number("pages_written"),
        looked: number("pages_looked_for"),
        sampled: g["without_hashes"].is_string(),
        off: s["differential"]
            .as_str()
            .is_some_and(|d| d.contains("hash is off for now: looking for")),
        paid: saved > per("look_ns", "pages_timed") + per("table_ns", "pages_looked_for"),
    })
}

/// Pages of gen_steps in the test below.
const PAGES: u64 = 80 << 8;

/// Has gen_steps rewrite all its memory until it is not looked through any more; the step, and whether that happened.
/// It need not, where looking pays by what it measures.
fn rewrite_until_off(job: &mut Job, mut step: u64) -> Result<(u64, bool), Failure> {
    let mut paid = 0;
    for _ in 0..12 {
        step += 1;
        order(job, &format!("go {step}"))?;
        job.checkpoint()?;
        let n = newest(job)?;
        want(n.written >= PAGES, || format!("step {step}: {} pages written", n.written))?;
        want(n.sampled || n.looked >= PAGES, || {
            format!("step {step}: {} pages looked for", n.looked)
        })?;
        paid += u32::from(n.paid);
        if n.off {
            return Ok((step, true));
        }
    }
    want(paid > 0, || "it is looked through in vain, again and again".into())?;
    println!("    writing is so slow here that a few pages found by chance pay");
    Ok((step, false))
}

/// A program of which nothing is found again is not looked through any more after some checkpoints, and again as soon
/// as its memory stops changing; every generation is what it must be.
fn hashing_pays(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "pays", user)?;
    job.set("BELAY_TEST_LONG", "1");
    launch(&mut job, place, &["--keep", "3"], &["gen_steps", "80", "random"])?;
    let said = |job: &Job, what: &str| log(job).lines().any(|l| l.contains(what));
    let (mut step, off) = rewrite_until_off(&mut job, 0)?;
    if off {
        want(said(&job, "stored pages are not looked for any more"), || {
            "the log does not say so".into()
        })?;
        step += 1;
        order(&mut job, &format!("go {step}"))?;
        job.checkpoint()?;
        let n = newest(&job)?;
        want(n.sampled && n.written >= PAGES && (1..PAGES / 16).contains(&n.looked), || {
            format!("off: {} pages written, {} looked for", n.written, n.looked)
        })?;
    }
    // Back to a generation that was taken meanwhile: the agent begins anew, with everything.
    job.kill_all()?;
    job.clear_beat()?;
    give(&job, &format!("compare {step}"))?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    order(&mut job, &format!("compare {step}"))?;
    for round in 0..5 {
        job.checkpoint()?;
        let n = newest(&job)?;
        want(!n.off && !n.sampled && n.looked >= PAGES && n.written < PAGES / 16, || {
            format!(
                "checkpoint {round} after the restart: {} of {} pages written",
                n.written, n.looked
            )
        })?;
    }
    // Off once more; then nothing changes.
    let (step, off) = rewrite_until_off(&mut job, step)?;
    let mut rounds = 0;
    while newest(&job)?.off {
        rounds += 1;
        want(rounds < 10, || {
            "its memory does not change, and it is not looked through".into()
        })?;
        job.checkpoint()?;
    }
    job.checkpoint()?;
    let n = newest(&job)?;
    want(n.written < PAGES / 16, || format!("at the end {} pages written", n.written))?;
    want(!off || said(&job, "stored pages are looked for again"), || {
        "the log does not say so".into()
    })?;
    job.kill_all()?;
    job.clear_beat()?;
    give(&job, &format!("compare {step}"))?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    order(&mut job, &format!("compare {step}"))?;
    job.verdict(false, PATIENCE)
}

/// The automatic interval is the published optimum for what checkpoints cost and how often the job is interrupted.
fn auto_interval(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "auto", user)?;
    let options = ["--ckpt-interval", "auto", "--min-gap", "100ms", "--mtti", "2s", "--keep", "3"];
    launch(&mut job, place, &options, &["mem_diff"])?;
    let end = Instant::now() + PATIENCE;
    let mut s = job.status()?;
    while s["generations"].as_array().map_or(0, Vec::len) < 3 {
        want(Instant::now() < end, || format!("too few checkpoints: {s}"))?;
        job.progress(PATIENCE)?;
        s = job.status()?;
    }
    let a = &s["auto_interval"];
    let number = |name: &str| a[name].as_f64().ok_or_else(|| format!("no {name}: {s}"));
    let (c, m) = (number("cost_ms")? / 1e3, number("mtti_s")?);
    want(m == 2.0 && a["mtti_from"] == "configured" && c > 0.0, || format!("{a}"))?;
    let ratio = c / (2.0 * m);
    let optimum = if ratio >= 1.0 {
        m
    } else {
        ((2.0 * c * m).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - c).max(0.1)
    };
    want((number("interval_s")? - optimum).abs() < 0.001 * optimum, || {
        format!("expected {optimum}: {a}")
    })?;
    // Everything dies: an interruption, which the next run counts. Without a configured time, one in a day was expected.
    job.kill_all()?;
    job.clear_beat()?;
    let described = std::fs::read_to_string(job.dir().join("job.json")).map_err(|e| format!("job.json: {e}"))?;
    let mut described: serde_json::Value = serde_json::from_str(&described).map_err(|e| format!("job.json: {e}"))?;
    described["mtti_s"] = serde_json::Value::Null;
    std::fs::write(job.dir().join("job.json"), described.to_string()).map_err(|e| format!("job.json: {e}"))?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    let end = Instant::now() + PATIENCE;
    let mut s = job.status()?;
    while s["auto_interval"].is_null() {
        want(Instant::now() < end, || format!("no automatic checkpoint: {s}"))?;
        job.progress(PATIENCE)?;
        s = job.status()?;
    }
    let a = &s["auto_interval"];
    let mtti = a["mtti_s"].as_f64().unwrap_or(0.0);
    want(
        a["interrupts"] == 1 && a["mtti_from"] == "observed" && (43_200.0..44_400.0).contains(&mtti),
        || format!("{a}"),
    )?;
    job.verdict(false, PATIENCE)
}

fn main() {
    let mut target = Target::new(
        "generations",
        &[
            "fault_target",
            "gen_steps",
            "mem_diff",
            "mem_moved",
            "mem_twins",
            "mem_unchanged",
            "proc_kin",
        ],
    );
    let tests: [(&str, Test); 16] = [
        ("every_generation_hash", |p, u, r| {
            every_generation("hash", &["gen_steps", "12"], p, u, r)
        }),
        ("every_generation_written", |p, u, r| {
            every_generation("written", &["gen_steps", "12"], p, u, r)
        }),
        ("every_generation_shared", |p, u, r| {
            every_generation("hash", &["gen_steps", "12", "shared"], p, u, r)
        }),
        ("past_the_page_cache", past_the_page_cache),
        ("removed_chunks_are_closed", removed_chunks_are_closed),
        ("stored_once", |p, u, _| stored_once("hash", p, u)),
        ("stored_twice_without_hashes", |p, u, _| stored_once("off", p, u)),
        ("damaged_contents", damaged_contents),
        ("found_damaged", found_damaged),
        ("clean_pages_diff", |p, u, r| clean_pages("mem_diff", false, p, u, r)),
        ("clean_pages_unchanged", |p, u, r| clean_pages("mem_unchanged", true, p, u, r)),
        ("clean_pages_moved", |p, u, r| clean_pages("mem_moved", false, p, u, r)),
        ("read_once", read_once),
        ("failed_at_the_end", failed_at_the_end),
        ("hashing_pays", hashing_pays),
        ("auto_interval", auto_interval),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, test);
    }
    target.run();
}
