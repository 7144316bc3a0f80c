//! What a snapshot child has of the agent: files that it opens, memory that both map, words on which one waits for the other.

use crate::libc_nr as nr;
use belay_abi::syscall;

pub(crate) const O_RDWR: usize = 2;
pub(crate) const PROT_READ_WRITE: usize = 3;
pub(crate) const MAP_SHARED: usize = 1;
pub(crate) const FUTEX_WAIT: usize = 0;

/// Opens descriptor `fd` of the agent anew through `/proc`, which any process of the same user may do with a file it may open.
pub(crate) fn open_in_agent(agent: i32, fd: i32, flags: usize) -> isize {
    let mut path = [0u8; 48];
    let mut at = 0;
    let mut text = |s: &[u8]| {
        for b in s {
            if let Some(slot) = path.get_mut(at) {
                *slot = *b;
            }
            at += 1;
        }
    };
    let mut digits = [0u8; 10];
    text(b"/proc/");
    text(decimal(agent as u32, &mut digits));
    text(b"/fd/");
    text(decimal(fd as u32, &mut digits));
    unsafe { syscall!(nr::OPEN, path.as_ptr(), flags, 0usize) }
}

fn decimal(mut v: u32, digits: &mut [u8; 10]) -> &[u8] {
    let mut at = digits.len();
    while at > 0 {
        at -= 1;
        digits[at] = b'0' + (v % 10) as u8;
        v /= 10;
        if v == 0 {
            break;
        }
    }
    &digits[at..]
}
