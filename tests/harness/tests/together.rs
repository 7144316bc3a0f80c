//! Checkpoints of a job on several hosts that fail, one test for each cause: the program goes on, and the next
//! checkpoint is taken as soon as its cause is gone, or is refused with the true reason.

use belay_tests::across::Job;
use belay_tests::agents::agent;
use belay_tests::build::Kind;
use belay_tests::expect::want;
use belay_tests::job::{output, text};
use belay_tests::place::Place;
use belay_tests::procs::signal;
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::traced::Traced;
use belay_tests::Failure;
use std::process::Output;
use std::time::{Duration, Instant};

#[path = "together/gates.rs"]
mod gates;
#[path = "together/random.rs"]
mod random;
#[path = "together/verbs.rs"]
mod verbs;

/// A checkpoint that fails has its end by then, also one that waits until an agent is taken for lost.
const END: Duration = Duration::from_secs(120);
/// Bytes that the chunks of one part may take. Among the programs that are stored is belay itself, which stands in for ssh:
/// 62 MiB without optimisation.
const ROOM: &str = "size=128m,mode=700";
/// Failures in a row.
const FAILURES: usize = 3;

/// net_alone on h1 and h2, a third host is there; the chunks of both parts have little room.
struct Pair {
    job: Job,
}

impl Pair {
    fn new(place: &Place, label: &str) -> Result<Self, Failure> {
        let mut job = Job::of(place, &format!("together-{label}"), Kind::C, 2, 3)?;
        let program = job.program(place, "net/net_alone")?;
        job.launch_words(&[&program, "h2"])?;
        let mut pair = Self { job };
        pair.goes_on()?;
        for part in [0, 1] {
            let at = pair.chunks(part);
            let mount = format!("mkdir -p -m 700 {at} && mount -t tmpfs -o {ROOM} tmpfs {at}");
            pair.on(part, &mount)?;
        }
        pair.job.checkpoint()?;
        Ok(pair)
    }

    fn chunks(&self, part: usize) -> String {
        format!("{}/chunks", self.job.dir_of(part))
    }

    fn on(&self, part: usize, script: &str) -> Result<(), Failure> {
        self.job.on_host(part + 1, &["sh", "-c", script]).map(drop)
    }

    /// Both processes do something after this call.
    fn goes_on(&mut self) -> Result<(), Failure> {
        ["beat", "beat.below"].iter().try_for_each(|file| self.job.progress_of(file))
    }

    /// `belay checkpoint`, which has an end.
    fn take(&self) -> Result<Output, Failure> {
        let (begin, dir) = (Instant::now(), self.job.dir());
        let o = output(self.job.command(1, &[&self.job.belay, "checkpoint", "--quiet", &dir]), END)?;
        println!("{} ms: {}", begin.elapsed().as_millis(), text(&o).trim());
        Ok(o)
    }

    /// A checkpoint that fails for one of these reasons.
    fn fails(&self, reasons: &[&str]) -> Result<(), Failure> {
        let before = self.job.newest();
        let o = self.take()?;
        let said = text(&o).to_lowercase();
        want(!o.status.success() && reasons.iter().any(|r| said.contains(r)), || {
            format!("not one of {reasons:?}: {}", text(&o))
        })?;
        want(self.job.newest() == before, || {
            format!("a generation all the same: {}", text(&o))
        })
    }

    /// The next checkpoint is there, the job restarts from it on other hosts, and all goes on to a good end.
    fn ends_well(mut self) -> Result<(), Failure> {
        let before = self.job.newest();
        self.job.checkpoint().map_err(|e| format!("when the cause is gone: {e}"))?;
        let newest = self.job.newest();
        want(newest > before, || format!("generation {newest} after {before}"))?;
        self.comes_back()?;
        self.job.checkpoint().map_err(|e| format!("after the restart: {e}"))?;
        self.job.verdict()
    }

    fn comes_back(&mut self) -> Result<(), Failure> {
        self.job.crash();
        for part in [0, 1] {
            // The others see it too, from now on.
            let at = self.chunks(part);
            let share = format!("! mountpoint -q {at} || (cp -a {at} {at}.out && umount {at} && rmdir {at} && mv {at}.out {at})");
            self.on(part, &share)?;
        }
        for file in ["beat", "beat.below"] {
            belay_tests::beat::forget(&self.job.work.join(file))?;
        }
        self.job.start_restart()?;
        self.goes_on()
    }
}

/// The disk is full for these parts.
fn full(place: &Place, parts: &[usize]) -> Result<(), Failure> {
    let mut pair = Pair::new(place, &format!("full{}", parts.len() * 2 + parts[0]))?;
    for part in parts {
        let filler = format!("cat /dev/zero > {}/filler; true", pair.chunks(*part));
        pair.on(*part, &filler)?;
    }
    for n in 0..FAILURES {
        pair.fails(&["no space"]).map_err(|e| format!("failure {n}: {e}"))?;
        pair.goes_on().map_err(|e| format!("after failure {n}: {e}"))?;
    }
    for part in parts {
        pair.on(*part, &format!("rm {}/filler", pair.chunks(*part)))?;
    }
    pair.ends_well()
}

/// Something is refused at this part: somebody else traces its program.
fn refused(place: &Place, part: usize) -> Result<(), Failure> {
    let mut pair = Pair::new(place, &format!("refused{part}"))?;
    let program = pair.job.work.join("program").display().to_string();
    let is_it = |p: &i32| std::fs::read_to_string(format!("/proc/{p}/comm")).is_ok_and(|c| c.trim() == "program");
    let found = pair.job.hosts.find(part + 1, &program).into_iter().find(is_it);
    let traced = Traced::running(found.ok_or("no program")?)?;
    for n in 0..FAILURES {
        pair.fails(&["traced"]).map_err(|e| format!("failure {n}: {e}"))?;
        pair.goes_on().map_err(|e| format!("after failure {n}: {e}"))?;
    }
    drop(traced);
    pair.ends_well()
}

/// The agent of the part is killed: a checkpoint without it is refused by the name of its host, however often, and the
/// one before restarts.
fn killed(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut pair = Pair::new(place, "killed")?;
    signal(agent(&pair.job, 1)?, libc::SIGKILL);
    for n in 0..FAILURES {
        pair.fails(&["is lost", "is gone", "connection"])
            .map_err(|e| format!("failure {n}: {e}"))?;
    }
    pair.job.says("the part of the job on h2 is lost")?;
    pair.fails(&["the part of the job on h2 is lost; end the job and restart it"])?;
    pair.goes_on()?;
    pair.comes_back()?;
    pair.ends_well()
}

/// The agent of the part stands still, before the checkpoint begins: it is taken for lost, and counts again when it is back.
fn stopped(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut pair = Pair::new(place, "stopped")?;
    let its = agent(&pair.job, 1)?;
    signal(its, libc::SIGSTOP);
    let failed = pair.fails(&["is lost", "is gone", "cannot be reached"]);
    signal(its, libc::SIGCONT);
    failed?;
    pair.goes_on()?;
    want(pair.job.take()?, || "the job has ended".into())?;
    pair.ends_well()
}

/// The agent of this part hangs and still has its connections: the others do not wait for it for ever, their programs
/// go on, and it counts again when it goes on.
fn hangs(place: &Place, part: usize) -> Result<(), Failure> {
    let mut pair = Pair::new(place, &format!("hangs{part}"))?;
    let halted = Traced::halted(agent(&pair.job, part)?)?;
    pair.fails(&["has not answered"])?;
    pair.goes_on()?;
    drop(halted);
    want(pair.job.take()?, || "the job has ended".into())?;
    pair.ends_well()
}

/// The host of the part is cut off, and joined again: its connection is another by then.
fn cut(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut pair = Pair::new(place, "cut")?;
    pair.job.hosts.cut(2, true)?;
    let failed = pair.fails(&["is lost", "is gone", "cannot be reached"]);
    pair.job.hosts.cut(2, false)?;
    failed?;
    let begin = Instant::now();
    // Its agent has given the root up, or is back: what is said is true either way.
    loop {
        let o = pair.take()?;
        if o.status.success() {
            return pair.ends_well();
        }
        want(text(&o).contains("h2 is lost") || text(&o).contains("moment"), || text(&o))?;
        if begin.elapsed() > END / 2 {
            pair.comes_back()?;
            return pair.ends_well();
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn main() {
    let mut target = Target::over_hosts("together");
    target.once("full::root", |p, _| full(p, &[0]));
    target.once("full::part", |p, _| full(p, &[1]));
    target.once("full::everywhere", |p, _| full(p, &[0, 1]));
    target.once("refused::root", |p, _| refused(p, 0));
    target.once("refused::part", |p, _| refused(p, 1));
    target.once("killed", killed);
    target.once("stopped", stopped);
    target.once("hangs::part", |p, _| hangs(p, 1));
    target.once("cut", cut);
    target.once("gates::taken", |p, _| gates::taken(p, "here"));
    target.once("gates::taken_of_several", |p, _| gates::taken(p, "there kids"));
    target.once("gates::taken_in_rounds", |p, _| gates::taken(p, "here talks"));
    target.once("gates::taken_in_rounds_of_several", |p, _| {
        gates::taken(p, "there talks kids")
    });
    for side in ["here", "there"] {
        let puts_off = move |p: &Place, words: &str, reason| gates::put_off(p, &format!("{side} {words}"), reason);
        target.once(&format!("gates::late_{side}"), move |p, _| {
            puts_off(p, "late close ready", "has not come to rest within 0.5 s")
        });
        target.once(&format!("gates::says_no_{side}"), move |p, _| {
            puts_off(
                p,
                "refuses close ready",
                "libgate_test.so: the test library has something better to do",
            )
        });
        for edge in ["asked", "ready", "answered"] {
            target.once(&format!("gates::agent_dies_{side}::{edge}"), move |p, _| {
                gates::agent_dies(p, &format!("{side} agent close {edge} 9"))
            });
        }
        target.once(&format!("gates::rebuild_refused_{side}"), move |p, _| {
            gates::rebuild_refused(p, &format!("{side} refuses rebuild ready 9"))
        });
    }
    for (name, parts, all, local) in [("two", 2, 3, false), ("three", 3, 5, false), ("tiers", 3, 4, true)] {
        let shape = random::Shape { name, parts, all, local };
        target.once(&format!("random::{name}"), move |p, r| random::faults(p, shape, r));
    }
    target.once("verbs", verbs::on_hosts);
    target.once("verbs_managed", verbs::managed);
    target.once("verbs_libfabric", verbs::libfabric);
    target.at_a_time(3);
    target.first(&["random", "hangs"]);
    target.run();
}
