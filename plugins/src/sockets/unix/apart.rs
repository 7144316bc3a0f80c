//! Sockets whose file has been removed, while something else has its name now that is not ours to move.
//!
//! The name of such a socket leads nowhere any more, so its file may lie anywhere: it is bound below a directory of
//! this restart's own, by a process for which that is the root, or its working directory where the name is relative.

use crate::fault::{At, Fault};
use crate::sys::sock::{self, Addr};
use belay_kernel::{apart, dir};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A directory that is removed with all that is in it.
#[derive(Debug)]
pub(super) struct Apart(PathBuf);

impl Apart {
    /// An empty directory, for nobody else.
    pub(super) fn make() -> io::Result<Self> {
        dir::make_new(&std::env::temp_dir().join(".belay-")).map(Self)
    }

    /// Binds socket `raw` to `name`, which leads to `path` from its root or working directory; returns where its file lies.
    pub(super) fn bind(&self, raw: RawFd, name: &Addr, path: &Path) -> Result<PathBuf, Fault> {
        let place = self.0.join(path.strip_prefix("/").unwrap_or(path));
        let mut parents = std::fs::DirBuilder::new();
        let parent = place.parent().unwrap_or(&self.0);
        parents.recursive(true).mode(0o700).create(parent).at("make directories")?;
        let root = CString::new(self.0.as_os_str().as_bytes())
            .map_err(io::Error::other)
            .at("name a directory")?;
        let child = apart::child(|| bind_below(&root, path.is_absolute(), raw, name)).at("fork")?;
        let status = child.wait(0).at("wait for a child")?;
        match libc::WEXITSTATUS(status) {
            0 if libc::WIFEXITED(status) => Ok(place),
            errno => Err(io::Error::from_raw_os_error(errno)).at(format!("bind {name} in a directory of its own")),
        }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // Only names too many.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Binds `raw` below `root`; 0, or the number of the error.
fn bind_below(root: &CStr, as_root: bool, raw: RawFd, name: &Addr) -> i32 {
    let entered = rustix::process::chdir(root).and_then(|()| match as_root {
        true => rustix::process::chroot(root),
        false => Ok(()),
    });
    let bound = entered.map_err(io::Error::from).and_then(|()| sock::bind(raw, name));
    bound.map_or_else(|e| e.raw_os_error().unwrap_or(libc::EINVAL), |()| 0)
}
