//! `belay verify`: all that a job has stored is read.

use super::{print, PAUSE};
use crate::progress::Show;
use crate::{cli, format};
use belay_coordinator::jobdir::{is_foreign, Access, JobDir};
use belay_coordinator::redundancy::verify as parity;
use belay_coordinator::tiers::To;
use belay_coordinator::verify::Known;
use belay_coordinator::{generations, tiers, verify, Failure};
use belay_wire::Exit;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a generation of which something is gone may stay in a job that runs, if that is removing it.
const REMOVAL: Duration = Duration::from_secs(2);

/// What was found of the generations in the job directory.
#[derive(Default)]
struct Here {
    /// So many have no fault.
    sound: usize,
    /// So many have one.
    damaged: usize,
    first_fault: Option<Failure>,
}

/// Reads the generations that are in the job directory; once more, where all of them are removed meanwhile.
fn read_here(dir: &JobDir, show: &mut Show) -> Result<Here, Failure> {
    let mut known = Known::default();
    loop {
        let (mut here, mut removed) = (Here::default(), false);
        let all = generations::list(&dir.generations())?;
        if show.is_bar() {
            let expected = verify::expected(dir.path(), all.iter().map(|g| &*g.path));
            let bytes = known.bytes.clone();
            show.watch("verify", move || (bytes.load(Ordering::Relaxed), expected));
        }
        let print = |text: &str| show.aside(|| print(text));
        for g in &all {
            let read = verify::generation(dir.path(), &g.path, &mut known);
            if !read.faults.is_empty() && is_removed(dir, &g.path) {
                print(&format!("generation {}: removed meanwhile\n", g.number))?;
                removed = true;
                continue;
            }
            for f in &read.faults {
                print(&format!("generation {}: {f}\n", g.number))?;
            }
            if !read.elsewhere.is_empty() {
                let what = read.elsewhere.join(", ").replace('\n', " ");
                print(&format!("generation {}: not read here: {what}\n", g.number))?;
            }
            if let Some(f) = read.faults.into_iter().next() {
                here.damaged += 1;
                here.first_fault.get_or_insert(f);
                continue;
            }
            here.sound += 1;
            print(&format!(
                "generation {}: {} ({} files, {} compared, {} extents, {} byte strings)\n",
                g.number,
                if read.elsewhere.is_empty() {
                    "whole"
                } else {
                    "no damage in what was read"
                },
                read.seen.files,
                format::bytes(read.seen.bytes),
                read.seen.extents,
                read.seen.blobs
            ))?;
        }
        if !removed || here.sound + here.damaged > 0 {
            return Ok(here);
        }
    }
}

/// Whether the generation in `path` is removed by the job, which runs. Its parts may remove theirs moments before.
fn is_removed(dir: &JobDir, path: &Path) -> bool {
    let end = Instant::now() + REMOVAL;
    while path.exists() {
        if Instant::now() > end || dir.holder().is_none() {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

pub(super) fn all(args: &cli::Target) -> Result<u8, Failure> {
    let dir = JobDir::open(&args.dir, Access::OwnOrRoot)?;
    let mut show = Show::on_terminals();
    let here = read_here(&dir, &mut show)?;
    show.state("verify parity");
    let mut parity_fault = None;
    for (number, read) in parity::all(&dir)? {
        match read {
            Ok(bytes) => show.aside(|| {
                print(&format!(
                    "generation {number}: parity of its group whole ({} compared)\n",
                    format::bytes(bytes)
                ))
            })?,
            Err(f) => {
                let code = show.aside(|| print(&format!("generation {number}: {f}\n")))?;
                parity_fault.get_or_insert(f);
                code
            }
        };
    }
    let (on_tiers, tier_fault) = read_tiers(&dir, &mut show)?;
    show.clear();
    let whole = here.sound + on_tiers;
    let of = whole + here.damaged + usize::from(parity_fault.is_some()) + usize::from(tier_fault.is_some());
    let first_fault = here.first_fault.or(parity_fault).or(tier_fault);
    let at = dir.shown();
    match (whole, first_fault) {
        (0, None) => Err(Failure::new(Exit::NoCheckpoint, format!("{at} holds no checkpoint"))),
        (_, None) => Ok(0),
        (0, Some(f)) => {
            let all = if of == 1 {
                "the only generation is"
            } else {
                "all generations are"
            };
            Err(Failure::new(f.exit, format!("{all} damaged: {f}")))
        }
        (n, Some(f)) => Err(Failure::new(
            Exit::Incomplete,
            format!("{} of {of} generations are damaged: {f}", of - n),
        )),
    }
}

/// Reads all that the durable tiers hold; how many whole generations they have, and the first fault. One that cannot be
/// read is one too.
fn read_tiers(dir: &JobDir, show: &mut Show) -> Result<(usize, Option<Failure>), Failure> {
    let (mut whole, mut shown) = (0, None);
    let description = dir.description()?;
    if is_foreign() {
        show.clear();
        let names: Vec<&str> = description.config.durable().map(|t| t.name.as_str()).collect();
        if !names.is_empty() {
            print(&format!(
                "tier {}: not read: only the job's owner opens its tiers\n",
                names.join(", ")
            ))?;
        }
        return Ok((0, None));
    }
    let read = tiers::joined(tiers::for_each(&description, To::Look, |durable| {
        show.state(&format!("verify tier {}", durable.config.name));
        let print = |text: &str| show.aside(|| print(text));
        let (bytes, faults) = durable.verify(&description)?;
        let name = &durable.config.name;
        for f in &faults {
            print(&format!("{f}\n"))?;
        }
        let shut: Vec<Failure> = durable.locked().chain(durable.unread()).collect();
        if faults.is_empty() && shut.is_empty() {
            let generations = &durable.catalogue.generations;
            whole += generations.len();
            let numbers: Vec<String> = generations.iter().map(|g| g.manifest.generation.to_string()).collect();
            print(&format!(
                "tier {name}: whole (generations {}; {} compared)\n",
                numbers.join(", "),
                format::bytes(bytes)
            ))?;
        }
        for f in &shut {
            print(&format!("{f}\n"))?;
        }
        let fault = faults.into_iter().next().map(|f| Failure::new(Exit::Damaged, f));
        // Those that are printed already.
        fault.or_else(|| shut.into_iter().next()).map_or(Ok(()), |f| {
            shown.get_or_insert(f.clone());
            Err(f)
        })
    }));
    show.clear();
    if let Some(f) = read
        .as_ref()
        .err()
        .filter(|f| f.exit != Exit::Damaged && shown.as_ref() != Some(f))
    {
        print(&format!("{f}\n"))?;
    }
    Ok((whole, read.err()))
}
