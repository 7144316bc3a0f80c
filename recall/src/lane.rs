//! The threads: each carries out the copies of one direction of one link.

use crate::desk::{Lane, Shared, Side, Task};
use crate::device;
use crate::files::CopyError;
use crate::span::copy;
use crate::HistoryError;
use belay_kernel::apart::Blocked;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Starts the thread of a lane.
pub(crate) fn start(shared: &Arc<Shared>, lane: Lane) -> Result<JoinHandle<()>, HistoryError> {
    let (shared, way) = (shared.clone(), if lane.up { "up" } else { "down" });
    start_thread(format!("belay-{way}-{}", lane.link), move || run(&shared, lane))
}

/// Starts a thread. It takes no signals: those are the program's.
pub(crate) fn start_thread(name: String, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HistoryError> {
    let blocked = Blocked::all().map_err(HistoryError::io("block signals"))?;
    let thread = std::thread::Builder::new().name(name).spawn(run);
    drop(blocked);
    thread.map_err(HistoryError::io("start a thread"))
}

fn run(shared: &Shared, lane: Lane) {
    let is_lowest = shared.is_lowest(lane);
    let mut desk = shared.lock();
    // The last time to try again that has been answered: each is, however late this thread comes to it.
    let mut tried = 0.0;
    loop {
        // Room on the disk comes before everything that may need it.
        if let Some(key) = is_lowest.then(|| desk.rubbish.pop_first()).flatten() {
            desk = shared.remove(desk, key);
            continue;
        }
        if desk.ended {
            return;
        }
        if let Some(task) = desk.tasks.remove(&lane) {
            drop(desk);
            let of = if lane.up { device::Lane::Up } else { device::Lane::Down };
            let end = carry_out(shared, &task, &mut Parts::None, of);
            desk = shared.lock();
            shared.report(&mut desk, &task, end);
            continue;
        }
        let retry = desk.planner.retries(lane.link).filter(|at| !lane.up && *at > tried);
        desk = match retry {
            Some(at) if at <= shared.now() => {
                tried = at;
                shared.poll(&mut desk);
                desk
            }
            Some(at) => shared.pause_until(desk, at),
            None => shared.pause(desk),
        };
    }
}

/// The memory of the program that a copy is about.
pub(crate) enum Parts<'a> {
    /// None: a copy between tiers.
    None,
    /// What is put,
    From(&'a [&'a [u8]]),
    /// and where to get it.
    To(&'a mut [&'a mut [u8]]),
}

/// Copies from one side to the other. Where the disk is full of what has been dropped, that is removed, and it begins again.
pub(crate) fn carry_out(shared: &Shared, task: &Task, program: &mut Parts, lane: device::Lane) -> Result<(), CopyError> {
    let before = shared.removed();
    match attempt(shared, task, program, lane) {
        Err(e) if e.is_full() && shared.has_made_room(before) => attempt(shared, task, program, lane),
        end => end,
    }
}

/// Copies once. Where no end of it is the program's, one is memory of the host: that is between a device and files.
fn attempt(shared: &Shared, task: &Task, program: &mut Parts, lane: device::Lane) -> Result<(), CopyError> {
    match (program, &task.from, &task.to) {
        (Parts::From(from), Side::Program, _) => store(shared, task, from, lane),
        (Parts::To(to), _, Side::Program) => load(shared, task, to, lane),
        (_, Side::Memory(host, place), _) => host.read(place, |from| store(shared, task, from, lane))?,
        (_, _, Side::Memory(host, place)) => host.write(place, |to| load(shared, task, to, lane))?,
        _ => Err(unsupported()),
    }
}

fn unsupported() -> CopyError {
    CopyError::Io(std::io::ErrorKind::Unsupported.into())
}

/// Copies from memory to where the task says.
fn store(shared: &Shared, task: &Task, from: &[&[u8]], lane: device::Lane) -> Result<(), CopyError> {
    match &task.to {
        Side::Memory(host, place) => Ok(host.write(place, |to| copy(from, to))?),
        Side::Device(device, place) => Ok(device.store(lane, from, place)?),
        Side::File => shared.files.write(task.key, &task.shape, from, &task.stop),
        Side::Program => Err(unsupported()),
    }
}

/// Copies to memory from where the task says.
fn load(shared: &Shared, task: &Task, to: &mut [&mut [u8]], lane: device::Lane) -> Result<(), CopyError> {
    match &task.from {
        Side::Memory(host, place) => Ok(host.read(place, |from| copy(from, to))?),
        Side::Device(device, place) => Ok(device.load(lane, place, to)?),
        Side::File => shared.files.read(task.key, &task.shape, to, &task.stop),
        Side::Program => Err(unsupported()),
    }
}
