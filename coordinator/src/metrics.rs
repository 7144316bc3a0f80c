//! What a running job tells its site: numbers in the text format of OpenMetrics, which Prometheus reads. Table and
//! meaning: docs/metrics.md.

use crate::checkpoint::Committed;
use crate::Failure;
use belay_tree::{Contribution, Values};
use belay_wire::{DirtyShare, Phase};
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{exponential_buckets, Histogram};
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Label names and values.
type Labels = Vec<(&'static str, String)>;

/// What is true at this moment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Now {
    /// Hosts' parts that are there, the root's among them.
    pub(crate) parts: u64,
    pub(crate) processes: u64,
    pub(crate) threads: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) in_progress: bool,
    pub(crate) skipped: u64,
    /// Whole generations, and the newest of them: number, time, bytes.
    pub(crate) generations: u64,
    pub(crate) newest: Option<(u64, u64, u64)>,
    pub(crate) stored_bytes: u64,
}

/// What the parts on other hosts tell at a checkpoint, merged on its way up the tree: added up, but for times, of which
/// the longest counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Others {
    pub(crate) processes: u64,
    pub(crate) threads: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) stored_bytes: u64,
    /// The checkpoint, and what they have of it.
    pub(crate) checkpoint: (u64, u64),
    written_bytes: u64,
    blocked_us: u64,
    write_us: u64,
}

const SUMS: [&str; 6] = ["processes", "threads", "resident", "stored", "written", "bytes"];
const LONGEST: [&str; 2] = ["blocked", "write"];

impl Others {
    /// The facts that the root asks for.
    pub(crate) fn wishes() -> BTreeSet<String> {
        let sums = SUMS.iter().map(|n| format!("sum {n}"));
        sums.chain(LONGEST.iter().map(|n| format!("greatest {n}"))).collect()
    }

    /// Adds the numbers of a part, of which checkpoint `c` is, to what it brings.
    pub(crate) fn add_to(own: &mut Contribution, now: &Now, c: &Committed) {
        let us = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        let g = &c.generation;
        let sums = [
            now.processes,
            now.threads,
            now.resident_bytes,
            now.stored_bytes,
            g.new_bytes,
            g.bytes,
        ];
        let named = |names: &[&str], of: &[u64]| names.iter().map(|n| (*n).to_owned()).zip(of.iter().copied()).collect();
        own.sums = named(&SUMS, &sums);
        own.greatest = named(&LONGEST, &[us(c.blocked), us(c.write)]);
    }

    /// What was asked for at checkpoint `number`.
    pub(crate) fn of(number: u64, values: &Values) -> Self {
        let told = |name: String| values.get(&name).and_then(|v| v.parse().ok()).unwrap_or(0);
        let [processes, threads, resident_bytes, stored_bytes, written_bytes, bytes] = SUMS.map(|n| told(format!("sum {n}")));
        let [blocked_us, write_us] = LONGEST.map(|n| told(format!("greatest {n}")));
        Self {
            processes,
            threads,
            resident_bytes,
            stored_bytes,
            checkpoint: (number, bytes),
            written_bytes,
            blocked_us,
            write_us,
        }
    }
}

/// The numbers of one job, since its agent began.
pub(crate) struct Metrics {
    registry: Registry,
    checkpoints: Counter,
    failures: Family<Labels, Counter>,
    skipped: Counter,
    written: Counter,
    dirty: Family<Labels, Gauge<f64, AtomicU64>>,
    blocked: Histogram,
    phases: Family<Labels, Histogram>,
    in_progress: Gauge,
    generations: Gauge,
    number: Gauge,
    time: Gauge,
    bytes: Gauge,
    stored: Gauge,
    parts: Gauge,
    processes: Gauge,
    threads: Gauge,
    resident: Gauge,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

/// From 0.1 ms to about half an hour.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(1e-4, 4.0, 13))
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// `value` as it stands between quotation marks. The crate writes label values as they are.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Metrics {
    /// Those of job `name` on `host`.
    pub(crate) fn new(name: &str, host: &str) -> Self {
        let labels = [("belay_job", name.to_owned()), ("host", host.to_owned())];
        let labels = labels.into_iter().map(|(k, v)| (k.into(), escape(&v).into()));
        let mut m = Self {
            registry: Registry::with_prefix_and_labels("belay", labels),
            checkpoints: Counter::default(),
            failures: Family::default(),
            skipped: Counter::default(),
            written: Counter::default(),
            dirty: Family::default(),
            blocked: seconds(),
            phases: Family::new_with_constructor(seconds),
            in_progress: Gauge::default(),
            generations: Gauge::default(),
            number: Gauge::default(),
            time: Gauge::default(),
            bytes: Gauge::default(),
            stored: Gauge::default(),
            parts: Gauge::default(),
            processes: Gauge::default(),
            threads: Gauge::default(),
            resident: Gauge::default(),
        };
        let r = &mut m.registry;
        r.register("checkpoints", "Checkpoints committed", m.checkpoints.clone());
        r.register("checkpoint_failures", "Checkpoints that failed, by kind", m.failures.clone());
        r.register(
            "checkpoints_skipped",
            "Interval checkpoints left out because one was being written",
            m.skipped.clone(),
        );
        r.register_with_unit("written", "Written for checkpoints", Unit::Bytes, m.written.clone());
        r.register(
            "checkpoint_dirty_share",
            "Of each process's memory, what the newest checkpoint found new: of all processes",
            m.dirty.clone(),
        );
        r.register_with_unit(
            "checkpoint_blocked",
            "Time the program was blocked by a checkpoint",
            Unit::Seconds,
            m.blocked.clone(),
        );
        r.register_with_unit(
            "checkpoint_phase",
            "Time of each phase of a checkpoint",
            Unit::Seconds,
            m.phases.clone(),
        );
        r.register(
            "checkpoint_in_progress",
            "1 while a checkpoint is being taken or written",
            m.in_progress.clone(),
        );
        r.register("generations", "Whole checkpoints that are kept", m.generations.clone());
        r.register("newest_generation", "Number of the newest whole checkpoint", m.number.clone());
        r.register_with_unit(
            "newest_generation_timestamp",
            "When the newest whole checkpoint was committed, since the epoch",
            Unit::Seconds,
            m.time.clone(),
        );
        r.register_with_unit(
            "newest_generation_size",
            "What a restart from the newest whole checkpoint reads",
            Unit::Bytes,
            m.bytes.clone(),
        );
        r.register_with_unit("stored", "Taken by all checkpoints on disk", Unit::Bytes, m.stored.clone());
        r.register("parts", "Parts of the job that are there, each on one host", m.parts.clone());
        r.register("processes", "Live processes", m.processes.clone());
        r.register("threads", "Live threads", m.threads.clone());
        r.register_with_unit(
            "resident",
            "Resident memory of all processes",
            Unit::Bytes,
            m.resident.clone(),
        );
        m
    }

    /// A checkpoint was committed, here and by the `others`, in which so much of the processes was new.
    pub(crate) fn committed(&self, c: &Committed, dirty: Option<&DirtyShare>, others: &Others) {
        self.checkpoints.inc();
        self.written.inc_by(c.generation.new_bytes + others.written_bytes);
        if let Some(dirty) = dirty {
            for (of, share) in [("min", dirty.min), ("median", dirty.median), ("max", dirty.max)] {
                self.dirty.get_or_create(&vec![("of", of.to_owned())]).set(share);
            }
        }
        let longest = |own: Duration, us: u64| own.max(Duration::from_micros(us)).as_secs_f64();
        self.blocked.observe(longest(c.blocked, others.blocked_us));
        for (phase, ms) in &c.generation.phases_ms {
            let labels = vec![("phase", phase.clone())];
            let write = if phase == Phase::Write.name() { others.write_us } else { 0 };
            let own = Duration::from_secs_f64(ms / 1e3);
            self.phases.get_or_create(&labels).observe(longest(own, write));
        }
    }

    /// A checkpoint failed.
    pub(crate) fn failed(&self, failure: &Failure) {
        let kind = serde_json::to_value(failure.exit).unwrap_or_default();
        let labels = vec![("kind", kind.as_str().unwrap_or("unknown").to_owned())];
        self.failures.get_or_create(&labels).inc();
    }

    /// The whole text.
    pub(crate) fn text(&self, now: &Now) -> String {
        self.skipped.inc_by(now.skipped.saturating_sub(self.skipped.get()));
        self.in_progress.set(now.in_progress.into());
        self.generations.set(gauge(now.generations));
        let (number, time, bytes) = now.newest.unwrap_or_default();
        self.number.set(gauge(number));
        self.time.set(gauge(time));
        self.bytes.set(gauge(bytes));
        self.stored.set(gauge(now.stored_bytes));
        self.parts.set(gauge(now.parts));
        self.processes.set(gauge(now.processes));
        self.threads.set(gauge(now.threads));
        self.resident.set(gauge(now.resident_bytes));
        let mut out = String::new();
        match text::encode(&mut out, &self.registry) {
            Ok(()) => out,
            Err(e) => {
                tracing::error!(error = %e, "encode the metrics");
                String::new()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use belay_wire::Exit;

    #[test]
    fn names_in_labels_cannot_break_the_text() {
        let m = Metrics::new("a \"b\"\nc\\", "h");
        m.failed(&Failure::new(Exit::DiskFull, "x"));
        let now = Now {
            skipped: 3,
            newest: Some((7, 1_800_000_000, 5)),
            ..Now::default()
        };
        let text = m.text(&now) + &m.text(&now);
        assert!(text.contains("belay_job=\"a \\\"b\\\"\\nc\\\\\""), "{text}");
        assert!(text.contains("kind=\"disk_full\"} 1\n"), "{text}");
        assert!(text
            .lines()
            .filter(|l| l.starts_with("belay_checkpoints_skipped_total"))
            .all(|l| l.ends_with(" 3")));
        assert!(text.contains("} 1800000000\n") && text.ends_with("# EOF\n"));
    }
}
