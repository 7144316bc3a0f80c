//! What each thread may do: its users, groups and capabilities, and what it has given up. Threads of a process usually
//! have all of it in common, but each has its own.

use belay_image::model::Credentials;
use belay_kernel::proc::Status;

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

/// Why a thread of this status cannot be saved. `led`: the restart that the job comes from has put it under a filter of
/// belay's own.
pub(crate) fn unsupported(status: &Status, led: bool) -> Option<&'static str> {
    let ours = led && status.list("Seccomp_filters") == [1];
    match status.text("Seccomp") {
        Some("1") => return Some("is in seccomp's strict mode, in which nothing can be asked of it; start it without its sandbox"),
        Some(mode) if mode != "0" && !ours => {
            return Some("runs under a seccomp filter, which cannot be saved; start it without its sandbox");
        }
        _ => {}
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
        let says = |text: &str, led| unsupported(&Status::parse(text.as_bytes()), led);
        assert_eq!(says("Seccomp:\t0\nSeccomp_filters:\t0\n", false), None);
        assert!(says("Seccomp:\t1\n", true).is_some_and(|s| s.contains("strict")));
        assert!(says("Seccomp:\t2\nSeccomp_filters:\t1\n", false).is_some_and(|s| s.contains("filter")));
        assert_eq!(says("Seccomp:\t2\nSeccomp_filters:\t1\n", true), None);
        assert!(says("Seccomp:\t2\nSeccomp_filters:\t2\n", true).is_some());
        assert!(says("x86_Thread_features:\tshstk wrss \n", false).is_some_and(|s| s.contains("shadow stack")));
        assert_eq!(
            says("x86_Thread_features:\t\nx86_Thread_features_locked:\tshstk\n", false),
            None
        );
        assert!(says("untag_mask:\t0x81ffffffffffffff\n", false).is_some());
        assert_eq!(says("untag_mask:\t0xffffffffffffffff\n", false), None);
    }
}
