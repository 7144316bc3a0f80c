//! Jobs of a real Slurm, as an ordinary user, with the batch script that belay ships: checkpointed before their time is
//! over, requeued, continued; arrays; scancel.

mod launched;
mod losses;
mod nodes;
mod site;

use belay_tests::across::files;
use belay_tests::build::{build, Kind};
use belay_tests::expect::{io, want};
use belay_tests::hosts::serve_if_asked;
use belay_tests::job::{output, show, text};
use belay_tests::place::{repository, Place};
use belay_tests::rng::Rng;
use belay_tests::slurm::{missing, Slurm, LIMIT};
use belay_tests::target::Target;
use belay_tests::{procs, Failure};
use launched::{launched, By, With};
use site::Site;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A directory of each node's own.
const LOCAL: &str = "/tmp/local";

/// The line that begins so.
fn line<'a>(said: &'a str, word: &str) -> Option<&'a str> {
    said.lines().find(|l| l.starts_with(word))
}

/// The solver's answer.
fn answer(said: &str) -> Option<&str> {
    line(said, "answer")
}

/// A job of four ranks on two nodes is signalled by Slurm before its time is over, and once more by hand; each time it
/// is requeued and goes on.
fn allocations(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::new(place, "slurm-allocations", 2)?;
    // Slurm looks every 30 s, and signals when the time would be over 30 s after the 25: between 5 and 35 s after the start.
    let job = site.submit(&["--time=1", "--signal=B:USR1@25"])?;
    site.progress(&job, 0)?;
    site.slurm
        .await_that("a requeue before the time is over", |s| Ok(s.field(&job, "Restarts")? == "1"))?;
    // What follows has time, as a job has that asks for hours.
    site.slurm
        .ask(&["scontrol", "update", &format!("jobid={job}"), "TimeLimit=60"])?;
    site.runs_again(&job, 1)?;
    site.progress(&job, 0)?;
    std::thread::sleep(Duration::from_millis(rng.below(1000)));
    site.user(&["scancel", "--batch", "--signal=USR1", &job])?;
    site.runs_again(&job, 2)?;
    site.progress(&job, 0)?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.contains("PASS mpi_cg"), || format!("no verdict: {said}"))?;
    let solver = site.work.join("cg").display().to_string();
    let native = site.user(&["mpirun", "--oversubscribe", "-n", "4", &solver])?;
    want(answer(&said).is_some() && answer(&said) == answer(&native), || {
        format!("{said}\nundisturbed: {native}")
    })
}

/// Has the job checkpointed and requeued twice at random moments, then tells it to end.
fn again_and_end(site: &Site, job: &str, rng: &mut Rng) -> Result<(), Failure> {
    for restarts in 1..=2 {
        site.progress(job, 0)?;
        std::thread::sleep(Duration::from_millis(rng.below(500)));
        site.user(&["scancel", "--batch", "--signal=USR1", job])?;
        site.runs_again(job, restarts)?;
    }
    site.progress(job, 0)?;
    io("write go", std::fs::write(site.go(), ""))
}

/// MPICH's mpiexec starts its proxies on both nodes with one srun.
fn mpich(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::of(place, "slurm-mpich", Kind::Mpich, 2)?;
    let job = site.submit(&["--time=10"])?;
    again_and_end(&site, &job, rng)?;
    site.slurm
        .await_that("the verdict", |_| Ok(site.said(&job).contains("PASS mpi_cg")))?;
    site.user(&["scancel", &job]).map(drop)
}

/// Ranks of `srun` with an MPI plugin are where they are without belay, are told the same, and go on after two
/// requeues. `options` are of `srun` too.
fn plugin(site: &Site, options: &str, rng: &mut Rng) -> Result<(), Failure> {
    let simulate = site.slurm.home().join("simulate");
    let text = io("read simulate", std::fs::read_to_string(&simulate))?;
    io(
        "write simulate",
        std::fs::write(&simulate, text.replace("exec ", "BELAY_TEST_TASK=1 exec ")),
    )?;
    let srun = format!("srun {options} ");
    let (cg, early) = (site.work.join("cg"), text.contains("EARLY"));
    let early = if early { "export BELAY_TEST_EARLY=1\n" } else { "" };
    // Ends after one round: that it may is told by a file that is there.
    let native = format!(
        "#!/bin/sh\n{early}BELAY_TEST_GO=/bin/sh BELAY_TEST_TASK=1 {srun} {}\n",
        cg.display()
    );
    io("write native", std::fs::write(site.slurm.home().join("native"), native))?;
    let verdict = |job: &str| {
        let passed = |s: &Slurm| {
            let state = s.field(job, "JobState")?;
            let said = site.said(job);
            let passed = said.contains("PASS mpi_cg");
            want(passed || (state != "FAILED" && state != "CANCELLED"), || {
                format!("{job} is {state}: {said}")
            })?;
            Ok(passed)
        };
        site.slurm.await_that("the verdict", passed)?;
        // Not all ranks of MPICH come to their end: see mpicheck.h. Where they did, there is nothing to cancel.
        drop(site.user(&["scancel", job]));
        Ok::<_, Failure>(site.said(job))
    };
    let natively = || verdict(&site.user(&["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "native"])?);
    // Seen once in 18 runs, under heavy load: a rank that died of a segmentation fault as Slurm's PMIx started it.
    // Nothing of belay is in this run.
    let undisturbed = natively().or_else(|_| natively()).or_else(|_| natively())?;
    site.edit(&[("mpirun ", &srun)])?;
    let job = site.submit(&["--time=10"])?;
    again_and_end(site, &job, rng)?;
    let said = verdict(&job)?;
    for word in ["tasks", "answer"] {
        let (here, there) = (line(&said, word), line(&undisturbed, word));
        want(here.is_some() && here == there, || {
            format!("{word}: {said}\nundisturbed: {undisturbed}")
        })?;
    }
    Ok(())
}

/// MPICH by Slurm's PMI-2, with ranks dealt out to the nodes in turn.
fn pmi2(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    plugin(
        &Site::of(place, "slurm-pmi2", Kind::Mpich, 2)?,
        "--mpi=pmi2 --distribution=cyclic",
        rng,
    )
}

/// Open MPI by Slurm's PMIx, where that is the site's default.
fn pmix(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::configured(place, "slurm-pmix", Kind::OpenMpi, 2, "MpiDefault=pmix\n")?;
    plugin(&site, "--ntasks=4", rng)
}

/// Where `mpirun` is called by its path, or belay finds none but the system's own in place of an `srun` with an MPI
/// plugin: Open MPI puts the directory of its programs, where the real `srun` lies as well, in front of PATH, and
/// starts its daemons by what it finds there.
fn by_path(place: &Place, called: &str, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::new(
        place,
        if called.starts_with("srun") {
            "slurm-path-srun"
        } else {
            "slurm-path"
        },
        2,
    )?;
    io("remove mpirun", std::fs::remove_file(site.work.join("bin/mpirun")))?;
    site.edit(&[("mpirun ", called)])?;
    let job = site.submit(&["--time=10"])?;
    again_and_end(&site, &job, rng)?;
    let said = site.completes(&job)?;
    want(said.contains("PASS mpi_cg"), || format!("no verdict: {said}"))
}

/// What leads to other nodes past the stand-ins is named by a checkpoint, which is refused: daemons of MPI, and tasks
/// of an `srun` that is called by its path.
fn past_standins(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    for (kind, program, named) in [
        (
            Kind::OpenMpi,
            "sh -c '/usr/bin/mpirun.openmpi \"$@\"; exit $?' sh ",
            "orted on another host (srun",
        ),
        (
            Kind::C,
            "/usr/bin/srun --mpi=none -n 2 ",
            "tasks on other hosts (/usr/bin/srun --mpi=none -n 2",
        ),
    ] {
        let site = Site::of(place, "slurm-past", kind, 2)?;
        let script = site.slurm.home().join("belay.sbatch");
        let lines = format!("#!/bin/sh\nexec belay run --across-hosts --ckpt-dir belay-$SLURM_JOB_ID -- {program} ./simulate\n");
        io("write the script", std::fs::write(&script, lines))?;
        let job = site.submit(&["--nodes=2", "--ntasks-per-node=1", "--time=10"])?;
        site.progress(&job, 0)?;
        let dir = site.slurm.home().join(format!("belay-{job}"));
        let o = site.try_user(&["belay", "checkpoint", "--quiet", &dir.display().to_string()])?;
        let said = text(&o);
        want(o.status.code() == Some(80) && said.contains(named), || {
            format!("{program}: {}: {said}", show(o.status))
        })?;
        want(newest(&dir.join("gen")) == 0, || {
            format!("{program}: a generation without what runs elsewhere")
        })?;
    }
    Ok(())
}

/// Tasks that `srun` starts directly are parts of the job, whether or not it names nodes; what of it cannot be had with
/// another launcher is refused.
fn tasks(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::of(place, "slurm-tasks", Kind::C, 2)?;
    site.edit(&[("mpirun ", "srun --mpi=pmi2 --label ")])?;
    let refused = site.submit(&["--time=10"])?;
    site.slurm
        .await_that("the refusal", |s| Ok(s.field(&refused, "JobState")? == "FAILED"))?;
    let said = site.said(&refused);
    want(
        said.contains("--label cannot be carried over to the MPI's own launcher; use mpirun"),
        || format!("no reason: {said}"),
    )?;
    // In the directory in which it is called.
    let there = "sh -c 'mkdir -p sub && cd sub && exec srun --mpi=none \"$@\"' sh ";
    site.edit(&[("srun --mpi=pmi2 --label ", there)])?;
    let simulate = site.slurm.home().join("simulate");
    let text = io("read simulate", std::fs::read_to_string(&simulate))?;
    let text = text.replace("BELAY_TEST_GO", "test \"${PWD##*/}\" = sub || exit 3\nBELAY_TEST_GO");
    io("write simulate", std::fs::write(&simulate, text))?;
    let job = site.submit(&["--time=10"])?;
    again_and_end(&site, &job, rng)?;
    let said = site.completes(&job)?;
    want(said.matches("PASS compute_regs").count() == 4, || {
        format!("not four verdicts: {said}")
    })
}

/// Two tasks of an array, on one node each, are requeued one after the other.
fn array(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::new(place, "slurm-array", 2)?;
    let job = site.submit(&["--array=0-1", "--nodes=1", "--time=10"])?;
    let tasks = [format!("{job}_0"), format!("{job}_1")];
    for (n, task) in tasks.iter().enumerate() {
        site.progress(task, n)?;
        std::thread::sleep(Duration::from_millis(rng.below(500)));
        site.user(&["scancel", "--batch", "--signal=USR1", task])?;
    }
    for (n, task) in tasks.iter().enumerate() {
        site.runs_again(task, 1)?;
        site.progress(task, n)?;
    }
    io("write go", std::fs::write(site.go(), ""))?;
    for task in &tasks {
        let said = site.completes(task)?;
        want(said.contains("PASS mpi_cg"), || format!("no verdict of {task}: {said}"))?;
    }
    Ok(())
}

/// The number of the newest generation in `gen`; 0 for none.
fn newest(gen: &Path) -> u64 {
    let names = std::fs::read_dir(gen).into_iter().flatten().flatten().map(|e| e.file_name());
    names.filter_map(|n| n.to_str()?.parse().ok()).max().unwrap_or(0)
}

/// A job is preempted by one of a partition with priority, requeued, and goes on where it was when that has ended.
fn preempt_and_end(site: &Site, job: &str, rng: &mut Rng) -> Result<(), Failure> {
    std::thread::sleep(Duration::from_millis(rng.below(500)));
    let urgent = site.user(&[
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--wrap=sleep 1",
    ])?;
    site.completes(&urgent)?;
    site.runs_again(job, 1)?;
    want(newest(&site.generations(job)) > 0, || {
        format!("no checkpoint: {}", site.said(job))
    })?;
    site.progress(job, 0)?;
    site.was_restarted(job, &site.slurm.home().join(format!("belay-{job}")))?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(job)?;
    want(said.contains("PASS mpi_cg"), || format!("no verdict: {said}"))
}

/// Where the site lets Slurm send the user's signal to a job that is preempted, that takes its checkpoint within the grace time.
fn preempted(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let more = "SlurmctldParameters=preempt_send_user_signal\n";
    let site = Site::configured(place, "slurm-preempted", Kind::OpenMpi, 2, more)?;
    let job = site.submit(&["--time=10"])?;
    site.progress(&job, 0)?;
    preempt_and_end(&site, &job, rng)
}

/// Elsewhere Slurm ends what `srun` has started at once: the job fails, and goes on from its newest checkpoint. (One
/// that an interval brings just then would be of a dying job.)
fn preempted_unasked(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::new(place, "slurm-unasked", 2)?;
    let job = site.submit(&["--time=10"])?;
    site.progress(&job, 0)?;
    site.checkpoint(&site.slurm.home().join(format!("belay-{job}")))?;
    preempt_and_end(&site, &job, rng)
}

/// A cluster with the SPANK plugin; none where that cannot be compiled.
fn with_plugin(place: &Place, label: &str, kind: Kind) -> Result<Option<Site>, Failure> {
    if !Path::new("/usr/include/slurm/spank.h").exists() {
        println!("{label}: left out: no slurm/spank.h (Debian package libslurm-dev)");
        return Ok(None);
    }
    let site = Site::of(place, label, kind, 2)?;
    let plugin = site.work.join("spank_belay.so").display().to_string();
    let source = repository().join("scripts/site/spank_belay.c").display().to_string();
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", &plugin, &source]);
    let o = output(cc, LIMIT)?;
    want(o.status.success(), || format!("compile the plugin: {}", text(&o)))?;
    let stack = format!("required {plugin} belay={}\n", site.work.join("bin/belay").display());
    io(
        "write plugstack.conf",
        std::fs::write(site.work.join("etc/slurm/plugstack.conf"), stack),
    )?;
    Ok(Some(site))
}

/// The SPANK plugin: a script that does not know of belay is submitted with its options, requeued, and continued;
/// `srun` has them too.
fn spank(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let Some(site) = with_plugin(place, "slurm-spank", Kind::C)? else {
        return Ok(());
    };
    let script = site.slurm.home().join("belay.sbatch");
    let write = |srun: &str| {
        let text = format!("#!/bin/sh\n#SBATCH --nodes=2 --ntasks-per-node=1 --time=10 --requeue --open-mode=append\n{srun} --mpi=none ./simulate\n");
        io("write the script", std::fs::write(&script, text))
    };
    write("srun")?;
    let job = site.submit(&["--ckpt-interval=2", "--ckpt-dir", "saved"])?;
    site.progress(&job, 0)?;
    let gen = site.slurm.home().join("saved/gen");
    site.slurm.await_that("two checkpoints", |_| {
        let said = site.said(&job);
        want(!said.contains("PASS"), || format!("no checkpoints: {said}"))?;
        Ok(newest(&gen) >= 2)
    })?;
    std::thread::sleep(Duration::from_millis(rng.below(1000)));
    site.user(&["scontrol", "requeue", &job])?;
    site.runs_again(&job, 1)?;
    site.progress(&job, 0)?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.matches("PASS compute_regs").count() == 2, || {
        format!("not two verdicts: {said}")
    })?;
    write("srun --ckpt-interval 1s --ckpt-dir=other")?;
    let job = site.submit(&[])?;
    let said = site.completes(&job)?;
    let described = site.slurm.home().join("other/job.json").exists();
    want(described && said.matches("PASS compute_regs").count() == 2, || {
        format!("srun alone: {described}, {said}")
    })
}

/// The tasks of a `srun` in a script that was submitted with the plugin's options are as many as without belay, are found by
/// the PATH of the script, and have their own options of those names.
fn spank_words(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let Some(site) = with_plugin(place, "slurm-spank-words", Kind::C)? else {
        return Ok(());
    };
    let home = site.slurm.home();
    let own = home.join("own");
    let mine = own.join("mine");
    let script = home.join("belay.sbatch");
    let written = std::fs::create_dir(&own)
        .and_then(|()| std::fs::write(&mine, "#!/bin/sh\necho \"task of $SLURM_NTASKS: $*\"\n"))
        .and_then(|()| std::fs::set_permissions(&mine, std::fs::Permissions::from_mode(0o755)));
    io("write the program", written)?;
    // The first by the plugin's own belay run, the second in one of the script's.
    let text = "#!/bin/sh\n#SBATCH --nodes=2 --ntasks=4 --overcommit --time=10\nexport PATH=$PWD/own:$PATH\n\
        srun --mpi=none -N2 -lK0 mine --ckpt-dir out\n\
        belay run --across-hosts --ckpt-dir second -- sh -c 'PATH=/nowhere:$PATH; srun -l --mpi=none -O -N2 mine second'\n\
        echo PASS\n";
    io("write the script", std::fs::write(&script, text))?;
    let job = site.submit(&["--ckpt-interval=1h", "--ckpt-dir", "saved"])?;
    let said = site.completes(&job)?;
    for words in ["task of 4: --ckpt-dir out", "task of 4: second"] {
        want(said.matches(words).count() == 4, || format!("{words}: {said}"))?;
    }
    Ok(())
}

/// Ranks of `srun` under the plugin go on after a requeue without a signal from a checkpoint of before.
fn spank_pmix(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let Some(site) = with_plugin(place, "slurm-spank-pmix", Kind::OpenMpi)? else {
        return Ok(());
    };
    let script = "#!/bin/sh\nsrun --ckpt-interval=1h --ckpt-dir=saved --mpi=pmix ./simulate\n";
    io(
        "write the script",
        std::fs::write(site.slurm.home().join("belay.sbatch"), script),
    )?;
    let options = [
        "--nodes=2",
        "--ntasks-per-node=2",
        "--time=10",
        "--requeue",
        "--open-mode=append",
    ];
    let job = site.submit(&options)?;
    site.progress(&job, 0)?;
    std::thread::sleep(Duration::from_millis(rng.below(500)));
    let dir = site.slurm.home().join("saved");
    site.checkpoint(&dir)?;
    site.user(&["scontrol", "requeue", &job])?;
    site.runs_again(&job, 1)?;
    site.progress(&job, 0)?;
    site.was_restarted(&job, &dir)?;
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.contains("PASS mpi_cg"), || format!("no verdict: {said}"))
}

/// A cancelled job leaves no process behind, on any node.
fn cancelled(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::new(place, "slurm-cancelled", 2)?;
    let job = site.submit(&["--time=10"])?;
    site.progress(&job, 0)?;
    std::thread::sleep(Duration::from_millis(rng.below(500)));
    site.user(&["scancel", &job])?;
    let left = |s: &Slurm| -> Vec<String> {
        let words = ["belay ", "cg", "orted", "mpirun", "ssh "];
        let pids = (2..=3).flat_map(|h| words.iter().flat_map(move |w| s.hosts.find(h, w)));
        pids.map(|p| {
            std::fs::read_to_string(format!("/proc/{p}/cmdline"))
                .unwrap_or_default()
                .replace('\0', " ")
        })
        .collect()
    };
    let gone = site
        .slurm
        .await_that("end of the cancelled job's processes", |s| Ok(left(s).is_empty()));
    gone.map_err(|e| format!("{e}; left: {:?}; {}", left(&site.slurm), site.said(&job)))?;
    let over = |s: &Slurm| Ok(s.field(&job, "JobState")? == "CANCELLED");
    site.slurm.await_that("end of the cancelled job", over)
}

fn main() {
    serve_if_asked();
    if let Some(why) = missing() {
        println!("skipped: no Slurm here: {why}");
        return;
    }
    let mut target = Target::new("slurm", &[]);
    type Run = fn(&Place, &mut Rng) -> Result<(), Failure>;
    // They mostly wait for Slurm, each with a cluster of its own; the longest comes first.
    let tests: [(&str, Run); 24] = [
        ("allocations", allocations),
        ("preempted_unasked", preempted_unasked),
        ("preempted", preempted),
        ("spare", losses::spare),
        ("redundant", losses::redundant),
        ("durable", losses::durable),
        ("local_tiers", losses::local_tiers),
        ("other_nodes", nodes::other_nodes),
        ("launched::salloc_mpirun", |p, r| launched(p, (By::Salloc, With::Mpirun), r)),
        ("launched::salloc_srun", |p, r| launched(p, (By::Salloc, With::Srun), r)),
        ("launched::sbatch_mpirun", |p, r| launched(p, (By::Sbatch, With::Mpirun), r)),
        ("launched::sbatch_srun", |p, r| launched(p, (By::Sbatch, With::Srun), r)),
        ("mpich", mpich),
        ("pmi2", pmi2),
        ("pmix", pmix),
        ("by_path::mpirun", |p, r| by_path(p, "/usr/bin/mpirun.openmpi ", r)),
        ("by_path::srun", |p, r| by_path(p, "srun --mpi=pmix -n 4 ", r)),
        ("past_standins", past_standins),
        ("tasks", tasks),
        ("spank", spank),
        ("spank_words", spank_words),
        ("spank_pmix", spank_pmix),
        ("array", array),
        ("cancelled", cancelled),
    ];
    for (name, test) in tests {
        target.once(name, test);
    }
    target.at_a_time(3);
    target.run();
}
