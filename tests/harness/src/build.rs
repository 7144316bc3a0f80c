//! Compiles the test programs. Objects of earlier runs are reused when the sources have not changed.

use crate::place::{build_dir, repository, Place};
use crate::Failure;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// How a program is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `cc`.
    C,
    /// `cc -static`.
    Static,
    /// `cc`, with the verbs of InfiniBand, and with their connection manager where it is used.
    Verbs,
    /// `mpicc.openmpi`.
    OpenMpi,
    /// `mpicc.mpich`.
    Mpich,
    /// Not built: a command of the system or a script.
    Ready,
}

pub(crate) const FLAGS: [&str; 8] = [
    "-O1",
    "-g",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    "-Wno-stringop-overflow",
    "-pthread",
];

impl Kind {
    fn compiler(self) -> &'static str {
        match self {
            Kind::OpenMpi => "mpicc.openmpi",
            Kind::Mpich => "mpicc.mpich",
            Kind::C | Kind::Static | Kind::Verbs | Kind::Ready => "cc",
        }
    }

    /// Suffix that tells builds of one source apart.
    pub fn suffix(self) -> &'static str {
        match self {
            Kind::C | Kind::Verbs | Kind::Ready => "",
            Kind::Static => ".static",
            Kind::OpenMpi => ".openmpi",
            Kind::Mpich => ".mpich",
        }
    }
}

fn modified(p: &Path) -> Option<SystemTime> {
    std::fs::metadata(p).and_then(|m| m.modified()).ok()
}

/// Whether any of `from` is newer than `made`.
fn stale(made: &Path, from: &[PathBuf]) -> bool {
    let made = modified(made);
    made.is_none() || from.iter().any(|f| modified(f) > made)
}

/// Copies a program that is about to be executed. A process of its own does so: what this one has open for writing, a
/// child that another thread forks has too for a moment, and nobody can execute it meanwhile (ETXTBSY).
pub(crate) fn copy_program(from: &Path, to: &Path) -> Result<(), Failure> {
    let copied = Command::new("cp").arg("--preserve=mode").arg(from).arg(to).output();
    match copied {
        Ok(o) if o.status.success() => Ok(()),
        Ok(o) => Err(String::from_utf8_lossy(&o.stderr).into_owned()),
        Err(e) => Err(format!("cp: {e}")),
    }
}

/// Compiles the C files among `from` into `to`, unless that is newer than all of them.
pub(crate) fn compile(to: &Path, from: &[PathBuf], options: &[&str]) -> Result<(), Failure> {
    if !stale(to, from) {
        return Ok(());
    }
    // Another run may be making it too.
    let unfinished = to.with_extension(format!("unfinished-{}", std::process::id()));
    let mut c = Command::new("cc");
    c.args(FLAGS).args(["-O2", "-Werror"]).args(options);
    c.arg("-o").arg(&unfinished);
    c.args(from.iter().filter(|f| f.extension().is_some_and(|e| e == "c")));
    let out = c
        .output()
        .map_err(|e| format!("cc: {e}: run scripts/test, which installs what is missing"))?;
    if !out.status.success() {
        return Err(format!("compile {}: {}", to.display(), String::from_utf8_lossy(&out.stderr)));
    }
    std::fs::rename(&unfinished, to).map_err(|e| format!("rename {}: {e}", unfinished.display()))
}

/// One for each program, held while it is made: checks that run at the same time may want the same one, and none is to
/// find half of it.
static TURNS: Mutex<BTreeMap<String, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

fn turn(name: &str) -> Arc<Mutex<()>> {
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(turns.entry(name.to_owned()).or_default())
}

/// Compiles `source` (a name in tests/programs, without `.c`) and puts the program into `place`. Returns its path.
pub fn build(place: &Place, source: &str, kind: Kind) -> Result<PathBuf, Failure> {
    let dir = repository().join("tests/programs");
    let src = dir.join(format!("{source}.c"));
    let name = format!(
        "{}{}",
        Path::new(source).file_name().unwrap_or_default().to_string_lossy(),
        kind.suffix()
    );
    let turn = turn(&name);
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = build_dir()?.join("test-programs");
    std::fs::create_dir_all(&cache).map_err(|e| format!("create {}: {e}", cache.display()))?;
    let object = cache.join(&name);
    let headers = [
        "check.h",
        "gate.h",
        "mpi/mpicheck.h",
        "verbs/verbscheck.h",
        "verbs/verbsends.h",
        "verbs/verbsfar.h",
        "../fake-cuda/cuda.h",
    ]
    .map(|h| dir.join(h));
    let newest = [src.clone()].iter().chain(&headers).filter_map(|p| modified(p)).max();
    if modified(&object).is_none() || modified(&object) < newest {
        // Another run may be making it too.
        let unfinished = cache.join(format!(".{name}-{}", std::process::id()));
        let mut c = Command::new(kind.compiler());
        c.args(FLAGS).arg("-o").arg(&unfinished).arg(&src);
        if kind == Kind::Static {
            c.arg("-static");
        }
        if kind == Kind::Verbs {
            c.args(["-Werror", "-libverbs", "-Wl,--as-needed", "-lrdmacm"]);
        }
        c.args(["-lm", "-lrt", "-ldl", "-lutil"]);
        let out = c
            .output()
            .map_err(|e| format!("{}: {e}: run scripts/test, which installs what is missing", kind.compiler()))?;
        if !out.status.success() {
            return Err(format!("compile {}: {}", src.display(), String::from_utf8_lossy(&out.stderr)));
        }
        std::fs::rename(&unfinished, &object).map_err(|e| format!("rename {}: {e}", unfinished.display()))?;
    }
    let dst = place.programs().join(&name);
    if dst.exists() {
        return Ok(dst);
    }
    copy_program(&object, &dst)?;
    Ok(dst)
}
