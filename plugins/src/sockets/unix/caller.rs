//! Who is told to be at the other end (SO_PEERCRED, SO_PEERGROUPS): the kernel notes who calls `connect` and `listen`, or
//! `socketpair`. For sockets that somebody else has made, a thread that does nothing else calls as them.

use crate::fault::{At, Fault};
use crate::files::owner::me;
use crate::sys::sock;
use belay_kernel::proc::Status;
use rustix::process::{dumpable_behavior, getegid, geteuid, getgroups, set_dumpable_behavior};
use rustix::thread::{capabilities, set_capabilities, set_thread_groups, set_thread_res_gid, set_thread_res_uid, Gid, Uid};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::RawFd;

/// Most groups of a process, as the kernel has it.
const MAX_GROUPS: usize = 65536;
/// So many are mostly enough.
const FEW_GROUPS: usize = 64;
/// Stands for each that a user namespace does not know.
const NOBODY: u32 = u32::MAX;

/// Effective user and group of who has called, and the supplementary groups.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Caller {
    user: u32,
    group: u32,
    groups: Vec<u32>,
}

impl Caller {
    /// Whom socket `raw` tells of; `None`: of nobody.
    pub(super) fn told_by(raw: RawFd) -> Result<Option<Self>, Fault> {
        let [_, user, group] = sock::get::<[u32; 3]>(raw, libc::SOL_SOCKET, libc::SO_PEERCRED).at("ask for its peer")?;
        if user == NOBODY {
            return Ok(None);
        }
        let ask = |most: usize| sock::get_bytes(raw, libc::SOL_SOCKET, libc::SO_PEERGROUPS, most * size_of::<u32>());
        let told = match ask(FEW_GROUPS) {
            Err(e) if e.raw_os_error() == Some(libc::ERANGE) => ask(MAX_GROUPS),
            told => told,
        };
        let told = told.at("ask for the groups of its peer")?;
        let (groups, _) = told.as_chunks();
        Ok(Some(Self {
            user,
            group,
            groups: groups.iter().map(|id| u32::from_ne_bytes(*id)).collect(),
        }))
    }

    /// The thread that `status` is of, were it to call.
    pub(super) fn of(status: &Status) -> Option<Self> {
        let ids = |key| status.list(key).into_iter().filter_map(|id| u32::try_from(id).ok());
        Some(Self {
            user: ids("Uid").nth(1)?,
            group: ids("Gid").nth(1)?,
            groups: ids("Groups").collect(),
        })
    }

    /// Who owns something.
    pub(super) fn owner((user, group): (u32, u32)) -> Self {
        Self {
            user,
            group,
            groups: Vec::new(),
        }
    }

    /// Its user.
    pub(super) fn user(&self) -> u32 {
        self.user
    }

    /// The calling thread.
    fn here() -> io::Result<Self> {
        let mut groups: Vec<u32> = getgroups()?.iter().map(|id| id.as_raw()).collect();
        groups.sort_unstable();
        Ok(Self {
            user: geteuid().as_raw(),
            group: getegid().as_raw(),
            groups,
        })
    }

    /// Makes the calling thread call as this one from now on, with the rights that it has: the files of sockets may be
    /// where the other is not let in. A user namespace can deny to set groups; then no process of the job has others.
    fn be(&self) -> io::Result<()> {
        let rights = capabilities(None)?;
        let groups: Vec<Gid> = self.groups.iter().map(|id| Gid::from_raw_unchecked(*id)).collect();
        match set_thread_groups(&groups) {
            Err(rustix::io::Errno::PERM) => {}
            // The user namespace does not know all of them: better none than those of the restart.
            Err(rustix::io::Errno::INVAL) => set_thread_groups(&[])?,
            set => set?,
        }
        set_thread_res_gid(None, Gid::from_raw_unchecked(self.group), None)?;
        set_thread_res_uid(None, Uid::from_raw_unchecked(self.user), None)?;
        Ok(set_capabilities(None, rights)?)
    }
}

/// Does `call` as `caller`, where one is known. An ordinary user can call as nobody else, and as whom the user namespace
/// does not know nobody can. What a process of the job, where it is `inside`, would then be told of another one must not
/// be root's user where it was not.
pub(super) fn call_as<T: Send>(caller: Option<&Caller>, inside: bool, call: impl Fn() -> io::Result<T> + Sync) -> io::Result<T> {
    let Some(caller) = caller.filter(|_| me() == 0) else {
        return call();
    };
    if *caller == Caller::here()? {
        return call();
    }
    let dumpable = dumpable_behavior()?;
    let apart = || caller.be().map(|()| call());
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, apart)?;
        thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
    });
    // The kernel has taken it away from the whole process with the change of the user.
    if dumpable_behavior()? != dumpable {
        set_dumpable_behavior(dumpable)?;
    }
    match done {
        Ok(done) => done,
        Err(e) if inside && caller.user != 0 && e.raw_os_error() != Some(libc::EINVAL) => Err(io::Error::new(
            e.kind(),
            format!(
                "its other end is told to be of user {} (SO_PEERCRED), as whom this restart may not call: {e}",
                caller.user
            ),
        )),
        Err(error) => {
            tracing::debug!(%error, ?caller, "SO_PEERCRED tells of another user than before");
            call()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn others_are_told_of_as_whom_root_has_called() {
        let own = Caller::here().unwrap();
        let other = Caller {
            user: 65533,
            group: 65532,
            groups: vec![7, 65531],
        };
        let told = |caller| {
            let (a, _b) = call_as(caller, true, || sock::pair(libc::SOCK_STREAM)).unwrap();
            Caller::told_by(a.as_raw_fd()).unwrap()
        };
        let before = dumpable_behavior().unwrap();
        let expected = if me() == 0 { &other } else { &own };
        assert_eq!(told(Some(&other)).as_ref(), Some(expected));
        assert_eq!(dumpable_behavior().unwrap(), before);
        assert_eq!(Caller::here().unwrap(), own);
        assert_eq!(told(None), Some(own));
        let nobody = sock::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
        assert_eq!(Caller::told_by(nobody.as_raw_fd()).unwrap(), None);
    }
}
