//! Guard regions (`madvise(MADV_GUARD_INSTALL)`, Linux 6.13): pages in the middle of a mapping that nobody may touch.
//! They take no mapping of their own, so only the page table knows of them.

use crate::pagemap::scan::scan_tells_guard;
use std::ptr::null_mut;
use std::sync::OnceLock;

/// Makes a guard region.
pub const INSTALL: i32 = 102;
const PAGE: usize = 4096;

/// What this kernel knows of guard regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guards {
    /// It has none.
    None,
    /// It has them, and a scan of the page table tells where (Linux 6.16).
    Told,
    /// It has them, and a scan does not tell: such a page looks like one that is swapped out, and cannot be read.
    Silent,
}

/// What this kernel knows.
pub fn support() -> Guards {
    static KNOWN: OnceLock<Guards> = OnceLock::new();
    *KNOWN.get_or_init(|| probe().unwrap_or(Guards::None))
}

/// Tries with a page of this process.
fn probe() -> std::io::Result<Guards> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping.
    let page = unsafe { libc::mmap(null_mut(), PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: our own mapping, which nobody touches.
    let installed = unsafe { libc::madvise(page, PAGE, INSTALL) } == 0;
    let told = installed && scan_tells_guard(page as u64);
    // SAFETY: our own mapping, not used any more.
    unsafe { libc::munmap(page, PAGE) };
    Ok(match installed {
        false => Guards::None,
        true if told => Guards::Told,
        true => Guards::Silent,
    })
}
