//! Packed pages: what is kept of pages of which little is.
//!
//! Places and bytes are one stream, which is stored as pages of the process at [`BASE`], where no process has memory:
//!
//! ```text
//! number of rows, then for each: address, bytes of a piece, number of pieces, distance between two; then the bytes
//! ```
//! All numbers have 8 bytes, little endian.

use crate::extents::{Extent, PAGE};
use crate::ImageError;
use std::path::Path;

/// Where the stream is in the table of the process.
pub const BASE: u64 = 1 << 56;

/// Longest stream, which is in memory at once: a checkpoint makes no longer one, and a restart takes none.
pub const MOST_BYTES: u64 = 512 << 20;

/// Bytes of a number.
const WORD: usize = 8;

/// Pieces of one length at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Row {
    address: u64,
    bytes: u64,
    count: u64,
    distance: u64,
}

/// The places, as the stream begins; `spans` are in ascending order, none empty.
pub fn encode(spans: &[(u64, u64)]) -> Vec<u8> {
    let mut rows: Vec<Row> = Vec::new();
    for (start, end) in spans {
        let (address, bytes) = (*start, end - start);
        if let Some(row) = rows.last_mut().filter(|r| r.bytes == bytes) {
            let last = row.address + (row.count - 1) * row.distance;
            if row.count == 1 {
                row.distance = address - last;
            }
            if address - last == row.distance {
                row.count += 1;
                continue;
            }
        }
        rows.push(Row {
            address,
            bytes,
            count: 1,
            distance: 0,
        });
    }
    let numbers = rows.iter().flat_map(|r| [r.address, r.bytes, r.count, r.distance]);
    let numbers = [rows.len() as u64].into_iter().chain(numbers);
    numbers.flat_map(u64::to_le_bytes).collect()
}

/// Splits a stream into places, in ascending order, and their bytes, and has `piece` look at each; `path` is named in
/// errors.
pub fn decode<'a, E: From<ImageError>>(
    path: &Path,
    stream: &'a [u8],
    piece: &mut dyn FnMut(u64, &'a [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let damaged = || ImageError::damaged(path, "what is kept of packed pages makes no sense");
    let number = |at: usize| {
        let bytes = stream.get(at..at + WORD).and_then(|b| b.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or_else(damaged)
    };
    let rows = usize::try_from(number(0)?).map_err(|_| damaged())?;
    let behind = rows
        .checked_mul(4 * WORD)
        .and_then(|b| b.checked_add(WORD))
        .ok_or_else(damaged)?;
    let mut bytes = stream.get(behind..).ok_or_else(damaged)?;
    let mut free = 0;
    for row in 0..rows {
        let [address, length, count, distance] = [0, 1, 2, 3].map(|n| number(WORD + (row * 4 + n) * WORD));
        let (mut at, length, distance) = (address?, length?, distance?);
        for _ in 0..count? {
            let end = at
                .checked_add(length)
                .filter(|_| length > 0 && at >= free)
                .ok_or_else(damaged)?;
            let (its, rest) = usize::try_from(length)
                .ok()
                .and_then(|n| bytes.split_at_checked(n))
                .ok_or_else(damaged)?;
            piece(at, its)?;
            (bytes, free) = (rest, end);
            at = at.saturating_add(distance);
        }
    }
    if bytes.is_empty() {
        Ok(())
    } else {
        Err(damaged().into())
    }
}

/// Takes the stream's extents out of the table of a process, which is in ascending order.
pub fn split(table: &mut Vec<Extent>) -> Vec<Extent> {
    table.split_off(table.partition_point(|e| e.vaddr < BASE))
}

/// Whether the extents of a stream hold this many bytes, one after the other.
pub fn is_whole(stream: &[Extent], bytes: u64) -> bool {
    let end = stream.iter().try_fold(BASE, |at, e| (e.vaddr == at).then(|| e.end()));
    end.is_some_and(|end| bytes.checked_next_multiple_of(PAGE) == Some(end - BASE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(stream: &[u8]) -> Result<Vec<(u64, &[u8])>, ImageError> {
        let mut out = Vec::new();
        decode(Path::new("x"), stream, &mut |at, bytes| {
            out.push((at, bytes));
            Ok::<(), ImageError>(())
        })?;
        Ok(out)
    }

    fn stream(spans: &[(u64, u64)]) -> (Vec<u8>, usize) {
        let mut out = encode(spans);
        let places = out.len();
        let bytes = spans
            .iter()
            .flat_map(|(start, end)| (*start..*end).map(|at| at.to_le_bytes()[0]));
        out.extend(bytes);
        (out, places)
    }

    #[test]
    fn a_stream_is_split_as_it_was_made() {
        let mut spans: Vec<(u64, u64)> = (0..1000).map(|row| (5000 + row * 1568, 5000 + row * 1568 + 32)).collect();
        spans.extend([(2_000_000, 2_000_001), (2_000_004, 2_000_036), (2_100_000, 2_100_032)]);
        let (stream, places) = stream(&spans);
        assert_eq!(places, 8 + 3 * 32);
        let found = split(&stream).unwrap();
        let ends: Vec<(u64, u64)> = found.iter().map(|(at, b)| (*at, at + b.len() as u64)).collect();
        assert_eq!(ends, spans);
        assert!(found
            .iter()
            .all(|(at, b)| (*at..).zip(*b).all(|(at, b)| at.to_le_bytes()[0] == *b)));
        assert!(split(&encode(&[])).unwrap().is_empty());
    }

    #[test]
    fn a_stream_that_makes_no_sense_is_refused() {
        let (good, _) = stream(&[(4096, 4100), (4200, 4204), (8192, 9000)]);
        for cut in 0..good.len() {
            assert!(split(&good[..cut]).is_err(), "{cut}");
        }
        let mut longer = good.clone();
        longer.push(0);
        assert!(split(&longer).is_err());
        for at in (0..8 + 64).step_by(8) {
            for value in [0, 1 << 40, u64::MAX] {
                let mut other = good.clone();
                other[at..at + 8].copy_from_slice(&value.to_le_bytes());
                // Another address or distance may be one; never two pieces in one place, or bytes that are not there.
                if let Ok(found) = split(&other) {
                    assert!(found.windows(2).all(|w| w[0].0 + w[0].1.len() as u64 <= w[1].0));
                }
            }
        }
    }

    #[test]
    fn a_stream_has_no_holes() {
        let part = |at: u64, pages: u64| Extent {
            vaddr: BASE + at * PAGE,
            bytes: pages * PAGE,
            chunk: 1,
            page: 0,
        };
        assert!(is_whole(&[part(0, 2), part(2, 1)], 3 * PAGE - 5) && is_whole(&[], 0));
        assert!(!is_whole(&[part(0, 2), part(2, 1)], 2 * PAGE) && !is_whole(&[part(1, 2)], 2 * PAGE));
        assert!(!is_whole(&[part(0, 1), part(2, 1)], 3 * PAGE) && !is_whole(&[part(0, 1)], u64::MAX));
    }
}
