//! A large process: blocked time against fork, image write and restart against plain threads doing the same bytes.

use crate::measure::{fetch_memory, ms, ratio, run, Job, Samples};
use crate::worker::filled;
use crate::Plan;
use belay_kernel::pages::Pages;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;

/// Blocked time of a checkpoint and a bare fork of the same process, in turn.
pub(crate) fn blocked(p: &Plan) -> Result<(), String> {
    let size = p.size.to_string();
    for pages in ["small", "huge"] {
        let (mut bare, mut block) = (Samples::default(), Samples::default());
        std::fs::remove_dir_all(p.dir.join("job")).ok();
        let mut job = Job::launch(p, &["fork", &size, pages])?;
        job.line()?;
        for _ in 0..p.runs * 2 {
            bare.push(job.ask()?.parse().map_err(|e| format!("fork time: {e}"))?);
            block.push(Job::checkpoint(p)?.1["blocked_ms"].as_f64().unwrap_or(f64::NAN));
        }
        job.stop(p)?;
        bare.print(&format!("bare fork, {pages} pages"), "ms");
        block.print(&format!("blocked, {pages} pages"), "ms");
        ratio(&format!("blocked / fork, {pages} pages"), &block, &bare, "<= 2");
    }
    Ok(())
}

/// Two threads write half of `m` each into one file each.
fn plain_write(p: &Plan, bytes: &[u8]) -> Result<(), String> {
    let (a, b) = bytes.split_at(bytes.len() / 2);
    let one = |name: &str, part: &[u8]| -> Result<(), String> {
        let f = File::create(p.dir.join(name)).map_err(|e| e.to_string())?;
        let mut at = 0;
        for c in part.chunks(256 << 10) {
            f.write_all_at(c, at).map_err(|e| e.to_string())?;
            at += c.len() as u64;
        }
        f.sync_all().map_err(|e| e.to_string())
    };
    std::thread::scope(|s| {
        let t = s.spawn(|| one("plain-1", a));
        one("plain-0", b).and(t.join().map_err(|_| "a writer thread failed".to_owned())?)
    })
}

/// Image write, from resume to written, against two plain writer threads with one file each.
pub(crate) fn write(p: &Plan) -> Result<(), String> {
    let (mut plain, mut image) = (Samples::default(), Samples::default());
    let gib = p.size as f64 / f64::from(1 << 30);
    for _ in 0..p.runs {
        let m = filled(p.size, true);
        fetch_memory()?;
        plain.push(gib / (ms(|| plain_write(p, &m))?.0 / 1000.0));
        for n in ["plain-0", "plain-1"] {
            std::fs::remove_file(p.dir.join(n)).ok();
        }
        drop(m);
        std::fs::remove_dir_all(p.dir.join("job")).ok();
        let mut job = Job::launch(p, &["memory", &p.size.to_string(), "huge"])?;
        job.line()?;
        fetch_memory()?;
        let v = Job::checkpoint(p)?.1;
        image.push(gib / (v["phases_ms"]["write"].as_f64().unwrap_or(f64::NAN) / 1000.0));
        job.stop(p)?;
    }
    plain.print("two plain writers to tmpfs", "GiB/s");
    image.print("image write to tmpfs", "GiB/s");
    ratio("image write / plain", &image, &plain, ">= 0.8");
    Ok(())
}

/// Two threads read two files into fresh huge-page memory.
fn plain_read(p: &Plan) -> Result<(), String> {
    let half = p.size / 2;
    let one = |name: &str| -> Result<(), String> {
        let f = File::open(p.dir.join(name)).map_err(|e| e.to_string())?;
        let mut m = Pages::new(half).map_err(|e| format!("map {half} bytes: {e}"))?;
        m.huge(true);
        let mut at = 0;
        for c in m.chunks_mut(4 << 20) {
            f.read_exact_at(c, at).map_err(|e| e.to_string())?;
            at += c.len() as u64;
        }
        Ok(())
    };
    std::thread::scope(|s| {
        let t = s.spawn(|| one("plain-1"));
        one("plain-0").and(t.join().map_err(|_| "a reader thread failed".to_owned())?)
    })
}

fn kill_stopped(p: &Plan) -> Result<(), String> {
    run(Command::new(&p.belay)
        .arg("checkpoint")
        .arg(p.dir.join("job"))
        .args(["--then", "stop"]))
    .map(|_| ())
}

/// Restart to the first output, eager and lazy, against two threads that only read the same bytes.
pub(crate) fn restart(p: &Plan) -> Result<(), String> {
    let (mut plain, mut eager, mut lazy) = (Samples::default(), Samples::default(), Samples::default());
    std::env::set_var("BELAY_BENCH_TICK", "1");
    for _ in 0..p.runs {
        std::fs::remove_dir_all(p.dir.join("job")).ok();
        let m = filled(p.size, true);
        plain_write(p, &m)?;
        drop(m);
        fetch_memory()?;
        plain.push(ms(|| plain_read(p))?.0);
        for n in ["plain-0", "plain-1"] {
            std::fs::remove_file(p.dir.join(n)).ok();
        }
        let mut job = Job::launch(p, &["memory", &p.size.to_string(), "huge"])?;
        job.line()?;
        kill_stopped(p)?;
        drop(job);
        for (options, samples) in [(&["--lazy"][..], &mut lazy), (&[][..], &mut eager)] {
            fetch_memory()?;
            let (t, j) = ms(|| {
                let mut j = Job::restart(p, options)?;
                j.line()?;
                Ok(j)
            })?;
            samples.push(t);
            j.stop(p)?;
        }
    }
    std::env::remove_var("BELAY_BENCH_TICK");
    plain.print("two-thread pread into huge pages", "ms");
    eager.print("restart to first output", "ms");
    lazy.print("restart --lazy to first output (goal <= 100)", "ms");
    ratio("pread / restart", &plain, &eager, ">= 0.8");
    Ok(())
}
