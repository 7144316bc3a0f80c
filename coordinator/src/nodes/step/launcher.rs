//! The launchers of MPI implementations: how they are found, and told where the ranks go.

use super::input::Input;
use super::layout::Layout;
use super::rank::Spec;
use super::{refused, Kind};
use crate::nodes::prefix;
use crate::Failure;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Names under which there may be one.
const NAMES: [&str; 8] = [
    "mpiexec.hydra",
    "mpirun",
    "mpiexec",
    "prterun",
    "mpirun.openmpi",
    "orterun",
    "mpiexec.mpich",
    "mpirun.mpich",
];

/// More bytes than this are in no argument of a program: MAX_ARG_STRLEN of the kernel.
const MAX_WORD: usize = 32 * 4096;

/// A launcher.
#[derive(Debug)]
pub(super) struct Launcher {
    kind: Kind,
    program: PathBuf,
}

impl Launcher {
    /// The first in PATH.
    pub(super) fn find(kind: Kind, standins: &Path) -> Result<Self, Failure> {
        let all = NAMES.iter().filter_map(|n| crate::nodes::path::find(n, standins));
        let found = all.into_iter().find(|program| {
            let said = Command::new(program).arg("--version").stdin(Stdio::null()).output();
            said.is_ok_and(|o| kind_of(&String::from_utf8_lossy(&o.stdout)) == Some(kind))
        });
        let (whose, like) = match kind {
            Kind::Pmi => ("MPICH's (Hydra)", "mpiexec.hydra"),
            Kind::Pmix => ("Open MPI's", "mpirun"),
        };
        let program = found.ok_or_else(|| {
            refused(format!(
                "no launcher of {whose} in PATH ({like}), which belay uses in place of srun's MPI plugin; put it there, or for programs without MPI say --mpi=none"
            ))
        })?;
        Ok(Self { kind, program })
    }

    /// The value of its option that names the hosts.
    pub(super) fn hosts(&self, layout: &Layout) -> Result<String, String> {
        let each: Vec<String> = match self.kind {
            Kind::Pmix => layout.by_rank().map(|n| layout.nodes[n].name.clone()).collect(),
            Kind::Pmi => {
                let turns = layout.in_turns().ok_or(
                    "this distribution of tasks over nodes is none that mpiexec knows; use --distribution=block, or as many tasks on each node",
                )?;
                turns.into_iter().map(|(n, count)| format!("{}:{count}", n.name)).collect()
            }
        };
        Ok(each.join(","))
    }

    /// Its command line, and environment.
    pub(super) fn command(&self, hosts: &str, spec: &Spec) -> Result<Command, Failure> {
        let ranks = spec.layout.by_rank().count().to_string();
        let mut c = Command::new(&self.program);
        if let Some(plain) = prefix::plain(&self.program, &prefix::own) {
            c.arg0(plain.name).envs(plain.variables);
        }
        match self.kind {
            Kind::Pmi => {
                if let Input::One(task) = spec.input.clone() {
                    if task != 0 {
                        return Err(refused(format!("mpiexec passes input to task 0, not {task}")));
                    }
                }
                c.args(["-hosts", hosts, "-n", &ranks]);
            }
            Kind::Pmix => {
                // By ssh, variables would not reach ranks on other hosts.
                for name in ["OMPI_MCA_plm", "PRTE_MCA_plm"] {
                    if let Some(how) = std::env::var(name).ok().filter(|how| how != "slurm") {
                        return Err(refused(format!(
                            "{name}={how} keeps mpirun from starting its daemons by srun, which brings them the environment; unset it, or use mpirun with -x NAME"
                        )));
                    }
                }
                c.args([
                    "--map-by",
                    "seq:oversubscribe",
                    "--bind-to",
                    "none",
                    "--host",
                    hosts,
                    "-n",
                    &ranks,
                ]);
                if let Input::One(task) = &spec.input {
                    c.args(["--stdin", &task.to_string()]);
                }
                if crate::sys::euid() == 0 {
                    c.arg("--allow-run-as-root");
                }
            }
        }
        // What a step in which belay itself runs has offered to its own task.
        for (name, _) in std::env::vars_os() {
            let is = |prefix: &str| name.as_encoded_bytes().starts_with(prefix.as_bytes());
            if (is("PMI_") || is("PMI2_") || is("PMIX_")) && !is("PMIX_MCA_") {
                c.env_remove(name);
            }
        }
        if !matches!(spec.input, Input::One(_)) {
            c.stdin(Stdio::null());
        }
        let me = belay_kernel::proc::own_program().map_err(|e| Failure::system("find belay", &e))?;
        let spec = serde_json::to_string(spec).map_err(|e| refused(e.to_string()))?;
        for (what, word) in [
            ("the program's arguments and the nodes", spec.as_str()),
            ("the list of hosts", hosts),
        ] {
            if word.len() >= MAX_WORD {
                return Err(refused(format!(
                    "{what} take {} bytes in one word of the launcher's command line, and there is room for {MAX_WORD}; use mpirun",
                    word.len()
                )));
            }
        }
        c.arg(me).arg("rank").arg(spec);
        Ok(c)
    }
}

/// Which launcher says that about its version.
fn kind_of(version: &str) -> Option<Kind> {
    let says = |words: &[&str]| words.iter().any(|w| version.contains(w));
    if says(&["HYDRA", "Hydra"]) {
        Some(Kind::Pmi)
    } else if says(&["Open MPI", "OpenRTE", "PRTE", "PRRTE"]) {
        Some(Kind::Pmix)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::layout;
    use super::*;

    fn hosts(kind: Kind, nodes: &[usize]) -> Option<String> {
        let program = PathBuf::from("mpirun");
        Launcher { kind, program }.hosts(&layout(nodes)).ok()
    }

    #[test]
    fn versions_tell_launchers_apart() {
        assert_eq!(kind_of("HYDRA build details:\n    Version: 4.0.2"), Some(Kind::Pmi));
        assert_eq!(kind_of("mpirun.openmpi (OpenRTE) 4.1.4"), Some(Kind::Pmix));
        assert_eq!(kind_of("mpirun (Open MPI) 5.0.3"), Some(Kind::Pmix));
        assert_eq!(kind_of("something else 1.0"), None);
    }

    #[test]
    fn launchers_are_told_the_hosts_in_their_own_ways() {
        assert_eq!(hosts(Kind::Pmi, &[0, 0, 1]).as_deref(), Some("n0:2,n1:1"));
        assert_eq!(hosts(Kind::Pmix, &[0, 0, 1]).as_deref(), Some("n0,n0,n1"));
        assert_eq!(hosts(Kind::Pmi, &[0, 1, 0, 0]), None);
        assert_eq!(hosts(Kind::Pmix, &[0, 1, 0, 0]).as_deref(), Some("n0,n1,n0,n0"));
    }
}
