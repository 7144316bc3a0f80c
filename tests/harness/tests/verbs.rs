//! The stand-in for libibverbs (tests/fake-verbs) natively: programs of Debian's ibverbs-utils as they are, and
//! self-checking ones.

use belay_tests::build::{build, Kind};
use belay_tests::expect::{io, want};
use belay_tests::fabric::{Fabric, LIBRARY};
use belay_tests::job::{output, patient, show, text};
use belay_tests::place::{am_root, Place, User};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

type Test = fn(&Place, User) -> Result<(), Failure>;

/// Longer than anything takes here, also where much else runs.
const LIMIT: Duration = Duration::from_secs(120);

/// A TCP port that nobody has, below those that the kernel gives away.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() % 1000) as u16 * 10;
    loop {
        let port = 20000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 12000;
        if TcpListener::bind(("::", port)).is_ok() {
            return port;
        }
    }
}

/// Does somebody listen on this port?
fn listening(port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        text.lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields.len() > 3 && fields[1].ends_with(&wanted) && fields[3] == "0A"
        })
    })
}

/// Starts a server and waits until it listens.
fn server(mut command: Command, port: u16) -> Result<Child, Failure> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = io("start", command.spawn())?;
    let begin = Instant::now();
    while !listening(port) {
        if let Some(status) = io("wait", child.try_wait())? {
            let out = io("read", child.wait_with_output())?;
            return Err(format!("{command:?}: {}: {}", show(status), text(&out)));
        }
        if begin.elapsed() > patient(LIMIT) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("{command:?} does not listen"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(child)
}

/// Runs one program of ibverbs-utils on two hosts; both must succeed.
fn pingpong(fabric: &Fabric, program: &str, options: &[&str]) -> Result<(), Failure> {
    let port = port();
    let number = port.to_string();
    let words = [&[program, "-p", &number][..], options].concat();
    let mut first = server(fabric.on("one", &words), port)?;
    let second = output(fabric.on("two", &[&words[..], &["localhost"]].concat()), LIMIT);
    if !second.as_ref().is_ok_and(|o| o.status.success()) {
        let _ = first.kill();
    }
    let first = io("wait", first.wait_with_output())?;
    let second = second?;
    for o in [&first, &second] {
        want(o.status.success(), || {
            format!("{words:?}: {}: {}\n{}", show(o.status), text(&first), text(&second))
        })?;
    }
    Ok(())
}

/// Debian's programs with every option that they have for the verbs. (`-t` and `-e` are not given together:
/// `ibv_rc_pingpong` takes an event for a completion that it has polled already for an error, and no adapter promises
/// that there is none.)
fn pingpongs(place: &Place, user: User, kind: &str, options: &[&str], faults: &[&str]) -> Result<(), Failure> {
    let fabric = Fabric::new(place, &format!("pingpong-{kind}"), user, faults)?;
    for program in ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong", "ibv_srq_pingpong"] {
        let mut ways: Vec<&[&str]> = vec![&[], &["-e"], &["-c"], &["-e", "-c"]];
        if program == "ibv_rc_pingpong" {
            ways.extend([
                &["-N", "-c"][..],
                &["-t", "-c"],
                &["-N", "-e"],
                &["-s", "1000000", "-n", "50", "-c"],
            ]);
        }
        for way in ways {
            pingpong(&fabric, program, &[options, way].concat())?;
        }
    }
    want(
        fabric.counter("messages")? > 10_000 && fabric.counter("datagrams")? > 4_000,
        || "the messages did not come through the fabric".into(),
    )
}

fn infiniband(place: &Place, user: User) -> Result<(), Failure> {
    pingpongs(place, user, "ib", &[], &[])
}

fn infiniband_global(place: &Place, user: User) -> Result<(), Failure> {
    pingpongs(place, user, "grh", &["-g", "0"], &[])
}

fn roce(place: &Place, user: User) -> Result<(), Failure> {
    pingpongs(place, user, "roce", &["-g", "3"], &["--roce"])
}

/// What `ibv_devinfo -v` says on a host, by field.
fn devinfo(fabric: &Fabric, host: &str) -> Result<BTreeSet<String>, Failure> {
    let o = output(fabric.on(host, &["ibv_devinfo", "-v"]), LIMIT)?;
    want(o.status.success(), || {
        format!("ibv_devinfo: {}: {}", show(o.status), text(&o))
    })?;
    let kept = ["node_guid", "port_lid", "GID["];
    let lines = text(&o);
    Ok(lines
        .lines()
        .filter(|l| kept.iter().any(|k| l.contains(k)))
        .map(|l| l.trim().to_owned())
        .collect())
}

/// Two hosts have different names; a host that is started anew has others, and so has everybody after a new start of
/// the daemon.
fn numbers(place: &Place, user: User) -> Result<(), Failure> {
    let mut fabric = Fabric::new(place, "numbers", user, &[])?;
    let [one, two] = [devinfo(&fabric, "one")?, devinfo(&fabric, "two")?];
    want(one.len() == 3 && one.is_disjoint(&two), || format!("{one:?} and {two:?}"))?;
    want(one == devinfo(&fabric, "one")?, || {
        "they change from one opening to the next".into()
    })?;
    fabric.ask("restart", &["one"])?;
    let other = devinfo(&fabric, "one")?;
    want(other.is_disjoint(&one) && other.is_disjoint(&two), || {
        format!("after a new start of the host: {other:?}")
    })?;
    want(two == devinfo(&fabric, "two")?, || "those of another host change".into())?;
    fabric.ask("move", &["one", "two"])?;
    want(two == devinfo(&fabric, "one")?, || "who has moved is not there".into())?;
    fabric.again(&[])?;
    for (host, before) in [("one", &one), ("two", &two)] {
        let now = devinfo(&fabric, host)?;
        want(now.is_disjoint(before), || {
            format!("{host} after a new start of the daemon: {now:?}")
        })?;
    }
    Ok(())
}

/// Names and versions that a library exports.
fn exported(library: &str) -> Result<BTreeSet<String>, Failure> {
    let mut c = Command::new("nm");
    c.args(["--dynamic", "--defined-only", "--with-symbol-versions", library]);
    let o = output(c, LIMIT)?;
    want(o.status.success(), || text(&o))?;
    let text = text(&o);
    let names = text.lines().filter_map(|l| l.split_whitespace().nth(2));
    Ok(names.filter(|n| n.contains('@')).map(str::to_owned).collect())
}

/// The stand-in has every name of Debian's library in the same version, and no other.
fn symbols(place: &Place, _: User) -> Result<(), Failure> {
    let ours = belay_tests::fabric::build(place)?.join(LIBRARY);
    let real = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"]
        .map(|d| format!("{d}/{LIBRARY}"))
        .into_iter()
        .find(|p| std::path::Path::new(p).exists())
        .ok_or("no libibverbs of the system")?;
    let (ours, real) = (exported(&ours.display().to_string())?, exported(&real)?);
    want(real.len() > 150 && ours == real, || {
        let differ: Vec<&String> = ours.symmetric_difference(&real).collect();
        format!("{} names, and {differ:?} only in one of the two", real.len())
    })
}

/// Runs a self-checking program on this fabric, native.
fn program(place: &Place, fabric: &Fabric, words: &[&str], environment: &[(&str, &str)]) -> Result<(), Failure> {
    let path = build(place, &format!("verbs/{}", words[0]), Kind::Verbs)?
        .display()
        .to_string();
    let mut c = fabric.on("one", &[&[path.as_str()], &words[1..]].concat());
    for (name, verb) in [("VERBS_FAULT", "set"), ("VERBS_RESTART", "restart")] {
        c.env(name, format!("{} {verb} {}", fabric.daemon().display(), fabric.dir.display()));
    }
    c.envs(environment.iter().copied());
    let o = output(c, LIMIT)?;
    let passed = text(&o).lines().any(|l| l.starts_with("PASS "));
    want(o.status.success() && passed, || {
        format!("{words:?}: {}: {}", show(o.status), text(&o))
    })
}

/// Random operations between all ranks, in each way in which a program can go about them.
fn connections(place: &Place, user: User) -> Result<(), Failure> {
    let fabric = Fabric::new(place, "rc", user, &[])?;
    for way in [
        &["verbs_rc", "3"][..],
        &["verbs_rc", "3", "event"],
        &["verbs_rc", "3", "ex"],
        &["verbs_rc", "3", "srq"],
        &["verbs_rc", "4", "event", "ex", "srq"],
        &["verbs_rc", "64", "event"],
    ] {
        program(place, &fabric, way, &[])?;
    }
    want(fabric.counter("contexts")? == 0 && fabric.counter("overruns")? == 0, || {
        fabric.ask("stats", &[]).unwrap_or_default()
    })
}

/// Datagrams on a fabric that loses none, with addresses of every kind.
fn datagrams(place: &Place, user: User) -> Result<(), Failure> {
    let fabric = Fabric::new(place, "ud", user, &[])?;
    for way in [&[][..], &["event"], &["mcast"], &["4", "event", "mcast"]] {
        let words = [&["verbs_ud", "lossless"][..], way].concat();
        program(place, &fabric, &words, &[])?;
        program(place, &fabric, &words, &[("VERBS_GID", "0")])?;
    }
    let fabric = Fabric::new(place, "ud-roce", user, &["--roce"])?;
    for gid in ["0", "1", "2", "3"] {
        program(place, &fabric, &["verbs_ud", "lossless"], &[("VERBS_GID", gid)])?;
        program(place, &fabric, &["verbs_rc", "event"], &[("VERBS_GID", gid)])?;
    }
    Ok(())
}

/// The same under each fault, which must have struck.
fn faults(place: &Place, user: User) -> Result<(), Failure> {
    for (fault, counter) in [
        (&["latency_us=200", "jitter_us=400"][..], "messages"),
        (&["ack_us=2000"], "messages"),
        (&["ack_drop=30", "retry_us=3000"], "acks_lost"),
        (&["rnr=30"], "rnr"),
        (&["bandwidth_mb=200"], "messages"),
        (&["ud_drop=20", "jitter_us=300"], "dropped"),
        (
            &[
                "latency_us=50",
                "jitter_us=100",
                "ack_us=200",
                "ack_drop=10",
                "rnr=10",
                "ud_drop=10",
            ],
            "acks_lost",
        ),
    ] {
        let fabric = Fabric::new(place, "faults", user, fault)?;
        let step = || -> Result<(), Failure> {
            program(place, &fabric, &["verbs_rc", "event"], &[])?;
            program(place, &fabric, &["verbs_rc", "ex", "srq"], &[])?;
            program(place, &fabric, &["verbs_ud", "mcast"], &[])?;
            let struck = fabric.counter(counter)?;
            want(struck > 20, || format!("{counter} {struck}"))
        };
        step().map_err(|e| format!("{fault:?}: {e}"))?;
    }
    Ok(())
}

/// What the verbs promise where something goes wrong.
fn rules(place: &Place, user: User) -> Result<(), Failure> {
    let fabric = Fabric::new(place, "rules", user, &[])?;
    for check in [
        "keys", "zero", "rnr", "nobody", "flush", "drained", "states", "length", "full", "overrun", "events", "shared", "resize",
        "held", "reopened", "stopped", "killed",
    ] {
        program(place, &fabric, &["verbs_rules", check], &[])?;
    }
    Ok(())
}

/// A mount namespace of its own with a device file, for which UCX looks; it never opens it. Then the words that follow.
const WITH_DEVICE: &str = "set -e; old=$(mktemp -d); trap 'rmdir $old' EXIT; mount --make-rprivate /; mount --rbind /dev $old
    mount -t tmpfs -o mode=755 tmpfs /dev
    for f in null zero full random urandom tty; do touch /dev/$f; mount --bind $old/$f /dev/$f; done
    for f in shm pts; do mkdir /dev/$f; mount --rbind $old/$f /dev/$f; done
    ln -s pts/ptmx /dev/ptmx; ln -s /proc/self/fd /dev/fd; umount -l $old; rmdir $old; trap - EXIT
    mkdir /dev/infiniband; mknod -m 666 /dev/infiniband/uverbs0 c 1 3; exec \"$@\"";
/// Each rank on a host of its own.
const ON_HOSTS: &str = "FAKE_VERBS_HOST=host${PMI_RANK-$OMPI_COMM_WORLD_RANK}; export FAKE_VERBS_HOST; exec \"$@\"";
const WITHOUT: &str = "-";

/// The compiler, the program, how it is started, what the library is told, and the counter of what must have carried it.
type Way<'a> = (Kind, &'a str, &'a [&'a str], &'a [(&'a str, &'a str)], &'a str);

/// One MPI program over the fabric, where its library has no other way.
fn mpi_program(place: &Place, user: User, way: &Way) -> Result<(), Failure> {
    let (kind, source, start, environment, counter) = way;
    let fabric = Fabric::new(place, "mpi", user, if counter.contains("roce") { &["--roce"] } else { &[] })?;
    let path = build(place, &format!("mpi/{source}"), *kind)?.display().to_string();
    let device = ["unshare", "-m", "sh", "-c", WITH_DEVICE, WITHOUT];
    // libfabric 1.17 dies in ofi_rxd with three ranks, over UDP too.
    let ranks = if start.contains(&"ofi") { "2" } else { "3" };
    let ranks = ["-n", ranks, "sh", "-c", ON_HOSTS, WITHOUT, &path];
    let words = [&device[..], user.words(), start, &ranks].concat();
    let mut c = Command::new(words[0]);
    c.args(&words[1..])
        .envs(fabric.environment())
        .envs(environment.iter().copied());
    c.env("UCX_RC_VERBS_RX_QUEUE_LEN", "256")
        .env("UCX_UD_VERBS_RX_QUEUE_LEN", "512");
    c.env("UCX_WARN_UNUSED_ENV_VARS", "n").env("MPIR_CVAR_NOLOCAL", "1");
    c.env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    c.env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_MCA_mpi_yield_when_idle", "1");
    c.env("HWLOC_COMPONENTS", "-gl")
        .env("HOME", &fabric.dir)
        .env("TMPDIR", &fabric.dir);
    let o = output(c, LIMIT)?;
    let passed = text(&o).lines().any(|l| l.starts_with("PASS "));
    want(o.status.success() && passed, || {
        format!("{way:?}: {}: {}", show(o.status), text(&o))
    })?;
    let carried = fabric.counter(counter.trim_end_matches(" roce"))?;
    want(carried > 10, || format!("{way:?}: {counter} {carried}"))
}

/// Unmodified MPI libraries over UCX and libfabric.
fn mpi(place: &Place, user: User) -> Result<(), Failure> {
    let (rc, ud) = (("UCX_TLS", "rc_verbs,ud_verbs:aux,self"), ("UCX_TLS", "ud_verbs,self"));
    let mpich = &["mpirun.mpich"][..];
    let ucx = &["mpirun.openmpi", "--mca", "pml", "ucx"][..];
    let rxd = &["mpirun.openmpi", "--mca", "pml", "cm", "--mca", "mtl", "ofi"][..];
    let datagrams = ("OMPI_MCA_mtl_ofi_provider_include", "verbs;ofi_rxd");
    for way in [
        (Kind::Mpich, "mpi_p2p", mpich, &[rc][..], "messages"),
        (Kind::Mpich, "mpi_alltoall", mpich, &[ud], "datagrams"),
        (Kind::Mpich, "mpi_alltoall", mpich, &[rc], "messages roce"),
        (Kind::OpenMpi, "mpi_p2p", ucx, &[rc], "messages"),
        (Kind::OpenMpi, "mpi_alltoall", ucx, &[ud], "datagrams roce"),
        (Kind::OpenMpi, "mpi_alltoall", rxd, &[datagrams], "datagrams"),
    ] {
        mpi_program(place, user, &way)?;
    }
    Ok(())
}

fn main() {
    let mut target = Target::new("verbs", &[]);
    let tests: [(&str, Test); 9] = [
        ("symbols", symbols),
        ("numbers", numbers),
        ("infiniband", infiniband),
        ("infiniband_global", infiniband_global),
        ("roce", roce),
        ("connections", connections),
        ("datagrams", datagrams),
        ("faults", faults),
        ("rules", rules),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, move |place, user, _| test(place, user));
    }
    // The device file takes root.
    target.by_user("mpi", |_| am_root(), |place, user, _| mpi(place, user));
    target.run();
}
