//! The local tiers of a job: places in which chunks lie until they have been moved to the job directory (`belay_storage::place`).

use crate::config::{Config, Kind, Tier};
use crate::jobdir::{Description, JobDir};
use crate::nodes::seat::{self, part_dir, Seat};
use crate::redundancy::Redundancy;
use crate::{generations, sys, Failure};
use belay_image::manifest::Manifest;
use belay_image::ImageError;
use belay_kernel::trust;
use belay_storage::engine::Engine;
use belay_storage::place::calibrate::{self, Plan};
use belay_storage::place::claims::{self, Claims};
use belay_storage::place::desk::{Place, Spec};
use belay_storage::place::marker::{self, MARKER};
use belay_storage::place::model::Model;
use belay_storage::store::{self, LocalTier, Store};
use belay_wire::{Exit, OnTier};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tiers are measured with as many writers as there are processors, within these.
const MIN_WRITERS: usize = 9;
const MAX_WRITERS: usize = 256;

/// Gives a part's description `d` the local tiers of the job that `root` describes. Durable tiers are the root's alone,
/// unless the part's checkpoints lie on its own host's disk: then it copies them itself.
pub fn adopt(d: &mut Description, root: &Description) {
    d.dir.clone_from(&root.dir);
    d.folder = Some(root.folder());
    d.config = Config {
        tiers: match root.config.redundancy.scheme {
            None => root.config.local().cloned().collect(),
            Some(_) => root.config.tiers.clone(),
        },
        redundancy: Redundancy::default(),
        ..root.config.clone()
    };
}

/// A job begins anew in `dir`, or all that it had has been removed: what lies in local tiers that are not there now is
/// given up, because nothing of the job needs it any more. The tiers that were forgotten.
pub fn begin_anew(dir: &JobDir) -> Result<Vec<LocalTier>, Failure> {
    let mut gone = store::forget_absent(dir.path())?;
    for tag in seat::tags(dir.path())? {
        gone.extend(store::forget_absent(&part_dir(dir.path(), tag))?);
    }
    Ok(gone)
}

/// Has the chunks of a job, or of a part of it, written to its local tiers first. Those that are out of reach are left
/// out; one that the configuration does not name any more is emptied.
pub(crate) fn engage(
    dir: &JobDir,
    d: &Description,
    seat: Option<&Seat>,
    engine: impl FnOnce(Store) -> Result<Engine, Failure>,
) -> Result<Engine, Failure> {
    let named: Vec<&Tier> = d.config.local().filter(|t| is_usable(t)).collect();
    let mut list: Vec<LocalTier> = named.iter().filter_map(|t| place(t, d, seat)).collect();
    let known = match store::listed(dir.path()) {
        Err(e @ ImageError::Damaged { .. }) => {
            sys::say(&format!("{e}: a new list is made of the local tiers that are configured now"));
            // What lies there is not taken for anybody else's.
            list.clone()
        }
        listed => listed?,
    };
    if seat.is_none() {
        list.retain(|t| match marker::other(t, dir.path()) {
            Some(other) => {
                sys::say(&format!(
                    "local tier {} is left out: the job in {}, of which this is a copy, has it",
                    t.name,
                    other.display()
                ));
                false
            }
            None => true,
        });
    }
    if let Some(seat) = seat {
        for t in &list {
            prepare(t, &known, whole_job(dir.path(), seat.tag), seat)?;
        }
    }
    // What a host is called may have changed.
    let is_same = |a: &LocalTier, b: &LocalTier| a == b || (a.dir == b.dir && a.is_here() && b.is_here());
    let of_before = known.into_iter().filter(|k| !list.iter().any(|l| is_same(k, l)));
    // What is not there now may be back later, with chunks.
    let of_before: Vec<_> = of_before
        .filter(|k| !k.is_here() || !k.dir.exists() || store::chunks_in(&k.dir) > 0)
        .collect();
    let used = list.clone();
    list.extend(of_before);
    store::set_local_tiers(dir.path(), &list, &used)?;
    for t in used.iter().filter(|_| seat.is_none()) {
        if let Err(e) = marker::write(&t.dir, dir.path()) {
            tracing::warn!(path = %t.dir.display(), error = %e, "nothing says whose it is");
        }
    }
    let (store, _) = Store::of_job(dir.path()).own_tiers();
    if store.tiers().is_empty() {
        return engine(store);
    }
    let spec = |l: &LocalTier| -> Result<Spec, Failure> {
        let tier = used.contains(l).then(|| named.iter().find(|t| t.name == l.name)).flatten();
        let measured = tier.and_then(|t| calibrate::load(t.path.as_deref()?, sys::euid()));
        let claims = |seat: &Seat| {
            let opened = Claims::open(of_job(l), seat.tag);
            opened.map_err(|e| Failure::io(format!("claim room in {}", l.dir.display()), &e))
        };
        Ok(Spec {
            capacity: tier.map_or(0, |t| t.capacity.map_or(u64::MAX, |c| c.0)),
            memory: l.memory,
            model: measured.unwrap_or_else(|| Model::unmeasured(l.memory)),
            shared: seat.map(claims).transpose()?.map(Arc::new),
        })
    };
    let specs = store.tiers().iter().map(spec).collect::<Result<_, _>>()?;
    let mut engine = engine(store)?;
    let rate = d.config.flush.rate.map(|r| r.0);
    engine.use_tiers(specs, d.config.placement.policy, rate)?;
    Ok(engine)
}

/// The directory of the job's chunks in tier `t`; each part has one of its own.
fn place(t: &Tier, d: &Description, seat: Option<&Seat>) -> Option<LocalTier> {
    let job = t.path.as_ref()?.join(d.folder());
    Some(LocalTier {
        name: t.name.clone(),
        memory: t.kind == Kind::Memory,
        dir: seat.map_or(job.clone(), |s| job.join(s.tag.to_string())),
        host: seat.map(|s| s.host.clone()),
    })
}

/// The directory, in a tier, of the whole job of which `t` is that of a part.
fn of_job(t: &LocalTier) -> &Path {
    t.dir.parent().unwrap_or(&t.dir)
}

/// The directory of the whole job, of which `dir` is that of part `tag`.
fn whole_job(dir: &Path, tag: u64) -> &Path {
    let parts = dir.parent().filter(|_| tag > 0);
    parts.and_then(Path::parent).unwrap_or(dir)
}

/// Whose a directory of a job in a tier is.
#[derive(Debug, PartialEq, Eq)]
enum Owner {
    /// That of the job in this directory.
    This,
    /// That of another one, which is still there.
    Another(PathBuf),
    /// Nobody could say.
    Unknown,
}

/// Whose `path` in a tier is, for the job in directory `job`.
fn owner(path: &Path, job: &Path) -> io::Result<Owner> {
    let marked = marker::read(path)?;
    Ok(if marked == job {
        Owner::This
    } else if std::fs::symlink_metadata(&marked).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        // There is no marker, or the job directory has been moved.
        Owner::Unknown
    } else {
        Owner::Another(marked)
    })
}

/// An error at `path` in a tier, for the part at `seat`.
fn failure(path: &Path, seat: &Seat) -> impl FnOnce(io::Error) -> Failure {
    let what = format!("use {} on {}", path.display(), seat.host.name);
    move |e| Failure::io(what, &e)
}

/// Makes the directory, in tier `t`, of the job in directory `dir`. What the part has left in its own there before it
/// went to another host is removed: its chunks have got the same numbers elsewhere since. Its own is made when it is
/// noted ([`store::set_local_tiers`]), so that nobody who sees it takes it for one that was left.
fn prepare(t: &LocalTier, known: &[LocalTier], dir: &Path, seat: &Seat) -> Result<(), Failure> {
    let job = of_job(t);
    claims::make_own(job).map_err(failure(job, seat))?;
    let whose = owner(job, dir).map_err(failure(job, seat))?;
    if whose == Owner::Unknown {
        marker::write(job, dir).map_err(failure(job, seat))?;
    }
    if !known.iter().any(|k| k.is_here() && k.dir == t.dir) && t.dir.exists() {
        let in_use = match &whose {
            Owner::Another(other) => Some(format!("the job in {} has it", other.display())),
            _ if claims::is_held(job, seat.tag) => Some("a process of an earlier run has it; wait until it has ended".into()),
            _ => None,
        };
        if let Some(why) = in_use {
            return Err(failure(&t.dir, seat)(io::Error::other(why)));
        }
        remove(&t.dir).map_err(failure(&t.dir, seat))?;
    }
    match claims::is_own(&t.dir) {
        Ok(false) => Err(failure(&t.dir, seat)(claims::not_own("a directory"))),
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failure(&t.dir, seat)(e)),
        _ => Ok(()),
    }
}

/// Removes from the local tiers of this host what parts that are not here any more, and earlier jobs in the same job
/// directory, have left; but nothing of whoever may still be there. `dir` is the job directory of the part at `seat`.
/// Only when the job runs: after a restart its other parts on this host have noted by then that they are.
pub(crate) fn clear(dir: &JobDir, seat: &Seat) {
    let tiers = store::listed(dir.path()).unwrap_or_default();
    for t in tiers.iter().filter(|t| t.host.is_some() && t.is_here()) {
        if let Err(failure) = clear_tier(t, whole_job(dir.path(), seat.tag), seat) {
            tracing::warn!(error = %failure, "what was left there stays");
        }
    }
}

fn clear_tier(t: &LocalTier, dir: &Path, seat: &Seat) -> Result<(), Failure> {
    let job = of_job(t);
    let whose = owner(job, dir).map_err(failure(job, seat))?;
    let others = tags_in(job)
        .into_iter()
        .filter(|tag| whose == Owner::This && *tag != seat.tag);
    for tag in others {
        let part = job.join(tag.to_string());
        // Another part that begins here has noted that before it makes its directory. Where that cannot be read it may be here.
        let gone = store::listed(&part_dir(dir, tag)).is_ok_and(|its| !its.iter().any(|k| k.is_here() && k.dir == part));
        if gone && !claims::is_held(job, tag) {
            remove(&part).map_err(failure(&part, seat))?;
            drop(std::fs::remove_file(claims::file(job, tag)));
        }
    }
    let beside = job.parent().map(std::fs::read_dir).into_iter().flatten().flatten().flatten();
    for other in beside.map(|e| e.path()).filter(|p| p != job) {
        let own = claims::is_own(&other).unwrap_or(false);
        let of_same = own && owner(&other, dir).is_ok_and(|o| o == Owner::This);
        if of_same && !tags_in(&other).iter().any(|tag| claims::is_held(&other, *tag)) {
            remove(&other).map_err(failure(&other, seat))?;
        }
    }
    Ok(())
}

/// The parts that have a directory or a claim in `job`, a job's directory in a tier.
fn tags_in(job: &Path) -> BTreeSet<u64> {
    let names = std::fs::read_dir(job).into_iter().flatten().flatten().map(|e| e.file_name());
    let tag = |name: OsString| name.to_str()?.trim_start_matches(claims::PREFIX).parse().ok();
    names.filter_map(tag).collect()
}

/// Removes a directory, if there is one.
fn remove(path: &Path) -> io::Result<()> {
    std::fs::remove_dir_all(path).or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
}

fn is_usable(t: &Tier) -> bool {
    let usable = t.path.as_deref().is_some_and(|p| p.is_dir() && sys::may_write(p));
    if !usable {
        tracing::warn!(tier = t.name, path = ?t.path, "local tier is left out: no directory that may be written");
    }
    let trusted = t.path.as_deref().map_or(Ok(()), |p| trust::holder(p).map(drop));
    if let (true, Err(why)) = (usable, &trusted) {
        sys::say(&format!("local tier {} is left out: {why}", t.name));
    }
    usable && trusted.is_ok()
}

/// The chunks that lie at home, by part: each directory is read once for all generations of a list.
pub(crate) type Homes = BTreeMap<u64, BTreeSet<u32>>;

/// What of the chunks of generation `g` lies in local tiers, of the job's own part and of those on other hosts; and
/// what some of the parts lack. Only names are looked at, and nothing of what lies on other hosts' own disks. `homes`:
/// what has been seen at home of each part.
pub(crate) fn holdings(job: &Path, g: &generations::Generation, homes: &mut Homes) -> (Vec<OnTier>, Option<String>) {
    let parts = super::parts::of_generation(job, &g.path).unwrap_or_default();
    let parts = parts.into_iter().filter(|(_, own)| !super::parts::lies_elsewhere(own));
    let (mut on, mut lacking) = (BTreeMap::new(), None);
    for (tag, path) in [(0, g.path.clone())].into_iter().chain(parts) {
        let mut lacks = |what: String| {
            lacking.get_or_insert_with(|| format!("part {tag} lacks {what}"));
        };
        let store = Store::of_generation(&path);
        // What is at home of the job's own part has been looked at.
        if tag == 0 && store.tiers().is_empty() && store.elsewhere().is_empty() {
            continue;
        }
        let m = match Manifest::read(&path) {
            Ok(m) => m,
            Err(_) if tag == 0 => continue,
            Err(_) if !path.exists() => {
                lacks("it".into());
                continue;
            }
            Err(e) => {
                lacks(format!("its manifest: {e}"));
                continue;
            }
        };
        let home = match homes.entry(tag) {
            Entry::Occupied(seen) => seen.into_mut(),
            Entry::Vacant(place) => match store.at_home() {
                Ok(seen) => place.insert(seen),
                Err(_) => continue,
            },
        };
        for c in m.chunks.iter().filter(|c| !home.contains(&c.id)) {
            let tier = match store.place_of(c.id) {
                Place::Tier(tier) => &store.tiers()[tier],
                // Only its host could say in which.
                Place::Home => match store.elsewhere().first() {
                    Some(tier) => tier,
                    // Moved since.
                    None if store.check_present(c).is_ok() => continue,
                    None => {
                        lacks(format!("chunk {}", c.id));
                        continue;
                    }
                },
            };
            let key = (tier.name.clone(), tier.memory, tier.host.as_ref().map(|h| h.name.clone()));
            *on.entry(key).or_insert(0) += belay_storage::chunk::file_bytes(c.pages);
        }
    }
    let on = on.into_iter().map(|((tier, memory, host), bytes)| OnTier {
        tier,
        kind: if memory { Kind::Memory } else { Kind::Local }.name().into(),
        bytes,
        whole: false,
        host,
        keys: Vec::new(),
        locked: None,
    });
    // What is being removed lacks something of no consequence.
    (on.collect(), lacking.filter(|_| g.path.exists()))
}

/// The job ends: removes its directories in the local tiers of this host, where nothing of it is left in them.
pub(crate) fn remove_empty(dir: &JobDir, part: Option<u64>) {
    let is_own = |t: &&LocalTier| t.is_here() && marker::other(t, dir.path()).is_none();
    for t in store::listed(dir.path()).unwrap_or_default().iter().filter(is_own) {
        if part.is_none() && is_empty(&t.dir) {
            drop(std::fs::remove_file(t.dir.join(MARKER)));
        }
        if let Err(e) = std::fs::remove_dir(&t.dir) {
            tracing::debug!(path = %t.dir.display(), error = %e, "directory stays");
            continue;
        }
        if let Some(tag) = part {
            leave(of_job(t), tag);
        }
    }
}

/// Part `tag` has nothing any more in the directory `job` of a tier: who leaves last removes it.
fn leave(job: &Path, tag: u64) {
    drop(std::fs::remove_file(claims::file(job, tag)));
    if is_empty(job) {
        drop(std::fs::remove_file(job.join(MARKER)));
        drop(std::fs::remove_dir(job));
    }
}

/// Whether nothing but the marker is in `dir`.
fn is_empty(dir: &Path) -> bool {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    names.map(|e| e.file_name()).all(|name| name == MARKER)
}

/// Measures local tier `t` and keeps that there; `progress` gets each sample: its number and how many there will be,
/// writers, and bytes per second that each got.
pub fn measure(t: &Tier, progress: impl FnMut((u32, u32), u32, f64)) -> Result<(), Failure> {
    let path = t.path.as_deref().unwrap_or(Path::new("/"));
    trust::holder(path).map_err(|e| Failure::new(Exit::NoTier, format!("tier {}: {}: {e}", t.name, path.display())))?;
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let mut plan = Plan::up_to(processors.clamp(MIN_WRITERS, MAX_WRITERS) as u32);
    let most = u64::from(1 + plan.step * (plan.samples - 1)) * plan.bytes;
    if let Some(capacity) = t.capacity {
        // Not more than the tier may hold at any time.
        plan.bytes = (plan.bytes as u128 * u128::from(capacity.0.min(most)) / u128::from(most)) as u64;
        plan.bytes = plan.bytes.max(1 << 20);
    }
    let model =
        calibrate::measure(path, plan, progress).map_err(|e| Failure::new(Exit::NoTier, format!("tier {}: {e}", t.name)))?;
    calibrate::store(path, &model)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    struct Scratch(PathBuf);

    impl Drop for Scratch {
        fn drop(&mut self) {
            drop(remove(&self.0));
        }
    }

    /// A job directory with these parts, and a tier in which they all have a directory.
    fn scratch(name: &str, parts: &[u64]) -> (Scratch, PathBuf, impl Fn(u64) -> LocalTier) {
        let base = std::env::temp_dir().join(format!("belay-prepare-{name}-{}", std::process::id()));
        let (job, tier) = (base.join("job"), base.join("tier"));
        std::fs::create_dir_all(&tier).unwrap();
        let in_tier = tier.join("name-id");
        let at = move |tag: u64| LocalTier {
            name: "ram".into(),
            memory: true,
            dir: in_tier.join(tag.to_string()),
            host: Some(seat(tag).host),
        };
        for tag in parts {
            std::fs::create_dir_all(part_dir(&job, *tag)).unwrap();
            let (t, dir) = (at(*tag), part_dir(&job, *tag));
            std::fs::create_dir_all(tier.join("name-id")).unwrap();
            store::set_local_tiers(&dir, std::slice::from_ref(&t), std::slice::from_ref(&t)).unwrap();
            std::fs::write(t.dir.join("chunk"), "1").unwrap();
        }
        (Scratch(base), job, at)
    }

    fn seat(tag: u64) -> Seat {
        let host = store::Host {
            name: sys::host(),
            called: None,
        };
        Seat { tag, host }
    }

    /// The root begins here again, and runs.
    fn begin(t: &LocalTier, dir: &Path) -> Result<(), Failure> {
        prepare(t, std::slice::from_ref(t), dir, &seat(0))?;
        clear_tier(t, dir, &seat(0))
    }

    #[test]
    fn only_what_surely_belongs_to_nobody_any_more_is_removed() {
        let (_s, job, at) = scratch("gone", &[0, 1, 2, 3]);
        let root = at(0);
        begin(&root, &job).unwrap();
        begin(&root, &job).unwrap();
        assert!([0, 1, 2, 3].iter().all(|tag| at(*tag).dir.exists()), "all are here");
        // What cannot be read, what is in use, and what is neither.
        std::fs::write(part_dir(&job, 1).join(store::PLACES), "{").unwrap();
        for tag in [2, 3] {
            std::fs::remove_file(part_dir(&job, tag).join(store::PLACES)).unwrap();
        }
        let held = Claims::open(of_job(&root), 2).unwrap();
        begin(&root, &job).unwrap();
        assert_eq!([1, 2, 3].map(|tag| at(tag).dir.exists()), [true, true, false]);
        drop(held);
        begin(&root, &job).unwrap();
        assert_eq!([1, 2].map(|tag| at(tag).dir.exists()), [true, false]);
    }

    #[test]
    fn parts_that_begin_here_together_leave_each_other_alone() {
        let (_s, job, at) = scratch("together", &[0, 1, 2]);
        for round in 0..100 {
            let meet = std::sync::Barrier::new(3);
            std::thread::scope(|scope| {
                for tag in 0..3 {
                    let (t, dir, meet, job) = (at(tag), part_dir(&job, tag), &meet, &job);
                    scope.spawn(move || {
                        // They were elsewhere, and have left something here before.
                        std::fs::create_dir_all(&t.dir).unwrap();
                        std::fs::write(t.dir.join("chunk"), "1").unwrap();
                        store::set_local_tiers(&dir, &[], &[]).unwrap();
                        meet.wait();
                        prepare(&t, &[], job, &seat(tag)).unwrap();
                        store::set_local_tiers(&dir, std::slice::from_ref(&t), std::slice::from_ref(&t)).unwrap();
                        assert!(t.dir.exists() && !t.dir.join("chunk").exists(), "round {round}");
                    });
                }
            });
        }
    }

    #[test]
    fn a_job_directory_that_was_moved_keeps_what_its_parts_have() {
        let (s, job, at) = scratch("moved", &[0, 1]);
        begin(&at(0), &job).unwrap();
        let new = s.0.join("new");
        std::fs::rename(&job, &new).unwrap();
        for _ in 0..2 {
            begin(&at(0), &new).unwrap();
            assert!(at(1).dir.join("chunk").exists());
        }
        // A copy is another job.
        std::fs::create_dir(&job).unwrap();
        begin(&at(0), &job).unwrap();
        assert!(at(1).dir.join("chunk").exists());
        assert!(prepare(&at(0), &[], &job, &seat(0)).is_err() && at(0).dir.join("chunk").exists());
    }

    #[test]
    fn what_others_have_put_into_a_tier_is_left_alone() {
        let (s, job, at) = scratch("strangers", &[0]);
        let tier = s.0.join("tier");
        for name in ["fifo", "link"] {
            std::fs::create_dir(tier.join(name)).unwrap();
        }
        rustix::fs::mkfifoat(rustix::fs::CWD, tier.join("fifo").join(MARKER), 0o600.into()).unwrap();
        std::os::unix::fs::symlink("/dev/zero", tier.join("link").join(MARKER)).unwrap();
        // An earlier job's.
        std::fs::create_dir(tier.join("old")).unwrap();
        std::fs::write(tier.join("old").join(MARKER), job.display().to_string()).unwrap();
        begin(&at(0), &job).unwrap();
        assert!(!tier.join("old").exists());
        assert!(tier.join("fifo").exists() && tier.join("link").exists());
        let target = s.0.join("target");
        std::fs::rename(tier.join("name-id"), &target).unwrap();
        std::os::unix::fs::symlink(&target, tier.join("name-id")).unwrap();
        let why = begin(&at(0), &job).unwrap_err().to_string();
        assert!(why.contains("name-id") && target.join("0/chunk").exists(), "{why}");
    }
}
