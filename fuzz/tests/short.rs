//! Each target for some time, with random numbers from `BELAY_SEED`: those of manifests, chunks and images for
//! `BELAY_FUZZ_SECONDS` (10 unless given), the others for a thirtieth of that.

use belay_fuzz::{engine, guard, targets};
use std::process::Command;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: guard::Counting = guard::Counting::new();

/// Targets run at a time.
const AT_A_TIME: usize = 2;
/// Set in a process that runs every other target: which ones.
const SHARE: &str = "BELAY_FUZZ_SHARE";

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// One test, and a process for each of those that run at a time, because the guards know one execution at a time.
#[test]
fn no_input_does_harm() {
    let seed = number("BELAY_SEED").unwrap_or_else(|| std::process::id().into());
    if let Some(share) = number(SHARE) {
        return run(share as usize, seed);
    }
    let start = |share: usize| {
        let mut c = Command::new(std::env::current_exe().unwrap());
        c.args(["--exact", "no_input_does_harm", "--nocapture"]);
        c.env(SHARE, share.to_string()).env("BELAY_SEED", seed.to_string());
        c.spawn().unwrap()
    };
    let children: Vec<_> = (0..AT_A_TIME).map(start).collect();
    let ends: Vec<_> = children.into_iter().map(|mut c| c.wait().unwrap()).collect();
    assert!(ends.iter().all(|e| e.success()), "seed {seed}: {ends:?}");
}

fn run(share: usize, seed: u64) {
    guard::install();
    let time = Duration::from_secs(number("BELAY_FUZZ_SECONDS").unwrap_or(10));
    for main in [true, false] {
        let all = targets::ALL.iter().filter(|t| t.main == main);
        for target in all.skip(share).step_by(AT_A_TIME) {
            assert!(!engine::corpus(target).is_empty(), "{}: no corpus", target.name);
            let out = engine::run(target, if main { time } else { time / 30 }, seed);
            println!("{}: {} executions, seed {seed}", target.name, out.executions);
        }
    }
}
