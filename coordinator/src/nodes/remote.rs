//! A part on another host, as the root knows it, and the remote shell that has started it.

use crate::{sys, Failure};
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Options of ssh and rsh that take a value.
const WITH_VALUE: &str = "BbcDEeFIiJLlmOopQRSWw";

/// A remote shell's command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoteShell {
    /// The program.
    pub(crate) program: String,
    /// Its options.
    pub(crate) options: Vec<String>,
    /// The host.
    pub(crate) host: String,
    /// The command for the other host's shell.
    pub(crate) command: String,
}

impl RemoteShell {
    /// Understands `words` (without the program); none when no command is given for the other host.
    pub(crate) fn parse(program: &str, words: &[String]) -> Option<Self> {
        let mut at = 0;
        while let Some(word) = words.get(at).filter(|w| w.starts_with('-') && w.len() > 1) {
            // `-p 22` takes the next word, `-p22` does not.
            let takes = word.len() == 2 && WITH_VALUE.contains(&word[1..]);
            at += 1 + usize::from(takes);
        }
        let (host, command) = words.get(at..)?.split_first()?;
        (!command.is_empty()).then(|| Self {
            program: program.to_owned(),
            options: words[..at].to_vec(),
            host: host.clone(),
            command: command.join(" "),
        })
    }

    /// Runs `command` on the host; the descriptors are its standard input, output and error.
    pub(crate) fn spawn(&self, command: &str, stdio: Option<[OwnedFd; 3]>, path: &OsString) -> Result<Child, Failure> {
        let mut c = Command::new(&self.program);
        c.args(&self.options).arg(&self.host).arg(command).env("PATH", path);
        match stdio {
            Some([input, output, error]) => c.stdin(input).stdout(output).stderr(error),
            None => c.stdin(Stdio::null()),
        };
        c.process_group(0);
        // SAFETY: the closure makes one system call on its own memory.
        unsafe {
            c.pre_exec(|| {
                // The agent takes signals through a descriptor; the remote shell takes them as usual.
                sys::SignalSet::of([]).set_mask();
                sys::Disposition::replace(libc::SIGPIPE, libc::SIG_DFL);
                Ok(())
            });
        }
        c.spawn()
            .map_err(|e| Failure::new(Exit::System, format!("start {} to {}: {e}", self.program, self.host)))
    }
}

/// `word` for a shell.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The program `name` as found in PATH, leaving out the directory of stand-ins.
pub(crate) fn find(name: &str, standins: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut dirs = std::env::split_paths(&path).filter(|d| d != standins);
    dirs.find_map(|d| Some(d.join(name)).filter(|p| p.is_file()))
}

/// Standard input, output and error of process `pid`.
pub(crate) fn stdio_of(pid: i32) -> std::io::Result<[OwnedFd; 3]> {
    let process = belay_kernel::pidfd::open(pid)?;
    let get = |n| belay_kernel::pidfd::getfd(process.as_fd(), n);
    Ok([get(0)?, get(1)?, get(2)?])
}

/// Where a part is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// Its agent has not joined yet.
    Starting,
    /// Node of the tree.
    Joined(u64),
    /// Its agent is gone, but its processes may not be: no checkpoint can do without them.
    Lost,
    /// It has ended.
    Over,
}

/// A part.
#[derive(Debug)]
pub(crate) struct Remote {
    /// How it was started.
    pub(crate) words: RemoteShell,
    /// The process of the job that stands in for the remote shell.
    pub(crate) standin: i32,
    /// The remote shell, where it is a child of this agent.
    pub(crate) child: Option<Child>,
    pub(crate) life: Life,
}

impl Remote {
    pub(crate) fn is_over(&self) -> bool {
        self.life == Life::Over
    }

    pub(crate) fn shell(&self) -> Option<i32> {
        self.child.as_ref().map(|c| c.id().cast_signed())
    }

    /// Lets the stand-in end with this exit status.
    pub(crate) fn end_standin(&self, code: i32) {
        let farewell = sys::Signal {
            number: libc::SIGUSR1,
            code: libc::SI_QUEUE,
            value: super::standin::FAREWELL | code,
        };
        sys::pass_on(self.standin, farewell);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Option<RemoteShell> {
        RemoteShell::parse("ssh", &line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_host_and_command_are_told_apart() {
        let s = parse("-x -p 22 -oBatchMode=yes -l me n2 orted -mca ess env").unwrap();
        assert_eq!((s.host.as_str(), s.command.as_str()), ("n2", "orted -mca ess env"));
        assert_eq!(s.options, ["-x", "-p", "22", "-oBatchMode=yes", "-l", "me"]);
        assert_eq!(parse("-p22 n2 ls").unwrap().host, "n2");
        assert_eq!(parse("n2"), None);
        assert_eq!(parse("-x"), None);
    }

    #[test]
    fn quotes_survive_the_shell() {
        let nasty = "a 'b' \"c\" $d `e`";
        let out = std::process::Command::new("sh")
            .args(["-c", &format!("printf %s {}", quote(nasty))])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), nasty);
    }
}
