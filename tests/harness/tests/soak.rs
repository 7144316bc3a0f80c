//! Many checkpoints of a small program in one long run: storage stays within its limit, the agent stays as large as it
//! was and does no more for each, and every hundredth generation restarts.
//!
//! BELAY_SOAK (300) checkpoints. What is restarted is a copy of the job directory, beside the job, whose agent lives
//! from the first checkpoint to the last.

use belay_tests::expect::want;
use belay_tests::job::{output, show, text, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::{procs, Failure};
use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(240);
/// Most bytes of chunks and generations, as `belay launch` is told.
const QUOTA: u64 = 64 << 20;
const PROGRAM: &str = "mem_diff";
/// The table of hashes has grown to its full size, and the allocator too.
const GROWN: u64 = 100;

/// Number of checkpoints.
fn length() -> u64 {
    std::env::var("BELAY_SOAK").ok().and_then(|v| v.parse().ok()).unwrap_or(300)
}

fn bytes_in(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => bytes_in(&e.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .sum()
}

/// What the agent takes.
#[derive(Debug, Clone, Copy)]
struct Agent {
    /// Resident anonymous memory.
    kib: u64,
    descriptors: usize,
    /// Processor time in all.
    ticks: u64,
}

impl Agent {
    fn of(job: &Job) -> Result<Self, Failure> {
        let s = job.status()?;
        let pid = s["agent"]["host_pid"].as_i64().or(s["agent"]["pid"].as_i64());
        let pid = pid.ok_or_else(|| format!("no agent in the status: {s}"))?;
        let read =
            |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).map_err(|e| format!("the agent's {file}: {e}"));
        let (status, stat) = (read("status")?, read("stat")?);
        let rss = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
        let times = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(11)
            .take(2);
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(|e| format!("descriptors of the agent: {e}"))?;
        Ok(Self {
            kib: rss
                .and_then(|l| l.split_whitespace().next()?.parse().ok())
                .ok_or("no RssAnon")?,
            descriptors: fds.count(),
            ticks: times.filter_map(|t| t.parse::<u64>().ok()).sum(),
        })
    }
}

/// How often process `pid` has slept of its own accord; the program does so once a round.
fn naps(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let name = text.lines().find_map(|l| l.strip_prefix("Name:"))?.trim();
    let count = text.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?;
    (name == PROGRAM).then(|| count.trim().parse().ok()).flatten()
}

/// Restarts the newest generation from a copy of the job directory, beside the job, and kills it again once the program
/// has gone through some rounds.
fn restart_copy(job: &Job) -> Result<(), Failure> {
    // Chunks and generations never change: links do.
    let script = "rm -rf copy && mkdir -m 700 copy copy/log && cp -al job/gen job/chunks copy && cp -a job/job.json copy";
    let o = output(job.command(&["sh", "-c", script].map(String::from)), PATIENCE)?;
    want(o.status.success(), || format!("copy the job directory: {}", text(&o)))?;
    let said = job.work.join("copy.out");
    let out = File::create(&said).map_err(|e| format!("create {}: {e}", said.display()))?;
    let err = out.try_clone().map_err(|e| format!("duplicate {}: {e}", said.display()))?;
    let mut c = job.belay(&["restart", &job.work.join("copy").display().to_string()]);
    let mut front = c
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .spawn()
        .map_err(|e| format!("start belay restart: {e}"))?;
    let pid = front.id() as i32;
    let end = Instant::now() + PATIENCE;
    let mut first = None;
    let result = loop {
        if let Ok(Some(s)) = front.try_wait() {
            break Err(format!("ended with {}", show(s)));
        }
        // Children that the program forks sleep less.
        let now = procs::tree(pid).into_iter().filter_map(naps).max();
        match (first, now) {
            (Some(first), Some(now)) if now >= first + 30 => break Ok(()),
            (None, now) => first = now,
            _ => {}
        }
        if Instant::now() > end {
            break Err(format!("no progress ({first:?}, {now:?})"));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    procs::kill_tree(pid);
    front.wait().map_err(|e| format!("wait for belay restart: {e}"))?;
    std::fs::remove_dir_all(job.work.join("copy")).map_err(|e| format!("remove the copy: {e}"))?;
    result.map_err(|e| format!("{e}: {}", std::fs::read_to_string(&said).unwrap_or_default()))
}

fn soak(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    let all = length();
    let mut job = Job::new(place, "soak", user)?;
    job.set("BELAY_TEST_LONG", "1");
    let program = place.programs().join(PROGRAM).display().to_string();
    let options = ["--keep", "3", "--max-bytes", "64M"].map(String::from);
    job.launch(&options, &[program, "alone".into()])?;
    job.progress(PATIENCE)?;
    let (mut grown, mut most, mut restarts): (Option<Agent>, _, _) = (None, 0, 0);
    let (mut taking, mut half): (_, Option<(u64, Agent)>) = (Duration::ZERO, None);
    for n in 1..=all {
        rng.pause(5);
        let begin = Instant::now();
        job.checkpoint().map_err(|e| format!("checkpoint {n}: {e}"))?;
        taking += begin.elapsed();
        if n % 20 == 0 {
            let stored = bytes_in(&job.dir().join("chunks")) + bytes_in(&job.dir().join("gen"));
            most = most.max(stored);
            want(stored <= QUOTA, || format!("checkpoint {n}: {stored} bytes are stored"))?;
        }
        if n % 20 == 0 && n >= GROWN {
            let now = Agent::of(&job)?;
            let then = *grown.get_or_insert(now);
            // Clients that have just got their answer are still there for a moment.
            want(now.descriptors <= then.descriptors + 3 && now.kib <= then.kib + 1024, || {
                format!("checkpoint {n}: the agent has {now:?}; after checkpoint {GROWN} it had {then:?}")
            })?;
            let at_half = n >= all / 2 && half.is_none();
            if at_half {
                half = Some((n, now));
            }
            if n == GROWN || at_half || n == all {
                let each = taking.as_secs_f64() * 1e3 / n as f64;
                println!(
                    "    {}: {n} checkpoints of {each:.1} ms: {now:?}, at most {most} bytes stored",
                    user.name()
                );
            }
        }
        if n % 100 == 0 {
            restart_copy(&job).map_err(|e| format!("restart of generation {n}: {e}"))?;
            restarts += 1;
        }
    }
    let (end, log) = (Agent::of(&job)?, bytes_in(&job.dir().join("log")));
    println!("    {}: {restarts} restarts, {log} bytes of log", user.name());
    if let (Some(grown), Some((middle, half))) = (grown, half.filter(|(n, _)| *n > GROWN)) {
        let each = |from: Agent, to: Agent, count: u64| (to.ticks - from.ticks) as f64 / count.max(1) as f64;
        let (early, late) = (each(grown, half, middle - GROWN), each(half, end, all - middle));
        println!(
            "    {}: {early:.2} and then {late:.2} ticks of the agent for each",
            user.name()
        );
        // Three times as much, and half a second in all, is what the machine's other work can make of it.
        want(late <= 3.0 * early + 50.0 / (all - middle).max(1) as f64, || {
            format!("a checkpoint took the agent {early} ticks early and {late} ticks late")
        })?;
    }
    job.verdict(false, PATIENCE)
}

fn main() {
    let mut target = Target::new("soak", &[PROGRAM]);
    println!("{} checkpoints", length());
    target.by_user("checkpoints", |_| true, soak);
    target.run();
}
