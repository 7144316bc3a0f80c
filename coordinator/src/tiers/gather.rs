//! Before a restart of a job on several hosts: what of its chunks lies only in local tiers of hosts is looked for
//! there, and moved to the job directory where the part will run on another host.
//!
//! ```text
//! belay restart ─┬─ ssh HOST belay store look     for each part that stays on its host
//!                └─ ssh HOST belay store home     for each part that goes to another one, all at once
//! ```
//! What no host has that answers is lost to the job: a generation that needs it is not restarted.

use super::parts;
use crate::failure::exit_of_image;
use crate::jobdir::{Access, Description, JobDir};
use crate::lock::Lock;
use crate::nodes::again::LOCK_LIMIT;
use crate::nodes::alive::hosts_of;
use crate::nodes::helper::{self, Heard, Helper};
use crate::nodes::seat::{self, name_here, part_dir};
use crate::nodes::table::{self, Row};
use crate::redundancy::record::{self, Record};
use crate::{generations, shell, sys, Failure};
use belay_image::files;
use belay_image::manifest::{ChunkEntry, Manifest};
use belay_image::ImageError;
use belay_storage::place::desk::Spec;
use belay_storage::place::model::Model;
use belay_storage::place::mover::Mover;
use belay_storage::place::rule::Policy;
use belay_storage::store::{self, Host, LocalTier, Store};
use belay_tree::beating;
use belay_wire::Exit;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

/// How long a host may take to answer.
const LIMIT: Duration = Duration::from_secs(30);
/// The same, where nothing is needed of it: what a killed part has left there is only removed.
const TIDY_LIMIT: Duration = Duration::from_secs(10);

/// What is done on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Say which chunks lie there.
    Look,
    /// Move them to the job directory.
    Home,
}

/// What a host says: the chunks that lie there, or that it has moved; or why it has not.
pub(crate) type Answer = Result<BTreeSet<u32>, (Exit, String)>;

/// What the hosts of a job have of its chunks besides those in the job directory, as far as they have been asked.
#[derive(Debug, Default)]
pub struct Gathered(BTreeMap<u64, OfPart>);

#[derive(Debug, Default)]
struct OfPart {
    there: BTreeSet<u32>,
    /// Of each host that was asked in vain, or has nothing (any more): why the rest is not there.
    lacking: Vec<String>,
}

/// Tags of the parts that have a directory, and 0.
fn tags(job: &Path) -> Vec<u64> {
    let others = seat::tags(job).unwrap_or_default();
    [0].into_iter().chain(others).collect()
}

/// Asks the hosts on which something of the generations may lie that is not in the job directory. `wanted` is the
/// generation to be restarted, if one was named, and `given` the hosts for the parts.
pub fn gather(
    dir: &JobDir,
    d: &Description,
    (wanted, given): (Option<u64>, &[String]),
    tell: &mut dyn FnMut(&str),
) -> Result<Gathered, Failure> {
    let mut found = Gathered::default();
    let mut numbers: BTreeSet<u64> = generations::numbers(&dir.generations())?.into_iter().collect();
    // The host that led the job may be another one.
    numbers.extend(record::numbers(dir.path())?);
    if !d.across_hosts || wanted.or(numbers.last().copied()).is_none() {
        return Ok(found);
    }
    // The parts of a generation that is damaged are named by another one.
    let of = |n: u64| {
        let rows = table::read(&dir.generations().join(generations::name(n))).unwrap_or_default();
        match Record::read(dir.path(), n) {
            Ok(Some(record)) if rows.is_empty() => record.rows,
            _ => rows,
        }
    };
    let mut known = wanted.into_iter().chain(numbers.into_iter().rev()).map(of);
    let rows = known.find(|rows| !rows.is_empty()).unwrap_or_default();
    let (mut asked, mut failure) = (Vec::new(), None);
    for tag in tags(dir.path()) {
        let part = part_dir(dir.path(), tag);
        let listed = store::listed(&part);
        if listed.as_ref().is_ok_and(Vec::is_empty) {
            continue;
        }
        // What does not come from there is made again, where the job is redundant.
        let needed = d.config.redundancy.scheme.is_none() && lacks(&part, wanted)?;
        let limit = if needed { LIMIT } else { TIDY_LIMIT };
        let listed = match listed {
            Err(e) if limit == TIDY_LIMIT => {
                tracing::warn!(tag, error = %e, "what lies in local tiers is not known");
                continue;
            }
            other => other?,
        };
        let listed: BTreeSet<Host> = listed.into_iter().filter_map(|t| t.host).collect();
        for host in listed {
            if rows.is_empty() && !host.is_here() {
                let why = format!("no remote shell of the job is known that leads to {}", host.name);
                found.0.entry(tag).or_default().lacking.push(why);
                continue;
            }
            let stays = stays(tag, &host, &rows, given);
            if stays && limit == TIDY_LIMIT {
                continue;
            }
            // What the root will find where it is.
            if tag == 0 && stays {
                found.0.entry(tag).or_default().there.extend(held(&part)?);
                continue;
            }
            let how = if stays { How::Look } else { How::Home };
            if how == How::Home && limit == LIMIT {
                tell(&format!("moving what {} has of part {tag} to {}", host.name, part.display()));
            }
            // A shell that cannot be started leads nowhere.
            let helper = ask(&rows, dir.path(), (tag, &host), how).ok();
            asked.push((tag, host, limit, helper));
        }
    }
    let heard = hear(asked);
    // Who has been silent for too long, or was asked by a restart that was killed, may still be at it.
    if store::listed(dir.path()).is_ok_and(|tiers| !tiers.is_empty()) {
        dir.lock_moves_within(LOCK_LIMIT)?.release();
    }
    for (tag, host, limit, answer) in heard {
        let of = found.0.entry(tag).or_default();
        match answer {
            Some(Ok(there)) => {
                of.lacking.push(format!("{} does not have it any more", host.name));
                of.there.extend(there);
            }
            // It may have all, so nothing older is used.
            Some(Err((exit, why))) if limit == LIMIT => {
                failure.get_or_insert(Failure::new(exit, format!("{}: {why}", host.name)));
            }
            Some(Err((_, why))) => tracing::warn!(tag, host = host.name, why, "what was left there stays"),
            None => of.lacking.push(format!("{} does not answer", host.name)),
        }
    }
    failure.map_or(Ok(found), Err)
}

/// Whether a generation of the part in directory `part`, or the one that is `wanted`, needs chunks that do not lie at home.
fn lacks(part: &Path, wanted: Option<u64>) -> Result<bool, Failure> {
    let home = Store::of_job(part).at_home()?;
    let gen = part.join("gen");
    let all = generations::numbers(&gen)?;
    let manifests = all
        .iter()
        .filter(|n| wanted.is_none_or(|wanted| wanted == **n))
        .filter_map(|n| Manifest::read(&gen.join(generations::name(*n))).ok());
    Ok(manifests.flat_map(|m| m.chunks).any(|c| !home.contains(&c.id)))
}

/// Chunks of the part in directory `part` that lie in local tiers of this host.
fn held(part: &Path) -> Result<BTreeSet<u32>, Failure> {
    Ok(Store::of_job(part).in_tiers()?.into_iter().map(|(_, id, _)| id).collect())
}

/// Whether the part will be restarted on the host where it was.
fn stays(tag: u64, host: &Host, rows: &[Row], given: &[String]) -> bool {
    if tag == 0 {
        return host.is_here();
    }
    // Where Slurm places the tasks of an srun is not known.
    let mut of_shell = rows
        .iter()
        .zip(hosts_of(rows, given, false))
        .filter(|(r, _)| r.words.tasks == 0);
    let row = of_shell.find(|(r, _)| r.tag == tag);
    row.is_some_and(|(row, today)| host.called.as_deref() == Some(today.as_deref().unwrap_or(row.host())))
}

fn ask(rows: &[Row], job: &Path, (tag, host): (u64, &Host), how: How) -> Result<Helper, Failure> {
    let (dir, tag) = (shell::text(job)?, tag.to_string());
    let what = match how {
        How::Look => "look",
        How::Home => "home",
    };
    let called = if host.is_here() {
        name_here()
    } else {
        host.called.clone().unwrap_or_else(|| host.name.clone())
    };
    Helper::start(
        rows,
        &called,
        &["store", what, "--dir", dir, "--tag", &tag],
        helper::nothing()?,
    )
}

/// What is asked of a host: about which part, how long its first sign of life is waited for, and who asks there.
type Asked<T> = (u64, Host, Duration, Option<T>);

/// What the hosts say; none where one does not answer.
fn hear(mut asked: Vec<Asked<Helper>>) -> Vec<Asked<Answer>> {
    let helpers = asked
        .iter_mut()
        .filter_map(|(.., limit, helper)| Some((helper.as_mut()?, *limit)));
    let mut heard = helper::hear(helpers).into_iter();
    let of_one = |(tag, host, limit, helper): Asked<Helper>| {
        let answer = helper.and_then(|helper| {
            helper.end();
            match heard.next()? {
                Heard::Answer(text) => serde_json::from_str(&text).ok(),
                Heard::Ended | Heard::Silent => None,
            }
        });
        (tag, host, limit, answer)
    };
    asked.into_iter().map(of_one).collect()
}

impl Gathered {
    /// Refuses generation `number` of a job on several hosts of which a part lacks something, as far as that can be
    /// seen without reading all of it.
    pub(crate) fn check(&self, dir: &JobDir, number: u64) -> Result<(), Failure> {
        let path = dir.generations().join(generations::name(number));
        let root = self.0.contains_key(&0).then(|| (0, path.clone()));
        for (tag, own) in root.into_iter().chain(parts::of_generation(dir.path(), &path)?) {
            let named = |f: Failure| Failure::new(f.exit, format!("part {tag}: {f}"));
            self.check_part(tag, &own).map_err(named)?;
        }
        Ok(())
    }

    /// What cannot be opened is lost here, as what is damaged: it is looked for on durable tiers.
    fn check_part(&self, tag: u64, own: &Path) -> Result<(), Failure> {
        let damage = |e: ImageError| Failure::new(exit_of_image(&e, Exit::Damaged), e.to_string());
        let m = Manifest::read(own).map_err(damage)?;
        for f in &m.files {
            let (_, bytes) = files::open(&own.join(&f.name)).map_err(damage)?;
            if bytes != f.bytes {
                let why = format!("{bytes} bytes instead of {}", f.bytes);
                return Err(ImageError::damaged(&own.join(&f.name), why).into());
            }
        }
        let store = Store::of_generation(own);
        let Some(of) = self.0.get(&tag) else {
            return m.chunks.iter().try_for_each(|c| store.check_present(c)).map_err(damage);
        };
        let is_there = |c: &&ChunkEntry| of.there.contains(&c.id) || store.check_present(c).is_ok();
        let lost: Vec<&ChunkEntry> = m.chunks.iter().filter(|c| !is_there(c)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let bytes: u64 = lost.iter().map(|c| belay_storage::chunk::file_bytes(c.pages)).sum();
        let why = format!(
            "{bytes} bytes of memory are not in {}, and {}",
            store.directory().display(),
            of.lacking.join(", ")
        );
        Err(Failure::new(Exit::Damaged, why))
    }

    /// Refuses to begin where none of the generations `numbers` can be restarted with what the hosts have: later they may answer.
    pub fn check_some(&self, dir: &JobDir, d: &Description, numbers: &[u64]) -> Result<(), Failure> {
        if self.0.is_empty() || d.config.redundancy.scheme.is_some() {
            return Ok(());
        }
        let mut first = None;
        for number in numbers {
            match self.check(dir, *number) {
                Err(f) if !super::is_on_a_tier(dir, d, *number) => {
                    first.get_or_insert(Failure::new(f.exit, format!("generation {number}: {f}")));
                }
                _ => return Ok(()),
            }
        }
        first.map_or(Ok(()), Err)
    }
}

/// `belay store look` and `belay store home`, on a host of the job: does it for part `tag`, and says how that went.
pub fn run(job: &JobDir, tag: u64, how: How) -> Result<(), Failure> {
    helper::beat().map_err(|e| Failure::io("say that this host is there", &e))?;
    let answer = beating(helper::beat, || match how {
        How::Look => held(&part_dir(job.path(), tag)),
        How::Home => home(job, tag),
    });
    let answer: Answer = answer.map_err(|f| (f.exit, f.message));
    let text = serde_json::to_string(&answer).map_err(|e| Failure::new(Exit::Internal, e.to_string()))?;
    helper::answer(&text).map_err(|e| Failure::io("say what lies here", &e))
}

/// Moves what lies here of part `tag` to its job directory; the chunks moved.
fn home(job: &JobDir, tag: u64) -> Result<BTreeSet<u32>, Failure> {
    let part = JobDir::open(&part_dir(job.path(), tag), Access::Own)?;
    // An agent that still ends moves them itself. The root's is held by whoever asks, of several hosts, or has asked
    // before and been killed.
    let _held: Lock = match tag {
        0 => part.lock_moves_within(LOCK_LIMIT)?,
        _ => part.lock_after(LOCK_LIMIT)?,
    };
    let store = Store::of_job(part.path());
    store.create()?;
    let gen = part.generations();
    if let (Some(needed), None) = (generations::needed_chunks(&gen)?, record::missing(job.path(), &gen)?) {
        store.collect(&needed)?;
    }
    let moved = held(part.path())?;
    let spec = |t: &LocalTier| Spec {
        capacity: 0,
        memory: t.memory,
        model: Model::unmeasured(t.memory),
        shared: None,
    };
    let specs = store.tiers().iter().map(spec).collect();
    let mover = Mover::new(store, specs, Policy::Naive, None)?;
    mover.finish()?;
    if let Some((bytes, why)) = mover.left() {
        let why = format!("{bytes} bytes stay in local tiers of {}: {why}", sys::host());
        return Err(Failure::new(Exit::RestartFailed, why));
    }
    super::local::remove_empty(&part, Some(tag));
    Ok(moved)
}
