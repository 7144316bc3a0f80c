//! TCP and UDP: data in flight, full buffers, backlog, half-closed and dead connections, options.

use crate::harness::{volatile, Case};
use crate::util::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::FromRawFd;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case {
            processes: 2,
            setup: |i| close(if i == 0 { 21 } else { 22 }),
            ..Case::new("tcp_data_both_ways", prepare_pair, verify_pair)
        },
        Case::new("tcp_buffers_full_both_ways", prepare_full, verify_full),
        Case::new("tcp_v6_and_mapped", prepare_v6, verify_v6),
        Case::new("tcp_half_closed", prepare_half, verify_half),
        Case::new("tcp_peer_closed_with_data", prepare_closed, verify_closed),
        Case::new("tcp_backlog", prepare_backlog, verify_backlog),
        Case::new("tcp_backlog_with_data", prepare_backlog_data, verify_backlog_data),
        Case::new("tcp_unconnected_bound_listening", prepare_states, verify_states),
        Case::new("tcp_options", prepare_options, verify_options),
        Case::new("udp_datagrams", prepare_udp, verify_udp),
    ]
}

fn connected(at: (i32, i32, i32), host: &str) {
    let l = TcpListener::bind((host, 0)).unwrap();
    let c = TcpStream::connect(l.local_addr().unwrap()).unwrap();
    let s = l.accept().unwrap().0;
    place(l, at.0);
    place(c, at.1);
    place(s, at.2);
}

fn stream(fd: i32) -> std::mem::ManuallyDrop<TcpStream> {
    // SAFETY: the number is a socket of the test, and stays open.
    std::mem::ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(fd) })
}

fn remember(name: &str, text: String) {
    std::fs::write(volatile().join(name), text).unwrap();
}

fn recall(name: &str) -> String {
    std::fs::read_to_string(volatile().join(name)).unwrap()
}

fn addresses(fd: i32) -> String {
    format!("{:?} {:?}", stream(fd).local_addr().unwrap(), stream(fd).peer_addr().unwrap())
}

fn prepare_pair() {
    connected((20, 21, 22), "127.0.0.1");
    write(21, b"to the server");
    write(22, &pattern(50_000, 20));
    remember("a", addresses(21));
    remember("b", addresses(22));
}

fn verify_pair(i: usize) {
    if i == 0 {
        assert_eq!(addresses(22), recall("b"));
        assert_eq!(read_exact(22, 13), b"to the server");
        write(22, b"more");
        close(22);
        return;
    }
    assert_eq!(addresses(21), recall("a"));
    assert_eq!(read_exact(21, 50_004)[50_000..], *b"more");
    assert_eq!(read(21, 1), b"", "the other end is closed, and nobody else holds it");
}

fn fill_up(fd: i32, seed: u8) -> usize {
    set_nonblock(fd);
    let chunk = pattern(8192, seed);
    let mut n = 0;
    loop {
        // SAFETY: `chunk` is valid for reading.
        let r = unsafe { libc::write(fd, chunk[n % 8192..].as_ptr().cast(), 8192 - n % 8192) };
        if r > 0 {
            n += r as usize;
        } else if poll(fd, libc::POLLOUT, 100) == 0 {
            return n;
        }
    }
}

fn check_full(fd: i32, n: usize, seed: u8) {
    let chunk = pattern(8192, seed);
    let mut at = 0;
    while at < n {
        assert_ne!(poll(fd, libc::POLLIN, 5000), 0, "{at} of {n} bytes came");
        let got = read(fd, (n - at).min(8192 - at % 8192));
        assert_eq!(got, chunk[at % 8192..at % 8192 + got.len()], "at byte {at} of {n}");
        at += got.len();
    }
}

fn prepare_full() {
    connected((20, 21, 22), "127.0.0.1");
    let (a, b) = (fill_up(21, 21), fill_up(22, 22));
    remember("n", format!("{a} {b}"));
}

fn verify_full(_: usize) {
    let n: Vec<usize> = recall("n").split(' ').map(|v| v.parse().unwrap()).collect();
    check_full(22, n[0], 21);
    check_full(21, n[1], 22);
    assert_eq!(poll(21, libc::POLLIN, 0) & libc::POLLIN, 0);
    assert_eq!(poll(22, libc::POLLIN, 0) & libc::POLLIN, 0);
    write(21, b"x");
    assert_ne!(poll(22, libc::POLLIN, 5000), 0);
    assert_eq!(read(22, 9), b"x");
}

fn prepare_v6() {
    connected((20, 21, 22), "::1");
    let l = TcpListener::bind("[::]:0").unwrap();
    let c = TcpStream::connect(("127.0.0.1", l.local_addr().unwrap().port())).unwrap();
    place(l.accept().unwrap().0, 25);
    place(l, 23);
    place(c, 24);
    for fd in [21, 22, 24, 25] {
        write(fd, &[fd as u8]);
        remember(&format!("{fd}"), addresses(fd));
    }
}

fn verify_v6(_: usize) {
    for (fd, from) in [(21, 22), (22, 21), (24, 25), (25, 24)] {
        assert_eq!(addresses(fd), recall(&format!("{fd}")));
        assert_eq!(read(fd, 10), [from as u8]);
    }
}

fn prepare_half() {
    connected((20, 21, 22), "127.0.0.1");
    write(21, b"all I have to say");
    stream(21).shutdown(std::net::Shutdown::Write).unwrap();
}

fn verify_half(_: usize) {
    assert_eq!(read(22, 100), b"all I have to say");
    assert_eq!(read(22, 100), b"");
    write(22, b"answer");
    assert_eq!(read_exact(21, 6), b"answer");
    assert_eq!(poll(21, libc::POLLIN, 0) & libc::POLLIN, 0);
}

fn prepare_closed() {
    connected((20, 21, 22), "127.0.0.1");
    write(21, b"bye");
    close(21);
    poll(22, libc::POLLRDHUP, 1000);
}

fn verify_closed(_: usize) {
    assert_eq!(read(22, 100), b"bye");
    assert_eq!(read(22, 100), b"");
}

fn prepare_backlog() {
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    for at in [21, 22] {
        place(TcpStream::connect(l.local_addr().unwrap()).unwrap(), at);
    }
    place(l, 20);
}

fn accept(fd: i32) -> (TcpStream, u16) {
    // SAFETY: the number is a listening socket of the test, and stays open.
    let l = std::mem::ManuallyDrop::new(unsafe { TcpListener::from_raw_fd(fd) });
    let (s, from) = l.accept().unwrap();
    (s, from.port())
}

fn verify_backlog(_: usize) {
    for at in [21, 22] {
        write(at, &[at as u8]);
        let (mut s, port) = accept(20);
        assert_eq!(port, stream(at).local_addr().unwrap().port());
        let mut b = [0];
        s.read_exact(&mut b).unwrap();
        assert_eq!(b[0], at as u8);
    }
}

fn prepare_backlog_data() {
    prepare_backlog();
    write(21, b"early bird");
    stream(21).shutdown(std::net::Shutdown::Write).unwrap();
    write(22, &pattern(30_000, 5));
    remember("a", addresses(21));
    remember("b", addresses(22));
}

fn verify_backlog_data(_: usize) {
    assert_eq!((addresses(21), addresses(22)), (recall("a"), recall("b")));
    let (mut s, _) = accept(20);
    let mut all = Vec::new();
    s.read_to_end(&mut all).unwrap();
    assert_eq!(all, b"early bird");
    s.write_all(b"worm").unwrap();
    assert_eq!(read_exact(21, 4), b"worm");
    let (mut s, _) = accept(20);
    let mut all = vec![0; 30_000];
    s.read_exact(&mut all).unwrap();
    assert_eq!(all, pattern(30_000, 5));
    write(22, b"!");
    s.read_exact(&mut all[..1]).unwrap();
}

fn prepare_states() {
    // SAFETY: numbers only.
    place_raw(ok(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }), 20);
    let l = TcpListener::bind("127.0.0.1:0").unwrap();
    remember("port", l.local_addr().unwrap().port().to_string());
    place(l, 21);
    // SAFETY: numbers only.
    place_raw(ok(unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) }), 22);
    let addr = [2u8, 0, 0, 0, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: `addr` is an IPv4 address.
    ok(unsafe { libc::bind(22, addr.as_ptr().cast(), 16) });
    remember("bound", stream(22).local_addr().unwrap().port().to_string());
}

fn verify_states(_: usize) {
    let port: u16 = recall("port").parse().unwrap();
    assert_eq!(stream(22).local_addr().unwrap().port().to_string(), recall("bound"));
    assert!(stream(22).peer_addr().is_err() && stream(20).peer_addr().is_err());
    let c = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let (_, from) = accept(21);
    assert_eq!(from, c.local_addr().unwrap().port());
}

fn prepare_options() {
    connected((20, 21, 22), "127.0.0.1");
    stream(21).set_nodelay(true).unwrap();
    stream(21)
        .set_read_timeout(Some(std::time::Duration::from_millis(1500)))
        .unwrap();
    let (tos, prio) = (0x10, 3);
    for (level, o, v) in [
        (libc::IPPROTO_IP, libc::IP_TOS, tos),
        (libc::SOL_SOCKET, libc::SO_PRIORITY, prio),
    ] {
        // SAFETY: an integer option.
        ok(unsafe { libc::setsockopt(21, level, o, (&raw const v).cast(), 4) });
    }
}

fn verify_options(_: usize) {
    assert!(stream(21).nodelay().unwrap() && !stream(22).nodelay().unwrap());
    assert_eq!(stream(21).read_timeout().unwrap().unwrap().as_millis(), 1500);
    let (mut v, mut l) = (0i32, 4u32);
    // SAFETY: an integer option.
    ok(unsafe { libc::getsockopt(21, libc::SOL_SOCKET, libc::SO_PRIORITY, (&raw mut v).cast(), &mut l) });
    assert_eq!(v, 3);
}

fn prepare_udp() {
    let a = UdpSocket::bind("127.0.0.1:0").unwrap();
    let b = UdpSocket::bind("127.0.0.1:0").unwrap();
    let gone = UdpSocket::bind("127.0.0.1:0").unwrap();
    b.connect(a.local_addr().unwrap()).unwrap();
    b.send(b"one").unwrap();
    gone.send_to(b"two two", a.local_addr().unwrap()).unwrap();
    b.send(b"").unwrap();
    b.send(&pattern(9000, 3)).unwrap();
    remember(
        "ports",
        format!("{} {}", b.local_addr().unwrap().port(), gone.local_addr().unwrap().port()),
    );
    place(a, 20);
    place(b, 21);
}

fn verify_udp(_: usize) {
    let p: Vec<u16> = recall("ports").split(' ').map(|v| v.parse().unwrap()).collect();
    // SAFETY: the number is a socket of the test.
    let a = unsafe { UdpSocket::from_raw_fd(20) };
    let mut buf = vec![0; 10_000];
    for (data, port) in [
        (b"one".to_vec(), p[0]),
        (b"two two".to_vec(), p[1]),
        (Vec::new(), p[0]),
        (pattern(9000, 3), p[0]),
    ] {
        let (n, from) = a.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..n], from.port()), (&data[..], port));
    }
    write(21, b"connected");
    assert_eq!(a.recv(&mut buf).unwrap(), 9);
}
