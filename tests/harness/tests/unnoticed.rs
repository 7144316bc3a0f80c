//! What a program does not notice of a checkpoint: time-outs pass as they would without, files keep their times of
//! access, and it does not stand still for a minute.

use belay_still::Watch;
use belay_tests::expect::{io, refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::outcome::take_unless_ended;
use belay_tests::place::{am_root, Place, User};
use belay_tests::runner::until_hit;
use belay_tests::target::Target;
use belay_tests::{procs, Failure};
use std::cell::RefCell;
use std::process::Command;
use std::time::Duration;

const PROGRAM: &str = "timer_waits";
const TICKS: &str = "timer_ticks";
const HELD: &str = "proc_vforkheld";
const PATIENCE: Duration = Duration::from_secs(60);

/// A job that waits for `wait` in all ways.
fn launched(place: &Place, label: &str, user: User, options: &[&str], wait: Duration) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    let program = place.programs().join(PROGRAM).display().to_string();
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    job.launch(&options, &[program, wait.as_millis().to_string()])?;
    Ok(job)
}

/// How long it has waited in each way, by what it has printed: no longer than `limit`.
fn none_is_late(job: &Job, limit: Duration) -> Result<(), Failure> {
    let said = job.output_text();
    let took = said
        .lines()
        .filter_map(|l| l.strip_suffix(" us")?.rsplit_once(": ")?.1.parse::<u64>().ok());
    let longest = took.max().map(Duration::from_micros);
    want(longest.is_some_and(|longest| longest <= limit), || {
        format!("{longest:?}, of which {limit:?} are right: {said}")
    })
}

/// Checkpoints come more often than the time-outs pass.
fn waits_continued(place: &Place, user: User) -> Result<(), Failure> {
    const WAIT: Duration = Duration::from_secs(3);
    const LATE: Duration = Duration::from_millis(1500);
    let watch = Watch::begin();
    let mut job = launched(place, "continued", user, &["--ckpt-interval", "200ms"], WAIT)?;
    job.verdict(false, PATIENCE)?;
    none_is_late(&job, WAIT + LATE + watch.stood())?;
    let taken = job.status()?["generations"].as_array().map_or(0, Vec::len);
    if taken < 2 {
        return Err("no checkpoints were taken".into());
    }
    Ok(())
}

/// A program that issues its system calls itself does not find less in its registers than it has put there.
fn ticks(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "ticks", user)?;
    let program = place.programs().join(TICKS).display().to_string();
    job.launch(&["--ckpt-interval".into(), "510ms".into()], &[program])?;
    job.verdict(false, PATIENCE)
}

/// Two restarts fall into each wait, unless the machine is too slow for that.
fn waits_restarted(place: &Place, user: User) -> Result<(), Failure> {
    const WAIT: Duration = Duration::from_secs(4);
    const BEFORE: Duration = Duration::from_millis(1500);
    // Less than what is over at the restarts.
    const LATE: Duration = Duration::from_millis(2500);
    until_hit(1, |_| {
        let watch = Watch::begin();
        let job = RefCell::new(launched(place, "restarted", user, &[], WAIT)?);
        let mut restarts = 0;
        while restarts < 2 && job.borrow_mut().answers(PATIENCE)? {
            std::thread::sleep(BEFORE);
            if !take_unless_ended(|| job.borrow().checkpoint_raw(&[]), || job.borrow_mut().has_ended())? {
                break;
            }
            job.borrow_mut().kill_all()?;
            job.borrow_mut().restart(&[])?;
            restarts += 1;
        }
        let mut job = job.into_inner();
        job.verdict(false, PATIENCE)?;
        none_is_late(&job, WAIT + LATE + watch.stood())?;
        Ok(restarts == 2)
    })
}

/// A file that the job has only opened was last read when the job read it, not when a checkpoint did.
fn access_times(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "access_times", user)?;
    let input = job.dir().with_file_name("input");
    let program = place.programs().join("mem_private").display().to_string();
    let script = format!(
        "echo text > {0}; touch -a -d 2001-01-01 {0}; exec 3< {0}; exec {program}",
        input.display()
    );
    job.launch(&[], &["sh".into(), "-c".into(), script])?;
    job.progress(PATIENCE)?;
    let accessed = || {
        io(
            "read the time of access",
            std::fs::metadata(&input).and_then(|m| m.accessed()),
        )
    };
    let before = accessed()?;
    job.checkpoint()?;
    let after = accessed()?;
    want(before == after, || format!("the checkpoint has read {}", input.display()))?;
    job.verdict(false, PATIENCE)
}

/// A program knows the name of its pseudo-terminal, and another program of the machine has that by the time of the restart.
fn terminal_taken(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "terminal_taken", user)?;
    let program = place.programs().join("fd_proc").display().to_string();
    job.launch(&[], &[program, "named".into()])?;
    let mut others = Vec::new();
    for _ in 0..2 {
        job.progress(PATIENCE)?;
        job.checkpoint()?;
        job.kill_all()?;
        for _ in 0..64 {
            others.push(io("open /dev/ptmx", std::fs::File::open("/dev/ptmx"))?);
        }
        job.restart(&[])?;
    }
    job.verdict(false, PATIENCE)
}

/// More pending signals than can be read in a moment: the checkpoint is refused.
fn signals(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "signals", user)?;
    let program = place.programs().join("refuse").display().to_string();
    job.launch(&[], &[program, "signals".into()])?;
    job.progress(PATIENCE)?;
    let o = job.checkpoint_raw(&[])?;
    want(
        o.status.code() == Some(80) && text(&o).contains("signals are pending"),
        || format!("{}: {}", show(o.status), text(&o)),
    )?;
    job.progress(PATIENCE)?;
    job.verdict(false, PATIENCE)
}

/// A child of `vfork` that takes its time does not make the program stand still; one that takes too long makes the
/// checkpoint refused.
fn vfork(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "vfork", user)?;
    let program = place.programs().join(HELD).display().to_string();
    job.launch(&[], &[program.clone(), "6000".into(), "300".into()])?;
    job.progress(PATIENCE)?;
    let watch = Watch::begin();
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(700));
        job.checkpoint()?;
    }
    let status = job.status()?;
    let generations = status["generations"].as_array().ok_or("no generations")?;
    let longest = generations
        .iter()
        .filter_map(|g| g["blocked_ms"].as_f64())
        .fold(0.0, f64::max);
    let machine = watch.stood().as_secs_f64() * 1000.0;
    want(!generations.is_empty() && longest < 3000.0 + machine, || {
        format!("the program stood still for {longest} ms, the machine for {machine} ms")
    })?;
    job.verdict(false, PATIENCE)?;

    let mut job = Job::new(place, "vfork_long", user)?;
    job.launch(&[], &[program, "15000".into(), "0".into()])?;
    job.progress(PATIENCE)?;
    let o = job.checkpoint_raw(&[])?;
    refused(&o, &["waits in vfork for process", "10 s"])?;
    job.verdict(false, PATIENCE)
}

/// In a restarted job, as outside, a sandbox can be made that mounts its own `/proc`.
fn sandboxes(place: &Place, user: User) -> Result<(), Failure> {
    let mut job = Job::new(place, "sandboxes", user)?;
    let program = place.programs().join("mem_private").display().to_string();
    job.launch(&[], &[program])?;
    job.progress(PATIENCE)?;
    job.checkpoint()?;
    job.kill_all()?;
    job.restart(&[])?;
    job.progress(PATIENCE)?;
    let inner = job.pid().and_then(|front| procs::tree(front).into_iter().max());
    let inner = inner.ok_or("the job has no process")?.to_string();
    let enter = ["nsenter", "--target", &inner, "--mount", "--pid"];
    let nobody = User::Ordinary.words();
    // An ordinary user's job has a user namespace, which he may enter; root's does as he likes.
    let words: Vec<&str> = match user {
        User::Root => [&enter, nobody].concat(),
        User::Ordinary => [nobody, &enter, &["--user", "--preserve-credentials", "--"]].concat(),
    };
    let sandbox = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--mount-proc",
        "true",
    ];
    let mut c = Command::new(words[0]);
    c.args(&words[1..]).args(sandbox);
    let o = output(c, PATIENCE)?;
    want(o.status.success(), || format!("{}: {}", show(o.status), text(&o)))?;
    job.verdict(false, PATIENCE)
}

fn main() {
    let mut target = Target::new("unnoticed", &[PROGRAM, TICKS, HELD, "mem_private", "fd_proc", "refuse"]);
    target.in_turn();
    target.by_user("waits_continued", |_| true, |place, user, _| waits_continued(place, user));
    target.by_user("waits_restarted", |_| true, |place, user, _| waits_restarted(place, user));
    target.by_user("ticks", |_| true, |place, user, _| ticks(place, user));
    target.by_user("access_times", |_| true, |place, user, _| access_times(place, user));
    target.by_user("terminal_taken", |_| true, |place, user, _| terminal_taken(place, user));
    target.by_user("vfork", |_| true, |place, user, _| vfork(place, user));
    target.by_user("sandboxes", |_| am_root(), |place, user, _| sandboxes(place, user));
    target.by_user("signals", |_| true, |place, user, _| signals(place, user));
    target.run();
}
