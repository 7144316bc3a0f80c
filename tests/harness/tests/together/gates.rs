//! Libraries that take part in checkpoints, on several hosts: all come to rest, or nobody does; whoever is killed at
//! whatever edge, the gates open everywhere.

use super::END;
use belay_tests::across::Job;
use belay_tests::build::Kind;
use belay_tests::expect::want;
use belay_tests::job::{output, text};
use belay_tests::place::Place;
use belay_tests::Failure;
use std::process::Output;

/// The program on h1 and h2, the library of one of which does something; a third host is there.
struct Pair(Job);

impl Pair {
    fn new(place: &Place, words: &str) -> Result<Self, Failure> {
        let mut job = Job::of(place, &format!("gates-{}", words.replace(' ', "-")), Kind::C, 2, 3)?;
        let program = job.program(place, "gate_work")?;
        let config = job.work.join("gate.toml").display().to_string();
        std::fs::write(&config, "[gate]\nlimit = \"500ms\"\n").map_err(|e| format!("write {config}: {e}"))?;
        job.options = vec!["--config".into(), config];
        let words: Vec<&str> = [program.as_str(), "host", "h2"].into_iter().chain(words.split(' ')).collect();
        job.launch_words(&words)?;
        let mut pair = Self(job);
        pair.goes_on()?;
        Ok(pair)
    }

    /// Both do something after this call.
    fn goes_on(&mut self) -> Result<(), Failure> {
        ["beat", "beat.below"].iter().try_for_each(|file| self.0.progress_of(file))
    }

    fn take(&self) -> Result<Output, Failure> {
        let o = output(
            self.0.command(1, &[&self.0.belay, "checkpoint", "--quiet", &self.0.dir()]),
            END,
        )?;
        println!("{}", text(&o).trim());
        Ok(o)
    }

    /// The next checkpoint fails for one of these reasons, and both go on.
    fn fails(&mut self, reasons: &[&str]) -> Result<(), Failure> {
        let o = self.take()?;
        want(!o.status.success() && reasons.iter().any(|r| text(&o).contains(r)), || {
            format!("not one of {reasons:?}: {}", text(&o))
        })?;
        self.goes_on()
    }

    fn spare(&self) -> Result<(), Failure> {
        std::fs::write(self.0.work.join("spare"), "").map_err(|e| format!("create spare: {e}"))
    }

    fn crash(&mut self) -> Result<(), Failure> {
        self.0.crash();
        ["beat", "beat.below"]
            .iter()
            .try_for_each(|file| belay_tests::beat::forget(&self.0.work.join(file)))
    }

    fn restart(&mut self) -> Result<(), Failure> {
        self.0.start_restart()?;
        self.goes_on()
    }

    fn ends_well(mut self) -> Result<(), Failure> {
        for shift in [1, 2] {
            self.0.checkpoint()?;
            self.goes_on()?;
            self.0.checkpoint()?;
            self.crash()?;
            self.0.shift(shift);
            self.restart()?;
        }
        self.0.checkpoint()?;
        self.0.verdict()
    }
}

/// Checkpoints, and restarts on other hosts.
pub(super) fn taken(place: &Place, words: &str) -> Result<(), Failure> {
    Pair::new(place, words)?.ends_well()
}

/// The library on one of the hosts refuses, or is late; the next checkpoint is taken.
pub(super) fn put_off(place: &Place, words: &str, reason: &str) -> Result<(), Failure> {
    let mut pair = Pair::new(place, words)?;
    pair.fails(&[reason])?;
    pair.spare()?;
    // It may still be about to answer.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    pair.ends_well()
}

/// An agent dies with the gates shut: they open on all hosts, and the checkpoint before restarts.
pub(super) fn agent_dies(place: &Place, words: &str) -> Result<(), Failure> {
    let mut pair = Pair::new(place, words)?;
    // The second one is hit.
    pair.spare()?;
    pair.0.checkpoint()?;
    pair.goes_on()?;
    std::fs::remove_file(pair.0.work.join("spare")).map_err(|e| format!("remove spare: {e}"))?;
    let o = pair.take()?;
    want(!o.status.success(), || format!("taken without an agent: {}", text(&o)))?;
    pair.goes_on()?;
    pair.crash()?;
    pair.spare()?;
    pair.restart()?;
    pair.ends_well()
}

/// A library cannot rebuild on one of the hosts: the restart fails with its reason, everywhere.
pub(super) fn rebuild_refused(place: &Place, words: &str) -> Result<(), Failure> {
    let mut pair = Pair::new(place, words)?;
    pair.0.checkpoint()?;
    pair.crash()?;
    pair.0.start_restart()?;
    let status = pair.0.end()?;
    let said = pair.0.said();
    want(!status.success() && said.contains("something better to do"), || said)?;
    let dir = |pair: &Pair| pair.0.hosts_in_use();
    pair.0.comes_true("all hosts are free", || dir(&pair).is_empty())?;
    pair.spare()?;
    pair.restart()?;
    pair.ends_well()
}
