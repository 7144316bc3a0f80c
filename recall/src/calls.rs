//! Put and get: the caller's thread asks the planner, waits for its turn, and copies.

use crate::desk::{Desk, Task};
use crate::device::Lane;
use crate::files::CopyError;
use crate::lane::{carry_out, Parts};
use crate::shape::Shape;
use crate::{After, History, HistoryError};
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

/// A copy of a call that has been carried out.
struct Carried<'a> {
    desk: MutexGuard<'a, Desk>,
    task: Task,
    end: Result<(), CopyError>,
}

impl History {
    /// Writes a version: parts with numbers of their own. Returns when a tier has all of it.
    pub fn put(&self, version: u64, parts: &[(u32, &[u8])]) -> Result<(), HistoryError> {
        let began = Instant::now();
        let shape = Arc::new(Shape::new(parts.iter().map(|(id, p)| (*id, p.len() as u64)))?);
        let mut parts = parts.to_vec();
        parts.sort_unstable_by_key(|p| p.0);
        let from: Vec<&[u8]> = parts.into_iter().map(|p| p.1).collect();
        let _turn = self.turn()?;
        let mut desk = self.desk()?;
        if desk.is_known(version) {
            return Err(HistoryError::Exists(version));
        }
        desk.try_again();
        let bytes = shape.bytes();
        desk.enter(version, shape);
        let asked = desk.planner.put(self.shared.now(), Version(version), bytes.max(1));
        desk.check(asked);
        let Carried { mut desk, task, end } = self.copy(desk, Parts::From(&from))?;
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

    /// Reads a version back into parts of the numbers and sizes that it was put with, in any order. After an error the
    /// parts may hold anything.
    pub fn get(&self, version: u64, parts: &mut [(u32, &mut [u8])], after: After) -> Result<(), HistoryError> {
        let began = Instant::now();
        let shape = Shape::new(parts.iter().map(|(id, p)| (*id, p.len() as u64)))?;
        let mut parts: Vec<(u32, &mut [u8])> = parts.iter_mut().map(|(id, p)| (*id, &mut **p)).collect();
        parts.sort_unstable_by_key(|p| p.0);
        let mut to: Vec<&mut [u8]> = parts.into_iter().map(|p| p.1).collect();
        let _turn = self.turn()?;
        let mut desk = self.desk()?;
        if *desk.shape(version)? != shape {
            return Err(HistoryError::Parts(version));
        }
        let asked = desk.planner.get(self.shared.now(), Version(version), after);
        desk.check(asked);
        // The place stays as it is while the planner has been told of a copy from there.
        let Carried { mut desk, task, end } = self.copy(desk, Parts::To(&mut to))?;
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
    fn copy<'a>(&'a self, mut desk: MutexGuard<'a, Desk>, mut parts: Parts) -> Result<Carried<'a>, HistoryError> {
        self.shared.poll(&mut desk);
        let task = loop {
            desk.fault()?;
            if let Some(task) = desk.call.take() {
                break task;
            }
            desk = self.shared.pause(desk);
        };
        drop(desk);
        let end = carry_out(&self.shared, &task, &mut parts, Lane::Call);
        let desk = self.shared.lock();
        Ok(Carried { desk, task, end })
    }
}
