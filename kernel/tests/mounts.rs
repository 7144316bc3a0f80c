//! A mount whose name is no text is as good as any other.

use belay_kernel::room::Gauges;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Mounts a file system in memory at `place`, for this process alone.
fn mount_at(place: &Path) -> bool {
    let place = CString::new(place.as_os_str().as_bytes()).unwrap();
    let (none, kind) = (std::ptr::null(), c"tmpfs".as_ptr());
    // SAFETY: takes numbers, and strings that are terminated and live.
    unsafe {
        let alone = libc::unshare(libc::CLONE_NEWNS) == 0 || libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) == 0;
        let private = libc::MS_REC | libc::MS_PRIVATE;
        alone
            && libc::mount(none, c"/".as_ptr(), none, private, none.cast()) == 0
            && libc::mount(kind, place.as_ptr(), kind, 0, none.cast()) == 0
    }
}

#[test]
fn free_memory_is_told_where_a_mount_has_a_name_that_is_no_text() {
    let mut name = std::env::temp_dir().into_os_string().into_encoded_bytes();
    name.extend(format!("/belay-mounts \\{} ", std::process::id()).as_bytes());
    name.push(0xff);
    let place = Path::new(std::ffi::OsStr::from_bytes(&name));
    std::fs::create_dir(place).unwrap();
    // SAFETY: the C library lets a child of a process with threads allocate memory.
    let status = match unsafe { libc::fork() } {
        0 => {
            let told = || Gauges::of([std::process::id().cast_signed()]).is_ok();
            let code = match mount_at(place) {
                false => 77,
                true => i32::from(!told()),
            };
            // SAFETY: has no preconditions.
            unsafe { libc::_exit(code) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `status` is valid for writing.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            status
        }
    };
    std::fs::remove_dir(place).unwrap();
    // 77: nothing may be mounted here.
    assert!([0, 77 << 8].contains(&status), "{status:#x}");
}
