//! A small seeded generator for random moments; the seed is printed so that a run can be repeated.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator for one check: the run's seed and the check's name.
    pub fn new(seed: u64, name: &str) -> Self {
        let mut s = seed ^ 0x9e37_79b9_7f4a_7c15;
        for b in name.bytes() {
            s = (s ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Rng(s)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n` (`n` > 0).
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n
    }

    /// A pause of at most `ms` milliseconds, with microsecond steps.
    pub fn pause(&mut self, ms: u64) {
        std::thread::sleep(std::time::Duration::from_micros(self.below(ms * 1000 + 1)));
    }
}

/// The seed of this run: `BELAY_SEED`, or the time.
pub fn run_seed() -> u64 {
    std::env::var("BELAY_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(1, |d| u64::from(d.subsec_nanos()) ^ d.as_secs())
        })
}
