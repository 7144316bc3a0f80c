//! Running code inside a stopped process: single system calls, and the operations of `belay-inject`.

mod area;
pub(crate) mod frame;
pub(crate) mod injected;
pub(crate) mod inside;
pub(crate) mod memory;
mod operations;
pub(crate) mod rescue;
mod turns;

use crate::stop::stopped::{Gate, Process, Task};
use crate::CaptureError;
pub(crate) use area::{Area, Facts};
use belay_kernel::ptrace::{self, Event, Regs};
pub(crate) use operations::{collect_processes, collect_threads, locked, policies, snapshot, Kept, Made};
pub(crate) use turns::{notification, rings};

/// Flags that the program may have set and that code of ours must not find: single steps (TF), string instructions that
/// run backwards (DF), and traps for unaligned addresses (AC).
const FLAGS_OF_OTHERS: u64 = 1 << 8 | 1 << 10 | 1 << 18;

/// The registers of `task` for code of ours.
fn borrowed(task: &Task) -> Regs {
    let mut regs = task.regs;
    regs.eflags &= !FLAGS_OF_OTHERS;
    regs
}

/// Lets `task` issue one system call.
pub(crate) fn remote_syscall(gate: &Gate, task: &mut Task, nr: i64, args: [u64; 6]) -> Result<u64, CaptureError> {
    begin_syscall(gate, task, nr, args)?;
    enter_syscall(task)?;
    end_syscall(task, nr)
}

/// Sends `task` to a system call.
fn begin_syscall(gate: &Gate, task: &mut Task, nr: i64, args: [u64; 6]) -> Result<(), CaptureError> {
    let fail = |step: &str, e: std::io::Error| CaptureError::system(format!("{step} of thread {}", task.tid), e);
    let mut regs = borrowed(task);
    regs.rip = gate.syscall_at;
    regs.rsp = gate.stack.unwrap_or(regs.rsp);
    regs.rax = nr.cast_unsigned();
    regs.orig_rax = u64::MAX;
    [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = args;
    ptrace::set_regs(task.tid, &regs).map_err(|e| fail("set registers", e))?;
    ptrace::set_sigmask(task.tid, u64::MAX).map_err(|e| fail("set signal mask", e))?;
    task.borrowed = true;
    continue_to_syscall(task)
}

/// Waits until it is there, and lets it do it.
fn enter_syscall(task: &mut Task) -> Result<(), CaptureError> {
    task.wait_for(Event::Syscall)?;
    continue_to_syscall(task)
}

/// Waits until it has done it; what the kernel has answered.
fn end_syscall(task: &mut Task, nr: i64) -> Result<u64, CaptureError> {
    task.wait_for(Event::Syscall)?;
    let ret = ptrace::get_regs(task.tid)
        .map_err(|e| CaptureError::system(format!("read registers of thread {}", task.tid), e))?
        .rax;
    match ret.cast_signed() {
        e @ -4095..=-1 => Err(CaptureError::Call {
            tid: task.tid,
            nr,
            errno: i32::try_from(-e).unwrap_or(libc::EIO),
        }),
        _ => Ok(ret),
    }
}

fn continue_to_syscall(task: &Task) -> Result<(), CaptureError> {
    ptrace::cont_to_syscall(task.tid).map_err(|e| CaptureError::system(format!("continue thread {}", task.tid), e))
}

/// Lets the main thread of `process` issue one system call.
pub(crate) fn on_main(process: &mut Process, nr: i64, args: [u64; 6]) -> Result<u64, CaptureError> {
    let (gate, task) = issuer(process)?;
    remote_syscall(gate, task, nr, args)
}

/// Lets the main threads of `processes` issue system call `nr` each, with the arguments that `args` says of it, or none.
/// They do it beside each other: to wake up takes each of them longer than the call. What began has ended when this
/// returns, whatever has failed.
pub(crate) fn on_mains<'a>(
    processes: impl Iterator<Item = &'a mut Process>,
    nr: i64,
    mut args: impl FnMut(&mut Process) -> Option<[u64; 6]>,
) -> Vec<Option<Result<u64, CaptureError>>> {
    let mut begun: Vec<_> = processes
        .map(|process| {
            let done = args(process).map(|args| {
                let (gate, task) = issuer(process)?;
                begin_syscall(gate, task, nr, args)
            });
            (process, done)
        })
        .collect();
    for (process, done) in &mut begun {
        if let Some(Ok(())) = done {
            *done = Some(issuer(process).and_then(|(_, task)| enter_syscall(task)));
        }
    }
    let end = |(process, done): (&mut Process, Option<Result<(), CaptureError>>)| {
        done.map(|done| done.and_then(|()| issuer(process).and_then(|(_, task)| end_syscall(task, nr))))
    };
    begun.into_iter().map(end).collect()
}

/// The main thread of `process`, and where it issues system calls.
fn issuer(process: &mut Process) -> Result<(&Gate, &mut Task), CaptureError> {
    match (process.gate.as_ref(), process.tasks.first_mut()) {
        (Some(gate), Some(task)) => Ok((gate, task)),
        _ => Err(CaptureError::refuse(
            process.pid,
            "process",
            "it cannot issue system calls for the agent",
        )),
    }
}
