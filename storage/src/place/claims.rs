//! What the parts of a job that are on one host have taken of a local tier, so that they do not take more together than it may hold.
//!
//! ```text
//! TIER/NAME-ID/claim-0, claim-1, ...     bytes that part 0, 1, ... has been granted or has chunks of, as a decimal number
//! ```
//! Who wants more says so in its own file first, then reads those of the others; where that is too much, it takes it back. So two who want the last bytes at the same
//! time may both be refused, but never both be granted, and there is no lock that a stopped process could hold. What a killed part has claimed stays claimed, as its chunks are there.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How the names of the files begin.
pub const PREFIX: &str = "claim-";
/// Digits of the greatest number.
const DIGITS: usize = 20;

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
        let mut options = OpenOptions::new();
        let own = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)?;
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
            match std::fs::read_to_string(self.dir.join(&file)) {
                // One that has just been made has nothing.
                Ok(text) if text.is_empty() => {}
                Ok(text) => sum = sum.saturating_add(text.parse().map_err(io::Error::other)?),
                // It has ended.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(sum)
    }
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
