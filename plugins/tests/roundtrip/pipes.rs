//! Pipes and FIFOs: data in flight, capacity, packets, ends in several processes, ends that are gone.

use crate::harness::{durable, volatile, Case};
use crate::util::*;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("pipe_data_and_capacity", prepare_data, verify_data),
        Case::new("pipe_full_of_single_bytes", prepare_bytes, verify_bytes),
        Case::new("pipe_packets", prepare_packets, verify_packets),
        Case {
            processes: 2,
            setup: |i| close(if i == 0 { 20 } else { 21 }),
            ..Case::new("pipe_between_processes_ends", || pipe((20, 21), 0), verify_ends)
        },
        Case::new(
            "pipe_writer_gone",
            || {
                pipe((20, 21), 0);
                write(21, b"last words");
                close(21);
            },
            |_| {
                assert_eq!(read(20, 100), b"last words");
                assert_eq!(read(20, 100), b"");
            },
        ),
        Case::new(
            "pipe_reader_gone",
            || {
                pipe((20, 21), 0);
                close(20);
            },
            |_| assert_ne!(poll(21, libc::POLLOUT, 0) & libc::POLLERR, 0),
        ),
        Case::new("pipe_reopened_descriptions", prepare_reopened, verify_reopened),
        Case {
            between: || std::fs::remove_file(volatile().join("fifo")).unwrap(),
            ..Case::new("fifo_with_data", prepare_fifo, verify_fifo)
        },
        Case::new("fifo_only_writer_deleted", prepare_fifo_writer, verify_fifo_writer),
    ]
}

fn prepare_data() {
    pipe((20, 21), 0);
    fcntl(21, libc::F_SETPIPE_SZ, 1 << 20);
    set_nonblock(21);
    write(21, &pattern(700_000, 3));
}

fn verify_data(_: usize) {
    assert_eq!(fcntl(20, libc::F_GETPIPE_SZ, 0), 1 << 20);
    assert_ne!(flags(21) & libc::O_NONBLOCK, 0);
    assert_eq!(flags(20) & libc::O_NONBLOCK, 0);
    assert_eq!(read_exact(20, 700_000), pattern(700_000, 3));
    assert_eq!(poll(20, libc::POLLIN, 0), 0);
    write(21, b"new");
    assert_eq!(read(20, 10), b"new");
}

fn prepare_bytes() {
    pipe((20, 21), libc::O_NONBLOCK);
    let mut n = 0;
    // SAFETY: one byte is valid for reading.
    while unsafe { libc::write(21, [n as u8].as_ptr().cast(), 1) } == 1 {
        n += 1;
    }
    assert_eq!(n, 65536);
}

fn verify_bytes(_: usize) {
    let all = read_exact(20, 65536);
    assert!(all.iter().enumerate().all(|(i, b)| *b == i as u8));
    assert_eq!(try_read(20, 1), Err(libc::EAGAIN));
}

fn prepare_packets() {
    pipe((20, 21), libc::O_DIRECT);
    for n in [1usize, 100, 4096, 7] {
        write(21, &pattern(n, n as u8));
    }
}

fn verify_packets(_: usize) {
    for n in [1usize, 100, 4096, 7] {
        assert_eq!(read(20, 65536), pattern(n, n as u8));
    }
    assert_ne!(flags(21) & libc::O_DIRECT, 0);
}

fn verify_ends(i: usize) {
    if i == 0 {
        write(21, b"to the other");
        close(21);
    } else {
        assert_eq!(read_exact(20, 12), b"to the other");
        assert_eq!(read(20, 1), b"", "no hidden writer is left");
    }
}

fn prepare_reopened() {
    pipe((20, 21), 0);
    open(std::path::Path::new("/proc/self/fd/20"), libc::O_RDWR | libc::O_NONBLOCK, 22);
    write(22, b"abc");
}

fn verify_reopened(_: usize) {
    assert_eq!(
        flags(22) & (libc::O_ACCMODE | libc::O_NONBLOCK),
        libc::O_RDWR | libc::O_NONBLOCK
    );
    assert_eq!(flags(20) & libc::O_NONBLOCK, 0);
    write(21, b"def");
    assert_eq!(read(22, 10), b"abcdef");
}

fn make_fifo(path: &std::path::Path) {
    let c = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a valid C string.
    ok(unsafe { libc::mkfifo(c.as_ptr(), 0o600) });
}

fn prepare_fifo() {
    let path = volatile().join("fifo");
    make_fifo(&path);
    open(&path, libc::O_RDONLY | libc::O_NONBLOCK, 20);
    open(&path, libc::O_WRONLY, 21);
    write(21, b"in the fifo");
}

fn verify_fifo(_: usize) {
    assert_eq!(std::fs::read_link("/proc/self/fd/20").unwrap(), volatile().join("fifo"));
    assert_eq!(read(20, 100), b"in the fifo");
    let path = volatile().join("fifo");
    open(&path, libc::O_WRONLY | libc::O_NONBLOCK, 22);
    write(22, b"x");
    assert_eq!(read(20, 100), b"x");
}

fn prepare_fifo_writer() {
    let path = durable().join("fifo");
    make_fifo(&path);
    open(&path, libc::O_RDONLY | libc::O_NONBLOCK, 20);
    open(&path, libc::O_WRONLY, 21);
    write(21, b"kept");
    close(20);
    std::fs::remove_file(&path).unwrap();
}

fn verify_fifo_writer(_: usize) {
    assert!(!durable().join("fifo").exists());
    assert_ne!(poll(21, libc::POLLOUT, 0) & libc::POLLERR, 0);
    open(
        std::path::Path::new("/proc/self/fd/21"),
        libc::O_RDONLY | libc::O_NONBLOCK,
        22,
    );
    assert_eq!(read(22, 100), b"kept");
}
