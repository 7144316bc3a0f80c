//! A job whose agents are connected through others: the site's file, `/etc/belay/belay.toml`, sets the fan-out of the tree.

use super::*;
use belay_tests::agents::{agent, connections};

/// Nodes of the job.
const NODES: usize = 4;

/// Connections that the agents have, that of the root first, the others sorted; 0 for one that is not there.
fn degrees(job: &Job) -> Vec<usize> {
    let mut all: Vec<usize> = (0..NODES).map(|part| agent(job, part).map_or(0, connections)).collect();
    all[1..].sort_unstable();
    all
}

/// Rounds of checkpoint, crash and restart of a job of four nodes with this fan-out: in a chain and in a tree, of which
/// the agents' connections tell. The last is restarted when the site's file says nothing any more: what the job was
/// launched with counts.
pub(super) fn rounds(place: &Place, fan_out: usize, rng: &mut Rng) -> Result<(), Failure> {
    let site = format!("[tree]\nfan_out = {fan_out}\n");
    let mut job = Job::at_site(
        (User::Root, &site),
        place,
        &format!("hosts-relays{fan_out}"),
        Kind::OpenMpi,
        NODES,
        NODES + 1,
    )?
    .unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.launch(&program)?;
    let shape = match fan_out {
        1 => [1, 1, 2, 2],
        _ => [2, 1, 1, 2],
    };
    for n in 0..rounds_wanted() {
        let round = |e: Failure| format!("round {n}: {e}");
        job.comes_true("the agents are connected in that shape", || degrees(&job) == shape)
            .map_err(round)?;
        std::thread::sleep(Duration::from_millis(rng.below(700)));
        job.checkpoint().map_err(round)?;
        std::thread::sleep(Duration::from_millis(rng.below(300)));
        job.crash();
        if n + 1 == rounds_wanted() {
            job.configure("")?;
        }
        job.shift(n + 1);
        job.restart_at(&[]).map_err(|e| format!("round {n}: restart: {e}"))?;
        job.progress().map_err(round)?;
    }
    job.comes_true("the agents are connected as they were launched", || degrees(&job) == shape)?;
    job.verdict()?;
    // A part that ends with the one through which it is connected is no loss.
    want(!job.said().contains("is lost"), || job.said())
}
