//! Kills at every boundary of a checkpoint: the agent, a process of the job, the snapshot children, each at the agent's k-th step.
//!
//! A step is a system call by which the agent changes something about the processes of the job (see `stepper`); killing at the entry of every one of
//! them visits every state in which the job can be left. By default a random sample is taken from each test's steps; BELAY_BOUNDARIES=all takes
//! all of them, BELAY_BOUNDARIES=N about N, BELAY_BOUNDARIES=K- those from the K-th.

use belay_tests::build::{build, Kind};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::{run_seed, Rng};
use belay_tests::runner::{self, Check};
use belay_tests::stepper::{step, Step, Verdict};
use belay_tests::{procs, Failure};
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);
/// Steps visited by default.
const SAMPLE: u64 = 12;

fn comm(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm"))
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn parent(pid: i32) -> Option<i32> {
    let s = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    s[s.rfind(')')? + 2..].split(' ').nth(1)?.parse().ok()
}

/// The program's first process and its agent.
fn program_and_agent(job: &Job) -> Result<(i32, i32), Failure> {
    let front = job.pid().ok_or("no job")?;
    let found = procs::tree(front).into_iter().find_map(|p| {
        let above = parent(p)?;
        (comm(p) == "kill_target" && comm(above) != "kill_target").then_some((p, above))
    });
    found.ok_or_else(|| format!("no program below {front}: {}", job.output_text()))
}

/// A job whose program runs; a restarted one where `restarted` is set.
fn job(place: &Place, user: User, label: &str, restarted: bool) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    // All kills of one job may take longer than a program usually has.
    job.set("BELAY_TEST_LONG", "1");
    job.launch(&[], &[place.programs().join("kill_target").display().to_string()])?;
    job.progress(LIMIT)?;
    if restarted {
        job.checkpoint()?;
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&[])?;
        job.progress(LIMIT)?;
    }
    Ok(job)
}

/// A checkpoint during which `at_step` decides about the agent; the number of steps and what the command said.
fn checkpoint_by_steps(job: &Job, agent: i32, at_step: impl FnMut(Step) -> Verdict) -> Result<(u64, Output), Failure> {
    let dir = job.dir().display().to_string();
    let command = job.belay(&["checkpoint", &dir]);
    let (steps, o) = step(agent, move || output(command, LIMIT), at_step)?;
    Ok((steps, o?))
}

/// The steps of a whole checkpoint, and those of them at which `interesting` was true.
fn survey(job: &Job, mut interesting: impl FnMut() -> bool) -> Result<Vec<u64>, Failure> {
    let (_, agent) = program_and_agent(job)?;
    let mut found = Vec::new();
    let (steps, o) = checkpoint_by_steps(job, agent, |s| {
        if interesting() {
            found.push(s.number);
        }
        Verdict::On
    })?;
    if !o.status.success() || steps < 20 || found.is_empty() {
        return Err(format!("a checkpoint by steps ({steps} steps) failed: {}", text(&o)));
    }
    Ok(found)
}

/// The steps to visit.
fn sample(all: &[u64], rng: &mut Rng) -> Vec<u64> {
    let wanted = match std::env::var("BELAY_BOUNDARIES").as_deref() {
        Ok("all") => return all.to_vec(),
        Ok(from) if from.ends_with('-') => {
            let from = from.trim_end_matches('-').parse().unwrap_or(0);
            return all.iter().copied().filter(|k| *k >= from).collect();
        }
        Ok(n) => n.parse().unwrap_or(SAMPLE),
        Err(_) => SAMPLE,
    };
    let width = (all.len() as u64).div_ceil(wanted).max(1);
    let chosen = all.chunks(width as usize).map(|c| c[rng.below(c.len() as u64) as usize]);
    chosen.collect()
}

/// The program ends well by itself: with PASS, whatever has become of its launcher.
fn passes(job: &mut Job, program: i32) -> Result<(), Failure> {
    // Each thread goes through its loop once more.
    std::thread::sleep(Duration::from_millis(60));
    job.tell_end()?;
    let end = Instant::now() + LIMIT;
    loop {
        // Asked before the output is read: what the program says last, it says before it dies.
        let lives = comm(program) == "kill_target";
        let said = job.output_text();
        if said.contains("FAIL ") {
            return Err(said);
        }
        if said.contains("PASS ") {
            return Ok(());
        }
        if !lives {
            return Err(format!("the program has died: {said}"));
        }
        if Instant::now() > end {
            return Err(format!("the program does not end; {}; {said}", job.stuck()));
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// No snapshot child stays behind.
fn no_snapshots(job: &Job) -> Result<(), Failure> {
    let end = Instant::now() + Duration::from_secs(12);
    loop {
        let left: Vec<_> = procs::marked(&job.work)
            .into_iter()
            .filter(|(_, c)| c == "belay-snapshot")
            .collect();
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("snapshot children stay behind: {left:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The agent is killed at each step: the program does not notice, the generation before restarts.
fn agent_killed(place: &Place, user: User, restarted: bool, rng: &mut Rng) -> Result<(), Failure> {
    let label = if restarted { "agent-again" } else { "agent" };
    let steps = {
        let mut job = job(place, user, label, restarted)?;
        let all = survey(&job, || true)?;
        job.verdict(false, LIMIT)?;
        all
    };
    let mut failures = Vec::new();
    let visited = sample(&steps, rng);
    for k in &visited {
        let mut name = "";
        let r = (|| {
            let mut job = job(place, user, label, restarted)?;
            let (program, agent) = program_and_agent(&job)?;
            checkpoint_by_steps(&job, agent, |s| {
                name = s.name;
                if s.number == *k {
                    Verdict::Kill
                } else {
                    Verdict::On
                }
            })?;
            passes(&mut job, program)?;
            no_snapshots(&job)
        })();
        if let Err(e) = r {
            failures.push(format!("killed at step {k} of {} ({name}): {e}", steps.len()));
        }
    }
    report(&failures, visited.len())
}

fn report(failures: &[String], visited: usize) -> Result<(), Failure> {
    if failures.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} of {visited} kills did harm:\n{}",
        failures.len(),
        failures.join("\n")
    ))
}

/// A process of the job is killed at each step: the checkpoint ends, and the rest of the job and the agent go on.
fn rank_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let steps = {
        let mut job = job(place, user, "rank", false)?;
        let all = survey(&job, || true)?;
        job.verdict(false, LIMIT)?;
        all
    };
    let mut failures = Vec::new();
    let visited = sample(&steps, rng);
    for k in &visited {
        let mut name = "";
        let r = (|| {
            let mut job = job(place, user, "rank", false)?;
            let (_, agent) = program_and_agent(&job)?;
            let victim = std::fs::read_to_string(job.work.join("victim")).map_err(|e| format!("victim: {e}"))?;
            let victim: i32 = victim.trim().parse().map_err(|e| format!("victim: {e}"))?;
            checkpoint_by_steps(&job, agent, |s| {
                if s.number == *k {
                    name = s.name;
                    procs::signal(victim, libc::SIGKILL);
                    return Verdict::Leave;
                }
                Verdict::On
            })?;
            job.progress(LIMIT)?;
            job.checkpoint().map_err(|e| format!("the next checkpoint: {e}"))?;
            job.progress(LIMIT)?;
            job.verdict(false, LIMIT)
        })();
        if let Err(e) = r {
            failures.push(format!("killed at step {k} of {} ({name}): {e}", steps.len()));
        }
    }
    report(&failures, visited.len())
}

fn snapshots(agent: i32) -> Vec<i32> {
    procs::tree(agent)
        .into_iter()
        .filter(|p| comm(*p) == "belay-snapshot")
        .collect()
}

/// The snapshot children are killed at each step at which there are any: the checkpoint fails or was done, the next one succeeds.
fn snapshot_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = job(place, user, "snapshot", false)?;
    let (_, agent) = program_and_agent(&job)?;
    let steps = survey(&job, || !snapshots(agent).is_empty())?;
    let mut failures = Vec::new();
    let visited = sample(&steps, rng);
    for k in &visited {
        let mut name = "";
        let r = (|| {
            checkpoint_by_steps(&job, agent, |s| {
                let there = snapshots(agent);
                // The number of steps before the copies are made varies with the order in which tasks stop.
                if s.number >= *k && !there.is_empty() {
                    name = s.name;
                    there.iter().for_each(|p| procs::signal(*p, libc::SIGKILL));
                    return Verdict::Leave;
                }
                Verdict::On
            })?;
            job.progress(LIMIT)?;
            job.checkpoint().map_err(|e| format!("the next checkpoint: {e}"))?;
            job.progress(LIMIT)
        })();
        if let Err(e) = r {
            failures.push(format!("killed at step {k} ({name}): {e}"));
        }
    }
    report(&failures, visited.len())?;
    job.verdict(false, LIMIT)
}

type Test = fn(&Place, User, &mut Rng) -> Result<(), Failure>;

fn main() {
    let fail = |e: Failure| -> ! {
        println!("{e}");
        std::process::exit(1);
    };
    let place = Arc::new(Place::new("boundaries").unwrap_or_else(|e| fail(e)));
    if let Err(e) = build(&place, "kill_target", Kind::C) {
        fail(e);
    }
    let seed = run_seed();
    println!("seed {seed}");
    let tests: [(&str, Test); 4] = [
        ("agent_killed", |p, u, r| agent_killed(p, u, false, r)),
        ("agent_of_restarted_job_killed", |p, u, r| agent_killed(p, u, true, r)),
        ("rank_killed", rank_killed),
        ("snapshot_killed", snapshot_killed),
    ];
    let mut checks = Vec::new();
    for (name, test) in tests {
        for user in runner::users() {
            let place = Arc::clone(&place);
            let run = move || test(&place, user, &mut Rng::new(seed, name));
            checks.push(Check {
                name: format!("boundaries::{name}::{}", user.name()),
                run: Box::new(run),
            });
        }
    }
    drop(place);
    runner::main(checks);
}
