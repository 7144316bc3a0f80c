//! `/proc/PID`: parsing of `stat`, `status`, `maps` and the small files beside them.

mod family;
mod outside;

pub use family::{children, children_of_thread, descendants, Family};
pub use outside::{hung, Dying, Outside, END_LIMIT};

use crate::dir::Dir;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

/// Reads a whole file of procfs. Such a file says that its length is 0: a reader that goes by that begins with a few
/// bytes and doubles, eight system calls in place of four, while the job stands still.
pub fn read_whole(path: impl AsRef<std::path::Path>) -> io::Result<Vec<u8>> {
    whole(&std::fs::File::open(path)?)
}

fn whole(mut file: &std::fs::File) -> io::Result<Vec<u8>> {
    const STEP: usize = 4096;
    let mut out = Vec::new();
    let mut filled = 0;
    loop {
        if out.len() - filled < STEP {
            out.resize((out.len() * 2).max(2 * STEP), 0);
        }
        match file.read(&mut out[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    out.truncate(filled);
    Ok(out)
}

/// The first words with which process `pid` was executed; none for one without memory, or that has cleared them. It can
/// say that it has terabytes of them (PR_SET_MM), and be another user's.
pub fn command_line(pid: i32) -> Option<String> {
    const MOST: u64 = 32 << 10;
    let mut raw = Vec::new();
    let file = std::fs::File::open(format!("/proc/{pid}/cmdline")).ok()?;
    file.take(MOST).read_to_end(&mut raw).ok()?;
    let words = raw.split(|b| *b == 0).filter(|w| !w.is_empty());
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    (!words.is_empty()).then(|| words.join(" "))
}

/// As [`read_whole`], for text.
pub fn text(path: impl AsRef<std::path::Path>) -> io::Result<String> {
    String::from_utf8(read_whole(path)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Size of the address space of `pid`, pages.
pub fn pages(pid: i32) -> io::Result<u64> {
    let text = text(format!("/proc/{pid}/statm"))?;
    let size = text.split_ascii_whitespace().next().and_then(|size| size.parse().ok());
    size.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Where the link `name` of `pid` leads (`cwd`, `exe`, `root`); empty when it cannot be read.
pub fn link(pid: i32, name: &str) -> PathBuf {
    std::fs::read_link(format!("/proc/{pid}/{name}")).unwrap_or_default()
}

/// The file of this program, by its name: another may lie there by now, as after an upgrade, and serves as well.
pub fn own_program() -> io::Result<PathBuf> {
    let link = std::env::current_exe()?;
    Ok(if link.exists() { link } else { without_mark(link) })
}

/// The name of a file without what the kernel adds when that file is not there any more.
fn without_mark(link: PathBuf) -> PathBuf {
    let name = link.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    name.map_or_else(|| link.clone(), |name| OsStr::from_bytes(name).into())
}

/// `/proc/PID/stat`, the fields that capture needs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // names of proc(5)
pub struct Stat {
    pub pid: i32,
    pub comm: OsString,
    pub state: char,
    pub ppid: i32,
    pub pgrp: i32,
    pub session: i32,
    pub tty_nr: u64,
    pub tpgid: i32,
    pub num_threads: u32,
    /// Page faults of all threads for which nothing was read from a disk.
    pub minor_faults: u64,
    /// Processor time of all threads, clock ticks.
    pub ticks: u64,
    pub starttime: u64,
    pub rss_pages: u64,
    pub start_code: u64,
    pub end_code: u64,
    pub start_stack: u64,
    pub exit_signal: i32,
    /// The processor it runs on, or ran on last.
    pub processor: i32,
    pub start_data: u64,
    pub end_data: u64,
    pub start_brk: u64,
    pub arg_start: u64,
    pub arg_end: u64,
    pub env_start: u64,
    pub env_end: u64,
    pub exit_code: i32,
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("cannot parse {what}"))
}

impl Stat {
    /// Parses the contents of `/proc/PID/stat`.
    pub fn parse(raw: &[u8]) -> Option<Self> {
        parse_stat(raw)
    }

    /// Whether no thread of the process lives. A process whose main thread has exited is a zombie too, but others of it run.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.num_threads <= 1
    }
}

/// How many tasks of the machine run at this moment or could, where that is told.
pub fn runnable() -> Option<usize> {
    let all = text("/proc/loadavg").ok()?;
    all.split_ascii_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// The number that was given last in the caller's PID namespace, where that is told.
pub fn last_pid() -> Option<i32> {
    text("/proc/loadavg").ok()?.split_ascii_whitespace().nth(4)?.parse().ok()
}

/// Reads `/proc/PID/stat`, or that of a thread with `tid`.
pub fn stat(pid: i32) -> io::Result<Stat> {
    parse_stat(&read_whole(format!("/proc/{pid}/stat"))?).ok_or_else(|| invalid("/proc/PID/stat"))
}

/// When process `pid` was started, in clock ticks since the start of the machine, unless it has ended.
pub fn born(pid: i32) -> Option<u64> {
    stat(pid).ok().filter(|s| !s.is_dead()).map(|s| s.starttime)
}

/// Reads `/proc/PID/task/TID/stat`, which tells of the thread alone.
pub fn task_stat(pid: i32, tid: i32) -> io::Result<Stat> {
    parse_stat(&read_whole(format!("/proc/{pid}/task/{tid}/stat"))?).ok_or_else(|| invalid("/proc/PID/task/TID/stat"))
}

/// Whether thread `tid` of process `pid` lives; one that has exited is still listed, where it was the main thread or is
/// traced.
pub fn thread_lives(pid: i32, tid: i32) -> bool {
    task_stat(pid, tid).is_ok_and(|s| !matches!(s.state, 'Z' | 'X'))
}

fn parse_stat(raw: &[u8]) -> Option<Stat> {
    // The name is whatever bytes the program has chosen; the rest is the kernel's.
    let open = raw.iter().position(|b| *b == b'(')?;
    let close = raw.iter().rposition(|b| *b == b')')?;
    let rest: Vec<&str> = std::str::from_utf8(raw.get(close + 2..)?).ok()?.split_whitespace().collect();
    let field = |n: usize| rest.get(n - 3).copied(); // fields are numbered as in proc(5), `state` is 3
    let signed = |n: usize| field(n)?.parse::<i32>().ok();
    let unsigned = |n: usize| field(n)?.parse::<u64>().ok();
    Some(Stat {
        pid: std::str::from_utf8(raw.get(..open)?).ok()?.trim().parse().ok()?,
        comm: OsStr::from_bytes(raw.get(open + 1..close)?).to_owned(),
        state: field(3)?.chars().next()?,
        ppid: signed(4)?,
        pgrp: signed(5)?,
        session: signed(6)?,
        tty_nr: unsigned(7)?,
        tpgid: signed(8)?,
        num_threads: field(20)?.parse().ok()?,
        minor_faults: unsigned(10)?,
        ticks: unsigned(14)?.saturating_add(unsigned(15)?),
        starttime: unsigned(22)?,
        rss_pages: unsigned(24)?,
        start_code: unsigned(26)?,
        end_code: unsigned(27)?,
        start_stack: unsigned(28)?,
        exit_signal: signed(38)?,
        processor: signed(39)?,
        start_data: unsigned(45)?,
        end_data: unsigned(46)?,
        start_brk: unsigned(47)?,
        arg_start: unsigned(48)?,
        arg_end: unsigned(49)?,
        env_start: unsigned(50)?,
        env_end: unsigned(51)?,
        exit_code: signed(52)?,
    })
}

/// `/proc/PID/status` as key and value.
#[derive(Debug, Clone)]
pub struct Status(BTreeMap<String, String>);

impl Status {
    /// Reads it for process (or thread) `pid`.
    pub fn read(pid: i32) -> io::Result<Self> {
        Ok(Self::parse(&read_whole(format!("/proc/{pid}/status"))?))
    }

    /// Parses its contents.
    pub fn parse(raw: &[u8]) -> Self {
        let text = String::from_utf8_lossy(raw);
        let lines = text.lines().filter_map(|l| l.split_once(':'));
        Self(lines.map(|(k, v)| (k.to_owned(), v.trim().to_owned())).collect())
    }

    /// The lines of `keys` in the status of the thread whose directory in `/proc` is `task`, as they are.
    pub fn lines_of(task: &Dir, keys: &[&str]) -> io::Result<Vec<u8>> {
        let raw = whole(&task.open("status".as_ref(), libc::O_RDONLY, 0)?)?;
        let wanted = |line: &&[u8]| {
            let key = line.iter().position(|b| *b == b':').map(|end| &line[..end]);
            key.is_some_and(|key| keys.iter().any(|wanted| wanted.as_bytes() == key))
        };
        let lines = raw.split_inclusive(|b| *b == b'\n').filter(wanted);
        Ok(lines.collect::<Vec<_>>().concat())
    }

    /// A size, KiB; 0 where there is no such line.
    pub fn kib(&self, key: &str) -> u64 {
        self.list(key).first().map_or(0, |v| v.unsigned_abs())
    }

    /// A value as text.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// A hexadecimal value.
    pub fn hex(&self, key: &str) -> Option<u64> {
        u64::from_str_radix(self.text(key)?, 16).ok()
    }

    /// A list of decimal values.
    pub fn list(&self, key: &str) -> Vec<i64> {
        self.text(key)
            .map(|t| t.split_whitespace().filter_map(|v| v.parse().ok()).collect())
            .unwrap_or_default()
    }
}

/// One line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// `PROT_*` bits.
    pub prot: u32,
    /// Whether the mapping is shared.
    pub shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Device, as `makedev(major, minor)`.
    pub dev: u64,
    /// Inode number, 0 for anonymous memory.
    pub ino: u64,
    /// Path or pseudo name; octal escapes undone.
    pub name: OsString,
    /// `VmFlags`, when read from `smaps`.
    pub flags: Vec<String>,
    /// Its memory protection key (`pkeys(7)`), when read from `smaps`; 0 is that of all memory without one.
    pub key: u8,
    /// What only a checkpoint knows: its file, to which no path leads, is restored as such.
    pub restored: bool,
    /// The same: whether a path led to its file when the process had been stopped.
    pub reached: Option<bool>,
}

impl Map {
    /// Parses the contents of `/proc/PID/maps` or `smaps`.
    pub fn parse(raw: &[u8]) -> Option<Vec<Self>> {
        parse_maps(raw)
    }
}

/// Reads `/proc/PID/maps`.
pub fn maps(pid: i32) -> io::Result<Vec<Map>> {
    let raw = read_whole(format!("/proc/{pid}/maps"))?;
    parse_maps(&raw).ok_or_else(|| invalid("/proc/PID/maps"))
}

/// Reads `/proc/PID/smaps`: the mappings with their `VmFlags`. Walks the page tables, so it takes time in proportion to
/// resident memory.
pub fn smaps(pid: i32) -> io::Result<Vec<Map>> {
    let raw = read_whole(format!("/proc/{pid}/smaps"))?;
    parse_maps(&raw).ok_or_else(|| invalid("/proc/PID/smaps"))
}

/// Works on bytes: a process with a thousand threads has two thousand lines, and is stopped while they are read.
fn parse_maps(raw: &[u8]) -> Option<Vec<Map>> {
    let mut out: Vec<Map> = Vec::with_capacity(raw.len() / 80);
    for line in raw.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
        let first = line.split(|b| *b == b' ').next()?;
        if first.ends_with(b":") {
            if let Some(key) = line.strip_prefix(b"ProtectionKey:") {
                out.last_mut()?.key = std::str::from_utf8(key).ok()?.trim().parse().ok()?;
            } else if let Some(flags) = line.strip_prefix(b"VmFlags:") {
                let words = flags.split(|b| *b == b' ').filter(|w| !w.is_empty());
                out.last_mut()?.flags = words.map(|w| String::from_utf8_lossy(w).into_owned()).collect();
            }
            continue;
        }
        out.push(parse_map(line)?);
    }
    Some(out)
}

/// Parses `start-end perms offset major:minor inode   name`; the numbers but the inode's are hexadecimal.
fn parse_map(line: &[u8]) -> Option<Map> {
    let mut rest = line;
    let (start, end) = (number(&mut rest, 16, b'-')?, number(&mut rest, 16, b' ')?);
    let (perms, behind) = rest.split_at_checked(5)?;
    rest = behind;
    let offset = number(&mut rest, 16, b' ')?;
    let (major, minor) = (number(&mut rest, 16, b':')?, number(&mut rest, 16, b' ')?);
    let ino = number(&mut rest, 10, b' ')?;
    let bit = |i: usize, c: u8, v: u32| if perms[i] == c { v } else { 0 };
    Some(Map {
        start,
        end,
        prot: bit(0, b'r', 1) | bit(1, b'w', 2) | bit(2, b'x', 4),
        shared: perms[3] == b's',
        offset,
        dev: libc::makedev(u32::try_from(major).ok()?, u32::try_from(minor).ok()?),
        ino,
        name: unescape(rest.trim_ascii_start()),
        flags: Vec::new(),
        key: 0,
        restored: false,
        reached: None,
    })
}

/// Takes a number in `radix` up to the byte `end`, or the end of the line, off the front of `rest`.
fn number(rest: &mut &[u8], radix: u32, end: u8) -> Option<u64> {
    let n = rest.iter().position(|b| *b == end).unwrap_or(rest.len());
    let (digits, behind) = rest.split_at(n);
    *rest = behind.get(1..).unwrap_or_default();
    let add = |sum: u64, b: &u8| {
        let digit = char::from(*b).to_digit(radix)?;
        sum.checked_mul(u64::from(radix))?.checked_add(u64::from(digit))
    };
    digits.iter().try_fold(0, add).filter(|_| !digits.is_empty())
}

/// Undoes the kernel's octal escapes (`\012` for a newline).
fn unescape(mut s: &[u8]) -> OsString {
    const NEWLINE: &[u8] = b"\\012";
    let mut out = Vec::with_capacity(s.len());
    while let Some(at) = s.windows(NEWLINE.len()).position(|w| w == NEWLINE) {
        out.extend_from_slice(&s[..at]);
        out.push(b'\n');
        s = &s[at + NEWLINE.len()..];
    }
    out.extend_from_slice(s);
    OsString::from_vec(out)
}

/// Thread identifiers of process `pid`, ascending.
pub fn tasks(pid: i32) -> io::Result<Vec<i32>> {
    numbers(&format!("/proc/{pid}/task"))
}

/// Descriptors of process `pid`, ascending.
pub fn fds(pid: i32) -> io::Result<Vec<i32>> {
    numbers(&format!("/proc/{pid}/fd"))
}

/// All process identifiers, ascending.
pub fn pids() -> io::Result<Vec<i32>> {
    numbers("/proc")
}

fn numbers(dir: &str) -> io::Result<Vec<i32>> {
    let mut out: Vec<i32> = std::fs::read_dir(dir)?
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    out.sort_unstable();
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_any_more_has_the_name_it_had() {
        for (link, name) in [
            ("/x/belay (deleted)", "/x/belay"),
            ("/x/belay", "/x/belay"),
            ("/x/a (deleted) (deleted)", "/x/a (deleted)"),
        ] {
            assert_eq!(without_mark(link.into()), PathBuf::from(name));
        }
        assert_eq!(own_program().unwrap(), std::env::current_exe().unwrap());
    }

    #[test]
    fn of_a_long_command_line_the_beginning_is_read() {
        let word = "x".repeat(100_000);
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "echo; read x", &word, &word]);
        command
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        // In the middle of the system call that begins it, a program has no command line.
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let line = command_line(child.id().cast_signed()).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(
            line.starts_with("sh -c echo; read x xxx") && line.len() < 40_000,
            "{}",
            line.len()
        );
    }

    #[test]
    fn files_of_any_length_are_read_whole() {
        let path = std::env::temp_dir().join(format!("belay-read-whole-{}", std::process::id()));
        for length in [0, 1, 4095, 4096, 8192, 8193, 100_000] {
            let content: Vec<u8> = (0..length).map(|i: u32| (i % 251) as u8).collect();
            std::fs::write(&path, &content).unwrap();
            assert_eq!(read_whole(&path).unwrap(), content);
        }
        std::fs::remove_file(&path).unwrap();
        assert!(read_whole(&path).is_err());
    }

    #[test]
    fn a_comm_with_parentheses_and_spaces_is_parsed() {
        let line = b"42 (a) b (c)) S 1 42 42 34816 42 4194304 1 2 3 4 5 6 7 8 20 0 3 0 99 1000 25 18446744073709551615 1 2 3 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 10 11 12 13 14 15 16 256";
        let s = parse_stat(line).unwrap();
        assert_eq!(
            (
                s.comm.to_str().unwrap(),
                s.ppid,
                s.num_threads,
                s.exit_signal,
                s.exit_code,
                s.rss_pages
            ),
            ("a) b (c)", 1, 3, 17, 256, 25)
        );
        assert_eq!((s.start_code, s.start_brk, s.env_end), (1, 12, 16));
    }

    #[test]
    fn maps_lines_are_parsed() {
        let m = parse_maps(
            b"7f00-7fff r-xp 00001000 fe:00 1234 /lib/a b\nVmFlags: rd ex mr\n8000-9000 rw-s 00000000 00:01 7 /dev/zero (deleted)\n",
        )
        .unwrap();
        assert_eq!(m.len(), 2);
        assert_eq!(
            (m[0].prot, m[0].shared, m[0].offset, m[0].ino, m[0].name.to_str().unwrap()),
            (5, false, 0x1000, 1234, "/lib/a b")
        );
        assert_eq!(m[0].flags, ["rd", "ex", "mr"]);
        assert!(m[1].shared);
    }

    #[test]
    fn this_process_reads_itself() {
        let me = std::process::id() as i32;
        assert_eq!(stat(me).unwrap().pid, me);
        assert!(maps(me).unwrap().iter().any(|m| m.name == "[stack]"));
        assert!(smaps(me).unwrap().iter().any(|m| m.flags.contains(&"gd".to_owned())));
        assert!(Status::read(me).unwrap().hex("SigBlk").is_some());
        assert!(tasks(me).unwrap().contains(&me));
    }
}
