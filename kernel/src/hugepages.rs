//! Explicit huge pages (hugetlbfs): memory in them is recognised by its device.
//!
//! The kernel keeps one internal file system for each page size, to which anonymous mappings, memory files and System V
//! segments of that size belong.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

/// Size of the pages of memory on device `dev`; `None` when these are ordinary pages.
pub fn page_bytes(dev: u64) -> Option<u64> {
    static KNOWN: OnceLock<Vec<(u64, u64)>> = OnceLock::new();
    KNOWN
        .get_or_init(devices)
        .iter()
        .find(|(d, _)| *d == dev)
        .map(|(_, size)| *size)
}

/// The flag bits by which `mmap` and `memfd_create` know a page size.
pub fn size_flags(page_bytes: u64) -> u32 {
    page_bytes.max(1).ilog2() << libc::MAP_HUGE_SHIFT
}

/// (device, page size) for each size that this kernel has.
fn devices() -> Vec<(u64, u64)> {
    let Ok(dir) = std::fs::read_dir("/sys/kernel/mm/hugepages") else {
        return Vec::new();
    };
    let sizes = dir.filter_map(|e| {
        let name = e.ok()?.file_name();
        let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        Some(kib << 10)
    });
    sizes.filter_map(|size| Some((device(size)?, size))).collect()
}

fn device(page_bytes: u64) -> Option<u64> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | size_flags(page_bytes);
    // SAFETY: the name is a live string. An empty memory file takes no pages.
    let fd = unsafe { libc::memfd_create(c"belay-size".as_ptr(), flags) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the kernel has just returned it.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.metadata().ok().map(|m| m.dev())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_huge_pages_are_told_from_others() {
        for (dev, size) in devices() {
            assert!(size.is_power_of_two() && size > 4096);
            assert_eq!(page_bytes(dev), Some(size));
        }
        assert_eq!(page_bytes(std::fs::metadata("/").unwrap().dev()), None);
        assert_eq!(size_flags(2 << 20), libc::MAP_HUGE_2MB as u32);
    }
}
