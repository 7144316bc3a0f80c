//! Parts of a job on other hosts, known by the command that started them.
//!
//! `mpirun` starts a daemon on each further host through `ssh`, `rsh`, `srun` or a program of the user's choice. Such a part is no descendant of this
//! agent: a checkpoint without it would restart into connections that are dead.

/// Daemons that MPI launchers start on other hosts.
const DAEMONS: [&str; 4] = ["orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_proxy"];

/// What stand-ins for remote shells are called.
const SHELLS: [&str; 4] = ["ssh", "rsh", "remsh", "srun"];

/// Programs that start those.
const LAUNCHERS: [&str; 3] = ["orterun", "prterun", "mpiexec.hydra"];

fn base(word: &str) -> &str {
    let word = word.trim_matches(['"', '\'', ';']);
    word.rsplit('/').next().unwrap_or(word)
}

/// The daemon that the process with command line `words` has started on another host, and the words that name that host.
pub(crate) fn part(words: &[String]) -> Option<(&'static str, String)> {
    let (program, arguments) = words.split_first()?;
    // The daemon itself, and a shell that runs it here.
    if DAEMONS.contains(&base(program)) || arguments.first().is_some_and(|a| a == "-c") {
        return None;
    }
    let all: Vec<&str> = arguments.iter().flat_map(|a| a.split_whitespace()).collect();
    let at = all.iter().position(|w| DAEMONS.contains(&base(w)))?;
    let daemon = DAEMONS.iter().find(|d| **d == base(all[at]))?;
    // A debugger or tracer is no way to another host; a remote shell names one before the command.
    let host: Vec<&str> = all[..at].iter().copied().filter(|w| !w.starts_with('-')).take(3).collect();
    (!host.is_empty()).then(|| (*daemon, format!("{} {}", base(program), host.join(" "))))
}

/// The process that keeps the job (each with its parent, its file and its name) from going on elsewhere as it stands, and why: what it starts on another host after a restart would know
/// addresses of before, and nobody there would lead it. `own` is belay's file, `known` are the stand-ins for remote shells whose parts are known.
pub(crate) fn starting(job: &[(i32, i32, &str, &str)], own: &str, known: &[i32]) -> Option<(i32, &'static str)> {
    // The job may call belay, and a program whose file was gone at a restart has belay's.
    let stands_in = |exe: &str, comm: &str| exe == own && SHELLS.contains(&comm);
    let unheard = job
        .iter()
        .find(|(pid, _, exe, comm)| stands_in(exe, comm) && !known.contains(pid));
    if let Some((pid, ..)) = unheard {
        return Some((
            *pid,
            "is about to start a part of the job on another host, or about to end with it; checkpoint again in a moment",
        ));
    }
    let launcher = job.iter().find(|(pid, _, exe, _)| {
        let mut children = job.iter().filter(|(_, parent, ..)| parent == pid).peekable();
        // One that has not called exec yet may become a remote shell.
        LAUNCHERS.contains(&base(exe)) && (children.peek().is_none() || children.any(|(_, _, child, _)| child == exe))
    });
    launcher.map(|(pid, ..)| {
        (
            *pid,
            "is just starting, and has not started all its daemons and ranks yet; checkpoint again in a moment",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_about_to_start_something_elsewhere_is_waited_for() {
        const SHELL: (i32, i32, &str, &str) = (1, 0, "/bin/sh", "sh");
        const MPIRUN: (i32, i32, &str, &str) = (2, 1, "/usr/bin/orterun", "mpirun");
        const SSH: (i32, i32, &str, &str) = (3, 2, "/opt/belay", "ssh");
        const RANK: (i32, i32, &str, &str) = (4, 2, "/home/me/sim", "sim");
        const FORKED: (i32, i32, &str, &str) = (5, 2, "/usr/bin/orterun", "mpirun");
        const CALLED: (i32, i32, &str, &str) = (6, 1, "/opt/belay", "belay");
        const REBUILT: (i32, i32, &str, &str) = (7, 2, "/opt/belay", "sim");
        let waits_for = |job: &[_], known: &[i32]| starting(job, "/opt/belay", known).map(|(pid, _)| pid);
        assert_eq!(waits_for(&[SHELL], &[]), None);
        assert_eq!(waits_for(&[SHELL, MPIRUN], &[]), Some(2));
        assert_eq!(waits_for(&[SHELL, MPIRUN, FORKED], &[]), Some(2));
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH], &[]), Some(3));
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH], &[3]), None);
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH, FORKED], &[3]), Some(2));
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH, RANK, CALLED, REBUILT], &[3]), None);
    }

    fn found(line: &[&str]) -> Option<(&'static str, String)> {
        part(&line.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn remote_daemons_are_known_whatever_carries_them() {
        assert_eq!(
            found(&["ssh", "-x", "n2", "orted", "-mca", "ess"]),
            Some(("orted", "ssh n2".into()))
        );
        assert_eq!(
            found(&["/usr/bin/ssh", "-x", "n2", " PATH=/x ; /opt/bin/orted -mca"]).map(|f| f.0),
            Some("orted")
        );
        assert_eq!(
            found(&["bash", "/home/me/rsh", "n2", "\"/usr/bin/hydra_pmi_proxy\"", "--control-port"]).map(|f| f.0),
            Some("hydra_pmi_proxy")
        );
    }

    #[test]
    fn daemons_on_this_host_and_other_programs_are_none() {
        assert_eq!(found(&["/usr/bin/hydra_pmi_proxy", "--control-port", "x:1"]), None);
        assert_eq!(found(&["sh", "-c", "orted -mca ess env"]), None);
        assert_eq!(found(&["ssh", "n2", "ls"]), None);
        assert_eq!(found(&["./sim", "--help"]), None);
        assert_eq!(found(&[]), None);
    }
}
