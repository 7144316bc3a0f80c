//! Storing pages from outside the process, for what a snapshot child cannot write itself: ranges it did not inherit
//! (MADV_DONTFORK), mappings of deleted files, and whole processes where no child can be made.

use crate::CaptureError;
use belay_abi::inject::BATCH_BYTES;
use belay_image::extents::Extent;
use belay_kernel::vm::Memory;
use belay_storage::session::Session;
use std::io;

const PAGE: usize = 4096;

/// Stores all pages of `start..end`, which the page table says to be there, but, unless `keep_zeros`, those that are
/// all zero; appends their places to `out`. A page that cannot be read is an error.
pub(crate) fn store_all(
    session: &mut Session,
    memory: &Memory,
    (start, end): (u64, u64),
    keep_zeros: bool,
    out: &mut Vec<Extent>,
) -> Result<(), CaptureError> {
    match pages(session, memory, (start, end), keep_zeros, out)? {
        0 => Ok(()),
        n => {
            let step = format!("read the memory at {start:#x} to {end:#x}");
            Err(CaptureError::failed(step, format!("{n} pages cannot be read")))
        }
    }
}

/// Stores those pages of `start..end` that can be read and, unless `keep_zeros`, are not all zero; appends their places
/// to `out`. A page that cannot be read lies behind the end of its file: it holds nothing.
pub(crate) fn store(
    session: &mut Session,
    memory: &Memory,
    range: (u64, u64),
    keep_zeros: bool,
    out: &mut Vec<Extent>,
) -> Result<(), CaptureError> {
    pages(session, memory, range, keep_zeros, out).map(drop)
}

/// Stores pages; how many cannot be read.
fn pages(
    session: &mut Session,
    memory: &Memory,
    (start, end): (u64, u64),
    keep_zeros: bool,
    out: &mut Vec<Extent>,
) -> Result<u64, CaptureError> {
    let mut buf = vec![0u8; BATCH_BYTES as usize];
    let mut at = start;
    let mut without = 0;
    while at < end {
        let want = usize::try_from((end - at).min(BATCH_BYTES)).unwrap_or(PAGE);
        let readable = readable_prefix(memory, at, &mut buf[..want])
            .map_err(|e| CaptureError::system("read memory of a process that has ended meanwhile", e))?;
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
        at += readable as u64;
        if readable < want {
            at += PAGE as u64;
            without += 1;
        }
    }
    Ok(without)
}

/// Reads as many whole pages at `at` as can be read. The memory of a process that has been killed has no pages at all:
/// the kernel says that it ends there, and does so before the process is gone.
fn readable_prefix(memory: &Memory, at: u64, buf: &mut [u8]) -> io::Result<usize> {
    if memory.read(at, buf).is_ok() {
        return Ok(buf.len());
    }
    let mut done = 0;
    for page in buf.chunks_mut(PAGE) {
        match memory.read(at + done as u64, page) {
            Ok(()) => done += PAGE,
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(e),
            Err(_) => break,
        }
    }
    Ok(done)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_gone_is_not_memory_that_holds_nothing() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let stack = |m: &&belay_kernel::proc::Map| m.name == "[stack]";
        let at = loop {
            // Until it has called exec its memory is ours.
            let found = belay_kernel::proc::maps(pid)
                .unwrap()
                .iter()
                .find(stack)
                .map(|m| m.end - PAGE as u64);
            match (belay_kernel::proc::link(pid, "exe").ends_with("sleep"), found) {
                (true, Some(at)) => break at,
                _ => std::thread::yield_now(),
            }
        };
        let memory = Memory::open(pid).unwrap();
        let mut page = [0; PAGE];
        assert_eq!(readable_prefix(&memory, at, &mut page).unwrap(), PAGE);
        assert_eq!(readable_prefix(&memory, PAGE as u64, &mut page).unwrap(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
        let error = readable_prefix(&memory, at, &mut page).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
