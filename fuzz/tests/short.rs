//! Each target for some seconds: `BELAY_FUZZ_SECONDS` of them in all (27 unless given), with random numbers from `BELAY_SEED`.

use belay_fuzz::{engine, guard, targets};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: guard::Counting = guard::Counting::new();

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// One test, because the guards know one execution at a time.
#[test]
fn no_input_does_harm() {
    guard::install();
    let share = Duration::from_secs(number("BELAY_FUZZ_SECONDS").unwrap_or(27)) / targets::ALL.len() as u32;
    let seed = number("BELAY_SEED").unwrap_or_else(|| std::process::id().into());
    for target in &targets::ALL {
        assert!(!engine::corpus(target).is_empty(), "{}: no corpus", target.name);
        let out = engine::run(target, share, seed);
        println!("{}: {} executions, seed {seed}", target.name, out.executions);
    }
}
