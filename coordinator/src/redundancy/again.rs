//! Before a restart: every part's store on its host is made whole, from the hosts that are left.
//!
//! ```text
//! belay restart ─┬─ ssh OLD HOST belay store serve   for each host of the record that answers
//!                └─ ssh NEW HOST belay store heal    for each part, all at once; here for the root's own
//! ```
//! The servers end with the pipe to their standard input, so also when this process is killed.

use super::record::Record;
use super::serve::Held;
use crate::jobdir::JobDir;
use crate::nodes::alive::hosts_of;
use crate::nodes::helper::{self, Heard, Helper};
use crate::nodes::seat::name_here;
use crate::nodes::table::{self, Row};
use crate::{generations, shell, Failure};
use belay_tree::Direct;
use belay_wire::Exit;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a host may take to say where it serves.
const LIMIT: Duration = Duration::from_secs(30);

/// A server on another host; it ends when its standard input is closed.
type Source = (Helper, io::PipeWriter);

/// Who has what of the generation that is made whole.
#[derive(Debug, Default)]
struct Sources {
    /// The addresses of each server.
    addresses: Vec<String>,
    /// The servers that have a store of each part.
    holders: BTreeMap<u64, BTreeSet<usize>>,
    /// The parts that each part can be rebuilt from, by all groups that it is in.
    groups: BTreeMap<u64, BTreeSet<u64>>,
}

impl Sources {
    fn add(&mut self, held: Held) {
        for tag in held.tags {
            self.holders.entry(tag).or_default().insert(self.addresses.len());
        }
        for group in held.groups {
            for tag in &group {
                self.groups.entry(*tag).or_default().extend(&group);
            }
        }
        self.addresses.push(held.addresses.join("+"));
    }

    /// Those that part `tag` can need, however many hosts the job has.
    fn of(&self, tag: u64) -> String {
        let group = self.groups.get(&tag).into_iter().flatten();
        let holders = group.chain([&tag]).filter_map(|t| self.holders.get(t)).flatten();
        let holders: BTreeSet<usize> = holders.copied().collect();
        let addresses: Vec<&str> = holders.into_iter().map(|n| self.addresses[n].as_str()).collect();
        addresses.join(",")
    }
}

/// Starts a server for generation `number` on `host`; none where it cannot be reached.
fn serve(rows: &[Row], host: &str, job: &Path, number: u64) -> Result<Source, Failure> {
    let (input, hold) = helper::pipes()?;
    let (dir, number) = (shell::text(job)?, number.to_string());
    let words = ["store", "serve", "--dir", dir, "--generation", &number];
    Ok((Helper::start(rows, host, &words, input.into())?, hold))
}

fn heal(rows: &[Row], host: &str, job: &Path, (tag, number): (u64, u64), sources: &str) -> Result<Helper, Failure> {
    let (dir, tag, number) = (shell::text(job)?, tag.to_string(), number.to_string());
    let words = [
        "store",
        "heal",
        "--dir",
        dir,
        "--tag",
        &tag,
        "--generation",
        &number,
        "--sources",
        sources,
    ];
    Helper::start(rows, host, &words, helper::nothing()?)
}

/// What `belay store heal` says: bytes rebuilt, or why not.
pub(super) type Healed = Result<u64, (Exit, String)>;

/// Makes generation `number` whole on all hosts where it will be restarted: the root's part here, the others on the
/// hosts `given`, or where they were. Whether anything had to be rebuilt.
pub(crate) fn prepare(dir: &JobDir, number: u64, given: &[String], tell: &mut dyn FnMut(&str)) -> Result<bool, Failure> {
    let job = dir.path();
    let (rows, root) = match Record::read(job, number)? {
        Some(record) => (record.rows, record.root),
        None => {
            let rows = table::read(&dir.generations().join(generations::name(number)))?;
            (rows, name_here())
        }
    };
    if rows.is_empty() {
        return Ok(false);
    }
    let begin = Instant::now();
    let old: BTreeSet<&str> = rows.iter().map(Row::host).chain([root.as_str()]).collect();
    // Hosts that are gone are what this is for.
    let mut sources: Vec<Source> = old.iter().filter_map(|host| serve(&rows, host, job, number).ok()).collect();
    let mut reached = Sources::default();
    let said = helper::hear(sources.iter_mut().map(|(source, _)| (source, LIMIT)));
    for ((source, _), said) in sources.iter().zip(said) {
        let held = match said {
            Heard::Answer(held) => serde_json::from_str(&held).ok(),
            Heard::Ended | Heard::Silent => None,
        };
        match held {
            Some(held) => reached.add(held),
            None => tracing::warn!(host = source.host, "no blocks from this host"),
        }
    }
    let mut all = vec![heal(&rows, &name_here(), job, (0, number), &reached.of(0))?];
    for (row, host) in rows.iter().zip(hosts_of(&rows, given, true)) {
        let host = host.as_deref().unwrap_or(row.host());
        all.push(heal(&rows, host, job, (row.tag, number), &reached.of(row.tag))?);
    }
    let (mut rebuilt, mut failure) = (false, None);
    let heard = helper::hear(all.iter_mut().map(|part| (part, Direct::SILENCE)));
    for (mut part, heard) in all.into_iter().zip(heard) {
        let said = match heard {
            Heard::Answer(said) => said,
            Heard::Ended => String::new(),
            Heard::Silent => {
                let host = part.host.clone();
                part.end();
                let seconds = Direct::SILENCE.as_secs();
                let why = format!(
                    "generation {number} could not be made whole on {host}: no sign of life for {seconds} s; leave that host out with --hosts"
                );
                failure.get_or_insert(Failure::new(Exit::RestartFailed, why));
                continue;
            }
        };
        let ended = part.child.wait();
        match serde_json::from_str::<Healed>(&said) {
            Ok(Ok(0)) => {}
            Ok(Ok(bytes)) => {
                rebuilt = true;
                tell(&format!("generation {number}: {bytes} bytes rebuilt on {}", part.host));
            }
            // The one of an earlier attempt will have ended at the next.
            Ok(Err((Exit::AlreadyRunning, message))) => drop(failure.get_or_insert(Failure::new(Exit::RestartFailed, message))),
            Ok(Err((exit, message))) => drop(failure.get_or_insert(Failure::new(exit, message))),
            Err(_) => {
                let ended = ended.map_or_else(|e| e.to_string(), |status| status.to_string());
                let why = format!(
                    "generation {number} could not be made whole on {}: the helper there has ended ({ended}) without an answer; \
                     see what is said above, or leave that host out with --hosts",
                    part.host
                );
                failure.get_or_insert(Failure::new(Exit::RestartFailed, why));
            }
        }
    }
    for (source, hold) in sources {
        drop(hold);
        source.end();
    }
    tracing::info!(
        generation = number,
        ms = generations::ms(begin.elapsed()),
        "parts looked after"
    );
    failure.map_or(Ok(rebuilt), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(host: &str, tags: &[u64], groups: &[&[u64]]) -> Held {
        Held {
            addresses: vec![format!("{host}:1"), format!("{host}:2")],
            tags: tags.to_vec(),
            groups: groups.iter().map(|g| g.to_vec()).collect(),
        }
    }

    #[test]
    fn a_part_is_told_of_those_that_have_it_or_are_in_its_groups() {
        let mut sources = Sources::default();
        sources.add(held("a", &[0], &[&[0, 1]]));
        // Part 1 was here before.
        sources.add(held("b", &[2, 1], &[&[2, 3]]));
        sources.add(held("c", &[3], &[&[2, 3]]));
        sources.add(held("d", &[4], &[]));
        let of = |tag| sources.of(tag).replace(":1+", " ").replace(":2", "");
        assert_eq!(of(0), "a a,b b");
        assert_eq!(of(1), of(0));
        assert_eq!(of(2), "b b,c c");
        assert_eq!(of(3), of(2));
        assert_eq!((of(4).as_str(), of(5).as_str()), ("d d", ""));
    }

    #[test]
    fn what_a_part_is_told_does_not_grow_with_the_job() {
        let mut sources = Sources::default();
        for tag in 0..10_000 {
            let group: Vec<u64> = (tag / 8 * 8..tag / 8 * 8 + 8).collect();
            sources.add(held(&format!("[fd00::{tag:x}]"), &[tag], &[&group]));
        }
        let longest = (0..10_000).map(|tag| sources.of(tag).len()).max();
        assert!(longest.is_some_and(|l| l < 1000), "{longest:?}");
    }
}
