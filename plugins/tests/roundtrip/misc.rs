//! eventfd, signalfd, timerfd, pidfd, inotify, locks, signal owners, and what is refused.

use crate::harness::{durable, Case};
use crate::util::*;
use std::ffi::CString;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("eventfd_signalfd_timerfd", prepare_events, verify_events),
        Case {
            processes: 2,
            setup: setup_pidfd,
            ..Case::new("pidfd_of_processes_alive_and_dead", prepare_dead, verify_pidfd)
        },
        Case::new("inotify_watch_numbers", prepare_inotify, verify_inotify),
        Case {
            between: || std::fs::write(durable().join("kind"), b"restart").unwrap(),
            ..Case::new("inotify_unread_events_become_an_overflow", prepare_unread, verify_unread)
        },
        Case {
            processes: 2,
            setup: setup_locks,
            ..Case::new("locks_of_every_kind", prepare_locks, verify_locks)
        },
        Case::new("signal_owner", prepare_owner, verify_owner),
        Case {
            between: drop_queue,
            ..Case::new("message_queues_by_name_and_without", prepare_queues, verify_queues)
        },
        Case {
            refused: Some("mq_notify"),
            ..Case::new("message_queue_with_notification_needs_the_process", prepare_notified, |_| ())
        },
    ]
}

fn prepare_events() {
    // SAFETY: plain calls with valid arguments.
    unsafe {
        place_raw(ok(libc::eventfd(5, libc::EFD_SEMAPHORE | libc::EFD_NONBLOCK)), 20);
        place_raw(ok(libc::eventfd(0, 0)), 21);
        write(21, &(u64::MAX - 1).to_ne_bytes());
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR2);
        place_raw(ok(libc::signalfd(-1, &set, 0)), 22);
        let mut spec: libc::itimerspec = std::mem::zeroed();
        spec.it_value.tv_sec = 1000;
        spec.it_interval.tv_sec = 7;
        for (at, clock) in [(23, libc::CLOCK_MONOTONIC), (24, libc::CLOCK_MONOTONIC)] {
            place_raw(ok(libc::timerfd_create(clock, libc::TFD_NONBLOCK)), at);
            ok(libc::timerfd_settime(at, 0, &spec, std::ptr::null_mut()));
            // The second one is periodic and has expired.
            spec.it_value.tv_sec = 0;
            spec.it_value.tv_nsec = 1;
            spec.it_interval.tv_sec = 0;
            spec.it_interval.tv_nsec = 3_000_000;
        }
    }
    poll(24, libc::POLLIN, 1000);
}

fn verify_events(_: usize) {
    for _ in 0..5 {
        assert_eq!(read(20, 8), 1u64.to_ne_bytes());
    }
    assert_eq!(try_read(20, 8), Err(libc::EAGAIN));
    assert_eq!(read(21, 8), (u64::MAX - 1).to_ne_bytes());
    // SAFETY: all-zero bytes are a valid value, which the call overwrites.
    let spec: libc::itimerspec = unsafe {
        let mut s = std::mem::zeroed();
        ok(libc::timerfd_gettime(23, &mut s));
        s
    };
    assert!((900..=1000).contains(&spec.it_value.tv_sec) && spec.it_interval.tv_sec == 7);
    for _ in 0..3 {
        assert_ne!(poll(24, libc::POLLIN, 1000), 0, "the periodic timer goes on");
        read(24, 8);
    }
    // SAFETY: plain calls with valid arguments.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR2);
        libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        libc::raise(libc::SIGUSR2);
    }
    assert_eq!(read(22, 128)[..4], libc::SIGUSR2.to_ne_bytes());
}

fn pidfd(pid: i32, at: i32) {
    // SAFETY: numbers only.
    place_raw(ok(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32), at);
}

fn prepare_dead() {
    // SAFETY: the child ends at once.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::_exit(0);
        }
        pidfd(child, 20);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    pidfd(std::process::id() as i32, 21);
}

fn setup_pidfd(_: usize) {
    pidfd(std::process::id() as i32, 22);
}

fn pid_of(fd: i32) -> i32 {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap();
    text.lines()
        .find_map(|l| l.strip_prefix("Pid:"))
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

fn verify_pidfd(i: usize) {
    let me = std::process::id() as i32;
    assert_eq!(pid_of(20), -1);
    assert_ne!(poll(20, libc::POLLIN, 0), 0);
    assert_eq!(pid_of(22), me);
    assert_eq!(poll(22, libc::POLLIN, 0), 0);
    if i == 0 {
        assert_eq!(pid_of(21), me);
    } else {
        assert_ne!(pid_of(21), me);
    }
}

fn add_watch(fd: i32, path: &std::path::Path, mask: u32) -> i32 {
    let c = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a valid C string.
    ok(unsafe { libc::inotify_add_watch(fd, c.as_ptr(), mask) })
}

fn prepare_inotify() {
    std::env::set_current_dir(durable()).unwrap();
    std::fs::write(durable().join("f"), b"").unwrap();
    // SAFETY: numbers only.
    place_raw(ok(unsafe { libc::inotify_init1(libc::IN_NONBLOCK) }), 20);
    let first = add_watch(20, &durable(), libc::IN_CREATE);
    add_watch(20, &durable().join("f"), libc::IN_MODIFY);
    // SAFETY: numbers only.
    ok(unsafe { libc::inotify_rm_watch(20, first) });
    assert_eq!(add_watch(20, &durable(), libc::IN_CREATE), 3);
    read(20, 4096);
}

fn verify_inotify(_: usize) {
    assert_eq!(try_read(20, 4096), Err(libc::EAGAIN));
    std::fs::write(durable().join("f"), b"x").unwrap();
    assert_eq!(
        read(20, 4096)[..8],
        [2i32.to_ne_bytes(), libc::IN_MODIFY.to_ne_bytes()].concat()
    );
    std::fs::write(durable().join("new"), b"").unwrap();
    assert_eq!(
        read(20, 4096)[..8],
        [3i32.to_ne_bytes(), libc::IN_CREATE.to_ne_bytes()].concat()
    );
}

fn prepare_unread() {
    prepare_inotify();
    std::fs::write(durable().join("new"), b"").unwrap();
}

fn verify_unread(_: usize) {
    let restarted = durable().join("kind").exists();
    let all = read(20, 65536);
    let kind = if restarted { libc::IN_Q_OVERFLOW } else { libc::IN_CREATE };
    assert_eq!(all[4..8], kind.to_ne_bytes());
    assert!(all.len() <= 48, "{} bytes", all.len());
    assert_eq!(try_read(20, 4096), Err(libc::EAGAIN));
    verify_inotify_again();
}

fn verify_inotify_again() {
    std::fs::write(durable().join("f"), b"x").unwrap();
    assert_eq!(
        read(20, 4096)[..8],
        [2i32.to_ne_bytes(), libc::IN_MODIFY.to_ne_bytes()].concat()
    );
}

fn posix(fd: i32, cmd: i32, kind: i32, start: i64, len: i64) -> Result<libc::flock, i32> {
    let mut l = libc::flock {
        l_type: kind as _,
        l_whence: 0,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: a lock command with its argument.
    match unsafe { libc::fcntl(fd, cmd, &mut l) } {
        -1 => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
        _ => Ok(l),
    }
}

fn prepare_locks() {
    for (name, at) in [("a", 20), ("b", 21), ("c", 22)] {
        std::fs::write(durable().join(name), [0; 100]).unwrap();
        open(&durable().join(name), libc::O_RDWR, at);
    }
    // SAFETY: numbers only.
    ok(unsafe { libc::flock(21, libc::LOCK_EX) });
    posix(22, libc::F_OFD_SETLK, libc::F_WRLCK, 10, 5).unwrap();
}

fn setup_locks(i: usize) {
    posix(20, libc::F_SETLK, libc::F_WRLCK, 10 * i as i64, 10).unwrap();
}

fn verify_locks(i: usize) {
    // Each process sees the other's lock on the first file.
    let other = posix(20, libc::F_GETLK, libc::F_WRLCK, 10 * (1 - i as i64), 10).unwrap();
    assert_eq!((i32::from(other.l_type), other.l_len), (libc::F_WRLCK, 10));
    assert_ne!(other.l_pid, std::process::id() as i32);
    if i == 0 {
        open(&durable().join("b"), libc::O_RDWR, 25);
        // SAFETY: numbers only.
        assert_eq!(unsafe { libc::flock(25, libc::LOCK_EX | libc::LOCK_NB) }, -1);
        open(&durable().join("c"), libc::O_RDWR, 26);
        assert_eq!(posix(26, libc::F_OFD_SETLK, libc::F_WRLCK, 14, 1).unwrap_err(), libc::EAGAIN);
        posix(26, libc::F_OFD_SETLK, libc::F_WRLCK, 15, 1).unwrap();
    }
    // Nobody ends before both have looked.
    std::thread::sleep(std::time::Duration::from_millis(300));
}

fn prepare_owner() {
    pipe((20, 21), 0);
    // SAFETY: numbers only.
    unsafe {
        ok(libc::fcntl(20, libc::F_SETOWN, std::process::id() as i32));
        ok(libc::fcntl(20, 10, libc::SIGUSR1));
    }
    fcntl(20, libc::F_SETFL, flags(20) | libc::O_ASYNC);
}

fn verify_owner(_: usize) {
    assert_eq!(fcntl(20, libc::F_GETOWN, 0), std::process::id() as i32);
    assert_eq!(fcntl(20, 11, 0), libc::SIGUSR1);
    assert_ne!(flags(20) & libc::O_ASYNC, 0);
}

fn queue_name() -> CString {
    // SAFETY: takes nothing.
    CString::new(format!("/belay-roundtrip-{}", unsafe { libc::getuid() })).unwrap()
}

/// What a killed job leaves in the old IPC namespace.
fn drop_queue() {
    // SAFETY: a live name.
    ok(unsafe { libc::mq_unlink(queue_name().as_ptr()) });
}

fn send(fd: i32, text: &[u8], priority: u32) {
    // SAFETY: `text` is valid for reading.
    ok(unsafe { libc::mq_send(fd, text.as_ptr().cast(), text.len(), priority) });
}

fn receive(fd: i32) -> (Vec<u8>, u32) {
    let (mut buf, mut priority) = (vec![0u8; 100], 0);
    // SAFETY: the buffer has the size of the largest message.
    let n = unsafe { libc::mq_receive(fd, buf.as_mut_ptr().cast(), buf.len(), &mut priority) };
    assert!(n >= 0, "mq_receive: {}", std::io::Error::last_os_error());
    buf.truncate(n as usize);
    (buf, priority)
}

/// One queue by name with two descriptions; another one that had that name before, and is full.
fn prepare_queues() {
    let name = queue_name();
    // SAFETY: live names and attributes.
    unsafe {
        let mut a: libc::mq_attr = std::mem::zeroed();
        libc::mq_unlink(name.as_ptr());
        (a.mq_maxmsg, a.mq_msgsize) = (2, 100);
        let flags = libc::O_CREAT | libc::O_EXCL;
        place_raw(ok(libc::mq_open(name.as_ptr(), flags | libc::O_RDWR, 0o600, &raw mut a)), 20);
        ok(libc::mq_unlink(name.as_ptr()));
        (a.mq_maxmsg, a.mq_msgsize) = (9, 100);
        place_raw(
            ok(libc::mq_open(name.as_ptr(), flags | libc::O_WRONLY, 0o640, &raw mut a)),
            21,
        );
        let reader = ok(libc::mq_open(name.as_ptr(), libc::O_RDONLY | libc::O_NONBLOCK));
        place_raw(reader, 22);
    }
    send(20, b"first", 1);
    send(20, b"second", 1);
    send(21, b"low", 0);
    send(21, &pattern(100, 3), 7);
    send(21, b"", 7);
    send(21, b"high", 31);
}

fn verify_queues(_: usize) {
    assert_eq!(receive(20), (b"first".to_vec(), 1));
    assert_eq!(receive(20), (b"second".to_vec(), 1));
    assert_eq!(receive(22), (b"high".to_vec(), 31));
    assert_eq!(receive(22), (pattern(100, 3), 7));
    assert_eq!(receive(22), (Vec::new(), 7));
    // SAFETY: all-zero bytes are a valid value, which the call overwrites; the name is live.
    let (a, again) = unsafe {
        let mut a: libc::mq_attr = std::mem::zeroed();
        ok(libc::mq_getattr(22, &mut a));
        (a, ok(libc::mq_open(queue_name().as_ptr(), libc::O_RDONLY)))
    };
    assert_eq!(
        (a.mq_maxmsg, a.mq_msgsize, a.mq_curmsgs, a.mq_flags),
        (9, 100, 1, libc::O_NONBLOCK.into())
    );
    assert_eq!(receive(again), (b"low".to_vec(), 0));
    assert_eq!(flags(22) & libc::O_ACCMODE, libc::O_RDONLY);
    assert_eq!(flags(21) & (libc::O_ACCMODE | libc::O_NONBLOCK), libc::O_WRONLY);
    // SAFETY: all-zero bytes are a valid value, which the call overwrites.
    let mode = |fd| unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        ok(libc::fstat(fd, &mut stat));
        (stat.st_mode & 0o7777, stat.st_nlink)
    };
    assert_eq!((mode(20), mode(21)), ((0o600, 0), (0o640, 1)));
    // SAFETY: a live name.
    ok(unsafe { libc::mq_unlink(queue_name().as_ptr()) });
}

fn prepare_notified() {
    prepare_queues();
    // SAFETY: all-zero bytes are a valid value of this plain C struct; the call reads it.
    unsafe {
        libc::mq_unlink(queue_name().as_ptr());
        let mut event: libc::sigevent = std::mem::zeroed();
        (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_SIGNAL, libc::SIGURG);
        ok(mq_notify(20, &event));
    }
}

extern "C" {
    fn mq_notify(queue: libc::mqd_t, event: *const libc::sigevent) -> i32;
}
