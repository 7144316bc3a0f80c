//! Time-outs: how much is left of the time for which a thread waits when it is stopped.
//!
//! A call whose time-out is relative, and that the kernel does not carry on by itself, begins anew after the stop with
//! all of its time (`epoll_wait`, `sigtimedwait`, `semtimedop`, `io_getevents`; after a restart also `poll`,
//! `nanosleep` and `futex`). A program that is checkpointed more often than that would wait for ever. So what is left
//! takes the place of the time-out.
//!
//! A wait began when its thread was put to sleep, which `/proc/TID/sched` says in the clock of the processor it ran on;
//! a look at the same clock and ours tells what that means ([`Clocks`]). Both are read before anything is stopped. The
//! thread has not done anything else since if it has given up its processor once more only, for the stop. What a thread
//! does that has been woken before cannot be told from its wait: then the wait is longer, never shorter. Where nothing
//! of all this is to be had, the call begins anew.

use crate::state::wait::{Call, Form, Wait, BELOW_STACK, MOST_WAITERS};
use crate::stop::stopped::Suspended;
use belay_abi::inject::ThreadTable;
use belay_kernel::futex::{self, RESTART_SYSCALL};
use belay_kernel::proc::{self, Map};
use belay_kernel::ptrace::Regs;
use belay_kernel::{sched, vm};
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// The instruction `ret`.
const RET: u8 = 0xc3;
/// Libraries whose functions load the arguments of each system call: beginnings of file names.
const LIBRARIES: [&str; 5] = ["libc.so", "libc-2", "libpthread", "ld-musl-", "libaio.so"];
/// Clocks are corrected by at most 500 millionths.
const DRIFT: u64 = 2000;
/// How long the clocks of processors may be compared, while the job runs: a busy one is to be had when those that wait
/// for it before us have had their turns.
const COMPARE_LIMIT: Duration = Duration::from_millis(250);

/// A thread in a call with a time-out, before it is stopped.
#[derive(Debug, Clone, Copy)]
struct Sleeper {
    call: Call,
    /// How often it had given up its processor by itself.
    switches: u64,
    /// When it was put to sleep, nanoseconds on the monotonic clock.
    began: u64,
    /// How long it waits, nanoseconds; of a call that the kernel carries on this is not to be seen.
    timeout: Option<u64>,
}

/// Threads that wait.
#[derive(Debug, Default)]
pub(crate) struct Sleepers {
    /// With a time-out.
    timed: HashMap<i32, Sleeper>,
    /// How many wait for a futex.
    futex: usize,
}

impl Sleepers {
    /// Looks at the threads of processes (process, its threads) that have not been stopped yet.
    pub(crate) fn among<'a>(processes: impl Iterator<Item = (i32, &'a [i32])>) -> Self {
        let mut asleep: Vec<(i32, Sleeper, i32)> = Vec::new();
        let mut waiters = 0;
        for (pid, tids) in processes {
            let mut code = Code::of(pid);
            asleep.extend(tids.iter().filter_map(|tid| {
                let timeout_of = |call: &Call| match call.number {
                    RESTART_SYSCALL => Some(None),
                    _ => call.timeout_of(*tid).map(Some),
                };
                let call = Call::of_sleeping(*tid)?;
                if call.number == RESTART_SYSCALL || futex::is_wait(call.number, call.args[1]) {
                    waiters += 1;
                }
                timeout_of(&call)?;
                // Before the call that counts: what the thread does from here on, other than to wait in that, is told
                // by another number of switches at its stop.
                let schedule = Schedule::read(&tid.to_string())?;
                let call = Call::of_sleeping(*tid)?;
                let timeout = timeout_of(&call)?;
                // The kernel does not tell both at one moment: the thread may have slept anew in between.
                if Schedule::read(&tid.to_string())? != schedule {
                    return None;
                }
                let processor = proc::stat(*tid).ok()?.processor;
                let sleeper = Sleeper {
                    call,
                    switches: schedule.switches,
                    began: schedule.since,
                    timeout,
                };
                code.loads_arguments_anew(call.rip).then_some((*tid, sleeper, processor))
            }));
        }
        let mut processors: Vec<i32> = asleep.iter().map(|(.., processor)| *processor).collect();
        processors.sort_unstable();
        processors.dedup();
        let ahead = Clocks::compare(processors);
        let now = crate::clock::monotonic_ns();
        let known = asleep.into_iter().filter_map(|(tid, mut sleeper, processor)| {
            sleeper.began = sleeper.began.checked_add(*ahead.0.get(&processor)?)?;
            // The kernel would have ended a wait whose time has passed.
            let plausible = sleeper.began <= now && sleeper.timeout.is_none_or(|t| now - sleeper.began < t);
            plausible.then_some((tid, sleeper))
        });
        Self {
            timed: known.collect(),
            futex: waiters,
        }
    }

    /// Whether those that wait for a futex are stopped after all others.
    pub(crate) fn take_turns(&self) -> bool {
        (1..=MOST_WAITERS).contains(&self.futex)
    }

    /// What task `tid`, which has just stopped with these registers, still had to wait, if it is known.
    pub(crate) fn wait(&self, tid: i32, regs: &Regs) -> Option<Wait> {
        let sleeper = self.timed.get(&tid)?;
        if sleeper.call != Call::of(regs) || Schedule::read(&tid.to_string())?.switches != sleeper.switches + 1 {
            return None;
        }
        let Some(timeout) = sleeper.timeout else {
            return crate::state::calls::carried_on(tid, regs, sleeper.began);
        };
        // The thread may have woken while it was looked at: then something else may have lain in its place already.
        if sleeper.call.timeout_of(tid) != Some(timeout) {
            return None;
        }
        // The clock of a run queue may be faster than the other, by as much as clocks are corrected.
        let slower = crate::clock::monotonic_ns().saturating_sub(sleeper.began) / DRIFT;
        let deadline = sleeper.began.checked_add(timeout)?.checked_add(slower)?;
        let wait = Wait::until(deadline, regs.orig_rax, regs)?;
        Some(wait.at_most(timeout))
    }
}

/// The code of a process.
struct Code {
    pid: i32,
    maps: Option<Vec<Map>>,
}

impl Code {
    fn of(pid: i32) -> Self {
        Self { pid, maps: None }
    }

    /// Whether a system call that returns to `rip` gets its arguments anew each time: it is the last thing in its
    /// function, or in a library that is known for that. Elsewhere the compiler may count on registers that the kernel
    /// leaves as they are, and issue the next call with the same ones.
    fn loads_arguments_anew(&mut self, rip: u64) -> bool {
        let mut next = [0];
        if vm::read(self.pid, rip, &mut next).is_ok() && next == [RET] {
            return true;
        }
        let maps = self.maps.get_or_insert_with(|| proc::maps(self.pid).unwrap_or_default());
        let map = maps.iter().find(|m| (m.start..m.end).contains(&rip));
        let file = map.and_then(|m| Path::new(&m.name).file_name()).unwrap_or_default();
        LIBRARIES.iter().any(|l| file.as_bytes().starts_with(l.as_bytes()))
    }
}

/// Shortens time-outs that lie in memory, for all stopped threads of which that is known. What is left is written below
/// the stack, where the kernel writes when a signal comes: so only for threads on a stack that the system has given
/// them and without another one for signals. Others may keep something there (coroutines, Go).
pub(crate) fn shorten<'a>(job: &mut Suspended, tables: &[Vec<ThreadTable>], maps: impl Iterator<Item = &'a [Map]>) {
    for ((process, tables), maps) in job.processes.iter_mut().zip(tables).zip(maps) {
        for (task, table) in process.tasks.iter_mut().zip(tables) {
            let signals_come_here = table.altstack.flags & libc::SS_DISABLE != 0 && is_on_own_stack(&task.regs, maps);
            let Some(mut wait) = task.wait.filter(|w| w.form == Form::Timespec && signals_come_here) else {
                continue;
            };
            wait.write(task.tid, &task.regs);
            task.wait = Some(wait);
            if crate::state::calls::begins_anew(&task.regs) {
                wait.shorten(&mut task.regs);
                task.borrowed = true;
            }
        }
    }
}

/// Whether a thread is on the stack with which it began: that of the process, or one at whose end its control block
/// lies, as the C library lays them out.
fn is_on_own_stack(regs: &Regs, maps: &[Map]) -> bool {
    let low = regs.rsp.saturating_sub(BELOW_STACK);
    let holds = |m: &&Map, address: u64| (m.start..m.end).contains(&address);
    let map = maps.iter().find(|m| holds(m, low) && holds(m, regs.rsp));
    map.is_some_and(|m| m.name == "[stack]" || holds(&m, regs.fs_base) && regs.rsp < regs.fs_base)
}

/// From `/proc/TID/sched`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Schedule {
    /// When it last had a processor, nanoseconds on the clock of that one.
    since: u64,
    /// How often it has given its processor up by itself.
    switches: u64,
}

impl Schedule {
    fn read(task: &str) -> Option<Self> {
        Self::parse(&proc::text(format!("/proc/{task}/sched")).ok()?)
    }

    fn parse(sched: &str) -> Option<Self> {
        let value = |name: &str| {
            let line = sched
                .lines()
                .find(|l| l.split(':').next().is_some_and(|n| n.trim_end() == name))?;
            Some(line.split_once(':')?.1.trim())
        };
        let (ms, fraction) = value("se.exec_start")?.split_once('.')?;
        let ms: u64 = ms.parse().ok()?;
        let fraction: u64 = fraction.parse().ok()?;
        Some(Self {
            since: ms.checked_mul(1_000_000)?.checked_add(fraction)?,
            switches: value("nr_voluntary_switches")?.parse().ok()?,
        })
    }
}

/// By how much the monotonic clock is ahead of those of the processors, which stand still while these serve interrupts
/// or others have them: nanoseconds, by processor.
#[derive(Debug, Default)]
struct Clocks(HashMap<i32, u64>);

impl Clocks {
    /// Compares them, on a thread that goes from one processor to the next: as many as can be had in a moment.
    fn compare(processors: Vec<i32>) -> Self {
        let mut known = Self::default();
        if processors.is_empty() {
            return known;
        }
        let end = Instant::now() + COMPARE_LIMIT;
        let (tell, told) = channel();
        let compare = move || {
            for processor in processors {
                // Whoever asked may not wait any more.
                if Instant::now() > end
                    || go_to(processor)
                        .and_then(|()| tell.send((processor, ahead()?)).ok())
                        .is_none()
                {
                    return;
                }
            }
        };
        if std::thread::Builder::new()
            .name("belay-clocks".into())
            .spawn(compare)
            .is_err()
        {
            return known;
        }
        while let Ok((processor, ahead)) = told.recv_timeout(end.saturating_duration_since(Instant::now())) {
            known.0.insert(processor, ahead);
        }
        known
    }
}

/// By how much the monotonic clock is ahead of that of the processor to which the calling thread has just gone, and
/// what has happened since the kernel has taken the time: then, or at its last tick. So late rather than early.
fn ahead() -> Option<u64> {
    let since = Schedule::read("thread-self")?.since;
    crate::clock::monotonic_ns().checked_sub(since)
}

/// Has the calling thread run on `processor` alone.
fn go_to(processor: i32) -> Option<()> {
    let processor = usize::try_from(processor).ok()?;
    let mut mask = [0u64; 128];
    *mask.get_mut(processor / 64)? |= 1 << (processor % 64);
    sched::set_processors(0, &mask).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::wait::NANOSECONDS;
    use belay_kernel::{apart, ptrace, signals};
    use rustix::event::epoll;
    use rustix::thread::{NanosleepRelativeResult, Timespec};

    #[test]
    fn stacks_that_a_program_has_made_itself_are_told_from_those_of_its_threads() {
        let map = |line: &str| Map::parse(line.as_bytes()).unwrap().remove(0);
        let maps = [
            map("10000-20000 rw-p 00000000 00:00 0 \n"),
            map("7ff000-800000 rw-p 00000000 00:00 0                          [stack]\n"),
        ];
        let on = |rsp: u64, fs_base: u64| {
            let mut regs = belay_kernel::ptrace::no_regs();
            (regs.rsp, regs.fs_base) = (rsp, fs_base);
            is_on_own_stack(&regs, &maps)
        };
        assert!(on(0x7f_f800, 0x1_8000));
        assert!(on(0x1_4000, 0x1_f700));
        // A coroutine in the heap, one above a thread's stack, and a stack that has no room.
        assert!(!on(0x1_4000, 0x50_0000));
        assert!(!on(0x1_8000, 0x1_4000));
        assert!(!on(0x1_0040, 0x1_f700));
    }

    #[test]
    fn a_sleeping_thread_is_known_to_have_begun_when_it_did() {
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send((rustix::thread::gettid().as_raw_pid(), crate::clock::monotonic_ns()))
                .unwrap();
            let epoll = epoll::create(epoll::CreateFlags::empty()).unwrap();
            let limit = rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 900_000_000,
            };
            let mut none = [const { std::mem::MaybeUninit::uninit() }; 1];
            epoll::wait(epoll, &mut none[..], Some(&limit)).unwrap();
        });
        let (tid, began) = told.recv().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(400));
        let me = std::process::id().cast_signed();
        let sleepers = Sleepers::among([(me, [tid].as_slice())].into_iter());
        let deadline = sleepers.timed.get(&tid).and_then(|s| Some(s.began + s.timeout?));
        thread.join().unwrap();
        let late = deadline.expect("seen").checked_sub(began + 900_000_000).expect("not early");
        assert!(late < 200_000_000, "{late} ns late");
    }

    /// How many seconds are left of an hour for which a process waits, when `meanwhile` is done to its time-out between
    /// the look at it and its stop.
    fn left_of_an_hour(meanwhile: impl Fn(i32, u64)) -> Option<u64> {
        let hour = Timespec {
            tv_sec: 3600,
            tv_nsec: 0,
        };
        let child = apart::child(|| match rustix::thread::nanosleep(&hour) {
            NanosleepRelativeResult::Ok => 0,
            _ => 1,
        });
        let child = child.unwrap();
        let pid = child.pid();
        ptrace::seize(pid, libc::PTRACE_O_EXITKILL).unwrap();
        let begin = Instant::now();
        // Until it sleeps, and a processor was to be had to compare its clock.
        let sleepers = loop {
            let sleepers = Sleepers::among([(pid, [pid].as_slice())].into_iter());
            if sleepers.timed.contains_key(&pid) {
                break sleepers;
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "it does not sleep");
        };
        meanwhile(pid, (&raw const hour) as u64);
        ptrace::interrupt(pid).unwrap();
        assert_eq!(ptrace::wait(pid, true).unwrap(), Some(ptrace::Event::Interrupted));
        let wait = sleepers.wait(pid, &ptrace::get_regs(pid).unwrap());
        signals::kill(pid, libc::SIGKILL);
        let _ = child.wait(0);
        wait.map(|w| w.left / NANOSECONDS)
    }

    #[test]
    fn a_time_out_in_whose_place_something_else_lies_by_the_time_of_the_stop_is_not_known() {
        assert_eq!(left_of_an_hour(|_, _| ()), Some(3599));
        assert_eq!(left_of_an_hour(|pid, place| vm::write(pid, place, &[1; 16]).unwrap()), None);
    }
}
