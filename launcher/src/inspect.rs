//! `belay inspect`: what an image holds, as text.

use crate::{declared, format};
use belay_coordinator::jobdir::{become_owner, JOB};
use belay_coordinator::{generations, sys, Failure};
use belay_image::manifest::{Manifest, MANIFEST_FILE};
use belay_image::model::{Job, MappedFile, Process, ProcessState, VmaKind};
use belay_image::sections::{self, Kind};
use belay_image::{extents, ImageError, JOB_FILE};
use belay_kernel::trust::{self, Untrusted};
use belay_wire::Exit;
use std::collections::HashSet;
use std::fmt::Write;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Describes `image`: a generation's directory, a job directory (its newest generation), or one file.
pub(crate) fn describe(image: &Path) -> Result<String, Failure> {
    look_as_owner(image)?;
    if image.is_dir() {
        return directory(&generation_of(image)?);
    }
    match image.file_name().and_then(|n| n.to_str()) {
        Some(MANIFEST_FILE) => directory(image.parent().unwrap_or(Path::new("."))),
        Some(name) if name.ends_with(".bidx") => index(image),
        Some(name) if name.ends_with(".bpar") => group(image),
        Some(name) if name.ends_with(".bpg") => Err(Failure::new(
            Exit::Usage,
            format!(
                "{} holds pages, and not whose they are: name the generation's directory or its pages-*.bidx",
                image.display()
            ),
        )),
        _ => sections(image),
    }
}

/// Root looks at what another user has written as that user.
pub(crate) fn look_as_owner(image: &Path) -> Result<(), Failure> {
    let fail = |e| Failure::io(format!("stat {}", image.display()), &e);
    if sys::euid() != 0 {
        return Ok(());
    }
    let owner = std::fs::metadata(image).map_err(fail)?.uid();
    if owner != 0 {
        return become_owner(image, owner);
    }
    let absolute = std::path::absolute(image).map_err(fail)?;
    match trust::file(&absolute, None) {
        Err(others @ Untrusted::Others { .. }) => {
            let why = format!("{} is root\'s, but {others}", image.display());
            Err(Failure::new(Exit::NotOurs, why))
        }
        Err(Untrusted::Io(e)) => Err(fail(e)),
        Ok(_) => Ok(()),
    }
}

/// What a host keeps of its group.
fn group(path: &Path) -> Result<String, Failure> {
    let index = belay_coordinator::redundancy::index_of(path)?;
    let layout = index.layout;
    let mut out = format!(
        "group of generation {}: {} hosts, {} data and {} parity blocks in a stripe, segments of {}\n\n",
        index.generation,
        layout.members,
        layout.data,
        layout.parity,
        format::bytes(index.segment)
    );
    let rows = index.members.iter().enumerate().map(|(n, m)| {
        let own = if n == index.position { "this file" } else { "" };
        vec![
            m.tag.to_string(),
            m.host.clone(),
            m.parts.len().to_string(),
            format::bytes(m.bytes()),
            own.into(),
        ]
    });
    out += &format::table(&[">part", "host", ">files", ">size", ""], &rows.collect::<Vec<_>>());
    Ok(out)
}

/// The generation that `dir` is, or the newest one of the job there.
pub(crate) fn generation_of(dir: &Path) -> Result<PathBuf, Failure> {
    if dir.join(MANIFEST_FILE).exists() {
        return Ok(dir.to_owned());
    }
    match generations::list(&dir.join("gen"))?.pop() {
        Some(g) => Ok(g.path),
        None => {
            let exit = if dir.join(JOB).exists() {
                Exit::NoCheckpoint
            } else {
                Exit::NoJob
            };
            let why = format!(
                "{} is neither a generation nor a job directory with checkpoints",
                dir.display()
            );
            Err(Failure::new(exit, why))
        }
    }
}

fn directory(dir: &Path) -> Result<String, Failure> {
    let m = Manifest::read(dir)?;
    let mut out = format!(
        "generation {} of {}, {}\n  {} processes, {} threads, {}, blocked {}\n",
        m.generation,
        format::time(m.time_unix_s),
        m.arch,
        m.processes,
        m.threads,
        format::bytes(m.bytes),
        format::millis(m.blocked_ms)
    );
    if let Some(bytes) = m.left_out {
        let _ = writeln!(
            out,
            "  {} left out: the programs have declared that they overwrite it",
            format::bytes(bytes)
        );
    }
    if let Some(d) = generations::status(&m).declared {
        out += &declared::text(&d, None)
            .lines()
            .fold(String::new(), |all, line| all + "  " + line + "\n");
    }
    let phases: Vec<String> = m
        .phases_ms
        .iter()
        .map(|(p, ms)| format!("{p} {}", format::millis(*ms)))
        .collect();
    let _ = writeln!(out, "  phases: {}\n", phases.join(", "));
    let rows: Vec<Vec<String>> = m.files.iter().map(|f| vec![f.name.clone(), format::bytes(f.bytes)]).collect();
    out += &format::table(&["file", ">size"], &rows);
    out.push('\n');
    let rows: Vec<Vec<String>> = m.chunks.iter().map(|c| vec![c.id.to_string(), c.pages.to_string()]).collect();
    out += &format::table(&[">chunk", ">pages"], &rows);
    out.push('\n');
    out += &sections(&dir.join(JOB_FILE))?;
    Ok(out)
}

/// Longest section whose contents are shown: they are in memory as a whole then, more than once, and the image may be anybody's.
const MOST_SHOWN: u64 = 16 << 20;

/// Longest section whose contents are laid out in lines: those are many times longer where values lie within values.
const MOST_LAID_OUT: usize = 1 << 20;

/// Longest text of the contents of a file.
const MOST_TEXT: usize = 64 << 20;

/// Text that does not grow beyond [`MOST_TEXT`].
#[derive(Default)]
struct Text(String);

impl Text {
    fn add(&mut self, more: &str) -> std::io::Result<()> {
        if self.0.len() + more.len() > MOST_TEXT {
            let what = format!("what it holds is longer than {} as text", format::bytes(MOST_TEXT as u64));
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
        }
        self.0 += more;
        Ok(())
    }

    /// The JSON document in `payload`.
    fn add_json(&mut self, payload: &[u8]) -> serde_json::Result<()> {
        if payload.len() > MOST_LAID_OUT {
            serde_json::from_slice::<serde::de::IgnoredAny>(payload)?;
            return self.add(&String::from_utf8_lossy(payload)).map_err(serde_json::Error::io);
        }
        let value: serde_json::Value = serde_json::from_slice(payload)?;
        serde_json::to_writer_pretty(self, &value)
    }
}

impl std::io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // The encoder writes whole characters.
        let text = std::str::from_utf8(bytes).map_err(std::io::Error::other)?;
        self.add(text).map(|()| bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Is given the kind and the payload of a section.
type Show<'a> = &'a mut dyn FnMut(u32, Option<&[u8]>) -> Result<(), ImageError>;

/// Gives the kind and the payload of each section to `show`; none of one that is too long to be shown.
fn each_section(path: &Path, show: Show<'_>) -> Result<(), ImageError> {
    sections::each(path, &mut |kind, payload| {
        let mut data = Vec::new();
        let read = payload.take(MOST_SHOWN + 1).read_to_end(&mut data);
        let length = read.map_err(|e| ImageError::io("read", path, e))? as u64;
        show(kind, (length <= MOST_SHOWN).then_some(&data))
    })
}

fn sections(path: &Path) -> Result<String, Failure> {
    let (mut out, mut texts, mut shown) = (Text::default(), Text::default(), HashSet::new());
    let too_long = |e: std::io::Error| ImageError::damaged(path, e.to_string());
    each_section(path, &mut |kind, payload| {
        let name = match kind {
            k if k == Kind::Job as u32 => "job",
            k if k == Kind::Descriptors as u32 => "descriptors",
            k if k == Kind::Extents as u32 => "extents",
            _ => "unknown",
        };
        let Some(payload) = payload else {
            let most = format::bytes(MOST_SHOWN);
            let line = format!("section {name} (kind {kind}, longer than {most}: not shown)\n");
            return out.add(&line).map_err(too_long);
        };
        let line = format!("section {name} (kind {kind}, {})\n", format::bytes(payload.len() as u64));
        out.add(&line).map_err(too_long)?;
        if name != "unknown" && !shown.insert(kind) {
            return Err(ImageError::damaged(path, format!("a second section {name}")));
        }
        let damaged = |e: serde_json::Error| ImageError::damaged(path, format!("section {name}: {e}"));
        if kind == Kind::Job as u32 {
            let job: Job = serde_json::from_slice(payload).map_err(damaged)?;
            texts.add(&format!("\n{}", job_text(&job))).map_err(too_long)?;
        } else if kind == Kind::Descriptors as u32 {
            texts.add("\ndescriptors and shared objects:\n").map_err(too_long)?;
            texts.add_json(payload).map_err(damaged)?;
            texts.add("\n").map_err(too_long)?;
        }
        Ok(())
    })?;
    Ok(out.0 + &texts.0)
}

fn job_text(job: &Job) -> String {
    let mut out = format!(
        "captured {} on {} (Linux {}, {}); command is process {}, agent was {}\n",
        format::time(job.time_unix_s),
        job.host,
        job.kernel,
        job.arch,
        job.root_pid,
        job.agent.pid
    );
    for p in &job.processes {
        out += &process_text(p);
    }
    out + &code_text(&job.code)
}

/// The files that processes map, and what they cost, once for all generations that have them.
fn code_text(files: &[MappedFile]) -> String {
    if files.is_empty() {
        return String::new();
    }
    let stored = files.iter().map(MappedFile::stored).fold(0, u64::saturating_add);
    let rows: Vec<Vec<String>> = files
        .iter()
        .map(|f| {
            let build = f.identity.build_id.clone().unwrap_or_default();
            vec![format::bytes(f.stored()), f.path.to_string(), build]
        })
        .collect();
    let head = format!(
        "\nmapped files stored, once for all checkpoints that have them: {}, {}\n",
        files.len(),
        format::bytes(stored)
    );
    head + &format::table(&[">size", "file", "build"], &rows)
}

fn process_text(p: &Process) -> String {
    let state = match p.state {
        ProcessState::Running => "running".to_owned(),
        ProcessState::Stopped(s) => format!("stopped by signal {s}"),
        ProcessState::Zombie(status) => format!("zombie, {}", format::wait_status(status)),
    };
    let mut out = format!(
        "\nprocess {} {} ({state}): parent {}, group {}, session {}, uid {}\n",
        p.pid, p.comm, p.ppid, p.pgid, p.sid, p.creds.uids[0]
    );
    if matches!(p.state, ProcessState::Zombie(_)) {
        return out;
    }
    let _ = writeln!(out, "  executable {}\n  directory  {}", p.exe, p.cwd);
    if p.shares_mm_with != 0 {
        let handlers = if p.shares_handlers {
            ", and shares signal handlers"
        } else {
            ""
        };
        let _ = writeln!(out, "  memory     that of process {}{handlers}", p.shares_mm_with);
    }
    let lengths = p.vmas.iter().map(|v| v.end.saturating_sub(v.start));
    let mapped = lengths.fold(0u64, u64::saturating_add);
    let _ = writeln!(
        out,
        "  {} threads, {} mappings of {} of address space",
        p.threads.len(),
        p.vmas.len(),
        format::bytes(mapped)
    );
    if let Some(l) = &p.left_out {
        let lengths = l.dead.iter().map(|(start, end, _)| end.saturating_sub(*start));
        let _ = writeln!(
            out,
            "  {} in {} ranges without access rights until they are overwritten, {} of packed pages",
            format::bytes(lengths.fold(0u64, u64::saturating_add)),
            l.dead.len(),
            format::bytes(l.packed_bytes)
        );
    }
    if let Some(point) = &p.point {
        let (number, bytes) = (point.number, point.payload.len());
        let _ = writeln!(out, "  waits in belay_point number {number}, with a payload of {bytes} bytes");
    }
    for t in &p.threads {
        let rip = t.regs.get(16).copied().unwrap_or(0);
        let _ = writeln!(
            out,
            "    thread {} {} at {rip:#x}, {} signals pending",
            t.tid,
            t.comm,
            t.pending.len()
        );
    }
    for v in &p.vmas {
        let bit = |b: u32, c| if v.prot & b != 0 { c } else { '-' };
        let what = match &v.kind {
            VmaKind::Anonymous { name: None } => String::new(),
            VmaKind::Anonymous { name: Some(n) } => format!("[anon:{n}]"),
            VmaKind::HugeTlb { page_bytes } => format!("huge pages of {}", format::bytes(*page_bytes)),
            VmaKind::Stack => "[stack]".into(),
            VmaKind::Heap => "[heap]".into(),
            VmaKind::FilePrivate { path, offset, .. } => format!("{path} +{offset:#x}"),
            VmaKind::PrivateObject { object, offset } => format!("private {:x}:{} +{offset:#x}", object.dev, object.ino),
            VmaKind::Shared { object, offset, .. } => format!("shared {:x}:{} +{offset:#x}", object.dev, object.ino),
            VmaKind::SysvShm { shmid, .. } => format!("System V segment {shmid}"),
            VmaKind::Vdso(name) => format!("[{name}]"),
            VmaKind::Ring => "[aio]".into(),
            VmaKind::Vsyscall => "[vsyscall]".into(),
            VmaKind::Device(path) => format!("place of {path}"),
        };
        let _ = writeln!(
            out,
            "    {:012x}-{:012x} {}{}{} {what}",
            v.start,
            v.end,
            bit(1, 'r'),
            bit(2, 'w'),
            bit(4, 'x')
        );
    }
    out
}

fn index(path: &Path) -> Result<String, Failure> {
    let mut table = None;
    each_section(path, &mut |kind, payload| {
        if kind == Kind::Extents as u32 {
            let payload = payload.ok_or_else(|| ImageError::damaged(path, "its table is too long to be shown"))?;
            table = Some(extents::decode(path, payload)?);
        }
        Ok(())
    })?;
    let table = table.ok_or_else(|| ImageError::damaged(path, "no section Extents"))?;
    let total: u64 = table.iter().map(|e| e.bytes).sum();
    let rows: Vec<Vec<String>> = table
        .iter()
        .map(|e| {
            vec![
                format!("{:012x}", e.vaddr),
                format::bytes(e.bytes),
                e.chunk.to_string(),
                format!("{:#x}", e.offset()),
            ]
        })
        .collect();
    let head = format!("{} extents, {}\n", table.len(), format::bytes(total));
    Ok(head + &format::table(&["address", ">bytes", ">chunk", ">offset"], &rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_image::sections::SectionFile;

    /// What is said of a file with these sections.
    fn said(name: &str, all: &[(Kind, &str)]) -> Result<String, Failure> {
        let path = std::env::temp_dir().join(format!("belay-inspect-{name}-{}", std::process::id()));
        let mut file = SectionFile::new();
        all.iter().for_each(|(kind, text)| file.push(*kind, text.as_bytes().to_vec()));
        file.write(&path).unwrap();
        let said = sections(&path);
        std::fs::remove_file(&path).unwrap();
        said
    }

    /// So many lists within each other, as often as they fit into `bytes`.
    fn nested(depth: usize, bytes: usize) -> String {
        let one = "[".repeat(depth) + &"]".repeat(depth);
        format!("[{}]", vec![one; bytes / (2 * depth + 1)].join(","))
    }

    #[test]
    fn a_text_is_not_many_times_longer_than_its_section() {
        let short = said("short", &[(Kind::Descriptors, r#"{"a":[1]}"#)]).unwrap();
        assert!(short.contains("{\n  \"a\": [\n    1\n  ]\n}\n"), "{short}");
        let long = nested(100, 8 << 20);
        let shown = said("long", &[(Kind::Descriptors, &long)]).unwrap();
        assert!(shown.len() < long.len() + 1000 && shown.contains(&long));
        let why = said("deep", &[(Kind::Descriptors, &nested(100, MOST_LAID_OUT - 1000))]).unwrap_err();
        assert!(why.to_string().contains("longer than 64.0 MiB as text"), "{why}");
        let why = said("twice", &[(Kind::Descriptors, "1"), (Kind::Descriptors, "1")]).unwrap_err();
        assert!(why.to_string().contains("second section descriptors"), "{why}");
        assert!(said("broken", &[(Kind::Descriptors, &long[1..])]).is_err());
    }
}
