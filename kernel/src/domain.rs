//! Security domains (AppArmor, SELinux): in which one a process is.

use crate::proc;
use std::path::PathBuf;

/// That of process `pid`, as the kernel writes it; `None` where nobody looks after domains, or does not tell.
pub fn of(pid: i32) -> Option<Vec<u8>> {
    label(&proc::read_whole(PathBuf::from(format!("/proc/{pid}/attr/current"))).ok()?)
}

/// What a file of the kernel's says.
fn label(text: &[u8]) -> Option<Vec<u8>> {
    let end = text.iter().rposition(|b| !matches!(b, 0 | b'\n'))?;
    Some(text[..=end].to_vec())
}

/// Whether domains `a` and `b` let a process do the same: they are the same domain, or neither confines.
pub fn are_alike(a: &[u8], b: &[u8]) -> bool {
    a == b || confines_nobody(a) && confines_nobody(b)
}

/// AppArmor has the one that is none, and profiles that are in name only; SELinux types of which the usual policies
/// say so.
fn confines_nobody(label: &[u8]) -> bool {
    let of_selinux = label.split(|b| *b == b':').nth(2);
    label == b"unconfined" || label.ends_with(b" (unconfined)") || of_selinux.is_some_and(|t| t.starts_with(b"unconfined_"))
}

/// How a command is started in a domain, as far as words go.
pub fn entered_by(label: &str) -> String {
    match label.rsplit_once(" (") {
        None if label.contains(':') => format!("runcon {label}"),
        Some((profile, _)) => format!("aa-exec -p {profile} --"),
        None => format!("aa-exec -p {label} --"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_as_the_kernel_writes_them() {
        assert_eq!(label(b"unconfined\n"), Some(b"unconfined".to_vec()));
        let user = b"unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023";
        assert_eq!(label(&[user.as_slice(), b"\0"].concat()), Some(user.to_vec()));
        assert_eq!(label(b"\0\n"), None);
        assert_eq!(label(b""), None);
    }

    #[test]
    fn who_is_not_confined_is_nowhere_else() {
        let service = b"system_u:system_r:unconfined_service_t:s0";
        let user = b"unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023";
        let confined = b"system_u:system_r:ping_t:s0";
        assert!(are_alike(service, user) && are_alike(confined, confined));
        assert!(!are_alike(confined, user) && !are_alike(user, confined));
        assert!(are_alike(b"unconfined", b"belay (unconfined)"));
        assert!(are_alike(b"man (enforce)", b"man (enforce)"));
        assert!(!are_alike(b"man (enforce)", b"man (complain)") && !are_alike(b"unconfined", b"man (complain)"));
    }

    #[test]
    fn how_a_domain_is_entered_is_told() {
        assert_eq!(entered_by("a:b:c:s0"), "runcon a:b:c:s0");
        assert_eq!(entered_by("/usr/bin/man (enforce)"), "aa-exec -p /usr/bin/man --");
        assert_eq!(entered_by("unconfined"), "aa-exec -p unconfined --");
    }
}
