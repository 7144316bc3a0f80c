//! `[encryption]`: the keys that seal what a job writes to durable tiers, and where they come from.
//!
//! ```text
//! key_file      read again each time a tier is opened, and for each flush: a key that is added seals from then on
//! key_command   run once, before there is a program: what the agent starts would be a part of the job
//! ```

use crate::config::{Config, Encryption};
use crate::sys::{self, Disposition};
use crate::{failure, Failure};
use belay_kernel::trust::{self, Untrusted};
use belay_storage::seal::Keys;
use belay_wire::Exit;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest text of keys that is read.
const MAX_TEXT: u64 = 64 << 10;
/// How long the command may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often is looked whether one that has answered has ended.
const LOOK: Duration = Duration::from_millis(5);

/// What a command said, which is not run twice.
type Said = (Vec<String>, Result<Arc<Keys>, Failure>);
static SAID: Mutex<Option<Said>> = Mutex::new(None);

impl Encryption {
    /// The keys, where anything is sealed.
    pub(crate) fn keys(&self) -> Result<Option<Arc<Keys>>, Failure> {
        if let Some(path) = &self.key_file {
            return read(path).map(|keys| Some(Arc::new(keys)));
        }
        let Some(words) = &self.key_command else { return Ok(None) };
        let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
        match &*said {
            Some((of, answer)) if of == words => answer.clone(),
            _ => {
                let answer = ask(words).map(Arc::new);
                *said = Some((words.clone(), answer.clone()));
                answer
            }
        }
        .map(Some)
    }
}

/// Refuses to go on with `new` what was configured as `old` where that would leave plain on a tier what was sealed.
pub fn check_goes_on(old: &Config, new: &Config) -> Result<(), Failure> {
    if !old.encryption.is_on() || new.encryption.is_on() {
        return Ok(());
    }
    let why = "what this job has on its durable tiers is sealed, and the configuration has no [encryption]; name the key there or with --key-file, or begin anew with belay gc --all and belay launch";
    Err(Failure::new(Exit::NoKey, why))
}

/// Before a job begins or goes on: whether what is configured can be done, and the keys.
pub fn prepare(config: &Config) -> Result<(), Failure> {
    if !config.encryption.is_on() {
        return Ok(());
    }
    if config.redundancy.scheme.is_some() {
        let why = "[encryption] is not possible together with redundancy: what lies on the disks of other hosts would not be sealed; leave out --redundancy ([redundancy]) or --key-file ([encryption])";
        return Err(Failure::new(Exit::Usage, why));
    }
    if config.durable().next().is_none() {
        return Ok(());
    }
    config.encryption.keys().map(drop)
}

fn parse(what: &str, text: &[u8]) -> Result<Keys, Failure> {
    Keys::parse(text).map_err(|why| Failure::new(Exit::NoKey, format!("{what}: {why}")))
}

fn read(path: &Path) -> Result<Keys, Failure> {
    let what = format!("key file {}", path.display());
    let refused = |why: String| Failure::new(Exit::NoKey, format!("{what}: {why}"));
    let missing = |e: &io::Error| {
        refused(format!(
            "{}; put it back, or name another with --key-file or in [encryption]",
            failure::reason(e)
        ))
    };
    let file = trust::secret(path).map_err(|e| match e {
        Untrusted::Io(e) => missing(&e),
        others => refused(others.to_string()),
    })?;
    let mut text = Vec::new();
    file.take(MAX_TEXT + 1).read_to_end(&mut text).map_err(|e| missing(&e))?;
    if text.len() as u64 > MAX_TEXT {
        return Err(refused(format!("more than {MAX_TEXT} bytes, as no file of keys has")));
    }
    parse(&what, &text)
}

/// Runs the command of `words`, of which at least one is there, and reads what it prints.
fn ask(words: &[String]) -> Result<Keys, Failure> {
    let what = format!("key command {}", words.first().map_or("", String::as_str));
    let refused = |why: String| Failure::new(Exit::NoKey, format!("{what}: {why}; see key_command in [encryption]"));
    // Whoever started belay may not want to know of its children.
    let sigchld = Disposition::set_default(libc::SIGCHLD);
    let result = output(words, PATIENCE);
    sigchld.restore();
    match result {
        Ok(Ok(text)) => parse(&what, &text),
        Ok(Err(why)) => Err(refused(why)),
        Err(e) => Err(refused(failure::reason(&e))),
    }
}

/// What the command prints within `patience`, or why it is none.
fn output(words: &[String], patience: Duration) -> io::Result<Result<Vec<u8>, String>> {
    let mut command = Command::new(&words[0]);
    let command = command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let mut text = Vec::new();
    let why = attend(&mut child, &mut text, patience);
    if !matches!(why, Ok(None)) {
        // It may have ended meanwhile.
        child.kill().ok();
    }
    let status = child.wait()?;
    Ok(match why? {
        Some(why) => Err(why),
        None if !status.success() => Err(format!("it ended with {status}")),
        None => Ok(text),
    })
}

/// Reads what `child` prints until it has ended; why not, where that is too long or takes too long.
fn attend(child: &mut Child, text: &mut Vec<u8>, patience: Duration) -> io::Result<Option<String>> {
    let end = Instant::now() + patience;
    let late = |what: &str| Ok(Some(format!("{what} within {} s", patience.as_secs())));
    let mut out = child.stdout.take();
    let mut part = [0; 4096];
    while let Some(open) = &mut out {
        let left = end.saturating_duration_since(Instant::now());
        if !sys::readable_within(open.as_raw_fd(), left)? {
            return late("no answer");
        }
        match open.read(&mut part)? {
            0 => out = None,
            n => text.extend_from_slice(&part[..n]),
        }
        if text.len() as u64 > MAX_TEXT {
            return Ok(Some(format!("it printed more than {MAX_TEXT} bytes, as no keys have")));
        }
    }
    // It may have closed its output, and go on.
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            return late("it has answered, but not ended");
        }
        std::thread::sleep(LOOK);
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{symlink, PermissionsExt};
    use std::path::PathBuf;

    fn scratch(test: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("belay-keys-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn write(path: &Path, text: &str, mode: u32) {
        std::fs::write(path, text).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    fn of(e: &Encryption) -> Result<Arc<Keys>, Failure> {
        e.keys().map(Option::unwrap)
    }

    #[test]
    fn a_key_file_is_the_users_alone_and_read_anew() {
        let dir = scratch("file");
        let path = dir.join("keys");
        let e = Encryption::by_file(&path).unwrap();
        let refused = |words: &[&str]| {
            let f = of(&e).unwrap_err();
            assert_eq!(f.exit, Exit::NoKey);
            for w in words.iter().chain(&[path.to_str().unwrap()]) {
                assert!(f.to_string().contains(w), "{f}: {w}");
            }
        };
        refused(&["no such file", "--key-file"]);
        let one = "1".repeat(64);
        for mode in [0o640, 0o604, 0o620, 0o602] {
            write(&path, &one, mode);
            refused(&["mode", "chmod 600"]);
        }
        write(&path, &one, 0o600);
        let first = of(&e).unwrap().newest();
        write(&path, &format!("{one}\n{}", "2".repeat(64)), 0o400);
        assert_ne!(of(&e).unwrap().newest(), first);
        write(&path, "x", 0o600);
        refused(&["line 1"]);
        write(&path, &"#\n".repeat(40_000), 0o600);
        refused(&["65536 bytes"]);
        std::fs::rename(&path, dir.join("elsewhere")).unwrap();
        symlink(dir.join("elsewhere"), &path).unwrap();
        refused(&["symbolic link"]);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        refused(&["not a regular file"]);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_key_file_where_others_can_exchange_it_is_refused() {
        let dir = scratch("open");
        let path = dir.join("keys");
        write(&path, &"1".repeat(64), 0o600);
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o777)).unwrap();
        let f = of(&Encryption::by_file(&path).unwrap()).unwrap_err();
        assert!(f.to_string().contains("mode 777"), "{f}");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_command_that_does_not_end_is_ended() {
        let begin = Instant::now();
        for script in ["exec sleep 600", "exec >&-; exec sleep 600"] {
            let words = ["sh", "-c", script].map(str::to_owned);
            let why = output(&words, Duration::from_secs(1)).unwrap().unwrap_err();
            assert!(why.ends_with("within 1 s"), "{why}");
        }
        assert!(begin.elapsed() < Duration::from_secs(300), "{:?}", begin.elapsed());
    }

    #[test]
    fn a_command_is_asked_once_and_named_when_it_fails() {
        let dir = scratch("command");
        let by = |script: &str| Encryption {
            key_file: None,
            key_command: Some(["sh", "-c", script].map(str::to_owned).to_vec()),
        };
        let count = dir.join("count");
        let good = by(&format!("echo x >> {}; echo {}", count.display(), "3".repeat(64)));
        assert_eq!(of(&good).unwrap(), of(&good).unwrap());
        assert_eq!(std::fs::read_to_string(&count).unwrap(), "x\n");
        for (script, words) in [
            ("exit 3", "exit status: 3"),
            ("echo nothing", "line 1"),
            ("yes '#'", "more than 65536"),
        ] {
            let f = of(&by(script)).unwrap_err();
            assert!(
                f.exit == Exit::NoKey && f.to_string().starts_with("key command sh: ") && f.to_string().contains(words),
                "{f}"
            );
        }
        let missing = Encryption {
            key_command: Some(vec!["/no/such/command".into()]),
            ..Encryption::default()
        };
        assert!(of(&missing).unwrap_err().to_string().contains("no such file"));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
