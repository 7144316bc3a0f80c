use super::*;

#[test]
fn thousands_of_ranges_are_each_found_once() {
    let len = 4096 * PAGE as usize;
    // SAFETY: a fresh anonymous mapping.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED);
    // SAFETY: our own mapping; huge pages would fill the gaps.
    unsafe { libc::madvise(p, len, libc::MADV_NOHUGEPAGE) };
    let base = p as u64;
    for count in [200, 513, 700, 1025, 1500, 2048] {
        for page in (0..count * 2).step_by(2) {
            // SAFETY: within the mapping.
            unsafe { p.cast::<u8>().add(page * PAGE as usize).write_volatile(1) };
        }
        let mut map = Pagemap::open(std::process::id() as i32).unwrap();
        let mut out = Vec::new();
        map.data_ranges(base, base + len as u64, &mut out).unwrap();
        let expected: Vec<_> = (0..count as u64)
            .map(|i| (base + 2 * i * PAGE, base + (2 * i + 1) * PAGE))
            .collect();
        assert!(out == expected, "{count} ranges, {} found", out.len());
    }
    // SAFETY: our mapping, not used any more.
    unsafe { libc::munmap(p, len) };
}

#[test]
fn of_many_mappings_those_with_data_are_told() {
    let len = 8192 * PAGE as usize;
    // SAFETY: a fresh anonymous mapping.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED);
    // SAFETY: our own mapping; huge pages would fill the gaps.
    unsafe { libc::madvise(p, len, libc::MADV_NOHUGEPAGE) };
    let base = p as u64;
    // Ranges of 4 pages, one page apart from each other; one of them is long and full, one is long and empty, and every
    // third holds one page.
    let mut ranges: Vec<(u64, u64)> = (0..800).map(|i| (base + 5 * i * PAGE, base + (5 * i + 4) * PAGE)).collect();
    ranges.push((base + 4000 * PAGE, base + 6000 * PAGE));
    ranges.push((base + 6000 * PAGE + PAGE, base + 7000 * PAGE));
    ranges.extend((1401..1600).map(|i| (base + 5 * i * PAGE, base + (5 * i + 4) * PAGE)));
    let expected: Vec<bool> = (0..ranges.len()).map(|i| i != 801 && (i % 3 == 0 || i == 800)).collect();
    for ((start, end), data) in ranges.iter().zip(&expected) {
        let last = if end - start > 4 * PAGE { *end } else { start + 2 * PAGE };
        for at in (start + PAGE..last).step_by(PAGE as usize).filter(|_| *data) {
            // SAFETY: within the mapping.
            unsafe { (at as *mut u8).write_volatile(1) };
        }
        // What lies between two ranges belongs to neither.
        // SAFETY: the page behind a range is within the mapping.
        unsafe { (*end as *mut u8).write_volatile(1) };
    }
    let mut map = Pagemap::open(std::process::id() as i32).unwrap();
    assert_eq!(map.with_data(&ranges).unwrap(), expected);
    map.scan = false;
    assert_eq!(map.with_data(&ranges).unwrap(), expected);
    // SAFETY: our mapping, not used any more.
    unsafe { libc::munmap(p, len) };
}

#[test]
fn a_page_behind_a_long_gap_is_found() {
    let pages = 3 * ENTRIES;
    let len = (pages * PAGE) as usize;
    // SAFETY: a fresh anonymous mapping.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED);
    // SAFETY: our own mapping; a huge page would fill the gap.
    unsafe { libc::madvise(p, len, libc::MADV_NOHUGEPAGE) };
    let base = p as u64;
    let ranges = [
        (base, base + (pages - 1) * PAGE),
        (base + (pages - 1) * PAGE, base + pages * PAGE),
    ];
    let mut map = Pagemap::open(std::process::id() as i32).unwrap();
    for scan in [true, false] {
        map.scan = scan;
        assert_eq!(map.with_data(&ranges[..1]).unwrap(), [false]);
    }
    // SAFETY: the last page of the mapping.
    unsafe { ((base + (pages - 1) * PAGE) as *mut u8).write_volatile(1) };
    for scan in [true, false] {
        map.scan = scan;
        assert_eq!(map.with_data(&ranges).unwrap(), [false, true]);
        assert_eq!(map.with_data(&[(base, base + pages * PAGE)]).unwrap(), [true]);
    }
    // SAFETY: our mapping, not used any more.
    unsafe { libc::munmap(p, len) };
}

#[test]
fn guards_are_told_from_data_in_every_way() {
    if guards::support() == Guards::None {
        return; // there are none
    }
    let len = 64 * PAGE as usize;
    // SAFETY: a fresh anonymous mapping.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED);
    let base = p as u64;
    let at = |page: u64| base + page * PAGE;
    for page in 2..20 {
        // SAFETY: within the mapping.
        unsafe { (at(page) as *mut u8).write_volatile(1) };
    }
    for (page, count) in [(5, 2), (19, 3), (63, 1)] {
        // SAFETY: within the mapping; nothing touches these pages any more.
        let r = unsafe { libc::madvise(at(page) as *mut libc::c_void, (count * PAGE) as usize, guards::INSTALL) };
        assert_eq!(r, 0);
    }
    let mut map = Pagemap::open(std::process::id().cast_signed()).unwrap();
    // Where a scan tells, there is one.
    for (known, scan) in [(map.guards, map.scan), (Guards::Silent, map.scan), (Guards::Silent, false)] {
        (map.scan, map.guards) = (scan, known);
        let (mut data, mut found) = (Vec::new(), vec![(u64::MAX - 1, u64::MAX)]);
        map.data_and_guards(base, base + len as u64, &mut data, &mut found).unwrap();
        assert_eq!(data, [(at(2), at(5)), (at(7), at(19))], "{known:?} {scan}");
        let guards = [(at(5), at(7)), (at(19), at(22)), (at(63), at(64))];
        assert_eq!(found[1..], guards, "{known:?} {scan}");
        found.clear();
        map.guards(base, base + len as u64, &mut found).unwrap();
        assert_eq!(found, guards, "{known:?} {scan}");
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let numbers: Vec<u32> = release.split(['.', '-', '+', '\n']).map_while(|n| n.parse().ok()).collect();
    let tells = (numbers[0], numbers[1]) >= (6, 16);
    assert_eq!([at(5), at(8)].map(scan::scan_tells_guard), [tells, false]);
    // SAFETY: our mapping, not used any more.
    unsafe { libc::munmap(p, len) };
}

#[test]
fn what_a_forked_process_has_written_is_not_in_common() {
    let (len, me) = (20 * PAGE as usize, std::process::id().cast_signed());
    // SAFETY: a fresh anonymous mapping.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED);
    let base = p as u64;
    // SAFETY: our own mapping; a huge page would be copied as a whole.
    unsafe { libc::madvise(p, len, libc::MADV_NOHUGEPAGE) };
    let write = |page: usize, value: u8| {
        // SAFETY: within the mapping.
        unsafe { p.cast::<u8>().add(page * PAGE as usize).write_volatile(value) };
    };
    (2..18).for_each(|page| write(page, 1));
    let (mut ready, tell) = io::pipe().unwrap();
    // SAFETY: the child writes to memory, says so and waits for its end.
    let child = unsafe { libc::fork() };
    if child == 0 {
        [4, 5, 9, 19].into_iter().for_each(|page| write(page, 2));
        io::Write::write_all(&mut &tell, &[1]).ok();
        loop {
            // SAFETY: has no preconditions.
            unsafe { libc::pause() };
        }
    }
    io::Read::read_exact(&mut ready, &mut [0]).unwrap();
    let (own, other) = (Pagemap::open(me).unwrap(), Pagemap::open(child).unwrap());
    let mut told = false;
    own.entries(base + 2 * PAGE, base + 3 * PAGE, |_, entry| told = frame(entry).is_some())
        .unwrap();
    let mut found = Vec::new();
    own.common(&other, base, base + len as u64, &mut found).unwrap();
    let expected = [(2, 4), (6, 9), (10, 18)].map(|(from, to)| (base + from * PAGE, base + to * PAGE));
    assert_eq!(found, if told { expected.to_vec() } else { Vec::new() });
    // SAFETY: our own child, which is waited for; and our own mapping, which nobody uses any more.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        libc::munmap(p, len);
    }
}

#[test]
fn both_ways_find_the_written_pages_and_only_those() {
    let len = 64 * PAGE as usize;
    // SAFETY: a fresh anonymous mapping.
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED);
    let base = p as u64;
    for page in [3usize, 4, 9] {
        // SAFETY: within the mapping.
        unsafe { p.cast::<u8>().add(page * PAGE as usize).write_volatile(1) };
    }
    // SAFETY: within the mapping; a read of an untouched page maps the zero page.
    unsafe { p.cast::<u8>().add(20 * PAGE as usize).read_volatile() };
    let expected = vec![(base + 3 * PAGE, base + 5 * PAGE), (base + 9 * PAGE, base + 10 * PAGE)];
    let mut map = Pagemap::open(std::process::id() as i32).unwrap();
    let mut out = Vec::new();
    map.data_ranges(base, base + len as u64, &mut out).unwrap();
    if !map.scan {
        // Older kernels do not tell the zero page from others.
        assert_eq!(out.pop(), Some((base + 20 * PAGE, base + 21 * PAGE)));
    }
    assert_eq!(out, expected);
    let pages = [(0, 3), (3, 4), (5, 9), (9, 10), (10, 20), (20, 21), (21, 64)];
    let ranges = pages.map(|(from, to)| (base + from * PAGE, base + to * PAGE));
    let expected_of_each = vec![false, true, false, true, false, !map.scan, false];
    assert_eq!(map.with_data(&ranges).unwrap(), expected_of_each);
    assert_eq!(map.with_data(&[(base, base + len as u64)]).unwrap(), [true]);
    map.scan = false;
    let mut looks = map.with_data(&ranges).unwrap();
    looks[5] = expected_of_each[5];
    assert_eq!(looks, expected_of_each);
    let mut slow = Vec::new();
    map.data_ranges(base, base + len as u64, &mut slow).unwrap();
    assert!(expected.iter().all(|r| slow.contains(r)));
    // SAFETY: our mapping, not used any more.
    unsafe { libc::munmap(p, len) };
}
