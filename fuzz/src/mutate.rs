//! Changes to inputs: bytes, numbers, pieces of other inputs, and for text the values at which decoders err.

use fastrand::Rng;

/// Longest input.
pub const MAX: usize = 256 << 10;

/// Numbers at which arithmetic errs.
pub(crate) const NUMBERS: [u64; 16] = [
    0,
    1,
    7,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    4095,
    4096,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_f000,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
];

/// Values of JSON at which decoders err.
const WORDS: [&str; 18] = [
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "-1",
    "0",
    "1e400",
    "-0.0",
    "18446744073709551615",
    "18446744073709551616",
    "4294967295",
    "-2147483648",
    "9223372036854775807",
    "\"/\"",
    "\"../..\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
];

/// Changes `input` in one to eight ways. `other` is another input of the same target.
pub fn mutate(rng: &mut Rng, input: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 << rng.u32(0..4) {
        change(rng, input, other);
        input.truncate(MAX);
    }
}

fn change(rng: &mut Rng, data: &mut Vec<u8>, other: &[u8]) {
    let at = rng.usize(0..=data.len());
    let left = data.len() - at;
    match rng.u32(0..12) {
        0 if left > 0 => data[at] ^= 1 << rng.u32(0..8),
        1 if left > 0 => data[at] = rng.u8(..),
        2 if left > 0 => data[at] = data[at].wrapping_add(rng.u8(1..=16)).wrapping_sub(8),
        3 if left >= 4 => data[at..at + 4].copy_from_slice(&(rng.choice(NUMBERS).unwrap_or(0) as u32).to_le_bytes()),
        4 if left >= 8 => data[at..at + 8].copy_from_slice(&rng.choice(NUMBERS).unwrap_or(0).to_le_bytes()),
        // Take a piece out.
        5 if left > 0 => {
            let n = 1 + rng.usize(0..left.min(64));
            data.drain(at..at + n);
        }
        // Double a piece.
        6 if left > 0 => {
            let n = 1 + rng.usize(0..left.min(64));
            let piece = data[at..at + n].to_vec();
            data.splice(at..at, piece);
        }
        // A piece of another input.
        7 if !other.is_empty() => {
            let from = rng.usize(0..other.len());
            let n = 1 + rng.usize(0..(other.len() - from).min(256));
            let over = rng.usize(0..=left.min(n));
            data.splice(at..at + over, other[from..from + n].iter().copied());
        }
        8 => data.truncate(at),
        9 | 10 => replace_token(rng, data, at),
        _ => data.insert(at, rng.u8(..)),
    }
}

/// In text: another value in place of the number, word or string at `at`.
fn replace_token(rng: &mut Rng, data: &mut Vec<u8>, at: usize) {
    let is_token = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'"' | b'-' | b'+' | b'.' | b'_');
    let Some(start) = data[at..].iter().position(is_token).map(|i| at + i) else {
        return;
    };
    let end = data[start..]
        .iter()
        .position(|b| !is_token(b))
        .map_or(data.len(), |i| start + i);
    let new = match rng.u32(0..3) {
        0 => rng.choice(NUMBERS).unwrap_or(0).to_string(),
        1 => format!("{:x}", rng.choice(NUMBERS).unwrap_or(0)),
        _ => (*rng.choice(&WORDS).unwrap_or(&"")).to_owned(),
    };
    data.splice(start..end, new.into_bytes());
}
