//! What the parts of a job that are on one host have taken of a local tier, so that they do not take more together than
//! it may hold.
//!
//! ```text
//! TIER/NAME-ID/claim-0, claim-1, ...     bytes that part 0, 1, ... has been granted or has chunks of, as a decimal number
//! ```
//! Who wants more says so in its own file first, then reads those of the others; where that is too much, it takes it
//! back. So two who want the last bytes at the same time may both be refused, but never both be granted, and no lock
//! that a stopped process could hold is waited for. What a killed part has claimed stays claimed, as its chunks are
//! there. While a part is there its own file is locked (`flock`), so that nobody removes what it has.
//!
//! Others may write to the tier's directory (`/dev/shm`): nothing is opened there but regular files of this user.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How the names of the files begin.
pub const PREFIX: &str = "claim-";
/// Digits of the greatest number.
const DIGITS: usize = 20;

/// The error where something is there that is not `what` of this user alone.
pub fn not_own(what: &str) -> io::Error {
    io::Error::other(format!("not {what} of this user's own"))
}

fn euid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Makes the directory `path`, which only this user may write; fails where anything else is there.
pub fn make_own(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ if is_own(path)? => Ok(()),
        _ => Err(not_own("a directory")),
    }
}

/// Whether `path` is a directory, itself and no link to one, that only this user may write.
pub fn is_own(path: &Path) -> io::Result<bool> {
    let m = std::fs::symlink_metadata(path)?;
    Ok(m.is_dir() && m.uid() == euid() && m.mode() & 0o022 == 0)
}

/// Opens a regular file of this user's own, and waits for nothing; fails where anything else is there.
fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let file = options.mode(0o600).custom_flags(flags).open(path)?;
    let m = file.metadata()?;
    if m.is_file() && m.uid() == euid() {
        return Ok(file);
    }
    Err(not_own("a file"))
}

/// Opens it, or makes it, for reading and writing.
pub fn make_file(path: &Path) -> io::Result<File> {
    open_own(path, OpenOptions::new().read(true).write(true).create(true))
}

/// Reads it; fails where it is longer than `limit` bytes.
pub fn read_own(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open_own(path, OpenOptions::new().read(true))?;
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other("longer than any file of this kind"));
    }
    Ok(bytes)
}

/// Takes the lock of `file`, if nobody else has it; whether this is so.
fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

/// Whether part `tag` may be there: not where its file is gone, or nobody holds the lock.
pub fn is_held(dir: &Path, tag: u64) -> bool {
    match open_own(&file(dir, tag), OpenOptions::new().read(true)).and_then(|f| try_lock(&f)) {
        Ok(free) => !free,
        Err(e) => e.kind() != io::ErrorKind::NotFound,
    }
}

/// The claims on a tier, as one part sees them.
#[derive(Debug)]
pub struct Claims {
    dir: PathBuf,
    name: String,
    own: File,
}

/// The file of part `tag`.
pub fn file(dir: &Path, tag: u64) -> PathBuf {
    dir.join(format!("{PREFIX}{tag}"))
}

impl Claims {
    /// Those in `dir`, the directory of the job in the tier, for part `tag`, which has claimed nothing yet.
    pub fn open(dir: &Path, tag: u64) -> io::Result<Self> {
        let path = file(dir, tag);
        let own = make_file(&path)?;
        // Where an earlier agent of the part still ends it has the lock.
        if !try_lock(&own)? {
            tracing::debug!(path = %path.display(), "locked");
        }
        own.set_len(0)?;
        Ok(Self {
            dir: dir.to_owned(),
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            own,
        })
    }

    /// Has `bytes` now instead of `before`, unless all would then have more than `capacity`; whether it has.
    pub(crate) fn take(&self, (before, bytes): (u64, u64), capacity: u64) -> bool {
        let fits = self.set(bytes).and_then(|()| self.others());
        match fits {
            Ok(others) if others.saturating_add(bytes) <= capacity => true,
            refused => {
                if let Err(e) = refused.and_then(|_| self.set(before)) {
                    tracing::warn!(dir = %self.dir.display(), error = %e, "local tier is not used: what other parts have of it is not known");
                }
                false
            }
        }
    }

    /// Has `bytes` now.
    pub(crate) fn set(&self, bytes: u64) -> io::Result<()> {
        self.own.write_all_at(format!("{bytes:0DIGITS$}").as_bytes(), 0)
    }

    /// What the other parts have.
    fn others(&self) -> io::Result<u64> {
        let mut sum = 0u64;
        for entry in std::fs::read_dir(&self.dir)? {
            let file = entry?.file_name();
            let name = file.to_string_lossy();
            if !name.starts_with(PREFIX) || *name == *self.name {
                continue;
            }
            match read_own(&self.dir.join(&file), DIGITS as u64) {
                // One that has just been made has nothing.
                Ok(text) if text.is_empty() => {}
                Ok(text) => sum = sum.saturating_add(number(&text)?),
                // It has ended.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(sum)
    }
}

fn number(text: &[u8]) -> io::Result<u64> {
    std::str::from_utf8(text)
        .map_err(io::Error::other)?
        .parse()
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::desk::{Desk, Place, Spec};
    use crate::place::model::Model;
    use crate::place::rule::Policy;
    use crate::testing::Scratch;
    use std::sync::Arc;

    #[test]
    fn parts_on_one_host_do_not_take_more_together_than_the_tier_holds() {
        let s = Scratch::new("claims");
        let desk = |tag| {
            let spec = Spec {
                capacity: 30,
                memory: false,
                model: Model::unmeasured(false),
                shared: Some(Arc::new(Claims::open(&s.0, tag).unwrap())),
            };
            Desk::new(Policy::FastestOnly, vec![spec])
        };
        let (a, b) = (desk(0), desk(1));
        assert_eq!((a.now(20), b.now(20)), (Place::Tier(0), Place::Home));
        assert_eq!((b.now(10), a.now(10)), (Place::Tier(0), Place::Home));
        // It was granted more than it needed.
        a.written(0, 1, 20, 15);
        assert_eq!((b.now(6), b.now(5)), (Place::Home, Place::Tier(0)));
        assert_eq!(a.take(), Some((0, 1, 15)));
        a.flushed(0, 15, true);
        assert_eq!(b.now(15), Place::Tier(0));
        // What a part that was killed has left is counted until it comes back.
        drop(b);
        assert_eq!(a.now(1), Place::Home);
        let b = desk(1);
        b.found(0, 2, 12);
        assert_eq!((a.now(18), a.now(1)), (Place::Tier(0), Place::Home));
        std::fs::write(file(&s.0, 2), "?").unwrap();
        assert_eq!(desk(3).now(1), Place::Home, "what another part has is not known");
    }

    #[test]
    fn nothing_of_others_is_opened() {
        let s = Scratch::new("claims-own");
        let target = s.0.join("target");
        std::fs::write(&target, "7").unwrap();
        std::os::unix::fs::symlink(&target, file(&s.0, 1)).unwrap();
        assert!(Claims::open(&s.0, 1).is_err() && read_own(&file(&s.0, 1), 10).is_err());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "7");
        rustix::fs::mkfifoat(rustix::fs::CWD, file(&s.0, 2), 0o600.into()).unwrap();
        assert!(Claims::open(&s.0, 2).is_err() && read_own(&file(&s.0, 2), 10).is_err() && is_held(&s.0, 2));
        std::fs::write(file(&s.0, 3), [b'0'; DIGITS + 1]).unwrap();
        assert!(read_own(&file(&s.0, 3), DIGITS as u64).is_err());
        let dir = s.0.join("directory");
        make_own(&dir).unwrap();
        make_own(&dir).unwrap();
        std::os::unix::fs::symlink(&dir, s.0.join("link")).unwrap();
        assert!(make_own(&s.0.join("link")).is_err() && make_own(&target).is_err());
        std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o770)).unwrap();
        assert!(make_own(&dir).is_err());
    }

    #[test]
    fn a_part_that_is_there_is_seen() {
        let s = Scratch::new("claims-held");
        assert!(!is_held(&s.0, 1));
        let claims = Claims::open(&s.0, 1).unwrap();
        assert!(is_held(&s.0, 1) && !is_held(&s.0, 2));
        drop(claims);
        assert!(!is_held(&s.0, 1) && file(&s.0, 1).exists());
    }

    #[test]
    fn whoever_asks_at_the_same_time_is_not_given_the_same_bytes() {
        let s = Scratch::new("claims-race");
        let granted = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for tag in 0..4 {
                let claims = Claims::open(&s.0, tag).unwrap();
                let granted = &granted;
                scope.spawn(move || {
                    let mut own = 0;
                    for _ in 0..200 {
                        if claims.take((own, own + 1), 100) {
                            own += 1;
                        }
                    }
                    granted.fetch_add(own, std::sync::atomic::Ordering::Relaxed);
                });
            }
        });
        let granted = granted.into_inner();
        assert!((1..=100).contains(&granted), "{granted} of 100 bytes");
    }
}
