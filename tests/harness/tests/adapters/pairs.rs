//! Programs that send to each other and end by themselves, as they are: of ibverbs-utils and rdmacm-utils.

use super::{with_library, LIMIT};
use belay_tests::expect::want;
use belay_tests::fabric::Fabric;
use belay_tests::job::{show, Job};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::Failure;
use std::net::TcpListener;
use std::time::Instant;

/// Both ends as one job: one, and the other when somebody listens at the port, of which the kernel's table tells.
const BOTH_ENDS: &str = "FAKE_VERBS_HOST=one $1 & until grep -q \"$3\" /proc/net/tcp /proc/net/tcp6; do
    kill -0 $! || exit 2; sleep 0.05; done; FAKE_VERBS_HOST=two $2 && wait $!";

/// A pair of programs, with PORT for a port that is free.
struct Pair<'a> {
    one: &'a str,
    two: &'a str,
    options: &'a [&'a str],
    /// How many lines with which beginning they say in the end.
    lines: (usize, &'a str),
}

/// A TCP port that nobody has.
pub(super) fn free_port() -> Result<u16, Failure> {
    let address = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    Ok(address.map_err(|e| e.to_string())?.port())
}

/// Debian's programs, killed in the middle, with all their messages in the end.
pub(super) fn pingpongs(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    for command in [
        "ibv_rc_pingpong -n 60000 -c",
        "ibv_rc_pingpong -n 60000 -N -e",
        "ibv_uc_pingpong -n 60000 -c",
        "ibv_srq_pingpong -n 60000 -e",
    ] {
        let one = format!("{command} -p PORT");
        let pair = Pair {
            one: &one,
            two: &format!("{one} 127.0.0.1"),
            options: &[],
            lines: (2, "60000 iters"),
        };
        comes_back(place, user, rng, &pair)?;
    }
    Ok(())
}

/// A program that connects by librdmacm; slowly, so that it does not end too soon.
pub(super) fn managed(place: &Place, user: User, rng: &mut Rng) -> Result<(), Failure> {
    for options in [&["latency_us=100"][..], &["--roce", "latency_us=100"]] {
        let pair = Pair {
            one: "rping -s -a 127.0.0.1 -p PORT -V -C 3000",
            two: "rping -c -a 127.0.0.1 -p PORT -V -v -C 3000",
            options,
            lines: (1, "ping data: rdma-ping-2999:"),
        };
        comes_back(place, user, rng, &pair)?;
    }
    Ok(())
}

fn comes_back(place: &Place, user: User, rng: &mut Rng, pair: &Pair) -> Result<(), Failure> {
    run(place, user, rng, pair).map_err(|e| format!("{} {:?}: {e}", pair.one, pair.options))
}

fn run(place: &Place, user: User, rng: &mut Rng, pair: &Pair) -> Result<(), Failure> {
    let mut fabric = Fabric::new(place, "adapters-pair-fabric", user, pair.options)?;
    let mut job = Job::new(place, "adapters-pair", user)?;
    for (name, value) in fabric.environment() {
        job.set(name, &value.display().to_string());
    }
    let port = free_port()?;
    let [one, two] = [pair.one, pair.two].map(|words| words.replace("PORT", &port.to_string()));
    let listening = format!(":{port:04X} .* 0A ");
    let argv = ["sh", "-c", BOTH_ENDS, "-", &one, &two, &listening].map(str::to_owned);
    job.launch(&["--config".into(), with_library(&job)?], &argv)?;
    // Messages flow.
    let end = Instant::now() + LIMIT;
    while fabric.counter("messages")? < 1000 {
        want(Instant::now() < end && !job.has_ended()?, || job.output_text())?;
        rng.pause(10);
    }
    job.checkpoint()?;
    rng.pause(20);
    job.kill_all()?;
    fabric.again(pair.options)?;
    job.restart(&[])?;
    let status = job.wait(LIMIT)?;
    let said = job.output_text();
    let (count, line) = pair.lines;
    let ends = said.lines().filter(|l| l.starts_with(line)).count();
    want(status.success() && ends == count, || {
        let last: Vec<&str> = said.lines().rev().take(20).collect();
        format!("{}: {last:?}", show(status))
    })
}
