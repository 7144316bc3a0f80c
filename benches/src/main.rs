//! Paired measurements: what belay costs against what the bare kernel costs, taken in turn in the same run.
//!
//! `belay-bench [NAME...] [--size-gib N] [--runs N] [--dir TMPFS] [--other BELAY]`. Each line shows median, smallest
//! and largest of the runs; a claim is a ratio of two medians of one run, never one absolute time. The program is its
//! own workload: `belay-bench worker ...`.

mod access;
mod application;
mod buckets;
mod busy;
mod differential;
mod encode;
mod history;
mod measure;
mod memory;
mod overhead;
mod placement;
mod policies;
mod predict;
mod sealing;
mod small;
mod tree;
mod verbs;
mod worker;

use std::path::PathBuf;

/// What the command line asked for.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The `belay` to measure.
    pub(crate) belay: PathBuf,
    /// Another one to measure beside it.
    pub(crate) other: Option<PathBuf>,
    /// This program, as workload.
    pub(crate) me: PathBuf,
    /// Work directory on tmpfs.
    pub(crate) dir: PathBuf,
    /// Runs per figure.
    pub(crate) runs: usize,
    /// Bytes of the large process.
    pub(crate) size: usize,
    /// Draws of what simulations draw at random.
    pub(crate) seeds: u64,
}

impl Plan {
    /// The same with another `belay`.
    pub(crate) fn with(&self, belay: PathBuf) -> Self {
        Self {
            belay,
            other: None,
            me: self.me.clone(),
            dir: self.dir.clone(),
            ..*self
        }
    }
}

type Bench = fn(&Plan) -> Result<(), String>;

const BENCHES: [(&str, Bench); 20] = [
    ("launch", overhead::launch),
    ("overhead", overhead::loops),
    ("pingpong", overhead::pingpong),
    ("small", small::small),
    ("threads", small::threads),
    ("busy", busy::busy),
    ("blocked", memory::blocked),
    ("write", memory::write),
    ("restart", memory::restart),
    ("tree", tree::tree),
    ("placement", placement::placement),
    ("history", history::history),
    ("policies", policies::policies),
    ("predict", predict::predict),
    ("differential", differential::differential),
    ("application", application::application),
    ("encode", encode::encode),
    ("sealing", sealing::sealing),
    ("verbs", verbs::verbs),
    ("access", access::access),
];

fn plan(args: &[String]) -> Result<(Plan, Vec<String>), String> {
    let me = std::env::current_exe().map_err(|e| format!("find myself: {e}"))?;
    let belay = me.with_file_name("belay");
    let mut p = Plan {
        belay,
        other: None,
        me,
        dir: PathBuf::from("/dev/shm"),
        runs: 5,
        size: 4 << 30,
        seeds: 1,
    };
    let mut names = Vec::new();
    let mut it = args.iter();
    while let Some(a) = it.next() {
        let mut value = || it.next().ok_or(format!("{a} needs a value"));
        match a.as_str() {
            "--size-gib" => p.size = value()?.parse::<usize>().map_err(|e| format!("--size-gib: {e}"))? << 30,
            "--size-mib" => p.size = value()?.parse::<usize>().map_err(|e| format!("--size-mib: {e}"))? << 20,
            "--runs" => p.runs = value()?.parse().map_err(|e| format!("--runs: {e}"))?,
            "--seeds" => p.seeds = value()?.parse().map_err(|e| format!("--seeds: {e}"))?,
            "--other" => p.other = Some(value()?.into()),
            "--dir" => p.dir = value()?.into(),
            _ if BENCHES.iter().any(|(n, _)| n == a) => names.push(a.clone()),
            _ => {
                return Err(format!(
                    "unknown argument {a}; benches: {}",
                    BENCHES.map(|(n, _)| n).join(" ")
                ))
            }
        }
    }
    if !p.belay.exists() {
        return Err(format!("{} is missing: cargo build --release --workspace", p.belay.display()));
    }
    p.dir = p.dir.join(format!("belay-bench-{}", std::process::id()));
    Ok((p, names))
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|a| a == "worker") {
        worker::main(&args[1..]);
        return;
    }
    let (plan, names) = plan(&args).unwrap_or_else(|e| {
        eprintln!("belay-bench: {e}");
        std::process::exit(2);
    });
    let mut failed = false;
    for (name, bench) in BENCHES {
        if !names.is_empty() && !names.iter().any(|n| n == name) {
            continue;
        }
        std::fs::create_dir_all(&plan.dir).ok();
        println!("== {name} (load {})", measure::load());
        if let Err(e) = bench(&plan) {
            println!("{name}: {e}");
            failed = true;
        }
        println!("-- load {}", measure::load());
        std::fs::remove_dir_all(&plan.dir).ok();
    }
    std::process::exit(i32::from(failed));
}
