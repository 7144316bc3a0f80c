//! What `PAGEMAP_SCAN` is given, and what it says.

use super::PAGE;
use std::fs::File;
use std::os::fd::AsRawFd;

pub(super) const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
pub(super) const PM_SCAN_WP_MATCHING: u64 = 1;
pub(super) const PM_SCAN_CHECK_WPASYNC: u64 = 2;
pub(super) const PAGE_IS_WRITTEN: u64 = 1 << 1;
pub(super) const PAGE_IS_FILE: u64 = 1 << 2;
pub(super) const PAGE_IS_PRESENT: u64 = 1 << 3;
pub(super) const PAGE_IS_SWAPPED: u64 = 1 << 4;
pub(super) const PAGE_IS_PFNZERO: u64 = 1 << 5;
pub(super) const PAGE_IS_GUARD: u64 = 1 << 8;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Region {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) categories: u64,
}

#[repr(C)]
#[derive(Default)]
pub(super) struct ScanArg {
    pub(super) size: u64,
    pub(super) flags: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) walk_end: u64,
    pub(super) vec: u64,
    pub(super) vec_len: u64,
    pub(super) max_pages: u64,
    pub(super) category_inverted: u64,
    pub(super) category_mask: u64,
    pub(super) category_anyof_mask: u64,
    pub(super) return_mask: u64,
}

/// Whether a scan by this kernel tells that the page at `at` of this process is a guard. Linux 6.15 has a bit for it in
/// `/proc/PID/pagemap`, but refuses (EINVAL) a scan that asks.
pub(crate) fn scan_tells_guard(at: u64) -> bool {
    let Ok(file) = File::open("/proc/self/pagemap") else {
        return false;
    };
    let mut regions = [Region::default()];
    let mut arg = scan_arg(at, at + PAGE, &mut regions);
    arg.return_mask = PAGE_IS_GUARD;
    // SAFETY: `arg` and the array it points to live across the call and have the sizes it states.
    let found = unsafe { libc::ioctl(file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
    found == 1 && regions[0].categories & PAGE_IS_GUARD != 0
}

/// A scan of `start..end` for anonymous data, with room for the regions found.
pub(super) fn scan_arg(start: u64, end: u64, regions: &mut [Region]) -> ScanArg {
    ScanArg {
        size: size_of::<ScanArg>() as u64,
        start,
        end,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        category_inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
        category_mask: PAGE_IS_FILE | PAGE_IS_PFNZERO,
        category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        ..ScanArg::default()
    }
}
