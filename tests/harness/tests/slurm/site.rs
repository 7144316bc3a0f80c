//! A cluster for one test, and what its user does there.

use belay_tests::across::files;
use belay_tests::beat::Beats;
use belay_tests::build::{build, Kind};
use belay_tests::expect::{io, want};
use belay_tests::job::{output, text};
use belay_tests::outcome::take_unless_ended;
use belay_tests::place::{repository, Place, User};
use belay_tests::slurm::{Slurm, LIMIT};
use belay_tests::Failure;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

/// A cluster whose user has the batch script and a solver.
pub(super) struct Site {
    pub(super) slurm: Slurm,
    pub(super) work: PathBuf,
}

impl Site {
    pub(super) fn new(place: &Place, label: &str, nodes: usize) -> Result<Self, Failure> {
        Self::of(place, label, Kind::OpenMpi, nodes)
    }

    pub(super) fn of(place: &Place, label: &str, kind: Kind, nodes: usize) -> Result<Self, Failure> {
        Self::configured(place, label, kind, nodes, "")
    }

    pub(super) fn configured(place: &Place, label: &str, kind: Kind, nodes: usize, more: &str) -> Result<Self, Failure> {
        let work = place.work(label, User::Root)?;
        let bin = work.join("bin");
        io("make bin", std::fs::create_dir_all(&bin))?;
        for name in ["belay", "belay-inject", "belay-restorer"] {
            io("copy belay", std::fs::copy(place.bin().join(name), bin.join(name)))?;
        }
        // mpiexec looks for its proxy beside itself.
        let commands: &[(&str, &str)] = match kind {
            Kind::Mpich => &[("mpirun.mpich", "mpirun"), ("hydra_pmi_proxy", "hydra_pmi_proxy")],
            _ => &[("mpirun.openmpi", "mpirun")],
        };
        for (command, name) in commands {
            io("link mpirun", symlink(Path::new("/usr/bin").join(command), bin.join(name)))?;
        }
        io(
            "copy the solver",
            std::fs::copy(
                build(place, if kind == Kind::C { "compute_regs" } else { "mpi/mpi_cg" }, kind)?,
                work.join("cg"),
            ),
        )?;
        let script = repository().join("scripts/site/belay.sbatch");
        let slurm = Slurm::new(&work, nodes, more)?;
        io("copy the script", std::fs::copy(script, slurm.home().join("belay.sbatch")))?;
        // It says itself what it needs to know: remote shells do not carry the environment. Each task of an array has a
        // heartbeat of its own.
        let (go, cg) = (slurm.home().join("go"), work.join("cg"));
        let set = format!(
            "BELAY_TEST_GO={0} BELAY_TEST_BEAT={0}.beat${{SLURM_ARRAY_TASK_ID:-0}}",
            go.display()
        );
        // MPICH over several hosts may hang in MPI_Finalize: see mpicheck.h.
        let early = if kind == Kind::Mpich { "BELAY_TEST_EARLY=1 " } else { "" };
        let simulate = format!("#!/bin/sh\n{early}{set} exec {}\n", cg.display());
        let to = slurm.home().join("simulate");
        io("write simulate", std::fs::write(&to, simulate))?;
        io(
            "open up",
            std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)),
        )?;
        Ok(Self { slurm, work })
    }

    pub(super) fn user(&self, words: &[&str]) -> Result<String, Failure> {
        let o = self.try_user(words)?;
        want(o.status.success(), || format!("{words:?}: {}", text(&o)))?;
        Ok(String::from_utf8_lossy(&o.stdout).trim().to_owned())
    }

    pub(super) fn try_user(&self, words: &[&str]) -> Result<Output, Failure> {
        output(self.command(words), LIMIT)
    }

    /// A command of the user, with what MPI needs.
    pub(super) fn command(&self, words: &[&str]) -> Command {
        let mut c = self.slurm.as_user(words);
        let path = format!("{0}/rsh:{0}/bin:/usr/bin:/bin", self.work.display());
        c.env("PATH", path);
        c.env("OMPI_MCA_mpi_yield_when_idle", "1").env("HWLOC_COMPONENTS", "-gl");
        c
    }

    /// Takes a checkpoint of the job in `dir`, which has not ended.
    pub(super) fn checkpoint(&self, dir: &Path) -> Result<(), Failure> {
        let taking = || self.try_user(&["belay", "checkpoint", "--quiet", &dir.display().to_string()]);
        let taken = take_unless_ended(taking, || Ok(false))?;
        want(taken, || "no checkpoint: the job has ended".into())
    }

    /// Submits the script with `options`; the number of the job.
    pub(super) fn submit(&self, options: &[&str]) -> Result<String, Failure> {
        self.user(&[&["sbatch", "--parsable"][..], options, &["belay.sbatch"]].concat())
    }

    /// Replaces words of the user's batch script.
    pub(super) fn edit(&self, changes: &[(&str, &str)]) -> Result<(), Failure> {
        let script = self.slurm.home().join("belay.sbatch");
        let mut text = io("read the script", std::fs::read_to_string(&script))?;
        for (from, to) in changes {
            want(text.contains(from), || format!("the script has no {from:?}"))?;
            text = text.replace(from, to);
        }
        io("write the script", std::fs::write(&script, text))
    }

    /// The generations of a job of the script.
    pub(super) fn generations(&self, job: &str) -> PathBuf {
        self.slurm.home().join(format!("belay-{job}/gen"))
    }

    pub(super) fn go(&self) -> PathBuf {
        self.slurm.home().join("go")
    }

    pub(super) fn said(&self, job: &str) -> String {
        std::fs::read_to_string(self.slurm.home().join(format!("slurm-{job}.out"))).unwrap_or_default()
    }

    /// Waits for a round of the solver of array task `task` (0 without an array) that comes after this call.
    pub(super) fn progress(&self, job: &str, task: usize) -> Result<(), Failure> {
        let begin = Instant::now();
        Beats::from_now(self.slurm.home().join(format!("go.beat{task}"))).wait(|| {
            if begin.elapsed() < LIMIT {
                return Ok(());
            }
            let state = self.slurm.field(job, "JobState")?;
            Err(format!("job {job} ({state}) makes no progress: {}", self.said(job)))
        })
    }

    /// Waits until the job runs for the time after its `restarts`th requeue.
    pub(super) fn runs_again(&self, job: &str, restarts: usize) -> Result<(), Failure> {
        self.slurm.await_that(&format!("restart {restarts} of job {job}"), |s| {
            let state = s.field(job, "JobState")?;
            want(state != "FAILED" && state != "COMPLETED", || {
                format!("{job} is {state}: {}", self.said(job))
            })?;
            Ok(state == "RUNNING" && s.field(job, "Restarts")? == restarts.to_string())
        })
    }

    /// The job, whose directory is `dir`, has not begun anew.
    pub(super) fn was_restarted(&self, job: &str, dir: &Path) -> Result<(), Failure> {
        let logs = files(&dir.join("log"), ".jsonl");
        let restarted = |log| std::fs::read_to_string(log).is_ok_and(|l| l.contains("\"message\":\"restarting\""));
        want(logs.iter().any(restarted), || format!("begun anew: {}", self.said(job)))
    }

    pub(super) fn completes(&self, job: &str) -> Result<String, Failure> {
        self.slurm.await_that(&format!("end of job {job}"), |s| {
            let state = s.field(job, "JobState")?;
            want(state != "FAILED", || format!("{job} is {state}: {}", self.said(job)))?;
            Ok(state == "COMPLETED")
        })?;
        Ok(self.said(job))
    }
}
