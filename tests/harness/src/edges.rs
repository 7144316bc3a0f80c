//! Agents that are killed while what takes part in a checkpoint comes to rest, or goes on.

use crate::expect::want;
use crate::job::{self, Job};
use crate::rng::Rng;
use crate::stepper::{step_each, Step, Verdict, OF_GATES};
use crate::{procs, Failure};
use std::time::{Duration, Instant};

/// Longer than anything takes here.
const LIMIT: Duration = Duration::from_secs(60);

/// The process called `name` of a running job, and its agent.
pub fn program_and_agent(job: &Job, name: &str) -> Result<(i32, i32), Failure> {
    let front = job.pid().ok_or("no job")?;
    procs::program_and_agent(front, name).ok_or_else(|| format!("no program below {front}: {}", job.output_text()))
}

/// The program, called `name`, goes on and ends well without its agent.
pub fn passes_alone(job: &Job, program: i32, name: &str) -> Result<(), Failure> {
    std::thread::sleep(Duration::from_millis(60));
    job.tell_end()?;
    let end = Instant::now() + job::patient(LIMIT);
    loop {
        let lives = procs::comm(program) == name;
        let said = job.output_text();
        if said.contains("FAIL ") {
            return Err(said);
        }
        if said.contains("PASS ") {
            return Ok(());
        }
        want(lives && Instant::now() < end, || {
            format!("the program has died or hangs; {}; {said}", job.stuck())
        })?;
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// The agent of a job with a program called `name` is killed at `sample` of its calls in each phase of the gate: the
/// program goes on. Jobs are made by `prepare`.
pub fn agent_killed(name: &str, prepare: &dyn Fn() -> Result<Job, Failure>, sample: u64, rng: &mut Rng) -> Result<(), Failure> {
    let stepped = |job: &Job, agent: i32, at_step: &mut (dyn FnMut(Step) -> Verdict + Send)| {
        let dir = job.dir().display().to_string();
        let command = job.belay(&["checkpoint", "--quiet", &dir]);
        step_each(agent, move || job::output(command, LIMIT), at_step).map(drop)
    };
    let mut job = prepare()?;
    let mut calls = OF_GATES.map(|phase| (phase, 0));
    stepped(&job, program_and_agent(&job, name)?.1, &mut |s| {
        for (_, count) in calls.iter_mut().filter(|(phase, _)| s.phase == Some(phase)) {
            *count += 1;
        }
        Verdict::On
    })?;
    job.verdict(false, LIMIT)?;
    for (phase, calls) in calls {
        want(calls > 10, || format!("{calls} calls in {phase}"))?;
        for n in 0..sample {
            let nth = calls * n / sample + rng.below(calls / sample) + 1;
            let job = prepare()?;
            let (program, agent) = program_and_agent(&job, name)?;
            let mut seen = 0;
            stepped(&job, agent, &mut |s| {
                seen += u64::from(s.phase == Some(phase));
                if seen == nth {
                    Verdict::Kill
                } else {
                    Verdict::On
                }
            })?;
            passes_alone(&job, program, name).map_err(|e| format!("killed at call {nth} of {calls} in {phase}: {e}"))?;
        }
    }
    Ok(())
}
