//! What a restart has done on hosts of the job, through the job's remote shell: `belay store ...` there.

use super::remote::RemoteShell;
use super::seat::name_here;
use super::table::Row;
use crate::shell::{quote, text};
use crate::{sys, Failure};
use belay_tree::Direct;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

/// In front of an answer: start-up files of shells print lines too, and `srun --label` puts a number in front.
const MARK: &str = "belay-answer ";

/// What is heard of a helper.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Its answer.
    Answer(String),
    /// Nothing: it has ended.
    Ended,
    /// Nothing for too long.
    Silent,
}

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
        let stdio = [input, out.into(), errors];
        let child = shell_to(rows, host).spawn(&command(words)?, (Some(stdio), None))?;
        Ok(Self {
            host: host.into(),
            child,
            said,
        })
    }

    /// Waits for it no longer. A shell to a host that does not answer would not end.
    pub(crate) fn end(mut self) {
        drop(self.said);
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// What these answer. The first sign of life of each is waited for as long as is said with it, from now on; then each
/// has [`Direct::SILENCE`] until its next one.
pub(crate) fn hear<'a>(helpers: impl IntoIterator<Item = (&'a mut Helper, Duration)>) -> Vec<Heard> {
    let pipes = helpers.into_iter().map(|(helper, limit)| (&mut helper.said, limit));
    hear_pipes(pipes, Direct::SILENCE)
}

/// In a helper: gives a sign of life.
pub(crate) fn beat() -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(b"\n").and_then(|()| out.flush())
}

/// In a helper: gives the answer, of one line.
pub(crate) fn answer(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{MARK}{text}").and_then(|()| out.flush())
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
    let me = belay_kernel::proc::own_program().map_err(|e| Failure::system("find belay", &e))?;
    let quoted: Vec<String> = words.iter().map(|w| quote(w)).collect();
    Ok(format!("exec {} {}", quote(text(&me)?), quoted.join(" ")))
}

/// A remote shell to `host`, or, for this host, a local one.
fn shell_to(rows: &[Row], host: &str) -> RemoteShell {
    let like = rows.iter().find(|r| r.host() == host).or(rows.first());
    let here = name_here();
    let is_here = super::names::spelled(&[host], &[&here]) == [here.as_str()];
    match like.filter(|_| !is_here) {
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

/// One that is listened to.
struct Talk<'a> {
    said: &'a mut io::PipeReader,
    /// When it counts as silent.
    until: Instant,
    /// The beginning of a line.
    line: Vec<u8>,
    heard: Option<Heard>,
}

impl Talk<'_> {
    /// Reads what there is.
    fn read(&mut self, silence: Duration) {
        let mut some = [0; 1 << 16];
        match self.said.read(&mut some) {
            Ok(0) => self.heard = Some(Heard::Ended),
            Ok(n) => {
                self.until = Instant::now() + silence;
                for piece in some[..n].split_inclusive(|b| *b == b'\n') {
                    self.line.extend_from_slice(piece);
                    if piece.ends_with(b"\n") {
                        let line = std::mem::take(&mut self.line);
                        let text = String::from_utf8_lossy(&line);
                        let answer = text
                            .split_once(MARK)
                            .map(|(_, answer)| Heard::Answer(answer.trim().to_owned()));
                        self.heard = self.heard.take().or(answer);
                    }
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.heard = Some(Heard::Ended),
        }
    }
}

/// Listens to all at once: nobody's silence takes time from another.
fn hear_pipes<'a>(pipes: impl IntoIterator<Item = (&'a mut io::PipeReader, Duration)>, silence: Duration) -> Vec<Heard> {
    let begin = Instant::now();
    let talk = |(said, limit)| Talk {
        said,
        until: begin + limit,
        line: Vec::new(),
        heard: None,
    };
    let mut talks: Vec<Talk<'_>> = pipes.into_iter().map(talk).collect();
    loop {
        let mut open: Vec<&mut Talk<'_>> = talks.iter_mut().filter(|t| t.heard.is_none()).collect();
        let Some(next) = open.iter().map(|t| t.until).min() else {
            break;
        };
        let fds: Vec<_> = open.iter().map(|t| (t.said.as_raw_fd(), libc::POLLIN)).collect();
        let ready = match sys::poll_within(&fds, Some(next.saturating_duration_since(Instant::now()))) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            other => other.unwrap_or_default(),
        };
        for (at, talk) in open.iter_mut().enumerate() {
            if ready.get(at).is_some_and(|r| *r != 0) {
                talk.read(silence);
            } else if ready.is_empty() || talk.until <= Instant::now() {
                talk.heard = Some(Heard::Silent);
            }
        }
    }
    talks.into_iter().map(|t| t.heard.unwrap_or(Heard::Silent)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> Heard {
        Heard::Answer(text.into())
    }

    #[test]
    fn who_is_silent_takes_no_time_from_others_and_who_gives_signs_of_life_is_waited_for() {
        let (mut silent, _hold) = pipes().unwrap();
        let (mut busy, mut out) = pipes().unwrap();
        let (mut quick, mut said) = pipes().unwrap();
        said.write_all(b"Welcome\n0: belay-answer here\nmore\n").unwrap();
        let (mut short, mut also) = pipes().unwrap();
        also.write_all(b"belay-answer []\n").unwrap();
        let (mut ended, _) = pipes().unwrap();
        let (limit, silence) = (Duration::from_secs(1), Duration::from_secs(2));
        let beating = std::thread::spawn(move || {
            let begin = Instant::now();
            while begin.elapsed() < silence + limit {
                out.write_all(b"\n").unwrap();
                std::thread::sleep(Duration::from_millis(50));
            }
            out.write_all(b"belay-ans").unwrap();
            out.write_all(b"wer done\n").unwrap();
        });
        let all = [&mut silent, &mut busy, &mut quick, &mut ended].map(|p| (p, limit));
        // What has been said already counts, also where nothing is waited for.
        let heard = hear_pipes(all.into_iter().chain([(&mut short, Duration::ZERO)]), silence);
        let expected = [Heard::Silent, answer("done"), answer("here"), Heard::Ended, answer("[]")];
        assert_eq!(heard, expected);
        beating.join().unwrap();
    }

    #[test]
    fn who_falls_silent_after_a_sign_of_life_is_not_waited_for() {
        let (mut said, mut out) = pipes().unwrap();
        out.write_all(b"\nno answer\n").unwrap();
        let begin = Instant::now();
        let heard = hear_pipes([(&mut said, Duration::from_secs(60))], Duration::from_millis(100));
        assert_eq!(heard, [Heard::Silent]);
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}
