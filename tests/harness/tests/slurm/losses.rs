//! Nodes that die during a job, and what lay on their own disks.

use super::*;
use std::path::PathBuf;

/// The number of the newest redundant checkpoint of the job in `dir`; 0 for none.
fn newest_record(dir: &Path) -> u64 {
    let records = files(&dir.join("redundant"), ".json");
    records
        .iter()
        .filter_map(|f| f.file_stem()?.to_str()?.parse().ok())
        .max()
        .unwrap_or(0)
}

/// A node dies during the job: it goes on in the same allocation, on the node that is to spare.
pub(super) fn spare(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::new(place, "slurm-spare", 3)?;
    site.edit(&[
        ("belay run ", "belay run --ckpt-interval 2 "),
        ("mpirun ", "mpirun --novm -n 4 "),
    ])?;
    let job = site.submit(&["--nodes=3", "--no-kill", "--time=20"])?;
    site.progress(&job, 0)?;
    let gen = site.generations(&job);
    site.slurm.await_that("two checkpoints", |_| Ok(newest(&gen) >= 2))?;
    std::thread::sleep(Duration::from_millis(rng.below(1000)));
    site.slurm.hosts.kill_host(3);
    site.slurm.await_that("a restart", |s| {
        let state = s.field(&job, "JobState")?;
        want(state == "RUNNING", || format!("{job} is {state}: {}", site.said(&job)))?;
        Ok(site
            .said(&job)
            .contains("h3 does not answer; restarting with the other parts on h4"))
    })?;
    site.progress(&job, 0)?;
    site.progress(&job, 0)?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.contains("PASS mpi_cg"), || format!("no verdict: {said}"))?;
    let restarts = site.slurm.field(&job, "Restarts")?;
    want(restarts == "0", || format!("requeued {restarts} times: {said}"))
}

/// Tasks of `srun` whose checkpoints lie on the nodes' own disks: a node dies with all it held, and the job goes on, in
/// its allocation, from what the others have; then, requeued, every task finds its own again.
pub(super) fn redundant(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut site = Site::of(place, "slurm-redundant", Kind::C, 4)?;
    for node in 2..=5 {
        let words = ["mkdir", "-m", "1777", LOCAL].map(str::to_owned);
        let made = output(site.slurm.hosts.command(node, &words), LIMIT)?;
        want(made.status.success(), || text(&made))?;
    }
    let run = format!("belay run --ckpt-interval 2 --redundancy xor --local-dir {LOCAL} ");
    // The node to spare is the last one: six tasks, two on each node.
    site.edit(&[("belay run ", &run), ("mpirun ", "srun --mpi=none -N 3 -n 6 ")])?;
    let job = site.submit(&["--nodes=4", "--ntasks-per-node=2", "--no-kill", "--time=20"])?;
    site.progress(&job, 0)?;
    let dir = site.slurm.home().join(format!("belay-{job}"));
    let redundant = |site: &Site, after: u64| {
        let made = |_: &Slurm| Ok(newest_record(&dir) > after);
        let made = site.slurm.await_that("a redundant checkpoint", made);
        made.map_err(|e| format!("{e}; {}", site.said(&job)))
    };
    redundant(&site, 0)?;
    std::thread::sleep(Duration::from_millis(rng.below(1000)));
    site.slurm.hosts.kill_host(4);
    let lost = ["sh", "-c", &format!("rm -r {LOCAL}/*")].map(str::to_owned);
    let lost = output(site.slurm.hosts.command(4, &lost), LIMIT)?;
    want(lost.status.success(), || text(&lost))?;
    site.slurm.await_that("a restart", |s| {
        let state = s.field(&job, "JobState")?;
        want(state == "RUNNING", || format!("{job} is {state}: {}", site.said(&job)))?;
        Ok(site
            .said(&job)
            .contains("h4 does not answer; restarting with the other parts on h2, h2, h3, h3, h5, h5"))
    })?;
    site.progress(&job, 0)?;
    site.was_restarted(&job, &dir)?;
    redundant(&site, newest_record(&dir))?;
    // A requeue asks for as many nodes as before.
    site.slurm.start_node(4)?;
    site.user(&["scancel", "--batch", "--signal=USR1", &job])?;
    site.runs_again(&job, 1)?;
    site.progress(&job, 0)?;
    let shared: Vec<_> = files(&dir, ".bpg");
    want(shared.is_empty(), || format!("data where all nodes see it: {shared:?}"))?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.matches("PASS compute_regs").count() == 6, || {
        format!("not six verdicts: {said}")
    })
}

/// Tasks of `srun` whose checkpoints lie on the nodes' own disks, and now and then also where all nodes see them: two
/// nodes die with all they held, one more than the group survives, and the job goes on with what the tier has.
pub(super) fn durable(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::of(place, "slurm-durable", Kind::C, 4)?;
    for node in 2..=5 {
        let words = ["mkdir", "-m", "1777", LOCAL].map(str::to_owned);
        let made = output(site.slurm.hosts.command(node, &words), LIMIT)?;
        want(made.status.success(), || text(&made))?;
    }
    let scratch = site.slurm.home().join("scratch");
    site.user(&["mkdir", &scratch.display().to_string()])?;
    let config = site.slurm.home().join("tier.toml");
    let tier = format!(
        "[[tier]]\nname = \"scratch\"\nkind = \"pfs\"\npath = \"{}\"\n",
        scratch.display()
    );
    io("write", std::fs::write(&config, tier))?;
    let levels = format!("--durable-every 2 --config {} ", config.display());
    let run = format!("belay run --ckpt-interval 2 --redundancy xor --local-dir {LOCAL} {levels}");
    site.edit(&[("belay run ", &run), ("mpirun ", "srun --mpi=none -N 3 -n 6 ")])?;
    let job = site.submit(&["--nodes=4", "--ntasks-per-node=2", "--no-kill", "--time=20"])?;
    site.progress(&job, 0)?;
    let dir = site.slurm.home().join(format!("belay-{job}"));
    // Those of the parts lie below `nodes`.
    let of_root = |f: &&PathBuf| f.parent().is_some_and(|p| p.ends_with("gen")) && !f.to_string_lossy().contains("/nodes/");
    let records = || files(&scratch, ".json").iter().filter(of_root).count();
    let made = site.slurm.await_that("a durable checkpoint", |_| Ok(records() > 0));
    made.map_err(|e| format!("{e}; {}", site.said(&job)))?;
    std::thread::sleep(Duration::from_millis(rng.below(3000)));
    for node in [3, 4] {
        site.slurm.hosts.kill_host(node);
        let lost = ["sh", "-c", &format!("rm -r {LOCAL}/*")].map(str::to_owned);
        let lost = output(site.slurm.hosts.command(node, &lost), LIMIT)?;
        want(lost.status.success(), || text(&lost))?;
    }
    site.slurm.await_that("a restart", |s| {
        let state = s.field(&job, "JobState")?;
        want(state == "RUNNING", || format!("{job} is {state}: {}", site.said(&job)))?;
        Ok(site.said(&job).contains("restarting with the other parts on h2"))
    })?;
    site.progress(&job, 0)?;
    site.was_restarted(&job, &dir)?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.matches("PASS compute_regs").count() == 6, || {
        format!("not six verdicts: {said}")
    })
}

/// Chunks of a job, bytes of them left out, in the local tier of each of these hosts.
fn in_tiers<const N: usize>(site: &Site, hosts: [usize; N]) -> Result<[usize; N], Failure> {
    let mut all = [0; N];
    for (count, host) in all.iter_mut().zip(hosts) {
        let words = ["find", LOCAL, "-ignore_readdir_race", "-name", "*.bpg"].map(str::to_owned);
        let found = output(site.slurm.hosts.command(host, &words), LIMIT)?;
        want(found.status.success(), || text(&found))?;
        *count = text(&found).lines().count();
    }
    Ok(all)
}

/// Tasks of `srun` whose chunks lie on the disks of their nodes: a requeued job finds them on the nodes of before, and
/// does without them where a node is not its own any more.
pub(super) fn local_tiers(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::of(place, "slurm-local", Kind::C, 3)?;
    // A program with something new to store each time.
    let program = site.work.join("cg");
    io("copy mem_diff", std::fs::copy(build(place, "mem_diff", Kind::C)?, &program))?;
    let simulate = site.slurm.home().join("simulate");
    let words = io("read simulate", std::fs::read_to_string(&simulate))?;
    io("write simulate", std::fs::write(&simulate, words.replace("/cg", "/cg alone")))?;
    for node in 2..=4 {
        let words = ["mkdir", "-m", "1777", LOCAL].map(str::to_owned);
        let made = output(site.slurm.hosts.command(node, &words), LIMIT)?;
        want(made.status.success(), || text(&made))?;
    }
    // Nothing is moved meanwhile, but the first few.
    let config = site.slurm.home().join("belay.toml");
    let text = format!("[flush]\nrate = \"1K\"\n[[tier]]\nname = \"disk\"\nkind = \"local\"\npath = \"{LOCAL}\"\ncapacity = \"512M\"\n[placement]\npolicy = \"fastest-only\"\n");
    io("write belay.toml", std::fs::write(&config, text))?;
    let run = format!("belay run --config {} ", config.display());
    site.edit(&[("belay run ", &run), ("mpirun ", "srun --mpi=none ")])?;
    let job = site.submit(&["--time=20", "--exclude=h4"])?;
    let dir = site.slurm.home().join(format!("belay-{job}"));
    let checkpoints = |hosts: [usize; 2]| {
        for _ in 0..4 {
            site.progress(&job, 0)?;
            site.checkpoint(&dir)?;
        }
        let there = in_tiers(&site, hosts)?;
        want(there.iter().all(|n| *n > 0), || format!("chunks on the nodes: {there:?}"))
    };
    let requeue = |restarts: usize, without: &str| {
        site.user(&["scontrol", "requeue", &job])?;
        site.user(&[
            "scontrol",
            "update",
            &format!("jobid={job}"),
            &format!("ExcNodeList={without}"),
        ])?;
        site.runs_again(&job, restarts)?;
        site.progress(&job, 0)?;
        Ok::<_, Failure>(site.said(&job))
    };
    // All at once, h4 first: who notices the loss of another ends its part, and moves what it has. (So does who is killed
    // by Slurm, which sends SIGTERM first.)
    let killed = || {
        // All lies below directories whose names begin so.
        let all = || -> Vec<i32> { (2..=4).rev().flat_map(|host| site.slurm.hosts.find(host, "belay")).collect() };
        site.slurm.await_that("the end of all processes", |_| {
            let left = all();
            left.iter().for_each(|pid| procs::signal(*pid, libc::SIGKILL));
            Ok(left.is_empty())
        })?;
        let over = |s: &Slurm| Ok(s.field(&job, "JobState")? == "FAILED");
        site.slurm.await_that("the end of a job that was killed", over)
    };
    let older = |said: &str| said.contains("using generation");
    site.progress(&job, 0)?;
    std::thread::sleep(Duration::from_millis(rng.below(500)));
    checkpoints([2, 3])?;
    // Between the signals with which Slurm ends a job is time to move it all.
    let said = requeue(1, "h3")?;
    want(!older(&said), || format!("not the newest on another node: {said}"))?;
    checkpoints([2, 4])?;
    killed()?;
    let said = requeue(2, "h3")?;
    want(!older(&said), || format!("not the newest on the nodes of before: {said}"))?;
    checkpoints([2, 4])?;
    killed()?;
    let said = requeue(3, "h4")?;
    want(older(&said) && said.contains("h4 does not answer"), || {
        format!("what lies only on h4 is out of reach: {said}")
    })?;
    site.was_restarted(&job, &dir)?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.matches("PASS mem_diff").count() == 4, || {
        format!("not four verdicts: {said}")
    })?;
    let left = in_tiers(&site, [2, 3])?;
    want(left == [0, 0], || format!("left on the nodes: {left:?}"))
}
