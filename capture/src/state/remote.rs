//! Parts of a job on other hosts, known by the command that started them.
//!
//! `mpirun` starts a daemon on each further host through `ssh`, `rsh`, `srun` or a program of the user's choice. Such a
//! part is no descendant of this agent: a checkpoint without it would restart into connections that are dead.

use belay_plugins::mpi::{DAEMONS, LAUNCHERS};
use std::ffi::OsStr;
use std::path::Path;

/// What stand-ins for remote shells are called.
const SHELLS: [&str; 4] = ["ssh", "rsh", "remsh", SRUN];

/// Slurm's: it starts tasks, whatever they are.
const SRUN: &str = "srun";

/// Why a daemon elsewhere is none of the job's parts.
const UNHEARD: &str = "a part of the job runs there, where this agent cannot reach it; launch the job with --across-hosts, and let the remote shell be found through PATH (call mpirun without its path)";
/// The same of one that a part has started.
const BY_PART: &str = "only the host of mpirun can start parts of the job; where Open MPI's daemons start others (from 65 hosts on, without srun), set OMPI_MCA_routed_radix to the number of hosts";
/// The same of tasks.
const UNHEARD_SRUN: &str = "what srun starts is no part of the job where it is called by its path, without a number of tasks, or with --pty or --multi-prog; launch the job with --across-hosts, and call it as srun -n NUMBER";

/// The name of a program's file.
fn file(exe: &Path) -> &OsStr {
    exe.file_name().unwrap_or_default()
}

fn base(word: &str) -> &str {
    let word = word.trim_matches(['"', '\'', ';']);
    word.rsplit('/').next().unwrap_or(word)
}

/// What the process with file `exe` and command line `words` has started on other hosts, with the words that say where,
/// and why that cannot be; in a job on one host, at the root of one on several, or in a part of one (`of_part`).
pub(crate) fn part(exe: &Path, words: &[String], of_part: bool) -> Option<(String, &'static str)> {
    let (program, arguments) = words.split_first()?;
    // The daemon itself, and a shell that runs it here.
    if DAEMONS.contains(&base(program)) || arguments.first().is_some_and(|a| a == "-c") {
        return None;
    }
    let all: Vec<&str> = arguments.iter().flat_map(|a| a.split_whitespace()).collect();
    let daemon = all
        .iter()
        .find_map(|w| DAEMONS.iter().position(|d| *d == base(w)).map(|n| (*w, DAEMONS[n])));
    if let Some((word, daemon)) = daemon {
        let before: Vec<&str> = all.iter().copied().take_while(|w| *w != word).collect();
        // A debugger or tracer is no way to another host; a remote shell names one before the command, and a batch
        // system's may leave it to that.
        let host: Vec<&str> = before.iter().copied().filter(|w| !w.starts_with('-')).take(3).collect();
        let shown = if host.is_empty() { &before } else { &host };
        let leads = !host.is_empty() || SHELLS.contains(&base(program)) || file(exe) == SRUN;
        let way = format!("{daemon} on another host ({} {})", base(program), shown.join(" "));
        return leads.then_some((way, if of_part { BY_PART } else { UNHEARD }));
    }
    (file(exe) == SRUN).then(|| {
        let line: Vec<&str> = std::iter::once(program.as_str()).chain(all.into_iter().take(6)).collect();
        let tasks = format!("tasks on other hosts ({})", line.join(" "));
        (tasks, UNHEARD_SRUN)
    })
}

/// Longest part of a command line that is shown, characters.
const MOST_SHOWN: usize = 200;

/// What is to be said of the process with file `exe` and command line `words`: a remote shell that no stand-in has taken
/// the place of, and that starts no part, is let go on, and what it leads to stays outside.
pub(crate) fn aside(exe: &Path, words: &[String]) -> Option<String> {
    let (program, arguments) = words.split_first()?;
    let is_shell = SHELLS.iter().any(|shell| file(exe) == *shell || base(program) == *shell);
    (is_shell && !arguments.is_empty()).then(|| {
        let line = words.iter().take(6).flat_map(|word| word.chars().chain([' ']));
        let line: String = line.map(|c| if c.is_control() { ' ' } else { c }).take(MOST_SHOWN).collect();
        format!(
            "{}: what it has started on another host, if anything, is not in the checkpoint; {} is followed where it is found through PATH and given a command",
            line.trim_end(),
            base(program)
        )
    })
}

/// The process that keeps the job (each with its parent, its file and its name) from going on elsewhere as it stands,
/// and why: what it starts on another host after a restart would know addresses of before, and nobody there would lead
/// it. `own` is belay's file, `known` are the stand-ins for remote shells whose parts are known.
pub(crate) fn starting(job: &[(i32, i32, &Path, &OsStr)], own: &Path, known: &[i32]) -> Option<(i32, &'static str)> {
    // The job may call belay, and a program whose file was gone at a restart has belay's.
    let stands_in = |exe: &Path, comm: &OsStr| exe == own && SHELLS.iter().any(|shell| comm == *shell);
    let unheard = job
        .iter()
        .find(|(pid, _, exe, comm)| stands_in(exe, comm) && !known.contains(pid));
    if let Some((pid, ..)) = unheard {
        return Some((
            *pid,
            "is about to start a part of the job on another host, or about to end with it",
        ));
    }
    let launcher = job.iter().find(|(pid, _, exe, _)| {
        let mut children = job.iter().filter(|(_, parent, ..)| parent == pid).peekable();
        // One that has not called exec yet may become a remote shell.
        LAUNCHERS.iter().any(|launcher| file(exe) == *launcher)
            && (children.peek().is_none() || children.any(|(_, _, child, _)| child == exe))
    });
    launcher.map(|(pid, ..)| (*pid, "is just starting, and has not started all its daemons and ranks yet"))
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
        let waits_for = |job: &[(i32, i32, &'static str, &'static str)], known: &[i32]| {
            let of = |(pid, parent, exe, comm): &(_, _, _, _)| (*pid, *parent, Path::new(*exe), OsStr::new(*comm));
            let job: Vec<_> = job.iter().map(of).collect();
            starting(&job, Path::new("/opt/belay"), known).map(|(pid, _)| pid)
        };
        assert_eq!(waits_for(&[SHELL], &[]), None);
        assert_eq!(waits_for(&[SHELL, MPIRUN], &[]), Some(2));
        assert_eq!(waits_for(&[SHELL, MPIRUN, FORKED], &[]), Some(2));
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH], &[]), Some(3));
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH], &[3]), None);
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH, FORKED], &[3]), Some(2));
        assert_eq!(waits_for(&[SHELL, MPIRUN, SSH, RANK, CALLED, REBUILT], &[3]), None);
    }

    fn found(line: &[&str]) -> Option<String> {
        let words: Vec<String> = line.iter().map(|w| (*w).to_owned()).collect();
        part(&Path::new("/usr/bin").join(base(&words[0])), &words, false).map(|(what, _)| what)
    }

    #[test]
    fn remote_daemons_are_known_whatever_carries_them() {
        let is = |line: &[&str], expected: &str| assert_eq!(found(line).as_deref(), Some(expected));
        is(&["ssh", "-x", "n2", "orted", "-mca", "ess"], "orted on another host (ssh n2)");
        is(
            &["/usr/bin/ssh", "-x", "n2", " PATH=/x ; /opt/bin/orted -mca"],
            "orted on another host (ssh n2 PATH=/x ;)",
        );
        is(
            &["bash", "/home/me/rsh", "n2", "\"/usr/bin/hydra_pmi_proxy\"", "--control-port"],
            "hydra_pmi_proxy on another host (bash /home/me/rsh n2)",
        );
        // A host that is no word of its own, or none.
        is(
            &["srun", "--mpi=none", "--nodelist=n2", "--ntasks=1", "orted", "-mca"],
            "orted on another host (srun --mpi=none --nodelist=n2 --ntasks=1)",
        );
        is(&["srun", "orted"], "orted on another host (srun )");
    }

    #[test]
    fn an_srun_that_is_no_stand_in_leads_to_other_hosts() {
        assert_eq!(
            found(&["srun", "-n", "2", "./sim"]).as_deref(),
            Some("tasks on other hosts (srun -n 2 ./sim)")
        );
        let renamed = ["step".to_owned(), "./sim".to_owned()];
        assert!(part(Path::new("/opt/slurm/bin/srun"), &renamed, false).is_some());
        assert!(part(Path::new("/opt/slurm/bin/salloc"), &renamed, false).is_none());
    }

    #[test]
    fn remote_shells_called_by_their_path_are_told_of() {
        let said = |exe: &str, line: &str| aside(Path::new(exe), &line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let told = said("/usr/bin/ssh", "/usr/bin/ssh n2 ls").unwrap();
        assert!(
            told.starts_with("/usr/bin/ssh n2 ls: ") && told.contains("; ssh is followed"),
            "{told}"
        );
        let long = said("/usr/bin/ssh", &format!("ssh n2 a\nb{}", "x".repeat(5000))).unwrap();
        assert!(long.len() < 500 && long.starts_with("ssh n2 a bxxx"), "{long}");
        assert!(said("/usr/bin/netkit-rsh", "rsh n2 ls").is_some());
        for (exe, line) in [
            ("/usr/bin/ssh", "ssh"),
            ("/usr/bin/ssh-agent", "ssh-agent sh"),
            ("/bin/ls", "ls ssh"),
        ] {
            assert_eq!(said(exe, line), None);
        }
    }

    #[test]
    fn daemons_on_this_host_and_other_programs_are_none() {
        assert_eq!(found(&["/usr/bin/hydra_pmi_proxy", "--control-port", "x:1"]), None);
        assert_eq!(found(&["sh", "-c", "orted -mca ess env"]), None);
        assert_eq!(found(&["strace", "-f", "orted"]), None);
        assert_eq!(found(&["ssh", "n2", "ls"]), None);
        assert_eq!(found(&["./sim", "--help"]), None);
        assert_eq!(part(Path::new(""), &[], false), None);
    }
}
