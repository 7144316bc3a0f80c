//! A device for tests: memory of the host behind links of a given speed, whose copies can be made to fail.

use super::{Device, Host, Lane};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// See the module.
pub struct Slow {
    memory: Host,
    /// Bytes per second of copies down and up.
    rate: f64,
    copies: AtomicU64,
    /// Every so many-th copy between tiers fails; 0 for none.
    fails: AtomicU64,
}

impl Slow {
    /// So many bytes, and bytes per second to and from the next tier.
    pub fn new(bytes: u64, rate: f64) -> io::Result<Self> {
        Ok(Self {
            memory: Host::new(bytes)?,
            rate,
            copies: AtomicU64::new(0),
            fails: AtomicU64::new(0),
        })
    }

    /// From now on every `n`-th copy between tiers fails; 0 for none.
    pub fn fail(&self, n: u64) {
        self.fails.store(n, Ordering::Relaxed);
    }

    fn pass(&self, lane: Lane, bytes: u64) -> io::Result<()> {
        if lane == Lane::Call {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs_f64(bytes as f64 / self.rate));
        let (n, fails) = (
            self.copies.fetch_add(1, Ordering::Relaxed),
            self.fails.load(Ordering::Relaxed),
        );
        if fails > 0 && n % fails == 0 {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }
}

fn bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|r| r.end - r.start).sum()
}

impl Device for Slow {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn store(&self, lane: Lane, from: &[&[u8]], to: &[Range<u64>]) -> io::Result<()> {
        self.pass(lane, bytes(to))?;
        self.memory.store(lane, from, to)
    }

    fn load(&self, lane: Lane, from: &[Range<u64>], to: &mut [&mut [u8]]) -> io::Result<()> {
        self.pass(lane, bytes(from))?;
        self.memory.load(lane, from, to)
    }
}
