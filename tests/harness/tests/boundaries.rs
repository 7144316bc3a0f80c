//! Kills at every boundary of a checkpoint: the agent, a process of the job, the snapshot children, each at the agent's k-th step.
//!
//! A step is a system call by which the agent changes something about the processes of the job (see `stepper`); killing
//! at the entry of every one of them visits every state in which the job can be left. By default a random sample is
//! taken from each test's steps; BELAY_BOUNDARIES=all takes all of them, BELAY_BOUNDARIES=N about N,
//! BELAY_BOUNDARIES=K- those from the K-th.

use belay_still::Watch;
use belay_tests::job::{output, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::stepper::{step, step_holding, Step, Verdict};
use belay_tests::target::Target;
use belay_tests::{procs, Failure};
use std::process::Output;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);
/// Steps visited by default.
const SAMPLE: u64 = 12;
/// Checkpoints that may be over before the moment looked for has been seen.
const LATE: u32 = 20;
/// Steps visited of programs with something special.
const FEW: u64 = 5;
/// The program that looks at everything that a checkpoint touches in every process.
const ALL: &str = "kill_target";
/// The program of which a copy is made without what has not changed.
const UNCHANGED: &str = "mem_unchanged";

/// The first process of the program `target` and its agent.
fn program_and_agent(job: &Job, target: &str) -> Result<(i32, i32), Failure> {
    let front = job.pid().ok_or("no job")?;
    procs::program_and_agent(front, name(target)).ok_or_else(|| format!("no program below {front}: {}", job.output_text()))
}

/// The program's name: the first word of its command line.
fn name(target: &str) -> &str {
    target.split(' ').next().unwrap_or(target)
}

/// A job whose program `target` runs; a restarted one where `restarted` is set.
fn job(place: &Place, user: User, label: &str, target: &str, restarted: bool) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    // All kills of one job may take longer than a program usually has.
    job.set("BELAY_TEST_LONG", "1");
    job.set("BELAY_TEST_QUIET_PARENT", "1");
    let mut argv: Vec<String> = target.split(' ').map(str::to_owned).collect();
    argv[0] = place.programs().join(&argv[0]).display().to_string();
    let unchanged = target == UNCHANGED;
    let written = ["--differential", "written"].map(str::to_owned);
    job.launch(if unchanged { &written } else { &[] }, &argv)?;
    job.progress(LIMIT)?;
    if unchanged {
        // From the second on, what has not changed is known.
        job.checkpoint()?;
        job.progress(LIMIT)?;
    }
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
fn survey(job: &Job, target: &str, mut interesting: impl FnMut() -> bool) -> Result<Vec<u64>, Failure> {
    let (_, agent) = program_and_agent(job, target)?;
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

/// The steps to visit, about `usual` of them where nothing else is wanted.
fn sample(all: &[u64], usual: u64, rng: &mut Rng) -> Vec<u64> {
    let wanted = match std::env::var("BELAY_BOUNDARIES").as_deref() {
        Ok("all") => return all.to_vec(),
        Ok(from) if from.ends_with('-') => {
            let from = from.trim_end_matches('-').parse().unwrap_or(0);
            return all.iter().copied().filter(|k| *k >= from).collect();
        }
        Ok(n) => n.parse().unwrap_or(usual),
        Err(_) => usual,
    };
    let width = (all.len() as u64).div_ceil(wanted).max(1);
    let chosen = all.chunks(width as usize).map(|c| c[rng.below(c.len() as u64) as usize]);
    chosen.collect()
}

/// The program ends well by itself: with PASS, whatever has become of its launcher.
fn passes(job: &mut Job, target: &str, program: i32) -> Result<(), Failure> {
    // Each thread goes through its loop once more.
    std::thread::sleep(Duration::from_millis(60));
    job.tell_end()?;
    let end = Instant::now() + LIMIT;
    loop {
        // Asked before the output is read: what the program says last, it says before it dies.
        let lives = procs::comm(program) == name(target);
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
    let watch = Watch::begin();
    loop {
        let left: Vec<_> = procs::marked(&job.work)
            .into_iter()
            .filter(|(_, c)| c == "belay-snapshot")
            .collect();
        if left.is_empty() {
            return Ok(());
        }
        if watch.elapsed() > Duration::from_secs(12) {
            return Err(format!("snapshot children stay behind: {left:?}"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The agent is killed at each step: the program does not notice, the generation before restarts.
fn agent_killed(place: &Place, user: User, (target, usual): (&str, u64), restarted: bool, rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("agent{}-{}", if restarted { "-again" } else { "" }, name(target));
    let steps = {
        let mut job = job(place, user, &label, target, restarted)?;
        let all = survey(&job, target, || true)?;
        job.verdict(false, LIMIT)?;
        all
    };
    let mut failures = Vec::new();
    let visited = sample(&steps, usual, rng);
    for k in &visited {
        let mut name = "";
        let r = (|| {
            let mut job = job(place, user, &label, target, restarted)?;
            let (program, agent) = program_and_agent(&job, target)?;
            checkpoint_by_steps(&job, agent, |s| {
                name = s.name;
                if s.number == *k {
                    Verdict::Kill
                } else {
                    Verdict::On
                }
            })?;
            passes(&mut job, target, program)?;
            no_snapshots(&job)
        })();
        if let Err(e) = r {
            failures.push(format!("killed at step {k} of {} ({name}): {e}", steps.len()));
        }
    }
    report(&failures, visited.len())
}

/// Whether the main thread of `program`, as far as it runs code of the agent's, waits in `io_destroy`; waits until it
/// does or stops.
fn context_is_away(program: i32) -> bool {
    const IO_DESTROY: &str = "207 ";
    loop {
        let file = |name: &str| std::fs::read_to_string(format!("/proc/{program}/task/{program}/{name}")).unwrap_or_default();
        let (call, status) = (file("syscall"), file("status"));
        let value = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).map_or("", str::trim);
        let traced = value("TracerPid:") != "0";
        if traced && call.starts_with(IO_DESTROY) {
            return true;
        }
        if !traced || value("State:").starts_with(['t', 'T', 'Z']) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// The agent is killed while a context of asynchronous I/O is being replaced, which takes tens of milliseconds: no
/// thread of the program finds it missing.
fn agent_killed_while_context_is_away(place: &Place, user: User) -> Result<(), Failure> {
    const TARGET: &str = "aio threads";
    for restarted in [false, true] {
        let mut job = job(place, user, "agent-away", TARGET, restarted)?;
        let (program, agent) = program_and_agent(&job, TARGET)?;
        let mut killed = false;
        // Where this test has to wait for a processor longer than a replacement takes, it comes too late.
        for _ in 0..LATE {
            checkpoint_by_steps(&job, agent, |s| {
                killed = s.name == "wait" && context_is_away(program);
                if killed {
                    Verdict::Kill
                } else {
                    Verdict::On
                }
            })?;
            if killed {
                break;
            }
        }
        if !killed {
            return Err("the context was never away".into());
        }
        passes(&mut job, TARGET, program)?;
        no_snapshots(&job)?;
    }
    Ok(())
}

/// The agent is killed while connections that wait to be accepted, and carry data, are out of their queue: they get back there.
fn agent_killed_while_connections_are_away(place: &Place, user: User) -> Result<(), Failure> {
    const TARGET: &str = "fd_tcp backlog";
    let mut job = job(place, user, "agent-connections", TARGET, false)?;
    let (program, agent) = program_and_agent(&job, TARGET)?;
    let dir = job.dir().display().to_string();
    let mut killed = false;
    // At some moments no connection waits.
    for _ in 0..LATE {
        let command = job.belay(&["checkpoint", &dir]);
        // Who connects them again has taken all of them out.
        step_holding(
            agent,
            libc::SYS_connect,
            move || output(command, LIMIT),
            |s| {
                killed = s.helper.is_some();
                if killed {
                    Verdict::Kill
                } else {
                    Verdict::On
                }
            },
        )?
        .1?;
        if killed {
            break;
        }
    }
    if !killed {
        return Err("no connection was ever away".into());
    }
    passes(&mut job, TARGET, program)?;
    no_snapshots(&job)
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
        let mut job = job(place, user, "rank", ALL, false)?;
        let all = survey(&job, ALL, || true)?;
        job.verdict(false, LIMIT)?;
        all
    };
    let mut failures = Vec::new();
    let visited = sample(&steps, SAMPLE, rng);
    for k in &visited {
        let mut name = "";
        let r = (|| {
            let mut job = job(place, user, "rank", ALL, false)?;
            let (_, agent) = program_and_agent(&job, ALL)?;
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
        .filter(|p| procs::comm(*p) == "belay-snapshot")
        .collect()
}

/// The snapshot children are killed at each step at which there are any: the checkpoint fails or was done, the next one succeeds.
fn snapshot_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = job(place, user, "snapshot", ALL, false)?;
    let (_, agent) = program_and_agent(&job, ALL)?;
    let steps = survey(&job, ALL, || !snapshots(agent).is_empty())?;
    let mut failures = Vec::new();
    let visited = sample(&steps, SAMPLE, rng);
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
    let mut target = Target::new("boundaries", &[ALL, UNCHANGED, "aio", "ipc_notify", "proc_vmshare", "fd_tcp"]);
    let tests: [(&str, Test); 11] = [
        ("agent_killed", |p, u, r| agent_killed(p, u, (ALL, SAMPLE), false, r)),
        ("agent_of_restarted_job_killed", |p, u, r| {
            agent_killed(p, u, (ALL, SAMPLE), true, r)
        }),
        ("agent_killed_with_asynchronous_io", |p, u, r| {
            agent_killed(p, u, ("aio threads", FEW), false, r)
        }),
        ("agent_killed_with_notification", |p, u, r| {
            agent_killed(p, u, ("ipc_notify thread", FEW), false, r)
        }),
        ("agent_killed_with_shared_memory", |p, u, r| {
            agent_killed(p, u, ("proc_vmshare deep", FEW), false, r)
        }),
        ("agent_killed_with_fork_of_thread", |p, u, r| {
            agent_killed(p, u, ("proc_vmshare own", FEW), false, r)
        }),
        ("agent_killed_with_pages_left_out", |p, u, r| {
            agent_killed(p, u, (UNCHANGED, FEW), false, r)
        }),
        ("agent_killed_while_context_is_away", |p, u, _| {
            agent_killed_while_context_is_away(p, u)
        }),
        ("agent_killed_while_connections_are_away", |p, u, _| {
            agent_killed_while_connections_are_away(p, u)
        }),
        ("rank_killed", rank_killed),
        ("snapshot_killed", snapshot_killed),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, test);
    }
    target.run();
}
