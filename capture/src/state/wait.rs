//! A call with a time-out in which a thread was stopped, and what is left of that.

use belay_kernel::proc;
use belay_kernel::ptrace::Regs;
use belay_kernel::vm;

/// Below a stack pointer, bytes that the functions of x86-64 use without moving it (System V ABI, "red zone"), and room
/// for a `struct timespec`.
pub(crate) const BELOW_STACK: u64 = 128 + 64;
const TIMER_ABSTIME: u64 = 1;
const FUTEX_WAIT: u64 = 0;
/// `FUTEX_PRIVATE_FLAG` and `FUTEX_CLOCK_REALTIME`.
const FUTEX_FLAGS: u64 = 128 | 256;
pub(crate) const NANOSECONDS: u64 = 1_000_000_000;

/// So many threads that wait for a futex are stopped after all others, and let go before them: more would take longer
/// than the program may stand still.
pub(crate) const MOST_WAITERS: usize = 64;

/// What an argument says of the time-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Milliseconds,
    /// Address of a `struct timespec`.
    Timespec,
}

/// Which argument of a call is a relative time-out.
fn timeout(number: u64, args: &[u64; 6]) -> Option<(usize, Form)> {
    let wall = |clock: u64| !(2..=3).contains(&clock) && clock.cast_signed() >= 0;
    match number {
        // epoll_wait, epoll_pwait, poll
        232 | 281 => Some((3, Form::Milliseconds)),
        7 => Some((2, Form::Milliseconds)),
        // epoll_pwait2, semtimedop, rt_sigtimedwait, io_getevents, io_pgetevents
        441 | 220 => Some((3, Form::Timespec)),
        128 => Some((2, Form::Timespec)),
        208 | 333 => Some((4, Form::Timespec)),
        // Of nanosleep and clock_nanosleep the kernel writes itself what is left, where that is asked for.
        35 if args[1] != args[0] => Some((0, Form::Timespec)),
        230 if args[1] & TIMER_ABSTIME == 0 && wall(args[0]) && args[3] != args[2] => Some((2, Form::Timespec)),
        202 if args[1] & !FUTEX_FLAGS == FUTEX_WAIT => Some((3, Form::Timespec)),
        _ => None,
    }
}

/// What a thread waits in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: u64,
    pub(crate) args: [u64; 6],
    rsp: u64,
    pub(crate) rip: u64,
}

impl Call {
    /// From `/proc/TID/syscall`: number, six arguments, stack pointer, instruction pointer.
    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split_ascii_whitespace();
        let number = fields.next()?.parse().ok()?;
        let words: Vec<u64> = fields
            .map(|f| u64::from_str_radix(f.strip_prefix("0x")?, 16).ok())
            .collect::<Option<_>>()?;
        Some(Self {
            number,
            args: words.first_chunk().copied()?,
            rsp: *words.get(6)?,
            rip: *words.get(7)?,
        })
    }

    /// Of a thread that sleeps.
    pub(crate) fn of_sleeping(tid: i32) -> Option<Self> {
        Self::parse(&proc::text(format!("/proc/{tid}/syscall")).ok()?)
    }

    /// The relative time-out as it is now: see [`nanoseconds`].
    pub(crate) fn timeout_of(&self, tid: i32) -> Option<u64> {
        let (argument, form) = timeout(self.number, &self.args)?;
        nanoseconds(tid, form, self.args[argument])
    }

    pub(crate) fn of(regs: &Regs) -> Self {
        Self {
            number: regs.orig_rax,
            args: [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9],
            rsp: regs.rsp,
            rip: regs.rip,
        }
    }
}

/// Time-out in nanoseconds; none where it is infinite, or so short that it does not matter.
fn nanoseconds(tid: i32, form: Form, value: u64) -> Option<u64> {
    let ns = match form {
        Form::Milliseconds => u64::try_from(value as u32 as i32).ok()?.checked_mul(1_000_000)?,
        Form::Timespec => {
            let mut raw = [0; 16];
            vm::read(tid, value, &mut raw).ok()?;
            let word = |i: usize| raw.get(i..i + 8)?.try_into().ok().map(u64::from_le_bytes);
            word(0)?
                .checked_mul(NANOSECONDS)?
                .checked_add(word(8).filter(|ns| *ns < NANOSECONDS)?)?
        }
    };
    (ns > 0).then_some(ns)
}

/// How long a stopped thread would have waited yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wait {
    argument: usize,
    pub(crate) form: Form,
    /// Nanoseconds.
    pub(crate) left: u64,
    /// On the monotonic clock, nanoseconds.
    pub(crate) deadline: u64,
    /// Where what is left has been written for the thread.
    written: Option<u64>,
}

impl Wait {
    /// Of a thread that has just stopped in call `number`, to which `regs` belong, and waits until `deadline`
    /// (monotonic clock, nanoseconds).
    pub(crate) fn until(deadline: u64, number: u64, regs: &Regs) -> Option<Self> {
        let (argument, form) = timeout(number, &Call::of(regs).args)?;
        Some(Self {
            argument,
            form,
            left: deadline.saturating_sub(crate::clock::monotonic_ns()),
            deadline,
            written: None,
        })
    }

    /// No longer than `limit` nanoseconds.
    pub(crate) fn at_most(self, limit: u64) -> Self {
        Self {
            left: self.left.min(limit),
            ..self
        }
    }

    /// Puts what is left where the call that begins anew finds it, as far as that is in a register.
    pub(crate) fn shorten(&self, regs: &mut Regs) {
        let argument = match self.argument {
            0 => &mut regs.rdi,
            1 => &mut regs.rsi,
            2 => &mut regs.rdx,
            3 => &mut regs.r10,
            4 => &mut regs.r8,
            _ => &mut regs.r9,
        };
        *argument = match self.form {
            Form::Milliseconds => self.left.div_ceil(1_000_000).min(*argument & u64::from(u32::MAX)),
            Form::Timespec => self.written.unwrap_or(*argument),
        };
    }

    /// Writes what is left below the stack of thread `tid`.
    pub(crate) fn write(&mut self, tid: i32, regs: &Regs) {
        let place = regs.rsp.saturating_sub(BELOW_STACK) & !15;
        let words = [self.left / NANOSECONDS, self.left % NANOSECONDS];
        let raw: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.written = vm::write(tid, place, &raw).is_ok().then_some(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_of_a_waiting_thread_is_parsed() {
        let call = Call::parse("232 0x4 0x7ffd 0x20 0xfffffffe 0x0 0x1 0x7ffe0010 0x7f0012\n").unwrap();
        assert_eq!(
            (call.number, call.args[3], call.rsp, call.rip),
            (232, 0xffff_fffe, 0x7ffe_0010, 0x7f_0012)
        );
        assert!(Call::parse("running").is_none());
        assert!(Call::parse("-1 0x7ffe0010 0x7f0012").is_none());
    }

    #[test]
    fn only_relative_time_outs_count() {
        assert_eq!(timeout(230, &[1, 0, 16, 0, 0, 0]), Some((2, Form::Timespec)));
        // Absolute; in processor time; the kernel keeps what is left.
        assert_eq!(timeout(230, &[1, 1, 16, 0, 0, 0]), None);
        assert_eq!(timeout(230, &[2, 0, 16, 0, 0, 0]), None);
        assert_eq!(timeout(230, &[1, 0, 16, 16, 0, 0]), None);
        // FUTEX_WAIT_PRIVATE, FUTEX_WAIT_BITSET.
        assert_eq!(timeout(202, &[8, 128, 0, 16, 0, 0]), Some((3, Form::Timespec)));
        assert_eq!(timeout(202, &[8, 137, 0, 16, 0, 0]), None);
    }

    #[test]
    fn endless_and_empty_time_outs_are_none() {
        let me = std::process::id().cast_signed();
        assert_eq!(nanoseconds(me, Form::Milliseconds, 0xffff_ffff), None);
        assert_eq!(nanoseconds(me, Form::Milliseconds, 0), None);
        assert_eq!(nanoseconds(me, Form::Milliseconds, 1500), Some(1_500_000_000));
        assert_eq!(
            nanoseconds(me, Form::Timespec, [1u64, 500].as_ptr() as u64),
            Some(1_000_000_500)
        );
        assert_eq!(nanoseconds(me, Form::Timespec, 0), None);
    }
}
