//! The agent's numbers for its site, where it was asked for them (`--metrics`).

use super::{losing, Agent};
use crate::checkpoint::Committed;
use crate::exporter::{Exporter, Place};
use crate::metrics::{Metrics, Now, Others};
use crate::nodes::table::Share;
use crate::nodes::Stage;
use crate::{generations, sys, Failure};
use belay_tree::{Contribution, Values};
use belay_wire::Exit;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// What parts say that they have left out, bytes.
const LEFT_OUT: &str = "left_out";

/// What all parts together have left out, of what was `said` when all had written.
pub(super) fn left_out(said: &Values) -> u64 {
    let sum = said.get(&format!("sum {LEFT_OUT}"));
    sum.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// The numbers and where they are to be had.
#[derive(Debug)]
pub(super) struct Telling {
    metrics: Metrics,
    exporter: Exporter,
    /// At the last checkpoint.
    others: Others,
    told: Told,
}

/// What was told last. Anybody who reaches a port may ask there, as often as they like.
#[derive(Debug, Default)]
struct Told {
    text: String,
    made: Cell<Option<Instant>>,
    took: Duration,
}

impl Told {
    /// Of the agent's time a tenth at most is for this.
    const SHARE: u32 = 10;

    fn text(&mut self, make: impl FnOnce() -> String) -> String {
        if self.made.get().is_none_or(|at| at.elapsed() >= self.took * Self::SHARE) {
            let begin = Instant::now();
            self.text = make();
            self.took = begin.elapsed();
            self.made.set(Some(Instant::now()));
        }
        self.text.clone()
    }
}

impl Telling {
    /// The parts have written, and told their numbers.
    pub(super) fn hear(&mut self, number: u64, values: &Values) {
        self.others = Others::of(number, values);
    }
}

impl Agent {
    /// Opens the place that the job's description names.
    pub(crate) fn open_metrics(&mut self) -> Result<(), Failure> {
        let Some(place) = &self.description.metrics else {
            return Ok(());
        };
        let place: Place = place
            .parse()
            .map_err(|e: String| Failure::new(Exit::Usage, format!("metrics: {e}")))?;
        let exporter = Exporter::open(&place)?;
        if let Some(at) = exporter.address() {
            tracing::info!(%at, "metrics");
        }
        let metrics = Metrics::new(&self.description.name, &sys::host());
        let others = Others::default();
        self.telling = Some(Telling {
            metrics,
            exporter,
            others,
            told: Told::default(),
        });
        Ok(())
    }

    pub(super) fn metrics_interest(&mut self) -> Vec<(i32, i16)> {
        self.telling.as_mut().map(|t| t.exporter.interest()).unwrap_or_default()
    }

    pub(super) fn attend_metrics(&mut self, ready: &[i16]) {
        if ready.iter().all(|r| *r == 0) {
            return;
        }
        if let Some(mut t) = self.telling.take() {
            let (metrics, others, told) = (&t.metrics, t.others, &mut t.told);
            t.exporter.attend(ready, || told.text(|| metrics.text(&self.now(others))));
            self.telling = Some(t);
        }
    }

    /// A checkpoint has ended.
    pub(super) fn tell(&self, how: Result<&Committed, &Failure>) {
        let Some(t) = &self.telling else { return };
        match how {
            Ok(c) => t
                .metrics
                .committed(c, self.with_parts(&c.generation).dirty.as_deref(), &t.others),
            Err(failure) => t.metrics.failed(failure),
        }
        t.told.made.set(None);
        self.publish();
    }

    /// Writes the file, where that is the place.
    pub(super) fn publish(&self) {
        let Some(t) = &self.telling else { return };
        if let Err(e) = t.exporter.publish(|| t.metrics.text(&self.now(t.others))) {
            tracing::warn!(error = %e, "write the metrics");
        }
    }

    pub(super) fn stop_telling(&mut self) {
        if let Some(t) = self.telling.take() {
            t.exporter.close();
        }
    }

    /// What this node brings to the step of a checkpoint that `stage` waits for: a part what it has of it and, where
    /// that is wanted, its other numbers, the root the wish for them.
    pub(super) fn numbers_for(&self, stage: Stage) -> Contribution {
        let mut own = Contribution::ready();
        let nodes = self.nodes.as_ref();
        let together = nodes.and_then(|n| n.together.as_ref());
        let Some(together) = together.filter(|_| stage == Stage::Written) else {
            return own;
        };
        let Some(tag) = nodes.and_then(|n| n.part) else {
            own.want.insert(Share::wish());
            own.want.insert(losing::wish_lost());
            own.want.insert(format!("sum {LEFT_OUT}"));
            own.want.extend(Others::wishes().into_iter().filter(|_| together.tell));
            return own;
        };
        losing::tell_lost(&mut own, tag);
        if let Some((committed, _)) = &together.own {
            Share::add_to(&mut own, tag, &committed.generation);
            let left_out = committed.generation.left_out;
            own.sums.extend(left_out.map(|bytes| (LEFT_OUT.to_owned(), bytes)));
            if together.tell {
                Others::add_to(&mut own, &self.now(Others::default()), committed);
            }
        }
        own
    }

    /// The numbers of this host, and with them those of `others`.
    fn now(&self, others: Others) -> Now {
        let dir = self.dir.generations();
        let all = generations::list(&dir).unwrap_or_default();
        let whole = || all.iter().filter_map(|g| Some((g.number, g.whole()?)));
        let live = self.processes();
        let parts = self.nodes.as_ref().map_or(0, |n| n.there.len() as u64);
        // Those that have ended have no processes.
        let others = Some(others).filter(|_| parts > 0).unwrap_or_default();
        Now {
            parts: parts + 1,
            processes: live.len() as u64 + others.processes,
            threads: live.iter().map(|p| u64::from(p.threads)).sum::<u64>() + others.threads,
            resident_bytes: live.iter().map(|p| p.resident_bytes).sum::<u64>() + others.resident_bytes,
            in_progress: self.writing.is_some() || self.is_together(),
            skipped: self.skipped,
            generations: whole().count() as u64,
            newest: whole().next_back().map(|(n, m)| {
                let theirs = if others.checkpoint.0 == n { others.checkpoint.1 } else { 0 };
                (n, m.time_unix_s, m.bytes + theirs)
            }),
            stored_bytes: self.engine.bytes().unwrap_or(0) + generations::own_bytes(&dir).unwrap_or(0) + others.stored_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_often_is_told_the_same_again() {
        let (mut told, mut made) = (Told::default(), 0);
        let mut ask = |told: &mut Told| {
            told.text(|| {
                made += 1;
                std::thread::sleep(Duration::from_secs(1) / 10);
                made.to_string()
            })
        };
        assert_eq!([ask(&mut told), ask(&mut told)], ["1", "1"]);
        // A checkpoint has ended.
        told.made.set(None);
        assert_eq!([ask(&mut told), ask(&mut told)], ["2", "2"]);
        told.made.set(Instant::now().checked_sub(told.took * Told::SHARE));
        assert_eq!(ask(&mut told), "3");
    }
}
