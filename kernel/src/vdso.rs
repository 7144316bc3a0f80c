//! The pages that the kernel gives to every process: `[vdso]`, code that reads clocks without a system call, and
//! `[vvar]`, the data of that code. Those of this process, which are the same in all processes of this kernel.

use crate::proc::{self, Map};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PAGE: usize = 4096;
/// The data changes at every tick of the clock, and is copied in microseconds.
const TRIES: u32 = 1000;

fn own(name: &str) -> io::Result<Option<Map>> {
    let maps = proc::maps(std::process::id().cast_signed())?;
    Ok(maps.into_iter().find(|m| m.name == name))
}

/// The bytes of `[vdso]`, empty where this process has none.
pub fn code() -> io::Result<Vec<u8>> {
    let Some(map) = own("[vdso]")? else { return Ok(Vec::new()) };
    let mut code = vec![0; usize::try_from(map.end - map.start).unwrap_or(0)];
    crate::vm::read(std::process::id().cast_signed(), map.start, &mut code)?;
    Ok(code)
}

/// The bytes of `[vvar]`, as they were at one moment between two changes; zeros for pages that this machine has no use
/// for, empty where this process has none. Fails with `TimedOut` where the data never stands still.
pub fn data() -> io::Result<Vec<u8>> {
    let Some(map) = own("[vvar]")? else { return Ok(Vec::new()) };
    for _ in 0..TRIES {
        let before = copy(&map)?;
        wait_between_changes();
        if copy(&map)? == before {
            return Ok(before);
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// The kernel's own code waits until no change is under way. What is the same before and after has not been in the middle of one.
fn wait_between_changes() {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    for clock in [libc::CLOCK_MONOTONIC, libc::CLOCK_MONOTONIC_RAW] {
        // SAFETY: `t` is live.
        unsafe { libc::clock_gettime(clock, &raw mut t) };
    }
}

/// Copies the pages by way of a pipe: the kernel tells of a page that is not there, where reading it would end this process.
fn copy(map: &Map) -> io::Result<Vec<u8>> {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two numbers.
    crate::check(libc::c_long::from(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }))?;
    // SAFETY: new descriptors, which nobody else owns.
    let [from, to] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let mut out = Vec::new();
    for page in (map.start..map.end).step_by(PAGE) {
        let mut bytes = [0u8; PAGE];
        // SAFETY: the kernel checks the address.
        let n = unsafe { libc::write(to.as_raw_fd(), page as *const libc::c_void, PAGE) };
        if let Ok(n) = usize::try_from(n) {
            // SAFETY: at most the length of `bytes`.
            let got = unsafe { libc::read(from.as_raw_fd(), bytes.as_mut_ptr().cast(), n.min(PAGE)) };
            if usize::try_from(got) != Ok(PAGE) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        out.extend_from_slice(&bytes);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_an_elf_file_and_data_is_whole() {
        let code = code().unwrap();
        assert!(code.starts_with(b"\x7fELF"));
        let map = own("[vvar]").unwrap().unwrap();
        let data = data().unwrap();
        assert_eq!(data.len() as u64, map.end - map.start);
        assert!(data.iter().any(|b| *b != 0));
    }
}
