//! Storing pages from outside the process, for what a snapshot child cannot write itself: ranges it did not inherit (MADV_DONTFORK), mappings of deleted
//! files, and whole processes where no child can be made.

use crate::CaptureError;
use belay_abi::inject::BATCH_BYTES;
use belay_image::extents::Extent;
use belay_kernel::vm::Memory;
use belay_storage::session::Session;

const PAGE: usize = 4096;

/// Stores those pages of `start..end` that can be read and, unless `keep_zeros`, are not all zero; appends their places to `out`.
pub(crate) fn store(
    session: &mut Session,
    memory: &Memory,
    (start, end): (u64, u64),
    keep_zeros: bool,
    out: &mut Vec<Extent>,
) -> Result<(), CaptureError> {
    let mut buf = vec![0u8; BATCH_BYTES as usize];
    let mut at = start;
    while at < end {
        let want = usize::try_from((end - at).min(BATCH_BYTES)).unwrap_or(PAGE);
        let readable = readable_prefix(memory, at, &mut buf[..want]);
        let mut page = 0;
        while page < readable {
            let run = if keep_zeros {
                (true, readable)
            } else {
                run_of(&buf[..readable], page)
            };
            if run.0 {
                session.store_pages(at + page as u64, &buf[page..run.1], out)?;
            }
            page = run.1;
        }
        // A page that cannot be read lies behind the end of its file: it holds nothing.
        at += if readable == want {
            want as u64
        } else {
            (readable + PAGE) as u64
        };
    }
    Ok(())
}

/// Reads as many whole pages at `at` as can be read.
fn readable_prefix(memory: &Memory, at: u64, buf: &mut [u8]) -> usize {
    if memory.read(at, buf).is_ok() {
        return buf.len();
    }
    let mut done = 0;
    for page in buf.chunks_mut(PAGE) {
        if memory.read(at + done as u64, page).is_err() {
            break;
        }
        done += PAGE;
    }
    done
}

/// The run of pages at `from` that are alike in holding data or not: (data, end).
fn run_of(buf: &[u8], from: usize) -> (bool, usize) {
    let data = |at: usize| buf[at..at + PAGE].iter().any(|b| *b != 0);
    let kind = data(from);
    let mut end = from + PAGE;
    while end < buf.len() && data(end) == kind {
        end += PAGE;
    }
    (kind, end)
}
