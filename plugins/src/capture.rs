//! The capture flow: tables, then descriptions, then the objects behind several descriptions.
//!
//! A descriptor of a process is duplicated into the agent with `pidfd_getfd` while it is looked at, and no longer: a
//! job may have more than one process may. Numbers that refer to the same description are found with `kcmp`, which is
//! told them as the processes have them, and whose order makes each look-up a binary search. Descriptors in flight in
//! sockets have no number in the job: the agent keeps those. They join the list as they are found, so the loop over
//! descriptions ends when there are no new ones.

use crate::env::CaptureEnv;
use crate::fault::{refuse, At, Fault, Refusal};
use crate::files::{self, FileSet};
use crate::kind::{Candidate, Look};
use crate::kinds::{self, KINDS};
use crate::launcher::Streams;
use crate::limit::RaisedLimit;
use crate::locks;
use crate::model::{DescId, Description, Descriptors, FsPath, IN_FLIGHT};
use crate::rebuild::shortage;
use crate::session::{Found, Session};
use crate::sockets::names;
use crate::state::Described;
use crate::sys::{fd, sock};
use crate::tables::tables;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Captures all descriptors and shared objects.
pub(crate) fn capture(env: CaptureEnv<'_>) -> Result<Descriptors, Vec<Refusal>> {
    let _limit = RaisedLimit::raise();
    let processes = env.processes;
    let names = env.names.with(&names::addresses());
    let mut out = Descriptors::default();
    out.parts.put(names.with_programs(processes.iter().map(|p| p.stack)));
    let mut session = Session::new(env);
    let mut refusals = Vec::new();
    tables(&mut session, &mut refusals);
    if refusals.is_empty() {
        KINDS.iter().for_each(|kind| (kind.survey)(&mut session));
        descriptions(&mut session, &mut out, &mut refusals);
    }
    if refusals.is_empty() {
        KINDS
            .iter()
            .for_each(|kind| (kind.finish)(&mut session, &mut out, &mut refusals));
    }
    if refusals.is_empty() {
        let read = KINDS.iter().try_for_each(|kind| (kind.contents)(&mut session, &mut out));
        refusals.extend(read.err());
    }
    if !refusals.is_empty() {
        return Err(refusals);
    }
    out.working = files::working(processes);
    out.entered = files::entered(processes);
    out.sessions = files::sessions(processes);
    out.tables = session.tables;
    out.notes = session.notes;
    let files: &mut FileSet = session.sets.of();
    out.private = files.private(processes);
    out.versions = kinds::versions(&out);
    let is_mapped = |f: &&files::Sought| !f.windows.is_empty() || f.object.ids.iter().any(|id| out.private.contains(id));
    let mapped = files.objects.iter().filter(is_mapped).count();
    match shortage(&out, mapped, RaisedLimit::highest()) {
        Some(refusal) => Err(vec![refusal]),
        None => Ok(out),
    }
}

/// Captures each description, those too that are found on the way.
fn descriptions(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
    let mut id = 0;
    while id < s.found.len() {
        match describe(s, id) {
            Ok(d) => out.descriptions.push(d),
            Err(e) if e.is_for_want_of_descriptors() => refusals.push(refusal(&s.found[id], &too_many())),
            Err(e) => refusals.push(refusal(&s.found[id], &e)),
        }
        id += 1;
    }
}

/// A refusal that names the descriptor.
fn refusal(found: &Found, fault: &Fault) -> Refusal {
    let object = match found.holder.fd {
        IN_FLIGHT => format!("descriptor in flight ({})", found.link.display()),
        fd => format!("fd {fd} ({})", found.link.display()),
    };
    fault.of(found.holder.pid, object)
}

/// The agent keeps what is in flight.
fn too_many() -> Fault {
    let limit = RaisedLimit::highest();
    Fault::Refused(format!(
        "more descriptors are in flight in sockets than the agent, which must hold them, may have ({limit}, the hard limit RLIMIT_NOFILE): raise it before `belay launch` (limits.conf, ulimit -Hn), or let the program receive them"
    ))
}

/// Captures one description.
fn describe(s: &mut Session<'_>, id: DescId) -> Result<Description, Fault> {
    let kind = classify(s, id)?;
    let found = &s.found[id];
    Ok(Description {
        holder: found.holder,
        name: FsPath::from(found.link.as_path()),
        flags: found.flags,
        pos: found.info.pos().at("read fdinfo")?,
        owner: found.owner,
        locks: locks::of_description(found)?,
        kind,
    })
}

/// Finds out what a description is, and captures it.
fn classify(s: &mut Session<'_>, id: DescId) -> Result<Described, Fault> {
    let link = s.found[id].link.clone();
    let seen = look(s, id, link.as_os_str())?;
    match kinds::capture(s, &seen) {
        Some(captured) => captured,
        None => strange(&seen.look),
    }
}

/// What can be told of it without knowing its kind.
fn look<'a>(s: &Session<'_>, id: DescId, link: &'a OsStr) -> Result<Candidate<'a>, Fault> {
    let found = &s.found[id];
    let bytes = link.as_bytes();
    let anonymous = bytes.strip_prefix(b"anon_inode:").map(|name| match name {
        [b'[', inner @ .., b']'] => inner,
        name => name,
    });
    let anonymous = anonymous.or_else(|| bytes.starts_with(b"pidfd:").then_some(b"pidfd"));
    let known = match (s.sets.get::<Streams>().is_some_and(|streams| streams.has(id)), anonymous) {
        (true, _) => Some(Look::Launcher),
        _ if found.flags & libc::O_PATH != 0 => Some(Look::Name),
        (_, name) => name.map(|name| Look::Anonymous(OsStr::from_bytes(name))),
    };
    if let Some(look) = known {
        return Ok(Candidate { id, look, taken: None });
    }
    let format = found.stat.st_mode & libc::S_IFMT;
    let taken = match format {
        libc::S_IFREG | libc::S_IFSOCK | libc::S_IFCHR => Some(s.take(id)?),
        _ => None,
    };
    let raw = taken.as_ref().map_or(-1, |taken| taken.raw());
    let option = |o| sock::get::<i32>(raw, libc::SOL_SOCKET, o).at("read its type");
    let look = match format {
        libc::S_IFREG => Look::Regular(fd::fs_magic(raw).at("read the type of its file system")?),
        libc::S_IFDIR => Look::Directory,
        libc::S_IFIFO => Look::Fifo,
        libc::S_IFSOCK => Look::Socket(option(libc::SO_DOMAIN)?, option(libc::SO_TYPE)?, option(libc::SO_PROTOCOL)?),
        libc::S_IFCHR => Look::Device(libc::major(found.stat.st_rdev), libc::minor(found.stat.st_rdev)),
        other => Look::Other(other),
    };
    Ok(Candidate { id, look, taken })
}

/// Refuses what no kind recognises.
fn strange<T>(look: &Look<'_>) -> Result<T, Fault> {
    refuse(match look {
        Look::Anonymous(name) => format!(
            "{} descriptors cannot be checkpointed; close it or run without it",
            name.display()
        ),
        Look::Regular(files::SECRETMEM_MAGIC) => "secret memory (memfd_secret) cannot be read, by design".into(),
        Look::Socket(_, _, libc::IPPROTO_MPTCP) => {
            "sockets of Multipath TCP cannot be checkpointed; run it with plain TCP (programs in Go: GODEBUG=multipathtcp=0)".into()
        }
        Look::Socket(family, kind, protocol) => format!(
            "sockets of family {family}, type {kind}, protocol {protocol} cannot be checkpointed; close it before the checkpoint"
        ),
        Look::Device(major, minor) => {
            format!("device {major}:{minor} has state that cannot be saved; close it before the checkpoint or run without it")
        }
        Look::Other(libc::S_IFBLK) => "block devices cannot be checkpointed; open it for the time of access only".into(),
        Look::Other(format) => format!("files of type {format:#o} cannot be checkpointed"),
        other => format!("{other:?} cannot be checkpointed"),
    })
}
