//! Declared accesses: what is left out is not missed, whatever happens; other ways are noticed, and wrong declarations.

use crate::{command, compile, library, link, CHECKED, LIMIT, PLAIN};
use belay_tests::across;
use belay_tests::build::Kind;
use belay_tests::expect::{io, want};
use belay_tests::job::{output, patient, text, Job};
use belay_tests::place::{repository, Place, User};
use belay_tests::rng::Rng;
use belay_tests::Failure;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Where programs on two hosts tell that they go on.
const BEATS: [&str; 2] = ["beat", "beat.below"];
/// Restarts of the solver.
const DEATHS: u64 = 8;
/// What the program declares is made use of.
pub(super) const ACCESS: [&str; 2] = ["--access", "deferred"];

/// Bytes that the newest generation has left out.
pub(super) fn left_out(job: &Job) -> Result<u64, Failure> {
    left_out_of(&job.status()?)
}

fn left_out_of(status: &serde_json::Value) -> Result<u64, Failure> {
    Ok(newest(status)?["left_out"].as_u64().unwrap_or(0))
}

/// The newest generation.
fn newest(status: &serde_json::Value) -> Result<&serde_json::Value, Failure> {
    let newest = status["generations"].as_array().and_then(|all| all.last());
    newest.ok_or_else(|| format!("no generations: {status}"))
}

/// Bytes of an array of the solver.
const ARRAY: u64 = 1024 * 256 * 8;

/// What a solver declares that it overwrites is not stored, and nobody notices, whenever it is killed: stopped before the
/// loop at which least is alive, and anywhere.
pub(super) fn declared(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_solver.c");
    let program = compile(place, &source, &format!("declared.{}", user.name()), CHECKED)?;
    let program = program.display().to_string();
    // Before the first loop three arrays of four are dead, all but a rim; anywhere, at least the interior of one. On a
    // loaded machine the program may not get to all of its loops in time, so not every checkpoint lacks them.
    let ways = [
        (vec![program.clone()], ARRAY * 3 * 19 / 20),
        (vec![program, "one-site".into()], ARRAY * 19 / 20),
    ];
    for (argv, least) in ways {
        let mut job = Job::new(place, &format!("declared.{}.{}", argv.len(), user.name()), user)?;
        job.launch(&ACCESS.map(String::from), &argv)?;
        let most = die_often(&mut job, least, rng)?;
        want(least <= most && most <= ARRAY * 3, || {
            format!("{argv:?}: at most {most} bytes were left out, not {least} to {}", ARRAY * 3)
        })?;
    }
    Ok(())
}

/// Only what a loop overwrites that is about to begin is left out: whoever takes another way after it misses nothing.
pub(super) fn certain(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    const CERTAIN: [&str; 4] = ["--access", "certain", "--keep", "1"];
    let source = repository().join("tests/programs/capi/access_solver.c");
    let program = compile(place, &source, &format!("certain.{}", user.name()), CHECKED)?;
    let program = program.display().to_string();
    let mut job = Job::new(place, &format!("certain.{}", user.name()), user)?;
    job.launch(&CERTAIN.map(String::from), std::slice::from_ref(&program))?;
    let most = die_often(&mut job, ARRAY - 8192, rng)?;
    want((ARRAY - 8192..=ARRAY).contains(&most), || {
        format!("at most {most} bytes were left out, not nearly {ARRAY}")
    })?;
    for how in ["declared", "undeclared"] {
        let mut job = Job::new(place, &format!("certain.{how}.{}", user.name()), user)?;
        let sign = job.work.join("sign");
        let argv = [program.clone(), how.into(), sign.display().to_string()];
        job.launch(&CERTAIN.map(String::from), &argv)?;
        job.progress(LIMIT)?;
        leave_out(&mut job, ARRAY - 8192, rng)?;
        job.kill_all()?;
        job.clear_beat()?;
        io("make the sign", std::fs::write(&sign, ""))?;
        job.restart(&[])?;
        let end = job.wait(patient(LIMIT))?;
        let said = job.output_text();
        // It has read all that it ever writes: by its own words, and not by ours.
        let is_own = end.signal().is_none() && said.contains("what was left out was read") && !said.contains("another way");
        want(is_own, || format!("{how}: ended by {end}: {said}"))?;
    }
    Ok(())
}

/// What could be left out is told, and with `report` nothing is.
pub(super) fn reported(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_solver.c");
    let program = compile(place, &source, &format!("reported.{}", user.name()), CHECKED)?;
    let argv = [program.display().to_string()];
    for how in ["report", "deferred"] {
        let mut job = Job::new(place, &format!("reported.{how}.{}", user.name()), user)?;
        job.launch(&["--access", how].map(String::from), &argv)?;
        job.progress(LIMIT)?;
        job.checkpoint()?;
        want(newest(&job.status()?)?["declared"].is_null(), || {
            "loops of before the first".into()
        })?;
        best_is_told(&mut job, how, rng)?;
        let dir = job.dir().display().to_string();
        for argv in [&["status", &dir][..], &["list", &dir], &["inspect", &dir]] {
            let said = text(&output(job.belay(argv), LIMIT)?);
            let is_told = said.contains("declared arrays: 8.0 MiB") && said.contains("before loop");
            want(is_told, || format!("{argv:?}: {said}"))?;
        }
        job.crash_and_restart(LIMIT)?;
        job.verdict(false, LIMIT)?;
    }
    Ok(())
}

/// Takes checkpoints until the program has begun loops enough for the best one to be known.
fn best_is_told(job: &mut Job, how: &str, rng: &mut Rng) -> Result<(), Failure> {
    let mut status = serde_json::Value::Null;
    for _ in 0..8 {
        somewhere(job, rng)?;
        job.checkpoint()?;
        status = job.status()?;
        let of = newest(&status)?;
        want(how == "deferred" || of["left_out"].is_null(), || format!("left out: {of}"))?;
        let told = &of["declared"];
        let alive = |n: &serde_json::Value| (ARRAY..ARRAY * 11 / 10).contains(&n.as_u64().unwrap_or(0));
        let best = &told["best"][0];
        let is_chosen = best["chosen"] == u32::from(how == "deferred");
        if best["name"] == "first" && is_chosen && alive(&best["alive"]) && alive(&told["at_best"]) {
            let is_whole = told["bytes"] == ARRAY * 4 && told["sites"] == 3 && best["visits"].as_u64() > Some(2);
            return want(is_whole, || told.to_string());
        }
    }
    Err(format!("what is best is not told: {status}"))
}

/// Who has jumped out of the wait is not taken for one that still waits.
pub(super) fn jumped(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_jump.c");
    let program = compile(place, &source, &format!("jumped.{}", user.name()), CHECKED)?;
    let mut job = Job::new(place, &format!("jumped.{}", user.name()), user)?;
    job.launch(&["--access", "certain"].map(String::from), &[program.display().to_string()])?;
    for _ in 0..6 {
        job.progress(LIMIT)?;
        rng.pause(50);
        job.checkpoint()?;
        let left = left_out(&job)?;
        want(left == 0, || format!("{left} bytes were left out"))?;
    }
    job.crash_and_restart(LIMIT)?;
    job.verdict(false, LIMIT)?;
    let said = job.output_text();
    want(!said.contains("jumps: 0"), || format!("nobody has jumped: {said}"))
}

/// What a program has declared comes out of a complete generation as files, and of another one it does not.
pub(super) fn exported(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_solver.c");
    let program = compile(place, &source, &format!("exported.{}", user.name()), CHECKED)?;
    let mut job = Job::new(place, &format!("exported.{}", user.name()), user)?;
    job.launch(&ACCESS.map(String::from), &[program.display().to_string()])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    let export = |job: &Job, to: &Path| {
        let [dir, to] = [&job.dir(), to].map(|path| path.display().to_string());
        output(job.belay(&["export", &dir, "-o", &to]), LIMIT)
    };
    let to = job.work.join("arrays");
    let o = export(&job, &to)?;
    want(o.status.success() && text(&o).contains("4 arrays, 8.0 MiB"), || text(&o))?;
    let index = io("read", std::fs::read(to.join("datasets.json")))?;
    let index: serde_json::Value = serde_json::from_slice(&index).map_err(|e| e.to_string())?;
    for entry in index["datasets"].as_array().into_iter().flatten() {
        want(
            entry["elem"] == 8 && entry["extent"] == serde_json::json!([1024, 256]),
            || entry.to_string(),
        )?;
        let file = to.join(entry["file"].as_str().unwrap_or_default());
        let bytes = io("read", std::fs::read(&file))?;
        want(bytes.len() as u64 == ARRAY, || {
            format!("{}: {} bytes", file.display(), bytes.len())
        })?;
        // Of the others, loops may have overwritten a part.
        if entry["name"] == "field" {
            let words = bytes.chunks_exact(8).map(|w| w.try_into().map_or(0, u64::from_le_bytes));
            let words: Vec<u64> = words.collect();
            let step = |at: u64| 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(at);
            let wrong = words
                .iter()
                .zip(0u64..)
                .find(|(w, at)| **w != words[0].wrapping_add(step(*at)));
            want(wrong.is_none(), || format!("element {wrong:?} of the field"))?;
        }
    }
    let again = export(&job, &to)?;
    want(!again.status.success() && text(&again).contains("exists"), || text(&again))?;
    leave_out(&mut job, 1, rng)?;
    let o = export(&job, &job.work.join("lacking"))?;
    want(o.status.code() == Some(80) && text(&o).contains("complete"), || text(&o))?;
    job.verdict(false, LIMIT)
}

/// What is between loops is heard too: forks, new shapes, second declarations.
pub(super) fn turns(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_turns.c");
    let program = compile(place, &source, &format!("turns.{}", user.name()), CHECKED)?;
    let mut job = Job::new(place, &format!("turns.{}", user.name()), user)?;
    job.launch(&ACCESS.map(String::from), &[program.display().to_string()])?;
    let most = die_often(&mut job, 1, rng)?;
    want(most > 0, || {
        let log = std::fs::read_to_string(job.dir().join("log")).unwrap_or_default();
        let said = log.lines().filter(|line| line.contains("what the program"));
        format!("nothing was left out: {}", said.collect::<Vec<_>>().join("\n"))
    })
}

/// What a loop said that it overwrites is not missed where it ends by an exception.
pub(super) fn thrown(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let name = format!("thrown.{}", user.name());
    let program = place.programs().join(&name);
    let mut c = Command::new("c++");
    c.args(["-std=c++11", "-Wall", "-Wextra", "-Werror", "-O1"])
        .arg("-I")
        .arg(repository().join("capi/include"));
    let source = repository().join("tests/programs/capi/access_thrown.cpp");
    link(place, c, &source, &program)?;
    let mut job = Job::new(place, &name, user)?;
    job.launch(&ACCESS.map(String::from), &[program.display().to_string()])?;
    let most = die_often(&mut job, 1, rng)?;
    want(most > 0, || "nothing was left out".into())
}

/// A program that has closed all of its descriptors is stored as a whole, and its checkpoints are whole ones.
pub(super) fn closed(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    stored_as_a_whole(place, user, "closed", 3)
}

/// The same where a loop has not said what it uses.
pub(super) fn unlisted(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    stored_as_a_whole(place, user, "unlisted", 1)
}

fn stored_as_a_whole(place: &Place, user: User, how: &str, deaths: u32) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_turns.c");
    let name = format!("{how}.{}", user.name());
    let program = compile(place, &source, &name, CHECKED)?;
    let mut job = Job::new(place, &name, user)?;
    job.launch(&ACCESS.map(String::from), &[program.display().to_string(), how.into()])?;
    for _ in 0..deaths {
        for _ in 0..2 {
            job.progress(LIMIT)?;
            job.checkpoint()?;
            let left = left_out(&job)?;
            want(left == 0, || format!("{left} bytes are said to be left out"))?;
        }
        job.crash_and_restart(LIMIT)?;
    }
    job.verdict(false, LIMIT)
}

/// Wrong declarations, one kind at a time, and what is said of them.
const WRONG: [(&str, &str); 24] = [
    ("short", "loop first leaves bytes 32760 to 32768 of dataset b as they were"),
    (
        "writes what is read",
        "loop first writes dataset a, and has declared that it reads it",
    ),
    ("reads half", "loop first writes dataset a, and has declared that it reads it"),
    (
        "reads more",
        "loop first touches dataset c outside of the parts that it has declared",
    ),
    (
        "writes more",
        "loop first touches dataset c outside of the parts that it has declared",
    ),
    ("reads another", "loop second touches dataset c, and has not declared that"),
    ("writes another", "loop second touches dataset c, and has not declared that"),
    (
        "read between",
        "dataset b is read between loop second and loop first, which overwrites it",
    ),
    (
        "written between",
        "dataset b is written between loop second and loop first, which overwrites it",
    ),
    ("moved", "dataset b lies in memory that is not there any more"),
    ("outside", "loop first uses elements of dataset b that it does not have"),
    ("below", "loop first uses elements of dataset b that it does not have"),
    ("inverted", "loop first uses a part of dataset a that ends before it begins"),
    (
        "inverted write",
        "loop first uses a part of dataset b that ends before it begins",
    ),
    ("empty", "note: loop first uses a part of dataset c without elements"),
    ("given up", "loop first uses dataset number 2, which is none"),
    ("number", "loop first uses dataset number 77, which is none"),
    ("nested", "loop second begins in loop first\n"),
    ("thread", "loop second begins in loop first, by another thread"),
    ("left", "a loop is left after loop first, and none has begun"),
    ("left another", "loop second is left in loop first"),
    ("small moved", "dataset small lies in memory that is not there any more"),
    ("many", "loop first has more than 64 uses"),
    ("freed", "loop first touches dataset freed, and has not declared that"),
];

/// How programs in Fortran are compiled, with the module before them.
const FORTRAN: [&str; 6] = ["gfortran", "-std=f2018", "-Wall", "-Wextra", "-Werror", "-O2"];

/// Parts in Fortran whose bounds are too few or too many are all of the array, used in any way.
pub(super) fn ranks(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let work = place.work("ranks", User::Root)?;
    let program = work.join("access_rank");
    let mut c = Command::new(FORTRAN[0]);
    c.args(&FORTRAN[1..])
        .arg(repository().join("capi/fortran/belay_access.f90"))
        .current_dir(&work);
    link(place, c, &repository().join("tests/programs/capi/access_rank.f90"), &program)?;
    let run = |mode: &str| {
        let mut c = command(User::Root, &program, &[]);
        c.env("BELAY_ACCESS", mode);
        let o = output(c, LIMIT)?;
        want(o.status.success(), || text(&o))?;
        Ok::<_, Failure>([o.stdout, o.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()))
    };
    let ([plain, silence], [verified, said]) = (run("")?, run("verify")?);
    let names = ["flat", "square"].map(|name| format!("loop loop uses a part of dataset {name} that ends before it begins"));
    let is_said = names.iter().all(|line| said.contains(line)) && said.lines().count() == names.len();
    want(silence.is_empty() && verified == plain && is_said, || {
        format!("{plain}, verified: {verified}{said}")
    })
}

/// What is not true of what a program declares is found, and of nothing else anything is said.
pub(super) fn verified(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let source = |name: &str| repository().join("tests/programs/capi").join(name);
    let program = compile(place, &source("access_wrong.c"), &format!("wrong.{}", user.name()), PLAIN)?;
    let run = |kind: &str, mode: &str| -> Result<(String, String), Failure> {
        let mut c = command(user, &program, &[kind]);
        c.env("BELAY_ACCESS", mode);
        let o = output(c, LIMIT)?;
        want(o.status.success(), || format!("{kind}: {}", text(&o)))?;
        Ok([o.stdout, o.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).into())
    };
    let (sum, _) = run("right", "")?;
    for kind in ["right", "same page", "scattered", "one bound"] {
        let (out, said) = run(kind, "verify")?;
        want(said.is_empty() && (out == sum) == (kind != "one bound"), || {
            format!("{kind}: {out} instead of {sum}: {said}")
        })?;
    }
    for (kind, expected) in WRONG {
        want(run(kind, "")?.1.is_empty(), || {
            format!("{kind}: something was said without being asked for")
        })?;
        let (_, said) = run(kind, "verify")?;
        // Two loops use what was given up.
        let is_said = said.contains(expected) && said.lines().count() == 1 + usize::from(kind == "given up");
        want(is_said, || format!("{kind}: {said}"))?;
    }
    // Programs that declare much, and nothing wrong.
    for name in ["access_solver.c", "access_turns.c"] {
        let program = compile(place, &source(name), &format!("verified.{name}.{}", user.name()), CHECKED)?;
        let mut c = command(user, &program, &[]);
        c.env("BELAY_ACCESS", "verify");
        let o = output(c, LIMIT)?;
        let said = text(&o);
        let wrong = said.lines().find(|l| l.contains("verify") && !l.contains("note: "));
        want(o.status.success() && wrong.is_none(), || format!("{name}: {said}"))?;
    }
    Ok(())
}

/// Kills and restarts a program again and again, until a checkpoint has left out at least so many bytes, which not every
/// one can; the most that one has.
fn die_often(job: &mut Job, least: u64, rng: &mut Rng) -> Result<u64, Failure> {
    let mut most = 0;
    job.progress(LIMIT)?;
    for death in 0..5 * DEATHS {
        if death >= DEATHS && most >= least {
            break;
        }
        // The first since the agent began stores all; from then on loops are recorded.
        for round in 0..2 + rng.below(2) {
            if death < DEATHS {
                rng.pause(100);
            } else {
                somewhere(job, rng)?;
            }
            job.checkpoint()?;
            let left = left_out(job)?;
            want(round > 0 || left == 0, || format!("the first has left out {left} bytes"))?;
            most = most.max(left);
        }
        rng.pause(100);
        job.crash_and_restart(LIMIT)?;
    }
    job.verdict(false, LIMIT)?;
    Ok(most)
}

/// Waits until a program, however slow, has begun loops, and then for a part of the time between two heartbeats: right
/// after one it is always in the same loops.
fn somewhere(job: &mut Job, rng: &mut Rng) -> Result<(), Failure> {
    job.progress(LIMIT)?;
    let start = Instant::now();
    job.progress(LIMIT)?;
    rng.pause(u64::try_from(start.elapsed().as_millis()).unwrap_or(0));
    Ok(())
}

/// Takes checkpoints until one has left out at least so many bytes: on a loaded machine a program may not get to all of
/// its loops in time.
fn leave_out(job: &mut Job, least: u64, rng: &mut Rng) -> Result<(), Failure> {
    let mut left = 0;
    for _ in 0..8 {
        somewhere(job, rng)?;
        job.checkpoint()?;
        left = left_out(job)?;
        if left >= least {
            return Ok(());
        }
    }
    Err(format!("only {left} bytes were left out"))
}

/// One on each of two hosts: what both leave out counts together, and they go on on others.
pub(super) fn on_hosts(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_solver.c");
    let program = compile(place, &source, "on-hosts", CHECKED)?;
    let mut job = across::Job::of(place, "access-hosts", Kind::C, 2, 3)?;
    for (file, name) in [(program, "solver"), (library(place)?.join("libbelay.so.0"), "libbelay.so.0")] {
        io("copy for the hosts", std::fs::copy(&file, job.work.join(name)))?;
    }
    let work = job.work.display().to_string();
    let here = format!("env LD_LIBRARY_PATH={work} BELAY_TEST_LONG=1 BELAY_TEST_QUIET_PARENT=1");
    let there = format!("{here} BELAY_TEST_GO={work}/go BELAY_TEST_BEAT={work}/beat.below {work}/solver");
    let script = format!("ssh h2 {there} & {here} {work}/solver; wait");
    job.options.extend(ACCESS.map(String::from));
    job.launch_words(&["sh", "-c", &script])?;
    job.progress_of_all(&BEATS)?;
    let (mut most, mut there) = (0, false);
    for shift in 1..=4 {
        for _ in 0..3 {
            rng.pause(100);
            job.checkpoint()?;
            let status = job.must(&["status", "--json"])?;
            most = most.max(left_out_of(
                &serde_json::from_str(&status).map_err(|e| format!("{e}: {status}"))?,
            )?);
            there |= text(&job.belay(&["inspect", &job.dir_of(1)])?).contains("left out");
            job.progress_of_all(&BEATS)?;
        }
        job.crash_and_shift(shift, &BEATS)?;
    }
    want(most > ARRAY && there, || {
        format!("at most {most} bytes were left out, on the second host: {there}")
    })?;
    job.verdict()
}

/// Who takes another way after a restart ends by name, declared or not; and then goes on from a generation that lacks
/// nothing.
pub(super) fn astray(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/access_solver.c");
    for (how, signal) in [("declared", 6), ("undeclared", 11), ("handled", 11)] {
        let name = format!("astray.{how}.{}", user.name());
        let program = compile(place, &source, &name, CHECKED)?;
        let mut job = Job::new(place, &name, user)?;
        let sign = job.work.join("sign");
        let argv = [program.display().to_string(), how.into(), sign.display().to_string()];
        let options = ["--keep", "1"].into_iter().chain(ACCESS).map(String::from);
        job.launch(&options.collect::<Vec<_>>(), &argv)?;
        job.progress(LIMIT)?;
        // Whole pages of one array must be missing.
        leave_out(&mut job, ARRAY - 4096, rng)?;
        let dir = job.dir().display().to_string();
        for argv in [&["list", &dir][..], &["inspect", &dir]] {
            let said = text(&output(job.belay(argv), LIMIT)?);
            want(said.contains("left out"), || format!("{argv:?}: {said}"))?;
        }
        job.kill_all()?;
        job.clear_beat()?;
        io("make the sign", std::fs::write(&sign, ""))?;
        job.restart(&[])?;
        let end = job.wait(patient(LIMIT))?;
        let said = job.output_text();
        want(end.signal() == Some(signal), || format!("ended by {end}: {said}"))?;
        // Which of the two arrays is missing, and behind which loop, is a matter of the moment.
        let names = match how {
            "declared" => said.contains("loop third"),
            _ => ["dataset whole", "dataset next"]
                .iter()
                .any(|d| said.contains(&format!("{d} is touched after loop "))),
        };
        let handled = how != "handled" || said.contains("handled by its own");
        want(names && handled && said.contains("another way"), || {
            format!("it does not say what it has done: {said}")
        })?;
        io("remove the sign", std::fs::remove_file(&sign))?;
        job.restart(&[])?;
        job.progress(LIMIT)?;
        let said = job.output_text();
        want(said.contains("using generation 1, which lacks nothing"), || said.clone())?;
        job.verdict(false, LIMIT)?;
    }
    Ok(())
}

/// The same in Python.
pub(super) fn declared_in_python(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    const HALF: u64 = 4 << 20;
    let lib = library(place)?;
    let (source, module) = ("tests/programs/capi/access.py", "capi/python/belay.py");
    for file in [source, module] {
        let to = lib.join(file.rsplit('/').next().unwrap_or(file));
        io("copy a program", std::fs::copy(repository().join(file), to))?;
    }
    let program = lib.join("access.py");
    let mut c = command(user, "python3".as_ref(), &[&program.display().to_string(), "forms"]);
    let paths = ["LD_LIBRARY_PATH", "PYTHONPATH"].map(|name| (name, lib.display().to_string()));
    c.env("PYTHONDONTWRITEBYTECODE", "1").envs(paths.clone());
    let o = output(c, LIMIT)?;
    want(o.status.success(), || format!("forms: {}", text(&o)))?;
    let mut job = Job::new(place, &format!("python-access.{}", user.name()), user)?;
    job.set("PYTHONDONTWRITEBYTECODE", "1");
    paths.iter().for_each(|(name, path)| job.set(name, path));
    let argv = ["python3".to_owned(), program.display().to_string()];
    job.launch(&ACCESS.map(String::from), &argv)?;
    let most = die_often(&mut job, HALF - (8 << 10), rng)?;
    want((HALF - (8 << 10)..=HALF).contains(&most), || {
        format!("at most {most} bytes were left out, not nearly {HALF}")
    })
}

/// The programs in C++, Fortran and Python in docs/access.md say nothing wrong, and compute the same when that is
/// verified.
pub(super) fn declared_in_others(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let page = io("read a page", std::fs::read_to_string(repository().join("docs/access.md")))?;
    let include = repository().join("capi/include").display().to_string();
    let module = repository().join("capi/fortran/belay_access.f90").display().to_string();
    let work = place.work("others", User::Root)?;
    let block = |language: &str, ending: &str| {
        let block = page
            .split(&format!("```{language}\n"))
            .nth(1)
            .and_then(|b| b.split("```").next());
        let source = work.join(format!("block.{ending}"));
        io("write", std::fs::write(&source, block.ok_or("no program in the page")?))?;
        Ok::<_, Failure>(source)
    };
    let compare = |program: &Path, args: &[&str]| {
        let lib = library(place)?;
        let said = |mode: &str| {
            let mut c = command(User::Root, program, args);
            c.env("BELAY_ACCESS", mode)
                .env("PYTHONPATH", repository().join("capi/python"));
            c.env("LD_LIBRARY_PATH", &lib).env("PYTHONDONTWRITEBYTECODE", "1");
            let o = output(c, LIMIT)?;
            want(o.status.success(), || format!("{}: {}", program.display(), text(&o)))?;
            Ok::<_, Failure>(text(&o))
        };
        let (plain, verified) = (said("")?, said("verify")?);
        want(!plain.is_empty() && verified == plain, || {
            format!("{}: {plain}, verified: {verified}", program.display())
        })
    };
    let cpp = [
        "c++",
        "-std=c++11",
        "-Wall",
        "-Wextra",
        "-pedantic",
        "-Werror",
        "-O2",
        "-I",
        &include,
    ];
    let fortran = [&FORTRAN[..], &[&module]].concat();
    for (language, ending, compiler) in [("cpp", "cpp", &cpp[..]), ("fortran", "f90", &fortran)] {
        let program = work.join(language);
        let mut c = Command::new(compiler[0]);
        c.args(&compiler[1..]).current_dir(&work);
        link(place, c, &block(language, ending)?, &program)?;
        compare(&program, &[])?;
    }
    let python = block("python", "py")?.display().to_string();
    compare("python3".as_ref(), &[&python])
}
