//! Shared memory: contents, sharing between processes, sparse and deleted objects, System V objects.

use crate::harness::{durable, volatile, Case};
use crate::util::*;
use std::path::Path;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case {
            processes: 2,
            ..Case::new("shared_anonymous_between_processes", prepare_anonymous, verify_anonymous)
        },
        Case::new(
            "shared_anonymous_unmapped_page_of_a_dead_child",
            prepare_untouched,
            verify_untouched,
        ),
        Case::new("memfd_offset_seals_and_two_descriptions", prepare_memfd, verify_memfd),
        Case::new("memfd_mapped_then_closed", prepare_memfd_map, verify_memfd_map),
        Case::new("memfd_sparse", prepare_sparse, verify_sparse),
        Case::new("memfd_in_huge_pages_if_there_are_any", prepare_huge, verify_huge),
        Case {
            processes: 2,
            between: || std::fs::remove_file(shm_name()).unwrap(),
            ..Case::new("posix_shm_removed_after_the_kill", prepare_shm, verify_shm)
        },
        Case::new("file_mapped_shared_then_deleted", prepare_deleted_map, verify_deleted_map),
        Case {
            between: || std::fs::write(durable().join("map"), vec![9; 8192]).unwrap(),
            ..Case::new("file_mapped_shared_and_changed_later", prepare_file_map, verify_file_map)
        },
        Case {
            processes: 2,
            ..Case::new("sysv_segments", prepare_sysv, verify_sysv)
        },
        Case::new("sysv_semaphores_and_messages", prepare_ipc, verify_ipc),
    ]
}

const AT: usize = 0x10_0000_0000;

fn map(fd: i32, len: usize, at: usize, prot: i32) -> &'static mut [u8] {
    let anon = if fd == -1 { libc::MAP_ANONYMOUS } else { 0 };
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE | anon;
    // SAFETY: maps at an unused address or fails.
    let p = unsafe { libc::mmap(at as *mut _, len, prot, flags, fd, 0) };
    assert_eq!(p as usize, at, "{}", std::io::Error::last_os_error());
    slice(at, len)
}

fn slice(at: usize, len: usize) -> &'static mut [u8] {
    // SAFETY: the test has mapped this range.
    unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) }
}

fn prepare_anonymous() {
    map(-1, 1 << 20, AT, 3)[..100_000].copy_from_slice(&pattern(100_000, 8));
    // A large reservation of which little is used.
    map(-1, 64 << 20, AT + (1 << 30), 3)[(50 << 20) + 1] = 42;
    // Not readable at the moment.
    map(-1, 8192, AT + (2 << 30), 3)[4097] = 43;
    // SAFETY: the range mapped just now.
    ok(unsafe { libc::mprotect((AT + (2 << 30)) as *mut _, 8192, libc::PROT_NONE) });
}

fn verify_anonymous(i: usize) {
    let m = slice(AT, 1 << 20);
    if i == 0 {
        assert_eq!(&m[..100_000], &pattern(100_000, 8));
        assert!(m[100_000..(1 << 20) - 1].iter().all(|b| *b == 0));
        assert_eq!(slice(AT + (1 << 30), 64 << 20)[(50 << 20) + 1], 42);
        // SAFETY: the range mapped in `prepare`.
        ok(unsafe { libc::mprotect((AT + (2 << 30)) as *mut _, 8192, libc::PROT_READ) });
        assert_eq!(slice(AT + (2 << 30), 8192)[4097], 43);
        // SAFETY: the last byte of the mapping; the other process reads it.
        unsafe { std::ptr::write_volatile(&mut m[(1 << 20) - 1], 1) };
    } else {
        // SAFETY: as above.
        while unsafe { std::ptr::read_volatile(&m[(1 << 20) - 1]) } != 1 {
            std::thread::yield_now();
        }
    }
}

fn prepare_untouched() {
    map(-1, 1 << 20, AT, 3);
    // SAFETY: the child writes one byte and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            slice(AT, 1 << 20)[500_000] = 77;
            libc::_exit(0);
        }
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

fn verify_untouched(_: usize) {
    assert_eq!(slice(AT, 1 << 20)[500_000], 77);
}

fn memfd(flags: u32, at: i32) {
    // SAFETY: a constant name.
    place_raw(ok(unsafe { libc::memfd_create(c"some name".as_ptr(), flags) }), at);
}

fn prepare_memfd() {
    memfd(libc::MFD_ALLOW_SEALING, 20);
    write(20, b"0123456789");
    open(Path::new("/proc/self/fd/20"), libc::O_RDONLY, 21);
    read(21, 4);
    fcntl(20, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_WRITE);
    memfd(0, 22);
}

fn verify_memfd(_: usize) {
    assert_eq!((pos(20), pos(21)), (10, 4));
    assert_eq!(read(21, 100), b"456789");
    assert_eq!(fcntl(20, libc::F_GET_SEALS, 0), libc::F_SEAL_SHRINK | libc::F_SEAL_WRITE);
    assert_eq!(fcntl(22, libc::F_GET_SEALS, 0), libc::F_SEAL_SEAL);
    let link = std::fs::read_link("/proc/self/fd/20").unwrap();
    assert_eq!(link.to_str().unwrap(), "/memfd:some name (deleted)");
    write(22, b"x");
}

fn prepare_memfd_map() {
    memfd(0, 20);
    write(20, &pattern(20_000, 9));
    map(20, 20_480, AT, 3);
    close(20);
}

fn verify_memfd_map(_: usize) {
    assert_eq!(&slice(AT, 20_000)[..], &pattern(20_000, 9));
}

fn prepare_sparse() {
    memfd(0, 20);
    // SAFETY: numbers only.
    ok(unsafe { libc::ftruncate(20, 2 << 40) });
    // SAFETY: one byte is valid for reading.
    assert_eq!(unsafe { libc::pwrite(20, b"x".as_ptr().cast(), 1, 1 << 40) }, 1);
}

fn verify_sparse(_: usize) {
    let st = std::fs::metadata("/proc/self/fd/20").unwrap();
    use std::os::unix::fs::MetadataExt;
    assert_eq!(st.len(), 2 << 40);
    assert!(st.blocks() < 64, "{} blocks", st.blocks());
    let mut b = [0u8; 2];
    // SAFETY: `b` is valid for writing.
    assert_eq!(unsafe { libc::pread(20, b.as_mut_ptr().cast(), 2, 1 << 40) }, 2);
    assert_eq!(&b, b"x\0");
}

fn prepare_huge() {
    memfd(libc::MFD_HUGETLB, 20);
    // SAFETY: numbers only.
    ok(unsafe { libc::ftruncate(20, 2 << 20) });
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if free.is_ok_and(|t| t.trim() != "0") {
        map(20, 2 << 20, AT, 3)[1 << 20] = 5;
    }
}

fn verify_huge(_: usize) {
    use std::os::unix::fs::MetadataExt;
    let st = std::fs::metadata("/proc/self/fd/20").unwrap();
    assert_eq!((st.len(), st.blksize()), (2 << 20, 2 << 20));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    if maps.contains("/memfd:some name") {
        assert_eq!(slice(AT, 2 << 20)[1 << 20], 5);
    }
}

fn shm_name() -> std::path::PathBuf {
    Path::new("/dev/shm").join(volatile().file_name().unwrap())
}

fn prepare_shm() {
    open(&shm_name(), libc::O_RDWR | libc::O_CREAT, 20);
    write(20, &pattern(50_000, 10));
    map(20, 49_152, AT, 3);
    close(20);
}

fn verify_shm(i: usize) {
    let m = slice(AT, 49_152);
    if i == 0 {
        assert_eq!(&m[1..], &pattern(50_000, 10)[1..49_152]);
        assert_eq!(std::fs::metadata(shm_name()).unwrap().len(), 50_000);
        // SAFETY: the other process reads it.
        unsafe { std::ptr::write_volatile(&mut m[0], 1) };
    } else {
        // SAFETY: as above.
        while unsafe { std::ptr::read_volatile(&m[0]) } != 1 {
            std::thread::yield_now();
        }
        std::fs::remove_file(shm_name()).unwrap();
    }
}

fn prepare_deleted_map() {
    open(&durable().join("m"), libc::O_RDWR | libc::O_CREAT, 20);
    write(20, &pattern(12_000, 11));
    map(20, 12_288, AT, 3);
    close(20);
    std::fs::remove_file(durable().join("m")).unwrap();
}

fn verify_deleted_map(_: usize) {
    assert_eq!(&slice(AT, 12_000)[..], &pattern(12_000, 11));
    assert!(!durable().join("m").exists());
}

fn prepare_file_map() {
    std::fs::write(durable().join("map"), pattern(8192, 12)).unwrap();
    open(&durable().join("map"), libc::O_RDWR, 20);
    map(20, 8192, AT, 3)[0] = 1;
    close(20);
}

fn verify_file_map(_: usize) {
    assert_eq!(slice(AT, 8192)[0], 1);
    assert_eq!(&slice(AT, 8192)[1..], &pattern(8192, 12)[1..]);
    slice(AT, 8192)[1] = 2;
    assert_eq!(std::fs::read(durable().join("map")).unwrap()[..2], [1, 2]);
}

fn key() -> i32 {
    0x4245_0000 + std::process::id() as i32 % 60_000
}

fn prepare_sysv() {
    // SAFETY: ordinary use of System V segments.
    unsafe {
        let id = ok(libc::shmget(key(), 100_000, libc::IPC_CREAT | libc::IPC_EXCL | 0o640));
        let p = libc::shmat(id, AT as *const _, 0);
        assert_eq!(p as usize, AT);
        slice(AT, 100_000).copy_from_slice(&pattern(100_000, 13));
        let removed = ok(libc::shmget(libc::IPC_PRIVATE, 4096, 0o600));
        libc::shmat(removed, (AT + (1 << 30)) as *const _, 0);
        slice(AT + (1 << 30), 4096)[7] = 7;
        ok(libc::shmctl(removed, libc::IPC_RMID, std::ptr::null_mut()));
        std::fs::write(volatile().join("ids"), format!("{id} {} {removed}", key())).unwrap();
    }
}

fn verify_sysv(i: usize) {
    let text = std::fs::read_to_string(volatile().join("ids")).unwrap();
    let v: Vec<i32> = text.split(' ').map(|t| t.parse().unwrap()).collect();
    // SAFETY: ordinary use of System V segments.
    unsafe {
        let mut ds: libc::shmid_ds = std::mem::zeroed();
        if i == 0 {
            assert_eq!(slice(AT, 100_000)[1..], pattern(100_000, 13)[1..]);
            assert_eq!(libc::shmget(v[1], 0, 0), v[0]);
            ok(libc::shmctl(v[0], libc::IPC_STAT, &mut ds));
            assert_eq!(
                (ds.shm_perm.mode as u32 & 0o777, ds.shm_segsz, ds.shm_nattch),
                (0o640, 100_000, 2)
            );
            assert_eq!(slice(AT + (1 << 30), 4096)[7], 7);
            ok(libc::shmctl(v[2], libc::IPC_STAT, &mut ds));
            assert_ne!(ds.shm_perm.mode as u32 & 0o1000, 0, "still marked for removal");
            std::ptr::write_volatile(&mut slice(AT, 1)[0], 99);
        } else {
            while std::ptr::read_volatile(&slice(AT, 1)[0]) != 99 {
                std::thread::yield_now();
            }
            ok(libc::shmctl(v[0], libc::IPC_RMID, std::ptr::null_mut()));
        }
    }
}

fn prepare_ipc() {
    // SAFETY: ordinary use of System V semaphores and queues.
    unsafe {
        let sem = ok(libc::semget(key(), 3, libc::IPC_CREAT | libc::IPC_EXCL | 0o600));
        for (i, v) in [5, 0, 300].iter().enumerate() {
            ok(libc::semctl(sem, i as i32, libc::SETVAL, *v));
        }
        let q = ok(libc::msgget(key(), libc::IPC_CREAT | libc::IPC_EXCL | 0o600));
        for (kind, text) in [(3i64, &b"three"[..]), (1, b""), (2, b"two two")] {
            let mut m = kind.to_ne_bytes().to_vec();
            m.extend_from_slice(text);
            ok(libc::msgsnd(q, m.as_ptr().cast(), text.len(), 0));
        }
        std::fs::write(volatile().join("ids"), format!("{sem} {q} {}", key())).unwrap();
    }
}

fn verify_ipc(_: usize) {
    let text = std::fs::read_to_string(volatile().join("ids")).unwrap();
    let v: Vec<i32> = text.split(' ').map(|t| t.parse().unwrap()).collect();
    // SAFETY: ordinary use of System V semaphores and queues.
    unsafe {
        assert_eq!((libc::semget(v[2], 0, 0), libc::msgget(v[2], 0)), (v[0], v[1]));
        let values: Vec<i32> = (0..3).map(|i| libc::semctl(v[0], i, libc::GETVAL)).collect();
        assert_eq!(values, [5, 0, 300]);
        for (kind, text) in [(3i64, &b"three"[..]), (1, b""), (2, b"two two")] {
            let mut buf = [0u64; 10];
            let n = libc::msgrcv(v[1], buf.as_mut_ptr().cast(), 64, 0, libc::IPC_NOWAIT);
            assert_eq!((n, buf[0] as i64), (text.len() as isize, kind));
            let got: Vec<u8> = buf[1..].iter().flat_map(|w| w.to_ne_bytes()).take(n as usize).collect();
            assert_eq!(got, text);
        }
        ok(libc::semctl(v[0], 0, libc::IPC_RMID));
        ok(libc::msgctl(v[1], libc::IPC_RMID, std::ptr::null_mut()));
    }
}
