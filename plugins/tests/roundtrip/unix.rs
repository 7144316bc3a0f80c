//! `AF_UNIX` sockets: queues, names, backlog, descriptors in flight, shutdown, peers that are gone.

use crate::harness::{volatile, Case};
use crate::util::*;
use std::io::Write;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case {
            processes: 2,
            setup: |i| close(20 + i as i32),
            ..Case::new("unix_stream_pair_with_data", prepare_pair, verify_pair)
        },
        Case::new("unix_descriptors_in_flight", prepare_rights, verify_rights),
        Case::new("unix_socket_in_its_own_queue", prepare_cycle, verify_cycle),
        Case::new("unix_packets_keep_their_bounds", prepare_packets, verify_packets),
        Case::new("unix_named_stream", prepare_named, verify_named),
        Case::new("unix_abstract_stream", prepare_abstract, verify_abstract),
        Case::new("unix_accepted_without_listener", prepare_orphan, verify_orphan),
        Case::new("unix_backlog", prepare_backlog, verify_backlog),
        Case {
            refused: Some("waits to be accepted with data"),
            ..Case::new("unix_backlog_with_data_is_refused", prepare_backlog_data, verify_backlog_data)
        },
        Case::new("unix_datagrams", prepare_datagrams, verify_datagrams),
        Case::new("unix_half_closed", prepare_half, verify_half),
        Case::new("unix_peer_gone", prepare_gone, verify_gone),
        Case::new("unix_full_buffer", prepare_full, verify_full),
        Case::new("unix_options", prepare_options, verify_options),
        Case::new("unix_relative_name", prepare_relative, verify_relative),
    ]
}

fn prepare_pair() {
    socketpair(libc::SOCK_STREAM, (20, 21));
    write(20, b"to 21");
    write(21, &pattern(100_000, 4));
    set_nonblock(21);
}

fn verify_pair(i: usize) {
    if i == 0 {
        assert!(!is_open(20));
        assert_eq!(read(21, 100), b"to 21");
        assert_ne!(flags(21) & libc::O_NONBLOCK, 0);
        assert_eq!(try_read(21, 1), Err(libc::EAGAIN));
        write(21, b"end");
        close(21);
    } else {
        assert!(!is_open(21));
        assert_eq!(read_exact(20, 100_000), pattern(100_000, 4));
        assert_eq!(read_exact(20, 3), b"end");
        assert_eq!(read(20, 1), b"", "nobody else holds the other end");
    }
}

/// Sends `data` with descriptors.
fn send_fds(fd: i32, data: &[u8], fds: &[i32]) {
    let mut control = [0u64; 16];
    let mut iov = libc::iovec {
        iov_base: data.as_ptr() as *mut _,
        iov_len: data.len(),
    };
    // SAFETY: the message is laid out in valid buffers below.
    unsafe {
        let mut m: libc::msghdr = std::mem::zeroed();
        m.msg_iov = &mut iov;
        m.msg_iovlen = 1;
        m.msg_control = control.as_mut_ptr().cast();
        m.msg_controllen = libc::CMSG_SPACE(4 * fds.len() as u32) as usize;
        let h = libc::CMSG_FIRSTHDR(&m);
        (*h).cmsg_level = libc::SOL_SOCKET;
        (*h).cmsg_type = libc::SCM_RIGHTS;
        (*h).cmsg_len = libc::CMSG_LEN(4 * fds.len() as u32) as usize;
        std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(h).cast(), fds.len());
        assert_eq!(libc::sendmsg(fd, &m, 0), data.len() as isize);
    }
}

/// Receives at most `max` bytes with descriptors.
fn receive_fds(fd: i32, max: usize) -> (Vec<u8>, Vec<i32>) {
    let mut control = [0u64; 32];
    let mut buf = vec![0u8; max];
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: max,
    };
    let mut fds = Vec::new();
    // SAFETY: the message is laid out in valid buffers.
    unsafe {
        let mut m: libc::msghdr = std::mem::zeroed();
        m.msg_iov = &mut iov;
        m.msg_iovlen = 1;
        m.msg_control = control.as_mut_ptr().cast();
        m.msg_controllen = 256;
        let n = libc::recvmsg(fd, &mut m, 0);
        assert!(n >= 0, "{}", std::io::Error::last_os_error());
        buf.truncate(n as usize);
        let h = libc::CMSG_FIRSTHDR(&m);
        if !h.is_null() {
            let n = ((*h).cmsg_len - libc::CMSG_LEN(0) as usize) / 4;
            for i in 0..n {
                fds.push(libc::CMSG_DATA(h).cast::<i32>().add(i).read_unaligned());
            }
        }
    }
    (buf, fds)
}

fn prepare_rights() {
    socketpair(libc::SOCK_STREAM, (20, 21));
    pipe((22, 23), 0);
    write(23, b"in the pipe");
    write(20, b"plain");
    send_fds(20, b"with", &[22, 23]);
    write(20, b"tail");
    send_fds(20, b"again", &[22]);
    dup(22, 24);
    close(22);
    close(23);
}

fn verify_rights(_: usize) {
    let (data, fds) = receive_fds(21, 5);
    assert_eq!(
        (data.as_slice(), fds.len()),
        (&b"plain"[..], 0),
        "descriptors come with their own bytes"
    );
    let (data, fds) = receive_fds(21, 100);
    assert_eq!((data.as_slice(), fds.len()), (&b"with"[..], 2));
    assert!(same_description(fds[0], 24));
    write(fds[1], b"!");
    assert_eq!(read(24, 100), b"in the pipe!");
    assert_eq!(read_exact(21, 4), b"tail");
    let (data, fds) = receive_fds(21, 100);
    assert_eq!((data.as_slice(), fds.len()), (&b"again"[..], 1));
    assert!(same_description(fds[0], 24));
}

fn prepare_cycle() {
    socketpair(libc::SOCK_DGRAM, (20, 21));
    send_fds(20, b"self", &[21]);
    close(20);
    socketpair(libc::SOCK_STREAM, (22, 23));
    send_fds(22, b"x", &[23]);
}

fn verify_cycle(_: usize) {
    let (data, fds) = receive_fds(21, 100);
    assert_eq!(data, b"self");
    assert!(same_description(fds[0], 21));
    let (_, fds) = receive_fds(23, 100);
    assert!(same_description(fds[0], 23));
}

fn prepare_packets() {
    socketpair(libc::SOCK_SEQPACKET, (20, 21));
    for n in [3usize, 50_000, 1] {
        write(20, &pattern(n, 5));
    }
    socketpair(libc::SOCK_DGRAM, (22, 23));
    for n in [9usize, 1] {
        write(22, &pattern(n, 6));
    }
    // SAFETY: a datagram without bytes.
    assert_eq!(unsafe { libc::send(22, std::ptr::null(), 0, 0) }, 0);
    write(22, &pattern(30_000, 6));
}

fn verify_packets(_: usize) {
    for n in [3usize, 50_000, 1] {
        assert_eq!(read(21, 100_000), pattern(n, 5));
    }
    for n in [9usize, 1, 0, 30_000] {
        assert_eq!(read(23, 100_000), pattern(n, 6));
    }
    write(20, b"on");
    assert_eq!(read(21, 10), b"on");
    assert_eq!(poll(23, libc::POLLIN, 0), 0);
}

fn prepare_named() {
    let path = volatile().join("sock");
    let l = UnixListener::bind(&path).unwrap();
    let c = UnixStream::connect(&path).unwrap();
    let (mut s, _) = l.accept().unwrap();
    (&c).write_all(b"question").unwrap();
    s.write_all(b"answer").unwrap();
    place(l, 20);
    place(c, 21);
    place(s, 22);
}

fn name(fd: i32, peer: bool) -> Vec<u8> {
    let mut raw = [0u8; 128];
    let mut len = 128;
    let f = if peer { libc::getpeername } else { libc::getsockname };
    // SAFETY: `raw` has `len` bytes.
    ok(unsafe { f(fd, raw.as_mut_ptr().cast(), &mut len) });
    raw[2..len as usize].to_vec()
}

fn verify_named(_: usize) {
    let path = volatile().join("sock");
    assert_eq!(name(22, false), name(20, false));
    assert_eq!(name(21, true), name(20, false));
    assert!(name(21, false).is_empty());
    assert_eq!(read(22, 100), b"question");
    assert_eq!(read(21, 100), b"answer");
    let c = UnixStream::connect(&path).unwrap();
    (&c).write_all(b"new").unwrap();
    // SAFETY: accept without an address.
    let s = ok(unsafe { libc::accept(20, std::ptr::null_mut(), std::ptr::null_mut()) });
    assert_eq!(read(s, 100), b"new");
}

fn abstract_name() -> SocketAddr {
    use std::os::linux::net::SocketAddrExt;
    SocketAddr::from_abstract_name(volatile().to_str().unwrap()).unwrap()
}

fn prepare_abstract() {
    let l = UnixListener::bind_addr(&abstract_name()).unwrap();
    let c = UnixStream::connect_addr(&abstract_name()).unwrap();
    let (s, _) = l.accept().unwrap();
    (&s).write_all(b"hello").unwrap();
    place(l, 20);
    place(c, 21);
    place(s, 22);
}

fn verify_abstract(_: usize) {
    assert_eq!(name(22, false), name(20, false));
    assert_eq!(read(21, 100), b"hello");
    drop(UnixStream::connect_addr(&abstract_name()).unwrap());
}

fn prepare_orphan() {
    let path = volatile().join("sock");
    let l = UnixListener::bind(&path).unwrap();
    place(UnixStream::connect(&path).unwrap(), 21);
    place(UnixStream::connect(&path).unwrap(), 23);
    place(l.accept().unwrap().0, 22);
    place(l.accept().unwrap().0, 24);
    std::fs::remove_file(&path).unwrap();
    write(21, b"one");
    write(24, b"two");
}

fn verify_orphan(_: usize) {
    let path = volatile().join("sock");
    assert!(!path.exists());
    for fd in [22, 24] {
        assert_eq!(
            name(fd, false).strip_suffix(b"\0").unwrap(),
            path.to_str().unwrap().as_bytes()
        );
    }
    assert_eq!(read(22, 10), b"one");
    assert_eq!(read(23, 10), b"two");
}

fn prepare_backlog() {
    let path = volatile().join("sock");
    let l = UnixListener::bind(&path).unwrap();
    for at in [21, 22, 23] {
        place(UnixStream::connect(&path).unwrap(), at);
    }
    place(l, 20);
}

fn verify_backlog(_: usize) {
    for at in [21, 22, 23] {
        write(at, &[at as u8]);
        // SAFETY: accept without an address.
        let s = ok(unsafe { libc::accept(20, std::ptr::null_mut(), std::ptr::null_mut()) });
        assert_eq!(read(s, 10), [at as u8], "the order is kept");
    }
    set_nonblock(20);
    // SAFETY: accept without an address.
    assert_eq!(unsafe { libc::accept(20, std::ptr::null_mut(), std::ptr::null_mut()) }, -1);
}

fn prepare_backlog_data() {
    prepare_backlog();
    write(22, b"early");
}

fn verify_backlog_data(_: usize) {
    for at in [21, 22, 23] {
        // SAFETY: accept without an address.
        let s = ok(unsafe { libc::accept(20, std::ptr::null_mut(), std::ptr::null_mut()) });
        if at == 22 {
            assert_eq!(read(s, 10), b"early");
        }
    }
}

fn prepare_datagrams() {
    let (a, b, c) = (volatile().join("a"), volatile().join("b"), volatile().join("c"));
    let sa = UnixDatagram::bind(&a).unwrap();
    let sb = UnixDatagram::bind(&b).unwrap();
    let sc = UnixDatagram::unbound().unwrap();
    sb.send_to(b"from b", &a).unwrap();
    sc.send_to(b"from nobody", &a).unwrap();
    let gone = UnixDatagram::bind(&c).unwrap();
    gone.send_to(b"from c", &a).unwrap();
    drop(gone);
    sb.connect(&a).unwrap();
    sb.send(b"again").unwrap();
    place(sa, 20);
    place(sb, 21);
}

fn verify_datagrams(_: usize) {
    use std::os::fd::FromRawFd;
    // SAFETY: the test owns the number.
    let sa = unsafe { UnixDatagram::from_raw_fd(20) };
    let mut buf = [0u8; 100];
    let mut next = || {
        let (n, from) = sa.recv_from(&mut buf).unwrap();
        (
            buf[..n].to_vec(),
            from.as_pathname().map(|p| p.file_name().unwrap().to_owned()),
        )
    };
    assert_eq!(next(), (b"from b".to_vec(), Some("b".into())));
    assert_eq!(next(), (b"from nobody".to_vec(), None));
    let (data, _) = next();
    assert_eq!(data, b"from c");
    assert_eq!(next(), (b"again".to_vec(), Some("b".into())));
    assert_eq!(name(21, true), name(20, false));
    write(21, b"still connected");
    assert_eq!(next().0, b"still connected");
}

fn prepare_half() {
    socketpair(libc::SOCK_STREAM, (20, 21));
    write(20, b"rest");
    // SAFETY: numbers only.
    ok(unsafe { libc::shutdown(20, libc::SHUT_WR) });
}

fn verify_half(_: usize) {
    assert_eq!(read(21, 100), b"rest");
    assert_eq!(read(21, 100), b"");
    write(21, b"back");
    assert_eq!(read(20, 100), b"back");
    assert_eq!(poll(20, libc::POLLIN, 0), 0);
}

fn prepare_gone() {
    socketpair(libc::SOCK_STREAM, (20, 21));
    write(20, b"testament");
    close(20);
}

fn verify_gone(_: usize) {
    assert_ne!(poll(21, libc::POLLIN, 0) & libc::POLLHUP, 0);
    assert_eq!(read(21, 100), b"testament");
    assert_eq!(read(21, 100), b"");
}

fn prepare_full() {
    socketpair(libc::SOCK_STREAM, (20, 21));
    set_nonblock(20);
    let chunk = pattern(1000, 7);
    let mut n = 0usize;
    // SAFETY: `chunk` is valid for reading.
    while unsafe { libc::write(20, chunk.as_ptr().cast(), 1000) } == 1000 {
        n += 1;
    }
    std::fs::write(volatile().join("n"), n.to_string()).unwrap();
}

fn verify_full(_: usize) {
    let n: usize = std::fs::read_to_string(volatile().join("n")).unwrap().parse().unwrap();
    for _ in 0..n {
        assert_eq!(read_exact(21, 1000), pattern(1000, 7));
    }
    set_nonblock(21);
    assert_eq!(try_read(21, 1), Err(libc::EAGAIN));
}

fn getopt(fd: i32, o: i32) -> i32 {
    let mut v = 0;
    let mut l = 4;
    // SAFETY: an integer option.
    ok(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, o, (&raw mut v).cast(), &mut l) });
    v
}

fn setopt(fd: i32, o: i32, v: i32) {
    // SAFETY: an integer option.
    ok(unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, o, (&raw const v).cast(), 4) });
}

fn prepare_options() {
    socketpair(libc::SOCK_STREAM, (20, 21));
    setopt(20, libc::SO_PASSCRED, 1);
    setopt(20, libc::SO_SNDBUF, 20_000);
    setopt(21, libc::SO_PEEK_OFF, 2);
    write(20, b"abcdef");
}

fn verify_options(_: usize) {
    assert_eq!(getopt(20, libc::SO_PASSCRED), 1);
    assert_eq!(getopt(20, libc::SO_SNDBUF), 40_000);
    assert_eq!(getopt(21, libc::SO_PASSCRED), 0);
    assert_eq!(getopt(21, libc::SO_PEEK_OFF), 2);
    assert_eq!(read(21, 100), b"abcdef");
}

fn prepare_relative() {
    std::env::set_current_dir(volatile()).unwrap();
    let l = UnixListener::bind("rel").unwrap();
    place(UnixStream::connect("rel").unwrap(), 21);
    place(l.accept().unwrap().0, 22);
    place(l, 20);
}

fn verify_relative(_: usize) {
    assert_eq!(name(20, false), b"rel\0");
    assert_eq!(name(22, false), b"rel\0");
    drop(UnixStream::connect(volatile().join("rel")).unwrap());
}
