//! Descendants of the calling process that are none of its business. A program that a shell executes in its own place
//! (`exec`) has the shell's children; and a reaper is given what any of those leaves behind.

use super::{stat, Family};
use crate::pidfd;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How long processes that were killed may do nothing before they are given up: one that hangs in the kernel may never end.
pub const END_LIMIT: Duration = Duration::from_secs(20);

/// How often is looked whether they do something.
const LOOK: Duration = Duration::from_secs(1);

/// Processes that were killed. To give back the memory of a large one takes long (7 GiB a second), in which the
/// processor works for it.
#[derive(Debug)]
pub struct Dying {
    /// When something was last seen to have changed.
    since: Instant,
    /// Those that were left, with the processor time of each.
    left: Vec<(i32, u64)>,
}

impl Default for Dying {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            left: Vec::new(),
        }
    }
}

impl Dying {
    /// Whether none of those that are left, `pids`, has done anything for `limit`. One that waits for a processor does not hang.
    pub fn is_stuck(&mut self, pids: &[i32], limit: Duration) -> bool {
        let stats: Vec<(i32, super::Stat)> = pids.iter().filter_map(|pid| Some((*pid, stat(*pid).ok()?))).collect();
        let left: Vec<(i32, u64)> = stats.iter().map(|(pid, s)| (*pid, s.ticks)).collect();
        if left != self.left || stats.iter().any(|(_, s)| s.state == 'R') {
            self.since = Instant::now();
            self.left = left;
        }
        self.since.elapsed() > limit
    }
}

/// Such processes, by number and time of their start: a number may be given to another.
#[derive(Debug, Default)]
pub struct Outside(BTreeSet<(i32, u64)>);

fn me() -> i32 {
    std::process::id().cast_signed()
}

fn start_of(pid: i32) -> Option<(i32, u64)> {
    Some((pid, stat(pid).ok()?.starttime))
}

impl Outside {
    /// Adds all descendants of the calling process that are there now, but `own` and what is below it.
    pub fn note(&mut self, own: Option<i32>) {
        let now = Family::default().descendants_but(me(), own.as_slice()).unwrap_or_default();
        // What that has left is with the calling process by now.
        if own.is_some_and(|pid| stat(pid).map_or(true, |s| s.is_dead())) {
            return;
        }
        self.0.retain(|known| start_of(known.0) == Some(*known));
        self.0.extend(now.into_iter().filter_map(|(pid, _)| start_of(pid)));
    }

    /// Kills all other descendants of the calling process, which must be a reaper, and waits until none is left; where
    /// nothing of them has moved for `limit`, the error names who is.
    pub fn end_others(&self, limit: Duration) -> io::Result<()> {
        let mut dying = Dying::default();
        loop {
            let known = self.0.iter().filter(|known| start_of(known.0) == Some(**known));
            let outside: Vec<i32> = known.map(|(pid, _)| *pid).collect();
            let left = Family::default().descendants_but(me(), &outside)?;
            // Parents come before their children: the first is a child of this process.
            let Some((child, _)) = left.first() else { return Ok(()) };
            for (pid, _) in &left {
                // SAFETY: takes numbers only. Only this process and its descendants collect them: a number would have to be
                // given away and all others used up within the moments since the list was made.
                let killed = unsafe { libc::kill(*pid, libc::SIGKILL) };
                let refused = (killed != 0).then(io::Error::last_os_error);
                if let Some(e) = refused.filter(|e| e.kind() == io::ErrorKind::PermissionDenied) {
                    return Err(io::Error::new(e.kind(), format!("process {pid} is another user's: end it")));
                }
            }
            // It is a child, and nobody else collects it: it has a descriptor, alive or dead.
            let ends = pidfd::open(*child).is_ok_and(|p| pidfd::gone_within(p.as_fd(), LOOK.min(limit)));
            if !ends {
                let left: Vec<i32> = left.iter().map(|(pid, _)| *pid).collect();
                if dying.is_stuck(&left, limit) {
                    return Err(hung(left.into_iter()));
                }
                continue;
            }
            // SAFETY: no status is wanted. One that is gone, and an interruption, is seen in the next round.
            unsafe { libc::waitpid(*child, std::ptr::null_mut(), libc::__WALL) };
        }
    }
}

/// The error that processes `pids` have been killed and do not end. Those that can be seen to hang in the kernel are
/// named, or else all.
pub fn hung(pids: impl Iterator<Item = i32>) -> io::Error {
    let all: Vec<(i32, super::Stat)> = pids.filter_map(|pid| Some((pid, stat(pid).ok()?))).collect();
    let all: Vec<_> = all.iter().filter(|(_, s)| !s.is_dead()).collect();
    let stuck: Vec<_> = all.iter().filter(|(_, s)| s.state == 'D').collect();
    let named = if stuck.is_empty() { all.iter().collect() } else { stuck };
    let each = named.iter().map(|(pid, s)| {
        let command = super::command_line(*pid).unwrap_or_else(|| format!("[{}]", s.comm.display()));
        let at = super::text(format!("/proc/{pid}/wchan")).ok().filter(|at| at.len() > 1);
        let at = at.map_or(String::new(), |at| format!(", in {at}"));
        format!("{pid} ({command}; state {}{at})", s.state)
    });
    let each: Vec<String> = each.collect();
    let why = format!(
        "process {} was killed and does not end: it hangs in the kernel; end what it waits for there (a file system that does not answer, a device), or restart the host, then call belay restart",
        each.join(", ")
    );
    io::Error::new(io::ErrorKind::TimedOut, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn only_what_does_nothing_is_stuck() {
        let limit = Duration::from_millis(300);
        let stuck_within = |script: &str, time: Duration| {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let (mut dying, begin) = (Dying::default(), Instant::now());
            let mut stuck = false;
            while !stuck && begin.elapsed() < time {
                stuck = dying.is_stuck(&[child.id().cast_signed()], limit);
                std::thread::sleep(limit / 10);
            }
            child.kill().unwrap();
            child.wait().unwrap();
            stuck
        };
        assert!(stuck_within("exec sleep 100000", END_LIMIT));
        assert!(!stuck_within("while :; do :; done", limit * 5));
    }

    /// In a process of its own, since it ends all but one of its descendants.
    #[test]
    fn all_but_the_processes_of_before_are_ended() {
        const PART: &str = "BELAY_TEST_OUTSIDE";
        if std::env::var_os(PART).is_none() {
            let exe = std::env::current_exe().unwrap();
            let args = ["--exact", "proc::outside::tests::all_but_the_processes_of_before_are_ended"];
            let out = Command::new(exe).args(args).env(PART, "1").output().unwrap();
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
            return;
        }
        // SAFETY: takes numbers only.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
        let start = |script: &str| {
            let mut c = Command::new("sh");
            let mut child = c.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            (child, line.trim().parse::<i32>().unwrap())
        };
        let (mut before, below) = start("sleep 100000 & echo $!; wait");
        let mut outside = Outside::default();
        outside.note(None);
        let (own, mine) = start("sleep 100000 & echo $!; wait");
        // Left to this process by one from before.
        before.kill().unwrap();
        before.wait().unwrap();
        let (mut later, orphan) = start("sleep 100000 & echo $!");
        later.wait().unwrap();
        outside.note(Some(own.id().cast_signed()));
        outside.end_others(END_LIMIT).unwrap();
        let lives = |pid: i32| stat(pid).is_ok_and(|s| !s.is_dead());
        assert!(lives(below) && lives(orphan));
        assert!(!lives(mine) && !lives(own.id().cast_signed()));
        Outside::default().end_others(END_LIMIT).unwrap();
        assert!(!lives(below) && !lives(orphan));
    }
}
