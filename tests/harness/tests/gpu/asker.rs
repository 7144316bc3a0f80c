//! The process that asks the driver is killed.

use crate::{continued, launched, LIMIT, PROGRAM};
use belay_still::Watch;
use belay_tests::expect::{refused, want};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::{edges, procs, Failure};
use std::time::{Duration, Instant};

/// Whether this process asks the driver.
pub(crate) fn asks(pid: i32) -> bool {
    is_told(pid, "--processes")
}

fn is_told(pid: i32, word: &str) -> bool {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    words.split(|b| *b == 0).any(|w| w == word.as_bytes())
}

/// It is killed at any moment of a checkpoint: the program goes on, and what is called
/// whole restarts.
pub(crate) fn killed(place: &Place, user: User, (how, within): ((&str, &str), u64), rng: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, user, how)?;
    let mut killed = 0;
    // On a loaded machine it has often ended before it is found, or before the kill.
    for round in 0..200 {
        if round >= 20 && killed > 5 {
            break;
        }
        let (_, agent) = edges::program_and_agent(&job, PROGRAM)?;
        let dir = job.dir().display().to_string();
        let command = job.belay(&["checkpoint", "--quiet", &dir]);
        let wait = Duration::from_micros(rng.below(within));
        let taking = std::thread::spawn(move || output(command, LIMIT));
        while !taking.is_finished() {
            if let Some(asker) = procs::tree(agent).into_iter().find(|p| asks(*p)) {
                std::thread::sleep(wait);
                if asks(asker) {
                    procs::signal(asker, libc::SIGKILL);
                    killed += 1;
                }
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let o = taking.join().map_err(|_| "the command's thread has ended")??;
        if !o.status.success() {
            refused(&o, &["gpu driver"]).map_err(|e| format!("round {round}: {e}"))?;
        }
        job.progress(LIMIT).map_err(|e| format!("round {round}: {e}"))?;
    }
    want(killed > 5, || format!("killed {killed} times only"))?;
    job.checkpoint()?;
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// It is killed while the state is taken off, and the program is stopped while another one has
/// it put back: the driver's thread, the only one that runs then, meets the signal, and comes past it.
pub(crate) fn killed_and_stopped(place: &Place, user: User) -> Result<(), Failure> {
    const HITS: usize = 3;
    let mut job = launched(place, user, ("", "slow"))?;
    let mut hits = 0;
    for round in 0..60 {
        if hits == HITS {
            break;
        }
        let (program, agent) = edges::program_and_agent(&job, PROGRAM)?;
        let dir = job.dir().display().to_string();
        let command = job.belay(&["checkpoint", "--quiet", &dir]);
        let begin = Watch::begin();
        let taking = std::thread::spawn(move || output(command, LIMIT));
        let asker = |word| procs::tree(agent).into_iter().find(|p| is_told(*p, word));
        let state = || std::fs::read_to_string(format!("/proc/{program}/stat")).unwrap_or_default();
        let (mut killed, mut stopped) = (false, false);
        while !taking.is_finished() && !stopped {
            if !killed {
                let first = asker("--processes").filter(|_| state().contains(") t "));
                if let Some(first) = first {
                    std::thread::sleep(Duration::from_millis(30));
                    procs::signal(first, libc::SIGKILL);
                    killed = true;
                }
            } else if asker("--recover").is_some() {
                procs::signal(program, libc::SIGSTOP);
                stopped = true;
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        let o = taking.join().map_err(|_| "the command's thread has ended")??;
        let took = begin.elapsed();
        want(took < LIMIT / 3, || format!("round {round}: {took:?}: {}", text(&o)))?;
        if !o.status.success() {
            refused(&o, &["gpu driver"]).map_err(|e| format!("round {round}: {e}"))?;
            hits += usize::from(stopped);
        }
        continued(&mut job).map_err(|e| format!("round {round}: {e}"))?;
    }
    want(hits == HITS, || format!("stopped {hits} times only"))?;
    job.checkpoint()?;
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// It is killed while that takes the state off, which it goes on to do for longer than others
/// are waited for: the state is put back when that is over, and nothing runs before.
pub(crate) fn killed_for_long(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = launched(place, user, ("watch", "long"))?;
    let (_, agent) = edges::program_and_agent(&job, PROGRAM)?;
    let dir = job.dir().display().to_string();
    let command = job.belay(&["checkpoint", "--quiet", &dir]);
    let taking = std::thread::spawn(move || output(command, 3 * LIMIT));
    let asker = loop {
        if let Some(asker) = procs::tree(agent).into_iter().find(|p| asks(*p)) {
            break asker;
        }
        want(!taking.is_finished(), || "the checkpoint is over".into())?;
        std::thread::sleep(Duration::from_millis(1));
    };
    std::thread::sleep(Duration::from_secs(2));
    procs::signal(asker, libc::SIGKILL);
    let o = taking.join().map_err(|_| "the command's thread has ended")??;
    refused(&o, &["gpu driver", "has lost the process that asks it"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// It is killed while that puts the state back at a restart: the job goes on, or the restart
/// says that it has ended, where it has not begun.
pub(crate) fn killed_at_restart(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, user, ("", "slow"))?;
    job.checkpoint()?;
    let mut recovered = 0;
    for round in 0..30 {
        if recovered >= 4 {
            break;
        }
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&[])?;
        let front = job.pid().ok_or("no job")?;
        let end = Instant::now() + LIMIT;
        let asker = loop {
            if let Some(asker) = procs::tree(front).into_iter().find(|p| asks(*p)) {
                break asker;
            }
            want(Instant::now() < end && !job.has_ended()?, || job.output_text())?;
            std::thread::sleep(Duration::from_millis(1));
        };
        std::thread::sleep(Duration::from_millis(rng.below(200)));
        let killed = asks(asker);
        procs::signal(asker, libc::SIGKILL);
        // What goes on is not ended again.
        let goes_on = |job: &mut Job| {
            job.progress(LIMIT)?;
            job.checkpoint()?;
            job.progress(LIMIT)
        };
        match goes_on(&mut job) {
            Ok(()) => recovered += i32::from(killed),
            Err(e) => want(e.contains("the process that asks it has ended"), || {
                format!("round {round}: {e}")
            })?,
        }
    }
    want(recovered >= 4, || format!("recovered {recovered} times only"))?;
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)
}
