//! `[verbs]`: the library that stands between programs and libibverbs, loaded first into the command and all it starts.

use crate::{sys, Failure};
use belay_wire::Exit;
use serde::{Deserialize, Serialize};
use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const LIBRARY: &str = "libbelay_verbs.so";
/// The variable by which the dynamic linker loads libraries first.
const VARIABLE: &str = "LD_PRELOAD";
/// The adapters of this host.
const ADAPTERS: &str = "/sys/class/infiniband";

/// When the library is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Enable {
    /// Never.
    Off,
    /// On hosts that have adapters.
    #[default]
    Auto,
    /// On all hosts.
    On,
}

/// `[verbs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verbs {
    /// When the library is loaded. Where nothing is said: as with `Auto`, if it is installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable: Option<Enable>,
}

impl Verbs {
    /// The variable for the command, where it is to have the library.
    pub(crate) fn variable(self) -> Result<Option<CString>, Failure> {
        let adapters = || std::fs::read_dir(ADAPTERS).is_ok_and(|mut d| d.next().is_some());
        match self.enable.unwrap_or_default() {
            Enable::Off => return Ok(None),
            Enable::Auto if !adapters() => return Ok(None),
            Enable::Auto | Enable::On => {}
        }
        let path = match find() {
            Ok(path) => path,
            // Nobody has asked for it. A checkpoint of a program of the verbs will say what is missing.
            Err(_) if self.enable.is_none() => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut value = OsString::from(format!("{VARIABLE}="));
        value.push(&path);
        if let Some(others) = std::env::var_os(VARIABLE).filter(|o| !o.is_empty()) {
            value.push(":");
            value.push(others);
        }
        let unusable = |_| Failure::new(Exit::Usage, format!("{}: a name with a zero byte", path.display()));
        CString::new(value.into_vec()).map(Some).map_err(unusable)
    }
}

/// The library beside this program, or in ../lib/belay, as it is installed. It runs in every program of the job, so it
/// must be as trustworthy as belay is.
fn find() -> Result<PathBuf, Failure> {
    let exe = belay_kernel::proc::own_program().map_err(|e| Failure::system("find belay's own program", &e))?;
    let dir = exe.parent().unwrap_or(Path::new("/"));
    let places = [dir.join(LIBRARY), dir.join("../lib/belay").join(LIBRARY)];
    let found = places.iter().find_map(|p| p.canonicalize().ok().filter(|p| p.is_file()));
    let path = found.ok_or_else(|| {
        let why = format!(
            "{LIBRARY} is neither beside {} nor in ../lib/belay: install belay completely, or set enable = \"off\" under [verbs]",
            exe.display()
        );
        Failure::new(Exit::Usage, why)
    })?;
    let own = std::fs::metadata(&exe).map_or(0, |m| m.uid());
    let m = std::fs::metadata(&path).map_err(|e| Failure::io(format!("look at {}", path.display()), &e))?;
    if ![0, own, sys::euid()].contains(&m.uid()) || m.mode() & 0o002 != 0 {
        let why = format!("{} is not belay's alone: install belay completely", path.display());
        return Err(Failure::new(Exit::NotOurs, why));
    }
    // Names in the variable are separated by colons and spaces.
    if path.as_os_str().as_encoded_bytes().iter().any(|b| b": ".contains(b)) {
        let why = format!(
            "{}: the name has a colon or a space, which the dynamic linker cannot take: install belay elsewhere",
            path.display()
        );
        return Err(Failure::new(Exit::Usage, why));
    }
    Ok(path)
}
