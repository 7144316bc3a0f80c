//! Programs with the interfaces of VELOC and FTI, which are killed and started again.

use super::{command, library, LIMIT};
use belay_tests::build::Kind;
use belay_tests::case::mpirun;
use belay_tests::expect::{io, want};
use belay_tests::job::{output, patient, text};
use belay_tests::place::{repository, Place, User};
use belay_tests::procs::kill_tree;
use belay_tests::rng::Rng;
use belay_tests::Failure;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Lives that end by SIGKILL, of each program in each way.
const LIVES: u64 = 2;
const RANKS: u32 = 2;

/// What `heat_veloc`, `heat_veloc_class` and `heat_veloc_edges` read.
const VELOC: &str = "scratch = SCRATCH\npersistent = DURABLE\nmax_versions = 2\nscratch_versions = 1\nmode = async\n";
/// What `heat_fti` and `heat_fti_module` read: intervals are in minutes.
const FTI: &str = "[Basic]\nHead = 0\nCkpt_dir = SCRATCH # of the node\nGlbl_dir\t= DURABLE\nCkpt_L1 = 0.002\n\
                   Ckpt_L4 = 0.007\nInline_L2 = 0\nkeep_last_ckpt = 0\n[Restart]\nFailure = 0\n";

/// Has a compiler make `to` of `from`, with the headers of the interfaces and the library.
pub(super) fn make(place: &Place, compiler: &str, options: &[&str], from: &[PathBuf], to: &Path) -> Result<(), Failure> {
    let lib = library(place)?;
    let mut c = Command::new(compiler);
    c.args(["-g", "-O1", "-Wall", "-Wextra", "-Werror"]).args(options);
    for dir in ["capi/compat", "capi/include"] {
        c.arg("-I").arg(repository().join(dir));
    }
    c.arg("-o").arg(to).args(from);
    c.arg("-L").arg(&lib).args(["-lbelay", "-lm"]);
    c.arg(format!("-Wl,-rpath,{}", lib.display()));
    let o = output(c, patient(LIMIT))?;
    want(o.status.success(), || format!("{compiler}: {}: {}", to.display(), text(&o)))
}

/// A program of tests/programs/capi, compiled against the interface.
fn compile(place: &Place, name: &str) -> Result<PathBuf, Failure> {
    let program = place.programs().join(name);
    let source = |suffix| repository().join("tests/programs/capi").join(name).with_extension(suffix);
    let module = |file| repository().join("capi/fortran").join(file);
    match name {
        // Open MPI's own header for C++ casts functions.
        "heat_veloc_class" => {
            let options = ["-std=c++11", "-Wno-cast-function-type"];
            make(place, "mpicxx.openmpi", &options, &[source("cpp")], &program)?;
        }
        "heat_fti_module" => {
            let calls = place.programs().join("fti_calls.o");
            let modules = format!("-J{}", place.programs().display());
            make(
                place,
                "mpicc.openmpi",
                &["-std=gnu11", "-c"],
                &[module("fti_calls.c")],
                &calls,
            )?;
            let from = [module("fti.f90"), source("f90"), calls];
            make(place, "mpifort.openmpi", &["-std=f2018", &modules], &from, &program)?;
        }
        _ => make(place, "mpicc.openmpi", &["-std=gnu11"], &[source("c")], &program)?,
    }
    Ok(program)
}

/// A program with a configuration, and the directories that this names.
struct Heat {
    user: User,
    program: PathBuf,
    configuration: PathBuf,
    scratch: PathBuf,
    durable: PathBuf,
    how: &'static str,
    ranks: u32,
}

impl Heat {
    fn new(place: &Place, user: User, interface: &str, how: &'static str, what: &str) -> Result<Self, Failure> {
        let program = compile(place, &format!("heat_{interface}"))?;
        let work = place.work(&format!("heat-{interface}-{how}-{what}.{}", user.name()), user)?;
        let heat = Self {
            user,
            program,
            how,
            ranks: RANKS,
            configuration: work.join("configuration"),
            // With what begins a comment after a blank.
            scratch: work.join("scratch#1"),
            durable: work.join("durable"),
        };
        let lines = if interface.starts_with("veloc") { VELOC } else { FTI };
        let lines = lines.replace("SCRATCH", &heat.scratch.display().to_string());
        let lines = lines.replace("DURABLE", &heat.durable.display().to_string());
        io("write", std::fs::write(&heat.configuration, lines))?;
        Ok(heat)
    }

    fn command(&self, more: &[&str]) -> Command {
        let mpi = mpirun(Kind::OpenMpi, self.ranks);
        let program = self.program.display().to_string();
        let configuration = self.configuration.display().to_string();
        let mut words: Vec<&str> = mpi[1..].iter().map(String::as_str).collect();
        words.extend([program.as_str(), &configuration, self.how]);
        words.extend(more);
        let mut c = command(self.user, Path::new(&mpi[0]), &words);
        c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        c.current_dir("/");
        c
    }

    /// Runs to the end: where it went on from, if anywhere, and its result.
    fn whole(&self) -> Result<(Option<u32>, String), Failure> {
        let o = output(self.command(&[]), patient(LIMIT))?;
        let said = text(&o);
        want(o.status.success(), || {
            format!("{} {}: {}: {said}", self.program.display(), self.how, o.status)
        })?;
        let after = |word: &str| said.lines().find_map(|l| Some(l.split_once(word)?.1.to_owned()));
        let from = after("from ").and_then(|n| n.trim().parse().ok());
        Ok((from, after("heat ").ok_or(said)?))
    }

    /// Files of versions on the near level, by rank.
    fn versions(&self) -> Vec<BTreeSet<String>> {
        let of = |rank: u32| {
            let dirs = std::fs::read_dir(&self.scratch).into_iter().flatten().flatten();
            let own = dirs.filter(|d| d.file_name().to_string_lossy().ends_with(&format!(".{rank}")));
            let files = own.flat_map(|d| std::fs::read_dir(d.path()).into_iter().flatten().flatten());
            let names = files.map(|f| f.file_name().to_string_lossy().into_owned());
            names.filter(|n| n.ends_with(".version")).collect()
        };
        (0..RANKS).map(of).collect()
    }

    /// Runs until each rank has written a version, and some milliseconds more, unless it ends; all its processes are
    /// killed. Whether they had.
    fn killed_after_checkpoint(&self, ms: u64) -> Result<bool, Failure> {
        let before = self.versions();
        let mut had = false;
        self.killed(&mut |child| {
            while !had && matches!(child.try_wait(), Ok(None)) {
                let pairs = self.versions().into_iter().zip(&before);
                had = pairs.into_iter().all(|(now, before)| now.difference(before).next().is_some());
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(ms));
        })?;
        Ok(had)
    }

    /// Runs for some milliseconds after it has begun to compute, unless it ends; all its processes are killed.
    fn killed_after(&self, ms: u64) -> Result<(), Failure> {
        self.killed(&mut |_| std::thread::sleep(Duration::from_millis(ms)))
    }

    /// Runs, and is killed when it has begun to compute and `until` has come.
    fn killed(&self, until: &mut dyn FnMut(&mut Child)) -> Result<(), Failure> {
        let mut c = self.command(&[]);
        let mut child = io("start", c.process_group(0).stdout(Stdio::piped()).spawn())?;
        let mut out = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut line = String::new();
        while io("read what it says", out.read_line(&mut line))? > 0 && !line.ends_with("begins\n") {}
        until(&mut child);
        kill_tree(child.id() as i32);
        io("wait", child.wait())?;
        // The pipe ends with the last of them.
        let mut rest = String::new();
        io("read what it says", out.read_to_string(&mut rest))?;
        want(!(line + &rest).contains("FAIL"), || "a check of the program failed".into())
    }
}

fn killed(place: &Place, user: User, rng: &mut Rng, interface: &str, how: &'static str) -> Result<(), Failure> {
    let (from, right) = Heat::new(place, user, interface, how, "whole")?.whole()?;
    want(from.is_none(), || "it began with a checkpoint that nobody wrote".into())?;
    let heat = Heat::new(place, user, interface, how, "killed")?;
    for life in 0..LIVES {
        heat.killed_after(150 + rng.below(500))?;
        if life == LIVES / 2 {
            // The node is another one.
            io("remove", std::fs::remove_dir_all(&heat.scratch))?;
        }
    }
    let (_, result) = heat.whole()?;
    want(result == right, || format!("{result} after kills, {right} without"))?;
    let heat = Heat::new(place, user, interface, how, "found")?;
    let had = heat.killed_after_checkpoint(rng.below(100))?;
    let (from, result) = heat.whole()?;
    want(had && from.is_some() && result == right, || {
        format!("a checkpoint was written: {had}; from {from:?}: {result}, and {right} without kills")
    })
}

/// At a step one rank is killed before its checkpoint, and the other has its own: that is no checkpoint.
fn torn(place: &Place, user: User, interface: &str, how: &'static str, last: u32) -> Result<(), Failure> {
    let (_, right) = Heat::new(place, user, interface, how, "torn-whole")?.whole()?;
    let heat = Heat::new(place, user, interface, how, "torn")?;
    let o = output(heat.command(&["100"]), patient(LIMIT))?;
    want(!o.status.success() && !text(&o).contains("FAIL"), || text(&o))?;
    let (from, result) = heat.whole()?;
    want(from == Some(last) && result == right, || {
        format!("from {from:?}, not {last}: {result}, and {right} without kills")
    })
}

/// Checkpoints that are written in the background go from the global directory as well when newer ones have come there.
fn bounded(place: &Place, user: User) -> Result<(), Failure> {
    let heat = Heat::new(place, user, "fti", "checkpoint", "bounded")?;
    let lines = io("read", std::fs::read_to_string(&heat.configuration))?;
    let lines = lines.replace("Inline_L2 = 0", "Inline_L2 = 0\nInline_L3 = 0\nInline_L4 = 0");
    let lines = lines.replace("keep_last_ckpt = 0", "keep_last_ckpt = 1");
    io("write", std::fs::write(&heat.configuration, lines))?;
    heat.whole()?;
    for rank in 0..RANKS {
        let files = io("list", std::fs::read_dir(heat.durable.join(format!("fti.{rank}"))))?;
        let names = files.filter_map(|f| f.ok()?.file_name().into_string().ok());
        let versions = names.filter(|n| n.ends_with(".version")).count();
        // Of 22; a busy machine may not have written the last ones when the next were taken.
        want((1..20).contains(&versions), || {
            format!("{versions} versions of rank {rank} are left")
        })?;
    }
    Ok(())
}

/// What goes wrong on one rank: checkpoints are what all have, and the next run has the last of them.
fn edges(place: &Place, user: User) -> Result<(), Failure> {
    let mut heat = Heat::new(place, user, "veloc_edges", "retry", "edges")?;
    heat.whole()?;
    heat.how = "again";
    heat.whole()?;
    heat.how = "fewer";
    heat.ranks = RANKS - 1;
    heat.whole()?;
    heat.how = "damaged";
    heat.ranks = RANKS;
    for level in [&heat.scratch, &heat.durable] {
        let files = io("list", std::fs::read_dir(level.join("veloc.edges.0")))?.filter_map(Result::ok);
        for path in files
            .map(|f| f.path())
            .filter(|p| p.extension().is_some_and(|e| e == "version"))
        {
            let mut bytes = io("read", std::fs::read(&path))?;
            bytes[1000] ^= 1;
            io("write", std::fs::write(&path, bytes))?;
        }
    }
    heat.whole().map(|_| ())
}

pub(crate) fn veloc(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    torn(place, user, "veloc", "same", 80)?;
    edges(place, user)?;
    ["memory", "file", "parts", "same"]
        .iter()
        .try_for_each(|how| killed(place, user, rng, "veloc", how))
}

pub(crate) fn veloc_class(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    ["plain", "objects", "file", "single"]
        .iter()
        .try_for_each(|how| killed(place, user, rng, "veloc_class", how))
}

pub(crate) fn fti(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    torn(place, user, "fti", "checkpoint", 60)?;
    bounded(place, user)?;
    ["snapshot", "checkpoint"]
        .iter()
        .try_for_each(|how| killed(place, user, rng, "fti", how))
}

pub(crate) fn fti_module(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    ["snapshot", "checkpoint"]
        .iter()
        .try_for_each(|how| killed(place, user, rng, "fti_module", how))
}
