//! Programs, libraries and other files that processes map. Pages that a process has not written lie in the file alone,
//! and at the restart there may be another in its place, or none: so the checkpoint has the files too. Each is read
//! once, when the first checkpoint finds it; later ones refer to what is stored.
//!
//! A file that no path leads to any more can be stored where the agent has it open: the program of a process, what a
//! restart has made itself ([`held`]), and what has been removed since the checkpoint began.

use crate::memory::held::{self, nameless, Inode};
use crate::memory::mappings::{Identities, LOST};
use crate::CaptureError;
use belay_access::live;
use belay_image::extents::{self, Extent, PAGE};
use belay_image::identity::{self, Nameless};
use belay_image::model::{FileIdentity, MappedFile, Process, Vma, VmaKind};
use belay_image::name::Name;
use belay_image::TableId;
use belay_storage::session::Session;
use belay_storage::StorageError;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// A file of up to this length is stored whole, bytes. Of a longer program or library what is mapped is, and other
/// files must be what they were.
const WHOLE: u64 = 64 << 20;
/// What is read at once.
const PIECE: usize = 1 << 20;

/// What the program of `p` is: what its path leads to, unless its mappings know better.
pub(crate) fn identity_of_program(p: &Process, identities: &mut Identities) -> Option<FileIdentity> {
    let mapped = p.vmas.iter().filter_map(mapped).find(|(path, _)| **path == p.exe);
    let mapped = mapped.map(|(_, identity)| identity.clone());
    let held = || nameless(|n| n.path == p.exe, |n| n.identity.clone());
    mapped.or_else(held).or_else(|| identities.of(p.exe.as_os_str()))
}

fn mapped(v: &Vma) -> Option<(&Name, &FileIdentity)> {
    match &v.kind {
        VmaKind::FilePrivate {
            path,
            identity: Some(identity),
            ..
        } => Some((path, identity)),
        _ => None,
    }
}

/// A stored file.
#[derive(Debug, Clone)]
struct Known {
    file: MappedFile,
    /// Which one it was; `None` where another agent has stored it.
    inode: Option<Inode>,
    /// Whether what is stored is known to be intact: a restart does not read it, where this host has the same file.
    intact: bool,
}

impl Known {
    /// Where it lies.
    fn lies(&self, table: &[Extent]) -> Vec<Extent> {
        let mut lies = Vec::new();
        extents::within(table, self.file.at, end_of(&self.file), &mut lies);
        lies
    }
}

/// The files in the last committed checkpoint.
#[derive(Debug, Clone, Default)]
pub struct Code {
    files: Vec<Known>,
    table: Vec<Extent>,
}

/// A file to be stored, and which parts of it processes have mapped.
struct Want<'a> {
    /// The first process that has it.
    pid: i32,
    path: &'a Name,
    identity: &'a FileIdentity,
    ranges: Vec<(u64, u64)>,
}

impl Code {
    /// Those of a generation that has been restarted.
    pub fn of(files: Vec<MappedFile>, table: Vec<Extent>) -> Self {
        let files = files.into_iter().map(|file| Known {
            file,
            inode: None,
            intact: false,
        });
        Self {
            files: files.collect(),
            table,
        }
    }

    /// Reads what a restart has not read, and forgets what is damaged: it is stored anew, and nothing refers to it. To be
    /// called before anything is looked for in the store.
    pub(crate) fn check(&mut self, session: &mut Session) {
        let table = &self.table;
        self.files.retain_mut(|known| {
            known.intact = known.intact || session.is_intact(&known.lies(table));
            known.intact
        });
    }

    /// What is stored is committed, in these places.
    pub(crate) fn commit(&mut self, tables: &BTreeMap<TableId, Vec<Extent>>) {
        self.table = tables.get(&TableId::Code).cloned().unwrap_or_default();
    }

    /// Stores what `processes` map, `all` of it or only what could not be had otherwise; what is `restored` by others
    /// has its place there.
    pub(crate) fn store(
        &mut self,
        processes: &[Process],
        all: bool,
        restored: impl Fn(&Path) -> bool,
        (session, identities): (&mut Session, &mut Identities),
    ) -> Result<Vec<MappedFile>, CaptureError> {
        let wants = wants(processes);
        let (mut files, mut table) = (Vec::new(), Vec::new());
        let mut end = self.files.iter().map(|k| end_of(&k.file)).max().unwrap_or(0);
        for want in wants {
            let held = nameless(|n| n.path == *want.path && n.identity == *want.identity, Nameless::clone);
            let seen = if held.is_none() {
                identities.inode(want.path.as_os_str())
            } else {
                None
            };
            let open = identities.file(want.path.as_os_str()).filter(|_| held.is_none());
            // It was there when its mappings were looked at.
            let is_lost = || seen.is_some() && !leads_to(want.path.as_path(), seen);
            let needed = held.is_some() || is_lost();
            if !needed && (!all || restored(want.path.as_path())) {
                continue;
            }
            if let Some(known) = self.known(&want, seen, session) {
                extents::within(&self.table, known.file.at, end_of(&known.file), &mut table);
                files.push(known);
                continue;
            }
            let stored = table.len();
            let mut put = put(&want, (held.as_ref(), open), end, (session, &mut table));
            if matches!(put, Ok(None)) && is_lost() {
                // That it was removed meanwhile has changed its inode, and nothing else.
                table.truncate(stored);
                put = self::put(&want, (None, open), end, (session, &mut table));
            }
            match put {
                Ok(Some(known)) => {
                    end = end_of(&known.file);
                    files.push(known);
                }
                Ok(None) if is_lost() => return Err(CaptureError::refuse_for_now(want.pid, want.path.to_string(), LOST)),
                Ok(None) => table.truncate(stored),
                // What may stay where it is is no reason to fail.
                Err(CaptureError::Storage(e @ (StorageError::Quota { .. } | StorageError::Memory { .. })))
                    if !needed && !is_lost() =>
                {
                    tracing::warn!(path = %want.path, error = %e, "not stored: a restart needs it as it is now");
                    table.truncate(stored);
                }
                Err(e) => return Err(e),
            }
        }
        held::retain(|n| files.iter().any(|k| k.file.is(&n.path, &n.identity)));
        self.files = files;
        if !table.is_empty() {
            session.set_table(TableId::Code, table)?;
        }
        Ok(self.files.iter().map(|k| k.file.clone()).collect())
    }

    /// What is stored of it, where that is all that is wanted, and still there.
    fn known(&self, want: &Want<'_>, inode: Option<Inode>, session: &Session) -> Option<Known> {
        let same = |k: &&Known| k.file.is(want.path, want.identity) && (k.inode.is_none() || inode.is_none() || k.inode == inode);
        let mut known = self.files.iter().find(same)?.clone();
        let lies = known.lies(&self.table);
        let whole = lies.iter().map(|e| e.bytes).sum::<u64>() == known.file.stored();
        let covered = |r: &(u64, u64)| known.file.parts.iter().any(|p| p.0 <= r.0 && r.1 <= p.1);
        let good = whole && want.ranges.iter().all(covered) && lies.iter().all(|e| session.knows(e.chunk));
        known.inode = inode;
        good.then_some(known)
    }
}

/// The end of its place.
fn end_of(file: &MappedFile) -> u64 {
    file.at + file.identity.bytes.next_multiple_of(PAGE)
}

/// The files that processes map or execute, each once.
fn wants(processes: &[Process]) -> Vec<Want<'_>> {
    let mut out: Vec<Want<'_>> = Vec::new();
    let mut places: BTreeMap<&Name, Vec<usize>> = BTreeMap::new();
    let mut add = |pid, path, identity, range: Option<(u64, u64)>| {
        let same = places.entry(path).or_default();
        let at = same.iter().copied().find(|i| out[*i].identity == identity);
        let at = at.unwrap_or_else(|| {
            same.push(out.len());
            out.push(Want {
                pid,
                path,
                identity,
                ranges: Vec::new(),
            });
            out.len() - 1
        });
        out[at].ranges.extend(range);
    };
    for p in processes {
        for v in &p.vmas {
            if let (VmaKind::FilePrivate { offset, .. }, Some((path, identity))) = (&v.kind, mapped(v)) {
                let end = identity.bytes.next_multiple_of(PAGE);
                let to = (offset + (v.end - v.start)).min(end);
                add(p.pid, path, identity, (*offset < to).then_some((*offset, to)));
            }
        }
        if let Some(identity) = &p.exe_identity {
            add(p.pid, &p.exe, identity, None);
        }
    }
    out.iter_mut().for_each(|w| live::join(&mut w.ranges));
    out
}

/// Whether `path` leads to the file that has been seen there.
fn leads_to(path: &Path, seen: Option<Inode>) -> bool {
    std::fs::metadata(path).is_ok_and(|m| seen.is_some_and(|seen| seen.is_same_file(&Inode::of(&m))))
}

/// Stores a file at `at`, which is `held` where no path ever leads to it, or `open`. `None`: it is not one to be stored,
/// or changes.
fn put(
    want: &Want<'_>,
    (held, open): (Option<&Nameless>, Option<&File>),
    at: u64,
    (session, table): (&mut Session, &mut Vec<Extent>),
) -> Result<Option<Known>, CaptureError> {
    let opened;
    let file: &File = match held.map(|held| &*held.file).or(open) {
        Some(file) => file,
        None => match identity::open(want.path.as_path()) {
            Ok(file) => {
                opened = file;
                &opened
            }
            Err(_) => return Ok(None),
        },
    };
    let fail = |e| CaptureError::system(format!("read {}, which is mapped", want.path), e);
    let before = file.metadata().map_err(fail)?;
    if held.is_none() && (!before.is_file() || FileIdentity::of_open(file).map_err(fail)? != *want.identity) {
        return Ok(None);
    }
    let bytes = want.identity.bytes;
    let parts = if bytes <= WHOLE {
        vec![(0, bytes.next_multiple_of(PAGE))]
    } else if held.is_some() || identity::is_elf(file) {
        want.ranges.clone()
    } else {
        return Ok(None);
    };
    for (from, to) in &parts {
        store_part(file, at, (*from, *to), (session, table)).map_err(|e| match e {
            Fault::Read(e) => fail(e),
            Fault::Store(e) => e.into(),
        })?;
    }
    let after = file.metadata().map_err(fail)?;
    let inode = Inode::of(&after);
    if held.is_none() && inode != Inode::of(&before) {
        return Ok(None);
    }
    let file = MappedFile {
        path: want.path.clone(),
        identity: want.identity.clone(),
        mode: held.map_or(before.mode() & 0o777, |h| h.mode),
        // What a restart has made is its user's own.
        owner: held.is_none().then(|| before.uid()),
        at,
        parts,
    };
    let inode = held.is_none().then_some(inode);
    Ok(Some(Known {
        file,
        inode,
        intact: true,
    }))
}

enum Fault {
    Read(io::Error),
    Store(StorageError),
}

/// Stores the pages of `file` from `from` to `to`, as far as it goes, and zeros behind its end; its first byte lies at `at`.
fn store_part(
    file: &File,
    at: u64,
    (from, to): (u64, u64),
    (session, table): (&mut Session, &mut Vec<Extent>),
) -> Result<(), Fault> {
    let mut buf = vec![0u8; PIECE];
    let mut offset = from;
    while offset < to {
        let bytes = usize::try_from(to - offset).unwrap_or(PIECE).min(PIECE);
        let piece = &mut buf[..bytes];
        let read = read_full(file, piece, offset).map_err(Fault::Read)?;
        piece[read..].fill(0);
        // Together, so that they are written past the page cache.
        session.hold_back(PIECE as u64);
        session.store_pages(at + offset, piece, table).map_err(Fault::Store)?;
        session.write_held().map_err(Fault::Store)?;
        offset += bytes as u64;
    }
    Ok(())
}

/// Reads until `buf` is full or the file ends; how much that was.
fn read_full(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut read = 0;
    while read < buf.len() {
        match file.read_at(&mut buf[read..], offset + read as u64) {
            Ok(0) => break,
            Ok(n) => read += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_meet_are_joined() {
        let mut ranges = vec![(8, 9), (0, 4), (4, 6), (1, 2), (9, 12)];
        live::join(&mut ranges);
        assert_eq!(ranges, [(0, 6), (8, 12)]);
    }
}
