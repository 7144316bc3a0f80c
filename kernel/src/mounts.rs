//! What is mounted for this process, and where: `/proc/self/mountinfo`. Names in it are bytes, of which the kernel
//! writes blanks and backslashes as octal numbers.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Device number of its file system.
    pub device: u64,
    /// What of the file system is mounted.
    pub root: PathBuf,
    /// Where it is mounted.
    pub place: PathBuf,
    /// Kind of the file system.
    pub kind: String,
    /// The file system's own options; what is no text in them is replaced.
    pub options: String,
}

/// All mounts that this process sees, in the order in which they were made.
pub fn all() -> io::Result<Vec<Mount>> {
    Ok(parse(&crate::proc::read_whole("/proc/self/mountinfo")?))
}

/// The mounts in the contents of a `mountinfo`.
pub fn parse(raw: &[u8]) -> Vec<Mount> {
    raw.split(|b| *b == b'\n').filter_map(mount).collect()
}

/// "36 35 0:21 /3 /dev/pts/1 rw shared:7 - devpts devpts rw,gid=5,mode=620"
fn mount(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|b| *b == b' ');
    let device = std::str::from_utf8(words.nth(2)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let (root, place) = (name(words.next()?), name(words.next()?));
    words.find(|w| *w == b"-")?;
    let (kind, options) = (words.next()?, words.nth(1)?);
    Some(Mount {
        device: libc::makedev(major.parse().ok()?, minor.parse().ok()?),
        root,
        place,
        kind: String::from_utf8_lossy(kind).into_owned(),
        options: String::from_utf8_lossy(options).into_owned(),
    })
}

/// A name as it was before the kernel wrote some of its bytes as a backslash and three octal digits.
fn name(word: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(word.len());
    let mut left = word;
    while let Some((first, after)) = left.split_first() {
        let byte = match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if *first == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        out.push(byte.unwrap_or(*first));
        left = if byte.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(out).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    #[test]
    fn names_are_the_bytes_that_they_are() {
        let all = parse(
            b"24 30 0:21 / /a\\040b\\134040\\012\xff rw,nosuid shared:7 master:1 - tmpfs  rw,size=\xfe\n\
              no mount\n\
              91 80 8:1 /x\\9 /- rw - ext4 /dev/sda1 ro\n",
        );
        assert_eq!(all.len(), 2, "{all:?}");
        assert_eq!(all[0].place, Path::new(OsStr::from_bytes(b"/a b\\040\n\xff")));
        assert_eq!((all[0].device, all[0].root.as_path()), (libc::makedev(0, 21), Path::new("/")));
        assert_eq!((all[0].kind.as_str(), all[0].options.as_str()), ("tmpfs", "rw,size=\u{fffd}"));
        assert_eq!(
            (all[1].root.as_path(), all[1].place.as_path()),
            (Path::new("/x\\9"), Path::new("/-"))
        );
        assert_eq!((all[1].device, all[1].options.as_str()), (libc::makedev(8, 1), "ro"));
    }
}
