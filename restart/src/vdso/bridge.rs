//! From the functions of one vDSO to those of another: what is written over the entry of each old one. Pure.
//!
//! ```text
//! old vDSO (memory of the process)                 vDSO of this kernel
//!   clock_gettime:  jmp ─────────────────────────►  clock_gettime:  ...
//!   getrandom:      mov $318,%eax; syscall; ret
//! ```

use super::elf;
use std::collections::BTreeMap;

/// `jmp` with a 32-bit distance.
const NEAR: usize = 5;
/// `jmp *(%rip)` and the address.
const FAR: usize = 14;
const ENOSYS: i32 = 38;

/// What a call of an old function becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Target {
    /// The function at this place of the new vDSO.
    Function(usize),
    /// This code.
    Code(Vec<u8>),
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    at: usize,
    /// Bytes up to the next entry.
    room: usize,
    target: Target,
}

/// What becomes of each function of an old vDSO.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Bridge(Vec<Entry>);

impl Bridge {
    /// Leads from `old` to `new`, both whole vDSOs, of the `same` kernel or of two. `Err` says what cannot be.
    pub(crate) fn new(old: &[u8], new: &[u8], same: bool) -> Result<Self, String> {
        let there = elf::functions(new).map_err(|e| format!("this kernel's vDSO: {e}"))?;
        let mut places: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for f in elf::functions(old).map_err(|e| format!("the vDSO of the checkpoint: {e}"))? {
            places.entry(f.at).or_default().push(f.name);
        }
        let ends: Vec<usize> = places.keys().skip(1).copied().chain([old.len()]).collect();
        let mut entries = Vec::new();
        for ((at, names), end) in places.into_iter().zip(ends) {
            let [name] = names.as_slice() else {
                return Err(format!(
                    "the vDSO of the checkpoint has several functions at one place: {}",
                    names.join(", ")
                ));
            };
            let found = there.iter().find(|f| f.name == *name).map(|f| Target::Function(f.at));
            let target = always(name).filter(|_| !same).or(found).or_else(|| instead(name));
            let target = target.ok_or_else(|| format!("this kernel's vDSO lacks the function {name}"))?;
            if same && end - at < FAR {
                return Err(format!("the function {name} of the vDSO is too short to be replaced"));
            }
            entries.push(Entry {
                name: name.clone(),
                at,
                room: end - at,
                target,
            });
        }
        Ok(Self(entries))
    }

    /// Whether what is `at` this place of the old vDSO lies in the middle of what is written over an entry.
    pub(crate) fn covers(&self, at: u64) -> bool {
        let covers = |e: &Entry| {
            let bytes = match &e.target {
                Target::Code(code) => code.len(),
                Target::Function(_) => FAR,
            };
            (e.at as u64 + 1..(e.at + bytes) as u64).contains(&at)
        };
        self.0.iter().any(covers)
    }

    /// Writes over the entries in `code`, a copy of the old vDSO at `old`, so that they lead to the new one at `new`.
    pub(crate) fn write(&self, code: &mut [u8], old: u64, new: u64) -> Result<(), String> {
        for e in &self.0 {
            let bytes = match &e.target {
                Target::Code(code) => code.clone(),
                Target::Function(to) => jump(old + e.at as u64, new + *to as u64),
            };
            let room = code.get_mut(e.at..).and_then(|c| c.get_mut(..bytes.len()));
            match room {
                Some(room) if bytes.len() <= e.room => room.copy_from_slice(&bytes),
                _ => return Err(format!("the function {} of the old vDSO is too short to be replaced", e.name)),
            }
        }
        Ok(())
    }
}

/// A jump at `from`.
fn jump(from: u64, to: u64) -> Vec<u8> {
    let distance = to.wrapping_sub(from).wrapping_sub(NEAR as u64).cast_signed();
    match i32::try_from(distance) {
        Ok(distance) => [&[0xe9], distance.to_le_bytes().as_slice()].concat(),
        Err(_) => {
            let far = [&[0xff, 0x25, 0, 0, 0, 0], to.to_le_bytes().as_slice()].concat();
            debug_assert_eq!(far.len(), FAR);
            far
        }
    }
}

/// Functions that never lead to the vDSO of another kernel. The state that `getrandom` keeps in the program's memory
/// has the form that the old kernel gave it; a program that asks for that form is told that there is none.
fn always(name: &str) -> Option<Target> {
    let code = [
        &[0x49, 0x83, 0xf8, 0xff, 0x74, 8][..], // cmp $-1,%r8; je over the call
        &call(libc::SYS_getrandom),
        &fail(),
    ];
    (name == "getrandom").then(|| Target::Code(code.concat()))
}

/// What stands for a function that the new vDSO lacks.
fn instead(name: &str) -> Option<Target> {
    let number = match name {
        "clock_gettime" => libc::SYS_clock_gettime,
        "clock_getres" => libc::SYS_clock_getres,
        "gettimeofday" => libc::SYS_gettimeofday,
        "time" => libc::SYS_time,
        "getcpu" => libc::SYS_getcpu,
        // Nothing can have been entered: a process with an enclave holds a device that cannot be saved.
        "sgx_enter_enclave" => return Some(Target::Code(fail())),
        _ => return None,
    };
    Some(Target::Code(call(number)))
}

/// Makes a system call and returns: `mov $number,%eax; syscall; ret`. The arguments lie where the function has them.
fn call(number: libc::c_long) -> Vec<u8> {
    let number = u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    [&[0xb8], number.as_slice(), &[0x0f, 0x05, 0xc3]].concat()
}

/// `mov $-ENOSYS,%eax; ret`, sign-extended as 64 bits.
fn fail() -> Vec<u8> {
    [&[0x48, 0xc7, 0xc0], (-ENOSYS).to_le_bytes().as_slice(), &[0xc3]].concat()
}
