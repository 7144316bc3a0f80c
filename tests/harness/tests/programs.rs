//! Every program of tests/programs, four ways, as root and as an ordinary user. One line adds a program.

use belay_tests::build::Kind;
use belay_tests::case::{mpi, mpirun, prog, static_prog, Case};
use belay_tests::place::Place;
use belay_tests::runner;
use std::sync::Arc;

fn cases() -> Vec<Case> {
    let mut v = vec![
        prog("compute_regs"),
        prog("compute_mem"),
        static_prog("compute_regs"),
        prog("compute_regs threads"),
        prog("compute_regs aio"),
        prog("compute_regs notify"),
        prog("thr_create"),
        prog("thr_many 8"),
        prog("thr_many 512"),
        prog("thr_crowd churn"),
        prog("thr_crowd exec"),
        prog("thr_tls"),
        prog("thr_robust"),
        prog("thr_pi"),
        prog("thr_cancel"),
        prog("thr_rseq"),
        prog("thr_rseq_sections"),
        prog("thr_locks"),
        prog("thr_attrs"),
        prog("thr_raw"),
        prog("thr_leader_gone"),
        static_prog("thr_locks"),
        prog("proc_tree"),
        prog("proc_forkexec fork"),
        prog("proc_forkexec vfork"),
        prog("proc_forkexec spawn"),
        static_prog("proc_forkexec fork"),
        prog("proc_vforkheld"),
        prog("proc_zombie"),
        prog("proc_daemon"),
        prog("proc_session"),
        prog("proc_stopped"),
        prog("proc_subreaper"),
        prog("proc_nochld"),
        prog("proc_clonefiles"),
        prog("proc_clonefs"),
        prog("proc_vmshare own"),
        prog("proc_vmshare all"),
        prog("proc_vmshare deep"),
        prog("proc_vmshare sibling"),
        prog("thr_directories"),
        prog("thr_files"),
        prog("sig_pending"),
        prog("sig_urgent"),
        prog("sig_state"),
        prog("sig_altstack"),
        prog("sig_handler"),
        prog("sig_storm"),
        prog("sig_masked"),
        prog("sig_masked aio"),
        prog("timer_itimer"),
        prog("timer_alarm"),
        prog("timer_posix"),
        prog("timer_thread"),
        prog("time_vdso"),
        prog("time_steps"),
        prog("attr_process"),
        prog("attr_identity"),
        prog("attr_notrace"),
        prog("attr_namespace"),
        prog("mem_private"),
        prog("mem_file_limit"),
        prog("mem_shared anon"),
        prog("mem_shared file").launch(&["--save-open-files"]),
        prog("mem_shared memfd"),
        prog("mem_shared shm"),
        prog("mem_shared shmgone"),
        prog("mem_shared sysv"),
        prog("mem_shared sysvgone"),
        prog("mem_file").launch(&["--save-open-files"]),
        prog("mem_filegone"),
        prog("mem_guard"),
        prog("mem_regions").since(6, 15),
        prog("mem_regions written")
            .since(6, 15)
            .launch(&["--differential", "written"]),
        prog("mem_marked droppable").since(6, 11),
        prog("mem_marked sealed").since(6, 10),
        prog("mem_marked random"),
        prog("mem_marked mdwe").since(6, 3),
        prog("mem_marked mdwe-own").since(6, 6),
        prog("mem_sparse"),
        prog("mem_sparse shared"),
        prog("mem_brk"),
        prog("mem_stack"),
        prog("mem_huge"),
        prog("mem_hugetlb").huge_pages(),
        prog("mem_advice"),
        prog("mem_locks"),
        prog("mem_locks onfault"),
        prog("mem_locks first"),
        prog("mem_jit"),
        prog("mem_change"),
        prog("mem_diff").launch(&["--differential", "written"]),
        prog("mem_diff pieces"),
        prog("mem_moved").launch(&["--differential", "written"]),
        prog("mem_dlopen"),
        prog("fd_regular"),
        prog("fd_overwrite").launch(&["--save-open-files"]),
        prog("fd_deleted"),
        prog("fd_rmdir gone"),
        prog("fd_rmdir churn"),
        prog("fd_replaced").launch(&["--save-open-files"]),
        prog("fd_pipe"),
        prog("fd_fifo"),
        prog("fd_unix stream"),
        prog("fd_unix dgram"),
        prog("fd_unix seqpacket"),
        prog("fd_unix named").transient("waits to be accepted"),
        prog("fd_unix abstract").transient("waits to be accepted"),
        prog("fd_unix renamed"),
        prog("fd_unix rights"),
        prog("fd_unix half"),
        // So many that they are looked at together.
        prog("fd_unix abstract crowd").transient("waits to be accepted"),
        prog("fd_unix half crowd"),
        prog("fd_unix rights crowd"),
        prog("fd_tcp flow"),
        prog("fd_tcp v6"),
        prog("fd_tcp backlog").transient("waits to be accepted"),
        prog("fd_tcp half"),
        prog("fd_tcp options"),
        prog("fd_tcp big"),
        prog("fd_tcp interrupted"),
        prog("fd_tcp lingering").patience(90),
        prog("fd_netlink"),
        prog("fd_outside").outside(),
        prog("fd_udp"),
        prog("fd_options set"),
        prog("fd_options fresh"),
        prog("fd_pty"),
        prog("fd_epoll"),
        prog("fd_events eventfd"),
        prog("fd_events signalfd"),
        prog("fd_events timerfd"),
        prog("fd_events pidfd"),
        prog("fd_events inotify"),
        prog("fd_events opath"),
        prog("fd_events memfd"),
        prog("fd_events devices"),
        prog("fd_events ended"),
        prog("fd_dup"),
        prog("fd_locks"),
        prog("fd_unseen"),
        prog("fd_many"),
        prog("fd_async"),
        prog("ipc_sysv"),
        prog("ipc_undo all"),
        prog("ipc_undo ended"),
        prog("ipc_undo left"),
        prog("ipc_posix sem"),
        prog("ipc_posix mq"),
        prog("ipc_notify signal"),
        prog("ipc_notify thread").transient("has not been read"),
        prog("ipc_notify none"),
        prog("ipc_notify full").refused("rlimit_sigpending"),
        prog("aio reads").launch(&["--save-open-files"]),
        prog("aio poll"),
        prog("aio timers"),
        prog("aio threads"),
        prog("aio full"),
        prog("aio_served named").refused("/dev/fuse").root_only(),
        prog("aio_served other").refused("io_setup").root_only(),
        prog("blocked mq 8"),
        prog("odd_bare").verdict_file(),
        prog("refuse io_uring").refused("io_uring"),
        prog("refuse userfaultfd").refused("userfaultfd"),
        prog("refuse ptrace").refused("traced"),
        prog("refuse dispatch").refused("pr_set_syscall_user_dispatch"),
        prog("refuse compat").refused("32-bit"),
        prog("refuse ended").refused("cannot be opened again"),
        prog("refuse urgent").refused("urgent data"),
        prog("refuse namespace").refused("(uts) namespace of its own"),
        prog("refuse remote").refused("orted on another host (ssh n2)"),
        prog("refuse locks").refused("limit for locked memory"),
    ];
    for mode in [
        "mutex 8",
        "mutex 1",
        "condvar 8",
        "condvar 512",
        "condtimed 8",
        "futex 8",
        "futex 512",
        "futextimed 8",
        "sem 8",
        "nanosleep 8",
        "clock_nanosleep 8",
        "longsleep 8",
        "poll 8",
        "polltimed 8",
        "ppoll 8",
        "select 8",
        "pselect 8",
        "read 1",
        "read 8",
        "read 512",
        "sockread 8",
        "recvtimeo 8",
        "eventfd 8",
        "epoll 8",
        "epoll_pwait 8",
        "sigtimedwait 8",
        "sigwaitinfo 8",
        "sigsuspend 8",
        "semop 8",
        "semtimedop 8",
        "msgrcv 8",
        "inotify 8",
        "timerfd 8",
        "flock 8",
        "accept 8",
        "wait 8",
    ] {
        v.push(prog(&format!("blocked {mode}")));
    }
    for kind in [Kind::OpenMpi, Kind::Mpich] {
        for line in ["mpi_cg", "mpi_rma", "mpi_p2p", "mpi_alltoall", "mpi_threads"] {
            v.push(mpi(kind, line, 4));
        }
        let once = format!("{{programs}}/mpi_once{}", kind.suffix());
        let mut words = vec!["4".to_owned(), u32::from(kind == Kind::Mpich).to_string()];
        words.extend(mpirun(kind, 4));
        words.push(once);
        let mut c = mpi(kind, "mpi_loop", 4);
        c.under = Vec::new();
        c.args = words;
        c.spread_ms = 1500;
        v.push(c);
    }
    v
}

fn main() {
    let place = match Place::new("programs") {
        Ok(p) => Arc::new(p),
        Err(e) => {
            println!("{e}");
            std::process::exit(1);
        }
    };
    let cases = cases();
    let more = [("mpi/mpi_once", Kind::OpenMpi), ("mpi/mpi_once", Kind::Mpich)];
    if let Err(e) = runner::build_all(&place, &cases, &more) {
        println!("{e}");
        std::process::exit(1);
    }
    let checks = runner::checks(&place, cases);
    drop(place);
    runner::main(checks);
}
