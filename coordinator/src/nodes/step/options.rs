//! What of the options of an `srun` can be carried over to an MPI launcher. What cannot is refused by its name; nothing
//! is dropped that a program or a user would miss.

use crate::nodes::srun::Opt;
use crate::Failure;
use std::fs::{File, OpenOptions};
use std::process::{Command, Stdio};

/// They decide which task is on which node: Slurm hears them when it is asked for that.
const OF_PLACEMENT: [&str; 24] = [
    "contiguous",
    "cores-per-socket",
    "cpus-per-task",
    "distribution",
    "exclude",
    "extra-node-info",
    "hint",
    "immediate",
    "mincpus",
    "nodefile",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-node",
    "ntasks-per-socket",
    "overcommit",
    "overlap",
    "oversubscribe",
    "relative",
    "sockets-per-node",
    "spread-job",
    "threads-per-core",
    "use-min-nodes",
];
/// A launcher does that by itself, or it concerns nobody but `srun`.
const NO_MATTER: [&str; 16] = [
    "comment",
    "disable-status",
    "job-name",
    "kill-on-bad-exit",
    "mpi",
    "no-kill",
    "open-mode",
    "preserve-env",
    "propagate",
    "quiet",
    "quit-on-interrupt",
    "resv-ports",
    "slurmd-debug",
    "unbuffered",
    "verbose",
    "wait",
];
/// These have a meaning of their own for `srun`, each with the variables that say the same.
const CARRIED: [(&str, &[&str]); 6] = [
    ("chdir", &["SLURM_WORKING_DIR", "SLURM_REMOTE_CWD"]),
    ("cpu-bind", &[]),
    ("error", &["SLURM_STDERRMODE"]),
    ("export", &["SRUN_EXPORT_ENV", "SLURM_EXPORT_ENV"]),
    ("input", &["SLURM_STDINMODE"]),
    ("output", &["SLURM_STDOUTMODE"]),
];
/// Variables that say what is refused.
const REFUSED: [(&str, &str); 14] = [
    ("SLURM_BCAST", "--bcast"),
    ("SLURM_CONTAINER", "--container"),
    ("SLURM_EPILOG", "--epilog"),
    ("SLURM_GPUS_PER_TASK", "--gpus-per-task"),
    ("SLURM_GPU_BIND", "--gpu-bind"),
    ("SLURM_LABELIO", "--label"),
    ("SLURM_NETWORK", "--network"),
    ("SLURM_NTASKS_PER_GPU", "--ntasks-per-gpu"),
    ("SLURM_PROLOG", "--prolog"),
    ("SLURM_STEP_GRES", "--gres"),
    ("SLURM_TASK_EPILOG", "--task-epilog"),
    ("SLURM_TASK_PROLOG", "--task-prolog"),
    ("SLURM_TIMELIMIT", "--time"),
    ("SRUN_CONTAINER", "--container"),
];
/// How tasks are bound where they are not; a step within which `srun` is called leaves its own masks there.
const UNBOUND: [&str; 7] = ["none", "no", "n", "quiet", "q", "verbose", "v"];

/// What a launcher is to do as `srun` would.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Carried {
    /// Options that place the tasks, for `srun`.
    pub(super) place: Vec<String>,
    /// Where standard input comes from: `none`, the number of the task that reads it, or a file; otherwise all tasks get it.
    pub(super) input: Option<String>,
    /// The directory in which the tasks run.
    chdir: Option<String>,
    /// Files for standard output and error.
    output: Option<String>,
    error: Option<String>,
    /// Whether what is in them stays; none where the site decides.
    append: Option<bool>,
    /// Variables.
    export: Vec<(String, String)>,
}

impl Carried {
    /// Understands `options`, and the variables that `srun` reads.
    pub(super) fn of(options: &[Opt], variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, String> {
        let cannot = |what: &str| format!("{what} cannot be carried over to the MPI's own launcher; use mpirun, or leave it out");
        let mut made = Self::default();
        for o in options {
            let name = o.name.as_str();
            if name == "kill-on-bad-exit" && o.value.as_deref() == Some("0") {
                return Err(cannot(&o.words.join(" ")));
            }
            if OF_PLACEMENT.contains(&name) {
                made.place.extend(o.words.iter().cloned());
            } else if !NO_MATTER.contains(&name) && !CARRIED.iter().any(|(n, _)| *n == name) {
                return Err(cannot(&o.words.join(" ")));
            }
        }
        for (name, option) in REFUSED {
            if variable(name).is_some_and(|v| !["", "0", "none"].contains(&v.as_str())) {
                return Err(cannot(&format!("{option} ({name})")));
            }
        }
        let last = |name: &str| options.iter().rev().find(|o| o.name == name).and_then(|o| o.value.clone());
        let value = |name: &str| {
            let mut variables = CARRIED.iter().filter(|(n, _)| *n == name).flat_map(|(_, v)| *v);
            last(name).or_else(|| variables.find_map(|v| variable(v)))
        };
        if last("cpu-bind").is_some_and(|b| b.split(',').any(|w| !UNBOUND.contains(&w))) {
            return Err(cannot("--cpu-bind"));
        }
        for (name, option) in [("SLURM_CPU_BIND", "--cpu-bind"), ("SLURM_MEM_BIND", "--mem-bind")] {
            let left = |w: &str| w.is_empty() || w.starts_with("mask_") || UNBOUND.contains(&w);
            // What follows a mask's colon are more masks.
            let said = variable(name).unwrap_or_default();
            if said.split(':').next().is_some_and(|b| b.split(',').any(|w| !left(w))) {
                return Err(cannot(&format!("{option}={said} ({name})")));
            }
        }
        let mode = last("open-mode").or_else(|| variable("SLURM_OPEN_MODE"));
        made.append = mode.map(|m| m.starts_with('a'));
        made.chdir = value("chdir");
        let file = |name: &str| {
            let said = value(name).filter(|v| !is_all(v));
            let Some(said) = said else { return Ok(None) };
            if said.eq_ignore_ascii_case("none") {
                return Ok(Some("none".into()));
            }
            if said.starts_with('-') || said.contains('\\') {
                return Err(cannot(&format!("--{name}={said}, which srun takes for something else,")));
            }
            let own = || cannot(&format!("--{name}={said}, which is for each task another,"));
            expanded(&said, variable).map(Some).ok_or_else(own)
        };
        made.output = file("output")?;
        made.error = file("error")?;
        made.input = file("input")?;
        for (name, at) in [("output", &made.output), ("error", &made.error)] {
            if at.as_ref().is_some_and(|v| v.parse::<u32>().is_ok()) {
                return Err(cannot(&format!("--{name} of one task")));
            }
        }
        if let Some(list) = value("export") {
            made.export = exported(&list).ok_or_else(|| cannot(&format!("--export={list}")))?;
        }
        Ok(made)
    }

    /// Whether the site says if files are appended to.
    pub(super) fn asks_site(&self) -> bool {
        self.append.is_none() && (self.output.is_some() || self.error.is_some())
    }

    /// Lets `c` begin as `srun` would, at a site where files are appended to or not unless it is said.
    pub(super) fn apply(&self, c: &mut Command, appends: bool) -> Result<(), Failure> {
        let open = |name: &str| {
            let name = if name == "none" { "/dev/null" } else { name };
            open(name, self.append.unwrap_or(appends)).map_err(|e| Failure::io(format!("open {name}"), &e))
        };
        if let Some(output) = &self.output {
            let file = open(output)?;
            if self.error.as_ref().is_none_or(|e| e == output) {
                c.stderr(file.try_clone().map_err(|e| Failure::io(format!("share {output}"), &e))?);
            }
            c.stdout(file);
        }
        if let Some(error) = self.error.as_ref().filter(|e| self.output.as_ref() != Some(e)) {
            c.stderr(Stdio::from(open(error)?));
        }
        if let Some(dir) = &self.chdir {
            c.current_dir(dir);
        }
        c.envs(self.export.iter().map(|(n, v)| (n, v)));
        Ok(())
    }
}

/// Opens a file for output as `srun` does: what others write into it meanwhile is not overwritten.
fn open(name: &str, append: bool) -> std::io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).open(name)?;
    if !append && file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Whether this name of a file means the standard output (or input) of `srun`.
fn is_all(name: &str) -> bool {
    name == "-" || name.get(..3).is_some_and(|n| n.eq_ignore_ascii_case("all"))
}

/// The name of a file with the job's number in it; none for one that each task has for itself.
fn expanded(name: &str, variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let name = name
        .replace("%j", &variable("SLURM_JOB_ID")?)
        .replace("%x", &variable("SLURM_JOB_NAME").unwrap_or_default());
    (!name.contains('%')).then_some(name)
}

/// Variables that `--export` sets beside all that are there; none where it says that not all go along.
fn exported(list: &str) -> Option<Vec<(String, String)>> {
    let words = list.split(',');
    if !words.clone().any(|w| w == "ALL") || list.contains(['\'', '"', '\\']) {
        return None;
    }
    let mut set = Vec::new();
    // A name without a value is among all.
    for word in words {
        set.extend(word.split_once('=').map(|(n, v)| (n.to_owned(), v.to_owned())));
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::srun::split;

    fn carried(line: &str, variables: &[(&str, &str)]) -> Result<Carried, String> {
        let words: Vec<String> = format!("{line} program").split_whitespace().map(str::to_owned).collect();
        let (options, _) = split(&words).unwrap();
        let variable = |name: &str| Some(variables.iter().find(|(n, _)| *n == name)?.1.to_owned());
        Carried::of(&options, &variable)
    }

    #[test]
    fn what_places_tasks_is_for_srun() {
        let c = carried("--mpi=pmi2 -n 4 -N2 --distribution=cyclic -K --wait 5 -u -x n7 -c 2", &[]).unwrap();
        assert_eq!(c.place.join(" "), "-n 4 -N2 --distribution=cyclic -x n7 -c 2");
        let nothing_else = Carried {
            place: c.place.clone(),
            ..Carried::default()
        };
        assert_eq!(c, nothing_else);
    }

    #[test]
    fn files_variables_and_the_directory_are_carried_over() {
        let job = [
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STDINMODE", "none"),
            ("SLURM_OPEN_MODE", "append"),
        ];
        let c = carried("-o out.%j -e none -D /w --export=ALL,A=1,B", &job).unwrap();
        assert_eq!((c.output.as_deref(), c.error.as_deref()), (Some("out.7"), Some("none")));
        assert_eq!((c.chdir.as_deref(), c.input.as_deref()), (Some("/w"), Some("none")));
        assert_eq!((c.export, c.append), (vec![("A".into(), "1".into())], Some(true)));
        assert_eq!(carried("--input=3 --output=all", &job).unwrap().input.as_deref(), Some("3"));
        let c = carried("-o - -e ALLtasks -i NONE", &[("SLURM_REMOTE_CWD", "/r")]).unwrap();
        assert_eq!((c.output, c.error), (None, None));
        assert_eq!((c.input.as_deref(), c.chdir.as_deref()), (Some("none"), Some("/r")));
    }

    #[test]
    fn what_cannot_be_carried_over_is_refused_by_its_name() {
        for (line, named) in [
            ("-l", "-l"),
            ("--label", "--label"),
            ("--time=5", "--time=5"),
            ("--gpus-per-task=1", "--gpus-per-task=1"),
            ("--exclusive", "--exclusive"),
            ("--cpu-bind=cores", "--cpu-bind"),
            ("-o out.%t", "--output=out.%t"),
            (r"-o out\%j", r"--output=out\%j"),
            ("--error=-x", "--error=-x"),
            ("--error=2", "--error of one task"),
            ("--export=NONE", "--export=NONE"),
            ("--never-heard-of=1", "--never-heard-of=1"),
            ("-ul", "-l"),
            ("-K0", "-K0"),
        ] {
            let why = carried(line, &[("SLURM_JOB_ID", "7")]).unwrap_err();
            assert!(why.starts_with(named), "{line}: {why}");
        }
        assert!(carried("", &[("SLURM_LABELIO", "1")]).unwrap_err().contains("SLURM_LABELIO"));
        for (name, value) in [
            ("SLURM_GPUS_PER_TASK", "1"),
            ("SLURM_CPU_BIND", "quiet,cores"),
            ("SRUN_EXPORT_ENV", "NONE"),
        ] {
            let also = [(name, value), ("SLURM_EXPORT_ENV", "ALL")];
            assert!(carried("", &also).is_err(), "{name}");
        }
        let harmless = [("SLURM_CPU_BIND", "quiet,mask_cpu:0x1,0x2"), ("SLURM_GPU_BIND", "none")];
        assert!(carried("--cpu-bind=none", &harmless).is_ok());
    }

    #[test]
    fn output_and_errors_in_one_file_are_both_there() {
        let file = std::env::temp_dir().join(format!("belay-output-{}", std::process::id()));
        let name = file.display();
        let c = carried(&format!("-o {name} -e {name}"), &[("SLURM_JOB_ID", "7")]).unwrap();
        assert!(c.asks_site());
        for appends in [false, true, false] {
            let mut sh = Command::new("sh");
            sh.args(["-c", "echo output; echo error >&2; echo more"]);
            c.apply(&mut sh, appends).unwrap();
            assert!(sh.status().unwrap().success());
            let once = "output\nerror\nmore\n";
            assert_eq!(std::fs::read_to_string(&file).unwrap(), once.repeat(1 + usize::from(appends)));
        }
        std::fs::remove_file(file).unwrap();
    }
}
