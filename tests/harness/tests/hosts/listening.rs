//! Where agents listen: hosts with several addresses, of which the others reach one.

use super::*;
use belay_tests::agents::{agent, listening};

/// 10.99.0.N as the kernel's tables have it.
fn address(host: usize) -> String {
    format!("{host:02X}00630A")
}

/// All agents listen at the addresses of these hosts, one each, and nowhere else.
fn listen_at(job: &Job, hosts: &[usize]) -> Result<(), Failure> {
    let now = || -> Vec<BTreeSet<String>> {
        let parts = 0..hosts.len();
        parts
            .map(|part| agent(job, part).map(listening).unwrap_or_default())
            .collect()
    };
    let wanted: BTreeSet<String> = hosts.iter().map(|h| address(*h)).collect();
    let told = job.comes_true("each agent listens at one address", || {
        let now = now();
        now.iter().all(|one| one.len() == 1) && now.into_iter().flatten().collect::<BTreeSet<_>>() == wanted
    });
    told.map_err(|e| format!("{e}: {:?}, and not {wanted:?}", now()))
}

/// Gives `host` one more address, the first that it has, which leads nowhere from the others.
fn another_address(job: &Job, host: usize) -> Result<(), Failure> {
    let words = ["ip", "addr", "add", &format!("10.77.0.{host}/32"), "dev", "lo"];
    job.on_host(host, &words).map(drop)
}

/// Launches an MPI program that is told which interface to use.
fn launch(job: &mut Job, program: &str) -> Result<(), Failure> {
    let mut words = job.mpirun(program);
    let told = ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"];
    words.splice(1..1, told.map(str::to_owned));
    job.launch_words(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    job.settle()
}

/// A job whose hosts have an address that leads nowhere: parts find the one that they reach, and nobody listens at another.
pub(super) fn where_reached(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::new(place, "hosts-listening", 2, 3)?.unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    for host in 1..=3 {
        another_address(&job, host)?;
    }
    launch(&mut job, &program)?;
    listen_at(&job, &[1, 2])?;
    job.checkpoint()?;
    job.crash();
    job.shift(1);
    job.restart_at(&[])?;
    listen_at(&job, &job.at)?;
    job.checkpoint()?;
    job.verdict()
}

/// A job whose configuration names where to listen.
pub(super) fn configured(place: &Place, _: &mut Rng) -> Result<(), Failure> {
    let site = "[tree]\nlisten = [\"10.99.0.0/16\"]\n";
    let mut job = Job::at_site((User::Root, site), place, "hosts-listen", Kind::OpenMpi, 2, 2)?;
    let program = job.program(place, "mpi/mpi_p2p")?;
    another_address(&job, 1)?;
    launch(&mut job, &program)?;
    listen_at(&job, &[1, 2])?;
    job.checkpoint()?;
    job.crash();
    job.restart(&[])?;
    job.verdict()
}
