//! Memory that processes of two nodes of a job share on one host. Each node restores what it has captured, so they would share it no longer: the checkpoint is refused.
//!
//! While the nodes capture, each holds a socket name for every such object, in the host's list of abstract names. Whoever finds one taken knows of the other.

use crate::capture::Session;
use crate::fault::{At, Fault};
use crate::files;
use crate::model::Holder;
use crate::sys::sock;
use crate::SharedMapping;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// How the names of objects in memory begin.
const OBJECTS: [&str; 4] = ["/dev/shm/", "/dev/zero", "/memfd:", "/anon_hugepage"];

/// Claims what the processes have mapped and only memory holds. To be called before the last meeting of the nodes, and the session kept until after it.
pub(crate) fn claim(s: &mut Session<'_>) -> Result<(), (Holder, String, Fault)> {
    let Some(job) = s.group.map(|g| g.job()) else { return Ok(()) };
    let mut known = BTreeSet::new();
    for p in s.processes {
        for m in p.shared.iter().filter(|m| is_memory(m)) {
            // Their numbers mean something within a namespace only.
            let space = m
                .sysv_shmid
                .and_then(|_| Some(std::fs::metadata(format!("/proc/{}/ns/ipc", p.task)).ok()?.ino()));
            if !known.insert((m.object.dev, m.object.ino, space)) {
                continue;
            }
            let name = format!(
                "belay {job:016x} {:x} {:x} {:x}",
                m.object.dev,
                m.object.ino,
                space.unwrap_or(0)
            );
            let refused = |fault| (Holder { pid: p.pid, fd: -1 }, format!("mapping of {}", m.name), fault);
            match hold(&name) {
                Ok(held) => s.claims.push(held),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                    return Err(refused(Fault::Refused(
                        "another part of the job on this host shares this memory; start what shares memory through one ssh or one daemon of mpirun, not as tasks of srun".into(),
                    )))
                }
                Err(e) => return Err(e).at("claim it for this part of the job").map_err(refused),
            }
        }
    }
    Ok(())
}

/// Whether only memory, or a file that does not go with the job, holds what is written there. What many programs only read (nscd's tables) does not count.
fn is_memory(m: &SharedMapping) -> bool {
    let is_object = m.name.is_empty() || OBJECTS.iter().any(|o| m.name.starts_with(o));
    let shown = Path::new(&m.name);
    let is_written = || m.prot & libc::PROT_WRITE as u32 != 0;
    m.sysv_shmid.is_some() || is_object || is_written() && (files::is_volatile(shown, None) || !files::is_named(shown, m.object))
}

fn hold(name: &str) -> io::Result<OwnedFd> {
    let socket = sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0)?;
    sock::bind(socket.as_raw_fd(), &sock::Addr::abstract_name(name))?;
    Ok(socket)
}
