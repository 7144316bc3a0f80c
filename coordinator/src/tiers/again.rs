//! Bringing things back from durable tiers, each in a child process: what the tiers hold, a generation, the job directory itself.

use super::{child, is_on_a_tier, joined, notes, open_one, parts, Durable, To, JOB, MAX_JOB};
use crate::config::{Config, Kind, Limits, Use};
use crate::jobdir::{Access, Description, JobDir};
use crate::nodes::seat::part_dir;
use crate::nodes::Nodes;
use crate::{generations, Failure};
use belay_storage::catalogue::{Catalogue, Listed};
use belay_storage::fetch::Fetched;
use belay_storage::flush::Control;
use belay_storage::seal::Keys;
use belay_storage::tier::{read_whole, Tier};
use belay_storage::StorageError;
use belay_wire::Exit;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Asks every durable tier what it holds and notes it; what went wrong: tiers that did not answer, and what is damaged there.
pub fn refresh(dir: &JobDir, d: &Description) -> Result<Vec<(Exit, String)>, Failure> {
    let work = |_: &Control| {
        let mut problems = Vec::new();
        for t in d.config.durable() {
            let before = notes::newest(dir, &t.name);
            let looked = Durable::open(t, d, To::Use).and_then(|mut durable| durable.look(dir, d).map(|()| durable));
            match looked {
                Ok(durable) => {
                    problems.extend(durable.faults().into_iter().map(|f| (Exit::Damaged, f)));
                    problems.extend(durable.locked().take(1).map(|f| (f.exit, f.message)));
                    problems.extend(durable.unread().map(|f| (f.exit, format!("{f}; going on without it"))));
                    problems.extend(fallen_behind(&durable, before).map(|why| (Exit::Damaged, why)));
                }
                Err(f) => problems.push((f.exit, format!("{f}; going on without this tier"))),
            }
        }
        Ok(problems)
    };
    child::run(work, &mut |_, _| {})
}

/// What is to be said of a tier that has had generation `before`, and has not even one after that: a newest one is
/// never removed, so somebody has, or has put back what was there long ago.
fn fallen_behind(durable: &Durable, before: Option<u64>) -> Option<String> {
    let before = before?;
    let now = durable.catalogue.numbers().last().copied();
    if now >= Some(before) {
        return None;
    }
    let now = now.map_or_else(|| "nothing of this job".into(), |n| format!("generation {n} at most"));
    Some(format!(
        "tier {}: it held generation {before}, and now {now}: what was newer has been removed, or an older state has been put back; belay restart --generation {before} insists on it",
        durable.config.name
    ))
}

/// Brings generation `number` into the job directory, or heals it there; the chunks and files brought, and their bytes.
pub fn fetch(dir: &JobDir, d: &Description, number: u64, tell: &mut dyn FnMut(u64, u64)) -> Result<(u64, u64), Failure> {
    child::run(|control| fetch_here(dir, d, number, control), tell)
}

fn fetch_here(dir: &JobDir, d: &Description, number: u64, control: &Control) -> Result<(u64, u64), Failure> {
    let (mut open, mut failed): (Vec<Durable>, Vec<Failure>) = Default::default();
    for t in d.config.durable() {
        let looked = Durable::open(t, d, To::Use).and_then(|mut durable| durable.look(dir, d).map(|()| durable));
        match looked {
            Ok(durable) => {
                failed.extend(durable.obstacle(number));
                open.push(durable);
            }
            Err(f) => {
                tracing::warn!(tier = t.name, error = %f, "tier not used");
                failed.push(f);
            }
        }
    }
    let failure = joined(failed).err();
    let own: Vec<&Durable> = open.iter().collect();
    let (mut items, mut bytes) = bring(dir.path(), &own, number, failure.clone(), control)?;
    if d.config.redundancy.scheme.is_some() {
        // The parts' lie on their hosts, which bring their own: `fetch_part`.
        return Ok((items, bytes));
    }
    let path = dir.generations().join(generations::name(number));
    for (tag, _) in parts::of_generation(dir.path(), &path)? {
        let named = |f: Failure| Failure::new(f.exit, format!("part {tag}: {f}"));
        let theirs = parts::sources(&open, tag);
        let part = directory_of_part(dir, tag, &theirs).map_err(named)?;
        let (more, of_them) = bring(part.path(), &theirs, number, failure.clone(), control).map_err(named)?;
        items += more;
        bytes += of_them;
    }
    Ok((items, bytes))
}

/// On the host of part `tag` of a job whose checkpoints lie on its hosts' own disks: brings the part's generation
/// `number` there. The bytes brought; none where no tier is known to have it.
pub(crate) fn fetch_part(dir: &JobDir, tag: u64, number: u64) -> Result<Option<u64>, Failure> {
    let d = dir.description()?;
    if !is_on_a_tier(dir, &d, number) {
        return Ok(None);
    }
    let (tiers, failure) = open_for_part(&d, tag);
    let failure = failure.or_else(|| tiers.iter().find_map(|durable| durable.obstacle(number)));
    let theirs: Vec<&Durable> = tiers.iter().collect();
    let (_, bytes) = bring(&part_dir(dir.path(), tag), &theirs, number, failure, &Control::default())?;
    Ok(Some(bytes))
}

/// There: makes the part's directory in that of the job again, where both were lost and a tier knows it.
pub(crate) fn describe_part(dir: &JobDir, tag: u64) -> Result<(), Failure> {
    let d = dir.description()?;
    if tag == 0 || d.config.durable().next().is_none() || part_dir(dir.path(), tag).exists() {
        return Ok(());
    }
    let (tiers, failure) = open_for_part(&d, tag);
    let made = directory_of_part(dir, tag, &tiers.iter().collect::<Vec<_>>());
    made.map(drop).map_err(|f| failure.unwrap_or(f))
}

/// The durable tiers as part `tag` has them, and what is there; why one of them could not be looked at.
fn open_for_part(d: &Description, tag: u64) -> (Vec<Durable>, Option<Failure>) {
    let (mut open, mut failed) = (Vec::new(), Vec::new());
    let of_part = match tag {
        0 => d.clone(),
        _ => parts::described(d, tag),
    };
    for t in d.config.durable() {
        let read = Durable::open(t, &of_part, To::Use).and_then(|mut durable| durable.read().map(|()| durable));
        match read {
            Ok(durable) => open.push(durable),
            Err(f) => failed.push(f),
        }
    }
    (open, joined(failed).err())
}

/// Brings generation `number` into the directory `job`; what one of `tiers` lacks may lie on the next. `failure` is why
/// one of them could not be looked at.
fn bring(
    job: &Path,
    tiers: &[&Durable],
    number: u64,
    mut failure: Option<Failure>,
    control: &Control,
) -> Result<(u64, u64), Failure> {
    let sources: Vec<(&dyn Tier, &Catalogue)> = tiers.iter().map(|d| (&*d.tier, &d.catalogue)).collect();
    // A record is as good as another.
    let records = tiers.iter().flat_map(|d| &d.catalogue.generations);
    let mut records: Vec<&Listed> = records.filter(|g| g.manifest.generation == number).collect();
    records.sort_by_key(|g| std::cmp::Reverse(g.manifest.time_unix_s));
    let mut lacking = None;
    for wanted in records {
        match belay_storage::fetch::fetch(job, wanted, &sources, control) {
            Ok(Fetched { items, bytes, .. }) => {
                generations::unmark(&job.join("gen").join(generations::name(number)));
                return Ok((items, bytes));
            }
            // What is out of reach may be whole: that failure counts.
            Err(e) if e.is_damage() => drop(lacking.get_or_insert(e.to_string())),
            Err(e) => failure = Some(e.into()),
        }
    }
    let lacking = lacking.unwrap_or_else(|| format!("no tier that answers holds generation {number}"));
    Err(match failure {
        Some(f) => Failure::new(f.exit, format!("{lacking}; and a tier that may hold it cannot be read: {f}")),
        None => Failure::new(Exit::Damaged, lacking),
    })
}

/// The job directory of part `tag`, made again where it is lost.
fn directory_of_part(dir: &JobDir, tag: u64, tiers: &[&Durable]) -> Result<JobDir, Failure> {
    let path = part_dir(dir.path(), tag);
    match JobDir::open(&path, Access::Own) {
        Err(f) if f.exit == Exit::NoJob => {}
        other => return other,
    }
    let (mut found, mut failure) = (None, None);
    for tier in tiers {
        match describe(&*tier.tier, JOB) {
            Ok(described) => found = found.or(described.ok()),
            Err(e) => drop(failure.get_or_insert(e.into())),
        }
    }
    let none = || failure.unwrap_or_else(|| Failure::new(Exit::Damaged, "no tier holds its description"));
    let described = found.ok_or_else(none)?;
    JobDir::make_parts(path.parent().unwrap_or(&path))?;
    let made = JobDir::create(&path)?;
    made.describe(&described)?;
    Ok(made)
}

/// Looks in the durable tiers of `config` for the newest job whose directory was `dir` and which is `wanted`, and makes
/// that again, where `limits` allow it; whether there was one. Where there is none, a damaged description in a folder
/// that `may_be` that job's is an error.
pub fn find_job(
    dir: &Path,
    (config, limits): (&Config, &Limits),
    wanted: &dyn Fn(&Description) -> bool,
    may_be: &dyn Fn(&str) -> bool,
) -> Result<bool, Failure> {
    let dir = std::path::absolute(dir).map_err(|e| Failure::io(format!("find {}", dir.display()), &e))?;
    let keys = config.encryption.keys()?;
    let look = (To::Look, keys.as_ref());
    let work = |_: &Control| {
        let (mut found, mut failed): (Option<Description>, _) = (None, Vec::new());
        for t in config.durable() {
            let descriptions = match t.kind {
                Kind::Object => open_one(t, "", look).and_then(|tier| in_store(&*tier, may_be)),
                Kind::Memory | Kind::Local | Kind::Pfs => in_directory(t, look, may_be),
            };
            match descriptions {
                Ok((all, refused)) => {
                    failed.extend(refused);
                    let ours = all.into_iter().filter(|d| d.dir.as_path() == dir && wanted(d));
                    found = ours.chain(found).max_by_key(|d| d.created_unix_s);
                }
                Err(e) => {
                    tracing::warn!(tier = t.name, error = %e, "going on without this tier");
                    failed.push(e);
                }
            }
        }
        let Some(found) = found else {
            return joined(failed).map(|()| false);
        };
        if found.across_hosts {
            Nodes::check_place(&dir)?;
        }
        // The tiers may lie elsewhere by now.
        let config = config.clone().of_job(found.config.redundancy);
        limits.check_job(&dir, Use::Lost)?;
        limits.check_tiers(&config, Use::Lost)?;
        let (made, across_hosts) = (JobDir::create(&dir)?, found.across_hosts);
        made.describe(&Description { config, ..found })?;
        if across_hosts {
            Nodes::furnish(&made)?;
        }
        Ok(true)
    };
    child::run(work, &mut |_, _| {})
}

/// Descriptions of jobs on a tier, and why one of them cannot be read: other jobs may have other keys, so that counts
/// only where what is looked for is not found.
type Described = (Vec<Description>, Option<Failure>);

fn in_directory(
    t: &crate::config::Tier,
    look: (To, Option<&Arc<Keys>>),
    may_be: &dyn Fn(&str) -> bool,
) -> Result<Described, Failure> {
    let path = t.path.as_deref().unwrap_or(Path::new("/"));
    let fail = |e| Failure::io(format!("tier {}: read {}", t.name, path.display()), &e);
    let mut out = Described::default();
    for entry in std::fs::read_dir(path).map_err(fail)? {
        let folder = entry.map_err(fail)?.file_name();
        if !path.join(&folder).join(JOB).is_file() {
            continue;
        }
        // Other users' jobs lie beside ours.
        let Some(folder) = folder.to_str() else { continue };
        let Ok(tier) = open_one(t, folder, look) else { continue };
        add(&mut out, (&*tier, folder, may_be(folder)), describe(&*tier, JOB));
    }
    Ok(out)
}

fn in_store(tier: &dyn Tier, may_be: &dyn Fn(&str) -> bool) -> Result<Described, Failure> {
    let mut out = Described::default();
    for folder in tier.folders()? {
        let key = format!("{folder}/{JOB}");
        let described = match tier.length(&key) {
            Ok(None) => continue,
            Ok(Some(_)) => describe(tier, &key),
            Err(e) => Err(e),
        };
        // Where it does not answer at all, nobody is to wait for each of its objects.
        if described.as_ref().is_err_and(|e| !is_answer(e)) {
            tier.folders()?;
        }
        add(&mut out, (tier, &folder, may_be(&folder)), described);
    }
    Ok(out)
}

/// Whether the tier has answered: a key is not at hand, or it is another user's folder.
fn is_answer(e: &StorageError) -> bool {
    match e {
        StorageError::Locked { .. } => true,
        StorageError::Tier { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
        _ => false,
    }
}

/// One that cannot be read for want of a key may be anybody's; why another one cannot be read is told where it `may_be`
/// the one that is looked for.
fn add(
    out: &mut Described,
    (tier, folder, may_be): (&dyn Tier, &str, bool),
    found: Result<Result<Description, String>, StorageError>,
) {
    let what = |what: &str| format!("tier {}: {folder}/{JOB} {what}", tier.name());
    let (is_locked, refused) = match found {
        Ok(Ok(description)) => return out.0.push(description),
        Ok(Err(why)) => (false, Failure::new(Exit::Damaged, what(&format!("is damaged: {why}")))),
        Err(e @ StorageError::Locked { .. }) => (true, e.into()),
        Err(e) => (false, Failure::new(Exit::Io, what(&format!("cannot be read: {e}")))),
    };
    tracing::warn!(folder, why = %refused, "a description that cannot be read");
    if may_be || is_locked {
        out.1.get_or_insert(refused);
    }
}

/// A description, or what is damaged of it.
pub(super) fn describe(tier: &dyn Tier, key: &str) -> Result<Result<Description, String>, StorageError> {
    match read_whole(tier, key, MAX_JOB) {
        Ok(text) => Ok(Description::decode(key.as_ref(), &text)
            .map_err(|f| f.to_string())
            .and_then(|d| {
                if d.has_good_id() {
                    Ok(d)
                } else {
                    Err("its identifier is none".into())
                }
            })),
        Err(e @ StorageError::TierDamaged { .. }) => Ok(Err(e.to_string())),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_kernel::direct::Buffer;
    use belay_storage::tier::{failed, Object, Put};
    use std::io::ErrorKind;
    use std::ops::Range;

    /// A store in which this user may list another one's folder, and read nothing of it.
    #[derive(Debug)]
    struct Foreign;

    type Of<T> = Result<T, StorageError>;

    fn denied<T>(key: &str) -> Of<T> {
        Err(failed("t", "read", key, ErrorKind::PermissionDenied.into()))
    }

    impl Tier for Foreign {
        fn name(&self) -> &'static str {
            "t"
        }
        fn put<'a>(&'a self, key: &str) -> Of<Box<dyn Put + 'a>> {
            denied(key)
        }
        fn get(&self, key: &str, _: Range<u64>, _: &mut Buffer) -> Of<()> {
            denied(key)
        }
        fn length(&self, key: &str) -> Of<Option<u64>> {
            denied(key)
        }
        fn list(&self, _: &str) -> Of<Vec<Object>> {
            Ok(Vec::new())
        }
        fn folders(&self) -> Of<Vec<String>> {
            Ok(vec!["theirs".into()])
        }
        fn delete(&self, key: &str) -> Of<()> {
            denied(key)
        }
        fn sync(&self) -> Of<()> {
            Ok(())
        }
        fn free(&self) -> Of<Option<u64>> {
            Ok(None)
        }
        fn clear(&self) -> Of<u64> {
            Ok(0)
        }
    }

    #[test]
    fn folders_that_may_not_be_read_are_passed_over() {
        let (found, failure) = in_store(&Foreign, &|_| false).unwrap();
        assert!(found.is_empty() && failure.is_none());
        // What is looked for may be there.
        assert!(in_store(&Foreign, &|_| true).unwrap().1.is_some());
    }
}
