//! The stand-in for libibverbs (tests/fake-verbs) natively: programs of Debian's ibverbs-utils as they are, and self-checking ones.

use belay_tests::expect::{io, want};
use belay_tests::fabric::{Fabric, LIBRARY};
use belay_tests::job::{output, patient, show, text};
use belay_tests::place::{Place, User};
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

/// Two hosts have different names; a host that is started anew has others, and so has everybody after a new start of the daemon.
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

fn main() {
    let mut target = Target::new("verbs", &[]);
    let tests: [(&str, Test); 5] = [
        ("symbols", symbols),
        ("numbers", numbers),
        ("infiniband", infiniband),
        ("infiniband_global", infiniband_global),
        ("roce", roce),
    ];
    for (name, test) in tests {
        target.by_user(name, |_| true, move |place, user, _| test(place, user));
    }
    target.run();
}
