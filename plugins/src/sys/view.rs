//! A file as it is seen through a description that a process of the job has, without a trace: no second opening, which
//! would break leases and be told to those who watch the file, no read, which would be told too, and neither the offset
//! nor the time of the last access moves.
//!
//! The file is mapped, and the mapping is read by a system call: where the file ends, or cannot be read, that is an
//! error and no signal.

use super::fd;
use belay_kernel::apart;
use belay_kernel::numbers::lend;
use belay_kernel::vm::{self, FileAt};
use rustix::fs::SeekFrom;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Ranges that are asked for at once.
const RANGES: usize = 256;

/// What a file's contents are read from.
pub(crate) trait Source {
    /// Reads at `offset` until `buf` is full or the file ends.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// The next range at or behind `at`, of the first `bytes` bytes, that may hold data.
    fn data(&self, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>>;
}

/// A description of the caller's own: its offset moves.
impl Source for OwnedFd {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        fd::read_at(self.as_raw_fd(), buf, offset)
    }

    fn data(&self, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>> {
        i64::try_from(at).map_err(io::Error::other)?;
        let from = match fd::seek(self.as_raw_fd(), SeekFrom::Data(at)) {
            Ok(from) => from,
            Err(e) => {
                return match e.raw_os_error() {
                    Some(libc::ENXIO) => Ok(None),
                    Some(libc::EINVAL) => Ok(Some((at, bytes))),
                    _ => Err(e),
                }
            }
        };
        let to = fd::seek(self.as_raw_fd(), SeekFrom::Hole(from))?.min(bytes);
        Ok((from < to).then_some((from, to)))
    }
}

/// See the module. The default is that of an empty file.
#[derive(Debug, Default)]
pub(crate) struct View {
    mapped: Option<FileAt>,
    /// Length of the file, as far as it is wanted.
    bytes: u64,
    /// What may hold data, ascending.
    ranges: Vec<(u64, u64)>,
}

impl View {
    /// The first `bytes` bytes of the file behind `fd`, a duplicate of a description that is open for reading and that
    /// nobody uses at this moment.
    pub(crate) fn of(fd: RawFd, bytes: u64) -> io::Result<Self> {
        let stat = fd::fstat(fd)?;
        let bytes = bytes.min(u64::try_from(stat.st_size).unwrap_or(0));
        let mapped = usize::try_from(bytes).map_err(io::Error::other)?;
        let mut view = Self {
            mapped: None,
            bytes,
            ranges: Vec::new(),
        };
        if bytes > 0 {
            view.mapped = Some(map_unnoticed(fd, mapped)?);
            let full = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512) >= bytes;
            view.ranges = if full { vec![(0, bytes)] } else { ranges(fd, bytes)? };
        }
        Ok(view)
    }
}

impl Source for View {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = usize::try_from(self.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        // Of an empty file nothing is mapped, and nothing left.
        let base = self.mapped.as_ref().map_or(0, FileAt::address);
        let wanted = buf.len().min(left);
        let me = std::process::id().cast_signed();
        let mut done = 0;
        while done < wanted {
            let at = base + offset + done as u64;
            match vm::read_some(me, at, &mut buf[done..wanted]) {
                Ok(n) if n > 0 => done += n,
                // It is shorter by now.
                Ok(_) => break,
                Err(e) if done > 0 && e.raw_os_error() == Some(libc::EFAULT) => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    fn data(&self, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>> {
        let range = self.ranges.get(self.ranges.partition_point(|(_, to)| *to <= at));
        let range = range.map(|(from, to)| (at.max(*from), bytes.min(*to)));
        Ok(range.filter(|(from, to)| from < to))
    }
}

/// Maps a file. That counts as an access unless the description says otherwise, which only the file's owner and root
/// may have it say.
fn map_unnoticed(fd: RawFd, bytes: usize) -> io::Result<FileAt> {
    let flags = fd::flags(fd)?;
    let quiet = flags & libc::O_NOATIME == 0 && fd::set_flags(fd, flags | libc::O_NOATIME).is_ok();
    let mapped = lend(fd).and_then(|fd| FileAt::map(fd, bytes));
    if quiet {
        fd::set_flags(fd, flags)?;
    }
    mapped
}

/// The ranges of the first `bytes` bytes that may hold data. To ask moves the offset, which is the program's: it is put
/// back whatever becomes of the caller.
fn ranges(fd: RawFd, bytes: u64) -> io::Result<Vec<(u64, u64)>> {
    let position = fd::seek(fd, SeekFrom::Current(0))?;
    let mut out = Vec::new();
    let mut at = 0;
    loop {
        let mut some = [(0, 0); RANGES];
        let (mut count, mut error) = (0, 0);
        i64::try_from(at).map_err(io::Error::other)?;
        apart::run(&mut || {
            let mut at = at;
            while count < RANGES && at < bytes {
                let from = fd::seek(fd, SeekFrom::Data(at));
                let range = from.and_then(|from| Ok((from, fd::seek(fd, SeekFrom::Hole(from))?)));
                match range {
                    Ok((from, to)) if to > from => {
                        some[count] = (from, to);
                        count += 1;
                        at = to;
                    }
                    Ok(_) => break,
                    Err(e) => {
                        error = e.raw_os_error().unwrap_or(0);
                        break;
                    }
                }
            }
            let _ = fd::seek(fd, SeekFrom::Start(position));
        })?;
        let found = some[..count].iter().map(|(from, to)| (*from, *to.min(&bytes)));
        out.extend(found.filter(|(from, to)| from < to));
        match error {
            0 if count == RANGES => at = out.last().map_or(bytes, |(_, to)| *to),
            0 | libc::ENXIO => return Ok(out),
            // A file system that cannot say.
            libc::EINVAL => return Ok(vec![(0, bytes)]),
            e => return Err(io::Error::from_raw_os_error(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A file of 2 MiB and 5 bytes: a page of data at the beginning, one in the middle, and the end.
    fn sparse() -> OwnedFd {
        let file = fd::memfd(Path::new("t"), 0).unwrap();
        fd::truncate(file.as_raw_fd(), (2 << 20) + 5).unwrap();
        for (at, data) in [(0, &b"begin"[..]), (1 << 20, b"middle"), (2 << 20, b"end!\n")] {
            fd::write_at(file.as_raw_fd(), data, at).unwrap();
        }
        file
    }

    #[test]
    fn a_view_shows_the_file_and_moves_nothing() {
        let file = sparse();
        let raw = file.as_raw_fd();
        fd::seek(raw, SeekFrom::Start(77)).unwrap();
        let (before, flags) = (fd::fstat(raw).unwrap(), fd::flags(raw).unwrap());
        let view = View::of(raw, u64::MAX).unwrap();
        let mut ranges = Vec::new();
        let mut at = 0;
        while let Some((from, to)) = view.data(at, view.bytes).unwrap() {
            ranges.push((from, to));
            at = to;
        }
        assert_eq!(ranges, [(0, 4096), (1 << 20, (1 << 20) + 4096), (2 << 20, (2 << 20) + 5)]);
        let mut buf = [1; 4096];
        assert_eq!(view.read_at(&mut buf, 1 << 20).unwrap(), 4096);
        assert_eq!((&buf[..6], buf[6]), (&b"middle"[..], 0));
        assert_eq!(view.read_at(&mut buf, 2 << 20).unwrap(), 5);
        assert_eq!(&buf[..5], b"end!\n");
        assert_eq!(view.read_at(&mut buf, 3 << 20).unwrap(), 0);
        let after = fd::fstat(raw).unwrap();
        assert_eq!(fd::seek(raw, SeekFrom::Current(0)).unwrap(), 77);
        assert_eq!(
            (after.st_blocks, after.st_atime_nsec),
            (before.st_blocks, before.st_atime_nsec)
        );
        assert_eq!(fd::flags(raw).unwrap(), flags);
    }

    #[test]
    fn a_file_that_shrinks_ends_where_it_ends_now() {
        let file = sparse();
        let view = View::of(file.as_raw_fd(), 1 << 20).unwrap();
        fd::truncate(file.as_raw_fd(), 5).unwrap();
        let mut buf = [1; 8192];
        assert_eq!(view.read_at(&mut buf, 0).unwrap(), 4096);
        assert_eq!(&buf[..5], b"begin");
        assert!(view.read_at(&mut buf, 1 << 19).is_err());
    }

    #[test]
    fn more_ranges_than_are_asked_for_at_once_are_found() {
        let file = fd::memfd(Path::new("t"), 0).unwrap();
        let count = RANGES as u64 + 10;
        for i in 0..count {
            fd::write_at(file.as_raw_fd(), b"x", i * 8192).unwrap();
        }
        let view = View::of(file.as_raw_fd(), u64::MAX).unwrap();
        assert_eq!(view.ranges.len() as u64, count);
        assert_eq!(view.ranges.last(), Some(&((count - 1) * 8192, (count - 1) * 8192 + 1)));
    }
}
