//! Before a restart: every part's store on its host is made whole, from the hosts that are left.
//!
//! ```text
//! belay restart ─┬─ ssh OLD HOST belay store serve   for each host of the record that answers
//!                └─ ssh NEW HOST belay store heal    for each part, all at once; here for the root's own
//! ```
//! The servers end with the pipe to their standard input, so also when this process is killed.

use super::record::Record;
use crate::jobdir::JobDir;
use crate::nodes::alive::hosts_of;
use crate::nodes::remote::{quote, RemoteShell};
use crate::nodes::table::{self, Row};
use crate::{generations, nodes, sys, Failure};
use belay_tree::Direct;
use belay_wire::Exit;
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

/// How long a host may take to say where it serves.
const LIMIT: Duration = Duration::from_secs(30);

/// A server on another host.
struct Source {
    host: String,
    child: Child,
    said: io::PipeReader,
    /// The server ends when this is closed.
    _hold: io::PipeWriter,
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
    match like.filter(|_| host != nodes::name_here()) {
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

fn pipes() -> Result<(io::PipeReader, io::PipeWriter), Failure> {
    io::pipe().map_err(|e| Failure::system("make a pipe", &e))
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

/// Starts a server on `host`; none where it cannot be reached.
fn serve(rows: &[Row], host: &str, job: &Path) -> Result<Source, Failure> {
    let (said, out) = pipes()?;
    let (input, hold) = pipes()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let command = command(&["store", "serve", "--dir", &job.display().to_string()])?;
    let errors = io::stderr().as_fd().try_clone_to_owned();
    let errors = errors.map_err(|e| Failure::system("pass standard error on", &e))?;
    let child = shell_to(rows, host).spawn(&command, (Some([input.into(), out.into(), errors]), None), &path)?;
    Ok(Source {
        host: host.into(),
        child,
        said,
        _hold: hold,
    })
}

/// A part that is being healed.
struct Healing {
    host: String,
    child: Child,
    said: io::PipeReader,
}

fn heal(rows: &[Row], host: &str, job: &Path, (tag, number): (u64, u64), sources: &str) -> Result<Healing, Failure> {
    let (said, out) = pipes()?;
    let null = std::fs::File::open("/dev/null").map_err(|e| Failure::system("open /dev/null", &e))?;
    let errors = io::stderr().as_fd().try_clone_to_owned();
    let errors = errors.map_err(|e| Failure::system("pass standard error on", &e))?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let (dir, tag, number) = (job.display().to_string(), tag.to_string(), number.to_string());
    let words = [
        "store",
        "heal",
        "--dir",
        &dir,
        "--tag",
        &tag,
        "--generation",
        &number,
        "--sources",
        sources,
    ];
    let child = shell_to(rows, host).spawn(&command(&words)?, (Some([null.into(), out.into(), errors]), None), &path)?;
    Ok(Healing {
        host: host.into(),
        child,
        said,
    })
}

/// What `belay store heal` says: bytes rebuilt, or why not.
pub(super) type Healed = Result<u64, (Exit, String)>;

/// Makes generation `number` whole on all hosts where it will be restarted: the root's part here, the others on the hosts `given`, or where they were.
pub(crate) fn prepare(dir: &JobDir, number: u64, given: &[String], tell: &mut dyn FnMut(&str)) -> Result<(), Failure> {
    let job = dir.path();
    let (rows, root) = match Record::read(job, number)? {
        Some(record) => (record.rows, record.root),
        None => {
            let rows = table::read(&dir.generations().join(generations::name(number)))?;
            (rows, nodes::name_here())
        }
    };
    if rows.is_empty() {
        return Ok(());
    }
    let begin = Instant::now();
    let old: BTreeSet<&str> = rows.iter().map(Row::host).chain([root.as_str()]).collect();
    // Hosts that are gone are what this is for.
    let mut sources: Vec<Source> = old.iter().filter_map(|host| serve(&rows, host, job).ok()).collect();
    let mut reached = Vec::new();
    for source in &mut sources {
        match hear(&mut source.said, true, LIMIT.saturating_sub(begin.elapsed())) {
            Some(addresses) => reached.push(addresses.replace(',', "+")),
            None => tracing::warn!(host = source.host, "no blocks from this host"),
        }
    }
    let reached = reached.join(",");
    let mut all = vec![heal(&rows, &nodes::name_here(), job, (0, number), &reached)?];
    for (row, host) in rows.iter().zip(hosts_of(&rows, given, true)) {
        let host = host.as_deref().unwrap_or(row.host());
        all.push(heal(&rows, host, job, (row.tag, number), &reached)?);
    }
    let mut failure = None;
    for mut part in all {
        let Some(said) = hear(&mut part.said, false, Direct::SILENCE) else {
            drop(part.child.kill());
            drop(part.child.wait());
            let seconds = Direct::SILENCE.as_secs();
            let why = format!(
                "generation {number} could not be made whole on {}: no sign of life for {seconds} s; leave that host out with --hosts",
                part.host
            );
            failure.get_or_insert(Failure::new(Exit::RestartFailed, why));
            continue;
        };
        let ended = part.child.wait();
        match serde_json::from_str::<Healed>(said.trim()) {
            Ok(Ok(0)) => {}
            Ok(Ok(bytes)) => tell(&format!("generation {number}: {bytes} bytes rebuilt on {}", part.host)),
            // The one of an earlier attempt will have ended at the next.
            Ok(Err((Exit::AlreadyRunning, message))) => drop(failure.get_or_insert(Failure::new(Exit::RestartFailed, message))),
            Ok(Err((exit, message))) => drop(failure.get_or_insert(Failure::new(exit, message))),
            Err(_) => {
                let why = format!("generation {number} could not be made whole on {} ({ended:?})", part.host);
                failure.get_or_insert(Failure::new(Exit::RestartFailed, why));
            }
        }
    }
    for source in sources {
        let Source {
            mut child, said, _hold, ..
        } = source;
        drop((said, _hold));
        // A shell to a host that does not answer would keep us waiting.
        drop(child.kill());
        drop(child.wait());
    }
    tracing::info!(
        generation = number,
        ms = generations::ms(begin.elapsed()),
        "parts looked after"
    );
    failure.map_or(Ok(()), Err)
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
