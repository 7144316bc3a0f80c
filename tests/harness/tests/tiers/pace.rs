//! Levels are reached as often as the configuration says, and without harm to the program.

use super::*;
use std::process::Stdio;

/// One of three checkpoints is copied, counted from the last one that was, also where that was asked for, and across a crash.
pub(super) fn counted(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "pace", user)?;
    let scratch = directory(&job, user, "scratch")?;
    let config = pfs("scratch", &scratch) + "[levels]\ndurable = \"every 3\"\n[checkpoints]\nkeep = 99\n";
    target(&mut job, place, &config, "2")?;
    let on_tier = |job: &Job| -> Result<Vec<u64>, Failure> {
        let all = generations(job)?;
        let durable = all.iter().filter(|g| g["level"] == "durable");
        Ok(durable.filter_map(|g| g["generation"].as_u64()).collect())
    };
    let mut expected = Vec::new();
    for n in 1..=11 {
        if n == 9 {
            job.kill_all()?;
            goes_on(&mut job)?;
        }
        if n == 5 {
            durable(&job)?;
        } else {
            job.checkpoint()?;
        }
        if [1, 4, 5, 8, 11].contains(&n) {
            expected.push(n);
        }
        let begin = Instant::now();
        while on_tier(&job)? != expected {
            want(begin.elapsed() < LIMIT, || {
                format!("after {n}: on the tier {:?}, not {expected:?}", on_tier(&job))
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// An automatic pace is the published optimum for what a flush takes and how often one is needed; without the latter it is refused.
pub(super) fn automatic(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "auto-pace", user)?;
    let scratch = directory(&job, user, "scratch")?;
    let config = pfs("scratch", &scratch) + "[levels]\ndurable_mtti = \"500s\"\n";
    let file = job.work.join("pace.toml");
    for (levels, named) in [("durable = \"auto\"", "durable_mtti"), ("durable = \"often\"", "or auto")] {
        io("write", std::fs::write(&file, format!("[levels]\n{levels}\n")))?;
        let (file, dir) = (file.display().to_string(), job.dir().display().to_string());
        let o = output(job.belay(&["launch", "--config", &file, "--ckpt-dir", &dir, "true"]), LIMIT)?;
        want(!o.status.success() && text(&o).contains(named), || {
            format!("{levels}: {}: {}", show(o.status), text(&o))
        })?;
    }
    let file = job.work.join("belay.toml");
    io("write", std::fs::write(&file, config))?;
    let program = place.programs().join("fault_target").display().to_string();
    let options = [
        "--config".to_owned(),
        file.display().to_string(),
        "--durable-every".into(),
        "auto".into(),
    ];
    job.launch(&options, &[program, "2".into()])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    let begin = Instant::now();
    let mut status = job.status()?;
    while status["auto_levels"][0].is_null() {
        want(begin.elapsed() < LIMIT, || format!("no pace is chosen: {status}"))?;
        std::thread::sleep(Duration::from_millis(5));
        status = job.status()?;
    }
    let chosen = &status["auto_levels"][0];
    let number = |name: &str| chosen[name].as_f64().ok_or_else(|| format!("no {name}: {status}"));
    let (c, m, interval) = (number("cost_ms")? / 1e3, number("mtti_s")?, number("interval_s")?);
    let ratio = c / (2.0 * m);
    let optimum = (2.0 * c * m).sqrt() * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - c;
    want(chosen["level"] == "durable" && m == 500.0 && c > 0.0, || format!("{chosen}"))?;
    want((interval - optimum).abs() < 0.001 * optimum, || {
        format!("expected {optimum}: {chosen}")
    })?;
    // Long before that nothing more is copied.
    job.checkpoint()?;
    job.checkpoint()?;
    let all = generations(&job)?;
    let durable = all.iter().filter(|g| g["level"] == "durable").count();
    want(durable <= 1 && all.last().is_some_and(|g| g["level"] == "local"), || {
        format!("{all:?}")
    })
}

/// A flush fails while somebody waits for the next one: that begins at once, and not with the next attempt a minute later.
pub(super) fn behind_a_failure(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "behindfailure", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(&mut job, place, &(pfs("scratch", &scratch) + "[flush]\nrate = \"2M\"\n"), "8")?;
    job.checkpoint()?;
    let dir = job.dir().display().to_string();
    let mut waits = job.belay(&["checkpoint", "--quiet", "--level", "durable", &dir]);
    let waits = waits.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut waits = io("start belay checkpoint", waits)?;
    let begin = Instant::now();
    while generations(&job)?.len() < 2 {
        want(begin.elapsed() < LIMIT, || "no second checkpoint".into())?;
    }
    // The first flush writes for some seconds, and may have only just begun.
    let of_the_first = |f: &PathBuf| f.to_string_lossy().contains("/.tmp-") && f.to_string_lossy().contains("000001");
    let first = loop {
        if let Some(first) = files(&scratch).into_iter().find(of_the_first) {
            break first;
        }
        want(begin.elapsed() < LIMIT, || "nothing of the first flush was seen".into())?;
    };
    // It cannot get its name.
    io("remove", std::fs::remove_file(first))?;
    let removed = Instant::now();
    let status = io("wait", waits.wait())?;
    let took = removed.elapsed();
    want(status.success() && took < Duration::from_secs(50), || {
        format!("the one that was waited for: {} after {took:?}", show(status))
    })?;
    job.verdict(false, LIMIT)
}

/// The class of I/O of thread `tid`; -1 where there is none.
fn io_class(tid: i32) -> i64 {
    const IOPRIO_WHO_PROCESS: i32 = 1;
    // SAFETY: takes numbers only.
    let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, tid) };
    priority >> 13
}

/// What copies to a tier leaves the disks to the program, and goes behind it on the processors, but not with the lowest
/// priority: a program that keeps all processors busy would stop it.
pub(super) fn priority(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "priority", user)?;
    let scratch = directory(&job, user, "scratch")?;
    target(&mut job, place, &(pfs("scratch", &scratch) + "[flush]\nrate = \"1M\"\n"), "8")?;
    job.checkpoint()?;
    let front = job.pid().ok_or("no front")?;
    let (mut copying, end) = (Vec::new(), Instant::now() + LIMIT);
    let polite = |(nice, class): &(i32, i64)| (1..=10).contains(nice) && *class == IOPRIO_CLASS_IDLE;
    // That which copies, and that which waits for it; a new thread sets its priority itself.
    while !(copying.len() >= 2 && copying.iter().all(polite)) && Instant::now() < end {
        let tasks = procs::tree(front)
            .into_iter()
            .flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten());
        let stats = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("stat")).ok());
        let found: Vec<_> = stats
            .filter_map(|s| {
                let (name, numbers) = s.rsplit_once(')')?;
                let tid = name.split_once(" (belay-flush")?.0.parse().ok()?;
                Some((numbers.split_whitespace().nth(16)?.parse().ok()?, io_class(tid)))
            })
            .collect();
        if found.len() < copying.len() {
            break;
        }
        copying = found;
    }
    want(copying.len() >= 2 && copying.iter().all(polite), || {
        format!("nice value and class of I/O of the threads that copy: {copying:?}")
    })?;
    job.verdict(false, LIMIT)
}
