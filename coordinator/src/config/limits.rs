//! `[checkpoints]` of the configuration: how many a job keeps and how large they may be unless its command line says
//! otherwise, and what the site allows.
//!
//! | key | in the site's file | in the user's own | on the command line |
//! |---|---|---|---|
//! | `keep` | default | default instead | `--keep`, instead of both |
//! | `max_bytes` | default and limit | default, where it is less | `--max-bytes`, refused above the limit |
//! | `save_open_files` | default | default instead | `--save-open-files`, instead of both |
//! | `save_code` | default | default instead | `--no-save-code`, instead of both |
//! | `roots` | directories below which checkpoints may lie | the same; both count | |
//!
//! A launch keeps in `job.json` what follows for `keep` and `max_bytes`. What the site allows is kept nowhere: every
//! launch and every restart asks the files. Object stores lie in no directory, so `roots` says nothing about them.

use super::{Config, Fault, SavedFiles, Size, SITE};
use crate::failure::{reason, Failure};
use belay_wire::Exit;
use serde::Deserialize;
use std::ffi::OsString;
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Checkpoints that a job keeps, where nobody says how many.
const KEEP: u32 = 2;

/// `[checkpoints]` as people write it.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawCheckpoints {
    keep: Option<toml::Spanned<u32>>,
    max_bytes: Option<toml::Spanned<Size>>,
    roots: Option<toml::Spanned<Vec<PathBuf>>>,
    save_open_files: Option<SavedFiles>,
    save_code: Option<bool>,
}

impl RawCheckpoints {
    /// What cannot be.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let fault = |at, what: &str| {
            Err(Fault {
                at: Some(at),
                what: what.into(),
            })
        };
        match (&self.keep, &self.roots) {
            (Some(keep), _) if *keep.get_ref() == 0 => fault(keep.span(), "keep: at least 1"),
            (_, Some(roots)) if roots.get_ref().is_empty() => {
                fault(roots.span(), "roots: at least one directory; leave the key out to allow all")
            }
            (_, Some(roots)) if !roots.get_ref().iter().all(|r| r.is_absolute()) => {
                fault(roots.span(), "roots: absolute paths of directories are needed")
            }
            _ => Ok(()),
        }
    }
}

/// Where a rule is written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    file: PathBuf,
    line: usize,
    key: &'static str,
}

impl Source {
    fn new(file: &Path, text: &str, at: usize, key: &'static str) -> Self {
        let line = text.as_bytes().iter().take(at).filter(|b| **b == b'\n').count() + 1;
        let file = file.to_owned();
        Self { file, line, key }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}, {}", self.file.display(), self.line, self.key)
    }
}

/// What a directory is for; what can be done where it is refused follows from that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A launch.
    New,
    /// A restart with the configuration that was kept with the job.
    Old,
    /// A restart with one that was read anew.
    Anew,
    /// Making a lost job directory again from a tier.
    Lost,
}

/// What the files say in `[checkpoints]`, and what follows from it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    keep: Option<u32>,
    save_open_files: Option<SavedFiles>,
    save_code: Option<bool>,
    /// The default.
    max_bytes: Option<u64>,
    /// The site's, above which nobody gets.
    most: Option<(u64, Source)>,
    /// A directory must lie below one root of each.
    roots: Vec<(Source, Vec<PathBuf>)>,
    /// Directories for tiers that the site's file names itself.
    of_site: Vec<PathBuf>,
}

impl Limits {
    /// Adds what the file at `path`, with contents `text`, says.
    pub(super) fn add(&mut self, (path, text): (&Path, &str), raw: RawCheckpoints) {
        self.keep = raw.keep.map(toml::Spanned::into_inner).or(self.keep);
        self.save_open_files = raw.save_open_files.or(self.save_open_files);
        self.save_code = raw.save_code.or(self.save_code);
        if let Some(max_bytes) = raw.max_bytes {
            let (at, Size(bytes)) = (max_bytes.span().start, max_bytes.into_inner());
            if path == Path::new(SITE) {
                self.most = Some((bytes, Source::new(path, text, at, "max_bytes")));
            }
            self.max_bytes = Some(self.most.as_ref().map_or(bytes, |(most, _)| bytes.min(*most)));
        }
        if let Some(roots) = raw.roots {
            let source = Source::new(path, text, roots.span().start, "roots");
            self.roots.push((source, roots.into_inner()));
        }
    }

    /// Notes the directories that the site's file has named for tiers.
    pub(super) fn note_site(&mut self, config: &Config) {
        let named = config.tiers.iter().filter_map(|t| t.path.clone());
        self.of_site = named.chain(config.redundancy.local.clone()).collect();
    }

    /// Checkpoints to keep, with `asked` on the command line.
    pub fn keep(&self, asked: Option<u32>) -> u32 {
        asked.or(self.keep).unwrap_or(KEEP)
    }

    /// Which open files have their contents saved, with `asked` on the command line.
    pub fn save_open_files(&self, asked: Option<SavedFiles>) -> SavedFiles {
        asked.or(self.save_open_files).unwrap_or_default()
    }

    /// Whether programs and libraries are saved, where the command line has said `no` or nothing.
    pub fn save_code(&self, no: bool) -> bool {
        !no && self.save_code.unwrap_or(true)
    }

    /// Most bytes of all checkpoints, with `asked` on the command line.
    pub fn max_bytes(&self, asked: Option<u64>) -> Result<Option<u64>, Failure> {
        match (&self.most, asked) {
            (Some((most, source)), Some(asked)) if asked > *most => Err(Failure::new(
                Exit::NotAllowed,
                format!("--max-bytes: {asked} bytes are more than the {most} that {source}, allows; ask for less, or leave the option out"),
            )),
            _ => Ok(asked.or(self.max_bytes)),
        }
    }

    /// What a job that was launched with this limit may take at a restart, where that is less, and why.
    pub fn lowered(&self, launched: Option<u64>) -> Option<(u64, String)> {
        let (most, source) = self.most.as_ref()?;
        if launched.is_some_and(|bytes| bytes <= *most) {
            return None;
        }
        Some((
            *most,
            format!("the checkpoints of this job may take {most} bytes until the next restart: {source}, allows no more"),
        ))
    }

    /// Refuses a job directory that lies nowhere below a root.
    pub fn check_job(&self, dir: &Path, what: Use) -> Result<(), Failure> {
        let next = match what {
            Use::New => "name one there with --ckpt-dir or BELAY_DIR",
            Use::Old | Use::Anew => "move it there and restart it",
            Use::Lost => "it can be made again from a tier only where it was: have that file allow it",
        };
        self.check("job directory", dir, next)
    }

    /// Refuses directories for tiers that lie nowhere below a root and that the site has not named itself: local tiers
    /// and those for redundancy on every host, and durable ones.
    pub fn check_tiers(&self, config: &Config, what: Use) -> Result<(), Failure> {
        let check = |name: &str, path: &Path, next: &str| match self.of_site.iter().any(|p| p == path) {
            true => Ok(()),
            false => self.check(name, path, next),
        };
        let next = match what {
            Use::New | Use::Anew | Use::Lost => "name another directory for it in the configuration",
            Use::Old => "name another directory for it in a file and restart with --config FILE",
        };
        for t in &config.tiers {
            let Some(path) = &t.path else { continue };
            check(&format!("tier {}:", t.name), path, next)?;
        }
        let next = match what {
            Use::New => "name another one with --local-dir, or under [redundancy] in the configuration",
            Use::Old | Use::Anew | Use::Lost => {
                "the job keeps its local directory: have that file allow it, or begin anew with another --local-dir"
            }
        };
        let redundancy = &config.redundancy;
        let local = redundancy.local.as_deref().filter(|_| redundancy.scheme.is_some());
        local.map_or(Ok(()), |path| check("local directory", path, next))
    }

    fn check(&self, name: &str, dir: &Path, next: &str) -> Result<(), Failure> {
        if self.roots.is_empty() {
            return Ok(());
        }
        let found = resolve(dir);
        for (source, roots) in &self.roots {
            // A root that is not there allows nothing.
            let real: Vec<std::io::Result<PathBuf>> = roots.iter().map(|root| root.canonicalize()).collect();
            let is = match &found {
                Ok(found) if real.iter().flatten().any(|root| found.starts_with(root)) => continue,
                Ok(found) if found == dir => String::new(),
                Ok(found) => format!(", which is {}", found.display()),
                Err(e) => format!(", of which nobody can tell where it lies ({})", reason(e)),
            };
            let shown = roots.iter().zip(&real).map(|(root, real)| match real {
                Ok(_) => root.display().to_string(),
                Err(e) => format!("{} ({})", root.display(), reason(e)),
            });
            let roots: Vec<String> = shown.collect();
            return Err(Failure::new(
                Exit::NotAllowed,
                format!(
                    "{name} {}{is}: {source}, allows only what lies below {}; {next}",
                    dir.display(),
                    roots.join(", ")
                ),
            ));
        }
        Ok(())
    }
}

/// Where `path` really lies: what of it is there without symbolic links and `..`, and behind that the rest, which is not there.
fn resolve(path: &Path) -> std::io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let (mut there, mut rest): (&Path, Vec<OsString>) = (&path, Vec::new());
    loop {
        match there.canonicalize() {
            Ok(real) => return Ok(rest.iter().rev().fold(real, |at, name| at.join(name))),
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            // A link that leads nowhere leads somewhere later; and what is above a directory that is not there yet is not known.
            Err(e) if there.is_symlink() => return Err(e),
            Err(e) => match (there.file_name(), there.parent()) {
                (Some(name), Some(above)) => {
                    rest.push(name.to_owned());
                    there = above;
                }
                _ => return Err(e),
            },
        }
    }
}

#[cfg(test)]
mod tests;
