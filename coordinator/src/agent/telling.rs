//! The agent's numbers for its site, where it was asked for them (`--metrics`).

use super::Agent;
use crate::checkpoint::Committed;
use crate::exporter::{Exporter, Place};
use crate::metrics::{Metrics, Now};
use crate::{generations, processes, sys, Failure};
use belay_wire::Exit;

/// The numbers and where they are to be had.
#[derive(Debug)]
pub(super) struct Telling {
    metrics: Metrics,
    exporter: Exporter,
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
        self.telling = Some(Telling { metrics, exporter });
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
            t.exporter.attend(ready, || t.metrics.text(&self.now()));
            self.telling = Some(t);
        }
    }

    /// A checkpoint has ended.
    pub(super) fn tell(&self, how: Result<&Committed, &Failure>) {
        let Some(t) = &self.telling else { return };
        match how {
            Ok(committed) => t.metrics.committed(committed),
            Err(failure) => t.metrics.failed(failure),
        }
        self.publish();
    }

    /// Writes the file, where that is the place.
    pub(super) fn publish(&self) {
        let Some(t) = &self.telling else { return };
        if let Err(e) = t.exporter.publish(|| t.metrics.text(&self.now())) {
            tracing::warn!(error = %e, "write the metrics");
        }
    }

    pub(super) fn stop_telling(&mut self) {
        if let Some(t) = self.telling.take() {
            t.exporter.close();
        }
    }

    fn now(&self) -> Now {
        let dir = self.dir.generations();
        let all = generations::list(&dir).unwrap_or_default();
        let whole = || all.iter().filter_map(|g| Some((g.number, g.manifest.as_ref().ok()?)));
        let live = processes::describe(self.pid, &self.outside());
        Now {
            processes: live.len() as u64,
            threads: live.iter().map(|p| u64::from(p.threads)).sum(),
            resident_bytes: live.iter().map(|p| p.resident_bytes).sum(),
            in_progress: self.writing.is_some() || self.is_together(),
            skipped: self.skipped,
            generations: whole().count() as u64,
            newest: whole().next_back().map(|(n, m)| (n, m.time_unix_s, m.bytes)),
            stored_bytes: self.engine.bytes().unwrap_or(0) + generations::own_bytes(&dir).unwrap_or(0),
        }
    }
}
