//! The vDSO of the running kernel serves as old and as new one: as code that really runs.

use super::*;
use belay_kernel::place::Area;
use std::time::Duration;

type ClockGettime = extern "C" fn(i32, *mut libc::timespec) -> i32;

/// Memory of this process with the old data and code at the distance that the kernel has put between them.
struct Copied {
    code: u64,
}

impl Copied {
    fn make(code: &[u8], data: &[u8]) -> Self {
        let maps = belay_kernel::proc::maps(std::process::id().cast_signed()).unwrap();
        let own: Vec<_> = maps
            .iter()
            .filter(|m| m.name.as_encoded_bytes().starts_with(b"[v") && m.name != "[vsyscall]")
            .collect();
        let at = |name: &str| own.iter().find(|m| m.name == name).unwrap().start;
        let whole = span(own.iter().map(|m| m.start..m.end));
        let bytes = whole.end - whole.start;
        let area = Area::map(None, bytes, 0).unwrap();
        let base = area.range().start;
        for (name, content) in [("[vvar]", data), ("[vdso]", code)] {
            area.write(base + (at(name) - whole.start), content);
        }
        area.protect(base, bytes, libc::PROT_READ | libc::PROT_EXEC).unwrap();
        Self {
            code: base + (at("[vdso]") - whole.start),
        }
    }

    fn clock_gettime(&self, clock: i32) -> i64 {
        let code = belay_kernel::vdso::code().unwrap();
        let f = elf::functions(&code)
            .unwrap()
            .into_iter()
            .find(|f| f.name == "clock_gettime")
            .unwrap();
        // SAFETY: the function at this place has this type.
        let f: ClockGettime = unsafe { std::mem::transmute(self.code + f.at as u64) };
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(f(clock, &raw mut t), 0);
        t.tv_sec * 1_000_000_000 + t.tv_nsec
    }
}

/// By the kernel's own vDSO, not the code under test.
fn now(clock: i32) -> i64 {
    let t = rustix::time::clock_gettime(clock.try_into().unwrap());
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

const PRECISE: [i32; 4] = [
    libc::CLOCK_MONOTONIC,
    libc::CLOCK_REALTIME,
    libc::CLOCK_MONOTONIC_RAW,
    libc::CLOCK_BOOTTIME,
];
const COARSE: [i32; 2] = [libc::CLOCK_MONOTONIC_COARSE, libc::CLOCK_REALTIME_COARSE];

#[test]
fn old_code_with_frozen_data_asks_the_kernel() {
    let code = belay_kernel::vdso::code().unwrap();
    let mut data = belay_kernel::vdso::data().unwrap();
    let then = COARSE.map(now);
    let raw = data.clone();
    let clocks = frozen::freeze(&mut data);
    assert!(
        clocks >= 2
            || std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource")
                .is_ok_and(|c| c.trim() != "tsc")
    );
    assert_eq!(
        data.chunks(8).zip(raw.chunks(8)).filter(|(a, b)| a != b).count(),
        clocks,
        "nothing else is changed"
    );
    let old = Copied::make(&code, &data);
    std::thread::sleep(Duration::from_millis(50));
    for clock in PRECISE {
        let (before, seen, after) = (now(clock), old.clock_gettime(clock), now(clock));
        assert!(before <= seen && seen <= after, "clock {clock}: {before} {seen} {after}");
    }
    for (clock, then) in COARSE.into_iter().zip(then) {
        let seen = old.clock_gettime(clock);
        assert!(
            seen <= then && seen > then - 1_000_000_000,
            "clock {clock} stands still: {seen} {then}"
        );
    }
}

#[test]
fn entries_of_old_code_lead_to_the_kernels_own() {
    let code = belay_kernel::vdso::code().unwrap();
    let maps = belay_kernel::proc::maps(std::process::id().cast_signed()).unwrap();
    let own = maps.iter().find(|m| m.name == "[vdso]").unwrap().start;
    let bridge = Bridge::new(&code, &code, true).unwrap();
    let mut near = code.clone();
    bridge.write(&mut near, own - (1 << 20), own).unwrap();
    let mut far = code.clone();
    bridge.write(&mut far, own - (1 << 40), own).unwrap();
    for f in elf::functions(&code).unwrap().iter().filter(|f| f.name == "clock_gettime") {
        assert_eq!((near[f.at], far[f.at]), (0xe9, 0xff), "the shorter jump where it reaches");
    }
    // A far jump leads to the same place from everywhere.
    let old = Copied::make(&far, &[]);
    for clock in PRECISE.into_iter().chain(COARSE) {
        let (before, seen, after) = (now(clock), old.clock_gettime(clock), now(clock));
        assert!(before <= seen && seen <= after, "clock {clock}: {before} {seen} {after}");
    }
}

#[test]
fn what_lies_under_a_jump_is_known() {
    let code = belay_kernel::vdso::code().unwrap();
    let bridge = Bridge::new(&code, &code, false).unwrap();
    for f in elf::functions(&code).unwrap() {
        let at = f.at as u64;
        assert_eq!([0, 1, 4].map(|n| bridge.covers(at + n)), [false, true, true], "{}", f.name);
    }
    let mut written = code.clone();
    bridge.write(&mut written, 1 << 40, 1 << 46).unwrap();
    let changed = (0..code.len()).filter(|i| code[*i] != written[*i]);
    let starts: Vec<usize> = elf::functions(&code).unwrap().iter().map(|f| f.at).collect();
    for i in changed.filter(|i| !starts.contains(i)) {
        assert!(bridge.covers(i as u64), "{i:#x} is written over");
    }
}
