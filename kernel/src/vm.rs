//! Memory of another process: `process_vm_readv` and `process_vm_writev`, and writing through `/proc/PID/mem`, which a
//! tracer may do whatever the protection.

use crate::kcmp;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

/// Pieces of memory that one call takes (`UIO_MAXIOV`).
const MOST_AT_ONCE: usize = 1024;

/// Reads `buf.len()` bytes at `addr` of process `pid`. A partial read is an error.
pub fn read(pid: i32, addr: u64, buf: &mut [u8]) -> io::Result<()> {
    match read_some(pid, addr, buf)? {
        n if n == buf.len() => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// Reads at most `buf.len()` bytes at `addr` of process `pid`, up to the first page that is not there; returns how many.
pub fn read_some(pid: i32, addr: u64, buf: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    let remote = libc::iovec {
        iov_base: addr as *mut libc::c_void,
        iov_len: buf.len(),
    };
    // SAFETY: `local` describes `buf`, which is valid for writes; the kernel checks the remote side.
    let n = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// As [`read_some`], in pieces of `element` bytes, of which at most 1024 and only whole ones are read.
pub fn read_elements(pid: i32, addr: u64, element: usize, buf: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    let mut remote = Vec::with_capacity(buf.len() / element + 1);
    let mut done = 0;
    while done < buf.len() && remote.len() < MOST_AT_ONCE {
        let len = element.min(buf.len() - done);
        remote.push(libc::iovec {
            iov_base: (addr + done as u64) as *mut libc::c_void,
            iov_len: len,
        });
        done += len;
    }
    // SAFETY: `local` describes `buf`, which is valid for writes; the kernel checks the remote side.
    let n = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// An error where the memory of process or thread `pid` is that of the caller: no values of its own are written by their
/// addresses.
fn is_another(pid: i32) -> io::Result<()> {
    let own = std::process::id().cast_signed();
    // SAFETY: takes numbers only, and signals nobody: it tells whether there is such a thread of this process.
    let thread = || unsafe { libc::syscall(libc::SYS_tgkill, own, pid, 0) } == 0;
    match kcmp::compare(pid, own, kcmp::Object::Vm).map_or_else(|_| thread(), std::cmp::Ordering::is_eq) {
        true => Err(io::ErrorKind::InvalidInput.into()),
        false => Ok(()),
    }
}

/// Writes all of `data` at `addr` of process `pid`, another one, where it may write itself. A partial write is an error.
pub fn write(pid: i32, addr: u64, data: &[u8]) -> io::Result<()> {
    is_another(pid)?;
    let local = libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    };
    let remote = libc::iovec {
        iov_base: addr as *mut libc::c_void,
        iov_len: data.len(),
    };
    // SAFETY: `local` describes `data`, which is only read; the kernel checks the remote side.
    let n = unsafe { libc::process_vm_writev(pid, &local, 1, &remote, 1, 0) };
    whole(n, data.len())
}

/// Writes equal pieces of `data` to `addrs` of process `pid`, another one, where it may write itself.
pub fn write_each(pid: i32, addrs: &[u64], data: &[u8]) -> io::Result<()> {
    is_another(pid)?;
    let Some(piece) = data.len().checked_div(addrs.len()) else {
        return Ok(());
    };
    for (addrs, data) in addrs.chunks(MOST_AT_ONCE).zip(data.chunks(MOST_AT_ONCE * piece.max(1))) {
        let local = libc::iovec {
            iov_base: data.as_ptr().cast_mut().cast(),
            iov_len: data.len(),
        };
        let remote = pieces(addrs, piece);
        // SAFETY: `local` describes `data`, which is only read; the kernel checks the remote side.
        let n = unsafe { libc::process_vm_writev(pid, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
        whole(n, data.len())?;
    }
    Ok(())
}

/// Reads pieces at `addrs` of process `pid` that fill `buf` together.
pub fn read_each(pid: i32, addrs: &[u64], buf: &mut [u8]) -> io::Result<()> {
    let Some(piece) = buf.len().checked_div(addrs.len()) else {
        return Ok(());
    };
    for (addrs, buf) in addrs.chunks(MOST_AT_ONCE).zip(buf.chunks_mut(MOST_AT_ONCE * piece.max(1))) {
        let local = libc::iovec {
            iov_base: buf.as_mut_ptr().cast(),
            iov_len: buf.len(),
        };
        let remote = pieces(addrs, piece);
        // SAFETY: `local` describes `buf`, which is valid for writes; the kernel checks the remote side.
        let n = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
        whole(n, buf.len())?;
    }
    Ok(())
}

fn pieces(addrs: &[u64], bytes: usize) -> Vec<libc::iovec> {
    let piece = |addr: &u64| libc::iovec {
        iov_base: *addr as *mut libc::c_void,
        iov_len: bytes,
    };
    addrs.iter().map(piece).collect()
}

/// Whether `n`, what a transfer of `bytes` has returned, is all.
fn whole(n: isize, bytes: usize) -> io::Result<()> {
    match usize::try_from(n) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(n) if n == bytes => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// Reads the 64-bit words at `addrs` of process `pid`; `None` where there is none to be read.
pub fn read_words(pid: i32, addrs: &[u64]) -> Vec<Option<u64>> {
    let mut out = Vec::with_capacity(addrs.len());
    while let Some(rest) = addrs.get(out.len()..).filter(|rest| !rest.is_empty()) {
        let some = &rest[..rest.len().min(MOST_AT_ONCE)];
        let mut words = vec![0u64; some.len()];
        let local = libc::iovec {
            iov_base: words.as_mut_ptr().cast(),
            iov_len: size_of_val(words.as_slice()),
        };
        let remote = pieces(some, size_of::<u64>());
        // SAFETY: `local` describes `words`, which is valid for writes; the kernel checks the remote side.
        let n = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
        let read = usize::try_from(n).unwrap_or(0) / size_of::<u64>();
        out.extend(words[..read].iter().map(|w| Some(*w)));
        // It ends at the first that cannot be read.
        out.extend((read < some.len()).then_some(None));
    }
    out
}

/// A file mapped for reading, of which only the addresses are used, by calls to which a page that is not there is an error:
/// the file may be shorter by now.
#[derive(Debug)]
pub struct FileAt {
    base: *mut libc::c_void,
    bytes: usize,
}

impl FileAt {
    /// Maps the first `bytes` bytes of `file`, which is open for reading.
    pub fn map(file: impl AsFd, bytes: usize) -> io::Result<Self> {
        let how = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, how, file.as_fd().as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base, bytes })
    }

    /// Where the first byte is, in this process.
    pub fn address(&self) -> u64 {
        self.base.addr() as u64
    }
}

impl Drop for FileAt {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; it is only read by system calls.
        unsafe { libc::munmap(self.base, self.bytes) };
    }
}

/// Access to the memory of a traced process through `/proc/PID/mem`.
#[derive(Debug)]
pub struct Memory {
    file: File,
    is_own: bool,
}

impl Memory {
    /// Opens the memory of `pid` for reading and writing.
    pub fn open(pid: i32) -> io::Result<Self> {
        let path = format!("/proc/{pid}/mem");
        Ok(Self {
            file: std::fs::OpenOptions::new().read(true).write(true).open(path)?,
            is_own: is_another(pid).is_err(),
        })
    }

    /// Reads exactly `buf.len()` bytes at `addr`.
    pub fn read(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, addr)
    }

    /// Writes all of `data` at `addr`, also to pages mapped without write permission, where it is not the caller's own.
    pub fn write(&self, addr: u64, data: &[u8]) -> io::Result<()> {
        if self.is_own {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.file.write_all_at(data, addr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a process sees that has a copy of this one's memory.
    fn in_a_copy(see: impl FnOnce(i32)) {
        let waits = || loop {
            std::thread::park();
        };
        let child = crate::apart::child(waits).unwrap();
        see(child.pid());
        crate::signals::kill(child.pid(), libc::SIGKILL);
        child.wait(0).unwrap();
    }

    #[test]
    fn pieces_are_written_and_read_each_at_its_place() {
        let places = vec![[0u8; 64]; 3000];
        let addrs: Vec<u64> = places.iter().rev().map(|p| p.as_ptr() as u64 + 8).collect();
        let data: Vec<u8> = (0..3000 * 24).map(|i: u32| (i % 251) as u8).collect();
        in_a_copy(|pid| {
            write_each(pid, &addrs, &data).unwrap();
            let mut there = vec![[0u8; 64]; 3000];
            read(pid, places.as_ptr() as u64, there.as_flattened_mut()).unwrap();
            for (place, piece) in there.iter().rev().zip(data.chunks(24)) {
                assert_eq!((&place[..8], &place[8..32], &place[32..]), (&[0; 8][..], piece, &[0; 32][..]));
            }
            let mut back = vec![0; data.len()];
            read_each(pid, &addrs, &mut back).unwrap();
            assert!(back == data);
            let mut with_bad = addrs.clone();
            with_bad[2000] = 16;
            assert!(write_each(pid, &with_bad, &data).is_err() && read_each(pid, &with_bad, &mut back).is_err());
            assert!(write_each(pid, &[], &[]).is_ok() && read_each(pid, &[], &mut []).is_ok());
        });
    }

    #[test]
    fn memory_of_its_own_is_written_by_nobody() {
        let place = Box::new(7u64);
        let at = std::ptr::from_ref(place.as_ref()) as u64;
        // SAFETY: takes nothing and cannot fail.
        let own = [std::process::id().cast_signed(), unsafe { libc::gettid() }];
        for own in own {
            let refused = |done: io::Result<()>| done.is_err_and(|e| e.kind() == io::ErrorKind::InvalidInput);
            assert!(refused(write(own, at, &[1; 8])) && refused(write_each(own, &[at], &[1; 8])));
            assert!(refused(Memory::open(own).unwrap().write(at, &[1; 8])));
        }
        assert_eq!(std::hint::black_box(*place), 7);
    }

    #[test]
    fn words_that_cannot_be_read_keep_no_other_from_being_read() {
        let pid = std::process::id().cast_signed();
        let words: Vec<u64> = (0..3000).collect();
        let mut addrs: Vec<u64> = words.iter().map(|w| std::ptr::from_ref(w) as u64).collect();
        let mut expected: Vec<Option<u64>> = words.iter().map(|w| Some(*w)).collect();
        for bad in [0, 1, 1024, 2999] {
            (addrs[bad], expected[bad]) = (0, None);
        }
        assert_eq!(read_words(pid, &addrs), expected);
        assert_eq!(read_words(pid, &[]), []);
    }
}
