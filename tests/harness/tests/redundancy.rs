//! Jobs over several hosts whose checkpoints lie on the hosts' own disks: hosts are lost with all they had, and the job restarts on spare hosts from what is left.

use belay_tests::build::{build, Kind};
use belay_tests::hosts::{serve_if_asked, unavailable, Hosts};
use belay_tests::job::{output, text};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::target::Target;
use belay_tests::Failure;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);
/// On every host, a file system of its own.
const LOCAL: &str = "/tmp/local";

fn text_of(e: impl std::fmt::Display) -> Failure {
    e.to_string()
}

/// A job on hosts.
struct Job {
    hosts: Hosts,
    work: PathBuf,
    belay: String,
    front: Option<Child>,
    outputs: u32,
    /// The host of each part; the job is started on that of part 0.
    at: Vec<usize>,
}

impl Job {
    /// A job with `parts` parts on the first of `all` hosts, two of whose ranks talk, launched with `scheme`.
    fn launch(place: &Place, label: &str, (parts, all): (usize, usize), scheme: &str) -> Result<Self, Failure> {
        let work = place.work(label, User::Root)?;
        std::fs::create_dir_all(work.join("bin")).map_err(text_of)?;
        for name in ["belay", "belay-inject", "belay-restorer"] {
            std::fs::copy(place.bin().join(name), work.join("bin").join(name)).map_err(text_of)?;
        }
        let program = work.join("program");
        std::fs::copy(build(place, "mpi/mpi_p2p", Kind::OpenMpi)?, &program).map_err(text_of)?;
        let mut job = Self {
            hosts: Hosts::new(&work, all)?,
            belay: work.join("bin/belay").display().to_string(),
            work,
            front: None,
            outputs: 0,
            at: (1..=parts).collect(),
        };
        for host in 1..=all {
            job.run(host, &["mkdir", LOCAL])?;
        }
        let (belay, dir) = (job.belay.clone(), job.dir());
        let launch = [
            &belay,
            "launch",
            "--across-hosts",
            "--redundancy",
            scheme,
            "--local-dir",
            LOCAL,
            "--ckpt-dir",
            &dir,
            "--",
        ];
        let mpirun = ["mpirun.openmpi", "-x", "BELAY_TEST_GO", "-x", "BELAY_TEST_BEAT"];
        let hosts: Vec<String> = (1..=parts).map(|h| format!("h{h}:1")).collect();
        let (hosts, ranks, program) = (hosts.join(","), parts.to_string(), program.display().to_string());
        let ranks = ["--host", &hosts, "-n", &ranks, &program];
        job.start(&[&launch[..], &mpirun, &ranks].concat())?;
        // A connection that nobody has accepted at the first checkpoint would keep its port for a minute after the crash.
        for _ in 0..20 {
            job.progress()?;
        }
        Ok(job)
    }

    fn command(&self, host: usize, words: &[&str]) -> Command {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let mut c = self.hosts.command(host, &words);
        c.env("BELAY_TEST_GO", self.work.join("go"))
            .env("BELAY_TEST_BEAT", self.work.join("beat"));
        c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        c.env("OMPI_MCA_mpi_yield_when_idle", "1").env("HWLOC_COMPONENTS", "-gl");
        c
    }

    /// Runs a command on a host that must succeed; what it says.
    fn run(&self, host: usize, words: &[&str]) -> Result<String, Failure> {
        let o = output(self.command(host, words), LIMIT)?;
        if o.status.success() {
            Ok(String::from_utf8_lossy(&o.stdout).into_owned())
        } else {
            Err(format!("{words:?} on h{host}: {}", text(&o)))
        }
    }

    fn dir(&self) -> String {
        self.work.join("job").display().to_string()
    }

    fn start(&mut self, words: &[&str]) -> Result<(), Failure> {
        self.outputs += 1;
        let out = File::create(self.out()).map_err(text_of)?;
        let err = out.try_clone().map_err(text_of)?;
        let mut c = self.command(self.at[0], words);
        c.stdin(Stdio::null()).stdout(out).stderr(err);
        self.front = Some(c.spawn().map_err(text_of)?);
        Ok(())
    }

    fn out(&self) -> PathBuf {
        self.work.join(format!("out.{}", self.outputs))
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.out()).unwrap_or_default()
    }

    /// Waits for a round of the program that comes after this call.
    fn progress(&mut self) -> Result<(), Failure> {
        let beat = self.work.join("beat");
        let read = || std::fs::read_to_string(&beat).unwrap_or_default();
        let (first, begin) = (read(), Instant::now());
        while read() == first {
            let ended = self.front.as_mut().and_then(|f| f.try_wait().ok().flatten());
            if ended.is_some() || begin.elapsed() > LIMIT {
                return Err(format!("no progress ({ended:?}): {}", self.said()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn belay(&self, words: &[&str]) -> Result<Output, Failure> {
        output(self.command(self.at[0], &[&[self.belay.as_str()], words].concat()), LIMIT)
    }

    /// A checkpoint that is redundant when this returns.
    fn checkpoint(&self) -> Result<(), Failure> {
        let o = self.belay(&["checkpoint", "--quiet", "--level", "redundant", &self.dir()])?;
        if !o.status.success() || !text(&o).contains(", redundant") {
            return Err(format!("checkpoint: {}", text(&o)));
        }
        let o = self.belay(&["status", "--json", &self.dir()])?;
        match text(&o).contains("\"level\": \"redundant\"") {
            true => Ok(()),
            false => Err(format!("no generation is redundant: {}", text(&o))),
        }
    }

    fn crash(&mut self) {
        self.hosts.kill_all();
        if let Some(mut front) = self.front.take() {
            let _ = front.wait();
        }
    }

    /// Host `n` is gone with all it had; nobody reaches it any more.
    fn lose(&self, n: usize) -> Result<(), Failure> {
        self.run(n, &["sh", "-c", &format!("rm -r {LOCAL}/*")])?;
        let socket = self.work.join(format!("h{n}.sock"));
        std::fs::rename(&socket, socket.with_extension("gone")).map_err(text_of)
    }

    /// A host that was lost is back, empty.
    fn return_empty(&self, n: usize) -> Result<(), Failure> {
        let socket = self.work.join(format!("h{n}.sock"));
        std::fs::rename(socket.with_extension("gone"), &socket).map_err(text_of)
    }

    /// The words of a restart with the parts on the hosts of `at`.
    fn restart_words(&self) -> Vec<String> {
        let others: Vec<String> = self.at[1..].iter().map(|h| format!("h{h}")).collect();
        [&self.belay, "restart", &self.dir(), "--hosts", &others.join(",")]
            .map(str::to_owned)
            .to_vec()
    }

    fn restart(&mut self) -> Result<(), Failure> {
        std::fs::write(self.work.join("beat"), "").map_err(text_of)?;
        let words = self.restart_words();
        self.start(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        self.progress()
    }

    /// Lets the program end and wants its good verdict.
    fn verdict(&mut self) -> Result<(), Failure> {
        std::fs::write(self.work.join("go"), "").map_err(text_of)?;
        let begin = Instant::now();
        loop {
            let said = self.said();
            match self.front.as_mut().map(Child::try_wait) {
                Some(Ok(Some(s))) if s.success() && said.contains("PASS") => return Ok(()),
                Some(Ok(None)) if begin.elapsed() < LIMIT => std::thread::sleep(Duration::from_millis(5)),
                other => return Err(format!("{other:?}: {said}")),
            }
        }
    }

    /// Changes one bit of byte `at` of every file on a host that `pattern` names in the job's stores.
    fn flip(&self, host: usize, pattern: &str, at: u64) -> Result<(), Failure> {
        let script = format!(
            "for f in {LOCAL}/belay-*/{pattern}; do b=$(od -An -tu1 -j {at} -N 1 $f); printf \"\\\\$(printf %o $((b ^ 1)))\" | \
             dd of=$f bs=1 seek={at} conv=notrunc status=none || exit; done"
        );
        self.run(host, &["sh", "-c", &script]).map(drop)
    }
}

/// Rounds in which as many hosts are lost as the scheme survives.
fn lost_hosts(place: &Place, scheme: &str, (parts, all): (usize, usize), losses: usize, rng: &mut Rng) -> Result<(), Failure> {
    let label = format!("redundancy-{}", scheme.split(':').next().unwrap_or_default());
    let mut job = Job::launch(place, &label, (parts, all), scheme)?;
    let mut spares: Vec<usize> = (parts + 1..=all).collect();
    for round in 0..2 {
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.checkpoint().map_err(|e| format!("round {round}: {e}"))?;
        std::thread::sleep(Duration::from_millis(rng.below(200)));
        job.crash();
        let mut gone = Vec::new();
        // The first time also mpirun's own.
        let mut part = if round == 0 { 0 } else { rng.below(parts as u64) as usize };
        for _ in 0..losses {
            let spare = spares.pop().ok_or("no spare host")?;
            gone.push(std::mem::replace(&mut job.at[part], spare));
            part = (part + 1 + rng.below(parts as u64 - 1) as usize) % parts;
            while spares.contains(&job.at[part]) || gone.contains(&job.at[part]) {
                part = (part + 1) % parts;
            }
        }
        for host in &gone {
            job.lose(*host)?;
        }
        job.restart().map_err(|e| format!("round {round}: h{gone:?} lost: {e}"))?;
        for host in gone {
            job.return_empty(host)?;
            spares.insert(0, host);
        }
    }
    job.verdict()
}

/// Bits change: in a chunk while the program runs, which is named, and of which the next checkpoint makes no use; in a chunk, which is rebuilt where it is; in parity, which `verify` finds, and which is not used, so that the loss of a host is then one too many.
fn damage(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::launch(place, "redundancy-damage", (3, 4), "xor")?;
    job.checkpoint()?;
    job.flip(2, "*/chunks/pages-*.bpg", 5000)?;
    let o = job.belay(&["checkpoint", "--quiet", "--level", "redundant", &job.dir()])?;
    let said = text(&o);
    if o.status.success() || !(said.contains("h2: ") && said.contains("damaged") && said.contains(".bpg")) {
        return Err(format!("a checkpoint with a damaged chunk: {said}"));
    }
    job.checkpoint().map_err(|e| format!("after one with a damaged chunk: {e}"))?;
    job.crash();
    job.flip(3, "*/chunks/pages-*.bpg", 5000)?;
    job.restart().map_err(|e| format!("a chunk is damaged: {e}"))?;
    job.checkpoint()?;
    job.crash();
    let o = job.belay(&["verify", &job.dir()])?;
    if !o.status.success() || !text(&o).contains("parity of its group whole") {
        return Err(format!("verify of whole parity: {}", text(&o)));
    }
    for host in [1, 3] {
        job.flip(host, "*/parity/*.bpar", 0)?;
    }
    let o = job.belay(&["verify", &job.dir()])?;
    if o.status.success() || !text(&o).contains("checksum of the block at 0 does not match") {
        return Err(format!("verify of damaged parity: {}", text(&o)));
    }
    // Part 1 with all its host had.
    job.run(2, &["sh", "-c", &format!("mkdir /tmp/kept && mv {LOCAL}/* /tmp/kept")])?;
    job.at[1] = 4;
    let words = job.restart_words();
    let o = output(job.command(1, &words.iter().map(String::as_str).collect::<Vec<_>>()), LIMIT)?;
    let said = text(&o);
    if o.status.success() || !said.contains("cannot be rebuilt") || !said.contains("h2") {
        return Err(format!("a restart without enough blocks: {said}"));
    }
    job.run(2, &["sh", "-c", &format!("mv /tmp/kept/* {LOCAL}")])?;
    job.restart().map_err(|e| format!("the host is back: {e}"))?;
    job.verdict()
}

/// The agent of a host is killed while it encodes: the generation stays what it was, and the job restarts from it.
fn killed_encoder(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::launch(place, "redundancy-killed", (3, 3), "reed-solomon:3:1")?;
    job.checkpoint()?;
    let mut waits = job.command(1, &[&job.belay, "checkpoint", "--quiet", "--level", "redundant", &job.dir()]);
    let mut client = waits.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(text_of)?;
    let victim = 2 + rng.below(2) as usize;
    // The parity has a temporary name while it is written.
    let script = format!("while ! ls -A {LOCAL}/belay-*/*/parity | grep -q 000002; do :; done");
    job.run(victim, &["sh", "-c", &script])?;
    for pid in job.hosts.find(victim, "belay agent").into_iter().skip(1) {
        // SAFETY: takes numbers only.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    let begin = Instant::now();
    let ended = loop {
        match client.try_wait().map_err(text_of)? {
            Some(status) => break status,
            None if begin.elapsed() > LIMIT => return Err("the client waits for ever".into()),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let o = job.belay(&["status", "--json", &job.dir()])?;
    let redundant = text(&o).matches("\"level\": \"redundant\"").count();
    // It may have been done just before.
    if redundant != 1 + usize::from(ended.success()) {
        return Err(format!("{ended}, but {redundant} generations are redundant: {}", text(&o)));
    }
    job.crash();
    job.restart()?;
    job.checkpoint()?;
    job.verdict()
}

fn main() {
    serve_if_asked();
    if let Some(why) = unavailable() {
        println!("skipped: no test hosts here: {why}");
        return;
    }
    let mut target = Target::new("redundancy", &[]);
    // The hosts of two tests would halve the processors.
    target.in_turn();
    type Run = fn(&Place, &mut Rng) -> Result<(), Failure>;
    let tests: [(&str, Run); 5] = [
        ("partner", |p, r| lost_hosts(p, "partner:3", (3, 4), 1, r)),
        ("xor", |p, r| lost_hosts(p, "xor", (3, 4), 1, r)),
        ("reed_solomon", |p, r| lost_hosts(p, "reed-solomon:4:2", (4, 6), 2, r)),
        ("damage", damage),
        ("killed_encoder", killed_encoder),
    ];
    for (name, test) in tests {
        target.once(name, test);
    }
    target.run();
}
