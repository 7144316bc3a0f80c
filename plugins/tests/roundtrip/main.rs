//! Capture and rebuild on real processes: each case makes descriptors in forked processes, which stop; the test
//! captures them, and then either lets them go on (nothing may have changed) or kills them and rebuilds everything in
//! new processes with the old PIDs, in namespaces of their own. Either way the same `verify` runs in them. As root,
//! every case also runs as an ordinary user.

mod epolls;
mod files;
mod harness;
mod memory;
mod misc;
mod pipes;
mod tcp;
mod terminals;
mod unix;
mod util;

use harness::{Case, Mode};

fn main() {
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let cases: Vec<Case> = [
        files::cases(),
        pipes::cases(),
        unix::cases(),
        memory::cases(),
        tcp::cases(),
        epolls::cases(),
        terminals::cases(),
        misc::cases(),
    ]
    .concat();
    let mut failed = 0;
    let mut ran = 0;
    for case in &cases {
        if !filter.is_empty() && !filter.iter().any(|f| case.name.contains(f.as_str())) {
            continue;
        }
        for user in harness::users() {
            for mode in [Mode::Continue, Mode::Restart] {
                ran += 1;
                let ok = harness::run(case, mode, user);
                println!(
                    "test {} {mode:?} as {user:?} ... {}",
                    case.name,
                    if ok { "ok" } else { "FAILED" }
                );
                failed += i32::from(!ok);
            }
        }
    }
    println!("{ran} runs, {failed} failed");
    std::process::exit(i32::from(failed > 0));
}
