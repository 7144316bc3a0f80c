//! How many threads flush: one more while it helps, fewer when the machine suffers. Pure.
//!
//! ```text
//!           faster by a tenth: keep it, try one more
//! Trying ──────────────────────────────────────────> Trying
//!    └── no faster: one fewer ──> Holding ── for a while ──> Trying
//! pressure on I/O: one thread, Holding
//! ```

/// Windows for which a number of threads is kept once more have not helped.
const HOLD: u32 = 16;
/// A thread more must bring at least this much.
const GAIN: f64 = 1.1;
/// Share of time, in percent, in which every task of the machine waits for I/O, from which on the flush steps back.
const PRESSURE: f64 = 40.0;

/// The number of threads and what is known about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Elastic {
    most: u32,
    now: u32,
    hold: u32,
    /// Rate with one thread fewer, while one more is tried.
    before: Option<f64>,
}

impl Elastic {
    /// Begins with one thread, of at most `most`.
    pub fn new(most: u32) -> Self {
        Self {
            most: most.max(1),
            now: 1,
            hold: 0,
            before: None,
        }
    }

    /// Threads that should work now.
    pub fn threads(&self) -> u32 {
        self.now
    }

    /// Takes note of a window in which the flush moved `rate` bytes per second while the pressure on I/O was `pressure`.
    pub fn observe(&mut self, rate: f64, pressure: f64) {
        if pressure > PRESSURE {
            (self.now, self.hold, self.before) = (1, HOLD, None);
            return;
        }
        if self.before.take().is_some_and(|before| rate < before * GAIN) {
            (self.now, self.hold) = (self.now.saturating_sub(1).max(1), HOLD);
            return;
        }
        if self.hold > 0 {
            self.hold -= 1;
        } else if self.now < self.most {
            self.before = Some(rate);
            self.now += 1;
        }
    }
}

/// Share of the last ten seconds, in percent, in which every task waited for I/O; 0 where the kernel does not tell.
pub fn pressure() -> f64 {
    let text = std::fs::read_to_string("/proc/pressure/io").unwrap_or_default();
    let full = text.lines().find(|l| l.starts_with("full"));
    full.and_then(|l| l.split("avg10=").nth(1)?.split(' ').next()?.parse().ok())
        .unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of threads of `windows` windows on a device with rate `rate(threads)`.
    fn run(most: u32, windows: u32, rate: impl Fn(u32) -> f64) -> Vec<u32> {
        let mut e = Elastic::new(most);
        (0..windows)
            .map(|_| {
                e.observe(rate(e.threads()), 0.0);
                e.threads()
            })
            .collect()
    }

    #[test]
    fn more_threads_while_they_help_and_no_more() {
        let usual = |seen: &[u32]| {
            *seen[20..]
                .iter()
                .max_by_key(|n| seen.iter().filter(|m| m == n).count())
                .unwrap()
        };
        assert_eq!(usual(&run(8, 200, |n| f64::from(n.min(3)))), 3);
        assert_eq!(usual(&run(8, 200, |_| 1.0)), 1);
        assert_eq!(usual(&run(4, 200, f64::from)), 4);
        assert!(run(8, 1000, |n| 1.0 / f64::from(n)).iter().all(|n| *n <= 2));
    }

    #[test]
    fn pressure_makes_it_one() {
        let mut e = Elastic::new(8);
        for n in 1..=5 {
            e.observe(f64::from(n * n), 0.0);
        }
        assert!(e.threads() > 3);
        e.observe(100.0, 90.0);
        assert_eq!(e.threads(), 1);
        e.observe(100.0, 0.0);
        assert_eq!(e.threads(), 1);
    }
}
