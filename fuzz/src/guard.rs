//! What must not happen during an execution: a panic, a hang, more memory than the input can justify. Whatever it is,
//! the input is kept and the program ends.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::Mutex;
use std::time::Duration;

/// An execution that takes longer is a hang, also on a machine that has much else to do.
const HANG: Duration = Duration::from_secs(60);
/// Memory that an execution may have at a time.
const MEMORY: usize = 512 << 20;

/// The input being executed: target and bytes.
static CURRENT: Mutex<(String, Vec<u8>)> = Mutex::new((String::new(), Vec::new()));
/// Counts executions, so that a hang is one that does not change.
static TICK: AtomicU64 = AtomicU64::new(0);
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// Counts what is allocated.
#[derive(Debug)]
pub struct Counting {
    live: AtomicUsize,
}

impl Counting {
    /// An allocator that has given out nothing.
    pub const fn new() -> Self {
        Self {
            live: AtomicUsize::new(0),
        }
    }
}

impl Default for Counting {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: everything is the system allocator's; only sizes are counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = self.live.fetch_add(layout.size(), Relaxed) + layout.size();
        if live > MEMORY && BUSY.swap(0, Relaxed) != 0 {
            report("it takes too much memory");
            std::process::abort();
        }
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's pointer, which came from `alloc`.
        unsafe { System.dealloc(p, layout) }
    }
}

/// Where inputs are kept that something happened with.
pub fn findings() -> PathBuf {
    std::env::var_os("BELAY_FUZZ_FINDINGS").map_or_else(|| PathBuf::from("fuzz-findings"), PathBuf::from)
}

fn report(what: &str) {
    let current = CURRENT.try_lock().map(|c| c.clone()).unwrap_or_default();
    let dir = findings();
    let sum = belay_image::checksum(&current.1);
    let path = dir.join(format!("{}-{sum:016x}", current.0));
    let kept = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(&path, &current.1));
    eprintln!(
        "fuzz target {}: {what}; input of {} bytes: {} ({kept:?})",
        current.0,
        current.1.len(),
        path.display()
    );
}

/// Watches over the executions that follow.
pub fn install() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if BUSY.swap(0, Relaxed) != 0 {
            report("it panics");
        }
        before(info);
    }));
    std::thread::spawn(|| loop {
        let seen = TICK.load(Relaxed);
        std::thread::sleep(HANG);
        if BUSY.load(Relaxed) != 0 && TICK.load(Relaxed) == seen {
            report("it hangs");
            std::process::abort();
        }
    });
}

/// Executes `run` on `input`.
pub fn execute(target: &str, run: fn(&[u8]), input: &[u8]) {
    if let Ok(mut current) = CURRENT.lock() {
        current.0.clear();
        current.0.push_str(target);
        current.1.clear();
        current.1.extend_from_slice(input);
    }
    TICK.fetch_add(1, Relaxed);
    BUSY.store(1, Relaxed);
    run(input);
    BUSY.store(0, Relaxed);
}
