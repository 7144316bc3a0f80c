//! `libbelay.so` as programs in C, Fortran and Python use it: the example, the documents, wrong use, a full disk, death
//! at any moment, restarts by belay, programs with the interfaces of VELOC and FTI, and the solvers of examples/.

mod access;
mod compat;
mod examples;
mod portable;

use belay_tests::expect::{io, want};
use belay_tests::job::{output, patient, text, Job};
use belay_tests::place::{am_root, build_dir, repository, Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// Lives of a program that is killed.
const LIVES: u64 = 200;

/// How programs are compiled.
const PLAIN: &[&str] = &["-O1"];
/// With `check.h`.
const CHECKED: &[&str] = &["-O1", "-Wno-unused-function"];
const SANITIZED: &[&str] = &["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

/// The library, where programs find it.
fn library(place: &Place) -> Result<PathBuf, Failure> {
    let dir = place.programs().join("lib");
    let (versioned, plain) = (dir.join("libbelay.so.0"), dir.join("libbelay.so"));
    if plain.exists() {
        return Ok(dir);
    }
    let from = build_dir()?.join("libbelay.so");
    io("make a directory", std::fs::create_dir_all(&dir))?;
    io(
        "copy libbelay.so: run `cargo build --workspace` first",
        std::fs::copy(&from, &versioned),
    )?;
    io("link libbelay.so", std::os::unix::fs::symlink("libbelay.so.0", &plain))?;
    Ok(dir)
}

/// A program in C, compiled against header and library.
fn compile(place: &Place, source: &Path, name: &str, options: &[&str]) -> Result<PathBuf, Failure> {
    let program = place.programs().join(name);
    let mut c = Command::new("cc");
    c.args(["-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(options)
        .arg("-I")
        .arg(repository().join("capi/include"));
    link(place, c, source, &program)?;
    Ok(program)
}

/// Has compiler `c` make `program` of `source`, linked with the library.
fn link(place: &Place, mut c: Command, source: &Path, program: &Path) -> Result<(), Failure> {
    let lib = library(place)?;
    c.arg(source).arg("-o").arg(program).arg("-L").arg(&lib);
    c.arg("-lbelay").arg(format!("-Wl,-rpath,{}", lib.display()));
    let o = output(c, LIMIT)?;
    want(o.status.success(), || format!("compile {}: {}", source.display(), text(&o)))
}

/// A program of a user.
fn command(user: User, program: &Path, args: &[&str]) -> Command {
    let words = if am_root() { user.words() } else { &[] };
    let mut argv = words.iter().map(PathBuf::from).chain([program.to_owned()]);
    let mut c = Command::new(argv.next().unwrap_or_default());
    // An ordinary user reaches only what the system has.
    c.args(argv)
        .args(args)
        .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    c
}

/// Runs a program to its end; what it printed.
fn run(user: User, program: &Path, args: &[&str]) -> Result<String, Failure> {
    let o = output(command(user, program, args), patient(LIMIT))?;
    want(o.status.success(), || {
        format!("{} {args:?}: {}: {}", program.display(), o.status, text(&o))
    })?;
    Ok(text(&o))
}

fn example(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("capi/examples/reverse.c");
    for (name, options, versions) in [("reverse", PLAIN, "1000"), ("reverse.sanitized", SANITIZED, "200")] {
        let name = format!("{name}.{}", user.name());
        let program = compile(place, &source, &name, options)?;
        let work = place.work(&name, user)?;
        let said = run(user, &program, &[&work.display().to_string(), versions, "50000", "8388608"])?;
        want(said.contains("to files"), || said.clone())?;
        let left = io("list", std::fs::read_dir(work.join("reverse")))?.count();
        want(left == 2, || format!("{left} names are left, with the lock and the notes"))?;
    }
    Ok(())
}

fn misuse(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    checks_itself(place, user, "misuse")
}

/// What others do to a history, and handlers of signals in its calls.
fn harm(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    checks_itself(place, user, "harm")
}

/// Puts that go on when their call has returned.
fn background(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    checks_itself(place, user, "background")
}

/// A program of tests/programs/capi that ends well if all is well.
fn checks_itself(place: &Place, user: User, name: &str) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi").join(name).with_extension("c");
    let name = format!("{name}.{}", user.name());
    let program = compile(place, &source, &name, SANITIZED)?;
    let work = place.work(&name, user)?;
    run(user, &program, &[&work.display().to_string()]).map(|_| ())
}

/// The programs in docs/histories.md and docs/access.md work as they stand there, twice.
fn documents(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let page = |name: &str| io("read a page", std::fs::read_to_string(repository().join("docs").join(name)));
    let pages = page("histories.md")? + &page("access.md")?;
    let blocks = pages.split("```c\n").skip(1).filter_map(|b| b.split("```").next());
    let mut count = 0;
    for (n, block) in blocks.enumerate() {
        let work = place.work("documents", User::Root)?;
        let source = work.join("block.c");
        io("write", std::fs::write(&source, block))?;
        let program = compile(place, &source, &format!("document-{n}"), SANITIZED)?;
        for _ in 0..2 {
            run(User::Root, &program, &[&work.display().to_string()])?;
        }
        count += 1;
    }
    want(count == 4, || format!("{count} programs in the pages"))
}

/// A program in Python, and the one in docs/histories.md.
fn python(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let lib = library(place)?;
    io(
        "copy belay.py",
        std::fs::copy(repository().join("capi/python/belay.py"), lib.join("belay.py")),
    )?;
    let page = io("read a page", std::fs::read_to_string(repository().join("docs/histories.md")))?;
    let block = page.split("```python\n").nth(1).and_then(|b| b.split("```").next());
    let long = io(
        "read a program",
        std::fs::read_to_string(repository().join("tests/programs/capi/history.py")),
    )?;
    for (name, source) in [("history", long.as_str()), ("block", block.ok_or("no program in the page")?)] {
        let work = place.work(&format!("python-{name}"), user)?;
        let program = work.join("program.py");
        io("write", std::fs::write(&program, source))?;
        let [program, dir] = [&program, &work].map(|p| p.display().to_string());
        let mut c = command(user, Path::new("python3"), &[&program, &dir]);
        c.env("LD_LIBRARY_PATH", &lib)
            .env("PYTHONPATH", &lib)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .current_dir(&work);
        let o = output(c, patient(LIMIT))?;
        want(o.status.success(), || format!("{name}: {}: {}", o.status, text(&o)))?;
    }
    Ok(())
}

/// A program in Fortran, and the one in docs/histories.md.
fn fortran(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let page = io("read a page", std::fs::read_to_string(repository().join("docs/histories.md")))?;
    let block = page.split("```fortran\n").nth(1).and_then(|b| b.split("```").next());
    let work = place.work("fortran", user)?;
    let source = work.join("block.f90");
    io("write", std::fs::write(&source, block.ok_or("no program in the page")?))?;
    for (name, source) in [
        ("block", source),
        ("history", repository().join("tests/programs/capi/history.f90")),
    ] {
        let program = place.programs().join(format!("fortran-{name}.{}", user.name()));
        let mut c = Command::new("gfortran");
        c.args(["-g", "-O1", "-std=f2018", "-Wall", "-Wextra", "-Werror", "-J"])
            .arg(&work);
        c.arg(repository().join("capi/fortran/belay.f90"));
        link(place, c, &source, &program)?;
        run(user, &program, &[&work.display().to_string()])?;
    }
    Ok(())
}

/// A program that keeps all versions goes on with them after a restart, those too that it wrote again.
fn restarted(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/history_rounds.c");
    let name = format!("rounds.{}", user.name());
    let program = compile(place, &source, &name, CHECKED)?;
    let mut job = Job::new(place, &name, user)?;
    let argv = [&program, &job.work].map(|p| p.display().to_string());
    job.launch(&[], &argv)?;
    job.progress(LIMIT)?;
    for _ in 0..2 {
        rng.pause(200);
        job.checkpoint()?;
        rng.pause(200);
        job.crash_and_restart(LIMIT)?;
    }
    job.verdict(false, LIMIT)
}

/// After a restart of any generation that is kept, in whatever order, a history is what it was then: what was
/// discarded, dropped and put again since does not count. Nothing is left when the generations are gone.
fn rolled_back(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let source = repository().join("tests/programs/capi/history_rollback.c");
    for (life, arg) in [("lasting", None), ("until-read", Some("until-read"))] {
        let name = format!("rollback.{life}.{}", user.name());
        let program = compile(place, &source, &name, CHECKED)?;
        let mut job = Job::new(place, &name, user)?;
        let argv = [&program, &job.work].map(|p| p.display().to_string());
        let argv: Vec<String> = argv.into_iter().chain(arg.map(str::to_owned)).collect();
        job.launch(&[], &argv)?;
        job.progress(LIMIT)?;
        for _ in 0..2 {
            rng.pause(700);
            job.checkpoint()?;
        }
        for generation in ["1", "2", "1"] {
            rng.pause(700);
            job.kill_all()?;
            job.clear_beat()?;
            job.restart(&["--generation", generation])?;
            job.progress(LIMIT)?;
        }
        // Both are pushed out.
        for _ in 0..2 {
            rng.pause(300);
            job.checkpoint()?;
        }
        rng.pause(300);
        job.crash_and_restart(LIMIT)?;
        job.verdict(false, LIMIT)?;
        // It has closed the history, and has not even left what was in it.
        job.restart(&[])?;
        job.verdict(false, LIMIT)?;
        nothing_is_left(&job, user, &program, &argv)?;
    }
    Ok(())
}

/// Without generations, who opens the history that `argv` uses has nothing but its own files there.
fn nothing_is_left(job: &Job, user: User, program: &Path, argv: &[String]) -> Result<(), Failure> {
    let dir = job.work.join("rollback");
    let names = |dir: &Path| -> Result<Vec<String>, Failure> {
        let all = io("list", std::fs::read_dir(dir))?.filter_map(Result::ok);
        Ok(all.map(|e| e.file_name().to_string_lossy().into_owned()).collect())
    };
    want(names(&dir)?.iter().any(|n| n.ends_with(".gone")), || {
        "nothing was kept".into()
    })?;
    let o = output(job.belay(&["gc", &job.dir().display().to_string(), "--all"]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    let args: Vec<&str> = argv[1..].iter().map(String::as_str).collect();
    run(user, program, &args)?;
    let (left, notes) = (names(&dir)?, names(&dir.join("belay.generations"))?);
    want(left.len() == 2 && notes.is_empty(), || format!("left: {left:?}, {notes:?}"))
}

/// The headers are C++ too.
fn plus_plus(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut c = Command::new("c++");
    c.arg("-I").arg(repository().join("capi/include"));
    c.args(["-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-pedantic", "-x", "c++"]);
    let headers = ["belay.h", "belay_access.h", "belay_ops.h"].map(|name| repository().join("capi/include").join(name));
    c.args(headers).current_dir(place.programs());
    let o = output(c, LIMIT)?;
    want(o.status.success(), || text(&o))
}

/// A disk of 8 MiB, and versions until it is full.
fn full_disk(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let program = compile(place, &repository().join("tests/programs/capi/steps.c"), "full", SANITIZED)?;
    let work = place.work("full", User::Root)?.display().to_string();
    let script = format!(
        "mount -t tmpfs -o size=8m none {work} && exec {} {work} full",
        program.display()
    );
    let said = run(User::Root, Path::new("unshare"), &["-m", "sh", "-c", &script])?;
    want(said.contains("put "), || said.clone())
}

/// What a life has said: versions before `safe` are in files, and those before `low` may be gone.
#[derive(Clone, Copy, Default)]
struct Said {
    low: u64,
    safe: u64,
}

/// Runs the program from version `first` on, and kills it after some lines.
fn live(program: &Path, work: &str, first: u64, lines: u64, rng: &mut Rng) -> Result<Said, Failure> {
    let mut c = command(User::Root, program, &[work, &first.to_string()]);
    let mut child = io("start", c.stdout(Stdio::piped()).spawn())?;
    let out = child.stdout.take().ok_or("no output")?;
    let mut said = Said { low: first, safe: first };
    let mut wrong = None;
    let mut take = |line: String| match line.split_once(' ').map(|(w, n)| (w, n.parse::<u64>())) {
        Some(("safe", Ok(n))) => said.safe = n,
        Some(("read", Ok(n))) => said.low = n + 1,
        _ => wrong = Some(line),
    };
    let mut all = BufReader::new(out).lines();
    for line in all.by_ref().take(lines as usize) {
        take(io("read what it says", line)?);
    }
    // Somewhere between this line and the next.
    std::thread::sleep(Duration::from_micros(rng.below(3000)));
    io("kill", child.kill())?;
    for line in all {
        take(io("read what it says", line)?);
    }
    io("wait", child.wait())?;
    match wrong {
        Some(line) => Err(line),
        None => Ok(said),
    }
}

/// A process that is killed at any moment leaves every version that it was told is in files, whole.
fn killed(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let program = compile(place, &repository().join("tests/programs/capi/steps.c"), "steps", PLAIN)?;
    let work = place.work("killed", User::Root)?.display().to_string();
    let mut first = 0;
    for _ in 0..LIVES {
        let said = live(&program, &work, first, 1 + rng.below(40), rng)?;
        let high = said.safe.max(said.low);
        let answer = run(User::Root, &program, &[&work, &said.low.to_string(), &high.to_string()])?;
        let next = answer.trim().strip_prefix("next ").and_then(|n| n.parse().ok());
        first = next.ok_or(answer)?;
        // The next life reads from its own first version on.
        let old: Vec<PathBuf> = io("list", std::fs::read_dir(Path::new(&work).join("steps")))?
            .filter_map(|e| Some(e.ok()?.path()))
            .collect();
        let drafts = old.iter().filter(|p| p.extension().is_some_and(|e| e == "new")).count();
        want(drafts == 0, || format!("{drafts} drafts are left"))?;
    }
    Ok(())
}

fn main() {
    belay_tests::hosts::serve_if_asked();
    let mut target = Target::new("capi", &[]);
    target.in_turn();
    target.by_user("example", |_| true, example);
    target.by_user("misuse", |_| true, misuse);
    target.by_user("harm", |_| true, harm);
    target.by_user("background", |_| true, background);
    target.once("documents", documents);
    target.once("plus_plus", plus_plus);
    target.by_user("python", |_| true, python);
    target.once("declared_in_others", access::declared_in_others);
    target.once("ranks", access::ranks);
    target.by_user("fortran", |_| true, fortran);
    target.by_user("veloc", |_| true, compat::veloc);
    target.by_user("veloc_class", |_| true, compat::veloc_class);
    target.by_user("fti", |_| true, compat::fti);
    target.by_user("fti_module", |_| true, compat::fti_module);
    target.by_user("restarted", |_| true, restarted);
    target.by_user("rolled_back", |_| true, rolled_back);
    target.by_user("declared", |_| true, access::declared);
    target.by_user("certain", |_| true, access::certain);
    target.by_user("reported", |_| true, access::reported);
    target.by_user("exported", |_| true, access::exported);
    target.by_user("jumped", |_| true, access::jumped);
    target.by_user("turns", |_| true, access::turns);
    target.by_user("thrown", |_| true, access::thrown);
    target.by_user("closed", |_| true, access::closed);
    target.by_user("unlisted", |_| true, access::unlisted);
    target.by_user("declared_in_python", |_| true, access::declared_in_python);
    target.by_user("astray", |_| true, access::astray);
    target.by_user("portable_refused", |_| true, portable::refused);
    target.by_user("portable_ranks", |_| true, portable::ranks);
    target.by_user("heat", |_| true, examples::heat);
    target.by_user("wave", |_| true, examples::wave);
    target.by_user("ops", |_| true, examples::ops);
    if am_root() && belay_tests::hosts::unavailable().is_none() {
        target.once("on_hosts", access::on_hosts);
    }
    target.by_user("verified", |_| true, access::verified);
    if am_root() {
        target.once("full_disk", full_disk);
    }
    target.once("killed", killed);
    target.run();
}
