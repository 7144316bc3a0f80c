//! `belay rank`: what a launcher starts in the place of each task of an `srun`. It makes sure that it is where `srun`
//! would have it, gives the program the variables that it would have had as a task, and becomes the program.

use super::input::Input;
use super::layout::Layout;
use super::Kind;
use crate::Failure;
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What is true of a launcher's daemon only: ranks are not bound to processors.
const NOT_FOR_RANKS: [&str; 4] = [
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_VERBOSE",
];

/// All that a rank has to know. It is one word of the launcher's command line, in JSON: launchers give words of their
/// own a meaning in a program's arguments.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Spec {
    /// What has started the rank.
    pub(super) kind: Kind,
    /// The program and its arguments.
    pub(super) command: Vec<String>,
    pub(super) input: Input,
    pub(super) layout: Layout,
}

impl Spec {
    pub(super) fn read(word: &str) -> Result<Self, String> {
        let spec: Self = serde_json::from_str(word).map_err(|e| e.to_string())?;
        spec.layout.check().map(|()| spec)
    }
}

/// Becomes the program; returns only why it could not.
pub fn run(spec: &str) -> Failure {
    match begin(spec) {
        Ok(mut c) => {
            let error = c.exec();
            let exit = match error.kind() {
                std::io::ErrorKind::NotFound => Exit::NotFound,
                _ => Exit::NotExecutable,
            };
            Failure::new(exit, format!("execute {}: {error}", c.get_program().display()))
        }
        Err(failure) => failure,
    }
}

fn begin(spec: &str) -> Result<Command, Failure> {
    let fail = |what: String| Failure::new(Exit::Usage, format!("a rank in place of a task of srun: {what}"));
    let spec = Spec::read(spec).map_err(fail)?;
    let names: &[&str] = match spec.kind {
        Kind::Pmi => &["PMI_RANK"],
        Kind::Pmix => &["OMPI_COMM_WORLD_RANK", "PMIX_RANK"],
    };
    let told = names.iter().find_map(|n| std::env::var(n).ok()?.parse::<usize>().ok());
    let rank = told.ok_or_else(|| fail("the launcher does not tell its number".into()))?;
    let mut c = task(&spec, rank, &crate::sys::host()).map_err(fail)?;
    if let Some(input) = spec.input.open(rank)? {
        c.stdin(input);
    }
    Ok(c)
}

/// The program as task `rank` on the host called `here`.
pub(super) fn task(spec: &Spec, rank: usize, here: &str) -> Result<Command, String> {
    let node = spec
        .layout
        .by_rank()
        .nth(rank)
        .ok_or_else(|| format!("there is no task {rank}"))?;
    let there = spec.layout.nodes.get(node).ok_or("there is no such node")?;
    if here != there.host {
        return Err(format!(
            "rank {rank} is on {here}, and srun would have it on {}; use mpirun",
            there.host
        ));
    }
    let (program, arguments) = spec.command.split_first().ok_or("no program")?;
    let mut c = Command::new(program);
    c.args(arguments);
    for name in NOT_FOR_RANKS {
        c.env_remove(name);
    }
    for (name, value) in &spec.layout.variables {
        match value {
            Some(value) => c.env(name, value),
            None => c.env_remove(name),
        };
    }
    let beside = spec.layout.ranks_on(node);
    let local = beside.iter().position(|r| *r == rank).unwrap_or(0);
    let list: Vec<String> = beside.iter().map(usize::to_string).collect();
    c.env("SLURM_PROCID", rank.to_string())
        .env("SLURM_LOCALID", local.to_string())
        .env("SLURM_NODEID", node.to_string())
        .env("SLURM_GTIDS", list.join(","))
        .env("SLURM_TASK_PID", std::process::id().to_string())
        .env("SLURMD_NODENAME", &there.name);
    Ok(c)
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::layout;
    use super::*;

    fn spec() -> Spec {
        let command = ["./program", "an argument"].map(str::to_owned).to_vec();
        let spec = Spec {
            kind: Kind::Pmi,
            command,
            input: Input::None,
            layout: layout(&[0, 1, 0, 1]),
        };
        // As it comes to a rank.
        serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap()
    }

    #[test]
    fn a_rank_gets_what_its_task_would_have() {
        let c = task(&spec(), 3, "host1").unwrap();
        let set = |name: &str| {
            c.get_envs()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| v.unwrap_or_default().to_str().unwrap())
        };
        let names = [
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_GTIDS",
            "SLURMD_NODENAME",
        ];
        assert_eq!(names.map(set), ["3", "1", "1", "1,3", "n1"].map(Some));
        // What the step does not have is not left from the launcher's daemon.
        assert_eq!(
            (set("SLURM_CPUS_PER_TASK"), set("SLURM_CPU_BIND"), set("HOME")),
            (Some(""), Some(""), None)
        );
        assert_eq!(c.get_args().collect::<Vec<_>>(), ["an argument"]);
    }

    #[test]
    fn a_rank_on_another_host_or_too_many_of_them_are_refused() {
        assert!(task(&spec(), 3, "host0")
            .unwrap_err()
            .contains("rank 3 is on host0, and srun would have it on host1"));
        assert!(task(&spec(), 4, "host0").is_err());
    }
}
