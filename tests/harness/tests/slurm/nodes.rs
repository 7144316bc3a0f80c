//! Jobs that go on on other nodes than before, of which nobody tells belay: it takes those of its allocation.

use super::site::Site;
use belay_tests::expect::{io, want};
use belay_tests::place::Place;
use belay_tests::rng::Rng;
use belay_tests::slurm::Slurm;
use belay_tests::Failure;
use std::time::Duration;

/// Waits until the program is on these of the nodes h2 to h4: not all tasks start at the same time.
pub(super) fn on_nodes(site: &Site, expected: &[usize]) -> Result<(), Failure> {
    let program = site.work.join("cg").display().to_string();
    let at = |site: &Slurm| -> Vec<usize> { (2..=4).filter(|h| !site.hosts.find(*h, &program).is_empty()).collect() };
    site.slurm
        .await_that(&format!("the program on nodes {expected:?}"), |s| Ok(at(s) == expected))
        .map_err(|e| format!("it is on {:?}: {e}", at(&site.slurm)))
}

/// A job of the script is requeued three times, each time without another node: that of the part, that of belay itself,
/// and that of the part again, with belay on its own of the first time. A part whose node is there stays.
pub(super) fn other_nodes(place: &Place, rng: &mut Rng) -> Result<(), Failure> {
    let site = Site::new(place, "slurm-nodes", 3)?;
    let job = site.submit(&["--time=20", "--exclude=h4"])?;
    site.progress(&job, 0)?;
    on_nodes(&site, &[2, 3])?;
    let mut lines = Vec::new();
    for (restarts, (without, nodes, part)) in (1..).zip([("h3", [2, 4], "h4"), ("h2", [3, 4], "h4"), ("h4", [2, 3], "h3")]) {
        std::thread::sleep(Duration::from_millis(rng.below(500)));
        site.user(&["scancel", "--batch", "--signal=USR1", &job])?;
        site.slurm.await_that("a requeue", |s| {
            Ok(s.field(&job, "Restarts")? == restarts.to_string() && s.field(&job, "JobState")? == "PENDING")
        })?;
        let excluded = format!("ExcNodeList={without}");
        site.user(&["scontrol", "update", &format!("jobid={job}"), &excluded])?;
        site.runs_again(&job, restarts)?;
        site.progress(&job, 0).map_err(|e| format!("without {without}: {e}"))?;
        on_nodes(&site, &nodes)?;
        lines.push(format!(
            "belay: restarting with the other parts on {part}, in Slurm's allocation; --hosts names others"
        ));
        let said = site.said(&job);
        let told: Vec<&str> = said.lines().filter(|l| l.contains("the other parts")).collect();
        want(told == lines, || format!("without {without}: {said}"))?;
    }
    io("write go", std::fs::write(site.go(), ""))?;
    let said = site.completes(&job)?;
    want(said.contains("PASS mpi_cg"), || format!("no verdict: {said}"))
}
