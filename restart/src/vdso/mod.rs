//! Restart under a kernel with another vDSO, and of processes that were stopped while they read a clock: the restart
//! puts them into another time namespace. Pure.
//!
//! Programs keep the addresses of the vDSO's functions. So the old vDSO stays where it was, as ordinary memory of the
//! process, and the entries of its functions lead to those of this kernel's, which is put at a free place with its data
//! ([`bridge`]). What was interrupted inside the old code ends there, with old data ([`frozen`]): signal handlers may
//! return to any place of it. A thread whose registers point into it goes on in a second copy, whose entries are whole;
//! so does a handler that is known to return to where the jumps are.
//!
//! ```text
//! [stack] ... old vvar, old vDSO with jumps ... vvar and vDSO of this kernel ... second copy, where a thread needs one
//! ```

pub(crate) mod bridge;
pub(crate) mod elf;
pub(crate) mod frozen;

use crate::layout::{find_gap, Range, TASK_SIZE};
use crate::special::Special;
use belay_image::blobs::BlobReader;
use belay_image::model::{Job, Process, Thread, Vma, VmaKind};
use belay_image::ImageError;
use bridge::Bridge;
use std::collections::HashMap;

/// Largest vDSO or data that is believed, bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Where `rip` is among the 27 registers.
const RIP: usize = 16;
/// Room that is left for a heap to grow, bytes.
const HEAP_ROOM: u64 = 64 << 30;
/// And for a stack without a limit.
const STACK_ROOM: u64 = 1 << 30;
const RLIMIT_STACK: usize = 3;

/// The old vDSO, and how to get from it to this kernel's.
#[derive(Debug)]
pub(crate) struct Foreign {
    /// Release of the kernel of the checkpoint.
    kernel: String,
    code: Vec<u8>,
    /// Its data, frozen.
    data: Vec<u8>,
    bridge: Bridge,
    /// Only processes that were stopped in it need it: this kernel has the same.
    interrupted: bool,
}

/// Where things go in one address space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// Where the lowest of this kernel's mappings goes.
    pub(crate) new: u64,
    /// What must be added to an address in the old mappings to get to the second copy; 0 where there is none.
    pub(crate) copy: u64,
    /// Return addresses in frames of signal handlers that led to where the jumps are now: (address of the return
    /// address, return address).
    pub(crate) returns: Vec<(u64, u64)>,
}

/// Whether any process of `job` must keep its vDSO: each that has one, or where this kernel has the `same`, those that
/// were stopped in it.
fn is_needed(job: &Job, same: bool) -> bool {
    let all = &job.processes;
    all.iter().any(|p| vdso(p).is_some() && (!same || was_reading(all, p)))
}

/// Whether somebody who has the memory of `owner` was stopped in the vDSO, or in a signal handler that will return to
/// there: of what is read, a part may be of one time namespace and a part of another then. Of those with clocks of
/// their own the checkpoint does not have the data.
fn was_reading(processes: &[Process], owner: &Process) -> bool {
    let Some(code) = vdso(owner) else { return false };
    let inside = |t: &Thread| rip(t).is_some_and(|rip| (code.start..code.end).contains(&rip));
    users(processes, owner.pid).any(|p| !p.own_clocks && (!p.vdso_frames.is_empty() || p.threads.iter().any(inside)))
}

fn vdso(p: &Process) -> Option<&Vma> {
    olds(&p.vmas).find(|v| matches!(&v.kind, VmaKind::Vdso(n) if n == "vdso"))
}

/// The mappings that the old kernel gave.
pub(crate) fn olds(vmas: &[Vma]) -> impl Iterator<Item = &Vma> {
    vmas.iter().filter(|v| matches!(v.kind, VmaKind::Vdso(_)))
}

impl Foreign {
    /// What `job` needs under a kernel whose vDSO is `own`; `None` where that is the one it had and nobody was stopped
    /// in it. `Err` says by name what cannot be. Damage is found on every host, not first on the one where the old vDSO
    /// is needed.
    pub(crate) fn of(job: &Job, blobs: &BlobReader, own: &[u8]) -> Result<Option<Self>, Refused> {
        let same = job.vdso_xxh3 == belay_image::checksum(own);
        if !is_needed(job, same) || same && job.kernel_pages.is_none() {
            for stored in job.kernel_pages.iter().flat_map(|pages| [&pages.code, &pages.data]) {
                blobs.get(stored)?;
            }
            return Ok(None);
        }
        let refused = |why: &str| Refused::Kernel {
            kernel: job.kernel.clone(),
            host: job.host.clone(),
            why: why.to_owned(),
        };
        let pages = job
            .kernel_pages
            .ok_or_else(|| refused("the checkpoint does not hold the vDSO"))?;
        if pages.code.bytes > MOST_BYTES || pages.data.bytes > MOST_BYTES {
            return Err(refused("the vDSO in the checkpoint is too large"));
        }
        let code = blobs.get(&pages.code)?;
        let mut data = blobs.get(&pages.data)?;
        let clocks = frozen::freeze(&mut data);
        let bridge = match Bridge::new(&code, own, same) {
            Ok(bridge) => bridge,
            Err(why) if same => {
                tracing::warn!(why, "clocks that were being read at the checkpoint may go back");
                return Ok(None);
            }
            Err(why) => return Err(refused(&why)),
        };
        tracing::info!(
            kernel = job.kernel,
            clocks,
            same,
            "vDSO of the checkpoint: its functions will lead to those of this kernel"
        );
        Ok(Some(Self {
            kernel: job.kernel.clone(),
            code,
            data,
            bridge,
            interrupted: same,
        }))
    }

    /// Finds places in the address space of each process that must keep the old vDSO, by PID. Threads that stand in it
    /// are sent to the second copy.
    pub(crate) fn place(&self, processes: &mut [Process], specials: &[Special]) -> Result<HashMap<i32, Place>, String> {
        let new = span(specials.iter().map(|s| s.range.clone()));
        let mut out = HashMap::new();
        for i in 0..processes.len() {
            let p = &processes[i];
            let Some(code) = vdso(p).map(|v| v.start..v.end) else {
                continue;
            };
            if self.interrupted && !(was_reading(processes, p) && self.is_whole_in(p)) {
                continue;
            }
            let mut taken = reserved(p);
            let none = || format!("process {} ({}): no free address range for this kernel's vDSO", p.pid, p.comm);
            let at = find_gap(&taken, new.end - new.start).ok_or_else(none)?;
            taken.push(at..at + (new.end - new.start));
            let old = span(olds(&p.vmas).map(|v| v.start..v.end));
            let copy = find_gap(&taken, old.end - old.start)
                .ok_or_else(none)?
                .wrapping_sub(old.start);
            let pid = p.pid;
            let frames = users(processes, pid).flat_map(|p| &p.vdso_frames);
            let lost = frames.filter(|(_, rip)| self.bridge.covers(rip.wrapping_sub(code.start)));
            let returns: Vec<_> = lost.map(|(at, rip)| (*at, rip.wrapping_add(copy))).collect();
            let mut threads = tasks(processes, pid)
                .filter(|t| rip(t).is_some_and(|rip| code.contains(&rip)))
                .peekable();
            let copied = threads.peek().is_some() || !returns.is_empty();
            threads.for_each(|t| t.regs[RIP] = t.regs[RIP].wrapping_add(copy));
            let copy = if copied { copy } else { 0 };
            out.insert(pid, Place { new: at, copy, returns });
        }
        Ok(out)
    }

    /// Whether `p` has all of the old mappings. Under the same kernel a process that has parts of them only goes on as
    /// if nobody had been stopped there.
    fn is_whole_in(&self, p: &Process) -> bool {
        let length = |v: &Vma| usize::try_from(v.end - v.start).unwrap_or(usize::MAX);
        olds(&p.vmas).all(|v| match &v.kind {
            VmaKind::Vdso(name) if name == "vdso" => length(v) == self.code.len(),
            VmaKind::Vdso(name) if name == "vvar" => length(v) == self.data.len(),
            _ => true,
        })
    }

    /// The bytes of `vma`, one of the old mappings: with the entries leading to the new vDSO at `new`, or in the second
    /// copy, where that is `None`, whole.
    pub(crate) fn bytes(&self, name: &str, vma: &Range, new: Option<u64>) -> Result<Vec<u8>, String> {
        let length = usize::try_from(vma.end - vma.start).unwrap_or(usize::MAX);
        match name {
            "vdso" if length != self.code.len() => Err("the process had a part of it only".into()),
            "vvar" if length != self.data.len() => Err("the process had a part of it only".into()),
            "vdso" => {
                let mut code = self.code.clone();
                new.map_or(Ok(()), |new| self.bridge.write(&mut code, vma.start, new))?;
                Ok(code)
            }
            "vvar" => Ok(self.data.clone()),
            // Data of hypervisors' clocks, which say so that they are not to be used.
            _ => Ok(Vec::new()),
        }
    }

    /// What a mapping of the old kernel is called where it is memory.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{name} of {}", self.kernel)
    }
}

/// Why a job cannot go on under this kernel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("the checkpoint was taken on kernel {kernel} of {host}, whose vDSO differs from this kernel's, and {why}: restart on that kernel")]
    Kernel { kernel: String, host: String, why: String },
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// The processes that have the memory of process `pid`.
fn users(processes: &[Process], pid: i32) -> impl Iterator<Item = &Process> {
    processes.iter().filter(move |p| has_memory(p, pid))
}

/// The threads that have the memory of process `pid`.
fn tasks(processes: &mut [Process], pid: i32) -> impl Iterator<Item = &mut Thread> {
    let of = processes.iter_mut().filter(move |p| has_memory(p, pid));
    of.flat_map(|p| &mut p.threads)
}

fn has_memory(p: &Process, pid: i32) -> bool {
    p.pid == pid || p.shares_mm_with == pid
}

fn rip(t: &Thread) -> Option<u64> {
    t.regs.get(RIP).copied()
}

/// From the lowest to the highest address of `ranges`.
pub(crate) fn span(ranges: impl Iterator<Item = Range>) -> Range {
    ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// What must stay free of other things: mappings, and where heap and stacks will grow.
fn reserved(p: &Process) -> Vec<Range> {
    let limit = p
        .rlimits
        .get(RLIMIT_STACK)
        .map_or(0, |(soft, _)| *soft)
        .clamp(16 << 20, STACK_ROOM);
    let range = |v: &Vma| match v.kind {
        VmaKind::Heap => v.start..v.end.saturating_add(HEAP_ROOM).min(TASK_SIZE),
        VmaKind::Stack => v.end.saturating_sub(limit).min(v.start)..v.end,
        _ if v.flags.iter().any(|f| f == "gd") => v.start.saturating_sub(limit)..v.end,
        _ => v.start..v.end,
    };
    let brk = p.mm.start_brk.min(TASK_SIZE)..p.mm.brk.saturating_add(HEAP_ROOM).min(TASK_SIZE);
    p.vmas
        .iter()
        .filter(|v| v.kind != VmaKind::Vsyscall)
        .map(range)
        .chain([brk])
        .collect()
}

#[cfg(test)]
mod tests;
