//! What a job's next checkpoint will take, and how earlier predictions came true.
//!
//! ```text
//! committed ── what it was, observed times ──> record (predictions.json) ── model of it ──> factors ──> forecast of the next
//! copied to durable tiers, restarted ── the same ──┘
//! ```
//! The model is [`belay_storage::predict`]. Of a job on several hosts this is what the host of the root needs for its
//! own part.

mod node;
mod records;

pub use node::{fastest_link, fork_page_s, node, Assumed};
use records::{Compared, Measured, Record, Records};

use crate::checkpoint::Committed;
use crate::generations::Generation;
use crate::jobdir::{Description, JobDir};
use belay_storage::predict::differential::Differential;
use belay_storage::predict::{factor, median, times, Costs, Node, Time, Times, Work, LEARNS_FROM, MOST_S};
use belay_storage::session::Stats;
use belay_wire::{ComparedStatus, ComparedTime, DifferentialStatus, Factors, Phase, PredictedStatus};
use std::time::Duration;

/// Bytes of a page.
const PAGE: u64 = 4096;
/// A checkpoint of which more is new than this share says nothing about what others change, where those change less.
const ALL: f64 = 0.99;

/// The forecast of a job, and what it is made from.
#[derive(Debug)]
pub(crate) struct Forecast {
    node: Node,
    records: Records,
    /// The records say more than the file.
    unwritten: bool,
}

/// One of the four times: of a record, and of the model.
type Which = (fn(&Record) -> &Compared, fn(&Times) -> Option<Time>);
const STOP: Which = (|r| &r.stop, |t| Some(t.stop));
const LOCAL: Which = (|r| &r.local, |t| Some(t.local));
const DURABLE: Which = (|r| &r.durable, |t| t.durable);
const RESTART: Which = (|r| &r.restart, |t| Some(t.restart));

/// Times as they are told: the model's by the factor.
#[derive(Debug, Clone, Copy)]
struct Told {
    stop: f64,
    local: f64,
    durable: Option<f64>,
    restart: f64,
}

fn seconds(d: Duration) -> Option<f64> {
    Some(d.as_secs_f64()).filter(|s| *s <= MOST_S)
}

/// `ns` of so many, each; none where there were none.
fn each(ns: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| ns as f64 / 1e9 / of as f64)
}

impl Forecast {
    /// What is known of the job in `dir` on this node.
    pub(crate) fn of(dir: &JobDir, d: &Description) -> Self {
        Self {
            node: node(&d.config).0,
            records: Records::read(dir.path(), &d.id),
            unwritten: false,
        }
    }

    /// What the model leaves out: by what it says now of earlier generations, knowing what they were.
    fn factor(&self, node: &Node, (of, by): Which) -> Option<f64> {
        let pair = |r: &Record| Some((by(&times(node, &r.work()))?.seconds, of(r).observed_s?));
        factor(self.records.list.iter().filter_map(pair))
    }

    /// The median of what the newest records have measured.
    fn learnt(&self, what: impl Fn(&Record) -> Option<f64>) -> Option<f64> {
        median(self.records.list.iter().rev().filter_map(what).take(LEARNS_FROM).collect())
    }

    /// The share that is expected to be new: that of recent checkpoints. The first one of a job is all new.
    fn share(&self, of: impl Fn(&Record) -> Option<f64>) -> f64 {
        let in_part = self.learnt(|r| of(r).filter(|share| *share < ALL));
        in_part.or_else(|| self.learnt(of)).unwrap_or(1.0)
    }

    /// The node, with what has been measured on it.
    fn measured_node(&self) -> Node {
        let assumed = Costs::default();
        let or = |what: fn(&Measured) -> Option<f64>, assumed| self.learnt(|r| what(&r.measured)).unwrap_or(assumed);
        let costs = Costs {
            process_s: or(|m| m.process_s, assumed.process_s),
            fork_page_s: or(|m| m.fork_page_s, assumed.fork_page_s),
            scan_page_s: or(|m| m.scan_page_s, assumed.scan_page_s),
            ..assumed
        };
        Node {
            costs,
            moves: self.learnt(|r| r.measured.moves).unwrap_or(self.node.moves),
            ..self.node.clone()
        }
    }

    /// What the next checkpoint is expected to be, where the processes have so much memory.
    fn expected(&self, processes: u32, bytes: u64) -> Work {
        let part = |share: f64| (bytes as f64 * share) as u64;
        Work {
            processes,
            bytes,
            new_bytes: part(self.share(|r| share(r.new_bytes, r.bytes))),
            flush_bytes: part(self.share(|r| share(r.flushed_bytes?, r.bytes))),
        }
    }

    fn told(&self, work: &Work) -> Told {
        let node = self.measured_node();
        let t = times(&node, work);
        let corrected = |time: Time, which| (time.seconds * self.factor(&node, which).unwrap_or(1.0)).min(MOST_S);
        Told {
            stop: corrected(t.stop, STOP),
            local: corrected(t.local, LOCAL),
            durable: t.durable.map(|d| corrected(d, DURABLE)),
            restart: corrected(t.restart, RESTART),
        }
    }

    /// What was forecast from the newest record; none where there is none.
    fn next(&self) -> Option<Told> {
        let last = self.records.list.last()?;
        Some(self.told(&self.expected(last.processes, last.bytes)))
    }

    /// A checkpoint was committed; moves out of local tiers have reached so many bytes per second, where there are any.
    pub(crate) fn committed(&mut self, dir: &JobDir, c: &Committed, (stats, moves): (&Stats, Option<f64>)) {
        let told = self.next();
        let g = &c.generation;
        let snapshot = g.phases_ms.get(Phase::Snapshot.name()).map_or(0.0, |ms| ms / 1e3);
        let pages = g.bytes / PAGE;
        let others = (c.blocked.as_secs_f64() - snapshot).max(0.0);
        let looked_at = stats.written + stats.found + stats.clean + stats.common;
        let record = Record {
            generation: g.generation,
            processes: g.ranks,
            bytes: g.bytes,
            new_bytes: g.new_bytes,
            flushed_bytes: None,
            stop: Compared {
                predicted_s: told.map(|t| t.stop),
                observed_s: seconds(c.blocked),
            },
            local: Compared {
                predicted_s: told.map(|t| t.local),
                observed_s: seconds(c.write),
            },
            durable: Compared {
                predicted_s: told.and_then(|t| t.durable),
                ..Compared::default()
            },
            restart: Compared {
                predicted_s: told.map(|t| t.restart),
                ..Compared::default()
            },
            measured: Measured {
                process_s: (g.ranks > 0).then(|| others / f64::from(g.ranks)),
                fork_page_s: (pages > 0).then(|| snapshot / pages as f64),
                scan_page_s: each(stats.writers_ns.saturating_sub(stats.write_ns), pages).filter(|_| stats.writers_ns > 0),
                hash_page_s: each(stats.hash_ns.saturating_add(stats.look_ns), stats.timed_pages),
                write_page_s: each(stats.write_ns, stats.write_pages),
                dirty: share(stats.written, looked_at),
                moves,
            },
        };
        self.records.add(record);
        self.records.write(dir.path());
    }

    /// Generation `number` was copied to durable tiers, which lacked `bytes` of it.
    pub(crate) fn flushed(&mut self, dir: &JobDir, number: u64, bytes: u64, time: Duration) {
        // What was there already has taught nothing.
        let Some(record) = self.records.find(number).filter(|_| bytes > 0) else {
            return;
        };
        record.flushed_bytes = Some(bytes);
        record.durable.observed_s = seconds(time);
        self.records.write(dir.path());
    }

    /// The job was restarted from `g`, which took so long. Its programs run already: the file is written by
    /// [`Forecast::keep`].
    pub(crate) fn restarted(&mut self, g: &Generation, time: Duration) {
        let Ok(m) = &g.manifest else { return };
        let work = Work {
            processes: m.processes,
            bytes: m.bytes,
            ..Work::default()
        };
        let predicted = self.told(&work).restart;
        if self.records.find(g.number).is_none() {
            self.records.add(Record {
                generation: g.number,
                processes: m.processes,
                bytes: m.bytes,
                new_bytes: m.new_bytes,
                ..Record::default()
            });
        }
        if let Some(record) = self.records.find(g.number) {
            record.restart = Compared {
                predicted_s: Some(predicted),
                observed_s: seconds(time),
            };
        }
        self.unwritten = true;
    }

    /// Writes what was learnt from a restart.
    pub(crate) fn keep(&mut self, dir: &JobDir) {
        if std::mem::take(&mut self.unwritten) {
            self.records.write(dir.path());
        }
    }

    /// For the status document: what the next checkpoint takes. Where there has been none, of processes with so much
    /// memory; none where that is not known either.
    pub(crate) fn status(&self, (processes, resident): (u32, u64)) -> Option<Box<PredictedStatus>> {
        let (processes, bytes) = match self.records.list.last() {
            Some(last) => (last.processes, last.bytes),
            None if resident > 0 => (processes, resident),
            None => return None,
        };
        let work = self.expected(processes, bytes);
        let (told, node) = (self.told(&work), self.measured_node());
        let has_observed = |r: &&Record| r.local.observed_s.is_some();
        let seen = self.records.list.iter().filter(has_observed).count().min(LEARNS_FROM);
        Some(Box::new(PredictedStatus {
            stop_s: told.stop,
            local_s: told.local,
            durable_s: told.durable,
            restart_s: told.restart,
            bytes,
            new_bytes: work.new_bytes,
            generations: u32::try_from(seen).unwrap_or(u32::MAX),
            factors: Factors {
                stop: self.factor(&node, STOP),
                local: self.factor(&node, LOCAL),
                durable: self.factor(&node, DURABLE),
                restart: self.factor(&node, RESTART),
            },
        }))
    }

    /// What it is worth to look for what has changed, as measured lately; none where nothing was looked for.
    pub(crate) fn differential(&self) -> Option<Box<DifferentialStatus>> {
        let hash = self.learnt(|r| r.measured.hash_page_s)?;
        let write = self.learnt(|r| r.measured.write_page_s)?;
        let dirty = self.records.list.iter().rev().find_map(|r| r.measured.dirty)?;
        let d = Differential::new(hash, write, dirty)?;
        Some(Box::new(DifferentialStatus {
            kappa: d.kappa(),
            dirty_share: d.dirty(),
            delta: d.delta(),
            break_even: d.break_even(),
            delta_hashed_once: d.delta_once(),
            break_even_hashed_once: d.break_even_once(),
        }))
    }

    /// What was predicted and what was observed, oldest first.
    pub(crate) fn compared(&self) -> Vec<ComparedStatus> {
        let time = |c: &Compared| ComparedTime {
            predicted_s: c.predicted_s,
            observed_s: c.observed_s,
        };
        let one = |r: &Record| ComparedStatus {
            generation: r.generation,
            stop: time(&r.stop),
            local: time(&r.local),
            durable: time(&r.durable),
            restart: time(&r.restart),
        };
        self.records.list.iter().map(one).collect()
    }
}

/// For the fuzzer: whatever `predictions.json` says, what is told of it are times.
#[cfg(feature = "fuzzing")]
pub(crate) fn understand(data: &[u8]) {
    let Ok(records) = Records::decode(std::path::Path::new("predictions.json"), data) else {
        return;
    };
    let node = node(&crate::config::Config::default()).0;
    let forecast = Forecast {
        node,
        records,
        unwritten: false,
    };
    drop((forecast.compared(), forecast.differential()));
    if let Some(p) = forecast.status((1, 1 << 20)) {
        let times = [p.stop_s, p.local_s, p.restart_s];
        assert!(times.iter().all(|t| (0.0..=MOST_S).contains(t)), "{p:?}");
    }
}

/// `part` of `all`. A root copies what other hosts have too, which may be more than it has itself.
fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

#[cfg(test)]
mod tests;
