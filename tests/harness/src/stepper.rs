//! Stops an agent at chosen system calls of a checkpoint, so that every boundary between two of its steps can be
//! visited one after the other.
//!
//! The agent's main thread, which takes the checkpoint, is traced from one system call to the next. What it does to the
//! processes of the job, it does by a few calls; only those are counted, so that no number is spent on steps between
//! which nothing changes.
//!
//! An agent that logs at level `debug` names each phase as it begins: that is a step too, and all that follow know their phase.

use crate::Failure;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A stop at the entry of a counted call.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Its number, from 1.
    pub number: u64,
    /// The call, for messages.
    pub name: &'static str,
    /// The phase that the agent has announced last.
    pub phase: Option<&'static str>,
    /// A process of its own that the agent has made, and that stands at the call it was to be held at, until this step is decided.
    pub helper: Option<i32>,
}

/// The phases that every checkpoint has, in their order.
pub const PHASES: [&str; 7] = ["suspend", "capture", "drain", "snapshot", "resume", "write", "commit"];
/// Those that it has besides where libraries take part.
pub const OF_GATES: [&str; 2] = ["gate", "reopen"];

/// What to do at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Go to the next one.
    On,
    /// Let the agent go for good: the checkpoint ends as it does without a tracer.
    Leave,
    /// Kill the agent; the call is not carried out.
    Kill,
}

/// A request of ptrace.
pub(crate) fn request(request: libc::c_uint, tid: i32, addr: usize, data: usize) -> io::Result<()> {
    // SAFETY: callers pass numbers, or the address and size of a live object.
    let r = unsafe { libc::ptrace(request, tid, addr, data) };
    if r == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Why a thread is stopped at a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum At {
    /// It enters the one with this number and these arguments.
    Entry(i64, [u64; 6]),
    /// It leaves one, with this result.
    Exit(i64),
}

/// Where `tid` is stopped.
pub(crate) fn stopped_at(tid: i32) -> io::Result<Option<At>> {
    const PTRACE_GET_SYSCALL_INFO: libc::c_uint = 0x420e;
    // `struct ptrace_syscall_info`: op, arch, instruction and stack pointer, then number and six arguments, or the result.
    let mut info = [0u64; 11];
    request(PTRACE_GET_SYSCALL_INFO, tid, size_of_val(&info), info.as_mut_ptr() as usize)?;
    let [op, _, _, first, arguments @ ..] = info;
    Ok(match op & 0xff {
        1 => Some(At::Entry(
            first.cast_signed(),
            std::array::from_fn(|n| arguments.get(n).copied().unwrap_or_default()),
        )),
        2 => Some(At::Exit(first.cast_signed())),
        _ => None,
    })
}

/// At most `length` bytes of the memory of `tid`, from `at` on.
pub(crate) fn memory(tid: i32, at: u64, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0u8; length];
    let iov = |base: *mut u8| libc::iovec {
        iov_base: base.cast(),
        iov_len: length,
    };
    let (to, from) = (iov(bytes.as_mut_ptr()), iov(at as *mut u8));
    // SAFETY: `bytes` is writable for as many bytes as both vectors say; the other process's memory is only read.
    let read = unsafe { libc::process_vm_readv(tid, &raw const to, 1, &raw const from, 1, 0) };
    bytes.truncate(usize::try_from(read).ok()?);
    Some(bytes)
}

/// The phase that a line of the log announces which `tid` is about to write.
fn announced(tid: i32, [_, at, length, ..]: [u64; 6]) -> Option<&'static str> {
    const LONGEST: usize = 1024;
    let line = memory(tid, at, LONGEST.min(length as usize))?;
    let text = std::str::from_utf8(&line).ok()?;
    if !text.contains("\"message\":\"phase\"") {
        return None;
    }
    let (_, rest) = text.rsplit_once("\"phase\":\"")?;
    PHASES.into_iter().chain(OF_GATES).find(|p| rest.starts_with(p))
}

/// The call's name when it changes something about the processes of the job, or waits for such a change.
fn counted(number: i64, first: u64) -> Option<&'static str> {
    const GETREGSET: u64 = libc::PTRACE_GETREGSET as u64;
    match number {
        libc::SYS_ptrace => match first {
            0x4206 => Some("seize"),
            0x4207 => Some("interrupt"),
            0x4205 => Some("set registers"),
            0x420b => Some("set mask"),
            24 => Some("continue to a call"),
            7 => Some("continue"),
            17 => Some("detach"),
            GETREGSET => None,
            _ => None,
        },
        libc::SYS_wait4 | libc::SYS_waitid => Some("wait"),
        libc::SYS_pwrite64 | libc::SYS_process_vm_writev => Some("write memory"),
        libc::SYS_kill | libc::SYS_tgkill | libc::SYS_pidfd_send_signal => Some("kill"),
        libc::SYS_memfd_create => Some("make memory"),
        libc::SYS_rename => Some("rename"),
        _ => None,
    }
}

/// Which calls are steps, by number and second argument, and what they are called.
type Counted = fn(i64, u64) -> Option<&'static str>;

/// Traces `agent` while `command` runs on another thread; `at_step` decides at each counted call. Returns the number of
/// steps seen and what `command` returned.
pub fn step<T: Send>(
    agent: i32,
    command: impl FnOnce() -> T + Send,
    at_step: impl FnMut(Step) -> Verdict,
) -> Result<(u64, T), Failure> {
    trace(agent, (counted, None), command, at_step)
}

/// The same; a process that the agent forks is held where it first enters the call `hold_at`, until the agent's next
/// step is decided.
pub fn step_holding<T: Send>(
    agent: i32,
    hold_at: i64,
    command: impl FnOnce() -> T + Send,
    at_step: impl FnMut(Step) -> Verdict,
) -> Result<(u64, T), Failure> {
    trace(agent, (counted, Some(hold_at)), command, at_step)
}

/// The same at each call of whatever kind.
pub fn step_each<T: Send>(
    agent: i32,
    command: impl FnOnce() -> T + Send,
    at_step: impl FnMut(Step) -> Verdict,
) -> Result<(u64, T), Failure> {
    trace(agent, (|n, first| counted(n, first).or(Some("call")), None), command, at_step)
}

fn trace<T: Send>(
    agent: i32,
    (counted, hold_at): (Counted, Option<i64>),
    command: impl FnOnce() -> T + Send,
    mut at_step: impl FnMut(Step) -> Verdict,
) -> Result<(u64, T), Failure> {
    let fail = |what: &str, e: io::Error| format!("{what} the agent {agent}: {e}");
    let forks = hold_at.map_or(0, |_| libc::PTRACE_O_TRACEFORK);
    request(libc::PTRACE_SEIZE, agent, 0, (libc::PTRACE_O_TRACESYSGOOD | forks) as usize).map_err(|e| fail("trace", e))?;
    request(libc::PTRACE_INTERRUPT, agent, 0, 0).map_err(|e| fail("stop", e))?;
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let running = s.spawn(|| {
            let r = command();
            done.store(true, Ordering::Release);
            r
        });
        let steps = follow(agent, &done, (counted, hold_at), &mut at_step).map_err(|e| fail("trace", e));
        let r = running.join().map_err(|_| "the command's thread failed".to_string())?;
        Ok((steps?, r))
    })
}

/// Takes the process that `agent` has just forked to where it first enters the call `hold_at`. None when it ends before.
fn hold(agent: i32, hold_at: i64) -> io::Result<Option<i32>> {
    let mut made: libc::c_ulong = 0;
    request(libc::PTRACE_GETEVENTMSG, agent, 0, &raw mut made as usize)?;
    let helper = i32::try_from(made).map_err(io::Error::other)?;
    loop {
        let mut status = 0;
        // SAFETY: `status` is a live int.
        if unsafe { libc::waitpid(helper, &mut status, libc::__WALL) } == -1 {
            return Err(io::Error::last_os_error());
        }
        if !libc::WIFSTOPPED(status) {
            return Ok(None);
        }
        let at_call = libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80;
        if at_call && matches!(stopped_at(helper)?, Some(At::Entry(number, _)) if number == hold_at) {
            return Ok(Some(helper));
        }
        request(libc::PTRACE_SYSCALL, helper, 0, 0)?;
    }
}

fn follow(
    agent: i32,
    done: &AtomicBool,
    (counted, hold_at): (Counted, Option<i64>),
    at_step: &mut dyn FnMut(Step) -> Verdict,
) -> io::Result<u64> {
    let mut steps = 0;
    let mut helper = None;
    let mut phase = None;
    let mut leaving = None;
    loop {
        let mut status = 0;
        // SAFETY: `status` is a live int.
        let r = unsafe { libc::waitpid(agent, &mut status, libc::__WALL | libc::WNOHANG) };
        match r {
            -1 => return Err(io::Error::last_os_error()),
            0 => {
                if done.load(Ordering::Acquire) && leaving.is_none() {
                    leaving = Some(Instant::now());
                    request(libc::PTRACE_INTERRUPT, agent, 0, 0)?;
                }
                if leaving.is_some_and(|t| t.elapsed() > Duration::from_secs(10)) {
                    return Err(io::Error::other("it does not stop"));
                }
                std::thread::sleep(Duration::from_micros(20));
                continue;
            }
            _ => {}
        }
        if !libc::WIFSTOPPED(status) {
            return Ok(steps);
        }
        let signal = libc::WSTOPSIG(status);
        let mut deliver = 0;
        if signal == libc::SIGTRAP | 0x80 {
            if let Some(At::Entry(number, arguments)) = stopped_at(agent)? {
                let begins = (number == libc::SYS_write).then(|| announced(agent, arguments)).flatten();
                phase = begins.or(phase);
                if let Some(name) = begins.map(|_| "begin a phase").or_else(|| counted(number, arguments[0])) {
                    steps += 1;
                    let verdict = at_step(Step {
                        number: steps,
                        name,
                        phase,
                        helper,
                    });
                    if verdict == Verdict::Kill {
                        crate::procs::signal(agent, libc::SIGKILL);
                    }
                    if let Some(helper) = helper.take() {
                        request(libc::PTRACE_DETACH, helper, 0, 0)?;
                    }
                    match verdict {
                        Verdict::On => {}
                        Verdict::Leave => {
                            request(libc::PTRACE_DETACH, agent, 0, 0)?;
                            return Ok(steps);
                        }
                        Verdict::Kill => continue,
                    }
                }
            }
        } else if let (libc::PTRACE_EVENT_FORK, Some(at)) = (status >> 16, hold_at) {
            helper = hold(agent, at)?;
        } else if status >> 16 == 0 {
            deliver = signal;
        }
        if leaving.is_some() {
            request(libc::PTRACE_DETACH, agent, 0, deliver as usize)?;
            return Ok(steps);
        }
        request(libc::PTRACE_SYSCALL, agent, 0, deliver as usize)?;
    }
}
