//! Reads a generation and checks, before any process is started, all that can be checked: files and checksums of the
//! image, identity of the files that the processes had mapped, and what this machine must have in common with that of
//! the checkpoint.

use crate::code::Code;
use crate::fail::{Outcome, RestartError};
use crate::leftout::{self, Streams};
use crate::namespace;
use crate::plausible;
use crate::processor;
use crate::remains;
use crate::tree;
use crate::vdso::{Foreign, Refused};
use crate::Options;
use belay_image::extents::{self, Extent};
use belay_image::manifest::Manifest;
use belay_image::model::{FileIdentity, Job, Process, Processor, Vma, VmaKind};
use belay_image::name::Name;
use belay_image::sections::{Kind, SectionFile};
use belay_image::{blobs::BlobReader, checksum, files, packed, ImageError, TableId, BLOB_FILE, JOB_FILE};
use belay_kernel::domain;
use belay_plugins::{check_path, look, Descriptors, Sights};
use belay_storage::chunk::Chunk;
use belay_storage::store::Store;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// A generation that has passed the checks.
pub(crate) struct Loaded {
    pub(crate) job: Job,
    pub(crate) descriptors: Descriptors,
    /// What lies at the paths of the job's files.
    pub(crate) sights: Sights,
    pub(crate) blobs: BlobReader,
    /// Where contents of shared memory and files lie.
    pub(crate) contents: Vec<Extent>,
    /// The files that processes map.
    pub(crate) code: Code,
    /// The vDSO of the checkpoint, where this kernel has another or somebody was stopped in it.
    pub(crate) foreign: Option<Foreign>,
    /// Extents of every process with memory, by PID; none spans two mappings or is longer than a helper thread should
    /// read at a time.
    pub(crate) extents: HashMap<i32, Vec<Extent>>,
    /// What is kept of their packed pages.
    pub(crate) streams: Streams,
    /// The chunks they lie in, by number.
    pub(crate) chunks: HashMap<u32, Chunk>,
}

/// Longest extent that is read by one thread, so that all have work to the end.
const PIECE_BYTES: u64 = 4 << 20;

/// Reads and checks the generation in `dir`, then, when nothing of the job lives any more, what it needs of this host.
pub(crate) fn load(dir: &Path, options: &Options) -> Outcome<Loaded> {
    // The job's processes change directory; the image must still be found. Where `gen` is a link, only the job
    // directory knows the local tiers.
    let named = std::path::absolute(dir).map_err(|e| ImageError::io("open", dir, e))?;
    let store = Store::of_generation(&named);
    let dir = dir.canonicalize().map_err(|e| ImageError::io("open", dir, e))?;
    let manifest = Manifest::read(&dir)?;
    let files = check_files(&dir, &manifest)?;
    let sections = SectionFile::decode(&dir.join(JOB_FILE), files.get(JOB_FILE).map_or(&[], Vec::as_slice))?;
    let (job, descriptors) = decode(&dir.join(JOB_FILE), &sections, options.ended)?;
    let open = |c| store.open(c).map(|chunk| (c.id, chunk));
    let chunks = manifest.chunks.iter().map(open).collect::<Result<HashMap<_, _>, _>>()?;
    let (mut all, mut streams) = (HashMap::new(), Streams::new());
    for p in job.processes.iter().filter(|p| tree::is_live(p) && !tree::shares_memory(p)) {
        let name = TableId::Process(p.pid).file_name();
        let path = dir.join(&name);
        let bytes = files
            .get(&name)
            .ok_or_else(|| ImageError::damaged(&path, "not listed in the manifest"))?;
        let mut table = table(&path, bytes, &chunks)?;
        let stream = packed::split(&mut table);
        leftout::is_plausible(p, &stream).map_err(|why| ImageError::damaged(&path, format!("process {} {why}", p.pid)))?;
        streams.extend((!stream.is_empty()).then_some((p.pid, stream)));
        all.insert(p.pid, cut(&table, &p.vmas));
    }
    let of_all = |id: TableId| {
        let name = id.file_name();
        let bytes = files.get(&name);
        let found = bytes.map(|bytes| table(&dir.join(&name), bytes, &chunks)).transpose();
        found.map(Option::unwrap_or_default)
    };
    let contents = of_all(TableId::Contents)?;
    check_processes(&job)?;
    check_domain(job.domain.as_ref(), domain::of(std::process::id().cast_signed()))?;
    check_processor(&job, options.any_cpu)?;
    let blobs = BlobReader::open(&dir.join(BLOB_FILE))?;
    let foreign = foreign(&job, &blobs)?;
    // What lives on of the job still changes its files.
    remains::clear(&job, options.ends_remains)?;
    let code = Code {
        lacking: lacking(&job, &descriptors)?,
        files: job.code.clone(),
        table: of_all(TableId::Code)?,
    };
    let sights = check_paths(&job, &descriptors, &code)?;
    Ok(Loaded {
        descriptors,
        sights,
        foreign,
        blobs,
        contents,
        code,
        job,
        extents: all,
        streams,
        chunks,
    })
}

/// What `sections`, those of the file at `path`, say of the job. All that the restart takes for granted of it is checked here.
pub(crate) fn decode(path: &Path, sections: &SectionFile, ended: bool) -> Result<(Job, Descriptors), ImageError> {
    let job: Job = sections.get_json(Kind::Job)?;
    if job.arch != std::env::consts::ARCH {
        return Err(ImageError::Architecture {
            path: path.display().to_string(),
            found: job.arch,
            expected: std::env::consts::ARCH.into(),
        });
    }
    plausible::check(&job, ended).map_err(|reason| ImageError::damaged(path, reason))?;
    let descriptors: Descriptors = sections.get_json(Kind::Descriptors)?;
    let checked = descriptors.check(&plausible::tasks(&job));
    checked.map_err(|reason| ImageError::damaged(path, reason))?;
    Ok((job, descriptors))
}

/// Every listed file must be there with its length; those with a checksum are read and checked.
fn check_files(dir: &Path, manifest: &Manifest) -> Outcome<HashMap<String, Vec<u8>>> {
    let mut out = HashMap::new();
    for f in &manifest.files {
        let path = dir.join(&f.name);
        let found = std::fs::metadata(&path).map_err(|e| ImageError::io("open", &path, e))?.len();
        if found != f.bytes {
            let reason = format!("{found} bytes long, was written with {}", f.bytes);
            return Err(ImageError::damaged(&path, reason).into());
        }
        let Some(sum) = f.xxh3 else { continue };
        let data = files::read(&path, f.bytes)?;
        if checksum(&data) != sum {
            return Err(ImageError::damaged(&path, "checksum does not match").into());
        }
        out.insert(f.name.clone(), data);
    }
    Ok(out)
}

/// The extents in a file of the generation.
fn table(path: &Path, bytes: &[u8], chunks: &HashMap<u32, Chunk>) -> Outcome<Vec<Extent>> {
    let table = extents::decode(path, SectionFile::decode(path, bytes)?.get(Kind::Extents)?)?;
    check_extents(path, chunks, &table)?;
    Ok(table)
}

/// Every extent must lie in a chunk that the manifest lists.
fn check_extents(path: &Path, chunks: &HashMap<u32, Chunk>, table: &[Extent]) -> Outcome<()> {
    for e in table {
        let pages = chunks.get(&e.chunk).map_or(0, |c| c.hashes.len() as u64);
        if u64::from(e.page) + e.pages() > pages {
            let reason = format!("extent at {:#x} lies outside chunk {}", e.vaddr, e.chunk);
            return Err(ImageError::damaged(path, reason).into());
        }
    }
    Ok(())
}

/// Cuts extents where mappings meet, and into pieces.
pub(crate) fn cut(table: &[Extent], vmas: &[Vma]) -> Vec<Extent> {
    let mut out = Vec::with_capacity(table.len());
    let mut vmas = vmas.iter().peekable();
    for e in table {
        let mut at = e.vaddr;
        while at < e.end() {
            while vmas.next_if(|v| v.end <= at).is_some() {}
            let border = vmas.peek().map_or(u64::MAX, |v| if v.start > at { v.start } else { v.end });
            let end = e.end().min(border).min(at.saturating_add(PIECE_BYTES));
            out.push(e.part(at, end));
            at = end;
        }
    }
    out
}

/// What cannot be restored here is refused by name.
fn check_processes(job: &Job) -> Outcome<()> {
    let user = namespace::is_ordinary();
    let (uid, gid) = namespace::own_user();
    for p in job.processes.iter().filter(|p| tree::is_live(p)) {
        let refuse = |reason: String| Err(RestartError::at(format!("process {} ({})", p.pid, p.comm), reason));
        let all = || p.threads.iter().map(|t| crate::state::whose(p, t).0).chain([&p.creds]);
        if let Some(creds) = all().find(|c| user && (c.uids != [uid; 4] || c.gids != [gid; 4])) {
            return refuse(format!(
                "it ran as uid {} gid {}, which user {uid} group {gid} cannot become: restart as that user or as root",
                creds.uids[1], creds.gids[1]
            ));
        }
        if user && all().any(|c| c.cap_permitted != 0) {
            return refuse("it held capabilities, which an ordinary user cannot give: restart as root".into());
        }
    }
    Ok(())
}

/// A job neither loses nor gets the rules of a security domain by a restart: another one than it had is refused by name.
fn check_domain(then: Option<&Name>, now: Option<Vec<u8>>) -> Outcome<()> {
    let (Some(then), Some(now)) = (then, now) else {
        return Ok(());
    };
    if domain::are_alike(then.as_bytes(), &now) {
        return Ok(());
    }
    let now = Name::from(now.as_slice());
    Err(RestartError::at(
        "security domain",
        format!(
            "the job ran in {then}, and would be in {now}: restart it there ({} belay restart)",
            domain::entered_by(&then.to_string())
        ),
    ))
}

/// What this processor lacks is refused by name.
fn check_processor(job: &Job, any_cpu: bool) -> Outcome<()> {
    let missing = processor::missing(job, &Processor::own(), any_cpu);
    if missing.is_empty() {
        return Ok(());
    }
    let otherwise = if any_cpu {
        ""
    } else {
        ", or, if none of the job's programs uses them, with --any-cpu"
    };
    Err(RestartError::at(
        "processor",
        format!(
            "this one lacks what that of {} had: {}; restart on one that has them{otherwise}",
            job.host,
            missing.join(", ")
        ),
    ))
}

/// What another user has put on the way to the job's files and directories is refused by name.
fn check_paths(job: &Job, descriptors: &Descriptors, code: &Code) -> Outcome<Sights> {
    let live = job.processes.iter().filter(|p| tree::is_live(p));
    let of_threads = |p: &'_ Process| p.threads.iter().filter_map(|t| t.directories.clone()).collect::<Vec<_>>();
    let mut all: BTreeSet<Name> = live.clone().flat_map(of_threads).map(|(cwd, _)| cwd).collect();
    all.extend(live.flat_map(|p| [p.cwd.clone(), p.root.clone()]));
    all.iter().try_for_each(|path| check_path(path.as_path()))?;
    Ok(look(descriptors, &|key| code.has(key))?)
}

/// What the job needs where this kernel's vDSO is another than it had, or somebody was stopped in it.
fn foreign(job: &Job, blobs: &BlobReader) -> Outcome<Option<Foreign>> {
    let own = belay_kernel::vdso::code().map_err(|e| RestartError::at("vdso", format!("read this process's own: {e}")))?;
    Foreign::of(job, blobs, &own).map_err(|e| match e {
        Refused::Image(e) => e.into(),
        e @ Refused::Kernel { .. } => RestartError::at("vdso", e),
    })
}

/// Programs and libraries must be those of the checkpoint, or stored in it: which of the stored ones are others here.
/// Files that the job writes, or that the checkpoint restores, are another matter.
fn lacking(job: &Job, descriptors: &Descriptors) -> Outcome<Vec<usize>> {
    let mut known: HashMap<&Name, (Result<FileIdentity, String>, bool)> = HashMap::new();
    let mut lacking = BTreeSet::new();
    let mapped = job.processes.iter().flat_map(mapped_files);
    let mapped = mapped.map(|found| (found, !descriptors.restores(found.0.as_path())));
    let programs = job.processes.iter().filter_map(|p| Some((&p.exe, p.exe_identity.as_ref()?)));
    let programs = programs.map(|found| (found, false));
    for ((path, then), needed) in mapped.chain(programs) {
        let stored = || job.code.iter().position(|f| f.is(path, then));
        let look = || {
            let now = FileIdentity::of(path.as_path()).map_err(|e| e.to_string());
            (now, is_kept(path, stored().and_then(|i| job.code[i].owner)))
        };
        let (now, kept) = known.entry(path).or_insert_with(look);
        let same = now.as_ref().is_ok_and(|now| then.accepts(now));
        // One that was changed where it lies says the same of itself.
        let untouched = now.as_ref().is_ok_and(|now| now.mtime_ns == then.mtime_ns);
        if same && *kept && (untouched || stored().is_none()) {
            continue;
        }
        match stored() {
            Some(stored) => drop(lacking.insert(stored)),
            None if needed && !same => {
                return Err(RestartError::Changed {
                    path: path.to_string(),
                    reason: difference(then, now),
                })
            }
            // Its own pages are among those of the process.
            None => {}
        }
    }
    Ok(lacking.into_iter().collect())
}

/// Whether nobody can have put another file at `path`, or can do so yet, but for those whose word counted when it was
/// mapped: root, the user, and its `owner` then. What a file says of itself (its build id) anybody can have written
/// into it.
fn is_kept(path: &Name, owner: Option<u32>) -> bool {
    let kept = belay_kernel::trust::file(path.as_path(), owner);
    if let Err(why) = &kept {
        tracing::debug!(%path, %why, "not mapped where the checkpoint has it");
    }
    kept.is_ok()
}

/// Why a file cannot stand in for the one that was mapped, and what to do.
fn difference(then: &FileIdentity, now: &Result<FileIdentity, String>) -> String {
    let now = match now {
        Ok(now) => now,
        Err(e) => return format!("{e}; the job has it mapped: put it back as it was at the checkpoint"),
    };
    match (&then.build_id, &now.build_id) {
        (Some(a), Some(b)) if a != b => format!("build id {b}, was {a} at the checkpoint: put that build back"),
        _ if then.bytes != now.bytes => {
            format!(
                "{} bytes, was {} at the checkpoint: put that version back",
                now.bytes, then.bytes
            )
        }
        _ => "other contents than at the checkpoint: put that version back".to_owned(),
    }
}

fn mapped_files(p: &Process) -> impl Iterator<Item = (&Name, &FileIdentity)> {
    p.vmas.iter().filter_map(|v| match &v.kind {
        VmaKind::FilePrivate {
            path,
            identity: Some(identity),
            ..
        } => Some((path, identity)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_in_another_security_domain_is_refused_by_name() {
        let check = |then: Option<&str>, now: Option<&str>| check_domain(then.map(Name::from).as_ref(), now.map(|n| n.into()));
        for (then, now) in [
            (None, Some("unconfined")),
            (Some("a (enforce)"), None),
            (Some("a (enforce)"), Some("a (enforce)")),
            (Some("unconfined"), Some("belay (unconfined)")),
        ] {
            assert!(check(then, now).is_ok(), "{then:?} {now:?}");
        }
        let refused = check(Some("a (enforce)"), Some("unconfined")).unwrap_err().to_string();
        assert!(
            refused.contains("ran in a (enforce)") && refused.contains("aa-exec -p a -- belay restart"),
            "{refused}"
        );
        assert!(check(Some("unconfined"), Some("u:r:t_t:s0\x1b"))
            .unwrap_err()
            .to_string()
            .contains("u:r:t_t:s0"));
    }

    #[test]
    fn extents_are_cut_where_mappings_meet() {
        let vma = |start: u64, end: u64| Vma {
            start: start << 12,
            end: end << 12,
            prot: 3,
            kind: VmaKind::Heap,
            flags: Vec::new(),
            guards: Vec::new(),
            key: 0,
        };
        let vmas = [vma(1, 3), vma(3, 4), vma(6, 4000)];
        let e = |page: u64, pages: u64, at: u32| Extent {
            vaddr: page << 12,
            bytes: pages << 12,
            chunk: 1,
            page: at,
        };
        let got = cut(&[e(1, 3, 10), e(6, 1500, 50)], &vmas);
        assert_eq!(got, [e(1, 2, 10), e(3, 1, 12), e(6, 1024, 50), e(1030, 476, 1074)]);
        // What lies in no mapping is kept, and refused by the memory plan.
        assert_eq!(cut(&[e(4, 3, 0)], &vmas), [e(4, 2, 0), e(6, 1, 2)]);
    }
}
