//! Many generations: each one that is kept restarts, with the state that it was taken of; the automatic interval.

use belay_tests::expect::want;
use belay_tests::job::Job;
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::Failure;
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

/// Gives gen_steps an order.
fn give(job: &Job, line: &str) -> Result<(), Failure> {
    let write = || {
        std::fs::write(job.work.join("order.new"), format!("{line}\n"))?;
        std::fs::rename(job.work.join("order.new"), job.work.join("order"))
    };
    write().map_err(|e| format!("write the order: {e}"))
}

/// Gives gen_steps an order and waits until it has been carried out.
fn order(job: &mut Job, line: &str) -> Result<(), Failure> {
    give(job, line)?;
    let end = Instant::now() + PATIENCE;
    while std::fs::read_to_string(job.work.join("answer")).unwrap_or_default().trim() != line {
        job.progress(PATIENCE).map_err(|e| format!("{line}: {e}"))?;
        want(Instant::now() < end, || format!("{line}: no answer; {}", job.output_text()))?;
    }
    Ok(())
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
fn every_generation(differential: &str, place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    const STEPS: u64 = 13;
    const KEEP: usize = 5;
    let mut job = Job::new(place, "every", user)?;
    launch(
        &mut job,
        place,
        &["--keep", "5", "--differential", differential],
        &["gen_steps", "12"],
    )?;
    for step in 1..=STEPS {
        order(&mut job, &format!("go {step}"))?;
        job.checkpoint()?;
    }
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

/// The newest generation: its number, pages written and looked for, and whether the status says that hash is off, for that generation and for the next.
fn newest(job: &Job) -> Result<(u64, [u64; 2], [bool; 2]), Failure> {
    let s = job.status()?;
    let g = s["generations"]
        .as_array()
        .and_then(|g| g.last())
        .ok_or("no generations in the status")?;
    let number = g["generation"].as_u64().unwrap_or_default();
    let line = committed(job).into_iter().find(|l| l["generation"] == number);
    let line = line.ok_or_else(|| format!("the log does not name generation {number}"))?;
    let pages = ["pages_written", "pages_looked_for"].map(|name| line[name].as_u64().unwrap_or_default());
    let next = s["differential"]
        .as_str()
        .is_some_and(|d| d.contains("hash is off for now: looking for"));
    Ok((number, pages, [g["without_hashes"].is_string(), next]))
}

/// A program of which nothing is found again is not looked through any more after some checkpoints, and again as soon as its memory stops changing; every generation is what it must be.
fn hashing_pays(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    const PAGES: u64 = 80 << 8;
    let mut job = Job::new(place, "pays", user)?;
    launch(&mut job, place, &["--keep", "3"], &["gen_steps", "80", "random"])?;
    let mut step = 0;
    let (written, looked) = loop {
        step += 1;
        order(&mut job, &format!("go {step}"))?;
        job.checkpoint()?;
        let (_, [written, looked], off) = newest(&job)?;
        want(written >= PAGES, || format!("step {step}: {written} pages written"))?;
        if off[0] {
            break (written, looked);
        }
        want(looked >= PAGES && step < 40, || {
            format!("step {step}: still on; {looked} looked for")
        })?;
    };
    want((1..PAGES / 16).contains(&looked), || {
        format!("{looked} of {written} pages looked for")
    })?;
    let said = |job: &Job, what: &str| log(job).lines().any(|l| l.contains(what));
    want(said(&job, "stored pages are not looked for any more"), || {
        "the log does not say so".into()
    })?;
    // Back to a generation that was taken meanwhile: the agent begins anew, with everything.
    job.kill_all()?;
    job.clear_beat()?;
    give(&job, &format!("compare {step}"))?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    order(&mut job, &format!("compare {step}"))?;
    job.checkpoint()?;
    let (_, [written, looked], off) = newest(&job)?;
    want(off == [false; 2] && looked >= PAGES && written < PAGES / 16, || {
        format!("after the restart {written} of {looked} pages written, {off:?}")
    })?;
    // Off once more; then nothing changes.
    let mut rounds = 0;
    while !newest(&job)?.2[1] {
        step += 1;
        rounds += 1;
        want(rounds < 40, || "it is not left a second time".into())?;
        order(&mut job, &format!("go {step}"))?;
        job.checkpoint()?;
    }
    let mut rounds = 0;
    while newest(&job)?.2[1] {
        rounds += 1;
        want(rounds < 10, || {
            "its memory does not change, and it is not looked through".into()
        })?;
        job.checkpoint()?;
    }
    job.checkpoint()?;
    let (number, [written, _], _) = newest(&job)?;
    want(
        written < PAGES / 16 && said(&job, "stored pages are looked for again"),
        || format!("generation {number}: {written} pages written"),
    )?;
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
    let mut target = Target::new("generations", &["gen_steps", "mem_diff"]);
    let tests: [(&str, Test); 4] = [
        ("every_generation_hash", |p, u, r| every_generation("hash", p, u, r)),
        ("every_generation_written", |p, u, r| every_generation("written", p, u, r)),
        ("hashing_pays", hashing_pays),
        ("auto_interval", auto_interval),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, test);
    }
    target.run();
}
