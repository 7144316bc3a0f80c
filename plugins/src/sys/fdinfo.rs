//! `/proc/PID/fdinfo/N`: what the kernel says about a descriptor beyond `fcntl` and `fstat`.

use super::fd;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// One `fdinfo` file.
#[derive(Debug, Clone, Default)]
pub(crate) struct FdInfo {
    text: String,
}

/// Parses a number in base `radix`.
pub(crate) fn number(text: &str, radix: u32) -> io::Result<u64> {
    u64::from_str_radix(text.trim(), radix).map_err(|_| io::Error::other(format!("fdinfo: {text:?} is not a number")))
}

impl FdInfo {
    /// Reads it for descriptor `fd` of process `pid` (`0`: of the calling process).
    pub(crate) fn read(pid: i32, fd: i32) -> io::Result<Self> {
        let path = if pid == 0 {
            format!("/proc/self/fdinfo/{fd}")
        } else {
            format!("/proc/{pid}/fdinfo/{fd}")
        };
        Ok(Self {
            text: belay_kernel::proc::text(path)?,
        })
    }

    /// Reads file `name` of an open directory `fdinfo`.
    pub(crate) fn read_at(directory: &OwnedFd, name: &str) -> io::Result<Self> {
        let file = fd::open_at(directory, name, libc::O_RDONLY)?;
        let mut text = vec![0u8; 1024];
        let mut filled = 0;
        // It is made as a whole: what does not fill the buffer is its end.
        while filled == 0 || filled == text.len() {
            text.resize(filled * 4 + 1024, 0);
            match fd::read(file.as_raw_fd(), &mut text[filled..])? {
                0 => break,
                n => filled += n,
            }
        }
        text.truncate(filled);
        String::from_utf8(text).map_err(io::Error::other).map(|text| Self { text })
    }

    /// The rest of every line that begins with `key` (give the colon, where there is one, as part of it), trimmed.
    pub(crate) fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        self.text.lines().filter_map(move |l| l.strip_prefix(key)).map(str::trim)
    }

    /// The rest of the first such line.
    pub(crate) fn one<'a>(&'a self, key: &'a str) -> io::Result<&'a str> {
        self.text
            .lines()
            .find_map(|l| l.strip_prefix(key))
            .map(str::trim)
            .ok_or_else(|| io::Error::other(format!("fdinfo has no line {key:?}")))
    }

    /// Number behind `key`, in base `radix`.
    pub(crate) fn number(&self, key: &str, radix: u32) -> io::Result<u64> {
        number(self.one(key)?, radix)
    }

    /// File offset.
    pub(crate) fn pos(&self) -> io::Result<i64> {
        let pos = self.one("pos:")?;
        pos.parse().map_err(|_| io::Error::other(format!("fdinfo: offset {pos:?}")))
    }

    /// Status flags, access mode and O_CLOEXEC.
    pub(crate) fn flags(&self) -> io::Result<i32> {
        i32::try_from(self.number("flags:", 8)?).map_err(io::Error::other)
    }
}
