//! `srun` with an MPI plugin. Its tasks would be connected to Slurm's own daemons, which are in no checkpoint; so the
//! stand-in becomes the MPI's own launcher, whose daemons are parts of the job, with the ranks where `srun` would have
//! them.
//!
//! ```text
//! srun --mpi=pmi2 -n 4 ./program ── a step without MPI says where the tasks would be (layout) ── exec mpiexec -hosts h2:2,h3:2 -n 4 belay rank {...}
//!                                                            each rank: variables of Slurm, input, exec ./program (rank)
//! ```

mod input;
mod launcher;
mod layout;
mod options;
pub mod rank;

#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    //! Entries for the fuzzer.

    use super::layout::Layout;
    use super::rank::Spec;

    /// What the tasks of a step have said when asked where they are, and what becomes of it.
    pub fn layout(said: &str) {
        let Ok(layout) = Layout::read(said) else { return };
        assert!(layout.check().is_ok(), "what was read cannot be used");
        drop(layout.in_turns());
        let again = serde_json::to_string(&layout)
            .ok()
            .and_then(|text| serde_json::from_str(&text).ok());
        assert!(
            again.is_some_and(|l: Layout| l == layout),
            "a rank would be told something else"
        );
    }

    /// The word of `belay rank`.
    pub fn rank(word: &str) {
        let Ok(spec) = Spec::read(word) else { return };
        for (rank, node) in spec.layout.by_rank().enumerate().take(1) {
            let host = &spec.layout.nodes[node].host;
            drop(super::rank::task(&spec, rank, host));
        }
    }
}

use super::srun;
use crate::Failure;
use belay_wire::Exit;
use input::Input;
use launcher::Launcher;
use layout::Layout;
use options::Carried;
use rank::Spec;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;

/// Runs programs outside of the job for a process in it.
pub(super) trait Outside {
    /// What the program prints, if it succeeds.
    fn ask(&self, program: &str, words: &[String]) -> Result<String, Failure>;
}

/// What becomes of a stand-in for `srun`.
#[derive(Debug)]
pub(super) enum Plan {
    /// It asks for this `srun`.
    Follow(Vec<String>),
    /// It becomes this.
    Become(Box<Command>),
}

/// Who serves the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// PMI-1 and PMI-2: Hydra, of MPICH and its relatives.
    Pmi,
    /// PMIx: Open MPI's.
    Pmix,
}

impl Kind {
    /// That of Slurm's plugin of this name, where ranks depend on it.
    fn of(plugin: &str) -> Option<Self> {
        match plugin {
            "pmi2" => Some(Self::Pmi),
            p if p.starts_with("pmix") => Some(Self::Pmix),
            _ => None,
        }
    }
}

fn refused(message: String) -> Failure {
    Failure::new(Exit::Usage, message)
}

/// What the real `srun` at `program`, called with `words`, is to be. `standins` is no place to look for programs.
pub(super) fn plan(program: &str, words: Vec<String>, standins: &Path, outside: &dyn Outside) -> Result<Plan, Failure> {
    let Some((options, command)) = srun::split(&words).filter(|(o, command)| srun::starts_tasks(o, command)) else {
        return Ok(Plan::Follow(words));
    };
    let said = options.iter().rev().find(|o| o.name == "mpi").map(|o| o.value.clone());
    if said.is_none() && command.first().is_some_and(|c| super::is_daemon(Path::new(c))) {
        // It serves ranks itself.
        return Ok(Plan::Follow([vec!["--mpi=none".to_owned()], words].concat()));
    }
    let plugin = match said.flatten().or_else(|| std::env::var("SLURM_MPI_TYPE").ok()) {
        Some(plugin) => plugin,
        None => configured("MpiDefault", standins, outside).unwrap_or_else(|| "none".into()),
    };
    let Some(kind) = Kind::of(&plugin) else {
        return Ok(Plan::Follow(words));
    };
    let whole = |f: Failure| refused(format!("srun --mpi={plugin}: {f}"));
    let in_allocation = std::env::var_os("SLURM_JOB_ID").is_some();
    if !in_allocation {
        return Err(whole(refused("needs an allocation under belay; use sbatch or salloc".into())));
    }
    let carried = Carried::of(&options, &|name| std::env::var(name).ok()).map_err(|e| whole(refused(e)))?;
    let launcher = Launcher::find(kind, standins).map_err(whole)?;
    let asked = [&carried.place[..], &layout::question()].concat();
    let layout = Layout::read(&outside.ask(program, &asked)?).map_err(|e| whole(refused(e)))?;
    let hosts = launcher.hosts(&layout).map_err(|e| whole(refused(e)))?;
    let input = Input::of(carried.input.as_deref()).map_err(|e| whole(refused(e)))?;
    let spec = Spec {
        kind,
        command: command.to_vec(),
        input,
        layout,
    };
    let mut c = launcher.command(&hosts, &spec)?;
    let appends = carried.asks_site() && configured("JobFileAppend", standins, outside).as_deref() == Some("1");
    carried.apply(&mut c, appends).map_err(whole)?;
    Ok(Plan::Become(Box::new(c)))
}

/// What the site has configured under `key`.
fn configured(key: &str, standins: &Path, outside: &dyn Outside) -> Option<String> {
    let scontrol = super::path::find("scontrol", standins)?;
    let said = outside.ask(scontrol.to_str()?, &["show".into(), "config".into()]).ok()?;
    value_of(key, &said)
}

fn value_of(key: &str, said: &str) -> Option<String> {
    let mut pairs = said.lines().filter_map(|l| l.split_once('='));
    Some(pairs.find(|(k, _)| k.trim() == key)?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_are_told_apart() {
        assert_eq!(Kind::of("pmix_v4"), Some(Kind::Pmix));
        assert_eq!(Kind::of("pmi2"), Some(Kind::Pmi));
        assert_eq!(Kind::of("none"), None);
        assert_eq!(
            value_of("MpiDefault", "LaunchType = x\nMpiDefault              = pmix\n"),
            Some("pmix".into())
        );
    }
}
