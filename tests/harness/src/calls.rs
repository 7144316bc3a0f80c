//! Stops an agent, whichever of its threads, at the calls by which it changes the files below a directory or makes them
//! durable: at the entry of each and at its exit.

use crate::stepper::{memory, request, stopped_at, At, Verdict};
use crate::Failure;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Longest path that is read from the agent's memory.
const LONGEST: usize = 4096;

/// A call.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its name.
    pub name: &'static str,
    /// The file or directory that it is about; the old name, where it gives another.
    pub path: PathBuf,
    /// The thread.
    pub tid: i32,
    /// What it returned, at the exit.
    pub result: Option<i64>,
    number: i64,
    arguments: [u64; 6],
}

/// How a call says which file it is about.
enum Which {
    /// By a descriptor, its first argument.
    Descriptor,
    /// By a path, its first argument.
    Path,
    /// By a path, its second argument, below the directory that is its first.
    Below,
}

fn which(number: i64, arguments: [u64; 6]) -> Option<(&'static str, Which)> {
    let creates = |flags: u64| flags & libc::O_CREAT as u64 != 0;
    Some(match number {
        libc::SYS_write => ("write", Which::Descriptor),
        libc::SYS_pwrite64 => ("pwrite", Which::Descriptor),
        libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2 => ("writev", Which::Descriptor),
        libc::SYS_ftruncate => ("ftruncate", Which::Descriptor),
        libc::SYS_fallocate => ("fallocate", Which::Descriptor),
        libc::SYS_fsync | libc::SYS_fdatasync => ("fsync", Which::Descriptor),
        libc::SYS_open if creates(arguments[1]) => ("create", Which::Path),
        libc::SYS_openat if creates(arguments[2]) => ("create", Which::Below),
        libc::SYS_mkdir => ("mkdir", Which::Path),
        libc::SYS_mkdirat => ("mkdir", Which::Below),
        libc::SYS_rename => ("rename", Which::Path),
        libc::SYS_renameat | libc::SYS_renameat2 => ("rename", Which::Below),
        libc::SYS_link => ("link", Which::Path),
        libc::SYS_linkat => ("link", Which::Below),
        libc::SYS_unlink | libc::SYS_rmdir => ("unlink", Which::Path),
        libc::SYS_unlinkat => ("unlink", Which::Below),
        _ => return None,
    })
}

/// What descriptor `fd` of process `pid` is open on.
fn opened(pid: i32, fd: u64) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/fd/{}", fd as i32)).ok()
}

fn path_at(tid: i32, at: u64) -> Option<PathBuf> {
    // What lies behind the path need not be readable: a page at a time.
    let first = LONGEST - at as usize % LONGEST;
    let mut bytes = memory(tid, at, first)?;
    if !bytes.contains(&0) {
        bytes.extend(memory(tid, at + first as u64, LONGEST)?);
    }
    let end = bytes.iter().position(|b| *b == 0)?;
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned().into())
}

impl Call {
    /// The call that `tid` of process `pid` enters, where it is about a file below `dir`.
    fn entered((pid, tid): (i32, i32), number: i64, arguments: [u64; 6], dir: &Path) -> Option<Self> {
        let (name, which) = which(number, arguments)?;
        let path = match which {
            Which::Descriptor => opened(pid, arguments[0])?,
            Which::Path => path_at(tid, arguments[0])?,
            Which::Below => match path_at(tid, arguments[1])? {
                path if path.is_absolute() => path,
                path => opened(pid, arguments[0])?.join(path),
            },
        };
        path.starts_with(dir).then_some(Self {
            name,
            path,
            tid,
            result: None,
            number,
            arguments,
        })
    }

    /// Bytes that it is going to write, where that is one piece.
    pub fn bytes(&self) -> u64 {
        let one_piece = [libc::SYS_write, libc::SYS_pwrite64].contains(&self.number);
        if one_piece {
            self.arguments[2]
        } else {
            0
        }
    }

    /// At the entry of a write of one piece: writes the first `bytes` bytes in its stead.
    pub fn write_part(&self, bytes: u64) -> Result<(), Failure> {
        if bytes == 0 {
            return Ok(());
        }
        let data = memory(self.tid, self.arguments[1], bytes as usize).ok_or("the data cannot be read")?;
        let fdinfo = std::fs::read_to_string(format!("/proc/{}/fdinfo/{}", self.tid, self.arguments[0]));
        let position = fdinfo
            .ok()
            .and_then(|t| t.lines().next()?.strip_prefix("pos:")?.trim().parse().ok());
        let at = if self.number == libc::SYS_pwrite64 {
            self.arguments[3]
        } else {
            position.ok_or("the position is not known")?
        };
        let file = OpenOptions::new().write(true).open(&self.path);
        file.and_then(|f| f.write_all_at(&data, at))
            .map_err(|e| format!("write {}: {e}", self.path.display()))
    }
}

/// Traces all threads of `agent` while `command` runs; `at_call` decides at the entry of each call about a file below
/// `dir`, and sees each exit. Returns what `command` returned.
pub fn watch<T>(
    agent: i32,
    dir: &Path,
    command: impl FnOnce() -> T,
    at_call: impl FnMut(&Call) -> Result<Verdict, Failure> + Send,
) -> Result<T, Failure> {
    let done = AtomicBool::new(false);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|s| {
        let done = &done;
        // A thread of its own: it waits for what it traces, and has no children.
        let tracer = s.spawn(move || {
            let mut threads = Threads {
                agent,
                dir,
                known: BTreeSet::new(),
                entered: BTreeMap::new(),
            };
            let seized = threads.seize();
            tell.send(()).map_err(|e| e.to_string())?;
            seized?;
            threads.follow(done, at_call)
        });
        told.recv().map_err(|e| e.to_string())?;
        let result = command();
        done.store(true, Ordering::Release);
        let traced = tracer.join().map_err(|_| "the tracer failed".to_owned())?;
        traced.map(|()| result)
    })
}

/// The threads of an agent.
struct Threads<'a> {
    agent: i32,
    dir: &'a Path,
    known: BTreeSet<i32>,
    entered: BTreeMap<i32, Call>,
}

/// `r`, where a thread that has ended meanwhile is no failure: waiting for it will tell.
fn unless_gone(r: io::Result<()>) -> io::Result<()> {
    r.or_else(|e| {
        if e.raw_os_error() == Some(libc::ESRCH) {
            Ok(())
        } else {
            Err(e)
        }
    })
}

impl Threads<'_> {
    fn fail(&self, what: &str, e: &io::Error) -> Failure {
        format!("{what} the agent {}: {e}", self.agent)
    }

    /// Seizes every thread; what they start later is traced from its beginning.
    fn seize(&mut self) -> Result<(), Failure> {
        let options = (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE) as usize;
        loop {
            let list = std::fs::read_dir(format!("/proc/{}/task", self.agent)).map_err(|e| self.fail("list", &e))?;
            let tids = list.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
            let new: Vec<i32> = tids.filter(|t| !self.known.contains(t)).collect();
            if new.is_empty() {
                return Ok(());
            }
            for tid in new {
                let seized = request(libc::PTRACE_SEIZE, tid, 0, options).and_then(|()| request(libc::PTRACE_INTERRUPT, tid, 0, 0));
                unless_gone(seized).map_err(|e| self.fail("trace", &e))?;
                self.known.insert(tid);
            }
        }
    }

    fn follow(&mut self, done: &AtomicBool, mut at_call: impl FnMut(&Call) -> Result<Verdict, Failure>) -> Result<(), Failure> {
        let mut leaving: Option<Instant> = None;
        let mut result = Ok(());
        loop {
            if leaving.is_none() && done.load(Ordering::Acquire) {
                leaving = Some(Instant::now());
                for tid in &self.known {
                    unless_gone(request(libc::PTRACE_INTERRUPT, *tid, 0, 0)).map_err(|e| self.fail("stop", &e))?;
                }
            }
            let mut status = 0;
            // SAFETY: `status` is a live int.
            let tid = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG) };
            if tid == -1 {
                // Nothing is traced any more.
                return result;
            }
            if tid == 0 {
                if leaving.is_some_and(|t| t.elapsed() > Duration::from_secs(10)) {
                    return Err(format!("the agent {} does not stop", self.agent));
                }
                std::thread::sleep(Duration::from_micros(20));
                continue;
            }
            if !libc::WIFSTOPPED(status) {
                self.known.remove(&tid);
                continue;
            }
            self.known.insert(tid);
            let mut go = libc::PTRACE_SYSCALL;
            let signal = libc::WSTOPSIG(status);
            let at_a_call = signal == libc::SIGTRAP | 0x80;
            if at_a_call {
                match self.stopped(tid, &mut at_call) {
                    Ok(Verdict::On) => {}
                    Ok(Verdict::Leave) => done.store(true, Ordering::Release),
                    Ok(Verdict::Kill) => {
                        crate::procs::signal(self.agent, libc::SIGKILL);
                        continue;
                    }
                    Err(e) => {
                        result = Err(e);
                        done.store(true, Ordering::Release);
                    }
                }
            }
            if leaving.is_some() {
                go = libc::PTRACE_DETACH;
            }
            let deliver = if at_a_call || status >> 16 != 0 { 0 } else { signal };
            unless_gone(request(go, tid, 0, deliver as usize)).map_err(|e| self.fail("continue", &e))?;
        }
    }

    fn stopped(&mut self, tid: i32, at_call: &mut impl FnMut(&Call) -> Result<Verdict, Failure>) -> Result<Verdict, Failure> {
        match stopped_at(tid) {
            Ok(Some(At::Entry(number, arguments))) => {
                let Some(call) = Call::entered((self.agent, tid), number, arguments, self.dir) else {
                    return Ok(Verdict::On);
                };
                let verdict = at_call(&call);
                self.entered.insert(tid, call);
                verdict
            }
            Ok(Some(At::Exit(value))) => match self.entered.remove(&tid) {
                Some(call) => at_call(&Call {
                    result: Some(value),
                    ..call
                }),
                None => Ok(Verdict::On),
            },
            Ok(None) => Ok(Verdict::On),
            Err(e) => unless_gone(Err(e))
                .map(|()| Verdict::On)
                .map_err(|e| self.fail("look at", &e)),
        }
    }
}
