//! Differential checkpoints: what is written, how long the program stands still and what hashing costs when 1, 10, 50
//! and 100 % of its pages have changed; and the collision test of the FTI paper.

use crate::measure::{fetch_memory, ms, run, Job, Samples, PAGE};
use crate::Plan;
use belay_storage::page_key::PageKey;
use serde_json::Value;
use std::collections::HashSet;
use std::process::Command;

/// Blocks and variants of each in the collision test.
const BLOCKS: usize = 4096;
const VARIANTS: usize = 64;

/// What the log says about the newest checkpoint: pages written, and pages moved out of old chunks.
fn logged(p: &Plan) -> Result<(f64, f64), String> {
    let mut last = None;
    for e in std::fs::read_dir(p.dir.join("job/log")).map_err(|e| e.to_string())?.flatten() {
        let text = std::fs::read_to_string(e.path()).map_err(|e| e.to_string())?;
        let found = text.lines().rev().find(|l| l.contains("\"pages_moved\""));
        last = last.or(found.map(str::to_owned));
    }
    let line: Value = serde_json::from_str(&last.ok_or("the log names no checkpoint")?).map_err(|e| e.to_string())?;
    let field = |name: &str| {
        let fields = line.get("fields").unwrap_or(&line);
        fields[name].as_f64().ok_or(format!("the log has no {name}"))
    };
    Ok((field("pages_written")?, field("pages_moved")?))
}

fn write_ms(v: &Value) -> f64 {
    v["phases_ms"]["write"].as_f64().unwrap_or(f64::NAN)
}

/// Figures of one way to find what has changed.
#[derive(Default)]
struct Figures {
    full: Samples,
    /// Pages written for the program, and with those that compaction has moved out of older chunks, for each page changed.
    written: [Samples; 4],
    stored: [Samples; 4],
    blocked: [Samples; 4],
    write: [Samples; 4],
    /// By how much writing takes longer than without differencing, by the model of `belay status`: every page hashed once,
    /// and changed ones twice.
    model: [[Samples; 4]; 2],
    /// A bare fork of the program before the checkpoint of 1 %, and how much longer that checkpoint blocked it.
    fork: Samples,
    above_fork: Samples,
    /// Writing the last of several checkpoints that find everything changed.
    settled: Samples,
    /// How many of these looked for all pages, before the cost model said that it does not pay.
    looked: Samples,
}

const PERCENT: [usize; 4] = [1, 10, 50, 100];
/// Checkpoints of 100 %: the cost model judges by the recent ones, of which those before, of which most was found, are some.
const ALL_CHANGED: usize = 8;

fn status(p: &Plan) -> Result<Value, String> {
    let said = run(Command::new(&p.belay).arg("status").arg(p.dir.join("job")).arg("--json"))?;
    serde_json::from_str(&said).map_err(|e| e.to_string())
}

fn one(p: &Plan, how: &str, f: &mut Figures) -> Result<(), String> {
    std::fs::remove_dir_all(p.dir.join("job")).ok();
    let mut job = Job::launch_with(p, &["--differential", how], &["dirty", &p.size.to_string()])?;
    job.line()?;
    fetch_memory()?;
    f.full.push(write_ms(&Job::checkpoint(p)?.1));
    let mut looked = 0;
    for (i, percent) in PERCENT.iter().enumerate() {
        let times = if *percent == 100 { ALL_CHANGED } else { 1 };
        for time in 1..=times {
            let number = |said: String| said.parse::<f64>().map_err(|e| format!("worker: {e}"));
            let dirty = number(job.tell(&percent.to_string())?)?;
            let fork = (i == 0).then(|| job.tell("fork").and_then(number)).transpose()?;
            if *percent == 100 && (time == 1 || time == times) {
                fetch_memory()?;
            }
            let (_, v) = Job::checkpoint(p)?;
            looked += usize::from(*percent == 100 && v["without_hashes"].is_null());
            if time == times && times > 1 {
                f.settled.push(write_ms(&v));
            }
            if time > 1 {
                continue;
            }
            let (written, moved) = logged(p)?;
            f.written[i].push(written / dirty);
            f.stored[i].push((written + moved) / dirty);
            let blocked = v["blocked_ms"].as_f64().unwrap_or(f64::NAN);
            f.blocked[i].push(blocked);
            if let Some(fork) = fork {
                f.fork.push(fork);
                f.above_fork.push(blocked - fork);
            }
            f.write[i].push(write_ms(&v));
            let model = &status(p)?["differential_model"];
            for (samples, name) in f.model.iter_mut().zip(["delta_hashed_once", "delta"]) {
                samples[i].push(model[name].as_f64().unwrap_or(f64::NAN));
            }
        }
    }
    f.looked.push(looked as f64);
    let status = status(p)?;
    println!("{how}: reported as {}", status["differential"]);
    job.stop(p)
}

/// Flips up to eight bits at random places of random blocks; how many different blocks have the same hash.
fn collisions() -> (usize, usize) {
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let secret = PageKey::random().secret();
    let (mut hashes, mut blocks) = (HashSet::new(), HashSet::new());
    let mut made = 0;
    for n in 0..BLOCKS {
        let mut page = [0; PAGE];
        page.as_chunks_mut()
            .0
            .iter_mut()
            .for_each(|word| *word = random().to_le_bytes());
        hashes.insert(secret.hash(&page));
        made += 1;
        for _ in 1..VARIANTS {
            let mut bits: Vec<usize> = (0..=random() % 8).map(|_| random() as usize % (PAGE * 8)).collect();
            bits.sort_unstable();
            bits.dedup();
            if !blocks.insert((n, bits.clone())) {
                continue;
            }
            bits.iter().for_each(|b| page[b / 8] ^= 1 << (b % 8));
            hashes.insert(secret.hash(&page));
            bits.iter().for_each(|b| page[b / 8] ^= 1 << (b % 8));
            made += 1;
        }
    }
    (made, made - hashes.len())
}

/// Time to hash as many bytes as the program has, from memory.
fn hashing(p: &Plan) -> f64 {
    let m = crate::worker::filled(64 << 20, true);
    let bytes = &m[..];
    let secret = PageKey::random().secret();
    let mut total = Samples::default();
    for _ in 0..p.runs.max(3) {
        let hash_all =
            || -> Result<u128, String> { Ok(bytes.as_chunks().0.iter().map(|page| secret.hash(page)).fold(0, |a, h| a ^ h)) };
        let t = ms(hash_all).map_or(f64::NAN, |(t, h)| {
            std::hint::black_box(h);
            t
        });
        total.push(t * p.size as f64 / bytes.len() as f64);
    }
    total.median()
}

/// All of it.
pub(crate) fn differential(p: &Plan) -> Result<(), String> {
    let (mut hash, mut written, mut off) = (Figures::default(), Figures::default(), Figures::default());
    for _ in 0..p.runs {
        for (how, f) in [("hash", &mut hash), ("written", &mut written), ("off", &mut off)] {
            one(p, how, f)?;
        }
    }
    for (how, f) in [("hash", &hash), ("written", &written), ("off", &off)] {
        f.full.print(&format!("{how}: first checkpoint, writing"), "ms");
        for (i, percent) in PERCENT.iter().enumerate() {
            f.written[i].print(&format!("{how}: {percent} % changed: pages written / changed"), "");
            f.stored[i].print(&format!("{how}: {percent} % changed: pages written and moved / changed"), "");
            f.blocked[i].print(&format!("{how}: {percent} % changed: blocked"), "ms");
            f.write[i].print(&format!("{how}: {percent} % changed: writing"), "ms");
        }
        f.settled
            .print(&format!("{how}: 100 % changed, checkpoint {ALL_CHANGED}: writing"), "ms");
        if how != "off" {
            f.looked.print(
                &format!("{how}: 100 % changed: of {ALL_CHANGED}, all pages looked for in"),
                "",
            );
        }
    }
    for (i, percent) in PERCENT.iter().enumerate() {
        println!(
            "hash: {percent} % changed: writing by writing without differencing {:+.2}; by the model {:+.2}, and {:+.2} if changed pages were hashed twice",
            hash.write[i].median() / off.write[i].median() - 1.0,
            hash.model[0][i].median(),
            hash.model[1][i].median()
        );
    }
    for (how, f) in [("hash", &hash), ("written", &written)] {
        let deviation = |samples: &[Samples; 4]| samples.iter().map(|s| (s.median() - 1.0).abs()).fold(0.0, f64::max) * 100.0;
        println!(
            "{how}: pages written differ from those changed by {:.1} % at most (goal <= 3), with those moved by compaction by {:.1} %",
            deviation(&f.written),
            deviation(&f.stored)
        );
        f.fork.print(&format!("{how}: 1 % changed: bare fork"), "ms");
        f.above_fork
            .print(&format!("{how}: 1 % changed: blocked - fork (goal <= 50)"), "ms");
        let blocked = f.blocked[0].median() / f.full.median();
        println!(
            "{how}: blocked at 1 % / writing a full checkpoint: {:.3} (goal <= 0.15)",
            blocked
        );
        let slower = [&f.write[3], &f.settled].map(Samples::median);
        let alone = [&off.write[3], &off.settled].map(Samples::median);
        println!(
            "{how}: writing at 100 % / writing without differencing: the first {:.3}, checkpoint {ALL_CHANGED} {:.3} (goal <= 1.05)",
            slower[0] / alone[0],
            slower[1] / alone[1]
        );
    }
    let hashing = hashing(p) / 2.0;
    println!(
        "hashing all pages with two writers / writing at 100 %: the first {:.3}, checkpoint {ALL_CHANGED} {:.3} (goal <= 0.05)",
        hashing / hash.write[3].median(),
        hashing / hash.settled.median()
    );
    let (blocks, same) = collisions();
    println!("collision test: {blocks} different blocks, {same} hashes that another block has (goal 0)");
    if same > 0 {
        return Err(format!("{same} collisions"));
    }
    Ok(())
}
