//! A program of the verbs on several hosts: belay's library comes to rest on all of them, and makes everything again
//! where the job is restarted.

use belay_tests::across::Job;
use belay_tests::build::{build, Kind};
use belay_tests::expect::want;
use belay_tests::fabric::{Fabric, LIBRARY};
use belay_tests::place::{Place, User};
use belay_tests::rng::Rng;
use belay_tests::Failure;

/// Starts the ranks of `$3` one by one, the others through remote shells, all on one fabric.
const START: &str =
    "i=$1; while [ $i -gt 1 ]; do i=$((i - 1)); ssh h$((i + 1)) \"env $2 FAKE_VERBS_HOST=host$i VERBS_RANK=$i $3\" & done
    env $2 FAKE_VERBS_HOST=host0 VERBS_RANK=0 $3; status=$?; wait; exit $status";

/// A job of a program, its fabric, and the variables that lead it there.
fn prepare(place: &Place, name: &str, parts: usize, options: &[&str]) -> Result<(Job, Fabric, String, String), Failure> {
    let mut job = Job::of(place, &format!("together-{name}"), Kind::C, parts, 4)?;
    let built = build(place, &format!("verbs/{name}"), Kind::Verbs)?;
    let program = job.work.join(name).display().to_string();
    std::fs::copy(built, &program).map_err(|e| format!("copy {program}: {e}"))?;
    // What the hosts share lies below one directory.
    let (shared, bin) = (job.work.join("fabric"), job.work.join("bin"));
    std::fs::create_dir(&shared).map_err(|e| format!("create {}: {e}", shared.display()))?;
    let fabric = Fabric::in_dir(place, shared, User::Root, options)?;
    for library in [place.bin().join("libbelay_verbs.so"), fabric.libs.join(LIBRARY)] {
        let to = bin.join(library.file_name().unwrap_or_default());
        std::fs::copy(&library, &to).map_err(|e| format!("copy {}: {e}", library.display()))?;
    }
    let config = job.work.join("verbs.toml").display().to_string();
    std::fs::write(&config, "[verbs]\nenable = \"on\"\n[gate]\nlimit = \"30s\"\n").map_err(|e| format!("write {config}: {e}"))?;
    job.options = vec!["--config".into(), config];
    let mut variables = vec![
        format!("LD_LIBRARY_PATH={}", bin.display()),
        format!("FAKE_VERBS_DIR={}", fabric.dir.display()),
    ];
    for name in ["go", "beat"] {
        let file = job.work.join(name).display().to_string();
        variables.push(format!("BELAY_TEST_{}={file}", name.to_uppercase()));
    }
    Ok((job, fabric, program, variables.join(" ")))
}

/// Checkpoints, and restarts on other hosts, where `again` has made another epoch of the fabric.
fn moves(job: &mut Job, rng: &mut Rng, mut again: impl FnMut(&Job) -> Result<(), Failure>) -> Result<(), Failure> {
    job.progress()?;
    for shift in [1, 2] {
        for _ in 0..2 {
            rng.pause(40);
            job.checkpoint()?;
            job.progress()?;
        }
        job.crash();
        job.shift(shift);
        again(job)?;
        job.restart_at(&[])?;
        job.progress()?;
    }
    job.verdict()
}

/// Numbers that the ranks exchange by themselves.
pub(super) fn on_hosts(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let (mut job, mut fabric, program, variables) = prepare(place, "verbs_rc", 3, &[])?;
    let variables = format!("{variables} VERBS_SIZE=3 VERBS_ROOT=10.99.0.1:7471");
    let command = format!("{program} event renew");
    job.launch_words(&["sh", "-c", START, "-", "3", &variables, &command])?;
    moves(&mut job, rng, |_| fabric.again(&[]))
}

/// Starts the server on the second host, and the client.
const MANAGED: &str =
    "ssh h2 \"env $1 FAKE_VERBS_HOST=host1 $2 serve\" & env $1 FAKE_VERBS_HOST=host0 $2 ask; status=$?; wait; exit $status";

const ROCE: &[&str] = &["--roce", "latency_us=100"];

/// Gives each part's host on the fabric the address that it has today.
fn give_addresses(fabric: &Fabric, job: &Job) -> Result<(), Failure> {
    for (part, at) in job.at.iter().enumerate() {
        fabric.ask("readdress", &[&format!("host{part}"), &format!("10.99.0.{at}")])?;
    }
    Ok(())
}

/// Connections by librdmacm, whose addresses are those of the hosts on which the parts are today.
pub(super) fn managed(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let (mut job, mut fabric, program, variables) = prepare(place, "verbs_cm", 2, ROCE)?;
    give_addresses(&fabric, &job)?;
    let variables = format!("{variables} VERBS_ADDRESS=10.99.0.2");
    job.launch_words(&["sh", "-c", MANAGED, "-", &variables, &format!("{program} 7473")])?;
    moves(&mut job, rng, |job| {
        fabric.again(ROCE)?;
        give_addresses(&fabric, job)
    })
}

/// Starts the server on the second host, and the client when it listens at port 7474. What runs is quoted for a shell.
const LIBFABRIC: &str = "ssh h2 \"env $1 FAKE_VERBS_HOST=host1 $2 -B 7474\" &
    until ssh h2 \"grep -q ':1D32 .* 0A ' /proc/net/tcp\"; do kill -0 $! || exit 2; sleep 0.05; done
    eval \"env $1 FAKE_VERBS_HOST=host0 $2 -P 7474 10.99.0.2\"; wait $!";

/// libfabric's messages over connections by librdmacm, which it makes to the addresses of interfaces.
pub(super) fn libfabric(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let (mut job, mut fabric, _, variables) = prepare(place, "verbs_cm", 2, ROCE)?;
    give_addresses(&fabric, &job)?;
    let command = "fi_pingpong -p 'verbs;ofi_rxm' -e rdm -c -S 4096 -I 12000";
    job.start_launch(&["sh", "-c", LIBFABRIC, "-", &variables, command])?;
    let flow = |job: &Job, fabric: &Fabric| job.comes_true("messages flow", || fabric.counter("messages").is_ok_and(|n| n > 500));
    flow(&job, &fabric)?;
    for shift in [1, 2] {
        rng.pause(40);
        job.checkpoint()?;
        job.crash();
        job.shift(shift);
        fabric.again(ROCE)?;
        give_addresses(&fabric, &job)?;
        job.start_restart()?;
        flow(&job, &fabric)?;
    }
    job.end()?;
    // Who ends first may cut the other's last acknowledgement off: with adapters that is there before the end of the
    // connection, and here it may be late. All messages came all the same.
    let said = job.said();
    want(
        said.lines().filter(|l| l.starts_with("4k      12k     =12k ")).count() == 2,
        || said.clone(),
    )
}
