//! The control socket: making it, connecting to it, knowing the peer, and lines of bounded length.

use rustix::fs::{Mode, OFlags};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest line that is accepted as a request.
pub const MAX_REQUEST: usize = 16 << 10;
/// Longest line that is accepted as an answer (a status of many thousand processes).
pub const MAX_EVENT: usize = 64 << 20;

/// So many clients wait for being accepted.
const BACKLOG: i32 = 128;

/// Longest path that fits into a socket address, without the terminating zero.
const MAX_SUN_PATH: usize = 107;

/// `path`, or, when that is too long for a socket address, the same file by way of a descriptor of its directory.
fn short_path(path: &Path) -> io::Result<(PathBuf, Option<OwnedFd>)> {
    if path.as_os_str().len() <= MAX_SUN_PATH {
        return Ok((path.to_owned(), None));
    }
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    };
    let fd = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    Ok((Path::new(&format!("/proc/self/fd/{}", fd.as_raw_fd())).join(name), Some(fd)))
}

/// Makes the listening socket at `path`, in place of one that a dead agent left behind. Call only while holding the job's lock.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let (short, _dir) = short_path(path)?;
    let listener = bind(&short)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Makes a listening socket at `path`, which fits into a socket address, for its owner alone: connecting needs the
/// right to write. That holds also where `SO_PEERCRED` cannot tell users apart, who are all the overflow user in a user
/// namespace that does not map them. The mode is the socket's before its file is made: whatever else has the name by
/// the time keeps its own.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let socket = stream()?;
    let address = address(path)?;
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(0o600))?;
    net::bind(&socket, &address)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// A socket without a name.
fn stream() -> io::Result<OwnedFd> {
    let (family, kind, flags) = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
    Ok(net::socket_with(family, kind, flags, None)?)
}

/// The address of `path`.
fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    let path = path.as_os_str().as_bytes();
    if path.is_empty() || path.len() > MAX_SUN_PATH || path.contains(&0) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(SocketAddrUnix::new(path)?)
}

/// Makes the calling process the one whose credentials clients of `listener` see: it may have been made by its parent.
pub fn listen_again(listener: &UnixListener) -> io::Result<()> {
    Ok(net::listen(listener, BACKLOG)?)
}

/// Connects to the agent listening at `path`.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let (short, _dir) = short_path(path)?;
    UnixStream::connect(short)
}

/// The same, but waits no longer than `limit` for a listener that does not accept.
pub fn connect_within(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let (short, _dir) = short_path(path)?;
    let stream = UnixStream::from(stream()?);
    // Also how long a connection waits for its place.
    stream.set_write_timeout(Some(limit))?;
    net::connect(&stream, &address(&short)?).map_err(|e| in_time(e.into()))?;
    Ok(stream)
}

/// What a time limit of a socket makes of `WouldBlock`.
fn in_time(e: io::Error) -> io::Error {
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, "it has not answered in time")
        }
        _ => e,
    }
}

/// How long an answer is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Until it comes.
    Endless,
    /// So long for all of it.
    Whole(Duration),
    /// So long for each event of it.
    Each(Duration),
}

impl Patience {
    fn ends(self) -> Option<Instant> {
        match self {
            Patience::Endless => None,
            Patience::Whole(limit) | Patience::Each(limit) => Some(Instant::now() + limit),
        }
    }
}

/// Who is at the other end, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process identifier in the caller's PID namespace, 0 when it has none there.
    pub pid: i32,
    /// User.
    pub uid: u32,
}

impl Peer {
    /// Whether this user may command a job of user `owner`.
    pub fn may_command(self, owner: u32) -> bool {
        self.uid == owner || self.uid == 0
    }
}

/// Reads the peer's credentials (`SO_PEERCRED`).
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    // Not by way of rustix, whose PIDs cannot be 0.
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = std::mem::size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are valid for writing, and `len` is the size of `cred`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer {
        pid: cred.pid,
        uid: cred.uid,
    })
}

/// Collects bytes into lines of bounded length.
#[derive(Debug)]
pub struct Lines {
    buffer: Vec<u8>,
    /// So much of it holds no end of a line.
    searched: usize,
    max: usize,
}

impl Lines {
    /// A collector that refuses lines longer than `max`.
    pub fn new(max: usize) -> Self {
        Self {
            buffer: Vec::new(),
            searched: 0,
            max,
        }
    }

    /// Reads once from `from`. `Ok(false)` at the end of the stream.
    pub fn fill(&mut self, mut from: impl Read) -> io::Result<bool> {
        let mut chunk = [0; 16 << 10];
        let n = from.read(&mut chunk)?;
        self.buffer.extend_from_slice(&chunk[..n]);
        Ok(n != 0)
    }

    /// Takes the first complete line without its end.
    pub fn next_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let new = &self.buffer[self.searched..];
        let end = new.iter().position(|b| *b == b'\n').map(|at| self.searched + at);
        self.searched = if end.is_some() { 0 } else { self.buffer.len() };
        if end.unwrap_or(self.buffer.len()) > self.max {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("line of more than {} bytes", self.max),
            ));
        }
        Ok(end.map(|end| {
            let rest = self.buffer.split_off(end + 1);
            let mut line = std::mem::replace(&mut self.buffer, rest);
            line.pop();
            line
        }))
    }
}

/// Sends `request` and returns a reader of the events, which fails with `TimedOut` where an answer takes too long.
pub fn request(mut stream: UnixStream, request: &crate::Request, patience: Patience) -> io::Result<Events> {
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    match stream.write_all(&line) {
        // It has answered before it was asked: it does not serve the caller, and says why.
        Err(e) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
        other => other?,
    }
    Ok(Events {
        stream,
        lines: Lines::new(MAX_EVENT),
        patience,
        ends: patience.ends(),
    })
}

/// The events of one answer.
#[derive(Debug)]
pub struct Events {
    stream: UnixStream,
    lines: Lines,
    patience: Patience,
    ends: Option<Instant>,
}

impl Events {
    /// Reads once, within the time that is left.
    fn fill(&mut self) -> io::Result<bool> {
        if let Some(ends) = self.ends {
            let left = ends.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(in_time(io::ErrorKind::TimedOut.into()));
            }
            self.stream.set_read_timeout(Some(left))?;
        }
        self.lines.fill(&mut self.stream).map_err(in_time)
    }
}

impl Iterator for Events {
    type Item = io::Result<crate::Event>;

    /// The next event; `None` when the agent closed the connection.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.lines.next_line() {
                Err(e) => return Some(Err(e)),
                Ok(Some(line)) => {
                    if let Patience::Each(_) = self.patience {
                        self.ends = self.patience.ends();
                    }
                    return Some(serde_json::from_slice(&line).map_err(io::Error::from));
                }
                Ok(None) => {}
            }
            match self.fill() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return None,
                Err(e) => return Some(Err(e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn lines_are_split_and_bounded() {
        let mut lines = Lines::new(5);
        assert!(lines.fill(&b"ab\ncd"[..]).unwrap());
        assert_eq!(lines.next_line().unwrap().unwrap(), b"ab");
        assert_eq!(lines.next_line().unwrap(), None);
        lines.fill(&b"e\n\nfghijk"[..]).unwrap();
        assert_eq!(lines.next_line().unwrap().unwrap(), b"cde");
        assert_eq!(lines.next_line().unwrap().unwrap(), b"");
        assert!(lines.next_line().is_err());
        assert!(!Lines::new(5).fill(&b""[..]).unwrap());
    }

    #[test]
    fn a_socket_below_a_long_path_works_and_knows_its_peer() {
        let dir = std::env::temp_dir()
            .join(format!("belay-wire-{}", std::process::id()))
            .join("x".repeat(120));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("control.sock");
        let listener = listen(&path).unwrap();
        drop(listener);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // A socket file without a listener is left over from a dead agent.
        assert_eq!(connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let listener = listen(&path).unwrap();
        let client = connect(&path).unwrap();
        let (server, _) = listener.accept().unwrap();
        let uid = rustix::process::getuid().as_raw();
        let expected = Peer {
            pid: std::process::id().try_into().unwrap(),
            uid,
        };
        assert_eq!(peer(client.as_fd()).unwrap(), expected);
        assert_eq!(peer(server.as_fd()).unwrap(), expected);
        std::fs::remove_dir_all(dir.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_silent_or_slow_agent_is_not_waited_for() {
        let path = std::env::temp_dir().join(format!("belay-silent-{}.sock", std::process::id()));
        let listener = listen(&path).unwrap();
        listener.set_nonblocking(false).unwrap();
        let limit = Duration::from_millis(100);
        let ask = |patience| {
            let stream = connect_within(&path, limit).unwrap();
            request(stream, &crate::Request::Status, patience).unwrap()
        };
        let is_late = |r: Option<io::Result<crate::Event>>| matches!(r, Some(Err(e)) if e.kind() == io::ErrorKind::TimedOut);
        assert!(is_late(ask(Patience::Whole(limit)).next()));
        // One byte after the other is no answer.
        let mut events = ask(Patience::Each(limit));
        let ((_, _), (mut server, _)) = (listener.accept().unwrap(), listener.accept().unwrap());
        let begin = Instant::now();
        std::thread::scope(|s| {
            s.spawn(|| {
                while begin.elapsed() < Duration::from_secs(60) && io::Write::write_all(&mut server, b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            assert!(is_late(events.next()));
            drop(events);
        });
        // One who accepts nothing at all, and has room for few.
        net::listen(&listener, 4).unwrap();
        let waiting: Vec<_> = (0..1000).map_while(|_| connect_within(&path, limit).ok()).collect();
        assert_eq!(
            connect_within(&path, limit).unwrap_err().kind(),
            io::ErrorKind::TimedOut,
            "{}",
            waiting.len()
        );
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn only_the_owner_and_root_may_command() {
        assert!(Peer { pid: 1, uid: 7 }.may_command(7));
        assert!(Peer { pid: 1, uid: 0 }.may_command(7));
        assert!(!Peer { pid: 1, uid: 8 }.may_command(7));
    }
}
