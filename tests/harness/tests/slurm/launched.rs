//! `belay launch` and `belay restart` in allocations that the user has asked for, by `salloc` and by `sbatch`: what was
//! killed in one goes on in the next, which has another node.

use super::nodes::on_nodes;
use super::site::Site;
use belay_tests::build::Kind;
use belay_tests::expect::{io, want};
use belay_tests::place::Place;
use belay_tests::procs;
use belay_tests::rng::Rng;
use belay_tests::slurm::LIMIT;
use belay_tests::Failure;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// The job directory.
const DIR: &str = "saved";
/// Each allocation has two of the nodes h2 to h4.
const NODES: [&str; 3] = ["--nodes=2", "--ntasks-per-node=2", "--time=20"];

/// Said where belay chooses the node of the other part; that is h4 each time.
const LINE: &str = "restarting with the other parts on h4, in Slurm's allocation; --hosts names others";

/// How the user gets an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// The command runs on the host where Slurm is called.
    Salloc,
    /// The command runs on the first node.
    Sbatch,
}

/// What starts the program on the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum With {
    Mpirun,
    Srun,
}

/// A command in an allocation.
struct Session<'a> {
    site: &'a Site,
    /// The number of Slurm's job.
    job: String,
    /// Where it says something.
    out: PathBuf,
    salloc: Option<Child>,
}

impl<'a> Session<'a> {
    /// Runs `command` in an allocation without the node `without`.
    fn start(site: &'a Site, by: By, without: &str, command: &[&str]) -> Result<Self, Failure> {
        let exclude = format!("--exclude={without}");
        let options = [&NODES[..], &[&exclude]].concat();
        if by == By::Sbatch {
            let wrap = format!("--wrap=exec {}", command.join(" "));
            let job = site.user(&[&["sbatch", "--parsable"], &options[..], &[&wrap]].concat())?;
            let out = site.slurm.home().join(format!("slurm-{job}.out"));
            return Ok(Self {
                site,
                job,
                out,
                salloc: None,
            });
        }
        let out = site.slurm.home().join(format!("salloc-without-{without}.out"));
        let said = io("make a file", std::fs::File::create(&out))?;
        let error = io("share a file", said.try_clone())?;
        let mut c = site.command(&[&["salloc"], &options[..], command].concat());
        let child = io(
            "start salloc",
            c.stdin(std::process::Stdio::null()).stdout(said).stderr(error).spawn(),
        )?;
        let mut session = Self {
            site,
            job: String::new(),
            out,
            salloc: Some(child),
        };
        let granted = |said: &str| Some(said.split_once("Granted job allocation ")?.1.split_once('\n')?.0.to_owned());
        site.slurm
            .await_that("an allocation", |_| Ok(granted(&session.said()).is_some()))?;
        session.job = granted(&session.said()).unwrap_or_default();
        Ok(session)
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.out).unwrap_or_default()
    }

    /// Waits for the end; whether it was a good one.
    fn end(&mut self) -> Result<bool, Failure> {
        if let Some(salloc) = &mut self.salloc {
            let begin = Instant::now();
            loop {
                let status: Option<ExitStatus> = io("wait for salloc", salloc.try_wait())?;
                if let Some(status) = status {
                    return Ok(status.success());
                }
                want(begin.elapsed() < LIMIT, || {
                    format!("salloc does not end: {}", self.out.display())
                })?;
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let ended = |state: &str| ["COMPLETED", "FAILED", "CANCELLED"].contains(&state);
        let over = format!("the end of job {}", self.job);
        let slurm = &self.site.slurm;
        slurm.await_that(&over, |s| Ok(ended(&s.field(&self.job, "JobState")?)))?;
        Ok(slurm.field(&self.job, "JobState")? == "COMPLETED")
    }

    /// Kills belay and all of the program, everywhere; Slurm's own processes live.
    fn kill(&mut self) -> Result<(), Failure> {
        let hosts = &self.site.slurm.hosts;
        let of_slurm = |pid: &i32| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            ["munged", "salloc"].contains(&name.trim())
        };
        // All lies below directories whose names begin so.
        let all = || -> Vec<i32> {
            let found = (1..=4).flat_map(|h| hosts.find(h, "belay"));
            found.filter(|p| !of_slurm(p)).collect()
        };
        self.site.slurm.await_that("the end of all processes", |_| {
            let left = all();
            left.iter().for_each(|pid| procs::signal(*pid, libc::SIGKILL));
            Ok(left.is_empty())
        })?;
        let good = self.end()?;
        want(!good, || format!("a good end of what was killed: {}", self.said()))
    }
}

/// A job is launched on h2 and h3, checkpointed, killed and restarted on h2 and h4, without a word about hosts; then
/// once more, on h3 and h4.
pub(super) fn launched(place: &Place, (by, with): (By, With), rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("slurm-launched-{by:?}-{with:?}").to_lowercase();
    // Of an MPI program one rank says how it went, of others each task.
    let (kind, starts, verdict, times): (_, &[&str], _, _) = match with {
        With::Mpirun => (Kind::OpenMpi, &["mpirun"], "PASS mpi_cg", 1),
        With::Srun => (Kind::C, &["srun", "--mpi=none"], "PASS compute_regs", 4),
    };
    let site = Site::of(place, &label, kind, 3)?;
    let launch = [
        &["belay", "launch", "--across-hosts", "--ckpt-dir", DIR, "--"],
        starts,
        &["./simulate"],
    ]
    .concat();
    let mut session = Session::start(&site, by, "h4", &launch)?;
    let dir = site.slurm.home().join(DIR);
    // Where belay itself is on a node, it is on the first.
    for (without, before) in [("h3", [2, 3]), ("h2", [2, 4])] {
        let say = |s: &Session, e| format!("{e}; {}", s.said());
        site.progress(&session.job, 0).map_err(|e| say(&session, e))?;
        on_nodes(&site, &before)?;
        std::thread::sleep(Duration::from_millis(rng.below(500)));
        site.checkpoint(&dir)?;
        session.kill()?;
        session = Session::start(&site, by, without, &["belay", "restart", DIR])?;
        site.progress(&session.job, 0).map_err(|e| say(&session, e))?;
        let told = session.said().contains(LINE);
        // Where all nodes get tasks of one srun, Slurm places them.
        want(told == ((by, with) == (By::Sbatch, With::Mpirun)), || {
            format!("it said: {}", session.said())
        })?;
    }
    on_nodes(&site, &[3, 4])?;
    io("write go", std::fs::write(site.go(), ""))?;
    let good = session.end()?;
    want(good && session.said().matches(verdict).count() == times, || {
        format!("no verdict: {}", session.said())
    })
}
