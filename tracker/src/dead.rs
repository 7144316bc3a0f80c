//! Memory that a restart has not brought back: it has no access rights until the loop that overwrites it.

use crate::writer::Writer;
use crate::{page, say, Handle, Part, INSIDE, LAST};
use belay_abi::access::{Dead, MOST_DEAD};
use belay_abi::control::Span;
use belay_abi::words::Shared;
use belay_abi::PAGE;
use belay_access::block::Block;
use belay_access::shape::Shape;
use belay_access::trace::Mode;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Gives what a loop overwrites its access rights back.
pub(crate) fn revive<'a>(writer: &Writer, parts: impl Iterator<Item = Part<'a>>) {
    for part in parts.filter(|p| p.mode == Mode::Write) {
        let Ok(dataset) = writer.known(part.dataset) else { continue };
        let Ok(shape) = Shape::new(dataset.address, dataset.elem, dataset.extent, dataset.stride) else {
            continue;
        };
        if !is_missing(writer, shape.range()) {
            continue;
        }
        let whole = shape.whole();
        let block = part.bounds.map_or(Some(whole), |(lo, hi)| Block::new(lo, hi).common(&whole));
        let Some(block) = block else { continue };
        // Pages that adjoin each other, in ascending order.
        let mut run = (0, 0);
        shape.visit(&block, &mut |start, end| {
            let (start, end) = (start & !(PAGE - 1), end.next_multiple_of(PAGE));
            if start > run.1 {
                revive_pages(writer, run);
                run.0 = start;
            }
            run.1 = end;
        });
        revive_pages(writer, run);
    }
}

/// Gives those of these pages that are missing their access rights back.
fn revive_pages(writer: &Writer, (start, end): (u64, u64)) {
    let mut at = 0;
    while at < writer.page.dead_count().load(Ordering::Relaxed) as usize {
        let dead = read(writer, at);
        let (first, behind) = (dead.span.address.max(start), (dead.span.address + dead.span.bytes).min(end));
        if first >= behind {
            at += 1;
            continue;
        }
        give_back(writer, at, &dead, (first, behind));
    }
}

/// Whether anything between these addresses has no access rights.
fn is_missing(writer: &Writer, (start, end): (u64, u64)) -> bool {
    let count = writer.page.dead_count().load(Ordering::Relaxed) as usize;
    let span = |at| read(writer, at).span;
    (0..count).map(span).any(|s| s.address < end && start < s.address + s.bytes)
}

/// Gives the pages from `first` up to `behind` of `dead`, which is in place `at`, their access rights.
fn give_back(writer: &Writer, at: usize, dead: &Dead, (first, behind): (u64, u64)) {
    let end = dead.span.address + dead.span.bytes;
    let part = |from: u64, to: u64| Dead {
        span: Span {
            address: from,
            bytes: to - from,
        },
        prot: dead.prot,
    };
    let count = writer.page.dead_count().load(Ordering::Relaxed) as usize;
    let (below, above) = (part(dead.span.address, first), part(behind, end));
    let rest: [Option<Dead>; 2] = match (below.span.bytes, above.span.bytes) {
        (0, 0) => [None, None],
        (_, 0) => [Some(below), None],
        (0, _) => [Some(above), None],
        // No room for two pieces: all of it.
        _ if count == MOST_DEAD => [None, None],
        _ => [Some(below), Some(above)],
    };
    let (from, to) = match rest {
        [None, None] => (dead.span.address, end),
        _ => (first, behind),
    };
    // SAFETY: memory that the restart has put there without access rights; with them it is what it was. It holds nothing that
    // anybody may have read.
    if unsafe { libc::mprotect(from as *mut libc::c_void, (to - from) as usize, dead.prot as i32) } != 0 {
        let why = io::Error::last_os_error();
        say(
            &mut io::stderr(),
            &format!("give {from:#x} to {to:#x} its access rights back: {why}"),
        );
        std::process::abort();
    }
    match rest {
        [None, None] => {
            write(writer, at, &read(writer, count - 1));
            writer.page.dead_count().store(count as u32 - 1, Ordering::Release);
        }
        [Some(one), None] | [None, Some(one)] => write(writer, at, &one),
        [Some(one), Some(other)] => {
            write(writer, at, &one);
            write(writer, count, &other);
            writer.page.dead_count().store(count as u32 + 1, Ordering::Release);
        }
    }
}

/// Tells that an address is touched, where that is missing. The program does not go on, but ends as it does at any touch of
/// memory without access rights. For the handler of the signal: nothing here allocates.
pub(crate) fn touched(at: u64, _write: bool) -> bool {
    let Some(page) = page::get() else { return false };
    let count = page.dead_count().load(Ordering::Relaxed) as usize;
    let holds = |dead: &Shared<Dead>| {
        let span = dead.get().span;
        at.checked_sub(span.address).is_some_and(|offset| offset < span.bytes)
    };
    // A handler of the program's that changes nothing brings the touch again, and other threads may touch it too.
    static SAID: AtomicBool = AtomicBool::new(false);
    if page.dead().iter().take(count).any(holds) && !SAID.swap(true, Ordering::Relaxed) {
        let mut line = [0; 512];
        let mut rest = &mut line[..];
        // What has no room is not said.
        let _ = tell(page, at, &mut rest);
        let left = rest.len();
        let said = &line[..line.len() - left];
        // SAFETY: so many bytes are there.
        unsafe { libc::write(libc::STDERR_FILENO, said.as_ptr().cast(), said.len()) };
    }
    false
}

/// Writes which dataset is touched, and where.
fn tell(page: Handle, at: u64, to: &mut impl Write) -> io::Result<()> {
    let count = page.dataset_count().load(Ordering::Relaxed) as usize;
    let found = page.datasets().iter().take(count).map(Shared::get).find(|d| {
        let shape = Shape::new(d.address, d.elem, d.extent, d.stride);
        shape.is_ok_and(|s| (s.range().0..s.range().1).contains(&at))
    });
    let (inside, last) = (INSIDE.load(Ordering::Relaxed), LAST.load(Ordering::Relaxed));
    to.write_all(b"belay: dataset ")?;
    to.write_all(found.as_ref().map_or(b"without a name", |d| ends_at_zero(&d.name)))?;
    to.write_all(if inside != 0 {
        b" is touched in loop "
    } else {
        b" is touched after loop "
    })?;
    let site = page.site_name(if inside != 0 { inside } else { last });
    to.write_all(site.as_ref().map_or(b"without a name", |s| ends_at_zero(s)))?;
    writeln!(
        to,
        ", at {at:#x}, where it was overwritten before the restart, so that the checkpoint has left that out: the program has \
         taken another way, or does not declare this touch; restart it from a generation that holds everything (belay list)"
    )
}

/// A name without what fills it up.
fn ends_at_zero(name: &[u8; 32]) -> &[u8] {
    name.split(|b| *b == 0).next().unwrap_or_default()
}

fn read(writer: &Writer, at: usize) -> Dead {
    writer.page.dead()[at].get()
}

fn write(writer: &Writer, at: usize, dead: &Dead) {
    writer.page.dead()[at].set(dead);
}
