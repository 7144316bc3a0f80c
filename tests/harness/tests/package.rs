//! The packages: built from this build's programs, installed into an empty root, used from there, and removed without a trace.

use belay_tests::expect::{io, want};
use belay_tests::job::{output, text, Job};
use belay_tests::place::{build_dir, repository, Place, User};
use belay_tests::runner;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

type Test = fn(&Place) -> Result<(), Failure>;

/// Packing takes a while on a machine that has much else to do.
const LIMIT: Duration = Duration::from_secs(300);

/// What must be in each package.
const FILES: [&str; 38] = [
    "usr/bin/belay",
    "usr/libexec/belay/belay-inject",
    "usr/libexec/belay/belay-restorer",
    "usr/lib/belay/libbelay_verbs.so",
    "usr/include/belay.h",
    "usr/include/belay_access.h",
    "usr/include/belay_ops.h",
    "usr/share/belay/compat/belay_levels.h",
    "usr/share/belay/compat/fti.h",
    "usr/share/belay/compat/include/veloc.h",
    "usr/share/belay/compat/include/veloc.hpp",
    "usr/share/belay/compat/veloc.h",
    "usr/share/belay/compat/veloc.hpp",
    "usr/share/pkgconfig/belay.pc",
    "usr/share/belay/fortran/belay.f90",
    "usr/share/belay/fortran/fti.f90",
    "usr/share/belay/fortran/fti_calls.c",
    "usr/share/belay/python/belay.py",
    "usr/share/doc/belay/docs/histories.md",
    "usr/share/doc/belay/capi/examples/reverse.c",
    "usr/share/doc/belay/examples/heat.c",
    "usr/share/man/man1/belay.1.gz",
    "usr/share/man/man1/belay-launch.1.gz",
    "usr/share/bash-completion/completions/belay",
    "usr/share/fish/vendor_completions.d/belay.fish",
    "usr/share/doc/belay/README.md",
    "usr/share/doc/belay/copyright",
    "usr/share/doc/belay/docs/admin.md",
    "usr/share/doc/belay/docs/metrics.md",
    "usr/share/belay/site/belay.sbatch",
    "usr/share/belay/site/grafana.json",
    "usr/share/belay/site/alerts.yml",
    "usr/share/belay/site/belay.toml",
    "usr/share/belay/site/epilog",
    "usr/share/belay/site/prolog",
    "usr/share/belay/site/spank_belay.c",
    "usr/share/belay/modulefiles/tcl/belay/0.1.0",
    "usr/share/belay/modulefiles/lua/belay/0.1.0.lua",
];

/// Runs a command to its end; what it printed.
fn run(argv: &[&str]) -> Result<String, Failure> {
    let mut c = Command::new(argv[0]);
    c.args(&argv[1..]).current_dir(repository()).env_remove("LANG");
    let o = output(c, LIMIT)?;
    want(o.status.success(), || format!("{argv:?}: {}", text(&o)))?;
    Ok(text(&o))
}

fn package(kind: &str, into: &Path) -> Result<String, Failure> {
    let (bin, out) = (build_dir()?.display().to_string(), into.display().to_string());
    let said = run(&["scripts/package", "--bin-dir", &bin, "--out", &out, kind])?;
    let name = said.lines().rfind(|l| l.ends_with(&format!(".{kind}")));
    name.map(str::to_owned).ok_or(format!("no package was named: {said}"))
}

fn holds_everything(list: &str) -> Result<(), Failure> {
    let plugin = Path::new("/usr/include/slurm/spank.h").exists();
    for f in FILES.into_iter().chain(plugin.then_some("usr/libexec/belay/spank_belay.so")) {
        let there = list.lines().any(|l| l.ends_with(&format!("/{f}")));
        want(there, || format!("the package lacks {f}:\n{list}"))?;
    }
    Ok(())
}

/// Everything below `root` but what dpkg keeps for itself.
fn left(root: &Path) -> Vec<PathBuf> {
    let Ok(list) = std::fs::read_dir(root) else {
        return Vec::new();
    };
    let entries = list.filter_map(Result::ok).filter(|e| e.path() != root.join("var"));
    entries
        .flat_map(|e| {
            let below = left(&e.path());
            below.into_iter().chain(std::iter::once(e.path()))
        })
        .collect()
}

/// A program is launched, checkpointed, killed and restarted with the belay that is installed below `root`.
fn is_used(place: &Place, job: &mut Job, root: &Path) -> Result<(), Failure> {
    let belay = root.join("usr/bin/belay").display().to_string();
    let program = place.programs().join("fault_target").display().to_string();
    let dir = job.dir().display().to_string();
    let launch = [&belay, "launch", "--ckpt-dir", &dir, "--", &program, "1"].map(str::to_owned);
    let c = job.command(&launch);
    job.start(c)?;
    job.progress(LIMIT)?;
    let command = |verb: &str| output(job.command(&[belay.clone(), verb.to_owned(), dir.clone()]), LIMIT);
    let o = command("checkpoint")?;
    want(o.status.success(), || format!("checkpoint: {}", text(&o)))?;
    job.kill_all()?;
    job.clear_beat()?;
    let c = job.command(&[belay.clone(), "restart".into(), dir.clone()]);
    job.start(c)?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// The example is compiled with what is installed below `root`, its library in `lib`, and runs.
fn is_linked(job: &Job, root: &Path, lib: &str) -> Result<(), Failure> {
    let (lib, include) = (root.join(lib), root.join("usr/include"));
    let source = root.join("usr/share/doc/belay/capi/examples/reverse.c");
    let [source, include, lib] = [source, include, lib].map(|p| p.display().to_string());
    let program = job.work.join("linked").display().to_string();
    let (path, here) = (format!("LD_LIBRARY_PATH={lib}"), job.work.display().to_string());
    run(&["cc", &source, "-I", &include, "-L", &lib, "-lbelay", "-o", &program])?;
    run(&["env", &path, &program, &here, "100"]).map(|_| ())
}

/// Lmod, which reads both kinds of module files.
const LMOD: &str = "/usr/share/lmod/lmod/libexec/lmod";

/// Who loads the module gets the belay that is installed below `root`, when the file says so.
fn load_modules(root: &Path) -> Result<(), Failure> {
    if !Path::new(LMOD).exists() {
        println!("package::deb: no {LMOD} here, module files are not loaded");
        return Ok(());
    }
    for (kind, file, prefix) in [
        ("tcl", "belay/0.1.0", "set prefix /usr\n"),
        ("lua", "belay/0.1.0.lua", "local prefix = \"/usr\"\n"),
    ] {
        let path = root.join("usr/share/belay/modulefiles").join(kind);
        let text = io("read a module file", std::fs::read_to_string(path.join(file)))?;
        let here = prefix.replace("/usr", &root.join("usr").display().to_string());
        want(text.contains(prefix), || format!("no {prefix:?} in {text}"))?;
        io(
            "change a module file",
            std::fs::write(path.join(file), text.replace(prefix, &here)),
        )?;
        let script = format!("eval \"$({LMOD} bash load belay)\" && command -v belay && belay --version && man -w belay-launch");
        let path = format!("MODULEPATH={}", path.display());
        let said = run(&["env", "-u", "BASH_ENV", &path, "bash", "-c", &script])?;
        let below = |what: &str| said.lines().any(|l| l == root.join(what).display().to_string());
        want(
            below("usr/bin/belay") && below("usr/share/man/man1/belay-launch.1.gz"),
            || format!("{kind}: {said}"),
        )?;
    }
    Ok(())
}

fn deb(place: &Place) -> Result<(), Failure> {
    let mut job = Job::new(place, "deb", User::Root)?;
    let package = package("deb", &job.work)?;
    let list = run(&["dpkg-deb", "-c", &package])?;
    holds_everything(&list)?;
    let foreign = list
        .lines()
        .find(|l| !l.contains(" root/root ") || l.contains("rwxrwx") && !l.starts_with('l'));
    want(foreign.is_none(), || format!("wrong owner or mode: {foreign:?}"))?;

    let root = job.work.join("root");
    for sub in ["info", "updates", "triggers"] {
        io("make a root", std::fs::create_dir_all(root.join("var/lib/dpkg").join(sub)))?;
    }
    io("make a root", std::fs::write(root.join("var/lib/dpkg/status"), ""))?;
    let at = format!("--root={}", root.display());
    let log = format!("--log={}/dpkg.log", job.work.display());
    let dpkg = |what: &str, which: &str| run(&["dpkg", &at, &log, "--force-depends,not-root,bad-path", what, which]);
    dpkg("-i", &package)?;
    is_used(place, &mut job, &root)?;
    is_linked(&job, &root, "usr/lib")?;
    load_modules(&root)?;
    dpkg("-r", "belay")?;
    let left = left(&root);
    want(left.is_empty(), || format!("the removed package has left {left:?}"))
}

fn rpm(place: &Place) -> Result<(), Failure> {
    let mut job = Job::new(place, "rpm", User::Root)?;
    let package = package("rpm", &job.work)?;
    holds_everything(&run(&["rpm", "-qpl", &package])?)?;
    let needs = run(&["rpm", "-qp", "--requires", &package])?;
    want(needs.contains("libc.so.6"), || format!("it asks for no C library: {needs}"))?;
    let root = job.work.join("root");
    io("make a root", std::fs::create_dir(&root))?;
    let at = format!("--root={}", root.display());
    // Debian's would not install anything by itself.
    let rpm = |what: &str, which: &str| run(&["rpm", &at, "--nodeps", "--force-debian", what, which]);
    rpm("-i", &package)?;
    is_used(place, &mut job, &root)?;
    is_linked(&job, &root, "usr/lib64")?;
    rpm("-e", "belay")?;
    // Directories that others use too belong to the system's own package.
    let left = left(&root.join("usr"));
    let left: Vec<&PathBuf> = left.iter().filter(|p| !p.is_dir() || p.ends_with("belay")).collect();
    want(left.is_empty(), || format!("the removed package has left {left:?}"))
}

/// What pip has installed from the wheel finds its library beside itself, and goes through a history.
fn whl(place: &Place) -> Result<(), Failure> {
    let job = Job::new(place, "whl", User::Root)?;
    let wheel = package("whl", &job.work)?;
    let to = job.work.join("site").display().to_string();
    let install = [
        "-m",
        "pip",
        "install",
        "--no-index",
        "--disable-pip-version-check",
        "--no-compile",
        "--target",
        &to,
        &wheel,
    ];
    run(&[&["env", "PIP_ROOT_USER_ACTION=ignore", "python3"][..], &install].concat())?;
    let script = "import array, belay, sys\n\
        a = array.array('d', bytes(80000))\n\
        with belay.History('h', sys.argv[1], host_bytes=1 << 20, keep=belay.UNTIL_READ) as h:\n\
        \x20   h.region(0, a)\n\
        \x20   for step in range(50): a[9] = step; h.put(step)\n\
        \x20   for step in reversed(range(50)): h.get(step); assert a[9] == step\n\
        print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libbelay' in line})";
    let (path, here) = (format!("PYTHONPATH={to}"), job.work.display().to_string());
    let said = run(&["env", "-u", "LD_LIBRARY_PATH", &path, "python3", "-c", script, &here])?;
    want(said.trim() == format!("{to}/belay.libs/libbelay.so.0"), || {
        format!("its library: {said}")
    })
}

fn main() {
    // The job runs as the harness's own user.
    if !runner::users().contains(&User::Root) {
        println!("\ntest result: ok. 0 passed; 0 failed; 3 ignored (packages are tested by root)");
        return;
    }
    let mut target = Target::new("package", &["fault_target"]);
    let has =
        |program: &str| std::env::var_os("PATH").is_some_and(|p| std::env::split_paths(&p).any(|d| d.join(program).is_file()));
    let tests: [(&str, &str, Test); 3] = [("deb", "dpkg-deb", deb), ("rpm", "rpmbuild", rpm), ("whl", "python3", whl)];
    for (name, program, test) in tests {
        if has(program) {
            target.once(name, move |place, _| test(place));
        } else {
            println!("package::{name}: no {program} here");
        }
    }
    target.run();
}
