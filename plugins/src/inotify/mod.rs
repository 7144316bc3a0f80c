//! inotify: watches with their descriptors' numbers.
//!
//! The kernel tells which inode a watch is on, not its name. The name is found through the file handle where that is
//! allowed, else by looking for it (`seek`).

use crate::builder::{Builder, Built};
use crate::fault::{refuse, At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::{DescId, Description, Descriptors, FsPath};
use crate::seek::Seeker;
use crate::session::Session;
use crate::sys::fd;
use crate::sys::fdinfo::number;
use belay_kernel::numbers::lend;
use belay_kernel::{dir, ioctl, mounts};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// So many numbers are used up at most where the kernel cannot be told the next one.
const NUMBERS: u32 = 1_000_000;

/// An inotify instance.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct InotifyState {
    watches: Vec<Watch>,
    /// Events were waiting to be read.
    events: bool,
}

/// One watch.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Watch {
    wd: i32,
    path: FsPath,
    mask: u32,
}

/// One `inotify` line.
struct Line {
    wd: i32,
    ino: u64,
    dev: u64,
    mask: u32,
    handle_type: i32,
    handle: Vec<u8>,
}

fn line(text: &str) -> io::Result<Line> {
    let hex = |key: &str| {
        let v = text.split_whitespace().find_map(|w| w.strip_prefix(key));
        number(
            v.ok_or_else(|| io::Error::other(format!("fdinfo: no {key} in {text:?}")))?,
            16,
        )
    };
    let handle = text.split("f_handle:").nth(1).unwrap_or_default().trim();
    let bytes = handle.as_bytes().chunks_exact(2).map(|p| {
        let p = std::str::from_utf8(p).map_err(io::Error::other)?;
        u8::from_str_radix(p, 16).map_err(io::Error::other)
    });
    // The kernel's own device number: 12 bits major, 20 bits minor.
    let sdev = hex("sdev:")?;
    Ok(Line {
        wd: i32::try_from(hex("wd:")?).map_err(io::Error::other)?,
        ino: hex("ino:")?,
        dev: libc::makedev((sdev >> 20) as u32, (sdev & 0xf_ffff) as u32),
        mask: u32::try_from(hex("mask:")?).map_err(io::Error::other)?,
        handle_type: i32::try_from(hex("fhandle-type:").unwrap_or(0)).unwrap_or(0),
        handle: bytes.collect::<io::Result<_>>()?,
    })
}

/// The kind.
pub(crate) struct Inotify;

impl Kind for Inotify {
    const NAME: &'static str = "Inotify";
    const VERSION: u32 = 1;
    type State = InotifyState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Anonymous(name) if *name == "inotify")
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<InotifyState, Fault> {
        let taken = s.take(seen.id)?;
        capture(s, seen.id, taken.raw())
    }

    /// Without watches: what else the rebuild makes, renames and removes is no news to anybody.
    fn rebuild(_: &mut Builder<'_>, d: &Description, _: &InotifyState) -> Result<Option<OwnedFd>, Fault> {
        make(d).map(Some)
    }

    fn complete(d: &Descriptors, built: &Built) -> Result<(), Refusal> {
        d.each::<InotifyState>().try_for_each(|(id, state)| {
            let lent = built.made.lend(id);
            let watched = lent.and_then(|lent| lent.map_or(Ok(()), |lent| watch_all(lent.raw(), state)));
            watched.map_err(|e| d.refusal(id, &e))
        })
    }

    fn check(state: &InotifyState, _: &Descriptors) -> Result<(), String> {
        let odd = state.watches.iter().find(|w| w.wd < 1);
        odd.map_or(Ok(()), |w| {
            Err(format!("a watch has number {}, which is no possible one", w.wd))
        })
    }

    nothing!(survey, finish, contents, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own);
}

fn capture(s: &mut Session<'_>, id: DescId, raw: RawFd) -> Result<InotifyState, Fault> {
    let found = &s.found[id];
    let lines = found
        .info
        .all("inotify ")
        .map(line)
        .collect::<io::Result<Vec<_>>>()
        .at("read fdinfo")?;
    let pid = found.holder.pid;
    let events = fd::readable_bytes(raw).at("ask for events")? > 0;
    if events {
        let text = format!(
            "process {pid}: fd {}: inotify events not yet read are replaced by IN_Q_OVERFLOW at a restart",
            found.holder.fd
        );
        s.notes.push(text);
    }
    let mut seeker: Option<Seeker> = None;
    let mut watches = Vec::new();
    for l in lines {
        let is_it = |p: &Path| fd::stat(p, false).is_ok_and(|st| st.st_ino == l.ino && st.st_dev == l.dev);
        let path = match by_handle(&l).filter(|p| is_it(p)) {
            Some(p) => p,
            None => {
                let seeker = seeker.get_or_insert_with(|| Seeker::new(s, pid));
                match seeker.find(l.dev, l.ino) {
                    Some(p) => p,
                    None => {
                        return refuse(format!(
                            "watch {} is on inode {} whose name cannot be found without privilege; checkpoint as root, or watch a directory \
                             the program has open",
                            l.wd, l.ino
                        ))
                    }
                }
            }
        };
        watches.push(Watch {
            wd: l.wd,
            path: FsPath(path),
            mask: l.mask,
        });
    }
    watches.sort_by_key(|w| w.wd);
    Ok(InotifyState { watches, events })
}

/// The name through the file handle; needs CAP_DAC_READ_SEARCH.
fn by_handle(l: &Line) -> Option<PathBuf> {
    for m in mounts::all().ok()?.iter().filter(|m| m.device == l.dev) {
        let Ok(mount) = fd::open(&m.place, libc::O_RDONLY | libc::O_DIRECTORY, 0) else {
            continue;
        };
        if let Ok(found) = dir::open_handle(&mount, l.handle_type, &l.handle) {
            return fd::readlink(&fd::self_path(found.as_raw_fd())).ok();
        }
    }
    None
}

fn make(d: &Description) -> Result<OwnedFd, Fault> {
    let flags = CreateFlags::from_bits_retain((d.flags & libc::O_NONBLOCK).cast_unsigned());
    inotify::init(CreateFlags::CLOEXEC | flags)
        .map_err(io::Error::from)
        .at("inotify_init")
}

/// Gives it its watches, with their numbers.
fn watch_all(raw: RawFd, state: &InotifyState) -> Result<(), Fault> {
    let instance = lend(raw).at("use its descriptor")?;
    let mut spare = NUMBERS;
    state.watches.iter().try_for_each(|w| {
        let told = ioctl::tell(instance, ioctl::SET_NEXT_WATCH, w.wd.unsigned_abs().into()).is_ok();
        watch(raw, w, told, &mut spare)
    })?;
    if state.events {
        overflow(raw).at("tell that events were lost")?;
    }
    Ok(())
}

/// Leaves exactly one event in the queue: IN_Q_OVERFLOW, by which inotify says that events were lost.
///
/// The queue is filled with events of files of our own (two in turn, because equal neighbours are merged) until the
/// kernel reports an overflow; the end of those watches then no longer fits either. Everything before the report is
/// read.
fn overflow(raw: RawFd) -> io::Result<()> {
    const EVENT_BYTES: usize = 16;
    let instance = lend(raw)?;
    let text = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")?;
    let most: usize = text.trim().parse().map_err(io::Error::other)?;
    let mut files = Vec::new();
    for _ in 0..2 {
        let file = fd::memfd(Path::new("events"), 0)?;
        let wd = inotify::add_watch(instance, fd::self_path(file.as_raw_fd()), WatchFlags::ATTRIB)?;
        files.push((file, wd));
    }
    let full = (most + 1) * EVENT_BYTES;
    for i in 0..=most {
        fd::fchmod(files[i % 2].0.as_raw_fd(), 0o600)?;
    }
    for (_, wd) in &files {
        inotify::remove_watch(instance, *wd)?;
    }
    let held = fd::readable_bytes(raw)?;
    if held != full {
        return Err(io::Error::other(format!(
            "its queue holds {held} bytes of events instead of {full}"
        )));
    }
    let mut junk = full - EVENT_BYTES;
    let mut buf = vec![0u8; 64 * 1024];
    while junk > 0 {
        let n = junk.min(buf.len());
        junk -= fd::read(raw, &mut buf[..n])?;
    }
    Ok(())
}

/// Watches with the number that the kernel has been `told`. Where it cannot be told, numbers are used up: they only ever
/// grow. Of all watches together `spare` numbers may be.
fn watch(raw: RawFd, w: &Watch, told: bool, spare: &mut u32) -> Result<(), Fault> {
    let instance = lend(raw).at("use its descriptor")?;
    // The path names what is watched itself, which may be a symbolic link.
    let mask = WatchFlags::from_bits_retain(w.mask) | WatchFlags::DONT_FOLLOW;
    loop {
        let wd = inotify::add_watch(instance, w.path.as_path(), mask).map_err(io::Error::from);
        let wd = wd.at(format!("watch {}", w.path))?;
        if wd == w.wd {
            return Ok(());
        }
        if wd > w.wd || told || i64::from(w.wd) - i64::from(wd) > i64::from(*spare) {
            return refuse(format!("watch on {} got number {wd} instead of {}", w.path, w.wd));
        }
        *spare -= 1;
        inotify::remove_watch(instance, wd)
            .map_err(io::Error::from)
            .at("give a watch number back")?;
        let mut event = [0u8; 64];
        // The removal reports itself (IN_IGNORED); nobody may see that.
        fd::read(raw, &mut event).at("drop an event")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(wd: i32) -> Watch {
        Watch {
            wd,
            path: FsPath(PathBuf::from("/")),
            mask: libc::IN_ATTRIB,
        }
    }

    #[test]
    fn numbers_that_no_watch_has_are_refused() {
        let check = |wds: &[i32]| {
            let state = InotifyState {
                watches: wds.iter().copied().map(on).collect(),
                events: false,
            };
            Inotify::check(&state, &Descriptors::default()).is_ok()
        };
        assert!(check(&[1, 7, i32::MAX]) && !check(&[1, 0]) && !check(&[i32::MIN]));
    }

    #[test]
    fn so_many_numbers_are_used_up_as_there_are_to_spare() {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        let raw = fd.as_raw_fd();
        let mut spare = 6;
        assert!(watch(raw, &on(i32::MAX), false, &mut spare).is_err());
        inotify::remove_watch(&fd, 1).unwrap();
        fd::read(raw, &mut [0; 64]).unwrap();
        watch(raw, &on(5), false, &mut spare).unwrap();
        assert_eq!(spare, 3);
        inotify::remove_watch(&fd, 5).unwrap();
        fd::read(raw, &mut [0; 64]).unwrap();
        assert!(watch(raw, &on(11), false, &mut spare).is_err());
        assert_eq!(fd::readable_bytes(raw).unwrap(), 0);
    }
}
