//! Calls on descriptors: open, flags, offsets, data.

use belay_kernel::numbers::{self, lend};
use belay_kernel::{dir, ioctl};
use rustix::event::EventfdFlags;
use rustix::fs::{AtFlags, Gid, MemfdFlags, Mode, OFlags, RenameFlags, SealFlags, SeekFrom, Uid, CWD};
use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, SpliceFlags};
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What is used of `struct stat`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stat {
    pub(crate) st_dev: u64,
    pub(crate) st_ino: u64,
    pub(crate) st_mode: u32,
    pub(crate) st_nlink: u64,
    pub(crate) st_uid: u32,
    pub(crate) st_gid: u32,
    pub(crate) st_rdev: u64,
    pub(crate) st_size: i64,
    pub(crate) st_blksize: i64,
    pub(crate) st_blocks: i64,
    pub(crate) st_atime: i64,
    pub(crate) st_atime_nsec: i64,
    pub(crate) st_mtime: i64,
    pub(crate) st_mtime_nsec: i64,
}

impl From<rustix::fs::Stat> for Stat {
    fn from(s: rustix::fs::Stat) -> Self {
        Self {
            st_dev: s.st_dev,
            st_ino: s.st_ino,
            st_mode: s.st_mode,
            st_nlink: s.st_nlink,
            st_uid: s.st_uid,
            st_gid: s.st_gid,
            st_rdev: s.st_rdev,
            st_size: s.st_size,
            st_blksize: s.st_blksize,
            st_blocks: s.st_blocks,
            st_atime: s.st_atime,
            st_atime_nsec: s.st_atime_nsec,
            st_mtime: s.st_mtime,
            st_mtime_nsec: s.st_mtime_nsec,
        }
    }
}

/// `path` with the final zero byte.
pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Flags of `open`, and close-on-exec.
fn open_flags(flags: i32) -> OFlags {
    OFlags::from_bits_retain(flags.cast_unsigned()) | OFlags::CLOEXEC
}

/// Opens `path`; close-on-exec is set.
pub(crate) fn open(path: &Path, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, open_flags(flags), Mode::from_bits_retain(mode))?)
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
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// Makes a directory with the last name of `path` in directory `dir`, closed to others.
pub(crate) fn mkdir_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    Ok(rustix::fs::mkdirat(dir, last_name(path)?, Mode::RWXU)?)
}

/// The same of a FIFO.
pub(crate) fn mkfifo_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    Ok(rustix::fs::mkfifoat(dir, last_name(path)?, Mode::RUSR | Mode::WUSR)?)
}

/// Makes a file with the last name of `path` in directory `dir`, where nothing has that name, for this user alone.
pub(crate) fn create_at(dir: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, last_name(path)?, flags, Mode::RUSR | Mode::WUSR)?)
}

/// Gives what has the last name of `from` in directory `dir` the last name of `to` there.
pub(crate) fn rename_at(dir: &OwnedFd, from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat(dir, last_name(from)?, dir, last_name(to)?)?)
}

/// The same where nothing has that name yet.
pub(crate) fn rename_new_at(dir: &OwnedFd, from: &Path, to: &Path) -> io::Result<()> {
    let (old, new) = (last_name(from)?, last_name(to)?);
    match rustix::fs::renameat_with(dir, old, dir, new, RenameFlags::NOREPLACE) {
        // Not every file system can do this.
        Err(rustix::io::Errno::INVAL) => {
            rustix::fs::linkat(dir, old, dir, new, AtFlags::empty())?;
            unlink_at(dir, from)
        }
        renamed => Ok(renamed?),
    }
}

/// Removes what has the last name of `path` in directory `dir`, and is not a directory.
pub(crate) fn unlink_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    Ok(rustix::fs::unlinkat(dir, last_name(path)?, AtFlags::empty())?)
}

/// Removes the empty directory that has the last name of `path` in directory `dir`.
pub(crate) fn rmdir_at(dir: &OwnedFd, path: &Path) -> io::Result<()> {
    Ok(rustix::fs::unlinkat(dir, last_name(path)?, AtFlags::REMOVEDIR)?)
}

fn last_name(path: &Path) -> io::Result<&OsStr> {
    Ok(path.file_name().ok_or(io::ErrorKind::InvalidInput)?)
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
    Ok(rustix::fs::fstat(lend(fd)?)?.into())
}

/// Whether nobody may overwrite the file of `fd`: append-only (`chattr +a`), or not to be written at all (`+i`).
pub(crate) fn is_protected(fd: RawFd) -> io::Result<bool> {
    let how = rustix::fs::AtFlags::EMPTY_PATH | rustix::fs::AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(lend(fd)?, c"", how, rustix::fs::StatxFlags::empty())?;
    let either = rustix::fs::StatxAttributes::APPEND | rustix::fs::StatxAttributes::IMMUTABLE;
    Ok(found.stx_attributes.intersects(either))
}

/// Sets owner and group.
pub(crate) fn fchown(fd: RawFd, owner: (u32, u32)) -> io::Result<()> {
    let (user, group) = owner_and_group(owner);
    Ok(rustix::fs::fchown(lend(fd)?, user, group)?)
}

/// The same, also where `fd` is open by O_PATH.
pub(crate) fn chown_found(fd: RawFd, owner: (u32, u32)) -> io::Result<()> {
    let (user, group) = owner_and_group(owner);
    Ok(rustix::fs::chownat(lend(fd)?, c"", user, group, AtFlags::EMPTY_PATH)?)
}

/// The number that nobody has leaves either as it is.
fn owner_and_group((user, group): (u32, u32)) -> (Option<Uid>, Option<Gid>) {
    let is_one = |id: u32| id != u32::MAX;
    (
        is_one(user).then(|| Uid::from_raw(user)),
        is_one(group).then(|| Gid::from_raw(group)),
    )
}

/// Sets the mode.
pub(crate) fn fchmod(fd: RawFd, mode: u32) -> io::Result<()> {
    Ok(rustix::fs::fchmod(lend(fd)?, Mode::from_bits_retain(mode))?)
}

/// What `fstat` would say of a `/proc/PID/fd` whose process has ended: the kernel says nothing of it.
pub(crate) fn lost_directory() -> Stat {
    Stat {
        st_mode: libc::S_IFDIR | 0o500,
        ..Stat::default()
    }
}

/// `stat`, or `lstat` where `follow` is not set.
pub(crate) fn stat(path: &Path, follow: bool) -> io::Result<Stat> {
    let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
    Ok(rustix::fs::statat(CWD, path, flags)?.into())
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
    Ok(rustix::fs::fstatfs(lend(fd)?)?.f_type)
}

/// Status flags and access mode.
pub(crate) fn flags(fd: RawFd) -> io::Result<i32> {
    Ok(rustix::fs::fcntl_getfl(lend(fd)?)?.bits().cast_signed())
}

/// Sets the status flags.
pub(crate) fn set_flags(fd: RawFd, flags: i32) -> io::Result<()> {
    let flags = OFlags::from_bits_retain(flags.cast_unsigned());
    Ok(rustix::fs::fcntl_setfl(lend(fd)?, flags)?)
}

/// Whether close-on-exec is set.
pub(crate) fn is_cloexec(fd: RawFd) -> io::Result<bool> {
    Ok(rustix::io::fcntl_getfd(lend(fd)?)?.contains(FdFlags::CLOEXEC))
}

/// Seals of a memory file (`F_SEAL_*`).
pub(crate) fn seals(fd: RawFd) -> io::Result<i32> {
    Ok(rustix::fs::fcntl_get_seals(lend(fd)?)?.bits().cast_signed())
}

/// Adds seals to those that a memory file has.
pub(crate) fn add_seals(fd: RawFd, seals: i32) -> io::Result<()> {
    let seals = SealFlags::from_bits_retain(seals.cast_unsigned());
    Ok(rustix::fs::fcntl_add_seals(lend(fd)?, seals)?)
}

/// Duplicates `fd` to a number of at least `min`, close-on-exec set.
pub(crate) fn dup_from(fd: RawFd, min: RawFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(lend(fd)?, min)?)
}

/// Duplicates `from` to exactly the number `to`, which the caller knows how to close.
pub(crate) fn dup_to(from: RawFd, to: RawFd, cloexec: bool) -> io::Result<()> {
    let source = lend(from)?;
    if from == to {
        let flags = if cloexec { FdFlags::CLOEXEC } else { FdFlags::empty() };
        return Ok(rustix::io::fcntl_setfd(source, flags)?);
    }
    numbers::duplicate_to(source, to, cloexec)
}

/// `lseek`.
pub(crate) fn seek(fd: RawFd, to: SeekFrom) -> io::Result<u64> {
    Ok(rustix::fs::seek(lend(fd)?, to)?)
}

/// Goes to an offset that `lseek` has told, or `fdinfo`; one below zero is an error of the call.
pub(crate) fn go_to(fd: RawFd, offset: i64) -> io::Result<()> {
    seek(fd, SeekFrom::Start(offset.cast_unsigned())).map(drop)
}

/// Sets the length of a file.
pub(crate) fn truncate(fd: RawFd, bytes: u64) -> io::Result<()> {
    i64::try_from(bytes).map_err(io::Error::other)?;
    Ok(rustix::fs::ftruncate(lend(fd)?, bytes)?)
}

/// `read`; 0 means end of file.
pub(crate) fn read(fd: RawFd, buf: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::io::read(lend(fd)?, buf)?)
}

/// `write`.
pub(crate) fn write(fd: RawFd, buf: &[u8]) -> io::Result<usize> {
    Ok(rustix::io::write(lend(fd)?, buf)?)
}

/// `pread` until `buf` is full or the file ends.
pub(crate) fn read_at(fd: RawFd, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let fd = lend(fd)?;
    let mut done = 0;
    while done < buf.len() {
        let at = offset + done as u64;
        i64::try_from(at).map_err(io::Error::other)?;
        match rustix::io::pread(fd, &mut buf[done..], at) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(done)
}

/// `pwrite` of all of `buf`.
pub(crate) fn write_at(fd: RawFd, mut buf: &[u8], mut offset: u64) -> io::Result<()> {
    let fd = lend(fd)?;
    while !buf.is_empty() {
        i64::try_from(offset).map_err(io::Error::other)?;
        match rustix::io::pwrite(fd, buf, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                buf = &buf[n..];
                offset += n as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Bytes that can be read now.
pub(crate) fn readable_bytes(fd: RawFd) -> io::Result<usize> {
    usize::try_from(ioctl::get(lend(fd)?, ioctl::READABLE)?).map_err(io::Error::other)
}

/// Bytes that are written and still on their way.
pub(crate) fn unsent_bytes(fd: RawFd) -> io::Result<i32> {
    ioctl::get(lend(fd)?, ioctl::UNSENT)
}

/// A pipe: (read end, write end), both with `flags` and close-on-exec.
pub(crate) fn pipe(flags: i32) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = PipeFlags::from_bits_retain(flags.cast_unsigned()) | PipeFlags::CLOEXEC;
    Ok(rustix::pipe::pipe_with(flags)?)
}

/// Bytes that a pipe can hold.
pub(crate) fn pipe_size(fd: RawFd) -> io::Result<i32> {
    i32::try_from(rustix::pipe::fcntl_getpipe_size(lend(fd)?)?).map_err(io::Error::other)
}

/// Sets what [`pipe_size`] reads.
pub(crate) fn set_pipe_size(fd: RawFd, bytes: i32) -> io::Result<()> {
    let Ok(bytes) = usize::try_from(bytes) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    rustix::pipe::fcntl_setpipe_size(lend(fd)?, bytes)?;
    Ok(())
}

/// Copies up to `len` bytes from one pipe to another without consuming them.
pub(crate) fn tee(from: RawFd, to: RawFd, len: usize) -> io::Result<usize> {
    Ok(rustix::pipe::tee(lend(from)?, lend(to)?, len, SpliceFlags::NONBLOCK)?)
}

/// Events pending on `fd` now.
pub(crate) fn poll(fd: RawFd, events: i16) -> io::Result<i16> {
    numbers::poll(fd, events, 0)
}

/// Waits at most `ms` milliseconds for one of `events`; whether it came.
pub(crate) fn wait(fd: RawFd, events: i16, ms: i32) -> io::Result<bool> {
    numbers::poll(fd, events, ms).map(|came| came != 0)
}

/// An eventfd.
pub(crate) fn eventfd(count: u32, flags: i32) -> io::Result<OwnedFd> {
    let flags = EventfdFlags::from_bits_retain(flags.cast_unsigned()) | EventfdFlags::CLOEXEC;
    Ok(rustix::event::eventfd(count, flags)?)
}

/// A memory file.
pub(crate) fn memfd(name: &Path, flags: u32) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::from_bits_retain(flags) | MemfdFlags::CLOEXEC;
    Ok(rustix::fs::memfd_create(name, flags)?)
}

/// Target of the symbolic link that `link` is open on (O_PATH).
pub(crate) fn readlink_of(link: &OwnedFd) -> io::Result<PathBuf> {
    readlink_at(link, "")
}

/// Opens `name` in `directory`.
pub(crate) fn open_at(directory: &OwnedFd, name: &str, flags: i32) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(directory, name, open_flags(flags), Mode::empty())?)
}

/// Target of the symbolic link `name` in `directory`.
pub(crate) fn readlink_at(directory: &OwnedFd, name: &str) -> io::Result<PathBuf> {
    dir::read_link_at(directory, Path::new(name))
}

/// Target of the symbolic link `path`.
pub(crate) fn readlink(path: &Path) -> io::Result<PathBuf> {
    std::fs::read_link(path)
}
