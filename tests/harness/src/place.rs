//! Where tests run: a directory that ordinary users can read too, with copies of belay, its two blobs and the test programs.

use crate::Failure;
use std::cell::RefCell;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The ordinary user and group that the tests use: nobody.
pub const NOBODY: u32 = 65534;

/// Who runs a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// The harness's own user when that is root.
    Root,
    /// An ordinary user.
    Ordinary,
}

impl User {
    /// Name in the output.
    pub fn name(self) -> &'static str {
        match self {
            User::Root => "root",
            User::Ordinary => "user",
        }
    }

    /// Words in front of a command that make root run it as this user.
    pub fn words(self) -> &'static [&'static str] {
        match self {
            User::Root => &[],
            User::Ordinary => &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"],
        }
    }
}

thread_local! {
    /// Work directories that this thread has made since it last cleared them away.
    static MADE: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
}

/// A check of this thread has passed, or failed: with BELAY_KEEP=failed only the work directories of those that failed stay.
pub(crate) fn clear_away(passed: bool) {
    let made = MADE.take();
    if passed && std::env::var_os("BELAY_KEEP").is_some_and(|which| which == "failed") {
        for dir in made {
            std::fs::remove_dir_all(dir).ok();
        }
    }
}

/// Directories of one run of the harness. Removed when dropped, unless BELAY_KEEP is set.
#[derive(Debug)]
pub struct Place {
    base: PathBuf,
    next: AtomicU32,
}

fn step<T>(what: &str, path: &Path, r: std::io::Result<T>) -> Result<T, Failure> {
    r.map_err(|e| format!("{what} {}: {e}", path.display()))
}

/// Is the harness root?
pub fn am_root() -> bool {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// The repository's root directory.
pub fn repository() -> PathBuf {
    let harness = Path::new(env!("CARGO_MANIFEST_DIR"));
    harness.ancestors().nth(2).unwrap_or(harness).to_owned()
}

/// Is this command there?
pub fn installed(command: &str) -> bool {
    let dirs = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/games"];
    command.starts_with('/') && Path::new(command).exists() || dirs.iter().any(|d| Path::new(d).join(command).exists())
}

/// The directory in which cargo put the programs of this build.
pub fn build_dir() -> Result<PathBuf, Failure> {
    if let Some(d) = std::env::var_os("BELAY_BIN_DIR") {
        return Ok(d.into());
    }
    let exe = step("find", Path::new("/proc/self/exe"), std::env::current_exe())?;
    exe.ancestors()
        .nth(2)
        .map(Path::to_owned)
        .ok_or_else(|| format!("{}: not in a cargo target directory", exe.display()))
}

/// `setcap cap_checkpoint_restore+ep`.
fn give_capability(file: &Path) -> std::io::Result<()> {
    const REVISION_2_EFFECTIVE: u32 = 0x0200_0001;
    const CHECKPOINT_RESTORE: u32 = 1 << (40 - 32);
    // Revision; permitted and inheritable of the lower 32 capabilities, then of the upper ones.
    let words = [REVISION_2_EFFECTIVE, 0, 0, CHECKPOINT_RESTORE, 0];
    let value: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let path = std::ffi::CString::new(file.as_os_str().as_encoded_bytes()).map_err(std::io::Error::other)?;
    let name = c"security.capability".as_ptr();
    // SAFETY: path, name and value are live.
    if unsafe { libc::setxattr(path.as_ptr(), name, value.as_ptr().cast(), value.len(), 0) } == -1 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

impl Place {
    /// Makes the directories and copies belay into them.
    pub fn new(label: &str) -> Result<Self, Failure> {
        let tmp = std::env::var_os("BELAY_TEST_TMP").map_or_else(std::env::temp_dir, PathBuf::from);
        let base = tmp.join(format!("belay-{label}-{}", std::process::id()));
        for d in ["bin", "prog", "work"] {
            let d = base.join(d);
            step("create", &d, std::fs::create_dir_all(&d))?;
            step(
                "open up",
                &d,
                std::fs::set_permissions(&d, std::fs::Permissions::from_mode(0o755)),
            )?;
        }
        let place = Place {
            base,
            next: AtomicU32::new(0),
        };
        let from = build_dir()?;
        for name in ["belay", "belay-inject", "belay-restorer", "libbelay_verbs.so"] {
            let (src, dst) = (from.join(name), place.bin().join(name));
            if !src.exists() {
                return Err(format!("{} is missing: run `cargo build --workspace` first", src.display()));
            }
            step("copy", &src, std::fs::copy(&src, &dst))?;
        }
        if std::env::var_os("BELAY_TEST_FILE_CAPABILITY").is_some() {
            let belay = place.belay();
            step("give cap_checkpoint_restore to", &belay, give_capability(&belay))?;
        }
        place.copy_suites()?;
        Ok(place)
    }

    /// Copies the scripts of tests/suites, because the repository may lie where ordinary users cannot read it.
    fn copy_suites(&self) -> Result<(), Failure> {
        let (from, to) = (repository().join("tests/suites"), self.suites());
        step("create", &to, std::fs::create_dir(&to))?;
        step(
            "open up",
            &to,
            std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)),
        )?;
        for e in step("list", &from, std::fs::read_dir(&from))? {
            let e = step("list", &from, e)?;
            if e.path().is_file() {
                let dst = to.join(e.file_name());
                step("copy", &e.path(), std::fs::copy(e.path(), &dst))?;
                step(
                    "open up",
                    &dst,
                    std::fs::set_permissions(&dst, std::fs::Permissions::from_mode(0o755)),
                )?;
            }
        }
        Ok(())
    }

    /// The directory with the scripts of tests/suites.
    pub fn suites(&self) -> PathBuf {
        self.base.join("suites")
    }

    /// The directory with belay.
    pub fn bin(&self) -> PathBuf {
        self.base.join("bin")
    }

    /// The `belay` to test.
    pub fn belay(&self) -> PathBuf {
        self.bin().join("belay")
    }

    /// The directory with the compiled programs.
    pub fn programs(&self) -> PathBuf {
        self.base.join("prog")
    }

    /// A new empty work directory that belongs to `user`.
    pub fn work(&self, label: &str, user: User) -> Result<PathBuf, Failure> {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let clean: String = label
            .chars()
            .map(|c| if c.is_alphanumeric() || c == '-' { c } else { '_' })
            .collect();
        let dir = self.base.join("work").join(format!("{n}-{clean}"));
        step("create", &dir, std::fs::create_dir(&dir))?;
        step(
            "open up",
            &dir,
            std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)),
        )?;
        if user == User::Ordinary && am_root() {
            step("give away", &dir, std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)))?;
        }
        MADE.with_borrow_mut(|made| made.push(dir.clone()));
        Ok(dir)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::env::var_os("BELAY_KEEP").is_none() {
            std::fs::remove_dir_all(&self.base).ok();
        } else {
            println!("kept {}", self.base.display());
        }
    }
}

/// For `sh -c`, in a mount namespace of its own: device files of its own, to which `more` adds. Then the words that follow.
pub fn with_devices(more: &str) -> String {
    format!(
        "set -e; old=$(mktemp -d); trap 'rmdir $old' EXIT; mount --make-rprivate /; mount --rbind /dev $old
        mount -t tmpfs -o mode=755 tmpfs /dev
        for f in null zero full random urandom tty; do touch /dev/$f; mount --bind $old/$f /dev/$f; done
        for f in shm pts; do mkdir /dev/$f; mount --rbind $old/$f /dev/$f; done
        ln -s pts/ptmx /dev/ptmx; ln -s /proc/self/fd /dev/fd; umount -l $old; rmdir $old; trap - EXIT
        {more}; exec \"$@\""
    )
}
