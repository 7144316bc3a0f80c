//! Launch: find the command, make front and agent, and execute the command with exactly the signal mask, dispositions
//! and descriptors that the launcher was given.

use crate::agent::{Agent, Fallback, Setup};
use crate::nodes::prefix;
use crate::nodes::remote::SPANK;
use crate::relay::{Channel, Message};
use crate::sys::{self, Disposition, SignalFd, SignalSet};
use crate::{front, Failure};
use belay_access::index::FROM;
use belay_image::name::Name;
use belay_kernel::limits;
use belay_kernel::proc::Outside;
use belay_kernel::process;
use belay_restart::End;
use belay_wire::Exit;
use rustix::fs::Access;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What the command inherits and front and agent change for themselves.
#[derive(Debug, Clone, Copy)]
struct Inherited {
    mask: SignalSet,
    sigchld: Disposition,
    sigpipe: Disposition,
}

impl Inherited {
    fn restore(&self) {
        self.sigchld.restore();
        self.sigpipe.restore();
        self.mask.set_mask();
    }
}

/// Refuses a command that cannot be launched, before anything is made for it.
pub fn check(command: &[OsString]) -> Result<(), Failure> {
    let program = command.first().ok_or_else(|| Failure::new(Exit::Usage, "no command given"))?;
    refuse_setuid(&find(program)?)
}

/// Runs `command` as a job; returns when it has ended. Call from a process with one thread.
pub fn launch(command: Vec<OsString>, setup: Setup) -> Result<End, Failure> {
    let argv: Vec<CString> = command
        .into_iter()
        .map(|a| CString::new(a.into_vec()).map_err(|_| Failure::new(Exit::Usage, "an argument holds a zero byte")))
        .collect::<Result<_, _>>()?;

    let set = front::handled();
    let inherited = Inherited {
        mask: set.block(),
        sigchld: Disposition::set_default(libc::SIGCHLD),
        sigpipe: Disposition::set_ignored(libc::SIGPIPE),
    };
    let result = start(&argv, setup, &set, &inherited);
    if result.is_err() {
        inherited.mask.set_mask();
    }
    result
}

fn start(argv: &[CString], setup: Setup, set: &SignalSet, inherited: &Inherited) -> Result<End, Failure> {
    let system = |step: &'static str| move |e: io::Error| Failure::system(step, &e);
    sys::become_subreaper().map_err(system("become the reaper of the job's processes"))?;
    let signals = SignalFd::new(set).map_err(system("make a signal descriptor"))?;
    let (front_end, agent_end) = Channel::pair().map_err(system("make a channel to the agent"))?;
    let fallback = Fallback::of(&setup);
    let preload = setup.description.config.verbs.variable()?;
    let from = setup.description.from.clone();
    let mut agent = Agent::new(setup)?;
    agent.open_metrics()?;
    agent.listen()?;
    let mut outside = Outside::default();
    outside.note(None);
    match sys::fork().map_err(system("fork the agent"))? {
        Some(pid) => {
            drop(agent_end);
            // Held for as long as the command runs, even if the agent is killed: nobody else may start the job meanwhile.
            let _lock = agent.leave();
            sys::close_inherited();
            front::wait(&front_end, (&signals, outside), pid, &|| fallback.is_there())
        }
        None => {
            drop(front_end);
            drop(signals);
            std::process::exit(run_agent((argv, preload, from), agent, agent_end, inherited))
        }
    }
}

/// The agent's process: starts the command and serves the job.
fn run_agent(
    (argv, preload, from): (&[CString], Option<CString>, Option<Name>),
    agent: Agent,
    channel: Channel,
    inherited: &Inherited,
) -> i32 {
    // A front that dies this early leaves nothing behind: the command is not started yet.
    let mut name = None;
    if let Some(from) = from {
        // SAFETY is no question: as below.
        std::env::set_var(FROM, from.as_os_str());
    }
    // Slurm's plugin makes no other belay of what is called in this job (scripts/site/spank_belay.c).
    if std::env::var_os(SPANK).is_some() {
        // SAFETY is no question: there is one thread.
        std::env::set_var(SPANK, "off");
    }
    if let Some(path) = agent.path_for_command() {
        // SAFETY is no question: as above.
        std::env::set_var("PATH", path);
        let plain = prefix::plain(Path::new(OsStr::from_bytes(argv[0].as_bytes())), &prefix::own);
        if let Some(plain) = plain {
            plain.variables.iter().for_each(|(n, value)| std::env::set_var(n, value));
            name = CString::new(plain.name.into_vec()).ok();
        }
    }
    agent.listen_here();
    let started = sys::become_subreaper().and_then(|()| spawn(argv, (name.as_deref(), preload), inherited));
    match started {
        Ok(pid) => {
            channel.send(Message::Started(pid));
            // The command has the limit that the user has set.
            limits::raise_descriptors();
            sys::close_inherited();
            agent.serve(pid, None, Some(channel), &|_| ());
            0
        }
        Err(e) => {
            agent.abandon();
            channel.send(Message::ExecFailed(e.raw_os_error().unwrap_or(libc::EIO)));
            1
        }
    }
}

/// Forks and executes the command; returns when it runs, or the error of `execvp`.
///
/// It is called by `name`, or as it is found, and has this variable in its environment.
fn spawn(argv: &[CString], (name, variable): (Option<&CStr>, Option<CString>), inherited: &Inherited) -> io::Result<i32> {
    let mut arguments: Vec<&CStr> = argv.iter().map(CString::as_c_str).collect();
    let program = arguments[0];
    if let Some(name) = name {
        arguments[0] = name;
    }
    // Closed by a successful execution, and so read as empty.
    let (mut failed, mut report) = io::pipe()?;
    match sys::fork()? {
        Some(pid) => {
            drop(report);
            let mut errno = [0; 4];
            if failed.read_exact(&mut errno).is_ok() {
                sys::wait(pid)?;
                return Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)));
            }
            Ok(pid)
        }
        None => {
            inherited.restore();
            let failed = process::execute(program, &arguments, variable);
            let told = report.write_all(&failed.raw_os_error().unwrap_or(0).to_ne_bytes());
            // What the agent would do at its exit is not done here.
            process::end(i32::from(told.is_err()))
        }
    }
}

/// Finds `program` as `execvp` does.
fn find(program: &OsStr) -> Result<PathBuf, Failure> {
    let name = Path::new(program).display();
    let usable = |p: &Path| p.is_file() && sys::may(Access::EXEC_OK, p);
    let not_executable = || {
        Failure::new(
            Exit::NotExecutable,
            format!("{name}: not executable; check its mode and the path"),
        )
    };
    let not_found = || match program.as_bytes().first() {
        Some(b'-') => Failure::new(
            Exit::Usage,
            format!("{name}: no option of belay, and no command; see belay help"),
        ),
        _ => Failure::new(Exit::NotFound, format!("{name}: command not found; check the name and PATH")),
    };
    if program.as_bytes().contains(&b'/') {
        let path = PathBuf::from(program);
        return match std::fs::metadata(&path) {
            Ok(_) if usable(&path) => Ok(path),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Err(not_found()),
            Ok(_) | Err(_) => Err(not_executable()),
        };
    }
    if program.is_empty() {
        return Err(not_found());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut seen = false;
    for dir in std::env::split_paths(&path) {
        let candidate = dir.join(program);
        if usable(&candidate) {
            return Ok(candidate);
        }
        seen |= candidate.exists();
    }
    Err(if seen { not_executable() } else { not_found() })
}

/// A program that runs with another identity than the caller's may not be traced by an ordinary user: refuse it before it starts.
fn refuse_setuid(path: &Path) -> Result<(), Failure> {
    let me = sys::euid();
    let Ok(m) = std::fs::metadata(path) else {
        return Ok(()); // execution will say what is wrong
    };
    let mode = m.permissions().mode();
    let what = if mode & 0o4000 != 0 && m.uid() != me {
        "is set-user-ID"
    } else if mode & 0o2010 == 0o2010 && m.gid() != sys::egid() {
        "is set-group-ID"
    } else if sys::has_attribute(path, "security.capability") {
        "has file capabilities"
    } else {
        return Ok(());
    };
    if me == 0 || sys::ignores_setuid(path) {
        return Ok(());
    }
    Err(Failure::new(
        Exit::Setuid,
        format!(
            "{} {what}, and user {me} may not checkpoint it; run it without belay, or belay as root",
            path.display()
        ),
    ))
}
