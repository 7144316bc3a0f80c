//! Each host copies its own part of a generation to the durable tiers, where the parts' checkpoints lie on the hosts' own disks.
//!
//! ```text
//! part ── hello ──> root ── weigh, copy ──> part ── how many bytes, how it went ──> root
//! ```
//! The agent of the root makes room, has all parts copy at once beside its own, and writes its record when they are
//! done. What the parts do ends with the connection.

use super::members::{Answer, Ask, Hello, Members, Question, Refused};
use super::{local, parts, Durable, To};
use crate::generations::{self, Generation};
use crate::jobdir::{Access, Description, JobDir};
use crate::nodes::addresses;
use crate::nodes::helper::{self, Helper};
use crate::nodes::meeting::{self, receive, send, Meeting};
use crate::nodes::seat::part_dir;
use crate::nodes::table::Row;
use crate::{shell, Failure};
use belay_image::files;
use belay_image::manifest::{MANIFEST_FILE, MAX_BYTES};
use belay_storage::flush::{self, Control};
use belay_tree::{Direct, Door, JobKey};
use belay_wire::Exit;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// The job's key in its directory.
const KEY: &str = "key";
/// How often is looked whether a remote shell has ended before its part was there.
const LOOK: Duration = Duration::from_millis(50);

/// What a part needs to answer.
pub(crate) struct Share {
    pub(crate) key: JobKey,
    /// Where the root is.
    pub(crate) root: Vec<String>,
    pub(crate) generation: u64,
    pub(crate) tag: u64,
    pub(crate) dir: JobDir,
    pub(crate) description: Description,
    /// Set where what lies here is not what was written.
    pub(crate) rotten: Arc<AtomicBool>,
}

impl Share {
    /// Does what the root asks, until it has no more questions.
    pub(crate) fn run(self) -> Result<(), Failure> {
        flush::step_back();
        let mut root = Direct::connect(&self.key, &self.root).map_err(meeting::failed)?;
        let hello = Hello {
            tag: self.tag,
            generation: self.generation,
            manifest: belay_image::checksum(&files::read(&self.path().join(MANIFEST_FILE), MAX_BYTES)?),
        };
        send(&mut root, &hello)?;
        while let Ok(Question { number, ask }) = receive(&mut root, None) {
            let control = Control::default();
            let refused = |f: Failure| Refused {
                exit: f.exit,
                message: f.message,
                is_full: control.is_full(),
            };
            let said = root.busy(|| self.answer(&ask, &control)).map_err(refused);
            send(&mut root, &Answer { number, said })?;
        }
        Ok(())
    }

    fn path(&self) -> PathBuf {
        self.dir.generations().join(generations::name(self.generation))
    }

    fn answer(&self, ask: &Ask, control: &Control) -> Result<u64, Failure> {
        let (Ask::Weigh { tier: name } | Ask::Copy { tier: name }) = ask;
        let d = &self.description;
        let named = d.config.durable().find(|t| t.name == *name);
        let named = named.ok_or_else(|| Failure::new(Exit::NoTier, format!("no tier {name} is known here")))?;
        let mut durable = Durable::open(named, &parts::described(d, self.tag), To::Use)?;
        match ask {
            Ask::Weigh { .. } => {
                durable.read()?;
                Ok(flush::lacking(&self.path(), &durable.catalogue)?)
            }
            Ask::Copy { .. } => {
                // The root has made room, and removes what is old.
                let options = flush::Options {
                    keep: u32::MAX,
                    capacity: None,
                    ..durable.options(d)
                };
                let (described, none) = (self.dir.description()?, &mut &[][..]);
                let own = self.path();
                let flushed = durable.copy(&described, (&own, &options), none, control);
                if let (Err(e), true) = (&flushed, control.is_rotten()) {
                    self.rotten.store(true, Ordering::Relaxed);
                    Generation::here(&own).is_damaged(&e.to_string());
                }
                let flushed = flushed?;
                tracing::info!(generation = self.generation, tier = name, ?flushed, "part flushed");
                Ok(flushed.bytes)
            }
        }
    }
}

/// `belay store flush`, on a host of a job that does not run: does what is asked for at one of `root` with its
/// generation `number` of part `tag`.
pub fn run(job: &JobDir, (tag, number): (u64, u64), root: &[String]) -> Result<(), Failure> {
    let dir = JobDir::open(&part_dir(job.path(), tag), Access::Own)?;
    let mut description = dir.description()?;
    local::adopt(&mut description, &job.description()?);
    let share = Share {
        key: JobKey::read(&job.path().join(KEY))?,
        root: root.to_vec(),
        generation: number,
        tag,
        dir,
        description,
        rotten: Arc::default(),
    };
    share.run()
}

/// Does `work` with the parts of generation `number` of a job that does not run, each on the host where it was.
pub(super) fn at_rest<T>(
    dir: &JobDir,
    d: &Description,
    (number, rows): (u64, &[Row]),
    work: impl FnOnce(&mut Members) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let at = addresses::addresses(d.config.tree.listen())?;
    let meeting = Meeting {
        door: Door::open(JobKey::read(&dir.path().join(KEY))?, &at)?,
        generation: number,
        hosts: rows.iter().map(|r| (r.tag, r.host().to_owned())).collect(),
        cancel: Arc::default(),
    };
    let (job, root) = (shell::text(dir.path())?, meeting.door.addresses().join(","));
    let start = |row: &Row| {
        let (tag, number) = (row.tag.to_string(), number.to_string());
        let part = ["--dir", job, "--tag", &tag, "--generation", &number, "--sources", &root];
        Helper::start(
            rows,
            row.host(),
            &[&["store", "flush"], &part[..]].concat(),
            helper::nothing()?,
        )
    };
    let mut helpers = rows.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    let cancel = meeting.cancel.clone();
    let gathered = AtomicBool::new(false);
    let done = std::thread::scope(|scope| {
        // A host that cannot be reached is not waited for. They stay until the last question.
        scope.spawn(|| {
            let is_gone = |h: &mut Helper| h.child.try_wait().is_ok_and(|ended| ended.is_some());
            while !gathered.load(Ordering::Relaxed) && !helpers.iter_mut().any(is_gone) {
                std::thread::sleep(LOOK);
            }
            cancel.store(true, Ordering::Relaxed);
        });
        let members = Members::gather(meeting, dir.path());
        gathered.store(true, Ordering::Relaxed);
        work(&mut members?)
    });
    helpers.into_iter().for_each(Helper::end);
    done
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A part with whose copy the tier is full.
    pub(in super::super) fn without_room(share: &Share) {
        let mut root = Direct::connect(&share.key, &share.root).unwrap();
        let manifest = belay_image::checksum(&std::fs::read(share.path().join(MANIFEST_FILE)).unwrap());
        let hello = Hello {
            tag: share.tag,
            generation: share.generation,
            manifest,
        };
        send(&mut root, &hello).unwrap();
        while let Ok(Question { number, .. }) = receive(&mut root, None) {
            let said = Err(Refused {
                exit: Exit::DiskFull,
                message: "no room".into(),
                is_full: true,
            });
            send(&mut root, &Answer { number, said }).unwrap();
        }
    }
}
