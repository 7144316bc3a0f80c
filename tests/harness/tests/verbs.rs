//! The stand-in for libibverbs (tests/fake-verbs), natively and with belay's library in front of it: programs of
//! Debian's ibverbs-utils as they are, and self-checking ones.

use belay_tests::build::{build, Kind};
use belay_tests::expect::{io, want};
use belay_tests::fabric::{Fabric, LIBRARY, ON_HOSTS, WITH_DEVICE};
use belay_tests::job::{output, patient, show, text};
use belay_tests::place::{am_root, with_devices, Place, User};
use belay_tests::target::Target;
use belay_tests::Failure;
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

type Test = fn(&Here) -> Result<(), Failure>;

/// Where and how a test runs.
struct Here<'a> {
    place: &'a Place,
    user: User,
    /// Belay's library stands between the programs and the stand-in.
    preloaded: bool,
}

impl Here<'_> {
    fn fabric(&self, label: &str, options: &[&str]) -> Result<Fabric, Failure> {
        let fabric = Fabric::new(self.place, label, self.user, options)?;
        Ok(if self.preloaded {
            fabric.with_library(self.place)
        } else {
            fabric
        })
    }
}

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
fn pingpongs(here: &Here, kind: &str, options: &[&str], faults: &[&str]) -> Result<(), Failure> {
    let fabric = here.fabric(&format!("pingpong-{kind}"), faults)?;
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

fn infiniband(here: &Here) -> Result<(), Failure> {
    pingpongs(here, "ib", &[], &[])
}

fn infiniband_global(here: &Here) -> Result<(), Failure> {
    pingpongs(here, "grh", &["-g", "0"], &[])
}

fn roce(here: &Here) -> Result<(), Failure> {
    pingpongs(here, "roce", &["-g", "3"], &["--roce"])
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
fn numbers(here: &Here) -> Result<(), Failure> {
    let mut fabric = here.fabric("numbers", &[])?;
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

/// Where the system has a library.
fn of_system(library: &str) -> Result<String, Failure> {
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"]
        .map(|d| format!("{d}/{library}"))
        .into_iter()
        .find(|p| std::path::Path::new(p).exists())
        .ok_or_else(|| format!("no {library} of the system"))
}

/// The stand-in has every name of Debian's library in the same version, and no other.
fn symbols(here: &Here) -> Result<(), Failure> {
    let ours = belay_tests::fabric::build(here.place)?.join(LIBRARY);
    let (ours, real) = (exported(&ours.display().to_string())?, exported(&of_system(LIBRARY)?)?);
    want(real.len() > 150 && ours == real, || {
        let differ: Vec<&String> = ours.symmetric_difference(&real).collect();
        format!("{} names, and {differ:?} only in one of the two", real.len())
    })
}

/// What belay's library leaves to the two: names and numbers as text, what is done before any device is opened, and what
/// takes objects that it never gives (imported ones, sockets over the verbs), and a function of providers.
const LEFT: &str = "
    ibv_copy_ah_attr_from_kern ibv_copy_path_rec_from_kern ibv_copy_path_rec_to_kern ibv_copy_qp_attr_from_kern
    ibv_event_type_str ibv_node_type_str ibv_port_state_str ibv_wc_status_str
    ibv_rate_to_mbps ibv_rate_to_mult mbps_to_ibv_rate mult_to_ibv_rate
    ibv_dofork_range ibv_dontfork_range ibv_fork_init ibv_is_fork_initialized ibv_get_sysfs_path ibv_read_sysfs_file
    ibv_register_driver ibv_unimport_dm ibv_unimport_mr ibv_unimport_pd
    raccept rbind rclose rconnect rfcntl rgetpeername rgetsockname rgetsockopt riomap riounmap riowrite rlisten rpoll
    rread rreadv rrecv rrecvfrom rrecvmsg rselect rsend rsendmsg rsendto rsetsockopt rshutdown rwrite rwritev";
/// What it has besides: names of later versions, and of libraries of vendors.
const BESIDES: &str = "
    rdma_query_addrinfo rdma_resolve_addrinfo rdma_write_cm_event repoll_create
    efadv_query_device mlx4dv_is_supported mlx5dv_is_supported mlx5dv_open_device";
/// Versions that mean the interface that it has. (Those of 1.0 are older, and no program of today asks for them.)
const OLDEST: &str = "IBVERBS_1.0";
/// Between libibverbs and its providers.
const PRIVATE: &str = "IBVERBS_PRIVATE";

/// Belay's library has every name of the two libraries that it takes the place of, but for those that are known here, and
/// each of these has one interface.
fn taken(here: &Here) -> Result<(), Failure> {
    let mut c = Command::new("nm");
    let library = here.place.bin().join("libbelay_verbs.so");
    c.args(["--dynamic", "--defined-only", &library.display().to_string()]);
    let o = output(c, LIMIT)?;
    want(o.status.success(), || text(&o))?;
    let text = text(&o);
    let mut ours: BTreeSet<&str> = text.lines().filter_map(|l| l.split_whitespace().nth(2)).collect();
    let mut real = exported(&of_system(LIBRARY)?)?;
    real.extend(exported(&of_system("librdmacm.so.1")?)?);
    let mut seen = BTreeSet::new();
    for name in &real {
        let (name, version) = name.split_once('@').unwrap_or((name, ""));
        let version = version.trim_start_matches('@');
        if version == OLDEST
            && real
                .iter()
                .any(|r| r.starts_with(&format!("{name}@@")) && !r.ends_with(OLDEST))
        {
            continue;
        }
        want(seen.insert(name), || format!("{name} has another version: {version}"))?;
        let left = version.starts_with(PRIVATE) || LEFT.split_whitespace().any(|l| l == name);
        want(ours.remove(name) || left, || format!("{name}@{version} is not belay's"))?;
    }
    ours.retain(|name| !BESIDES.split_whitespace().any(|b| b == *name));
    want(real.len() > 240 && ours.is_empty(), || format!("nobody asks for {ours:?}"))
}

/// Runs a self-checking program on this fabric, native.
fn program(here: &Here, fabric: &Fabric, words: &[&str], environment: &[(&str, &str)]) -> Result<(), Failure> {
    let path = build(here.place, &format!("verbs/{}", words[0]), Kind::Verbs)?
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
fn connections(here: &Here) -> Result<(), Failure> {
    let fabric = here.fabric("rc", &[])?;
    for way in [
        &["verbs_rc", "3"][..],
        &["verbs_rc", "3", "event"],
        &["verbs_rc", "3", "ex"],
        &["verbs_rc", "3", "srq"],
        &["verbs_rc", "4", "event", "ex", "srq"],
        &["verbs_rc", "3", "event", "renew"],
        &["verbs_rc", "3", "srq", "renew"],
        &["verbs_rc", "64", "event"],
    ] {
        program(here, &fabric, way, &[])?;
    }
    want(fabric.counter("contexts")? == 0 && fabric.counter("overruns")? == 0, || {
        fabric.ask("stats", &[]).unwrap_or_default()
    })
}

/// Datagrams on a fabric that loses none, with addresses of every kind.
fn datagrams(here: &Here) -> Result<(), Failure> {
    let fabric = here.fabric("ud", &[])?;
    for way in [&[][..], &["event"], &["mcast"], &["renew"], &["4", "event", "mcast", "renew"]] {
        let words = [&["verbs_ud", "lossless"][..], way].concat();
        program(here, &fabric, &words, &[])?;
        program(here, &fabric, &words, &[("VERBS_GID", "0")])?;
    }
    let fabric = here.fabric("ud-roce", &["--roce"])?;
    for gid in ["0", "1", "2", "3"] {
        program(here, &fabric, &["verbs_ud", "lossless"], &[("VERBS_GID", gid)])?;
        program(here, &fabric, &["verbs_rc", "event"], &[("VERBS_GID", gid)])?;
    }
    Ok(())
}

/// The same under each fault, which must have struck.
fn faults(here: &Here) -> Result<(), Failure> {
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
        let fabric = here.fabric("faults", fault)?;
        let step = || -> Result<(), Failure> {
            program(here, &fabric, &["verbs_rc", "event"], &[])?;
            program(here, &fabric, &["verbs_rc", "ex", "srq"], &[])?;
            program(here, &fabric, &["verbs_ud", "mcast"], &[])?;
            let struck = fabric.counter(counter)?;
            want(struck > 20, || format!("{counter} {struck}"))
        };
        step().map_err(|e| format!("{fault:?}: {e}"))?;
    }
    Ok(())
}

/// What the verbs promise where something goes wrong.
fn rules(here: &Here) -> Result<(), Failure> {
    let fabric = here.fabric("rules", &[])?;
    for check in [
        "keys", "zero", "rnr", "nobody", "flush", "drained", "states", "length", "full", "overrun", "events", "shared", "resize",
        "held", "reopened", "stopped", "killed", "ended", "signals",
    ] {
        program(here, &fabric, &["verbs_rules", check], &[])?;
    }
    ["gone", "stale", "registering"]
        .iter()
        .try_for_each(|check| program(here, &fabric, &["verbs_after", check], &[]))?;
    ["renewed", "crowded"]
        .iter()
        .try_for_each(|check| program(here, &fabric, &["verbs_back", check], &[]))?;
    let offered = if here.preloaded { "known" } else { "all" };
    program(here, &fabric, &["verbs_offers", offered], &[])
}

/// Debian's programs that connect by librdmacm: with and without channels, and with own queue pairs.
fn managed(here: &Here) -> Result<(), Failure> {
    for options in [&[][..], &["--roce"]] {
        let fabric = here.fabric("managed", options)?;
        for (one, two) in [
            ("ucmatose -b 127.0.0.1 -c 5", "ucmatose -s 127.0.0.1 -c 5"),
            ("rdma_server", "rdma_client -s 127.0.0.1"),
            ("rping -s -a 127.0.0.1 -q -C 5", "rping -c -a 127.0.0.1 -q -C 5 -V"),
        ] {
            let port = port();
            let number = port.to_string();
            let words = |line| -> Vec<&str> { str::split(line, ' ').chain(["-p", &number]).collect() };
            let mut first = server(fabric.on("one", &words(one)), port)?;
            let second = output(fabric.on("two", &words(two)), LIMIT);
            if !second.as_ref().is_ok_and(|o| o.status.success()) {
                let _ = first.kill();
            }
            let first = io("wait", first.wait_with_output())?;
            let second = second?;
            want(first.status.success() && second.status.success(), || {
                format!("{one} {options:?}: {}\n{two}: {}", text(&first), text(&second))
            })?;
        }
    }
    Ok(())
}

/// What librdmacm promises where something goes wrong, or many come at once.
fn managed_rules(here: &Here) -> Result<(), Failure> {
    for options in [&[][..], &["--roce"]] {
        let fabric = here.fabric("managed-rules", options)?;
        for check in [
            "channels",
            "numbers",
            "ports",
            "polled",
            "crowd",
            "cancelled",
            "moved",
            "queues",
            "strangers",
        ] {
            program(here, &fabric, &["verbs_cm_rules", check, &port().to_string()], &[])?;
        }
    }
    Ok(())
}

const WITHOUT: &str = "-";

/// The compiler, the program, how it is started, what the library is told, and the counter of what must have carried it.
type Way<'a> = (Kind, &'a str, &'a [&'a str], &'a [(&'a str, &'a str)], &'a str);

/// One MPI program over the fabric, where its library has no other way.
fn mpi_program(here: &Here, way: &Way) -> Result<(), Failure> {
    let (kind, source, start, environment, counter) = way;
    let fabric = here.fabric("mpi", if counter.contains("roce") { &["--roce"] } else { &[] })?;
    let path = build(here.place, &format!("mpi/{source}"), *kind)?.display().to_string();
    let device = with_devices(WITH_DEVICE);
    let device = ["unshare", "-m", "sh", "-c", &device, WITHOUT];
    // libfabric 1.17 dies in ofi_rxd with three ranks, over UDP too.
    let ranks = if start.contains(&"ofi") { "2" } else { "3" };
    let ranks = ["-n", ranks, "sh", "-c", ON_HOSTS, WITHOUT, &path];
    let words = [&device[..], here.user.words(), start, &ranks].concat();
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
fn mpi(here: &Here) -> Result<(), Failure> {
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
        mpi_program(here, &way)?;
    }
    Ok(())
}

fn main() {
    let mut target = Target::new("verbs", &[]);
    let tests: [(&str, Test); 10] = [
        ("symbols", symbols),
        ("numbers", numbers),
        ("infiniband", infiniband),
        ("infiniband_global", infiniband_global),
        ("roce", roce),
        ("connections", connections),
        ("datagrams", datagrams),
        ("faults", faults),
        ("rules", rules),
        ("mpi", mpi),
    ];
    for preloaded in [false, true] {
        for (name, test) in tests {
            let name = if preloaded {
                format!("library_{name}")
            } else {
                name.to_owned()
            };
            // The device file of `mpi` takes root.
            let takes_root = name.ends_with("mpi");
            target.by_user(
                &name,
                |_| !takes_root || am_root(),
                move |place, user, _| test(&Here { place, user, preloaded }),
            );
        }
    }
    // Without belay's library the kernel is asked.
    let preloaded = true;
    for (name, test) in [
        ("library_managed", managed as Test),
        ("library_managed_rules", managed_rules),
        ("library_taken", taken),
    ] {
        target.by_user(name, |_| true, move |place, user, _| test(&Here { place, user, preloaded }));
    }
    target.run();
}
