//! Hosts that die.

use super::*;

/// Hosts that die: `belay run` goes on by itself, on the spare host of its hostfile and on one that has come back, as
/// often as it may; then it can be run again.
pub(super) fn spare(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "losses-spare", 3, 4)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    let file = job.work.join("hostfile");
    std::fs::write(&file, "h2\nh3\nh4 # spare\n").map_err(|e| e.to_string())?;
    let words = run_words(&job, &["--hostfile", &file.display().to_string()], &job.mpirun(&program));
    start(&mut job, &words)?;
    job.settle()?;
    let mut gone = None;
    for (n, lost, used) in [(1, 2, [1, 3, 4]), (2, 4, [1, 2, 3]), (3, 3, [0; 3])] {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint().map_err(|e| format!("before loss {n}: {e}"))?;
        job.progress()?;
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.hosts.hide(lost)?;
        if let Some(host) = gone.replace(lost) {
            job.hosts.show(host)?;
        }
        beat::forget(&job.work.join("beat"))?;
        job.hosts.kill_host(lost);
        if n <= 2 {
            job.says(&format!("h{lost} does not answer; restarting with the other parts on "))?;
            job.says(&format!(" ({n} of 2 restarts)"))?;
            job.progress().map_err(|e| format!("loss {n}: {e}"))?;
            let at = job.hosts_in_use();
            want(at == used, || format!("loss {n}: the job is on hosts {at:?}"))?;
        }
    }
    job.says("the part of the job on h3 is lost")?;
    let begin = Instant::now();
    while job.front.as_mut().is_some_and(|f| matches!(f.try_wait(), Ok(None))) {
        want(begin.elapsed() < LIMIT, || {
            "a job without its part and without restarts does not end".into()
        })?;
        std::thread::sleep(Duration::from_millis(5));
    }
    job.crash();
    std::fs::write(&file, "h2\nh4\n").map_err(|e| e.to_string())?;
    start(&mut job, &words)?;
    job.progress().map_err(|e| format!("run again: {e}"))?;
    job.verdict()
}

/// A host dies while one checkpoint after the other is asked for: none is taken of what is left of the job while that
/// ends, and it goes on from one that has all of it.
pub(super) fn while_asked(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "losses-dying", Kind::C, 2, 3)?;
    let program = job.program(place, "net/net_alone")?;
    let words = run_words(&job, &["--keep", "2", "--hosts", "h2,h3"], &[program, "h2".into()]);
    start(&mut job, &words)?;
    both_go_on(&mut job)?;
    job.checkpoint()?;
    let asked: Vec<Child> = (0..3)
        .map(|_| {
            let dir = job.dir();
            let script = format!("while {} checkpoint --quiet {dir}; do :; done", job.belay);
            let mut c = job.command(1, &["sh", "-c", &script]);
            c.stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .map_err(|e| e.to_string())
        })
        .collect::<Result<_, _>>()?;
    std::thread::sleep(Duration::from_millis(100 + rng.below(200)));
    job.hosts.hide(2)?;
    job.hosts.kill_host(2);
    for mut asked in asked {
        asked.wait().map_err(|e| e.to_string())?;
    }
    job.says(" (1 of 2 restarts)")?;
    both_go_on(&mut job)?;
    want(!job.said().contains("left behind"), || job.said())?;
    job.verdict()
}
