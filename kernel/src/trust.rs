//! Whether the path of a directory can be trusted: whoever may write a directory on the way can put something else in
//! the place of what lies in it, between any two looks.
//!
//! Each directory on the way belongs to this user or to root, and nobody else may write it, unless its sticky bit keeps
//! others from renaming what is not theirs (`/tmp`). Links are followed where they are this user's or root's. A group
//! that is this user's alone (the same name, no other members, nobody else's first group), and root's, may write.

use crate::dir::{open_at, read_link_at, Dir};
use std::ffi::{CStr, CString, OsString};
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

/// Most links on the way, as the kernel has it.
const MAX_LINKS: u32 = 40;
/// What users and groups are shown as that a user namespace does not map.
const OVERFLOW: u32 = 65534;
/// Longest entry of a user or group that is read.
const MAX_ENTRY: usize = 1 << 20;
/// Users with smaller numbers come with the system, which gives some of them root's group; nobody logs in as one.
const FIRST_PERSON: u32 = 1000;

/// Why a path is not trusted.
#[derive(Debug)]
pub enum Untrusted {
    /// It could not be followed.
    Io(io::Error),
    /// Others could make it lead elsewhere.
    Others {
        /// The directory or link by which they could.
        at: PathBuf,
        /// Why they could, and what to do.
        why: String,
    },
}

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Untrusted::Io(e) => e.fmt(f),
            Untrusted::Others { at, why } => write!(f, "{} {why}", at.display()),
        }
    }
}

impl From<io::Error> for Untrusted {
    fn from(e: io::Error) -> Self {
        Untrusted::Io(e)
    }
}

impl From<Untrusted> for io::Error {
    fn from(e: Untrusted) -> Self {
        match e {
            Untrusted::Io(e) => e,
            others => io::Error::new(io::ErrorKind::PermissionDenied, others.to_string()),
        }
    }
}

/// Finds the directory at `path`, an absolute one, on a way that nobody else can change. Whose the directory itself is,
/// and who may write it, the caller asks.
pub fn find(path: &Path) -> Result<Dir, Untrusted> {
    Walk::new()?.to(path).map(Dir::of)
}

/// Finds `dir`, an absolute path, where this process is going to make things of its own by name; refuses one in which
/// others could exchange them.
pub fn holder(dir: &Path) -> Result<Dir, Untrusted> {
    let walk = Walk::new()?;
    let found = File::from(walk.to(dir)?);
    walk.check(&found, dir)?;
    Ok(Dir::of(found.into()))
}

/// Finds the directory at `path`, an absolute one, to look at what user `owner` has there: no directory and no link on the
/// way is a third user's, who could have led it to another than was meant. Modes are not asked for.
pub fn way(path: &Path, owner: u32) -> Result<Dir, Untrusted> {
    let walk = Walk {
        also: Some(owner),
        any_mode: true,
        ..Walk::new()?
    };
    walk.to(path).map(Dir::of)
}

/// Finds the file at `path`, an absolute one; its descriptor is for no more than to look at it. Refuses one that others
/// than root, this user and user `also` could exchange or write.
pub fn file(path: &Path, also: Option<u32>) -> Result<File, Untrusted> {
    let walk = Walk { also, ..Walk::new()? };
    let found = File::from(walk.along(path, false)?);
    let m = found.metadata()?;
    if !walk.is_trusted(m.uid()) || walk.may_others_write(&m, &found) {
        let why = format!(
            "belongs to user {} and has mode {:03o}: others can write it",
            m.uid(),
            m.mode() & 0o7777
        );
        return Err(Untrusted::Others {
            at: path.to_owned(),
            why,
        });
    }
    Ok(found)
}

/// Opens the file at `path`, an absolute one, which holds a secret, to read it: no link, of this user's or root's, in a
/// place where nobody else can exchange it, and closed to others. One of root's may be read by a group.
pub fn secret(path: &Path) -> Result<File, Untrusted> {
    let (Some(above), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
    };
    let refuse = |why: String| {
        Err(Untrusted::Others {
            at: path.to_owned(),
            why,
        })
    };
    let file = match holder(above)?.open(Path::new(name), libc::O_RDONLY, 0) {
        Err(e) if e.raw_os_error() == Some(libc::ELOOP) => return refuse("is a symbolic link; name the file itself".into()),
        other => other?,
    };
    let (walk, m) = (Walk::new()?, file.metadata()?);
    if !m.is_file() {
        return refuse("is not a regular file".into());
    }
    if !walk.is_trusted(m.uid()) {
        return refuse(format!("belongs to user {}, who knows it and can change it", m.uid()));
    }
    let others = if m.uid() == walk.me { 0o077 } else { 0o037 };
    if m.mode() & others != 0 {
        let mode = m.mode() & 0o7777;
        return refuse(format!("has mode {mode:03o}, so others may know or change it; chmod 600 it"));
    }
    Ok(file)
}

struct Walk {
    me: u32,
    /// Another user who is trusted.
    also: Option<u32>,
    /// Whether others may write what lies on the way.
    any_mode: bool,
    /// Users whom this user namespace does not map are shown as nobody: of root's outside nothing else can be seen.
    is_partial: bool,
}

impl Walk {
    fn new() -> io::Result<Self> {
        // SAFETY: has no preconditions.
        let me = unsafe { libc::geteuid() };
        let map = std::fs::read_to_string("/proc/self/uid_map")?;
        Ok(Self {
            me,
            also: None,
            any_mode: false,
            is_partial: !maps(&map, OVERFLOW),
        })
    }

    fn is_trusted(&self, user: u32) -> bool {
        user == 0 || user == self.me || Some(user) == self.also || (user == OVERFLOW && self.is_partial)
    }

    fn to(&self, path: &Path) -> Result<OwnedFd, Untrusted> {
        self.along(path, true)
    }

    /// What `path` leads to: a directory, or where none is asked for whatever is there.
    fn along(&self, path: &Path, directory: bool) -> Result<OwnedFd, Untrusted> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        let root = || open_at(libc::AT_FDCWD, Path::new("/"), flags | libc::O_DIRECTORY, 0);
        if !path.is_absolute() {
            return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
        }
        // What is still to be gone, the next one last.
        let mut left = parts(path);
        let (mut at, mut way) = (root()?, PathBuf::from("/"));
        let mut links = 0;
        while let Some(name) = left.pop() {
            self.check(&File::from(at.try_clone()?), &way)?;
            let next = open_at(at.as_raw_fd(), Path::new(&name), flags, 0)?;
            let m = File::from(next.try_clone()?).metadata()?;
            if m.is_symlink() {
                links += 1;
                if links > MAX_LINKS {
                    return Err(io::Error::from_raw_os_error(libc::ELOOP).into());
                }
                let link = way.join(&name);
                if !self.is_trusted(m.uid()) {
                    let why = format!(
                        "is a symbolic link that belongs to user {}; name the directory itself",
                        m.uid()
                    );
                    return Err(Untrusted::Others { at: link, why });
                }
                let target = read_link_at(&next, Path::new(""))?;
                if target.is_absolute() {
                    (at, way) = (root()?, PathBuf::from("/"));
                }
                left.extend(parts(&target));
                continue;
            }
            if !m.is_dir() {
                if !directory && left.is_empty() {
                    return Ok(next);
                }
                return Err(io::Error::from_raw_os_error(libc::ENOTDIR).into());
            }
            at = next;
            match name.to_str() {
                Some("..") => drop(way.pop()),
                _ => way.push(&name),
            }
        }
        Ok(at)
    }

    /// Refuses a directory in which somebody else could exchange what lies there.
    fn check(&self, dir: &File, at: &Path) -> Result<(), Untrusted> {
        let m = dir.metadata()?;
        let refuse = |why: String| Err(Untrusted::Others { at: at.to_owned(), why });
        if !self.is_trusted(m.uid()) {
            let owner = m.uid();
            return refuse(format!(
                "belongs to user {owner}, who could put something else in the place of what lies in it; use a directory that lies in your own or root's only"
            ));
        }
        let (mode, shown) = (m.mode(), m.mode() & 0o7777);
        if self.any_mode || mode & 0o1000 != 0 || !self.may_others_write(&m, dir) {
            return Ok(());
        }
        let who = if mode & 0o002 != 0 {
            "others".to_owned()
        } else {
            format!(
                "others in group {}",
                group_name(m.gid()).unwrap_or_else(|| m.gid().to_string())
            )
        };
        refuse(format!(
            "has mode {shown:03o}, so {who} could put something else in the place of what lies in it; chmod go-w it, or chmod +t it, or use another directory"
        ))
    }

    /// Whether its mode lets others than its owner write `file`.
    fn may_others_write(&self, m: &Metadata, file: &File) -> bool {
        let mode = m.mode();
        mode & 0o002 != 0 || mode & 0o020 != 0 && !self.is_private(m, file)
    }

    /// Whether the group that may write this directory is this user alone, or root's.
    fn is_private(&self, m: &Metadata, dir: &File) -> bool {
        if has_acl(dir) {
            return false;
        }
        let Some((name, members)) = group(m.gid()) else {
            return false;
        };
        let me = user_name(self.me);
        let is_own = m.gid() == 0 || me.as_ref() == Some(&name);
        is_own
            && members
                .iter()
                .all(|member| Some(member) == me.as_ref() || member.as_bytes() == b"root")
            && !users().iter().any(|(user, first)| {
                let is_of_system = *first == 0 && *user < FIRST_PERSON;
                *first == m.gid() && ![0, self.me].contains(user) && !is_of_system
            })
    }
}

/// The parts of `path`, the first one last; `.` is none.
fn parts(path: &Path) -> Vec<OsString> {
    let names = path.components().filter_map(|c| match c {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    let mut names: Vec<OsString> = names.collect();
    names.reverse();
    names
}

/// Whether a user namespace with this map has a user of its own with number `id`.
fn maps(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut words = line.split_whitespace().map(|w| w.parse::<u64>().ok());
        match (words.next().flatten(), words.nth(1).flatten()) {
            (Some(first), Some(count)) => (first..first.saturating_add(count)).contains(&u64::from(id)),
            _ => false,
        }
    })
}

/// Whether `dir` has a list of further users and groups with rights; also where that cannot be told.
fn has_acl(dir: &File) -> bool {
    let Ok(path) = CString::new(format!("/proc/self/fd/{}", dir.as_raw_fd())) else {
        return true;
    };
    let name = c"system.posix_acl_access";
    // SAFETY: both are zero-terminated strings; nothing is written to a buffer of no length.
    let n = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
    let absent = [libc::ENODATA, libc::EOPNOTSUPP];
    n >= 0 || !io::Error::last_os_error().raw_os_error().is_some_and(|e| absent.contains(&e))
}

/// Has `read` fill a buffer that is large enough, and `take` what it has found.
fn entry<T>(mut read: impl FnMut(&mut [libc::c_char]) -> i32, take: impl FnOnce() -> Option<T>) -> Option<T> {
    // Lives until `take` has copied what lies in it.
    let mut buffer: Vec<libc::c_char> = vec![0; 1 << 10];
    loop {
        match read(&mut buffer) {
            0 => return take(),
            libc::ERANGE if buffer.len() < MAX_ENTRY => buffer.resize(buffer.len() * 4, 0),
            libc::EINTR => {}
            _ => return None,
        }
    }
}

/// Name and members of group `id`.
fn group(id: u32) -> Option<(CString, Vec<CString>)> {
    // SAFETY: the structure holds pointers and numbers, for which zero is a valid value.
    let mut found: libc::group = unsafe { std::mem::zeroed() };
    let mut result: *mut libc::group = std::ptr::null_mut();
    let (found, result) = (&raw mut found, &raw mut result);
    entry(
        // SAFETY: all of them are valid for writing, the buffer for its length.
        |buffer| unsafe { libc::getgrgid_r(id, found, buffer.as_mut_ptr(), buffer.len(), result) },
        || {
            // SAFETY: where a group was found the call has filled the structure with pointers to zero-terminated
            // strings, and a list of them that ends with null, which live in the buffer.
            unsafe {
                if (*result).is_null() {
                    return None;
                }
                let mut members = Vec::new();
                let mut at = (*found).gr_mem;
                while !at.is_null() && !(*at).is_null() {
                    members.push(CStr::from_ptr(*at).to_owned());
                    at = at.add(1);
                }
                Some((CStr::from_ptr((*found).gr_name).to_owned(), members))
            }
        },
    )
}

fn group_name(id: u32) -> Option<String> {
    group(id).map(|(name, _)| name.to_string_lossy().into_owned())
}

fn user_name(id: u32) -> Option<CString> {
    user(id).map(|(name, _)| name)
}

/// Number and first group of every user that can be listed; asked for once.
fn users() -> &'static [(u32, u32)] {
    static USERS: OnceLock<Vec<(u32, u32)>> = OnceLock::new();
    USERS.get_or_init(|| {
        let mut all = Vec::new();
        // SAFETY: nobody else in this program goes through the users, and here one thread does; each entry is read
        // before the next one takes its place.
        unsafe {
            libc::setpwent();
            while let Some(user) = libc::getpwent().as_ref() {
                all.push((user.pw_uid, user.pw_gid));
            }
            libc::endpwent();
        }
        all
    })
}

/// Name and first group of user `id`.
pub(crate) fn user(id: u32) -> Option<(CString, u32)> {
    // SAFETY: the structure holds pointers and numbers, for which zero is a valid value.
    let mut found: libc::passwd = unsafe { std::mem::zeroed() };
    let mut result: *mut libc::passwd = std::ptr::null_mut();
    let (found, result) = (&raw mut found, &raw mut result);
    entry(
        // SAFETY: all of them are valid for writing, the buffer for its length.
        |buffer| unsafe { libc::getpwuid_r(id, found, buffer.as_mut_ptr(), buffer.len(), result) },
        || {
            // SAFETY: where a user was found the call has filled the structure with pointers to zero-terminated
            // strings, which live in the buffer.
            unsafe { (!(*result).is_null()).then(|| (CStr::from_ptr((*found).pw_name).to_owned(), (*found).pw_gid)) }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{chown, lchown, symlink, PermissionsExt};

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(test: &str) -> Self {
            let base = std::env::temp_dir().join(format!("belay-trust-{test}-{}", std::process::id()));
            std::fs::create_dir_all(base.join("a/b/job")).unwrap();
            Self(base)
        }

        fn mode(&self, name: &str, mode: u32) {
            std::fs::set_permissions(self.0.join(name), PermissionsExt::from_mode(mode)).unwrap();
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn refused(path: &Path) -> Option<PathBuf> {
        match find(path) {
            Ok(_) => None,
            Err(Untrusted::Others { at, .. }) => Some(at),
            Err(Untrusted::Io(e)) => panic!("{}: {e}", path.display()),
        }
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused_wherever_it_lies_on_the_way() {
        let s = Scratch::new("modes");
        let job = s.0.join("a/b/job");
        assert_eq!(refused(&job), None);
        for on_the_way in ["a", "a/b"] {
            for (mode, bad) in [(0o777, true), (0o757, true), (0o1777, false), (0o3770, false), (0o755, false)] {
                s.mode(on_the_way, mode);
                assert_eq!(refused(&job).is_some(), bad, "{on_the_way} {mode:o}");
            }
        }
        // The directory itself is the caller's to judge; what will be made in it is not.
        s.mode("a/b/job", 0o777);
        assert_eq!(refused(&job), None);
        assert!(matches!(holder(&job), Err(Untrusted::Others { at, .. }) if at == job));
        s.mode("a/b/job", 0o1777);
        holder(&job).map(drop).unwrap();
    }

    #[test]
    fn a_way_for_a_look_is_root_s_or_the_owner_s_in_any_mode() {
        // SAFETY: has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            return; // others cannot give files away
        }
        let s = Scratch::new("way");
        let job = s.0.join("a/b/job");
        let refused = |path: &Path| match way(path, 1) {
            Ok(_) => None,
            Err(Untrusted::Others { at, .. }) => Some(at),
            Err(Untrusted::Io(e)) => panic!("{}: {e}", path.display()),
        };
        s.mode("a", 0o777);
        chown(&job, Some(1), Some(1)).unwrap();
        chown(s.0.join("a/b"), Some(1), Some(1)).unwrap();
        let link = s.0.join("link");
        symlink("a/b", &link).unwrap();
        lchown(&link, Some(1), Some(1)).unwrap();
        assert_eq!(refused(&link.join("job")), None);
        lchown(&link, Some(2), Some(2)).unwrap();
        assert_eq!(refused(&link.join("job")), Some(link));
        chown(s.0.join("a/b"), Some(2), Some(2)).unwrap();
        assert_eq!(refused(&job), Some(s.0.join("a/b")));
    }

    #[test]
    fn links_are_followed_and_judged() {
        let s = Scratch::new("links");
        symlink("b/../b/job", s.0.join("a/link")).unwrap();
        symlink(s.0.join("a/link"), s.0.join("far")).unwrap();
        assert_eq!(refused(&s.0.join("far")), None);
        s.mode("a/b", 0o777);
        assert_eq!(refused(&s.0.join("far")), Some(s.0.join("a/b")));
        s.mode("a/b", 0o755);
        symlink("loop", s.0.join("loop")).unwrap();
        assert!(matches!(find(&s.0.join("loop")), Err(Untrusted::Io(e)) if e.raw_os_error() == Some(libc::ELOOP)));
        assert!(matches!(find(&s.0.join("none")), Err(Untrusted::Io(e)) if e.kind() == io::ErrorKind::NotFound));
        assert!(matches!(find(Path::new("a")), Err(Untrusted::Io(_))));
    }

    #[test]
    fn what_belongs_to_others_is_refused() {
        // SAFETY: has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            return; // only root can give things away
        }
        let s = Scratch::new("owners");
        let job = s.0.join("a/b/job");
        symlink("a/b/job", s.0.join("link")).unwrap();
        lchown(s.0.join("link"), Some(1234), None).unwrap();
        assert_eq!(refused(&s.0.join("link")), Some(s.0.join("link")));
        chown(s.0.join("a"), Some(1234), None).unwrap();
        assert_eq!(refused(&job), Some(s.0.join("a")));
        // A group of root's alone may write, one of others' may not.
        chown(s.0.join("a"), Some(0), Some(0)).unwrap();
        s.mode("a", 0o2775);
        assert_eq!(refused(&job), None);
        chown(s.0.join("a"), Some(0), Some(1234)).unwrap();
        s.mode("a", 0o2775);
        assert_eq!(refused(&job), Some(s.0.join("a")));
    }

    #[test]
    fn maps_of_user_namespaces() {
        assert!(maps("         0          0 4294967295\n", OVERFLOW));
        assert!(!maps("1000 1000 1\n", OVERFLOW) && maps("65534 65534 1\n", OVERFLOW));
        assert!(!maps("", OVERFLOW) && !maps("x y z", OVERFLOW));
    }

    #[test]
    fn a_file_is_kept_where_only_trusted_users_can_exchange_or_write_it() {
        let top = std::env::temp_dir().join(format!("belay-kept-{}", std::process::id()));
        let (dir, path) = (top.join("d"), top.join("d/program"));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(&path, "x").unwrap();
        let mode = |path: &Path, bits| std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(bits)).unwrap();
        let kept = |also| file(&path, also).is_ok();
        for (of_dir, of_file, expected) in [
            (0o755, 0o755, true),
            (0o1777, 0o755, true),
            (0o777, 0o755, false),
            (0o755, 0o757, false),
            (0o755, 0o1757, false),
        ] {
            mode(&dir, of_dir);
            mode(&path, of_file);
            assert_eq!(kept(None), expected, "{of_dir:o} {of_file:o}");
        }
        mode(&path, 0o755);
        assert!(file(&top.join("d/none"), None).is_err());
        // SAFETY: has no preconditions.
        if unsafe { libc::geteuid() } == 0 {
            // As software that somebody keeps for all.
            for path in [&dir, &path] {
                std::os::unix::fs::chown(path, Some(4242), None).unwrap();
            }
            assert_eq!([None, Some(4242), Some(4243)].map(kept), [false, true, false]);
        }
        std::fs::remove_dir_all(top).unwrap();
    }
}
