//! Devices that were opened around this library, as by who asks for the verbs by a handle of `dlopen`: nobody makes them
//! again.

use crate::lock::Lock;
use crate::shadow::World;
use std::ffi::CStr;

/// What all devices of the verbs are called.
const DEVICES: &[u8] = b"/dev/infiniband/uverbs";

/// Descriptors that the process has from the one that has forked it, and does without.
static INHERITED: Lock<Vec<i32>> = Lock::new(Vec::new());

/// One that is open and no shadow's.
///
/// # Safety
/// All that are on the lists live.
pub(crate) unsafe fn find(world: &World) -> Option<i32> {
    let known: Vec<i32> = world.contexts.iter().map(|c| (*(**c).real).cmd_fd).collect();
    let inherited = INHERITED.lock();
    opened(DEVICES)
        .into_iter()
        .find(|fd| !known.contains(fd) && !inherited.contains(fd))
}

/// In the child of a fork.
///
/// # Safety
/// No other thread is there.
pub(crate) unsafe fn after_fork() {
    INHERITED.reset(opened(DEVICES));
}

/// The descriptors of files whose path begins so. Not by the C library's functions, which take memory: a thread at the gate
/// may have the allocator's lock.
fn opened(path: &[u8]) -> Vec<i32> {
    let mut found = Vec::new();
    // SAFETY: a name that ends in a zero byte.
    let all = unsafe {
        libc::open(
            c"/proc/self/fd".as_ptr(),
            libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC,
        )
    };
    if all < 0 {
        return found;
    }
    let mut entries = [0u8; 4096];
    loop {
        // SAFETY: as much as there is room for.
        let got = unsafe { libc::syscall(libc::SYS_getdents64, all, entries.as_mut_ptr(), entries.len()) };
        let Some(mut left) = usize::try_from(got)
            .ok()
            .and_then(|n| entries.get(..n))
            .filter(|e| !e.is_empty())
        else {
            break;
        };
        // An entry is an inode, an offset, its length, a kind, and the name.
        while let Some((length, name)) = left.get(16..18).zip(left.get(19..)) {
            let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
            let name = CStr::from_bytes_until_nul(name).unwrap_or(c"");
            let mut target = [0u8; 256];
            // SAFETY: a name, and as much as there is room for.
            let n = unsafe { libc::readlinkat(all, name.as_ptr(), target.as_mut_ptr().cast(), target.len()) };
            let is_one = usize::try_from(n).is_ok_and(|n| target[..n].starts_with(path));
            found.extend(
                name.to_str()
                    .ok()
                    .filter(|_| is_one)
                    .and_then(|name| name.parse::<i32>().ok()),
            );
            left = left.get(length.max(1)..).unwrap_or_default();
        }
    }
    // SAFETY: opened above.
    unsafe { libc::close(all) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn what_is_open_is_found_by_its_path() {
        let path = std::env::temp_dir().join(format!("belay-around-{}-", std::process::id()));
        let path = path.to_str().unwrap();
        // More than are read at a time.
        let files: Vec<File> = (0..200).map(|i| File::create(format!("{path}{i}")).unwrap()).collect();
        let mut found = opened(path.as_bytes());
        found.sort_unstable();
        let mut own: Vec<i32> = files.iter().map(File::as_raw_fd).collect();
        own.sort_unstable();
        (0..200).for_each(|i| std::fs::remove_file(format!("{path}{i}")).unwrap());
        assert_eq!(found, own);
        assert!(opened(DEVICES).is_empty());
    }
}
