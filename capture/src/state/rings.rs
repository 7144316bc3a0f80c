//! Rings of native asynchronous I/O (`io_setup`): no request is on its way when this is done, and what is unread is known.

use crate::inject::{self, Area};
use crate::memory::mappings;
use crate::state::draft::Draft;
use crate::stop::stopped::Suspended;
use crate::CaptureError;
use belay_abi::aio::{distance, Event, RingHead, RingPlan, EVENT_BYTES};
use belay_abi::inject::{RingSlot, RingsTable, Turn, MAX_RINGS, RING_DEAD, RING_DONE, RING_LOST};
use belay_image::model::Ring;
use belay_kernel::vm::Memory;
use belay_plugins::{Group, Refusal};

/// Devices whose holders serve requests: stopped, they would keep those waiting.
const SERVING: [&str; 5] = ["/dev/fuse", "/dev/cuse", "/dev/nbd", "/dev/ublkc", "/dev/uio"];

/// Refuses a job whose rings may wait for requests that the job itself serves: what has begun to wait cannot be called back.
pub(crate) fn check(drafts: &[Draft]) -> Result<(), CaptureError> {
    if !drafts.iter().any(|d| d.maps.iter().any(mappings::is_ring)) {
        return Ok(());
    }
    for draft in drafts {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", draft.task))
            .into_iter()
            .flatten()
            .flatten();
        let mut names = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        if let Some(device) = names.find(|n| SERVING.iter().any(|s| n.to_string_lossy().starts_with(s))) {
            let reason = "serves requests for which asynchronous I/O (io_setup) of the job may wait; let it run outside the job";
            return Err(CaptureError::refuse(draft.pid, device.display().to_string(), reason));
        }
    }
    Ok(())
}

/// Replaces the rings of process number `at` by new ones, see the injected program. Those that it has inherited, and
/// cannot use, are none. The other nodes of `group` are told where that takes too long.
pub(crate) fn settle(
    job: &mut Suspended,
    (at, area): (usize, &Area),
    draft: &Draft,
    group: Option<&dyn Group>,
) -> Result<Vec<Ring>, CaptureError> {
    let slots: Vec<RingSlot> = draft.maps.iter().filter(|m| mappings::is_ring(m)).map(slot).collect();
    let mut out = Vec::new();
    for some in slots.chunks(MAX_RINGS) {
        let mut rings = [RingSlot::default(); MAX_RINGS];
        rings[..some.len()].copy_from_slice(some);
        let table = RingsTable {
            mark: area.no_mark(),
            turn: Turn::default(),
            count: u32::try_from(some.len()).unwrap_or(0),
            pad: 0,
            rings,
        };
        let pid = job.processes[at].pid;
        out.extend(inject::rings(job, (at, area), table, group, |done, memory| {
            let done = done.rings.iter().take(some.len());
            done.filter(|r| r.outcome != RING_DEAD)
                .map(|r| ring(pid, r, memory))
                .collect::<Result<Vec<_>, _>>()
        })?);
    }
    Ok(out)
}

fn slot(map: &belay_kernel::proc::Map) -> RingSlot {
    RingSlot {
        address: map.start,
        bytes: map.end - map.start,
        ..RingSlot::default()
    }
}

fn ring(pid: i32, slot: &RingSlot, memory: &Memory) -> Result<Ring, CaptureError> {
    if slot.outcome != RING_DONE {
        return Err(CaptureError::Refused(vec![refusal(pid, slot)]));
    }
    let fail = |e| CaptureError::system(format!("read the ring of asynchronous I/O of process {pid}"), e);
    let mut head = [0u8; size_of::<RingHead>()];
    memory.read(slot.address, &mut head).map_err(fail)?;
    let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|b| head[at + b]));
    let plan = RingPlan {
        address: slot.address,
        bytes: slot.bytes,
        head: word(std::mem::offset_of!(RingHead, head)),
        tail: word(std::mem::offset_of!(RingHead, tail)),
        ..RingPlan::default()
    };
    if !plan.is_plausible() {
        return Err(CaptureError::refuse(
            pid,
            "asynchronous I/O",
            "its ring has been damaged by the program",
        ));
    }
    let mut events = vec![0u8; plan.unread() as usize * EVENT_BYTES as usize];
    for (i, event) in (0..).zip(events.chunks_exact_mut(EVENT_BYTES as usize)) {
        let place = (plan.head + i) % plan.places();
        memory
            .read(slot.address + EVENT_BYTES * (1 + u64::from(place)), event)
            .map_err(fail)?;
    }
    let mut polls = vec![0u8; usize::try_from(slot.polls.min(u64::from(plan.places()))).unwrap_or(0) * EVENT_BYTES as usize];
    if !polls.is_empty() {
        memory.read(slot.scratch + slot.bytes, &mut polls).map_err(fail)?;
    }
    let mut polls = requests(&polls);
    // The last events are those of polls that have ended since they were submitted again.
    let before = distance(plan.head, slot.tail.min(plan.places()), plan.places()) as usize;
    without(&mut polls, requests(&events).get(before..).unwrap_or_default());
    Ok(Ring {
        start: slot.address,
        bytes: slot.bytes,
        head: plan.head,
        tail: plan.tail,
        events,
        polls,
    })
}

/// The address of the request of each event.
fn requests(events: &[u8]) -> Vec<u64> {
    let at = std::mem::offset_of!(Event, request);
    events
        .chunks_exact(EVENT_BYTES as usize)
        .map(|event| u64::from_ne_bytes(std::array::from_fn(|b| event[at + b])))
        .collect()
}

/// Takes each of `ended` out of `polls` once: a program may have submitted a request several times.
fn without(polls: &mut Vec<u64>, ended: &[u64]) {
    for request in ended {
        if let Some(at) = polls.iter().position(|p| p == request) {
            polls.remove(at);
        }
    }
}

fn refusal(pid: i32, slot: &RingSlot) -> Refusal {
    let error = std::io::Error::from_raw_os_error(slot.error);
    let reason = match (slot.outcome, slot.error) {
        (RING_LOST, _) => format!("could not be put back after its requests had ended ({error})"),
        (_, libc::EAGAIN) => {
            "needs a second context for a moment; raise fs.aio-max-nr, and where the process locks what it maps (mlockall) the limit for locked memory (ulimit -l)".to_owned()
        }
        (_, libc::EINVAL) => "has a head or a size that no context of this kernel has".to_owned(),
        _ => format!("cannot be replaced by a second one for a moment ({error})"),
    };
    Refusal {
        pid,
        object: format!("asynchronous I/O (io_setup), the context at {:#x}", slot.address),
        reason,
        passing: false,
        damage: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poll_that_has_ended_is_not_submitted_again() {
        let event = |request: u64| [7u64, request, 1, 0].map(u64::to_ne_bytes).concat();
        let events = [event(0x10), event(0x20), event(0x20)].concat();
        assert_eq!(requests(&events), [0x10, 0x20, 0x20]);
        let mut polls = vec![0x20, 0x10, 0x20, 0x20, 0x30];
        without(&mut polls, &requests(&events));
        assert_eq!(polls, [0x20, 0x30]);
    }
}
