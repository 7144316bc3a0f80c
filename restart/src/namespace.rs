//! New PID, mount and IPC namespaces (and a user namespace for an ordinary user), with errors that say which setting forbids them.

use crate::fail::{Outcome, RestartError};
use crate::sys;
use belay_kernel::namespaces::enter_new;
use rustix::io::Errno;
use rustix::mount::{mount, mount_bind, mount_change, unmount, MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{chroot, fchdir};
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use rustix::time::ClockId;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

/// Capability to make namespaces without a user namespace.
const CAP_SYS_ADMIN: u64 = 1 << 21;
/// Capability to choose the numbers of new processes.
const CAP_CHECKPOINT_RESTORE: u64 = 1 << 40;

/// A mount of which nothing is executed and that makes nobody anything else.
const ONLY_DATA: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Where a job is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// In new PID, mount, IPC and time namespaces, with CAP_SYS_ADMIN.
    Namespaces,
    /// In these and a user namespace, which gives the rights.
    UserNamespace,
    /// In the machine's own namespaces, with CAP_CHECKPOINT_RESTORE (see `initial`).
    Initial,
}

impl Way {
    /// The way that is possible here, in this order; the second where none is, to fail with a reason.
    pub(crate) fn choose() -> Self {
        let held = capabilities();
        if held & CAP_SYS_ADMIN != 0 {
            Way::Namespaces
        } else if held & CAP_CHECKPOINT_RESTORE != 0 && !user_namespaces_work() {
            Way::Initial
        } else {
            Way::UserNamespace
        }
    }

    /// Whether processes can only have the caller's user, groups and bounding set.
    pub(crate) fn is_ordinary(self) -> bool {
        self != Way::Namespaces
    }
}

fn capabilities() -> u64 {
    let status = belay_kernel::proc::Status::read(std::process::id() as i32);
    status.ok().and_then(|s| s.hex("CapEff")).unwrap_or(0)
}

/// Whether the caller is an ordinary user, who lacks CAP_SYS_ADMIN.
pub(crate) fn is_ordinary() -> bool {
    capabilities() & CAP_SYS_ADMIN == 0
}

/// Effective user and group of the caller.
pub(crate) fn own_user() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

/// Tries all that a restart in a user namespace begins with.
fn user_namespaces_work() -> bool {
    let (uid, gid) = own_user();
    match clone(Way::UserNamespace) {
        Err(_) => false,
        Ok(0) => sys::exit_now(i32::from(enter(Way::UserNamespace, uid, gid).is_err())),
        Ok(pid) => sys::wait(pid, libc::__WALL).is_ok_and(|(_, status)| status == 0),
    }
}

/// Makes the child that is PID 1 of the new namespaces, or only takes its part. Returns 0 in the child.
pub(crate) fn clone(way: Way) -> Outcome<i32> {
    let new = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC;
    let flags = match way {
        Way::Namespaces => new,
        Way::UserNamespace => new | libc::CLONE_NEWUSER,
        Way::Initial => 0,
    };
    sys::fork(flags, libc::SIGCHLD, 0).map_err(|e| refused(&e, way == Way::UserNamespace))
}

/// The second way, for errors of the first.
const OTHERWISE: &str = "restart as root, or with a copy of belay that has cap_checkpoint_restore (see docs/limits.md)";

fn refused(e: &io::Error, user: bool) -> RestartError {
    let setting = |path: &str| std::fs::read_to_string(path).map(|s| s.trim().to_owned()).unwrap_or_default();
    let reason = match e.raw_os_error() {
        Some(libc::EPERM) if user && setting("/proc/sys/kernel/unprivileged_userns_clone") == "0" => {
            format!("the site forbids user namespaces to ordinary users (kernel.unprivileged_userns_clone = 0): set it to 1, or {OTHERWISE}")
        }
        Some(libc::EPERM) if user && setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" => {
            format!("the site forbids user namespaces to programs without an AppArmor profile (kernel.apparmor_restrict_unprivileged_userns = 1): allow them for belay, or {OTHERWISE}")
        }
        // Filters tell the C library by the second that it should do without `clone3`.
        Some(libc::EPERM | libc::ENOSYS) => {
            format!("the kernel or the container's system call filter forbids new namespaces: restart outside the container, or {OTHERWISE}")
        }
        Some(libc::ENOSPC | libc::EUSERS) => format!(
            "no further namespace is allowed here: user.max_user_namespaces = {}, user.max_pid_namespaces = {}, and namespaces nest at most 32 deep: \
             restart from outside a restarted job, raise the limits, or {OTHERWISE}",
            setting("/proc/sys/user/max_user_namespaces"),
            setting("/proc/sys/user/max_pid_namespaces")
        ),
        Some(libc::EINVAL) => "this kernel has no PID, IPC or user namespaces".to_owned(),
        _ => e.to_string(),
    };
    RestartError::Forbidden { reason }
}

/// Where a second `/proc` is mounted, upon which nothing is: a directory of PID 1 that nobody looks into. In a user
/// namespace of its own (a sandbox) a program may mount a `/proc` only where its mount namespace has one that no other
/// mount hides a part of, as those of `shown` do.
const UNHIDDEN: &str = "/proc/1/map_files";

/// In the child: maps the user and group to themselves, makes mounts private and mounts a `/proc` of the new PID namespace.
pub(crate) fn enter(way: Way, uid: u32, gid: u32) -> Outcome<()> {
    if way == Way::UserNamespace {
        let write = |file: &str, text: String| {
            std::fs::write(format!("/proc/self/{file}"), text).map_err(|e| RestartError::Forbidden {
                reason: format!("write /proc/self/{file}: {e}: the site restricts user namespaces; {OTHERWISE}"),
            })
        };
        write("setgroups", "deny".into())?;
        write("uid_map", format!("{uid} {uid} 1"))?;
        write("gid_map", format!("{gid} {gid} 1"))?;
        // All of them: that takes no privilege. Only quotas of projects need it.
        let _ = std::fs::write("/proc/self/projid_map", "0 0 4294967295");
    }
    make_private().map_err(|e| RestartError::Forbidden {
        reason: format!("make mounts private: {e}"),
    })?;
    mount("proc", "/proc", "proc", ONLY_DATA, None).map_err(|e| RestartError::Forbidden {
        reason: match e {
            Errno::PERM => {
                "mount /proc: not permitted: parts of the present /proc are hidden (as containers do): restart outside the \
                 container, or give it an unmasked /proc"
                    .to_owned()
            }
            _ => format!("mount /proc: {e}"),
        },
    })?;
    if let Err(error) = mount("proc", UNHIDDEN, "proc", ONLY_DATA, None) {
        tracing::warn!(%error, "sandboxes in this job cannot mount a /proc");
    }
    show_queues();
    Ok(())
}

/// Makes the mounts of the new namespace private: what is mounted here from now on shows nowhere else.
fn make_private() -> io::Result<()> {
    let private = || mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE);
    match private() {
        Err(Errno::INVAL) => {}
        done => return Ok(done?),
    }
    // In a chroot "/" is no mount. Who enters a mount namespace, though it be the own one, stands at its root; from
    // there the way back is by descriptors.
    let directory = |path: &str| {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
            .open(path)
    };
    let (root, here) = (directory("/")?, directory(".")?);
    let own = File::open("/proc/self/ns/mnt")?;
    move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::Mount))?;
    let made = private();
    fchdir(&root)?;
    chroot(c".")?;
    fchdir(&here)?;
    Ok(made?)
}

/// Shows the message queues of the new IPC namespace where those of the old one were shown.
fn show_queues() {
    const MQUEUE_MAGIC: libc::__fsword_t = 0x1980_0202;
    let fs = rustix::fs::statfs(c"/dev/mqueue");
    if fs.is_ok_and(|fs| fs.f_type == MQUEUE_MAGIC) {
        if let Err(error) = mount("mqueue", "/dev/mqueue", "mqueue", ONLY_DATA, None) {
            tracing::warn!(%error, "/dev/mqueue does not show the job's queues");
        }
    }
}

/// Nanoseconds of a second.
const SECOND: i64 = 1_000_000_000;

/// What the clocks said at the checkpoint, nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clocks {
    /// `CLOCK_MONOTONIC`.
    pub(crate) monotonic_ns: u64,
    /// `CLOCK_BOOTTIME`, which is ahead of it by the time that the machine has slept; `None` where nobody has asked.
    pub(crate) boottime_ns: Option<u64>,
}

impl Clocks {
    /// How many seconds the monotonic clock of this machine is behind, if it is.
    pub(crate) fn behind(self) -> Option<i64> {
        let then = i64::try_from(self.monotonic_ns).unwrap_or(i64::MAX);
        let seconds = then.saturating_sub(now(ClockId::Monotonic)) / SECOND;
        (seconds > 0).then_some(seconds)
    }
}

/// In PID 1, before the agent is forked: gives all later processes a time namespace in which these clocks go on from
/// their values at the checkpoint. Time-outs and absolute timers of the job then mean what they meant, on a machine that
/// has been booted since, too.
///
/// Without such namespaces (kernels before 5.6) the clocks jump; returns why.
///
/// It is so for processes that are made from now on, and for the calling one after [`follow_clock`].
pub(crate) fn continue_clock(then: Clocks) -> io::Result<()> {
    const OFFSETS: &str = "/proc/self/timens_offsets";
    let monotonic = i64::try_from(then.monotonic_ns).unwrap_or(i64::MAX);
    let shift = monotonic.saturating_sub(now(ClockId::Monotonic));
    let boottime = then.boottime_ns.map(|ns| i64::try_from(ns).unwrap_or(i64::MAX));
    let boottime = boottime.map_or(shift, |then| then.saturating_sub(now(ClockId::Boottime)));
    enter_new(LinkNameSpaceType::Time)?;
    // They are told from the clocks of the machine, which these can be shifted from already.
    let inherited = std::fs::read_to_string(OFFSETS)?;
    let line = |clock: &str, shift: i64| {
        let offset = offset(&inherited, clock).saturating_add(shift);
        format!("{clock} {} {}\n", offset.div_euclid(SECOND), offset.rem_euclid(SECOND))
    };
    std::fs::write(OFFSETS, line("monotonic", shift) + &line("boottime", boottime))
}

/// What a clock says, nanoseconds.
fn now(clock: ClockId) -> i64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec.saturating_mul(SECOND).saturating_add(now.tv_nsec)
}

/// By how many nanoseconds `clock` is shifted, in the words of `/proc/PID/timens_offsets`; 0 where it is not named.
fn offset(text: &str, clock: &str) -> i64 {
    let of_clock = |line: &str| {
        let mut words = line.split_whitespace();
        let named = words.next() == Some(clock);
        let mut number = || words.next().and_then(|w| w.parse::<i64>().ok());
        let (seconds, nanoseconds) = (number()?, number()?);
        named.then(|| seconds.saturating_mul(SECOND).saturating_add(nanoseconds))
    };
    text.lines().find_map(of_clock).unwrap_or(0)
}

/// Gives the calling process, which has one thread, the clock that its children have been given: when a process was
/// started is told in the time of who asks.
pub(crate) fn follow_clock() -> io::Result<()> {
    const OF_CHILDREN: &str = "/proc/self/ns/time_for_children";
    let namespace = |link| std::fs::read_link(link).ok();
    if namespace(OF_CHILDREN) == namespace("/proc/self/ns/time") {
        return Ok(());
    }
    let children = std::fs::File::open(OF_CHILDREN)?;
    Ok(move_into_link_name_space(children.as_fd(), Some(LinkNameSpaceType::Time))?)
}

/// Mounts a memory file system upon `target` in which, as in `/tmp`, everybody may make files.
pub(crate) fn mount_memory(target: &str) -> io::Result<()> {
    mount("tmpfs", target, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, None)?;
    std::fs::set_permissions(target, std::fs::Permissions::from_mode(0o1777))
}

/// Shows `text` as what can be read in `target`, a file in `/proc`.
pub(crate) fn show_text(text: &str, target: &str) -> io::Result<()> {
    // The memory file system lives on under what is mounted of it.
    let file = format!("{UNHIDDEN}/text");
    mount("tmpfs", UNHIDDEN, "tmpfs", ONLY_DATA, None)?;
    let written =
        std::fs::write(&file, text).and_then(|()| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o444)));
    let shown = written.and_then(|()| Ok(mount_bind(&file, target)?));
    unmount(UNHIDDEN, UnmountFlags::DETACH)?;
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read_as_the_kernel_writes_them() {
        let text = "monotonic           7         0\nboottime          -12         5\n";
        assert_eq!(offset(text, "monotonic"), 7 * SECOND);
        assert_eq!(offset(text, "boottime"), -12 * SECOND + 5);
        assert_eq!(offset("", "boottime"), 0);
    }
}
