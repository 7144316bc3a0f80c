//! Slurm's `srun` as a remote shell: its options are understood as far as needed to know how many tasks it starts and
//! to start them on other nodes. No input or output.
//!
//! Each task becomes a part of the job.

/// Its name.
pub(crate) const SRUN: &str = "srun";

/// Long options without a value. (What an option takes is as in `srun(1)` of Slurm 22.05 to 25.11.)
const ALONE: [&str; 29] = [
    "async",
    "consolidate-segments",
    "contiguous",
    "debugger-test",
    "disable-status",
    "exact",
    "help",
    "hold",
    "interactive",
    "label",
    "multi-prog",
    "no-allocate",
    "overcommit",
    "oversubscribe",
    "parsable",
    "preserve-env",
    "quiet",
    "quit-on-interrupt",
    "reboot",
    "spread-job",
    "spread-segments",
    "stepmgr",
    "test-only",
    "unbuffered",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
    "whole",
];
/// Those whose value, if there is one, is in the same word.
const ATTACHED: [&str; 16] = [
    "bcast",
    "compress",
    "exclusive",
    "external-launcher",
    "immediate",
    "kill-on-bad-exit",
    "nice",
    "no-kill",
    "oom-kill-step",
    "overlap",
    "propagate",
    "pty",
    "resv-ports",
    "send-libs",
    "wait-for-children",
    "x11",
];
/// Those that can be meant where a name is shortened, beside these and the ones with a letter. All others have a value, as
/// have those that are not known (of plugins).
const VALUED: [&str; 80] = [
    "accel-bind",
    "acctg-freq",
    "autocomplete",
    "bb",
    "bbf",
    "bcast-exclude",
    "ckpt-dir",
    "ckpt-interval",
    "cluster",
    "cluster-constraint",
    "comment",
    "container",
    "container-id",
    "context",
    "cores-per-socket",
    "cpu-bind",
    "cpu-freq",
    "cpu_bind",
    "cpus-per-gpu",
    "deadline",
    "delay-boot",
    "epilog",
    "export",
    "extra",
    "gid",
    "gpu-bind",
    "gpu-freq",
    "gpus-per-node",
    "gpus-per-socket",
    "gpus-per-task",
    "gres",
    "gres-flags",
    "het-group",
    "hint",
    "ignore-signals",
    "jobid",
    "mail-type",
    "mail-user",
    "mcs-label",
    "mem",
    "mem-bind",
    "mem-per-cpu",
    "mem-per-gpu",
    "mem-update",
    "mincpus",
    "mpi",
    "msg-timeout",
    "network",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-node",
    "ntasks-per-socket",
    "ntasks-per-tres",
    "open-mode",
    "pack-group",
    "power",
    "prefer",
    "priority",
    "profile",
    "prolog",
    "reservation",
    "resources",
    "runtime",
    "segment",
    "signal",
    "slurmd-debug",
    "sockets-per-node",
    "switches",
    "task-epilog",
    "task-prolog",
    "tasks-per-node",
    "thread-spec",
    "threads-per-core",
    "time-min",
    "tmp",
    "treewidth",
    "tres-bind",
    "tres-per-task",
    "uid",
    "wckey",
];
/// All letters, with the long names of the same options.
const LETTERS: [(char, &str); 42] = [
    ('A', "account"),
    ('B', "extra-node-info"),
    ('C', "constraint"),
    ('D', "chdir"),
    ('E', "preserve-env"),
    ('F', "nodefile"),
    ('G', "gpus"),
    ('H', "hold"),
    ('I', "immediate"),
    ('J', "job-name"),
    ('K', "kill-on-bad-exit"),
    ('L', "licenses"),
    ('M', "clusters"),
    ('N', "nodes"),
    ('O', "overcommit"),
    ('Q', "quiet"),
    ('S', "core-spec"),
    ('T', "threads"),
    ('V', "version"),
    ('W', "wait"),
    ('X', "disable-status"),
    ('Z', "no-allocate"),
    ('b', "begin"),
    ('c', "cpus-per-task"),
    ('d', "dependency"),
    ('e', "error"),
    ('h', "help"),
    ('i', "input"),
    ('k', "no-kill"),
    ('l', "label"),
    ('m', "distribution"),
    ('n', "ntasks"),
    ('o', "output"),
    ('p', "partition"),
    ('q', "qos"),
    ('r', "relative"),
    ('s', "oversubscribe"),
    ('t', "time"),
    ('u', "unbuffered"),
    ('v', "verbose"),
    ('w', "nodelist"),
    ('x', "exclude"),
];
/// Of these there is no process, or not one of the given program for each task.
const NOT_OURS: [&str; 6] = ["multi-prog", "pty", "help", "usage", "version", "test-only"];
/// What decides how many tasks there are by what the nodes have.
const OF_NODES: [&str; 3] = ["nodefile", "ntasks-per-gpu", "ntasks-per-tres"];
/// The same where no number is given in any way.
const OF_SOCKETS: [&str; 4] = ["cores-per-socket", "extra-node-info", "sockets-per-node", "threads-per-core"];
/// Tasks of one `srun` that are followed, at most: each is named in the command line of all.
const MAX_TASKS: u32 = 16_384;
/// What another allocation changes.
const PLACE: [&str; 6] = ["nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "nodelist", "jobid"];
/// What else says where tasks go, and counts no longer where that is known of each.
const CHOICE: [&str; 8] = [
    "contiguous",
    "distribution",
    "exclude",
    "ntasks-per-core",
    "ntasks-per-socket",
    "relative",
    "spread-job",
    "use-min-nodes",
];

/// One option: its long name where it has one, its value, and its words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Opt {
    pub(super) name: String,
    pub(super) value: Option<String>,
    pub(super) words: Vec<String>,
}

/// The name that `name` is short for, if it is so for one only.
fn completed(name: &str) -> &str {
    let lettered = LETTERS.iter().map(|(_, name)| name);
    let mut all: Vec<&str> = ALONE
        .iter()
        .chain(&ATTACHED)
        .chain(&VALUED)
        .chain(lettered)
        .copied()
        .collect();
    all.sort_unstable();
    all.dedup();
    let mut meant = all.iter().filter(|known| known.starts_with(name));
    match (all.contains(&name), meant.next(), meant.next()) {
        (false, Some(one), None) => one,
        _ => name,
    }
}

/// The options in a word of letters, and whether the last one takes the word `next`; none for one that is not known.
fn lettered(word: &str, next: Option<&String>) -> Option<(Vec<Opt>, bool)> {
    let mut found = Vec::new();
    for (at, letter) in word.char_indices().skip(1) {
        let (_, name) = LETTERS.iter().find(|(l, _)| *l == letter)?;
        let rest = &word[at + 1..];
        let mut option = Opt {
            name: (*name).to_owned(),
            value: None,
            words: vec![format!("-{letter}")],
        };
        if ALONE.contains(name) {
            found.push(option);
            continue;
        }
        let takes = rest.is_empty() && !ATTACHED.contains(name);
        if takes {
            option.words.push(next?.clone());
            option.value = next.cloned();
        } else if !rest.is_empty() {
            option.words[0].push_str(rest);
            option.value = Some(rest.to_owned());
        }
        found.push(option);
        return Some((found, takes));
    }
    Some((found, false))
}

/// The options before the command, and the command.
pub(super) fn split(words: &[String]) -> Option<(Vec<Opt>, &[String])> {
    let mut options = Vec::new();
    let mut at = 0;
    while let Some(word) = words.get(at).filter(|w| w.starts_with('-') && w.len() > 1) {
        if word == "--" {
            at += 1;
            break;
        }
        let Some(long) = word.strip_prefix("--") else {
            let (letters, takes) = lettered(word, words.get(at + 1))?;
            options.extend(letters);
            at += 1 + usize::from(takes);
            continue;
        };
        let (name, attached) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v)));
        let name = completed(name);
        let takes = attached.is_none() && !ALONE.contains(&name) && !ATTACHED.contains(&name);
        let end = at + 1 + usize::from(takes);
        options.push(Opt {
            name: name.to_owned(),
            value: match takes {
                true => words.get(at + 1).cloned(),
                false => attached.map(str::to_owned),
            },
            words: words.get(at..end)?.to_vec(),
        });
        at = end;
    }
    Some((options, words.get(at..).filter(|c| !c.is_empty())?))
}

/// Whether each task is a process of the program that is named. Behind a colon another one is, with options of its own.
pub(super) fn starts_tasks(options: &[Opt], command: &[String]) -> bool {
    !options.iter().any(|o| NOT_OURS.contains(&o.name.as_str())) && !command.iter().any(|word| word == ":")
}

fn said<'a>(options: &'a [Opt], name: &str) -> Option<&'a str> {
    options.iter().rev().find(|o| o.name == name)?.value.as_deref()
}

fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|n| *n > 0)
}

/// How many tasks `srun` starts where its options do not say it themselves; `variable` is its environment. None where that
/// depends on what nodes there are.
fn tasks_of(options: &[Opt], variable: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    let said = |name| said(options, name).map(str::to_owned);
    let is_laid_out = said("distribution").or_else(|| variable("SLURM_DISTRIBUTION"));
    let is_laid_out = is_laid_out.is_some_and(|d| d.starts_with("arbitrary")) || variable("SLURM_HOSTFILE").is_some();
    let has_one_of = |names: &[&str]| options.iter().any(|o| names.contains(&o.name.as_str()));
    if is_laid_out || has_one_of(&OF_NODES) {
        return None;
    }
    let nodes = said("nodes");
    let each = said("ntasks-per-node").or_else(|| said("tasks-per-node"));
    let each = each.or_else(|| variable("SLURM_NTASKS_PER_NODE"));
    let allocated = variable("SLURM_NTASKS").or_else(|| variable("SLURM_NPROCS"));
    if let Some(allocated) = allocated.filter(|_| nodes.is_none() || each.is_none()) {
        return number(&allocated);
    }
    let named = said("nodelist").filter(|_| nodes.is_none());
    let nodes = match named {
        Some(list) if list.contains(['[', '/']) => return None,
        Some(list) => distinct(&list.split(',').collect::<Vec<_>>()).len().to_string(),
        None => nodes
            .or_else(|| variable("SLURM_JOB_NUM_NODES"))
            .unwrap_or_else(|| "1".into()),
    };
    match each {
        Some(each) => number(nodes.split('-').next()?)?.checked_mul(number(&each)?),
        None if has_one_of(&OF_SOCKETS) => None,
        None => number(&nodes),
    }
}

/// What a command line of `srun` starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Srun {
    /// All options.
    pub(crate) options: Vec<String>,
    /// The nodes that it names.
    pub(crate) nodes: Option<String>,
    pub(crate) tasks: u32,
    /// The program and its arguments.
    pub(crate) command: Vec<String>,
}

impl Srun {
    /// Understands `words` (without the program); none for what starts no tasks, and where their number is not told.
    pub(crate) fn parse(words: &[String]) -> Option<Self> {
        let (options, command) = split(words)?;
        if !starts_tasks(&options, command) {
            return None;
        }
        Some(Self {
            tasks: said(&options, "ntasks").and_then(number).filter(|n| *n <= MAX_TASKS)?,
            nodes: said(&options, "nodelist").map(str::to_owned),
            options: options.iter().flat_map(|o| o.words.clone()).collect(),
            command: command.to_vec(),
        })
    }
}

/// The options, which stand before a command.
fn parsed(options: &[String]) -> Vec<Opt> {
    let whole: Vec<String> = options.iter().cloned().chain(["program".to_owned()]).collect();
    split(&whole).map(|(o, _)| o).unwrap_or_default()
}

/// Whether the options say on which nodes.
pub(crate) fn names_nodes(options: &[String]) -> bool {
    parsed(options).iter().any(|o| o.name == "nodelist")
}

/// Each of `hosts` once.
pub(crate) fn distinct<T: AsRef<str>>(hosts: &[T]) -> Vec<&str> {
    let mut seen = Vec::new();
    for host in hosts.iter().map(AsRef::as_ref) {
        if !seen.contains(&host) {
            seen.push(host);
        }
    }
    seen
}

/// Variables that say where the tasks' input and output go, and how that looks.
pub(super) const OF_OUTPUT: [&str; 4] = ["SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_LABELIO"];

/// Options for one task on `host`, beside whatever runs there.
pub(crate) fn alone_on(host: &str) -> Vec<String> {
    let node = format!("--nodelist={host}");
    ["--mpi=none", "--ntasks=1", "--nodes=1", &node, "--overcommit"]
        .map(str::to_owned)
        .to_vec()
}

/// `options` for `tasks` tasks, each on the one of `hosts` in its place; without hosts wherever the allocation has room.
pub(crate) fn elsewhere(options: &[String], hosts: &[&String], tasks: usize) -> Vec<String> {
    let old = parsed(options);
    let placed = |name: &str| PLACE.contains(&name) || (!hosts.is_empty() && CHOICE.contains(&name));
    let kept = old.into_iter().filter(|o| !placed(&o.name));
    let mut new: Vec<String> = kept.flat_map(|o| o.words).collect();
    new.push(format!("--ntasks={tasks}"));
    let distinct = distinct(hosts);
    match distinct.as_slice() {
        [] => {}
        [one] => new.extend(["--nodes=1".into(), format!("--nodelist={one}")]),
        several => {
            let each: Vec<&str> = hosts.iter().map(|h| h.as_str()).collect();
            new.push(format!("--nodes={}", several.len()));
            // The tasks in the order of that list, not of Slurm's nodes.
            new.push(format!("--nodelist={}", each.join(",")));
            new.push("--distribution=arbitrary".into());
        }
    }
    if distinct.len() < tasks {
        new.push("--overcommit".into());
    }
    new
}

/// The words of `srun` without the options of belay's plugin (scripts/site/spank_belay.c), which has heard them.
pub(crate) fn without_own(words: Vec<String>) -> Vec<String> {
    let is_own = |o: &Opt| ["ckpt-dir", "ckpt-interval"].contains(&o.name.as_str());
    match split(&words) {
        Some((options, command)) if options.iter().any(is_own) => {
            let others = options.into_iter().filter(|o| !is_own(o)).flat_map(|o| o.words);
            others.chain(["--".to_owned()]).chain(command.iter().cloned()).collect()
        }
        _ => words,
    }
}

/// The words of `srun`, with the number of tasks where they do not say it, and `variable`, its environment, does.
pub(crate) fn with_tasks(mut words: Vec<String>, variable: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    let tasks = split(&words).filter(|(options, _)| said(options, "ntasks").is_none());
    if let Some(tasks) = tasks.and_then(|(options, _)| tasks_of(&options, variable)) {
        words.insert(0, format!("--ntasks={tasks}"));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn parse(line: &str) -> Option<Srun> {
        Srun::parse(&words(line))
    }

    #[test]
    fn what_mpirun_says_is_understood() {
        let s = parse("--ntasks-per-node=1 --kill-on-bad-exit --mpi=none --nodes=1 --nodelist=n2 --ntasks=1 orted -mca ess slurm")
            .unwrap();
        assert_eq!((s.tasks, s.nodes.as_deref()), (1, Some("n2")));
        assert_eq!(s.command, words("orted -mca ess slurm"));
        let host = "n7".to_owned();
        let there = "--kill-on-bad-exit --mpi=none --ntasks=1 --nodes=1 --nodelist=n7";
        assert_eq!(elsewhere(&s.options, &[&host], 1), words(there));
    }

    #[test]
    fn what_mpiexec_says_is_understood() {
        let s = parse("-N 2 -n 2 --input none /usr/bin/hydra_pmi_proxy --rmk slurm").unwrap();
        assert_eq!((s.tasks, s.nodes), (2, None));
        assert!(!names_nodes(&s.options) && names_nodes(&words("-wn[1-2] -n 2")));
        assert_eq!(s.options, words("-N 2 -n 2 --input none"));
        let host = "n7".to_owned();
        let packed = "--input none --ntasks=2 --nodes=1 --nodelist=n7 --overcommit";
        assert_eq!(elsewhere(&s.options, &[&host, &host], 2), words(packed));
        let other = "n3".to_owned();
        let dealt = "--ntasks=3 --nodes=2 --nodelist=n7,n3,n7 --distribution=arbitrary --overcommit";
        let chosen = words("-m cyclic -r 1 -n 3 -x n7");
        assert_eq!(elsewhere(&chosen, &[&host, &other, &host], 3), words(dealt));
        assert_eq!(elsewhere(&s.options, &[], 2), words("--input none --ntasks=2 --overcommit"));
    }

    #[test]
    fn two_dashes_end_the_options() {
        let s = parse("-n 2 -- ./program -x").unwrap();
        assert_eq!((s.tasks, s.command), (2, words("./program -x")));
        assert_eq!(s.options, words("-n 2"));
    }

    #[test]
    fn the_number_of_tasks_must_be_known() {
        assert_eq!(parse("./program"), None);
        assert_eq!(parse("-n2 --pty sh"), None);
        assert_eq!(parse("-n16385 ./program"), None);
        for (line, variables, tasks) in [
            ("./program", &[][..], Some(1)),
            ("-n3 ./program", &[("SLURM_NTASKS", "4")], Some(3)),
            (
                "-l ./program",
                &[("SLURM_NTASKS", "4"), ("SLURM_JOB_NUM_NODES", "2")],
                Some(4),
            ),
            ("-l ./program", &[("SLURM_JOB_NUM_NODES", "2")], Some(2)),
            ("-N2 ./program", &[("SLURM_NTASKS", "4")], Some(4)),
            ("-N2 --ntasks-per-node=3 ./program", &[("SLURM_NTASKS", "4")], Some(6)),
            (
                "--tasks-per-node 3 ./program",
                &[("SLURM_NTASKS", "4"), ("SLURM_JOB_NUM_NODES", "2")],
                Some(4),
            ),
            ("-N2 ./program", &[("SLURM_NTASKS_PER_NODE", "2")], Some(4)),
            ("-N2-4 --ntasks-per-node=2 ./program", &[], Some(4)),
            ("-N2-4 ./program", &[], None),
            ("-w n1,n2,n1 ./program", &[], Some(2)),
            ("-w n[1-2] ./program", &[], None),
            ("-m arbitrary -w n1,n2 ./program", &[("SLURM_NTASKS", "4")], None),
            ("--ntasks-per-gpu=2 ./program", &[], None),
            ("--threads-per-core=1 ./program", &[("SLURM_NTASKS", "4")], Some(4)),
            ("-N2 --threads-per-core=1 ./program", &[], None),
            ("-N65536 --ntasks-per-node=65536 ./program", &[], None),
        ] {
            let variable = |name: &str| Some(variables.iter().find(|(n, _)| *n == name)?.1.to_owned());
            let said = with_tasks(words(line), &variable);
            assert_eq!(Srun::parse(&said).map(|s| s.tasks), tasks, "{line} {variables:?}: {said:?}");
        }
    }

    #[test]
    fn options_are_read_as_by_getopt() {
        for (line, options) in [
            ("-ln 4 ./p -x", "-l -n 4"),
            ("-ln4 ./p -x", "-l -n4"),
            ("-lK0 -n 4 ./p -x", "-l -K0 -n 4"),
            ("-K -n 4 ./p -x", "-K -n 4"),
            ("--nice -n 4 ./p -x", "--nice -n 4"),
            (
                "--nice=5 --compress --x11 --send-libs -n4 ./p -x",
                "--nice=5 --compress --x11 --send-libs -n4",
            ),
            ("--unbuf --ntask=4 ./p -x", "--unbuf --ntask=4"),
            ("--unbuf -n4 --of-a-plugin 3 ./p -x", "--unbuf -n4 --of-a-plugin 3"),
            ("-p debug -n4 --gres gpu:1 ./p -x", "-p debug -n4 --gres gpu:1"),
        ] {
            let s = parse(line);
            // A name that is short for several is none.
            if line.contains("--ntask=4") {
                assert_eq!(s, None);
                continue;
            }
            let s = s.unwrap();
            assert_eq!(
                (s.tasks, s.options, s.command),
                (4, words(options), words("./p -x")),
                "{line}"
            );
        }
        // It is not known whether this letter takes a value, and who these programs are.
        assert_eq!(parse("-y -n4 ./p"), None);
        assert_eq!(parse("-n1 ./a : -n2 ./b"), None);
        let said = "--ckpt-interval 10m -ln4 --ckpt-d=x python --ckpt-dir out";
        assert_eq!(without_own(words(said)), words("-l -n4 -- python --ckpt-dir out"));
        assert_eq!(without_own(words("-n4 ./p --ckpt-dir=out")), words("-n4 ./p --ckpt-dir=out"));
        assert_eq!(completed("unbuf"), "unbuffered");
        assert_eq!(completed("nodes"), "nodes");
        assert_eq!(completed("nod"), "nod");
        let known = ALONE.iter().chain(&ATTACHED).chain(&VALUED);
        assert!(known.clone().all(|name| completed(name) == *name));
        assert!(known
            .clone()
            .enumerate()
            .all(|(at, name)| !known.clone().skip(at + 1).any(|n| n == name)));
    }
}
