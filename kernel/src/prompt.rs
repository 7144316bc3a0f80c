//! Threads that are to get a processor soon, among others that want all of them.
//!
//! Both ways concern the calling thread alone. Neither is handed on: threads and processes that it starts are as if it had taken none (`SCHED_FLAG_RESET_ON_FORK`).

/// `struct sched_attr`, first version.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// `SCHED_FLAG_RESET_ON_FORK`
const RESET_ON_FORK: u64 = 1;
/// The shortest turn that the kernel gives. Who asks for short turns gets the next one early; what a thread gets of the processor in all does not change.
const SHORT_NS: u64 = 100_000;
/// The lowest.
const FIRST: i32 = -20;

/// The calling thread gets its turns early, and short ones, from now on. Before Linux 6.12, and for a thread that has another policy than the usual one or goes before others already, nothing changes.
pub fn short_turns() {
    change(|a| a.runtime = SHORT_NS);
}

/// The calling thread goes before others as long as this lives, where it may (CAP_SYS_NICE, RLIMIT_NICE). Start nothing meanwhile that is to outlive it.
#[derive(Debug)]
pub struct First(Option<i32>);

impl First {
    /// From now on.
    pub fn now() -> Self {
        let mut before = None;
        change(|a| {
            before = Some(a.nice);
            (a.nice, a.runtime) = (FIRST, SHORT_NS);
        })
        .then_some(())
        .map_or(Self(None), |()| Self(before))
    }
}

impl Drop for First {
    fn drop(&mut self) {
        if let Some(nice) = self.0 {
            // To go behind others is allowed to everybody.
            change(|a| a.nice = nice);
        }
    }
}

/// Changes attributes of the calling thread; whether that was allowed. The library has no functions for them.
fn change(f: impl FnOnce(&mut Attributes)) -> bool {
    let size = size_of::<Attributes>() as u32;
    let mut a = Attributes::default();
    // SAFETY: `a` is live and of the size that is given.
    if unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut a, size, 0) } != 0 || a.policy != libc::SCHED_OTHER as u32 {
        return false;
    }
    // What it starts would lose a place before others that it has been given.
    if a.nice < 0 && a.flags & RESET_ON_FORK == 0 {
        return false;
    }
    (a.size, a.flags) = (size, RESET_ON_FORK);
    f(&mut a);
    // SAFETY: `a` is live and says its size.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const a, 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Attributes {
        let mut a = Attributes::default();
        change(|now| a = *now);
        a
    }

    #[test]
    fn what_a_thread_asks_for_ends_with_it_and_is_not_handed_on() {
        std::thread::spawn(|| {
            let before = own();
            short_turns();
            // Older kernels have no turns of a chosen length.
            let short = [0, SHORT_NS].contains(&own().runtime);
            assert!(short && own().nice == before.nice);
            let first = First::now();
            let allowed = first.0.is_some();
            assert_eq!(own().nice, if allowed { FIRST } else { before.nice });
            let started = std::thread::spawn(own).join().unwrap();
            assert_eq!(started.nice, if allowed { 0 } else { before.nice });
            assert_ne!(started.runtime, SHORT_NS);
            drop(first);
            assert_eq!(own().nice, before.nice);
        })
        .join()
        .unwrap();
    }
}
