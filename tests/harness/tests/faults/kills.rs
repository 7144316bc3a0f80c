//! Parts of a job killed while a checkpoint is under way: each of them, or all.

use super::{comes_back, target, LIMIT};
use belay_still::Watch;
use belay_tests::beat::Beats;
use belay_tests::expect::{io, refused_for_one_of as refused, want};
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::runner::{rounds, until_hit};
use belay_tests::{procs, Failure};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

/// A running checkpoint, and its end.
fn during_checkpoint(job: &Job, delay: &mut dyn FnMut(), act: impl FnOnce(&Job) -> Result<(), Failure>) -> Result<Output, Failure> {
    let dir = job.dir().display().to_string();
    let c = job.belay(&["checkpoint", &dir]);
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || tx.send(output(c, LIMIT)).ok());
    delay();
    act(job)?;
    rx.recv().map_err(|e| e.to_string())?
}

/// A checkpoint command that has been started.
fn started(job: &Job) -> Result<Child, Failure> {
    let mut c = job.belay(&["checkpoint", &job.dir().display().to_string()]);
    io("start", c.stdout(Stdio::null()).stderr(Stdio::null()).spawn())
}

/// The checkpoint command is killed: the job does not care.
pub(super) fn command_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "cmdkill", "16")?;
    for n in 0..rounds(6) {
        let mut c = started(&job)?;
        rng.pause(25);
        procs::kill_tree(c.id() as i32);
        io("wait", c.wait())?;
        job.progress(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
    }
    // A checkpoint that the dead command asked for may still be on its way; the next one waits for it or says so.
    let end = Instant::now() + LIMIT;
    while let Err(e) = job.checkpoint() {
        want(Instant::now() < end && e.contains("progress"), || {
            format!("checkpoint after killed commands: {e}")
        })?;
        std::thread::sleep(Duration::from_millis(20));
    }
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// The command ends while a checkpoint begins: there is a checkpoint with which it ends as it does, or none.
pub(super) fn command_ending(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let waited_for = format!("exec {}", place.programs().join("proc_vforkend").display());
    for round in 0..20 {
        let mut job = Job::new(place, "command_ending", user)?;
        // In one something is left behind, which goes on; in two the checkpoint waits until the end.
        let left_behind = "(sleep 0.5; echo left) & sleep 0.2; exit 5";
        let script = ["sleep 0.2; exit 5", left_behind, &waited_for, &waited_for][round % 4];
        job.launch(&[], &["sh".into(), "-c".into(), script.into()])?;
        job.answers(LIMIT)?;
        std::thread::sleep(Duration::from_millis(150));
        rng.pause(80);
        let taken = job.checkpoint_raw(&[])?;
        let status = job.wait(LIMIT)?;
        want(status.code() == Some(5), || format!("ended with {}", show(status)))?;
        let said = text(&taken);
        let ended = ["not running", "ended before", "is ending"].iter().any(|w| said.contains(w));
        want(taken.status.success() || ended, || format!("the checkpoint: {said}"))?;
        job.left_behind_within(LIMIT)?;
        if taken.status.success() {
            want(!said.contains(" 0 processes"), || {
                format!("round {round}: a checkpoint of nothing: {said}")
            })?;
            job.restart(&[])?;
            let status = job.wait(LIMIT)?;
            want(status.code() == Some(5), || {
                format!("round {round}: restarted, it ended with {}", show(status))
            })?;
            job.left_behind_within(LIMIT)?;
        }
    }
    Ok(())
}

/// The command is killed and leaves something behind: however often that is checkpointed, the last checkpoint of the
/// command itself stays, and is what a restart goes on from.
pub(super) fn left_behind(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "left_behind", user)?;
    let script = "sleep 100000 & echo started; sleep 100000";
    job.launch(&["--keep".into(), "1".into()], &["sh".into(), "-c".into(), script.into()])?;
    want(job.answers(LIMIT)?, || "the job has ended".into())?;
    let beside = || job.output_text().contains("started");
    let begin = Instant::now();
    while !beside() {
        want(begin.elapsed() < LIMIT, || "nothing was started".into())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    job.checkpoint()?;
    let command = job.status()?["root_pid"].as_i64().ok_or("no command")? as i32;
    procs::signal(command, libc::SIGKILL);
    let status = job.wait(LIMIT)?;
    want(!status.success(), || format!("ended with {}", show(status)))?;
    for _ in 0..3 {
        job.checkpoint()?;
    }
    let stopped = output(job.belay(&["stop", &job.dir().display().to_string()]), LIMIT)?;
    want(stopped.status.success(), || text(&stopped))?;
    job.restart(&[])?;
    want(job.answers(LIMIT)?, || format!("not restarted: {}", job.output_text()))?;
    let (state, said) = (job.status()?, job.output_text());
    want(state["state"] == "running", || format!("{}: {said}", state["state"]))?;
    want(said.contains("holds only what the command left behind"), || said.clone())?;
    job.kill_all()
}

/// The agent is killed in the middle of a checkpoint: the program goes on without it, and the last generation restarts.
pub(super) fn agent_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "agentkill", "16")?;
    for n in 0..rounds(6) {
        let agent = job.pid().ok_or("no job")?;
        let program = procs::tree(agent)
            .into_iter()
            .find(|p| is_program(*p))
            .ok_or("the program is not below the agent")?;
        let o = during_checkpoint(&job, &mut || rng.pause(40), |job| {
            // Only the agent, which is a child of the harness when the job was launched.
            let agent = agent_of(job, program)?;
            procs::signal(agent, libc::SIGKILL);
            Ok(())
        });
        // The command fails, or the checkpoint was faster; but it ends.
        o.map_err(|e| format!("round {n}: the agent was killed: {e}"))?;
        let end = Instant::now() + LIMIT;
        // The program goes on; in later rounds that of a restarted job.
        job.clear_beat()?;
        Beats::from_now(job.work.join("beat")).wait(|| {
            want(Instant::now() < end, || {
                let status = std::fs::read_to_string(format!("/proc/{program}/status")).unwrap_or_default();
                let state = status.lines().find(|l| l.starts_with("State")).unwrap_or("gone").to_owned();
                format!(
                    "round {n}: the program (pid {program}) does not go on after the agent's death: {state}; {}",
                    job.output_text()
                )
            })
        })?;
        want(!job.output_text().contains("FAIL"), || job.output_text())?;
        for (p, _) in procs::marked(&job.work) {
            procs::kill_tree(p);
        }
        // The front waits for the program as long as it runs.
        job.wait(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
        job.clear_beat()?;
        job.restart(&[])?;
        job.progress(LIMIT).map_err(|e| format!("round {n}: restart: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// The agent is killed, and who waits for it: the program goes on, and is not restarted beside itself. `belay restart`
/// names what is there, `belay run` ends it.
pub(super) fn unattended(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "unattended", user)?;
    // The children of the loop are younger than the checkpoint.
    let program = place.programs().join("fault_target").display().to_string();
    let script = format!("(while [ ! -e \"$BELAY_TEST_GO\" ]; do sleep 0.05; done &) ; exec {program} 1");
    let command = ["sh", "-c", &script].map(str::to_owned);
    job.launch(&[], &command)?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    let front = job.pid().ok_or("no job")?;
    let program = procs::tree(front).into_iter().find(|p| is_program(*p)).ok_or("no program")?;
    let agent = agent_of(&job, program)?;
    for pid in [agent, front] {
        procs::signal(pid, libc::SIGSTOP);
    }
    for pid in [agent, front] {
        procs::signal(pid, libc::SIGKILL);
    }
    job.wait(LIMIT)?;
    job.beats(LIMIT)?;
    let dir = job.dir().display().to_string();
    let o = output(job.belay(&["restart", &dir]), LIMIT)?;
    refused(&o, &[&format!("process {program} (fault_target)"), "of this job still run"])?;
    want(o.status.code() == Some(69), || text(&o))?;
    job.beats(LIMIT)?;
    let left: Vec<i32> = procs::marked(&job.work).into_iter().map(|(pid, _)| pid).collect();
    job.clear_beat()?;
    let run = ["run", "--ckpt-dir", &dir, "--", "sh", "-c", &script];
    job.start(job.belay(&run))?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    job.progress(LIMIT)?;
    let said = job.output_text();
    want(
        said.contains(&format!("process {program} (fault_target) of this job still runs")),
        || said,
    )?;
    let now = procs::marked(&job.work);
    let beside: Vec<&i32> = left.iter().filter(|pid| now.iter().any(|(other, _)| other == *pid)).collect();
    want(left.len() > 2 && beside.is_empty(), || {
        format!("{beside:?} of {left:?} are there")
    })?;
    job.verdict(false, LIMIT)
}

/// What lives on of a job binds its socket again while the restart waits for its end.
pub(super) fn rebinding(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    const PROGRAM: &str = "import os, socket, time
while True:
    if os.path.lexists('bound'): os.unlink('bound')
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.bind('bound')
    time.sleep(0.02)";
    let mut job = Job::new(place, "rebinding", user)?;
    let command = ["/usr/bin/python3", "-c", PROGRAM].map(str::to_owned);
    job.launch(&[], &command)?;
    let end = Instant::now() + LIMIT;
    while !job.work.join("bound").exists() {
        want(Instant::now() < end, || job.output_text())?;
        std::thread::sleep(Duration::from_millis(5));
    }
    job.checkpoint()?;
    let front = job.pid().ok_or("no job")?;
    let agent = procs::tree(front)
        .into_iter()
        .find(|p| *p != front && procs::comm(*p) == "belay");
    let both = [agent.ok_or("no agent")?, front];
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        both.iter().for_each(|pid| procs::signal(*pid, signal));
    }
    job.wait(LIMIT)?;
    let dir = job.dir().display().to_string();
    let run = ["run", "--ckpt-dir", &dir, "--", "/usr/bin/python3", "-c", PROGRAM];
    job.start(job.belay(&run))?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    job.kill_all()
}

/// Orphans make the next one and end while the agent stops the job: it collects them meanwhile, and takes hold of one that lives.
pub(super) fn orphans_ending(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    // On a busy machine the agent, too, has no processor for a while: it is to have fewer again soon.
    const MOST: usize = 1000;
    const SOON: Duration = Duration::from_secs(4);
    let mut job = Job::new(place, "orphans", user)?;
    job.launch(&[], &[place.programs().join("proc_chain").display().to_string()])?;
    job.progress(LIMIT)?;
    let front = job.pid().ok_or("no job")?;
    let agent = procs::tree(front)
        .into_iter()
        .find(|p| *p != front && procs::comm(*p) == "belay");
    let agent = agent.ok_or("no agent")?;
    let children = || std::fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).unwrap_or_default();
    for _ in 0..3 {
        let mut checkpoint = started(&job)?;
        let (watch, mut few) = (Watch::begin(), Duration::ZERO);
        while io("wait", checkpoint.try_wait())?.is_none() {
            let (now, since) = (children().split(' ').count(), watch.elapsed());
            if now < MOST {
                few = since;
            }
            let many = since.saturating_sub(few);
            want(many < SOON, || {
                format!("the agent has had {MOST} children and more for {many:?}, now {now}")
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    for _ in 0..rounds(5) {
        job.checkpoint()?;
        job.progress(LIMIT)?;
        job.crash_and_restart(LIMIT)?;
    }
    job.verdict(false, LIMIT)
}

fn is_program(pid: i32) -> bool {
    procs::comm(pid) == "fault_target"
}

/// The agent: the nearest ancestor of the program that is not the program itself.
fn agent_of(job: &Job, program: i32) -> Result<i32, Failure> {
    let mut p = program;
    while is_program(p) {
        p = procs::parent(p).ok_or_else(|| format!("the program ended: {}", job.output_text()))?;
    }
    want(p > 1 && p != std::process::id() as i32, || "the program has no agent".into())?;
    Ok(p)
}

/// The snapshot child is killed: the checkpoint fails, the program does not.
pub(super) fn snapshot_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "snapkill", "64")?;
    let agent = job.pid().ok_or("no job")?;
    let before = procs::tree(agent);
    // The child lives for some milliseconds: most kills find none.
    until_hit(12, |_| {
        let mut killed = false;
        let o = during_checkpoint(&job, &mut || rng.pause(5), |_| {
            let end = Instant::now() + Duration::from_millis(400);
            while Instant::now() < end && !killed {
                for p in procs::tree(agent).difference(&before) {
                    procs::signal(*p, libc::SIGKILL);
                    killed = true;
                }
            }
            Ok(())
        })?;
        let hit = !o.status.success();
        if hit {
            refused(&o, &["snapshot", "killed", "signal", "process", "application"])?;
        }
        job.progress(LIMIT)?;
        let temporary = io("list", std::fs::read_dir(job.dir().join("gen")))?
            .flatten()
            .filter(|e| e.file_name().to_string_lossy().starts_with('.'))
            .count();
        want(!hit || temporary == 0, || {
            format!("a failed checkpoint left {temporary} temporary directories")
        })?;
        Ok(hit)
    })?;
    job.checkpoint()?;
    comes_back(&mut job)?;
    job.verdict(false, LIMIT)
}

/// A process of the job is killed in the middle of a checkpoint: the checkpoint ends, belay goes on.
pub(super) fn rank_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    for n in 0..rounds(6) {
        let mut job = target(place, user, "rankkill", "8")?;
        let agent = job.pid().ok_or("no job")?;
        let child = procs::tree(agent)
            .into_iter()
            .filter(|p| is_program(*p))
            .max()
            .ok_or("no program")?;
        let o = during_checkpoint(&job, &mut || rng.pause(30), |_| {
            procs::signal(child, libc::SIGKILL);
            Ok(())
        });
        drop(o); // succeeded or failed, but it ended
        let s = job.wait(LIMIT).map_err(|e| format!("round {n}: {e}"))?;
        want(!s.success(), || {
            format!(
                "round {n}: the program did not notice its child's death: {}",
                job.output_text()
            )
        })?;
        job.left_behind()?; // the agent finishes its checkpoint first
        job.clear_beat()?;
        job.restart(&["--generation", "1"])?;
        job.progress(LIMIT).map_err(|e| format!("round {n}: restart: {e}"))?;
        job.verdict(false, LIMIT)?;
    }
    Ok(())
}

/// Everything is killed in the middle of a checkpoint: the previous generation restarts.
pub(super) fn all_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = target(place, user, "allkill", "32")?;
    for n in 0..rounds(6) {
        let mut c = started(&job)?;
        rng.pause(80);
        comes_back(&mut job).map_err(|e| format!("round {n}: {e}"))?;
        io("wait", c.wait())?;
    }
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}
