//! No checkpoint taken: launch time, and loops that would feel any wrapper.

use crate::measure::{ms, run, Samples};
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

/// Loops of system calls, allocations, fork with exec, and MPI messages, native and launched in turn. Each loop measures itself, so that the launch is not part of it; the figure is the
/// median of the ratios of neighbouring runs, with the bounds that hold it with 95 % confidence.
pub(crate) fn loops(p: &Plan) -> Result<(), String> {
    let me = p.me.display().to_string();
    let pingpong = pingpong(p)?;
    let worker = |name: &str, n: &str| vec![me.clone(), "worker".into(), name.into(), n.into()];
    let cases = [
        ("syscalls", worker("syscalls", "6000000")),
        ("mallocs", worker("mallocs", "15000000")),
        ("forks", worker("forks", "450")),
        (
            "MPI ping-pong",
            vec!["mpirun.openmpi".into(), "-n".into(), "2".into(), pingpong, "200000".into()],
        ),
    ];
    for (name, argv) in cases {
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let (mut native, mut under, mut ratios) = (Samples::default(), Samples::default(), Samples::default());
        for pair in 0..p.runs * 4 {
            let bare = || loop_ms(Command::new(argv[0]).args(&argv[1..]));
            let belay = || loop_ms(&mut launched(p, &argv));
            // Which of the two comes first alternates: a drift of the machine hits both.
            let (n, u) = if pair % 2 == 0 {
                let n = bare()?;
                (n, belay()?)
            } else {
                let u = belay()?;
                (bare()?, u)
            };
            native.push(n);
            under.push(u);
            ratios.push(u / n);
        }
        native.print(&format!("{name} native"), "ms");
        under.print(&format!("{name} launched"), "ms");
        let (low, high) = ratios.confidence();
        println!(
            "{:<44} {:>10.4}       95 % within {low:.4} .. {high:.4}, goal <= 1.005",
            format!("{name} launched / native"),
            ratios.median()
        );
    }
    Ok(())
}

/// Builds the MPI program; its path.
fn pingpong(p: &Plan) -> Result<String, String> {
    let (source, program) = (p.dir.join("pingpong.c"), p.dir.join("pingpong"));
    std::fs::write(&source, include_str!("pingpong.c")).map_err(|e| format!("write {}: {e}", source.display()))?;
    run(Command::new("mpicc.openmpi").arg("-O2").arg("-o").args([&program, &source]))?;
    Ok(program.display().to_string())
}

/// Runs a loop, which prints how many milliseconds it took.
fn loop_ms(c: &mut Command) -> Result<f64, String> {
    // Open MPI refuses to run as root otherwise; native and launched alike.
    c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let out = run(c)?;
    out.trim().parse().map_err(|e| format!("the loop said {out:?}: {e}"))
}
