//! What a stopped process has noted down for System V semaphores (SEM_UNDO): carried out when it ends, and shown nowhere.
//!
//! The process itself asks: several operations in one `semop`, of which the last cannot be done, leave nothing behind.
//! One among them that would take the number noted down out of its range ends the call with ERANGE instead of EAGAIN;
//! where that begins, tells the number. The values must stay as they are meanwhile.

use crate::inject::{on_main, Area};
use crate::stop::stopped::Process;
use crate::CaptureError;
use belay_plugins::Unreadable;

/// Greatest value, and greatest number noted down (SEMVMX, SEMAEM).
const MOST: i32 = 32767;
/// Operations that [`any`] makes of one semaphore.
const EACH: usize = 7;
/// Operations at the end of a call that cannot be done.
const END: usize = 2;
const UNDO: i32 = libc::SEM_UNDO;

/// What `process` has noted down for each semaphore of `set`, whose values these are, where it is not 0.
pub(crate) fn noted(process: &mut Process, area: &Area, set: i32, values: &[u16]) -> Result<Vec<(u16, i16)>, Unreadable> {
    let most = most_operations().min(area.room_of_operations());
    if most < EACH + END {
        return Err(too_many());
    }
    let mut out = Vec::new();
    let mut ask = |ops: &[libc::sembuf]| ask(process, area, set, ops).map_err(unreadable);
    let numbered: Vec<(u16, i32)> = (0u16..).zip(values.iter().map(|v| i32::from(*v))).collect();
    for some in numbered.chunks((most - END) / EACH) {
        let ops: Vec<libc::sembuf> = some.iter().flat_map(|(number, value)| any(*number, *value)).collect();
        if !ask(&ops)? {
            continue;
        }
        for (number, value) in some {
            let found = find(|beyond| ask(&beyond(*number, *value)))?;
            out.extend(i16::try_from(found).ok().filter(|n| *n != 0).map(|n| (*number, n)));
        }
    }
    Ok(out)
}

fn unreadable(e: CaptureError) -> Unreadable {
    match e {
        CaptureError::Call { errno: libc::E2BIG, .. } => too_many(),
        CaptureError::Call {
            errno: libc::EACCES | libc::EPERM,
            ..
        } => Unreadable::Forbidden("it may not change the set now".into()),
        other => Unreadable::Failed(other.to_string()),
    }
}

fn too_many() -> Unreadable {
    Unreadable::Forbidden("one call may have too few operations (the third number of kernel.sem)".into())
}

/// The number noted down: by how much less than its whole width the range is left, upwards or downwards.
fn find<E>(mut leaves: impl FnMut(&dyn Fn(u16, i32) -> Vec<libc::sembuf>) -> Result<bool, E>) -> Result<i32, E> {
    let above = greatest(MOST, |n| leaves(&move |number, value| upwards(number, value, MOST + 1 - n)))?;
    if above > 0 {
        return Ok(above);
    }
    let below = greatest(MOST + 1, |n| {
        leaves(&move |number, value| downwards(number, value, MOST + 2 - n))
    })?;
    Ok(-below)
}

/// The greatest number up to `limit` up to which `holds` is true, 0 for none; mostly it is small.
fn greatest<E>(limit: i32, mut holds: impl FnMut(i32) -> Result<bool, E>) -> Result<i32, E> {
    let (mut low, mut high) = (0, 1);
    while high <= limit && holds(high)? {
        (low, high) = (high, 2 * high);
    }
    high = high.min(limit + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

/// The operations of these amounts; none of 0, which would wait for the value 0.
fn operations(number: u16, amounts: &[(i32, i32)]) -> Vec<libc::sembuf> {
    let op = |(amount, flags): &(i32, i32)| libc::sembuf {
        sem_num: number,
        sem_op: i16::try_from(*amount).unwrap_or(0),
        sem_flg: (*flags | libc::IPC_NOWAIT) as i16,
    };
    amounts.iter().filter(|(amount, _)| *amount != 0).map(op).collect()
}

/// Leave the range where anything but 0 has been noted down: a number above 0 at the second, one below at the last. The
/// value is [`MOST`] in the end.
fn any(number: u16, value: i32) -> Vec<libc::sembuf> {
    let (up, down) = ((MOST, UNDO), (-MOST, UNDO));
    operations(number, &[(MOST - value, 0), down, up, (-MOST, 0), up, (-1, 0), (1, UNDO)])
}

/// Leave the range where the number is more than `MOST - k`.
fn upwards(number: u16, value: i32, k: i32) -> Vec<libc::sembuf> {
    operations(number, &[(MOST - value, 0), (-k, UNDO), (k, 0)])
}

/// Leave the range where the number is less than `k - MOST - 1`.
fn downwards(number: u16, value: i32, k: i32) -> Vec<libc::sembuf> {
    let half = k / 2;
    operations(number, &[(-value, 0), (half, UNDO), (-half, 0), (k - half, UNDO)])
}

/// Whether these operations take a number out of its range.
fn ask(process: &mut Process, area: &Area, set: i32, ops: &[libc::sembuf]) -> Result<bool, CaptureError> {
    let mut all = ops.to_vec();
    // Nothing can be done that asks for the value 0 and then takes from it.
    all.extend(ops.last().into_iter().flat_map(|last| {
        [0, -1].map(|sem_op| libc::sembuf {
            sem_op,
            sem_flg: libc::IPC_NOWAIT as i16,
            ..*last
        })
    }));
    let at = area.put_operations(&all)?;
    let set = i64::from(set).cast_unsigned();
    match on_main(process, libc::SYS_semop, [set, at, all.len() as u64, 0, 0, 0]) {
        Err(CaptureError::Call { errno: libc::ERANGE, .. }) => Ok(true),
        // Or the set is gone.
        Err(CaptureError::Call {
            errno: libc::EAGAIN | libc::EIDRM | libc::EINVAL,
            ..
        }) => Ok(false),
        Err(e) => Err(e),
        Ok(_) => Ok(false),
    }
}

/// How many operations one call may have.
fn most_operations() -> usize {
    let text = std::fs::read_to_string("/proc/sys/kernel/sem").unwrap_or_default();
    let third = text.split_whitespace().nth(2).and_then(|n| n.parse().ok());
    third.unwrap_or(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel does with the operations: whether the number noted down leaves its range.
    fn leaves(ops: &[libc::sembuf], mut value: i32, mut noted: i32) -> bool {
        for op in ops {
            let amount = i32::from(op.sem_op);
            assert!(amount != 0, "waits");
            value += amount;
            assert!((0..=MOST).contains(&value), "the value leaves its range: {value}");
            if i32::from(op.sem_flg) & UNDO != 0 {
                noted -= amount;
                if !(-MOST - 1..=MOST).contains(&noted) {
                    return true;
                }
            }
        }
        assert!(value > 0);
        false
    }

    #[test]
    fn every_number_is_found_whatever_the_value() {
        for value in [0, 1, 2, 500, MOST - 1, MOST] {
            for noted in (-MOST - 1..=MOST)
                .step_by(97)
                .chain([-MOST - 1, -MOST, -2, -1, 0, 1, 2, MOST - 1, MOST])
            {
                assert_eq!(leaves(&any(0, value), value, noted), noted != 0, "{noted}");
                let found = find(|ops| Ok::<_, ()>(leaves(&ops(0, value), value, noted))).unwrap();
                assert_eq!(found, noted);
            }
        }
    }
}
