//! `belay verify`: all that a job has stored is read.

use super::{print, PAUSE};
use crate::progress::Show;
use crate::{cli, format};
use belay_coordinator::jobdir::{is_foreign, Access, JobDir};
use belay_coordinator::redundancy::verify as parity;
use belay_coordinator::tiers::{Durable, To};
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
    faults: Vec<Failure>,
}

/// Whether something could not be read, rather than is not what it was.
fn is_unread(f: &Failure) -> bool {
    !matches!(f.exit, Exit::Damaged | Exit::ImageVersion | Exit::ImageArchitecture)
}

/// Reads the generations that are in the job directory; once more, where all of them are removed meanwhile.
fn read_here(dir: &JobDir, show: &mut Show) -> Result<Here, Failure> {
    let mut known = Known::default();
    // Marks are written by path.
    let may_mark = dir.is_own();
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
            if let Some(f) = read.faults.iter().find(|f| may_mark && f.exit == Exit::Damaged) {
                g.is_damaged(&f.to_string());
            }
            if let Some(f) = read.faults.into_iter().next() {
                here.damaged += 1;
                here.faults.push(f);
                continue;
            }
            here.sound += 1;
            if g.damage.is_some() && read.elsewhere.is_empty() && may_mark {
                generations::unmark_all(&g.path);
            }
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
    let mut here = read_here(&dir, &mut show)?;
    show.state("verify parity");
    for (number, read) in parity::all(&dir)? {
        match read {
            Ok(bytes) => show.aside(|| {
                print(&format!(
                    "generation {number}: parity of its group whole ({} compared)\n",
                    format::bytes(bytes)
                ))
            })?,
            Err(f) => {
                here.damaged += 1;
                let code = show.aside(|| print(&format!("generation {number}: {f}\n")))?;
                here.faults.push(f);
                code
            }
        };
    }
    let there = read_tiers(&dir, &mut show)?;
    show.clear();
    let whole = here.sound + there.sound;
    let of = whole + here.damaged + there.not_whole;
    let (unread, damage): (Vec<Failure>, Vec<Failure>) = here.faults.into_iter().chain(there.faults).partition(is_unread);
    verdict(&dir, (whole, of), damage.into_iter().next(), unread.into_iter().next())
}

/// How verify ends that has found `whole` of `of` generations whole, and perhaps damage, or what could not be read.
fn verdict(dir: &JobDir, (whole, of): (usize, usize), damage: Option<Failure>, unread: Option<Failure>) -> Result<u8, Failure> {
    let at = dir.shown();
    match (whole, damage, unread) {
        (0, None, None) if parity::is_elsewhere(dir) => Err(Failure::new(
            Exit::Incomplete,
            format!("{at}: nothing could be read here: its checkpoints lie on the disks of its hosts; run belay verify there"),
        )),
        (0, None, None) => Err(Failure::new(Exit::NoCheckpoint, format!("{at} holds no checkpoint"))),
        (_, None, None) => Ok(0),
        (_, None, Some(f)) => Err(Failure::new(f.exit, format!("not everything could be read: {f}"))),
        (0, Some(f), _) => {
            let all = if of == 1 {
                "the only generation is"
            } else {
                "all generations are"
            };
            Err(Failure::new(f.exit, format!("{all} damaged: {f}")))
        }
        (n, Some(f), _) => Err(Failure::new(
            Exit::Incomplete,
            format!("{} of {of} generations are damaged: {f}", of - n),
        )),
    }
}

/// What was found on the durable tiers.
#[derive(Default)]
struct There {
    /// So many generations are whole there.
    sound: usize,
    /// So many tiers are not what they should be.
    not_whole: usize,
    faults: Vec<Failure>,
}

/// Reads all that the durable tiers hold.
fn read_tiers(dir: &JobDir, show: &mut Show) -> Result<There, Failure> {
    let mut there = There::default();
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
        return Ok(there);
    }
    let unopened = tiers::for_each(&description, To::Look, |durable| {
        show.state(&format!("verify tier {}", durable.config.name));
        let (bytes, damage) = durable.verify(&description)?;
        let gone = gone(dir, durable).into_iter();
        let damage = damage.into_iter().chain(gone).map(|f| Failure::new(Exit::Damaged, f));
        let faults: Vec<Failure> = damage.chain(durable.locked()).chain(durable.unread()).collect();
        show.aside(|| tell(durable, bytes, &faults))?;
        there.add(durable, faults);
        Ok(())
    });
    show.clear();
    for f in unopened {
        print(&format!("{f}\n"))?;
        there.not_whole += 1;
        there.faults.push(f);
    }
    Ok(there)
}

impl There {
    fn add(&mut self, durable: &Durable, faults: Vec<Failure>) {
        self.sound += durable.readable().len();
        self.not_whole += usize::from(!faults.is_empty());
        self.faults.extend(faults);
    }
}

/// What there is to say of a tier of which `bytes` were read.
fn tell(durable: &Durable, bytes: u64, faults: &[Failure]) -> Result<(), Failure> {
    for f in faults {
        print(&format!("{f}\n"))?;
    }
    if faults.is_empty() {
        let numbers: Vec<String> = durable.readable().iter().map(u64::to_string).collect();
        print(&format!(
            "tier {}: whole (generations {}; {} compared)\n",
            durable.config.name,
            numbers.join(", "),
            format::bytes(bytes)
        ))?;
    }
    Ok(())
}

/// Generations that the job has noted as durable on this tier, and that are not there. One that runs may have removed
/// them, and notes that moments later.
fn gone(dir: &JobDir, durable: &Durable) -> Vec<String> {
    let end = Instant::now() + REMOVAL;
    loop {
        let gone = durable.gone(dir);
        if gone.is_empty() || dir.holder().is_none() || Instant::now() > end {
            return gone;
        }
        std::thread::sleep(PAUSE);
    }
}
