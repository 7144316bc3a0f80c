//! Processes of one job: found by walking the children of the launcher, killed by PID.
//!
//! A job that starts processes all the time is killed as a whole by stopping first everything, parents before children,
//! until a scan finds nothing new; only then is everything killed, children before parents. So no process can slip away
//! between the scan and the kill: a process group that loses its last parent is sent SIGHUP and SIGCONT by the kernel
//! when it is stopped, and a server may answer that with new processes. A scan can miss a process that is made while
//! another one ends; the kernel sends a signal to all of a process group at once, so each group is stopped and killed
//! as a whole, too.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Parent and state of every process that can be seen.
fn table() -> HashMap<i32, (i32, char)> {
    let mut t = HashMap::new();
    let Ok(dir) = std::fs::read_dir("/proc") else { return t };
    for e in dir.flatten() {
        let Some(pid) = e.file_name().to_str().and_then(|s| s.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
            continue;
        };
        let Some(rest) = stat.rfind(')').map(|i| &stat[i + 1..]) else {
            continue;
        };
        let mut f = rest.split_whitespace();
        let mut state = f.next().and_then(|s| s.chars().next()).unwrap_or('?');
        let ppid = f.next().and_then(|s| s.parse().ok());
        let threads = f.nth(15).and_then(|s| s.parse().ok()).unwrap_or(1);
        if state == 'Z' && threads > 1 {
            state = 'S'; // only its main thread has exited
        }
        if let Some(ppid) = ppid {
            t.insert(pid, (ppid, state));
        }
    }
    t
}

/// `root` and all its descendants, zombies left out.
pub fn tree(root: i32) -> BTreeSet<i32> {
    let t = table();
    let mut found: BTreeSet<i32> = BTreeSet::new();
    let mut frontier = vec![root];
    while let Some(p) = frontier.pop() {
        if t.contains_key(&p) && found.insert(p) {
            frontier.extend(t.iter().filter(|(_, (ppid, _))| *ppid == p).map(|(pid, _)| *pid));
        }
    }
    found.retain(|p| t.get(p).is_some_and(|(_, s)| *s != 'Z'));
    found
}

/// Every process that can be seen.
pub fn all() -> BTreeSet<i32> {
    table().into_keys().collect()
}

/// Sends `sig` to `pid`. A process that is already gone is not an error.
pub fn signal(pid: i32, sig: i32) {
    // SAFETY: kill has no memory effects in this process.
    unsafe { libc::kill(pid, sig) };
}

/// Number of ancestors of `pid`.
fn depth(all: &HashMap<i32, (i32, char)>, pid: i32) -> usize {
    std::iter::successors(Some(pid), |p| all.get(p).map(|(up, _)| *up).filter(|up| *up > 0)).count()
}

/// The process group of `pid`, unless it is the caller's.
fn group(pid: i32) -> Option<i32> {
    // SAFETY: both take and return numbers.
    let (group, own) = unsafe { (libc::getpgid(pid), libc::getpgrp()) };
    (group > 1 && group != own).then_some(group)
}

/// Kills `root` and all its descendants with SIGKILL and waits until none of them runs any more.
pub fn kill_tree(root: i32) {
    let mut seen = BTreeSet::new();
    let mut groups = BTreeSet::new();
    loop {
        let mut fresh: Vec<i32> = tree(root).into_iter().filter(|p| !seen.contains(p)).collect();
        if fresh.is_empty() {
            break;
        }
        // Numbers come around again: a child's may be the smaller one.
        let all = table();
        fresh.sort_by_cached_key(|pid| depth(&all, *pid));
        for p in fresh {
            signal(p, libc::SIGSTOP);
            seen.insert(p);
            if let Some(group) = group(p).filter(|g| groups.insert(*g)) {
                signal(-group, libc::SIGSTOP);
            }
        }
        // A stop takes hold at the end of a system call: a fork that has begun brings a child yet.
        let end = Instant::now() + Duration::from_secs(1);
        while !seen.iter().all(|p| stands(*p)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let all = table();
    let mut deepest_first: Vec<i32> = seen.iter().copied().collect();
    deepest_first.sort_by_cached_key(|pid| std::cmp::Reverse(depth(&all, *pid)));
    for p in deepest_first {
        signal(p, libc::SIGKILL);
    }
    for group in groups {
        signal(-group, libc::SIGKILL);
    }
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        let t = table();
        if seen.iter().all(|p| t.get(p).is_none_or(|(_, s)| *s == 'Z')) {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether all threads of process `pid` are stopped, by a signal or a tracer, or gone.
fn stands(pid: i32) -> bool {
    let stat = |tid: i32| std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat"));
    let states = threads(pid).into_iter().filter_map(|tid| stat(tid).ok());
    let mut letters = states.filter_map(|stat| stat.rsplit_once(") ")?.1.chars().next());
    letters.all(|letter| "TtZX".contains(letter))
}

/// The threads of process `pid`.
pub fn threads(pid: i32) -> Vec<i32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// The name of process `pid`.
pub fn comm(pid: i32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim().to_owned()
}

/// The letter that says what process `pid` does (`proc(5)`).
pub fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether the first thread of process `pid` blocks `signal`.
pub fn blocks(pid: i32, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigBlk:"));
    let mask = mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok());
    mask.is_some_and(|m| m >> (signal - 1) & 1 == 1)
}

/// What process `pid` has open, as the system names it.
pub fn open_files(pid: i32) -> Vec<PathBuf> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    fds.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect()
}

/// The parent of process `pid`.
pub fn parent(pid: i32) -> Option<i32> {
    let s = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    s[s.rfind(')')? + 2..].split(' ').nth(1)?.parse().ok()
}

/// The first process called `program` below `front`, and its agent.
pub fn program_and_agent(front: i32, program: &str) -> Option<(i32, i32)> {
    tree(front).into_iter().find_map(|p| {
        let above = parent(p)?;
        (comm(p) == program && comm(above) != program).then_some((p, above))
    })
}

/// Living processes whose environment or command line names `mark` (a work directory): what a finished job left behind.
pub fn marked(mark: &Path) -> Vec<(i32, String)> {
    let mark = mark.as_os_str().as_encoded_bytes();
    let mut out = Vec::new();
    let me = std::process::id() as i32;
    for (pid, (_, state)) in table() {
        if state == 'Z' || pid == me {
            continue;
        }
        let names =
            |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).is_ok_and(|b| b.windows(mark.len()).any(|w| w == mark));
        if names("environ") || names("cmdline") {
            let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            out.push((pid, comm.trim().to_owned()));
        }
    }
    out
}
