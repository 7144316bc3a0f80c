//! Session directories of Open MPI: its daemons make them when they start, and their ranks put files there later. A
//! restart on another host makes them again, also where nothing in them is open.

use super::directories::parents;
use crate::env::ProcessView;
use crate::model::Directory;
use belay_kernel::proc;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What the directory of a host is called, up to the name of the host and the number of the user.
const OF_HOST: &str = "ompi.";
/// How the words end that name the place of these directories, as options and in the environment.
const PLACE: &[u8] = b"tmpdir_base";
/// What the C library's programs call the place of temporary files, and Open MPI too.
const TEMPORARY: [&[u8]; 3] = [b"TMPDIR", b"TEMP", b"TMP"];
/// Most directories of one daemon: two for each rank, and some.
const MOST: usize = 4096;

/// The session directories of the daemons among `processes`, each with those above it, outer ones first.
pub(crate) fn sessions(processes: &[ProcessView]) -> Vec<Vec<Directory>> {
    let mut all = Vec::new();
    for p in processes {
        let name = p.exe.file_name().unwrap_or_default();
        if name == "orterun" || name == "orted" {
            all.extend(of_daemon(p.pid, name == "orterun"));
        }
    }
    all
}

fn of_daemon(pid: i32, is_first: bool) -> Vec<Vec<Directory>> {
    let words = |file: &str| proc::read_whole(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let (line, environment) = (words("cmdline"), words("environ"));
    let Some(name) = (if is_first { Some(format!("pid.{pid}")) } else { family(&line) }) else {
        return Vec::new();
    };
    let Ok(owner) = std::fs::metadata(format!("/proc/{pid}")).map(|m| m.uid()) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    for place in places(&line, &environment) {
        let hosts = std::fs::read_dir(place).into_iter().flatten().flatten();
        let hosts = hosts.filter(|e| e.file_name().as_bytes().starts_with(OF_HOST.as_bytes()));
        for session in hosts.map(|e| e.path().join(&name)) {
            add(&session, owner, &mut all);
        }
    }
    all
}

/// Adds the directory at `path`, and those in it, where they are `owner`'s.
fn add(path: &Path, owner: u32, all: &mut Vec<Vec<Directory>>) {
    let is_own = std::fs::symlink_metadata(path).is_ok_and(|m| m.is_dir() && m.uid() == owner);
    if !is_own || all.len() == MOST {
        return;
    }
    all.push(parents(&path.join("x")));
    for inner in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if inner.file_type().is_ok_and(|t| t.is_dir()) {
            add(&inner.path(), owner, all);
        }
    }
}

/// What the session of a daemon is called that `mpirun` has started on another host: after the upper half of the number
/// that it was told.
fn family(line: &[u8]) -> Option<String> {
    let mut words = line.split(|b| *b == 0);
    words.find(|w| *w == b"ess_base_jobid")?;
    let number: u32 = std::str::from_utf8(words.next()?).ok()?.trim_matches('"').parse().ok()?;
    Some(format!("jf.{}", number >> 16))
}

/// Where temporary files of a program with these words and this environment may lie.
pub(super) fn places(line: &[u8], environment: &[u8]) -> Vec<PathBuf> {
    let mut words = line.split(|b| *b == 0);
    let mut all = vec![PathBuf::from("/tmp")];
    let mut found = |place: &[u8]| {
        let place = PathBuf::from(OsStr::from_bytes(place));
        if place.is_absolute() && !all.contains(&place) {
            all.push(place);
        }
    };
    while let Some(word) = words.next() {
        if word.ends_with(PLACE) {
            found(words.next().unwrap_or_default());
        }
    }
    for word in environment.split(|b| *b == 0) {
        let Some(at) = word.iter().position(|b| *b == b'=') else {
            continue;
        };
        let (name, place) = word.split_at(at);
        if TEMPORARY.contains(&name) || name.ends_with(PLACE) {
            found(&place[1..]);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_known_by_its_words() {
        let line = b"orted\0-mca\0ess_base_jobid\0\"2282225664\"\0-mca\0orte_tmpdir_base\0/scratch\0";
        assert_eq!(family(line).as_deref(), Some("jf.34824"));
        assert_eq!(family(b"orted\0-mca\0ess_base_jobid\0"), None);
        assert_eq!(family(b"orted\0--daemonize\0"), None);
        let environment = b"TMPDIR=/tmp\0OMPI_MCA_orte_local_tmpdir_base=/local\0TMP=here\0HOME=/root\0odd\0";
        let expected = ["/tmp", "/scratch", "/local"].map(PathBuf::from);
        assert_eq!(places(line, environment), expected);
    }

    #[test]
    fn only_directories_of_the_owner_are_taken() {
        let dir = std::env::temp_dir().join(format!("belay-sessions-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("1/0")).unwrap();
        std::fs::write(dir.join("1/file"), "").unwrap();
        std::os::unix::fs::symlink("/usr", dir.join("link")).unwrap();
        let owner = std::fs::metadata(&dir).unwrap().uid();
        let taken = |owner| {
            let mut all = Vec::new();
            add(&dir, owner, &mut all);
            let last = |d: &Vec<Directory>| d.last().map(|d| d.path.0.clone());
            all.iter().filter_map(last).collect::<Vec<_>>()
        };
        assert_eq!(taken(owner), [dir.clone(), dir.join("1"), dir.join("1/0")]);
        assert!(taken(owner + 1).is_empty());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
