//! The workloads. They print a line when they are ready and one for each answer.

use std::io::Write;
use std::time::Instant;

fn say(s: &str) {
    let mut o = std::io::stdout();
    writeln!(o, "{s}").and_then(|()| o.flush()).ok();
}

fn number(args: &[String], i: usize) -> usize {
    args.get(i).and_then(|s| s.parse().ok()).unwrap_or(0)
}

/// `bytes` of anonymous memory with incompressible contents.
pub(crate) fn filled(bytes: usize, huge: bool) -> &'static mut [u64] {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping of this size; a failure is checked below.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert!(p != libc::MAP_FAILED, "mmap of {bytes} bytes");
    let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // SAFETY: the range was just mapped; advice does not change contents.
    unsafe { libc::madvise(p, bytes, advice) };
    // SAFETY: the mapping is page aligned, zero filled, of `bytes` bytes, and lives until the process ends.
    let m = unsafe { std::slice::from_raw_parts_mut(p.cast::<u64>(), bytes / 8) };
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for w in m.iter_mut() {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *w = x;
    }
    m
}

/// Milliseconds of a bare fork of this process; the child exits at once.
fn bare_fork() -> f64 {
    let t = Instant::now();
    // SAFETY: the child only calls _exit, which is async-signal-safe.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let e = t.elapsed().as_secs_f64() * 1000.0;
    let mut st = 0;
    // SAFETY: `st` outlives the call.
    unsafe { libc::waitpid(pid, &mut st, 0) };
    e
}

fn syscalls(n: usize) {
    for _ in 0..n {
        // SAFETY: getppid has no arguments and no effects.
        unsafe { libc::syscall(libc::SYS_getppid) };
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
    // SAFETY: all-zero bytes are an empty set; the calls write to and read from that local.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(0, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
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
    let m = filled(bytes, false);
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
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping; a failure is checked below.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert!(p != libc::MAP_FAILED, "mmap of a page");
    // SAFETY: the page is zero filled, aligned, and lives until the process ends; all processes use it through an atomic only.
    let computes: &'static AtomicU32 = unsafe { &*p.cast() };
    let futex = |op: i32, value: u32| {
        // SAFETY: the word lives until the process ends.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                computes.as_ptr(),
                op,
                value,
                std::ptr::null::<libc::timespec>(),
            )
        };
    };
    let work = move || loop {
        while computes.load(Relaxed) == 1 {
            std::hint::black_box((0..1000u64).fold(0, |a: u64, b| a.rotate_left(7) ^ b));
        }
        futex(libc::FUTEX_WAIT, 0);
    };
    let others = |count: usize| {
        let small = || std::thread::Builder::new().stack_size(65536);
        (0..count).for_each(|_| drop(small().spawn(work)));
    };
    for _ in 0..processes {
        // SAFETY: the process has one thread; the child starts its own.
        if unsafe { libc::fork() } == 0 {
            // SAFETY: takes numbers only; asks for an end with the parent.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            others(threads - 1);
            work();
        }
    }
    say("ready");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        computes.store(u32::from(line == "compute"), Relaxed);
        futex(libc::FUTEX_WAKE, i32::MAX.cast_unsigned());
        say(&line);
    }
}

/// Two ranks, each with `bytes` of its own, that change all of it all the time; answers each line with the units of work done.
fn compute(bytes: usize) {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping; a failure is checked below.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert!(p != libc::MAP_FAILED, "mmap of a page");
    // SAFETY: the page is zero filled, aligned, and lives until the process ends; both processes use it through atomics only.
    let counts: &[AtomicU64; 2] = unsafe { &*p.cast() };
    let work = move |rank: usize| {
        let m = filled(bytes, true);
        loop {
            for block in m.chunks_mut(1 << 16) {
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
    // SAFETY: the process has one thread.
    if unsafe { libc::fork() } == 0 {
        work(1);
    }
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
            let m = filled(n, args.get(2).is_some_and(|a| a == "huge"));
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
