//! Where the files of bound sockets lie while sockets are made again.
//!
//! Several sockets of a job can have been bound to one path, one after the other, when the file of the one before had
//! been removed or renamed. So a file that is in the way of another socket's lies aside meanwhile, under a name of its
//! own in the same directory, and its socket is reached there. At the end each has the name that it had, or none. What
//! is no socket's, or nobody of the job's, is not moved: there a socket without file lies elsewhere meanwhile
//! ([`Apart`]).
//!
//! Another user who may write a directory on the way can exchange it at any moment. Only `bind` itself goes by path,
//! because the kernel keeps the path as the socket's name: what it makes is looked for in the directory that was seen
//! before the restart began, and where it is not there, the restart is refused. All else is done in that directory,
//! with that file.

use super::apart::Apart;
use super::BoundFile;
use crate::fault::{refuse, At, Fault};
use crate::files::{owner, Seen, Sight, Sights};
use crate::sys::diag::Diag;
use crate::sys::fd;
use crate::sys::sock::{self, Addr};
use rustix::fs::Mode;
use rustix::process::umask;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// So many names that are taken are passed over.
const MOST_IN_THE_WAY: usize = 100;

/// For so long in all, those that still have the socket of a file in the way are waited for: the killed job, as a rule.
const PATIENCE: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(5);

const STRANGE: &str = "what has its name was not there before the restart, or is neither of its owner nor of this user";
const ANOTHER: &str = "another file has taken its place while the job was being restarted";
const ALIVE: &str = "somebody still has the socket whose file is there, or that is no socket's";

const EXCHANGED: &str =
    "it lies in another directory than its own, which somebody has exchanged while the job was being restarted; restart again";

/// The files of all sockets that have been bound, by the inodes of these.
#[derive(Debug)]
pub(super) struct Places {
    bound: RefCell<HashMap<u64, Placed>>,
    /// Where the files of some lie.
    apart: RefCell<Vec<Apart>>,
    sights: Sights,
    /// What is left of [`PATIENCE`].
    patience: Cell<Duration>,
}

/// The file of one socket.
#[derive(Debug)]
struct Placed {
    kind: i32,
    /// Where it was bound.
    path: PathBuf,
    /// Where it lies: in the same directory,
    now: PathBuf,
    /// which is this one.
    dir: Sight,
    /// Which file it is.
    seen: Seen,
    file: BoundFile,
    /// The socket is there no more; its file may stay.
    dead: bool,
}

impl Placed {
    /// Opens its directory.
    fn above(&self) -> Result<OwnedFd, Fault> {
        self.dir.above(&self.path)
    }

    /// Opens the file in its directory, where it still lies there.
    fn find(&self, above: &OwnedFd) -> Result<Option<OwnedFd>, Fault> {
        let Some(found) = look_for(above, &self.now)? else {
            return Ok(None);
        };
        let is_it = self.seen.is(Seen::of(&found).at("stat")?);
        Ok(is_it.then_some(found))
    }
}

impl Places {
    /// No socket is bound yet.
    pub(super) fn new(sights: Sights) -> Self {
        Self {
            bound: RefCell::default(),
            apart: RefCell::default(),
            sights,
            patience: Cell::new(PATIENCE),
        }
    }

    /// Gives a socket its name. A file that a dead socket has left under that name is replaced.
    pub(super) fn bind(&self, raw: RawFd, name: &Addr, file: Option<&BoundFile>) -> Result<(), Fault> {
        if name.is_unnamed() {
            return Ok(());
        }
        let (Some(file), Some(path)) = (file, name.unix_path()) else {
            return sock::bind(raw, name).at(format!("bind {name}"));
        };
        let full = file.at(&path);
        let sight = self.sights.make(&file.parents, self.sights.at(&full))?;
        let above = sight.above(&full)?;
        // By the directory itself, where the name has no other in it.
        let cwd = file.cwd.as_ref().map(|cwd| match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => cwd.as_path().to_owned(),
            _ => fd::self_path(above.as_raw_fd()),
        });
        let bind = || in_directory(cwd.as_deref(), || private(|| sock::bind(raw, name)));
        let kind = kind_of(raw).at("read its type")?;
        let mut why = None;
        let bound = match bind() {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                why = self.make_room(kind, &above, &full, sight)?;
                if why.is_none() {
                    bind()
                } else {
                    Err(e)
                }
            }
            bound => bound,
        };
        let bound = match bound {
            // Nobody can reach it there.
            Err(_) if !file.exists && file.renamed.is_none() => return self.bind_apart(raw, name, &path, file),
            bound => bound,
        };
        bound.at(because(format!("bind {name}"), why))?;
        let made = made(raw, &above, &full, sight)?;
        if file.exists {
            give(&made, file).at(format!("set the owner and mode of {name}"))?;
        }
        let placed = Placed {
            kind,
            path: full.clone(),
            now: full,
            dir: Sight {
                dir: Some(Seen::of(&above).at("stat")?),
                ..sight
            },
            seen: Seen::of(&made).at("stat")?,
            file: file.clone(),
            dead: false,
        };
        self.note(raw, placed)
    }

    /// Gives a socket a name that leads to something else by now.
    pub(super) fn bind_apart(&self, raw: RawFd, name: &Addr, path: &Path, file: &BoundFile) -> Result<(), Fault> {
        let apart = Apart::make().at("make a directory")?;
        let now = apart.bind(raw, name, path)?;
        let above = fd::above(&now).at("open its directory")?;
        let Some(made) = look_for(&above, &now)? else {
            return refuse(EXCHANGED);
        };
        self.apart.borrow_mut().push(apart);
        let placed = Placed {
            kind: kind_of(raw).at("read its type")?,
            path: now.clone(),
            now,
            dir: Sight {
                dir: Some(Seen::of(&above).at("stat")?),
                ..Sight::default()
            },
            seen: Seen::of(&made).at("stat")?,
            file: file.clone(),
            dead: false,
        };
        self.note(raw, placed)
    }

    fn note(&self, raw: RawFd, placed: Placed) -> Result<(), Fault> {
        let socket = fd::fstat(raw).at("stat")?.st_ino;
        self.bound.borrow_mut().insert(socket, placed);
        Ok(())
    }

    /// Says that socket `raw`, which was made for the moment only, is about to be closed.
    pub(super) fn let_go(&self, raw: RawFd) -> io::Result<()> {
        if let Some(placed) = self.bound.borrow_mut().get_mut(&fd::fstat(raw)?.st_ino) {
            placed.dead = true;
        }
        Ok(())
    }

    /// Makes room for the file `path` in directory `above`; where that cannot be done, says why.
    fn make_room(&self, kind: i32, above: &OwnedFd, path: &Path, sight: Sight) -> Result<Option<&'static str>, Fault> {
        // Those of this rebuild are not tried: whoever listens would have one visitor more.
        if self.move_aside(above, path)? {
            return Ok(None);
        }
        self.clear(kind, above, path, sight)
    }

    /// Removes what a dead socket has left under the last name of `path` in `above`, where it was `sight` before the
    /// restart began; where something is in the way after that, says why. What somebody else has left there, or put
    /// there since, is not ours to remove.
    fn clear(&self, kind: i32, above: &OwnedFd, path: &Path, sight: Sight) -> Result<Option<&'static str>, Fault> {
        let Some(found) = look_for(above, path)? else {
            return Ok(None);
        };
        let Some(seen) = sight.file else {
            return Ok(Some(STRANGE));
        };
        if !seen.is(Seen::of(&found).at("stat")?) {
            return Ok(Some(ANOTHER));
        }
        let is_stale = || is_stale(kind, &found).at("look at what has its name");
        if !is_stale()? {
            self.outlast(&found)?;
            if !is_stale()? {
                return Ok(Some(ALIVE));
            }
        }
        fd::unlink_at(above, path).at("remove what a dead socket has left")?;
        Ok(None)
    }

    /// Waits for those that have a socket bound to `file`, without a visit to whoever listens there.
    fn outlast(&self, file: &OwnedFd) -> Result<(), Fault> {
        let ino = fd::fstat(file.as_raw_fd()).at("stat")?.st_ino as u32;
        while Diag::is_bound(ino).at("ask the kernel for sockets (sock_diag)")? {
            let Some(left) = self.patience.get().checked_sub(STEP) else {
                break;
            };
            self.patience.set(left);
            std::thread::sleep(STEP);
        }
        Ok(())
    }

    /// Gives the file of `placed`, in `above`, the last name of `to`: what a dead socket has left there goes, and nothing else.
    fn rename(&self, placed: &Placed, above: &OwnedFd, to: &Path) -> Result<(), Fault> {
        let why = self.clear(placed.kind, above, to, self.sights.at(to))?;
        let step = format!("rename {} to {}", placed.path.display(), to.display());
        fd::rename_new_at(above, &placed.now, to).at(because(step, why))
    }

    /// Makes room where the file of a socket lies that has been made before; says whether one does.
    fn move_aside(&self, above: &OwnedFd, path: &Path) -> Result<bool, Fault> {
        let mut all = self.bound.borrow_mut();
        let count = all.len();
        let Some((socket, placed)) = all.iter_mut().find(|(_, p)| p.now == path) else {
            return Ok(false);
        };
        if placed.find(above)?.is_none() {
            return Ok(false);
        }
        if placed.dead {
            let socket = *socket;
            all.remove(&socket);
            fd::unlink_at(above, path).at("remove what a dead socket has left")?;
            return Ok(true);
        }
        // Others may know these names beforehand, and a restart that was killed may have left some.
        for n in count..=count + MOST_IN_THE_WAY {
            let aside = path.with_file_name(format!(".belay-{}-{n}", std::process::id()));
            match fd::rename_new_at(above, path, &aside) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                moved => {
                    moved.at(format!("rename {}", path.display()))?;
                    placed.now = aside;
                    return Ok(true);
                }
            }
        }
        refuse(format!(
            "files called .belay-* are in the way in the directory of {}; remove them and restart again",
            path.display()
        ))
    }

    /// Does `task` with a name by which socket `raw`, called `name`, is reached now.
    pub(super) fn reach<T>(&self, raw: RawFd, name: &Addr, task: impl FnOnce(&Addr) -> io::Result<T>) -> Result<T, Fault> {
        let socket = fd::fstat(raw).at("stat")?.st_ino;
        let all = self.bound.borrow();
        let Some(placed) = all.get(&socket) else {
            return task(name).at(format!("connect to {name}"));
        };
        match placed.find(&placed.above()?)? {
            Some(found) => task(&address(&found)).at(format!("connect to {name}")),
            None => refuse(format!("connect to {name}: another file has taken its place; restart again")),
        }
    }

    /// All files that have been made.
    pub(super) fn files(&self) -> Vec<Seen> {
        self.bound.borrow().values().map(|placed| placed.seen).collect()
    }

    /// Gives each file the name that it had at the checkpoint, and removes those that had none.
    pub(super) fn settle(&self) -> Result<(), Fault> {
        let all = self.bound.borrow();
        let gone = || all.values().filter(|p| !p.file.exists);
        // Another may have had the name since: these go first.
        for p in gone().filter(|p| p.file.renamed.is_none()) {
            let above = p.above()?;
            if p.find(&above)?.is_some() {
                // Only a name too many.
                drop(fd::unlink_at(&above, &p.now));
            }
        }
        for p in gone() {
            let Some(to) = p.file.to(&p.path) else { continue };
            let above = p.above()?;
            let Some(found) = p.find(&above)? else { continue };
            give(&found, &p.file).at(format!("set the owner and mode of {}", p.path.display()))?;
            self.rename(p, &above, &to)?;
        }
        for p in all.values().filter(|p| p.file.exists && p.now != p.path) {
            let above = p.above()?;
            if p.find(&above)?.is_none() {
                return refuse(format!(
                    "{}: another file has taken its place; restart again",
                    p.path.display()
                ));
            }
            self.rename(p, &above, &p.path)?;
        }
        Ok(())
    }
}

/// `step`, and why it fails if it does.
fn because(step: String, why: Option<&str>) -> String {
    match why {
        Some(why) => format!("{step} ({why})"),
        None => step,
    }
}

/// Opens what has the last name of `path` in directory `above`.
fn look_for(above: &OwnedFd, path: &Path) -> Result<Option<OwnedFd>, Fault> {
    match fd::find_at(above, path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.at(format!("look for {}", path.display())).map(Some),
    }
}

/// Opens the file that socket `raw` has just been bound to, which has the last name of `path` in directory `above`.
fn made(raw: RawFd, above: &OwnedFd, path: &Path, sight: Sight) -> Result<OwnedFd, Fault> {
    let Some(found) = look_for(above, path)? else {
        return refuse(EXCHANGED);
    };
    if sight.doubtful {
        let socket = fd::fstat(raw).at("stat")?.st_ino as u32;
        let known = Diag::open().and_then(|mut diag| diag.unix(socket));
        let file = known.at("ask the kernel for its file (sock_diag)")?.file;
        // The kernel tells no more of its number.
        if file != Some(fd::fstat(found.as_raw_fd()).at("stat")?.st_ino as u32) {
            return refuse(EXCHANGED);
        }
    }
    Ok(found)
}

fn give(made: &OwnedFd, file: &BoundFile) -> io::Result<()> {
    owner::give_made(made, libc::S_IFSOCK, Some(file.owner), file.mode, false)
}

/// Runs `f`, which makes a file that is for nobody else until it has its owner and mode.
fn private<T>(f: impl FnOnce() -> T) -> T {
    let mask = umask(Mode::from_bits_retain(0o177));
    let done = f();
    umask(mask);
    done
}

/// Runs `f` in the directory to which a relative socket name belongs.
fn in_directory<T>(dir: Option<&Path>, f: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(dir) = dir else {
        return f();
    };
    let here = fd::open(Path::new("."), libc::O_PATH | libc::O_DIRECTORY, 0)?;
    std::env::set_current_dir(dir)?;
    let done = f();
    std::env::set_current_dir(fd::self_path(here.as_raw_fd()))?;
    done
}

fn kind_of(raw: RawFd) -> io::Result<i32> {
    sock::get(raw, libc::SOL_SOCKET, libc::SO_TYPE)
}

/// An address that leads to the socket whose file `found` is open on, wherever it lies.
pub(super) fn address(found: &OwnedFd) -> Addr {
    Addr::unix(&fd::self_path(found.as_raw_fd()))
}

/// Whether `found` is the file of a socket that nobody has bound any more.
fn is_stale(kind: i32, found: &OwnedFd) -> io::Result<bool> {
    if fd::fstat(found.as_raw_fd())?.st_mode & libc::S_IFMT != libc::S_IFSOCK {
        return Ok(false);
    }
    let probe = sock::socket(libc::AF_UNIX, kind | libc::SOCK_NONBLOCK, 0)?;
    let tried = sock::connect(probe.as_raw_fd(), &address(found));
    Ok(tried.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::FsPath;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixDatagram;

    fn look(path: &Path) -> Sight {
        Sight {
            file: fd::stat(path, false).ok().as_ref().map(Seen::from),
            ..Sight::default()
        }
    }

    fn ino(path: &Path) -> u64 {
        std::fs::symlink_metadata(path).unwrap().ino()
    }

    #[test]
    fn only_what_a_dead_socket_left_before_the_restart_is_replaced() {
        let dir = std::env::temp_dir().join(format!("belay-places-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (bound, to) = (dir.join("new"), dir.join("x"));
        let file = BoundFile {
            cwd: None,
            exists: false,
            renamed: Some(FsPath(to.clone())),
            mode: 0o700,
            owner: (owner::me(), 0),
            parents: Vec::new(),
        };
        let restart = |before: Sight| {
            let places = Places::new(Sights::with(&to, before));
            let socket = sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
            places.bind(socket.as_raw_fd(), &Addr::unix(&bound), Some(&file)).unwrap();
            let made = ino(&bound);
            let settled = places.settle().map_err(|e| e.to_string());
            (settled, made)
        };
        // Nothing lies there.
        let (settled, made) = restart(Sight::default());
        assert_eq!((settled, ino(&to)), (Ok(()), made));
        // What it has left itself, and somebody has put there since.
        let before = look(&to);
        let (settled, made) = restart(before);
        assert_eq!((settled, ino(&to)), (Ok(()), made));
        let there = ino(&to);
        for before in [Sight::default(), look(&dir)] {
            assert!(restart(before).0.is_err());
            assert_eq!(ino(&to), there, "another dead socket's");
            std::fs::remove_file(&bound).unwrap();
        }
        std::fs::remove_file(&to).unwrap();
        let server = UnixDatagram::bind(&to).unwrap();
        assert!(restart(look(&to)).0.is_err());
        drop(server);
        std::fs::remove_file(&to).unwrap();
        std::fs::write(&to, "own").unwrap();
        std::fs::remove_file(&bound).unwrap();
        assert!(restart(look(&to)).0.is_err());
        assert_eq!(std::fs::read(&to).unwrap(), b"own");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn who_still_has_a_socket_for_a_moment_is_waited_for() {
        let dir = std::env::temp_dir().join(format!("belay-outlast-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("x");
        let file = BoundFile {
            exists: true,
            owner: (owner::me(), 0),
            ..BoundFile::default()
        };
        let bind = || {
            let places = Places::new(Sights::with(&path, look(&path)));
            let socket = sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap();
            let bound = places.bind(socket.as_raw_fd(), &Addr::unix(&path), Some(&file));
            bound.map_err(|e| e.to_string())
        };
        let server = UnixDatagram::bind(&path).unwrap();
        let said = bind().unwrap_err();
        assert!(said.contains(ALIVE), "{said}");
        let ends = std::thread::spawn(move || {
            std::thread::sleep(PATIENCE / 4);
            drop(server);
        });
        assert_eq!(bind(), Ok(()));
        ends.join().unwrap();
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn what_is_in_the_way_goes_aside_over_nothing() {
        let dir = std::env::temp_dir().join(format!("belay-aside-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("x");
        let file = BoundFile {
            cwd: None,
            exists: true,
            renamed: None,
            mode: 0o700,
            owner: (owner::me(), 0),
            parents: Vec::new(),
        };
        let places = Places::new(Sights::default());
        let taken = dir.join(format!(".belay-{}-1", std::process::id()));
        std::fs::write(&taken, "own").unwrap();
        let sockets = [(); 2].map(|()| sock::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0).unwrap());
        for socket in &sockets {
            places.bind(socket.as_raw_fd(), &Addr::unix(&path), Some(&file)).unwrap();
        }
        assert_eq!(std::fs::read(&taken).unwrap(), b"own");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
