//! A process with a given user and group that does nothing and can do nothing, for others to look into.
//!
//! It is made without a copy of the caller's memory, and has none of it: what becomes of it is a program of a few
//! instructions, from a file in memory.

use belay_abi::restore::CloneArgs;
use belay_abi::syscall;
use belay_kernel::apart::{self, Blocked};
use belay_kernel::signals;
use belay_kernel::task::{self, Task};
use rustix::fs::{memfd_create, MemfdFlags};
use rustix::io::Errno;
use rustix::process::{dumpable_behavior, set_dumpable_behavior};
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

// Gives up all capabilities (`capset`), lets others look into it (PR_SET_DUMPABLE), stops itself, and sleeps.
core::arch::global_asm!(
    ".pushsection .rodata.belay_witness, \"a\"",
    ".balign 8",
    "belay_witness:",
    "  mov eax, 126",
    "  lea rdi, [rip + 3f]",
    "  lea rsi, [rip + 4f]",
    "  syscall",
    "  mov eax, 157",
    "  mov edi, 4",
    "  mov esi, 1",
    "  syscall",
    "  mov eax, 39",
    "  syscall",
    "  mov edi, eax",
    "  mov esi, 19",
    "  mov eax, 62",
    "  syscall",
    "2:",
    "  mov eax, 34",
    "  syscall",
    "  jmp 2b",
    ".balign 8",
    "3: .long 0x20080522, 0",
    "4: .quad 0, 0, 0",
    "belay_witness_end:",
    ".popsection",
);

extern "C" {
    static belay_witness: u8;
    static belay_witness_end: u8;
}

const STACK: usize = 16 << 10;
const CLONE_VM: u64 = 0x100;
const CLONE_VFORK: u64 = 0x4000;
const CLOSE_ON_EXEC: usize = 4;
/// Where the program lies in the process.
const BASE: u64 = 0x40_0000;

mod nr {
    pub(super) const EXIT: usize = 60;
    pub(super) const SETGROUPS: usize = 116;
    pub(super) const SETRESUID: usize = 117;
    pub(super) const SETRESGID: usize = 119;
    pub(super) const PRCTL: usize = 157;
    pub(super) const EXECVEAT: usize = 322;
    pub(super) const CLOSE_RANGE: usize = 436;
}

/// The process; dropped, it is gone.
#[derive(Debug)]
pub(crate) struct Witness(i32);

/// What it becomes.
struct Birth {
    uid: u32,
    gid: u32,
    program: i32,
    /// Its error number, as long as it shares the memory.
    error: AtomicI32,
}

impl Witness {
    /// Makes one, in the caller's namespaces. It ends with the calling thread.
    pub(crate) fn make(uid: u32, gid: u32) -> io::Result<Self> {
        let program = program()?;
        let birth = Birth {
            uid,
            gid,
            program: program.as_raw_fd(),
            error: AtomicI32::new(0),
        };
        let mut stack = vec![0u8; STACK];
        let args = CloneArgs {
            flags: CLONE_VM | CLONE_VFORK,
            stack: (stack.as_mut_ptr() as u64).next_multiple_of(16),
            stack_size: (STACK - 16) as u64,
            ..CloneArgs::default()
        };
        // A change of its user hides the memory that it shares until then, and that stays so.
        let dumpable = dumpable_behavior();
        // It must run none of the caller's handlers.
        let blocked = Blocked::all()?;
        // SAFETY: the stack is nobody else's; the caller stands still until the child has left its memory.
        let made = unsafe { task::spawn(&args, &birth) };
        drop(blocked);
        let _ = dumpable.and_then(set_dumpable_behavior);
        let made = Self(made?);
        let error = birth.error.load(Ordering::Relaxed);
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        made.wait_for_its_stop()?;
        Ok(made)
    }

    /// Its number.
    pub(crate) fn pid(&self) -> i32 {
        self.0
    }

    fn wait_for_its_stop(&self) -> io::Result<()> {
        let status = apart::wait(self.0, libc::WUNTRACED | libc::__WALL)?;
        if libc::WIFSTOPPED(status) {
            Ok(())
        } else {
            Err(io::Error::other(format!("it ended with status {status:#x}")))
        }
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        // A child that has not been waited for keeps its number.
        signals::kill(self.0, libc::SIGKILL);
        let _ = apart::wait(self.0, libc::__WALL);
    }
}

impl Task for Birth {
    /// The child, which has the caller's memory, but nothing else of it.
    fn live(&self) -> ! {
        const EMPTY: &CStr = c"";
        let (uid, gid) = (self.uid, self.gid);
        let arguments = [c"belay-witness".as_ptr(), std::ptr::null()];
        let environment = [std::ptr::null::<u8>()];
        // SAFETY: these calls take numbers, or live arrays that they read; the last one ends the child.
        unsafe {
            syscall!(nr::CLOSE_RANGE, 0usize, u32::MAX, CLOSE_ON_EXEC);
            // Not allowed to an ordinary user; the groups do not matter.
            syscall!(nr::SETGROUPS, 0usize, 0usize);
            let mut error = syscall!(nr::SETRESGID, gid, gid, gid);
            if error == 0 {
                error = syscall!(nr::SETRESUID, uid, uid, uid);
            }
            if error == 0 {
                syscall!(nr::PRCTL, libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                error = syscall!(
                    nr::EXECVEAT,
                    self.program,
                    EMPTY.as_ptr(),
                    arguments.as_ptr(),
                    environment.as_ptr(),
                    libc::AT_EMPTY_PATH
                );
            }
            self.error.store(-(error as i32), Ordering::Relaxed);
            loop {
                syscall!(nr::EXIT, 127usize);
            }
        }
    }
}

/// The program as a file in memory.
fn program() -> io::Result<File> {
    // SAFETY: both labels are of one table of bytes, which the assembler has laid out.
    let code = unsafe {
        let start = &raw const belay_witness;
        std::slice::from_raw_parts(start, (&raw const belay_witness_end).offset_from(start) as usize)
    };
    let make = |flags| memfd_create(c"belay-witness", MemfdFlags::CLOEXEC | flags);
    let made = match make(MemfdFlags::EXEC) {
        // Linux before 6.3 takes that for granted.
        Err(Errno::INVAL) => make(MemfdFlags::empty()),
        made => made,
    };
    let mut file = File::from(made?);
    file.write_all(&elf(code))?;
    Ok(file)
}

/// A program of one segment that holds `code`, where it begins.
fn elf(code: &[u8]) -> Vec<u8> {
    const HEADER: u16 = 64;
    const SEGMENT: u16 = 56;
    let offset = u64::from(HEADER + SEGMENT);
    let length = offset + code.len() as u64;
    let mut out = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let words = |out: &mut Vec<u8>, words: &[u64]| words.iter().for_each(|w| out.extend(w.to_le_bytes()));
    let halves = |out: &mut Vec<u8>, halves: &[u16]| halves.iter().for_each(|h| out.extend(h.to_le_bytes()));
    halves(&mut out, &[2, 62, 1, 0]); // an executable for x86-64
    words(&mut out, &[BASE + offset, u64::from(HEADER), 0]);
    halves(&mut out, &[0, 0, HEADER, SEGMENT, 1, 0, 0, 0]);
    halves(&mut out, &[1, 0, 5, 0]); // loaded, to be read and executed
    words(&mut out, &[0, BASE, BASE, length, length, 4096]);
    out.extend(code);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_kernel::proc::Status;

    #[test]
    fn one_stands_still_with_the_callers_users_and_no_capabilities() {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let witness = Witness::make(uid, gid).unwrap();
        let status = Status::read(witness.pid()).unwrap();
        assert_eq!(status.list("Uid"), [i64::from(uid); 4]);
        assert_eq!(status.hex("CapPrm"), Some(0));
        assert!(status.text("State").is_some_and(|s| s.starts_with('T')));
        assert!(belay_kernel::kcmp::compare(witness.pid(), witness.pid(), belay_kernel::kcmp::Object::Vm).is_ok_and(|o| o.is_eq()));
        let pid = witness.pid();
        drop(witness);
        assert!(Status::read(pid).is_err());
    }
}
