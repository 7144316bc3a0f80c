//! Regular files: offsets, flags, sharing, rollback, deleted and nameless files.

use crate::harness::{durable, volatile, Case};
use crate::util::*;
use std::fs;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("file_offset_flags_and_sharing", prepare_basic, verify_basic),
        Case {
            processes: 3,
            ..Case::new("file_description_shared_by_processes", prepare_shared, verify_shared)
        },
        Case {
            between: || {
                fs::OpenOptions::new()
                    .append(true)
                    .open(durable().join("log"))
                    .map(|mut f| {
                        std::io::Write::write_all(&mut f, b"written after the checkpoint").unwrap();
                    })
                    .unwrap()
            },
            ..Case::new("file_written_is_rolled_back", prepare_log, verify_log)
        },
        Case {
            between: || fs::remove_dir_all(volatile().join("session")).unwrap(),
            ..Case::new("file_in_tmp_comes_back_with_its_directories", prepare_tmp, verify_tmp)
        },
        Case {
            between: replace,
            ..Case::new("file_replaced_or_linked_since", prepare_replaced, verify_replaced)
        },
        Case {
            between: || fs::remove_file(volatile().join("part.s")).unwrap(),
            ..Case::new("file_of_the_job_only_read", prepare_part, |_| {
                assert_eq!(fs::read(volatile().join("part.s")).unwrap(), b"made before");
                assert_eq!(read(20, 100), b" before");
            })
        },
        Case::new("directory_deleted", prepare_rmdir, verify_rmdir),
        Case::new("file_deleted", prepare_deleted, verify_deleted),
        Case::new("file_without_name", prepare_tmpfile, verify_tmpfile),
        Case::new("file_readonly_mode_open_for_writing", prepare_protected, verify_protected),
        Case::new("file_descriptor_above_1024", prepare_high, verify_high),
        Case::new("file_odd_name", prepare_odd, verify_odd),
        Case::new("directory_offset", prepare_directory, verify_directory),
        Case::new("path_only_descriptor", prepare_path, verify_path),
        Case::new("devices_and_kernel_files", prepare_devices, verify_devices),
        Case::new(
            "descriptors_closed_stay_closed",
            || close(0),
            |_| assert!(!is_open(0) && is_open(1) && !is_open(40)),
        ),
    ]
}

fn prepare_basic() {
    fs::write(durable().join("a"), b"0123456789").unwrap();
    open(&durable().join("a"), libc::O_RDONLY, 20);
    read(20, 3);
    dup(20, 21);
    open(&durable().join("a"), libc::O_RDONLY | libc::O_CLOEXEC, 22);
    fcntl(22, libc::F_SETFD, libc::FD_CLOEXEC);
    open(
        &durable().join("b"),
        libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND | libc::O_SYNC,
        23,
    );
    write(23, b"first");
}

fn verify_basic(_: usize) {
    assert!(same_description(20, 21) && !same_description(20, 22));
    assert_eq!((pos(20), pos(22)), (3, 0));
    assert_eq!(read(21, 2), b"34");
    assert_eq!(pos(20), 5);
    assert_eq!(fcntl(22, libc::F_GETFD, 0), libc::FD_CLOEXEC);
    assert_eq!(fcntl(20, libc::F_GETFD, 0), 0);
    assert_eq!(
        flags(23) & (libc::O_ACCMODE | libc::O_APPEND | libc::O_SYNC),
        libc::O_WRONLY | libc::O_APPEND | libc::O_SYNC
    );
    write(23, b"second");
    assert_eq!(fs::read(durable().join("b")).unwrap(), b"firstsecond");
}

fn prepare_shared() {
    fs::write(durable().join("a"), vec![b'x'; 100]).unwrap();
    open(&durable().join("a"), libc::O_RDONLY, 20);
    pipe((21, 22), 0);
}

fn verify_shared(i: usize) {
    // Each process reads in turn; together they must advance one offset.
    if i > 0 {
        assert_eq!(read_exact(21, 1), b"t");
        read_exact(20, 10);
        write(22, b"t");
        return;
    }
    write(22, b"t");
    for _ in 0..600 {
        if pos(20) == 20 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("offset {} instead of 20", pos(20));
}

fn prepare_log() {
    open(&durable().join("log"), libc::O_WRONLY | libc::O_CREAT, 20);
    write(20, b"before");
}

fn verify_log(_: usize) {
    assert_eq!(fs::read(durable().join("log")).unwrap(), b"before");
    write(20, b" after");
    assert_eq!(fs::read(durable().join("log")).unwrap(), b"before after");
}

fn prepare_tmp() {
    use std::os::unix::fs::PermissionsExt;
    let dir = volatile().join("session/rank.0");
    fs::create_dir_all(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o710)).unwrap();
    open(&dir.join("data"), libc::O_RDWR | libc::O_CREAT, 20);
    write(20, &pattern(10_000, 1));
    fs::set_permissions(dir.join("data"), fs::Permissions::from_mode(0o640)).unwrap();
}

fn verify_tmp(_: usize) {
    use std::os::unix::fs::PermissionsExt;
    let dir = volatile().join("session/rank.0");
    assert_eq!(fs::read(dir.join("data")).unwrap(), pattern(10_000, 1));
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o7777, 0o710);
    assert_eq!(fs::metadata(dir.join("data")).unwrap().permissions().mode() & 0o7777, 0o640);
    assert_eq!(pos(20), 10_000);
}

fn prepare_replaced() {
    for (at, name) in [(20, "moved"), (21, "linked"), (22, "plain")] {
        open(&volatile().join(name), libc::O_RDWR | libc::O_CREAT, at);
        write(at, b"half");
    }
    let mtime = fs::metadata(volatile().join("plain")).unwrap().modified().unwrap();
    let ns = mtime.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    fs::write(durable().join("time"), ns.to_string()).unwrap();
    use std::os::unix::fs::MetadataExt;
    let ino = fs::metadata(volatile().join("plain")).unwrap().ino();
    fs::write(durable().join("ino"), ino.to_string()).unwrap();
}

/// What a program does between checkpoint and crash: completes its files, moves one away and gives another a second name.
fn replace() {
    let at = |name: &str| volatile().join(name);
    for name in ["moved", "linked", "plain"] {
        fs::write(at(name), b"complete").unwrap();
    }
    fs::rename(at("moved"), at("moved.old")).unwrap();
    fs::write(at("moved"), b"another file").unwrap();
    fs::hard_link(at("moved"), at("moved.copy")).unwrap();
    fs::hard_link(at("linked"), at("linked.final")).unwrap();
}

fn verify_replaced(_: usize) {
    use std::os::unix::fs::MetadataExt;
    let text = |name: &str| String::from_utf8(fs::read(volatile().join(name)).unwrap()).unwrap();
    let mtime = fs::metadata(volatile().join("plain")).unwrap().modified().unwrap();
    let ns = mtime.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    assert_eq!(fs::read_to_string(durable().join("time")).unwrap(), ns.to_string());
    for (fd, name) in [(20, "moved"), (21, "linked"), (22, "plain")] {
        assert_eq!(text(name), "half");
        write(fd, b" way");
        assert_eq!(text(name), "half way");
    }
    if !volatile().join("moved.old").exists() {
        return; // Continued: there was no crash.
    }
    assert_eq!(text("moved.old"), "complete");
    assert_eq!(text("moved.copy"), "another file");
    assert_eq!(text("linked.final"), "complete");
    let mut names = fs::read_dir(volatile()).unwrap().map(|e| e.unwrap().file_name());
    assert!(
        !names.any(|n| n.to_string_lossy().contains(".belay-")),
        "nothing is left beside the files"
    );
    let plain = fs::metadata(volatile().join("plain")).unwrap();
    assert_eq!(fs::read_to_string(durable().join("ino")).unwrap(), plain.ino().to_string());
}

fn prepare_part() {
    fs::write(volatile().join("part.s"), b"made before").unwrap();
    open(&volatile().join("part.s"), libc::O_RDONLY, 20);
    read(20, 4);
}

fn prepare_rmdir() {
    let dir = durable().join("session/inner");
    fs::create_dir_all(&dir).unwrap();
    open(&dir, libc::O_RDONLY | libc::O_DIRECTORY, 20);
    open(&dir.join("data"), libc::O_RDWR | libc::O_CREAT, 21);
    write(21, b"kept");
    fs::remove_dir_all(durable().join("session")).unwrap();
}

fn verify_rmdir(_: usize) {
    assert!(!durable().join("session").exists());
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` is valid for writing.
    ok(unsafe { libc::fstat(20, stat.as_mut_ptr()) });
    // SAFETY: fstat has filled it.
    let stat = unsafe { stat.assume_init() };
    assert_eq!((stat.st_mode & libc::S_IFMT, stat.st_nlink), (libc::S_IFDIR, 0));
    write(21, b" on");
    assert_eq!(fs::read("/proc/self/fd/21").unwrap(), b"kept on");
}

fn prepare_deleted() {
    open(&durable().join("gone"), libc::O_RDWR | libc::O_CREAT, 20);
    write(20, &pattern(70_000, 2));
    open(&durable().join("gone"), libc::O_RDONLY, 21);
    fs::remove_file(durable().join("gone")).unwrap();
    read(21, 5);
}

fn verify_deleted(_: usize) {
    assert!(!durable().join("gone").exists());
    let link = fs::read_link("/proc/self/fd/20").unwrap();
    assert_eq!(
        link.to_str().unwrap(),
        format!("{} (deleted)", durable().join("gone").display())
    );
    assert_eq!(pos(20), 70_000);
    assert_eq!(read_exact(21, 69_995), &pattern(70_000, 2)[5..]);
    write(20, b"more");
    assert_eq!(read(21, 10), b"more", "both descriptions are on one file");
}

fn prepare_tmpfile() {
    open(&durable(), libc::O_RDWR | libc::O_TMPFILE, 20);
    write(20, b"nameless");
}

fn verify_tmpfile(_: usize) {
    assert_eq!(fs::read("/proc/self/fd/20").unwrap(), b"nameless");
    let to = std::ffi::CString::new(durable().join("named").to_str().unwrap()).unwrap();
    // SAFETY: both names are valid C strings.
    let r = unsafe {
        libc::linkat(
            libc::AT_FDCWD,
            c"/proc/self/fd/20".as_ptr(),
            libc::AT_FDCWD,
            to.as_ptr(),
            libc::AT_SYMLINK_FOLLOW,
        )
    };
    ok(r);
    assert_eq!(fs::read(durable().join("named")).unwrap(), b"nameless");
}

fn prepare_protected() {
    use std::os::unix::fs::PermissionsExt;
    open(&durable().join("ro"), libc::O_WRONLY | libc::O_CREAT, 20);
    write(20, b"abc");
    fs::set_permissions(durable().join("ro"), fs::Permissions::from_mode(0o400)).unwrap();
}

fn verify_protected(_: usize) {
    use std::os::unix::fs::PermissionsExt;
    write(20, b"def");
    assert_eq!(fs::read(durable().join("ro")).unwrap(), b"abcdef");
    assert_eq!(
        fs::metadata(durable().join("ro")).unwrap().permissions().mode() & 0o7777,
        0o400
    );
}

fn prepare_high() {
    let mut l = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `l` is valid for both calls.
    unsafe {
        ok(libc::getrlimit(libc::RLIMIT_NOFILE, &mut l));
        l.rlim_cur = l.rlim_max;
        ok(libc::setrlimit(libc::RLIMIT_NOFILE, &l));
    }
    fs::write(durable().join("a"), b"0123456789").unwrap();
    for n in [1023, 1024, 5000, 5001] {
        open(&durable().join("a"), libc::O_RDONLY, n);
        read(n, (n % 7) as usize + 1);
    }
}

fn verify_high(_: usize) {
    for n in [1023, 1024, 5000, 5001] {
        assert_eq!(pos(n), i64::from(n % 7) + 1);
    }
    assert!(!is_open(1025));
}

fn odd() -> std::path::PathBuf {
    use std::os::unix::ffi::OsStrExt;
    durable().join(std::ffi::OsStr::from_bytes(b"odd \\x41\xff\n (deleted)"))
}

fn prepare_odd() {
    fs::write(odd(), b"content").unwrap();
    open(&odd(), libc::O_RDONLY, 20);
}

fn verify_odd(_: usize) {
    assert_eq!(read(20, 100), b"content");
    assert_eq!(fs::read_link("/proc/self/fd/20").unwrap(), odd());
}

fn entries(fd: i32) -> Vec<u64> {
    let mut buf = [0u64; 32];
    // SAFETY: `buf` is valid for writing its length.
    let n = unsafe { libc::syscall(libc::SYS_getdents64, fd, buf.as_mut_ptr(), 256) };
    let mut out = Vec::new();
    let bytes: Vec<u8> = buf.iter().flat_map(|w| w.to_ne_bytes()).collect();
    let mut at = 0;
    while at < n as usize {
        out.push(u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap()));
        at += u16::from_ne_bytes(bytes[at + 16..at + 18].try_into().unwrap()) as usize;
    }
    out
}

fn prepare_directory() {
    let d = durable().join("dir");
    fs::create_dir(&d).unwrap();
    for i in 0..50 {
        fs::write(d.join(format!("file-{i}")), b"").unwrap();
    }
    open(&d, libc::O_RDONLY | libc::O_DIRECTORY, 20);
    let seen = entries(20).len();
    fs::write(durable().join("seen"), seen.to_string()).unwrap();
}

fn verify_directory(_: usize) {
    let mut seen: usize = fs::read_to_string(durable().join("seen")).unwrap().parse().unwrap();
    assert!(seen > 0 && seen < 50);
    loop {
        let more = entries(20).len();
        if more == 0 {
            break;
        }
        seen += more;
    }
    assert_eq!(seen, 52);
}

fn prepare_path() {
    fs::write(durable().join("a"), b"x").unwrap();
    std::os::unix::fs::symlink("a", durable().join("link")).unwrap();
    open(&durable().join("a"), libc::O_PATH, 20);
    open(&durable().join("link"), libc::O_PATH | libc::O_NOFOLLOW, 21);
    open(&durable(), libc::O_PATH | libc::O_DIRECTORY, 22);
}

fn verify_path(_: usize) {
    assert_ne!(flags(20) & libc::O_PATH, 0);
    assert_eq!(try_read(20, 1), Err(libc::EBADF));
    assert_eq!(fs::read("/proc/self/fd/22/a").unwrap(), b"x");
    assert_eq!(fs::read_link("/proc/self/fd/21").unwrap(), durable().join("link"));
}

fn prepare_devices() {
    for (at, name) in [(20, "null"), (21, "zero"), (22, "urandom"), (23, "full")] {
        open(&std::path::Path::new("/dev").join(name), libc::O_RDWR, at);
    }
    open(std::path::Path::new("/proc/self/status"), libc::O_RDONLY, 24);
    read(24, 6);
    open(std::path::Path::new("/proc/cpuinfo"), libc::O_RDONLY, 25);
}

fn verify_devices(_: usize) {
    assert_eq!(read(20, 10), b"");
    assert_eq!(read(21, 3), [0; 3]);
    assert_eq!(read(22, 64).len(), 64);
    assert_eq!(flags(23) & libc::O_ACCMODE, libc::O_RDWR);
    assert_eq!(pos(24), 6);
    let text = String::from_utf8(read(24, 4000)).unwrap();
    assert!(text.contains(&format!("Pid:\t{}\n", std::process::id())), "{text}");
    assert!(!read(25, 10).is_empty());
}
