//! The threads: each carries out the copies of one direction of one link.

use crate::desk::{Lane, Shared, Side, Task};
use crate::device;
use crate::files::CopyError;
use crate::span::copy;
use crate::{HistoryError, Span};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Starts the thread of a lane.
pub(crate) fn start(shared: &Arc<Shared>, lane: Lane) -> Result<JoinHandle<()>, HistoryError> {
    let (shared, way) = (shared.clone(), if lane.up { "up" } else { "down" });
    start_thread(format!("belay-{way}-{}", lane.link), move || run(&shared, lane))
}

/// Starts a thread. It takes no signals: those are the program's.
pub(crate) fn start_thread(name: String, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, HistoryError> {
    let mut old = MaybeUninit::uninit();
    // SAFETY: both sets are ours, and the first is filled by `sigfillset`; the old one is put back below.
    unsafe {
        let mut all = MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let thread = std::thread::Builder::new().name(name).spawn(run);
    // SAFETY: `pthread_sigmask` has filled the old set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    thread.map_err(HistoryError::io("start a thread"))
}

fn run(shared: &Shared, lane: Lane) {
    let is_lowest = shared.is_lowest(lane);
    let mut desk = shared.lock();
    // The last time to try again that has been answered: each is, however late this thread comes to it.
    let mut tried = 0.0;
    loop {
        // Room on the disk comes before everything that may need it.
        if let Some(key) = is_lowest.then(|| desk.rubbish.pop()).flatten() {
            desk = shared.remove(desk, key);
            continue;
        }
        if desk.ended {
            return;
        }
        if let Some(task) = desk.tasks.remove(&lane) {
            drop(desk);
            let of = if lane.up { device::Lane::Up } else { device::Lane::Down };
            // SAFETY: the planner has given these places to this version, and nobody else reads or writes there before
            // it is told (`Shared::report`, `Shared::halt`).
            let end = unsafe { carry_out(shared, &task, &[], of) };
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

/// Copies from one side to the other. Where the disk is full of what has been dropped, that is removed, and it begins again.
///
/// # Safety
/// The places of the task and the memory of `program` are this copy's: nobody writes to the one, nor uses the other.
pub(crate) unsafe fn carry_out(shared: &Shared, task: &Task, program: &[Span], lane: device::Lane) -> Result<(), CopyError> {
    let before = shared.removed();
    // SAFETY: as promised to this function.
    match unsafe { attempt(shared, task, program, lane) } {
        Err(e) if e.is_full() && shared.has_made_room(before) => {
            // SAFETY: the same.
            unsafe { attempt(shared, task, program, lane) }
        }
        end => end,
    }
}

/// Copies once.
///
/// # Safety
/// As for [`carry_out`].
unsafe fn attempt(shared: &Shared, task: &Task, program: &[Span], lane: device::Lane) -> Result<(), CopyError> {
    let memory = |side| match side {
        &Side::Program => Some(program),
        Side::Memory(spans) => Some(spans.as_slice()),
        Side::Device(..) | Side::File => None,
    };
    let (from, to) = (&task.from, &task.to);
    // SAFETY: in each case as promised to this function.
    unsafe {
        match (memory(from), memory(to)) {
            (Some(from), Some(to)) => copy(from, to),
            (Some(from), None) => match to {
                Side::Device(device, place) => device.store(lane, from, place)?,
                _ => shared.files.write(task.key, &task.shape, from, &task.stop)?,
            },
            (None, Some(to)) => match from {
                Side::Device(device, place) => device.load(lane, place, to)?,
                _ => shared.files.read(task.key, &task.shape, to, &task.stop)?,
            },
            // Memory of the host is between a device and files.
            (None, None) => return Err(CopyError::Io(std::io::ErrorKind::Unsupported.into())),
        }
    }
    Ok(())
}
