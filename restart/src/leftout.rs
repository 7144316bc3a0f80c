//! What a checkpoint has left out because the program overwrites it (`belay_abi::access`): packed pages get the little
//! that was kept of them, and the library in the program is told which memory has no access rights.

use crate::contents::Contents;
use crate::fail::{Outcome, RestartError};
use crate::tree;
use belay_abi::access::{Dead, Page, MAGIC, MOST_DEAD, MOST_WAY, RING};
use belay_abi::control::Span;
use belay_image::extents::Extent;
use belay_image::model::{Job, LeftOut, Process};
use belay_image::{packed, TableId};
use belay_kernel::direct::Buffer;
use belay_kernel::vm::Memory;
use belay_plugins::PageSource;
use std::collections::HashMap;
use std::mem::offset_of;
use std::path::Path;

/// Longest part of a stream that is read at a time.
const PART: u64 = 1 << 20;

/// The streams of packed pages, by PID.
pub(crate) type Streams = HashMap<i32, Vec<Extent>>;

/// Whether what a process has left out can be: `stream` are the extents of its packed pages.
pub(crate) fn is_plausible(p: &Process, stream: &[Extent]) -> Result<(), &'static str> {
    let Some(left_out) = &p.left_out else {
        return if stream.is_empty() {
            Ok(())
        } else {
            Err("has packed pages, and nothing says so")
        };
    };
    let without_rights = |start: u64, end: u64| p.vmas.iter().any(|v| v.start == start && v.end == end && v.prot == 0);
    let rights = (libc::PROT_READ | libc::PROT_WRITE) as u32;
    let mut dead = left_out.dead.iter();
    if left_out.dead.len() > MOST_DEAD || !dead.all(|(s, e, prot)| *prot == rights && without_rights(*s, *e)) {
        return Err("has left out memory that it does not have");
    }
    if left_out.packed_bytes > packed::MOST_BYTES {
        return Err("has more packed pages than a checkpoint packs");
    }
    if left_out.way.len() > MOST_WAY {
        return Err("has more records of its loops than there is room for");
    }
    match packed::is_whole(stream, left_out.packed_bytes) {
        true => Ok(()),
        false => Err("has packed pages that are not whole"),
    }
}

/// Fills in what is to be filled in, in the processes of `job`, none of which runs yet.
pub(crate) fn fill(job: &Job, streams: &Streams, contents: &Contents<'_>) -> Outcome<()> {
    let with = job.processes.iter().filter(|p| tree::is_live(p));
    with.filter_map(|p| Some((p, p.left_out.as_ref()?)))
        .try_for_each(|(p, left_out)| {
            let memory = Memory::open(p.pid).map_err(|e| fail(p, &e))?;
            unpack(
                p,
                left_out,
                streams.get(&p.pid).map_or(&[], Vec::as_slice),
                (&memory, contents),
            )?;
            tell(p, left_out, &memory)
        })
}

fn fail(p: &Process, e: &dyn std::fmt::Display) -> RestartError {
    RestartError::at(
        "refill",
        format!("process {} ({}): fill in what was packed: {e}", p.pid, p.comm),
    )
}

/// Writes what was kept of packed pages to their places.
fn unpack(p: &Process, left_out: &LeftOut, stream: &[Extent], (memory, contents): (&Memory, &Contents<'_>)) -> Outcome<()> {
    if left_out.packed_bytes == 0 {
        return Ok(());
    }
    let mut bytes = Vec::new();
    let mut buffer = Buffer::default();
    for e in stream {
        let mut at = e.vaddr;
        while at < e.end() {
            let part = e.part(at, e.end().min(at + PART));
            contents.read(&part, &mut buffer).map_err(|e| fail(p, &e))?;
            bytes.extend_from_slice(&buffer);
            at = part.end();
        }
    }
    bytes.truncate(usize::try_from(left_out.packed_bytes).unwrap_or(usize::MAX));
    let name = TableId::Process(p.pid).file_name();
    packed::decode(
        Path::new(&name),
        &bytes,
        &mut |at, bytes| match lies(p, at, bytes.len() as u64) {
            true => memory.write(at, bytes).map_err(|e| fail(p, &e)),
            false => Err(fail(p, &format!("{at:#x} is no memory of it"))),
        },
    )
}

/// Whether `bytes` at `at` lie in one mapping of the process that can be written to.
fn lies(p: &Process, at: u64, bytes: u64) -> bool {
    let vma = p.vmas.get(p.vmas.partition_point(|v| v.end <= at));
    let end = at.checked_add(bytes);
    vma.is_some_and(|v| v.start <= at && end.is_some_and(|end| end <= v.end) && v.prot & 2 != 0)
}

/// Tells the library which memory has no access rights.
fn tell(p: &Process, left_out: &LeftOut, memory: &Memory) -> Outcome<()> {
    let fail = |e: &dyn std::fmt::Display| {
        RestartError::at(
            "refill",
            format!("process {} ({}): tell it what was left out: {e}", p.pid, p.comm),
        )
    };
    let place = |at: usize| left_out.page.saturating_add(at as u64);
    let write = |at: usize, from: &[u8]| memory.write(place(at), from).map_err(|e| fail(&e));
    let mut magic = [0; 8];
    let read = memory.read(place(offset_of!(Page, magic)), &mut magic);
    read.map_err(|e| fail(&e))?;
    if magic != MAGIC.to_ne_bytes() {
        return Err(fail(&"its page is none"));
    }
    for (at, (start, end, prot)) in left_out.dead.iter().enumerate() {
        let dead = Dead {
            span: Span {
                address: *start,
                bytes: end - start,
            },
            prot: u64::from(*prot),
        };
        let words = [dead.span.address, dead.span.bytes, dead.prot].map(u64::to_ne_bytes);
        write(offset_of!(Page, dead) + at * size_of::<Dead>(), &words.concat())?;
    }
    let mut head = [0; 8];
    let read = memory.read(place(offset_of!(Page, head)), &mut head);
    read.map_err(|e| fail(&e))?;
    let head = u64::from_ne_bytes(head);
    // Images of earlier versions have none, and the libraries in them do not look.
    if !left_out.way.is_empty() && left_out.whole_at.checked_sub(head) != Some(left_out.way.len() as u64) {
        return Err(fail(&"its records are not those of its page"));
    }
    let first = usize::try_from(head % RING as u64).unwrap_or_default();
    // To the end of the ring, and on from its beginning.
    let (upper, lower) = left_out.way.split_at(left_out.way.len().min(RING - first));
    for (at, words) in [(first, upper), (0, lower)] {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        write(offset_of!(Page, ring) + at * size_of::<u64>(), &bytes)?;
    }
    write(offset_of!(Page, whole_at), &left_out.whole_at.to_ne_bytes())?;
    let count = u32::try_from(left_out.dead.len()).unwrap_or_default();
    write(offset_of!(Page, dead_count), &count.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::tests::running;
    use belay_image::extents::PAGE;
    use belay_image::model::{Vma, VmaKind};

    /// A stream of so many bytes, all of them stored in the same pages.
    fn stream(bytes: u64) -> Vec<Extent> {
        const PIECE: u64 = 1 << 20;
        let piece = |at| Extent {
            vaddr: packed::BASE + at,
            bytes: PIECE,
            chunk: 1,
            page: 0,
        };
        (0..bytes).step_by(PIECE as usize).map(piece).collect()
    }

    #[test]
    fn a_stream_that_no_checkpoint_makes_is_not_read() {
        let mut p = running(7, 1);
        for (packed_bytes, good) in [(packed::MOST_BYTES, true), (packed::MOST_BYTES + (1 << 20), false)] {
            p.left_out = Some(LeftOut {
                packed_bytes,
                ..LeftOut::default()
            });
            assert_eq!(is_plausible(&p, &stream(packed_bytes)).is_ok(), good, "{packed_bytes}");
        }
    }

    #[test]
    fn pieces_lie_in_memory_that_can_be_written_to() {
        let mut p = running(7, 1);
        let vma = |start: u64, prot| Vma {
            start,
            end: start + PAGE,
            prot,
            kind: VmaKind::Heap,
            flags: Vec::new(),
            guards: Vec::new(),
            key: 0,
        };
        p.vmas = vec![vma(PAGE, 3), vma(2 * PAGE, 1)];
        assert!(lies(&p, PAGE, PAGE) && lies(&p, 2 * PAGE - 8, 8));
        for (at, bytes) in [(0, 8), (PAGE, PAGE + 1), (2 * PAGE, 8), (PAGE, u64::MAX), (u64::MAX, 8)] {
            assert!(!lies(&p, at, bytes), "{at:#x} {bytes:#x}");
        }
    }
}
