//! Faults at random moments of checkpoints: hosts, agents and ranks are killed, and the disk is full. What is called whole restarts, and nothing that was promised is lost.
//!
//! BELAY_STRESS (8) rounds.

use super::END;
use belay_tests::across::Job;
use belay_tests::agents::agent;
use belay_tests::build::Kind;
use belay_tests::expect::want;
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
const DISK: &str = "256m";
/// What comes to pass falls within this time after a checkpoint was asked for, in milliseconds; most are over by then.
const WITHIN: u64 = 200;
/// One generation in so many rounds is restarted that is not the newest.
const OLDER: u64 = 4;

/// What comes to pass.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Nothing,
    Host(usize),
    Agent(usize),
    Rank(usize),
    DiskFull,
}

impl Fault {
    fn any(rng: &mut Rng) -> Self {
        let part = rng.below(2) as usize;
        match rng.below(9) {
            0 => Self::Nothing,
            1 | 2 => Self::Host(part),
            3 | 4 => Self::Agent(part),
            5 | 6 => Self::Rank(part),
            _ => Self::DiskFull,
        }
    }

    fn strike(self, job: &Job, agents: [i32; 2]) -> Result<(), Failure> {
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
            // It is full when nothing more can be written.
            Self::DiskFull => drop(std::fs::write(filler(job), vec![1; 256 << 20])),
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
    let agents = [agent(job, 0)?, agent(job, 1)?];
    let taking = job.command(job.at[0], &[&job.belay, "checkpoint", "--quiet", &job.dir()]);
    let taken = std::thread::spawn(move || output(taking, END));
    std::thread::sleep(Duration::from_millis(rng.below(WITHIN)));
    fault.strike(job, agents)?;
    taken.join().map_err(|_| "the command's thread failed")?
}

/// `doomed` are generations of a program whose rank was killed: they restart, and it ends as it does without belay.
fn round(job: &mut Job, fault: Fault, doomed: &mut BTreeSet<u64>, rng: &mut Rng) -> Result<(), Failure> {
    let before = whole(job)?;
    let taken = struck(job, fault, rng)?;
    let said = text(&taken);
    // What is killed says nothing.
    let killed = matches!(fault, Fault::Host(_));
    want(taken.status.success() || killed || said.contains("belay:"), || {
        format!("no reason: {said}")
    })?;
    if matches!(fault, Fault::DiskFull) {
        drop(std::fs::remove_file(filler(job)));
        want(job.take()?, || "the job has ended".into())?;
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
    let now: Vec<u64> = now.into_iter().filter(|n| !doomed.contains(n)).collect();
    want(!now.is_empty(), || format!("none but {doomed:?} are left of {before:?}"))?;
    let at = if rng.below(OLDER) == 0 {
        rng.below(now.len() as u64) as usize
    } else {
        now.len() - 1
    };
    job.at = match rng.below(3) {
        0 => vec![1, 2],
        1 => vec![2, 3],
        _ => vec![3, 1],
    };
    job.restart_at(&["--generation", &now[at].to_string()])
        .map_err(|e| format!("generation {} of {now:?}: {e}", now[at]))?;
    // What is newer than that stays whole, and the next one is newer.
    job.checkpoint()
}

pub(super) fn faults(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::on_disk(DISK, place, "together-random", Kind::OpenMpi, 2, 3)?;
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.options = vec!["--keep".into(), "3".into()];
    job.launch(&program)?;
    job.checkpoint()?;
    let mut doomed = BTreeSet::new();
    for n in 0..rounds(8) {
        let fault = Fault::any(rng);
        round(&mut job, fault, &mut doomed, rng).map_err(|e| format!("round {n}, {fault:?}: {e}"))?;
    }
    job.verdict()
}
