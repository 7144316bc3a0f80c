//! Whose the directory of a job in a local tier is: a copy of a job directory names the same tiers, and nothing there is
//! its own.
//!
//! ```text
//! TIER/NAME-ID/job-directory     path of the job directory
//! ```

use super::claims;
use crate::store::{self, LocalTier, Store};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Name of the marker.
pub const MARKER: &str = "job-directory";

/// Bytes of it, at most.
const MOST: u64 = 4096;

/// What the marker in `dir` says; nothing where there is none.
pub fn read(dir: &Path) -> io::Result<PathBuf> {
    match claims::read_own(&dir.join(MARKER), MOST) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(PathBuf::new()),
        other => other.map(|bytes| OsString::from_vec(bytes).into()),
    }
}

/// Marks `dir` as that of the job in directory `job`.
pub fn write(dir: &Path, job: &Path) -> io::Result<()> {
    let marker = claims::make_file(&dir.join(MARKER))?;
    marker.set_len(0)?;
    marker.write_all_at(job.as_os_str().as_bytes(), 0)
}

/// The job directory to which `t` belongs, where the one in `job`, or of which that is a part, is a copy of it. Where
/// that has gone, or has another job by now, the copy has taken its place.
pub fn other(t: &LocalTier, job: &Path) -> Option<PathBuf> {
    let marked = match t.host {
        Some(_) => t.dir.parent().unwrap_or(&t.dir),
        None => &t.dir,
    };
    let there = read(marked).ok().filter(|path| !path.as_os_str().is_empty())?;
    let id = |path: &Path| std::fs::metadata(path).ok().map(|m| (m.dev(), m.ino()));
    let theirs = id(&there)?;
    // A part's directory lies two levels below that of the job.
    if job.ancestors().take(3).any(|own| own == there || id(own) == Some(theirs)) {
        return None;
    }
    let has_it = t.host.is_some() || store::listed(&there).map_or(true, |all| all.iter().any(|k| k.dir == t.dir));
    has_it.then_some(there)
}

impl Store {
    /// Without the tiers that belong to other job directories, of which this one is a copy; those, and whose they are.
    pub fn own_tiers(self) -> (Self, Vec<(LocalTier, PathBuf)>) {
        let job = self.directory().parent().unwrap_or(Path::new("."));
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for t in self.tiers() {
            match other(t, job) {
                Some(job) => others.push((t.clone(), job)),
                None => own.push(t.clone()),
            }
        }
        (self.with_tiers(own), others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::desk::Place;
    use crate::store::set_local_tiers;
    use crate::testing::Scratch;
    use std::ffi::OsStr;

    #[test]
    fn directories_are_told_apart_by_any_byte() {
        let s = Scratch::new("marker-bytes");
        let [one, other] = [b"/job-\xe9", b"/job-\xea"].map(|name| Path::new(OsStr::from_bytes(name)));
        write(&s.0, one).unwrap();
        let marked = read(&s.0).unwrap();
        assert!(marked == one && marked != other, "{marked:?}");
    }

    #[test]
    fn a_copy_of_a_job_directory_has_no_tier_of_its_own_while_the_original_is_there() {
        let s = Scratch::new("marker");
        let (job, copy) = (s.job(), s.0.join("copy"));
        let ssd = LocalTier {
            name: "ssd".into(),
            memory: false,
            dir: s.0.join("ssd"),
            host: None,
        };
        set_local_tiers(&job, std::slice::from_ref(&ssd), std::slice::from_ref(&ssd)).unwrap();
        std::fs::create_dir(&copy).unwrap();
        std::fs::copy(job.join(store::PLACES), copy.join(store::PLACES)).unwrap();
        let owned = |job: &Path| Store::of_job(job).own_tiers().0.tiers().len();
        assert_eq!((owned(&job), owned(&copy)), (1, 1), "nobody has said whose it is");
        write(&ssd.dir, &job).unwrap();
        assert_eq!((owned(&job), owned(&copy)), (1, 0));
        let (store, others) = Store::of_job(&copy).own_tiers();
        assert_eq!(others, [(ssd.clone(), job.clone())]);
        // What is found there is not removed.
        let chunk = Store::of_job(&job).path_in(Place::Tier(0), 1);
        std::fs::write(&chunk, "1").unwrap();
        store.collect(&Default::default()).unwrap();
        assert!(Store::of_job(&copy).path(1) == chunk && chunk.exists());
        // By another name it is still the same directory.
        std::os::unix::fs::symlink(&job, s.0.join("link")).unwrap();
        assert_eq!(owned(&s.0.join("link")), 1);
        // Another job has begun in its place; or it has gone.
        let list = std::fs::read(job.join(store::PLACES)).unwrap();
        std::fs::write(job.join(store::PLACES), "[]").unwrap();
        assert_eq!(owned(&copy), 1);
        std::fs::write(job.join(store::PLACES), "?").unwrap();
        assert_eq!(owned(&copy), 0);
        std::fs::write(job.join(store::PLACES), list).unwrap();
        std::fs::rename(&job, s.0.join("moved")).unwrap();
        assert_eq!((owned(&s.0.join("moved")), owned(&copy)), (1, 1));
    }
}
