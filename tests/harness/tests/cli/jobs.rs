//! What is done with a job: directories, reports, checkpoints, restarts.

use super::{running, LIMIT};
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::runner::until_hit;
use belay_tests::{procs, Failure};
use serde_json::Value;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

fn json(o: &Output) -> Result<Value, Failure> {
    want(o.status.success(), || format!("{}: {}", show(o.status), text(o)))?;
    serde_json::from_slice(&o.stdout).map_err(|e| format!("not one JSON document: {e}: {}", text(o)))
}

pub(super) fn launch_twice(place: &Place, user: User) -> Result<(), Failure> {
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

pub(super) fn nothing_there(place: &Place, user: User) -> Result<(), Failure> {
    let job = Job::new(place, "nothing", user)?;
    for verb in ["restart", "checkpoint", "stop"] {
        refused(&output(job.belay(&[verb, "no-such-dir"]), LIMIT)?, &["no-such-dir"])?;
    }
    let o = output(job.belay(&["launch", "true"]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    refused(&output(job.belay(&["restart"]), LIMIT)?, &["no checkpoint"])?;
    refused(&output(job.belay(&["checkpoint"]), LIMIT)?, &["not running"])
}

pub(super) fn reports(place: &Place, user: User) -> Result<(), Failure> {
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

pub(super) fn stop_and_go_on(place: &Place, user: User) -> Result<(), Failure> {
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

#[derive(Debug, Clone, Copy)]
enum Order {
    Forward,
    Backward,
    FirstLast,
    SecondLast,
}

fn ordered(all: &mut [i32], order: Order) -> &[i32] {
    all.sort_unstable();
    match order {
        Order::Forward => {}
        Order::Backward => all.reverse(),
        Order::FirstLast => all.rotate_left(1),
        Order::SecondLast => all[1..].rotate_left(1),
    }
    all
}

/// A batch system stops each process of a job and continues each, in an order of its own: all of it goes on, launched and
/// restarted.
pub(super) fn suspended(place: &Place, user: User) -> Result<(), Failure> {
    const ORDERS: [Order; 4] = [Order::Forward, Order::Backward, Order::FirstLast, Order::SecondLast];
    const MOMENT: Duration = Duration::from_millis(8);
    let stands = |pid: &i32| procs::state(*pid) == Some('T');
    let mut job = running(place, user, "suspended", &[], &["fault_target", "2"])?;
    job.checkpoint()?;
    for round in 0..2 {
        for (stop, go_on) in ORDERS.iter().flat_map(|stop| ORDERS.map(|go_on| (stop, go_on))) {
            let all = procs::tree(job.pid().ok_or("the job has no process")?);
            let mut all: Vec<i32> = all.into_iter().collect();
            let begin = Instant::now();
            for pid in ordered(&mut all, *stop) {
                procs::signal(*pid, libc::SIGSTOP);
                // Whatever the others do about that, they do now.
                std::thread::sleep(MOMENT);
            }
            while !all.iter().all(stands) {
                want(begin.elapsed() < LIMIT, || format!("not all of {all:?} stand"))?;
            }
            for pid in ordered(&mut all, go_on) {
                procs::signal(*pid, libc::SIGCONT);
                std::thread::sleep(MOMENT);
            }
            let left: Vec<&i32> = all.iter().filter(|pid| stands(pid)).collect();
            want(left.is_empty(), || {
                format!("round {round}, stopped {stop:?}, continued {go_on:?}: of {all:?} {left:?} still stand")
            })?;
            job.progress(LIMIT)?;
        }
        job.kill_all()?;
        job.clear_beat()?;
        job.restart(&[])?;
        job.progress(LIMIT)?;
    }
    job.verdict(false, LIMIT)
}

/// `belay run` launches, launches again where there is no checkpoint, restarts where there is one, and leaves a job
/// alone that has ended well.
pub(super) fn run(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "run", user)?;
    let (dir, program) = (
        job.dir().display().to_string(),
        place.programs().join("fault_target").display().to_string(),
    );
    let line = |placement| {
        [
            "run",
            "--ckpt-dir",
            &dir,
            "--keep",
            "3",
            "--placement",
            placement,
            "--",
            &program,
            "2",
        ]
    };
    let other = ["run", "--ckpt-dir", &dir, "--", &program, "3"];
    // Each run has a log; that of a restart says so.
    let restarts = |job: &Job| {
        let logs = std::fs::read_dir(job.dir().join("log")).into_iter().flatten().flatten();
        let texts = logs.map(|l| std::fs::read_to_string(l.path()).unwrap_or_default());
        texts.filter(|t| t.contains("\"restarting\"")).count()
    };
    // The first is killed before it has a checkpoint: the second launches again.
    for (expected, checkpoint, placement) in [
        (0, false, "naive"),
        (0, true, "adaptive"),
        (1, true, "naive"),
        (2, true, "adaptive"),
    ] {
        job.clear_beat()?;
        job.start(job.belay(&line(placement)))?;
        job.progress(LIMIT)?;
        let description = io("read", std::fs::read_to_string(job.dir().join("job.json")))?;
        want(description.contains(&format!("\"policy\": \"{placement}\"")), || {
            format!("--placement {placement}: {description}")
        })?;
        want(restarts(&job) == expected, || {
            format!("{} restarts, expected {expected}", restarts(&job))
        })?;
        refused(&output(job.belay(&line("naive")), LIMIT)?, &["running"])?;
        if checkpoint {
            job.checkpoint()?;
        }
        job.kill_all()?;
    }
    refused(&output(job.belay(&other), LIMIT)?, &["another command", "belay restart"])?;
    job.clear_beat()?;
    job.start(job.belay(&line("naive")))?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)?;
    job.start(job.belay(&line("naive")))?;
    let status = job.wait(LIMIT)?;
    want(status.success() && job.output_text().contains("is not run again"), || {
        format!("{}: {}", show(status), job.output_text())
    })
}

/// Somebody removes the control socket: that is said, and the next checkpoint makes it again.
pub(super) fn socket_gone(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "socket", &["--ckpt-interval", "5"], &["fault_target", "1"])?;
    let (dir, socket) = (job.dir().display().to_string(), job.dir().join("control.sock"));
    io("unlink", std::fs::remove_file(&socket))?;
    refused(&output(job.belay(&["checkpoint", &dir]), LIMIT)?, &["control socket is gone"])?;
    let status = json(&output(job.belay(&["status", &dir, "--json"]), LIMIT)?)?;
    want(status["state"] == "running", || status.to_string())?;
    let begin = Instant::now();
    while !socket.exists() {
        want(begin.elapsed() < LIMIT, || "the socket is not made again".into())?;
        std::thread::sleep(Duration::from_millis(20));
    }
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// A script takes a checkpoint of its own job: restarted from that, it goes on behind it.
pub(super) fn called_by_itself(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "itself", user)?;
    let (dir, belay) = (job.dir().display().to_string(), place.belay().display().to_string());
    let script = r#"set -e; "$0" checkpoint "$1"; echo passed; while [ ! -e go ]; do sleep 0.05; done"#;
    job.launch(&[], &["sh", "-c", script, &belay, &dir].map(str::to_owned))?;
    for way in ["launched", "restarted", "restarted again"] {
        let begin = Instant::now();
        while !job.output_text().contains("passed") {
            want(begin.elapsed() < LIMIT && !job.has_ended()?, || {
                format!("{way}: {}", job.output_text())
            })?;
            std::thread::sleep(Duration::from_millis(10));
        }
        job.kill_all()?;
        job.restart(&[])?;
    }
    io("create go", std::fs::write(job.work.join("go"), ""))?;
    let status = job.wait(LIMIT)?;
    want(status.success(), || format!("{}: {}", show(status), job.output_text()))
}

/// A checkpoint that does not come to its end is told, and when it does, others follow.
pub(super) fn slow_checkpoint(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = running(place, user, "slow", &["--ckpt-interval", "200ms"], &["fault_target", "256"])?;
    let end = Instant::now() + LIMIT;
    let writer = loop {
        let all = procs::marked(&job.work);
        if let Some((pid, _)) = all.iter().find(|(_, name)| name == "belay-snapshot") {
            break *pid;
        }
        want(Instant::now() < end, || format!("no checkpoint: {}", job.output_text()))?;
    };
    procs::signal(writer, libc::SIGSTOP);
    while !job.output_text().contains("no other can be taken") {
        want(Instant::now() < end && !job.has_ended()?, || {
            format!("nothing is told: {}", job.output_text())
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    let s = job.status()?;
    want(
        s["last_error"]["message"].to_string().contains("no other can be taken"),
        || format!("{s}"),
    )?;
    procs::signal(writer, libc::SIGCONT);
    job.checkpoint()?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

pub(super) fn lazy(place: &Place, user: User) -> Result<(), Failure> {
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

pub(super) fn interval(place: &Place, user: User) -> Result<(), Failure> {
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

/// While a checkpoint is verified, the job that runs takes the next one and removes it: that is no damage.
pub(super) fn verify_running(place: &Place, user: User) -> Result<(), Failure> {
    let options = ["--keep", "1", "--differential", "off"];
    let mut job = running(place, user, "verify", &options, &["fault_target", "64"])?;
    let dir = job.dir().display().to_string();
    job.checkpoint()?;
    until_hit(1, |n| {
        let reads = job
            .belay(&["verify", &dir])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut reads = io("verify", reads)?;
        let front = reads.id().cast_signed();
        let is_in_chunk = || {
            let mut all = procs::tree(front).into_iter().flat_map(procs::open_files);
            all.any(|f| f.extension().is_some_and(|e| e == "bpg"))
        };
        let mut held = false;
        while !held && io("wait", reads.try_wait())?.is_none() {
            held = is_in_chunk();
        }
        let all = |sig| procs::tree(front).into_iter().for_each(|p| procs::signal(p, sig));
        all(libc::SIGSTOP);
        let taken = job.checkpoint();
        all(libc::SIGCONT);
        let o = io("wait", reads.wait_with_output())?;
        taken?;
        want(o.status.success(), || format!("{}: {}", show(o.status), text(&o)))?;
        let next = format!("generation {}: whole", n + 2);
        Ok(text(&o).contains(&format!("generation {}: removed meanwhile", n + 1)) && text(&o).contains(&next))
    })?;
    job.verdict(false, LIMIT)
}

/// Belay is replaced by another version while a job runs: that is checkpointed by the version that it was launched with.
pub(super) fn replaced(place: &Place, user: User) -> Result<(), Failure> {
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

/// A remote shell that is called by its path, past the stand-in, is told of: what it leads to is in no checkpoint.
pub(super) fn past_the_standin(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "past", user)?;
    let shell = job.work.join("ssh");
    io("copy", std::fs::copy("/bin/sleep", &shell))?;
    let command = [shell.display().to_string(), "1000".into(), "1000".into()];
    for (options, told) in [(&["--across-hosts".to_owned()][..], true), (&[], false)] {
        job.launch(options, &command)?;
        let o = job.checkpoint_raw(&["--wait"])?;
        let note = text(&o).contains("ssh 1000 1000: what it has started on another host, if anything, is not in the checkpoint");
        want(o.status.success() && note == told, || {
            format!("{options:?}: {}: {}", show(o.status), text(&o))
        })?;
        job.kill_all()?;
        io("remove", std::fs::remove_dir_all(job.dir()))?;
    }
    Ok(())
}
