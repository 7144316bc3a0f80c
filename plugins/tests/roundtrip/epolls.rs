//! epoll: entries, closed numbers, nesting, edge-triggered and one-shot entries.

use crate::harness::Case;
use crate::util::*;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("epoll_entries_and_nesting", prepare, verify),
        Case::new(
            "epoll_number_closed_while_the_description_lives",
            prepare_closed,
            verify_closed,
        ),
        Case::new("epoll_one_shot_used", prepare_used, verify_used),
        Case::new("epoll_edges_seen_and_unseen", prepare_edges, verify_edges),
    ]
}

fn create(at: i32) {
    // SAFETY: a number.
    place_raw(ok(unsafe { libc::epoll_create1(0) }), at);
}

fn ctl(ep: i32, op: i32, fd: i32, events: i32, data: u64) {
    let mut e = libc::epoll_event {
        events: events as u32,
        u64: data,
    };
    // SAFETY: `e` is valid for reading.
    ok(unsafe { libc::epoll_ctl(ep, op, fd, &mut e) });
}

fn ready(ep: i32) -> Vec<(u32, u64)> {
    let mut e = [libc::epoll_event { events: 0, u64: 0 }; 8];
    // SAFETY: room for eight events.
    let n = ok(unsafe { libc::epoll_wait(ep, e.as_mut_ptr(), 8, 0) });
    let mut out: Vec<_> = e[..n as usize].iter().map(|e| (e.events, e.u64)).collect();
    out.sort_unstable();
    out
}

const IN: u32 = libc::EPOLLIN as u32;

fn prepare() {
    create(20);
    create(21);
    pipe((22, 23), 0);
    pipe((24, 25), 0);
    ctl(21, libc::EPOLL_CTL_ADD, 22, libc::EPOLLIN, u64::MAX - 5);
    ctl(21, libc::EPOLL_CTL_ADD, 24, libc::EPOLLIN | libc::EPOLLET, 24);
    ctl(20, libc::EPOLL_CTL_ADD, 21, libc::EPOLLIN, 7);
    write(23, b"x");
}

fn verify(_: usize) {
    assert_eq!(ready(20), [(IN, 7)]);
    assert_eq!(ready(21), [(IN, u64::MAX - 5)]);
    read(22, 1);
    assert_eq!(ready(20), []);
    write(25, b"y");
    assert_eq!(ready(21), [(IN, 24)]);
    assert_eq!(ready(21), [], "edge triggered");
    ctl(21, libc::EPOLL_CTL_DEL, 22, 0, 0);
}

fn prepare_closed() {
    create(20);
    pipe((22, 23), 0);
    ctl(20, libc::EPOLL_CTL_ADD, 22, libc::EPOLLIN, 1);
    dup(22, 30);
    close(22);
    pipe((22, 24), 0);
    ctl(20, libc::EPOLL_CTL_ADD, 22, libc::EPOLLIN, 2);
}

fn verify_closed(_: usize) {
    write(23, b"old");
    assert_eq!(ready(20), [(IN, 1)]);
    write(24, b"new");
    assert_eq!(ready(20), [(IN, 1), (IN, 2)]);
    assert!(same_description(30, 30) && !same_description(30, 22));
}

fn prepare_used() {
    create(20);
    pipe((22, 23), 0);
    ctl(20, libc::EPOLL_CTL_ADD, 22, libc::EPOLLIN | libc::EPOLLONESHOT, 1);
    write(23, b"x");
    assert_eq!(ready(20).len(), 1);
}

fn verify_used(_: usize) {
    assert_eq!(ready(20), [], "it has reported and is not armed");
    ctl(20, libc::EPOLL_CTL_MOD, 22, libc::EPOLLIN | libc::EPOLLONESHOT, 1);
    assert_eq!(ready(20), [(IN, 1)]);
}

/// Two edges: one has been seen, one has not; and a one-shot entry that has something to report.
fn prepare_edges() {
    create(20);
    for (i, at) in [(0u64, 22), (1, 24), (2, 26)] {
        pipe((at, at + 1), 0);
        let mode = if i == 2 { libc::EPOLLONESHOT } else { libc::EPOLLET };
        ctl(20, libc::EPOLL_CTL_ADD, at, libc::EPOLLIN | mode, i);
    }
    write(23, b"x");
    assert_eq!(ready(20), [(IN, 0)]);
    write(25, b"y");
    write(27, b"z");
}

fn verify_edges(_: usize) {
    assert_eq!(ready(20), [(IN, 1), (IN, 2)]);
    assert_eq!(ready(20), []);
    write(23, b"x");
    assert_eq!(ready(20), [(IN, 0)]);
}
