//! What whoever starts belay sees of the command: exit statuses, standard streams, signals.

use super::LIMIT;
use belay_tests::expect::{io, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::{procs, Failure};
use std::os::unix::process::ExitStatusExt;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

/// `belay launch -- ARGV` in a fresh work directory, to its end.
fn launch(place: &Place, user: User, argv: &[&str]) -> Result<Output, Failure> {
    let job = Job::new(place, "cli", user)?;
    let dir = job.dir().display().to_string();
    let mut all = vec!["launch", "--ckpt-dir", dir.as_str(), "--"];
    all.extend(argv);
    output(job.belay(&all), LIMIT)
}

pub(super) fn exit_status(place: &Place, user: User) -> Result<(), Failure> {
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

pub(super) fn streams(place: &Place, user: User) -> Result<(), Failure> {
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

pub(super) fn no_command(place: &Place, user: User) -> Result<(), Failure> {
    let o = launch(place, user, &["/nonexistent/program"])?;
    want(!o.status.success() && text(&o).contains("/nonexistent/program"), || {
        format!("{}: {}", show(o.status), text(&o))
    })?;
    want(text(&o).lines().count() == 1, || format!("not one line: {}", text(&o)))
}

pub(super) fn default_directory(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "defdir", user)?;
    let o = output(job.belay(&["launch", "true"]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    let meta = std::fs::metadata(job.work.join("belay-job")).map_err(|e| format!("belay-job: {e}"))?;
    let mode = std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o777;
    want(mode == 0o700, || format!("belay-job has mode {mode:o}"))
}

pub(super) fn under_script(place: &Place, user: User) -> Result<(), Failure> {
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

fn wait_for(job: &Job, word: &str) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    while !job.output_text().contains(word) {
        want(Instant::now() < end, || format!("no {word:?} in {:?}", job.output_text()))?;
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

pub(super) fn signals_pass(place: &Place, user: User) -> Result<(), Failure> {
    let script = "trap 'echo got hup' HUP; trap 'echo got term; exit 5' TERM; echo ready; while :; do sleep 0.01; done";
    let mut job = Job::new(place, "signals", user)?;
    job.launch(&[], &["sh".into(), "-c".into(), script.into()])?;
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

/// A signal that is sent to `belay restart` while the program is being restored is the program's, which gets it when it runs.
pub(super) fn early_signal(place: &Place, user: User) -> Result<(), Failure> {
    let script = "import os, signal, time\n\
        m = bytearray(os.urandom(1 << 20) * 256)\n\
        signal.signal(signal.SIGUSR1, lambda *a: print('got usr1', flush=True))\n\
        print('ready', flush=True)\n\
        while not os.path.exists('go'): time.sleep(0.01)\n\
        print('over', flush=True)\n";
    let mut job = Job::new(place, "early", user)?;
    job.launch(&[], &["python3".into(), "-c".into(), script.into()])?;
    wait_for(&job, "ready")?;
    job.checkpoint()?;
    job.kill_all()?;
    job.restart(&[])?;
    procs::signal(keeps_signals(&mut job)?, libc::SIGUSR1);
    wait_for(&job, "got usr1")?;
    std::fs::write(job.work.join("go"), "").map_err(|e| e.to_string())?;
    let s = job.wait(LIMIT)?;
    want(s.success() && job.output_text().contains("over"), || {
        format!("{}: {}", show(s), job.output_text())
    })?;
    given_up(&mut job)
}

/// A restart that is given up leaves what is recorded of the job.
fn given_up(job: &mut Job) -> Result<(), Failure> {
    let record = |job: &Job| -> Result<(String, String), Failure> {
        let text = io("read", std::fs::read_to_string(job.dir().join("job.json")))?;
        Ok((text, job.status()?["state"].to_string()))
    };
    // Where this test waits long for a processor, the signal comes when the program runs.
    for _ in 0..10 {
        let before = record(job)?;
        job.restart(&["--ckpt-interval", "7m"])?;
        procs::signal(keeps_signals(job)?, libc::SIGTERM);
        let s = job.wait(LIMIT)?;
        if !job.output_text().contains("interrupted by signal 15") {
            continue;
        }
        let after = record(job)?;
        return want(!s.success() && after == before, || {
            format!("{}: {before:?} became {after:?}; {}", show(s), job.output_text())
        });
    }
    Err(format!("no restart was given up: {}", job.output_text()))
}

/// Waits until a restart has read the job, and keeps signals for the program; the front's PID.
fn keeps_signals(job: &mut Job) -> Result<i32, Failure> {
    let front = job.pid().ok_or("no front")?;
    let end = Instant::now() + LIMIT;
    // Who starts it blocks them, too, until it is executed.
    let receives = || procs::open_files(front).iter().any(|f| f.ends_with("anon_inode:[signalfd]"));
    while !(receives() && procs::blocks(front, libc::SIGUSR1)) {
        if job.has_ended()? {
            break;
        }
        want(Instant::now() < end, || {
            format!("belay restart keeps no signals: {}", job.output_text())
        })?;
    }
    Ok(front)
}

/// What the program prints after a restart goes to the new front process; its exit status too.
pub(super) fn restart_streams(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "rstreams", user)?;
    let script = "i=0; while [ ! -e go2 ]; do i=$((i+1)); sleep 0.02; done; echo out; echo err >&2; exit 42";
    job.launch(&[], &["sh".into(), "-c".into(), script.into()])?;
    want(job.answers(LIMIT)?, || job.output_text())?;
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
