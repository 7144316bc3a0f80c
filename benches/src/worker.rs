//! The workloads. They print a line when they are ready and one for each answer.

use belay_kernel::pages::Pages;
use belay_kernel::shared::Shared;
use belay_kernel::{apart, futex};
use rustix::process::{set_parent_process_death_signal, Signal};
use rustix::thread::{sched_setaffinity, CpuSet};
use std::io::Write;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

fn say(s: &str) {
    let mut o = std::io::stdout();
    writeln!(o, "{s}").and_then(|()| o.flush()).ok();
}

fn number(args: &[String], i: usize) -> usize {
    args.get(i).and_then(|s| s.parse().ok()).unwrap_or(0)
}

/// `bytes` of anonymous memory with incompressible contents.
pub(crate) fn filled(bytes: usize, huge: bool) -> Pages {
    let mut pages = Pages::new(bytes).unwrap_or_else(|e| panic!("map {bytes} bytes: {e}"));
    pages.huge(huge);
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for w in pages.words_mut() {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *w = x;
    }
    pages
}

/// A page that children share.
fn shared_page() -> &'static Shared {
    Box::leak(Box::new(
        Shared::with_children(4096).unwrap_or_else(|e| panic!("map a page: {e}")),
    ))
}

/// Milliseconds of a bare fork of this process; the child exits at once.
fn bare_fork() -> f64 {
    let t = Instant::now();
    let child = apart::child(|| 0);
    let e = t.elapsed().as_secs_f64() * 1000.0;
    child.and_then(|c| c.wait(0)).ok();
    e
}

fn syscalls(n: usize) {
    for _ in 0..n {
        std::hint::black_box(std::os::unix::process::parent_id());
    }
}

fn mallocs(n: usize) {
    let mut keep: Vec<Vec<u8>> = (0..256).map(|_| Vec::new()).collect();
    for i in 0..n {
        let mut v = Vec::with_capacity(16 + (i * 7919) % 4000);
        v.push(i as u8);
        keep[i % 256] = v;
    }
    std::hint::black_box(&keep);
}

fn forks(n: usize) {
    for _ in 0..n {
        std::process::Command::new("/bin/true").status().ok();
    }
}

/// Runs a piece of a loop for each line read, always on the same processor, and says how many milliseconds it took.
fn pieces(piece: impl Fn()) {
    let mut first = CpuSet::new();
    first.set(0);
    sched_setaffinity(None, &first).ok();
    piece();
    say("ready");
    for _ in std::io::stdin().lines().map_while(Result::ok) {
        let t = Instant::now();
        piece();
        say(&format!("{:.6}", t.elapsed().as_secs_f64() * 1000.0));
    }
}

/// Changes as many percent of its pages as a line says, all over its memory; answers with their number. To `fork` it
/// answers with the time of one.
fn dirty(bytes: usize) {
    const WORDS: usize = 4096 / 8;
    let mut memory = filled(bytes, false);
    let m = memory.words_mut();
    let pages = m.len() / WORDS;
    // Steps of a size that has no factor in common with the number of pages meet each page once.
    let mut step = (pages * 5 / 8) | 1;
    while (2..=pages).any(|f| pages.is_multiple_of(f) && step.is_multiple_of(f)) {
        step += 2;
    }
    say("ready");
    let mut round = 0u64;
    for line in std::io::stdin().lines().map_while(Result::ok) {
        if line == "fork" {
            say(&bare_fork().to_string());
            continue;
        }
        let count = pages * line.parse::<usize>().unwrap_or(0) / 100;
        round += 1;
        for i in 0..count {
            let page = i * step % pages;
            m[page * WORDS + i % WORDS] ^= (round << 32) | (i as u64 + 1);
        }
        say(&count.to_string());
    }
}

/// `processes` processes of `threads` threads each that compute or wait, as the last line has said; answers each when
/// all have been told.
fn busy(processes: usize, threads: usize) {
    /// Longer than any measurement.
    const LONG: Duration = Duration::from_secs(1 << 30);
    let computes = shared_page().half(0);
    let work = move || loop {
        while computes.load(Relaxed) == 1 {
            std::hint::black_box((0..1000u64).fold(0, |a: u64, b| a.rotate_left(7) ^ b));
        }
        futex::wait(computes, 0, LONG);
    };
    let others = |count: usize| {
        let small = || std::thread::Builder::new().stack_size(65536);
        (0..count).for_each(|_| drop(small().spawn(work)));
    };
    for _ in 0..processes {
        // The process has one thread; the child starts its own.
        let child = apart::child(|| {
            set_parent_process_death_signal(Some(Signal::KILL)).ok();
            others(threads - 1);
            work();
            0
        });
        child.unwrap_or_else(|e| panic!("fork: {e}"));
    }
    say("ready");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        computes.store(u32::from(line == "compute"), Relaxed);
        futex::wake(computes);
        say(&line);
    }
}

/// Two ranks, each with `bytes` of its own, that change all of it all the time; answers each line with the units of work done.
fn compute(bytes: usize) {
    let page = shared_page();
    let counts = [page.word(0), page.word(8)];
    let work = move |rank: usize| {
        let mut m = filled(bytes, true);
        loop {
            for block in m.words_mut().chunks_mut(1 << 16) {
                for w in block.iter_mut() {
                    // Some arithmetic for each word, as in a stencil.
                    let mut x = *w;
                    for _ in 0..8 {
                        x = x.wrapping_mul(6_364_136_223_846_793_005).rotate_left(17) ^ 0x5bd1_e995;
                    }
                    *w = x;
                }
                counts[rank].fetch_add(1, Relaxed);
            }
        }
    };
    // The process has one thread.
    let child = apart::child(|| {
        work(1);
        0
    });
    child.unwrap_or_else(|e| panic!("fork: {e}"));
    std::thread::spawn(move || work(0));
    let both = || counts.iter().all(|c| c.load(Relaxed) > 0);
    while !both() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    say("ready");
    for _ in std::io::stdin().lines().map_while(Result::ok) {
        say(&counts.iter().map(|c| c.load(Relaxed)).sum::<u64>().to_string());
    }
}

/// Runs the workload named by `args`.
pub(crate) fn main(args: &[String]) {
    let n = number(args, 1);
    match args.first().map(String::as_str) {
        Some("memory") => {
            let mut m = filled(n, args.get(2).is_some_and(|a| a == "huge"));
            let m = m.words_mut();
            say("ready");
            // Prints the time since the last answer each 5 ms at most; a reader sees when the program runs again.
            let mut i = 0usize;
            loop {
                std::thread::sleep(std::time::Duration::from_millis(1));
                i = (i + 7919) % m.len();
                std::hint::black_box(m[i]);
                if std::env::var_os("BELAY_BENCH_TICK").is_some() {
                    say("tick");
                }
            }
        }
        Some("fork") => {
            let m = filled(n, args.get(2).is_some_and(|a| a == "huge"));
            say("ready");
            // One fork for each line read.
            for _ in std::io::stdin().lines().map_while(Result::ok) {
                say(&format!("{}", bare_fork()));
            }
            std::hint::black_box(&m[0]);
        }
        Some("dirty") => dirty(n),
        Some("compute") => compute(n),
        Some("threads") => {
            let handles: Vec<_> = (0..n)
                .map(|_| {
                    let small = std::thread::Builder::new().stack_size(65536);
                    small.spawn(|| loop {
                        std::thread::park();
                    })
                })
                .collect();
            std::hint::black_box(&handles);
            say("ready");
            loop {
                std::thread::sleep(std::time::Duration::from_secs(1000));
            }
        }
        Some("busy") => busy(n, number(args, 2)),
        Some("syscalls") => pieces(|| syscalls(n)),
        Some("mallocs") => pieces(|| mallocs(n)),
        Some("forks") => pieces(|| forks(n)),
        Some("agents") => crate::tree::agents(&args[1..]),
        Some("root") => {
            if let Err(e) = crate::tree::root(&args[1..]) {
                eprintln!("root of a tree: {e}");
                std::process::exit(1);
            }
        }
        other => eprintln!("unknown workload {other:?}"),
    }
}
