//! A user who has a group as the first one is a member of it, although the group does not name that user.

use belay_kernel::trust::{find, Untrusted};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Puts `file` in the place of /etc/passwd, for this process alone.
fn show_users(file: &Path) -> bool {
    let file = CString::new(file.as_os_str().as_bytes()).unwrap();
    let none = std::ptr::null();
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: takes numbers, and strings that are terminated and live.
    unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none, c"/".as_ptr(), none, private, none.cast()) == 0
            && libc::mount(file.as_ptr(), c"/etc/passwd".as_ptr(), none, libc::MS_BIND, none.cast()) == 0
    }
}

#[test]
fn a_directory_that_a_user_of_roots_group_may_write_is_refused() {
    // SAFETY: has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return; // others cannot show other users
    }
    let top = std::env::temp_dir().join(format!("belay-group-{}", std::process::id()));
    let (dir, users) = (top.join("d"), top.join("passwd"));
    std::fs::create_dir_all(dir.join("job")).unwrap();
    std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o775)).unwrap();
    let root = "root:x:0:0::/root:/bin/sh\n";
    for (others, refused) in [
        ("", false),
        ("operator:x:11:0::/root:/sbin/nologin\n", false),
        ("x:x:1234:1234::/:/bin/sh\n", false),
        ("x:x:1234:0::/:/bin/sh\n", true),
    ] {
        std::fs::write(&users, format!("{root}{others}")).unwrap();
        // SAFETY: the C library lets a child of a process with threads allocate memory.
        let status = match unsafe { libc::fork() } {
            0 => {
                let code = match (show_users(&users), find(&dir.join("job"))) {
                    (false, _) => 77,
                    (true, Ok(_)) => 0,
                    (true, Err(Untrusted::Others { at, .. })) if at == dir => 1,
                    (true, Err(_)) => 2,
                };
                // SAFETY: has no preconditions.
                unsafe { libc::_exit(code) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: `status` is valid for writing.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                status >> 8
            }
        };
        // 77: nothing may be mounted here.
        assert!([77, i32::from(refused)].contains(&status), "{others}: {status}");
    }
    std::fs::remove_dir_all(top).unwrap();
}
