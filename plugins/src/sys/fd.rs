//! Calls on descriptors: open, flags, offsets, data.

use super::{check, check_len};
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// `fcntl` commands that the libc crate lacks.
pub(crate) const F_SETSIG: i32 = 10;
/// Reads what [`F_SETSIG`] sets.
pub(crate) const F_GETSIG: i32 = 11;
/// Sets who is signalled: two integers, kind and number.
pub(crate) const F_SETOWN_EX: i32 = 15;
/// Reads what [`F_SETOWN_EX`] sets.
pub(crate) const F_GETOWN_EX: i32 = 16;

/// `struct stat`.
pub(crate) type Stat = libc::stat;

/// Takes ownership of a descriptor number that a system call has just returned.
fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass a number that the kernel has just returned to them and that nobody else knows.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// `path` with the final zero byte.
pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Opens `path`; close-on-exec is set.
pub(crate) fn open(path: &Path, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    // SAFETY: `path` is a valid C string for the call.
    check(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, mode) }).map(own)
}

/// Opens the directory that `path` lies in, to make and look for what has its last name: wherever `path` leads by then.
pub(crate) fn above(path: &Path) -> io::Result<OwnedFd> {
    let dir = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    open(dir, libc::O_PATH | libc::O_DIRECTORY, 0)
}

/// Opens what has the last name of `path` in directory `dir`, and is not a symbolic link, to look at it or to open it again.
pub(crate) fn find_at(dir: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    find_in(dir, path.file_name().ok_or(io::ErrorKind::InvalidInput)?)
}

/// The same of `name`.
pub(crate) fn find_in(dir: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let name = c_path(name.as_ref())?;
    // SAFETY: `name` is a valid C string for the call, and `dir` a live descriptor.
    let fd = unsafe {
        libc::openat(
            dir.as_raw_fd(),
            name.as_ptr(),
            libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC,
        )
    };
    check(fd).map(own)
}

/// Makes a directory with the last name of `path` in directory `dir`, closed to others.
pub(crate) fn mkdir_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    let name = last_name(path)?;
    // SAFETY: as above.
    check(unsafe { libc::mkdirat(dir.as_raw_fd(), name.as_ptr(), 0o700) }).map(drop)
}

/// The same of a FIFO.
pub(crate) fn mkfifo_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    let name = last_name(path)?;
    // SAFETY: as above.
    check(unsafe { libc::mkfifoat(dir.as_raw_fd(), name.as_ptr(), 0o600) }).map(drop)
}

/// Makes a file with the last name of `path` in directory `dir`, where nothing has that name, for this user alone.
pub(crate) fn create_at(dir: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let name = last_name(path)?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: as above.
    check(unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags, 0o600) }).map(own)
}

/// Gives what has the last name of `from` in directory `dir` the last name of `to` there.
pub(crate) fn rename_at(dir: &OwnedFd, from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (last_name(from)?, last_name(to)?);
    // SAFETY: both are valid C strings for the call, and `dir` a live descriptor.
    check(unsafe { libc::renameat(dir.as_raw_fd(), from.as_ptr(), dir.as_raw_fd(), to.as_ptr()) }).map(drop)
}

/// The same where nothing has that name yet.
pub(crate) fn rename_new_at(dir: &OwnedFd, from: &Path, to: &Path) -> io::Result<()> {
    let (old, new, dir_fd) = (last_name(from)?, last_name(to)?, dir.as_raw_fd());
    // SAFETY: both are valid C strings for the call, and `dir` a live descriptor.
    let renamed = unsafe { libc::renameat2(dir_fd, old.as_ptr(), dir_fd, new.as_ptr(), libc::RENAME_NOREPLACE) };
    match check(renamed) {
        // Not every file system can do this.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: as above.
            check(unsafe { libc::linkat(dir_fd, old.as_ptr(), dir_fd, new.as_ptr(), 0) })?;
            unlink_at(dir, from)
        }
        renamed => renamed.map(drop),
    }
}

/// Removes what has the last name of `path` in directory `dir`, and is not a directory.
pub(crate) fn unlink_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    let name = last_name(path)?;
    // SAFETY: as above.
    check(unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), 0) }).map(drop)
}

/// Removes the empty directory that has the last name of `path` in directory `dir`.
pub(crate) fn rmdir_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    let name = last_name(path)?;
    // SAFETY: as above.
    check(unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR) }).map(drop)
}

fn last_name(path: &Path) -> io::Result<CString> {
    c_path(path.file_name().ok_or(io::ErrorKind::InvalidInput)?.as_ref())
}

/// Opens `path` for reading with more `flags`. The program's file keeps its time of last access, where that may be
/// asked for: with a file of another user only root may.
pub(crate) fn open_unnoticed(path: &Path, flags: i32) -> io::Result<OwnedFd> {
    match open(path, flags | libc::O_NOATIME, 0) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => open(path, flags, 0),
        done => done,
    }
}

/// The name under which this process reaches its own descriptor.
pub(crate) fn self_path(fd: RawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{fd}"))
}

/// Opens the object behind `fd` again: a new description of the same file.
pub(crate) fn reopen(fd: RawFd, flags: i32) -> io::Result<OwnedFd> {
    open(&self_path(fd), flags, 0)
}

/// `fstat`.
pub(crate) fn fstat(fd: RawFd) -> io::Result<Stat> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut stat: Stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is valid for writing.
    check(unsafe { libc::fstat(fd, &mut stat) })?;
    Ok(stat)
}

/// What `fstat` would say of a `/proc/PID/fd` whose process has ended: the kernel says nothing of it.
pub(crate) fn lost_directory() -> Stat {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut stat: Stat = unsafe { std::mem::zeroed() };
    stat.st_mode = libc::S_IFDIR | 0o500;
    stat
}

/// `stat`, or `lstat` where `follow` is not set.
pub(crate) fn stat(path: &Path, follow: bool) -> io::Result<Stat> {
    let path = c_path(path)?;
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut stat: Stat = unsafe { std::mem::zeroed() };
    let flags = if follow { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
    // SAFETY: `path` is a valid C string and `stat` is valid for writing.
    check(unsafe { libc::fstatat(libc::AT_FDCWD, path.as_ptr(), &mut stat, flags) })?;
    Ok(stat)
}

/// Modification time, nanoseconds since the epoch.
pub(crate) fn mtime_ns(stat: &Stat) -> i64 {
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec)
}

/// Time of last access, nanoseconds since the epoch.
pub(crate) fn atime_ns(stat: &Stat) -> i64 {
    stat.st_atime.saturating_mul(1_000_000_000).saturating_add(stat.st_atime_nsec)
}

/// Type of the file system `fd` lies on (`*_SUPER_MAGIC`).
pub(crate) fn fs_magic(fd: RawFd) -> io::Result<i64> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `fs` is valid for writing.
    check(unsafe { libc::fstatfs(fd, &mut fs) })?;
    Ok(fs.f_type)
}

/// `fcntl` with a number as argument.
pub(crate) fn fcntl(fd: RawFd, cmd: i32, arg: i32) -> io::Result<i32> {
    // SAFETY: callers use commands whose argument is a number or absent.
    check(unsafe { libc::fcntl(fd, cmd, arg) })
}

/// Status flags and access mode.
pub(crate) fn flags(fd: RawFd) -> io::Result<i32> {
    fcntl(fd, libc::F_GETFL, 0)
}

/// Sets the status flags.
pub(crate) fn set_flags(fd: RawFd, flags: i32) -> io::Result<()> {
    fcntl(fd, libc::F_SETFL, flags).map(drop)
}

/// Duplicates `fd` to a number of at least `min`, close-on-exec set.
pub(crate) fn dup_from(fd: RawFd, min: RawFd) -> io::Result<OwnedFd> {
    fcntl(fd, libc::F_DUPFD_CLOEXEC, min).map(own)
}

/// Duplicates `from` to exactly the number `to`, which the caller knows how to close.
pub(crate) fn dup_to(from: RawFd, to: RawFd, cloexec: bool) -> io::Result<()> {
    if from == to {
        return fcntl(from, libc::F_SETFD, if cloexec { libc::FD_CLOEXEC } else { 0 }).map(drop);
    }
    // SAFETY: dup3 takes numbers only; the owner of `to`, if any, is the process whose table is being laid out.
    check(unsafe { libc::dup3(from, to, if cloexec { libc::O_CLOEXEC } else { 0 }) }).map(drop)
}

/// Closes all numbers from `first` to `last`, both included.
pub(crate) fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: close_range takes numbers only; it is called where a process's table is laid out anew, and no owner outlives that.
    check(i32::try_from(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).unwrap_or(-1)).map(drop)
}

/// `lseek`.
pub(crate) fn seek(fd: RawFd, offset: i64, whence: i32) -> io::Result<i64> {
    // SAFETY: lseek takes numbers only.
    let at = unsafe { libc::lseek64(fd, offset, whence) };
    if at == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(at)
    }
}

/// Sets the length of a file.
pub(crate) fn truncate(fd: RawFd, bytes: u64) -> io::Result<()> {
    let bytes = i64::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: ftruncate takes numbers only.
    check(unsafe { libc::ftruncate64(fd, bytes) }).map(drop)
}

/// `read`; 0 means end of file.
pub(crate) fn read(fd: RawFd, buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: `buf` is valid for writing its length.
    check_len(unsafe { libc::read(fd, buf.as_mut_ptr().cast(), buf.len()) })
}

/// `write`.
pub(crate) fn write(fd: RawFd, buf: &[u8]) -> io::Result<usize> {
    // SAFETY: `buf` is valid for reading its length.
    check_len(unsafe { libc::write(fd, buf.as_ptr().cast(), buf.len()) })
}

/// `pread` until `buf` is full or the file ends.
pub(crate) fn read_at(fd: RawFd, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        let rest = &mut buf[done..];
        let at = i64::try_from(offset + done as u64).map_err(io::Error::other)?;
        // SAFETY: `rest` is valid for writing its length.
        match check_len(unsafe { libc::pread64(fd, rest.as_mut_ptr().cast(), rest.len(), at) }) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// `pwrite` of all of `buf`.
pub(crate) fn write_at(fd: RawFd, mut buf: &[u8], mut offset: u64) -> io::Result<()> {
    while !buf.is_empty() {
        let at = i64::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: `buf` is valid for reading its length.
        match check_len(unsafe { libc::pwrite64(fd, buf.as_ptr().cast(), buf.len(), at) }) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                buf = &buf[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// `ioctl` that writes a plain value of type `T`.
pub(crate) fn ioctl_get<T: Default>(fd: RawFd, request: libc::c_ulong) -> io::Result<T> {
    let mut value = T::default();
    // SAFETY: callers pair the request with the type that the kernel writes for it.
    check(unsafe { libc::ioctl(fd, request, &mut value) })?;
    Ok(value)
}

/// `ioctl` that reads a plain value of type `T`.
pub(crate) fn ioctl_set<T>(fd: RawFd, request: libc::c_ulong, value: &T) -> io::Result<i32> {
    // SAFETY: callers pair the request with the type that the kernel reads for it.
    check(unsafe { libc::ioctl(fd, request, value) })
}

/// `ioctl` whose argument is a number.
pub(crate) fn ioctl_num(fd: RawFd, request: libc::c_ulong, value: libc::c_ulong) -> io::Result<i32> {
    // SAFETY: callers use requests whose argument is a number.
    check(unsafe { libc::ioctl(fd, request, value) })
}

/// Bytes that can be read now.
pub(crate) fn readable_bytes(fd: RawFd) -> io::Result<usize> {
    let n: i32 = ioctl_get(fd, libc::FIONREAD)?;
    usize::try_from(n).map_err(io::Error::other)
}

/// A pipe: (read end, write end), both with `flags` and close-on-exec.
pub(crate) fn pipe(flags: i32) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two numbers.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), flags | libc::O_CLOEXEC) })?;
    Ok((own(ends[0]), own(ends[1])))
}

/// Copies up to `len` bytes from one pipe to another without consuming them.
pub(crate) fn tee(from: RawFd, to: RawFd, len: usize) -> io::Result<usize> {
    // SAFETY: tee takes numbers only.
    check_len(unsafe { libc::tee(from, to, len, libc::SPLICE_F_NONBLOCK) })
}

/// Events pending on `fd` now.
pub(crate) fn poll(fd: RawFd, events: i16) -> io::Result<i16> {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: `p` is one valid entry.
    check(unsafe { libc::poll(&mut p, 1, 0) })?;
    Ok(p.revents)
}

/// Waits at most `ms` milliseconds for one of `events`; whether it came.
pub(crate) fn wait(fd: RawFd, events: i16, ms: i32) -> io::Result<bool> {
    let mut p = libc::pollfd { fd, events, revents: 0 };
    // SAFETY: `p` is one valid entry.
    check(unsafe { libc::poll(&mut p, 1, ms) }).map(|n| n > 0)
}

/// An eventfd.
pub(crate) fn eventfd(count: u32, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: eventfd takes numbers only.
    check(unsafe { libc::eventfd(count, flags | libc::EFD_CLOEXEC) }).map(own)
}

/// A memory file.
pub(crate) fn memfd(name: &Path, flags: u32) -> io::Result<OwnedFd> {
    let name = c_path(name)?;
    // SAFETY: `name` is a valid C string.
    check(unsafe { libc::memfd_create(name.as_ptr(), flags | libc::MFD_CLOEXEC) }).map(own)
}

/// Target of the symbolic link that `link` is open on (O_PATH).
pub(crate) fn readlink_of(link: &OwnedFd) -> io::Result<PathBuf> {
    readlink_at(link, "")
}

/// Opens `name` in `directory`.
pub(crate) fn open_at(directory: &OwnedFd, name: &str, flags: i32) -> io::Result<OwnedFd> {
    let name = c_path(Path::new(name))?;
    // SAFETY: `name` is a valid C string for the call, and `directory` a live descriptor.
    check(unsafe { libc::openat(directory.as_raw_fd(), name.as_ptr(), flags | libc::O_CLOEXEC) }).map(own)
}

/// Target of the symbolic link `name` in `directory`.
pub(crate) fn readlink_at(directory: &OwnedFd, name: &str) -> io::Result<PathBuf> {
    belay_kernel::dir::read_link_at(directory, Path::new(name))
}

/// Target of the symbolic link `path`.
pub(crate) fn readlink(path: &Path) -> io::Result<PathBuf> {
    std::fs::read_link(path)
}
