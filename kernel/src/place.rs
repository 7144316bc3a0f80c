//! New memory of the calling process, by its address: for what is no Rust object, as it outlives the program or is
//! another program's.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Maps `bytes` bytes, which stay, exactly at `at` where that is given: it fails when something is mapped there. They
/// are the first of `file`, shared, or private zeros; `flags` are those of `mmap` beside that. Returns where they are.
pub fn map(at: Option<u64>, bytes: u64, prot: i32, flags: i32, file: Option<BorrowedFd<'_>>) -> io::Result<u64> {
    let kind = match file {
        Some(_) => libc::MAP_SHARED,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    };
    let exactly = if at.is_some() { libc::MAP_FIXED_NOREPLACE } else { 0 };
    // No other mapping is to be replaced.
    let flags = flags & !libc::MAP_FIXED | kind | exactly;
    let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
    let (at, file) = (at.unwrap_or(0) as *mut libc::c_void, file.map_or(-1, |f| f.as_raw_fd()));
    // SAFETY: a new mapping, where there is none.
    let at = unsafe { libc::mmap(at, bytes, prot, flags, file, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(at as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_is_not_replaced() {
        const PAGE: u64 = 4096;
        let at = map(None, PAGE, libc::PROT_READ, 0, None).unwrap();
        let again = map(Some(at), PAGE, libc::PROT_READ, libc::MAP_FIXED, None);
        assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::EEXIST));
    }
}
