//! Bringing things back from durable tiers, each in a child process: what the tiers hold, a generation, the job directory itself.

use super::{child, open_one, Durable, JOB, MAX_JOB};
use crate::config::{Config, Kind};
use crate::jobdir::{Description, JobDir};
use crate::Failure;
use belay_storage::catalogue::{Catalogue, Listed};
use belay_storage::fetch::Fetched;
use belay_storage::flush::Control;
use belay_storage::tier::{read_whole, Tier};
use belay_storage::StorageError;
use belay_wire::Exit;
use std::path::Path;

/// Asks every durable tier what it holds and notes it; what went wrong: tiers that did not answer, and what is damaged there.
pub fn refresh(dir: &JobDir, d: &Description) -> Result<Vec<(Exit, String)>, Failure> {
    let work = |_: &Control| {
        let mut problems = Vec::new();
        for t in d.config.durable() {
            let looked = Durable::open(t, d).and_then(|mut durable| durable.look(dir).map(|()| durable));
            match looked {
                Ok(durable) => problems.extend(durable.faults().into_iter().map(|f| (Exit::Damaged, f))),
                Err(f) => problems.push((f.exit, format!("{f}; going on without this tier"))),
            }
        }
        Ok(problems)
    };
    child::run(work, &mut |_, _| {})
}

/// Brings generation `number` into the job directory, or heals it there; the chunks and files brought, and their bytes.
pub fn fetch(dir: &JobDir, d: &Description, number: u64, tell: &mut dyn FnMut(u64, u64)) -> Result<(u64, u64), Failure> {
    child::run(|control| fetch_here(dir, d, number, control), tell)
}

fn fetch_here(dir: &JobDir, d: &Description, number: u64, control: &Control) -> Result<(u64, u64), Failure> {
    let mut open: Vec<Durable> = Vec::new();
    let mut failure = None;
    for t in d.config.durable() {
        let looked = Durable::open(t, d).and_then(|mut durable| durable.look(dir).map(|()| durable));
        match looked {
            Ok(durable) => open.push(durable),
            Err(f) => {
                tracing::warn!(tier = t.name, error = %f, "tier not used");
                failure = Some(f);
            }
        }
    }
    let sources: Vec<(&dyn Tier, &Catalogue)> = open.iter().map(|d| (&*d.tier, &d.catalogue)).collect();
    // A record is as good as another; what one tier lacks may lie on the next.
    let records = open.iter().flat_map(|d| &d.catalogue.generations);
    let mut records: Vec<&Listed> = records.filter(|g| g.manifest.generation == number).collect();
    records.sort_by_key(|g| std::cmp::Reverse(g.manifest.time_unix_s));
    for wanted in records {
        match belay_storage::fetch::fetch(dir.path(), wanted, &sources, control) {
            Ok(Fetched { items, bytes, .. }) => return Ok((items, bytes)),
            // What is out of reach may be whole: that failure counts.
            Err(e) if e.is_damage() => drop(failure.get_or_insert(Failure::new(Exit::Damaged, e.to_string()))),
            Err(e) => failure = Some(e.into()),
        }
    }
    Err(failure.unwrap_or_else(|| Failure::new(Exit::Damaged, format!("no tier holds generation {number}"))))
}

/// Looks in the durable tiers of `config` for the newest job whose directory was `dir`, and makes that again; whether there was one.
pub fn find_job(dir: &Path, config: &Config) -> Result<bool, Failure> {
    let dir = std::path::absolute(dir).map_err(|e| Failure::io(format!("find {}", dir.display()), &e))?;
    let work = |_: &Control| {
        let (mut found, mut failure): (Option<Description>, _) = (None, None);
        for t in config.durable() {
            let descriptions = match t.kind {
                Kind::Object => open_one(t, "").and_then(|tier| in_store(&*tier)),
                Kind::Memory | Kind::Local | Kind::Pfs => in_directory(t, t.path.as_deref().unwrap_or(Path::new("/"))),
            };
            match descriptions {
                Ok(all) => {
                    let ours = all.into_iter().filter(|d| Path::new(&d.dir) == dir);
                    found = ours.chain(found).max_by_key(|d| d.created_unix_s);
                }
                Err(e) => {
                    tracing::warn!(tier = t.name, error = %e, "going on without this tier");
                    failure.get_or_insert(e);
                }
            }
        }
        let Some(found) = found else {
            return failure.map_or(Ok(false), Err);
        };
        let made = JobDir::create(&dir)?;
        // The tiers may lie elsewhere by now.
        made.describe(&Description {
            config: config.clone(),
            ..found
        })?;
        Ok(true)
    };
    child::run(work, &mut |_, _| {})
}

fn in_directory(t: &crate::config::Tier, path: &Path) -> Result<Vec<Description>, Failure> {
    let fail = |e| Failure::io(format!("tier {}: read {}", t.name, path.display()), &e);
    let mut out = Vec::new();
    for entry in std::fs::read_dir(path).map_err(fail)? {
        let folder = entry.map_err(fail)?.file_name();
        if !path.join(&folder).join(JOB).is_file() {
            continue;
        }
        // Other users' jobs lie beside ours.
        let Some(Ok(tier)) = folder.to_str().map(|f| open_one(t, f)) else {
            continue;
        };
        out.extend(describe(&*tier, JOB)?);
    }
    Ok(out)
}

fn in_store(tier: &dyn Tier) -> Result<Vec<Description>, Failure> {
    let mut out = Vec::new();
    for o in tier.list("")? {
        if o.key.split_once('/').is_some_and(|(_, name)| name == JOB) {
            out.extend(describe(tier, &o.key)?);
        }
    }
    Ok(out)
}

fn describe(tier: &dyn Tier, key: &str) -> Result<Option<Description>, Failure> {
    match read_whole(tier, key, MAX_JOB) {
        Ok(text) => Ok(serde_json::from_slice(&text).ok().filter(Description::has_good_id)),
        Err(StorageError::TierDamaged { .. }) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
