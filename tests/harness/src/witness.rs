//! Runs a command and notes every call by which it changes files or connects to somebody, from its first instruction on.

use crate::stepper::{memory, request, stopped_at, At};
use crate::Failure;
use std::collections::BTreeSet;
use std::io::{Read, Seek};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Output, Stdio};

/// Longest path or address that is read.
const LONGEST: usize = 4096;

/// What a command did.
#[derive(Debug)]
pub struct Witnessed {
    /// How it ended, and what it printed.
    pub output: Output,
    /// `mkdir /x`, `connect /y`, and the like, in order.
    pub deeds: Vec<String>,
}

/// Which argument of a call that changes something is a path, if any; none where it changes nothing.
fn changes(number: i64, a: [u64; 6]) -> Option<(&'static str, Option<u64>)> {
    let writes = |flags: u64| flags as i32 & (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) != libc::O_RDONLY;
    Some(match number {
        libc::SYS_open if writes(a[1]) => ("open", Some(a[0])),
        libc::SYS_openat if writes(a[2]) => ("open", Some(a[1])),
        libc::SYS_openat2 | libc::SYS_creat => ("open", None),
        libc::SYS_mkdir | libc::SYS_mknod => ("make", Some(a[0])),
        libc::SYS_mkdirat | libc::SYS_mknodat => ("make", Some(a[1])),
        libc::SYS_unlink | libc::SYS_rmdir => ("unlink", Some(a[0])),
        libc::SYS_unlinkat => ("unlink", Some(a[1])),
        libc::SYS_rename => ("rename", Some(a[0])),
        libc::SYS_renameat | libc::SYS_renameat2 => ("rename", Some(a[1])),
        libc::SYS_link | libc::SYS_symlink => ("link", Some(a[1])),
        libc::SYS_linkat => ("link", Some(a[3])),
        libc::SYS_symlinkat => ("link", Some(a[2])),
        libc::SYS_chmod | libc::SYS_chown | libc::SYS_lchown | libc::SYS_truncate => ("change", Some(a[0])),
        libc::SYS_fchmodat | libc::SYS_fchownat | libc::SYS_utimensat => ("change", Some(a[1])),
        libc::SYS_fchmod | libc::SYS_fchown | libc::SYS_ftruncate | libc::SYS_fallocate => ("change", None),
        libc::SYS_setxattr | libc::SYS_lsetxattr | libc::SYS_removexattr => ("change", Some(a[0])),
        libc::SYS_bind => ("bind", None),
        _ => return None,
    })
}

fn text_at(tid: i32, at: u64) -> String {
    let first = LONGEST - at as usize % LONGEST;
    let mut bytes = memory(tid, at, first).unwrap_or_default();
    if !bytes.contains(&0) {
        bytes.extend(memory(tid, at + first as u64, LONGEST).unwrap_or_default());
    }
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Whom `tid` connects to, by the arguments of `connect`.
fn peer(tid: i32, a: [u64; 6]) -> String {
    let address = memory(tid, a[1], a[2] as usize).unwrap_or_default();
    let Some((family, rest)) = address.split_first_chunk::<2>() else {
        return "nowhere".into();
    };
    match i32::from(u16::from_ne_bytes(*family)) {
        libc::AF_UNIX => {
            let end = rest.iter().position(|b| *b == 0).unwrap_or(rest.len());
            let path = String::from_utf8_lossy(&rest[..end]).into_owned();
            // By way of a descriptor: what that is open on.
            let own = path.strip_prefix("/proc/self/fd/");
            let opened = own.and_then(|fd| std::fs::read_link(format!("/proc/{tid}/fd/{fd}")).ok());
            opened.map_or(path, |p| p.display().to_string())
        }
        family => format!("family {family}: {rest:02x?}"),
    }
}

fn deed(tid: i32, number: i64, a: [u64; 6]) -> Option<String> {
    if number == libc::SYS_connect {
        return Some(format!("connect {}", peer(tid, a)));
    }
    let (what, path) = changes(number, a)?;
    Some(path.map_or(what.into(), |at| format!("{what} {}", text_at(tid, at))))
}

/// Runs `c` to its end.
pub fn witness(mut c: Command) -> Result<Witnessed, Failure> {
    let what = format!("{:?} {:?}", c.get_program(), c.get_args().collect::<Vec<_>>());
    let fail = |e: std::io::Error| format!("trace {what}: {e}");
    let temporary = || {
        let path = std::env::temp_dir().join(format!(
            "belay-witness-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path);
        file.and_then(|f| std::fs::remove_file(&path).map(|()| f)).map_err(fail)
    };
    let (mut out, mut err) = (temporary()?, temporary()?);
    c.stdin(Stdio::null())
        .stdout(out.try_clone().map_err(fail)?)
        .stderr(err.try_clone().map_err(fail)?);
    // SAFETY: one system call between fork and exec.
    unsafe { c.pre_exec(|| request(libc::PTRACE_TRACEME, 0, 0, 0)) };
    let child = c.spawn().map_err(fail)?;
    let (status, deeds) = follow(child.id() as i32).map_err(fail)?;
    let read = |f: &mut std::fs::File| -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        f.rewind()?;
        f.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let output = Output {
        status,
        stdout: read(&mut out).map_err(fail)?,
        stderr: read(&mut err).map_err(fail)?,
    };
    Ok(Witnessed { output, deeds })
}

/// Follows `pid`, which stops when it has executed its program, and all that it starts.
fn follow(pid: i32) -> std::io::Result<(ExitStatus, Vec<String>)> {
    const OPTIONS: i32 = libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_EXITKILL
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK;
    let (mut deeds, mut known) = (Vec::new(), BTreeSet::new());
    loop {
        let mut status = 0;
        // SAFETY: `status` is a live int.
        let tid = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
        if tid < 0 {
            return Err(std::io::Error::last_os_error());
        }
        if !libc::WIFSTOPPED(status) {
            if tid == pid {
                return Ok((ExitStatus::from_raw(status), deeds));
            }
            continue;
        }
        let signal = libc::WSTOPSIG(status);
        let mut deliver = 0;
        if known.insert(tid) {
            // The stop after the execution, or that of one who begins.
            request(libc::PTRACE_SETOPTIONS, tid, 0, OPTIONS as usize)?;
        } else if signal == libc::SIGTRAP | 0x80 {
            if let Some(At::Entry(number, arguments)) = stopped_at(tid)? {
                deeds.extend(deed(tid, number, arguments));
            }
        } else if status >> 16 == 0 && signal != libc::SIGTRAP {
            deliver = signal;
        }
        request(libc::PTRACE_SYSCALL, tid, 0, deliver as usize)?;
    }
}
