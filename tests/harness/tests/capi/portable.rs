//! Global arrays: processes that have parts of them are checkpointed at one moment, and another number goes on from that.

use super::compat::make;
use super::examples::{advances, end, is_taken, sum};
use super::{command, compile, library, CHECKED};
use belay_tests::build::Kind;
use belay_tests::case::mpirun;
use belay_tests::expect::{io, want};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{repository, Place, User};
use belay_tests::rng::Rng;
use belay_tests::Failure;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const POINTS: u32 = 200;
/// Steps at first: as many times twice that as it takes to be killed before the end.
const STEPS: u32 = 400;
const DOUBLINGS: u32 = 9;
/// Checkpoints until all processes meet at their points: on a loaded machine some may be late.
const TRIES: u32 = 8;
/// `BELAY_FROM`, or the option: both lead to the arrays.
const FROM: &str = "BELAY_FROM";

/// `belay export` of the job's newest generation to a new directory in its place of work: how it ends, and what it says.
fn export(job: &Job, to: &str, more: &[&str]) -> Result<(Option<i32>, String), Failure> {
    let [dir, to] = [job.dir(), job.work.join(to)].map(|path| path.display().to_string());
    let o = output(job.belay(&[&["export", &dir, "-o", &to], more].concat()), LIMIT)?;
    Ok((o.status.code(), text(&o)))
}

fn index(dir: &Path) -> Result<serde_json::Value, Failure> {
    let text = io("read the index", std::fs::read(dir.join("datasets.json")))?;
    serde_json::from_slice(&text).map_err(|e| e.to_string())
}

/// A solver with two ranks dies; with one, three and four it goes on from the arrays of its checkpoint, and ends with the
/// same result, also restarted in between.
pub(super) fn ranks(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let program = place.programs().join(format!("portable.heat.{}", user.name()));
    let source = repository().join("examples/heat.c");
    make(place, "mpicc.openmpi", &["-O2", "-std=gnu11"], &[source], &program)?;
    let argv = |ranks: u32, steps: u32| {
        let mut argv = mpirun(Kind::OpenMpi, ranks);
        argv.extend([program.display().to_string(), POINTS.to_string(), steps.to_string()]);
        argv
    };
    let label = |what: &str| format!("portable.{what}.{}", user.name());
    for doubling in 0..DOUBLINGS {
        let steps = STEPS << doubling;
        let mut job = Job::new(place, &label("alone"), user)?;
        job.native(&argv(2, steps))?;
        let expected = sum(&end(&mut job)?)?;
        let mut job = Job::new(place, &label("two"), user)?;
        job.launch(&[], &argv(2, steps))?;
        let Some(arrays) = arrays_of(&mut job, rng)? else { continue };
        let payload = index(&arrays)?["point"]["payload"]
            .as_str()
            .map(str::to_owned)
            .unwrap_or_default();
        let done: u64 = u32::from_str_radix(&payload, 16).map_or(0, u32::swap_bytes).into();
        for ranks in [1, 3, 4] {
            let from = arrays.display().to_string();
            let mut next = Job::new(place, &label(&format!("next.{ranks}")), user)?;
            match ranks {
                1 => {
                    next.set(FROM, &from);
                    next.native(&argv(ranks, steps))?;
                }
                _ => next.launch(&["--from".into(), from], &argv(ranks, steps))?,
            }
            let mut said = String::new();
            if ranks == 3 && advances(&mut next, rng)? && is_taken(&next)? {
                next.kill_all()?;
                // It may have said all before the checkpoint.
                said = next.output_text();
                next.restart(&[])?;
            }
            said += &format!("\n{}", end(&mut next)?);
            let got = sum(said.trim())?;
            // Of all that it has said since it began.
            let all = io("read what it says", std::fs::read_to_string(next.work.join("out.1")))?;
            let first = all
                .lines()
                .find_map(|line| line.strip_prefix("step ")?.split(',').next()?.parse().ok());
            let first: Option<u64> = first;
            let goes_on = first.is_none_or(|first| (done + 1..=done + 10).contains(&first));
            want(got == expected && goes_on, || {
                format!("{ranks} ranks, {steps} steps, from {done} on: {got} instead of {expected}, after step {first:?}")
            })?;
        }
        return Ok(());
    }
    Err("it ends before it has been killed".into())
}

/// Takes a checkpoint at a random moment, kills the job, and exports its arrays; none where the job has ended.
fn arrays_of(job: &mut Job, rng: &mut Rng) -> Result<Option<PathBuf>, Failure> {
    let mut said = String::new();
    for n in 0..TRIES {
        if !advances(job, rng)? || !is_taken(job)? {
            return Ok(None);
        }
        let to = format!("arrays.{n}");
        let (code, why) = export(job, &to, &[])?;
        said = why;
        if said.starts_with("no program") {
            // The ranks have ended, and mpirun is about to.
            return Ok(None);
        }
        if code == Some(0) {
            let dir = job.work.join(&to);
            let index = index(&dir)?;
            let array = &index["global"][0];
            let is_right = array["name"] == "temperature" && array["extent"] == serde_json::json!([POINTS, POINTS]);
            want(is_right && index["global"].as_array().map(Vec::len) == Some(1), || {
                index.to_string()
            })?;
            job.kill_all()?;
            return Ok(Some(dir));
        }
        want(code == Some(80) && said.contains("belay_point"), || said.clone())?;
    }
    Err(format!("the ranks never met at a point: {said}"))
}

/// Why arrays are not exported, where the parts of two processes do not belong together in one way.
const APART: [(&str, &str); 8] = [
    ("gap", "60 elements of array field are no process's own"),
    ("overlap", "both own some elements of array field"),
    ("extent", "disagree about array field"),
    ("elem", "disagree about array field"),
    ("payload", "have given different payloads to belay_point"),
    ("late", "did not wait in belay_point"),
    ("number", "did not wait in belay_point"),
    ("jump", "did not wait in belay_point"),
];
/// The last of them are never of one moment.
const NEVER: [&str; 3] = ["late", "number", "jump"];

/// What is not of one moment, or does not belong together, is refused by name, and what is wrong in a program that starts
/// too.
pub(super) fn refused(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/portable.c");
    let program = compile(place, &source, &format!("portable.{}", user.name()), CHECKED)?;
    let argv = |kind: &str| [program.display().to_string(), "save".into(), kind.into()];
    for (kind, expected) in APART {
        let mut job = Job::new(place, &format!("portable.{kind}.{}", user.name()), user)?;
        job.launch(&[], &argv(kind))?;
        let is_it = |code, said: &str| code == Some(80) && said.contains(expected);
        for _ in 0..if NEVER.contains(&kind) { 3 } else { 1 } {
            let tries = if NEVER.contains(&kind) { 1 } else { TRIES };
            let (code, said) = until(&mut job, tries, is_it)?;
            let is_nothing = !job.work.join("tried").exists();
            want(is_it(code, &said) && is_nothing, || format!("{kind}: {said}"))?;
        }
        // What each has comes out nevertheless.
        let (code, said) = export(&job, "each", &["--by-process"])?;
        want(code == Some(0) && said.starts_with("3 arrays"), || format!("{kind}: {said}"))?;
        job.verdict(false, LIMIT)?;
    }
    let mut job = Job::new(place, &format!("portable.single.{}", user.name()), user)?;
    job.launch(&[], &argv("single"))?;
    let (_, said) = until(&mut job, TRIES, |code, _| code == Some(0))?;
    want(said.starts_with("3 arrays"), || said.clone())?;
    let single = job.work.join("tried").display().to_string();
    job.verdict(false, LIMIT)?;
    let o = output(job.belay(&["launch", "--from", &single, "true"]), LIMIT)?;
    want(
        o.status.code() == Some(64) && text(&o).contains("without global arrays"),
        || text(&o),
    )?;
    let o = output(job.belay(&["launch", "--from", "nowhere", "true"]), LIMIT)?;
    want(!o.status.success() && text(&o).contains("nowhere/datasets.json"), || text(&o))?;
    starts(place, user, &program)
}

/// Takes checkpoints until the export of one has come out so, as often as that is to be tried; what it has said.
fn until(job: &mut Job, tries: u32, is_it: impl Fn(Option<i32>, &str) -> bool) -> Result<(Option<i32>, String), Failure> {
    let mut last = (None, String::new());
    for _ in 0..tries {
        job.progress(LIMIT)?;
        job.checkpoint()?;
        drop(std::fs::remove_dir_all(job.work.join("tried")));
        last = export(job, "tried", &[])?;
        if is_it(last.0, &last.1) {
            break;
        }
    }
    Ok(last)
}

/// How a program that starts is wrong, and what it says.
const WRONG: [(&str, &str); 4] = [
    ("elem", "field has 8 bytes an element in the export, and 4 in the program"),
    (
        "extent",
        "field has 60 x 48 elements in the export, and 60 x 49 in the program",
    ),
    ("missing", "the export has no array other"),
    ("payload", "has 40 bytes, and the program asks for 39"),
];

fn starts(place: &Place, user: User, program: &Path) -> Result<(), Failure> {
    let mut job = Job::new(place, &format!("portable.right.{}", user.name()), user)?;
    let argv = [program.display().to_string(), "save".into(), "right".into()];
    job.launch(&[], &argv)?;
    let (_, said) = until(&mut job, TRIES, |code, _| code == Some(0))?;
    want(said.starts_with("2 arrays"), || said.clone())?;
    let dir = job.work.join("tried");
    job.verdict(false, LIMIT)?;
    let of = index(&dir)?;
    let single = &of["datasets"][0];
    want(
        single["name"] == "alone" && of["datasets"].as_array().map(Vec::len) == Some(1),
        || of.to_string(),
    )?;
    let start = |kind: &str, from: &Path| {
        let mut c = command(user, program, &["start", kind]);
        c.env(FROM, from);
        let o = output(c, LIMIT)?;
        want(o.status.success(), || format!("{kind}: {}", text(&o)))?;
        Ok::<_, Failure>(text(&o))
    };
    for kind in ["all", "some"] {
        let said = start(kind, &dir)?;
        want(said.starts_with("started: step ") && said.ends_with(" of right"), || {
            format!("{kind}: {said}")
        })?;
    }
    others(place, user, &dir)?;
    for (kind, expected) in WRONG {
        let said = start(kind, &dir)?;
        want(said.contains("not started: ") && said.contains(expected), || {
            format!("{kind}: {said}")
        })?;
    }
    tampered(&dir, &of, &|| start("all", &dir))
}

/// Programs in Fortran, C++ and Python start from the same arrays.
fn others(place: &Place, user: User, dir: &Path) -> Result<(), Failure> {
    let source = |name: &str| repository().join("tests/programs/capi").join(name);
    let (fortran, plus) = (
        place.programs().join(format!("portable.f90.{}", user.name())),
        place.programs().join(format!("portable.cpp.{}", user.name())),
    );
    let module = repository().join("capi/fortran/belay_access.f90");
    let modules = format!("-J{}", place.programs().display());
    make(
        place,
        "gfortran",
        &["-std=f2018", &modules],
        &[module, source("portable.f90")],
        &fortran,
    )?;
    make(place, "c++", &["-std=c++11", "-pedantic"], &[source("portable.cpp")], &plus)?;
    let lib = library(place)?;
    for file in [source("portable.py"), repository().join("capi/python/belay.py")] {
        let to = lib.join(file.file_name().unwrap_or_default());
        io("copy a program", std::fs::copy(&file, to))?;
    }
    let script = lib.join("portable.py").display().to_string();
    let python = (Path::new("python3"), vec![script.as_str()]);
    for (program, args) in [(&*fortran, vec![]), (&*plus, vec![]), python] {
        for from in ["".as_ref(), dir] {
            let mut c = command(user, program, &args);
            c.env(FROM, from).env("PYTHONDONTWRITEBYTECODE", "1");
            c.env("LD_LIBRARY_PATH", &lib).env("PYTHONPATH", &lib);
            let o = output(c, LIMIT)?;
            let expected = if from == dir { "started: step " } else { "nothing" };
            want(o.status.success() && text(&o).starts_with(expected), || {
                format!("{}: {}", program.display(), text(&o))
            })?;
        }
    }
    Ok(())
}

/// An export that somebody has changed is refused.
fn tampered(dir: &Path, of: &serde_json::Value, start: &dyn Fn() -> Result<String, Failure>) -> Result<(), Failure> {
    let (index, array) = (dir.join("datasets.json"), dir.join("field.global.raw"));
    let write = |what: &[u8]| io("change the index", std::fs::write(&index, what));
    let changed = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut new = of.clone();
        change(&mut new);
        write(new.to_string().as_bytes())
    };
    let refused = |what: &str, expected: &str| {
        let said = start()?;
        want(said.contains("not started: ") && said.contains(expected), || {
            format!("{what}: {said}")
        })
    };
    changed(&|of| of["global"][0]["file"] = "../tried/field.global.raw".into())?;
    refused("elsewhere", "lies elsewhere")?;
    changed(&|of| of["global"][0]["extent"] = serde_json::json!([u64::MAX, u64::MAX]))?;
    refused("large", "cannot be")?;
    changed(&|of| of["point"]["payload"] = "0".into())?;
    refused("payload", "its payload is none")?;
    changed(&|of| of["point"] = serde_json::Value::Null)?;
    refused("no point", "no point that programs start from")?;
    write(b"{")?;
    refused("no index", "is not the index of an export")?;
    write(of.to_string().as_bytes())?;
    let bytes = io("read", std::fs::read(&array))?;
    io("cut", std::fs::write(&array, &bytes[1..]))?;
    refused("cut", "a file of 23039 bytes instead of 23040")?;
    let other = dir.join("other");
    io("write", std::fs::write(&other, &bytes))?;
    io("remove", std::fs::remove_file(&array))?;
    io("link", std::os::unix::fs::symlink(&other, &array))?;
    refused("link", "symbolic links")?;
    io("remove", std::fs::remove_file(&array))?;
    io("make a directory", std::fs::create_dir(&array))?;
    refused("directory", "no regular file")
}
