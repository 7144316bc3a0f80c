//! A job under test: its work directory, its front process, and the commands given to it.

use crate::beat::{self, Beats};
use crate::place::{am_root, Place, User, NOBODY};
use crate::{procs, Failure};
use belay_still::Watch;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::chown;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// How long Linux keeps a closed connection in TIME_WAIT (TCP_TIMEWAIT_LEN).
const LINGERING: Duration = Duration::from_secs(60);

/// A job and the process in the foreground (the program, `belay launch` or `belay restart`).
#[derive(Debug)]
pub struct Job {
    /// Its work directory.
    pub work: PathBuf,
    user: User,
    belay: PathBuf,
    env: Vec<(String, String)>,
    front: Option<Child>,
    outputs: u32,
    identity: Vec<String>,
}

/// What a command printed, for messages.
pub fn text(o: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr))
        .trim()
        .to_owned()
}

/// `limit`, as many times longer as BELAY_TEST_SLOW says: for machines that are so many times slower than usual.
pub fn patient(limit: Duration) -> Duration {
    let times = std::env::var("BELAY_TEST_SLOW").ok().and_then(|v| v.parse().ok());
    limit * times.unwrap_or(1)
}

/// Runs `c` to its end, at most `limit` ([`patient`]); kills it (only it) after that.
pub fn output(mut c: Command, limit: Duration) -> Result<Output, Failure> {
    let limit = patient(limit);
    let what = format!("{:?} {:?}", c.get_program(), c.get_args().collect::<Vec<_>>());
    let child = c
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{what}: {e}"))?;
    let pid = child.id() as i32;
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || tx.send(child.wait_with_output()).ok());
    match rx.recv_timeout(limit) {
        Ok(r) => r.map_err(|e| format!("{what}: {e}")),
        Err(_) => {
            procs::kill_tree(pid);
            Err(format!("{what}: no end within {} s", limit.as_secs()))
        }
    }
}

/// `exit 3` or `signal 9`.
pub fn show(s: ExitStatus) -> String {
    s.signal()
        .map_or_else(|| format!("exit {}", s.code().unwrap_or(-1)), |n| format!("signal {n}"))
}

impl Job {
    /// A job with an own work directory; nothing runs yet.
    pub fn new(place: &Place, label: &str, user: User) -> Result<Self, Failure> {
        let work = place.work(label, user)?;
        Ok(Job {
            work,
            user,
            belay: place.belay(),
            env: Vec::new(),
            front: None,
            outputs: 0,
            identity: user.words().iter().map(|w| (*w).to_owned()).collect(),
        })
    }

    /// A job of ordinary user `id`: a user namespace shows everybody whom it does not map as [`NOBODY`], and so hides
    /// who is taken for somebody else.
    pub fn of_user(place: &Place, label: &str, id: u32) -> Result<Self, Failure> {
        let mut job = Self::new(place, label, User::Ordinary)?;
        chown(&job.work, Some(id), Some(id)).map_err(|e| format!("give away {}: {e}", job.work.display()))?;
        for word in &mut job.identity {
            *word = word.replace(&NOBODY.to_string(), &id.to_string());
        }
        Ok(job)
    }

    /// Whatever is started from here is in an IPC namespace of its own.
    pub fn in_own_ipc(&mut self) {
        self.identity.splice(..0, ["unshare", "--ipc", "--"].map(String::from));
    }

    /// The job directory given to belay.
    pub fn dir(&self) -> PathBuf {
        self.work.join("job")
    }

    /// One more environment variable for everything started from here.
    pub fn set(&mut self, key: &str, value: &str) {
        self.env.push((key.into(), value.into()));
    }

    /// A command in the work directory, as the job's user, in a small known environment.
    pub fn command(&self, argv: &[String]) -> Command {
        let before = if am_root() { self.identity.as_slice() } else { &[] };
        let mut words = before.iter().chain(argv).map(String::as_str);
        let mut c = Command::new(words.next().unwrap_or_default());
        c.args(words);
        c.current_dir(&self.work)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        c.env("HOME", &self.work)
            .env("LANG", "C.UTF-8")
            .env("BELAY_TEST_GO", self.go())
            .env("BELAY_TEST_BEAT", self.beat_file());
        c.env("SHELL", "/bin/sh").env("PYTHONDONTWRITEBYTECODE", "1");
        if self.user == User::Root {
            // Open MPI's own permission to be started by root.
            c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
                .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        }
        c.envs(self.env.iter().map(|(k, v)| (k, v)));
        c
    }

    /// `belay` with arguments.
    pub fn belay(&self, args: &[&str]) -> Command {
        self.belay_under(&[], args)
    }

    /// The same, run by the command `under`.
    fn belay_under(&self, under: &[String], args: &[&str]) -> Command {
        let mut argv = under.to_vec();
        argv.push(self.belay.display().to_string());
        argv.extend(args.iter().map(|s| (*s).to_owned()));
        self.command(&argv)
    }

    fn go(&self) -> PathBuf {
        self.work.join("go")
    }

    fn beat_file(&self) -> PathBuf {
        self.work.join("beat")
    }

    fn out_file(&self) -> PathBuf {
        self.work.join(format!("out.{}", self.outputs))
    }

    /// Starts `c` as the job's front process: own process group, output to a new file.
    pub fn start(&mut self, mut c: Command) -> Result<(), Failure> {
        self.outputs += 1;
        let path = self.out_file();
        let open = |p: &Path| OpenOptions::new().create(true).append(true).open(p);
        let out: File = open(&path).map_err(|e| format!("create {}: {e}", path.display()))?;
        let err = out.try_clone().map_err(|e| format!("duplicate {}: {e}", path.display()))?;
        c.stdin(Stdio::null()).stdout(out).stderr(err).process_group(0);
        self.front = Some(c.spawn().map_err(|e| format!("start {:?}: {e}", c.get_program()))?);
        Ok(())
    }

    /// Starts the program itself.
    pub fn native(&mut self, argv: &[String]) -> Result<(), Failure> {
        let c = self.command(argv);
        self.start(c)
    }

    /// Starts the program under `belay launch`.
    pub fn launch(&mut self, options: &[String], argv: &[String]) -> Result<(), Failure> {
        self.launch_under(&[], options, argv)
    }

    /// The same, run by the command `under`.
    pub fn launch_under(&mut self, under: &[String], options: &[String], argv: &[String]) -> Result<(), Failure> {
        let dir = self.dir().display().to_string();
        let mut args = vec!["launch", "--ckpt-dir", &dir];
        args.extend(options.iter().map(String::as_str));
        args.push("--");
        args.extend(argv.iter().map(String::as_str));
        let c = self.belay_under(under, &args);
        self.start(c)
    }

    /// Starts `belay restart`.
    pub fn restart(&mut self, options: &[&str]) -> Result<(), Failure> {
        self.restart_under(&[], options)
    }

    /// The same, run by the command `under`.
    pub fn restart_under(&mut self, under: &[String], options: &[&str]) -> Result<(), Failure> {
        let dir = self.dir().display().to_string();
        let mut args = vec!["restart", dir.as_str()];
        args.extend(options);
        let c = self.belay_under(under, &args);
        self.start(c)
    }

    /// Kills the job and restarts it from its newest checkpoint; returns when the program makes progress.
    pub fn crash_and_restart(&mut self, patience: Duration) -> Result<(), Failure> {
        self.kill_all()?;
        self.clear_beat()?;
        self.restart(&[])?;
        self.progress(patience)
    }

    /// Runs `belay checkpoint`.
    pub fn checkpoint_raw(&self, options: &[&str]) -> Result<Output, Failure> {
        let dir = self.dir().display().to_string();
        let mut args = vec!["checkpoint", dir.as_str()];
        args.extend(options);
        output(self.belay(&args), Duration::from_secs(90))
    }

    /// Runs `belay checkpoint`, which must commit.
    pub fn checkpoint(&self) -> Result<(), Failure> {
        let o = self.checkpoint_raw(&[])?;
        if o.status.success() {
            return Ok(());
        }
        Err(format!("belay checkpoint: {}: {}", show(o.status), text(&o)))
    }

    /// The document of `belay status --json`.
    pub fn status(&self) -> Result<serde_json::Value, Failure> {
        let dir = self.dir().display().to_string();
        let o = output(self.belay(&["status", &dir, "--json"]), Duration::from_secs(120))?;
        serde_json::from_slice(&o.stdout).map_err(|e| format!("{e}: {}", text(&o)))
    }

    /// Waits until the job answers to commands; `false` when it has ended before.
    pub fn answers(&mut self, patience: Duration) -> Result<bool, Failure> {
        let end = Instant::now() + patient(patience);
        while !self.has_ended()? {
            let dir = self.dir().display().to_string();
            let o = output(self.belay(&["status", &dir, "--json"]), patience)?;
            if String::from_utf8_lossy(&o.stdout).contains("\"running\": true") {
                return Ok(true);
            }
            if Instant::now() > end {
                return Err(format!("no answer within {} s: {}", patience.as_secs(), text(&o)));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(false)
    }

    /// Whether the front process has ended.
    pub fn has_ended(&mut self) -> Result<bool, Failure> {
        self.ended().map(|s| s.is_some())
    }

    /// PID of the front process.
    pub fn pid(&self) -> Option<i32> {
        self.front.as_ref().map(|c| c.id() as i32)
    }

    /// Everything the job printed since its last start, cut to its end.
    pub fn output_text(&self) -> String {
        let s = String::from_utf8_lossy(&std::fs::read(self.out_file()).unwrap_or_default()).into_owned();
        let tail: String = s.chars().rev().take(4000).collect::<Vec<_>>().into_iter().rev().collect();
        tail.trim().to_owned()
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>, Failure> {
        match &mut self.front {
            Some(c) => c.try_wait().map_err(|e| format!("wait for the job: {e}")),
            None => Err("no job is running".into()),
        }
    }

    /// Forgets old heartbeats.
    pub fn clear_beat(&self) -> Result<(), Failure> {
        beat::forget(&self.beat_file())
    }

    /// Waits for two new heartbeats: the program makes progress. A restart that says that it waits for TIME_WAIT to end
    /// may have a minute more.
    pub fn progress(&mut self, patience: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        let mut patience = patient(patience);
        let mut lingering = false;
        Beats::from_now(self.beat_file()).wait(|| {
            if let Some(s) = self.ended()? {
                return Err(format!("ended early with {}; its output:\n{}", show(s), self.output_text()));
            }
            if start.elapsed() > patience && !lingering && self.output_text().contains("(TIME_WAIT)") {
                lingering = true;
                patience += LINGERING;
            }
            if start.elapsed() > patience {
                return Err(format!(
                    "no progress within {} s; {}; its output:\n{}",
                    patience.as_secs(),
                    self.stuck(),
                    self.output_text()
                ));
            }
            Ok(())
        })
    }

    /// Waits for two new heartbeats of a program that a shell has started.
    pub fn beats(&self, patience: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        let late = || Err(format!("no progress within {} s", patience.as_secs()));
        Beats::from_now(self.beat_file()).wait(|| if start.elapsed() > patience { late() } else { Ok(()) })
    }

    /// What each thread of the job is doing and what its log says last, for a hang's message.
    pub fn stuck(&self) -> String {
        let mut s = String::from("threads:");
        for p in self.pid().map(procs::tree).unwrap_or_default() {
            for t in procs::threads(p) {
                let read = |f: &str| std::fs::read_to_string(format!("/proc/{p}/task/{t}/{f}")).unwrap_or_default();
                let (stat, call) = (read("stat"), read("syscall"));
                let state = stat.rsplit_once(") ").map_or("?", |(_, rest)| &rest[..1]);
                let call: Vec<&str> = call.split_whitespace().take(4).collect();
                s.push_str(&format!(
                    " [{p} {t} {} {state} wchan {} syscall {}]",
                    read("comm").trim(),
                    read("wchan"),
                    call.join(" ")
                ));
            }
        }
        s.push_str("; log:");
        for line in self.log().lines().rev().take(6).collect::<Vec<_>>().into_iter().rev() {
            s.push_str(&format!("\n{line}"));
        }
        s
    }

    /// The newest log in the job directory.
    fn log(&self) -> String {
        let logs = std::fs::read_dir(self.dir().join("log")).into_iter().flatten().flatten();
        let newest = logs
            .map(|f| f.path())
            .max_by_key(|p| p.metadata().and_then(|m| m.modified()).ok());
        newest.and_then(|p| std::fs::read_to_string(p).ok()).unwrap_or_default()
    }

    /// Kills every process of the job, launcher included, with SIGKILL.
    pub fn kill_all(&mut self) -> Result<(), Failure> {
        if let Some(mut c) = self.front.take() {
            procs::kill_tree(c.id() as i32);
            c.wait().map_err(|e| format!("wait for the killed job: {e}"))?;
        }
        Ok(())
    }

    /// Tells the program to end.
    pub fn tell_end(&self) -> Result<(), Failure> {
        std::fs::write(self.go(), "").map_err(|e| format!("create {}: {e}", self.go().display()))
    }

    /// Waits for the end of the front process.
    pub fn wait(&mut self, patience: Duration) -> Result<ExitStatus, Failure> {
        let patience = patient(patience);
        let end = Instant::now() + patience;
        loop {
            if let Some(s) = self.ended()? {
                self.front = None;
                return Ok(s);
            }
            if Instant::now() > end {
                return Err(format!(
                    "no end within {} s; {}; its output:\n{}",
                    patience.as_secs(),
                    self.stuck(),
                    self.output_text()
                ));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Tells the program to end and checks exit status, verdict, and that nothing is left behind.
    pub fn verdict(&mut self, file: bool, patience: Duration) -> Result<(), Failure> {
        self.tell_end()?;
        let s = self.wait(patience)?;
        let out = self.output_text();
        let said = if file {
            std::fs::read_to_string(self.work.join("verdict")).unwrap_or_default()
        } else {
            out.clone()
        };
        if !s.success() || !said.lines().any(|l| l.starts_with("PASS ")) || out.lines().any(|l| l.starts_with("FAIL ")) {
            return Err(format!("{}; its output:\n{out}", show(s)));
        }
        self.left_behind()
    }

    /// Fails when processes of this job still run.
    pub fn left_behind(&self) -> Result<(), Failure> {
        self.left_behind_within(Duration::from_secs(2))
    }

    /// The same, where some may go on for a while.
    pub fn left_behind_within(&self, patience: Duration) -> Result<(), Failure> {
        let watch = Watch::begin();
        loop {
            let left = procs::marked(&self.work);
            if left.is_empty() {
                return Ok(());
            }
            if watch.elapsed() > patient(patience) {
                for (p, _) in &left {
                    procs::signal(*p, libc::SIGKILL);
                }
                return Err(format!("processes left behind: {left:?}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill_all().ok();
        for (p, _) in procs::marked(&self.work) {
            procs::signal(p, libc::SIGKILL);
        }
        if std::env::var_os("BELAY_KEEP").is_none() {
            std::fs::remove_dir_all(&self.work).ok();
        }
    }
}
