//! HPC programs of Debian over several hosts: checkpointed at random moments, killed everywhere, restarted on other
//! hosts and all on one. What they compute must be what they compute undisturbed.
//!
//! BELAY_STRESS=N runs each N times.

use belay_tests::across::Job;
use belay_tests::build::Kind;
use belay_tests::expect::{io, want};
use belay_tests::job::show;
use belay_tests::outcome::{compare, tail, Outcome};
use belay_tests::place::{installed, Place};
use belay_tests::rng::Rng;
use belay_tests::runner::rounds;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::path::Path;
use std::time::Instant;

/// A program that an MPI starts.
#[derive(Clone, Copy)]
struct Program {
    name: &'static str,
    words: &'static [&'static str],
    /// Writes what the program reads.
    prepare: fn(&Path) -> Result<(), Failure>,
    /// Whether it has begun to compute.
    computes: fn(&Path) -> bool,
    /// What it has computed, without times.
    computed: fn(&Path) -> String,
}

fn read(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join(name)).unwrap_or_default()
}

const LAMMPS: Program = Program {
    name: "lammps",
    words: &["lmp", "-in", "in.lj", "-log", "none"],
    prepare: |dir| {
        let input = "units lj\natom_style atomic\nlattice fcc 0.8442\nregion box block 0 10 0 10 0 10\ncreate_box 1 box\ncreate_atoms 1 box\nmass 1 1.0\n\
                     velocity all create 3.0 87287\npair_style lj/cut 2.5\npair_coeff 1 1 1.0 1.0 2.5\nneighbor 0.3 bin\nfix 1 all nve\nthermo 20\n\
                     thermo_modify line one\nrun 1000\n";
        io("write the input", std::fs::write(dir.join("in.lj"), input))
    },
    computes: |dir| read(dir, "result").contains("Step"),
    computed: |dir| {
        let said = read(dir, "result");
        let is_step = |l: &&str| l.split_whitespace().next().is_some_and(|w| w.parse::<u32>().is_ok()) && l.starts_with(' ');
        said.lines().filter(is_step).fold(String::new(), |all, l| all + l + "\n")
    },
};

const HPCC: Program = Program {
    name: "hpcc",
    words: &["hpcc"],
    prepare: |dir| {
        let example = "/usr/share/doc/hpcc/examples/_hpccinf.txt";
        let input = io(example, std::fs::read_to_string(example))?;
        // The sixth line is the size of the problem.
        let input: String = (1..)
            .zip(input.lines())
            .map(|(n, l)| if n == 6 { "400\n".into() } else { l.to_owned() + "\n" })
            .collect();
        io("write the input", std::fs::write(dir.join("hpccinf.txt"), input))
    },
    // It opens its output for each line anew, so that lines written after a checkpoint are there twice after the
    // restart: those of the summary at the end count.
    computes: |dir| read(dir, "hpccoutf.txt").contains("Begin of"),
    computed: |dir| {
        let said = read(dir, "hpccoutf.txt");
        let told = [
            "Success",
            "CommWorldProcs",
            "HPL_RnormI",
            "HPL_Xnorm1",
            "HPL_XnormI",
            "HPL_N",
            "PTRANS_residual",
            "MPIFFT_N",
            "MPIFFT_maxErr",
            "MPIRandomAccess_LCG_Errors",
            "MPIRandomAccess_Errors",
            "MPIRandomAccess_N",
        ];
        let last = |key: &str| {
            said.lines()
                .rev()
                .find(|l| l.split_once('=').is_some_and(|(k, _)| k == key))
                .unwrap_or_default()
        };
        told.iter().fold(String::new(), |all, key| all + last(key) + "\n")
    },
};

/// A job that runs the program on the first `parts` of `all` hosts, and its command.
fn prepared(place: &Place, program: Program, way: &str, parts: usize, all: usize) -> Result<(Job, String), Failure> {
    let job = Job::of(
        place,
        &format!("hpc-{}-{parts}-{way}", program.name),
        Kind::OpenMpi,
        parts,
        all,
    )?;
    (program.prepare)(&job.work)?;
    let (first, rest) = program.words.split_first().ok_or("no words")?;
    let mut words = job.mpirun(first);
    words.extend(rest.iter().map(|w| (*w).to_owned()));
    let script = format!("cd {}; exec {} >result 2>&1", job.work.display(), words.join(" "));
    Ok((job, script))
}

fn outcome(job: &mut Job, program: Program) -> Result<Outcome, Failure> {
    let status = show(job.end()?);
    let mut computed = (program.computed)(&job.work);
    if computed.trim().is_empty() || status != "exit 0" {
        computed += tail(&read(&job.work, "result"));
        computed += &job.said();
    }
    Ok((status, computed.into_bytes()))
}

/// Runs the program with crashes at random moments of the first `ms` milliseconds in which it computes: after one it
/// comes back on other hosts, after another one as a whole on one. What it came to, and how many crashes there were
/// before it ended.
fn disturbed(place: &Place, program: Program, parts: usize, ms: u64, rng: &mut Rng) -> Result<(Outcome, usize), Failure> {
    let (mut job, script) = prepared(place, program, "restarted", parts, 2 * parts + 1)?;
    job.start_launch(&["sh", "-c", &script])?;
    job.answers()?;
    job.comes_true("the program computes", || {
        job.hosts_in_use().is_empty() || (program.computes)(&job.work)
    })?;
    let mut crashes = 0;
    while crashes < 2 {
        rng.pause(ms / 2);
        if !job.take().map_err(|e| format!("after {crashes} crashes: {e}"))? {
            break;
        }
        rng.pause(ms / 4);
        job.crash();
        crashes += 1;
        // Ports that the killed job used stay taken for a minute where it was.
        job.shift(crashes * parts);
        if crashes == 2 {
            let host = job.at[0];
            job.at = vec![host; 2];
        }
        job.start_restart()?;
        if !job.answers()? {
            break;
        }
    }
    Ok((outcome(&mut job, program)?, crashes))
}

/// Compares runs with crashes with one that is left alone.
fn check(place: &Place, program: Program, parts: usize, rng: &mut Rng) -> Result<(), Failure> {
    let (mut job, script) = prepared(place, program, "native", parts, parts)?;
    job.start(&["sh", "-c", &script])?;
    job.comes_true("the program computes", || (program.computes)(&job.work))?;
    let begin = Instant::now();
    let expected = outcome(&mut job, program)?;
    let whole = begin.elapsed().as_millis();
    drop(job);
    let computed = String::from_utf8_lossy(&expected.1);
    want(expected.0 == "exit 0" && computed.lines().all(|l| !l.is_empty()), || {
        format!("alone: {}: {computed}", expected.0)
    })?;
    for round in 0..rounds(1) {
        let mut ms = u64::try_from(whole / 2).unwrap_or(1000);
        loop {
            let got = disturbed(place, program, parts, ms, rng);
            let (got, crashes) = got.map_err(|e| format!("round {round}: {e}"))?;
            compare(&expected, &got, &format!("round {round}, {crashes} crashes"))?;
            if crashes == 2 {
                break;
            }
            want(ms > 0, || {
                format!("round {round}: it ends before it can be checkpointed twice")
            })?;
            // It was faster than before.
            ms /= 2;
        }
    }
    Ok(())
}

fn main() {
    let mut target = Target::over_hosts("hpc");
    // Each has use for all processors.
    target.in_turn();
    for program in [LAMMPS, HPCC] {
        if !installed(program.words[0]) {
            println!("left out: {} ({} not installed)", program.name, program.words[0]);
            continue;
        }
        for parts in [2, 4] {
            target.once(&format!("{}::{parts}_hosts", program.name), move |p, r| {
                check(p, program, parts, r)
            });
        }
    }
    target.run();
}
