//! Memory of another process: `process_vm_readv` and `process_vm_writev`, and writing through `/proc/PID/mem`, which a tracer may do whatever the protection.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Reads `buf.len()` bytes at `addr` of process `pid`. A partial read is an error.
pub fn read(pid: i32, addr: u64, buf: &mut [u8]) -> io::Result<()> {
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
    match usize::try_from(n) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(n) if n == buf.len() => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// Writes all of `data` at `addr` of process `pid`, where it may write itself. A partial write is an error.
pub fn write(pid: i32, addr: u64, data: &[u8]) -> io::Result<()> {
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
    match usize::try_from(n) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(n) if n == data.len() => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// Reads one plain value at `addr` of process `pid`.
pub fn read_u64(pid: i32, addr: u64) -> io::Result<u64> {
    let mut b = [0; 8];
    read(pid, addr, &mut b)?;
    Ok(u64::from_le_bytes(b))
}

/// Access to the memory of a traced process through `/proc/PID/mem`.
#[derive(Debug)]
pub struct Memory(File);

impl Memory {
    /// Opens the memory of `pid` for reading and writing.
    pub fn open(pid: i32) -> io::Result<Self> {
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .map(Self)
    }

    /// Reads exactly `buf.len()` bytes at `addr`.
    pub fn read(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buf, addr)
    }

    /// Writes all of `data` at `addr`, also to pages mapped without write permission.
    pub fn write(&self, addr: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, addr)
    }
}
