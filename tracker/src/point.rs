//! The program's own point, to which all of its processes come alike: where a checkpoint is wanted there, they wait, and
//! what they have of global arrays then belongs together.

use crate::{page, DeclareError, INSIDE};
use belay_abi::access::MOST_PAYLOAD;
use belay_kernel::{cpu, futex};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest wait, where the agent does not end it before.
const LONGEST_WAIT: Duration = Duration::from_secs(3);

/// The program is at its point, with this payload, which is read only where a checkpoint is taken here.
pub fn point(payload: &[u8]) -> Result<(), DeclareError> {
    if payload.len() > MOST_PAYLOAD {
        return Err(DeclareError::Payload);
    }
    let Some(page) = page::get() else { return Ok(()) };
    let now = cpu::ticks();
    let before = page.point_at().swap(now, Ordering::Relaxed);
    if before != 0 {
        page.point_took().store(now.saturating_sub(before), Ordering::Relaxed);
    }
    // In one order with what the agent writes before it reads this: one of both sees the other.
    let number = page.point().fetch_add(1, Ordering::SeqCst) + 1;
    // In a loop, data may be overwritten in part.
    if page.point_want().load(Ordering::SeqCst) != number || INSIDE.load(Ordering::Relaxed) != 0 {
        return Ok(());
    }
    for (word, bytes) in page.payload().iter().zip(payload.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
    }
    page.payload_bytes().store(payload.len() as u32, Ordering::Relaxed);
    page.point_here().store(number, Ordering::Release);
    let end = Instant::now() + LONGEST_WAIT;
    loop {
        let turn = page.point_turn().load(Ordering::Acquire);
        let left = end.saturating_duration_since(Instant::now());
        if page.point_want().load(Ordering::Acquire) != number || left.is_zero() {
            break;
        }
        futex::wait(page.point_turn(), turn, left);
    }
    page.point_here().store(0, Ordering::Release);
    Ok(())
}
