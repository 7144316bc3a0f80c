//! Jobs over several hosts with local tiers: chunks lie in memory of their hosts until they have been moved to the job
//! directory, which the hosts share.

use super::*;

/// On every host, a file system of its own.
const RAM: &str = "/tmp/ram";

/// Chunks of 4 MiB; of those in memory the first few are moved, and then nothing for an hour.
const SLOW: &str = "1K";
const FAST: &str = "500M";

/// MiB that are enough for everything.
const ROOM: u64 = 512;

/// A configuration with a tier of `mib` in memory of each host, moved at `rate` a second; the words that name it.
fn config(job: &Job, mib: u64, rate: &str) -> Result<[String; 2], Failure> {
    // Also what is called a disk is lost with its host.
    let kind = if mib == ROOM { "local" } else { "memory" };
    let text = format!(
        "[flush]\nrate = \"{rate}\"\n[[tier]]\nname = \"ram\"\nkind = \"{kind}\"\npath = \"{RAM}\"\ncapacity = \"{mib}M\"\n[placement]\npolicy = \"fastest-only\"\n"
    );
    let file = job.work.join(format!("belay-{rate}.toml"));
    std::fs::write(&file, text).map_err(|e| e.to_string())?;
    Ok(["--config".into(), file.display().to_string()])
}

fn with_tiers(job: &mut Job, all: usize, mib: u64, rate: &str) -> Result<(), Failure> {
    for host in 1..=all {
        job.on_host(host, &["mkdir", RAM])?;
    }
    job.options = config(job, mib, rate)?.to_vec();
    Ok(())
}

fn launched(place: &Place, user: User, label: &str, (parts, all): (usize, usize), mib: u64, rate: &str) -> Result<Job, Failure> {
    let mut job = Job::by(user, place, label, Kind::OpenMpi, parts, all)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    with_tiers(&mut job, all, mib, rate)?;
    job.launch(&program)?;
    Ok(job)
}

/// Chunks in memory of a host, and bytes of them.
fn chunks(job: &Job, host: usize) -> Result<(usize, u64), Failure> {
    let said = job.on_host(
        host,
        &["find", RAM, "-ignore_readdir_race", "-name", "*.bpg", "-printf", "%s\n"],
    )?;
    let sizes: Vec<u64> = said.lines().filter_map(|l| l.parse().ok()).collect();
    Ok((sizes.len(), sizes.iter().sum()))
}

/// Wants nothing of any job in memory of these hosts.
fn nothing_left(job: &Job, hosts: &[usize]) -> Result<(), Failure> {
    for host in hosts {
        let left = job.on_host(*host, &["find", RAM, "-mindepth", "1"])?;
        want(left.is_empty(), || format!("left on h{host}: {left}"))?;
    }
    Ok(())
}

/// Wants chunks in memory of the hosts of all parts, and the list to say so.
fn lies_there(job: &Job) -> Result<(), Failure> {
    let listed = job.must(&["list"])?;
    for host in &job.at {
        let (count, _) = chunks(job, *host)?;
        let named = format!("ram on h{host}");
        want(count > 0 && listed.contains(&named), || {
            format!("{count} chunks in memory of h{host}, and the list: {listed}")
        })?;
    }
    Ok(())
}

/// A job whose chunks lie in memory of its hosts is killed and restarted: where it was, on other hosts while the old
/// ones can be reached, all of it on one, and at the end nothing is left there.
pub(super) fn restarts(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, user, &format!("hosts-local-{}", user.name()), (2, 4), ROOM, SLOW)?;
    for (n, at) in [[1, 2], [3, 4], [4, 1], [2, 2]].into_iter().enumerate() {
        let round = |e: Failure| format!("round {n}: {e}");
        std::thread::sleep(Duration::from_millis(rng.below(500)));
        // What is little may be moved at once, the next one not.
        for _ in 0..2 {
            let taken = job.take().map_err(round)?;
            want(taken, || round(format!("ended: {}", job.said())))?;
        }
        lies_there(&job).map_err(round)?;
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.crash();
        let (said, there) = (job.must(&["verify"])?, format!("chunks (ram of h{})", job.at[1]));
        want(said.contains("not read here: part 1: ") && said.contains(&there), || {
            round(format!("verify: {said}"))
        })?;
        let before = std::mem::replace(&mut job.at, at.to_vec());
        job.restart_at(&[]).map_err(round)?;
        want(!job.said().contains("damaged"), || round(job.said()))?;
        // Who was left has no chunk any more.
        let mut away: Vec<usize> = before.into_iter().filter(|h| !at.contains(h)).collect();
        away.dedup();
        nothing_left(&job, &away).map_err(round)?;
    }
    want(job.take()?, || format!("ended: {}", job.said()))?;
    job.verdict()?;
    nothing_left(&job, &[1, 2, 3, 4])?;
    job.must(&["verify"]).map(drop)
}

/// Takes a checkpoint of which nothing lies in memory any more, and kills everything.
fn checkpoint_at_rest(job: &mut Job) -> Result<(), Failure> {
    job.checkpoint()?;
    job.comes_true("all has been moved", || {
        [1, 2].iter().all(|h| chunks(job, *h).is_ok_and(|c| c.0 == 0))
    })?;
    job.crash();
    Ok(())
}

/// A host is gone with what was in its memory: the newest checkpoint of which nothing was there is still there,
/// although newer ones were to be kept in its place, and restarts. When the part comes back to that host, what was left
/// there does no harm.
pub(super) fn host_gone(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-local-gone", 2, 3)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    with_tiers(&mut job, 3, ROOM, FAST)?;
    // The numbers of the parts travel with what they say about their tiers.
    let numbers = job.work.join("job.prom");
    job.options
        .extend(["--metrics".into(), format!("file:{}", numbers.display())]);
    job.launch(&program)?;
    checkpoint_at_rest(&mut job)?;
    // From now on nothing is moved, but the first few.
    let slow = config(&job, ROOM, SLOW)?;
    let slow: Vec<&str> = slow.iter().map(String::as_str).collect();
    job.restart_at(&slow)?;
    for _ in 0..4 {
        job.progress()?;
        job.checkpoint()?;
    }
    lies_there(&job)?;
    let told = std::fs::read_to_string(&numbers).map_err(|e| e.to_string())?;
    let said: serde_json::Value = serde_json::from_str(&job.must(&["list", "--json"])?).map_err(|e| e.to_string())?;
    let last = said["generations"]
        .as_array()
        .and_then(|all| all.last())
        .ok_or("no generations")?;
    let (of_root, listed) = (last["hosts"][0]["ranks"].as_f64(), last["ranks"].as_f64());
    let all = metric(&told, "belay_processes", "")?;
    want(of_root.is_some_and(|own| own < all) && listed == Some(all), || {
        format!("of {all} processes {listed:?} are listed, and the root has {of_root:?}")
    })?;
    let newest = job.newest();
    job.crash();
    job.hosts.hide(2)?;
    job.at = vec![1, 3];
    // Where only that one will do, nothing is begun.
    let (number, dir) = (newest.to_string(), job.dir());
    let words = ["restart", "--hosts", "h3", "--generation", &number, &dir];
    let o = job.belay(&words)?;
    want(!o.status.success() && text(&o).contains("h2 does not answer"), || {
        format!("a restart from what is on a host that is gone: {}", text(&o))
    })?;
    job.restart_at(&[])?;
    let said = job.said();
    // The two newest are lost, and would have been kept in place of all others.
    let older = (1..newest - 1).any(|n| said.contains(&format!("using generation {n}, ")));
    want(older && said.contains("h2 does not answer"), || {
        format!("after {newest} generations, an older one was to be used: {said}")
    })?;
    job.checkpoint()?;
    job.progress()?;
    job.crash();
    job.hosts.show(2)?;
    want(chunks(&job, 2)?.0 > 0, || "h2 has lost its memory".into())?;
    job.at = vec![1, 2];
    for _ in 0..2 {
        job.restart_at(&[])?;
        want(!job.said().contains("damaged"), || job.said())?;
        job.checkpoint()?;
        job.crash();
    }
    job.restart_at(&[])?;
    job.verdict()?;
    nothing_left(&job, &[1, 2, 3])
}

/// A host dies, and `belay run` goes on by itself from the newest checkpoint of which nothing was in that host's memory.
pub(super) fn host_dies(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-local-dies", 2, 3)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    with_tiers(&mut job, 3, ROOM, FAST)?;
    job.launch(&program)?;
    checkpoint_at_rest(&mut job)?;
    let (belay, dir, [option, slow]) = (job.belay.clone(), job.dir(), config(&job, ROOM, SLOW)?);
    let run = [
        &belay,
        "run",
        "--across-hosts",
        "--ckpt-dir",
        &dir,
        "--hosts",
        "h2,h3",
        &option,
        &slow,
        "--",
    ];
    let command = job.mpirun(&program);
    let words: Vec<&str> = run.into_iter().chain(command.iter().map(String::as_str)).collect();
    job.start(&words)?;
    job.progress()?;
    for _ in 0..4 {
        job.progress()?;
        job.checkpoint()?;
    }
    lies_there(&job)?;
    std::thread::sleep(Duration::from_millis(rng.below(300)));
    job.hosts.hide(2)?;
    job.hosts.kill_host(2);
    job.says("h2 does not answer; restarting with the other parts on h3")?;
    job.says("h2 does not answer); using generation")?;
    job.progress()?;
    job.hosts.show(2)?;
    job.verdict()?;
    nothing_left(&job, &[1, 3])
}

/// What lies in memory of the hosts is moved, and then copied to a durable tier by the root: from there everything comes back.
pub(super) fn durable(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-local-durable", 2, 3)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    with_tiers(&mut job, 3, ROOM, "20M")?;
    let scratch = job.work.join("scratch");
    std::fs::create_dir(&scratch).map_err(|e| e.to_string())?;
    let file = &job.options[1];
    let tier = format!(
        "[[tier]]\nname = \"scratch\"\nkind = \"pfs\"\npath = \"{}\"\n",
        scratch.display()
    );
    let text = std::fs::read_to_string(file).map_err(|e| e.to_string())?;
    std::fs::write(file, text + &tier).map_err(|e| e.to_string())?;
    job.launch(&program)?;
    for _ in 0..2 {
        job.must(&["checkpoint", "--quiet", "--level", "durable"])?;
    }
    job.must(&["verify"])?;
    job.crash();
    job.hosts.hide(2)?;
    std::fs::remove_dir_all(job.dir()).map_err(|e| e.to_string())?;
    job.at = vec![1, 3];
    let options = job.options.clone();
    job.restart_at(&options.iter().map(String::as_str).collect::<Vec<_>>())?;
    job.hosts.show(2)?;
    job.must(&["checkpoint", "--quiet", "--level", "durable"])?;
    job.verdict()
}

/// Memory far too small for the job: it is killed in the middle of checkpoints and of moves, and goes on where it was
/// or elsewhere. Then it is stopped, and everything is moved before that has an end.
pub(super) fn small_and_killed(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = launched(place, User::Root, "hosts-local-small", (2, 3), 9, "40M")?;
    for n in 0..rounds_wanted() + 1 {
        let round = |e: Failure| format!("round {n}: {e}");
        job.checkpoint().map_err(round)?;
        // In the middle of a further one, or of the moves after it.
        let mut child = job.command(job.at[0], &[&job.belay, "checkpoint", "--quiet", &job.dir()]);
        let mut child = child.stderr(std::process::Stdio::null()).spawn().map_err(|e| e.to_string())?;
        std::thread::sleep(Duration::from_millis(rng.below(900)));
        job.crash();
        child.wait().map_err(|e| e.to_string())?;
        if n % 2 == 1 {
            job.shift(n);
        }
        job.restart_at(&[]).map_err(round)?;
        want(!job.said().contains("damaged"), || round(job.said()))?;
    }
    job.must(&["checkpoint", "--quiet", "--then", "stop"])?;
    let end = job.end()?;
    want(end.code() == Some(85), || format!("{end}: {}", job.said()))?;
    nothing_left(&job, &[1, 2, 3]).map_err(|e| format!("stopped: {e}"))?;
    job.at.iter().try_for_each(|h| job.hosts.hide(*h))?;
    let gone = std::mem::replace(&mut job.at, vec![1, 1]);
    job.at = (1..=3).filter(|h| !gone.contains(h)).cycle().take(2).collect();
    job.restart_at(&[])?;
    gone.iter().try_for_each(|h| job.hosts.show(*h))?;
    job.verdict()?;
    nothing_left(&job, &[1, 2, 3])
}

/// Parts on one host never have more in its memory together than one may, also while they write.
pub(super) fn shared(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mib = 9;
    let mut job = Job::of(place, "hosts-local-shared", Kind::C, 2, 2)?;
    // Each of three writes more than half of that every time.
    let program = job.program(place, "compute_mem")?;
    with_tiers(&mut job, 2, mib, "4M")?;
    let (go, beat) = (job.work.join("go"), job.work.join("beat"));
    let (go, beat) = (go.display(), beat.display());
    let script = format!(
        "for n in 1 2 3; do ssh h2 \"BELAY_TEST_GO={go} BELAY_TEST_BEAT={beat}.$n {program}\" & all=\"$all $!\"; done; \
         while [ ! -e {go} ]; do n=$((n + 1)); echo $n > {beat}; sleep 0.05; done; for p in $all; do wait $p || exit 1; done; echo PASS"
    );
    job.launch_words(&["sh", "-c", &script])?;
    let mut seen = 0;
    for n in 0..4 {
        for part in 1..=3 {
            job.progress_of(&format!("beat.{part}"))?;
        }
        let mut taking = job.command(1, &[&job.belay, "checkpoint", "--quiet", &job.dir()]);
        let taking = taking.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let mut taking = taking.spawn().map_err(|e| e.to_string())?;
        let mut most = 0;
        let end = loop {
            most = most.max(chunks(&job, 2)?.1);
            if let Some(end) = taking.try_wait().map_err(|e| e.to_string())? {
                break end;
            }
        };
        want(end.success(), || format!("checkpoint {n}: {}: {}", show(end), job.said()))?;
        want(most <= mib << 20, || {
            format!("checkpoint {n}: {most} bytes in memory of h2, {mib} MiB are allowed")
        })?;
        // What is little may be moved before anybody sees it.
        seen = seen.max(most);
        if n == 1 {
            job.crash();
            job.restart(&[])?;
        }
    }
    want(seen > 0, || "nothing was ever in memory of h2".into())?;
    job.verdict()?;
    nothing_left(&job, &[2])
}

/// What lies on a host of the root's part is moved twice at the same time, as where a restart was killed that had begun
/// with it: neither takes anything from the other.
pub(super) fn moved_twice(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, "hosts-local-twice", Kind::C, 1, 2)?;
    let program = job.program(place, "compute_mem")?;
    with_tiers(&mut job, 2, ROOM, SLOW)?;
    let words = ["store", "home", "--tag", "0", "--dir"];
    let move_home = |job: &Job| {
        let mut c = job.command(1, &[&[job.belay.as_str()], &words[..], &[&job.dir()]].concat());
        c.stdout(std::process::Stdio::piped()).spawn().map_err(|e| e.to_string())
    };
    let said = |c: std::process::Child| {
        let o = c.wait_with_output().map_err(|e| e.to_string())?;
        want(o.status.success() && text(&o).contains("\"Ok\""), || text(&o))
    };
    job.launch_words(&[&program])?;
    until_hit(3, |_| {
        // What is little may be moved at once, the next one not.
        job.checkpoint()?;
        job.checkpoint()?;
        lies_there(&job)?;
        job.crash();
        let mut first = move_home(&job)?;
        let at = Path::new(&job.dir()).join("chunks");
        let in_middle = || !files(&at, "/.tmp-").is_empty();
        let all = |sig| job.hosts.find(1, "store home").into_iter().for_each(|p| signal(p, sig));
        let mut stopped = false;
        while !stopped && first.try_wait().map_err(|e| e.to_string())?.is_none() {
            if in_middle() {
                all(libc::SIGSTOP);
                stopped = in_middle();
                if !stopped {
                    all(libc::SIGCONT);
                }
            }
        }
        let mut second = move_home(&job)?;
        for _ in 0..100 {
            if second.try_wait().map_err(|e| e.to_string())?.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // `nsenter` stops itself when it sees that its child has stopped, which may be now.
        let end = std::time::Instant::now() + Duration::from_secs(120);
        while first.try_wait().map_err(|e| e.to_string())?.is_none() {
            want(std::time::Instant::now() < end, || "the first does not end".into())?;
            all(libc::SIGCONT);
            signal(first.id().cast_signed(), libc::SIGCONT);
            std::thread::sleep(Duration::from_millis(10));
        }
        said(first).map_err(|e| format!("the first: {e}"))?;
        said(second).map_err(|e| format!("the second: {e}"))?;
        nothing_left(&job, &[1])?;
        job.restart(&[])?;
        Ok(stopped)
    })?;
    job.must(&["verify"])?;
    job.verdict()
}

/// A tier that is not there on one host is refused, with the host's name; what an earlier job in the same directory has
/// left is removed.
pub(super) fn not_there(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-local-none", 2, 2)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    with_tiers(&mut job, 2, ROOM, SLOW)?;
    job.on_host(2, &["rmdir", RAM])?;
    let words = job.mpirun(&program);
    job.start_launch(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    let end = job.end()?;
    let said = job.said();
    want(!end.success() && said.contains("tier ram") && said.contains("on h2"), || {
        format!("a tier that is not there on h2: {end}: {said}")
    })?;
    job.on_host(2, &["mkdir", RAM])?;
    job.launch(&program)?;
    job.checkpoint()?;
    lies_there(&job)?;
    job.crash();
    let said = job.must(&["gc", "--all"])?;
    want(said.contains("nodes/1: chunks may stay in ram of h2"), || {
        format!("gc --all: {said}")
    })?;
    job.launch(&program)?;
    job.verdict()?;
    nothing_left(&job, &[1, 2])
}
