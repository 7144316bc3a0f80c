//! Which hosts a job goes on with when some have been lost: those that execute a command. Parts whose hosts answer stay there; the others get hosts that have none.

use super::remote::RemoteShell;
use super::table::{self, Row};
use crate::jobdir::JobDir;
use crate::redundancy::record::{self, Record};
use crate::{generations, sys, Failure};
use belay_kernel::pidfd;
use std::collections::BTreeSet;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// A part that has lost its root has ended so long after that: the silence is noticed within 5 s, and it ends 15 s later.
const FENCE: Duration = Duration::from_secs(25);
/// How long a host may take to execute a command.
const LIMIT: Duration = Duration::from_secs(20);

/// Hosts for the parts of the newest generation of the job in `dir`, in their order: of those `given`, or else of those that they had, the ones that answer. `tell` hears of each that does not.
pub fn choose(dir: &JobDir, given: &[String], tell: &mut dyn FnMut(&str)) -> Result<Vec<String>, Failure> {
    // A restart goes back to an older generation where this one is damaged.
    let rows = newest_rows(dir).unwrap_or_default();
    let Some(first) = rows.first() else {
        return Ok(given.to_vec());
    };
    let used: Vec<&str> = rows.iter().map(|r| r.words.host.as_str()).collect();
    let had = rows.iter().filter(|r| r.words.tasks == 0).map(|r| r.words.host.clone());
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
    Ok(places(&used, &alive, &sys::host()))
}

/// Waits until parts that are only cut off have ended, that were lost since `noticed`, in seconds since the epoch: there must not be two of them.
pub fn await_fence(noticed: u64) {
    let since = Duration::from_secs(sys::now_unix_s().saturating_sub(noticed));
    std::thread::sleep(FENCE.saturating_sub(since));
}

fn newest_rows(dir: &JobDir) -> Result<Vec<Row>, Failure> {
    let here = generations::list(&dir.generations())?;
    let newest = here.iter().map(|g| g.number).chain(record::newest(dir.path())).max();
    let Some(number) = newest else { return Ok(Vec::new()) };
    match Record::read(dir.path(), number)? {
        Some(record) => Ok(record.rows),
        None => table::read(&dir.generations().join(generations::name(number))),
    }
}

/// Those of `hosts` on which the remote shell that `words` calls executes a command.
fn answering(words: &RemoteShell, hosts: &[String]) -> Result<Vec<String>, Failure> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let distinct: BTreeSet<&String> = hosts.iter().collect();
    let mut asked = Vec::new();
    for host in distinct {
        let mut words = words.clone();
        words.elsewhere(&[host], 1);
        asked.push((host, words.spawn("exit 0", None, &path)?));
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

/// A host for each part: the one that it has `used`, if that is `alive`; else one that is, and has no part; else any; where none is, `own`.
fn places(used: &[&str], alive: &[String], own: &str) -> Vec<String> {
    let mut spare = alive.iter().filter(|h| !used.contains(&h.as_str()));
    let mut any = alive.iter().cycle();
    let mut place = |host: &&str| {
        let stays = alive.iter().find(|h| h == host);
        stays.or_else(|| spare.next()).or_else(|| any.next()).cloned()
    };
    used.iter()
        .map(|host| place(host).unwrap_or_else(|| own.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lost_its_host_gets_a_spare_and_the_others_stay() {
        let alive = |names: &str| -> Vec<String> { names.split_whitespace().map(str::to_owned).collect() };
        let used = ["a", "b", "c"];
        assert_eq!(places(&used, &alive("a c d e"), "own"), ["a", "d", "c"]);
        assert_eq!(places(&used, &alive("d e a"), "own"), ["a", "d", "e"]);
        // No spare is left: hosts get several parts.
        assert_eq!(places(&used, &alive("c"), "own"), ["c", "c", "c"]);
        assert_eq!(places(&used, &alive("a d"), "own"), ["a", "d", "a"]);
        assert_eq!(places(&used, &[], "own"), ["own", "own", "own"]);
        // Parts of an srun that names no nodes.
        let unnamed = ["the nodes of srun"; 2];
        assert_eq!(places(&unnamed, &alive("x y z"), "own"), ["x", "y"]);
        assert_eq!(places(&unnamed, &alive("x"), "own"), ["x", "x"]);
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
