//! timerfd: clock, remaining time, period, expirations not yet read.
//!
//! A timer keeps its remaining time; one set to an absolute time of the real-time clock keeps that time.

use crate::builder::{Builder, Built};
use crate::fault::{refuse, At, Fault, Refusal};
use crate::kind::{nothing, Candidate, Kind, Look, NoPart};
use crate::model::{DescId, Description, Descriptors};
use crate::session::Session;
use crate::sys::fd;
use crate::sys::fdinfo::FdInfo;
use belay_kernel::ioctl;
use belay_kernel::numbers::lend;
use rustix::time::{
    timerfd_create, timerfd_gettime, timerfd_settime, ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags,
    Timespec,
};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

const ABSTIME: i32 = 1;
/// An expiration that is due is counted by the kernel within this time: the latency of a timer interrupt.
const DUE: Duration = Duration::from_millis(1);

/// Nanoseconds of one.
const SECOND: i64 = 1_000_000_000;
/// The kernel counts no more seconds than these (`KTIME_SEC_MAX`).
const LATEST: i64 = i64::MAX / SECOND;

/// A timerfd.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct TimerfdState {
    clock: i32,
    flags: i32,
    ticks: u64,
    /// Time to the next expiration, 0 when disarmed: seconds, nanoseconds.
    value: (i64, i64),
    interval: (i64, i64),
    /// The clock at capture.
    now: (i64, i64),
}

fn pair(text: &str) -> io::Result<(i64, i64)> {
    let inner = text.trim().trim_start_matches('(').trim_end_matches(')');
    let parse = |v: &str| {
        v.trim()
            .parse()
            .map_err(|_| io::Error::other(format!("fdinfo: time {text:?}")))
    };
    match inner.split_once(',') {
        Some((s, ns)) => Ok((parse(s)?, parse(ns)?)),
        None => Err(io::Error::other(format!("fdinfo: time {text:?}"))),
    }
}

/// The kind.
pub(crate) struct Timerfd;

impl Kind for Timerfd {
    const NAME: &'static str = "Timerfd";
    const VERSION: u32 = 1;
    type State = TimerfdState;
    type Part = NoPart;

    fn recognise(look: &Look<'_>) -> bool {
        matches!(look, Look::Anonymous(name) if *name == "timerfd")
    }

    fn capture(s: &mut Session<'_>, seen: &Candidate<'_>) -> Result<TimerfdState, Fault> {
        counted(s, seen.id, state(&s.found[seen.id].info)?)
    }

    /// Looks again at timers that were disarmed or due at the first look, which is the same to see: a due one has been
    /// counted meanwhile.
    fn finish(s: &mut Session<'_>, out: &mut Descriptors, refusals: &mut Vec<Refusal>) {
        let idle = |t: &TimerfdState| t.value == (0, 0) && t.ticks == 0;
        if !out.each().any(|(_, t)| idle(t)) {
            return;
        }
        std::thread::sleep(DUE);
        for (id, d) in out.descriptions.iter_mut().enumerate() {
            let Some(t) = d.kind.get_mut().filter(|t| idle(t)) else {
                continue;
            };
            match s.info(id).and_then(|info| counted(s, id, state(&info)?)) {
                Ok(again) => *t = again,
                Err(e) => refusals.push(e.of(d.holder.pid, d.name.to_string())),
            }
        }
    }

    /// One that has expired is armed at once: who watches it is to find it so. The others are, when all memory is there.
    fn rebuild(_: &mut Builder<'_>, d: &Description, t: &TimerfdState) -> Result<Option<OwnedFd>, Fault> {
        let fd = make(d, t)?;
        if t.has_expired() {
            arm(fd.as_raw_fd(), t)?;
        }
        Ok(Some(fd))
    }

    fn complete(d: &Descriptors, built: &Built) -> Result<(), Refusal> {
        let mut waiting = d.each::<TimerfdState>().filter(|(_, t)| !t.has_expired());
        waiting.try_for_each(|(id, t)| {
            let lent = built.made.lend(id);
            let armed = lent.and_then(|lent| lent.map_or(Ok(()), |lent| arm(lent.raw(), t)));
            armed.map_err(|e| d.refusal(id, &e))
        })
    }

    fn check(t: &TimerfdState, _: &Descriptors) -> Result<(), String> {
        let times = [t.value, t.interval, t.now];
        let odd = times
            .iter()
            .find(|(s, ns)| !(0..=LATEST).contains(s) || !(0..SECOND).contains(ns));
        odd.map_or(Ok(()), |(s, ns)| {
            Err(format!("{s} seconds and {ns} nanoseconds are no time of a timer"))
        })
    }

    nothing!(survey, contents, check_part, numbers, ways, prepare, join, refill);
    nothing!(install, install_late, settle, install_own);
}

/// A clock that tells the time of this one: without a hardware clock that can wake the machine, alarm clocks do not,
/// but their timers run.
fn readable(clock: i32) -> i32 {
    match clock {
        libc::CLOCK_REALTIME_ALARM => libc::CLOCK_REALTIME,
        libc::CLOCK_BOOTTIME_ALARM => libc::CLOCK_BOOTTIME,
        other => other,
    }
}

/// The time of this clock.
fn now(clock: i32) -> io::Result<(i64, i64)> {
    let now = rustix::time::clock_gettime(match readable(clock) {
        libc::CLOCK_REALTIME => ClockId::Realtime,
        libc::CLOCK_MONOTONIC => ClockId::Monotonic,
        libc::CLOCK_BOOTTIME => ClockId::Boottime,
        // There are no timers of others.
        _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
    });
    Ok((now.tv_sec, now.tv_nsec))
}

fn state(info: &FdInfo) -> Result<TimerfdState, Fault> {
    let read = || -> io::Result<TimerfdState> {
        let number = |key, radix| i32::try_from(info.number(key, radix)?).map_err(io::Error::other);
        let clock = number("clockid:", 10)?;
        Ok(TimerfdState {
            clock,
            flags: number("settime flags:", 8)?,
            ticks: info.number("ticks:", 10)?,
            value: pair(info.one("it_value:")?)?,
            interval: pair(info.one("it_interval:")?)?,
            now: now(clock)?,
        })
    };
    read().at("read fdinfo")
}

impl TimerfdState {
    /// Whether it has expired, and that has not been read.
    fn has_expired(&self) -> bool {
        self.ticks > 0 || self.is_overdue()
    }

    /// Whether it has a period, has expired and stands still until that is read.
    fn is_overdue(&self) -> bool {
        self.value == (0, 0) && self.interval != (0, 0) && self.ticks > 0
    }
}

/// The same with all periods that have passed. The kernel counts those of a timer that has expired when that is read,
/// or when it is asked for the time that is left: then the timer runs on too.
fn counted(s: &Session<'_>, id: DescId, t: TimerfdState) -> Result<TimerfdState, Fault> {
    if !t.is_overdue() {
        return Ok(t);
    }
    let taken = s.take(id)?;
    let asked = lend(taken.raw()).and_then(|fd| Ok(timerfd_gettime(fd)?));
    asked.at("let it count its periods")?;
    state(&s.info(id)?)
}

fn make(d: &Description, t: &TimerfdState) -> Result<OwnedFd, Fault> {
    let flags = TimerfdFlags::from_bits_retain((d.flags & libc::O_NONBLOCK).cast_unsigned()) | TimerfdFlags::CLOEXEC;
    let made = clock_of(t.clock).and_then(|clock| Ok(timerfd_create(clock, flags)?));
    match made {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => refuse("alarm clocks need CAP_WAKE_ALARM: restart as root"),
        made => made.at("timerfd_create"),
    }
}

fn clock_of(clock: i32) -> io::Result<TimerfdClockId> {
    Ok(match clock {
        libc::CLOCK_REALTIME => TimerfdClockId::Realtime,
        libc::CLOCK_MONOTONIC => TimerfdClockId::Monotonic,
        libc::CLOCK_BOOTTIME => TimerfdClockId::Boottime,
        libc::CLOCK_REALTIME_ALARM => TimerfdClockId::RealtimeAlarm,
        libc::CLOCK_BOOTTIME_ALARM => TimerfdClockId::BoottimeAlarm,
        _ => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
    })
}

/// Lets timer `fd` go on.
fn arm(fd: RawFd, t: &TimerfdState) -> Result<(), Fault> {
    let absolute = t.flags & ABSTIME != 0;
    // It has expired since its periods were counted: it is made to expire at once.
    let overdue = t.is_overdue();
    let value = match (t.value, absolute) {
        (_, true) if overdue => now(t.clock).at("read its clock")?,
        (_, false) if overdue => (0, 1),
        ((0, 0), _) | (_, false) => t.value,
        // The real-time clock has gone on meanwhile; of the others what remained remains.
        (_, true) if matches!(t.clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_ALARM) => sum(t.now, t.value)?,
        (_, true) => sum(now(t.clock).at("read its clock")?, t.value)?,
    };
    let spec = Itimerspec {
        it_interval: timespec(t.interval),
        it_value: timespec(value),
    };
    let flags = TimerfdTimerFlags::from_bits_retain(t.flags.cast_unsigned());
    let set = lend(fd).and_then(|fd| Ok(timerfd_settime(fd, flags, &spec)?));
    set.at("arm the timer")?;
    if overdue {
        fd::wait(fd, libc::POLLIN, 1000).at("wait for a timer that expires at once")?;
    }
    if t.ticks > 0 {
        lend(fd)
            .and_then(|fd| ioctl::set(fd, ioctl::SET_TICKS, &t.ticks))
            .at("set expirations not yet read")?;
    }
    Ok(())
}

fn timespec(v: (i64, i64)) -> Timespec {
    Timespec {
        tv_sec: v.0,
        tv_nsec: v.1,
    }
}

/// The sum of two times, as far as a timer can be set.
fn sum(a: (i64, i64), b: (i64, i64)) -> Result<(i64, i64), Fault> {
    let nanoseconds = a.1.checked_add(b.1);
    let sum = nanoseconds.and_then(|ns| Some((a.0.checked_add(b.0)?.checked_add(ns / SECOND)?, ns % SECOND)));
    sum.map_or_else(
        || refuse("the image has a time that is none"),
        |(s, ns)| Ok((s.min(LATEST), ns)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timer(value: (i64, i64), now: (i64, i64)) -> TimerfdState {
        TimerfdState {
            clock: libc::CLOCK_REALTIME,
            flags: ABSTIME,
            ticks: 0,
            value,
            interval: (0, 0),
            now,
        }
    }

    #[test]
    fn times_that_no_timer_has_are_refused() {
        let check = |value, now| Timerfd::check(&timer(value, now), &Descriptors::default()).is_ok();
        assert!(check((LATEST, SECOND - 1), (0, 0)) && check((0, 0), (LATEST, SECOND - 1)));
        for odd in [(i64::MAX, 0), (LATEST + 1, 0), (-1, 0), (0, SECOND), (0, -1), (0, i64::MAX)] {
            assert!(!check(odd, (0, 0)) && !check((0, 0), odd), "{odd:?}");
        }
    }

    #[test]
    fn a_sum_of_times_is_one_that_a_timer_can_be_set_to() {
        assert_eq!(sum((1, SECOND - 1), (2, 2)).unwrap(), (4, 1));
        assert_eq!(sum((LATEST, 0), (LATEST, SECOND - 1)).unwrap(), (LATEST, SECOND - 1));
        for (a, b) in [((i64::MAX, 0), (1, 0)), ((i64::MAX, SECOND), (0, 0)), ((0, i64::MAX), (0, 1))] {
            assert!(sum(a, b).is_err(), "{a:?} {b:?}");
        }
    }
}
