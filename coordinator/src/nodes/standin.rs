//! A process that stands in for a remote shell inside the job. It asks the agent to start the shell, outside of the
//! job, with its own standard descriptors, and waits to be told how that ended. It is checkpointed like any other
//! process; after a restart the agent knows it by its PID, and the shell is another.

use super::path::{find, STANDINS};
use super::remote::{farewell_signal, RemoteShell, FAREWELL};
use super::srun::SRUN;
use super::step::{self, Outside, Plan};
use crate::jobdir::JobDir;
use crate::shell::text;
use crate::sys::{self, Disposition, SignalSet};
use crate::Failure;
use belay_wire::socket::{self, Patience};
use belay_wire::{Event, Exit, Request};
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Remote shells that are stood in for.
const NAMES: [&str; 4] = ["ssh", "rsh", "remsh", SRUN];

/// Makes the directory of stand-ins: one for each remote shell that PATH leads to.
pub(crate) fn install(dir: &JobDir) -> Result<(), Failure> {
    let standins = dir.path().join(STANDINS);
    let fail = |e| Failure::io(format!("make {}", standins.display()), &e);
    std::fs::create_dir(&standins).map_err(fail)?;
    let me = belay_kernel::proc::own_program().map_err(fail)?;
    for name in NAMES.iter().filter(|n| find(n, &standins).is_some()) {
        symlink(&me, standins.join(name)).map_err(fail)?;
    }
    Ok(())
}

/// The path by which this program was executed, if that is a stand-in's.
pub fn executed_as() -> Option<PathBuf> {
    let path = Path::new(std::ffi::OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()));
    let parent = path.parent()?;
    (parent.file_name()? == STANDINS && path.is_absolute()).then(|| path.to_owned())
}

/// Runs as the stand-in `path` with arguments `words`; the exit status.
pub fn run(path: &Path, words: &[String]) -> Result<u8, Failure> {
    let lost = || Failure::new(Exit::NotFound, format!("{}: no such remote shell in PATH", path.display()));
    let standins = path.parent().ok_or_else(lost)?;
    let name = path.file_name().and_then(|n| n.to_str()).ok_or_else(lost)?;
    let program = find(name, standins).ok_or_else(lost)?;
    let dir = standins.parent().ok_or_else(lost)?;
    let program = text(&program)?.to_owned();
    let mut words = words.to_vec();
    if name == SRUN {
        words = super::srun::without_own(words);
        match step::plan(&program, words, standins, &Errands { dir })? {
            Plan::Follow(same) => words = super::srun::with_tasks(same, &|name| std::env::var(name).ok()),
            Plan::Become(mut launcher) => {
                let error = launcher.exec();
                return Err(Failure::system(
                    format!("execute {}", launcher.get_program().display()),
                    &error,
                ));
            }
        }
    }
    if RemoteShell::parse(&program, &words).is_none() {
        // Nothing is to be run on the other host: none of our business.
        let error = Command::new(&program).args(&words).exec();
        return Err(Failure::system(format!("execute {program}"), &error));
    }
    let signals = all_signals();
    signals.block();
    Disposition::set_default(libc::SIGCHLD);
    Disposition::set_ignored(farewell_signal());
    let request = Request::RemoteStart { program, words };
    ask(dir, &request)?;
    farewell(dir, &signals)
}

fn all_signals() -> SignalSet {
    let usual = (1..32).filter(|s| ![libc::SIGKILL, libc::SIGSTOP].contains(s));
    SignalSet::of(usual.chain([farewell_signal()]))
}

/// Signals that a remote shell passes on or ends by.
const PASSED: [i32; 7] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
];

/// Waits to be told how what was asked for has ended, which signals are passed on to. (A signal that is blocked is kept also
/// when it is ignored; that it is tells the agent that it is waited for.)
fn farewell(dir: &Path, signals: &SignalSet) -> Result<u8, Failure> {
    loop {
        let Some(signal) = sys::wait_for(signals) else { continue };
        if signal.number == farewell_signal() {
            if signal.code == libc::SI_QUEUE && signal.value & !0xff == FAREWELL {
                return Ok(u8::try_from(signal.value & 0xff).unwrap_or(u8::MAX));
            }
        } else if PASSED.contains(&signal.number) {
            ask(dir, &Request::RemoteSignal { signal: signal.number })?;
        }
    }
}

/// Has the agent of the job in `dir` run programs.
struct Errands<'a> {
    dir: &'a Path,
}

impl Outside for Errands<'_> {
    fn ask(&self, program: &str, words: &[String]) -> Result<String, Failure> {
        let fail = |e| Failure::system(format!("run {program}"), &e);
        let mut said = sys::memory_file("belay-said").map_err(fail)?;
        let signals = all_signals();
        let (mask, chld) = (signals.block(), Disposition::set_default(libc::SIGCHLD));
        let own = Disposition::set_ignored(farewell_signal());
        let request = Request::RemoteAsk {
            program: program.to_owned(),
            words: words.to_vec(),
            output: said.as_raw_fd(),
        };
        let status = ask(self.dir, &request).and_then(|()| farewell(self.dir, &signals));
        chld.restore();
        own.restore();
        mask.set_mask();
        match status? {
            0 => {
                let mut text = String::new();
                said.rewind().and_then(|()| said.read_to_string(&mut text)).map_err(fail)?;
                Ok(text)
            }
            status => Err(Failure::new(
                Exit::System,
                format!("{program} {} has ended with status {status}", words.join(" ")),
            )),
        }
    }
}

/// How often a question is asked that gets no answer.
const TRIES: u32 = 3;

fn ask(dir: &Path, request: &Request) -> Result<(), Failure> {
    let fail = |e: &dyn std::fmt::Display| Failure::new(Exit::NotRunning, format!("ask the agent in {}: {e}", dir.display()));
    let mut unanswered = fail(&"no answer");
    // A question that was under way at a checkpoint gets no answer after the restart: the agent of now has not heard it.
    for _ in 0..TRIES {
        let stream = socket::connect(&dir.join("control.sock")).map_err(|e| fail(&e))?;
        let answer = socket::request(stream, request, Patience::Endless).map(Iterator::last);
        match answer {
            Ok(Some(Ok(Event::Accepted))) => return Ok(()),
            Ok(Some(Ok(Event::Failed { exit, message, .. }))) => return Err(Failure::new(exit, message)),
            Ok(Some(Ok(other))) => return Err(fail(&format!("unexpected answer {other:?}"))),
            Ok(Some(Err(e))) => unanswered = fail(&e),
            Err(e) => unanswered = fail(&e),
            Ok(None) => {}
        }
    }
    Err(unanswered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    /// Asks an agent that hears `unheard` questions and closes their connections, then answers.
    fn asked(unheard: u32) -> Result<(), Failure> {
        let dir = std::env::temp_dir().join(format!("belay-standin-{}-{unheard}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let listener = UnixListener::bind(dir.join("control.sock")).unwrap();
        let agent = std::thread::spawn(move || {
            for n in 0..=unheard {
                let (mut stream, _) = listener.accept().unwrap();
                if n == unheard {
                    let mut line = String::new();
                    BufReader::new(&stream).read_line(&mut line).unwrap();
                    let answer = serde_json::to_string(&Event::Accepted).unwrap();
                    stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
                }
            }
        });
        let done = ask(&dir, &Request::RemoteSignal { signal: libc::SIGTERM });
        if done.is_ok() {
            agent.join().unwrap();
        }
        std::fs::remove_dir_all(&dir).unwrap();
        done
    }

    #[test]
    fn a_question_without_an_answer_is_asked_again() {
        asked(0).unwrap();
        asked(2).unwrap();
        assert_eq!(asked(TRIES).unwrap_err().exit, Exit::NotRunning);
    }
}
