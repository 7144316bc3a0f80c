//! What the launcher's tests share: a scratch directory with a job in it, and commands run there.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The program under test.
pub(crate) const BELAY: &str = env!("CARGO_BIN_EXE_belay");

/// Longest wait for something that takes milliseconds.
const LIMIT: Duration = Duration::from_secs(60);

/// A scratch directory. Dropped, it ends the job in it.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    /// A new directory named after the test.
    pub(crate) fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("belay-launcher-{test}-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Scratch(dir)
    }

    /// `program` with `args` in this directory, without terminal, in a process group of its own.
    pub(crate) fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut c = Command::new(program);
        c.args(args).current_dir(&self.0).env("LC_ALL", "C").env_remove("BELAY_DIR");
        c.stdin(Stdio::null()).process_group(0);
        c
    }

    /// Runs `belay` to its end.
    pub(crate) fn belay(&self, args: &[&str]) -> Output {
        self.command(BELAY, args).output().unwrap()
    }

    /// Starts `belay launch sh -c SCRIPT`, with both outputs in the file `out`.
    pub(crate) fn launch(&self, options: &[&str], script: &str) -> Child {
        let out = std::fs::File::create(self.0.join("out")).unwrap();
        let err = out.try_clone().unwrap();
        let args = [&["launch"], options, &["--", "sh", "-c", script]].concat();
        self.command(BELAY, &args).stdout(out).stderr(err).spawn().unwrap()
    }

    /// What the launched command has printed so far.
    pub(crate) fn out(&self) -> String {
        std::fs::read_to_string(self.0.join("out")).unwrap()
    }

    /// Waits until the command has printed `word`.
    pub(crate) fn wait_for(&self, word: &str) {
        wait_until(&format!("{word:?} in the output"), || self.out().contains(word));
    }

    /// The status document.
    pub(crate) fn status(&self) -> serde_json::Value {
        let o = self.belay(&["status", "--json"]);
        assert!(o.status.success(), "{o:?}");
        serde_json::from_slice(&o.stdout).unwrap()
    }

    /// PID of the agent.
    pub(crate) fn agent(&self) -> i32 {
        pid(&self.status()["agent"]["host_pid"])
    }

    /// Makes the file that the scripts of the tests wait for.
    pub(crate) fn go(&self) {
        std::fs::write(self.0.join("go"), "").unwrap();
    }

    /// The job directory.
    pub(crate) fn job(&self) -> PathBuf {
        self.0.join("belay-job")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.belay(&["stop", "--grace", "0"]);
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// A PID in a document.
pub(crate) fn pid(v: &serde_json::Value) -> i32 {
    i32::try_from(v.as_i64().unwrap()).unwrap()
}

/// Waits until `done`, failing after a while.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "no {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a signal.
pub(crate) fn kill(pid: i32, signal: i32) {
    // SAFETY: takes numbers only; the tests pass processes that they started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// A failure of belay: its status, and one line on standard error that contains `words`.
pub(crate) fn assert_failed(o: &Output, code: i32, words: &str) {
    let err = String::from_utf8_lossy(&o.stderr);
    assert_eq!(o.status.code(), Some(code), "{err}");
    assert_eq!(err.trim_end().lines().count(), 1, "{err}");
    assert!(err.starts_with("belay: ") && err.contains(words), "{err}");
}

/// Whether the tests run as root.
pub(crate) fn am_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

/// Whether the program that capture injects has been built beside `belay`; `cargo build --workspace` does.
pub(crate) fn require_helpers() {
    let helper = Path::new(BELAY).with_file_name("belay-inject");
    assert!(
        helper.exists(),
        "{} is missing: cargo build --workspace first",
        helper.display()
    );
}
