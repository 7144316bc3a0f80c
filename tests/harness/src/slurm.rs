//! A real Slurm on test hosts: `munged` and `slurmctld` on the first, a `slurmd` on each other, and an ordinary user.
//! All ends with the hosts.
//!
//! Credentials live for 5 s only, the least that Slurm takes, because a requeued job waits for as long before it is
//! started again (two minutes by default).

use crate::hosts::{unavailable, Hosts};
use crate::job::{output, text};
use crate::Failure;
use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::{chown, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The user and group who submit jobs.
const USER: u32 = 2001;
const NAME: &str = "belay-user";
/// Longer than any command or change of state takes, also where much else runs.
pub const LIMIT: Duration = Duration::from_secs(180);
const PROGRAMS: [&str; 4] = [
    "/usr/sbin/munged",
    "/usr/sbin/slurmctld",
    "/usr/sbin/slurmd",
    "/usr/bin/sbatch",
];

/// Why there can be no Slurm here, if so.
pub fn missing() -> Option<String> {
    let lacking = PROGRAMS.iter().find(|p| !Path::new(p).exists());
    unavailable().or_else(|| lacking.map(|p| format!("{p} is not installed (scripts/install-deps test)")))
}

/// A cluster.
#[derive(Debug)]
pub struct Slurm {
    /// Its hosts; h1 has no jobs.
    pub hosts: Hosts,
    dir: PathBuf,
    daemons: Vec<Child>,
}

fn io<T>(what: &str, r: std::io::Result<T>) -> Result<T, Failure> {
    r.map_err(|e| format!("{what}: {e}"))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    io(&format!("write {}", path.display()), std::fs::write(path, text))
}

fn configuration(dir: &Path, nodes: usize, more: &str) -> String {
    let (dir, last) = (dir.display(), nodes + 1);
    format!(
        "ClusterName=belay\nSlurmctldHost=h1\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/munge\nCryptoType=crypto/munge\n\
         AuthInfo=socket={dir}/munge/socket,cred_expire=5\nStateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool/%n\n\
         SlurmctldPidFile={dir}/slurmctld.pid\nSlurmdPidFile={dir}/spool/%n.pid\nSlurmctldLogFile={dir}/slurmctld.log\nSlurmdLogFile={dir}/%n.log\n\
         ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nSelectType=select/cons_tres\n\
         SelectTypeParameters=CR_CPU\nSchedulerType=sched/backfill\nSchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2\n\
         SwitchType=switch/none\nReturnToService=2\nSlurmdParameters=config_overrides\nKillWait=2\nOverTimeLimit=20\n\
         SlurmdTimeout=15\nNodeName=h[2-{last}] CPUs=8 RealMemory=1000 State=UNKNOWN\n\
         PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n\
         PartitionName=all Nodes=h[2-{last}] Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=120\n\
         PartitionName=urgent Nodes=h[2-{last}] MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF\n{more}"
    )
}

impl Slurm {
    /// Starts a cluster with `nodes` nodes, h2 and so on, in the shared directory `dir`, with `more` lines of
    /// configuration, and waits until the nodes are idle. Jobs in the partition `urgent` preempt those in the other
    /// one, which have two minutes of grace and are requeued.
    pub fn new(dir: &Path, nodes: usize, more: &str) -> Result<Self, Failure> {
        for name in ["etc/slurm", "munge", "state", "spool", "user"] {
            io("make a directory", std::fs::create_dir_all(dir.join(name)))?;
        }
        io("give away", chown(dir.join("user"), Some(USER), Some(USER)))?;
        write(&dir.join("etc/slurm/slurm.conf"), &configuration(dir, nodes, more))?;
        write(&dir.join("etc/slurm/cgroup.conf"), "CgroupAutomount=no\nConstrainCores=no\n")?;
        let home = dir.join("user").display().to_string();
        for (file, line) in [
            ("passwd", format!("{NAME}:x:{USER}:{USER}::{home}:/bin/sh\n")),
            ("group", format!("{NAME}:x:{USER}:\n")),
        ] {
            let old = io("read accounts", std::fs::read_to_string(format!("/etc/{file}")))?;
            write(&dir.join("etc").join(file), &format!("{}\n{line}", old.trim_end()))?;
        }
        let key = dir.join("munge/key");
        let mut random = [0u8; 128];
        io(
            "read random bytes",
            std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut random)),
        )?;
        io("write the key", std::fs::write(&key, random))?;
        io(
            "protect the key",
            std::fs::set_permissions(&key, Permissions::from_mode(0o400)),
        )?;
        let mut made = Self {
            hosts: Hosts::new(dir, nodes + 1)?,
            dir: dir.to_owned(),
            daemons: Vec::new(),
        };
        made.start_munge()?;
        made.daemon(1, &["/usr/sbin/slurmctld", "-D", "-c"])?;
        for n in 2..=nodes + 1 {
            made.start_node(n)?;
        }
        made.await_that("idle nodes", |s| {
            Ok(s.ask(&["sinfo", "-h", "-t", "idle", "-o", "%D"])?.trim() == nodes.to_string())
        })?;
        Ok(made)
    }

    fn start_munge(&mut self) -> Result<(), Failure> {
        let at = |name: &str| self.dir.join("munge").join(name).display().to_string();
        let (key, socket) = (format!("--key-file={}", at("key")), format!("--socket={}", at("socket")));
        let (pid, log) = (format!("--pid-file={}", at("pid")), format!("--log-file={}", at("log")));
        let seed = format!("--seed-file={}", at("seed"));
        let words = [
            "/usr/sbin/munged",
            "--foreground",
            "--force",
            &key,
            &socket,
            &pid,
            &log,
            &seed,
        ];
        self.daemon(1, &words)?;
        self.await_that("munge's socket", |s| Ok(s.dir.join("munge/socket").exists()))
    }

    /// Starts the daemon of node `n`.
    pub fn start_node(&mut self, n: usize) -> Result<(), Failure> {
        io("make a spool", std::fs::create_dir_all(self.dir.join(format!("spool/h{n}"))))?;
        self.daemon(n, &["/usr/sbin/slurmd", "-D", "-N", &format!("h{n}")])
    }

    fn daemon(&mut self, host: usize, words: &[&str]) -> Result<(), Failure> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let mut c = self.hosts.command(host, &words);
        let log = io(
            "make a log",
            std::fs::File::create(self.dir.join(format!("daemon.{}", self.daemons.len()))),
        )?;
        let error = io("share a log", log.try_clone())?;
        c.stdin(Stdio::null()).stdout(log).stderr(error);
        self.daemons.push(io("start a daemon", c.spawn())?);
        Ok(())
    }

    /// Waits until `test` holds.
    pub fn await_that(&self, what: &str, test: impl Fn(&Self) -> Result<bool, Failure>) -> Result<(), Failure> {
        let begin = Instant::now();
        while !test(self)? {
            if begin.elapsed() > LIMIT {
                let log = std::fs::read_to_string(self.dir.join("slurmctld.log")).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(20).collect();
                return Err(format!(
                    "{what}: not within {} s; slurmctld, newest first: {}",
                    LIMIT.as_secs(),
                    tail.join("\n")
                ));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Runs a command on h1 as root; what it printed, also when it failed (a daemon may not be there yet).
    pub fn ask(&self, words: &[&str]) -> Result<String, Failure> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        Ok(text(&output(self.hosts.command(1, &words), LIMIT)?))
    }

    /// A command of the ordinary user on h1, in the user's directory.
    pub fn as_user(&self, words: &[&str]) -> Command {
        let (id, home) = (USER.to_string(), self.home());
        let before = [
            "setpriv",
            "--reuid",
            &id,
            "--regid",
            &id,
            "--clear-groups",
            "env",
            "-C",
            &home.display().to_string(),
        ];
        let all: Vec<String> = before.iter().chain(words).map(|w| (*w).to_owned()).collect();
        let mut c = self.hosts.command(1, &all);
        c.env("HOME", &home).env("USER", NAME).env("LOGNAME", NAME);
        c
    }

    /// The user's directory, which all hosts share.
    pub fn home(&self) -> PathBuf {
        self.dir.join("user")
    }

    /// What `scontrol` says about a job under `field`, for example JobState.
    pub fn field(&self, job: &str, field: &str) -> Result<String, Failure> {
        let said = self.ask(&["scontrol", "show", "job", "-o", job])?;
        let key = format!("{field}=");
        let found = said.split_whitespace().find_map(|w| w.strip_prefix(&key));
        found.map(str::to_owned).ok_or(format!("job {job} has no {field}: {said}"))
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        self.hosts.kill_all();
        for daemon in &mut self.daemons {
            let _ = daemon.wait();
        }
    }
}
