//! What the other hosts of a job have of its checkpoints, where all of it lies in the job directory: `verify`, `list`
//! and `gc` look at it too.

use super::*;

/// A job on two hosts with two checkpoints, which has been killed.
fn killed(place: &Place, label: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, 2, 2)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    for _ in 0..2 {
        job.checkpoint()?;
    }
    job.crash();
    Ok(job)
}

/// Changes one bit of a page of every chunk of part 1.
fn flip(job: &Job) -> Result<(), Failure> {
    for chunk in files(&Path::new(&job.dir_of(1)).join("chunks"), ".bpg") {
        let mut bytes = io("read a chunk", std::fs::read(&chunk))?;
        bytes[2000] ^= 1;
        io("write a chunk", std::fs::write(&chunk, bytes))?;
    }
    Ok(())
}

/// What part 1 has is damaged, or missing: that is found.
pub(super) fn verify(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let job = killed(place, "hosts-verify")?;
    let finds = |verb: &str, words: &[&str]| {
        let o = job.belay(&[verb, &job.dir()])?;
        let found = words.iter().all(|w| text(&o).contains(w));
        want(found && (verb == "list" || !o.status.success()), || {
            format!("{verb} does not say {words:?}: {}: {}", show(o.status), text(&o))
        })
    };
    let said = job.must(&["verify"])?;
    want(said.matches(": whole").count() == 2, || format!("verify: {said}"))?;
    flip(&job)?;
    finds("verify", &["generation 1: part 1: ", "generation 2: part 1: ", "checksum"])?;
    flip(&job)?;
    job.must(&["verify"])?;
    let part = PathBuf::from(job.dir_of(1));
    let chunks = files(&part.join("chunks"), ".bpg");
    let chunk = chunks.first().ok_or("part 1 has no chunk")?;
    let away = chunk.with_extension("away");
    io("move a chunk", std::fs::rename(chunk, &away))?;
    finds("verify", &["generation 1: part 1: "])?;
    finds("list", &["damaged: part 1 lacks chunk"])?;
    io("move a chunk back", std::fs::rename(&away, chunk))?;
    io("remove a generation", std::fs::remove_dir_all(part.join("gen/000002")))?;
    finds(
        "verify",
        &["generation 1: whole", "generation 2: part 1: ", "1 of 2 generations"],
    )?;
    finds("list", &["damaged: part 1 lacks it"])?;
    io("remove the other part", std::fs::remove_dir_all(&part))?;
    finds("verify", &["generation 1: part 1: ", "generation 2: part 1: "])
}

/// Names in directory `sub` of a part, in order.
fn names(job: &Job, part: usize, sub: &str) -> Vec<String> {
    let list = std::fs::read_dir(Path::new(&job.dir_of(part)).join(sub))
        .into_iter()
        .flatten()
        .flatten();
    let names: BTreeSet<String> = list.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.into_iter().collect()
}

/// What the root has no more goes at the other part too, and nothing else; with `--all` everything.
pub(super) fn gc(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = killed(place, "hosts-gc")?;
    job.must(&["gc"])?;
    let kept = names(&job, 1, "chunks");
    want(names(&job, 1, "gen") == ["000001", "000002"] && kept.len() > 1, || {
        format!("after gc, which had nothing to remove: {kept:?}")
    })?;
    // As where the root could not commit a checkpoint that the part had committed.
    let part = PathBuf::from(job.dir_of(1));
    let copy = |from: &str, to: &str| job.on_host(1, &["cp", "-r", from, to]).map(drop);
    let of = |name: &str| part.join("gen").join(name).display().to_string();
    copy(&of("000002"), &of("000003"))?;
    copy(&of("000002"), &of(".tmp-000004"))?;
    let said = job.must(&["gc"])?;
    want(
        names(&job, 1, "gen") == ["000001", "000002"] && names(&job, 1, "chunks") == kept,
        || format!("after gc: {:?}: {said}", names(&job, 1, "gen")),
    )?;
    job.must(&["gc", "--keep", "1"])?;
    for part in 0..2 {
        want(names(&job, part, "gen") == ["000002"], || {
            format!("part {part}: {:?}", names(&job, part, "gen"))
        })?;
    }
    job.must(&["verify"])?;
    job.restart_at(&[])?;
    job.checkpoint()?;
    job.crash();
    // A process of the part is left.
    let lock = part.join("lock").display().to_string();
    let mut holds = job.command(2, &["flock", &lock, "-c", "echo held; exec sleep 1000"]);
    let mut holds = io("hold a lock", holds.stdout(std::process::Stdio::piped()).spawn())?;
    let mut word = [0; 4];
    let held = holds.stdout.as_mut().map(|out| std::io::Read::read_exact(out, &mut word));
    want(matches!(held, Some(Ok(()))), || "the lock is not held".into())?;
    let o = job.belay(&["gc", "--all", &job.dir()])?;
    job.hosts.kill_host(2);
    io("wait", holds.wait())?;
    want(o.status.code() == Some(69) && text(&o).contains("part 1: "), || {
        format!("gc --all while the part is in use: {}: {}", show(o.status), text(&o))
    })?;
    want(!names(&job, 1, "gen").is_empty(), || {
        "a part in use has lost its checkpoints".into()
    })?;
    job.must(&["gc", "--all"])?;
    for (part, sub) in [(0, "gen"), (0, "chunks"), (1, "gen"), (1, "chunks")] {
        let left = names(&job, part, sub);
        want(left.is_empty(), || format!("part {part} has left in {sub}: {left:?}"))?;
    }
    Ok(())
}

/// Bits of what part 1 has of the newest checkpoint have changed, in memory or in its description: the one before is used
/// by itself, and the user told why.
pub(super) fn damaged(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    for what in ["pages", "job.bimg"] {
        let mut job = killed(place, &format!("hosts-damaged-{}", &what[..3]))?;
        let part = PathBuf::from(job.dir_of(1));
        let path = match what {
            "pages" => files(&part.join("chunks"), ".bpg")
                .into_iter()
                .max()
                .ok_or("part 1 has no chunk")?,
            file => part.join("gen/000002").join(file),
        };
        let mut bytes = io("read what is stored", std::fs::read(&path))?;
        // Of a chunk all pages: some may be of no use.
        let bad = if what == "pages" {
            (bytes.len() - 24) / 4112 * 4096
        } else {
            bytes.len() / 2
        };
        bytes[..bad]
            .iter_mut()
            .skip(bad.saturating_sub(1) % 4096)
            .step_by(4096)
            .for_each(|b| *b ^= 1);
        io("write what is stored", std::fs::write(&path, bytes))?;
        job.restart(&[]).map_err(|e| format!("{what}: {e}"))?;
        let told = ["generation 2 is damaged (on h2: ", "using generation 1"];
        want(told.iter().all(|t| job.said().contains(t)), || {
            format!("{what}: {}", job.said())
        })?;
        job.verdict()?;
    }
    Ok(())
}

/// One step on another host comes after the other: those that have ended keep no more checkpoints than the job does.
pub(super) fn ended(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    const STEPS: usize = 3;
    let mut job = Job::new(place, "hosts-ended", 2, 2)?.unhurried();
    let program = job.program(place, "compute_mem")?;
    job.options = vec!["--keep".into(), "2".into()];
    let (go, beat) = (job.work.join("go"), job.work.join("beat"));
    let (go, beat) = (go.display(), beat.display());
    let script = format!(
        "for n in 1 2 3; do ssh h2 \"BELAY_TEST_GO={go}.$n BELAY_TEST_BEAT={beat}.$n {program}\" || exit 1; done; \
         while [ ! -e {go} ]; do n=$((n + 1)); echo $n > {beat}; sleep 0.05; done; echo PASS"
    );
    job.start_launch(&["sh", "-c", &script])?;
    for step in 1..=STEPS {
        job.progress_of(&format!("beat.{step}"))?;
        job.checkpoint()?;
        want(!names(&job, step, "gen").is_empty(), || {
            format!("part {step} has no checkpoint")
        })?;
        io("let a step end", std::fs::write(format!("{go}.{step}"), ""))?;
    }
    job.progress()?;
    for _ in 0..2 {
        job.checkpoint()?;
        // The root keeps the newest in which another part has taken part.
        let kept = names(&job, 0, "gen");
        want(kept.len() <= 3 && !kept.contains(&"000002".into()), || {
            format!("the root keeps {kept:?}")
        })?;
        for step in 1..=STEPS {
            let here = names(&job, step, "gen");
            want(here.iter().all(|name| kept.contains(name)), || {
                format!("part {step} has {here:?}, the root {kept:?}")
            })?;
        }
    }
    want([1, 2].iter().all(|step| names(&job, *step, "chunks").is_empty()), || {
        "chunks of steps that have ended are left".into()
    })?;
    job.must(&["verify"])?;
    job.crash();
    job.restart(&[])?;
    job.verdict()
}

/// A job whose root's host has died, and whose agent on the other host stands still, so that it does not know; its PIDs.
fn rootless(place: &Place, label: &str) -> Result<(Job, Vec<i32>), Failure> {
    let mut job = Job::new(place, label, 2, 3)?.unhurried();
    let program = job.program(place, "compute_mem")?;
    let beat = job.work.join("beat").display().to_string();
    let go = job.work.join("go").display().to_string();
    let remote = format!("BELAY_TEST_GO={go} BELAY_TEST_BEAT={beat} exec {program}");
    job.start_launch(&["ssh", "h2", &remote])?;
    job.progress()?;
    job.checkpoint()?;
    let agents = job.hosts.find(2, "belay agent");
    want(!agents.is_empty(), || "there is no agent on h2".into())?;
    agents.iter().for_each(|pid| signal(*pid, libc::SIGSTOP));
    job.hosts.kill_host(1);
    job.end()?;
    job.at = vec![3, 2];
    Ok((job, agents))
}

/// A part whose agent of before has not noticed yet that its root is gone waits for its end.
pub(super) fn unaware(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let (mut job, agents) = rootless(place, "hosts-unaware")?;
    job.start_restart()?;
    // Until the new part asks for the lock.
    let new = |job: &Job| job.hosts.find(2, "belay agent").len() > agents.len();
    job.comes_true("a new part", || new(&job))?;
    std::thread::sleep(Duration::from_secs(2));
    want(!job.has_ended()?, || format!("the restart does not wait: {}", job.said()))?;
    belay_tests::beat::forget(&job.work.join("beat"))?;
    agents.iter().for_each(|pid| signal(*pid, libc::SIGCONT));
    job.progress()?;
    job.verdict()
}

/// One whose agent of before stands still is not waited for for ever: the message says what to do, and that works.
pub(super) fn suspended(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let (mut job, agents) = rootless(place, "hosts-suspended")?;
    job.start_restart()?;
    let status = job.end()?;
    let told = ["has lost its root", "on h2)", "kill -CONT"];
    want(
        status.code() == Some(82) && told.iter().all(|t| job.said().contains(t)),
        || format!("{}: {}", show(status), job.said()),
    )?;
    agents.iter().for_each(|pid| signal(*pid, libc::SIGCONT));
    job.restart_at(&[])?;
    job.verdict()
}
