//! A job over several test hosts: its parts on the first of them, or on chosen ones, checkpointed, killed, restarted
//! with its parts on others.

use crate::beat::{self, Beats};
use crate::build::{build, copy_program, Kind};
use crate::expect::want;
use crate::hosts::Hosts;
use crate::job::{output, show, text};
use crate::outcome::take_unless_ended;
use crate::place::{Place, User};
use crate::s3::CREDENTIALS;
use crate::{procs, Failure};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything takes here, also where much else runs.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Takes away what is mounted on `disk`, if something is.
fn unmount(disk: &Path) {
    drop(Command::new("umount").arg("-ql").arg(disk).stderr(Stdio::null()).status());
}

/// Writes the site's file of the hosts that share the directory `work`.
fn configure(work: &Path, configuration: &str) -> Result<(), Failure> {
    let dir = work.join("etc/belay");
    let written = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(dir.join("belay.toml"), configuration));
    written.map_err(|e| format!("write the site's file: {e}"))
}

/// A job on hosts.
#[derive(Debug)]
pub struct Job {
    /// The hosts.
    pub hosts: Hosts,
    /// A directory that they share.
    pub work: PathBuf,
    /// The command.
    pub belay: String,
    /// The host of each part; the job is started on that of part 0.
    pub at: Vec<usize>,
    /// More options of `belay launch`.
    pub options: Vec<String>,
    /// What the job is started by.
    pub front: Option<Child>,
    /// Hosts.
    pub all: usize,
    kind: Kind,
    user: User,
    outputs: u32,
    pauses: bool,
}

impl Job {
    /// A job of Open MPI with `parts` parts on the first of `all` hosts; nothing runs yet.
    pub fn new(place: &Place, label: &str, parts: usize, all: usize) -> Result<Self, Failure> {
        Self::of(place, label, Kind::OpenMpi, parts, all)
    }

    /// The same with an MPI of this kind.
    pub fn of(place: &Place, label: &str, kind: Kind, parts: usize, all: usize) -> Result<Self, Failure> {
        Self::by(User::Root, place, label, kind, parts, all)
    }

    /// The same, launched and restarted by `user`.
    pub fn by(user: User, place: &Place, label: &str, kind: Kind, parts: usize, all: usize) -> Result<Self, Failure> {
        Self::made(place.work(label, user)?, place, user, kind, (parts, all))
    }

    /// The same as root, its job directory on a disk of this size, which all hosts see.
    pub fn on_disk(size: &str, place: &Place, label: &str, kind: Kind, parts: usize, all: usize) -> Result<Self, Failure> {
        let work = place.work(label, User::Root)?;
        let disk = work.join("job");
        std::fs::create_dir(&disk).map_err(|e| e.to_string())?;
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", &format!("size={size},mode=700"), "tmpfs"])
            .arg(&disk);
        let o = output(mount, LIMIT)?;
        want(o.status.success(), || format!("mount a disk: {}", text(&o)))?;
        let made = Self::made(work, place, User::Root, kind, (parts, all));
        made.inspect_err(|_| unmount(&disk))
    }

    /// The same on hosts whose site has `configuration` in its file, see [`Job::configure`].
    pub fn at_site(
        (user, configuration): (User, &str),
        place: &Place,
        label: &str,
        kind: Kind,
        parts: usize,
        all: usize,
    ) -> Result<Self, Failure> {
        let work = place.work(label, user)?;
        configure(&work, configuration)?;
        Self::made(work, place, user, kind, (parts, all))
    }

    /// Changes what `/etc/belay/belay.toml` says on hosts that have one.
    pub fn configure(&self, configuration: &str) -> Result<(), Failure> {
        configure(&self.work, configuration)
    }

    fn made(work: PathBuf, place: &Place, user: User, kind: Kind, (parts, all): (usize, usize)) -> Result<Self, Failure> {
        // Everything that hosts share lies in one directory.
        std::fs::create_dir_all(work.join("bin")).map_err(|e| e.to_string())?;
        for name in ["belay", "belay-inject", "belay-restorer"] {
            let to = work.join("bin").join(name);
            copy_program(&place.bin().join(name), &to)?;
        }
        Ok(Self {
            hosts: Hosts::new(&work, all)?,
            belay: work.join("bin/belay").display().to_string(),
            work,
            at: (1..=parts).collect(),
            options: Vec::new(),
            front: None,
            all,
            kind,
            user,
            outputs: 0,
            pauses: false,
        })
    }

    /// The same, whose MPI program rests in each round: for what is about something else than data in flight, since
    /// ranks that always run take the processors from all that runs beside.
    #[must_use]
    pub fn unhurried(mut self) -> Self {
        self.pauses = true;
        self
    }

    /// A copy of a test program, built for this job, where all hosts see it.
    pub fn program(&self, place: &Place, name: &str) -> Result<String, Failure> {
        let kind = if name.starts_with("mpi/") { self.kind } else { Kind::C };
        let built = build(place, name, kind)?;
        let to = self.work.join("program");
        copy_program(&built, &to)?;
        Ok(to.display().to_string())
    }

    /// A command on a host, with what MPI needs there.
    pub fn command(&self, host: usize, words: &[&str]) -> Command {
        let words: Vec<String> = self.user.words().iter().chain(words).map(|w| (*w).to_owned()).collect();
        let mut c = self.hosts.command(host, &words);
        c.env("BELAY_TEST_GO", self.work.join("go"))
            .env("BELAY_TEST_BEAT", self.work.join("beat"))
            // What the hosts run ends with them: waiting for one that is lost takes minutes in some tests.
            .env("BELAY_TEST_LONG", "1")
            .env("BELAY_TEST_REST_US", if self.pauses { "20000" } else { "0" });
        if self.user == User::Root {
            c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
                .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        } else {
            c.env("HOME", &self.work);
        }
        c.env("OMPI_MCA_mpi_yield_when_idle", "1").env("HWLOC_COMPONENTS", "-gl");
        c.envs(CREDENTIALS);
        if self.kind == Kind::Mpich {
            c.env("BELAY_TEST_EARLY", "1");
        }
        c
    }

    /// Runs a command on a host that must succeed; what it prints.
    pub fn on_host(&self, host: usize, words: &[&str]) -> Result<String, Failure> {
        let o = output(self.command(host, words), LIMIT)?;
        want(o.status.success(), || format!("{words:?} on h{host}: {}", text(&o)))?;
        Ok(String::from_utf8_lossy(&o.stdout).into_owned())
    }

    /// The job directory.
    pub fn dir(&self) -> String {
        self.work.join("job").display().to_string()
    }

    /// The job directory of a part; 0 is the root.
    pub fn dir_of(&self, part: usize) -> String {
        match part {
            0 => self.dir(),
            _ => format!("{}/nodes/{part}", self.dir()),
        }
    }

    /// What the front and the program have said since they were started last.
    pub fn said(&self) -> String {
        std::fs::read_to_string(self.out()).unwrap_or_default()
    }

    fn out(&self) -> PathBuf {
        self.work.join(format!("out.{}", self.outputs))
    }

    /// Starts a front on the host of part 0.
    pub fn start(&mut self, words: &[&str]) -> Result<(), Failure> {
        self.outputs += 1;
        let out = File::create(self.out()).map_err(|e| e.to_string())?;
        let err = out.try_clone().map_err(|e| e.to_string())?;
        let mut c = self.command(self.at[0], words);
        c.stdin(Stdio::null()).stdout(out).stderr(err);
        self.front = Some(c.spawn().map_err(|e| e.to_string())?);
        Ok(())
    }

    /// Launches `words` across hosts.
    pub fn launch_words(&mut self, words: &[&str]) -> Result<(), Failure> {
        self.start_launch(words)?;
        self.progress()
    }

    /// The same for a program without heartbeats.
    pub fn start_launch(&mut self, words: &[&str]) -> Result<(), Failure> {
        let (belay, dir) = (self.belay.clone(), self.dir());
        let launch = [&belay, "launch", "--across-hosts", "--ckpt-dir", &dir];
        let options = self.options.clone();
        let options: Vec<&str> = options.iter().map(String::as_str).chain(["--"]).collect();
        self.start(&[&launch[..], &options, words].concat())
    }

    /// Waits until the job answers to commands; `false` when it has ended before.
    pub fn answers(&mut self) -> Result<bool, Failure> {
        let begin = Instant::now();
        while !self.has_ended()? {
            let said = text(&self.belay(&["status", "--json", &self.dir()])?);
            if said.contains("\"running\": true") {
                return Ok(true);
            }
            want(begin.elapsed() < LIMIT, || format!("no answer: {said}; {}", self.said()))?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(false)
    }

    /// Whether the front has ended.
    pub fn has_ended(&mut self) -> Result<bool, Failure> {
        let front = self.front.as_mut().ok_or("nothing was started")?;
        front.try_wait().map(|s| s.is_some()).map_err(|e| e.to_string())
    }

    /// The front itself, which another process has put on its host.
    pub fn front_pid(&self) -> Result<i32, Failure> {
        let enters = self.front.as_ref().map(Child::id).ok_or("no front")?;
        let front = std::fs::read_to_string(format!("/proc/{enters}/task/{enters}/children")).unwrap_or_default();
        front.trim().parse().map_err(|_| format!("no front: {front:?}"))
    }

    /// Waits for the end of the front.
    pub fn end(&mut self) -> Result<ExitStatus, Failure> {
        let begin = Instant::now();
        while !self.has_ended()? {
            want(begin.elapsed() < LIMIT, || {
                format!("no end: {}\n{}", self.said(), self.account())
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
        let front = self.front.as_mut().ok_or("nothing was started")?;
        front.wait().map_err(|e| e.to_string())
    }

    /// The command that runs `program` on the first hosts.
    pub fn mpirun(&self, program: &str) -> Vec<String> {
        let parts = self.at.len();
        // Two ranks on each of two hosts, else one.
        let (each, ranks) = if parts == 2 { (2, 4) } else { (1, parts) };
        let hosts: Vec<String> = (1..=parts).map(|h| format!("h{h}:{each}")).collect();
        let (hosts, ranks) = (hosts.join(","), ranks.to_string());
        // The two ways to name the remote shell.
        let launcher = if parts == self.all { "-launcher" } else { "-launcher-exec" };
        let words: &[&str] = match self.kind {
            Kind::Mpich => &["mpiexec.mpich", launcher, "ssh", "-hosts", &hosts, "-n", &ranks, program],
            _ => &[
                "mpirun.openmpi",
                "-x",
                "BELAY_TEST_GO",
                "-x",
                "BELAY_TEST_BEAT",
                "-x",
                "BELAY_TEST_LONG",
                "-x",
                "BELAY_TEST_REST_US",
                "--host",
                &hosts,
                "-n",
                &ranks,
                program,
            ],
        };
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    /// Launches an MPI program.
    pub fn launch(&mut self, program: &str) -> Result<(), Failure> {
        let words = self.mpirun(program);
        self.launch_words(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        self.settle()
    }

    /// Waits until everybody has connected to everybody: a connection that nobody has accepted at the first checkpoint
    /// would keep its port for a minute after the crash.
    pub fn settle(&mut self) -> Result<(), Failure> {
        (0..20).try_for_each(|_| self.progress())
    }

    /// Waits for a round of the program that comes after this call.
    pub fn progress(&mut self) -> Result<(), Failure> {
        self.progress_of("beat")
    }

    /// The same for the program with heartbeats in `file`.
    pub fn progress_of(&mut self, file: &str) -> Result<(), Failure> {
        let begin = Instant::now();
        Beats::from_now(self.work.join(file)).wait(|| {
            let ended = self.front.as_mut().and_then(|f| f.try_wait().ok().flatten());
            want(ended.is_none() && begin.elapsed() < LIMIT, || {
                format!("no progress in {file} ({ended:?}): {}\n{}", self.said(), self.account())
            })
        })
    }

    /// Waits until the job's front has said `words`.
    pub fn says(&self, words: &str) -> Result<(), Failure> {
        self.comes_true(&format!("somebody is told that {words}"), || self.said().contains(words))
    }

    /// Waits until `test` holds.
    pub fn comes_true(&self, what: &str, test: impl Fn() -> bool) -> Result<(), Failure> {
        let begin = Instant::now();
        while !test() {
            want(begin.elapsed() < LIMIT, || {
                format!("it never happens that {what}: {}\n{}", self.said(), self.account())
            })?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// What the parts' logs say last, and what the processes of belay on the hosts wait for.
    pub fn account(&self) -> String {
        let mut lines = Vec::new();
        for part in 0..self.at.len() {
            let mut logs = files(&Path::new(&self.dir_of(part)).join("log"), ".jsonl");
            logs.sort();
            let log = logs.last().map(std::fs::read_to_string);
            let log = log.and_then(Result::ok).unwrap_or_default();
            let tail = log.lines().rev().take(6).collect::<Vec<_>>().into_iter().rev();
            lines.extend(tail.map(|l| format!("part {part}: {l}")));
        }
        for host in 1..=self.all {
            for pid in self.hosts.find(host, "belay") {
                let of = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
                let (line, state) = (of("cmdline").replace('\0', " "), of("wchan"));
                lines.push(format!("h{host}: {pid} {} {state}: {line}", of("comm").trim()));
            }
        }
        lines.join("\n")
    }

    /// How full the disk of the job directory is, what lies there, and who has removed files of it open.
    pub fn on_its_disk(&self) -> String {
        // These come first: they may be about to be closed.
        let mut lines = removed_and_open(&self.dir());
        let mut df = Command::new("sh");
        df.args(["-c", "df -k \"$0\"; du -ak \"$0\" | sort -n | tail -40", &self.dir()]);
        lines.push(output(df, LIMIT).map_or_else(|e| e, |o| text(&o)));
        lines.join("\n")
    }

    /// Runs `belay` with these words on the host of part 0.
    pub fn belay(&self, words: &[&str]) -> Result<Output, Failure> {
        output(self.command(self.at[0], &[&[self.belay.as_str()], words].concat()), LIMIT)
    }

    /// Runs `belay` with these words and the job directory, which must succeed; what it said.
    pub fn must(&self, words: &[&str]) -> Result<String, Failure> {
        let o = self.belay(&[words, &[&self.dir()]].concat())?;
        want(o.status.success(), || {
            format!(
                "belay {words:?}: {}: {}; the job said: {}",
                show(o.status),
                text(&o),
                self.said()
            )
        })?;
        Ok(text(&o))
    }

    /// Takes a checkpoint.
    pub fn checkpoint(&self) -> Result<(), Failure> {
        self.must(&["checkpoint", "--quiet"]).map(drop)
    }

    /// Takes a checkpoint, again where it is refused for what passes by itself; `false` when the job has ended before it.
    pub fn take(&self) -> Result<bool, Failure> {
        let taking = || self.belay(&["checkpoint", "--quiet", &self.dir()]);
        take_unless_ended(taking, || Ok(self.hosts_in_use().is_empty()))
    }

    /// The newest whole generation; 0 for none.
    pub fn newest(&self) -> u64 {
        let names = std::fs::read_dir(self.work.join("job/gen")).into_iter().flatten().flatten();
        let numbers = names.filter_map(|e| e.file_name().to_str()?.parse().ok());
        numbers.max().unwrap_or(0)
    }

    /// Kills everything on all hosts.
    pub fn crash(&mut self) {
        self.hosts.kill_all();
        if let Some(mut front) = self.front.take() {
            let _ = front.wait();
        }
    }

    /// Kills everything, restarts the job with its parts on other hosts, and waits until the programs that tell in each
    /// of `beats` go on.
    pub fn crash_and_shift(&mut self, shift: usize, beats: &[&str]) -> Result<(), Failure> {
        self.crash();
        beats.iter().try_for_each(|file| crate::beat::forget(&self.work.join(file)))?;
        self.shift(shift);
        self.start_restart()?;
        self.progress_of_all(beats)
    }

    /// Waits for heartbeats in each of these files.
    pub fn progress_of_all(&mut self, beats: &[&str]) -> Result<(), Failure> {
        beats.iter().try_for_each(|file| self.progress_of(file))
    }

    /// The words that restart the job with its parts where `at` says.
    pub fn restart_words(&self) -> Vec<String> {
        let others: Vec<String> = self.at[1..].iter().map(|h| format!("h{h}")).collect();
        [&self.belay, "restart", &self.dir(), "--hosts", &others.join(",")]
            .map(str::to_owned)
            .to_vec()
    }

    /// Restarts on the host of part 0; `more` says where the others are.
    pub fn restart(&mut self, more: &[&str]) -> Result<(), Failure> {
        let (belay, dir) = (self.belay.clone(), self.dir());
        self.begin_restart(&[&[&belay, "restart", &dir][..], more].concat())
    }

    /// Restarts with the parts where `at` says a program without heartbeats.
    pub fn start_restart(&mut self) -> Result<(), Failure> {
        let words = self.restart_words();
        self.start(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Restarts with the parts where `at` says.
    pub fn restart_at(&mut self, more: &[&str]) -> Result<(), Failure> {
        let words = self.restart_words();
        let words: Vec<&str> = words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        self.begin_restart(&words)
    }

    fn begin_restart(&mut self, words: &[&str]) -> Result<(), Failure> {
        beat::forget(&self.work.join("beat"))?;
        self.start(words)?;
        self.progress()
    }

    /// Moves every part, the first too, to the host that is `shift` further than where it was launched.
    pub fn shift(&mut self, shift: usize) {
        self.at = (0..self.at.len()).map(|part| (part + shift) % self.all + 1).collect();
    }

    /// Hosts on which a belay runs.
    pub fn hosts_in_use(&self) -> Vec<usize> {
        (1..=self.all).filter(|h| !self.hosts.find(*h, "belay").is_empty()).collect()
    }

    /// Lets the program end and wants its good verdict.
    pub fn verdict(&mut self) -> Result<(), Failure> {
        std::fs::write(self.work.join("go"), "").map_err(|e| e.to_string())?;
        let begin = Instant::now();
        loop {
            // Asked before the output is read: what is said last is said before the end.
            let ended = self.front.as_mut().map(Child::try_wait);
            let said = self.said();
            match ended {
                Some(Ok(Some(s))) if s.success() && said.contains("PASS") => return Ok(()),
                // What comes after the verdict hangs now and then, also without belay: see mpicheck.h.
                Some(Ok(_)) if self.kind == Kind::Mpich && said.contains("PASS") => return Ok(()),
                Some(Ok(None)) if begin.elapsed() < LIMIT => std::thread::sleep(Duration::from_millis(5)),
                other => return Err(format!("{other:?}: {said}")),
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.crash();
        unmount(&self.work.join("job"));
        if std::env::var_os("BELAY_KEEP").is_none() {
            std::fs::remove_dir_all(&self.work).ok();
        }
    }
}

/// A line for each removed file below `dir` that some process has open.
fn removed_and_open(dir: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for pid in procs::all() {
        for fd in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let to = std::fs::read_link(fd.path()).unwrap_or_default().display().to_string();
            if to.starts_with(dir) && to.ends_with(" (deleted)") {
                let kib = std::fs::metadata(fd.path()).map_or(0, |m| m.blocks() / 2);
                let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                lines.push(format!("{kib} KiB held by {pid} ({}): {to}", line.replace('\0', " ").trim()));
            }
        }
    }
    lines
}

/// Files below `dir` whose paths contain `words`, in the order of their paths.
pub fn files(dir: &Path, words: &str) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for e in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        match e.file_type() {
            Ok(t) if t.is_dir() => out.extend(files(&e.path(), words)),
            _ if e.path().to_string_lossy().contains(words) => out.push(e.path()),
            _ => {}
        }
    }
    out.sort();
    out
}
