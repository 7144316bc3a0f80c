//! `belay restart --lazy`: memory is filled while the program runs, which does everything with it meanwhile; the process
//! that fills it is slowed, killed, or finds damage.

use belay_tests::expect::want;
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{am_root, Place, User};
use belay_tests::procs;
use belay_tests::rng::Rng;
use belay_tests::runner::rounds;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(90);
/// Of the program, MiB.
const SIZE: &str = "256";
/// Exit status where a checkpoint is damaged.
const DAMAGED: i32 = 65;

/// Whether memory can be filled while a job of root's runs.
fn is_possible() -> bool {
    const CAP_SYS_PTRACE: u64 = 19;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let caps = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let caps = caps.and_then(|c| u64::from_str_radix(c.trim(), 16).ok()).unwrap_or(0);
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let initial = map.split_whitespace().collect::<Vec<_>>() == ["0", "0", "4294967295"];
    am_root() && initial && caps >> CAP_SYS_PTRACE & 1 == 1
}

/// A job of which one generation is there.
fn checkpointed(place: &Place, user: User, label: &str, threads: &str) -> Result<Job, Failure> {
    let mut job = Job::new(place, label, user)?;
    let program = place.programs().join("mem_lazy").display().to_string();
    let forks = forks(&job).display().to_string();
    job.launch(&[], &[program, SIZE.into(), threads.into(), forks])?;
    job.progress(LIMIT)?;
    job.checkpoint()?;
    Ok(job)
}

/// While this file is there, the program makes children. What a process has in common with its children at a checkpoint
/// is read at once.
fn forks(job: &Job) -> PathBuf {
    job.dir().with_file_name("forks")
}

fn make_children(job: &Job) -> Result<(), Failure> {
    std::fs::write(forks(job), "").map_err(|e| e.to_string())
}

/// Takes a checkpoint of a job without children.
fn checkpoint(job: &mut Job) -> Result<(), Failure> {
    let _ = std::fs::remove_file(forks(job));
    let end = Instant::now() + LIMIT;
    let is_child = |p: i32| procs::comm(p) == "mem_lazy" && procs::parent(p).is_some_and(|up| procs::comm(up) == "mem_lazy");
    while job.pid().map(procs::tree).unwrap_or_default().into_iter().any(is_child) {
        want(Instant::now() < end && !job.has_ended()?, || job.output_text())?;
    }
    job.checkpoint()
}

/// The processes that fill memory: the one that stands by, then its child.
fn pagers(job: &Job) -> Vec<i32> {
    let all = job.pid().map(procs::tree).unwrap_or_default();
    let is = |pid: i32| procs::comm(pid) == "belay-pager";
    let mut found: Vec<i32> = all.into_iter().filter(|pid| is(*pid)).collect();
    found.sort_by_key(|pid| procs::parent(*pid).is_some_and(is));
    found
}

/// Restarts the job; returns when somebody fills its memory, with the two processes.
fn restart(job: &mut Job) -> Result<[i32; 2], Failure> {
    job.kill_all()?;
    job.clear_beat()?;
    make_children(job)?;
    job.restart(&["--lazy"])?;
    let end = Instant::now() + LIMIT;
    loop {
        if let [guard, pager] = pagers(job)[..] {
            return Ok([guard, pager]);
        }
        want(Instant::now() < end && !job.has_ended()?, || {
            format!("nobody fills memory: {}", job.output_text())
        })?;
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Lets the process that fills run for a tenth of the time while `f` runs.
fn slowed<T>(pager: i32, f: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                procs::signal(pager, libc::SIGSTOP);
                std::thread::sleep(Duration::from_millis(5));
                procs::signal(pager, libc::SIGCONT);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let done = f();
        over.store(true, Ordering::Relaxed);
        done
    })
}

/// Nobody fills memory any more.
fn filled(job: &mut Job) -> Result<(), Failure> {
    let end = Instant::now() + LIMIT;
    while !pagers(job).is_empty() {
        want(Instant::now() < end && !job.has_ended()?, || {
            format!("memory is not filled: {}; {}", job.stuck(), job.output_text())
        })?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Everything is done with memory while it is filled slowly, and nothing of the filling is left then. Checkpoints that
/// are asked for meanwhile wait.
fn changes(threads: &str, place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, &format!("changes-{threads}"), threads)?;
    for round in 0..rounds(4) {
        let [_, pager] = restart(&mut job)?;
        if rng.below(2) == 0 {
            slowed(pager, || filled(&mut job)).map_err(|e| format!("round {round}: {e}"))?;
        }
        job.progress(LIMIT).map_err(|e| format!("round {round}: {e}"))?;
        if rng.below(2) == 0 {
            filled(&mut job)?;
        }
        checkpoint(&mut job).map_err(|e| format!("round {round}: {e}"))?;
        want(pagers(&job).is_empty(), || {
            "a checkpoint was taken while memory was filled".into()
        })?;
        let map = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
        for pid in job.pid().map(procs::tree).unwrap_or_default() {
            let registered = map(pid).lines().any(|l| l.starts_with("VmFlags:") && l.contains(" um"));
            want(!registered, || format!("memory of process {pid} is registered yet"))?;
        }
    }
    job.verdict(false, LIMIT)
}

/// The process that fills, or the one that stands by, is killed at some moment: the program never reads zeros, but is
/// ended, and the next restart goes on.
fn killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "killed", "2")?;
    let mut caught = 0;
    for round in 0..rounds(8) {
        let both = restart(&mut job)?;
        std::thread::sleep(Duration::from_micros(rng.below(150_000)));
        let which = both[usize::from(round % 4 != 3)];
        let living = procs::state(which).is_some_and(|s| s != 'Z');
        procs::signal(which, libc::SIGKILL);
        if !living {
            job.progress(LIMIT)?;
            continue;
        }
        // It may have ended just now.
        let end = Instant::now() + LIMIT;
        while !job.has_ended()? && !pagers(&job).is_empty() {
            want(Instant::now() < end, || format!("round {round}: {}", job.stuck()))?;
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        let said = job.output_text();
        want(!said.contains("FAIL"), || format!("round {round}: {said}"))?;
        if job.has_ended()? {
            let status = job.wait(LIMIT)?;
            want(said.contains("fill memory") && !status.success(), || {
                format!("round {round}: {}: {said}", show(status))
            })?;
            job.left_behind()?;
            caught += 1;
        }
    }
    want(caught > 0, || "nobody was killed early enough".into())?;
    job.clear_beat()?;
    job.kill_all()?;
    job.restart(&["--lazy"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// The agent is killed while memory is filled: that goes on to the end, and so does the program.
fn agent_killed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "agent", "2")?;
    for round in 0..rounds(3) {
        let pager = hold(&mut job)?;
        let front = job.pid().unwrap_or(0);
        let (_, agent) = procs::program_and_agent(front, "mem_lazy").ok_or("no agent")?;
        std::thread::sleep(Duration::from_micros(rng.below(20_000)));
        procs::signal(agent, libc::SIGKILL);
        std::thread::sleep(Duration::from_micros(rng.below(20_000)));
        procs::signal(pager, libc::SIGCONT);
        filled(&mut job).map_err(|e| format!("round {round}: {e}"))?;
        job.clear_beat()?;
        job.progress(LIMIT).map_err(|e| format!("round {round}: {e}"))?;
    }
    job.verdict(false, LIMIT)
}

/// Agent and then the process that fills are killed: nothing goes on.
fn both_killed(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "both", "2")?;
    let pager = hold(&mut job)?;
    let front = job.pid().unwrap_or(0);
    let (_, agent) = procs::program_and_agent(front, "mem_lazy").ok_or("no agent")?;
    std::thread::sleep(Duration::from_millis(20));
    procs::signal(agent, libc::SIGKILL);
    std::thread::sleep(Duration::from_millis(20));
    procs::signal(pager, libc::SIGKILL);
    let status = job.wait(LIMIT)?;
    let said = job.output_text();
    want(!said.contains("FAIL") && !status.success(), || {
        format!("{}: {said}", show(status))
    })?;
    job.left_behind()?;
    job.clear_beat()?;
    job.restart(&["--lazy"])?;
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// All of belay's are killed at once while the program stands still: it does not go on without its memory.
fn all_killed(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "all", "2")?;
    hold(&mut job)?;
    let front = job.pid().unwrap_or(0);
    let (program, agent) = procs::program_and_agent(front, "mem_lazy").ok_or("no agent")?;
    let all = procs::tree(program);
    all.iter().for_each(|pid| procs::signal(*pid, libc::SIGSTOP));
    [pagers(&job), vec![agent]]
        .concat()
        .iter()
        .for_each(|pid| procs::signal(*pid, libc::SIGKILL));
    std::thread::sleep(Duration::from_millis(500));
    all.iter().for_each(|pid| procs::signal(*pid, libc::SIGCONT));
    let status = job.wait(LIMIT)?;
    let said = job.output_text();
    want(!said.contains("FAIL") && !status.success(), || {
        format!("{}: {said}", show(status))
    })
}

/// The chunks of the job directory.
fn chunks(job: &Job) -> Vec<PathBuf> {
    let files = std::fs::read_dir(job.dir().join("chunks")).into_iter().flatten().flatten();
    files
        .map(|f| f.path())
        .filter(|p| p.extension().is_some_and(|e| e == "bpg"))
        .collect()
}

/// A bit is flipped in each chunk of the newest generation only: the program is ended, the generation marked, and an
/// older one used.
fn damaged(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "damaged", "1")?;
    let before = chunks(&job);
    std::thread::sleep(Duration::from_millis(300));
    job.checkpoint()?;
    let new: Vec<PathBuf> = chunks(&job).into_iter().filter(|c| !before.contains(c)).collect();
    want(!new.is_empty(), || "the second checkpoint wrote nothing".into())?;
    job.kill_all()?;
    for path in &new {
        let chunk = std::fs::OpenOptions::new().read(true).write(true).open(path);
        let chunk = chunk.map_err(|e| e.to_string())?;
        // Somewhere in its pages, which come first.
        let length = chunk.metadata().map_err(|e| e.to_string())?.len();
        for _ in 0..3 {
            let at = rng.below(length / 4096 * 4000);
            let mut byte = [0];
            chunk.read_exact_at(&mut byte, at).map_err(|e| e.to_string())?;
            byte[0] ^= 1 << rng.below(8);
            chunk.write_all_at(&byte, at).map_err(|e| e.to_string())?;
        }
    }
    job.clear_beat()?;
    job.restart(&["--lazy"])?;
    let mut said = String::new();
    // Damage of what is read at once is found before anything runs, and the older one used by the same restart.
    let end = Instant::now() + LIMIT;
    while !job.has_ended()? && !job.output_text().contains("is damaged") {
        want(Instant::now() < end, || format!("no damage found: {}", job.output_text()))?;
        std::thread::sleep(Duration::from_millis(5));
    }
    if job.has_ended()? {
        let status = job.wait(LIMIT)?;
        said = job.output_text();
        want(status.code() == Some(DAMAGED), || format!("{}: {said}", show(status)))?;
        want(
            said.contains("generation 2") && said.contains("pages-") && said.contains("checksum"),
            || said.clone(),
        )?;
        want(!said.contains("FAIL"), || said.clone())?;
        job.left_behind()?;
        job.clear_beat()?;
        job.restart(&["--lazy"])?;
    }
    job.progress(LIMIT)?;
    let again = job.output_text();
    want(again.contains("using generation 1"), || format!("{said}; {again}"))?;
    filled(&mut job)?;
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// When all is filled, nothing of the checkpoint is needed any more.
fn removed(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "removed", "2")?;
    restart(&mut job)?;
    filled(&mut job)?;
    for dir in ["gen", "chunks"] {
        std::fs::remove_dir_all(job.dir().join(dir)).map_err(|e| e.to_string())?;
        std::fs::create_dir(job.dir().join(dir)).map_err(|e| e.to_string())?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

/// Where memory cannot be filled later, it is read at once, and the user is told why.
fn at_once(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "at-once", "2")?;
    job.kill_all()?;
    job.clear_beat()?;
    job.restart(&["--lazy"])?;
    job.progress(LIMIT)?;
    want(pagers(&job).is_empty(), || "somebody fills memory".into())?;
    let said = job.output_text();
    want(said.contains("--lazy: ") && said.contains("CAP_SYS_PTRACE"), || said.clone())?;
    job.checkpoint()?;
    job.verdict(false, LIMIT)
}

/// Restarts the job and stops the process that fills its memory, once the job is served; again where that was done before.
fn hold(job: &mut Job) -> Result<i32, Failure> {
    let end = Instant::now() + LIMIT;
    loop {
        let [_, pager] = restart(job)?;
        want(slowed(pager, || job.answers(LIMIT))?, || job.output_text())?;
        procs::signal(pager, libc::SIGSTOP);
        while !matches!(procs::state(pager), None | Some('T' | 'Z')) {
            std::thread::sleep(Duration::from_micros(100));
        }
        if procs::state(pager) == Some('T') {
            return Ok(pager);
        }
        want(Instant::now() < end, || "memory is filled too fast".into())?;
    }
}

/// What is asked of a job while its memory is filled: a checkpoint waits, while the job answers, and it ends when it is
/// told to. A second restart while the first is filled works.
fn commands(place: &Place, user: User, _: &mut Rng) -> Result<(), Failure> {
    let mut job = checkpointed(place, user, "commands", "2")?;
    let dir = job.dir().display().to_string();
    let pager = hold(&mut job)?;
    let _ = std::fs::remove_file(forks(&job));
    let asked = job
        .belay(&["checkpoint", &dir])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut asked = asked.map_err(|e| e.to_string())?;
    std::thread::sleep(Duration::from_millis(500));
    let early = asked.try_wait().map_err(|e| e.to_string())?;
    want(early.is_none(), || format!("a checkpoint did not wait: {early:?}"))?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    procs::signal(pager, libc::SIGCONT);
    let o = asked.wait_with_output().map_err(|e| e.to_string())?;
    want(o.status.success() && pagers(&job).is_empty(), || text(&o))?;
    hold(&mut job)?;
    want(job.answers(LIMIT)?, || job.output_text())?;
    let o = output(job.belay(&["stop", &dir]), LIMIT)?;
    want(o.status.success(), || text(&o))?;
    job.wait(LIMIT)?;
    job.left_behind()?;
    for _ in 0..3 {
        restart(&mut job)?;
    }
    job.progress(LIMIT)?;
    job.verdict(false, LIMIT)
}

fn main() {
    let mut target = Target::new("lazy", &["mem_lazy"]);
    target.by_user("at_once", |u| u == User::Ordinary, at_once);
    if is_possible() {
        let root = |u| u == User::Root;
        target.by_user("changes_one", root, |p, u, r| changes("1", p, u, r));
        target.by_user("changes", root, |p, u, r| changes("3", p, u, r));
        target.by_user("killed", root, killed);
        target.by_user("agent_killed", root, agent_killed);
        target.by_user("both_killed", root, both_killed);
        target.by_user("all_killed", root, all_killed);
        target.by_user("damaged", root, damaged);
        target.by_user("removed", root, removed);
        target.by_user("commands", root, commands);
    } else {
        println!("skipped: no userfaultfd that stops the kernel here");
    }
    target.run();
}
