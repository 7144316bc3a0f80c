//! No checkpoint taken: launch time, and loops that would feel any wrapper.

use crate::measure::{ms, ratio, run, Samples};
use crate::Plan;
use std::process::Command;

fn launched(p: &Plan, argv: &[&str]) -> Command {
    let mut c = Command::new(&p.belay);
    std::fs::remove_dir_all(p.dir.join("job")).ok();
    c.arg("launch").arg("--ckpt-dir").arg(p.dir.join("job")).arg("--").args(argv);
    c
}

/// `true`, native and launched in turn.
pub(crate) fn launch(p: &Plan) -> Result<(), String> {
    let (mut native, mut under) = (Samples::default(), Samples::default());
    for _ in 0..p.runs * 8 {
        native.push(ms(|| run(&mut Command::new("true")))?.0);
        under.push(ms(|| run(&mut launched(p, &["true"])))?.0);
    }
    native.print("true", "ms");
    under.print("belay launch true", "ms");
    println!(
        "{:<44} {:>10.3} ms    goal <= 15",
        "launch adds",
        under.median() - native.median()
    );
    Ok(())
}

/// Loops of system calls, allocations, fork with exec, and MPI messages.
pub(crate) fn loops(p: &Plan) -> Result<(), String> {
    let me = p.me.display().to_string();
    for (name, n) in [("syscalls", "12000000"), ("mallocs", "30000000"), ("forks", "900")] {
        let argv = [me.as_str(), "worker", name, n];
        let (mut native, mut under) = (Samples::default(), Samples::default());
        for _ in 0..p.runs {
            native.push(ms(|| run(Command::new(argv[0]).args(&argv[1..])))?.0);
            under.push(ms(|| run(&mut launched(p, &argv)))?.0);
        }
        native.print(&format!("{name} native"), "ms");
        under.print(&format!("{name} launched"), "ms");
        ratio(
            &format!("{name} launched / native"),
            &under,
            &native,
            "<= 1.005 (launching itself included)",
        );
    }
    Ok(())
}
