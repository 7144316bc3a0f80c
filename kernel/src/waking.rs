//! How long a thread that has been woken waits for a processor.

use crate::proc;
use std::time::{Duration, Instant};

/// Does `sleep`, in which the calling thread sleeps until something has happened, and returns when that was: the thread
/// itself may have got a processor later, with many others before it. The moment is the true one or a later one, never
/// an earlier one: unless the kernel tells, and the thread has slept just once and kept its processor else, it is the
/// end of `sleep`.
pub fn moment_of(sleep: impl FnOnce()) -> Instant {
    let (slept, preempted) = switches();
    let waited = run_delay();
    sleep();
    let late = run_delay().zip(waited).map(|(now, before)| now.saturating_sub(before));
    let now = Instant::now();
    let exact = late.filter(|_| switches() == (slept + 1, preempted));
    exact.and_then(|late| now.checked_sub(late)).unwrap_or(now)
}

/// How often the calling thread has given its processor up by itself, and how often it has been taken.
fn switches() -> (libc::c_long, libc::c_long) {
    // SAFETY: all-zero bytes are a valid value of this plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is live.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    (usage.ru_nvcsw, usage.ru_nivcsw)
}

/// How long the calling thread has waited for a processor while it could have run, where the kernel tells (CONFIG_SCHED_INFO).
fn run_delay() -> Option<Duration> {
    let stat = proc::text("/proc/thread-self/schedstat").ok()?;
    let ns = stat.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(Duration::from_nanos(ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::sync::mpsc::channel;
    use std::sync::Arc;

    /// Keeps the calling thread, and those that it starts, on one processor.
    fn stay_here() {
        // SAFETY: a live set, which lies as long as said.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(usize::try_from(libc::sched_getcpu()).unwrap(), &mut set);
            assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
        }
    }

    /// When something happened of which a thread was told among others that want its processor, what is said of that,
    /// and when it went on.
    fn among_others() -> [Instant; 3] {
        let over = Arc::new(AtomicBool::new(false));
        let (tell, told) = channel();
        let mut others = Vec::new();
        for _ in 0..20 {
            let over = over.clone();
            others.push(std::thread::spawn(move || while !over.load(Relaxed) {}));
        }
        others.push(std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            tell.send(Instant::now()).unwrap();
        }));
        let mut happened = None;
        let moment = moment_of(|| happened = told.recv().ok());
        let now = Instant::now();
        over.store(true, Relaxed);
        others.into_iter().for_each(|t| t.join().unwrap());
        [happened.unwrap(), moment, now]
    }

    #[test]
    fn what_has_happened_while_others_had_the_processor_is_not_later_for_that() {
        stay_here();
        let rounds: Vec<_> = (0..20).map(|_| among_others()).collect();
        for [happened, moment, now] in &rounds {
            assert!(happened <= moment && moment <= now);
        }
        // A thread that loses its processor has the later moment.
        let told = rounds
            .iter()
            .any(|[_, moment, now]| *now - *moment > Duration::from_millis(1));
        assert!(told || run_delay().is_none());
    }
}
