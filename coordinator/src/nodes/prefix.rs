//! Open MPI's launcher, called by its path.
//!
//! It takes the directory above its own for a prefix then, and looks for `srun` in `PREFIX/bin` before it does in PATH.
//! Where there is one (`/usr/bin`), no stand-in would be found, and the daemons would be no parts of the job. So it is
//! called by its name, and finds in its environment what it would have put there itself, behind the stand-ins.

use super::srun::SRUN;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The launchers that do so, whatever links lead to them.
const LAUNCHERS: [&str; 3] = ["orterun", "prterun", "prte"];
const PATH: &str = "PATH";

/// How it is called instead.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plain {
    /// Its first argument.
    pub(crate) name: OsString,
    pub(crate) variables: Vec<(&'static str, OsString)>,
}

/// How `program` is called where that makes a difference, in an environment whose PATH begins with the directory of stand-ins.
pub(crate) fn plain(program: &Path, variable: &dyn Fn(&str) -> Option<OsString>) -> Option<Plain> {
    let (bin, name) = (program.parent()?, program.file_name()?);
    let file = program.canonicalize().ok()?;
    let is_launcher = LAUNCHERS.iter().any(|l| file.file_name().is_some_and(|f| f == *l));
    if !program.is_absolute() || !is_launcher || !bin.join(SRUN).exists() {
        return None;
    }
    let mut variables = Vec::new();
    let path = variable(PATH).unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    if !dirs.iter().any(|d| d == bin) {
        dirs.insert(dirs.len().min(1), bin.to_owned());
        variables.push((PATH, joined(&dirs)?));
    }
    // The loader looks there without being told, as Open MPI, which says so, does not know.
    if bin != Path::new("/usr/bin") && bin.file_name().is_some_and(|b| b == "bin") {
        let libraries = "LD_LIBRARY_PATH";
        let old = variable(libraries).unwrap_or_default();
        let old = std::env::split_paths(&old).filter(|d| !d.as_os_str().is_empty());
        let dirs: Vec<PathBuf> = bin.parent().map(|p| p.join("lib")).into_iter().chain(old).collect();
        variables.push((libraries, joined(&dirs)?));
    }
    Some(Plain {
        name: name.to_owned(),
        variables,
    })
}

fn joined(dirs: &[PathBuf]) -> Option<OsString> {
    std::env::join_paths(dirs).ok()
}

/// Of the process itself.
pub(crate) fn own(name: &str) -> Option<OsString> {
    std::env::var_os(OsStr::new(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_launcher_beside_srun_is_called_by_its_name() {
        let dir = std::env::temp_dir().join(format!("belay-prefix-{}", std::process::id()));
        let bin = dir.join("bin");
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::write(bin.join("orterun"), "").unwrap();
        symlink("orterun", bin.join("mpirun")).unwrap();
        std::fs::write(bin.join("other"), "").unwrap();
        let variable = |name: &str| (name == PATH).then(|| "/job/standins:/bin".into());
        let call = |name: &str| plain(&bin.join(name), &variable);
        assert_eq!(call("mpirun"), None);
        std::fs::write(bin.join(SRUN), "").unwrap();
        let (path, lib) = (format!("/job/standins:{}:/bin", bin.display()), dir.join("lib"));
        let expected = Plain {
            name: "mpirun".into(),
            variables: vec![(PATH, path.into()), ("LD_LIBRARY_PATH", lib.into())],
        };
        assert_eq!(call("mpirun"), Some(expected));
        assert_eq!((call("other"), plain(Path::new("mpirun"), &variable)), (None, None));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
