//! Runs one case: processes that stop themselves, capture, and then either SIGCONT, or SIGKILL and rebuild in fresh namespaces.

use belay_image::blobs::{BlobReader, BlobWriter};
use belay_image::model::ObjectId;
use belay_plugins::testing::Kept;
use belay_plugins::{CaptureEnv, Descriptors, ProcessView, Rebuilder, SharedMapping};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};

/// One behaviour.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// Number of processes.
    pub(crate) processes: usize,
    /// Runs in the first process before the others are forked from it.
    pub(crate) prepare: fn(),
    /// Runs in each process before it stops.
    pub(crate) setup: fn(usize),
    /// Runs in the test between kill and rebuild.
    pub(crate) between: fn(),
    /// Runs in each process afterwards.
    pub(crate) verify: fn(usize),
    /// Text that the refusal must contain, for things that cannot be captured.
    pub(crate) refused: Option<&'static str>,
}

impl Case {
    /// A case of one process that only prepares and verifies.
    pub(crate) const fn new(name: &'static str, prepare: fn(), verify: fn(usize)) -> Self {
        Self {
            name,
            processes: 1,
            prepare,
            setup: |_| (),
            between: || (),
            verify,
            refused: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Continue,
    Restart,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    Same,
    Ordinary,
}

const NOBODY: u32 = 65534;

pub(crate) fn users() -> Vec<User> {
    // SAFETY: geteuid takes nothing.
    if unsafe { libc::geteuid() } == 0 {
        vec![User::Same, User::Ordinary]
    } else {
        vec![User::Same]
    }
}

/// Page shared by the test and all processes, at an address no case uses.
struct Board {
    pids: [AtomicI32; 16],
    arrived: AtomicI32,
    go: AtomicI32,
}

const BOARD: usize = 0x7000_0000_0000;

fn board() -> &'static Board {
    // SAFETY: `run` has mapped the page before anything calls this.
    unsafe { &*(BOARD as *const Board) }
}

/// Directory of this case for files that outlive the job (not below /tmp and the like).
pub(crate) fn durable() -> PathBuf {
    PathBuf::from(std::env::var_os("BELAY_TEST_DIR").expect("directory set by the harness"))
}

/// Directory of this case below /tmp.
pub(crate) fn volatile() -> PathBuf {
    PathBuf::from(std::env::var_os("BELAY_TEST_TMP").expect("directory set by the harness"))
}

/// Runs a case in a process of its own; whether it passed.
pub(crate) fn run(case: &Case, mode: Mode, user: User) -> bool {
    let me = std::process::id();
    let home = if users().len() == 2 {
        "/var/lib".into()
    } else {
        std::env::var("HOME").expect("HOME")
    };
    let dirs = [format!("{home}/belay-test-{me}"), format!("/tmp/belay-test-{me}")];
    for d in &dirs {
        std::fs::create_dir_all(d).expect("test directory");
        if user == User::Ordinary {
            std::os::unix::fs::chown(d, Some(NOBODY), Some(NOBODY)).expect("chown");
        }
    }
    std::env::set_var("BELAY_TEST_DIR", &dirs[0]);
    std::env::set_var("BELAY_TEST_TMP", &dirs[1]);
    let status = in_child(|| {
        if user == User::Ordinary {
            ordinary();
        }
        body(case, mode);
    });
    for d in &dirs {
        std::fs::remove_dir_all(d).expect("remove test directory");
    }
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

fn ordinary() {
    // SAFETY: takes numbers only; the process has one thread.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
        assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
    }
}

/// Forks, runs `f`, returns its wait status; a panic is status 1.
fn in_child(f: impl FnOnce()) -> i32 {
    let pid = fork(f);
    wait(pid)
}

fn fork(f: impl FnOnce()) -> i32 {
    // SAFETY: the test has one thread.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        die_with_parent();
        finish(f);
    }
    pid
}

/// A case that hangs or loses a process fails and leaves nothing behind.
fn die_with_parent() {
    // SAFETY: both take numbers only.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        libc::alarm(20);
    }
}

fn finish(f: impl FnOnce()) -> ! {
    let ok = std::panic::catch_unwind(AssertUnwindSafe(f)).is_ok();
    // SAFETY: ends the process without running the parent's destructors.
    unsafe { libc::_exit(i32::from(!ok)) }
}

fn wait(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: `status` is valid for writing.
    let got = unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(got, pid, "waitpid: {}", std::io::Error::last_os_error());
    status
}

fn assert_ok(status: i32) {
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        "process ended with status {status:#x}"
    );
}

fn stop_self() {
    // SAFETY: stops the calling process until SIGCONT.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// The processes of the job: the first forks the others, everybody stops, then verifies.
fn job(case: &Case) {
    (case.prepare)();
    let mut children = Vec::new();
    for i in 1..case.processes {
        children.push(fork(|| member(case, i)));
    }
    member(case, 0);
    for c in children {
        assert_ok(wait(c));
    }
}

fn member(case: &Case, i: usize) {
    (case.setup)(i);
    board().pids[i].store(std::process::id() as i32, Ordering::SeqCst);
    stop_self();
    (case.verify)(i);
}

fn body(case: &Case, mode: Mode) {
    map_board();
    // SAFETY: prctl takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    let first = fork(|| job(case));
    let pids: Vec<i32> = (0..case.processes).map(stopped).collect();
    let views: Vec<ProcessView> = pids.iter().map(|p| view(*p)).collect();
    let blob_path = volatile().join("blobs");
    let mut blobs = BlobWriter::create(&blob_path).unwrap();
    let mut pages = Kept::default();
    let captured = belay_plugins::capture(CaptureEnv {
        processes: &views,
        blobs: &mut blobs,
        pages: &mut pages,
        saved_up_to: 0,
        group: None,
        names: &belay_plugins::Names::default(),
        inside: None,
        launched: std::time::SystemTime::now() - std::time::Duration::from_secs(60),
    });
    let descriptors = match (captured, case.refused) {
        (Ok(d), None) => serde_json::to_string(&d).unwrap(),
        (Err(e), Some(text)) => {
            let all = e.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            assert!(all.contains(text), "refused with {all:?}, expected {text:?}");
            String::new()
        }
        (Ok(_), Some(text)) => panic!("captured what must be refused: {text}"),
        (Err(e), None) => panic!(
            "refused: {}",
            e.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        ),
    };
    if mode == Mode::Continue || case.refused.is_some() {
        for p in &pids {
            // SAFETY: the processes are ours.
            unsafe { libc::kill(*p, libc::SIGCONT) };
        }
        assert_ok(wait(first));
        return;
    }
    for p in pids.iter().rev() {
        // SAFETY: the processes are ours.
        unsafe { libc::kill(*p, libc::SIGKILL) };
    }
    for p in &pids {
        wait(*p);
    }
    (case.between)();
    let mappings: Vec<Vec<SharedMapping>> = views.into_iter().map(|v| v.shared).collect();
    namespaces();
    let status = in_child(|| restart(case, &descriptors, (&blob_path, &pages), &pids, &mappings));
    assert_ok(status);
}

fn map_board() {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a fresh anonymous mapping at an unused address.
    let p = unsafe { libc::mmap(BOARD as *mut _, 4096, 3, flags, -1, 0) };
    assert_eq!(p as usize, BOARD);
}

/// Waits until process `i` has stopped itself.
fn stopped(i: usize) -> i32 {
    loop {
        // SAFETY: asks for children that have ended, without blocking.
        let ended = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) };
        assert!(ended <= 0, "a process ended while preparing");
        let pid = board().pids[i].load(Ordering::SeqCst);
        if pid != 0 && belay_kernel::proc::stat(pid).is_ok_and(|s| s.state == 'T') {
            return pid;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn view(pid: i32) -> ProcessView {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let shared = maps.lines().filter_map(mapping).collect();
    ProcessView {
        standing: Vec::new(),
        pid,
        task: pid,
        pidfd: belay_kernel::pidfd::open(pid).unwrap(),
        apart: Vec::new(),
        exe: belay_kernel::proc::link(pid, "exe"),
        stack: 0,
        shared,
        private: Vec::new(),
        libraries: Vec::new(),
        left_gpus: None,
    }
}

fn mapping(line: &str) -> Option<SharedMapping> {
    let mut w = line.splitn(6, ' ');
    let (range, perms, offset, dev, ino) = (w.next()?, w.next()?, w.next()?, w.next()?, w.next()?);
    let name = w.next().unwrap_or("").trim().to_string();
    let hex = |t: &str| u64::from_str_radix(t, 16).unwrap();
    let (start, end) = range.split_once('-')?;
    if perms.as_bytes()[3] != b's' || hex(start) == BOARD as u64 {
        return None;
    }
    let (major, minor) = dev.split_once(':')?;
    let prot = perms
        .bytes()
        .zip([1, 2, 4])
        .map(|(c, bit)| if c == b'-' { 0 } else { bit })
        .sum();
    let sysv = name.strip_prefix("/SYSV").map(|_| ino.parse().unwrap());
    Some(SharedMapping {
        start: hex(start),
        end: hex(end),
        offset: hex(offset),
        prot,
        object: ObjectId {
            dev: libc::makedev(hex(major) as u32, hex(minor) as u32),
            ino: ino.parse().unwrap(),
        },
        name: name.into(),
        sysv_shmid: sysv,
    })
}

/// PID, IPC and mount namespaces of their own for the children to come, with a user namespace where that is needed.
fn namespaces() {
    // SAFETY: takes nothing.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let mut flags = libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWNS;
    if uid != 0 {
        flags |= libc::CLONE_NEWUSER;
    }
    // SAFETY: takes a number; the process has one thread.
    let done = unsafe { libc::unshare(flags) };
    assert_eq!(done, 0, "unshare: {}", std::io::Error::last_os_error());
    if uid != 0 {
        std::fs::write("/proc/self/setgroups", "deny").unwrap();
        std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).unwrap();
        std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).unwrap();
    }
}

/// Runs as PID 1 of the new namespace.
fn restart(
    case: &Case,
    descriptors: &str,
    (blobs, pages): (&std::path::Path, &Kept),
    pids: &[i32],
    mappings: &[Vec<SharedMapping>],
) {
    // SAFETY: the strings are constant; the process has a mount namespace of its own.
    unsafe {
        libc::mount(
            std::ptr::null(),
            c"/".as_ptr(),
            std::ptr::null(),
            libc::MS_REC | libc::MS_PRIVATE,
            std::ptr::null(),
        );
        let done = libc::mount(c"proc".as_ptr(), c"/proc".as_ptr(), c"proc".as_ptr(), 0, std::ptr::null());
        assert_eq!(done, 0, "mount /proc: {}", std::io::Error::last_os_error());
    }
    let descriptors: Descriptors = serde_json::from_str(descriptors).unwrap();
    let sights = belay_plugins::look(&descriptors, &|_| false).unwrap_or_else(|e| panic!("look: {e}"));
    let blobs = BlobReader::open(blobs).unwrap();
    // SAFETY: the new process issues system calls only.
    let mut fork = || Ok(unsafe { libc::fork() });
    let rebuilder = match Rebuilder::rebuild(
        (descriptors, &sights),
        (&blobs, pages, &|_| None),
        true,
        None,
        (&|_| (), &mut fork),
    ) {
        Ok(r) => r,
        Err(e) => panic!("rebuild: {e}"),
    };
    drop(blobs);
    let mut children = Vec::new();
    for (i, pid) in pids.iter().enumerate() {
        let fds: Vec<Option<i32>> = mappings[i]
            .iter()
            .map(|m| {
                if m.sysv_shmid.is_some() {
                    return None;
                }
                Some(rebuilder.shared_fd(m.object, m.prot & 2 != 0).expect("shared object"))
            })
            .collect();
        let child = fork_as(*pid);
        if child == 0 {
            die_with_parent();
            finish(|| {
                // SAFETY: setsid takes nothing. Every member leads a session, as far as this harness goes.
                unsafe { libc::setsid() };
                rebuilder.install_session(*pid).expect("install_session");
                for (m, fd) in mappings[i].iter().zip(&fds) {
                    remap(m, *fd);
                }
                if let Err(e) = rebuilder.install(*pid, &[]) {
                    panic!("install: {e}");
                }
                board().arrived.fetch_add(1, Ordering::SeqCst);
                until(|| {
                    board().arrived.load(Ordering::SeqCst) % 100 >= pids.len() as i32
                        || board().arrived.load(Ordering::SeqCst) >= 100
                });
                if let Err(e) = rebuilder.install_late(*pid) {
                    panic!("install_late: {e}");
                }
                board().arrived.fetch_add(100, Ordering::SeqCst);
                until(|| board().go.load(Ordering::SeqCst) == 1);
                (case.verify)(i);
            });
        }
        children.push(child);
    }
    until(|| {
        let dead = children
            .iter()
            .any(|c| belay_kernel::proc::stat(*c).is_ok_and(|s| s.state == 'Z'));
        assert!(!dead, "a process ended during install");
        board().arrived.load(Ordering::SeqCst) == 101 * pids.len() as i32
    });
    rebuilder.finish().expect("finish");
    drop(rebuilder);
    board().go.store(1, Ordering::SeqCst);
    for c in children {
        assert_ok(wait(c));
    }
}

fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn remap(m: &SharedMapping, fd: Option<i32>) {
    let at = m.start as *mut libc::c_void;
    // SAFETY: maps at an address that is unused in this process, or fails.
    unsafe {
        match (fd, m.sysv_shmid) {
            (Some(fd), _) => {
                let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
                let p = libc::mmap(at, (m.end - m.start) as usize, m.prot as i32, flags, fd, m.offset as i64);
                assert_eq!(p, at, "mmap {}: {}", m.name.display(), std::io::Error::last_os_error());
            }
            (None, Some(id)) => {
                let p = libc::shmat(id, at, if m.prot & 2 == 0 { libc::SHM_RDONLY } else { 0 });
                assert_eq!(p, at, "shmat {id}: {}", std::io::Error::last_os_error());
            }
            (None, None) => unreachable!(),
        }
    }
}

/// `fork` with a chosen PID.
fn fork_as(pid: i32) -> i32 {
    #[repr(C)]
    #[derive(Default)]
    struct Args {
        flags: u64,
        pidfd: u64,
        child_tid: u64,
        parent_tid: u64,
        exit_signal: u64,
        stack: u64,
        stack_size: u64,
        tls: u64,
        set_tid: u64,
        set_tid_size: u64,
        cgroup: u64,
    }
    let args = Args {
        exit_signal: libc::SIGCHLD as u64,
        set_tid: &raw const pid as u64,
        set_tid_size: 1,
        ..Args::default()
    };
    // SAFETY: no memory is shared with the child; `args` is valid for reading.
    let r = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<Args>()) };
    assert!(r >= 0, "clone3 as {pid}: {}", std::io::Error::last_os_error());
    r as i32
}
