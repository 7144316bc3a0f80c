//! Where the numbers of a job are to be had: over HTTP at a TCP port or a UNIX socket, or in a file for the node
//! exporter's text file collector.
//!
//! Whoever reaches the port may read; nothing can be changed through it. What a peer sends is bounded, and a slow one
//! costs a descriptor for some seconds at most.

use crate::failure::reason;
use crate::Failure;
use belay_kernel::dir::Dir;
use belay_wire::Exit;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Connections at a time; the oldest makes room.
const MAX_CONNECTIONS: usize = 16;
/// Longest request.
const MAX_REQUEST: usize = 8 << 10;
/// A connection that is older makes room, too.
const PATIENCE: Duration = Duration::from_secs(10);

/// A place, as given to `--metrics`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// HTTP at these addresses, the first that can be had.
    Tcp(Vec<SocketAddr>),
    /// HTTP at a UNIX socket.
    Unix(PathBuf),
    /// A file that is written anew after each checkpoint.
    File(PathBuf),
}

impl std::str::FromStr for Place {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let path = |p: &str| match p {
            "" => Err("no path given".to_owned()),
            p => std::path::absolute(p).map_err(|e| e.to_string()),
        };
        if let Some(p) = s.strip_prefix("unix:") {
            return Ok(Place::Unix(path(p)?));
        }
        if let Some(p) = s.strip_prefix("file:") {
            return Ok(Place::File(path(p)?));
        }
        let found = s.to_socket_addrs();
        let found: Vec<SocketAddr> = found.map(Iterator::collect).unwrap_or_default();
        if found.is_empty() {
            return Err(format!("{s} is none of HOST:PORT, unix:PATH, file:PATH"));
        }
        Ok(Place::Tcp(found))
    }
}

/// A socket of either kind.
trait Stream: Read + Write + AsRawFd + std::fmt::Debug {}
impl<T: Read + Write + AsRawFd + std::fmt::Debug> Stream for T {}

#[derive(Debug)]
struct Connection {
    stream: Box<dyn Stream>,
    since: Instant,
    request: Vec<u8>,
    answer: Vec<u8>,
    answered: bool,
}

#[derive(Debug)]
enum Door {
    Tcp(TcpListener),
    Unix(UnixListener, Spot),
    File(Spot),
}

/// A name in a directory, which stays this one whatever its path leads to later.
#[derive(Debug)]
struct Spot {
    dir: Dir,
    name: PathBuf,
}

/// Hands out the numbers at one place.
#[derive(Debug)]
pub(crate) struct Exporter {
    door: Door,
    connections: Vec<Connection>,
    /// No descriptor was left for a connection: the next look at the door is left out, or the loop would spin.
    skip: bool,
}

impl Exporter {
    /// Opens the place.
    pub(crate) fn open(place: &Place) -> Result<Self, Failure> {
        let fail = |what: String| move |e: io::Error| Failure::new(Exit::CannotCreate, format!("{what}: {}", reason(&e)));
        let door = match place {
            Place::Tcp(addresses) => {
                let what = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
                let bound = TcpListener::bind(&addresses[..]);
                let listener = bound.and_then(|l| l.set_nonblocking(true).map(|()| l));
                Door::Tcp(listener.map_err(fail(format!("serve metrics at {what}")))?)
            }
            Place::Unix(path) => {
                let listen = |spot: Spot| Ok(Door::Unix(spot.listen()?, spot));
                Spot::of(path)
                    .and_then(listen)
                    .map_err(fail(format!("serve metrics at {}", path.display())))?
            }
            Place::File(path) => {
                let begin = |spot: Spot| spot.replace("").map(|()| Door::File(spot));
                Spot::of(path)
                    .and_then(begin)
                    .map_err(fail(format!("write metrics to {}", path.display())))?
            }
        };
        Ok(Self {
            door,
            connections: Vec::new(),
            skip: false,
        })
    }

    /// The port, where there is one: `HOST:0` asks for any.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        match &self.door {
            Door::Tcp(l) => l.local_addr().ok(),
            _ => None,
        }
    }

    /// What to poll for: the door first.
    pub(crate) fn interest(&mut self) -> Vec<(RawFd, i16)> {
        let door = match &self.door {
            _ if std::mem::take(&mut self.skip) => -1,
            Door::Tcp(l) => l.as_raw_fd(),
            Door::Unix(l, _) => l.as_raw_fd(),
            Door::File(_) => -1,
        };
        let of = |c: &Connection| (c.stream.as_raw_fd(), if c.answered { libc::POLLOUT } else { libc::POLLIN });
        std::iter::once((door, libc::POLLIN))
            .chain(self.connections.iter().map(of))
            .collect()
    }

    /// Attends to what is ready; `ready` has what `interest` has asked for. `text` makes the numbers when somebody wants them.
    pub(crate) fn attend(&mut self, ready: &[i16], mut text: impl FnMut() -> String) {
        let (door, connections) = ready.split_first().unwrap_or((&0, &[]));
        let mut asked = connections.iter();
        self.connections.retain_mut(|c| match asked.next() {
            Some(r) if *r != 0 => c.attend(&mut text),
            _ => c.since.elapsed() < PATIENCE,
        });
        if *door != 0 {
            self.accept();
        }
    }

    fn accept(&mut self) {
        let accepted: io::Result<Box<dyn Stream>> = match &self.door {
            Door::Tcp(l) => l
                .accept()
                .and_then(|(s, _)| s.set_nonblocking(true).map(|()| -> Box<dyn Stream> { Box::new(s) })),
            Door::Unix(l, _) => l
                .accept()
                .and_then(|(s, _)| s.set_nonblocking(true).map(|()| -> Box<dyn Stream> { Box::new(s) })),
            Door::File(_) => return,
        };
        match accepted {
            Ok(stream) => {
                if self.connections.len() >= MAX_CONNECTIONS {
                    self.connections.remove(0);
                }
                self.connections.push(Connection {
                    stream,
                    since: Instant::now(),
                    request: Vec::new(),
                    answer: Vec::new(),
                    answered: false,
                });
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => {
                tracing::debug!(error = %e, "accept a reader of the metrics");
                self.skip = true;
            }
        }
    }

    /// After a checkpoint: writes the file, where that is the place.
    pub(crate) fn publish(&self, text: impl FnOnce() -> String) -> io::Result<()> {
        match &self.door {
            Door::File(spot) => spot.replace(&text()),
            _ => Ok(()),
        }
    }
}

impl Exporter {
    /// The job has ended: no name leads here any more.
    pub(crate) fn close(self) {
        let gone = match &self.door {
            Door::Unix(_, spot) | Door::File(spot) => spot.dir.remove(&spot.name),
            Door::Tcp(_) => Ok(()),
        };
        if let Err(e) = gone {
            tracing::warn!(error = %e, "remove the place of the metrics");
        }
    }
}

impl Connection {
    /// Goes on with it; whether it stays.
    fn attend(&mut self, text: &mut dyn FnMut() -> String) -> bool {
        if !self.answered {
            let mut buffer = [0; 1024];
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(n) => self.request.extend_from_slice(&buffer[..n]),
                Err(e) => return matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            }
            let Some((status, wanted)) = understand(&self.request) else {
                return true;
            };
            let body = if wanted { text() } else { format!("{status}\n") };
            let kind = if wanted {
                "application/openmetrics-text; version=1.0.0; charset=utf-8"
            } else {
                "text/plain; charset=utf-8"
            };
            self.answer = format!(
                "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            )
            .into_bytes();
            self.answered = true;
        }
        while !self.answer.is_empty() {
            match self.stream.write(&self.answer) {
                Ok(0) => return false,
                Ok(n) => drop(self.answer.drain(..n)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return e.kind() == ErrorKind::WouldBlock,
            }
        }
        false
    }
}

/// The status line for `request`, and whether it asks for the numbers; `None` while it is not whole.
pub(crate) fn understand(request: &[u8]) -> Option<(&'static str, bool)> {
    let whole = request.windows(4).any(|w| w == b"\r\n\r\n") || request.windows(2).any(|w| w == b"\n\n");
    if !whole {
        return (request.len() > MAX_REQUEST).then_some(("431 Request Header Fields Too Large", false));
    }
    let line = request.split(|b| *b == b'\r' || *b == b'\n').next().unwrap_or_default();
    let mut words = line.split(|b| *b == b' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split(|b| *b == b'?').next().unwrap_or_default();
    Some(match (method, path) {
        (b"GET", b"/metrics" | b"/") => ("200 OK", true),
        (b"GET", _) => ("404 Not Found", false),
        _ => ("405 Method Not Allowed", false),
    })
}

impl Spot {
    /// Where `path` leads now.
    fn of(path: &Path) -> io::Result<Self> {
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(ErrorKind::InvalidInput.into());
        };
        Ok(Self {
            dir: Dir::find(dir)?,
            name: name.into(),
        })
    }

    /// Listens there, in place of a socket of the caller's own that nobody listens at.
    fn listen(&self) -> io::Result<UnixListener> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.dir.as_raw_fd())).join(&self.name);
        let listener = match belay_wire::socket::bind(&path) {
            Err(e) if e.kind() == ErrorKind::AddrInUse && is_stale(&path)? => {
                self.dir.remove(&self.name)?;
                belay_wire::socket::bind(&path)?
            }
            bound => bound?,
        };
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// Gives the file there new contents; a reader sees the old or the new ones. The collector is another user: everybody may read.
    fn replace(&self, text: &str) -> io::Result<()> {
        let mut name = self.name.as_os_str().to_owned();
        name.push(format!(".{}", std::process::id()));
        let new = Path::new(&name);
        // Left behind by an agent that was killed and had the same number.
        self.dir.remove(new)?;
        let mut file = self.dir.open(new, libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL, 0o644)?;
        let written = file.write_all(text.as_bytes());
        let done = written.and_then(|()| self.dir.rename(new, &self.name));
        if done.is_err() {
            let _ = self.dir.remove(new);
        }
        done
    }
}

fn is_stale(path: &Path) -> io::Result<bool> {
    let m = std::fs::symlink_metadata(path)?;
    let refused = |e: io::Error| e.kind() == ErrorKind::ConnectionRefused;
    Ok(m.file_type().is_socket()
        && m.uid() == crate::sys::euid()
        && std::os::unix::net::UnixStream::connect(path).is_err_and(refused))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_understood() {
        assert_eq!(
            "127.0.0.1:9099".parse(),
            Ok(Place::Tcp(vec!["127.0.0.1:9099".parse().unwrap()]))
        );
        assert_eq!("unix:/run/x".parse(), Ok(Place::Unix("/run/x".into())));
        assert_eq!("file:/var/x.prom".parse(), Ok(Place::File("/var/x.prom".into())));
        for bad in ["", "9099", "/run/x", "unix:", "nowhere"] {
            assert!(bad.parse::<Place>().is_err(), "{bad}");
        }
    }

    #[test]
    fn requests_are_understood() {
        assert_eq!(understand(b"GET /metrics HTTP/1.1\r\nHost: x\r\n"), None);
        assert_eq!(
            understand(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
            Some(("200 OK", true))
        );
        assert_eq!(understand(b"GET /?x HTTP/1.0\n\n"), Some(("200 OK", true)));
        assert!(understand(b"GET /etc/passwd HTTP/1.0\r\n\r\n").is_some_and(|a| !a.1));
        assert!(understand(b"POST /metrics HTTP/1.0\r\n\r\n").is_some_and(|a| !a.1));
        assert!(understand(b"\r\n\r\n").is_some_and(|a| !a.1));
        assert!(understand(&vec![b'x'; MAX_REQUEST + 1]).is_some_and(|a| !a.1));
    }

    /// Everything that can be done now.
    fn turn(e: &mut Exporter) {
        let wanted = e.interest();
        let ready: Vec<i16> = wanted.iter().map(|(_, events)| *events).collect();
        e.attend(&ready, || "numbers\n".into());
    }

    #[test]
    fn slow_and_silent_readers_keep_nobody_waiting() {
        let mut e = Exporter::open(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let to = e.address().unwrap();
        let silent: Vec<_> = (0..3 * MAX_CONNECTIONS)
            .map(|_| {
                let s = std::net::TcpStream::connect(to).unwrap();
                turn(&mut e);
                s
            })
            .collect();
        assert!(e.connections.len() <= MAX_CONNECTIONS);
        let mut reader = std::net::TcpStream::connect(to).unwrap();
        reader.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        for _ in 0..20 {
            turn(&mut e);
        }
        let mut answer = String::new();
        reader.read_to_string(&mut answer).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nnumbers\n"),
            "{answer}"
        );
        drop(silent);
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_goes_with_the_job() {
        let path = std::env::temp_dir().join(format!("belay-metrics-{}.prom", std::process::id()));
        let e = Exporter::open(&Place::File(path.clone())).unwrap();
        e.publish(|| "one\n".into()).unwrap();
        e.publish(|| "two\n".into()).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two\n");
        e.close();
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_that_a_killed_agent_left_is_no_obstacle_and_one_in_use_is() {
        let path = std::env::temp_dir().join(format!("belay-metrics-{}.sock", std::process::id()));
        drop(UnixListener::bind(&path).unwrap());
        let e = Exporter::open(&Place::Unix(path.clone())).unwrap();
        assert!(Exporter::open(&Place::Unix(path.clone())).is_err());
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        e.close();
        std::fs::write(&path, b"somebody's file").unwrap();
        assert!(Exporter::open(&Place::Unix(path.clone())).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"somebody's file");
        std::fs::remove_file(&path).unwrap();
    }

    /// Whoever may write a directory on the way can put a link in its place at any moment.
    #[test]
    fn what_is_exchanged_on_the_way_leads_to_no_other_file() {
        let top = std::env::temp_dir().join(format!("belay-exporter-{}", std::process::id()));
        let (dir, away, victim) = (top.join("d"), top.join("away"), top.join("victim"));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::create_dir(&victim).unwrap();
        for (name, place) in [("x", Place::File(dir.join("x"))), ("s", Place::Unix(dir.join("s")))] {
            std::fs::write(victim.join(name), "own").unwrap();
            let e = Exporter::open(&place).unwrap();
            std::fs::rename(&dir, &away).unwrap();
            std::os::unix::fs::symlink(&victim, &dir).unwrap();
            e.publish(|| "one\n".into()).unwrap();
            assert!(away.join(name).exists());
            e.close();
            assert_eq!(std::fs::read(victim.join(name)).unwrap(), b"own");
            assert!(!away.join(name).exists());
            std::fs::remove_file(&dir).unwrap();
            std::fs::rename(&away, &dir).unwrap();
        }
        assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 2);
        std::fs::remove_dir_all(top).unwrap();
    }
}
