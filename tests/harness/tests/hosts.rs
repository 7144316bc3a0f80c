//! Jobs over several hosts: Open MPI and MPICH through ssh, checkpointed at random moments, killed everywhere, restarted on the same and on other hosts; a lost agent.
//!
//! BELAY_HOSTS_ROUNDS (3) restarts in each test.

use belay_tests::build::{build, Kind};
use belay_tests::expect::want;
use belay_tests::hosts::{serve_if_asked, unavailable, Hosts};
use belay_tests::job::{output, show, text};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::s3::{Server, CREDENTIALS};
use belay_tests::stepper::{step_each, Verdict};
use belay_tests::target::{or_end, Target};
use belay_tests::Failure;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything takes here, also where much else runs.
const LIMIT: Duration = Duration::from_secs(180);

#[path = "hosts/durable.rs"]
mod durable;

/// A job on hosts.
struct Job {
    hosts: Hosts,
    work: PathBuf,
    belay: String,
    front: Option<Child>,
    outputs: u32,
    /// Hosts that the job uses, and how many there are.
    used: usize,
    all: usize,
    /// The host on which the job was started last.
    root: usize,
    kind: Kind,
    /// More options of `belay launch`.
    options: Vec<String>,
}

impl Job {
    /// A job on `used` of `all` hosts.
    fn new(place: &Place, label: &str, used: usize, all: usize) -> Result<Self, Failure> {
        Self::of(place, label, Kind::OpenMpi, used, all)
    }

    fn of(place: &Place, label: &str, kind: Kind, used: usize, all: usize) -> Result<Self, Failure> {
        let work = place.work(label, User::Root)?;
        // Everything that hosts share lies in one directory.
        for name in ["belay", "belay-inject", "belay-restorer"] {
            let to = work.join("bin").join(name);
            std::fs::create_dir_all(work.join("bin")).map_err(|e| e.to_string())?;
            std::fs::copy(place.bin().join(name), &to).map_err(|e| format!("copy {name}: {e}"))?;
        }
        Ok(Self {
            hosts: Hosts::new(&work, all)?,
            belay: work.join("bin/belay").display().to_string(),
            work,
            front: None,
            outputs: 0,
            used,
            all,
            root: 1,
            kind,
            options: Vec::new(),
        })
    }

    fn command(&self, host: usize, words: &[&str]) -> Command {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let mut c = self.hosts.command(host, &words);
        c.env("BELAY_TEST_GO", self.work.join("go"))
            .env("BELAY_TEST_BEAT", self.work.join("beat"));
        c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        c.env("OMPI_MCA_mpi_yield_when_idle", "1").env("HWLOC_COMPONENTS", "-gl");
        c.envs(CREDENTIALS);
        if self.kind == Kind::Mpich {
            c.env("BELAY_TEST_EARLY", "1");
        }
        c
    }

    fn dir(&self) -> String {
        self.work.join("job").display().to_string()
    }

    fn out(&self) -> PathBuf {
        self.work.join(format!("out.{}", self.outputs))
    }

    fn start(&mut self, words: &[&str]) -> Result<(), Failure> {
        self.outputs += 1;
        let out = File::create(self.out()).map_err(|e| e.to_string())?;
        let err = out.try_clone().map_err(|e| e.to_string())?;
        let mut c = self.command(self.root, words);
        c.stdin(Stdio::null()).stdout(out).stderr(err);
        self.front = Some(c.spawn().map_err(|e| e.to_string())?);
        Ok(())
    }

    /// Launches `words` across hosts.
    fn launch_words(&mut self, words: &[&str]) -> Result<(), Failure> {
        let (belay, dir) = (self.belay.clone(), self.dir());
        let launch = [&belay, "launch", "--across-hosts", "--ckpt-dir", &dir];
        let options = self.options.clone();
        let options: Vec<&str> = options.iter().map(String::as_str).chain(["--"]).collect();
        self.start(&[&launch[..], &options, words].concat())?;
        self.progress()
    }

    fn launch(&mut self, program: &Path) -> Result<(), Failure> {
        let program = program.display().to_string();
        // Two ranks on each of two hosts, else one.
        let (each, ranks) = if self.used == 2 { (2, 4) } else { (1, self.used) };
        let hosts: Vec<String> = (1..=self.used).map(|h| format!("h{h}:{each}")).collect();
        let (hosts, ranks) = (hosts.join(","), ranks.to_string());
        // The two ways to name the remote shell.
        let launcher = if self.used == self.all {
            "-launcher"
        } else {
            "-launcher-exec"
        };
        let mpirun: &[&str] = match self.kind {
            Kind::Mpich => &["mpiexec.mpich", launcher, "ssh", "-hosts", &hosts, "-n", &ranks],
            _ => &[
                "mpirun.openmpi",
                "-x",
                "BELAY_TEST_GO",
                "-x",
                "BELAY_TEST_BEAT",
                "--host",
                &hosts,
                "-n",
                &ranks,
            ],
        };
        let started = self.launch_words(&[mpirun, &[&program]].concat());
        // A connection that nobody has accepted at the first checkpoint would keep its port for a minute after the crash.
        (0..20).fold(started, |done, _| done.and_then(|()| self.progress()))
    }

    /// Waits for a round of the program that comes after this call.
    fn progress(&mut self) -> Result<(), Failure> {
        let beat = self.work.join("beat");
        let read = || std::fs::read_to_string(&beat).unwrap_or_default();
        let (first, begin) = (read(), Instant::now());
        while read() == first {
            let ended = self.front.as_mut().and_then(|f| f.try_wait().ok().flatten());
            if ended.is_some() || begin.elapsed() > LIMIT {
                let said = std::fs::read_to_string(self.out()).unwrap_or_default();
                return Err(format!("no progress ({ended:?}): {said}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Waits until the job's front has said `words`.
    fn says(&self, words: &str) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            let said = std::fs::read_to_string(self.out()).unwrap_or_default();
            if said.contains(words) {
                return Ok(());
            }
            if begin.elapsed() > LIMIT {
                return Err(format!("nobody was told that {words}: {said}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn belay(&self, words: &[&str]) -> Result<std::process::Output, Failure> {
        output(self.command(self.root, &[&[self.belay.as_str()], words].concat()), LIMIT)
    }

    fn checkpoint(&self) -> Result<(), Failure> {
        let o = self.belay(&["checkpoint", "--quiet", &self.dir()])?;
        if o.status.success() {
            Ok(())
        } else {
            Err(format!("checkpoint: {}", text(&o)))
        }
    }

    fn crash(&mut self) {
        self.hosts.kill_all();
        if let Some(mut front) = self.front.take() {
            let _ = front.wait();
        }
    }

    fn restart(&mut self, more: &[&str]) -> Result<(), Failure> {
        let (belay, dir) = (self.belay.clone(), self.dir());
        std::fs::write(self.work.join("beat"), "").map_err(|e| e.to_string())?;
        self.start(&[&[&belay, "restart", &dir][..], more].concat())?;
        self.progress()
    }

    /// Restarts with every part, the first too, on the host that is `shift` further than where it was launched.
    fn restart_shifted(&mut self, shift: usize) -> Result<(), Failure> {
        let host = |part: usize| (part + shift) % self.all + 1;
        let others: Vec<String> = (1..self.used).map(|part| format!("h{}", host(part))).collect();
        self.root = host(0);
        let options = self.options.clone();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        self.restart(&[&["--hosts", &others.join(",")], &options[..]].concat())
    }

    /// Runs `belay` with these words and the job directory, which must succeed; what it said.
    fn must(&self, words: &[&str]) -> Result<String, Failure> {
        let o = self.belay(&[words, &[&self.dir()]].concat())?;
        if o.status.success() {
            Ok(text(&o))
        } else {
            Err(format!("belay {words:?}: {}: {}", show(o.status), text(&o)))
        }
    }

    /// Lets the program end and wants its good verdict.
    fn verdict(&mut self) -> Result<(), Failure> {
        std::fs::write(self.work.join("go"), "").map_err(|e| e.to_string())?;
        let begin = Instant::now();
        loop {
            let said = std::fs::read_to_string(self.out()).unwrap_or_default();
            match self.front.as_mut().map(Child::try_wait) {
                Some(Ok(Some(s))) if s.success() && said.contains("PASS") => return Ok(()),
                // What comes after the verdict hangs now and then, also without belay: see mpicheck.h.
                Some(Ok(_)) if self.kind == Kind::Mpich && said.contains("PASS") => return Ok(()),
                Some(Ok(None)) if begin.elapsed() < LIMIT => std::thread::sleep(Duration::from_millis(5)),
                other => return Err(format!("{other:?}: {said}")),
            }
        }
    }
}

fn rounds_wanted() -> usize {
    let count = std::env::var("BELAY_HOSTS_ROUNDS").ok();
    count.and_then(|v| v.parse().ok()).unwrap_or(3)
}

fn program(job: &Job, place: &Place, name: &str) -> Result<PathBuf, Failure> {
    let kind = if name.starts_with("mpi/") { job.kind } else { Kind::C };
    let built = build(place, name, kind)?;
    let to = job.work.join("program");
    std::fs::copy(&built, &to).map_err(|e| format!("copy {name}: {e}"))?;
    Ok(to)
}

/// Rounds of checkpoint, crash and restart of a job on `used` of `all` hosts; each restart moves every part to the next host.
fn rounds(place: &Place, name: &str, used: usize, all: usize, rng: &mut Rng) -> Result<(), Failure> {
    rounds_of(place, Kind::OpenMpi, name, used, all, rng)
}

fn rounds_of(place: &Place, kind: Kind, name: &str, used: usize, all: usize, rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("hosts-{}{}", name.replace('/', "-"), kind.suffix());
    let mut job = Job::of(place, &label, kind, used, all)?;
    let program = program(&job, place, name)?;
    job.launch(&program)?;
    for n in 0..rounds_wanted() {
        std::thread::sleep(Duration::from_millis(rng.below(700)));
        job.checkpoint().map_err(|e| format!("round {n}: {e}"))?;
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.crash();
        let restarted = if used == all {
            job.restart(&[])
        } else {
            job.restart_shifted(n + 1)
        };
        restarted.map_err(|e| format!("round {n}: restart: {e}"))?;
    }
    job.verdict()
}

/// Two parts on one host share memory, which each would restore for itself: the checkpoint is refused, and they go on.
fn shared_memory(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-memory", 2, 2)?;
    let program = program(&job, place, "net/net_memory")?.display().to_string();
    let object = format!("/belay-test-{}", std::process::id());
    job.launch_words(&[&program, "start", "h2", &object])?;
    job.says("0 shares").and_then(|()| job.says("1 shares"))?;
    let refused = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
    let said = text(&refused);
    let ended = job.progress().and_then(|()| job.verdict());
    drop(std::fs::remove_file(format!("/dev/shm{object}")));
    want(
        !refused.status.success() && said.contains(&object) && said.contains("shares this memory"),
        || format!("the checkpoint: {said}"),
    )?;
    ended
}

/// Connections to addresses of before several restarts, which move both processes, the first time to where other programs have taken the ports.
fn late_connections(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-late", 2, 3)?;
    let program = program(&job, place, "net/net_late")?.display().to_string();
    let (ports, ready) = (job.work.join("ports"), job.work.join("ready"));
    job.launch_words(&[&program, "serve", "10.99.0.1", "h2", &ports.display().to_string()])?;
    for n in 0..3 {
        std::thread::sleep(Duration::from_millis(rng.below(100)));
        job.checkpoint().map_err(|e| format!("round {n}: {e}"))?;
        job.crash();
        let mut squatter = None;
        if n == 0 {
            let taken = std::fs::read_to_string(&ports).map_err(|e| e.to_string())?;
            let ready = ready.display().to_string();
            let words: Vec<&str> = [&program, "squat", &ready]
                .into_iter()
                .chain(taken.split_whitespace())
                .collect();
            squatter = Some(job.command(2, &words).spawn().map_err(|e| e.to_string())?);
            let begin = Instant::now();
            while !Path::new(&ready).exists() {
                if begin.elapsed() > LIMIT {
                    return Err("the ports were not taken".into());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        job.restart_shifted(n + 1).map_err(|e| format!("round {n}: restart: {e}"))?;
        if let Some(mut squatter) = squatter {
            // A crash that comes kills it too.
            if squatter.try_wait().map_err(|e| e.to_string())?.is_some() {
                return Err("the program that had taken the ports has ended".into());
            }
            std::thread::spawn(move || squatter.wait());
        }
    }
    job.verdict()
}

/// The agent of the root is killed when it has committed a checkpoint and nobody knows of that yet: the part keeps what it has of it, from which the job restarts.
fn killed_root(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-root", 2, 2)?;
    let program = program(&job, place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    // Who enters the host, its child, the front, and its child, the agent.
    let named = job.hosts.find(1, "belay launch");
    let children = |p: &i32| std::fs::read_to_string(format!("/proc/{p}/task/{p}/children")).unwrap_or_default();
    let is_above = |p: &i32| {
        children(p)
            .split_whitespace()
            .any(|c| named.iter().any(|n| n.to_string() == c))
    };
    let agent = *named.iter().find(|p| !is_above(p)).ok_or("no agent")?;
    let dir = job.dir();
    let committed = PathBuf::from(&dir).join("gen/000001");
    let taking = job.command(1, &[&job.belay, "checkpoint", "--quiet", &dir]);
    let (_, taken) = step_each(
        agent,
        move || output(taking, LIMIT),
        |_| match committed.exists() {
            true => Verdict::Kill,
            false => Verdict::On,
        },
    )?;
    let taken = taken?;
    if taken.status.success() || !committed.exists() {
        return Err(format!("not killed between commit and answer: {}", text(&taken)));
    }
    // It gives up when nothing has been heard of the root for 15 s.
    let begin = Instant::now();
    while !durable::files(&PathBuf::from(&dir).join("nodes/1/log"), "")
        .iter()
        .any(|log| std::fs::read_to_string(log).is_ok_and(|l| l.contains("part given up")))
    {
        if begin.elapsed() > LIMIT {
            return Err("the part waits for its root for ever".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    job.crash();
    job.restart(&[])?;
    job.checkpoint()?;
    job.verdict()
}

/// Three parts (with mpirun's) come back on two hosts, on one, and again on three of the four.
fn other_numbers(place: &Place, kind: Kind, name: &str, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::of(place, &format!("hosts-numbers{}", kind.suffix()), kind, 3, 4)?;
    let program = program(&job, place, name)?;
    job.launch(&program)?;
    let file = job.work.join("hostfile");
    std::fs::write(&file, "# spares last\nh2 slots=1\nh3\nh1:4\n").map_err(|e| e.to_string())?;
    let file = file.display().to_string();
    let places: [(usize, [&str; 2], &[usize]); 3] = [
        (1, ["--hosts", "h2"], &[1, 2]),
        (3, ["--hosts", "h3"], &[3]),
        (4, ["--hostfile", &file], &[2, 3, 4]),
    ];
    for (root, hosts, used) in places {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint().map_err(|e| format!("before {hosts:?}: {e}"))?;
        job.crash();
        job.root = root;
        job.restart(&hosts).map_err(|e| format!("{hosts:?}: restart: {e}"))?;
        // What the job opens now goes where everything is now.
        (0..5).try_for_each(|_| job.progress())?;
        let at: Vec<usize> = (1..=4).filter(|h| !job.hosts.find(*h, "belay").is_empty()).collect();
        if at != used {
            return Err(format!("{hosts:?}: the job is on hosts {at:?}"));
        }
    }
    job.verdict()
}

/// Parts that share a host now open connections, and who accepts them must know from whom they are.
fn packed(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-packed", 4, 4)?;
    let program = program(&job, place, "mpi/mpi_lazy")?;
    job.launch(&program)?;
    // Three of the four parts on one host, and all on one.
    for (root, host) in [(1, "h2"), (3, "h3")] {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint()?;
        job.crash();
        job.root = root;
        job.restart(&["--hosts", host]).map_err(|e| format!("{host}: restart: {e}"))?;
        job.progress()?;
    }
    job.verdict()
}

/// A host is cut off at random moments before, during and after a checkpoint: the user is told, a checkpoint under way ends, and the newest whole one restarts.
fn partition(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-partition", 2, 2)?;
    let program = program(&job, place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    job.checkpoint()?;
    // Silence is noticed after 6 s, so these rounds are long.
    for n in 0..rounds_wanted().div_ceil(2) {
        let dir = job.dir();
        let taking = job.command(1, &[&job.belay, "checkpoint", "--quiet", &dir]);
        let taking = std::thread::spawn(move || output(taking, LIMIT));
        std::thread::sleep(Duration::from_millis(rng.below(250)));
        job.hosts.cut(2, true)?;
        job.says("the part of the job on h2 is lost")?;
        // Whether it was refused or done before, it has an end.
        let taken = taking.join().map_err(|_| "the checkpoint's thread ended")??;
        if !taken.status.success() && !text(&taken).contains("belay:") {
            return Err(format!("round {n}: no reason: {}", text(&taken)));
        }
        let o = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
        if o.status.success() {
            return Err(format!("round {n}: a checkpoint without the lost part was taken"));
        }
        job.crash();
        job.hosts.cut(2, false)?;
        job.restart(&[]).map_err(|e| format!("round {n}: restart: {e}"))?;
    }
    job.verdict()
}

/// The agent on the other host is killed: the user is told (within seconds, on a quiet machine), the next checkpoint is refused, and the one before restarts.
fn lost_agent(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-lost", 2, 2)?;
    let program = program(&job, place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    job.checkpoint()?;
    std::thread::sleep(Duration::from_millis(rng.below(300)));
    // The front and, its child, the agent.
    for pid in job.hosts.find(2, "belay agent").into_iter().skip(1) {
        // SAFETY: takes numbers only.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    job.says("the part of the job on h2 is lost")?;
    let o = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
    if o.status.success() {
        return Err("a checkpoint without the lost part was taken".into());
    }
    job.crash();
    job.restart(&[])?;
    job.verdict()
}

/// Hosts that die: `belay run` goes on by itself, on the spare host of its hostfile and on one that has come back, as often as it may; then it can be run again.
fn spare(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-spare", 3, 4)?;
    let program = program(&job, place, "mpi/mpi_p2p")?.display().to_string();
    let file = job.work.join("hostfile");
    std::fs::write(&file, "h2\nh3\nh4 # spare\n").map_err(|e| e.to_string())?;
    let (belay, dir, file) = (job.belay.clone(), job.dir(), file.display().to_string());
    let run = [
        &belay,
        "run",
        "--across-hosts",
        "--restarts",
        "2",
        "--hostfile",
        &file,
        "--ckpt-dir",
        &dir,
        "--",
    ];
    let mpirun = [
        "mpirun.openmpi",
        "-x",
        "BELAY_TEST_GO",
        "-x",
        "BELAY_TEST_BEAT",
        "--host",
        "h1:1,h2:1,h3:1",
        "-n",
        "3",
    ];
    let words = [&run[..], &mpirun, &[&program]].concat();
    job.start(&words)?;
    (0..20).try_for_each(|_| job.progress())?;
    let back = |job: &Job, host: usize| job.work.join(format!("h{host}.gone"));
    let mut gone = None;
    for (n, lost, used) in [(1, 2, [1, 3, 4]), (2, 4, [1, 2, 3]), (3, 3, [0; 3])] {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint().map_err(|e| format!("before loss {n}: {e}"))?;
        job.progress()?;
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        let socket = job.work.join(format!("h{lost}.sock"));
        std::fs::rename(&socket, back(&job, lost)).map_err(|e| e.to_string())?;
        if let Some(host) = gone.replace(lost) {
            std::fs::rename(back(&job, host), job.work.join(format!("h{host}.sock"))).map_err(|e| e.to_string())?;
        }
        std::fs::write(job.work.join("beat"), "").map_err(|e| e.to_string())?;
        job.hosts.kill_host(lost);
        if n <= 2 {
            job.says(&format!("h{lost} does not answer; restarting with the other parts on "))?;
            job.says(&format!(" ({n} of 2 restarts)"))?;
            job.progress().map_err(|e| format!("loss {n}: {e}"))?;
            let at: Vec<usize> = (1..=4).filter(|h| !job.hosts.find(*h, "belay").is_empty()).collect();
            if at != used {
                return Err(format!("loss {n}: the job is on hosts {at:?}"));
            }
        }
    }
    job.says("the part of the job on h3 is lost")?;
    let begin = Instant::now();
    while job.front.as_mut().is_some_and(|f| matches!(f.try_wait(), Ok(None))) {
        if begin.elapsed() > LIMIT {
            return Err("a job without its part and without restarts does not end".into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    job.crash();
    std::fs::write(&file, "h2\nh4\n").map_err(|e| e.to_string())?;
    job.start(&words)?;
    job.progress().map_err(|e| format!("run again: {e}"))?;
    job.verdict()
}

fn main() {
    serve_if_asked();
    if let Some(why) = unavailable() {
        println!("skipped: no test hosts here: {why}");
        return;
    }
    let mut target = Target::new("hosts", &[]);
    // The hosts of two tests would have the same addresses and halve the processors.
    target.in_turn();
    or_end(Server::prepare(target.place()));
    type Run = fn(&Place, &mut Rng) -> Result<(), Failure>;
    let tests: [(&str, Run); 19] = [
        ("same_hosts::mpi_p2p", |p, r| rounds(p, "mpi/mpi_p2p", 2, 2, r)),
        ("same_hosts::mpi_cg", |p, r| rounds(p, "mpi/mpi_cg", 2, 2, r)),
        ("other_hosts::mpi_p2p", |p, r| rounds(p, "mpi/mpi_p2p", 2, 3, r)),
        ("three_hosts::mpi_alltoall", |p, r| rounds(p, "mpi/mpi_alltoall", 3, 4, r)),
        ("four_hosts::mpi_p2p", |p, r| rounds(p, "mpi/mpi_p2p", 4, 5, r)),
        ("mpich::same_hosts::mpi_p2p", |p, r| {
            rounds_of(p, Kind::Mpich, "mpi/mpi_p2p", 2, 2, r)
        }),
        ("mpich::other_hosts::mpi_cg", |p, r| {
            rounds_of(p, Kind::Mpich, "mpi/mpi_cg", 2, 3, r)
        }),
        ("other_numbers::mpi_alltoall", |p, r| {
            other_numbers(p, Kind::OpenMpi, "mpi/mpi_alltoall", r)
        }),
        ("mpich::other_numbers::mpi_p2p", |p, r| {
            other_numbers(p, Kind::Mpich, "mpi/mpi_p2p", r)
        }),
        ("late_connections::net_late", late_connections),
        ("late_connections::mpi_lazy", |p, r| rounds(p, "mpi/mpi_lazy", 4, 5, r)),
        ("late_connections::packed", packed),
        ("shared_memory", shared_memory),
        ("lost_agent", lost_agent),
        ("spare", spare),
        ("partition", partition),
        ("killed_root", killed_root),
        ("durable", durable::directory),
        ("durable_objects", durable::objects),
    ];
    for (name, test) in tests {
        target.once(name, test);
    }
    target.run();
}
