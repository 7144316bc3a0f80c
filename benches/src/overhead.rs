//! No checkpoint taken: launch time, and loops that would feel any wrapper.

use crate::measure::{ms, run, Job, Samples};
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

/// Pieces of a loop that two processes run in turn. Few: what a pair of processes differs by for as long as it lives
/// outweighs what its pieces differ by.
const PIECES: usize = 6;

/// Loops of system calls, allocations and fork with exec, native and launched.
pub(crate) fn loops(p: &Plan) -> Result<(), String> {
    for (name, count) in [("syscalls", "60000"), ("mallocs", "150000"), ("forks", "20")] {
        in_pieces(p, name, count)?;
    }
    Ok(())
}

/// MPI messages, native and launched.
pub(crate) fn pingpong(p: &Plan) -> Result<(), String> {
    let program = build_pingpong(p)?;
    whole(p, "MPI ping-pong", &["mpirun.openmpi", "-n", "2", &program, "100"])
}

/// A native and a launched process run pieces of about 10 ms in turn on one processor, so that whatever slows the
/// machine slows both. Where their memory lies makes two processes differ by a per cent for as long as they live: the
/// figure is the median over many pairs of processes, of the median over the pairs of pieces of each.
fn in_pieces(p: &Plan, name: &str, count: &str) -> Result<(), String> {
    let (mut native, mut under, mut ratios) = (Samples::default(), Samples::default(), Samples::default());
    for pair in 0..p.runs * 40 {
        std::fs::remove_dir_all(p.dir.join("job")).ok();
        let start = |launched: bool| {
            let mut job = (if launched { Job::launch } else { Job::native })(p, &[name, count])?;
            job.line().map(|_| job)
        };
        // Each is the first as often as the other: the one that starts while the other is there already gets other memory.
        let first = start(pair % 2 == 0)?;
        let second = start(pair % 2 != 0)?;
        let (mut belay, mut bare) = if pair % 2 == 0 { (first, second) } else { (second, first) };
        let mut of_pair = Samples::default();
        for piece in 0..PIECES {
            let (n, u) = if (pair + piece) % 2 == 0 {
                let n = milliseconds(&bare.ask()?)?;
                (n, milliseconds(&belay.ask()?)?)
            } else {
                let u = milliseconds(&belay.ask()?)?;
                (milliseconds(&bare.ask()?)?, u)
            };
            native.push(n);
            under.push(u);
            of_pair.push(u / n);
        }
        bare.end()?;
        belay.end()?;
        ratios.push(of_pair.median());
    }
    report(name, &native, &under, &ratios);
    Ok(())
}

/// A program that measures itself and cannot be divided, native and launched in turn.
fn whole(p: &Plan, name: &str, argv: &[&str]) -> Result<(), String> {
    let (mut native, mut under, mut ratios) = (Samples::default(), Samples::default(), Samples::default());
    for pair in 0..p.runs * 32 {
        let bare = || loop_ms(Command::new(argv[0]).args(&argv[1..]));
        let belay = || loop_ms(&mut launched(p, argv));
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
    report(name, &native, &under, &ratios);
    Ok(())
}

fn report(name: &str, native: &Samples, under: &Samples, ratios: &Samples) {
    native.print(&format!("{name} native"), "ms");
    under.print(&format!("{name} launched"), "ms");
    let (low, high) = ratios.confidence();
    println!(
        "{:<44} {:>10.4}       95 % within {low:.4} .. {high:.4}, goal <= 1.005",
        format!("{name} launched / native"),
        ratios.median()
    );
}

/// Builds the MPI program; its path.
fn build_pingpong(p: &Plan) -> Result<String, String> {
    let (source, program) = (p.dir.join("pingpong.c"), p.dir.join("pingpong"));
    std::fs::write(&source, include_str!("pingpong.c")).map_err(|e| format!("write {}: {e}", source.display()))?;
    run(Command::new("mpicc.openmpi").arg("-O2").arg("-o").args([&program, &source]))?;
    Ok(program.display().to_string())
}

/// Runs a loop, which prints how many milliseconds a piece of it took.
fn loop_ms(c: &mut Command) -> Result<f64, String> {
    // Open MPI refuses to run as root otherwise; native and launched alike.
    c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    milliseconds(&run(c)?)
}

fn milliseconds(said: &str) -> Result<f64, String> {
    said.trim().parse().map_err(|e| format!("the loop said {said:?}: {e}"))
}
