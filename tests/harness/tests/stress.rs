//! Many checkpoints and restarts of a few programs at random moments. BELAY_STRESS=N sets the number of rounds per program,
//! BELAY_STRESS_PROGRAM="NAME ARGUMENT..." runs another program of tests/programs in place of these.

use belay_tests::build::{build, Kind};
use belay_tests::job::Job;
use belay_tests::place::{Place, User};
use belay_tests::rng::{run_seed, Rng};
use belay_tests::runner::{self, Check};
use belay_tests::Failure;
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// Programs of tests/programs with their arguments.
const PROGRAMS: [&str; 15] = [
    "thr_create",
    "thr_crowd churn",
    "thr_crowd exec",
    "thr_crowd alone",
    "thr_crowd gone",
    "proc_forkexec vfork",
    "proc_tree",
    "mem_change",
    "sig_storm",
    "fd_tcp backlog",
    "fd_unix rights",
    "blocked condvar 32",
    "fd_flood in",
    "fd_flood out",
    "fd_flood canon",
];

/// Checkpoints again and again; each fourth round everything is killed and restarted.
fn soak(place: &Place, program: &str, args: &[String], user: User, rounds: u64, seed: u64) -> Result<(), Failure> {
    let label = format!("stress-{program}");
    let mut rng = Rng::new(seed, &label);
    let mut job = Job::new(place, &label, user)?;
    job.set("BELAY_TEST_LONG", "1");
    let mut argv = vec![place.programs().join(program).display().to_string()];
    argv.extend(args.iter().cloned());
    job.launch(&["--keep".into(), "2".into()], &argv)?;
    job.progress(PATIENCE)?;
    for n in 1..=rounds {
        rng.pause(40);
        job.checkpoint()
            .map_err(|e| format!("round {n} of {rounds}: {e}; its output:\n{}", job.output_text()))?;
        if rng.below(4) == 0 {
            rng.pause(20);
            job.kill_all()?;
            job.clear_beat()?;
            job.restart(&[])?;
        }
        job.progress(PATIENCE).map_err(|e| format!("round {n} of {rounds}: {e}"))?;
    }
    job.verdict(false, PATIENCE)
}

fn main() {
    let rounds = runner::rounds(10);
    let fail = |e: Failure| -> ! {
        println!("{e}");
        std::process::exit(1);
    };
    let place = Arc::new(Place::new("stress").unwrap_or_else(|e| fail(e)));
    let seed = run_seed();
    println!("seed {seed}, {rounds} rounds");
    let mut checks = Vec::new();
    let other = std::env::var("BELAY_STRESS_PROGRAM").ok();
    let programs: Vec<&str> = match &other {
        Some(command) => vec![command],
        None => PROGRAMS.to_vec(),
    };
    for command in programs {
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let Some((program, args)) = words.split_first().map(|(p, a)| (p.clone(), a.to_vec())) else {
            fail("BELAY_STRESS_PROGRAM names no program".into());
        };
        if let Err(e) = build(&place, &program, Kind::C) {
            fail(e);
        }
        for user in runner::users() {
            let place = Arc::clone(&place);
            let (program, args) = (program.clone(), args.clone());
            let name = format!("stress::{program}::{}", user.name());
            let run = move || soak(&place, &program, &args, user, rounds, seed);
            checks.push(Check {
                name,
                run: Box::new(run),
            });
        }
    }
    drop(place);
    runner::main(checks);
}
