//! The pattern: 8 bytes at each multiple of 8, different everywhere and in each loop, and as numbers in floating point
//! of 4 or 8 bytes none.

/// So many bytes of it are not written by chance.
pub(super) const CERTAIN: u64 = 8;

/// Sebastiano Vigna's splitmix64 (<https://prng.di.unimi.it/splitmix64.c>).
pub(super) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// A quiet NaN of 8 bytes whose halves are NaNs of 4 bytes.
const NONE: u64 = 0x7ff8_0000_7fc0_0000;

fn word(at: u64, key: u64) -> [u8; 8] {
    (mix(at ^ key) | NONE).to_le_bytes()
}

/// Its bytes from address `start` up to `end`, with their addresses.
fn bytes(start: u64, end: u64, key: u64) -> impl Iterator<Item = (u64, u8)> {
    let words = (start & !7..end).step_by(8);
    let bytes = words.flat_map(move |at| (at..).zip(word(at, key)));
    bytes.filter(move |(at, _)| (start..end).contains(at))
}

/// Fills memory with it.
pub(super) fn fill(start: u64, end: u64, key: u64) {
    for (at, byte) in bytes(start, end, key) {
        // SAFETY: memory of a dataset, which the program has declared, and says that it is about to overwrite.
        unsafe { (at as *mut u8).write_volatile(byte) };
    }
}

/// The first piece of it that is still there, if it is at least an element and 4 bytes long, or 8.
pub(super) fn left(start: u64, end: u64, key: u64, elem: u64) -> Option<(u64, u64)> {
    let least = elem.clamp(4, CERTAIN);
    let mut begin = start;
    for (at, byte) in bytes(start, end, key) {
        // SAFETY: memory of a dataset, as above.
        if unsafe { (at as *const u8).read_volatile() } != byte {
            if at - begin >= least {
                return Some((begin, at));
            }
            begin = at + 1;
        }
    }
    (end - begin >= least).then_some((begin, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_it_is_found() {
        for key in 0..1000 {
            let mut memory = vec![0u8; 100];
            let start = memory.as_mut_ptr() as u64 + 3;
            fill(start, start + 80, key);
            assert_eq!(left(start, start + 80, key, 8), Some((start, start + 80)));
            assert_eq!(left(start, start + 80, key + 1, 8), None);
            // A byte never equals its complement, whatever the pattern is at this address.
            for at in (0..30).chain(36..100) {
                memory[at] = !memory[at];
            }
            let place = |at: u64| start - 3 + at;
            assert_eq!(left(start, start + 80, key, 4), Some((place(30), place(36))));
            assert_eq!(left(start, start + 80, key, 8), None);
        }
    }

    #[test]
    fn it_is_no_number() {
        for at in (0..800).step_by(8) {
            let word = word(at, 99);
            let halves = [&word[..4], &word[4..]].map(|half| f32::from_le_bytes(half.try_into().unwrap()));
            assert!(f64::from_le_bytes(word).is_nan() && halves.iter().all(|half| half.is_nan()));
        }
    }
}
