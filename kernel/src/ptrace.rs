//! `ptrace(2)` with PTRACE_SEIZE: stop a task, read and write its registers, let it go on.
//!
//! All requests must come from the thread that seized the task.

use crate::proc;
use std::io;
use std::time::{Duration, Instant};

/// How long is waited with the processor in hand, and then between two looks.
const SOON: Duration = Duration::from_micros(200);

/// `struct user_regs_struct` of x86-64.
pub type Regs = libc::user_regs_struct;

const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SETSIGMASK: libc::c_uint = 0x420b;
const PTRACE_PEEKSIGINFO: libc::c_uint = 0x4209;
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4211;
const PEEKSIGINFO_SHARED: u32 = 1;
/// Words in the list that [`regs_to_words`] makes.
pub const REG_WORDS: usize = 27;
const NT_PRSTATUS: usize = 1;
const NT_386_IOPERM: usize = 0x201;
const NT_X86_XSTATE: usize = 0x202;
/// Largest XSAVE area accepted (AMX included).
const MAX_XSTATE: usize = 16 * 1024;

/// Size of the kernel's `siginfo_t`.
pub const SIGINFO_BYTES: usize = 128;

fn request(req: libc::c_uint, tid: i32, addr: usize, data: usize) -> io::Result<libc::c_long> {
    // SAFETY: the callers in this module pass addresses of live objects of the size that the request expects, or plain numbers.
    crate::check(unsafe { libc::syscall(libc::SYS_ptrace, req as libc::c_long, libc::c_long::from(tid), addr, data) })
}

/// Seizes a task without stopping it. `options` are PTRACE_O_* bits.
pub fn seize(tid: i32, options: i32) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, tid, 0, options as usize).map(drop)
}

/// Asks a seized task to stop; the stop is reported by [`wait`].
pub fn interrupt(tid: i32) -> io::Result<()> {
    request(libc::PTRACE_INTERRUPT, tid, 0, 0).map(drop)
}

/// Detaches from a stopped task, delivering `signal` unless 0.
pub fn detach(tid: i32, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_DETACH, tid, 0, signal as usize).map(drop)
}

/// Sends a signal to thread `tid`, for which it waits until the thread goes on.
pub fn send(tid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes numbers only.
    match unsafe { libc::syscall(libc::SYS_tkill, tid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Continues a stopped task, delivering `signal` unless 0.
pub fn cont(tid: i32, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_CONT, tid, 0, signal as usize).map(drop)
}

/// Whether the kernel sends the signal for what an instruction does. (SIGTRAP and SIGSYS, which it also does, follow the
/// instruction.)
pub fn is_for_instruction(signal: i32) -> bool {
    matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE)
}

/// Continues a stopped task, and waits for the stop to which it comes before it executes an instruction. When it goes on from
/// there the kernel looks at the call that it is to begin anew, which it does not at the end of a call that it has issued for us.
pub fn leave_call(tid: i32) -> io::Result<Event> {
    interrupt(tid)?;
    cont(tid, 0)?;
    next(tid)
}

/// Continues a stopped task until the next entry to or exit from a system call.
pub fn cont_to_syscall(tid: i32) -> io::Result<()> {
    request(libc::PTRACE_SYSCALL, tid, 0, 0).map(drop)
}

/// What `waitpid` says about a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Stopped by [`interrupt`], or at attach.
    Interrupted,
    /// In a group stop (job control) with this signal.
    GroupStop(i32),
    /// About to receive this signal.
    Signal(i32),
    /// At a system call entry or exit (needs PTRACE_O_TRACESYSGOOD).
    Syscall,
    /// Another ptrace event.
    Other(i32),
    /// Ended; the wait status.
    Ended(i32),
}

/// Interprets a wait status of a seized task.
pub fn event(status: i32) -> Event {
    if !libc::WIFSTOPPED(status) {
        return Event::Ended(status);
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Event::Interrupted,
        libc::PTRACE_EVENT_STOP => Event::GroupStop(signal),
        0 if signal == libc::SIGTRAP | 0x80 => Event::Syscall,
        0 => Event::Signal(signal),
        other => Event::Other(other),
    }
}

/// Waits until task `tid` stops or ends. The kernel tells of no main thread that was killed before it has told of all other
/// threads of its process, which the caller may come to later: that is ESRCH.
pub fn next(tid: i32) -> io::Result<Event> {
    let begin = Instant::now();
    loop {
        if let Some(event) = wait(tid, false)? {
            return Ok(event);
        }
        if begin.elapsed() < SOON {
            std::thread::yield_now();
            continue;
        }
        if proc::stat(tid).map_or(true, |s| matches!(s.state, 'Z' | 'X')) {
            return wait(tid, false)?.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH));
        }
        std::thread::sleep(SOON);
    }
}

/// Waits for task `tid`; with `block` unset returns `None` when nothing has happened.
pub fn wait(tid: i32, block: bool) -> io::Result<Option<Event>> {
    let mut status = 0;
    let flags = libc::__WALL | if block { 0 } else { libc::WNOHANG };
    loop {
        // SAFETY: `status` is a live int.
        let r = unsafe { libc::waitpid(tid, &mut status, flags) };
        match r {
            0 => return Ok(None),
            -1 => {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
            _ => return Ok(Some(event(status))),
        }
    }
}

/// What `waitid` says about `tid` at once; it stays to be said.
fn look(tid: i32, what: i32) -> io::Result<libc::siginfo_t> {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = what | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: `info` is live.
    crate::check(unsafe { libc::waitid(libc::P_PID, tid.cast_unsigned(), &mut info, flags) }.into())?;
    Ok(info)
}

/// Whether process `pid`, whose stop has been waited for, has been continued after a stop of job control, and its
/// parent has not been told so.
pub fn was_continued(pid: i32) -> bool {
    look(pid, libc::WCONTINUED).is_ok_and(|info| info.si_code == libc::CLD_CONTINUED)
}

/// What [`wait`] for `tid` would say at once; it stays to be said.
pub fn peek(tid: i32) -> io::Result<Option<Event>> {
    let info = look(tid, libc::WEXITED | libc::WSTOPPED)?;
    // SAFETY: these fields are what `waitid` has filled in, or zero.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok((pid != 0).then(|| match info.si_code {
        // `waitpid` puts the number of a stop above 0x7f, and that of an exit above zero.
        libc::CLD_TRAPPED | libc::CLD_STOPPED => event(status << 8 | 0x7f),
        libc::CLD_EXITED => Event::Ended(status << 8),
        libc::CLD_DUMPED => Event::Ended(status | 0x80),
        _ => Event::Ended(status),
    }))
}

/// Whether [`wait`] for `tid` would return at once. A task that cannot be waited for counts too.
pub fn has_changed(tid: i32) -> bool {
    !matches!(peek(tid), Ok(None))
}

/// Writes `code`, whole words, at `addr` of a stopped task, also where it may not write itself.
pub fn write_code(tid: i32, addr: u64, code: &[u8]) -> io::Result<()> {
    for (at, word) in (addr as usize..).step_by(8).zip(code.chunks_exact(8)) {
        let word = usize::from_le_bytes(word.try_into().map_err(io::Error::other)?);
        request(libc::PTRACE_POKETEXT, tid, at, word)?;
    }
    Ok(())
}

/// Registers that are all 0.
pub fn no_regs() -> Regs {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    unsafe { std::mem::zeroed() }
}

/// Reads the general registers.
pub fn get_regs(tid: i32) -> io::Result<Regs> {
    let mut regs = no_regs();
    let mut iov = libc::iovec {
        iov_base: (&raw mut regs).cast(),
        iov_len: size_of::<Regs>(),
    };
    request(libc::PTRACE_GETREGSET, tid, NT_PRSTATUS, (&raw mut iov) as usize)?;
    if iov.iov_len == size_of::<Regs>() {
        Ok(regs)
    } else {
        Err(io::Error::other("a 32-bit task"))
    }
}

/// Writes the general registers.
pub fn set_regs(tid: i32, regs: &Regs) -> io::Result<()> {
    let iov = libc::iovec {
        iov_base: (&raw const *regs).cast_mut().cast(),
        iov_len: size_of::<Regs>(),
    };
    request(libc::PTRACE_SETREGSET, tid, NT_PRSTATUS, (&raw const iov) as usize).map(drop)
}

/// Reads the extended state (XSAVE area).
pub fn get_xstate(tid: i32) -> io::Result<Vec<u8>> {
    let mut buf = [0u8; MAX_XSTATE];
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    request(libc::PTRACE_GETREGSET, tid, NT_X86_XSTATE, (&raw mut iov) as usize)?;
    Ok(buf[..iov.iov_len.min(MAX_XSTATE)].to_vec())
}

/// Writes the extended state.
pub fn set_xstate(tid: i32, xstate: &[u8]) -> io::Result<()> {
    let iov = libc::iovec {
        iov_base: xstate.as_ptr().cast_mut().cast(),
        iov_len: xstate.len(),
    };
    request(libc::PTRACE_SETREGSET, tid, NT_X86_XSTATE, (&raw const iov) as usize).map(drop)
}

/// Whether the task may use some I/O ports (`ioperm`).
pub fn has_ports(tid: i32) -> io::Result<bool> {
    let mut map = [0u64; 1];
    let mut iov = libc::iovec {
        iov_base: map.as_mut_ptr().cast(),
        iov_len: size_of_val(&map),
    };
    match request(libc::PTRACE_GETREGSET, tid, NT_386_IOPERM, (&raw mut iov) as usize) {
        // It has no such map; the kernel knows none.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENXIO | libc::EINVAL | libc::ENODEV)) => Ok(false),
        asked => asked.map(|_| true),
    }
}

/// Reads the mask of blocked signals.
pub fn get_sigmask(tid: i32) -> io::Result<u64> {
    let mut mask = 0u64;
    request(PTRACE_GETSIGMASK, tid, 8, (&raw mut mask) as usize)?;
    Ok(mask)
}

/// Sets the mask of blocked signals.
pub fn set_sigmask(tid: i32, mask: u64) -> io::Result<()> {
    request(PTRACE_SETSIGMASK, tid, 8, (&raw const mask) as usize).map(drop)
}

/// Most pending signals that [`pending`] reads: the kernel goes through all before it for each one, and 90,000 of them,
/// as many as a process may have, take a minute.
pub const MOST_PENDING: usize = 16_384;

/// Reads the `siginfo_t` of every signal pending for the task, or for its process when `shared`. Fails with E2BIG where
/// they are more than [`MOST_PENDING`].
pub fn pending(tid: i32, shared: bool) -> io::Result<Vec<Vec<u8>>> {
    #[repr(C)]
    struct Args {
        off: u64,
        flags: u32,
        nr: i32,
    }
    let mut out = Vec::new();
    loop {
        let mut raw = [[0u8; SIGINFO_BYTES]; 16];
        let args = Args {
            off: out.len() as u64,
            flags: if shared { PEEKSIGINFO_SHARED } else { 0 },
            nr: 16,
        };
        let n = request(PTRACE_PEEKSIGINFO, tid, (&raw const args) as usize, raw.as_mut_ptr() as usize)?;
        let n = usize::try_from(n).unwrap_or(0).min(raw.len());
        out.extend(raw[..n].iter().map(|s| s.to_vec()));
        // Fewer than asked for are no end: the kernel tells of one, then looks whether a signal has arrived at this
        // thread.
        if n == 0 {
            return Ok(out);
        }
        if out.len() > MOST_PENDING {
            return Err(io::Error::from_raw_os_error(libc::E2BIG));
        }
    }
}

/// Registration of restartable sequences: (address, length, signature); address 0 when not registered.
pub fn rseq(tid: i32) -> io::Result<(u64, u32, u32)> {
    #[repr(C)]
    #[derive(Default)]
    struct Configuration {
        pointer: u64,
        size: u32,
        signature: u32,
        flags: u32,
        pad: u32,
    }
    let mut c = Configuration::default();
    request(
        PTRACE_GET_RSEQ_CONFIGURATION,
        tid,
        size_of::<Configuration>(),
        (&raw mut c) as usize,
    )?;
    Ok((c.pointer, c.size, c.signature))
}

/// Whether system calls of the task may be handed to the program itself (PR_SET_SYSCALL_USER_DISPATCH). Linux before
/// 6.4 does not tell: `false` there.
pub fn dispatches_syscalls(tid: i32) -> io::Result<bool> {
    // Mode, selector, offset and length of what is excepted; mode 0 is off.
    let mut config = [0u64; 4];
    let asked = request(
        PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG,
        tid,
        size_of_val(&config),
        (&raw mut config) as usize,
    );
    match asked {
        Err(e) if e.raw_os_error() == Some(libc::EIO) => Ok(false),
        asked => asked.map(|_| config[0] != 0),
    }
}

/// The general registers as 27 words in kernel order.
pub fn regs_to_words(regs: &Regs) -> Vec<u64> {
    vec![
        regs.r15,
        regs.r14,
        regs.r13,
        regs.r12,
        regs.rbp,
        regs.rbx,
        regs.r11,
        regs.r10,
        regs.r9,
        regs.r8,
        regs.rax,
        regs.rcx,
        regs.rdx,
        regs.rsi,
        regs.rdi,
        regs.orig_rax,
        regs.rip,
        regs.cs,
        regs.eflags,
        regs.rsp,
        regs.ss,
        regs.fs_base,
        regs.gs_base,
        regs.ds,
        regs.es,
        regs.fs,
        regs.gs,
    ]
}

/// The inverse of [`regs_to_words`]; `None` when there are not 27 words.
pub fn words_to_regs(w: &[u64]) -> Option<Regs> {
    let w: &[u64; REG_WORDS] = w.try_into().ok()?;
    Some(Regs {
        r15: w[0],
        r14: w[1],
        r13: w[2],
        r12: w[3],
        rbp: w[4],
        rbx: w[5],
        r11: w[6],
        r10: w[7],
        r9: w[8],
        r8: w[9],
        rax: w[10],
        rcx: w[11],
        rdx: w[12],
        rsi: w[13],
        rdi: w[14],
        orig_rax: w[15],
        rip: w[16],
        cs: w[17],
        eflags: w[18],
        rsp: w[19],
        ss: w[20],
        fs_base: w[21],
        gs_base: w[22],
        ds: w[23],
        es: w[24],
        fs: w[25],
        gs: w[26],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{apart, signals};

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_main_thread_that_is_killed_beside_another_is_not_waited_for() {
        let child = apart::child(|| {
            std::thread::spawn(|| std::thread::sleep(HOUR));
            std::thread::sleep(HOUR);
            0
        });
        let child = child.unwrap();
        let pid = child.pid();
        let begin = Instant::now();
        let tids = loop {
            let entries = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            let tids: Vec<i32> = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect();
            if tids.len() == 2 {
                break tids;
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "it makes no thread");
        };
        for tid in &tids {
            seize(*tid, libc::PTRACE_O_EXITKILL).unwrap();
            interrupt(*tid).unwrap();
        }
        assert_eq!(next(pid).unwrap(), Event::Interrupted);
        signals::kill(pid, libc::SIGKILL);
        let (tell, told) = std::sync::mpsc::channel();
        // All requests come from the thread that traces: another one looks at the time.
        std::thread::spawn(move || {
            if told.recv_timeout(Duration::from_secs(30)).is_err() {
                eprintln!("still waited for");
                std::process::abort();
            }
        });
        assert_eq!(next(pid).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        tell.send(()).unwrap();
        for tid in tids.iter().filter(|tid| **tid != pid) {
            assert!(matches!(next(*tid).unwrap(), Event::Interrupted | Event::Ended(_)));
        }
        let _ = child.wait(0);
    }
}
