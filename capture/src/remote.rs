//! Parts of a job on other hosts, known by the command that started them.
//!
//! `mpirun` starts a daemon on each further host through `ssh`, `rsh`, `srun` or a program of the user's choice. Such a part is no descendant of this
//! agent: a checkpoint without it would restart into connections that are dead.

/// Daemons that MPI launchers start on other hosts.
const DAEMONS: [&str; 4] = ["orted", "prted", "hydra_pmi_proxy", "hydra_bstrap_proxy"];

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

#[cfg(test)]
mod tests {
    use super::*;

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
