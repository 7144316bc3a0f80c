//! Which hosts a job goes on with when some have been lost: those that execute a command. Parts whose hosts answer stay
//! there; the others get hosts that have none.

use super::hosts::of_part;
use super::names::spelled;
use super::remote::RemoteShell;
use super::seat::{name_here, node_of_slurm};
use super::table::{self, Row};
use crate::jobdir::JobDir;
use crate::redundancy::record::{self, Record};
use crate::{generations, sys, tiers, Failure};
use belay_kernel::pidfd;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// A part that has lost its root has ended so long after that: the silence is noticed within 10 s, and it ends 15 s later.
const FENCE: Duration = Duration::from_secs(30);
/// How long a host may take to execute a command.
const LIMIT: Duration = Duration::from_secs(20);

/// Hosts for the parts of the newest generation of the job in `dir`, in their order: of those `given`, or else of those
/// that they had, the ones that answer. `tell` hears of each that does not.
pub fn choose(dir: &JobDir, given: &[String], tell: &mut dyn FnMut(&str)) -> Result<Vec<String>, Failure> {
    let rows = rows(dir, None).ok().flatten().unwrap_or_default();
    let Some(first) = rows.first() else {
        return Ok(given.to_vec());
    };
    let used: Vec<&str> = rows.iter().map(Row::host).collect();
    let had = rows.iter().map(|r| r.host().to_owned());
    let candidates: Vec<String> = if given.is_empty() { had.collect() } else { given.to_vec() };
    let alive = answering(&first.words, &candidates)?;
    for host in candidates
        .iter()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .filter(|h| !alive.contains(h))
    {
        tell(host);
    }
    Ok(places(&used, &with_own(alive, &used), &name_here()))
}

/// `hosts` and this one, if it has been `used`: it answers.
fn with_own(mut hosts: Vec<String>, used: &[&str]) -> Vec<String> {
    let own = name_here();
    let own = spelled(&[&own], used).concat();
    if used.contains(&own.as_str()) && !as_used(&hosts, used).contains(&own.as_str()) {
        hosts.push(own);
    }
    hosts
}

/// The names of `hosts`, as they were when parts `used` them.
pub(super) fn as_used<'a>(hosts: &'a [String], used: &[&'a str]) -> Vec<&'a str> {
    let names: Vec<&str> = hosts.iter().map(String::as_str).collect();
    spelled(&names, used)
}

/// The host of each of `rows` at a restart on `given` hosts, if any; none where it stays, or Slurm chooses. Where each
/// has its data on the host on which it ran (`stored`), none is left to Slurm.
pub(crate) fn hosts_of(rows: &[Row], given: &[String], stored: bool) -> Vec<Option<String>> {
    let by_slurm = |r: &Row| r.words.is_placed_by_slurm();
    let named = rows.iter().filter(|r| !by_slurm(r)).count();
    let used: Vec<&str> = rows.iter().filter(|r| by_slurm(r)).map(Row::host).collect();
    let today = match (given, node_of_slurm()) {
        ([], _) => used.iter().map(|h| (*h).to_owned()).collect(),
        // What is given leaves out the first node of an allocation, on which tasks may run too.
        (given, own) => given.iter().cloned().chain(own).collect::<Vec<_>>(),
    };
    let mut chosen = places(&used, &today, &name_here()).into_iter();
    let mut at = 0..named;
    let place = |row: &Row| match (by_slurm(row), stored) {
        (true, true) => chosen.next(),
        (true, false) => None,
        (false, _) => of_part(at.next()?, named, given)
            .cloned()
            .or_else(|| stored.then(|| row.host().to_owned())),
    };
    rows.iter().map(place).collect()
}

/// Waits until parts that are only cut off have ended, that were lost since `noticed`, in seconds since the epoch:
/// there must not be two of them.
pub fn await_fence(noticed: u64) {
    let since = Duration::from_secs(sys::now_unix_s().saturating_sub(noticed));
    std::thread::sleep(FENCE.saturating_sub(since));
}

/// The parts of generation `wanted`, or of the newest whose table is whole: a restart goes back behind one that is
/// damaged. None where no generation is known here.
pub(super) fn rows(dir: &JobDir, wanted: Option<u64>) -> Result<Option<Vec<Row>>, Failure> {
    if let Some(number) = wanted {
        return rows_of(dir, number).map(Some);
    }
    let here = generations::numbers(&dir.generations())?;
    let redundant = record::numbers(dir.path())?;
    let tiers = dir.description().map(|d| tiers::known(dir, &d)).unwrap_or_default();
    let there = tiers.iter().flatten().flat_map(tiers::Known::numbers);
    let elsewhere = redundant.iter().copied().chain(there).collect();
    let known: BTreeSet<u64> = here.into_iter().chain(redundant).collect();
    let order = generations::order(&dir.generations(), known, &elsewhere);
    let mut found = order.into_iter().map(|number| rows_of(dir, number));
    let newest = found.next().transpose();
    newest.or_else(|failure| found.find_map(Result::ok).map(Some).ok_or(failure))
}

fn rows_of(dir: &JobDir, number: u64) -> Result<Vec<Row>, Failure> {
    match Record::read(dir.path(), number)? {
        Some(record) => Ok(record.rows),
        None => table::read_listed(&dir.generations().join(generations::name(number))),
    }
}

/// Those of `hosts` on which the remote shell that `words` calls executes a command.
fn answering(words: &RemoteShell, hosts: &[String]) -> Result<Vec<String>, Failure> {
    let distinct: BTreeSet<&String> = hosts.iter().collect();
    let mut asked = Vec::new();
    for host in distinct {
        asked.push((host, words.to(host).spawn("exit 0", (None, None))?));
    }
    let (begin, mut alive) = (Instant::now(), BTreeSet::new());
    for (host, mut child) in asked {
        let left = LIMIT.saturating_sub(begin.elapsed());
        let process = pidfd::open(child.id().cast_signed());
        let process = process.map_err(|e| Failure::system("watch a remote shell", &e))?;
        if !sys::readable_within(process.as_raw_fd(), left).unwrap_or(false) {
            drop(child.kill());
        }
        if child.wait().is_ok_and(|status| status.success()) {
            alive.insert(host);
        }
    }
    Ok(hosts.iter().filter(|h| alive.contains(h)).cloned().collect())
}

/// A host for each part: the one that it has `used`, if that is `alive`; else one that is, and has no part; else that
/// of others that were on the same one; else any; where none is, `own`. Here the first part runs already: this host
/// comes behind all others.
pub(super) fn places<'a>(used: &[&'a str], alive: &'a [String], own: &str) -> Vec<String> {
    // What a part has on its host is known under the name of before.
    let mut alive = as_used(alive, used);
    let here = spelled(&[own], &alive).concat();
    alive.sort_by_key(|host| *host == here);
    let mut spare = alive.iter().copied().filter(|h| !used.contains(h));
    let mut any = alive.iter().copied().cycle();
    let mut instead: BTreeMap<&str, &str> = BTreeMap::new();
    let mut place = |host: &&'a str| {
        let stays = alive.iter().copied().find(|h| h == host);
        let found = stays.or_else(|| spare.next()).or_else(|| instead.get(host).copied());
        let found = found.or_else(|| any.next())?;
        instead.insert(host, found);
        Some(found.to_owned())
    };
    used.iter()
        .map(|host| place(host).unwrap_or_else(|| own.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::manifest::{Manifest, MANIFEST_FILE};

    #[test]
    fn who_lost_its_host_gets_a_spare_and_the_others_stay() {
        let alive = |names: &str| -> Vec<String> { names.split_whitespace().map(str::to_owned).collect() };
        let used = ["a", "b", "c"];
        assert_eq!(places(&used, &alive("a c d e"), "own"), ["a", "d", "c"]);
        assert_eq!(places(&used, &alive("d e a"), "own"), ["a", "d", "e"]);
        // This host has a part already; it is taken where it is named and no other one is left.
        assert_eq!(places(&used, &alive("own a c d e"), "own"), ["a", "d", "c"]);
        assert_eq!(places(&used, &alive("own.x a c d e"), "own"), ["a", "d", "c"]);
        assert_eq!(places(&used, &alive("own a c"), "own"), ["a", "own", "c"]);
        // No spare is left: hosts get several parts.
        assert_eq!(places(&used, &alive("c"), "own"), ["c", "c", "c"]);
        assert_eq!(places(&used, &alive("a d"), "own"), ["a", "d", "a"]);
        assert_eq!(places(&used, &[], "own"), ["own", "own", "own"]);
        // Those of one host stay together, as far as there are no spares.
        assert_eq!(places(&["a", "b", "b", "b"], &alive("a c d"), "own"), ["a", "c", "d", "d"]);
        // With a domain or without they are the same ones, under the names that the parts know.
        let long = ["a.x", "b", "c.x"];
        assert_eq!(places(&long, &alive("c b.x a d"), "own"), ["a.x", "b", "c.x"]);
        assert_eq!(places(&long, &alive("d c a"), "own"), ["a.x", "d", "c.x"]);
        assert_eq!(places(&long, &alive("c"), "own"), ["c.x", "c.x", "c.x"]);
        // Two hosts, not one.
        assert_eq!(places(&["a.x", "a.y"], &alive("a b"), "own"), ["a", "b"]);
        // Parts of an srun that names no nodes.
        let unnamed = ["the nodes of srun"; 2];
        assert_eq!(places(&unnamed, &alive("x y z"), "own"), ["x", "y"]);
        assert_eq!(places(&unnamed, &alive("x"), "own"), ["x", "x"]);
    }

    #[test]
    fn this_host_answers_under_the_name_that_parts_know() {
        let own = name_here();
        let long = format!("{own}.cluster");
        let of = |hosts: &[&str], used: &[&str]| with_own(hosts.iter().map(|h| (*h).to_owned()).collect(), used);
        assert_eq!(of(&["n1"], &["n1", &long]), ["n1", &long]);
        assert_eq!(of(&[&own], &[&long]), [own.as_str()]);
        assert_eq!(of(&[&long], &[&own]), [long.as_str()]);
        assert_eq!(of(&["n1"], &["n1", "n2"]), ["n1"]);
    }

    /// Parts of `srun` on these nodes, which it names or not.
    fn tasks(options: &str, nodes: &str) -> Vec<Row> {
        let words = RemoteShell {
            program: "srun".into(),
            options: options.split(' ').map(str::to_owned).collect(),
            host: "nodes".into(),
            command: "./a".into(),
            tasks: 3,
        };
        let row = |(n, on): (u64, &str)| Row {
            share: None,
            tag: n,
            words: words.clone(),
            standin: 9,
            first: 1,
            on: on.into(),
        };
        (1..).zip(nodes.split(' ')).map(row).collect()
    }

    #[test]
    fn parts_go_where_their_data_is() {
        let of = |options: &str, given: &str, stored| {
            let given: Vec<String> = given.split_whitespace().map(str::to_owned).collect();
            let hosts = hosts_of(&tasks(options, "b a c"), &given, stored);
            hosts
                .into_iter()
                .map(|h| h.unwrap_or("?".into()))
                .collect::<Vec<_>>()
                .join(" ")
        };
        // Tasks that Slurm places, whose data all nodes see, or which is on the nodes.
        assert_eq!(of("-n 3", "a b", false), "? ? ?");
        assert_eq!(of("-n 3", "", true), "b a c");
        assert_eq!(of("-n 3", "a b d", true), "b a d");
        assert_eq!(of("-n 3", "a d e", true), "d a e");
        assert_eq!(of("-n 3", "a", true), "a a a");
        // Nodes that the user names are those of the parts, in their order.
        assert_eq!(of("-w a,b,c", "x y z", true), "x y z");
        assert_eq!(of("-w a,b,c", "", true), "b a c");
        assert_eq!(of("-w a,b,c", "", false), "? ? ?");
    }

    #[test]
    fn a_table_that_cannot_be_read_or_is_missing_is_passed_over() {
        let base = std::env::temp_dir().join(format!("belay-rows-{}", std::process::id()));
        let dir = JobDir::create(&base).unwrap();
        let generation = |number: u64| dir.generations().join(generations::name(number));
        let made = |number: u64, nodes: &str| {
            let at = generation(number);
            std::fs::create_dir_all(&at).unwrap();
            let files = match nodes {
                "" => Vec::new(),
                nodes => vec![table::write(&at, &tasks("-n 3", nodes)).unwrap()],
            };
            let manifest = Manifest {
                generation: number,
                time_unix_s: 0,
                host: String::new(),
                arch: std::env::consts::ARCH.into(),
                blocked_ms: 0.0,
                phases_ms: Vec::new(),
                processes: 1,
                threads: 1,
                taken: None,
                left_out: None,
                declared: None,
                dirty: None,
                without_hashes: None,
                bytes: 0,
                new_bytes: 0,
                files,
                chunks: Vec::new(),
                next_chunk: 0,
            };
            std::fs::write(at.join(MANIFEST_FILE), manifest.encode().unwrap()).unwrap();
        };
        let hosts = |wanted| {
            let rows = rows(&dir, wanted).map_err(|_| "damaged")?;
            Ok::<_, &str>(rows.map(|rows| rows.iter().map(|r| r.on.clone()).collect::<String>()))
        };
        assert_eq!(hosts(None), Ok(None));
        made(3, "x y");
        made(4, "a b");
        made(5, "c d e");
        assert_eq!(hosts(None), Ok(Some("cde".into())));
        std::fs::write(generation(5).join("nodes.json"), "[").unwrap();
        assert_eq!((hosts(None), hosts(Some(5))), (Ok(Some("ab".into())), Err("damaged")));
        std::fs::remove_file(generation(4).join("nodes.json")).unwrap();
        assert_eq!((hosts(None), hosts(Some(4))), (Ok(Some("xy".into())), Err("damaged")));
        // All parts have ended.
        made(6, "");
        assert_eq!(hosts(None), Ok(Some(String::new())));
        std::fs::remove_dir_all(generation(6)).unwrap();
        std::fs::remove_file(generation(3).join("nodes.json")).unwrap();
        assert_eq!(hosts(None), Err("damaged"));
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn hosts_that_execute_nothing_do_not_count() {
        let words = RemoteShell {
            program: "sh".into(),
            options: vec!["-c".into(), r#"test "$0" = good"#.into()],
            host: String::new(),
            command: String::new(),
            tasks: 0,
        };
        let hosts = ["bad", "good", "worse", "good"].map(str::to_owned);
        assert_eq!(answering(&words, &hosts).unwrap(), ["good", "good"]);
    }
}
