//! Slurm's `srun` as a remote shell: its options are understood as far as needed to know how many tasks it starts and
//! to start them on other nodes. No input or output.
//!
//! Each task becomes a part of the job.

/// Its name.
pub(crate) const SRUN: &str = "srun";

/// Long options without a value in a word of its own.
const FLAGS: [&str; 29] = [
    "contiguous",
    "disable-status",
    "exact",
    "exclusive",
    "help",
    "hold",
    "immediate",
    "interactive",
    "kill-on-bad-exit",
    "label",
    "multi-prog",
    "no-allocate",
    "no-kill",
    "overcommit",
    "overlap",
    "oversubscribe",
    "preserve-env",
    "propagate",
    "pty",
    "quiet",
    "quit-on-interrupt",
    "reboot",
    "resv-ports",
    "spread-job",
    "unbuffered",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
];
/// Short ones.
const SHORT_FLAGS: &str = "EHIKOQVXZhklsuv";
/// The long names of those that are understood.
const LETTERS: [(&str, &str); 19] = [
    ("D", "chdir"),
    ("E", "preserve-env"),
    ("K", "kill-on-bad-exit"),
    ("N", "nodes"),
    ("O", "overcommit"),
    ("Q", "quiet"),
    ("W", "wait"),
    ("X", "disable-status"),
    ("c", "cpus-per-task"),
    ("e", "error"),
    ("i", "input"),
    ("k", "no-kill"),
    ("m", "distribution"),
    ("n", "ntasks"),
    ("o", "output"),
    ("r", "relative"),
    ("u", "unbuffered"),
    ("w", "nodelist"),
    ("x", "exclude"),
];
/// Of these there is no process, or not one of the given program for each task.
const NOT_OURS: [&str; 5] = ["multi-prog", "pty", "help", "usage", "version"];
/// What another allocation changes.
const PLACE: [&str; 5] = ["nodes", "ntasks", "ntasks-per-node", "nodelist", "jobid"];
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

/// One option: its long name where it has one that matters here, its value, and its words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Opt {
    pub(super) name: String,
    pub(super) value: Option<String>,
    pub(super) words: Vec<String>,
}

impl Opt {
    /// Whether it may be several in one word, of which only the first is understood.
    pub(super) fn is_cluster(&self) -> bool {
        let word = self.words.first().map_or("", String::as_str);
        let flags = word
            .strip_prefix('-')
            .filter(|w| w.len() > 1 && !w.starts_with(['-', 'K', 'I']));
        flags.is_some_and(|w| w.starts_with(|c| SHORT_FLAGS.contains(c)))
    }
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
        let (name, attached, takes) = if let Some(long) = word.strip_prefix("--") {
            let (name, value) = long.split_once('=').map_or((long, None), |(n, v)| (n, Some(v)));
            (name.to_owned(), value, value.is_none() && !FLAGS.contains(&name))
        } else {
            let letter = word.get(1..2)?;
            let name = LETTERS.iter().find(|(l, _)| *l == letter).map_or(letter, |(_, name)| name);
            let value = word.get(2..).filter(|v| !v.is_empty());
            (name.to_owned(), value, value.is_none() && !SHORT_FLAGS.contains(letter))
        };
        let end = at + 1 + usize::from(takes);
        let value = if takes {
            words.get(at + 1).cloned()
        } else {
            attached.map(str::to_owned)
        };
        options.push(Opt {
            name,
            value,
            words: words.get(at..end)?.to_vec(),
        });
        at = end;
    }
    Some((options, words.get(at..).filter(|c| !c.is_empty())?))
}

/// Whether each task is a process of the program that is named.
pub(super) fn starts_tasks(options: &[Opt]) -> bool {
    !options.iter().any(|o| NOT_OURS.contains(&o.name.as_str()))
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
        if !starts_tasks(&options) {
            return None;
        }
        let value = |name: &str| options.iter().rev().find(|o| o.name == name)?.value.clone();
        let number = |name: &str| value(name).and_then(|v| v.parse::<u32>().ok()).filter(|n| *n > 0);
        let by_nodes = || Some(number("nodes")? * number("ntasks-per-node").unwrap_or(1));
        Some(Self {
            tasks: number("ntasks").or_else(by_nodes)?,
            nodes: value("nodelist"),
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
pub(crate) fn distinct<'a>(hosts: &[&'a String]) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for host in hosts.iter().map(|h| h.as_str()) {
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

/// The words of `srun`, with the number of tasks that the allocation says where they do not.
pub(crate) fn with_tasks(mut words: Vec<String>, allocated: Option<String>) -> Vec<String> {
    if let (None, Some(tasks)) = (Srun::parse(&words), allocated) {
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
        assert_eq!(parse("-N2 --ntasks-per-node=3 -l ./program").unwrap().tasks, 6);
        assert_eq!(
            with_tasks(words("-l ./program"), Some("4".into())),
            words("--ntasks=4 -l ./program")
        );
        assert_eq!(with_tasks(words("-n2 x"), Some("4".into())), words("-n2 x"));
    }
}
