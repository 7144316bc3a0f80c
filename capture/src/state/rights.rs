//! What each thread may do: its users, groups and capabilities, and what it has given up. Threads of a process usually
//! have all of it in common, but each has its own.

use crate::CaptureError;
use belay_image::model::Credentials;
use belay_kernel::proc::Status;
use belay_kernel::{kcmp, pidfd};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// What `/proc/PID/task/TID/status` says of it.
pub(crate) const KEYS: [&str; 12] = [
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "x86_Thread_features",
];
/// No address is taken for another one (linear address masking is off).
const WHOLE_ADDRESSES: &str = "0xffffffffffffffff";

/// The system call filters that every thread of the job is under without having entered one. Filters are inherited and
/// never taken away, so their number tells whether a thread has entered more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Filters(Option<i64>);

impl Filters {
    /// Those of the agent of this status, and where the job is `led` the one that its restart has put it under. Before
    /// Linux 5.9 nothing tells how many there are.
    pub(crate) fn inherited(agent: &Status, led: bool) -> Self {
        Self(number_of_filters(agent).map(|n| n + i64::from(led)))
    }
}

fn number_of_filters(status: &Status) -> Option<i64> {
    match status.text("Seccomp") {
        Some("0") | None => Some(0),
        Some(_) => status.list("Seccomp_filters").first().copied(),
    }
}

/// Why a thread of this status cannot be saved. `inherited`: what it is under like all of the job.
pub(crate) fn unsupported(status: &Status, inherited: Filters) -> Option<&'static str> {
    if status.text("Seccomp") == Some("1") {
        return Some("is in seccomp's strict mode, in which nothing can be asked of it; start it without its sandbox");
    }
    let filters = number_of_filters(status);
    if filters != Some(0) && (filters.is_none() || filters != inherited.0) {
        return Some("runs under a seccomp filter of its own, which cannot be saved; start it without its sandbox");
    }
    if status.text("x86_Thread_features").is_some_and(|f| !f.is_empty()) {
        return Some(
            "has a shadow stack (ARCH_SHSTK_ENABLE), which cannot be saved; start it with GLIBC_TUNABLES=glibc.cpu.x86_shstk=off",
        );
    }
    if status.text("untag_mask").is_some_and(|mask| mask != WHOLE_ADDRESSES) {
        return Some("has parts of addresses ignored (ARCH_ENABLE_TAGGED_ADDR), which cannot be restored; run it without that");
    }
    None
}

/// Whether the sandbox that belay itself is in, if any, allows what a checkpoint asks for; the agent may ask it of itself
/// in any case.
pub(crate) fn check_sandbox(agent: i32) -> Result<(), CaptureError> {
    let allowed = |step: &str, asked: io::Result<()>| match asked.map_err(|e| (e.raw_os_error(), e)) {
        Err((Some(libc::EPERM | libc::EACCES | libc::ENOSYS), e)) => {
            let reason = format!(
                "the kernel, or the sandbox that belay was started in, does not allow it ({e}): let the sandbox's system call filter allow it (docker run --cap-add SYS_PTRACE), or start belay outside of it"
            );
            Err(CaptureError::failed(step, reason))
        }
        Err((_, e)) => Err(CaptureError::system(step, e)),
        Ok(()) => Ok(()),
    };
    let compared = kcmp::compare(agent, agent, kcmp::Object::Vm).map(drop);
    allowed("compare processes (kcmp)", compared)?;
    let duplicated = pidfd::open(agent).and_then(|own| pidfd::getfd(own.as_fd(), own.as_raw_fd()).map(drop));
    allowed("duplicate descriptors (pidfd_getfd)", duplicated)
}

/// The credentials of a thread of this status.
pub(crate) fn credentials(status: &Status) -> Credentials {
    let four = |key: &str| {
        let l = status.list(key);
        [0, 1, 2, 3].map(|i| l.get(i).and_then(|v| u32::try_from(*v).ok()).unwrap_or(0))
    };
    let cap = |key: &str| status.hex(key).unwrap_or(0);
    Credentials {
        uids: four("Uid"),
        gids: four("Gid"),
        groups: status
            .list("Groups")
            .into_iter()
            .filter_map(|g| u32::try_from(g).ok())
            .collect(),
        cap_inheritable: cap("CapInh"),
        cap_permitted: cap("CapPrm"),
        cap_effective: cap("CapEff"),
        cap_bounding: cap("CapBnd"),
        cap_ambient: cap("CapAmb"),
        no_new_privs: status.text("NoNewPrivs") == Some("1"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_rights_away_is_refused_by_name() {
        let agent = Filters::inherited(&Status::parse(b"Seccomp:\t0\nSeccomp_filters:\t0\n"), false);
        let says = |text: &str| unsupported(&Status::parse(text.as_bytes()), agent);
        assert_eq!(says("Seccomp:\t0\nSeccomp_filters:\t0\n"), None);
        assert!(says("Seccomp:\t1\n").is_some_and(|s| s.contains("strict")));
        assert!(says("Seccomp:\t2\nSeccomp_filters:\t1\n").is_some_and(|s| s.contains("filter")));
        assert!(says("x86_Thread_features:\tshstk wrss \n").is_some_and(|s| s.contains("shadow stack")));
        assert_eq!(says("x86_Thread_features:\t\nx86_Thread_features_locked:\tshstk\n"), None);
        assert!(says("untag_mask:\t0x81ffffffffffffff\n").is_some());
        assert_eq!(says("untag_mask:\t0xffffffffffffffff\n"), None);
    }
    #[test]
    fn only_filters_that_all_of_the_job_has_are_let_pass() {
        let passes = |agent: &str, led, thread: &str| {
            let agent = Filters::inherited(&Status::parse(agent.as_bytes()), led);
            unsupported(&Status::parse(thread.as_bytes()), agent).is_none()
        };
        let free = "Seccomp:\t0\nSeccomp_filters:\t0\n";
        let [one, two] = [1, 2].map(|n| format!("Seccomp:\t2\nSeccomp_filters:\t{n}\n"));
        assert!(passes(free, true, &one) && !passes(free, false, &one) && !passes(free, true, &two));
        assert!(passes(&one, false, &one) && passes(&one, true, &two) && !passes(&one, false, &two));
        let untold = "Seccomp:\t2\n";
        assert!(!passes(untold, false, untold) && !passes(free, true, untold));
    }
}
