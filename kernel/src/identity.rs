//! Becoming another user, for good.

use crate::{check, trust};
use std::io;

/// Group of a user who has no entry: nobody's.
const NO_GROUP: u32 = 65534;
/// Most groups of a user, as the kernel has it.
const MAX_GROUPS: usize = 65536;

/// First group and all groups of user `id`, as the system's tables say.
fn groups(id: u32) -> (u32, Vec<u32>) {
    let Some((name, first)) = trust::user(id) else {
        return (NO_GROUP, Vec::new());
    };
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut n = libc::c_int::try_from(groups.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the name is a zero-terminated string, the list is valid for writing as many as `n` says.
        let found = unsafe { libc::getgrouplist(name.as_ptr(), first, groups.as_mut_ptr(), &raw mut n) };
        if found >= 0 {
            groups.truncate(usize::try_from(n).unwrap_or(0));
            return (first, groups);
        }
        if groups.len() >= MAX_GROUPS {
            return (first, vec![first]);
        }
        groups.resize(groups.len() * 4, 0);
    }
}

/// Users and groups of the calling thread: real, effective and saved.
pub fn of_thread() -> io::Result<([u32; 3], [u32; 3])> {
    let (mut uids, mut gids) = ([0; 3], [0; 3]);
    let [real, effective, saved] = &mut uids;
    // SAFETY: all three are valid for writing.
    check(unsafe { libc::getresuid(real, effective, saved) }.into())?;
    let [real, effective, saved] = &mut gids;
    // SAFETY: as above.
    check(unsafe { libc::getresgid(real, effective, saved) }.into())?;
    Ok((uids, gids))
}

/// Makes this process, all its threads, one of user `id` with that user's groups and no rights of before: there is no
/// way back. What others of that user's processes may look at it does not become: it may hold what only its own user
/// should know.
pub fn become_user(id: u32) -> io::Result<()> {
    let (first, groups) = groups(id);
    // SAFETY: the list is valid for reading its length.
    check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) }.into())?;
    // SAFETY: take numbers only.
    check(unsafe { libc::setresgid(first, first, first) }.into())?;
    // SAFETY: takes numbers only. From another user's, root's effective and permitted capabilities go with it.
    check(unsafe { libc::setresuid(id, id, id) }.into())?;
    let (now, _) = of_thread()?;
    // SAFETY: takes a number only; it must not succeed.
    if now != [id; 3] || (id != 0 && unsafe { libc::setuid(0) } == 0) {
        return Err(io::Error::other("the identity of before is still there"));
    }
    Ok(())
}
