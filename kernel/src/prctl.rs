//! `prctl` where it reads and sets numbers that rustix does not know, or of which it knows not all values.

use std::io;

/// A number that the calling process has: by which option and argument it is asked for, and by which option it is set.
#[derive(Debug, Clone, Copy)]
pub struct Number {
    get: (i32, u64),
    set: i32,
}

/// Whether it gets no huge pages (`PR_SET_THP_DISABLE`).
pub const NO_HUGE_PAGES: Number = number(42, 41);
/// Whether equal pages of it are merged (`PR_SET_MEMORY_MERGE`).
pub const MERGED: Number = number(68, 67);
/// Whether it serves I/O (`PR_SET_IO_FLUSHER`).
pub const SERVES_IO: Number = number(58, 57);
/// What a machine check does to it (`PR_MCE_KILL`); setting it to 0 (`PR_MCE_KILL_CLEAR`) makes it what is usual.
pub const MACHINE_CHECK: Number = number(34, 33);
/// Whether its next timers get the numbers that it names (`PR_TIMER_CREATE_RESTORE_IDS`).
pub const TIMER_NUMBERS: Number = Number { get: (77, 2), set: 77 };

const fn number(get: i32, set: i32) -> Number {
    Number { get: (get, 0), set }
}

impl Number {
    /// What it is.
    pub fn get(self) -> io::Result<i32> {
        let (option, argument) = self.get;
        ask(option, argument)
    }

    /// Sets it.
    pub fn set(self, value: u64) -> io::Result<()> {
        ask(self.set, value).map(drop)
    }
}

fn ask(option: i32, argument: u64) -> io::Result<i32> {
    // SAFETY: the options of this module take numbers only.
    let done = crate::check(unsafe { libc::syscall(libc::SYS_prctl, option, argument, 0u64, 0u64, 0u64) })?;
    Ok(i32::try_from(done).unwrap_or(-1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_as_it_was_set() {
        let work = || {
            let read = |value| NO_HUGE_PAGES.set(value).and_then(|()| NO_HUGE_PAGES.get());
            i32::from(read(1).ok() != Some(1) || read(0).ok() != Some(0))
        };
        assert_eq!(crate::apart::child(work).unwrap().wait(0).unwrap(), 0);
    }
}
