//! Small wrappers for test cases: they take numbers, because what matters is which number refers to what.

use std::ffi::CString;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::path::Path;

pub(crate) fn ok(r: i32) -> i32 {
    assert!(r >= 0, "{}", std::io::Error::last_os_error());
    r
}

/// Opens `path` at number `at`, not close-on-exec.
pub(crate) fn open(path: &Path, flags: i32, at: i32) {
    let c = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: `c` is a valid C string.
    place_raw(ok(unsafe { libc::open(c.as_ptr(), flags, 0o644) }), at);
}

pub(crate) fn place(fd: impl Into<OwnedFd>, at: i32) {
    place_raw(fd.into().into_raw_fd(), at);
}

/// Moves a number to `at`.
pub(crate) fn place_raw(fd: i32, at: i32) {
    if fd == at {
        return;
    }
    // SAFETY: numbers only; the test owns both.
    unsafe {
        ok(libc::dup2(fd, at));
        libc::close(fd);
    }
}

pub(crate) fn dup(fd: i32, at: i32) {
    // SAFETY: numbers only.
    ok(unsafe { libc::dup2(fd, at) });
}

pub(crate) fn close(fd: i32) {
    // SAFETY: numbers only; the test owns it.
    ok(unsafe { libc::close(fd) });
}

pub(crate) fn fcntl(fd: i32, cmd: i32, arg: i32) -> i32 {
    // SAFETY: commands with a number as argument.
    ok(unsafe { libc::fcntl(fd, cmd, arg) })
}

pub(crate) fn flags(fd: i32) -> i32 {
    fcntl(fd, libc::F_GETFL, 0)
}

pub(crate) fn set_nonblock(fd: i32) {
    fcntl(fd, libc::F_SETFL, flags(fd) | libc::O_NONBLOCK);
}

pub(crate) fn is_open(fd: i32) -> bool {
    // SAFETY: numbers only.
    unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
}

pub(crate) fn write(fd: i32, data: &[u8]) {
    let mut rest = data;
    while !rest.is_empty() {
        // SAFETY: `rest` is valid for reading.
        let n = unsafe { libc::write(fd, rest.as_ptr().cast(), rest.len()) };
        assert!(n > 0, "write to {fd}: {}", std::io::Error::last_os_error());
        rest = &rest[n as usize..];
    }
}

/// One read; `Err` holds the error number.
pub(crate) fn try_read(fd: i32, max: usize) -> Result<Vec<u8>, i32> {
    let mut buf = vec![0u8; max];
    // SAFETY: `buf` is valid for writing.
    let n = unsafe { libc::read(fd, buf.as_mut_ptr().cast(), max) };
    if n < 0 {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap());
    }
    buf.truncate(n as usize);
    Ok(buf)
}

pub(crate) fn read(fd: i32, max: usize) -> Vec<u8> {
    try_read(fd, max).unwrap_or_else(|e| panic!("read {fd}: {}", std::io::Error::from_raw_os_error(e)))
}

/// Reads exactly `n` bytes.
pub(crate) fn read_exact(fd: i32, n: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < n {
        let more = read(fd, n - out.len());
        assert!(!more.is_empty(), "end after {} of {n} bytes", out.len());
        out.extend(more);
    }
    out
}

/// What is readable now, which must not block.
pub(crate) fn poll(fd: i32, events: i16, ms: i32) -> i16 {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: one valid entry.
    ok(unsafe { libc::poll(&mut p, 1, ms) });
    p.revents
}

pub(crate) fn pos(fd: i32) -> i64 {
    // SAFETY: numbers only.
    unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }
}

pub(crate) fn pattern(n: usize, seed: u8) -> Vec<u8> {
    (0..n)
        .map(|i| (i as u32).wrapping_mul(2654435761).to_le_bytes()[3] ^ seed)
        .collect()
}

pub(crate) fn pipe(at: (i32, i32), flags: i32) {
    let mut p = [0; 2];
    // SAFETY: room for two numbers.
    ok(unsafe { libc::pipe2(p.as_mut_ptr(), flags) });
    place_raw(p[0], at.0);
    place_raw(p[1], at.1);
}

pub(crate) fn socketpair(kind: i32, at: (i32, i32)) {
    let mut p = [0; 2];
    // SAFETY: room for two numbers.
    ok(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, p.as_mut_ptr()) });
    place_raw(p[0], at.0);
    place_raw(p[1], at.1);
}

/// Whether two numbers refer to the same description: moving the offset through one shows through the other.
pub(crate) fn same_description(a: i32, b: i32) -> bool {
    let me = std::process::id() as i32;
    belay_kernel::kcmp::compare_files(me, a, me, b).unwrap().is_eq()
}
