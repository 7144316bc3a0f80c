//! The programs of examples/: whatever checkpoints leave out, and however often they are killed, they compute the same.

use super::access::{left_out, ACCESS};
use super::command;
use super::compat::make;
use belay_tests::build::Kind;
use belay_tests::case::mpirun;
use belay_tests::expect::want;
use belay_tests::job::{output, patient, show, text, Job};
use belay_tests::place::{repository, Place, User};
use belay_tests::rng::Rng;
use belay_tests::Failure;
use std::time::{Duration, Instant};

/// Ranks that wait for each other are slow where others have the processors.
const LIMIT: Duration = Duration::from_secs(400);
const POINTS: u32 = 256;
/// Steps at first: as many times twice that as it takes to be killed often enough before the end.
const STEPS: u32 = 400;
const DOUBLINGS: u32 = 8;
const LIVES: u32 = 3;
const MOST_LIVES: u32 = 12;
/// Of each life. The first of them holds everything.
const CHECKPOINTS: u32 = 3;
/// Exit statuses of `belay checkpoint` where the program has ended.
const ENDED: [Option<i32>; 2] = [Some(68), Some(86)];

/// An example with its first arguments, as a user runs it.
struct Example {
    name: String,
    user: User,
    argv: Vec<String>,
}

/// C and MPI.
pub(super) fn heat(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let program = place.programs().join(format!("heat.{}", user.name()));
    let source = repository().join("examples/heat.c");
    make(place, "mpicc.openmpi", &["-O2", "-std=gnu11"], &[source], &program)?;
    let mut argv = mpirun(Kind::OpenMpi, 2);
    argv.push(program.display().to_string());
    Example::new("heat", user, argv).check(place, rng)
}

/// Fortran.
pub(super) fn wave(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let program = place.programs().join(format!("wave.{}", user.name()));
    let from = ["capi/fortran/belay_access.f90", "examples/wave.f90"].map(|file| repository().join(file));
    let modules = format!("-J{}", place.programs().display());
    make(place, "gfortran", &["-O2", "-std=f2018", &modules], &from, &program)?;
    Example::new("wave", user, vec![program.display().to_string()]).check(place, rng)
}

/// A library of OPS's shape, whose launcher of loops declares what they do, in one line.
pub(super) fn ops(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let program = place.programs().join(format!("ops.{}", user.name()));
    let source = repository().join("tests/programs/capi/ops_shape.cpp");
    make(place, "c++", &["-O2", "-std=c++11", "-pedantic"], &[source], &program)?;
    let mut c = command(user, &program, &["100", "10", "wrong"]);
    c.env("BELAY_ACCESS", "verify");
    let said = text(&output(c, LIMIT)?);
    let found = "verify: loop changes leaves bytes ";
    want(said.contains(found) && said.contains("of dataset flux.2"), || said.clone())?;
    Example::new("ops", user, vec![program.display().to_string()]).check(place, rng)
}

impl Example {
    fn new(name: &str, user: User, argv: Vec<String>) -> Self {
        let name = format!("example.{name}.{}", user.name());
        Self { name, user, argv }
    }

    fn check(&self, place: &Place, rng: &mut Rng) -> Result<(), Failure> {
        let few = STEPS / 10;
        let (plain, verified) = (self.alone(place, few, "")?, self.alone(place, few, "verify")?);
        want(plain == verified, || format!("{plain}, verified: {verified}"))?;
        for doubling in 0..DOUBLINGS {
            let steps = STEPS << doubling;
            let expected = sum(&self.alone(place, steps, "")?)?;
            let mut job = Job::new(place, &self.name, self.user)?;
            job.launch(&ACCESS.map(String::from), &self.with(steps))?;
            let enough = die_often(&mut job, rng)?;
            let got = sum(&end(&mut job)?)?;
            want(got == expected, || format!("{steps} steps: {got} instead of {expected}"))?;
            job.left_behind()?;
            if enough {
                return Ok(());
            }
        }
        Err("it ends before it has been killed often enough".into())
    }

    fn with(&self, steps: u32) -> Vec<String> {
        let more = [POINTS, steps].map(|n| n.to_string());
        self.argv.iter().cloned().chain(more).collect()
    }

    /// What it prints without belay.
    fn alone(&self, place: &Place, steps: u32, mode: &str) -> Result<String, Failure> {
        let mut job = Job::new(place, &self.name, self.user)?;
        job.set("BELAY_ACCESS", mode);
        job.native(&self.with(steps))?;
        end(&mut job)
    }
}

/// Kills and restarts it again and again, after checkpoints at random moments, until one has left something out; not where
/// it ends before.
fn die_often(job: &mut Job, rng: &mut Rng) -> Result<bool, Failure> {
    let mut most = 0;
    for life in 0..MOST_LIVES {
        if life >= LIVES && most > 0 {
            return Ok(true);
        }
        for _ in 0..CHECKPOINTS {
            if !advances(job, rng)? || !is_taken(job)? {
                return Ok(false);
            }
            most = most.max(left_out(job)?);
        }
        rng.pause(100);
        job.kill_all()?;
        job.restart(&[])?;
    }
    Err("nothing was left out of any checkpoint".into())
}

/// Waits until it says that it has done further steps, and then for a part of that time; whether it still runs.
pub(super) fn advances(job: &mut Job, rng: &mut Rng) -> Result<bool, Failure> {
    let newest = |job: &Job| job.output_text().lines().rfind(|l| l.starts_with("step ")).map(str::to_owned);
    let (before, start) = (newest(job), Instant::now());
    while newest(job) == before {
        if job.has_ended()? {
            return Ok(false);
        }
        want(start.elapsed() < patient(LIMIT), || {
            format!("no step within {} s; {}: {}", LIMIT.as_secs(), job.stuck(), job.output_text())
        })?;
        std::thread::sleep(Duration::from_millis(2));
    }
    rng.pause(u64::try_from(start.elapsed().as_millis()).unwrap_or(0));
    Ok(true)
}

/// Takes a checkpoint, unless it has ended.
pub(super) fn is_taken(job: &Job) -> Result<bool, Failure> {
    let o = job.checkpoint_raw(&[])?;
    let has_ended = ENDED.contains(&o.status.code());
    want(o.status.success() || has_ended, || {
        format!("belay checkpoint: {}: {}", show(o.status), text(&o))
    })?;
    Ok(!has_ended)
}

/// What it has printed when it has ended well.
pub(super) fn end(job: &mut Job) -> Result<String, Failure> {
    let end = job.wait(LIMIT)?;
    let said = job.output_text();
    want(end.success(), || format!("{}: {said}", show(end)))?;
    Ok(said)
}

/// The checksum in its last line.
pub(super) fn sum(said: &str) -> Result<String, Failure> {
    let last = said.lines().last().and_then(|line| line.strip_prefix("checksum "));
    last.map(str::to_owned)
        .ok_or_else(|| format!("no checksum at the end of: {said}"))
}
