//! Memory that processes of two nodes of a job share on one host. Each node restores what it has captured, so they
//! would share it no longer: the checkpoint is refused.
//!
//! While the nodes capture, each holds a socket name for every such object in the host's list of abstract names, and
//! then looks through the list. No node lets go before all have looked, so of two that claim one object at least one
//! sees the other.

use crate::env::SharedMapping;
use crate::fault::{At, Fault, Refusal};
use crate::files;
use crate::kind::{nothing, Kind, Never, NoPart};
use crate::model::Descriptors;
use crate::session::Session;
use crate::sockets::tcp::token;
use crate::sys::sock;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// How the names of objects in memory begin.
const OBJECTS: [&str; 4] = ["/dev/shm/", "/dev/zero", "/memfd:", "/anon_hugepage"];

/// An object in memory, as a name.
fn name(job: u64, m: &SharedMapping, task: i32) -> String {
    // The numbers of System V segments mean something within a namespace only: the true one, not that which a restart
    // shows (`/proc/PID/ns`).
    let ipc = || Some(std::fs::metadata(format!("/proc/{task}/task/{task}/ns/ipc")).ok()?.ino());
    let space = m.sysv_shmid.and_then(|_| ipc()).unwrap_or(0);
    format!("belay {job:016x} {:x} {:x} {space:x} ", m.object.dev, m.object.ino)
}

/// The kind. Nodes meet when TCP connections are captured: claims come before, and last as long as the session.
pub(crate) struct Claims;

/// Shared memory that is this node's.
#[derive(Debug, Default)]
struct Held(Vec<OwnedFd>);

impl Kind for Claims {
    const NAME: &'static str = "Claim";
    const VERSION: u32 = 1;
    type State = Never;
    type Part = NoPart;

    fn finish(s: &mut Session<'_>, _: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        refusals.extend(claim(s).err());
    }

    nothing!(survey, recognise, capture, contents, check, check_part, numbers, ways, prepare, rebuild, join, refill);
    nothing!(install, install_late, settle, install_own, complete);
}

/// Claims what the processes have mapped and only memory holds.
fn claim(s: &mut Session<'_>) -> Result<(), Refusal> {
    let Some(job) = s.group.map(|g| g.job()) else { return Ok(()) };
    // Each object, whether it is written here, and one of its mappings.
    let mut objects: BTreeMap<String, (bool, i32, String)> = BTreeMap::new();
    for p in s.processes {
        for m in p.shared.iter().filter(|m| is_memory(m)) {
            let known = objects
                .entry(name(job, m, p.task))
                .or_insert((false, p.pid, format!("mapping of {}", m.name.display())));
            known.0 |= m.prot & libc::PROT_WRITE as u32 != 0;
        }
    }
    let Some((_, pid, shown)) = objects.values().next().cloned() else {
        return Ok(());
    };
    let failed = |e: Fault| e.of(pid, shown.clone());
    let own = token().at("make a name for shared memory").map_err(&failed)?;
    for (object, (written, ..)) in &objects {
        let name = format!("{object}{} {own}", if *written { 'w' } else { 'r' });
        let held = hold(&name).at("claim shared memory").map_err(&failed)?;
        s.sets.of::<Held>().0.push(held);
    }
    let names = std::fs::read_to_string("/proc/self/net/unix").at("read the list of sockets");
    for claimed in names.map_err(&failed)?.lines().filter_map(|l| l.split_once(" @belay ")) {
        let claimed = format!("belay {}", claimed.1);
        let Some((object, (written, pid, shown))) = objects.iter().find(|(o, _)| claimed.starts_with(*o)) else {
            continue;
        };
        let other = &claimed[object.len()..];
        if !other.ends_with(&own) && (*written || other.starts_with('w')) {
            let reason = "another part of the job on this host shares this memory; start what shares memory through one ssh or one daemon of mpirun, not as tasks of srun";
            return Err(Fault::Refused(reason.into()).of(*pid, shown.clone()));
        }
    }
    Ok(())
}

/// Whether only memory, or a file that does not go with the job, holds what is written there.
fn is_memory(m: &SharedMapping) -> bool {
    let shown = Path::new(&m.name);
    let in_memory =
        m.name.is_empty() || OBJECTS.iter().any(|o| m.name.as_bytes().starts_with(o.as_bytes())) || files::is_volatile(shown, None);
    // `stat` and the maps file disagree about the device on some file systems, so only the name tells.
    m.sysv_shmid.is_some() || in_memory || m.name.as_bytes().ends_with(b" (deleted)") && !files::is_named(shown, m.object)
}

fn hold(name: &str) -> io::Result<OwnedFd> {
    let socket = sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0)?;
    sock::bind(socket.as_raw_fd(), &sock::Addr::abstract_name(name))?;
    Ok(socket)
}
