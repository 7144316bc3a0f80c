//! Which rank is on which node, as a step without MPI tells. No input or output.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Variables that are the same for all tasks of a step; those of the step that answers are those of the ranks.
const OF_STEP: [&str; 17] = [
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_NODELIST",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEPID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    NUM_TASKS,
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_THREADS_PER_CORE",
];
/// Tasks of the step.
const NUM_TASKS: &str = "SLURM_STEP_NUM_TASKS";
/// Tasks that a step may have.
const MAX_RANKS: usize = 1 << 20;
/// And on one node: the list of their numbers is a variable of each, which has room for 128 KiB.
const MAX_ON_NODE: usize = 1 << 14;
/// The lines of an answer: a site's prolog may print others.
const RANK: &str = "belay-rank ";
const VARIABLE: &str = "belay-variable ";

/// Options and command of the step that answers.
pub(super) fn question() -> Vec<String> {
    let script = format!(
        "echo \"{RANK}$SLURM_PROCID $SLURM_NODEID $SLURMD_NODENAME $(uname -n)\"; \
         [ \"$SLURM_PROCID\" != 0 ] || env | sed -n 's/^SLURM_/{VARIABLE}&/p'"
    );
    let words = [
        "--mpi=none",
        "--input=none",
        "--output=all",
        "--error=all",
        "/bin/sh",
        "-c",
        &script,
    ];
    words.map(str::to_owned).to_vec()
}

/// A node of the step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Node {
    /// As Slurm calls it.
    pub(super) name: String,
    /// As it calls itself.
    pub(super) host: String,
}

/// Where the ranks are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Layout {
    /// In Slurm's order.
    pub(super) nodes: Vec<Node>,
    /// Ranks one after the other on one node: its number, and how many; all of it `times` times.
    runs: Vec<(usize, usize)>,
    times: usize,
    /// Variables of the step; those without a value are not to be there.
    pub(super) variables: Vec<(String, Option<String>)>,
}

impl Layout {
    /// Understands what the tasks have said.
    pub(super) fn read(said: &str) -> Result<Self, String> {
        let mut nodes = BTreeMap::new();
        let mut of_rank = BTreeMap::new();
        for line in said.lines().filter_map(|l| l.strip_prefix(RANK)) {
            let [rank, node, name, host] = line.split(' ').collect::<Vec<_>>()[..] else {
                return Err(format!("a task answered {line:?} when asked where it is"));
            };
            let number = |word: &str| word.parse::<usize>().map_err(|_| format!("a task has the number {word:?}"));
            of_rank.insert(number(rank)?, number(node)?);
            let (name, host) = (name.to_owned(), host.to_owned());
            nodes.insert(number(node)?, Node { name, host });
        }
        let is_whole = !of_rank.is_empty() && of_rank.keys().copied().eq(0..of_rank.len());
        if !is_whole || !nodes.keys().copied().eq(0..nodes.len()) {
            return Err(format!(
                "{} tasks on {} nodes have said where they are, not all",
                of_rank.len(),
                nodes.len()
            ));
        }
        let told: BTreeMap<&str, &str> = said
            .lines()
            .filter_map(|l| l.strip_prefix(VARIABLE)?.split_once('='))
            .collect();
        if let Some(all) = told.get(NUM_TASKS).filter(|n| **n != of_rank.len().to_string()) {
            return Err(format!("{} of {all} tasks have said where they are", of_rank.len()));
        }
        let variable = |name: &str| (name.to_owned(), told.get(name).map(|v| (*v).to_owned()));
        let (runs, times) = folded(runs_of(of_rank.into_values()));
        let made = Self {
            nodes: nodes.into_values().collect(),
            runs,
            times,
            variables: OF_STEP.iter().map(|n| variable(n)).collect(),
        };
        made.check().map(|()| made)
    }

    /// Whether a layout that has come from elsewhere can be used.
    pub(super) fn check(&self) -> Result<(), String> {
        let once = self.runs.iter().try_fold(0usize, |sum, (_, count)| sum.checked_add(*count));
        let ranks = once.and_then(|once| once.checked_mul(self.times));
        if ranks.is_none_or(|n| n > MAX_RANKS) || self.times > MAX_RANKS {
            return Err(format!("more than {MAX_RANKS} tasks"));
        }
        let mut on_nodes = vec![0; self.nodes.len()];
        for (node, count) in &self.runs {
            let on_node = on_nodes.get_mut(*node).filter(|_| *count > 0);
            let on_node = on_node.ok_or_else(|| format!("{count} tasks on node {node}"))?;
            *on_node += count * self.times;
            if *on_node > MAX_ON_NODE {
                return Err(format!("more than {MAX_ON_NODE} tasks on node {node}"));
            }
        }
        Ok(())
    }

    /// The node of each rank.
    pub(super) fn by_rank(&self) -> impl Iterator<Item = usize> + '_ {
        let once = || self.runs.iter().flat_map(|(node, count)| std::iter::repeat_n(*node, *count));
        (0..self.times).flat_map(move |_| once())
    }

    /// The ranks on `node`.
    pub(super) fn ranks_on(&self, node: usize) -> Vec<usize> {
        self.by_rank()
            .enumerate()
            .filter(|(_, n)| *n == node)
            .map(|(r, _)| r)
            .collect()
    }

    /// Nodes and ranks for a launcher that fills each node with so many and begins again at the first; none where that
    /// gives another layout.
    pub(super) fn in_turns(&self) -> Option<Vec<(&Node, usize)>> {
        let first = |node| self.runs.iter().find(|(n, _)| *n == node).map_or(0, |(_, count)| *count);
        let counts: Vec<usize> = (0..self.nodes.len()).map(first).collect();
        let turn = || {
            counts
                .iter()
                .enumerate()
                .flat_map(|(node, count)| std::iter::repeat_n(node, *count))
        };
        let all = std::iter::repeat_with(turn).flatten().take(self.by_rank().count());
        all.eq(self.by_rank()).then(|| self.nodes.iter().zip(counts).collect())
    }
}

fn runs_of(nodes: impl Iterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for node in nodes {
        match runs.last_mut() {
            Some((last, count)) if *last == node => *count += 1,
            _ => runs.push((node, 1)),
        }
    }
    runs
}

/// The runs without what is a repetition, and how often they are there.
fn folded(mut runs: Vec<(usize, usize)>) -> (Vec<(usize, usize)>, usize) {
    let whole = runs.len();
    let repeats = |period: &usize| whole.is_multiple_of(*period) && runs.iter().zip(runs.iter().skip(*period)).all(|(a, b)| a == b);
    let period = (1..=whole).find(repeats).unwrap_or(whole);
    runs.truncate(period);
    (runs, whole / period.max(1))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Ranks on nodes 0, 1 and so on, named n0, n1.
    pub(crate) fn layout(nodes: &[usize]) -> Layout {
        let line = |(rank, node): (usize, &usize)| format!("{RANK}{rank} {node} n{node} host{node}\n");
        Layout::read(&nodes.iter().enumerate().map(line).collect::<String>()).unwrap()
    }

    fn turns(nodes: &[usize]) -> Option<Vec<(String, usize)>> {
        let l = layout(nodes);
        Some(l.in_turns()?.into_iter().map(|(n, c)| (n.name.clone(), c)).collect())
    }

    #[test]
    fn what_tasks_say_becomes_a_layout_in_whatever_order_they_say_it() {
        let said = format!(
            "{RANK}1 0 n2 h2\nhello from a prolog\n{RANK}2 1 n3 h3\n{RANK}0 0 n2 h2\n{VARIABLE}SLURM_NTASKS=3\n{VARIABLE}SLURM_TASK_PID=7\n"
        );
        let l = Layout::read(&said).unwrap();
        assert_eq!(l.by_rank().collect::<Vec<_>>(), [0, 0, 1]);
        assert_eq!((l.nodes[1].name.as_str(), l.nodes[1].host.as_str()), ("n3", "h3"));
        assert_eq!(l.ranks_on(0), [0, 1]);
        let told: Vec<_> = l.variables.iter().filter(|(_, v)| v.is_some()).collect();
        assert_eq!(told, [&("SLURM_NTASKS".to_owned(), Some("3".to_owned()))]);
        assert!(l.variables.contains(&("SLURM_DISTRIBUTION".to_owned(), None)));
    }

    #[test]
    fn an_answer_that_is_not_whole_is_none() {
        for said in [
            "",
            "belay-rank 0 0 n2",
            "belay-rank 1 0 n2 h2",
            "belay-rank 0 1 n2 h2",
            "belay-rank x 0 n2 h2",
            // The last is missing.
            "belay-rank 0 0 n2 h2\nbelay-rank 1 0 n2 h2\nbelay-variable SLURM_STEP_NUM_TASKS=3",
        ] {
            assert!(Layout::read(said).is_err(), "{said:?}");
        }
    }

    #[test]
    fn a_layout_from_elsewhere_is_looked_at_before_it_is_used() {
        let good = serde_json::to_string(&layout(&[0, 1])).unwrap();
        let check = |from: &str, to: &str| {
            assert!(good.contains(from), "{good}");
            serde_json::from_str::<Layout>(&good.replace(from, to)).unwrap().check()
        };
        assert_eq!(check("[0,1]", "[0,1]"), Ok(()));
        for (from, to) in [
            ("[1,1]", "[2,1]"),
            ("[1,1]", "[1,0]"),
            ("[1,1]", "[1,16385]"),
            ("\"times\":1", "\"times\":16385"),
            ("[1,1]", "[1,18446744073709551615]"),
            ("\"times\":1", "\"times\":18446744073709551615"),
        ] {
            assert!(check(from, to).is_err(), "{to}");
        }
    }

    #[test]
    fn a_layout_is_short_where_it_repeats() {
        for (nodes, runs) in [
            (vec![0, 0, 1, 1], 2),
            (vec![0, 1, 0, 1, 0, 1], 2),
            (vec![0, 0, 1, 0, 0, 1], 2),
            (vec![0, 1, 0], 3),
            (vec![0; 1000], 1),
        ] {
            let l = layout(&nodes);
            assert_eq!((l.by_rank().collect::<Vec<_>>(), l.runs.len()), (nodes, runs));
        }
    }

    #[test]
    fn turns_are_found_where_there_are_any() {
        let n = |counts: &[usize]| Some(counts.iter().enumerate().map(|(n, c)| (format!("n{n}"), *c)).collect());
        assert_eq!(turns(&[0, 0, 1]), n(&[2, 1]));
        assert_eq!(turns(&[0, 1, 0, 1, 0]), n(&[1, 1]));
        assert_eq!(turns(&[0, 0, 1, 1, 0, 0, 1, 1]), n(&[2, 2]));
        assert_eq!(turns(&[0, 1, 0, 0]), None);
        assert_eq!(turns(&[1, 0]), None);
    }
}
