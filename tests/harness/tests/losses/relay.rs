//! An agent through which others are connected is killed: what is behind it is not lost with it.

use super::*;
use belay_tests::agents::{connections, host_of};

/// Nodes of the job, in a chain.
const NODES: usize = 4;

/// The agents that have one above and one below.
fn relays(job: &Job) -> Vec<usize> {
    let is_relay = |part: &usize| agent(job, *part).is_ok_and(|pid| connections(pid) == 2);
    (1..NODES).filter(is_relay).collect()
}

/// In each phase of a checkpoint an agent that passes on what others say is killed: its own part is lost and the user
/// is told, no other is; those behind it come to the root, which refuses a checkpoint without the lost part by its
/// name; and the newest whole one restarts.
pub(super) fn killed(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let mut job = Job::at_site(
        (User::Root, "[tree]\nfan_out = 1\n"),
        place,
        "losses-relay",
        Kind::OpenMpi,
        NODES,
        NODES,
    )?
    .unhurried();
    let program = job.program(place, "mpi/mpi_p2p")?;
    job.options = vec!["--log-level".into(), "debug".into()];
    job.launch(&program)?;
    for phase in PHASES {
        let in_phase = |e: Failure| format!("{phase}: {e}");
        job.comes_true("there are two relays", || relays(&job).len() == 2)
            .map_err(in_phase)?;
        job.checkpoint().map_err(in_phase)?;
        let before = job.newest();
        let part = relays(&job)[rng.below(2) as usize];
        let host = host_of(&job, part).ok_or("a part that is nowhere")?;
        let others: Vec<usize> = (0..NODES).filter(|p| *p != part).collect();
        let moment = (phase, rng.below(FIRST_STEPS));
        let taken = checkpoint_struck(&job, part, moment, || Ok(Verdict::Kill)).map_err(in_phase)?;
        let lost = format!("the part of the job on h{host} is lost");
        job.says(&lost).map_err(in_phase)?;
        want(taken.status.success() || text(&taken).contains("belay:"), || {
            in_phase(format!("no reason: {}", text(&taken)))
        })?;
        // Who was below it is where the root can be asked.
        job.comes_true("the others are connected again", || {
            let all: usize = others.iter().map(|p| agent(&job, *p).map_or(0, connections)).sum();
            all == 2 * (others.len() - 1)
        })
        .map_err(in_phase)?;
        let refused = job.belay(&["checkpoint", "--quiet", &job.dir()])?;
        want(!refused.status.success() && text(&refused).contains(&lost), || {
            in_phase(format!("a checkpoint without the lost part: {}", text(&refused)))
        })?;
        want(job.said().matches("is lost").count() == 1, || {
            in_phase(format!("not one loss: {}", job.said()))
        })?;
        let newest = job.newest();
        want(newest == before || (newest == before + 1), || {
            in_phase(format!("generation {newest} after {before}"))
        })?;
        job.crash();
        job.restart(&[]).map_err(in_phase)?;
    }
    job.verdict()
}
