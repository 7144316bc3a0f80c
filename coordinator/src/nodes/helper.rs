//! What a restart has done on hosts of the job, through the job's remote shell: `belay store ...` there.

use super::remote::{quote, RemoteShell};
use super::table::Row;
use crate::{sys, Failure};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

/// One that is running.
pub(crate) struct Helper {
    /// As the remote shell calls it.
    pub(crate) host: String,
    /// The remote shell.
    pub(crate) child: Child,
    said: io::PipeReader,
}

impl Helper {
    /// Runs `belay` with these words on `host`, one of those of `rows` or like them, or this one.
    pub(crate) fn start(rows: &[Row], host: &str, words: &[&str], input: OwnedFd) -> Result<Self, Failure> {
        let (said, out) = pipes()?;
        let errors = io::stderr().as_fd().try_clone_to_owned();
        let errors = errors.map_err(|e| Failure::system("pass standard error on", &e))?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let stdio = [input, out.into(), errors];
        let child = shell_to(rows, host).spawn(&command(words)?, (Some(stdio), None), &path)?;
        Ok(Self {
            host: host.into(),
            child,
            said,
        })
    }

    /// What it says, until it says no more or, with `line`, to the end of a line; none where nothing is heard of it for longer than `limit`.
    pub(crate) fn hear(&mut self, line: bool, limit: Duration) -> Option<String> {
        hear(&mut self.said, line, limit)
    }

    /// Waits for it no longer. A shell to a host that does not answer would not end.
    pub(crate) fn end(mut self) {
        drop(self.said);
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Standard input for one that reads nothing.
pub(crate) fn nothing() -> Result<OwnedFd, Failure> {
    let null = std::fs::File::open("/dev/null").map_err(|e| Failure::system("open /dev/null", &e))?;
    Ok(null.into())
}

pub(crate) fn pipes() -> Result<(io::PipeReader, io::PipeWriter), Failure> {
    io::pipe().map_err(|e| Failure::system("make a pipe", &e))
}

/// The command line of this program for another host's shell.
fn command(words: &[&str]) -> Result<String, Failure> {
    let me = std::env::current_exe().map_err(|e| Failure::system("find belay", &e))?;
    let quoted: Vec<String> = words.iter().map(|w| quote(w)).collect();
    Ok(format!("exec {} {}", quote(&me.display().to_string()), quoted.join(" ")))
}

/// A remote shell to `host`, or, for this host, a local one.
fn shell_to(rows: &[Row], host: &str) -> RemoteShell {
    let like = rows.iter().find(|r| r.host() == host).or(rows.first());
    match like.filter(|_| host != super::name_here()) {
        Some(row) => row.words.to(host),
        None => RemoteShell {
            program: "sh".into(),
            options: Vec::new(),
            host: "-c".into(),
            command: String::new(),
            tasks: 0,
        },
    }
}

/// What a child says on `said`, until it says no more or, with `line`, to the end of a line; none where nothing is heard of it for longer than `limit`.
fn hear(said: &mut io::PipeReader, line: bool, limit: Duration) -> Option<String> {
    let (mut heard, mut text) = (Instant::now(), Vec::new());
    while heard.elapsed() < limit {
        match sys::readable_within(said.as_raw_fd(), limit.saturating_sub(heard.elapsed())) {
            Ok(true) => heard = Instant::now(),
            Ok(false) => continue,
            Err(_) => return None,
        }
        let mut some = [0; 4096];
        match said.read(&mut some) {
            Ok(0) if line => return None,
            Ok(0) => return String::from_utf8(text).ok(),
            Ok(n) => text.extend_from_slice(&some[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
        if line && text.ends_with(b"\n") {
            return String::from_utf8(text).ok().map(|t| t.trim().to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn who_is_silent_is_not_waited_for_and_who_gives_signs_of_life_is() {
        let (mut said, mut out) = pipes().unwrap();
        assert_eq!(hear(&mut said, false, Duration::from_millis(20)), None);
        let limit = Duration::from_secs(3);
        let busy = std::thread::spawn(move || {
            let begin = Instant::now();
            while begin.elapsed() < limit + Duration::from_millis(500) {
                out.write_all(b"\n").unwrap();
                std::thread::sleep(Duration::from_millis(50));
            }
            out.write_all(b"done\n").unwrap();
        });
        assert_eq!(hear(&mut said, false, limit).as_deref().map(str::trim), Some("done"));
        busy.join().unwrap();
    }
}
