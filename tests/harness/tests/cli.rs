//! The command line: exit statuses, standard streams, signals, terminals, job directories, machine-readable output.

use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::procs;
use belay_tests::target::Target;
use belay_tests::terminal::Terminal;
use belay_tests::Failure;
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);

type Test = fn(&Place, User) -> Result<(), Failure>;

/// `belay launch -- ARGV` in a fresh work directory, to its end.
fn launch(place: &Place, user: User, argv: &[&str]) -> Result<Output, Failure> {
    let job = Job::new(place, "cli", user)?;
    let dir = job.dir().display().to_string();
    let mut all = vec!["launch", "--ckpt-dir", dir.as_str(), "--"];
    all.extend(argv);
    output(job.belay(&all), LIMIT)
}

/// A launched `program ARGS` that makes progress.
fn running(place: &Place, user: User, label: &str, options: &[&str], line: &[&str]) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    let mut argv = vec![place.programs().join(line[0]).display().to_string()];
    argv.extend(line[1..].iter().map(|s| (*s).to_owned()));
    let options: Vec<String> = options.iter().map(|s| (*s).to_owned()).collect();
    job.launch(&options, &argv)?;
    job.progress(LIMIT)?;
    Ok(job)
}

fn json(o: &Output) -> Result<Value, Failure> {
    want(o.status.success(), || format!("{}: {}", show(o.status), text(o)))?;
    serde_json::from_slice(&o.stdout).map_err(|e| format!("not one JSON document: {e}: {}", text(o)))
}

fn exit_status(place: &Place, user: User) -> Result<(), Failure> {
    for code in [0, 1, 7, 63, 127, 255] {
        let o = launch(place, user, &["sh", "-c", &format!("exit {code}")])?;
        want(o.status.code() == Some(code), || {
            format!("{}, expected exit {code}: {}", show(o.status), text(&o))
        })?;
    }
    for (name, number) in [("TERM", 15), ("KILL", 9), ("SEGV", 11)] {
        let o = launch(place, user, &["sh", "-c", &format!("kill -{name} $$")])?;
        want(o.status.signal() == Some(number), || {
            format!("{}, expected the end by signal {number}", show(o.status))
        })?;
    }
    Ok(())
}

fn streams(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "streams", user)?;
    let mut c = job.belay(&["launch", "--", "sh", "-c", "cat; echo err >&2"]);
    let mut child = c
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    std::io::Write::write_all(&mut child.stdin.take().ok_or("no stdin")?, b"line one\nline two\n").map_err(|e| e.to_string())?;
    let o = child.wait_with_output().map_err(|e| e.to_string())?;
    want(o.stdout == b"line one\nline two\n", || {
        format!("standard output: {:?}", String::from_utf8_lossy(&o.stdout))
    })?;
    want(o.stderr == b"err\n", || {
        format!("standard error: {:?}", String::from_utf8_lossy(&o.stderr))
    })
}

fn no_command(place: &Place, user: User) -> Result<(), Failure> {
    let o = launch(place, user, &["/nonexistent/program"])?;
    want(!o.status.success() && text(&o).contains("/nonexistent/program"), || {
        format!("{}: {}", show(o.status), text(&o))
    })?;
    want(text(&o).lines().count() == 1, || format!("not one line: {}", text(&o)))
}

fn default_directory(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "defdir", user)?;
    let o = output(job.belay(&["launch", "true"]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    let meta = std::fs::metadata(job.work.join("belay-job")).map_err(|e| format!("belay-job: {e}"))?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o777;
    want(mode == 0o700, || format!("belay-job has mode {mode:o}"))
}

fn launch_twice(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "twice", &[], &["fault_target", "1"])?;
    let dir = job.dir().display().to_string();
    refused(
        &output(job.belay(&["launch", "--ckpt-dir", &dir, "--", "true"]), LIMIT)?,
        &["running"],
    )?;
    refused(&output(job.belay(&["restart", &dir]), LIMIT)?, &["running"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn nothing_there(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "nothing", user)?;
    for verb in ["restart", "checkpoint", "stop"] {
        refused(&output(job.belay(&[verb, "no-such-dir"]), LIMIT)?, &["no-such-dir"])?;
    }
    let o = output(job.belay(&["launch", "true"]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    refused(&output(job.belay(&["restart"]), LIMIT)?, &["no checkpoint"])?;
    refused(&output(job.belay(&["checkpoint"]), LIMIT)?, &["not running"])
}

fn reports(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "reports", &[], &["fault_target", "4"])?;
    let dir = job.dir().display().to_string();
    let o = job.checkpoint_raw(&[])?;
    want(o.status.success(), || text(&o))?;
    let said = String::from_utf8_lossy(&o.stdout).to_lowercase();
    want(said.contains("generation 1") && said.contains("ms"), || {
        format!("checkpoint said {said}")
    })?;
    let c = json(&job.checkpoint_raw(&["--json"])?)?;
    want(
        c["generation"] == 2 && c["blocked_ms"].is_number() && c["bytes"].is_number(),
        || format!("checkpoint --json said {c}"),
    )?;
    let s = json(&output(job.belay(&["status", &dir, "--json"]), LIMIT)?)?;
    let gens = s["generations"].as_array().ok_or(format!("status has no generations: {s}"))?;
    want(gens.len() == 2, || format!("status shows {} generations: {s}", gens.len()))?;
    for key in ["generation", "time_unix_s", "bytes", "blocked_ms"] {
        want(gens[1][key].is_number(), || format!("status: a generation has no {key}: {s}"))?;
    }
    let procs = s["processes"].as_array().ok_or(format!("status has no processes: {s}"))?;
    want(procs.len() == 2, || {
        format!("status shows {} processes, expected 2: {s}", procs.len())
    })?;
    want(procs.iter().any(|p| p["threads"] == 2), || {
        format!("status shows no process with 2 threads: {s}")
    })?;
    let l = json(&output(job.belay(&["list", &dir, "--json"]), LIMIT)?)?;
    want(l.to_string().contains("\"generation\":2"), || format!("list said {l}"))?;
    let v = output(job.belay(&["verify", &dir]), LIMIT)?;
    want(v.status.success(), || text(&v))?;
    let i = output(job.belay(&["inspect", &format!("{dir}/gen/000001")]), LIMIT)?;
    want(i.status.success() && text(&i).contains("fault_target"), || text(&i))?;
    job.verdict(false, LIMIT)?;
    let s = json(&output(job.belay(&["status", &dir, "--json"]), LIMIT)?)?;
    want(s["generations"].as_array().is_some_and(|g| g.len() == 2), || {
        format!("status of the ended job: {s}")
    })
}

fn stop_and_go_on(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "stop", &[], &["fault_target", "2"])?;
    let o = job.checkpoint_raw(&["--then", "stop"])?;
    want(o.status.success(), || text(&o))?;
    job.wait(LIMIT)?;
    job.left_behind()?;
    job.clear_beat()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["stop", &dir]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    job.wait(LIMIT)?;
    job.left_behind()?;
    job.clear_beat()?;
    job.restart(&["--generation", "1"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn lazy(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "lazy", &[], &["fault_target", "64"])?;
    job.checkpoint()?;
    for _ in 0..2 {
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&["--lazy"])?;
        job.progress(LIMIT)?;
        job.checkpoint().map_err(|e| format!("after a lazy restart: {e}"))?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn interval(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(
        place,
        user,
        "interval",
        &["--ckpt-interval", "300ms", "--keep", "2"],
        &["fault_target", "2"],
    )?;
    let gens = |job: &Job| -> Vec<String> {
        let names = std::fs::read_dir(job.dir().join("gen")).into_iter().flatten().flatten();
        let mut v: Vec<String> = names
            .filter_map(|e| e.file_name().into_string().ok())
            .filter(|n| !n.starts_with('.'))
            .collect();
        v.sort();
        v
    };
    let end = Instant::now() + LIMIT;
    while gens(&job).last().is_none_or(|g| g.as_str() < "000005") {
        want(Instant::now() < end, || {
            format!("generations {:?}; {}", gens(&job), job.output_text())
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    want(gens(&job).len() <= 3, || format!("--keep 2 left {:?}", gens(&job)))?;
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&["--ckpt-interval", "300ms"])?;
    job.progress(LIMIT)?;
    let before = gens(&job);
    while gens(&job).last() <= before.last() {
        want(Instant::now() < end, || {
            format!("no new generation after the restart: {before:?}")
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn signals_pass(place: &Place, user: User) -> Result<(), Failure> {
    let script = "trap 'echo got hup' HUP; trap 'echo got term; exit 5' TERM; echo ready; while :; do sleep 0.01; done";
    let mut job = Job::new(place, "signals", user)?;
    job.launch(&[], &["sh".into(), "-c".into(), script.into()])?;
    let wait_for = |job: &Job, word: &str| -> Result<(), Failure> {
        let end = Instant::now() + LIMIT;
        while !job.output_text().contains(word) {
            want(Instant::now() < end, || format!("no {word:?} in {:?}", job.output_text()))?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    };
    wait_for(&job, "ready")?;
    let pid = job.pid().ok_or("no job")?;
    procs::signal(pid, libc::SIGHUP);
    wait_for(&job, "got hup")?;
    procs::signal(pid, libc::SIGTERM);
    let s = job.wait(LIMIT)?;
    want(s.code() == Some(5) && job.output_text().contains("got term"), || {
        format!("{}: {}", show(s), job.output_text())
    })
}

/// A shell on a terminal: Ctrl-C, Ctrl-Z with fg, input, window.
fn terminal(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "terminal", user)?;
    let argv: Vec<String> = ["env", "PS1=PROMPT:", "HISTFILE=", "bash", "--norc", "--noediting", "-i"]
        .iter()
        .map(|s| (*s).to_owned())
        .collect();
    let mut t = Terminal::new(job.command(&argv))?;
    let belay = place.belay().display().to_string();
    t.expect("PROMPT:")?;
    t.type_keys(&format!("{belay} launch -- sh -c 'read x; echo \"<$x>\"; exit 9'\n"))?;
    t.expect("exit 9'\r\n")?;
    t.type_keys("some words\n")?;
    t.expect("<some words>")?;
    t.expect("PROMPT:")?;
    t.type_keys("echo status=$?\n")?;
    t.expect("status=9\r\n")?;
    t.expect("PROMPT:")?;
    t.type_keys(&format!("{belay} launch -- sh -c 'echo up; exec sleep 1000'\n"))?;
    t.expect("\nup\r\n")?;
    t.type_keys("\x03")?;
    t.expect("PROMPT:")?;
    t.type_keys("echo status=$?\n")?;
    t.expect("status=130\r\n")?;
    t.expect("PROMPT:")?;
    t.type_keys(&format!(
        "{belay} launch -- sh -c 'echo up; i=0; while sleep 0.05; do i=$((i+1)); echo tick$i; done'\n"
    ))?;
    t.expect("\nup\r\n")?;
    t.expect("tick2\r\n")?;
    t.type_keys("\x1a")?;
    t.expect("Stopped")?;
    t.type_keys("echo in=shell\n")?;
    t.expect("in=shell\r\n")?;
    t.expect("PROMPT:")?;
    t.type_keys("fg\n")?;
    t.expect("tick")?;
    t.expect("tick")?;
    t.type_keys("\x03")?;
    t.expect("PROMPT:")?;
    Ok(())
}

/// Commands that stop themselves, and a shell with a process group of its own: the outer shell notices, `fg` continues them.
fn self_stopped(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "selfstop", user)?;
    let argv: Vec<String> = ["env", "PS1=PROMPT:", "HISTFILE=", "bash", "--norc", "--noediting", "-i"]
        .iter()
        .map(|s| (*s).to_owned())
        .collect();
    let mut t = Terminal::new(job.command(&argv))?;
    let belay = place.belay().display().to_string();
    t.expect("PROMPT:")?;
    t.type_keys(&format!(
        "{belay} launch --ckpt-dir j1 -- sh -c 'echo up; kill -TSTP $$; echo back; exit 3'\n"
    ))?;
    t.expect("\nup\r\n")?;
    t.expect("Stopped")?;
    t.expect("PROMPT:")?;
    t.type_keys("fg\n")?;
    t.expect("\nback\r\n")?;
    let said = t.expect("PROMPT:")?;
    want(!said.contains("belay"), || format!("continued by fg: {said}"))?;
    t.type_keys("echo status=$?\n")?;
    t.expect("status=3\r\n")?;
    t.expect("PROMPT:")?;
    t.type_keys(&format!(
        "{belay} launch --ckpt-dir j2 -- env PS1=INNER: bash --norc --noediting -i\n"
    ))?;
    t.expect("-i\r\nINNER:")?;
    t.type_keys("suspend\n")?;
    t.expect("Stopped")?;
    t.expect("PROMPT:")?;
    t.type_keys("fg\n")?;
    t.expect("-i\r\n")?;
    t.type_keys("echo now=$((3+4))\n")?;
    t.expect("now=7\r\n")?;
    t.type_keys("exit 5\n")?;
    t.expect("PROMPT:")?;
    t.type_keys("echo status=$?\n")?;
    t.expect("status=5\r\n")?;
    Ok(())
}

/// A program on a terminal is killed and restarted on another terminal: its input comes from there.
fn terminal_restart(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "ttyrestart", user)?;
    let shell: Vec<String> = ["env", "PS1=PROMPT:", "HISTFILE=", "bash", "--norc", "--noediting", "-i"]
        .iter()
        .map(|s| (*s).to_owned())
        .collect();
    let belay = place.belay().display().to_string();
    let dir = job.dir().display().to_string();
    let mut t = Terminal::new(job.command(&shell))?;
    t.expect("PROMPT:")?;
    t.type_keys(&format!(
        "{belay} launch --ckpt-dir {dir} -- sh -c 'n=0; while read x; do n=$((n+1)); echo \"$n:<$x>\"; done; exit 4'\n"
    ))?;
    t.expect("exit 4'\r\n")?;
    t.type_keys("one\n")?;
    t.expect("1:<one>")?;
    let o = output(job.belay(&["checkpoint", &dir]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    t.type_keys("two\n")?;
    t.expect("2:<two>")?;
    drop(t); // kills everything on that terminal
    let mut t = Terminal::new(job.command(&shell))?;
    t.expect("PROMPT:")?;
    t.type_keys(&format!("{belay} restart {dir}\n"))?;
    t.expect("\r\n")?;
    t.type_keys("again\n")?;
    t.expect("2:<again>")?;
    t.type_keys("\x04")?;
    t.expect("PROMPT:")?;
    t.type_keys("echo status=$?\n")?;
    t.expect("status=4\r\n")?;
    Ok(())
}

fn under_script(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "script", user)?;
    let belay = place.belay().display().to_string();
    let script = format!(
        "for i in 1 2 3; do {belay} launch --ckpt-dir job$i -- sh -c \"echo run $i; exit $i\" || echo \"status $?\"; done | cat"
    );
    let o = output(job.command(&["sh".into(), "-c".into(), script]), LIMIT)?;
    want(o.stdout == b"run 1\nstatus 1\nrun 2\nstatus 2\nrun 3\nstatus 3\n", || {
        text(&o)
    })?;
    let o = output(
        job.command(&[
            "setsid".into(),
            "-w".into(),
            belay,
            "launch".into(),
            "--".into(),
            "sh".into(),
            "-c".into(),
            "exit 6".into(),
        ]),
        LIMIT,
    )?;
    want(o.status.code() == Some(6), || {
        format!("without a terminal: {}: {}", show(o.status), text(&o))
    })
}

/// A set-user-ID program cannot be traced by an ordinary user: refused by name at launch or at the checkpoint.
fn setuid(place: &Place, _: User) -> Result<(), Failure> {
    let job = Job::new(place, "setuid", User::Ordinary)?;
    let o = output(
        job.belay(&[
            "launch",
            "--ckpt-dir",
            &job.dir().display().to_string(),
            "--",
            "su",
            "--version",
        ]),
        LIMIT,
    )?;
    refused(&o, &["su", "set"])
}

/// Sets a limit of front and agent.
fn limit(job: &Job, option: &str) -> Result<(), Failure> {
    let is_belay = |p: &i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == "belay");
    for pid in procs::tree(job.pid().ok_or("no job")?).into_iter().filter(is_belay) {
        let limit = ["prlimit", option, "--pid", &pid.to_string()].map(str::to_owned);
        let o = output(job.command(&limit), LIMIT)?;
        want(o.status.success(), || text(&o))?;
    }
    Ok(())
}

/// Where the agent may write small files only, the checkpoint fails, and it and the program go on.
fn file_size(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "file_size", &[], &["mem_private"])?;
    limit(&job, "--fsize=1048576:")?;
    let o = output(job.belay(&["checkpoint", &job.dir().display().to_string()]), LIMIT)?;
    want(o.status.code() == Some(81) && text(&o).contains("File too large"), || {
        format!("{}: {}", show(o.status), text(&o))
    })?;
    job.progress(LIMIT)?;
    limit(&job, "--fsize=unlimited:")?;
    job.checkpoint()?;
    job.kill_all()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Belay is replaced by another version while a job runs: that is checkpointed by the version that it was launched with.
fn replaced(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "replaced", user)?;
    let (dir, bin) = (job.dir().display().to_string(), job.dir().with_file_name("bin"));
    io("make a directory", std::fs::create_dir(&bin))?;
    for name in ["belay", "belay-inject"] {
        io(
            "copy belay",
            std::fs::copy(place.belay().with_file_name(name), bin.join(name)),
        )?;
    }
    let belay = |words: &[&str]| -> Vec<String> {
        let program = bin.join("belay").display().to_string();
        [&[program.as_str()], words]
            .concat()
            .iter()
            .map(|w| (*w).to_owned())
            .collect()
    };
    let program = place.programs().join("mem_private").display().to_string();
    job.start(job.command(&belay(&["launch", "--ckpt-dir", &dir, "--", &program])))?;
    job.progress(LIMIT)?;
    io("remove", std::fs::remove_file(bin.join("belay-inject")))?;
    io("replace", std::fs::write(bin.join("belay-inject"), "another version"))?;
    let o = output(job.command(&belay(&["checkpoint", &dir])), LIMIT)?;
    want(o.status.success(), || format!("{}: {}", show(o.status), text(&o)))?;
    job.kill_all()?;
    job.restart(&[])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// A job with more open files than the agent may have is refused, with the limit, and goes on.
fn open_files(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "open_files", &[], &["fd_many"])?;
    limit(&job, "--nofile=300:300")?;
    let o = output(job.belay(&["checkpoint", &job.dir().display().to_string()]), LIMIT)?;
    refused(&o, &["300, the hard limit rlimit_nofile", "ulimit"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// What the program prints after a restart goes to the new front process; its exit status too.
fn restart_streams(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "rstreams", user)?;
    let script = "i=0; while [ ! -e go2 ]; do i=$((i+1)); sleep 0.02; done; echo out; echo err >&2; exit 42";
    job.launch(&[], &["sh".into(), "-c".into(), script.into()])?;
    std::thread::sleep(Duration::from_millis(300));
    job.checkpoint()?;
    job.kill_all()?;
    let dir = job.dir().display().to_string();
    let child = job
        .belay(&["restart", &dir])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    std::thread::sleep(Duration::from_millis(300));
    std::fs::write(job.work.join("go2"), "").map_err(|e| e.to_string())?;
    let o = child.wait_with_output().map_err(|e| e.to_string())?;
    want(
        o.status.code() == Some(42) && o.stdout == b"out\n" && o.stderr.ends_with(b"err\n"),
        || {
            format!(
                "{}: {:?} {:?}",
                show(o.status),
                String::from_utf8_lossy(&o.stdout),
                String::from_utf8_lossy(&o.stderr)
            )
        },
    )
}

/// `belay run` launches, launches again where there is no checkpoint, restarts where there is one, and leaves a job alone that has ended well.
fn run(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "run", user)?;
    let (dir, program) = (
        job.dir().display().to_string(),
        place.programs().join("fault_target").display().to_string(),
    );
    let line = ["run", "--ckpt-dir", &dir, "--keep", "3", "--", &program, "2"];
    let other = ["run", "--ckpt-dir", &dir, "--", &program, "3"];
    // Each run has a log; that of a restart says so.
    let restarts = |job: &Job| {
        let logs = std::fs::read_dir(job.dir().join("log")).into_iter().flatten().flatten();
        let texts = logs.map(|l| std::fs::read_to_string(l.path()).unwrap_or_default());
        texts.filter(|t| t.contains("\"restarting\"")).count()
    };
    // The first is killed before it has a checkpoint: the second launches again.
    for (expected, checkpoint) in [(0, false), (0, true), (1, true), (2, true)] {
        job.clear_beat()?;
        job.start(job.belay(&line))?;
        job.progress(LIMIT)?;
        want(restarts(&job) == expected, || {
            format!("{} restarts, expected {expected}", restarts(&job))
        })?;
        refused(&output(job.belay(&line), LIMIT)?, &["running"])?;
        if checkpoint {
            job.checkpoint()?;
        }
        job.kill_all()?;
    }
    refused(&output(job.belay(&other), LIMIT)?, &["another command", "belay restart"])?;
    job.clear_beat()?;
    job.start(job.belay(&line))?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)?;
    job.start(job.belay(&line))?;
    let status = job.wait(LIMIT)?;
    want(status.success() && job.output_text().contains("is not run again"), || {
        format!("{}: {}", show(status), job.output_text())
    })
}

fn main() {
    let mut target = Target::new("cli", &["fault_target", "fd_many", "mem_private"]);
    let tests: [(&str, Test); 22] = [
        ("exit_status", exit_status),
        ("streams", streams),
        ("no_command", no_command),
        ("default_directory", default_directory),
        ("launch_twice", launch_twice),
        ("nothing_there", nothing_there),
        ("reports", reports),
        ("stop_and_go_on", stop_and_go_on),
        ("run", run),
        ("lazy", lazy),
        ("interval", interval),
        ("signals_pass", signals_pass),
        ("terminal", terminal),
        ("self_stopped", self_stopped),
        ("terminal_restart", terminal_restart),
        ("under_script", under_script),
        ("restart_streams", restart_streams),
        ("setuid", setuid),
        ("open_files", open_files),
        ("replaced", replaced),
        ("file_size", file_size),
        ("help", |place, user| {
            let job = Job::new(place, "help", user)?;
            for verb in [
                "launch",
                "checkpoint",
                "restart",
                "run",
                "status",
                "list",
                "verify",
                "inspect",
                "stop",
                "gc",
            ] {
                let o = output(job.belay(&[verb, "--help"]), LIMIT)?;
                want(o.status.success() && text(&o).contains("Usage"), || {
                    format!("{verb} --help: {}", text(&o))
                })?;
            }
            Ok(())
        }),
    ];
    for (name, test) in tests {
        target.by_user(
            name,
            // Root may open and raise everything.
            |u| !["setuid", "open_files"].contains(&name) || u == User::Ordinary,
            move |place, user, _| test(place, user),
        );
    }
    target.run();
}
