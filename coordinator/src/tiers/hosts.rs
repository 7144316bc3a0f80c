//! Each host copies its own part of a generation to the durable tiers, where the parts' checkpoints lie on the hosts' own disks.
//!
//! ```text
//! part ── hello ──> root ── weigh, copy ──> part ── how many bytes, how it went ──> root
//! ```
//! The agent of the root makes room, has all parts copy at once beside its own, and writes its record when they are
//! done. What the parts do ends with the connection.

use super::{local, parts, Durable, To};
use crate::generations::{self, Generation};
use crate::jobdir::{Access, Description, JobDir};
use crate::nodes::addresses;
use crate::nodes::helper::{self, Helper};
use crate::nodes::meeting::{self, receive, send, Meeting};
use crate::nodes::seat::part_dir;
use crate::nodes::table::Row;
use crate::redundancy::record;
use crate::{shell, Failure};
use belay_image::files;
use belay_image::manifest::{MANIFEST_FILE, MAX_BYTES};
use belay_storage::catalogue::Part;
use belay_storage::flush::{self, Control, Parts};
use belay_storage::{tier, StorageError};
use belay_tree::{Direct, Door, JobKey};
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// The job's key in its directory.
const KEY: &str = "key";
/// How often is looked whether a remote shell has ended before its part was there.
const LOOK: Duration = Duration::from_millis(50);

/// A part is there.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    tag: u64,
    generation: u64,
    /// Checksum of its manifest.
    manifest: u64,
}

impl meeting::Hello for Hello {
    fn of(&self) -> (u64, u64) {
        (self.tag, self.generation)
    }
}

/// What the root asks of a part.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
enum Ask {
    /// How many bytes this tier lacks.
    Weigh { tier: String },
    /// Copy them. The answer comes when they are there.
    Copy { tier: String },
}

#[derive(Debug, Serialize, Deserialize)]
struct Question {
    number: u64,
    ask: Ask,
}

#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// That of the question.
    number: u64,
    /// Bytes, or why not.
    said: Result<u64, Refused>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Refused {
    exit: Exit,
    message: String,
    /// The tier has no room for it.
    is_full: bool,
}

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

/// A part that waits for what is asked of it.
#[derive(Debug)]
struct Member {
    host: String,
    manifest: u64,
    direct: Direct,
    /// The number of the last question.
    asked: u64,
    /// It has not been answered.
    is_open: bool,
    /// The tier of that question has no room for what it has.
    is_full: bool,
}

/// The parts of a generation, on their hosts.
#[derive(Debug)]
pub(crate) struct Members {
    job: PathBuf,
    generation: u64,
    all: BTreeMap<u64, Member>,
}

impl Members {
    /// Waits until all are there, of the job in this directory.
    pub(crate) fn gather(mut meeting: Meeting, job: &Path) -> Result<Self, Failure> {
        let heard = meeting.gather::<Hello>()?;
        let member = |(tag, (hello, direct)): (u64, (Hello, Direct))| {
            let host = meeting.hosts.get(&tag).cloned().unwrap_or_default();
            (tag, Member::new(host, hello.manifest, direct))
        };
        Ok(Self {
            job: job.to_owned(),
            generation: meeting.generation,
            all: heard.into_iter().map(member).collect(),
        })
    }

    /// Whether what they have has been compared with its checksums: it was, when it was made redundant. Somebody may have
    /// found damage since.
    pub(super) fn are_whole(&self) -> bool {
        let is_redundant = record::numbers(&self.job).is_ok_and(|all| all.contains(&self.generation));
        is_redundant && Generation::at(&self.job.join("gen"), self.generation).damage.is_none()
    }

    pub(super) fn parts(&self) -> Vec<Part> {
        let part = |(tag, m): (&u64, &Member)| Part {
            tag: *tag,
            manifest: m.manifest,
        };
        self.all.iter().map(part).collect()
    }

    /// Bytes that tier `name` lacks of the generation, of all parts together.
    pub(super) fn lacking(&mut self, name: &str) -> Result<u64, Failure> {
        let tier = name.to_owned();
        let asked = self.ask(&Ask::Weigh { tier });
        let heard = self.hear();
        asked?;
        heard.into_iter().sum()
    }

    fn ask(&mut self, ask: &Ask) -> Result<(), Failure> {
        self.all.values_mut().try_for_each(|m| m.ask(ask))
    }

    /// The answers of all who have been asked, whatever the others have said: none is left for the next question.
    fn hear(&mut self) -> Vec<Result<u64, Failure>> {
        self.all.values_mut().filter(|m| m.is_open).map(Member::hear).collect()
    }

    /// Whether the tier to which they were to copy has no room for what one of them has.
    pub(super) fn found_no_room(&self) -> bool {
        self.all.values().any(|m| m.is_full)
    }

    /// Has them copied to tier `name`, beside what the root copies.
    pub(super) fn copy_to<'a>(&'a mut self, name: &'a str) -> impl Parts + 'a {
        Copying { members: self, name }
    }
}

impl Member {
    fn new(host: String, manifest: u64, direct: Direct) -> Self {
        Self {
            host,
            manifest,
            direct,
            asked: 0,
            is_open: false,
            is_full: false,
        }
    }

    fn named(&self, f: Failure) -> Failure {
        Failure::new(f.exit, format!("{}: {f}", self.host))
    }

    fn ask(&mut self, ask: &Ask) -> Result<(), Failure> {
        self.asked += 1;
        let (number, ask) = (self.asked, ask.clone());
        send(&mut self.direct, &Question { number, ask }).map_err(|f| self.named(f))?;
        (self.is_open, self.is_full) = (true, false);
        Ok(())
    }

    fn hear(&mut self) -> Result<u64, Failure> {
        self.is_open = false;
        let heard = receive::<Answer>(&mut self.direct, Some(Direct::SILENCE));
        let said = heard.and_then(|a| match a.number == self.asked {
            true => a.said.map_err(|refused| {
                self.is_full = refused.is_full;
                Failure::new(refused.exit, refused.message)
            }),
            false => Err(meeting::failed("it has answered another question")),
        });
        said.map_err(|f| self.named(f))
    }
}

struct Copying<'a> {
    members: &'a mut Members,
    name: &'a str,
}

impl Copying<'_> {
    fn failed(&self, f: &Failure) -> StorageError {
        tier::failed(self.name, "copy", "a part", std::io::Error::other(f.to_string()))
    }
}

impl Parts for Copying<'_> {
    fn begin(&mut self) -> Result<(), StorageError> {
        let tier = self.name.to_owned();
        let asked = self.members.ask(&Ask::Copy { tier });
        asked.map_err(|f| self.failed(&f))
    }

    fn finish(&mut self) -> Result<Vec<Part>, StorageError> {
        let heard: Result<Vec<u64>, Failure> = self.members.hear().into_iter().collect();
        heard.map_err(|f| self.failed(&f))?;
        Ok(self.members.parts())
    }
}

impl Drop for Copying<'_> {
    /// What is copied in vain is not copied beside what comes next.
    fn drop(&mut self) {
        self.members.hear();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::Instant;

    /// Parts that give these answers, one after the other, and what ends when the root has gone.
    fn members(answers: &[&[Result<u64, &str>]]) -> (Members, Vec<std::thread::JoinHandle<()>>) {
        let key = JobKey::random().unwrap();
        let mut door = Door::open(key.clone(), &[IpAddr::V4(Ipv4Addr::LOCALHOST)]).unwrap();
        let (mut all, mut threads) = (BTreeMap::new(), Vec::new());
        for (tag, answers) in (1..).zip(answers) {
            let (key, to) = (key.clone(), door.addresses());
            let refused = |why: &&str| Refused {
                exit: Exit::NotDurable,
                message: (*why).to_owned(),
                is_full: false,
            };
            let mut answers: VecDeque<_> = answers.iter().map(|a| a.as_ref().copied().map_err(refused)).collect();
            threads.push(std::thread::spawn(move || {
                let mut root = Direct::connect(&key, &to).unwrap();
                while let Ok(Question { number, .. }) = receive(&mut root, None) {
                    let said = answers.pop_front().unwrap();
                    send(&mut root, &Answer { number, said }).unwrap();
                }
            }));
            let direct = door.accept(None).unwrap().unwrap();
            all.insert(tag, Member::new(format!("h{tag}"), tag, direct));
        }
        let (job, generation) = (PathBuf::from("/nonexistent"), 1);
        (Members { job, generation, all }, threads)
    }

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

    #[test]
    fn what_a_part_says_of_one_tier_is_not_taken_for_its_word_on_the_next() {
        let (mut parts, threads) = members(&[&[Err("no room"), Ok(10)], &[Ok(1), Err("damaged")]]);
        let f = parts.lacking("first").unwrap_err();
        assert_eq!(f.to_string(), "h1: no room");
        let mut copying = parts.copy_to("second");
        copying.begin().unwrap();
        let e = copying.finish().unwrap_err().to_string();
        assert!(e.contains("h2: damaged"), "{e}");
        drop(copying);
        drop(parts);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }

    #[test]
    fn what_was_found_damaged_since_it_was_made_redundant_is_not_whole() {
        let job = std::env::temp_dir().join(format!("belay-since-{}", std::process::id()));
        std::fs::create_dir(&job).unwrap();
        std::fs::write(job.join(crate::jobdir::JOB), "").unwrap();
        let parts = Members {
            job: job.clone(),
            generation: 1,
            all: BTreeMap::new(),
        };
        assert!(!parts.are_whole());
        let status = belay_wire::GenerationStatus {
            generation: 1,
            ..Default::default()
        };
        record::Record::new(status, "h1".into(), Vec::new()).write(&job).unwrap();
        assert!(parts.are_whole());
        generations::mark(&parts::generation_of(&job, 2, &job.join("gen/000001")), "bit flips");
        assert!(!parts.are_whole());
        std::fs::remove_dir_all(job).unwrap();
    }

    #[test]
    fn who_has_not_been_asked_is_not_waited_for() {
        let (mut parts, threads) = members(&[&[], &[]]);
        let begin = Instant::now();
        let too_long = "x".repeat(Direct::MAX_MESSAGE);
        assert!(parts.copy_to(&too_long).begin().is_err());
        assert!(begin.elapsed() < Direct::SILENCE / 2, "{:?}", begin.elapsed());
        drop(parts);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }

    #[test]
    fn an_answer_to_another_question_is_none() {
        let (mut parts, threads) = members(&[&[Ok(1)]]);
        parts.ask(&Ask::Weigh { tier: "x".into() }).unwrap();
        parts.all.values_mut().for_each(|m| m.asked += 1);
        assert!(parts.hear()[0].as_ref().unwrap_err().to_string().contains("another question"));
        drop(parts);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}
