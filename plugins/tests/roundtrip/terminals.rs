//! Pseudo-terminals: settings, size, data in flight, an unfinished line, controlling terminals.

use crate::harness::Case;
use crate::util::*;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("pty_settings_and_data", prepare, verify),
        Case {
            setup: |_| {
                // SAFETY: numbers only.
                unsafe {
                    ok(libc::setsid());
                    ok(libc::ioctl(21, libc::TIOCSCTTY, 0));
                }
            },
            ..Case::new("pty_controlling_terminal", prepare, verify_session)
        },
        Case::new("pty_packet_mode", prepare_packet, verify_packet),
    ]
}

fn prepare() {
    let (mut m, mut s) = (0, 0);
    let size = libc::winsize {
        ws_row: 33,
        ws_col: 99,
        ws_xpixel: 1,
        ws_ypixel: 2,
    };
    // SAFETY: room for two numbers; the size is valid for reading.
    ok(unsafe { libc::openpty(&mut m, &mut s, std::ptr::null_mut(), std::ptr::null(), &size) });
    place_raw(m, 20);
    place_raw(s, 21);
    let mut t = settings(21);
    t.c_lflag &= !libc::ECHO;
    t.c_cc[libc::VERASE] = b'#';
    // SAFETY: valid settings.
    ok(unsafe { libc::tcsetattr(21, libc::TCSANOW, &t) });
    write(21, b"output\n");
    write(20, b"a line\nunfinished");
    poll(21, libc::POLLIN, 100);
}

fn settings(fd: i32) -> libc::termios {
    // SAFETY: all-zero bytes are valid settings, which the call overwrites.
    unsafe {
        let mut t = std::mem::zeroed();
        ok(libc::tcgetattr(fd, &mut t));
        t
    }
}

fn verify(_: usize) {
    // SAFETY: all-zero bytes are a valid size, which the call overwrites.
    let size: libc::winsize = unsafe {
        let mut w = std::mem::zeroed();
        ok(libc::ioctl(21, libc::TIOCGWINSZ, &mut w));
        w
    };
    assert_eq!((size.ws_row, size.ws_col, size.ws_ypixel), (33, 99, 2));
    let t = settings(21);
    assert_eq!((t.c_lflag & libc::ECHO, t.c_cc[libc::VERASE]), (0, b'#'));
    assert_ne!(t.c_lflag & libc::ICANON, 0);
    assert_ne!(poll(20, libc::POLLIN, 1000), 0);
    assert_eq!(read(20, 100), b"output\r\n");
    assert_eq!(read(21, 100), b"a line\n");
    assert_eq!(poll(21, libc::POLLIN, 0), 0, "the second line is not finished");
    write(20, b"##ed!\n");
    assert_ne!(poll(21, libc::POLLIN, 1000), 0);
    assert_eq!(read(21, 100), b"unfinished!\n", "line editing reaches what was typed before");
}

fn verify_session(_: usize) {
    open(std::path::Path::new("/dev/tty"), libc::O_RDWR, 25);
    write(25, b"!");
    assert_ne!(poll(20, libc::POLLIN, 1000), 0);
    let all = read_exact(20, 9);
    assert_eq!(all, b"output\r\n!");
    let mut group = 0;
    // SAFETY: writes one number.
    ok(unsafe { libc::ioctl(25, libc::TIOCGPGRP, &mut group) });
    assert_eq!(group, std::process::id() as i32);
}

fn prepare_packet() {
    prepare();
    let on = 1;
    // SAFETY: reads one number.
    ok(unsafe { libc::ioctl(20, libc::TIOCPKT, &on) });
    write(21, b"more");
}

fn verify_packet(_: usize) {
    let mut all = Vec::new();
    while all.len() < 12 {
        assert_ne!(poll(20, libc::POLLIN, 1000), 0);
        let part = read(20, 100);
        assert_eq!(part[0], 0, "packets of data begin with a zero byte");
        all.extend_from_slice(&part[1..]);
    }
    assert_eq!(all, b"output\r\nmore");
}
