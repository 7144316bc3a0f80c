//! Before a restart: every part's store on its host is made whole, from the hosts that are left.
//!
//! ```text
//! belay restart ─┬─ ssh OLD HOST belay store serve   for each host of the record that answers
//!                └─ ssh NEW HOST belay store heal    for each part, all at once; here for the root's own
//! ```
//! The servers end with the pipe to their standard input, so also when this process is killed.

use super::record::Record;
use crate::jobdir::JobDir;
use crate::nodes::alive::hosts_of;
use crate::nodes::helper::{self, Heard, Helper};
use crate::nodes::seat::name_here;
use crate::nodes::table::{self, Row};
use crate::{generations, Failure};
use belay_tree::Direct;
use belay_wire::Exit;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a host may take to say where it serves.
const LIMIT: Duration = Duration::from_secs(30);

/// A server on another host; it ends when its standard input is closed.
type Source = (Helper, io::PipeWriter);

/// Starts a server on `host`; none where it cannot be reached.
fn serve(rows: &[Row], host: &str, job: &Path) -> Result<Source, Failure> {
    let (input, hold) = helper::pipes()?;
    let words = ["store", "serve", "--dir", &job.display().to_string()];
    Ok((Helper::start(rows, host, &words, input.into())?, hold))
}

fn heal(rows: &[Row], host: &str, job: &Path, (tag, number): (u64, u64), sources: &str) -> Result<Helper, Failure> {
    let (dir, tag, number) = (job.display().to_string(), tag.to_string(), number.to_string());
    let words = [
        "store",
        "heal",
        "--dir",
        &dir,
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
    let mut sources: Vec<Source> = old.iter().filter_map(|host| serve(&rows, host, job).ok()).collect();
    let mut reached = Vec::new();
    let said = helper::hear(sources.iter_mut().map(|(source, _)| (source, LIMIT)));
    for ((source, _), said) in sources.iter().zip(said) {
        match said {
            Heard::Answer(addresses) => reached.push(addresses.replace(',', "+")),
            Heard::Ended | Heard::Silent => tracing::warn!(host = source.host, "no blocks from this host"),
        }
    }
    let reached = reached.join(",");
    let mut all = vec![heal(&rows, &name_here(), job, (0, number), &reached)?];
    for (row, host) in rows.iter().zip(hosts_of(&rows, given, true)) {
        let host = host.as_deref().unwrap_or(row.host());
        all.push(heal(&rows, host, job, (row.tag, number), &reached)?);
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
                let why = format!("generation {number} could not be made whole on {} ({ended:?})", part.host);
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
