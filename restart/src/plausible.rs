//! Whether a job's description can be one: what the plans made from it take for granted. A description with right
//! checksums can still come from a defect, or from somebody else's hands, and must end in one line, not in a panic in
//! the middle of a restart. Pure.

use crate::code;
use crate::layout::TASK_SIZE;
use crate::memory::keys::KEYS;
use crate::tree::is_live;
use belay_abi::aio::{RingPlan, EVENT_BYTES};
use belay_abi::PAGE;
use belay_image::model::{Job, Process, ProcessState, Ring, Thread, Vma, VmaKind};
use std::collections::HashMap;

/// Length of a `siginfo_t`.
const SIGINFO_BYTES: usize = 128;
/// Words of `struct user_regs_struct`.
const REGISTERS: usize = 27;
/// Frames of signal handlers that are believed.
const MOST_FRAMES: usize = 1 << 20;
/// Bytes of a return address.
const WORD: u64 = 8;
const WRITE: u32 = libc::PROT_WRITE.cast_unsigned();
/// Largest signal.
const SIGNALS: i32 = 64;
/// What no clock says, nanoseconds: more than the kernel lets one be set to in a time namespace (KTIME_SEC_MAX / 2).
const END_OF_TIME: u64 = i64::MAX as u64 / 2;

/// Checks `job`; what is wrong with it. `ended`: its command had ended at the checkpoint, and is not part of it.
pub(crate) fn check(job: &Job, ended: bool) -> Result<(), String> {
    // The agent waits for the command, and hears of its own children only.
    let is_command = |p: &Process| p.pid == job.root_pid && p.ppid == job.agent.pid;
    if !ended && !job.processes.iter().any(is_command) {
        return Err(format!(
            "process {}, the command, is none of the agent's children",
            job.root_pid
        ));
    }
    if [Some(job.monotonic_ns), job.boottime_ns]
        .into_iter()
        .flatten()
        .any(|ns| ns > END_OF_TIME)
    {
        return Err("a clock that stands in a year that it does not reach".into());
    }
    code::check(&job.code)?;
    job.processes.iter().try_for_each(|p| {
        let checked = process(p)
            .and_then(|()| guest(p, &job.processes))
            .and_then(|()| frames(&p.vdso_frames, &owner(p, &job.processes).vmas));
        checked.map_err(|what| format!("process {}: {what}", p.pid))
    })
}

/// A process that shares the memory of another has none of its own.
pub(crate) fn guest(p: &Process, all: &[Process]) -> Result<(), String> {
    if p.shares_mm_with == 0 {
        return if p.shares_handlers {
            Err("shares signal dispositions, but no memory".into())
        } else {
            Ok(())
        };
    }
    let first = all.iter().find(|q| q.pid == p.shares_mm_with);
    if !is_live(p) || first.is_none_or(|first| !is_live(first) || first.shares_mm_with != 0 || first.pid == p.pid) {
        return Err(format!("shares the memory of process {}, which has none", p.shares_mm_with));
    }
    if p.vmas.is_empty() && p.rings.is_empty() {
        Ok(())
    } else {
        Err("has memory of its own, and shares another's".into())
    }
}

/// The process whose description has the memory of `p`.
fn owner<'a>(p: &'a Process, all: &'a [Process]) -> &'a Process {
    all.iter().find(|q| q.pid == p.shares_mm_with).unwrap_or(p)
}

/// Frames of signal handlers lie in memory of the process.
fn frames(frames: &[(u64, u64)], vmas: &[Vma]) -> Result<(), String> {
    if frames.len() > MOST_FRAMES {
        return Err(format!("{} frames of signal handlers", frames.len()));
    }
    // Mappings end at multiples of the page, so that a word lies in one.
    let mapping = |at: u64| vmas.get(vmas.partition_point(|v| v.end <= at));
    let lies = |at: u64| mapping(at).is_some_and(|v| v.start <= at && v.prot & WRITE != 0);
    let stray = frames.iter().find(|(at, _)| !at.is_multiple_of(WORD) || !lies(*at));
    stray.map_or(Ok(()), |(at, _)| {
        Err(format!("a frame of a signal handler at {at:#x} lies in none of its memory"))
    })
}

/// The process of each task of the job.
pub(crate) fn tasks(job: &Job) -> HashMap<i32, i32> {
    let live = job.processes.iter().filter(|p| is_live(p));
    live.flat_map(|p| p.threads.iter().map(|t| (t.tid, p.pid))).collect()
}

fn process(p: &Process) -> Result<(), String> {
    if let ProcessState::Zombie(status) = p.state {
        if !is_end(status) {
            return Err(format!("has ended with status {status:#x}, which none does"));
        }
    }
    let own = p.threads.iter().filter_map(|t| t.directories.as_ref()).map(|(cwd, _)| cwd);
    let mapped = p.vmas.iter().filter_map(|v| match &v.kind {
        VmaKind::FilePrivate { path, .. } => Some(path),
        _ => None,
    });
    let mut names = [&p.comm, &p.exe, &p.cwd, &p.root].into_iter().chain(own).chain(mapped);
    if let Some(name) = names.find(|name| name.as_bytes().contains(&0)) {
        return Err(format!("a name with a zero byte: {name}"));
    }
    if let ProcessState::Stopped(signal) = p.state {
        if ![libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU].contains(&signal) {
            return Err(format!("stopped by signal {signal}"));
        }
    }
    if p.sigactions.len() > SIGNALS as usize {
        return Err(format!("{} signal dispositions", p.sigactions.len()));
    }
    if p.mm.auxv.len() > 1024 {
        return Err(format!("{} words of auxiliary vector", p.mm.auxv.len()));
    }
    if let Some(t) = p.posix_timers.iter().find(|t| t.id < 0) {
        return Err(format!("POSIX timer {}", t.id));
    }
    pending(&p.pending)?;
    let mut behind = 0;
    for v in &p.vmas {
        mapping(v, behind).map_err(|what| format!("mapping at {:#x} {what}", v.start))?;
        behind = v.end;
    }
    p.rings
        .iter()
        .try_for_each(|r| ring(r, &p.vmas).map_err(|what| format!("ring of asynchronous I/O at {:#x} {what}", r.start)))?;
    let own = p.threads.first().is_some_and(|t| t.tid == p.pid);
    let lives = p.threads.iter().any(|t| t.exited.is_none());
    if is_live(p) && (!own || !lives || p.threads.iter().any(|t| t.regs.len() != REGISTERS)) {
        return Err("threads or registers are incomplete".into());
    }
    p.threads
        .iter()
        .try_for_each(|t| thread(t).map_err(|what| format!("thread {}: {what}", t.tid)))
}

/// Whether a process can end so that its parent is told this: it has exited, or been killed by a signal that kills.
fn is_end(status: i32) -> bool {
    const NEVER: [i32; 8] = [
        libc::SIGCHLD,
        libc::SIGCONT,
        libc::SIGURG,
        libc::SIGWINCH,
        libc::SIGSTOP,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
    ];
    let signal = libc::WTERMSIG(status);
    let known = status & !0xffff == 0;
    known && (libc::WIFEXITED(status) || libc::WIFSIGNALED(status) && signal <= SIGNALS && !NEVER.contains(&signal))
}

/// A mapping that follows one that ends at `behind`.
fn mapping(v: &Vma, behind: u64) -> Result<(), &'static str> {
    if !v.start.is_multiple_of(PAGE) || !v.end.is_multiple_of(PAGE) || v.start >= v.end {
        return Err("is misaligned or empty");
    }
    if v.start < behind {
        return Err("overlaps the one before");
    }
    if v.end > TASK_SIZE && v.kind != VmaKind::Vsyscall {
        return Err("lies outside the address space of a process");
    }
    if v.key >= KEYS {
        return Err("has a memory protection key that does not exist");
    }
    let mut free = v.start;
    for (from, to) in &v.guards {
        let aligned = from.is_multiple_of(PAGE) && to.is_multiple_of(PAGE);
        if !aligned || *from < free || from >= to || *to > v.end {
            return Err("has guard regions that cannot be");
        }
        free = *to;
    }
    let length = v.end - v.start;
    match &v.kind {
        VmaKind::SysvShm { offset, .. } if *offset > v.start => Err("begins before the segment it is a part of"),
        VmaKind::FilePrivate { offset, .. } | VmaKind::PrivateObject { offset, .. } | VmaKind::Shared { offset, .. }
            if offset.checked_add(length).is_none_or(|end| i64::try_from(end).is_err()) =>
        {
            Err("reaches behind the end of any file")
        }
        VmaKind::HugeTlb { page_bytes } if !page_bytes.is_power_of_two() || *page_bytes < PAGE => {
            Err("has pages of no possible size")
        }
        _ => Ok(()),
    }
}

/// A ring, which stands in a mapping of its own.
fn ring(r: &Ring, vmas: &[Vma]) -> Result<(), &'static str> {
    let place = |v: &&Vma| v.start == r.start && v.end - v.start == r.bytes && v.kind == VmaKind::Ring;
    if vmas.iter().filter(place).count() != 1 {
        return Err("has no mapping");
    }
    let plan = RingPlan {
        address: r.start,
        bytes: r.bytes,
        head: r.head,
        tail: r.tail,
        ..RingPlan::default()
    };
    if !plan.is_plausible() {
        return Err("has no possible size or place");
    }
    if r.events.len() as u64 != EVENT_BYTES * u64::from(plan.unread()) || r.polls.len() > plan.places() as usize {
        return Err("has other events than it says");
    }
    Ok(())
}

fn thread(t: &Thread) -> Result<(), String> {
    pending(&t.pending)
}

fn pending(infos: &[Vec<u8>]) -> Result<(), String> {
    for info in infos {
        let signal = info.first_chunk::<4>().map_or(0, |b| i32::from_le_bytes(*b));
        // Who queues one of the two again is stopped or killed by it.
        let can_wait = ![libc::SIGKILL, libc::SIGSTOP].contains(&signal);
        if info.len() != SIGINFO_BYTES || !(1..=SIGNALS).contains(&signal) || !can_wait {
            return Err(format!("pending signal {signal} of {} bytes", info.len()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vma(start: u64, end: u64, kind: VmaKind) -> Vma {
        Vma {
            start,
            end,
            prot: 3,
            kind,
            flags: Vec::new(),
            guards: Vec::new(),
            key: 0,
        }
    }

    #[test]
    fn ends_that_no_process_has_are_refused() {
        for status in [0, 0xff00, libc::SIGKILL, libc::SIGSEGV | 0x80, 64] {
            assert!(is_end(status), "{status:#x}");
        }
        for status in [
            libc::SIGSTOP,
            libc::SIGTSTP,
            libc::SIGCHLD,
            0x7f,
            0x137f,
            0xffff,
            65,
            0x1_0000,
            -1,
        ] {
            assert!(!is_end(status), "{status:#x}");
        }
    }

    #[test]
    fn mappings_that_no_process_has_are_refused() {
        let ok = |v: &Vma| mapping(v, 0x1000).is_ok();
        assert!(ok(&vma(0x1000, 0x3000, VmaKind::Heap)));
        assert!(ok(&vma(0xffff_ffff_ff60_0000, 0xffff_ffff_ff60_1000, VmaKind::Vsyscall)));
        for (start, end) in [
            (0x3000, 0x1000),
            (0x1000, 0x1000),
            (0x1001, 0x2000),
            (0x1000, 0x2001),
            (0, 0x2000),
            (0x1000, 1 << 47),
        ] {
            assert!(!ok(&vma(start, end, VmaKind::Heap)), "{start:#x}..{end:#x}");
        }
        let file = |offset| VmaKind::FilePrivate {
            path: "/x".into(),
            offset,
            identity: None,
        };
        assert!(ok(&vma(0x1000, 0x2000, file(0))));
        assert!(!ok(&vma(0x1000, 0x2000, file(u64::MAX - 0xfff))));
        assert!(!ok(&vma(0x1000, 0x2000, file(1 << 63))));
        assert!(!ok(&vma(0x1000, 0x2000, VmaKind::HugeTlb { page_bytes: 0 })));
        let guarded = |guards: &[(u64, u64)]| Vma {
            guards: guards.to_vec(),
            ..vma(0x2000, 0x9000, VmaKind::Heap)
        };
        assert!(ok(&guarded(&[(0x2000, 0x3000), (0x3000, 0x5000), (0x8000, 0x9000)])));
        for bad in [
            &[(0x1000, 0x3000)][..],
            &[(0x8000, 0xa000)],
            &[(0x3000, 0x3000)],
            &[(0x3001, 0x5000)],
            &[(0x3000, 0x4fff)],
            &[(0x4000, 0x6000), (0x5000, 0x7000)],
        ] {
            assert!(!ok(&guarded(bad)), "{bad:x?}");
        }
    }

    #[test]
    fn frames_that_lie_in_no_memory_are_refused() {
        let mut vmas = [
            vma(0x1000, 0x2000, VmaKind::Heap),
            vma(0x3000, 0x4000, VmaKind::Stack),
            vma(0x4000, 0x5000, VmaKind::Heap),
        ];
        vmas[2].prot = 1;
        for at in [0x1000, 0x1ff8, 0x3000, 0x3ff8] {
            assert_eq!(frames(&[(at, 0)], &vmas), Ok(()), "{at:#x}");
        }
        for at in [0, 0xff8, 0x1004, 0x2000, 0x2ff8, 0x4000, 0x5000, u64::MAX - 7] {
            assert!(frames(&[(0x1000, 0), (at, 0)], &vmas).is_err(), "{at:#x}");
        }
        assert!(frames(&vec![(0x1000, 0); MOST_FRAMES + 1], &vmas).is_err());
    }

    #[test]
    fn rings_that_no_process_has_are_refused() {
        let good = Ring {
            start: 0x1000,
            bytes: 0x1000,
            head: 126,
            tail: 1,
            events: vec![0; 64],
            polls: vec![0x5000],
        };
        let vmas = [vma(0x1000, 0x2000, VmaKind::Ring), vma(0x3000, 0x4000, VmaKind::Heap)];
        assert_eq!(ring(&good, &vmas), Ok(()));
        let bad = |change: &dyn Fn(&mut Ring)| {
            let mut r = good.clone();
            change(&mut r);
            ring(&r, &vmas).is_err()
        };
        assert!(bad(&|r| r.start = 0x3000));
        assert!(bad(&|r| r.bytes = 0x2000));
        assert!(bad(&|r| r.bytes = 0));
        assert!(bad(&|r| r.head = 127));
        assert!(bad(&|r| r.tail = u32::MAX));
        assert!(bad(&|r| r.events.truncate(63)));
        assert!(bad(&|r| r.polls = vec![0; 128]));
    }

    #[test]
    fn signals_that_nobody_can_have_are_refused() {
        let info = |signal: i32, bytes: usize| {
            let mut info = vec![0; bytes];
            let n = bytes.min(4);
            info[..n].copy_from_slice(&signal.to_le_bytes()[..n]);
            info
        };
        assert!(pending(&[info(1, 128), info(64, 128)]).is_ok());
        let unblockable = [info(libc::SIGKILL, 128), info(libc::SIGSTOP, 128)];
        let others = [info(0, 128), info(65, 128), info(-1, 128), info(10, 127), info(10, 2)];
        for bad in others.into_iter().chain(unblockable) {
            assert!(pending(&[bad]).is_err());
        }
    }
}
