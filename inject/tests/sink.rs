//! The way of pages into files, outside of a snapshot child: whatever is refused on the way, all pages end up where they belong.

// Raw system calls, as in the program itself.
#![allow(clippy::undocumented_unsafe_blocks)]

use belay_abi::inject::Loan;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

#[path = "../src/sink.rs"]
mod sink;

/// System call numbers of x86-64.
mod libc_nr {
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const PWRITE64: usize = 18;
    pub(crate) const MADVISE: usize = 28;
    pub(crate) const FCNTL: usize = 72;
    pub(crate) const FADVISE64: usize = 221;
    pub(crate) const SYNC_FILE_RANGE: usize = 277;
    pub(crate) const PWRITEV: usize = 296;
}

mod shared {
    pub(crate) const PROT_READ_WRITE: usize = 3;

    /// The "agent" is this process.
    pub(crate) fn open_in_agent(_: i32, fd: i32, flags: usize) -> isize {
        let path = format!("/proc/self/fd/{fd}\0");
        unsafe { belay_abi::syscall!(2usize, path.as_ptr(), flags, 0usize) }
    }
}

const PAGE: usize = belay_abi::PAGE as usize;
const PAGES: usize = 1000;

#[repr(C, align(4096))]
struct Memory([[u8; PAGE]; PAGES]);

fn loan(file: &File, first: u32, direct: bool) -> Loan {
    Loan {
        chunk: 1,
        fd: file.as_raw_fd(),
        first,
        pages: PAGES as u32,
        direct: direct.into(),
        pad: 0,
        used: 0.into(),
        done: 0.into(),
        hashes: 0,
    }
}

/// Writes all pages, after `first` of them what is in the file already; a flush comes after each number of pages in
/// `flushes`, besides those that the sink asks for.
fn write(stage_bytes: u64, direct: bool, frugal: bool, first: u32, flushes: &[usize]) {
    let mut memory = Box::new(Memory([[0; PAGE]; PAGES]));
    for (i, page) in memory.0.iter_mut().enumerate() {
        page.fill((i % 251) as u8 + 1);
    }
    let name = format!("belay-sink-{}-{stage_bytes}-{direct}-{frugal}-{first}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let loan = loan(&file, first, direct);
    let mut sink = sink::Sink::new(stage_bytes, frugal);
    assert_eq!(sink.is_frugal(), frugal);
    unsafe {
        assert_eq!(sink.open(0, &loan), 0);
        for (i, page) in memory.0.iter().enumerate() {
            if sink.add(page.as_ptr().addr() as u64) || flushes.contains(&i) {
                assert_eq!(sink.flush(), 0);
                assert!(sink.is_empty());
            }
        }
        assert_eq!(sink.close(), 0);
    }
    let mut back = [0; PAGE];
    for (i, page) in memory.0.iter().enumerate() {
        file.read_exact_at(&mut back, (first as usize + i) as u64 * PAGE as u64)
            .unwrap();
        assert!(back == *page, "page {i}; {stage_bytes} {direct} {frugal} {first} {flushes:?}");
    }
    assert_eq!(file.metadata().unwrap().len(), (first as usize + PAGES) as u64 * PAGE as u64);
}

#[test]
fn all_pages_arrive_in_order() {
    for (first, flushes) in [(0, &[][..]), (3, &[2, 70, 71, 500]), (7, &[998])] {
        for frugal in [false, true] {
            write(0, true, frugal, first, flushes);
            write(1 << 20, false, frugal, first, flushes);
            write(1 << 20, true, frugal, first, flushes);
        }
    }
}

/// A stage that is no whole number of blocks is refused by the disk when it is full for the first time: in the middle
/// of what was gathered.
#[test]
fn what_the_disk_refuses_goes_through_the_page_cache() {
    for stage in [(1 << 20) + 100, (256 << 10) + 8, 5000] {
        for flushes in [&[][..], &[2], &[2, 70, 71, 500]] {
            write(stage, true, false, 0, flushes);
            write(stage, true, true, 0, flushes);
        }
    }
}

#[test]
fn an_error_is_told() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut sink = sink::Sink::new(1 << 20, false);
    let memory = Box::new(Memory([[1; PAGE]; PAGES]));
    unsafe {
        assert_eq!(sink.open(0, &loan(&full, 0, true)), 0);
        sink.add(memory.0[0].as_ptr().addr() as u64);
        assert_eq!(sink.flush(), 0, "on the stage");
        assert_eq!(sink.close(), 28, "the device is full");
    }
}
