//! The parts of a generation as the root of the job sees them: on their hosts, asked over connections of their own. What
//! they are asked, and what they answer.

use crate::generations::Generation;
use crate::nodes::meeting::{self, receive, send, Meeting};
use crate::redundancy::record;
use crate::Failure;
use belay_storage::catalogue::Part;
use belay_storage::flush::Parts;
use belay_storage::{tier, StorageError};
use belay_tree::Direct;
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A part is there.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) tag: u64,
    pub(super) generation: u64,
    /// Checksum of its manifest.
    pub(super) manifest: u64,
}

impl meeting::Hello for Hello {
    fn of(&self) -> (u64, u64) {
        (self.tag, self.generation)
    }
}

/// What the root asks of a part.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(super) enum Ask {
    /// How many bytes this tier lacks.
    Weigh { tier: String },
    /// Copy them. The answer comes when they are there.
    Copy { tier: String },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Question {
    pub(super) number: u64,
    pub(super) ask: Ask,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    /// That of the question.
    pub(super) number: u64,
    /// Bytes, or why not.
    pub(super) said: Result<u64, Refused>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Refused {
    pub(super) exit: Exit,
    pub(super) message: String,
    /// The tier has no room for it.
    pub(super) is_full: bool,
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
mod tests {
    use super::super::parts;
    use super::*;
    use crate::generations;
    use belay_tree::{Door, JobKey};
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
