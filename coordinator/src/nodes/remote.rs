//! A part on another host, as the root knows it, and the remote shell that has started it.

use super::path;
use super::srun::{Srun, SRUN};
use crate::shell::quote;
use crate::{sys, Failure};
use belay_kernel::proc::{born, Status};
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Options of ssh and rsh that take a value, in the same word or the next one.
const WITH_VALUE: &str = "BbcDEeFIiJLlmOoPpQRSWw";

/// The variable by which Slurm's plugin (scripts/site/spank_belay.c) knows an `srun` of belay's own.
pub(crate) const SPANK: &str = "BELAY_SPANK";

/// In place of a host, where Slurm chooses one.
const NODES_OF_SRUN: &str = "the nodes of srun";

/// How many of `words`, which belong to a remote shell, are options.
fn options_end(words: &[String]) -> usize {
    let mut at = 0;
    let letters = |at: usize| words.get(at)?.strip_prefix('-').filter(|l| !["", "-"].contains(l));
    while let Some(letters) = letters(at) {
        // `-p 22` takes the next word, and so does `-qp 22`; `-qp22` does not.
        let takes = letters
            .find(|c| WITH_VALUE.contains(c))
            .is_some_and(|n| n + 1 == letters.len());
        at += 1 + usize::from(takes);
    }
    at.min(words.len())
}

/// A remote shell's command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoteShell {
    /// The program.
    pub(crate) program: String,
    /// Its options.
    pub(crate) options: Vec<String>,
    /// The host, or those that an `srun` names.
    pub(crate) host: String,
    /// The command for the other host's shell; that of an `srun` has no shell, and its words are quoted.
    pub(crate) command: String,
    /// Tasks that an `srun` starts; 0 for a remote shell.
    #[serde(default)]
    pub(crate) tasks: u32,
}

impl RemoteShell {
    /// Understands `words` (without the program); none when no command is given for the other host.
    pub(crate) fn parse(program: &str, words: &[String]) -> Option<Self> {
        if Path::new(program).file_name().is_some_and(|n| n == SRUN) {
            let s = Srun::parse(words)?;
            let command: Vec<String> = s.command.iter().map(|w| quote(w)).collect();
            return Some(Self {
                program: program.to_owned(),
                options: s.options,
                host: s.nodes.unwrap_or_else(|| NODES_OF_SRUN.into()),
                command: command.join(" "),
                tasks: s.tasks,
            });
        }
        let end = ["--".to_owned()];
        let (before, rest) = words.split_at(options_end(words));
        let (rest, has_ended) = rest.strip_prefix(&end).map_or((rest, false), |rest| (rest, true));
        let (host, rest) = rest.split_first()?;
        // As `ssh` does, which takes more options behind the host.
        let (behind, command) = rest.split_at(if has_ended { 0 } else { options_end(rest) });
        let command = command.strip_prefix(&end).filter(|_| !has_ended).unwrap_or(command);
        (!command.is_empty()).then(|| Self {
            program: program.to_owned(),
            options: [before, behind].concat(),
            host: host.clone(),
            command: command.join(" "),
            tasks: 0,
        })
    }

    /// Parts that it starts.
    pub(crate) fn parts(&self) -> u64 {
        u64::from(self.tasks.max(1))
    }

    /// Whether it leaves the choice of the nodes to Slurm.
    pub(crate) fn is_placed_by_slurm(&self) -> bool {
        self.tasks > 0 && !super::srun::names_nodes(&self.options)
    }

    /// What the agent of a part executes.
    pub(crate) fn program_words(&self) -> String {
        match self.tasks {
            0 => format!("--by-shell -- {}", quote(&self.command)),
            _ => format!("-- {}", self.command),
        }
    }

    /// The same for `parts` parts on `hosts`; an empty list leaves them where they were.
    pub(crate) fn elsewhere(&mut self, hosts: &[&String], parts: usize) {
        if self.tasks == 0 {
            if let Some(host) = hosts.first() {
                self.host = (*host).clone();
            }
        } else if !hosts.is_empty() || self.is_placed_by_slurm() || self.parts() != parts as u64 {
            self.options = super::srun::elsewhere(&self.options, hosts, parts);
            if !hosts.is_empty() {
                self.host = super::srun::distinct(hosts).join(",");
            }
            self.tasks = u32::try_from(parts).unwrap_or(u32::MAX);
        }
    }

    /// The same for a command of belay itself on `host`. What the user wants of an `srun` is not wanted of this one:
    /// files for its output, say.
    pub(crate) fn to(&self, host: &str) -> Self {
        let mut shell = Self {
            host: host.to_owned(),
            ..self.clone()
        };
        if shell.tasks > 0 {
            shell.options = super::srun::alone_on(host);
            shell.tasks = 1;
        }
        shell
    }

    /// Runs `command` on the host, with these for standard input, output and error, and `like` a process or this one.
    pub(crate) fn spawn(&self, command: &str, (stdio, like): (Option<[OwnedFd; 3]>, Option<Like<'_>>)) -> Result<Child, Failure> {
        let mut c = Command::new(&self.program);
        if let Some(like) = like {
            like.prepare(&mut c);
        }
        c.args(&self.options);
        if self.tasks == 0 {
            c.arg(&self.host).arg(command);
        } else {
            // Processors to run on come with the program, from the checkpoint too. What was started on a node that is
            // lost has its processors until Slurm gives it up.
            c.args(["/bin/sh", "-c", command])
                .env("SLURM_CPU_BIND", "quiet,none")
                .env("SLURM_OVERLAP", "1")
                .env(SPANK, "off");
        }
        if stdio.is_some() && like.is_none() {
            // Belay reads what it prints.
            for name in super::srun::OF_OUTPUT {
                c.env_remove(name);
            }
        }
        match stdio {
            Some([input, output, error]) => c.stdin(input).stdout(output).stderr(error),
            None => c.stdin(Stdio::null()),
        };
        start_beside(c).map_err(|e| Failure::new(Exit::System, format!("start {} to {}: {e}", self.program, self.host)))
    }

    /// Something else that is run for a stand-in: it leads to no part.
    pub(crate) fn errand(program: &str) -> Self {
        Self {
            program: program.to_owned(),
            options: Vec::new(),
            host: NODES_OF_SRUN.into(),
            command: String::new(),
            tasks: 0,
        }
    }
}

/// Runs `program` with `words`, `like` a process; what it prints going to `output` and its errors to `error`.
pub(crate) fn run_errand(
    (program, words): (&str, &[String]),
    like: Like<'_>,
    (output, error): (OwnedFd, OwnedFd),
) -> Result<Child, Failure> {
    let mut c = Command::new(program);
    like.prepare(&mut c);
    c.args(words).env(SPANK, "off");
    c.stdin(Stdio::null()).stdout(output).stderr(error);
    start_beside(c).map_err(|e| Failure::system(format!("start {program}"), &e))
}

/// Starts a child that is no part of the job.
fn start_beside(mut c: Command) -> std::io::Result<Child> {
    // SAFETY: the closure makes system calls on its own memory only.
    unsafe {
        c.pre_exec(|| {
            // In the terminal's session it would be stopped when it asks for a password or reads what is typed, as the
            // stand-in is in the foreground.
            rustix::process::setsid()?;
            // The agent takes signals through a descriptor; the child takes them as usual.
            sys::SignalSet::of([]).set_mask();
            sys::Disposition::set_default(libc::SIGPIPE);
            sys::Disposition::set_default(libc::SIGXFSZ);
            Ok(())
        });
    }
    c.spawn()
}

/// A process of the job: what is run for it has its environment, as far as belay has not put something there, and its
/// directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Like<'a> {
    pub(crate) pid: i32,
    /// The directory of stand-ins, which is in its PATH.
    pub(crate) standins: &'a Path,
}

impl Like<'_> {
    fn prepare(self, c: &mut Command) {
        c.env_clear().envs(environment_of(self.pid).into_iter().map(|(name, value)| {
            let value = if name == "PATH" {
                path::without(&value, self.standins)
            } else {
                value
            };
            (name, value)
        }));
        // By its name, of which `srun` tells the other nodes.
        let at = std::fs::read_link(format!("/proc/{}/cwd", self.pid));
        if let Some(at) = at.ok().filter(|at| at.is_dir()) {
            c.current_dir(at);
        }
    }
}

/// The environment with which process `pid` was started.
fn environment_of(pid: i32) -> Vec<(OsString, OsString)> {
    let all = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let pair = |line: &[u8]| {
        let at = line.iter().position(|b| *b == b'=')?;
        let part = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        Some((part(&line[..at]), part(&line[at + 1..])))
    };
    all.split(|b| *b == 0).filter_map(pair).collect()
}

/// These descriptors of process `pid`.
pub(crate) fn descriptors_of<const N: usize>(pid: i32, numbers: [i32; N]) -> std::io::Result<[OwnedFd; N]> {
    let process = belay_kernel::pidfd::open(pid)?;
    let got: std::io::Result<Vec<OwnedFd>> = numbers
        .iter()
        .map(|n| belay_kernel::pidfd::getfd(process.as_fd(), *n))
        .collect();
    got?.try_into().map_err(|_| std::io::ErrorKind::InvalidData.into())
}

/// Where a part is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// It is no part: something is run for a stand-in.
    Errand,
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
    /// When that was started: its number may be another's later. None as long as it is not known.
    pub(crate) born: Option<u64>,
    /// Tag of the first part that the same remote shell has started, which is this one itself unless that is an `srun`
    /// of several tasks.
    pub(crate) first: u64,
    /// The remote shell, where it is a child of this agent.
    pub(crate) child: Option<Child>,
    pub(crate) life: Life,
    /// Where it is over, and no child has told: the exit status of its program.
    pub(crate) code: i32,
}

impl Remote {
    pub(crate) fn is_over(&self) -> bool {
        self.life == Life::Over
    }

    /// Its node of the tree, where it has one.
    pub(crate) fn node(&self) -> Option<u64> {
        match self.life {
            Life::Joined(node) => Some(node),
            _ => None,
        }
    }

    /// Whether it is run for a stand-in that is not there any more: nobody reads what it says.
    pub(crate) fn is_in_vain(&self) -> bool {
        self.life == Life::Errand && !self.has_standin()
    }

    /// Whether the stand-in is there.
    pub(crate) fn has_standin(&self) -> bool {
        self.born.is_some() && self.born == born(self.standin)
    }

    pub(crate) fn shell(&self) -> Option<i32> {
        self.child.as_ref().map(|c| c.id().cast_signed())
    }
}

/// The exit status of a remote shell that has ended with this status word.
pub(crate) fn shell_code(status: i32) -> i32 {
    if libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        128 + libc::WTERMSIG(status)
    }
}

/// Marks the value of the signal that ends a stand-in; the rest is its exit status.
pub(crate) const FAREWELL: i32 = 0x5_0000;

/// The signal: one that is not lost behind others of its kind.
pub(crate) fn farewell_signal() -> i32 {
    libc::SIGRTMIN()
}

/// Lets the stand-in end with this exit status.
pub(crate) fn end_standin(standin: i32, code: i32) {
    // One that an earlier belay has started, before a restart, waits for another signal, and does not ignore this one.
    let ignored = Status::read(standin).ok().and_then(|s| s.hex("SigIgn"));
    let waits = ignored.is_some_and(|i| i & 1 << (farewell_signal() - 1) != 0);
    let farewell = sys::Signal {
        number: if waits { farewell_signal() } else { libc::SIGUSR1 },
        code: libc::SI_QUEUE,
        value: FAREWELL | code,
    };
    farewell.pass_on(standin);
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
        assert_eq!(parse("-p"), None);
        for (line, options, command) in [
            ("-qp 22 n2 cmd", "-qp 22", "cmd"),
            ("-qoBatchMode=yes n2 cmd -x", "-qoBatchMode=yes", "cmd -x"),
            ("-P tag n2 cmd", "-P tag", "cmd"),
            ("-q n2 -l me -n cmd -x", "-q -l me -n", "cmd -x"),
            ("-q n2 -- cmd", "-q", "cmd"),
            ("-q -- n2 -x", "-q", "-x"),
        ] {
            let s = parse(line).unwrap();
            let expected = (options, "n2", command);
            assert_eq!(
                (s.options.join(" ").as_str(), s.host.as_str(), s.command.as_str()),
                expected,
                "{line}"
            );
        }
    }
}
