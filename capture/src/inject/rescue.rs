//! The way back for a thread that issues a single system call for the agent, should the agent die at that moment.
//!
//! Before anything can be injected, memory must be mapped by a system call of the process itself; after everything has
//! been unmapped nothing injected is left. For these two calls the way back is made of what every process has whose
//! runtime handles signals: a `syscall; ret` sequence, the signal return trampoline (`mov $15, %eax; syscall`), and the
//! low end of the main thread's stack mapping, which lies far below anything in use. There the agent places a signal
//! frame with the thread's state; the `ret` leads to the trampoline, and the trampoline to where the thread was. What
//! lay there is put back when the thread goes on.

use crate::inject::frame;
use crate::state::calls;
use crate::stop::stopped::{Gate, Process};
use belay_kernel::proc::Map;
use belay_kernel::ptrace::Regs;
use belay_kernel::vm::Memory;
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;

/// `syscall; ret`.
const SYSCALL_RET: [u8; 3] = [0x0f, 0x05, 0xc3];
/// `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `mov $15, %rax; syscall`, glibc's `__restore_rt`.
const TRAMPOLINE: [u8; 9] = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
/// Distance kept from every stack pointer.
pub(crate) const MARGIN: u64 = 16 * 1024;
/// Only this much of a mapping is searched.
const SEARCH_LIMIT: u64 = 4 << 20;

impl Gate {
    /// Prepares the gate of `process`. `None` when it has no `syscall` instruction at all.
    pub(crate) fn prepare(process: &Process, maps: &[Map], memory: &Memory) -> Option<Self> {
        let executable: Vec<&Map> = maps.iter().filter(|m| m.prot & 5 == 5 && m.name != "[vsyscall]").collect();
        // The C library first. A static program, and one whose runtime does without it, has the same code in its own text.
        let is_libc = |m: &&&Map| is_named(m, &["libc.so", "libc-", "ld-"]);
        let code = || {
            executable
                .iter()
                .filter(is_libc)
                .chain(executable.iter().filter(|m| !is_libc(m)))
        };
        let main = &process.tasks[0];
        // Processes that share their memory have places beside each other.
        let offset = frame_bytes(main.xstate.len()) * process.guest.map_or(0, |g| g.place);
        let low = maps.iter().find(|m| m.name == "[stack]").map(|m| m.start).filter(|low| {
            let room = low..&(low + MARGIN);
            let free = !process.tasks.iter().any(|t| room.contains(&&t.regs.rsp));
            // For all of a group together this has been found out before. A process that a thread has forked, and a
            // program with stacks of its own (Go), do not run on this mapping, and what they have suspended there has
            // not reached its end where that has never been written.
            !process.crowded && free && (process.guest.is_some() || main.regs.rsp > *low || is_unused(memory, *low))
        });
        let place = low.map(|low| low + offset);
        if let (Some(place), Some(gadget), Some(trampoline)) = (
            place,
            code().find_map(|m| find(memory, m, &SYSCALL_RET)),
            code().find_map(|m| find(memory, m, &TRAMPOLINE)),
        ) {
            if let Some(covered) = write_frame(
                memory,
                place,
                trampoline,
                &calls::without_restart_block(main.tid, &main.regs, main.wait.as_ref()),
                main.sigmask,
                &main.xstate,
            ) {
                return Some(Self {
                    syscall_at: gadget,
                    stack: Some(place),
                    covered: Some((place, covered)),
                });
            }
        }
        // The vDSO first: it is small and has one.
        let mut rest = maps.iter().filter(|m| m.name == "[vdso]").chain(executable.iter().copied());
        let syscall_at = rest.find_map(|m| find(memory, m, &SYSCALL))?;
        Some(Self {
            syscall_at,
            stack: None,
            covered: None,
        })
    }
}

fn write_frame(memory: &Memory, place: u64, trampoline: u64, regs: &Regs, sigmask: u64, xstate: &[u8]) -> Option<Vec<u8>> {
    let mut covered = vec![0; frame::bytes(xstate.len())];
    memory.read(place, &mut covered).ok()?;
    let mut bytes = covered.clone();
    frame::write(&mut bytes, place, regs, sigmask, xstate);
    bytes[..8].copy_from_slice(&trampoline.to_le_bytes());
    memory.write(place, &bytes).ok()?;
    Some(covered)
}

/// Whether the name of the file behind `map` begins with one of these.
fn is_named(map: &Map, names: &[&str]) -> bool {
    let file = Path::new(&map.name).file_name().unwrap_or_default().as_bytes();
    names.iter().any(|name| file.starts_with(name.as_bytes()))
}

/// Whether nothing has ever been written to the place for a frame at `low`.
fn is_unused(memory: &Memory, low: u64) -> bool {
    let mut there = vec![1; MARGIN as usize];
    memory.read(low, &mut there).is_ok() && there.iter().all(|b| *b == 0)
}

/// Distance between the frames of processes that share their memory.
pub(crate) fn frame_bytes(xstate: usize) -> u64 {
    frame::bytes(xstate).next_multiple_of(64) as u64
}

/// Searches the libraries of this process, which most processes of the job map too, so that no process is kept waiting
/// for the search.
pub(crate) fn learn_own_libraries() {
    let me = std::process::id().cast_signed();
    if let (Ok(maps), Ok(memory)) = (belay_kernel::proc::maps(me), Memory::open(me)) {
        for map in maps.iter().filter(|m| m.prot & 5 == 5 && is_named(m, &["ld-", "libc.so"])) {
            find(&memory, map, &SYSCALL_RET);
            find(&memory, map, &TRAMPOLINE);
        }
    }
}

/// Where `code` first stands in a mapping; remembered by file, since every process maps the same few libraries.
fn find(memory: &Memory, map: &Map, code: &[u8]) -> Option<u64> {
    type Known = HashMap<(u64, u64, u64, Vec<u8>), Option<u64>>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let key = (map.dev, map.ino, map.offset, code.to_vec());
    let mut known = KNOWN.lock().ok()?;
    let known = known.get_or_insert_default();
    let at = match known.get(&key) {
        Some(at) => *at,
        None => {
            let mut text = vec![0; usize::try_from((map.end - map.start).min(SEARCH_LIMIT)).ok()?];
            memory.read(map.start, &mut text).ok()?;
            let at = text.windows(code.len()).position(|w| w == code).map(|at| at as u64);
            if map.ino != 0 {
                known.insert(key, at);
            }
            at
        }
    };
    // A file may have been changed or partly unmapped since: what is there now decides.
    let at = map.start + at?;
    let mut now = vec![0; code.len()];
    memory.read(at, &mut now).ok()?;
    (now == code).then_some(at)
}
