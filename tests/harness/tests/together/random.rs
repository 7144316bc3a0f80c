//! Faults at random moments of checkpoints and restarts: hosts, agents and ranks are killed, hosts are cut off, disks
//! and local tiers are full. What is called whole restarts, nothing that was promised is lost, and a program of which
//! only a checkpoint has failed goes on.
//!
//! BELAY_STRESS (8) rounds.

use super::END;
use belay_tests::across::Job;
use belay_tests::agents::agent;
use belay_tests::build::Kind;
use belay_tests::expect::want;
use belay_tests::filler::fill;
use belay_tests::job::{output, text};
use belay_tests::place::Place;
use belay_tests::procs::signal;
use belay_tests::rng::Rng;
use belay_tests::runner::rounds;
use belay_tests::Failure;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Output;
use std::time::Duration;

/// Holds the checkpoints many times.
const DISK: &str = "600m";
/// On every host, a file system of its own.
const RAM: &str = "/tmp/ram";
/// What comes to pass falls within this time after a checkpoint was asked for, in milliseconds; most are over by then.
const WITHIN: u64 = 200;
/// The same for a restart.
const WITHIN_RESTART: u64 = 1000;
/// A host that is cut off for less is not taken for lost.
const SHORT_CUT: u64 = 2500;
/// One that is cut off for so long is.
const LONG_CUT: u64 = 20_000;
/// One generation in so many rounds is restarted that is not the newest.
const OLDER: u64 = 4;
/// One round in so many has a fault in its restart too.
const AGAIN: u64 = 4;
/// After so many rounds the program ends, and another one begins.
const VERDICT: u64 = 4;

/// Where the job runs, and what of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) name: &'static str,
    pub(super) parts: usize,
    pub(super) all: usize,
    /// Chunks lie in memory of the hosts first.
    pub(super) local: bool,
}

/// What comes to pass.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Nothing,
    Host(usize),
    Agent(usize),
    Rank(usize),
    DiskFull,
    /// The host of the part, for so many milliseconds.
    Cut(usize, u64),
    TierFull(usize),
}

impl Fault {
    fn any(shape: Shape, rng: &mut Rng) -> Self {
        let part = rng.below(shape.parts as u64) as usize;
        match rng.below(if shape.local { 14 } else { 11 }) {
            0 => Self::Nothing,
            1 | 2 => Self::Host(part),
            3 | 4 => Self::Agent(part),
            5 | 6 => Self::Rank(part),
            7 | 8 => Self::DiskFull,
            9 | 10 if rng.below(4) == 0 => Self::Cut(part, LONG_CUT),
            9 | 10 => Self::Cut(part, rng.below(SHORT_CUT)),
            _ => Self::TierFull(part),
        }
    }

    /// Only the checkpoint is concerned, not the program.
    fn spares_program(self) -> bool {
        matches!(
            self,
            Self::Nothing | Self::DiskFull | Self::TierFull(_) | Self::Cut(_, ..SHORT_CUT)
        )
    }

    fn strike(self, job: &Job, agents: &[i32]) -> Result<(), Failure> {
        match self {
            Self::Nothing => {}
            Self::Host(part) => job.hosts.kill_host(job.at[part]),
            Self::Agent(part) => signal(agents[part], libc::SIGKILL),
            Self::Rank(part) => {
                let ranks = job.hosts.find(job.at[part], &job.work.join("program").display().to_string());
                let is_rank = |p: &&i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == "program");
                if let Some(rank) = ranks.iter().find(is_rank) {
                    signal(*rank, libc::SIGKILL);
                }
            }
            Self::DiskFull => fill(&filler(job))?,
            Self::Cut(part, for_ms) => {
                job.hosts.cut(job.at[part], true)?;
                std::thread::sleep(Duration::from_millis(for_ms));
                job.hosts.cut(job.at[part], false)?;
            }
            Self::TierFull(part) => {
                let fill = format!("cat /dev/zero > {RAM}/filler 2> /dev/null; true");
                job.on_host(job.at[part], &["sh", "-c", &fill])?;
            }
        }
        Ok(())
    }

    /// There is room again.
    fn pass(self, job: &Job) -> Result<(), Failure> {
        match self {
            Self::DiskFull => std::fs::remove_file(filler(job)).map_err(|e| format!("remove the filler: {e}"))?,
            Self::TierFull(part) => drop(job.on_host(job.at[part], &["rm", &format!("{RAM}/filler")])?),
            _ => {}
        }
        Ok(())
    }
}

fn filler(job: &Job) -> PathBuf {
    job.work.join("job/filler")
}

/// The generations that are called whole, the oldest first.
fn whole(job: &Job) -> Result<Vec<u64>, Failure> {
    let said = text(&job.belay(&["list", "--json", &job.dir()])?);
    let list: serde_json::Value = serde_json::from_str(said.trim()).map_err(|e| format!("{e}: {said}"))?;
    let all = list
        .as_array()
        .or_else(|| list["generations"].as_array())
        .ok_or_else(|| said.clone())?;
    let whole = all.iter().filter(|g| g["whole"] == true);
    let mut numbers: Vec<u64> = whole.filter_map(|g| g["generation"].as_u64()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// A checkpoint during which something comes to pass; what it has said.
fn struck(job: &Job, fault: Fault, rng: &mut Rng) -> Result<Output, Failure> {
    let agents = (0..job.at.len())
        .map(|part| agent(job, part))
        .collect::<Result<Vec<_>, _>>()?;
    let taking = job.command(job.at[0], &[&job.belay, "checkpoint", "--quiet", &job.dir()]);
    let taken = std::thread::spawn(move || output(taking, END));
    std::thread::sleep(Duration::from_millis(rng.below(WITHIN)));
    let done = fault.strike(job, &agents);
    let taken = taken.join().map_err(|_| "the command's thread failed")?;
    let taken = taken.map_err(|e| format!("{e}: {}", job.account()));
    done.and(taken)
}

/// Hosts for the parts: different ones, in any order, or, now and then, one for all.
fn places(shape: Shape, rng: &mut Rng) -> Vec<usize> {
    let first = rng.below(shape.all as u64) as usize;
    let step = rng.below(shape.all as u64) as usize;
    let mut at: Vec<usize> = (0..shape.parts).map(|n| (first + n * step) % shape.all + 1).collect();
    if step > 0 && at.iter().collect::<BTreeSet<_>>().len() < shape.parts {
        at = (0..shape.parts).map(|n| (first + n) % shape.all + 1).collect();
    }
    at
}

/// A restart in which a host dies, or everything, at some moment, also one at which it is over.
fn struck_restart(job: &mut Job, rng: &mut Rng) -> Result<(), Failure> {
    job.start_restart()?;
    std::thread::sleep(Duration::from_millis(rng.below(WITHIN_RESTART)));
    if rng.below(2) == 0 {
        let host = job.at[rng.below(job.at.len() as u64) as usize];
        job.hosts.kill_host(host);
        std::thread::sleep(Duration::from_millis(rng.below(300)));
    }
    job.crash();
    Ok(())
}

/// `doomed` are generations of a program whose rank was killed: they restart, and it ends as it does without belay.
fn round(job: &mut Job, shape: Shape, fault: Fault, doomed: &mut BTreeSet<u64>, rng: &mut Rng) -> Result<(), Failure> {
    let before = whole(job)?;
    let taken = struck(job, fault, rng)?;
    let said = text(&taken);
    // What is killed says nothing.
    let killed = matches!(fault, Fault::Host(_));
    want(taken.status.success() || killed || said.contains("belay:"), || {
        format!("no reason: {said}")
    })?;
    if fault.spares_program() {
        job.progress()
            .map_err(|e| format!("before there is room again: {e}: {said}"))?;
        fault.pass(job)?;
        let next = job
            .take()
            .map_err(|e| format!("when there is room again: {e}\nthe one before: {said}\n{}", job.on_its_disk()))?;
        want(next, || format!("the job has ended: {said}: {}", job.said()))?;
    } else if rng.below(2) == 0 {
        // Another one after the fault is good, or none.
        job.belay(&["checkpoint", "--quiet", &job.dir()])?;
    }
    job.crash();
    let now = whole(job)?;
    let (newest, last) = (now.last().copied(), before.last().copied());
    want(newest >= last && (!taken.status.success() || newest > last), || {
        format!("whole before: {before:?}, now: {now:?}: {said}")
    })?;
    if matches!(fault, Fault::Rank(_)) {
        doomed.extend(now.iter().filter(|n| !before.contains(n)));
    }
    let good: Vec<u64> = now.iter().copied().filter(|n| !doomed.contains(n)).collect();
    want(!good.is_empty(), || format!("none but {doomed:?} are left of {before:?}"))?;
    let at = if rng.below(OLDER) == 0 {
        rng.below(good.len() as u64) as usize
    } else {
        good.len() - 1
    };
    job.at = places(shape, rng);
    if rng.below(AGAIN) == 0 {
        struck_restart(job, rng)?;
        let left = whole(job)?;
        want(left == now, || {
            format!("a restart that was killed leaves {left:?} of {now:?}")
        })?;
    }
    job.restart_at(&["--generation", &good[at].to_string()])
        .map_err(|e| format!("generation {} of {now:?} at {:?}: {e}", good[at], job.at))?;
    // What is newer than that stays whole, and the next one is newer.
    job.checkpoint()
}

/// The program ends well, and another one begins in the same job directory.
fn relaunch(job: &mut Job, shape: Shape, program: &str) -> Result<(), Failure> {
    job.verdict()?;
    job.crash();
    std::fs::remove_file(job.work.join("go")).map_err(|e| e.to_string())?;
    job.must(&["gc", "--all"])?;
    job.at = (1..=shape.parts).collect();
    begin(job, program)
}

fn begin(job: &mut Job, program: &str) -> Result<(), Failure> {
    job.launch(program)?;
    job.checkpoint()
}

/// Memory of each host that is full after a few checkpoints, from which chunks are moved at some speed.
fn with_tiers(job: &mut Job) -> Result<(), Failure> {
    for host in 1..=job.all {
        let make = format!("mkdir {RAM} && mount -t tmpfs -o size=24m,mode=1777 tmpfs {RAM}");
        job.on_host(host, &["sh", "-c", &make])?;
    }
    let tier = format!("[[tier]]\nname = \"ram\"\nkind = \"local\"\npath = \"{RAM}\"\ncapacity = \"64M\"\n");
    let file = job.work.join("belay.toml");
    std::fs::write(&file, format!("[flush]\nrate = \"20M\"\n{tier}")).map_err(|e| e.to_string())?;
    job.options.extend(["--config".into(), file.display().to_string()]);
    Ok(())
}

pub(super) fn faults(place: &Place, shape: Shape, rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("together-random-{}", shape.name);
    let mut job = Job::on_disk(DISK, place, &label, Kind::OpenMpi, shape.parts, shape.all)?;
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.options = vec!["--keep".into(), "3".into()];
    if shape.local {
        with_tiers(&mut job)?;
    }
    begin(&mut job, &program)?;
    let mut doomed = BTreeSet::new();
    for n in 0..rounds(8) {
        if n % VERDICT == VERDICT - 1 {
            relaunch(&mut job, shape, &program).map_err(|e| format!("the end after round {n}: {e}"))?;
            doomed.clear();
        }
        let fault = Fault::any(shape, rng);
        println!("{} round {n}: {fault:?} at {:?}", shape.name, job.at);
        round(&mut job, shape, fault, &mut doomed, rng).map_err(|e| format!("round {n}, {fault:?}: {e}"))?;
    }
    job.verdict()
}
