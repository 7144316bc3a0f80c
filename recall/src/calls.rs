//! Put and get: the caller's thread asks the planner, waits for its turn, and copies.

use crate::desk::{Desk, Task};
use crate::device::Lane;
use crate::files::CopyError;
use crate::lane::carry_out;
use crate::shape::Shape;
use crate::{After, History, HistoryError, Span};
use belay_history::Version;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

fn error(version: u64, what: &str, e: CopyError) -> HistoryError {
    match e {
        CopyError::Damaged => HistoryError::Damaged(version),
        CopyError::Io(e) => HistoryError::io(format!("{what} version {version}"))(e),
        // Nobody ends the copy of a call.
        CopyError::Stopped => HistoryError::Planner("a call was ended".into()),
    }
}

/// The memory of the parts, in their order.
fn in_order(shape: &Shape, mut spans: Vec<(u32, Span)>) -> Result<Vec<Span>, HistoryError> {
    spans.sort_unstable_by_key(|s| s.0);
    let parts = spans.iter().map(|(id, s)| (*id, s.len() as u64));
    match parts.eq(shape.parts().iter().copied()) {
        true => Ok(spans.into_iter().map(|s| s.1).collect()),
        false => Err(HistoryError::Invalid("the memory does not fit the parts")),
    }
}

/// A copy of a call that has been carried out.
struct Carried<'a> {
    desk: MutexGuard<'a, Desk>,
    task: Task,
    end: Result<(), CopyError>,
}

impl History {
    /// As [`History::put`], from memory that the caller vouches for.
    ///
    /// # Safety
    /// The memory of all spans is there, and nobody writes to it before this returns.
    pub unsafe fn put_spans(&self, version: u64, shape: Shape, spans: Vec<(u32, Span)>) -> Result<(), HistoryError> {
        let (began, spans, shape) = (Instant::now(), in_order(&shape, spans)?, Arc::new(shape));
        let _turn = self.turn()?;
        let mut desk = self.desk()?;
        if desk.is_known(version) {
            return Err(HistoryError::Exists(version));
        }
        let bytes = shape.bytes();
        desk.enter(version, shape);
        let asked = desk.planner.put(self.shared.now(), Version(version), bytes.max(1));
        desk.check(asked);
        // SAFETY: as promised to this function; the place is new.
        let Carried { mut desk, task, end } = unsafe { self.copy(desk, &spans)? };
        let now = self.shared.now();
        match end {
            Ok(()) => {
                let done = desk.planner.done(now, task.job.id);
                desk.check(done);
                desk.is_here(version);
                desk.calls.puts += 1;
                desk.calls.put_bytes += bytes;
            }
            Err(_) => {
                let failed = desk.planner.failed(now, task.job.id);
                desk.check(failed);
                desk.withdraw(version);
            }
        }
        self.shared.poll(&mut desk);
        desk.calls.put_ns += began.elapsed().as_nanos() as u64;
        desk.fault()?;
        end.map_err(|e| error(version, "put", e))
    }

    /// As [`History::get`], into memory that the caller vouches for.
    ///
    /// # Safety
    /// The memory of all spans is there, and nobody else uses it before this returns.
    pub unsafe fn get_spans(&self, version: u64, shape: &Shape, spans: Vec<(u32, Span)>, after: After) -> Result<(), HistoryError> {
        let (began, spans) = (Instant::now(), in_order(shape, spans)?);
        let _turn = self.turn()?;
        let mut desk = self.desk()?;
        if *desk.shape(version)? != *shape {
            return Err(HistoryError::Parts(version));
        }
        let asked = desk.planner.get(self.shared.now(), Version(version), after);
        desk.check(asked);
        // SAFETY: as promised to this function; the place stays as it is while the planner has been told of a copy from there.
        let Carried { mut desk, task, end } = unsafe { self.copy(desk, &spans)? };
        if end.is_ok() && after == After::Discard {
            desk = self.shared.halt(desk, Version(version));
        }
        let now = self.shared.now();
        match end {
            Ok(()) => {
                let done = desk.planner.done(now, task.job.id);
                desk.check(done);
                if after == After::Discard {
                    desk.forgotten(version);
                }
                desk.calls.gets += 1;
                desk.calls.get_bytes += shape.bytes();
            }
            Err(_) => {
                let failed = desk.planner.failed(now, task.job.id);
                desk.check(failed);
            }
        }
        self.shared.poll(&mut desk);
        desk.calls.get_ns += began.elapsed().as_nanos() as u64;
        desk.fault()?;
        end.map_err(|e| error(version, "get", e))
    }

    /// Waits for the copy that the planner begins for this call, and carries it out.
    ///
    /// # Safety
    /// The memory of all spans is there, and this copy's alone.
    unsafe fn copy<'a>(&'a self, mut desk: MutexGuard<'a, Desk>, spans: &[Span]) -> Result<Carried<'a>, HistoryError> {
        self.shared.poll(&mut desk);
        let task = loop {
            desk.fault()?;
            if let Some(task) = desk.call.take() {
                break task;
            }
            desk = self.shared.pause(desk);
        };
        drop(desk);
        // SAFETY: the planner has given the place to this version; `spans` as promised to this function.
        let end = unsafe { carry_out(&self.shared, &task, spans, Lane::Call) };
        let desk = self.shared.lock();
        Ok(Carried { desk, task, end })
    }
}
