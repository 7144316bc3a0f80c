//! New PID, mount and IPC namespaces (and a user namespace for an ordinary user), with errors that say which setting forbids them.

use crate::fail::{Outcome, RestartError};
use crate::sys;
use std::io;

/// Capability to make namespaces without a user namespace.
const CAP_SYS_ADMIN: u64 = 1 << 21;

/// Whether a user namespace is needed: the caller lacks CAP_SYS_ADMIN.
pub(crate) fn needs_user_namespace() -> bool {
    let effective = belay_kernel::proc::Status::read(std::process::id() as i32)
        .ok()
        .and_then(|s| s.hex("CapEff"))
        .unwrap_or(0);
    effective & CAP_SYS_ADMIN == 0
}

/// Makes the child that is PID 1 of the new namespaces. Returns 0 in the child.
///
/// # Safety
/// The process must have one thread.
pub(crate) unsafe fn clone(user: bool) -> Outcome<i32> {
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | if user { libc::CLONE_NEWUSER } else { 0 };
    // SAFETY: the caller vouches for one thread.
    unsafe { sys::fork(flags as u64, libc::SIGCHLD, 0) }.map_err(|e| refused(&e, user))
}

fn refused(e: &io::Error, user: bool) -> RestartError {
    let setting = |path: &str| std::fs::read_to_string(path).map(|s| s.trim().to_owned()).unwrap_or_default();
    let reason = match e.raw_os_error() {
        Some(libc::EPERM) if user && setting("/proc/sys/kernel/unprivileged_userns_clone") == "0" => {
            "the site forbids user namespaces to ordinary users (kernel.unprivileged_userns_clone = 0): set it to 1, or restart as root".to_owned()
        }
        Some(libc::EPERM) if user && setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" => {
            "the site forbids user namespaces to programs without an AppArmor profile (kernel.apparmor_restrict_unprivileged_userns = 1): \
             allow them for belay, or restart as root"
                .to_owned()
        }
        Some(libc::EPERM) => {
            "the kernel or the container's system call filter forbids new namespaces: restart outside the container, or as root".to_owned()
        }
        Some(libc::ENOSPC | libc::EUSERS) => format!(
            "no further namespace is allowed here: user.max_user_namespaces = {}, user.max_pid_namespaces = {}, and namespaces nest at most 32 deep: \
             restart from outside a restarted job, or raise the limits",
            setting("/proc/sys/user/max_user_namespaces"),
            setting("/proc/sys/user/max_pid_namespaces")
        ),
        Some(libc::EINVAL) => "this kernel has no PID, IPC or user namespaces".to_owned(),
        _ => e.to_string(),
    };
    RestartError::Forbidden { reason }
}

/// In the child: maps the user and group to themselves, makes mounts private and mounts a `/proc` of the new PID namespace.
pub(crate) fn enter(user: bool, uid: u32, gid: u32) -> Outcome<()> {
    if user {
        let write = |file: &str, text: String| {
            std::fs::write(format!("/proc/self/{file}"), text).map_err(|e| RestartError::Forbidden {
                reason: format!("write /proc/self/{file}: {e}: the site restricts user namespaces; restart as root"),
            })
        };
        write("setgroups", "deny".into())?;
        write("uid_map", format!("{uid} {uid} 1"))?;
        write("gid_map", format!("{gid} {gid} 1"))?;
    }
    mount(None, "/", None, libc::MS_REC | libc::MS_PRIVATE).map_err(|e| RestartError::Forbidden {
        reason: format!("make mounts private: {e}"),
    })?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags).map_err(|e| RestartError::Forbidden {
        reason: match e.raw_os_error() {
            Some(libc::EPERM) => {
                "mount /proc: not permitted: parts of the present /proc are hidden (as containers do): restart outside the \
                 container, or give it an unmasked /proc"
                    .to_owned()
            }
            _ => format!("mount /proc: {e}"),
        },
    })?;
    show_queues();
    Ok(())
}

/// Shows the message queues of the new IPC namespace where those of the old one were shown.
fn show_queues() {
    const MQUEUE_MAGIC: libc::__fsword_t = 0x1980_0202;
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a live, terminated name, and `fs` is valid for writing.
    let known = unsafe { libc::statfs(c"/dev/mqueue".as_ptr(), &mut fs) } == 0;
    if known && fs.f_type == MQUEUE_MAGIC {
        let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        if let Err(error) = mount(Some("mqueue"), "/dev/mqueue", Some("mqueue"), flags) {
            tracing::warn!(%error, "/dev/mqueue does not show the job's queues");
        }
    }
}

/// In PID 1, before the agent is forked: gives all later processes a time namespace in which the monotonic clock goes on from `monotonic_ns`, its value at the
/// checkpoint. Time-outs and absolute timers of the job then mean what they meant, on a machine that has been booted since, too.
///
/// Without such namespaces (kernels before 5.6) the clock jumps; returns why.
pub(crate) fn continue_clock(monotonic_ns: u64) -> io::Result<()> {
    const CLONE_NEWTIME: i32 = 0x80;
    const SECOND: i64 = 1_000_000_000;
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is live.
    sys::libc_result(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) })?;
    let offset = i64::try_from(monotonic_ns).unwrap_or(i64::MAX) - (now.tv_sec * SECOND + now.tv_nsec);
    // SAFETY: takes a number only.
    sys::libc_result(unsafe { libc::unshare(CLONE_NEWTIME) })?;
    let (seconds, nanoseconds) = (offset.div_euclid(SECOND), offset.rem_euclid(SECOND));
    let text = format!("monotonic {seconds} {nanoseconds}\nboottime {seconds} {nanoseconds}\n");
    std::fs::write("/proc/self/timens_offsets", text)
}

fn mount(source: Option<&str>, target: &str, kind: Option<&str>, flags: libc::c_ulong) -> io::Result<()> {
    let c = |s: &str| std::ffi::CString::new(s).map_err(io::Error::other);
    let (source, target, kind) = (source.map(c).transpose()?, c(target)?, kind.map(c).transpose()?);
    let ptr = |s: &Option<std::ffi::CString>| s.as_ref().map_or(std::ptr::null(), |s| s.as_ptr());
    // SAFETY: all strings are live and terminated; no data argument.
    sys::libc_result(unsafe { libc::mount(ptr(&source), target.as_ptr(), ptr(&kind), flags, std::ptr::null()) }).map(drop)
}
